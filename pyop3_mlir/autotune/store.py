"""Tuning results on disk, in a :class:`~pyop3_mlir.runtime.cache.Cache`, as compiled modules are.

One file a key, whole or absent; of several processes that tune one loop at the same time the last
one's result stays. The key is the JSON of all that the best schedule depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache as memoise
from importlib import metadata
from pathlib import Path
from typing import Any

import pyop3_mlir.lowering
from pyop3_mlir.autotune.connectivity import connectivity
from pyop3_mlir.autotune.tuner import Measurement, Outcome, TuningResult
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import LoopSpec, Parloop
from pyop3_mlir.runtime.cache import Cache

__all__ = ["TuningKey", "recall", "remember", "tuning_key"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TuningKey:
    """What a tuning result is remembered under.

    Attributes
    ----------
    facts
        Everything that the best schedule depends on; JSON can hold it.
    """

    facts: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Canonical JSON of the facts, the key in the cache."""
        return json.dumps(self.facts, sort_keys=True, separators=(",", ":"))


def tuning_key(loop: Parloop, device: str, schedules: Sequence[Schedule]) -> TuningKey:
    """Make the key of a loop on a device.

    Parameters
    ----------
    loop
        The kernel, the description of the arguments and the connectivity of its maps enter; data
        and names do not.
    device
        Fingerprint of the device: its model, drivers and threads.
    schedules
        What the choice is made among.
    """
    return TuningKey(
        {
            "kernel": loop.kernel.fingerprint(),
            "loop": _describe(loop.spec),
            "connectivity": connectivity(loop),
            "device": device,
            "among": sorted(str(schedule) for schedule in schedules),
            "versions": _versions(),
        }
    )


def _describe(spec: LoopSpec) -> Any:
    arguments = [
        {**asdict(argument), "kind": argument.kind.name, "access": argument.access.name}
        for argument in spec.arguments
    ]
    return {"arguments": arguments, "entities": spec.entities}


@memoise
def _versions() -> dict[str, str]:
    """Versions of all that makes code of a schedule; our own part by content, not by number."""
    digest = hashlib.sha256()
    (root,) = pyop3_mlir.lowering.__path__
    for path in sorted(Path(root).rglob("*.py")):
        digest.update(path.read_bytes())
    return {
        "lowering": digest.hexdigest()[:16],
        **{name: _version(name) for name in ("iree-base-compiler", "xdsl")},
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        # modules come from a bundle
        return "none"


def recall(cache: Cache, key: TuningKey) -> TuningResult | None:
    """Return what is remembered under a key, or None where nothing usable is."""
    value = cache.get(key.text)
    if value is None:
        return None
    try:
        return _result_from_json(json.loads(value))
    except (ValueError, KeyError, TypeError) as error:
        log.warning(
            "tuning result %s is not usable (%r); measuring anew", cache.path(key.text), error
        )
        return None


def remember(cache: Cache, key: TuningKey, result: TuningResult) -> bool:
    """Remember a result; returns whether that worked (a full disk is no failure)."""
    return cache.put(key.text, json.dumps(_result_to_json(result)).encode())


def _result_to_json(result: TuningResult) -> dict[str, Any]:
    return {
        "best": asdict(result.best),
        "elapsed_s": result.elapsed_s,
        "complete": result.complete,
        "measurements": [
            {**asdict(m), "outcome": m.outcome.name, "samples": m.samples}
            for m in result.measurements
        ],
    }


def _result_from_json(content: Any) -> TuningResult:
    measurements = [
        Measurement(
            schedule=Schedule(**entry["schedule"]),
            outcome=Outcome[entry["outcome"]],
            samples=[float(sample) for sample in entry["samples"]],
            build_s=float(entry["build_s"]),
            message=str(entry["message"]),
        )
        for entry in content["measurements"]
    ]
    return TuningResult(
        best=Schedule(**content["best"]),
        measurements=measurements,
        elapsed_s=float(content["elapsed_s"]),
        complete=bool(content["complete"]),
    )

"""Tuning results on disk: one JSON file a key, whole or absent, safe for many processes at once.

A file is written beside its place and renamed, which is atomic, also on the shared file systems of
clusters; of several processes that tune one loop at the same time the last one's result stays. A
file that cannot be read, or is another key's, counts as absent and is replaced by the next result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pyop3_mlir.lowering
from pyop3_mlir.autotune.connectivity import connectivity
from pyop3_mlir.autotune.tuner import Measurement, Outcome, TuningResult
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import LoopSpec, Parloop

__all__ = ["TuningKey", "TuningStore", "tuning_key"]

log = logging.getLogger(__name__)

_FORMAT = 1


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
    def digest(self) -> str:
        """Hexadecimal digest of the facts: the file's name."""
        text = json.dumps(self.facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:40]


def tuning_key(
    loop: Parloop, device: str, strategies: Sequence[str], batchings: Sequence[str]
) -> TuningKey:
    """Make the key of a loop on a device.

    Parameters
    ----------
    loop
        The kernel, the description of the arguments and the connectivity of its maps enter; data
        and names do not.
    device
        Fingerprint of the device: its model, drivers and threads.
    strategies, batchings
        What the choice is made among.
    """
    facts = {
        "kernel": loop.kernel.fingerprint(),
        "loop": _describe(loop.spec),
        "connectivity": connectivity(loop),
        "device": device,
        "among": [sorted(strategies), sorted(batchings)],
        "versions": _versions(),
    }
    # as it will be when it comes back from the file: lists for tuples
    return TuningKey(json.loads(json.dumps(facts)))


def _describe(spec: LoopSpec) -> Any:
    arguments = [
        {**asdict(argument), "kind": argument.kind.name, "access": argument.access.name}
        for argument in spec.arguments
    ]
    return {"arguments": arguments, "entities": spec.entities}


@cache
def _versions() -> dict[str, str]:
    """Versions of all that makes code of a schedule; our own part by content, not by number."""
    digest = hashlib.sha256()
    (root,) = pyop3_mlir.lowering.__path__
    for path in sorted(Path(root).rglob("*.py")):
        digest.update(path.read_bytes())
    return {
        "lowering": digest.hexdigest()[:16],
        **{name: metadata.version(name) for name in ("iree-base-compiler", "xdsl")},
    }


class TuningStore:
    """The directory of tuning results.

    Parameters
    ----------
    directory
        Made when the first result is written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: TuningKey) -> Path:
        """Return the file of a key."""
        return self.directory / f"{key.digest}.json"

    def get(self, key: TuningKey) -> TuningResult | None:
        """Return what was remembered, or None."""
        path = self.path(key)
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != _FORMAT or content["key"] != key.facts:
                raise ValueError("it belongs to another key or version")
            return _result_from_json(content["result"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("tuning result %s is not usable (%s); it will be replaced", path, error)
            return None

    def put(self, key: TuningKey, result: TuningResult) -> bool:
        """Remember a result; returns whether that worked: a full disk is no failure."""
        content = {"format": _FORMAT, "key": key.facts, "result": _result_to_json(result)}
        data = json.dumps(content, indent=1).encode()
        temporary: str | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(temporary).replace(self.path(key))
        except OSError as error:
            log.warning("cannot remember a tuning result in %s: %s", self.directory, error)
            if temporary is not None:
                with suppress(OSError):
                    Path(temporary).unlink(missing_ok=True)
            return False
        return True

    def __iter__(self) -> Iterator[tuple[Path, TuningResult | None]]:
        """Go through all files; None for those that are not usable."""
        for path in sorted(self.directory.glob("*.json")):
            try:
                content = json.loads(path.read_bytes())
                if TuningKey(content["key"]).digest != path.stem:
                    raise ValueError
                yield path, _result_from_json(content["result"])
            except (OSError, ValueError, KeyError, TypeError):
                yield path, None

    def clear(self) -> int:
        """Remove all files, also those that a killed process left; returns how many there were."""
        count = 0
        for pattern in ("*.json", "*.tmp"):
            for path in self.directory.glob(pattern):
                with suppress(FileNotFoundError):
                    path.unlink()
                    count += 1
        return count


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

"""Modules that were compiled ahead of time, for machines that cannot compile.

A bundle is a directory: ``bundle.json`` says which modules there are, for which loops and targets,
and each module is a file beside it. :mod:`pyop3_mlir.bundle` makes one; the setting ``bundle``
(``PYOP3_MLIR_BUNDLE``) has the engine look there first. Nothing here needs more than numpy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pyop3_mlir.errors import OptionError
from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import LoopSpec
from pyop3_mlir.runtime.devices import Device, Target

__all__ = ["FORMAT", "Bundle", "BundleTarget", "active", "can_compile", "loop_key", "module_key"]

FORMAT = 1
INDEX = "bundle.json"


def can_compile() -> bool:
    """Whether this process can compile what it does not find."""
    for name in ("iree.compiler", "xdsl"):
        try:
            if importlib.util.find_spec(name) is None:
                return False
        except ImportError:
            return False
    return True


def loop_key(kernel: LocalKernel, spec: LoopSpec, device: Device) -> str:
    """What the schedules of a loop are listed under: its meaning, and the kind of device."""
    kind = device.spec.partition(":")[0]
    threads = "many" if device.threads > 1 else str(device.threads)
    return _digest(kernel.fingerprint(), spec.arguments, spec.entities, kind, threads)


def module_key(kernel: LocalKernel, spec: LoopSpec, schedule: Schedule, device: Device) -> str:
    """What a module is listed under."""
    return _digest(loop_key(kernel, spec, device), schedule)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


@dataclass(frozen=True)
class BundleTarget:
    """What some modules of a bundle were compiled for.

    Attributes
    ----------
    backend, name
        As in :class:`~pyop3_mlir.runtime.devices.Target`.
    features
        Instruction set extensions that a CPU has to have.
    machine
        Architecture of a CPU (``x86_64``); empty for GPUs.
    """

    backend: str
    name: str
    features: tuple[str, ...] = ()
    machine: str = ""

    @classmethod
    def of(cls, target: Target) -> BundleTarget:
        """Return that of a target."""
        machine = platform.machine() if target.backend == "llvm-cpu" else ""
        return cls(target.backend, target.name, tuple(sorted(target.features)), machine)

    def suits(self, target: Target) -> int | None:
        """How well code for this target runs on another one: the more the better; None: not at all.

        CUDA's code for an architecture runs on all later ones, as the driver compiles it; a CPU
        has to have every extension; other GPUs have to be the same.
        """
        if self.backend != target.backend:
            return None
        if self.backend == "cuda":
            ours, theirs = (int(name.removeprefix("sm_")) for name in (self.name, target.name))
            return ours if ours <= theirs else None
        if self.backend == "llvm-cpu":
            fits = self.machine == platform.machine() and set(self.features) <= target.features
            return len(self.features) if fits else None
        return 0 if self.name == target.name else None


@dataclass
class Bundle:
    """What ``bundle.json`` says.

    Attributes
    ----------
    root
        The directory.
    targets
        What was compiled for.
    modules
        For each key the file of the module for each of the targets, by their numbers.
    loops
        For each key the schedules that there are modules for, for each of the targets.
    """

    root: Path
    targets: list[BundleTarget] = field(default_factory=list)
    modules: dict[str, dict[int, str]] = field(default_factory=dict)
    loops: dict[str, dict[int, list[Schedule]]] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path) -> Bundle:
        """Read a bundle.

        Raises
        ------
        OptionError
            Where there is none, or one of another version of the package or of IREE.
        """
        try:
            content = json.loads((root / INDEX).read_text(encoding="utf-8"))
            made = content["format"], *(content["versions"][name] for name in _versions())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"setting bundle: {root} holds no bundle ({error}); make one with "
                "`python -m pyop3_mlir bundle`"
            ) from error
        here = FORMAT, *_versions().values()
        if made != here:
            names = ("format", *_versions())
            text = ", ".join(
                f"{name} {a} (here {b})"
                for name, a, b in zip(names, made, here, strict=True)
                if a != b
            )
            raise OptionError(f"setting bundle: {root} was made with {text}; make it anew")
        return cls(
            root,
            [BundleTarget(**{**t, "features": tuple(t["features"])}) for t in content["targets"]],
            {key: _by_number(files) for key, files in content["modules"].items()},
            {
                key: {n: [Schedule(**s) for s in listed] for n, listed in _by_number(of).items()}
                for key, of in content["loops"].items()
            },
        )

    def write(self) -> None:
        """Write ``bundle.json``, after the modules."""
        content = {
            "format": FORMAT,
            "versions": _versions(),
            "targets": [asdict(target) for target in self.targets],
            "modules": self.modules,
            "loops": {
                key: {n: [asdict(s) for s in listed] for n, listed in of.items()}
                for key, of in self.loops.items()
            },
        }
        (self.root / INDEX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def add(self, key: str, target: int, content: bytes) -> None:
        """Write a module, under its digest."""
        name = hashlib.sha256(content).hexdigest()[:40] + ".vmfb"
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(content)
        self.modules.setdefault(key, {})[target] = name

    def module(self, key: str, device: Device) -> bytes | None:
        """The module of that key for a device; None where there is none.

        Raises
        ------
        OptionError
            Where its file is missing or damaged.
        """
        number = self._best(self.modules.get(key, {}), device)
        if number is None:
            return None
        path = self.root / self.modules[key][number]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise OptionError(
                f"setting bundle: {path} cannot be read ({error.strerror})"
            ) from error
        if hashlib.sha256(content).hexdigest()[:40] != path.stem:
            raise OptionError(f"setting bundle: {path} is damaged; make the bundle anew")
        return content

    def schedules(self, key: str, device: Device) -> Sequence[Schedule]:
        """The schedules that a loop has modules for on a device, that to take unmeasured first."""
        of = self.loops.get(key, {})
        number = self._best(of, device)
        return [] if number is None else of[number]

    def _best(self, numbers: dict[int, Any], device: Device) -> int | None:
        ranks = {n: self.targets[n].suits(device.target) for n in numbers}
        suitable = {n: rank for n, rank in ranks.items() if rank is not None}
        return max(suitable, key=lambda n: suitable[n]) if suitable else None

    def __str__(self) -> str:
        names = ", ".join(f"{t.backend} {t.name}" for t in self.targets)
        return f"the bundle {self.root}, made for {names}"


def _by_number(of: dict[str, Any]) -> dict[int, Any]:
    # JSON's keys are strings
    return {int(number): value for number, value in of.items()}


def _versions() -> dict[str, str]:
    from pyop3_mlir import __version__

    try:
        runtime = version("iree-base-runtime")
    except PackageNotFoundError:
        runtime = "unknown"
    return {"pyop3_mlir": __version__, "iree-base-runtime": runtime}


@lru_cache(maxsize=8)
def _opened(root: Path) -> Bundle:
    return Bundle.open(root)


def active() -> Bundle | None:
    """The bundle that the setting ``bundle`` names; None where it is not set.

    Raises
    ------
    OptionError
        As :meth:`Bundle.open`.
    """
    from pyop3_mlir.options import Options

    root = Options.resolve().bundle
    return None if root is None else _opened(root)

"""Collect the modules that a program needs, for machines that cannot compile.

:func:`record` watches the loops that a program runs, :meth:`Recorder.write` compiles them for the
targets that were named. See :mod:`pyop3_mlir.runtime.bundle` for what comes out.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyop3_mlir import engine
from pyop3_mlir.autotune.candidates import (
    DeviceTraits,
    KernelStatistics,
    candidates,
    legal_strategies,
)
from pyop3_mlir.engine import Module
from pyop3_mlir.errors import CompilationError, OptionError, UnsupportedLoopError
from pyop3_mlir.lowering.schedule import BATCHINGS, Schedule
from pyop3_mlir.parloop import Parloop
from pyop3_mlir.runtime.bundle import Bundle, BundleTarget, loop_key, module_key
from pyop3_mlir.runtime.devices import Device, cpu_device, get_device, offline_device
from pyop3_mlir.runtime.subview import SUBVIEW_KEY, subview_module

__all__ = ["Recorder", "record", "run_script", "target_device"]


def target_device(text: str) -> Device:
    """The device to compile for that a ``--target`` option names.

    Parameters
    ----------
    text
        ``cpu``, ``cpu:N`` or any other device that is here, or one that need not be:
        ``cpu/x86-64-v3`` (a level of the architecture), ``cuda/sm_80``, ``hip/gfx90a``,
        ``vulkan/ampere``.

    Raises
    ------
    OptionError
        Where the text means nothing.
    DeviceError
        Where a device that has to be here is not.
    """
    kind, slash, architecture = text.partition("/")
    if not slash:
        return get_device(text)
    if kind.partition(":")[0] == "cpu":
        return cpu_device(kind, architecture)
    if kind not in ("cuda", "hip", "vulkan") or not architecture:
        raise OptionError(
            f"target {text!r}: expected a device that is here, or cpu/LEVEL, cuda/sm_NN, hip/gfxNN "
            "or vulkan/NAME"
        )
    return offline_device(kind, architecture)


@dataclass
class _Needs:
    """What a loop needs on one target: keys of modules, for each schedule."""

    name: str
    schedules: dict[Schedule, list[str]] = field(default_factory=dict)


@dataclass
class Recorder:
    """Notes which modules loops need on some targets.

    Parameters
    ----------
    targets
        What to compile for.
    """

    targets: Sequence[Device]
    modules: dict[tuple[str, int], Module] = field(default_factory=dict)
    loops: dict[tuple[str, int], _Needs] = field(default_factory=dict)

    def add(self, parloop: Parloop, chosen: Schedule | None = None, kind: str = "") -> None:
        """Note a loop.

        Parameters
        ----------
        parloop
            The loop; only what its modules depend on is kept.
        chosen
            The schedule that was chosen for it on this machine.
        kind
            Kind of the device that it was chosen for.
        """
        for number, device in enumerate(self.targets):
            key = loop_key(parloop.kernel, parloop.spec, device)
            needs = self.loops.setdefault((key, number), _Needs(parloop.name))
            here = chosen if device.spec.partition(":")[0] == kind else None
            for schedule in _schedules(parloop, device, here):
                try:
                    modules = engine.modules_for(parloop, schedule, device)
                except UnsupportedLoopError:
                    continue
                # a larger mesh may have blocks where this one has too few cells for them
                if schedule.strategy == "in_order" and not parloop.order_dependent:
                    modules.append(Module(parloop.kernel, parloop.spec, schedule, device))
                keys = needs.schedules.setdefault(schedule, [])
                for module in modules:
                    keys.append(module_key(module.kernel, module.spec, module.schedule, device))
                    self.modules[keys[-1], number] = module

    def write(self, root: Path, progress: Callable[[str], None] = lambda text: None) -> Bundle:
        """Compile everything and write the bundle.

        Parameters
        ----------
        root
            Directory, made where it does not exist.
        progress
            Called with what is being compiled.

        Raises
        ------
        CompilationError
            Where a loop has no schedule left that compiles for a target.
        """
        bundle = Bundle(root, [BundleTarget.of(device.target) for device in self.targets])
        for number, device in enumerate(self.targets):
            bundle.add(SUBVIEW_KEY, number, subview_module(device))
        errors: dict[tuple[str, int], str] = {}
        for (key, number), module in self.modules.items():
            progress(f"{module.spec.name}: {module.schedule} for {self.targets[number].name}")
            try:
                bundle.add(key, number, module.build())
            except (CompilationError, UnsupportedLoopError) as error:
                errors[key, number] = str(error)
        for (key, number), needs in self.loops.items():
            failed = {
                schedule: [errors[k, number] for k in keys if (k, number) in errors]
                for schedule, keys in needs.schedules.items()
            }
            whole = [schedule for schedule, reasons in failed.items() if not reasons]
            if not whole:
                reasons = [text for listed in failed.values() for text in listed]
                raise CompilationError(
                    f"loop {needs.name}: no schedule compiles for {self.targets[number].name}; "
                    f"{reasons[0] if reasons else 'none can run it'}"
                )
            bundle.loops.setdefault(key, {})[number] = whole
        bundle.write()
        return bundle


def _schedules(parloop: Parloop, device: Device, chosen: Schedule | None) -> list[Schedule]:
    """The schedules worth having on a device, that to take unmeasured first."""
    traits = DeviceTraits.of(device)
    legal = legal_strategies(parloop, traits)
    strategies = [
        name
        for name, reason in legal.items()
        if reason is None and engine.impossible(parloop, name, device) is None
    ]
    batchings = ("blocked",) if parloop.order_dependent else BATCHINGS
    statistics = KernelStatistics.of(parloop.kernel)
    listed = candidates(statistics, traits, strategies, batchings)
    if traits.gpu:
        # blocked first: a thread does a cell in one kernel; there are few
        listed.sort(key=lambda schedule: schedule.batching != "blocked")
        listed = [replace(schedule, width=1) for schedule in listed]
    else:
        # the others are shapes of blocks, which this machine cannot choose among for another
        listed = listed[:1]
    return list(dict.fromkeys([*([chosen] if chosen else []), *listed]))


@contextmanager
def record(targets: Sequence[Device]) -> Iterator[Recorder]:
    """Note every loop that is compiled within the ``with`` block."""
    recorder = Recorder(targets)

    def observe(parloop: Parloop, schedule: Schedule, device: Device) -> None:
        recorder.add(parloop, schedule, device.spec.partition(":")[0])

    engine.observers.append(observe)
    try:
        yield recorder
    finally:
        engine.observers.remove(observe)


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script, with the back end installed where there is anything to install it under."""
    specs = (importlib.util.find_spec(name) for name in ("pyop2", "pyop3"))
    # a directory of that name on the path is no package
    if any(spec is not None and spec.origin is not None for spec in specs):
        from pyop3_mlir import frontends

        frontends.run_script(script, arguments)
        return
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")

"""Running loops: a :class:`~pyop3_mlir.parloop.Parloop` compiled and bound to its arrays.

:func:`compile` chooses a schedule, lowers and compiles (or finds the module in the cache), plans
the scatter, and returns a :class:`BoundLoop`, which runs in place each time it is called::

    loop = engine.compile(parloop)
    loop()               # all owned entities
    loop(start, stop)    # a range of the iteration set
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pyop3_mlir.kernels.dense
import pyop3_mlir.kernels.program
import pyop3_mlir.lowering
from pyop3_mlir import planning
from pyop3_mlir.autotune.candidates import DeviceTraits, legal_strategies
from pyop3_mlir.autotune.choose import Choice, choose
from pyop3_mlir.autotune.tuner import Runner
from pyop3_mlir.errors import CompilationError, UnsupportedLoopError
from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.lowering.interface import local_bytes, reduction_name, segmented_arguments
from pyop3_mlir.lowering.schedule import BATCHINGS, WORKGROUP, Schedule
from pyop3_mlir.lowering.workgroups import CONFIGURABLE, resize_workgroups
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import WRITE, Argument, IterationSet, Kind, LoopSpec, Parloop
from pyop3_mlir.runtime.bundle import active, can_compile, loop_key, module_key
from pyop3_mlir.runtime.cache import Cache
from pyop3_mlir.runtime.compile import compile_module
from pyop3_mlir.runtime.devices import STACK_LIMIT, Device, get_device
from pyop3_mlir.runtime.executable import BoundFunction, Buffer, Executable, aligned_empty
from pyop3_mlir.runtime.residency import Resident, Traffic, latest, traffic

__all__ = [
    "BoundLoop",
    "Module",
    "Scratch",
    "choose_schedule",
    "compile",
    "executable_for",
    "fitting",
    "impossible",
    "modules_for",
    "run",
]

log = logging.getLogger(__name__)

_executables: dict[tuple[Any, ...], Executable] = {}

observers: list[Callable[[Parloop, Schedule, Device], None]] = []
"""Called with each loop that is about to be compiled, but for those that are only measured."""

_MEASURED = "measured by the tuner"


@cache
def _lowering_digest() -> str:
    """Identifies the code that lowers loops: what an older version compiled must not be reused."""
    digest = hashlib.sha256(version("xdsl").encode())
    roots = [Path(p) for p in pyop3_mlir.lowering.__path__]
    files = sorted(f for root in roots for f in root.rglob("*.py"))
    # of the kernels' own modules, those that lowering uses
    own = (pyop3_mlir.kernels.dense.__file__, pyop3_mlir.kernels.program.__file__)
    for file in (*map(Path, own), *files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Module:
    """What one compiled module is made from; holds no data, so every mesh and process shares it.

    Attributes
    ----------
    kernel, spec
        The loop.
    schedule
        How it is to run.
    device
        Where it is to run.
    """

    kernel: LocalKernel
    spec: LoopSpec
    schedule: Schedule
    device: Device

    def __post_init__(self) -> None:
        if self.device.is_host:
            schedule = replace(self.schedule, workgroup=WORKGROUP)
        else:
            # a thread does one cell, whatever the width of a CPU's blocks
            schedule = replace(self.schedule, width=1)
        object.__setattr__(self, "schedule", schedule)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What loaded modules are found by in this process."""
        device = self.device
        return (
            self.kernel.fingerprint(),
            self.spec,
            self.schedule,
            device.threads,
            device.target.fingerprint,
            device.spec,
        )

    @property
    def key(self) -> str:
        """Digest of what the code depends on: the same in all processes, on all equal machines."""
        # the name of a loop, which enters no comparisons, is in what repr shows
        fingerprint, spec, *others = self.identity[:5]
        digest = _lowering_digest() if can_compile() else None
        text = repr((fingerprint, replace(spec, name=""), *others, digest))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def loaded(self) -> bool:
        """Whether this process has it already."""
        return self.identity in _executables

    def executable(self) -> Executable:
        """The module ready to run; raises as :func:`executable_for`."""
        return _executables.get(self.identity) or self.load(self.build())

    def build(self) -> bytes:
        """The compiled module: bundled, from the cache on disk, or new.

        Raises as :func:`executable_for`.
        """
        bundle = active()
        if bundle is not None:
            key = module_key(self.kernel, self.spec, self.schedule, self.device)
            found = bundle.module(key, self.device)
            if found is not None:
                return found
        return compile_module(
            self.lower,
            self.device,
            # what cannot be compiled cannot be looked up either: the key tells xDSL's version
            cache=Cache.default("modules") if can_compile() else None,
            key=self.key if can_compile() else "none",
            name=self.spec.name,
            configure=self._configure(),
        )

    def _configure(self) -> Callable[[str], str] | None:
        """What changes the dispatches that IREE makes; in blocked batching all are ours."""
        # to SPIR-V IREE takes other pipelines, which do not let us choose
        if self.schedule.batching == "blocked" or self.device.target.backend not in CONFIGURABLE:
            return None
        return partial(resize_workgroups, threads=self.schedule.workgroup)

    def lower(self) -> str:
        """The text that is compiled."""
        # where modules come from a bundle, xDSL need not be there
        from pyop3_mlir.lowering.pipeline import lower

        kind = self.device.spec.partition(":")[0]
        return lower(self.kernel, self.spec, self.schedule, self.device.threads, kind)

    def load(self, content: bytes) -> Executable:
        """Make what :meth:`build` gave, here or in another process, ready to run."""
        found = Executable(content, self.device, name=self.spec.name)
        _executables[self.identity] = found
        return found


def executable_for(
    kernel: LocalKernel, spec: LoopSpec, schedule: Schedule, device: Device
) -> Executable:
    """The compiled module of a loop, from memory, from the cache on disk, or new.

    Parameters
    ----------
    kernel, spec
        The loop, without data: one module serves every mesh.
    schedule, device
        How and where it is to run.

    Raises
    ------
    UnsupportedLoopError
        Where the kernel cannot be lowered.
    CompilationError
        Where IREE refuses the module.
    """
    return Module(kernel, spec, schedule, device).executable()


def modules_for(parloop: Parloop, schedule: Schedule, device: Device) -> list[Module]:
    """The modules that a loop with this schedule will run, over its core and its other entities.

    Raises
    ------
    UnsupportedLoopError
        Where the schedule cannot run the loop.
    """
    schedule = fitting(schedule, parloop)
    found = _runner_of(schedule, parloop, device).modules(parloop, schedule, device)
    return list({module.identity: module for module in found}.values())


def _runner_of(
    schedule: Schedule, parloop: Parloop, device: Device
) -> type[_InOrder | _Colour | _Segmented | _Atomic]:
    """What runs a schedule; raises where it cannot run this loop on this device."""
    runners: dict[str, type[_InOrder | _Colour | _Segmented | _Atomic]] = {
        "in_order": _InOrder,
        "colour": _Colour,
        "segmented": _Segmented,
        "atomic": _Atomic,
    }
    obstacle = impossible(parloop, schedule.strategy, device)
    if obstacle is None and schedule.batching == "flat" and parloop.order_dependent:
        obstacle = "entities read what others wrote (RW), so they cannot all be gathered first"
    if obstacle is not None:
        raise UnsupportedLoopError(
            f"loop {parloop.name}: {schedule} is not available on {device}: {obstacle}"
        )
    return runners[schedule.strategy]


class BoundLoop:
    """A loop that is compiled, planned and bound to its arrays.

    Attributes
    ----------
    parloop
        The loop.
    schedule
        How it runs.
    reason
        Why it runs so.
    traffic
        Bytes that were copied for it between the host and the device, those of compiling included;
        none on the CPU.
    """

    def __init__(
        self, parloop: Parloop, schedule: Schedule, device: Device, reason: str = "given"
    ) -> None:
        if reason != _MEASURED:
            for observe in observers:
                observe(parloop, schedule, device)
        schedule = fitting(schedule, parloop)
        self.parloop = parloop
        self.schedule = schedule
        self.device = device
        self.reason = reason
        self.traffic = Traffic()
        self._moves = not device.is_host
        before = traffic(device.spec)
        self._runner = _runner_of(schedule, parloop, device)(parloop, schedule, device)
        self.traffic += traffic(device.spec) - before

    def __call__(self, start: int = 0, stop: int | None = None) -> None:
        """Run iterations ``[start, stop)``; all owned ones where not given.

        Raises
        ------
        ValueError
            Where the range is not within the iteration set.
        DeviceError
            Where the device fails; arrays on the host are then as they were.
        """
        self.submit(start, stop)
        self.wait()

    def submit(self, start: int = 0, stop: int | None = None) -> None:
        """As a call, but on a GPU without waiting for it: :meth:`wait` does.

        What was submitted before, of this loop or another one on the device, is done first.
        """
        iterations = self.parloop.iteration_set
        if stop is None:
            stop = iterations.owned
            assert stop is not None
        if not 0 <= start <= stop <= iterations.size:
            raise ValueError(
                f"loop {self.parloop.name}: iterations {start} to {stop} are not within "
                f"{iterations.name}, which has {iterations.size}"
            )
        if start >= stop:
            return
        if not self._moves:
            self._runner.submit(start, stop)
            return
        before = traffic(self.device.spec)
        self._runner.submit(start, stop)
        self.traffic += traffic(self.device.spec) - before

    def wait(self) -> None:
        """Wait for what was submitted.

        Raises
        ------
        DeviceError
            Where the device has failed.
        """
        if self._moves:
            self._runner.wait()


class _InOrder:
    """One dispatch over all cells."""

    @staticmethod
    def modules(parloop: Parloop, schedule: Schedule, device: Device) -> Iterator[Module]:
        yield Module(parloop.kernel, parloop.spec, schedule, device)

    def __init__(self, parloop: Parloop, schedule: Schedule, device: Device) -> None:
        (module,) = self.modules(parloop, schedule, device)
        self._call = _bind(module.executable(), parloop, parloop.iteration_set.entities)

    def submit(self, start: int, stop: int) -> None:
        self._call.launch(start, stop)

    def wait(self) -> None:
        self._call.wait()


class _Atomic:
    """One dispatch over all cells at once, which adds to shared targets atomically."""

    @staticmethod
    def modules(parloop: Parloop, schedule: Schedule, device: Device) -> Iterator[Module]:
        for start, stop in _parts(parloop.iteration_set):
            loop = planning.order_free(parloop, stop, start)
            yield Module(loop.kernel, loop.spec, schedule, device)

    def __init__(self, parloop: Parloop, schedule: Schedule, device: Device) -> None:
        self._parloop, self._schedule, self._device = parloop, schedule, device
        self._plans: dict[tuple[int, int], BoundFunction] = {}
        self._plan(0, parloop.iteration_set.owned or 0)

    def _plan(self, start: int, stop: int) -> BoundFunction:
        if (start, stop) not in self._plans:
            loop = planning.order_free(self._parloop, stop, start)
            module = Module(loop.kernel, loop.spec, self._schedule, self._device)
            self._plans[start, stop] = _bind(module.executable(), loop, loop.iteration_set.entities)
        return self._plans[start, stop]

    def submit(self, start: int, stop: int) -> None:
        self._plan(start, stop).launch(start, stop)

    def wait(self) -> None:
        _wait(self._plans.values())


class _Colour:
    """One dispatch for each colour; cells of a colour share no target."""

    @staticmethod
    def modules(parloop: Parloop, schedule: Schedule, device: Device) -> Iterator[Module]:
        for start, stop in _parts(parloop.iteration_set):
            yield _Colour._step(parloop, schedule, device, start, stop)[-1]

    @staticmethod
    def _step(
        parloop: Parloop, schedule: Schedule, device: Device, start: int, stop: int
    ) -> tuple[Parloop, planning.Colouring, Module]:
        """The loop over a range, its colours, and the module that runs it."""
        parloop = planning.order_free(parloop, stop, start)
        colouring = planning.colour_loop(parloop, stop, start)
        spec = replace(parloop.spec, entities=colouring.order.dtype.str)
        schedule = fitting(schedule, parloop, len(colouring.order))
        return parloop, colouring, Module(parloop.kernel, spec, schedule, device)

    def __init__(self, parloop: Parloop, schedule: Schedule, device: Device) -> None:
        self._arguments = parloop, schedule, device
        self._plans: dict[tuple[int, int], tuple[BoundFunction, list[int]]] = {}
        self._plan(0, parloop.iteration_set.owned or 0)

    def _plan(self, start: int, stop: int) -> tuple[BoundFunction, list[int]]:
        if (start, stop) not in self._plans:
            parloop, colouring, module = self._step(*self._arguments, start, stop)
            call = _bind(module.executable(), parloop, colouring.order)
            self._plans[start, stop] = call, [int(offset) for offset in colouring.offsets]
        return self._plans[start, stop]

    def submit(self, start: int, stop: int) -> None:
        call, offsets = self._plan(start, stop)
        call.upload()
        for first, last in itertools.pairwise(offsets):
            call.submit(first, last)
        call.download()

    def wait(self) -> None:
        _wait(call for call, _ in self._plans.values())


class _Segmented:
    """One dispatch writes the contributions of each cell, another lets each target sum its own."""

    @staticmethod
    def modules(parloop: Parloop, schedule: Schedule, device: Device) -> Iterator[Module]:
        loop = _by_target(parloop, device)
        if _competing(loop):
            loop = planning.order_free(loop)
        yield Module(loop.kernel, loop.spec, schedule, device)

    def __init__(self, parloop: Parloop, schedule: Schedule, device: Device) -> None:
        loop = _by_target(parloop, device)
        self._loop = loop
        # the last of several arguments that store to one array is known for a range only
        self._competing = _competing(loop)
        if self._competing:
            loop = planning.order_free(loop)
        self._executable = Module(loop.kernel, loop.spec, schedule, device).executable()
        self._numbers = segmented_arguments(loop.spec)
        size = loop.iteration_set.size
        self._contributions = [
            Buffer.scratch(size * argument.slots, argument.buffer.dtype, device)
            for argument in (loop.arguments[k] for k in self._numbers)
        ]
        self._fill = self._bind(loop)
        self._plans: dict[tuple[int, int], tuple[BoundFunction, list[tuple[Any, int]]]] = {}

    def _bind(self, loop: Parloop) -> BoundFunction:
        entities = loop.iteration_set.entities
        return _bind(self._executable, loop, entities, self._contributions)

    def _plan(self, start: int, stop: int) -> tuple[BoundFunction, list[tuple[Any, int]]]:
        loop, fill = self._loop, self._fill
        if self._competing:
            loop = planning.order_free(loop, stop, start)
            fill = self._bind(loop)
        calls = []
        for k, contributions in zip(self._numbers, self._contributions, strict=True):
            argument = loop.arguments[k]
            offsets, numbers = self._segments(argument, start, stop)
            buffer = argument.buffer.reshape(-1)
            arrays: list[npt.NDArray[Any] | Buffer] = [offsets, numbers, contributions, buffer]
            call = self._executable.bind(reduction_name(k), arrays, constant=[0, 1])
            calls.append((call, len(offsets) - 1))
        return fill, calls

    def _segments(
        self, argument: Argument, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Offsets by target, and the contributions of each, as rows of ``components`` scalars."""
        arity = 1 if argument.table is None else argument.table.arity
        if stop * arity > np.iinfo(np.int32).max:
            raise UnsupportedLoopError(
                f"loop {self._loop.name}, argument {argument.name}: more contributions than "
                "int32 can number"
            )
        if argument.table is None:
            # a global: one target, to which every iteration contributes
            offsets, numbers = np.array([0, stop - start]), np.arange(start, stop)
        else:
            entities = self._loop.iteration_set.entities
            plan = planning.segments(argument.table, stop, entities, start)
            offsets, numbers = plan.offsets, plan.contributions
            if start:
                numbers = numbers + start * arity
        return offsets.astype(np.int32, copy=False), numbers.astype(np.int32, copy=False)

    def submit(self, start: int, stop: int) -> None:
        key = (start, stop)
        if key not in self._plans:
            self._plans[key] = self._plan(start, stop)
        fill, calls = self._plans[key]
        fill.launch(start, stop)
        for call, targets in calls:
            call.launch(0, targets)

    def wait(self) -> None:
        functions = [self._fill]
        for fill, calls in self._plans.values():
            functions += [fill, *(call for call, _ in calls)]
        _wait(functions)


def _wait(functions: Iterable[BoundFunction]) -> None:
    """Wait for what was submitted of these functions of a loop."""
    first, *others = functions
    first.wait(*others)


def _parts(iterations: IterationSet) -> list[tuple[int, int]]:
    """The ranges that a loop is usually run over: all owned entities, or core and then the rest."""
    core, owned = iterations.core or 0, iterations.owned or 0
    return list(
        dict.fromkeys([(0, owned), *((a, b) for a, b in ((0, core), (core, owned)) if a < b)])
    )


def _by_target(parloop: Parloop, device: Device) -> Parloop:
    """The loop with each scalar that it changes as part of one target of one argument.

    Rows that overlap are no targets that can be worked on one by one, and entities that are visited
    twice are no rows that cells can store to at the same time: both become scalars of a table.
    """
    iterations = parloop.iteration_set
    arguments = []
    for argument in parloop.arguments:
        assert argument.stride is not None
        if argument.access.writes and argument.slots:
            overlap = argument.kind is Kind.INDIRECT and argument.stride < argument.components
            shared = argument.kind is Kind.DIRECT and iterations.repeats and device.threads != 1
            if overlap or shared:
                argument = planning.as_scalars(argument, iterations.extent)
        arguments.append(argument)
    if all(new is old for new, old in zip(arguments, parloop.arguments, strict=True)):
        return parloop
    return Parloop(parloop.kernel, iterations, arguments, parloop.name)


def _competing(parloop: Parloop) -> bool:
    """Whether several arguments store to one array, so that the last of all of them wins."""
    numbers = [
        spec.buffer
        for argument, spec in zip(parloop.arguments, parloop.spec.arguments, strict=True)
        if argument.access is WRITE and argument.slots
    ]
    return len(set(numbers)) < len(numbers)


# Measured on one neo-Hookean cell (P2 tetrahedra), where 16 take twice as long.
_ROWS_OF_ONE = 50


def fitting(schedule: Schedule, parloop: Parloop, iterations: int | None = None) -> Schedule:
    """The schedule that a loop can have: a block may not be larger than the set of iterations.

    Where entities have to see what those before them stored, a block is one entity. The values of
    a block have to fit on the stack.

    Raises
    ------
    UnsupportedLoopError
        Where those of one entity do not.
    """
    if iterations is None:
        iterations = parloop.iteration_set.size
    if schedule.width > 1 and (iterations < schedule.width or parloop.order_dependent):
        # without cells side by side it is many rows that fill a vector
        schedule = replace(schedule, width=1, tile=max(schedule.tile, _ROWS_OF_ONE))
    if schedule.batching == "blocked":
        while (needed := local_bytes(parloop.kernel, schedule.width)) > STACK_LIMIT:
            if schedule.width == 1:
                raise UnsupportedLoopError(
                    f"loop {parloop.name}: the kernel's temporaries take {needed} bytes, the stack "
                    f"has {STACK_LIMIT}"
                )
            schedule = replace(schedule, width=schedule.width // 2)
    return schedule


def _bind(
    executable: Executable,
    parloop: Parloop,
    entities: npt.NDArray[np.int32] | None,
    contributions: Sequence[Buffer] = (),
) -> BoundFunction:
    """Bind ``@loop`` to a loop's arrays: entities, tables, buffers, contributions, all flat."""
    tables = [] if entities is None else [entities]
    tables += [array.reshape(-1) for array in parloop.index_arrays]
    buffers = [buffer.reshape(-1) for buffer in parloop.buffers]
    constant = range(len(tables))
    return executable.bind("loop", [*tables, *buffers, *contributions], constant)


def _zeros(size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A new array of zeros that devices on the host can use in place."""
    array = aligned_empty(size, dtype)
    array[...] = 0
    return array


def impossible(parloop: Parloop, strategy: str, device: Device) -> str | None:
    """Why a strategy cannot run a loop on a device; None where it can."""
    if strategy != "in_order" and parloop.order_dependent:
        return "entities read what others wrote (RW): order matters"
    reduces = any(a.access.writes and a.kind is Kind.GLOBAL for a in parloop.arguments)
    if strategy == "colour" and reduces and device.threads != 1:
        return "every entity contributes to a global, so each would need a colour of its own"
    if strategy == "atomic":
        return legal_strategies(parloop, DeviceTraits.of(device))["atomic"]
    return None


def compile(  # noqa: A001
    parloop: Parloop,
    device: str | Device | None = None,
    schedule: Schedule | None = None,
    *,
    options: Options | None = None,
) -> BoundLoop:
    """Compile a loop, plan its scatter and bind it to its arrays.

    Parameters
    ----------
    parloop
        The loop; its arrays are used in place where they are aligned to 64 bytes.
    device
        Where to run; the setting ``device`` where not given.
    schedule
        How to run; chosen (see :mod:`pyop3_mlir.autotune`) where not given.
    options
        Settings; looked up where not given.

    Raises
    ------
    UnsupportedLoopError
        Where the loop cannot be lowered.
    CompilationError
        Where IREE refuses the module.
    DeviceError
        Where the device is not there.
    """
    options = options or Options.resolve()
    if not isinstance(device, Device):
        device = get_device(device or options.device)
    if schedule is not None:
        return BoundLoop(parloop, schedule, device)
    choice = choose_schedule(parloop, device, options)
    return BoundLoop(parloop, choice.schedule, device, choice.reason)


def choose_schedule(
    parloop: Parloop,
    device: Device,
    options: Options,
    build: Callable[[Schedule], Runner] | None = None,
    sample_clock: Callable[[], float] | None = None,
) -> Choice:
    """The schedule of a loop on a device, by the setting ``tune``.

    ``build`` and ``sample_clock`` are for measurements in which other processes take part; see
    :func:`~pyop3_mlir.autotune.choose.choose`.
    """
    only = None
    bundle = active()
    if bundle is not None and not can_compile():
        only = bundle.schedules(loop_key(parloop.kernel, parloop.spec, device), device)
        if not only:
            raise CompilationError(
                f"loop {parloop.name}: {bundle}, has no modules for it on {device}, and they "
                "cannot be compiled here; make the bundle anew with a program that runs this loop"
            )
    legal = legal_strategies(parloop, DeviceTraits.of(device))
    strategies = [
        name
        for name, reason in legal.items()
        if reason is None and impossible(parloop, name, device) is None
    ]
    return choose(
        parloop,
        build or Scratch(parloop, device).runner,
        options=options,
        device=device,
        strategies=strategies,
        batchings=("blocked",) if parloop.order_dependent else BATCHINGS,
        sample_clock=sample_clock,
        only=only,
    )


@dataclass
class Scratch:
    """The loop on copies of what it writes, for measurements that leave the data as it was."""

    parloop: Parloop
    device: Device

    def __post_init__(self) -> None:
        copies: dict[int, npt.NDArray[Any]] = {}
        arguments: list[Argument] = []
        # what is measured on a device is the loop, not the transfers of arrays
        moves = not self.device.is_host
        for argument in self.parloop.arguments:
            if argument.access.writes or moves:
                address = argument.buffer.ctypes.data
                if address not in copies:
                    copy = _zeros(argument.buffer.size, argument.buffer.dtype)
                    copies[address] = copy.reshape(argument.buffer.shape)
                argument = replace(argument, buffer=copies[address])
            arguments.append(argument)
        self.originals = [b for b in self.parloop.buffers if b.ctypes.data in copies]
        self.copies = [copies[b.ctypes.data] for b in self.originals]
        self.residents = [Resident(copy) for copy in self.copies] if moves else []
        self.loop = Parloop(
            self.parloop.kernel, self.parloop.iteration_set, arguments, self.parloop.name
        )

    def runner(self, schedule: Schedule) -> Runner:
        """Compile for a schedule; the result runs the loop once and returns what it wrote."""
        bound = BoundLoop(self.loop, schedule, self.device, _MEASURED)
        fresh = False

        def run() -> Sequence[npt.NDArray[Any]]:
            nonlocal fresh
            if fresh:
                bound()
                return self.copies
            # the first run is compared with that of other schedules, later ones are only timed
            for copy, original in zip(self.copies, self.originals, strict=True):
                copy[...] = latest(original, self.device)
            for resident in self.residents:
                resident.host_changed()
            bound()
            for resident in self.residents:
                resident.refresh_host()
            fresh = True
            return self.copies

        return run


def run(parloop: Parloop, device: str | None = None, schedule: Schedule | None = None) -> None:
    """Compile a loop and run it once."""
    compile(parloop, device, schedule)()

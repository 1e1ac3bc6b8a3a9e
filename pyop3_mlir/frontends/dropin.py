"""Run PyOP2's loops on the engine, under an unmodified program.

:func:`attach` replaces one method, ``pyop2.parloop.Parloop._compute``; halo exchanges, reductions,
local to global maps and data versions stay PyOP2's. A loop that cannot be read, lowered or compiled
runs through the original method, and says once why. :func:`detach` puts everything back.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError, VerificationError
from pyop3_mlir.frontends.stack import Stack
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import Parloop

if TYPE_CHECKING:
    from pyop3_mlir.engine import BoundLoop
    from pyop3_mlir.frontends.pyop2_devices import DeviceData
    from pyop3_mlir.frontends.pyop2_resident import ResidentData
    from pyop3_mlir.frontends.verify import Trial

__all__ = ["Backend", "Entry", "VerificationError", "attach", "attached", "detach"]

log = logging.getLogger(__name__)

HOT_CALLS = 8
HOT_SECONDS = 1.0
"""A loop is hot, and is tuned, after this many calls that took this long together."""


def choosing(options: Options, measure: bool) -> Options:
    """The settings by which a loop's schedule is chosen, before it is hot or now by measuring."""
    if measure:
        # who asks for it by name wants it measured
        return replace(options, tune="force") if options.tune == "off" else options
    if options.tune == "cached":
        # what is remembered is used, nothing is measured before the loop is hot
        return replace(options, tune_budget=0.0)
    return replace(options, tune="off")


@dataclass
class Entry:
    """A line of the report: all loops with one kernel.

    Attributes
    ----------
    name
        Of the kernel.
    calls
        How often such a loop ran, by either engine.
    lowered
        Of them, by this one.
    strategy
        The schedule, or empty.
    reason
        Why this schedule, or why the original code ran.
    core, waiting, owned
        Seconds in entities that need no halo, from there until the halo had arrived, and in the
        others; both engines together, compilation not included. A program of one process has core
        entities only.
    """

    name: str
    calls: int = 0
    lowered: int = 0
    strategy: str = ""
    reason: str = ""
    core: float = 0.0
    waiting: float = 0.0
    owned: float = 0.0

    @property
    def seconds(self) -> float:
        """Time in the loop's body."""
        return self.core + self.owned

    def as_dict(self) -> dict[str, Any]:
        """For ``--report``."""
        return {
            "name": self.name,
            "calls": self.calls,
            "lowered": self.lowered,
            "strategy": self.strategy,
            "reason": self.reason,
            "seconds": self.seconds,
            "core": self.core,
            "waiting": self.waiting,
            "owned": self.owned,
        }


@dataclass(eq=False)
class _Call:
    """What runs a loop: over all entities, or over the core and over the others."""

    main: BoundLoop
    border: BoundLoop | None = None

    def __call__(self, start: int, stop: int) -> None:
        if self.border is None:
            self.main(start, stop)
            return
        core = self.main.parloop.iteration_set.size
        self.main(min(start, core), min(stop, core))
        self.border(max(start, core) - core, max(stop, core) - core)


@dataclass(eq=False)
class _Bound:
    """A loop bound to its data, kept with the PyOP2 loop it was made for."""

    backend: Backend | None
    entry: Entry
    data: tuple[Any, ...]
    lgmaps: tuple[int, ...]
    keep: tuple[Any, ...] = ()
    reading: Any = None
    call: _Call | None = None
    error: Exception | None = None
    trial: Trial | None = None
    calls: int = 0
    seconds: float = 0.0
    left: float = 0.0
    tuned: bool = False

    def release(self) -> None:
        """Let go of the data and of what runs on it."""
        self.backend = self.reading = self.call = self.error = self.trial = None
        self.data = self.keep = ()


class Backend:
    """The engine as PyOP2 sees it.

    Parameters
    ----------
    options
        Settings for all loops.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.entries: dict[str, Entry] = {}
        self.original: Any = None
        self._importers: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._failed: set[str] = set()
        self._bound: weakref.WeakSet[_Bound] = weakref.WeakSet()
        self._plans: weakref.WeakSet[Any] = weakref.WeakSet()
        self._devices: DeviceData | ResidentData | None = None
        self._resident: ResidentData | None = None

    # -----------------------------------------------------------------------------------------
    # in and out

    def attach(self) -> None:
        """Replace PyOP2's method."""
        import sys

        import pyop2  # noqa: F401

        module = sys.modules["pyop2.parloop"]
        parloop: Any = module.Parloop  # pyop2.parloop itself is hidden by a function of that name
        self.original = parloop._compute
        backend = self

        @functools.wraps(self.original)
        def _compute(loop: Any, part: Any) -> None:
            backend.compute(loop, part)

        self._replace(parloop, "_compute", _compute)
        self._align()
        from pyop3_mlir.frontends import tsfc
        from pyop3_mlir.frontends.pyop2_devices import DeviceData
        from pyop3_mlir.frontends.pyop2_resident import ResidentData
        from pyop3_mlir.parallel import world

        if world() is None:
            self._devices = DeviceData.of(self.options)
        # PETSc's memory on devices is not used where there are halos
        if self._devices is None:
            self._devices = self._resident = ResidentData.of(self.options)
        if self._devices is not None:
            self._devices.attach(self._replace_raw)

        importer = tsfc.side_channel(self._replace)
        if importer is not None:
            self._importers.append(importer)

    def detach(self) -> None:
        """Put back what was replaced, and forget the loops, but not what was counted of them."""
        if self._devices is not None:
            self._devices.detach()
        while self._undo:
            self._undo.pop()()
        for bound in self._bound:
            bound.release()
        for plan in self._plans:
            plan.schedules.pop(id(self), None)
            for key in [key for key in plan.bindings if key[0] == id(self)]:
                del plan.bindings[key]
        self._bound.clear()
        self._plans.clear()

    def _replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute until :meth:`detach`; returns what it was."""
        own = name in vars(owner)
        old = getattr(owner, name)

        def undo() -> None:
            if own:
                setattr(owner, name, old)
            else:
                delattr(owner, name)

        setattr(owner, name, value)
        self._undo.append(undo)
        return old

    def _align(self) -> None:
        """Let new Dats have memory that devices on the host share without copies."""
        from pyop2.types.data_carrier import EmptyDataMixin

        from pyop3_mlir.runtime.executable import aligned_empty

        def _data(carrier: Any) -> npt.NDArray[Any]:
            if not carrier._is_allocated:
                array = aligned_empty(carrier.shape, carrier._dtype)
                array[...] = 0
                carrier._numpy_data = array
            found: npt.NDArray[Any] = carrier._numpy_data
            return found

        property_ = functools.cached_property(_data)
        property_.__set_name__(EmptyDataMixin, "_data")
        self._replace_raw(EmptyDataMixin, "_data", property_)

    def _replace_raw(self, owner: Any, name: str, value: Any) -> None:
        old = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, old))

    # -----------------------------------------------------------------------------------------
    # loops

    def compute(self, loop: Any, part: Any) -> None:
        """What ``Parloop._compute`` does while attached."""
        bound = loop.__dict__.get("_pyop3_mlir")
        first = part is loop.iterset.core_part
        if bound is not None and not first and not part.size and loop.comm.size == 1:
            # without other processes there is no owned part, and this is called all the same
            self._tune_if_hot(bound, loop)
            if bound.reading is not None:
                bound.reading.finish()
            return
        if bound is None or (first and (bound.backend is not self or not self._fits(bound, loop))):
            bound = self._prepare(loop)
            loop.__dict__["_pyop3_mlir"] = bound
        if bound.reading is not None and not bound.reading.current():
            self._renew(bound, loop)
        entry = bound.entry
        if first:
            entry.calls += 1
            entry.lowered += bound.call is not None
            bound.calls += 1
        else:
            entry.waiting += time.perf_counter() - bound.left
            # not before the halo is there: what is read may not change meanwhile
            self._tune_if_hot(bound, loop)
        started = time.perf_counter()
        if bound.call is None:
            if self._devices is not None:
                self._devices.to_host(loop)
            self.original(loop, part)
        elif self.options.verify:
            self._verify(bound, loop, part)
        else:
            self._run(bound, loop, part)
        bound.left = time.perf_counter()
        seconds = bound.left - started
        bound.seconds += seconds
        if first:
            entry.core += seconds
        else:
            entry.owned += seconds

    def _run(self, bound: _Bound, loop: Any, part: Any) -> None:
        from petsc4py import PETSc

        resident = self._resident if loop.comm.size > 1 else None
        with loop._compute_event():
            PETSc.Log.logFlops(part.size * loop.num_flops)
            reading = bound.reading
            start, stop = reading.range(part)
            if part is loop.iterset.core_part:
                bound.error = None
            if resident is not None:
                bound.error, resident.error = bound.error or resident.error, None
            if start < stop and bound.error is None:
                try:
                    reading.run(bound.call, start, stop, loop)
                except Exception as error:
                    if not reading.shares and resident is None:
                        raise
                    # other processes wait for what this one has: they have to know
                    bound.error = error
            if part is not loop.iterset.core_part:
                failed, bound.error = bound.error, None
                if resident is not None and not reading.shares:
                    from pyop3_mlir.parallel import raise_together

                    raise_together(loop.comm, failed)
                reading.finish(failed)

    def _fits(self, bound: _Bound, loop: Any) -> bool:
        """Whether the data is still what the loop was bound to."""
        for old, argument in zip(bound.data, loop.arguments, strict=True):
            if old is not None and old is not argument.data:
                return False
        return not bound.lgmaps or bound.lgmaps == _lgmaps(loop)[0]

    def _renew(self, bound: _Bound, loop: Any) -> None:
        """Bind a loop again where memory has moved. That may be so on one process only."""
        from pyop3_mlir.engine import BoundLoop

        reading = bound.reading = bound.reading.plan.bind(loop, self._devices)
        call: Any = bound.call

        def again(old: BoundLoop | None, parloop: Any) -> Any:
            if old is None:
                return None
            return BoundLoop(parloop, old.schedule, old.device, old.reason)

        bound.call = _Call(again(call.main, reading.parloop), again(call.border, reading.border))

    def _prepare(self, loop: Any) -> _Bound:
        data = _carriers(loop)
        lgmaps, keep = _lgmaps(loop)
        name = loop.local_kernel.name
        entry = self._entry(loop)
        bound = _Bound(self, entry, data, lgmaps, keep)
        self._bound.add(bound)
        reason = ""
        try:
            # fails on all processes or on none: the original code is compiled collectively too
            bound.reading, bound.call = self._bind(loop, data, lgmaps)
            entry.strategy = str(bound.call.main.schedule)
            entry.reason = bound.call.main.reason
        except Exception as error:
            reason = str(error) or type(error).__name__
            if not isinstance(error, UnsupportedLoopError):
                log.debug("loop %s", name, exc_info=True)
                reason = f"{type(error).__name__}: {reason}"
        if reason:
            bound.call = None
            bound.reading = None
            entry.reason = reason.splitlines()[0]
            line = f"{entry.name}: {entry.reason}"
            if line not in self._failed:
                self._failed.add(line)
                log.warning("loop %s runs through PyOP2: %s", name, entry.reason)
        return bound

    def _bind(self, loop: Any, data: Sequence[Any], lgmaps: tuple[int, ...]) -> tuple[Any, _Call]:
        """The loop on its data: bound before, scheduled before, or new. Collective."""
        from pyop3_mlir.frontends.pyop2 import plan_for
        from pyop3_mlir.parallel import Proposal

        key = (id(self), *map(id, data), lgmaps)
        plan: Any = None
        reading: Any = None
        known: Any = None

        def propose() -> Proposal:
            nonlocal plan, reading, known
            plan = plan_for(loop, self._importers)
            reading, known, _ = plan.bindings.get(key, (None, None, None))
            if reading is not None and reading.current():
                main = known.main
                return Proposal(reading.parloop, main.schedule, main.reason, main)
            reading, known = plan.bind(loop, self._devices), None
            # on other data than before no new choice is made
            _, schedule, reason = plan.schedules.get(id(self), (None, None, ""))
            return self._proposal(reading, schedule, reason)

        main = self._compile(loop, propose)
        border = self._compile_border(loop, reading, main, known)
        if known is not None and known.main is main and known.border is border:
            return reading, known
        call = _Call(main, border)
        self._plans.add(plan)
        plan.schedules[id(self)] = (self, main.schedule, main.reason)

        def forget(_: Any) -> None:
            plan.bindings.pop(key, None)

        # kept as long as all of the data lives
        references = [weakref.ref(d, forget) for d in data if d is not None]
        plan.bindings[key] = (reading, call, references)
        return reading, call

    def _entry(self, loop: Any) -> Entry:
        name = loop.local_kernel.name
        key = f"{name} {loop.local_kernel._immutable_cache_key[:8]}"
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = Entry(name)
        return found

    def _proposal(self, reading: Any, schedule: Any = None, reason: str = "") -> Any:
        from pyop3_mlir.parallel import Proposal

        # batches of element matrices are written over and over
        strategy = "in_order" if reading.elements else self._instead(reading.parloop)
        return Proposal(reading.parloop, schedule, reason, strategy=strategy)

    def _instead(self, parloop: Parloop) -> str | None:
        """What overrides the setting where its strategy cannot run a loop: not PyOP2 then."""
        from pyop3_mlir import parallel
        from pyop3_mlir.autotune.candidates import DeviceTraits, legal_strategies
        from pyop3_mlir.runtime.devices import get_device

        wanted = self.options.strategy
        if wanted == "auto":
            return None
        device = get_device(parallel.place(self.options.device))
        obstacle = legal_strategies(parloop, DeviceTraits.of(device))[wanted]
        if obstacle is None:
            return None
        log.info("loop %s cannot run by strategy %s: %s", parloop.name, wanted, obstacle)
        return "auto"

    def _compile(self, loop: Any, propose: Callable[[], Any], tune: bool = False) -> Any:
        """Compile a loop, or take what is there already. Collective."""
        from pyop3_mlir import parallel

        return parallel.compile(loop.comm, propose, options=choosing(self.options, tune))

    def _compile_border(self, loop: Any, reading: Any, main: Any, known: Any = None) -> Any:
        """Compile what is left of a loop of which ``main`` runs the core only. Collective."""
        from pyop3_mlir.parallel import Proposal

        if reading.border is None:
            return None
        bound = None if known is None else known.border
        proposal = Proposal(reading.border, main.schedule, main.reason, bound)
        return self._compile(loop, lambda: proposal)

    def _tune_if_hot(self, bound: _Bound, loop: Any) -> None:
        """Choose the schedule of a loop by measurement where it has run often and long."""
        if bound.call is None or bound.tuned or bound.calls <= HOT_CALLS:
            return
        hot = bound.seconds > HOT_SECONDS
        if loop.comm.size > 1:
            from mpi4py import MPI

            # all at the same call, so that none waits for another's measurements twice
            if bound.calls & (bound.calls - 1):
                return
            hot = loop.comm.allreduce(hot, op=MPI.LOR)
        if not hot or self.options.tune == "off":
            return
        try:
            self.tune(loop)
        except Exception as error:
            log.warning("loop %s is not tuned: %s", bound.entry.name, error)

    def tune(self, loop: Any, schedule: Any = None) -> Any:
        """Choose the schedule of a loop that has run, without waiting for it to be hot.

        Parameters
        ----------
        loop
            A ``pyop2.parloop.Parloop``.
        schedule
            What it is to run with from now on; chosen by measurement where not given.

        Returns
        -------
        BoundLoop
            What runs it.

        Raises
        ------
        UnsupportedLoopError
            Where PyOP2 runs the loop; the message says why.
        """
        bound: _Bound = loop.__dict__["_pyop3_mlir"]
        bound.tuned = True
        if bound.reading is None:
            raise UnsupportedLoopError(f"loop {bound.entry.name}: {bound.entry.reason}")
        reading = bound.reading
        compiled = self._compile(loop, lambda: self._proposal(reading, schedule), tune=True)
        reading.plan.schedules[id(self)] = (self, compiled.schedule, compiled.reason)
        bound.call = _Call(compiled, self._compile_border(loop, reading, compiled))
        bound.entry.strategy = str(compiled.schedule)
        bound.entry.reason = compiled.reason
        return compiled

    # -----------------------------------------------------------------------------------------
    # verification

    def _verify(self, bound: _Bound, loop: Any, part: Any) -> None:
        """Run both engines on the same data, compare, and keep PyOP2's result."""
        from pyop3_mlir.frontends.verify import Trial

        if part is loop.iterset.core_part:
            bound.trial = Trial(bound.entry.name, loop, self.options)
        assert bound.trial is not None
        bound.trial.run(
            bound.reading,
            part,
            lambda: self._run(bound, loop, part),
            lambda: self.original(loop, part),
        )


def _carriers(loop: Any) -> tuple[Any, ...]:
    """What a loop is bound to: its data, but not the globals, whose values are copied."""
    from pyop2.parloop import GlobalParloopArg

    return tuple(None if isinstance(a, GlobalParloopArg) else a.data for a in loop.arguments)


def _lgmaps(loop: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Identities of the local to global maps in force, and the maps, to be kept alive."""
    if not loop._has_mats:
        return (), ()
    found = []
    for argument in loop.arguments:
        if hasattr(argument, "lgmaps"):
            for block in argument.data:
                if block.handle.getType() not in ("python", "is"):
                    found += list(block.handle.getLGMap())
    return tuple(m.handle for m in found), tuple(found)


# ---------------------------------------------------------------------------------------------

_backends: Stack[Backend] = Stack("PyOP2")


def attach(options: Options | None = None) -> Backend:
    """Run PyOP2's loops on the engine from now on; calls nest.

    Parameters
    ----------
    options
        Settings; looked up where not given.

    Raises
    ------
    ImportError
        Where PyOP2 is not installed.
    """
    return _backends.attach(Backend(options or Options.resolve()))


def detach(backend: Backend | None = None) -> None:
    """Undo the latest :func:`attach`, or that of ``backend``.

    Raises
    ------
    NotAttachedError
        Where it is not attached.
    """
    _backends.detach(backend)


def attached() -> Backend | None:
    """The back end in force, or None."""
    return _backends.current

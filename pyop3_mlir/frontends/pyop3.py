"""Run pyop3's loops on the engine, under an unmodified program.

:func:`attach` replaces one method, ``InstructionExecutionContext.compile``: what it returns is
pyop3's own executor with the compiled C function exchanged, so that halo exchanges, buffer states
and the replacement of arguments stay pyop3's, and nothing of ours gets into pyop3's caches. A loop
that cannot be read, lowered or compiled runs pyop3's own code, and says once why.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.frontends.dropin import HOT_CALLS, HOT_SECONDS, Entry, choosing
from pyop3_mlir.frontends.petsc import nonzero_state
from pyop3_mlir.frontends.pyop3_devices import on_host
from pyop3_mlir.frontends.pyop3_kernels import code_key, kernel_key
from pyop3_mlir.frontends.pyop3_names import Names, choose_loopy, find_names
from pyop3_mlir.frontends.pyop3_plan import Plan, Reading, make_plan
from pyop3_mlir.frontends.pyop3_read import Reader
from pyop3_mlir.frontends.stack import Stack
from pyop3_mlir.frontends.verify import compare_argument
from pyop3_mlir.kernels.loopy import Intent
from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.options import Options
from pyop3_mlir.runtime.cache import Cache

__all__ = ["Backend", "attach", "detach"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

HOT_ASSIGNMENT_SECONDS = 0.1
"""An assignment is lowered once it has been called a few times that took this long together."""

_CARRIED = "_pyop3_mlir"
"""Attribute by which an object of pyop3 carries one of ours."""

REPLACED_LIMIT = 3
"""Sets of replaced buffers with which a loop is kept ready to run."""


@dataclass(eq=False)
class _Loop:
    """What is known of a loop of pyop3, whatever its buffers; kept with pyop3's executable."""

    backend: Backend
    entry: Entry
    calls: int = 0
    seconds: float = 0.0
    deferred: str = ""
    plans: tuple[Plan, ...] | None = None
    places: dict[Any, int] = field(default_factory=dict)
    watched: tuple[tuple[Any, int], ...] = ()
    failed: set[Any] = field(default_factory=set)


@dataclass(eq=False)
class _Bound:
    """A loop on data: readings, and what runs each of them."""

    handles: tuple[Any, ...]
    plans: tuple[Plan, ...] | None
    readings: tuple[Reading, ...]
    calls: list[Any]
    patterns: tuple[int, ...]
    count: int = 0
    seconds: float = 0.0
    tuned: bool = False

    def current(self) -> bool:
        """Whether matrices are where they were, with the maps and patterns that they had."""
        for reading in self.readings:
            for mat, maps in reading.lgmaps:
                if [m.handle for m in mat.getLGMap()] != [m.handle for m in maps]:
                    return False
            if not all(matrix.current() for matrix in reading.matrices):
                return False
        return self.patterns == _patterns(self.readings)


class Backend:
    """The engine as pyop3 sees it.

    Parameters
    ----------
    options
        Settings for all loops.

    Attributes
    ----------
    entries
        Lines of the report.
    patience
        Calls of an assignment that pyop3 runs before it counts as hot and is lowered.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.entries: dict[str, Entry] = {}
        self.patience = HOT_CALLS
        self.names: Names | None = None
        self.executor_class: Any = None
        self._undo: list[Callable[[], None]] = []
        self._said: set[str] = set()
        self._importers: list[Any] = []
        self._gem: dict[str, bytes] = {}
        self._schedules: dict[Any, tuple[Any, str]] = {}
        # objects of pyop3 that carry ours, by number
        self._carriers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    # -----------------------------------------------------------------------------------------
    # in and out

    def attach(self) -> None:
        """Replace pyop3's method.

        Raises
        ------
        ImportError
            Where pyop3 is not installed.
        Pyop3MlirError
            Where the installed pyop3 lacks something that is needed.
        """
        names = self.names = find_names()
        self.executor_class = _executor_class(names)
        context: Any = names.InstructionExecutionContext
        original = vars(context)["compile"]
        if isinstance(original, _Compile):
            # attached twice: the later one goes first
            original = original.original
        self._replace(context, "compile", _Compile(self, original))

        from pyop3_mlir.frontends import tsfc

        if tsfc.watch(self._replace, self._keep_gem):
            self._importers.append(self._import_gem)

    def _keep_gem(self, unit: Any, packed: bytes) -> None:
        """Keep the GEM of a kernel, under a digest of its loopy form, in memory and on disk.

        Firedrake has stored the loopy form on disk where it meets the same form again; then the
        GEM is found there as well.
        """
        key = kernel_key(unit)
        self._gem[key] = packed
        Cache.default("gem").put(key, packed)

    def _import_gem(self, unit: Any, intents: Sequence[Intent]) -> LocalKernel | None:
        from pyop3_mlir.frontends.tsfc import import_packed

        key = kernel_key(unit)
        packed = self._gem.get(key) or Cache.default("gem").get(key)
        if packed is None:
            return None
        self._gem[key] = packed
        return import_packed(unit.default_entrypoint.name, packed, intents)

    def detach(self) -> None:
        """Put back what was replaced."""
        self._importers.clear()
        while self._undo:
            self._undo.pop()()
        for carrier in list(self._carriers.values()):
            if carrier.__dict__.get(_CARRIED) and carrier.__dict__[_CARRIED].backend is self:
                del carrier.__dict__[_CARRIED]
        self._carriers.clear()

    def _carry(self, carrier: Any, ours: Any) -> Any:
        """Keep something of ours with an object of pyop3, until :meth:`detach`."""
        carrier.__dict__[_CARRIED] = ours
        self._carriers[id(carrier)] = carrier
        return ours

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        old = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, old))

    def executor(self, context: Any, original: Any) -> Any:
        """Our executor for a context, given pyop3's."""
        found = context.__dict__.get(_CARRIED)
        if found is None or found.backend is not self or found.original is not original:
            ours = self.executor_class(
                self,
                original,
                context.root_insn,
                context.compiler_parameters,
                context._preprocessed,
            )
            found = self._carry(context, ours)
        return found

    # -----------------------------------------------------------------------------------------
    # loops

    def execute(self, executor: Any, handles: tuple[Any, ...]) -> None:
        """What runs instead of the C function; ``handles`` are arrays and matrices."""
        loop = self._loop(executor)
        entry = loop.entry
        loop.calls += 1
        entry.calls += 1
        bound = self._find(executor, loop, handles)
        if bound is None:
            started = time.perf_counter()
            executor.run_original(handles)
            seconds = time.perf_counter() - started
            entry.core += seconds
            # the first call compiles
            loop.seconds += seconds if loop.calls > 1 else 0.0
            return
        entry.lowered += 1
        bound.count += 1
        if not bound.tuned and bound.count > HOT_CALLS:
            self._tune(executor, loop, bound)
        if self.options.verify:
            self._verify(executor, loop, bound)
        else:
            self._run(loop, bound)

    def _run(self, loop: _Loop, bound: _Bound) -> None:
        started = time.perf_counter()
        for reading, call in zip(bound.readings, bound.calls, strict=True):
            reading.run(call)
        seconds = time.perf_counter() - started
        bound.seconds += seconds
        loop.entry.core += seconds

    def _loop(self, executor: Any) -> _Loop:
        executable = executor.original.executable
        found: _Loop | None = executable.__dict__.get(_CARRIED)
        if found is None or found.backend is not self:
            found = self._carry(executable, self._describe(executor))
        return found

    def _describe(self, executor: Any) -> _Loop:
        """A loop that is seen for the first time: its line of the report, and whether to wait."""
        assert self.names is not None
        calls = executor.called
        if not calls:
            entry = self.entries.setdefault("assignment", Entry("assignment"))
            return _Loop(self, entry, deferred="assignments are left to pyop3 until they are hot")
        name = ", ".join(dict.fromkeys(call.name for call in calls))
        key = " ".join([name, *(code_key(call.function.code)[:8] for call in calls)])
        return _Loop(self, self.entries.setdefault(key, Entry(name)))

    def _find(self, executor: Any, loop: _Loop, handles: tuple[Any, ...]) -> _Bound | None:
        """The loop bound to these arrays; None where it runs through pyop3."""
        assert self.names is not None
        device = self.names.get_current_device()
        if device in loop.failed:
            return None
        if loop.deferred:
            if not self._is_hot(executor, loop):
                loop.entry.reason = loop.entry.reason or loop.deferred
                return None
            loop.deferred = ""
        if any(buffer.state != state for buffer, state in loop.watched):
            # a map has changed
            loop.plans = None
        bound: _Bound | None = executor.bound.get(device)
        if bound is not None and bound.plans is loop.plans and bound.current():
            return bound
        bound = executor.bound[device] = self._prepare(executor, loop, handles)
        if bound is None:
            loop.failed.add(device)
        return bound

    def _is_hot(self, executor: Any, loop: _Loop) -> bool:
        """Whether an assignment is worth compiling."""
        if loop.calls <= self.patience:
            return False
        hot = loop.seconds > HOT_ASSIGNMENT_SECONDS or not self.patience
        if executor.comm.size > 1:
            from mpi4py import MPI

            if self.patience and loop.calls & (loop.calls - 1):
                return False
            return bool(executor.comm.allreduce(hot, op=MPI.LOR))
        return hot

    def _prepare(self, executor: Any, loop: _Loop, handles: tuple[Any, ...]) -> _Bound | None:
        assert self.names is not None
        entry = loop.entry
        bound = None
        reason = ""
        try:
            # tables are read on the host, wherever the loop is to run
            with self.names.offloading(self.names.HOST_DEVICE):
                readings = self._agree(executor.comm, lambda: self._read(executor, loop, handles))
            calls = [self._compile(executor.comm, reading) for reading in readings]
            bound = _Bound(handles, loop.plans, readings, calls, _patterns(readings))
        except Exception as error:
            # on all processes, or on none: the original code is compiled collectively too
            reason = str(error) or type(error).__name__
            if not isinstance(error, UnsupportedLoopError):
                log.debug("loop %s", entry.name, exc_info=True)
                reason = f"{type(error).__name__}: {reason}"
        if reason:
            entry.reason = reason.splitlines()[0]
            said = f"{entry.name}: {entry.reason}"
            if said not in self._said:
                self._said.add(said)
                log.warning("loop %s runs through pyop3: %s", entry.name, entry.reason)
            return None
        assert bound is not None
        if bound.calls:
            entry.strategy = str(bound.calls[0].schedule)
            entry.reason = bound.calls[0].reason
        return bound

    def _agree(self, comm: Any, read: Callable[[], tuple[Reading, ...]]) -> tuple[Reading, ...]:
        """Read a loop on all processes, into as many loops of ours on each. Collective."""
        from pyop3_mlir.parallel import together

        if comm.size == 1:
            return read()
        readings = together(comm, read)
        counts = comm.allgather(len(readings))
        if len(set(counts)) > 1:
            raise UnsupportedLoopError("the loop has other parts on other processes")
        return readings

    def _read(self, executor: Any, loop: _Loop, handles: tuple[Any, ...]) -> tuple[Reading, ...]:
        """The loop on data; it is read where that has not been done."""
        assert self.names is not None
        if loop.plans is None:
            reader = Reader(self.names, masked=executor.masked)
            loop.places = {
                (id(view.buffer), view.nest_indices): number
                for number, view in enumerate(executor.views)
            }
            units = reader.read(executor.preprocessed())
            loop.watched = tuple(
                (buffer, state) for buffer, state in reader.watched.values() if not buffer.constant
            )
            loop.plans = tuple(
                make_plan(unit, self.names, _size_of, self._importers) for unit in units
            )

        def array_of(view: Any) -> Any:
            number = loop.places.get((id(view.buffer), view.nest_indices))
            if number is not None:
                return handles[number]
            if not view.buffer.constant:
                raise UnsupportedLoopError(f"{view.buffer.name} is not passed to the loop")
            return view.handle

        return tuple(plan.bind(array_of) for plan in loop.plans)

    def _compile(self, comm: Any, reading: Reading, tune: bool = False) -> Any:
        """Compile a loop. Collective."""
        from pyop3_mlir import parallel

        device = reading.foreign.device
        key = _schedule_key(reading)
        # the same loop on other data runs as before, no new choice is made
        schedule, reason = (None, "") if tune else self._schedules.get(key, (None, ""))
        # batches of element matrices are written over and over
        strategy = "in_order" if reading.elements else None
        proposal = parallel.Proposal(reading.parloop, schedule, reason, strategy=strategy)
        options = choosing(self.options, tune)
        found = parallel.compile(comm, lambda: proposal, device=device, options=options)
        self._schedules[key] = (found.schedule, found.reason)
        return found

    def _tune(self, executor: Any, loop: _Loop, bound: _Bound) -> None:
        """Choose the schedules of a hot loop by measurement."""
        hot = bound.seconds > HOT_SECONDS
        if executor.comm.size > 1:
            from mpi4py import MPI

            # all at the same call, so that none waits for another's measurements twice
            if bound.count & (bound.count - 1):
                return
            hot = executor.comm.allreduce(hot, op=MPI.LOR)
        if not hot or self.options.tune == "off":
            return
        try:
            self._choose(executor.comm, loop, bound)
        except Exception as error:
            log.warning("loop %s is not tuned: %s", loop.entry.name, error)

    def _choose(self, comm: Any, loop: _Loop, bound: _Bound, schedule: Any = None) -> None:
        from pyop3_mlir import engine

        bound.tuned = True
        if schedule is None:
            bound.calls = [self._compile(comm, r, tune=True) for r in bound.readings]
        else:
            bound.calls = [
                engine.compile(r.parloop, r.foreign.device or self.options.device, schedule)
                for r in bound.readings
            ]
            # also for the same loop on other data, or on a matrix with another pattern
            for reading, call in zip(bound.readings, bound.calls, strict=True):
                self._schedules[_schedule_key(reading)] = (call.schedule, call.reason)
        loop.entry.strategy = str(bound.calls[0].schedule)
        loop.entry.reason = bound.calls[0].reason

    def tune(self, executor: Any, schedule: Any = None) -> list[Any]:
        """Choose the schedules of a loop now, without waiting for it to be hot.

        Parameters
        ----------
        executor
            What ``compile()`` of the execution context returns, or its ``replaced(buffers)``.
        schedule
            What it is to run with from now on; chosen by measurement where not given.

        Returns
        -------
        list of BoundLoop
            What runs it: one loop of ours for each loop in it.

        Raises
        ------
        UnsupportedLoopError
            Where pyop3 runs the loop; the message says why.
        """
        handles = executor._default_exec_arguments
        loop = self._loop(executor)
        loop.deferred = ""
        bound = self._find(executor, loop, handles)
        if bound is None:
            raise UnsupportedLoopError(f"loop {loop.entry.name}: {loop.entry.reason}")
        self._choose(executor.comm, loop, bound, schedule)
        return bound.calls

    def _verify(self, executor: Any, loop: _Loop, bound: _Bound) -> None:
        """Run both engines on the same data, compare, and keep pyop3's result."""
        if any(reading.elements or reading.foreign.keep for reading in bound.readings):
            # their entries may wait for another process, or are out of reach of C code
            self._run(loop, bound)
            return
        written: dict[int, tuple[Reading, int, Array]] = {}
        for reading in bound.readings:
            for number, argument in enumerate(reading.parloop.arguments):
                if argument.access.writes:
                    written[argument.buffer.ctypes.data] = (reading, number, argument.buffer)
        before = [buffer.copy() for *_, buffer in written.values()]
        self._run(loop, bound)
        ours = [buffer.copy() for *_, buffer in written.values()]
        for (*_, buffer), old in zip(written.values(), before, strict=True):
            buffer[...] = old
        executor.run_original(bound.handles)
        for handle in bound.handles:
            if not isinstance(handle, np.ndarray):
                handle.assemble()
        for (reading, number, buffer), found, old in zip(
            written.values(), ours, before, strict=True
        ):
            compare_argument(
                f"loop {loop.entry.name}", reading.parloop, number, found, buffer, old,
                self.options, original="pyop3",
            )  # fmt: skip


class _Compile:
    """What stands for ``InstructionExecutionContext.compile``.

    A data descriptor, since caches keep the original method with each context, and what is in an
    object's dictionary goes before a method of its class.
    """

    def __init__(self, backend: Backend, original: Any) -> None:
        self.backend = backend
        self.original = original

    def __get__(self, context: Any, owner: Any = None) -> Any:
        if context is None:
            return self
        method = context.__dict__.get("compile")
        if method is None:
            method = self.original.__get__(context, owner)
        return functools.partial(self._call, context, method)

    def __set__(self, context: Any, value: Any) -> None:
        context.__dict__["compile"] = value

    def _call(self, context: Any, method: Any) -> Any:
        names = self.backend.names
        assert names is not None
        # the engine runs it, and loopy what the engine cannot run
        choose_loopy(context)
        # pyop3 takes no arrays of devices when it makes code, of which only the types matter
        with names.offloading(names.HOST_DEVICE):
            original = method()
        return self.backend.executor(context, original)


def _schedule_key(reading: Reading) -> Any:
    """Equal for loops that run by one schedule."""
    loop = reading.parloop
    return loop.kernel.fingerprint(), loop.spec, bool(reading.elements), reading.foreign.device


def _patterns(readings: Sequence[Reading]) -> tuple[int, ...]:
    """Numbers that change when the patterns of matrices do."""
    return tuple(nonzero_state(matrix.mat) for r in readings for matrix in r.matrices)


def _handle(view: Any) -> Any:
    """The array or matrix that pyop3's ``IndexedBuffer`` stands for."""
    from petsc4py import PETSc

    found = view.denested
    # pyop3 itself knows no handles of arrays that are not numpy's
    return view.handle if isinstance(found, np.ndarray | PETSc.Mat) else found


def _buffer(view: Any) -> Any:
    """The buffer that holds the data of an ``IndexedBuffer``."""
    found = view.denested
    if hasattr(found, "getPythonContext") and found.getType() == "python":
        return found.getPythonContext().buffer
    return view.buffer


def _size_of(view: Any) -> int:
    handle = view.handle
    return int(handle.size) if hasattr(handle, "dtype") else 0


def _called(instruction: Any, names: Names) -> list[Any]:
    """The called functions of an instruction, preprocessed or not."""
    found: list[Any] = []
    stack = [instruction]
    while stack:
        node = stack.pop()
        if isinstance(node, names.InstructionList):
            stack += reversed(node.instructions)
        elif isinstance(node, names.Loop):
            stack += reversed(node.statements)
        elif hasattr(node, "function"):
            found.append(node)
    return found


def _executor_class(names: Names) -> Any:
    """pyop3's executor, with the C function exchanged."""
    base: Any = names.CompiledCodeExecutor

    class Executor(base):
        """Runs a loop on the engine after pyop3's halo exchanges."""

        def __init__(
            self,
            backend: Backend,
            original: Any,
            instruction: Any,
            parameters: Any,
            tree: Any,
            views: tuple[Any, ...] | None = None,
        ) -> None:
            super().__init__(
                self._execute,
                original.kernel_name_to_buffer_info,
                original.buffer_intents,
                original.comm,
            )
            self.backend = backend
            self.original = original
            self.bound: dict[Any, _Bound] = {}
            # of the instructions: where buffers are replaced, these are not those that it runs on
            self.views = views or tuple(self.kernel_name_to_buffer_info.values())
            self._instruction = instruction
            self._parameters = parameters
            self._tree = tree
            self._defaults: dict[Any, tuple[Any, ...]] = {}
            self._replaced: OrderedDict[tuple[int, ...], Executor] = OrderedDict()

        def __call__(self, new_buffers: Mapping[Any, Any]) -> None:
            base.__call__(self.replaced(new_buffers), {})

        def replaced(self, new_buffers: Mapping[Any, Any]) -> Executor:
            """The executor with other buffers, kept for the next call with the same ones."""
            if not new_buffers:
                return self
            key = tuple(map(id, itertools.chain(*new_buffers.items())))
            found = self._replaced.get(key)
            if found is None:
                views = {
                    name: names.IndexedBuffer(
                        new_buffers.get(view.buffer, view.buffer), view.nest_indices
                    )
                    for name, view in self.kernel_name_to_buffer_info.items()
                }
                intents = {
                    new_buffers.get(buffer, buffer): intent
                    for buffer, intent in self.buffer_intents.items()
                }
                original = base(self.original.executable, views, intents, self.comm)
                found = Executor(
                    self.backend,
                    original,
                    self._instruction,
                    self._parameters,
                    self._tree,
                    self.views,
                )
                # it keeps the buffers alive, so that their numbers are not used again
                self._replaced[key] = found
                while len(self._replaced) > REPLACED_LIMIT:
                    self._replaced.popitem(last=False)
            return found

        def _execute(self, *handles: Any) -> None:
            self.backend.execute(self, handles)

        def _handle_to_pointer(self, handle: Any) -> Any:
            # the engine takes arrays and matrices as they are
            return handle

        @property
        def _default_exec_arguments(self) -> tuple[Any, ...]:
            device = names.get_current_device()
            found = self._defaults.get(device)
            if found is None:
                views = self.kernel_name_to_buffer_info.values()
                found = self._defaults[device] = tuple(map(_handle, views))
            elif device is not names.HOST_DEVICE or self._moved():
                # arrays stay where they are, but pyop3 brings them up to date when asked for them
                for view in self.kernel_name_to_buffer_info.values():
                    _handle(view)
            return found

        def _moved(self) -> bool:
            """Whether a buffer has been on another device."""
            return any(len(getattr(buffer, "_state", ())) > 1 for buffer in self._arrays)

        @functools.cached_property
        def _arrays(self) -> list[Any]:
            views = self.kernel_name_to_buffer_info.values()
            return [b for b in map(_buffer, views) if isinstance(b, names.ArrayBuffer)]

        @property
        def called(self) -> list[Any]:
            """The calls of local kernels."""
            return _called(self._instruction, names)

        @property
        def masked(self) -> bool:
            """Whether pyop3 skips accesses at negative places."""
            return bool(getattr(self._parameters, "mask_array_accesses", False))

        def run_original(self, handles: Sequence[Any]) -> None:
            """Run pyop3's own code, on copies of what the host does not have."""
            from petsc4py import PETSc

            native = (np.ndarray, PETSc.Mat)
            found = [h if isinstance(h, native) else on_host(h) for h in handles]
            pointer = self.original._handle_to_pointer
            self.original.executable(*map(pointer, found))
            device = names.get_current_device()
            for handle, copy, view in zip(
                handles, found, self.kernel_name_to_buffer_info.values(), strict=True
            ):
                intent = self.buffer_intents.get(view.buffer)
                if copy is not handle and intent is not names.Intent.READ:
                    handle[...] = device.asarray(copy)

        def preprocessed(self) -> Any:
            """The instructions that pyop3 generates code from."""
            if self._tree is None:
                # compiled earlier, so that pyop3 itself did not need them this time
                context = names.InstructionExecutionContext(self._instruction, self._parameters)
                self._tree = context.preprocess()
            return self._tree

    return Executor


# ---------------------------------------------------------------------------------------------

_backends: Stack[Backend] = Stack("pyop3")


def attach(options: Options | None = None) -> Backend:
    """Run pyop3's loops on the engine from now on; calls nest.

    Parameters
    ----------
    options
        Settings; looked up where not given.

    Raises
    ------
    ImportError
        Where pyop3 is not installed.
    Pyop3MlirError
        Where the installed pyop3 lacks a name that is needed: it says which.
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

"""Make our loops of what was read from pyop3.

A :class:`~pyop3_mlir.frontends.pyop3_read.Unit` becomes a local kernel and a :class:`Place` for
each of its arguments, without data. There are two ways:

* one call of a local kernel, with assignments that only move values in and out (all that Firedrake
  makes of a form): where each slot of each argument comes from and goes to is traced through the
  temporaries, so the local kernel is taken as it is;
* anything else (arithmetic, several calls): the statements are written down as one loopy kernel,
  whose arguments are the places that the statements access, and that is imported.

:meth:`Plan.bind` puts the buffers in.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.frontends.petsc import BATCH, MatrixValues
from pyop3_mlir.frontends.pyop3_devices import ForeignArrays
from pyop3_mlir.frontends.pyop3_kernels import Writer, import_kernel
from pyop3_mlir.frontends.pyop3_matrices import Elements, bind_matrix
from pyop3_mlir.frontends.pyop3_names import Names
from pyop3_mlir.frontends.pyop3_read import (
    Assign,
    Call,
    Constant,
    Insert,
    Ref,
    Unit,
)
from pyop3_mlir.frontends.pyop3_tables import Matrix, Place, place
from pyop3_mlir.kernels.loopy import Intent, Part
from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    READ,
    RW,
    WRITE,
    Access,
    Argument,
    IterationSet,
    Kind,
    Parloop,
)

log = logging.getLogger(__name__)

__all__ = ["Place", "Plan", "Reading", "make_plan"]

Array = npt.NDArray[Any]

PARTS_LIMIT = 64
"""Parts that an argument of a kernel may be made of."""

_ACCESS = {"write": WRITE, "inc": INC, "min": MIN, "max": MAX}
_INTENTS = {
    "READ": Intent.READ,
    "INC": Intent.INC,
    "WRITE": Intent.WRITE,
    "RW": Intent.UPDATE,
    "MIN_RW": Intent.UPDATE,
    "MAX_RW": Intent.UPDATE,
    "MIN_WRITE": Intent.WRITE,
    "MAX_WRITE": Intent.WRITE,
}


# ---------------------------------------------------------------------------------------------
# Plans


@dataclass(frozen=True, eq=False)
class Plan:
    """A loop without its data: a local kernel, its iterations, and a place an argument.

    A place of None is an array of one number, whatever it holds.
    """

    kernel: LocalKernel
    iterations: IterationSet
    places: tuple[Place | None, ...]
    importer: str

    def bind(self, array_of: Callable[[Any], Any]) -> Reading:
        """The loop on data.

        Parameters
        ----------
        array_of
            Gives the array or PETSc matrix of a pyop3 ``IndexedBuffer``.
        """
        foreign = ForeignArrays()
        arguments: list[Argument] = []
        matrices: list[MatrixValues] = []
        elements: list[Elements] = []
        lgmaps: list[Any] = []
        largest = max(
            [p.components for p in self.places if p is not None and p.matrix is not None], default=1
        )
        batch = max(1, min(self.iterations.size, BATCH // max(largest, 1)))
        for p in self.places:
            if p is None:
                arguments.append(Argument(np.zeros(1), INC, Kind.GLOBAL))
                continue
            data = array_of(p.view)
            if p.matrix is not None:
                lgmaps.append((data, data.getLGMap()))
                argument, handle = bind_matrix(p, data, batch)
                if isinstance(handle, MatrixValues):
                    matrices.append(handle)
                else:
                    elements.append(handle)
            else:
                if not isinstance(data, np.ndarray):
                    data = foreign.take(data, str(p.view.buffer.name))
                argument = _bind_array(p, data)
            arguments.append(argument)
        parloop = Parloop(self.kernel, self.iterations, arguments)
        return Reading(parloop, self, tuple(matrices), tuple(elements), tuple(lgmaps), foreign)


@dataclass(frozen=True, eq=False)
class Reading:
    """A loop of pyop3 in our terms, on pyop3's memory.

    Attributes
    ----------
    parloop
        The loop.
    plan
        What it was made from.
    matrices
        Matrices that it changes in place.
    elements
        Matrices that get element matrices from it, batch by batch.
    lgmaps
        Matrices, and the local to global maps that they had.
    foreign
        Arrays that are not numpy's.
    """

    parloop: Parloop
    plan: Plan
    matrices: tuple[MatrixValues, ...] = ()
    elements: tuple[Elements, ...] = ()
    lgmaps: tuple[Any, ...] = ()
    foreign: ForeignArrays = field(default_factory=ForeignArrays)

    def run(self, call: Callable[[int, int], None]) -> None:
        """Run all iterations by ``call(start, stop)`` and tell PETSc."""
        size = self.parloop.iteration_set.size
        self.foreign.synchronise()
        if not self.elements:
            call(0, size)
        else:
            batch = len(self.elements[0].values)
            for first in range(0, size, batch):
                last = min(first + batch, size)
                for element in self.elements:
                    element.values[: last - first] = 0
                call(first, last)
                for element in self.elements:
                    element.flush(first, last)
        for matrix in self.matrices:
            matrix.changed()


def make_plan(
    unit: Unit,
    names: Names,
    size_of: Callable[[Any], int],
    importers: Sequence[Callable[[Any, Sequence[Intent]], LocalKernel | None]] = (),
) -> Plan:
    """Make the loop of a unit.

    Parameters
    ----------
    unit
        What was read.
    names
        pyop3's classes.
    size_of
        Gives the number of scalars of an ``IndexedBuffer``.
    importers
        Called with the translation unit and the intents, before the loopy importer is; the first
        that does not return None gives the kernel.

    Raises
    ------
    UnsupportedLoopError
        Where it cannot be expressed.
    """
    if not unit.size:
        return _idle()
    maker = _Maker(unit, names, size_of)
    calls = [s for s in unit.statements if isinstance(s, Call)]
    if len(calls) == 1:
        try:
            return maker.around_call(calls[0], importers)
        except _NotPlainError as reason:
            log.debug("kernel %s is written down: %s", calls[0].name, reason)
            if any(isinstance(s, Insert) for s in unit.statements):
                raise UnsupportedLoopError(str(reason)) from None
    return maker.written_down()


def _idle() -> Plan:
    """A loop without iterations, of a process that has no part in one."""
    from pyop3_mlir.kernels.program import KernelArgument, Scalar

    argument = KernelArgument("nothing", (1,), np.dtype(np.float64))
    zero = Scalar(0.0, argument.dtype)
    kernel = LocalKernel.pointwise("idle", (argument,), lambda _: zero)
    return Plan(kernel, _iterations(0), (None,), "none")


class _NotPlainError(UnsupportedLoopError):
    """More than moving values in and out of one kernel."""


# ---------------------------------------------------------------------------------------------
# Temporaries whose entries are traced


@dataclass(frozen=True, eq=False)
class _Result:
    """Argument ``number`` of the call, as the kernel leaves it."""

    number: int


def _same(first: Any, second: Any) -> bool:
    """Whether two sources of entries are the same."""
    if first is second:
        return True
    if isinstance(first, float) or isinstance(second, float):
        return bool(first == second)
    if isinstance(first, _Result) or isinstance(second, _Result):
        return False
    return first.buffer is second.buffer and first.nest_indices == second.nest_indices


class _Trace:
    """Where each entry of a temporary comes from.

    Attributes
    ----------
    sources
        Numbers, ``IndexedBuffer`` of data, or :class:`_Result`.
    which
        ``[size]``: number of the source, -1 where undefined.
    index
        ``[n or 1, size]``: place in the source.
    """

    def __init__(self, size: int) -> None:
        self.sources: list[Any] = []
        self.which = np.full(size, -1)
        self.index = np.zeros((1, size), np.int64)

    def source(self, thing: Any) -> int:
        for number, known in enumerate(self.sources):
            if _same(known, thing):
                return number
        self.sources.append(thing)
        return len(self.sources) - 1

    def resized(self, size: int) -> _Trace:
        """The first entries, filled up with undefined ones."""
        found = _Trace(size)
        count = min(size, len(self.which))
        found.sources = list(self.sources)
        found.which[:count] = self.which[:count]
        found.index = np.zeros((len(self.index), size), np.int64)
        found.index[:, :count] = self.index[:, :count]
        return found

    def put(self, at: Array, thing: Any, index: Array) -> None:
        """Set entries ``at`` to places ``index`` (``[n or 1, len(at)]``) of a source."""
        self.which[at] = self.source(thing)
        if len(index) > len(self.index):
            self.index = np.repeat(self.index, len(index), axis=0)
        self.index[:, at] = index


class _Maker:
    def __init__(self, unit: Unit, names: Names, size_of: Callable[[Any], int]) -> None:
        self.unit = unit
        self.names = names
        self.size_of = size_of
        self.n = unit.size

    def is_temporary(self, view: Any) -> bool:
        return isinstance(view.buffer, self.names.NullBuffer)

    def place(self, view: Any, offsets: Array, access: Access) -> Place:
        return place(view, offsets, self.n, access, self.size_of(view))

    # -----------------------------------------------------------------------------------------
    # one call, and moves around it

    def around_call(self, call: Call, importers: Sequence[Any]) -> Plan:
        traces: dict[int, _Trace] = {}
        inputs: dict[int, _Trace | Any] = {}
        outputs: dict[int, list[tuple[str, Any, Array, Any]]] = {}
        for statement in self.unit.statements:
            if isinstance(statement, Call):
                self._enter(call, traces, inputs)
            elif isinstance(statement, Insert):
                trace = traces.get(id(statement.source.buffer))
                count = statement.rows.shape[1] * statement.cols.shape[1]
                if trace is None:
                    raise _NotPlainError("a matrix that is assigned what no kernel computes")
                self._leave(trace, np.arange(count)[None], statement.kind, statement, outputs)
            elif self.is_temporary(statement.target.view):
                self._move(statement, traces)
            else:
                value = statement.value
                if not isinstance(value, Ref) or not self.is_temporary(value.view):
                    raise _NotPlainError("arithmetic beside a kernel")
                trace = traces.get(id(value.view.buffer))
                if trace is None:
                    raise _NotPlainError("an undefined temporary")
                self._leave(trace, value.offsets, statement.kind, statement.target, outputs)
        return self._assemble(call, inputs, outputs, importers)

    def _enter(self, call: Call, traces: dict[int, _Trace], inputs: dict[int, Any]) -> None:
        for number, (view, intent) in enumerate(call.arguments):
            if not self.is_temporary(view):
                inputs[number] = view
                continue
            formal = call.code.default_entrypoint.args[number]
            size = math.prod(int(e) for e in formal.shape)
            trace = traces.setdefault(id(view.buffer), _Trace(int(view.buffer.size)))
            inputs[number] = trace.resized(size)
            if intent != "READ":
                after = trace.resized(len(trace.which))
                count = min(size, len(trace.which))
                after.put(np.arange(count), _Result(number), np.arange(count)[None])
                traces[id(view.buffer)] = after

    def _move(self, statement: Assign, traces: dict[int, _Trace]) -> None:
        target = statement.target
        if statement.kind != "write":
            raise _NotPlainError("a temporary that is added to")
        if len(target.offsets) != 1:
            raise _NotPlainError(
                "a temporary that is stored in an order that depends on the iteration"
            )
        at = target.offsets[0]
        key = id(target.view.buffer)
        trace = traces.setdefault(key, _Trace(int(target.view.buffer.size)))
        value = statement.value
        match value:
            case Constant():
                trace.put(at, float(value.value), np.zeros((1, len(at)), np.int64))
            case Ref() if self.is_temporary(value.view):
                other = traces.get(id(value.view.buffer))
                if other is None:
                    raise _NotPlainError("an undefined temporary")
                offsets = np.broadcast_to(value.offsets, (len(value.offsets), len(at)))
                which = other.which[offsets]
                if len(which) > 1 and (which != which[0]).any():
                    raise _NotPlainError("entries whose source depends on the iteration")
                rows = max(len(offsets), len(other.index))
                index = np.take_along_axis(
                    np.broadcast_to(other.index, (rows, other.index.shape[1])),
                    np.broadcast_to(offsets, (rows, len(at))),
                    axis=1,
                )
                if (offsets < 0).any():
                    index = np.where(offsets < 0, -1, index)
                if (which[0] < 0).any():
                    raise _NotPlainError("undefined entries of a temporary")
                for number in np.unique(which[0]):
                    here = which[0] == number
                    trace.put(at[here], other.sources[number], index[:, here])
            case Ref():
                offsets = np.broadcast_to(value.offsets, (len(value.offsets), len(at)))
                trace.put(at, value.view, offsets)
            case _:
                raise _NotPlainError("arithmetic beside a kernel")

    def _leave(
        self,
        trace: _Trace,
        offsets: Array,
        kind: str,
        target: Ref | Insert,
        outputs: dict[int, list[tuple[str, Any, Array, Any]]],
    ) -> None:
        """Entries ``offsets`` of a temporary go to ``target``."""
        if len(offsets) != 1 or len(trace.index) != 1:
            raise _NotPlainError(
                "results that are stored in an order that depends on the iteration"
            )
        which = trace.which[offsets[0]]
        slots = trace.index[0, offsets[0]]
        numbers = np.unique(which)
        if numbers[0] < 0 or not all(isinstance(trace.sources[w], _Result) for w in numbers):
            raise _NotPlainError("values that no kernel computes are stored")
        if isinstance(target, Insert):
            if len(numbers) > 1:
                raise _NotPlainError("a matrix from several results")
            number = trace.sources[numbers[0]].number
            outputs.setdefault(number, []).append((kind, target.view, slots, target))
            return
        places = np.broadcast_to(target.offsets, (len(target.offsets), len(which)))
        for w in numbers:
            here = which == w
            number = trace.sources[w].number
            outputs.setdefault(number, []).append((kind, target.view, slots[here], places[:, here]))

    def _assemble(
        self,
        call: Call,
        inputs: dict[int, Any],
        outputs: dict[int, list[tuple[str, Any, Array, Any]]],
        importers: Sequence[Any],
    ) -> Plan:
        formals = call.code.default_entrypoint.args
        places: list[Place] = []
        intents: list[Intent] = []
        splits: dict[int, tuple[tuple[int, ...], list[Part]]] = {}
        for number, (_view, intent) in enumerate(call.arguments):
            formal = formals[number]
            if type(formal).__name__ == "ValueArg":
                raise UnsupportedLoopError(f"kernel {call.name}: {formal.name} is no array")
            shape = tuple(int(e) for e in formal.shape)
            size = math.prod(shape)
            intents.append(_INTENTS[intent])
            given = inputs[number]
            if not isinstance(given, _Trace):
                places.append(self._whole(given, intent, size))
                continue
            found = self._argument(call, formal.name, intent, shape, given, outputs.get(number, []))
            if len(found) > PARTS_LIMIT:
                raise _NotPlainError("an argument of very many parts")
            if len(found) > 1:
                splits[number] = (shape, [part for part, _ in found])
            places += [p for _, p in found]
        kernel, importer = import_kernel(call, intents, splits, importers)
        return Plan(kernel, _iterations(self.n), tuple(places), importer)

    def _whole(self, view: Any, intent: str, size: int) -> Place:
        """A buffer that the kernel gets as it is, the same in each iteration."""
        access = {
            "READ": READ,
            "INC": INC,
            "MIN_RW": MIN,
            "MAX_RW": MAX,
            "MIN_WRITE": MIN,
            "MAX_WRITE": MAX,
        }.get(intent, RW)
        return self.place(view, np.arange(size)[None], access)

    def _argument(
        self,
        call: Call,
        name: str,
        intent: str,
        shape: tuple[int, ...],
        given: _Trace,
        stored: list[tuple[str, Any, Array, Any]],
    ) -> list[tuple[Part, Place]]:
        where = f"kernel {call.name}, argument {name}"
        missing = np.nonzero(given.which < 0)[0]
        if intent == "READ":
            groups = [
                (given.sources[w], np.nonzero(given.which == w)[0])
                for w in np.unique(given.which[given.which >= 0])
            ]
            return self._pieces(groups, missing, given, shape, where)
        if not stored:
            raise _NotPlainError(f"{where}: results that are not stored")
        found: list[tuple[Part, Place]] = []
        covered = np.zeros(math.prod(shape), dtype=int)
        merged = _merged(stored)
        for _, _, slots, _ in merged:
            np.add.at(covered, slots, 1)
        if (covered > 1).any():
            raise _NotPlainError(f"{where}: results that are stored more than once")
        missing = np.nonzero(covered == 0)[0]
        for kind, view, slots, target in merged:
            if isinstance(target, Insert):
                part, order = _box(slots, shape)
                matrix = Matrix(target.rows, target.cols, np.argsort(order))
                self._check_zero(given, slots, intent, where)
                p = Place(view, _ACCESS[kind], Kind.INDIRECT, len(slots), matrix=matrix)
                found.append((part, p))
                continue
            access = self._access(kind, intent, given, view, slots, target, where)
            if missing.size:
                # results that are not stored go nowhere
                target, slots = _with_nothing(target, slots, missing)
                missing = missing[:0]
            part, order = _box(slots, shape)
            found.append((part, self.place(view, target[:, order], access)))
        if missing.size:
            raise _NotPlainError(f"{where}: a matrix that only a part of the results goes to")
        return found

    def _access(
        self,
        kind: str,
        intent: str,
        given: _Trace,
        view: Any,
        slots: Array,
        target: Array,
        where: str,
    ) -> Access:
        """The access of a result, from how it is stored and what the kernel finds there."""
        if kind == "inc" and intent == "INC":
            self._check_zero(given, slots, intent, where)
            return INC
        if kind == "write" and intent == "WRITE":
            return WRITE
        if kind in ("min", "max") and intent == f"{kind.upper()}_WRITE":
            return _ACCESS[kind]
        # what the kernel finds there has to be what it replaces
        same = all(
            w >= 0 and _same(given.sources[w], view) for w in np.unique(given.which[slots]).tolist()
        )
        if not same or not (given.index[:, slots] == target).all():
            raise _NotPlainError(f"{where}: what is packed is not what is unpacked")
        if kind == "write" and intent == "RW":
            return RW
        if kind in ("min", "max") and intent == f"{kind.upper()}_RW":
            return _ACCESS[kind]
        raise _NotPlainError(f"{where}: {intent} that is stored by {kind}")

    def _check_zero(self, given: _Trace, slots: Array, intent: str, where: str) -> None:
        which = np.unique(given.which[slots])
        if intent == "WRITE":
            return
        if not all(w >= 0 and _same(given.sources[w], 0.0) for w in which.tolist()):
            raise _NotPlainError(f"{where}: sums that do not start at zero")

    def _pieces(
        self,
        groups: list[tuple[Any, Array]],
        missing: Array,
        given: _Trace,
        shape: tuple[int, ...],
        where: str,
    ) -> list[tuple[Part, Place]]:
        found = []
        if not groups:
            raise _NotPlainError(f"{where}: nothing is packed for it")
        for source, slots in groups:
            if not isinstance(source, self.names.IndexedBuffer):
                raise _NotPlainError(f"{where}: constants are packed for it")
            offsets = given.index[:, slots]
            if missing.size:
                # the kernel finds anything there
                offsets, slots = _with_nothing(offsets, slots, missing)
                missing = missing[:0]
            part, order = _box(slots, shape)
            found.append((part, self.place(source, offsets[:, order], READ)))
        return found

    # -----------------------------------------------------------------------------------------
    # anything else: one loopy kernel

    def written_down(self) -> Plan:
        writer = Writer(self.is_temporary)
        for statement in self.unit.statements:
            match statement:
                case Assign():
                    writer.assign(statement)
                case Call():
                    writer.call(statement)
                case Insert():
                    raise UnsupportedLoopError("a matrix beside arithmetic")
        kernel, importer, found = writer.finish()
        places = tuple(self.place(a.view, a.offsets, access) for a, access in found)
        return Plan(kernel, _iterations(self.n), places, importer)


def _with_nothing(offsets: Array, slots: Array, missing: Array) -> tuple[Array, Array]:
    """Offsets and slots, with further slots that belong to nothing."""
    nothing = np.full((len(offsets), len(missing)), -1)
    return np.concatenate([offsets, nothing], axis=1), np.concatenate([slots, missing])


def _merged(stored: list[tuple[str, Any, Array, Any]]) -> list[tuple[str, Any, Array, Any]]:
    """What goes to the same buffer in the same way, as one."""
    found: list[tuple[str, Any, Array, Any]] = []
    for kind, view, slots, target in stored:
        for number, (other_kind, other_view, other_slots, other) in enumerate(found):
            arrays = isinstance(target, np.ndarray) and isinstance(other, np.ndarray)
            if arrays and kind == other_kind and _same(view, other_view):
                rows = max(len(target), len(other))
                both = [np.broadcast_to(t, (rows, t.shape[1])) for t in (other, target)]
                found[number] = (
                    kind, view, np.concatenate([other_slots, slots]), np.concatenate(both, axis=1)
                )  # fmt: skip
                break
        else:
            found.append((kind, view, slots, target))
    return found


def _box(slots: Array, shape: tuple[int, ...]) -> tuple[Part, Array]:
    """The box of an argument that ``slots`` fill, and their order by rows of the box."""
    at = np.unravel_index(slots, shape)
    start = tuple(int(a.min()) for a in at)
    extents = tuple(int(a.max()) - s + 1 for a, s in zip(at, start, strict=True))
    inside = np.ravel_multi_index(tuple(a - s for a, s in zip(at, start, strict=True)), extents)
    order = np.argsort(inside, kind="stable")
    if len(slots) != math.prod(extents) or (inside[order] != np.arange(len(slots))).any():
        raise _NotPlainError("parts of an argument that are no boxes")
    return Part(start, extents), order


def _iterations(n: int) -> IterationSet:
    found = _iteration_sets.get(n)
    if found is None:
        found = _iteration_sets[n] = IterationSet(n, name="iterations")
    return found


_iteration_sets: weakref.WeakValueDictionary[int, IterationSet] = weakref.WeakValueDictionary()


def _bind_array(p: Place, data: Array) -> Argument:
    if not data.flags.c_contiguous:
        raise UnsupportedLoopError(f"{p.view.buffer.name}: its array is not contiguous")
    return Argument(
        data.reshape(-1),
        p.access,
        p.kind,
        p.table,
        p.components,
        p.stride,
        p.offset,
        str(p.view.buffer.name),
    )

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

import hashlib
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.frontends.petsc import MatrixValues
from pyop3_mlir.frontends.pyop3_names import Names
from pyop3_mlir.frontends.pyop3_read import (
    Assign,
    Call,
    Constant,
    Insert,
    Operation,
    Ref,
    Unit,
    Value,
)
from pyop3_mlir.kernels.loopy import Intent, Part, import_loopy
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
    IndexTable,
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
# Where an argument's entries lie


@dataclass(frozen=True, eq=False)
class Matrix:
    """What an element matrix goes to.

    Attributes
    ----------
    rows, cols
        ``[n, k]`` and ``[n, l]``, local numbers; negative: dropped.
    slots
        Slot of the argument for each entry, by rows.
    """

    rows: Array
    cols: Array
    slots: Array


@dataclass(frozen=True, eq=False)
class Place:
    """How an argument of the loop is made from a buffer; see :class:`~pyop3_mlir.Argument`.

    Attributes
    ----------
    view
        pyop3's ``IndexedBuffer``.
    """

    view: Any
    access: Access
    kind: Kind
    components: int
    table: IndexTable | None = None
    stride: int | None = None
    offset: int = 0
    matrix: Matrix | None = None


_tables: weakref.WeakValueDictionary[Any, IndexTable] = weakref.WeakValueDictionary()


def shared_table(values: Array, bound: int, name: str) -> IndexTable:
    """The table with these contents: equal ones are one object, so that plans are shared."""
    if values.size and int(values.max()) <= np.iinfo(np.int32).max:
        values = values.astype(np.int32)
    values = np.ascontiguousarray(values)
    digest = hashlib.blake2b(values.tobytes(), digest_size=16)
    key = (digest.digest(), values.shape, values.dtype.str)
    found = _tables.get((*key, bound))
    if found is None:
        other = _tables.get(key)
        if other is not None:
            values = other.values
        negative = bool(values.size and values.min() < 0)
        if negative and other is None:
            values = np.maximum(values, -1)
        found = IndexTable(values, bound, allow_negative=negative, name=name)
        _tables[(*key, bound)] = found
        _tables.setdefault(key, found)
    return found


def place(view: Any, offsets: Array, n: int, access: Access, size: int) -> Place:
    """The simplest rule that gives ``offsets``.

    Parameters
    ----------
    view
        The buffer.
    offsets
        ``[n, entries]``, or ``[1, entries]`` where they are the same in each iteration.
    n
        Iterations.
    access
        The access.
    size
        Scalars that the buffer holds.
    """
    name = str(view.buffer.name)
    entries = offsets.shape[1]
    first = offsets[0]
    contiguous = bool(entries) and bool(first[0] >= 0)
    contiguous = contiguous and bool((first == first[0] + np.arange(entries)).all())
    if len(offsets) == 1 and n != 1:
        if contiguous and access not in (WRITE, RW):
            return Place(view, access, Kind.GLOBAL, entries, offset=int(first[0]))
        offsets = np.broadcast_to(offsets, (n, entries))
    if contiguous and n > 1:
        stride = int(offsets[1, 0] - first[0])
        if stride >= entries and first[0] < stride and _is_direct(offsets, stride):
            return Place(view, access, Kind.DIRECT, entries, None, stride, int(first[0]))
    components, stride, offset = _rows(offsets)
    rows = offsets[:, ::components]
    rows = np.where(rows < 0, -1, (rows - offset) // stride)
    bound = max((size - offset - components) // stride + 1, 0)
    table = shared_table(rows, bound, name)
    return Place(view, access, Kind.INDIRECT, components, table, stride, offset)


def _is_direct(offsets: Array, stride: int) -> bool:
    n, entries = offsets.shape
    if int(offsets[-1, 0] - offsets[0, 0]) != (n - 1) * stride:
        return False
    expected = offsets[0, 0] + np.arange(n)[:, None] * stride + np.arange(entries)
    return bool((offsets == expected).all())


def _rows(offsets: Array) -> tuple[int, int, int]:
    """Components, stride and offset with which ``offsets`` are rows of the buffer.

    So that two entries are the same scalar only where their rows are the same.
    """
    n, entries = offsets.shape
    if not n or not entries:
        return 1, 1, 0
    components = _run(offsets)
    firsts = offsets[:, ::components]
    present = firsts[firsts >= 0]
    if not present.size:
        return 1, 1, 0
    stride = int(np.gcd.reduce(present.reshape(-1) - present.reshape(-1)[0]))
    if stride == 0:
        # one row only
        stride = max(components, int(present.reshape(-1)[0]) + 1)
    while stride < components or (int(present.reshape(-1)[0]) % stride) + components > stride:
        # rows would overlap: smaller ones
        components = _next_divisor(components)
        if components == 1:
            firsts = offsets[offsets >= 0]
            stride = max(int(np.gcd.reduce(firsts - firsts[0])), 1)
            return 1, stride, int(firsts[0]) % stride
    return components, stride, int(present.reshape(-1)[0]) % stride


def _next_divisor(number: int) -> int:
    for candidate in range(number - 1, 0, -1):
        if number % candidate == 0:
            return candidate
    return 1


def _run(offsets: Array) -> int:
    """The largest number of neighbouring scalars that all entries can be grouped into."""
    entries = offsets.shape[1]
    step = np.diff(offsets, axis=1)
    both_absent = (offsets[:, 1:] < 0) & (offsets[:, :-1] < 0)
    joined = ((step == 1) & (offsets[:, :-1] >= 0)) | both_absent
    everywhere = joined.all(axis=0)
    for length in range(entries, 1, -1):
        if entries % length == 0:
            inside = np.arange(entries - 1) % length != length - 1
            if everywhere[inside].all():
                return length
    return 1


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
                argument, handle = _bind_matrix(p, data, batch)
                if isinstance(handle, MatrixValues):
                    matrices.append(handle)
                else:
                    elements.append(handle)
            else:
                argument = _bind_array(p, data)
            arguments.append(argument)
        parloop = Parloop(self.kernel, self.iterations, arguments)
        return Reading(parloop, self, tuple(matrices), tuple(elements), tuple(lgmaps))


BATCH = 1 << 22
"""Scalars of the element matrices that are computed before PETSc gets them."""


@dataclass(frozen=True, eq=False)
class Elements:
    """Element matrices that PETSc adds up: a matrix that is distributed over processes.

    Attributes
    ----------
    mat
        PETSc's matrix.
    matrix
        Where they go.
    values
        ``[iterations of a batch, entries]``, by rows.
    access
        INC or WRITE.
    """

    mat: Any
    matrix: Matrix
    values: Array
    access: Access

    def flush(self, start: int, stop: int) -> None:
        """Hand the element matrices of iterations ``[start, stop)`` over."""
        from petsc4py import PETSc

        mode = PETSc.InsertMode.ADD_VALUES if self.access is INC else PETSc.InsertMode.INSERT_VALUES
        rows, cols = self.matrix.rows[start:stop], self.matrix.cols[start:stop]
        shape = (stop - start, rows.shape[1], cols.shape[1])
        values = self.values[: stop - start].reshape(shape)
        self.mat.setValuesLocalRCV(rows, cols, values, addv=mode)


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
    """

    parloop: Parloop
    plan: Plan
    matrices: tuple[MatrixValues, ...] = ()
    elements: tuple[Elements, ...] = ()
    lgmaps: tuple[Any, ...] = ()

    def run(self, call: Callable[[int, int], None]) -> None:
        """Run all iterations by ``call(start, stop)`` and tell PETSc."""
        size = self.parloop.iteration_set.size
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
    from pyop3_mlir.kernels.program import (
        INDEX,
        Compute,
        Dim,
        KernelArgument,
        Output,
        Scalar,
        Temporary,
    )

    argument = KernelArgument("nothing", (1,), np.dtype(np.float64))
    dim = Dim("i", 1)
    zero = Temporary("zero", (1,), argument.dtype)
    kernel = LocalKernel(
        "idle",
        (argument,),
        (Compute((zero,), (dim,), (), (Scalar(0.0, argument.dtype),)),),
        (Output(argument, (dim,), Scalar(0, INDEX), zero),),
    )
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
        kernel, importer = _import(call, intents, splits, importers)
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
        writer = _Writer(self)
        for statement in self.unit.statements:
            match statement:
                case Assign():
                    writer.assign(statement)
                case Call():
                    writer.call(statement)
                case Insert():
                    raise UnsupportedLoopError("a matrix beside arithmetic")
        return writer.finish()


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


# ---------------------------------------------------------------------------------------------
# Local kernels

_kernels: dict[Any, LocalKernel | UnsupportedLoopError] = {}


def code_key(code: Any) -> str:
    """A digest of a loopy translation unit, equal for equal ones."""
    from loopy.tools import LoopyKeyBuilder

    return str(LoopyKeyBuilder()(code))


def kernel_key(code: Any) -> str:
    """As :func:`code_key`, whatever is known of what the kernel reads and writes.

    pyop3 writes that into a kernel when it makes a function of it.
    """
    kernel = code.default_entrypoint
    arguments = [a.copy(is_input=True, is_output=True) for a in kernel.args]
    return code_key(code.with_kernel(kernel.copy(args=arguments)))


def _import(
    call: Call,
    intents: Sequence[Intent],
    splits: dict[int, tuple[tuple[int, ...], list[Part]]],
    importers: Sequence[Any],
) -> tuple[LocalKernel, str]:
    if not splits:
        for importer in importers:
            found = importer(call.code, intents)
            if found is not None:
                return found, "gem"
    shapes = tuple((i, whole, tuple(parts)) for i, (whole, parts) in sorted(splits.items()))
    key = (code_key(call.code), tuple(intents), shapes)
    known = _kernels.get(key)
    if known is None:
        try:
            known = import_loopy(call.code, call.name, list(intents), splits=splits)
        except UnsupportedLoopError as error:
            known = error.with_traceback(None)
        if len(_kernels) > 4096:
            _kernels.clear()
        _kernels[key] = known
    if isinstance(known, UnsupportedLoopError):
        raise known
    return known, "loopy"


class _Writer:
    """Writes statements down as a loopy kernel whose arguments are what they access."""

    def __init__(self, maker: _Maker) -> None:
        self.maker = maker
        self.accesses: dict[Any, _Accessed] = {}
        self.temporaries: dict[int, Any] = {}
        self.tables: dict[bytes, Any] = {}
        self.domains: list[str] = []
        self.instructions: list[Any] = []
        self.subkernels: list[Any] = []

    def name(self, prefix: str) -> str:
        count = len(self.domains) + len(self.instructions) + len(self.tables)
        return f"{prefix}{count}"

    def assign(self, statement: Assign) -> None:
        import pymbolic.primitives as p

        entries = max(r.offsets.shape[1] for r in _refs([statement.target, statement.value]))
        iname = self.name("i")
        self.domains.append(f"{{ [{iname}]: 0 <= {iname} < {entries} }}")
        target = self.access(statement.target, iname, entries, statement.kind)
        value = self.value(statement.value, iname, entries)
        if statement.kind == "inc":
            value = target + value
        elif statement.kind in ("min", "max"):
            value = p.Variable(statement.kind)(target, value)
        self.add("Assignment", frozenset({iname}), target, value)

    def add(self, kind: str, inames: frozenset[str], assignee: Any, expression: Any) -> None:
        import loopy as lp

        identifier = f"s{len(self.instructions)}"
        before = frozenset({f"s{len(self.instructions) - 1}"} if self.instructions else ())
        self.instructions.append(
            getattr(lp, kind)(
                assignee,
                expression,
                id=identifier,
                within_inames=inames,
                within_inames_is_final=True,
                depends_on=before,
                depends_on_is_final=True,
            )
        )

    def value(self, value: Value, iname: str, entries: int) -> Any:
        import pymbolic.primitives as p

        match value:
            case Constant():
                return value.value
            case Ref():
                return self.access(value, iname, entries, "read")
        assert isinstance(value, Operation)
        operands = [self.value(o, iname, entries) for o in value.operands]
        comparisons = {
            "LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">",
            "GreaterThanOrEqual": ">=",
        }  # fmt: skip
        match value.name, operands:
            case "Add", [a, b]:
                return a + b
            case "Sub", [a, b]:
                return a - b
            case "Mul", [a, b]:
                return a * b
            case "Div", [a, b]:
                return p.Quotient(a, b)
            case "FloorDiv", [a, b]:
                return p.FloorDiv(a, b)
            case "Modulo", [a, b]:
                return p.Remainder(a, b)
            case "Pow", [a, b]:
                return p.Power(a, b)
            case "Neg", [a]:
                return -a
            case "Abs", [a]:
                return p.Variable("abs")(a)
            case "Or", [a, b]:
                return p.LogicalOr((a, b))
            case "Conditional", [a, b, c]:
                return p.If(a, b, c)
            case name, [a, b] if name in comparisons:
                return p.Comparison(a, comparisons[name], b)
        raise UnsupportedLoopError(f"the operation {value.name}")

    def access(self, ref: Ref, iname: str, entries: int, kind: str) -> Any:
        import pymbolic.primitives as p

        offsets = np.broadcast_to(ref.offsets, (len(ref.offsets), entries))
        if not self.maker.is_temporary(ref.view):
            accessed = self.accessed(ref.view, offsets)
            accessed.kinds.append(kind)
            return p.Variable(accessed.name)[p.Variable(iname)]
        if len(offsets) != 1:
            raise UnsupportedLoopError("a temporary in an order that depends on the iteration")
        name = self.temporary(ref.view)
        return p.Variable(name)[self.subscript(offsets[0], iname)]

    def subscript(self, offsets: Array, iname: str) -> Any:
        import loopy as lp
        import pymbolic.primitives as p

        start = int(offsets[0])
        if (offsets == start + np.arange(len(offsets))).all():
            return p.Variable(iname) + start
        key = offsets.astype(np.int32).tobytes()
        if key not in self.tables:
            self.tables[key] = lp.TemporaryVariable(
                f"order{len(self.tables)}",
                dtype=np.int32,
                shape=offsets.shape,
                initializer=offsets.astype(np.int32),
                read_only=True,
                address_space=lp.AddressSpace.LOCAL,
            )
        return p.Variable(self.tables[key].name)[p.Variable(iname)]

    def temporary(self, view: Any) -> str:
        import loopy as lp

        key = id(view.buffer)
        if key not in self.temporaries:
            self.temporaries[key] = lp.TemporaryVariable(
                f"t{len(self.temporaries)}",
                dtype=view.buffer.dtype,
                shape=(int(view.buffer.size),),
                address_space=lp.AddressSpace.LOCAL,
            )
        name: str = self.temporaries[key].name
        return name

    def accessed(self, view: Any, offsets: Array) -> _Accessed:
        key = (id(view.buffer), view.nest_indices, offsets.shape, _digest(offsets))
        found = self.accesses.get(key)
        if found is None:
            found = self.accesses[key] = _Accessed(f"a{len(self.accesses)}", view, offsets)
        return found

    def call(self, call: Call) -> None:
        import loopy as lp
        import pymbolic.primitives as p

        writes: list[Any] = []
        reads: list[Any] = []
        for (view, intent), formal in zip(
            call.arguments, call.code.default_entrypoint.args, strict=True
        ):
            if type(formal).__name__ == "ValueArg":
                raise UnsupportedLoopError(f"kernel {call.name}: {formal.name} is no array")
            size = math.prod(int(e) for e in formal.shape)
            iname = self.name(f"c{len(writes)}_{len(reads)}_")
            self.domains.append(f"{{ [{iname}]: 0 <= {iname} < {size} }}")
            if self.maker.is_temporary(view):
                name = self.temporary(view)
            else:
                accessed = self.accessed(view, np.arange(size)[None])
                kinds = {"READ": ["read"], "INC": ["inc"]}.get(intent, ["read", "write"])
                accessed.kinds += kinds
                name = accessed.name
            reference = lp.symbolic.SubArrayRef(
                (p.Variable(iname),), p.Variable(name)[p.Variable(iname)]
            )
            if intent != "READ":
                writes.append(reference)
            if intent not in ("WRITE", "MIN_WRITE", "MAX_WRITE"):
                reads.append(reference)
        expression = p.Call(p.Variable(call.name), tuple(reads))
        self.add("CallInstruction", frozenset(), tuple(writes), expression)
        self.subkernels.append(call.code.with_entrypoints(frozenset()))

    def finish(self) -> Plan:
        import loopy as lp

        maker = self.maker
        places, intents, arguments = [], [], []
        for accessed in self.accesses.values():
            access, intent = accessed.meaning()
            place_ = maker.place(accessed.view, accessed.offsets, access)
            places.append(place_)
            intents.append(intent)
            arguments.append(
                lp.GlobalArg(
                    accessed.name,
                    dtype=accessed.view.buffer.dtype,
                    shape=(accessed.offsets.shape[1],),
                    is_input=True,
                    is_output=intent is not Intent.READ,
                )
            )
        name = "statements"
        code = lp.make_kernel(
            self.domains,
            self.instructions,
            [*arguments, *self.temporaries.values(), *self.tables.values()],
            name=name,
            target=lp.CWithGNULibcTarget(),
            lang_version=(2018, 2),
        )
        code = lp.merge((code, *{id(k): k for k in self.subkernels}.values()))
        kernel, importer = _import(Call(code, name, ()), intents, {}, ())
        return Plan(kernel, _iterations(maker.n), tuple(places), importer)


class _Accessed:
    """Entries of a buffer that statements access, an argument of the written kernel."""

    def __init__(self, name: str, view: Any, offsets: Array) -> None:
        self.name = name
        self.view = view
        self.offsets = offsets
        self.kinds: list[str] = []

    def meaning(self) -> tuple[Access, Intent]:
        kinds = set(self.kinds)
        if kinds == {"read"}:
            return READ, Intent.READ
        if kinds == {"inc"}:
            return INC, Intent.INC
        if kinds == {"write"}:
            return WRITE, Intent.WRITE
        if kinds == {"min"}:
            return MIN, Intent.UPDATE
        if kinds == {"max"}:
            return MAX, Intent.UPDATE
        return RW, Intent.UPDATE


def _refs(values: Sequence[Value]) -> list[Ref]:
    found: list[Ref] = []
    for value in values:
        if isinstance(value, Ref):
            found.append(value)
        elif isinstance(value, Operation):
            found += _refs(value.operands)
    return found


def _digest(array: Array) -> bytes:
    contiguous = np.ascontiguousarray(array, dtype=np.int64)
    return hashlib.blake2b(contiguous.tobytes(), digest_size=16).digest()


# ---------------------------------------------------------------------------------------------
# Data


def _bind_array(p: Place, data: Any) -> Argument:
    if not isinstance(data, np.ndarray):
        raise UnsupportedLoopError(f"{p.view.buffer.name} is a {type(data).__name__}")
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


def _bind_matrix(p: Place, mat: Any, batch: int) -> tuple[Argument, MatrixValues | Elements]:
    assert p.matrix is not None
    name = str(p.view.buffer.name)
    kind = mat.getType()
    if kind in ("seqaij", "seqbaij", "seqdense"):
        values = MatrixValues(mat)
        table, rows = _positions(p.matrix, mat, values, name)
        return Argument.matrix(values.array, p.access, table, rows, name=name), values
    if kind not in ("mpiaij", "mpibaij", "mpidense"):
        raise UnsupportedLoopError(f"a matrix of type {kind}")
    matrix = p.matrix
    n = len(matrix.rows)
    array = np.zeros((batch, p.components))
    at = np.arange(n, dtype=np.int64) % batch
    slots = np.empty(p.components, np.int64)
    slots[matrix.slots] = np.arange(p.components)
    table = IndexTable(
        (at[:, None] * p.components + slots).astype(np.int32), array.size, name="element matrices"
    )
    # a kernel may give several contributions to an entry, so they are added to zeros
    argument = Argument(array.reshape(-1), INC, Kind.INDIRECT, table, 1, 1, name=name)
    kind = mat.getLGMap()[0].indices.dtype
    sides = [np.ascontiguousarray(side, dtype=kind) for side in (matrix.rows, matrix.cols)]
    matrix = replace(matrix, rows=sides[0], cols=sides[1])
    return argument, Elements(mat, matrix, array, p.access)


def _positions(
    matrix: Matrix, mat: Any, values: MatrixValues, name: str
) -> tuple[IndexTable, IndexTable]:
    """Where the entries of element matrices lie among the values, and the table of rows.

    Both are kept with the table of rows, which is the same object for equal contents.
    """
    from pyop3_mlir.planning import csr_positions

    sides = []
    for side, lgmap in zip((matrix.rows, matrix.cols), mat.getLGMap(), strict=True):
        indices = lgmap.indices
        mapped = indices[np.maximum(side, 0)] if indices.size else np.full(side.shape, -1)
        sides.append(np.where(side < 0, -1, np.maximum(mapped, -1)).astype(np.int32))
    height, width = mat.getLocalSize()
    blocks = [1, 1]
    if values.type == "seqbaij":
        blocks = [values.block_size] * 2
        if not all(_fills_blocks(side, values.block_size) for side in sides):
            raise UnsupportedLoopError(f"{name}: single components of a matrix that stores blocks")
    elif values.type == "seqaij":
        blocks = [_node_size(side) for side in sides]
    rows, cols = (
        _node_table(side, size, extent, name)
        for side, size, extent in zip(sides, blocks, (height, width), strict=True)
    )
    if values.pattern is None:
        positions = _dense_positions(rows, cols, height, width, name)
    else:
        positions = csr_positions(
            *values.pattern,
            rows,
            cols,
            row_components=blocks[0],
            col_components=blocks[1],
            storage="baij" if values.type == "seqbaij" else "aij",
            name=name,
        )
    slots = matrix.slots
    if (slots == np.arange(len(slots))).all():
        return positions, rows
    key = ("in the order of slots", slots.tobytes())
    found = positions.plans.get(key)
    if found is None:
        ordered = np.empty_like(positions.values)
        ordered[:, slots] = positions.values
        found = IndexTable(ordered, positions.bound, positions.allow_negative, name)
        positions.plans[key] = found
    return found, rows


def _dense_positions(
    rows: IndexTable, cols: IndexTable, height: int, width: int, name: str
) -> IndexTable:
    """As ``csr_positions``, in the values of a dense matrix, which lie by columns."""
    key = ("dense positions", height, width, cols.fingerprint)
    found = rows.plans.get(key)
    if found is None:
        i, j = rows.values[:, :, None].astype(np.int64), cols.values[:, None, :].astype(np.int64)
        at = np.where((i < 0) | (j < 0), -1, i + height * j)
        kind = np.int32 if height * width <= np.iinfo(np.int32).max else np.int64
        negative = rows.allow_negative or cols.allow_negative
        values = at.reshape(len(at), -1).astype(kind)
        found = rows.plans[key] = IndexTable(values, height * width, negative, name)
    result: IndexTable = found
    return result


def _node_table(side: Array, size: int, extent: int, name: str) -> IndexTable:
    firsts = side[:, ::size]
    return shared_table(np.where(firsts < 0, -1, firsts // size), extent // size, name)


def _fills_blocks(side: Array, size: int) -> bool:
    n, count = side.shape
    if count % size:
        return False
    blocks = side.reshape(n, count // size, size)
    firsts = blocks[:, :, :1]
    whole = (blocks == firsts + np.arange(size)) & (firsts % size == 0)
    return bool((whole | (blocks < 0) & (firsts < 0)).all())


def _node_size(side: Array) -> int:
    """Components of a node: the largest number for which all entries come in such blocks."""
    for size in range(min(side.shape[1], 16), 1, -1):
        if side.shape[1] % size == 0 and _fills_blocks(side, size):
            return size
    return 1

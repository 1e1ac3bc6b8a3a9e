"""The one description of a parallel loop that everything else works on.

A loop is an :class:`IterationSet`, a :class:`~pyop3_mlir.kernels.program.LocalKernel` and one
:class:`Argument` for each argument of the kernel. An argument joins a buffer with the rule by which
an entity finds its entries there: direct (row n of the buffer belongs to entity n), indirect
(through an :class:`IndexTable`), or global (the same entries for each entity)::

    for entity in iteration_set:
        packs = [gather(argument, entity) for argument in arguments]
        kernel(*packs)
        for argument in arguments: scatter(argument, entity)

Nothing here runs anything; see :mod:`pyop3_mlir.engine`. Everything is validated when it is built.
"""

from __future__ import annotations

import enum
import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import InvalidLoopError
from pyop3_mlir.kernels.program import (
    Expr,
    IndexOf,
    KernelArgument,
    Load,
    LocalKernel,
    Op,
    postorder,
)

__all__ = [
    "INC",
    "MAX",
    "MIN",
    "READ",
    "RW",
    "WRITE",
    "Access",
    "Argument",
    "ArgumentSpec",
    "IndexTable",
    "IterationSet",
    "Kind",
    "LoopSpec",
    "Parloop",
]


class Access(enum.Enum):
    """How a loop treats an argument; the names are PyOP2's and pyop3's.

    READ packs start as the gathered values and are not written back. WRITE and INC packs start at
    zero; RW, MIN and MAX packs start as the gathered values. WRITE and RW store the pack (the last
    entity wins), INC adds it, MIN and MAX keep the smaller and the larger value.
    """

    READ = "READ"
    WRITE = "WRITE"
    RW = "RW"
    INC = "INC"
    MIN = "MIN"
    MAX = "MAX"

    @property
    def gathers(self) -> bool:
        """Whether the pack starts as the gathered values (otherwise at zero)."""
        return self in (Access.READ, Access.RW, Access.MIN, Access.MAX)

    @property
    def writes(self) -> bool:
        """Whether the loop changes the buffer."""
        return self is not Access.READ


READ, WRITE, RW, INC, MIN, MAX = Access


class Kind(enum.Enum):
    """How an entity finds its entries in a buffer."""

    DIRECT = "direct"
    INDIRECT = "indirect"
    GLOBAL = "global"


DTYPES = tuple(
    np.dtype(t)
    for t in (
        np.float64, np.float32, np.complex128, np.complex64, np.int32, np.uint32, np.int64
    )
)  # fmt: skip
"""The dtypes that a buffer may have."""

LARGEST = np.iinfo(np.int32).max
"""Entities are numbered in ``int32``."""


@dataclass(frozen=True, eq=False)
class IterationSet:
    """The entities that a loop visits, in this order.

    Parameters
    ----------
    size
        Number of iterations (core, owned and ghost together).
    core, owned
        Iterations ``[0, core)`` touch no halo data; ``[core, owned)`` are owned too; the rest are
        ghosts, which a loop does not visit unless it is asked to. Both default to ``size``.
    entities
        ``int32[size]`` where iteration i visits entity ``entities[i]`` (a subset, an order), or
        None where it visits entity i. Must not be changed afterwards.
    name
        For messages.
    """

    size: int
    core: int | None = None
    owned: int | None = None
    entities: npt.NDArray[np.int32] | None = None
    name: str = "cells"

    def __post_init__(self) -> None:
        where = f"iteration set {self.name}"
        size = _count(self.size, f"{where}: size", LARGEST)
        owned = size if self.owned is None else _count(self.owned, f"{where}: owned", LARGEST)
        core = owned if self.core is None else _count(self.core, f"{where}: core", LARGEST)
        if not core <= owned <= size:
            raise InvalidLoopError(
                f"{where}: 0 <= core <= owned <= size does not hold for "
                f"core={core}, owned={owned}, size={size}"
            )
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "core", core)
        object.__setattr__(self, "owned", owned)
        if self.entities is not None:
            entities = _integers(self.entities, f"entities of {where}")
            if entities.shape != (size,):
                raise InvalidLoopError(
                    f"{where}: entities has shape {entities.shape}, expected ({size},)"
                )
            wrong = (entities < 0) | (entities > LARGEST)
            if wrong.any():
                position = int(wrong.argmax())
                raise InvalidLoopError(
                    f"{where}: iteration {position} visits entity {int(entities[position])}, "
                    f"allowed are 0 to {LARGEST}"
                )
            object.__setattr__(self, "entities", entities.astype(np.int32, copy=False))

    @cached_property
    def extent(self) -> int:
        """One more than the largest entity visited: tables and direct buffers need as many rows."""
        if self.entities is None:
            return self.size
        return int(self.entities.max()) + 1 if self.size else 0

    @cached_property
    def repeats(self) -> bool:
        """Whether an entity is visited more than once."""
        if self.entities is None or self.size < 2:
            return False
        ordered = np.sort(self.entities)
        return bool((ordered[1:] == ordered[:-1]).any())

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of what is visited, and in which order."""
        digest = hashlib.blake2b(repr(self.size).encode(), digest_size=16)
        if self.entities is not None:
            digest.update(_bytes(self.entities) if self.size else b"none")
        return digest.hexdigest()


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    view: Any = array.reshape(-1).view(np.uint8)
    return memoryview(view)


def _count(value: Any, what: str, largest: int = 2**62) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidLoopError(f"{what}: {value!r} is not an integer") from None
    if not 0 <= number <= largest:
        raise InvalidLoopError(f"{what}: {number} is not within 0 to {largest}")
    return number


def _integers(values: Any, what: str) -> npt.NDArray[Any]:
    """Aligned, contiguous, native int32 or int64; the array itself where it is that already."""
    if np.ma.isMaskedArray(values):
        raise InvalidLoopError(f"{what}: masked arrays are not supported; mark entries by -1")
    try:
        array = np.asarray(values)
    except Exception as error:  # whatever the object's own conversion raises
        raise InvalidLoopError(f"{what}: cannot be made an array ({error})") from error
    if array.dtype.kind not in "iu":
        # an empty list becomes an empty array of floats
        if array.size or array.dtype.kind != "f":
            raise InvalidLoopError(f"{what}: dtype {array.dtype} is not an integer type")
        array = array.astype(np.int32)
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if high > np.iinfo(np.int64).max:
            raise InvalidLoopError(f"{what}: value {high} does not fit into int64")
        small = np.iinfo(np.int32)
        array = array.astype(np.int32 if small.min <= low <= high <= small.max else np.int64)
    result: npt.NDArray[Any] = np.require(array, requirements=["C", "A"])
    return result


@dataclass(frozen=True, eq=False)
class IndexTable:
    """The rows that each entity touches: a map, or any composition of maps.

    Parameters
    ----------
    values
        ``int32`` or ``int64`` ``[n, arity]``; row n belongs to entity n. Taken without a copy where
        it is contiguous and aligned. It must not be changed afterwards: its values are checked only
        here, and plans are cached with the table. Make a new table instead.
    bound
        One more than the largest value allowed: the number of rows of the target.
    allow_negative
        Whether negative values may occur. A negative entry reads as zero and is dropped on writing
        (that is how boundary conditions reach PETSc).
    name
        For messages.
    group
        So many consecutive entries lie near each other, as those of one row of a matrix do; a
        divisor of the arity. See :attr:`compact`.
    """

    values: npt.NDArray[Any]
    bound: int
    allow_negative: bool = False
    name: str = "map"
    group: int = 1

    def __post_init__(self) -> None:
        values = _integers(self.values, f"map {self.name}")
        object.__setattr__(self, "bound", _count(self.bound, f"map {self.name}: bound"))
        if not isinstance(self.allow_negative, bool | np.bool_):
            raise InvalidLoopError(
                f"map {self.name}: allow_negative is {self.allow_negative!r}, expected a bool"
            )
        if values.ndim != 2:
            raise InvalidLoopError(
                f"map {self.name}: expected an array [entities, arity], got shape {values.shape}"
            )
        group = _count(self.group, f"map {self.name}: group", LARGEST)
        if not group or values.shape[1] % group:
            raise InvalidLoopError(
                f"map {self.name}: {values.shape[1]} entries of an entity are no groups of {group}"
            )
        object.__setattr__(self, "group", group)
        if values.size:
            low, high = int(values.min()), int(values.max())
            if high >= self.bound or (low < 0 and not self.allow_negative):
                wrong = values >= self.bound
                if not self.allow_negative:
                    wrong |= values < 0
                entity, position = (int(i) for i in np.argwhere(wrong)[0])
                allowed = ["negative values"] if self.allow_negative else []
                allowed += [f"0 to {self.bound - 1}"] if self.bound else []
                raise InvalidLoopError(
                    f"map {self.name}: entity {entity}, position {position} holds "
                    f"{int(values[entity, position])}, allowed are "
                    f"{' and '.join(allowed) or 'no values'}"
                )
        object.__setattr__(self, "values", values)

    @property
    def size(self) -> int:
        """Number of entities."""
        return int(self.values.shape[0])

    @property
    def arity(self) -> int:
        """Number of rows that an entity touches."""
        return int(self.values.shape[1])

    @cached_property
    def has_negative(self) -> bool:
        """Whether an entry is negative."""
        return bool(self.allow_negative and self.values.size and self.values.min() < 0)

    @cached_property
    def compact(self) -> Compact | None:
        """The table in fewer bytes, where groups are long and their entries near enough.

        A table of the entries of element matrices can be larger than what the loop adds to, and
        such loops are bound by memory. Shorter groups save too little for the additions they cost.
        """
        return Compact.of(self.values, self.group) if self.group >= _LEAST_GROUP else None

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the contents."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.values.shape, self.values.dtype.str)).encode())
        if self.values.size:
            digest.update(_bytes(self.values))
        return digest.hexdigest()

    def shares_targets(self, iterations: IterationSet | None = None) -> bool:
        """Whether a target is touched by two iterations (twice by one does not count).

        Parameters
        ----------
        iterations
            The iterations to look at; every entity once where not given.
        """
        entities = None if iterations is None else iterations.entities
        values = self.values if entities is None else self.values[entities]
        if iterations is not None:
            values = values[: iterations.size]
        if not values.size:
            return False
        touched = values[values >= 0]
        if not touched.size:
            return False
        if int(touched.max()) > 8 * values.size:
            # few targets of many: number those that occur, so that memory follows the table
            values = np.unique(np.maximum(values, -1), return_inverse=True)[1].reshape(values.shape)
            values -= int(touched.size < values.size)
            touched = values[values >= 0]
        owner = np.zeros(int(touched.max()) + 1, np.int32)
        number = np.arange(len(values), dtype=np.int32)
        columns = [(column[column >= 0], number[column >= 0]) for column in values.T]
        for targets, numbers in columns:
            owner[targets] = numbers
        return any(bool((owner[targets] != numbers).any()) for targets, numbers in columns)

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """Plans made from this table (colours, segments), kept as long as the table lives."""
        return {}


@dataclass(frozen=True, eq=False)
class Compact:
    """A table whose entries are offsets from the smallest one of their group.

    Attributes
    ----------
    bases
        ``[n, groups]`` of the table's own dtype.
    offsets
        ``uint8`` or ``uint16`` ``[n, arity]``; the largest number there is stands for a negative
        entry.
    """

    bases: npt.NDArray[Any]
    offsets: npt.NDArray[Any]

    @classmethod
    def of(cls, values: npt.NDArray[Any], group: int) -> Compact | None:
        """The values ``[n, arity]`` in this form; None where entries are too far apart."""
        n, arity = values.shape
        bases = np.empty((n, arity // group), values.dtype)
        offsets = np.empty((n, arity), np.uint16)
        dropped, farthest = np.iinfo(np.uint16).max, 0
        # a few rows at a time, which stay in cache
        for start in range(0, n, _CHUNK):
            rows = values[start : start + _CHUNK].reshape(-1, arity // group, group)
            negative = rows < 0
            some = bool(negative.any())
            if some:
                rows = np.where(negative, np.iinfo(values.dtype).max, rows)
            base = rows[:, :, 0].copy()
            for k in range(1, group):
                np.minimum(base, rows[:, :, k], out=base)
            distance = rows - base[:, :, None]
            if some:
                distance[negative] = 0
                base[negative.all(axis=2)] = 0
            farthest = max(farthest, int(distance.max(initial=0)))
            if farthest >= dropped:
                return None
            if some:
                distance[negative] = dropped
            bases[start : start + _CHUNK] = base
            offsets[start : start + _CHUNK] = distance.reshape(-1, arity)
        # the largest number of two bytes becomes that of one
        small = farthest < np.iinfo(np.uint8).max
        return cls(bases, offsets.astype(np.uint8) if small else offsets)


# Rows of a table that are made compact at a time.
_CHUNK = 1024
# Measured on element matrices: with 4 columns (P1 on tetrahedra) loops take 3 to 6% longer, with 6
# (P2 on triangles) up to 6% less, with 30 (elasticity, P2 on tetrahedra) 10 to 20% less.
_LEAST_GROUP = 6


@dataclass(frozen=True, eq=False)
class Argument:
    """A buffer, and the rule by which an entity finds its entries in it.

    Slot ``i * components + c`` of the pack of entity n is element
    ``table[n, i] * stride + offset + c`` of the flattened buffer (indirect),
    ``n * stride + offset + c`` (direct, one row) or ``offset + c`` (global).

    Parameters
    ----------
    buffer
        A C-contiguous array of one of :data:`DTYPES`. Never copied here.
    access
        See :class:`Access`.
    kind
        See :class:`Kind`.
    table
        For indirect arguments.
    components
        Scalars of a row that the pack holds.
    stride
        Scalars from one row of the buffer to the next; ``components`` where not given. 1 for tables
        that hold offsets of scalars already.
    offset
        First scalar of a row that the pack holds (a view of one component).
    name
        For messages.
    cover
        A smaller table for planning, where there is one: entities that share none of its entries
        write to no common target. For a matrix it is the table of rows, which has the square root
        of the entries of ``table``.
    """

    buffer: npt.NDArray[Any]
    access: Access
    kind: Kind
    table: IndexTable | None = None
    components: int = 1
    stride: int | None = None
    offset: int = 0
    name: str = "argument"
    cover: IndexTable | None = None

    @classmethod
    def direct(cls, buffer: npt.NDArray[Any], access: Access, name: str = "dat") -> Argument:
        """Row n of ``buffer`` (shape ``[n, ...]``) belongs to entity n."""
        buffer = _rows(buffer, name)
        return cls(buffer, access, Kind.DIRECT, None, math.prod(buffer.shape[1:]), name=name)

    @classmethod
    def indirect(
        cls, buffer: npt.NDArray[Any], access: Access, table: IndexTable, name: str = "dat"
    ) -> Argument:
        """Rows ``table[n]`` of ``buffer`` (shape ``[rows, ...]``) belong to entity n."""
        buffer = _rows(buffer, name)
        return cls(buffer, access, Kind.INDIRECT, table, math.prod(buffer.shape[1:]), name=name)

    @classmethod
    def glob(cls, buffer: npt.NDArray[Any], access: Access, name: str = "global") -> Argument:
        """All of ``buffer`` belongs to each entity: a constant (READ) or a reduction."""
        buffer = _buffer(buffer, name)
        return cls(buffer, access, Kind.GLOBAL, None, buffer.size, name=name)

    @classmethod
    def matrix(
        cls,
        values: npt.NDArray[Any],
        access: Access,
        positions: IndexTable,
        rows: IndexTable | None = None,
        name: str = "mat",
    ) -> Argument:
        """Entries ``positions[n]`` of a sparse matrix's values belong to entity n.

        Parameters
        ----------
        values
            The values of a CSR matrix, ``[nnz]``, or of a blocked one, ``[blocks, rows, columns]``.
        access
            INC (add) or WRITE (insert); the other modes have no meaning for a matrix.
        positions
            Which of the values each entry of the element matrix (row-major) goes to, negative where
            it is dropped; see :func:`pyop3_mlir.planning.csr_positions`.
        rows
            The table of matrix rows that ``positions`` was made from, for planning: two entities
            with no row in common have no entry in common.
        name
            For messages.

        Raises
        ------
        InvalidLoopError
            For another access, or where the arrays do not fit together.
        """
        if access is not INC and access is not WRITE:
            raise InvalidLoopError(f"argument {name}: a matrix takes INC or WRITE, not {access!r}")
        return cls(values, access, Kind.INDIRECT, positions, name=name, cover=rows)

    def __post_init__(self) -> None:
        where = f"argument {self.name}"
        buffer = _buffer(self.buffer, self.name)
        if not isinstance(self.access, Access):
            raise InvalidLoopError(f"{where}: {self.access!r} is not an access mode")
        if not isinstance(self.kind, Kind):
            raise InvalidLoopError(f"{where}: {self.kind!r} is not a kind of argument")
        if self.access.writes and not buffer.flags.writeable:
            raise InvalidLoopError(f"{where}: access {self.access.name} but the array is read-only")
        for table in (self.table, self.cover):
            if table is not None and not isinstance(table, IndexTable):
                raise InvalidLoopError(
                    f"{where}: expected an IndexTable, got {type(table).__name__}"
                )
        if (self.table is not None) != (self.kind is Kind.INDIRECT):
            raise InvalidLoopError(
                f"{where}: {self.kind.value} arguments "
                f"{'need' if self.kind is Kind.INDIRECT else 'take no'} table"
            )
        if self.cover is not None and (self.table is None or self.cover.size != self.table.size):
            raise InvalidLoopError(
                f"{where}: map {self.cover.name} for planning has {self.cover.size} rows, "
                f"expected {self.table.size if self.table is not None else 'no such map'}"
            )
        components = _count(self.components, f"{where}: components")
        stride = components if self.stride is None else _count(self.stride, f"{where}: stride")
        object.__setattr__(self, "components", components)
        object.__setattr__(self, "stride", stride)
        object.__setattr__(self, "offset", _count(self.offset, f"{where}: offset"))
        if self.kind is Kind.GLOBAL and self.access in (WRITE, RW):
            raise InvalidLoopError(
                f"{where}: a global cannot be accessed with {self.access.name} in a "
                "parallel loop; use INC, MIN or MAX"
            )
        if self.access in (MIN, MAX) and buffer.dtype.kind == "c":
            raise InvalidLoopError(f"{where}: {self.access.name} has no meaning for {buffer.dtype}")
        if self.access.writes and not stride and self.table is not None and self.table.bound > 1:
            raise InvalidLoopError(
                f"{where}: stride 0 puts all rows at one place, access {self.access.name} changes "
                "them; use a global"
            )
        if self.table is not None and self.table.arity and components:
            self._check_rows(self.table.bound if self.table.size else 0, "map bound")
        if self.kind is Kind.GLOBAL and components:
            self._check_rows(1, "rows")

    def _check_rows(self, rows: int, what: str) -> None:
        """Raise unless the buffer holds ``rows`` rows."""
        assert self.stride is not None
        needed = (rows - 1) * self.stride + self.offset + self.components if rows else 0
        if needed > self.buffer.size:
            raise InvalidLoopError(
                f"argument {self.name}: the buffer holds {self.buffer.size} scalars but {what} "
                f"{rows} with {self.components} components, stride {self.stride} and offset "
                f"{self.offset} needs {needed}"
            )

    @property
    def slots(self) -> int:
        """Number of scalars in the pack of one entity."""
        rows = self.table.arity if self.table is not None else 1
        return rows * self.components

    def range(self) -> tuple[int, int]:
        """Addresses of the first byte of the buffer and of the first byte after it."""
        start = self.buffer.__array_interface__["data"][0]
        return start, start + self.buffer.nbytes


def _buffer(buffer: Any, name: str) -> npt.NDArray[Any]:
    if not isinstance(buffer, np.ndarray):
        raise InvalidLoopError(
            f"argument {name}: expected a numpy array, got {type(buffer).__name__}"
        )
    array: npt.NDArray[Any] = buffer
    if np.ma.isMaskedArray(buffer):
        raise InvalidLoopError(f"argument {name}: masked arrays are not supported")
    if buffer.dtype not in DTYPES:
        raise InvalidLoopError(
            f"argument {name}: dtype {buffer.dtype.str} ({buffer.dtype}) is not one of "
            f"{', '.join(map(str, DTYPES))} in native byte order"
        )
    if not buffer.flags.c_contiguous:
        raise InvalidLoopError(
            f"argument {name}: the array is not C-contiguous; pass the whole array, and "
            "components, stride and offset of the part"
        )
    if not buffer.flags.aligned:
        raise InvalidLoopError(f"argument {name}: the array is not aligned to its item size")
    return array


def _components_apart(first: Argument, second: Argument) -> bool:
    """Whether two arguments on the same array reach different scalars of it for all entities."""
    (a, b), (c, d) = (
        (argument.offset, argument.offset + argument.components) for argument in (first, second)
    )
    if b > c and d > a:
        return False
    if first.kind is Kind.GLOBAL and second.kind is Kind.GLOBAL:
        return True
    if first.kind is Kind.GLOBAL or second.kind is Kind.GLOBAL:
        return False
    assert first.stride is not None
    return first.stride == second.stride and max(b, d) <= first.stride


def _rows(buffer: Any, name: str) -> npt.NDArray[Any]:
    array = _buffer(buffer, name)
    if not array.ndim:
        raise InvalidLoopError(
            f"argument {name}: the array has no axis of rows; use Argument.glob for a scalar"
        )
    return array


def _overlap(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    """Whether two contiguous arrays have a byte in common."""
    if not first.nbytes or not second.nbytes:
        return False
    a, c = (array.__array_interface__["data"][0] for array in (first, second))
    return bool(a < c + second.nbytes and c < a + first.nbytes)


@dataclass(frozen=True)
class ArgumentSpec:
    """What compiled code depends on in an :class:`Argument`: everything but the data. Hashable.

    Attributes
    ----------
    kind, access, components, stride, offset
        As in :class:`Argument`.
    arity
        Rows a pack; 1 for direct and global arguments.
    dtype
        numpy's dtype string of the buffer.
    index_dtype
        numpy's dtype string of the table, or None.
    negative
        Whether the table can hold negative entries.
    buffer, table
        Operand numbers: equal numbers are the same array.
    group
        Entries of the table that share a base, where it is compact; else 1.
    offset_dtype
        numpy's dtype string of a compact table's offsets, else None.
    """

    kind: Kind
    access: Access
    arity: int
    components: int
    stride: int
    offset: int
    dtype: str
    index_dtype: str | None
    negative: bool
    buffer: int
    table: int | None
    group: int = 1
    offset_dtype: str | None = None


@dataclass(frozen=True)
class LoopSpec:
    """What compiled code depends on in a :class:`Parloop`. Hashable, holds no data.

    Attributes
    ----------
    name
        Name of the loop, for symbols and messages (does not enter comparisons).
    arguments
        One an argument of the kernel.
    entities
        numpy's dtype string of the entity list, or None where iteration i visits entity i.
    """

    name: str = field(compare=False)
    arguments: tuple[ArgumentSpec, ...]
    entities: str | None = None


@dataclass(frozen=True, eq=False)
class Parloop:
    """A parallel loop.

    Its meaning is that of a sequential loop over the iterations: all packs are gathered, the kernel
    runs, the packs are scattered, argument after argument, slot after slot.

    Parameters
    ----------
    kernel
        The local kernel.
    iteration_set
        The entities to visit.
    arguments
        One for each argument of the kernel, in its order.
    name
        For messages, reports and symbol names; the kernel's name where not given.

    Raises
    ------
    InvalidLoopError
        Where the parts do not fit together, or the loop has no meaning that is independent of the
        order of iteration (a buffer that is read through one argument and changed through another).
    """

    kernel: LocalKernel
    iteration_set: IterationSet
    arguments: tuple[Argument, ...]
    name: str = ""

    def __init__(
        self,
        kernel: LocalKernel,
        iteration_set: IterationSet,
        arguments: Sequence[Argument],
        name: str = "",
    ) -> None:
        where = f"loop {name or getattr(kernel, 'name', '')}"
        if not isinstance(kernel, LocalKernel):
            raise InvalidLoopError(f"{where}: expected a LocalKernel, got {type(kernel).__name__}")
        if not isinstance(iteration_set, IterationSet):
            raise InvalidLoopError(
                f"{where}: expected an IterationSet, got {type(iteration_set).__name__}"
            )
        if not isinstance(arguments, Sequence):
            raise InvalidLoopError(f"{where}: arguments must be a sequence")
        for number, argument in enumerate(arguments):
            if not isinstance(argument, Argument):
                raise InvalidLoopError(
                    f"{where}, argument {number}: expected an Argument, got "
                    f"{type(argument).__name__}"
                )
        object.__setattr__(self, "kernel", kernel)
        object.__setattr__(self, "iteration_set", iteration_set)
        object.__setattr__(self, "arguments", tuple(arguments))
        object.__setattr__(self, "name", name or kernel.name)
        self._check()

    def _check(self) -> None:
        kernel, arguments = self.kernel, self.arguments
        if len(kernel.arguments) != len(arguments):
            raise InvalidLoopError(
                f"loop {self.name}: the kernel takes {len(kernel.arguments)} arguments, "
                f"{len(arguments)} were given"
            )
        extent = self.iteration_set.extent
        for number, (formal, actual) in enumerate(zip(kernel.arguments, arguments, strict=True)):
            where = f"loop {self.name}, argument {number} ({actual.name})"
            if formal.size != actual.slots:
                raise InvalidLoopError(
                    f"{where}: the kernel's {formal.name} has shape {formal.shape}, the pack of an "
                    f"entity has {actual.slots} entries"
                )
            if formal.dtype != actual.buffer.dtype:
                raise InvalidLoopError(
                    f"{where}: the kernel's {formal.name} is {formal.dtype}, the buffer "
                    f"{actual.buffer.dtype}"
                )
            pieces = sum(output.argument is formal for output in kernel.outputs)
            if pieces and not actual.access.writes:
                raise InvalidLoopError(f"{where}: access READ, but the kernel changes it")
            if pieces > 1 and actual.access is not INC:
                raise InvalidLoopError(
                    f"{where}: access {actual.access.name}, but the kernel gives {pieces} values "
                    "for it; only INC adds several up"
                )
            if actual.table is not None and actual.table.size < extent:
                raise InvalidLoopError(
                    f"{where}: map {actual.table.name} has {actual.table.size} rows, iteration set "
                    f"{self.iteration_set.name} visits entity {extent - 1}"
                )
            if actual.kind is Kind.DIRECT and actual.components:
                self._check_direct(actual, where, extent)
            if actual.access.writes:
                self._check_operands(actual, where)
        self._check_aliases()

    def _check_direct(self, argument: Argument, where: str, extent: int) -> None:
        try:
            argument._check_rows(extent, "entities")
        except InvalidLoopError as error:
            raise InvalidLoopError(f"{where}: {error}") from None
        assert argument.stride is not None
        if argument.access.writes and extent > 1 and argument.stride < argument.components:
            raise InvalidLoopError(
                f"{where}: rows overlap (stride {argument.stride}, {argument.components} "
                f"components) but the loop changes them; what entities share needs a map"
            )

    def _check_operands(self, argument: Argument, where: str) -> None:
        """Refuse to change indices that are in use: they were checked against their bounds once."""
        indices = [
            (f"map {t.name}", t.values) for a in self.arguments if (t := a.table) is not None
        ]
        if self.iteration_set.entities is not None:
            indices.append(
                (f"iteration set {self.iteration_set.name}", self.iteration_set.entities)
            )
        for what, values in indices:
            if _overlap(argument.buffer, values):
                raise InvalidLoopError(
                    f"{where}: access {argument.access.name}, but its memory holds the indices of "
                    f"{what}"
                )

    def _check_aliases(self) -> None:
        """Refuse loops whose result depends on the order of iteration in a way no one defined.

        Two arguments may share an array where none of them changes it, where their components are
        apart, or where both add to it (INC), take the smaller or larger value (MIN, MAX), or store
        (WRITE: the later entity wins, and within an entity the later argument).
        """
        arguments = self.arguments
        for i, first in enumerate(arguments):
            for j in range(i + 1, len(arguments)):
                second = arguments[j]
                if not (first.access.writes or second.access.writes):
                    continue
                if not _overlap(first.buffer, second.buffer):
                    continue
                where = (
                    f"loop {self.name}: arguments {i} ({first.name}, {first.access.name}) and "
                    f"{j} ({second.name}, {second.access.name})"
                )
                if first.range() != second.range() or first.buffer.dtype != second.buffer.dtype:
                    raise InvalidLoopError(
                        f"{where} overlap in memory without being the same array; pass the whole "
                        "array to both, with components, stride and offset of the part"
                    )
                if _components_apart(first, second):
                    continue
                if first.access is not second.access or first.access is RW:
                    raise InvalidLoopError(
                        f"{where} are the same array: what one reads depends on when the other "
                        "changes it. Use one argument with access RW, or a copy"
                    )
                if (first.kind is Kind.GLOBAL) != (second.kind is Kind.GLOBAL):
                    raise InvalidLoopError(
                        f"{where} are the same array, changed as a global and entity by entity. "
                        "Reduce into an array of its own"
                    )

    @cached_property
    def order_dependent(self) -> bool:
        """Whether the result depends on the order of the iterations, beyond rounding.

        True where two iterations go through the same targets of an argument with access RW, or of
        one with MIN or MAX whose pack the kernel uses for more than that minimum or maximum: the
        second reads what the first stored. Such a loop runs in order, one entity after another.
        """
        iterations = self.iteration_set
        for formal, argument in zip(self.kernel.arguments, self.arguments, strict=True):
            if not argument.slots or not _reads_what_it_stores(self.kernel, formal, argument):
                continue
            if argument.kind is Kind.GLOBAL:
                if iterations.size > 1:
                    return True
                continue
            if argument.table is None:
                if iterations.repeats:
                    return True
                continue
            assert argument.stride is not None
            if argument.stride < argument.components or argument.table.shares_targets(iterations):
                return True
        return False

    @cached_property
    def spec(self) -> LoopSpec:
        """What compiled code depends on."""
        buffers: dict[Any, int] = {}
        tables: dict[Any, int] = {}
        specs = []
        for argument in self.arguments:
            # an empty array has no address of its own
            empty = not argument.buffer.nbytes
            where = id(argument.buffer) if empty else argument.range()
            key = (empty, where, argument.buffer.dtype.str)
            buffer = buffers.setdefault(key, len(buffers))
            table = argument.table
            compact = table.compact if table is not None else None
            assert argument.stride is not None
            specs.append(
                ArgumentSpec(
                    kind=argument.kind,
                    access=argument.access,
                    arity=table.arity if table is not None else 1,
                    components=argument.components,
                    stride=argument.stride,
                    offset=argument.offset,
                    dtype=argument.buffer.dtype.str,
                    index_dtype=table.values.dtype.str if table is not None else None,
                    negative=table.allow_negative if table is not None else False,
                    buffer=buffer,
                    table=tables.setdefault((id(table.values), table.group), len(tables))
                    if table is not None
                    else None,
                    group=table.group if table is not None and compact is not None else 1,
                    offset_dtype=compact.offsets.dtype.str if compact is not None else None,
                )
            )
        entities = self.iteration_set.entities
        return LoopSpec(
            self.name, tuple(specs), entities.dtype.str if entities is not None else None
        )

    @cached_property
    def buffers(self) -> tuple[npt.NDArray[Any], ...]:
        """The distinct buffers, by operand number."""
        found = {
            spec.buffer: argument.buffer
            for spec, argument in reversed(
                list(zip(self.spec.arguments, self.arguments, strict=True))
            )
        }
        return tuple(found[number] for number in range(len(found)))

    @cached_property
    def tables(self) -> tuple[IndexTable, ...]:
        """The distinct tables, by operand number."""
        found = {
            spec.table: argument.table
            for spec, argument in reversed(
                list(zip(self.spec.arguments, self.arguments, strict=True))
            )
            if spec.table is not None and argument.table is not None
        }
        return tuple(found[number] for number in range(len(found)))

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that a run cannot avoid to move: each array once, twice where it is changed."""
        written = {spec.buffer for spec in self.spec.arguments if spec.access.writes}
        buffers = (b.nbytes * (1 + (n in written)) for n, b in enumerate(self.buffers))
        return sum(array.nbytes for array in self.index_arrays) + sum(buffers)

    @property
    def index_arrays(self) -> list[npt.NDArray[Any]]:
        """What compiled code reads of the tables: values or bases, by number, then offsets."""
        compact = [table.compact for table in self.tables]
        first = [
            table.values if found is None else found.bases
            for table, found in zip(self.tables, compact, strict=True)
        ]
        return first + [found.offsets for found in compact if found is not None]


def _reads_what_it_stores(kernel: LocalKernel, formal: KernelArgument, argument: Argument) -> bool:
    """Whether it matters that a pack holds what earlier iterations left.

    ``x[i] = min(x[i], ...)`` may start from an older value of a MIN argument, for the smaller one
    is kept when the pack is stored. Every other use of such a pack is taken to matter.
    """
    if argument.access is RW:
        return True
    if argument.access not in (MIN, MAX):
        return False
    loads = {
        node
        for statement in kernel.statements
        for node in postorder(statement.bodies)
        if isinstance(node, Load)
    }
    read = {load for load in loads if load.source is formal}
    outputs = {output.value: output for output in kernel.outputs if output.argument is formal}
    temporaries = {load.source for load in loads}
    for statement in kernel.statements:
        for result, body in zip(statement.results, statement.bodies, strict=True):
            found = read.intersection(postorder([body]))
            if not found:
                continue
            output = outputs.get(result)
            if output is None or result in temporaries or statement.reductions:
                return True
            if len(output.dims) != 1 or output.slot is not IndexOf(output.dims[0]):
                return True
            if len(formal.shape) != 1 or found != {Load(formal, [IndexOf(statement.dims[0])])}:
                return True
            if not _only_within(body, argument.access.name.lower(), found.pop()):
                return True
    return False


def _only_within(body: Expr, name: str, leaf: Expr) -> bool:
    """Whether ``leaf`` is used by operations ``name`` alone, from the root of ``body`` down."""
    chain = [body]
    outside: list[Expr] = []
    while chain:
        node = chain.pop()
        if isinstance(node, Op) and node.name == name:
            chain += node.children
        elif node is not leaf:
            outside.append(node)
    return all(node is not leaf for node in postorder(outside))

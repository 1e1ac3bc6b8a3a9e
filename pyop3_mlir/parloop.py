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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import InvalidLoopError
from pyop3_mlir.kernels.program import LocalKernel

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
        ``int32[size]`` where iteration i visits entity ``entities[i]`` (a subset, an order), or None
        where it visits entity i.
    name
        For messages.
    """

    size: int
    core: int | None = None
    owned: int | None = None
    entities: npt.NDArray[np.int32] | None = None
    name: str = "cells"

    def __post_init__(self) -> None:
        owned = self.size if self.owned is None else self.owned
        core = owned if self.core is None else self.core
        if not 0 <= core <= owned <= self.size:
            raise InvalidLoopError(
                f"iteration set {self.name}: 0 <= core <= owned <= size does not hold for "
                f"core={core}, owned={owned}, size={self.size}"
            )
        object.__setattr__(self, "core", core)
        object.__setattr__(self, "owned", owned)
        if self.entities is not None:
            entities = _integers(self.entities, f"entities of iteration set {self.name}")
            if entities.shape != (self.size,):
                raise InvalidLoopError(
                    f"iteration set {self.name}: entities has shape {entities.shape}, "
                    f"expected ({self.size},)"
                )
            if self.size and int(entities.min()) < 0:
                position = int(np.flatnonzero(entities < 0)[0])
                raise InvalidLoopError(
                    f"iteration set {self.name}: iteration {position} visits entity "
                    f"{int(entities[position])}"
                )
            object.__setattr__(self, "entities", entities)

    @cached_property
    def extent(self) -> int:
        """One more than the largest entity visited: tables and direct buffers need as many rows."""
        if self.entities is None:
            return self.size
        return int(self.entities.max()) + 1 if self.size else 0


def _integers(values: Any, what: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        if array.size:
            raise InvalidLoopError(f"{what}: dtype {array.dtype} is not an integer type")
        array = array.astype(np.int32)
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        limits = np.iinfo(np.int64)
        if not limits.min <= low <= high <= limits.max:
            raise InvalidLoopError(f"{what}: value {high} does not fit into int64")
        small = np.iinfo(np.int32)
        array = array.astype(np.int32 if small.min <= low <= high <= small.max else np.int64)
    return np.ascontiguousarray(array)


@dataclass(frozen=True, eq=False)
class IndexTable:
    """The rows that each entity touches: a map, or any composition of maps.

    Parameters
    ----------
    values
        ``int32`` or ``int64`` ``[n, arity]``; row n belongs to entity n. Taken without a copy where it
        is contiguous. Must not be changed afterwards: plans are cached with the table.
    bound
        One more than the largest value allowed, usually the number of rows of the target.
    allow_negative
        Whether negative values may occur. A negative entry reads as zero and is dropped on writing
        (that is how boundary conditions reach PETSc).
    name
        For messages.
    """

    values: npt.NDArray[Any]
    bound: int
    allow_negative: bool = False
    name: str = "map"

    def __post_init__(self) -> None:
        values = _integers(self.values, f"map {self.name}")
        if values.ndim != 2:
            raise InvalidLoopError(
                f"map {self.name}: expected an array [entities, arity], got shape {values.shape}"
            )
        if values.size:
            low, high = int(values.min()), int(values.max())
            if high >= self.bound or (low < 0 and not self.allow_negative):
                wrong = values >= self.bound
                if not self.allow_negative:
                    wrong |= values < 0
                entity, position = (int(i) for i in np.argwhere(wrong)[0])
                raise InvalidLoopError(
                    f"map {self.name}: entity {entity}, position {position} holds "
                    f"{int(values[entity, position])}, allowed are "
                    f"{'negative values and ' if self.allow_negative else ''}0 to {self.bound - 1}"
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
    def fingerprint(self) -> str:
        """Hexadecimal digest of the contents."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.values.shape, self.values.dtype.str)).encode())
        digest.update(memoryview(self.values.reshape(-1)).cast("B"))
        return digest.hexdigest()

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """Plans made from this table (colours, segments), kept as long as the table lives."""
        return {}


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
    """

    buffer: npt.NDArray[Any]
    access: Access
    kind: Kind
    table: IndexTable | None = None
    components: int = 1
    stride: int | None = None
    offset: int = 0
    name: str = "argument"

    @classmethod
    def direct(cls, buffer: npt.NDArray[Any], access: Access, name: str = "dat") -> Argument:
        """Row n of ``buffer`` (shape ``[n, ...]``) belongs to entity n."""
        buffer = _buffer(buffer, name)
        rows = buffer.shape[0] if buffer.ndim else 0
        components = math.prod(buffer.shape[1:]) if rows else math.prod(buffer.shape[1:] or (1,))
        return cls(buffer, access, Kind.DIRECT, None, components, name=name)

    @classmethod
    def indirect(
        cls, buffer: npt.NDArray[Any], access: Access, table: IndexTable, name: str = "dat"
    ) -> Argument:
        """Rows ``table[n]`` of ``buffer`` (shape ``[rows, ...]``) belong to entity n."""
        buffer = _buffer(buffer, name)
        components = math.prod(buffer.shape[1:])
        return cls(buffer, access, Kind.INDIRECT, table, components, name=name)

    @classmethod
    def glob(cls, buffer: npt.NDArray[Any], access: Access, name: str = "global") -> Argument:
        """All of ``buffer`` belongs to each entity: a constant (READ) or a reduction."""
        buffer = _buffer(buffer, name)
        return cls(buffer, access, Kind.GLOBAL, None, buffer.size, name=name)

    def __post_init__(self) -> None:
        buffer = _buffer(self.buffer, self.name)
        if not isinstance(self.access, Access):
            raise InvalidLoopError(f"argument {self.name}: {self.access!r} is not an access mode")
        if self.access.writes and not buffer.flags.writeable:
            raise InvalidLoopError(
                f"argument {self.name}: access {self.access.name} but the array is read-only"
            )
        if (self.table is not None) != (self.kind is Kind.INDIRECT):
            raise InvalidLoopError(
                f"argument {self.name}: {self.kind.value} arguments "
                f"{'need' if self.kind is Kind.INDIRECT else 'take no'} table"
            )
        stride = self.components if self.stride is None else self.stride
        if self.components < 0 or stride < 0 or self.offset < 0:
            raise InvalidLoopError(
                f"argument {self.name}: components={self.components}, stride={stride} and "
                f"offset={self.offset} must not be negative"
            )
        if self.kind is Kind.GLOBAL and self.access in (WRITE, RW):
            raise InvalidLoopError(
                f"argument {self.name}: a global cannot be accessed with {self.access.name} in a "
                "parallel loop; use INC, MIN or MAX"
            )
        object.__setattr__(self, "stride", stride)
        if self.table is not None and self.table.arity and self.components:
            self._check_rows(self.table.bound if self.table.size else 0, "map bound")
        if self.kind is Kind.GLOBAL and self.components:
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
    if buffer.dtype not in DTYPES or not buffer.dtype.isnative:
        raise InvalidLoopError(
            f"argument {name}: dtype {buffer.dtype} is not one of {', '.join(map(str, DTYPES))}"
        )
    if not buffer.flags.c_contiguous:
        raise InvalidLoopError(f"argument {name}: the array is not C-contiguous")
    if buffer.ctypes.data % buffer.dtype.itemsize:
        raise InvalidLoopError(f"argument {name}: the array is not aligned to its item size")
    return buffer


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
        outputs = {output.argument for output in kernel.outputs}
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
            if formal in outputs and not actual.access.writes:
                raise InvalidLoopError(f"{where}: access READ, but the kernel changes it")
            extent = self.iteration_set.extent
            if actual.table is not None and actual.table.size < extent:
                raise InvalidLoopError(
                    f"{where}: map {actual.table.name} has {actual.table.size} rows, iteration set "
                    f"{self.iteration_set.name} visits entity {extent - 1}"
                )
            if actual.kind is Kind.DIRECT and actual.components:
                try:
                    actual._check_rows(extent, "entities")
                except InvalidLoopError as error:
                    raise InvalidLoopError(f"{where}: {error}") from None
        self._check_aliases()

    def _check_aliases(self) -> None:
        """Refuse loops whose result depends on the order of iteration in a way no one defined."""
        arguments = self.arguments
        for i, first in enumerate(arguments):
            for j in range(i + 1, len(arguments)):
                second = arguments[j]
                if not (first.access.writes or second.access.writes):
                    continue
                (a, b), (c, d) = first.range(), second.range()
                if not (a < d and c < b):
                    continue
                where = (
                    f"loop {self.name}: arguments {i} ({first.name}, {first.access.name}) and "
                    f"{j} ({second.name}, {second.access.name})"
                )
                if (a, b) != (c, d) or first.buffer.dtype != second.buffer.dtype:
                    raise InvalidLoopError(
                        f"{where} overlap in memory without being the same array"
                    )
                if first.access is not second.access:
                    raise InvalidLoopError(
                        f"{where} are the same array: what one reads depends on when the other "
                        "changes it. Use one argument with access RW, or a copy"
                    )

    @cached_property
    def spec(self) -> LoopSpec:
        """What compiled code depends on."""
        buffers: dict[int, int] = {}
        tables: dict[int, int] = {}
        specs = []
        for argument in self.arguments:
            start, _ = argument.range()
            # an empty array has no address of its own
            key = start if argument.buffer.nbytes else -id(argument.buffer)
            buffer = buffers.setdefault(key, len(buffers))
            table = argument.table
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
                    table=tables.setdefault(id(table.values), len(tables))
                    if table is not None
                    else None,
                )
            )
        entities = self.iteration_set.entities
        return LoopSpec(self.name, tuple(specs), entities.dtype.str if entities is not None else None)

    @cached_property
    def buffers(self) -> tuple[npt.NDArray[Any], ...]:
        """The distinct buffers, by operand number."""
        found = {
            spec.buffer: argument.buffer
            for spec, argument in reversed(list(zip(self.spec.arguments, self.arguments, strict=True)))
        }
        return tuple(found[number] for number in range(len(found)))

    @cached_property
    def tables(self) -> tuple[IndexTable, ...]:
        """The distinct tables, by operand number."""
        found = {
            spec.table: argument.table
            for spec, argument in reversed(list(zip(self.spec.arguments, self.arguments, strict=True)))
            if spec.table is not None and argument.table is not None
        }
        return tuple(found[number] for number in range(len(found)))

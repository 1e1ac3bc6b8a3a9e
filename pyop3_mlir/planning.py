"""What a scatter needs to know beforehand: colours, segments, last writers, positions in a matrix.

Everything here is made once from index tables, vectorised in numpy, deterministic, and cached
with the table (:attr:`IndexTable.plans`). A *target* is a row that a table names, a *contribution*
is one entry of the table as the loop meets it, number ``iteration * arity + position``.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import InvalidLoopError, UnsupportedLoopError
from pyop3_mlir.parloop import WRITE, Argument, IndexTable, Kind, Parloop

__all__ = [
    "Colouring",
    "Segments",
    "as_scalars",
    "colour",
    "colour_loop",
    "coo_indices",
    "csr_pattern",
    "csr_positions",
    "last_writer_table",
    "last_writers",
    "order_free",
    "segments",
]

Integers = npt.NDArray[Any]
T = TypeVar("T")

COLOURS = 64
"""Colours that one machine word holds: larger colourings are made from several such windows."""

HUB = 1024
"""A target of more contributions than this needs so many colours that none of them is worth it."""

SWEEP = 509
"""Steps of a sweep over the entities; a prime, so as not to resonate with structured meshes."""

PLANS = 32
"""Plans kept with one table; the oldest goes first."""


@dataclass(frozen=True, eq=False)
class Colouring:
    """Entities in groups, no two of one group with a target in common.

    Attributes
    ----------
    order
        ``int32[n]``, the entities to visit, colour by colour, ascending within a colour. It takes
        the place of the iteration set's list of entities.
    offsets
        ``int64[colours + 1]``; colour c is ``order[offsets[c] : offsets[c + 1]]``.
    """

    order: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """``int64[colours]``, number of entities of each colour."""
        return np.diff(self.offsets)


@dataclass(frozen=True, eq=False)
class Segments:
    """The contributions to each target, as CSR.

    Attributes
    ----------
    offsets
        ``[targets + 1]``; the list of target t is ``contributions[offsets[t] : offsets[t + 1]]``.
    contributions
        ``[kept]``, contribution numbers, ascending within a target. Dropped (negative) entries of
        the table occur in no list. Both arrays are ``int32`` where the numbers allow, else
        ``int64``.
    """

    offsets: Integers
    contributions: Integers


def colour(
    tables: Sequence[tuple[IndexTable, Hashable]],
    size: int,
    entities: npt.NDArray[np.int32] | None = None,
    start: int = 0,
) -> Colouring:
    """Group iterations so that no two of a group write to the same target.

    Greedy colouring in several places of the mesh at once: each round takes some hundred entities
    that lie far apart, gives each the lowest colour that is free at all its targets (a bit mask a
    target), and keeps those that met no other of the same round (A. H. Gebremedhin and F. Manne,
    "Scalable parallel graph coloring algorithms", Concurrency: Practice and Experience 12, 2000).
    Colour classes are then coloured again, the smallest first, which never needs more colours
    (J. Culberson, "Iterated greedy graph coloring", 1992), and evened out (H. Lu et al., "Balanced
    coloring for parallel computing applications", IPDPS 2015).

    Parameters
    ----------
    tables
        The tables that the loop writes through, each with a key that tells buffers apart: equal
        numbers of two tables are the same target where the keys are equal. A negative entry is no
        target. A target may occur twice in one row.
    size
        Iterations up to this one are coloured.
    entities
        ``int32[>= size]``, where iteration i visits ``entities[i]``.
    start
        First iteration to colour.

    Returns
    -------
    Colouring
        Deterministic. An entity with a target of more than :data:`HUB` contributions gets a colour
        of its own.

    Raises
    ------
    InvalidLoopError
        Where a table has fewer rows than the iterations visit.
    """
    groups: dict[Hashable, int] = {}
    numbered = [(table, groups.setdefault(key, len(groups))) for table, key in tables]
    numbered = [(table, group) for table, group in numbered if table.arity]
    for table, _ in numbered:
        _check_iterations(table, size, entities, start)
    if not numbered:
        order = _entities(size, entities, start).astype(np.int32)
        return Colouring(order, np.array([0, len(order)] if len(order) else [0]))
    first = numbered[0][0]
    others = tuple((table.fingerprint, group) for table, group in numbered[1:])
    key = ("colour", start, size, _digest(entities), others)
    return _cached(first, key, lambda: _colour(_Targets(numbered, size, entities, start)))


def segments(
    table: IndexTable,
    size: int,
    entities: npt.NDArray[np.int32] | None = None,
    start: int = 0,
) -> Segments:
    """Sort the contributions of iterations ``[start, size)`` by target.

    Parameters
    ----------
    table
        Its bound is the number of targets.
    size, entities, start
        As in :func:`colour`. Contributions count from iteration ``start``.

    Raises
    ------
    InvalidLoopError
        Where the table has fewer rows than the iterations visit.
    """
    _check_iterations(table, size, entities, start)

    def make() -> Segments:
        targets, kept = _flat(table, size, entities, start)
        order = _stable_order(targets, table.bound)
        contributions = order if kept is None else kept[order]
        kind = _index_dtype(max((size - start) * table.arity, table.bound))
        offsets = np.zeros(table.bound + 1, kind)
        np.cumsum(np.bincount(targets, minlength=table.bound), out=offsets[1:])
        return Segments(offsets, contributions.astype(kind, copy=False))

    return _cached(table, ("segments", start, size, _digest(entities)), make)


def last_writers(
    table: IndexTable,
    size: int,
    entities: npt.NDArray[np.int32] | None = None,
    start: int = 0,
) -> Integers:
    """Tell for each target which contribution a sequential loop would store last.

    Parameters
    ----------
    table, size, entities, start
        As in :func:`segments`.

    Returns
    -------
    ndarray
        ``[table.bound]`` contribution numbers, -1 where nothing is stored; ``int32`` where the
        numbers allow, else ``int64``.
    """
    _check_iterations(table, size, entities, start)

    def make() -> Integers:
        targets, kept = _flat(table, size, entities, start)
        kind = _index_dtype((size - start) * table.arity)
        winners = np.full(table.bound, -1, kind)
        numbers = np.arange(targets.size, dtype=kind) if kept is None else kept
        np.maximum.at(winners, targets, numbers.astype(kind, copy=False))
        return winners

    return _cached(table, ("last_writers", start, size, _digest(entities)), make)


def last_writer_table(
    table: IndexTable,
    size: int,
    entities: npt.NDArray[np.int32] | None = None,
    start: int = 0,
) -> IndexTable:
    """Drop (set to -1) every entry whose value would be overwritten later in the loop.

    Storing through the result gives what a sequential loop over exactly these iterations gives, in
    whatever order they run.

    Parameters
    ----------
    table, size, entities, start
        As in :func:`segments`.
    """
    _check_iterations(table, size, entities, start)

    def make() -> IndexTable:
        winners = last_writers(table, size, entities, start)
        winners = winners[winners >= 0]
        iterations, positions = np.divmod(winners, max(table.arity, 1))
        rows = iterations + start if entities is None else entities[iterations + start]
        values = np.full_like(table.values, -1)
        values[rows, positions] = table.values[rows, positions]
        return IndexTable(values, table.bound, True, f"{table.name} (last writers)")

    return _cached(table, ("last_writer_table", start, size, _digest(entities)), make)


# ---------------------------------------------------------------------------------------------
# Whole loops


def as_scalars(argument: Argument, extent: int) -> Argument:
    """Turn an argument into one whose table names scalars of the buffer.

    Parameters
    ----------
    argument
        Direct or indirect.
    extent
        Number of entities to cover where the argument is direct.

    Returns
    -------
    Argument
        With the same pack, one component and stride 1. Negative entries stay negative.
    """
    assert argument.stride is not None
    if argument.kind is Kind.GLOBAL:
        raise InvalidLoopError(f"argument {argument.name}: a global has no table")
    first = _rows_of(argument, extent)
    components = np.arange(argument.offset, argument.offset + argument.components)
    values = first.values.astype(np.int64)[:, :, None] * argument.stride + components
    values[first.values < 0] = -1
    table = IndexTable(
        values.reshape(first.size, argument.slots).astype(
            _index_dtype(argument.buffer.size), copy=False
        ),
        argument.buffer.size,
        first.allow_negative,
        f"{first.name} (scalars)",
    )
    return replace(argument, kind=Kind.INDIRECT, table=table, components=1, stride=1, offset=0)


def order_free(loop: Parloop, size: int | None = None, start: int = 0) -> Parloop:
    """Make a loop's stores independent of the order of its iterations.

    Wherever a WRITE argument's targets are shared, entries that a later iteration overwrites are
    dropped from its table; INC, MIN and MAX need nothing.

    Parameters
    ----------
    loop
        Any loop.
    size, start
        The iterations that will run, exactly; all that are owned where not given.

    Returns
    -------
    Parloop
        The loop itself where there is nothing to do.

    Raises
    ------
    UnsupportedLoopError
        Where a RW argument reads what other iterations stored.
    """
    _refuse_order_dependent(loop)
    iterations = loop.iteration_set
    size = iterations.owned if size is None else size
    assert size is not None
    replaced: dict[int, Argument] = {}
    for members in _written(loop).values():
        numbers = [n for n in members if loop.arguments[n].access is WRITE]
        if not numbers or not _collide(loop, numbers):
            continue
        arguments = _comparable([loop.arguments[n] for n in numbers], iterations.extent)
        tables = [_rows_of(argument, iterations.extent) for argument in arguments]
        # side by side, so that a later argument of the same entity wins over an earlier one
        table = tables[0] if len(tables) == 1 else _beside(tables)
        kept = last_writer_table(table, size, iterations.entities, start)
        column = 0
        for number, argument, part in zip(numbers, arguments, tables, strict=True):
            values = kept.values[:, column : column + part.arity]
            column += part.arity
            table = kept if len(tables) == 1 else IndexTable(values, part.bound, True, kept.name)
            replaced[number] = replace(argument, kind=Kind.INDIRECT, table=table, cover=None)
    if not replaced:
        return loop
    return Parloop(
        loop.kernel,
        iterations,
        [replaced.get(number, argument) for number, argument in enumerate(loop.arguments)],
        loop.name,
    )


def colour_loop(loop: Parloop, size: int | None = None, start: int = 0) -> Colouring:
    """Colour the iterations of a loop for all arguments that it changes.

    Parameters
    ----------
    loop
        Globals are left out: reducing them is another matter. WRITE arguments are treated as any
        other: no two entities of a colour store to the same place, but which of two colours stores
        last is only right after :func:`order_free`.
    size, start
        The iterations to colour; all that are owned where not given.

    Raises
    ------
    UnsupportedLoopError
        Where a RW argument reads what other iterations stored.
    """
    _refuse_order_dependent(loop)
    iterations = loop.iteration_set
    size = iterations.owned if size is None else size
    assert size is not None
    tables: list[tuple[IndexTable, Hashable]] = []
    for buffer, numbers in _written(loop).items():
        if not _collide(loop, numbers):
            continue
        arguments = [loop.arguments[n] for n in numbers]
        covers = {id(argument.cover): argument.cover for argument in arguments}
        cover = next(iter(covers.values()))
        if len(covers) == 1 and cover is not None:
            tables.append((cover, buffer))
            continue
        tables += [
            (_rows_of(argument, iterations.extent), buffer)
            for argument in _comparable(arguments, iterations.extent)
        ]
    return colour(tables, size, iterations.entities, start)


def _refuse_order_dependent(loop: Parloop) -> None:
    if loop.order_dependent:
        read = ", ".join(
            f"argument {a.name} has access {a.access.name}"
            for a in loop.arguments
            if a.access.name in ("RW", "MIN", "MAX")
        )
        raise UnsupportedLoopError(
            f"loop {loop.name}: {read}, the kernel reads it and entities share its entries, so "
            "each entity must see what the one before it stored; run it in order"
        )


def _written(loop: Parloop) -> dict[int, list[int]]:
    """Numbers of the arguments that change each buffer, globals and empty packs left out."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, (argument, spec) in enumerate(
        zip(loop.arguments, loop.spec.arguments, strict=True)
    ):
        if argument.access.writes and argument.kind is not Kind.GLOBAL and argument.slots:
            found[spec.buffer].append(number)
    return found


def _collide(loop: Parloop, numbers: Sequence[int]) -> bool:
    """Whether two iterations can meet at a scalar through these arguments on one buffer."""
    if len(numbers) > 1:
        return True
    argument = loop.arguments[numbers[0]]
    table = argument.table
    if table is None:
        return loop.iteration_set.repeats
    assert argument.stride is not None
    if argument.stride < argument.components:
        return True
    key = ("shares", loop.iteration_set.size, loop.iteration_set.fingerprint)
    return _cached(table, key, lambda: table.shares_targets(loop.iteration_set))


def _comparable(arguments: Sequence[Argument], extent: int) -> list[Argument]:
    """Arguments on one buffer in a form where equal table entries are the same scalars."""
    layouts = {(a.components, a.stride, a.offset) for a in arguments}
    components, stride, _ = next(iter(layouts))
    assert stride is not None
    if len(layouts) == 1 and stride >= components:
        return list(arguments)
    return [as_scalars(argument, extent) for argument in arguments]


def _rows_of(argument: Argument, extent: int) -> IndexTable:
    if argument.table is not None:
        return argument.table
    values = np.arange(extent, dtype=np.int32)[:, None]
    return IndexTable(values, extent, name=f"rows of {argument.name}")


def _beside(tables: Sequence[IndexTable]) -> IndexTable:
    size = min(table.size for table in tables)
    values = np.concatenate([table.values[:size] for table in tables], axis=1)
    return IndexTable(
        values,
        max(table.bound for table in tables),
        any(table.allow_negative for table in tables),
        ", ".join(table.name for table in tables),
    )


# ---------------------------------------------------------------------------------------------
# Sparse matrices


CHUNK = 1 << 18
"""Entries of element matrices that are looked at together: they stay in the cache of a core."""


def csr_pattern(
    rows: IndexTable, cols: IndexTable, nrows: int, ncols: int
) -> tuple[Integers, npt.NDArray[np.int32]]:
    """Find the sparsity pattern of the matrix that couples ``rows`` with ``cols``.

    Parameters
    ----------
    rows, cols
        Rows and columns of each entity's element matrix; negative entries couple nothing.
    nrows, ncols
        Shape of the matrix.

    Returns
    -------
    indptr
        ``[nrows + 1]``, ``int32`` where there are fewer than 2**31 entries, else ``int64``.
    indices
        ``int32[nnz]``, ascending in each row.

    Raises
    ------
    InvalidLoopError
        Where the tables differ in size or reach beyond the matrix.
    """
    _check_matrix(rows, cols, nrows, ncols)

    def make() -> tuple[Integers, npt.NDArray[np.int32]]:
        found = []
        for _, keys, dropped in _pairs(rows, cols, ncols):
            keys = keys.ravel() if dropped is None else keys[~dropped]
            keys.sort()
            found.append(_distinct(keys))
        # each part is sorted already, and a stable sort merges runs
        keys = np.concatenate([*found, np.empty(0, np.int64)])
        del found
        keys.sort(kind="stable")
        keys = _distinct(keys)
        indptr = np.zeros(nrows + 1, _index_dtype(keys.size))
        row, col = np.divmod(keys, max(ncols, 1))
        np.cumsum(np.bincount(row, minlength=nrows), out=indptr[1:])
        return indptr, col.astype(np.int32)

    return _cached(rows, ("csr_pattern", cols.fingerprint, nrows, ncols), make)


def csr_positions(
    indptr: Integers,
    indices: Integers,
    rows: IndexTable,
    cols: IndexTable,
    row_components: int = 1,
    col_components: int = 1,
    ncols: int | None = None,
    storage: str = "aij",
    name: str = "matrix",
) -> IndexTable:
    """Find where each entry of each entity's element matrix lies in the values of a CSR matrix.

    Parameters
    ----------
    indptr, indices
        The pattern, ``[nrows * row_components + 1]`` and ``[nnz]``: scalar rows and columns, row
        ``r * row_components + i`` belongs to component i of node r (PETSc's AIJ). With ``storage``
        "baij" the rows and columns of blocks, ``[nrows + 1]`` and ``[blocks]``. Columns need not be
        sorted.
    rows, cols
        ``[n, k]`` and ``[n, l]``, the nodes of each entity; where one is negative the entry is
        dropped.
    row_components, col_components
        Components of a node.
    ncols
        Number of columns of nodes; the bound of ``cols`` where not given.
    storage
        "aij", or "baij" for values ``[blocks, col_components, row_components]``: PETSc stores each
        block by columns.
    name
        For messages.

    Returns
    -------
    IndexTable
        ``[n, k * row_components * l * col_components]``, in the row-major order ``[row, row
        component, column, column component]`` of the element matrix; ``int32`` where nnz is below
        2**31, else ``int64``; -1 where the entry is dropped. Entries of a row are a group.

    Raises
    ------
    InvalidLoopError
        Where the arrays are no CSR pattern, or an entry of an element matrix is not in it: the
        message names entity, row and column.
    """
    if storage not in ("aij", "baij"):
        raise InvalidLoopError(f"{name}: storage {storage!r} is neither 'aij' nor 'baij'")
    if row_components < 1 or col_components < 1:
        raise InvalidLoopError(f"{name}: components must be positive")
    blocked = storage == "baij"
    width = cols.bound if ncols is None else ncols
    indptr, indices = np.asarray(indptr), np.asarray(indices)
    height = len(indptr) - 1 if indptr.ndim == 1 else 0
    if not blocked:
        if height % row_components:
            raise InvalidLoopError(
                f"{name}: {height} rows are no multiple of {row_components} components"
            )
        height //= row_components
    _check_matrix(rows, cols, height, width)
    _check_csr(indptr, indices, width * (1 if blocked else col_components), name)
    key = (
        "csr_positions", _digest(indptr), _digest(indices), cols.fingerprint,
        row_components, col_components, width, storage,
    )  # fmt: skip

    def make() -> IndexTable:
        size = int(indices.size)
        if blocked:
            area = row_components * col_components
            size *= area
            values = _find(indptr, indices, rows, cols, width, _index_dtype(size), name)
            inner = np.arange(area).reshape(col_components, row_components).T[:, None, :]
            values = _expand(
                values, rows, cols, area,
                lambda _, node: node[:, :, None, :, None] * area + inner,
            )  # fmt: skip
        elif row_components == col_components == 1:
            values = _find(indptr, indices, rows, cols, width, _index_dtype(size), name)
        else:
            values = _positions_of_components(
                indptr, indices, rows, cols, row_components, col_components, width, name
            )
        negative = rows.allow_negative or cols.allow_negative
        group = cols.arity * col_components or 1
        return IndexTable(values, size, negative, f"positions in {name}", group)

    return _cached(rows, key, make)


def coo_indices(
    rows: IndexTable,
    cols: IndexTable,
    row_components: int = 1,
    col_components: int = 1,
) -> tuple[Integers, Integers]:
    """Row and column of each entry of the element matrices, for MatSetPreallocationCOO.

    Parameters
    ----------
    rows, cols, row_components, col_components
        As in :func:`csr_positions`.

    Returns
    -------
    i, j
        ``[n * k * row_components * l * col_components]`` of scalar row and column numbers in the
        order of the element matrices, entity after entity; both negative where the entry is
        dropped, which PETSc ignores. ``int32`` where the numbers allow, else ``int64``.
    """
    if rows.size != cols.size:
        raise InvalidLoopError(
            f"maps {rows.name} and {cols.name} have {rows.size} and {cols.size} rows"
        )
    i = _with_components(rows, row_components)
    j = _with_components(cols, col_components)
    shape = (rows.size, i.shape[1], j.shape[1])
    kind = _index_dtype(max(rows.bound * row_components, cols.bound * col_components))
    first, second = np.empty(shape, kind), np.empty(shape, kind)
    first[...] = i[:, :, None]
    second[...] = j[:, None, :]
    if rows.has_negative or cols.has_negative:
        dropped = (i < 0)[:, :, None] | (j < 0)[:, None, :]
        first[dropped] = -1
        second[dropped] = -1
    return first.ravel(), second.ravel()


def _with_components(table: IndexTable, components: int) -> Integers:
    if components == 1:
        return table.values
    values = table.values.astype(np.int64)[:, :, None] * components + np.arange(components)
    values[table.values < 0] = -1
    return values.reshape(table.size, table.arity * components)


def _check_matrix(rows: IndexTable, cols: IndexTable, nrows: int, ncols: int) -> None:
    if rows.size != cols.size:
        raise InvalidLoopError(
            f"maps {rows.name} and {cols.name} have {rows.size} and {cols.size} rows"
        )
    if max(nrows, 1) * max(ncols, 1) >= 2**63:
        raise InvalidLoopError(f"a matrix of {nrows} x {ncols} entries is too large")
    for table, limit, what in ((rows, nrows, "rows"), (cols, ncols, "columns")):
        if table.values.size and int(table.values.max()) >= limit:
            entity, position = (int(i) for i in np.argwhere(table.values >= limit)[0])
            raise InvalidLoopError(
                f"map {table.name}: entity {entity}, position {position} holds "
                f"{int(table.values[entity, position])}, the matrix has {limit} {what}"
            )


def _check_csr(indptr: Integers, indices: Integers, ncols: int, name: str) -> None:
    for what, array in (("indptr", indptr), ("indices", indices)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidLoopError(
                f"{name}: {what} must be a one-dimensional array of integers, got {array.dtype} "
                f"{list(array.shape)}"
            )
    if not indptr.size or int(indptr[0]) != 0 or int(indptr[-1]) != indices.size:
        raise InvalidLoopError(f"{name}: indptr must run from 0 to {indices.size}, one a row more")
    if (indptr[1:] < indptr[:-1]).any():
        row = int((indptr[1:] < indptr[:-1]).argmax())
        raise InvalidLoopError(f"{name}: indptr decreases after row {row}")
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < ncols:
        raise InvalidLoopError(f"{name}: a column is not within 0 to {ncols - 1}")


def _pairs(
    rows: IndexTable, cols: IndexTable, ncols: int
) -> Iterator[tuple[slice, npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]]:
    """Entities in chunks: which, ``row * ncols + col`` [m, k, l], and which pairs are dropped."""
    step = max(1, CHUNK // max(1, rows.arity * cols.arity))
    negative = rows.has_negative or cols.has_negative
    for begin in range(0, rows.size, step):
        part = slice(begin, begin + step)
        i = rows.values[part, :, None].astype(np.int64)
        j = cols.values[part, None, :]
        yield part, i * ncols + j, ((i < 0) | (j < 0)) if negative else None


def _distinct(ordered: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if not ordered.size:
        return ordered
    first = np.empty(ordered.size, bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def _find(
    indptr: Integers,
    indices: Integers,
    rows: IndexTable,
    cols: IndexTable,
    ncols: int,
    kind: npt.DTypeLike,
    name: str,
) -> Integers:
    """Positions [n, k * l] of the pairs in a pattern, -1 where one of them is negative."""
    nrows = len(indptr) - 1
    pattern = np.repeat(np.arange(nrows, dtype=np.int64) * ncols, np.diff(indptr))
    pattern += indices
    numbers = None
    if pattern.size and not (pattern[1:] > pattern[:-1]).all():
        numbers = np.argsort(pattern, kind="stable")
        pattern = pattern[numbers]
    found = np.empty((rows.size, rows.arity * cols.arity), kind)
    for part, keys, dropped in _pairs(rows, cols, ncols):
        position = np.searchsorted(pattern, keys.ravel()).reshape(keys.shape)
        if pattern.size:
            missing = pattern[np.minimum(position, pattern.size - 1)] != keys
        else:
            missing = np.ones(keys.shape, bool)
        if dropped is not None:
            missing &= ~dropped
        if missing.any():
            entity, i, j = (int(x) for x in np.argwhere(missing)[0])
            entity += part.start
            raise InvalidLoopError(
                f"{name}: entity {entity} adds to row {int(rows.values[entity, i])} (position "
                f"{i} of map {rows.name}), column {int(cols.values[entity, j])} (position {j} of "
                f"map {cols.name}), which is not in the sparsity pattern"
            )
        if numbers is not None and pattern.size:
            position = numbers[np.minimum(position, pattern.size - 1)]
        if dropped is not None:
            position[dropped] = -1
        found[part] = position.reshape(len(position), -1)
    return found


def _positions_of_components(
    indptr: Integers,
    indices: Integers,
    rows: IndexTable,
    cols: IndexTable,
    row_components: int,
    col_components: int,
    ncols: int,
    name: str,
) -> Integers:
    """Positions in a scalar pattern of nodes with components."""
    kind = _index_dtype(indices.size)
    nodes = _node_pattern(indptr, indices, row_components, col_components)
    if nodes is None:
        scalar_rows, scalar_cols = (
            IndexTable(
                _with_components(table, components),
                table.bound * components,
                table.allow_negative,
                table.name,
            )
            for table, components in ((rows, row_components), (cols, col_components))
        )
        return _find(indptr, indices, scalar_rows, scalar_cols, ncols * col_components, kind, name)
    node_indptr, node_indices = nodes
    found = _find(node_indptr, node_indices, rows, cols, ncols, kind, name)
    first = node_indptr[:-1].astype(kind)
    starts = indptr[:-1].reshape(-1, row_components).astype(kind)

    def expand(row: Integers, node: Integers) -> Integers:
        inside = (node - first[row][:, :, None]) * col_components
        columns: Integers = inside[:, :, None, :, None] + np.arange(col_components, dtype=kind)
        return starts[row][:, :, :, None, None] + columns

    return _expand(found, rows, cols, row_components * col_components, expand)


def _node_pattern(
    indptr: Integers, indices: Integers, row_components: int, col_components: int
) -> tuple[Integers, Integers] | None:
    """The pattern of nodes of a scalar pattern, or None where that has blocks with gaps."""
    lengths = np.diff(indptr)
    node_lengths = lengths[::row_components] // col_components
    if not np.array_equal(lengths, np.repeat(node_lengths * col_components, row_components)):
        return None
    component = np.repeat(np.arange(lengths.size) % row_components, lengths)
    first = indices[component == 0]
    nodes = first[::col_components] // col_components
    expected = nodes[:, None] * col_components + np.arange(col_components)
    # row lengths of a node agree, so that its rows of each component are listed alike
    if not np.array_equal(first, expected.ravel()) or not all(
        np.array_equal(first, indices[component == i]) for i in range(1, row_components)
    ):
        return None
    return np.concatenate([[0], np.cumsum(node_lengths)]), nodes


def _expand(
    found: Integers,
    rows: IndexTable,
    cols: IndexTable,
    area: int,
    expand: Callable[[Integers, Integers], Integers],
) -> Integers:
    """Turn positions of nodes [n, k * l] into positions of their components, in chunks."""
    entries = rows.arity * cols.arity
    result = np.empty((rows.size, entries * area), found.dtype)
    step = max(1, CHUNK // max(1, entries * area))
    for begin in range(0, rows.size, step):
        part = slice(begin, begin + step)
        node = found[part].reshape(len(rows.values[part]), rows.arity, cols.arity)
        positions = expand(np.maximum(rows.values[part], 0), node)
        if rows.has_negative or cols.has_negative:
            positions = np.where((node < 0)[:, :, None, :, None], -1, positions)
        result[part] = positions.reshape(len(node), -1)
    return result


# ---------------------------------------------------------------------------------------------
# Colouring


class _Targets:
    """The targets of iterations, numbered through all tables; the last number takes the dropped."""

    def __init__(
        self,
        tables: Sequence[tuple[IndexTable, int]],
        size: int,
        entities: npt.NDArray[np.int32] | None,
        start: int,
    ) -> None:
        self.size = size - start
        self.start = start
        self.entities = entities
        self.names = _entities(size, entities, start)
        bounds: dict[int, int] = defaultdict(int)
        for table, group in tables:
            bounds[group] = max(bounds[group], table.bound)
        arity = sum(table.arity for table, _ in tables)
        self.negative = any(table.has_negative for table, _ in tables)
        if sum(bounds.values()) > 8 * self.size * arity + 4096:
            # few of many targets occur: number those, so that memory follows the tables
            values = [table.values[self.visited(slice(None))] for table, _ in tables]
            for group in bounds:
                members = [n for n, (_, g) in enumerate(tables) if g == group]
                joint = np.concatenate([values[n].ravel() for n in members])
                kept = joint >= 0
                names, joint[kept] = np.unique(joint[kept], return_inverse=True)
                bounds[group] = names.size
                ends = np.cumsum([values[n].size for n in members])
                for n, part in zip(members, np.split(joint, ends[:-1]), strict=True):
                    values[n] = part.reshape(values[n].shape)
            self.entities, self.start = None, 0
        else:
            values = [table.values for table, _ in tables]
        first = dict(zip(bounds, np.cumsum([0, *bounds.values()]).tolist(), strict=False))
        self.tables = [(v, first[g]) for v, (_, g) in zip(values, tables, strict=True)]
        self.count = sum(bounds.values())

    def visited(self, iterations: Any) -> Any:
        """Entities of iterations (numbers or a slice), which count from the first one coloured."""
        if isinstance(iterations, slice):
            begin, end, _ = iterations.indices(self.size)
            part = slice(begin + self.start, end + self.start)
            return part if self.entities is None else self.entities[part]
        numbers = iterations + self.start
        return numbers if self.entities is None else self.entities[numbers]

    def __call__(self, iterations: Any) -> npt.NDArray[np.intp]:
        """``[m, all arities]`` targets of iterations."""
        entities = self.visited(iterations)
        if len(self.tables) == 1:
            targets: npt.NDArray[np.intp] = self.tables[0][0][entities].astype(np.intp)
        else:
            targets = np.concatenate(
                [values[entities] + np.where(values[entities] < 0, 0, first).astype(np.intp)
                 for values, first in self.tables],
                axis=1,
            )  # fmt: skip
        if self.negative:
            targets[targets < 0] = self.count
        return targets

    def chunks(self, size: int = 1 << 15) -> Iterator[slice]:
        for begin in range(0, self.size, size):
            yield slice(begin, min(begin + size, self.size))


def _colour(targets: _Targets) -> Colouring:
    size = targets.size
    colours = np.zeros(size, np.int32)
    degrees = np.zeros(targets.count + 1, np.int32)
    for part in targets.chunks():
        np.add.at(degrees, targets(part).ravel(), np.int32(1))
    degrees[-1] = 0
    most = int(degrees.max())
    single = np.zeros(size, bool)
    if most > HUB:
        for part in targets.chunks():
            single[part] = degrees[targets(part)].max(axis=1) > HUB
    del degrees
    remaining = np.flatnonzero(~single)
    base = 0
    while remaining.size:
        window = _Window(targets, remaining)
        if not base and int(window.colours.max()) < COLOURS:
            window.improve(most)
        done = window.colours < COLOURS
        colours[remaining[done]] = window.colours[done].astype(np.int32) + base
        base += int(window.colours[done].max()) + 1
        # where a whole window serves but few, most targets are common to most entities
        hopeless = COLOURS * int(done.sum()) < remaining.size
        remaining = remaining[~done]
        if hopeless:
            single[remaining] = True
            break
    alone = int(single.sum())
    colours[single] = np.arange(base, base + alone)
    sizes = np.bincount(colours, minlength=base + alone) if size else np.zeros(0, np.int64)
    order = _stable_order(colours, max(base + alone, 1))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Colouring(targets.names[order].astype(np.int32, copy=False), offsets)


class _Window:
    """A greedy colouring of some iterations with at most :data:`COLOURS` colours.

    Attributes
    ----------
    colours
        ``uint8``, one an iteration; :data:`COLOURS` where none was free.
    """

    def __init__(self, targets: _Targets, iterations: npt.NDArray[np.intp]) -> None:
        self.targets = targets
        self.iterations = iterations
        self.colours = np.full(iterations.size, COLOURS, np.uint8)
        # bit c of a target's mask: an iteration of colour c writes to it
        self.masks = np.zeros(targets.count + 1, np.uint64)
        self._greedy()

    def _greedy(self) -> None:
        count = self.iterations.size
        sweep = min(SWEEP, count)
        enough = -(-count // sweep)
        owner = np.empty(self.targets.count + 1, np.int32)
        waiting = np.empty(0, np.intp)
        step = 0
        while step < sweep or waiting.size:
            active = waiting
            if step < sweep and waiting.size <= enough:
                active = np.concatenate([waiting, np.arange(step, count, sweep)])
                step += 1
            rows = self.targets(self.iterations[active])
            bits = self._lowest_free(rows)
            free = bits != 0
            # the last of several assignments stays, so in reverse the first one wins each target
            numbers = np.arange(len(rows) - 1, -1, -1, dtype=np.int32)
            owner[rows[::-1].ravel()] = np.repeat(numbers[::-1], rows.shape[1])
            won = free.copy()
            for column in rows.T:
                met = owner[column] == numbers
                if self.targets.negative:
                    met |= column == self.targets.count
                won &= met
            self._take(active[won], rows[won], bits[won])
            waiting = active[free & ~won]

    def _lowest_free(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        """Return the lowest bit that no target's mask has, 0 where there is none."""
        used = self.masks[rows[:, 0]]
        for column in rows.T[1:]:
            used |= self.masks[column]
        return ~used & (used + np.uint64(1))

    def _take(self, numbers: Any, rows: npt.NDArray[np.intp], bits: npt.NDArray[np.uint64]) -> None:
        # within a column no target occurs twice, as no two of these iterations share one
        for column in rows.T:
            self.masks[column] |= bits
        self.masks[-1] = 0
        self.colours[numbers] = np.bitwise_count(bits - np.uint64(1))

    def improve(self, lower_bound: int) -> None:
        """Reduce the number of colours, then even out their sizes."""
        for _ in range(4):
            if int(self.colours.max()) < lower_bound:
                break
            self._colour_again()
        self._balance()

    def _colour_again(self) -> None:
        sizes = np.bincount(self.colours)
        ends = np.cumsum(sizes)
        order = np.argsort(self.colours, kind="stable")
        self.masks[:] = 0
        for colour in np.argsort(sizes, kind="stable"):
            members = order[ends[colour] - sizes[colour] : ends[colour]]
            for begin in range(0, members.size, 1 << 15):
                part = members[begin : begin + (1 << 15)]
                rows = self.targets(self.iterations[part])
                self._take(part, rows, self._lowest_free(rows))

    def _balance(self) -> None:
        sizes = np.bincount(self.colours)
        mean = -(-self.colours.size // sizes.size)
        for colour in np.argsort(-sizes, kind="stable"):
            surplus = int(sizes[colour]) - mean
            if surplus <= 0:
                break
            members = np.flatnonzero(self.colours == colour)
            rows = self.targets(self.iterations[members])
            used = self.masks[rows[:, 0]]
            for column in rows.T[1:]:
                used |= self.masks[column]
            for other in np.argsort(sizes, kind="stable"):
                wanted = min(mean - int(sizes[other]), surplus)
                if wanted <= 0:
                    break
                bit = np.uint64(1) << np.uint64(other)
                # two of one colour share no target: both may change to the same other colour
                moved = np.flatnonzero((used & bit) == 0)[:wanted]
                for column in rows[moved].T:
                    self.masks[column] &= ~(np.uint64(1) << np.uint64(colour))
                self._take(members[moved], rows[moved], np.full(moved.size, bit))
                used[moved] = np.uint64(2**64 - 1)
                sizes[colour] -= moved.size
                sizes[other] += moved.size
                surplus -= moved.size


# ---------------------------------------------------------------------------------------------
# Shared


def _entities(size: int, entities: npt.NDArray[np.int32] | None, start: int) -> Integers:
    """The entities of iterations ``[start, size)``."""
    return np.arange(start, size, dtype=np.int32) if entities is None else entities[start:size]


def _check_iterations(
    table: IndexTable, size: int, entities: npt.NDArray[np.int32] | None, start: int
) -> None:
    visited = _entities(size, entities, start) if entities is not None else None
    extent = size if visited is None else int(visited.max()) + 1 if visited.size else 0
    if not 0 <= start <= size or extent > table.size:
        raise InvalidLoopError(
            f"map {table.name} has {table.size} rows, iterations {start} to {size} visit entity "
            f"{extent - 1}"
        )
    if visited is not None and len(visited) != size - start:
        raise InvalidLoopError(
            f"map {table.name}: iterations {start} to {size}, but only {len(visited) + start} "
            "entities are listed"
        )


def _flat(
    table: IndexTable, size: int, entities: npt.NDArray[np.int32] | None, start: int
) -> tuple[Integers, Integers | None]:
    """Targets of all contributions, and the contributions' numbers where some are dropped."""
    part: Any = slice(start, size) if entities is None else entities[start:size]
    targets = table.values[part].ravel()
    if not table.has_negative:
        return targets, None
    kept = np.flatnonzero(targets >= 0).astype(_index_dtype(targets.size), copy=False)
    return targets[kept], kept


def _stable_order(keys: Integers, bound: int) -> Integers:
    """Order that sorts non-negative integers; equal ones keep theirs.

    numpy sorts 16-bit integers by radix, so one pass for each 16 bits takes linear time.
    """
    order = None
    for shift in range(0, max(1, (bound - 1).bit_length()), 16):
        digits = (keys >> shift).astype(np.uint16)
        if order is not None:
            digits = digits[order]
        step = np.argsort(digits, kind="stable").astype(_index_dtype(keys.size), copy=False)
        order = step if order is None else order[step]
    assert order is not None
    return order


def _index_dtype(largest: int) -> type[np.int32] | type[np.int64]:
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def _digest(array: Integers | None) -> str | None:
    if array is None:
        return None
    content: Any = np.ascontiguousarray(array)
    digest = hashlib.blake2b(repr((content.shape, content.dtype.str)).encode(), digest_size=16)
    digest.update(content.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _cached(table: IndexTable, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    plans = table.plans
    if key not in plans:
        own = [k for k in plans if isinstance(k, tuple)]
        for old in own[: max(0, len(own) - PLANS + 1)]:
            del plans[old]
        plans[key] = make()
    found: T = plans[key]
    return found

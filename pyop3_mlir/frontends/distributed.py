"""Matrices that are distributed over processes: what a loop adds to them, and the messages.

A process keeps the columns that it owns in one array of values, the others in a second one, and
has no memory at all for other processes' rows. The entities of the core touch the first array
alone, so that loops over them change it in place. What the others add is gathered first, each entry
once: from there it is added to both arrays, and sent to the processes that own the other rows.
PETSc's own stash does the same for any entries; here the owners know beforehand which ones come.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir import parallel
from pyop3_mlir.frontends.petsc import DistributedValues
from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.parloop import INC, Access, Argument, IndexTable, IterationSet, Kind, Parloop
from pyop3_mlir.planning import csr_positions

__all__ = ["Entries", "Share", "find_entries", "halves"]

Array = npt.NDArray[Any]

_TAG = 1720
"""Of all messages, on a communicator that only PyOP2 and this module use."""


class _Incoming:
    """Where entries go that another process sends.

    Attributes
    ----------
    size
        Number of entries.
    parts
        For each of both arrays its places, and which of the entries go there.
    """

    def __init__(self, places: npt.NDArray[np.int64], first: int) -> None:
        self.size = len(places)
        inside = places < first
        self.parts: list[tuple[Array, Any]] = []
        for base, chosen in ((0, inside), (first, ~inside)):
            numbers = np.flatnonzero(chosen)
            everything = len(numbers) == self.size
            self.parts.append((places[numbers] - base, slice(None) if everything else numbers))


@dataclass(eq=False)
class Entries:
    """The entries of a matrix, or of a block of one, that a loop adds to.

    Attributes
    ----------
    core
        For each entity of the core, places in the first array of values; negative where dropped.
    border
        For each of the other ones, places in the memory where they are gathered.
    base
        The first of these places.
    own
        For the first entries there, ascending, the place in both arrays of values, the second one
        counted on from the first.
    rows, columns
        For the others, global numbers.
    """

    core: IndexTable
    border: IndexTable
    base: int
    own: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    sent: dict[int, slice] | None = None
    received: dict[int, _Incoming] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of entries that are gathered."""
        return len(self.own) + len(self.rows)

    def connect(self, comm: Any, values: DistributedValues) -> None:
        """Tell the owners of other rows which entries they will get. Collective.

        Parameters
        ----------
        comm
            The communicator.
        values
            The matrix.

        Raises
        ------
        Pyop3MlirError
            On all processes, where an owner has no such entry.
        """
        ends = values.mat.getOwnershipRanges()[1:]
        # rows ascend, and so do their owners
        stops = np.searchsorted(self.rows, ends)
        bounds = [0, *(int(stop) for stop in stops)]
        wanted = comm.alltoall(
            [
                (self.rows[a:b], self.columns[a:b]) if a < b else None
                for a, b in itertools.pairwise(bounds)
            ]
        )

        def find() -> dict[int, _Incoming]:
            first = values.arrays[0].size
            return {
                rank: _Incoming(_single_positions(values, *entries), first)
                for rank, entries in enumerate(wanted)
                if entries is not None
            }

        self.received = parallel.together(comm, find)
        first = self.base + len(self.own)
        self.sent = {
            rank: slice(first + a, first + b)
            for rank, (a, b) in enumerate(itertools.pairwise(bounds))
            if a < b
        }


def _single_positions(
    values: DistributedValues, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Places of entries of this process's rows in both arrays."""
    start, stop = values.mat.getOwnershipRange()
    found = _own_positions(
        values, (rows - start)[:, None], columns[:, None], stop - start, "matrix"
    )
    return found[:, 0]


def _own_positions(
    values: DistributedValues, rows: Array, columns: Array, height: int, name: str
) -> npt.NDArray[np.int64]:
    """Places of element matrices in both arrays, ``[entities, rows * columns]``.

    Parameters
    ----------
    values
        The matrix.
    rows
        Own rows, counted from this process's first one; -1 where dropped.
    columns
        Global columns; -1 where dropped.
    height
        Number of own rows.
    name
        For messages.
    """
    local = values.local_columns(columns)
    width = int(max(local.max(initial=-1), values.indices.max(initial=-1))) + 1
    found = csr_positions(
        values.indptr,
        values.indices,
        IndexTable(rows, height, allow_negative=True, name=name),
        IndexTable(local, width, allow_negative=True, name=name),
        name=name,
    ).values
    places: npt.NDArray[np.int64] = np.append(values.storage, -1)[found]
    return places


def find_entries(
    values: DistributedValues,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    visited: IterationSet,
    core: int,
    base: int,
    name: str,
) -> Entries | None:
    """Where the entries of element matrices go.

    Parameters
    ----------
    values
        The matrix.
    rows, columns
        Global numbers ``[entities, k]`` and ``[entities, l]``; negative where dropped, and for
        entities that are not visited.
    visited
        The iterations.
    core
        Iterations ``[0, core)`` are to add to the first array in place.
    base
        The first place where entries of the others are gathered.
    name
        Of the matrix, for messages.

    Returns
    -------
    Entries or None
        None where one of the first ``core`` iterations needs more than the first array.

    Raises
    ------
    InvalidLoopError
        Where an entry is not in the matrix.
    """
    start, stop = values.mat.getOwnershipRange()
    mine = (rows >= start) & (rows < stop)
    own_rows = np.where(mine, rows - start, -1)
    places = _own_positions(values, own_rows, columns, stop - start, name)
    owned = visited.owned or 0
    order = np.arange(owned) if visited.entities is None else visited.entities[:owned]
    inner, outer = order[:core], order[core:]
    first = values.arrays[0].size
    elsewhere = (rows >= 0) & ~mine
    if (places[inner] >= first).any() or elsewhere[inner].any():
        return None

    gathered = places[outer]
    own, numbers = np.unique(gathered[gathered >= 0], return_inverse=True)
    gathered[gathered >= 0] = base + numbers
    far = (elsewhere[outer][:, :, None] & (columns[outer] >= 0)[:, None, :]).reshape(gathered.shape)
    shape = (len(outer), rows.shape[1], columns.shape[1])
    far_rows = np.broadcast_to(rows[outer][:, :, None], shape).reshape(gathered.shape)[far]
    far_columns = np.broadcast_to(columns[outer][:, None, :], shape).reshape(gathered.shape)[far]
    known_rows, row_numbers = np.unique(far_rows, return_inverse=True)
    known_columns, column_numbers = np.unique(far_columns, return_inverse=True)
    width = max(len(known_columns), 1)
    pairs, numbers = np.unique(row_numbers * width + column_numbers, return_inverse=True)
    gathered[far] = base + len(own) + numbers

    def table(which: Array, positions: Array, bound: int) -> IndexTable:
        if bound <= np.iinfo(np.int32).max:
            positions = positions.astype(np.int32)
        if visited.entities is not None:
            whole = np.full(places.shape, -1, positions.dtype)
            whole[which] = positions
            positions = whole
        positions = np.ascontiguousarray(positions)
        return IndexTable(positions, bound, True, name, columns.shape[1] or 1)

    return Entries(
        table(inner, places[inner], first),
        table(outer, gathered, base + len(own) + len(pairs)),
        base,
        own.astype(np.int64),
        known_rows[pairs // width],
        known_columns[pairs % width],
    )


def _part(argument: Argument, iterations: IterationSet, start: int, stop: int) -> Argument:
    """An argument as a loop over iterations ``[start, stop)`` alone sees it."""
    if iterations.entities is not None or argument.kind is Kind.GLOBAL:
        # entities keep their numbers
        return argument
    if argument.table is None:
        assert argument.stride is not None
        rows = argument.buffer.reshape(-1)[start * argument.stride :]
        return Argument(
            rows, argument.access, argument.kind, None, argument.components, argument.stride,
            argument.offset, argument.name,
        )  # fmt: skip
    return Argument(
        argument.buffer, argument.access, argument.kind, _rows(argument.table, start, stop),
        argument.components, argument.stride, argument.offset, argument.name,
        None if argument.cover is None else _rows(argument.cover, start, stop),
    )  # fmt: skip


def _rows(table: IndexTable, start: int, stop: int) -> IndexTable:
    """Rows of a table, as a table that is kept with it and shares its memory."""
    key = ("rows", start, stop)
    if key not in table.plans:
        table.plans[key] = IndexTable(
            table.values[start:stop], table.bound, table.allow_negative, table.name, table.group
        )
    found: IndexTable = table.plans[key]
    return found


@dataclass(eq=False)
class Share:
    """What one loop does to a distributed matrix.

    Attributes
    ----------
    values
        The matrix.
    comm
        For its messages.
    access
        INC or WRITE.
    blocks
        For each argument with it, or with a block of it, the entries.
    """

    values: DistributedValues
    comm: Any
    access: Access = INC
    blocks: list[Entries] = field(default_factory=list)
    pending: bool = False
    buffer: Array | None = None
    _own: list[tuple[Array, Array, slice]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of entries that are gathered."""
        return sum(block.size for block in self.blocks)

    def add(self, entries: Entries, access: Access) -> int:
        """Take in an argument; returns its number."""
        self.access = access
        self.blocks.append(entries)
        base, first = entries.base, self.values.arrays[0].size
        split = int(np.searchsorted(entries.own, first))
        for array, start, stop, before in (
            (self.values.arrays[0], 0, split, 0),
            (self.values.arrays[1], split, len(entries.own), first),
        ):
            places = entries.own[start:stop] - before
            self._own.append((array, places, slice(base + start, base + stop)))
        return len(self.blocks) - 1

    def arguments(self, number: int, rows: IndexTable, name: str) -> tuple[Argument, Argument]:
        """The argument of the loop over the core, and of the loop over the other entities.

        Only when all arguments have been taken in.

        Parameters
        ----------
        number
            What :meth:`add` gave.
        rows
            For planning; see :meth:`Argument.matrix`. Of all iterations.
        name
            Of the matrix.
        """
        from pyop3_mlir.runtime.executable import aligned_empty

        if self.buffer is None:
            self.buffer = aligned_empty(self.size, self.values.arrays[0].dtype)
        entries = self.blocks[number]
        core, border = len(entries.core.values), len(entries.border.values)
        subset = core == border == len(rows.values)
        return (
            Argument.matrix(
                self.values.arrays[0], self.access, entries.core,
                rows if subset else _rows(rows, 0, core), name,
            ),
            Argument.matrix(
                self.buffer, self.access, entries.border,
                rows if subset else _rows(rows, core, core + border), name,
            ),
        )  # fmt: skip

    def open(self) -> None:
        """Begin to gather, where it has not begun."""
        if not self.pending:
            assert self.buffer is not None
            self.buffer[...] = 0
            self.pending = True

    def close(self, error: Exception | None = None) -> None:
        """Bring what has been gathered where it belongs. Collective.

        Parameters
        ----------
        error
            Why this process could not run the loop.

        Raises
        ------
        Exception
            On all processes where one of them could not; see :func:`pyop3_mlir.parallel.together`.
        """
        from mpi4py import MPI

        comm = self.comm
        self.open()
        self.pending = False
        connected = all(block.sent is not None for block in self.blocks)
        state = np.array([comm.size if error is None else comm.rank, connected], np.int64)
        request = comm.Iallreduce(MPI.IN_PLACE, state, op=MPI.MIN)
        if error is None:
            self._add_own()
        request.Wait()
        if state[0] < comm.size:
            parallel.raise_first(comm, int(state[0]), error)
        if not state[1]:
            for block in self.blocks:
                block.connect(comm, self.values)
        self._exchange()
        self.values.changed()

    def _add_own(self) -> None:
        assert self.buffer is not None
        for array, places, gathered in self._own:
            self._take(array, places, self.buffer[gathered])

    def _take(self, array: Array, places: Array, values: Array) -> None:
        # no place occurs twice
        if not places.size:
            return
        if self.access is INC:
            array[places] += values
        else:
            array[places] = values

    def _exchange(self) -> None:
        dtype = self.values.arrays[0].dtype
        received, requests = [], []
        for block in self.blocks:
            for rank, incoming in block.received.items():
                buffer = np.empty(incoming.size, dtype)
                received.append((incoming, buffer))
                requests.append(self.comm.Irecv(buffer.view(np.uint8), rank, _TAG))
        assert self.buffer is not None
        for block in self.blocks:
            for rank, part in (block.sent or {}).items():
                requests.append(self.comm.Isend(self.buffer[part].view(np.uint8), rank, _TAG))
        for request in requests:
            request.Wait()
        for incoming, buffer in received:
            for array, (places, chosen) in zip(self.values.arrays, incoming.parts, strict=True):
                self._take(array, places, buffer[chosen])


def halves(
    kernel: LocalKernel,
    iterations: IterationSet,
    arguments: Sequence[Argument],
    replaced: Sequence[tuple[Argument, Argument] | None],
    core: int,
    name: str,
) -> tuple[Parloop, Parloop]:
    """A loop's core, and its other entities, as loops of their own.

    Parameters
    ----------
    kernel, iterations, arguments, name
        The loop.
    replaced
        Instead of an argument, that of the first and that of the second loop.
    core
        Iterations of the first loop.
    """
    made = []
    for half, (start, stop) in enumerate(((0, core), (core, iterations.owned or 0))):
        entities = None if iterations.entities is None else iterations.entities[start:stop]
        visited = IterationSet(stop - start, entities=entities, name=iterations.name)
        parts = [
            _part(old, iterations, start, stop) if new is None else new[half]
            for old, new in zip(arguments, replaced, strict=True)
        ]
        made.append(Parloop(kernel, visited, parts, name))
    return made[0], made[1]

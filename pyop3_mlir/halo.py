"""Loops on plain arrays under MPI: parts of a mesh, and the exchange of what they share.

A process holds the cells that it owns and the nodes that these touch: its own nodes first, then
ghosts, copies of nodes that other processes own. A :class:`Halo` sends owners' rows to the ghosts
and the ghosts' sums back. :func:`distribute` makes a process's part of a mesh that all of them
know, and :func:`compile` a loop that communicates while it computes the cells without ghosts.

Communicators are mpi4py's, as in :mod:`pyop3_mlir.parallel`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir import parallel
from pyop3_mlir.engine import BoundLoop
from pyop3_mlir.errors import InvalidLoopError
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    Access,
    Argument,
    IndexTable,
    IterationSet,
    Kind,
    Parloop,
)
from pyop3_mlir.runtime.devices import Device

__all__ = ["DistributedLoop", "Halo", "Part", "compile", "distribute"]

_TAG = 1719
"""Of all messages; the user's own should have another."""


class Halo:
    """Which rows of this process's arrays are copies of other processes' rows. Collective.

    Parameters
    ----------
    comm
        The communicator.
    owned
        Rows ``[0, owned)`` belong to this process; ghosts follow.
    owners
        ``int[ghosts]``, the process that owns each ghost.
    rows
        ``int[ghosts]``, the number of its row there.

    Raises
    ------
    Pyop3MlirError
        On all processes, where a ghost is not owned by another process, or its row does not exist
        there.
    """

    def __init__(
        self,
        comm: Any,
        owned: int,
        owners: npt.ArrayLike,
        rows: npt.ArrayLike,
    ) -> None:
        self.comm = comm
        self.owned = owned
        owner_of, row_of = np.asarray(owners, np.int64), np.asarray(rows, np.int64)

        def ghosts_of() -> list[npt.NDArray[np.int64]]:
            if owner_of.shape != row_of.shape or owner_of.ndim != 1:
                raise InvalidLoopError(
                    f"halo: owners of shape {owner_of.shape} and rows of shape {row_of.shape}"
                )
            wrong = (owner_of < 0) | (owner_of >= comm.size) | (owner_of == comm.rank)
            if wrong.any():
                ghost = int(wrong.argmax())
                raise InvalidLoopError(
                    f"halo: ghost {ghost} is owned by process {int(owner_of[ghost])}, "
                    f"expected another one of {comm.size}"
                )
            return [np.flatnonzero(owner_of == rank) for rank in range(comm.size)]

        ghosts = parallel.together(comm, ghosts_of)
        self.size = owned + len(owner_of)
        wanted = comm.alltoall([row_of[found] for found in ghosts])

        def check() -> None:
            for rank, numbers in enumerate(wanted):
                if numbers.size and not 0 <= numbers.min() <= numbers.max() < owned:
                    raise InvalidLoopError(
                        f"halo: process {rank} wants rows {numbers.min()} to {numbers.max()} of "
                        f"process {comm.rank}, which owns {owned}"
                    )

        parallel.together(comm, check)
        self._ghosts = {rank: owned + found for rank, found in enumerate(ghosts) if found.size}
        self._wanted = {rank: numbers for rank, numbers in enumerate(wanted) if numbers.size}

    def begin(self, array: npt.NDArray[Any]) -> _Exchange:
        """Begin to send owned rows to their ghosts; ``finish()`` of what is returned ends it.

        Parameters
        ----------
        array
            ``[size, ...]``. Its ghosts hold no meaning meanwhile.
        """
        return _Exchange(self, array, self._wanted, self._ghosts, None)

    def update(self, array: npt.NDArray[Any]) -> None:
        """Send owned rows to their ghosts. Collective."""
        self.begin(array).finish()

    def begin_reduction(self, array: npt.NDArray[Any], access: Access = INC) -> _Exchange:
        """Begin to send ghosts to their owners, which take them by ``access`` at ``finish()``.

        Parameters
        ----------
        array
            ``[size, ...]``.
        access
            INC, MIN or MAX.
        """
        if access not in _UFUNCS:
            raise InvalidLoopError(f"halo: rows are reduced by INC, MIN or MAX, not {access.name}")
        return _Exchange(self, array, self._ghosts, self._wanted, access)

    def reduce(self, array: npt.NDArray[Any], access: Access = INC) -> None:
        """Send ghosts to their owners, and let them be what the owners then have. Collective."""
        self.begin_reduction(array, access).finish()
        self.update(array)


_UFUNCS: dict[Access, np.ufunc] = {INC: np.add, MIN: np.minimum, MAX: np.maximum}


class _Exchange:
    """Messages in flight."""

    def __init__(
        self,
        halo: Halo,
        array: npt.NDArray[Any],
        sent: Mapping[int, npt.NDArray[np.int64]],
        received: Mapping[int, npt.NDArray[np.int64]],
        access: Access | None,
    ) -> None:
        if len(array) != halo.size:
            raise InvalidLoopError(
                f"halo: an array of {len(array)} rows, expected {halo.size}: "
                f"{halo.owned} owned ones and {halo.size - halo.owned} ghosts"
            )
        self._array, self._received, self._access = array, received, access
        self._arrived = {
            rank: np.empty((len(rows), *array.shape[1:]), array.dtype)
            for rank, rows in received.items()
        }
        self._sent = [np.ascontiguousarray(array[rows]) for rows in sent.values()]
        self._requests = [
            halo.comm.Irecv(buffer.view(np.uint8), rank, _TAG)
            for rank, buffer in self._arrived.items()
        ] + [
            halo.comm.Isend(buffer.view(np.uint8), rank, _TAG)
            for rank, buffer in zip(sent, self._sent, strict=True)
        ]

    def finish(self) -> None:
        """Wait for the messages, and put them where they belong."""
        for request in self._requests:
            request.Wait()
        for rank, rows in self._received.items():
            if self._access is None:
                self._array[rows] = self._arrived[rank]
            else:
                # a process sends a row once
                ufunc = _UFUNCS[self._access]
                self._array[rows] = ufunc(self._array[rows], self._arrived[rank])


# -- parts of a mesh ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """What a process holds of a mesh.

    Attributes
    ----------
    cells
        Numbers of the cells that it owns, in the whole mesh; those that touch no ghost come first.
    nodes
        Numbers of its nodes in the whole mesh, its own first.
    iteration_set
        The cells, core and owned.
    table
        The map from cells to nodes, in this process's numbers.
    halo
        The exchange of arrays with a row for each node.
    """

    cells: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.int64]
    iteration_set: IterationSet
    table: IndexTable
    halo: Halo


def distribute(
    comm: Any, table: npt.ArrayLike, cell_owners: npt.ArrayLike, nodes: int | None = None
) -> Part:
    """Take this process's part of a mesh that all processes know. Collective.

    A node belongs to the lowest process of those that own a cell with it, and to the first process
    where there is none.

    Parameters
    ----------
    comm
        The communicator.
    table
        ``int[cells, arity]``, the nodes of each cell, the same on all processes.
    cell_owners
        ``int[cells]``, the process that each cell belongs to; some may have none.
    nodes
        Number of nodes; one more than the largest in ``table`` where not given.
    """
    whole, owner = np.asarray(table, np.int64), np.asarray(cell_owners, np.int64)
    if nodes is None:
        nodes = int(whole.max(initial=-1)) + 1
    node_owner = np.full(nodes, comm.size)
    np.minimum.at(node_owner, whole, owner[:, None])
    node_owner[node_owner == comm.size] = 0

    own = np.flatnonzero(node_owner == comm.rank)
    cells = np.flatnonzero(owner == comm.rank)
    has_ghosts = (node_owner[whole[cells]] != comm.rank).any(axis=1)
    cells = np.concatenate([cells[~has_ghosts], cells[has_ghosts]])
    touched = np.unique(whole[cells])
    ghosts = touched[node_owner[touched] != comm.rank]
    numbers = np.concatenate([own, ghosts])

    # the number of each node where it is owned
    row = np.empty(nodes, np.int64)
    for rank in range(comm.size):
        theirs = np.flatnonzero(node_owner == rank)
        row[theirs] = np.arange(len(theirs))
    halo = Halo(comm, len(own), node_owner[ghosts], row[ghosts])
    local = np.full(nodes, -1)
    local[numbers] = np.arange(len(numbers))
    values = local[whole[cells]].astype(np.int32)
    core = int((~has_ghosts).sum())
    return Part(
        cells,
        numbers,
        IterationSet(len(cells), core=core),
        IndexTable(values, len(numbers)),
        halo,
    )


# -- loops ----------------------------------------------------------------------------------------


def compile(  # noqa: A001
    comm: Any,
    parloop: Parloop,
    halos: Sequence[Halo | None],
    *,
    device: str | Device | None = None,
    options: Options | None = None,
) -> DistributedLoop:
    """Compile a loop on all processes of a communicator. Collective.

    Parameters
    ----------
    comm
        The communicator.
    parloop
        This process's part of the loop. Cells of its iteration set beyond ``core`` may touch
        ghosts.
    halos
        For each argument the halo of its rows, or None where no other process has them.
    device, options
        As for :func:`pyop3_mlir.parallel.compile`.

    Raises
    ------
    Pyop3MlirError
        On all processes where one of them failed, with the text of the first one's error.
    """

    def propose() -> parallel.Proposal:
        _check(parloop, halos)
        return parallel.Proposal(parloop)

    bound = parallel.compile(comm, propose, device=device, options=options)
    return DistributedLoop(comm, bound, halos)


def _check(parloop: Parloop, halos: Sequence[Halo | None]) -> None:
    if len(halos) != len(parloop.arguments):
        raise InvalidLoopError(
            f"loop {parloop.name}: {len(halos)} halos for {len(parloop.arguments)} arguments"
        )
    core, owned = parloop.iteration_set.core or 0, parloop.iteration_set.owned or 0
    entities = parloop.iteration_set.entities
    for argument, halo in zip(parloop.arguments, halos, strict=True):
        where = f"loop {parloop.name}, argument {argument.name}"
        if argument.kind is Kind.GLOBAL and argument.access.name in ("WRITE", "RW"):
            raise InvalidLoopError(f"{where}: which process's value would it be? Use a reduction")
        if halo is None:
            continue
        if argument.table is None:
            raise InvalidLoopError(f"{where}: only what is reached through a table has a halo")
        if argument.buffer.shape[:1] != (halo.size,):
            raise InvalidLoopError(
                f"{where}: shape {argument.buffer.shape}, expected {halo.size} rows as in its halo"
            )
        values = argument.table.values
        visited = values[:owned] if entities is None else values[entities[:owned]]
        if (visited[:core] >= halo.owned).any():
            raise InvalidLoopError(f"{where}: a core cell touches a ghost; give a smaller core")
        if argument.access.name in ("WRITE", "RW") and (visited >= halo.owned).any():
            raise InvalidLoopError(
                f"{where}: a ghost is stored to, whose owner would not hear of it; "
                "use INC, MIN or MAX, or let its owner visit the cell"
            )


class DistributedLoop:
    """A loop on all processes, which communicates while it computes. Made by :func:`compile`.

    Attributes
    ----------
    bound
        This process's part.
    core, waiting, owned
        Seconds that all calls took in cells that touch no ghost, from there until the ghosts had
        arrived, and in the others.
    """

    def __init__(self, comm: Any, bound: BoundLoop, halos: Sequence[Halo | None]) -> None:
        self.comm = comm
        self.bound = bound
        self.core = self.waiting = self.owned = 0.0
        arguments = bound.parloop.arguments
        # an array that is passed twice is exchanged once; both add to it, or take its extreme
        self._read: dict[int, tuple[Halo, Argument]] = {}
        self._reduced: dict[int, tuple[Halo, Argument]] = {}
        for argument, halo in zip(arguments, halos, strict=True):
            if halo is not None and argument.access in _UFUNCS:
                self._reduced[argument.buffer.ctypes.data] = halo, argument
            elif halo is not None and argument.access.gathers:
                self._read[argument.buffer.ctypes.data] = halo, argument
        self._globals = [a for a in arguments if a.kind is Kind.GLOBAL and a.access in _UFUNCS]

    def __call__(self) -> None:
        """Run the loop. Collective.

        Ghosts of what is read are made current; ghosts of what is written hold no meaning
        afterwards: the rows that a process owns are the result. Globals hold it on all processes.
        """
        iterations = self.bound.parloop.iteration_set
        start = time.perf_counter()
        under_way = [halo.begin(argument.buffer) for halo, argument in self._read.values()]
        for halo, argument in self._reduced.values():
            argument.buffer[halo.owned :] = _neutral(argument)
        before = [np.array(argument.buffer) for argument in self._globals]
        for argument in self._globals:
            if argument.access is INC:
                argument.buffer[...] = 0
        self.bound(0, iterations.core)
        computed = time.perf_counter()
        for exchange in under_way:
            exchange.finish()
        arrived = time.perf_counter()
        self.bound(iterations.core or 0, iterations.owned)
        self.core += computed - start
        self.waiting += arrived - computed
        self.owned += time.perf_counter() - arrived
        reductions = [
            halo.begin_reduction(argument.buffer, argument.access)
            for halo, argument in self._reduced.values()
        ]
        for exchange in reductions:
            exchange.finish()
        for argument, old in zip(self._globals, before, strict=True):
            self._reduce_global(argument, old)

    def _reduce_global(self, argument: Argument, old: npt.NDArray[Any]) -> None:
        from mpi4py import MPI

        operation = {INC: MPI.SUM, MIN: MPI.MIN, MAX: MPI.MAX}[argument.access]
        self.comm.Allreduce(MPI.IN_PLACE, argument.buffer, op=operation)
        if argument.access is INC:
            # what was there enters once, not once for each process
            argument.buffer[...] += old


def _neutral(argument: Argument) -> Any:
    """What changes nothing where it is reduced."""
    if argument.access is INC:
        return 0
    dtype = argument.buffer.dtype
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    if argument.access is MIN:
        return limits.max if limits else np.inf
    return limits.min if limits else -np.inf

"""Loops on plain arrays under MPI: parts of a mesh, and the exchange of what they share.

A process holds the cells that it owns and the nodes that these touch: its own nodes first, then
ghosts, copies of nodes that other processes own. A :class:`Halo` sends owners' rows to the ghosts
and the ghosts' sums back. :func:`distribute` makes a process's part of a mesh that all of them
know, and :func:`compile` a loop that communicates while it computes the cells without ghosts.

Communicators are mpi4py's, as in :mod:`pyop3_mlir.parallel`. Of an array whose contents stay on a
device (:class:`~pyop3_mlir.runtime.residency.Resident`) only the rows that are exchanged come to
the host and go back.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir import engine, parallel
from pyop3_mlir.engine import BoundLoop
from pyop3_mlir.errors import InvalidLoopError
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    WRITE,
    Access,
    Argument,
    IndexTable,
    IterationSet,
    Kind,
    Parloop,
)
from pyop3_mlir.rows import Rows, neutral
from pyop3_mlir.runtime.devices import Device
from pyop3_mlir.runtime.residency import Resident, resident_of

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

    @classmethod
    def of_messages(
        cls,
        comm: Any,
        size: int,
        sent: Mapping[int, npt.NDArray[np.int64]],
        received: Mapping[int, npt.NDArray[np.int64]],
    ) -> Halo:
        """The halo where all processes know already what they send and receive.

        Parameters
        ----------
        comm
            The communicator.
        size
            Rows of this process's arrays.
        sent
            For each process the own rows that it has ghosts of, in its order.
        received
            For each process the ghosts whose rows it owns.
        """
        halo = cls.__new__(cls)
        halo.comm = comm
        halo.size = size
        halo.owned = size - sum(map(len, received.values()))
        halo._wanted, halo._ghosts = dict(sent), dict(received)
        return halo

    def begin(self, array: npt.NDArray[Any] | Resident) -> _Exchange | _ResidentExchange:
        """Begin to send owned rows to their ghosts; ``finish()`` of what is returned ends it.

        Parameters
        ----------
        array
            ``[size, ...]``; a :class:`~pyop3_mlir.runtime.residency.Resident` on all processes or
            on none. Its ghosts hold no meaning meanwhile.

        Raises
        ------
        InvalidLoopError
            For an array of another size, or one that is resident and is not given as such.
        Pyop3MlirError
            At ``finish()``, on all processes, where one of them cannot get at the contents of a
            resident array.
        """
        if isinstance(array, Resident):
            owned, ghosts = self._rows(array)
            return _ResidentExchange(self, array, owned, self._wanted, ghosts, self._ghosts, WRITE)
        return _Exchange(self, array, self._wanted, self._ghosts, None)

    def update(self, array: npt.NDArray[Any] | Resident) -> None:
        """Send owned rows to their ghosts. Collective; see :meth:`begin`."""
        self.begin(array).finish()

    def begin_reduction(
        self, array: npt.NDArray[Any] | Resident, access: Access = INC
    ) -> _Exchange | _ResidentExchange:
        """Begin to send ghosts to their owners, which take them by ``access`` at ``finish()``.

        Parameters
        ----------
        array
            ``[size, ...]``; as for :meth:`begin`.
        access
            INC, MIN or MAX.

        Raises
        ------
        Pyop3MlirError
            As for :meth:`begin`.
        """
        if access not in _UFUNCS:
            raise InvalidLoopError(f"halo: rows are reduced by INC, MIN or MAX, not {access.name}")
        if isinstance(array, Resident):
            owned, ghosts = self._rows(array)
            return _ResidentExchange(self, array, ghosts, self._ghosts, owned, self._wanted, access)
        return _Exchange(self, array, self._ghosts, self._wanted, access)

    def reduce(self, array: npt.NDArray[Any] | Resident, access: Access = INC) -> None:
        """Send ghosts to their owners, and let them be what the owners then have. Collective."""
        self.begin_reduction(array, access).finish()
        self.update(array)

    def _rows(self, resident: Resident) -> tuple[Rows, Rows]:
        """The rows that other processes want, and the ghosts, each by process."""
        known: weakref.WeakKeyDictionary[Halo, tuple[Rows, Rows]]
        known = vars(resident).setdefault("_exchanged", weakref.WeakKeyDictionary())
        if self not in known:
            self._check(resident.array)
            known[self] = (
                Rows(resident, _joined(self._wanted)),
                Rows(resident, _joined(self._ghosts)),
            )
        return known[self]

    def _check(self, array: npt.NDArray[Any]) -> None:
        if len(array) != self.size:
            raise InvalidLoopError(
                f"halo: an array of {len(array)} rows, expected {self.size}: "
                f"{self.owned} owned ones and {self.size - self.owned} ghosts"
            )


def _joined(numbers: Mapping[int, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([*numbers.values(), np.zeros(0, np.int64)])


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
        halo._check(array)
        if resident_of(array) is not None:
            raise InvalidLoopError("halo: the array is resident; exchange its Resident instead")
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


class _ResidentExchange:
    """Messages in flight, of an array whose contents may be on a device.

    A process that cannot gather its rows sends others instead, so that nobody waits in vain, and
    all learn of it in the end.
    """

    def __init__(
        self,
        halo: Halo,
        resident: Resident,
        outgoing: Rows,
        sent: Mapping[int, npt.NDArray[np.int64]],
        incoming: Rows,
        received: Mapping[int, npt.NDArray[np.int64]],
        access: Access,
    ) -> None:
        self._comm, self._resident, self._access = halo.comm, resident, access
        self._incoming = incoming
        self.error: Exception | None = None
        shape, dtype = resident.array.shape[1:], resident.array.dtype
        packed = np.zeros((len(outgoing.numbers), *shape), dtype)
        try:
            packed = np.ascontiguousarray(outgoing.get(resident))
        except Exception as error:
            self.error = error
        self._arrived = np.empty((len(incoming.numbers), *shape), dtype)
        # alive until they are sent
        self._packed = packed
        self._requests = []
        for start, buffer, parts in (
            (halo.comm.Irecv, self._arrived, received),
            (halo.comm.Isend, packed, sent),
        ):
            first = 0
            for rank, numbers in parts.items():
                part = buffer[first : first + len(numbers)].view(np.uint8)
                self._requests.append(start(part, rank, _TAG))
                first += len(numbers)

    def complete(self) -> Exception | None:
        """As :meth:`finish`, but return this process's error: the caller tells the others."""
        for request in self._requests:
            request.Wait()
        if self.error is None:
            try:
                self._incoming.put(self._resident, self._arrived, self._access)
            except Exception as error:
                self.error = error
        return self.error

    def finish(self) -> None:
        """Wait for the messages, and put them where they belong. Collective."""
        parallel.raise_together(self._comm, self.complete())


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
    found = [halo is not None and resident_of(a.buffer) for halo, a in _pairs(parloop, halos)]
    # where a process has no rows there is nothing to keep track of, but it takes part
    anywhere = [any(flags) for flags in zip(*comm.allgather([bool(f) for f in found]), strict=True)]
    residents = [
        (owner or Resident(argument.buffer)) if resident else None
        for resident, owner, argument in zip(anywhere, found, parloop.arguments, strict=True)
    ]
    loop = DistributedLoop(comm, bound, halos, residents)
    if any(anywhere):
        parallel.share(comm, parallel.together(comm, loop.modules))
    return loop


def _pairs(parloop: Parloop, halos: Sequence[Halo | None]) -> list[tuple[Halo | None, Argument]]:
    return list(zip(halos, parloop.arguments, strict=True))


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
        if argument.kind is Kind.GLOBAL and resident_of(argument.buffer) is not None:
            raise InvalidLoopError(f"{where}: a global that is reduced may not be resident")
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

    def __init__(
        self,
        comm: Any,
        bound: BoundLoop,
        halos: Sequence[Halo | None],
        residents: Sequence[Resident | None],
    ) -> None:
        self.comm = comm
        self.bound = bound
        self.core = self.waiting = self.owned = 0.0
        arguments = bound.parloop.arguments
        # an array that is passed twice is exchanged once; both add to it, or take its extreme
        self._read: dict[int, tuple[Halo, Argument, Resident | None]] = {}
        self._reduced: dict[int, tuple[Halo, Argument, Resident | None]] = {}
        for argument, halo, resident in zip(arguments, halos, residents, strict=True):
            if halo is not None and argument.access in _UFUNCS:
                self._reduced[argument.buffer.ctypes.data] = halo, argument, resident
            elif halo is not None and argument.access.gathers:
                self._read[argument.buffer.ctypes.data] = halo, argument, resident
        self._globals = [a for a in arguments if a.kind is Kind.GLOBAL and a.access in _UFUNCS]
        # then a device may fail on one process only
        self._guarded = any(residents)

    def modules(self) -> list[engine.Module]:
        """What resident arrays are exchanged by."""
        if self.bound.device.is_host:
            return []
        found = []
        for halo, _, resident in self._read.values():
            if resident is not None:
                owned, ghosts = halo._rows(resident)
                found += owned.modules(self.bound.device, "get")
                found += ghosts.modules(self.bound.device, "WRITE")
        for halo, argument, resident in self._reduced.values():
            if resident is not None:
                owned, ghosts = halo._rows(resident)
                name = argument.access.name
                found += ghosts.modules(self.bound.device, f"fill {name}", "get")
                found += owned.modules(self.bound.device, name)
        return found

    def __call__(self) -> None:
        """Run the loop. Collective.

        Ghosts of what is read are made current; ghosts of what is written hold no meaning
        afterwards: the rows that a process owns are the result. Globals hold it on all processes.

        Raises
        ------
        Pyop3MlirError
            Where an array is resident, on all processes if one of them fails.
        """
        iterations = self.bound.parloop.iteration_set
        errors = _Errors(self._guarded)
        start = time.perf_counter()
        under_way = [
            halo.begin(argument.buffer if resident is None else resident)
            for halo, argument, resident in self._read.values()
        ]
        before = [np.array(argument.buffer) for argument in self._globals]
        with errors:
            for halo, argument, resident in self._reduced.values():
                value = neutral(argument.buffer.dtype, argument.access)
                if resident is None:
                    argument.buffer[halo.owned :] = value
                else:
                    halo._rows(resident)[1].fill(resident, argument.access)
            for argument in self._globals:
                if argument.access is INC:
                    argument.buffer[...] = 0
            self.bound(0, iterations.core)
        computed = time.perf_counter()
        for exchange in under_way:
            errors.finish(exchange)
        arrived = time.perf_counter()
        with errors:
            self.bound(iterations.core or 0, iterations.owned)
        self.core += computed - start
        self.waiting += arrived - computed
        self.owned += time.perf_counter() - arrived
        reductions = [
            halo.begin_reduction(argument.buffer if resident is None else resident, argument.access)
            for halo, argument, resident in self._reduced.values()
        ]
        for exchange in reductions:
            errors.finish(exchange)
        if self._guarded:
            parallel.raise_together(self.comm, errors.first)
        for argument, old in zip(self._globals, before, strict=True):
            self._reduce_global(argument, old)

    def _reduce_global(self, argument: Argument, old: npt.NDArray[Any]) -> None:
        from mpi4py import MPI

        operation = {INC: MPI.SUM, MIN: MPI.MIN, MAX: MPI.MAX}[argument.access]
        self.comm.Allreduce(MPI.IN_PLACE, argument.buffer, op=operation)
        if argument.access is INC:
            # what was there enters once, not once for each process
            argument.buffer[...] += old


class _Errors:
    """Lets a process that failed take part in what is collective until all hear of it.

    Parameters
    ----------
    kept
        Whether errors are kept; they are raised at once otherwise.
    """

    def __init__(self, kept: bool) -> None:
        self._kept = kept
        self.first: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not self._kept or not isinstance(error, Exception):
            return False
        self.first = self.first or error
        return True

    def finish(self, exchange: _Exchange | _ResidentExchange) -> None:
        """Finish an exchange."""
        if isinstance(exchange, _Exchange):
            exchange.finish()
        else:
            self.first = self.first or exchange.complete()

"""PyOP2's Dats on a device of which PETSc knows nothing, or on several processes.

What loops write stays on the device until someone looks at the Dat's array or its ``Vec``; whoever
holds on to a view of the array sees it up to date, at the price of copies at each loop. Halo
exchanges gather and scatter on the device, and move the exchanged rows alone. All processes
exchange by the same messages, wherever each has its contents.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir import parallel
from pyop3_mlir.halo import Halo
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import INC, READ, Access
from pyop3_mlir.rows import Rows
from pyop3_mlir.runtime.devices import Device
from pyop3_mlir.runtime.residency import Resident

__all__ = ["ResidentData", "ResidentMemory", "reading", "store"]

Array = npt.NDArray[Any]

_KEY = "_pyop3_mlir_resident"


class ResidentMemory:
    """A Dat's array, on the host and on the device.

    Attributes
    ----------
    array
        For loops.
    resident
        Knows where the latest contents are.
    """

    def __init__(self, dat: Any, array: Array) -> None:
        self._dat = weakref.ref(dat)
        self.array = array.reshape(-1)
        self.resident = Resident(array)
        # views that others hold, read-only ones and others, and Vecs in use
        self._readers: list[weakref.ref[Array]] = []
        self._writers: list[weakref.ref[Array]] = []
        self.vecs = self.writing_vecs = 0
        self.exchange: Any = None
        self._rows: dict[str, Rows] = {}

    def current(self) -> bool:
        """Whether it is still the Dat's array."""
        dat = self._dat()
        return dat is not None and dat.__dict__.get(_KEY) is self

    def view(self, reading: bool) -> Array:
        """The array for someone on the host, up to date as long as it is held."""
        self.resident.refresh_host()
        if not reading:
            self.resident.host_changed()
        array = self.resident.array
        # views of it hold it, and not what it is made from
        memory: Any = array.reshape(-1).view(np.uint8)
        root: Array = np.frombuffer(memoryview(memory), dtype=array.dtype)
        (self._readers if reading else self._writers).append(weakref.ref(root))
        return root.reshape(array.shape)

    @contextmanager
    def using(self, access: Access) -> Iterator[None]:
        """Let a loop run on it."""
        if self._alive(self._writers) or self.writing_vecs:
            # nobody says when they write
            self.resident.refresh_host()
            self.resident.host_changed()
        yield
        if access is not READ and (
            self.vecs or self._alive(self._readers) or self._alive(self._writers)
        ):
            self.resident.refresh_host()

    @staticmethod
    def _alive(views: list[weakref.ref[Array]]) -> bool:
        views[:] = [view for view in views if view() is not None]
        return bool(views)

    def fill(self, name: str, start: int, access: Access) -> None:
        """Set the rows from ``start`` on to what changes nothing where it is reduced."""
        rows = self._rows.get(name)
        if rows is None:
            numbers = np.arange(start, len(self.resident.array))
            rows = self._rows[name] = Rows(self.resident, numbers)
        with self.using(INC):
            rows.fill(self.resident, access)


def store(carrier: Any, values: Array) -> None:
    """What ``carrier._data += ...`` ends with: that has changed the array in place already."""
    if values is not carrier._data:
        carrier._data[...] = values


def reading(devices: Any, own: property) -> property:
    """A property of Dats with ``devices.reading`` set meanwhile: who asks will not write."""
    get = own.fget
    assert get is not None

    @functools.wraps(get)
    def flagged(dat: Any) -> Any:
        with _flag(devices, "reading"):
            return get(dat)

    return property(flagged)


@contextmanager
def _flag(owner: Any, name: str) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, True)
    try:
        yield
    finally:
        setattr(owner, name, before)


class ResidentData:
    """The Dats of loops on a device.

    Parameters
    ----------
    device
        With memory of its own.

    Attributes
    ----------
    error
        What a loop that has begun has to raise, on all processes at the same time.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        # not a WeakSet: PyOP2's objects may compare equal where they are not the same
        self._dats: list[weakref.ref[Any]] = []
        self.reading = self._inside = False
        self.error: Exception | None = None

    @classmethod
    def of(cls, options: Options) -> ResidentData | None:
        """What the settings ask for; None on the CPU, and where results are verified there.

        Raises
        ------
        DeviceError
            Where there is no such device.
        """
        from pyop3_mlir.runtime.devices import get_device

        if options.device.partition(":")[0] == "cpu" or options.verify:
            return None
        return cls(get_device(parallel.place(options.device)))

    def attach(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Take part in what PyOP2 does to Dats.

        Parameters
        ----------
        replace
            Called with a class, the name of an attribute in it, and the new value; undone later.
        """
        from pyop2.types.dat import AbstractDat, Dat
        from pyop2.types.data_carrier import EmptyDataMixin

        devices = self
        allocate = vars(EmptyDataMixin)["_data"].func
        make_vec = vars(Dat)["_vec"].func
        own_context = vars(Dat)["vec_context"]

        def _data(carrier: Any) -> Array:
            memory = carrier.__dict__.get(_KEY)
            if memory is None and isinstance(carrier, Dat) and not devices._inside:
                memory = devices._memory(carrier, allocate)
            if memory is None or not memory.array.size:
                found: Array = allocate(carrier)
                return found
            if devices._inside:
                return memory.resident.array
            view: Array = memory.view(devices.reading)
            return view

        def _vec(dat: Any) -> Any:
            with _flag(devices, "_inside"):
                return make_vec(dat)

        @contextmanager
        def vec_context(dat: Any, access: Any) -> Iterator[Any]:
            memory = devices._memory(dat, allocate)
            writes = access.name != "READ"
            if access.name != "WRITE":
                memory.resident.refresh_host()
            if writes:
                memory.resident.host_changed()
            memory.vecs += 1
            memory.writing_vecs += writes
            try:
                with own_context(dat, access) as vec:
                    yield vec
            finally:
                memory.vecs -= 1
                memory.writing_vecs -= writes
                if writes:
                    memory.resident.refresh_host()
                    memory.resident.host_changed()

        vec_property = functools.cached_property(_vec)
        vec_property.__set_name__(Dat, "_vec")
        replace(Dat, "_vec", vec_property)
        replace(Dat, "vec_context", vec_context)
        replace(EmptyDataMixin, "_data", property(_data, store))
        for name in ("data_ro", "data_ro_with_halos"):
            replace(AbstractDat, name, reading(self, vars(AbstractDat)[name]))
        self._allocate = allocate
        self._attach_exchanges(replace, AbstractDat, Dat)

    def _attach_exchanges(self, replace: Any, abstract: Any, dat_type: Any) -> None:
        devices = self

        def unless_ours(name: str, ours: Callable[[Any, Any], None]) -> None:
            own = vars(abstract)[name]

            @functools.wraps(own)
            def method(dat: Any, *arguments: Any, **named: Any) -> None:
                if not isinstance(dat, dat_type):
                    own(dat, *arguments, **named)
                elif name == "zero":
                    if arguments or named:
                        own(dat, *arguments, **named)
                    else:
                        ours(dat, None)
                elif dat.dataset.halo is not None and not dat._halo_frozen:
                    (access,) = (*arguments, *named.values())
                    ours(dat, Access[access.name])

            replace(abstract, name, method)

        def zero(dat: Any, _: Any) -> None:
            dat.increment_dat_version()
            memory = devices._memory(dat)
            parallel.together(dat.comm, lambda: memory.fill("zero", 0, INC))
            dat.halo_valid = True

        def to_local_begin(dat: Any, access: Access) -> None:
            memory = devices._memory(dat)
            if access in _REDUCTIONS:
                try:
                    memory.fill("ghosts", dat.dataset.size, access)
                except Exception as error:
                    if dat.comm.size == 1:
                        raise
                    # other processes wait for what this one has: the loop tells them
                    devices.error = devices.error or error
            elif access.gathers and not dat.halo_valid:
                halo = _halo_of(dat)
                memory.exchange = None if halo is None else halo.begin(memory.resident)

        def to_local_end(dat: Any, access: Access) -> None:
            if access in _REDUCTIONS:
                dat.halo_valid = False
            elif access.gathers and not dat.halo_valid:
                devices._finish(dat)
                dat.halo_valid = True

        def to_global_begin(dat: Any, access: Access) -> None:
            halo = _halo_of(dat)
            memory = devices._memory(dat)
            memory.exchange = (
                None if halo is None else halo.begin_reduction(memory.resident, access)
            )

        def to_global_end(dat: Any, _: Access) -> None:
            devices._finish(dat)
            dat.halo_valid = False

        unless_ours("zero", zero)
        unless_ours("global_to_local_begin", to_local_begin)
        unless_ours("global_to_local_end", to_local_end)
        unless_ours("local_to_global_begin", to_global_begin)
        unless_ours("local_to_global_end", to_global_end)

    def _finish(self, dat: Any) -> None:
        memory = self._memory(dat)
        exchange, memory.exchange = memory.exchange, None
        if exchange is not None:
            with memory.using(INC):
                exchange.finish()

    def detach(self) -> None:
        """Bring everything back to the host."""
        for reference in self._dats:
            dat = reference()
            memory = None if dat is None else dat.__dict__.pop(_KEY, None)
            if memory is not None:
                memory.resident.refresh_host()
        self._dats.clear()

    def _memory(self, dat: Any, allocate: Any = None) -> ResidentMemory:
        found = dat.__dict__.get(_KEY)
        if found is None:
            array = (allocate or self._allocate)(dat)
            found = dat.__dict__[_KEY] = ResidentMemory(dat, array)
            self._dats.append(weakref.ref(dat))
        memory: ResidentMemory = found
        return memory

    def to_host(self, loop: Any) -> None:
        """Make everything that a loop uses fresh on the host, where its C code runs."""
        for argument, access in zip(loop.arguments, loop.accesses, strict=False):
            for memory in self._memories(argument.data):
                memory.resident.refresh_host()
                if access.name != "READ":
                    memory.resident.host_changed()

    def _memories(self, data: Any) -> Iterator[ResidentMemory]:
        from pyop2.types import Dat, MixedDat

        for part in data if isinstance(data, MixedDat) else (data,):
            dat = getattr(part, "_parent", part)
            if isinstance(dat, Dat):
                yield self._memory(dat)

    def vector(self, data: Any, number: int | None) -> ResidentMemory | None:
        """The memory of a Dat, or of a part of a MixedDat; None where it is left alone."""
        part = data if number is None else data[number]
        return next(self._memories(part), None)

    def matrix(self, _holder: Any, _access: Access) -> None:
        """No matrix stays on the device."""


_REDUCTIONS = (INC, Access.MIN, Access.MAX)


def _halo_of(dat: Any) -> Halo | None:
    """The exchange of Firedrake's halo of a Dat, with messages of our own; None on one process."""
    from pyop2.mpi import internal_comm

    halo = dat.dataset.halo
    if halo.comm.size == 1:
        return None
    found: dict[int, Halo] = halo.__dict__.setdefault("_pyop3_mlir_halos", {})
    size = dat.dataset.total_size
    if size not in found:
        comm = internal_comm(halo.comm, halo)
        _, leaves, roots = halo.sf.getGraph()
        roots = np.asarray(roots).reshape(-1, 2)
        leaves = np.arange(len(roots)) if leaves is None else np.asarray(leaves)
        ghosts = {
            int(rank): leaves[roots[:, 0] == rank].astype(np.int64)
            for rank in np.unique(roots[:, 0])
        }
        wanted = comm.alltoall(
            [roots[roots[:, 0] == rank, 1].astype(np.int64) for rank in range(comm.size)]
        )
        found[size] = Halo.of_messages(
            comm, size, {rank: rows for rank, rows in enumerate(wanted) if rows.size}, ghosts
        )
    return found[size]

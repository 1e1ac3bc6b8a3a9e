"""Where the contents of arrays are: on the host, on devices, or on both.

Nobody can see what a program does to a numpy array between two loops. So on a device with memory of
its own every loop copies the arrays that it uses in, and those that it changes back. A program that
says when it looks, by a :class:`Resident`, spares most of that: contents move where they are stale,
and what loops write stays on the device until someone reads it. Index tables, and all else that
nobody may change, are copied once, whatever the number of loops that use them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import DeviceError
from pyop3_mlir.runtime.devices import Device
from pyop3_mlir.runtime.subview import part

__all__ = [
    "DeviceCopy",
    "Resident",
    "Traffic",
    "adopt",
    "device_copy",
    "latest",
    "resident_of",
    "traffic",
    "traffic_by_device",
    "zero_device",
]

_lock = threading.RLock()

_STAGING_KEPT = 1 << 28
"""Bytes of memory for transfers that a device keeps."""

_ZEROS = 1 << 24
"""Bytes that are set to zero at a time."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that were copied between the host and a device.

    Attributes
    ----------
    to_device, to_host
        Each way.
    """

    to_device: int = 0
    to_host: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.to_device + other.to_device, self.to_host + other.to_host)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.to_device - other.to_device, self.to_host - other.to_host)


_traffic: dict[str, Traffic] = {}


def traffic(device: str | None = None) -> Traffic:
    """What this process has copied so far.

    Parameters
    ----------
    device
        As ``str(device.spec)`` gives it (``cuda:0``); all devices together where not given.
    """
    with _lock:
        found = _traffic.values() if device is None else [_traffic.get(device, Traffic())]
        return sum(found, Traffic())


def traffic_by_device() -> dict[str, dict[str, int]]:
    """Return what this process has copied, as :class:`Traffic`'s attributes, for each device."""
    with _lock:
        return {device: asdict(moved) for device, moved in _traffic.items()}


def _count(device: Device, to_device: int = 0, to_host: int = 0) -> None:
    with _lock:
        old = _traffic.get(device.spec, Traffic())
        _traffic[device.spec] = old + Traffic(to_device, to_host)


def zero_device(memory: Any, device: Device) -> None:
    """Fill a buffer of a device with zeros, on the device."""
    import iree.runtime as iree

    staging = _staging(device)
    size = memory.byte_length()
    if size % 4 == 0:
        commands = iree.HalCommandBuffer(device.hal)
        commands.fill(memory, np.zeros(1, np.int32), end=True)
        staging.run(lambda *order: device.hal.queue_execute(commands, *order))
        return
    # what Vulkan cannot fill
    piece = min(size, _ZEROS)
    with staging.lock:
        zeros, mapped = staging.get(piece)
        mapped[...] = 0
        for start in range(0, size, piece):
            length = min(piece, size - start)
            source = zeros if length == piece else part(zeros, 0, length, device)
            whole = length == size
            staging.copy(source, memory if whole else part(memory, start, length, device))


def _range(array: npt.NDArray[Any]) -> tuple[int, int]:
    start: int = array.__array_interface__["data"][0]
    return start, start + array.nbytes


# -- memory of a device ---------------------------------------------------------------------------


class _Staging:
    """Memory that the host and a device both see, by size; that used least recently goes first."""

    def __init__(self, device: Device) -> None:
        import iree.runtime as iree

        self.lock = threading.RLock()
        # in this order: a semaphore must be gone before its device is
        self.semaphore = device.hal.create_semaphore(0)
        # and not ``device``, which would keep itself in the table of stagings
        self._hal, self._timeline = device.hal, device.timeline
        self.clock = 0
        self._types = (
            iree.MemoryType.HOST_LOCAL | iree.MemoryType.DEVICE_VISIBLE,
            iree.BufferUsage.DEFAULT | iree.BufferUsage.MAPPING,
        )
        self._kept: OrderedDict[int, tuple[Any, npt.NDArray[np.uint8]]] = OrderedDict()

    def get(self, size: int) -> tuple[Any, npt.NDArray[np.uint8]]:
        """Memory of ``size`` bytes, and the array in it. The caller holds the lock."""
        if size in self._kept:
            self._kept.move_to_end(size)
            return self._kept[size]
        while self._kept and sum(self._kept) + size > _STAGING_KEPT:
            self._kept.popitem(last=False)
        memory = self._hal.allocator.allocate_buffer(*self._types, size)
        mapped: npt.NDArray[np.uint8] = memory.map().asarray([size], np.dtype(np.uint8))
        self._kept[size] = memory, mapped
        return self._kept[size]

    def copy(self, source: Any, target: Any) -> None:
        """Copy between two buffers of one size, and wait for it. The caller holds the lock."""
        self.run(lambda *order: self._hal.queue_copy(source, target, *order))

    def run(self, submit: Callable[[list[Any], list[Any]], None]) -> None:
        """Have the device do something, given what it is to wait for and to signal; wait for it."""
        with self.lock:
            # loops that were submitted may still be at work on the memory
            self._timeline.wait()
            self.clock += 1
            submit([], [(self.semaphore, self.clock)])
            self.semaphore.wait(self.clock)


_stagings: weakref.WeakKeyDictionary[Device, _Staging] = weakref.WeakKeyDictionary()


def _staging(device: Device) -> _Staging:
    with _lock:
        if device not in _stagings:
            _stagings[device] = _Staging(device)
        return _stagings[device]


class DeviceCopy:
    """An array's memory on a device; made by :func:`device_copy`, shared by all that use it.

    Attributes
    ----------
    array
        On the host.
    device
        Where the copy is.
    memory
        IREE's ``HalBuffer``.
    constant
        Whether the array stays as it is, so that it is copied once.
    resident
        Who knows which copies of the array are stale; None where nobody does.
    fresh
        Whether the copy holds what the array does, or what is newer; of arrays that are neither
        constant nor resident, nobody knows.
    """

    def __init__(self, array: npt.NDArray[Any], device: Device, constant: bool) -> None:
        import iree.runtime as iree

        self.array = array
        self.device = device
        self.constant = constant
        self.fresh = False
        self.resident: Resident | None = None
        self.memory = device.hal.allocator.allocate_buffer(
            iree.MemoryType.DEVICE_LOCAL, iree.BufferUsage.DEFAULT, array.nbytes
        )

    def prepare(self) -> None:
        """Make it hold what the array holds, before a loop uses it."""
        if self.fresh and (self.constant or self.resident is not None):
            return
        if self.resident is not None:
            self.resident.refresh_host()
        self.send(0, self.array.nbytes)
        self.fresh = True

    def changed(self) -> None:
        """Take note that a loop has changed it: copy it back, or leave that until someone looks."""
        if self.constant:
            return
        if self.resident is not None:
            self.resident._changed_by(self)
        else:
            self.fetch(0, self.array.nbytes)

    def failed(self) -> None:
        """Take note that a loop that was to change it failed half-way."""
        self.fresh = False
        if self.resident is not None:
            self.resident._failed_on(self.device)

    def send(self, start: int, stop: int) -> None:
        """Copy bytes of the array to the device."""
        staging = _staging(self.device)
        with staging.lock:
            memory, mapped = staging.get(stop - start)
            np.copyto(mapped, self._bytes()[start:stop])
            staging.copy(memory, self._part(start, stop))
        _count(self.device, to_device=stop - start)

    def fetch(self, start: int, stop: int) -> None:
        """Copy bytes of the device to the array."""
        staging = _staging(self.device)
        with staging.lock:
            memory, mapped = staging.get(stop - start)
            staging.copy(self._part(start, stop), memory)
            np.copyto(self._bytes()[start:stop], mapped)
        _count(self.device, to_host=stop - start)

    def _part(self, start: int, stop: int) -> Any:
        if (start, stop) == (0, self.array.nbytes):
            return self.memory
        return part(self.memory, start, stop - start, self.device)

    def _bytes(self) -> npt.NDArray[np.uint8]:
        flat: npt.NDArray[np.uint8] = self.array.reshape(-1).view(np.uint8)
        return flat


# Copies keep their array alive, so an address means one array as long as its copies are listed.
_copies: weakref.WeakValueDictionary[tuple[str, int, int, bool], DeviceCopy] = (
    weakref.WeakValueDictionary()
)
_residents: weakref.WeakValueDictionary[int, Resident] = weakref.WeakValueDictionary()


def device_copy(array: npt.NDArray[Any], device: Device, constant: bool = False) -> DeviceCopy:
    """Return the copy of an array on a device, the same one to all who ask for it.

    Parameters
    ----------
    array
        C-contiguous, not empty. Kept alive by the copy.
    device
        With memory of its own.
    constant
        Whether nobody changes the array as long as the copy lives.

    Raises
    ------
    DeviceError
        Where the array is part of a :class:`Resident`.
    """
    start, stop = _range(array)
    key = (device.spec, start, stop, constant)
    with _lock:
        copy = _copies.get(key)
        if copy is None or copy.device is not device:
            resident = resident_of(array)
            copy = DeviceCopy(array, device, constant)
            if resident is not None and not constant:
                copy.resident = resident
                resident._copies.append(copy)
            _copies[key] = copy
        return copy


class _Adopted(DeviceCopy):
    """Memory of a device that another library owns: nothing is ever copied."""

    def __init__(self, array: npt.NDArray[Any], device: Device, memory: Any) -> None:
        self.array = array
        self.device = device
        self.memory = memory
        self.constant = False
        self.resident = None
        self.fresh = True

    def prepare(self) -> None:
        """Nothing: the contents are there."""

    def changed(self) -> None:
        """Nothing: whoever owns the memory sees it."""

    def failed(self) -> None:
        """Nothing: whoever owns the memory has what the loop has left."""

    def read(self) -> npt.NDArray[Any]:
        """A copy of the memory, on the host."""
        found = np.empty_like(self.array)
        staging = _staging(self.device)
        with staging.lock:
            memory, mapped = staging.get(found.nbytes)
            staging.copy(self.memory, memory)
            found.view(np.uint8)[...] = mapped
        _count(self.device, to_host=found.nbytes)
        return found


def adopt(
    memory: Any, size: int, dtype: npt.DTypeLike, device: Device
) -> tuple[npt.NDArray[Any], DeviceCopy]:
    """Let loops work on memory that another library has on a device.

    Parameters
    ----------
    memory
        IREE's ``HalBuffer``.
    size
        Number of elements.
    dtype
        Of an element.
    device
        Whose memory it is.

    Returns
    -------
    array : ndarray
        ``[size]``, to describe loops with: loops that are compiled on it for ``device`` work on the
        memory instead. Its own contents are zeros, and stay so.
    copy : DeviceCopy
        To be kept as long as loops use the array.
    """
    array = np.zeros(size, dtype)
    copy = _Adopted(array, device, memory)
    with _lock:
        _copies[(device.spec, *_range(array), False)] = copy
    return array, copy


def latest(array: npt.NDArray[Any], device: Device) -> npt.NDArray[Any]:
    """The contents of an array as loops on a device see them, for reading.

    Raises
    ------
    DeviceError
        As for :attr:`Resident.data_ro`.
    """
    owner = resident_of(array)
    if owner is not None:
        return owner.data_ro
    with _lock:
        copy = _copies.get((device.spec, *_range(array), False))
    return copy.read().reshape(array.shape) if isinstance(copy, _Adopted) else array


def resident_of(array: npt.NDArray[Any]) -> Resident | None:
    """Return who keeps track of an array; None where nobody does.

    Raises
    ------
    DeviceError
        Where someone keeps track of a part of the array, or of more than it.
    """
    if not _residents:
        return None
    start, stop = _range(array)
    for resident in _residents.values():
        first, last = _range(resident.array)
        if (first, last) == (start, stop):
            return resident
        if first < stop and start < last:
            raise DeviceError(
                f"an array of shape {array.shape} shares memory with a resident array of shape "
                f"{resident.array.shape} without being the same; pass the whole array, and "
                "components, stride and offset of the part"
            )
    return None


class Resident:
    """An array whose contents move between the host and devices only where they are stale.

    Make it before loops are compiled on the array, pass ``array`` to
    :class:`~pyop3_mlir.parloop.Argument` as usual, and from then on read and write it through the
    properties of this object, which have the names of PyOP2's::

        u = Resident(np.zeros(n))
        step = engine.compile(Parloop(kernel, cells, [Argument.indirect(u.array, INC, nodes), ...]))
        for _ in range(100):
            step()  # u stays on the device
        print(u.data_ro.max())  # copied back here

    Loops on the CPU take part as well. It has to live as long as the array is in use: what was not
    read before the last reference goes is lost.

    Parameters
    ----------
    array
        C-contiguous.

    Raises
    ------
    DeviceError
        Where the array is not contiguous, or shares memory with another resident array.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        if not array.flags.c_contiguous:
            raise DeviceError("a resident array has to be C-contiguous")
        self._array = array
        self._host_fresh = True
        # since which wait for a device the host's contents are stale
        self._stale_since = (-1, "")
        self._lost: str | None = None
        self._copies: list[DeviceCopy] = []
        with _lock:
            if array.nbytes:
                if resident_of(array) is not None:
                    raise DeviceError("the array is resident already")
                start, stop = _range(array)
                _residents[start] = self
                for key, copy in list(_copies.items()):
                    if key[1:] == (start, stop, False):
                        copy.resident, copy.fresh = self, False
                        self._copies.append(copy)

    @property
    def array(self) -> npt.NDArray[Any]:
        """The array, for describing loops. Its contents may be stale."""
        return self._array

    @property
    def data_ro(self) -> npt.NDArray[Any]:
        """The array with its latest contents, for reading.

        Raises
        ------
        DeviceError
            Where they were on a device that failed.
        """
        self.refresh_host()
        view = self._array.view()
        view.flags.writeable = False
        return view

    @property
    def data(self) -> npt.NDArray[Any]:
        """The array with its latest contents, for reading and writing until the next loop.

        Raises
        ------
        DeviceError
            As for :attr:`data_ro`.
        """
        self.refresh_host()
        self.host_changed()
        return self._array

    @property
    def data_wo(self) -> npt.NDArray[Any]:
        """The array for writing all of it until the next loop: nothing is brought back before."""
        self.host_changed()
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.data_ro, dtype=dtype, copy=copy)

    def to_host(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Bring rows ``[start, stop)`` alone back, such as those that other processes need.

        Returns
        -------
        ndarray
            The rows, for reading.

        Raises
        ------
        DeviceError
            As for :attr:`data_ro`.
        """
        extent = self._bytes(start, stop)
        with _lock:
            if not self._host_fresh and start < stop:
                self._newest().fetch(*extent)
        rows = self._array[start:stop]
        rows.flags.writeable = False
        return rows

    def to_devices(self, start: int, stop: int, values: npt.ArrayLike) -> None:
        """Write rows ``[start, stop)`` alone, such as those that came from other processes.

        Every copy that is up to date, on the host or on a device, stays so.
        """
        extent = self._bytes(start, stop)
        self._array[start:stop] = values
        with _lock:
            for copy in self._copies:
                if copy.fresh and start < stop:
                    copy.send(*extent)

    def _bytes(self, start: int, stop: int) -> tuple[int, int]:
        rows = len(self._array)
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows {start} to {stop} of an array of {rows}")
        width = self._array.nbytes // rows if rows else 0
        return start * width, stop * width

    def _newest(self) -> DeviceCopy:
        if self._lost is not None:
            raise DeviceError(self._lost)
        return next(copy for copy in self._copies if copy.fresh)

    @property
    def host_fresh(self) -> bool:
        """Whether the host has the latest contents."""
        return self._host_fresh

    @property
    def fresh_devices(self) -> tuple[Device, ...]:
        """The devices that have the latest contents."""
        return tuple(copy.device for copy in self._copies if copy.fresh)

    def changed_alike(self, host: bool, devices: Collection[Device]) -> None:
        """Take note that the host's contents and those of devices were changed to the same.

        Parameters
        ----------
        host
            Whether the host's were.
        devices
            Whose copies were.
        """
        with _lock:
            for copy in self._copies:
                copy.fresh = copy.device in devices
            self._host_fresh = host

    def refresh_host(self) -> None:
        """Bring the contents back where the host's are stale; for what runs on the host.

        Raises
        ------
        DeviceError
            As for :attr:`data_ro`.
        """
        if not self._host_fresh:
            with _lock:
                self._newest().fetch(0, self._array.nbytes)
                self._host_fresh = True

    def host_changed(self) -> None:
        """Take note that the host has changed the contents: those of devices are stale."""
        with _lock:
            self._changed_by(None)
            self._lost = None

    def _changed_by(self, by: DeviceCopy | None) -> None:
        """Take note that a device, or the host, has changed the contents."""
        if by is not None and self._host_fresh:
            self._stale_since = by.device.timeline.waits, by.device.spec
        for copy in self._copies:
            copy.fresh = copy is by
        self._host_fresh = by is None

    def _failed_on(self, device: Device) -> None:
        if self._host_fresh or any(copy.fresh for copy in self._copies):
            return
        if self._stale_since == (device.timeline.waits, device.spec):
            # nothing of what would have made them stale has been done
            self._host_fresh = True
        else:
            self._lost = (
                f"the contents of a resident array of shape {self._array.shape} were on {device}, "
                "where a loop failed while it changed them; write to `data_wo` before it is used"
            )

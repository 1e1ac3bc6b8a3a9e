"""Load compiled modules and call them on numpy arrays, in place and with little overhead.

A :class:`Buffer` is an array as a device sees it. On the CPU it *is* the array's memory, whatever
its alignment; on a device with memory of its own it is a copy there, which all loops share
(:mod:`~pyop3_mlir.runtime.residency`). :meth:`Executable.bind` prepares a call once,
:class:`BoundFunction` repeats it: on ``cpu`` that costs a few microseconds.
"""

from __future__ import annotations

import ctypes
import math
import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import iree.runtime as iree
import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import CompilationError, DeviceError
from pyop3_mlir.runtime.devices import Device, explain, vm_instance
from pyop3_mlir.runtime.residency import DeviceCopy, Resident, device_copy, resident_of, zero_device
from pyop3_mlir.runtime.subview import part

__all__ = ["ALIGNMENT", "BoundFunction", "Buffer", "Executable", "aligned_empty"]

ALIGNMENT = 64
"""Bytes. IREE imports host memory that is aligned to this only."""

# programs end while caches of theirs hold loops; IREE's bindings would list that, class by class
iree._binding.disable_leak_checker()

# MLIR's integers have no sign
_TYPES = (
    ("bool", "i1", iree.HalElementType.BOOL_8),
    ("int8", "i8", iree.HalElementType.INT_8),
    ("uint8", "i8", iree.HalElementType.INT_8),
    ("uint16", "i16", iree.HalElementType.INT_16),
    ("int32", "i32", iree.HalElementType.INT_32),
    ("uint32", "i32", iree.HalElementType.INT_32),
    ("int64", "i64", iree.HalElementType.INT_64),
    ("uint64", "i64", iree.HalElementType.INT_64),
    ("float32", "f32", iree.HalElementType.FLOAT_32),
    ("float64", "f64", iree.HalElementType.FLOAT_64),
    ("complex64", "complex<f32>", iree.HalElementType.COMPLEX_64),
    ("complex128", "complex<f64>", iree.HalElementType.COMPLEX_128),
)
_ELEMENT_TYPES = {np.dtype(name): element for name, _, element in _TYPES}
_MLIR_TYPES = {np.dtype(name): mlir for name, mlir, _ in _TYPES}

_HOST_MEMORY = iree.MemoryType.HOST_VISIBLE | iree.MemoryType.DEVICE_LOCAL

_CALLS_KEPT = 64
"""Argument lists that a bound function keeps, one for each range of iterations."""


def aligned_empty(
    shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64
) -> npt.NDArray[Any]:
    """An uninitialised array whose data starts at a multiple of :data:`ALIGNMENT` bytes."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


class Buffer:
    """An array as a device sees it.

    Parameters
    ----------
    array
        C-contiguous, of any shape, of a dtype that MLIR has. Kept alive by the buffer. May be
        read-only if no function writes to it.
    device
        Where to make it usable.
    alignment
        Bytes to which the compiled code expects it to be aligned (on the CPU only). An array that
        is not is copied in and out at each call.
    constant
        Promises that the host does not change the contents, nor reads what the device changes: they
        are copied to the device once, if at all, now.

    Attributes
    ----------
    zero_copy : bool
        Whether the device works on the array's own memory.

    Raises
    ------
    DeviceError
        Where the array is not contiguous, its dtype is unknown, or the device has no room for it.
    """

    __slots__ = (
        "_copy", "_host", "_resident",
        "array", "constant", "device", "dtype", "view", "writeable", "zero_copy",
    )  # fmt: skip

    def __init__(
        self,
        array: npt.NDArray[Any],
        device: Device,
        alignment: int = ALIGNMENT,
        *,
        constant: bool = False,
    ) -> None:
        if not array.flags.c_contiguous:
            raise DeviceError(
                f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous"
            )
        element = _ELEMENT_TYPES.get(array.dtype)
        if element is None:
            raise DeviceError(f"arrays of dtype {array.dtype} cannot be passed to a device")
        self._reset(array, device, array.dtype)
        self.constant = constant
        self.writeable = array.flags.writeable
        try:
            self.view = self._open(element, alignment)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            raise _no_memory(device, array.shape, array.dtype, error) from error

    @classmethod
    def scratch(cls, size: int, dtype: npt.DTypeLike, device: Device) -> Buffer:
        """Zeros for functions of the device to work on; the host neither sees nor changes them.

        Parameters
        ----------
        size
            Number of elements.
        dtype
            Of an element.
        device
            Where to make them.

        Raises
        ------
        DeviceError
            Where there is no room.
        """
        dtype = np.dtype(dtype)
        if device.is_host or not size:
            zeros = aligned_empty(size, dtype)
            zeros[...] = 0
            return cls(zeros, device, constant=True)
        buffer = cls.__new__(cls)
        buffer._reset(None, device, dtype)
        buffer.constant = True
        buffer.writeable = True
        try:
            memory = device.hal.allocator.allocate_buffer(
                iree.MemoryType.DEVICE_LOCAL, iree.BufferUsage.DEFAULT, size * dtype.itemsize
            )
            zero_device(memory, device)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise _no_memory(device, (size,), dtype, error) from error
        buffer.view = iree.HalBufferView(memory, [size], _ELEMENT_TYPES[dtype])
        return buffer

    @classmethod
    def from_dlpack(cls, exporter: Any, device: Device) -> Buffer:
        """Share memory that another library allocated, on the same device.

        Parameters
        ----------
        exporter
            Has ``__dlpack__`` (a CuPy or PyTorch array, ``petsc4py``'s ``Vec``): contiguous and, on
            the CPU, aligned to 64 bytes. Kept alive by the buffer. What its library still has to do
            with the memory must be done before each call.
        device
            The one that the memory belongs to.

        Raises
        ------
        DeviceError
            Where the memory cannot be shared.
        """
        try:
            view = device.hal.from_dlpack_capsule(exporter.__dlpack__())
            dtype = np.dtype(iree.HalElementType.map_to_dtype(view.element_type))
            shared = iree.HalBufferView(view.get_buffer(), view.shape, _ELEMENT_TYPES[dtype])
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, BufferError) as error:
            raise DeviceError(
                f"device {device}: the memory of a {type(exporter).__name__} cannot be shared: "
                f"{error}"
            ) from error
        buffer = cls.__new__(cls)
        buffer._reset(exporter, device, dtype)
        buffer.constant = False
        buffer.writeable = True
        buffer.zero_copy = True
        buffer.view = shared
        return buffer

    def _reset(self, array: Any, device: Device, dtype: np.dtype[Any]) -> None:
        self.array = array
        self.device = device
        self.dtype = dtype
        self.zero_copy = False
        # the aligned copy on the CPU, or the memory of another device
        self._host: npt.NDArray[Any] | None = None
        self._copy: DeviceCopy | None = None
        # who has to know of loops on the CPU
        self._resident: Resident | None = None

    @property
    def in_step(self) -> bool:
        """Whether nothing is to be done before and after calls."""
        return self.constant or (self.zero_copy and self._resident is None)

    def _open(self, element: Any, alignment: int) -> Any:
        array, device = self.array, self.device
        allocator = device.hal.allocator
        if array.nbytes == 0:
            # There is nothing to share, but IREE wants some memory behind the view. GPUs refuse
            # empty buffers altogether: they are given a row that no iteration visits.
            self.zero_copy = True
            shape = array.shape if device.is_host else tuple(max(size, 1) for size in array.shape)
            size = max(math.prod(shape) * array.itemsize, ALIGNMENT)
            kind = _HOST_MEMORY if device.is_host else iree.MemoryType.DEVICE_LOCAL
            memory = allocator.allocate_buffer(kind, iree.BufferUsage.DEFAULT, size)
            return iree.HalBufferView(memory, shape, element)
        if device.is_host:
            self._resident = None if self.constant else resident_of(array)
            if _address(array) % alignment == 0:
                self.zero_copy = True
                return _import(array, device, element)
            self._host = aligned_empty(array.shape, array.dtype)
            np.copyto(self._host, array)
            return _import(self._host, device, element)
        self._copy = device_copy(array, device, self.constant)
        if self.constant:
            self._copy.prepare()
        return iree.HalBufferView(self._copy.memory, array.shape, element)

    def upload(self) -> None:
        """Make the device see the array's contents, before it reads them."""
        if self._resident is not None:
            self._resident.refresh_host()
        if self._host is not None:
            np.copyto(self._host, self.array)
        elif self._copy is not None:
            self._copy.prepare()

    def download(self) -> None:
        """Make the host see what the device has changed, or have it wait until someone looks."""
        if self._host is not None:
            np.copyto(self.array, self._host)
        elif self._copy is not None:
            self._copy.changed()
        if self._resident is not None:
            self._resident.host_changed()

    def abandon(self) -> None:
        """Take note that a function that was to change the contents has failed."""
        if self._copy is not None:
            self._copy.failed()


def _no_memory(
    device: Device, shape: Sequence[int], dtype: np.dtype[Any], error: Exception
) -> DeviceError:
    size = math.prod(shape) * dtype.itemsize
    return DeviceError(
        f"device {device}: an array of shape {tuple(shape)} and dtype {dtype} ({size} bytes) "
        f"cannot be made available: {explain(error)}"
    )


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _import(array: npt.NDArray[Any], device: Device, element: Any) -> Any:
    """A view of the array's own memory for the device, whatever the alignment of that memory.

    IREE imports memory from multiples of 64 bytes on. So what is imported starts there, up to 63
    bytes before the array, and the view is a part of it. Those bytes are in the same page as the
    array's first one, and nobody reads them.
    """
    address = _address(array)
    before = address % ALIGNMENT
    # ctypes, since numpy exports no writable memory of an array that is read-only
    raw = (ctypes.c_char * (before + array.nbytes)).from_address(address - before)
    memory = device.hal.allocator.import_host_allocation(
        raw, _HOST_MEMORY, iree.BufferUsage.DEFAULT | iree.BufferUsage.MAPPING
    )
    if not before:
        return iree.HalBufferView(memory, array.shape, element)
    return iree.HalBufferView(part(memory, before, array.nbytes, device), array.shape, element)


@dataclass(frozen=True)
class _Signature:
    """What a function takes and gives, as IREE wrote it down in the module.

    Attributes
    ----------
    function
        IREE's handle.
    scalars
        Number of integer arguments.
    elements
        MLIR's name of the element type of each tensor argument.
    written
        For each result the number of the tensor argument that it is tied to.
    alignment
        Bytes.
    fenced
        Whether two fences follow the arguments: what to wait for, and what to signal when done.
    """

    function: Any
    scalars: int
    elements: tuple[str, ...]
    written: tuple[int, ...]
    alignment: int
    fenced: bool

    @classmethod
    def of(cls, function: Any, alignment: int | None) -> _Signature:
        reflection = function.reflection
        declaration = reflection.get("iree.abi.declaration", "")
        arguments, _, results = declaration.partition(" -> ")
        elements: list[str] = []
        scalars = 0
        tied = {}
        for type_, attributes in re.findall(
            r"%input\d+: (\S+?)(?: {([^}]*)})?(?:, |\)$)", arguments
        ):
            found = re.fullmatch(r"tensor<(?:[?\d]+x)*(.*)>", type_)
            if found is None:
                scalars += 1
                continue
            result = re.search(r"iree\.abi\.output = (\d+)", attributes)
            if result is not None:
                tied[int(result[1])] = len(elements)
            elements.append(found[1])
        count = results.count("%output")
        if sorted(tied) != list(range(count)):
            raise CompilationError(
                f"function {function.name}: not every result is tied to an argument: {declaration}"
            )
        if alignment is None:
            alignment = int(reflection.get("alignment", ALIGNMENT))
        written = tuple(tied[result] for result in range(count))
        fenced = reflection.get("iree.abi.model") == "coarse-fences"
        return cls(function, scalars, tuple(elements), written, alignment, fenced)

    def check(self, position: int, buffer: Buffer) -> None:
        """Raise unless the buffer suits the argument."""
        expected, given = self.elements[position], _MLIR_TYPES[buffer.dtype]
        if expected != given:
            raise DeviceError(
                f"the function takes elements of type {expected}, the array has "
                f"dtype {buffer.dtype}"
            )
        if position in self.written and not buffer.writeable:
            raise DeviceError("the function writes to it, but the array is read-only")


class Executable:
    """A compiled module, loaded on a device.

    Parameters
    ----------
    vmfb
        From :func:`~pyop3_mlir.runtime.compile.compile_module`, for the same target.
    device
        Where to run it.
    name
        Of the loop, for messages.
    alignment
        Bytes to which the module's code expects its buffers to be aligned: what it gave to
        ``hal.interface.binding.subspan``, or 64 where IREE generated the code. Where not given, the
        module says it itself (``iree.reflection = {alignment = "8"}`` on a function), else 64.

    Raises
    ------
    DeviceError
        Where the module does not suit the device.
    """

    def __init__(
        self, vmfb: bytes, device: Device, *, name: str = "loop", alignment: int | None = None
    ) -> None:
        self.device = device
        self.name = name
        self._alignment = alignment
        self._signatures: dict[str, _Signature] = {}
        # contexts are not thread safe
        self._lock = threading.Lock()
        try:
            self._module = iree.VmModule.copy_buffer(vm_instance(), vmfb)
            self._context = iree.VmContext(vm_instance(), modules=[device.hal_module, self._module])
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"loop {name}: the compiled module cannot be loaded on {device}: {explain(error)}"
            ) from error

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions that can be bound."""
        return tuple(name for name in self._module.function_names if not name.startswith("__"))

    def signature(self, function: str) -> _Signature:
        """What a function takes and gives."""
        found = self._signatures.get(function)
        if found is None:
            handle = self._module.lookup_function(function)
            if handle is None:
                raise DeviceError(
                    f"loop {self.name}: no function {function}, there are "
                    f"{', '.join(self.functions)}"
                )
            found = self._signatures[function] = _Signature.of(handle, self._alignment)
        return found

    def bind(
        self,
        function: str,
        arrays: Sequence[npt.NDArray[Any] | Buffer],
        constant: Collection[int] = (),
    ) -> BoundFunction:
        """Prepare calls of a function on these arrays.

        Parameters
        ----------
        function
            Its arguments are 64-bit integers first and then one tensor for each of ``arrays``; its
            results are the tensors that it changes, each tied to its argument by
            ``iree.abi.output``.
        arrays
            Buffers are shared (a table that several loops use is then on a GPU once).
        constant
            Positions in ``arrays`` of those that nobody changes as long as they are bound.

        Raises
        ------
        DeviceError
            Where there is no such function, an array cannot be passed to the device or is of
            another dtype than the function takes, or is read-only but written to.
        """
        signature = self.signature(function)
        if len(arrays) != len(signature.elements):
            raise DeviceError(
                f"loop {self.name}: {function} takes {len(signature.elements)} arrays, "
                f"{len(arrays)} were given"
            )
        buffers = []
        for position, array in enumerate(arrays):
            try:
                buffer = (
                    array
                    if isinstance(array, Buffer)
                    else Buffer(
                        array, self.device, signature.alignment, constant=position in constant
                    )
                )
                signature.check(position, buffer)
            except DeviceError as error:
                raise DeviceError(f"loop {self.name}, operand {position}: {error}") from error
            buffers.append(buffer)
        return BoundFunction(self, signature, buffers)


class BoundFunction:
    """A function of an :class:`Executable` with its arrays; see :meth:`Executable.bind`.

    Calling it with the integer arguments copies what is not shared in, runs the function and copies
    what it changed back. :meth:`invoke` runs it only, and :meth:`submit` does not even wait for it
    where the device works on its own.
    """

    def __init__(
        self, executable: Executable, signature: _Signature, buffers: list[Buffer]
    ) -> None:
        self.executable = executable
        self.buffers = tuple(buffers)
        self._function = signature.function
        self._scalars = signature.scalars
        self._fenced = signature.fenced
        self._written = signature.written
        self._refs = [buffer.view.ref for buffer in buffers]
        self._incoming = tuple(b for b in buffers if not b.in_step)
        outgoing = (buffers[i] for i in self._written)
        self._outgoing = tuple(b for b in outgoing if not b.in_step)
        self._arguments: dict[tuple[int, ...], Any] = {}

    @property
    def zero_copy(self) -> bool:
        """Whether calls copy nothing."""
        return not (self._incoming or self._outgoing)

    def __call__(self, *integers: int) -> None:
        """Upload, invoke, download.

        Raises
        ------
        DeviceError
            Where the function fails or the arrays do not have the types that it takes.
        """
        self.launch(*integers)
        self.wait()

    def launch(self, *integers: int) -> None:
        """Upload, submit, and download what has to be; nothing else waits for the device.

        Raises
        ------
        DeviceError
            As for a call, but for what fails only while the device works: see :meth:`wait`.
        """
        self.upload()
        self.submit(*integers)
        self.download()

    def upload(self) -> None:
        """Copy in what is not shared with the device."""
        try:
            for buffer in self._incoming:
                buffer.upload()
        except RuntimeError as error:
            self._failed(error)

    def download(self) -> None:
        """Copy back what the function changes and the device does not share."""
        try:
            for buffer in self._outgoing:
                buffer.download()
        except RuntimeError as error:
            self._failed(error)

    def invoke(self, *integers: int) -> None:
        """Run the function on what is on the device and wait for it.

        Raises
        ------
        DeviceError
            Where the function fails.
        """
        self.submit(*integers)
        self.wait()

    def submit(self, *integers: int) -> None:
        """Run the function after all that was submitted before, without waiting for it on a GPU.

        Raises
        ------
        DeviceError
            Where it cannot be submitted; on the CPU, where it fails.
        """
        executable = self.executable
        try:
            if not self._fenced:
                arguments = self._arguments.get(integers)
                if arguments is None:
                    arguments = self._prepare(integers)
                with executable._lock:
                    executable._context.invoke(self._function, arguments, iree.VmVariantList(1))
                return
            arguments = self._list(integers, 2)
            with executable.device.timeline.step() as fences, executable._lock:
                for fence in fences:
                    arguments.push_ref(fence.ref)
                executable._context.invoke(self._function, arguments, iree.VmVariantList(1))
        except (RuntimeError, ValueError, IndexError) as error:
            self._failed(error)

    def wait(self, *others: BoundFunction) -> None:
        """Wait for all that was submitted to the device.

        Parameters
        ----------
        others
            Other functions that were submitted since the last wait.

        Raises
        ------
        DeviceError
            Where some of it failed.
        """
        if self._fenced:
            try:
                self.executable.device.timeline.wait()
            except (RuntimeError, ValueError, IndexError) as error:
                self._failed(error, *others)

    def _failed(self, error: Exception, *others: BoundFunction) -> NoReturn:
        for function in (self, *others):
            for buffer in function._outgoing:
                buffer.abandon()
        executable = self.executable
        raise DeviceError(
            f"loop {executable.name}: call on {executable.device} failed: {explain(error)}"
        ) from error

    def _list(self, integers: tuple[int, ...], more: int = 0) -> Any:
        if len(integers) != self._scalars:
            raise DeviceError(
                f"loop {self.executable.name}: the function takes {self._scalars} integers, "
                f"{len(integers)} were given"
            )
        arguments = iree.VmVariantList(len(integers) + len(self._refs) + more)
        for integer in integers:
            arguments.push_int(integer)
        for ref in self._refs:
            arguments.push_ref(ref)
        return arguments

    def _prepare(self, integers: tuple[int, ...]) -> Any:
        arguments = self._list(integers)
        if len(self._arguments) >= _CALLS_KEPT:
            self._arguments.clear()
        self._arguments[integers] = arguments
        return arguments

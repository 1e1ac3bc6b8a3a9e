"""Loops on PETSc's memory on a device: vectors of type cuda and hip, matrices by COO.

PETSc keeps two copies of such a vector and a mask that says which is fresh. :class:`VecMemory`
lets loops work on the copy that is where they run: PETSc brings it up to date first if it is
stale, and knows afterwards that the other one is (``VecGetArrayAndMemType`` and its restoring, as
petsc4py's ``getCUDAHandle``, ``getHIPHandle`` and ``toDLPack`` do it). :class:`CooMatrix` gets the
entries of a matrix from a loop and hands them over by ``MatSetValuesCOO``, which takes values from
the device. Vectors and matrices on the host go the same way, on the host.

Sources: PETSc 3.26, src/vec/vec/interface/rvector.c, include/petsc/private/veccupmimpl.h,
src/mat/impls/aij/seq/cupm/aijcupm.hpp, manual pages of MatSetPreallocationCOO and MatSetValuesCOO.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import DeviceError, UnsupportedLoopError
from pyop3_mlir.frontends.petsc import library
from pyop3_mlir.parloop import READ, WRITE, Access, Argument, IndexTable
from pyop3_mlir.runtime.devices import Device
from pyop3_mlir.runtime.executable import Buffer, aligned_empty
from pyop3_mlir.runtime.residency import adopt, zero_device

__all__ = [
    "CooMatrix",
    "CooPlan",
    "VecMemory",
    "kind_of_matrix",
    "kind_of_vector",
    "obstacle",
    "plan_coo",
    "wait_for_petsc",
]

Array = npt.NDArray[Any]

_MEMORY = {0: "cpu", 1: "cuda", 17: "cuda", 3: "hip"}
"""Our kinds of devices by ``PetscMemType``; 17 is NVSHMEM's."""

_DLPACK = {"cpu": 1, "cuda": 2, "hip": 10}
"""DLPack's numbers of the kinds of memory. Source: dlpack.h, DLDeviceType."""


# -- what PETSc has -------------------------------------------------------------------------------


def kind_of_vector(vec: Any) -> str:
    """Where PETSc works on a vector, by its type: ``cuda``, ``hip`` or ``cpu``."""
    return _kind(vec.getType(), {"cuda": "cuda", "hip": "hip"})


def kind_of_matrix(mat: Any) -> str:
    """Where PETSc works on a matrix, by its type: ``cuda``, ``hip`` or ``cpu``."""
    return _kind(mat.getType(), {"cusparse": "cuda", "hipsparse": "hip"})


def _kind(type_: str, endings: dict[str, str]) -> str:
    return next((kind for end, kind in endings.items() if type_.endswith(end)), "cpu")


@cache
def obstacle(kind: str) -> str | None:
    """Why PETSc has no memory on a kind of device here; None where it has.

    Parameters
    ----------
    kind
        ``cpu``, ``cuda``, ``hip`` or ``vulkan``.
    """
    if kind == "cpu":
        return None
    if kind not in _DLPACK:
        return f"PETSc has no vectors on {kind} devices"
    try:
        from petsc4py import PETSc
    except ImportError:
        return "petsc4py is not installed"
    if not PETSc.Sys.hasExternalPackage(kind):
        return f"PETSc was built without {kind} (configure it --with-{kind})"
    handles = f"get{kind.upper()}Handle"
    if not hasattr(PETSc.Vec, handles):
        return f"petsc4py {'.'.join(map(str, PETSc.Sys.getVersion()))} lacks Vec.{handles}"
    return None


@cache
def _petsc() -> ctypes.CDLL:
    """The library, with the functions of this module declared."""
    found = library()
    pointer = ctypes.POINTER(ctypes.c_void_p)
    for mode in ("", "Read", "Write"):
        function = getattr(found, f"VecGetArray{mode}AndMemType")
        function.argtypes = [ctypes.c_void_p, pointer, ctypes.POINTER(ctypes.c_int)]
        function = getattr(found, f"VecRestoreArray{mode}AndMemType")
        function.argtypes = [ctypes.c_void_p, pointer]
    found.MatSetValuesCOO.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    found.PetscDeviceContextGetCurrentContext.argtypes = [pointer]
    found.PetscDeviceContextGetStreamHandle.argtypes = [ctypes.c_void_p, pointer]
    return found


def _check(code: int, what: str) -> None:
    if code:
        raise DeviceError(f"PETSc error {code} in {what}")


# -- order ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Events:
    """The driver's functions for events, by the names of CUDA or HIP."""

    create: Any
    record: Any
    wait: Any
    destroy: Any


@cache
def _events(kind: str) -> _Events:
    names = {
        "cuda": (
            "cuda",
            "cuEventCreate",
            "cuEventRecord",
            "cuEventSynchronize",
            "cuEventDestroy_v2",
        ),
        "hip": (
            "amdhip64",
            "hipEventCreateWithFlags",
            "hipEventRecord",
            "hipEventSynchronize",
            "hipEventDestroy",
        ),
    }[kind]
    name, *functions = names
    driver = ctypes.CDLL(ctypes.util.find_library(name) or f"lib{name}.so.1")
    found = [getattr(driver, function) for function in functions]
    pointer = ctypes.c_void_p
    create, record, wait, destroy = found
    create.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
    record.argtypes = [pointer, pointer]
    wait.argtypes = destroy.argtypes = [pointer]
    return _Events(create, record, wait, destroy)


# cudaEventDisableTiming and hipEventDisableTiming
_NO_TIMING = 2


def wait_for_petsc(device: Device) -> None:
    """Wait until PETSc has done on its stream what it was told so far, and for nothing else.

    An event is recorded there and waited for: IREE 3.13 cannot wait for the event on its own
    stream ("timepoint import is not yet implemented" for CUDA). The other way round nothing is
    needed, since a loop's call returns when IREE's stream has signalled that it is done.

    Raises
    ------
    DeviceError
        Where the driver or PETSc fails.
    """
    kind = device.spec.partition(":")[0]
    if kind not in ("cuda", "hip"):
        return
    events = _events(kind)
    context, stream, event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    petsc = _petsc()
    _check(petsc.PetscDeviceContextGetCurrentContext(ctypes.byref(context)), "GetCurrentContext")
    _check(petsc.PetscDeviceContextGetStreamHandle(context, ctypes.byref(stream)), "GetStream")
    # the handle is the address of the stream
    handle = ctypes.c_void_p.from_address(stream.value or 0) if stream.value else stream
    failed = events.create(ctypes.byref(event), _NO_TIMING)
    if not failed:
        try:
            failed = events.record(event, handle) or events.wait(event)
        finally:
            events.destroy(event)
    if failed:
        raise DeviceError(f"device {device}: PETSc's stream cannot be waited for (error {failed})")


# -- memory ---------------------------------------------------------------------------------------


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_new.restype = ctypes.py_object
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p

# DLPack's codes of types, by numpy's
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5}


class _Exporter:
    """Memory at an address, as DLPack describes it; whoever imports it does not own it."""

    def __init__(self, address: int, size: int, dtype: np.dtype[Any], device: Device) -> None:
        kind, _, number = device.spec.partition(":")
        self._shape = (ctypes.c_int64 * 1)(size)
        self._strides = (ctypes.c_int64 * 1)(1)
        self._managed = _DLManagedTensor(
            _DLTensor(
                address,
                _DLDevice(_DLPACK[kind], 0 if kind == "cpu" else int(number or 0)),
                1,
                _CODES[dtype.kind],
                dtype.itemsize * 8,
                1,
                self._shape,
                self._strides,
                0,
            ),
            None,
            None,
        )

    def __dlpack__(self) -> Any:
        return _capsule_new(ctypes.addressof(self._managed), b"dltensor", None)


def _address_of(view: Any, device: Device) -> int:
    """Where the memory of a view of IREE's begins, on its device."""
    kind, _, number = device.spec.partition(":")
    capsule = device.hal.create_dlpack_capsule(
        view, _DLPACK[kind], 0 if kind == "cpu" else int(number or 0)
    )
    pointer = _capsule_pointer(capsule, b"dltensor")
    tensor = _DLManagedTensor.from_address(pointer).tensor
    return int(tensor.data or 0) + int(tensor.byte_offset)


def _scalar() -> np.dtype[Any]:
    from petsc4py import PETSc

    return np.dtype(PETSc.ScalarType)


class VecMemory:
    """What a process has of a vector, where PETSc works on it.

    Parameters
    ----------
    vec
        A ``petsc4py.PETSc.Vec``. Of type seqcuda, mpicuda, seqhip or mpihip it is for loops on such
        a device; of type seq or mpi, for loops on the host.
    device
        Where the loops run.

    Attributes
    ----------
    array
        ``[local size]``, to describe loops with (:class:`~pyop3_mlir.parloop.Argument`). On the
        host, PETSc's own memory. For a device a stand-in, which nobody may look into.

    Raises
    ------
    UnsupportedLoopError
        Where the vector is not on the device.
    DeviceError
        Where the memory cannot be shared.
    """

    def __init__(self, vec: Any, device: Device) -> None:
        kind, number = _place(device)
        _require(f"a vector of type {vec.getType()}", kind_of_vector(vec), device)
        self.vec = vec
        self.device = device
        self.size = int(vec.getLocalSize())
        self._keep: tuple[Any, ...] = ()
        self._modes: list[tuple[str, ctypes.c_void_p]] = []
        with self.using(READ):
            address, memory = self._address, self._memory
        if memory != kind:
            # PETSc may have been told to keep it on the host (bindToCPU)
            raise UnsupportedLoopError(
                f"PETSc works on a vector of type {vec.getType()} on {memory}"
            )
        if kind != "cpu" and vec.__dlpack_device__()[1] != number:
            raise UnsupportedLoopError(
                f"a vector of type {vec.getType()} is on {kind}:{vec.__dlpack_device__()[1]}, the "
                f"loop runs on {device}"
            )
        self.array = self._open(address)

    def _open(self, address: int) -> Array:
        dtype = _scalar()
        if self.device.is_host or not self.size:
            if not self.size:
                return np.zeros(0, dtype)
            memory: Any = (ctypes.c_char * (self.size * dtype.itemsize)).from_address(address)
            return np.frombuffer(memory, dtype)
        exporter = _Exporter(address, self.size, dtype, self.device)
        shared = Buffer.from_dlpack(exporter, self.device)
        array, copy = adopt(shared.view.get_buffer(), self.size, dtype, self.device)
        self._keep = exporter, shared, copy
        return array

    def acquire(self, access: Access) -> None:
        """Make PETSc bring the memory up to date, or note that all of it will be written.

        What PETSc has still to do to it is waited for. :meth:`release` ends it; until then PETSc
        may not use the vector.

        Parameters
        ----------
        access
            READ leaves the copy on the host as fresh as it is. WRITE is for loops that write every
            entry, since nothing is brought up to date.

        Raises
        ------
        DeviceError
            Where PETSc refuses: the vector is locked for reading, or in use.
        """
        mode = {READ: "Read", WRITE: "Write"}.get(access, "")
        pointer, memory = ctypes.c_void_p(), ctypes.c_int(-1)
        _check(
            getattr(_petsc(), f"VecGetArray{mode}AndMemType")(
                self.vec.handle, ctypes.byref(pointer), ctypes.byref(memory)
            ),
            f"VecGetArray{mode}AndMemType",
        )
        self._modes.append((mode, pointer))
        self._address = pointer.value or 0
        self._memory = _MEMORY.get(memory.value, f"memory of type {memory.value}")
        wait_for_petsc(self.device)

    def release(self) -> None:
        """Tell PETSc what has been done: where it was written, the copy on the host is stale now.

        The vector's state changes, as PETSc's caches of norms and factors want it.
        """
        mode, pointer = self._modes.pop()
        _check(
            getattr(_petsc(), f"VecRestoreArray{mode}AndMemType")(
                self.vec.handle, ctypes.byref(pointer)
            ),
            f"VecRestoreArray{mode}AndMemType",
        )

    @contextmanager
    def using(self, access: Access) -> Iterator[None]:
        """Run loops inside; see :meth:`acquire`."""
        self.acquire(access)
        try:
            yield
        finally:
            self.release()

    def current(self) -> bool:
        """Whether the memory is still where it was when this object was made."""
        address = self._address
        with self.using(READ):
            moved = self._address != address
        self._address = address
        return not moved


def _place(device: Device) -> tuple[str, int]:
    """Kind and number of a device; the threads of a CPU are no number."""
    kind, _, number = device.spec.partition(":")
    return kind, 0 if kind == "cpu" else int(number or 0)


def _require(what: str, found: str, device: Device) -> None:
    """Raise unless ``what`` is on the kind of device that a loop runs on."""
    kind, _ = _place(device)
    if found != kind:
        reason = obstacle(kind)
        raise UnsupportedLoopError(
            f"{what} is on {found}, the loop runs on {device}" + (f"; {reason}" if reason else "")
        )


# -- matrices -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CooPlan:
    """The entries that loops give to a matrix, each once.

    Attributes
    ----------
    rows, cols
        Global numbers, sorted by rows and then columns, of PETSc's type of integers.
    """

    rows: Array
    cols: Array

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(self.rows.size)


def plan_coo(
    tables: Sequence[tuple[Array, Array]], known: CooPlan | None = None
) -> tuple[CooPlan, list[IndexTable]]:
    """Number the entries that loops give to a matrix, whatever processes own their rows.

    Parameters
    ----------
    tables
        For each loop its rows ``[n, r]`` and columns ``[n, c]``, global numbers. What has a
        negative row or column, as boundary conditions leave it, is dropped.
    known
        Entries that are to be there in any case.

    Returns
    -------
    plan : CooPlan
        For :meth:`PETSc.Mat.setPreallocationCOO`.
    positions : list of IndexTable
        For each loop ``[n, r * c]``, where the entries of its element matrices lie among those of
        the plan; negative where dropped.
    """
    from petsc4py import PETSc

    entries = [known] if known is not None else []
    pairs = [(np.asarray(k.rows, np.int64), np.asarray(k.cols, np.int64)) for k in entries]
    shapes, kept = [], []
    for rows, cols in tables:
        shape = (len(rows), rows.shape[1], cols.shape[1])
        i = np.broadcast_to(np.asarray(rows, np.int64)[:, :, None], shape).reshape(-1)
        j = np.broadcast_to(np.asarray(cols, np.int64)[:, None, :], shape).reshape(-1)
        inside = (i >= 0) & (j >= 0)
        shapes.append(shape)
        kept.append(inside)
        pairs.append((i[inside], j[inside]))
    all_i = np.concatenate([i for i, _ in pairs]) if pairs else np.zeros(0, np.int64)
    all_j = np.concatenate([j for _, j in pairs]) if pairs else np.zeros(0, np.int64)
    width = int(all_j.max(initial=0)) + 1
    # one number for each entry, in the order of rows and then columns
    keys, inverse = np.unique(all_i * width + all_j, return_inverse=True)
    plan = CooPlan((keys // width).astype(PETSc.IntType), (keys % width).astype(PETSc.IntType))
    positions = []
    start = len(pairs[0][0]) if known is not None else 0
    for shape, inside in zip(shapes, kept, strict=True):
        count = int(inside.sum())
        found = np.full(inside.shape, -1, np.int64)
        found[inside] = inverse[start : start + count]
        start += count
        if plan.size <= np.iinfo(np.int32).max:
            found = found.astype(np.int32)
        table = found.reshape(shape[0], shape[1] * shape[2])
        positions.append(IndexTable(table, plan.size, allow_negative=True, name="COO"))
    return plan, positions


class CooMatrix:
    """A matrix that loops give their entries to, on a device or on the host.

    The pattern is made once, from the index tables of the loops. Then each assembly is::

        matrix.open()
        for loop in loops: loop()        # each adds to ``matrix.array``
        matrix.close()                   # MatSetValuesCOO, values on the device

    Parameters
    ----------
    mat
        A ``petsc4py.PETSc.Mat`` with sizes and type, AIJ or one of its types for devices
        (aijcusparse, aijhipsparse). Its pattern is replaced, its entries are zero.
    tables
        As for :func:`plan_coo`.
    device
        Where the loops run.
    known
        Entries that are to be in the pattern whatever the loops give.

    Attributes
    ----------
    array
        ``[entries]``, to describe loops with; on a device a stand-in.
    positions
        For each loop where its element matrices go.

    Raises
    ------
    UnsupportedLoopError
        Where the matrix is not on the device, or of a type without COO assembly.
    """

    def __init__(
        self,
        mat: Any,
        tables: Sequence[tuple[Array, Array]],
        device: Device,
        known: CooPlan | None = None,
    ) -> None:
        _require(f"a matrix of type {mat.getType()}", kind_of_matrix(mat), device)
        if "aij" not in mat.getType() or "baij" in mat.getType():
            raise UnsupportedLoopError(f"a matrix of type {mat.getType()} has no COO assembly")
        self.mat = mat
        self.device = device
        self.plan, self.positions = plan_coo(tables, known)
        # PETSc sorts its arguments in place
        mat.setPreallocationCOO(self.plan.rows.copy(), self.plan.cols.copy())
        self.array, self._memory, self._pointer, self._keep = _values(self.plan.size, device)

    def argument(self, number: int, rows: IndexTable, name: str = "matrix") -> Argument:
        """The argument of loop ``number`` that adds its element matrices.

        Parameters
        ----------
        number
            Of the loop, as in ``tables``.
        rows
            The table of its rows, with as many columns.
        """
        from pyop3_mlir.parloop import INC

        return Argument.matrix(self.array, INC, self.positions[number], rows, name=name)

    def open(self) -> None:
        """Set all values to zero, where they are."""
        if self._memory is None:
            self.array[...] = 0
        else:
            zero_device(self._memory, self.device)

    def close(self, *, insert: bool = False) -> None:
        """Give PETSc the values. Collective: entries of other processes' rows are sent there.

        Parameters
        ----------
        insert
            Whether they replace what the matrix holds, else they are added to it.

        Raises
        ------
        DeviceError
            Where PETSc fails.
        """
        from petsc4py import PETSc

        mode = PETSc.InsertMode.INSERT_VALUES if insert else PETSc.InsertMode.ADD_VALUES
        _check(
            _petsc().MatSetValuesCOO(self.mat.handle, self._pointer, int(mode)), "MatSetValuesCOO"
        )
        # on a device PETSc has only been told to add; the values may not change before it has
        wait_for_petsc(self.device)


def _values(size: int, device: Device) -> tuple[Array, Any, int, tuple[Any, ...]]:
    """Memory for values: array for loops, IREE's buffer if on a device, address, what to keep."""
    dtype = _scalar()
    if device.is_host:
        array = aligned_empty(max(size, 1), dtype)[:size]
        return array, None, int(array.ctypes.data), ()
    scratch = Buffer.scratch(max(size, 1), dtype, device)
    memory = scratch.view.get_buffer()
    array, copy = adopt(memory, size, dtype, device)
    return array, memory, _address_of(scratch.view, device), (scratch, copy)

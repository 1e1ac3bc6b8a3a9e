"""What the front ends need of PETSc and petsc4py does not offer: matrices' values in place.

petsc4py copies values out and in. The C functions are called in the library that petsc4py has
loaded already.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError

__all__ = ["BATCH", "DistributedValues", "MatrixValues", "library", "nonzero_state"]

BATCH = 1 << 22
"""Scalars of the element matrices that are computed before PETSc gets them."""


@cache
def library() -> ctypes.CDLL:
    """The PETSc library that petsc4py uses."""
    from petsc4py import PETSc

    found = ctypes.CDLL(PETSc.__file__)  # finds the symbols of what it is linked with
    for name in (
        "MatSeqAIJGetArray",
        "MatSeqAIJRestoreArray",
        "MatSeqBAIJGetArray",
        "MatSeqBAIJRestoreArray",
    ):
        function = getattr(found, name)
        function.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
        function.restype = ctypes.c_int
    pointer = ctypes.POINTER(ctypes.c_void_p)
    found.MatMPIAIJGetSeqAIJ.argtypes = [ctypes.c_void_p, pointer, pointer, pointer]
    found.MatMPIAIJGetSeqAIJ.restype = ctypes.c_int
    for name in ("MatGetRowIJ", "MatRestoreRowIJ"):
        function = getattr(found, name)
        # matrix, shift, symmetric, compressed, rows, row pointers, columns, done
        function.argtypes = [
            ctypes.c_void_p,
            _integer(),
            ctypes.c_int,
            ctypes.c_int,
            *[pointer] * 4,
        ]
        function.restype = ctypes.c_int
    found.MatGetNonzeroState.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)]
    found.MatGetNonzeroState.restype = ctypes.c_int
    return found


def _check(code: int, what: str) -> None:
    if code:
        raise UnsupportedLoopError(f"PETSc error {code} in {what}")


def nonzero_state(mat: Any) -> int:
    """A number that changes when the pattern of a matrix changes."""
    state = ctypes.c_int64()
    _check(library().MatGetNonzeroState(mat.handle, ctypes.byref(state)), "MatGetNonzeroState")
    return state.value


class MatrixValues:
    """The values of a sequential matrix, in PETSc's own memory.

    Parameters
    ----------
    mat
        A ``petsc4py.PETSc.Mat`` of type seqaij, seqbaij or seqdense.

    Attributes
    ----------
    array
        Flat view of the values: of AIJ by rows, of BAIJ block by block and each block by columns,
        of a dense matrix by columns.
    pattern
        Row pointers and columns (of blocks for BAIJ); None for a dense matrix.
    block_size
        Of BAIJ, else 1.

    Raises
    ------
    UnsupportedLoopError
        For any other type.
    """

    def __init__(self, mat: Any) -> None:
        self.mat = mat
        self.type = mat.getType()
        self.block_size = 1
        self.pattern: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None
        if self.type == "seqdense":
            dense = mat.getDenseArray()
            self.array = dense.reshape(-1, order="F")
            if not np.shares_memory(self.array, dense) and dense.size:
                raise UnsupportedLoopError("a dense matrix with a leading dimension of its own")
            return
        prefix = {"seqaij": "MatSeqAIJ", "seqbaij": "MatSeqBAIJ"}.get(self.type)
        if prefix is None:
            raise UnsupportedLoopError(f"matrices of type {self.type} are assembled by PyOP2")
        self._get = getattr(library(), f"{prefix}GetArray")
        self._restore = getattr(library(), f"{prefix}RestoreArray")
        if self.type == "seqbaij":
            self.block_size = mat.getBlockSize()
        # without compression, and of blocks where the matrix stores blocks
        self.pattern = mat.getRowIJ(symmetric=False, compressed=self.type == "seqbaij")
        size = len(self.pattern[1]) * self.block_size**2
        self._address = self._open()
        self._close()
        self.array = np.zeros(0, _scalar())
        if size:
            memory: Any = (ctypes.c_char * (size * _scalar().itemsize)).from_address(self._address)
            self.array = np.frombuffer(memory, dtype=_scalar())

    def _open(self) -> int:
        pointer = ctypes.c_void_p()
        _check(self._get(self.mat.handle, ctypes.byref(pointer)), "GetArray")
        return pointer.value or 0

    def _close(self) -> None:
        pointer = ctypes.c_void_p()
        _check(self._restore(self.mat.handle, ctypes.byref(pointer)), "RestoreArray")

    def current(self) -> bool:
        """Whether the values still lie where ``array`` points."""
        if self.type == "seqdense":
            return True
        pointer = ctypes.c_void_p()
        self._get(self.mat.handle, ctypes.byref(pointer))
        return (pointer.value or 0) == self._address

    def changed(self) -> None:
        """Tell PETSc that the values have changed (norms, factors and devices depend on it)."""
        self.mat.stateIncrease()


@cache
def _scalar() -> np.dtype[Any]:
    from petsc4py import PETSc

    return np.dtype(PETSc.ScalarType)


@cache
def _integer() -> type[ctypes.c_int32] | type[ctypes.c_int64]:
    from petsc4py import PETSc

    return ctypes.c_int64 if np.dtype(PETSc.IntType).itemsize == 8 else ctypes.c_int32


class DistributedValues:
    """The values of this process's rows of a distributed AIJ matrix, in PETSc's own memory.

    PETSc keeps the columns that this process owns in one sequential matrix and the others, which
    are numbered anew, in a second one (``MatMPIAIJGetSeqAIJ``).

    Parameters
    ----------
    mat
        A ``petsc4py.PETSc.Mat`` of type mpiaij, assembled once.

    Attributes
    ----------
    arrays
        Flat views of the values of the two parts.
    indptr, indices
        Pattern of both together, row by row: columns of the first part, then those of the second,
        which go on counting.
    storage
        For each entry of that pattern its place in the first array, or that in the second plus the
        size of the first.
    others
        Global columns of the second part, ascending.

    Raises
    ------
    UnsupportedLoopError
        Where PETSc does not give its parts away.
    """

    def __init__(self, mat: Any) -> None:
        self.mat = mat
        self._handle = mat.handle
        # asked for at each call of a loop, so they are made once
        self._pointers = [ctypes.c_void_p() for _ in range(5)]
        self._parts = self._find_parts()
        patterns = [_row_pattern(part) for part in self._parts[:2]]
        self._addresses = self._find_addresses()
        sizes = [int(indptr[-1]) for indptr, _ in patterns]
        self.arrays = tuple(
            _memory(address, size, _scalar())
            for address, size in zip(self._addresses, sizes, strict=True)
        )
        count = int(patterns[1][1].max(initial=-1)) + 1
        if count and not self._parts[2]:
            raise UnsupportedLoopError("a distributed matrix that has not been assembled")
        self.others = _memory(self._parts[2], count, np.dtype(_integer())).copy()
        start, stop = mat.getOwnershipRangeColumn()
        rows = len(patterns[0][0]) - 1
        lengths = [np.diff(indptr) for indptr, _ in patterns]
        owner = np.concatenate([np.repeat(np.arange(rows), length) for length in lengths])
        # stable: in each row the first part stays before the second
        self.storage = np.argsort(owner, kind="stable")
        columns = np.concatenate([patterns[0][1], patterns[1][1] + (stop - start)])
        self.indices = columns[self.storage]
        self.indptr = patterns[0][0].astype(np.int64) + patterns[1][0]

    @property
    def size(self) -> int:
        """Number of values of both parts."""
        return int(self.storage.size)

    def local_columns(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Columns as the pattern numbers them, of global ones; negative ones stay.

        What is not in the pattern at all gets a number behind all others.
        """
        start, stop = self.mat.getOwnershipRangeColumn()
        found = np.searchsorted(self.others, columns)
        known = np.append(self.others, -2)[found] == columns
        behind = (stop - start) + len(self.others)
        local = np.where(known, found + (stop - start), behind)
        local = np.where((columns >= start) & (columns < stop), columns - start, local)
        return np.where(columns < 0, -1, local).astype(np.int64)

    def _find_parts(self) -> tuple[int, int, int]:
        first, second, columns = self._pointers[:3]
        _check(
            library().MatMPIAIJGetSeqAIJ(
                self._handle, ctypes.byref(first), ctypes.byref(second), ctypes.byref(columns)
            ),
            "MatMPIAIJGetSeqAIJ",
        )
        return first.value or 0, second.value or 0, columns.value or 0

    def _find_addresses(self) -> tuple[int, int]:
        get = library().MatSeqAIJGetArray
        first, second = self._pointers[3:]
        _check(get(self._parts[0], ctypes.byref(first)), "MatSeqAIJGetArray")
        _check(get(self._parts[1], ctypes.byref(second)), "MatSeqAIJGetArray")
        return first.value or 0, second.value or 0

    def current(self) -> bool:
        """Whether the values still lie where ``arrays`` point."""
        return self._find_parts() == self._parts and self._find_addresses() == self._addresses

    def changed(self) -> None:
        """Tell PETSc that the values have changed."""
        self._find_addresses()
        restore = library().MatSeqAIJRestoreArray
        # marks the parts
        for part, pointer in zip(self._parts, self._pointers[3:], strict=False):
            _check(restore(part, ctypes.byref(pointer)), "MatSeqAIJRestoreArray")
        self.mat.stateIncrease()


def _row_pattern(part: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Copies of row pointers and columns of a sequential matrix, given by its address."""
    integer = _integer()
    indptr, indices, done = (ctypes.c_void_p() for _ in range(3))
    count = integer()
    pointer = ctypes.POINTER(ctypes.c_void_p)
    arguments = (
        part, 0, 0, 0, ctypes.cast(ctypes.byref(count), pointer), ctypes.byref(indptr),
        ctypes.byref(indices), ctypes.cast(ctypes.byref(done), pointer),
    )  # fmt: skip
    _check(library().MatGetRowIJ(*arguments), "MatGetRowIJ")
    dtype = np.dtype(integer)
    starts = _memory(indptr.value or 0, count.value + 1, dtype).copy()
    columns = _memory(indices.value or 0, int(starts[-1]), dtype).copy()
    _check(library().MatRestoreRowIJ(*arguments), "MatRestoreRowIJ")
    return starts, columns


def _memory(address: int, size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array on somebody else's memory."""
    if not size:
        return np.zeros(0, dtype)
    memory: Any = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype=dtype)

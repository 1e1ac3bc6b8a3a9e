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

__all__ = ["MatrixValues", "library", "nonzero_state"]


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

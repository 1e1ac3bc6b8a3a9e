"""Matrices by COO on several processes: entries of rows that other processes own arrive there.

The code is that of devices, on matrices on the host; PETSc's ``setValues`` is the reference.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("petsc4py", reason="needs petsc4py")

from petsc4py import PETSc

from pyop3_mlir.frontends.petsc_device import CooMatrix
from pyop3_mlir.runtime.devices import get_device

OWNED, CELLS = 7, 40


def matrix(comm):
    """An empty distributed matrix with rows and columns of each process."""
    mat = PETSc.Mat().create(comm=comm)
    mat.setSizes(((OWNED, None), (OWNED + comm.rank, None)))
    mat.setType("mpiaij")
    return mat


def elements(comm):
    """Rows, columns and values of this process's cells, which touch rows everywhere."""
    rng = np.random.default_rng(comm.rank)
    rows = rng.integers(-1, OWNED * comm.size, (CELLS, 3))
    width = sum(OWNED + rank for rank in range(comm.size))
    cols = rng.integers(-1, width, (CELLS, 2))
    return rows, cols, rng.integers(-8, 8, (CELLS, 3, 2)).astype(PETSc.ScalarType)


def fill(coo, values):
    """What a loop does that adds its element matrices; the order does not matter here."""
    positions = coo.positions[0].values
    inside = positions >= 0
    np.add.at(coo.array, positions[inside], values.reshape(positions.shape)[inside])


def assemble(comm, parts):
    mat = matrix(comm)
    mat.setUp()
    mat.setOption(PETSc.Mat.Option.NEW_NONZERO_ALLOCATION_ERR, False)
    for rows, cols, values in parts:
        for i, j, v in zip(rows, cols, values, strict=True):
            mat.setValues(i.astype(PETSc.IntType), j.astype(PETSc.IntType), v, addv=True)
    mat.assemble()
    return mat


def same(found, expected):
    start, stop = expected.getOwnershipRange()
    rows = np.arange(start, stop, dtype=PETSc.IntType)
    cols = np.arange(expected.getSize()[1], dtype=PETSc.IntType)
    np.testing.assert_array_equal(found.getValues(rows, cols), expected.getValues(rows, cols))


@pytest.mark.parallel(nprocs=[2, 3])
def test_entries_of_other_processes_rows(comm):
    rows, cols, values = elements(comm)
    coo = CooMatrix(matrix(comm), [(rows, cols)], get_device("cpu"))
    assert ((rows >= 0) & (rows // OWNED != comm.rank)).any()
    for _ in range(2):
        coo.open()
        fill(coo, values)
        coo.close(insert=True)
        same(coo.mat, assemble(comm, [(rows, cols, values)]))
    coo.close()
    same(coo.mat, assemble(comm, [(rows, cols, 2 * values)]))


@pytest.mark.parallel(nprocs=2)
def test_a_process_that_gives_nothing(comm):
    rows, cols, values = elements(comm)
    if comm.rank == 1:
        rows, cols, values = rows[:0], cols[:0], values[:0]
    coo = CooMatrix(matrix(comm), [(rows, cols)], get_device("cpu"))
    coo.open()
    fill(coo, values)
    coo.close()
    same(coo.mat, assemble(comm, [(rows, cols, values)]))

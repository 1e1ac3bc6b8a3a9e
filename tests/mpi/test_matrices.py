"""Distributed matrices: what is added in place, what is sent, and that all fail where one does."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("firedrake", reason="needs Firedrake")

import firedrake as fd
from firedrake import FunctionSpace, TestFunction, TrialFunction, VectorFunctionSpace, dS, dx

from pyop3_mlir.frontends import dropin, petsc
from pyop3_mlir.options import Options

RANKS = [2, 3]


def mass(mesh, degree=1):
    space = FunctionSpace(mesh, "CG", degree)
    return TrialFunction(space) * TestFunction(space) * dx


def values_of(tensor):
    return tensor.petscmat.getValuesCSR()[2]


def stashed(mat):
    """Entries that PETSc has to send."""
    numbers = [petsc._integer()() for _ in range(4)]
    code = petsc.library().MatStashGetInfo(
        ctypes.c_void_p(mat.handle), *[ctypes.byref(number) for number in numbers]
    )
    assert code == 0
    return numbers[0].value + numbers[2].value


@pytest.fixture
def assembler(comm):
    """Return a function that assembles a form twice on the engine, and gives what ran."""
    backends = []

    def run(form):
        from firedrake.assemble import get_assembler

        maker = get_assembler(form)
        tensor = maker.allocate()
        loops = maker.parloops(tensor)
        backend = dropin.attach(Options.resolve(tune="off"))
        backends.append(backend)
        for loop in loops:
            loop()
        return maker, tensor, loops

    yield run
    for backend in backends:
        dropin.detach(backend)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("degree", [1, 2])
def test_core_adds_to_the_memory_of_petsc(comm, assembler, degree):
    mesh = fd.UnitSquareMesh(12, 12, comm=comm)
    expected = fd.assemble(mass(mesh, degree))
    _, tensor, (loop,) = assembler(mass(mesh, degree))
    reading = loop.__dict__["_pyop3_mlir"].reading
    (share,) = reading.shares
    (target,) = [a.buffer for a in reading.parloop.arguments if a.access.writes]
    assert target is share.values.arrays[0]
    assert reading.parloop.iteration_set.size == loop.iterset.core_size
    assert stashed(tensor.petscmat) == 0
    # each entry of another process's row once, and none besides
    far = sum(len(block.rows) for block in share.blocks)
    pairs = {pair for b in share.blocks for pair in zip(b.rows, b.columns, strict=True)}
    assert len(pairs) == far
    start, stop = tensor.petscmat.getOwnershipRange()
    assert not [row for row, _ in pairs if start <= row < stop]
    assert comm.allreduce(far) > 0
    tensor.M.assemble()
    np.testing.assert_allclose(values_of(tensor), values_of(expected), rtol=0, atol=1e-15)


@pytest.mark.parallel(RANKS)
def test_interior_facets_and_boundary_conditions(check):
    def make(comm):
        return fd.UnitSquareMesh(6, 6, comm=comm)

    def prepare(mesh):
        space = VectorFunctionSpace(mesh, "CG", 2)
        u, v = TrialFunction(space), TestFunction(space)
        form = fd.inner(fd.grad(u), fd.grad(v)) * dx + fd.inner(fd.jump(u), fd.jump(v)) * dS
        form += fd.inner(fd.avg(u), fd.avg(v)) * dS
        condition = fd.DirichletBC(space.sub(0), 0, (1, 3))
        return lambda: fd.assemble(form, bcs=[condition], mat_type="aij")

    check(make, prepare)


@pytest.mark.parallel(RANKS)
def test_inserted_values(comm, engine_on):
    """An interpolation matrix: several processes store the same value."""
    mesh = fd.UnitSquareMesh(6, 6, comm=comm)
    coarse, fine = FunctionSpace(mesh, "CG", 1), FunctionSpace(mesh, "CG", 2)
    expected = fd.assemble(fd.interpolate(TrialFunction(coarse), fine))
    with engine_on():
        found = fd.assemble(fd.interpolate(TrialFunction(coarse), fine))
    assert found.petscmat.getType() == "mpiaij"
    np.testing.assert_allclose(values_of(found), values_of(expected), rtol=0, atol=1e-14)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("half", ["main", "border"])
def test_error_of_one_process_is_raised_on_all(comm, assembler, monkeypatch, half):
    mesh = fd.UnitSquareMesh(9, 9, comm=comm)
    maker, tensor, (loop,) = assembler(mass(mesh))
    expected = fd.assemble(mass(mesh))
    call = loop.__dict__["_pyop3_mlir"].call
    failing = comm.size - 1

    def fail(start, stop):
        raise RuntimeError("the device is lost")

    if comm.rank == failing:
        monkeypatch.setattr(call, half, _Failing(getattr(call, half), fail))
    with pytest.raises(Exception, match="the device is lost"):
        maker.assemble(tensor=tensor)
    monkeypatch.undo()
    # nothing is left of it
    maker.assemble(tensor=tensor)
    np.testing.assert_allclose(values_of(tensor), values_of(expected), rtol=0, atol=1e-15)


class _Failing:
    def __init__(self, loop, call):
        self.parloop, self._call = loop.parloop, call

    def __call__(self, start, stop):
        self._call(start, stop)

"""The setting ``verify`` on several processes: what is wrong on one is reported on all of them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("firedrake", reason="needs Firedrake")

import firedrake as fd
from firedrake import (
    DirichletBC,
    FunctionSpace,
    TestFunctions,
    TrialFunctions,
    VectorFunctionSpace,
    assemble,
    div,
    dS,
    dx,
    grad,
    inner,
    jump,
)
from firedrake.assemble import get_assembler

from pyop3_mlir import engine
from pyop3_mlir.errors import VerificationError
from pyop3_mlir.frontends import verify

RANKS = [2, 3]


def mesh_of(comm):
    return fd.UnitSquareMesh(7, 7, comm=comm)


def laplace(mesh):
    space = FunctionSpace(mesh, "CG", 2)
    u, v = fd.TrialFunction(space), fd.TestFunction(space)
    form = inner(grad(u), grad(v)) * dx + inner(jump(grad(u)), jump(grad(v))) * dS
    return lambda: assemble(form, bcs=[DirichletBC(space, 0, 1)])


def elasticity(mesh):
    space = VectorFunctionSpace(mesh, "CG", 1)
    u, v = fd.TrialFunction(space), fd.TestFunction(space)
    form = inner(grad(u), grad(v)) * dx + div(u) * div(v) * dx
    return lambda: assemble(form, mat_type="baij")


def stokes(mesh, mat_type):
    space = VectorFunctionSpace(mesh, "CG", 2) * FunctionSpace(mesh, "CG", 1)
    (u, p), (v, q) = TrialFunctions(space), TestFunctions(space)
    form = inner(grad(u), grad(v)) * dx - p * div(v) * dx - div(u) * q * dx
    return lambda: assemble(form, bcs=[DirichletBC(space.sub(0), 0, 1)], mat_type=mat_type)


def interpolation(mesh):
    coarse, fine = FunctionSpace(mesh, "CG", 1), FunctionSpace(mesh, "CG", 2)
    return lambda: assemble(fd.interpolate(fd.TrialFunction(coarse), fine))


PROBLEMS = {
    "facets": laplace,
    "blocks": elasticity,
    "mixed": lambda mesh: stokes(mesh, "aij"),
    "nested": lambda mesh: stokes(mesh, "nest"),
    "inserted": interpolation,
}


def parts(mat):
    """The matrix itself, or the blocks of a nested one."""
    if mat.getType() != "nest":
        return [mat]
    return [mat.getNestSubMatrix(i, j) for i in range(2) for j in range(2)]


def norm(mat):
    return np.linalg.norm([part.norm() for part in parts(mat) if part])


@pytest.fixture
def matrices(monkeypatch):
    """Return a list to which the name of each matrix is added that is compared."""
    found = []
    original = verify.Trial._compare

    def note(trial, reading, matrix):
        found.append(matrix.name)
        original(trial, reading, matrix)

    monkeypatch.setattr(verify.Trial, "_compare", note)
    return found


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_right_matrices_pass(comm, engine_on, matrices, problem):
    run = PROBLEMS[problem](mesh_of(comm))
    expected = run().petscmat
    with engine_on(verify=True):
        found = run().petscmat
    assert matrices
    for theirs, ours in zip(parts(expected), parts(found), strict=True):
        if theirs:
            values = theirs.getValuesCSR()[2]
            np.testing.assert_allclose(
                ours.getValuesCSR()[2], values, rtol=0, atol=1e-14 * np.abs(values).max(initial=0)
            )


def spoil(monkeypatch, comm, entry):
    """Let the last process make one number wrong: the entry of what a loop writes."""
    call = engine.BoundLoop.__call__

    def wrong(bound, *arguments):
        call(bound, *arguments)
        for argument in bound.parloop.arguments:
            if argument.access.writes and argument.buffer.size and comm.rank == comm.size - 1:
                argument.buffer[entry] += 1e-6

    monkeypatch.setattr(engine.BoundLoop, "__call__", wrong)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    ("problem", "entry"),
    [(problem, 0) for problem in PROBLEMS]
    # memory for element matrices has room to spare, and who inserts last is right
    + [(problem, -1) for problem in PROBLEMS if problem not in ("blocks", "inserted")],
)
def test_wrong_entry_of_one_process_is_reported_on_all(
    comm, engine_on, monkeypatch, problem, entry
):
    """The last entry that is gathered is one of another process's rows, which finds it."""
    run = PROBLEMS[problem](mesh_of(comm))
    expected = norm(run().petscmat)
    spoil(monkeypatch, comm, entry)
    with (
        pytest.raises(VerificationError, match=r"matrix .*entry \(\d+, \d+\) is"),
        engine_on(verify=True),
    ):
        run()
    # all of them go on, together
    assert comm.allreduce(1) == comm.size
    monkeypatch.undo()
    with engine_on(verify=True):
        assert norm(run().petscmat) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parallel(RANKS)
def test_wrong_vector_of_one_process_is_reported_on_all(comm, engine_on, monkeypatch):
    space = FunctionSpace(mesh_of(comm), "CG", 1)
    spoil(monkeypatch, comm, 0)
    with pytest.raises(VerificationError, match=r"argument .*entry 0 is"), engine_on(verify=True):
        assemble(fd.TestFunction(space) * dx)
    assert comm.allreduce(1) == comm.size


@pytest.mark.parallel(RANKS)
def test_what_cancels_is_compared_by_what_it_is_made_of(comm, engine_on, matrices, monkeypatch):
    """Both engines find rounding errors in a difference of equal functions, different ones."""
    mesh = mesh_of(comm)
    x, y = fd.SpatialCoordinate(mesh)
    space = FunctionSpace(mesh, "CG", 2)
    f = fd.Function(space).interpolate(fd.sin(x) / 3 + y)
    u, v = fd.TrialFunction(space), fd.TestFunction(space)
    form = (f / 3 - fd.Function(space).assign(f / 3)) * u * v * dx
    expected = assemble(u * v * dx).petscmat.norm()
    with engine_on(verify=True):
        assert assemble(form).petscmat.norm() < 1e-14 * expected
    assert matrices
    monkeypatch.setattr(verify, "_round_differently", lambda *arguments: None)
    with pytest.raises(VerificationError, match="matrix"), engine_on(verify=True):
        assemble(form)


@pytest.mark.parallel(RANKS)
def test_earlier_entries_that_wait_are_not_taken_for_the_loops(comm, engine_on, matrices):
    """Assembling into a matrix adds to what is in PETSc's stash."""
    space = FunctionSpace(mesh_of(comm), "CG", 1)
    form = fd.TrialFunction(space) * fd.TestFunction(space) * dx
    expected = assemble(form).petscmat.norm()
    with engine_on(verify=True):
        maker = get_assembler(form)
        tensor = maker.allocate()
        mat = tensor.petscmat
        start, _ = mat.getOwnershipRange()
        other = start - 1 if start else mat.getOwnershipRanges()[1]
        mat.setValues(other, other, 1.0, addv=True)
        for loop in maker.parloops(tensor):
            loop()
        mat.assemble()
        assert matrices
    assert mat.norm() > expected

"""Firedrake on pyop3: what it assembles on the engine, against the same with loopy."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyop3.insn.exec", reason="pyop3 is in no registry and not installed here")
fd = pytest.importorskip("firedrake", reason="Firedrake's branch with pyop3 is not installed")

from pyop3_forms import (  # noqa: E402
    MATRICES,
    MATRICES_BY_NAME,
    MESHES,
    VECTORS,
    check_against_loopy,
    coefficient,
    values,
)


@functools.cache
def mesh_of(cell: str) -> Any:
    """The mesh of a cell, made once."""
    return MESHES[cell]()


@pytest.mark.parametrize(("cell", "form"), VECTORS, ids=lambda v: getattr(v, "__name__", v))
def test_vector(engine, cell, form):
    check_against_loopy(engine, form(mesh_of(cell), 1))


@pytest.mark.parametrize(("cell", "form"), MATRICES, ids=lambda v: getattr(v, "__name__", v))
def test_matrix(engine, cell, form):
    check_against_loopy(engine, form(mesh_of(cell), 2))


def test_boundary_conditions(engine):
    mesh = mesh_of("triangle")
    form = MATRICES_BY_NAME["laplace"](mesh, 2)
    bcs = fd.DirichletBC(form.arguments()[0].function_space(), 0, "on_boundary")
    check_against_loopy(engine, form, bcs=bcs)


@pytest.mark.parametrize("mat_type", ["nest", "aij"])
def test_mixed_matrix(engine, mat_type):
    form = MATRICES_BY_NAME["mixed_poisson"](mesh_of("triangle"), 2)
    check_against_loopy(engine, form, mat_type=mat_type)


@pytest.mark.parametrize("degree", [1, 2])
def test_interpolation(engine, degree):
    mesh = mesh_of("triangle")
    x, y = fd.SpatialCoordinate(mesh)
    source = fd.Function(fd.FunctionSpace(mesh, "CG", 2)).interpolate(x * y + 1)
    space = fd.FunctionSpace(mesh, "DG", degree)

    def interpolated() -> np.ndarray:
        return values(fd.Function(space).interpolate(fd.sin(source) * source))

    engine.backend.detach()
    expected = interpolated()
    engine.backend.options = replace(engine.backend.options, verify=False)
    engine.backend.attach()
    np.testing.assert_allclose(interpolated(), expected, rtol=1e-13)
    lowered = [e for e in engine.entries() if e.name != "assignment" and e.lowered]
    assert lowered
    assert all(e.calls == e.lowered for e in lowered)


def test_projection(engine):
    mesh = mesh_of("triangle")
    source = coefficient(fd.FunctionSpace(mesh, "DG", 1))
    space = fd.FunctionSpace(mesh, "CG", 1)
    options = {"solver_parameters": {"ksp_type": "preonly", "pc_type": "lu"}}
    engine.backend.detach()
    expected = values(fd.project(source, space, **options))
    engine.backend.options = replace(engine.backend.options, verify=False)
    engine.backend.attach()
    found = values(fd.project(source, space, **options))
    np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_limiter(engine):
    # smallest and largest values of the cells around a vertex: MIN and MAX
    mesh = mesh_of("triangle")
    space = fd.FunctionSpace(mesh, "DG", 1)
    limiter = fd.VertexBasedLimiter(space)

    def limited() -> np.ndarray:
        field = coefficient(space)
        limiter.apply(field)
        return values(field)

    engine.backend.detach()
    expected = limited()
    engine.backend.options = replace(engine.backend.options, verify=False)
    engine.backend.attach()
    np.testing.assert_allclose(limited(), expected, rtol=1e-12)


def test_new_values_are_seen_without_compiling_again(engine, monkeypatch):
    from pyop3_mlir import engine as core

    mesh = mesh_of("triangle")
    space = fd.FunctionSpace(mesh, "CG", 1)
    u, v, c = fd.Function(space), fd.TestFunction(space), fd.Constant(1.0)
    form = c * u * v * fd.dx
    u.assign(1.0)
    result = fd.assemble(form)
    total = values(result).sum()
    monkeypatch.setattr(core.Module, "build", lambda self: pytest.fail("compiled again"))
    for k in range(3):
        u.assign(k + 2.0)
        c.assign(k + 0.5)
        fd.assemble(form, tensor=result)
        assert np.isclose(values(result).sum(), total * (k + 2) * (k + 0.5), rtol=1e-13)


def test_nonlinear_solve_takes_as_many_iterations(engine):
    mesh = mesh_of("triangle")
    space = fd.FunctionSpace(mesh, "CG", 2)
    v = fd.TestFunction(space)

    def solve() -> tuple[int, np.ndarray]:
        u = fd.Function(space)
        slope = fd.inner(fd.grad(u), fd.grad(u))
        residual = ((1 + slope) * fd.inner(fd.grad(u), fd.grad(v)) - v) * fd.dx
        problem = fd.NonlinearVariationalProblem(
            residual, u, fd.DirichletBC(space, 0, "on_boundary")
        )
        parameters = {"ksp_type": "preonly", "pc_type": "lu", "snes_rtol": 1e-10}
        solver = fd.NonlinearVariationalSolver(problem, solver_parameters=parameters)
        solver.solve()
        return solver.snes.getIterationNumber(), values(u)

    engine.backend.detach()
    iterations, expected = solve()
    engine.backend.attach()
    ours, found = solve()
    assert ours == iterations > 1
    assert np.allclose(found, expected, rtol=1e-10, atol=1e-14)
    for entry in engine.entries():
        if "integral" in entry.name:
            assert entry.calls == entry.lowered > 0, f"{entry.name}: {entry.reason}"

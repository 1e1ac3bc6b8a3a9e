"""Loops of pyop3 on several processes: halo exchanges stay pyop3's."""

from __future__ import annotations

import pytest

pytest.importorskip("pyop3.insn.exec", reason="pyop3 is in no registry and not installed here")
fd = pytest.importorskip("firedrake", reason="Firedrake's branch with pyop3 is not installed")

from pyop3_forms import (  # noqa: E402
    advection,
    boundary,
    check_against_loopy,
    elasticity,
    energy,
    laplace,
    mixed_poisson,
)


@pytest.mark.parallel(nprocs=2)
@pytest.mark.parametrize("form", [laplace, boundary, advection, energy, mixed_poisson])
def test_vector(engine, form):
    check_against_loopy(engine, form(fd.UnitSquareMesh(5, 4), 1))


@pytest.mark.parallel(nprocs=2)
@pytest.mark.parametrize("form", [laplace, advection, elasticity])
def test_matrix(engine, form):
    check_against_loopy(engine, form(fd.UnitSquareMesh(5, 4), 2))


@pytest.mark.parallel(nprocs=3)
def test_process_without_facets(engine):
    # one side of the square: not every process has a facet there
    mesh = fd.UnitSquareMesh(6, 6)
    v = fd.TestFunction(fd.FunctionSpace(mesh, "CG", 1))
    check_against_loopy(engine, fd.SpatialCoordinate(mesh)[1] * v * fd.ds(1))

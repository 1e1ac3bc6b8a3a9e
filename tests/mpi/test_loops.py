"""PyOP2's loops on 1 to 4 processes: access modes, reductions, what is passed twice, subsets."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("mpi4py", reason="needs MPI")
fd = pytest.importorskip("firedrake", reason="needs Firedrake")

from firedrake import (  # noqa: E402
    Function,
    FunctionSpace,
    SpatialCoordinate,
    VectorFunctionSpace,
    cos,
    dx,
    par_loop,
    sin,
)
from pyop2 import op2  # noqa: E402

RANKS = [1, 2, 3, 4]


def triangles(comm):
    return fd.UnitSquareMesh(3, 2, comm=comm)


def cells(mesh):
    """A value for each cell, as different as can be between neighbours."""
    x, y = SpatialCoordinate(mesh)
    return Function(FunctionSpace(mesh, "DG", 0)).interpolate(sin(17 * x) * cos(23 * y))


def nodes(mesh):
    x, y = SpatialCoordinate(mesh)
    return Function(FunctionSpace(mesh, "CG", 1)).interpolate(sin(7 * x) + cos(5 * y))


def extremes(access, function):
    """Each node takes the smallest or the largest value of its cells."""
    kernel = ("{[i]: 0 <= i < node.dofs}", f"node[i, 0] = {function}(node[i, 0], cell[0, 0])")

    def prepare(mesh):
        cell, node = cells(mesh), Function(FunctionSpace(mesh, "CG", 1))
        node.assign(-100.0 if access is op2.MAX else 100.0)

        def run():
            par_loop(kernel, dx, {"node": (node, access), "cell": (cell, op2.READ)})
            return node

        return run

    return prepare


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", ["fmin", "fmax"])
def test_extremes_of_nodes(check, name):
    access = op2.MIN if name == "fmin" else op2.MAX
    check(triangles, extremes(access, name))


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", ["INC", "MIN", "MAX"])
def test_global_is_reduced_once(check, name):
    """Every process starts from the same value, which may enter the result once only."""
    update = {
        "INC": "total[0] = total[0] + cell[i, 0]",
        "MIN": "total[0] = fmin(total[0], cell[i, 0])",
        "MAX": "total[0] = fmax(total[0], cell[i, 0])",
    }[name]
    kernel = ("{[i]: 0 <= i < cell.dofs}", update)
    access = getattr(op2, name)

    def prepare(mesh):
        cell = cells(mesh)
        total = Function(FunctionSpace(mesh, "R", 0)).assign(0.125)

        def run():
            for _ in range(2):
                par_loop(kernel, dx, {"total": (total, access), "cell": (cell, op2.READ)})
            return float(total)

        return run

    check(triangles, prepare)


ADD = ("{[i]: 0 <= i < node.dofs}", "node[i, 0] = node[i, 0] + cell[0, 0]")
SUM = ("{[i]: 0 <= i < node.dofs}", "cell[0, 0] = cell[0, 0] + node[i, 0]")


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("frozen", [False, True], ids=["exchanged", "frozen"])
def test_increments_of_several_loops(check, frozen):
    """Loops that add to the same Dat, one after another, and one between them that reads it."""

    def prepare(mesh):
        cell, node = cells(mesh), nodes(mesh)
        found = Function(cell.function_space())

        def add():
            par_loop(ADD, dx, {"node": (node, op2.INC), "cell": (cell, op2.READ)})

        def run():
            if frozen:
                with node.dat.frozen_halo(op2.INC):
                    add()
                    add()
            else:
                add()
                add()
            par_loop(SUM, dx, {"cell": (found, op2.INC), "node": (node, op2.READ)})
            add()
            return [node, found]

        return run

    check(triangles, prepare)


@pytest.mark.parallel([2, 3])
def test_dat_is_passed_twice(check):
    """Once as it is and once through another argument, to read from and to add to."""
    kernel = (
        "{[i, j]: 0 <= i < a.dofs and 0 <= j < a.dofs}",
        """
        a[i, 0] = a[i, 0] + x[i, 0]
        b[j, 0] = b[j, 0] + 2 * y[j, 0]
        """,
    )

    def prepare(mesh):
        node, target = nodes(mesh), nodes(mesh)

        def run():
            arguments = {
                "a": (target, op2.INC),
                "b": (target, op2.INC),
                "x": (node, op2.READ),
                "y": (node, op2.READ),
            }
            par_loop(kernel, dx, arguments)
            return target

        return run

    check(triangles, prepare)


@pytest.mark.parallel([2, 3])
def test_written_and_read_back(check):
    """WRITE of values that do not depend on the cell, then RW of each cell's own."""
    write = ("{[i]: 0 <= i < node.dofs}", "node[i, 0] = 2 * x[i, 0]")
    change = ("{[i]: 0 <= i < own.dofs}", "own[i, 0] = own[i, 0] * own[i, 0] + node[i, 0]")

    def prepare(mesh):
        source, node = nodes(mesh), Function(FunctionSpace(mesh, "CG", 1))
        own = Function(FunctionSpace(mesh, "DG", 1)).interpolate(SpatialCoordinate(mesh)[0])

        def run():
            par_loop(write, dx, {"node": (node, op2.WRITE), "x": (source, op2.READ)})
            par_loop(change, dx, {"own": (own, op2.RW), "node": (node, op2.READ)})
            return [node, own]

        return run

    check(triangles, prepare)


@pytest.mark.parallel([3])
def test_part_of_a_vector(check):
    """A view of one component, and boundaries that only some of the processes have."""

    def prepare(mesh):
        space = VectorFunctionSpace(mesh, "CG", 1)
        x, _ = SpatialCoordinate(mesh)
        f = Function(space).interpolate(fd.as_vector([x, sin(3 * x)]))
        v = fd.TestFunction(space.sub(1).collapse())
        form = fd.inner(f[1], v) * fd.ds(1) + fd.inner(f.sub(1), v) * dx
        return lambda: fd.assemble(form)

    check(triangles, prepare)


@pytest.mark.parallel([2])
def test_halo_is_current_after_a_loop(comm, engine_on):
    """A process reads what another one has just computed for the entities that both know."""
    mesh = triangles(comm)
    cell, node = cells(mesh), Function(FunctionSpace(mesh, "CG", 1))
    with engine_on():
        par_loop(ADD, dx, {"node": (node, op2.INC), "cell": (cell, op2.READ)})
        owned = node.dat.data_ro.copy()
        everything = node.dat.data_ro_with_halos.copy()
    again = Function(node.function_space())
    par_loop(ADD, dx, {"node": (again, op2.INC), "cell": (cell, op2.READ)})
    np.testing.assert_allclose(owned, again.dat.data_ro, rtol=1e-13)
    np.testing.assert_allclose(everything, again.dat.data_ro_with_halos, rtol=1e-13)

"""Dats that stay on a device under Firedrake, and their halos: values, and bytes that move.

Mesa's llvmpipe is a Vulkan device with memory of its own.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("firedrake", reason="needs Firedrake")

import firedrake as fd
from firedrake import FunctionSpace, TestFunction, VectorFunctionSpace, dS, dx, par_loop
from pyop2 import op2

from pyop3_mlir.engine import BoundLoop
from pyop3_mlir.errors import DeviceError, Pyop3MlirError
from pyop3_mlir.rows import Rows
from pyop3_mlir.runtime.residency import Traffic, traffic

RANKS = [2, 3]

# integers, so that the sum does not depend on the order
SPREAD = ("{[i]: 0 <= i < target.dofs}", "target[i, 0] = target[i, 0] + source[i, 0]")
MAXIMUM = ("{[i]: 0 <= i < target.dofs}", "target[i, 0] = fmax(target[i, 0], source[i, 0])")


@pytest.fixture
def device(vulkan):
    """The name of a device with memory of its own and double precision."""
    return vulkan.spec


def functions(comm, shape=False):
    mesh = fd.UnitSquareMesh(6, 6, comm=comm)
    space = VectorFunctionSpace(mesh, "CG", 1) if shape else FunctionSpace(mesh, "CG", 1)
    source, target = fd.Function(space), fd.Function(space)
    source.interpolate(
        fd.as_vector(fd.SpatialCoordinate(mesh)) if shape else fd.SpatialCoordinate(mesh)[0]
    )
    source.dat.data[:] = np.rint(36 * source.dat.data_ro)
    target.dat.data[:] = 1.0
    return source, target


def steps(source, target, count):
    """Both are written, and read through halos."""
    for _ in range(count):
        par_loop(SPREAD, dx, {"target": (target, op2.INC), "source": (source, op2.READ)})
        par_loop(SPREAD, dx, {"target": (source, op2.INC), "source": (target, op2.READ)})


def halo_sizes(function):
    """Rows that other processes have ghosts of, and ghosts."""
    dat = function.dat
    _, _, roots = dat.dataset.halo.sf.getGraph()
    ghosts = len(roots)
    comm = dat.comm
    counts = np.bincount(roots.reshape(-1, 2)[:, 0], minlength=comm.size)
    return int(sum(row[comm.rank] for row in comm.allgather(counts))), ghosts


@pytest.mark.parallel(RANKS)
def test_loops_move_exchanged_rows_alone(comm, engine_on, device):
    expected = functions(comm)
    steps(*expected, 6)
    source, target = functions(comm)
    with engine_on(device=device):
        steps(source, target, 2)
        before = traffic(device)
        steps(source, target, 4)
        moved = traffic(device) - before
        # of each of 8 loops what is read is brought to ghosts, and what was added comes from them
        sent, ghosts = halo_sizes(source)
        assert moved == Traffic(8 * 8 * (sent + ghosts), 8 * 8 * (sent + ghosts))
        np.testing.assert_array_equal(source.dat.data_ro, expected[0].dat.data_ro)
        np.testing.assert_array_equal(
            target.dat.data_ro_with_halos, expected[1].dat.data_ro_with_halos
        )
    np.testing.assert_array_equal(source.dat.data_ro, expected[0].dat.data_ro)


@pytest.mark.parallel(RANKS)
def test_views_and_vectors_are_up_to_date(comm, engine_on, device):
    """Held while loops run, read and written; PETSc's vectors too."""
    results = []
    for settings in (None, {"device": device}):
        source, target = functions(comm)

        def run(source=source, target=target):
            steps(source, target, 1)
            held = target.dat.data_ro
            steps(source, target, 1)
            seen = [held.copy()]
            writable = source.dat.data
            steps(source, target, 1)
            seen.append(writable.copy())
            writable[:] = np.rint(writable / 7)
            del writable, held
            source.dat.halo_valid = False
            steps(source, target, 1)
            with target.dat.vec as vec:
                seen.append(vec.array_r.copy())
                vec.scale(2.0)
            par_loop(MAXIMUM, dx, {"target": (source, op2.MAX), "source": (target, op2.READ)})
            seen.append(source.dat.data_ro_with_halos.copy())
            target.assign(source + 1)
            steps(source, target, 1)
            source.dat.zero()
            steps(source, target, 1)
            seen += [source.dat.data_ro.copy(), target.dat.data_ro.copy()]
            return seen

        if settings is None:
            results.append(run())
        else:
            with engine_on(**settings):
                results.append(run())
    for found, wanted in zip(results[1], results[0], strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parallel(RANKS)
def test_forms_on_a_device(check, device):
    def make(comm):
        return fd.UnitSquareMesh(5, 5, comm=comm)

    def prepare(mesh):
        space = VectorFunctionSpace(mesh, "CG", 2)
        x = fd.SpatialCoordinate(mesh)
        u = fd.Function(space).interpolate(fd.as_vector([fd.cos(x[0]), x[0] * x[1]]))
        v = TestFunction(space)
        form = fd.inner(fd.grad(u), fd.grad(v)) * dx + fd.inner(fd.jump(u), fd.jump(v)) * dS
        form += u.sub(1) * v[0] * dx
        total = fd.inner(u, u) * dx + u[0] * fd.ds
        return lambda: [fd.assemble(form), fd.assemble(form), fd.assemble(total)]

    check(make, prepare, device=device)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(("owner", "name"), [(Rows, "get"), (BoundLoop, "submit")])
def test_error_of_one_process_is_raised_on_all(comm, engine_on, device, monkeypatch, owner, name):
    source, target = functions(comm)
    with engine_on(device=device):
        steps(source, target, 1)
        if comm.rank == comm.size - 1:

            def fail(*_):
                raise DeviceError("the device is lost")

            monkeypatch.setattr(owner, name, fail)
        with pytest.raises(Pyop3MlirError, match="the device is lost"):
            steps(source, target, 1)
        monkeypatch.undo()
        target.assign(1.0)
        source.assign(1.0)
        steps(source, target, 1)
        assert np.isfinite(target.dat.data_ro).all()

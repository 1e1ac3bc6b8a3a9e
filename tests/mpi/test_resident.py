"""Halos of arrays that stay on a device: what crosses to the host, in bytes, and what arrives.

Mesa's llvmpipe is a Vulkan device with memory of its own.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("mpi4py", reason="needs MPI")

from pyop3_mlir import halo
from pyop3_mlir.errors import DeviceError, InvalidLoopError, Pyop3MlirError
from pyop3_mlir.kernels import elements
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import INC, MAX, MIN, READ, Argument, Parloop
from pyop3_mlir.rows import Rows
from pyop3_mlir.runtime.residency import Resident, Traffic, device_copy, traffic

RANKS = [2, 3]
N = 6


@pytest.fixture
def device(vulkan):
    """Where the arrays are; a device with memory of its own and double precision."""
    return vulkan


def grid(n=N):
    """Points and triangles of an n by n grid."""
    x, y = np.meshgrid(np.linspace(0, 1, n + 1), np.linspace(0, 1, n + 1), indexing="ij")
    corner = (np.arange(n)[:, None] * (n + 1) + np.arange(n)).ravel()
    lower = np.stack([corner, corner + n + 1, corner + n + 2], axis=1)
    upper = np.stack([corner, corner + n + 2, corner + 1], axis=1)
    return np.stack([x.ravel(), y.ravel()], axis=1), np.concatenate([lower, upper])


def strip_owners(cells, processes):
    """A partition into strips, so that not all nodes are shared."""
    return np.arange(cells) % (cells // 2) * processes // (cells // 2)


def part_of(comm):
    _, table = grid()
    return halo.distribute(comm, table, strip_owners(len(table), comm.size))


def to_device(resident, device):
    """Make the device's copy the only one with the latest contents."""
    copy = device_copy(resident.array, device)
    copy.prepare()
    copy.changed()
    # nobody may look at these
    resident.array[...] = -77
    return copy


def on_device(copy):
    """The contents of a copy, without its keeper's knowledge."""
    kept = copy.array.copy()
    copy.fetch(0, copy.array.nbytes)
    found = copy.array.copy()
    copy.array[...] = kept
    return found


def sizes(part):
    """Rows that are sent to ghosts, and ghosts."""
    return sum(len(rows) for rows in part.halo._wanted.values()), part.halo.size - part.halo.owned


DTYPES = [np.float64, np.float32, np.int32, np.complex128]


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("shape", [(), (3,)], ids=["scalar", "vector"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_update_moves_rows_alone(comm, device, dtype, shape):
    part = part_of(comm)
    values = np.zeros((part.halo.size, *shape), dtype)
    owned = part.nodes[: part.halo.owned].reshape(-1, *[1] * len(shape))
    values[: part.halo.owned] = 10 * owned + np.arange(1, 1 + values[0].size).reshape(shape)
    expected = values.copy()
    part.halo.update(expected)
    resident = Resident(values)
    copy = to_device(resident, device)
    part.halo.update(resident)
    assert not resident.host_fresh
    np.testing.assert_array_equal(on_device(copy), expected)
    before = traffic(device.spec)
    part.halo.update(resident)
    sent, ghosts = sizes(part)
    width = values[0].nbytes
    assert traffic(device.spec) - before == Traffic(ghosts * width, sent * width)
    np.testing.assert_array_equal(resident.data_ro, expected)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("access", [INC, MIN, MAX], ids=lambda access: access.name)
def test_reduction_moves_rows_alone(comm, device, access):
    """Also where three processes have something for one row."""
    part = part_of(comm)
    values = np.random.default_rng(comm.rank).integers(-99, 99, (part.halo.size, 2)).astype(float)
    expected = values.copy()
    part.halo.begin_reduction(expected, access).finish()
    resident = Resident(values)
    copy = to_device(resident, device)
    part.halo.begin_reduction(resident, access).finish()
    owned = slice(part.halo.owned)
    np.testing.assert_array_equal(on_device(copy)[owned], expected[owned])
    before = traffic(device.spec)
    part.halo.begin_reduction(resident, access).finish()
    sent, ghosts = sizes(part)
    assert traffic(device.spec) - before == Traffic(16 * sent, 16 * ghosts)


@pytest.mark.parallel(RANKS)
def test_copies_that_are_current_stay_so(comm, device):
    """On the host and on the device: each process has its contents elsewhere."""
    part = part_of(comm)
    values = np.where(np.arange(part.halo.size) < part.halo.owned, part.nodes, -1).astype(float)
    resident = Resident(values)
    copy = device_copy(values, device)
    if comm.rank != 0:
        copy.prepare()
    if comm.rank == 2:
        copy.changed()
        values[...] = -77
    fresh = resident.host_fresh, resident.fresh_devices
    part.halo.update(resident)
    assert (resident.host_fresh, resident.fresh_devices) == fresh
    if fresh[1]:
        np.testing.assert_array_equal(on_device(copy), part.nodes)
    np.testing.assert_array_equal(resident.data_ro, part.nodes)


class Step:
    """A loop on resident arrays, which stay on the device."""

    def __init__(self, comm, device, wrap=Resident):
        points, table = grid()
        self.part = part = halo.distribute(comm, table, strip_owners(len(table), comm.size))
        u = np.where(np.arange(part.halo.size) < part.halo.owned, np.cos(part.nodes), 1e30)
        self.u, self.result = wrap(u), wrap(np.zeros(part.halo.size))
        own = Resident(np.ascontiguousarray(points[part.nodes]))
        self.keep = own
        arrays = [x.array if wrap is Resident else x for x in (self.result, self.u)]
        arguments = [
            Argument.indirect(arrays[0], INC, part.table, "result"),
            Argument.indirect(own.array, READ, part.table, "points"),
            Argument.indirect(arrays[1], READ, part.table, "u"),
        ]
        parloop = Parloop(elements.kernel("laplace", "triangle", 1), part.iteration_set, arguments)
        self.loop = halo.compile(
            comm,
            parloop,
            [part.halo, None, part.halo],
            device=device,
            options=Options.resolve(tune="off"),
        )


@pytest.mark.parallel(RANKS)
def test_loop_moves_rows_alone(comm, device):
    here, there = Step(comm, "cpu", np.asarray), Step(comm, device)
    for _ in range(3):
        here.loop()
        there.loop()
    # as if a loop had computed it there
    device_copy(there.u.array, device).changed()
    # tables go there once
    here.loop()
    there.loop()
    before = traffic(device.spec)
    for _ in range(4):
        here.loop()
        there.loop()
    sent, ghosts = sizes(there.part)
    moved = traffic(device.spec) - before
    # ghosts of what is read, and what was added to ghosts
    assert moved == Traffic(4 * 8 * (ghosts + sent), 4 * 8 * (sent + ghosts))
    owned = slice(there.part.halo.owned)
    np.testing.assert_allclose(there.result.data_ro[owned], here.result[owned], rtol=1e-12)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("what", ["get", "put"])
def test_error_on_one_process_is_raised_on_all(comm, device, monkeypatch, what):
    step = Step(comm, device)
    step.loop()
    failing = comm.size - 1
    if comm.rank == failing:

        def fail(*_):
            raise DeviceError("the device is lost")

        monkeypatch.setattr(Rows, what, fail)
    for action in (step.loop, lambda: step.part.halo.update(step.u)):
        with pytest.raises(Pyop3MlirError, match="the device is lost"):
            action()
    monkeypatch.undo()
    step.loop()
    assert np.isfinite(step.result.data_ro[: step.part.halo.owned]).all()


@pytest.mark.parallel([2])
def test_resident_array_is_to_be_given_as_such(comm):
    part = part_of(comm)
    resident = Resident(np.zeros(part.halo.size))
    with pytest.raises(InvalidLoopError, match="exchange its Resident"):
        part.halo.begin(resident.array)


@pytest.mark.parallel([3])
def test_processes_without_rows(comm, device):
    _, table = grid()
    part = halo.distribute(comm, table, np.zeros(len(table), int))
    resident = Resident(part.nodes.astype(float))
    if part.halo.size:
        to_device(resident, device)
    part.halo.update(resident)
    np.testing.assert_array_equal(resident.data_ro, part.nodes)

"""What is copied between the host and a device, in bytes, and that nobody sees stale contents.

Mesa's llvmpipe is a Vulkan device with memory of its own.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
from builder import KernelBuilder, dims_of, entry, total
from meshes import random_map

from pyop3_mlir import engine
from pyop3_mlir.errors import DeviceError
from pyop3_mlir.frontends import report_as_dict
from pyop3_mlir.kernels.program import IndexOf, Op, Scalar
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import INC, READ, RW, Argument, IndexTable, IterationSet, Parloop
from pyop3_mlir.runtime.devices import Timeline
from pyop3_mlir.runtime.executable import BoundFunction
from pyop3_mlir.runtime.residency import Resident, Traffic, adopt, device_copy, latest, traffic

CELLS, NODES, DT = 50, 30, 0.5


def _flux_kernel():
    """``y[i] += x[j] - x[i]`` for the two nodes of an edge."""
    k = KernelBuilder("flux")
    y, x = k.argument(2), k.argument(2)
    (i,) = dims_of((2,))
    other = entry(x, Op("sub", Scalar(1), IndexOf(i)))
    k.store(y, (i,), Op("sub", other, entry(x, i)))
    return k.kernel()


def _update_kernel():
    """``x += DT * y; y = 0`` at a node; multiples of powers of two, so that nothing is rounded."""
    k = KernelBuilder("update")
    x, y = k.argument(1), k.argument(1)
    k.store(x, dims_of((1,)), total(entry(x, 0), Op("mul", Scalar(DT), entry(y, 0))))
    k.store(y, dims_of((1,)), Scalar(0.0))
    return k.kernel()


FLUX, UPDATE = _flux_kernel(), _update_kernel()
TABLE = IndexTable(random_map(CELLS, 2, NODES, 3), NODES)
START = np.random.default_rng(1).integers(-8, 8, NODES).astype(float)


def diffusion(x, y, device, edges=TABLE):
    """The two loops of a step."""
    flux = Parloop(
        FLUX,
        IterationSet(CELLS),
        [Argument.indirect(y, INC, edges, "y"), Argument.indirect(x, READ, edges, "x")],
    )
    update = Parloop(
        UPDATE,
        IterationSet(NODES),
        [Argument.direct(x, RW, "x"), Argument.direct(y, RW, "y")],
    )
    return (
        engine.compile(flux, device, Schedule("segmented")),
        engine.compile(update, device, Schedule("colour")),
    )


def expected(steps):
    """The same in numpy."""
    x = START.copy()
    first, second = TABLE.values.T
    for _ in range(steps):
        y = np.zeros(NODES)
        np.add.at(y, first, x[second] - x[first])
        np.add.at(y, second, x[first] - x[second])
        x += DT * y
    return x


# offsets of the targets of the segmented loop, and the numbers of their contributions
PLAN_BYTES = 4 * (NODES + 1) + 4 * TABLE.values.size


def test_a_hundred_steps_move_tables_once_and_fields_when_they_are_read(vulkan):
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    field = x.array.nbytes
    before = traffic("vulkan:0")
    flux, update = diffusion(x.array, y.array, vulkan)
    for step in range(100):
        flux()
        update()
        if step == 2:
            np.testing.assert_array_equal(x.data_ro, expected(3))
            # reading twice copies once
            assert x.data_ro.sum() == expected(3).sum()
    moved = traffic("vulkan:0") - before
    # the colours of the update are one list of all nodes
    assert moved.to_device == TABLE.values.nbytes + PLAN_BYTES + 4 * NODES + 2 * field
    assert moved.to_host == field
    assert flux.traffic + update.traffic == Traffic(moved.to_device, 0)
    assert np.isfinite(x.data_ro).all()
    assert traffic("vulkan:0") - before == Traffic(moved.to_device, 2 * field)
    total_moved = traffic("vulkan:0")
    assert report_as_dict()["bytes_moved"]["vulkan:0"] == {
        "to_device": total_moved.to_device,
        "to_host": total_moved.to_host,
    }


def test_plain_arrays_are_copied_at_each_call(vulkan):
    x, y = START.copy(), np.zeros(NODES)
    _, update = diffusion(x, y, vulkan)
    before = update.traffic
    for _ in range(3):
        update()
    assert update.traffic - before == Traffic(6 * x.nbytes, 6 * x.nbytes)
    y[:] = 2.0
    update()
    np.testing.assert_array_equal(x, START + 2.0 * DT)


def test_what_the_host_writes_reaches_the_device(vulkan):
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    _, update = diffusion(x.array, y.array, vulkan)
    update()
    y.data[3] = 4.0
    update()
    assert x.data_ro[3] == START[3] + 4.0 * DT
    x.data_wo[:] = 7.0
    update()
    np.testing.assert_array_equal(x.data_ro, 7.0)
    assert float(np.asarray(x).max()) == 7.0


def test_writing_everything_brings_nothing_back(vulkan):
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    _, update = diffusion(x.array, y.array, vulkan)
    update()
    before = traffic()
    x.data_wo[:] = 1.0
    assert traffic() == before


def test_what_is_read_cannot_be_written():
    x = Resident(np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        x.data_ro[0] = 1.0


def test_tables_are_on_the_device_once_for_all_loops(vulkan):
    x, y, z = (Resident(np.zeros(NODES)) for _ in range(3))
    first = diffusion(x.array, y.array, vulkan)
    first[0]()
    before = traffic("vulkan:0")
    second = diffusion(x.array, z.array, vulkan)
    second[0]()
    moved = traffic("vulkan:0") - before
    assert moved.to_device < TABLE.values.nbytes + z.array.nbytes + PLAN_BYTES + 1
    assert moved.to_device >= z.array.nbytes


def test_loops_on_the_cpu_and_on_a_device_take_turns(vulkan):
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    here, there = (diffusion(x.array, y.array, device) for device in ("cpu", vulkan))
    for step in range(6):
        flux = (here if step % 2 else there)[0]
        update = (here if step % 3 else there)[1]
        flux()
        update()
    np.testing.assert_array_equal(x.data_ro, expected(6))


def test_loops_on_the_cpu_alone_copy_nothing():
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    before = traffic()
    for loop in diffusion(x.array, y.array, "cpu"):
        loop()
    np.testing.assert_array_equal(x.data_ro, expected(1))
    assert traffic() == before


def test_contents_stay_when_the_loops_are_gone(vulkan):
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    loops = diffusion(x.array, y.array, vulkan)
    for loop in loops:
        loop()
    del loop, loops
    gc.collect()
    np.testing.assert_array_equal(x.data_ro, expected(1))


def test_rows_move_alone(vulkan):
    """As a halo exchange does it."""
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    _, update = diffusion(x.array, y.array, vulkan)
    y.data[:] = 2.0
    update()
    before = traffic("vulkan:0")
    np.testing.assert_array_equal(x.to_host(4, 7), START[4:7] + 2.0 * DT)
    x.to_devices(10, 12, [5.0, 6.0])
    assert traffic("vulkan:0") - before == Traffic(2 * 8, 3 * 8)
    update()
    result = START + 2.0 * DT
    result[10:12] = 5.0, 6.0
    np.testing.assert_array_equal(x.data_ro, result)


def test_rows_beyond_the_array_are_refused():
    with pytest.raises(ValueError, match="rows 2 to 9 of an array of 3"):
        Resident(np.zeros(3)).to_devices(2, 9, 0.0)


def test_parts_of_a_resident_array_are_refused(vulkan):
    whole = np.zeros(2 * NODES)
    resident = Resident(whole)
    with pytest.raises(
        DeviceError, match=r"loop flux, operand \d: .*shares memory with a resident"
    ):
        diffusion(whole[:NODES], np.zeros(NODES), vulkan)
    with pytest.raises(DeviceError, match="resident already"):
        Resident(whole)
    del resident


WHEN = pytest.mark.parametrize("when", ["submitted", "at work"])


@WHEN
def test_a_loop_that_fails_leaves_the_host_as_it_was(vulkan, monkeypatch, when):
    x, y = START.copy(), np.zeros(NODES)
    _, update = diffusion(x, y, vulkan)
    update()
    _lose_the_device(monkeypatch, when)
    y[:] = 3.0
    with pytest.raises(DeviceError, match=r"loop update: call on vulkan:0 .* failed: .*lost"):
        update()
    np.testing.assert_array_equal(x, START)
    np.testing.assert_array_equal(y, 3.0)


@WHEN
def test_contents_that_were_lost_with_a_device_are_not_taken_for_good_ones(
    vulkan, monkeypatch, when
):
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    _, update = diffusion(x.array, y.array, vulkan)
    y.data[:] = 2.0
    update()
    np.testing.assert_array_equal(y.data_ro, 0.0)
    with monkeypatch.context() as broken:
        _lose_the_device(broken, when)
        with pytest.raises(DeviceError, match="loop update"):
            update()
    # y had been read; of x only the device had the latest
    np.testing.assert_array_equal(y.data_ro, 0.0)
    with pytest.raises(DeviceError, match=r"shape \(30,\) were on vulkan:0 .*data_wo"):
        _ = x.data_ro
    x.data_wo[:] = 1.0
    y.data_wo[:] = 2.0
    update()
    np.testing.assert_array_equal(x.data_ro, 2.0)


class Gone:
    """What calls a device that is gone."""

    def invoke(self, *_):
        raise RuntimeError("runtime/src/iree/hal/x.c:1: UNAVAILABLE; device lost")


def _lose_the_device(monkeypatch, when):
    """Have calls fail as they do when a device is gone: no device can be lost on demand."""
    submit = BoundFunction.submit

    def lost(self, *integers):
        kept, self.executable._context = self.executable._context, Gone()
        try:
            submit(self, *integers)
        finally:
            self.executable._context = kept

    def never(self):
        if self._semaphore is not None and self._waited != self._last:
            self._semaphore.wait(self._last)
            self._semaphore = None
            Gone().invoke()

    if when == "submitted":
        monkeypatch.setattr(BoundFunction, "submit", lost)
    else:
        monkeypatch.setattr(Timeline, "wait", never)


def test_submitted_loops_follow_each_other(vulkan):
    """Without the host in between; it waits when someone looks."""
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    steps = diffusion(x.array, y.array, vulkan)
    for _ in range(10):
        for step in steps:
            step.submit()
    np.testing.assert_array_equal(x.data_ro, expected(10))
    steps[0].wait()


def test_a_call_that_is_not_submitted_leaves_the_device_usable(vulkan):
    """Nothing waits for a fence that nobody signals."""
    x, y = START.copy(), np.zeros(NODES)
    flux, update = diffusion(x, y, vulkan)
    with pytest.raises(RuntimeError, match="on purpose"), vulkan.timeline.step():
        raise RuntimeError("on purpose")
    flux()
    update()
    np.testing.assert_array_equal(x, expected(1))


def test_tuning_leaves_resident_arrays_alone_and_starts_from_the_latest(vulkan, cache_dir):
    x, y = Resident(START.copy()), Resident(np.zeros(NODES))
    flux, update = diffusion(x.array, y.array, vulkan)
    y.data[:] = 2.0
    update()
    before = x.data_ro.copy()
    options = Options.resolve(tune="force", tune_budget=20, batching="blocked")
    choice = engine.choose_schedule(flux.parloop, vulkan, options)
    assert choice.schedule.strategy in ("segmented", "colour")
    np.testing.assert_array_equal(x.data_ro, before)
    np.testing.assert_array_equal(y.data_ro, 0.0)


def test_memory_of_another_owner_is_used_in_place(vulkan):
    """Whoever owns memory on a device sees what loops do to it, and nothing of it is copied."""
    x, y = START.copy(), np.zeros(NODES)
    owned = [device_copy(array, vulkan) for array in (x, y)]
    for copy in owned:
        copy.prepare()
    adopted = [adopt(copy.memory, NODES, np.float64, vulkan) for copy in owned]
    steps = diffusion(*(array for array, _ in adopted), vulkan)
    before = traffic("vulkan:0")
    for _ in range(3):
        for step in steps:
            step()
    moved = traffic("vulkan:0") - before
    # not one of these arrays: the numbers of contributions are sent at the first call
    assert moved.to_host == 0
    for copy in owned:
        copy.fetch(0, x.nbytes)
    np.testing.assert_array_equal(x, expected(3))
    assert all(not array.any() for array, _ in adopted)
    # the tuner, which works on copies, begins with what is there
    np.testing.assert_array_equal(latest(adopted[0][0], vulkan), expected(3))

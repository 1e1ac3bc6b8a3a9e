"""Compiled loops against the sequential reference: every strategy, access mode, kind and dtype.

Most data are small whole numbers, so that sums and products are exact in every dtype and whatever
the order, and results must be equal. Where rounding matters, all terms are positive and the bound
is one rounding a term.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import scipy.special
from builder import KernelBuilder, dims_of, entry, total
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from loops import every_access, random_loop, whole
from meshes import one_cell_periodic, random_map
from reference import evaluate_kernel, gather, run_parloop_reference

from pyop3_mlir import engine
from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels.program import IndexOf, Load, Op, Scalar, Table
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    READ,
    RW,
    WRITE,
    Argument,
    IndexTable,
    IterationSet,
    Kind,
    Parloop,
)
from pyop3_mlir.planning import csr_pattern, csr_positions
from pyop3_mlir.runtime.compile import compilations

STRATEGIES = ("in_order", "colour", "segmented")

strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def differences(ours, theirs):
    """Names of the arguments whose arrays differ, with the number of entries that do."""
    found = {}
    for number, (a, b) in enumerate(zip(ours.arguments, theirs.arguments, strict=True)):
        wrong = ~((a.buffer == b.buffer) | ((a.buffer != a.buffer) & (b.buffer != b.buffer)))
        if wrong.any():
            found[f"{number} {a.name} {a.kind.value} {a.access.name}"] = int(wrong.sum())
    return found


def run_at_once(loop):
    """The meaning of a loop in which no cell reads or stores over what another one changed."""
    entities = loop.iteration_set.entities
    entities = np.arange(loop.iteration_set.size) if entities is None else entities
    packs = [gather(argument, entities) for argument in loop.arguments]
    changed = evaluate_kernel(loop.kernel, packs)
    for formal, argument in zip(loop.kernel.arguments, loop.arguments, strict=True):
        if formal not in changed:
            continue
        rows = np.zeros((len(entities), 1), int)
        if argument.kind is not Kind.GLOBAL:
            rows = entities[:, None] if argument.table is None else argument.table.values[entities]
        at = rows[:, :, None] * argument.stride + argument.offset + np.arange(argument.components)
        flat, new = argument.buffer.reshape(-1), changed[formal].reshape(at.shape)
        if argument.access in (WRITE, RW):
            # of several values for one place numpy keeps the last
            flat[at.ravel()] = new.ravel()
        else:
            {INC: np.add, MIN: np.minimum, MAX: np.maximum}[argument.access].at(flat, at, new)


def check_at_once(make, schedule, device):
    """As :func:`check`, faster, for large loops."""
    ours, theirs = make(), make()
    engine.compile(ours, device, schedule)()
    run_at_once(theirs)
    assert differences(ours, theirs) == {}


def test_both_references_agree():
    first, second = every_access("float64"), every_access("float64")
    run_parloop_reference(first)
    run_at_once(second)
    assert differences(first, second) == {}


def check(make, schedule, device="cpu", start=0, stop=None):
    """Run a loop and its reference on equal data; everything must be equal."""
    ours, theirs = make(), make()
    engine.compile(ours, device, schedule)(start, stop)
    run_parloop_reference(theirs, start, stop)
    assert differences(ours, theirs) == {}


# ---------------------------------------------------------------------------------------------
# One loop with every access mode and kind


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "complex128", "complex64", "int32", "uint32", "int64"]
)
def test_every_access_mode_and_kind(dtype):
    check(lambda: every_access(dtype), Schedule())


@pytest.mark.parametrize("dtype", ["float64", "complex64", "uint32"])
def test_every_access_mode_and_kind_by_segments(dtype):
    check(lambda: every_access(dtype), Schedule("segmented"))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_every_access_mode_and_kind_by_colour(dtype):
    check(lambda: every_access(dtype), Schedule("colour"))


@pytest.mark.parametrize("dtype", ["float64", "complex64", "int64"])
def test_every_access_mode_and_kind_with_flat_batching(dtype):
    check(lambda: every_access(dtype), Schedule("in_order", "flat"))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 8, 1), (4, 3, 16), (12, 5, 4)], ids=lambda s: "W{}-T{}-U{}".format(*s)
)
def test_every_shape_of_blocks(shape):
    width, tile, unroll = shape
    check(lambda: every_access("float64"), Schedule("in_order", "blocked", width, tile, unroll))


# ---------------------------------------------------------------------------------------------
# One small kernel on all sorts of iteration sets and maps

MATRIX = np.array([[2, -1, 3], [0, 4, 1], [-2, 5, 1]])


def action():
    """``y = d * (MATRIX @ x)``; y and x have three rows, d is the cell's own."""
    k = KernelBuilder("action")
    y, x, d = (k.argument(n) for n in (3, 3, 1))
    i, j = dims_of((3, 3))
    matrix = Table(MATRIX.astype(float))
    product = k.compute((i,), Op("mul", entry(matrix, i, j), entry(x, j)), over=(j,))
    k.store(y, (i,), Op("mul", entry(product, i), entry(d, 0)))
    return k.kernel()


ACTION = action()


def action_loop(values, targets, iterations=None, access=INC, negative=False, seed=3):
    rng = np.random.default_rng(seed)
    table = IndexTable(values, targets, allow_negative=negative)
    extent = len(values)
    return Parloop(
        ACTION,
        iterations or IterationSet(extent),
        [
            Argument.indirect(whole(rng, targets, float), access, table, "y"),
            Argument.indirect(whole(rng, targets, float), READ, table, "x"),
            Argument.direct(whole(rng, extent, float), READ, "d"),
        ],
    )


@strategies
@pytest.mark.parametrize("cells", [0, 1, 2, 7, 8, 9, 16, 41])
def test_any_number_of_cells(strategy, cells):
    values = random_map(cells, 3, 9, cells)
    check(lambda: action_loop(values, 9), Schedule(strategy))


@strategies
def test_range_of_iterations(strategy):
    values = random_map(41, 3, 19, 1)
    ours, theirs = action_loop(values, 19), action_loop(values, 19)
    loop = engine.compile(ours, "cpu", Schedule(strategy))
    for start, stop in [(0, 0), (0, 5), (3, 20), (5, 6), (40, 41), (3, 20), (41, 41), (0, 41)]:
        loop(start, stop)
        run_parloop_reference(theirs, start, stop)
        assert differences(ours, theirs) == {}, (start, stop)


@strategies
def test_owned_entities_by_default(strategy):
    values = random_map(30, 3, 19, 1)
    check(lambda: action_loop(values, 19, IterationSet(30, core=10, owned=17)), Schedule(strategy))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 42)])
def test_range_beyond_the_set_is_refused(start, stop):
    loop = engine.compile(action_loop(random_map(41, 3, 19, 1), 19), "cpu", Schedule())
    with pytest.raises(ValueError, match="not within cells, which has 41"):
        loop(start, stop)


@strategies
@pytest.mark.parametrize(("start", "stop"), [(20, 23), (0, 3), (17, 33)])
def test_a_range_touches_nothing_but_its_own_targets(strategy, start, stop):
    """Blocks reach beyond a short range: what they add there must leave -0.0 and NaN alone."""
    values = np.arange(41 * 3).reshape(41, 3)
    loop = action_loop(values, values.size)
    y = loop.arguments[0].buffer
    y[...] = -0.0
    y[1::2] = np.nan
    before = y.copy()
    engine.compile(loop, "cpu", Schedule(strategy))(start, stop)
    outside = np.r_[: 3 * start, 3 * stop : y.size]
    assert y[outside].tobytes() == before[outside].tobytes()
    assert y[3 * start : 3 * stop].tobytes() != before[3 * start : 3 * stop].tobytes()


@strategies
@pytest.mark.parametrize("what", ["ascending", "permuted", "repeated"])
def test_subset(strategy, what):
    rng = np.random.default_rng(8)
    entities = {
        "ascending": np.arange(1, 30, 3),
        "permuted": rng.permutation(33)[:21],
        "repeated": rng.integers(0, 33, 27),
    }[what].astype(np.int32)
    values = random_map(33, 3, 15, 4)
    iterations = IterationSet(len(entities), entities=entities)
    check(lambda: action_loop(values, 15, iterations), Schedule(strategy))
    check(lambda: action_loop(values, 15, iterations), Schedule(strategy), start=2, stop=9)


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_one_cell_periodic_mesh(strategy, access):
    check(lambda: action_loop(one_cell_periodic(3), 1, access=access), Schedule(strategy))


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_targets_that_no_cell_touches_keep_their_values(strategy, access):
    values = random_map(20, 3, 9, 2) * 3
    check(lambda: action_loop(values, 40, access=access), Schedule(strategy))


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_negative_entries_read_as_zero_and_are_dropped(strategy, access):
    values = random_map(43, 3, 17, 6, negative=0.3)
    check(lambda: action_loop(values, 17, access=access, negative=True), Schedule(strategy))


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_tables_of_int64(strategy, access):
    values = random_map(43, 3, 17, 6, dtype=np.int64)
    check(lambda: action_loop(values, 17, access=access), Schedule(strategy))


@strategies
def test_last_cell_wins_where_targets_are_shared(strategy):
    values = random_map(50, 3, 8, 12)
    check(lambda: action_loop(values, 8, access=WRITE), Schedule(strategy))
    check(lambda: action_loop(values, 8, access=WRITE), Schedule(strategy), start=5, stop=13)


@strategies
def test_last_visit_wins_in_a_subset(strategy):
    entities = np.random.default_rng(1).integers(0, 30, 40).astype(np.int32)
    values = random_map(30, 3, 11, 12)
    iterations = IterationSet(40, entities=entities)
    check(lambda: action_loop(values, 11, iterations, WRITE), Schedule(strategy))


@strategies
def test_map_of_no_rows(strategy):
    def make():
        rng = np.random.default_rng(1)
        k = KernelBuilder("no_rows")
        x, y, z = k.argument(0), k.argument(0), k.argument(2)
        i, j = dims_of((2, 0))
        none = k.compute((j,), Op("add", entry(x, j), Scalar(1.0)))
        k.output(y, none)
        value = k.compute((i,), Op("mul", entry(x, j), Scalar(3.0)), over=(j,))
        k.store(z, (i,), Op("sub", entry(value, i), Scalar(2.0)))
        table = IndexTable(np.zeros((11, 0), np.int32), 5)
        return Parloop(
            k.kernel(),
            IterationSet(11),
            [
                Argument.indirect(whole(rng, 5, float), READ, table),
                Argument.indirect(whole(rng, 5, float), INC, table),
                Argument.direct(whole(rng, (11, 2), float), INC),
            ],
        )

    check(make, Schedule(strategy))


# ---------------------------------------------------------------------------------------------
# Views and shared buffers


def scaling(*shape, factor=1.0):
    """``y = factor * d * x``; d is the cell's own."""
    k = KernelBuilder("scaling")
    y, x, d = k.argument(*shape), k.argument(*shape), k.argument(1)
    dims = dims_of(shape)
    k.store(y, dims, Op("mul", Op("mul", Scalar(factor), entry(d, 0)), entry(x, *dims)))
    return k.kernel()


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_components_of_a_wider_array(strategy, access):
    kernel = scaling(3, 2, factor=3.0)

    def make():
        rng = np.random.default_rng(4)
        table = IndexTable(random_map(29, 3, 13, 5), 13)
        y, x = whole(rng, (13, 5), float), whole(rng, (13, 4), float)
        return Parloop(
            kernel,
            IterationSet(29),
            [
                Argument(y, access, Kind.INDIRECT, table, 2, 5, 3),
                Argument(x, READ, Kind.INDIRECT, table, 2, 4, 1),
                Argument.direct(whole(rng, 29, float), READ),
            ],
        )

    check(make, Schedule(strategy))


@strategies
@pytest.mark.parametrize("access", [INC, WRITE, MAX], ids=["INC", "WRITE", "MAX"])
def test_tables_of_scaled_offsets(strategy, access):
    """Rows may overlap: entries 4 and 5 with two components share scalar 5."""
    kernel = scaling(3, 2, factor=3.0)

    def make():
        rng = np.random.default_rng(4)
        table = IndexTable(random_map(29, 3, 20, 5), 20)
        y, x = whole(rng, 21, float), whole(rng, 21, float)
        return Parloop(
            kernel,
            IterationSet(29),
            [
                Argument(y, access, Kind.INDIRECT, table, 2, 1),
                Argument(x, READ, Kind.INDIRECT, table, 2, 1),
                Argument.direct(whole(rng, 29, float), READ),
            ],
        )

    check(make, Schedule(strategy))


@strategies
def test_direct_rows_of_a_wider_array(strategy):
    kernel = scaling(2, factor=3.0)

    def make():
        rng = np.random.default_rng(4)
        y, x = whole(rng, (29, 5), float), whole(rng, (29, 3), float)
        return Parloop(
            kernel,
            IterationSet(29),
            [
                Argument(y, INC, Kind.DIRECT, None, 2, 5, 3),
                Argument(x, READ, Kind.DIRECT, None, 2, 3, 1),
                Argument.direct(whole(rng, 29, float), READ),
            ],
        )

    check(make, Schedule(strategy))


def two_writers(access, first, second, components=(1, 1), offsets=(0, 0)):
    """Two arguments that change one array."""
    k = KernelBuilder("two_writers")
    y, z, x = k.argument(2), k.argument(2), k.argument(2)
    (i,) = dims_of((2,))
    k.store(y, (i,), Op("mul", Scalar(2.0), entry(x, i)))
    k.store(z, (i,), Op("sub", entry(x, i), Scalar(1.0)))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(9)
        tables = [IndexTable(random_map(31, 2, n, seed), n) for n, seed in (first, second)]
        if first == second:
            tables[1] = tables[0]
        buffer = whole(rng, 40, float)
        return Parloop(
            kernel,
            IterationSet(31),
            [
                Argument(buffer, access, Kind.INDIRECT, tables[0], 1, 2, offsets[0]),
                Argument(buffer, access, Kind.INDIRECT, tables[1], 1, 2, offsets[1]),
                Argument.direct(whole(rng, (31, 2), float), READ),
            ],
        )

    return make


@strategies
@pytest.mark.parametrize("access", [INC, WRITE, MIN], ids=["INC", "WRITE", "MIN"])
def test_two_arguments_change_one_array(strategy, access):
    check(two_writers(access, (15, 1), (17, 2)), Schedule(strategy))


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_two_arguments_change_components_of_one_array(strategy, access):
    check(two_writers(access, (15, 1), (15, 1), offsets=(0, 1)), Schedule(strategy))


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_one_array_changed_directly_and_through_a_map(strategy, access):
    k = KernelBuilder("direct_and_indirect")
    y, z, x = k.argument(1), k.argument(2), k.argument(2)
    (i,) = dims_of((2,))
    k.store(y, dims_of((1,)), Op("mul", Scalar(2.0), entry(x, 0)))
    k.store(z, (i,), Op("sub", entry(x, i), Scalar(1.0)))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(9)
        buffer = whole(rng, (31, 1), float)
        table = IndexTable(random_map(31, 2, 31, 3), 31)
        return Parloop(
            kernel,
            IterationSet(31),
            [
                Argument.direct(buffer, access),
                Argument.indirect(buffer, access, table),
                Argument.direct(whole(rng, (31, 2), float), READ),
            ],
        )

    check(make, Schedule(strategy))


@strategies
def test_one_array_read_through_two_maps(strategy):
    k = KernelBuilder("two_readers")
    y, x, z = k.argument(2), k.argument(2), k.argument(3)
    i, j = dims_of((2, 3))
    k.store(
        y,
        (i,),
        entry(k.compute((i,), Op("mul", entry(x, i), entry(z, j)), over=(j,)), i),
    )
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(9)
        buffer = whole(rng, 20, float)
        tables = [IndexTable(random_map(31, n, 20, n), 20) for n in (2, 3)]
        return Parloop(
            kernel,
            IterationSet(31),
            [
                Argument.indirect(whole(rng, 20, float), INC, tables[0]),
                Argument.indirect(buffer, READ, tables[0]),
                Argument.indirect(buffer, READ, tables[1]),
            ],
        )

    check(make, Schedule(strategy))


@strategies
def test_components_read_beside_components_written(strategy):
    kernel = scaling(3, factor=3.0)

    def make():
        rng = np.random.default_rng(4)
        table = IndexTable(random_map(29, 3, 13, 5), 13)
        buffer = whole(rng, (13, 2), float)
        return Parloop(
            kernel,
            IterationSet(29),
            [
                Argument(buffer, INC, Kind.INDIRECT, table, 1, 2, 1),
                Argument(buffer, READ, Kind.INDIRECT, table, 1, 2, 0),
                Argument.direct(whole(rng, 29, float), READ),
            ],
        )

    check(make, Schedule(strategy))


def unaligned(array, offset):
    """The same values at an address that is a multiple of the item size and of nothing more."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset * array.itemsize
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@strategies
@pytest.mark.parametrize("offset", [1, 3])
def test_arrays_at_any_address_and_read_only(strategy, offset):
    def make():
        rng = np.random.default_rng(4)
        values = unaligned(random_map(43, 3, 17, 6), offset)
        table = IndexTable(values, 17)
        assert table.values is values
        y, x, d = (unaligned(whole(rng, n, float), offset) for n in (17, 17, 43))
        for array in (values, x, d):
            array.flags.writeable = False
        return Parloop(
            ACTION,
            IterationSet(43),
            [
                Argument.indirect(y, INC, table),
                Argument.indirect(x, READ, table),
                Argument.direct(d, READ),
            ],
        )

    check(make, Schedule(strategy))


# ---------------------------------------------------------------------------------------------
# What kernels give back


@strategies
def test_pieces_of_a_contribution_are_added_up(strategy):
    """Two pieces overlap, one entry has none, and slots are neither in order nor affine."""
    k = KernelBuilder("pieces")
    y, x = k.argument(6), k.argument(6)
    i, j = dims_of((3, 2))
    first = k.compute((i,), entry(x, i))
    second = k.compute((i, j), Op("mul", entry(x, i), Op("cast", IndexOf(j), dtype=float)))
    k.output(y, first, (i,), Op("mul", IndexOf(i), Scalar(2)))
    k.output(
        y, second, (i, j), Load(Table(np.array([[5, 0], [0, 2], [3, 5]])), [IndexOf(i), IndexOf(j)])
    )
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        table = IndexTable(random_map(27, 3, 11, 5), 11)
        return Parloop(
            kernel,
            IterationSet(27),
            [
                Argument.indirect(whole(rng, (11, 2), float), INC, table),
                Argument.indirect(whole(rng, (11, 2), float), READ, table),
            ],
        )

    check(make, Schedule(strategy))


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_transposed_output(strategy, access):
    k = KernelBuilder("transposed")
    y, x = k.argument(3, 2), k.argument(3, 2)
    c, i = dims_of((2, 3))
    value = k.compute((c, i), Op("mul", entry(x, i, c), Scalar(2.0)))
    k.output(y, value, (c, i), Op("add", Op("mul", IndexOf(i), Scalar(2)), IndexOf(c)))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        table = IndexTable(random_map(27, 3, 11, 5), 11)
        return Parloop(
            kernel,
            IterationSet(27),
            [
                Argument.indirect(whole(rng, (11, 2), float), access, table),
                Argument.indirect(whole(rng, (11, 2), float), READ, table),
            ],
        )

    check(make, Schedule(strategy))


@strategies
def test_arguments_that_the_kernel_leaves_alone(strategy):
    """What is not changed is written back as it was packed."""
    k = KernelBuilder("idle")
    for _ in range(5):
        k.argument(2)
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        table = IndexTable(random_map(9, 2, 11, 5), 11)
        return Parloop(
            kernel,
            IterationSet(9),
            [
                Argument.indirect(whole(rng, 11, float), INC, table),
                Argument.indirect(whole(rng, 11, float), READ, table),
                Argument.indirect(whole(rng, 11, float), MIN, table),
                Argument.indirect(whole(rng, 11, float), WRITE, table),
                Argument.direct(whole(rng, (9, 2), float), RW),
            ],
        )

    check(make, Schedule(strategy))


@strategies
def test_values_that_do_not_depend_on_the_cell(strategy):
    k = KernelBuilder("constants")
    y, z, g, n = k.argument(3), k.argument(2), k.argument(3), k.argument(1)
    (i,) = dims_of((3,))
    k.store(y, (i,), Op("mul", entry(g, i), Scalar(2.0)))
    k.store(z, dims_of((2,)), Scalar(7.0))
    k.store(n, dims_of((1,)), Scalar(1.0))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        table = IndexTable(random_map(27, 3, 11, 5), 11)
        return Parloop(
            kernel,
            IterationSet(27),
            [
                Argument.indirect(whole(rng, 11, float), INC, table),
                Argument.direct(whole(rng, (27, 2), float), WRITE),
                Argument.glob(whole(rng, 3, float), READ),
                Argument.glob(whole(rng, 1, float), INC),
            ],
        )

    check(make, Schedule(strategy))


@strategies
def test_packs_that_start_at_zero_can_be_read(strategy):
    k = KernelBuilder("zero_packs")
    y, z, x = k.argument(3), k.argument(3), k.argument(3)
    (i,) = dims_of((3,))
    k.store(y, (i,), total(entry(y, i), entry(x, i)))
    k.store(z, (i,), total(entry(z, i), entry(x, i)))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        table = IndexTable(random_map(27, 3, 11, 5), 11)
        return Parloop(
            kernel,
            IterationSet(27),
            [
                Argument.indirect(whole(rng, 11, float), INC, table),
                Argument.direct(whole(rng, (27, 3), float), WRITE),
                Argument.indirect(whole(rng, 11, float), READ, table),
            ],
        )

    check(make, Schedule(strategy))


# ---------------------------------------------------------------------------------------------
# Order


def smoothing():
    """Each cell replaces its nodes by a combination of them: what it sees depends on the order."""
    k = KernelBuilder("smoothing")
    y = k.argument(3)
    (i,) = dims_of((3,))
    last = Op("rem", Op("add", IndexOf(i), Scalar(2)), Scalar(3))
    k.store(y, (i,), Op("sub", entry(y, i), entry(y, last)))

    def make(cells=23, entities=None):
        rng = np.random.default_rng(2)
        table = IndexTable(random_map(cells, 3, 11, 5), 11)
        return Parloop(
            k.kernel(),
            IterationSet(cells if entities is None else len(entities), entities=entities),
            [Argument.indirect(whole(rng, 11, np.int32).astype(float), RW, table)],
        )

    return make


def test_cells_see_what_cells_before_them_stored():
    check(smoothing(), Schedule())


def test_visits_see_what_visits_before_them_stored():
    entities = np.array([3, 1, 3, 3, 0, 1], np.int32)
    check(lambda: smoothing()(entities=entities), Schedule())


@pytest.mark.parametrize(
    "schedule",
    [Schedule("colour"), Schedule("segmented"), Schedule("in_order", "flat")],
    ids=str,
)
def test_loops_that_depend_on_order_run_in_order_only(schedule):
    with pytest.raises(UnsupportedLoopError, match=r"loop smoothing: .*RW"):
        engine.compile(smoothing()(), "cpu", schedule)


# ---------------------------------------------------------------------------------------------
# Matrices


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
@pytest.mark.parametrize("arity", [3, 6])
def test_matrix(strategy, access, arity):
    """Against scipy's own assembly; boundary rows are dropped."""
    cells, nodes = 40, 14
    rng = np.random.default_rng(3)
    values = random_map(cells, arity, nodes, 3)
    rows = values.copy()
    rows[values < 3] = -1
    matrices = whole(rng, (cells, arity, arity), float)
    row_table = IndexTable(rows, nodes, allow_negative=True)
    column_table = IndexTable(values, nodes)
    indptr, indices = csr_pattern(row_table, column_table, nodes, nodes)
    positions = csr_positions(indptr, indices, row_table, column_table)
    # six columns are enough for offsets of a byte
    assert (positions.compact is not None) == (arity == 6)
    kernel = scaling(arity, arity)
    data = np.zeros(len(indices))
    loop = Parloop(
        kernel,
        IterationSet(cells),
        [
            Argument.matrix(data, access, positions, row_table),
            Argument.direct(matrices, READ),
            Argument.direct(np.ones(cells), READ),
        ],
    )
    engine.compile(loop, "cpu", Schedule(strategy))()
    expected = np.zeros((nodes, nodes))
    for cell in range(cells):
        for i, row in enumerate(rows[cell]):
            for j, column in enumerate(values[cell]):
                if row >= 0 and access is INC:
                    expected[row, column] += matrices[cell, i, j]
                elif row >= 0:
                    expected[row, column] = matrices[cell, i, j]
    found = scipy.sparse.csr_matrix((data, indices, indptr), (nodes, nodes)).toarray()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("reach", [200, 60_000])
@pytest.mark.parametrize("batching", ["blocked", "flat"])
@strategies
def test_compact_tables(strategy, batching, reach, negative):
    """Read and added to through offsets of one and of two bytes; each entry may be missing."""
    cells, groups, group, rows = 30, 2, 6, 100_000
    rng = np.random.default_rng(4)
    bases = rng.integers(0, rows - reach, (cells, groups, 1))
    offsets = rng.integers(0, reach, (cells, groups, group))
    values = (bases + offsets).astype(np.int32).reshape(cells, -1)
    # two cells that share all of their entries
    values[7] = values[3]
    if negative:
        values[rng.random(values.shape) < 0.3] = -1
        values[5, :group] = -1
    k = KernelBuilder("compact")
    y, x = k.argument(groups, group), k.argument(groups * group)
    i, j = dims_of((groups, group))
    number = Op("add", Op("mul", IndexOf(i), Scalar(group)), IndexOf(j))
    k.store(y, (i, j), Op("mul", Scalar(3.0), Load(x, [number])))
    kernel = k.kernel()
    data = whole(rng, rows, float)

    def make():
        table = IndexTable(values, rows, negative, group=group)
        assert table.compact is not None
        assert table.compact.offsets.itemsize == (1 if reach == 200 else 2)
        arguments = [
            Argument.indirect(np.zeros(rows), INC, table),
            Argument.indirect(data.copy(), READ, table),
        ]
        return Parloop(kernel, IterationSet(cells), arguments)

    check(make, Schedule(strategy, batching, width=4))


# ---------------------------------------------------------------------------------------------
# Inside kernels


@strategies
def test_indices_from_data(strategy):
    """A facet number chooses a row of a table and an entry of a temporary."""
    k = KernelBuilder("facets")
    y, x, facet, side = (
        k.argument(2),
        k.argument(3),
        k.argument(1, dtype=np.uint32),
        k.argument(1, dtype=np.int64),
    )
    i, j = dims_of((2, 3))
    number = Op("cast", entry(facet, 0), dtype=np.int64)
    basis = Table(np.arange(18.0).reshape(3, 2, 3))
    traced = k.compute((i,), Op("mul", entry(basis, number, i, j), entry(x, j)), over=(j,))
    doubled = k.compute((j,), Op("mul", entry(x, j), Scalar(2.0)))
    k.store(
        y,
        (i,),
        total(entry(traced, i), entry(doubled, number), entry(x, entry(side, 0))),
    )
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        table = IndexTable(random_map(27, 2, 11, 5), 11)
        return Parloop(
            kernel,
            IterationSet(27),
            [
                Argument.indirect(whole(rng, 11, float), INC, table),
                Argument.direct(whole(rng, (27, 3), float), READ),
                Argument.direct(rng.integers(0, 3, 27).astype(np.uint32), READ),
                Argument.direct(rng.integers(0, 3, 27), READ),
            ],
        )

    check(make, Schedule(strategy))


@pytest.mark.parametrize("batching", ["blocked", "flat"])
def test_branches_not_taken_may_be_nan(batching):
    k = KernelBuilder("guard")
    y, x = k.argument(3), k.argument(3)
    (i,) = dims_of((3,))
    positive = Op("gt", entry(x, i), Scalar(0.0))
    root = Op("select", positive, Op("sqrt", entry(x, i)), Scalar(np.nan))
    k.store(
        y,
        (i,),
        Op("select", Op("not", positive), Scalar(-1.0), Op("div", root, entry(x, i))),
    )
    kernel = k.kernel()

    def make():
        x = np.array([[4.0, -1.0, 0.0], [0.25, 16.0, -np.inf], [np.nan, 64.0, -0.0]])
        x = np.tile(x, (5, 1))
        return Parloop(
            kernel,
            IterationSet(15),
            [Argument.direct(np.zeros((15, 3)), WRITE), Argument.direct(x, READ)],
        )

    check(make, Schedule("in_order", batching))


@pytest.mark.parametrize("batching", ["blocked", "flat"])
def test_whole_numbers_divided_by_zero_in_a_branch_not_taken(batching):
    """C does not evaluate the branch; on x86 a division by zero ends the process."""
    k = KernelBuilder("guarded_division")
    outputs = [k.argument(1, dtype=np.int32) for _ in range(3)]
    a, b = (k.argument(1, dtype=np.int32) for _ in range(2))
    zero = Scalar(0, np.int32)
    for y, name in zip(outputs, ("div", "floordiv", "rem"), strict=True):
        quotient = Op(name, entry(a, 0), entry(b, 0))
        k.store(y, dims_of((1,)), Op("select", Op("ne", entry(b, 0), zero), quotient, zero))
    kernel = k.kernel()
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-20, 21, 64).astype(np.int32) for _ in range(2))
    b[::3] = 0
    results = [np.zeros(64, np.int32) for _ in range(3)]
    arguments = [Argument.direct(y, WRITE) for y in results]
    arguments += [Argument.direct(a, READ), Argument.direct(b, READ)]
    engine.run(Parloop(kernel, IterationSet(64), arguments), "cpu", Schedule())
    with np.errstate(all="ignore"):
        expected = [np.trunc(a / b), a // b, a % b]
    for y, e in zip(results, expected, strict=True):
        np.testing.assert_array_equal(y, np.where(b == 0, 0, e))


@pytest.mark.parametrize("width", [1, 8])
def test_temporaries_of_every_type(width):
    """Numbers of one type become others between statements and inside them."""
    k = KernelBuilder("types")
    y, x, n = k.argument(4), k.argument(4), k.argument(4, dtype=np.int32)
    i, j = dims_of((4, 4))
    above = k.compute((i,), Op("gt", entry(x, i), Scalar(0.0)))
    wide = k.compute((i,), Op("cast", entry(n, i), dtype=np.int64))
    count = k.compute(
        (),
        Op("select", entry(above, j), entry(wide, j), Scalar(0)),
        Op("cast", entry(n, j), dtype=np.uint32),
        Op("cast", entry(x, j), dtype=np.float32),
        over=(j,),
    )
    z = k.compute(
        (i,),
        Op("mul", Op("cast", entry(x, i), dtype=complex), Scalar(2 - 1j)),
    )
    any_above = k.compute((), Op("or", entry(above, 0), entry(above, 1)))
    terms = [
        Op("cast", entry(count[0]), dtype=float),
        Op("cast", entry(count[1]), dtype=float),
        Op("cast", entry(count[2]), dtype=float),
        Op("imag", entry(z, i)),
        Op("real", entry(z, i)),
        Op("select", entry(any_above), Scalar(10.0), Scalar(20.0)),
        Op("cast", entry(above, i), dtype=float),
    ]
    k.store(y, (i,), total(*terms))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        return Parloop(
            kernel,
            IterationSet(21),
            [
                Argument.direct(np.zeros((21, 4)), WRITE),
                Argument.direct(whole(rng, (21, 4), float), READ),
                Argument.direct(whole(rng, (21, 4), np.int32, 0), READ),
            ],
        )

    check(make, Schedule(width=width))


@pytest.mark.parametrize("batching", ["blocked", "flat"])
def test_complex_numbers_inside_a_real_statement(batching):
    k = KernelBuilder("inside")
    y, x = k.argument(2), k.argument(2)
    (i,) = dims_of((2,))
    shifted = total(Op("cast", entry(x, i), dtype=complex), Scalar(1j))
    k.store(y, (i,), Op("imag", Op("mul", shifted, shifted)))
    kernel = k.kernel()

    def make():
        x = whole(np.random.default_rng(2), (21, 2), float)
        arguments = [Argument.direct(np.zeros((21, 2)), WRITE), Argument.direct(x, READ)]
        return Parloop(kernel, IterationSet(21), arguments)

    check(make, Schedule(batching=batching))


@pytest.mark.parametrize("batching", ["blocked", "flat"])
def test_sums_of_what_does_not_depend_on_the_dimension(batching):
    k = KernelBuilder("idle_sums")
    y, z, x = k.argument(2), k.argument(2), k.argument(2)
    i, j, m, none = dims_of((2, 3, 5, 0))
    constant, value, proper = k.compute(
        (i,),
        Scalar(3.0),
        entry(x, i),
        Op("mul", entry(x, i), Op("cast", IndexOf(j), dtype=float)),
        over=(j, m),
    )
    k.store(y, (i,), total(*(entry(part, i) for part in (constant, value, proper))))
    k.store(z, (i,), entry(k.compute((i,), entry(x, i), over=(none,)), i))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(1)
        x, y, z = (whole(rng, (19, 2), float) for _ in range(3))
        arguments = [Argument.direct(y, WRITE), Argument.direct(z, WRITE)]
        return Parloop(kernel, IterationSet(19), [*arguments, Argument.direct(x, READ)])

    check(make, Schedule(batching=batching))


@pytest.mark.parametrize("batching", ["blocked", "flat"])
def test_sums_that_read_nothing_but_indices(batching):
    k = KernelBuilder("counting")
    outputs = [k.argument(3) for _ in range(4)]
    x = k.argument(1)
    i, j, m = dims_of((3, 4, 2))
    below = Op("select", Op("lt", IndexOf(j), IndexOf(i)), Scalar(1.0), Scalar(0.0))
    sums = [
        k.compute((i,), Op("cast", IndexOf(j), dtype=float), over=(j,)),
        k.compute((i,), Op("cast", Op("mul", IndexOf(i), IndexOf(j)), dtype=float), over=(j,)),
        k.compute((i,), Op("cast", total(IndexOf(m), IndexOf(j)), dtype=float), over=(j, m)),
        k.compute((i,), below, over=(j,)),
    ]
    for y, value in zip(outputs, sums, strict=True):
        k.store(y, (i,), Op("mul", entry(value, i), entry(x, 0)))
    found = [np.zeros((9, 3)) for _ in outputs]
    arguments = [Argument.direct(array, WRITE) for array in found]
    arguments.append(Argument.direct(np.full(9, 2.0), READ))
    loop = Parloop(k.kernel(), IterationSet(9), arguments)
    engine.run(loop, "cpu", Schedule(batching=batching))
    expected = [[12, 12, 12], [0, 12, 24], [32, 32, 32], [0, 2, 4]]
    for array, row in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, np.tile(row, (9, 1)))


@strategies
def test_part_of_an_array(strategy):
    """Dimensions that are shorter than the axes that they run over."""
    k = KernelBuilder("part")
    y, x = k.argument(2), k.argument(4, 3)
    i, j = dims_of((2, 3))
    row = k.compute((j,), Op("mul", entry(x, 3, j), Scalar(2.0)))
    value = k.compute((i,), Op("mul", entry(x, j, i), entry(row, i)), over=(j,))
    k.store(y, (i,), entry(value, i))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        table = IndexTable(random_map(21, 2, 9, 1), 9)
        arguments = [
            Argument.indirect(whole(rng, 9, float), INC, table),
            Argument.direct(whole(rng, (21, 12), float), READ),
        ]
        return Parloop(kernel, IterationSet(21), arguments)

    check(make, Schedule(strategy))


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "complex128", "complex64", "int32", "uint32", "int64", "bool"]
)
def test_tables_of_every_type(dtype):
    dtype = np.dtype(dtype)
    k = KernelBuilder("tables")
    result = np.dtype(np.int32) if dtype.kind == "b" else dtype
    y = k.argument(5, dtype=result)
    (i,) = dims_of((5,))
    values = {
        "f": [0.1, -np.inf, np.nan, 1e-300 if dtype.itemsize == 8 else 1e-40, -0.0],
        "c": [0.1 - 2j, complex(np.inf, -0.0), complex(0, np.nan), 1e-30j, -3],
        "i": [-1, np.iinfo(dtype).min if dtype.kind == "i" else 0, 3, 4, 5],
        "u": [2**32 - 1, 0, 3, 2**31, 5],
        "b": [True, False, True, True, False],
    }[dtype.kind]
    values = np.array(values).astype(dtype)
    k.store(y, (i,), Op("cast", entry(Table(values), i), dtype=result))
    found = np.zeros((9, 5), result)
    engine.run(
        Parloop(k.kernel(), IterationSet(9), [Argument.direct(found, WRITE)]), "cpu", Schedule()
    )
    expected = np.tile(values.astype(result), (9, 1))
    assert found.tobytes() == expected.tobytes() or np.isnan(values).any()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "complex128", "complex64", "int32", "uint32", "int64"]
)
def test_constants_of_every_type(dtype):
    dtype = np.dtype(dtype)
    values = {
        "f": [0.1, -np.inf, np.inf, 3.4e38, -0.0, np.nan],
        "c": [0.1 - 2j, complex(np.inf, -0.0), 1e-30j, -3, complex(np.nan, 1)],
        "i": [-1, np.iinfo(dtype).min if dtype.kind == "i" else 0, 3, 4],
        "u": [2**32 - 1, 0, 3, 2**31],
    }[dtype.kind]
    k = KernelBuilder("constants")
    ys = [k.argument(1, dtype=dtype) for _ in values]
    for y, value in zip(ys, values, strict=True):
        k.store(y, dims_of((1,)), Scalar(value, dtype))
    found = [np.zeros(3, dtype) for _ in values]
    loop = Parloop(k.kernel(), IterationSet(3), [Argument.direct(y, WRITE) for y in found])
    engine.run(loop, "cpu", Schedule())
    for y, value in zip(found, values, strict=True):
        assert np.isnan(value) or y.tobytes() == np.full(3, value, dtype).tobytes(), (y, value)
        np.testing.assert_array_equal(y, np.full(3, value, dtype))


# ---------------------------------------------------------------------------------------------
# Scalar operations


def apply(operations, arrays, width=8):
    """Every operation (a function of entries) on arrays, entry by entry."""
    k = KernelBuilder("operations")
    inputs = {name: k.argument(1, dtype=array.dtype) for name, array in arrays.items()}
    bodies = [
        make(*(entry(inputs[name], 0) for name in names)) for make, names in operations.values()
    ]
    outputs = [k.argument(1, dtype=body.dtype) for body in bodies]
    for output, body in zip(outputs, bodies, strict=True):
        k.store(output, dims_of((1,)), body)
    size = len(next(iter(arrays.values())))
    found = [np.zeros(size, body.dtype) for body in bodies]
    arguments = [Argument.direct(array, READ) for array in arrays.values()]
    arguments += [Argument.direct(array, WRITE) for array in found]
    engine.run(Parloop(k.kernel(), IterationSet(size), arguments), "cpu", Schedule(width=width))
    return dict(zip(operations, found, strict=True))


def named(name, *operands, dtype=None):
    return (lambda *entries: Op(name, *entries, dtype=dtype)), operands


def errors(found, expected):
    """Largest error of each function, in units of the last place of its value."""
    worst = {}
    for name, values in found.items():
        reference = expected[name]
        real = np.zeros(1, values.dtype).real.dtype
        with np.errstate(all="ignore"):
            size = np.maximum(np.abs(reference), np.finfo(real).tiny)
            error = np.abs(values - reference) / size / np.finfo(real).eps
        error[(values == reference) | ((values != values) & (reference != reference))] = 0
        worst[name] = float(np.nan_to_num(error, nan=np.inf).max())
    return worst


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_functions_of_real_numbers(dtype):
    """Against long double; erf is scipy's, good to one unit itself."""
    rng = np.random.default_rng(7)
    n = 999
    spread = np.exp(rng.uniform(-30, 3, n)) * rng.choice([-1, 1], n)
    arrays = {
        "x": np.where(rng.random(n) < 0.5, rng.uniform(-20, 20, n), spread),
        "y": rng.uniform(-8, 8, n),
        "unit": np.where(rng.random(n) < 0.5, rng.uniform(-1, 1, n), np.clip(spread, -1, 1)),
        "positive": np.exp(rng.uniform(-9, 9, n)),
    }
    arrays["x"][:4], arrays["positive"][:2] = (0.0, -0.0, 1.0, -1.0), (1.0, 0.25)
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    operands = {
        "exp": ["x"], "sin": ["x"], "cos": ["x"], "tan": ["x"], "sinh": ["x"], "cosh": ["x"],
        "tanh": ["x"], "atan": ["x"], "erf": ["x"], "asin": ["unit"], "acos": ["unit"],
        "abs": ["x"], "neg": ["x"], "sqrt": ["positive"], "log": ["positive"],
        "pow": ["positive", "y"], "atan2": ["x", "y"], "div": ["x", "y"], "add": ["x", "y"],
        "sub": ["x", "y"], "mul": ["x", "y"], "min": ["x", "y"], "max": ["x", "y"],
    }  # fmt: skip
    operations = {name: named(name, *names) for name, names in operands.items()}
    functions = {
        "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "abs": np.abs, "neg": np.negative,
        "pow": np.power, "atan2": np.arctan2, "div": np.divide, "add": np.add, "sub": np.subtract,
        "mul": np.multiply, "min": np.minimum, "max": np.maximum,
        "erf": lambda x: scipy.special.erf(x.astype(np.float64)),
    }  # fmt: skip
    exact = {name: array.astype(np.longdouble) for name, array in arrays.items()}
    expected = {
        name: functions.get(name, getattr(np, name, None))(*(exact[o] for o in names))
        for name, names in operands.items()
    }
    worst = errors(apply(operations, arrays), expected)
    # single precision: IREE's own tanh and erf
    allowed = {"tanh": 3.5, "erf": 3.0} if dtype == "float32" else {"tanh": 2.5}
    assert {k: v for k, v in worst.items() if v > allowed.get(k, 2.0)} == {}
    for name in ("abs", "neg", "div", "add", "sub", "mul", "min", "max"):
        assert worst[name] <= 0.5, name


def test_constant_powers():
    exponents = [0, 1, 2, 3, 7, 16, -1, -3, 0.5, 1.5, 17, -0.25]
    x = np.exp(np.random.default_rng(1).uniform(-2, 2, 50))
    operations = {
        str(p): ((lambda entry, p=p: Op("pow", entry, Scalar(float(p)))), ["x"]) for p in exponents
    }
    expected = {str(p): x.astype(np.longdouble) ** p for p in exponents}
    worst = errors(apply(operations, {"x": x}), expected)
    # a rounding for each multiplication
    assert {k: v for k, v in worst.items() if v > 8} == {}


@pytest.mark.parametrize("dtype", ["complex128", "complex64"])
def test_functions_of_complex_numbers(dtype):
    rng = np.random.default_rng(7)
    n = 600
    x = rng.uniform(-3, 3, n) + 1j * rng.uniform(-3, 3, n)
    x *= np.exp(rng.uniform(-8, 1, n))
    x[:100], x[100:200] = x[:100].real, 1j * x[100:200].imag
    arrays = {"x": x, "y": rng.uniform(-3, 3, n) + 1j * rng.uniform(-3, 3, n)}
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    unary = (
        "sqrt", "exp", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan",
        "abs", "conj", "neg", "real", "imag",
    )  # fmt: skip
    operations = {name: named(name, "x") for name in unary}
    operations |= {name: named(name, "x", "y") for name in ("pow", "div", "mul", "add", "sub")}
    operations["square"] = (lambda x, _: Op("pow", x, Scalar(2 + 0j, dtype))), ["x", "y"]
    operations["root"] = (lambda x, _: Op("pow", x, Scalar(0.5 + 0j, dtype))), ["x", "y"]
    x, y = (array.astype(np.clongdouble) for array in arrays.values())
    functions = {"abs": np.abs, "neg": np.negative} | ARCS
    expected = {name: functions.get(name, getattr(np, name, None))(x) for name in unary}
    expected |= {"pow": x**y, "div": x / y, "mul": x * y, "add": x + y, "sub": x - y}
    expected |= {"square": x * x, "root": np.sqrt(x)}
    worst = errors(apply(operations, arrays), expected)
    # the error of the exponent is multiplied by its size
    assert {k: v for k, v in worst.items() if v > (64 if k == "pow" else 3)} == {}


ARCS = {"asin": np.arcsin, "acos": np.arccos, "atan": np.arctan}


def test_inverse_functions_on_and_beside_their_cuts():
    """Both sides of each cut, where the sign of zero decides, branch points, and large numbers."""
    parts = [0.0, 0.5, 1.0, 1 + 1e-10, 2.0, 1e-20, 1e200]
    parts += [-part for part in parts]
    x = np.array([complex(a, b) for a in parts for b in parts])
    found = apply({name: named(name, "x") for name in ARCS}, {"x": x})
    for name, function in ARCS.items():
        with np.errstate(divide="ignore"):  # atan has poles
            expected = function(x)
        for part in ("real", "imag"):
            ours, theirs = getattr(found[name], part), getattr(expected, part)
            np.testing.assert_allclose(ours, theirs, rtol=4e-16, atol=1e-300, err_msg=name)
            np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs), err_msg=name)


def test_complex_functions_at_zero_and_on_the_cut():
    x = np.array([0, -1 + 0j, complex(-1, -0.0), 1e-300, -4], complex)
    y = np.array([0, 1, 1, 2, 0.5], complex)
    operations = {name: named(name, "x") for name in ("sqrt", "sin", "tanh", "exp")}
    operations["pow"] = named("pow", "x", "y")
    found = apply(operations, {"x": x, "y": y})
    for name in ("sqrt", "sin", "tanh", "exp"):
        np.testing.assert_allclose(found[name], getattr(np, name)(x), rtol=1e-15, atol=1e-300)
    np.testing.assert_allclose(found["pow"], [1, -1, -1, 0, 2j], rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_bessel_functions(dtype):
    x = np.linspace(0.05, 30, 301).astype(dtype)
    operations, expected = {}, {}
    for kind, function in (("j", scipy.special.jv), ("y", scipy.special.yv)):
        for order in (0, 1, 3):
            name = f"{kind}{order}"
            operations[name] = (
                (lambda entry, o=order, k=kind: Op(f"bessel_{k}", Scalar(o), entry)),
                ["x"],
            )
            expected[name] = function(order, x.astype(float))
    found = apply(operations, {"x": x})
    # near their zeros the functions are known to an absolute error only
    tolerance = 8 * np.finfo(dtype).eps
    for name, values in found.items():
        np.testing.assert_allclose(
            values, expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize(
    ("operation", "match"),
    [
        (lambda x: Op("bessel_i", Scalar(0), x), "bessel_i"),
        (lambda x: Op("erf", Op("cast", x, dtype=complex)), "erf of complex128"),
        (lambda x: Op("min", *[Op("cast", x, dtype=complex)] * 2), "min of complex128"),
    ],
)
def test_operations_that_do_not_exist_are_refused(operation, match):
    k = KernelBuilder("refused")
    y, x = k.argument(1), k.argument(1)
    k.store(y, dims_of((1,)), Op("abs", operation(entry(x, 0))))
    loop = Parloop(
        k.kernel(),
        IterationSet(2),
        [Argument.direct(np.zeros(2), WRITE), Argument.direct(np.zeros(2), READ)],
    )
    with pytest.raises(UnsupportedLoopError, match=match):
        engine.compile(loop, "cpu", Schedule())


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_operations_on_whole_numbers(dtype):
    """Division rounds towards zero, as C's does; floordiv and rem as Python's do."""
    rng = np.random.default_rng(3)
    low = 0 if dtype == "uint32" else -(2**31)
    x, y = (rng.integers(low, 2**31, 400).astype(dtype) for _ in range(2))
    y[::2] = rng.integers(max(low, -9), 9, 200)
    y[y == 0] = 7
    small = rng.integers(max(low, -1000), 1000, 400).astype(dtype)
    operations = {
        name: named(name, "x", "y")
        for name in ("add", "sub", "floordiv", "rem", "div", "min", "max")
    }
    operations["mul"] = named("mul", "small", "small")
    compare = ("lt", "le", "gt", "ge", "eq", "ne")
    operations |= {
        name: ((lambda a, b, n=name: Op("cast", Op(n, a, b), dtype=np.int32)), ["x", "y"])
        for name in compare
    }
    if dtype != "uint32":
        operations |= {"neg": named("neg", "x"), "abs": named("abs", "x")}
        x[x == low] = 5
    found = apply(operations, {"x": x, "y": y, "small": small})
    wide, other = x.astype(object), y.astype(object)
    expected = {
        "add": x + y, "sub": x - y, "floordiv": x // y, "rem": x % y, "mul": small * small,
        "min": np.minimum(x, y), "max": np.maximum(x, y), "neg": -x, "abs": np.abs(x),
        "div": [int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)
                for a, b in zip(wide, other, strict=True)],
        "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y,
    }  # fmt: skip
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_comparisons_and_logic_of_floats():
    """Comparisons with NaN are false but for ``ne``; min and max take the number, as C's do."""
    values = np.array([-1.0, -0.0, 0.0, 2.0, np.inf, -np.inf, np.nan])
    x, y = (grid.ravel() for grid in np.meshgrid(values, values))

    def as_number(make):
        return lambda a, b: Op("cast", make(a, b), dtype=float)

    zero = Scalar(0.0)
    operations = {
        name: (as_number(lambda a, b, n=name: Op(n, a, b)), ["x", "y"])
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
    }
    operations |= {
        name: (
            as_number(lambda a, b, n=name: Op(n, Op("gt", a, zero), Op("gt", b, zero))),
            ["x", "y"],
        )
        for name in ("and", "or")
    }
    operations["not"] = as_number(lambda a, b: Op("not", Op("gt", a, b))), ["x", "y"]
    operations |= {"min": named("min", "x", "y"), "max": named("max", "x", "y")}
    found = apply(operations, {"x": x, "y": y})
    with np.errstate(all="ignore"):
        expected = {
            "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y,
            "and": (x > 0) & (y > 0), "or": (x > 0) | (y > 0), "not": ~(x > y),
            "min": np.fmin(x, y), "max": np.fmax(x, y),
        }  # fmt: skip
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


TYPES = ("float64", "float32", "complex128", "complex64", "int32", "uint32", "int64", "bool")


@pytest.mark.parametrize("source", TYPES[:-1])
def test_casts(source):
    """As numpy's (and C's); floats that the target holds."""
    rng = np.random.default_rng(2)
    x = whole(rng, 64, source, -100, 100)
    x[:2] = 0
    if x.dtype.kind in "fc":
        x += np.float32(0.25)
        x[:2] = 0
    if x.dtype.kind in "iu":
        x[2:4] = 2**31 - 1
    if source == "uint32":
        x[4] = 2**32 - 1
    targets = [t for t in TYPES if t != source and not (t == "uint32" and source != "int64")]
    operations = {
        target: (
            (lambda a, t=target: Op("cast", Op("cast", a, dtype=t), dtype=np.int32))
            if target == "bool"
            else (lambda a, t=target: Op("cast", a, dtype=t)),
            ["x"],
        )
        for target in targets
    }
    found = apply(operations, {"x": x})
    for target, values in found.items():
        real = x.real if x.dtype.kind == "c" and np.dtype(target).kind not in "cb" else x
        np.testing.assert_array_equal(values, real.astype(target), err_msg=target)


def test_casts_of_large_floats_to_unsigned_numbers():
    x = np.array([0.0, 7.9, 2.0**31, 2.0**32 - 1])
    found = apply({"cast": named("cast", "x", dtype=np.uint32)}, {"x": x}, width=1)
    np.testing.assert_array_equal(found["cast"], x.astype(np.uint32))


# ---------------------------------------------------------------------------------------------
# Rounding and reproducibility


def positive_loop(seed=1, cells=700, targets=60):
    """Sums of positive terms, so that the relative error is bounded by the number of roundings."""
    rng = np.random.default_rng(seed)
    k = KernelBuilder("positive")
    y, x = k.argument(3), k.argument(3)
    i, j = dims_of((3, 3))
    matrix = np.random.default_rng(0).random((3, 3))
    value = k.compute((i,), Op("mul", entry(Table(matrix), i, j), entry(x, j)), over=(j,))
    k.output(y, value)
    table = IndexTable(random_map(cells, 3, targets, seed), targets)
    return matrix, Parloop(
        k.kernel(),
        IterationSet(cells),
        [
            Argument.indirect(np.zeros(targets), INC, table),
            Argument.indirect(rng.random(targets), READ, table),
        ],
    )


@strategies
@pytest.mark.parametrize("device", ["cpu", "cpu:2"])
def test_one_rounding_a_term(strategy, device):
    matrix, loop = positive_loop()
    engine.compile(loop, device, Schedule(strategy))()
    y, x = (argument.buffer for argument in loop.arguments)
    table = loop.arguments[0].table.values
    contributions = x[table].astype(np.longdouble) @ matrix.T.astype(np.longdouble)
    exact = np.zeros(len(y), np.longdouble)
    np.add.at(exact, table, contributions)
    terms = np.bincount(table.ravel(), minlength=len(y)) + 3
    assert (np.abs(y - exact) <= terms * np.finfo(float).eps * exact).all()


@strategies
@pytest.mark.parametrize("device", ["cpu", "cpu:2"])
def test_runs_are_equal_to_the_last_bit(strategy, device):
    results = set()
    _, loop = positive_loop(cells=5000, targets=300)
    bound = engine.compile(loop, device, Schedule(strategy))
    for _ in range(4):
        loop.arguments[0].buffer[...] = 0
        bound()
        results.add(loop.arguments[0].buffer.tobytes())
    assert len(results) == 1


# ---------------------------------------------------------------------------------------------
# Threads and sizes


def large_action(cells, targets, access, seed=5):
    """A loop, and what it makes of y by numpy (repeated entries: the last assignment stays)."""
    values = random_map(cells, 3, targets, seed)
    loop = action_loop(values, targets, access=access)
    y, x, d = (argument.buffer for argument in loop.arguments)
    contributions = (x[values] @ MATRIX.T) * d[:, None]
    expected = y.copy()
    if access is INC:
        np.add.at(expected, values, contributions)
    else:
        expected[values.ravel()] = contributions.ravel()
    return loop, expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_two_threads(strategy, access):
    loop, expected = large_action(7001, 900, access)
    engine.compile(loop, "cpu:2", Schedule(strategy))()
    np.testing.assert_array_equal(loop.arguments[0].buffer, expected)


def test_every_access_mode_and_kind_on_two_threads_with_segments():
    check_at_once(lambda: every_access("float64", 3000), Schedule("segmented"), "cpu:2")


def test_every_access_mode_and_kind_on_two_threads_by_colour():
    check_at_once(
        lambda: every_access("float64", 3000, reductions=False), Schedule("colour"), "cpu:2"
    )


@pytest.mark.parametrize("strategy", ["colour", "segmented"])
@pytest.mark.parametrize("access", [INC, WRITE, MAX], ids=["INC", "WRITE", "MAX"])
def test_entities_visited_often_on_two_threads(strategy, access):
    k = KernelBuilder("visits")
    y, x = k.argument(2), k.argument(2)
    (i,) = dims_of((2,))
    k.store(y, (i,), Op("mul", entry(x, i), Scalar(2.0)))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(2)
        entities = rng.integers(0, 5, 4000).astype(np.int32)
        return Parloop(
            kernel,
            IterationSet(4000, entities=entities),
            [
                Argument.direct(whole(rng, (5, 2), float), access),
                Argument.direct(whole(rng, (5, 2), float), READ),
            ],
        )

    check_at_once(make, Schedule(strategy), "cpu:2")


def test_reductions_by_colour_need_one_thread():
    with pytest.raises(UnsupportedLoopError, match="every entity contributes to a global"):
        engine.compile(every_access("float64"), "cpu:2", Schedule("colour"))


@pytest.fixture
def nothing_compiled(cache_dir, monkeypatch):
    """Empty caches of modules, on disk and in memory."""
    monkeypatch.setattr(engine, "_executables", {})


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("strategy", ["in_order", "segmented"])
def test_one_module_serves_a_hundred_cells_and_a_million(strategy):
    loop, expected = large_action(100, 70, INC)
    engine.compile(loop, "cpu", Schedule(strategy))()
    np.testing.assert_array_equal(loop.arguments[0].buffer, expected)
    before = compilations()
    loop, expected = large_action(1_000_000, 500_000, INC)
    engine.compile(loop, "cpu", Schedule(strategy))()
    np.testing.assert_array_equal(loop.arguments[0].buffer, expected)
    assert compilations() == before


@pytest.mark.usefixtures("nothing_compiled")
def test_a_module_serves_loops_of_any_name(monkeypatch):
    loop, _ = large_action(100, 70, INC)
    engine.compile(loop, "cpu", Schedule())
    before = compilations()
    monkeypatch.setattr(engine, "_executables", {})
    named = Parloop(loop.kernel, loop.iteration_set, loop.arguments, "another")
    engine.compile(named, "cpu", Schedule())
    assert compilations() == before


def test_large_temporaries_make_blocks_narrow():
    """An element matrix of 300 x 300 numbers: the stack has room for two cells.

    It is used by rows and by columns, so that no strip of it is enough.
    """
    size = 300
    k = KernelBuilder("large")
    y, x = k.argument(size), k.argument(size)
    i, j = dims_of((size, size))
    matrix = k.compute((i, j), Op("mul", entry(x, i), entry(x, j)))
    rows = k.compute((i,), total(entry(matrix, i, j), entry(matrix, j, i)), over=(j,))
    k.output(y, rows)
    rng = np.random.default_rng(3)
    x = whole(rng, (21, size), float)
    found = np.zeros((21, size))
    loop = Parloop(
        k.kernel(), IterationSet(21), [Argument.direct(found, WRITE), Argument.direct(x, READ)]
    )
    bound = engine.compile(loop, "cpu:2", Schedule())
    bound()
    assert bound.schedule.width == 2
    np.testing.assert_array_equal(found, 2 * x * x.sum(axis=1, keepdims=True))


def test_temporaries_beyond_the_stack_are_refused():
    k = KernelBuilder("huge")
    y = k.argument(1)
    i, j = dims_of((600, 600))
    matrix = k.compute((i, j), Op("cast", Op("mul", IndexOf(i), IndexOf(j)), dtype=float))
    both = total(entry(matrix, i, j), entry(matrix, j, i))
    k.output(y, k.compute(dims_of((1,)), both, over=(i, j)))
    loop = Parloop(k.kernel(), IterationSet(21), [Argument.direct(np.zeros(21), WRITE)])
    with pytest.raises(UnsupportedLoopError, match="temporaries take 2880008 bytes"):
        engine.compile(loop, "cpu", Schedule())


def test_one_complex_number_for_all_cells():
    """IREE has no pattern of 16 bytes to fill a buffer with between two dispatches."""
    k = KernelBuilder("number")
    y = k.argument(1, dtype=complex)
    k.output(y, k.compute((), entry(Table(np.array([1, -1j, 2])), 1)))
    kernel = k.kernel()

    def make():
        return Parloop(kernel, IterationSet(5), [Argument.direct(np.zeros(5, complex), WRITE)])

    check(make, Schedule("in_order", "flat"))


# ---------------------------------------------------------------------------------------------
# Any loop


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(STRATEGIES),
    st.sampled_from(["blocked 1 1 1", "blocked 4 3 2", "blocked 8 4 4", "blocked 3 2 8", "flat"]),
)
@example(3854, "in_order", "flat")  # complex numbers that are the same for all cells
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_loop(seed, strategy, how):
    batching, *shape = how.split()
    note(f"random_loop({seed})")
    check(random_loop(seed), Schedule(strategy, batching, *(int(number) for number in shape)))


@pytest.mark.parametrize("access", [MIN, MAX], ids=["MIN", "MAX"])
def test_packs_that_are_read_hold_what_earlier_cells_left(access):
    """Blocks once gathered a MIN argument before the cells before had stored theirs."""
    k = KernelBuilder("running")
    y, x, seen = k.argument(2), k.argument(2), k.argument(2)
    (i,) = dims_of((2,))
    k.store(y, (i,), Op(access.name.lower(), entry(y, i), entry(x, i)))
    k.store(seen, (i,), entry(y, i))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(4)
        table = IndexTable(random_map(40, 2, 7, 5), 7)
        return Parloop(
            kernel,
            IterationSet(40),
            [
                Argument.indirect(whole(rng, 7, float), access, table),
                Argument.direct(rng.random((40, 2)), READ),
                Argument.direct(np.zeros((40, 2)), WRITE),
            ],
        )

    assert make().order_dependent
    check(make, Schedule())
    with pytest.raises(UnsupportedLoopError, match="order"):
        engine.compile(make(), "cpu", Schedule("colour"))


@pytest.mark.parametrize("access", [MIN, MAX], ids=["MIN", "MAX"])
def test_plain_minima_need_no_order(access):
    k = KernelBuilder("limiter")
    y, x = k.argument(2), k.argument(2)
    (i,) = dims_of((2,))
    value = k.compute((i,), Op(access.name.lower(), entry(y, i), entry(x, i)))
    k.output(y, value, (i,), IndexOf(i))
    kernel = k.kernel()

    def make():
        rng = np.random.default_rng(4)
        table = IndexTable(random_map(40, 2, 7, 5), 7)
        arguments = [
            Argument.indirect(rng.random(7), access, table),
            Argument.direct(rng.random((40, 2)), READ),
        ]
        return Parloop(kernel, IterationSet(40), arguments)

    assert not make().order_dependent
    check(make, Schedule())

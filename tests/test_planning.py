"""Plans are compared with plain Python loops and with scipy's sparse matrices."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import (
    one_cell_periodic,
    periodic_interval,
    random_map,
    tetrahedra,
    triangles,
)

from pyop3_mlir.errors import InvalidLoopError, UnsupportedLoopError
from pyop3_mlir.kernels.program import KernelArgument, LocalKernel
from pyop3_mlir.parloop import INC, READ, RW, WRITE, Argument, IndexTable, IterationSet, Parloop
from pyop3_mlir.planning import (
    HUB,
    as_scalars,
    colour,
    colour_loop,
    coo_indices,
    csr_pattern,
    csr_positions,
    last_writer_table,
    last_writers,
    order_free,
    segments,
)

SIZES = st.integers(0, 40)
BOUNDS = st.integers(1, 30)


@st.composite
def maps(draw, rows=SIZES, targets=BOUNDS):
    size, bound = draw(rows), draw(targets)
    arity = draw(st.integers(0, 5))
    negative = draw(st.sampled_from([0.0, 0.3, 1.0]))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    values = random_map(size, arity, bound, draw(st.integers(0, 2**32 - 1)), negative, dtype)
    return IndexTable(values, bound, allow_negative=True)


@st.composite
def visits(draw, size):
    """Which entities to visit: all, or a list with repetitions; and where to start."""
    if draw(st.booleans()) or not size:
        return size, None, draw(st.integers(0, size))
    entities = draw(st.lists(st.integers(0, size - 1), max_size=2 * size))
    return len(entities), np.array(entities, np.int32), draw(st.integers(0, len(entities)))


def table_of(values, bound=None):
    values = np.asarray(values)
    return IndexTable(values, int(values.max()) + 1 if bound is None else bound, True)


def assert_colouring(colouring, tables, size, entities=None, start=0):
    visited = list(range(start, size)) if entities is None else list(entities[start:size])
    assert colouring.order.dtype == np.int32
    assert colouring.offsets[0] == 0
    assert colouring.offsets[-1] == len(visited)
    assert sorted(colouring.order.tolist()) == sorted(visited)
    assert (colouring.sizes > 0).all()
    for begin, end in zip(colouring.offsets[:-1], colouring.offsets[1:], strict=True):
        members = colouring.order[begin:end].tolist()
        seen = set()
        for entity in members:
            targets = {
                (key, t) for table, key in tables for t in table.values[entity].tolist() if t >= 0
            }
            assert not targets & seen
            seen |= targets


# ---------------------------------------------------------------------------------------------
# Colours


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_two_entities_of_a_colour_share_a_target(data):
    size = data.draw(st.integers(0, 40))
    tables = [
        (data.draw(maps(rows=st.just(size))), data.draw(st.sampled_from("ab")))
        for _ in range(data.draw(st.integers(0, 3)))
    ]
    size, entities, start = data.draw(visits(size))
    assert_colouring(colour(tables, size, entities, start), tables, size, entities, start)


@pytest.mark.parametrize("mesh", [triangles, tetrahedra], ids=["triangles", "tetrahedra"])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_colours_of_meshes_are_few_and_even(mesh, degree):
    _, _, nodes, count = mesh(8, degree)
    table = IndexTable(nodes, count)
    colouring = colour([(table, 0)], table.size)
    assert_colouring(colouring, [(table, 0)], table.size)
    degree = int(np.bincount(nodes.ravel()).max())
    assert degree <= len(colouring) <= 2 * degree
    assert colouring.sizes.max() <= 1.25 * table.size / len(colouring) + 1


def test_members_of_a_colour_ascend():
    _, _, nodes, count = triangles(20)
    colouring = colour([(IndexTable(nodes, count), 0)], len(nodes))
    for members in np.split(colouring.order, colouring.offsets[1:-1]):
        assert (np.diff(members) > 0).all()


def test_entities_without_common_targets_have_one_colour():
    table = table_of(np.arange(300).reshape(100, 3))
    assert len(colour([(table, 0)], 100)) == 1


def test_equal_numbers_of_two_buffers_are_different_targets():
    first, second = table_of([[0], [1]]), table_of([[1], [0]])
    assert len(colour([(first, "a"), (second, "b")], 2)) == 1
    assert len(colour([(first, "a"), (second, "a")], 2)) == 2


def test_colouring_is_repeatable():
    values = random_map(5000, 3, 2000, seed=1)
    first, second = (colour([(table_of(values), 0)], 5000) for _ in range(2))
    assert np.array_equal(first.order, second.order)
    assert np.array_equal(first.offsets, second.offsets)


def test_more_colours_than_bits_in_a_word():
    values = np.concatenate([np.repeat(np.arange(5), 200)[:, None], np.arange(1000)[:, None]], 1)
    table = IndexTable(values + np.array([0, 5]), 1005)
    colouring = colour([(table, 0)], 1000)
    assert_colouring(colouring, [(table, 0)], 1000)
    assert len(colouring) == 200


def test_entities_at_a_hub_get_colours_of_their_own():
    hub = HUB + 10
    values = np.zeros((hub + 500, 2), np.int32)
    values[:, 1] = np.arange(len(values)) + 1
    values[hub:, 0] = -1
    table = table_of(values)
    colouring = colour([(table, 0)], len(values))
    assert_colouring(colouring, [(table, 0)], len(values))
    assert len(colouring) == hub + 1


def test_few_targets_of_very_many_take_little_memory():
    table = IndexTable(np.array([[10**14, 3], [3, 10**15], [5, 7]]), 10**16)
    assert_colouring(colour([(table, 0)], 3), [(table, 0)], 3)


@pytest.mark.parametrize("arity", [1, 2, 3, 10])
def test_a_target_may_occur_twice_in_one_cell(arity):
    table = table_of(one_cell_periodic(arity))
    assert colour([(table, 0)], 1).order.tolist() == [0]


def test_periodic_interval():
    table = table_of(periodic_interval(6, 2))
    colouring = colour([(table, 0)], 6)
    assert_colouring(colouring, [(table, 0)], 6)
    assert len(colouring) in (2, 3)


def test_nothing_to_colour():
    colouring = colour([], 0)
    assert len(colouring) == 0
    assert colouring.offsets.tolist() == [0]
    assert len(colour([(table_of(np.zeros((0, 3), int), 1), 0)], 0)) == 0
    assert len(colour([(table_of(np.zeros((4, 0), int), 0), 0)], 4)) == 1


def test_a_table_with_too_few_rows_is_refused():
    with pytest.raises(InvalidLoopError, match=r"has 2 rows.*visit entity 4"):
        colour([(table_of([[0], [1]]), 0)], 5)


@pytest.fixture(scope="module")
def million():
    _, _, nodes, count = triangles(707)
    return nodes, count


PLANS = {
    "colour": lambda table: colour([(table, 0)], table.size),
    "segments": lambda table: segments(table, table.size),
    "last_writers": lambda table: last_writer_table(table, table.size),
}


@pytest.mark.parametrize("plan", PLANS)
def test_planning_takes_less_than_ten_times_the_memory_of_the_table(million, plan):
    table = IndexTable(*million)
    tracemalloc.start()
    try:
        PLANS[plan](table)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * table.values.nbytes


# ---------------------------------------------------------------------------------------------
# Segments and last writers


def contributions(table, size, entities, start):
    """Pairs (target, contribution) in the order of a sequential loop."""
    visited = range(start, size) if entities is None else entities[start:size]
    number = 0
    for entity in visited:
        for target in table.values[entity].tolist():
            if target >= 0:
                yield target, number
            number += 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_segments_list_the_contributions_to_each_target_in_order(data):
    table = data.draw(maps())
    size, entities, start = data.draw(visits(table.size))
    expected = [[] for _ in range(table.bound)]
    for target, number in contributions(table, size, entities, start):
        expected[target].append(number)
    found = segments(table, size, entities, start)
    assert found.offsets.dtype == found.contributions.dtype == np.int32
    assert len(found.offsets) == table.bound + 1
    lists = [
        found.contributions[begin:end].tolist()
        for begin, end in zip(found.offsets[:-1], found.offsets[1:], strict=True)
    ]
    assert lists == expected


def test_segments_of_targets_beyond_16_bits():
    values = random_map(2000, 3, 2**18, seed=5)
    table = IndexTable(values, 2**18)
    found = segments(table, 2000)
    assert np.array_equal(found.contributions, np.argsort(values.ravel(), kind="stable"))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_last_writers_are_those_of_a_sequential_loop(data):
    table = data.draw(maps())
    size, entities, start = data.draw(visits(table.size))
    expected = dict(contributions(table, size, entities, start))
    found = last_writers(table, size, entities, start)
    assert found.tolist() == [expected.get(target, -1) for target in range(table.bound)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_storing_last_writers_in_any_order_is_storing_in_sequence(data):
    table = data.draw(maps())
    size, entities, start = data.draw(visits(table.size))
    visited = np.arange(size)[start:] if entities is None else entities[start:]
    value = np.arange(table.values.size).reshape(table.values.shape)

    def store(through, order):
        result = np.full(table.bound, -1)
        for entity in order:
            for position, target in enumerate(through.values[entity].tolist()):
                if target >= 0:
                    result[target] = value[entity, position]
        return result.tolist()

    kept = last_writer_table(table, size, entities, start)
    shuffled = np.random.default_rng(0).permutation(visited)
    assert store(kept, shuffled) == store(table, visited)


def test_plans_are_kept_with_the_table():
    table = table_of(random_map(50, 3, 20, seed=0))
    assert segments(table, 50) is segments(table, 50)
    assert segments(table, 40) is not segments(table, 50)
    entities = np.arange(50, dtype=np.int32)
    assert colour([(table, 0)], 50, entities) is colour([(table, 0)], 50, entities.copy())
    assert colour([(table, 0)], 50, entities[::-1].copy()) is not colour([(table, 0)], 50, entities)


def test_plans_of_many_subsets_do_not_pile_up():
    table = table_of(random_map(50, 3, 20, seed=0))
    for last in range(200):
        segments(table, 2, np.array([0, last % 50], np.int32), last % 2)
    assert len(table.plans) < 50


# ---------------------------------------------------------------------------------------------
# Loops


def loop_of(*arguments, size=None, entities=None):
    """A loop whose kernel does nothing."""
    formals = tuple(
        KernelArgument(f"k{n}", (a.slots,), a.buffer.dtype) for n, a in enumerate(arguments)
    )
    if size is None:
        size = next(a.table.size for a in arguments if a.table is not None)
    return Parloop(
        LocalKernel("k", formals, (), ()), IterationSet(size, None, None, entities), arguments
    )


def run_stores(loop, order):
    """Store the number of (argument, entity, slot) at each scalar, entity after entity."""
    results = [np.full(buffer.size, -1) for buffer in loop.buffers]
    for entity in order:
        for number, (argument, spec) in enumerate(
            zip(loop.arguments, loop.spec.arguments, strict=True)
        ):
            rows = [entity] if argument.table is None else argument.table.values[entity].tolist()
            for i, row in enumerate(rows):
                for c in range(argument.components):
                    slot = i * argument.components + c
                    if row >= 0:
                        at = row * argument.stride + argument.offset + c
                        results[spec.buffer][at] = (number * 1000 + entity) * 1000 + slot
    return results


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_order_free_stores_are_those_of_a_sequential_loop(data):
    size = data.draw(st.integers(1, 12))
    buffer = np.zeros((30, 2))
    arguments = []
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["direct", "rows", "component", "overlapping"]))
        if kind == "direct":
            arguments.append(Argument.direct(buffer, WRITE))
            continue
        table = data.draw(maps(rows=st.just(size), targets=st.just(29)))
        components, stride, offset = {
            "rows": (2, 2, 0),
            "component": (1, 2, data.draw(st.integers(0, 1))),
            "overlapping": (2, 1, 0),
        }[kind]
        arguments.append(
            Argument(
                buffer, WRITE, Argument.indirect(buffer, READ, table).kind, table,
                components, stride, offset,
            )
        )  # fmt: skip
    _, entities, _ = data.draw(visits(size))
    count = size if entities is None else len(entities)
    loop = loop_of(*arguments, size=count, entities=entities)
    visited = np.arange(size) if entities is None else entities
    free = order_free(loop)
    shuffled = np.random.default_rng(1).permutation(visited)
    for expected, found in zip(run_stores(loop, visited), run_stores(free, shuffled), strict=True):
        # the number of an entity that is visited twice is the same each time
        assert found.tolist() == expected.tolist()


def test_a_loop_without_shared_stores_stays_as_it_is():
    table = table_of(np.arange(12).reshape(4, 3))
    loop = loop_of(Argument.indirect(np.zeros(12), WRITE, table))
    assert order_free(loop) is loop


def test_only_iterations_that_run_count_as_last():
    table = table_of([[0], [0], [0]])
    loop = loop_of(Argument.indirect(np.zeros(1), WRITE, table))
    assert order_free(loop, size=2).arguments[0].table.values.tolist() == [[-1], [0], [-1]]


def test_reading_what_others_stored_cannot_be_reordered():
    table = table_of([[0, 1], [1, 2]])
    loop = loop_of(Argument.indirect(np.zeros(3), RW, table, name="u"))
    for plan in (order_free, colour_loop):
        with pytest.raises(UnsupportedLoopError, match=r"argument u has access RW.*in order"):
            plan(loop)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_loops_are_coloured_for_all_they_change(data):
    size = data.draw(st.integers(1, 15))
    buffers = [np.zeros((40, 2)), np.zeros((40, 2))]
    arguments = []
    for _ in range(data.draw(st.integers(1, 4))):
        buffer = buffers[data.draw(st.integers(0, 1))]
        if data.draw(st.booleans()):
            arguments.append(Argument.direct(buffer, INC))
            continue
        table = data.draw(maps(rows=st.just(size), targets=st.just(30)))
        stride = data.draw(st.sampled_from([1, 2]))
        kind = Argument.indirect(buffer, READ, table).kind
        arguments.append(Argument(buffer, INC, kind, table, 2, stride))
    _, entities, _ = data.draw(visits(size))
    count = size if entities is None else len(entities)
    loop = loop_of(*arguments, size=count, entities=entities)
    extent = max(loop.iteration_set.extent, 1)
    scalars = [(as_scalars(a, extent).table, id(a.buffer)) for a in arguments if a.slots]
    assert_colouring(colour_loop(loop), scalars, count, entities)


def test_matrices_are_coloured_by_their_rows():
    _, _, nodes, count = triangles(6)
    rows = IndexTable(nodes, count)
    indptr, indices = csr_pattern(rows, rows, count, count)
    positions = csr_positions(indptr, indices, rows, rows)
    loop = loop_of(Argument.matrix(np.zeros(indices.size), INC, positions, rows))
    colouring = colour_loop(loop)
    assert_colouring(colouring, [(positions, 0)], rows.size)
    assert colouring is colour([(rows, 0)], rows.size)


# ---------------------------------------------------------------------------------------------
# Matrices


def assembled(i, j, values, shape):
    """Sum of element entries by scipy, dropped ones left out."""
    kept = (i >= 0) & (j >= 0)
    matrix = scipy.sparse.coo_array((values[kept], (i[kept], j[kept])), shape=shape)
    return matrix.toarray()


def scalar_pairs(rows, cols, rc, cc):
    """Row and column of each entry, written as loops."""
    i, j = [], []
    for entity in range(rows.size):
        for r in rows.values[entity].tolist():
            for a in range(rc):
                for c in cols.values[entity].tolist():
                    for b in range(cc):
                        i.append(r * rc + a if min(r, c) >= 0 else -1)
                        j.append(c * cc + b if min(r, c) >= 0 else -1)
    return np.array(i, int), np.array(j, int)


@st.composite
def couplings(draw):
    size = draw(st.integers(0, 12))
    return [draw(maps(rows=st.just(size), targets=st.integers(1, 12))) for _ in range(2)]


@settings(max_examples=100, deadline=None)
@given(couplings())
def test_pattern_is_that_of_scipy(tables):
    rows, cols = tables
    i, j = scalar_pairs(rows, cols, 1, 1)
    shape = (rows.bound, cols.bound)
    reference = scipy.sparse.csr_array((assembled(i, j, np.ones(i.size), shape) > 0) * 1.0)
    indptr, indices = csr_pattern(rows, cols, *shape)
    assert indptr.tolist() == reference.indptr.tolist()
    assert indices.tolist() == reference.indices.tolist()


@settings(max_examples=100, deadline=None)
@given(
    couplings(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["full", "gaps", "shuffled"])
)
def test_adding_at_csr_positions_is_scipys_assembly(tables, rc, cc, pattern):
    rows, cols = tables
    i, j = scalar_pairs(rows, cols, rc, cc)
    shape = (rows.bound * rc, cols.bound * cc)
    values = np.random.default_rng(0).standard_normal(i.size)
    expected = assembled(i, j, values, shape)
    if pattern == "full":
        present = scipy.sparse.kron(
            assembled(*scalar_pairs(rows, cols, 1, 1), np.ones(rows.size * rows.arity * cols.arity),
                      (rows.bound, cols.bound)),
            np.ones((rc, cc)),
            format="csr",
        )  # fmt: skip
    else:
        # with an entry that no entity adds to, so that blocks have gaps
        extra = np.zeros(shape)
        extra[-1, -1] = 1
        present = scipy.sparse.csr_array(assembled(i, j, np.ones(i.size), shape) + extra)
    if pattern == "shuffled":
        for begin, end in zip(present.indptr[:-1], present.indptr[1:], strict=True):
            present.indices[begin:end] = present.indices[begin:end][::-1].copy()
    positions = csr_positions(present.indptr, present.indices, rows, cols, rc, cc)
    flat = positions.values.ravel()
    assert flat.size == i.size
    data = np.zeros(present.indices.size)
    np.add.at(data, flat[flat >= 0], values[flat >= 0])
    found = scipy.sparse.csr_array((data, present.indices, present.indptr), shape=shape).toarray()
    assert np.allclose(found, expected, rtol=0, atol=1e-13)
    assert ((flat < 0) == (i < 0)).all()


@settings(max_examples=60, deadline=None)
@given(couplings(), st.integers(1, 3), st.integers(1, 3))
def test_blocks_are_stored_by_columns_as_petsc_does(tables, rc, cc):
    rows, cols = tables
    indptr, indices = csr_pattern(rows, cols, rows.bound, cols.bound)
    i, j = scalar_pairs(rows, cols, rc, cc)
    values = np.random.default_rng(0).standard_normal(i.size)
    positions = csr_positions(indptr, indices, rows, cols, rc, cc, storage="baij")
    data = np.zeros((indices.size, cc, rc))
    flat = positions.values.ravel()
    np.add.at(data.reshape(-1), flat[flat >= 0], values[flat >= 0])
    shape = (rows.bound * rc, cols.bound * cc)
    found = scipy.sparse.bsr_array((data.transpose(0, 2, 1), indices, indptr), shape=shape)
    assert np.allclose(found.toarray(), assembled(i, j, values, shape), rtol=0, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(couplings(), st.integers(1, 3), st.integers(1, 3))
def test_coo_indices_are_rows_and_columns_of_each_entry(tables, rc, cc):
    rows, cols = tables
    i, j = coo_indices(rows, cols, rc, cc)
    expected_i, expected_j = scalar_pairs(rows, cols, rc, cc)
    assert i.tolist() == expected_i.tolist()
    assert j.tolist() == expected_j.tolist()


def test_an_entry_outside_the_pattern_is_named():
    table = IndexTable(np.array([[0, 1], [1, 2]]), 3, name="cells to nodes")
    indptr, indices = np.array([0, 2, 4, 6]), np.array([0, 1, 0, 1, 1, 2])
    with pytest.raises(
        InvalidLoopError,
        match=r"stiffness: entity 1 adds to row 1 \(position 0 of map cells to nodes\), column 2 ",
    ):
        csr_positions(indptr, indices, table, table, name="stiffness")


def test_an_empty_pattern_misses_every_entry():
    table = table_of([[0]])
    with pytest.raises(InvalidLoopError, match="entity 0 adds to row 0"):
        csr_positions(np.array([0, 0]), np.array([], np.int32), table, table)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 1], [5], "a column is not within 0 to 1"),
        ([0, 1], [-1], "a column is not within 0 to 1"),
        ([0, 2], [0], "indptr must run from 0 to 1"),
        ([1, 1], [0], "indptr must run from 0 to 1"),
        ([0.0, 1.0], [0], "must be a one-dimensional array of integers"),
        ([[0, 1]], [0], "must be a one-dimensional array of integers"),
    ],
)
def test_what_is_no_csr_pattern_is_refused(indptr, indices, message):
    table = IndexTable(np.zeros((0, 2), np.int32), 2)
    with pytest.raises(InvalidLoopError, match=message):
        csr_positions(np.array(indptr), np.array(indices), table, table)


def test_a_row_beyond_the_matrix_is_named():
    table = IndexTable(np.array([[0, 1], [1, 7]]), 8, name="nodes")
    with pytest.raises(
        InvalidLoopError, match=r"map nodes: entity 1, position 1 holds 7, the matrix has 3 rows"
    ):
        csr_pattern(table, table, 3, 8)


def test_positions_of_200000_tetrahedra():
    _, _, nodes, count = tetrahedra(32)
    table = IndexTable(nodes, count)
    indptr, indices = csr_pattern(table, table, count, count)
    positions = csr_positions(indptr, indices, table, table)
    assert positions.values.dtype == np.int32
    assert (indices[positions.values[:, 1]] == nodes[:, 1]).all()


def test_positions_of_p3_tetrahedra_need_little_more_memory_than_the_result():
    _, _, nodes, count = tetrahedra(8, 3)
    table = IndexTable(nodes, count)
    indptr, indices = csr_pattern(table, table, count, count)
    tracemalloc.start()
    try:
        positions = csr_positions(indptr, indices, table, table)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    pattern = 8 * indices.size
    # a few arrays of a chunk's size and of the pattern's besides the result
    assert peak < positions.values.nbytes + 4 * pattern + 40 * 2**18

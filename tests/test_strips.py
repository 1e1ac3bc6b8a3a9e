"""Loops over strips of a dimension: where they may be put, and that they change no result."""

from __future__ import annotations

import numpy as np
from builder import KernelBuilder, dims_of, entry
from reference import run_parloop_reference

from pyop3_mlir import engine
from pyop3_mlir.kernels.program import Dim, IndexOf, Op, Scalar, Source, Table, Temporary
from pyop3_mlir.lowering.pipeline import lower
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.lowering.strips import BUDGET, Nest, bytes_of_temporaries, find_strip
from pyop3_mlir.parloop import INC, READ, Argument, IndexTable, IterationSet, Kind, Parloop

PARALLEL, SUM = frozenset(), frozenset({1})


def nest(extents, reads, writes, reductions=PARALLEL):
    return Nest(extents, reductions, tuple(reads), tuple(writes))


def test_a_value_at_points_that_are_summed_up_is_kept_for_a_strip():
    nests = [
        nest((100,), [], [("at points", (0,))]),
        nest((3, 100), [("at points", (1,))], [("sum", (0,))], SUM),
    ]
    strip = find_strip(nests, {"at points": 800, "sum": 24}, {"sum"}, budget=240)
    assert (dict(strip.dims), strip.extent, dict(strip.local)) == (
        {0: 0, 1: 1},
        100,
        {"at points": 0},
    )
    assert strip.size * 8 + 24 <= 240
    assert strip.extent % strip.size == 0


def test_nothing_is_done_within_the_budget():
    nests = [
        nest((100,), [], [("at points", (0,))]),
        nest((3, 100), [("at points", (1,))], [("sum", (0,))], SUM),
    ]
    assert find_strip(nests, {"at points": 800, "sum": 24}, {"sum"}, budget=824) is None


def test_what_needs_the_sum_waits_for_it():
    nests = [
        nest((100,), [], [("a", (0,))]),
        nest((3, 100), [("a", (1,))], [("sum", (0,))], SUM),
        nest((3,), [("sum", (0,))], [("scaled", (0,))]),
        nest((3, 100), [("a", (1,))], [("other", (0,))], SUM),
    ]
    sizes = {"a": 800, "sum": 24, "scaled": 24, "other": 24}
    strip = find_strip(nests, sizes, {"scaled", "other"}, budget=200)
    assert set(strip.dims) == {0, 1, 3}
    assert strip.later == {2}


def test_values_that_are_used_after_the_sum_again_are_kept_whole():
    """Both loops go over the same points, but the second one needs what the first has summed up."""
    nests = [
        nest((100,), [], [("a", (0,))]),
        nest((100,), [("a", (0,))], [("b", (0,))]),
        nest((3, 100), [("b", (1,))], [("sum", (0,))], SUM),
        nest((100,), [("a", (0,)), ("sum", (None,))], [("c", (0,))]),
        nest((3, 100), [("c", (1,))], [("result", (0,))], SUM),
    ]
    sizes = {"a": 800, "b": 1600, "c": 800, "sum": 24, "result": 24}
    strip = find_strip(nests, sizes, {"result"}, budget=1000)
    assert set(strip.dims) == {0, 1, 2}
    assert set(strip.local) == {"b"}


def test_entries_that_are_chosen_otherwise_forbid_strips():
    nests = [
        nest((100,), [], [("a", (0,))]),
        nest((3, 100), [("a", (1,)), ("a", (None,))], [("sum", (0,))], SUM),
    ]
    assert find_strip(nests, {"a": 800, "sum": 24}, {"sum"}, budget=100) is None


def test_a_diagonal_forbids_strips():
    nests = [
        nest((10, 10), [], [("a", (0, 1))]),
        nest((10,), [("a", (0, 0))], [("diagonal", (0,))]),
    ]
    assert find_strip(nests, {"a": 800, "diagonal": 80}, {"diagonal"}, budget=100) is None


def many_points(points: int, mixed: bool = False) -> Parloop:
    """Values at points from three nodes, their square, and its sum against three functions.

    With ``mixed`` there is a result for each point as well, and one that needs a sum over all.
    """
    random = np.random.default_rng(0)
    builder = KernelBuilder("many_points")
    result, nodes = builder.argument(3), builder.argument(3)
    table = Table(random.integers(-2, 3, (points, 3)).astype(float))
    (q, i) = dims_of((points, 3))
    value = builder.compute([q], Op("mul", entry(table, q, i), entry(nodes, i)), over=[i])
    position = Op("cast", Op("rem", IndexOf(q), Scalar(7)), dtype=np.dtype(float))
    square = builder.compute([q], Op("add", Op("mul", entry(value, q), entry(value, q)), position))
    k, p = dims_of((3, points))
    total = builder.compute([k], Op("mul", entry(table, p, k), entry(square, p)), over=[p])
    extra = []
    if mixed:
        extra = [builder.argument(points), builder.argument(3)]
        j = Dim("j", 3)
        double = builder.compute([j], Op("add", entry(total, j), entry(total, j)))
        builder.output(extra[0], square)
        builder.output(extra[1], double)
    builder.output(result, total)
    kernel = builder.kernel()
    cells = 21
    table_ = IndexTable(random.integers(0, 15, (cells, 3), dtype=np.int32), 15)
    buffer = random.integers(-3, 4, 15).astype(float)
    arguments = [
        Argument(np.zeros(15), INC, Kind.INDIRECT, table_),
        Argument(buffer, READ, Kind.INDIRECT, table_),
        *(Argument(np.zeros(cells * a.size), INC, Kind.DIRECT, None, a.size) for a in extra),
    ]
    return Parloop(kernel, IterationSet(cells), arguments, "many_points")


def check(points, mixed, schedule):
    ours, theirs = many_points(points, mixed), many_points(points, mixed)
    assert bytes_of_temporaries(ours.kernel, schedule.width) < schedule.width * points * 16
    assert "memref.subview" in lower(ours.kernel, ours.spec, schedule)
    engine.compile(ours, "cpu", schedule)()
    run_parloop_reference(theirs)
    for a, b in zip(ours.arguments, theirs.arguments, strict=True):
        assert np.array_equal(a.buffer, b.buffer)


def test_results_with_strips_of_one_length():
    check(4096, False, Schedule(width=8))


def test_results_with_a_shorter_last_strip():
    check(4099, False, Schedule(width=8))


def test_results_that_are_kept_for_every_point():
    check(4099, True, Schedule(width=8))


def test_results_of_single_cells():
    check(BUDGET // 8, False, Schedule(width=1))


def many_points_and_a_system(points: int) -> Parloop:
    """A matrix and its right-hand sides from sums over points, and the solution at other points."""
    n, cells = 8, 21
    random = np.random.default_rng(0)
    builder = KernelBuilder("many_points_and_a_system")
    result, nodes = builder.argument(n), builder.argument(n)
    table = Table(random.standard_normal((points, n)))

    def at_points(source: Source) -> Temporary:
        (q, i) = dims_of((points, n))
        value = builder.compute([q], Op("mul", entry(table, q, i), entry(source, i)), over=[i])
        (q,) = dims_of((points,))
        return builder.compute([q], Op("mul", entry(value, q), entry(value, q)))

    def sums(square: Temporary, *axes: Dim) -> Temporary:
        (q,) = dims_of((points,))
        body = entry(square, q)
        for axis in axes:
            body = Op("mul", entry(table, q, axis), body)
        return builder.compute(axes, body, over=[q])

    square = at_points(nodes)
    matrix, side = sums(square, *dims_of((n, n))), sums(square, *dims_of((n,)))
    (e, u) = dims_of((n, n))
    body = Op("solve", entry(matrix, e, u), entry(side, e), IndexOf(u), dtype=np.dtype(float))
    solution = builder.compute([u], body, over=[e])
    builder.output(result, sums(at_points(solution), *dims_of((n,))))
    kernel = builder.kernel()
    statistics = bytes_of_temporaries(kernel, 4)
    # the matrix and what the elimination leaves of it, both for each cell, are never in strips
    assert 2 * n * n * 8 * 4 < statistics < 4 * points * 16
    table_ = IndexTable(random.integers(0, 40, (cells, n), dtype=np.int32), 40)
    buffer = random.standard_normal(40)
    arguments = [
        Argument(np.zeros(40), INC, Kind.INDIRECT, table_),
        Argument(buffer, READ, Kind.INDIRECT, table_),
    ]
    return Parloop(kernel, IterationSet(cells), arguments)


def test_strips_end_before_a_system_and_begin_anew_after_it():
    ours, theirs = many_points_and_a_system(8192), many_points_and_a_system(8192)
    schedule = Schedule(width=4)
    # one loop over strips on each side, with one view of the table
    assert lower(ours.kernel, ours.spec, schedule).count("memref.subview") == 2
    engine.compile(ours, "cpu", schedule)()
    run_parloop_reference(theirs)
    found, expected = ours.arguments[0].buffer, theirs.arguments[0].buffer
    assert np.linalg.norm(found - expected) < 1e-12 * np.linalg.norm(expected)

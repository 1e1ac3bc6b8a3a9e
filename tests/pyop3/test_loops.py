"""Loops of pyop3 itself: what its own integration tests cover, against numpy.

The fixture ``engine`` runs each loop by both engines and compares them, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

exec_ = pytest.importorskip(
    "pyop3.insn.exec", reason="pyop3 is in no registry and not installed here"
)
import pyop3 as op3  # noqa: E402
from immutabledict import immutabledict as idict  # noqa: E402
from pyop3.expr import Conditional, LessThan  # noqa: E402
from pyop3_loops import add, copy, dat, dat_of_shape, function, integers, map_, rng, spread  # noqa: E402


def test_direct_loop(engine):
    axis = op3.Axis(17, "points")
    x, y = dat(axis), dat(axis)
    op3.loop(p := axis.iter(), copy(1)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check()


def test_back_end_switch(engine):
    """``backend="mlir"`` of pyop3's compiler parameters, where it has that, is the engine."""
    if not hasattr(exec_.CompilerParameters(), "backend"):
        pytest.skip("this pyop3 has no setting for the back end (pull request 5392)")
    axis = op3.Axis(17, "points")
    x, y = dat(axis), dat(axis)
    loop = op3.loop(p := axis.iter(), copy(1)(x[p], y[p]))
    loop(compiler_parameters={"backend": "mlir"})
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check()


def test_direct_loop_over_vectors(engine):
    points, components = op3.Axis(9, "points"), op3.Axis(3, "components")
    axes = op3.AxisTree.from_iterable([points, components])
    x, y = dat(axes), dat(axes)
    op3.loop(p := points.iter(), copy(3)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check()


def test_indirect_loop_reads_and_increments(engine):
    cells, vertices = op3.Axis(30, "cells"), op3.Axis(12, "vertices")
    table = rng.integers(0, 12, (30, 3))
    cone = map_(cells, vertices, table, "cone")
    x, y = dat(vertices), dat(cells)
    before = y.buffer.data_ro.copy()
    op3.loop(c := cells.iter(), add(3)(x[cone(c)], y[c]), eager=True)
    assert np.allclose(y.buffer.data_ro, before + x.buffer.data_ro[table].sum(axis=1), rtol=1e-14)
    z = dat(vertices, np.zeros(12))
    op3.loop(c := cells.iter(), spread(3)(y[c], z[cone(c)]), eager=True)
    expected = np.zeros(12)
    np.add.at(expected, table, y.buffer.data_ro[:, None] * [1.0, 2.0, 3.0])
    assert np.allclose(z.buffer.data_ro, expected, rtol=1e-13)
    engine.check()


@pytest.mark.parametrize("depth", [2, 3])
def test_composed_maps(engine, depth):
    sizes = [11, 8, 9, 7]
    axes = [op3.Axis(sizes[k], f"ax{k}") for k in range(depth + 1)]
    tables = [rng.integers(0, sizes[k + 1], (sizes[k], 2)) for k in range(depth)]
    maps = [map_(axes[k], axes[k + 1], tables[k], f"map{k}") for k in range(depth)]
    x, y = dat(axes[-1]), dat(axes[0], np.zeros(11))
    p = axes[0].iter()
    index: Any = p
    for m in maps:
        index = m(index)
    op3.loop(p, copy(*[2] * depth)(x[index], target := dat_of_shape(axes[0], depth)[p]), eager=True)
    expected = tables[0]
    for table in tables[1:]:
        expected = table[expected]
    del y
    assert np.array_equal(target.buffer.data_ro.reshape(expected.shape), x.buffer.data_ro[expected])
    engine.check()


@pytest.mark.parametrize(
    "touched", [slice(2, None), slice(6), slice(None, None, 2)], ids=["tail", "head", "stride"]
)
def test_loop_over_a_slice(engine, touched):
    axis = op3.Axis(10, "points")
    x, y = dat(axis), dat(axis, np.zeros(10))
    op3.loop(p := axis[touched].iter(), copy(1)(x[p], y[p]), eager=True)
    expected = np.zeros(10)
    expected[touched] = x.buffer.data_ro[touched]
    assert np.array_equal(y.buffer.data_ro, expected)
    engine.check()


def test_loop_over_a_subset(engine):
    touched = [2, 3, 5, 0]
    axis = op3.Axis(6, "points")
    subset = op3.Dat(
        op3.Axis(4, "subset"), data=np.array(touched, op3.IntType), buffer_kwargs={"constant": True}
    )
    index = op3.Slice("points", [op3.SubsetSliceComponent(None, subset)])
    x, y = dat(axis), dat(axis, np.zeros(6))
    op3.loop(p := axis[index].iter(), copy(1)(x[p], y[p]), eager=True)
    expected = np.zeros(6)
    expected[touched] = x.buffer.data_ro[touched]
    assert np.array_equal(y.buffer.data_ro, expected)
    engine.check()


def test_components_of_an_axis(engine):
    axis = op3.Axis({"a": 4, "b": 6}, "points")
    axes = op3.AxisTree.from_nest({axis: [op3.Axis(2, "in_a"), op3.Axis(3, "in_b")]})
    x, y = dat(axes), dat(axes, np.zeros(26))
    op3.loop(p := axis["b"].iter(), copy(3)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro[:8], np.zeros(8))
    assert np.array_equal(y.buffer.data_ro[8:], x.buffer.data_ro[8:])
    engine.check()


def test_loop_over_all_components_of_an_axis(engine):
    axes = op3.AxisTree(op3.Axis({"a": 4, "b": 6}, "points"))
    x, y = dat(axes), dat(axes, np.zeros(10))
    op3.loop(p := axes.iter(), copy(1)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check()


def test_nested_loops_transpose(engine):
    rows, cols = op3.Axis(5, "rows"), op3.Axis(4, "cols")
    x = dat(op3.AxisTree.from_iterable([rows, cols]))
    y = dat(op3.AxisTree.from_iterable([cols, rows]))
    inner = op3.loop(q := cols.iter(), copy(1)(x[p := rows.iter()][q], y[q][p]))
    op3.loop(p, inner, eager=True)
    expected = x.buffer.data_ro.reshape(5, 4).T
    assert np.array_equal(y.buffer.data_ro.reshape(4, 5), expected)
    engine.check()


def test_three_nested_loops(engine):
    a, b, c = op3.Axis(3, "a"), op3.Axis(4, "b"), op3.Axis(2, "c")
    x = dat(op3.AxisTree.from_iterable([a, b, c]))
    y = dat(op3.AxisTree.from_iterable([c, a, b]), np.zeros(24))
    p, q, r = a.iter(), b.iter(), c.iter()
    innermost = op3.loop(r, copy(1)(x[p][q][r], y[r][p][q]))
    op3.loop(p, op3.loop(q, innermost), eager=True)
    expected = x.buffer.data_ro.reshape(3, 4, 2).transpose(2, 0, 1)
    assert np.array_equal(y.buffer.data_ro.reshape(2, 3, 4), expected)
    engine.check()


def test_nested_loop_that_sums(engine):
    axes = op3.AxisTree.from_iterable([op3.Axis(5, "points"), op3.Axis(3, "entries")])
    x, y = dat(axes), dat(axes.root, np.zeros(5))
    p = axes.root.iter()
    op3.loop(p, op3.loop(q := axes[p].iter(), add(1)(x[q], y[p])), eager=True)
    expected = x.buffer.data_ro.reshape(5, 3).sum(axis=1)
    assert np.allclose(y.buffer.data_ro, expected, rtol=1e-14)
    engine.check()


def test_subset_of_what_a_kernel_gets(engine):
    points = op3.Axis(6, "points")
    axes = op3.AxisTree.from_iterable([points, op3.Axis(4, "entries")])
    chosen = integers(op3.Axis(2, "chosen"), [3, 1], buffer_kwargs={"constant": True})
    index = op3.Slice("entries", [op3.SubsetSliceComponent(None, chosen)])
    x, y = dat(axes), dat_of_shape(points, 1)
    op3.loop(p := points.iter(), copy(2)(x[p][index], y[p]), eager=True)
    expected = x.buffer.data_ro.reshape(6, 4)[:, [3, 1]]
    assert np.array_equal(y.buffer.data_ro.reshape(6, 2), expected)
    engine.check()


def test_slice_of_what_a_kernel_gets(engine):
    points = op3.Axis(6, "points")
    axes = op3.AxisTree.from_iterable([points, op3.Axis(4, "entries")])
    x, y = dat(axes), dat_of_shape(points, 1)
    op3.loop(p := points.iter(), copy(2)(x[p][1::2], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro.reshape(6, 2), x.buffer.data_ro.reshape(6, 4)[:, 1::2])
    engine.check()


def test_slice_of_a_slice(engine):
    axis = op3.Axis(30, "points")
    x, y = dat(axis), dat(axis, np.zeros(30))
    op3.loop(p := axis[::2][1:].iter(), copy(1)(x[p], y[p]), eager=True)
    expected = np.zeros(30)
    expected[::2][1:] = x.buffer.data_ro[::2][1:]
    assert np.array_equal(y.buffer.data_ro, expected)
    engine.check()


def test_assignment_to_a_subset(engine):
    axis = op3.Axis(6, "points")
    chosen = integers(op3.Axis(4, "chosen"), [2, 3, 5, 0], buffer_kwargs={"constant": True})
    index = op3.Slice("points", [op3.SubsetSliceComponent(None, chosen)])
    x, y = dat(axis), dat(axis, np.zeros(6))
    y[index].assign(x[index], eager=True, eager_strategy="compile")
    expected = np.zeros(6)
    expected[[2, 3, 5, 0]] = x.buffer.data_ro[[2, 3, 5, 0]]
    assert np.array_equal(y.buffer.data_ro, expected)
    engine.check()


def test_components_of_an_axis_that_a_kernel_gets(engine):
    points, inner = op3.Axis(4, "points"), op3.Axis({"a": 3, "b": 2}, "inner")
    axes = op3.AxisTree.from_nest({points: inner})
    x, y = dat(axes), dat(axes, np.zeros(20))
    op3.loop(p := points.iter(), copy(5)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check()


def test_order_of_three_axes(engine):
    a, b, points = op3.Axis(3, "a"), op3.Axis(2, "b"), op3.Axis(5, "points")
    x = dat(op3.AxisTree.from_iterable([points, a, b]))
    y = dat(op3.AxisTree.from_iterable([b, points, a]), np.zeros(30))
    p = points.iter()
    op3.loop(p, op3.Assignment(y[p], x[p], "write"), eager=True)
    expected = x.buffer.data_ro.reshape(5, 3, 2).transpose(2, 0, 1)
    assert np.array_equal(y.buffer.data_ro.reshape(2, 5, 3), expected)
    engine.check()


def test_order_of_axes(engine):
    points, components = op3.Axis(5, "points"), op3.Axis(3, "components")
    x = dat(op3.AxisTree.from_iterable([points, components]))
    y = dat(op3.AxisTree.from_iterable([components, points]))
    op3.loop(p := points.iter(), copy(3)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro.reshape(3, 5), x.buffer.data_ro.reshape(5, 3).T)
    engine.check()


def test_constant_passed_whole(engine):
    axis = op3.Axis(6, "points")
    x, y, c = dat(axis), dat(axis, np.zeros(6)), dat(op3.Axis(2, "constant"), [2.0, 5.0])
    k = function(
        "y[0] = c[0]*x[0] + c[1]",
        [("c", (2,), op3.READ), ("x", (1,), op3.READ), ("y", (1,), op3.WRITE)],
    )
    op3.loop(p := axis.iter(), k(c, x[p], y[p]), eager=True)
    assert np.allclose(y.buffer.data_ro, 2 * x.buffer.data_ro + 5, rtol=1e-15)
    engine.check()


def test_constant_in_an_expression(engine):
    axis = op3.Axis(12, "points")
    x, y, number = dat(axis), dat(axis), op3.Scalar(2.5)
    p = axis.iter()
    loop = op3.loop(p, op3.Assignment(y[p], number * x[p], "write"))
    for value in (2.5, -1.0):
        number.buffer.data_wo[...] = value
        loop()
        assert np.allclose(y.buffer.data_ro, value * x.buffer.data_ro, rtol=1e-15)
    engine.check()


def test_condition_in_an_expression(engine):
    axis = op3.Axis(12, "points")
    x, y = dat(axis), dat(axis, np.zeros(12))
    p = axis.iter()
    value = Conditional(LessThan(x[p], 0.5), x[p], 2.0)
    op3.loop(p, op3.Assignment(y[p], value, "write"), eager=True)
    expected = np.where(x.buffer.data_ro < 0.5, x.buffer.data_ro, 2.0)
    assert np.array_equal(y.buffer.data_ro, expected)
    engine.check()


def test_sum_into_a_scalar(engine):
    axis = op3.Axis(40, "points")
    x, total = dat(axis), op3.Scalar(3.0)
    op3.loop(p := axis.iter(), add(1)(x[p], total), eager=True)
    assert np.isclose(total.buffer.data_ro[0], 3 + x.buffer.data_ro.sum(), rtol=1e-14)
    engine.check()


def test_read_and_write(engine):
    axis = op3.Axis(8, "points")
    x = dat(axis)
    expected = x.buffer.data_ro * 2 + 1
    k = function("x[0] = 2*x[0] + 1", [("x", (1,), op3.RW)])
    op3.loop(p := axis.iter(), k(x[p]), eager=True)
    assert np.allclose(x.buffer.data_ro, expected, rtol=1e-15)
    engine.check()


def test_read_and_write_in_order(engine):
    # what an iteration reads, the one before it has written
    cells, vertices = op3.Axis(9, "cells"), op3.Axis(10, "vertices")
    cone = map_(cells, vertices, np.array([[i, i + 1] for i in range(9)]), "cone")
    x = dat(vertices)
    expected = x.buffer.data_ro.copy()
    for i in range(9):
        expected[i + 1] += 0.5 * expected[i]
    k = function("x[1] = x[1] + 0.5*x[0]", [("x", (2,), op3.RW)])
    op3.loop(c := cells.iter(), k(x[cone(c)]), eager=True)
    assert np.allclose(x.buffer.data_ro, expected, rtol=1e-14)
    engine.check()


def test_largest_value(engine):
    cells, vertices = op3.Axis(30, "cells"), op3.Axis(12, "vertices")
    table = rng.integers(0, 12, (30, 2))
    cone = map_(cells, vertices, table, "cone")
    x, y = dat(cells), dat(vertices, np.full(12, 0.5))
    k = function(
        "y[i] = fmax(y[i], x[0])",
        [("y", (2,), op3.MAX_RW), ("x", (1,), op3.READ)],
        "{[i]: 0<=i<2}",
    )
    op3.loop(c := cells.iter(), k(y[cone(c)], x[c]), eager=True)
    expected = np.full(12, 0.5)
    np.maximum.at(expected, table, x.buffer.data_ro[:, None])
    assert np.array_equal(y.buffer.data_ro, expected)
    engine.check()


def test_several_kernels_in_one_loop(engine):
    axis = op3.Axis(12, "points")
    x, y, z = dat(axis), dat(axis), dat(axis, np.zeros(12))
    p = axis.iter()
    op3.loop(p, [copy(1)(x[p], y[p]), add(1)(y[p], z[p]), add(1)(x[p], z[p])], eager=True)
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    assert np.allclose(z.buffer.data_ro, 2 * x.buffer.data_ro, rtol=1e-15)
    engine.check()


@pytest.mark.parametrize("kind", ["write", "inc"])
def test_assignment_of_an_expression_in_a_loop(engine, kind):
    axis = op3.Axis(12, "points")
    x, y = dat(axis), dat(axis)
    before = y.buffer.data_ro.copy()
    p = axis.iter()
    expression = x[p] * x[p] + 3.0 * x[p] - 1.0
    op3.loop(p, op3.Assignment(y[p], expression, kind), eager=True)
    expected = x.buffer.data_ro**2 + 3 * x.buffer.data_ro - 1 + (before if kind == "inc" else 0)
    assert np.allclose(y.buffer.data_ro, expected, rtol=1e-14)
    engine.check()


def test_assignment_of_whole_arrays(engine):
    points, components = op3.Axis(7, "points"), op3.Axis(2, "components")
    axes = op3.AxisTree.from_iterable([points, components])
    x, y = dat(axes), dat(axes)
    y.assign(2.0 * x + 1.0, eager=True, eager_strategy="compile")
    assert np.allclose(y.buffer.data_ro, 2 * x.buffer.data_ro + 1, rtol=1e-15)
    engine.check("assignment")


def test_replaced_arguments(engine):
    cells, vertices = op3.Axis(30, "cells"), op3.Axis(12, "vertices")
    table = rng.integers(0, 12, (30, 3))
    cone = map_(cells, vertices, table, "cone")
    x, y = dat(vertices, name="x"), dat(cells, np.zeros(30), name="y")
    loop = op3.loop(c := cells.iter(), add(3)(x[cone(c)], y[c]))
    loop()
    other, target = dat(vertices), dat(cells, np.zeros(30))
    kept = y.buffer.data_ro.copy()
    loop(x=other, y=target)
    assert np.array_equal(y.buffer.data_ro, kept)
    assert np.allclose(target.buffer.data_ro, other.buffer.data_ro[table].sum(axis=1), rtol=1e-14)
    engine.check()


def test_arguments_that_are_replaced_at_once(engine):
    # what the loop was made with never runs, and is not what is to be written to
    axis = op3.Axis(17, "points")
    x, y = dat(axis, name="source"), dat(axis, np.zeros(17), name="sink")
    loop = op3.loop(p := axis.iter(), copy(1)(x[p], y[p]))
    other, target = dat(axis), dat(axis, np.zeros(17))
    loop(source=other, sink=target)
    assert np.array_equal(target.buffer.data_ro, other.buffer.data_ro)
    assert not y.buffer.data_ro.any()
    loop()
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check()


def test_changed_map(engine):
    cells, vertices = op3.Axis(30, "cells"), op3.Axis(12, "vertices")
    table = rng.integers(0, 12, (30, 3))
    values = integers(op3.AxisTree.from_iterable([cells, op3.Axis(3, "cone")]), table)
    component = op3.TabulatedMapComponent("vertices", None, values, label=None)
    cone = op3.Map({idict({"cells": None}): [[component]]}, name="cone")
    x, y = dat(vertices), dat(cells, np.zeros(30))
    loop = op3.loop(c := cells.iter(), add(3)(x[cone(c)], y[c]))
    loop()
    table = rng.integers(0, 12, (30, 3))
    values.buffer.data_wo[...] = table.reshape(-1)
    y.buffer.data_wo[...] = 0
    loop()
    assert np.allclose(y.buffer.data_ro, x.buffer.data_ro[table].sum(axis=1), rtol=1e-14)
    engine.check()


def test_loop_compiled_before_the_back_end_was_attached(engine):
    engine.backend.detach()
    axis = op3.Axis(17, "points")
    x, y = dat(axis), dat(axis)
    loop = op3.loop(p := axis.iter(), copy(1)(x[p], y[p]))
    loop()
    engine.backend.attach()
    y.buffer.data_wo[...] = 0
    loop()
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check()


def test_detaching_restores_everything():
    from pyop3_mlir.frontends import pyop3 as front_end

    context = exec_.InstructionExecutionContext
    before = dict(vars(context)), dict(vars(exec_.CompiledCodeExecutor))
    first, second = front_end.attach(), front_end.attach()
    front_end.detach(first)
    front_end.detach(second)
    assert (dict(vars(context)), dict(vars(exec_.CompiledCodeExecutor))) == before


def test_detaching_leaves_nothing_with_loops(engine):
    axis = op3.Axis(17, "points")
    x, y = dat(axis), dat(axis)
    loop = op3.loop(p := axis.iter(), copy(1)(x[p], y[p]))
    loop()
    context = loop._get_execution_context(None)
    executable = context.compile().original.executable
    carriers = context, executable
    assert all("_pyop3_mlir" in vars(carrier) for carrier in carriers)
    engine.backend.detach()
    assert not any("_pyop3_mlir" in vars(carrier) for carrier in carriers)
    engine.backend.attach()
    y.buffer.data_wo[...] = 0
    loop()
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check()


def test_kernel_in_c_runs_through_pyop3(engine, caplog):
    axis = op3.Axis(5, "points")
    x = dat(axis, np.zeros(5))
    k = op3.Function.from_c_string("in_c", "x[0] = 42.0;", [("x", op3.ScalarType, op3.WRITE)])
    loop = op3.loop(p := axis.iter(), k(x[p]))
    loop()
    loop()
    assert np.array_equal(x.buffer.data_ro, np.full(5, 42.0))
    (entry,) = engine.entries("in_c")
    assert (entry.calls, entry.lowered) == (2, 0)
    assert "C code" in entry.reason
    assert sum("in_c" in record.message for record in caplog.records) == 1


def test_missing_name_is_named(monkeypatch):
    from pyop3_mlir.errors import Pyop3MlirError
    from pyop3_mlir.frontends import pyop3 as front_end

    monkeypatch.delattr(exec_, "CompiledCodeExecutor")
    with pytest.raises(Pyop3MlirError, match=r"no pyop3\.insn\.exec\.CompiledCodeExecutor"):
        front_end.attach()


def test_name_that_has_moved_is_found(monkeypatch):
    import pyop3.constants

    from pyop3_mlir.frontends.pyop3_names import find_names

    monkeypatch.delattr(pyop3.constants, "Intent")
    assert find_names().Intent is op3.INC.__class__

"""Ragged axes of pyop3: as many entries for a point as another array says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyop3.insn.exec", reason="pyop3 is in no registry and not installed here")
import pyop3 as op3
from pyop3_loops import add, copy, dat, lengths, ragged_axes, rng

STARTS = np.array([0, 3, 5, 6, 9])


def test_loop_over_a_ragged_axis(engine):
    axes = ragged_axes()
    x, y = dat(axes, rng.random(11)), dat(axes, np.zeros(11))
    op3.loop(p := axes.iter(), copy(1)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check("copy")


def test_ragged_axis_in_a_loop(engine):
    axes = ragged_axes()
    x, y = dat(axes, rng.random(11)), dat(axes, np.zeros(11))
    p = axes.root.iter()
    op3.loop(p, op3.Assignment(y[p], 2.0 * x[p], "write"), eager=True)
    assert np.array_equal(y.buffer.data_ro, 2 * x.buffer.data_ro)
    # how the loop is laid out is found by loops, too, and one of them is a prefix sum
    assert any(e.lowered for e in engine.entries("assignment"))


def test_sums_over_a_ragged_axis(engine):
    axes = ragged_axes()
    x, y = dat(axes, rng.random(11)), dat(axes.root, np.zeros(5))
    p = axes.root.iter()
    op3.loop(p, op3.loop(q := axes[p].iter(), add(1)(x[q], y[p])), eager=True)
    expected = np.add.reduceat(x.buffer.data_ro, STARTS)
    np.testing.assert_allclose(y.buffer.data_ro, expected, rtol=1e-14)
    engine.check("add")


def test_expression_on_a_ragged_axis_adds(engine):
    axes = ragged_axes()
    x, y = dat(axes, rng.random(11)), dat(axes, rng.random(11))
    before = y.buffer.data_ro.copy()
    p = axes.root.iter()
    op3.loop(p, op3.Assignment(y[p], x[p] * x[p] - 1.0, "inc"), eager=True)
    expected = before + x.buffer.data_ro**2 - 1
    np.testing.assert_allclose(y.buffer.data_ro, expected, rtol=1e-13, atol=1e-15)


def test_axis_inside_a_ragged_one(engine):
    root = op3.Axis(3, "points")
    ragged = op3.Axis([op3.AxisComponent(lengths(root, [3, 1, 2]))], "ragged")
    axes = op3.AxisTree.from_iterable([root, ragged, op3.Axis(2, "inner")])
    x, y = dat(axes, rng.random(12)), dat(axes, np.zeros(12))
    op3.loop(p := axes.iter(), copy(1)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check("copy")


def test_ragged_axis_below_one_component(engine):
    root = op3.Axis({"a": 3, "b": 2}, "points")
    length = lengths(op3.Axis({"b": 2}, "points"), [2, 3])
    below: list[Any] = [op3.Axis(2, "in_a"), op3.Axis([op3.AxisComponent(length)], "in_b")]
    axes = op3.AxisTree.from_nest({root: below})
    x, y = dat(axes, rng.random(11)), dat(axes, np.zeros(11))
    op3.loop(p := axes.iter(), copy(1)(x[p], y[p]), eager=True)
    assert np.array_equal(y.buffer.data_ro, x.buffer.data_ro)
    engine.check("copy")


def test_empty_rows_of_a_ragged_axis(engine):
    root = op3.Axis(4, "points")
    ragged = op3.Axis([op3.AxisComponent(lengths(root, [0, 2, 0, 3]))], "ragged")
    axes = op3.AxisTree.from_nest({root: ragged})
    x, y = dat(axes, rng.random(5)), dat(root, np.zeros(4))
    p = root.iter()
    op3.loop(p, op3.loop(q := axes[p].iter(), add(1)(x[q], y[p])), eager=True)
    values = x.buffer.data_ro
    expected = [0, values[:2].sum(), 0, values[2:].sum()]
    np.testing.assert_allclose(y.buffer.data_ro, expected, rtol=1e-14)
    engine.check("add")

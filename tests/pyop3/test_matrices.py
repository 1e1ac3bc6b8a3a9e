"""Matrices of pyop3 itself: one and two maps, maps of maps, access descriptors, patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyop3.insn.exec", reason="pyop3 is in no registry and not installed here")
import pyop3 as op3
from pyop3_loops import dat, function, map_, matrix_for, matrix_setup, rng


def element(rows: int, cols: int, access: Any = None) -> Any:
    """Adds x times known numbers to the element matrix, or stores the numbers."""
    access = access or op3.INC
    arguments = [("a", (rows, cols), access)]
    code = "a[i,j] = i + 2*j + 1"
    if access == op3.INC:
        code = "a[i,j] = a[i,j] + x[0]*(i + 2*j + 1)"
        arguments.insert(0, ("x", (1,), op3.READ))
    domains = f"{{[i]: 0<=i<{rows}}};{{[j]: 0<=j<{cols}}}"
    return function(code, arguments, domains, "element")


def numbers(rows: int, cols: int) -> np.ndarray:
    """What :func:`element` adds for x = 1."""
    return np.arange(rows)[:, None] + 2.0 * np.arange(cols) + 1


def summed(shape: tuple[int, int], rows: np.ndarray, cols: np.ndarray, x: Any) -> np.ndarray:
    """All element matrices added up."""
    result = np.zeros(shape)
    local = x.buffer.data_ro[:, None, None] * numbers(rows.shape[1], cols.shape[1])
    np.add.at(result, (rows[:, :, None], cols[:, None, :]), local)
    return result


def table_of_different(rows: int, targets: int, arity: int) -> np.ndarray:
    """Random targets, no two the same in a row."""
    return rng.permuted(np.tile(np.arange(targets), (rows, 1)), axis=1)[:, :arity]


def test_matrix(engine):
    cells, cone, table, mat = matrix_setup()
    x = dat(cells)
    k = function(
        "a[i,j] = a[i,j] + x[0]*(i+2*j+1)",
        [("x", (1,), op3.READ), ("a", (2, 2), op3.INC)],
        "{[i]: 0<=i<2};{[j]: 0<=j<2}",
        "element",
    )
    c = cells.iter()
    loop = op3.loop(c, k(x[c], mat[cone(c), cone(c)]))
    loop()
    loop()
    mat.assemble()
    local = 2 * x.buffer.data_ro[:, None, None] * [[1.0, 3.0], [2.0, 4.0]]
    expected = np.zeros((10, 10))
    np.add.at(expected, (table[:, :, None], table[:, None, :]), local)
    assert np.allclose(mat.buffer.mat[:, :], expected, rtol=1e-14)
    engine.check("element")


def test_matrix_whose_pattern_changes(engine):
    # PETSc takes entries out of rows in place: the values stay where they are
    cells, cone, table, mat = matrix_setup()
    k = function("a[i,j] = a[i,j] + i + 2*j + 1", [("a", (2, 2), op3.INC)],
                 "{[i]: 0<=i<2};{[j]: 0<=j<2}", "numbers")  # fmt: skip
    loop = op3.loop(c := cells.iter(), k(mat[cone(c), cone(c)]))
    loop()
    mat.assemble()
    petsc = mat.buffer.mat
    petsc.setOption(petsc.Option.KEEP_NONZERO_PATTERN, False)
    petsc.setOption(petsc.Option.NEW_NONZERO_LOCATION_ERR, False)
    petsc.zeroRows([4, 5], 0.0)
    loop()
    mat.assemble()
    once = np.zeros((10, 10))
    np.add.at(once, (table[:, :, None], table[:, None, :]), np.array([[1.0, 3.0], [2.0, 4.0]]))
    expected = 2 * once
    expected[4:6] = once[4:6]
    np.testing.assert_allclose(petsc[:, :], expected, rtol=1e-14)


def test_rows_and_columns_by_different_maps(engine):
    cells, rows, cols = op3.Axis(9, "cells"), op3.Axis(10, "rows"), op3.Axis(7, "cols")
    tables = table_of_different(9, 10, 2), table_of_different(9, 7, 3)
    first, second = map_(cells, rows, tables[0], "first"), map_(cells, cols, tables[1], "second")
    c = cells.iter()
    mat = matrix_for(c, rows.as_tree(), first(c), cols.as_tree(), second(c))
    x = dat(cells)
    op3.loop(c, element(2, 3)(x[c], mat[first(c), second(c)]), eager=True)
    mat.assemble()
    np.testing.assert_allclose(
        mat.buffer.mat[:, :], summed((10, 7), *tables, x), rtol=1e-14, atol=1e-15
    )
    engine.check("element")


def test_matrix_by_composed_maps(engine):
    cells, edges, vertices = op3.Axis(6, "cells"), op3.Axis(8, "edges"), op3.Axis(9, "vertices")
    tables = table_of_different(6, 8, 2), table_of_different(8, 9, 2)
    inner, outer = map_(cells, edges, tables[0], "inner"), map_(edges, vertices, tables[1], "outer")
    c, tree = cells.iter(), vertices.as_tree()
    index = outer(inner(c))
    mat = matrix_for(c, tree, index, tree, index)
    x = dat(cells)
    op3.loop(c, element(4, 4)(x[c], mat[index, index]), eager=True)
    mat.assemble()
    # a vertex may come twice in a cell
    composed = tables[1][tables[0]].reshape(6, 4)
    np.testing.assert_allclose(
        mat.buffer.mat[:, :], summed((9, 9), composed, composed, x), rtol=1e-14, atol=1e-15
    )
    engine.check("element")


def test_components_of_a_matrix(engine):
    cells, vertices = op3.Axis(9, "cells"), op3.Axis(10, "vertices")
    tree = op3.AxisTree.from_iterable([vertices, op3.Axis(2, "components")])
    table = np.array([[i, i + 1] for i in range(9)])
    cone = map_(cells, vertices, table, "cone")
    c = cells.iter()
    mat = matrix_for(c, tree, cone(c), tree, cone(c))
    x = dat(cells)
    op3.loop(c, element(4, 4)(x[c], mat[cone(c), cone(c)]), eager=True)
    mat.assemble()
    scalars = (2 * table[:, :, None] + np.arange(2)).reshape(9, 4)
    np.testing.assert_allclose(
        mat.buffer.mat[:, :], summed((20, 20), scalars, scalars, x), rtol=1e-14, atol=1e-15
    )
    engine.check("element")


def test_pairs_of_rows_among_an_odd_number(engine):
    # what the cells touch looks like nodes of two components, but the last row is alone
    cells, rows = op3.Axis(4, "cells"), op3.Axis(9, "rows")
    table = 2 * np.arange(4)[:, None] + np.arange(2)
    pairs = map_(cells, rows, table, "pairs")
    c, tree = cells.iter(), rows.as_tree()
    mat = matrix_for(c, tree, pairs(c), tree, pairs(c))
    x = dat(cells)
    op3.loop(c, element(2, 2)(x[c], mat[pairs(c), pairs(c)]), eager=True)
    mat.assemble()
    expected = summed((9, 9), table, table, x)
    np.testing.assert_allclose(mat.buffer.mat[:, :], expected, rtol=1e-14, atol=1e-15)
    engine.check("element")


def test_matrix_that_is_written(engine):
    cells, cone, table, mat = matrix_setup()
    c = cells.iter()
    op3.loop(c, element(2, 2, op3.WRITE)(mat[cone(c), cone(c)]), eager=True)
    mat.assemble()
    expected = np.zeros((10, 10))
    for row in table:
        # the later cell wins
        expected[np.ix_(row, row)] = numbers(2, 2)
    assert np.array_equal(mat.buffer.mat[:, :], expected)
    engine.check("element")


def test_sum_into_a_matrix_that_holds_values(engine):
    cells, cone, table, mat = matrix_setup()
    x, c = dat(cells), cells.iter()
    loop = op3.loop(c, element(2, 2)(x[c], mat[cone(c), cone(c)]))
    loop()
    mat.assemble()
    x.buffer.data_wo[...] = 10 * rng.random(9)
    first = mat.buffer.mat[:, :].copy()
    loop()
    mat.assemble()
    expected = first + summed((10, 10), table, table, x)
    np.testing.assert_allclose(mat.buffer.mat[:, :], expected, rtol=1e-13, atol=1e-15)
    engine.check("element")

"""Tables in two halves, against the whole table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyop3_mlir.lowering.symmetry import Dense, Folded, factorise


def apply(table, columns):
    """The rows, as the code that is made of it computes them."""
    if isinstance(table, Dense):
        return list(table.table @ columns)
    sums = [columns[c] + columns[d] for c, d in table.pairs]
    differences = [columns[c] - columns[d] for c, d in table.pairs]
    even = apply(table.even, np.array([*sums, *columns[list(table.fixed)]]))
    odd = apply(table.odd, np.array(differences))
    rows = {}
    for a, b, sign in table.rows:
        if a == b:
            rows[a] = even.pop(0) if sign > 0 else odd.pop(0)
        else:
            p, q = even.pop(0), odd.pop(0)
            rows[a], rows[b] = p + q, sign * (p - q)
    assert not even
    assert not odd
    assert sorted(rows) == list(range(len(rows)))
    return [rows[row] for row in range(len(rows))]


def assert_equal(table, folded):
    columns = np.random.default_rng(1).standard_normal(table.shape[1])
    scale = np.abs(table).max(initial=0) * np.abs(columns).sum()
    np.testing.assert_allclose(apply(folded, columns), table @ columns, atol=1e-14 * scale)


def lagrange(cell, degree, derivative):
    """Values or derivatives at quadrature points, ``[points, nodes]``, one below the other."""
    fiat = pytest.importorskip("FIAT")
    reference = fiat.ufc_cell(cell)
    points = fiat.create_quadrature(reference, 2 * (degree - derivative)).get_points()
    tables = fiat.Lagrange(reference, degree).tabulate(derivative, points)
    return np.vstack([values.T for key, values in tables.items() if sum(key) == derivative])


@pytest.mark.parametrize(
    ("cell", "degree", "derivative", "share"),
    [("triangle", 3, 0, 0.7), ("triangle", 3, 1, 0.7), ("triangle", 4, 1, 0.65)],
)
def test_reflections_of_a_triangle_are_found(cell, degree, derivative, share):
    table = lagrange(cell, degree, derivative)
    folded = factorise(table)
    assert isinstance(folded, Folded)
    assert folded.work <= share * np.count_nonzero(table)
    assert_equal(table, folded)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_mass_of_tetrahedra_is_folded_more_than_once(degree):
    fiat = pytest.importorskip("FIAT")
    cell = fiat.ufc_cell("tetrahedron")
    rule = fiat.create_quadrature(cell, 2 * degree)
    values = fiat.Lagrange(cell, degree).tabulate(0, rule.get_points())[0, 0, 0]
    table = (values * rule.get_weights()) @ values.T
    folded = factorise(table)
    assert isinstance(folded, Folded)
    assert isinstance(folded.even, Folded)
    assert folded.work < 0.6 * table.size
    assert_equal(table, folded)


def test_derivatives_on_an_interval_change_their_sign():
    """Rows of an odd table are opposite, not equal (Solomonoff's case)."""
    x = np.cos(np.pi * np.arange(12) / 11)
    x = (x - x[::-1]) / 2
    barycentric = np.array([(-1.0) ** k * (0.5 if k in (0, 11) else 1) for k in range(12)])
    with np.errstate(divide="ignore"):
        table = barycentric[None, :] / barycentric[:, None] / (x[:, None] - x[None, :])
    np.fill_diagonal(table, 0)
    np.fill_diagonal(table, -table.sum(axis=1))
    table = (table - table[::-1, ::-1]) / 2
    folded = factorise(table)
    assert isinstance(folded, Folded)
    assert {sign for _, _, sign in folded.rows} == {-1}
    assert folded.work < 0.7 * table.size
    assert_equal(table, folded)


def test_a_table_without_symmetry_is_left_alone():
    table = np.random.default_rng(0).standard_normal((8, 9))
    assert isinstance(factorise(table), Dense)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 20), (20, 1)])
def test_any_shape(shape):
    for table in (
        np.zeros(shape),
        np.ones(shape),
        np.arange(1.0, 1 + np.prod(shape)).reshape(shape),
    ):
        assert_equal(table, factorise(table))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_table_of_few_values(data):
    """Few values make many symmetries, wanted and accidental ones."""
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    values = data.draw(
        st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=81, max_size=81)
    )
    table = np.array(values)[: shape[0] * shape[1]].reshape(shape)
    if data.draw(st.booleans()):
        swap = np.arange(shape[1])[::-1]
        table = np.vstack([table, data.draw(st.sampled_from([1, -1])) * table[:, swap]])
    assert_equal(table, factorise(table))

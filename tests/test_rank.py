"""Sums over points by fewer functions: the same values, with fewer operations."""

import numpy as np
import pytest
from builder import KernelBuilder, dims_of, entry, product
from reference import evaluate_kernel

from pyop3_mlir.kernels.program import Op, Table
from pyop3_mlir.kernels.rank import use_low_rank

rng = np.random.default_rng(6)
FUNCTIONS = rng.standard_normal((3, 40))
FIRST, SECOND = (Table(rng.standard_normal((10, 3)) @ FUNCTIONS) for _ in range(2))
ACROSS = Table(np.ascontiguousarray((rng.standard_normal((10, 3)) @ FUNCTIONS).T))
FULL = Table(rng.standard_normal((10, 40)))


def assert_cheaper(kernel, parts):
    """The kernel with ``parts`` statements computes the same with less work."""
    changed = use_low_rank(kernel)
    assert len(changed.statements) == parts
    assert changed.count_flops() < kernel.count_flops()
    packs = [rng.standard_normal((7, *argument.shape)) for argument in kernel.arguments]
    expected, found = (evaluate_kernel(each, packs) for each in (kernel, changed))
    for argument, values in expected.items():
        scale = np.abs(values).max()
        np.testing.assert_allclose(found[argument], values, atol=1e-13 * scale, rtol=0)


def test_sum_over_points():
    k = KernelBuilder()
    x, y = k.argument(40), k.argument(10)
    i, q = dims_of((10, 40))
    k.output(y, k.compute((i,), product(entry(FIRST, i, q), entry(x, q)), over=(q,)))
    assert_cheaper(k.kernel(), 2)


def test_signs_and_tables_with_other_order_of_axes():
    k = KernelBuilder()
    x, w, y, z = k.argument(40), k.argument(40), k.argument(10), k.argument(10)
    i, q = dims_of((10, 40))
    a = product(entry(FIRST, i, q), entry(x, q))
    b = product(entry(w, q), entry(ACROSS, q, i), entry(x, q))
    c = product(entry(SECOND, i, q), entry(w, q))
    bodies = Op("sub", Op("neg", a), Op("sub", b, c)), Op("add", c, Op("neg", b))
    for argument, value in zip((y, z), k.compute((i,), *bodies, over=(q,)), strict=True):
        k.output(argument, value)
    assert_cheaper(k.kernel(), 2)


def test_values_at_points():
    k = KernelBuilder()
    x, y, z = k.argument(10), k.argument(40), k.argument(40)
    q, j = dims_of((40, 10))
    bodies = (
        product(entry(FIRST, j, q), entry(x, j)),
        Op(
            "sub",
            product(entry(x, j), entry(ACROSS, q, j)),
            product(entry(SECOND, j, q), entry(x, j)),
        ),
    )
    for argument, value in zip((y, z), k.compute((q,), *bodies, over=(j,)), strict=True):
        k.output(argument, value)
    assert_cheaper(k.kernel(), 2)


def test_a_matrix_and_its_transpose_share_moments():
    """As in a Jacobian whose blocks are transposes of each other."""
    k = KernelBuilder()
    x, y, z = k.argument(40, 10), k.argument(10, 10), k.argument(10, 10)
    i, j, q = dims_of((10, 10, 40))
    bodies = (
        product(entry(FIRST, i, q), entry(x, q, j)),
        product(entry(FIRST, j, q), entry(x, q, i)),
    )
    for argument, value in zip((y, z), k.compute((i, j), *bodies, over=(q,)), strict=True):
        k.output(argument, value)
    kernel = k.kernel()
    assert_cheaper(kernel, 2)
    assert len(use_low_rank(kernel).statements[0].results) == 1


def jacobian(first, second, extra=False):
    """What a Jacobian of two equations does: fields times one table at points, summed with one."""
    k = KernelBuilder()
    c, a, b = k.argument(40), k.argument(10, 10), k.argument(10, 10)
    i, j, q = dims_of((10, 10, 40))
    point, node = dims_of((40, 10))
    bodies = (
        Op("sub", Op("neg", entry(c, point)), Op("mul", entry(c, point), entry(c, point))),
        Op("mul", entry(c, 0), entry(c, point)),
    )
    values = k.compute((point,), *bodies)
    fields = k.compute(
        (point, node),
        Op(
            "sub",
            product(entry(second, node, point), entry(values[0], point)),
            product(entry(values[1], point), entry(second, node, point)),
        ),
        product(entry(values[1], point), entry(second, node, point)),
    )
    sums = (
        Op("neg", product(entry(first, i, q), entry(fields[0], q, j))),
        product(entry(first, j, q), entry(fields[1], q, i)),
    )
    for argument, value in zip((a, b), k.compute((i, j), *sums, over=(q,)), strict=True):
        k.output(argument, value)
    if extra:
        kept = k.argument(40, 10)
        k.output(kept, fields[0])
    return k.kernel()


def test_products_of_tables():
    """The fields are not computed any more: moments of what is the same for all functions are."""
    kernel = jacobian(FIRST, SECOND)
    changed = use_low_rank(kernel)
    assert not any(40 in r.shape and 10 in r.shape for s in changed.statements for r in s.results)
    (moments,) = (s for s in changed.statements if s.reductions and s.reductions[0].extent == 40)
    assert moments.dims[0].extent <= 9
    assert len(moments.results) == 2
    assert_cheaper(kernel, 4)


def test_fields_that_are_needed_elsewhere_stay():
    kernel = jacobian(FIRST, SECOND, extra=True)
    assert any(
        40 in r.shape and 10 in r.shape for s in use_low_rank(kernel).statements for r in s.results
    )
    assert_cheaper(kernel, 5)


@pytest.mark.parametrize("table", [FULL, Table(FULL.values[:, :12] * 1.0)])
def test_tables_of_full_rank_stay(table):
    k = KernelBuilder()
    points = table.shape[1]
    x, y = k.argument(points), k.argument(10)
    i, q = dims_of((10, points))
    k.output(y, k.compute((i,), product(entry(table, i, q), entry(x, q)), over=(q,)))
    kernel = k.kernel()
    assert use_low_rank(kernel) is kernel


def test_tables_of_nearly_low_rank_stay():
    """What is neither rounding nor clearly more must not be lost."""
    table = Table(FIRST.values + 1e-9 * FULL.values)
    k = KernelBuilder()
    x, y = k.argument(40), k.argument(10)
    i, q = dims_of((10, 40))
    k.output(y, k.compute((i,), product(entry(table, i, q), entry(x, q)), over=(q,)))
    kernel = k.kernel()
    assert use_low_rank(kernel) is kernel


def test_what_depends_on_the_basis_function_stays():
    k = KernelBuilder()
    x, y = k.argument(10, 40), k.argument(10)
    i, q = dims_of((10, 40))
    k.output(y, k.compute((i,), product(entry(FIRST, i, q), entry(x, i, q)), over=(q,)))
    kernel = k.kernel()
    assert use_low_rank(kernel) is kernel


def test_a_term_without_a_table_stays():
    k = KernelBuilder()
    x, y = k.argument(40), k.argument(10)
    i, q = dims_of((10, 40))
    body = Op("add", product(entry(FIRST, i, q), entry(x, q)), entry(x, q))
    k.output(y, k.compute((i,), body, over=(q,)))
    kernel = k.kernel()
    assert use_low_rank(kernel) is kernel

"""Weights that move into tables: the same values, with fewer operations."""

import numpy as np
import pytest
from builder import KernelBuilder, dims_of, entry, product
from reference import evaluate_kernel

from pyop3_mlir.kernels.program import Load, Op, Scalar, Table, postorder
from pyop3_mlir.kernels.rank import use_low_rank
from pyop3_mlir.kernels.weights import fold_weights

rng = np.random.default_rng(4)
WEIGHTS = Table(rng.standard_normal(5))
VALUES = Table(rng.standard_normal((3, 5)))
MORE = Table(rng.standard_normal((5, 3)))


def quadrature(use, weight=WEIGHTS, output=False):
    """``y[i] = sum over q of use(i, q, t)`` with ``t[q] = x[q] * weight[q] * x[q]``."""
    k = KernelBuilder("weighted")
    x, y = k.argument(5), k.argument(3)
    (q,) = dims_of((5,))
    t = k.compute((q,), product(entry(x, q), entry(weight, q), entry(x, q)))
    i, r = dims_of((3, 5))
    k.output(y, k.compute((i,), use(i, r, t), over=(r,)))
    if output:
        k.output(k.argument(5), t)
    return k.kernel()


def assert_same(kernel, folded):
    packs = [rng.standard_normal((7, *argument.shape)) for argument in kernel.arguments]
    expected, found = (evaluate_kernel(each, packs) for each in (kernel, folded))
    assert expected.keys() == found.keys()
    for argument, values in expected.items():
        np.testing.assert_allclose(found[argument], values, rtol=1e-13, atol=1e-13)


def loads(kernel, source):
    return any(
        isinstance(node, Load) and node.source is source
        for statement in kernel.statements
        for node in postorder(statement.bodies)
    )


FOLDED = {
    "product": lambda i, q, t: product(entry(VALUES, i, q), entry(t, q)),
    "other order": lambda i, q, t: product(entry(t, q), entry(MORE, q, i)),
    "two terms": lambda i, q, t: Op(
        "sub",
        product(entry(VALUES, i, q), entry(t, q)),
        Op("neg", product(entry(t, q), entry(MORE, q, i))),
    ),
    "three factors": lambda i, q, t: product(entry(VALUES, i, q), Scalar(2.0), entry(t, q)),
    "table of one dimension": lambda i, q, t: product(
        entry(Table(VALUES.values[0]), q), entry(t, q)
    ),
}
KEPT = {
    "alone": lambda i, q, t: Op("add", entry(VALUES, i, q), entry(t, q)),
    "squared": lambda i, q, t: product(entry(VALUES, i, q), entry(t, q), entry(t, q)),
    "inside a function": lambda i, q, t: product(entry(VALUES, i, q), Op("exp", entry(t, q))),
    "one of two terms": lambda i, q, t: Op(
        "add", product(entry(VALUES, i, q), entry(t, q)), entry(t, q)
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_weights_move_into_tables(name):
    kernel = quadrature(FOLDED[name])
    folded = fold_weights(kernel)
    assert not loads(folded, WEIGHTS)
    assert folded.count_flops() < kernel.count_flops()
    assert_same(kernel, folded)


@pytest.mark.parametrize("name", KEPT)
def test_weights_of_what_is_used_otherwise_stay(name):
    kernel = quadrature(KEPT[name])
    assert fold_weights(kernel) is kernel


def test_weights_of_outputs_stay():
    kernel = quadrature(FOLDED["product"], output=True)
    assert fold_weights(kernel) is kernel


def test_weights_of_what_a_pointwise_statement_uses_stay():
    k = KernelBuilder("chain")
    x, y = k.argument(5), k.argument(3)
    (q,), (p,) = dims_of((5,)), dims_of((5,))
    t = k.compute((q,), product(entry(WEIGHTS, q), entry(x, q)))
    u = k.compute((p,), product(entry(t, p), entry(x, p)))
    i, r = dims_of((3, 5))
    k.output(y, k.compute((i,), product(entry(VALUES, i, r), entry(u, r)), over=(r,)))
    kernel = k.kernel()
    assert fold_weights(kernel) is kernel


def test_the_same_value_is_read_by_other_names():
    """A value of two dimensions, read transposed: its weight belongs to the first of them."""
    k = KernelBuilder("transposed")
    x, y = k.argument(5, 3), k.argument(3)
    q, c = dims_of((5, 3))
    t = k.compute((q, c), product(entry(WEIGHTS, q), entry(x, q, c)))
    i, r = dims_of((3, 5))
    body = product(entry(t, r, i), entry(MORE, r, i))
    k.output(y, k.compute((i,), body, over=(r,)))
    kernel = k.kernel()
    folded = fold_weights(kernel)
    assert not loads(folded, WEIGHTS)
    assert_same(kernel, folded)


def test_sums_may_be_deep():
    """Kernels of thousands of terms must not meet the limit of recursion."""

    def deep(i, q, t):
        body = entry(t, q)
        for n in range(5000):
            body = Op("add", body, product(entry(VALUES, i, q), Scalar(float(n)), entry(t, q)))
        return body

    kernel = quadrature(deep)
    assert fold_weights(kernel) is kernel
    assert use_low_rank(kernel) is kernel

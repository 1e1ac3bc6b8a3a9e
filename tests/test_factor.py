"""Common factors out of sums: the same values, with fewer operations."""

from __future__ import annotations

import numpy as np
import pytest
from builder import KernelBuilder, dims_of, entry, product, total
from reference import evaluate_kernel

from pyop3_mlir.kernels.factor import factor_sums
from pyop3_mlir.kernels.program import Op, Scalar

rng = np.random.default_rng(12)


def kernel_of(make, size=6, dtype=np.float64):
    """A kernel of one pointwise statement: ``make`` gets entries and returns bodies."""
    k = KernelBuilder()
    inputs = [k.argument(size, dtype=dtype) for _ in range(5)]
    (i,) = dims_of((size,))
    bodies = make(*(entry(x, i) for x in inputs))
    values = k.compute((i,), *bodies)
    for value in values if isinstance(values, tuple) else (values,):
        k.output(k.argument(size, dtype=value.dtype), value)
    return k.kernel()


def operations_after(kernel, tolerance=1e-14):
    """Operations a point of the changed kernel, which has to give the same values."""
    changed = factor_sums(kernel)
    packs = [rng.uniform(1, 2, (7, *argument.shape)) for argument in kernel.arguments]
    packs = [p.astype(a.dtype) for p, a in zip(packs, kernel.arguments, strict=True)]
    expected, found = (evaluate_kernel(each, packs) for each in (kernel, changed))
    for argument, values in expected.items():
        np.testing.assert_allclose(found[argument], values, rtol=tolerance)
    return changed.count_flops() // 6


def test_a_factor_of_some_terms():
    kernel = kernel_of(lambda a, b, c, d, e: [total(product(a, b), product(c, a), d)])
    assert operations_after(kernel) == 3


def test_what_entries_have_in_common_is_computed_once():
    """The tangent of a neo-Hookean energy: t + a (a s) + 0.75 (2 (b s) - 2 (c (a s)))."""

    def tangent(a, b, c, d, e):
        two, weight = Scalar(2.0), Scalar(0.75)
        for s, t in ((d, e), (product(d, e), d), (product(e, e), Op("sqrt", e))):
            inner = product(a, s)
            difference = Op("sub", product(two, product(b, s)), product(two, product(c, inner)))
            yield total(t, product(a, inner), product(weight, difference))

    # three pairs of a product and a sum, two products, a root, and 1.5 b + a (a - 1.5 c)
    assert operations_after(kernel_of(tangent)) == 3 * 2 + 2 + 1 + 5


def test_equal_terms_are_added_up():
    def body(a, b, c, d, e):
        yield product(Scalar(0.5), Op("add", Op("add", a, b), Op("add", b, a)))

    assert operations_after(kernel_of(body)) == 1


def test_single_precision():
    kernel = kernel_of(lambda a, b, c, d, e: [total(product(a, b), product(a, c))], 6, np.float32)
    assert operations_after(kernel, 1e-6) == 2


def test_a_sum_that_is_needed_elsewhere_stays():
    def bodies(a, b, c, d, e):
        shared = Op("add", a, b)
        yield product(shared, c)
        yield Op("sub", d, shared)

    kernel = kernel_of(bodies)
    assert factor_sums(kernel) is kernel


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b, c, d, e: [Op("sub", Op("add", product(a, b), product(a, c)), product(a, b))],
        lambda a, b, c, d, e: [
            Op("add", Op("mul", Scalar(np.inf), a), Op("mul", Scalar(np.inf), b))
        ],
    ],
)
def test_what_is_not_finite_stays_so(make):
    """Infinity minus infinity is NaN, and stays it: no term is dropped."""
    kernel = kernel_of(make)
    changed = factor_sums(kernel)
    packs = [np.full((1, *argument.shape), np.inf) for argument in kernel.arguments]
    expected, found = (evaluate_kernel(each, packs) for each in (kernel, changed))
    for argument, values in expected.items():
        np.testing.assert_array_equal(found[argument], values)


def test_guarded_branches_keep_their_guards():
    """The branch that is not taken is not a number."""

    def body(a, b, c, d, e):
        negative = Op("neg", a)
        bad = Op("add", product(Op("log", negative), b), product(Op("log", negative), c))
        yield Op("select", Op("lt", Scalar(0.0), a), product(a, b), bad)

    with np.errstate(invalid="ignore"):
        assert operations_after(kernel_of(body)) < kernel_of(body).count_flops() // 6

"""When the results of two engines count as equal, on numbers whose rounding is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from builder import KernelBuilder, dims_of, entry

from pyop3_mlir.errors import VerificationError
from pyop3_mlir.frontends.verify import compare_argument
from pyop3_mlir.kernels.program import Expr, Op, Scalar
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import INC, READ, WRITE, Argument, IterationSet, Parloop

CELLS = 20
EPS = float(np.finfo(float).eps)


def pairwise(access, body: Callable[[Expr, Expr], Expr], first, second) -> Parloop:
    """A value of two numbers in each cell, summed up or written."""
    k = KernelBuilder("pairwise")
    out, a, b = k.argument(1), k.argument(1), k.argument(1)
    (i,) = dims_of((1,))
    k.store(out, (i,), body(entry(a, i), entry(b, i)))
    target = (
        Argument.glob(np.zeros(1), INC, "out")
        if access is INC
        else Argument.direct(np.zeros((len(first), 1)), WRITE, "out")
    )
    read = [Argument.direct(values.reshape(-1, 1), READ) for values in (first, second)]
    return Parloop(k.kernel(), IterationSet(len(first)), [target, *read])


def errors(access, power: int, first: np.ndarray, second: np.ndarray) -> Parloop:
    """``(first - second) ** power`` in each cell."""

    def body(a: Expr, b: Expr) -> Expr:
        term = Op("sub", a, b)
        return Op("mul", term, term) if power == 2 else term

    return pairwise(access, body, first, second)


def chosen(access, values: np.ndarray) -> Parloop:
    """1 where a number is larger than itself, else 2."""

    def body(a: Expr, b: Expr) -> Expr:
        return Op("select", Op("gt", a, b), Scalar(1.0), Scalar(2.0))

    return pairwise(access, body, values, values.copy())


def rearranged(access, rest: float) -> Parloop:
    """``rest + (a b) b - a (b b)``: rounding within the kernel, as large whatever the input is."""

    def body(a: Expr, b: Expr) -> Expr:
        left, right = Op("mul", Op("mul", a, b), b), Op("mul", a, Op("mul", b, b))
        return Op("add", Scalar(rest), Op("sub", left, right))

    return pairwise(access, body, thirds() / CELLS, thirds()[::-1] / CELLS)


def thirds() -> np.ndarray:
    return np.arange(1, CELLS + 1) / 3


@pytest.mark.parametrize(
    ("access", "power", "size", "equal"),
    [
        # as far apart as the last digits of the input allow
        (INC, 2, 4 * EPS**2, True),
        (INC, 1, 8 * EPS, True),
        (WRITE, 2, 4 * EPS**2, True),
        (WRITE, 1, 8 * EPS, True),
        # and much farther
        (INC, 2, 1e-20, False),
        (INC, 1, 1e-9, False),
        (WRITE, 2, 1e-20, False),
        (WRITE, 1, 1e-9, False),
    ],
)
def test_what_cancellation_leaves(access, power, size, equal):
    """Two functions are equal but for rounding; one engine finds no difference at all."""
    loop = errors(access, power, thirds(), thirds())
    count = 1 if access is INC else CELLS
    found, expected = np.zeros(count), np.full(count, size)
    with contextlib.nullcontext() if equal else pytest.raises(VerificationError, match="out"):
        compare_argument("loop", loop, 0, found, expected, np.zeros(count), Options.resolve())


@pytest.mark.parametrize(("size", "equal"), [(1e-27, True), (1e-20, False)])
def test_iterations_far_from_the_first(size, equal):
    """The difference of two functions whose first thousand values are far smaller than the rest."""
    cells = 2000
    values = np.where(np.arange(cells) < cells // 2, 1e-12, 1.0)
    loop = errors(INC, 2, values, values * (1 + 1e-9))
    expected = np.array([np.sum((values * 1e-9) ** 2)])
    difference = np.array([size])
    with contextlib.nullcontext() if equal else pytest.raises(VerificationError, match="out"):
        compare_argument(
            "loop", loop, 0, expected + difference, expected, np.zeros(1), Options.resolve()
        )


@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
@pytest.mark.parametrize("rest", [0.0, 1e-9])
@pytest.mark.parametrize(("size", "equal"), [(EPS / 4, True), (1e-12, False)])
def test_rounding_within_the_kernel(access, rest, size, equal):
    loop = rearranged(access, rest)
    count = 1 if access is INC else CELLS
    expected = np.full(count, rest * (CELLS if access is INC else 1))
    with contextlib.nullcontext() if equal else pytest.raises(VerificationError, match="out"):
        compare_argument(
            "loop", loop, 0, expected + size, expected, np.zeros(count), Options.resolve()
        )


@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_a_branch_that_rounding_decides_hides_nothing(access):
    """Where two numbers are equal, the last digits of either choose between 1 and 2."""
    loop = chosen(access, thirds())
    count, value = (1, 2.0 * CELLS) if access is INC else (CELLS, 2.0)
    expected = np.full(count, value)
    with pytest.raises(VerificationError, match="out"):
        compare_argument(
            "loop", loop, 0, expected * (1 + 1e-6), expected, np.zeros(count), Options.resolve()
        )


@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_what_does_not_cancel_is_compared_strictly(access):
    loop = errors(access, 2, thirds(), np.zeros(CELLS))
    count = 1 if access is INC else CELLS
    expected = np.full(count, float(sum(thirds() ** 2))) if access is INC else thirds() ** 2
    for change in (1e-11, 1e-9):
        found = expected * (1 + change)
        with pytest.raises(VerificationError, match="out"):
            compare_argument("loop", loop, 0, found, expected, np.zeros(count), Options.resolve())

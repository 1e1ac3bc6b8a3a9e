"""Determinant, inverse and solution of small dense systems, one for each cell.

Up to 3 x 3 these are closed forms: cofactors over the determinant. Larger systems are factorised as
LAPACK's ``getrf`` does it (Golub and Van Loan, Matrix Computations, 4th edition, algorithm 3.4.1:
Gaussian elimination with partial pivoting), unrolled over the elimination steps into ordinary
statements: the pivot by compares and selects, rows swapped by selects, so that lowering needs
nothing special and nothing can hang. The inverse of a singular matrix has inf or nan entries.

Two forms: the ``*_entries`` functions map scalar expressions to scalar expressions (up to 3 x 3
only); :func:`determinant`, :func:`inverse` and :func:`solve` read whole sources and give
statements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.kernels.program import (
    INDEX,
    Compute,
    Dim,
    Expr,
    IndexOf,
    Load,
    Op,
    Scalar,
    Source,
    Temporary,
)

__all__ = [
    "CLOSED_FORM",
    "determinant",
    "determinant_entries",
    "inverse",
    "inverse_entries",
    "solve",
    "solve_entries",
]

CLOSED_FORM = 3
"""The largest size for which there is a closed form."""

Entries = npt.NDArray[np.object_]
MakeOp = Callable[..., Expr]
Matrix = Callable[[Expr, Expr], Expr]
"""An entry of a matrix by its row and column."""

# -- closed forms -----------------------------------------------------------------------------


def determinant_entries(matrix: Entries, op: MakeOp = Op) -> Expr:
    """Determinant of a matrix of expressions.

    Parameters
    ----------
    matrix
        ``[n, n]`` array of scalar expressions, n at most :data:`CLOSED_FORM`.
    op
        Makes operations (:meth:`~pyop3_mlir.kernels.assemble.Builder.op` folds constants).

    Returns
    -------
    Expr
        The determinant.
    """
    n = _size(matrix.shape)
    if n == 0:
        raise ValueError("the determinant of a 0 x 0 matrix has no dtype")
    if n > CLOSED_FORM:
        raise ValueError(f"no closed form for the determinant of a {n} x {n} matrix")
    if n == 1:
        return matrix[0, 0]  # type: ignore[no-any-return]
    if n == 2:
        return _minor(matrix, (0, 1), (0, 1), op)
    return _determinant_3(matrix, op)


def _determinant_3(matrix: Entries, op: MakeOp) -> Expr:
    """One step of elimination with a pivot, then the 2 x 2 formula.

    The sum over cofactors has a relative error of eps (s1 / s2) (s1 / s3) for singular values
    s1 >= s2 >= s3; this one, like LAPACK's, of eps s1 / s3.
    """
    rows = [list(matrix[k]) for k in range(3)]
    swaps = []
    for k in (1, 2):
        larger = op("gt", _magnitude(rows[k][0], op), _magnitude(rows[0][0], op))
        swaps.append(larger)
        rows[0], rows[k] = (
            [op("select", larger, a, b) for a, b in zip(rows[k], rows[0], strict=True)],
            [op("select", larger, a, b) for a, b in zip(rows[0], rows[k], strict=True)],
        )
    pivot = rows[0][0]
    zero, one = Scalar(0, pivot.dtype), Scalar(1, pivot.dtype)
    # a column of zeros: the determinant is zero, not 0 / 0
    scale = op("div", one, op("select", op("eq", pivot, zero), one, pivot))
    reduced = np.empty((2, 2), object)
    for k in (1, 2):
        factor = op("mul", rows[k][0], scale)
        for j in (1, 2):
            reduced[k - 1, j - 1] = op("sub", rows[k][j], op("mul", factor, rows[0][j]))
    value = op("mul", pivot, _minor(reduced, (0, 1), (0, 1), op))
    for swap in swaps:
        value = op("select", swap, op("neg", value), value)
    return value


def _magnitude(value: Expr, op: MakeOp) -> Expr:
    """What pivots are compared by: the modulus, or LAPACK's cheaper measure for complex numbers."""
    if value.dtype.kind != "c":
        return op("abs", value)
    return op("add", op("abs", op("real", value)), op("abs", op("imag", value)))


def inverse_entries(matrix: Entries, op: MakeOp = Op) -> Entries:
    """Inverse of a matrix of expressions by cofactors; parameters as :func:`determinant_entries`.

    Returns
    -------
    ndarray
        ``[n, n]`` expressions.
    """
    n = _size(matrix.shape)
    found = np.empty((n, n), object)
    if not n:
        return found
    scale = op("div", Scalar(1, matrix[0, 0].dtype), determinant_entries(matrix, op))
    for row, column in np.ndindex(n, n):
        if n == 1:
            found[row, column] = scale
        else:
            found[row, column] = op("mul", _cofactor(matrix, column, row, op), scale)
    return found


def solve_entries(matrix: Entries, rhs: Entries, op: MakeOp = Op) -> Entries:
    """Solution X of ``matrix X = rhs``, by the inverse.

    Parameters
    ----------
    matrix, op
        As for :func:`determinant_entries`.
    rhs
        ``[n, ...]`` expressions.

    Returns
    -------
    ndarray
        Expressions, shaped as ``rhs``.
    """
    n = _size(matrix.shape)
    inverted = inverse_entries(matrix, op)
    found = np.empty(rhs.shape, object)
    for row, *columns in np.ndindex(*rhs.shape):
        value = op("mul", inverted[row, 0], rhs[(0, *columns)])
        for k in range(1, n):
            value = op("add", value, op("mul", inverted[row, k], rhs[(k, *columns)]))
        found[(row, *columns)] = value
    return found


def _size(shape: Sequence[int]) -> int:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"expected a square matrix, got shape {tuple(shape)}")
    return shape[0]


def _minor(matrix: Entries, rows: Sequence[int], columns: Sequence[int], op: MakeOp) -> Expr:
    """Determinant of a 2 x 2 part."""
    (r, s), (c, d) = rows, columns
    return op("sub", op("mul", matrix[r, c], matrix[s, d]), op("mul", matrix[r, d], matrix[s, c]))


def _cofactor(matrix: Entries, row: int, column: int, op: MakeOp) -> Expr:
    """Cofactor of a 2 x 2 or 3 x 3 matrix, its sign included."""
    if matrix.shape[0] == 2:
        minor: Expr = matrix[1 - row, 1 - column]
        return op("neg", minor) if (row + column) % 2 else minor
    # cyclic neighbours: the sign comes by itself
    rows, columns = ((row + 1) % 3, (row + 2) % 3), ((column + 1) % 3, (column + 2) % 3)
    return _minor(matrix, rows, columns, op)


# -- statements -------------------------------------------------------------------------------


def determinant(matrix: Source, batch: Sequence[Dim] = ()) -> tuple[list[Compute], Temporary]:
    """Determinants of the matrices in ``matrix``.

    Parameters
    ----------
    matrix
        Shape ``[*batch, n, n]``, of a float or complex dtype.
    batch
        Dimensions of the leading axes.

    Returns
    -------
    statements
        To be placed after ``matrix`` is defined.
    result
        Defined by them, of shape ``[*batch]``.
    """
    make = _Maker(tuple(batch), matrix.dtype)
    n = make.check(matrix)
    if n <= CLOSED_FORM:
        value = determinant_entries(make.entries(matrix)) if n else Scalar(1, matrix.dtype)
        return make.statements, make.define("det", (), value)
    steps = make.eliminate(matrix, None)
    value = make.load(steps[0].pivot_row, Scalar(0, INDEX))
    for step in steps[1:]:
        value = Op("mul", value, make.load(step.pivot_row, Scalar(0, INDEX)))
    for step in steps[:-1]:
        assert step.pivot is not None
        swapped = Op("ne", make.load(step.pivot), Scalar(0, step.pivot.dtype))
        value = Op("select", swapped, Op("neg", value), value)
    return make.statements, make.define("det", (), value)


def inverse(matrix: Source, batch: Sequence[Dim] = ()) -> tuple[list[Compute], Temporary]:
    """Inverses of the matrices in ``matrix``; parameters as :func:`determinant`.

    Returns
    -------
    statements
        To be placed after ``matrix`` is defined.
    result
        Defined by them, of shape ``[*batch, n, n]``.
    """
    make = _Maker(tuple(batch), matrix.dtype)
    n = make.check(matrix)
    if n > CLOSED_FORM:
        row, column = Dim("r", n), Dim("j", n)
        one, zero = Scalar(1, matrix.dtype), Scalar(0, matrix.dtype)
        identity = make.define(
            "id", (row, column), Op("select", _equal(IndexOf(row), IndexOf(column)), one, zero)
        )
        return make.statements, make.substitute_back(make.eliminate(matrix, identity), (column,))
    row, column = Dim("r", n), Dim("c", n)
    r, c = IndexOf(row), IndexOf(column)
    if n == 0:
        return make.statements, make.define("inv", (row, column), Scalar(0, matrix.dtype))
    one = Scalar(1, matrix.dtype)
    value = determinant_entries(make.entries(matrix))
    scale = make.load(make.define("scale", (), Op("div", one, value)))
    if n == 1:
        return make.statements, make.define("inv", (row, column), scale)

    def near(index: Expr, step: int) -> Expr:
        """Index ``step`` further, cyclically."""
        return Op("rem", Op("add", index, Scalar(step, INDEX)), Scalar(n, INDEX))

    def entry(i: Expr, j: Expr) -> Expr:
        return make.load(matrix, i, j)

    if n == 2:
        minor = entry(near(c, 1), near(r, 1))
        cofactor = Op("select", _equal(r, c), minor, Op("neg", minor))
    else:
        cofactor = Op(
            "sub",
            Op("mul", entry(near(c, 1), near(r, 1)), entry(near(c, 2), near(r, 2))),
            Op("mul", entry(near(c, 1), near(r, 2)), entry(near(c, 2), near(r, 1))),
        )
    return make.statements, make.define("inv", (row, column), Op("mul", cofactor, scale))


def solve(
    matrix: Source, rhs: Source, batch: Sequence[Dim] = ()
) -> tuple[list[Compute], Temporary]:
    """Solutions X of ``matrix X = rhs``.

    Parameters
    ----------
    matrix
        Shape ``[*batch, n, n]``, of a float or complex dtype.
    rhs
        Shape ``[*batch, n, *columns]`` with any number of column axes, of the same dtype.
    batch
        Dimensions of the leading axes.

    Returns
    -------
    statements
        To be placed after ``matrix`` and ``rhs`` are defined.
    result
        Defined by them, of the shape of ``rhs``.
    """
    make = _Maker(tuple(batch), matrix.dtype)
    n = make.check(matrix)
    lead = len(make.batch)
    if rhs.shape[: lead + 1] != (*matrix.shape[:lead], n) or rhs.dtype != matrix.dtype:
        raise ValueError(
            f"right-hand side {rhs.name} ({rhs.dtype}{list(rhs.shape)}) does not fit matrix "
            f"{matrix.name} ({matrix.dtype}{list(matrix.shape)})"
        )
    columns = tuple(Dim("j", extent) for extent in rhs.shape[lead + 1 :])
    if n > CLOSED_FORM:
        return make.statements, make.substitute_back(make.eliminate(matrix, rhs, columns), columns)
    statements, inverted = inverse(matrix, make.batch)
    make.statements += statements
    row, inner = Dim("r", n), Dim("k", n)
    value = Op(
        "mul",
        make.load(inverted, IndexOf(row), IndexOf(inner)),
        make.load(rhs, IndexOf(inner), *map(IndexOf, columns)),
    )
    return make.statements, make.define("x", (row, *columns), value, (inner,))


@dataclass(frozen=True)
class _Step:
    """One step of the elimination: what the remaining rows were reduced with.

    ``pivot`` is the number of the pivot row among the remaining rows (int32; None in the last
    step), ``pivot_row`` that row and ``pivot_rhs`` its right-hand side.
    """

    pivot: Temporary | None
    pivot_row: Temporary
    pivot_rhs: Temporary | None


class _Maker:
    """Collects statements over the dimensions of a batch."""

    def __init__(self, batch: tuple[Dim, ...], dtype: np.dtype[Any]) -> None:
        self.batch = batch
        self.dtype = dtype
        self.statements: list[Compute] = []

    def check(self, matrix: Source) -> int:
        """The size of the matrix."""
        lead = len(self.batch)
        if matrix.shape[:lead] != tuple(dim.extent for dim in self.batch):
            raise ValueError(f"{matrix.name} of shape {matrix.shape} does not start with the batch")
        if matrix.dtype.kind not in "fc":
            raise ValueError(f"{matrix.name} is {matrix.dtype}, expected a float or complex type")
        return _size(matrix.shape[lead:])

    def load(self, source: Source, *indices: Expr) -> Expr:
        return Load(source, [*map(IndexOf, self.batch), *indices])

    def entries(self, matrix: Source) -> Entries:
        n = matrix.shape[-1]
        found = np.empty((n, n), object)
        for i, j in np.ndindex(n, n):
            found[i, j] = self.load(matrix, Scalar(i, INDEX), Scalar(j, INDEX))
        return found

    def define(
        self, name: str, dims: Sequence[Dim], body: Expr, reductions: Sequence[Dim] = ()
    ) -> Temporary:
        dims = (*self.batch, *dims)
        result = Temporary(name, tuple(dim.extent for dim in dims), body.dtype)
        self.statements.append(Compute((result,), dims, tuple(reductions), (body,)))
        return result

    def eliminate(
        self, matrix: Source, rhs: Source | None, columns: Sequence[Dim] | None = None
    ) -> list[_Step]:
        """Gaussian elimination with partial pivoting; the matrix shrinks by one row each step."""
        n = matrix.shape[-1]
        if rhs is not None and columns is None:
            columns = [Dim("j", extent) for extent in rhs.shape[len(self.batch) + 1 :]]
        across = [IndexOf(dim) for dim in columns or ()]
        zero = Scalar(0, self.dtype)
        first = Scalar(0, INDEX)
        steps = []
        for size in range(n, 0, -1):
            row, column = Dim("r", size), Dim("c", size)
            pivot = None if size == 1 else self.define("piv", (), self._pivot(matrix, size))

            def swapped(
                index: Expr, source: Source, rest: Sequence[Expr], pivot: Temporary | None = pivot
            ) -> Expr:
                """Entry of row ``index`` > 0 once the first and the pivot row changed places."""
                assert pivot is not None
                is_pivot = _equal(index, Op("cast", self.load(pivot), dtype=INDEX))
                return Op(
                    "select",
                    is_pivot,
                    self.load(source, first, *rest),
                    self.load(source, index, *rest),
                )

            def chosen(
                source: Source,
                dims: Sequence[Dim],
                pivot: Temporary | None = pivot,
                row: Dim = row,
            ) -> Temporary:
                """The pivot row."""
                rest = [IndexOf(dim) for dim in dims]
                if pivot is None:
                    return self.define("u", dims, self.load(source, first, *rest))
                is_pivot = _equal(IndexOf(row), Op("cast", self.load(pivot), dtype=INDEX))
                body = Op("select", is_pivot, self.load(source, IndexOf(row), *rest), zero)
                return self.define("u", dims, body, (row,))

            u = chosen(matrix, (column,))
            v = chosen(rhs, columns or ()) if rhs is not None else None
            steps.append(_Step(pivot, u, v))
            if size == 1:
                break
            row, column = Dim("r", size - 1), Dim("c", size - 1)
            below = Op("add", IndexOf(row), Scalar(1, INDEX))
            right = Op("add", IndexOf(column), Scalar(1, INDEX))
            divisor = self.load(u, first)
            if rhs is None:
                # for a determinant: what is below a zero pivot is zero, and so is the result
                one = Scalar(1, self.dtype)
                divisor = Op("select", _equal(divisor, zero), one, divisor)
            factor = self.define("l", (row,), Op("div", swapped(below, matrix, [first]), divisor))
            multiplier = self.load(factor, IndexOf(row))
            product = Op("mul", multiplier, self.load(u, right))
            body = Op("sub", swapped(below, matrix, [right]), product)
            if rhs is not None:
                assert v is not None
                product = Op("mul", multiplier, self.load(v, *across))
                reduced = Op("sub", swapped(below, rhs, across), product)
                rhs = self.define("b", (row, *(columns or ())), reduced)
            matrix = self.define("a", (row, column), body)
        return steps

    def _pivot(self, matrix: Source, size: int) -> Expr:
        """Number of the row whose first entry is largest in magnitude, the first of several."""

        def magnitude(row: int) -> Expr:
            return _magnitude(self.load(matrix, Scalar(row, INDEX), Scalar(0, INDEX)), Op)

        best: Expr = magnitude(0)
        chosen: Expr = Scalar(0, np.int32)
        for row in range(1, size):
            larger = Op("gt", magnitude(row), best)
            chosen = Op("select", larger, Scalar(row, np.int32), chosen)
            best = Op("select", larger, magnitude(row), best)
        return chosen

    def substitute_back(self, steps: Sequence[_Step], columns: Sequence[Dim]) -> Temporary:
        """Solve with the triangle that the elimination left, from the last row upwards."""
        across = [IndexOf(dim) for dim in columns]
        first = Scalar(0, INDEX)
        found: Temporary | None = None
        for step in reversed(steps):
            assert step.pivot_rhs is not None
            size = step.pivot_row.shape[-1]
            value = self.load(step.pivot_rhs, *across)
            if found is not None:
                inner = Dim("k", size - 1)
                after = Op("add", IndexOf(inner), Scalar(1, INDEX))
                known = Op(
                    "mul",
                    self.load(step.pivot_row, after),
                    self.load(found, IndexOf(inner), *across),
                )
                total = self.define("s", columns, known, (inner,))
                value = Op("sub", value, self.load(total, *across))
            value = Op("div", value, self.load(step.pivot_row, first))
            row = Dim("r", size)
            if found is not None:
                top = self.load(self.define("x", columns, value), *across)
                above = Op("max", Op("sub", IndexOf(row), Scalar(1, INDEX)), first)
                value = Op(
                    "select", _equal(IndexOf(row), first), top, self.load(found, above, *across)
                )
            found = self.define("x", (row, *columns), value)
        assert found is not None
        return found


def _equal(a: Expr, b: Expr) -> Expr:
    return Op("eq", a, b)

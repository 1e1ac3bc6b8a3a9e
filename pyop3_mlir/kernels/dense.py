"""Determinant, inverse and solution of small dense systems, one for each cell.

Up to 3 x 3 the inverse is a closed form: cofactors over the determinant. Larger systems are
factorised as LAPACK's ``getrf`` does it (Golub and Van Loan, Matrix Computations, 4th edition,
algorithm 3.4.1: Gaussian elimination with partial pivoting). Small ones are straight-line code for
all entries, with rows exchanged by selects; beyond, it is one statement with a body ``solve``,
which becomes loops. Where batching has no such loops (``flat``), :func:`eliminated` writes it as
sums: straight-line code up to 8 x 8, then a few statements for every step of the elimination, over
the rows and columns that remain. The inverse of a singular matrix has inf or nan entries, and
nothing can hang.

Two forms: the ``*_entries`` functions map scalar expressions to scalar expressions;
:func:`determinant`, :func:`inverse` and :func:`solve` read whole sources and give statements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
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
    LocalKernel,
    Op,
    Scalar,
    Source,
    System,
    Temporary,
)

__all__ = [
    "CLOSED_FORM",
    "STRAIGHT",
    "UNROLLED",
    "determinant",
    "determinant_entries",
    "eliminated",
    "inverse",
    "inverse_entries",
    "solve",
    "solve_entries",
]

CLOSED_FORM = 3
"""The largest size for which the inverse is a closed form."""

STRAIGHT = 6
"""The largest size for which straight-line code is faster than loops."""

UNROLLED = 8
"""The largest size for which the elimination is written out where there are no loops."""

Entries = npt.NDArray[np.object_]
MakeOp = Callable[..., Expr]

# -- entry by entry ---------------------------------------------------------------------------


def determinant_entries(matrix: Entries, op: MakeOp = Op) -> Expr:
    """Determinant of a matrix of expressions.

    Parameters
    ----------
    matrix
        ``[n, n]`` array of scalar expressions.
    op
        Makes operations (:meth:`~pyop3_mlir.kernels.assemble.Builder.op` folds constants).

    Returns
    -------
    Expr
        The determinant: from the pivots of an elimination, whose relative error is eps times the
        condition number. (The sum over the cofactors of a 3 x 3 matrix with singular values
        s1 >= s2 >= s3 has one of eps (s1 / s2) (s1 / s3).)
    """
    n = _size(matrix.shape)
    if n == 0:
        raise ValueError("the determinant of a 0 x 0 matrix has no dtype")
    if n == 2:
        return _minor(matrix, (0, 1), (0, 1), op)
    factors = _Factors(matrix, op, keep_going=True)
    value: Expr = factors.upper[0, 0]
    for k in range(1, n):
        value = op("mul", value, factors.upper[k, k])
    for swaps, _ in factors.steps:
        for _, swap in swaps:
            value = op("select", swap, op("neg", value), value)
    return value


class _Factors:
    """The factors of a matrix of expressions: what was done to its rows, and what became of them.

    Attributes
    ----------
    steps
        For each column the rows below the diagonal that changed places with the diagonal's, each
        with its condition, in order; then the multiples of the diagonal's row that were subtracted.
    upper
        The triangle.
    """

    def __init__(self, matrix: Entries, op: MakeOp, *, keep_going: bool = False) -> None:
        n = _size(matrix.shape)
        rows = [list(row) for row in matrix]
        self.steps: list[tuple[list[tuple[int, Expr]], list[tuple[int, Expr]]]] = []
        for k in range(n - 1):
            swaps = []
            for r in range(k + 1, n):
                larger = op("gt", _magnitude(rows[r][k], op), _magnitude(rows[k][k], op))
                swaps.append((r, larger))
                _exchange(rows, k, r, larger, op)
            pivot = rows[k][k]
            zero, one = Scalar(0, pivot.dtype), Scalar(1, pivot.dtype)
            if keep_going:
                # nothing but zeros below: go on, the determinant is zero and not 0 / 0
                pivot = op("select", op("eq", pivot, zero), one, pivot)
            scale = op("div", one, pivot)
            multiples = []
            for r in range(k + 1, n):
                multiple = op("mul", rows[r][k], scale)
                multiples.append((r, multiple))
                for c in range(k + 1, n):
                    rows[r][c] = op("sub", rows[r][c], op("mul", multiple, rows[k][c]))
            self.steps.append((swaps, multiples))
        self.upper: Entries = np.empty((n, n), object)
        for k, row in enumerate(rows):
            self.upper[k, k:] = row[k:]

    def solve(self, rhs: Sequence[Expr], op: MakeOp) -> list[Expr]:
        """The solution for one right-hand side."""
        rows = [[value] for value in rhs]
        for k, (swaps, multiples) in enumerate(self.steps):
            for r, swap in swaps:
                _exchange(rows, k, r, swap, op)
            for r, multiple in multiples:
                rows[r][0] = op("sub", rows[r][0], op("mul", multiple, rows[k][0]))
        found = [row[0] for row in rows]
        for k in reversed(range(len(found))):
            for c in range(k + 1, len(found)):
                found[k] = op("sub", found[k], op("mul", self.upper[k, c], found[c]))
            found[k] = op("div", found[k], self.upper[k, k])
        return found


def _exchange(rows: list[list[Expr]], k: int, r: int, condition: Expr, op: MakeOp) -> None:
    """Exchange rows k and r where the condition holds."""
    rows[k], rows[r] = (
        [op("select", condition, b, a) for a, b in zip(rows[k], rows[r], strict=True)],
        [op("select", condition, a, b) for a, b in zip(rows[k], rows[r], strict=True)],
    )


def _magnitude(value: Expr, op: MakeOp) -> Expr:
    """What pivots are compared by: the modulus, or LAPACK's cheaper measure for complex numbers."""
    if value.dtype.kind != "c":
        return op("abs", value)
    return op("add", op("abs", op("real", value)), op("abs", op("imag", value)))


def inverse_entries(matrix: Entries, op: MakeOp = Op) -> Entries:
    """Inverse of a matrix of expressions; parameters as :func:`determinant_entries`.

    Returns
    -------
    ndarray
        ``[n, n]`` expressions.
    """
    n = _size(matrix.shape)
    found = np.empty((n, n), object)
    if not n:
        return found
    zero, one = Scalar(0, matrix[0, 0].dtype), Scalar(1, matrix[0, 0].dtype)
    if n > CLOSED_FORM:
        identity = np.full((n, n), zero, object)
        np.fill_diagonal(identity, one)
        return solve_entries(matrix, identity, op)
    scale = op("div", one, determinant_entries(matrix, op))
    for row, column in np.ndindex(n, n):
        if n == 1:
            found[row, column] = scale
        else:
            found[row, column] = op("mul", _cofactor(matrix, column, row, op), scale)
    return found


def solve_entries(matrix: Entries, rhs: Entries, op: MakeOp = Op) -> Entries:
    """Solution X of ``matrix X = rhs``.

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
    found = np.empty(rhs.shape, object)
    if n > CLOSED_FORM:
        factors = _Factors(matrix, op)
        for column in np.ndindex(*rhs.shape[1:]):
            found[(slice(None), *column)] = factors.solve(list(rhs[(slice(None), *column)]), op)
        return found
    inverted = inverse_entries(matrix, op)
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
    if n <= UNROLLED:
        value = determinant_entries(make.entries(matrix)) if n else Scalar(1, matrix.dtype)
        return make.statements, make.define("det", (), value)
    steps = make.eliminate(matrix)
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
        column = Dim("j", n)
        one, zero = Scalar(1, matrix.dtype), Scalar(0, matrix.dtype)
        if n <= STRAIGHT:
            unit = [
                Op("select", _equal(IndexOf(column), Scalar(k, INDEX)), one, zero) for k in range(n)
            ]
            return make.statements, make.solve_unrolled(matrix, unit, (column,))

        def identity(equation: Expr) -> Expr:
            return Op("select", _equal(equation, IndexOf(column)), one, zero)

        return make.statements, make.solve(matrix, identity, (column,))
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
        return _remainder(Op("add", index, Scalar(step, INDEX)), n)

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
    across = [IndexOf(dim) for dim in columns]
    if not prod(rhs.shape):
        nothing = make.define("x", (Dim("r", n), *columns), Scalar(0, rhs.dtype))
        return make.statements, nothing
    if n > STRAIGHT:
        return make.statements, make.solve(
            matrix, lambda equation: make.load(rhs, equation, *across), columns
        )
    if n > CLOSED_FORM:
        sides = [make.load(rhs, Scalar(k, INDEX), *across) for k in range(n)]
        return make.statements, make.solve_unrolled(matrix, sides, columns)
    statements, inverted = inverse(matrix, make.batch)
    make.statements += statements
    row, inner = Dim("r", n), Dim("k", n)
    value = Op(
        "mul",
        make.load(inverted, IndexOf(row), IndexOf(inner)),
        make.load(rhs, IndexOf(inner), *map(IndexOf, columns)),
    )
    return make.statements, make.define("x", (row, *columns), value, (inner,))


def eliminated(kernel: LocalKernel) -> LocalKernel:
    """The kernel with statements of sums alone, where it has bodies ``solve``."""
    statements: list[Compute] = []
    for statement in kernel.statements:
        systems, sums = statement.separated()
        for result, system in systems.items():
            statements += _elimination(statement.dims, system, result)
        if sums.results:
            statements.append(sums)
    return replace(kernel, statements=tuple(statements))


def _elimination(dims: tuple[Dim, ...], system: System, result: Temporary) -> list[Compute]:
    make = _Maker(system.batch, result.dtype)
    matrix = make.define("a", (system.equation, system.unknown), system.matrix)
    side = make.define("b", (system.equation, *system.columns), system.side)
    across = [IndexOf(dim) for dim in system.columns]
    if system.unknown.extent <= UNROLLED:
        rows = [make.load(side, Scalar(k, INDEX), *across) for k in range(system.unknown.extent)]
        found = make.solve_unrolled(matrix, rows, system.columns)
    else:
        found = make.solve_large(matrix, side, system.columns)
    entry = make.load(found, IndexOf(system.unknown), *across)
    return [*make.statements, Compute((result,), dims, (), (entry,))]


@dataclass(frozen=True)
class _Step:
    """One step of the elimination: what the remaining rows were reduced with.

    ``pivot`` is the number of the pivot row among the remaining rows (of a real type, as there are
    vectors of those alone; None in the last step), ``pivot_row`` that row.
    """

    pivot: Temporary | None
    pivot_row: Temporary


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
        return self.define_all(name, dims, [body], reductions)[0]

    def define_all(
        self, name: str, dims: Sequence[Dim], bodies: Sequence[Expr], reductions: Sequence[Dim] = ()
    ) -> tuple[Temporary, ...]:
        dims = (*self.batch, *dims)
        shape = tuple(dim.extent for dim in dims)
        results = tuple(Temporary(name, shape, body.dtype) for body in bodies)
        self.statements.append(Compute(results, dims, tuple(reductions), tuple(bodies)))
        return results

    def solve_unrolled(
        self, matrix: Source, rhs: Sequence[Expr], columns: Sequence[Dim]
    ) -> Temporary:
        """Factorise once, solve for each column, and put the rows together."""
        factors = _Factors(self.entries(matrix), Op)
        n = len(rhs)
        bodies: list[Expr] = []

        def keep(value: Expr) -> Expr:
            """A load of ``value``, which the first statement will compute."""
            bodies.append(value)
            name = f"lu{len(bodies)}"
            temporaries.append(
                Temporary(name, tuple(dim.extent for dim in self.batch), value.dtype)
            )
            return self.load(temporaries[-1])

        temporaries: list[Temporary] = []
        zero, one = (Scalar(k, _real(self.dtype)) for k in (0, 1))
        factors.steps = [
            (
                # conditions are stored as real numbers, of which there are vectors
                [(r, Op("ne", keep(Op("select", c, one, zero)), zero)) for r, c in swaps],
                [(r, keep(multiple)) for r, multiple in multiples],
            )
            for swaps, multiples in factors.steps
        ]
        for k in range(n):
            factors.upper[k, k:] = [keep(value) for value in factors.upper[k, k:]]
        self.statements.append(Compute(tuple(temporaries), self.batch, (), tuple(bodies)))
        solution = factors.solve(rhs, Op)
        dims = (*self.batch, *columns)
        rows = tuple(
            Temporary(f"x{k}", tuple(dim.extent for dim in dims), self.dtype) for k in range(n)
        )
        self.statements.append(Compute(rows, dims, (), tuple(solution)))
        return self.stack(rows, columns)

    def stack(self, rows: Sequence[Temporary], columns: Sequence[Dim]) -> Temporary:
        """The rows as one temporary."""
        row = Dim("r", len(rows))
        value = self._choose(IndexOf(row), rows, [IndexOf(dim) for dim in columns])
        return self.define("x", (row, *columns), value)

    def _choose(self, number: Expr, rows: Sequence[Temporary], across: Sequence[Expr]) -> Expr:
        """The entry of one of the rows."""

        def choose(low: int, high: int) -> Expr:
            if high - low == 1:
                return self.load(rows[low], *across)
            middle = (low + high) // 2
            upper = Op("lt", number, Scalar(middle, INDEX))
            return Op("select", upper, choose(low, middle), choose(middle, high))

        return choose(0, len(rows))

    def eliminate(self, matrix: Source) -> list[_Step]:
        """Gaussian elimination with partial pivoting; the matrix shrinks by a row each step.

        Further columns are right-hand sides.
        """
        n, width = matrix.shape[len(self.batch) :]
        first = Scalar(0, INDEX)
        steps = []
        for number in range(n):
            size = n - number
            pivot = self.define(f"piv{number}", (), self._pivot(matrix, size)) if size > 1 else None
            u = self._pivot_row(f"u{number}", matrix, pivot)
            steps.append(_Step(pivot, u))
            if pivot is None:
                break
            row, column = Dim("r", size - 1), Dim("c", width - number - 1)
            below = Op("add", IndexOf(row), Scalar(1, INDEX))
            right = Op("add", IndexOf(column), Scalar(1, INDEX))
            divisor = self.load(u, first)
            if width == n:
                # for a determinant: what is below a zero pivot is zero, and so is the result
                one, zero = Scalar(1, self.dtype), Scalar(0, self.dtype)
                divisor = Op("select", _equal(divisor, zero), one, divisor)
            # (the lowering takes it out of the loop over columns)
            multiplier = Op("div", self._exchanged(matrix, pivot, below, first), divisor)
            product = Op("mul", multiplier, self.load(u, right))
            body = Op("sub", self._exchanged(matrix, pivot, below, right), product)
            matrix = self.define(f"a{number}", (row, column), body)
        return steps

    def _is_pivot(self, pivot: Temporary, row: Expr) -> Expr:
        return _equal(Op("cast", row, dtype=pivot.dtype), self.load(pivot))

    def _exchanged(self, matrix: Source, pivot: Temporary, row: Expr, column: Expr) -> Expr:
        """Entry of a row > 0 after the first row and the pivot row changed places."""
        first = self.load(matrix, Scalar(0, INDEX), column)
        return Op("select", self._is_pivot(pivot, row), first, self.load(matrix, row, column))

    def _pivot_row(self, name: str, matrix: Source, pivot: Temporary | None) -> Temporary:
        rows, columns = matrix.shape[len(self.batch) :]
        column = Dim("c", columns)
        if pivot is None:
            return self.define(
                name, (column,), self.load(matrix, Scalar(0, INDEX), IndexOf(column))
            )
        row = Dim("r", rows)
        entry = self.load(matrix, IndexOf(row), IndexOf(column))
        zero = Scalar(0, self.dtype)
        chosen = Op("select", self._is_pivot(pivot, IndexOf(row)), entry, zero)
        return self.define(name, (column,), chosen, (row,))

    def _pivot(self, matrix: Source, size: int) -> Expr:
        """Number of a row whose first entry is largest in magnitude.

        Rows compete in groups until a few are left, for code that does not grow with their number.
        """
        first = Scalar(0, INDEX)

        def of_matrix(row: Expr) -> tuple[Expr, ...]:
            entry = _magnitude(self.load(matrix, row, first), Op)
            return entry, Op("cast", row, dtype=entry.dtype)

        contender: Callable[[Expr], tuple[Expr, ...]] = of_matrix
        while size > 2 * _TOGETHER:
            group = Dim("r", -(-size // _TOGETHER))
            winner = contender(IndexOf(group))
            for k in range(1, _TOGETHER):
                # groups overlap at the end where the rows cannot be shared out evenly
                start = min(k * group.extent, size - group.extent)
                other = Op("add", IndexOf(group), Scalar(start, INDEX))
                winner = _larger(winner, contender(other))
            best = self.define_all("best", (group,), winner)
            size, contender = group.extent, partial(self._loaded, best)
        found = contender(first)
        for k in range(1, size):
            found = _larger(found, contender(Scalar(k, INDEX)))
        return found[1]

    def _loaded(self, sources: Sequence[Source], row: Expr) -> tuple[Expr, ...]:
        return tuple(self.load(source, row) for source in sources)

    def solve(
        self, matrix: Source, side: Callable[[Expr], Expr], columns: Sequence[Dim]
    ) -> Temporary:
        """One statement; ``side`` gives an entry of the right-hand sides by its equation."""
        equation, unknown = (Dim(name, matrix.shape[-1]) for name in "er")
        e, u = IndexOf(equation), IndexOf(unknown)
        body = Op("solve", self.load(matrix, e, u), side(e), u, dtype=self.dtype)
        return self.define("x", (unknown, *columns), body, (equation,))

    def solve_large(self, matrix: Source, side: Source, columns: Sequence[Dim]) -> Temporary:
        """Several statements for each step of the elimination."""
        n = matrix.shape[-1]
        width = prod(dim.extent for dim in columns)
        row, column = Dim("r", n), Dim("c", n + width)
        # columns below n are the matrix's; the remainders keep indices within what there is
        left = self.load(matrix, IndexOf(row), _remainder(IndexOf(column), n))
        number = Op("add", IndexOf(column), Scalar(-n % width, INDEX))
        right = self.load(side, IndexOf(row), *_unflattened(_remainder(number, width), columns))
        inside = Op("lt", IndexOf(column), Scalar(n, INDEX))
        both = self.define("ab", (row, column), Op("select", inside, left, right))
        return self._substitute_back(self.eliminate(both), columns)

    def _substitute_back(self, steps: Sequence[_Step], columns: Sequence[Dim]) -> Temporary:
        """Solve with the triangle that the elimination left, from the last row upwards.

        Rows are solved for a few at a time: sums over all that is known, then what the few have to
        do with each other.
        """
        n = len(steps)
        width = steps[-1].pivot_row.shape[-1] - 1
        column = Dim("j", width)
        across = IndexOf(column)
        # what is known of the solution, the last row first
        known: Temporary | None = None
        for count in range(0, n, _TOGETHER):
            rows = [steps[n - 1 - k].pivot_row for k in range(count, min(count + _TOGETHER, n))]
            found = [
                self.load(u, Op("add", across, Scalar(count + k + 1, INDEX)))
                for k, u in enumerate(rows)
            ]
            if known is not None:
                right = Dim("c", count)
                products = tuple(
                    Op(
                        "mul",
                        self.load(u, Op("sub", Scalar(count + k, INDEX), IndexOf(right))),
                        self.load(known, IndexOf(right), across),
                    )
                    for k, u in enumerate(rows)
                )
                sums = self.define_all("s", (column,), products, (right,))
                found = [
                    Op("sub", value, self.load(s, across))
                    for value, s in zip(found, sums, strict=True)
                ]
            for k, u in enumerate(rows):
                for j in range(k):
                    factor = self.load(u, Scalar(k - j, INDEX))
                    found[k] = Op("sub", found[k], Op("mul", factor, found[j]))
                found[k] = Op("div", found[k], self.load(u, Scalar(0, INDEX)))
            new = self.define_all("y", (column,), found)
            row = Dim("r", count + len(rows))
            value = self._choose(Op("sub", IndexOf(row), Scalar(count, INDEX)), new, [across])
            if known is not None:
                # the remainder keeps the index within what there is
                older = self.load(known, _remainder(IndexOf(row), count), across)
                value = Op("select", Op("lt", IndexOf(row), Scalar(count, INDEX)), older, value)
            known = self.define("x", (row, column), value)
        assert known is not None
        row = Dim("r", n)
        upwards = Op("sub", Scalar(n - 1, INDEX), IndexOf(row))
        return self.define("x", (row, *columns), self.load(known, upwards, _flattened(columns)))


_TOGETHER = 4
"""So many rows are handled by one statement."""


def _larger(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The one of two magnitudes with numbers that is larger, ``a`` where none is."""
    other = Op("gt", b[0], a[0])
    return Op("select", other, b[0], a[0]), Op("select", other, b[1], a[1])


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of the parts of complex numbers, or ``dtype`` itself."""
    return np.empty(0, dtype).real.dtype


def _remainder(index: Expr, extent: int) -> Expr:
    return Op("rem", index, Scalar(extent, INDEX))


def _flattened(dims: Sequence[Dim]) -> Expr:
    """One index for all dimensions."""
    found: Expr = Scalar(0, INDEX)
    for dim in dims:
        found = Op("add", Op("mul", found, Scalar(dim.extent, INDEX)), IndexOf(dim))
    return found


def _unflattened(index: Expr, dims: Sequence[Dim]) -> list[Expr]:
    """The index of each dimension."""
    found: list[Expr] = []
    for dim in reversed(dims):
        found.append(_remainder(index, dim.extent))
        index = Op("floordiv", index, Scalar(dim.extent, INDEX))
    return found[::-1]


def _equal(a: Expr, b: Expr) -> Expr:
    return Op("eq", a, b)

"""Symmetric tables: half the work where an element and its quadrature are mirror images.

Tables of finite elements map values at nodes to values at points. Where swapping nodes in pairs has
the same effect as swapping (and perhaps negating) points in pairs, the sums and differences of the
values in a pair can be worked on apart, and each needs only half of the table. On an interval this
is the even-odd decomposition of Solomonoff (A fast algorithm for spectral differentiation, Journal
of Computational Physics 98, 1992, 174-177); here the pairs are found in the table itself, so
triangles and tetrahedra, whose reflections swap two coordinates, profit as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Dense", "Folded", "factorise"]

Table = npt.NDArray[np.float64]

# Entries of tables that are equal differ by the rounding of the element's tabulation.
_TOLERANCE = 1e-12
# Steps of the search for pairs, and how many swaps are compared.
_STEPS = 3000
_SWAPS = 8
# Swaps inside the halves of other swaps: each level multiplies the search by 2 * _SWAPS.
_DEPTH = 2
# Less is not worth the additions and the registers.
_GAIN = 0.8


@dataclass(frozen=True, eq=False)
class Dense:
    """A table that is applied as it is.

    Attributes
    ----------
    table
        ``[rows, columns]``.
    """

    table: Table

    @property
    def work(self) -> int:
        """Multiplications with what is not zero."""
        return int(np.count_nonzero(self.table))


@dataclass(frozen=True, eq=False)
class Folded:
    """A table in two halves, for sums and for differences of columns.

    Row ``a`` of the table is ``p + q`` and row ``b`` is ``sign * (p - q)``, with p of ``even``
    applied to the sums (and to ``fixed`` columns), and q of ``odd`` applied to the differences.

    Attributes
    ----------
    pairs
        Pairs of columns.
    fixed
        Columns that stay where they are.
    rows
        For each pair of rows ``(a, b, sign)``, or ``(a, a, sign)``: such a row is p for sign 1
        and q for sign -1.
    even, odd
        The halves. Their rows belong to the ``rows`` that need them, in order.
    """

    pairs: tuple[tuple[int, int], ...]
    fixed: tuple[int, ...]
    rows: tuple[tuple[int, int, int], ...]
    even: Dense | Folded
    odd: Dense | Folded

    @property
    def work(self) -> int:
        """Multiplications and additions, of which a fused multiply-add is one."""
        butterflies = 2 * len(self.pairs) + 2 * sum(a != b for a, b, _ in self.rows)
        return self.even.work + self.odd.work + butterflies


def factorise(table: Table, depth: int = _DEPTH) -> Dense | Folded:
    """Find the cheapest way to apply a table, as far as a short search shows it.

    Parameters
    ----------
    table
        ``[rows, columns]``.
    depth
        How often a table, its halves and so on may be folded.
    """
    best: Dense | Folded = Dense(table)
    limit = _GAIN * best.work
    if not depth or table.size == 0 or best.work < 12:
        return best
    for number, (rows, columns) in enumerate(_swaps(table)):
        folded = _fold(table, rows, columns, depth - 1)
        if folded.work < min(limit, best.work):
            best = folded
        if number + 1 == _SWAPS:
            break
    return best


def _fold(
    table: Table, rows: Sequence[tuple[int, int]], columns: Sequence[int], depth: int
) -> Folded:
    pairs = tuple((c, d) for c, d in enumerate(columns) if c < d)
    fixed = tuple(c for c, d in enumerate(columns) if c == d)
    kept = tuple((a, b, sign) for a, (b, sign) in enumerate(rows) if a <= b)
    first, second = [c for c, _ in pairs], [d for _, d in pairs]
    up = [a for a, b, sign in kept if a != b or sign > 0]
    down = [a for a, b, sign in kept if a != b or sign < 0]
    half, other = table[:, first] / 2, table[:, second] / 2
    even = np.hstack([half + other, table[:, list(fixed)]])[up]
    odd = (half - other)[down]
    scale = _TOLERANCE * np.abs(table).max()
    for part in (even, odd):
        # what only rounding keeps from being zero
        part[np.abs(part) < scale] = 0.0
    return Folded(pairs, fixed, kept, factorise(even, depth), factorise(odd, depth))


def _swaps(table: Table) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """Swaps of columns that swap rows: each row's partner and sign, and each column's partner."""
    numbers = _numbered(table)
    count = numbers.shape[1]
    where = {tuple(row): a for a, row in reversed(list(enumerate(numbers.tolist())))}
    signatures = [sorted(row) for row in numbers.tolist()]
    negatives = [sorted(-x for x in row) for row in numbers.tolist()]
    steps = 0

    def narrow(
        candidates: npt.NDArray[np.bool_], a: int, b: int, sign: int
    ) -> npt.NDArray[np.bool_]:
        # column c goes to d only if both entries of both rows agree
        ahead = numbers[a][:, None] == sign * numbers[b][None, :]
        back = sign * numbers[b][:, None] == numbers[a][None, :]
        narrowed: npt.NDArray[np.bool_] = candidates & ahead & back
        return narrowed

    def search(a: int, candidates: npt.NDArray[np.bool_]) -> Iterator[list[int]]:
        nonlocal steps
        steps += 1
        if steps > _STEPS or not candidates.any(axis=1).all():
            return
        if a == len(numbers) or (candidates.sum(axis=1) == 1).all():
            columns = _involution(candidates)
            if columns is not None:
                yield columns
            return
        for b in range(len(numbers)):
            if signatures[b] == signatures[a]:
                yield from search(a + 1, narrow(candidates, a, b, 1))
            if negatives[b] == signatures[a]:
                yield from search(a + 1, narrow(candidates, a, b, -1))

    seen = set()
    for columns in search(0, np.ones((count, count), bool)):
        if tuple(columns) in seen or columns == list(range(count)):
            continue
        seen.add(tuple(columns))
        rows = _partners(numbers[:, columns], where)
        if rows is not None:
            yield rows, columns


def _involution(candidates: npt.NDArray[np.bool_]) -> list[int] | None:
    """A swap among the candidates; columns that may stay do."""
    columns = [-1] * len(candidates)
    for c, allowed in enumerate(candidates):
        if columns[c] >= 0:
            continue
        options = [int(d) for d in np.flatnonzero(allowed) if d >= c and columns[d] < 0]
        if not options:
            return None
        d = c if c in options else options[0]
        columns[c], columns[d] = d, c
    return columns


def _partners(
    swapped: npt.NDArray[np.int64], where: dict[tuple[int, ...], int]
) -> list[tuple[int, int]] | None:
    """For each row the row that it becomes, and the sign; None unless they come in pairs."""
    rows: list[tuple[int, int]] = [(-1, 0)] * len(swapped)
    for a, row in enumerate(swapped.tolist()):
        if rows[a][0] >= 0:
            continue
        for sign in (1, -1):
            b = where.get(tuple(sign * x for x in row))
            if b is not None and (b == a or rows[b][0] < 0):
                rows[a], rows[b] = (b, sign), (a, sign)
                break
        else:
            return None
    return rows


def _numbered(table: Table) -> npt.NDArray[np.int64]:
    """Integers that are equal, or opposite, where the entries are up to rounding."""
    magnitudes = np.abs(table)
    scale = _TOLERANCE * magnitudes.max()
    values = np.sort(magnitudes, axis=None)
    starts = values[np.r_[True, np.diff(values) > scale]]
    numbers = np.searchsorted(starts, magnitudes, side="right").astype(np.int64)
    numbers[magnitudes <= scale] = 0
    return numbers * np.where(table < 0, -1, 1)

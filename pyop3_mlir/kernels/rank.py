"""Tables of low rank: many quadrature points, few polynomials.

A form with a coefficient that is no polynomial is integrated with many more points than the space
of its test functions' derivatives has dimensions: the gradients of P2 on tetrahedra are linear,
four numbers say what they are at any number of points. Sums over points, which are what such a
kernel spends its time on, are taken with a basis of that space instead of every basis function's
derivatives, and the basis functions follow from them by small products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.kernels.products import factors_of, is_named, is_table, product_of, sum_of, terms_of
from pyop3_mlir.kernels.program import (
    Compute,
    Dim,
    Expr,
    IndexOf,
    Load,
    LocalKernel,
    Table,
    Temporary,
    postorder,
)

__all__ = ["use_low_rank"]

Matrix = npt.NDArray[np.float64]

# What is less is rounding, what is more is not; in between nothing is done.
_ROUNDING = 1e-14
_LEAST = 1e-6
# How near to the tables their sums of basis functions must come.
_CLOSE = 1e-13
# Numbers in the tables: beyond this their decomposition would take a second.
_LARGEST = 200_000
# The work that must be left at most.
_GAIN = 0.75


def use_low_rank(kernel: LocalKernel) -> LocalKernel:
    """Return the kernel with sums over fewer functions; the same one where there are none."""
    statements: list[Compute] = []
    for statement in kernel.statements:
        statements += _split(statement)
    if len(statements) == len(kernel.statements):
        return kernel
    result = replace(kernel, statements=tuple(statements))
    result.validate()
    return result


@dataclass(frozen=True)
class _Term:
    """A term of a sum: an entry of a table ``[short, long]`` times something.

    ``transposed`` says that the table has its axes in the other order.
    """

    negative: bool
    table: Table
    short: Dim
    transposed: bool
    rest: Expr

    @property
    def values(self) -> Matrix:
        """``[short, long]``."""
        return self.table.values.T if self.transposed else self.table.values


def _split(statement: Compute) -> list[Compute]:
    """The statement, or several that do the same with less work."""
    if len(statement.reductions) != 1 or any(r.dtype != np.float64 for r in statement.results):
        return [statement]
    (reduced,) = statement.reductions
    for long in (reduced, *statement.dims):
        bodies = [_terms(body, long) for body in statement.bodies]
        terms = [term for body in bodies for term in body]
        if not all(bodies) or len({t.table.dtype for t in terms}) != 1:
            continue
        shorts = {term.short for term in terms}
        if any(short.extent >= long.extent for short in shorts):
            continue
        if long is reduced:
            return _sum(statement, bodies, long)
        if shorts == {reduced}:
            return _expand(statement, bodies, reduced, long)
    return [statement]


def _terms(body: Expr, long: Dim) -> list[_Term]:
    """The terms of a sum that are a table over ``long`` each; none unless all are."""
    found = []
    for negative, node in terms_of(body):
        factors = factors_of(node)
        tables = [f for f in factors if is_table(f) and len(f.children) == 2]
        if len(tables) != 1 or len(factors) < 2:
            return []
        (load,) = tables
        assert isinstance(load, Load)
        assert isinstance(load.source, Table)
        own = _dims(load)
        if long not in own:
            return []
        factors.remove(load)
        (short,) = (dim for dim in own if dim is not long)
        found.append(_Term(negative, load.source, short, own[0] is long, product_of(factors)))
    return found


def _sum(statement: Compute, bodies: Sequence[Sequence[_Term]], long: Dim) -> list[Compute]:
    """A sum over points: first with the polynomials, then for each basis function."""
    terms = [term for body in bodies for term in body]
    basis = _Basis.of(terms, long)
    if basis is None or any(_varies(term.rest, term.short) for term in terms):
        return [statement]
    moments = _Moments(basis, long)
    second = [
        sum_of(
            (term.negative, product_of([basis.coefficient(term), moments.of(term, statement)]))
            for term in body
        )
        for body in bodies
    ]
    points = math.prod(dim.extent for dim in statement.dims)
    before = len(terms) * points * long.extent
    after = moments.work + len(terms) * points * basis.rank.extent
    if after > _GAIN * before:
        return [statement]
    last = Compute(statement.results, statement.dims, (basis.rank,), tuple(second))
    return [*moments.statements(), last]


def _expand(
    statement: Compute, bodies: Sequence[Sequence[_Term]], short: Dim, long: Dim
) -> list[Compute]:
    """Values at points: first the coefficients of the polynomials, then their values."""
    terms = [term for body in bodies for term in body]
    basis = _Basis.of(terms, long)
    if basis is None or any(_varies(term.rest, long) for term in terms):
        return [statement]
    others = [dim for dim in statement.dims if dim is not long]
    before = len(terms) * short.extent * long.extent
    after = basis.rank.extent * (len(terms) * short.extent + len(bodies) * long.extent)
    if after > _GAIN * before:
        return [statement]
    dims = (basis.rank, *others)
    values = tuple(_temporary(f"coefficient{k}", dims) for k in range(len(bodies)))
    first = tuple(
        sum_of((term.negative, product_of([basis.coefficient(term), term.rest])) for term in body)
        for body in bodies
    )
    second = tuple(product_of([basis.value(long), _whole(value, dims)]) for value in values)
    return [
        Compute(values, dims, (short,), first),
        Compute(statement.results, statement.dims, (basis.rank,), second),
    ]


@dataclass(frozen=True, eq=False)
class _Basis:
    """Functions at points, ``[rank, long]``, of which all tables of a statement are sums."""

    rank: Dim
    table: Table
    tables: dict[tuple[Table, bool], Table]

    @classmethod
    def of(cls, terms: Sequence[_Term], long: Dim) -> _Basis | None:
        """The smallest basis; None where the tables have full rank, or none that is clear."""
        tables = {(term.table, term.transposed): term.values for term in terms}
        stacked = np.vstack(list(tables.values()))
        if not 0 < stacked.size <= _LARGEST or not np.isfinite(stacked).all():
            return None
        _, sizes, basis = np.linalg.svd(stacked, full_matrices=False)
        scale = np.sqrt(long.extent)
        rank = int((sizes > _ROUNDING * scale * sizes[0]).sum())
        if rank == 0 or rank == len(sizes) or sizes[rank - 1] < _LEAST * sizes[0]:
            return None
        functions = basis[:rank] * scale
        coefficients = stacked @ basis[:rank].T / scale
        if np.abs(coefficients @ functions - stacked).max() > _CLOSE * np.abs(stacked).max():
            return None
        rows = np.cumsum([len(values) for values in tables.values()])[:-1]
        parts = [Table(part) for part in np.split(coefficients, rows)]
        return cls(Dim("r", rank), Table(functions), dict(zip(tables, parts, strict=True)))

    def coefficient(self, term: _Term) -> Expr:
        """How much of each function is in the term's entry."""
        table = self.tables[term.table, term.transposed]
        return Load(table, [IndexOf(term.short), IndexOf(self.rank)])

    def value(self, long: Dim) -> Expr:
        """The functions at the points."""
        return Load(self.table, [IndexOf(self.rank), IndexOf(long)])


class _Moments:
    """Sums over points of the functions of a basis times something."""

    def __init__(self, basis: _Basis, long: Dim) -> None:
        self.basis = basis
        self.long = long
        self.found: dict[Any, tuple[Temporary, tuple[Dim, ...], Expr]] = {}
        self._named: dict[tuple[int, ...], tuple[Dim, ...]] = {}

    def of(self, term: _Term, statement: Compute) -> Expr:
        """The moments of what the term has beside its table."""
        rest = term.rest
        others = tuple(dim for dim in statement.dims if _varies(rest, dim))
        own, key = others, (rest, others)
        if is_named(rest) and isinstance(rest, Load):
            # what is read by several names has one set of moments
            others = tuple(dim for dim in _dims(rest) if dim is not self.long)
            extents = tuple(dim.extent for dim in others)
            own = self._named.setdefault(extents, tuple(Dim(d.name, d.extent) for d in others))
            names = dict(zip(others, own, strict=True))
            rest = Load(rest.source, [IndexOf(names.get(dim, dim)) for dim in _dims(rest)])
            key = (rest, own)
        if key not in self.found:
            dims = (self.basis.rank, *own)
            value = _temporary(f"moment{len(self.found)}", dims)
            self.found[key] = value, dims, product_of([self.basis.value(self.long), rest])
        return _whole(self.found[key][0], (self.basis.rank, *others))

    @property
    def work(self) -> int:
        """Multiplications of all statements."""
        return sum(value.size for value, _, _ in self.found.values()) * self.long.extent

    def statements(self) -> list[Compute]:
        """One statement for all that have the same dimensions."""
        groups: dict[tuple[Dim, ...], list[tuple[Temporary, Expr]]] = {}
        for value, dims, body in self.found.values():
            groups.setdefault(dims, []).append((value, body))
        return [
            Compute(
                tuple(value for value, _ in group),
                dims,
                (self.long,),
                tuple(body for _, body in group),
            )
            for dims, group in groups.items()
        ]


def _dims(load: Load) -> list[Dim]:
    return [child.dim for child in load.children if isinstance(child, IndexOf)]


def _varies(expression: Expr, dim: Dim) -> bool:
    return any(isinstance(n, IndexOf) and n.dim is dim for n in postorder([expression]))


def _temporary(name: str, dims: Sequence[Dim]) -> Temporary:
    return Temporary(name, tuple(dim.extent for dim in dims), np.dtype(np.float64))


def _whole(value: Temporary, dims: Sequence[Dim]) -> Expr:
    return Load(value, [IndexOf(dim) for dim in dims])

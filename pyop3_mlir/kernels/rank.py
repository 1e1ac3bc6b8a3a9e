"""Tables of low rank: many quadrature points, few polynomials.

A form with a coefficient that is no polynomial is integrated with many more points than the space
of its test functions' derivatives has dimensions: the gradients of P2 on tetrahedra are linear,
four numbers say what they are at any number of points. Sums over points, which are what such a
kernel spends its time on, are taken with a basis of that space instead of every basis function's
derivatives, and the basis functions follow from them by small products.

The same holds for products of two tables: where a sum over points is that of a table times a field
that is itself a table times something, as in every Jacobian, the moments of that something are
taken with a basis of the products (ten functions for two linear tables), and what one basis
function gives with another follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    Source,
    Table,
    Temporary,
    postorder,
    rebuild,
)

__all__ = ["use_low_rank"]

Matrix = npt.NDArray[np.float64]

# What is less is rounding, what is more is not; in between nothing is done.
_ROUNDING = 1e-14
_LEAST = 1e-6
# How near to the tables their sums of basis functions must come.
_CLOSE = 1e-13
# Numbers in the tables: beyond this their decomposition would take a second.
_LARGEST = 500_000
# The work that must be left at most.
_GAIN = 0.75


def use_low_rank(kernel: LocalKernel) -> LocalKernel:
    """Return the kernel with sums over fewer functions; the same one where there are none."""
    result = kernel
    for split in (_split, _multiply):
        fields = _fields(result)
        parts = [part for each in result.statements for part in split(each, fields)]
        if len(parts) == len(result.statements):
            continue
        changed = replace(result, statements=_needed(parts, {o.value for o in kernel.outputs}))
        if changed.count_flops() < result.count_flops():
            result = changed
    if result is not kernel:
        result.validate()
    return result


_Fields = Mapping[Source, tuple[Compute, Expr]]


def _fields(kernel: LocalKernel) -> _Fields:
    """What is computed entry by entry: its statement and its body."""
    return {
        result: (statement, body)
        for statement in kernel.statements
        if not statement.reductions
        for result, body in zip(statement.results, statement.bodies, strict=True)
    }


def _needed(statements: Sequence[Compute], roots: Iterable[Source]) -> tuple[Compute, ...]:
    """The statements without results that nothing uses any more."""
    needed = set(roots)
    kept: list[Compute] = []
    for statement in reversed(statements):
        pairs = zip(statement.results, statement.bodies, strict=True)
        own = {result: body for result, body in pairs if result in needed}
        needed |= {n.source for n in postorder(own.values()) if isinstance(n, Load)}
        if len(own) == len(statement.results):
            kept.append(statement)
        elif own:
            kept.append(replace(statement, results=tuple(own), bodies=tuple(own.values())))
    return tuple(reversed(kept))


@dataclass(frozen=True)
class _Term:
    """A term of a sum: an entry of a table ``[shorts..., long]`` times something."""

    negative: bool
    table: Table
    shorts: tuple[Dim, ...]
    rest: Expr

    @property
    def rows(self) -> Matrix:
        """The table as ``[all of shorts, long]``."""
        return self.table.values.reshape(-1, self.table.shape[-1])


def _split(statement: Compute, _: _Fields) -> list[Compute]:
    """The statement, or several that do the same with less work."""
    if len(statement.reductions) != 1 or any(r.dtype != np.float64 for r in statement.results):
        return [statement]
    (reduced,) = statement.reductions
    for long in (reduced, *statement.dims):
        bodies = [_terms(body, long) for body in statement.bodies]
        terms = [term for body in bodies for term in body]
        if not all(bodies) or any(len(term.rows) >= long.extent for term in terms):
            continue
        if long is reduced:
            return _sum(statement, bodies, long)
        if {term.shorts for term in terms} == {(reduced,)}:
            return _expand(statement, bodies, reduced, long)
    return [statement]


def _multiply(statement: Compute, fields: _Fields) -> list[Compute]:
    """The statement, or several in which fields that are sums of tables are no more needed."""
    if len(statement.reductions) != 1 or any(r.dtype != np.float64 for r in statement.results):
        return [statement]
    (long,) = statement.reductions
    bodies = []
    for body in statement.bodies:
        products = [_products(term, long, fields) for term in _terms(body, long)]
        if not products or not all(products):
            return [statement]
        bodies.append([term for group in products for term in group])
    return _sum(statement, bodies, long)


def _products(term: _Term, long: Dim, fields: _Fields) -> list[_Term]:
    """The terms of a table times a field that is a sum of tables times something; or none."""
    load = term.rest
    if not is_named(load) or not isinstance(load, Load) or load.source not in fields:
        return []
    definition, body = fields[load.source]
    names = dict(zip(definition.dims, _dims(load), strict=True))
    if long not in names.values():
        return []
    found = []
    for inner in _terms(body, next(own for own, name in names.items() if name is long)):
        shorts = tuple(names[dim] for dim in inner.shorts)
        size = len(term.rows) * inner.table.size
        if size > _LARGEST or any(s in term.shorts or _varies(inner.rest, s) for s in shorts):
            return []
        rows = term.rows[:, None, :] * inner.rows
        extents = [dim.extent for dim in (*term.shorts, *shorts, long)]
        rest = rebuild(inner.rest, {IndexOf(own): IndexOf(name) for own, name in names.items()})
        negative = term.negative != inner.negative
        found.append(_Term(negative, Table(rows.reshape(extents)), term.shorts + shorts, rest))
    return found


def _terms(body: Expr, long: Dim) -> list[_Term]:
    """The terms of a sum that are a table over ``long`` each; none unless all are."""
    found = []
    for negative, node in terms_of(body):
        factors = factors_of(node)
        tables = [f for f in factors if is_table(f) and len(f.children) > 1]
        if len(tables) != 1 or len(factors) < 2:
            return []
        (load,) = tables
        assert isinstance(load, Load)
        assert isinstance(load.source, Table)
        own = _dims(load)
        if long not in own or load.dtype != np.float64:
            return []
        factors.remove(load)
        values = np.moveaxis(load.source.values, own.index(long), -1)
        shorts = tuple(dim for dim in own if dim is not long)
        found.append(_Term(negative, Table(values), shorts, product_of(factors)))
    return found


def _sum(statement: Compute, bodies: Sequence[Sequence[_Term]], long: Dim) -> list[Compute]:
    """A sum over points: first with the polynomials, then for each basis function."""
    terms = [term for body in bodies for term in body]
    basis = _Basis.of(terms, long)
    if basis is None or any(_varies(term.rest, short) for term in terms for short in term.shorts):
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
    tables: dict[Table, Table]

    @classmethod
    def of(cls, terms: Sequence[_Term], long: Dim) -> _Basis | None:
        """The smallest basis; None where the tables have full rank, or none that is clear."""
        tables = {term.table: term.rows for term in terms}
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
        ends = np.cumsum([len(values) for values in tables.values()])[:-1]
        parts = [
            Table(part.reshape(*table.shape[:-1], rank))
            for table, part in zip(tables, np.split(coefficients, ends), strict=True)
        ]
        return cls(Dim("r", rank), Table(functions), dict(zip(tables, parts, strict=True)))

    def coefficient(self, term: _Term) -> Expr:
        """How much of each function is in the term's entry."""
        return Load(self.tables[term.table], [IndexOf(dim) for dim in (*term.shorts, self.rank)])

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

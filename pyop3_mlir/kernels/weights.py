"""Weights of quadrature, moved from what varies over cells into the tables that it meets.

A form is a sum over points of a table times what the fields give there, and that is scaled by the
point's weight. Where each use of such a value is a product with a table, the table can have the
weight instead, once and for all cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
    postorder,
)

__all__ = ["fold_weights"]


def fold_weights(kernel: LocalKernel) -> LocalKernel:
    """Return the kernel with weights in its tables; the same one where there are none to move."""
    weighted = dict(_weighted(kernel))
    for statement in kernel.statements:
        for body in statement.bodies:
            for source in _loose(body, bool(statement.reductions)):
                weighted.pop(source, None)
    for output in kernel.outputs:
        weighted.pop(output.value, None)
    if not weighted:
        return kernel
    statements = []
    for statement in kernel.statements:
        bodies = [
            weighted[result][1] if result in weighted else _fold(body, weighted)
            for result, body in zip(statement.results, statement.bodies, strict=True)
        ]
        statements.append(replace(statement, bodies=tuple(bodies)))
    result = replace(kernel, statements=tuple(statements))
    result.validate()
    return result


def _weighted(kernel: LocalKernel) -> Iterator[tuple[Source, tuple[Load, Expr, Compute]]]:
    """Temporaries that are a table of their own dimensions times something, which is given too."""
    for statement in kernel.statements:
        if statement.reductions or not statement.dims:
            continue
        for result, body in zip(statement.results, statement.bodies, strict=True):
            factors = factors_of(body)
            weight = next((factor for factor in factors if is_table(factor)), None)
            if weight is None or len(factors) < 2 or result.dtype.kind != "f":
                continue
            assert isinstance(weight, Load)
            factors.remove(weight)
            yield result, (weight, product_of(factors), statement)


def _loose(body: Expr, summed: bool) -> set[Source]:
    """What a body loads other than as a factor of a term that has a table."""
    loads = [node for node in postorder([body]) if isinstance(node, Load)]
    if not summed:
        return {load.source for load in loads}
    loose: set[Source] = set()
    for _, term in terms_of(body):
        factors = factors_of(term)
        own = [factor for factor in factors if is_named(factor)]
        # one weight for one table
        if sum(is_table(f) for f in own) == 1 and len(own) == 2:
            factors = [factor for factor in factors if factor not in own]
        loose |= {n.source for n in postorder(factors) if isinstance(n, Load)}
    return loose


def _fold(body: Expr, weighted: dict[Source, tuple[Load, Expr, Compute]]) -> Expr:
    """The body with the weights in its tables."""
    terms = terms_of(body)
    changed = [(negative, _fold_term(term, weighted)) for negative, term in terms]
    return body if changed == terms else sum_of(changed)


def _fold_term(term: Expr, weighted: dict[Source, tuple[Load, Expr, Compute]]) -> Expr:
    factors = factors_of(term)
    value = next((f for f in factors if isinstance(f, Load) and f.source in weighted), None)
    if value is None:
        return term
    weight, _, statement = weighted[value.source]
    table = next(factor for factor in factors if is_table(factor))
    assert isinstance(table, Load)
    # the dimensions of the weight are those of the value's own statement
    names = dict(zip(statement.dims, (_dim(child) for child in value.children), strict=True))
    rows = [_dim(child) for child in table.children]
    axes = [names[_dim(child)] for child in weight.children]
    dims = [*rows, *(dim for dim in axes if dim not in rows)]
    scaled = _values(table, rows, dims) * _values(weight, axes, dims)
    factors[factors.index(table)] = Load(Table(scaled), [IndexOf(dim) for dim in dims])
    return product_of(factors)


def _dim(child: Expr) -> Dim:
    assert isinstance(child, IndexOf)
    return child.dim


def _values(load: Load, own: list[Dim], dims: list[Dim]) -> npt.NDArray[Any]:
    """The table with an axis for each of ``dims``."""
    assert isinstance(load.source, Table)
    order = [own.index(dim) for dim in dims if dim in own]
    shape = [dim.extent if dim in own else 1 for dim in dims]
    return load.source.values.transpose(order).reshape(shape)

"""Expressions as sums of products."""

from __future__ import annotations

from collections.abc import Iterable

from pyop3_mlir.kernels.program import Expr, IndexOf, Load, Op, Table

__all__ = ["factors_of", "is_named", "is_table", "product_of", "sum_of", "terms_of"]


def terms_of(node: Expr, negative: bool = False) -> list[tuple[bool, Expr]]:
    """The terms of a sum from left to right, each with whether it is subtracted."""
    if isinstance(node, Op) and node.name in ("add", "sub"):
        left, right = node.children
        return terms_of(left, negative) + terms_of(right, negative ^ (node.name == "sub"))
    if isinstance(node, Op) and node.name == "neg":
        return terms_of(node.children[0], not negative)
    return [(negative, node)]


def sum_of(terms: Iterable[tuple[bool, Expr]]) -> Expr:
    """The sum of some terms, at least one."""
    result: Expr | None = None
    for negative, term in terms:
        if result is None:
            result = Op("neg", term) if negative else term
        else:
            result = Op("sub" if negative else "add", result, term)
    assert result is not None
    return result


def factors_of(node: Expr) -> list[Expr]:
    """The factors of a product, from left to right."""
    if isinstance(node, Op) and node.name == "mul":
        return [factor for child in node.children for factor in factors_of(child)]
    return [node]


def product_of(factors: Iterable[Expr]) -> Expr:
    """The product of some factors, at least one."""
    result: Expr | None = None
    for factor in factors:
        result = factor if result is None else Op("mul", result, factor)
    assert result is not None
    return result


def is_named(node: Expr) -> bool:
    """Whether it is an entry that different dimensions name, and nothing else."""
    children = node.children
    return (
        isinstance(node, Load)
        and bool(children)
        and all(isinstance(child, IndexOf) for child in children)
        and len(set(children)) == len(children)
    )


def is_table(node: Expr) -> bool:
    """Whether it is an entry of a table of real numbers that dimensions alone name."""
    return (
        is_named(node)
        and isinstance(node, Load)
        and isinstance(node.source, Table)
        and node.dtype.kind == "f"
    )

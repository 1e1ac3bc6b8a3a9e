"""Expressions as sums of products. Iterative: graphs are deep."""

from __future__ import annotations

from collections.abc import Iterable

from pyop3_mlir.kernels.program import Expr, IndexOf, Load, Op, Table

__all__ = ["factors_of", "is_named", "is_table", "product_of", "sum_of", "terms_of"]


def terms_of(root: Expr) -> list[tuple[bool, Expr]]:
    """The terms of a sum from left to right, each with whether it is subtracted."""
    found: list[tuple[bool, Expr]] = []
    stack = [(False, root)]
    while stack:
        negative, node = stack.pop()
        match node:
            case Op(name="add"):
                stack += [(negative, node.children[1]), (negative, node.children[0])]
            case Op(name="sub"):
                stack += [(not negative, node.children[1]), (negative, node.children[0])]
            case Op(name="neg"):
                stack.append((not negative, node.children[0]))
            case _:
                found.append((negative, node))
    return found


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


def factors_of(root: Expr) -> list[Expr]:
    """The factors of a product, from left to right."""
    found: list[Expr] = []
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, Op) and node.name == "mul":
            stack += reversed(node.children)
        else:
            found.append(node)
    return found


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

"""Sums of products with common factors taken out.

What is computed at each quadrature point comes from the derivatives of a form, term by term: the
Jacobian of a hyperelastic energy has dozens of entries ``w (t + a (a s) + 0.75 (2 (b s) - 2 (l (a
s))))``, in which only t and s differ. As ``w (t + s (a a + 1.5 b - 1.5 l a))`` an entry takes three
operations, and the rest is the same for all of them. Equal terms are added up as well.

Compilers for C do the same where they may reassociate, as PyOP2 lets them (``-ffast-math``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pyop3_mlir.kernels.products import product_of
from pyop3_mlir.kernels.program import Compute, Expr, LocalKernel, Op, Scalar, postorder

__all__ = ["factor_sums"]

_Sum = dict[tuple[Expr, ...], float]
"""Coefficients of products, in the order in which they were met."""

# Terms up to which sums within sums are merged.
_MOST_TERMS = 64


def factor_sums(kernel: LocalKernel) -> LocalKernel:
    """Return the kernel with less work at each point; the same one where nothing can be saved."""
    statements = tuple(
        statement if statement.reductions else _cheapest(statement)
        for statement in kernel.statements
    )
    if all(new is old for new, old in zip(statements, kernel.statements, strict=True)):
        return kernel
    result = replace(kernel, statements=statements)
    result.validate()
    return result


def _cheapest(statement: Compute) -> Compute:
    found = statement
    for through in (False, True):
        changed = _Factoring(statement.bodies, through).bodies()
        if changed is not None and _operations(changed) < _operations(found.bodies):
            found = replace(statement, bodies=changed)
    return found


def _operations(bodies: Sequence[Expr]) -> int:
    return sum(isinstance(node, Op) and node.dtype.kind == "f" for node in postorder(bodies))


class _Factoring:
    """Rewrites the bodies of a statement.

    Parameters
    ----------
    roots
        The bodies.
    through
        Whether to look for factors in products that are used more than once.
    """

    def __init__(self, roots: Sequence[Expr], through: bool) -> None:
        self.roots = roots
        self.through = through
        self.uses = Counter(child for node in postorder(roots) for child in node.children)
        self.uses.update(roots)
        self.sums: dict[Expr, _Sum] = {}
        self.built: dict[Expr, Expr] = {}
        # programs must come out the same in each process
        self.numbers: dict[Expr, int] = {}

    def bodies(self) -> tuple[Expr, ...] | None:
        """The new bodies; None where terms cancel."""
        for node in postorder(self.roots):
            if isinstance(node, Op) and node.dtype.kind == "f":
                found = self._sum(node)
                if not all(found.values()):
                    return None
                self.sums[node] = found
            else:
                self._build(node)
        return tuple(self._build(root) for root in self.roots)

    def _sum(self, node: Op) -> _Sum:
        """An operation as a sum of products."""
        match node.name:
            case "add" | "sub":
                left, right = (self._open(child) for child in node.children)
                sign = 1.0 if node.name == "add" else -1.0
                if len(left) + len(right) > _MOST_TERMS:
                    left, right = (self._closed(child) for child in node.children)
                found = dict(left)
                for factors, value in right.items():
                    found[factors] = found.get(factors, 0.0) + sign * value
                return found
            case "neg":
                return {key: -value for key, value in self._open(node.children[0]).items()}
            case "mul":
                left, right = (self._open(child) for child in node.children)
                for number, other in ((left, right), (right, left)):
                    if list(number) == [()]:
                        return {key: number[()] * value for key, value in other.items()}
                if len(left) > 1:
                    left = self._closed(node.children[0])
                if len(right) > 1:
                    right = self._closed(node.children[1])
                (f, a), (g, b) = *left.items(), *right.items()
                return {tuple(sorted((*f, *g), key=self.numbers.__getitem__)): a * b}
        children = [self._build(child) for child in node.children]
        return self._atom(Op(node.name, *children, dtype=node.dtype), node)

    def _open(self, node: Expr) -> _Sum:
        """An operand as a sum, unless it is needed as a whole elsewhere."""
        if isinstance(node, Scalar):
            return {(): float(node.value)} if np.isfinite(node.value) else self._atom(node)
        found = self.sums.get(node)
        if found is None:
            return self._atom(node)
        if self.uses[node] == 1 or (self.through and len(found) == 1):
            return found
        return self._closed(node)

    def _closed(self, node: Expr) -> _Sum:
        return self._atom(self._build(node), node)

    def _atom(self, node: Expr, old: Expr | None = None) -> _Sum:
        self.numbers.setdefault(node, len(self.numbers))
        if old is not None:
            self.uses[node] = max(self.uses[node], self.uses[old])
        return {(node,): 1.0}

    def _build(self, node: Expr) -> Expr:
        """What the node has become."""
        if node not in self.built:
            if node in self.sums:
                self.built[node] = self._expression(self.sums[node], node.dtype)
            elif isinstance(node, Op):
                # conditions and casts of integers
                children = [self._build(child) for child in node.children]
                self.built[node] = Op(node.name, *children, dtype=node.dtype)
            else:
                self.built[node] = node
        return self.built[node]

    def _expression(self, terms: Mapping[tuple[Expr, ...], float], dtype: np.dtype[Any]) -> Expr:
        common = self._common(terms)
        if common is None:
            return _add([(value, key) for key, value in terms.items()], dtype)
        inner, others = {}, {}
        for key, value in terms.items():
            left = Counter(key)
            if left >= common:
                inner[tuple((left - common).elements())] = value
            else:
                others[key] = value
        parts = [product_of((*common.elements(), self._expression(inner, dtype)))]
        if others:
            parts.insert(0, self._expression(others, dtype))
        return _add([(1.0, (part,)) for part in parts], dtype)

    def _common(self, terms: Mapping[tuple[Expr, ...], float]) -> Counter[Expr] | None:
        """The factors to take out: those of most terms, and all that these have in common."""
        found = Counter(factor for key in terms for factor in dict.fromkeys(key))
        found = Counter({factor: count for factor, count in found.items() if count > 1})
        if not found:
            return None
        # what is used least leaves behind what other sums have as well
        best = min(found, key=lambda f: (-found[f], self.uses[f], self.numbers[f]))
        keys = [Counter(key) for key in terms if best in key]
        common = keys[0]
        for key in keys[1:]:
            common &= key
        return common


def _add(terms: Sequence[tuple[float, tuple[Expr, ...]]], dtype: np.dtype[Any]) -> Expr:
    """The sum of multiples of products; it begins with one that is added, where there is one."""
    result: Expr | None = None
    for value, factors in sorted(terms, key=lambda term: term[0] < 0):
        size = abs(value)
        term = product_of(factors) if factors else Scalar(size, dtype)
        if factors and size != 1:
            term = Op("mul", Scalar(size, dtype), term)
        if result is not None:
            result = Op("sub" if value < 0 else "add", result, term)
        else:
            result = Op("neg", term) if value < 0 else term
    assert result is not None
    return result

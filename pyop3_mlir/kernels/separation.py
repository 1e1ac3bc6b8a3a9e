"""Sums over what is known when a kernel is imported, taken out of sums over what is not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyop3_mlir.kernels.assemble import Builder
from pyop3_mlir.kernels.products import factors_of
from pyop3_mlir.kernels.program import Dim, Expr, Load, Op, Scalar, Source

__all__ = ["Separation"]

_MOST_TERMS = 64
"""Terms that a sum may be expanded into."""


@dataclass(eq=False)
class Separation:
    """Sums over what is known now, taken out of sums over what is not.

    In sum_q phi[q, j] (g0 psi0[q, k] + g1 psi1[q, k]) the g do not depend on q. Where that holds
    for all that depends on data, the sum is g0 T0[j, k] + g1 T1[j, k] with tables T that are
    computed now (the tensor representation of Kirby and Logg, "A compiler for variational forms",
    2006).
    Which of the two is cheaper depends on the number of terms and of quadrature points.

    Parameters
    ----------
    builder
        What the expressions belong to.
    bodies
        Dimensions and bodies of temporaries that may be looked into.
    over
        The dimensions to sum over.
    numbers
        Numbers of factors, in the order in which they were met: programs must come out the same in
        each process.
    """

    builder: Builder
    bodies: Mapping[Source, tuple[tuple[Dim, ...], Expr]]
    over: tuple[Dim, ...]
    numbers: dict[Expr, int]

    def reduce(self, body: Expr) -> Expr:
        """``body`` summed over ``over``."""
        builder = self.builder
        terms = self._terms(body)
        points = math.prod(d.extent for d in self.over)
        if terms is None or len(terms) >= points * _count_terms(body):
            return builder.reduce(body, self.over)
        result: Expr | None = None
        for factors, value in terms.items():
            term = value
            for factor in factors:
                term = factor if term is None else builder.op("mul", term, factor)
            assert term is not None
            term = builder.reduce(term, self.over)
            result = term if result is None else builder.op("add", result, term)
        return Scalar(0, body.dtype) if result is None else result

    def _terms(self, node: Expr) -> dict[tuple[Expr, ...], Expr | None] | None:
        """``node`` as a sum of products.

        The keys are the constant factors, the values what does not depend on ``over`` (None for 1).
        None where it has no such form, or one of too many terms.
        """
        builder = self.builder
        if not builder.dims(node) & frozenset(self.over):
            return {(): node}
        if builder.is_constant(node):
            return {tuple(self._factors(node)): None}
        match node:
            case Load() if node.source in self.bodies:
                dims, body = self.bodies[node.source]
                moved = dict(zip(dims, node.children, strict=True))
                return self._terms(builder.substitute(body, moved))
            case Op(name="mul"):
                left, right = (self._terms(child) for child in node.children)
                if left is None or right is None or len(left) * len(right) > _MOST_TERMS:
                    return None
                found: dict[tuple[Expr, ...], Expr | None] = {}
                for (f, a), (g, b) in itertools.product(left.items(), right.items()):
                    value = a if b is None else b if a is None else builder.op("mul", a, b)
                    key = tuple(sorted((*f, *g), key=self.numbers.__getitem__))
                    self._add(found, key, value, node.dtype)
                return found
            case Op(name="neg"):
                inner = self._terms(node.children[0])
                return None if inner is None else self._negated(inner, node.dtype)
            case Op(name="add" | "sub"):
                left, right = (self._terms(child) for child in node.children)
                if left is None or right is None or len(left) + len(right) > _MOST_TERMS:
                    return None
                if node.name == "sub":
                    right = self._negated(right, node.dtype)
                found = dict(left)
                for key, value in right.items():
                    self._add(found, key, value, node.dtype)
                return found
            case Op(name="div"):
                numerator, denominator = node.children
                inner = self._terms(numerator)
                if inner is None or builder.dims(denominator) & frozenset(self.over):
                    return None
                one = Scalar(1, node.dtype)
                return {
                    key: builder.op("div", one if value is None else value, denominator)
                    for key, value in inner.items()
                }
        return None

    def _factors(self, node: Expr) -> list[Expr]:
        found = factors_of(node)
        for factor in found:
            self.numbers.setdefault(factor, len(self.numbers))
        return sorted(found, key=self.numbers.__getitem__)

    def _add(
        self,
        terms: dict[tuple[Expr, ...], Expr | None],
        key: tuple[Expr, ...],
        value: Expr | None,
        dtype: Any,
    ) -> None:
        if key in terms:
            one = Scalar(1, dtype)
            old = terms[key]
            a, b = (one if x is None else x for x in (old, value))
            value = self.builder.op("add", a, b)
        terms[key] = value

    def _negated(
        self, terms: Mapping[tuple[Expr, ...], Expr | None], dtype: Any
    ) -> dict[tuple[Expr, ...], Expr | None]:
        one = Scalar(1, dtype)
        return {
            key: self.builder.op("neg", one if value is None else value)
            for key, value in terms.items()
        }


def _count_terms(node: Expr) -> int:
    if isinstance(node, Op) and node.name in ("add", "sub"):
        return sum(_count_terms(child) for child in node.children)
    return 1

"""Building, taking apart and rewriting the expressions of :mod:`pyop3_mlir.kernels.program`.

An :class:`Algebra` keeps what it learns about expressions (they are interned, so each is looked at
once) and gives index expressions one canonical form, sum of coefficients times terms plus constant
in a fixed order, so that equal indices are the same object.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pyop3_mlir.kernels.program import INDEX, Dim, Expr, IndexOf, Load, Op, Scalar, Table

__all__ = ["Algebra", "Terms"]

Terms = tuple[dict[Expr, int], int]
"""An affine index expression: coefficients by term, and the constant."""

_FOLDABLE: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "not": np.logical_not,
    "and": np.logical_and, "or": np.logical_or, "abs": np.abs, "sqrt": np.sqrt,
    "min": np.minimum, "max": np.maximum, "pow": np.power, "select": np.where,
    "exp": np.exp, "log": np.log, "sin": np.sin, "cos": np.cos,
}  # fmt: skip


class Algebra:
    """Memory of one import: canonical index expressions, bounds and dimensions of expressions."""

    def __init__(self) -> None:
        self._serial: dict[Expr, int] = {}
        self._masks: dict[Expr, int] = {}
        self._bits: dict[Dim, int] = {}
        self._dims: list[Dim] = []
        self._bounds: dict[Expr, tuple[float, float]] = {}

    # -----------------------------------------------------------------------------------------
    # dimensions

    def bit(self, dim: Dim) -> int:
        """The bit that stands for ``dim`` in a mask."""
        found = self._bits.get(dim)
        if found is None:
            found = self._bits[dim] = 1 << len(self._dims)
            self._dims.append(dim)
        return found

    def mask(self, expression: Expr) -> int:
        """The dimensions that ``expression`` varies over, as a mask."""
        masks = self._masks
        found = masks.get(expression)
        if found is not None:
            return found
        stack = [expression]
        while stack:
            node = stack[-1]
            if node in masks:
                stack.pop()
                continue
            missing = [child for child in node.children if child not in masks]
            if missing:
                stack.extend(missing)
                continue
            mask = self.bit(node.dim) if isinstance(node, IndexOf) else 0
            for child in node.children:
                mask |= masks[child]
            masks[node] = mask
            stack.pop()
        return masks[expression]

    def assume(self, expression: Expr, mask: int) -> None:
        """Let ``expression`` count as varying over ``mask``."""
        self._masks[expression] = mask

    def of_dims(self, dims: Iterable[Dim]) -> int:
        """The mask of ``dims``."""
        mask = 0
        for dim in dims:
            mask |= self.bit(dim)
        return mask

    def dims(self, mask: int) -> tuple[Dim, ...]:
        """The dimensions in ``mask``, in the order in which they were first seen."""
        found = []
        while mask:
            low = mask & -mask
            found.append(self._dims[low.bit_length() - 1])
            mask ^= low
        return tuple(found)

    # -----------------------------------------------------------------------------------------
    # index expressions

    def affine(self, expression: Expr) -> Terms:
        """``expression`` (dtype ``INDEX``) as coefficients and constant."""
        if isinstance(expression, Scalar):
            return {}, int(expression.value)
        if isinstance(expression, Op):
            name = expression.name
            if name in ("add", "sub"):
                terms, constant = self.affine(expression.children[0])
                more, addend = self.affine(expression.children[1])
                sign = 1 if name == "add" else -1
                terms = dict(terms)
                for term, factor in more.items():
                    terms[term] = terms.get(term, 0) + sign * factor
                return {t: f for t, f in terms.items() if f}, constant + sign * addend
            if name == "mul":
                left, right = (self.affine(child) for child in expression.children)
                for (terms, constant), (others, factor) in ((left, right), (right, left)):
                    if not others:
                        if not factor:
                            return {}, 0
                        return {t: f * factor for t, f in terms.items()}, constant * factor
            if name == "neg":
                terms, constant = self.affine(expression.children[0])
                return {t: -f for t, f in terms.items()}, -constant
        return {expression: 1}, 0

    def index(self, terms: Mapping[Expr, int], constant: int = 0) -> Expr:
        """The canonical index expression of these coefficients and constant."""
        serial = self._serial
        for term in terms:
            serial.setdefault(term, len(serial))
        result: Expr | None = None
        for term in sorted(terms, key=serial.__getitem__):
            factor = terms[term]
            if factor:
                part = term if factor == 1 else Op("mul", term, Scalar(factor, INDEX))
                result = part if result is None else Op("add", result, part)
        if result is None:
            return Scalar(constant, INDEX)
        return Op("add", result, Scalar(constant, INDEX)) if constant else result

    def bounds(self, expression: Expr) -> tuple[float, float]:
        """Least and greatest value of an index expression (infinite where unknown)."""
        found = self._bounds.get(expression)
        if found is None:
            found = self._bounds[expression] = self._find_bounds(expression)
        return found

    def _find_bounds(self, expression: Expr) -> tuple[float, float]:
        match expression:
            case Scalar():
                return float(expression.value), float(expression.value)
            case IndexOf():
                return 0.0, float(max(expression.dim.extent - 1, 0))
            case Load(source=Table() as table) if table.size and table.dtype.kind in "iu":
                return float(table.values.min()), float(table.values.max())
            case Op(name="rem") if isinstance(expression.children[1], Scalar):
                return 0.0, float(expression.children[1].value) - 1
            case Op(name="floordiv") if isinstance(expression.children[1], Scalar):
                low, high = self.bounds(expression.children[0])
                divisor = float(expression.children[1].value)
                return np.floor(low / divisor), np.floor(high / divisor)
            case Op(name="cast"):
                child = expression.children[0]
                if isinstance(child, Load) and isinstance(child.source, Table):
                    return self.bounds(child)
                return (0.0 if child.dtype.kind in "ub" else -math.inf), math.inf
            case Op(name="min" | "max"):
                (a, b), (c, d) = (self.bounds(child) for child in expression.children)
                pick = min if expression.name == "min" else max
                return pick(a, c), pick(b, d)
            case Op(name="add" | "sub" | "mul" | "neg"):
                terms, constant = self.affine(expression)
                if terms == {expression: 1}:
                    return -math.inf, math.inf
                low = high = float(constant)
                for term, factor in terms.items():
                    least, most = self.bounds(term)
                    low += factor * (least if factor > 0 else most)
                    high += factor * (most if factor > 0 else least)
                return low, high
        return -math.inf, math.inf

    def divide(self, expression: Expr, divisor: int) -> tuple[Expr, Expr]:
        """Quotient (rounded down) and remainder of an index expression, simplified."""
        terms, constant = self.affine(expression)
        whole = {t: f // divisor for t, f in terms.items() if f % divisor == 0}
        rest = {t: f for t, f in terms.items() if f % divisor}
        left = self.index(rest, constant % divisor)
        low, high = self.bounds(left)
        if low >= 0 and high < divisor:
            return self.index(whole, constant // divisor), left
        # the parts that are multiples of the divisor do not change the remainder
        number = Scalar(divisor, INDEX)
        if not rest:
            return self.index(whole, constant // divisor), Scalar(constant % divisor, INDEX)
        quotient = Op("floordiv", left, number)
        whole[quotient] = whole.get(quotient, 0) + 1
        return self.index(whole, constant // divisor), Op("rem", left, number)

    # -----------------------------------------------------------------------------------------
    # values

    def make(self, name: str, *children: Expr, dtype: Any = None) -> Expr:
        """``Op(name, *children)`` after the simplifications that cost no accuracy."""
        first = children[0]
        kind = np.dtype(dtype) if dtype is not None else None
        if all(child.dtype == INDEX for child in children):
            found = self._make_index(name, children, kind)
            if found is not None:
                return found
        if name == "cast":
            return self.cast(first, kind if kind is not None else first.dtype)
        if name == "select":
            condition, yes, no = children
            if isinstance(condition, Scalar):
                return yes if condition.value else no
            if yes is no:
                return yes
        if name in _FOLDABLE and all(isinstance(child, Scalar) for child in children):
            values = [child.value for child in children]  # type: ignore[attr-defined]
            with np.errstate(all="ignore"):
                value = _FOLDABLE[name](*values)
            result = Op(name, *children, dtype=dtype).dtype
            if result.kind == np.asarray(value).dtype.kind:
                return Scalar(value, result)
        if name in ("add", "sub", "mul", "div"):
            second = children[1]
            left = first.value if isinstance(first, Scalar) else None
            right = second.value if isinstance(second, Scalar) else None
            if name == "add":
                if left is not None and left == 0:
                    return second
                if right is not None and right == 0:
                    return first
                if _negated(second) is not None:
                    return self.make("sub", first, _negated(second))  # type: ignore[arg-type]
                if _negated(first) is not None:
                    return self.make("sub", second, _negated(first))  # type: ignore[arg-type]
            elif name == "sub":
                if right is not None and right == 0:
                    return first
                if left is not None and left == 0:
                    return self.make("neg", second)
                if _negated(second) is not None:
                    return self.make("add", first, _negated(second))  # type: ignore[arg-type]
            elif name == "mul":
                for value, this, other in ((left, first, second), (right, second, first)):
                    if value is not None:
                        if value == 1:
                            return other
                        if value == -1:
                            return self.make("neg", other)
                        if value == 0:
                            return this
            elif right is not None and right == 1:
                return first
        if name == "neg" and _negated(first) is not None:
            return _negated(first)  # type: ignore[return-value]
        if name in ("and", "or"):
            for this, other in (children, children[::-1]):
                if isinstance(this, Scalar):
                    return other if bool(this.value) == (name == "and") else this
            if first is children[1]:
                return first
        return Op(name, *children, dtype=dtype)

    def _make_index(
        self, name: str, children: Sequence[Expr], dtype: np.dtype[Any] | None
    ) -> Expr | None:
        if name in ("add", "sub", "mul", "neg"):
            raw = Op(name, *children)
            terms, constant = self.affine(raw)
            if raw in terms:
                return raw
            return self.index(terms, constant)
        if name in ("floordiv", "rem") and isinstance(children[1], Scalar):
            divisor = int(children[1].value)
            if divisor > 0:
                return self.divide(children[0], divisor)[name == "rem"]
        if name in ("lt", "le", "gt", "ge", "eq", "ne"):
            low, high = self.bounds(self.make("sub", *children))
            verdicts = {
                "lt": (high < 0, low >= 0),
                "le": (high <= 0, low > 0),
                "gt": (low > 0, high <= 0),
                "ge": (low >= 0, high < 0),
                "eq": (low == high == 0, low > 0 or high < 0),
                "ne": (low > 0 or high < 0, low == high == 0),
            }
            yes, no = verdicts[name]
            if yes or no:
                return Scalar(bool(yes), bool)
        if name in ("min", "max"):
            (a, b), (c, d) = (self.bounds(child) for child in children)
            if b <= c:
                return children[0 if name == "min" else 1]
            if d <= a:
                return children[1 if name == "min" else 0]
        if name == "cast" and (dtype is None or dtype == INDEX):
            return children[0]
        return None

    def cast(self, expression: Expr, dtype: Any) -> Expr:
        """``expression`` as ``dtype``."""
        kind = np.dtype(dtype)
        if expression.dtype == kind:
            return expression
        if isinstance(expression, Scalar):
            value = expression.value
            if kind.kind != "c" and np.iscomplexobj(value):
                value = value.real
            return Scalar(value, kind)
        if kind.kind == "b":
            return Op("ne", expression, Scalar(0, expression.dtype))
        return Op("cast", expression, dtype=kind)

    def substitute(
        self,
        roots: Sequence[Expr],
        mapping: Mapping[Expr, Expr],
        done: dict[Expr, Expr] | None = None,
    ) -> list[Expr]:
        """``roots`` with the keys of ``mapping`` replaced by its values, simplified again.

        ``done`` remembers what was replaced, for several calls with the same mapping.
        """
        if not mapping:
            return list(roots)
        if done is None:
            done = {}
        touched = 0
        for key in mapping:
            touched |= self.mask(key)
        # keys without dimensions of their own can be anywhere
        prune = all(self.mask(key) for key in mapping)
        for root in roots:
            stack = [root]
            while stack:
                node = stack[-1]
                if node in done:
                    stack.pop()
                    continue
                found = mapping.get(node)
                if found is None:
                    children = node.children
                    if not children or (prune and not self.mask(node) & touched):
                        found = node
                    else:
                        missing = [child for child in children if child not in done]
                        if missing:
                            stack.extend(missing)
                            continue
                        new = tuple([done[child] for child in children])
                        found = node if new == children else self.rebuild(node, new)
                done[node] = found
                stack.pop()
        return [done[root] for root in roots]

    def rebuild(self, node: Expr, children: tuple[Expr, ...]) -> Expr:
        """``node`` with other operands, simplified."""
        if isinstance(node, Load):
            return Load(node.source, children)
        assert isinstance(node, Op)
        return self.make(node.name, *children, dtype=None if node.dtype.kind == "b" else node.dtype)


def _negated(expression: Expr) -> Expr | None:
    """X where ``expression`` is -x."""
    if isinstance(expression, Op) and expression.name == "neg" and expression.dtype.kind in "fc":
        return expression.children[0]
    return None

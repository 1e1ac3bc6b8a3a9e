"""From scalar expressions to the statements of a :class:`~pyop3_mlir.kernels.program.LocalKernel`.

An importer describes what it wants as expressions over dimensions: with :meth:`Builder.op` and
:meth:`Builder.load`, which fold constants, and with :meth:`Builder.reduce` for sums. Which of these
expressions become statements is decided here, by :meth:`Builder.finish`:

1. a sum is a statement, and so is an expression that its consumer would compute again and again
   because the consumer has more dimensions; everything else becomes part of its consumer's body;
2. an expression that several statements need is computed once where that is worth a temporary;
3. statements of the same level (one more than that of what they depend on), dimensions and
   reductions are one :class:`~pyop3_mlir.kernels.program.Compute` with several results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels.factor import factor_sums
from pyop3_mlir.kernels.products import terms_of
from pyop3_mlir.kernels.program import (
    INDEX,
    Compute,
    Dim,
    Expr,
    IndexOf,
    KernelArgument,
    Load,
    LocalKernel,
    Op,
    Output,
    Scalar,
    Source,
    Table,
    Temporary,
    is_system,
    postorder,
    rebuild,
)
from pyop3_mlir.kernels.rank import use_low_rank
from pyop3_mlir.kernels.weights import fold_weights

__all__ = ["Builder", "Definition", "Piece"]

Array = npt.NDArray[Any]
DimSet = frozenset[Dim]

_LARGEST_TABLE = 1 << 16
"""Scalars of a table that a constant sum may be folded to."""

_LARGEST_SUM = 1 << 22
"""Terms of a constant sum that are added up while a kernel is imported."""

_LARGEST_EXPANSION = 1 << 14
"""Scalars of the tables that multiplying out a sum may lead to: they should stay in a cache."""

_COSTS = {"div": 8, "sqrt": 8, "floordiv": 8, "rem": 8, "cast": 0} | dict.fromkeys(
    ("neg", "select", "add", "sub", "mul", "min", "max", "abs", "real", "imag", "conj"), 1
)
"""Costs of operations in units of one addition, roughly; 20 where not given."""

_COMMUTATIVE = frozenset(("add", "mul", "min", "max", "eq", "ne", "and", "or"))

_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "pow": np.power, "floordiv": np.floor_divide, "rem": np.mod, "min": np.minimum,
    "max": np.maximum, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.logical_and,
    "or": np.logical_or, "not": np.logical_not, "select": np.where, "abs": np.abs,
    "real": np.real, "imag": np.imag, "conj": np.conj, "sqrt": np.sqrt, "exp": np.exp,
    "log": np.log, "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh,
    "tanh": np.tanh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "atan2": np.arctan2, "erf": np.vectorize(math.erf, otypes=[np.float64]),
}  # fmt: skip
"""Operations that are folded where their operands are constant."""


@dataclass(eq=False)
class Definition:
    """``temporary[dims] = sum over reductions of body``; the body changes while it is optimised."""

    temporary: Temporary
    dims: tuple[Dim, ...]
    reductions: tuple[Dim, ...]
    body: Expr

    @property
    def scope(self) -> DimSet:
        """All dimensions of the loop nest."""
        return frozenset(self.dims + self.reductions)

    @property
    def is_sum(self) -> bool:
        """Whether it sums anything up."""
        return bool(self.reductions) and not is_system(self.body)


@dataclass(frozen=True, eq=False)
class Piece:
    """What a kernel changes: ``argument[slot] += value`` for all values of ``dims``."""

    argument: KernelArgument
    dims: tuple[Dim, ...]
    slot: Expr
    value: Expr


class Builder:
    """Makes expressions and, at the end, a kernel."""

    def __init__(self) -> None:
        self.definitions: dict[Source, Definition] = {}
        self._rank: dict[Dim, tuple[int, int]] = {}
        self._defined: dict[Any, Expr] = {}
        self._names = itertools.count()
        self._dims: dict[Expr, DimSet] = {}
        self._constant: dict[Expr, bool] = {}
        self._ranges: dict[Expr, tuple[int, int]] = {}
        self._serials: dict[Expr, int] = {}
        self._varying: dict[Table, tuple[int, ...]] = {}

    # -- properties of expressions ------------------------------------------------------------

    def register(self, dim: Dim, rank: int = 0) -> Dim:
        """Make a dimension known; statements have their dimensions in the order of ``rank``."""
        self._rank.setdefault(dim, (rank, len(self._rank)))
        return dim

    def order(self, dims: Iterable[Dim]) -> tuple[Dim, ...]:
        """``dims`` in the order in which statements have them."""
        return tuple(sorted(dims, key=lambda dim: self._rank[dim]))

    def dims(self, root: Expr) -> DimSet:
        """The dimensions on which ``root`` depends."""
        known = self._dims
        if root not in known:
            for node in _new(root, known):
                if isinstance(node, IndexOf):
                    known[node] = frozenset((node.dim,))
                else:
                    known[node] = frozenset().union(*(known[c] for c in node.children))
        return known[root]

    def is_constant(self, root: Expr) -> bool:
        """Whether ``root`` depends on no argument and could be evaluated now."""
        known = self._constant
        if root not in known:
            for node in _new(root, known):
                match node:
                    case Load():
                        own = isinstance(node.source, Table)
                    case Op():
                        own = node.name == "cast" or node.name in _NUMPY
                    case _:
                        own = True
                known[node] = own and all(known[c] for c in node.children)
        return known[root]

    def evaluate(self, root: Expr, dims: Sequence[Dim]) -> Array:
        """Values of a constant expression over ``dims``."""
        axes = {dim: axis for axis, dim in enumerate(dims)}
        known: dict[Expr, Array] = {}
        with np.errstate(all="ignore"):
            for node in postorder([root]):
                operands = [known[child] for child in node.children]
                match node:
                    case Scalar():
                        value = np.asarray(node.value)
                    case IndexOf():
                        shape = [1] * len(dims)
                        shape[axes[node.dim]] = node.dim.extent
                        value = np.arange(node.dim.extent, dtype=INDEX).reshape(shape)
                    case Load():
                        assert isinstance(node.source, Table)
                        value = node.source.values[tuple(operands)]
                    case Op():
                        if node.name == "cast":
                            value = operands[0]
                        else:
                            value = np.asarray(_NUMPY[node.name](*operands))
                    case _:
                        raise AssertionError(f"unknown expression {type(node).__name__}")
                if value.dtype.kind == "c" and node.dtype.kind != "c":
                    value = value.real
                known[node] = value.astype(node.dtype, copy=False)
        return np.broadcast_to(known[root], tuple(dim.extent for dim in dims))

    def range(self, root: Expr) -> tuple[int, int]:
        """Bounds on the value of an index expression that are known without data."""
        known = self._ranges
        for node in postorder([root]):
            if node not in known:
                known[node] = _range(node, [known[c] for c in node.children])
        return known[root]

    def cost(self, root: Expr) -> int:
        """Cost of computing ``root`` once, in units of one addition."""
        return sum(
            _COSTS.get(node.name, 20)
            for node in postorder([root])
            if isinstance(node, Op) and node.dtype.kind in "fc"
        )

    def _serial(self, node: Expr) -> int:
        """Order of first appearance, with constants first."""
        if isinstance(node, Scalar):
            return -1
        return self._serials.setdefault(node, len(self._serials))

    # -- expressions --------------------------------------------------------------------------

    def constant(self, values: Array, dims: Sequence[Dim]) -> Expr:
        """An expression over ``dims`` with these values."""
        return self.load(Table(np.asarray(values, order="C")), [IndexOf(dim) for dim in dims])

    def load(self, source: Source, indices: Sequence[Expr] = ()) -> Expr:
        """An entry of ``source``; tables are reduced to the axes along which they vary.

        Indices that depend on data are clamped into the source's bounds.
        """
        if isinstance(source, Table):
            keep = [not isinstance(index, Scalar) for index in indices]
            if not all(keep):
                slices = tuple(
                    slice(None) if k else int(i.value)  # type: ignore[attr-defined]
                    for k, i in zip(keep, indices, strict=True)
                )
                source = Table(np.asarray(source.values[slices]))
                indices = [index for k, index in zip(keep, indices, strict=True) if k]
            varying = self._varying.get(source)
            if varying is None:
                varying = self._varying[source] = _varying_axes(source.values)
            if len(varying) < len(indices) and source.size:
                slices = tuple(
                    slice(None) if axis in varying else 0 for axis in range(len(source.shape))
                )
                source = Table(np.asarray(source.values[slices]))
                indices = [indices[axis] for axis in varying]
            values = source.values
            if not indices:
                return Scalar(values[()], source.dtype)
            if source.dtype.kind == "c" and not values.imag.any():
                real = self.load(Table(np.ascontiguousarray(values.real)), indices)
                return self.op("cast", real, dtype=source.dtype)
        return Load(
            source,
            [
                self._clamp(index, extent)
                for index, extent in zip(indices, source.shape, strict=True)
            ],
        )

    def _clamp(self, index: Expr, extent: int) -> Expr:
        low, high = self.range(index)
        if low < 0:
            index = Op("max", index, Scalar(0, INDEX))
        if high >= extent:
            index = Op("min", index, Scalar(extent - 1, INDEX))
        return index

    def op(self, name: str, *children: Expr, dtype: Any = None) -> Expr:
        """An operation, simplified; constants are folded unless that makes them larger."""
        if name in _COMMUTATIVE:
            # a + b and b + a are the same expression
            children = tuple(sorted(children, key=self._serial))
        simple = self._simplify(name, children, dtype)
        if simple is not None:
            return simple
        node = Op(name, *children, dtype=dtype)
        if not self.is_constant(node):
            return node
        dims = self.dims(node)
        if not dims:
            return Scalar(self.evaluate(node, ())[()], node.dtype)
        if node.dtype == INDEX or node.dtype.kind == "b":
            return node
        if name == "cast" and node.dtype.kind == "c":
            # real tables stay real: half the memory, and the lowering may use it
            return node
        if self._points(dims) > max(self._points(self.dims(child)) for child in children):
            return node
        ordered = self.order(dims)
        return self.constant(self.evaluate(node, ordered), ordered)

    @staticmethod
    def _points(dims: Iterable[Dim]) -> int:
        return math.prod(dim.extent for dim in dims)

    def _simplify(self, name: str, children: tuple[Expr, ...], dtype: Any) -> Expr | None:
        """Something equal to the operation but simpler, or None."""
        match name, children:
            case "cast", (x,):
                if x.dtype == dtype:
                    return x
            case "add", (x, y):
                if _is(x, 0):
                    return y
                if _is(y, 0):
                    return x
                if (z := _negated(y)) is not None:
                    return self.op("sub", x, z)
                if (z := _negated(x)) is not None:
                    return self.op("sub", y, z)
            case "sub", (x, y):
                if _is(y, 0):
                    return x
                if _is(x, 0):
                    return self.op("neg", y)
                if (z := _negated(y)) is not None:
                    return self.op("add", x, z)
            case "mul", (x, y):
                if x.dtype.kind in "fc" and self.is_constant(x) and self.is_constant(y):
                    return None
                for a, b in ((x, y), (y, x)):
                    if _is(a, 0):
                        return a
                    if _is(a, 1):
                        return b
                    if _is(a, -1):
                        return self.op("neg", b)
                    if (z := _negated(a)) is not None:
                        return self.op("neg", self.op("mul", *((z, b) if a is x else (b, z))))
            case "div", (x, y):
                if _is(y, 1):
                    return x
                if y.dtype.kind not in "fc" or self.is_constant(x):
                    return None
                if self.is_constant(y) and self.evaluate(y, self.order(self.dims(y))).all():
                    return self.op("mul", x, self.op("div", Scalar(1, y.dtype), y))
                if self.dims(y) < self.dims(x):
                    # divide once for all
                    return self.op("mul", x, self.op("div", Scalar(1, y.dtype), y))
            case "neg", (x,):
                return _negated(x)
            case "pow", (x, Scalar() as y):
                return self._power(x, y)
            case "select", (c, x, y):
                if isinstance(c, Scalar):
                    return x if c.value else y
                if x is y:
                    return x
            case ("real" | "conj", (x,)) if x.dtype.kind != "c":
                return x
            case ("rem" | "floordiv", (x, Scalar() as y)) if x.dtype == INDEX:
                if int(y.value) == 1:
                    return x if name == "floordiv" else Scalar(0, INDEX)
                low, high = self.range(x)
                if low >= 0 and high < int(y.value):
                    return x if name == "rem" else Scalar(0, INDEX)
            case ("and" | "or", (x, y)):
                for a, b in ((x, y), (y, x)):
                    if isinstance(a, Scalar):
                        return b if bool(a.value) == (name == "and") else a
        return None

    def _power(self, x: Expr, exponent: Scalar) -> Expr | None:
        """``x ** exponent`` by multiplications and square roots where the exponent is small."""
        value = exponent.value
        if np.iscomplexobj(value):
            if value.imag:
                return None
            value = value.real
        if value == 0.5:
            return self.op("sqrt", x)
        if value != int(value) if np.isfinite(value) else True:
            return None
        n = int(value)
        if not 0 < abs(n) <= 8:
            return Scalar(1, x.dtype) if n == 0 else None
        result: Expr | None = None
        square = x
        for bit in reversed(bin(abs(n))[2:]):
            if bit == "1":
                result = square if result is None else self.op("mul", result, square)
            square = self.op("mul", square, square)
        assert result is not None
        return self.op("div", Scalar(1, x.dtype), result) if n < 0 else result

    def substitute(self, root: Expr, values: Mapping[Dim, Expr]) -> Expr:
        """``root`` with index expressions put in the place of dimensions."""
        known: dict[Expr, Expr] = {}
        for node in postorder([root]):
            if not any(dim in values for dim in self.dims(node)):
                known[node] = node
                continue
            children = [known[child] for child in node.children]
            match node:
                case IndexOf():
                    known[node] = values[node.dim]
                case Load():
                    known[node] = self.load(node.source, children)
                case Op():
                    known[node] = self.op(node.name, *children, dtype=node.dtype)
        return known[root]

    def stack(self, entries: Array, indices: Sequence[Expr]) -> Expr:
        """Entry ``indices`` of an array of expressions, by selects where an index is not fixed."""
        index, *rest = indices
        if isinstance(index, Scalar):
            chosen = entries[int(index.value)]
            return self.stack(chosen, rest) if rest else chosen
        found = [
            self.stack(entries[k], rest) if rest else entries[k] for k in range(entries.shape[0])
        ]

        def choose(low: int, high: int) -> Expr:
            if high - low == 1:
                return found[low]
            middle = (low + high) // 2
            return self.op(
                "select",
                self.op("lt", index, Scalar(middle, INDEX)),
                choose(low, middle),
                choose(middle, high),
            )

        return choose(0, len(found))

    # -- definitions --------------------------------------------------------------------------

    def temporary(self, dims: Sequence[Dim], dtype: np.dtype[Any]) -> Temporary:
        """A new temporary over ``dims``."""
        return Temporary(f"t{next(self._names)}", tuple(d.extent for d in dims), dtype)

    def define(self, body: Expr, dims: Sequence[Dim], reductions: Sequence[Dim] = ()) -> Expr:
        """Make ``body`` a statement and return a load of its result."""
        key = (body, tuple(dims), tuple(reductions))
        if key not in self._defined:
            temporary = self.temporary(dims, body.dtype)
            self.definitions[temporary] = Definition(temporary, key[1], key[2], body)
            self._defined[key] = Load(temporary, [IndexOf(dim) for dim in dims])
        return self._defined[key]

    def emit(self, statements: Iterable[Compute]) -> None:
        """Add statements that were made elsewhere."""
        for statement in statements:
            for dim in statement.dims + statement.reductions:
                self.register(dim)
            for result, body in zip(statement.results, statement.bodies, strict=True):
                self.definitions[result] = Definition(
                    result, statement.dims, statement.reductions, body
                )

    def reduce(self, body: Expr, reductions: Iterable[Dim]) -> Expr:
        """The sum of ``body`` over ``reductions``.

        Terms whose dependence on the reductions is constant are summed now. Otherwise factors are
        ordered so that those of few dimensions are multiplied first (they are hoisted later), and
        what all terms share that has other dimensions alone is multiplied afterwards.
        """
        over = self.order(reductions)
        if not over:
            return body
        if self._points(over) == 0:
            return Scalar(0, body.dtype)
        result: Expr | None = None
        kept: dict[tuple[Dim, ...], list[list[Expr]]] = {}
        for negative, term in terms_of(body):
            free = tuple(d for d in over if d not in self.dims(term))
            used = tuple(d for d in over if d not in free)
            factors = self._factors(term, frozenset(used))
            if free:
                factors.append(Scalar(self._points(free), term.dtype))
            if not used:
                value = self._product(factors)
            elif (found := self._reduce_constant(factors, used)) is not None:
                value = found
            else:
                kept.setdefault(used, []).append(
                    [Scalar(-1, term.dtype), *factors] if negative else factors
                )
                continue
            if negative:
                value = self.op("neg", value)
            result = value if result is None else self.op("add", result, value)
        for used, products in kept.items():
            value = self._define_sum(products, used)
            result = value if result is None else self.op("add", result, value)
        assert result is not None
        return result

    def _define_sum(self, products: Sequence[Sequence[Expr]], over: tuple[Dim, ...]) -> Expr:
        """A statement for the sum of products over ``over``."""
        outside = [
            [f for f in factors if self.dims(f) and not self.dims(f) & frozenset(over)]
            for factors in products
        ]
        shared = outside[0] if all(set(o) == set(outside[0]) for o in outside) else []
        body: Expr | None = None
        for factors in products:
            inside = self._merge_constants([f for f in factors if f not in shared])
            term = self._product(inside)
            body = term if body is None else self.op("add", body, term)
        assert body is not None
        dims = self.order(self.dims(body) - frozenset(over))
        return self._product([*shared, self.define(body, dims, over)])

    def _factors(self, term: Expr, over: DimSet) -> list[Expr]:
        factors: list[Expr] = []
        stack = [term]
        while stack:
            node = stack.pop()
            if isinstance(node, Op) and node.name == "mul":
                stack.extend(reversed(node.children))
            elif isinstance(node, Op) and node.name == "neg":
                factors.append(Scalar(-1, node.dtype))
                stack.append(node.children[0])
            elif isinstance(node, Op) and node.name == "div" and not self.is_constant(node):
                numerator, denominator = node.children
                if _is(numerator, 1) or self.dims(denominator) & over:
                    factors.append(node)
                else:
                    stack += [self.op("div", Scalar(1, node.dtype), denominator), numerator]
            else:
                factors.append(node)
        return factors

    def _reduce_constant(self, factors: Sequence[Expr], over: tuple[Dim, ...]) -> Expr | None:
        """The sum, where what depends on ``over`` is constant or becomes so; else None.

        It becomes so by changing the order of two sums: sum_q C[q, i] sum_j T[q, j] u[j] is
        sum_j (sum_q C T)[i, j] u[j].
        """
        inner = [f for f in factors if self.dims(f) & frozenset(over)]
        outer = [f for f in factors if f not in inner]
        varying = [f for f in inner if not self.is_constant(f)]
        constants = [f for f in inner if self.is_constant(f)]
        if not varying:
            dims = self.order(frozenset().union(*map(self.dims, inner)) - frozenset(over))
            if self._points(dims) > _LARGEST_TABLE:
                return None
            return self._product([*outer, self._sum_constants(constants, dims, over)])
        if not constants:
            return None
        if not isinstance(varying[0], Load):
            return self._expand_constant(factors, over)
        load = varying[0]
        definition = self.definitions.get(load.source)
        if len(varying) > 1 or definition is None or not definition.is_sum:
            return None
        if not _is_whole(load, definition):
            return None
        if set(definition.reductions) & set().union(*map(self.dims, constants)):
            return None
        parts = self._factors(definition.body, frozenset())
        tables = [p for p in parts if self.is_constant(p)]
        rest = [p for p in parts if not self.is_constant(p)]
        if any(self.dims(p) & frozenset(over) for p in rest):
            return None
        dims = self.order(frozenset().union(*map(self.dims, constants + tables)) - frozenset(over))
        # what the sum over q costs now against the sum over j that takes its place
        if self._points(definition.reductions) > self._points(over):
            return None
        if self._points(dims) > _LARGEST_TABLE:
            return None
        table = self._sum_constants(constants + tables, dims, over)
        summed = self.reduce(self._product([*rest, table]), definition.reductions)
        return self._product([*outer, summed])

    def _expand_constant(self, factors: Sequence[Expr], over: tuple[Dim, ...]) -> Expr | None:
        """The sum multiplied out, where that leaves constant sums and is less work; else None.

        sum_q C[q, i] (T[q, j] a + S[q, j] b) is (sum_q C T)[i, j] a + (sum_q C S)[i, j] b: the
        reference tensors of an affine element.
        """
        terms = self._expand(factors, frozenset(over), self._points(over))
        if terms is None:
            return None
        grouped: dict[Expr | None, tuple[Expr | None, list[list[Expr]]]] = {}
        for outer, tables in terms:
            product = self._product(outer) if outer else None
            grouped.setdefault(product, (product, []))[1].append(tables)
        result: Expr | None = None
        for product, sums in grouped.values():
            total: Expr | None = None
            for tables in sums:
                dims = self.order(frozenset().union(*map(self.dims, tables)) - frozenset(over))
                if self._points(dims) * len(terms) > _LARGEST_EXPANSION:
                    return None
                value = self._sum_constants(tables, dims, over)
                total = value if total is None else self.op("add", total, value)
            assert total is not None
            if product is not None:
                total = self._product([product, total])
            result = total if result is None else self.op("add", result, total)
        return result

    def _expand(
        self, factors: Sequence[Expr], over: DimSet, limit: int
    ) -> list[tuple[list[Expr], list[Expr]]] | None:
        """Products as sums of (data that does not depend on ``over``, constants that may)."""
        found: list[tuple[list[Expr], list[Expr]]] = [([], [])]
        for factor in factors:
            if self.is_constant(factor):
                options: list[tuple[list[Expr], list[Expr]]] = [([], [factor])]
            elif not self.dims(factor) & over:
                options = [([factor], [])]
            else:
                terms = terms_of(factor)
                if len(terms) < 2 or len(terms) * len(found) > limit:
                    return None
                options = []
                for negative, term in terms:
                    part = self._expand(self._factors(term, over), over, limit)
                    if part is None:
                        return None
                    sign: list[Expr] = [Scalar(-1, term.dtype)] if negative else []
                    options += [(outer, sign + tables) for outer, tables in part]
            found = [(a + c, b + d) for a, b in found for c, d in options]
            if len(found) > limit:
                return None
        return found

    def _sum_constants(
        self, constants: Sequence[Expr], dims: tuple[Dim, ...], over: tuple[Dim, ...]
    ) -> Expr:
        letters = {dim: k for k, dim in enumerate(dims + over)}
        # what the tables do not depend on is summed over all the same
        operands: list[Any] = [np.ones([dim.extent for dim in over]), [letters[d] for d in over]]
        for constant in constants:
            own = self.order(self.dims(constant))
            operands += [self.evaluate(constant, own), [letters[dim] for dim in own]]
        values = np.einsum(*operands, [letters[dim] for dim in dims], optimize="greedy")
        return self.constant(np.asarray(values, dtype=constants[0].dtype), dims)

    def _merge_constants(self, factors: Sequence[Expr]) -> list[Expr]:
        """Multiply a table into a larger one, unless data of its own dimensions can take it."""
        constants = [f for f in factors if self.is_constant(f)]
        others = [f for f in factors if not self.is_constant(f)]
        groups: dict[DimSet, list[Expr]] = {}
        for factor in others:
            groups.setdefault(self.dims(factor), []).append(factor)
        busy = {
            dims
            for dims, group in groups.items()
            if len(group) > 1
            or not isinstance(group[0], Load)
            or any(smaller < dims for smaller in groups)
            or not dims
        }
        merged: list[Expr] = []
        for constant in sorted(constants, key=lambda c: -self._points(self.dims(c))):
            dims = self.dims(constant)
            for k, larger in enumerate(merged):
                if dims not in busy and dims <= self.dims(larger):
                    merged[k] = self.op("mul", constant, larger)
                    break
            else:
                merged.append(constant)
        return others + merged

    def _product(self, factors: Iterable[Expr]) -> Expr:
        """The product, of few dimensions first."""
        groups: dict[DimSet, Expr] = {}
        for factor in factors:
            dims = self.dims(factor)
            groups[dims] = self.op("mul", groups[dims], factor) if dims in groups else factor
        ordered = sorted(groups, key=lambda dims: (len(dims), self._points(dims)))
        result = groups[ordered[0]]
        for dims in ordered[1:]:
            result = self.op("mul", result, groups[dims])
        return result

    # -- the end ------------------------------------------------------------------------------

    def finish(
        self,
        name: str,
        arguments: Sequence[KernelArgument],
        pieces: Sequence[Piece],
        whole: Collection[KernelArgument] = (),
    ) -> LocalKernel:
        """Make the kernel.

        Parameters
        ----------
        name
            Of the kernel.
        arguments
            All of them, in order.
        pieces
            What is added to the arguments.
        whole
            Arguments of another access than INC: each gets exactly one output, which covers all its
            slots.

        Returns
        -------
        LocalKernel
            Validated.

        Raises
        ------
        UnsupportedLoopError
            Where a slot depends on data.
        """
        pieces = self._add_pieces(pieces)
        for piece in pieces:
            if not self.is_constant(piece.slot):
                raise UnsupportedLoopError(
                    f"kernel {name}: where {piece.argument.name} is changed depends on data"
                )
        pieces = [piece for piece in pieces if piece.argument not in whole] + [
            self._cover(name, argument, [p for p in pieces if p.argument is argument])
            for argument in arguments
            if argument in whole
        ]
        self._join_sums(pieces)
        outputs = [self._output(piece) for piece in self._inline_trivial(pieces)]
        roots = list(dict.fromkeys(output.value for output in outputs))
        self._hoist(roots)
        groups = self._schedule(roots)
        while self._share(groups):
            groups = self._schedule(roots)
        statements = _computes(groups, roots)
        kernel = LocalKernel(name, tuple(arguments), statements, tuple(outputs))
        kernel.validate()
        return factor_sums(use_low_rank(fold_weights(kernel)))

    def _output(self, piece: Piece) -> Output:
        """An output from a temporary of the piece's dimensions, an existing one where there is."""
        value = piece.value
        definition = self.definitions.get(value.source) if isinstance(value, Load) else None
        if definition is not None:
            named = [child.dim for child in value.children if isinstance(child, IndexOf)]
            whole = definition.temporary.shape == tuple(dim.extent for dim in named)
            if whole and len(set(named)) == len(value.children) and set(named) == set(piece.dims):
                own = {dim: IndexOf(new) for dim, new in zip(named, definition.dims, strict=True)}
                slot = self.substitute(piece.slot, own)
                return Output(piece.argument, definition.dims, slot, definition.temporary)
        load = self.define(value, self.order(piece.dims))
        assert isinstance(load, Load)
        definition = self.definitions[load.source]
        return Output(piece.argument, definition.dims, piece.slot, definition.temporary)

    def _inline_trivial(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Put constants and copies in the place of the temporaries that hold nothing else."""
        inlined: dict[Source, tuple[tuple[Dim, ...], Expr]] = {}

        def rewrite(root: Expr) -> Expr:
            known: dict[Expr, Expr] = {}
            for node in postorder([root]):
                children = [known[child] for child in node.children]
                if isinstance(node, Load) and node.source in inlined:
                    dims, body = inlined[node.source]
                    known[node] = self.substitute(body, dict(zip(dims, children, strict=True)))
                elif all(a is b for a, b in zip(children, node.children, strict=True)):
                    known[node] = node
                elif isinstance(node, Load):
                    known[node] = self.load(node.source, children)
                else:
                    assert isinstance(node, Op)
                    known[node] = self.op(node.name, *children, dtype=node.dtype)
            return known[root]

        for definition in self._live(piece.value for piece in pieces):
            definition.body = rewrite(definition.body)
            dims = definition.dims
            if (
                self.is_constant(definition.body)
                and self._points(dims) <= _LARGEST_TABLE
                and self._points(definition.scope) <= _LARGEST_SUM
            ):
                values = self.evaluate(definition.body, dims + definition.reductions)
                summed = tuple(range(len(dims), values.ndim))
                values = values.sum(axis=summed, dtype=values.dtype) if summed else values
                inlined[definition.temporary] = dims, self.constant(values, dims)
            elif isinstance(definition.body, Load) and not definition.reductions:
                inlined[definition.temporary] = dims, definition.body
        return [Piece(p.argument, p.dims, p.slot, rewrite(p.value)) for p in pieces]

    def _add_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Add up the pieces that change the same slots."""
        found: dict[Any, Piece] = {}
        for piece in pieces:
            key = (piece.argument, frozenset(piece.dims), piece.slot)
            if key in found:
                value = self.op("add", found[key].value, piece.value)
                piece = Piece(piece.argument, piece.dims, piece.slot, value)
            found[key] = piece
        return list(found.values())

    def _cover(self, name: str, argument: KernelArgument, pieces: Sequence[Piece]) -> Piece:
        """One piece that covers every slot once and does what ``pieces`` do together."""
        slots = [self.evaluate(p.slot, p.dims).reshape(-1) for p in pieces]
        if len(pieces) == 1 and np.array_equal(np.sort(slots[0]), np.arange(argument.size)):
            return pieces[0]
        dim = self.register(Dim("s", argument.size))
        value: Expr = Scalar(0, argument.dtype)
        for piece, places in zip(pieces, slots, strict=True):
            if len(np.unique(places)) != len(places):
                raise UnsupportedLoopError(
                    f"kernel {name}: one assignment changes a slot of {argument.name} twice"
                )
            inverse = np.full(argument.size, -1, INDEX)
            inverse[places] = np.arange(len(places))
            shape = tuple(d.extent for d in piece.dims)
            where = np.unravel_index(np.maximum(inverse, 0), shape) if shape else ()
            substitutes = {
                d: self.constant(w.astype(INDEX), [dim])
                for d, w in zip(piece.dims, where, strict=True)
            }
            # a temporary, so that the sums in it are not done again for each slot
            entry = self.substitute(self.define(piece.value, piece.dims), substitutes)
            covered = self.op("ge", self.constant(inverse, [dim]), Scalar(0, INDEX))
            value = self.op(
                "add", value, self.op("select", covered, entry, Scalar(0, argument.dtype))
            )
        return Piece(argument, (dim,), IndexOf(dim), value)

    def _join_sums(self, pieces: list[Piece]) -> None:
        """sum_q a + sum_q b is sum_q (a + b) where neither sum is needed elsewhere."""
        users: dict[Source, int] = {}
        bodies = [p.value for p in pieces] + [d.body for d in self._live(p.value for p in pieces)]
        for body in bodies:
            for node in postorder([body]):
                if isinstance(node, Load):
                    users[node.source] = users.get(node.source, 0) + 1
        for number, piece in enumerate(pieces):
            joined: dict[Any, Expr] = {}
            terms = terms_of(piece.value)
            if len(terms) < 2:
                continue
            others: list[tuple[bool, Expr]] = []
            for negative, term in terms:
                definition = self.definitions.get(term.source) if isinstance(term, Load) else None
                if (
                    definition is None
                    or not definition.is_sum
                    or not _is_whole(term, definition)
                    or users[definition.temporary] > 1
                ):
                    others.append((negative, term))
                    continue
                key = (definition.dims, definition.reductions)
                body = self.op("neg", definition.body) if negative else definition.body
                joined[key] = self.op("add", joined[key], body) if key in joined else body
            if len(joined) + len(others) == len(terms):
                continue
            value: Expr | None = None
            for (dims, reductions), body in joined.items():
                term = self.define(body, dims, reductions)
                value = term if value is None else self.op("add", value, term)
            for negative, term in others:
                assert value is not None
                value = self.op("sub" if negative else "add", value, term)
            assert value is not None
            pieces[number] = Piece(piece.argument, piece.dims, piece.slot, value)

    def _live(self, roots: Iterable[Expr]) -> list[Definition]:
        """Definitions that ``roots`` need, those that others need first."""
        found: dict[Source, Definition] = {}
        stack: list[tuple[Definition | Expr, bool]] = [(root, False) for root in roots]
        while stack:
            item, done = stack.pop()
            if isinstance(item, Definition):
                if done:
                    found.setdefault(item.temporary, item)
                    continue
                if item.temporary in found:
                    continue
                stack.append((item, True))
                item = item.body
            stack.extend(
                (self.definitions[node.source], False)
                for node in postorder([item])
                if isinstance(node, Load) and node.source in self.definitions
            )
        return list(found.values())

    def _hoist(self, roots: Collection[Temporary]) -> None:
        """Make statements of what a statement would compute again and again."""
        hoisted: dict[Expr, Expr] = {}
        pending = self._live(map(self._whole, roots))
        while pending:
            definition = pending.pop()
            scope = definition.scope
            boundary: dict[Expr, Expr] = {}
            stack, seen = [definition.body], set()
            while stack:
                node = stack.pop()
                if node in seen:
                    continue
                seen.add(node)
                if self.dims(node) == scope or self._is_trivial(node):
                    stack.extend(node.children)
                    continue
                if node not in hoisted:
                    dims = self.order(self.dims(node))
                    if self.is_constant(node):
                        hoisted[node] = self.constant(self.evaluate(node, dims), dims)
                    else:
                        load = self.define(node, dims)
                        assert isinstance(load, Load)
                        hoisted[node] = load
                        pending.append(self.definitions[load.source])
                boundary[node] = hoisted[node]
            definition.body = rebuild(definition.body, boundary)

    def _whole(self, temporary: Temporary) -> Expr:
        return Load(temporary, [IndexOf(dim) for dim in self.definitions[temporary].dims])

    @staticmethod
    def _is_trivial(node: Expr) -> bool:
        """Whether a temporary for ``node`` would be no gain, or not allowed."""
        if not isinstance(node, Op):
            return True
        if node.dtype == INDEX or node.dtype.kind == "b" or is_system(node):
            return True
        return node.name == "cast" and not isinstance(node.children[0], Op)

    def _schedule(self, roots: Collection[Temporary]) -> list[list[Definition]]:
        """Group the definitions into statements, in order."""
        levels: dict[Source, int] = {}
        groups: dict[Any, list[Definition]] = {}
        live = self._live(map(self._whole, roots))
        for definition in live:
            level = 1
            for node in postorder([definition.body]):
                if isinstance(node, Load) and node.source in levels:
                    other = self.definitions[node.source]
                    step = 0 if _is_inlined(node, other, definition) else 1
                    level = max(level, levels[node.source] + step)
            levels[definition.temporary] = level
            key = (level, definition.dims, definition.reductions)
            groups.setdefault(key, []).append(definition)
        return [groups[key] for key in sorted(groups, key=lambda key: (key[0], bool(key[2])))]

    def _share(self, groups: Sequence[Sequence[Definition]]) -> bool:
        """Make statements of what several groups compute; whether anything changed."""
        users: dict[Expr, set[int]] = {}
        for number, group in enumerate(groups):
            for node in postorder([definition.body for definition in group]):
                if isinstance(node, Op) and not self._is_trivial(node):
                    users.setdefault(node, set()).add(number)
        bodies = {d.body: d for group in groups for d in group if not d.reductions}
        chosen: dict[Expr, Expr] = {}
        below: set[Expr] = set()
        # in postorder, so that the largest expressions come last
        for node, numbers in reversed(users.items()):
            if len(numbers) < 2 or node in below:
                continue
            sums = any(groups[number][0].reductions for number in numbers)
            if self.cost(node) < (16 if sums else 4):
                continue
            if node in bodies and bodies[node].scope == self.dims(node):
                chosen[node] = self._whole(bodies[node].temporary)
            else:
                chosen[node] = self.define(node, self.order(self.dims(node)))
            below.update(postorder([node]))
        shared: dict[int, dict[Expr, Load]] = {}
        for node, load in chosen.items():
            assert isinstance(load, Load)
            for number in users[node]:
                shared.setdefault(number, {})[node] = load
        # none of the chosen is part of another, so that one pass replaces all of them
        for number, loads in shared.items():
            for definition in groups[number]:
                others = {n: a for n, a in loads.items() if a.source is not definition.temporary}
                definition.body = rebuild(definition.body, others)
        return bool(chosen)


def _new(root: Expr, known: Mapping[Expr, Any]) -> Iterator[Expr]:
    """Expressions below ``root`` that are not in ``known`` yet, operands first.

    The caller adds each to ``known`` before it asks for the next.
    """
    stack = [root]
    while stack:
        node = stack[-1]
        if node in known:
            stack.pop()
            continue
        missing = [child for child in node.children if child not in known]
        if missing:
            stack.extend(missing)
        else:
            yield node


_UNKNOWN = (-(1 << 63), (1 << 63) - 1)


def _range(node: Expr, known: Sequence[tuple[int, int]]) -> tuple[int, int]:
    match node:
        case Scalar() if node.dtype.kind in "iu":
            return int(node.value), int(node.value)
        case IndexOf():
            return 0, max(node.dim.extent - 1, 0)
        case Load() if node.dtype.kind in "iu":
            if isinstance(node.source, Table) and node.source.size:
                return int(node.source.values.min()), int(node.source.values.max())
            limits = np.iinfo(node.dtype)
            return int(limits.min), int(limits.max)
    if not isinstance(node, Op) or node.dtype.kind not in "iu":
        return _UNKNOWN
    (low, high), *others = known
    match node.name, others:
        case "cast", []:
            return low, high
        case "add", [(a, b)]:
            return low + a, high + b
        case "sub", [(a, b)]:
            return low - b, high - a
        case "mul", [(a, b)]:
            corners = low * a, low * b, high * a, high * b
            return min(corners), max(corners)
        case "floordiv", [(a, b)] if a > 0:
            corners = low // a, low // b, high // a, high // b
            return min(corners), max(corners)
        case "rem", [(a, b)] if a > 0:
            return 0, b - 1
        case "min", [(a, b)]:
            return min(low, a), min(high, b)
        case "max", [(a, b)]:
            return max(low, a), max(high, b)
        case "select", [(a, b), (c, d)]:
            return min(a, c), max(b, d)
    return _UNKNOWN


def _varying_axes(values: Array) -> tuple[int, ...]:
    """Axes along which an array is not constant (bit for bit, but NaN is equal to itself)."""
    if not values.size:
        return tuple(range(values.ndim))
    equal_nan = values.dtype.kind in "fc"
    return tuple(
        axis
        for axis in range(values.ndim)
        if not np.array_equal(
            values, np.broadcast_to(values.take([0], axis), values.shape), equal_nan=equal_nan
        )
    )


def _is(node: Expr, value: int) -> bool:
    return isinstance(node, Scalar) and node.dtype.kind != "b" and bool(node.value == value)


def _negated(node: Expr) -> Expr | None:
    """The operand where ``node`` is a negation."""
    return node.children[0] if isinstance(node, Op) and node.name == "neg" else None


def _is_whole(load: Expr, definition: Definition) -> bool:
    """Whether ``load`` reads the entry that the definition's own dimensions name."""
    return load.children == tuple(IndexOf(dim) for dim in definition.dims)


def _is_inlined(load: Load, used: Definition, user: Definition) -> bool:
    """Whether user and used are the same loop nest, so that no temporary is needed between them."""
    return (
        not used.reductions
        and not user.reductions
        and used.dims == user.dims
        and _is_whole(load, used)
    )


def _computes(
    groups: Sequence[Sequence[Definition]], roots: Iterable[Temporary]
) -> tuple[Compute, ...]:
    """One statement from the definitions of each group."""
    needed: set[Source] = set(roots)
    merged: list[dict[Temporary, Expr]] = []
    for group in groups:
        bodies: dict[Source, Expr] = {}
        own = {d.temporary for d in group}
        for definition in group:
            loads = [n for n in postorder([definition.body]) if isinstance(n, Load)]
            needed |= {load.source for load in loads if load.source not in own}
            bodies[definition.temporary] = rebuild(
                definition.body,
                {load: bodies[load.source] for load in loads if load.source in own},
            )
        merged.append({d.temporary: bodies[d.temporary] for d in group})
    statements = []
    for group, results in zip(groups, merged, strict=True):
        kept = {t: body for t, body in results.items() if t in needed}
        if kept:
            statements.append(
                Compute(tuple(kept), group[0].dims, group[0].reductions, tuple(kept.values()))
            )
    return tuple(statements)

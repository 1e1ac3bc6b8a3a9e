"""From GEM, TSFC's tensor notation, to batched tensor programs.

:func:`import_gem` takes the assignments of a kernel as TSFC leaves them before it makes loops of
them (``gem.impero_utils.compile_gem`` receives them), or those that :func:`prepare` made from GEM
that was written by hand with FInAT.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import gem
import gem.coffee
import gem.refactorise
import gem.unconcatenate
import gem.utils
import numpy as np
from gem import optimise
from gem.node import Memoizer, MemoizerArg, post_traversal, reuse_if_untouched, traversal

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels import dense
from pyop3_mlir.kernels.assemble import Builder, Piece
from pyop3_mlir.kernels.program import (
    INDEX,
    Dim,
    Expr,
    IndexOf,
    KernelArgument,
    Load,
    LocalKernel,
    Scalar,
    Source,
    Table,
)

__all__ = ["import_gem", "prepare"]

Assignment = tuple[gem.Node, gem.Node]

_TINY = 3
"""Largest extent of an index of components (of a vector, of a Jacobian)."""

_SHORT = 8
"""Most terms that a sum of the geometry is unrolled to: the vertices of a hexahedron."""

_LAST = 1 << 30
"""Rank of the dimensions that come last."""


def import_gem(
    name: str,
    arguments: Sequence[tuple[str, Sequence[int], Any]],
    assignments: Sequence[Assignment],
    *,
    index_names: Mapping[gem.Index, str] | Iterable[tuple[gem.Index, str]] | None = None,
    scalar_dtype: Any = np.float64,
    whole: Collection[str] = (),
) -> LocalKernel:
    """Make a tensor program of a kernel in GEM.

    Parameters
    ----------
    name
        Name of the kernel.
    arguments
        (name of the gem.Variable, shape, dtype) of each argument, in order. The shape need not be
        the Variable's, but of its size; it is what the pack of an entity looks like.
    assignments
        (lvalue, expression) pairs: the lvalue is an argument's Variable, Indexed or
        FlexiblyIndexed. Each adds to its lvalue, also where several have the same; indices that are
        free in the lvalue alone broadcast.
    index_names
        Names of indices, for printing.
    scalar_dtype
        The type of scalars: float64, float32, complex128 or complex64. Literals take its precision.
    whole
        Names of the arguments whose access is not INC. What is assigned to such an argument is its
        new value, entries without an assignment are zero.

    Returns
    -------
    LocalKernel
        The program: its flops are estimated by :meth:`LocalKernel.count_flops`.

    Raises
    ------
    UnsupportedLoopError
        Where the expression holds a Failure, something that is not known here (a Bessel function of
        an order that is not an integer constant, a complex erf), or an lvalue that depends on data.
    ValueError
        Where arguments and assignments do not fit together.
    """
    kinds = np.dtype(scalar_dtype)
    if kinds not in (np.float64, np.float32, np.complex128, np.complex64):
        raise ValueError(f"kernel {name}: {kinds} is not a type of scalars")
    formals = {
        variable: KernelArgument(variable, tuple(map(int, shape)), np.dtype(dtype))
        for variable, shape, dtype in arguments
    }
    if len(formals) != len(arguments):
        raise ValueError(f"kernel {name}: two arguments have the same name")
    unknown = [variable for variable in whole if variable not in formals]
    if unknown:
        raise ValueError(f"kernel {name}: {unknown[0]} is not an argument")
    with _deep_recursion():
        pairs = _simplify(assignments)
        translator = _Translator(name, formals, kinds, dict(index_names or {}), pairs)
        pieces = [translator.piece(lvalue, expression) for lvalue, expression in pairs]
    return translator.builder.finish(
        name, tuple(formals.values()), pieces, [formals[variable] for variable in whole]
    )


@contextmanager
def _deep_recursion(limit: int = 20_000) -> Iterator[None]:
    """GEM's own rewriting is recursive, and a sum of a thousand terms is a thousand levels deep."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, limit))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


# -- before the translation: GEM to GEM -------------------------------------------------------


def prepare(
    assignments: Sequence[Assignment], quadrature_indices: Sequence[gem.Index] = ()
) -> list[Assignment]:
    """Optimise GEM that was written by hand, as TSFC's spectral mode would.

    Small differences from round numbers are removed from tables, arguments are factorised out of
    products of sums, Deltas cancelled, and contractions sum factorised (Homolya, Kirby and Ham,
    "Exposing and exploiting structure", arXiv 1711.02473).

    Parameters
    ----------
    assignments
        (lvalue, expression) pairs. Expressions that are not linear in the basis functions that the
        lvalue's indices stand for are left as they are.
    quadrature_indices
        Summed over, where they are free in an expression.

    Returns
    -------
    list
        Assignments for :func:`import_gem`; possibly more than were given.
    """
    with _deep_recursion():
        return _prepare(assignments, tuple(quadrature_indices))


def _prepare(
    assignments: Sequence[Assignment], quadrature_indices: tuple[gem.Index, ...]
) -> list[Assignment]:
    round_tables = partial(optimise.ffc_rounding, epsilon=np.finfo(np.float64).resolution)
    expressions = optimise.replace_division([round_tables(e) for _, e in assignments])
    expressions = optimise.remove_componenttensors(expressions)
    expressions = [gem.index_sum(e, quadrature_indices) for e in expressions]
    pairs = _split_concatenations(
        [(lvalue, e) for (lvalue, _), e in zip(assignments, expressions, strict=True)]
    )
    quadrature = list(quadrature_indices) or _outer_sums([e for _, e in pairs])
    prepared: list[Assignment] = []
    for lvalue, expression in pairs:
        try:
            prepared += _factorise(lvalue, expression, quadrature)
        except gem.refactorise.FactorisationError:
            prepared.append((lvalue, expression))
    return prepared


def _outer_sums(expressions: Sequence[gem.Node]) -> list[gem.Index]:
    """Indices of the sums that are not within another sum."""
    found: dict[gem.Index, None] = {}
    stack = list(expressions)
    while stack:
        node = stack.pop()
        if isinstance(node, gem.IndexSum):
            found.update(dict.fromkeys(node.multiindex))
        else:
            stack.extend(node.children)
    return list(found)


def _factorise(
    lvalue: gem.Node, expression: gem.Node, quadrature: Sequence[gem.Index]
) -> list[Assignment]:
    """Write ``expression`` as a sum of products of basis functions, optimised."""
    arguments = set(lvalue.free_indices)
    replacer = MemoizerArg(optimise.filtered_replace_indices)
    has_delta = Memoizer(
        lambda node, self: any(isinstance(c, gem.Delta) or self(c) for c in node.children)
    )

    def is_basis(node: gem.Node) -> bool:
        # data may be infinite: it must not leave the branch of a Conditional that guards it
        if isinstance(node, gem.Indexed):
            return not isinstance(node.children[0], gem.Variable)
        return isinstance(node, gem.Delta)

    def label(node: gem.Node) -> str:
        count = len(arguments.intersection(node.free_indices))
        if count == 0:
            return gem.refactorise.OTHER
        if count == 1 and is_basis(node) and not has_delta(node):
            return gem.refactorise.ATOMIC
        if isinstance(node, gem.MathFunction) and node.name not in ("conj", "real", "imag"):
            # collect_monomials would not end
            raise gem.refactorise.FactorisationError(node)
        return gem.refactorise.COMPOUND

    (monomials,) = gem.refactorise.collect_monomials([expression], label)
    sums: dict[gem.Node, gem.refactorise.MonomialSum] = {}
    for sum_indices, atomics, rest in monomials:
        factors = [*atomics, lvalue]
        sum_indices, factors = optimise.delta_elimination(sum_indices, [*factors, rest], replacer)
        factors = [replacer(f, ()) for f in factors[:-1]] + factors[-1:]
        target = factors[-2]
        if all(_is_static(f) for f in factors):
            _, factors = optimise.delta_elimination(target.free_indices, factors, replacer)
        *atomics, target, rest = [replacer(f, ()) for f in factors[:-1]] + factors[-1:]
        atomics = [a for a in atomics if a != gem.gem.one]
        sums.setdefault(target, gem.refactorise.MonomialSum()).add(sum_indices, atomics, rest)
    pairs = []
    for target, monomials in sums.items():
        used = {index for monomial in monomials for index in monomial.sum_indices}
        tail = [index for index in quadrature if index in used]
        pairs.append((target, _contract(target, tail, monomials)))
    return pairs


def _index_ordering(lvalue: gem.Node) -> tuple[gem.Index, ...]:
    """Free indices in the order in which they are written."""
    return () if isinstance(lvalue, gem.Variable) else tuple(lvalue.index_ordering())


def _is_static(node: gem.Node) -> bool:
    """Whether a Delta, if it is one, would put nothing into an lvalue that depends on data."""
    return not isinstance(node, gem.Delta) or not any(
        isinstance(i, gem.VariableIndex) for i in (node.i, node.j)
    )


def _contract(
    lvalue: gem.Node,
    tail: Sequence[gem.Index],
    monomials: gem.refactorise.MonomialSum,
) -> gem.Node:
    """Sum factorise as TSFC's spectral mode does, one index of ``tail`` after the other."""
    if tail:
        parts: dict[Any, gem.refactorise.MonomialSum] = {}
        for sum_indices, atomics, rest in monomials:
            inner = tuple(i for i in sum_indices if i in tail)
            inside = tuple(a for a in atomics if set(inner) & set(a.free_indices))
            outside = tuple(a for a in atomics if a not in inside)
            key = (tuple(i for i in sum_indices if i not in tail), outside)
            parts.setdefault(key, gem.refactorise.MonomialSum()).add(inner, inside, rest)
        monomials = gem.refactorise.MonomialSum()
        for (sum_indices, atomics), part in parts.items():
            monomials.add(sum_indices, atomics, _contract(lvalue, tail[1:], part))
    return gem.coffee.optimise_monomial_sum(monomials, _index_ordering(lvalue))


def _simplify(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Rewrite GEM so that what remains has a direct meaning as statements."""
    lvalues = [lvalue for lvalue, _ in assignments]
    expressions = _fold_zeros(optimise.remove_componenttensors([e for _, e in assignments]))
    expressions = _identities_to_deltas(expressions)
    pairs = _split_concatenations(list(zip(lvalues, expressions, strict=True)))
    expressions = _unroll([e for _, e in pairs], [lvalue for lvalue, _ in pairs])
    expressions = _cancel_deltas(expressions)
    pairs = [(lvalue, e) for (lvalue, _), e in zip(pairs, expressions, strict=True)]
    pairs = [split for pair in pairs for split in _split_lists(*pair)]
    pairs = [split for pair in pairs for split in _split_deltas(*pair)]
    folded = _fold_zeros([e for _, e in pairs])
    return [
        (lvalue, e)
        for (lvalue, _), e in zip(pairs, folded, strict=True)
        if not isinstance(e, gem.Zero)
    ]


def _fold_zeros(expressions: Sequence[gem.Node]) -> list[gem.Node]:
    try:
        return list(optimise.constant_fold_zero(expressions))
    except ValueError:  # GEM refuses to write down a division by zero
        return list(expressions)


def _identities_to_deltas(expressions: Sequence[gem.Node]) -> list[gem.Node]:
    def rewrite(node: gem.Node, self: Any) -> gem.Node:
        if isinstance(node, gem.Indexed) and isinstance(node.children[0], gem.Identity):
            return gem.Delta(*node.multiindex)
        return reuse_if_untouched(node, self)

    return list(map(Memoizer(rewrite), expressions))


def _split_concatenations(pairs: Sequence[Assignment]) -> list[Assignment]:
    if not any(isinstance(n, gem.Concatenate) for n in traversal([e for _, e in pairs])):
        return list(pairs)

    def flexible(lvalue: gem.Node) -> gem.Node:
        if isinstance(lvalue, gem.Indexed) and not lvalue.indirect_children:
            axes = tuple(
                (0, ((i, 1),)) if isinstance(i, gem.Index) else (i, ()) for i in lvalue.multiindex
            )
            return gem.FlexiblyIndexed(lvalue.children[0], axes)
        return lvalue

    return list(gem.unconcatenate.unconcatenate([(flexible(lvalue), e) for lvalue, e in pairs]))


def _listed(expressions: Sequence[gem.Node]) -> set[gem.Index]:
    """Small indices into tensors that are given entry by entry."""
    return {
        index
        for node in traversal(expressions)
        if isinstance(node, gem.Indexed)
        and isinstance(node.children[0], gem.ListTensor | gem.Inverse | gem.Solve)
        for index in node.multiindex
        if isinstance(index, gem.Index) and index.extent <= _TINY
    }


def _index_sum(summand: gem.Node, indices: Iterable[gem.Index]) -> gem.Node:
    """IndexSum that knows what the sum over an index is on which the summand does not depend."""
    indices = tuple(indices)
    missing = math.prod(i.extent for i in indices if i not in summand.free_indices)
    if missing != 1:
        summand = gem.Product(gem.Literal(missing), summand)
    return gem.IndexSum(summand, tuple(i for i in indices if i in summand.free_indices))


def _once(node: gem.IndexSum) -> tuple[tuple[gem.Index, ...], int]:
    """Each index of a sum once, and how many times the sum over these is taken.

    GEM makes one sum of nested ones, also where both are over the same index.
    """
    indices = tuple(dict.fromkeys(node.multiindex))
    others = list(node.multiindex)
    for index in indices:
        others.remove(index)
    return indices, math.prod(index.extent for index in others)


def _unroll(expressions: Sequence[gem.Node], lvalues: Sequence[gem.Node]) -> list[gem.Node]:
    """Write out the short sums of the geometry, and those over tensors given entry by entry.

    A sum belongs to the geometry where nothing but indices of components is free in it. Sums over
    quadrature points (those that other sums depend on) and basis functions remain.
    """
    inner = Memoizer(
        lambda node, self: frozenset().union(
            *map(self, node.children),
            node.free_indices if isinstance(node, gem.IndexSum) else (),
        )
    )
    sums = gem.extract_type(expressions, gem.IndexSum)
    outer = {i for s in sums for i in s.multiindex if i in inner(s.children[0])}
    kept = outer.union(*(lvalue.free_indices for lvalue in lvalues))
    listed = _listed(expressions)
    replacer = MemoizerArg(optimise.filtered_replace_indices)

    def chosen(node: gem.IndexSum) -> tuple[gem.Index, ...]:
        free = node.free_indices
        if _once(node)[1] != 1:
            return ()
        if outer.isdisjoint(node.multiindex) and all(
            i.extent <= _TINY and i not in kept for i in free
        ):
            if not free and math.prod(i.extent for i in node.multiindex) <= _SHORT:
                return tuple(node.multiindex)
            return tuple(i for i in node.multiindex if i.extent <= _TINY)
        return tuple(i for i in node.multiindex if i in listed)

    def rewrite(node: gem.Node, self: Any) -> gem.Node:
        if isinstance(node, gem.IndexSum) and (unrolled := chosen(node)):
            tensor = gem.ComponentTensor(node.children[0], unrolled)
            terms = [gem.Indexed(tensor, alpha) for alpha in np.ndindex(tensor.shape)]
            try:
                summand = reduce(gem.Sum, (replacer(term, ()) for term in terms))
            except AssertionError:  # as in _split_lists
                return reuse_if_untouched(node, self)
            return self(_index_sum(summand, (i for i in node.multiindex if i not in unrolled)))
        return reuse_if_untouched(node, self)

    return list(map(Memoizer(rewrite), expressions))


def _factors(product: gem.Node) -> list[gem.Node]:
    found, stack = [], [product]
    while stack:
        node = stack.pop()
        if isinstance(node, gem.Product):
            stack.extend(reversed(node.children))
        else:
            found.append(node)
    return found


def _cancel_deltas(expressions: Sequence[gem.Node]) -> list[gem.Node]:
    """The sum of delta_ij f_j over j is f_i."""
    replacer = MemoizerArg(optimise.filtered_replace_indices)

    def rewrite(node: gem.Node, self: Any) -> gem.Node:
        if not isinstance(node, gem.IndexSum) or _once(node)[1] != 1:
            return reuse_if_untouched(node, self)
        summand = self(node.children[0])
        parts = []
        rest = []
        for term in optimise.traverse_sum(summand):
            indices = [i for i in node.multiindex if i in term.free_indices]
            factors = _factors(term)
            left, factors = optimise.delta_elimination(indices, factors, replacer)
            if len(left) == len(indices):
                rest.append(term)
                continue
            product = gem.Product(*(replacer(factor, ()) for factor in factors))
            absent = [i for i in node.multiindex if i not in indices]
            parts.append(_index_sum(product, [*left, *absent]))
        if rest:
            parts.append(_index_sum(reduce(gem.Sum, rest), node.multiindex))
        return reduce(gem.Sum, parts)

    return list(map(Memoizer(rewrite), expressions))


def _fix(node: gem.Node, index: gem.Index, value: Any) -> gem.Node:
    (fixed,) = optimise.remove_componenttensors([node], ((index, value),))
    return fixed


def _split_lists(lvalue: gem.Node, expression: gem.Node) -> list[Assignment]:
    """One assignment for each entry where an index of the lvalue runs over a list of expressions.

    The assignments have the same dimensions, so they become one statement with several results.
    """
    listed = _listed([expression])
    index = next((i for i in lvalue.free_indices if i in listed), None)
    if index is None:
        return [(lvalue, expression)]
    try:
        fixed = [
            (_fix(lvalue, index, value), _fix(expression, index, value))
            for value in range(index.extent)
        ]
    except AssertionError:
        # an entry does not depend on an index that is summed over: GEM cannot write that down
        return [(lvalue, expression)]
    return [split for pair in fixed for split in _split_lists(*pair)]


def _split_deltas(lvalue: gem.Node, expression: gem.Node) -> list[Assignment]:
    """A[i, j] += delta_ij f is A[i, i] += f."""
    replacer = MemoizerArg(optimise.filtered_replace_indices)
    pairs: dict[gem.Node, gem.Node] = {}
    for term in optimise.traverse_sum(expression):
        target, found = lvalue, term
        factors = _factors(term)
        free = lvalue.free_indices
        if all(_is_static(f) for f in factors) and any(
            isinstance(f, gem.Delta) and all(isinstance(i, int) or i in free for i in (f.i, f.j))
            for f in factors
        ):
            _, factors = optimise.delta_elimination(free, [*factors, lvalue], replacer)
            *factors, target = (replacer(f, ()) for f in factors)
            found = gem.Product(*factors)
        pairs[target] = gem.Sum(pairs[target], found) if target in pairs else found
    return list(pairs.items())


# -- the translation --------------------------------------------------------------------------

_BINARY: dict[type, str] = {
    gem.Sum: "add",
    gem.Product: "mul",
    gem.Division: "div",
}
_FUNCTIONS = {
    "sqrt": "sqrt", "exp": "exp", "ln": "log", "sin": "sin", "cos": "cos", "tan": "tan",
    "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asin": "asin", "acos": "acos",
    "atan": "atan", "erf": "erf", "abs": "abs", "real": "real", "imag": "imag", "conj": "conj",
}  # fmt: skip
_BESSEL = {f"cyl_bessel_{kind}": f"bessel_{kind}" for kind in "jyik"}
_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}


class _Translator:
    """Makes expressions of GEM nodes, each once."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, KernelArgument],
        scalar_dtype: np.dtype[Any],
        index_names: Mapping[gem.Index, str],
        assignments: Sequence[Assignment],
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.scalar = scalar_dtype
        self.real = np.dtype(np.finfo(scalar_dtype).dtype)
        self.index_names = index_names
        self.builder = Builder()
        self.op = self.builder.op
        self._known: dict[gem.Node, Expr] = {}
        self._dims: dict[gem.Index, Dim] = {}
        self._closed: dict[gem.Node, np.ndarray[Any, Any]] = {}
        self._solved: dict[gem.Node, tuple[Source, tuple[Dim, ...]]] = {}
        self._rank = _rank_indices(assignments)

    # -- indices ------------------------------------------------------------------------------

    def dim(self, index: gem.Index) -> Dim:
        """The dimension that belongs to an index."""
        if index not in self._dims:
            name = self.index_names.get(index) or index.name or f"i{len(self._dims)}"
            dim = Dim(name, int(index.extent))
            self._dims[index] = self.builder.register(dim, self._rank.get(index, 0))
        return self._dims[index]

    def dims(self, indices: Iterable[gem.Index]) -> tuple[Dim, ...]:
        """Dimensions of the indices that take more than one value."""
        return tuple(self.dim(index) for index in indices if index.extent != 1)

    def index(self, index: Any) -> Expr:
        """Index expression of an entry of a multiindex, an offset or a stride."""
        if isinstance(index, gem.Index):
            return Scalar(0, INDEX) if index.extent == 1 else IndexOf(self.dim(index))
        if isinstance(index, gem.VariableIndex):
            index = index.expression
        if isinstance(index, gem.Node):
            return self.op("cast", self.translate(index), dtype=INDEX)
        return Scalar(int(index), INDEX)

    def _affine(self, node: gem.Node) -> list[list[tuple[Expr, int]]]:
        """Subscripts of each axis as terms with factors."""
        if isinstance(node, gem.Indexed):
            return [[(self.index(i), 1)] for i in node.multiindex]
        axes = []
        for offset, pairs in node.dim2idxs:
            terms = [(self.index(offset), 1)]
            for index, stride in pairs:
                factor = self.index(stride)
                if isinstance(factor, Scalar):
                    terms.append((self.index(index), int(factor.value)))
                else:
                    terms.append((self.op("mul", self.index(index), factor), 1))
            axes.append(terms)
        return axes

    def _total(self, terms: Iterable[tuple[Expr, int]]) -> Expr:
        total: Expr = Scalar(0, INDEX)
        for term, factor in terms:
            total = self.op("add", total, self.op("mul", term, Scalar(factor, INDEX)))
        return total

    # -- types --------------------------------------------------------------------------------

    def cast(self, value: Expr, dtype: Any) -> Expr:
        """Change the type of a value; the real part where a complex becomes real."""
        dtype = np.dtype(dtype)
        if value.dtype.kind == "c" and dtype.kind != "c":
            value = self.op("real", value)
        return self.op("cast", value, dtype=dtype)

    def common(self, *values: Expr) -> list[Expr]:
        """Operands in the type that C would compute in, with literals of the kernel's precision."""
        kinds = [value.dtype for value in values]
        if all(kind.kind in "iu" for kind in kinds):
            return [self.cast(value, INDEX) for value in values]
        floats = [kind for kind in kinds if kind.kind in "fc"]
        dtype = np.result_type(*floats) if floats else self.real
        return [self.cast(value, dtype) for value in values]

    def truth(self, value: Expr) -> Expr:
        """A condition."""
        if value.dtype.kind == "b":
            return value
        return self.op("ne", value, Scalar(0, value.dtype))

    def to_real(self, value: Expr) -> Expr:
        """A real number."""
        if value.dtype.kind == "f":
            return value
        if value.dtype.kind == "c":
            return self.op("real", value)
        return self.cast(value, self.real)

    def to_float(self, value: Expr) -> Expr:
        """A real or complex number."""
        return value if value.dtype.kind in "fc" else self.cast(value, self.real)

    def literal(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Values of a Literal in the type that the kernel computes in."""
        match array.dtype.kind:
            case "c":
                return array.astype(np.result_type(self.real, np.complex64))
            case "f":
                return array.astype(self.real)
            case "b":
                return array
        return array.astype(INDEX)

    # -- assignments --------------------------------------------------------------------------

    def piece(self, lvalue: gem.Node, expression: gem.Node) -> Piece:
        """What an assignment changes."""
        variable = lvalue if isinstance(lvalue, gem.Variable) else lvalue.children[0]
        if not isinstance(variable, gem.Variable) or variable.name not in self.arguments:
            raise ValueError(f"kernel {self.name}: cannot assign to {lvalue}")
        extra = set(expression.free_indices) - set(lvalue.free_indices)
        if extra:
            raise ValueError(
                f"kernel {self.name}: index {min(extra)} is free in what is assigned to "
                f"{variable.name} but not in the lvalue"
            )
        argument = self.arguments[variable.name]
        self._check_size(variable)
        slot: Expr = Scalar(0, INDEX)
        if lvalue is not variable:
            slot = self._total(self._flat(variable, self._affine(lvalue)))
        elif math.prod(variable.shape) != 1:
            raise ValueError(f"kernel {self.name}: the lvalue {variable.name} is not a scalar")
        value = self.cast(self.translate(expression), argument.dtype)
        return Piece(argument, self.dims(lvalue.free_indices), slot, value)

    def _check_size(self, variable: gem.Variable) -> None:
        argument = self.arguments[variable.name]
        if math.prod(variable.shape) != argument.size:
            raise ValueError(
                f"kernel {self.name}: argument {variable.name} has shape {argument.shape}, "
                f"its Variable {variable.shape}"
            )

    @staticmethod
    def _flat(
        variable: gem.Variable, axes: Sequence[Sequence[tuple[Expr, int]]]
    ) -> list[tuple[Expr, int]]:
        strides = np.cumprod([1, *reversed(variable.shape[1:])])[::-1]
        return [
            (term, factor * int(stride))
            for terms, stride in zip(axes, strides, strict=True)
            for term, factor in terms
        ]

    # -- expressions --------------------------------------------------------------------------

    def translate(self, root: gem.Node) -> Expr:
        """The value of a scalar GEM expression."""
        if root not in self._known:
            for node in post_traversal([root]):
                if not node.shape and node not in self._known:
                    self._known[node] = self._scalar(node)
        return self._known[root]

    def _scalar(self, node: gem.Node) -> Expr:
        operands = [self._known[child] for child in node.children if not child.shape]
        match node:
            case gem.Failure():
                raise UnsupportedLoopError(
                    f"kernel {self.name}: the expression fails: {node.exception}"
                ) from node.exception
            case gem.Zero() if node.dtype is not None and np.dtype(node.dtype).kind in "iu":
                return Scalar(0, INDEX)
            case gem.Zero():
                return Scalar(0, self.real)
            case gem.Literal():
                return self.builder.load(Table(self.literal(node.array)))
            case gem.Variable():
                return self.argument(node, [])
            case gem.Sum() | gem.Product():
                return self.op(_BINARY[type(node)], *self.common(*operands))
            case gem.Division():
                a, b = self.common(*operands)
                return self.op("div", self.to_float(a), self.to_float(b))
            case gem.FloorDiv() | gem.Remainder():
                name = "floordiv" if isinstance(node, gem.FloorDiv) else "rem"
                return self.op(name, *(self.cast(x, INDEX) for x in operands))
            case gem.Power():
                return self._power(*operands)
            case gem.MathFunction():
                return self._function(node.name, operands)
            case gem.MinValue() | gem.MaxValue():
                name = "min" if isinstance(node, gem.MinValue) else "max"
                return self.op(name, *self.common(*map(self.to_real, operands)))
            case gem.Comparison():
                name = _COMPARISONS[node.operator]
                if name not in ("eq", "ne"):
                    # complex numbers have no order: UFL sees to it that these are real
                    operands = [self.op("real", x) if x.dtype.kind == "c" else x for x in operands]
                return self.op(name, *self.common(*operands))
            case gem.LogicalNot():
                return self.op("not", *map(self.truth, operands))
            case gem.LogicalAnd():
                return self.op("and", *map(self.truth, operands))
            case gem.LogicalOr():
                return self.op("or", *map(self.truth, operands))
            case gem.Conditional():
                condition, *branches = operands
                return self.op("select", self.truth(condition), *self.common(*branches))
            case gem.Delta():
                same = self.op("eq", self.index(node.i), self.index(node.j))
                return self.op("select", same, Scalar(1, self.real), Scalar(0, self.real))
            case gem.IndexSum():
                summand = self.to_float(operands[0])
                indices, times = _once(node)
                if times != 1:
                    summand = self.op("mul", Scalar(times, summand.dtype), summand)
                return self.builder.reduce(summand, self.dims(indices))
            case gem.Indexed() | gem.FlexiblyIndexed():
                (tensor,) = node.children
                if isinstance(tensor, gem.Variable):
                    return self.argument(tensor, self._affine(node))
                return self.element(tensor, [self._total(axis) for axis in self._affine(node)])
        raise UnsupportedLoopError(
            f"kernel {self.name}: GEM's {type(node).__name__} is not known here"
        )

    def _power(self, base: Expr, exponent: Expr) -> Expr:
        base, exponent = map(self.to_float, self.common(base, exponent))
        if (
            self.scalar.kind == "c"
            and base.dtype.kind == "f"
            and not (isinstance(exponent, Scalar) and float(exponent.value).is_integer())
        ):
            # the root of a negative number: complex where the kernel's scalars are
            base, exponent = self.cast(base, self.scalar), self.cast(exponent, self.scalar)
        return self.op("pow", base, exponent)

    def _function(self, name: str, operands: Sequence[Expr]) -> Expr:
        if name in _BESSEL:
            order, x = operands
            if not isinstance(order, Scalar) or not float(np.real(order.value)).is_integer():
                raise UnsupportedLoopError(
                    f"kernel {self.name}: {name} of an order that is not an integer constant"
                )
            if x.dtype.kind == "c":
                raise UnsupportedLoopError(f"kernel {self.name}: {name} of a complex number")
            number = Scalar(int(np.real(order.value)), INDEX)
            return self.op(_BESSEL[name], number, self.to_real(x))
        if name == "atan2":
            return self.op("atan2", *self.common(*map(self.to_real, operands)))
        if name not in _FUNCTIONS:
            raise UnsupportedLoopError(f"kernel {self.name}: the function {name} is not known here")
        (x,) = map(self.to_float, operands)
        if name == "erf" and x.dtype.kind == "c":
            raise UnsupportedLoopError(f"kernel {self.name}: erf of a complex number")
        if name == "sqrt" and self.scalar.kind == "c":
            x = self.cast(x, np.result_type(x.dtype, self.scalar))
        if name == "imag" and x.dtype.kind == "f":
            return Scalar(0, x.dtype)
        return self.op(_FUNCTIONS[name], x)

    # -- tensors ------------------------------------------------------------------------------

    def argument(self, variable: gem.Variable, axes: Sequence[Sequence[tuple[Expr, int]]]) -> Expr:
        """An entry of an argument."""
        argument = self.arguments.get(variable.name)
        if argument is None:
            raise ValueError(f"kernel {self.name}: {variable.name} is not an argument")
        self._check_size(variable)
        if argument.shape == variable.shape:
            indices = [self._total(axis) for axis in axes]
        else:
            indices = self._unflatten(argument.shape, self._flat(variable, axes))
        value = self.builder.load(argument, indices)
        return self.cast(value, INDEX) if value.dtype.kind in "iu" else value

    def _unflatten(self, shape: tuple[int, ...], terms: Sequence[tuple[Expr, int]]) -> list[Expr]:
        """Subscripts into ``shape`` of a flat position."""
        strides = [max(math.prod(shape[axis + 1 :]), 1) for axis in range(len(shape))]
        fixed = sum(int(t.value) * factor for t, factor in terms if isinstance(t, Scalar))
        rest = [(t, factor) for t, factor in terms if factor and not isinstance(t, Scalar)]
        indices: list[Expr] = []
        for stride in strides:
            # a term belongs to the first axis whose stride divides its factor
            here = [(t, factor // stride) for t, factor in rest if factor % stride == 0]
            rest = [(t, factor) for t, factor in rest if factor % stride]
            whole, fixed = divmod(fixed, stride)
            indices.append(self._total([*here, (Scalar(whole, INDEX), 1)]))
        ranges = [self.builder.range(index) for index in indices]
        if all(
            low >= 0 and high < extent for (low, high), extent in zip(ranges, shape, strict=True)
        ):
            return indices
        flat = self._total(terms)
        return [
            self.op(
                "rem",
                self.op("floordiv", flat, Scalar(stride, INDEX)),
                Scalar(max(extent, 1), INDEX),
            )
            for stride, extent in zip(strides, shape, strict=True)
        ]

    def element(self, tensor: gem.Node, indices: Sequence[Expr]) -> Expr:
        """An entry of a tensor-valued expression, by index expressions."""
        match tensor:
            case gem.Variable():
                return self.argument(tensor, [[(index, 1)] for index in indices])
            case gem.Literal():
                return self.builder.load(Table(self.literal(tensor.array)), indices)
            case gem.Zero():
                return Scalar(0, self.real)
            case gem.Identity():
                same = self.op("eq", *indices)
                return self.op("select", same, Scalar(1, self.real), Scalar(0, self.real))
            case gem.ListTensor():
                entries = self._common_entries([self.translate(e) for e in tensor.array.flat])
                return self.builder.stack(entries.reshape(tensor.shape), indices)
            case gem.ComponentTensor():
                value = self.translate(tensor.children[0])
                return self.builder.substitute(
                    value,
                    {
                        self.dim(index): chosen
                        for index, chosen in zip(tensor.multiindex, indices, strict=True)
                        if index.extent != 1
                    },
                )
            case gem.Concatenate():
                return self._concatenated(tensor, indices[0])
            case gem.Inverse() | gem.Solve():
                return self._dense(tensor, indices)
            case gem.Failure():
                raise UnsupportedLoopError(
                    f"kernel {self.name}: the expression fails: {tensor.exception}"
                ) from tensor.exception
        raise UnsupportedLoopError(
            f"kernel {self.name}: GEM's {type(tensor).__name__} as a tensor is not known here"
        )

    def _common_entries(self, values: Sequence[Expr]) -> np.ndarray[Any, Any]:
        found = np.empty(len(values), object)
        found[:] = self.common(*values)
        return found

    def _concatenated(self, tensor: gem.Concatenate, position: Expr) -> Expr:
        """An entry of flattened tensors one behind the other."""
        parts: list[tuple[int, Expr]] = []
        start = 0
        for child in tensor.children:
            size = math.prod(child.shape)
            if size:
                local = self.op("sub", position, Scalar(start, INDEX))
                if not isinstance(position, Scalar):
                    local = self.op("max", local, Scalar(0, INDEX))
                    local = self.op("min", local, Scalar(size - 1, INDEX))
                elif not 0 <= int(local.value) < size:  # type: ignore[attr-defined]
                    start += size
                    continue
                where = self._unflatten(child.shape, [(local, 1)]) if child.shape else []
                value = self.element(child, where) if child.shape else self.translate(child)
                parts.append((start + size, value))
            start += size
        values = self.common(*(value for _, value in parts))
        result = values[-1]
        for (end, _), value in reversed(list(zip(parts[:-1], values[:-1], strict=True))):
            inside = self.op("lt", position, Scalar(end, INDEX))
            result = self.op("select", inside, value, result)
        return result

    def _dense(self, tensor: gem.Node, indices: Sequence[Expr]) -> Expr:
        """An entry of an inverse or a solution."""
        fixed = [int(index.value) for index in indices if isinstance(index, Scalar)]
        if tensor.shape[0] <= dense.CLOSED_FORM and len(fixed) == len(indices):
            if tensor not in self._closed:
                self._closed[tensor] = self._closed_form(tensor)
            return self._closed[tensor][tuple(fixed)]
        if tensor not in self._solved:
            self._solved[tensor] = self._eliminated(tensor)
        source, batch = self._solved[tensor]
        return self.builder.load(source, [*map(IndexOf, batch), *indices])

    def _closed_form(self, tensor: gem.Node) -> np.ndarray[Any, Any]:
        """All entries of an inverse or a solution as expressions."""
        values = [
            self.to_float(self.element(child, [Scalar(k, INDEX) for k in alpha]))
            for child in tensor.children
            for alpha in np.ndindex(child.shape)
        ]
        entries = self._common_entries(values)
        n = tensor.children[0].shape[0]
        matrix, rhs = entries[: n * n].reshape(n, n), entries[n * n :]
        if isinstance(tensor, gem.Inverse):
            return dense.inverse_entries(matrix, self.op)
        return dense.solve_entries(matrix, rhs.reshape(tensor.shape), self.op)

    def _eliminated(self, tensor: gem.Node) -> tuple[Source, tuple[Dim, ...]]:
        """The inverse or the solution as a temporary, and the dimensions of its leading axes."""
        builder = self.builder
        own = [
            tuple(
                builder.register(Dim("rcjklm"[axis % 6], n), _LAST)
                for axis, n in enumerate(c.shape)
            )
            for c in tensor.children
        ]
        values = self.common(
            *(
                self.to_float(self.element(child, [IndexOf(dim) for dim in dims]))
                for child, dims in zip(tensor.children, own, strict=True)
            )
        )
        leading = frozenset().union(*map(builder.dims, values)) - {d for dims in own for d in dims}
        batch = builder.order(leading)
        loads = [
            builder.define(value, (*batch, *dims)) for value, dims in zip(values, own, strict=True)
        ]
        sources = [load.source for load in loads if isinstance(load, Load)]
        if len(sources) == 1:
            statements, result = dense.inverse(sources[0], batch)
        else:
            statements, result = dense.solve(sources[0], sources[1], batch)
        builder.emit(statements)
        return result, batch


def _rank_indices(assignments: Sequence[Assignment]) -> dict[gem.Index, int]:
    """Order of the dimensions: sums from the outside inwards, then those of the lvalues."""
    rank: dict[gem.Index, int] = {}
    for node in traversal([expression for _, expression in assignments]):
        if isinstance(node, gem.IndexSum):
            for index in node.multiindex:
                rank.setdefault(index, len(rank) + 1)
    for lvalue, _ in assignments:
        for position, index in enumerate(_index_ordering(lvalue)):
            rank[index] = _LAST // 2 + position
    return rank

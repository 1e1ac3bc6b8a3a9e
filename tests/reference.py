"""Plain numpy evaluators that the code under test is compared with.

:func:`evaluate_kernel` gives the meaning of a :class:`LocalKernel`, :func:`evaluate_gem` that of
GEM expressions (written from GEM's own definitions, sharing nothing with the importer), and
:func:`run_parloop_reference` that of a whole loop, one entity after another. Cells are the leading
axis of every array here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gem
import numpy as np
import scipy.special
from gem.node import post_traversal

from pyop3_mlir.kernels.program import (
    INDEX,
    Dim,
    Expr,
    IndexOf,
    KernelArgument,
    Load,
    LocalKernel,
    Op,
    Scalar,
    Source,
    Table,
    postorder,
)
from pyop3_mlir.parloop import Access, Argument, Kind, Parloop

Array = np.ndarray[Any, Any]

__all__ = [
    "evaluate_assignments",
    "evaluate_gem",
    "evaluate_kernel",
    "gather",
    "run_parloop_reference",
]

# ---------------------------------------------------------------------------------------------
# Scalar functions

_FUNCTIONS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "pow": np.power,
    # floordiv and rem round towards minus infinity, as Python and loopy do
    "floordiv": np.floor_divide, "rem": np.mod,
    "min": np.minimum, "max": np.maximum,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not, "select": np.where,
    "abs": np.abs, "real": np.real, "imag": np.imag, "conj": np.conj, "sqrt": np.sqrt,
    "exp": np.exp, "log": np.log, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "atan2": np.arctan2, "erf": scipy.special.erf,
    "bessel_j": scipy.special.jv, "bessel_y": scipy.special.yv,
    "bessel_i": scipy.special.iv, "bessel_k": scipy.special.kv,
}  # fmt: skip


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iub":
        return np.trunc(a / b).astype(a.dtype)
    return np.divide(a, b)


def _cast(a: Array, dtype: np.dtype[Any]) -> Array:
    if a.dtype.kind == "c" and dtype.kind != "c":
        a = a.real
    return a.astype(dtype)


# ---------------------------------------------------------------------------------------------
# Local kernels


def _evaluate(root: Expr, axes: dict[Dim, int], values: Mapping[Source, Array]) -> Array:
    """Value of ``root`` as an array [cells or 1, *dims or 1]."""
    rank = len(axes) + 1
    known: dict[Expr, Array] = {}
    for node in postorder([root]):
        operands = [known[child] for child in node.children]
        match node:
            case Scalar():
                value = np.asarray(node.value).reshape((1,) * rank)
            case IndexOf():
                shape = [1] * rank
                shape[axes[node.dim]] = node.dim.extent
                value = np.arange(node.dim.extent, dtype=INDEX).reshape(shape)
            case Load():
                if isinstance(node.source, Table):
                    array = node.source.values[None]
                else:
                    array = values[node.source]
                cells = np.arange(array.shape[0]).reshape((-1,) + (1,) * (rank - 1))
                value = array[(cells, *operands)]
            case Op():
                if node.name == "cast":
                    value = _cast(operands[0], node.dtype)
                elif node.name == "div":
                    value = _divide(*operands)
                else:
                    value = np.asarray(_FUNCTIONS[node.name](*operands))
                if node.name.startswith("bessel"):
                    value = value.astype(node.dtype)
            case _:
                raise AssertionError(f"unknown expression {node!r}")
        assert value.dtype == node.dtype, f"{node!r}: {value.dtype} instead of {node.dtype}"
        known[node] = value
    return known[root]


def _solve_systems(
    body: Op, axes: dict[Dim, int], full: tuple[int, ...], values: Mapping[Source, Array]
) -> Array:
    """By LAPACK; the last axis of ``full`` numbers the equations."""
    matrix, side, unknown = body.children
    axis = axes[unknown.dim]
    a, b = (np.broadcast_to(_evaluate(part, axes, values), full) for part in (matrix, side))
    # [..., equation, unknown] and [..., equation]: the right-hand side is of no unknown
    a, b = np.moveaxis(a, axis, -1), b.take(0, axis)
    return np.moveaxis(np.linalg.solve(a, b[..., None])[..., 0], -1, axis)


def evaluate_kernel(kernel: LocalKernel, packs: Sequence[Array]) -> dict[KernelArgument, Array]:
    """Run ``kernel`` on many cells at once.

    Parameters
    ----------
    kernel
        The kernel.
    packs
        One array ``[cells, ...]`` an argument; what follows the first axis is the argument's shape
        or its flat size.

    Returns
    -------
    dict
        For each argument that the kernel changes an array ``[cells, slots]``: the sum of the output
        pieces, zero where there is none.
    """
    kernel.validate()
    cells = packs[0].shape[0] if packs else 1
    values: dict[Source, Array] = {}
    for argument, pack in zip(kernel.arguments, packs, strict=True):
        assert pack.dtype == argument.dtype, argument.name
        values[argument] = np.asarray(pack).reshape((cells, *argument.shape))
    with np.errstate(all="ignore"):
        for statement in kernel.statements:
            dims = statement.dims + statement.reductions
            axes = {dim: axis + 1 for axis, dim in enumerate(dims)}
            full = (cells, *(dim.extent for dim in dims))
            over = tuple(range(1 + len(statement.dims), 1 + len(dims)))
            results = []
            for body in statement.bodies:
                if isinstance(body, Op) and body.name == "solve":
                    results.append(_solve_systems(body, axes, full, values))
                else:
                    value = np.broadcast_to(_evaluate(body, axes, values), full)
                    results.append(value.sum(axis=over) if over else value)
            for result, value in zip(statement.results, results, strict=True):
                values[result] = value.astype(result.dtype)
    changed: dict[KernelArgument, Array] = {}
    for output in kernel.outputs:
        argument = output.argument
        if argument not in changed:
            changed[argument] = np.zeros((cells, argument.size), argument.dtype)
        shape = tuple(dim.extent for dim in output.dims)
        axes = {dim: axis + 1 for axis, dim in enumerate(output.dims)}
        slots = np.broadcast_to(_evaluate(output.slot, axes, {}), (1, *shape)).reshape(-1)
        piece = values[output.value].reshape(cells, -1)
        np.add.at(changed[argument], (slice(None), slots), piece)
    return changed


# ---------------------------------------------------------------------------------------------
# Loops


def _positions(argument: Argument, entities: Array) -> Array:
    """Flat positions [entities, slots] in the buffer; negative where an entry is dropped."""
    stride = argument.stride
    assert stride is not None
    components = np.arange(argument.components) + argument.offset
    if argument.kind is Kind.GLOBAL:
        return np.broadcast_to(components, (len(entities), len(components)))
    rows = entities[:, None] if argument.table is None else argument.table.values[entities]
    rows = rows.astype(np.int64)
    found = rows[:, :, None] * stride + components
    return np.where(rows[:, :, None] < 0, -1, found).reshape(len(entities), -1)


def gather(argument: Argument, entities: Array) -> Array:
    """The packs [entities, slots] of ``argument``, as the kernel finds them."""
    positions = _positions(argument, entities)
    flat = argument.buffer.reshape(-1)
    if not argument.access.gathers or not flat.size:
        return np.zeros(positions.shape, argument.buffer.dtype)
    return np.where(positions < 0, flat.dtype.type(0), flat[np.maximum(positions, 0)])


def run_parloop_reference(parloop: Parloop, start: int = 0, stop: int | None = None) -> None:
    """Run iterations [start, stop) of ``parloop`` one after another, in place.

    ``stop`` defaults to the owned entities.
    """
    iteration_set = parloop.iteration_set
    stop = iteration_set.owned if stop is None else stop
    for iteration in range(start, stop):  # type: ignore[arg-type]
        entity = iteration
        if iteration_set.entities is not None:
            entity = int(iteration_set.entities[iteration])
        entities = np.array([entity])
        packs = [gather(argument, entities) for argument in parloop.arguments]
        changed = evaluate_kernel(parloop.kernel, packs)
        for formal, argument, pack in zip(
            parloop.kernel.arguments, parloop.arguments, packs, strict=True
        ):
            if not argument.access.writes:
                continue
            # what the kernel leaves alone is written back as it was packed
            new = changed.get(formal, pack)[0]
            positions = _positions(argument, entities)[0]
            flat = argument.buffer.reshape(-1)
            for position, value in zip(positions, new, strict=True):
                if position < 0:
                    continue
                match argument.access:
                    case Access.INC:
                        flat[position] += value
                    case Access.MIN:
                        flat[position] = min(flat[position], value)
                    case Access.MAX:
                        flat[position] = max(flat[position], value)
                    case _:
                        flat[position] = value


# ---------------------------------------------------------------------------------------------
# GEM


def _align(value: Array, have: Sequence[gem.Index], want: Sequence[gem.Index]) -> Array:
    """Permute and insert axes after the first so that they belong to the indices ``want``."""
    rank = value.ndim - 1 - len(have)
    order = [have.index(i) for i in want if i in have]
    value = value.transpose(0, *(1 + o for o in order), *range(1 + len(have), value.ndim))
    shape = [i.extent if i in have else 1 for i in want]
    return value.reshape(value.shape[0], *shape, *value.shape[value.ndim - rank :])


_GEM_FUNCTIONS: dict[str, Any] = {
    "abs": np.abs, "real": np.real, "imag": np.imag, "conj": np.conj, "atan2": np.arctan2,
    "sqrt": np.sqrt, "exp": np.exp, "ln": np.log, "cos": np.cos, "sin": np.sin, "tan": np.tan,
    "cosh": np.cosh, "sinh": np.sinh, "tanh": np.tanh, "acos": np.arccos, "asin": np.arcsin,
    "atan": np.arctan, "erf": scipy.special.erf,
    "cyl_bessel_j": scipy.special.jv, "cyl_bessel_y": scipy.special.yv,
    "cyl_bessel_i": scipy.special.iv, "cyl_bessel_k": scipy.special.kv,
}  # fmt: skip

_GEM_OPERATORS: dict[Any, Any] = {
    gem.Sum: np.add, gem.Product: np.multiply, gem.Division: np.divide, gem.Power: np.power,
    gem.FloorDiv: np.floor_divide, gem.Remainder: np.mod,
    gem.MinValue: np.minimum, gem.MaxValue: np.maximum,
    gem.LogicalNot: np.logical_not, gem.LogicalAnd: np.logical_and, gem.LogicalOr: np.logical_or,
    gem.Conditional: np.where,
}  # fmt: skip

_COMPARISONS: dict[str, Any] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


def _solve(a: Array, b: Array) -> Array:
    """Batched solve for any leading axes; nan where a matrix is singular."""
    try:
        return np.linalg.solve(a, b)
    except np.linalg.LinAlgError:
        flat = [
            np.linalg.solve(x, y) if np.linalg.det(x) else np.full_like(y, np.nan)
            for x, y in zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), strict=True)
        ]
        return np.array(flat).reshape(b.shape)


def evaluate_gem(
    expression: gem.Node,
    bindings: Mapping[str, Array],
    free_indices: Sequence[gem.Index] | None = None,
) -> Array:
    """Value of a GEM expression on many cells.

    Parameters
    ----------
    expression
        Any GEM expression.
    bindings
        For each Variable's name an array ``[cells, *shape]``.
    free_indices
        Order of the free indices in the result; the expression's own where not given. Indices that
        are not free in the expression are broadcast.

    Returns
    -------
    ndarray
        ``[cells, *free indices, *shape]``.
    """
    cells = next((len(b) for b in bindings.values()), 1)
    known: dict[gem.Node, Array] = {}

    def index_value(index: Any, out: Sequence[gem.Index]) -> Array:
        """Integer array that broadcasts against [cells, *out]."""
        if isinstance(index, gem.Index):
            shape = [1] * (len(out) + 1)
            shape[1 + out.index(index)] = index.extent
            return np.arange(index.extent).reshape(shape)
        if isinstance(index, gem.VariableIndex):
            index = index.expression
        if isinstance(index, gem.Node):
            if index not in known:  # GEM's traversals do not look into the indices of a Delta
                known[index] = evaluate_gem(index, bindings)
            return _align(known[index], index.free_indices, out).astype(np.int64)
        return np.full((1,) * (len(out) + 1), int(index))

    def take(node: gem.Node, subscripts: Sequence[Array]) -> Array:
        (tensor,) = node.children
        out = node.free_indices
        leading = np.arange(cells).reshape((-1,) + (1,) * len(out))
        bound = [index_value(i, out) for i in tensor.free_indices]
        found = known[tensor][(leading, *bound, *subscripts)]
        return np.broadcast_to(found, (cells, *(i.extent for i in out)))

    def compute(node: gem.Node) -> Array:
        out = node.free_indices
        full = (cells, *(i.extent for i in out), *node.shape)
        # a node that binds an index aligns its child by itself
        operands = [
            _align(known[c], c.free_indices, out)
            for c in node.children
            if not c.shape and set(c.free_indices) <= set(out)
        ]
        match node:
            case gem.Failure():
                raise node.exception
            case gem.Zero():
                return np.zeros(full)
            case gem.Identity() | gem.Literal():
                return np.broadcast_to(node.array, full)
            case gem.Variable():
                return np.asarray(bindings[node.name]).reshape(full)
            case gem.MathFunction():
                return np.asarray(_GEM_FUNCTIONS[node.name](*operands))
            case gem.Comparison():
                return np.asarray(_COMPARISONS[node.operator](*operands))
            case gem.Delta():
                return np.broadcast_to(
                    (index_value(node.i, out) == index_value(node.j, out)).astype(float), full
                )
            case gem.Indexed():
                return take(node, [index_value(i, out) for i in node.multiindex])
            case gem.FlexiblyIndexed():
                subscripts = []
                for offset, pairs in node.dim2idxs:
                    position = index_value(offset, out)
                    for index, stride in pairs:
                        position = position + index_value(index, out) * index_value(stride, out)
                    subscripts.append(position)
                return take(node, subscripts)
            case gem.ComponentTensor():
                return _align(
                    known[node.children[0]],
                    node.children[0].free_indices,
                    (*out, *node.multiindex),
                )
            case gem.IndexSum():
                (summand,) = node.children
                value = _align(known[summand], summand.free_indices, (*out, *node.multiindex))
                return value.sum(axis=tuple(range(1 + len(out), value.ndim)))
            case gem.ListTensor():
                entries = [np.broadcast_to(value, full[: 1 + len(out)]) for value in operands]
                return np.stack(entries, axis=-1).reshape(full)
            case gem.Concatenate():
                parts = [
                    np.broadcast_to(
                        _align(known[c], c.free_indices, out),
                        (*full[: 1 + len(out)], *c.shape),
                    ).reshape(*full[: 1 + len(out)], -1)
                    for c in node.children
                ]
                return np.concatenate(parts, axis=-1)
            case gem.Inverse():
                value = known[node.children[0]]
                return _solve(value, np.broadcast_to(np.eye(value.shape[-1]), value.shape))
            case gem.Solve():
                a, b = (
                    np.broadcast_to(
                        _align(known[c], c.free_indices, out), (*full[: 1 + len(out)], *c.shape)
                    )
                    for c in node.children
                )
                return _solve(
                    a, b.reshape(*full[: 1 + len(out)], b.shape[1 + len(out)], -1)
                ).reshape(full)
            case _:
                return np.asarray(_GEM_OPERATORS[type(node)](*operands))

    with np.errstate(all="ignore"):
        for node in post_traversal([expression]):
            value = compute(node)
            full = (cells, *(i.extent for i in node.free_indices), *node.shape)
            known[node] = np.broadcast_to(value, full)
    value = known[expression]
    if free_indices is not None:
        aligned = _align(value, expression.free_indices, tuple(free_indices))
        value = np.broadcast_to(
            aligned, (cells, *(i.extent for i in free_indices), *expression.shape)
        )
    return value


def evaluate_assignments(
    assignments: Sequence[tuple[gem.Node, gem.Node]], bindings: Mapping[str, Array]
) -> dict[str, Array]:
    """What ``assignments`` (lvalue, expression) add to their variables: arrays [cells, slots]."""
    cells = next((len(b) for b in bindings.values()), 1)
    added: dict[str, Array] = {}
    for lvalue, expression in assignments:
        variable = lvalue if isinstance(lvalue, gem.Variable) else lvalue.children[0]
        size = int(np.prod(variable.shape, dtype=int))
        numbers = np.arange(size).reshape(variable.shape)
        where = dict(bindings)
        where[variable.name] = np.broadcast_to(numbers, (cells, *variable.shape))
        slots = evaluate_gem(lvalue, where)
        values = evaluate_gem(expression, bindings, lvalue.free_indices)
        values = np.broadcast_to(values, slots.shape).reshape(cells, -1)
        if variable.name not in added:
            added[variable.name] = np.zeros((cells, size), values.dtype)
        target = added[variable.name]
        if values.dtype.kind == "c" and target.dtype.kind != "c":
            target = added[variable.name] = target.astype(values.dtype)
        np.add.at(target, (np.arange(cells)[:, None], slots.reshape(cells, -1)), values)
    return added

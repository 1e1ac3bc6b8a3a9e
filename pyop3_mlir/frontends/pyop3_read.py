"""Read pyop3's preprocessed instructions.

What pyop3 hands to its code generator is a tree of loops over axis trees, assignments between
buffers and calls of local kernels. :class:`Reader` walks it as pyop3's code generator does, but
where that one writes code for an index expression, this one evaluates it for all iterations at
once: the result is where each entry of a pack lies in its buffer, with all maps, permutations,
orientations and subsets composed. The outcome is a list of :class:`Unit`, which
:mod:`pyop3_mlir.frontends.pyop3_plan` turns into loops of ours.

pyop3's own meaning of the instructions is in its ``lower/loopy.py`` (later ``compile/``).
"""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.frontends.pyop3_names import Names

__all__ = [
    "Assign",
    "Call",
    "Constant",
    "Insert",
    "Operation",
    "Reader",
    "Ref",
    "Statement",
    "Unit",
    "Value",
]

Array = npt.NDArray[Any]

UNROLL_LIMIT = 256
"""Iterations of an inner loop that may be written out, where it cannot be flattened."""


# ---------------------------------------------------------------------------------------------
# What a loop's body is once its indices are evaluated


@dataclass(frozen=True, eq=False)
class Constant:
    """A number."""

    value: Any


@dataclass(frozen=True, eq=False)
class Ref:
    """Entries of a buffer.

    Attributes
    ----------
    view
        pyop3's ``IndexedBuffer``.
    offsets
        ``[n, entries]``, or ``[1, entries]`` where they do not depend on the iteration: places in
        the flat buffer, negative where there is nothing.
    """

    view: Any
    offsets: Array


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation on values, by the name of pyop3's class."""

    name: str
    operands: tuple[Value, ...]


Value = Constant | Ref | Operation


@dataclass(frozen=True, eq=False)
class Assign:
    """``target = value`` entry by entry; ``kind`` is "write", "inc", "min" or "max"."""

    kind: str
    target: Ref
    value: Value


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a local kernel with whole buffers.

    Attributes
    ----------
    code
        A loopy translation unit.
    name
        Its entry point.
    arguments
        pyop3's ``IndexedBuffer`` and the name of the ``Intent`` for each argument.
    """

    code: Any
    name: str
    arguments: tuple[tuple[Any, str], ...]


@dataclass(frozen=True, eq=False)
class Insert:
    """Values of a temporary go into a PETSc matrix.

    Attributes
    ----------
    view
        The matrix.
    kind
        "write" or "inc".
    rows, cols
        ``[n, k]`` and ``[n, l]``, local numbers of degrees of freedom; negative: dropped.
    source
        The temporary, of which the first k * l entries are meant, by rows.
    """

    view: Any
    kind: str
    rows: Array
    cols: Array
    source: Any


Statement = Assign | Call | Insert


@dataclass(frozen=True, eq=False)
class Unit:
    """Statements that run, one after the other, for each of ``size`` iterations.

    None where there is no iteration.
    """

    size: int
    statements: tuple[Statement, ...]


# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Frame:
    """The loops around a statement, flattened.

    Attributes
    ----------
    size
        Number of iterations.
    values
        By loop and axis the index in each iteration, ``[size]``, or a number.
    mask
        Which iterations take part (of an inner loop that is written out), or None.
    """

    size: int
    values: dict[Any, Any] = field(default_factory=dict)
    mask: Array | None = None


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A path to a leaf in each of some axis trees.

    Attributes
    ----------
    paths
        By tree.
    axes
        By tree: number of the dimension of each axis, None for an axis of one entry.
    extents
        Of all dimensions.
    mask
        Which entries exist, broadcastable to ``[n, *extents]``; None where all do.
    """

    paths: tuple[Any, ...] = ()
    axes: tuple[dict[Any, int | None], ...] = ()
    extents: tuple[int, ...] = ()
    mask: Array | None = None


class Reader:
    """Reads instructions, once.

    Parameters
    ----------
    names
        pyop3's classes.
    propagate
        Whether masked accesses leave their target alone (pyop3's ``mask_array_accesses``).

    Attributes
    ----------
    watched
        Buffers whose contents went into index tables, and their states when they were read.
    """

    def __init__(self, names: Names, *, masked: bool = False) -> None:
        self.names = names
        self.masked = masked
        self.watched: dict[int, tuple[Any, int]] = {}
        n = names
        self._binary: dict[Any, Callable[[Any, Any], Any]] = {
            n.Add: operator.add,
            n.Sub: operator.sub,
            n.Mul: operator.mul,
            n.FloorDiv: operator.floordiv,
            n.Modulo: operator.mod,
            n.Or: np.logical_or,
            n.LessThan: operator.lt,
            n.LessThanOrEqual: operator.le,
            n.GreaterThan: operator.gt,
            n.GreaterThanOrEqual: operator.ge,
        }
        self._operations = {
            *self._binary, n.Div, n.Pow, n.Neg, n.Abs, n.Conditional,
        }  # fmt: skip

    # -----------------------------------------------------------------------------------------
    # instructions

    def read(self, instruction: Any) -> list[Unit]:
        """The instruction as units that run one after the other.

        Raises
        ------
        UnsupportedLoopError
            Where something cannot be read: the message says what.
        """
        n = self.names
        instructions = self._flat([instruction])
        if any(isinstance(i, n.StandaloneCalledFunction) for i in instructions):
            # a kernel that is called once, and what packs its arguments
            frame = _Frame(1)
            return [Unit(1, tuple(s for i in instructions for s in self._statement(i, frame)))]
        units: list[Unit] = []
        for i in instructions:
            if isinstance(i, n.Loop):
                units.append(self._loop(i, _Frame(1)))
            else:
                units += self._elementwise(i)
        return units

    def _flat(self, instructions: Sequence[Any]) -> list[Any]:
        n = self.names
        found: list[Any] = []
        for i in instructions:
            if isinstance(i, n.InstructionList):
                found += self._flat(i.instructions)
            elif not isinstance(i, n.NullInstruction):
                found.append(i)
        return found

    def _loop(self, loop: Any, frame: _Frame) -> Unit:
        frame = self._iterate(loop, frame)
        statements = self._flat(loop.statements)
        if len(statements) == 1 and isinstance(statements[0], self.names.Loop):
            return self._loop(statements[0], frame)
        if not frame.size:
            return Unit(0, ())
        return Unit(frame.size, tuple(s for i in statements for s in self._statement(i, frame)))

    def _loop_leaves(self, loop: Any, frame: _Frame) -> list[_Leaf]:
        return list(self._leaves((loop.index.iterset,), frame))

    def _iterate(self, loop: Any, frame: _Frame) -> _Frame:
        """The frame inside a loop: its iterations, in order, for each iteration around it."""
        leaves = self._loop_leaves(loop, frame)
        if not leaves:
            return replace(frame, size=0)
        if len(leaves) > 1:
            raise UnsupportedLoopError("a loop over several components of an axis at once")
        (leaf,) = leaves
        shape = (frame.size, *leaf.extents)
        if leaf.mask is None:
            at = np.unravel_index(np.arange(int(np.prod(shape))), shape)
        else:
            at = np.nonzero(np.broadcast_to(leaf.mask, shape))
        outer, *inner = at
        values = {
            key: value[outer] if isinstance(value, np.ndarray) else value
            for key, value in frame.values.items()
        }
        for label, dimension in leaf.axes[0].items():
            values[loop.index.id, label] = 0 if dimension is None else inner[dimension]
        return _Frame(len(outer), values)

    def _statement(self, instruction: Any, frame: _Frame) -> Iterator[Statement]:
        n = self.names
        if isinstance(instruction, n.Loop):
            yield from self._written_out(instruction, frame)
        elif isinstance(instruction, n.StandaloneCalledFunction):
            yield self._call(instruction)
        elif isinstance(instruction, n.NonEmptyArrayAssignment):
            yield from self._assignment(instruction, frame)
        else:
            raise UnsupportedLoopError(f"a {type(instruction).__name__} in a loop")

    def _written_out(self, loop: Any, frame: _Frame) -> Iterator[Statement]:
        """An inner loop beside other statements."""
        for leaf in self._loop_leaves(loop, frame):
            if int(np.prod(leaf.extents)) > UNROLL_LIMIT:
                raise UnsupportedLoopError(
                    f"an inner loop of {int(np.prod(leaf.extents))} iterations beside others"
                )
            for point in itertools.product(*map(range, leaf.extents)):
                values = dict(frame.values)
                for label, dimension in leaf.axes[0].items():
                    values[loop.index.id, label] = 0 if dimension is None else point[dimension]
                mask = frame.mask
                if leaf.mask is not None:
                    full = np.broadcast_to(leaf.mask, (frame.size, *leaf.extents))
                    here = full.reshape(frame.size, -1)[
                        :, np.ravel_multi_index(point, leaf.extents)
                    ]
                    mask = here if mask is None else mask & here
                inner = _Frame(frame.size, values, mask)
                for i in self._flat(loop.statements):
                    for statement in self._statement(i, inner):
                        if mask is not None and not mask.all():
                            self._check_masked(statement)
                        yield statement

    def _check_masked(self, statement: Statement) -> None:
        if isinstance(statement, Insert):
            raise UnsupportedLoopError("a matrix in an inner loop of varying length")
        if (
            isinstance(statement, Assign)
            and isinstance(statement.target.view.buffer, self.names.NullBuffer)
            and statement.kind != "write"
        ):
            raise UnsupportedLoopError("an inner loop of varying length that sums up")

    def _call(self, call: Any) -> Call:
        n = self.names
        code = call.function.code
        arguments = []
        for argument, spec in zip(call.arguments, call.argspec, strict=True):
            if not isinstance(argument, n.LinearDatBufferExpression) or argument.layout != 0:
                raise UnsupportedLoopError(
                    f"kernel {call.name}: an argument is a {type(argument).__name__}, which is "
                    "passed through unseen"
                )
            arguments.append((argument.buffer_view, spec.intent.name))
        return Call(code, code.default_entrypoint.name, tuple(arguments))

    def _assignment(self, assignment: Any, frame: _Frame) -> Iterator[Statement]:
        n = self.names
        kind = assignment.assignment_type.value
        if any(isinstance(a, n.MatPetscMatBufferExpression) for a in assignment.arguments):
            yield self._insert(assignment, frame)
            return
        for leaf in self._leaves(assignment.axis_trees, frame):
            if not int(np.prod(leaf.extents)):
                continue
            yield self._assign(assignment, kind, leaf, frame)

    def _assign(self, assignment: Any, kind: str, leaf: _Leaf, frame: _Frame) -> Assign:
        target = self._value(assignment.assignee, leaf, frame)
        value = self._value(assignment.expression, leaf, frame)
        assert isinstance(target, Ref)
        if self.masked:
            # pyop3 skips an entry where any place that it would read or write is negative
            skipped = np.zeros((1, 1), dtype=bool)
            for ref in self.global_refs(value):
                skipped = skipped | (ref.offsets < 0)
            if skipped.any() and not self.is_temporary(target):
                target = Ref(target.view, np.where(skipped, -1, target.offsets))
        return Assign(kind, target, value)

    def is_temporary(self, ref: Ref) -> bool:
        """Whether an access is to a temporary of the loop's body."""
        return isinstance(ref.view.buffer, self.names.NullBuffer)

    def global_refs(self, value: Value) -> Iterator[Ref]:
        """Accesses to data in a value."""
        if isinstance(value, Ref):
            if not self.is_temporary(value):
                yield value
        elif isinstance(value, Operation):
            for operand in value.operands:
                yield from self.global_refs(operand)

    def _elementwise(self, assignment: Any) -> list[Unit]:
        """An assignment outside of loops: each entry is an iteration."""
        n = self.names
        if not isinstance(assignment, n.NonEmptyArrayAssignment):
            raise UnsupportedLoopError(f"a {type(assignment).__name__}")
        frame = _Frame(1)
        units = []
        for statement in self._assignment(assignment, frame):
            if not isinstance(statement, Assign):
                raise UnsupportedLoopError("an assignment to a whole matrix")
            if self.is_temporary(statement.target):
                raise UnsupportedLoopError("a temporary outside of a loop")
            size = statement.target.offsets.shape[1]
            units.append(Unit(size, (_by_entry(statement),)))
        return units

    def _insert(self, assignment: Any, frame: _Frame) -> Insert:
        n = self.names
        mat, source = assignment.assignee, assignment.expression
        if not isinstance(mat, n.MatPetscMatBufferExpression):
            raise UnsupportedLoopError("reads entries of a matrix")
        if frame.mask is not None:
            raise UnsupportedLoopError("a matrix in an inner loop of varying length")
        if not isinstance(getattr(source, "buffer_view", None), n.IndexedBuffer):
            raise UnsupportedLoopError("a matrix that is assigned an expression")
        sides = []
        empty: Any = _path()
        for layout, tree in zip(
            (mat.row_layout, mat.column_layout), assignment.axis_trees, strict=True
        ):
            count = self._extent(tree.size, frame, _Leaf(axes=({},)))
            if count.size and count.min() != count.max():
                raise UnsupportedLoopError("element matrices of varying size")
            size = int(count.max()) if count.size else 0
            start = self._offsets(layout.layouts[empty], _Leaf(axes=({},)), 0, frame)
            places = start + np.arange(size)
            dofs = self._lookup(layout.buffer_view, places)
            sides.append(np.ascontiguousarray(np.broadcast_to(dofs, (frame.size, size))))
        rows, cols = sides
        return Insert(
            mat.buffer_view, assignment.assignment_type.value, rows, cols, source.buffer_view
        )

    # -----------------------------------------------------------------------------------------
    # axis trees

    def _leaves(
        self,
        trees: tuple[Any, ...],
        frame: _Frame,
        leaf: _Leaf = _Leaf(),
        path: Any = None,
    ) -> Iterator[_Leaf]:
        """Every leaf of the product of some axis trees, as pyop3's nested loops reach them."""
        if path is None:
            if not trees:
                yield leaf
                return
            path = _path()
            leaf = replace(leaf, paths=(*leaf.paths, path), axes=(*leaf.axes, {}))
            tree = trees[0]
            if tree is self.names.UNIT_AXIS_TREE or tree.is_empty:
                yield from self._leaves(trees[1:], frame, leaf)
                return
            if isinstance(tree, self.names.IndexedAxisTree):
                raise UnsupportedLoopError("an assignment whose shape is an indexed axis tree")
        tree = trees[0]
        axis = tree.node_map[path]
        for component in axis.components:
            below = path | {axis.label: component.label}
            size = self._extent(component.size, frame, leaf)
            extent = int(size.max()) if size.size else 0
            if not extent:
                continue
            axes = dict(leaf.axes[-1])
            extents, mask = leaf.extents, leaf.mask
            if isinstance(component.size, numbers.Integral) and extent == 1:
                axes[axis.label] = None
            else:
                axes[axis.label] = len(extents)
                extents = (*extents, extent)
                if mask is not None:
                    mask = mask[..., None]
                if size.min() != extent:
                    size = size.reshape(size.shape + (1,) * (len(extents) + 1 - size.ndim))
                    there = np.arange(extent) < size
                    mask = there if mask is None else mask & there
            inner = _Leaf((*leaf.paths[:-1], below), (*leaf.axes[:-1], axes), extents, mask)
            if tree.node_map.get(below):
                yield from self._leaves(trees, frame, inner, below)
            else:
                yield from self._leaves(trees[1:], frame, inner)

    def _extent(self, size: Any, frame: _Frame, leaf: _Leaf) -> Array:
        """The size of a component, broadcastable to ``[n, *extents]`` of what is around it."""
        if isinstance(size, numbers.Integral):
            return np.asarray(int(size)).reshape((1,) * (len(leaf.extents) + 1))
        found = np.asarray(self._evaluate(size, leaf, len(leaf.axes) - 1, frame))
        return found.reshape((1,) * (len(leaf.extents) + 1 - found.ndim) + found.shape)

    # -----------------------------------------------------------------------------------------
    # values

    def _value(self, expression: Any, leaf: _Leaf, frame: _Frame) -> Value:
        n = self.names
        if isinstance(expression, numbers.Number):
            return Constant(expression)
        match expression:
            case n.NaN():
                return Constant(float("nan"))
            case n.ScalarBufferExpression():
                return self._ref(expression.buffer_view, np.zeros((1, 1), np.int64), leaf, frame)
            case n.LinearDatBufferExpression():
                offsets = self._offsets(expression.layout, leaf, 0, frame)
                return self._ref(expression.buffer_view, offsets, leaf, frame)
            case n.NonlinearDatBufferExpression():
                offsets = self._offsets(expression.layouts[leaf.paths[0]], leaf, 0, frame)
                return self._ref(expression.buffer_view, offsets, leaf, frame)
            case n.MatArrayBufferExpression():
                return self._matrix_ref(expression, leaf, frame)
        if type(expression) in self._operations:
            operands = tuple(self._value(o, leaf, frame) for o in expression.operands)
            return Operation(type(expression).__name__, operands)
        raise UnsupportedLoopError(f"a value that is a {type(expression).__name__}")

    def _matrix_ref(self, expression: Any, leaf: _Leaf, frame: _Frame) -> Ref:
        view = expression.buffer_view
        buffer = view.buffer
        if isinstance(buffer, self.names.PetscMatBuffer):
            buffer = view.denested.getPythonContext().buffer
        rows = self._offsets(expression.row_layouts[leaf.paths[0]], leaf, 0, frame)
        cols = self._offsets(expression.column_layouts[leaf.paths[1]], leaf, 1, frame)
        if len(buffer.shape) != 2:
            raise UnsupportedLoopError(f"a matrix in a buffer of shape {buffer.shape}")
        offsets = np.where((rows < 0) | (cols < 0), -1, rows * buffer.shape[1] + cols)
        return self._ref(view, offsets, leaf, frame)

    def _ref(self, view: Any, offsets: Array, leaf: _Leaf, frame: _Frame) -> Ref:
        ref = Ref(view, offsets)
        if self.is_temporary(ref):
            return ref
        for mask in (leaf.mask, frame.mask):
            if mask is None:
                continue
            if mask is leaf.mask:
                full = np.broadcast_to(mask, (mask.shape[0], *leaf.extents))
                mask = full.reshape(len(full), -1)
            else:
                mask = mask[:, None]
            offsets = np.where(mask, offsets, -1)
        return Ref(view, offsets)

    def _offsets(self, layout: Any, leaf: _Leaf, tree: int, frame: _Frame) -> Array:
        """Values of an index expression, ``[n or 1, entries]``."""
        found = np.asarray(self._evaluate(layout, leaf, tree, frame), dtype=np.int64)
        found = found.reshape((1,) * (len(leaf.extents) + 1 - found.ndim) + found.shape)
        shape = (found.shape[0], *leaf.extents)
        return np.broadcast_to(found, shape).reshape(shape[0], int(np.prod(leaf.extents)))

    def _evaluate(self, expression: Any, leaf: _Leaf, tree: int, frame: _Frame) -> Any:
        """An index expression over all iterations and entries at once.

        Broadcastable to ``[n, *extents]``.
        """
        n = self.names
        if isinstance(expression, numbers.Number):
            return expression
        match expression:
            case n.AxisVar():
                dimension = leaf.axes[tree][expression.axis.label]
                if dimension is None:
                    return 0
                after = len(leaf.extents) - dimension - 1
                return np.arange(leaf.extents[dimension]).reshape((-1,) + (1,) * after)
            case n.LoopIndexVar():
                value = frame.values[expression.loop_index.id, expression.axis.label]
                if isinstance(value, np.ndarray):
                    return value.reshape((-1,) + (1,) * len(leaf.extents))
                return value
            case n.ScalarBufferExpression():
                return self._lookup(expression.buffer_view, 0)
            case n.LinearDatBufferExpression():
                at = self._evaluate(expression.layout, leaf, tree, frame)
                return self._lookup(expression.buffer_view, at)
            case n.Neg():
                return -self._evaluate(expression.a, leaf, tree, frame)
            case n.Conditional():
                return np.where(
                    *(self._evaluate(o, leaf, tree, frame) for o in expression.operands)
                )
        function = self._binary.get(type(expression))
        if function is None:
            raise UnsupportedLoopError(f"an index that is a {type(expression).__name__}")
        a, b = (self._evaluate(o, leaf, tree, frame) for o in expression.operands)
        return function(a, b)

    def _lookup(self, view: Any, at: Any) -> Any:
        """Entries of a buffer of indices; -1 where there are none."""
        buffer = view.buffer
        if isinstance(buffer, self.names.NullBuffer):
            raise UnsupportedLoopError("an index that the loop itself computes")
        values = view.handle.reshape(-1)
        if id(buffer) not in self.watched:
            self.watched[id(buffer)] = (buffer, buffer.state)
        if not values.size:
            return np.full(np.shape(at), -1)
        if np.ndim(at) == 0:
            return values[at] if at >= 0 else -1
        # beyond the end: entries of ragged axes that are masked later
        found = np.take(values, at, mode="clip")
        negative = at < 0
        if negative.any():
            found = np.where(negative, -1, found)
        return found


def _path() -> Any:
    from immutabledict import immutabledict

    return immutabledict()


def _by_entry(statement: Assign) -> Assign:
    """Entries become iterations."""
    size = statement.target.offsets.shape[1]

    def turned(value: Value) -> Value:
        match value:
            case Ref():
                offsets = value.offsets
                if offsets.shape[1] == 1 and size > 1:
                    return Ref(value.view, offsets.reshape(1, 1))
                return Ref(value.view, np.ascontiguousarray(offsets.reshape(-1, 1)))
            case Operation():
                return Operation(value.name, tuple(turned(o) for o in value.operands))
        return value

    target = turned(statement.target)
    assert isinstance(target, Ref)
    return Assign(statement.kind, target, turned(statement.value))

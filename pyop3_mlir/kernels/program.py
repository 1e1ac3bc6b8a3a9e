"""The batched tensor program: what a local kernel is once it has been imported.

A :class:`LocalKernel` describes the work of *one* cell. Lowering adds the cell as the innermost
dimension of every value. The program is purely functional: a list of :class:`Compute` statements,
each of which defines whole tensors and corresponds to one ``linalg.generic``::

    result[dims] = sum over reductions of body[dims, reductions]

and a list of :class:`Output` pieces which say what goes from there into an argument of the kernel.
The importers (``kernels.gem``, ``kernels.loopy``) build it; ``lowering.build`` reads it.

Expressions are interned: two structurally equal expressions are the same object, so a common
subexpression is one node of a graph and is emitted once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast
from weakref import WeakValueDictionary

import numpy as np

__all__ = [
    "INDEX",
    "OPERATIONS",
    "Compute",
    "Dim",
    "Expr",
    "IndexOf",
    "KernelArgument",
    "Load",
    "LocalKernel",
    "Op",
    "Output",
    "Scalar",
    "Source",
    "System",
    "Table",
    "Temporary",
    "is_system",
    "postorder",
    "rebuild",
]

INDEX = np.dtype(np.int64)
"""The dtype of index expressions (MLIR's ``index``)."""

OPERATIONS: dict[str, int] = {
    # arithmetic
    "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "pow": 2, "floordiv": 2, "rem": 2,
    "min": 2, "max": 2,
    # comparisons and logic; the result is bool
    "lt": 2, "le": 2, "gt": 2, "ge": 2, "eq": 2, "ne": 2, "and": 2, "or": 2, "not": 1,
    # select(condition, if true, if false): the branch not taken may hold NaN
    "select": 3,
    "cast": 1,
    # functions
    "abs": 1, "real": 1, "imag": 1, "conj": 1, "sqrt": 1, "exp": 1, "log": 1,
    "sin": 1, "cos": 1, "tan": 1, "sinh": 1, "cosh": 1, "tanh": 1,
    "asin": 1, "acos": 1, "atan": 1, "atan2": 2, "erf": 1,
    # bessel_x(order, argument); the order is a Scalar of integer dtype
    "bessel_j": 2, "bessel_y": 2, "bessel_i": 2, "bessel_k": 2,
    # the whole body of a statement, see Compute
    "solve": 3,
}  # fmt: skip
"""Names of the scalar operations and their number of operands."""


@dataclass(frozen=True, eq=False)
class Dim:
    """A loop dimension of a statement. Compared by identity.

    Attributes
    ----------
    name
        For printing only.
    extent
        Number of iterations, at least 0.
    """

    name: str
    extent: int


@dataclass(frozen=True, eq=False)
class Source:
    """What can be loaded from: an argument, a table or a temporary. Compared by identity."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of scalars of one cell."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class KernelArgument(Source):
    """An argument of the local kernel: what the pack of one cell looks like.

    The flat (row-major) position in ``shape`` is the slot of the pack. ``dtype`` may be a float,
    complex or integer (``int32``, ``uint32``, ``int64``) type.
    """


@dataclass(frozen=True, eq=False)
class Temporary(Source):
    """A tensor defined by exactly one :class:`Compute`."""


class Table(Source):
    """A constant tensor, interned by content.

    Parameters
    ----------
    values
        Any shape; a float, complex, integer or bool dtype.
    """

    values: np.ndarray[Any, Any]
    _interned: ClassVar[WeakValueDictionary[tuple[Any, ...], Table]] = WeakValueDictionary()

    def __new__(cls, values: np.ndarray[Any, Any]) -> Table:
        values = np.ascontiguousarray(values).reshape(np.shape(values))
        key = (values.shape, values.dtype.str, values.tobytes())
        self = cls._interned.get(key)
        if self is None:
            self = super().__new__(cls)
            digest = hashlib.sha256(repr(key[:2]).encode() + key[2]).hexdigest()[:12]
            values.flags.writeable = False
            object.__setattr__(self, "name", f"table_{digest}")
            object.__setattr__(self, "shape", values.shape)
            object.__setattr__(self, "dtype", values.dtype)
            object.__setattr__(self, "values", values)
            cls._interned[key] = self
        return self

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        """Everything is set by ``__new__``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Table, (np.array(self.values),))


class Expr:
    """A scalar expression over dimensions, interned.

    Attributes
    ----------
    dtype
        ``INDEX`` for index expressions, ``bool`` for conditions, else the type of the value.
    children
        Operand expressions.
    """

    __slots__ = ("__weakref__", "children", "dtype")
    children: tuple[Expr, ...]
    dtype: np.dtype[Any]

    _interned: ClassVar[WeakValueDictionary[tuple[Any, ...], Expr]] = WeakValueDictionary()

    @classmethod
    def _intern(cls, key: tuple[Any, ...], **fields: Any) -> Self:
        found = Expr._interned.get((cls, *key))
        if found is not None:
            return cast(Self, found)
        self = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        Expr._interned[(cls, *key)] = self
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")


class Scalar(Expr):
    """A constant.

    Parameters
    ----------
    value
        A Python or numpy number; NaN is allowed (an unreachable branch).
    dtype
        Taken from the value where not given (``int`` becomes ``INDEX``).
    """

    __slots__ = ("value",)
    value: Any

    def __new__(cls, value: Any, dtype: Any = None) -> Scalar:
        kind = np.dtype(dtype) if dtype is not None else np.asarray(value).dtype
        typed = kind.type(value)
        # the bytes tell 0.0 from -0.0 and make NaN equal to itself
        return cls._intern((kind.str, typed.tobytes()), value=typed, dtype=kind, children=())

    def __reduce__(self) -> tuple[Any, ...]:
        return (Scalar, (self.value, self.dtype))

    def __repr__(self) -> str:
        return f"{self.value}"


class IndexOf(Expr):
    """The current value of a dimension, an index expression."""

    __slots__ = ("dim",)
    dim: Dim

    def __new__(cls, dim: Dim) -> IndexOf:
        return cls._intern((dim,), dim=dim, dtype=INDEX, children=())

    def __reduce__(self) -> tuple[Any, ...]:
        return (IndexOf, (self.dim,))

    def __repr__(self) -> str:
        return self.dim.name


class Load(Expr):
    """One entry of a source.

    Parameters
    ----------
    source
        Argument, table or temporary.
    indices
        One index expression (dtype ``INDEX``) an axis. They may depend on dimensions and on data
        (a facet number); a data dependent index is the importer's duty to keep in bounds.
    """

    __slots__ = ("source",)
    source: Source

    def __new__(cls, source: Source, indices: Sequence[Expr] = ()) -> Load:
        indices = tuple(indices)
        if len(indices) != len(source.shape):
            raise ValueError(
                f"{source.name} has {len(source.shape)} axes but {len(indices)} indices were given"
            )
        for axis, (index, extent) in enumerate(zip(indices, source.shape, strict=True)):
            if index.dtype != INDEX:
                raise ValueError(f"index {axis} of {source.name} has dtype {index.dtype}")
            if isinstance(index, Scalar) and not 0 <= int(index.value) < extent:
                raise ValueError(
                    f"index {axis} of {source.name} is {index.value}, its extent {extent}"
                )
        return cls._intern((source, indices), source=source, children=indices, dtype=source.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Load, (self.source, self.children))

    def __repr__(self) -> str:
        return _abbreviated(self)


class Op(Expr):
    """A scalar operation; ``name`` is one of :data:`OPERATIONS`.

    Operands have the dtype that the operation works in: importers insert casts. ``dtype`` is the
    dtype of the result; where it is not given it is that of the last operand, except that
    comparisons and logic give bool and ``abs``, ``real`` and ``imag`` of a complex give a real.
    """

    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str, *children: Expr, dtype: Any = None) -> Op:
        if OPERATIONS.get(name) != len(children):
            raise ValueError(f"no operation {name!r} with {len(children)} operands")
        kind: np.dtype[Any]
        if name in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"):
            kind = np.dtype(bool)
        elif dtype is not None:
            kind = np.dtype(dtype)
        else:
            kind = children[-1].dtype
            if name in ("abs", "real", "imag") and kind.kind == "c":
                kind = np.dtype(np.float32 if kind.itemsize == 8 else np.float64)
        return cls._intern((name, children, kind.str), name=name, children=children, dtype=kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_make_op, (self.name, self.children, self.dtype))

    def __repr__(self) -> str:
        return _abbreviated(self)


def _make_op(name: str, children: tuple[Expr, ...], dtype: np.dtype[Any]) -> Op:
    return Op(name, *children, dtype=dtype)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "rem": "%",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip


def _notation(node: Expr, operands: Sequence[str]) -> str:
    """How an expression is written, given how its operands are."""
    match node:
        case Load():
            return f"{node.source.name}[{', '.join(operands)}]"
        case Op(name="cast"):
            return f"{node.dtype}({operands[0]})"
        case Op() if node.name in _INFIX:
            return f"({operands[0]} {_INFIX[node.name]} {operands[1]})"
        case Op():
            return f"{node.name}({', '.join(operands)})"
    return repr(node)


def _abbreviated(node: Expr, depth: int = 5) -> str:
    """The expression down to a depth: shared graphs are exponentially large when written out."""
    if node.children and not depth:
        return "..."
    return _notation(node, [_abbreviated(child, depth - 1) for child in node.children])


def _written(roots: Sequence[Expr]) -> tuple[list[str], list[str]]:
    """Lines that name what ``roots`` use more than once, and ``roots`` in terms of these names."""
    uses: dict[Expr, int] = {}
    for node in postorder(roots):
        for child in node.children:
            uses[child] = uses.get(child, 0) + 1
    text: dict[Expr, str] = {}
    lines: list[str] = []
    for node in postorder(roots):
        written = _notation(node, [text[child] for child in node.children])
        if isinstance(node, Op) and (uses.get(node, 0) > 1 or len(written) > 100):
            name = f"%{len(lines)}"
            lines.append(f"{name} = {written}")
            written = name
        text[node] = written
    return lines, [text[root] for root in roots]


def postorder(roots: Iterable[Expr]) -> Iterator[Expr]:
    """Every expression below ``roots`` once, operands before users. Iterative: graphs are deep."""
    seen: set[Expr] = set()
    for root in roots:
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            node, expanded = stack.pop()
            if node in seen:
                continue
            if expanded or not node.children:
                seen.add(node)
                yield node
            else:
                stack.append((node, True))
                stack += [(child, False) for child in reversed(node.children) if child not in seen]


def rebuild(root: Expr, replaced: Mapping[Expr, Expr]) -> Expr:
    """The expression with others in place of some of its parts."""
    known: dict[Expr, Expr] = {}
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if node in known:
            continue
        if node in replaced:
            known[node] = replaced[node]
        elif not node.children:
            known[node] = node
        elif not done:
            stack.append((node, True))
            stack += [(child, False) for child in node.children if child not in known]
        else:
            children = tuple([known[child] for child in node.children])
            if children == node.children:
                known[node] = node
            elif isinstance(node, Load):
                known[node] = Load(node.source, children)
            else:
                assert isinstance(node, Op)
                known[node] = Op(node.name, *children, dtype=node.dtype)
    return known[root]


@dataclass(frozen=True, eq=False)
class Compute:
    """``results[k][dims] = sum over reductions of bodies[k]``, for all k in one loop nest.

    A body ``solve(a, b, u)``, with one reduction e and one dimension u of the same extent, is no
    summand: the result is what solves the systems ``sum over u of a result = b`` of equations e. In
    ``a`` are no dimensions but e, u and those that number the systems.

    Attributes
    ----------
    results
        Temporaries whose shape is the extents of ``dims``, in that order.
    dims
        Parallel dimensions.
    reductions
        Dimensions that are summed over; empty for a pointwise statement.
    bodies
        One expression a result; its dimensions are among ``dims`` and ``reductions``.
    """

    results: tuple[Temporary, ...]
    dims: tuple[Dim, ...]
    reductions: tuple[Dim, ...]
    bodies: tuple[Expr, ...]

    def separated(self) -> tuple[dict[Temporary, System], Compute]:
        """The systems that bodies stand for, by result, and the statement of the other bodies."""
        systems: dict[Temporary, System] = {}
        others: dict[Temporary, Expr] = {}
        for result, body in zip(self.results, self.bodies, strict=True):
            if is_system(body):
                systems[result] = System.of(self, body)
            else:
                others[result] = body
        if not systems:
            return systems, self
        return systems, replace(self, results=tuple(others), bodies=tuple(others.values()))


def is_system(body: Expr) -> bool:
    """Whether the body of a statement is no summand but stands for systems of equations."""
    return isinstance(body, Op) and body.name == "solve"


@dataclass(frozen=True)
class System:
    """What a body ``solve(a, b, u)`` of a statement says.

    Attributes
    ----------
    batch
        Dimensions that number the systems.
    equation, unknown
        Dimensions of their matrices, of the same extent.
    columns
        Dimensions that number the right-hand sides.
    matrix, side
        Entries of the matrix, over ``(*batch, equation, unknown)``, and of the right-hand sides,
        over ``(*batch, equation, *columns)``.
    """

    batch: tuple[Dim, ...]
    equation: Dim
    unknown: Dim
    columns: tuple[Dim, ...]
    matrix: Expr
    side: Expr

    @classmethod
    def of(cls, statement: Compute, body: Expr) -> Self:
        """The system that one of a statement's bodies stands for."""
        matrix, side, index = body.children
        assert isinstance(index, IndexOf)
        (equation,) = statement.reductions
        own = {node.dim for node in postorder([matrix]) if isinstance(node, IndexOf)}
        others = [dim for dim in statement.dims if dim is not index.dim]
        batch = tuple(dim for dim in others if dim in own)
        columns = tuple(dim for dim in others if dim not in own)
        return cls(batch, equation, index.dim, columns, matrix, side)

    def count_flops(self) -> int:
        """Operations of an elimination, and of putting in the right-hand sides."""
        n = self.equation.extent
        columns = math.prod(dim.extent for dim in self.columns)
        return math.prod(dim.extent for dim in self.batch) * (2 * n**3 // 3 + 2 * n**2 * columns)


@dataclass(frozen=True, eq=False)
class Output:
    """A piece of an argument's new value.

    For an argument of access INC the pieces are added up, entries without a piece get nothing. For
    every other access there is exactly one piece and it covers each slot of the argument once.

    Attributes
    ----------
    argument
        The argument that receives it.
    dims
        The dimensions of the piece.
    slot
        Index expression over ``dims`` (no data): the flat slot in the argument's pack.
    value
        A temporary with the shape of ``dims``.
    """

    argument: KernelArgument
    dims: tuple[Dim, ...]
    slot: Expr
    value: Temporary


@dataclass(frozen=True, eq=False)
class LocalKernel:
    """A local kernel as a batched tensor program.

    Attributes
    ----------
    name
        For messages and symbol names.
    arguments
        In the order of the loop's arguments.
    statements
        In an order in which every temporary is defined before it is used.
    outputs
        What the kernel changes.
    flops
        Floating point operations of one cell, estimated by the importer's source where it knows
        (for TSFC: its own count), else by :meth:`count_flops`.
    """

    name: str
    arguments: tuple[KernelArgument, ...]
    statements: tuple[Compute, ...]
    outputs: tuple[Output, ...]

    @classmethod
    def pointwise(
        cls, name: str, arguments: Sequence[KernelArgument], body: Callable[[Expr], Expr]
    ) -> Self:
        """A kernel that gives its first argument, of one axis, a value entry by entry.

        Parameters
        ----------
        name, arguments
            Of the kernel.
        body
            Called with the index of an entry; returns the value.
        """
        target = arguments[0]
        (extent,) = target.shape
        index = IndexOf(dim := Dim("i", extent))
        value = Temporary("value", target.shape, target.dtype)
        statement = Compute((value,), (dim,), (), (body(index),))
        return cls(name, tuple(arguments), (statement,), (Output(target, (dim,), index, value),))

    def count_flops(self) -> int:
        """Floating point operations of one cell: every non-index Op once an iteration."""
        total = 0
        for statement in self.statements:
            systems, statement = statement.separated()
            total += sum(system.count_flops() for system in systems.values())
            points = math.prod(d.extent for d in statement.dims + statement.reductions)
            ops = sum(
                1
                for node in postorder(statement.bodies)
                if isinstance(node, Op)
                and node.dtype.kind in "fc"
                and node.name not in ("cast", "select", "real", "imag", "conj")
            )
            if statement.reductions:
                ops += len(statement.results)
            total += points * ops
        return total

    def validate(self) -> None:
        """Raise ``ValueError`` where the program is not well formed."""
        defined: set[Source] = set(self.arguments)
        for statement in self.statements:
            allowed = set(statement.dims) | set(statement.reductions)
            shape = tuple(d.extent for d in statement.dims)
            if len(statement.results) != len(statement.bodies):
                raise ValueError(f"kernel {self.name}: results and bodies differ in number")
            for node in postorder(statement.bodies):
                if any(map(is_system, node.children)) or (
                    is_system(node) and len(statement.reductions) != 1
                ):
                    raise ValueError(f"kernel {self.name}: a system is not a statement's body")
                if isinstance(node, IndexOf) and node.dim not in allowed:
                    raise ValueError(f"kernel {self.name}: dimension {node.dim.name} is not bound")
                if (
                    isinstance(node, Load)
                    and not isinstance(node.source, Table)
                    and node.source not in defined
                ):
                    raise ValueError(
                        f"kernel {self.name}: {node.source.name} is used before it is defined"
                    )
            for result, body in zip(statement.results, statement.bodies, strict=True):
                if result.shape != shape or result.dtype != body.dtype:
                    raise ValueError(f"kernel {self.name}: {result.name} has the wrong type")
                if result in defined:
                    raise ValueError(f"kernel {self.name}: {result.name} is defined twice")
                defined.add(result)
        for output in self.outputs:
            if output.argument not in self.arguments or output.value not in defined:
                raise ValueError(f"kernel {self.name}: an output is not defined")

    def fingerprint(self) -> str:
        """Hexadecimal digest of the program's meaning; equal for equal programs built twice.

        Names of dimensions, temporaries and the kernel itself do not enter, those of operations do.
        """
        known: str | None = self.__dict__.get("_fingerprint")
        if known is None:
            known = self._find_fingerprint()
            object.__setattr__(self, "_fingerprint", known)
        return known

    def _find_fingerprint(self) -> str:
        ids: dict[Any, int] = {}
        digest = hashlib.sha256()

        def number(thing: Any) -> int:
            return ids.setdefault(thing, len(ids))

        def note(*parts: Any) -> None:
            digest.update(repr(parts).encode())

        for argument in self.arguments:
            note("argument", number(argument), argument.shape, argument.dtype.str)

        def expression(root: Expr) -> int:
            for node in postorder([root]):
                if node in ids:
                    continue
                children = [ids[child] for child in node.children]
                match node:
                    case Scalar():
                        note("scalar", node.dtype.str, node.value.tobytes())
                    case IndexOf():
                        note("dim", number(node.dim), node.dim.extent)
                    case Load():
                        name = (
                            node.source.name
                            if isinstance(node.source, Table)
                            else number(node.source)
                        )
                        note("load", name, children)
                    case Op():
                        note("op", node.name, node.dtype.str, children)
                number(node)
            return ids[root]

        for statement in self.statements:
            for dim in statement.dims + statement.reductions:
                note("dim", number(dim), dim.extent)
            bodies = [expression(body) for body in statement.bodies]
            note(
                "compute",
                [(number(r), r.dtype.str) for r in statement.results],
                [number(d) for d in statement.dims],
                [number(d) for d in statement.reductions],
                bodies,
            )
        for output in self.outputs:
            dims = [number(d) for d in output.dims]
            slot = expression(output.slot)
            note("output", number(output.argument), dims, slot, number(output.value))
        return digest.hexdigest()

    def __str__(self) -> str:
        """The program in a notation close to Einstein's, for ``explain``.

        What a statement uses several times is written once, as a numbered line above it.
        """
        lines = [f"kernel {self.name}"]
        lines += [f"  argument {a.name}: {a.dtype}{list(a.shape)}" for a in self.arguments]
        for statement in self.statements:
            dims = ", ".join(f"{d.name}<{d.extent}" for d in statement.dims)
            over = ", ".join(f"{d.name}<{d.extent}" for d in statement.reductions)
            shared, bodies = _written(statement.bodies)
            lines.append(f"  for [{dims}]" + (f" sum over [{over}]" if over else ""))
            lines += [f"    {line}" for line in shared]
            own = ", ".join(d.name for d in statement.dims)
            sign = "+=" if over else "="
            for result, body in zip(statement.results, bodies, strict=True):
                lines.append(f"    {result.name}[{own}] {sign} {body}")
        for output in self.outputs:
            own = ", ".join(d.name for d in output.dims)
            lines.append(f"  {output.argument.name}[{output.slot!r}] <- {output.value.name}[{own}]")
        return "\n".join(lines)

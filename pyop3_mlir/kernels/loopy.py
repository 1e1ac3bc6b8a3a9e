"""Import local kernels written in loopy.

A loopy kernel is a list of instructions under loops, with temporaries that are overwritten again
and again. What is wanted is a functional program over whole tensors. The kernel is therefore
*executed symbolically*: the value of each array is a chain of updates, an update being a set of
subscripts over dimensions and the expression stored there. A loop is executed once, for a generic
iteration, and what its body did to each array is then widened to all iterations:

* subscripts that differ from one iteration to the next: the update gains a dimension;
* ``A[s] = A[s] + e`` with the same ``s`` in each iteration: a sum over the loop;
* anything else that each iteration overwrites before it reads it: the last iteration's value.

What an iteration reads from an earlier one makes the loop sequential; such a loop is executed
iteration by iteration instead. All of this is decided by enumerating the subscripts, so nothing is
assumed about their form as long as they depend on loops and constants only.

Scalar expansion of temporaries, and the recovery of sums from initialise and accumulate loops, fall
out of it.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels.algebra import Algebra
from pyop3_mlir.kernels.assemble import Builder, Piece
from pyop3_mlir.kernels.loopy_tree import Instruction, Loop, extents_of, tree_of
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
    Temporary,
    is_system,
    postorder,
)
from pyop3_mlir.kernels.separation import Separation

__all__ = ["UNROLL_LIMIT", "Intent", "Part", "import_loopy", "import_once"]

UNROLL_LIMIT = 50_000
"""Instructions that may be executed symbolically before a kernel counts as too large to unroll."""


class Intent(enum.Enum):
    """What a kernel does to an argument, and what it finds there.

    READ arguments are only read (a kernel that overwrites one changes its own copy). INC arguments
    start at zero and are added to the target. WRITE arguments start at zero, UPDATE arguments with
    the gathered values; both replace the target.
    """

    READ = "READ"
    INC = "INC"
    WRITE = "WRITE"
    UPDATE = "UPDATE"


@dataclass(frozen=True)
class Part:
    """A box of an argument that becomes an argument of its own (one field of a mixed space).

    Attributes
    ----------
    start
        First entry, in the shape that the whole is divided in.
    shape
        Extents of the box.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]


def import_loopy(
    translation_unit: Any,
    name: str,
    intents: Sequence[Intent],
    *,
    kernel_name: str | None = None,
    value_dtype: Any = np.int32,
    splits: Mapping[int, tuple[tuple[int, ...], Sequence[Part]]] | None = None,
) -> LocalKernel:
    """Import one kernel of a loopy translation unit.

    Parameters
    ----------
    translation_unit
        A ``loopy.TranslationUnit`` (or ``LoopKernel``), as it was made: neither preprocessed nor
        scheduled.
    name
        The entry point.
    intents
        One an array argument, in the kernel's order.
    kernel_name
        Name of the result, ``name`` where not given.
    value_dtype
        Type of value arguments (the layer number of an extruded mesh) that declare none.
    splits
        By number of the array argument: the shape in which to divide it, and its parts, which
        cover it. They take its place among the arguments of the result.

    Returns
    -------
    LocalKernel
        Its arguments are the kernel's, value arguments included (shape ``()``), in order. Integers
        of less than 32 bits have become int32.

    Raises
    ------
    UnsupportedLoopError
        Where the kernel holds something that has no equivalent: opaque C code, subscripts that are
        known only at run time in a store, loops without constant bounds, or more than
        :data:`UNROLL_LIMIT` instructions after the unrolling that was necessary.
    """
    entry, callables = _entry(translation_unit, name)
    importer = _Importer(name, callables)
    return importer.run(
        entry, list(intents), kernel_name or name, np.dtype(value_dtype), splits or {}
    )


_imported: dict[Any, LocalKernel | UnsupportedLoopError] = {}
_REMEMBERED = 4096


def import_once(
    key: Hashable,
    translation_unit: Any,
    name: str,
    intents: Sequence[Intent],
    splits: Mapping[int, tuple[tuple[int, ...], Sequence[Part]]],
) -> LocalKernel:
    """As :func:`import_loopy`, but for code that was seen before: what came of it then, or failed.

    Parameters
    ----------
    key
        Tells the code apart; the other parameters are told apart here.
    translation_unit, name, intents, splits
        As for :func:`import_loopy`.
    """
    shapes = tuple((n, whole, tuple(parts)) for n, (whole, parts) in sorted(splits.items()))
    whole_key = (key, name, tuple(intents), shapes)
    known = _imported.get(whole_key)
    if known is None:
        try:
            known = import_loopy(translation_unit, name, list(intents), splits=splits)
        except UnsupportedLoopError as error:
            known = error.with_traceback(None)
        if len(_imported) > _REMEMBERED:
            _imported.clear()
        _imported[whole_key] = known
    if isinstance(known, UnsupportedLoopError):
        raise known
    return known


def _entry(unit: Any, name: str) -> tuple[Any, Mapping[str, Any]]:
    table = getattr(unit, "callables_table", None)
    if table is None:
        return unit, {}
    try:
        return table[name].subkernel, table
    except (KeyError, AttributeError):
        raise UnsupportedLoopError(
            f"kernel {name}: the translation unit has no such kernel"
        ) from None


# ---------------------------------------------------------------------------------------------
# Values of arrays


class _Value:
    """What an array holds: a function from subscripts to an expression."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class _Stored(_Value):
    """Entries of a source, after leading indices that belong to the loops around it."""

    source: Source
    leading: tuple[Expr, ...] = ()


@dataclass(frozen=True, eq=False)
class _Zero(_Value):
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class _Undefined(_Value):
    name: str
    dtype: np.dtype[Any] | None


@dataclass(frozen=True, eq=False)
class _Entry(_Value):
    """What the array holds when an iteration of ``scope`` begins."""

    scope: _Scope
    name: str
    source: Temporary | None


@dataclass(eq=False)
class _Points(_Value):
    """Entries with constant subscripts, set or added to, over ``base``."""

    base: _Value
    owner: object
    entries: dict[tuple[int, ...], Expr] = field(default_factory=dict)
    added: dict[tuple[int, ...], Expr] = field(default_factory=dict)


@dataclass(eq=False)
class _Update(_Value):
    """``[subscripts] = value`` (or ``+=``) for all values of ``dims``, over ``base``."""

    base: _Value | None
    dims: tuple[Dim, ...]
    subscripts: tuple[Expr, ...]
    value: Expr
    add: bool
    last: dict[Expr, Expr] | None = None  # still to be substituted in value


@dataclass(eq=False)
class _Scope:
    """One generic iteration of a loop."""

    dim: Dim
    mark: Dim  # stands for "something that this loop changes" in masks
    around: int  # mask of the loops around it
    reads: dict[Expr, tuple[str, tuple[Expr, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Array:
    """A variable of the kernel: root of all views on it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None


@dataclass(frozen=True, eq=False)
class _View:
    """A variable inside a called kernel: an array and how to find an entry of it."""

    array: str
    shape: tuple[int, ...]
    locate: Callable[[tuple[Expr, ...]], tuple[Expr, ...]] | None = None


@dataclass(eq=False)
class _Frame:
    """One activation of a kernel."""

    kernel: Any
    variables: dict[str, _View]
    inames: dict[str, Expr]
    where: str


@dataclass(eq=False)
class _Definition:
    result: Temporary
    dims: tuple[Dim, ...]
    reductions: tuple[Dim, ...]
    body: Expr


class _SequentialError(Exception):
    """The iterations of a loop depend on each other."""


class _UnknownError(Exception):
    """Whether two subscripts coincide cannot be told."""


_DISJOINT = object()

_CALLS = {
    "abs": "abs", "fabs": "abs", "sqrt": "sqrt", "exp": "exp", "log": "log", "ln": "log",
    "sin": "sin", "cos": "cos", "tan": "tan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
    "asin": "asin", "acos": "acos", "atan": "atan", "arcsin": "asin", "arccos": "acos",
    "arctan": "atan", "erf": "erf", "real": "real", "imag": "imag", "conj": "conj",
    "pow": "pow", "atan2": "atan2", "arctan2": "atan2",
    "min": "min", "max": "max", "fmin": "min", "fmax": "max",
    "bessel_jn": "bessel_j", "bessel_yn": "bessel_y", "jn": "bessel_j", "yn": "bessel_y",
}  # fmt: skip

_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}

_CONSTANTS = {"NAN": math.nan, "INFINITY": math.inf, "M_PI": math.pi, "PI": math.pi}


# ---------------------------------------------------------------------------------------------
# Symbolic execution


class _Importer:
    def __init__(self, name: str, callables: Mapping[str, Any]) -> None:
        self.name = name
        self.callables = callables
        self.algebra = Algebra()
        self.arrays: dict[str, _Array] = {}
        self.state: dict[str, _Value] = {}
        self.definitions: list[_Definition] = []
        self.sums: dict[Source, _Definition] = {}
        self.wholes: dict[Source, tuple[int, ...]] = {}
        self.dims: list[Dim] = []
        self.scopes: list[_Scope] = []
        self.owner: object = object()
        self.guards: list[Expr] = []
        self.guarded: list[frozenset[str]] = []
        self.executed = 0
        self.counter = itertools.count()
        self.whole: dict[_Value, tuple[int, _Stored]] = {}
        self.trees: dict[int, tuple[Any, tuple[Loop | Instruction, ...]]] = {}

    def run(
        self,
        kernel: Any,
        intents: list[Intent],
        name: str,
        value_dtype: np.dtype[Any],
        splits: Mapping[int, tuple[tuple[int, ...], Sequence[Part]]],
    ) -> LocalKernel:
        where = f"kernel {name}"
        arguments: list[KernelArgument] = []
        outputs: list[tuple[KernelArgument, Intent, list[tuple[KernelArgument, Part]]]] = []
        variables: dict[str, _View] = {}
        arrays = 0
        for formal in kernel.args:
            argument = self.formal(formal, value_dtype, where)
            intent = Intent.READ
            parts: list[tuple[KernelArgument, Part]] = []
            whole: tuple[int, ...] = ()
            if type(formal).__name__ != "ValueArg":
                if arrays == len(intents):
                    raise UnsupportedLoopError(f"{where}: fewer intents than array arguments")
                intent = intents[arrays]
                if arrays in splits:
                    whole, boxes = splits[arrays]
                    if math.prod(whole) != argument.size:
                        raise UnsupportedLoopError(
                            f"{where}: argument {formal.name} has shape {argument.shape}, what is "
                            f"packed for it {whole}"
                        )
                    parts = [
                        (KernelArgument(f"{formal.name}_{i}", part.shape, argument.dtype), part)
                        for i, part in enumerate(boxes)
                    ]
                arrays += 1
            arguments += [part for part, _ in parts] or [argument]
            variables[formal.name] = _View(formal.name, argument.shape)
            self.arrays[formal.name] = _Array(formal.name, argument.shape, argument.dtype)
            value: _Value = _Stored(argument)
            if intent in (Intent.INC, Intent.WRITE):
                value = _Zero(argument.dtype)
            elif parts:
                value = self.joined(formal.name, argument, whole, parts)
            self.state[formal.name] = value
            if intent is not Intent.READ:
                outputs.append((argument, intent, [(a, p) for a, p in parts]))
                if parts:
                    self.wholes[argument] = whole
        if arrays != len(intents):
            raise UnsupportedLoopError(f"{where}: more intents than array arguments")
        self.call(kernel, variables, where, prefix="")
        pieces: list[Piece] = []
        replaced: set[Source] = set()
        for argument, intent, parts in outputs:
            found = self.pieces(argument)
            if parts:
                found = self.divided(argument, found, parts)
            pieces += found
            if intent is not Intent.INC:
                replaced |= {part for part, _ in parts} or {argument}
        return self.finish(name, arguments, pieces, replaced)

    def formal(self, formal: Any, value_dtype: np.dtype[Any], where: str) -> KernelArgument:
        is_value = type(formal).__name__ == "ValueArg"
        dtype = _dtype(formal.dtype)
        if dtype is None:
            if not is_value:
                raise UnsupportedLoopError(f"{where}: argument {formal.name} has no dtype")
            dtype = value_dtype
        if dtype.kind in "iub" and dtype.itemsize < 4:
            dtype = np.dtype(np.int32)  # there are no smaller integers in a program
        try:
            shape = () if is_value else tuple(int(e) for e in formal.shape)
        except (TypeError, ValueError):
            raise UnsupportedLoopError(
                f"{where}: argument {formal.name} has shape {formal.shape}, not one of constants"
            ) from None
        return KernelArgument(formal.name, shape, dtype)

    def joined(
        self,
        name: str,
        argument: KernelArgument,
        whole: tuple[int, ...],
        parts: Sequence[tuple[KernelArgument, Part]],
    ) -> _Value:
        """The value of an argument that is given in parts."""
        value: _Value | None = _Undefined(name, argument.dtype)
        for source, part in parts:
            dims = tuple(Dim(f"p{i}", extent) for i, extent in enumerate(part.shape))
            at = tuple([IndexOf(dim) for dim in dims])
            shifted = tuple(
                [
                    self.algebra.make("add", i, Scalar(start, INDEX))
                    for i, start in zip(at, part.start, strict=True)
                ]
            )
            subscripts = self.unflatten(self.flatten(shifted, whole), argument.shape)
            value = _Update(value, dims, subscripts, Load(source, at), False)
        assert value is not None
        return value

    def divided(
        self,
        argument: KernelArgument,
        pieces: list[Piece],
        parts: Sequence[tuple[KernelArgument, Part]],
    ) -> list[Piece]:
        """Pieces of ``argument`` as pieces of its parts."""
        whole = self.wholes[argument]
        owner = np.full(whole, -1)
        for number, (_, part) in enumerate(parts):
            owner[tuple(slice(b, b + n) for b, n in zip(part.start, part.shape, strict=True))] = (
                number
            )
        found: list[Piece] = []
        for piece in pieces:
            slots = self.positions((piece.slot,), piece.dims, (argument.size,))
            assert slots is not None
            numbers = np.unique(owner.reshape(-1)[slots])
            if len(numbers) == 1 and numbers[0] >= 0:
                found.append(self.within(piece, piece.slot, whole, *parts[int(numbers[0])]))
                continue
            # a piece that lies in several parts
            inverse = _Update(None, piece.dims, (piece.slot,), self.settle(piece.value), False)
            inside = np.zeros(argument.size, dtype=bool)
            inside[slots] = True
            for target, box in parts:
                dims = tuple(Dim(f"p{i}", extent) for i, extent in enumerate(box.shape))
                at = tuple([IndexOf(dim) for dim in dims])
                shifted = tuple(
                    [
                        self.algebra.make("add", i, Scalar(start, INDEX))
                        for i, start in zip(at, box.start, strict=True)
                    ]
                )
                slot = self.flatten(shifted, whole)
                located = self.locate(inverse, (slot,))
                if located is None:
                    raise UnsupportedLoopError(
                        f"kernel {self.name}: cannot divide {argument.name} into its parts"
                    )
                condition, mapping = located
                value = self.substitute(inverse.value, mapping)
                if condition is not None:
                    zero = Scalar(0, value.dtype)
                    value = self.algebra.make("select", condition, value, zero)
                found.append(Piece(target, dims, self.flatten(at, box.shape), value))
        return found

    def within(
        self,
        piece: Piece,
        slot: Expr,
        whole: tuple[int, ...],
        part: KernelArgument,
        box: Part,
    ) -> Piece:
        at = self.unflatten(slot, whole)
        local = tuple(
            [
                self.algebra.make("sub", i, Scalar(start, INDEX))
                for i, start in zip(at, box.start, strict=True)
            ]
        )
        return Piece(part, piece.dims, self.flatten(local, box.shape), piece.value)

    # -----------------------------------------------------------------------------------------
    # kernels and instructions

    def call(self, kernel: Any, variables: dict[str, _View], where: str, prefix: str) -> None:
        """Execute ``kernel`` with its arguments bound in ``variables``."""
        local = []
        for temporary in kernel.temporary_variables.values():
            key = f"{prefix}{temporary.name}"
            dtype = _dtype(temporary.dtype)
            initializer = temporary.initializer
            if initializer is not None:
                table = np.asarray(initializer, dtype=dtype)
                shape = table.shape
                dtype = table.dtype
                self.state[key] = _Stored(Table(table))
            else:
                try:
                    shape = tuple(int(e) for e in temporary.shape)
                except (TypeError, ValueError):
                    raise UnsupportedLoopError(
                        f"{where}: temporary {temporary.name} has shape {temporary.shape}"
                    ) from None
                self.state[key] = _Undefined(key, dtype)
            self.arrays[key] = _Array(key, shape, dtype)
            variables[temporary.name] = _View(key, shape)
            local.append(key)
        found = self.trees.get(id(kernel))
        if found is None:
            found = self.trees[id(kernel)] = (kernel, tree_of(kernel, where))
        frame = _Frame(kernel, variables, {}, where)
        outside = list(self.guarded)
        # what only this activation sees need not keep its value where a predicate is false
        self.guarded = [exempt | frozenset(local) for exempt in outside]
        self.execute(found[1], frame)
        self.guarded = outside

    def execute(self, nodes: Iterable[Loop | Instruction], frame: _Frame) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                self.loop(node, frame)
            else:
                self.instruction(node.instruction, frame)

    def loop(self, loop: Loop, frame: _Frame) -> None:
        if loop.extent <= 0:
            return
        if loop.extent > 1 and self.try_parallel(loop, frame):
            return
        for i in range(loop.start, loop.start + loop.extent):
            frame.inames[loop.iname] = Scalar(i, INDEX)
            self.execute(loop.body, frame)
        del frame.inames[loop.iname]

    def instruction(self, instruction: Any, frame: _Frame) -> None:
        kind = type(instruction).__name__
        if kind in ("NoOpInstruction", "BarrierInstruction"):
            return
        if kind == "CInstruction":
            code = instruction.code.strip()
            # a barrier, which TSFC writes to get round an error of a compiler, moves no data
            if not code or code.startswith(("PetscLogEvent", "__sync_synchronize()")):
                return
            raise UnsupportedLoopError(f"{frame.where}: instruction {instruction.id} is C code")
        self.executed += 1
        if self.executed > UNROLL_LIMIT:
            raise UnsupportedLoopError(
                f"{frame.where}: more than {UNROLL_LIMIT} instructions once loops that carry "
                "values from one iteration to the next are unrolled"
            )
        guards = [self.condition(p, frame) for p in instruction.predicates]
        guards = [g for g in guards if not (isinstance(g, Scalar) and g.value)]
        if any(isinstance(g, Scalar) for g in guards):
            return
        for guard in guards:
            self.guards.append(guard)
            self.guarded.append(frozenset())
        if kind == "Assignment":
            self.assign(instruction, frame)
        elif kind == "CallInstruction":
            self.call_instruction(instruction, frame)
        else:
            raise UnsupportedLoopError(f"{frame.where}: instruction {instruction.id} is a {kind}")
        if guards:
            del self.guards[-len(guards) :], self.guarded[-len(guards) :]

    def assign(self, instruction: Any, frame: _Frame) -> None:
        array, subscripts = self.target(instruction.assignee, frame)
        expression = instruction.expression
        rest = _without_addend(expression, instruction.assignee)
        if rest is not None:
            self.store(array, subscripts, self.value(rest, frame), frame, add=True)
        else:
            self.store(array, subscripts, self.value(expression, frame), frame)

    def target(self, expression: Any, frame: _Frame) -> tuple[str, tuple[Expr, ...]]:
        """The array that an assignee or a subscripted variable names, and the subscripts."""
        kind = type(expression).__name__
        if kind == "Subscript":
            name = expression.aggregate.name
            subscripts = tuple([self.subscript(i, frame) for i in expression.index_tuple])
        elif kind in ("Variable", "TaggedVariable"):
            name, subscripts = expression.name, ()
        else:
            raise UnsupportedLoopError(f"{frame.where}: cannot handle {kind} {expression}")
        view = frame.variables.get(name)
        if view is None:
            raise UnsupportedLoopError(f"{frame.where}: {name} is not a variable of the kernel")
        while len(subscripts) > len(view.shape) and subscripts[-1] == Scalar(0, INDEX):
            # an address of one value
            subscripts = subscripts[:-1]
        if len(subscripts) > len(view.shape):
            raise UnsupportedLoopError(
                f"{frame.where}: {name} has {len(view.shape)} axes, {expression} {len(subscripts)}"
            )
        # loopy lets called kernels leave subscripts off at the end
        zeros = [Scalar(0, INDEX)] * (len(view.shape) - len(subscripts))
        subscripts = (*subscripts, *zeros)
        if view.locate is not None:
            subscripts = view.locate(subscripts)
        return view.array, subscripts

    def subscript(self, expression: Any, frame: _Frame) -> Expr:
        value = self.translate(expression, frame)
        if isinstance(value, Expr):
            return self.algebra.cast(value, INDEX)
        return Scalar(int(value), INDEX)

    # -----------------------------------------------------------------------------------------
    # reading and storing

    def store(
        self, name: str, subscripts: tuple[Expr, ...], value: Any, frame: _Frame, add: bool = False
    ) -> None:
        algebra = self.algebra
        array = self.arrays[name]
        dtype = array.dtype
        if dtype is None:
            # a temporary without a type has that of what is first stored in it
            dtype = value.dtype if isinstance(value, Expr) else np.asarray(value).dtype
            array = self.arrays[name] = _Array(name, array.shape, dtype)
        value = self.typed(value, dtype)
        for axis, (subscript, extent) in enumerate(zip(subscripts, array.shape, strict=True)):
            low, high = algebra.bounds(subscript)
            if math.isinf(low) or math.isinf(high):
                raise UnsupportedLoopError(
                    f"{frame.where}: where {name} is stored depends on data (axis {axis})"
                )
            if not (low >= 0 and high < extent):
                raise UnsupportedLoopError(
                    f"{frame.where}: {name} is stored beyond its extent {extent} (axis {axis})"
                )
        value = self.guard(name, subscripts, value, frame, add)
        self.state[name] = self.updated(self.state[name], (), subscripts, value, add)

    def guard(
        self, name: str, subscripts: tuple[Expr, ...], value: Expr, frame: _Frame, add: bool
    ) -> Expr:
        """``value`` where the predicates hold, else what the entry holds already."""
        for guard, exempt in zip(reversed(self.guards), reversed(self.guarded), strict=True):
            if name in exempt:
                continue
            if add:
                old: Expr = Scalar(0, value.dtype)
            else:
                old = self.read(name, subscripts, frame, or_zero=True)
                if old.dtype != value.dtype:
                    dtype = self.arrays[name].dtype
                    value, old = (self.algebra.cast(x, dtype) for x in (value, old))
            value = self.algebra.make("select", guard, value, old)
        return value

    def updated(
        self,
        base: _Value | None,
        dims: tuple[Dim, ...],
        subscripts: tuple[Expr, ...],
        value: Expr,
        add: bool,
    ) -> _Value:
        """``base`` after ``[subscripts] = value`` (or ``+=``) for all values of ``dims``."""
        algebra = self.algebra
        if all(isinstance(s, Scalar) for s in subscripts) and not dims:
            key = _constants(subscripts)
            assert base is not None
            if not key:
                # a scalar: nothing can lie below
                if not add:
                    base = _Zero(value.dtype)
                elif isinstance(base, _Zero):
                    add = False
            if not isinstance(base, _Points) or base.owner is not self.owner:
                base = _Points(base, self.owner)
            if not add:
                base.entries[key] = value
                base.added.pop(key, None)
            elif key in base.entries:
                base.entries[key] = algebra.make("add", base.entries[key], value)
            elif key in base.added:
                base.added[key] = algebra.make("add", base.added[key], value)
            elif isinstance(base.base, _Zero):
                base.entries[key] = value
            else:
                below = None if _reaches_entry(base.base) else self.find(base.base, subscripts)
                if isinstance(below, Expr):
                    base.entries[key] = algebra.make("add", below, value)
                else:
                    base.added[key] = value
            return base
        if add and isinstance(base, _Update) and base.last is None:
            # fold into what lies directly below where it covers the same entries
            if len(base.dims) == len(dims) and {d.extent for d in base.dims} == {
                d.extent for d in dims
            }:
                found = self.match(base, subscripts)
                if isinstance(found, dict) and self.same_points(base.dims, found):
                    below_value = self.substitute(base.value, found)
                    return _Update(
                        base.base, dims, subscripts,
                        algebra.make("add", below_value, value), base.add,
                    )  # fmt: skip
        elif add and isinstance(base, _Zero):
            add = False
        return _Update(base, dims, subscripts, value, add)

    def same_points(self, dims: tuple[Dim, ...], found: dict[Expr, Expr]) -> bool:
        """Whether ``found`` maps ``dims`` one to one onto dimensions of the same extents."""
        images = []
        for dim in dims:
            image = found.get(IndexOf(dim))
            if not isinstance(image, IndexOf) or image.dim.extent != dim.extent:
                return False
            images.append(image)
        return len(set(images)) == len(images)

    def read(
        self, name: str, subscripts: tuple[Expr, ...], frame: _Frame, or_zero: bool = False
    ) -> Expr:
        value = self.state[name]
        try:
            return self.element(value, subscripts, name, or_zero)
        except _UnknownError:
            pass
        stored = self.materialise(name, value, frame.where)
        return Load(stored.source, (*stored.leading, *subscripts))

    def element(
        self, value: _Value, subscripts: tuple[Expr, ...], name: str, or_zero: bool = False
    ) -> Expr:
        """The entry of ``value`` at ``subscripts``; ``_UnknownError`` where it is not one."""
        found = self.find(value, subscripts)
        if found is None:
            raise _UnknownError
        if isinstance(found, _Undefined):
            if or_zero:
                return Scalar(0, found.dtype or np.float64)
            raise UnsupportedLoopError(f"kernel {self.name}: {name} is read before it is written")
        return found

    def find(self, value: _Value | None, subscripts: tuple[Expr, ...]) -> Any:
        """An expression, ``None`` where it cannot be told, or the ``_Undefined`` found there."""
        additions: list[Expr] = []
        algebra = self.algebra
        while True:
            match value:
                case _Stored():
                    for index, extent in zip(
                        subscripts, value.source.shape[len(value.leading) :], strict=True
                    ):
                        low, high = algebra.bounds(index)
                        if high < 0 or low >= extent:
                            raise UnsupportedLoopError(
                                f"kernel {self.name}: {value.source.name} is read beyond its extent"
                            )
                    found: Any = Load(value.source, (*value.leading, *subscripts))
                    break
                case _Zero():
                    found = Scalar(0, value.dtype)
                    break
                case _Undefined():
                    return value
                case _Entry():
                    if value.source is None:
                        return None
                    found = Load(value.source, subscripts)
                    scope = value.scope
                    if found not in scope.reads:
                        scope.reads[found] = (value.name, subscripts)
                        mask = scope.around | algebra.bit(scope.mark)
                        for child in subscripts:
                            mask |= algebra.mask(child)
                        algebra.assume(found, mask)
                    break
                case _Points():
                    if all(isinstance(s, Scalar) for s in subscripts):
                        key = _constants(subscripts)
                        if key in value.entries:
                            found = value.entries[key]
                            break
                        if key in value.added:
                            additions.append(value.added[key])
                    else:
                        ranges = [algebra.bounds(s) for s in subscripts]
                        for key in itertools.chain(value.entries, value.added):
                            if all(
                                low <= k <= high for k, (low, high) in zip(key, ranges, strict=True)
                            ):
                                return None
                    value = value.base
                case _Update():
                    matched = self.match(value, subscripts)
                    if matched is None:
                        return None
                    if matched is not _DISJOINT:
                        entry = value.value
                        if value.last:
                            entry = self.substitute(entry, value.last)
                        entry = self.substitute(entry, matched)
                        if not value.add:
                            found = entry
                            break
                        additions.append(entry)
                    value = value.base
                case _:
                    # entries that no update covers
                    return None
        for addition in reversed(additions):
            found = algebra.make("add", found, addition)
        return found

    def substitute(self, expression: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
        return self.algebra.substitute([expression], mapping)[0]

    def match(self, update: _Update, subscripts: tuple[Expr, ...]) -> Any:
        """Values of the update's dimensions at which it stores to ``subscripts``.

        A dict; ``_DISJOINT`` where it never does; None where that cannot be told.
        """
        algebra = self.algebra
        found: dict[Expr, Expr] = {}
        own = {IndexOf(dim) for dim in update.dims}
        unknown = False
        for stored, wanted in zip(update.subscripts, subscripts, strict=True):
            if stored is wanted and not (
                own and algebra.mask(stored) & algebra.of_dims(update.dims)
            ):
                continue
            terms, constant = algebra.affine(stored)
            mine = {t: f for t, f in terms.items() if t in own}
            rest = {t: f for t, f in terms.items() if t not in own}
            if any(algebra.mask(t) & algebra.of_dims(update.dims) for t in rest):
                unknown = True
                continue
            difference = algebra.make("sub", wanted, algebra.index(rest, constant))
            low, high = algebra.bounds(difference)
            if not mine:
                if low > 0 or high < 0:
                    return _DISJOINT
                if not (low == high == 0):
                    unknown = True
                continue
            solved = self.solve(mine, difference)
            if solved is _DISJOINT:
                return _DISJOINT
            if solved is None:
                unknown = True
                continue
            for term, image in solved.items():
                if found.setdefault(term, image) is not image:
                    unknown = True
        return None if unknown else found

    def solve(self, terms: Mapping[IndexOf, int], wanted: Expr) -> Any:
        """Values of the dimensions in ``terms`` for which their sum is ``wanted``.

        As a mixed radix number, largest coefficient first.
        """
        algebra = self.algebra
        ordered = sorted(terms.items(), key=lambda item: -abs(item[1]))
        total_low = sum(min(0, f * (t.dim.extent - 1)) for t, f in ordered)
        total_high = sum(max(0, f * (t.dim.extent - 1)) for t, f in ordered)
        low, high = algebra.bounds(wanted)
        if high < total_low or low > total_high:
            return _DISJOINT
        # digits of negative weight are counted from their end
        wanted = algebra.make("sub", wanted, Scalar(total_low, INDEX))
        found: dict[Expr, Expr] = {}
        rest = wanted
        span = math.inf
        for term, factor in ordered:
            weight = abs(factor)
            if weight * term.dim.extent > span:
                return None  # digits overlap
            span = weight
            if weight == 1:
                digit, rest = rest, Scalar(0, INDEX)
            else:
                digit, rest = algebra.divide(rest, weight)
            low, high = algebra.bounds(digit)
            if high < 0 or low >= term.dim.extent:
                return _DISJOINT
            if low < 0 or high >= term.dim.extent:
                return None
            found[term] = self.from_end(digit, term.dim) if factor < 0 else digit
        low, high = algebra.bounds(rest)
        if low > 0 or high < 0:
            return _DISJOINT
        return found if low == high == 0 else None

    def from_end(self, digit: Expr, dim: Dim) -> Expr:
        return self.algebra.make("sub", Scalar(dim.extent - 1, INDEX), digit)

    # -----------------------------------------------------------------------------------------
    # definitions

    def define(
        self, body: Expr, reductions: tuple[Dim, ...] = (), dims: tuple[Dim, ...] | None = None
    ) -> Expr:
        """A temporary of its own for ``body`` summed over ``reductions``; returns its entry."""
        if dims is None:
            dims = self.free_dims(body, reductions)
        shape = tuple(d.extent for d in dims)
        result = Temporary(f"t{next(self.counter)}", shape, body.dtype)
        definition = _Definition(result, dims, reductions, body)
        self.definitions.append(definition)
        if reductions:
            self.sums[result] = definition
        return Load(result, tuple([IndexOf(d) for d in dims]))

    def free_dims(self, body: Expr, reductions: tuple[Dim, ...] = ()) -> tuple[Dim, ...]:
        return tuple(
            d
            for d in self.algebra.dims(self.algebra.mask(body))
            if d.extent >= 0 and d not in reductions
        )

    def sum(self, body: Expr, dim: Dim) -> Expr:
        """``body`` summed over ``dim``."""
        algebra = self.algebra
        if not algebra.mask(body) & algebra.bit(dim):
            return algebra.make("mul", Scalar(dim.extent, body.dtype), body)
        if isinstance(body, Op) and body.name == "select" and body.dtype.kind in "fc":
            condition, yes, no = body.children
            if (
                isinstance(no, Scalar)
                and no.value == 0
                and not (algebra.mask(condition) & algebra.bit(dim))
            ):
                return algebra.make("select", condition, self.sum(yes, dim), no)
        if isinstance(body, Load):
            # a sum of sums is one sum; the inner one vanishes where nothing else needs it
            inner = self.sums.get(body.source)
            if inner is not None and body.children == tuple([IndexOf(d) for d in inner.dims]):
                return self.define(inner.body, (*inner.reductions, dim))
        return self.define(body, (dim,))

    def settle(self, value: Expr) -> Expr:
        """``value`` itself if that costs nothing to compute again, else a temporary's entry."""
        if isinstance(value, Load | Scalar):
            return value
        return self.define(value)

    def materialise(self, name: str, value: _Value, where: str) -> _Stored:
        """All of ``value`` as one temporary."""
        found = self.whole.get(value)
        if found is not None:
            return found[1]
        if isinstance(value, _Points):
            value.owner = object()  # from now on it does not change
        array = self.arrays[name]
        axes = tuple(Dim(f"a{i}", extent) for i, extent in enumerate(array.shape))
        at = tuple([IndexOf(axis) for axis in axes])
        body = self.select_entry(name, value, at, where, array)
        axes_mask = self.algebra.of_dims(axes)
        leading = tuple(
            d for d in self.algebra.dims(self.algebra.mask(body) & ~axes_mask) if d.extent >= 0
        )
        self.define(body, (), (*leading, *axes))
        stored = _Stored(self.definitions[-1].result, tuple([IndexOf(d) for d in leading]))
        self.whole[value] = (len(self.definitions) - 1, stored)
        return stored

    def select_entry(
        self, name: str, value: _Value | None, at: tuple[Expr, ...], where: str, array: _Array
    ) -> Expr:
        """The entry at ``at``, by comparing with the subscripts of each update."""
        algebra = self.algebra
        assert array.dtype is not None
        chain: list[tuple[Expr | None, Expr, bool]] = []  # condition, value, add; newest first
        covered = np.zeros(array.shape, dtype=bool)
        dtype = array.dtype
        result: Expr | None = None
        while result is None:
            match value:
                case _Points():
                    for entries, add in ((value.added, True), (value.entries, False)):
                        for key, entry in entries.items():
                            condition: Expr = Scalar(True, bool)
                            for index, k in zip(at, key, strict=True):
                                test = algebra.make("eq", index, Scalar(k, INDEX))
                                condition = algebra.make("and", condition, test)
                            chain.append((condition, self.settle(entry), add))
                            if not add:
                                covered[key] = True
                    value = value.base
                case _Update():
                    entry = value.value
                    if value.last:
                        entry = self.substitute(entry, value.last)
                    entry = self.settle(entry)
                    located = self.locate(value, at)
                    if located is None:
                        if self.scopes:
                            raise _SequentialError
                        raise UnsupportedLoopError(
                            f"{where}: cannot tell which entries of {name} an update changes"
                        )
                    test_, mapping = located
                    chain.append((test_, self.substitute(entry, mapping), value.add))
                    if not value.add:
                        locations = self.enumerate(value, (), array.shape)
                        if locations is not None:
                            covered.reshape(-1)[locations.reshape(-1)] = True
                    value = value.base
                case _Undefined():
                    result = Scalar(0, dtype)
                case None:
                    result = Scalar(0, dtype)
                case _:
                    if covered.all():
                        result = Scalar(0, dtype)
                    else:
                        found = self.find(value, at)
                        assert isinstance(found, Expr)
                        result = found
            if result is None and covered.all():
                # nothing below can be seen
                result = Scalar(0, dtype)
        for condition_, entry, add in reversed(chain):
            if entry.dtype != result.dtype:
                entry, result = (algebra.cast(x, dtype) for x in (entry, result))
            if add:
                amount = entry
                if condition_ is not None:
                    amount = algebra.make("select", condition_, entry, Scalar(0, entry.dtype))
                result = algebra.make("add", result, amount)
            elif condition_ is None:
                result = entry
            else:
                result = algebra.make("select", condition_, entry, result)
        return result

    def locate(
        self, update: _Update, at: tuple[Expr, ...]
    ) -> tuple[Expr | None, dict[Expr, Expr]] | None:
        """Condition under which ``update`` stores to ``at``, and its dimensions' values there.

        The values are in range whether or not the condition holds.
        """
        algebra = self.algebra
        own = {IndexOf(dim) for dim in update.dims}
        condition: Expr = Scalar(True, bool)
        found: dict[Expr, Expr] = {}

        def require(name: str, a: Expr, b: Expr) -> None:
            nonlocal condition
            condition = algebra.make("and", condition, algebra.make(name, a, b))

        zero = Scalar(0, INDEX)
        for stored, wanted in zip(update.subscripts, at, strict=True):
            terms, constant = algebra.affine(stored)
            mine = {t: f for t, f in terms.items() if t in own}
            rest = {t: f for t, f in terms.items() if t not in own}
            if any(algebra.mask(t) & algebra.of_dims(update.dims) for t in rest):
                return None
            difference = algebra.make("sub", wanted, algebra.index(rest, constant))
            for term, factor in mine.items():
                if factor < 0:
                    least = Scalar(factor * (term.dim.extent - 1), INDEX)
                    difference = algebra.make("sub", difference, least)
            span = math.inf
            for term, factor in sorted(mine.items(), key=lambda item: -abs(item[1])):
                weight = abs(factor)
                if weight * term.dim.extent > span:
                    return None
                span = weight
                if weight == 1:
                    digit, difference = difference, zero
                else:
                    digit, difference = algebra.divide(difference, weight)
                last = Scalar(term.dim.extent - 1, INDEX)
                require("ge", digit, zero)
                require("le", digit, last)
                clamped = algebra.make("min", algebra.make("max", digit, zero), last)
                if factor < 0:
                    clamped = self.from_end(clamped, term.dim)
                if term in found:
                    require("eq", clamped, found[term])
                else:
                    found[term] = clamped
            require("eq", difference, zero)
        if isinstance(condition, Scalar) and condition.value:
            return None, found
        return condition, found

    # -----------------------------------------------------------------------------------------
    # loops

    def written(self, nodes: Iterable[Loop | Instruction], frame: _Frame) -> dict[str, None]:
        """The arrays that are stored to, in a stable order."""
        found: dict[str, None] = {}
        for node in nodes:
            if isinstance(node, Loop):
                found.update(self.written(node.body, frame))
                continue
            for assignee in getattr(node.instruction, "assignees", ()):
                expression = getattr(assignee, "subscript", assignee)
                variable = getattr(expression, "aggregate", expression)
                view = frame.variables.get(getattr(variable, "name", ""))
                if view is not None:
                    found[view.array] = None
        return found

    def try_parallel(self, loop: Loop, frame: _Frame) -> bool:
        algebra = self.algebra
        before = dict(self.state)
        types = dict(self.arrays)
        mark = len(self.definitions)
        written = self.written(loop.body, frame)
        dim = Dim(loop.iname, loop.extent)
        around = 0
        for outer in self.scopes:
            around |= algebra.bit(outer.dim) | algebra.bit(outer.mark)
        scope = _Scope(dim, Dim(f"{loop.iname} changes", -1), around)
        owner, self.owner = self.owner, object()
        for name in written:
            array = self.arrays[name]
            source = None
            if array.dtype is not None:
                source = Temporary(f"{name} at {loop.iname}", array.shape, array.dtype)
            self.state[name] = _Entry(scope, name, source)
        frame.inames[loop.iname] = algebra.index({IndexOf(dim): 1}, loop.start)
        self.scopes.append(scope)
        guards = list(self.guards), list(self.guarded)
        try:
            self.execute(loop.body, frame)
            self.scopes.pop()
            self.owner = owner
            self.widen(scope, list(written), before, mark)
        except _SequentialError:
            if self.scopes and self.scopes[-1] is scope:
                self.scopes.pop()
            self.owner = owner
            self.state = before
            self.arrays = types
            self.guards, self.guarded = guards
            del self.definitions[mark:]
            self.whole = {v: (at, s) for v, (at, s) in self.whole.items() if at < mark}
            return False
        finally:
            frame.inames.pop(loop.iname, None)
        return True

    def widen(
        self, scope: _Scope, written: list[str], before: dict[str, _Value], mark: int
    ) -> None:
        """Turn what one iteration did into what all of them did."""
        algebra = self.algebra
        chains: dict[str, list[_Update]] = {}
        kinds: dict[str, list[str]] = {}
        written_at: dict[str, Callable[[tuple[Expr, ...]], bool]] = {}
        for name in written:
            chain = self.chain(self.state[name], scope)
            chains[name] = chain
            kinds[name], written_at[name] = self.classify(name, chain, scope)
        mapping: dict[Expr, Expr] = {}
        for read, (name, subscripts) in list(scope.reads.items()):
            if not written_at[name](subscripts):
                raise _SequentialError
            try:
                mapping[read] = self.element(before[name], subscripts, name)
            except _UnknownError:
                stored = self.materialise(name, before[name], f"kernel {self.name}")
                mapping[read] = Load(stored.source, (*stored.leading, *subscripts))
        if mapping:
            done: dict[Expr, Expr] = {}
            bit = algebra.bit(scope.mark)

            def replace(expression: Expr) -> Expr:
                while algebra.mask(expression) & bit:
                    expression = algebra.substitute([expression], mapping, done)[0]
                return expression

            for definition in self.definitions[mark:]:
                definition.body = replace(definition.body)
            for chain in chains.values():
                for update in chain:
                    update.value = replace(update.value)
                    update.subscripts = tuple([replace(s) for s in update.subscripts])
        last: dict[Expr, Expr] = {IndexOf(scope.dim): Scalar(scope.dim.extent - 1, INDEX)}
        for name in written:
            value: _Value | None = before[name]
            for update, kind in zip(chains[name], kinds[name], strict=True):
                dims, subscripts, entry = update.dims, update.subscripts, update.value
                if kind == "last":
                    # few of these are ever read: substitute when one is
                    base = None if not update.add and self.covers(name, update) else value
                    later = {**(update.last or {}), **last}
                    value = _Update(base, dims, subscripts, entry, update.add, later)
                    continue
                if update.last:
                    entry = self.substitute(entry, update.last)
                if kind == "sum":
                    entry = self.sum(entry, scope.dim)
                else:
                    # what is added is rarely read, and a sum over an outer loop wants all of it
                    if not update.add:
                        entry = self.settle(entry)
                    dims = (*dims, scope.dim)
                value = self.updated(value, dims, subscripts, entry, update.add)
                if isinstance(value, _Update) and not value.add and self.covers(name, value):
                    value.base = None
            assert value is not None
            self.state[name] = value

    def chain(self, value: _Value | None, scope: _Scope) -> list[_Update]:
        """The updates of one iteration, oldest first."""
        found: list[_Update] = []
        while True:
            match value:
                case _Entry() if value.scope is scope:
                    break
                case _Points():
                    for entries, add in ((value.added, True), (value.entries, False)):
                        for key, entry in entries.items():
                            subscripts = tuple([Scalar(k, INDEX) for k in key])
                            found.append(_Update(None, (), subscripts, entry, add))
                    value = value.base
                case _Update():
                    found.append(
                        _Update(
                            None, value.dims, value.subscripts, value.value, value.add, value.last
                        )
                    )
                    value = value.base
                case _:
                    # everything below is covered
                    break
        found.reverse()
        return found

    def classify(
        self, name: str, chain: list[_Update], scope: _Scope
    ) -> tuple[list[str], Callable[[tuple[Expr, ...]], bool]]:
        """How each update widens ("sum", "last" or "each"), and which entries may be read first.

        The second result tells whether entries with the given subscripts, read in an iteration
        before it writes them, still hold what they held before the loop.
        """
        algebra = self.algebra
        bit = algebra.bit(scope.dim)
        array = self.arrays[name]
        size = math.prod(array.shape)
        if not chain:
            return [], lambda subscripts: True
        if not array.shape:
            first_set = next((i for i, update in enumerate(chain) if not update.add), len(chain))
            if 0 < first_set < len(chain):
                raise _SequentialError
            return ["sum" if first_set else "last"] * len(chain), lambda subscripts: False
        # other loops that the subscripts depend on take part in the enumeration
        mask = 0
        for update in chain:
            for subscript in update.subscripts:
                mask |= algebra.mask(subscript)
            mask &= ~algebra.of_dims(update.dims)
        outer = tuple(d for d in algebra.dims(mask & ~bit) if d.extent >= 0)
        count = math.prod(d.extent for d in outer)
        extent = scope.dim.extent
        free, every = -1, -2
        owner = np.full((count, size), free, dtype=np.int64)
        fixed_set = np.zeros((count, size), dtype=bool)
        fixed_add = np.zeros((count, size), dtype=bool)
        kinds: list[str] = []
        rows = np.arange(count)[:, None]
        for update in chain:
            moving = any(algebra.mask(s) & bit for s in update.subscripts)
            lead = (*outer, scope.dim) if moving else outer
            locations = self.enumerate(update, lead, array.shape)
            if locations is None:
                raise _SequentialError
            if moving:
                flat = locations.reshape(count, extent, -1)
                own = np.broadcast_to(np.arange(extent)[None, :, None], flat.shape)
                at: Any = (np.broadcast_to(rows[:, :, None], flat.shape), flat)
                if (fixed_set[at] | fixed_add[at]).any():
                    raise _SequentialError
                previous = owner[at]
                if ((previous != free) & (previous != own)).any():
                    raise _SequentialError
                owner[at] = own
                if (owner[at] != own).any():
                    raise _SequentialError
                kinds.append("each")
                continue
            flat = locations.reshape(count, -1)  # type: ignore[assignment]
            at = (np.broadcast_to(rows, flat.shape), flat)
            if ((owner[at] != free) & (owner[at] != every)).any():
                raise _SequentialError
            if update.add:
                below = fixed_set[at]
                if below.all():
                    kinds.append("last")
                elif not below.any():
                    kinds.append("sum")
                    fixed_add[at] = True
                else:
                    raise _SequentialError
            else:
                if fixed_add[at].any():
                    raise _SequentialError
                kinds.append("last")
                fixed_set[at] = True
            owner[at] = every
        has_moving = "each" in kinds

        def allowed(subscripts: tuple[Expr, ...]) -> bool:
            inner = 0
            for subscript in subscripts:
                inner |= algebra.mask(subscript)
            others = tuple(
                d for d in algebra.dims(inner & ~algebra.of_dims(outer) & ~bit) if d.extent >= 0
            )
            flat = self.positions(subscripts, (*outer, scope.dim, *others), array.shape)
            if flat is None:
                return False
            flat = flat.reshape(count, extent, -1)
            found = owner[np.broadcast_to(rows[:, :, None], flat.shape), flat]
            if not has_moving:
                return bool((found == free).all())
            iteration = np.arange(extent)[None, :, None]
            return bool(((found == free) | ((found != every) & (found >= iteration))).all())

        return kinds, allowed

    def covers(self, name: str, update: _Update) -> bool:
        """Whether ``update`` sets each entry of the array."""
        shape = self.arrays[name].shape
        if not shape:
            return True
        size = math.prod(shape)
        if math.prod(d.extent for d in update.dims) < size:
            return False
        own = self.algebra.of_dims(update.dims)
        if any(self.algebra.mask(s) & ~own for s in update.subscripts):
            return False
        locations = self.enumerate(update, (), shape)
        return locations is not None and len(np.unique(locations)) == size

    def enumerate(
        self, update: _Update, lead: tuple[Dim, ...], shape: tuple[int, ...]
    ) -> npt.NDArray[np.int64] | None:
        """Flat positions that ``update`` stores to, over ``lead`` and its own dimensions."""
        return self.positions(update.subscripts, (*lead, *update.dims), shape)

    def positions(
        self, subscripts: tuple[Expr, ...], dims: tuple[Dim, ...], shape: tuple[int, ...]
    ) -> npt.NDArray[np.int64] | None:
        """Flat positions of ``subscripts`` over all values of ``dims``, or None if unknown."""
        rank = len(dims)
        axes = {IndexOf(dim): axis for axis, dim in enumerate(dims)}
        total: Any = np.zeros((1,) * rank, dtype=np.int64)
        for subscript, extent in zip(subscripts, shape, strict=True):
            terms, constant = self.algebra.affine(subscript)
            value: Any = np.full((1,) * rank, constant, dtype=np.int64)
            for term, factor in terms.items():
                number = self._numbers(term, axes, rank)
                if number is None:
                    return None
                value = value + factor * number
            if value.size and not (value.min() >= 0 and value.max() < extent):
                return None
            total = total * extent + value
        return np.ascontiguousarray(np.broadcast_to(total, tuple(d.extent for d in dims)))

    def _numbers(self, term: Expr, axes: Mapping[Any, int], rank: int) -> Any:
        """Values of an index expression over dimensions, or None where it depends on data."""
        match term:
            case IndexOf():
                if term not in axes:
                    return None
                shape = [1] * rank
                shape[axes[term]] = term.dim.extent
                return np.arange(term.dim.extent, dtype=np.int64).reshape(shape)
            case Scalar():
                return np.full((1,) * rank, int(term.value), dtype=np.int64)
            case Load(source=Table() as table):
                found = [self._numbers(child, axes, rank) for child in term.children]
                if any(f is None for f in found):
                    return None
                return np.asarray(table.values[tuple(np.broadcast_arrays(*found))]).astype(np.int64)
            case Op():
                found = [self._numbers(child, axes, rank) for child in term.children]
                if any(f is None for f in found):
                    return None
                function: dict[str, Any] = {
                    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
                    "floordiv": np.floor_divide, "rem": np.mod, "min": np.minimum,
                    "max": np.maximum, "cast": lambda x: x,
                }  # fmt: skip
                if term.name in function:
                    return function[term.name](*found)
        return None

    # -----------------------------------------------------------------------------------------
    # expressions

    def typed(self, value: Any, dtype: np.dtype[Any]) -> Expr:
        """A number or an expression as an expression of type ``dtype``."""
        if not isinstance(value, Expr):
            return Scalar(
                value.real if dtype.kind != "c" and isinstance(value, complex) else value, dtype
            )
        if value.dtype == dtype or (value.dtype == bool and dtype == np.int8):
            return value  # C keeps truth values in int8
        if dtype.kind in "iu" and value.dtype == INDEX:
            return value
        return self.algebra.cast(value, dtype)

    def value(self, expression: Any, frame: _Frame) -> Any:
        """``expression`` as a number or an expression."""
        return self.translate(expression, frame)

    def condition(self, expression: Any, frame: _Frame) -> Expr:
        """``expression`` as a truth value."""
        value = self.translate(expression, frame)
        if not isinstance(value, Expr):
            return Scalar(bool(value), bool)
        return self.algebra.cast(value, bool)

    def translate(self, expression: Any, frame: _Frame) -> Any:
        if isinstance(expression, int | float | complex | np.generic):
            return expression.item() if isinstance(expression, np.generic) else expression
        kind = type(expression).__name__
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise UnsupportedLoopError(f"{frame.where}: cannot handle {kind} {expression}")
        return handler(self, expression, frame)

    def combine(self, name: str, left: Any, right: Any) -> Any:
        """A binary operation on numbers and expressions, operands brought to one type."""
        if not isinstance(left, Expr) and not isinstance(right, Expr):
            return _NUMBERS[name](left, right)
        a, b = self.promote(left, right)
        return self.algebra.make(name, a, b)

    def promote(self, *values: Any) -> list[Expr]:
        """``values`` as expressions of one type, as C would bring them to it; numbers are weak."""
        types = [v.dtype for v in values if isinstance(v, Expr)]
        numbers = [v for v in values if not isinstance(v, Expr)]
        kinds = {t.kind for t in types}
        if kinds <= {"b"}:
            common: np.dtype[Any] = np.dtype(np.int32)
        elif kinds <= set("iub"):
            wide = [t for t in types if t.kind != "b"]
            common = wide[0] if all(t == wide[0] for t in wide) else INDEX
        else:
            common = np.result_type(*(t for t in types if t.kind in "fc"))
        for number in numbers:
            if isinstance(number, complex) and common.kind != "c":
                common = np.result_type(common, np.complex64)
            elif isinstance(number, float) and common.kind in "iub":
                common = np.dtype(np.float64)
        return [
            self.algebra.cast(v, common) if isinstance(v, Expr) else Scalar(v, common)
            for v in values
        ]

    def variable(self, expression: Any, frame: _Frame) -> Any:
        name = expression.name
        found = frame.inames.get(name)
        if found is not None:
            return found
        if name in frame.variables:
            view = frame.variables[name]
            if view.shape and math.prod(view.shape) == 1:
                zero: tuple[Expr, ...] = tuple([Scalar(0, INDEX)] * len(view.shape))
                where = view.locate(zero) if view.locate is not None else zero
                return self.read(view.array, where, frame)
            return self.read(*self.target(expression, frame), frame)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        raise UnsupportedLoopError(f"{frame.where}: unknown name {name}")

    def subscripted(self, expression: Any, frame: _Frame) -> Any:
        return self.read(*self.target(expression, frame), frame)

    def sum_of(self, expression: Any, frame: _Frame) -> Any:
        return self.fold("add", expression.children, frame)

    def product_of(self, expression: Any, frame: _Frame) -> Any:
        return self.fold("mul", expression.children, frame)

    def fold(self, name: str, children: Sequence[Any], frame: _Frame) -> Any:
        result = self.translate(children[0], frame)
        for child in children[1:]:
            result = self.combine(name, result, self.translate(child, frame))
        return result

    def quotient(self, expression: Any, frame: _Frame) -> Any:
        a, b = (self.translate(e, frame) for e in (expression.numerator, expression.denominator))
        if not isinstance(a, Expr) and not isinstance(b, Expr):
            return a / b
        a, b = self.promote(a, b)
        if a.dtype.kind not in "fc":
            a, b = (self.algebra.cast(x, np.float64) for x in (a, b))
        return self.algebra.make("div", a, b)

    def whole_number(self, name: str, expression: Any, frame: _Frame) -> Any:
        a, b = (self.translate(e, frame) for e in (expression.numerator, expression.denominator))
        if not isinstance(a, Expr) and not isinstance(b, Expr):
            return a // b if name == "floordiv" else a % b
        a, b = self.promote(a, b)
        if a.dtype.kind not in "iu":
            raise UnsupportedLoopError(f"{frame.where}: {expression} is not a division of integers")
        return self.algebra.make(name, a, b)

    def power(self, expression: Any, frame: _Frame) -> Any:
        return self.power_of(
            self.translate(expression.base, frame), self.translate(expression.exponent, frame)
        )

    def power_of(self, base: Any, exponent: Any) -> Any:
        if not isinstance(base, Expr) and not isinstance(exponent, Expr):
            return base**exponent
        if isinstance(exponent, Scalar):
            exponent = exponent.value.item()
        if isinstance(base, Expr) and base.dtype.kind in "fc" and not isinstance(exponent, Expr):
            if exponent == 0.5:
                return self.algebra.make("sqrt", base)
            if exponent == int(exponent.real) and 1 <= abs(exponent) <= 8:
                result = base
                for _ in range(abs(int(exponent.real)) - 1):
                    result = self.algebra.make("mul", result, base)
                if exponent.real < 0:
                    return self.algebra.make("div", Scalar(1, base.dtype), result)
                return result
        a, b = self.promote(base, exponent)
        if a.dtype.kind not in "fc":
            a, b = (self.algebra.cast(x, np.float64) for x in (a, b))
        return self.algebra.make("pow", a, b)

    def conditional(self, expression: Any, frame: _Frame) -> Any:
        condition = self.condition(expression.condition, frame)
        yes, no = (self.translate(e, frame) for e in (expression.then, expression.else_))
        if isinstance(condition, Scalar):
            return yes if condition.value else no
        if not isinstance(yes, Expr) and not isinstance(no, Expr):
            kind = np.result_type(np.asarray(yes).dtype, np.asarray(no).dtype)
            yes, no = Scalar(yes, kind), Scalar(no, kind)
        elif not (isinstance(yes, Expr) and isinstance(no, Expr) and yes.dtype == no.dtype):
            yes, no = self.promote(yes, no)
        return self.algebra.make("select", condition, yes, no)

    def comparison(self, expression: Any, frame: _Frame) -> Any:
        name = _COMPARISONS[str(getattr(expression.operator, "value", expression.operator))]
        return self.combine(
            name, self.translate(expression.left, frame), self.translate(expression.right, frame)
        )

    def logic(self, name: str, expression: Any, frame: _Frame) -> Any:
        values = [self.condition(child, frame) for child in expression.children]
        result = values[0]
        for value in values[1:]:
            result = self.algebra.make(name, result, value)
        return result

    def negation(self, expression: Any, frame: _Frame) -> Any:
        return self.algebra.make("not", self.condition(expression.child, frame))

    def extremum(self, name: str, expression: Any, frame: _Frame) -> Any:
        return self.fold(name, expression.children, frame)

    def type_cast(self, expression: Any, frame: _Frame) -> Any:
        dtype = _dtype(getattr(expression, "_type_info", None) or expression.type)
        value = self.translate(expression.child, frame)
        if dtype is None:
            return value
        return self.typed(value, dtype)

    def annotated(self, expression: Any, frame: _Frame) -> Any:
        return self.translate(expression.child, frame)

    def reduction(self, expression: Any, frame: _Frame) -> Any:
        name = type(expression.operation).__name__
        if name != "SumReductionOperation":
            raise UnsupportedLoopError(f"{frame.where}: reduction {name}")
        extents = extents_of(frame.kernel, frame.where)
        dims = []
        for iname in expression.inames:
            start, extent = extents[iname]
            dim = Dim(iname, extent)
            dims.append(dim)
            frame.inames[iname] = self.algebra.index({IndexOf(dim): 1}, start)
        body = self.translate(expression.expr, frame)
        for iname in expression.inames:
            del frame.inames[iname]
        if not isinstance(body, Expr):
            return body * math.prod(d.extent for d in dims)
        if body.dtype.kind not in "fc":
            body = self.algebra.cast(body, np.float64)
        for dim in dims:
            body = self.sum(body, dim)
        return body

    def function(self, expression: Any, frame: _Frame) -> Any:
        function = expression.function
        name = getattr(function, "name", None)
        if not isinstance(name, str):
            name = getattr(getattr(function, "function", None), "name", str(function))
        operation = _CALLS.get(str(name))
        if operation is None:
            raise UnsupportedLoopError(f"{frame.where}: function {name} is not known")
        values = [self.translate(p, frame) for p in expression.parameters]
        if operation == "pow":
            return self.power_of(*values)
        if operation.startswith("bessel"):
            order, argument = values
            if isinstance(order, Expr):
                raise UnsupportedLoopError(
                    f"{frame.where}: {name} of an order that is not constant"
                )
            (argument,) = self.promote(argument, 0.0)[:1]
            return Op(operation, Scalar(int(order), INDEX), argument)
        if operation in ("min", "max", "atan2"):
            a, b = values
            if not isinstance(a, Expr) and not isinstance(b, Expr):
                a = Scalar(float(a), np.float64)
            a, b = self.promote(a, b)
            return self.algebra.make(operation, a, b)
        (argument,) = values
        if not isinstance(argument, Expr):
            kind = np.complex128 if isinstance(argument, complex) else np.float64
            argument = Scalar(argument, kind)
        elif argument.dtype.kind == "b" or (argument.dtype.kind in "iu" and operation != "abs"):
            argument = self.algebra.cast(argument, np.float64)
        if operation in ("real", "conj") and argument.dtype.kind != "c":
            return argument
        return self.algebra.make(operation, argument)

    # -----------------------------------------------------------------------------------------
    # calls of other kernels

    def call_instruction(self, instruction: Any, frame: _Frame) -> None:
        call = instruction.expression
        function = call.function
        name = getattr(function, "name", None)
        if not isinstance(name, str):
            name = function.function.name
        parameters = list(call.parameters)
        named = dict(getattr(call, "kw_parameters", {}) or {})
        if name in ("inverse", "solve"):
            self.dense(name, instruction.assignees, parameters, frame)
            return
        callee = getattr(self.callables.get(name), "subkernel", None)
        if callee is None:
            raise UnsupportedLoopError(f"{frame.where}: function {name} is not known")
        assignees = list(instruction.assignees)
        prefix = f"{name}.{next(self.counter)}."
        where = f"{frame.where}, called kernel {name}"
        variables: dict[str, _View] = {}
        # loopy's own rule: outputs take the assignees in order, inputs the parameters
        writes, reads = iter(assignees), iter(parameters)
        for formal in callee.args:
            actual = None
            if getattr(formal, "is_output", False):
                actual = next(writes, None)
            if getattr(formal, "is_input", True):
                actual = named.get(formal.name) or next(reads, actual)
            if actual is None:
                raise UnsupportedLoopError(f"{where}: argument {formal.name} is not given")
            variables[formal.name] = self.bind(formal, actual, frame, prefix, where)
        self.call(callee, variables, where, prefix)

    def bind(self, formal: Any, actual: Any, frame: _Frame, prefix: str, where: str) -> _View:
        """The view through which a called kernel sees ``actual``."""
        kind = type(actual).__name__
        try:
            shape = tuple(int(e) for e in getattr(formal, "shape", ()) or ())
        except (TypeError, ValueError):
            raise UnsupportedLoopError(
                f"{where}: argument {formal.name} has shape {formal.shape}"
            ) from None
        if kind == "SubArrayRef":
            return self.sub_array(shape, actual, frame, where)
        if kind == "Variable" and actual.name in frame.variables and shape:
            view = frame.variables[actual.name]
            if math.prod(view.shape) == math.prod(shape):
                return self.reshaped(view, shape)
        if type(formal).__name__ == "ValueArg" or not shape:
            value = self.translate(actual, frame)
            dtype = _dtype(formal.dtype)
            if not isinstance(value, Expr):
                value = Scalar(value, dtype) if dtype is not None else Scalar(value)
            key = f"{prefix}{formal.name}"
            self.arrays[key] = _Array(key, (), value.dtype)
            self.state[key] = _Points(_Zero(value.dtype), object(), {(): value})
            return _View(key, ())
        raise UnsupportedLoopError(f"{where}: cannot pass {actual} as argument {formal.name}")

    def reshaped(self, view: _View, shape: tuple[int, ...]) -> _View:
        if view.shape == shape:
            return view

        def locate(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
            inner = self.unflatten(self.flatten(index, shape), view.shape)
            return view.locate(inner) if view.locate is not None else inner

        return _View(view.array, shape, locate)

    def flatten(self, index: tuple[Expr, ...], shape: tuple[int, ...]) -> Expr:
        flat: Expr = Scalar(0, INDEX)
        for i, extent in zip(index, shape, strict=True):
            flat = self.algebra.make("mul", flat, Scalar(extent, INDEX))
            flat = self.algebra.make("add", flat, i)
        return flat

    def unflatten(self, flat: Expr, shape: tuple[int, ...]) -> tuple[Expr, ...]:
        found: list[Expr] = []
        for extent in reversed(shape[1:]):
            flat, digit = self.algebra.divide(flat, extent)
            found.append(digit)
        return (flat, *reversed(found)) if shape else ()

    def sub_array(self, shape: tuple[int, ...], actual: Any, frame: _Frame, where: str) -> _View:
        swept = [variable.name for variable in actual.swept_inames]
        extents = extents_of(frame.kernel, where)
        box = tuple(extents[iname][1] for iname in swept)
        if not shape:
            shape = box
        if math.prod(shape) > math.prod(box):
            raise UnsupportedLoopError(f"{where}: an argument of shape {shape} is passed {actual}")
        subscript = actual.subscript
        name = subscript.aggregate.name
        view = frame.variables.get(name)
        if view is None:
            raise UnsupportedLoopError(f"{where}: {name} is not a variable of the calling kernel")
        captured = dict(frame.inames)
        known: dict[tuple[Expr, ...], tuple[Expr, ...]] = {}

        def locate(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
            found = known.get(index)
            if found is None:
                values = index
                if shape != box:
                    values = self.unflatten(self.flatten(index, shape), box)
                inames = dict(captured)
                for iname, value in zip(swept, values, strict=True):
                    start = Scalar(extents[iname][0], INDEX)
                    inames[iname] = self.algebra.make("add", value, start)
                inner = _Frame(frame.kernel, frame.variables, inames, frame.where)
                found = tuple([self.subscript(i, inner) for i in subscript.index_tuple])
                if view.locate is not None:
                    found = view.locate(found)
                known[index] = found
            return found

        return _View(view.array, shape, locate)

    def dense(
        self, name: str, assignees: Sequence[Any], parameters: Sequence[Any], frame: _Frame
    ) -> None:
        """``inverse`` and ``solve``, which loopy knows only as functions of LAPACK."""
        from pyop3_mlir.kernels import dense

        where = f"{frame.where}, {name}"
        operands, leading = [], 0
        bodies = []
        for parameter in parameters:
            view = self.sub_array((), parameter, frame, where)
            axes = tuple(Dim(f"m{i}", extent) for i, extent in enumerate(view.shape))
            assert view.locate is not None
            subscripts = view.locate(tuple([IndexOf(axis) for axis in axes]))
            body = self.read(view.array, subscripts, frame)
            bodies.append((axes, body))
            leading |= self.algebra.mask(body) & ~self.algebra.of_dims(axes)
        batch = tuple(d for d in self.algebra.dims(leading) if d.extent >= 0)
        for axes, body in bodies:
            self.define(body, (), (*batch, *axes))
            operands.append(self.definitions[-1].result)
        function: Any = {"inverse": dense.inverse, "solve": dense.solve}[name]
        try:
            statements, result = function(*operands, batch)
        except ValueError as error:
            raise UnsupportedLoopError(f"{where}: {error}") from None
        for statement in statements:
            for temporary, body in zip(statement.results, statement.bodies, strict=True):
                self.definitions.append(
                    _Definition(temporary, statement.dims, statement.reductions, body)
                )
        (assignee,) = assignees
        view = self.sub_array((), assignee, frame, where)
        assert view.locate is not None
        extents = result.shape[len(batch) :]
        axes = tuple(Dim(f"m{i}", extent) for i, extent in enumerate(view.shape))
        at = tuple([IndexOf(axis) for axis in axes])
        inner = self.unflatten(self.flatten(at, view.shape), extents)
        value: Expr = Load(result, (*(IndexOf(d) for d in batch), *inner))
        subscripts = view.locate(at)
        value = self.guard(view.array, subscripts, value, frame, False)
        updated = self.updated(self.state[view.array], axes, subscripts, value, False)
        if isinstance(updated, _Update) and self.covers(view.array, updated):
            updated.base = None
        self.state[view.array] = updated

    # -----------------------------------------------------------------------------------------
    # results

    def pieces(self, argument: KernelArgument) -> list[Piece]:
        """The argument's new value (what is added to it, for INC) as pieces that are summed."""
        value: _Value | None = self.state[argument.name]
        nodes: list[_Update] = []
        simple = True
        while isinstance(value, _Update | _Points):
            if isinstance(value, _Points):
                for entries, add in ((value.added, True), (value.entries, False)):
                    for key, entry in entries.items():
                        subscripts = tuple([Scalar(k, INDEX) for k in key])
                        nodes.append(_Update(None, (), subscripts, entry, add))
            else:
                nodes.append(value)
            value = value.base
        starts_at_zero = value is None or isinstance(value, _Zero)
        touched = np.zeros(argument.size, dtype=bool)
        for update in reversed(nodes):
            locations = self.enumerate(update, (), argument.shape)
            at = None if locations is None else locations.reshape(-1)
            if at is None or (touched[at].any() if not update.add else not starts_at_zero):
                simple = False
                break
            touched[at] = True
        if not simple or not (starts_at_zero or touched.all()):
            return self.replacement(argument)
        pieces = []
        for update in reversed(nodes):
            entry = update.value
            if update.last:
                entry = self.substitute(entry, update.last)
            if isinstance(entry, Scalar) and entry.value == 0:
                continue
            slot = self.flatten(update.subscripts, argument.shape)
            pieces.append(Piece(argument, update.dims, slot, entry))
        return pieces

    def replacement(self, argument: KernelArgument) -> list[Piece]:
        """The whole value of an argument as one piece."""
        value = self.state[argument.name]
        stored = self.materialise(argument.name, value, f"kernel {self.name}")
        axes = tuple(Dim(f"a{i}", extent) for i, extent in enumerate(argument.shape))
        at = tuple([IndexOf(axis) for axis in axes])
        slot = self.flatten(at, argument.shape)
        return [Piece(argument, axes, slot, Load(stored.source, (*stored.leading, *at)))]

    def finish(
        self, name: str, arguments: list[KernelArgument], pieces: list[Piece], whole: set[Source]
    ) -> LocalKernel:
        """The program: each definition handed to the builder, those that others need first."""
        builder = Builder()
        canonical: dict[tuple[int, int], Dim] = {}

        def rename(dims: Sequence[Dim]) -> dict[Dim, Dim]:
            """Common dimensions for all statements, so that equal statements are found."""
            counts: dict[int, int] = {}
            found = {}
            for dim in dims:
                number = counts[dim.extent] = counts.get(dim.extent, -1) + 1
                key = (dim.extent, number)
                if key not in canonical:
                    canonical[key] = builder.register(
                        Dim(f"{'ijklmnopqrst'[len(canonical) % 12]}{dim.extent}", dim.extent)
                    )
                found[dim] = canonical[key]
            return found

        by_result: dict[Source, _Definition] = {d.result: d for d in self.definitions}
        results: dict[Source, tuple[tuple[Dim, ...], Expr]] = {}
        bodies: dict[Source, tuple[tuple[Dim, ...], Expr]] = {}
        numbers: dict[Expr, int] = {}

        def rewrite(body: Expr, names: dict[Dim, Dim]) -> Expr:
            known: dict[Expr, Expr] = {}
            for node in postorder([body]):
                children = [known[child] for child in node.children]
                match node:
                    case IndexOf():
                        known[node] = IndexOf(names[node.dim])
                    case Load(source=Temporary()):
                        dims, value = results[node.source]
                        moved = {
                            dim: child
                            for dim, child in zip(dims, children, strict=True)
                            if child is not IndexOf(dim)
                        }
                        known[node] = builder.substitute(value, moved) if moved else value
                    case Load():
                        known[node] = builder.load(node.source, children)
                    case Op():
                        dtype = None if node.dtype.kind == "b" else node.dtype
                        known[node] = builder.op(node.name, *children, dtype=dtype)
                    case _:
                        known[node] = node
            return known[body]

        def settle(definition: _Definition) -> None:
            names = rename((*definition.dims, *definition.reductions))
            body = rewrite(definition.body, names)
            dims = tuple(names[d] for d in definition.dims)
            over = tuple(names[d] for d in definition.reductions)
            if is_system(body):
                value = builder.define(body, dims, over)
            elif over:
                value = Separation(builder, bodies, over, numbers).reduce(body)
            elif isinstance(body, Load | Scalar) or definition.result in inlined:
                value = body
            else:
                value = builder.define(body, builder.order(builder.dims(body)))
                assert isinstance(value, Load)
                bodies[value.source] = (builder.definitions[value.source].dims, body)
            results[definition.result] = (dims, value)

        inlined = self.same_nest(pieces, by_result)
        for piece in pieces:
            stack = [s for s in _sources(piece.value) if s in by_result]
            while stack:
                result = stack[-1]
                if result in results:
                    stack.pop()
                    continue
                definition = by_result[result]
                needed = [
                    s for s in _sources(definition.body) if s in by_result and s not in results
                ]
                if needed:
                    stack.extend(needed)
                    continue
                settle(definition)
                stack.pop()
        finished = []
        for piece in pieces:
            # in the order that definitions have: their temporaries are then put out as they are
            ordered = self.algebra.dims(self.algebra.of_dims(piece.dims))
            names = rename(ordered)
            value = rewrite(piece.value, names)
            if value.dtype != piece.argument.dtype:
                value = builder.op("cast", value, dtype=piece.argument.dtype)
            slot = rewrite(piece.slot, names)
            finished.append(Piece(piece.argument, tuple(names[d] for d in piece.dims), slot, value))
        return builder.finish(name, arguments, finished, whole)  # type: ignore[arg-type]

    def same_nest(
        self, pieces: list[Piece], by_result: Mapping[Source, _Definition]
    ) -> set[Source]:
        """Definitions that are needed only in loop nests of just their own dimensions.

        There they need no temporary. The builder makes one where several nests share the work.
        """
        found: set[Source] = {d.result for d in self.definitions if not d.reductions}
        done: set[Source] = set()
        consumers: list[tuple[Expr, frozenset[Dim]]] = [
            (piece.value, frozenset(piece.dims)) for piece in pieces
        ]
        while consumers:
            body, scope = consumers.pop()
            for node in postorder([body]):
                if not isinstance(node, Load) or node.source not in by_result:
                    continue
                used = by_result[node.source]
                whole = tuple([IndexOf(d) for d in used.dims])
                if node.children != whole or frozenset(used.dims) != scope:
                    found.discard(used.result)
                if used.result not in done:
                    done.add(used.result)
                    consumers.append((used.body, frozenset((*used.dims, *used.reductions))))
        return found


_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min": min,
    "max": max,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}

_HANDLERS: dict[str, Callable[[_Importer, Any, _Frame], Any]] = {
    "Variable": _Importer.variable,
    "TaggedVariable": _Importer.variable,
    "Subscript": _Importer.subscripted,
    "Sum": _Importer.sum_of,
    "Product": _Importer.product_of,
    "Quotient": _Importer.quotient,
    "FloorDiv": lambda self, e, f: self.whole_number("floordiv", e, f),
    "Remainder": lambda self, e, f: self.whole_number("rem", e, f),
    "Power": _Importer.power,
    "If": _Importer.conditional,
    "Comparison": _Importer.comparison,
    "LogicalAnd": lambda self, e, f: self.logic("and", e, f),
    "LogicalOr": lambda self, e, f: self.logic("or", e, f),
    "LogicalNot": _Importer.negation,
    "Min": lambda self, e, f: self.extremum("min", e, f),
    "Max": lambda self, e, f: self.extremum("max", e, f),
    "Call": _Importer.function,
    "TypeCast": _Importer.type_cast,
    "TypeAnnotation": _Importer.annotated,
    "Reduction": _Importer.reduction,
}


def _dtype(loopy_type: Any) -> np.dtype[Any] | None:
    """Numpy's type of a loopy type, or None where it is not known yet."""
    numpy_dtype = getattr(loopy_type, "numpy_dtype", loopy_type)
    if isinstance(numpy_dtype, np.dtype):
        return numpy_dtype
    try:
        return (
            np.dtype(numpy_dtype) if isinstance(numpy_dtype, str | type) and numpy_dtype else None
        )
    except TypeError:
        return None


def _without_addend(expression: Any, assignee: Any) -> Any:
    """The rest of a sum of which ``assignee`` is one addend, or None."""
    if type(expression).__name__ != "Sum":
        return None
    children = list(expression.children)
    if assignee not in children:
        return None
    children.remove(assignee)
    name = getattr(getattr(assignee, "aggregate", assignee), "name", None)
    if any(_mentions(child, name) for child in children):
        return None
    if len(children) == 1:
        return children[0]
    return type(expression)(tuple(children))


def _mentions(expression: Any, name: str | None) -> bool:
    from loopy.symbolic import get_dependencies

    if isinstance(expression, int | float | complex | np.generic):
        return False
    match type(expression).__name__:
        case "Variable":
            return bool(expression.name == name)
        case "Subscript":
            parts: Iterable[Any] = (expression.aggregate, *expression.index_tuple)
        case "Sum" | "Product":
            parts = expression.children
        case _:
            return name in get_dependencies(expression)
    return any(_mentions(part, name) for part in parts)


def _constants(subscripts: tuple[Expr, ...]) -> tuple[int, ...]:
    return tuple([int(s.value) for s in subscripts if isinstance(s, Scalar)])


def _reaches_entry(value: _Value | None) -> bool:
    while isinstance(value, _Points | _Update):
        value = value.base
    return isinstance(value, _Entry)


def _sources(expression: Expr) -> Iterator[Source]:
    seen: set[Expr] = set()
    stack = [expression]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Load):
            yield node.source
        stack.extend(node.children)

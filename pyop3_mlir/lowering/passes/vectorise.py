"""From linalg on memrefs to loops over vectors, one lane a cell.

Every value of a body is one of three: *uniform* (the same for each cell: a scalar), a *vector* of
the block's cells, or *lanes*, one scalar for each cell. Index arithmetic and addresses stay scalar,
so a gather is W scalar loads that become one vector, which is what compilers turn them into anyway
on machines with slow gather instructions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from xdsl.context import Context
from xdsl.dialects import arith, func, memref, scf, vector
from xdsl.dialects.builtin import (
    ComplexType,
    DenseArrayBase,
    DenseIntOrFPElementsAttr,
    Float32Type,
    Float64Type,
    FloatAttr,
    IndexType,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    VectorType,
    i64,
)
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.dialects.linalg.ops import IndexOp as LinalgIndexOp
from xdsl.dialects.linalg.ops import YieldOp as LinalgYieldOp
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.ir.affine import (
    AffineBinaryOpExpr,
    AffineBinaryOpKind,
    AffineConstantExpr,
    AffineDimExpr,
    AffineExpr,
)
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.dialects.arith import VectorCmpfOp, VectorCmpiOp, VectorSelectOp
from pyop3_mlir.lowering.dialects.linalg import FillOp
from pyop3_mlir.lowering.dialects.vector import FromElementsOp
from pyop3_mlir.lowering.emit import CONTRACT, Emitter, IndexLike, functions_of
from pyop3_mlir.lowering.symmetry import Dense, Folded, factorise

__all__ = ["VectorisePass"]


@dataclass(frozen=True)
class VectorisePass(ModulePass):
    """Turn every ``linalg`` operation into ``scf`` loops with scalar and vector bodies.

    Needs what ``bufferise`` leaves: inside the loop over blocks the last dimension of an operation
    is the block's cells, outside of it there is none. Leaves no linalg operation.

    Parameters
    ----------
    tile
        Accumulators that a contraction holds in registers at the same time.
    unroll
        Reduction loops are unrolled by this factor, and pointwise loop nests of at most four times
        as many points completely.
    """

    name = "vectorise"

    tile: int = 4
    unroll: int = 4

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function in place."""
        for function in functions_of(op):
            if _on_memrefs(function):
                constants = _Constants(op)
                entry = Emitter(InsertPoint.at_start(function.body.block))
                nests = [inner for inner in function.walk() if isinstance(inner, GenericOp)]
                for nest in nests:
                    _Nest(nest, constants, self.tile, self.unroll, entry).lower()
                for inner in list(function.walk()):
                    if isinstance(inner, FillOp):
                        _fill(inner, entry)


def _on_memrefs(function: func.FuncOp) -> bool:
    return any(isinstance(a.type, MemRefType) for a in function.body.block.args)


@dataclass(frozen=True)
class _Vector:
    """A value of each cell of the block, as one vector."""

    value: SSAValue


@dataclass(frozen=True)
class _Lanes:
    """A value of each cell of the block, as scalars; a shared offset is added when used."""

    values: tuple[SSAValue, ...]
    offset: int = 0


class _LaneNumbers(_Lanes):
    """The number of each cell in the block."""


@dataclass(frozen=True)
class _Gather:
    """An element of a flat buffer for each cell of the block, not loaded yet."""

    source: SSAValue
    addresses: _Lanes


@dataclass(frozen=True)
class _Constant:
    """A uniform number that is known now, such as an entry of a table at known indices."""

    value: Any
    type: Attribute


_Value = SSAValue | _Vector | _Lanes | _Gather | _Constant


def _is_float(type: Attribute) -> bool:
    return isinstance(type, Float32Type | Float64Type)


def _element(value: _Value) -> Attribute:
    if isinstance(value, _Constant):
        return value.type
    if isinstance(value, _Vector):
        assert isinstance(value.value.type, VectorType)
        return cast(Attribute, value.value.type.element_type)
    if isinstance(value, _Gather):
        assert isinstance(value.source.type, MemRefType)
        return cast(Attribute, value.source.type.element_type)
    return (value.values[0] if isinstance(value, _Lanes) else value).type


def _fill(op: FillOp, entry: Emitter) -> None:
    """A fill that no contraction has taken over."""
    target = op.outputs[0]
    assert isinstance(target.type, MemRefType)
    e = Emitter(InsertPoint.before(op), entry)

    def nest(e: Emitter, indices: list[SSAValue], shape: Sequence[int]) -> None:
        if not shape:
            e.insert(memref.StoreOp.get(op.inputs[0], target, indices))
            return

        def body(inner: Emitter, i: SSAValue, _: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
            nest(inner, [*indices, i], shape[1:])
            return ()

        e.for_loop(0, shape[0], 1, (), body)

    nest(e, [], target.type.get_shape())
    op.detach()
    op.erase()


class _Constants:
    """Contents of the module's constant globals."""

    def __init__(self, module: ModuleOp) -> None:
        self._tables: dict[str, npt.NDArray[np.float64]] = {}
        for op in module.ops:
            if isinstance(op, memref.GlobalOp) and isinstance(op.type, MemRefType):
                value = op.initial_value
                if _is_float(op.type.element_type) and isinstance(value, DenseIntOrFPElementsAttr):
                    flat = np.array(list(value.get_values()), np.float64)
                    shape = op.type.get_shape()
                    size = math.prod(shape)
                    flat = flat if flat.size == size else np.broadcast_to(flat, size)
                    self._tables[op.sym_name.data] = flat.reshape(shape)

    def entry(self, source: SSAValue, indices: Sequence[IndexLike]) -> _Constant | None:
        """What all entries at these indices are, where that is known.

        Zero is also known where an index is not, but all entries that it can reach are zero.
        """
        owner = source.owner
        if not isinstance(owner, memref.GetGlobalOp):
            return None
        table = self._tables.get(owner.name_.root_reference.data)
        if table is None:
            return None
        part = table[tuple(i if isinstance(i, int) else slice(None) for i in indices)]
        assert isinstance(source.type, MemRefType)
        if part.ndim == 0:
            return _Constant(float(part), source.type.element_type)
        return None if part.any() else _Constant(0.0, source.type.element_type)


class _Nest:
    """The loop nest of one linalg.generic."""

    def __init__(
        self, op: GenericOp, constants: _Constants, tile: int, unroll: int, entry: Emitter
    ) -> None:
        self.op = op
        self.entry = entry
        self.constants = constants
        self.memo: dict[Emitter, dict[Any, SSAValue]] = {}
        self.unroll = unroll
        self.maps = [m.data for m in op.indexing_maps]
        self.inputs = list(op.inputs)
        self.outputs = list(op.outputs)
        kinds = [kind.data for kind in op.iterator_types]
        # operations that vary with the cell stand in the loop over blocks
        self.varying = isinstance(op.parent_op(), scf.ForOp)
        self.rank = len(kinds)
        self.extents = self._find_extents()
        self.width = self.extents[-1] if self.varying else 1
        inner = self.rank - self.varying
        self.parallel = [d for d in range(inner) if kinds[d] == IteratorType.PARALLEL]
        self.reductions = [d for d in range(inner) if kinds[d] == IteratorType.REDUCTION]
        self.tile = max(1, tile // len(self.outputs))
        body = op.body.block
        types = [*(a.type for a in body.args), *(r.type for o in body.ops for r in o.results)]
        # there are no vectors of complex numbers: their lanes are a loop
        has_complex = any(isinstance(type_, ComplexType) for type_ in types)
        self.scalar = not self.varying or self.width == 1 or has_complex

    def _find_extents(self) -> list[int]:
        extents = [0] * self.rank
        for operand, affine in zip((*self.inputs, *self.outputs), self.maps, strict=True):
            shape = operand.type.get_shape()  # type: ignore[attr-defined]
            for result, extent in zip(affine.results, shape, strict=True):
                if isinstance(result, AffineDimExpr):
                    extents[result.position] = extent
        return extents

    def lower(self) -> None:
        """Replace the operation by loops."""
        # accumulation starts from zero where the operation before fills the outputs
        self.fills = [self._fill_of(output) for output in self.outputs]
        self.initial = [fill.inputs[0] if fill is not None else None for fill in self.fills]
        e = Emitter(InsertPoint.before(self.op), self.entry)
        self.lane: IndexLike | None = None
        if not self._apply_table(e):
            self._parallel(e, {}, self._order())
        self.op.detach()
        self.op.erase()
        # results that are stacked on each other are cleared by one
        for fill in dict.fromkeys(self.fills):
            if fill is not None:
                fill.detach()
                fill.erase()

    def _fill_of(self, output: SSAValue) -> FillOp | None:
        if not self.reductions:
            return None
        op = self.op.prev_op
        while op is not None:
            if isinstance(op, FillOp) and op.outputs[0] is output:
                return op
            if any(output in inner.operands for inner in op.walk()):
                return None
            op = op.prev_op
        return None

    def _order(self) -> list[int]:
        """The parallel dimensions, outermost first.

        The last one is worked on in tiles: for contractions that on which the fewest of the values
        depend that vary over cells, so that these are loaded once for all rows of a tile.
        """
        if not self.reductions or len(self.parallel) < 2:
            return list(self.parallel)
        loads = {
            d: sum(
                self.rank - 1 in used and d in used
                for used in (affine.used_dims() for affine in self.maps[: len(self.inputs)])
            )
            for d in self.parallel
        }
        last = min(reversed(self.parallel), key=lambda d: loads[d])
        return [*(d for d in self.parallel if d != last), last]

    # one constant table

    def _apply_table(self, e: Emitter) -> bool:
        """Emit a contraction with known tables as straight code, if symmetries make it cheaper."""
        elements = {o.type.element_type for o in self.outputs}  # type: ignore[attr-defined]
        if (
            self.scalar
            or not self.reductions
            or math.prod(self.extents[d] for d in self.reductions) > self.unroll
            or len(elements) != 1
        ):
            return False
        (element,) = elements
        if not _is_float(element):
            return False
        points, terms = self._every(self.parallel), self._every(self.reductions)
        if len(points) * len(terms) > _LONGEST:
            return False
        found = self._table(e, points, terms)
        if found is None:
            return False
        columns, table = found
        if np.count_nonzero(table) > _LONGEST or isinstance(factored := factorise(table), Dense):
            return False
        vectors = [
            e.insert(
                vector.LoadOp(
                    source,
                    [e.index(i) for i in (*indices, 0)],
                    VectorType(element, [self.width]),
                )
            )
            for source, indices in columns
        ]
        rows = iter(_Product(e).apply(factored, vectors))
        for point in points:
            values: list[_Value] = []
            for k in range(len(self.outputs)):
                value = next(rows)
                initial = self.initial[k]
                if initial is None or not _is_zero(initial):
                    start = self._start(e, k, point)
                    value = start if value is None else e.insert(_sum(start, value))
                elif value is None:
                    value = self._vector(e, initial).value
                values.append(_Vector(value))
            self._store(e, point, values)
        return True

    def _every(self, dims: Sequence[int]) -> list[dict[int, IndexLike]]:
        """All indices of some dimensions."""
        every = _points([self.extents[d] for d in dims])
        return [dict(zip(dims, point, strict=True)) for point in every]

    def _table(
        self,
        e: Emitter,
        points: Sequence[dict[int, IndexLike]],
        terms: Sequence[dict[int, IndexLike]],
    ) -> tuple[list[_Column], npt.NDArray[np.float64]] | None:
        """The contraction as a table of constants, ``[points and outputs, columns]``."""
        columns: dict[_Column, int] = {}
        entries: dict[tuple[int, int], float] = {}
        for number, point in enumerate(points):
            for term in terms:
                bodies = self._linear(e, {**point, **term})
                if bodies is None:
                    return None
                for k, body in enumerate(bodies):
                    for column, factor in body.items():
                        key = (
                            number * len(self.outputs) + k,
                            columns.setdefault(column, len(columns)),
                        )
                        entries[key] = entries.get(key, 0.0) + factor
        table = np.zeros((len(points) * len(self.outputs), len(columns)))
        for key, value in entries.items():
            table[key] = value
        return list(columns), table

    def _linear(self, e: Emitter, point: dict[int, IndexLike]) -> list[_Linear] | None:
        """What the bodies add to the outputs, if it is linear with constant coefficients."""
        values: dict[SSAValue, _Linear | float] = {}
        for number, argument in enumerate(self.op.body.block.args):
            if not argument.uses:
                continue
            if number >= len(self.inputs):
                # the sum so far
                values[argument] = {}
                continue
            addresses, lanes = self._addresses(e, number, point)
            source = self.inputs[number]
            if lanes and all(isinstance(i, int) for i in addresses):
                values[argument] = {(source, tuple(cast(list[int], addresses))): 1.0}
                continue
            known = None if lanes else self.constants.entry(source, addresses)
            if known is None or not _is_float(known.type):
                return None
            values[argument] = known.value
        for op in self.op.body.block.ops:
            if isinstance(op, LinalgYieldOp):
                results = [values.get(v) for v in op.operands]
                if all(isinstance(r, dict) for r in results):
                    return cast(list[_Linear], results)
                return None
            value = _evaluate(op, [values.get(v) for v in op.operands])
            if value is None:
                return None
            values[op.results[0]] = value
        return None

    # loops

    def _parallel(self, e: Emitter, indices: dict[int, IndexLike], dims: list[int]) -> None:
        """Loops over the parallel dimensions, the last one in tiles of rows."""
        points = 1
        for d in dims:
            points *= self.extents[d]
        if points == 0:
            return
        # a long body stays in its loop: straight code is to fit into the instruction cache
        limit = min(4 * self.unroll, 64 * self.unroll // len(self.op.body.block.ops))
        if not self.reductions and points <= max(limit, 1):
            every = _points([self.extents[d] for d in dims])
            self._lanes(e, [{**indices, **dict(zip(dims, p, strict=True))} for p in every])
            return
        if not dims:
            self._lanes(e, [indices])
            return
        d, rest = dims[0], dims[1:]
        extent = self.extents[d]
        if rest:

            def outer(inner: Emitter, i: SSAValue, _: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
                self._parallel(inner, {**indices, d: i}, rest)
                return ()

            e.for_loop(0, extent, 1, (), outer)
            return
        tile = min(self.tile, extent) if self.reductions else 1
        whole = extent - extent % tile

        def rows(inner: Emitter, start: IndexLike, count: int) -> None:
            self._lanes(inner, [{**indices, d: inner.add(start, t)} for t in range(count)])

        def body(inner: Emitter, i: SSAValue, _: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
            rows(inner, i, tile)
            return ()

        if whole == tile:
            rows(e, 0, tile)
        elif whole:
            e.for_loop(0, whole, tile, (), body)
        if whole < extent:
            rows(e, whole, extent - whole)

    def _lanes(self, e: Emitter, points: list[dict[int, IndexLike]]) -> None:
        """The lanes: of a vector, or a loop where there are no vectors of the type."""
        self.lane = None
        if not self.scalar:
            self._rows(e, points)
        elif self.width == 1:
            self.lane = 0
            self._rows(e, points)
        else:

            def body(inner: Emitter, lane: SSAValue, _: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
                self.lane = lane
                self._rows(inner, points)
                return ()

            e.for_loop(0, self.width, 1, (), body)

    def _rows(self, e: Emitter, points: list[dict[int, IndexLike]]) -> None:
        """Accumulate or evaluate all outputs at ``points`` and store them."""
        if not self.reductions:
            values = [self._body(e, point, None) for point in points]
            for point, results in zip(points, self._load_together(e, values), strict=True):
                self._store(e, point, results)
            return
        start = [self._start(e, k, p) for p in points for k in range(len(self.outputs))]
        final = self._reduce(e, points, start, list(self.reductions))
        n = len(self.outputs)
        for number, point in enumerate(points):
            self._store(e, point, [self._wrap(v) for v in final[number * n : (number + 1) * n]])

    def _wrap(self, value: SSAValue) -> _Value:
        return _Vector(value) if isinstance(value.type, VectorType) else value

    def _start(self, e: Emitter, output: int, point: dict[int, IndexLike]) -> SSAValue:
        """The initial accumulator of one output at one point."""
        initial = self.initial[output]
        element = self.outputs[output].type.element_type  # type: ignore[attr-defined]
        if initial is not None:
            if self.scalar:
                return initial
            return self._vector(e, initial).value
        value = self._read(e, len(self.inputs) + output, point)
        if self.scalar or not _is_float(element):
            return self._scalar(e, value)
        return self._vector(e, value).value

    def _reduce(
        self,
        e: Emitter,
        points: list[dict[int, IndexLike]],
        carried: Sequence[SSAValue],
        dims: list[int],
    ) -> Sequence[SSAValue]:
        """Loops over the reduction dimensions, the innermost unrolled."""
        n = len(self.outputs)

        def step(
            inner: Emitter, state: Sequence[SSAValue], indices: dict[int, IndexLike]
        ) -> list[SSAValue]:
            new: list[SSAValue] = []
            for number, point in enumerate(points):
                accumulators = [self._wrap(v) for v in state[number * n : (number + 1) * n]]
                results = self._body(inner, {**point, **indices}, accumulators)
                new += [
                    self._accumulator(inner, r, a)
                    for r, a in zip(results, state[number * n :], strict=False)
                ]
            return new

        def nest(
            inner: Emitter,
            state: Sequence[SSAValue],
            indices: dict[int, IndexLike],
            left: list[int],
        ) -> Sequence[SSAValue]:
            total = 1
            for d in left:
                total *= self.extents[d]
            if total <= self.unroll:
                for point in _points([self.extents[d] for d in left]):
                    state = step(inner, state, {**indices, **dict(zip(left, point, strict=True))})
                return state
            d, rest = left[0], left[1:]
            extent = self.extents[d]
            factor = 1 if rest else min(self.unroll, extent)
            whole = extent - extent % factor

            def body(
                deeper: Emitter, i: SSAValue, args: tuple[SSAValue, ...]
            ) -> Sequence[SSAValue]:
                now: Sequence[SSAValue] = args
                for u in range(factor):
                    now = nest(deeper, now, {**indices, d: deeper.add(i, u)}, rest)
                return now

            state = inner.for_loop(0, whole, factor, state, body)
            for i in range(whole, extent):
                state = nest(inner, state, {**indices, d: i}, rest)
            return state

        return nest(e, carried, {}, dims)

    def _accumulator(self, e: Emitter, value: _Value, like: SSAValue) -> SSAValue:
        if isinstance(like.type, VectorType):
            return self._vector(e, value).value
        return self._scalar(e, value)

    # values

    def _once(self, e: Emitter, op: Operation) -> SSAValue:
        """Insert an operation without side effects, unless there is the same one already."""
        properties = tuple(sorted(op.properties.items(), key=lambda item: item[0]))
        key = (type(op), tuple(op.operands), op.results[0].type, properties)
        known = self.memo.setdefault(e, {})
        if key not in known:
            known[key] = e.insert(op)
        return known[key]

    def _load_together(self, e: Emitter, points: list[list[_Value]]) -> list[list[_Value]]:
        """Load components that are neighbours in memory two at a time, then sort them by component.

        Half as many loads, and fewer shuffles than for components one by one.
        """
        width = self.width
        if self.scalar or width & (width - 1):
            return points
        found: dict[tuple[SSAValue, tuple[SSAValue, ...]], dict[int, list[tuple[int, int]]]] = {}
        for number, values in enumerate(points):
            for k, value in enumerate(values):
                if isinstance(value, _Gather):
                    key = (value.source, value.addresses.values)
                    where = found.setdefault(key, {}).setdefault(value.addresses.offset, [])
                    where.append((number, k))
        result = [list(values) for values in points]
        for (source, bases), offsets in found.items():
            left = sorted(offsets)
            while left:
                first = left.pop(0)
                if not left or left[0] != first + 1:
                    continue
                second = left.pop(0)
                pair = self._load_pairs(e, source, _Lanes(bases, first))
                for offset, vector_value in zip((first, second), pair, strict=True):
                    for number, k in offsets[offset]:
                        result[number][k] = vector_value
        return result

    def _load_pairs(
        self, e: Emitter, source: SSAValue, addresses: _Lanes
    ) -> tuple[_Vector, _Vector]:
        """Elements ``a`` and ``a + 1`` of each lane as two vectors."""
        element = _element(_Gather(source, addresses))
        pairs = [
            e.insert(vector.LoadOp(source, [a], VectorType(element, [2])))
            for a in self._scalars(e, addresses)
        ]
        while len(pairs) > 2:
            pairs = [_shuffle(e, a, b, range(2 * _length(a))) for a, b in _couples(pairs)]
        a, b = pairs
        total = 2 * _length(a)
        even, odd = (_shuffle(e, a, b, range(start, total, 2)) for start in (0, 1))
        return _Vector(even), _Vector(odd)

    def _scalar(self, e: Emitter, value: _Value) -> SSAValue:
        """A uniform value as an SSA value."""
        if isinstance(value, _Constant):
            return e.constant(value.value, value.type)
        assert isinstance(value, SSAValue)
        return value

    def _vector(self, e: Emitter, value: _Value) -> _Vector:
        """Any value as a vector."""
        if isinstance(value, _Vector):
            return value
        if isinstance(value, _Lanes | _Gather):
            return _Vector(e.insert(FromElementsOp(self._scalars(e, value))))
        value = self._scalar(e, value)
        type = VectorType(value.type, [self.width])
        return _Vector(e.insert(vector.BroadcastOp(value, type)))

    def _scalars(self, e: Emitter, value: _Value) -> tuple[SSAValue, ...]:
        """Any value as one scalar for each lane."""
        if isinstance(value, _Lanes):
            if not value.offset:
                return value.values
            offset = e.constant(value.offset, IndexType())
            return tuple(self._once(e, arith.AddiOp(v, offset)) for v in value.values)
        if isinstance(value, _Gather):
            addresses = self._scalars(e, value.addresses)
            return tuple(e.insert(memref.LoadOp.get(value.source, [a])) for a in addresses)
        if isinstance(value, _Vector):
            element = _element(value)
            return tuple(
                e.insert(vector.ExtractOp(value.value, [lane], element))
                for lane in range(self.width)
            )
        return (self._scalar(e, value),) * self.width

    def _addresses(
        self, e: Emitter, operand: int, point: dict[int, IndexLike]
    ) -> tuple[list[IndexLike], bool]:
        """Indices of an operand at a point, without the lane, and whether it has lanes."""
        results = list(self.maps[operand].results)
        lanes = bool(
            self.varying
            and results
            and isinstance(results[-1], AffineDimExpr)
            and results[-1].position == self.rank - 1
        )
        if lanes:
            results.pop()
        return [_affine(e, result, point) for result in results], lanes

    def _read(self, e: Emitter, operand: int, point: dict[int, IndexLike]) -> _Value:
        """An operand at a point."""
        source = (*self.inputs, *self.outputs)[operand]
        assert isinstance(source.type, MemRefType)
        addresses, lanes = self._addresses(e, operand, point)
        if not lanes:
            known = self.constants.entry(source, addresses)
            if known is not None:
                return known
        indices = [e.index(i) for i in addresses]
        if not lanes:
            return e.insert(memref.LoadOp.get(source, indices))
        if self.lane is not None:
            return e.insert(memref.LoadOp.get(source, [*indices, e.index(self.lane)]))
        element = source.type.element_type
        if _is_float(element):
            type = VectorType(element, [self.width])
            return _Vector(e.insert(vector.LoadOp(source, [*indices, e.index(0)], type)))
        return _Lanes(
            tuple(
                e.insert(memref.LoadOp.get(source, [*indices, e.index(lane)]))
                for lane in range(self.width)
            )
        )

    def _store(self, e: Emitter, point: dict[int, IndexLike], values: Sequence[_Value]) -> None:
        """Write all outputs at a point."""
        for k, value in enumerate(values):
            target = self.outputs[k]
            assert isinstance(target.type, MemRefType)
            addresses, lanes = self._addresses(e, len(self.inputs) + k, point)
            indices = [e.index(i) for i in addresses]
            if not lanes or self.lane is not None:
                if lanes:
                    assert self.lane is not None
                    indices.append(e.index(self.lane))
                e.insert(memref.StoreOp.get(self._scalar(e, value), target, indices))
            elif _is_float(target.type.element_type):
                vectors = self._vector(e, value).value
                e.insert(vector.StoreOp(vectors, target, [*indices, e.index(0)]))
            else:
                for lane, scalar in enumerate(self._scalars(e, value)):
                    e.insert(memref.StoreOp.get(scalar, target, [*indices, e.index(lane)]))

    def _body(
        self, e: Emitter, point: dict[int, IndexLike], accumulators: Sequence[_Value] | None
    ) -> list[_Value]:
        """The operation's body at one point, which has an index for each dimension but the lane."""
        block = self.op.body.block
        values: dict[SSAValue, _Value] = {}
        for number, argument in enumerate(block.args):
            if not argument.uses:
                continue
            output = number - len(self.inputs)
            if output >= 0 and accumulators is not None:
                values[argument] = accumulators[output]
            else:
                values[argument] = self._read(e, number, point)
        for op in block.ops:
            if isinstance(op, LinalgYieldOp):
                return [values.get(v, v) for v in op.operands]
            if isinstance(op, LinalgIndexOp):
                values[op.result] = self._index(e, op.dim.value.data, point)
            else:
                operands = [values.get(v, v) for v in op.operands]
                values[op.results[0]] = self._operation(e, op, operands)
        raise AssertionError("linalg.generic without linalg.yield")

    def _simplify(self, e: Emitter, op: Operation, operands: Sequence[_Value]) -> _Value | None:
        """Products and sums with table entries that are 0, 1 or -1.

        Tables of finite elements are full of them; GEM drops those that it sees in the same way.
        """
        if isinstance(op, arith.ConstantOp) and isinstance(op.value, IntegerAttr | FloatAttr):
            return _Constant(op.value.value.data, op.result.type)
        if isinstance(op, arith.IndexCastOp) and isinstance(operands[0], _Constant):
            return _Constant(operands[0].value, op.result.type)
        if len(operands) != 2 or not any(isinstance(v, _Constant) for v in operands):
            return None
        left, right = operands
        if type(op) in _FOLD and isinstance(left, _Constant) and isinstance(right, _Constant):
            return _Constant(_FOLD[type(op)](left.value, right.value), op.results[0].type)
        if isinstance(op, arith.AddiOp):
            for shift, other in ((left, right), (right, left)):
                if (
                    isinstance(shift, _Constant)
                    and isinstance(other, _Lanes)
                    and isinstance(shift.type, IndexType)
                ):
                    return _Lanes(other.values, other.offset + shift.value)
        a = left.value if isinstance(left, _Constant) else None
        b = right.value if isinstance(right, _Constant) else None
        if isinstance(op, arith.MulfOp):
            if a is not None and b is not None:
                return _Constant(a * b, _element(left))
            if a == 0 or b == 0:
                return _Constant(0.0, _element(left))
            for factor, other in ((a, right), (b, left)):
                if factor == 1:
                    return other
                if factor == -1:
                    return self._operation(e, arith.NegfOp(op.operands[0]), [other])
        if isinstance(op, arith.AddfOp):
            if a == 0:
                return right
            if b == 0:
                return left
        if isinstance(op, arith.SubfOp):
            if b == 0:
                return left
            if a == 0:
                return self._operation(e, arith.NegfOp(op.operands[0]), [right])
        return None

    def _index(self, e: Emitter, dim: int, point: dict[int, IndexLike]) -> _Value:
        if not self.varying or dim < self.rank - 1:
            index = point[dim]
            return index if isinstance(index, SSAValue) else _Constant(index, IndexType())
        if self.lane is not None:
            return e.index(self.lane)
        return _LaneNumbers(tuple(e.index(lane) for lane in range(self.width)))

    def _choose(self, e: Emitter, operands: Sequence[_Value]) -> _Value | None:
        """An entry of a known table whose position on a short axis differs from lane to lane.

        The number of a facet is such a position. None where the load is anything else.
        """
        source, *indices = operands
        varying = [axis for axis, index in enumerate(indices) if isinstance(index, _Lanes)]
        if self.scalar or len(varying) != 1 or not isinstance(source, SSAValue):
            return None
        (axis,) = varying
        assert isinstance(source.type, MemRefType)
        extent = source.type.get_shape()[axis]
        fixed = [index.value for index in indices if isinstance(index, _Constant)]
        if len(fixed) != len(indices) - 1 or not 0 < extent <= _CHOICES:
            return None
        entries = [
            self.constants.entry(source, [*fixed[:axis], k, *fixed[axis:]]) for k in range(extent)
        ]
        known = [entry for entry in entries if entry is not None]
        if len(known) < extent:
            return None
        last = known[-1]
        if all(entry.value == last.value for entry in known):
            return last
        lanes = cast(_Lanes, indices[axis])
        numbers = self._once(
            e, FromElementsOp([self._once(e, arith.IndexCastOp(v, i64)) for v in lanes.values])
        )
        result = self._vector(e, last).value
        for k, entry in enumerate(known[:-1]):
            if entry.value != last.value:
                number = e.constant(k - lanes.offset, i64)
                same = self._once(e, vector.BroadcastOp(number, VectorType(i64, [self.width])))
                equal = arith.CmpiOp(numbers, same, "eq")
                here = self._once(e, _copy(equal, [numbers, same], self.width))
                result = e.insert(
                    VectorSelectOp.create(
                        operands=[here, self._vector(e, entry).value, result],
                        result_types=[result.type],
                    )
                )
        return _Vector(result)

    def _operation(self, e: Emitter, op: Operation, operands: Sequence[_Value]) -> _Value:
        """One scalar operation of the body on whatever its operands are."""
        simple = self._simplify(e, op, operands)
        if simple is not None:
            return simple
        if all(isinstance(v, SSAValue | _Constant) for v in operands):
            return self._once(e, _copy(op, [self._scalar(e, v) for v in operands], None))
        if isinstance(op, memref.LoadOp) and _is_float(op.res.type):
            selected = self._choose(e, operands)
            if selected is not None:
                return selected
            *uniform, last = operands
            if isinstance(last, _LaneNumbers) and all(
                isinstance(v, SSAValue | _Constant) for v in uniform
            ):
                # the same entry of a local tensor for each cell
                memory, *indices = (self._scalar(e, v) for v in uniform)
                type_ = VectorType(op.res.type, [self.width])
                return _Vector(e.insert(vector.LoadOp(memory, [*indices, e.index(0)], type_)))
        if isinstance(op, memref.LoadOp) and len(operands) == 2 and _is_float(op.res.type):
            source, addresses = operands
            if isinstance(source, SSAValue) and isinstance(addresses, _Lanes):
                return _Gather(source, addresses)
        # (xDSL has no casts of vectors to indices)
        one_by_one = memref.LoadOp | func.CallOp | arith.IndexCastOp
        scalar = isinstance(op, one_by_one) or not any(
            isinstance(v, _Vector | _Gather) or _is_float(_element(v)) for v in operands
        )
        if scalar:
            lanes = [self._scalars(e, v) for v in operands]
            return _Lanes(
                tuple(
                    self._once(e, _copy(op, [values[lane] for values in lanes], None))
                    for lane in range(self.width)
                )
            )
        if isinstance(op, arith.SelectOp) and isinstance(operands[0], SSAValue):
            # a condition that is the same for all cells selects between whole vectors
            chosen = [operands[0], *(self._vector(e, v).value for v in operands[1:])]
            return _Vector(e.insert(_copy(op, chosen, self.width)))
        vectors = [self._vector(e, v).value for v in operands]
        return _Vector(e.insert(_copy(op, vectors, self.width)))


_Column = tuple[SSAValue, tuple[int, ...]]
"""A local tensor, and the indices of one of its vectors."""

_Linear = dict[_Column, float]
"""A sum of vectors with constant factors."""

# Sums that grow together. The columns are in registers as well, and a processor finds the next
# sums by itself; measured on triangles of degree 3: 3 are better than 2, and than 4 to 16.
_ROWS = 3
# Straight code is to fit into the instruction cache: an entry of a table takes ten bytes.
_LONGEST = 900


def _evaluate(op: Operation, operands: Sequence[_Linear | float | None]) -> _Linear | float | None:
    """The result of an operation on linear forms and numbers; None where it is not linear."""
    if isinstance(op, arith.ConstantOp) and isinstance(op.value, FloatAttr):
        return op.value.value.data
    if any(v is None for v in operands):
        return None
    match op, operands:
        case arith.MulfOp(), (dict(form), float(factor)) | (float(factor), dict(form)):
            return {column: factor * value for column, value in form.items()}
        case arith.MulfOp(), (float(a), float(b)):
            return a * b
        case arith.NegfOp(), (dict(form),):
            return {column: -value for column, value in form.items()}
        case ((arith.AddfOp() | arith.SubfOp()), (dict(left), dict(right))):
            sign = 1.0 if isinstance(op, arith.AddfOp) else -1.0
            return {c: left.get(c, 0.0) + sign * right.get(c, 0.0) for c in {**left, **right}}
    return None


def _is_zero(value: SSAValue) -> bool:
    owner = value.owner
    return (
        isinstance(owner, arith.ConstantOp)
        and isinstance(owner.value, FloatAttr)
        and owner.value.value.data == 0
    )


def _sum(a: SSAValue, b: SSAValue) -> Operation:
    return arith.AddfOp(a, b, CONTRACT)


class _Product:
    """Code for a table times vectors, to be inserted by ``e``."""

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def apply(self, table: Dense | Folded, columns: Sequence[SSAValue]) -> list[SSAValue | None]:
        """The rows; None for those that are zero."""
        if isinstance(table, Dense):
            return self._dense(table.table, columns)
        insert = self.e.insert
        sums, differences = [], []
        for a, b in table.pairs:
            sums.append(insert(_sum(columns[a], columns[b])))
            differences.append(insert(arith.SubfOp(columns[a], columns[b], CONTRACT)))
        even = iter(self.apply(table.even, [*sums, *(columns[c] for c in table.fixed)]))
        odd = iter(self.apply(table.odd, differences))
        found: dict[int, SSAValue | None] = {}
        for a, b, sign in table.rows:
            p = next(even) if a != b or sign > 0 else None
            q = next(odd) if a != b or sign < 0 else None
            found[a] = self._combined(p, q, 1)
            if a != b:
                found[b] = self._combined(p, q, -1) if sign > 0 else self._combined(q, p, -1)
        return [found[row] for row in range(len(found))]

    def _combined(self, a: SSAValue | None, b: SSAValue | None, sign: int) -> SSAValue | None:
        if b is None:
            return a
        if a is None:
            return b if sign > 0 else self.e.insert(arith.NegfOp(b, CONTRACT))
        return self.e.insert(_sum(a, b) if sign > 0 else arith.SubfOp(a, b, CONTRACT))

    def _dense(
        self, table: npt.NDArray[np.float64], columns: Sequence[SSAValue]
    ) -> list[SSAValue | None]:
        rows: list[SSAValue | None] = [None] * len(table)
        for first in range(0, len(table), _ROWS):
            for column, value in enumerate(columns):
                for row in range(first, min(first + _ROWS, len(table))):
                    if table[row, column]:
                        rows[row] = self._added(rows[row], value, float(table[row, column]))
        return rows

    def _added(self, total: SSAValue | None, value: SSAValue, factor: float) -> SSAValue:
        e = self.e
        if abs(factor) != 1:
            assert isinstance(value.type, VectorType)
            scale = e.insert(
                vector.BroadcastOp(e.constant(factor, value.type.element_type), value.type)
            )
            value = e.insert(arith.MulfOp(value, scale, CONTRACT))
        elif factor < 0:
            if total is not None:
                return e.insert(arith.SubfOp(total, value, CONTRACT))
            return e.insert(arith.NegfOp(value, CONTRACT))
        return value if total is None else e.insert(_sum(total, value))


# Loading a number for each lane takes about two instructions a lane, choosing between vectors one.
_CHOICES = 4

# Index arithmetic on sizes and positions, none of them negative.
_FOLD: dict[type[Operation], Callable[[int, int], int]] = {
    arith.AddiOp: operator.add,
    arith.SubiOp: operator.sub,
    arith.MuliOp: operator.mul,
    arith.DivUIOp: operator.floordiv,
    arith.RemUIOp: operator.mod,
}


def _length(value: SSAValue) -> int:
    assert isinstance(value.type, VectorType)
    return value.type.get_shape()[0]


def _couples(values: Sequence[SSAValue]) -> Iterator[tuple[SSAValue, SSAValue]]:
    return zip(values[::2], values[1::2], strict=True)


def _shuffle(e: Emitter, a: SSAValue, b: SSAValue, lanes: Sequence[int]) -> SSAValue:
    """The vector of these elements of ``a`` and ``b``, one after the other."""
    assert isinstance(a.type, VectorType)
    mask = DenseArrayBase.from_list(i64, list(lanes))
    type = VectorType(a.type.element_type, [len(lanes)])
    return e.insert(vector.ShuffleOp(a, b, mask, result_type=type))


def _copy(op: Operation, operands: Sequence[SSAValue], width: int | None) -> Operation:
    """An operation on other operands; its result is a vector where ``width`` is given."""
    types = [r.type if width is None else VectorType(r.type, [width]) for r in op.results]
    kind = type(op)
    if operands and isinstance(operands[0].type, VectorType):
        kind = _LANEWISE.get(kind, kind)
    return kind.create(
        operands=operands, result_types=types, properties=op.properties, attributes=op.attributes
    )


_LANEWISE: dict[type[Operation], type[Operation]] = {
    arith.CmpiOp: VectorCmpiOp,
    arith.CmpfOp: VectorCmpfOp,
    arith.SelectOp: VectorSelectOp,
}


def _affine(e: Emitter, expr: AffineExpr, point: dict[int, IndexLike]) -> IndexLike:
    match expr:
        case AffineConstantExpr():
            return expr.value
        case AffineDimExpr():
            return point[expr.position]
        case AffineBinaryOpExpr():
            left, right = _affine(e, expr.lhs, point), _affine(e, expr.rhs, point)
            if expr.kind is AffineBinaryOpKind.Add:
                return e.add(left, right)
            if expr.kind is AffineBinaryOpKind.Mul:
                return e.mul(left, right)
    raise AssertionError(f"indexing map with {expr}")


def _points(extents: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not extents:
        yield ()
        return
    for first in range(extents[0]):
        for rest in _points(extents[1:]):
            yield (first, *rest)

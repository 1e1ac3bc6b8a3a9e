"""Work through long dimensions in strips, so that temporaries stay in cache."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeGuard

from xdsl.context import Context
from xdsl.dialects import arith, func, memref, scf
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    FixedBitwidthType,
    MemRefType,
    ModuleOp,
    StridedLayoutAttr,
)
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.dialects.linalg.ops import IndexOp as LinalgIndexOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineDimExpr
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.dialects.dense import SolveOp
from pyop3_mlir.lowering.dialects.linalg import FillOp
from pyop3_mlir.lowering.emit import Emitter, IndexLike
from pyop3_mlir.lowering.strips import BUDGET, Access, Nest, Strip, find_strip

__all__ = ["StripMinePass"]


@dataclass(frozen=True)
class StripMinePass(ModulePass):
    """Put loops over strips around operations that share a long dimension.

    Needs ``linalg.generic`` on memrefs inside a loop over blocks of cells, as ``bufferise`` leaves
    it. Where the temporaries of a block take more than ``budget`` bytes, leaves an ``scf.for``
    around those operations that :func:`~pyop3_mlir.lowering.strips.find_strip` names (none across a
    ``dense.solve``), with ``memref.subview`` of what is kept whole and smaller buffers for what is
    not.
    """

    name = "strip-mine"

    budget: int = BUDGET

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function in place."""
        for function in op.ops:
            if isinstance(function, func.FuncOp) and function.body.blocks:
                for blocks in list(function.body.block.ops):
                    if isinstance(blocks, scf.ForOp):
                        _StripMiner(function, blocks.body.block, self.budget).run()


class _StripMiner:
    """Rewrites the body of one loop over blocks."""

    def __init__(self, function: func.FuncOp, block: Block, budget: int) -> None:
        self.operands = function.body.block.args
        self.block = block
        self.budget = budget

    def run(self) -> None:
        """Add loops as long as one helps."""
        while any(map(self._improve, self._parts())):
            pass

    def _parts(self) -> list[list[GenericOp]]:
        """Operations that a loop may surround: systems are solved after all that stands before."""
        parts: list[list[GenericOp]] = [[]]
        for op in self.block.ops:
            if isinstance(op, SolveOp):
                parts.append([])
            elif self._is_nest(op):
                parts[-1].append(op)
        return parts

    def _improve(self, operations: Sequence[GenericOp]) -> bool:
        """Add the loop that saves most memory; whether there is one."""
        nests = [_nest(op) for op in operations]
        written = [output for op in operations for output in op.outputs]
        among = frozenset(operations)
        kept: set[Hashable] = {
            b for b in written if not all(_within(use.operation, among) for use in b.uses)
        }
        strip = find_strip(nests, {b: _bytes(b) for b in written}, kept, self.budget)
        if strip is not None:
            self._rewrite(operations, strip)
        return strip is not None

    def _is_nest(self, op: Operation) -> TypeGuard[GenericOp]:
        """Whether it computes on local memory alone: no gather."""
        return isinstance(op, GenericOp) and not any(
            isinstance(inner, memref.LoadOp) and inner.memref in self.operands
            for inner in op.walk()
        )

    def _rewrite(self, operations: Sequence[GenericOp], strip: Strip) -> None:
        members = [(operations[n], strip.dims[n]) for n in sorted(strip.dims)]
        e = Emitter(InsertPoint.after(members[-1][0]))
        small = {buffer: _smaller(buffer, axis, strip.size) for buffer, axis in strip.local.items()}

        def body(inner: Emitter, start: IndexLike, count: int) -> None:
            views = _Views(inner, small, start, count)
            for op, dim in members:
                for k, fill in _fills(op, dim):
                    inner.builder.insert(
                        FillOp(fill.inputs[0], views.operand(op, len(op.inputs) + k, dim), [])
                    )
                inner.builder.insert(_part(op, dim, views))

        def loop(inner: Emitter, i: SSAValue, _: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
            body(inner, i, strip.size)
            return ()

        whole = strip.extent - strip.extent % strip.size
        e.for_loop(0, whole, strip.size, (), loop)
        if whole < strip.extent:
            body(e, whole, strip.extent - whole)
        for n in sorted(strip.later):
            if n < max(strip.dims):
                # it waits for sums over all strips
                operations[n].detach()
                e.builder.insert(operations[n])
        old = [fill for op, dim in members for _, fill in _fills(op, dim)]
        buffers = [b.owner for b in strip.local if isinstance(b, SSAValue)]
        for op in (*(op for op, _ in members), *old, *buffers):
            assert isinstance(op, Operation)
            op.detach()
            op.erase()


def _bytes(value: SSAValue) -> int:
    assert isinstance(value.type, MemRefType)
    element = value.type.element_type
    bits = element.bitwidth if isinstance(element, FixedBitwidthType) else 128
    return math.prod(value.type.get_shape()) * max(bits, 8) // 8


def _nest(op: GenericOp) -> Nest:
    """The operation without its last dimension, the cell."""
    kinds = [kind.data for kind in op.iterator_types]
    cell = len(kinds) - 1
    extents = [0] * len(kinds)
    accesses: list[Access] = []
    for number, operand in enumerate(op.operands):
        axes = _axes(op, number)
        assert isinstance(operand.type, MemRefType)
        for dim, extent in zip(axes, operand.type.get_shape(), strict=True):
            if dim is not None:
                extents[dim] = extent
        accesses.append((operand, tuple(dim for dim in axes if dim != cell)))
    reads = accesses[: len(op.inputs)]
    for inner in op.walk():
        if isinstance(inner, memref.LoadOp):
            # an entry that is chosen otherwise than by the dimensions
            reads.append((inner.memref, (None,) * (len(inner.indices) - 1)))
    reductions = frozenset(d for d in range(cell) if kinds[d] == IteratorType.REDUCTION)
    return Nest(tuple(extents[:cell]), reductions, tuple(reads), tuple(accesses[len(op.inputs) :]))


def _axes(op: GenericOp, number: int) -> list[int | None]:
    """The dimension that indexes each axis of an operand, None for anything else."""
    results = list(op.indexing_maps)[number].data.results
    return [r.position if isinstance(r, AffineDimExpr) else None for r in results]


def _within(op: Operation, operations: Set[Operation]) -> bool:
    """Whether an operation is one of them or in one of them, or clears what they add to."""
    parent: Operation | None = op
    while parent is not None:
        if parent in operations:
            return True
        parent = parent.parent_op()
    return isinstance(op, FillOp)


def _fills(op: GenericOp, dim: int) -> list[tuple[int, FillOp]]:
    """Number of each output that has an entry for each index of ``dim``, and what clears it."""
    found = []
    for k, output in enumerate(op.outputs):
        if dim in _axes(op, len(op.inputs) + k):
            users = (use.operation for use in output.uses)
            found += [(k, user) for user in users if isinstance(user, FillOp)]
    return found


def _smaller(buffer: Hashable, axis: int, extent: int) -> SSAValue:
    """A new buffer that is shorter along an axis, beside the old one."""
    assert isinstance(buffer, SSAValue)
    assert isinstance(buffer.owner, memref.AllocaOp)
    assert isinstance(buffer.type, MemRefType)
    shape = list(buffer.type.get_shape())
    shape[axis] = extent
    new = memref.AllocaOp.build(
        operands=[[], []],
        result_types=[MemRefType(buffer.type.element_type, shape)],
        properties=dict(buffer.owner.properties),
    )
    return Emitter(InsertPoint.before(buffer.owner)).insert(new)


def _part(op: GenericOp, dim: int, views: _Views) -> GenericOp:
    """The operation on one strip of a dimension."""
    new = op.clone()
    for number in range(len(op.operands)):
        new.operands[number] = views.operand(op, number, dim)
    for inner in list(new.body.block.walk()):
        if isinstance(inner, LinalgIndexOp) and inner.dim.value.data == dim:
            e = Emitter(InsertPoint.after(inner))
            whole = arith.AddiOp(inner.result, views.e.index(views.start))
            inner.result.replace_all_uses_with(whole.result)
            whole.operands[0] = inner.result
            e.builder.insert(whole)
    return new


class _Views:
    """The parts of buffers that one strip works on."""

    def __init__(
        self, e: Emitter, small: Mapping[Hashable, SSAValue], start: IndexLike, count: int
    ) -> None:
        self.e = e
        self.small = small
        self.start = start
        self.count = count
        self._known: dict[tuple[SSAValue, int], SSAValue] = {}

    def operand(self, op: GenericOp, number: int, dim: int) -> SSAValue:
        """What an operand of ``op`` becomes."""
        value = op.operands[number]
        for axis, found in enumerate(_axes(op, number)):
            if found == dim:
                value = self._view(value, axis)
        return value

    def _view(self, buffer: SSAValue, axis: int) -> SSAValue:
        key = buffer, axis
        if key not in self._known:
            small = self.small.get(buffer)
            if small is None:
                self._known[key] = _subview(self.e, buffer, axis, self.start, self.count)
            else:
                self._known[key] = _subview(self.e, small, axis, 0, self.count)
        return self._known[key]


def _subview(e: Emitter, source: SSAValue, axis: int, start: IndexLike, count: int) -> SSAValue:
    """Entries ``[start, start + count)`` along an axis."""
    assert isinstance(source.type, MemRefType)
    shape = list(source.type.get_shape())
    if shape[axis] == count:
        return source
    layout = source.type.layout
    origin = layout.get_offset() if isinstance(layout, StridedLayoutAttr) else 0
    strides = source.type.get_strides()
    assert strides is not None
    stride = strides[axis]
    assert stride is not None
    offset = None
    if isinstance(start, int) and origin is not None:
        offset = origin + start * stride
    offsets = [0] * len(shape)
    offsets[axis] = DYNAMIC_INDEX if isinstance(start, SSAValue) else start
    shape[axis] = count
    return e.insert(
        memref.SubviewOp(
            source,
            [start] if isinstance(start, SSAValue) else [],
            [],
            [],
            offsets,
            shape,
            [1] * len(shape),
            MemRefType(source.type.element_type, shape, StridedLayoutAttr(strides, offset)),
        )
    )

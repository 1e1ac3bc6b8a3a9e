"""Scatter each block while the next one is computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, memref, scf, vector
from xdsl.dialects.builtin import Float32Type, Float64Type, MemRefType, ModuleOp, VectorType
from xdsl.ir import BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.emit import Emitter, functions_of

__all__ = ["DelayScatterPass"]


@dataclass(frozen=True)
class DelayScatterPass(ModulePass):
    """Spread the additions of a block over the arithmetic of the next block.

    A scatter keeps the one unit busy that stores floating point numbers, the computation the
    arithmetic units. A processor looks a few hundred instructions ahead, which is less than a
    block: phases that follow each other hardly overlap, interleaved ones do. Gathers are left as
    they are, for the compiler orders loads itself as long as no store is between them.

    Needs what ``unroll-scatter`` leaves, and one thread. Only scatters that do nothing but add are
    moved: in the first turn of the loop, with nothing there yet to be scattered, they add -0.0,
    which changes no number. The scatter of the last block follows the loop. The order of all
    additions stays. Loops that read what they scatter to are left alone.

    Parameters
    ----------
    width
        Cells of a block.
    """

    name = "delay-scatter"

    width: int = 8

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite ``@loop`` in place."""
        for function in functions_of(op):
            for blocks in list(function.body.block.ops):
                if isinstance(blocks, scf.ForOp):
                    _delay(blocks, self.width)


def _delay(blocks: scf.ForOp, width: int) -> None:
    body = blocks.body.block
    scatters = [op for op in body.ops if _stores(op, None)]
    others = [op for op in body.ops if op not in scatters]
    needed = _slice(scatters, others)
    values = _values(scatters, others)
    if not scatters or needed is None or values is None:
        return
    before = Emitter(InsertPoint.before(blocks))
    for value in values:
        _fill(before, value)

    position = body.args[0]
    e = Emitter(InsertPoint.at_start(body))
    earlier = e.index(e.sub(position, width))
    mapping: dict[SSAValue, SSAValue] = {position: e.insert(arith.MaxSIOp(earlier, blocks.lb))}
    _insert(e, needed, mapping)
    pieces: list[list[Operation]] = [[]]
    for scatter in scatters:
        for op in _branch(scatter, whole=True):
            pieces[-1].append(op.clone(mapping))
            if _stores(op, None):
                pieces.append([])
    _spread(pieces, others, values)

    def last(inner: Emitter) -> Sequence[SSAValue]:
        turns = inner.floordiv(inner.sub(rest, 1), width)
        start = inner.index(inner.add(blocks.lb, inner.mul(turns, width)))
        mapping: dict[SSAValue, SSAValue] = {position: start}
        _insert(inner, needed, mapping)
        for scatter in scatters:
            _insert(inner, _branch(scatter, whole=False), mapping)
        return ()

    after = Emitter(InsertPoint.after(blocks))
    rest = after.insert(arith.SubiOp(blocks.ub, blocks.lb))
    after.if_else(after.insert(arith.CmpiOp(rest, after.index(0), "sgt")), [], last)
    for op in scatters:
        op.detach()
        op.erase()


def _values(scatters: Sequence[Operation], others: Sequence[Operation]) -> set[SSAValue] | None:
    """The local tensors that are added; None where the scatters must stay where they are.

    They must do nothing but add what the block has computed, in straight code, and nothing else may
    use what they add to.
    """
    targets: set[SSAValue] = set()
    values: set[SSAValue] = set()
    for scatter in scatters:
        if not isinstance(scatter, scf.IfOp):
            return None
        for op in scatter.walk():
            if isinstance(op, vector.StoreOp):
                return None
            if isinstance(op, memref.StoreOp):
                value = _added(op)
                if value is None:
                    return None
                targets.add(op.memref)
                values.add(value)
    inside = {inner for op in (*scatters, *others) for inner in op.walk()}
    direct = memref.LoadOp | memref.StoreOp | vector.LoadOp | vector.StoreOp
    own = all(
        isinstance(use.operation, direct) and use.operation in inside
        for value in values
        for use in value.uses
    )
    # the numbers of a subset's entities, which the next block replaces before they are used
    more = any(isinstance(v.owner, memref.AllocaOp) for v in _operands(scatters) - values)
    return values if own and not more and targets.isdisjoint(_operands(others)) else None


def _added(store: memref.StoreOp) -> SSAValue | None:
    """The local tensor of which an element is added to what is stored to; None if it is not so."""
    addition = store.value.owner
    if not isinstance(addition, arith.AddfOp):
        return None
    before, number = (operand.owner for operand in addition.operands)
    if not isinstance(before, memref.LoadOp) or before.memref is not store.memref:
        return None
    if tuple(before.indices) != tuple(store.indices):
        return None
    if isinstance(number, vector.ExtractOp):
        number = number.vector.owner
    if not isinstance(number, memref.LoadOp | vector.LoadOp):
        return None
    found = number.operands[0]
    return found if isinstance(found.owner, memref.AllocaOp) else None


def _spread(
    pieces: Sequence[Sequence[Operation]], others: Sequence[Operation], values: set[SSAValue]
) -> None:
    """Insert the pieces evenly where the arithmetic is, before ``values`` are written again."""
    gathered = max((n for n, op in enumerate(others) if _gathers(op)), default=-1) + 1
    places: list[Operation] = []
    for op in others[gathered:]:
        written = _stores(op, values)
        if written or isinstance(
            op, arith.MulfOp | arith.DivfOp | arith.AddfOp | scf.ForOp | scf.IfOp
        ):
            places.append(op)
        if written:
            break
    for number, piece in enumerate(pieces):
        e = Emitter(InsertPoint.before(places[number * len(places) // len(pieces)]))
        for op in piece:
            e.builder.insert(op)


def _insert(e: Emitter, ops: Sequence[Operation], mapping: dict[SSAValue, SSAValue]) -> None:
    for op in ops:
        e.builder.insert(op.clone(mapping))


def _branch(scatter: Operation, *, whole: bool) -> list[Operation]:
    """What a scatter does for a whole block, or for one that is not."""
    assert isinstance(scatter, scf.IfOp)
    region = scatter.true_region if whole else scatter.false_region
    return [op for op in region.block.ops if not isinstance(op, scf.YieldOp)]


def _operands(ops: Sequence[Operation]) -> set[SSAValue]:
    return {operand for op in ops for inner in op.walk() for operand in inner.operands}


def _is_argument(value: SSAValue) -> bool:
    return isinstance(value, BlockArgument) and isinstance(value.type, MemRefType)


def _gathers(op: Operation) -> bool:
    return any(_is_argument(operand) for operand in _operands([op]))


def _stores(op: Operation, buffers: Collection[SSAValue] | None) -> bool:
    """Whether an operation stores to one of these buffers, or to any argument of the function."""
    return any(
        isinstance(inner, memref.StoreOp | vector.StoreOp)
        and (_is_argument(inner.operands[1]) if buffers is None else inner.operands[1] in buffers)
        for inner in op.walk()
    )


def _fill(e: Emitter, value: SSAValue) -> None:
    """Set a local tensor to -0.0."""
    assert isinstance(value.type, MemRefType)
    *shape, cells = value.type.get_shape()
    element = value.type.element_type
    assert isinstance(element, Float32Type | Float64Type)
    zeros = e.insert(vector.BroadcastOp(e.constant(-0.0, element), VectorType(element, [cells])))
    for row in range(math.prod(shape)):
        indices = [e.index(i) for i in (*e.delinear(row, shape), 0)]
        e.insert(vector.StoreOp(zeros, value, indices))


def _slice(scatters: list[Operation], others: list[Operation]) -> list[Operation] | None:
    """The block's arithmetic that its scatter needs, in order; None where it needs more."""
    inside = set(others)
    wanted: set[Operation] = set()
    stack = list(scatters)
    while stack:
        for operand in _operands([stack.pop()]):
            owner = operand.owner
            if isinstance(owner, Operation) and owner in inside and owner not in wanted:
                if not owner.name.startswith("arith."):
                    return None
                wanted.add(owner)
                stack.append(owner)
    return [op for op in others if op in wanted]

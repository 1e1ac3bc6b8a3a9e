"""One contraction for each result instead of one with many."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import func
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, TensorType
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.dialects.linalg.ops import YieldOp as LinalgYieldOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from pyop3_mlir.lowering.dialects.linalg import operations_for, read_by

__all__ = ["SplitResultsPass"]


@dataclass(frozen=True)
class SplitResultsPass(ModulePass):
    """Give every result of a contraction an operation of its own.

    IREE 3.13 does not bufferise contractions with several results that it has tiled for a GPU's
    threads ("failed to bufferize op": a copy of a tile whose size it does not know).

    Needs ``linalg.generic`` on tensors; those without reductions, or of one result, stay.
    """

    name = "split-results"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function in place."""
        for function in op.ops:
            if isinstance(function, func.FuncOp) and function.body.blocks:
                for inner in list(function.walk()):
                    if isinstance(inner, GenericOp) and len(inner.results) > 1:
                        _split(inner)


def _split(op: GenericOp) -> None:
    if all(kind.data != IteratorType.REDUCTION for kind in op.iterator_types):
        return
    # a result may be computed from what another one has been so far
    needed = [operations_for(op, number) for number in range(len(op.results))]
    outputs = op.body.block.args[len(op.inputs) :]
    last = op.body.block.last_op
    assert last is not None
    for number, operations in enumerate(needed):
        others = {a for k, a in enumerate(outputs) if k != number}
        if others & (read_by(operations) | {last.operands[number]}):
            return
    for number, operations in enumerate(needed):
        _one_result(op, number, operations)
    op.detach()
    op.erase()


def _one_result(op: GenericOp, number: int, operations: list[Operation]) -> None:
    block = op.body.block
    last = block.last_op
    assert last is not None
    own = len(op.inputs) + number
    read = read_by(operations) | {last.operands[number]}
    kept = [k for k, a in enumerate(block.args) if k == own or (k < len(op.inputs) and a in read)]
    body = Block(arg_types=[block.args[k].type for k in kept])
    mapper: dict[SSAValue, SSAValue] = {
        block.args[k]: argument for k, argument in zip(kept, body.args, strict=True)
    }
    for inner in operations:
        body.add_op(inner.clone(mapper))
    value = last.operands[number]
    body.add_op(LinalgYieldOp(mapper.get(value, value)))
    output = op.outputs[number]
    assert isinstance(output.type, TensorType)
    new = GenericOp(
        [op.operands[k] for k in kept[:-1]],
        [output],
        Region(body),
        [op.indexing_maps.data[k] for k in kept],
        ArrayAttr(op.iterator_types.data),
        [output.type],
    )
    Rewriter.insert_op(new, InsertPoint.before(op))
    op.results[number].replace_all_uses_with(new.results[0])

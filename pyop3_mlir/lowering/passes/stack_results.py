"""One contraction with one more dimension instead of one with many results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xdsl.context import Context
from xdsl.dialects import func, memref
from xdsl.dialects.builtin import AffineMapAttr, ArrayAttr, MemRefType, ModuleOp
from xdsl.dialects.linalg.attrs import IteratorType, IteratorTypeAttr
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.dialects.linalg.ops import IndexOp as LinalgIndexOp
from xdsl.dialects.linalg.ops import YieldOp as LinalgYieldOp
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from pyop3_mlir.lowering.dialects.linalg import FillOp, operations_for

__all__ = ["StackResultsPass"]


@dataclass(frozen=True)
class StackResultsPass(ModulePass):
    """Give contractions a dimension for their results, where all are computed alike.

    The moments of many fields, as a Jacobian needs them, are one ``linalg.generic`` whose results
    differ in one operand each. More results than there are accumulators would be kept in memory
    while they grow. Stacked on each other, what they read and what they write are two buffers with
    one more axis: the code is that of one result, with rows in registers, and short.

    Needs ``linalg.generic`` on memrefs, as ``bufferise`` leaves it.

    Parameters
    ----------
    tile
        Accumulators that a contraction holds in registers: contractions with no more results stay.
    """

    name = "stack-results"

    tile: int = 4

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function in place."""
        for function in op.ops:
            if isinstance(function, func.FuncOp) and function.body.blocks:
                for inner in list(function.walk()):
                    if isinstance(inner, GenericOp) and len(inner.outputs) > self.tile:
                        _stack(inner)


def _stack(op: GenericOp) -> None:
    if all(kind.data != IteratorType.REDUCTION for kind in op.iterator_types):
        return
    # the numbers of dimensions would change
    if any(inner.regions or isinstance(inner, LinalgIndexOp) for inner in op.body.block.ops):
        return
    last = op.body.block.last_op
    assert isinstance(last, LinalgYieldOp)
    bodies = [_Body(op, k) for k in range(len(op.outputs))]
    first = bodies[0]
    if any(body.form != first.form for body in bodies):
        return
    # the operands that stand at the same place of each body
    columns = list(zip(*(body.operands for body in bodies), strict=True))
    own = [len(set(column)) > 1 for column in columns]
    stacks = [[op.operands[n] for n in c] for c, s in zip(columns, own, strict=True) if s]
    buffers = [buffer for stack in stacks for buffer in stack]
    if len(set(buffers)) < len(buffers) or not all(map(_is_private, buffers)):
        return
    if not all(map(_are_alike, stacks)):
        return
    stacked = {buffers[0]: _Stack(buffers) for buffers in stacks}
    body = Block(arg_types=[op.body.block.args[column[0]].type for column in columns])
    arguments = [op.body.block.args[column[0]] for column in columns]
    mapper: dict[SSAValue, SSAValue] = dict(zip(arguments, body.args, strict=True))
    for inner in first.operations:
        body.add_op(inner.clone(mapper))
    body.add_op(LinalgYieldOp(mapper.get(last.operands[0], last.operands[0])))
    operands, maps = [], []
    for column, is_own in zip(columns, own, strict=True):
        operand = op.operands[column[0]]
        old = first.maps[column[0]]
        dims = [AffineDimExpr(d + 1) for d in range(old.num_dims)]
        shifted = [result.replace_dims_and_symbols(dims, []) for result in old.results]
        if is_own:
            operand = stacked[operand].value
            shifted.insert(0, AffineDimExpr(0))
        operands.append(operand)
        maps.append(AffineMapAttr(AffineMap(old.num_dims + 1, 0, tuple(shifted))))
    kinds = [IteratorTypeAttr.parallel(), *op.iterator_types]
    new = GenericOp(operands[:-1], operands[-1:], Region(body), maps, ArrayAttr(kinds))
    Rewriter.insert_op(new, InsertPoint.before(op))
    op.detach()
    op.erase()
    for stack in stacked.values():
        stack.replace()


class _Body:
    """What one result of an operation is computed from.

    Attributes
    ----------
    form
        Equal for results that differ in their operands alone.
    operands
        Numbers of the operation's operands, in the order in which the body meets them; last its
        own output.
    operations
        Of the body, in order.
    """

    def __init__(self, op: GenericOp, result: int) -> None:
        block = op.body.block
        last = block.last_op
        assert isinstance(last, LinalgYieldOp)
        self.maps = [m.data for m in op.indexing_maps]
        self.operands: list[int] = []
        self.operations = operations_for(op, result)
        output = len(op.inputs) + result
        numbers: dict[SSAValue, Any] = {}

        def name(value: SSAValue) -> Any:
            if value not in numbers:
                if isinstance(value, BlockArgument) and value.block is block:
                    if value.index == output:
                        return "output", self.maps[output]
                    self.operands.append(value.index)
                    numbers[value] = "input", len(self.operands), self.maps[value.index]
                else:
                    numbers[value] = value
            return numbers[value]

        form: list[Any] = []
        for inner in self.operations:
            properties = tuple(sorted(inner.properties.items(), key=lambda item: item[0]))
            form.append((type(inner), properties, *map(name, inner.operands)))
            for inner_result in inner.results:
                numbers[inner_result] = len(form), inner_result.type
        form.append(name(last.operands[result]))
        self.operands.append(output)
        self.form = form


class _Stack:
    """Buffers that become one with an axis for their number."""

    def __init__(self, buffers: Sequence[SSAValue]) -> None:
        self.buffers = buffers
        first = buffers[0]
        assert isinstance(first.type, MemRefType)
        assert isinstance(first.owner, memref.AllocaOp)
        shape = [len(buffers), *first.type.get_shape()]
        new = memref.AllocaOp.build(
            operands=[[], []],
            result_types=[MemRefType(first.type.element_type, shape)],
            properties=dict(first.owner.properties),
        )
        Rewriter.insert_op(new, InsertPoint.before(first.owner))
        self.value = new.results[0]

    def replace(self) -> None:
        """Let all that use the buffers use their parts of the stack."""
        for number, buffer in enumerate(self.buffers):
            for use in list(buffer.uses):
                if isinstance(use.operation, GenericOp):
                    self._at(use.operation, use.index, number)
                elif number == 0:
                    self._fill(use.operation)
                else:
                    use.operation.detach()
                    use.operation.erase()
            assert isinstance(buffer.owner, Operation)
            buffer.owner.detach()
            buffer.owner.erase()

    def _at(self, op: GenericOp, operand: int, number: int) -> None:
        op.operands[operand] = self.value
        maps = list(op.indexing_maps)
        old = maps[operand].data
        results = (AffineConstantExpr(number), *old.results)
        maps[operand] = AffineMapAttr(AffineMap(old.num_dims, 0, results))
        op.properties["indexing_maps"] = ArrayAttr(maps)

    def _fill(self, op: Operation) -> None:
        assert isinstance(op, FillOp)
        Rewriter.replace_op(op, FillOp(op.inputs[0], self.value, []), [])


def _is_private(buffer: SSAValue) -> bool:
    """Whether it is memory that whole operations alone use."""
    return isinstance(buffer.owner, memref.AllocaOp) and all(
        isinstance(use.operation, GenericOp | FillOp) for use in buffer.uses
    )


def _are_alike(buffers: Sequence[SSAValue]) -> bool:
    """Whether they have one type, and are cleared for the same operation or not at all."""
    if len({buffer.type for buffer in buffers}) > 1:
        return False
    fills = [
        [use.operation for use in buffer.uses if isinstance(use.operation, FillOp)]
        for buffer in buffers
    ]
    if not any(fills):
        return True
    writers = {
        use.operation
        for buffer in buffers
        for use in buffer.uses
        if isinstance(use.operation, GenericOp) and use.index >= len(use.operation.inputs)
    }
    values = {fill.inputs[0] for own in fills for fill in own}
    return len(writers) == len(values) == 1 and {len(own) for own in fills} == {1}

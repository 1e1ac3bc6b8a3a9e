"""Work on blocks of W cells instead of all cells at once."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, func, scf
from xdsl.dialects.builtin import DYNAMIC_INDEX, IndexType, ModuleOp, TensorType
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.dialects.tensor import EmptyOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.dialects.dense import SolveOp
from pyop3_mlir.lowering.dialects.linalg import FillOp
from pyop3_mlir.lowering.emit import Emitter

__all__ = ["BlockCellsPass"]


@dataclass(frozen=True)
class BlockCellsPass(ModulePass):
    """Wrap the work of ``@loop`` into a loop over blocks of ``width`` cells.

    Needs the tensor stage: ``start`` and ``stop`` as the first two index casts, ``count`` their
    difference, the cell as the last, dynamic dimension of every local tensor. Leaves the same
    operations on static shapes inside one ``scf.for`` that carries the buffers; what does not
    depend on the cell stays before it. The last block is moved back, so that it is whole, and its
    scatter leaves out what the block before it has done. There have to be at least ``width``
    iterations in the set, though not in the range that is run.
    """

    name = "block-cells"

    width: int = 8

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite ``@loop`` in place."""
        for function in op.ops:
            if isinstance(function, func.FuncOp) and function.sym_name.data == "loop":
                _block(function, self.width)


def _captures(op: Operation) -> set[SSAValue]:
    """Every value that an operation or its regions use."""
    return {operand for inner in op.walk() for operand in inner.operands}


def _block(function: func.FuncOp, width: int) -> None:
    old = function.body.block
    ops = list(old.ops)
    casts = [op for op in ops if isinstance(op, arith.IndexCastOp)]
    count_op = next(op for op in ops if isinstance(op, arith.SubiOp))
    start, stop, count = casts[0].result, casts[1].result, count_op.result
    returned = ops[-1]
    assert isinstance(returned, func.ReturnOp)
    scatter = {r.owner for r in returned.operands if isinstance(r.owner, scf.ForOp)}
    carried = [operand for op in scatter for operand in op.iter_args]

    dependent: set[SSAValue] = {start, count}
    inside: list[Operation] = []
    for op in ops[:-1]:
        if op is not count_op and op is not casts[0] and _captures(op) & dependent:
            inside.append(op)
            dependent.update(op.results)

    block = Block(arg_types=[IndexType(), *(value.type for value in carried)])
    e = Emitter(block)
    position = block.args[0]
    # all lanes are within the iteration set, so that neither data nor tables need padding
    last = e.insert(arith.MaxSIOp(e.index(e.sub(stop, width)), e.index(0)))
    first = e.minimum(position, last)
    end = e.minimum(e.add(position, width), stop)
    mapping: dict[SSAValue, SSAValue] = {start: e.index(first)}
    mapping.update(zip(carried, block.args[1:], strict=True))
    mapping[count] = e.index(e.sub(end, first))
    for op in scatter:
        assert isinstance(op, scf.ForOp)
        mapping[op.lb] = e.index(e.sub(position, first))
    for op in inside:
        clone = op.clone(mapping)
        if isinstance(clone, EmptyOp):
            clone = EmptyOp([], _static(clone.tensor.type, width))
            mapping[op.results[0]] = clone.results[0]
        elif isinstance(clone, GenericOp | FillOp | SolveOp):
            clone = _with_types(clone, [_static(r.type, width) for r in clone.results])
            mapping.update(zip(op.results, clone.results, strict=True))
        e.builder.insert(clone)
    e.insert(scf.YieldOp(*(mapping[value] for value in returned.operands if value in dependent)))

    outer = Emitter(InsertPoint.before(returned))
    loop = scf.ForOp(start, stop, outer.index(width), carried, Region(block))
    outer.builder.insert(loop)
    results = iter(loop.results)
    new = [next(results) if value in dependent else value for value in returned.operands]
    outer.builder.insert(func.ReturnOp(*new))
    for op in [returned, *reversed(inside), count_op]:
        op.detach()
        op.erase()


def _static(type: Attribute, width: int) -> Attribute:
    """The type with the number of cells replaced by the width of a block."""
    assert isinstance(type, TensorType)
    shape = [width if extent == DYNAMIC_INDEX else extent for extent in type.get_shape()]
    return TensorType(type.element_type, shape)


def _with_types(op: Operation, types: list[Attribute]) -> Operation:
    """The same operation with other result types; ``op`` is used up."""
    regions = [op.detach_region(region) for region in list(op.regions)]
    return type(op).create(
        operands=op.operands,
        result_types=types,
        properties=op.properties,
        attributes=op.attributes,
        regions=regions,
    )

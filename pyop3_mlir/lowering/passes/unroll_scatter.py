"""Scatter whole blocks from registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, memref, scf, vector
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    Float32Type,
    Float64Type,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    VectorType,
)
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.emit import Emitter, functions_of

__all__ = ["UnrollScatterPass"]


@dataclass(frozen=True)
class UnrollScatterPass(ModulePass):
    """Give the scatter of a whole block straight code that takes the values out of vectors.

    Needs what ``vectorise`` leaves. The loop over the cells of a block stays for the last block,
    and for kernels that store more than ``limit`` numbers a block: there the values come from
    memory.

    Parameters
    ----------
    width
        Cells of a block.
    limit
        Stores that the straight code may have.
    """

    name = "unroll-scatter"

    width: int = 8
    limit: int = 64

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite ``@loop`` in place."""
        if self.width < 2:
            return
        for function in functions_of(op):
            for blocks in function.body.block.ops:
                if isinstance(blocks, scf.ForOp):
                    for loop in list(blocks.body.block.ops):
                        if isinstance(loop, scf.ForOp) and self._suits(loop):
                            self._unroll(loop)

    def _suits(self, loop: scf.ForOp) -> bool:
        """Whether it is a scatter of few values: straight code whose number of cells varies."""
        body = list(loop.body.block.ops)
        stores = sum(isinstance(o, memref.StoreOp) for o in loop.walk())
        known = isinstance(loop.ub.owner, arith.ConstantOp)
        straight = not any(isinstance(o, scf.ForOp) for o in body)
        return straight and not known and 0 < stores * self.width <= self.limit

    def _unroll(self, loop: scf.ForOp) -> None:
        e = Emitter(InsertPoint.before(loop))
        count = e.insert(arith.SubiOp(loop.ub, loop.lb))
        whole = e.insert(arith.CmpiOp(count, e.index(self.width), "eq"))

        def straight(inner: Emitter) -> Sequence[SSAValue]:
            vectors: dict[tuple[SSAValue, tuple[int, ...]], SSAValue] = {}
            cell = loop.body.block.args[0]
            for lane in range(self.width):
                mapping: dict[SSAValue, SSAValue] = {cell: inner.index(lane)}
                for op in loop.body.block.ops:
                    if isinstance(op, scf.YieldOp):
                        continue
                    row = _row_of(op, cell)
                    if row is None:
                        inner.builder.insert(op.clone(mapping))
                        continue
                    assert isinstance(op, memref.LoadOp)
                    key = (op.memref, row)
                    if key not in vectors:
                        kind = VectorType(op.res.type, [self.width])
                        indices = [inner.index(i) for i in (*row, 0)]
                        vectors[key] = inner.insert(vector.LoadOp(op.memref, indices, kind))
                    mapping[op.res] = inner.insert(
                        vector.ExtractOp(vectors[key], [lane], op.res.type)
                    )
            return ()

        def counted(inner: Emitter) -> Sequence[SSAValue]:
            inner.builder.insert(loop.clone())
            return ()

        e.if_else(whole, [], straight, counted)
        loop.detach()
        loop.erase()


def _row_of(op: Operation, cell: SSAValue) -> tuple[int, ...] | None:
    """The constant indices of a load of the cell's value of a local tensor, else None."""
    if not isinstance(op, memref.LoadOp) or not isinstance(op.res.type, Float32Type | Float64Type):
        return None
    assert isinstance(op.memref.type, MemRefType)
    if not op.indices or op.indices[-1] is not cell or DYNAMIC_INDEX in op.memref.type.get_shape():
        return None
    row = []
    for index in op.indices[:-1]:
        owner = index.owner
        if not isinstance(owner, arith.ConstantOp) or not isinstance(owner.value, IntegerAttr):
            return None
        row.append(owner.value.value.data)
    return tuple(row)

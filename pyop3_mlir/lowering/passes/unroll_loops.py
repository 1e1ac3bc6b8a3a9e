"""Unroll short loops over the entries of a pack."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, memref, scf
from xdsl.dialects.builtin import IntegerAttr, MemRefType, ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.emit import Emitter, functions_of

__all__ = ["UnrollLoopsPass"]


@dataclass(frozen=True)
class UnrollLoopsPass(ModulePass):
    """Unroll loops with constant bounds and without results, innermost first.

    Needs functions on memrefs. Leaves loops that would make more than ``limit`` stores as they are:
    the scatter of a small element becomes straight code, that of a large one stays short.
    """

    name = "unroll-loops"

    limit: int = 16

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function on memrefs in place."""
        for function in functions_of(op):
            if any(isinstance(a.type, MemRefType) for a in function.body.block.args):
                loops = [inner for inner in function.walk() if isinstance(inner, scf.ForOp)]
                for loop in reversed(loops):
                    self._visit(loop)

    def _visit(self, loop: scf.ForOp) -> None:
        """Unroll one loop, whose inner loops have been visited."""
        bounds = [_constant(value) for value in (loop.lb, loop.ub, loop.step)]
        if any(bound is None for bound in bounds) or loop.results:
            return
        trips = range(*(bound for bound in bounds if bound is not None))
        copies = sum(isinstance(op, memref.StoreOp) for op in loop.body.walk())
        inner = any(isinstance(op, scf.ForOp) for op in loop.body.walk())
        if inner or len(trips) * copies > self.limit:
            return
        e = Emitter(InsertPoint.before(loop))
        for trip in trips:
            mapping: dict[SSAValue, SSAValue] = {loop.body.block.args[0]: e.index(trip)}
            for op in loop.body.block.ops:
                if not isinstance(op, scf.YieldOp):
                    e.builder.insert(op.clone(mapping))
        loop.detach()
        loop.erase()


def _constant(value: SSAValue) -> int | None:
    owner = value.owner
    if isinstance(owner, arith.ConstantOp) and isinstance(owner.value, IntegerAttr):
        return owner.value.value.data
    return None

"""Change shared targets by hardware atomics."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, memref
from xdsl.dialects.builtin import IntegerAttr, MemRefType, ModuleOp, i64
from xdsl.ir import BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.emit import Emitter, functions_of

__all__ = ["AtomicScatterPass"]

# memref.atomic_rmw's kinds, as IREE 3.13's MLIR numbers them (AtomicRMWKind in ArithBase.td)
_KINDS: dict[type[Operation], int] = {
    arith.AddfOp: 0,
    arith.AddiOp: 1,
    arith.MaxnumfOp: 5,
    arith.MaxSIOp: 6,
    arith.MaxUIOp: 7,
    arith.MinnumfOp: 9,
    arith.MinSIOp: 10,
    arith.MinUIOp: 11,
}


@dataclass(frozen=True)
class AtomicScatterPass(ModulePass):
    """Make ``load, add, store`` of an operand one atomic operation, and smaller and larger alike.

    Needs functions on memrefs without linalg operations. Leaves stores of new values (WRITE) as
    they are. The order of additions, and so the last bits of a sum, differ from run to run.
    """

    name = "atomic-scatter"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function on memrefs in place."""
        for function in functions_of(op):
            for store in list(function.walk()):
                if isinstance(store, memref.StoreOp) and isinstance(store.memref, BlockArgument):
                    _make_atomic(store)


def _make_atomic(store: memref.StoreOp) -> None:
    assert isinstance(store.memref.type, MemRefType)
    combine = store.value.owner
    if not isinstance(combine, Operation) or type(combine) not in _KINDS:
        return
    for old, new in (combine.operands, tuple(reversed(combine.operands))):
        load = old.owner
        if _reads(load, store):
            assert isinstance(load, memref.LoadOp)
            atomic = memref.AtomicRMWOp.build(
                operands=[new, store.memref, list(store.indices)],
                result_types=[new.type],
                properties={"kind": IntegerAttr(_KINDS[type(combine)], i64)},
            )
            Emitter(InsertPoint.before(store)).insert(atomic)
            for op in (store, combine, load):
                op.detach()
                op.erase()
            return


def _reads(load: object, store: memref.StoreOp) -> bool:
    """Whether an operation loads what ``store`` overwrites, and nothing else uses it."""
    if not isinstance(load, memref.LoadOp) or load.memref is not store.memref:
        return False
    same: list[tuple[SSAValue, SSAValue]] = list(zip(load.indices, store.indices, strict=True))
    return all(a is b for a, b in same) and len(list(load.res.uses)) == 1

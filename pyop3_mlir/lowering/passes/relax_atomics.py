"""Ask of atomic operations no more than a scatter needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, memref
from xdsl.dialects.builtin import IntAttr, MemRefType, ModuleOp, UnitAttr, i64
from xdsl.dialects.llvm import GEPOp, IntToPtrOp, LLVMPointerType
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.dialects import llvm
from pyop3_mlir.lowering.emit import Emitter

__all__ = ["RelaxAtomicsPass"]

# MLIR's memref.atomic_rmw is ordered with all other accesses of the whole system. Sums need
# neither: nobody reads them before the dispatch has ended.
_SCOPES = {"cuda": "device", "hip": "agent"}
# What LLVM has to know of memory before it uses AMD's instructions instead of a loop that compares
# and swaps: it is in the device itself, as IREE's buffers and those that are shared with it are.
_MARKS = {
    "cuda": (),
    "hip": (
        "rocdl.no_fine_grained_memory",
        "rocdl.no_remote_memory",
        # of single precision only: the instruction takes denormal numbers for zero on some GPUs
        "rocdl.ignore_denormal_mode",
    ),
}
_GLOBAL = LLVMPointerType(IntAttr(1))
# from memref.atomic_rmw's kinds, see atomic_scatter, to AtomicBinOp in LLVMEnums.td
_KINDS = {0: 11, 1: 1, 5: 13, 6: 7, 7: 9, 9: 14, 10: 8, 11: 10}


@dataclass(frozen=True)
class RelaxAtomicsPass(ModulePass):
    """Replace ``memref.atomic_rmw`` on operands of an executable by relaxed operations.

    Needs what ``outline-dispatch`` leaves: one-dimensional memrefs from
    ``hal.interface.binding.subspan``. Leaves ``llvm.atomicrmw`` on pointers to global memory;
    additions become ``atom.relaxed.gpu`` in CUDA's assembly, ``global_atomic_add`` in AMD's.

    Parameters
    ----------
    kind
        ``cuda`` or ``hip``.
    """

    name = "relax-atomics"

    kind: str = "cuda"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite the module in place."""
        for inner in list(op.walk()):
            if isinstance(inner, memref.AtomicRMWOp):
                _relax(inner, _SCOPES[self.kind], _MARKS[self.kind])


def _relax(atomic: memref.AtomicRMWOp, scope: str, marks: Sequence[str]) -> None:
    assert isinstance(atomic.memref.type, MemRefType)
    (index,) = atomic.indices
    e = Emitter(InsertPoint.before(atomic))
    address = e.insert(memref.ExtractAlignedPointerAsIndexOp.get(atomic.memref))
    start = e.insert(
        IntToPtrOp.build(
            operands=[e.insert(arith.IndexCastOp(address, i64))], result_types=[_GLOBAL]
        )
    )
    place = e.insert(
        GEPOp.from_mixed_indices(
            start,
            [e.insert(arith.IndexCastOp(index, i64))],
            atomic.memref.type.element_type,
            _GLOBAL,
        )
    )
    kind = _KINDS[int(atomic.kind.value.data)]
    relaxed = llvm.AtomicRMWOp(place, atomic.value, kind, llvm.MONOTONIC, scope)
    for mark in marks:
        relaxed.attributes[mark] = UnitAttr()
    old = e.insert(relaxed)
    atomic.result.replace_all_uses_with(old)
    atomic.detach()
    atomic.erase()

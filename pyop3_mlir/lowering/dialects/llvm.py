"""The part of MLIR's ``llvm`` dialect that atomic operations need, declared for xDSL.

xDSL has the dialect, but not its atomic operations. Source:
https://mlir.llvm.org/docs/Dialects/LLVM/#llvmatomicrmw-llvmatomicrmwop.
"""

from __future__ import annotations

from xdsl.dialects.builtin import IntegerAttr, StringAttr, i64
from xdsl.dialects.llvm import GEPOp, IntToPtrOp, LLVMPointerType
from xdsl.ir import Attribute, Dialect, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect

__all__ = ["LLVM", "MONOTONIC", "AtomicRMWOp"]

MONOTONIC = 2
"""As MLIR numbers it (AtomicOrdering in LLVMEnums.td)."""


@irdl_op_definition
class AtomicRMWOp(IRDLOperation):
    """``llvm.atomicrmw``: change what a pointer points to, in one step; gives the old value.

    Parameters
    ----------
    ptr, val
        Where, and the other operand.
    bin_op
        Which change, as MLIR numbers it (AtomicBinOp in LLVMEnums.td): 11 adds real numbers.
    ordering
        :data:`MONOTONIC` promises nothing about other memory.
    syncscope
        Who sees it as one step, in LLVM's words for the target: ``device`` (CUDA), ``agent`` (AMD).
    """

    name = "llvm.atomicrmw"

    ptr = operand_def(LLVMPointerType)
    val = operand_def()
    res = result_def()

    bin_op = prop_def(IntegerAttr)
    ordering = prop_def(IntegerAttr)
    syncscope = opt_prop_def(StringAttr)

    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())

    def __init__(
        self,
        ptr: SSAValue | Operation,
        val: SSAValue,
        bin_op: int,
        ordering: int = MONOTONIC,
        syncscope: str | None = None,
    ) -> None:
        properties: dict[str, Attribute] = {
            "bin_op": IntegerAttr(bin_op, i64),
            "ordering": IntegerAttr(ordering, i64),
        }
        if syncscope is not None:
            properties["syncscope"] = StringAttr(syncscope)
        super().__init__(operands=[ptr, val], result_types=[val.type], properties=properties)


LLVM = Dialect("llvm", [AtomicRMWOp, GEPOp, IntToPtrOp], [LLVMPointerType])

"""Memory as GPUs have it: local tensors in a thread's own memory, tables where they can be."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import memref
from xdsl.dialects.builtin import ArrayAttr, MemRefType, ModuleOp
from xdsl.ir import Attribute, Operation
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.dialects.gpu import AddressSpaceAttr
from pyop3_mlir.lowering.dialects.spirv import StorageClassAttr
from pyop3_mlir.lowering.emit import Emitter, functions_of

__all__ = ["TABLES", "PlaceOnGpuPass"]

TABLES = "pyop3_mlir.tables"
"""Attribute of a function: the constants that its last operands are to be given."""

SPACES: dict[str, Attribute] = {
    "cuda": AddressSpaceAttr("private"),
    "hip": AddressSpaceAttr("private"),
    "vulkan": StorageClassAttr("Function"),
}
"""How each kind of device spells the memory of one thread."""


@dataclass(frozen=True)
class PlaceOnGpuPass(ModulePass):
    """Give local tensors a memory space; for Vulkan, turn constant globals into operands.

    Needs functions on memrefs without linalg operations. CUDA and ROCm keep globals, so that LLVM
    knows the numbers: of loops that it unrolls nothing is left to load. IREE's way to SPIR-V takes
    none. There the values of the new operands, which follow all others, are in the attribute
    :data:`TABLES`.

    Parameters
    ----------
    kind
        ``cuda``, ``hip`` or ``vulkan``.
    """

    name = "place-on-gpu"

    kind: str = "cuda"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function on memrefs in place."""
        space = SPACES[self.kind]
        values = {}
        for table in list(op.ops):
            if isinstance(table, memref.GlobalOp) and self.kind == "vulkan":
                values[table.sym_name.data] = table.initial_value
                table.detach()
                table.erase()
        for function in functions_of(op):
            block = function.body.block
            tables: list[Attribute] = []
            for inner in list(function.walk()):
                if isinstance(inner, memref.AllocaOp):
                    old = inner.memref.type
                    assert isinstance(old, MemRefType)
                    new = MemRefType(old.element_type, old.get_shape(), old.layout, space)
                    clone = memref.AllocaOp.build(
                        operands=[[], []], result_types=[new], properties={}
                    )
                    Emitter(InsertPoint.before(inner)).insert(clone)
                    inner.memref.replace_all_uses_with(clone.memref)
                elif isinstance(inner, memref.GetGlobalOp) and self.kind == "vulkan":
                    tables.append(values[inner.name_.root_reference.data])
                    argument = block.insert_arg(inner.memref.type, len(block.args))
                    inner.memref.replace_all_uses_with(argument)
                else:
                    continue
                # mypy has forgotten which operation it is
                done: Operation = inner
                done.detach()
                done.erase()
            if tables:
                function.attributes[TABLES] = ArrayAttr(tables)
                function.update_function_type()

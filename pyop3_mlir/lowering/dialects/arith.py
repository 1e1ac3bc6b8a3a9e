"""Operations of MLIR's ``arith`` dialect that xDSL lacks; :data:`Arith` is xDSL's plus these.

Source: https://mlir.llvm.org/docs/Dialects/ArithOps/.
"""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.ir import Attribute, Dialect, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, result_def, traits_def
from xdsl.traits import Pure

__all__ = ["Arith", "IndexCastUIOp"]


@irdl_op_definition
class IndexCastUIOp(IRDLOperation):
    """``arith.index_castui``: between integers, or vectors of them, and ``index``; zero-extends."""

    name = "arith.index_castui"

    input = operand_def()
    result = result_def()

    traits = traits_def(Pure())

    assembly_format = "$input attr-dict `:` type($input) `to` type($result)"

    def __init__(self, value: SSAValue | Operation, result_type: Attribute) -> None:
        super().__init__(operands=[value], result_types=[result_type])


Arith = Dialect("arith", [*arith.Arith.operations, IndexCastUIOp], [*arith.Arith.attributes])

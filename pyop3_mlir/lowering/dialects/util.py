"""The part of IREE's ``util`` dialect that is used, declared for xDSL.

Source: IREE 3.13, compiler/src/iree/compiler/Dialect/Util/IR/UtilOps.td.
"""

from __future__ import annotations

from xdsl.ir import Dialect, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, var_operand_def, var_result_def
from xdsl.utils.exceptions import VerifyException

__all__ = ["OptimizationBarrierOp", "Util"]


@irdl_op_definition
class OptimizationBarrierOp(IRDLOperation):
    """``util.optimization_barrier``: its results are its operands, and IREE does not look through.

    Keeps IREE from fusing a producer into a consumer.
    """

    name = "util.optimization_barrier"

    inputs = var_operand_def()
    outputs = var_result_def()

    def __init__(self, *inputs: SSAValue | Operation) -> None:
        values = [SSAValue.get(value) for value in inputs]
        super().__init__(operands=[values], result_types=[[value.type for value in values]])

    def verify_(self) -> None:
        if tuple(self.inputs.types) != tuple(self.outputs.types):
            raise VerifyException(f"{self.name}: operand and result types differ")


Util = Dialect("util", [OptimizationBarrierOp], [])

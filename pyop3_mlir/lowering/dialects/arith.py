"""Operations of MLIR's ``arith`` dialect that xDSL lacks; :data:`Arith` is xDSL's plus these.

Source: https://mlir.llvm.org/docs/Dialects/ArithOps/.
"""

from __future__ import annotations

from typing import ClassVar

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr, VectorType, i1
from xdsl.ir import Attribute, Dialect, Operation, SSAValue
from xdsl.irdl import (
    AnyAttr,
    IRDLOperation,
    VarConstraint,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

__all__ = ["Arith", "IndexCastUIOp", "VectorCmpfOp", "VectorCmpiOp", "VectorSelectOp"]


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


class _Lanewise(IRDLOperation):
    """An operation on vectors whose xDSL definition (0.75) knows scalars alone."""

    def verify_(self) -> None:
        types = [operand.type for operand in self.operands]
        vectors = [*types, self.results[0].type]
        shapes = {v.get_shape() for v in vectors if isinstance(v, VectorType)}
        if len(shapes) != 1 or not all(isinstance(v, VectorType) for v in vectors):
            raise VerifyException(f"{self.name}: expected vectors of equal shape")


@irdl_op_definition
class VectorCmpiOp(_Lanewise):
    """``arith.cmpi`` on vectors of integers."""

    T: ClassVar = VarConstraint("T", AnyAttr())

    name = "arith.cmpi"

    predicate = prop_def(IntegerAttr)
    lhs = operand_def(T)
    rhs = operand_def(T)
    result = result_def(VectorType.constr(i1))

    traits = traits_def(Pure())


@irdl_op_definition
class VectorCmpfOp(_Lanewise):
    """``arith.cmpf`` on vectors of floating point numbers."""

    T: ClassVar = VarConstraint("T", AnyAttr())

    name = "arith.cmpf"

    predicate = prop_def(IntegerAttr)
    fastmath = opt_prop_def(arith.FastMathFlagsAttr)
    lhs = operand_def(T)
    rhs = operand_def(T)
    result = result_def(VectorType.constr(i1))

    traits = traits_def(Pure())


@irdl_op_definition
class VectorSelectOp(_Lanewise):
    """``arith.select`` lane by lane."""

    T: ClassVar = VarConstraint("T", AnyAttr())

    name = "arith.select"

    cond = operand_def(VectorType.constr(i1))
    lhs = operand_def(T)
    rhs = operand_def(T)
    result = result_def(T)

    traits = traits_def(Pure())


Arith = Dialect("arith", [*arith.Arith.operations, IndexCastUIOp], [*arith.Arith.attributes])

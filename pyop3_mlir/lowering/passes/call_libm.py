"""Call the C library where IREE's own code lacks a function or loses digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import func, math, vector
from xdsl.dialects.builtin import Float32Type, Float64Type, MemRefType, ModuleOp, VectorType
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from pyop3_mlir.lowering.dialects.vector import FromElementsOp
from pyop3_mlir.lowering.emit import Emitter, declare_functions, functions_of

__all__ = ["CallLibmPass"]

FUNCTIONS: dict[type[Operation], tuple[str | None, str | None]] = {
    math.ErfOp: ("erf", None),
    math.PowFOp: ("pow", "powf"),
    math.SinhOp: ("sinh", "sinhf"),
    math.Log1pOp: ("log1p", "log1pf"),
    math.SinOp: (None, "sinf"),
    math.CosOp: (None, "cosf"),
    math.TanOp: (None, "tanf"),
    math.AtanOp: (None, "atanf"),
    math.Atan2Op: (None, "atan2f"),
}
"""Names in double and in single precision, None where IREE 3.13 has a good function.

Measured: it has no erf in double precision; pow is exp(y log(x)), wrong in the last 9 bits where
the result is large; sinh and log1p cancel near zero. In single precision sin and tan keep 2 of 7
digits near zero and none beyond some 1e10, and atan and atan2 are wrong by 40 units in the last
place.
"""


@dataclass(frozen=True)
class CallLibmPass(ModulePass):
    """Replace operations of ``math`` by calls, one for each lane of a vector.

    For CPUs. Looks at functions on memrefs only: what stays on tensors is IREE's to lower. Leaves
    private declarations of the functions that are called.
    """

    name = "call-libm"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite the module in place."""
        for function in functions_of(op):
            if _on_memrefs(function):
                for inner in list(function.walk()):
                    if type(inner) in FUNCTIONS:
                        _replace(inner)
        declare_functions(op)


def _on_memrefs(function: func.FuncOp) -> bool:
    return any(isinstance(type_, MemRefType) for type_ in function.function_type.inputs)


def _replace(op: Operation) -> None:
    type_ = op.results[0].type
    element = type_.element_type if isinstance(type_, VectorType) else type_
    double, single = FUNCTIONS[type(op)]
    name = double if isinstance(element, Float64Type) else single
    if name is None or not isinstance(element, Float32Type | Float64Type):
        return
    e = Emitter(InsertPoint.before(op))
    if isinstance(type_, VectorType):
        (width,) = type_.get_shape()
        lanes = [
            _call(e, name, [e.insert(vector.ExtractOp(v, [k], element)) for v in op.operands])
            for k in range(width)
        ]
        result = e.insert(FromElementsOp(lanes))
    else:
        result = _call(e, name, op.operands)
    Rewriter.replace_op(op, [], [result])


def _call(e: Emitter, name: str, operands: Sequence[SSAValue[Attribute]]) -> SSAValue:
    return e.insert(func.CallOp(name, operands, [operands[-1].type]))

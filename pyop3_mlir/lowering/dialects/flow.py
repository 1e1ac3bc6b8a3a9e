"""``flow.dispatch`` of IREE, declared for xDSL: a call of an executable's entry point.

Source: IREE 3.13, compiler/src/iree/compiler/Dialect/Flow/IR/FlowOps.td.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    ArrayAttr,
    IndexType,
    IntegerAttr,
    SymbolRefAttr,
    TensorType,
)
from xdsl.ir import Attribute, Dialect, Operation, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    var_operand_def,
    var_result_def,
)
from xdsl.utils.exceptions import VerifyException

__all__ = ["DispatchOp", "Flow"]


def _dynamic(types: Sequence[Attribute]) -> int:
    return sum(
        size == DYNAMIC_INDEX
        for type_ in types
        if isinstance(type_, TensorType)
        for size in type_.get_shape()
    )


@irdl_op_definition
class DispatchOp(IRDLOperation):
    """``flow.dispatch``: run an entry point over a workload.

    Parameters
    ----------
    executable, entry_point
        Names of the ``hal.executable.source`` and of its export.
    workload
        ``index`` values that the export's count region turns into a number of workgroups.
    arguments
        Tensors become bindings in this order, scalars push constants (see
        :class:`~pyop3_mlir.lowering.dialects.hal.InterfaceConstantLoadOp`).
    argument_dims
        ``index``: sizes of all dynamic dimensions of the tensors among ``arguments``, in order.
    results
        For each result its type, or the number of the argument that it updates in place. IREE
        copies nothing where that argument is the function's own and its dynamic sizes come from
        ``tensor.dim`` of that argument.
    result_dims
        ``index``: sizes of all dynamic dimensions of the results, in order. By default, the
        ``argument_dims`` of the tied arguments.
    """

    name = "flow.dispatch"

    workload = var_operand_def(IndexType)
    arguments = var_operand_def()
    argument_dims = var_operand_def(IndexType)
    result_dims = var_operand_def(IndexType)
    entry_points = prop_def(ArrayAttr[SymbolRefAttr])
    tied_operands = opt_prop_def(ArrayAttr[IntegerAttr])
    outputs = var_result_def()

    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    def __init__(
        self,
        executable: str,
        entry_point: str,
        workload: Sequence[SSAValue | Operation],
        arguments: Sequence[SSAValue | Operation],
        argument_dims: Sequence[SSAValue | Operation],
        results: Sequence[Attribute | int],
        result_dims: Sequence[SSAValue | Operation] | None = None,
    ) -> None:
        values = [SSAValue.get(argument) for argument in arguments]
        if result_dims is None:
            result_dims = []
            for tied in results:
                if not isinstance(tied, int):
                    raise ValueError("flow.dispatch: results that are not tied need result_dims")
                first = _dynamic([value.type for value in values[:tied]])
                result_dims.extend(argument_dims[first : first + _dynamic([values[tied].type])])
        super().__init__(
            operands=[workload, values, argument_dims, result_dims],
            properties={
                "entry_points": ArrayAttr([SymbolRefAttr(executable, [entry_point])]),
                "tied_operands": ArrayAttr(
                    [
                        IntegerAttr.from_index_int_value(r if isinstance(r, int) else -1)
                        for r in results
                    ]
                )
                if any(isinstance(r, int) for r in results)
                else None,
            },
            result_types=[[values[r].type if isinstance(r, int) else r for r in results]],
        )

    def verify_(self) -> None:
        for types, dims, what in (
            (self.arguments.types, self.argument_dims, "arguments"),
            (self.outputs.types, self.result_dims, "results"),
        ):
            if _dynamic(types) != len(dims):
                raise VerifyException(
                    f"{self.name}: the {what} have {_dynamic(types)} dynamic dimensions, "
                    f"{len(dims)} sizes were given"
                )
        if self.tied_operands is None:
            return
        if len(self.tied_operands) != len(self.outputs):
            raise VerifyException(f"{self.name}: tied_operands needs one entry a result")
        for number, tied in enumerate(self.tied_operands):
            position = tied.value.data
            if position < 0:
                continue
            if position >= len(self.arguments):
                raise VerifyException(f"{self.name}: result {number} is tied to no argument")
            if self.arguments[position].type != self.outputs[number].type:
                raise VerifyException(
                    f"{self.name}: result {number} and its tied argument differ in type"
                )


Flow = Dialect("flow", [DispatchOp], [])

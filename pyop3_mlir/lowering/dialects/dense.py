"""``dense.solve``: many small systems of linear equations, an operation of this package's own.

Neither ``linalg`` nor any other upstream dialect has an operation for what cannot be said as loops
whose iterations are independent. It lives from the tensor stage until the pass ``eliminate``.
"""

from __future__ import annotations

from typing import Any

from xdsl.dialects.builtin import (
    I64,
    ComplexType,
    Float32Type,
    Float64Type,
    IntegerAttr,
    MemRefType,
    TensorType,
    i64,
)
from xdsl.ir import Attribute, Dialect, SSAValue
from xdsl.irdl import (
    BaseAttr,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_result_def,
    prop_def,
)
from xdsl.utils.exceptions import VerifyException

__all__ = ["Dense", "SolveOp"]

_BUFFER = BaseAttr(TensorType) | BaseAttr(MemRefType)


@irdl_op_definition
class SolveOp(IRDLOperation):
    """``dense.solve``: X of ``matrix X = side``, both of which it uses up.

    Parameters
    ----------
    matrix
        ``[*batch, n, n]`` or ``[*batch, n, n, cell]``, of floats or complex numbers.
    side
        ``[*batch, n, *columns]``, with the cell last if ``matrix`` has it. On memrefs the solution
        takes its place; on tensors it is the result.
    batch
        Number of the leading dimensions that ``matrix`` and ``side`` share.
    """

    name = "dense.solve"

    matrix = operand_def(_BUFFER)
    side = operand_def(_BUFFER)
    batch = prop_def(IntegerAttr[I64])
    result = opt_result_def(TensorType)

    assembly_format = (
        "$matrix `,` $side `batch` $batch attr-dict `:` type($matrix) `,` type($side) "
        "(`->` type($result)^)?"
    )

    def __init__(
        self, matrix: SSAValue, side: SSAValue, batch: int, result: Attribute | None = None
    ) -> None:
        super().__init__(
            operands=[matrix, side],
            properties={"batch": IntegerAttr(batch, i64)},
            result_types=[result],
        )

    @property
    def has_cells(self) -> bool:
        """Whether the last dimension is the cell."""
        return len(_shape(self.matrix)) > self.batch.value.data + 2

    @property
    def columns(self) -> tuple[int, ...]:
        """Extents of the dimensions that number the right-hand sides."""
        shape = _shape(self.side)
        return shape[self.batch.value.data + 1 : len(shape) - self.has_cells]

    def verify_(self) -> None:
        batch = self.batch.value.data
        matrix, side = _shape(self.matrix), _shape(self.side)
        cells = matrix[batch + 2 :]
        if len(matrix) < batch + 2 or len(cells) > 1 or matrix[batch] != matrix[batch + 1]:
            raise VerifyException(f"{self.name}: no batch of square matrices: {self.matrix.type}")
        if side[: batch + 1] != matrix[: batch + 1] or side[len(side) - len(cells) :] != cells:
            raise VerifyException(f"{self.name}: {self.side.type} does not fit {self.matrix.type}")
        elements = {value.type.element_type for value in (self.matrix, self.side)}  # type: ignore[attr-defined]
        if len(elements) > 1 or not all(map(_is_number, elements)):
            raise VerifyException(f"{self.name}: expected one type of floats or complex numbers")
        if isinstance(self.side.type, TensorType) != (self.result is not None):
            raise VerifyException(f"{self.name}: a result belongs to tensors, and to them alone")
        if self.result is not None and self.result.type != self.side.type:
            raise VerifyException(f"{self.name}: the result is to have the type of the sides")


def _shape(value: SSAValue) -> tuple[int, ...]:
    type_: Any = value.type
    return tuple(type_.get_shape())


def _is_number(type: Attribute) -> bool:
    return isinstance(type, Float32Type | Float64Type | ComplexType)


Dense = Dialect("dense", [SolveOp], [])

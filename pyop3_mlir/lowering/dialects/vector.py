"""Operations of MLIR's ``vector`` dialect that xDSL lacks; :data:`Vector` is xDSL's plus these.

Source: https://mlir.llvm.org/docs/Dialects/Vector/.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import vector
from xdsl.dialects.builtin import (
    DenseArrayBase,
    IndexType,
    IntegerType,
    MemRefType,
    VectorType,
    i1,
    i64,
)
from xdsl.ir import Dialect, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect, Pure
from xdsl.utils.exceptions import VerifyException

__all__ = [
    "ConstantMaskOp",
    "FromElementsOp",
    "GatherOp",
    "ScatterOp",
    "ShapeCastOp",
    "StepOp",
    "TransposeOp",
    "Vector",
]


def _check_indexed(
    op: Operation, base: SSAValue, offsets: Sequence[SSAValue], *vectors: SSAValue
) -> None:
    assert isinstance(base.type, MemRefType)
    if base.type.get_num_dims() != len(offsets):
        raise VerifyException(f"{op.name}: expected one offset for each dimension of the memref")
    index, mask, *values = (v.type for v in vectors)
    assert isinstance(index, VectorType)
    assert isinstance(mask, VectorType)
    if not isinstance(index.element_type, IntegerType | IndexType):
        raise VerifyException(f"{op.name}: the indices must be a vector of integers or of index")
    if mask.element_type != i1 or mask.get_shape() != index.get_shape():
        raise VerifyException(f"{op.name}: the mask must be a vector of i1 as long as the indices")
    for value in values:
        assert isinstance(value, VectorType)
        if value != VectorType(base.type.element_type, index.get_shape()):
            raise VerifyException(
                f"{op.name}: {value} does not hold one {base.type.element_type} for each index"
            )


@irdl_op_definition
class GatherOp(IRDLOperation):
    """``vector.gather``: ``base[offsets...][indices[i]]`` where ``mask[i]``, else ``pass_thru[i]``.

    Parameters
    ----------
    base
        Memref; the indices count elements of its last dimension.
    offsets
        ``index``: one for each dimension of ``base``, where the gather starts.
    indices
        Vector of integers or of ``index``. Taken as signed.
    mask
        Vector of ``i1``; memory is not read where it is false.
    pass_thru
        Vector of the element type of ``base``, as long as ``indices``.
    """

    name = "vector.gather"

    base = operand_def(MemRefType)
    offsets = var_operand_def(IndexType)
    indices = operand_def(VectorType)
    mask = operand_def(VectorType)
    pass_thru = operand_def(VectorType)
    result = result_def(VectorType)

    traits = traits_def(MemoryReadEffect())

    assembly_format = (
        "$base `[` $offsets `]` `[` $indices `]` `,` $mask `,` $pass_thru attr-dict `:` "
        "type($base) `,` type($indices) `,` type($mask) `,` type($pass_thru) `into` type($result)"
    )

    def __init__(
        self,
        base: SSAValue | Operation,
        offsets: Sequence[SSAValue | Operation],
        indices: SSAValue | Operation,
        mask: SSAValue | Operation,
        pass_thru: SSAValue | Operation,
    ) -> None:
        pass_thru = SSAValue.get(pass_thru)
        super().__init__(
            operands=[base, offsets, indices, mask, pass_thru], result_types=[pass_thru.type]
        )

    def verify_(self) -> None:
        _check_indexed(
            self, self.base, self.offsets, self.indices, self.mask, self.pass_thru, self.result
        )


@irdl_op_definition
class ScatterOp(IRDLOperation):
    """``vector.scatter``: store ``value[i]`` at ``base[offsets...][indices[i]]`` where ``mask[i]``.

    Where indices are equal the element stored last wins, and MLIR leaves open which that is.
    """

    name = "vector.scatter"

    base = operand_def(MemRefType)
    offsets = var_operand_def(IndexType)
    indices = operand_def(VectorType)
    mask = operand_def(VectorType)
    value = operand_def(VectorType)

    traits = traits_def(MemoryWriteEffect())

    assembly_format = (
        "$base `[` $offsets `]` `[` $indices `]` `,` $mask `,` $value attr-dict `:` "
        "type($base) `,` type($indices) `,` type($mask) `,` type($value)"
    )

    def __init__(
        self,
        base: SSAValue | Operation,
        offsets: Sequence[SSAValue | Operation],
        indices: SSAValue | Operation,
        mask: SSAValue | Operation,
        value: SSAValue | Operation,
    ) -> None:
        super().__init__(operands=[base, offsets, indices, mask, value])

    def verify_(self) -> None:
        _check_indexed(self, self.base, self.offsets, self.indices, self.mask, self.value)


@irdl_op_definition
class FromElementsOp(IRDLOperation):
    """``vector.from_elements``: the vector of these scalars, in row-major order."""

    name = "vector.from_elements"

    elements = var_operand_def()
    result = result_def(VectorType)

    traits = traits_def(Pure())

    def __init__(
        self,
        elements: Sequence[SSAValue | Operation],
        result_type: VectorType | None = None,
    ) -> None:
        values = [SSAValue.get(element) for element in elements]
        if result_type is None:
            result_type = VectorType(values[0].type, [len(values)])
        super().__init__(operands=[values], result_types=[result_type])

    def verify_(self) -> None:
        assert isinstance(self.result.type, VectorType)
        size = 1
        for extent in self.result.type.get_shape():
            size *= extent
        if len(self.elements) != size:
            raise VerifyException(
                f"{self.name}: {len(self.elements)} elements for {self.result.type}"
            )
        if any(type_ != self.result.type.element_type for type_ in self.elements.types):
            raise VerifyException(f"{self.name}: the elements are not all of the element type")


@irdl_op_definition
class ConstantMaskOp(IRDLOperation):
    """``vector.constant_mask``: true in the first ``sizes[d]`` positions of each dimension d."""

    name = "vector.constant_mask"

    mask_dim_sizes = prop_def(DenseArrayBase)
    result = result_def(VectorType)

    traits = traits_def(Pure())

    def __init__(self, sizes: Sequence[int], shape: Sequence[int] | None = None) -> None:
        super().__init__(
            properties={"mask_dim_sizes": DenseArrayBase.from_list(i64, sizes)},
            result_types=[VectorType(i1, sizes if shape is None else shape)],
        )

    def verify_(self) -> None:
        assert isinstance(self.result.type, VectorType)
        sizes, shape = self.mask_dim_sizes.get_values(), self.result.type.get_shape()
        if len(sizes) != len(shape) or any(s > n for s, n in zip(sizes, shape, strict=True)):
            raise VerifyException(f"{self.name}: sizes {sizes} do not fit into {shape}")


@irdl_op_definition
class StepOp(IRDLOperation):
    """``vector.step``: the vector 0, 1, 2, ... of ``index``."""

    name = "vector.step"

    result = result_def(VectorType)

    traits = traits_def(Pure())

    assembly_format = "attr-dict `:` type($result)"

    def __init__(self, size: int) -> None:
        super().__init__(result_types=[VectorType(IndexType(), [size])])


@irdl_op_definition
class ShapeCastOp(IRDLOperation):
    """``vector.shape_cast``: the same elements in another shape."""

    name = "vector.shape_cast"

    source = operand_def(VectorType)
    result = result_def(VectorType)

    traits = traits_def(Pure())

    assembly_format = "$source attr-dict `:` type($source) `to` type($result)"

    def __init__(self, source: SSAValue | Operation, shape: Sequence[int]) -> None:
        source = SSAValue.get(source, type=VectorType)
        super().__init__(
            operands=[source], result_types=[VectorType(source.type.element_type, shape)]
        )


@irdl_op_definition
class TransposeOp(IRDLOperation):
    """``vector.transpose``: dimension d of the result is ``permutation[d]`` of the source."""

    name = "vector.transpose"

    vector = operand_def(VectorType)
    permutation = prop_def(DenseArrayBase)
    result = result_def(VectorType)

    traits = traits_def(Pure())

    def __init__(self, source: SSAValue | Operation, permutation: Sequence[int]) -> None:
        source = SSAValue.get(source, type=VectorType)
        shape = source.type.get_shape()
        super().__init__(
            operands=[source],
            properties={"permutation": DenseArrayBase.from_list(i64, permutation)},
            result_types=[VectorType(source.type.element_type, [shape[d] for d in permutation])],
        )


Vector = Dialect(
    "vector",
    [
        *vector.Vector.operations,
        ConstantMaskOp,
        FromElementsOp,
        GatherOp,
        ScatterOp,
        ShapeCastOp,
        StepOp,
        TransposeOp,
    ],
    [*vector.Vector.attributes],
)

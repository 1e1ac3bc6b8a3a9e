"""MLIR's ``linalg`` dialect with a fill of any element type; :data:`Linalg` is xDSL's with it.

Source: https://mlir.llvm.org/docs/Dialects/Linalg/#linalgfill-linalgfillop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from xdsl.dialects import linalg
from xdsl.dialects.builtin import ArrayAttr, MemRefType, TensorType
from xdsl.dialects.linalg import ops
from xdsl.dialects.linalg.abstract_ops import NamedOperation
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Attribute, Block, Dialect, Operation, Region, SSAValue
from xdsl.ir.affine import AffineMap
from xdsl.irdl import irdl_op_definition
from xdsl.utils.exceptions import VerifyException

__all__ = ["FillOp", "Linalg", "operations_for", "read_by"]


@irdl_op_definition
class FillOp(NamedOperation):
    """``linalg.fill``; xDSL's own refuses complex numbers and indices."""

    name = "linalg.fill"

    PRINT_ATTRS_IN_FRONT: ClassVar[bool] = True

    def __init__(self, value: SSAValue, output: SSAValue, results: Sequence[Attribute]) -> None:
        region = self.get_hidden_region([value], [output])
        super().__init__([value], [output], [results], hidden_region=region)

    @classmethod
    def get_hidden_region(cls, inputs: Sequence[SSAValue], outputs: Sequence[SSAValue]) -> Region:
        block = Block(arg_types=[_scalar(v.type) for v in (*inputs, *outputs)])
        block.add_op(ops.YieldOp(block.args[0]))
        return Region(block)

    def get_default_indexing_maps(self) -> Sequence[AffineMap]:
        return (AffineMap(self._rank, 0, ()), AffineMap.identity(self._rank))

    def get_iterator_types(self) -> ArrayAttr[IteratorTypeAttr]:
        return ArrayAttr([IteratorTypeAttr.parallel()] * self._rank)

    @property
    def _rank(self) -> int:
        output: Any = self.outputs[0].type
        return len(output.get_shape())

    def verify_(self) -> None:
        (value,), (output,) = self.inputs, self.outputs
        if not isinstance(output.type, _BUFFER) or value.type != _scalar(output.type):
            raise VerifyException(f"{self.name}: cannot fill {output.type} with {value.type}")


# complex numbers have an element type too, and count as shaped in xDSL
_BUFFER = (TensorType, MemRefType)


def _scalar(type_: Any) -> Attribute:
    element: Attribute = type_.element_type if isinstance(type_, _BUFFER) else type_
    return element


def operations_for(op: ops.GenericOp, result: int) -> list[Operation]:
    """The operations in the body that a result is computed by, in order, but for the terminator."""
    block = op.body.block
    last = block.last_op
    assert isinstance(last, ops.YieldOp)
    found: set[Operation] = set()
    stack = [last.operands[result]]
    while stack:
        owner = stack.pop().owner
        if isinstance(owner, Operation) and owner.parent is block and owner not in found:
            found.add(owner)
            stack += read_by([owner])
    return [inner for inner in block.ops if inner in found]


def read_by(operations: Iterable[Operation]) -> set[SSAValue]:
    """What operations use, those in their regions too."""
    return {value for outer in operations for inner in outer.walk() for value in inner.operands}


Linalg = Dialect(
    "linalg",
    [FillOp if op is ops.FillOp else op for op in linalg.Linalg.operations],
    [*linalg.Linalg.attributes],
)

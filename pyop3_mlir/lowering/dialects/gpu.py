"""The part of MLIR's ``gpu`` dialect that hand-written GPU dispatches need.

xDSL has a ``gpu`` dialect, but prints its attributes in a form (``#gpu<dim x>``) that MLIR no
longer reads. Source: https://mlir.llvm.org/docs/Dialects/GPU/.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IndexType, IntegerAttr, StringAttr
from xdsl.ir import Attribute, Dialect, ParametrizedAttribute
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

__all__ = ["GPU", "AddressSpaceAttr", "DimensionAttr", "ThreadIdOp"]


@irdl_attr_definition
class DimensionAttr(ParametrizedAttribute):
    """``#gpu.dim<x>``: a dimension of a workgroup, x, y or z."""

    name = "gpu.dim"

    dimension: StringAttr

    def __init__(self, dimension: str) -> None:
        super().__init__(StringAttr(dimension))

    def verify(self) -> None:
        if self.dimension.data not in ("x", "y", "z"):
            raise VerifyException(f"{self.name}: {self.dimension.data} is none of x, y and z")

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(self.dimension.data)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return (StringAttr(parser.parse_identifier()),)


@irdl_attr_definition
class AddressSpaceAttr(ParametrizedAttribute):
    """``#gpu.address_space<...>``: ``private`` is the memory of one thread."""

    name = "gpu.address_space"

    space: StringAttr

    def __init__(self, space: str = "private") -> None:
        super().__init__(StringAttr(space))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(self.space.data)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return (StringAttr(parser.parse_identifier()),)


@irdl_op_definition
class ThreadIdOp(IRDLOperation):
    """``gpu.thread_id``: number of this thread in its workgroup, along x, y or z."""

    name = "gpu.thread_id"

    dimension = prop_def(DimensionAttr)
    upper_bound = opt_prop_def(IntegerAttr)
    result = result_def(IndexType)

    traits = traits_def(Pure())

    def __init__(self, dimension: str = "x") -> None:
        super().__init__(
            properties={"dimension": DimensionAttr(dimension)}, result_types=[IndexType()]
        )


GPU = Dialect("gpu", [ThreadIdOp], [AddressSpaceAttr, DimensionAttr])

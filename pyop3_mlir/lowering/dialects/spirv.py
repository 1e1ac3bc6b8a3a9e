"""The storage classes of SPIR-V, declared for xDSL: where memory is on a Vulkan device."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute, Dialect, ParametrizedAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

__all__ = ["SPIRV", "StorageClassAttr"]


@irdl_attr_definition
class StorageClassAttr(ParametrizedAttribute):
    """``#spirv.storage_class<...>``: ``Function`` is the memory of one invocation."""

    name = "spirv.storage_class"

    storage: StringAttr

    def __init__(self, storage: str = "Function") -> None:
        super().__init__(StringAttr(storage))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(self.storage.data)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return (StringAttr(parser.parse_identifier()),)


SPIRV = Dialect("spirv", [], [StorageClassAttr])

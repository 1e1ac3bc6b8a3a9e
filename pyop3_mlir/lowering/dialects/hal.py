"""The part of IREE's ``hal`` dialect that hand-written executables need, declared for xDSL.

A ``hal.executable.source`` holds one ``hal.executable.export`` for each entry point and one
``builtin.module`` with a ``func.func`` of the same name, which reads its operands through
``hal.interface.*``. Source: IREE 3.13, compiler/src/iree/compiler/Dialect/HAL/IR/HALOps.td.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    ArrayAttr,
    IndexType,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    StringAttr,
    SymbolNameConstraint,
    TensorType,
    i32,
)
from xdsl.ir import (
    Attribute,
    Block,
    Dialect,
    Operation,
    ParametrizedAttribute,
    Region,
    SSAValue,
    TypeAttribute,
)
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.traits import (
    IsolatedFromAbove,
    IsTerminator,
    NoTerminator,
    Pure,
    SymbolOpInterface,
    SymbolTable,
)
from xdsl.utils.exceptions import VerifyException

__all__ = [
    "HAL",
    "DeviceType",
    "ExecutableExportOp",
    "ExecutableSourceEndOp",
    "ExecutableSourceOp",
    "InterfaceBindingSubspanOp",
    "InterfaceConstantLoadOp",
    "InterfaceWorkgroupCountOp",
    "InterfaceWorkgroupIDOp",
    "InterfaceWorkgroupSizeOp",
    "PipelineBindingAttr",
    "PipelineLayoutAttr",
    "ReturnOp",
]

READ_ONLY = 1
"""The bit of a binding's ``descriptor_flags`` that says that the executable only reads it."""


@irdl_attr_definition
class DeviceType(ParametrizedAttribute, TypeAttribute):
    """``!hal.device``: a logical device at run time."""

    name = "hal.device"


@irdl_attr_definition
class PipelineBindingAttr(ParametrizedAttribute):
    """``#hal.pipeline.binding<storage_buffer[, ReadOnly]>``: how a buffer reaches an executable.

    Parameters
    ----------
    kind
        ``storage_buffer`` or ``uniform_buffer``.
    read_only
        Whether the executable only reads the buffer.
    """

    name = "hal.pipeline.binding"

    kind: StringAttr
    flags: IntegerAttr

    def __init__(self, read_only: bool = False, kind: str = "storage_buffer") -> None:
        super().__init__(StringAttr(kind), IntegerAttr(READ_ONLY if read_only else 0, i32))

    @property
    def read_only(self) -> bool:
        """Whether the executable only reads the buffer."""
        return bool(self.flags.value.data & READ_ONLY)

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(self.kind.data)
            if self.read_only:
                printer.print_string(", ReadOnly")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            kind = parser.parse_identifier()
            flags = 0
            if parser.parse_optional_punctuation(","):
                parser.parse_keyword("ReadOnly")
                flags = READ_ONLY
        return (StringAttr(kind), IntegerAttr(flags, i32))


@irdl_attr_definition
class PipelineLayoutAttr(ParametrizedAttribute):
    """``#hal.pipeline.layout<constants = n, bindings = [...]>``: what an executable is given.

    Parameters
    ----------
    bindings
        One a buffer.
    constants
        Number of 32-bit constants pushed with the dispatch.
    """

    name = "hal.pipeline.layout"

    bindings: ArrayAttr[PipelineBindingAttr]
    constants: IntegerAttr

    def __init__(self, bindings: Sequence[PipelineBindingAttr], constants: int = 0) -> None:
        super().__init__(ArrayAttr(bindings), IntegerAttr(constants, i32))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            if self.constants.value.data:
                printer.print_string(f"constants = {self.constants.value.data}, ")
            printer.print_string("bindings = ")
            printer.print_attribute(self.bindings)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            constants = 0
            if parser.parse_optional_keyword("constants"):
                parser.parse_punctuation("=")
                constants = parser.parse_integer()
                parser.parse_punctuation(",")
            parser.parse_keyword("bindings")
            parser.parse_punctuation("=")
            bindings = parser.parse_attribute()
        return (bindings, IntegerAttr(constants, i32))


@irdl_op_definition
class ReturnOp(IRDLOperation):
    """``hal.return``: ends the region of an export that counts workgroups."""

    name = "hal.return"

    arguments = var_operand_def()

    traits = traits_def(IsTerminator())

    assembly_format = "attr-dict ($arguments^ `:` type($arguments))?"

    def __init__(self, *arguments: SSAValue | Operation) -> None:
        super().__init__(operands=[arguments])


@irdl_op_definition
class ExecutableExportOp(IRDLOperation):
    """``hal.executable.export``: an entry point of an executable.

    Parameters
    ----------
    sym_name
        Name of the function in the executable's module.
    layout
        What the entry point is given.
    count
        Region with the block arguments ``(!hal.device, workload: index...)`` that ends in a
        :class:`ReturnOp` of three ``index`` values: the number of workgroups in x, y and z.
    ordinal
        Number of the entry point in its executable.
    """

    name = "hal.executable.export"

    sym_name = prop_def(SymbolNameConstraint())
    sym_visibility = opt_prop_def(StringAttr)
    ordinal = opt_prop_def(IntegerAttr)
    layout = prop_def(PipelineLayoutAttr)
    workgroup_size = opt_prop_def(ArrayAttr[IntegerAttr])
    subgroup_size = opt_prop_def(IntegerAttr)

    workgroup_count = region_def()
    condition = region_def()

    traits = traits_def(SymbolOpInterface(), IsolatedFromAbove())

    def __init__(
        self, sym_name: str, layout: PipelineLayoutAttr, count: Region, ordinal: int = 0
    ) -> None:
        super().__init__(
            properties={
                "sym_name": StringAttr(sym_name),
                "sym_visibility": StringAttr("public"),
                "ordinal": IntegerAttr.from_index_int_value(ordinal),
                "layout": layout,
            },
            regions=[count, Region()],
        )

    def verify_(self) -> None:
        if not self.workgroup_count.blocks:
            return
        block = self.workgroup_count.block
        types = block.arg_types
        if not types or not isinstance(types[0], DeviceType):
            raise VerifyException(f"{self.name}: the first argument of count must be !hal.device")
        if not all(isinstance(t, IndexType) for t in types[1:]):
            raise VerifyException(f"{self.name}: the workload must be of type index")
        last = block.last_op
        if not isinstance(last, ReturnOp) or len(last.arguments) != 3:
            raise VerifyException(f"{self.name}: count must end in hal.return of three values")


@irdl_op_definition
class ExecutableSourceEndOp(IRDLOperation):
    """``hal.executable.source_end``: the terminator of a :class:`ExecutableSourceOp`."""

    name = "hal.executable.source_end"

    traits = traits_def(IsTerminator())

    assembly_format = "attr-dict"


@irdl_op_definition
class ExecutableSourceOp(IRDLOperation):
    """``hal.executable.source``: an executable whose code is written by hand.

    Parameters
    ----------
    sym_name
        Its name.
    exports
        Its entry points, with ordinals 0, 1, ...
    body
        The module that holds one ``func.func`` of type ``() -> ()`` for each entry point.
    """

    name = "hal.executable.source"

    sym_name = prop_def(SymbolNameConstraint())
    sym_visibility = opt_prop_def(StringAttr)
    objects = opt_prop_def(Attribute)

    body = region_def("single_block")

    traits = traits_def(SymbolOpInterface(), SymbolTable(), IsolatedFromAbove(), NoTerminator())

    def __init__(
        self, sym_name: str, exports: Sequence[ExecutableExportOp], body: ModuleOp
    ) -> None:
        super().__init__(
            properties={
                "sym_name": StringAttr(sym_name),
                "sym_visibility": StringAttr("private"),
            },
            regions=[Region(Block([*exports, body, ExecutableSourceEndOp()]))],
        )

    @property
    def exports(self) -> tuple[ExecutableExportOp, ...]:
        """The entry points."""
        return tuple(op for op in self.body.block.ops if isinstance(op, ExecutableExportOp))

    @property
    def module(self) -> ModuleOp:
        """The module with the functions of the entry points."""
        return next(op for op in self.body.block.ops if isinstance(op, ModuleOp))

    def verify_(self) -> None:
        if not isinstance(self.body.block.last_op, ExecutableSourceEndOp):
            raise VerifyException(f"{self.name}: must end in hal.executable.source_end")


class _InterfaceWorkgroupOp(IRDLOperation):
    dimension = prop_def(IntegerAttr)
    upper_bound = opt_prop_def(IntegerAttr)
    result = result_def(IndexType)

    traits = traits_def(Pure())

    def __init__(self, dimension: int) -> None:
        super().__init__(
            properties={"dimension": IntegerAttr.from_index_int_value(dimension)},
            result_types=[IndexType()],
        )

    def verify_(self) -> None:
        if not 0 <= self.dimension.value.data < 3:
            raise VerifyException(f"{self.name}: the dimension must be 0, 1 or 2")


@irdl_op_definition
class InterfaceWorkgroupIDOp(_InterfaceWorkgroupOp):
    """``hal.interface.workgroup.id[dimension]``: which workgroup this is."""

    name = "hal.interface.workgroup.id"


@irdl_op_definition
class InterfaceWorkgroupCountOp(_InterfaceWorkgroupOp):
    """``hal.interface.workgroup.count[dimension]``: how many workgroups there are."""

    name = "hal.interface.workgroup.count"


@irdl_op_definition
class InterfaceWorkgroupSizeOp(_InterfaceWorkgroupOp):
    """``hal.interface.workgroup.size[dimension]``: how many threads a workgroup has."""

    name = "hal.interface.workgroup.size"


@irdl_op_definition
class InterfaceConstantLoadOp(IRDLOperation):
    """``hal.interface.constant.load``: a 32-bit constant pushed with the dispatch.

    IREE splits wider arguments of a dispatch only in code that it generates itself: an ``i64`` or
    ``index`` goes through two ``i32`` (or one, where it is known to fit).
    """

    name = "hal.interface.constant.load"

    layout = prop_def(PipelineLayoutAttr)
    ordinal = prop_def(IntegerAttr)
    alignment = opt_prop_def(IntegerAttr)
    values = opt_prop_def(ArrayAttr)
    result = result_def()

    traits = traits_def(Pure())

    def __init__(
        self, layout: PipelineLayoutAttr, ordinal: int, result_type: Attribute = i32
    ) -> None:
        super().__init__(
            properties={"layout": layout, "ordinal": IntegerAttr.from_index_int_value(ordinal)},
            result_types=[result_type],
        )

    def verify_(self) -> None:
        if not 0 <= self.ordinal.value.data < self.layout.constants.value.data:
            raise VerifyException(
                f"{self.name}: ordinal {self.ordinal.value.data}, but the layout has "
                f"{self.layout.constants.value.data} constants"
            )


@irdl_op_definition
class InterfaceBindingSubspanOp(IRDLOperation):
    """``hal.interface.binding.subspan``: a buffer that was bound to the dispatch.

    Parameters
    ----------
    layout
        The executable's layout.
    binding
        Number of the binding.
    byte_offset
        ``index``: where the view starts, in bytes.
    dynamic_dims
        ``index``: one for each dynamic dimension of ``result_type``.
    result_type
        A memref type.
    alignment
        Known alignment of the buffer in bytes (IREE's runtime guarantees 64).
    """

    name = "hal.interface.binding.subspan"

    layout = prop_def(PipelineLayoutAttr)
    binding = prop_def(IntegerAttr)
    alignment = opt_prop_def(IntegerAttr)
    descriptor_flags = opt_prop_def(IntegerAttr)

    byte_offset = operand_def(IndexType)
    dynamic_dims = var_operand_def(IndexType)
    result = result_def()

    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        layout: PipelineLayoutAttr,
        binding: int,
        byte_offset: SSAValue | Operation,
        dynamic_dims: Sequence[SSAValue | Operation],
        result_type: Attribute,
        alignment: int = 64,
    ) -> None:
        read_only = layout.bindings.data[binding].read_only
        super().__init__(
            operands=[byte_offset, dynamic_dims],
            properties={
                "layout": layout,
                "binding": IntegerAttr.from_index_int_value(binding),
                "alignment": IntegerAttr.from_index_int_value(alignment),
                "descriptor_flags": IntegerAttr(READ_ONLY, i32) if read_only else None,
            },
            result_types=[result_type],
        )

    def verify_(self) -> None:
        if not 0 <= self.binding.value.data < len(self.layout.bindings):
            raise VerifyException(
                f"{self.name}: binding {self.binding.value.data}, but the layout has "
                f"{len(self.layout.bindings)}"
            )
        if isinstance(self.result.type, MemRefType | TensorType):
            dynamic = sum(size == DYNAMIC_INDEX for size in self.result.type.get_shape())
            if dynamic != len(self.dynamic_dims):
                raise VerifyException(
                    f"{self.name}: {self.result.type} has {dynamic} dynamic dimensions, "
                    f"{len(self.dynamic_dims)} sizes were given"
                )


HAL = Dialect(
    "hal",
    [
        ExecutableExportOp,
        ExecutableSourceEndOp,
        ExecutableSourceOp,
        InterfaceBindingSubspanOp,
        InterfaceConstantLoadOp,
        InterfaceWorkgroupCountOp,
        InterfaceWorkgroupIDOp,
        InterfaceWorkgroupSizeOp,
        ReturnOp,
    ],
    [DeviceType, PipelineBindingAttr, PipelineLayoutAttr],
)

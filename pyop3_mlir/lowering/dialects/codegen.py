"""Attributes of IREE that steer its code generation, declared for xDSL.

Source: IREE 3.13, compiler/src/iree/compiler/Codegen/Dialect/{Codegen,CPU,GPU}/IR/*Attrs.td.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, IntegerAttr, NoneAttr, StringAttr, i64
from xdsl.ir import Attribute, Dialect, ParametrizedAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

__all__ = [
    "IREECPU",
    "IREEGPU",
    "CPULoweringConfigAttr",
    "CPUPipelineAttr",
    "CompilationInfoAttr",
    "GPULoweringConfigAttr",
    "GPUPipelineAttr",
    "IREECodegen",
    "TranslationInfoAttr",
]


def _integers(values: Sequence[int]) -> ArrayAttr[IntegerAttr]:
    return ArrayAttr([IntegerAttr(value, i64) for value in values])


def _print_integers(printer: Printer, values: ArrayAttr[IntegerAttr]) -> None:
    printer.print_string("[" + ", ".join(str(value.value.data) for value in values) + "]")


def _parse_integers(parser: AttrParser) -> ArrayAttr[IntegerAttr]:
    return _integers(
        parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer)
    )


class _PipelineAttr(ParametrizedAttribute):
    pipeline: StringAttr

    KNOWN: ClassVar[tuple[str, ...]]

    def __init__(self, pipeline: str) -> None:
        super().__init__(StringAttr(pipeline))

    def verify(self) -> None:
        if self.pipeline.data not in self.KNOWN:
            raise VerifyException(
                f"{self.name}: {self.pipeline.data} is none of {', '.join(self.KNOWN)}"
            )

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(self.pipeline.data)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return (StringAttr(parser.parse_identifier()),)


@irdl_attr_definition
class CPUPipelineAttr(_PipelineAttr):
    """``#iree_cpu.pipeline<...>``: the passes that IREE lowers a function for the CPU with.

    ``Default`` suits functions on memrefs and vectors: it only takes them to LLVM.
    """

    name = "iree_cpu.pipeline"
    KNOWN: ClassVar = (
        "Default",
        "DoubleTilingExpert",
        "ConvTileAndDecomposeExpert",
        "Mmt4dTilingExpert",
        "BufferOpsTileAndVectorize",
        "DataTiling",
        "LinalgExtTileAndVectorize",
    )


@irdl_attr_definition
class GPUPipelineAttr(_PipelineAttr):
    """``#iree_gpu.pipeline<...>``: the passes that IREE lowers a function for GPUs with."""

    name = "iree_gpu.pipeline"
    KNOWN: ClassVar = (
        "Default",
        "BaseLowering",
        "Distribute",
        "Vectorize",
        "VectorDistribute",
        "WinogradVectorize",
        "TileAndFuse",
    )


@irdl_attr_definition
class TranslationInfoAttr(ParametrizedAttribute):
    """``#iree_codegen.translation_info``: pipeline, and on GPUs the shape of a workgroup.

    Parameters
    ----------
    pipeline
        :class:`CPUPipelineAttr` or :class:`GPUPipelineAttr`.
    workgroup_size
        Threads of a workgroup in x, y and z, for GPUs.
    subgroup_size
        Threads of a subgroup (warp), for GPUs.
    """

    name = "iree_codegen.translation_info"

    pipeline: Attribute
    workgroup_size: ArrayAttr[IntegerAttr]
    subgroup_size: IntegerAttr | NoneAttr

    def __init__(
        self,
        pipeline: Attribute,
        workgroup_size: Sequence[int] = (),
        subgroup_size: int | None = None,
    ) -> None:
        super().__init__(
            pipeline,
            _integers(workgroup_size),
            NoneAttr() if subgroup_size is None else IntegerAttr(subgroup_size, i64),
        )

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string("pipeline = ")
            printer.print_attribute(self.pipeline)
            if self.workgroup_size.data:
                printer.print_string(" workgroup_size = ")
                _print_integers(printer, self.workgroup_size)
            if isinstance(self.subgroup_size, IntegerAttr):
                printer.print_string(f" subgroup_size = {self.subgroup_size.value.data}")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        workgroup_size = _integers(())
        subgroup_size: IntegerAttr | NoneAttr = NoneAttr()
        with parser.in_angle_brackets():
            parser.parse_keyword("pipeline")
            parser.parse_punctuation("=")
            pipeline = parser.parse_attribute()
            if parser.parse_optional_keyword("workgroup_size"):
                parser.parse_punctuation("=")
                workgroup_size = _parse_integers(parser)
            if parser.parse_optional_keyword("subgroup_size"):
                parser.parse_punctuation("=")
                subgroup_size = IntegerAttr(parser.parse_integer(), i64)
        return (pipeline, workgroup_size, subgroup_size)


@irdl_attr_definition
class CompilationInfoAttr(ParametrizedAttribute):
    """``#iree_codegen.compilation_info``: how IREE is to tile and lower one operation.

    Goes on the operation that decides for its dispatch; the others carry a lowering config only.
    """

    name = "iree_codegen.compilation_info"

    lowering_config: Attribute
    translation_info: TranslationInfoAttr

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string("lowering_config = ")
            printer.print_attribute(self.lowering_config)
            printer.print_string(", translation_info = ")
            printer.print_attribute(self.translation_info)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            parser.parse_keyword("lowering_config")
            parser.parse_punctuation("=")
            config = parser.parse_attribute()
            parser.parse_punctuation(",")
            parser.parse_keyword("translation_info")
            parser.parse_punctuation("=")
            return (config, parser.parse_attribute())


@irdl_attr_definition
class CPULoweringConfigAttr(ParametrizedAttribute):
    """``#iree_cpu.lowering_config<level = [sizes], ...>``: tile sizes for an operation.

    Parameters
    ----------
    levels
        Tile sizes (0: not tiled) by level: ``distribution``, ``cache_parallel``,
        ``cache_reduction``, ``vector_common_parallel``, ``vector_reduction`` and
        ``vector_inner_parallel``.
    """

    name = "iree_cpu.lowering_config"

    levels: DictionaryAttr

    KNOWN: ClassVar[tuple[str, ...]] = (
        "distribution",
        "cache_parallel",
        "cache_reduction",
        "vector_common_parallel",
        "vector_reduction",
        "vector_inner_parallel",
    )

    def __init__(self, levels: Mapping[str, Sequence[int]]) -> None:
        super().__init__(
            DictionaryAttr({name: _integers(levels[name]) for name in self.KNOWN if name in levels})
        )
        for level in levels:
            if level not in self.KNOWN:
                raise VerifyException(f"{self.name}: {level} is none of {', '.join(self.KNOWN)}")

    def print_parameters(self, printer: Printer) -> None:
        def print_level(item: tuple[str, Attribute]) -> None:
            printer.print_string(f"{item[0]} = ")
            assert isinstance(item[1], ArrayAttr)
            _print_integers(printer, item[1])

        with printer.in_angle_brackets():
            printer.print_list(tuple(self.levels.data.items()), print_level)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        def parse_level() -> tuple[str, Attribute]:
            level = parser.parse_identifier()
            parser.parse_punctuation("=")
            return level, _parse_integers(parser)

        return (
            DictionaryAttr(
                dict(parser.parse_comma_separated_list(parser.Delimiter.ANGLE, parse_level))
            ),
        )


@irdl_attr_definition
class GPULoweringConfigAttr(ParametrizedAttribute):
    """``#iree_gpu.lowering_config<{level = [sizes], ...}>``: tile sizes of an operation on a GPU.

    Parameters
    ----------
    levels
        Tile sizes by level: ``workgroup``, ``thread``, ``reduction``, ...
    """

    name = "iree_gpu.lowering_config"

    levels: DictionaryAttr

    def __init__(self, levels: Mapping[str, Sequence[int]]) -> None:
        super().__init__(DictionaryAttr({level: _integers(levels[level]) for level in levels}))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_attribute(self.levels)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return (parser.parse_attribute(),)


IREECodegen = Dialect("iree_codegen", [], [CompilationInfoAttr, TranslationInfoAttr])
IREECPU = Dialect("iree_cpu", [], [CPULoweringConfigAttr, CPUPipelineAttr])
IREEGPU = Dialect("iree_gpu", [], [GPULoweringConfigAttr, GPUPipelineAttr])

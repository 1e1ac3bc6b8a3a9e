"""Put a function on memrefs into an executable of its own, and call it in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, func, memref, tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    ArrayAttr,
    DictionaryAttr,
    IndexType,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    StringAttr,
    TensorType,
    UnitAttr,
    i32,
    i64,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass

from pyop3_mlir.lowering.dialects import codegen, flow, gpu, hal
from pyop3_mlir.lowering.emit import Emitter, IndexLike, functions_of
from pyop3_mlir.lowering.passes.bufferise import ON_MEMREFS
from pyop3_mlir.lowering.passes.place_on_gpu import TABLES

__all__ = ["OPERAND_ALIGNMENT", "OutlineDispatchPass"]

OPERAND_ALIGNMENT = 4
"""Bytes to which operands are aligned at least: vectors are only loaded from local buffers."""

_UNBOUNDED = 2**30
"""The size given to operands inside the executable, which addresses them by index tables alone."""


@dataclass(frozen=True)
class OutlineDispatchPass(ModulePass):
    """Move every function on memrefs into a ``hal.executable.source``.

    Needs what ``vectorise`` leaves: functions ``(start: i64, stop: i64, memrefs...) -> ()``, and
    globals. A third integer stands for ``start`` as it was before the iterations were shared out
    among workgroups. Leaves a function of the same name on tensors that calls the executable, with
    the changed operands tied to its results, so that the caller's memory is updated.

    Parameters
    ----------
    chunk
        Iterations that one workgroup (on a GPU, one thread) does; 0 for one workgroup that does
        all.
    threads
        Threads of a workgroup on a GPU; 0 for CPUs.
    """

    name = "outline-dispatch"

    chunk: int = 0
    threads: int = 0

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite the module in place."""
        block = op.body.block
        tables = [o for o in block.ops if isinstance(o, memref.GlobalOp)]
        functions = [function for function in functions_of(op) if _memrefs(function)]
        names = {_name(function) for function in functions}
        declared = [o for o in block.ops if isinstance(o, func.FuncOp) and o.is_declaration]
        for declaration in declared:
            if declaration.sym_name.data in names:
                declaration.detach()
        library = [o for o in declared if o.sym_name.data not in names]
        for function in functions:
            block.insert_op_before(self._host(function), function)
        for old in (*tables, *library, *functions):
            old.detach()
        for function in functions:
            used = {
                o.name_.root_reference.data
                for o in function.walk()
                if isinstance(o, memref.GetGlobalOp)
            }
            called = {
                o.callee.string_value() for o in function.walk() if isinstance(o, func.CallOp)
            }
            mine: list[Operation] = [t.clone() for t in tables if t.sym_name.data in used]
            mine += [_import(f) for f in library if f.sym_name.data in called]
            first = block.first_op
            assert first is not None
            block.insert_op_before(self._executable(function, mine), first)

    def _layout(self, function: func.FuncOp) -> hal.PipelineLayoutAttr:
        written = _written(function)
        bindings = [
            hal.PipelineBindingAttr(read_only=argument not in written)
            for argument in _memrefs(function)
        ]
        return hal.PipelineLayoutAttr(bindings, constants=4)

    def _executable(
        self, function: func.FuncOp, symbols: Sequence[Operation]
    ) -> hal.ExecutableSourceOp:
        name = _name(function)
        layout = self._layout(function)
        block = Block()
        e = Emitter(block)
        old = function.body.block
        start, stop = (_load_i64(e, layout, number) for number in (0, 2))
        # arrays of more dimensions hold one entry for each iteration
        count = e.index(e.sub(e.to_index(stop), e.to_index(start)))
        origin = [start] * (len(old.args) - len(_memrefs(function)) - 2)
        if self.chunk:
            group: IndexLike = e.insert(hal.InterfaceWorkgroupIDOp(0))
            if self.threads:
                thread = e.insert(gpu.ThreadIdOp("x"))
                group = e.add(e.mul(group, self.threads), thread)
            first = e.add(e.to_index(start), e.mul(group, self.chunk))
            last = e.minimum(e.add(first, self.chunk), e.to_index(stop))
            start, stop = (e.insert(arith.IndexCastOp(e.index(v), i64)) for v in (first, last))
        zero, size = e.index(0), e.index(_UNBOUNDED)
        operands = [
            e.insert(
                hal.InterfaceBindingSubspanOp(
                    layout,
                    number,
                    zero,
                    _sizes(argument.type, size, count),
                    argument.type,
                    OPERAND_ALIGNMENT,
                )
            )
            for number, argument in enumerate(_memrefs(function))
        ]
        for argument, value in zip(old.args, (start, stop, *origin, *operands), strict=True):
            argument.replace_all_uses_with(value)
        for op in list(old.ops):
            op.detach()
            block.add_op(op)
        kernel = func.FuncOp(name, ([], []), Region(block))
        kernel.attributes["translation_info"] = (
            codegen.TranslationInfoAttr(codegen.GPUPipelineAttr("Distribute"), [self.threads, 1, 1])
            if self.threads
            else codegen.TranslationInfoAttr(codegen.CPUPipelineAttr("Default"))
        )
        export = hal.ExecutableExportOp(name, layout, self._count())
        return hal.ExecutableSourceOp(f"{name}_executable", [export], ModuleOp([*symbols, kernel]))

    def _count(self) -> Region:
        """Number of workgroups for a number of iterations."""
        block = Block(arg_types=[hal.DeviceType(), IndexType()])
        e = Emitter(block)
        one = e.index(1)
        groups = one
        if self.chunk:
            share = e.index(self.chunk * max(1, self.threads))
            count = e.insert(arith.MaxSIOp(block.args[1], one))
            groups = e.insert(arith.CeilDivUIOp(count, share))
        e.insert(hal.ReturnOp(groups, one, one))
        return Region(block)

    def _host(self, function: func.FuncOp) -> func.FuncOp:
        name = _name(function)
        # the tables that a GPU reads as operands are constants of the caller
        tables = list(function.attributes.get(TABLES, ArrayAttr([])))  # type: ignore[call-overload]
        arguments = _memrefs(function)
        arguments = arguments[: len(arguments) - len(tables)]
        changed = _written(function)
        written = [number for number, a in enumerate(arguments) if a in changed]
        types: list[Attribute] = [
            TensorType(a.type.element_type, a.type.get_shape())  # type: ignore[attr-defined]
            for a in arguments
        ]
        scalars = len(function.body.block.args) - len(_memrefs(function))
        block = Block(arg_types=[*[i64] * scalars, *types])
        e = Emitter(block)
        start, stop = block.args[:2]
        tensors = block.args[scalars:]
        dims = [
            e.insert(tensor.DimOp(t, e.index(t.type.get_num_dims() - 1)))  # type: ignore[attr-defined]
            for t in tensors
            if DYNAMIC_INDEX in t.type.get_shape()  # type: ignore[attr-defined]
        ]
        count = e.to_index(e.insert(arith.SubiOp(stop, start)))
        constants = [half for value in (start, stop) for half in _split_i64(e, value)]
        dispatch = flow.DispatchOp(
            f"{name}_executable",
            name,
            [count],
            [*constants, *tensors, *(e.insert(arith.ConstantOp(t)) for t in tables)],
            dims,
            [len(constants) + number for number in written],
        )
        e.builder.insert(dispatch)
        e.insert(func.ReturnOp(*dispatch.outputs))
        attributes: list[DictionaryAttr] = [DictionaryAttr({}) for _ in block.args]
        private = function.sym_visibility is not None
        for result, number in enumerate(written):
            if not private:
                attributes[scalars + number] = DictionaryAttr(
                    {"iree.abi.output": IntegerAttr(result, IndexType())}
                )
        host = func.FuncOp(
            name,
            ([a.type for a in block.args], [types[n] for n in written]),
            Region(block),
            visibility=function.sym_visibility,
            arg_attrs=ArrayAttr(attributes),
        )
        if private:
            return host
        # the runtime reads from it which arrays it can share with the caller
        alignment = StringAttr(str(OPERAND_ALIGNMENT))
        host.attributes["iree.reflection"] = DictionaryAttr({"alignment": alignment})
        return host


def _import(function: func.FuncOp) -> func.FuncOp:
    """The declaration of a function of the C library, which is linked with the executable."""
    declaration = function.clone()
    declaration.attributes["hal.import.static"] = UnitAttr()
    return declaration


def _name(function: func.FuncOp) -> str:
    return function.sym_name.data.removesuffix(ON_MEMREFS)


def _sizes(type: Attribute, size: SSAValue, count: SSAValue) -> list[SSAValue]:
    """The dynamic dimensions of an operand: none, or one."""
    assert isinstance(type, MemRefType)
    shape = type.get_shape()
    if DYNAMIC_INDEX not in shape:
        return []
    return [size if len(shape) == 1 else count]


def _memrefs(function: func.FuncOp) -> list[SSAValue]:
    return [a for a in function.body.block.args if isinstance(a.type, MemRefType)]


def _written(function: func.FuncOp) -> set[SSAValue]:
    """The operands that the function stores into."""
    stores = (
        o.memref for o in function.walk() if isinstance(o, memref.StoreOp | memref.AtomicRMWOp)
    )
    return set(stores) & set(_memrefs(function))


def _split_i64(e: Emitter, value: SSAValue) -> tuple[SSAValue, SSAValue]:
    """The low and the high half of an ``i64``: executables take constants of 32 bits."""
    shift = e.constant(32, i64)
    high = e.insert(arith.ShRUIOp(value, shift))
    return e.insert(arith.TruncIOp(value, i32)), e.insert(arith.TruncIOp(high, i32))


def _load_i64(e: Emitter, layout: hal.PipelineLayoutAttr, ordinal: int) -> SSAValue:
    """The reverse of :func:`_split_i64`, inside the executable."""
    low, high = (
        e.insert(arith.ExtUIOp(e.insert(hal.InterfaceConstantLoadOp(layout, ordinal + k)), i64))
        for k in (0, 1)
    )
    shifted = e.insert(arith.ShLIOp(high, e.constant(32, i64)))
    return e.insert(arith.OrIOp(low, shifted))

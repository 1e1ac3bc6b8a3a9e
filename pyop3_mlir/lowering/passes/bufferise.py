"""From tensors to memory: local tensors get buffers of their own, operands change in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xdsl.context import Context
from xdsl.dialects import arith, func, memref, scf, tensor
from xdsl.dialects.builtin import (
    DenseIntOrFPElementsAttr,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    StringAttr,
    TensorType,
    UnitAttr,
    i64,
)
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass

from pyop3_mlir.lowering.dialects.dense import SolveOp
from pyop3_mlir.lowering.dialects.linalg import FillOp
from pyop3_mlir.lowering.emit import Emitter, functions_of

__all__ = ["ALIGNMENT", "ON_MEMREFS", "BufferisePass"]

ON_MEMREFS = "_on_memrefs"
"""What the name of a function that is called from tensors gets when it is on memrefs itself."""

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector register."""


@dataclass(frozen=True)
class BufferisePass(ModulePass):
    """Replace tensors by memrefs.

    Needs a ``@loop`` in which local tensors have static shapes, each is written by one operation
    (``linalg.generic`` or ``linalg.fill``), those that ``dense.solve`` uses up are used by nothing
    else, and buffers flow through ``tensor.insert`` and loops in a straight line, as
    ``block-cells`` leaves it. Leaves a function without results on memrefs: local tensors are
    allocated on the stack at its entry, constants are globals, and ``tensor.insert`` is a store
    into the operand.
    """

    name = "bufferise"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function in place."""
        functions = functions_of(op)
        names = {function.sym_name.data for function in functions}
        for function in functions:
            # a function that calls another one runs on the host side, where tensors stay
            if not _calls(function, names):
                _Bufferiser(op, function).run()


def _calls(function: func.FuncOp, names: set[str]) -> bool:
    calls = (op for op in function.walk() if isinstance(op, func.CallOp))
    return any(call.callee.string_value() in names for call in calls)


def _memref(type: Attribute) -> Attribute:
    if isinstance(type, TensorType):
        return MemRefType(type.element_type, type.get_shape())
    return type


class _Bufferiser:
    """Rewrites one function."""

    def __init__(self, module: ModuleOp, function: func.FuncOp) -> None:
        self.module = module
        self.function = function
        self.values: dict[SSAValue, SSAValue] = {}
        self.constants: dict[Attribute, SSAValue] = {}
        self.fills: dict[SSAValue, SSAValue] = {}

    def run(self) -> None:
        old = self.function.body.block
        types = [_memref(arg.type) for arg in old.args]
        entry = Block(arg_types=types)
        self.entry = Emitter(entry)
        work = Block()
        self.values.update(zip(old.args, entry.args, strict=True))
        self.convert(old, Emitter(work))
        for op in list(work.ops):
            op.detach()
            entry.add_op(op)
        name, visibility = self.function.sym_name.data, self.function.sym_visibility
        block = self.module.body.block
        if visibility is not None:
            # its caller goes on to see a function on tensors
            signature = self.function.function_type
            declaration = func.FuncOp.external(name, signature.inputs.data, signature.outputs.data)
            block.insert_op_before(declaration, self.function)
            name += ON_MEMREFS
        new = func.FuncOp(name, (types, []), Region(entry), visibility=visibility)
        block.insert_op_before(new, self.function)
        self.function.detach()
        self.function.erase()

    def value(self, value: SSAValue) -> SSAValue:
        """What replaces a value of the old function."""
        return self.values.get(value, value)

    def allocate(self, type: Attribute) -> SSAValue:
        """A local buffer, at the function's entry: once a call, not once a block of cells."""
        target = _memref(type)
        assert isinstance(target, MemRefType)
        return self.entry.insert(
            memref.AllocaOp.build(
                operands=[[], []],
                result_types=[target],
                properties={
                    "alignment": IntegerAttr(ALIGNMENT, i64),
                },
            )
        )

    def constant(self, value: DenseIntOrFPElementsAttr) -> SSAValue:
        """A constant tensor as a global of the module."""
        if value not in self.constants:
            name = f"table_{len(self.constants)}"
            type = _memref(value.type)
            assert isinstance(type, MemRefType)
            op = memref.GlobalOp.get(
                StringAttr(name), type, value, StringAttr("private"), UnitAttr(), ALIGNMENT
            )
            self.module.body.block.insert_op_before(op, self.function)
            self.constants[value] = self.entry.insert(memref.GetGlobalOp(name, type))
        return self.constants[value]

    def convert(self, block: Block, e: Emitter) -> None:
        """Convert the operations of ``block`` into ``e``, whose block arguments are mapped."""
        for op in block.ops:
            self.operation(op, e)

    def operation(self, op: Operation, e: Emitter) -> None:
        match op:
            case tensor.EmptyOp():
                pass  # allocated by the operation that writes it
            case arith.ConstantOp() if isinstance(op.result.type, TensorType):
                assert isinstance(op.value, DenseIntOrFPElementsAttr)
                self.values[op.result] = self.constant(op.value)
            case FillOp():
                target = self.allocate(op.results[0].type)
                e.insert(FillOp(self.value(op.inputs[0]), target, []))
                self.values[op.results[0]] = target
            case GenericOp():
                self.generic(op, e)
            case SolveOp() if op.result is not None:
                side = self.values[op.result] = self.value(op.side)
                e.insert(SolveOp(self.value(op.matrix), side, op.batch.value.data))
            case tensor.ExtractOp():
                indices = [self.value(i) for i in op.indices]
                load = memref.LoadOp.get(self.value(op.tensor), indices)
                self.values[op.result] = e.insert(load)
            case tensor.InsertOp():
                dest = self.value(op.dest)
                indices = [self.value(i) for i in op.indices]
                e.insert(memref.StoreOp.get(self.value(op.scalar), dest, indices))
                self.values[op.result] = dest
            case scf.ForOp():
                self.loop(op, e)
            case scf.IfOp():
                self.branch(op, e)
            case func.ReturnOp():
                e.insert(func.ReturnOp())
            case scf.YieldOp():
                kept = [self.value(v) for v in op.operands if not isinstance(v.type, TensorType)]
                e.insert(scf.YieldOp(*kept))
            case _:
                e.builder.insert(op.clone(self.values))
                # clone() has entered the results into the mapping

    def generic(self, op: GenericOp, e: Emitter) -> None:
        outs = []
        for output, result in zip(op.outputs, op.results, strict=True):
            # an output that was filled is accumulated into, where it is
            filled = isinstance(output.owner, FillOp)
            target = self.values[output] if filled else self.allocate(output.type)
            outs.append(target)
            self.values[result] = target
        old = op.body.block
        body = Block(arg_types=[arg.type for arg in old.args])
        self.values.update(zip(old.args, body.args, strict=True))
        self.convert(old, Emitter(body))
        ins = [
            self.allocate(v.type) if isinstance(v.owner, tensor.EmptyOp) else self.value(v)
            for v in op.inputs
        ]
        e.insert(GenericOp(ins, outs, Region(body), op.indexing_maps, op.iterator_types, []))

    def loop(self, op: scf.ForOp, e: Emitter) -> None:
        old = op.body.block
        carried: list[SSAValue] = []
        kept: list[Any] = []
        block = Block(arg_types=[old.args[0].type])
        self.values[old.args[0]] = block.args[0]
        for argument, initial, result in zip(old.args[1:], op.iter_args, op.results, strict=True):
            if isinstance(argument.type, TensorType):
                self.values[argument] = self.values[result] = self.value(initial)
            else:
                self.values[argument] = block.insert_arg(argument.type, len(block.args))
                carried.append(self.value(initial))
                kept.append(result)
        self.convert(old, Emitter(block))
        loop = scf.ForOp(
            self.value(op.lb), self.value(op.ub), self.value(op.step), carried, Region(block)
        )
        e.builder.insert(loop)
        self.values.update(zip(kept, loop.results, strict=True))

    def branch(self, op: scf.IfOp, e: Emitter) -> None:
        """Conditions of the scatter: either branch leaves the same buffers."""
        regions: list[Region] = []
        for region in op.regions:
            if not region.blocks:
                regions.append(Region())
                continue
            block = Block()
            self.convert(region.block, Emitter(block))
            regions.append(Region(block))
        if all(len(r.block.ops) == 1 for r in regions[1:] if r.blocks):
            regions[1:] = [Region()]
        self._buffers_of(op)
        e.builder.insert(scf.IfOp(self.value(op.cond), [], regions[0], regions[1]))

    def _buffers_of(self, op: scf.IfOp) -> None:
        yields: Sequence[SSAValue] = op.true_region.block.last_op.operands  # type: ignore[union-attr]
        for result, value in zip(op.results, yields, strict=True):
            self.values[result] = self.value(value)

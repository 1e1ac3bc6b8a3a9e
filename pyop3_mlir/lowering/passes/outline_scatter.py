"""Take the scatter out of the tensor stage, so that it can become a dispatch of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, func, scf
from xdsl.dialects.builtin import (
    ArrayAttr,
    ComplexType,
    DictionaryAttr,
    IndexType,
    IntegerAttr,
    ModuleOp,
    StringAttr,
    TensorType,
    f64,
    i64,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.lowering.emit import Emitter

__all__ = ["OutlineScatterPass"]


@dataclass(frozen=True)
class OutlineScatterPass(ModulePass):
    """Move the loop over cells that scatters into a private function ``@scatter``.

    Needs the tensor stage. Leaves in ``@loop`` the gathers and the kernel on whole arrays, which
    IREE compiles as it sees fit, and a call; ``@scatter(start, stop, origin, values...,
    buffers...)`` goes the way of blocked loops: it scatters iterations ``[start, stop)``, and the
    values begin with iteration ``origin``. A sequential loop on IREE's host side would copy the
    buffers each time round.
    """

    name = "outline-scatter"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite ``@loop`` in place."""
        for function in op.ops:
            if isinstance(function, func.FuncOp) and function.sym_name.data == "loop":
                _refuse_calls(function)
                scatter = _outline(function)
                if scatter is not None:
                    op.body.block.insert_op_after(scatter, function)


def _refuse_calls(function: func.FuncOp) -> None:
    for op in function.walk():
        if isinstance(op, func.CallOp):
            raise UnsupportedLoopError(
                f"flat batching cannot call {op.callee.string_value()} of the C library; "
                "blocked batching can"
            )


def _can_pass(type_: Attribute) -> bool:
    """Whether a constant can be an operand of the scatter.

    IREE fills the buffer of a tensor that is one number all over, with patterns of up to 8 bytes.
    """
    return isinstance(type_, TensorType) and type_.element_type != ComplexType(f64)


def _outside(op: Operation) -> set[Operation | Block]:
    """What makes the values that an operation, its regions included, takes from outside."""
    owners = {operand.owner for inner in op.walk() for operand in inner.operands}
    return {owner for owner in owners if not op.is_ancestor(owner)}


def _made_of_constants(block: Block) -> set[Operation]:
    """The operations of a block that depend on no argument."""
    found: set[Operation] = set()
    for op in block.ops:
        if _outside(op) <= found:
            found.add(op)
    return found


def _with_sources(block: Block, wanted: Iterable[Operation]) -> list[Operation]:
    """Operations of a block and all those that they depend on, in order."""
    needed = set(wanted)
    for op in reversed(list(block.ops)):
        if op in needed:
            needed |= {owner for owner in _outside(op) if isinstance(owner, Operation)}
    return [op for op in block.ops if op in needed]


def _outline(function: func.FuncOp) -> func.FuncOp | None:
    block = function.body.block
    returned = block.last_op
    assert isinstance(returned, func.ReturnOp)
    loop = next((r.owner for r in returned.operands if isinstance(r.owner, scf.ForOp)), None)
    if loop is None:
        return None
    casts = [op for op in block.ops if isinstance(op, arith.IndexCastOp)][:2]
    count = next(op for op in block.ops if isinstance(op, arith.SubiOp))
    start, stop = block.args[:2]

    inside = set(loop.body.block.args) | {r for o in loop.walk() for r in o.results}
    inside |= {
        a for o in loop.walk() for region in o.regions for b in region.blocks for a in b.args
    }
    known = _made_of_constants(block)
    captured: list[SSAValue] = []
    constants: set[Operation] = set()
    for inner in loop.walk():
        for value in inner.operands:
            if value in inside or value in loop.iter_args:
                continue
            owner = value.owner
            if isinstance(owner, Operation) and owner in known and not _can_pass(value.type):
                constants.add(owner)
            elif isinstance(value.type, TensorType) and value not in captured:
                captured.append(value)
    carried = list(loop.iter_args)
    arguments = [start, stop, *captured, *carried]

    body = Block(arg_types=[i64, i64, i64, *(v.type for v in arguments[2:])])
    e = Emitter(body)
    first, last, origin = (e.to_index(argument) for argument in body.args[:3])
    mapping: dict[SSAValue, SSAValue] = dict(zip(arguments[2:], body.args[3:], strict=True))
    mapping[casts[0].result] = origin
    for constant in _with_sources(block, constants):
        e.builder.insert(constant.clone(mapping))
    mapping[loop.lb] = e.index(e.sub(first, origin))
    mapping[count.result] = e.index(e.sub(last, origin))
    e.builder.insert(loop.clone(mapping))
    results = [mapping[r] for r in loop.results]
    e.insert(func.ReturnOp(*results))
    types = [r.type for r in results]
    scatter = func.FuncOp(
        "scatter", ([a.type for a in body.args], types), Region(body), visibility="private"
    )

    call = func.CallOp("scatter", [start, stop, start, *arguments[2:]], types)
    Emitter(InsertPoint.before(loop)).builder.insert(call)
    for old, new in zip(loop.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    loop.detach()
    loop.erase()
    attributes = [DictionaryAttr({}) for _ in block.args]
    for number, value in enumerate(carried):
        attributes[list[SSAValue](block.args).index(value)] = DictionaryAttr(
            {"iree.abi.output": IntegerAttr(number, IndexType())}
        )
    function.properties["arg_attrs"] = ArrayAttr(attributes)
    function.attributes["iree.reflection"] = DictionaryAttr({"alignment": StringAttr("64")})
    return scatter

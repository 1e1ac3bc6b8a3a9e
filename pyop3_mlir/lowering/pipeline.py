"""The compiler in one screen: from a local kernel and a loop to a module that IREE compiles.

====================  ==============================================  ==========================
stage                 made by                                         dialects
====================  ==============================================  ==========================
``tensor``            :func:`~pyop3_mlir.lowering.build.build_module`  linalg, tensor, scf, arith
``block-cells``       :class:`BlockCellsPass`                         the same, static shapes
``bufferise``         :class:`BufferisePass`                          linalg, memref, scf, arith
``vectorise``         :class:`VectorisePass`                          vector, memref, scf, arith
``outline-dispatch``  :class:`OutlineDispatchPass`                    these, hal, flow
====================  ==============================================  ==========================

Everything before ``outline-dispatch`` is upstream MLIR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.lowering.build import build_module
from pyop3_mlir.lowering.dialects import iree_context, print_module
from pyop3_mlir.lowering.passes.block_cells import BlockCellsPass
from pyop3_mlir.lowering.passes.bufferise import BufferisePass
from pyop3_mlir.lowering.passes.outline_dispatch import OutlineDispatchPass
from pyop3_mlir.lowering.passes.vectorise import VectorisePass
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import LoopSpec

__all__ = ["lower", "passes", "stages"]


def passes(schedule: Schedule) -> list[ModulePass]:
    """The passes that a schedule asks for, in order."""
    return [
        BlockCellsPass(schedule.width),
        BufferisePass(),
        VectorisePass(schedule.tile, schedule.unroll),
        OutlineDispatchPass(),
    ]


def stages(
    kernel: LocalKernel, spec: LoopSpec, schedule: Schedule
) -> Iterator[tuple[str, ModuleOp]]:
    """Every stage of a loop's way, verified: its name and the module, which the next one changes."""
    context = iree_context()
    module = build_module(kernel, spec)
    module.verify()
    yield "tensor", module
    for step in passes(schedule):
        step.apply(context, module)
        module.verify()
        yield step.name, module


def lower(
    kernel: LocalKernel,
    spec: LoopSpec,
    schedule: Schedule,
    *,
    observe: Callable[[str, ModuleOp], None] | None = None,
) -> str:
    """The text of the module that is to be compiled.

    Parameters
    ----------
    kernel, spec
        The loop.
    schedule
        Strategy and batching.
    observe
        Called with the name and the module of every stage.
    """
    module = None
    for name, module in stages(kernel, spec, schedule):
        if observe is not None:
            observe(name, module)
    assert module is not None
    return print_module(module)

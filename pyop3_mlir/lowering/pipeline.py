"""The compiler in one screen: from a local kernel and a loop to a module that IREE compiles.

====================  ==============================================  ==========================
stage                 made by                                         dialects
====================  ==============================================  ==========================
``tensor``            :func:`~pyop3_mlir.lowering.build.build_module`  linalg, tensor, scf, arith
``split-results``     :class:`SplitResultsPass` (flat, GPU)            the same
``block-cells``       :class:`BlockCellsPass` (blocked)               the same, static shapes
``outline-scatter``   :class:`OutlineScatterPass` (flat)              the same, two functions
``bufferise``         :class:`BufferisePass`                          linalg, memref, scf, arith
``unroll-loops``      :class:`UnrollLoopsPass`                        linalg, memref, scf, arith
``strip-mine``        :class:`StripMinePass`                          the same, and memref.subview
``vectorise``         :class:`VectorisePass`                          vector, memref, scf, arith
``eliminate``         :class:`EliminatePass`                          the same
``unroll-scatter``    :class:`UnrollScatterPass`                      the same
``delay-scatter``     :class:`DelayScatterPass` (one thread)          the same
``call-libm``         :class:`CallLibmPass`                           the same
``outline-dispatch``  :class:`OutlineDispatchPass`                    these, hal, flow
====================  ==============================================  ==========================

Everything before ``outline-dispatch`` is upstream MLIR, but for ``dense.solve``, which is there
from the tensor stage to ``eliminate`` where a kernel solves systems too large for straight code.
With flat batching those are sums from the start (:func:`~pyop3_mlir.kernels.dense.eliminated`), and
only the scatter takes the way through memrefs; the rest stays on tensors, and IREE makes its own
dispatches of it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from pyop3_mlir.kernels.dense import eliminated
from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.lowering.build import build_module
from pyop3_mlir.lowering.dialects import iree_context, print_module
from pyop3_mlir.lowering.passes.atomic_scatter import AtomicScatterPass
from pyop3_mlir.lowering.passes.block_cells import BlockCellsPass
from pyop3_mlir.lowering.passes.bufferise import BufferisePass
from pyop3_mlir.lowering.passes.call_libm import CallLibmPass
from pyop3_mlir.lowering.passes.delay_scatter import DelayScatterPass
from pyop3_mlir.lowering.passes.eliminate import EliminatePass
from pyop3_mlir.lowering.passes.outline_dispatch import OutlineDispatchPass
from pyop3_mlir.lowering.passes.outline_scatter import OutlineScatterPass
from pyop3_mlir.lowering.passes.place_on_gpu import PlaceOnGpuPass
from pyop3_mlir.lowering.passes.relax_atomics import RelaxAtomicsPass
from pyop3_mlir.lowering.passes.split_results import SplitResultsPass
from pyop3_mlir.lowering.passes.stack_results import StackResultsPass
from pyop3_mlir.lowering.passes.strip_mine import StripMinePass
from pyop3_mlir.lowering.passes.unroll_loops import UnrollLoopsPass
from pyop3_mlir.lowering.passes.unroll_scatter import UnrollScatterPass
from pyop3_mlir.lowering.passes.vectorise import VectorisePass
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import LoopSpec

__all__ = ["lower", "passes", "stages"]


CHUNK = 1024
"""Iterations of a workgroup where several threads share a loop; a multiple of every block width."""


def passes(schedule: Schedule, threads: int = 1, kind: str = "cpu") -> list[ModulePass]:
    """The passes that a schedule asks for, in order.

    Parameters
    ----------
    schedule
        Strategy and batching.
    threads
        CPU threads that share the work; ``in_order`` uses one whatever there are.
    kind
        Kind of device: ``cpu``, or one of
        :data:`~pyop3_mlir.lowering.passes.place_on_gpu.SPACES`, where each thread does one cell.
    """
    if kind != "cpu":
        return _gpu_passes(schedule, kind)
    shared = threads > 1 and schedule.strategy != "in_order"
    batching: ModulePass = (
        BlockCellsPass(schedule.width) if schedule.batching == "blocked" else OutlineScatterPass()
    )
    return [
        batching,
        BufferisePass(),
        UnrollLoopsPass(4 * schedule.unroll),
        StackResultsPass(schedule.tile),
        StripMinePass(),
        VectorisePass(schedule.tile, schedule.unroll),
        EliminatePass(),
        UnrollScatterPass(schedule.width, limit=64 + 5 * schedule.unroll),
        *([] if shared else [DelayScatterPass(schedule.width)]),
        CallLibmPass(),
        OutlineDispatchPass(chunk=CHUNK if shared else 0),
    ]


def _gpu_passes(schedule: Schedule, kind: str) -> list[ModulePass]:
    batching: ModulePass = (
        BlockCellsPass(1) if schedule.batching == "blocked" else OutlineScatterPass()
    )
    # in order means one thread, which is for loops that have no other meaning
    one = schedule.strategy == "in_order"
    atomic = schedule.strategy == "atomic"
    return [
        *([SplitResultsPass()] if schedule.batching == "flat" else []),
        batching,
        BufferisePass(),
        UnrollLoopsPass(4 * schedule.unroll),
        VectorisePass(schedule.tile, schedule.unroll),
        EliminatePass(),
        *([AtomicScatterPass()] if atomic else []),
        PlaceOnGpuPass(kind),
        OutlineDispatchPass(chunk=0 if one else 1, threads=1 if one else schedule.workgroup),
        *([RelaxAtomicsPass(kind)] if atomic else []),
    ]


def stages(
    kernel: LocalKernel,
    spec: LoopSpec,
    schedule: Schedule,
    threads: int = 1,
    kind: str = "cpu",
    verify: bool = True,
) -> Iterator[tuple[str, ModuleOp]]:
    """Every stage of a loop's way: its name and the module, which the next one changes.

    ``verify`` checks each stage, which takes as long as making it.
    """
    context = iree_context()
    if schedule.batching == "flat":
        kernel = eliminated(kernel)
    module = build_module(kernel, spec, schedule.strategy == "segmented")
    if verify:
        module.verify()
    yield "tensor", module
    for step in passes(schedule, threads, kind):
        step.apply(context, module)
        if verify:
            module.verify()
        yield step.name, module


def lower(
    kernel: LocalKernel,
    spec: LoopSpec,
    schedule: Schedule,
    threads: int = 1,
    kind: str = "cpu",
    *,
    observe: Callable[[str, ModuleOp], None] | None = None,
) -> str:
    """The text of the module that is to be compiled; IREE verifies it.

    Parameters
    ----------
    kernel, spec
        The loop.
    schedule, threads, kind
        As for :func:`passes`.
    observe
        Called with the name and the module of every stage, each of them verified.
    """
    module = None
    with _without_collection():
        for name, module in stages(kernel, spec, schedule, threads, kind, observe is not None):
            if observe is not None:
                observe(name, module)
        assert module is not None
        return print_module(module)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python from looking for garbage: operations are many and live to the end.

    That is a sixth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

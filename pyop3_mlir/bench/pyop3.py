"""``bench pyop3``: the engine under Firedrake's pyop3 branch against loopy, on the same loops."""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.bench.engine import KEYS, interleave
from pyop3_mlir.bench.firedrake import CASES, Case, _dofs, _joined, case_named
from pyop3_mlir.bench.firedrake import table as firedrake_table
from pyop3_mlir.lowering.schedule import Schedule

__all__ = ["CASES", "run_case", "run_pyop3_bench", "table"]


class _Assembly:
    """A form, its tensor, and the executors of the pyop3 loops that assemble it."""

    def __init__(self, form: Any) -> None:
        from firedrake.assemble import get_assembler

        self.assembler = get_assembler(form)
        self.tensor = self.assembler.allocate()
        self.calls: list[tuple[Any, dict[Any, Any]]] = []

    def collect(self, backend: Any) -> None:
        """Assemble once, and note what executes each loop with a local kernel, on what."""
        calls = self.calls = []
        original = backend.executor_class.__call__

        def noted(executor: Any, buffers: dict[Any, Any]) -> None:
            if executor.called:
                calls.append((executor, dict(buffers)))
            original(executor, buffers)

        backend.executor_class.__call__ = noted
        try:
            self.run_whole()
        finally:
            backend.executor_class.__call__ = original

    def run_ours(self) -> None:
        """Run the loops on the engine, pyop3's halo exchanges included."""
        for executor, buffers in self.calls:
            executor(buffers)

    def run_theirs(self) -> None:
        """Run the loops as pyop3 does."""
        for executor, buffers in self.calls:
            executor.original(buffers)

    def run_whole(self) -> None:
        """Assemble as Firedrake does: zero the tensor, run the loops, let PETSc finish."""
        self.assembler.assemble(tensor=self.tensor)

    def result(self) -> npt.NDArray[Any]:
        """All numbers of the tensor after one assembly."""
        self.run_whole()
        if hasattr(self.tensor, "petscmat"):
            from pyop3_mlir.bench.firedrake import _parts

            return np.concatenate([m.getValuesCSR()[2] for m in _parts(self.tensor.petscmat)])
        return np.array(self.tensor.dat.buffer.data_ro).ravel()


@cache
def _forget_kernels() -> None:
    """Have TSFC make all kernels anew: those in its cache on disk may be in loopy only."""
    if "firedrake" not in sys.modules:
        folder = tempfile.TemporaryDirectory(prefix="pyop3_mlir-tsfc-")
        atexit.register(folder.cleanup)
        os.environ["FIREDRAKE_TSFC_KERNEL_CACHE_DIR"] = folder.name


def run_case(
    case: Case,
    size: float = 1.0,
    runs: int = 7,
    schedule: Schedule | None = None,
    tune_budget: float | None = None,
) -> dict[str, Any]:
    """Measure one case; parameters are those of :func:`run_pyop3_bench`.

    Raises
    ------
    UnsupportedLoopError
        Where the engine leaves a loop to pyop3; the message says why.
    """
    from pyop3_mlir.frontends.pyop3 import Backend
    from pyop3_mlir.options import Options

    if runs < 7:
        raise ValueError(f"{runs} runs are too few for a median, at least 7 are needed")
    _forget_kernels()
    mesh = case.mesh(size)
    assembly = _Assembly(case.form(mesh, case.rank))
    backend = Backend(Options.resolve(device="cpu", tune="off", tune_budget=tune_budget))
    backend.attach()
    try:
        # TSFC makes the kernels here, and GEM is kept
        _ = assembly.assembler.local_kernels
    finally:
        backend.detach()
    expected = assembly.result()
    backend.attach()
    try:
        assembly.collect(backend)
        bound = [
            loop
            for executor, buffers in assembly.calls
            for loop in backend.tune(executor.replaced(buffers), schedule)
        ]
        difference = np.abs(assembly.result() - expected).max()
        # both run in this thread: its own time leaves out who else has the core
        ours_s, theirs_s = interleave(
            [assembly.run_ours, assembly.run_theirs], runs, time.thread_time
        )
    finally:
        backend.detach()
    values = (
        case.name,
        bound[0].parloop.iteration_set.size,
        _dofs(assembly.assembler),
        sum(b.parloop.kernel.count_flops() * b.parloop.iteration_set.size for b in bound),
        sum(b.parloop.compulsory_bytes for b in bound),
        _joined(b.schedule.strategy for b in bound),
        _joined(str(b.schedule).split("/", 1)[-1] for b in bound),
        ours_s,
        "pyop3-loopy",
        theirs_s,
        theirs_s / ours_s,
        float(difference / max(np.abs(expected).max(), 1e-300)),
    )
    return dict(zip(KEYS, values, strict=True))


def run_pyop3_bench(
    path: Path | str | None = None,
    cases: Sequence[str] | None = None,
    *,
    size: float = 1.0,
    runs: int = 7,
    schedule: Schedule | None = None,
    tune_budget: float | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure the cases of ``bench firedrake`` under pyop3 and write a row for each.

    Each row compares the warm loops of one form, with pyop3's halo exchanges, on the engine and as
    pyop3 runs them: in one process, on the same arrays, in turn, one thread each. ``flops`` counts
    the operations of the imported kernel.

    Parameters
    ----------
    path
        JSON file to write, a list of rows with the keys of ``bench engine``
        (:data:`~pyop3_mlir.bench.engine.KEYS`); written after every case, so that an interrupted
        run leaves what it has. None for no file.
    cases
        Names of :data:`CASES`; all where not given.
    size
        Factor on the number of cells. pyop3 takes long to set up a mesh.
    runs
        Interleaved samples, of which medians are taken; at least 7.
    schedule
        Schedule of every loop; tuned where not given.
    tune_budget
        Seconds for tuning one loop; the setting where not given.
    report
        Called with each row as it is made.

    Raises
    ------
    ValueError
        For a case that does not exist or fewer than 7 runs.
    UnsupportedLoopError
        Where the engine leaves a loop to pyop3.
    """
    chosen = CASES if cases is None else tuple(case_named(name) for name in cases)
    rows: list[dict[str, Any]] = []
    for case in chosen:
        rows.append(run_case(case, size, runs, schedule, tune_budget))
        if report is not None:
            report(rows[-1])
        if path is not None:
            Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows for a terminal, a :class:`rich.table.Table`."""
    found = firedrake_table(rows)
    found.title = "the engine under pyop3 against its loopy back end"
    for column in found.columns:
        if column.header == "PyOP2":
            column.header = "loopy"
    return found

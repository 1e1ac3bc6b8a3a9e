"""``bench engine``: the engine against the same loops in C, one thread each."""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.bench.baseline import FLAGS, Baseline, BaselineUnavailableError
from pyop3_mlir.bench.cases import CASES, Case, FormLoop, case_named
from pyop3_mlir.bench.reference import apply, assemble_matrix, element_matrices
from pyop3_mlir.lowering.schedule import Schedule

__all__ = ["KEYS", "geometric_mean", "interleave", "machine", "run_case", "run_engine_bench"]

KEYS = (
    "case", "cells", "dofs", "flops", "bytes", "strategy", "batching",
    "ours_s", "baseline", "baseline_s", "ratio", "error",
)  # fmt: skip
"""The keys of a row."""

# Shorter samples measure the clock and the call from Python.
_SHORTEST_SAMPLE = 2e-3


def run_engine_bench(
    path: Path | str | None = None,
    cases: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    size: float = 1.0,
    runs: int = 15,
    schedule: Schedule | None = None,
    tune_budget: float | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure the cases and write a row for each.

    Parameters
    ----------
    path
        JSON file to write, a list of rows with :data:`KEYS`; written after every case, so that an
        interrupted run leaves what it has. None for no file.
    cases
        Names of :data:`~pyop3_mlir.bench.cases.CASES`; all where not given.
    device
        Device of the engine. The baseline always runs on the CPU.
    size
        Factor on the number of cells.
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
    """
    chosen = CASES if cases is None else tuple(case_named(name) for name in cases)
    rows: list[dict[str, Any]] = []
    for case in chosen:
        row = run_case(case, device, size, runs, schedule, tune_budget)
        rows.append(row)
        if report is not None:
            report(row)
        if path is not None:
            Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def run_case(
    case: Case,
    device: str = "cpu",
    size: float = 1.0,
    runs: int = 15,
    schedule: Schedule | None = None,
    tune_budget: float | None = None,
) -> dict[str, Any]:
    """Measure one case; parameters are those of :func:`run_engine_bench`."""
    from pyop3_mlir import engine
    from pyop3_mlir.options import Options

    if runs < 7:
        raise ValueError(f"{runs} runs are too few for a median, at least 7 are needed")
    loop = case.loop(size)
    # schedules come from this mesh and machine today, not from an earlier version's cache
    options = Options.resolve(
        device=device, tune="force" if schedule is None else None, tune_budget=tune_budget
    )
    ours = engine.compile(loop.parloop, device, schedule, options=options)
    try:
        baseline: Baseline | None = Baseline(loop.gem, loop.bare_parloop)
        description = " ".join(("gcc", *FLAGS[:3]))
    except BaselineUnavailableError as error:
        baseline, description = None, f"none: {error}"

    result = _result(loop, ours)
    expected = _reference(loop) if baseline is None else _result(loop, baseline)
    difference = float(np.abs(result - expected).max() / max(np.abs(expected).max(), 1e-300))
    functions: list[Callable[[], object]] = [ours] if baseline is None else [ours, baseline]
    # on the device cpu both run in this thread: its own time leaves out who else has the core
    clock = time.thread_time if device == "cpu" else time.perf_counter
    seconds = interleave(functions, runs, clock)
    ours_s, baseline_s = seconds[0], seconds[1] if baseline is not None else None
    values = (
        case.name, loop.mesh.size, loop.dofs, loop.flops, loop.parloop.compulsory_bytes,
        ours.schedule.strategy, _batching(ours.schedule), ours_s, description, baseline_s,
        None if baseline_s is None else baseline_s / ours_s, difference,
    )  # fmt: skip
    return dict(zip(KEYS, values, strict=True))


def interleave(
    functions: Sequence[Callable[[], object]],
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Time functions in turn; returns the median seconds of one call of each.

    Each round gives every function one sample, so that whatever else the machine does meets all of
    them. A sample is as many calls as take two milliseconds.

    Parameters
    ----------
    functions
        What to time. Each is called once before.
    runs
        Samples of each.
    clock
        Seconds. ``time.thread_time`` for functions that run in the calling thread alone: on a busy
        machine wall clocks favour short functions, which fit between two switches of process.
    """
    repeats = []
    for function in functions:
        function()
        once = _timed(function, 1, clock)
        repeats.append(max(1, math.ceil(_SHORTEST_SAMPLE / max(once, 1e-9))))
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for function, count, own in zip(functions, repeats, samples, strict=True):
            own.append(_timed(function, count, clock))
    return [statistics.median(own) for own in samples]


def _timed(function: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        function()
    return (clock() - start) / count


def _result(loop: FormLoop, run: Callable[[], object]) -> npt.NDArray[np.float64]:
    loop.output[...] = 0.0
    run()
    return np.array(loop.output)


def _reference(loop: FormLoop) -> npt.NDArray[np.float64]:
    matrices = element_matrices(loop.form, loop.mesh)
    if loop.rank == 2:
        return np.asarray(assemble_matrix(loop.mesh, matrices).data)
    return apply(loop.mesh, matrices, loop.arguments[2].buffer)


def _batching(schedule: Schedule) -> str:
    """Batching with its parameters, without the strategy."""
    return str(schedule).split("/", 1)[-1]


def geometric_mean(ratios: Iterable[float]) -> float:
    """Geometric mean; nan of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def machine() -> str:
    """Name the processor, for reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows for a terminal, a :class:`rich.table.Table`."""
    from rich.table import Table

    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    caption = f"{machine()}, one thread each"
    if ratios:
        caption += f"; geometric mean of the ratios {geometric_mean(ratios):.2f}"
    result = Table(title="the engine against C", caption=caption)
    result.add_column("case")
    for name in ("cells", "dofs", "ours", "GFLOP/s", "C", "ratio", "error"):
        result.add_column(name, justify="right")
    result.add_column("schedule")
    for row in rows:
        known = row["ratio"] is not None
        result.add_row(
            row["case"],
            f"{row['cells']:,}",
            f"{row['dofs']:,}",
            f"{row['ours_s'] * 1e3:.3f} ms",
            f"{row['flops'] / row['ours_s'] * 1e-9:.1f}",
            f"{row['baseline_s'] * 1e3:.3f} ms" if known else "",
            f"{row['ratio']:.2f}" if known else "",
            f"{row['error']:.0e}",
            f"{row['strategy']}/{row['batching']}",
        )
    return result

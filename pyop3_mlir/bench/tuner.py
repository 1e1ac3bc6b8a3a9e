"""``bench tuner``: how near the tuner's choice within its budget comes to the best there is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyop3_mlir.bench.cases import CASES, Case, case_named
from pyop3_mlir.bench.engine import interleave, machine

__all__ = ["run_case", "run_tuner_bench", "table"]

# Of the exhaustive search as many are timed again: its own order of the best may be noise.
_FINALISTS = 3


def run_tuner_bench(
    path: Path | str | None = None,
    cases: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    size: float = 1.0,
    budget: float = 20.0,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Tune each case twice, within the budget and without one, and compare the two choices.

    Parameters
    ----------
    path, cases, device, size, report
        As for :func:`pyop3_mlir.bench.engine.run_engine_bench`.
    budget
        Seconds of the first search.

    Returns
    -------
    list of dict
        With the keys case, heuristic, heuristic_s, chosen, chosen_s, best, best_s, candidates (how
        many the exhaustive search measured), ratio (chosen over best) and heuristic_ratio.
    """
    rows = []
    for case in CASES if cases is None else [case_named(name) for name in cases]:
        rows.append(run_case(case, device, size, budget))
        if report is not None:
            report(rows[-1])
        if path is not None:
            Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def run_case(
    case: Case, device: str = "cpu", size: float = 1.0, budget: float = 20.0
) -> dict[str, Any]:
    """Compare on one case; parameters as for :func:`run_tuner_bench`."""
    from pyop3_mlir import engine
    from pyop3_mlir.options import Options
    from pyop3_mlir.runtime.devices import get_device

    opened = get_device(device)
    # the searches share one loop, and so its compiled modules: the budget is measured first
    loop = case.loop(size).parloop
    chosen, exhaustive, heuristic = (
        engine.choose_schedule(
            loop, opened, Options.resolve(device=device, tune=mode, tune_budget=seconds)
        )
        for mode, seconds in (("force", budget), ("force", 1e6), ("off", 0.0))
    )
    assert exhaustive.result is not None
    measured = [m.schedule for m in exhaustive.result.measurements if m.samples]
    schedules = list(dict.fromkeys([heuristic.schedule, chosen.schedule, *measured[:_FINALISTS]]))
    bound = [engine.compile(loop, opened, schedule) for schedule in schedules]
    clock = time.thread_time if opened.threads == 1 else time.perf_counter
    seconds = dict(zip(schedules, interleave(bound, 21, clock), strict=True))
    best = min(seconds, key=lambda schedule: seconds[schedule])
    return {
        "case": case.name,
        "heuristic": str(heuristic.schedule),
        "heuristic_s": seconds[heuristic.schedule],
        "chosen": str(chosen.schedule),
        "chosen_s": seconds[chosen.schedule],
        "best": str(best),
        "best_s": seconds[best],
        "candidates": len(measured),
        "ratio": seconds[chosen.schedule] / seconds[best],
        "heuristic_ratio": seconds[heuristic.schedule] / seconds[best],
    }


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows for a terminal, a :class:`rich.table.Table`."""
    from rich.table import Table

    result = Table(title="the tuner against exhaustive search", caption=machine())
    for name in ("case", "heuristic", "chosen", "best"):
        result.add_column(name)
    for name in ("best time", "of", "heuristic / best", "chosen / best"):
        result.add_column(name, justify="right")
    for row in rows:
        result.add_row(
            row["case"],
            row["heuristic"],
            row["chosen"],
            row["best"],
            f"{row['best_s'] * 1e3:.3f} ms",
            str(row["candidates"]),
            f"{row['heuristic_ratio']:.2f}",
            f"{row['ratio']:.2f}",
        )
    return result

"""``bench mpi``: weak and strong scaling under mpiexec, beside PyOP2's in the same run.

The driver starts one job for each number of processes and each way of scaling. A job makes a mesh,
attaches the engine to Firedrake, and times the same loops on both engines in turn.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyop3_mlir.bench.engine import machine
from pyop3_mlir.errors import Pyop3MlirError

__all__ = ["CASES", "KEYS", "run_mpi_bench", "table"]

CASES: dict[str, float] = {
    "laplace_p1_tetrahedron_action": 0.5,
    "laplace_p2_tetrahedron_action": 0.5,
    "laplace_p3_tetrahedron_action": 0.25,
    "advection_dg1_triangle_action": 0.5,
    "laplace_p1_tetrahedron_matrix": 0.25,
    "laplace_p1_triangle_matrix": 0.5,
}
"""Cases of ``bench firedrake``, and the factor on their number of cells."""

SCALINGS = ("strong", "weak")

KEYS = (
    "case", "scaling", "ranks", "cells", "dofs", "ours_s", "baseline", "baseline_s", "ratio",
    "ours_efficiency", "baseline_efficiency", "core_s", "waiting_s", "owned_s", "error",
)  # fmt: skip
"""Keys of a row. Times are those of the slowest process. The last three seconds are the engine's
for one call: entities that need no halo, from there until the halo was there, the others."""

_MARK = "pyop3_mlir bench mpi: "


def run_mpi_bench(
    path: Path | str | None = None,
    cases: Sequence[str] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    size: float = 1.0,
    runs: int = 15,
    tune_budget: float | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure the cases on several numbers of processes and write a row for each.

    Parameters
    ----------
    path
        JSON file to write, a list of rows with :data:`KEYS`; written after each job. None for no
        file.
    cases
        Names of :data:`CASES`; all where not given.
    ranks
        Numbers of processes; 1 and powers of two up to the cores of this machine where not given.
    size
        Factor on the number of cells of all cases.
    runs
        Samples; the shortest counts, since what disturbs a process disturbs those that wait for it.
    tune_budget
        Seconds for tuning one loop; the setting where not given.
    report
        Called with each row as it is made.

    Raises
    ------
    ValueError
        For a case that does not exist.
    Pyop3MlirError
        Where there is no mpiexec, or a job fails; the message holds what it said.
    """
    for name in cases or ():
        if name not in CASES:
            raise ValueError(f"no case {name}; there are {', '.join(CASES)}")
    if shutil.which("mpiexec") is None:
        raise Pyop3MlirError("bench mpi starts its jobs by mpiexec, which is not there")
    chosen = list(cases or CASES)
    rows: list[dict[str, Any]] = []
    for count in ranks or _usual_ranks():
        for scaling in SCALINGS if count > 1 else SCALINGS[:1]:
            factor = size * (count if scaling == "weak" else 1)
            for row in _job(count, chosen, factor, runs, tune_budget):
                rows.append({**row, "scaling": scaling})
                _add_efficiencies(rows)
                if report is not None:
                    report(rows[-1])
            if path is not None:
                Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def _usual_ranks() -> list[int]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [1]
    while 2 * found[-1] <= (cores or 1):
        found.append(2 * found[-1])
    return found


def _add_efficiencies(rows: list[dict[str, Any]]) -> None:
    """Those of the last row, relative to one process."""
    row = rows[-1]
    alone = next((r for r in rows if r["case"] == row["case"] and r["ranks"] == 1), None)
    for name in ("ours", "baseline"):
        if alone is None:
            row[f"{name}_efficiency"] = None
        else:
            share = row["ranks"] if row["scaling"] == "strong" else 1
            row[f"{name}_efficiency"] = alone[f"{name}_s"] / row[f"{name}_s"] / share
    rows[-1] = {key: row[key] for key in KEYS}


def _job(
    ranks: int, cases: Sequence[str], size: float, runs: int, tune_budget: float | None
) -> list[dict[str, Any]]:
    arguments = json.dumps([list(cases), size, runs, tune_budget])
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        done = subprocess.run(
            ["mpiexec", "-n", str(ranks), sys.executable, "-m", __name__, arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
        if done.returncode:
            errors.seek(0)
            said = errors.read().strip().splitlines()[-20:]
            raise Pyop3MlirError(
                f"the job of {ranks} processes failed ({done.returncode}):\n" + "\n".join(said)
            )
    return [
        json.loads(line.removeprefix(_MARK))
        for line in done.stdout.splitlines()
        if line.startswith(_MARK)
    ]


# -- in a job -------------------------------------------------------------------------------------


def _measure(cases: Sequence[str], size: float, runs: int, tune_budget: float | None) -> None:
    """Measure in a job of any number of processes; the first one prints the rows."""
    from firedrake import COMM_WORLD
    from mpi4py import MPI

    for name in cases:
        row = _measure_case(COMM_WORLD, MPI, name, size * CASES[name], runs, tune_budget)
        if COMM_WORLD.rank == 0:
            print(_MARK + json.dumps(row), flush=True)


def _measure_case(
    comm: Any, mpi: Any, name: str, size: float, runs: int, tune_budget: float | None
) -> dict[str, Any]:
    import numpy as np

    from pyop3_mlir.bench.firedrake import _Assembly, _dofs, case_named
    from pyop3_mlir.frontends.dropin import attach, detach
    from pyop3_mlir.options import Options

    case = case_named(name)
    mesh = case.mesh(size)
    backend = attach(Options.resolve(device="cpu", tune="off", tune_budget=tune_budget))
    try:
        ours = _Assembly(case.form(mesh, case.rank))
        theirs = ours.with_method(backend.original)
        expected = theirs.result()
        ours.result()
        for loop in ours.loops:
            backend.tune(loop)
        difference = float(np.abs(ours.result() - expected).max(initial=0.0))
        largest = float(np.abs(expected).max(initial=0.0))
        entries = list(backend.entries.values())
        best, shares = [float("inf")] * 2, [0.0] * 3
        for _ in range(runs):
            for number, assembly in enumerate((ours, theirs)):
                before = [(e.core, e.waiting, e.owned) for e in entries]
                comm.Barrier()
                start = time.perf_counter()
                assembly.run_whole()
                seconds = comm.allreduce(time.perf_counter() - start, op=mpi.MAX)
                if seconds < best[number]:
                    best[number] = seconds
                    if assembly is ours:
                        after = [(e.core, e.waiting, e.owned) for e in entries]
                        shares = [
                            sum(b[k] - a[k] for a, b in zip(before, after, strict=True))
                            for k in range(3)
                        ]
    finally:
        detach(backend)
    core, waiting, owned = (comm.allreduce(share, op=mpi.MAX) for share in shares)
    error = comm.allreduce(difference, op=mpi.MAX) / comm.allreduce(largest, op=mpi.MAX)
    return {
        "case": name,
        "ranks": comm.size,
        "cells": comm.allreduce(int(mesh.cell_set.size)),
        "dofs": _dofs(ours.assembler),
        "ours_s": best[0],
        "baseline": "pyop2",
        "baseline_s": best[1],
        "ratio": best[1] / best[0],
        "core_s": core,
        "waiting_s": waiting,
        "owned_s": owned,
        "error": error,
    }


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows for a terminal, a :class:`rich.table.Table`."""
    from rich.table import Table

    result = Table(title="scaling, beside PyOP2", caption=f"{machine()}, one thread a process")
    result.add_column("case")
    result.add_column("scaling")
    names = ("ranks", "cells", "ours", "efficiency", "core", "waiting", "owned", "PyOP2")
    for name in (*names, "efficiency", "ratio", "error"):
        result.add_column(name, justify="right")
    for row in rows:
        seconds = [f"{row[key] * 1e3:.2f} ms" for key in ("core_s", "waiting_s", "owned_s")]
        result.add_row(
            row["case"],
            row["scaling"] if row["ranks"] > 1 else "",
            str(row["ranks"]),
            f"{row['cells']:,}",
            f"{row['ours_s'] * 1e3:.2f} ms",
            _percent(row["ours_efficiency"]),
            *seconds,
            f"{row['baseline_s'] * 1e3:.2f} ms",
            _percent(row["baseline_efficiency"]),
            f"{row['ratio']:.2f}",
            f"{row['error']:.0e}",
        )
    return result


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


if __name__ == "__main__":
    _measure(*json.loads(sys.argv[1]))

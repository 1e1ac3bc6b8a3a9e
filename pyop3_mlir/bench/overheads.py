"""``bench engine --overheads``: what loops cost beside their work: planning, compiling, calling."""

from __future__ import annotations

import json
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyop3_mlir import planning
from pyop3_mlir.bench import meshes
from pyop3_mlir.bench.cases import CASES, Case
from pyop3_mlir.bench.engine import machine
from pyop3_mlir.parloop import IndexTable

__all__ = ["run_overheads", "table"]

_RUNS = 7
_CALLS = 2000


def run_overheads(
    path: Path | str | None = None,
    *,
    device: str = "cpu",
    triangles: int = 1_000_000,
    cases: Sequence[Case] = CASES,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure planning on many triangles, warm calls without work, and compilations.

    Modules are compiled as their case is scheduled (tuned, where it has been), without the cache.

    Parameters
    ----------
    path
        JSON file to write, a list of rows; None for no file.
    device
        Device of the engine.
    triangles
        How many, about, to plan for.
    cases
        What to compile.
    report
        Called with each row as it is made.

    Returns
    -------
    list of dict
        With the keys case, value, unit and target (at most; None for none).
    """
    rows = []
    for measured in (_planning(triangles), _calls(device), _compilations(device, cases)):
        for case, value, unit, target in measured:
            rows.append({"case": case, "value": value, "unit": unit, "target": target})
            if report is not None:
                report(rows[-1])
            if path is not None:
                Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    return rows


_Row = tuple[str, float, str, float | None]


def _planning(count: int) -> Iterator[_Row]:
    """Triangles with three targets each."""
    mesh = meshes.triangles(math.isqrt(count // 2))
    cells, nodes = mesh.cells, mesh.node_count
    pattern = IndexTable(cells, nodes)
    indptr, indices = planning.csr_pattern(pattern, pattern, nodes, nodes)
    plans: dict[str, Callable[[IndexTable], object]] = {
        "colours": lambda table: planning.colour([(table, 0)], table.size),
        "segments": lambda table: planning.segments(table, table.size),
        "last writers": lambda table: planning.last_writer_table(table, table.size),
        "positions in a matrix": lambda table: planning.csr_positions(
            indptr, indices, table, table
        ),
    }
    for name, plan in plans.items():
        seconds = []
        for _ in range(3):
            # tables remember what was planned
            fresh = IndexTable(cells, nodes)
            start = time.process_time()
            plan(fresh)
            seconds.append(time.process_time() - start)
        yield f"planning {name}, {mesh.size:,} triangles", statistics.median(seconds), "s", 1.0
        fresh = IndexTable(cells, nodes)
        tracemalloc.start()
        plan(fresh)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        target = 10.0 if name != "positions in a matrix" else None
        yield f"peak memory of planning {name}", peak / cells.nbytes, "index tables", target


def _calls(device: str) -> Iterator[_Row]:
    """A loop without anything to do, and the first case's on a mesh of two cells."""
    from pyop3_mlir import engine
    from pyop3_mlir.kernels.program import KernelArgument, Load, LocalKernel
    from pyop3_mlir.lowering.schedule import Schedule
    from pyop3_mlir.parloop import INC, READ, Argument, IterationSet, Parloop

    y, x = (KernelArgument(name, (3,), np.dtype(float)) for name in "yx")
    kernel = LocalKernel.pointwise("copy", (y, x), lambda i: Load(x, (i,)))
    nodes = IndexTable(np.arange(3).reshape(1, 3), 3)
    arguments = [
        Argument.indirect(np.zeros(3), access, nodes, name=name)
        for access, name in ((INC, "y"), (READ, "x"))
    ]
    empty = Parloop(kernel, IterationSet(1), arguments)
    bound = engine.compile(empty, device, Schedule("in_order", width=1))
    yield "warm call of a loop that only copies, one cell", 1e6 * _call(bound), "us", 40.0
    two = engine.compile(CASES[0].loop(1e-9).parloop, device)
    yield f"warm call of {CASES[0].name} on two cells", 1e6 * _call(two), "us", None


def _call(function: Callable[[], object]) -> float:
    """Median seconds of a call."""
    medians = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            function()
        medians.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(medians)


def _compilations(device: str, cases: Sequence[Case]) -> Iterator[_Row]:
    from pyop3_mlir import engine
    from pyop3_mlir.options import Options
    from pyop3_mlir.runtime.compile import compile_module
    from pyop3_mlir.runtime.devices import get_device

    opened = get_device(device)
    options = Options.resolve(device=device, tune="cached")
    for case in cases:
        loop = case.loop().parloop
        schedule = engine.choose_schedule(loop, opened, options).schedule
        module = engine.Module(loop.kernel, loop.spec, schedule, opened)
        start = time.perf_counter()
        compile_module(module.lower, opened, cache=None, key=module.key)
        yield f"compiling {case.name}", time.perf_counter() - start, "s", 3.0


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows for a terminal, a :class:`rich.table.Table`."""
    from rich.table import Table

    result = Table(title="overheads", caption=machine())
    result.add_column("what")
    result.add_column("measured", justify="right")
    result.add_column("at most", justify="right")
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:g}"
        result.add_row(row["case"], f"{row['value']:.3g} {row['unit']}", target)
    return result

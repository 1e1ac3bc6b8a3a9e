"""Whole jobs under mpiexec: their reports, their ends, and what they share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("pytest_mpi", reason="needs MPI")
pytest.importorskip("firedrake", reason="needs Firedrake")
if shutil.which("mpiexec") is None:
    pytest.skip("there is no mpiexec", allow_module_level=True)

from pyop3_mlir.doctor import placement_table
from pyop3_mlir.parallel import Place
from pyop3_mlir.runtime.cache import Cache

PATIENCE = 200

SCRIPT = """
from firedrake import *
mesh = UnitSquareMesh(4, 4)
space = FunctionSpace(mesh, "CG", 1)
x, y = SpatialCoordinate(mesh)
f = Function(space).interpolate(x + 2 * y)
total = assemble(f * dx)
{then}
if COMM_WORLD.rank == 0:
    print("total", total, flush=True)
"""


def start(tmp_path, name, *arguments, ranks=2, then=""):
    """Start a job with a cache in ``tmp_path``; returns the process."""
    script = tmp_path / f"{name}.py"
    script.write_text(SCRIPT.format(then=then))
    environment = {
        key: value
        for key, value in os.environ.items()
        # not what the launcher of these tests told them, but what the user told the launcher
        if not key.startswith(("PMI", "MPI_", "HYD", "OMPI_", "PMIX", "_PYTEST_MPI"))
        or key.startswith(("OMPI_MCA_rmaps_", "OMPI_ALLOW_RUN_AS_ROOT"))
    }
    environment["PYOP3_MLIR_CACHE_DIR"] = str(tmp_path / "cache")
    command = ["mpiexec", "-n", str(ranks), sys.executable, "-m", "pyop3_mlir", "run"]
    return subprocess.Popen(
        [*command, *arguments, script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """Wait for a job; a test must not leave one behind."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        pytest.fail(f"the job hangs:\n{output}")
    return output


def test_report_of_all_processes(tmp_path):
    report = tmp_path / "report.json"
    job = start(tmp_path, "reported", "--report", str(report), ranks=3)
    output = finish(job)
    assert job.returncode == 0, output
    content = json.loads(report.read_text())
    assert content["processes"] == 3
    assert content["lowered_fraction"] == 1.0
    for loop in content["loops"]:
        assert loop["core"] + loop["owned"] > 0
        assert loop["waiting"] > 0


@pytest.mark.parametrize(
    "then",
    [
        "import os, signal; COMM_WORLD.rank == 1 and os.kill(os.getpid(), signal.SIGKILL)",
        "if COMM_WORLD.rank == 1: raise RuntimeError('this one fails')",
    ],
    ids=["killed", "raises"],
)
def test_lost_process_ends_the_job(tmp_path, then):
    """The others wait for it in a loop."""
    started = time.monotonic()
    job = start(tmp_path, "lost", ranks=2, then=f"{then}\ntotal = assemble(2 * f * f * dx)")
    output = finish(job)
    assert job.returncode != 0
    assert "total" not in output
    assert time.monotonic() - started < PATIENCE


def test_jobs_share_a_cache(tmp_path):
    jobs = [start(tmp_path, f"job{number}") for number in range(2)]
    outputs = [finish(job) for job in jobs]
    totals = []
    for job, output in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, output
        totals += [line for line in output.splitlines() if line.startswith("total")]
    assert totals == totals[:1] * 2
    assert float(totals[0].split()[1]) == pytest.approx(1.5, rel=1e-13)
    modules = Cache(tmp_path / "cache" / "modules")
    assert modules.list()
    assert modules.verify() == []
    assert not list(modules.root.glob("*.tmp"))


def test_table_of_places():
    places = [
        Place(0, "a", 0, "cuda:0", 0, (0, 1, 2, 3)),
        Place(1, "a", 1, "cuda:0", 0, (4, 6, 7)),
        Place(2, "b", 0, "cpu:4", 4, (0, 1)),
    ]
    table = placement_table(places)
    assert list(table.columns[5].cells) == ["0-3", "4,6-7", "0-1"]
    assert table.caption == "a: 2 processes share 1 GPUs; b: 4 threads share 2 cores"

"""``bench pyop3`` at a size at which nothing is to be learnt from the times."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pyop3.insn.exec", reason="pyop3 is in no registry and not installed here")
pytest.importorskip("firedrake", reason="Firedrake's branch with pyop3 is not installed")

from pyop3_mlir.bench.engine import KEYS
from pyop3_mlir.bench.pyop3 import run_pyop3_bench
from pyop3_mlir.lowering.schedule import Schedule


@pytest.mark.parametrize("case", ["mass_p1_triangle_action", "laplace_p1_triangle_matrix"])
def test_row_of_a_case(case, tmp_path):
    path = tmp_path / "rows.json"
    (row,) = run_pyop3_bench(path, [case], size=1e-3, schedule=Schedule(width=4))
    assert json.loads(path.read_text()) == [row]
    assert tuple(row) == KEYS
    assert row["case"] == case
    assert row["baseline"] == "pyop3-loopy"
    assert row["cells"] > 100
    assert row["error"] < 1e-13
    assert row["ratio"] > 0


def test_too_few_runs_are_refused():
    with pytest.raises(ValueError, match="at least 7"):
        run_pyop3_bench(cases=["mass_p1_triangle_action"], runs=3)

"""``bench firedrake``: its rows, what it refuses, and that both engines do equal work."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("firedrake")

from pyop3_mlir.bench import firedrake as bench
from pyop3_mlir.bench.engine import KEYS
from pyop3_mlir.lowering.schedule import Schedule

TINY = 1e-4


def test_every_case_that_is_promised():
    names = {case.name for case in bench.CASES}
    forms = {
        "mass_p1_triangle", "laplace_p1_triangle", "laplace_p1_tetrahedron",
        "laplace_p2_tetrahedron", "laplace_p3_tetrahedron", "elasticity_p2_tetrahedron",
        "advection_dg1_triangle", "mixed_poisson_rt1_triangle", "laplace_q2_hexahedron",
        "laplace_q3_hexahedron",
    }  # fmt: skip
    expected = {f"{form}_{kind}" for form in forms for kind in ("action", "matrix")}
    expected |= {"neo_hookean_p2_tetrahedron_residual", "neo_hookean_p2_tetrahedron_matrix"}
    assert names == expected


def test_sizes_scale_the_number_of_cells():
    case = bench.case_named("laplace_p1_tetrahedron_action")
    assert case.mesh(1 / 8**3).num_cells() == 6 * 3**3


def test_rows_have_the_keys_of_the_engine_benchmark_and_both_engines_agree(tmp_path):
    names = ["laplace_p1_triangle_action", "mixed_poisson_rt1_triangle_matrix"]
    path = tmp_path / "rows.json"
    rows = bench.run_firedrake_bench(
        path, names, size=0.001, schedule=Schedule(width=4), report=lambda row: None
    )
    assert json.loads(path.read_text()) == rows
    for row, name in zip(rows, names, strict=True):
        assert tuple(row) == KEYS
        assert (row["case"], row["baseline"], row["strategy"]) == (name, "pyop2", "in_order")
        assert row["ratio"] == pytest.approx(row["baseline_s"] / row["ours_s"])
        assert row["error"] < 1e-13
        assert row["flops"] > 0


def test_cells_of_extruded_meshes_are_counted():
    case = bench.case_named("laplace_q2_hexahedron_action")
    row = bench.run_case(case, size=(2 / 12) ** 3, schedule=Schedule(width=1))
    assert (row["cells"], row["dofs"]) == (2**3, 5**3)


def test_whole_assemblies_give_the_same_numbers():
    case = bench.case_named("laplace_p1_triangle_matrix")
    row = bench.run_case(case, size=0.001, schedule=Schedule(width=4), whole=True)
    assert row["error"] < 1e-13
    assert np.isfinite(row["ratio"])


def test_few_runs_are_refused():
    with pytest.raises(ValueError, match="at least 7"):
        bench.run_case(bench.CASES[0], size=TINY, runs=3)


def test_unknown_cases_are_refused():
    with pytest.raises(ValueError, match="no case nothing"):
        bench.run_firedrake_bench(cases=["nothing"])
    with pytest.raises(ValueError, match="no case nothing"):
        bench.run_overheads(cases=["nothing"])


def test_overheads_of_a_case():
    (row,) = bench.run_overheads(cases=["laplace_p1_triangle_action"])
    assert row["case"] == "laplace_p1_triangle_action"
    for engine in ("ours", "pyop2"):
        for key in ("first_s", "first_cpu_s", "call_s"):
            assert 0 < row[f"{engine}_{key}"] < np.inf


def test_schedules_are_measured(monkeypatch):
    """A benchmark of what is tuned that only ran the heuristic would be none."""
    from pyop3_mlir.autotune import choose

    measured = []

    def tune(*args, **kwargs):
        measured.append(choose_tune(*args, **kwargs))
        return measured[-1]

    choose_tune = choose.tune
    monkeypatch.setattr(choose, "tune", tune)
    case = next(c for c in bench.CASES if c.name == "laplace_p1_triangle_action")
    bench.run_case(case, size=0.001, tune_budget=5.0)
    (result,) = measured
    assert sum(bool(m.samples) for m in result.measurements) > 1

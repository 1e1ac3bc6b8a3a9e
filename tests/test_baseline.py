"""The loop in C against numpy: a baseline that computes something else would be no baseline."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pyop3_mlir.bench.baseline import Baseline, BaselineUnavailableError, loop_code
from pyop3_mlir.bench.cases import CASES, FormLoop, case_named
from pyop3_mlir.bench.engine import KEYS, geometric_mean, interleave, run_case, run_engine_bench
from pyop3_mlir.bench.meshes import Mesh, aligned, tetrahedra, triangles
from pyop3_mlir.bench.reference import apply, assemble_matrix, element_matrices
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import MAX, MIN, RW, WRITE, Argument, IndexTable, IterationSet, Parloop

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@needs_gcc
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_baseline_agrees_with_numpy(case) -> None:
    loop = case.loop(size=0.01)
    Baseline(loop.gem, loop.bare_parloop)()
    matrices = element_matrices(case.form, loop.mesh)
    if case.rank == 1:
        expected = apply(loop.mesh, matrices, loop.arguments[2].buffer)
    else:
        matrix = assemble_matrix(loop.mesh, matrices)
        indptr, indices = loop.pattern
        assert np.array_equal(indptr, matrix.indptr)
        assert np.array_equal(indices, matrix.indices)
        expected = matrix.data
    assert difference(loop.output, expected) < 1e-13


@needs_gcc
def test_baseline_runs_the_cells_it_is_given() -> None:
    loop = FormLoop("source", triangles(4, 1))
    loop.arguments[2].buffer[0] = 1.0
    run = Baseline(loop.gem, loop.bare_parloop)
    run(3, 9)
    assert np.isclose(loop.output.sum(), loop.mesh.volumes[3:9].sum(), rtol=1e-13)


@needs_gcc
def test_baseline_visits_the_entities_of_a_subset() -> None:
    loop = FormLoop("functional", tetrahedra(2, 2), rank=0, coefficient=np.ones(125))
    chosen = np.array([5, 0, 17], np.int32)
    bare = loop.bare_parloop
    subset = Parloop(bare.kernel, IterationSet(3, entities=chosen), bare.arguments)
    Baseline(loop.gem, subset)()
    assert np.isclose(loop.output[0], loop.mesh.volumes[chosen].sum(), rtol=1e-13)


@pytest.mark.parametrize(
    ("access", "statement"),
    [(WRITE, "] = t0["), (RW, "] = t0["), (MIN, " < t0["), (MAX, " > t0[")],
)
def test_code_of_the_other_access_modes(access, statement: str) -> None:
    loop = FormLoop("source", triangles(1, 1))
    bare = loop.bare_parloop
    table = bare.arguments[0].table
    first = Argument.indirect(loop.output, access, table)
    code = loop_code(
        loop.gem, Parloop(bare.kernel, bare.iteration_set, [first, *bare.arguments[1:]])
    )
    assert statement in code


@needs_gcc
def test_dropped_entries_are_not_added() -> None:
    loop = FormLoop("source", triangles(3, 1))
    bare = loop.bare_parloop
    loop.arguments[2].buffer[0] = 1.0
    values = loop.mesh.nodes.copy()
    values[values == 2] = -1
    table = IndexTable(values, loop.mesh.node_count, allow_negative=True)
    first = Argument.indirect(loop.output, bare.arguments[0].access, table)
    Baseline(loop.gem, Parloop(bare.kernel, bare.iteration_set, [first, *bare.arguments[1:]]))()
    assert loop.output[2] == 0.0
    touched = (loop.mesh.nodes == 2).any(axis=1)
    expected = loop.mesh.volumes.sum() - loop.mesh.volumes[touched].sum() / 3
    assert np.isclose(loop.output.sum(), expected, rtol=1e-13)


@needs_gcc
def test_the_process_keeps_its_denormal_numbers() -> None:
    loop = FormLoop("mass", triangles(2, 1))
    Baseline(loop.gem, loop.bare_parloop)()
    assert np.array([1e-308])[0] / np.array([16.0])[0] > 0.0


def test_absence_of_gcc_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    loop = FormLoop("mass", triangles(1, 1))
    with pytest.raises(BaselineUnavailableError, match="gcc is not installed"):
        Baseline(loop.gem, loop.bare_parloop)


def test_case_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="no case 'mass_p9'"):
        case_named("mass_p9")


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_nodes_lie_where_every_cell_says(degree: int) -> None:
    for mesh, per_side in ((triangles(4, degree), 4), (tetrahedra(3, degree), 3)):
        assert mesh.node_count == (per_side * degree + 1) ** mesh.dimension
        # each node has one place only if all cells of an edge or face number it the same way
        _check_places(mesh)


def _check_places(mesh: Mesh) -> None:
    from FIAT import Lagrange
    from FIAT.reference_element import ufc_simplex

    dual = Lagrange(ufc_simplex(mesh.dimension), mesh.degree).dual_basis()
    reference = np.array([next(iter(f.get_point_dict())) for f in dual])
    barycentric = np.column_stack([1 - reference.sum(axis=1), reference])
    x = np.einsum("iv,nvd->nid", barycentric, mesh.points[mesh.cells])
    assert np.abs(mesh.node_points[mesh.nodes] - x).max() < 1e-14


def test_reordered_mesh_is_the_same_mesh() -> None:
    rng = np.random.default_rng(3)
    mesh = tetrahedra(4)
    order = rng.permutation(len(mesh.points))
    points = np.empty_like(mesh.points)
    points[order] = mesh.points
    cells = rng.permuted(order[mesh.cells], axis=1)[rng.permutation(mesh.size)]
    again = Mesh.build(points, cells, reorder=True)
    assert np.allclose(np.sort(again.volumes), np.sort(mesh.volumes), rtol=1e-12)
    assert (np.diff(again.cells, axis=1) > 0).all()
    assert np.ptp(again.cells, axis=1).mean() < np.ptp(np.sort(cells, axis=1), axis=1).mean() / 2


def test_aligned_arrays_start_at_64_bytes() -> None:
    for shape in (1, 7, (3, 5)):
        array = aligned(shape, np.float32)
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        assert not array.any()


@needs_gcc
def test_bench_writes_a_row_for_each_case(tmp_path: Path) -> None:
    names = ["laplace_p1_triangle_action", "laplace_p1_triangle_matrix"]
    path = tmp_path / "rows.json"
    rows = run_engine_bench(path, names, size=0.005, runs=7, schedule=Schedule())
    assert json.loads(path.read_text()) == rows
    assert [row["case"] for row in rows] == names
    for row in rows:
        assert tuple(row) == KEYS
        assert row["cells"] == 2 * 14**2
        assert row["dofs"] == 15**2
        assert row["strategy"] == "in_order"
        assert row["error"] < 1e-13
        assert row["ratio"] == row["baseline_s"] / row["ours_s"]


def test_bench_without_gcc_says_so_and_compares_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    row = run_case(case_named("mass_p2_triangle_action"), size=0.005, runs=7, schedule=Schedule())
    assert row["baseline"] == "none: gcc is not installed"
    assert row["baseline_s"] is None
    assert row["ratio"] is None
    assert row["error"] < 1e-13


def test_fewer_than_seven_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="6 runs are too few"):
        run_case(CASES[0], runs=6)


def test_functions_are_timed_in_turn() -> None:
    calls = []
    ticks = iter(range(10_000))
    interleave([lambda: calls.append("a"), lambda: calls.append("b")], 3, clock=lambda: next(ticks))
    # two calls of each to warm up and to find the size of a sample, then turns
    assert "".join(calls) == "aabb" + "ab" * 3


def test_geometric_mean() -> None:
    assert np.isclose(geometric_mean([1.0, 2.0, 4.0]), 2.0)
    assert np.isnan(geometric_mean([]))


def test_overheads_are_rows(tmp_path, monkeypatch):
    from pyop3_mlir.bench.overheads import run_overheads, table

    monkeypatch.setenv("PYOP3_MLIR_TUNE", "off")
    path = tmp_path / "overheads.json"
    rows = run_overheads(path, triangles=200, cases=CASES[:1])
    assert json.loads(path.read_text()) == rows
    assert [row["case"].split()[0] for row in rows] == [
        *["planning", "peak"] * 4,
        *["warm"] * 2,
        "compiling",
    ]
    assert all(0 < row["value"] < 1e6 for row in rows)
    assert table(rows).row_count == len(rows)

"""Dats and matrices in PETSc's memory, by the code that devices take, on the host.

PyOP2 without the engine is the reference. Transfers need a PETSc with CUDA: ``tests/gpu``.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

pytest.importorskip("firedrake", reason="needs Firedrake")

from firedrake import (
    DirichletBC,
    Function,
    FunctionSpace,
    TestFunction,
    TrialFunction,
    UnitSquareMesh,
    VectorFunctionSpace,
    assemble,
    ds,
    dx,
    grad,
    inner,
    solve,
)

from pyop3_mlir.frontends import petsc_device
from pyop3_mlir.frontends.petsc_device import VecMemory
from pyop3_mlir.frontends.pyop2_devices import DeviceData, DeviceValues
from pyop3_mlir.options import Options
from pyop3_mlir.runtime.devices import get_device


@pytest.fixture
def on_device(monkeypatch: Any, attach: Any) -> Any:
    """The engine, with Dats and matrices as it has them on a device: here, of the host."""
    monkeypatch.setattr(DeviceData, "of", lambda _: DeviceData(get_device("cpu")))
    return attach


@pytest.fixture
def acquired(monkeypatch: Any) -> list[tuple[Any, str]]:
    """What loops have asked PETSc for: vectors and accesses."""
    found: list[tuple[Any, str]] = []
    acquire = VecMemory.acquire

    def noting(memory: Any, access: Any) -> None:
        found.append((memory.vec, access.name))
        acquire(memory, access)

    monkeypatch.setattr(VecMemory, "acquire", noting)
    return found


def poisson() -> tuple[Any, Any, Any, Any]:
    """Bilinear form with facets, linear form, boundary condition and solution."""
    mesh = UnitSquareMesh(5, 4)
    space = FunctionSpace(mesh, "CG", 2)
    u, v, f = TrialFunction(space), TestFunction(space), Function(space)
    x = mesh.coordinates.dat.data_ro
    f.dat.data[:] = np.resize(np.sin(3 * x[:, 0] + x[:, 1]), f.dat.data_ro.shape)
    bilinear = inner(grad(u), grad(v)) * dx + inner(u, v) * ds
    return bilinear, inner(f, v) * dx, DirichletBC(space, 1.0, 1), Function(space)


def close(found: Any, expected: Any) -> None:
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()


def test_a_vector_is_assembled_in_petscs_memory(on_device: Any, acquired: Any) -> None:
    _, linear, _, _ = poisson()
    expected = assemble(linear).dat.data_ro.copy()
    with on_device() as engine:
        result = assemble(linear)
        state = result.dat.dat_version
        assemble(linear, tensor=result)
    engine.all_lowered()
    close(result.dat.data_ro, expected)
    assert result.dat.dat_version > state
    modes = {vec.handle: {m for v, m in acquired if v.handle == vec.handle} for vec, _ in acquired}
    assert "RW" in modes[result.dat._vec.handle]
    assert all("RW" not in m for handle, m in modes.items() if handle != result.dat._vec.handle)


def test_the_host_sees_the_results_and_the_loops_see_what_it_writes(on_device: Any) -> None:
    _, linear, _, _ = poisson()
    (f,) = linear.coefficients()
    with on_device() as engine:
        before = assemble(linear).dat.data_ro.copy()
        f.dat.data[:] *= 2.0
        close(assemble(linear).dat.data_ro, 2 * before)
        with f.dat.vec as vec:
            vec.scale(0.25)
        close(assemble(linear).dat.data_ro, before / 2)
    engine.all_lowered()


def test_vector_spaces_and_components(on_device: Any) -> None:
    space = VectorFunctionSpace(UnitSquareMesh(3, 3), "CG", 1)
    v, f = TestFunction(space), Function(space)
    f.dat.data[:] = np.arange(f.dat.data_ro.size).reshape(-1, 2)
    form = f[1] * v[0] * dx
    expected = assemble(form).dat.data_ro.copy()
    with on_device() as engine:
        close(assemble(form).dat.data_ro, expected)
    engine.all_lowered()


def test_a_matrix_is_assembled_by_coo(on_device: Any, monkeypatch: Any) -> None:
    """Cells, facets and boundary conditions, more than once."""
    bilinear, _, condition, _ = poisson()
    expected = assemble(bilinear, bcs=condition).petscmat
    flushed = []
    changed = DeviceValues.changed
    monkeypatch.setattr(
        DeviceValues, "changed", lambda self: (flushed.append(self.mat.handle), changed(self))
    )
    with on_device() as engine:
        matrix = assemble(bilinear, bcs=condition)
        for _ in range(2):
            found = matrix.petscmat
            for mine, theirs in zip(
                found.getValuesCSR()[:2], expected.getValuesCSR()[:2], strict=True
            ):
                np.testing.assert_array_equal(mine, theirs)
            close(found.getValuesCSR()[2], expected.getValuesCSR()[2])
            assemble(bilinear, bcs=condition, tensor=matrix)
    engine.all_lowered()
    assert set(flushed) == {matrix.petscmat.handle}
    assert len(flushed) >= 4


def test_boundary_conditions_put_their_ones_into_the_matrix_on_the_device(
    on_device: Any, monkeypatch: Any
) -> None:
    """PETSc would set them on the host. They are set, not added, whatever is there."""
    bilinear, _, condition, _ = poisson()
    expected = assemble(bilinear, bcs=condition, weight=3.0).petscmat.getValuesCSR()
    rows = []
    set_diagonal = DeviceValues.set_diagonal

    def noting(values: Any, nodes: Any, weight: float) -> None:
        rows.append((len(nodes), weight))
        set_diagonal(values, nodes, weight)

    monkeypatch.setattr(DeviceValues, "set_diagonal", noting)
    with on_device():
        matrix = assemble(bilinear, bcs=condition, weight=3.0)
        close(matrix.petscmat.getValuesCSR()[2], expected[2])
        matrix.M.set_local_diagonal_entries(condition.nodes, diag_val=5.0)
        matrix.M.set_local_diagonal_entries(condition.nodes, diag_val=3.0)
        close(matrix.petscmat.getValuesCSR()[2], expected[2])
    count = len(condition.nodes)
    assert rows == [(count, 3.0), (count, 5.0), (count, 3.0)]


def test_boundary_conditions_on_components(on_device: Any) -> None:
    space = VectorFunctionSpace(UnitSquareMesh(3, 3), "CG", 1)
    u, v = TrialFunction(space), TestFunction(space)
    conditions = [DirichletBC(space.sub(1), 0.0, 1), DirichletBC(space, (0.0, 1.0), 2)]
    form = inner(grad(u), grad(v)) * dx
    expected = assemble(form, bcs=conditions, mat_type="aij").petscmat
    with on_device() as engine:
        found = assemble(form, bcs=conditions, mat_type="aij").petscmat
        assert found.getType() == "seqaij"
        for mine, theirs in zip(found.getValuesCSR(), expected.getValuesCSR(), strict=True):
            close(mine, theirs)
    engine.all_lowered()


def test_a_problem_is_solved(on_device: Any) -> None:
    bilinear, linear, condition, solution = poisson()
    parameters = {"ksp_type": "preonly", "pc_type": "lu"}
    solve(bilinear == linear, solution, bcs=condition, solver_parameters=parameters)
    expected = solution.dat.data_ro.copy()
    solution.assign(0)
    with on_device() as engine:
        solve(bilinear == linear, solution, bcs=condition, solver_parameters=parameters)
    engine.all_lowered()
    close(solution.dat.data_ro, expected)


def test_loops_that_run_through_pyop2_have_the_latest_data(
    on_device: Any, monkeypatch: Any
) -> None:
    """They are handed addresses, so that nobody asks for the data."""
    _, linear, _, _ = poisson()
    brought = []
    monkeypatch.setattr(DeviceData, "_bring_back", lambda self, vec: brought.append(vec.handle))
    with on_device() as engine:
        monkeypatch.setattr(engine.backend, "_prepare", refusing(engine.backend._prepare))
        result = assemble(linear)
    assert not any(entry.lowered for entry in engine.entries().values())
    (f,) = linear.coefficients()
    assert {f.dat._vec.handle, result.dat._vec.handle} <= set(brought)


def refusing(prepare: Any) -> Any:
    def refuse(loop: Any) -> Any:
        bound = prepare(loop)
        bound.call = bound.reading = None
        return bound

    return refuse


class Masked:
    """A vector as PETSc has it on a device, with its two copies' mask."""

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.asked: list[bool] = []

    def getType(self) -> str:  # noqa: N802
        return "seqcuda"

    def getOffloadMask(self) -> int:  # noqa: N802
        return self.mask

    def getArray(self, readonly: bool) -> None:  # noqa: N802
        self.asked.append(readonly)


@pytest.mark.parametrize(
    ("mask", "reading", "asked"),
    [
        (1, True, []),
        (1, False, []),
        (2, True, [True]),
        (2, False, [False]),
        (3, True, []),
        (3, False, [False]),
    ],
)
def test_who_looks_at_the_host_gets_the_fresh_copy(mask: int, reading: bool, asked: Any) -> None:
    """PETSc copies, and marks the device's copy as stale where the host's may be written."""
    data, vec = DeviceData(get_device("cpu")), Masked(mask)
    data.reading = reading
    data._bring_back(vec)
    assert vec.asked == asked


def test_detach_leaves_dats_to_pyop2(on_device: Any) -> None:
    from pyop2.types.dat import AbstractDat, Dat
    from pyop2.types.data_carrier import EmptyDataMixin

    names = [(Dat, "_vec"), (EmptyDataMixin, "_data"), (AbstractDat, "data_ro")]
    before = [vars(owner)[name] for owner, name in names]
    _, linear, _, _ = poisson()
    with on_device():
        result = assemble(linear)
        assert [vars(owner)[name] for owner, name in names] != before
    assert [vars(owner)[name] for owner, name in names] == before
    assert result.dat._vec.boundToCPU()
    close(assemble(linear, tensor=result).dat.data_ro, assemble(linear).dat.data_ro)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("vulkan", "PETSc has no vectors on vulkan devices"),
        ("cuda:0", "PETSc was built without cuda"),
    ],
)
def test_where_petsc_has_no_memory_it_is_said_why(device: str, reason: str, caplog: Any) -> None:
    from petsc4py import PETSc

    if PETSc.Sys.hasExternalPackage("cuda") and device != "vulkan":
        pytest.skip("this PETSc has CUDA")
    petsc_device.obstacle.cache_clear()
    with caplog.at_level(logging.INFO, "pyop3_mlir"):
        assert DeviceData.of(Options.resolve(device=device)) is None
    assert f"stay on the host, not on {device}: {reason}" in caplog.text


def test_on_the_host_there_is_nothing_to_do() -> None:
    assert DeviceData.of(Options.resolve(device="cpu:2")) is None

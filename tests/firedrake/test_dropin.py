"""In and out of PyOP2: what is replaced, what falls back, what is kept."""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("firedrake")

from firedrake import (
    READ,
    WRITE,
    Constant,
    DirichletBC,
    Function,
    FunctionSpace,
    Identity,
    LinearVariationalProblem,
    LinearVariationalSolver,
    MeshHierarchy,
    NonlinearVariationalProblem,
    NonlinearVariationalSolver,
    SpatialCoordinate,
    TestFunction,
    TestFunctions,
    TrialFunction,
    TrialFunctions,
    UnitSquareMesh,
    VectorFunctionSpace,
    assemble,
    derivative,
    det,
    dx,
    grad,
    inner,
    ln,
    prolong,
    sin,
    solve,
    tr,
)
from firedrake.assemble import get_assembler
from pyop2 import op2
from pyop2.types.data_carrier import EmptyDataMixin

from pyop3_mlir import engine
from pyop3_mlir.frontends import dropin
from pyop3_mlir.frontends.pyop2 import plan_for
from pyop3_mlir.runtime.compile import compilations

STATM = Path("/proc/self/statm")
parloop_class = sys.modules["pyop2.parloop"].Parloop


def space(n: int = 3, degree: int = 1) -> Any:
    return FunctionSpace(UnitSquareMesh(n, n), "CG", degree)


def replaced_names() -> list[Any]:
    import pyop2.local_kernel
    import tsfc.driver
    import tsfc.kernel_interface.common
    import tsfc.kernel_interface.firedrake_loopy

    return [
        parloop_class._compute,
        vars(EmptyDataMixin)["_data"],
        pyop2.local_kernel.LoopyLocalKernel.__init__,
        tsfc.driver.impero_utils,
        tsfc.kernel_interface.common.impero_utils,
        tsfc.kernel_interface.firedrake_loopy.generate_loopy,
    ]


def test_detach_restores_every_name(attach: Any) -> None:
    before = replaced_names()
    with attach():
        assert all(a is not b for a, b in zip(before, replaced_names(), strict=True))
    assert replaced_names() == before


def test_attach_nests(attach: Any) -> None:
    before = replaced_names()
    with attach() as outer:
        inside = replaced_names()
        with attach() as inner_:
            assert dropin.attached() is inner_.backend
        assert replaced_names() == inside
        assert dropin.attached() is outer.backend
    assert replaced_names() == before


def test_detach_out_of_order() -> None:
    before = replaced_names()
    first, second = dropin.attach(), dropin.attach()
    dropin.detach(first)
    assert dropin.attached() is second
    dropin.detach(second)
    assert replaced_names() == before
    with pytest.raises(RuntimeError, match="not attached"):
        dropin.detach()


def test_detach_lets_go_of_loops(attach: Any) -> None:
    v = space()
    assembler = get_assembler(Function(v).assign(1.0) * TestFunction(v) * dx)
    tensor = assembler.allocate()
    (loop,) = assembler.parloops(tensor)
    expected = assembler.assemble(tensor=tensor).dat.data_ro.copy()
    for _ in range(2):
        with attach() as found:
            assembler.assemble(tensor=tensor)
            found.all_lowered()
            plan = plan_for(loop, found.backend._importers)
            bound = [weakref.ref(b) for _, b, _ in plan.bindings.values()]
            assert len(bound) == 1
        gc.collect()
        assert (plan.bindings, plan.schedules) == ({}, {})
        assert bound[0]() is None
        np.testing.assert_allclose(tensor.dat.data_ro, expected, rtol=1e-14)


def test_new_dats_are_aligned(attach: Any) -> None:
    with attach():
        for n in range(1, 6):
            assert Function(space(n)).dat.data_ro.ctypes.data % 64 == 0


def test_a_kernel_in_c_falls_back_with_one_line(attach: Any, caplog: Any) -> None:
    coarse, fine = MeshHierarchy(UnitSquareMesh(2, 2), 1)
    source, target = (
        Function(FunctionSpace(coarse, "CG", 1)),
        Function(FunctionSpace(fine, "CG", 1)),
    )
    source.assign(3.0)
    with caplog.at_level(logging.WARNING, "pyop3_mlir"), attach() as found:
        prolong(source, target)
        prolong(source, target)
    np.testing.assert_allclose(target.dat.data_ro, 3.0)
    (entry,) = (e for e in found.entries().values() if "prolong" in e.name)
    assert (entry.calls, entry.lowered) == (2, 0)
    assert "C code" in entry.reason
    assert sum("prolong" in r.message for r in caplog.records) == 1


def test_matrices_that_are_never_assembled_fall_back(attach: Any) -> None:
    """MATIS: a matrix for each process's part of the mesh."""
    v = space()
    form = inner(grad(TrialFunction(v)), grad(TestFunction(v))) * dx
    x = assemble(form).M.handle.createVecRight()
    x.setRandom()
    expected = assemble(form).M.handle * x
    with attach() as found:
        result = assemble(form, mat_type="is").M.handle * x
    np.testing.assert_allclose(result.array_r, expected.array_r, atol=1e-13)
    (entry,) = found.entries().values()
    assert (entry.calls, entry.lowered) == (1, 0)
    assert "type is" in entry.reason


def test_arguments_that_are_passed_through_fall_back_with_one_line(
    attach: Any, caplog: Any
) -> None:
    """Firedrake's fast diagonalisation hands matrices to C code by their address."""

    def run() -> tuple[int, Any]:
        v = FunctionSpace(UnitSquareMesh(3, 3, quadrilateral=True), "Q", 3)
        u, w, x = TrialFunction(v), TestFunction(v), Function(v)
        load = sin(SpatialCoordinate(v.mesh())[0])
        problem = LinearVariationalProblem(
            inner(grad(u), grad(w)) * dx, load * w * dx, x, DirichletBC(v, 0, "on_boundary")
        )
        parameters = {
            "mat_type": "matfree", "ksp_type": "cg", "ksp_rtol": 1e-10,
            "pc_type": "python", "pc_python_type": "firedrake.FDMPC", "fdm_pc_type": "lu",
        }  # fmt: skip
        solver = LinearVariationalSolver(problem, solver_parameters=parameters)
        solver.solve()
        # again, with matrices at other addresses
        solver.invalidate_jacobian()
        solver.solve()
        return solver.snes.ksp.getIterationNumber(), x.dat.data_ro.copy()

    count, expected = run()
    with caplog.at_level(logging.WARNING, "pyop3_mlir"), attach() as found:
        ours, result = run()
    assert ours == count
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-14)
    passed = [e for e in found.entries().values() if "passed through" in e.reason]
    assert passed
    for entry in passed:
        assert entry.lowered == 0 < entry.calls
        assert sum(f"loop {entry.name} " in r.message for r in caplog.records) == 1
    others = [
        e for e in found.entries().values() if not e.reason.startswith(("argument", "kernel"))
    ]
    assert all(e.lowered == e.calls for e in others)


def test_matrices_that_are_python_code(attach: Any) -> None:
    """Their actions run on the engine: those of forms, and rows and columns of constants."""
    v = space(4)
    whole = v * FunctionSpace(v.mesh(), "R", 0)
    (u, c), (w, d) = TrialFunctions(whole), TestFunctions(whole)
    form = inner(grad(u), grad(w)) * dx + c * w * dx + u * d * dx

    def run() -> list[Any]:
        x = Function(whole)
        load = sin(SpatialCoordinate(v.mesh())[0]) * w * dx
        parameters = {"mat_type": "matfree", "ksp_type": "minres", "ksp_rtol": 1e-12}
        solve(form == load, x, solver_parameters=parameters)
        blocks = assemble(form, mat_type="nest").petscmat
        column, row = blocks.getNestSubMatrix(0, 1), blocks.getNestSubMatrix(1, 0)
        assert {column.getType(), row.getType()} == {"python"}
        one, many = column.createVecRight(), row.createVecRight()
        one.set(3.0)
        many.setArray(np.cos(np.arange(many.size)))
        return [x.dat[0].data_ro.copy(), (column * one).array_r, (row * many).array_r]

    expected = run()
    with attach() as found:
        result = run()
        found.all_lowered()
    for ours, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10 * np.abs(theirs).max())


def test_an_error_of_ours_falls_back(attach: Any, monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("broken on purpose")

    v = space()
    expected = assemble(TestFunction(v) * dx).dat.data_ro.copy()
    monkeypatch.setattr("pyop3_mlir.kernels.loopy.import_loopy", broken)
    monkeypatch.setattr("pyop3_mlir.frontends.tsfc.import_local_kernel", lambda *_: None)
    with attach() as found:
        found.backend._importers.clear()
        fresh = FunctionSpace(UnitSquareMesh(3, 3), "CG", 1)
        result = assemble(Constant(1.0) * TestFunction(fresh) * dx)
    np.testing.assert_array_equal(result.dat.data_ro, expected)
    (entry,) = found.entries().values()
    assert entry.lowered == 0
    assert "ZeroDivisionError" in entry.reason


def test_a_wrong_result_is_found(attach: Any, monkeypatch: Any) -> None:
    original = engine.BoundLoop.__call__

    def wrong(self: Any, *args: Any) -> None:
        original(self, *args)
        for argument in self.parloop.arguments:
            if argument.access.writes:
                argument.buffer[0] *= 1 + 1e-9

    monkeypatch.setattr(engine.BoundLoop, "__call__", wrong)
    with attach(verify=True), pytest.raises(dropin.VerificationError, match="entry 0"):
        assemble(TestFunction(space()) * dx)


@pytest.mark.usefixtures("cache_dir")
def test_constants_and_functions_change_without_compiling(attach: Any) -> None:
    v = space()
    k, f = Constant(1.0), Function(v).assign(1.0)
    form = get_assembler(k * f * TestFunction(v) * dx)
    with attach() as found:
        first = form.assemble().dat.data_ro.sum()
        before = compilations()
        for step in range(2, 6):
            k.assign(step)
            f.assign(step)
            assert form.assemble().dat.data_ro.sum() == pytest.approx(step * step * first)
        found.all_lowered()
    assert compilations() == before


def test_assembly_adds_up_or_starts_anew(attach: Any) -> None:
    v = space()
    u, w = TrialFunction(v), TestFunction(v)
    with attach() as found:
        vector = get_assembler(w * dx, needs_zeroing=False)
        tensor = assemble(w * dx)
        once = tensor.dat.data_ro.copy()
        vector.assemble(tensor=tensor)
        np.testing.assert_allclose(tensor.dat.data_ro, 2 * once)
        form = inner(grad(u), grad(w)) * dx
        matrix = assemble(form)
        values = matrix.M.handle.getValuesCSR()[2].copy()
        assemble(form, tensor=matrix)
        np.testing.assert_array_equal(matrix.M.handle.getValuesCSR()[2], values)
        get_assembler(form, needs_zeroing=False).assemble(tensor=matrix)
        np.testing.assert_allclose(matrix.M.handle.getValuesCSR()[2], 2 * values, atol=1e-15)
        found.all_lowered()


def test_matrices_are_planned_once(attach: Any, monkeypatch: Any) -> None:
    from pyop3_mlir.frontends import pyop2 as reader

    v = space()
    form = inner(grad(TrialFunction(v)), grad(TestFunction(v))) * dx
    planned = []
    original = reader._find_positions
    monkeypatch.setattr(reader, "_find_positions", lambda *a: planned.append(1) or original(*a))
    with attach():
        matrix = assemble(form)
        for _ in range(3):
            assemble(form, tensor=matrix)
        assemble(form)
        assert len(planned) == 1
        assemble(form, bcs=DirichletBC(v, 0, 1))
        assert len(planned) == 2


def test_petsc_notices_that_a_matrix_changed(attach: Any) -> None:
    v = space()
    k = Constant(1.0)
    form = get_assembler(k * TrialFunction(v) * TestFunction(v) * dx)
    with attach() as found:
        matrix = form.assemble()
        norm, state = matrix.M.handle.norm(), matrix.M.handle.stateGet()
        k.assign(2.0)
        form.assemble(tensor=matrix)
        found.all_lowered()
    assert matrix.M.handle.stateGet() > state
    assert matrix.M.handle.norm() == pytest.approx(2 * norm)


def test_views_that_a_user_holds_see_the_update(attach: Any) -> None:
    v = space()
    f = Function(v)
    view = f.dat.data_ro
    version = f.dat.dat_version
    with attach() as found:
        f.interpolate(Constant(2.0) * SpatialCoordinate(v.mesh())[0])
        found.all_lowered()
    assert view.max() == pytest.approx(2.0)
    assert f.dat.dat_version > version
    assert not f.dat.halo_valid


def test_direct_loops_keep_what_they_do_not_write(attach: Any) -> None:
    points = op2.Set(7, "points")
    two = op2.Dat(op2.DataSet(points, 2), np.arange(14.0), np.float64)
    one = op2.Dat(op2.DataSet(points, 1), np.arange(7.0) + 1, np.float64)

    def kernel(code: str) -> Any:
        return op2.Kernel(loopy_unit(code, x=2, y=1), "k")

    with attach() as found:
        op2.par_loop(kernel("x[1] = 10*y[0]"), points, two(op2.WRITE), one(op2.READ))
        np.testing.assert_array_equal(two.data_ro[:, 0], np.arange(0, 14, 2))
        np.testing.assert_array_equal(two.data_ro[:, 1], 10 * (np.arange(7) + 1))
        op2.par_loop(kernel("x[0] = x[0] + y[0]"), points, two(op2.INC), one(op2.READ))
        np.testing.assert_array_equal(two.data_ro[:, 0], np.arange(0, 14, 2) + np.arange(7) + 1)
        found.all_lowered()


def loopy_unit(code: str, **sizes: int) -> Any:
    """A kernel written by hand, and the sizes of its arguments."""
    import loopy as lp

    arguments = [lp.GlobalArg(name, np.float64, shape=(n,)) for name, n in sizes.items()]
    options = {"name": "k", "target": lp.CTarget(), "lang_version": (2018, 2)}
    return lp.make_function("{:}", code, arguments, **options)


@pytest.mark.parametrize("strategy", ["colour", "segmented", "atomic"])
def test_a_strategy_that_cannot_run_a_loop_leaves_it_to_another(strategy: str, attach: Any) -> None:
    points = op2.Set(7, "points")
    x = op2.Dat(points, np.arange(7.0), np.float64)
    with attach(strategy=strategy) as found:
        op2.par_loop(op2.Kernel(loopy_unit("x[0] = 2*x[0]", x=1), "k"), points, x(op2.RW))
        found.all_lowered()
    np.testing.assert_array_equal(x.data_ro, 2 * np.arange(7.0))
    (entry,) = found.entries().values()
    assert entry.strategy.startswith("in_order")


def test_report_entries(attach: Any) -> None:
    v = space()
    with attach() as found:
        for _ in range(3):
            assemble(TestFunction(v) * dx)
    (entry,) = found.entries().values()
    line = entry.as_dict()
    assert line["calls"] == line["lowered"] == 3
    assert line["strategy"]
    assert line["seconds"] > 0


def p_laplacian() -> tuple[Any, Any, Any]:
    """Residual, unknown and boundary conditions, for p = 3."""
    v = space(4)
    u, w = Function(v), TestFunction(v)
    u.interpolate(sin(SpatialCoordinate(v.mesh())[0]))
    weight = (1e-4 + inner(grad(u), grad(u))) ** 0.5
    return weight * inner(grad(u), grad(w)) * dx - w * dx, u, DirichletBC(v, 0, "on_boundary")


def neo_hookean() -> tuple[Any, Any, Any]:
    """A square that is pulled to one and a half times its width."""
    v = VectorFunctionSpace(UnitSquareMesh(3, 3), "CG", 1)
    u = Function(v)
    gradient = Identity(2) + grad(u)
    stretch = ln(det(gradient))
    energy = 0.5 * (tr(gradient.T * gradient) - 2 - 2 * stretch) + stretch**2
    fixed = [DirichletBC(v, (0, 0), 1), DirichletBC(v, (0.5, 0), 2)]
    return derivative(energy * dx, u), u, fixed


@pytest.mark.parametrize("problem", [p_laplacian, neo_hookean])
def test_equal_newton_iterations(problem: Any, attach: Any) -> None:
    def run() -> tuple[int, Any]:
        solver = NonlinearVariationalSolver(
            NonlinearVariationalProblem(*problem()),
            solver_parameters={"ksp_type": "preonly", "pc_type": "lu", "snes_rtol": 1e-9},
        )
        solver.solve()
        return solver.snes.getIterationNumber(), solver._problem.u.dat.data_ro.copy()

    count, expected = run()
    assert count > 3
    with attach() as found:
        ours, result = run()
        found.all_lowered()
    assert ours == count
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)


def test_linear_solve(attach: Any) -> None:
    v = space(4, 2)
    u, w, f = TrialFunction(v), TestFunction(v), Function(v).assign(1.0)
    parameters = {"ksp_type": "cg", "pc_type": "jacobi", "ksp_rtol": 1e-10}
    results = []
    for on in (False, True):
        x = Function(v)
        problem = (inner(grad(u), grad(w)) * dx == f * w * dx, x, DirichletBC(v, 0, 1))
        if on:
            with attach() as found:
                solve(*problem, solver_parameters=parameters)
                found.all_lowered()
        else:
            solve(*problem, solver_parameters=parameters)
        results.append(x.dat.data_ro.copy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-8, atol=1e-11)


def test_loops_that_are_dropped_leave_nothing(attach: Any) -> None:
    v = space()
    form = get_assembler(Function(v).assign(1.0) * TestFunction(v) * dx)
    with attach() as found:
        for _ in range(20):
            form.assemble()
        (parloop,) = form.parloops(form.allocate())
        plan = plan_for(parloop, found.backend._importers)
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(300):
            form.assemble()
        gc.collect()
        assert len(plan.bindings) <= 3
        assert len(gc.get_objects()) - before < 300


@pytest.mark.skipif(not STATM.exists(), reason="the system does not say how much memory is in use")
def test_ten_thousand_loops_hold_memory_steady(attach: Any) -> None:
    """Each loop is built, has data of its own, runs once, and is dropped."""
    v = space(2)
    u, w = TrialFunction(v), TestFunction(v)
    kernel = op2.Kernel(loopy_unit("x[0] = x[0] + 1\nx[2] = x[2] + 1", x=3), "k")

    def vector() -> None:
        op2.par_loop(kernel, v.mesh().cell_set, Function(v).dat(op2.INC, v.cell_node_map()))

    def build(count: int) -> None:
        for number in range(count):
            vector()
            if number % 20 == 0:
                get_assembler(u * w * dx).assemble()
                assemble(Function(v) * dx)
        gc.collect()

    with attach() as found:
        build(1500)
        before, objects = resident(), len(gc.get_objects())
        build(8500)
        found.all_lowered()
        assert sum(entry.calls for entry in found.entries().values()) >= 10_000
        assert len(gc.get_objects()) - objects < 300
        # a loop that stayed would take more than a kilobyte
        assert resident() - before < 4e6


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_op2_arithmetic(attach: Any) -> None:
    """PyOP2's own loops over rows, which Firedrake uses for sums and products."""
    with attach() as found:
        points = op2.Set(5, "points")
        a = op2.Dat(points, np.arange(5.0), np.float64)
        b = op2.Dat(points, np.ones(5), np.float64)
        np.testing.assert_array_equal((a + b).data_ro, np.arange(5.0) + 1)
        a *= 2.0
        np.testing.assert_array_equal(a.data_ro, 2 * np.arange(5.0))
        found.all_lowered()


def test_accesses_are_pyop2s() -> None:
    assert {READ.name, WRITE.name} == {"READ", "WRITE"}

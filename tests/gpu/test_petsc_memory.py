"""Loops on PETSc's memory on a GPU: nothing is copied, and PETSc knows what was done.

Needs a GPU and a PETSc that was built for it; ``ci/gpu/petsc_cuda.sh`` builds one and runs these.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("petsc4py") is None:
    pytest.skip("needs petsc4py", allow_module_level=True)

from builder import KernelBuilder, dims_of, entry
from meshes import random_map
from petsc4py import PETSc

from pyop3_mlir import engine
from pyop3_mlir.errors import DeviceError, UnsupportedLoopError
from pyop3_mlir.frontends.petsc_device import CooMatrix, CooPlan, VecMemory, obstacle
from pyop3_mlir.kernels.program import Op
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import INC, READ, RW, Argument, IndexTable, IterationSet, Parloop
from pyop3_mlir.runtime.devices import get_device
from pyop3_mlir.runtime.residency import traffic

REASONS = {kind: obstacle(kind) for kind in ("cuda", "hip")}
KINDS = [kind for kind, reason in REASONS.items() if reason is None]
if not KINDS:
    pytest.skip("; ".join(map(str, REASONS.values())), allow_module_level=True)

CELLS, NODES = 5000, 900
ON_HOST, ON_DEVICE, ON_BOTH = 1, 2, 3
MATRICES = {"cuda": "aijcusparse", "hip": "aijhipsparse"}


@pytest.fixture(scope="module", params=KINDS)
def device(request):
    try:
        return get_device(request.param)
    except DeviceError as error:
        pytest.skip(str(error))


def kind(device):
    return device.spec.partition(":")[0]


def vector(device, values):
    vec = PETSc.Vec().create(comm=PETSc.COMM_SELF)
    vec.setSizes(len(values))
    vec.setType(kind(device))
    vec.setArray(values)
    return vec


def doubling(y, x, table):
    """``y[table] += 2 x[table]``."""
    k = KernelBuilder("doubling")
    a, b = k.argument(3), k.argument(3)
    (i,) = dims_of((3,))
    k.store(a, (i,), Op("add", entry(b, i), entry(b, i)))
    return Parloop(
        k.kernel(),
        IterationSet(len(table.values)),
        [Argument.indirect(y, INC, table, "y"), Argument.indirect(x, READ, table, "x")],
    )


def giving(matrix, rows, values):
    """The loop that gives element matrices to a matrix."""
    size = values.shape[1] * values.shape[2]
    k = KernelBuilder("giving")
    a, m = k.argument(size), k.argument(size)
    (i,) = dims_of((size,))
    k.store(a, (i,), entry(m, i))
    table = IndexTable(rows, int(rows.max()) + 1, allow_negative=True)
    flat = np.ascontiguousarray(values.reshape(len(values), size))
    return Parloop(
        k.kernel(),
        IterationSet(len(values)),
        [matrix.argument(0, table), Argument.direct(flat, READ)],
    )


strategies = pytest.mark.parametrize("strategy", ["colour", "segmented", "atomic"])


@strategies
def test_a_loop_works_on_petscs_memory(device, strategy):
    values = random_map(CELLS, 3, NODES, 1)
    table = IndexTable(values, NODES)
    start = np.random.default_rng(2).integers(-9, 9, NODES).astype(float)
    x, y = vector(device, start), vector(device, np.zeros(NODES))
    memories = VecMemory(y, device), VecMemory(x, device)
    loop = engine.compile(doubling(*(m.array for m in memories), table), device, Schedule(strategy))
    before = traffic(device.spec)
    for _ in range(2):
        with memories[0].using(INC), memories[1].using(READ):
            loop()
    assert traffic(device.spec) == before, "neither vector is copied"
    assert y.getOffloadMask() == ON_DEVICE
    assert x.getOffloadMask() == ON_BOTH
    expected = np.zeros(NODES)
    np.add.at(expected, values, 4 * start[values])
    assert y.norm(PETSc.NormType.INFINITY) == np.abs(expected).max()
    np.testing.assert_array_equal(y.getArray(readonly=True), expected)
    assert not any(m.array.any() for m in memories), "what stands for them is not looked into"


def test_what_the_host_wrote_is_on_the_device(device):
    table = IndexTable(np.arange(NODES * 3).reshape(-1, 3) % NODES, NODES)
    x, y = vector(device, np.ones(NODES)), vector(device, np.zeros(NODES))
    memories = VecMemory(y, device), VecMemory(x, device)
    loop = engine.compile(
        doubling(*(m.array for m in memories), table), device, Schedule("segmented")
    )
    x.getArray()[:] = 5.0
    assert x.getOffloadMask() == ON_HOST
    with memories[0].using(RW), memories[1].using(READ):
        loop()
    np.testing.assert_array_equal(y.getArray(readonly=True), 30.0)


def test_loops_and_petsc_wait_for_each_other(device):
    """Neither sees the other's work half done, on vectors that take a while."""
    size = 3 << 20
    table = IndexTable(np.arange(size, dtype=np.int32).reshape(-1, 3), size)
    x, y = vector(device, np.ones(size)), vector(device, np.zeros(size))
    memories = VecMemory(y, device), VecMemory(x, device)
    loop = engine.compile(
        doubling(*(m.array for m in memories), table), device, Schedule("segmented")
    )
    expected, factor = 0.0, 1.0
    for _ in range(20):
        # PETSc's kernels are only launched here
        for _ in range(10):
            x.scale(2.0)
            factor *= 2.0
        x.scale(1 / 1024)
        factor /= 1024
        with memories[0].using(INC), memories[1].using(READ):
            loop()
        expected += 2 * factor
        y.scale(0.5)
        expected /= 2
    assert y.min()[1] == y.max()[1] == expected


def test_state_and_cached_norms(device):
    vec = vector(device, np.ones(4))
    memory = VecMemory(vec, device)
    state = vec.stateGet()
    with memory.using(READ):
        pass
    assert vec.stateGet() == state
    with memory.using(RW):
        pass
    assert vec.stateGet() > state
    assert vec.getOffloadMask() == ON_DEVICE


def test_vectors_that_are_elsewhere_are_refused(device):
    with pytest.raises(UnsupportedLoopError, match="type seq is on cpu"):
        VecMemory(PETSc.Vec().createSeq(3), device)
    vec = vector(device, np.zeros(3))
    with pytest.raises(UnsupportedLoopError, match=f"is on {kind(device)}, the loop runs on cpu"):
        VecMemory(vec, get_device("cpu"))
    vec.bindToCPU(True)
    with pytest.raises(UnsupportedLoopError, match="PETSc works on a vector of type"):
        VecMemory(vec, device)


def test_vectors_of_several_processes_types(device):
    """As many processes as run this; the local part alone is shared."""
    vec = PETSc.Vec().create(comm=PETSc.COMM_WORLD)
    vec.setSizes((6, None))
    vec.setType("mpi" + kind(device))
    vec.set(1.0)
    memory = VecMemory(vec, device)
    table = IndexTable(np.arange(6).reshape(2, 3), 6)
    with memory.using(RW):
        engine.compile(
            doubling(memory.array, np.full(6, 4.0), table), device, Schedule("segmented")
        )()
    assert vec.sum() == 9.0 * vec.getSize()


def empty(device, size):
    mat = PETSc.Mat().create(comm=PETSc.COMM_SELF)
    mat.setSizes((size, size))
    mat.setType(MATRICES[kind(device)])
    return mat


def by_set_values(size, rows, values):
    mat = PETSc.Mat().createAIJ((size, size), comm=PETSc.COMM_SELF)
    mat.setUp()
    mat.setOption(PETSc.Mat.Option.NEW_NONZERO_ALLOCATION_ERR, False)
    for i, v in zip(rows.astype(PETSc.IntType), values, strict=True):
        mat.setValues(i, i, v, addv=True)
    mat.assemble()
    return mat


@strategies
def test_a_matrix_is_assembled_on_the_device(device, strategy):
    size = 60
    rows = random_map(200, 3, size, 3, negative=0.1)
    values = np.random.default_rng(4).integers(-8, 8, (200, 3, 3)).astype(float)
    matrix = CooMatrix(empty(device, size), [(rows, rows)], device)
    loop = engine.compile(giving(matrix, rows, values), device, Schedule(strategy))
    expected = by_set_values(size, rows, values)
    for _ in range(3):
        matrix.open()
        loop()
        matrix.close(insert=True)
        x, y = vector(device, np.arange(float(size))), vector(device, np.zeros(size))
        matrix.mat.mult(x, y)
        assert y.getOffloadMask() == ON_DEVICE, "the product is made on the device"
        reference = PETSc.Vec().createSeq(size)
        expected.mult(PETSc.Vec().createWithArray(np.arange(float(size))), reference)
        np.testing.assert_array_equal(y.getArray(readonly=True), reference.getArray())
    everywhere = np.arange(size, dtype=PETSc.IntType)
    np.testing.assert_array_equal(
        matrix.mat.getValues(everywhere, everywhere), expected.getValues(everywhere, everywhere)
    )


def test_a_solver_works_on_what_was_assembled(device):
    """A chain of springs: matrix and right-hand side never visit the host."""
    size = 400
    rows = np.stack([np.arange(size - 1), np.arange(1, size)], axis=1)
    values = np.tile(np.array([[1.0, -1.0], [-1.0, 1.0]]), (size - 1, 1, 1))
    values[0, 0, 0] += 1.0
    diagonal = np.arange(size, dtype=PETSc.IntType)
    matrix = CooMatrix(empty(device, size), [(rows, rows)], device, CooPlan(diagonal, diagonal))
    loop = engine.compile(giving(matrix, rows, values), device, Schedule("segmented"))
    before = traffic(device.spec).to_host
    matrix.open()
    loop()
    matrix.close()
    assert traffic(device.spec).to_host == before
    right, found = vector(device, np.ones(size)), vector(device, np.zeros(size))
    solver = PETSc.KSP().create(comm=PETSc.COMM_SELF)
    solver.setOperators(matrix.mat)
    solver.setType("cg")
    solver.getPC().setType("jacobi")
    solver.setTolerances(rtol=1e-12, max_it=2 * size)
    solver.solve(right, found)
    assert solver.getConvergedReason() > 0
    assert found.getOffloadMask() == ON_DEVICE
    dense = by_set_values(size, rows, values).convert("dense").getDenseArray()
    expected = np.linalg.solve(dense, np.ones(size))
    error = np.abs(found.getArray(readonly=True) - expected).max()
    assert error < 1e-8 * np.abs(expected).max()


def test_firedrake_assembles_on_the_device(device):
    fd = pytest.importorskip("firedrake", reason="needs Firedrake")
    from pyop3_mlir.frontends import dropin
    from pyop3_mlir.options import Options

    def form():
        mesh = fd.UnitSquareMesh(20, 20)
        space = fd.FunctionSpace(mesh, "CG", 2)
        f = fd.Function(space)
        f.dat.data[:] = np.linspace(-1, 1, f.dat.data_ro.size)
        v = fd.TestFunction(space)
        return f * v * fd.dx + fd.inner(fd.grad(f), fd.grad(v)) * fd.dx

    expected = fd.assemble(form()).dat.data_ro.copy()
    backend = dropin.attach(Options.resolve(device=device.spec, tune="off"))
    try:
        # what is made from here on lives on the device
        ours = form()
        result = fd.assemble(ours)
        fd.assemble(ours, tensor=result)
        assert result.dat._vec.getType() == "seq" + kind(device)
        assert result.dat._vec.getOffloadMask() == ON_DEVICE
        found = result.dat.data_ro
        assert np.abs(found - expected).max() < 1e-12 * np.abs(expected).max()
        assert all(entry.lowered == entry.calls for entry in backend.entries.values())
    finally:
        dropin.detach(backend)

"""PETSc's vectors and matrices as memory of loops, by the code that devices take, on the host.

PETSc's own functions are the reference: ``setValues`` for matrices, arrays for vectors. What needs
a PETSc with CUDA is in ``tests/gpu``.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

pytest.importorskip("petsc4py", reason="needs petsc4py")

from builder import KernelBuilder, dims_of, entry
from meshes import random_map
from petsc4py import PETSc

from pyop3_mlir import engine
from pyop3_mlir.errors import DeviceError, UnsupportedLoopError
from pyop3_mlir.frontends.petsc import library
from pyop3_mlir.frontends.petsc_device import (
    CooMatrix,
    CooPlan,
    VecMemory,
    _address_of,
    _Exporter,
    kind_of_matrix,
    kind_of_vector,
    obstacle,
    plan_coo,
    wait_for_petsc,
)
from pyop3_mlir.kernels.program import Op
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import (
    INC,
    READ,
    RW,
    WRITE,
    Argument,
    IndexTable,
    IterationSet,
    Parloop,
)
from pyop3_mlir.runtime.devices import get_device, offline_device
from pyop3_mlir.runtime.executable import Buffer, aligned_empty

CELLS, NODES = 60, 25
SCALAR = np.dtype(PETSc.ScalarType)


@pytest.fixture(scope="module")
def cpu():
    return get_device("cpu")


def vector(values):
    """A sequential vector with these entries."""
    vec = PETSc.Vec().createSeq(len(values))
    vec.setArray(values)
    return vec


def doubling(y, x, table):
    """``y[table] += 2 x[table]``."""
    k = KernelBuilder("doubling", dtype=SCALAR) if SCALAR.kind == "c" else KernelBuilder("doubling")
    a, b = k.argument(3), k.argument(3)
    (i,) = dims_of((3,))
    k.store(a, (i,), Op("add", entry(b, i), entry(b, i)))
    return Parloop(
        k.kernel(),
        IterationSet(len(table.values)),
        [Argument.indirect(y, INC, table, "y"), Argument.indirect(x, READ, table, "x")],
    )


# -- vectors --------------------------------------------------------------------------------------


def test_a_loop_works_on_the_vectors_own_memory(cpu):
    table = IndexTable(random_map(CELLS, 3, NODES, 1), NODES)
    start = np.random.default_rng(2).integers(-9, 9, NODES).astype(SCALAR)
    x, y = vector(start), vector(np.zeros(NODES))
    memories = [VecMemory(v, cpu) for v in (y, x)]
    loop = engine.compile(doubling(*(m.array for m in memories), table), cpu, Schedule())
    for _ in range(2):
        with memories[0].using(INC), memories[1].using(READ):
            loop()
    expected = np.zeros(NODES, SCALAR)
    np.add.at(expected, table.values, 4 * start[table.values])
    np.testing.assert_array_equal(y.getArray(readonly=True), expected)
    assert y.norm() == pytest.approx(np.linalg.norm(expected), rel=1e-14)


@pytest.mark.parametrize(
    ("access", "changes"), [(READ, False), (WRITE, True), (INC, True), (RW, True)]
)
def test_the_state_of_a_vector_changes_where_it_is_written(cpu, access, changes):
    """PETSc's norms are cached by state."""
    vec = vector(np.arange(5.0))
    memory = VecMemory(vec, cpu)
    before = vec.stateGet()
    with memory.using(access):
        pass
    assert (vec.stateGet() > before) == changes
    assert vec.getOffloadMask() == 1, "the host's copy is the fresh one"


def test_cached_norms_are_not_used_after_a_loop(cpu):
    vec = vector(np.ones(4))
    memory = VecMemory(vec, cpu)
    assert vec.norm() == 2.0
    with memory.using(RW):
        memory.array[...] = 2.0
    assert vec.norm() == 4.0


def test_an_empty_vector(cpu):
    memory = VecMemory(PETSc.Vec().createSeq(0), cpu)
    with memory.using(RW):
        assert memory.array.shape == (0,)


def test_memory_that_has_moved_is_noticed(cpu):
    vec = vector(np.arange(6.0))
    memory = VecMemory(vec, cpu)
    assert memory.current()
    elsewhere = np.zeros(6, SCALAR)
    vec.placeArray(elsewhere)
    assert not memory.current()
    vec.resetArray()
    assert memory.current()


def test_a_vector_that_is_locked_is_refused_by_petsc(cpu):
    vec = vector(np.arange(6.0))
    memory = VecMemory(vec, cpu)
    handle = ctypes.c_void_p(vec.handle)
    library().VecLockReadPush(handle)
    try:
        with memory.using(READ):
            pass
        with pytest.raises(DeviceError, match="PETSc error 73 in VecGetArrayAndMemType"):
            memory.acquire(RW)
    finally:
        library().VecLockReadPop(handle)


def test_a_vector_elsewhere_is_refused_with_the_reason():
    device = offline_device("cuda", "sm_80")
    with pytest.raises(UnsupportedLoopError, match="type seq is on cpu, the loop runs on"):
        VecMemory(vector(np.zeros(3)), device)


@pytest.mark.parametrize(
    ("type_", "kind"),
    [("seq", "cpu"), ("mpi", "cpu"), ("seqcuda", "cuda"), ("mpicuda", "cuda"), ("seqhip", "hip")],
)
def test_kinds_of_vectors(type_, kind):
    class Vec:
        def getType(self):  # noqa: N802
            return type_

    assert kind_of_vector(Vec()) == kind


@pytest.mark.parametrize(
    ("type_", "kind"),
    [("seqaij", "cpu"), ("seqaijcusparse", "cuda"), ("mpiaijhipsparse", "hip"), ("mpiaij", "cpu")],
)
def test_kinds_of_matrices(type_, kind):
    class Mat:
        def getType(self):  # noqa: N802
            return type_

    assert kind_of_matrix(Mat()) == kind


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_a_petsc_without_the_package_says_so(kind):
    if PETSc.Sys.hasExternalPackage(kind):
        assert obstacle(kind) is None
    else:
        assert obstacle(kind) == f"PETSc was built without {kind} (configure it --with-{kind})"
    assert obstacle("cpu") is None
    assert "no vectors on vulkan" in obstacle("vulkan")


def test_petsc_without_the_package_refuses_its_vectors():
    """What the refusals above spare the user."""
    if PETSc.Sys.hasExternalPackage("cuda"):
        pytest.skip("this PETSc has CUDA")
    with pytest.raises((PETSc.Error, AttributeError)):
        vector(np.zeros(3)).getCUDAHandle("r")


def test_nothing_is_waited_for_on_the_host(cpu):
    wait_for_petsc(cpu)


def test_an_address_becomes_memory_of_the_device_and_back(cpu):
    """As it is done with a pointer to a GPU's memory."""
    array = aligned_empty(8)
    array[...] = np.arange(8.0)
    exporter = _Exporter(array.ctypes.data, array.size, array.dtype, cpu)
    shared = Buffer.from_dlpack(exporter, cpu)
    assert shared.zero_copy
    assert shared.view.shape == [8]
    assert _address_of(shared.view, cpu) == array.ctypes.data


# -- matrices -------------------------------------------------------------------------------------


def element_matrices(rng, cells, rows, cols):
    return rng.integers(-8, 8, (cells, rows, cols)).astype(SCALAR)


def by_set_values(shape, parts, mode=PETSc.InsertMode.ADD_VALUES):
    """The matrix as PETSc's ``setValues`` assembles it."""
    mat = PETSc.Mat().createAIJ(shape, comm=PETSc.COMM_SELF)
    mat.setUp()
    mat.setOption(PETSc.Mat.Option.NEW_NONZERO_ALLOCATION_ERR, False)
    for rows, cols, values in parts:
        for i, j, v in zip(rows, cols, values, strict=True):
            mat.setValues(i.astype(PETSc.IntType), j.astype(PETSc.IntType), v, addv=mode)
    mat.assemble()
    return mat


def empty(shape):
    mat = PETSc.Mat().create(comm=PETSc.COMM_SELF)
    mat.setSizes(shape)
    mat.setType("aij")
    return mat


def same(found, expected):
    """Equal as matrices: entries that are zero may be there or not."""
    m, n = expected.getSize()
    everywhere = np.arange(m, dtype=PETSc.IntType), np.arange(n, dtype=PETSc.IntType)
    np.testing.assert_array_equal(found.getValues(*everywhere), expected.getValues(*everywhere))


def scaling(size):
    """``A_cell += m_cell``."""
    k = KernelBuilder("scaling")
    a, m = k.argument(size), k.argument(size)
    (i,) = dims_of((size,))
    k.store(a, (i,), entry(m, i))
    return k.kernel()


def giving(matrix, number, rows, values):
    """The loop that gives element matrices to a matrix."""
    size = values.shape[1] * values.shape[2]
    table = IndexTable(rows, int(rows.max()) + 1, allow_negative=True)
    return Parloop(
        scaling(size),
        IterationSet(len(values)),
        [
            matrix.argument(number, table),
            Argument.direct(np.ascontiguousarray(values.reshape(len(values), size)), READ),
        ],
    )


@pytest.mark.parametrize("negative", [0.0, 0.3], ids=["all", "boundary"])
def test_a_matrix_is_that_of_set_values(cpu, negative):
    """Boundary conditions leave -1, in rows and in columns."""
    rows = random_map(CELLS, 3, NODES, 1, negative=negative)
    cols = random_map(CELLS, 4, NODES + 3, 2, negative=negative)
    values = element_matrices(np.random.default_rng(3), CELLS, 3, 4)
    matrix = CooMatrix(empty((NODES, NODES + 3)), [(rows, cols)], cpu)
    matrix.open()
    engine.compile(giving(matrix, 0, rows, values), cpu, Schedule())()
    matrix.close()
    same(matrix.mat, by_set_values((NODES, NODES + 3), [(rows, cols, values)]))


def test_the_pattern_is_that_of_set_values(cpu):
    rows = random_map(CELLS, 3, NODES, 4, negative=0.2)
    matrix = CooMatrix(empty((NODES, NODES)), [(rows, rows)], cpu)
    matrix.close()
    expected = by_set_values((NODES, NODES), [(rows, rows, np.ones((CELLS, 3, 3)))])
    for found, wanted in zip(matrix.mat.getRowIJ(), expected.getRowIJ(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_entries_that_occur_more_than_once_are_numbered_once():
    rows = np.array([[0, 1], [1, 0], [1, -1]])
    plan, (positions,) = plan_coo([(rows, rows)])
    assert plan.rows.tolist() == [0, 0, 1, 1]
    assert plan.cols.tolist() == [0, 1, 0, 1]
    expected = [[0, 1, 2, 3], [3, 2, 1, 0], [3, -1, -1, -1]]
    np.testing.assert_array_equal(positions.values, expected)


def test_several_loops_and_several_assemblies(cpu):
    """Cells and facets, say; PETSc adds, and the values of one assembly do not reach the next."""
    rng = np.random.default_rng(5)
    tables = [random_map(CELLS, 3, NODES, 6), random_map(17, 2, NODES, 7, negative=0.2)]
    given = [element_matrices(rng, len(t), t.shape[1], t.shape[1]) for t in tables]
    matrix = CooMatrix(empty((NODES, NODES)), [(t, t) for t in tables], cpu)
    loops = [
        engine.compile(giving(matrix, n, t, v), cpu, Schedule())
        for n, (t, v) in enumerate(zip(tables, given, strict=True))
    ]
    parts = [(t, t, v) for t, v in zip(tables, given, strict=True)]
    for _ in range(2):
        matrix.mat.zeroEntries()
        matrix.open()
        for loop in loops:
            loop()
        matrix.close()
        same(matrix.mat, by_set_values((NODES, NODES), parts))
    matrix.open()
    loops[0]()
    matrix.close()
    same(matrix.mat, by_set_values((NODES, NODES), [*parts, parts[0]]))


def test_values_are_inserted_where_that_is_asked_for(cpu):
    rows = random_map(CELLS, 3, NODES, 8)
    values = element_matrices(np.random.default_rng(9), CELLS, 3, 3)
    matrix = CooMatrix(empty((NODES, NODES)), [(rows, rows)], cpu)
    loop = engine.compile(giving(matrix, 0, rows, values), cpu, Schedule())
    for _ in range(3):
        matrix.open()
        loop()
        matrix.close(insert=True)
    same(matrix.mat, by_set_values((NODES, NODES), [(rows, rows, values)]))


def test_known_entries_are_in_the_pattern(cpu):
    """The diagonal, which boundary conditions need although no loop gives it."""
    rows = np.array([[0, 1], [1, -1]])
    diagonal = np.arange(4, dtype=PETSc.IntType)
    matrix = CooMatrix(empty((4, 4)), [(rows, rows)], cpu, CooPlan(diagonal, diagonal))
    matrix.close()
    matrix.mat.setValues(3, 3, 1.0)
    matrix.mat.assemble()
    assert matrix.mat.getValue(3, 3) == 1.0
    assert matrix.plan.size == 4 + 2


def test_the_state_of_a_matrix_changes(cpu):
    rows = np.array([[0, 1]])
    matrix = CooMatrix(empty((2, 2)), [(rows, rows)], cpu)
    before = matrix.mat.stateGet()
    matrix.array[...] = 3.0
    matrix.close()
    assert matrix.mat.stateGet() > before
    assert matrix.mat.norm() == 6.0


@pytest.mark.parametrize("type_", ["baij", "dense"])
def test_matrices_of_other_types_are_refused(cpu, type_):
    mat = PETSc.Mat().create(comm=PETSc.COMM_SELF)
    mat.setSizes((4, 4))
    mat.setType(type_)
    with pytest.raises(UnsupportedLoopError, match=f"type seq{type_} has no COO assembly"):
        CooMatrix(mat, [], cpu)


def test_a_matrix_elsewhere_is_refused_with_the_reason():
    with pytest.raises(UnsupportedLoopError, match="type seqaij is on cpu, the loop runs on"):
        CooMatrix(empty((2, 2)), [], offline_device("cuda", "sm_80"))

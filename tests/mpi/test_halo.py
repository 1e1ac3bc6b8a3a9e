"""Loops on plain arrays, distributed by hand: no Firedrake, references from numpy loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("mpi4py", reason="needs MPI")

from pyop3_mlir import halo
from pyop3_mlir.errors import InvalidLoopError
from pyop3_mlir.kernels import elements
from pyop3_mlir.kernels.program import (
    Compute,
    Dim,
    IndexOf,
    KernelArgument,
    Load,
    LocalKernel,
    Op,
    Output,
    Scalar,
    Temporary,
)
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    READ,
    WRITE,
    Argument,
    IndexTable,
    IterationSet,
    Parloop,
)

RANKS = [1, 2, 3, 4]
REAL = np.dtype(np.float64)
WEIGHTS = (1.0, 1.1, 1.2)


def grid(n=3):
    """Points and triangles of an n by n grid, moved a little."""
    x, y = np.meshgrid(np.linspace(0, 1, n + 1), np.linspace(0, 1, n + 1), indexing="ij")
    points = np.stack([x.ravel() + 0.05 * np.sin(7 * y.ravel()), y.ravel()], axis=1)
    corner = (np.arange(n)[:, None] * (n + 1) + np.arange(n)).ravel()
    lower = np.stack([corner, corner + n + 1, corner + n + 2], axis=1)
    upper = np.stack([corner, corner + n + 2, corner + 1], axis=1)
    return points, np.concatenate([lower, upper])


def owners(seed, cells, processes):
    """A random partition; some processes may get no cell."""
    rng = np.random.default_rng(seed)
    return rng.integers(rng.integers(1, processes + 1), size=cells)


def laplace(points, table, u):
    """The residual of a P1 Laplacian, triangle by triangle."""
    result = np.zeros(len(u))
    for a, b, c in table:
        edges = points[[c, a, b]] - points[[b, c, a]]
        area = abs(edges[0, 0] * edges[1, 1] - edges[0, 1] * edges[1, 0]) / 2
        result[[a, b, c]] += edges @ edges.T @ u[[a, b, c]] / (4 * area)
    return result


def options(**settings):
    return Options.resolve(**{"tune": "off", **settings})


def whole(comm, part, values, nodes):
    """Owned values of all processes, by the nodes' numbers in the whole mesh."""
    found = np.full((nodes, *values.shape[1:]), np.nan)
    for numbers, theirs in comm.allgather(
        (part.nodes[: part.halo.owned], values[: part.halo.owned])
    ):
        assert np.isnan(found[numbers]).all()
        found[numbers] = theirs
    return found


class Laplace:
    """A loop on a part of a mesh, to be run on several parts."""

    def __init__(self, comm, points, table, owner, **settings):
        self.part = part = halo.distribute(comm, table, owner)
        self.u = np.zeros(part.halo.size)
        self.result = np.zeros(part.halo.size)
        arguments = [
            Argument.indirect(self.result, INC, part.table, "result"),
            Argument.indirect(np.ascontiguousarray(points[part.nodes]), READ, part.table, "points"),
            Argument.indirect(self.u, READ, part.table, "u"),
        ]
        parloop = Parloop(elements.kernel("laplace", "triangle", 1), part.iteration_set, arguments)
        halos = [part.halo, None, part.halo]
        self.loop = halo.compile(comm, parloop, halos, options=options(**settings))


SEEDS = {2: range(120), 3: range(120, 200)}
"""For each number of processes."""


@pytest.mark.parallel([2, 3])
def test_two_hundred_random_partitions(comm):
    """Against the loop over the whole mesh; ghosts start wrong, and must be made current."""
    points, table = grid()
    u = np.cos(3 * points[:, 0]) + points[:, 1]
    expected = laplace(points, table, u)
    wrong = []
    print(f"seeds {SEEDS[comm.size]}")
    for seed in SEEDS[comm.size]:
        problem = Laplace(comm, points, table, owners(seed, len(table), comm.size))
        problem.u[:] = np.where(
            np.arange(len(problem.u)) < problem.part.halo.owned, u[problem.part.nodes], 1e30
        )
        problem.loop()
        problem.loop()
        found = whole(comm, problem.part, problem.result, len(points))
        if not np.allclose(found, 2 * expected, rtol=1e-12, atol=1e-13):
            wrong.append(seed)
    assert wrong == []


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("strategy", ["in_order", "colour", "segmented"])
def test_strategies(comm, strategy):
    points, table = grid()
    u = np.sin(5 * points[:, 0] * points[:, 1])
    problem = Laplace(comm, points, table, np.arange(len(table)) % comm.size, strategy=strategy)
    problem.u[:] = u[problem.part.nodes]
    problem.loop()
    assert problem.loop.bound.schedule.strategy == strategy
    found = whole(comm, problem.part, problem.result, len(points))
    np.testing.assert_allclose(found, laplace(points, table, u), rtol=1e-12, atol=1e-13)
    assert problem.loop.core + problem.loop.owned > 0
    assert problem.loop.waiting >= 0


def extreme_kernel(name):
    """Each node takes an extreme of what its cells hold, and one number that of all cells."""
    i, one = Dim("i", 3), Dim("one", 1)
    cell = KernelArgument("cell", (1,), REAL)
    node, total = KernelArgument("node", (3,), REAL), KernelArgument("total", (1,), REAL)
    nodes, whole_ = Temporary("nodes", (3,), REAL), Temporary("whole", (1,), REAL)
    value = Load(cell, (Scalar(0),))
    operation = {"MIN": "min", "MAX": "max", "INC": "add"}[name]

    def joined(old):
        return value if name == "INC" else Op(operation, old, value)

    return LocalKernel(
        f"extreme_{name.lower()}",
        (node, total, cell),
        (
            Compute((nodes,), (i,), (), (joined(Load(node, (IndexOf(i),))),)),
            Compute((whole_,), (one,), (), (joined(Load(total, (IndexOf(one),))),)),
        ),
        (
            Output(node, (i,), IndexOf(i), nodes),
            Output(total, (one,), IndexOf(one), whole_),
        ),
    )


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("access", [INC, MIN, MAX], ids=lambda access: access.name)
def test_reductions(comm, access):
    """Of nodes that several processes share, and of a number that enters once."""
    _, table = grid()
    cells = np.sin(40.0 * np.arange(len(table)))
    part = halo.distribute(comm, table, owners(7, len(table), comm.size))
    node, total = np.full(part.halo.size, 0.25), np.full(1, 0.25)
    arguments = [
        Argument.indirect(node, access, part.table, "node"),
        Argument.glob(total, access, "total"),
        Argument.direct(cells[part.cells], READ, "cell"),
    ]
    parloop = Parloop(extreme_kernel(access.name), part.iteration_set, arguments)
    halo.compile(comm, parloop, [part.halo, None, None], options=options())()
    expected = np.full(16, 0.25)
    ufunc = {INC: np.add, MIN: np.minimum, MAX: np.maximum}[access]
    for number, corners in enumerate(table):
        ufunc.at(expected, corners, cells[number])
    np.testing.assert_allclose(whole(comm, part, node, 16), expected, rtol=1e-14)
    assert total[0] == pytest.approx(ufunc.reduce([*cells, 0.25]), rel=1e-13)


@pytest.mark.parallel([2])
def test_on_a_device(comm, vulkan):
    """What has arrived in the host's memory reaches the device, also between the two parts."""
    points, table = grid()
    u = np.sin(5 * points[:, 0])
    problem = Laplace(comm, points, table, owners(3, len(table), comm.size), device=vulkan.spec)
    owned = problem.part.halo.owned
    problem.u[:owned] = u[problem.part.nodes[:owned]]
    problem.u[owned:] = 1e30
    problem.loop()
    problem.u[:owned] *= 2
    problem.loop()
    found = whole(comm, problem.part, problem.result, len(points))
    np.testing.assert_allclose(found, 3 * laplace(points, table, u), atol=1e-13)
    assert comm.allreduce(problem.loop.bound.traffic.to_device) > 0


@pytest.mark.parallel([3])
def test_only_ghosts_one_cell_and_none(comm):
    """The second process has one cell, whose nodes all belong to the first; the third has none."""
    points, table = grid()
    owner = np.zeros(len(table), int)
    owner[4] = 1
    problem = Laplace(comm, points, table, owner)
    assert comm.allgather(len(problem.part.cells)) == [17, 1, 0]
    assert comm.allgather(problem.part.halo.owned) == [16, 0, 0]
    problem.u[:] = points[problem.part.nodes, 0] ** 2
    problem.loop()
    found = whole(comm, problem.part, problem.result, len(points))
    np.testing.assert_allclose(found, laplace(points, table, points[:, 0] ** 2), atol=1e-13)


@pytest.mark.parallel([2])
def test_process_with_ghost_cells_only(comm):
    """It holds copies of all cells, owns none of them, and owns the node that it sums into."""
    table = np.array([[0, 1, 2], [1, 2, 3]], np.int32)
    points = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    own = np.array([[0, 1, 2], [3]][comm.rank])
    numbers = np.concatenate([own, np.setdiff1d(np.arange(4), own)])
    local = np.argsort(numbers).astype(np.int32)
    owner = np.array([0, 0, 0, 1])
    rows = [0] if comm.rank == 0 else [0, 1, 2]
    ghosts = halo.Halo(comm, len(own), owner[numbers[len(own) :]], rows)
    cells = IterationSet(2, core=1 - comm.rank, owned=2 - 2 * comm.rank)
    result, u = np.zeros(4), points[numbers, 0] ** 2
    vertices = IndexTable(local[table], 4)
    arguments = [
        Argument.indirect(result, INC, vertices, "result"),
        Argument.indirect(points[numbers], READ, vertices, "points"),
        Argument.indirect(u, READ, vertices, "u"),
    ]
    parloop = Parloop(elements.kernel("laplace", "triangle", 1), cells, arguments)
    halo.compile(comm, parloop, [ghosts, None, ghosts], options=options())()
    expected = laplace(points, table, points[:, 0] ** 2)
    np.testing.assert_allclose(result[: len(own)], expected[own], atol=1e-14)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.complex128])
def test_rows_of_any_type_and_shape(comm, dtype):
    _, table = grid()
    part = halo.distribute(comm, table, owners(3, len(table), comm.size))
    values = (np.arange(16 * 6).reshape(16, 2, 3) + 1).astype(dtype)
    array = values[part.nodes]
    array[part.halo.owned :] = -1
    part.halo.update(array)
    np.testing.assert_array_equal(array, values[part.nodes])
    array[:] = 1
    part.halo.reduce(array)
    holders = np.zeros(16, int)
    for numbers in comm.allgather(part.nodes):
        holders[numbers] += 1
    np.testing.assert_array_equal(array[:, 1, 2], holders[part.nodes].astype(dtype))


@pytest.mark.parallel([2, 3])
def test_loop_that_one_process_gets_wrong(comm):
    points, table = grid()
    part = halo.distribute(comm, table, np.arange(len(table)) % comm.size)
    # as if there were no ghosts among the core cells
    core = part.iteration_set.size if comm.rank == 1 else part.iteration_set.core
    arguments = [
        Argument.indirect(np.zeros(part.halo.size), INC, part.table, "result"),
        Argument.indirect(points[part.nodes], READ, part.table, "points"),
        Argument.indirect(np.zeros(part.halo.size), READ, part.table, "u"),
    ]
    parloop = Parloop(
        elements.kernel("laplace", "triangle", 1),
        IterationSet(part.iteration_set.size, core=core),
        arguments,
    )
    with pytest.raises(InvalidLoopError, match=r"argument result: a core cell touches a ghost"):
        halo.compile(comm, parloop, [part.halo, None, part.halo], options=options())
    assert comm.allreduce(1) == comm.size


@pytest.mark.parallel([2])
def test_stores_to_ghosts_are_refused(comm):
    _, table = grid(1)
    part = halo.distribute(comm, table, [0, 1])
    i = Dim("i", 3)
    node, cell = KernelArgument("node", (3,), REAL), KernelArgument("cell", (1,), REAL)
    value = Temporary("value", (3,), REAL)
    kernel = LocalKernel(
        "store",
        (node, cell),
        (Compute((value,), (i,), (), (Load(cell, (Scalar(0),)),)),),
        (Output(node, (i,), IndexOf(i), value),),
    )
    arguments = [
        Argument.indirect(np.zeros(part.halo.size), WRITE, part.table, "node"),
        Argument.direct(np.ones(1), READ, "cell"),
    ]
    parloop = Parloop(kernel, part.iteration_set, arguments)
    with pytest.raises(InvalidLoopError, match="a ghost is stored to"):
        halo.compile(comm, parloop, [part.halo, None], options=options())


@pytest.mark.parallel([2, 3])
def test_halo_with_rows_that_do_not_exist(comm):
    owners_, rows = ([0], [5]) if comm.rank == 1 else ([], [])
    with pytest.raises(InvalidLoopError, match="process 1 wants rows 5 to 5 of process 0"):
        halo.Halo(comm, 3, owners_, rows)


@pytest.mark.parallel([3])
def test_part_of_a_communicator(comm):
    """Two processes share a mesh while the third works on its own."""
    points, table = grid()
    own = comm.Split(int(comm.rank == 2))
    problem = Laplace(own, points, table, np.arange(len(table)) % own.size)
    problem.u[:] = points[problem.part.nodes, 1]
    problem.loop()
    found = whole(own, problem.part, problem.result, len(points))
    np.testing.assert_allclose(found, laplace(points, table, points[:, 1]), atol=1e-13)
    own.Free()


@pytest.mark.parallel([1, 2, 3])
def test_example_of_the_documentation(comm, monkeypatch):
    """The flux of grad(x) through the sides of a square, half of each at its ends."""
    monkeypatch.setenv("PYOP3_MLIR_TUNE", "off")
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    names = {}
    exec(compile(example, "parallel.md", "exec"), names)
    found = whole(comm, names["part"], names["result"], 4)
    np.testing.assert_allclose(found, [-0.5, 0.5, 0.5, -0.5], atol=1e-14)

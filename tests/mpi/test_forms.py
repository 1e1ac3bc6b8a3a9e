"""Firedrake's forms on 1 to 4 processes."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("mpi4py", reason="needs MPI")
fd = pytest.importorskip("firedrake", reason="needs Firedrake")

from firedrake import (  # noqa: E402
    Constant,
    DirichletBC,
    FacetNormal,
    Function,
    FunctionSpace,
    SpatialCoordinate,
    TestFunction,
    TestFunctions,
    TrialFunction,
    VectorFunctionSpace,
    as_vector,
    assemble,
    avg,
    conditional,
    cos,
    curl,
    derivative,
    div,
    dot,
    dS,
    ds,
    dx,
    grad,
    inner,
    jump,
    ln,
    split,
    tr,
)
from firedrake import det as determinant  # noqa: E402

RANKS = [1, 2, 3, 4]
STRATEGIES = ["colour", "segmented"]


# Large enough for every process to have more entities than a block, so that all share the modules;
# small parts have tests of their own.
def triangles(comm):
    return fd.UnitSquareMesh(12, 10, comm=comm)


def quadrilaterals(comm):
    return fd.UnitSquareMesh(12, 10, quadrilateral=True, comm=comm)


def tetrahedra(comm):
    return fd.UnitCubeMesh(4, 3, 4, comm=comm)


def hexahedra(comm):
    base = fd.UnitSquareMesh(8, 6, quadrilateral=True, comm=comm)
    return fd.ExtrudedMesh(base, layers=2)


@functools.cache
def field(space):
    """A coefficient, from a formula; not to be changed."""
    x = SpatialCoordinate(space.mesh().unique())
    found = Function(space)
    shape = space.value_shape
    terms = [cos((1.3 + k) * x[0] + 2.1 * x[1] + k) for k in range(int(np.prod(shape, dtype=int)))]
    return found.interpolate(as_vector(terms) if shape else terms[0])


def mass(mesh):
    space = FunctionSpace(mesh, "CG", 1)
    return inner(field(space), TestFunction(space)) * dx


def laplace(mesh, degree=2):
    space = FunctionSpace(mesh, "CG", degree)
    return inner(grad(field(space)), grad(TestFunction(space))) * dx


def elasticity(mesh):
    space = VectorFunctionSpace(mesh, "CG", 1)
    u, v = field(space), TestFunction(space)
    return (inner(grad(u) + grad(u).T, grad(v)) + div(u) * div(v)) * dx


def hyperelastic(mesh):
    space = VectorFunctionSpace(mesh, "CG", 1)
    u = Function(space).assign(0.1 * field(space))
    gradient = fd.Identity(mesh.geometric_dimension) + grad(u)
    j = determinant(gradient)
    energy = (tr(gradient.T * gradient) - 2 - 2 * ln(j) + ln(j) ** 2) * dx
    return derivative(energy, u)


def robin(mesh):
    space = FunctionSpace(mesh, "CG", 2)
    u, v, n = field(space), TestFunction(space), FacetNormal(mesh)
    return inner(dot(grad(u), n) + u, v) * ds + u * v * ds(1)


def upwind(mesh):
    space = FunctionSpace(mesh, "DG", 1)
    q, v, n = field(space), TestFunction(space), FacetNormal(mesh)
    velocity = field(VectorFunctionSpace(mesh, "CG", 1))
    un = 0.5 * (dot(velocity, n) + abs(dot(velocity, n)))
    return (
        -q * div(v * velocity) * dx
        + jump(v) * jump(un * q) * dS
        + conditional(dot(velocity, n) < 0, v * dot(velocity, n), 0) * ds
        + v * un * q * ds
    )


def interior_penalty(mesh):
    space = FunctionSpace(mesh, "DG", 1)
    u, v, n = field(space), TestFunction(space), FacetNormal(mesh)
    return (
        inner(grad(u), grad(v)) * dx
        - inner(avg(grad(u)), jump(v, n)) * dS
        + 4 * inner(jump(u, n), jump(v, n)) * dS
    )


def mixed_poisson(mesh):
    space = FunctionSpace(mesh, "RT", 1) * FunctionSpace(mesh, "DG", 0)
    tau, v = TestFunctions(space)
    w = Function(space)
    w.subfunctions[0].interpolate(as_vector([cos(x) for x in SpatialCoordinate(mesh)]))
    w.subfunctions[1].assign(field(space.sub(1)))
    sigma, u = split(w)
    return (inner(sigma, tau) + u * div(tau) + div(sigma) * v) * dx


def taylor_hood(mesh):
    space = VectorFunctionSpace(mesh, "CG", 2) * FunctionSpace(mesh, "CG", 1)
    v, q = TestFunctions(space)
    w = Function(space)
    w.subfunctions[0].assign(field(space.sub(0)))
    w.subfunctions[1].assign(field(space.sub(1)))
    u, p = split(w)
    return (inner(dot(grad(u), u), v) + inner(grad(u), grad(v)) - p * div(v) - div(u) * q) * dx


def one_part_read(mesh):
    space = VectorFunctionSpace(mesh, "CG", 1) * FunctionSpace(mesh, "CG", 2)
    w = Function(space)
    w.subfunctions[1].assign(field(space.sub(1)))
    _, p = split(w)
    return inner(p, TestFunction(space.sub(1).collapse())) * dx


def curl_curl(mesh):
    space = FunctionSpace(mesh, "N1curl", 1)
    u = Function(space).interpolate(as_vector([cos(x) for x in SpatialCoordinate(mesh)]))
    v = TestFunction(space)
    return (inner(curl(u), curl(v)) + inner(u, v)) * dx


def real_coefficient(mesh):
    real = FunctionSpace(mesh, "R", 0)
    number = Function(real).assign(1.7)
    space = FunctionSpace(mesh, "CG", 1)
    return (
        number * field(space) * TestFunction(space) * dx + Constant(0.3) * TestFunction(space) * ds
    )


def cubes(mesh):
    space = FunctionSpace(mesh, "Q", 1)
    u, v = field(space), TestFunction(space)
    return inner(grad(u), grad(v)) * dx + u * v * fd.ds_t


VECTORS = {
    "mass": (triangles, mass),
    "laplace": (triangles, laplace),
    "laplace on tetrahedra": (tetrahedra, laplace),
    "laplace on quadrilaterals": (quadrilaterals, laplace),
    "elasticity": (triangles, elasticity),
    "hyperelastic": (triangles, hyperelastic),
    "exterior facets": (triangles, robin),
    "upwind": (triangles, upwind),
    "interior penalty": (triangles, interior_penalty),
    "mixed poisson": (triangles, mixed_poisson),
    "taylor-hood": (triangles, taylor_hood),
    "one part read": (triangles, one_part_read),
    "curl-curl": (tetrahedra, curl_curl),
    "real coefficient": (triangles, real_coefficient),
    "extruded hexahedra": (hexahedra, cubes),
}


def assembled(make, **options):
    """What ``check`` takes: prepares a form on a mesh, outside the engine, and assembles it."""

    def prepare(domain):
        form = make(domain)
        return lambda: assemble(form, **options)

    return prepare


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", VECTORS)
def test_vector(check, name):
    mesh, make = VECTORS[name]
    check(mesh, assembled(make))


@pytest.mark.parallel(RANKS)
def test_functionals(check):
    def prepare(mesh):
        f, g = field(FunctionSpace(mesh, "CG", 2)), field(FunctionSpace(mesh, "DG", 1))
        forms = [f * dx, f**2 * ds, jump(g) ** 2 * dS + g * dx, f * g * ds(2)]
        return lambda: [assemble(form) for form in forms]

    check(triangles, prepare)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy(check, strategy):
    """With sums over facets, where two cells' nodes come together."""
    check(triangles, assembled(upwind), strategy=strategy)


# -- matrices -------------------------------------------------------------------------------------


def mass_matrix(mesh):
    space = FunctionSpace(mesh, "CG", 2)
    return inner(TrialFunction(space), TestFunction(space)) * dx, []


def laplace_with_boundaries(mesh):
    space = FunctionSpace(mesh, "CG", 1)
    form = inner(grad(TrialFunction(space)), grad(TestFunction(space))) * dx
    return form, [DirichletBC(space, 0, (1, 3))]


def elasticity_with_boundaries(mesh):
    space = VectorFunctionSpace(mesh, "CG", 1)
    u, v = TrialFunction(space), TestFunction(space)
    form = inner(grad(u) + grad(u).T, grad(v)) * dx
    # all components of one side, and one component of another
    return form, [DirichletBC(space, 0, 2), DirichletBC(space.sub(1), 0, 3)]


def penalty_matrix(mesh):
    space = FunctionSpace(mesh, "DG", 1)
    u, v, n = TrialFunction(space), TestFunction(space), FacetNormal(mesh)
    return (
        inner(grad(u), grad(v)) * dx
        - inner(avg(grad(u)), jump(v, n)) * dS
        + 4 * inner(jump(u, n), jump(v, n)) * dS
        + u * v * ds
    ), []


def stokes_with_boundaries(mesh):
    space = VectorFunctionSpace(mesh, "CG", 2) * FunctionSpace(mesh, "CG", 1)
    u, p = fd.TrialFunctions(space)
    v, q = TestFunctions(space)
    form = (inner(grad(u), grad(v)) - p * div(v) - div(u) * q) * dx
    return form, [DirichletBC(space.sub(0), (0, 0), (1, 2))]


MATRICES = {
    "mass": mass_matrix,
    "laplace with boundaries": laplace_with_boundaries,
    "elasticity with boundaries": elasticity_with_boundaries,
    "interior penalty": penalty_matrix,
}


def matrix(make, **options):
    def prepare(mesh):
        form, conditions = make(mesh)
        return lambda: assemble(form, bcs=conditions, **options)

    return prepare


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", MATRICES)
def test_matrix(check, name):
    check(triangles, matrix(MATRICES[name]))


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_of_a_matrix(check, strategy):
    check(triangles, matrix(laplace_with_boundaries), strategy=strategy)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("mat_type", ["aij", "nest"])
def test_mixed_matrix(check, mat_type):
    check(triangles, matrix(stokes_with_boundaries, mat_type=mat_type))


@pytest.mark.parallel([2, 3])
def test_matrix_again_into_the_same_tensor(check):
    def prepare(mesh):
        form, conditions = laplace_with_boundaries(mesh)
        scale = Constant(1.0)

        def twice():
            tensor = assemble(scale * form, bcs=conditions)
            first = tensor.petscmat.norm()
            scale.assign(2.0)
            assemble(scale * form, bcs=conditions, tensor=tensor)
            return [first, tensor]

        return twice

    check(triangles, prepare)


# -- partitions -----------------------------------------------------------------------------------


def one_triangle(comm):
    coordinates = np.array([[0.0, 0.0], [1.0, 0.1], [0.2, 1.0]])
    plex = fd.mesh.plex_from_cell_list(2, np.array([[0, 1, 2]], dtype=np.int32), coordinates, comm)
    return fd.Mesh(plex, comm=comm)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    "mesh",
    [one_triangle, lambda comm: fd.UnitSquareMesh(1, 1, comm=comm)],
    ids=["one cell", "two cells"],
)
def test_processes_without_cells(check, mesh):
    def prepare(domain):
        space = FunctionSpace(domain, "CG", 1)
        f, u, v = field(space), TrialFunction(space), TestFunction(space)
        condition = DirichletBC(space, 0, "on_boundary")
        return lambda: [
            assemble(f * v * dx + f * v * ds + jump(f) * avg(v) * dS),
            assemble(f * dx + f * ds),
            assemble(u * v * dx + inner(grad(u), grad(v)) * dx),
            assemble(u * v * dx, bcs=condition),
        ]

    check(mesh, prepare)


@pytest.mark.parallel([2, 3, 4])
def test_random_partitions(comm, engine_on):
    """Three kinds of loops on meshes that are cut at random, some processes left without cells."""
    seeds = SEEDS[comm.size]
    numbers = []
    with engine_on():
        for seed in seeds:
            mesh = fd.UnitSquareMesh(
                2, 2, comm=comm, distribution_parameters={"partition": partition(comm, seed, 8)}
            )
            numbers.append((seed, *summary(mesh)))
    expected = summary(fd.UnitSquareMesh(2, 2, comm=fd.COMM_SELF))
    wrong = [row for row in numbers if not np.allclose(row[1:], expected, rtol=1e-12, atol=1e-13)]
    assert wrong == []


SEEDS = {2: range(30), 3: range(30, 33), 4: range(33, 35)}
"""For each number of processes."""


def partition(comm, seed, cells):
    """Sizes and cells of a random partition, on the first process, as PETSc wants it."""
    if comm.rank:
        return np.zeros(comm.size, dtype=np.int32), np.zeros(0, dtype=np.int32)
    rng = np.random.default_rng(seed)
    owners = rng.integers(rng.integers(1, comm.size + 1), size=cells)
    sizes = np.bincount(owners, minlength=comm.size).astype(np.int32)
    return rng.permutation(sizes), np.argsort(owners, kind="stable").astype(np.int32)


def summary(mesh):
    """A functional over cells and facets, and norms of a vector and a matrix."""
    space = FunctionSpace(mesh, "CG", 1)
    f = Function(space).interpolate(cos(SpatialCoordinate(mesh)[0]))
    v, u = TestFunction(space), TrialFunction(space)
    vector = assemble(inner(grad(f), grad(v)) * dx + f * v * ds)
    with vector.dat.vec_ro as x:
        norm = x.norm()
    matrix = assemble(u * v * dx, bcs=DirichletBC(space, 0, 1))
    return assemble(f * dx + avg(f) * dS), norm, matrix.petscmat.norm()


# -- communicators --------------------------------------------------------------------------------


@pytest.mark.parallel([3, 4])
def test_parts_of_a_communicator(comm, engine_on):
    """Each part works on a mesh of its own, at its own pace."""
    part = comm.Split(comm.rank % 2)
    with engine_on():
        total = 0.0
        for size in range(1, 3 + comm.rank % 2):
            mesh = fd.UnitSquareMesh(size, size, comm=part)
            total += assemble(field(FunctionSpace(mesh, "CG", 1)) * dx)
    expected = 0.0
    for size in range(1, 3 + comm.rank % 2):
        mesh = fd.UnitSquareMesh(size, size, comm=fd.COMM_SELF)
        expected += assemble(field(FunctionSpace(mesh, "CG", 1)) * dx)
    assert total == pytest.approx(expected, rel=1e-13)
    part.Free()


@pytest.mark.parallel([2, 4])
def test_ensemble(comm, engine_on):
    members = fd.Ensemble(comm, comm.size // 2)
    mesh = fd.UnitSquareMesh(3, 2, comm=members.comm)
    space = FunctionSpace(mesh, "CG", 1)
    with engine_on():
        own = Function(space).interpolate(
            (1 + members.ensemble_comm.rank) * cos(SpatialCoordinate(mesh)[0])
        )
        total = members.allreduce(own, Function(space))
        found = assemble(total * dx)
    # the members' factors, 1 and 2, times a quadrature of cos(x) by linear interpolation
    reference = fd.UnitSquareMesh(3, 2, comm=fd.COMM_SELF)
    wave = Function(FunctionSpace(reference, "CG", 1)).interpolate(
        cos(SpatialCoordinate(reference)[0])
    )
    assert found == pytest.approx(3 * assemble(wave * dx), rel=1e-13)


# -- falling back ---------------------------------------------------------------------------------


@pytest.mark.parallel([2, 3])
def test_all_fall_back_where_one_cannot_lower(comm, engine_on, monkeypatch):
    from pyop3_mlir.errors import UnsupportedLoopError
    from pyop3_mlir.frontends import pyop2

    plan_for = pyop2.plan_for

    def refuse(loop, importers=()):
        if comm.rank == comm.size - 1:
            raise UnsupportedLoopError("this map has a hole")
        return plan_for(loop, importers)

    monkeypatch.setattr(pyop2, "plan_for", refuse)
    mesh = triangles(comm)
    f = field(FunctionSpace(mesh, "CG", 1))
    expected = assemble(f * dx)
    with engine_on(lowered=False) as backend:
        found = assemble(f * dx)
    assert found == expected
    (entry,) = backend.entries.values()
    assert entry.lowered == 0
    assert "this map has a hole" in entry.reason


@pytest.mark.parallel([2])
def test_verification_on_all_processes(comm, engine_on):
    mesh = triangles(comm)
    f = field(FunctionSpace(mesh, "CG", 2))
    with engine_on(verify=True):
        assemble(f * TestFunction(f.function_space()) * dx)

"""Forms that Firedrake assembles: every loop on the engine, compared with PyOP2's own result."""

# Firedrake is used as its users do
# ruff: noqa: F403, F405

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("firedrake")

from firedrake import *

EVERY_STRATEGY = pytest.mark.parametrize(
    "verifying", ["in_order", "colour", "segmented"], indirect=True
)


def triangles(n: int = 3) -> Any:
    return UnitSquareMesh(n, n)


def quadrilaterals(n: int = 2) -> Any:
    return UnitSquareMesh(n, n, quadrilateral=True)


def tetrahedra(n: int = 1) -> Any:
    return UnitCubeMesh(n, n, n)


def prisms(n: int = 2) -> Any:
    return ExtrudedMesh(UnitSquareMesh(n, n), n)


def hexahedra(n: int = 2) -> Any:
    return ExtrudedMesh(UnitSquareMesh(n, n, quadrilateral=True), n)


MESHES: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (triangles, quadrilaterals, tetrahedra, prisms, hexahedra)
}
MESH = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


def filled(space: Any, shift: float = 1.0) -> Any:
    """A function that is not constant."""
    x = SpatialCoordinate(space.mesh())
    value = sin(x[0]) * x[1] + shift
    if space.value_shape:
        value = as_vector([value * (i + 1) + x[0] ** i for i in range(space.value_shape[0])])
    return Function(space).interpolate(value)


@MESH
def test_mass_and_laplace(mesh: Callable[..., Any], verifying: Any) -> None:
    space = FunctionSpace(mesh(), "CG", 2)
    u, v, f = TrialFunction(space), TestFunction(space), filled(space)
    assemble((inner(grad(f), grad(v)) + f * v) * dx)
    assemble((inner(grad(u), grad(v)) + u * v) * dx)
    assemble(f * f * dx)
    verifying.all_lowered()


@pytest.mark.parametrize("degree", [1, 3])
def test_laplace_of_other_degrees_on_tetrahedra(degree: int, verifying: Any) -> None:
    space = FunctionSpace(tetrahedra(), "CG", degree)
    u, v, f = TrialFunction(space), TestFunction(space), filled(space)
    assemble(inner(grad(f), grad(v)) * dx)
    assemble(inner(grad(u), grad(v)) * dx)
    verifying.all_lowered()


@pytest.mark.parametrize("degree", [1, 3, 4])
@pytest.mark.parametrize(("mesh", "family"), [(hexahedra, "Q"), (prisms, "CG")])
def test_sum_factorisation(
    mesh: Callable[..., Any], family: str, degree: int, verifying: Any
) -> None:
    """Degree 2 is among the others."""
    space = FunctionSpace(mesh(1), family, degree)
    u, v, f = TrialFunction(space), TestFunction(space), filled(space)
    assemble(inner(grad(f), grad(v)) * dx)
    if degree < 4:
        assemble(u * v * dx)
    verifying.all_lowered()


@pytest.mark.parametrize("mat_type", ["aij", "baij"])
@pytest.mark.parametrize("mesh", [triangles, tetrahedra])
def test_elasticity(mesh: Callable[..., Any], mat_type: str, verifying: Any) -> None:
    space = VectorFunctionSpace(mesh(), "CG", 2 if mesh is triangles else 1)
    u, v, f = TrialFunction(space), TestFunction(space), filled(space)
    n = space.value_shape[0]

    def stress(w: Any) -> Any:
        return 2 * sym(grad(w)) + div(w) * Identity(n)

    a = inner(stress(u), sym(grad(v))) * dx
    assemble(inner(stress(f), sym(grad(v))) * dx)
    assemble(a, mat_type=mat_type)
    # the whole vector, and one component of it
    assemble(a, mat_type=mat_type, bcs=DirichletBC(space, Constant((0,) * n), 1))
    assemble(a, mat_type=mat_type, bcs=DirichletBC(space.sub(1), 0, 2))
    verifying.all_lowered()


def test_neo_hookean(verifying: Any) -> None:
    space = VectorFunctionSpace(triangles(2), "CG", 2)
    x = SpatialCoordinate(space.mesh())
    u = Function(space).interpolate(0.05 * as_vector([x[1] ** 2, x[0] * x[1]]))
    gradient = Identity(2) + grad(u)
    determinant = det(gradient)
    energy = (tr(gradient.T * gradient) - 2 - 2 * ln(determinant)) / 2 + ln(determinant) ** 2
    assemble(energy * dx)
    residual = derivative(energy * dx, u)
    assemble(residual)
    assemble(derivative(residual, u))
    verifying.all_lowered()


@EVERY_STRATEGY
@pytest.mark.parametrize("mat_type", ["aij", "nest"])
def test_stokes(mat_type: str, verifying: Any) -> None:
    mesh = triangles(2)
    space = VectorFunctionSpace(mesh, "CG", 2) * FunctionSpace(mesh, "CG", 1)
    u, p = TrialFunctions(space)
    v, q = TestFunctions(space)
    a = (inner(grad(u), grad(v)) - p * div(v) - q * div(u)) * dx
    assemble(a, mat_type=mat_type)
    assemble(a, mat_type=mat_type, bcs=DirichletBC(space.sub(0), Constant((1, 0)), 1))
    verifying.all_lowered()


def test_navier_stokes(verifying: Any) -> None:
    mesh = triangles(2)
    space = VectorFunctionSpace(mesh, "CG", 2) * FunctionSpace(mesh, "CG", 1)
    v, q = TestFunctions(space)
    w = Function(space)
    w.sub(0).assign(filled(space[0]))
    u, p = split(w)
    residual = (inner(dot(grad(u), u), v) + inner(grad(u), grad(v)) - p * div(v) - q * div(u)) * dx
    assemble(residual)
    assemble(derivative(residual, w))
    verifying.all_lowered()


@pytest.mark.parametrize(
    ("mesh", "flux", "scalar"),
    [
        (triangles, ("RT", 1), ("DG", 0)),
        (triangles, ("BDM", 1), ("DG", 0)),
        (quadrilaterals, ("RTCF", 1), ("DQ", 0)),
        (tetrahedra, ("RT", 1), ("DG", 0)),
    ],
)
def test_mixed_poisson(mesh: Callable[..., Any], flux: Any, scalar: Any, verifying: Any) -> None:
    domain = mesh()
    space = FunctionSpace(domain, *flux) * FunctionSpace(domain, *scalar)
    s, u = TrialFunctions(space)
    t, v = TestFunctions(space)
    a = (dot(s, t) + div(t) * u + div(s) * v) * dx
    f = Function(space)
    f.sub(1).assign(1.5)
    assemble(a)
    assemble(action(a, f))
    verifying.all_lowered()


def test_curl_curl(verifying: Any) -> None:
    space = FunctionSpace(tetrahedra(), "N1curl", 1)
    u, v = TrialFunction(space), TestFunction(space)
    a = (inner(curl(u), curl(v)) + inner(u, v)) * dx
    f = Function(space).interpolate(SpatialCoordinate(space.mesh()))
    assemble(a)
    assemble(action(a, f))
    verifying.all_lowered()


@pytest.mark.parametrize("mesh", [triangles, quadrilaterals])
def test_upwind_advection(mesh: Callable[..., Any], verifying: Any) -> None:
    """Interior and exterior facets, and conditionals."""
    domain = mesh()
    space = FunctionSpace(domain, "DG", 1)
    x, n = SpatialCoordinate(domain), FacetNormal(domain)
    b = Function(VectorFunctionSpace(domain, "CG", 1))
    b.interpolate(as_vector([x[1] - 0.3, 0.5 - x[0]]))
    q, u, v = filled(space), TrialFunction(space), TestFunction(space)
    out = 0.5 * (dot(b, n) + abs(dot(b, n)))
    inflow = conditional(dot(b, n) < 0, v * dot(b, n) * 1.0, v * dot(b, n) * q)
    assemble(
        q * div(v * b) * dx
        - inflow * ds
        - (v("+") - v("-")) * (out("+") * q("+") - out("-") * q("-")) * dS
    )
    assemble(u * div(v * b) * dx - (v("+") - v("-")) * (out("+") * u("+") - out("-") * u("-")) * dS)
    verifying.all_lowered()


def test_facets_of_an_extruded_mesh(verifying: Any) -> None:
    space = FunctionSpace(prisms(), "DG", 1)
    q, u, v = filled(space), TrialFunction(space), TestFunction(space)
    for f in (q, u):
        assemble(
            f * v * dx
            + jump(f) * jump(v) * dS_h
            + jump(f) * jump(v) * dS_v
            + f * v * ds_t
            + 2 * f * v * ds_b
            + f * v * ds_v
        )
    verifying.all_lowered()


def test_periodic_extrusion(verifying: Any) -> None:
    mesh = ExtrudedMesh(UnitSquareMesh(2, 2), 3, periodic=True)
    space = FunctionSpace(mesh, "CG", 1)
    q, u, v = filled(space), TrialFunction(space), TestFunction(space)
    assemble(q * v * dx + jump(q) * avg(v) * dS_h)
    assemble(inner(grad(u), grad(v)) * dx)
    verifying.all_lowered()


def test_columns_of_different_height(verifying: Any) -> None:
    layers = [[0, 2], [0, 2], [1, 1], [0, 1], [1, 1], [0, 2], [0, 2], [0, 2]]
    mesh = ExtrudedMesh(UnitSquareMesh(2, 2), layers, layer_height=0.5)
    space = FunctionSpace(mesh, "CG", 1)
    q, u, v = Function(space), TrialFunction(space), TestFunction(space)
    q.interpolate(SpatialCoordinate(mesh)[2])
    assemble(q * v * dx + q * v * ds_t + q * v * ds_b)
    assemble(inner(grad(u), grad(v)) * dx)
    verifying.all_lowered()


@pytest.mark.parametrize("mesh", [triangles, prisms])
def test_real_space(mesh: Callable[..., Any], verifying: Any) -> None:
    domain = mesh()
    space, reals = FunctionSpace(domain, "CG", 1), FunctionSpace(domain, "R", 0)
    u, r = TrialFunctions(space * reals)
    v, s = TestFunctions(space * reals)
    assemble((inner(grad(u), grad(v)) + u * s + r * v) * dx, mat_type="nest")
    two = Function(reals).assign(2.0)
    assemble(two * TestFunction(space) * dx)
    assemble(two * TestFunction(reals) * dx)
    if mesh is triangles:
        assemble(two * avg(TestFunction(space)) * dS)
    verifying.all_lowered()


def test_reals_are_written(verifying: Any) -> None:
    """Each entity writes the same global; the last one's value stays."""
    reals = FunctionSpace(triangles(), "R", 0)
    one = Function(reals).interpolate(Constant(2.5))
    two = Function(reals).interpolate(3 * one + 1)
    assert (one.dat.data_ro[0], two.dat.data_ro[0]) == (2.5, 8.5)
    verifying.all_lowered()


def test_slate_on_horizontal_facets(verifying: Any) -> None:
    """Its kernels ask whether there is a cell above, by the number of layers."""
    space = FunctionSpace(prisms(), "DG", 1)
    v, f = TestFunction(space), Function(space)
    f.interpolate(SpatialCoordinate(space.mesh())[2] + 1)
    assemble(Tensor(jump(f * v) * dS_h + avg(v) * dS_v + f * v * ds_t + f * v * dx))
    verifying.all_lowered()


@pytest.mark.parametrize("element", [("Argyris", 5), ("Hermite", 3), ("Morley", 2)])
def test_zany_elements(element: Any, verifying: Any) -> None:
    space = FunctionSpace(triangles(2), *element)
    u, v, f = TrialFunction(space), TestFunction(space), Function(space)
    a = inner(grad(u), grad(v)) * dx
    assemble(a)
    assemble(action(a, f))
    verifying.all_lowered()


@pytest.mark.parametrize(
    "element",
    [("CR", 1), ("Bernstein", 3), ("Regge", 1), ("HHJ", 1), ("KMV", 2), ("BDFM", 2)],
)
def test_other_elements(element: Any, verifying: Any) -> None:
    space = FunctionSpace(triangles(2), *element)
    assemble(inner(TrialFunction(space), TestFunction(space)) * dx)
    verifying.all_lowered()


@EVERY_STRATEGY
def test_orientations_of_cells_on_a_sphere(verifying: Any) -> None:
    mesh = IcosahedralSphereMesh(1, 1)
    mesh.init_cell_orientations(SpatialCoordinate(mesh))
    space = FunctionSpace(mesh, "RT", 1)
    assemble(inner(TrialFunction(space), TestFunction(space)) * dx)
    # cancels to rounding in each entry
    assemble(div(TestFunction(space)) * dx)
    verifying.all_lowered()


@EVERY_STRATEGY
def test_slate(verifying: Any) -> None:
    """Hybridised mixed Poisson: inverses, and kernels called under a predicate for each facet."""
    mesh = triangles(2)
    broken = FunctionSpace(mesh, BrokenElement(FiniteElement("RT", triangle, 1)))
    scalars, traces = FunctionSpace(mesh, "DG", 0), FunctionSpace(mesh, "HDiv Trace", 0)
    s, u = TrialFunctions(broken * scalars)
    t, v = TestFunctions(broken * scalars)
    multiplier, n = TestFunction(traces), FacetNormal(mesh)
    a = Tensor((dot(s, t) + div(t) * u + div(s) * v) * dx)
    k = Tensor(multiplier("+") * jump(s, n=n) * dS + multiplier * dot(s, n) * ds)
    rhs = Tensor(Function(scalars).assign(1.0) * v * dx)
    assemble(k * a.inv * k.T)
    assemble(k * a.inv * rhs)
    verifying.all_lowered()


def test_slate_solve_of_a_larger_system(verifying: Any) -> None:
    space = FunctionSpace(triangles(2), "CG", 2)
    mass = Tensor(inner(TrialFunction(space), TestFunction(space)) * dx)
    assemble(mass.inv * AssembledVector(filled(space)))
    verifying.all_lowered()


def test_slate_sum_of_larger_systems(verifying: Any) -> None:
    """Firedrake's own test of nested expressions, with other numbers."""
    space = FunctionSpace(triangles(1), "DG", 3)
    f, g = (AssembledVector(filled(space, shift)) for shift in (0.0, 1.0))
    u, v = TrialFunction(space), TestFunction(space)
    a = Tensor(inner(u, v) * dx)
    b = Tensor(2.0 * inner(u, v) * dx + inner(grad(u), grad(v)) * dx)
    assemble((b.T * a.inv).T * g + (-a.inv.T * b.T).inv * f + b.inv * a.T * f)
    verifying.all_lowered()


def test_interpolation_and_projection(verifying: Any) -> None:
    mesh = triangles(2)
    f = filled(FunctionSpace(mesh, "CG", 3))
    vectors = VectorFunctionSpace(mesh, "DG", 1)
    g = Function(vectors).interpolate(grad(f))
    Function(TensorFunctionSpace(mesh, "DG", 1)).interpolate(outer(grad(f), grad(f)))
    Function(FunctionSpace(mesh, "RT", 2)).interpolate(g)
    Function(FunctionSpace(mesh, "N1curl", 1)).interpolate(g)
    Function(FunctionSpace(mesh, "DG", 2)).project(Constant(2.0) * f)
    assemble(interpolate(TrialFunction(f.function_space()), FunctionSpace(mesh, "DG", 2)))
    verifying.all_lowered()


def test_mathematical_functions(verifying: Any) -> None:
    space = FunctionSpace(triangles(2), "CG", 1)
    f, v = filled(space, 0.5), TestFunction(space)
    value = sum(
        function(f / 4)
        for function in (sqrt, exp, ln, sin, cos, tan, sinh, cosh, tanh, asin, acos, atan, erf)
    )
    value += atan2(f, f + 1) + bessel_J(1, f) + bessel_Y(0, f) + f**3 + f**f + abs(f) + sign(f - 1)
    value += max_value(f, 1) + min_value(f, 0.7) + conditional(And(f < 1, f > 0.6), f, 2)
    assemble(value * v * dx)
    verifying.all_lowered()


@EVERY_STRATEGY
def test_loops_that_limit(verifying: Any) -> None:
    """MIN and MAX, in a kernel written by hand and in Firedrake's own limiter."""
    mesh = triangles()
    space, vertices = FunctionSpace(mesh, "DG", 1), FunctionSpace(mesh, "CG", 1)
    q = filled(space)
    largest, smallest = Function(vertices).assign(-10.0), Function(vertices).assign(10.0)
    par_loop(
        (
            "{[i]: 0 <= i < 3}",
            "for i\n hi[i] = fmax(hi[i], q[i])\n lo[i] = fmin(lo[i], q[i])\nend",
        ),
        dx,
        {"hi": (largest, MAX), "lo": (smallest, MIN), "q": (q, READ)},
    )
    VertexBasedLimiter(space).apply(q)
    verifying.all_lowered()


def test_subdomains(verifying: Any) -> None:
    mesh = triangles(4)
    marker = Function(FunctionSpace(mesh, "DG", 0))
    marker.interpolate(conditional(SpatialCoordinate(mesh)[0] < 0.5, 1, 0))
    mesh = RelabeledMesh(mesh, [marker], [1])
    space = FunctionSpace(mesh, "CG", 1)
    u, v, f = TrialFunction(space), TestFunction(space), filled(space)
    assemble(f * v * dx(1) + f * v * dx + f * v * ds(1) + f * v * ds((2, 3)))
    assemble(u * v * dx(1))
    verifying.all_lowered()


@pytest.mark.parametrize("strategy", ["in_order", "colour", "segmented"])
@pytest.mark.parametrize("mesh", [triangles, prisms])
def test_every_strategy(mesh: Callable[..., Any], strategy: str, attach: Any) -> None:
    domain = mesh()
    space, vectors = FunctionSpace(domain, "CG", 2), VectorFunctionSpace(domain, "CG", 1)
    u, v, f, g = TrialFunction(space), TestFunction(space), filled(space), filled(vectors)
    with attach(verify=True, strategy=strategy) as engine:
        assemble(inner(grad(f), grad(v)) * dx)
        assemble(inner(grad(u), grad(v)) * dx, bcs=DirichletBC(space, 0, "on_boundary"))
        assemble(inner(g, g) * f * dx)
        engine.all_lowered()
    assert all(e.strategy.startswith(strategy) for e in engine.entries().values())

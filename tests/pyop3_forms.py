"""Forms that cover what Firedrake assembles; each is made on a small mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import firedrake as fd
import numpy as np

MESHES: dict[str, Callable[[], Any]] = {
    "triangle": lambda: fd.UnitSquareMesh(4, 3),
    "quadrilateral": lambda: fd.UnitSquareMesh(3, 3, quadrilateral=True),
    "tetrahedron": lambda: fd.UnitCubeMesh(2, 2, 2),
    "prism": lambda: fd.ExtrudedMesh(fd.UnitSquareMesh(2, 2), 3),
    "hexahedron": lambda: fd.ExtrudedMesh(fd.UnitSquareMesh(2, 2, quadrilateral=True), 3),
}


def coefficient(space: Any) -> Any:
    """A function of random numbers (seed 0)."""
    function = fd.Function(space)
    random = np.random.default_rng(0)
    for part in function.subfunctions:
        values = part.dat.data_wo
        values[...] = random.random(values.shape)
    return function


def _trial(space: Any, rank: int) -> Any:
    return fd.TrialFunction(space) if rank == 2 else coefficient(space)


def _simplex(mesh: Any) -> bool:
    return mesh.ufl_cell().cellname in ("triangle", "tetrahedron")


def _extruded(mesh: Any) -> bool:
    return isinstance(mesh.topology, fd.mesh.ExtrudedMeshTopology)


def mass(mesh: Any, rank: int, degree: int = 2) -> Any:
    space = fd.FunctionSpace(mesh, "CG", degree)
    return _trial(space, rank) * fd.TestFunction(space) * fd.dx


def laplace(mesh: Any, rank: int, degree: int = 1) -> Any:
    space = fd.FunctionSpace(mesh, "CG", degree)
    u, v = _trial(space, rank), fd.TestFunction(space)
    return fd.inner(fd.grad(u), fd.grad(v)) * fd.dx


def laplace_3(mesh: Any, rank: int) -> Any:
    return laplace(mesh, rank, 3)


def constant(mesh: Any, rank: int) -> Any:
    return fd.Constant(3.5) * mass(mesh, rank, 1)


def boundary(mesh: Any, rank: int) -> Any:
    space = fd.FunctionSpace(mesh, "CG", 1)
    measure = fd.ds_v(1) + fd.ds_t + fd.ds_b if _extruded(mesh) else fd.ds
    return _trial(space, rank) * fd.TestFunction(space) * measure


def elasticity(mesh: Any, rank: int) -> Any:
    space = fd.VectorFunctionSpace(mesh, "CG", 2 if mesh.geometric_dimension == 2 else 1)
    u, v = _trial(space, rank), fd.TestFunction(space)
    strains = fd.inner(fd.sym(fd.grad(u)), fd.sym(fd.grad(v)))
    return (strains + fd.div(u) * fd.div(v)) * fd.dx


def advection(mesh: Any, rank: int) -> Any:
    """Upwind, with interior facets."""
    space = fd.FunctionSpace(mesh, "DG", 1)
    u, v = _trial(space, rank), fd.TestFunction(space)
    flow = fd.as_vector([1.0 + fd.SpatialCoordinate(mesh)[0]] * mesh.geometric_dimension)
    normal = fd.FacetNormal(mesh)
    out = 0.5 * (fd.dot(flow, normal) + abs(fd.dot(flow, normal)))
    inside = fd.dS_v + fd.dS_h if _extruded(mesh) else fd.dS
    jump = (v("+") - v("-")) * (out("+") * u("+") - out("-") * u("-"))
    return -fd.inner(u * flow, fd.grad(v)) * fd.dx + jump * inside


def real_coefficient(mesh: Any, rank: int) -> Any:
    space = fd.FunctionSpace(mesh, "DG", 1)
    number = coefficient(fd.FunctionSpace(mesh, "R", 0))
    return number * _trial(space, rank) * fd.TestFunction(space) * fd.dx


def real_test(mesh: Any, rank: int) -> Any:
    test = fd.TestFunction(fd.FunctionSpace(mesh, "R", 0))
    return coefficient(fd.FunctionSpace(mesh, "DG", 1)) * test * fd.dx


def energy(mesh: Any, rank: int) -> Any:
    u = coefficient(fd.FunctionSpace(mesh, "CG", 2))
    return (u**2 + fd.inner(fd.grad(u), fd.grad(u))) * fd.dx


def tensor(mesh: Any, rank: int) -> Any:
    space = fd.TensorFunctionSpace(mesh, "CG", 1)
    return fd.inner(coefficient(space), fd.TestFunction(space)) * fd.dx


def mixed_poisson(mesh: Any, rank: int) -> Any:
    flat = mesh.geometric_dimension == 2
    family = "RT" if _simplex(mesh) else ("RTCF" if flat else "NCF")
    space = fd.FunctionSpace(mesh, family, 1) * fd.FunctionSpace(
        mesh, "DG" if _simplex(mesh) else "DQ", 0
    )
    flux, pressure = fd.TrialFunctions(space) if rank == 2 else fd.split(coefficient(space))
    other, test = fd.TestFunctions(space)
    integrand = fd.inner(flux, other) + fd.div(other) * pressure + fd.div(flux) * test
    return integrand * fd.dx


def navier_stokes(mesh: Any, rank: int) -> Any:
    space = fd.VectorFunctionSpace(mesh, "CG", 2) * fd.FunctionSpace(mesh, "CG", 1)
    state = coefficient(space)
    u, p = fd.split(state)
    v, q = fd.TestFunctions(space)
    residual = (
        fd.inner(fd.grad(u), fd.grad(v)) + fd.inner(fd.dot(fd.grad(u), u), v)
        - p * fd.div(v) - q * fd.div(u)
    ) * fd.dx  # fmt: skip
    return residual if rank == 1 else fd.derivative(residual, state)


def curl(mesh: Any, rank: int) -> Any:
    space = fd.FunctionSpace(mesh, "N1curl", 1)
    u, v = _trial(space, rank), fd.TestFunction(space)
    return fd.inner(fd.curl(u), fd.curl(v)) * fd.dx


def argyris(mesh: Any, rank: int) -> Any:
    space = fd.FunctionSpace(mesh, "Argyris", 5)
    u, v = coefficient(space), fd.TestFunction(space)
    return fd.inner(fd.div(fd.grad(u)), fd.div(fd.grad(v))) * fd.dx


def bdm(mesh: Any, rank: int) -> Any:
    space = fd.FunctionSpace(mesh, "BDM", 1)
    u, v = _trial(space, rank), fd.TestFunction(space)
    return (fd.inner(u, v) + fd.div(u) * fd.div(v)) * fd.dx


def _hyperelastic(u: Any) -> Any:
    """Energy density of a compressible neo-Hookean material."""
    dim = len(u)
    gradient = fd.Identity(dim) + 0.1 * fd.grad(u)
    volume = fd.det(gradient)
    invariant = fd.tr(gradient.T * gradient)
    return 0.5 * (invariant - dim) - fd.ln(volume) + 2.0 * fd.ln(volume) ** 2


def hyperelastic_energy(mesh: Any, rank: int) -> Any:
    u = coefficient(fd.VectorFunctionSpace(mesh, "CG", 1))
    return _hyperelastic(u) * fd.dx(degree=2)


def neo_hookean(mesh: Any, rank: int) -> Any:
    u = coefficient(fd.VectorFunctionSpace(mesh, "CG", 1))
    residual = fd.derivative(_hyperelastic(u) * fd.dx(degree=2), u)
    return residual if rank == 1 else fd.derivative(residual, u)


def conditions(mesh: Any, rank: int) -> Any:
    """Which terms count depends on the data."""
    space = fd.FunctionSpace(mesh, "DG", 1)
    u, v = coefficient(space), fd.TestFunction(space)
    x = fd.SpatialCoordinate(mesh)[0]
    inside = fd.conditional(fd.And(fd.gt(u, 0.3), fd.lt(x, 0.7)), u**2, fd.max_value(u, 0.1))
    return inside * v * fd.dx


def slate_inverse(mesh: Any, rank: int) -> Any:
    """Slate: an inverse and a product of local tensors."""
    space = fd.FunctionSpace(mesh, "DG", 1)
    u, v = fd.TrialFunction(space), fd.TestFunction(space)
    local = fd.Tensor((u * v + fd.inner(fd.grad(u), fd.grad(v))) * fd.dx)
    if rank == 2:
        return local.inv
    return local.inv * fd.AssembledVector(coefficient(space))


SIMPLE = (mass, laplace, laplace_3, boundary, advection, elasticity)

VECTORS: tuple[tuple[str, Callable[[Any, int], Any]], ...] = (
    *((mesh, form) for mesh in ("triangle", "quadrilateral", "tetrahedron") for form in SIMPLE),
    *((mesh, form) for mesh in ("prism", "hexahedron") for form in (laplace, boundary)),
    *(
        ("triangle", form)
        for form in (
            constant, real_coefficient, real_test, energy, tensor, mixed_poisson, navier_stokes,
            argyris, bdm, hyperelastic_energy, neo_hookean, conditions, slate_inverse,
        )
    ),
    *((mesh, laplace_3) for mesh in ("prism", "hexahedron")),
    ("quadrilateral", mixed_poisson),
    *(("tetrahedron", form) for form in (curl, neo_hookean)),
)  # fmt: skip
"""Cells and forms of vectors and numbers."""

MATRICES: tuple[tuple[str, Callable[[Any, int], Any]], ...] = (
    *(
        ("triangle", form)
        for form in (
            laplace, laplace_3, elasticity, advection, mixed_poisson, navier_stokes, neo_hookean,
            slate_inverse,
        )
    ),
    *(("quadrilateral", form) for form in (laplace, laplace_3, mixed_poisson)),
    *(("tetrahedron", form) for form in (laplace, elasticity, curl)),
    *(("prism", form) for form in (laplace, elasticity)),
    ("hexahedron", laplace_3),
)  # fmt: skip
"""Cells and forms of matrices."""

MATRICES_BY_NAME = {form.__name__: form for _, form in MATRICES}


def values(tensor: Any) -> np.ndarray:
    """The numbers in what was assembled."""
    if np.isscalar(tensor):
        return np.array([tensor])
    if hasattr(tensor, "petscmat"):
        mat = tensor.petscmat
        if mat.getType() == "nest":
            mat = mat.convert("aij")
        return mat.getValuesCSR()[2].copy()
    return np.array(tensor.dat.buffer.data_ro).ravel()


def check_against_loopy(engine: Any, form: Any, **options: Any) -> None:
    """Assemble twice by each engine: the second time compiles nothing."""
    engine.backend.detach()
    tensor = fd.assemble(form, **options)
    # into the same tensor: the first result of pyop3 itself may have other numbers in ghosts; it
    # cannot assemble into a nested matrix again (MatNestGetSubMat: no support for this operation)
    again = {"tensor": tensor}
    if np.isscalar(tensor) or options.get("mat_type") == "nest":
        again = {}
    expected = values(fd.assemble(form, **options, **again))
    # the engine's own result is looked at, not pyop3's, which is kept where loops are verified
    engine.backend.options = replace(engine.backend.options, verify=False)
    engine.backend.attach()
    for _ in range(2):
        found = values(fd.assemble(form, **options, **again))
        scale = np.abs(expected).max()
        assert np.abs(found - expected).max() <= 1e-12 * scale
    kernels = [e for e in engine.entries() if "integral" in e.name or "slate" in e.name]
    assert kernels, [e.name for e in engine.entries()]
    for entry in kernels:
        assert entry.calls == entry.lowered > 0, f"{entry.name}: {entry.reason}"

"""Local kernels in GEM against numpy, another quadrature rule, and values derived by hand."""

import math

import gem
import numpy as np
import pytest
from gem.node import traversal
from reference import evaluate_assignments, evaluate_kernel

from pyop3_mlir.bench.meshes import Mesh, tetrahedra, triangles
from pyop3_mlir.bench.reference import apply, element_matrices
from pyop3_mlir.kernels import elements

CELLS = ["triangle", "tetrahedron"]
DEGREES = [1, 2, 3]


def small_mesh(cell: str, degree: int) -> Mesh:
    return triangles(3, degree) if cell == "triangle" else tetrahedra(2, degree)


def packs(mesh: Mesh, coefficient: np.ndarray | None = None) -> dict[str, np.ndarray]:
    bindings = {"coords": mesh.points[mesh.cells]}
    if coefficient is not None:
        bindings["w"] = coefficient[mesh.nodes]
    return bindings


def evaluate(kernel: elements.GemKernel, bindings: dict[str, np.ndarray]) -> np.ndarray:
    (name, shape, _), *_ = kernel.arguments
    added = evaluate_assignments(kernel.assignments, bindings)[name]
    return added.reshape(-1, *shape)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-13) -> bool:
    return bool(np.abs(actual - expected).max() <= tolerance * np.abs(expected).max())


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", ["mass", "laplace", "elasticity"])
def test_element_matrices_agree_with_numpy(form: str, cell: str, degree: int, fold: bool) -> None:
    mesh = small_mesh(cell, degree)
    kernel = elements.expressions(form, cell, degree, 2, fold=fold)
    assert close(evaluate(kernel, packs(mesh)), element_matrices(form, mesh))


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", ["mass", "laplace", "elasticity"])
def test_action_is_the_matrix_times_the_coefficient(form: str, cell: str, degree: int) -> None:
    mesh = small_mesh(cell, degree)
    shape = (mesh.node_count, mesh.dimension)[: 2 if form == "elasticity" else 1]
    w = np.random.default_rng(7).standard_normal(shape)
    kernel = elements.expressions(form, cell, degree)
    local = evaluate(kernel, packs(mesh, w))
    result = np.zeros(shape)
    np.add.at(result, mesh.nodes, local)
    assert close(result, apply(mesh, element_matrices(form, mesh), w))


@pytest.mark.parametrize("cell", CELLS)
def test_mass_of_a_p1_cell_is_the_one_in_every_textbook(cell: str) -> None:
    mesh = small_mesh(cell, 1)
    d = mesh.dimension
    expected = mesh.volumes[:, None, None] * (1 + np.eye(d + 1)) / ((d + 1) * (d + 2))
    assert close(evaluate(elements.expressions("mass", cell, 1, 2), packs(mesh)), expected)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("cell", CELLS)
def test_rows_of_the_stiffness_matrix_sum_to_zero(cell: str, degree: int) -> None:
    mesh = small_mesh(cell, degree)
    matrices = evaluate(elements.expressions("laplace", cell, degree, 2), packs(mesh))
    assert np.abs(matrices.sum(axis=2)).max() < 1e-12 * np.abs(matrices).max()


@pytest.mark.parametrize("cell", CELLS)
def test_rigid_motions_have_no_stress(cell: str) -> None:
    mesh = small_mesh(cell, 2)
    x = mesh.node_points
    turn = np.zeros_like(x)
    turn[:, 0], turn[:, 1] = -x[:, 1], x[:, 0]
    kernel = elements.expressions("elasticity", cell, 2)
    shape = evaluate(kernel, packs(mesh, x))
    assert (
        np.abs(evaluate(kernel, packs(mesh, turn + 3.0))).max() < 1e-13 * np.abs(shape).max() * 10
    )


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("cell", CELLS)
def test_functional_integrates_a_polynomial_exactly(cell: str, degree: int) -> None:
    mesh = small_mesh(cell, degree)
    w = mesh.node_points[:, 0] ** degree
    local = evaluate(elements.expressions("functional", cell, degree, 0), packs(mesh, w))
    assert math.isclose(local.sum(), 1 / (degree + 1), rel_tol=1e-13)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("cell", CELLS)
def test_source_adds_up_to_the_volume_times_the_density(cell: str, degree: int) -> None:
    mesh = small_mesh(cell, degree)
    bindings = packs(mesh) | {"f": np.full((mesh.size, 1), 2.5)}
    local = evaluate(elements.expressions("source", cell, degree, 1), bindings)
    assert np.allclose(local.sum(axis=1), 2.5 * mesh.volumes, rtol=1e-13, atol=0)


@pytest.mark.parametrize("form", ["mass", "laplace", "elasticity"])
def test_orientation_of_the_cell_does_not_matter(form: str) -> None:
    kernel = elements.expressions(form, "triangle", 1, 2)
    x = np.array([[[0.0, 0.0], [1.0, 0.2], [0.3, 1.0]]])
    swapped = x[:, [0, 2, 1]]
    plus, minus = (evaluate(kernel, {"coords": c}) for c in (x, swapped))
    order = [0, 2, 1]
    permuted = minus[:, order][..., order] if plus.ndim == 3 else minus[:, order][:, :, :, order]
    assert close(permuted, plus)


def test_float32_kernels_hold_no_float64_constant() -> None:
    kernel = elements.expressions("laplace", "tetrahedron", 2, 2, np.float32)
    nodes = traversal([value for _, value in kernel.assignments])
    literals = [node for node in nodes if isinstance(node, gem.Literal)]
    assert literals
    assert {node.array.dtype for node in literals} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("heat", "triangle", 1), "no form 'heat'"),
        (("mass", "pyramid", 1), "no cell 'pyramid'"),
        (("mass", "triangle", 0), "starts at 1"),
        (("functional", "triangle", 1, 2), "rank 0, not 2"),
        (("mass", "triangle", 1, 1, np.complex128), "are real"),
    ],
)
def test_what_does_not_exist_is_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        elements.expressions(*arguments)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("form", "rank"), [(f, r) for f, rs in elements.FORMS.items() for r in rs])
def test_imported_kernel_means_the_same(form: str, rank: int, cell: str, degree: int) -> None:
    pytest.importorskip("pyop3_mlir.kernels.gem")
    mesh = small_mesh(cell, degree)
    made = elements.expressions(form, cell, degree, rank)
    rng = np.random.default_rng(11)
    inputs = {
        name: rng.standard_normal((mesh.size, *shape)) for name, shape, _ in made.arguments[1:]
    } | packs(mesh)
    kernel = elements.kernel(form, cell, degree, rank)
    given = [
        np.zeros((mesh.size, *made.arguments[0][1])),
        *(inputs[n] for n, _, _ in made.arguments[1:]),
    ]
    changed = evaluate_kernel(kernel, given)[kernel.arguments[0]]
    assert close(changed.reshape(mesh.size, -1), evaluate(made, inputs).reshape(mesh.size, -1))

"""The demo: its mesh, its pictures, and a part whose heat flow is known."""

from pathlib import Path

import meshio
import numpy as np
import pytest
from rich.console import Console

from pyop3_mlir.bench.meshes import Mesh, tetrahedra, triangles
from pyop3_mlir.bench.pictures import View, paint_classes, paint_field, surface_triangles
from pyop3_mlir.demo import DemoError, bundled_mesh, read_part, run_demo


@pytest.fixture(scope="module")
def bracket():
    return read_part(bundled_mesh())


def write_cube(path: Path, n: int, names: tuple[str, str] = ("bearing", "bolts")) -> None:
    """A cube with its faces x = 1 and x = 0 named, as gmsh would write it."""
    mesh = tetrahedra(n, distort=0.05)
    cells, opposite = mesh.boundary
    corners = np.array([[v for v in range(4) if v != o] for o in range(4)])[opposite]
    facets = np.take_along_axis(mesh.cells[cells], corners, axis=1)
    x = mesh.points[facets][..., 0]
    hot, cold = facets[(x > 1 - 1e-9).all(axis=1)], facets[(x < 1e-9).all(axis=1)]
    groups = [np.r_[np.full(len(hot), 1), np.full(len(cold), 2)], np.full(mesh.size, 3)]
    named = {names[0]: (1, 2), names[1]: (2, 2), "cube": (3, 3)}
    raw = meshio.Mesh(
        mesh.points,
        [("triangle", np.concatenate([hot, cold])), ("tetra", mesh.cells)],
        cell_data={"gmsh:physical": groups, "gmsh:geometrical": groups},
        field_data={name: np.array(group) for name, group in named.items()},
    )
    meshio.write(path, raw, file_format="gmsh22", binary=False)


def test_bracket_is_a_mesh_of_the_promised_size(bracket) -> None:
    assert 20_000 <= bracket.mesh.size <= 60_000
    assert bracket.mesh.volumes.min() > 0


def test_bore_of_the_bracket_is_a_cylinder(bracket) -> None:
    points = bracket.mesh.node_points[bracket.nodes_on("bearing", bracket.mesh)]
    assert np.allclose(np.hypot(points[:, 0] - 50, points[:, 2] - 62), 16.0, atol=1e-9)


def test_bolts_go_through_the_foot(bracket) -> None:
    points = bracket.mesh.node_points[bracket.nodes_on("bolts", bracket.mesh)]
    assert np.allclose([points[:, 2].min(), points[:, 2].max()], [0.0, 12.0], atol=1e-9)


@pytest.mark.parametrize("degree", [1, 2])
def test_surface_encloses_the_volume(bracket, degree: int) -> None:
    mesh = bracket.mesh.with_degree(degree)
    nodes, cells = surface_triangles(mesh)
    assert len(nodes) == len(cells)
    a, b, c = (mesh.node_points[nodes[:, k]] for k in range(3))
    # the divergence theorem for the field x / 3
    enclosed = np.einsum("td,td->", a, np.cross(b, c)) / 6
    assert np.isclose(enclosed, mesh.volumes.sum(), rtol=1e-12)


def test_boundary_of_a_box_has_all_its_facets() -> None:
    for mesh, expected in ((triangles(5), 4 * 5), (tetrahedra(3), 6 * 9 * 2)):
        cells, opposite = mesh.boundary
        assert len(cells) == expected
        centres = mesh.node_points[mesh.facet_nodes(cells, opposite)].mean(axis=1)
        assert np.isclose(np.minimum(centres, 1 - centres).min(axis=1), 0, atol=1e-12).all()


def test_only_triangles_that_face_the_viewer_are_painted() -> None:
    mesh = tetrahedra(2, distort=0.0)
    nodes, _ = surface_triangles(mesh)
    view = View(mesh.node_points, nodes, azimuth=0.0, elevation=0.0)
    seen = mesh.node_points[nodes[view.visible]]
    assert len(seen) == 2 * 2 * 2
    assert (seen[..., 0] == 1.0).all()


def test_pictures_are_written(tmp_path: Path) -> None:
    mesh = tetrahedra(3)
    nodes, cells = surface_triangles(mesh)
    view = View(mesh.node_points, nodes)
    paint_field(tmp_path / "field.png", view, mesh.node_points[nodes, 0].mean(axis=1), "x", "m")
    paint_classes(tmp_path / "classes.png", view, cells % 5, 5, "classes", ["a note"])
    for name in ("field.png", "classes.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_heat_flows_through_a_cube_as_through_a_rod(tmp_path: Path) -> None:
    write_cube(tmp_path / "cube.msh", 4)
    console = Console(quiet=True)
    results = run_demo(tmp_path / "cube.msh", tmp_path / "out", tune_budget=0.0, console=console)
    # conductivity times area times difference of temperature over length
    for degree in (1, 2):
        assert np.isclose(results[f"P{degree} heat flow"], 0.05 * 60.0, rtol=1e-9)
        assert results[f"P{degree} matrix"] < 1e-12
        assert results[f"P{degree} action"] < 1e-12
        assert results[f"P{degree} matrix-free"] < 1e-9
    assert (tmp_path / "out" / "solution.png").is_file()
    assert (tmp_path / "out" / "colouring.png").is_file()


def test_mesh_without_the_surfaces_is_refused(tmp_path: Path) -> None:
    write_cube(tmp_path / "cube.msh", 2, ("left", "right"))
    with pytest.raises(DemoError, match="no surface 'bearing'; there are left, right"):
        run_demo(tmp_path / "cube.msh", tmp_path / "out", console=Console(quiet=True))


def test_mesh_without_tetrahedra_is_refused(tmp_path: Path) -> None:
    mesh = triangles(2)
    flat = np.column_stack([mesh.points, np.zeros(len(mesh.points))])
    meshio.write(tmp_path / "flat.msh", meshio.Mesh(flat, [("triangle", mesh.cells)]))
    with pytest.raises(DemoError, match="no tetrahedra, only triangle"):
        read_part(tmp_path / "flat.msh")


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"nothing\.msh"):
        read_part(tmp_path / "nothing.msh")


def test_points_of_no_cell_are_dropped() -> None:
    points = np.array([[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [0.0, 1.0]])
    mesh = Mesh.build(points, [[0, 2, 3]], reorder=True)
    assert len(mesh.points) == 3
    assert mesh.numbering is not None
    assert mesh.numbering[1] == -1
    assert np.array_equal(mesh.points[mesh.numbering[[0, 2, 3]]], points[[0, 2, 3]])

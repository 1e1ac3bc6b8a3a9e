"""Draw the demo's part, a bearing bracket, and mesh it: ``python demos/make_mesh.py``.

Writes ``demos/meshes/bracket.msh``, which is committed: the demo itself needs no gmsh. Lengths are
in millimetres. The physical groups are what the demo looks for: the volume ``bracket``, and the
surfaces ``bolts`` (the holes of the foot) and ``bearing`` (the bore).
"""

import math
from pathlib import Path

import gmsh

FOOT = (100.0, 60.0, 12.0)
"""Length, width and height of the foot."""

WALL = 14.0
"""Thickness of the upright plate."""

BORE = (50.0, 62.0, 16.0, 26.0)
"""Length coordinate, height, inner radius of the bore and radius of the boss around it."""

BOSS = 24.0
"""Length of the boss along the bore."""

BOLTS = [(14.0, 46.0), (86.0, 46.0), (14.0, 14.0), (86.0, 14.0)]
"""Places of the bolts in the foot, beside the upright plate."""

FILLET = 6.0


def draw() -> int:
    """Draw the part; returns the number of its volume."""
    occ = gmsh.model.occ
    length, width, height = FOOT
    x, z, inner, outer = BORE
    foot = occ.addBox(0, 0, 0, length, width, height)
    # the upright plate narrows towards the boss
    corners = [(28.0, 0.0), (72.0, 0.0), (x + outer, z), (x - outer, z)]
    points = [occ.addPoint(px, width - WALL, pz) for px, pz in corners]
    lines = [occ.addLine(points[i], points[(i + 1) % 4]) for i in range(4)]
    plate = occ.addPlaneSurface([occ.addCurveLoop(lines)])
    upright = [tag for tag in occ.extrude([(2, plate)], 0, WALL, 0) if tag[0] == 3]
    boss = occ.addCylinder(x, width - BOSS, z, 0, BOSS, 0, outer)
    rib = occ.addPlaneSurface(
        [
            occ.addCurveLoop(
                [
                    occ.addLine(a, b)
                    for a, b in _around(
                        [
                            occ.addPoint(x - 5, 6, height - 1),
                            occ.addPoint(x - 5, width - WALL + 1, height - 1),
                            occ.addPoint(x - 5, width - WALL + 1, z - outer + 3),
                        ]
                    )
                ]
            )
        ]
    )
    ribs = [tag for tag in occ.extrude([(2, rib)], 10, 0, 0) if tag[0] == 3]
    (body,), _ = occ.fuse([(3, foot)], [*upright, (3, boss), *ribs])
    occ.synchronize()
    # round the upright edges of the foot and where the plate meets it
    edges = [tag for _, tag in gmsh.model.getEntities(1) if _is_rounded(tag)]
    (body,) = occ.fillet([body[1]], edges, [FILLET])
    holes = [(3, occ.addCylinder(x, -1, z, 0, width + 2, 0, inner))]
    holes += [(3, occ.addCylinder(bx, by, -1, 0, 0, height + 2, 5.0)) for bx, by in BOLTS]
    holes += [(3, occ.addCylinder(bx, by, height - 3, 0, 0, 4, 8.0)) for bx, by in BOLTS]
    ((_, volume),), _ = occ.cut([body], holes)
    occ.removeAllDuplicates()
    occ.synchronize()
    return int(volume)


def _around(points: list[int]) -> list[tuple[int, int]]:
    return list(zip(points, points[1:] + points[:1], strict=True))


def _box(dim: int, tag: int) -> tuple[float, ...]:
    return tuple(gmsh.model.getBoundingBox(dim, tag))


def _is_rounded(edge: int) -> bool:
    x0, y0, z0, x1, y1, z1 = _box(1, edge)
    length, width, height = FOOT
    small = 1e-3
    upright = x1 - x0 < small and y1 - y0 < small and z1 - z0 > height - small and z0 < small
    at_corner = (x0 < small or x0 > length - small) and (y0 < small or y0 > width - small)
    # the front edge of the plate's foot, in pieces on both sides of the rib
    at_root = all(abs(z - height) < small for z in (z0, z1))
    root = at_root and all(abs(y - (width - WALL)) < small for y in (y0, y1))
    return (upright and at_corner) or (root and x1 - x0 > 5)


def name_surfaces(volume: int) -> None:
    """Name the volume, the bolts' holes and the bore."""
    _, _, inner, _ = BORE
    bolts, bearing = [], []
    for _, surface in gmsh.model.getBoundary([(3, volume)], oriented=False):
        x0, y0, z0, x1, y1, z1 = _box(2, surface)
        if gmsh.model.getType(2, surface) != "Cylinder":
            continue
        if abs(z1 - z0 - 2 * inner) < 1e-3 and abs(y1 - y0) > BOSS - 1:
            bearing.append(surface)
        middle = (x0 + x1) / 2, (y0 + y1) / 2
        if any(math.dist(middle, bolt) < 1e-3 for bolt in BOLTS):
            bolts.append(surface)
    assert len(bearing) == 1, bearing
    assert len(bolts) == 8, bolts
    gmsh.model.addPhysicalGroup(3, [volume], name="bracket")
    gmsh.model.addPhysicalGroup(2, bolts, name="bolts")
    gmsh.model.addPhysicalGroup(2, bearing, name="bearing")


def main() -> None:
    """Draw, mesh, improve and write."""
    gmsh.initialize()
    gmsh.option.setNumber("General.Terminal", 0)
    gmsh.model.add("bracket")
    name_surfaces(draw())
    gmsh.option.setNumber("Mesh.MeshSizeMax", 3.2)
    gmsh.option.setNumber("Mesh.MeshSizeMin", 1.5)
    gmsh.option.setNumber("Mesh.MeshSizeFromCurvature", 16)
    gmsh.option.setNumber("Mesh.Algorithm3D", 10)
    gmsh.option.setNumber("Mesh.RandomSeed", 1)
    gmsh.option.setNumber("General.NumThreads", 1)
    gmsh.model.mesh.generate(3)
    gmsh.model.mesh.optimize("Netgen")
    gmsh.option.setNumber("Mesh.MshFileVersion", 4.1)
    gmsh.option.setNumber("Mesh.Binary", 0)
    gmsh.option.setNumber("Mesh.SaveAll", 0)
    target = Path(__file__).parent / "meshes" / "bracket.msh"
    target.parent.mkdir(exist_ok=True)
    gmsh.write(str(target))
    _, tags, _ = gmsh.model.mesh.getElements(3)
    print(f"{target.name}: {sum(map(len, tags))} tetrahedra, {target.stat().st_size} bytes")
    gmsh.finalize()


if __name__ == "__main__":
    main()

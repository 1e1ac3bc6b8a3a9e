"""Pictures of surfaces of tetrahedral meshes. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.bench.meshes import Mesh

__all__ = ["View", "surface_triangles"]

Array = npt.NDArray[Any]


def surface_triangles(mesh: Mesh) -> tuple[Array, Array]:
    """Divide the surface into triangles between the nodes of P1 or P2.

    Returns
    -------
    nodes
        ``[triangles, 3]``, oriented so that normals point outwards. At degree 2 every facet
        becomes four triangles.
    cells
        ``[triangles]``, the cell behind each.
    """
    cells, opposite = mesh.boundary
    nodes = mesh.facet_nodes(cells, opposite)
    x = mesh.points[mesh.cells[cells]]
    facet = np.array([[v for v in range(4) if v != o] for o in range(4)])[opposite]
    corners = np.take_along_axis(x, facet[:, :, None], axis=1)
    inside = np.take_along_axis(x, opposite[:, None, None], axis=1)[:, 0]
    normal = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    inwards = np.einsum("fd,fd->f", normal, inside - corners[:, 0]) > 0
    # edge nodes follow the vertices; UFC's edges are (1, 2), (0, 2), (0, 1)
    quarters = [(0, 5, 4), (5, 1, 3), (4, 3, 2), (3, 4, 5)]
    parts = quarters if mesh.degree == 2 else [(0, 1, 2)]
    triangles = np.stack([nodes[:, part] for part in parts], axis=1)
    triangles[inwards] = triangles[inwards][..., ::-1]
    return triangles.reshape(-1, 3), np.repeat(cells, len(parts))


class View:
    """A surface seen from a direction, in parallel projection.

    Triangles that face the viewer are painted from the back to the front. matplotlib's own 3D axes
    do the same but cannot leave out the far side.

    Parameters
    ----------
    points
        ``[n, 3]``.
    triangles
        ``[t, 3]``, normals outwards.
    azimuth, elevation
        Where the viewer stands, in degrees.
    """

    def __init__(
        self, points: Array, triangles: Array, azimuth: float = -62.0, elevation: float = 24.0
    ) -> None:
        a, e = np.radians([azimuth, elevation])
        towards = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
        right = np.array([-np.sin(a), np.cos(a), 0.0])
        up = np.cross(towards, right)
        corners = points[triangles]
        normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        facing = normals @ towards > 1e-9
        depth = (corners @ towards).max(axis=1)
        order = np.flatnonzero(facing)
        self.visible = order[np.argsort(depth[order], kind="stable")]
        """Triangles in the order in which they are painted."""
        self._outlines = np.stack([corners @ right, corners @ up], axis=-1)[self.visible]
        light = 0.55 * towards + 0.75 * up - 0.35 * right
        light /= np.linalg.norm(light)
        lambert = np.clip(normals[self.visible] @ light, 0.0, 1.0)
        self._shade = 0.66 + 0.34 * lambert

    def paint(self, axes: Any, colours: Array, edges: str | None = None) -> None:
        """Paint every triangle in one colour.

        Parameters
        ----------
        axes
            matplotlib axes.
        colours
            ``[t, 3]`` or ``[t, 4]``, RGB of all triangles, also the hidden ones.
        edges
            Colour of the mesh lines; none where not given.
        """
        from matplotlib.collections import PolyCollection

        shaded = colours[self.visible, :3] * self._shade[:, None]
        collection = PolyCollection(
            list(self._outlines),
            facecolors=shaded,
            edgecolors=edges if edges is not None else shaded,
            linewidths=0.15 if edges is not None else 0.3,
        )
        axes.add_collection(collection)
        axes.set_aspect("equal")
        axes.autoscale_view()
        axes.set_axis_off()


def paint_field(
    path: Path,
    view: View,
    values: Array,
    title: str,
    label: str,
    notes: Sequence[str] = (),
) -> None:
    """Write a picture of a scalar field on a surface.

    Parameters
    ----------
    path
        File to write.
    view
        The surface.
    values
        ``[t]``, one value a triangle.
    title, label
        Of the picture and of the colour bar.
    notes
        Lines below the picture.
    """
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure, axes = _figure(title, notes)
    scale = ScalarMappable(Normalize(values.min(), values.max()), mpl.colormaps["coolwarm"])
    view.paint(axes, np.asarray(scale.to_rgba(values)))
    bar = figure.colorbar(scale, ax=axes, shrink=0.75, pad=0.02, aspect=28)
    bar.set_label(label)
    bar.outline.set_linewidth(0.4)
    figure.savefig(path, dpi=170)


def paint_classes(
    path: Path, view: View, classes: Array, count: int, title: str, notes: Sequence[str] = ()
) -> None:
    """Write a picture of a surface whose triangles belong to ``count`` classes (colours).

    All classes on the left, three of them alone on the right. Parameters are those of
    :func:`paint_field`; ``classes`` is ``[t]``, 0 to ``count - 1``.
    """
    import matplotlib as mpl

    figure, (left, right) = _figure(title, notes, panels=2)
    # neighbouring numbers get hues that lie far apart
    numbers = np.arange(count)
    lightness = np.where(numbers % 2, 0.97, 0.8)
    hsv = np.column_stack([(numbers * 0.61803398875) % 1.0, np.full(count, 0.55), lightness])
    palette = mpl.colors.hsv_to_rgb(hsv)
    view.paint(left, palette[classes], edges="#303030")
    few = np.full((count, 3), 0.93)
    few[:3] = [mpl.colors.to_rgb(name) for name in ("#d55e00", "#0072b2", "#009e73")][:count]
    view.paint(right, few[classes], edges="#a0a0a0")
    left.set_title(f"all {count} colours", fontsize=11)
    right.set_title("three of them" if count > 3 else "the same", fontsize=11)
    figure.savefig(path, dpi=170)


def _figure(title: str, notes: Sequence[str], panels: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 6.6) if panels == 1 else (13.0, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    figure.suptitle(title, fontsize=14)
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=10, color="#404040")
    return figure, axes

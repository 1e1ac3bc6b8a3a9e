"""Index tables for tests: structured simplex meshes, random maps, one-cell periodic meshes.

The meshes are those of :mod:`pyop3_mlir.bench.meshes`, as plain tuples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyop3_mlir.bench import meshes

__all__ = ["one_cell_periodic", "periodic_interval", "random_map", "tetrahedra", "triangles"]

Array = np.ndarray[Any, Any]


def triangles(n: int, degree: int = 1) -> tuple[Array, Array, Array, int]:
    """Divide the unit square into ``2 n**2`` triangles.

    Returns
    -------
    coordinates
        ``float64[vertices, 2]``.
    cell_vertices
        ``int32[cells, 3]``, ascending in each cell.
    cell_nodes
        ``int32[cells, nodes of a cell]`` of P_degree, in FIAT's order.
    node_count
        Number of nodes.
    """
    return _arrays(meshes.triangles(n, degree))


def tetrahedra(n: int, degree: int = 1) -> tuple[Array, Array, Array, int]:
    """Divide the unit cube into ``6 n**3`` tetrahedra; returns what :func:`triangles` does."""
    return _arrays(meshes.tetrahedra(n, degree))


def _arrays(mesh: meshes.Mesh) -> tuple[Array, Array, Array, int]:
    return mesh.points, mesh.cells, mesh.nodes, mesh.node_count


def periodic_interval(n: int, degree: int = 1) -> Array:
    """``int32[n, degree + 1]``: P_degree on a circle; with n = 1 the end nodes coincide."""
    cells = np.arange(n)[:, None] * degree
    return np.asarray((cells + np.arange(degree + 1)) % (n * degree), dtype=np.int32)


def one_cell_periodic(arity: int) -> Array:
    """``int32[1, arity]``: one cell that touches node 0 through every position."""
    return np.zeros((1, arity), dtype=np.int32)


def random_map(
    size: int, arity: int, targets: int, seed: int, negative: float = 0.0, dtype: Any = np.int32
) -> Array:
    """``dtype[size, arity]`` of uniformly random targets, a fraction ``negative`` of them -1."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, max(targets, 1), size=(size, arity)).astype(dtype)
    values[rng.random((size, arity)) < negative] = -1
    return values

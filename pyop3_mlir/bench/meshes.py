"""Simplex meshes with Lagrange nodes, as plain arrays, for benchmarks, demos and tests.

Every cell lists its vertices in ascending order of their numbers. An edge or a face is then seen in
the same direction from each of its cells, so that the nodes of P1 to P3 match without orientations
(M. E. Rognes, R. C. Kirby, A. Logg, "Efficient assembly of H(div) and H(curl) conforming finite
elements", SIAM J. Sci. Comput. 31, 2009, section 5).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "Mesh", "aligned", "tetrahedra", "triangles"]

ALIGNMENT = 64
"""Alignment, in bytes, of arrays that devices on the host can use in place."""


def aligned(shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
    """Make an array of zeros that starts at a multiple of :data:`ALIGNMENT` bytes.

    Parameters
    ----------
    shape
        Any shape.
    dtype
        Any dtype with a fixed item size.
    """
    kind = np.dtype(dtype)
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(extents)
    raw = np.zeros(count * kind.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count * kind.itemsize].view(kind).reshape(extents)


def _aligned_copy(values: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    result = aligned(np.shape(values), dtype)
    result[...] = values
    return result


@dataclass(frozen=True, eq=False)
class Mesh:
    """A mesh of triangles or tetrahedra with the nodes of P_degree.

    Attributes
    ----------
    points
        ``float64[vertices, D]``, coordinates of the vertices.
    cells
        ``int32[n, D + 1]``, vertices of each cell, ascending.
    degree
        Degree of the Lagrange element, at least 1 and at most 3.
    numbering
        ``int64``: the number here of each point that :meth:`build` was given, -1 where it was
        dropped; None where the numbers are the same.
    """

    points: npt.NDArray[np.float64]
    cells: npt.NDArray[np.int32]
    degree: int = 1
    numbering: npt.NDArray[np.int64] | None = None

    @classmethod
    def build(
        cls, points: npt.ArrayLike, cells: npt.ArrayLike, degree: int = 1, reorder: bool = False
    ) -> Mesh:
        """Make a mesh of any arrays of points and cells.

        Parameters
        ----------
        points
            ``[vertices, >= D]``; surplus columns (gmsh's z in the plane) are cut off.
        cells
            ``[n, D + 1]``, in any order of vertices.
        degree
            Degree of the Lagrange nodes.
        reorder
            Renumber the vertices by reverse Cuthill-McKee and sort the cells by their vertices, so
            that cells which follow each other share nodes. Vertices of no cell are dropped.

        Raises
        ------
        ValueError
            Where the shapes make no simplex mesh or a cell names a vertex that does not exist.
        """
        vertices = np.array(cells, dtype=np.int64)
        if vertices.ndim != 2 or vertices.shape[1] not in (3, 4):
            raise ValueError(f"cells: expected [n, 3] or [n, 4], got shape {vertices.shape}")
        where = np.array(points, dtype=np.float64)[:, : vertices.shape[1] - 1]
        if vertices.size and not 0 <= vertices.min() <= vertices.max() < len(where):
            raise ValueError(f"cells: vertex numbers must be within 0 to {len(where) - 1}")
        numbering = None
        if reorder:
            numbering, where, vertices = _reorder(where, vertices)
        vertices.sort(axis=1)
        where, cells = _aligned_copy(where, np.float64), _aligned_copy(vertices, np.int32)
        return cls(where, cells, degree, numbering)

    def __post_init__(self) -> None:
        if self.degree not in (1, 2, 3):
            raise ValueError(f"degree {self.degree}: P1, P2 and P3 need no orientations, others do")

    def with_degree(self, degree: int) -> Mesh:
        """Put the nodes of another degree on the same cells."""
        return Mesh(self.points, self.cells, degree, self.numbering)

    @property
    def dimension(self) -> int:
        """2 for triangles, 3 for tetrahedra."""
        return int(self.cells.shape[1]) - 1

    @property
    def cell(self) -> str:
        """``"triangle"`` or ``"tetrahedron"``."""
        return "triangle" if self.dimension == 2 else "tetrahedron"

    @property
    def size(self) -> int:
        """Number of cells."""
        return int(self.cells.shape[0])

    @property
    def nodes(self) -> npt.NDArray[np.int32]:
        """``int32[n, nodes of a cell]``, in FIAT's order of the basis functions.

        At degree 1 these are the cells' vertices; nodes of higher degree have numbers of their own.
        """
        return self._numbering[0]

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return self._numbering[1]

    @cached_property
    def _numbering(self) -> tuple[npt.NDArray[np.int32], int]:
        if self.degree == 1:
            # one map serves coordinates and P1, as in Firedrake
            return self.cells, len(self.points)
        columns: list[npt.NDArray[np.int64]] = []
        count = 0
        for dim, per_entity in enumerate(_nodes_per_entity(self.dimension, self.degree)):
            if not per_entity:
                continue
            subsets = _entities(self.dimension, dim)
            keys = self._keys(self.cells[:, np.array(subsets)])
            numbers = np.unique(keys, return_inverse=True)[1].reshape(keys.shape)
            columns.extend(
                count + numbers[:, entity] * per_entity + node
                for entity in range(len(subsets))
                for node in range(per_entity)
            )
            if numbers.size:
                count += (int(numbers.max()) + 1) * per_entity
        nodes = np.stack(columns, axis=1)
        # the order in which the cells meet them: neighbours in the loop are neighbours in memory
        _, first, inverse = np.unique(nodes, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return _aligned_copy(rank[inverse].reshape(nodes.shape), np.int32), count

    @cached_property
    def node_points(self) -> npt.NDArray[np.float64]:
        """``float64[nodes, D]``, coordinates of the nodes."""
        from FIAT import Lagrange
        from FIAT.reference_element import ufc_simplex

        element = Lagrange(ufc_simplex(self.dimension), self.degree)
        reference = np.array([next(iter(f.get_point_dict())) for f in element.dual_basis()])
        barycentric = np.column_stack([1 - reference.sum(axis=1), reference])
        result = np.empty((self.node_count, self.dimension))
        result[self.nodes] = np.einsum("iv,nvd->nid", barycentric, self.points[self.cells])
        return result

    @cached_property
    def boundary(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Facets of only one cell: the cell, and the vertex of it that lies opposite (0 to D)."""
        facets = _entities(self.dimension, self.dimension - 1)
        keys = self._keys(self.cells[:, np.array(facets)])
        _, first, count = np.unique(keys, return_index=True, return_counts=True)
        return np.divmod(np.sort(first[count == 1]), len(facets))

    def facet_nodes(
        self, cells: npt.NDArray[np.integer[Any]], opposite: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.int32]:
        """Nodes ``[facets, nodes of a facet]`` of facets given as :attr:`boundary` gives them."""
        from FIAT import Lagrange
        from FIAT.reference_element import ufc_simplex

        dimension = self.dimension
        closure = Lagrange(ufc_simplex(dimension), self.degree).entity_closure_dofs()
        local = np.array([closure[dimension - 1][facet] for facet in range(dimension + 1)])
        return np.asarray(self.nodes[np.asarray(cells)[:, None], local[np.asarray(opposite)]])

    def _keys(self, tuples: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Integers that are equal where tuples of vertices (the last axis) are."""
        keys = tuples[..., 0].astype(np.int64)
        for axis in range(1, tuples.shape[-1]):
            # numbered densely after each step so that keys never overflow
            pairs = keys * len(self.points) + tuples[..., axis]
            keys = np.unique(pairs, return_inverse=True)[1].reshape(pairs.shape)
        return keys

    @cached_property
    def volumes(self) -> npt.NDArray[np.float64]:
        """``float64[n]``, area or volume of each cell."""
        x = self.points[self.cells]
        edges = x[:, 1:] - x[:, :1]
        return np.asarray(np.abs(np.linalg.det(edges)) / math.factorial(self.dimension))


def _entities(dimension: int, dim: int) -> list[tuple[int, ...]]:
    """Vertices of the entities of ``dim``, in the order of UFC, which is FIAT's."""
    if dim == 0:
        return [(v,) for v in range(dimension + 1)]
    # UFC numbers an entity by the vertices that it leaves out
    return sorted(
        itertools.combinations(range(dimension + 1), dim + 1),
        key=lambda kept: [v for v in range(dimension + 1) if v not in kept],
    )


def _nodes_per_entity(dimension: int, degree: int) -> list[int]:
    return [1 if dim == 0 else math.comb(degree - 1, dim) for dim in range(dimension + 1)]


def _reorder(
    points: npt.NDArray[np.float64], cells: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    import scipy.sparse
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    used, compact = np.unique(cells, return_inverse=True)
    compact = compact.reshape(cells.shape)
    pairs = np.array(list(itertools.permutations(range(cells.shape[1]), 2)))
    rows, columns = compact[:, pairs[:, 0]].ravel(), compact[:, pairs[:, 1]].ravel()
    graph = scipy.sparse.csr_array(
        (np.ones(rows.size, np.int8), (rows, columns)), shape=(len(used), len(used))
    )
    order = reverse_cuthill_mckee(graph, symmetric_mode=True)
    number = np.empty(len(used), np.int64)
    number[order] = np.arange(len(used))
    numbering = np.full(len(points), -1, np.int64)
    numbering[used] = number
    renumbered = np.sort(number[compact], axis=1)
    return numbering, points[used[order]], renumbered[np.lexsort(renumbered.T[::-1])]


def _box(dimension: int, n: int, degree: int, distort: float) -> Mesh:
    """Kuhn's subdivision of the unit box: every cube in ``dimension!`` simplices."""
    axis = np.linspace(0.0, 1.0, n + 1)
    points = np.stack(np.meshgrid(*[axis] * dimension, indexing="ij"), axis=-1)
    strides = np.array([(n + 1) ** (dimension - 1 - d) for d in range(dimension)])
    corners = np.stack(np.meshgrid(*[np.arange(n)] * dimension, indexing="ij"), axis=-1) @ strides
    paths = np.array(
        [np.cumsum([0, *strides[list(path)]]) for path in itertools.permutations(range(dimension))]
    )
    cells = (corners.reshape(-1, 1, 1) + paths).reshape(-1, dimension + 1)
    # smooth, zero on the boundary, and small enough to keep every cell's orientation
    bump = distort * np.prod(np.sin(np.pi * points), axis=-1, keepdims=True)
    shift = np.sin(2.3 * points[..., ::-1] + np.arange(dimension))
    return Mesh.build((points + bump * shift).reshape(-1, dimension), cells, degree)


def triangles(n: int, degree: int = 1, distort: float = 0.1) -> Mesh:
    """Divide the unit square into ``2 n**2`` triangles, moved by a smooth map inside.

    Parameters
    ----------
    n
        Squares along each side.
    degree
        Degree of the Lagrange nodes.
    distort
        Size of the displacement; 0 for a regular mesh.
    """
    return _box(2, n, degree, distort)


def tetrahedra(n: int, degree: int = 1, distort: float = 0.1) -> Mesh:
    """Divide the unit cube into ``6 n**3`` tetrahedra, moved by a smooth map inside.

    Parameters are those of :func:`triangles`.
    """
    return _box(3, n, degree, distort)

"""PETSc's matrices as targets of loops of pyop3.

A sequential matrix gets element matrices in place, by a table of positions in its values; for one
that is distributed over processes they are computed in batches that PETSc adds up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.frontends.petsc import MatrixValues
from pyop3_mlir.frontends.pyop3_tables import Matrix, Place, shared_table
from pyop3_mlir.parloop import INC, Access, Argument, IndexTable, Kind

__all__ = ["Elements", "bind_matrix"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Elements:
    """Element matrices that PETSc adds up: a matrix that is distributed over processes.

    Attributes
    ----------
    mat
        PETSc's matrix.
    matrix
        Where they go.
    values
        ``[iterations of a batch, entries]``, by rows.
    access
        INC or WRITE.
    """

    mat: Any
    matrix: Matrix
    values: Array
    access: Access

    def flush(self, start: int, stop: int) -> None:
        """Hand the element matrices of iterations ``[start, stop)`` over."""
        from petsc4py import PETSc

        mode = PETSc.InsertMode.ADD_VALUES if self.access is INC else PETSc.InsertMode.INSERT_VALUES
        rows, cols = self.matrix.rows[start:stop], self.matrix.cols[start:stop]
        shape = (stop - start, rows.shape[1], cols.shape[1])
        values = self.values[: stop - start].reshape(shape)
        self.mat.setValuesLocalRCV(rows, cols, values, addv=mode)


def bind_matrix(p: Place, mat: Any, batch: int) -> tuple[Argument, MatrixValues | Elements]:
    """The argument of a loop that assembles a matrix, and what finishes its work.

    Parameters
    ----------
    p
        Where element matrices go.
    mat
        A ``petsc4py.PETSc.Mat``.
    batch
        Element matrices that are computed before PETSc gets them, where it has to.

    Raises
    ------
    UnsupportedLoopError
        For a type of matrix that cannot be assembled like this.
    """
    assert p.matrix is not None
    name = str(p.view.buffer.name)
    kind = mat.getType()
    if kind in ("seqaij", "seqbaij", "seqdense"):
        values = MatrixValues(mat)
        table, rows = _positions(p.matrix, mat, values, name)
        return Argument.matrix(values.array, p.access, table, rows, name=name), values
    if kind not in ("mpiaij", "mpibaij", "mpidense"):
        raise UnsupportedLoopError(f"a matrix of type {kind}")
    matrix = p.matrix
    n = len(matrix.rows)
    array = np.zeros((batch, p.components))
    at = np.arange(n, dtype=np.int64) % batch
    slots = np.empty(p.components, np.int64)
    slots[matrix.slots] = np.arange(p.components)
    table = IndexTable(
        (at[:, None] * p.components + slots).astype(np.int32), array.size, name="element matrices"
    )
    # a kernel may give several contributions to an entry, so they are added to zeros
    argument = Argument(array.reshape(-1), INC, Kind.INDIRECT, table, 1, 1, name=name)
    kind = mat.getLGMap()[0].indices.dtype
    sides = [np.ascontiguousarray(side, dtype=kind) for side in (matrix.rows, matrix.cols)]
    matrix = replace(matrix, rows=sides[0], cols=sides[1])
    return argument, Elements(mat, matrix, array, p.access)


def _positions(
    matrix: Matrix, mat: Any, values: MatrixValues, name: str
) -> tuple[IndexTable, IndexTable]:
    """Where the entries of element matrices lie among the values, and the table of rows.

    Both are kept with the table of rows, which is the same object for equal contents.
    """
    from pyop3_mlir.planning import csr_positions

    sides = []
    for side, lgmap in zip((matrix.rows, matrix.cols), mat.getLGMap(), strict=True):
        indices = lgmap.indices
        mapped = indices[np.maximum(side, 0)] if indices.size else np.full(side.shape, -1)
        sides.append(np.where(side < 0, -1, np.maximum(mapped, -1)).astype(np.int32))
    height, width = mat.getLocalSize()
    blocks = [1, 1]
    if values.type == "seqbaij":
        blocks = [values.block_size] * 2
        if not all(_fills_blocks(side, values.block_size) for side in sides):
            raise UnsupportedLoopError(f"{name}: single components of a matrix that stores blocks")
    elif values.type == "seqaij":
        extents = (height, width)
        blocks = [_node_size(s, extent) for s, extent in zip(sides, extents, strict=True)]
    rows, cols = (
        _node_table(side, size, extent, name)
        for side, size, extent in zip(sides, blocks, (height, width), strict=True)
    )
    if values.pattern is None:
        positions = _dense_positions(rows, cols, height, width, name)
    else:
        positions = csr_positions(
            *values.pattern,
            rows,
            cols,
            row_components=blocks[0],
            col_components=blocks[1],
            storage="baij" if values.type == "seqbaij" else "aij",
            name=name,
        )
    slots = matrix.slots
    if (slots == np.arange(len(slots))).all():
        return positions, rows
    key = ("in the order of slots", slots.tobytes())
    found = positions.plans.get(key)
    if found is None:
        ordered = np.empty_like(positions.values)
        ordered[:, slots] = positions.values
        found = IndexTable(ordered, positions.bound, positions.allow_negative, name)
        positions.plans[key] = found
    return found, rows


def _dense_positions(
    rows: IndexTable, cols: IndexTable, height: int, width: int, name: str
) -> IndexTable:
    """As ``csr_positions``, in the values of a dense matrix, which lie by columns."""
    key = ("dense positions", height, width, cols.fingerprint)
    found = rows.plans.get(key)
    if found is None:
        i, j = rows.values[:, :, None].astype(np.int64), cols.values[:, None, :].astype(np.int64)
        at = np.where((i < 0) | (j < 0), -1, i + height * j)
        kind = np.int32 if height * width <= np.iinfo(np.int32).max else np.int64
        negative = rows.allow_negative or cols.allow_negative
        values = at.reshape(len(at), -1).astype(kind)
        found = rows.plans[key] = IndexTable(values, height * width, negative, name)
    result: IndexTable = found
    return result


def _node_table(side: Array, size: int, extent: int, name: str) -> IndexTable:
    firsts = side[:, ::size]
    return shared_table(np.where(firsts < 0, -1, firsts // size), extent // size, name)


def _fills_blocks(side: Array, size: int) -> bool:
    n, count = side.shape
    if count % size:
        return False
    blocks = side.reshape(n, count // size, size)
    firsts = blocks[:, :, :1]
    whole = (blocks == firsts + np.arange(size)) & (firsts % size == 0)
    return bool((whole | (blocks < 0) & (firsts < 0)).all())


def _node_size(side: Array, extent: int) -> int:
    """Components of a node: the largest number for which all entries come in such blocks.

    ``extent`` is the number of all rows or columns: nodes of other sizes may lie among them.
    """
    for size in range(min(side.shape[1], 16), 1, -1):
        if extent % size == 0 and _fills_blocks(side, size):
            return size
    return 1

"""What loops of pyop3 are made from in tests: kernels, data, maps and matrices."""

from __future__ import annotations

from typing import Any

import loopy as lp
import numpy as np
import pyop3 as op3
from immutabledict import immutabledict as idict

rng = np.random.default_rng(7)


def function(
    code: str, arguments: list[tuple[str, tuple[int, ...], Any]], domains: str = "", name: str = "k"
) -> Any:
    """A pyop3 function from loopy instructions; arguments are (name, shape, intent)."""
    reads = (op3.READ, op3.RW, op3.INC, op3.MIN_RW, op3.MAX_RW)
    kernel = lp.make_kernel(
        domains.split(";") if domains else [],
        code,
        [
            lp.GlobalArg(
                n, op3.ScalarType, shape, is_input=intent in reads, is_output=intent != op3.READ
            )
            for n, shape, intent in arguments
        ],
        name=name,
        target=lp.CWithGNULibcTarget(),
        lang_version=(2018, 2),
    )
    return op3.Function(kernel, [intent for _, _, intent in arguments])


def copy(*shape: int) -> Any:
    """Copies x to y."""
    inames = [f"i{k}" for k in range(len(shape))]
    domains = ";".join(f"{{[{i}]: 0<={i}<{s}}}" for i, s in zip(inames, shape, strict=True))
    at = ",".join(inames)
    return function(
        f"y[{at}] = x[{at}]", [("x", shape, op3.READ), ("y", shape, op3.WRITE)], domains, "copy"
    )


def add(n: int = 1) -> Any:
    """Adds the n entries of x to y."""
    return function(
        "y[0] = y[0] + x[i]",
        [("x", (n,), op3.READ), ("y", (1,), op3.INC)],
        f"{{[i]: 0<=i<{n}}}",
        "add",
    )


def spread(n: int) -> Any:
    """Adds x, times the number of the entry, to each of the n entries of y."""
    return function(
        "y[i] = y[i] + x[0]*(i+1)",
        [("x", (1,), op3.READ), ("y", (n,), op3.INC)],
        f"{{[i]: 0<=i<{n}}}",
        "spread",
    )


def dat(axes: Any, values: Any = None, name: str | None = None) -> Any:
    """A Dat, of random numbers unless values are given."""
    tree = axes.as_tree() if hasattr(axes, "as_tree") else axes
    values = rng.random(int(tree.size)) if values is None else np.asarray(values, op3.ScalarType)
    return op3.Dat(axes, data=values.reshape(-1).copy(), name=name)


def integers(axes: Any, values: Any, **kwargs: Any) -> Any:
    """A Dat of indices."""
    return op3.Dat(axes, data=np.asarray(values, op3.IntType).reshape(-1).copy(), **kwargs)


def map_(source: Any, target: Any, values: np.ndarray, name: str) -> Any:
    """A map from the points of an axis to those of another."""
    axes = op3.AxisTree.from_iterable([source, op3.Axis(values.shape[1], name)])
    component = op3.TabulatedMapComponent(
        target.label, target.component.label, integers(axes, values), label=None
    )
    return op3.Map({idict({source.label: source.component.label}): [[component]]}, name=name)


def dat_of_shape(axis: Any, depth: int) -> Any:
    """A Dat of zeros with 2 ** depth entries a point."""
    inner = [op3.Axis(2, f"out{k}") for k in range(depth)]
    axes = op3.AxisTree.from_iterable([axis, *inner])
    return dat(axes, np.zeros(axis.size * 2**depth))


def lengths(axes: Any, counts: list[int]) -> Any:
    """How many entries a ragged axis has for each point."""
    dat_ = integers(axes, counts, buffer_kwargs={"constant": True})
    # pyop3 does not take the Dat itself here: "Dat.concretize() missing ... 'linear'"
    return op3.as_linear_buffer_expression(dat_)


def ragged_axes() -> Any:
    """Five points with 3, 2, 1, 3 and 2 entries."""
    root = op3.Axis(5, "points")
    length = op3.AxisComponent(lengths(root, [3, 2, 1, 3, 2]))
    return op3.AxisTree.from_nest({root: op3.Axis([length], "inner")})


def matrix_for(loop_index: Any, rows: Any, row: Any, cols: Any, col: Any) -> Any:
    """A matrix with the entries that a loop accesses as ``[row, col]``."""
    sparsity = op3.Mat.sparsity(rows, cols)
    op3.loop(loop_index, op3.Assignment(sparsity[row, col], 666, "write"), eager=True)
    sparsity.assemble()
    return op3.Mat(rows, cols, sparsity.buffer.materialize())


def matrix_setup() -> tuple[Any, Any, np.ndarray, Any]:
    """Cells, their map to vertices, its table and a matrix that has entries for it."""
    cells, vertices = op3.Axis(9, "cells"), op3.Axis(10, "vertices")
    table = np.array([[i, i + 1] for i in range(9)])
    cone = map_(cells, vertices, table, "cone")
    c, tree = cells.iter(), vertices.as_tree()
    return cells, cone, table, matrix_for(c, tree, cone(c), tree, cone(c))

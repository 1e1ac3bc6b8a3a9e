"""What of a mesh the best schedule depends on, coarse enough that similar meshes share a result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pyop3_mlir.parloop import IndexTable, Parloop

__all__ = ["connectivity"]

# Rows that are looked at: a sample tells the bandwidth and the degrees of a large mesh.
_SAMPLE = 1 << 18


def connectivity(loop: Parloop) -> dict[str, Any]:
    """Describe sizes, arities, degrees and bandwidths of a loop, for the key of a tuning result.

    Numbers are rounded to powers of two (sizes to half steps), so the ranks of an MPI program, or a
    mesh before and after it moved, share a result, and a mesh and its refinement do not.

    Returns
    -------
    dict
        JSON can hold it; equal for loops that should share a result.
    """
    return {
        "iterations": _step(loop.iteration_set.size, 2),
        "subset": loop.iteration_set.entities is not None,
        "tables": [_of_table(table) for table in loop.tables],
    }


def _of_table(table: IndexTable) -> dict[str, Any]:
    found: dict[str, Any] | None = table.plans.get("connectivity")
    if found is None:
        found = table.plans["connectivity"] = _measure(table)
    return found


def _measure(table: IndexTable) -> dict[str, Any]:
    values = table.values
    described = {"arity": table.arity, "bound": _step(table.bound, 2)}
    if values.size == 0:
        return described
    # a run of neighbouring rows: every third row would look less local than it is
    begin = max(0, (table.size - _SAMPLE) // 2)
    sample = values[begin : begin + _SAMPLE]
    kept = sample >= 0
    used = sample[kept]
    if used.size == 0:
        return {**described, "dropped": True}
    low = np.where(kept, sample, used.max()).min(axis=1)
    high = np.where(kept, sample, used.min()).max(axis=1)
    spread = float(np.mean(np.maximum(high - low, 0)))
    degrees = np.bincount(used - used.min())
    degrees = degrees[degrees > 0]
    classes = np.bincount(np.floor(np.log2(degrees)).astype(np.int64), minlength=1)
    # eighths of the targets that have this degree, by power of two
    histogram = np.rint(8 * classes / degrees.size).astype(int).tolist()
    return {
        **described,
        "dropped": not bool(kept.all()),
        "bandwidth": _step(spread, 1),
        "degrees": histogram,
    }


def _step(value: float, steps: int) -> int:
    """Return log2 of ``value + 1``, rounded to 1/``steps``, as a whole number of steps."""
    return round(steps * math.log2(value + 1))

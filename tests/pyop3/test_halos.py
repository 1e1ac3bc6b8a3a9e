"""Loops of pyop3 itself on several processes: its halo exchanges go on as without the engine.

A ring of cells, four on each process, and one vertex before each of them. The vertex behind the
last cell of a process belongs to the next one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyop3.insn.exec", reason="pyop3 is in no registry and not installed here")
import pyop3 as op3
from mpi4py import MPI
from pyop3.sf import StarForest
from pyop3_loops import add, copy, dat, function, map_, spread

parallel = pytest.mark.parallel(nprocs=[2, 3])
CELLS = 4


def ring() -> tuple[Any, Any, Any]:
    """Cells, vertices and the map between them, of this process."""
    comm = MPI.COMM_WORLD
    ghost = np.array([CELLS], op3.IntType)
    owner = np.array([[(comm.rank + 1) % comm.size, 0]], op3.IntType)
    forest = StarForest.from_graph(CELLS + 1, ghost, owner, comm)
    vertices = op3.Axis([op3.AxisComponent(CELLS + 1, None, sf=forest)], "vertices")
    cells = op3.Axis(CELLS, "cells")
    table = np.array([[i, i + 1] for i in range(CELLS)])
    return cells, vertices, map_(cells, vertices, table, "cone")


def everywhere(own: np.ndarray) -> np.ndarray:
    """What all processes own."""
    return np.concatenate(MPI.COMM_WORLD.allgather(np.array(own[:CELLS])))


def own(values: np.ndarray) -> np.ndarray:
    """What this process owns of it."""
    first = CELLS * MPI.COMM_WORLD.rank
    return values[first : first + CELLS]


def rank_dependent(axis: Any) -> Any:
    """A Dat of numbers that differ on all processes, wrong ones in ghosts."""
    x = dat(axis, np.zeros(axis.as_tree().local_size))
    x.buffer.data_wo[...] = np.random.default_rng(MPI.COMM_WORLD.rank).random(x.buffer.size)
    return x


@parallel
def test_values_of_ghosts_arrive_before_the_loop(engine):
    cells, vertices, cone = ring()
    x, y = rank_dependent(vertices), dat(cells, np.zeros(CELLS))
    values = everywhere(x.buffer._current_device_array)
    op3.loop(c := cells.iter(), add(2)(x[cone(c)], y[c]), eager=True)
    expected = own(values + np.roll(values, -1))
    assert np.allclose(y.buffer.data_ro, expected, rtol=1e-14)
    engine.check("add")


@parallel
def test_values_are_exchanged_again_when_they_have_changed(engine):
    cells, vertices, cone = ring()
    x, y = rank_dependent(vertices), dat(cells, np.zeros(CELLS))
    loop = op3.loop(c := cells.iter(), add(2)(x[cone(c)], y[c]))
    loop()
    x.buffer.data_wo[...] = 10 * np.random.default_rng(MPI.COMM_WORLD.rank).random(CELLS + 1)
    y.buffer.data_wo[...] = 0
    values = everywhere(x.buffer._current_device_array)
    loop()
    assert np.allclose(y.buffer.data_ro, own(values + np.roll(values, -1)), rtol=1e-14)
    engine.check("add")


@parallel
def test_increments_of_ghosts_reach_their_owners(engine):
    cells, vertices, cone = ring()
    x, y = rank_dependent(cells), dat(vertices, np.zeros(CELLS + 1))
    values = everywhere(x.buffer.data_ro)
    loop = op3.loop(c := cells.iter(), spread(2)(x[c], y[cone(c)]))
    # the second one adds to ghosts that have not been sent yet
    loop()
    loop()
    expected = 2 * (values + 2 * np.roll(values, 1))
    found = y.buffer.data_ro
    assert np.allclose(found[:CELLS], own(expected), rtol=1e-14)
    assert np.isclose(found[CELLS], np.roll(expected, -CELLS * (MPI.COMM_WORLD.rank + 1))[0])
    engine.check("spread")


@parallel
def test_largest_values_are_those_of_pyop3(engine):
    # not compared with numpy: pyop3 itself does not send what a loop leaves in ghosts by MAX_RW
    cells, vertices, cone = ring()
    x = rank_dependent(cells)
    k = function(
        "y[i] = fmax(y[i], x[0])",
        [("y", (2,), op3.MAX_RW), ("x", (1,), op3.READ)],
        "{[i]: 0<=i<2}",
        "largest",
    )

    def found() -> np.ndarray:
        y = dat(vertices, np.full(CELLS + 1, 0.25))
        op3.loop(c := cells.iter(), k(y[cone(c)], x[c]), eager=True)
        return y.buffer.data_ro.copy()

    # the engine's own result, where loops are verified pyop3's is kept
    engine.backend.options = replace(engine.backend.options, verify=False)
    ours = found()
    engine.backend.detach()
    expected = found()
    engine.backend.attach()
    assert np.array_equal(ours, expected)
    assert (ours[:CELLS] >= x.buffer.data_ro).all()
    engine.check("largest")


@parallel
def test_what_is_written_reaches_the_ghosts(engine):
    cells, vertices, _ = ring()
    first = map_(cells, vertices, np.arange(CELLS)[:, None], "first")
    x, y = rank_dependent(cells), dat(vertices, np.zeros(CELLS + 1))
    values = everywhere(x.buffer.data_ro)
    op3.loop(c := cells.iter(), copy(1)(x[c], y[first(c)]), eager=True)
    found = y.buffer.data_ro
    assert np.array_equal(found[:CELLS], own(values))
    assert found[CELLS] == np.roll(values, -CELLS * (MPI.COMM_WORLD.rank + 1))[0]
    engine.check("copy")

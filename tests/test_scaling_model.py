"""The model of parallel efficiency: what it counts, and that it runs."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scaling_model.py"


@pytest.fixture(scope="module")
def model():
    specification = importlib.util.spec_from_file_location("scaling_model", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["scaling_model"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["scaling_model"]


def counted(table, owner):
    """Cells, cells with ghosts, ghosts and messages of the largest part, with sets."""
    owners = {}
    for cell, process in zip(table.tolist(), owner.tolist(), strict=True):
        for node in cell:
            owners[node] = min(owners.get(node, process), process)
    largest = np.zeros(4, int)
    links = {
        (process, owners[node])
        for cell, process in zip(table.tolist(), owner.tolist(), strict=True)
        for node in cell
        if owners[node] != process
    }
    for number in set(owner.tolist()):
        cells = table[owner == number].tolist()
        border = [cell for cell in cells if any(owners[node] != number for node in cell)]
        ghosts = {node for cell in cells for node in cell if owners[node] != number}
        messages = sum(number in link for link in links)
        largest = np.maximum(largest, [len(cells), len(border), len(ghosts), messages])
    return largest.tolist()


def in_blocks(model, n, cuts):
    """The tetrahedra of a cube and the blocks that they are in; lower blocks have lower numbers."""
    table = model.kuhn_cube(n)
    corner = table.min(axis=1)
    place = np.stack([corner // (n + 1) ** k % (n + 1) for k in range(3)])
    number = np.zeros(len(table), int)
    for axis in range(3):
        number = number * cuts[axis] + place[axis] * cuts[axis] // n
    return table, number


def test_tetrahedra_fill_the_cube(model):
    table = model.kuhn_cube(2)
    points = np.array(list(itertools.product(range(3), repeat=3)), float)[:, ::-1]
    edges = points[table[:, 1:]] - points[table[:, :1]]
    np.testing.assert_allclose(np.abs(np.linalg.det(edges)), 1)
    assert len(np.unique(np.sort(table, axis=1), axis=0)) == 48


@pytest.mark.parametrize("cuts", [(3, 3, 3), (3, 3, 1), (3, 1, 1)])
def test_counts_of_blocks(model, cuts):
    n = 6
    table, owner = in_blocks(model, n, cuts)
    part = model.block([n // cut for cut in cuts], cuts, degree=1)
    found = [part.cells, part.border, part.ghosts, part.messages]
    assert found == counted(table, owner)


def test_counts_of_any_partition(model):
    table = model.kuhn_cube(3)
    owner = np.random.default_rng(3).integers(5, size=len(table))
    found = model.statistics(table, owner)
    keys = ("cells", "border", "ghosts", "messages")
    assert [found[key] for key in keys] == counted(table, owner)


def test_no_communication_no_loss(model):
    shape = model.Shape(1.0, 1.0, 1.0, 1.0)
    machine = model.Machine("ideal", 1e-8, 0.0, 0.0, 0.0, 1e30)
    np.testing.assert_allclose(model.weak(machine, shape, 1e6), 1, rtol=1e-9)
    np.testing.assert_allclose(model.strong(machine, shape, 1e8), 1, rtol=1e-9)


def test_measured_partitions(model, tmp_path):
    pytest.importorskip("gmsh")
    model.main(["measure", str(tmp_path / "p.json"), "--sizes", "6", "--processes", "8"])
    shape = model.Shape.read(tmp_path / "p.json")
    assert 1 <= shape.cells < 1.1
    assert 1 <= shape.ghosts < 3


def test_plot(model, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    row = {"case": model.CASE, "cells": 20_000, "ours_s": 4e-4, "core_s": 3e-4}
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{**row, "ranks": 1}, {**row, "ranks": 2}]))
    model.main(["plot", str(tmp_path / "model.png"), "--rows", str(rows)])
    assert (tmp_path / "model.png").read_bytes()[1:4] == b"PNG"
    output = capsys.readouterr().out
    assert "strong, 1e+08 cells on 1,024" in output
    assert "20,000 cells on 2 processes: predicted" in output

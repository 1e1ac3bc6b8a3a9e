"""A model of the parallel efficiency of a matrix-free action on up to 1,024 devices.

It predicts: nothing was measured on more than a few cores, and nothing on several GPUs.

The problem is P2 Laplace on a cube of tetrahedra, six to a small cube, cut into equal blocks. One
call on p devices, with N cells on each, of which B touch rows of other processes, takes::

    exchange = 2 launches + messages * latency + bytes of the ghosts / bandwidth
    T(p) = call + max((N - B) * cell, exchange) + launch + B * cell + exchange

The first exchange brings ghosts of what is read, while the cells that touch none are computed. The
second sends sums back to the owners, and hides behind nothing. Two launches pack and unpack each.
T(1) = call + N * cell. Efficiency is T(1) / T(p) at the same N (weak), or T(1) of the whole mesh
over p T(p) (strong).

Where the numbers come from:

cell
    Seconds a cell. Cores: **measured**, a row of ``bench mpi --json`` on one process (``--rows``),
    as is the call: what the loop's time holds beside its cells. Where the rows hold more processes,
    the prediction for them is printed beside what was measured. GPU: **assumed**, the bytes of a
    cell, each array counted once, over ``--memory``. A device that has no more cells than threads
    in flight is slower than that; the model does not know it.
ghosts, B, messages
    **Counted** for an inner block of the mesh of 10^8 cells and others, up to 1,024 blocks; times
    ``shape``, by how much METIS's parts of smaller meshes have more than blocks of as many cells:
    the largest ratio in ``partitions.json``, which is **measured** by ``measure``, as is the
    imbalance.
call, launch, latency, bandwidth
    **Assumed**: options with defaults, of a current network; one latency for each message, as
    though the network card took one after another.

Left out: contention in the network, nodes with several devices, and what a solver does besides,
above all its global sums.

::

    python benchmarks/scaling_model.py measure partitions.json   # needs gmsh
    python benchmarks/scaling_model.py plot model.png --rows rows.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DEGREE = 2
CASE = "laplace_p2_tetrahedron_action"
DEVICES = tuple(2**k for k in range(11))
PARTITIONS = Path(__file__).with_name("partitions.json")


# -- parts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a process has: cells, those of them with ghosts, ghost nodes, messages to and fro."""

    cells: float
    border: float
    ghosts: float
    messages: int


def block(cubes: Sequence[int], cuts: Sequence[int], degree: int = DEGREE) -> Part:
    """Count an inner block of ``cubes`` small cubes where each axis is cut into ``cuts`` pieces.

    A node belongs to the lowest process that has it, so that three of six sides are ghosts. All six
    tetrahedra of a cube have its diagonal, hence a node on any of the three.
    """
    inner = [degree * n + (cut == 1) for n, cut in zip(cubes, cuts, strict=True)]
    whole = math.prod(degree * n + 1 for n in cubes)
    core = math.prod(n - (cut > 1) for n, cut in zip(cubes, cuts, strict=True))
    # sides, edges and corners that lead to another block
    messages = 2 * (2 ** sum(cut > 1 for cut in cuts) - 1)
    cells = math.prod(cubes)
    return Part(6 * cells, 6 * (cells - core), whole - math.prod(inner), messages)


def parts_of_cube(cells: float, processes: int) -> Part:
    """Cut a cube of about ``cells`` tetrahedra into as many blocks as there are processes."""
    side = (cells / 6) ** (1 / 3)
    cuts = [1, 1, 1]
    for axis in itertools.islice(itertools.cycle(range(3)), round(math.log2(processes))):
        cuts[axis] *= 2
    return block([max(1, round(side / cut)) for cut in cuts], cuts)


def kuhn_cube(n: int) -> npt.NDArray[np.int64]:
    """``[6 n^3, 4]``: the tetrahedra of n^3 small cubes, each along its diagonal."""
    stride = np.array([1, n + 1, (n + 1) ** 2])
    corner = np.arange(n)
    first = (corner[:, None, None] * stride[2] + corner[:, None] * stride[1] + corner).ravel()
    cells = [
        first[:, None] + np.concatenate([[0], np.cumsum(stride[list(axes)])])
        for axes in itertools.permutations(range(3))
    ]
    return np.stack(cells, axis=1).reshape(-1, 4)


def statistics(table: npt.NDArray[np.int64], owner: npt.NDArray[np.int64]) -> dict[str, float]:
    """Count the largest parts of a P1 mesh, whose nodes belong to the lowest process with them."""
    processes = int(owner.max()) + 1
    node_owner = np.full(int(table.max()) + 1, processes)
    np.minimum.at(node_owner, table, owner[:, None])
    foreign = node_owner[table] != owner[:, None]
    cells = np.bincount(owner, minlength=processes)
    border = np.bincount(owner[foreign.any(axis=1)], minlength=processes)
    pairs = np.unique(
        np.stack([np.repeat(owner, 4)[foreign.ravel()], table.ravel()[foreign.ravel()]]), axis=1
    )
    ghosts = np.bincount(pairs[0], minlength=processes)
    links = np.unique(np.stack([pairs[0], node_owner[pairs[1]]]), axis=1)
    messages = np.bincount(links.ravel(), minlength=processes)
    return {
        "mean_cells": len(table) / processes,
        "cells": int(cells.max()),
        "border": int(border.max()),
        "ghosts": int(ghosts.max()),
        "messages": int(messages.max()),
    }


def metis(n: int, processes: int) -> npt.NDArray[np.int64]:
    """The process of each tetrahedron of :func:`kuhn_cube`, by METIS as gmsh calls it."""
    import gmsh

    cells = kuhn_cube(n)
    line = np.linspace(0.0, 1.0, n + 1)
    z, y, x = np.meshgrid(line, line, line, indexing="ij")
    points = np.stack([x.ravel(), y.ravel(), z.ravel()], axis=1)
    gmsh.initialize(["-nopopup"])
    try:
        gmsh.option.setNumber("General.Terminal", 0)
        gmsh.option.setNumber("Mesh.PartitionCreateTopology", 0)
        gmsh.model.addDiscreteEntity(3, 1)
        gmsh.model.mesh.addNodes(3, 1, np.arange(1, len(points) + 1), points.ravel())
        gmsh.model.mesh.addElementsByType(1, 4, np.arange(1, len(cells) + 1), cells.ravel() + 1)
        gmsh.model.mesh.partition(processes)
        owner = np.full(len(cells), -1)
        for dimension, tag in gmsh.model.getEntities(3):
            for kind, numbers, _ in zip(*gmsh.model.mesh.getElements(dimension, tag), strict=True):
                assert kind == 4
                (process,) = gmsh.model.getPartitions(dimension, tag)
                owner[np.asarray(numbers, np.int64) - 1] = process - 1
    finally:
        gmsh.finalize()
    assert (owner >= 0).all()
    return owner


def measure(path: Path, sizes: Sequence[int], processes: Sequence[int]) -> None:
    """Partition cubes by METIS and write what the largest parts have."""
    import gmsh

    rows = [
        {"small_cubes": n**3, "processes": count, **statistics(kuhn_cube(n), metis(n, count))}
        for n in sizes
        for count in processes
    ]
    content = {"partitioner": f"METIS in gmsh {gmsh.__version__}", "degree": 1, "parts": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Shape:
    """By what factors the largest of METIS's parts has more than a cubic block."""

    cells: float
    border: float
    ghosts: float
    messages: float

    @classmethod
    def read(cls, path: Path) -> Shape:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["parts"]
        found = []
        for row in rows:
            side = (row["mean_cells"] / 6) ** (1 / 3)
            # of a block whose side need not be an integer
            border, ghosts = 6 * (side**3 - (side - 1) ** 3), (side + 1) ** 3 - side**3
            found.append(
                (row["cells"] / row["mean_cells"], row["border"] / border, row["ghosts"] / ghosts,
                 row["messages"] / 14)
            )  # fmt: skip
        return cls(*np.max(found, axis=0).tolist())

    def of(self, part: Part) -> Part:
        """The part as METIS would make it."""
        cells = part.cells * self.cells if part.messages else part.cells
        return Part(
            cells,
            min(part.border * self.border, cells),
            part.ghosts * self.ghosts,
            round(part.messages * self.messages),
        )


# -- time -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Seconds, and bytes a second."""

    name: str
    cell: float
    call: float
    launch: float
    latency: float
    bandwidth: float

    def seconds(self, part: Part) -> float:
        """Time of one call."""
        if not part.messages:
            return self.call + part.cells * self.cell
        exchange = 2 * self.launch + part.messages * self.latency + 8 * part.ghosts / self.bandwidth
        core = (part.cells - part.border) * self.cell
        return self.call + max(core, exchange) + self.launch + part.border * self.cell + exchange


def bytes_of_cell(degree: int = DEGREE) -> float:
    """What moves for a cell: its maps, and its share of points, coefficient and result."""
    nodes = (degree + 1) * (degree + 2) * (degree + 3) // 6
    maps = 4 * (nodes + 4)
    return maps + 24 / 6 + 3 * 8 * degree**3 / 6


def weak(machine: Machine, shape: Shape, cells: float) -> list[float]:
    """Efficiency on :data:`DEVICES` with ``cells`` on each."""
    parts = [parts_of_cube(cells * p, p) for p in DEVICES]
    return [
        machine.seconds(Part(part.cells, 0, 0, 0)) / machine.seconds(shape.of(part))
        for part in parts
    ]


def strong(machine: Machine, shape: Shape, cells: float) -> list[float]:
    """Efficiency on :data:`DEVICES` with ``cells`` on all of them together."""
    parts = [parts_of_cube(cells, p) for p in DEVICES]
    return [
        machine.seconds(Part(part.cells * p, 0, 0, 0)) / p / machine.seconds(shape.of(part))
        for p, part in zip(DEVICES, parts, strict=True)
    ]


def draw(machines: Sequence[Machine], shape: Shape, path: Path) -> None:
    """A row of two plots for each machine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        len(machines), 2, figsize=(10, 3.6 * len(machines)), sharey=True, squeeze=False
    )
    for machine, (left, right) in zip(machines, grid, strict=True):
        for cells in (1e4, 1e5, 1e6, 1e7):
            left.plot(
                DEVICES, weak(machine, shape, cells), ".-", label=f"$10^{math.log10(cells):.0f}$"
            )
        for cells in (1e6, 1e7, 1e8):
            right.plot(
                DEVICES, strong(machine, shape, cells), ".-", label=f"$10^{math.log10(cells):.0f}$"
            )
        for axes, name, of in ((left, "weak", "on each"), (right, "strong", "on all")):
            axes.set_xscale("log", base=2)
            axes.set(xlabel="processes", ylim=(0, 1.3))
            axes.set_title(f"{name} scaling, predicted: {machine.name}", fontsize=9)
            axes.grid(alpha=0.3)
            axes.legend(
                title=f"cells {of}", fontsize=8, title_fontsize=8, ncols=4, loc="upper center"
            )
        left.set_ylabel("parallel efficiency")
    figure.suptitle("Model of a P2 Laplace action on tetrahedra; not a measurement")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def machines(options: argparse.Namespace) -> list[Machine]:
    """What the options describe."""
    network = {"latency": options.latency, "bandwidth": options.bandwidth}
    found = [
        Machine(
            f"GPUs, {options.memory:.0e} B/s assumed",
            bytes_of_cell() / options.memory,
            options.call,
            options.launch,
            **network,
        )
    ]
    if options.rows is not None:
        rows = json.loads(options.rows.read_text())
        row = next(r for r in rows if r["case"] == CASE and r["ranks"] == 1)
        cell, call = row["core_s"] / row["cells"], row["ours_s"] - row["core_s"]
        name = f"cores, {cell * 1e9:.0f} ns a cell measured"
        # packing is a copy of what stays in the cache
        found.append(Machine(name, cell, call, 0.0, **network))
    return found


def check(machine: Machine, shape: Shape, rows: Sequence[dict[str, Any]]) -> None:
    """Print predictions beside what was measured on several processes."""
    for row in rows:
        if row["case"] == CASE and row["ranks"] > 1:
            predicted = machine.seconds(shape.of(parts_of_cube(row["cells"], row["ranks"])))
            print(
                f"{row['cells']:,} cells on {row['ranks']} processes: predicted "
                f"{predicted * 1e3:.2f} ms, measured {row['ours_s'] * 1e3:.2f} ms"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="what METIS's parts of cubes have")
    measuring.add_argument("output", type=Path)
    measuring.add_argument("--sizes", type=int, nargs="+", default=[24, 48])
    measuring.add_argument("--processes", type=int, nargs="+", default=[8, 64, 512])
    plotting = commands.add_parser("plot", help="predict and draw")
    plotting.add_argument("output", type=Path)
    plotting.add_argument("--partitions", type=Path, default=PARTITIONS)
    plotting.add_argument("--rows", type=Path, help="of `bench mpi --json`: time of a cell")
    plotting.add_argument("--memory", type=float, default=2e12, help="of a GPU, bytes a second")
    plotting.add_argument("--call", type=float, default=2e-5, help="of a GPU, seconds")
    plotting.add_argument("--launch", type=float, default=5e-6, help="seconds")
    plotting.add_argument("--latency", type=float, default=2e-6, help="seconds a message")
    plotting.add_argument("--bandwidth", type=float, default=2e10, help="bytes a second")
    options = parser.parse_args(arguments)
    if options.command == "measure":
        measure(options.output, options.sizes, options.processes)
        return
    shape = Shape.read(options.partitions)
    print(f"largest of METIS's parts over a block: {shape}")
    chosen = machines(options)
    draw(chosen, shape, options.output)
    for machine in chosen:
        for cells in (1e6, 1e7):
            value = weak(machine, shape, cells)[-1]
            print(f"{machine.name}: weak, {cells:.0e} cells on each of 1,024: {value:.0%}")
        for cells in (1e7, 1e8):
            value = strong(machine, shape, cells)[-1]
            print(f"{machine.name}: strong, {cells:.0e} cells on 1,024: {value:.0%}")
    if options.rows is not None:
        check(chosen[-1], shape, json.loads(options.rows.read_text()))


if __name__ == "__main__":
    main()

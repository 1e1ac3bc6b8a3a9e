"""The main job: heat conduction through a bracket, assembled by the engine on a real mesh.

Reads an unstructured mesh in gmsh's format, assembles the stiffness matrix of P1 and P2 and its
action through tuned loops, compares both with numpy, solves with scipy, with the matrix and without
it, and draws the solution, the colouring and what the tuner measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.bench.cases import FormLoop
from pyop3_mlir.bench.engine import interleave
from pyop3_mlir.bench.meshes import Mesh
from pyop3_mlir.bench.reference import apply, assemble_matrix, element_matrices
from pyop3_mlir.errors import Pyop3MlirError
from pyop3_mlir.lowering.schedule import STRATEGIES
from pyop3_mlir.options import Options

if TYPE_CHECKING:
    from rich.console import Console

    from pyop3_mlir.autotune.choose import Choice
    from pyop3_mlir.engine import BoundLoop

__all__ = ["DemoError", "Part", "bundled_mesh", "read_part", "run_demo"]

Array = npt.NDArray[Any]

TOLERANCE = 1e-12
"""Largest difference from numpy, relative to the largest entry, that is rounding."""

HOT, COLD = 80.0, 20.0
"""Temperatures of the bearing and of the bolts, in degrees Celsius."""

CONDUCTIVITY = 0.05
"""Of steel, in watts per millimetre and kelvin."""


class DemoError(Pyop3MlirError, RuntimeError):
    """The demo cannot run, or computed something that is not right."""


@dataclass(frozen=True, eq=False)
class Part:
    """A mesh with named pieces of its surface.

    Attributes
    ----------
    mesh
        Tetrahedra.
    surfaces
        For each name the facets, as (cell, opposite vertex) like :attr:`Mesh.boundary`.
    """

    mesh: Mesh
    surfaces: Mapping[str, tuple[Array, Array]]

    def nodes_on(self, name: str, mesh: Mesh) -> Array:
        """Nodes of ``mesh`` (this mesh, of any degree) on a named surface, ascending."""
        nodes: Array = np.unique(mesh.facet_nodes(*self.surfaces[name]))
        return nodes


def bundled_mesh() -> Path:
    """Path of the bracket's mesh in the repository.

    Raises
    ------
    DemoError
        Where the package runs from elsewhere.
    """
    path = Path(__file__).parents[1] / "demos" / "meshes" / "bracket.msh"
    if not path.is_file():
        raise DemoError(
            f"{path} is not there: run the demo from a checkout of the repository, "
            "or name a mesh with --mesh"
        )
    return path


def read_part(path: Path) -> Part:
    """Read tetrahedra and named surfaces from a file that meshio knows.

    Raises
    ------
    DemoError
        Where the file cannot be read or holds no tetrahedra.
    """
    import meshio

    try:
        raw = meshio.read(path)
    except (OSError, meshio.ReadError) as error:
        raise DemoError(f"{path}: {error}") from error
    if "tetra" not in raw.cells_dict:
        raise DemoError(f"{path}: no tetrahedra, only {', '.join(raw.cells_dict) or 'nothing'}")
    mesh = Mesh.build(raw.points, raw.cells_dict["tetra"], reorder=True)
    assert mesh.numbering is not None
    cells, opposite = mesh.boundary
    corners = [[v for v in range(4) if v != o] for o in range(4)]
    facets = np.take_along_axis(mesh.cells[cells], np.array(corners)[opposite], axis=1)
    place = {key: number for number, key in enumerate(_keys(facets, mesh).tolist())}
    surfaces = {}
    groups = raw.cell_data_dict.get("gmsh:physical", {}).get("triangle", np.empty(0))
    for name, (number, dimension) in raw.field_data.items():
        if dimension != 2:
            continue
        triangles = np.sort(mesh.numbering[raw.cells_dict["triangle"][groups == number]], axis=1)
        # a surface inside the part has no facet of its own on the boundary
        found = [place[key] for key in _keys(triangles, mesh).tolist() if key in place]
        surfaces[name] = (cells[found], opposite[found])
    return Part(mesh, surfaces)


def _keys(triangles: Array, mesh: Mesh) -> npt.NDArray[np.int64]:
    count = len(mesh.points)
    a, b, c = triangles.astype(np.int64).T
    keys: npt.NDArray[np.int64] = (a * count + b) * count + c
    return keys


@dataclass(eq=False)
class Assembly:
    """One loop of the demo: its arrays, its code and what was measured."""

    loop: FormLoop
    bound: BoundLoop
    choice: Choice
    seconds: float = 0.0
    numpy_seconds: float = 0.0
    difference: float = 0.0

    @property
    def title(self) -> str:
        """What it assembles, for people."""
        kind = "matrix" if self.loop.rank == 2 else "action"
        return f"P{self.loop.mesh.degree} {kind}"


def run_demo(
    mesh: Path | str | None = None,
    output: Path | str = "demo-output",
    *,
    device: str | None = None,
    tune_budget: float = 15.0,
    hot: str = "bearing",
    cold: str = "bolts",
    console: Console | None = None,
) -> dict[str, float]:
    """Run the main job.

    Parameters
    ----------
    mesh
        A mesh of tetrahedra; the bracket of the repository where not given.
    output
        Directory for the pictures; made where it does not exist.
    device
        Device of the engine; the setting where not given.
    tune_budget
        Seconds for tuning each of the four loops.
    hot, cold
        Names of the surfaces that are held at :data:`HOT` and :data:`COLD`.
    console
        Where to print.

    Returns
    -------
    dict
        ``"P1 matrix"`` and so on: largest difference from numpy, relative to the largest entry;
        ``"P1 heat flow"`` and ``"P2 heat flow"`` in watts; ``"P1 matrix-free"`` and ``"P2
        matrix-free"``: relative difference of the two solutions.

    Raises
    ------
    DemoError
        Where the mesh is not usable, or a result differs from numpy by more than rounding.
    """
    from rich.console import Console

    console = console or Console()
    started = time.perf_counter()
    options = Options.resolve(device=device, tune_budget=tune_budget)
    path = Path(mesh) if mesh is not None else bundled_mesh()
    target = Path(output)
    target.mkdir(parents=True, exist_ok=True)

    part = read_part(path)
    for name in (hot, cold):
        if not len(part.surfaces.get(name, ((), ()))[0]):
            raise DemoError(
                f"{path}: no surface {name!r}; there are {', '.join(part.surfaces) or 'none'}"
            )
    console.rule("[bold]Heat conduction through a bracket")
    console.print(
        f"{path.name}: {part.mesh.size:,} tetrahedra, {len(part.mesh.points):,} vertices, "
        f"{part.mesh.volumes.sum() * 1e-3:.1f} cm³. Device {options.device}."
    )
    results: dict[str, float] = {}
    assemblies: list[Assembly] = []
    temperature = None
    for degree in (1, 2):
        space = part.mesh.with_degree(degree)
        console.rule(f"P{degree}: {space.node_count:,} unknowns")
        pair = [_assemble(space, rank, options, console) for rank in (2, 1)]
        assemblies += pair
        _verify(pair, results)
        temperature = _solve(part, pair, hot, cold, results, console)
    assert temperature is not None
    console.rule("Summary")
    console.print(_summary(assemblies))
    pictures = _draw(part, assemblies, temperature, target)
    console.print(
        f"Everything equals numpy to {max(a.difference for a in assemblies):.1e}. "
        f"{time.perf_counter() - started:.0f} s in all. Pictures:"
    )
    for picture in pictures:
        console.print(f"  {picture}", highlight=False)
    return results


def _assemble(space: Mesh, rank: int, options: Options, console: Console) -> Assembly:
    """Tune and compile one loop, compare the strategies, and leave its result in its output."""
    from pyop3_mlir import engine
    from pyop3_mlir.runtime.devices import get_device

    loop = FormLoop("laplace", space, rank)
    device = get_device(options.device)
    choice = engine.choose_schedule(loop.parloop, device, options)
    bound = engine.BoundLoop(loop.parloop, choice.schedule, device, choice.reason)
    assembly = Assembly(loop, bound, choice)
    console.print(f"[bold]{assembly.title}[/]: {choice.schedule}, {choice.reason}")
    runs: dict[str, BoundLoop] = {choice.schedule.strategy: bound}
    reasons: dict[str, str] = {}
    for strategy in STRATEGIES:
        if strategy in runs:
            continue
        reason = engine.impossible(loop.parloop, strategy, device)
        if reason is None:
            other = replace(choice.schedule, strategy=strategy)
            runs[strategy] = engine.BoundLoop(loop.parloop, other, device)
        else:
            reasons[strategy] = reason
    results = {}
    for strategy, run in runs.items():
        loop.output[...] = 0.0
        run()
        results[strategy] = np.array(loop.output)
    expected = results[choice.schedule.strategy]
    differences = {
        strategy: float(np.abs(result - expected).max() / np.abs(expected).max())
        for strategy, result in results.items()
    }
    seconds = dict(zip(runs, interleave(list(runs.values()), 9), strict=True))
    assembly.seconds = seconds[choice.schedule.strategy]
    console.print(_strategies(seconds, differences, reasons))
    loop.output[...] = expected
    return assembly


def _strategies(
    seconds: Mapping[str, float], differences: Mapping[str, float], reasons: Mapping[str, str]
) -> Any:
    """Tabulate the scatter strategies at the chosen batching; the chosen one comes first."""
    from rich.table import Table

    chosen = next(iter(seconds))
    table = Table("strategy", caption="difference: from the first, relative to the largest entry")
    for name in ("time", "relative", "difference"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for strategy, time_s in seconds.items():
        table.add_row(
            strategy,
            f"{time_s * 1e3:.3f} ms",
            f"{time_s / seconds[chosen]:.2f}",
            f"{differences[strategy]:.0e}" if differences[strategy] else "none",
            "chosen by the tuner" if strategy == chosen else "",
            style="bold" if strategy == chosen else "",
        )
    for strategy, reason in reasons.items():
        table.add_row(strategy, "", "", "", reason, style="dim")
    return table


def _verify(pair: list[Assembly], results: dict[str, float]) -> None:
    """Compare the matrix and the action with numpy's."""
    for assembly in pair:
        loop = assembly.loop
        start = time.perf_counter()
        matrices = element_matrices("laplace", loop.mesh)
        if loop.rank == 2:
            reference = assemble_matrix(loop.mesh, matrices)
            indptr, indices = loop.pattern
            if not (
                np.array_equal(reference.indptr, indptr)
                and np.array_equal(reference.indices, indices)
            ):
                raise DemoError(f"{assembly.title}: scipy finds another sparsity pattern")
            expected = reference.data
        else:
            expected = apply(loop.mesh, matrices, loop.arguments[2].buffer)
        assembly.numpy_seconds = time.perf_counter() - start
        assembly.difference = float(np.abs(loop.output - expected).max() / np.abs(expected).max())
        results[assembly.title] = assembly.difference
        if not assembly.difference < TOLERANCE:
            raise DemoError(
                f"{assembly.title}: differs from numpy by {assembly.difference:.1e} of the largest "
                f"entry, more than {TOLERANCE:.0e}"
            )


def _solve(
    part: Part,
    pair: list[Assembly],
    hot: str,
    cold: str,
    results: dict[str, float],
    console: Console,
) -> Array:
    """Solve by conjugate gradients, with the matrix and with the action in its place."""
    import scipy.sparse
    from scipy.sparse.linalg import LinearOperator

    matrix, action = pair
    space = matrix.loop.mesh
    indptr, indices = matrix.loop.pattern
    stiffness = scipy.sparse.csr_array((matrix.loop.output, indices, indptr))
    fixed = {name: part.nodes_on(name, space) for name in (hot, cold)}
    free = np.ones(space.node_count, bool)
    for nodes in fixed.values():
        free[nodes] = False
    temperature = np.zeros(space.node_count)
    temperature[fixed[hot]], temperature[fixed[cold]] = HOT, COLD
    load = -(stiffness @ temperature)[free]
    inverse_diagonal = 1.0 / stiffness.diagonal()[free]

    w, result = action.loop.arguments[2].buffer, action.loop.output

    def apply_action(x: Array) -> Array:
        w[...] = 0.0
        w[free] = x
        result[...] = 0.0
        action.bound()
        return np.array(result[free])

    unknowns = int(free.sum())
    with_matrix = stiffness[free][:, free]
    operator = LinearOperator((unknowns, unknowns), matvec=apply_action, dtype=np.float64)
    solutions = []
    for name, system in (("matrix", with_matrix), ("action, matrix-free", operator)):
        x, iterations, seconds = _conjugate_gradients(system, load, inverse_diagonal)
        solutions.append(x)
        console.print(
            f"P{space.degree}: conjugate gradients with the {name}: {iterations} iterations, "
            f"{seconds * 1e3:.0f} ms"
        )
    temperature[free] = solutions[0]
    results[f"P{space.degree} matrix-free"] = float(
        np.abs(solutions[1] - solutions[0]).max() / np.abs(solutions[0]).max()
    )
    heat = CONDUCTIVITY * (stiffness @ temperature)
    flow, out = float(heat[fixed[hot]].sum()), float(-heat[fixed[cold]].sum())
    results[f"P{space.degree} heat flow"] = flow
    console.print(
        f"P{space.degree}: {flow:.3f} W flow in at the {hot}, {out:.3f} W out at the {cold}"
    )
    if abs(flow - out) > 1e-6 * abs(flow):
        raise DemoError(f"heat is lost: {flow} W in, {out} W out")
    return temperature


def _conjugate_gradients(
    system: Any, load: Array, inverse_diagonal: Array
) -> tuple[Array, int, float]:
    from scipy.sparse.linalg import LinearOperator, cg

    count = 0

    def step(_: Array) -> None:
        nonlocal count
        count += 1

    jacobi = LinearOperator(system.shape, matvec=lambda r: inverse_diagonal * r, dtype=np.float64)
    start = time.perf_counter()
    x, failed = cg(system, load, rtol=1e-11, maxiter=5000, M=jacobi, callback=step)
    if failed:
        raise DemoError(f"conjugate gradients did not converge in {count} iterations")
    return x, count, time.perf_counter() - start


def _summary(assemblies: list[Assembly]) -> Any:
    from rich.table import Table

    table = Table(title="assembly of the Laplacian")
    table.add_column("loop")
    for name in ("entries", "engine", "GFLOP/s", "numpy", "difference"):
        table.add_column(name, justify="right")
    table.add_column("schedule")
    for a in assemblies:
        table.add_row(
            a.title,
            f"{a.loop.output.size:,}",
            f"{a.seconds * 1e3:.2f} ms",
            f"{a.loop.flops / a.seconds * 1e-9:.1f}",
            f"{a.numpy_seconds * 1e3:.0f} ms",
            f"{a.difference:.1e}",
            str(a.bound.schedule),
        )
    return table


def _draw(part: Part, assemblies: list[Assembly], temperature: Array, target: Path) -> list[Path]:
    """Draw the solution, the colouring and the tuner's measurements."""
    from pyop3_mlir.autotune.plot import bar_chart
    from pyop3_mlir.bench.pictures import View, paint_classes, paint_field, surface_triangles
    from pyop3_mlir.planning import colour_loop

    pictures = []

    def picture(name: str, draw: Callable[[Path], None]) -> None:
        draw(target / name)
        pictures.append(target / name)

    space = assemblies[-1].loop.mesh
    triangles, _ = surface_triangles(space)
    picture(
        "solution.png",
        lambda path: paint_field(
            path,
            View(space.node_points, triangles),
            temperature[triangles].mean(axis=1),
            "Temperature of a bracket between a hot bearing and cold bolts",
            "°C",
            [f"P2 on {space.size:,} tetrahedra, {space.node_count:,} unknowns"],
        ),
    )
    first = next(a for a in assemblies if a.loop.rank == 1)
    colouring = colour_loop(first.loop.parloop)
    colours = np.empty(part.mesh.size, np.int64)
    colours[colouring.order] = np.repeat(np.arange(len(colouring)), colouring.sizes)
    triangles, cells = surface_triangles(part.mesh)
    picture(
        "colouring.png",
        lambda path: paint_classes(
            path,
            View(part.mesh.node_points, triangles),
            colours[cells],
            len(colouring),
            "Cells of one colour share no vertex",
            [
                f"{len(colouring)} colours of {colouring.sizes.min():,} to "
                f"{colouring.sizes.max():,} tetrahedra"
            ],
        ),
    )
    for a in assemblies:
        result = a.choice.result
        if result is not None:
            picture(
                f"tuner-{a.title.lower().replace(' ', '-')}.png",
                lambda path, a=a, result=result: bar_chart(  # type: ignore[misc]
                    result, path, f"{a.title} of the Laplacian on {a.loop.mesh.size:,} tetrahedra"
                ),
            )
    return pictures

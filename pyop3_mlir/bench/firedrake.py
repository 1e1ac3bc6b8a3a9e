"""``bench firedrake``: the engine under Firedrake against PyOP2, on the same loops and arrays."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.bench.engine import KEYS, geometric_mean, interleave, machine
from pyop3_mlir.lowering.schedule import Schedule

__all__ = [
    "CASES",
    "Case",
    "case_named",
    "overheads_table",
    "run_case",
    "run_firedrake_bench",
    "run_overheads",
    "table",
]

Form = Callable[[Any, int], Any]
"""Makes the form, given the mesh and the number of arguments (1: residual or action, 2: matrix)."""


# ---------------------------------------------------------------------------------------------
# Forms


def _space(mesh: Any, family: str, degree: int, vector: bool = False) -> Any:
    import firedrake as fd

    make = fd.VectorFunctionSpace if vector else fd.FunctionSpace
    return make(mesh, family, degree)


def _coefficient(space: Any) -> Any:
    """A function with random values (seed 0)."""
    import firedrake as fd

    function = fd.Function(space)
    random = np.random.default_rng(0)
    # so that it does under PyOP2 and under pyop3
    for part in function.subfunctions:
        values = part.dat.data_wo
        values[...] = random.random(values.shape) * 0.1
    return function


def _bilinear(
    family: str, degree: int, integrand: Callable[[Any, Any], Any], vector: bool = False
) -> Form:
    """A bilinear form, or its action on a function."""

    def make(mesh: Any, rank: int) -> Any:
        import firedrake as fd

        space = _space(mesh, family, degree, vector)
        trial = _coefficient(space) if rank == 1 else fd.TrialFunction(space)
        return integrand(trial, fd.TestFunction(space))

    return make


def _mass(u: Any, v: Any) -> Any:
    import firedrake as fd

    return fd.inner(u, v) * fd.dx


def _laplace(u: Any, v: Any) -> Any:
    import firedrake as fd

    return fd.inner(fd.grad(u), fd.grad(v)) * fd.dx


def _elasticity(u: Any, v: Any) -> Any:
    import firedrake as fd

    def strain(w: Any) -> Any:
        return fd.sym(fd.grad(w))

    identity = fd.Identity(3)
    stress = 2.0 * strain(u) + 1.5 * fd.tr(strain(u)) * identity
    return fd.inner(stress, strain(v)) * fd.dx


def _advection(u: Any, v: Any) -> Any:
    """Upwind advection in a rotating flow; no facet of the boundary lets anything in."""
    import firedrake as fd

    x, y = fd.SpatialCoordinate(v.function_space().mesh())
    flow = fd.as_vector((0.5 - y, x - 0.5))
    normal = fd.FacetNormal(v.function_space().mesh())
    outward = 0.5 * (fd.dot(flow, normal) + abs(fd.dot(flow, normal)))
    return (
        u * fd.div(v * flow) * fd.dx
        - (v("+") - v("-")) * (outward("+") * u("+") - outward("-") * u("-")) * fd.dS
        - v * outward * u * fd.ds
    )


def _local_solve(degree: int) -> Form:
    """The solution of a dense system in each cell, by Slate."""

    def make(mesh: Any, _: int) -> Any:
        import firedrake as fd

        space = _space(mesh, "DG", degree)
        trial, test = fd.TrialFunction(space), fd.TestFunction(space)
        side = fd.Tensor(_mass(_coefficient(space), test))
        return fd.Tensor(_mass(trial, test) + _laplace(trial, test)).solve(side)

    return make


def _mixed_poisson(mesh: Any, rank: int) -> Any:
    import firedrake as fd

    space = fd.MixedFunctionSpace([_space(mesh, "RT", 1), _space(mesh, "DG", 0)])
    trial = _coefficient(space) if rank == 1 else None
    flux, pressure = fd.split(trial) if rank == 1 else fd.TrialFunctions(space)
    other, test = fd.TestFunctions(space)
    integrand = fd.inner(flux, other) - pressure * fd.div(other) + fd.div(flux) * test
    return integrand * fd.dx


def _neo_hookean(mesh: Any, rank: int) -> Any:
    import firedrake as fd

    space = _space(mesh, "CG", 2, vector=True)
    u = _coefficient(space)
    u *= 0.1  # no cell may turn inside out
    deformation = fd.Identity(3) + fd.grad(u)
    volume = fd.det(deformation)
    energy = (
        0.5 * (fd.tr(deformation.T * deformation) - 3.0) - fd.ln(volume) + 0.75 * fd.ln(volume) ** 2
    ) * fd.dx
    residual = fd.derivative(energy, u, fd.TestFunction(space))
    return residual if rank == 1 else fd.derivative(residual, u, fd.TrialFunction(space))


# ---------------------------------------------------------------------------------------------
# Cases


@lru_cache(maxsize=2)
def _mesh(cell: str, n: int) -> Any:
    import firedrake as fd

    if cell == "triangle":
        return fd.UnitSquareMesh(n, n)
    if cell == "tetrahedron":
        return fd.UnitCubeMesh(n, n, n)
    return fd.ExtrudedMesh(fd.UnitSquareMesh(n, n, quadrilateral=True), n)


def _single(cell: str) -> Any:
    """A mesh of one cell."""
    import firedrake as fd

    if cell == "triangle":
        return fd.UnitTriangleMesh()
    if cell == "tetrahedron":
        return fd.UnitTetrahedronMesh()
    return fd.ExtrudedMesh(fd.UnitSquareMesh(1, 1, quadrilateral=True), 1)


@dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes
    ----------
    name
        Form, element, cell, and ``action``, ``residual`` or ``matrix``.
    form
        Makes it.
    rank
        1 for a vector, 2 for a matrix.
    cell
        ``triangle``, ``tetrahedron`` or ``hexahedron`` (extruded).
    n
        Squares, cubes or hexahedra along a side of the unit square or cube.
    """

    name: str
    form: Form
    rank: int
    cell: str
    n: int

    def mesh(self, size: float = 1.0) -> Any:
        """The mesh; the last two are kept. ``size`` is a factor on the number of cells."""
        n = max(1, round(self.n * size ** (1 / (2 if self.cell == "triangle" else 3))))
        return _mesh(self.cell, n)


def _cases() -> Iterator[Case]:
    def both(name: str, form: Form, cell: str, n: int, vector: str = "action") -> Iterator[Case]:
        yield Case(f"{name}_{vector}", form, 1, cell, n)
        yield Case(f"{name}_matrix", form, 2, cell, n)

    yield from both("mass_p1_triangle", _bilinear("CG", 1, _mass), "triangle", 512)
    yield from both("laplace_p1_triangle", _bilinear("CG", 1, _laplace), "triangle", 512)
    for degree in (1, 2, 3):
        form = _bilinear("CG", degree, _laplace)
        yield from both(f"laplace_p{degree}_tetrahedron", form, "tetrahedron", 24)
    form = _bilinear("CG", 2, _elasticity, vector=True)
    yield from both("elasticity_p2_tetrahedron", form, "tetrahedron", 10)
    yield from both("neo_hookean_p2_tetrahedron", _neo_hookean, "tetrahedron", 10, "residual")
    yield from both("advection_dg1_triangle", _bilinear("DG", 1, _advection), "triangle", 256)
    yield from both("mixed_poisson_rt1_triangle", _mixed_poisson, "triangle", 256)
    for degree in (2, 3):
        form = _bilinear("Q", degree, _laplace)
        yield from both(f"laplace_q{degree}_hexahedron", form, "hexahedron", 12)


CASES: tuple[Case, ...] = tuple(_cases())
"""The rows of the benchmark. Cases on one mesh stand together, since meshes are slow to make."""


def case_named(name: str) -> Case:
    """Find a case.

    Raises
    ------
    ValueError
        Where there is none of that name; the message lists all names.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"no case {name}; there are {', '.join(case.name for case in CASES)}")


# ---------------------------------------------------------------------------------------------
# Measuring


class _Assembly:
    """A form, its tensor, and the PyOP2 loops that assemble it."""

    def __init__(self, form: Any) -> None:
        from firedrake.assemble import get_assembler

        self.assembler = get_assembler(form)
        self.tensor = self.assembler.allocate()
        self.loops = self.assembler.parloops(self.tensor)

    def with_method(self, compute: Any) -> _Assembly:
        """The same loops on the same data, but with ``compute`` in place of ``_compute``."""
        other = copy.copy(self)
        other.loops = tuple(copy.copy(loop) for loop in self.loops)
        for loop in other.loops:
            loop._compute = MethodType(compute, loop)
        # an assembler's own constructor looks for an equal one
        other.assembler = object.__new__(type(self.assembler))
        vars(other.assembler).update(vars(self.assembler), _parloops=other.loops)
        return other

    def run_loops(self) -> None:
        """Run the parallel loops."""
        for loop in self.loops:
            loop()

    def run_whole(self) -> None:
        """Assemble as Firedrake does: zero the tensor, run the loops, let PETSc finish."""
        self.assembler.assemble(tensor=self.tensor)

    def result(self) -> npt.NDArray[Any]:
        """All numbers of the tensor after one assembly."""
        self.run_whole()
        if hasattr(self.tensor, "petscmat"):
            return np.concatenate([m.getValuesCSR()[2] for m in _parts(self.tensor.petscmat)])
        return np.concatenate([dat.data_ro.ravel() for dat in self.tensor.dat])


def _parts(mat: Any) -> list[Any]:
    if mat.getType() != "nest":
        return [mat]
    rows, columns = mat.getNestSize()
    parts = [mat.getNestSubMatrix(i, j) for i in range(rows) for j in range(columns)]
    return [part for part in parts if part.handle]


def run_case(
    case: Case,
    size: float = 1.0,
    runs: int = 7,
    schedule: Schedule | None = None,
    tune_budget: float | None = None,
    *,
    whole: bool = False,
) -> dict[str, Any]:
    """Measure one case; parameters are those of :func:`run_firedrake_bench`.

    Raises
    ------
    UnsupportedLoopError
        Where the engine leaves a loop to PyOP2; the message says why.
    """
    from pyop3_mlir.frontends.dropin import attach, detach
    from pyop3_mlir.options import Options

    if runs < 7:
        raise ValueError(f"{runs} runs are too few for a median, at least 7 are needed")
    options = Options.resolve(device="cpu", tune="off", tune_budget=tune_budget)
    backend = attach(options)
    try:
        ours = _Assembly(case.form(case.mesh(size), case.rank))
        theirs = ours.with_method(backend.original)
        expected = theirs.result()
        ours.result()
        bound = [backend.tune(loop, schedule) for loop in ours.loops]
        difference = np.abs(ours.result() - expected).max()
        functions = [a.run_whole if whole else a.run_loops for a in (ours, theirs)]
        # both run in this thread: its own time leaves out who else has the core
        ours_s, theirs_s = interleave(functions, runs, time.thread_time)
    finally:
        detach(backend)
    values = (
        case.name, bound[0].parloop.iteration_set.owned, _dofs(ours.assembler), _flops(ours.loops),
        sum(loop.parloop.compulsory_bytes for loop in bound),
        _joined(loop.schedule.strategy for loop in bound),
        _joined(str(loop.schedule).split("/", 1)[-1] for loop in bound),
        ours_s, "pyop2", theirs_s, theirs_s / ours_s,
        float(difference / max(np.abs(expected).max(), 1e-300)),
    )  # fmt: skip
    return dict(zip(KEYS, values, strict=True))


def _dofs(assembler: Any) -> int:
    test = assembler._form.arguments()[0]
    return int(test.function_space().dim())


def _flops(loops: Sequence[Any]) -> int:
    """TSFC's count: of its own kernels, whoever runs the loop."""
    return int(sum(loop.num_flops * loop.iterset.size for loop in loops))


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def run_firedrake_bench(
    path: Path | str | None = None,
    cases: Sequence[str] | None = None,
    *,
    size: float = 1.0,
    runs: int = 7,
    schedule: Schedule | None = None,
    tune_budget: float | None = None,
    whole: bool = False,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure the cases and write a row for each.

    Each row compares the warm parallel loops of one form, as Firedrake calls them, on the engine
    and on PyOP2: in one process, on the same arrays, in turn, one thread each.

    Parameters
    ----------
    path
        JSON file to write, a list of rows with the keys of ``bench engine``
        (:data:`~pyop3_mlir.bench.engine.KEYS`); written after every case, so that an interrupted
        run leaves what it has. None for no file.
    cases
        Names of :data:`CASES`; all where not given.
    size
        Factor on the number of cells.
    runs
        Interleaved samples, of which medians are taken; at least 7.
    schedule
        Schedule of every loop; tuned where not given.
    tune_budget
        Seconds for tuning one loop; the setting where not given.
    whole
        Time whole assemblies, which zero the tensor and have PETSc finish it, instead of the loops.
    report
        Called with each row as it is made.

    Raises
    ------
    ValueError
        For a case that does not exist or fewer than 7 runs.
    UnsupportedLoopError
        Where the engine leaves a loop to PyOP2.
    """
    chosen = CASES if cases is None else tuple(case_named(name) for name in cases)
    rows: list[dict[str, Any]] = []
    for case in chosen:
        rows.append(run_case(case, size, runs, schedule, tune_budget, whole=whole))
        if report is not None:
            report(rows[-1])
        if path is not None:
            Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows for a terminal, a :class:`rich.table.Table`."""
    from rich.table import Table

    means = []
    for kind, chosen in (
        ("vectors", [r for r in rows if not r["case"].endswith("_matrix")]),
        ("matrices", [r for r in rows if r["case"].endswith("_matrix")]),
    ):
        if chosen:
            means.append(f"{kind} {geometric_mean(r['ratio'] for r in chosen):.2f}")
    caption = f"{machine()}, one thread each; geometric means of the ratios: {', '.join(means)}"
    result = Table(title="the engine under Firedrake against PyOP2", caption=caption)
    result.add_column("case")
    for name in ("cells", "dofs", "ours", "GFLOP/s", "PyOP2", "ratio", "error"):
        result.add_column(name, justify="right")
    result.add_column("schedule")
    for row in rows:
        result.add_row(
            row["case"],
            f"{row['cells']:,}",
            f"{row['dofs']:,}",
            f"{row['ours_s'] * 1e3:.3f} ms",
            f"{row['flops'] / row['ours_s'] * 1e-9:.1f}",
            f"{row['baseline_s'] * 1e3:.3f} ms",
            f"{row['ratio']:.2f}",
            f"{row['error']:.0e}",
            f"{row['strategy']}/{row['batching']}",
        )
    return result


# ---------------------------------------------------------------------------------------------
# Overheads

OVERHEADS: tuple[str, ...] = (
    *(
        f"laplace_p{degree}_{cell}_{kind}"
        for cell in ("triangle", "tetrahedron")
        for degree in (1, 2, 3)
        for kind in ("action", "matrix")
    ),
    "neo_hookean_p2_tetrahedron_residual",
    "neo_hookean_p2_tetrahedron_matrix",
    # systems of 4, 10, 20 and 35 unknowns in each cell
    *(f"local_solve_p{degree}_tetrahedron_action" for degree in (1, 2, 3, 4)),
)
"""Names for :func:`run_overheads`."""


def _overhead_case(name: str) -> Case:
    """A case of :data:`OVERHEADS`; not all of them are in :data:`CASES`."""
    form, element, cell, kind = name.rsplit("_", 3)
    rank = 2 if kind == "matrix" else 1
    degree = int(element[1])
    make = {
        "laplace": _bilinear("CG", degree, _laplace),
        "neo_hookean": _neo_hookean,
        "local_solve": _local_solve(degree),
    }[form]
    return Case(name, make, rank, cell, 1)


def run_overheads(
    path: Path | str | None = None,
    cases: Sequence[str] | None = None,
    *,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure what calls cost beside their work: the first one of a kernel, and one on one cell.

    Each engine runs each case in a process of its own, with empty caches.

    Parameters
    ----------
    path
        JSON file to write, a list of rows; None for no file.
    cases
        Names of :data:`OVERHEADS`; all where not given.
    report
        Called with each row as it is made.

    Returns
    -------
    list
        Rows with ``case`` and for ``ours`` and ``pyop2`` the seconds of the first call
        (``..._first_s``), the processor time of it on all threads and in compilers
        (``..._first_cpu_s``), and of a warm call on a mesh of one cell (``..._call_s``).

    Raises
    ------
    ValueError
        For a case that does not exist.
    """
    rows = []
    for name in cases or OVERHEADS:
        if name not in OVERHEADS:
            raise ValueError(f"no case {name}; there are {', '.join(OVERHEADS)}")
        row: dict[str, Any] = {"case": name}
        for engine in ("ours", "pyop2"):
            measured = _in_fresh_process(name, engine)
            row.update({f"{engine}_{key}": value for key, value in measured.items()})
        rows.append(row)
        if report is not None:
            report(row)
        if path is not None:
            Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _in_fresh_process(name: str, engine: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYOP2_CACHE_DIR": f"{folder}/pyop2",
            "FIREDRAKE_TSFC_KERNEL_CACHE_DIR": f"{folder}/tsfc",
            "PYOP3_MLIR_CACHE_DIR": f"{folder}/pyop3_mlir",
            "XDG_CACHE_HOME": f"{folder}/xdg",  # loopy keeps results as well
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", __name__, name, engine],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure_overheads(name: str, engine: str) -> dict[str, float]:
    """The measurement itself, in a process that has compiled nothing for this kernel."""
    from pyop3_mlir.frontends.dropin import attach
    from pyop3_mlir.options import Options

    def cpu() -> float:
        return sum(os.times()[:4])

    case = _overhead_case(name)
    # both engines have run some kernel: what they import and set up once is not the kernel's cost
    # the fewest cells for which the engine compiles the code that it has for many
    mesh, single = _mesh(case.cell, 4), _single(case.cell)
    if engine == "ours":
        attach(Options.resolve(device="cpu", tune="off"))
    _Assembly(_bilinear("DG", 0, _mass)(mesh, 1)).run_loops()
    assembly = _Assembly(case.form(mesh, case.rank))
    started, started_cpu = time.perf_counter(), cpu()
    assembly.run_loops()
    first, first_cpu = time.perf_counter() - started, cpu() - started_cpu
    (call,) = interleave([_Assembly(case.form(single, case.rank)).run_loops], 15, time.thread_time)
    return {"first_s": first, "first_cpu_s": first_cpu, "call_s": call}


def overheads_table(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows of :func:`run_overheads` for a terminal, a :class:`rich.table.Table`."""
    from rich.table import Table

    result = Table(title="overheads", caption=f"{machine()}; caches empty, tuning off")
    result.add_column("case")
    for name in ("first use", "PyOP2", "ratio", "CPU time", "PyOP2", "call", "PyOP2", "ratio"):
        result.add_column(name, justify="right")
    for row in rows:
        result.add_row(
            row["case"],
            f"{row['ours_first_s']:.2f} s",
            f"{row['pyop2_first_s']:.2f} s",
            f"{row['ours_first_s'] / row['pyop2_first_s']:.2f}",
            f"{row['ours_first_cpu_s']:.2f} s",
            f"{row['pyop2_first_cpu_s']:.2f} s",
            f"{row['ours_call_s'] * 1e6:.0f} us",
            f"{row['pyop2_call_s'] * 1e6:.0f} us",
            f"{row['ours_call_s'] / row['pyop2_call_s']:.2f}",
        )
    return result


if __name__ == "__main__":
    print(json.dumps(_measure_overheads(*sys.argv[1:])))

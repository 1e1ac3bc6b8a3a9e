"""The command line: ``python -m pyop3_mlir COMMAND``.

Commands read arguments and print; what they do lives in the modules that they call, which are only
imported when a command needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyop3_mlir import __version__
from pyop3_mlir.errors import OptionError, Pyop3MlirError
from pyop3_mlir.options import Options, configure_logging

if TYPE_CHECKING:
    from pyop3_mlir.parloop import Parloop
    from pyop3_mlir.runtime.cache import Cache

__all__ = ["app", "main"]

app = typer.Typer(
    name="pyop3_mlir",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(no_args_is_help=True, help="List, clear or check what is kept on disk.")
app.add_typer(cache_app, name="cache")
bench_app = typer.Typer(no_args_is_help=True, help="Measure against what people run today.")
app.add_typer(bench_app, name="bench")

Device = Annotated[
    str | None,
    typer.Option(
        "--device", "-d", help="cpu, cpu:N (threads), cuda, ...; else the setting `device`."
    ),
]
# Which extra brings a package that a command may miss.
_EXTRAS = {
    "firedrake": "firedrake",
    "loopy": "loopy",
    "matplotlib": "plot",
    "meshio": "demo",
    "scipy": "demo",
}

Target = Annotated[
    str,
    typer.Argument(
        help="A benchmark case (laplace_p2_tetrahedron_action), or FILE.py:FUNCTION or "
        "MODULE:FUNCTION, a function without arguments that returns a Parloop."
    ),
]


def _console() -> Console:
    # a pipe has no width: tables are not to be squeezed into 80 columns there
    return Console(width=None if sys.stdout.isatty() else 160)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Parallel loops over meshes, lowered to MLIR with xDSL and run by IREE."""
    configure_logging(Options.resolve())


@app.command()
def demo(
    mesh: Annotated[
        Path | None, typer.Option(help="Tetrahedra in a format that meshio reads.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Directory for the pictures.")] = Path("demo-output"),
    device: Device = None,
    budget: Annotated[float, typer.Option(help="Seconds for tuning each of the four loops.")] = 8.0,
    hot: Annotated[str, typer.Option(help="Surface that is held at 80 degrees.")] = "bearing",
    cold: Annotated[str, typer.Option(help="Surface that is held at 20 degrees.")] = "bolts",
) -> None:
    """Solve heat conduction on a mechanical part: assemble, tune, check, solve, draw."""
    from pyop3_mlir.demo import run_demo

    run_demo(
        mesh, output, device=device, tune_budget=budget, hot=hot, cold=cold, console=_console()
    )


Json = Annotated[Path | None, typer.Option(help="Write the rows to this file.")]
Cases = Annotated[
    list[str] | None, typer.Option("--case", help="Only this case; may be given several times.")
]
Size = Annotated[float, typer.Option(help="Factor on the number of cells.")]
Budget = Annotated[float | None, typer.Option(help="Seconds for tuning a loop.")]


@contextmanager
def _measuring(console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show what has been measured last."""
    with console.status("measuring ...") as status:
        yield lambda row: status.update(f"{row['case']} done")


def _known_cases(names: list[str] | None, known: Iterable[str]) -> list[str] | None:
    """Return the names, None where there are none to say that all are meant."""
    everything = list(known)
    for name in names or ():
        if name not in everything:
            raise OptionError(f"no case {name!r}; there are {', '.join(everything)}")
    return names or None


@bench_app.command("engine")
def bench_engine(
    json: Json = None,
    case: Cases = None,
    device: Device = None,
    size: Size = 1.0,
    runs: Annotated[int, typer.Option(min=7, help="Interleaved samples of each case.")] = 15,
    budget: Budget = None,
    overheads: Annotated[
        bool, typer.Option("--overheads", help="Planning, compiling and calls instead.")
    ] = False,
) -> None:
    """Compare the engine with the same loops in C, compiled by gcc, one thread each."""
    from pyop3_mlir.bench import overheads as beside
    from pyop3_mlir.bench.cases import CASES
    from pyop3_mlir.bench.engine import run_engine_bench, table

    cases = _known_cases(case, (known.name for known in CASES))
    options = Options.resolve(device=device, tune_budget=budget)
    console = _console()
    if overheads:
        with _measuring(console) as report:
            rows = beside.run_overheads(json, device=options.device, report=report)
        console.print(beside.table(rows))
        return
    with _measuring(console) as report:
        rows = run_engine_bench(
            json,
            cases,
            device=options.device,
            size=size,
            runs=runs,
            tune_budget=options.tune_budget,
            report=report,
        )
    console.print(table(rows))


@bench_app.command("firedrake")
def bench_firedrake(
    json: Json = None,
    case: Cases = None,
    size: Size = 1.0,
    runs: Annotated[int, typer.Option(min=7, help="Interleaved samples of each case.")] = 7,
    budget: Budget = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Time whole assemblies instead of their loops.")
    ] = False,
    overheads: Annotated[
        bool,
        typer.Option(
            "--overheads", help="Time the first use of kernels and calls on one cell instead."
        ),
    ] = False,
) -> None:
    """Compare Firedrake's parallel loops on the engine and on PyOP2, one thread each."""
    from pyop3_mlir.bench import firedrake as bench

    known = bench.OVERHEADS if overheads else [known.name for known in bench.CASES]
    cases = _known_cases(case, known)
    console = _console()
    with _measuring(console) as report:
        if overheads:
            rows = bench.run_overheads(json, cases, report=report)
        else:
            rows = bench.run_firedrake_bench(
                json, cases, size=size, runs=runs, tune_budget=budget, whole=whole, report=report
            )
    console.print(bench.overheads_table(rows) if overheads else bench.table(rows))


@bench_app.command("pyop3")
def bench_pyop3(
    json: Json = None,
    case: Cases = None,
    size: Size = 1.0,
    runs: Annotated[int, typer.Option(min=7, help="Interleaved samples of each case.")] = 7,
    budget: Budget = None,
) -> None:
    """Compare the loops of Firedrake's pyop3 branch on the engine and on loopy's code."""
    from pyop3_mlir.bench import pyop3 as bench

    cases = _known_cases(case, [known.name for known in bench.CASES])
    console = _console()
    with _measuring(console) as report:
        rows = bench.run_pyop3_bench(
            json, cases, size=size, runs=runs, tune_budget=budget, report=report
        )
    console.print(bench.table(rows))


@bench_app.command("mpi")
def bench_mpi(
    json: Json = None,
    case: Cases = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of processes; may be given several times."),
    ] = None,
    size: Size = 1.0,
    runs: Annotated[int, typer.Option(min=7, help="Samples of each case.")] = 15,
    budget: Budget = None,
) -> None:
    """Measure weak and strong scaling on this machine, beside PyOP2's; starts mpiexec itself."""
    from pyop3_mlir.bench.mpi import CASES, run_mpi_bench, table

    cases = _known_cases(case, CASES)
    console = _console()
    with _measuring(console) as report:
        rows = run_mpi_bench(
            json,
            cases,
            ranks=ranks or None,
            size=size,
            runs=runs,
            tune_budget=budget,
            report=report,
        )
    console.print(table(rows))


@bench_app.command("tuner")
def bench_tuner(
    json: Json = None,
    case: Cases = None,
    device: Device = None,
    size: Size = 1.0,
    budget: Budget = None,
) -> None:
    """Compare what the tuner chooses within its budget with the best of all candidates."""
    from pyop3_mlir.bench.cases import CASES
    from pyop3_mlir.bench.tuner import run_tuner_bench, table

    cases = _known_cases(case, (known.name for known in CASES))
    options = Options.resolve(device=device, tune_budget=budget)
    console = _console()
    with _measuring(console) as report:
        rows = run_tuner_bench(
            json,
            cases,
            device=options.device,
            size=size,
            budget=options.tune_budget,
            report=report,
        )
    console.print(table(rows))


@app.command()
def tune(
    target: Target,
    device: Device = None,
    budget: Annotated[float | None, typer.Option(help="Seconds that it may take.")] = None,
    size: Annotated[float, typer.Option(help="Factor on a case's number of cells.")] = 1.0,
    chart: Annotated[Path | None, typer.Option(help="Draw a bar chart to this file.")] = None,
) -> None:
    """Measure the schedules of a loop, print the table, and remember the fastest."""
    from pyop3_mlir import engine
    from pyop3_mlir.runtime.devices import get_device

    options = Options.resolve(device=device, tune_budget=budget, tune="force")
    loop = _load_loop(target, size)
    choice = engine.choose_schedule(loop, get_device(options.device), options)
    console = _console()
    if choice.result is not None:
        console.print(choice.result.table())
    console.print(f"{loop.name}: [bold]{choice.schedule}[/], {choice.reason}", highlight=False)
    if chart is not None:
        if choice.result is None:
            raise OptionError(f"--chart: nothing was measured ({choice.reason})")
        from pyop3_mlir.autotune.plot import bar_chart

        bar_chart(choice.result, chart, loop.name)


@app.command()
def explain(
    target: Target,
    device: Device = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Print only this stage; may be given several times.")
    ] = None,
    tune: Annotated[
        str | None, typer.Option(help="off, cached or force; else the setting `tune`.")
    ] = None,
    size: Annotated[float, typer.Option(help="Factor on a case's number of cells.")] = 1.0,
) -> None:
    """Show what becomes of a loop: its kernel, the strategies, the tuner's table, every stage."""
    from pyop3_mlir.explain import explain

    options = Options.resolve(device=device, tune=tune)
    found = explain(_load_loop(target, size), options=options)
    stages = found.stages
    for name in stage or ():
        if name not in stages:
            raise OptionError(f"--stage: there is no stage {name}; there are {', '.join(stages)}")
    console = _console()
    if not stage:
        console.rule("kernel")
        # as it is: brackets are no markup, and lines are not to be broken
        console.out(found.kernel, highlight=False)
        console.rule("arguments")
        console.out("\n".join(found.arguments), highlight=False)
        console.rule("schedule")
        table = Table("strategy", f"on {found.device}")
        for strategy, reason in found.strategies.items():
            table.add_row(strategy, "possible" if reason is None else f"not possible: {reason}")
        console.print(table)
        console.print(f"[bold]{found.schedule}[/]: {escape(found.reason)}", highlight=False)
        if found.result is not None:
            console.print(found.result.table())
    for name, text in stages.items():
        if not stage or name in stage:
            console.rule(name)
            console.out(text, highlight=False)


def _load_loop(target: str, size: float) -> Parloop:
    """Make the loop that a TARGET argument names."""
    from pyop3_mlir.parloop import Parloop

    place, colon, name = target.rpartition(":")
    if not colon:
        from pyop3_mlir.bench.cases import case_named

        try:
            return case_named(target).loop(size).parloop
        except ValueError as error:
            raise OptionError(str(error)) from None
    function = getattr(_load_module(place), name, None)
    if not callable(function):
        raise OptionError(f"{place} has no function {name}")
    if any(p.default is p.empty for p in inspect.signature(function).parameters.values()):
        raise OptionError(f"{target} takes arguments; name a function without any")
    loop = function()
    if not isinstance(loop, Parloop):
        raise OptionError(f"{target} returned {type(loop).__name__}, not a Parloop")
    return loop


def _load_module(place: str) -> Any:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise OptionError(f"cannot import {place}: {error}") from None
    path = Path(place).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise OptionError(f"there is no file {place}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    # as `python FILE` does it
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


@app.command()
def devices() -> None:
    """List the devices of this machine, and why a kind of device is missing."""
    from pyop3_mlir.runtime.devices import available

    table = Table("device", "name", "memory", "f64", "f64 atomics", "available")
    for info in available():
        table.add_row(
            info.spec,
            info.name,
            f"{info.memory / 2**30:.1f} GiB" if info.memory else "",
            _yes(info.f64),
            _yes(info.f64_atomics),
            "yes" if info.unavailable is None else f"no: {info.unavailable}",
        )
    _console().print(table)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _caches() -> dict[str, Cache]:
    from pyop3_mlir.runtime.cache import Cache

    root = Options.resolve().cache_dir
    return {kind: Cache(root / kind) for kind in ("modules", "tuning")}


@cache_app.command("list")
def cache_list() -> None:
    """List compiled modules and tuning results, the oldest first."""
    table = Table("kind", "created", "size", "file")
    total = count = 0
    for kind, cache in _caches().items():
        for entry in cache.list():
            created = datetime.fromtimestamp(entry.created).isoformat(" ", "seconds")
            table.add_row(kind, created, f"{entry.size:,}", entry.path.name)
            total, count = total + entry.size, count + 1
    console = _console()
    if count:
        console.print(table)
    root = Options.resolve().cache_dir
    console.print(f"{count} entries, {total:,} bytes, in {root}", highlight=False, soft_wrap=True)


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove all compiled modules and tuning results."""
    for kind, cache in _caches().items():
        typer.echo(f"{kind}: removed {cache.clear()}")


@cache_app.command("verify")
def cache_verify() -> None:
    """Check every file; remove damaged ones, and exit with 1 where there were any."""
    damaged = 0
    for kind, cache in _caches().items():
        for path, reason in cache.verify():
            damaged += 1
            typer.echo(f"{kind}: removed {path}: {reason}")
        typer.echo(f"{kind}: {len(cache.list())} good entries")
    if damaged:
        raise typer.Exit(1)


@app.command()
def doctor(device: Device = None) -> None:
    """Check the installation: versions, devices, caches, and a loop that is compiled and run.

    Under mpiexec it shows where each process runs.
    """
    from pyop3_mlir.doctor import State, examine, placement_table
    from pyop3_mlir.parallel import placement, world

    options = Options.resolve(device=device)
    processes = world()
    if processes is not None:
        places = placement(processes, options.device)
        if processes.rank:
            return
        _console().print(placement_table(places))
    table = Table("", "what", "found", show_lines=False)
    marks = {State.GOOD: "[green]good[/]", State.NOTE: "note", State.BAD: "[bold red]bad[/]"}
    bad = 0
    for finding in examine(options):
        bad += finding.state is State.BAD
        table.add_row(marks[finding.state], finding.what, finding.found)
    _console().print(table)
    if bad:
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run(
    script: Annotated[str, typer.Argument(help="The script, unmodified.", metavar="SCRIPT.py")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own command line.", metavar="ARGS...")
    ] = None,
    device: Device = None,
    report: Annotated[
        str | None, typer.Option("--report", help="Write what became of the loops, as JSON.")
    ] = None,
) -> None:
    """Run a Firedrake script on the engine, alone or under mpiexec.

    Options of this command stand before SCRIPT.py.
    """
    from pyop3_mlir.frontends import run_script

    run_script(script, arguments or [], report, device=device)


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def bundle(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write.")],
    script: Annotated[
        str | None, typer.Argument(help="A script whose loops are wanted.", metavar="[SCRIPT.py")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own command line.", metavar="ARGS...]")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="What to compile for: cpu, cpu/x86-64-v3, cuda/sm_80, hip/gfx90a, vulkan/ampere, "
            "or a device that is here; may be given several times. cpu where not given."
        ),
    ] = None,
    case: Cases = None,
    size: Size = 0.01,
) -> None:
    """Compile the loops of a script ahead of time, for machines without a compiler.

    Runs SCRIPT.py here once, notes its loops, and compiles them for every target. There, set
    PYOP3_MLIR_BUNDLE to the directory. Options of this command stand before SCRIPT.py.
    """
    from pyop3_mlir import bundle as bundles
    from pyop3_mlir.bench.cases import CASES, case_named

    names = _known_cases(case, (known.name for known in CASES))
    if script is None and not names:
        raise OptionError("bundle: name a script, or cases by --case")
    targets = [bundles.target_device(text) for text in target or ["cpu"]]
    with bundles.record(targets) as recorder:
        for name in names or ():
            recorder.add(case_named(name).loop(size).parloop)
        if script is not None:
            bundles.run_script(script, arguments or [])
    if not recorder.loops:
        raise OptionError(f"bundle: {script} has run no loop on the engine")
    console = _console()
    with console.status("compiling ...") as status:
        found = recorder.write(output, status.update)
    loops = len(recorder.loops) // len(targets)
    console.print(
        f"{loops} loops, {len(found.modules)} modules for {len(targets)} targets, in {output}",
        highlight=False,
        soft_wrap=True,
    )


def main() -> None:
    """Run the command that ``sys.argv`` names; errors of this package become one line."""
    try:
        app()
    except Pyop3MlirError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        # what a user's own script misses is its own affair
        if extra is None or sys.argv[1:2] == ["run"]:
            raise
        _fail(f"this needs {error.name}; install it with: pip install 'pyop3_mlir[{extra}]'")


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print("[bold red]error:[/]", escape(message), soft_wrap=True)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.COMM_WORLD.size > 1:
        # other processes may wait for this one, and leaving waits for them
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)
    sys.exit(1)

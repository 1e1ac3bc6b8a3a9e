"""Ways in for programs that know nothing of this package, and what they have done.

:func:`install`, :func:`uninstall` and :func:`backend` switch the engine on under whichever of PyOP2
and pyop3 is installed; :func:`report` says what became of the loops.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyop3_mlir.errors import Pyop3MlirError
from pyop3_mlir.options import Options

__all__ = ["backend", "install", "report", "report_as_dict", "run_script", "uninstall"]

_attached: list[list[Any]] = []
"""The back ends that each :func:`install` in force has attached."""

_finished: list[Any] = []
"""Back ends that have been detached; their loops stay in the report."""


def _attach(options: Options) -> list[Any]:
    found: list[Any] = []
    if _has("pyop2.parloop"):
        from pyop3_mlir.frontends import dropin

        found.append(dropin.attach(options))
    if _has("pyop3.insn.exec"):
        from pyop3_mlir.frontends import pyop3

        found.append(pyop3.attach(options))
    if not found:
        raise Pyop3MlirError(
            "there is nothing to install the back end under: neither PyOP2 nor pyop3 can be "
            "imported. Install Firedrake, or use the engine on arrays (pyop3_mlir.engine)"
        )
    return found


def _has(module: str) -> bool:
    """Whether a package is installed, told by one of its modules; imports nothing.

    A folder that has the package's name, and may hold anything, could be imported as well.
    """
    path: Any = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = (
            importlib.util.find_spec(part)
            if path is None
            else importlib.machinery.PathFinder.find_spec(name, path)
        )
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def install(**settings: Any) -> None:
    """Run parallel loops on the engine from now on; calls nest.

    Parameters
    ----------
    **settings
        Any of the settings of :class:`~pyop3_mlir.options.Options`, such as ``device="cpu"``; those
        not given are looked up in PETSc's options and the environment.

    Raises
    ------
    OptionError
        For an unknown setting or value.
    Pyop3MlirError
        Where there is no package whose loops could be run.
    """
    _attached.append(_attach(Options.resolve(**settings)))


def uninstall() -> None:
    """Undo the latest :func:`install`: every name that it replaced is what it was.

    Raises
    ------
    Pyop3MlirError
        Where nothing is installed.
    """
    if not _attached:
        raise Pyop3MlirError("the back end is not installed")
    for part in reversed(_attached.pop()):
        # the front end that has attached it
        sys.modules[type(part).__module__].detach(part)
        _finished.append(part)


@contextmanager
def backend(**settings: Any) -> Iterator[None]:
    """:func:`install` for the length of a ``with`` block."""
    install(**settings)
    try:
        yield
    finally:
        uninstall()


def report_as_dict() -> dict[str, Any]:
    """What the report holds: one entry a kernel, and the share of calls that the engine ran.

    Returns
    -------
    dict
        ``{"loops": [{"name", "calls", "lowered", "strategy", "reason", "seconds", "core",
        "waiting", "owned"}], "lowered_fraction", "bytes_moved": {device: {"to_device",
        "to_host"}}}``; the fraction is 1 where there were no calls. Bytes are those between the
        host and devices with memory of their own. Under MPI these are this process's; see
        :class:`~pyop3_mlir.frontends.dropin.Entry` for the times.
    """
    return _content(list(_entries().values()))


def _entries() -> dict[str, dict[str, Any]]:
    parts = [*_finished, *(part for parts in _attached for part in parts)]
    return {
        f"{number} {key}": entry.as_dict()
        for number, part in enumerate(parts)
        for key, entry in part.entries.items()
    }


def _content(entries: list[dict[str, Any]]) -> dict[str, Any]:
    calls = sum(entry["calls"] for entry in entries)
    lowered = sum(entry["lowered"] for entry in entries)
    return {
        "loops": entries,
        "lowered_fraction": lowered / calls if calls else 1.0,
        "bytes_moved": _bytes_moved(),
    }


def _content_of_all(world: Any) -> dict[str, Any]:
    """The report of all processes, on the first: the largest of each number. Collective."""
    merged: dict[str, dict[str, Any]] = {}
    for entries in world.gather(_entries()) or ():
        for key, entry in entries.items():
            found = merged.setdefault(key, dict(entry))
            for name, value in entry.items():
                if not isinstance(value, str):
                    found[name] = max(found[name], value)
    return {**_content(list(merged.values())), "processes": world.size}


def _bytes_moved() -> dict[str, dict[str, int]]:
    # where nothing has run, the runtime need not be imported
    residency: Any = sys.modules.get("pyop3_mlir.runtime.residency")
    return {} if residency is None else residency.traffic_by_device()


def report(path: str | Path | None = None) -> None:
    """Print what became of the loops as a table, or write it as JSON.

    Parameters
    ----------
    path
        File to write; the table is printed where not given.
    """
    content = report_as_dict()
    if path is not None:
        _write(content, path)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("loop", "calls", "lowered", "seconds", "strategy", "reason")
    for entry in sorted(content["loops"], key=lambda e: -e["seconds"]):
        table.add_row(
            entry["name"],
            str(entry["calls"]),
            str(entry["lowered"]),
            f"{entry['seconds']:.3g}",
            entry["strategy"],
            entry["reason"],
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{content['lowered_fraction']:.1%} of the calls ran on the engine")
    for device, moved in content["bytes_moved"].items():
        print(f"{moved['to_device']:,} bytes to {device}, {moved['to_host']:,} back")


def _write(content: dict[str, Any], path: str | Path) -> None:
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run_script(
    script: str, arguments: Sequence[str], report_path: str | None = None, **settings: Any
) -> None:
    """Run a Python script, unmodified, with the back end installed.

    Parameters
    ----------
    script
        Its file.
    arguments
        Its command line, PETSc's options included.
    report_path
        Where to write the report as JSON. Under MPI the first process writes it, with the largest
        of all processes' calls and times. Where the script fails, the loops until then.
    **settings
        As for :func:`install`.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    if importlib.util.find_spec("firedrake") is not None:
        # it starts PETSc, with the script's options, which PyOP2 alone would do without them
        importlib.import_module("firedrake")
    failed = True
    with backend(**settings):
        try:
            runpy.run_path(script, run_name="__main__")
            failed = False
        except SystemExit:
            failed = False
            raise
        finally:
            if report_path is not None:
                _report_of_run(report_path, failed)


def _report_of_run(path: str, failed: bool) -> None:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    world = None if mpi is None else mpi.COMM_WORLD
    if world is None or world.size == 1:
        report(path)
    elif not failed:
        content = _content_of_all(world)
        if world.rank == 0:
            _write(content, path)
    elif world.rank == 0:
        # the others may wait for this one somewhere
        report(path)

"""``doctor``: look at what a loop needs, and run one whose answer is known."""

from __future__ import annotations

import enum
import importlib.util
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from pyop3_mlir import __version__
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import Parloop

if TYPE_CHECKING:
    from pyop3_mlir.parallel import Place

__all__ = ["Finding", "State", "examine", "placement_table", "small_loop"]


class State(enum.Enum):
    """How bad a finding is."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    state
        BAD where loops will not run.
    what, found
        What was looked at, and what there is, with what to do about it.
    """

    state: State
    what: str
    found: str


# What each is needed for, beside the core.
_OPTIONAL = {
    "loopy": "local kernels of PyOP2 and pyop3",
    "petsc4py": "PETSc's vectors and matrices",
    "firedrake": "running Firedrake scripts",
    "matplotlib": "charts",
}


def examine(options: Options) -> Iterator[Finding]:
    """Look at versions, settings, caches, devices, and run a loop; yields findings as they come.

    Parameters
    ----------
    options
        The device that the loop runs on, and the cache directory.
    """
    yield Finding(State.GOOD, "pyop3_mlir", f"{__version__}, Python {platform.python_version()}")
    for name in ("xdsl", "iree-base-compiler", "iree-base-runtime", "firedrake-fiat", "numpy"):
        yield _version(name)
    for module, purpose in _OPTIONAL.items():
        yield _optional(module, purpose)
    compiler = shutil.which("gcc")
    if compiler:
        yield Finding(State.GOOD, "gcc", compiler)
    else:
        yield Finding(State.NOTE, "gcc", "absent; needed for `bench engine` to compare with")
    for name, value in options.as_dict().items():
        if options.sources[name] != "default":
            yield Finding(State.NOTE, f"setting {name}", f"{value} ({options.sources[name]})")
    yield _attempt("cache", lambda: _check_cache(options), State.NOTE)
    yield from _devices()
    yield _attempt(f"device {options.device}", lambda: _check_device(options), State.BAD)
    yield _attempt("a loop", lambda: _check_loop(options), State.BAD)


def placement_table(places: Sequence[Place]) -> Any:
    """Where the processes of an MPI program run, a :class:`rich.table.Table`.

    Parameters
    ----------
    places
        From :func:`~pyop3_mlir.parallel.placement`.
    """
    from rich.table import Table

    table = Table("process", "machine", "its number there", "device", "threads", "cores")
    for place in places:
        table.add_row(
            str(place.rank),
            place.host,
            str(place.local_rank),
            place.device,
            str(place.threads) if place.threads else "",
            _ranges(place.cores),
        )
    table.caption = "; ".join(_crowded(places))
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3 and 8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _crowded(places: Sequence[Place]) -> Iterator[str]:
    """Machines on which threads have to share cores, or processes a GPU."""
    for host in dict.fromkeys(place.host for place in places):
        here = [place for place in places if place.host == host]
        threads = sum(place.threads for place in here)
        cores = len({core for place in here for core in place.cores})
        if threads > cores:
            yield f"{host}: {threads} threads share {cores} cores"
        gpus = [place.device for place in here if not place.threads]
        if len(set(gpus)) < len(gpus):
            yield f"{host}: {len(gpus)} processes share {len(set(gpus))} GPUs"


def _version(distribution: str) -> Finding:
    try:
        return Finding(State.GOOD, distribution, metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return Finding(State.BAD, distribution, "not installed; install pyop3_mlir again")


def _optional(module: str, purpose: str) -> Finding:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return Finding(State.NOTE, module, f"absent; needed for {purpose}")
    try:
        return Finding(State.GOOD, module, metadata.version(module))
    except metadata.PackageNotFoundError:
        return Finding(State.GOOD, module, "present")


def _attempt(what: str, check: Callable[[], str], failure: State) -> Finding:
    try:
        return Finding(State.GOOD, what, check())
    except Exception as error:
        # whatever it is, it is what the user came to find out
        return Finding(failure, what, f"{type(error).__name__}: {error}")


def _check_cache(options: Options) -> str:
    options.cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=options.cache_dir):
        pass
    free = shutil.disk_usage(options.cache_dir).free / 2**30
    return f"{options.cache_dir} can be written to, {free:.1f} GiB free"


def _devices() -> Iterator[Finding]:
    from pyop3_mlir.runtime.devices import available

    for info in available():
        if info.unavailable is not None:
            yield Finding(State.NOTE, info.spec, f"absent: {info.unavailable}")
            continue
        memory = f", {info.memory / 2**30:.1f} GiB" if info.memory else ""
        lacks = [] if info.f64 else ["double precision"]
        lacks += [] if info.f64_atomics else ["atomic addition of doubles"]
        without = f", without {' and '.join(lacks)}" if lacks else ""
        yield Finding(State.GOOD, info.spec, f"{info.name}{memory}{without}")


def _check_device(options: Options) -> str:
    from pyop3_mlir.runtime.devices import get_device

    device = get_device(options.device)
    return f"{device}, compiled for {device.target.backend}"


def small_loop() -> Parloop:
    """Sum a value of each end of an edge into the other, on a ring of 100 edges."""
    from pyop3_mlir.kernels.program import KernelArgument, Load, LocalKernel, Op, Scalar
    from pyop3_mlir.parloop import INC, READ, Argument, IndexTable, IterationSet

    real = np.dtype(np.float64)
    y, x = KernelArgument("y", (2,), real), KernelArgument("x", (2,), real)
    kernel = LocalKernel.pointwise(
        "neighbours", (y, x), lambda i: Load(x, (Op("sub", Scalar(1), i),))
    )
    edges = np.arange(100)
    ends = IndexTable(np.stack([edges, (edges + 1) % 100], axis=1), 100)
    values = np.cos(np.arange(100.0))
    return Parloop(
        kernel,
        IterationSet(100),
        [
            Argument.indirect(np.zeros(100), INC, ends, "y"),
            Argument.indirect(values, READ, ends, "x"),
        ],
    )


def _check_loop(options: Options) -> str:
    from time import perf_counter

    from pyop3_mlir import engine
    from pyop3_mlir.options import overriding

    loop = small_loop()
    start = perf_counter()
    with overriding(device=options.device, tune="off"):
        bound = engine.compile(loop)
        bound()
    elapsed = perf_counter() - start
    x = loop.arguments[1].buffer
    error = float(np.abs(loop.arguments[0].buffer - np.roll(x, 1) - np.roll(x, -1)).max())
    if error > 1e-14:
        raise ArithmeticError(f"the result is wrong by {error:.1e}")
    return f"compiled and run in {elapsed:.2f} s ({bound.schedule}), error {error:.0e}"

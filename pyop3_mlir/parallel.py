"""What a communicator adds to the engine: decide once, compile once, fail together.

Each process binds a loop to its own part of a mesh, and all of them run the same code. So one
process of a communicator chooses the schedule (:func:`compile`), and each module that somebody
lacks is compiled, or read from disk, by one of those that need it and sent to the others. Processes
may need different modules: few entities, or maps with dropped entries, make another one.

Every step ends with all processes knowing whether it worked on all of them. Where it did not, all
raise the error of the first process that failed, so that none waits for another.

Communicators are mpi4py's. None, or a communicator of one process, needs no MPI.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

import pyop3_mlir.errors
from pyop3_mlir import engine
from pyop3_mlir.autotune.tuner import Arrays, Runner, check_outputs
from pyop3_mlir.engine import BoundLoop, Module, Scratch
from pyop3_mlir.errors import CompilationError, Pyop3MlirError
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import Parloop
from pyop3_mlir.runtime.devices import Device, available, get_device
from pyop3_mlir.runtime.subview import load_subview, subview_loaded, subview_module

__all__ = [
    "Place",
    "Proposal",
    "compile",
    "local_rank",
    "place",
    "placement",
    "raise_first",
    "raise_together",
    "share",
    "together",
    "world",
]

T = TypeVar("T")

_SPIN = 2e-3
"""Seconds that a process waits for another one without giving its core away."""

_NAP = 5e-4
"""Seconds between two looks after that."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """What a process brings to :func:`compile`.

    Attributes
    ----------
    parloop
        Its part of the loop.
    schedule, reason
        What the loop is to run with, and why; None where that is to be chosen.
    bound
        The loop ready to run, where nothing is left to do on this process.
    strategy
        The only scatter strategy that can run the loop, or None; whatever the settings say.
    """

    parloop: Parloop
    schedule: Schedule | None = None
    reason: str = ""
    bound: BoundLoop | None = None
    strategy: str | None = None

    def settings(self, options: Options) -> Options:
        """The settings for this loop."""
        return replace(options, strategy=self.strategy) if self.strategy else options


def compile(  # noqa: A001
    comm: Any,
    propose: Callable[[], Proposal],
    *,
    device: str | Device | None = None,
    options: Options | None = None,
) -> BoundLoop:
    """Compile a loop on all processes of a communicator. Collective.

    Parameters
    ----------
    comm
        The communicator, or None.
    propose
        Makes this process's part of the loop; may raise.
    device
        Where to run; the setting ``device`` where not given. See :func:`place`.
    options
        Settings, the same on all processes; looked up where not given.

    Returns
    -------
    BoundLoop
        This process's part. Where the schedule cannot run it, because it has too few entities or
        they depend on each other, it has one of its own.

    Raises
    ------
    Pyop3MlirError
        On all processes where one of them failed, with the text of the first one's error.
    """
    settings = options or Options.resolve()
    if comm is None or comm.size == 1:
        return _alone(propose(), device, settings)
    error, proposal = _attempt(lambda: _ready(propose(), device, settings))
    all_ready, leader = _compare(comm, error, proposal)
    assert proposal is not None
    if all_ready:
        assert proposal.bound is not None
        return proposal.bound
    options = proposal.settings(settings)
    where = together(comm, lambda: _device(device, options))
    schedule, reason = _Council(comm, leader, proposal, where, options).choose()
    parloop = proposal.parloop

    def modules() -> tuple[Schedule, list[Module]]:
        own = _own(schedule, parloop, where, options)
        return own, engine.modules_for(parloop, own, where)

    own, needed = together(comm, modules)
    share(comm, [*needed, _Subview(where)])
    return together(comm, lambda: BoundLoop(parloop, own, where, reason))


def _device(device: str | Device | None, options: Options) -> Device:
    return device if isinstance(device, Device) else get_device(place(device or options.device))


def _alone(proposal: Proposal, device: str | Device | None, options: Options) -> BoundLoop:
    if proposal.bound is not None:
        return proposal.bound
    options = proposal.settings(options)
    where = _device(device, options)
    if proposal.schedule is not None:
        return BoundLoop(proposal.parloop, proposal.schedule, where, proposal.reason or "given")
    return engine.compile(proposal.parloop, where, options=options)


def _ready(proposal: Proposal, device: str | Device | None, options: Options) -> Proposal:
    """The proposal with its loop bound, where this process has all the modules already."""
    if proposal.bound is not None or proposal.schedule is None:
        return proposal
    options = proposal.settings(options)
    where = _device(device, options)
    own = _own(proposal.schedule, proposal.parloop, where, options)
    if not all(module.loaded for module in engine.modules_for(proposal.parloop, own, where)):
        return proposal
    bound = BoundLoop(proposal.parloop, own, where, proposal.reason or "given")
    return replace(proposal, bound=bound)


def _own(schedule: Schedule, parloop: Parloop, device: Device, options: Options) -> Schedule:
    """The schedule, or the heuristic's where it cannot run this process's part of the loop."""
    flat = schedule.batching == "flat" and parloop.order_dependent
    if flat or engine.impossible(parloop, schedule.strategy, device) is not None:
        return engine.choose_schedule(parloop, device, replace(options, tune="off")).schedule
    return schedule


@dataclass(frozen=True)
class _Subview:
    """What arrays are passed to a device by, as a module to be shared."""

    device: Device

    @property
    def key(self) -> str:
        return f"subview {self.device.target.fingerprint}"

    @property
    def loaded(self) -> bool:
        return subview_loaded(self.device)

    def build(self) -> bytes:
        return subview_module(self.device)

    def load(self, content: bytes) -> None:
        load_subview(self.device, content)


def share(comm: Any, modules: Sequence[Module | _Subview]) -> None:
    """Load modules on all processes, each compiled or read by one of those that need it.

    Collective. Different modules are compiled by different processes at the same time.

    Parameters
    ----------
    comm
        The communicator.
    modules
        What this process needs. Processes may need different ones, or none.

    Raises
    ------
    Pyop3MlirError
        On all processes where one of them failed, with the text of the first one's error.
    """
    missing = {module.key: module for module in modules if not module.loaded}
    owners: dict[str, int] = {}
    for rank, keys in enumerate(comm.allgather(list(missing))):
        for key in keys:
            owners.setdefault(key, rank)
    built = {key: _attempt(missing[key].build) for key, rank in owners.items() if rank == comm.rank}
    contents: dict[str, Any] = {}
    first: Exception | None = None
    for key, rank in owners.items():
        error, content = built.get(key, (None, None))
        told, content = _broadcast(comm, (_described(error, rank), content), rank)
        if told is not None:
            first = first or error or told
        elif key in missing:
            contents[key] = content
    if first is not None:
        # all have heard of it
        raise first
    together(comm, lambda: [missing[key].load(content) for key, content in contents.items()])


# -- failing together -----------------------------------------------------------------------------


def together(comm: Any, action: Callable[[], T]) -> T:
    """Do something on all processes; raise on all where it fails on one. Collective.

    Parameters
    ----------
    comm
        The communicator.
    action
        Communicates nothing, or does so collectively and cannot fail before it has.

    Raises
    ------
    Exception
        This process's own error where it is the first one's, else a
        :class:`~pyop3_mlir.errors.Pyop3MlirError` with the first one's text.
    """
    error, value = _attempt(action)
    raise_together(comm, error)
    return value  # type: ignore[return-value]


def _attempt(action: Callable[[], T]) -> tuple[Exception | None, T | None]:
    try:
        return None, action()
    except Exception as error:
        return error, None


def raise_together(comm: Any, error: Exception | None) -> None:
    """Raise on all processes the error of the first one that has one. Collective.

    Parameters
    ----------
    comm
        The communicator.
    error
        This process's own, if any.
    """
    first = int(_least(comm, [comm.size if error is None else comm.rank])[0])
    if first < comm.size:
        raise_first(comm, first, error)


def raise_first(comm: Any, first: int, error: Exception | None) -> None:
    """Raise what failed on process ``first`` on all of them, which know that it did. Collective.

    Parameters
    ----------
    comm
        The communicator.
    first
        The lowest process that failed.
    error
        This process's own error, if any.
    """
    told = comm.bcast(_described(error, first), root=first)
    raise error if comm.rank == first and error is not None else told


def _described(error: Exception | None, rank: int) -> Pyop3MlirError | None:
    """The error as other processes raise it: of the same class where it is one of ours."""
    if error is None:
        return None
    found: type[Pyop3MlirError] | None = getattr(pyop3_mlir.errors, type(error).__name__, None)
    if found is None:
        return CompilationError(f"{type(error).__name__}: {error} (on process {rank})")
    return found(f"{error} (on process {rank})")


def _compare(comm: Any, error: Exception | None, proposal: Proposal | None) -> tuple[bool, int]:
    """Whether every process is ready, and which one has the most entities; raises together."""
    ready = proposal is not None and proposal.bound is not None
    size = proposal.parloop.iteration_set.size if proposal is not None else 0
    # the largest first, and of equal ones the lowest rank
    order = -(size << 24 | (1 << 24) - 1 - comm.rank)
    first, all_ready, largest = _least(
        comm, [comm.size if error is None else comm.rank, int(ready), order]
    )
    if first < comm.size:
        raise_first(comm, first, error)
    return bool(all_ready), (1 << 24) - 1 - (-largest & (1 << 24) - 1)


def _least(comm: Any, values: Sequence[int]) -> list[int]:
    """The least of all processes' values, number by number."""
    from mpi4py import MPI

    array = np.array(values, dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, array, op=MPI.MIN)
    return [int(value) for value in array]


def _broadcast(comm: Any, value: T, root: int) -> T:
    """``comm.bcast`` that leaves the core to the process that is waited for."""
    request = comm.Ibarrier()
    patient = time.perf_counter() + _SPIN
    while not request.Test():
        if comm.rank != root and time.perf_counter() > patient:
            time.sleep(_NAP)
    found: T = comm.bcast(value, root=root)
    return found


# -- choosing together ----------------------------------------------------------------------------


class _Council:
    """The choice of a schedule in which all processes take part.

    The leader runs the tuner. What it builds and runs all build and run at the same time, each its
    own part, and a run takes as long as it does on the slowest process.
    """

    def __init__(
        self, comm: Any, leader: int, proposal: Proposal, device: Device, options: Options
    ) -> None:
        self.comm = comm
        self.leader = leader
        self.proposal = proposal
        self.device = device
        self.options = options
        self.elapsed = 0.0
        self._scratch: Scratch | None = None
        self._runners: dict[int, Runner] = {}
        self._reference: Arrays | None = None
        self._released: list[int] = []
        self._checked: set[int] = set()
        self._numbers = itertools.count()
        self._time = time.thread_time if device.threads == 1 else time.perf_counter

    def choose(self) -> tuple[Schedule, str]:
        """The schedule for all, and why; raises together."""
        if self.comm.rank == self.leader:
            error, found = _attempt(self._lead)
            self._tell("end", (_described(error, self.leader), found))
            if error is not None:
                raise error
        else:
            error, found = self._follow()
            if error is not None:
                raise error
        assert found is not None
        return found

    def _lead(self) -> tuple[Schedule, str]:
        if self.proposal.schedule is not None:
            return self.proposal.schedule, self.proposal.reason or "given"
        choice = engine.choose_schedule(
            self.proposal.parloop,
            self.device,
            self.options,
            build=self._lead_build,
            sample_clock=lambda: self.elapsed,
        )
        return choice.schedule, choice.reason

    def _lead_build(self, schedule: Schedule) -> Runner:
        number = next(self._numbers)
        self._tell("build", (number, schedule))
        self._build(number, schedule)

        def run() -> Arrays:
            self._tell("run", number)
            return self._run(number)

        # the tuner lets go of what is too slow
        weakref.finalize(run, self._released.append, number)
        return run

    def _tell(self, what: str, details: Any) -> None:
        self._forget(self._released)
        _broadcast(self.comm, (what, details, self._released), self.leader)

    def _follow(self) -> Any:
        while True:
            nothing: tuple[str, Any, list[int]] = "", None, []
            what, details, released = _broadcast(self.comm, nothing, self.leader)
            self._forget(released)
            if what == "end":
                return details
            with contextlib.suppress(Exception):
                # the leader knows of it too, and reports it
                if what == "build":
                    self._build(*details)
                else:
                    self._run(details)

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._runners.pop(number, None)

    def _build(self, number: int, schedule: Schedule) -> None:
        """Compile a candidate on all processes."""

        def modules() -> tuple[Scratch, Schedule, list[Module]]:
            scratch = self._scratch = self._scratch or Scratch(self.proposal.parloop, self.device)
            own = _own(schedule, scratch.loop, self.device, self.options)
            return scratch, own, engine.modules_for(scratch.loop, own, self.device)

        scratch, own, needed = together(self.comm, modules)
        share(self.comm, [*needed, _Subview(self.device)])
        self._runners[number] = together(self.comm, lambda: scratch.runner(own))

    def _run(self, number: int) -> Arrays:
        """Run a candidate on all processes, and add the time of the slowest one."""

        def timed() -> tuple[float, Arrays]:
            start = self._time()
            result = self._runners[number]()
            seconds = self._time() - start
            if self._reference is None:
                self._reference = [np.array(array) for array in result]
            elif number not in self._checked and self.comm.rank != self.leader:
                # the leader's is checked by the tuner
                check_outputs(self._reference, result)
            self._checked.add(number)
            return seconds, result

        error, done = _attempt(timed)
        seconds, result = done or (0.0, ())
        first, slowest = _least(
            self.comm, [self.comm.size if error is None else self.comm.rank, -int(seconds * 1e12)]
        )
        if first < self.comm.size:
            raise_first(self.comm, first, error)
        self.elapsed -= slowest / 1e12
        return result


# -- where processes run --------------------------------------------------------------------------

# The number among the processes of this machine: Hydra (MPICH, Intel MPI), Open MPI, MVAPICH,
# Slurm, PALS, Flux.
_LOCAL = (
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)


def local_rank() -> int:
    """Number of this process among those that a launcher started on this machine.

    The launcher's environment tells, so that no process has to wait for others; 0 where it does
    not.
    """
    for name in _LOCAL:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def place(spec: str) -> str:
    """The device of this process where all of them were given ``spec``.

    On CPUs it is as given: ``cpu`` is one thread a process. A kind of GPU without a number means
    that the processes of a machine take its GPUs in turn.

    Parameters
    ----------
    spec
        For :func:`~pyop3_mlir.runtime.devices.get_device`.
    """
    if ":" in spec or spec == "cpu":
        return spec
    present = sum(
        info.unavailable is None and info.spec.partition(":")[0] == spec for info in available()
    )
    return f"{spec}:{local_rank() % present}" if present else spec


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes
    ----------
    rank, host, local_rank
        Its number in the communicator, its machine, and its number there.
    device
        What :func:`place` gives it.
    threads
        That work on a loop; 0 on GPUs.
    cores
        That the process may run on.
    """

    rank: int
    host: str
    local_rank: int
    device: str
    threads: int
    cores: tuple[int, ...]


def placement(comm: Any, spec: str) -> list[Place]:
    """Where each process of a communicator runs, by rank. Collective.

    Parameters
    ----------
    comm
        The communicator.
    spec
        The setting ``device``.
    """
    device = place(spec)
    kind, _, number = device.partition(":")
    threads = int(number or 1) if kind == "cpu" else 0
    try:
        cores = tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:
        cores = tuple(range(os.cpu_count() or 1))
    found: list[Place] = comm.allgather(
        Place(comm.rank, socket.gethostname(), local_rank(), device, threads, cores)
    )
    return found


def world() -> Any:
    """All processes of this program, or None where there is one, or mpi4py is not installed.

    Imports mpi4py, and thereby starts MPI, only under a launcher.
    """
    if "mpi4py.MPI" not in sys.modules and not any(name in os.environ for name in _LOCAL):
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None

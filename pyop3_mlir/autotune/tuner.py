"""Measure candidates on the real loop and choose among them.

Timings on a shared machine drift, so candidates are never timed one after another: each round
runs every candidate that is still in the race once, and medians are compared. After each stage the
slower half leaves (successive halving, Jamieson and Talwalkar, AISTATS 2016), so that most of the
budget is spent on telling the good ones apart.
"""

from __future__ import annotations

import enum
import importlib.util
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import CompilationError
from pyop3_mlir.lowering.schedule import Schedule

__all__ = [
    "Measurement",
    "Outcome",
    "Runner",
    "TuningResult",
    "check_outputs",
    "tune",
]

log = logging.getLogger(__name__)

Arrays = Sequence[npt.NDArray[Any]]
Runner = Callable[[], Arrays]
"""Runs the loop once and returns the arrays that it wrote, which may be the same at each call."""

# After so many rounds the slower half leaves, but for those that are nearer to the best than this,
# and for so many: the fewer samples, the less a difference means.
_STAGES = ((1, 2.0, 4), (3, 1.3, 3), (7, 1.05, 2), (15, 1.0, 1))
# Before the rounds a candidate is only dropped where no noise explains the difference: where the
# best of this many runs is so much slower than the best candidate's.
_TRIES = 20
_HOPELESS = 3.0
# Shorter runs are repeated within a sample: the clock and the call's own cost would be measured.
_SHORTEST_SAMPLE = 500e-6
# Share of the budget that such runs of one candidate may take.
_PATIENCE = 0.02
# Share of the budget after which no more candidates are built.
_BUILD_SHARE = 0.7


class Outcome(enum.Enum):
    """What became of a candidate."""

    CHOSEN = "chosen"
    TIMED = "timed"
    DROPPED = "dropped"
    FAILED = "failed"
    WRONG = "wrong result"
    SKIPPED = "no time left"


@dataclass
class Measurement:
    """What is known of one candidate.

    Attributes
    ----------
    schedule
        The candidate.
    outcome
        See :class:`Outcome`.
    samples
        Seconds of one run of the loop, one entry a sample.
    build_s
        Seconds that building took.
    message
        Why it failed, else empty.
    """

    schedule: Schedule
    outcome: Outcome = Outcome.SKIPPED
    samples: list[float] = field(default_factory=list)
    build_s: float = 0.0
    message: str = ""

    @property
    def seconds(self) -> float:
        """Median of the samples; infinite where there are none."""
        return statistics.median(self.samples) if self.samples else float("inf")


@dataclass
class TuningResult:
    """The table of results and the winner.

    Attributes
    ----------
    best
        The schedule to use.
    measurements
        One for each candidate, the fastest first.
    elapsed_s
        Seconds that tuning took.
    complete
        False where the budget ended it before every candidate was measured.
    """

    best: Schedule
    measurements: list[Measurement]
    elapsed_s: float
    complete: bool

    def __str__(self) -> str:
        """Return the table as plain text, one candidate a line."""
        best = self._best_seconds()
        lines = []
        tried = [m for m in self.measurements if m.outcome is not Outcome.SKIPPED]
        for m in tried:
            if m.samples:
                ratio = f"{m.seconds / best:6.2f}x" if best else ""
                figures = f"{m.seconds * 1e3:10.4f} ms {ratio} {len(m.samples):3d} samples"
            else:
                figures = " " * 31
            text = f"{m.schedule!s:34} {figures}  {m.outcome.value}"
            lines.append(f"{text}: {m.message}" if m.message else text)
        return "\n".join([*lines, self._summary(len(tried))])

    def table(self) -> Any:
        """Return the table for a terminal, a :class:`rich.table.Table`."""
        from rich.table import Table

        best = self._best_seconds()
        table = Table("schedule", "median", "relative", "samples", "build", "outcome")
        table.columns[0].no_wrap = True
        for column in table.columns[1:5]:
            column.justify = "right"
        tried = [m for m in self.measurements if m.outcome is not Outcome.SKIPPED]
        table.caption = self._summary(len(tried))
        for m in tried:
            table.add_row(
                str(m.schedule),
                f"{m.seconds * 1e3:.4f} ms" if m.samples else "",
                f"{m.seconds / best:.2f}" if m.samples and best else "",
                str(len(m.samples)) if m.samples else "",
                f"{m.build_s:.2f} s" if m.build_s else "",
                f"{m.outcome.value}: {m.message}" if m.message else m.outcome.value,
                style="bold" if m.outcome is Outcome.CHOSEN else "",
            )
        return table

    def _summary(self, tried: int) -> str:
        text = f"{tried} of {len(self.measurements)} candidates tried in {self.elapsed_s:.1f} s"
        return text if self.complete else f"{text}; the time budget ended it early"

    def _best_seconds(self) -> float:
        chosen = [m.seconds for m in self.measurements if m.outcome is Outcome.CHOSEN and m.samples]
        return chosen[0] if chosen else 0.0


def check_outputs(reference: Arrays, result: Arrays) -> None:
    """Raise ``ValueError`` unless two results of one loop are equal within rounding.

    Schedules add the same numbers up in different orders. That changes an entry by a few units of
    rounding of the largest *term*, which may be far larger than the sum, so differences are held
    against ``eps**(2/3)`` (4e-11 for double precision) of the largest entry. Integers have to be
    equal.

    Parameters
    ----------
    reference, result
        Arrays of the same shapes and dtypes.
    """
    if len(reference) != len(result):
        raise ValueError(f"{len(result)} arrays instead of {len(reference)}")
    for number, (a, b) in enumerate(zip(reference, result, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"array {number} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
            )
        if a.dtype.kind not in "fc":
            different = a != b
        else:
            finite = np.isfinite(a)
            limit = np.finfo(a.dtype).eps ** (2 / 3) * float(np.abs(a[finite]).max(initial=0.0))
            with np.errstate(invalid="ignore"):
                close = np.abs(a - b) <= limit
            different = ~(close | (a == b) | (np.isnan(a) & np.isnan(b)))
        if different.any():
            at = tuple(int(i) for i in np.argwhere(different)[0])
            raise ValueError(
                f"{int(different.sum())} of {a.size} entries of array {number} differ; "
                f"entry {list(at)} is {b[at]}, not {a[at]}"
            )


def tune(
    candidates: Iterable[Schedule],
    build: Callable[[Schedule], Runner],
    *,
    budget_s: float = 20.0,
    check: Callable[[Arrays, Arrays], None] = check_outputs,
    neighbours: Callable[[Schedule], Iterable[Schedule]] | None = None,
    workers: int = 1,
    progress: bool | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sample_clock: Callable[[], float] | None = None,
) -> TuningResult:
    """Find the fastest candidate.

    Parameters
    ----------
    candidates
        The most promising first: where time is short, the last ones are not tried. The first one's
        result is what the others' are checked against.
    build
        Compiles a candidate and returns a function that runs the real loop once, on copies of the
        buffers that it writes, and returns them. Runners must start from the same data.
    budget_s
        Seconds that all of it may take. The first candidate is built whatever it says.
    check
        Called with the results of the first candidate's first run and of another's; raises
        ``ValueError`` where they differ.
    neighbours
        Schedules worth trying once a schedule has turned out to be the best so far.
    workers
        Candidates that are built at the same time, in threads. Nothing is timed meanwhile.
    progress
        Show a progress bar; by default on a terminal, on the first of several processes.
    clock
        Seconds from any origin; keeps the budget.
    sample_clock
        Seconds of a run; ``clock`` where not given. For loops that run in the calling thread alone
        ``time.thread_time`` is better: it stands still while another process has the core.

    Returns
    -------
    TuningResult
        With at least one measured candidate, unless the budget is 0: then the first candidate is
        chosen without measuring.

    Raises
    ------
    ValueError
        Without candidates.
    CompilationError
        Where no candidate could be built and run; carries the first one's error.
    """
    queue = list(dict.fromkeys(candidates))
    if not queue:
        raise ValueError("no candidates to tune")
    race = _Race(build, check, clock, sample_clock or clock, budget_s, workers)
    if budget_s <= 0:
        rest = [Measurement(schedule) for schedule in queue[1:]]
        first = Measurement(queue[0], Outcome.CHOSEN)
        return TuningResult(queue[0], [first, *rest], 0.0, complete=False)
    with _progress_bar(progress, len(queue)) as step:
        race.enter(queue, step)
        race.run(step)
        while neighbours is not None and race.alive:
            # what is near to the best so far, until nothing new is, or it is not better
            best = race.leader
            fresh = [s for s in dict.fromkeys(neighbours(best.schedule)) if s not in race.seen]
            if not fresh or race.used(_BUILD_SHARE):
                break
            race.enter(fresh, step)
            race.run(step)
            if race.leader is best:
                break
    return race.finish()


class _Race:
    """Candidates that have been built, and how they are doing."""

    def __init__(
        self,
        build: Callable[[Schedule], Runner],
        check: Callable[[Arrays, Arrays], None],
        clock: Callable[[], float],
        sample_clock: Callable[[], float],
        budget_s: float,
        workers: int,
    ) -> None:
        self.build, self.check, self.workers = build, check, workers
        self.clock, self.sample_clock = clock, sample_clock
        self.started = clock()
        self.budget_s = budget_s
        self.measurements: list[Measurement] = []
        self.seen: set[Schedule] = set()
        self.alive: dict[Schedule, tuple[Measurement, Runner, int]] = {}
        self.reference: list[npt.NDArray[Any]] | None = None
        self.error: Exception | None = None
        self.complete = True

    @property
    def leader(self) -> Measurement:
        """The best so far of those in the race."""
        return min((m for m, _, _ in self.alive.values()), key=lambda m: m.seconds)

    def used(self, share: float = 1.0, ahead: float = 0.0) -> bool:
        """Whether this share of the budget is spent, or will be ``ahead`` seconds from now."""
        return self.clock() - self.started + ahead >= share * self.budget_s

    def enter(self, schedules: Sequence[Schedule], step: Callable[[str, int], None]) -> None:
        """Build candidates while there is time, check them, and time each once."""
        waiting = [Measurement(schedule) for schedule in schedules]
        self.seen.update(schedules)
        self.measurements += waiting
        while waiting:
            built = [m.build_s for m in self.measurements if m.build_s]
            typical = statistics.mean(built) if built else 0.0
            if self.reference is not None and self.used(_BUILD_SHARE, ahead=typical):
                self.complete = False
                return
            # the very first alone: where time is short it is the only one
            chunk = waiting[: self.workers if built else 1]
            del waiting[: len(chunk)]
            step(f"building {chunk[0].schedule}", len(waiting))
            # nothing else is timed while these are built
            for measurement, made in zip(chunk, self._build_all(chunk), strict=True):
                try:
                    self._enter(measurement, made())
                except Exception as error:
                    self._failed(measurement, error)

    def _build_all(self, chunk: Sequence[Measurement]) -> list[Callable[[], Runner]]:
        """Build candidates side by side; each result returns the runner or raises what failed."""

        def build(measurement: Measurement) -> Runner:
            start = self.clock()
            try:
                return self.build(measurement.schedule)
            finally:
                measurement.build_s = self.clock() - start

        if len(chunk) == 1:
            return [partial(build, chunk[0])]
        with ThreadPoolExecutor(len(chunk)) as pool:
            futures = [pool.submit(build, measurement) for measurement in chunk]
        return [future.result for future in futures]

    def _failed(self, measurement: Measurement, error: Exception) -> None:
        """Note what a compiler or a device raised: the other candidates can still win."""
        self.error = self.error or error
        measurement.outcome = Outcome.FAILED
        measurement.message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        log.info("candidate %s failed: %s", measurement.schedule, error)

    def _enter(self, measurement: Measurement, runner: Runner) -> None:
        start = self.sample_clock()
        result = runner()
        first = self.sample_clock() - start
        if self.reference is None:
            # a copy: the next run adds to the same arrays
            self.reference = [np.array(array) for array in result]
        else:
            try:
                self.check(self.reference, result)
            except ValueError as error:
                measurement.outcome, measurement.message = Outcome.WRONG, str(error)
                log.warning("candidate %s computes something else: %s", measurement.schedule, error)
                return
        once = first
        # a first run may plan and touch pages for the first time; but where runs are slow enough to
        # cost a share of the budget, more of them are not worth it
        patience = _PATIENCE * self.budget_s if self.alive else math.inf
        limit = _HOPELESS * self.leader.seconds if self.alive else math.inf
        spent = first
        for _ in range(_TRIES):
            if spent > patience:
                break
            start = self.sample_clock()
            runner()
            elapsed = self.sample_clock() - start
            once, spent = min(once, elapsed), spent + elapsed
            # a process that was put aside for a moment looks hopeless as well
            if once <= limit:
                break
        repeats = max(1, min(1000, math.ceil(_SHORTEST_SAMPLE / max(once, 1e-9))))
        measurement.samples.append(once)
        measurement.outcome = Outcome.TIMED
        self.alive[measurement.schedule] = (measurement, runner, repeats)
        self._drop(beyond=_HOPELESS, keep=1)

    def run(self, step: Callable[[str, int], None]) -> None:
        """Time those in the race against each other until one is left or time is up."""
        # whoever stayed from an earlier race has been timed with other company
        for measurement, _, _ in self.alive.values():
            del measurement.samples[1:]
        rounds = 0
        for end, near, least in _STAGES:
            step(f"timing {len(self.alive)} candidates", 0)
            while rounds < end:
                for measurement, runner, repeats in list(self.alive.values()):
                    if self.used(ahead=measurement.seconds * repeats):
                        self.complete &= len(self.alive) == 1
                        return
                    self._sample(measurement, runner, repeats)
                rounds += 1
                if rounds == 1:
                    # the single run that let it in came right after building, caches cold
                    for measurement, _, _ in self.alive.values():
                        del measurement.samples[0]
            if len(self.alive) > 1:
                self._drop(beyond=near, keep=max((len(self.alive) + 1) // 2, least))

    def _sample(self, measurement: Measurement, runner: Runner, repeats: int) -> None:
        try:
            start = self.sample_clock()
            for _ in range(repeats):
                runner()
            measurement.samples.append((self.sample_clock() - start) / repeats)
        except Exception as error:
            self._failed(measurement, error)
            del self.alive[measurement.schedule]

    def _drop(self, *, beyond: float, keep: int) -> None:
        """Drop who is slower than ``beyond`` times the best and not among the first ``keep``."""
        ranked = sorted(self.alive.values(), key=lambda entry: entry[0].seconds)
        if not ranked:
            return
        limit = beyond * ranked[0][0].seconds
        for position, (measurement, _, _) in enumerate(ranked):
            if position >= keep and measurement.seconds > limit:
                measurement.outcome = Outcome.DROPPED
                # lets go of the runner: compiled code and scratch arrays
                del self.alive[measurement.schedule]

    def finish(self) -> TuningResult:
        """Rank everything; raise where nothing ran."""
        # a leader may fail when those it beat have left already
        timed = [m for m, _, _ in self.alive.values()] or [
            m for m in self.measurements if m.outcome is Outcome.DROPPED
        ]
        if not timed:
            raise CompilationError(
                f"none of {len(self.measurements)} candidates could be built and run; "
                f"the first error was {type(self.error).__name__}: {self.error}"
            ) from self.error
        best = min(timed, key=lambda m: m.seconds)
        best.outcome = Outcome.CHOSEN
        order = {Outcome.CHOSEN: 0, Outcome.TIMED: 1, Outcome.DROPPED: 1}
        ranked = sorted(self.measurements, key=lambda m: (order.get(m.outcome, 2), m.seconds))
        return TuningResult(best.schedule, ranked, self.clock() - self.started, self.complete)


@contextmanager
def _progress_bar(wanted: bool | None, total: int) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that takes what is being done and how many builds are to come."""
    if wanted is None:
        wanted = sys.stderr.isatty() and _is_first_process()
    if not wanted or importlib.util.find_spec("rich") is None:
        yield lambda text, remaining: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("tuning"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def step(text: str, remaining: int) -> None:
            bar.update(task, description=text, completed=max(total - remaining - 1, 0))

        yield step


def _is_first_process() -> bool:
    """Whether this is rank 0 of an MPI program; launchers tell, so that MPI stays unimported."""
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"):
        if name in os.environ:
            return os.environ[name] == "0"
    return True

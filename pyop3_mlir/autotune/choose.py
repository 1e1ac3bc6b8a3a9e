"""The choice of a loop's schedule: given, by heuristic, remembered or measured."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pyop3_mlir.autotune.candidates import (
    DeviceTraits,
    KernelStatistics,
    candidates,
    heuristic,
    neighbours,
)
from pyop3_mlir.autotune.store import recall, remember, tuning_key
from pyop3_mlir.autotune.tuner import Runner, TuningResult, tune
from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.lowering.schedule import BATCHINGS, Schedule
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import Parloop
from pyop3_mlir.runtime.cache import Cache
from pyop3_mlir.runtime.devices import Device

__all__ = ["Choice", "choose"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A loop's schedule, and why it is this one.

    Attributes
    ----------
    schedule
        What to run with.
    reason
        One phrase, for ``explain`` and reports.
    result
        The tuner's table, where there is one.
    """

    schedule: Schedule
    reason: str
    result: TuningResult | None = None


def choose(
    loop: Parloop,
    build: Callable[[Schedule], Runner],
    *,
    options: Options,
    device: Device,
    strategies: Sequence[str],
    batchings: Sequence[str] = BATCHINGS,
    sample_clock: Callable[[], float] | None = None,
    only: Sequence[Schedule] | None = None,
) -> Choice:
    """Choose the schedule that a loop runs with.

    Parameters
    ----------
    loop
        The loop, with its real maps.
    build
        As for :func:`~pyop3_mlir.autotune.tuner.tune`; not called unless something is measured.
    options
        ``strategy`` and ``batching`` narrow the choice, ``tune``, ``tune_budget`` and ``cache_dir``
        say how it is made.
    device
        What the loop runs on.
    strategies, batchings
        What can run this loop on this device, at least one of each.
    sample_clock
        Clock that runs are timed by; this process's where not given. Where given, candidates are
        built one after another.
    only
        The schedules that there are, that to take unmeasured first; all that are worth measuring
        where not given.

    Raises
    ------
    UnsupportedLoopError
        Where ``options`` ask for a strategy or a batching that cannot run the loop.
    """
    strategies = _narrow("strategy", options.strategy, strategies, loop)
    batchings = _narrow("batching", options.batching, batchings, loop)
    statistics, traits = KernelStatistics.of(loop.kernel), DeviceTraits.of(device)
    usual = heuristic(statistics, traits, strategies)
    if usual.batching not in batchings:
        usual = replace(usual, batching=batchings[0])
    if only is not None:
        only = [s for s in only if s.strategy in strategies and s.batching in batchings]
        if not only:
            raise UnsupportedLoopError(
                f"loop {loop.name}: what was compiled ahead of time has no schedule that fits the "
                "settings strategy and batching"
            )
        usual = only[0]
    if options.tune == "off":
        return Choice(usual, "heuristic (tuning is off)")
    if loop.iteration_set.size == 0:
        return Choice(usual, "heuristic (there is nothing to measure on)")
    listed = list(only or candidates(statistics, traits, strategies, batchings))
    cache = Cache(options.cache_dir / "tuning")
    fingerprint = f"{device.info.name}, {device.threads} threads, {device.target.fingerprint}"
    key = tuning_key(loop, fingerprint, listed)
    if options.tune == "cached":
        remembered = recall(cache, key)
        if remembered is not None:
            return Choice(remembered.best, "remembered from an earlier measurement", remembered)
    if len(listed) == 1:
        return Choice(listed[0], "the only candidate")
    log.info("tuning loop %s: %d candidates", loop.name, len(listed))
    result = tune(
        listed,
        build,
        budget_s=options.tune_budget,
        neighbours=partial(neighbours, statistics=statistics, traits=traits)
        if only is None
        else None,
        workers=_workers() if sample_clock is None else 1,
        # on one thread nothing else counts than what this thread does
        sample_clock=sample_clock or (time.thread_time if device.threads == 1 else None),
    )
    if any(m.samples for m in result.measurements):
        remember(cache, key, result)
        reason = f"fastest of {sum(bool(m.samples) for m in result.measurements)} measured"
    else:
        reason = "heuristic (no time to measure)"
    log.info("loop %s: %s, %s", loop.name, result.best, reason)
    return Choice(result.best, reason, result)


def _workers() -> int:
    """Compilers to run at once: the other cores belong to the other processes of an MPI program."""
    for name in ("PMI_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        if os.environ.get(name, "1") != "1":
            return 1
    try:
        return min(len(os.sched_getaffinity(0)), 4)
    except AttributeError:
        return min(os.cpu_count() or 1, 4)


def _narrow(what: str, wanted: str, possible: Sequence[str], loop: Parloop) -> Sequence[str]:
    if wanted == "auto":
        return possible
    if wanted not in possible:
        raise UnsupportedLoopError(
            f"loop {loop.name}: {what} {wanted} was asked for but cannot run it; "
            f"possible are {', '.join(possible)}"
        )
    return (wanted,)

"""Compiling and choosing on several processes: once, together, and never without an end."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("pytest_mpi", reason="mpi-pytest starts the processes")
pytest.importorskip("mpi4py", reason="needs MPI")

from pyop3_mlir import engine, parallel
from pyop3_mlir.doctor import small_loop
from pyop3_mlir.errors import (
    CompilationError,
    DeviceError,
    UnsupportedLoopError,
)
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import INC, READ, Argument, IndexTable, IterationSet, Parloop
from pyop3_mlir.runtime import subview
from pyop3_mlir.runtime.cache import Cache
from pyop3_mlir.runtime.compile import compilations

RANKS = [2, 3, 4]


@pytest.fixture(autouse=True)
def _nothing_compiled(comm, tmp_path, monkeypatch):
    """An empty cache on disk and in memory."""
    monkeypatch.setenv("PYOP3_MLIR_CACHE_DIR", comm.bcast(str(tmp_path)))
    forget(monkeypatch)


def forget(monkeypatch):
    monkeypatch.setattr(engine, "_executables", {})
    monkeypatch.setattr(subview, "_functions", {})


def ring(edges, nodes=100):
    """Each edge adds a node's value to the next one's; the first ``edges`` of a ring."""
    loop = small_loop()
    numbers = np.arange(edges)
    ends = IndexTable(np.stack([numbers, (numbers + 1) % nodes], axis=1), nodes)
    values = np.cos(np.arange(float(nodes)))
    arguments = [
        Argument.indirect(np.zeros(nodes), INC, ends, "y"),
        Argument.indirect(values, READ, ends, "x"),
    ]
    return Parloop(loop.kernel, IterationSet(edges), arguments)


def expected(loop):
    y, x = np.zeros(100), loop.arguments[1].buffer
    for a, b in loop.arguments[0].table.values:
        y[a] += x[b]
        y[b] += x[a]
    return y


def together(comm, loop, schedule=None, reason="", options=None):
    proposal = parallel.Proposal(loop, schedule, reason)
    return parallel.compile(comm, lambda: proposal, options=options or Options.resolve(tune="off"))


def compiled_by_all(comm, action):
    before = compilations()
    result = action()
    return result, comm.allreduce(compilations() - before)


@pytest.mark.parallel(RANKS)
def test_one_process_compiles(comm):
    loop = ring(100 - 20 * comm.rank)
    bound, count = compiled_by_all(comm, lambda: together(comm, loop))
    bound()
    np.testing.assert_allclose(loop.arguments[0].buffer, expected(loop), atol=1e-15)
    # and the module by which arrays are passed, which all loops share
    assert count == 2


@pytest.mark.parallel(RANKS)
def test_few_entities_or_none(comm):
    """They need a module with another width, and one of those who need it compiles it."""
    loop = ring(0 if comm.rank == 0 else 3 if comm.rank == 1 else 60 + comm.rank)
    schedule = Schedule(width=8)
    bound, count = compiled_by_all(comm, lambda: together(comm, loop, schedule))
    bound()
    np.testing.assert_allclose(loop.arguments[0].buffer, expected(loop), atol=1e-15)
    assert count == (2 if comm.size == 2 else 3)
    assert bound.schedule.width == (8 if comm.rank > 1 else 1)


@pytest.mark.parallel([2])
def test_one_process_reads_the_disk(comm, monkeypatch):
    loop = ring(50)
    together(comm, loop)
    forget(monkeypatch)
    read = []
    get = Cache.get
    monkeypatch.setattr(Cache, "get", lambda self, key: read.append(key) or get(self, key))
    before = compilations()
    together(comm, loop)
    assert compilations() == before
    assert comm.allreduce(len(read)) == 2


@pytest.mark.parallel([2])
def test_ready_processes_send_one_message(comm, monkeypatch):
    loop = ring(50)
    bound = together(comm, loop)
    monkeypatch.setattr(parallel, "share", None)
    again = together(comm, loop, bound.schedule, "again")
    assert again.schedule == bound.schedule
    assert again.reason == "again"


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parallel(RANKS)
def test_loop_that_one_process_cannot_make(comm):
    def propose():
        if comm.rank == 1:
            raise UnsupportedLoopError("map m has a hole")
        return parallel.Proposal(ring(20))

    with pytest.raises(UnsupportedLoopError, match="map m has a hole"):
        parallel.compile(comm, propose)
    # everybody can go on
    assert comm.allreduce(1) == comm.size


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("where", ["build", "load"])
def test_module_that_one_process_cannot_compile(comm, monkeypatch, where):
    last = comm.size - 1
    original = getattr(engine.Module, where)

    def fail(module, *arguments):
        if comm.rank == (0 if where == "build" else last):
            raise OSError("no space left on device")
        return original(module, *arguments)

    monkeypatch.setattr(engine.Module, where, fail)
    with pytest.raises((CompilationError, OSError), match="no space left on device"):
        together(comm, ring(20))
    assert comm.allreduce(1) == comm.size


@pytest.mark.parallel([3])
def test_device_that_one_process_has_not(comm, monkeypatch):
    def no_device(spec):
        if comm.rank == 2:
            raise DeviceError(f"device {spec} is lost")
        return original(spec)

    original = parallel.get_device
    monkeypatch.setattr(parallel, "get_device", no_device)
    with pytest.raises(DeviceError, match="is lost"):
        together(comm, ring(20))


@pytest.mark.parallel([2])
def test_first_error_is_told(comm):
    def propose():
        raise UnsupportedLoopError(f"reason of process {comm.rank}")

    with pytest.raises(UnsupportedLoopError, match="reason of process 0"):
        parallel.compile(comm, propose)


# -- tuning ---------------------------------------------------------------------------------------


def choose_between(monkeypatch, *schedules):
    choose = "pyop3_mlir.autotune.choose"
    monkeypatch.setattr(f"{choose}.candidates", lambda *_, **__: list(schedules))
    monkeypatch.setattr(f"{choose}.neighbours", lambda *_, **__: [])


def tuning():
    return Options.resolve(tune="force", tune_budget=60.0, strategy="in_order", batching="blocked")


@pytest.mark.parallel([2])
def test_all_run_what_was_chosen(comm, monkeypatch):
    choose_between(monkeypatch, Schedule(width=8), Schedule(width=4), Schedule(width=16))
    loop = ring(20 + 40 * comm.rank)
    bound, count = compiled_by_all(
        comm,
        lambda: together(comm, loop, options=tuning()),
    )
    assert len(set(comm.allgather(bound.schedule))) == 1
    assert "measured" in bound.reason
    # each candidate once, those of a process with fewer cells, and what arrays are passed by
    assert count <= 5
    # measuring left the data alone
    assert not loop.arguments[0].buffer.any()
    bound()
    np.testing.assert_allclose(loop.arguments[0].buffer, expected(loop), atol=1e-15)


@pytest.mark.parallel([2])
def test_time_of_the_slowest_process_counts(comm, monkeypatch):
    """What the leader likes best is a torment for the other process."""
    slow, fast = Schedule(width=8, tile=1), Schedule(width=4, tile=1)
    choose_between(monkeypatch, slow, fast)
    call = engine.BoundLoop.__call__

    def dawdle(bound, *arguments):
        late = slow if comm.rank == 1 else fast
        until = time.thread_time() + (0.02 if comm.rank == 1 else 0.004) * (bound.schedule == late)
        while time.thread_time() < until:
            pass
        call(bound, *arguments)

    monkeypatch.setattr(engine.BoundLoop, "__call__", dawdle)
    # the first process has the most entities and leads
    loop = ring(80 - 20 * comm.rank)
    bound = together(comm, loop, options=tuning())
    assert bound.schedule == fast


@pytest.mark.parallel([2])
def test_candidate_that_fails_on_one_process_is_not_chosen(comm, monkeypatch):
    bad, good = Schedule(width=8, tile=1), Schedule(width=4, tile=1)
    choose_between(monkeypatch, bad, good)
    call = engine.BoundLoop.__call__

    def fail(bound, *arguments):
        if comm.rank == 1 and bound.schedule == bad:
            raise DeviceError("out of memory")
        call(bound, *arguments)

    monkeypatch.setattr(engine.BoundLoop, "__call__", fail)
    bound = together(comm, ring(80), options=tuning())
    assert bound.schedule == good


@pytest.mark.parallel([2])
def test_wrong_result_of_one_process_is_not_chosen(comm, monkeypatch):
    good, bad = Schedule(width=4, tile=1), Schedule(width=8, tile=1)
    choose_between(monkeypatch, good, bad)
    call = engine.BoundLoop.__call__

    def spoil(bound, *arguments):
        if bound.schedule == good:
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
        call(bound, *arguments)
        if comm.rank == 1 and bound.schedule == bad:
            bound.parloop.arguments[0].buffer[7] += 1.0

    monkeypatch.setattr(engine.BoundLoop, "__call__", spoil)
    bound = together(comm, ring(80), options=tuning())
    assert bound.schedule == good


@pytest.mark.parallel([2])
def test_only_the_leader_remembers(comm, monkeypatch):
    choose_between(monkeypatch, Schedule(width=8), Schedule(width=4))
    options = replace(tuning(), tune="cached")
    written = []
    put = Cache.put
    monkeypatch.setattr(
        Cache,
        "put",
        lambda self, key, value: written.append(self.root.name) or put(self, key, value),
    )
    first = together(comm, ring(80), options=options)
    assert comm.allreduce(written.count("tuning")) == 1
    again, count = compiled_by_all(comm, lambda: together(comm, ring(80), options=options))
    assert again.schedule == first.schedule
    assert count == 0


# -- places ---------------------------------------------------------------------------------------


@pytest.mark.parallel([3])
def test_placement(comm):
    places = parallel.placement(comm, "cpu")
    assert [place.rank for place in places] == [0, 1, 2]
    assert sorted(place.local_rank for place in places) == [0, 1, 2]
    assert {place.threads for place in places} == {1}
    assert all(place.cores for place in places)


@pytest.mark.parallel([2])
def test_device_of_a_kind_by_local_rank(comm, monkeypatch):
    from pyop3_mlir.runtime.devices import DeviceInfo

    gpus = [DeviceInfo(f"cuda:{number}", "a GPU") for number in range(2)]
    none = DeviceInfo("hip", "hip", unavailable="no driver")
    monkeypatch.setattr(parallel, "available", lambda: [DeviceInfo("cpu", "a CPU"), *gpus, none])
    assert sorted(comm.allgather(parallel.place("cuda"))) == ["cuda:0", "cuda:1"]
    assert parallel.place("cuda:1") == "cuda:1"
    assert parallel.place("hip") == "hip"
    assert parallel.place("cpu:4") == "cpu:4"

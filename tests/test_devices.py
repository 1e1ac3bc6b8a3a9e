"""Devices: what is there, what is not and why, and what compiled code depends on."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess

import pytest

from pyop3_mlir.errors import DeviceError
from pyop3_mlir.runtime import devices
from pyop3_mlir.runtime.devices import Target, available, get_device


def test_the_cpu_is_always_available():
    cpu = next(info for info in available() if info.spec == "cpu")
    assert cpu.unavailable is None
    assert cpu.f64
    assert cpu.f64_atomics
    assert cpu.memory is not None
    assert cpu.memory > 1e8


def test_every_kind_is_listed_with_a_reason_where_there_is_none():
    kinds = {info.spec.split(":")[0] for info in available()}
    assert kinds == {"cpu", "cuda", "hip", "vulkan"}
    for info in available():
        if info.unavailable is not None:
            assert len(info.unavailable) > 5
            assert "/src/" not in info.unavailable, "a path in IREE's sources helps nobody"


def test_what_is_listed_as_available_opens():
    for info in available():
        if info.unavailable is None:
            assert get_device(info.spec).info.name == info.name


@pytest.mark.parametrize("kind", ["cuda", "hip", "vulkan"])
def test_an_absent_device_is_refused_with_those_present(kind):
    with pytest.raises(DeviceError, match=rf"{kind}:63 is not available: .*Available: cpu, cpu"):
        get_device(f"{kind}:63")


@pytest.mark.parametrize("spec", ["", "gpu", "cpu:", "cpu:x", "cuda:-1", "local-task", "cpu:1:2"])
def test_a_specification_that_means_nothing_is_refused(spec):
    with pytest.raises(DeviceError, match="expected cpu, cpu:N"):
        get_device(spec)


@pytest.mark.parametrize("spec", ["cpu:0", "cpu:65"])
def test_the_number_of_threads_is_limited(spec):
    with pytest.raises(DeviceError, match="between 1 and 64"):
        get_device(spec)


def test_devices_are_opened_once():
    assert get_device("cpu") is get_device(" CPU ")
    assert get_device("cpu:2") is get_device("cpu:2")
    assert get_device("cpu") is not get_device("cpu:1")


def test_devices_with_the_same_target_have_fingerprints_of_their_own():
    one, two = get_device("cpu"), get_device("cpu:2")
    assert one.target.fingerprint == two.target.fingerprint
    assert one.fingerprint != two.fingerprint


def test_threads():
    assert get_device("cpu").threads == 1
    assert get_device("cpu:3").threads == 3


def test_a_driver_that_breaks_is_listed_and_not_raised(monkeypatch):
    def fail(kind):
        raise RuntimeError(f"Error: a/runtime/src/b/c.c:12: UNAVAILABLE; no {kind}; [1]\nmore")

    monkeypatch.setattr(devices, "_gpus", fail)
    cuda = next(info for info in available() if info.spec == "cuda")
    assert cuda.unavailable == "Error: UNAVAILABLE; no cuda; [1]"


def test_the_target_names_this_cpu():
    target = get_device("cpu").target
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"^Flags:\s+(.*)$", lscpu, re.MULTILINE)
    if found is None:
        pytest.skip("lscpu lists no flags")
    assert target.features == frozenset(found[1].split())
    assert target.vector_bytes == (
        64 if "avx512f" in found[1] else 32 if " avx " in found[1] else 16
    )


def test_other_cpus_and_flags_have_other_fingerprints():
    target = Target("llvm-cpu", "a", frozenset({"avx", "fma"}), ("--x",))
    same = Target("llvm-cpu", "a", frozenset({"fma", "avx"}), ("--x",))
    assert target.fingerprint == same.fingerprint
    others = [
        Target("llvm-cpu", "b", target.features, target.flags),
        Target("llvm-cpu", "a", frozenset({"avx"}), target.flags),
        Target("llvm-cpu", "a", target.features, ("--y",)),
    ]
    assert target.fingerprint not in {other.fingerprint for other in others}


def test_doubles_are_not_narrowed_on_any_device():
    for info in available():
        if info.unavailable is None:
            flags = get_device(info.spec).target.flags
            assert "--iree-input-demote-f64-to-f32=false" in flags
            assert "--iree-input-demote-i64-to-i32=false" in flags


def _in_child(queue) -> None:
    queue.put((os.getpid(), get_device("cpu:2").threads))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_process_opens_its_own_devices():
    get_device("cpu:2")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=30) == (child.pid, 2)
    child.join(30)
    assert child.exitcode == 0

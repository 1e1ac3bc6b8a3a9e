"""What every test runs in: a cache of its own, and none of the caller's settings."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest

from pyop3_mlir import engine
from pyop3_mlir.errors import DeviceError
from pyop3_mlir.runtime import devices
from pyop3_mlir.runtime.cache import Cache, user_cache_path

KEPT_BYTES = 1 << 30
KEPT_SECONDS = 14 * 24 * 3600.0
"""What stays on disk of the modules that tests compile, and for how long."""


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside():
    """Remove the caller's settings, so that a test's outcome depends on the test alone."""
    saved = {name: os.environ.pop(name) for name in list(os.environ) if _is_setting(name)}
    yield
    os.environ.update(saved)


def _is_setting(name: str) -> bool:
    return name.startswith("PYOP3_MLIR_") and name != "PYOP3_MLIR_WHEELS"


@pytest.fixture(scope="session")
def cache_root(tmp_path_factory):
    """A new cache directory with the compiled modules of earlier runs.

    All processes of all runs share ``modules`` in ``$TESTS_CACHE`` (by default in the user's cache;
    where it is empty, nothing is shared). They are found by what they are made from. Nothing else
    survives the run: choices of the tuner would change what is tested.
    """
    path = tmp_path_factory.mktemp("cache")
    kept = os.environ.get("TESTS_CACHE", str(user_cache_path() / "tests"))
    if kept:
        modules = Path(kept).expanduser().absolute() / "modules"
        with contextlib.suppress(OSError):  # they are compiled anew then
            modules.mkdir(parents=True, exist_ok=True)
            Cache(modules).trim(KEPT_BYTES, KEPT_SECONDS)
            (path / "modules").symlink_to(modules)
    return path


@pytest.fixture(autouse=True, scope="session")
def session_cache(cache_root, _no_settings_from_outside):
    """Set the cache directory of all tests of this process."""
    os.environ["PYOP3_MLIR_CACHE_DIR"] = str(cache_root)
    yield cache_root
    os.environ.pop("PYOP3_MLIR_CACHE_DIR", None)


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """Return an empty cache directory that is in force for this test alone."""
    path = tmp_path / "cache"
    monkeypatch.setenv("PYOP3_MLIR_CACHE_DIR", str(path))
    return path


@pytest.fixture(autouse=True, scope="module")
def _close_gpus():
    """Close GPUs behind the tests of a module.

    IREE waits for an open Vulkan device in a thread of its own, and with Mesa's device on the CPU
    this thread never sleeps: it takes a core from all tests that follow.
    """
    yield
    opened = [name for name in devices._devices if not name.startswith("cpu")]
    for name in opened:
        device = devices._devices.pop(name)
        for identity, executable in list(engine._executables.items()):
            if executable.device is device:
                del engine._executables[identity]
    if opened:
        gc.collect()


@pytest.fixture(scope="module")
def vulkan():
    """A Vulkan device with double precision."""
    try:
        return devices.get_device("vulkan")
    except DeviceError as error:
        pytest.skip(f"{error} (Debian: mesa-vulkan-drivers and libvulkan1)")


@pytest.fixture(scope="session")
def vulkan_present():
    """For tests whose subprocesses open a Vulkan device with double precision."""
    (info, *_) = [info for info in devices.available() if info.spec.startswith("vulkan")]
    if info.unavailable or not info.f64:
        pytest.skip(f"{info.unavailable or info} (Debian: mesa-vulkan-drivers and libvulkan1)")

"""What every test runs in: a cache of its own, and none of the caller's settings."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside():
    """Remove the caller's settings, so that a test's outcome depends on the test alone."""
    saved = {name: os.environ.pop(name) for name in list(os.environ) if _is_setting(name)}
    yield
    os.environ.update(saved)


def _is_setting(name: str) -> bool:
    return name.startswith("PYOP3_MLIR_") and name != "PYOP3_MLIR_WHEELS"


@pytest.fixture(autouse=True, scope="session")
def session_cache(tmp_path_factory, _no_settings_from_outside):
    """Directory of the compile cache for all tests of this process: nothing survives the run."""
    path = tmp_path_factory.mktemp("cache")
    os.environ["PYOP3_MLIR_CACHE_DIR"] = str(path)
    yield path
    os.environ.pop("PYOP3_MLIR_CACHE_DIR", None)


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """Return an empty cache directory that is in force for this test alone."""
    path = tmp_path / "cache"
    monkeypatch.setenv("PYOP3_MLIR_CACHE_DIR", str(path))
    return path

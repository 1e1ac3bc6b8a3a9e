"""Firedrake, with the engine under it.

``verifying`` runs every loop on both engines and compares the results to 1e-12. Its
``all_lowered()`` says that no loop went through PyOP2 alone. Tests get it once, in order, those
that say ``@EVERY_STRATEGY`` once for each scatter strategy, and all of them do where the
environment has ``TEST_STRATEGIES=all`` (some ten minutes).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Firedrake warns unless it is set before it is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("firedrake") is None:
    collect_ignore_glob = ["*.py"]

STRATEGIES = ("in_order", "colour", "segmented")
"""Those that a CPU has."""


class Attached:
    """The engine under Firedrake for the length of a test."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def entries(self) -> dict[str, Any]:
        return self.backend.entries

    def all_lowered(self) -> None:
        """Assert that something ran, and all of it on the engine."""
        entries = list(self.backend.entries.values())
        assert entries
        missed = [f"{e.name}: {e.reason}" for e in entries if e.lowered < e.calls]
        assert not missed, missed


@contextmanager
def attached(**settings: Any) -> Iterator[Attached]:
    from pyop3_mlir.frontends import dropin
    from pyop3_mlir.options import Options

    backend = dropin.attach(Options.resolve(**{"tune": "off", **settings}))
    try:
        yield Attached(backend)
    finally:
        dropin.detach(backend)


@pytest.fixture
def attach() -> Callable[..., Any]:
    """The context manager, for tests that choose the settings."""
    return attached


@pytest.fixture
def verifying(request: Any) -> Iterator[Attached]:
    """Every loop on both engines."""
    with attached(verify=True, strategy=getattr(request, "param", "auto")) as found:
        yield found


def pytest_generate_tests(metafunc: Any) -> None:
    """Run all forms by all strategies where that is asked for."""
    if "verifying" not in metafunc.fixturenames or os.environ.get("TEST_STRATEGIES") != "all":
        return
    marks = metafunc.definition.iter_markers("parametrize")
    if not any(mark.args[0] == "verifying" for mark in marks):
        metafunc.parametrize("verifying", STRATEGIES, indirect=True)

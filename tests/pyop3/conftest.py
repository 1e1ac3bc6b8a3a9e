"""What the tests under pyop3 have in common. They are skipped where pyop3 is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

SUBMODULE = "pyop3.insn.exec"
"""Not the package itself: this folder has the same name."""


class Engine:
    """The back end, attached, and what it did."""

    def __init__(self) -> None:
        from pyop3_mlir.frontends import pyop3 as front_end
        from pyop3_mlir.options import Options

        # both engines run, and the results are compared
        self.backend = front_end.Backend(Options.resolve(verify=True, tune="off"))
        self.backend.patience = 0

    def entries(self, name: str = "") -> list:
        """Lines of the report, of kernels of one name if it is given."""
        return [e for e in self.backend.entries.values() if not name or e.name == name]

    def check(self, name: str = "") -> None:
        """Fail unless all loops, or those of one kernel, were run by the engine."""
        entries = self.entries(name)
        assert entries, f"no loop of kernel {name} was seen"
        for entry in entries:
            assert entry.calls == entry.lowered > 0, f"{entry.name}: {entry.reason}"


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The back end, attached for the length of a test; each loop is verified."""
    pytest.importorskip(SUBMODULE, reason="pyop3 is in no registry and not installed here")
    engine = Engine()
    engine.backend.attach()
    try:
        yield engine
    finally:
        engine.backend.detach()

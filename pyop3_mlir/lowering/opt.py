"""``python -m pyop3_mlir.lowering.opt FILE -p PASSES``: run passes on MLIR text, as xdsl-opt does.

Knows this package's dialects and passes, and xDSL's canonicalisation and common subexpression
elimination. The tests in ``tests/filecheck`` use it, and whoever wants to look at one pass alone.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

from xdsl.passes import ModulePass
from xdsl.universe import Universe
from xdsl.xdsl_opt_main import xDSLOptMain

import pyop3_mlir.lowering.passes
from pyop3_mlir.lowering.dialects import DIALECTS

__all__ = ["OptMain", "all_passes", "main"]


def all_passes() -> Iterator[type[ModulePass]]:
    """Every pass of this package: what modules of ``lowering.passes`` have in ``__all__``."""
    package = pyop3_mlir.lowering.passes
    for entry in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        module = importlib.import_module(entry.name)
        for name in getattr(module, "__all__", ()):
            found = getattr(module, name)
            if inspect.isclass(found) and issubclass(found, ModulePass):
                yield found


class OptMain(xDSLOptMain):
    """xdsl-opt with this package's dialects and passes."""

    def register_all_dialects(self) -> None:
        """Load the dialects: some replace xDSL's own."""
        for dialect in DIALECTS:
            self.ctx.load_dialect(dialect)

    def register_all_passes(self) -> None:
        """Register this package's passes, and two of xDSL's to tidy up between them."""
        for found in all_passes():
            self.register_pass(found.name, lambda found=found: found)  # type: ignore[misc]
        known = Universe.get_multiverse().all_passes
        for name in ("canonicalize", "cse"):
            self.register_pass(name, known[name])


def main() -> None:
    """Run it with the arguments of the process."""
    OptMain(description=__doc__ or "").run()


if __name__ == "__main__":
    main()

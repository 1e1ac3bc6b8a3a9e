"""Parallel loops over meshes, lowered to MLIR with xDSL and run by IREE.

A loop is described by :class:`Parloop`, from arrays, and run by the engine::

    from pyop3_mlir import INC, READ, Argument, IndexTable, IterationSet, Parloop

Under Firedrake, unchanged scripts run on it after :func:`install`, or inside ``with backend():``.

Importing the package imports neither the compiler nor the runtime.
"""

from __future__ import annotations

from pyop3_mlir.errors import (
    CompilationError,
    DeviceError,
    InvalidLoopError,
    OptionError,
    Pyop3MlirError,
    UnsupportedLoopError,
)
from pyop3_mlir.frontends import backend, install, report, uninstall
from pyop3_mlir.options import Options, overriding
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    READ,
    RW,
    WRITE,
    Access,
    Argument,
    IndexTable,
    IterationSet,
    Parloop,
)
from pyop3_mlir.runtime.residency import Resident

__version__ = "0.1.0"

__all__ = [
    "INC",
    "MAX",
    "MIN",
    "READ",
    "RW",
    "WRITE",
    "Access",
    "Argument",
    "CompilationError",
    "DeviceError",
    "IndexTable",
    "InvalidLoopError",
    "IterationSet",
    "OptionError",
    "Options",
    "Parloop",
    "Pyop3MlirError",
    "Resident",
    "UnsupportedLoopError",
    "__version__",
    "backend",
    "install",
    "overriding",
    "report",
    "uninstall",
]

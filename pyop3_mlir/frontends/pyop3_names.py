"""All that is used of pyop3's internals, by name.

pyop3 is under development and has no release, so what it offers is looked up and not inferred from
a version: each name where the branch of August 2026 has it, or, where it has moved, in whatever
module of pyop3 has it now. A name that is missing is an error that says which.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, fields, replace
from typing import Any

from pyop3_mlir.errors import Pyop3MlirError

__all__ = ["Names", "choose_loopy", "find_names"]


@dataclass(frozen=True)
class Names:
    """pyop3's classes and functions that the front end uses."""

    # execution
    InstructionExecutionContext: Any
    CompiledCodeExecutor: Any
    get_current_device: Any
    HOST_DEVICE: Any
    offloading: Any
    # instructions
    InstructionList: Any
    Loop: Any
    NonEmptyArrayAssignment: Any
    NullInstruction: Any
    StandaloneCalledFunction: Any
    AssignmentType: Any
    Intent: Any
    # expressions
    Add: Any
    Sub: Any
    Mul: Any
    Div: Any
    Modulo: Any
    FloorDiv: Any
    Pow: Any
    Neg: Any
    Abs: Any
    Or: Any
    LessThan: Any
    GreaterThan: Any
    LessThanOrEqual: Any
    GreaterThanOrEqual: Any
    Conditional: Any
    NaN: Any
    AxisVar: Any
    LoopIndexVar: Any
    ScalarBufferExpression: Any
    LinearDatBufferExpression: Any
    NonlinearDatBufferExpression: Any
    MatArrayBufferExpression: Any
    MatPetscMatBufferExpression: Any
    # data
    NullBuffer: Any
    ArrayBuffer: Any
    PetscMatBuffer: Any
    IndexedBuffer: Any
    UNIT_AXIS_TREE: Any
    IndexedAxisTree: Any


_WHERE = {
    "InstructionExecutionContext": "pyop3.insn.exec",
    "CompiledCodeExecutor": "pyop3.insn.exec",
    "get_current_device": "pyop3.device",
    "HOST_DEVICE": "pyop3.device",
    "offloading": "pyop3.device",
    "InstructionList": "pyop3.insn.base",
    "Loop": "pyop3.insn.base",
    "NonEmptyArrayAssignment": "pyop3.insn.base",
    "NullInstruction": "pyop3.insn.base",
    "StandaloneCalledFunction": "pyop3.insn.base",
    "AssignmentType": "pyop3.insn.base",
    "Intent": "pyop3.constants",
    "NullBuffer": "pyop3.buffer",
    "ArrayBuffer": "pyop3.buffer",
    "PetscMatBuffer": "pyop3.buffer",
    "IndexedBuffer": "pyop3.buffer",
    "UNIT_AXIS_TREE": "pyop3.axis_tree.tree",
    "IndexedAxisTree": "pyop3.axis_tree.tree",
}
"""Modules of the names; everything else is in ``pyop3.expr``."""

_ATTRIBUTES = {
    "InstructionExecutionContext": ("compile", "preprocess", "__call__"),
    "CompiledCodeExecutor": ("__call__", "_handle_to_pointer", "_default_exec_arguments"),
    "IndexedBuffer": ("handle", "denested"),
}
"""Attributes that these classes must have."""


def find_names() -> Names:
    """Look everything up in the pyop3 that is installed.

    Raises
    ------
    ImportError
        Where pyop3 is not installed.
    Pyop3MlirError
        Where it has not all that is needed: names what is missing.
    """
    importlib.import_module("pyop3")
    found: dict[str, Any] = {}
    for item in fields(Names):
        place = _WHERE.get(item.name, "pyop3.expr")
        found[item.name] = _look_up(place, item.name)
    for name, attributes in _ATTRIBUTES.items():
        for attribute in attributes:
            if not hasattr(found[name], attribute):
                raise _missing(f"{_WHERE[name]}.{name}.{attribute}")
    return Names(**found)


def choose_loopy(context: Any) -> None:
    """Let an execution context generate code by loopy, whatever its compiler parameters ask for.

    Where pyop3 has a setting for the back end (``backend``, since pull request 5392), ``"mlir"`` is
    one for which it has no code of its own yet.
    """
    parameters = context.compiler_parameters
    if getattr(parameters, "backend", "loopy") != "loopy":
        context.compiler_parameters = replace(parameters, backend="loopy")


def _look_up(place: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError):
        modules = [m for key, m in list(sys.modules.items()) if key.startswith("pyop3.")]
        known = {id(vars(m)[name]): vars(m)[name] for m in modules if name in vars(m)}
        if len(known) != 1:
            raise _missing(f"{place}.{name}") from None
        return known.popitem()[1]


def _missing(what: str) -> Pyop3MlirError:
    return Pyop3MlirError(
        f"the pyop3 that is installed has no {what}, so its loops cannot be read; use Firedrake's "
        "branch connorjward/pyop3 of August 2026 or a later one that still has this name"
    )

"""The exceptions that pyop3_mlir raises, all of them derived from :class:`Pyop3MlirError`.

Two of them matter to callers: :class:`InvalidLoopError` says that the description of a loop is
wrong (the caller's mistake), :class:`UnsupportedLoopError` that a valid loop cannot be lowered (the
drop-in front ends then run the original engine).
"""

from __future__ import annotations

__all__ = [
    "CompilationError",
    "DeviceError",
    "InvalidLoopError",
    "NotAttachedError",
    "OptionError",
    "Pyop3MlirError",
    "UnsupportedLoopError",
    "VerificationError",
]


class Pyop3MlirError(Exception):
    """Base class of every error raised by this package."""


class InvalidLoopError(Pyop3MlirError, ValueError):
    """The description of a loop is not valid; names the loop, the argument and the entry."""


class UnsupportedLoopError(Pyop3MlirError, NotImplementedError):
    """The loop is valid but cannot be lowered; the message says which construct and why."""


class CompilationError(Pyop3MlirError, RuntimeError):
    """The compiler refused a module that this package made."""


class DeviceError(Pyop3MlirError, RuntimeError):
    """A device is absent, lost, out of memory or cannot do what was asked of it."""


class OptionError(Pyop3MlirError, ValueError):
    """A setting has a value that it cannot have; names the value and where it was set."""


class NotAttachedError(Pyop3MlirError, RuntimeError):
    """A back end was to be taken off a package that it is not attached to."""


class VerificationError(Pyop3MlirError, AssertionError):
    """The result differs from the original engine's (only looked for with the setting verify)."""

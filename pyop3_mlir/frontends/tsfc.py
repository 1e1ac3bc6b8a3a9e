"""Take local kernels from TSFC as GEM, before it makes loopy kernels of them.

What reaches a parallel loop is a loopy kernel, which Firedrake has stored in memory and on disk, so
the GEM has to travel with it. While attached, TSFC's last two steps are watched: what goes into
Impero (the assignments, after TSFC's own optimisation, with which it also generates the loopy
kernel) and the loopy kernel that comes out. PyOP2's local kernel that is made from it carries the
GEM, pickled, as an attribute, and takes it along into Firedrake's cache on disk.

A kernel without it, one that was stored before this package was attached or that TSFC did not make,
is read by the loopy importer. Nothing is compiled twice, and what TSFC gives to PyOP2 stays the
same.
"""

from __future__ import annotations

import functools
import logging
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels.loopy import Intent
from pyop3_mlir.kernels.program import LocalKernel

__all__ = ["ATTRIBUTE", "import_local_kernel", "import_packed", "side_channel", "watch"]

log = logging.getLogger(__name__)

ATTRIBUTE = "_pyop3_mlir_gem"
"""Attribute of PyOP2's local kernel: pickled names, shapes and dtypes of arguments, and GEM."""


class _Watched:
    """A module of which one function is another one."""

    def __init__(self, module: Any, compile_gem: Callable[..., Any]) -> None:
        self._module = module
        self.compile_gem = compile_gem

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def side_channel(
    replace: Callable[[Any, str, Any], Any],
) -> Callable[[Any, Sequence[Intent]], LocalKernel | None] | None:
    """Watch TSFC.

    Parameters
    ----------
    replace
        Sets an attribute (owner, name, value) until the back end is detached.

    Returns
    -------
    Callable or None
        An importer for :func:`pyop3_mlir.frontends.pyop2.read_parloop`; None where TSFC is not
        installed, or is not made as expected.
    """
    try:
        import pyop2.local_kernel

        kernel_class: Any = pyop2.local_kernel.LoopyLocalKernel
        initialise = kernel_class.__init__
    except (ImportError, AttributeError) as error:
        log.debug("kernels are not taken from TSFC: %s", error)
        return None
    known: dict[int, tuple[Any, bytes]] = {}

    def keep(unit: Any, packed: bytes) -> None:
        number = id(unit)
        reference = weakref.ref(unit, lambda _: known.pop(number, None))
        known[number] = (reference, packed)

    @functools.wraps(initialise)
    def carry(self: Any, code: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, code, *args, **kwargs)
        found = known.get(id(code))
        if found is not None and found[0]() is code:
            setattr(self, ATTRIBUTE, found[1])

    if not watch(replace, keep):
        return None
    replace(kernel_class, "__init__", carry)
    return import_local_kernel


def watch(replace: Callable[[Any, str, Any], Any], keep: Callable[[Any, bytes], None]) -> bool:
    """Take the GEM of each kernel that TSFC makes from now on.

    Parameters
    ----------
    replace
        Sets an attribute (owner, name, value) until the back end is detached.
    keep
        Called with the loopy translation unit of a kernel and its GEM, for :func:`import_packed`.

    Returns
    -------
    bool
        False where TSFC is not installed, or is not made as expected.
    """
    try:
        import tsfc.driver
        import tsfc.kernel_interface.common as common
        import tsfc.kernel_interface.firedrake_loopy as interface

        original = common.impero_utils.compile_gem
        generate = interface.generate_loopy
    except (ImportError, AttributeError) as error:
        log.debug("kernels are not taken from TSFC: %s", error)
        return False

    latest: list[Any] = [None, ()]

    @functools.wraps(original)
    def compile_gem(assignments: Any, *args: Any, **kwargs: Any) -> Any:
        assignments = list(assignments)
        result = original(assignments, *args, **kwargs)
        latest[:] = result, assignments
        return result

    @functools.wraps(generate)
    def generate_loopy(
        impero_c: Any, args: Any, scalar_type: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        result = generate(impero_c, args, scalar_type, *rest, **kwargs)
        recorded, assignments = latest
        latest[:] = None, ()
        if recorded is impero_c:
            try:
                keep(result[0], _pack(args, assignments, scalar_type))
            except Exception as error:
                # the kernel is then read from loopy
                log.debug("GEM is not kept: %s", error)
        return result

    for module in (common, tsfc.driver):
        replace(module, "impero_utils", _Watched(module.impero_utils, compile_gem))
    replace(interface, "generate_loopy", generate_loopy)
    return True


def _pack(args: Sequence[Any], assignments: Sequence[Any], scalar_type: Any) -> bytes:
    import numpy as np

    arguments = [
        (arg.name, tuple(int(e) for e in arg.shape), np.dtype(arg.dtype.numpy_dtype))
        for arg in args
    ]
    # in one pickle, since indices are compared by identity
    return pickle.dumps((arguments, list(assignments), np.dtype(scalar_type)))


_imported: dict[Any, LocalKernel | None] = {}


def import_local_kernel(kernel: Any, intents: Sequence[Intent]) -> LocalKernel | None:
    """Import the GEM that a PyOP2 kernel carries.

    Parameters
    ----------
    kernel
        A ``pyop2.local_kernel.LoopyLocalKernel``.
    intents
        One an argument.

    Returns
    -------
    LocalKernel or None
        None where the kernel carries none, or it cannot be imported.
    """
    packed = getattr(kernel, ATTRIBUTE, None)
    return None if packed is None else import_packed(kernel.name, packed, intents)


def import_packed(name: str, packed: bytes, intents: Sequence[Intent]) -> LocalKernel | None:
    """Import what :func:`watch` has kept.

    Parameters
    ----------
    name
        Of the kernel.
    packed
        What ``keep`` was called with.
    intents
        One an argument.

    Returns
    -------
    LocalKernel or None
        None where it cannot be imported.
    """
    if any(intent not in (Intent.READ, Intent.INC, Intent.WRITE) for intent in intents):
        return None
    key = (packed, tuple(intents))
    if key not in _imported:
        if len(_imported) > 1024:
            _imported.clear()
        _imported[key] = _import(name, packed, intents)
    return _imported[key]


def _import(name: str, packed: bytes, intents: Sequence[Intent]) -> LocalKernel | None:
    from pyop3_mlir.kernels.gem import import_gem

    try:
        arguments, assignments, scalar_type = pickle.loads(packed)
        if len(arguments) != len(intents):
            return None
        whole = [
            argument[0]
            for argument, intent in zip(arguments, intents, strict=True)
            if intent is Intent.WRITE
        ]
        return import_gem(name, arguments, assignments, scalar_dtype=scalar_type, whole=whole)
    except UnsupportedLoopError as error:
        log.debug("kernel %s is not imported from GEM: %s", name, error)
    except Exception:
        log.debug("kernel %s is not imported from GEM", name, exc_info=True)
    return None

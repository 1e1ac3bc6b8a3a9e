"""Compile modules with IREE, in this process, and remember the results.

Source of the interface: IREE 3.13, compiler/bindings/c/iree/compiler/embedding_api.h, wrapped by
``iree.compiler.api``.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache as memoise
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pyop3_mlir.errors import CompilationError
from pyop3_mlir.runtime.bundle import active, can_compile
from pyop3_mlir.runtime.cache import Cache
from pyop3_mlir.runtime.devices import Device
from pyop3_mlir.runtime.splice import SOURCES, splice, split

__all__ = ["compilations", "compile_module", "module_key"]

_count = itertools.count(1)
_compiled = 0
_lock = threading.Lock()

LIBM = frozenset({"acos", "asin", "atan", "atan2", "cos", "log10", "log2", "sin", "tan", "tanh"})
"""Functions of MLIR's math dialect that IREE 3.13 takes from libm in double precision, and which
its own embedded libm lacks. (``exp`` and ``log`` it has; single precision it approximates.)"""


def compilations() -> int:
    """How many modules this process has compiled (cache hits do not count)."""
    return _compiled


@memoise
def _versions() -> tuple[str, ...]:
    def of(distribution: str) -> str:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return "unknown"

    # of a checkout the number says little; these files decide on flags and on what IREE gets
    here = Path(__file__)
    own = hashlib.sha256(here.read_bytes() + here.with_name("splice.py").read_bytes()).hexdigest()
    names = ("pyop3_mlir", "iree-base-compiler", "iree-base-runtime")
    return (*(f"{name} {of(name)}" for name in names), own)


def module_key(content: str, device: Device) -> str:
    """Key of a compiled module.

    Parameters
    ----------
    content
        The module's text, or any string that determines it.
    device
        What it is compiled for. The key depends on its target only, so equal machines share entries
        and different ones on the same file system do not.
    """
    parts = [content, device.target.fingerprint, *device.target.flags, *_versions()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def compile_module(
    text: str | Callable[[], str],
    device: Device,
    *,
    cache: Cache | Literal["default"] | None = "default",
    key: str | None = None,
    name: str = "loop",
    configure: Callable[[str], str] | None = None,
) -> bytes:
    """Compile a module for a device. Thread safe.

    Parameters
    ----------
    text
        MLIR, or a function that makes it, which is called only where the result is not cached.
    device
        What to compile for.
    cache
        Where to look first and to remember the result: the cache "modules" under
        :func:`~pyop3_mlir.runtime.cache.default_root` where not given, none where None.
    key
        Any string that determines ``text``; the text itself where not given.
    name
        Of the loop, for messages.
    configure
        Changes the module's text where IREE has decided how each dispatch is tiled; what it does
        has to be determined by ``key``.

    Returns
    -------
    bytes
        An IREE module (vmfb) for :class:`~pyop3_mlir.runtime.executable.Executable`.

    Raises
    ------
    CompilationError
        Where IREE refuses the module. The message holds the first error and the file that the
        module's text was saved to.
    """
    if cache == "default":
        cache = Cache.default("modules")
    if key is None and callable(text):
        text = text()
    entry = module_key(key if key is not None else str(text), device)
    if cache is not None:
        found = cache.get(entry)
        if found is not None:
            return found
    if not can_compile():
        raise CompilationError(
            f"loop {name}: a module for {device.name} has to be compiled, but iree-base-compiler "
            f"or xdsl is not installed{_where()}"
        )
    if callable(text):
        text = text()
    flags = list(device.target.flags)
    if device.target.backend == "llvm-cpu" and _needs_libm(text):
        flags += _system_link_flags()
    try:
        if configure is None:
            host = partial(_compile_host, device=device, cache=cache)
            vmfb = _compile_in_parts(text, flags, name, host) or _compile(text, flags, name)
        else:
            text = configure(_compile(text, flags, name, stop=_CONFIGURED).decode())
            vmfb = _compile(text, flags, name, start=_CONFIGURED)
    except _RefusedError as error:
        raise _failure(text, error.errors, name) from error
    global _compiled
    with _lock:
        _compiled = next(_count)
    if cache is not None:
        cache.put(entry, vmfb)
    return vmfb


def _where() -> str:
    bundle = active()
    if bundle is None:
        return "; install them, or set PYOP3_MLIR_BUNDLE to modules that were compiled elsewhere"
    return f", and {bundle}, does not have it"


def _needs_libm(text: str) -> bool:
    """Whether a module calls functions that only the system's libm has.

    The generic form has types on the line of the operation. Functions that the module declares with
    ``hal.import.static`` are libm's as well (``erf``, ``jn``).
    """
    if "hal.import.static" in text:
        return True
    return any(
        found[1] in LIBM and "f64" in line
        for line in text.splitlines()
        for found in re.finditer(r"\bmath\.(\w+)", line)
    )


@memoise
def _system_link_flags() -> tuple[str, ...]:
    """Link a shared library whose symbols the dynamic loader finds in this process.

    The linker is the one that IREE brings, so no tool chain is needed.
    """
    import iree.compiler

    linker = Path(iree.compiler.__file__).parent / "_mlir_libs" / "iree-lld"
    return (
        "--iree-llvmcpu-link-embedded=false",
        f'--iree-llvmcpu-system-linker-path="{linker}" -flavor gnu',
    )


_DIAGNOSTIC = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t, ctypes.c_void_p
)
_ERROR = 2


_CONFIGURED = "executable-configurations"
"""IREE's name of the phase in which dispatches get their tile sizes."""


class _RefusedError(Exception):
    """What IREE says of a module that it does not compile."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__(*errors)
        self.errors = errors


def _compile_in_parts(
    text: str, flags: Sequence[str], name: str, compile_host: Callable[[str, Sequence[str]], str]
) -> bytes | None:
    """Compile a module all of whose executables are ours, the host's side without them.

    None where that does not work: what is wrong is best said of the whole module.
    """
    host, bodies = split(text)
    if not bodies:
        return None
    try:
        whole = splice(compile_host(host, flags), bodies)
        return None if whole is None else _compile(whole, flags, name, start=SOURCES)
    except _RefusedError:
        return None


def _compile_host(text: str, flags: Sequence[str], device: Device, cache: Cache | None) -> str:
    """Compile the host's side of a module, which kernels with the same arguments share."""
    entry = module_key(json.dumps(["host", text, *flags]), device)
    found = None if cache is None else cache.get(entry)
    if found is None:
        found = _compile(text, flags, "host", stop=SOURCES)
        if cache is not None:
            cache.put(entry, found)
    return found.decode()


def _compile(
    text: str, flags: Sequence[str], name: str, start: str | None = None, stop: str | None = None
) -> bytes:
    """Compile, from or to a phase where given: then to the text of the module there."""
    from iree.compiler import api

    errors: list[str] = []

    def collect(severity: int, message: Any, size: int, _: Any) -> None:
        if severity == _ERROR:
            errors.append(ctypes.string_at(message, size).decode(errors="replace"))

    with api.Session() as session:
        try:
            session.set_flags(*flags)
        except ValueError as error:
            raise CompilationError(f"loop {name}: IREE refuses a flag: {error}") from error
        with session.invocation() as invocation:
            callback = _DIAGNOSTIC(collect)
            _capture_diagnostics(invocation, callback)
            _restrict(invocation, start, stop)
            # a terminating zero spares IREE a copy
            source = api.Source.wrap_buffer(
                session, text.encode() + b"\0", buffer_name=f"{name}.mlir"
            )
            if not (invocation.parse_source(source) and invocation.execute()):
                raise _RefusedError(errors)
            with api.Output.open_membuffer() as output:
                try:
                    if stop is not None:
                        invocation.output_ir(output)
                    else:
                        invocation.output_vm_bytecode(output)
                except ValueError as error:
                    raise _RefusedError([*errors, str(error)]) from error
                return bytes(output.map_memory())


def _restrict(invocation: Any, start: str | None, stop: str | None) -> None:
    """Compile some phases alone; iree.compiler.api cannot say so."""
    if start is None and stop is None:
        return
    from iree.compiler.api.ctypes_dl import _dylib

    for name, phase in (("From", start), ("To", stop)):
        if phase is not None:
            function = getattr(_dylib, f"ireeCompilerInvocationSetCompile{name}Phase")
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_char_p], None
            function(invocation._inv_p, phase.encode())


def _capture_diagnostics(invocation: Any, callback: Any) -> None:
    """Send diagnostics to ``callback``, which the caller keeps alive: iree.compiler.api cannot."""
    try:
        from iree.compiler.api.ctypes_dl import _dylib

        enable = _dylib.ireeCompilerInvocationEnableCallbackDiagnostics
        handle = invocation._inv_p
    except (ImportError, AttributeError):
        invocation.enable_console_diagnostics()
        return
    enable.argtypes = [ctypes.c_void_p, ctypes.c_int, _DIAGNOSTIC, ctypes.c_void_p]
    enable.restype = None
    enable(handle, 0, callback, None)


def _failure(text: str, errors: Sequence[str], name: str) -> CompilationError:
    first = errors[0].split("\n", 1)[0] if errors else "no diagnostic (see standard error)"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    safe = re.sub(r"[^\w-]", "_", name)
    path = Path(tempfile.gettempdir()) / f"pyop3_mlir-{safe}-{digest}.mlir"
    try:
        report = "".join(f"// {line}\n" for error in errors for line in error[:4000].splitlines())
        path.write_text(text + "\n" + report, encoding="utf-8")
        where = f"its text and all diagnostics are in {path}; please report it"
    except OSError as error:
        where = f"its text could not be saved ({error})"
    return CompilationError(f"loop {name}: IREE cannot compile the module: {first}\n{where}")

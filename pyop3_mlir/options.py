"""The settings of the package, and where each comes from.

A setting is looked up in this order; the first place that has it wins:

1. the argument of the function that was called,
2. :func:`overriding`, innermost first (``pyop3_mlir.install`` and ``backend`` use it),
3. PETSc's options (``-pyop3_mlir_device cuda``), if petsc4py has been imported already,
4. the environment (``PYOP3_MLIR_DEVICE=cuda``),
5. the default.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyop3_mlir.errors import OptionError
from pyop3_mlir.lowering.schedule import BATCHINGS, STRATEGIES
from pyop3_mlir.runtime.cache import user_cache_path

__all__ = ["SETTINGS", "Options", "Setting", "configure_logging", "overriding"]

log = logging.getLogger("pyop3_mlir")


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes
    ----------
    name
        As an argument and as a field of :class:`Options`.
    parse
        Makes a value of the field's type from a string or from a value given in Python; raises
        ``ValueError`` with a message that says what is allowed.
    default
        Called for the value where nothing else sets it.
    help
        One line.
    """

    name: str
    parse: Callable[[Any], Any]
    default: Callable[[], Any]
    help: str

    @property
    def environment_variable(self) -> str:
        """Name of the environment variable."""
        return f"PYOP3_MLIR_{self.name.upper()}"

    @property
    def petsc_option(self) -> str:
        """Name of the PETSc option, without the leading dash."""
        return f"pyop3_mlir_{self.name}"


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        text = str(value).strip().lower()
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text

    return parse


def _device(value: Any) -> str:
    text = str(value).strip()
    if not re.fullmatch(r"[a-z]+(:\d+)?", text):
        raise ValueError("expected a device such as cpu, cpu:4 (threads), cuda or cuda:1")
    return text


def _seconds(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError("expected a number of seconds, 0 or more")
    return number


def _directory(value: Any) -> Path:
    path = Path(value).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError("expected a directory")
    return path.absolute()


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    # PETSc's options may stand without a value
    if text in ("1", "true", "yes", "on", ""):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 1, true, yes, on, 0, false, no or off")


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        setting.name: setting
        for setting in (
            Setting("device", _device, lambda: "cpu", "device that loops run on"),
            Setting(
                "strategy",
                _choice("auto", *STRATEGIES),
                lambda: "auto",
                f"scatter strategy: auto, {', '.join(STRATEGIES)}",
            ),
            Setting(
                "batching",
                _choice("auto", *BATCHINGS),
                lambda: "auto",
                f"batching of cells: auto, {', '.join(BATCHINGS)}",
            ),
            Setting(
                "tune",
                _choice("off", "cached", "force"),
                lambda: "cached",
                "off: the heuristic; cached: measure once and remember; force: measure again",
            ),
            Setting("tune_budget", _seconds, lambda: 20.0, "seconds that tuning a loop may take"),
            Setting(
                "cache_dir",
                _directory,
                user_cache_path,
                "directory of compiled modules and tuning results",
            ),
            Setting(
                "bundle",
                _directory,
                lambda: None,
                "directory of modules that were compiled ahead of time",
            ),
            Setting(
                "verify",
                _boolean,
                lambda: False,
                "run the original engine as well and compare, for each loop",
            ),
            Setting(
                "log",
                _choice("debug", "info", "warning", "error", "critical"),
                lambda: "warning",
                "least level of log messages: debug, info, warning, error, critical",
            ),
        )
    }
)
"""Every setting by name."""

# What PYOP3_MLIR_... means outside this module: ci/firedrake.sh keeps wheels there.
_FOREIGN = frozenset({"PYOP3_MLIR_WHEELS"})

_overrides: list[Mapping[str, Any]] = []
_warned: set[str] = set()


@dataclass(frozen=True)
class Options:
    """The settings in force for one call. Made by :meth:`resolve`.

    Attributes
    ----------
    device
        Device that loops run on.
    strategy, batching
        ``"auto"``, or what :class:`~pyop3_mlir.lowering.schedule.Schedule` allows.
    tune
        ``"off"``, ``"cached"`` or ``"force"``.
    tune_budget
        Seconds that tuning a loop may take.
    cache_dir
        Absolute; need not exist.
    bundle
        Absolute; None where modules are compiled here.
    verify
        Whether the original engine runs as well and results are compared.
    log
        Least level of log messages.
    sources
        For each setting where its value came from, in words.
    """

    device: str
    strategy: str
    batching: str
    tune: str
    tune_budget: float
    cache_dir: Path
    bundle: Path | None
    verify: bool
    log: str
    sources: Mapping[str, str] = field(compare=False, repr=False)

    @classmethod
    def resolve(cls, **arguments: Any) -> Options:
        """Look every setting up.

        Parameters
        ----------
        **arguments
            Settings by name; None means not given.

        Raises
        ------
        OptionError
            For an unknown name, or a value that is not allowed, wherever it was set.
        """
        _known(arguments)
        _warn_of_unknown_variables()
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for setting in SETTINGS.values():
            for source, value in _places(setting, arguments):
                values[setting.name] = _parse(setting, value, source)
                sources[setting.name] = source
                break
            else:
                values[setting.name] = setting.default()
                sources[setting.name] = "default"
        return cls(**values, sources=MappingProxyType(sources))

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, without their sources."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sources"}


def _known(arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(SETTINGS)}"
            raise OptionError(f"no setting {name!r}{hint}")


def _places(setting: Setting, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every place that sets it, as (description, value), the one that wins first."""
    name = setting.name
    if arguments.get(name) is not None:
        yield f"argument {name}", arguments[name]
    for override in reversed(_overrides):
        if override.get(name) is not None:
            yield f"argument {name} of the enclosing block", override[name]
    petsc = sys.modules.get("petsc4py.PETSc")
    if petsc is not None:
        database = petsc.Options()
        if database.hasName(setting.petsc_option):
            value = database.getString(setting.petsc_option, "")
            yield f"PETSc option -{setting.petsc_option}", value
    value = os.environ.get(setting.environment_variable)
    if value:
        yield f"environment variable {setting.environment_variable}", value


def _parse(setting: Setting, value: Any, source: str) -> Any:
    try:
        return setting.parse(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{source}: {value!r} is not allowed: {error}") from None


def _warn_of_unknown_variables() -> None:
    known = {setting.environment_variable for setting in SETTINGS.values()} | _FOREIGN
    for name in os.environ:
        if name.startswith("PYOP3_MLIR_") and name not in known and name not in _warned:
            _warned.add(name)
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            log.warning("environment variable %s is not a setting and is ignored%s", name, hint)


@contextmanager
def overriding(**arguments: Any) -> Iterator[Options]:
    """Set settings for a block of code, in all threads; yields the options in force.

    Parameters
    ----------
    **arguments
        Settings by name; None leaves a setting alone.

    Raises
    ------
    OptionError
        As :meth:`Options.resolve`.
    """
    _known(arguments)
    override = MappingProxyType(
        {
            name: _parse(SETTINGS[name], value, f"argument {name}")
            for name, value in arguments.items()
            if value is not None
        }
    )
    _overrides.append(override)
    try:
        yield Options.resolve()
    finally:
        # blocks may end in another order than they began; equal blocks are not the same block
        for position in reversed(range(len(_overrides))):
            if _overrides[position] is override:
                del _overrides[position]
                break


def configure_logging(options: Options) -> None:
    """Show the package's log messages on standard error, from the level that ``options`` ask for.

    Leaves handlers alone where the program has set up logging itself.
    """
    log.setLevel(options.log.upper())
    if not log.handlers and not logging.getLogger().handlers:
        from rich.console import Console
        from rich.logging import RichHandler

        log.addHandler(RichHandler(console=Console(stderr=True), show_path=False))

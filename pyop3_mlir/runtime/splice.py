"""Compile the host's side of a module without the bodies of its executables.

IREE walks through the bodies of ``hal.executable.source`` in every pass over the host's side, which
takes longer than to generate code for them. So a module is compiled with empty bodies up to the
phase in which executables are translated, the bodies are put into its text there, and compiling
goes on. The machine code is the same. The host's side depends on the types of a loop's arguments
only, so many modules share it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["SOURCES", "Body", "splice", "split"]

SOURCES = "executable-sources"
"""IREE's name of the last phase before executables are translated."""

_OPEN = '    "builtin.module"() ({'
_CLOSE = "    }) : () -> ()"
_FUNCTION = re.compile(
    r'      "func\.func"\(\) <\{sym_name = "(\w+)", function_type = \(\) -> \(\)\}> \(\{'
)
_END = re.compile(r"      \}\) \{(.*)\} : \(\) -> \(\)")
_RETURN = '        "func.return"() : () -> ()'
_EMPTY = re.compile(r"func\.func @(\w+)\(\)[^\n]*\{\n\s*return\n\s*\}")


class Body(NamedTuple):
    """What is in an executable.

    Attributes
    ----------
    text
        The function and what is beside it.
    kind
        The same number for bodies that differ in the function's name alone.
    """

    text: str
    kind: int


def split(text: str) -> tuple[str, dict[str, Body]]:
    """Take out what is in the executables of a module.

    Parameters
    ----------
    text
        A module in generic form as xDSL prints it, its executables at the top level.

    Returns
    -------
    tuple
        The module with empty functions in executables, and the bodies by the functions' names:
        none where the module has no executables, or strange ones.
    """
    host: list[str] = []
    bodies: dict[str, Body] = {}
    kinds: dict[str, int] = {}
    lines = iter(text.split("\n"))
    for line in lines:
        host.append(line)
        if line != _OPEN:
            continue
        inside = []
        for inner in lines:
            if inner == _CLOSE:
                break
            inside.append(inner)
        rest = iter(inside)
        function = next(filter(None, map(_FUNCTION.fullmatch, rest)), None)
        end = next(filter(None, map(_END.fullmatch, rest)), None)
        if function is None or end is None:
            return text, {}
        name, body = function[1], "\n".join(inside)
        kind = kinds.setdefault(body.replace(f'"{name}"', ""), len(kinds))
        bodies[name] = Body(body, kind)
        # IREE takes executables that are alike for one: those whose bodies are
        last = f"      }}) {{{end[1]}, body = {kind}}} : () -> ()"
        host += [function[0], _RETURN, last, _CLOSE]
    return "\n".join(host), bodies


def splice(text: str, bodies: Mapping[str, Body]) -> str | None:
    """Put bodies into a module that IREE has compiled up to :data:`SOURCES`.

    Parameters
    ----------
    text
        The module as IREE prints it.
    bodies
        As :func:`split` gives them.

    Returns
    -------
    str or None
        The module; None where a body would be lost, or be there twice.
    """
    found = _EMPTY.findall(text)
    kept = {bodies[name].kind for name in found if name in bodies}
    lost = kept != {body.kind for body in bodies.values()}
    if lost or not set(found) <= set(bodies) or len(set(found)) < len(found):
        return None
    return _EMPTY.sub(lambda found: bodies[found[1]].text, text)

"""Take local kernels from TSFC as GEM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["side_channel"]


def side_channel(replace: Callable[[Any, str, Any], Any]) -> Any:
    """Not there yet: kernels come from loopy."""
    return None

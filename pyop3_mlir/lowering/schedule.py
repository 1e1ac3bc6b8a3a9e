"""How a loop is to be run: what the autotuner chooses among."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BATCHINGS", "STRATEGIES", "WORKGROUP", "Schedule"]

STRATEGIES = ("in_order", "colour", "segmented", "atomic")
BATCHINGS = ("blocked", "flat")

WORKGROUP = 128
"""Threads of a workgroup on a GPU, where not measured."""


@dataclass(frozen=True, order=True)
class Schedule:
    """Scatter strategy and batching of one loop.

    Attributes
    ----------
    strategy
        One of :data:`STRATEGIES`.
    batching
        One of :data:`BATCHINGS`.
    width
        Cells of a block (blocked only): lanes of the vectors that the kernel works on.
    tile
        Rows of a contraction that are accumulated in registers at the same time.
    unroll
        Loops of at most this many iterations are unrolled while lowering.
    workgroup
        Threads of a workgroup on a GPU; each does a cell.
    """

    strategy: str = "in_order"
    batching: str = "blocked"
    width: int = 8
    tile: int = 4
    unroll: int = 4
    workgroup: int = WORKGROUP

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"no scatter strategy {self.strategy!r}; there are {STRATEGIES}")
        if self.batching not in BATCHINGS:
            raise ValueError(f"no batching {self.batching!r}; there are {BATCHINGS}")
        for name in ("width", "tile", "unroll", "workgroup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def __str__(self) -> str:
        group = "" if self.workgroup == WORKGROUP else f" G={self.workgroup}"
        if self.batching == "flat":
            return f"{self.strategy}/flat{group}"
        return f"{self.strategy}/blocked W={self.width} T={self.tile} U={self.unroll}{group}"

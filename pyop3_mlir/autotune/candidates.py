"""Which schedules are worth measuring for a loop on a device, and which to take unmeasured.

The heuristic (tuning off) on a CPU is in_order, blocked, with the shape that was best on most of
the benchmark's cases: W = 4 in double precision, with sixteen accumulators for kernels with
contractions; large kernels get W = 8 and are unrolled less. On a GPU a thread does a cell: atomic
for kernels that write few values a cell, segmented for the others. ``docs/autotuner.md`` has the
reasons.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.lowering.schedule import STRATEGIES, Schedule
from pyop3_mlir.lowering.strips import bytes_of_temporaries
from pyop3_mlir.parloop import Access, Kind, Parloop
from pyop3_mlir.runtime.devices import STACK_LIMIT, Device

__all__ = [
    "DeviceTraits",
    "KernelStatistics",
    "candidates",
    "heuristic",
    "legal_strategies",
    "neighbours",
]

# A GPU adds up to this many values of a cell by atomics before segments pay.
_FEW_WRITES = 16
# Rows that a thread of a GPU holds in registers, of which it has 255 of 4 bytes.
_GPU_ROWS = 32
# A scatter of up to this many values is unrolled whole, so that they need no memory of their own.
_GPU_SCATTER = 128
# Threads of a workgroup: few leave room for more groups where each thread has many registers.
_WORKGROUPS = (64, 128, 256)


@dataclass(frozen=True)
class DeviceTraits:
    """What of a device bears on the choice.

    Attributes
    ----------
    gpu
        Whether cells run on many threads at once.
    threads
        Threads that a dispatch is spread over (CPU).
    vector_bytes
        Size of a vector register (CPU).
    registers
        Number of vector registers (CPU).
    l2_bytes
        Size of a core's own second-level cache (CPU).
    atomics
        Whether the device adds floating point numbers of 8 bytes atomically.
    """

    gpu: bool = False
    threads: int = 1
    vector_bytes: int = 32
    registers: int = 16
    l2_bytes: int = 512 * 1024
    atomics: bool = False

    @classmethod
    def of(cls, device: Device) -> DeviceTraits:
        """Return those of an open device."""
        if not device.is_host:
            return cls(gpu=True, atomics=device.info.f64_atomics)
        wide = device.target.vector_bytes == 64 or "asimd" in device.target.features
        return cls(
            threads=device.threads,
            vector_bytes=device.target.vector_bytes,
            registers=32 if wide else 16,
            l2_bytes=_l2_bytes() or cls.l2_bytes,
            # one thread needs none, and threads have strategies that give the same sum each time
            atomics=False,
        )


def _l2_bytes() -> int | None:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.fullmatch(r"(\d+)([KM]?)\s*", text)
    if found is None:
        return None
    return int(found.group(1)) * {"": 1, "K": 1024, "M": 1024**2}[found.group(2)]


@dataclass(frozen=True)
class KernelStatistics:
    """What of a local kernel bears on the choice.

    Attributes
    ----------
    scalar_bytes
        Size of the scalars that it mostly computes with.
    bytes_per_cell
        Packs of one cell, and its share of the temporaries that a block needs at one time.
    rows
        Parallel extents of its contractions. Empty without any.
    accumulators
        Rows times results of the largest contraction, at least 1: what a tile can hold.
    contractions
        Number of its contractions.
    reductions
        Extents of what its contractions sum over.
    pointwise
        Extents of its loops over pointwise statements (quadrature points).
    writes
        Scalars that a cell writes.
    operations
        Floating point operations of a cell.
    """

    scalar_bytes: int
    bytes_per_cell: int
    rows: tuple[int, ...]
    accumulators: int
    contractions: int
    reductions: tuple[int, ...]
    pointwise: tuple[int, ...]
    writes: int
    operations: int = 0

    @classmethod
    def of(cls, kernel: LocalKernel) -> KernelStatistics:
        """Collect them from a kernel."""
        values = [*kernel.arguments, *(result for s in kernel.statements for result in s.results)]
        sizes: dict[int, int] = {}
        for value in values:
            if value.dtype.kind in "fc":
                # a complex number is worked on as two reals
                width = value.dtype.itemsize // (2 if value.dtype.kind == "c" else 1)
                sizes[width] = sizes.get(width, 0) + value.size
        rows: set[int] = set()
        reductions: set[int] = set()
        pointwise: set[int] = set()
        accumulators, contractions = 1, 0
        for statement in kernel.statements:
            extents = [dim.extent for dim in statement.dims]
            if statement.reductions:
                contractions += 1
                accumulators = max(accumulators, max(extents, default=1) * len(statement.results))
            (rows if statement.reductions else pointwise).update(e for e in extents if e > 1)
            reductions.update(dim.extent for dim in statement.reductions)
        written = {output.argument for output in kernel.outputs}
        return cls(
            scalar_bytes=max(sizes, key=lambda width: sizes[width], default=8),
            # long dimensions are worked through in strips, so blocks of 8 are what is looked at
            bytes_per_cell=sum(a.size * a.dtype.itemsize for a in kernel.arguments)
            + bytes_of_temporaries(kernel, 8) // 8,
            rows=tuple(sorted(rows)),
            accumulators=accumulators,
            contractions=contractions,
            reductions=tuple(sorted(reductions)),
            pointwise=tuple(sorted(pointwise)),
            writes=sum(argument.size for argument in written),
            operations=kernel.count_flops(),
        )


def legal_strategies(loop: Parloop, traits: DeviceTraits) -> dict[str, str | None]:
    """Say for each scatter strategy why it cannot run this loop, or None where it can.

    RW through shared targets means what a sequential loop does: each entity sees what earlier ones
    left. WRITE through a map means that the last entity wins, which atomics cannot promise.
    """
    reasons: dict[str, str | None] = dict.fromkeys(STRATEGIES)
    arguments = loop.spec.arguments
    indirect = [a for a in arguments if a.kind is not Kind.DIRECT and a.access.writes]
    if loop.order_dependent:
        for name in ("colour", "segmented", "atomic"):
            reasons[name] = "entities read what others wrote (RW): order matters"
        return reasons
    if traits.gpu:
        reasons["in_order"] = "one thread of a GPU would do all the work"
    if not indirect:
        # nothing is shared, so the strategies do not differ
        keep = "colour" if traits.gpu else "in_order"
        return {name: None if name == keep else "no argument is shared" for name in STRATEGIES}
    if any(a.access is Access.RW for a in indirect):
        for name in ("segmented", "atomic"):
            reasons[name] = "an argument is read and written through a map"
    if not traits.gpu:
        reasons["atomic"] = "on a CPU the others need no atomics and give the same sum each time"
    elif not traits.atomics:
        reasons["atomic"] = "the device has no atomic addition of floating point numbers"
    elif any(a.access is Access.WRITE for a in indirect):
        reasons["atomic"] = "WRITE through a map: the last entity has to win"
    elif any(np.dtype(a.dtype).kind == "c" for a in indirect):
        reasons["atomic"] = "complex numbers cannot be added atomically"
    return reasons


def heuristic(
    statistics: KernelStatistics,
    traits: DeviceTraits,
    strategies: Sequence[str],
) -> Schedule:
    """Return the schedule to use without measuring.

    Parameters
    ----------
    statistics, traits
        Of the kernel and the device.
    strategies
        The strategies that can run the loop, at least one.
    """
    if traits.gpu:
        preferred = ["segmented", "atomic", "colour"]
        if statistics.writes <= _FEW_WRITES:
            preferred = ["atomic", "segmented", "colour"]
    elif traits.threads > 1:
        preferred = ["segmented", "colour"]
    else:
        preferred = ["in_order", "segmented", "colour"]
    strategy = next((name for name in preferred if name in strategies), strategies[0])
    if traits.gpu:
        # a thread does a cell in one kernel, with its values in registers; flat passes them from
        # kernel to kernel through memory. All rows at once, so that nothing is indexed
        unroll = max(20, -(-min(statistics.writes, _GPU_SCATTER) // 4))
        return Schedule(strategy, "blocked", 1, min(_GPU_ROWS, statistics.accumulators), unroll)
    return Schedule(strategy, "blocked", *_shapes(statistics, traits)[0])


def candidates(
    statistics: KernelStatistics,
    traits: DeviceTraits,
    strategies: Sequence[str],
    batchings: Sequence[str] = ("blocked", "flat"),
) -> list[Schedule]:
    """List the schedules worth building, the heuristic's first, then the most promising.

    Left out are widths whose temporaries do not fit into the second-level cache, if any do, or else
    onto the stack, accumulators that need more than twice the registers there are, and shapes that
    give the same code as one before because no contraction has as many rows.

    Parameters
    ----------
    statistics, traits, strategies
        As for :func:`heuristic`.
    batchings
        The batchings that can run the loop.
    """
    base = heuristic(statistics, traits, strategies)
    found = [base] if base.batching in batchings else []
    others = [name for name in strategies if name != base.strategy]
    if "flat" in batchings:
        flat = [replace(base, strategy=s, batching="flat") for s in (base.strategy, *others)]
    else:
        flat = []
    if traits.gpu:
        if "blocked" in batchings:
            found += [replace(base, strategy=name) for name in others]
        return list(dict.fromkeys([*found, *flat]))
    if "blocked" in batchings:
        shapes = _shapes(statistics, traits)
        found += [
            replace(base, batching="blocked", width=w, tile=t, unroll=u) for w, t, u in shapes
        ]
        # how contributions are summed hardly depends on W and T: one shape tells; and one thread
        # gains nothing from strategies that let several work
        where = 1 if traits.threads > 1 else 3
        found[where:where] = [replace(base, strategy=name) for name in others]
    return list(dict.fromkeys([*found, *flat]))


# Width (for scalars of 8 bytes), tile and unrolling, the most promising first: measured on the
# benchmark's cases (docs/autotuner.md). Narrow blocks have few enough values to scatter while the
# next block is computed; contractions want accumulators, and tables known while lowering.
_POINTWISE = ((4, 16, 20), (8, 8, 20), (8, 4, 4), (4, 4, 4), (16, 4, 4), (16, 8, 20), (32, 4, 4))
_CONTRACTIONS = (
    (4, 16, 20), (8, 12, 20), (8, 20, 20), (8, 16, 20), (4, 10, 20), (8, 8, 20), (16, 8, 20),
    (4, 4, 20), (16, 4, 4), (8, 4, 4), (4, 8, 4), (8, 8, 4),
)  # fmt: skip
# Kernels with more of these take long to compile unrolled, which a first call should not wait for.
_MANY_CONTRACTIONS = 10
_MANY_OPERATIONS = 450
_LARGE_POINTWISE = ((8, 4, 4), (4, 16, 20), (4, 4, 4), (16, 4, 4), (8, 8, 20), (16, 8, 20))
_MANY_WRITES = 12
_LARGE = (
    (8, 8, 2),
    (8, 8, 4),
    (8, 12, 2),
    (4, 8, 4),
    (8, 4, 4),
    (4, 16, 4),
    (16, 4, 4),
    (4, 8, 10),
)


def _shapes(statistics: KernelStatistics, traits: DeviceTraits) -> list[tuple[int, int, int]]:
    """Widths, tiles and degrees of unrolling, the most promising first."""
    large = statistics.operations > _MANY_OPERATIONS
    if not statistics.rows:
        large = large or statistics.writes > _MANY_WRITES
        listed: Sequence[tuple[int, int, int]] = _LARGE_POINTWISE if large else _POINTWISE
    elif statistics.contractions > _MANY_CONTRACTIONS:
        listed = _LARGE
    elif large:
        listed = (*_LARGE[:2], *_CONTRACTIONS[:2], *_LARGE[2:5], *_CONTRACTIONS[2:])
    else:
        listed = _CONTRACTIONS
    lanes = max(traits.vector_bytes // statistics.scalar_bytes, 1)
    fitting, spilling = [], []
    for wide, wanted, unroll in listed:
        width = max(1, wide * 8 // statistics.scalar_bytes)
        tile = min(wanted, statistics.accumulators)
        needed = -(-width // lanes) * tile
        if tile == 1 or needed <= traits.registers:
            fitting.append((width, tile, unroll))
        elif needed <= 2 * traits.registers:
            # spilling a few accumulators can still pay, beyond that measured times double
            spilling.append((width, tile, unroll))
    shapes = fitting + spilling
    # out of the second-level cache vectors still pay, as long as the stack holds a block
    for limit in (traits.l2_bytes, STACK_LIMIT):
        found = [shape for shape in shapes if shape[0] * statistics.bytes_per_cell <= limit]
        if found:
            return list(dict.fromkeys(found))
    return [(1, min(4, statistics.accumulators), 4)]


def neighbours(
    best: Schedule, statistics: KernelStatistics, traits: DeviceTraits
) -> list[Schedule]:
    """List what to try around the best so far: degrees of unrolling, on GPUs tiles and workgroups.

    Parameters
    ----------
    best
        The fastest of the candidates that were measured.
    statistics, traits
        As for :func:`heuristic`.
    """
    groups = [replace(best, workgroup=threads) for threads in _WORKGROUPS] if traits.gpu else []
    groups = [schedule for schedule in groups if schedule != best]
    if best.batching == "flat":
        return groups
    # loops that are shorter than both limits give the same code
    longest = max((*statistics.rows, *statistics.reductions, *statistics.pointwise), default=1)
    near = groups + [
        replace(best, unroll=unroll)
        for unroll in (2, 4, 10, 20)
        if unroll != best.unroll and min(unroll, best.unroll) < longest
    ]
    if traits.gpu:
        tiles = {min(tile, statistics.accumulators) for tile in (1, 4, 8, 16, _GPU_ROWS)}
        near += [replace(best, tile=tile) for tile in sorted(tiles - {best.tile})]
    return near

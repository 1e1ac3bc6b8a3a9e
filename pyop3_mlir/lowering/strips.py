"""Which loop nests can work through a dimension in strips, so that their temporaries fit in cache.

A kernel with many quadrature points computes values at all of them, and then sums over them. The
nests that do so share a dimension: it is parallel where values are computed, and reduced, or also
parallel, where they are used. If one loop over *strips* of that dimension surrounds them all, only
a strip of each value has to be kept. In the words of compilers: strip mining, then loop fusion.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from pyop3_mlir.kernels.program import (
    Compute,
    IndexOf,
    KernelArgument,
    Load,
    LocalKernel,
    postorder,
)

__all__ = ["BUDGET", "Access", "Nest", "Strip", "bytes_of_temporaries", "find_strip"]

BUDGET = 256 * 1024
"""Bytes that the temporaries of a block may take before strips are looked for."""

Access = tuple[Hashable, tuple[int | None, ...]]
"""A buffer, and for each of its axes the dimension that indexes it (None: anything else)."""


@dataclass(frozen=True)
class Nest:
    """A loop nest.

    Attributes
    ----------
    extents
        Iterations of each dimension.
    reductions
        Dimensions that are summed over.
    reads, writes
        What it accesses; each buffer is written by one nest.
    """

    extents: tuple[int, ...]
    reductions: frozenset[int]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]


@dataclass(frozen=True)
class Strip:
    """A loop over strips.

    Attributes
    ----------
    dims
        The nests in it, by number, and which of their dimensions it goes through.
    size
        Iterations of a strip; the last one may be shorter.
    extent
        Iterations altogether.
    local
        Buffers of which only a strip is kept, and their axis.
    later
        Numbers of the nests that need what the loop has summed up: they have to follow it.
    """

    dims: Mapping[int, int]
    size: int
    extent: int
    local: Mapping[Hashable, int]
    later: frozenset[int]


def find_strip(
    nests: Sequence[Nest], sizes: Mapping[Hashable, int], kept: set[Hashable], budget: int = BUDGET
) -> Strip | None:
    """The loop over strips that saves most memory.

    Parameters
    ----------
    nests
        In the order in which they run.
    sizes
        Bytes of each temporary that they write.
    kept
        Temporaries that are used elsewhere as well.
    budget
        Bytes that all temporaries together should take.

    Returns
    -------
    Strip or None
        None where the temporaries are within the budget or nothing helps.
    """
    total = sum(sizes.values())
    if total <= budget:
        return None
    best: tuple[int, Strip] | None = None
    for dims in _shared(nests, sizes):
        strip = _strip(nests, sizes, kept, budget, dims)
        if strip is None:
            continue
        bytes_ = sum(sizes[buffer] for buffer in strip.local)
        saved = bytes_ - bytes_ * strip.size // strip.extent
        if best is None or saved > best[0]:
            best = saved, strip
    return best[1] if best is not None and 4 * best[0] >= total else None


def _shared(nests: Sequence[Nest], sizes: Mapping[Hashable, int]) -> list[dict[int, int]]:
    """For each dimension that nests share by way of temporaries, which one of each nest it is."""
    parent: dict[tuple[int, int], tuple[int, int]] = {
        (n, d): (n, d) for n, nest in enumerate(nests) for d in range(len(nest.extents))
    }

    def root(key: tuple[int, int]) -> tuple[int, int]:
        while parent[key] != key:
            key = parent[key]
        return key

    writers = {
        buffer: [(n, dim) for dim in dims]
        for n, nest in enumerate(nests)
        for buffer, dims in nest.writes
    }
    broken: set[tuple[int, int]] = set()
    for n, nest in enumerate(nests):
        for buffer, dims in nest.reads:
            if buffer not in sizes or buffer not in writers:
                continue
            for (writer, written), dim in zip(writers[buffer], dims, strict=True):
                if written is None:
                    continue
                if dim is None:
                    broken.add((writer, written))
                else:
                    parent[root((n, dim))] = root((writer, written))
    groups: dict[tuple[int, int], dict[int, int]] = {}
    unusable = {root(key) for key in broken}
    for n, d in parent:
        group = groups.setdefault(root((n, d)), {})
        if n in group:  # a diagonal
            unusable.add(root((n, d)))
        group[n] = d
    return [
        group
        for key, group in groups.items()
        if key not in unusable
        and len(group) > 1
        and len({nests[n].extents[d] for n, d in group.items()}) == 1
    ]


def _strip(
    nests: Sequence[Nest],
    sizes: Mapping[Hashable, int],
    kept: set[Hashable],
    budget: int,
    dims: Mapping[int, int],
) -> Strip | None:
    # what depends on a sum over the dimension cannot run before all strips have been added up
    sums = {
        buffer for n, d in dims.items() if d in nests[n].reductions for buffer, _ in nests[n].writes
    }
    later: set[int] = set()
    for n, nest in enumerate(nests):
        if any(buffer in sums for buffer, _ in nest.reads):
            later.add(n)
            sums.update(buffer for buffer, _ in nest.writes)
    members = {n: d for n, d in dims.items() if n not in later}
    if len(members) < 2:
        return None
    readers: dict[Hashable, set[int]] = {}
    for n, nest in enumerate(nests):
        for buffer, _ in nest.reads:
            readers.setdefault(buffer, set()).add(n)
    local: dict[Hashable, int] = {}
    for n, d in members.items():
        for buffer, axes in nests[n].writes:
            inside = readers.get(buffer, set()) <= members.keys()
            if d in axes and buffer in sizes and buffer not in kept and inside:
                local[buffer] = axes.index(d)
    if not local:
        return None
    (extent,) = {nests[n].extents[d] for n, d in members.items()}
    strips = sum(sizes[buffer] for buffer in local)
    rest = sum(sizes.values()) - strips
    # where the rest alone is too much, strips are still to be small
    room = max(budget - rest, budget // 4)
    size = max(1, min(extent, extent * room // strips))
    if size == extent:
        return None
    # no shorter last strip, where that costs little
    size = next((s for s in range(size, size // 2, -1) if extent % s == 0), size)
    first = min(members)
    later = {n for n in later if n > first}
    return Strip(members, size, extent, local, frozenset(later))


def bytes_of_temporaries(kernel: LocalKernel, width: int) -> int:
    """Bytes of the temporaries of a block of ``width`` cells, with strips where they help."""
    total = 0
    # no strip goes across the solution of systems, which needs a copy of their matrices
    parts: list[list[Compute]] = [[]]
    for statement in kernel.statements:
        systems, _ = statement.separated()
        if not systems:
            parts[-1].append(statement)
            continue
        parts += [[statement], []]
        for result, system in systems.items():
            dims = *system.batch, system.equation, system.unknown
            total += math.prod(dim.extent for dim in dims) * result.dtype.itemsize * width
    of = {result: k for k, part in enumerate(parts) for s in part for result in s.results}
    kept: set[Hashable] = {output.value for output in kernel.outputs}
    for number, part in enumerate(parts):
        read = (source for s in part for source, _ in _nest(s).reads)
        kept.update(source for source in read if of.get(source, number) != number)  # type: ignore[call-overload]
    return total + sum(_bytes_of_part(part, kept, width) for part in parts)


def _bytes_of_part(statements: Sequence[Compute], kept: set[Hashable], width: int) -> int:
    nests = [_nest(statement) for statement in statements]
    sizes: dict[Hashable, int] = {
        result: result.size * result.dtype.itemsize * width
        for statement in statements
        for result in statement.results
    }
    kept = set(kept)
    total = 0
    while (strip := find_strip(nests, sizes, kept)) is not None:
        for n in strip.dims:
            kept.update(buffer for buffer, _ in nests[n].reads)
            for buffer, _ in nests[n].writes:
                size = sizes.pop(buffer)
                total += size * strip.size // strip.extent if buffer in strip.local else size
        nests = [nest for n, nest in enumerate(nests) if n not in strip.dims]
    return total + sum(sizes.values())


def _nest(statement: Compute) -> Nest:
    dims = statement.dims + statement.reductions
    number = {dim: d for d, dim in enumerate(dims)}
    reads: list[Access] = []
    for node in postorder(statement.bodies):
        if isinstance(node, Load) and not isinstance(node.source, KernelArgument):
            at = (number[i.dim] if isinstance(i, IndexOf) else None for i in node.children)
            reads.append((node.source, tuple(at)))
    parallel = len(statement.dims)
    return Nest(
        tuple(dim.extent for dim in dims),
        frozenset(range(parallel, len(dims))),
        tuple(reads),
        tuple((result, tuple(range(parallel))) for result in statement.results),
    )

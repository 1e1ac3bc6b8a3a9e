"""The instructions of a loopy kernel as a tree of loops."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from pyop3_mlir.errors import UnsupportedLoopError

__all__ = ["Instruction", "Loop", "extents_of", "tree_of"]


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop over ``extent`` values of an iname, from ``start``."""

    iname: str
    start: int
    extent: int
    body: tuple[Loop | Instruction, ...]


@dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction of loopy, inside all its loops."""

    instruction: Any


def extents_of(kernel: Any, where: str) -> dict[str, tuple[int, int]]:
    """First value and number of values of each loop."""
    import islpy as isl

    found: dict[str, tuple[int, int]] = {}
    for domain in kernel.domains:
        if isinstance(domain, isl.BasicSet):
            domain = domain.to_set()
        count = domain.dim(isl.dim_type.set)
        size = 1
        for position in range(count):
            iname = domain.get_dim_name(isl.dim_type.set, position)
            low, high = (_constant(bound(position)) for bound in (domain.dim_min, domain.dim_max))
            if low is None or high is None:
                raise UnsupportedLoopError(f"{where}: loop {iname} has no constant bounds")
            found[iname] = (low, high - low + 1)
            size *= max(high - low + 1, 0)
        if count > 1 and size:
            box = isl.Set.universe(domain.space)
            for position in range(count):
                low, extent = found[domain.get_dim_name(isl.dim_type.set, position)]
                box = box.lower_bound_val(isl.dim_type.set, position, low)
                box = box.upper_bound_val(isl.dim_type.set, position, low + extent - 1)
            if not box.is_equal(domain):
                raise UnsupportedLoopError(f"{where}: the bounds of its loops depend on each other")
    return found


def _constant(bound: Any) -> int | None:
    pieces = bound.get_pieces()
    if len(pieces) != 1 or not pieces[0][1].is_cst():
        return None
    return int(pieces[0][1].get_constant_val().to_python())


def tree_of(kernel: Any, where: str) -> tuple[Loop | Instruction, ...]:
    """The instructions of ``kernel`` as a tree of loops, in an order that respects dependencies."""
    instructions = list(kernel.instructions)
    number = {instruction.id: i for i, instruction in enumerate(instructions)}
    needs = [
        [number[d] for d in instruction.depends_on if d in number] for instruction in instructions
    ]
    extents = extents_of(kernel, where)
    reductions = {
        iname for i in instructions for iname in getattr(i, "reduction_inames", lambda: ())()
    }
    priorities = [tuple(p) for p in kernel.loop_priority]

    def outermost(candidates: list[str]) -> str:
        for candidate in candidates:
            if not any(
                candidate in p and other in p and p.index(other) < p.index(candidate)
                for p in priorities
                for other in candidates
            ):
                return candidate
        return candidates[0]

    def build(members: list[int], outer: frozenset[str]) -> tuple[Loop | Instruction, ...]:
        inames = {i: instructions[i].within_inames - outer - reductions for i in members}
        by_iname: dict[str, list[int]] = {}
        for i in members:
            for iname in inames[i]:
                by_iname.setdefault(iname, []).append(i)
        # instructions that share a loop form one node of the tree at this level
        node_of = {i: i for i in members}

        def root(i: int) -> int:
            while node_of[i] != i:
                node_of[i] = node_of[node_of[i]]
                i = node_of[i]
            return i

        for group in by_iname.values():
            for i in group[1:]:
                a, b = root(group[0]), root(i)
                node_of[max(a, b)] = min(a, b)
        nodes: dict[int, list[int]] = {}
        for i in members:
            nodes.setdefault(root(i), []).append(i)
        # order the nodes: topological, ties by position
        before: dict[int, set[int]] = {n: set() for n in nodes}
        after: dict[int, list[int]] = {n: [] for n in nodes}
        inside = set(members)
        for i in members:
            for j in needs[i]:
                if j in inside and root(j) != root(i) and root(j) not in before[root(i)]:
                    before[root(i)].add(root(j))
                    after[root(j)].append(root(i))
        waiting = {n: len(b) for n, b in before.items()}
        ready = [n for n, count in waiting.items() if not count]
        heapq.heapify(ready)
        result: list[Loop | Instruction] = []
        while ready:
            n = heapq.heappop(ready)
            group = nodes[n]
            if len(group) == 1 and not inames[group[0]]:
                result.append(Instruction(instructions[group[0]]))
            else:
                shared = sorted(
                    iname for iname in inames[group[0]] if len(by_iname[iname]) == len(group)
                )
                if not shared:
                    raise UnsupportedLoopError(
                        f"{where}: instructions {', '.join(instructions[i].id for i in group[:4])} "
                        "share loops that do not nest"
                    )
                iname = outermost(shared)
                if iname not in extents:
                    raise UnsupportedLoopError(f"{where}: loop {iname} has no domain")
                start, extent = extents[iname]
                result.append(Loop(iname, start, extent, build(group, outer | {iname})))
            for m in after[n]:
                waiting[m] -= 1
                if not waiting[m]:
                    heapq.heappush(ready, m)
        if len(result) != len(nodes):
            raise UnsupportedLoopError(f"{where}: its dependencies form a cycle")
        return tuple(result)

    return build(list(range(len(instructions))), frozenset())

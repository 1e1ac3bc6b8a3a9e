"""Loops for tests of the engine and the lowering, with data of small whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from builder import KernelBuilder, dims_of, entry, total
from meshes import random_map

from pyop3_mlir.kernels.program import Dim, IndexOf, Load, Op, Scalar, Table
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    READ,
    RW,
    WRITE,
    Argument,
    IndexTable,
    IterationSet,
    Parloop,
)

__all__ = ["every_access", "random_loop", "whole"]


def whole(
    rng: np.random.Generator, shape: Any, dtype: Any, low: int = -4, high: int = 5
) -> np.ndarray[Any, Any]:
    """Small whole numbers (complex ones have two parts)."""
    dtype = np.dtype(dtype)
    if dtype.kind == "u":
        low = 0
    values = rng.integers(low, high, shape).astype(dtype)
    if dtype.kind == "c":
        values = values + 1j * rng.integers(low, high, shape).astype(dtype)
    return values.astype(dtype)


def every_access(dtype: Any, cells: int = 37, reductions: bool = True) -> Parloop:
    """A loop that changes arguments of every kind with every access mode."""
    rng = np.random.default_rng(5)
    dtype = np.dtype(dtype)
    nodes, arity, components = 25, 3, 2
    shared = IndexTable(random_map(cells, arity, nodes, 7), nodes + 3, name="shared")
    private = IndexTable(rng.permutation(cells + 2)[:cells, None], cells + 2, name="private")
    k = KernelBuilder("every_access")
    i, c = dims_of((arity, components))
    x = k.argument(arity, components, dtype=dtype)
    d = k.argument(components, dtype=dtype)
    g = k.argument(components, dtype=dtype)

    def data(rows):
        return whole(rng, (rows, components), dtype)

    arguments = [
        Argument.indirect(data(nodes + 3), READ, shared, "x"),
        Argument.direct(data(cells), READ, "d"),
        Argument.glob(whole(rng, components, dtype), READ, "g"),
    ]
    at_node = total(Op("mul", entry(x, i, c), entry(d, c)), entry(g, c))
    of_cell = k.compute((c,), entry(x, i, c), over=(i,))
    ordered = dtype.kind != "c"
    for access in (WRITE, RW, INC, *((MIN, MAX) if ordered else ())):
        a = k.argument(components, dtype=dtype)
        arguments.append(Argument.direct(data(cells), access))
        value = Op("sub", entry(of_cell, c), entry(d, c))
        if access is RW:
            value = total(value, entry(a, c))
        k.store(a, (c,), value)
    for access in (WRITE, INC, *((MIN, MAX) if ordered else ())):
        a = k.argument(arity, components, dtype=dtype)
        arguments.append(Argument.indirect(data(nodes + 3), access, shared))
        k.store(a, (i, c), at_node)
    a = k.argument(1, components, dtype=dtype)
    arguments.append(Argument.indirect(data(cells + 2), RW, private))
    k.store(a, (Dim("j", 1), c), Op("mul", entry(a, 0, c), entry(d, c)))
    if reductions:
        for access in (INC, *((MIN, MAX) if ordered else ())):
            a = k.argument(components, dtype=dtype)
            arguments.append(Argument.glob(whole(rng, components, dtype), access))
            k.store(a, (c,), entry(of_cell, c))
    return Parloop(k.kernel(), IterationSet(cells), arguments)


def random_loop(seed: int) -> Callable[[], Parloop]:
    """A function that makes a random loop: any kernel, maps and access modes."""
    rng = np.random.default_rng(seed)
    cells = int(rng.choice([1, 3, 8, 13, 26]))
    rows = int(rng.integers(1, 12))
    dims = [Dim(f"d{k}", int(n)) for k, n in enumerate(rng.integers(1, 6, 3))]
    k = KernelBuilder(f"random_{seed}")
    sources = [
        (k.argument(*(d.extent for d in shape)), shape)
        for shape in (tuple(rng.permutation(dims)[: rng.integers(0, 3)]) for _ in range(3))
    ]
    inputs = list(k.arguments)

    def leaf(allowed):
        source, shape = sources[rng.integers(len(sources))]
        if rng.random() < 0.2:
            return Scalar(float(rng.integers(-3, 4)))
        if rng.random() < 0.2:
            table = Table(rng.integers(-3, 4, [d.extent for d in shape]).astype(float))
            source = table
        indices = []
        for dim in shape:
            choice = [d for d in allowed if d.extent <= dim.extent]
            if dim in allowed and rng.random() < 0.8:
                indices.append(IndexOf(dim))
            elif choice and rng.random() < 0.7:
                indices.append(IndexOf(choice[rng.integers(len(choice))]))
            else:
                indices.append(Scalar(int(rng.integers(dim.extent))))
        return Load(source, indices)

    def expression(allowed, depth):
        if not depth:
            return leaf(allowed)
        a, b = expression(allowed, depth - 1), expression(allowed, depth - 1)
        match rng.integers(6):
            case 0:
                return Op("select", Op("gt", a, Scalar(0.0)), b, Scalar(1.0))
            case 1:
                return Op("max", a, b)
            case 2:
                return Op("neg", a)
            case 3 if depth == 1:
                return Op("mul", a, b)
            case 4:
                return Op("sub", a, b)
        return Op("add", a, b)

    for _ in range(rng.integers(1, 5)):
        order = list(rng.permutation(dims))
        free, over = order[: rng.integers(0, 3)], order[2 : rng.integers(2, 4)]
        value = k.compute(free, expression([*free, *over], int(rng.integers(0, 3))), over=over)
        sources.append((value, tuple(free)))
    table = random_map(
        cells, 6, rows, seed, float(rng.choice([0.0, 0.2])), rng.choice([np.int32, np.int64])
    )
    plan = [(argument, READ, rng.choice(["direct", "indirect", "global"])) for argument in inputs]
    for access in (INC, WRITE, MIN):
        source, shape = sources[rng.integers(len(inputs), len(sources))]
        output = k.argument(*(d.extent for d in shape))
        k.store(output, shape, entry(source, *shape))
        kinds = ["direct", "indirect"] + ["global"] * (access is not WRITE)
        plan.append((output, access, rng.choice(kinds)))
    kernel = k.kernel()
    entities = rng.integers(0, cells, cells + 2).astype(np.int32) if rng.random() < 0.3 else None

    def make():
        data = np.random.default_rng(seed)
        arguments = []
        for formal, access, kind in plan:
            if kind == "global":
                arguments.append(Argument.glob(whole(data, formal.size, float), access))
            elif kind == "direct":
                buffer = whole(data, (cells, formal.size), float)
                arguments.append(Argument.direct(buffer, access))
            else:
                arity = next(a for a in (5, 4, 3, 2, 1) if formal.size % a == 0)
                components = formal.size // arity
                map_ = IndexTable(table[:, :arity], rows, allow_negative=True)
                buffer = whole(data, (rows, components), float)
                arguments.append(Argument.indirect(buffer, access, map_))
        size = cells if entities is None else len(entities)
        return Parloop(kernel, IterationSet(size, entities=entities), arguments)

    return make

"""Loops for tests of the engine and the lowering, with data of small whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from builder import KernelBuilder, dims_of, entry, total
from meshes import random_map

from pyop3_mlir.kernels.program import Dim, Expr, IndexOf, Load, Op, Scalar, Table
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
    """A function that makes a random loop: any type, kernel, maps, access modes and subset."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(rng.choice(["f8", "f8", "f8", "f4", "i4", "i8", "c16"]))
    cells = int(rng.choice([1, 3, 8, 13, 26]))
    rows = int(rng.integers(1, 12))
    dims = [Dim(f"d{k}", int(n)) for k, n in enumerate(rng.integers(1, 7, 3))]
    k = KernelBuilder(f"random_{seed}")
    shapes = [tuple(rng.permutation(dims)[: rng.integers(0, 3)]) for _ in range(3)]
    sources = [(k.argument(*(d.extent for d in shape), dtype=dtype), shape) for shape in shapes]
    inputs = list(k.arguments)

    def constant() -> Scalar:
        return Scalar(dtype.type(rng.integers(-3, 4)), dtype)

    def index(extent: int, allowed: list[Dim]) -> Expr:
        """Some index below ``extent``."""
        fitting = [dim for dim in allowed if dim.extent <= extent]
        if fitting and rng.random() < 0.6:
            return IndexOf(fitting[rng.integers(len(fitting))])
        if allowed and rng.random() < 0.5:
            shifted = Op("add", IndexOf(allowed[rng.integers(len(allowed))]), Scalar(1))
            return Op("rem", shifted, Scalar(extent))
        return Scalar(int(rng.integers(extent)))

    def leaf(allowed: list[Dim]) -> Expr:
        source, shape = sources[rng.integers(len(sources))]
        if rng.random() < 0.2:
            return constant()
        if rng.random() < 0.2:
            source = Table(rng.integers(-1, 3, [d.extent for d in shape]).astype(dtype))
        indices = [
            IndexOf(dim) if dim in allowed and rng.random() < 0.8 else index(dim.extent, allowed)
            for dim in shape
        ]
        return Load(source, indices)

    def expression(allowed: list[Dim], depth: int) -> Expr:
        if not depth:
            return leaf(allowed)
        a, b = expression(allowed, depth - 1), expression(allowed, depth - 1)
        match rng.integers(6):
            case 0:
                return Op("select", Op("ne", a, constant()), b, constant())
            case 1 if dtype.kind != "c":
                return Op("max", a, b)
            case 2:
                return Op("neg", a)
            case 3 if depth == 1 and dtype.itemsize > 4:
                return Op("mul", a, b)
            case 4:
                return Op("sub", a, b)
        return Op("add", a, b)

    for _ in range(rng.integers(1, 5)):
        order = list(rng.permutation(dims))
        free, over = order[: rng.integers(0, 3)], order[2 : rng.integers(2, 4)]
        allowed = [*free, *over]
        bodies = [expression(allowed, int(rng.integers(0, 3))) for _ in range(rng.integers(1, 3))]
        found = k.compute(free, *bodies, over=over)
        results = found if isinstance(found, tuple) else (found,)
        sources += [(value, tuple(free)) for value in results]
    table = random_map(
        cells, 6, rows, seed, float(rng.choice([0.0, 0.2])), rng.choice([np.int32, np.int64])
    )
    plan = [(argument, READ, rng.choice(["direct", "indirect", "global"])) for argument in inputs]
    for access in (INC, WRITE, INC if dtype.kind == "c" else MIN):
        source, shape = sources[rng.integers(len(inputs), len(sources))]
        output = k.argument(*(d.extent for d in shape), dtype=dtype)
        k.store(output, shape, entry(source, *shape))
        if access is INC and rng.random() < 0.5:
            k.store(output, shape, constant())
        kinds = ["direct", "indirect"] + ["global"] * (access is not WRITE)
        plan.append((output, access, rng.choice(kinds)))
    kernel = k.kernel()
    entities = rng.integers(0, cells, cells + 2).astype(np.int32) if rng.random() < 0.3 else None
    arities = [int(rng.choice([a for a in range(1, 7) if not f.size % a])) for f, _, _ in plan]

    def make() -> Parloop:
        data = np.random.default_rng(seed)
        arguments = []
        for (formal, access, kind), arity in zip(plan, arities, strict=True):
            if kind == "global":
                arguments.append(Argument.glob(whole(data, formal.size, dtype), access))
            elif kind == "direct":
                buffer = whole(data, (cells, formal.size), dtype)
                arguments.append(Argument.direct(buffer, access))
            else:
                map_ = IndexTable(table[:, :arity], rows, allow_negative=True)
                buffer = whole(data, (rows, formal.size // arity), dtype)
                arguments.append(Argument.indirect(buffer, access, map_))
        size = cells if entities is None else len(entities)
        return Parloop(kernel, IterationSet(size, entities=entities), arguments)

    return make

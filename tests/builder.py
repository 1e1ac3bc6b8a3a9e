"""Local kernels written by hand, with little ceremony."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyop3_mlir.kernels.program import (
    Compute,
    Dim,
    Expr,
    IndexOf,
    KernelArgument,
    Load,
    LocalKernel,
    Op,
    Output,
    Scalar,
    Source,
    Temporary,
)

__all__ = ["KernelBuilder", "dims_of", "entry", "product", "row_major", "total"]


def dims_of(shape: Sequence[int]) -> tuple[Dim, ...]:
    """Fresh dimensions over a shape."""
    return tuple(Dim(f"i{axis}", extent) for axis, extent in enumerate(shape))


def entry(source: Source, *indices: Dim | Expr | int) -> Load:
    """An entry of a source; indices are dimensions, expressions or numbers."""
    return Load(source, [_index(i) for i in indices])


def _index(index: Dim | Expr | int) -> Expr:
    if isinstance(index, Dim):
        return IndexOf(index)
    return Scalar(index) if isinstance(index, int) else index


def row_major(dims: Sequence[Dim]) -> Expr:
    """The flat position of ``dims``."""
    slot: Expr = Scalar(0)
    for dim in dims:
        slot = Op("add", Op("mul", slot, Scalar(dim.extent)), IndexOf(dim))
    return slot


def total(*terms: Expr) -> Expr:
    """The sum of some expressions, from left to right."""
    result = terms[0]
    for term in terms[1:]:
        result = Op("add", result, term)
    return result


def product(*factors: Expr) -> Expr:
    """The product of some expressions, from left to right."""
    result = factors[0]
    for factor in factors[1:]:
        result = Op("mul", result, factor)
    return result


class KernelBuilder:
    """Collects arguments, statements and outputs of a :class:`LocalKernel`."""

    def __init__(self, name: str = "kernel") -> None:
        self.name = name
        self.arguments: list[KernelArgument] = []
        self.statements: list[Compute] = []
        self.outputs: list[Output] = []

    def argument(self, *shape: int, dtype: Any = np.float64) -> KernelArgument:
        """A new argument."""
        name = f"a{len(self.arguments)}"
        self.arguments.append(KernelArgument(name, shape, np.dtype(dtype)))
        return self.arguments[-1]

    def compute(
        self, dims: Sequence[Dim], *bodies: Expr, over: Sequence[Dim] = ()
    ) -> Temporary | tuple[Temporary, ...]:
        """A new statement; its result, or its results where there are several bodies."""
        shape = tuple(dim.extent for dim in dims)
        number = len(self.statements)
        results = tuple(
            Temporary(f"t{number}_{k}", shape, body.dtype) for k, body in enumerate(bodies)
        )
        self.statements.append(Compute(results, tuple(dims), tuple(over), bodies))
        return results if len(results) > 1 else results[0]

    def output(
        self,
        argument: KernelArgument,
        value: Temporary,
        dims: Sequence[Dim] | None = None,
        slot: Expr | None = None,
    ) -> None:
        """A new output piece; in row-major order where no slot is given."""
        dims = dims_of(value.shape) if dims is None else dims
        slot = row_major(dims) if slot is None else slot
        self.outputs.append(Output(argument, tuple(dims), slot, value))

    def store(self, argument: KernelArgument, dims: Sequence[Dim], body: Expr) -> None:
        """A statement whose value goes to ``argument`` in row-major order."""
        value = self.compute(dims, body)
        assert isinstance(value, Temporary)
        self.output(argument, value)

    def kernel(self) -> LocalKernel:
        """The kernel."""
        kernel = LocalKernel(
            self.name, tuple(self.arguments), tuple(self.statements), tuple(self.outputs)
        )
        kernel.validate()
        return kernel

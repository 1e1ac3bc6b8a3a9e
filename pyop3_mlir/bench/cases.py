"""Loops of finite element forms over simplex meshes, as parloops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.bench.meshes import Mesh, aligned, tetrahedra, triangles
from pyop3_mlir.kernels.program import KernelArgument, LocalKernel
from pyop3_mlir.parloop import INC, READ, Argument, IndexTable, IterationSet, Parloop
from pyop3_mlir.planning import csr_pattern, csr_positions

if TYPE_CHECKING:
    from pyop3_mlir.kernels.elements import GemKernel

__all__ = ["CASES", "Case", "FormLoop", "case_named", "signature"]


def signature(kernel: GemKernel) -> LocalKernel:
    """Make a kernel with the arguments of ``kernel`` and no work, for loops that others run."""
    arguments = tuple(KernelArgument(*argument) for argument in kernel.arguments)
    return LocalKernel(kernel.name, arguments, (), ())


@dataclass(frozen=True, eq=False)
class FormLoop:
    """A form on a mesh: the arrays, and the loop over the cells that assembles it.

    Parameters
    ----------
    form, rank
        As in :func:`pyop3_mlir.kernels.elements.expressions`.
    mesh
        The mesh; its degree is that of the form.
    coefficient
        ``[nodes]`` or ``[nodes, D]``; random numbers (seed 0) where not given.
    fold
        As in :func:`pyop3_mlir.kernels.elements.expressions`.
    """

    form: str
    mesh: Mesh
    rank: int = 1
    coefficient: npt.NDArray[Any] | None = None
    fold: bool = True

    @cached_property
    def gem(self) -> GemKernel:
        """The local kernel in GEM."""
        # meshes and arguments need no finite elements
        from pyop3_mlir.kernels import elements

        mesh = self.mesh
        return elements.expressions(self.form, mesh.cell, mesh.degree, self.rank, fold=self.fold)

    @cached_property
    def kernel(self) -> LocalKernel:
        """The local kernel as a tensor program."""
        from pyop3_mlir.kernels import elements

        mesh = self.mesh
        return elements.kernel(self.form, mesh.cell, mesh.degree, self.rank, fold=self.fold)

    @property
    def components(self) -> int:
        """Components of the unknown."""
        return self.mesh.dimension if self.form == "elasticity" else 1

    @property
    def dofs(self) -> int:
        """Number of unknowns."""
        return self.mesh.node_count * self.components

    @cached_property
    def nodes(self) -> IndexTable:
        """The nodes of each cell."""
        return IndexTable(self.mesh.nodes, self.mesh.node_count, name="nodes")

    @cached_property
    def pattern(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """``indptr`` and ``indices`` of the matrix (rank 2), rows and columns numbered by dof."""
        table = self.nodes
        if self.components > 1:
            b = self.components
            dofs = (self.mesh.nodes[:, :, None] * b + np.arange(b)).reshape(self.mesh.size, -1)
            table = IndexTable(dofs, self.dofs, name="dofs")
        indptr, indices = csr_pattern(table, table, self.dofs, self.dofs)
        return indptr, indices

    @cached_property
    def output(self) -> npt.NDArray[np.float64]:
        """What the loop adds to: a vector, the values of a CSR matrix, or one number."""
        if self.rank == 2:
            return aligned(len(self.pattern[1]))
        if self.rank == 0:
            return aligned(1)
        nodes = self.mesh.node_count
        return aligned((nodes, self.components) if self.components > 1 else nodes)

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of the loop."""
        mesh = self.mesh
        nodes = self.nodes
        vertices = IndexTable(mesh.cells, len(mesh.points), name="vertices")
        if self.rank == 2:
            b = self.components
            positions = csr_positions(*self.pattern, nodes, nodes, b, b)
            first = Argument.matrix(self.output, INC, positions, nodes, name="matrix")
        elif self.rank == 0:
            first = Argument.glob(self.output, INC, name="integral")
        else:
            first = Argument.indirect(self.output, INC, nodes, name="result")
        arguments = [first, Argument.indirect(mesh.points, READ, vertices, name="coords")]
        if self.form == "source":
            arguments.append(Argument.glob(self._values((1,)), READ, name="f"))
        elif self.rank < 2:
            b = self.components
            shape = (mesh.node_count, b) if b > 1 else (mesh.node_count,)
            arguments.append(Argument.indirect(self._values(shape), READ, nodes, name="w"))
        return tuple(arguments)

    def _values(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        values = aligned(shape)
        if self.coefficient is None:
            values[...] = np.random.default_rng(0).standard_normal(shape)
        else:
            values[...] = self.coefficient
        return values

    @cached_property
    def parloop(self) -> Parloop:
        """The loop, with its tensor program."""
        return Parloop(self.kernel, IterationSet(self.mesh.size), self.arguments)

    @cached_property
    def bare_parloop(self) -> Parloop:
        """The loop without a tensor program: all that the C baseline needs."""
        return Parloop(signature(self.gem), IterationSet(self.mesh.size), self.arguments)

    @cached_property
    def flops(self) -> int:
        """Floating point operations of the loop, as GEM counts them."""
        from gem.flop_count import count_flops
        from gem.impero_utils import compile_gem

        tree = compile_gem(self.gem.assignments, self.gem.quadrature, remove_zeros=True)
        return int(count_flops(tree)) * self.mesh.size


@dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes
    ----------
    form, cell, degree, rank
        As in :func:`pyop3_mlir.kernels.elements.expressions`.
    """

    form: str
    cell: str
    degree: int
    rank: int

    @property
    def name(self) -> str:
        """Name of the row; ends in action or matrix."""
        kind = {0: "functional", 1: "action", 2: "matrix"}[self.rank]
        return f"{self.form}_p{self.degree}_{self.cell}_{kind}"

    def mesh(self, size: float = 1.0) -> Mesh:
        """Make the mesh: about 80,000 triangles or 25,000 to 50,000 tetrahedra times ``size``."""
        if self.cell == "triangle":
            return triangles(max(1, round(200 * math.sqrt(size))), self.degree)
        side = 20 if self.degree < 3 and self.form != "elasticity" else 16
        return tetrahedra(max(1, round(side * math.cbrt(size))), self.degree)

    def loop(self, size: float = 1.0) -> FormLoop:
        """Make the loop on the mesh."""
        return FormLoop(self.form, self.mesh(size), self.rank)


CASES: tuple[Case, ...] = (
    *(
        Case(form, cell, degree, 1)
        for form in ("mass", "laplace")
        for cell in ("triangle", "tetrahedron")
        for degree in (1, 2, 3)
    ),
    Case("elasticity", "tetrahedron", 2, 1),
    *(
        Case("laplace", cell, degree, 2)
        for cell in ("triangle", "tetrahedron")
        for degree in (1, 2)
    ),
)
"""The cases of ``bench engine``."""


def case_named(name: str) -> Case:
    """Find the case of that name.

    Raises
    ------
    ValueError
        Where there is none; lists those that there are.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"no case {name!r}; there are {', '.join(case.name for case in CASES)}")

"""Solve small systems by Gaussian elimination, one in each lane of a vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xdsl.context import Context
from xdsl.dialects import arith, complex, math, memref, vector
from xdsl.dialects.builtin import ComplexType, MemRefType, ModuleOp, VectorType, i1, i64
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from pyop3_mlir.lowering.dialects.arith import VectorCmpfOp, VectorSelectOp
from pyop3_mlir.lowering.dialects.dense import SolveOp
from pyop3_mlir.lowering.emit import CONTRACT, Emitter, IndexLike, functions_of

__all__ = ["EliminatePass"]


@dataclass(frozen=True)
class EliminatePass(ModulePass):
    """Turn every ``dense.solve`` into loops over vectors, or over scalars where there are none.

    Needs it on memrefs. Elimination with partial pivoting (Golub and Van Loan, Matrix Computations,
    4th edition, algorithm 3.4.1), the right-hand sides along with the matrix, then substitution
    from the last row upwards. The lanes share their loops: each finds its own pivot, and a row is
    exchanged only where a lane's pivot is another one. Code does not grow with the size of the
    systems.
    """

    name = "eliminate"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite every function in place."""
        for function in functions_of(op):
            systems = [inner for inner in function.walk() if isinstance(inner, SolveOp)]
            entry = Emitter(InsertPoint.at_start(function.body.block))
            for system in systems:
                _lower(system, Emitter(InsertPoint.before(system), entry))
                system.detach()
                system.erase()


def _lower(op: SolveOp, e: Emitter) -> None:
    type_ = op.matrix.type
    assert isinstance(type_, MemRefType)
    shape = type_.get_shape()
    # there are no vectors of complex numbers
    one_by_one = op.has_cells and (shape[-1] == 1 or isinstance(type_.element_type, ComplexType))

    def batch(e: Emitter, indices: list[IndexLike]) -> None:
        if one_by_one:
            _nest(e, shape[-1:], lambda e, cell: _System(op, indices, cell).solve(e))
        else:
            _System(op, indices).solve(e)

    _nest(e, shape[: op.batch.value.data], batch)


def _nest(
    e: Emitter, extents: Sequence[int], body: Callable[[Emitter, list[IndexLike]], None]
) -> None:
    """Loops over all indices."""

    def level(e: Emitter, indices: list[IndexLike]) -> None:
        if len(indices) == len(extents):
            body(e, indices)
        elif extents[len(indices)] == 1:
            level(e, [*indices, 0])
        else:
            _loop(e, 0, extents[len(indices)], lambda e, i: level(e, [*indices, i]))

    level(e, [])


def _loop(
    e: Emitter, start: IndexLike, stop: IndexLike, body: Callable[[Emitter, SSAValue], None]
) -> None:
    def call(e: Emitter, i: SSAValue, _: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
        body(e, i)
        return ()

    e.for_loop(start, stop, 1, (), call)


class _System:
    """One system, or one for each lane of a vector.

    Parameters
    ----------
    op
        Where its matrix and right-hand sides are.
    batch
        Its number.
    cell
        The index of its cell; empty where each cell is a lane, or there are none.
    """

    def __init__(
        self, op: SolveOp, batch: Sequence[IndexLike], cell: Sequence[IndexLike] = ()
    ) -> None:
        self.batch = batch
        self.matrix, self.side = op.matrix, op.side
        self.columns = op.columns
        type_ = op.matrix.type
        assert isinstance(type_, MemRefType)
        self.size = type_.get_shape()[len(batch)]
        self.element = type_.element_type
        self.width = type_.get_shape()[-1] if op.has_cells and not cell else 0
        self.last = cell or ([0] if self.width else [])

    def solve(self, e: Emitter) -> None:
        """Leave the solution in the place of the right-hand sides."""
        n = self.size
        _loop(e, 0, n, self._eliminate)
        _loop(e, 0, n, lambda e, i: self._substitute(e, e.sub(n - 1, i)))

    def _eliminate(self, e: Emitter, k: SSAValue) -> None:
        """Clear column ``k`` below the diagonal."""
        below = e.add(k, 1)
        self._exchange(e, k, self._pivot(e, k, below))
        scale = self._reciprocal(e, self._load(e, self.matrix, k, k))

        def row(e: Emitter, r: SSAValue) -> None:
            multiple = self._multiply(e, self._load(e, self.matrix, r, k), scale)
            _loop(e, below, self.size, lambda e, c: self._reduce(e, self.matrix, r, k, multiple, c))
            _nest(e, self.columns, lambda e, c: self._reduce(e, self.side, r, k, multiple, *c))

        _loop(e, below, self.size, row)

    def _substitute(self, e: Emitter, k: IndexLike) -> None:
        """Solve for unknown ``k`` and clear what is above it."""
        scale = self._reciprocal(e, self._load(e, self.matrix, k, k))

        def solve(e: Emitter, column: list[IndexLike]) -> None:
            value = self._multiply(e, self._load(e, self.side, k, *column), scale)
            self._store(e, value, self.side, k, *column)

        def row(e: Emitter, r: SSAValue) -> None:
            multiple = self._load(e, self.matrix, r, k)
            _nest(e, self.columns, lambda e, c: self._reduce(e, self.side, r, k, multiple, *c))

        _nest(e, self.columns, solve)
        _loop(e, 0, k, row)

    def _reduce(
        self,
        e: Emitter,
        source: SSAValue,
        row: IndexLike,
        other: IndexLike,
        multiple: SSAValue,
        *column: IndexLike,
    ) -> None:
        """Subtract a multiple of another row's entry."""
        product = self._multiply(e, multiple, self._load(e, source, other, *column))
        new = self._subtract(e, self._load(e, source, row, *column), product)
        self._store(e, new, source, row, *column)

    def _pivot(self, e: Emitter, k: SSAValue, below: IndexLike) -> list[SSAValue]:
        """The row from ``k`` on whose entry in column ``k`` is the largest, of each lane."""

        def number(e: Emitter, row: SSAValue) -> SSAValue:
            """In a type of which there are vectors."""
            if not self.width:
                return row
            integer = e.insert(arith.IndexCastOp(row, i64))
            return self._spread(e, e.insert(arith.SIToFPOp(integer, self.element)))

        def compete(e: Emitter, row: SSAValue, best: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
            size = self._magnitude(e, self._load(e, self.matrix, row, k))
            larger = self._larger(e, size, best[0])
            others = size, number(e, row)
            return [self._choose(e, larger, a, b) for a, b in zip(others, best, strict=True)]

        first = self._magnitude(e, self._load(e, self.matrix, k, k))
        _, row = e.for_loop(below, self.size, 1, (first, number(e, k)), compete)
        if not self.width:
            return [row]
        lanes = [e.insert(vector.ExtractOp(row, [i], self.element)) for i in range(self.width)]
        return [e.to_index(e.insert(arith.FPToSIOp(lane, i64))) for lane in lanes]

    def _exchange(self, e: Emitter, k: SSAValue, rows: Sequence[SSAValue]) -> None:
        """Exchange row ``k`` of each lane with another one."""
        others = [e.insert(arith.CmpiOp(row, k, "ne")) for row in rows]
        any_other = others[0]
        for other in others[1:]:
            any_other = e.insert(arith.OrIOp(any_other, other))

        def exchange(e: Emitter, source: SSAValue, *column: IndexLike) -> None:
            for lane, row in enumerate(rows):
                last = [lane] if self.width else self.last
                places = [[*self.batch, r, *column, *last] for r in (k, row)]
                at = [[e.index(i) for i in place] for place in places]
                values = [e.insert(memref.LoadOp.get(source, place)) for place in at]
                for place, value in zip(at, reversed(values), strict=True):
                    e.insert(memref.StoreOp.get(value, source, place))

        def then(e: Emitter) -> Sequence[SSAValue]:
            _loop(e, k, self.size, lambda e, c: exchange(e, self.matrix, c))
            _nest(e, self.columns, lambda e, c: exchange(e, self.side, *c))
            return ()

        e.if_else(any_other, [], then)

    # values

    @property
    def _is_complex(self) -> bool:
        return isinstance(self.element, ComplexType)

    def _at(self, e: Emitter, *indices: IndexLike) -> list[SSAValue]:
        return [e.index(i) for i in (*self.batch, *indices, *self.last)]

    def _load(self, e: Emitter, source: SSAValue, *indices: IndexLike) -> SSAValue:
        at = self._at(e, *indices)
        if self.width:
            return e.insert(vector.LoadOp(source, at, VectorType(self.element, [self.width])))
        return e.insert(memref.LoadOp.get(source, at))

    def _store(self, e: Emitter, value: SSAValue, target: SSAValue, *indices: IndexLike) -> None:
        at = self._at(e, *indices)
        e.insert(
            vector.StoreOp(value, target, at)
            if self.width
            else memref.StoreOp.get(value, target, at)
        )

    def _spread(self, e: Emitter, value: SSAValue) -> SSAValue:
        return e.insert(vector.BroadcastOp(value, VectorType(value.type, [self.width])))

    def _magnitude(self, e: Emitter, value: SSAValue) -> SSAValue:
        """The modulus, or LAPACK's cheaper measure for complex numbers."""
        if not self._is_complex:
            return e.insert(math.AbsFOp(value))
        parts = [e.insert(part(value)) for part in (complex.ReOp, complex.ImOp)]
        real, imaginary = (e.insert(math.AbsFOp(part)) for part in parts)
        return e.insert(arith.AddfOp(real, imaginary, CONTRACT))

    def _larger(self, e: Emitter, a: SSAValue, b: SSAValue) -> SSAValue:
        compare = arith.CmpfOp(a, b, "ogt")
        if not self.width:
            return e.insert(compare)
        types = [VectorType(i1, [self.width])]
        return e.insert(
            VectorCmpfOp.create(operands=[a, b], result_types=types, properties=compare.properties)
        )

    def _choose(self, e: Emitter, condition: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        kind = VectorSelectOp if self.width else arith.SelectOp
        return e.insert(kind.create(operands=[condition, a, b], result_types=[a.type]))

    def _subtract(self, e: Emitter, a: SSAValue, b: SSAValue) -> SSAValue:
        return self._arithmetic(e, arith.SubfOp, complex.SubOp, a, b)

    def _multiply(self, e: Emitter, a: SSAValue, b: SSAValue) -> SSAValue:
        return self._arithmetic(e, arith.MulfOp, complex.MulOp, a, b)

    def _reciprocal(self, e: Emitter, value: SSAValue) -> SSAValue:
        one = e.constant(np.complex128(1) if self._is_complex else 1.0, self.element)
        if self.width:
            one = self._spread(e, one)
        return self._arithmetic(e, arith.DivfOp, complex.DivOp, one, value)

    def _arithmetic(
        self, e: Emitter, real: Callable[..., Operation], other: Any, a: SSAValue, b: SSAValue
    ) -> SSAValue:
        if self._is_complex:
            return e.insert(other(a, b))
        return e.insert(real(a, b, CONTRACT))

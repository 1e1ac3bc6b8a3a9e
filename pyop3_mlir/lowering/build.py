"""The first stage: a loop as one function of upstream MLIR operations.

The function, of linalg, tensor, arith, math and scf, has the operands of :func:`operand_types` and
works on all cells at once: every value is a tensor with the cell as its last dimension, a
:class:`~pyop3_mlir.kernels.program.Compute` is one ``linalg.generic`` over ``[dims..., cell]`` (a
body ``solve`` is one ``dense.solve``), a gather is one whose body extracts from a buffer at an
index read from a table, and the scatter is a sequential loop over the cells. The passes in
``lowering/passes`` turn it into what runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from xdsl.dialects import arith, complex, func, tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AffineMapAttr,
    ComplexType,
    Float32Type,
    Float64Type,
    IndexType,
    ModuleOp,
    TensorType,
    i32,
    i64,
)
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.dialects.linalg.ops import IndexOp as LinalgIndexOp
from xdsl.dialects.linalg.ops import YieldOp as LinalgYieldOp
from xdsl.ir import Attribute, Block, Region, SSAValue
from xdsl.ir.affine import AffineExpr, AffineMap

from pyop3_mlir.errors import UnsupportedLoopError
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
    System,
    Table,
    Temporary,
    is_system,
    postorder,
)
from pyop3_mlir.lowering.dialects.arith import IndexCastUIOp
from pyop3_mlir.lowering.dialects.dense import SolveOp
from pyop3_mlir.lowering.dialects.linalg import FillOp
from pyop3_mlir.lowering.emit import (
    CONTRACT,
    Emitter,
    IndexLike,
    declare_functions,
    element_type,
    emit_bodies,
    load_cast,
    local_type,
    storage_type,
    store_cast,
)
from pyop3_mlir.lowering.interface import reduction_name, segmented_arguments
from pyop3_mlir.parloop import INC, MAX, MIN, WRITE, Access, ArgumentSpec, Kind, LoopSpec

__all__ = [
    "build_module",
    "operand_types",
    "written_buffers",
]


def operand_types(spec: LoopSpec, segmented: bool = False) -> list[Attribute]:
    """Types of the operands of ``@loop``.

    ``start`` and ``stop`` (``i64``), the entity list if there is one, the tables by operand number,
    the offsets of those that are compact, the buffers by operand number, and with the segmented
    strategy the contributions of each of :func:`segmented_arguments`; every array is flattened to
    one dimension of dynamic size.
    """
    types: list[Attribute] = [i64, i64]
    if spec.entities is not None:
        types.append(_flat(np.dtype(spec.entities)))
    tables = {a.table: a.index_dtype for a in spec.arguments if a.table is not None}
    types += [_flat(np.dtype(tables[number])) for number in sorted(tables)]
    types += [_flat(np.dtype(kind)) for _, kind in _offsets(spec)]
    buffers = {a.buffer: a.dtype for a in spec.arguments}
    types += [_flat(np.dtype(buffers[number])) for number in sorted(buffers)]
    if segmented:
        types += [_flat(np.dtype(spec.arguments[k].dtype)) for k in segmented_arguments(spec)]
    return types


def _offsets(spec: LoopSpec) -> list[tuple[int, str]]:
    """Operand numbers of the tables that are compact, and the dtypes of their offsets."""
    found = {
        a.table: a.offset_dtype
        for a in spec.arguments
        if a.table is not None and a.offset_dtype is not None
    }
    return sorted(found.items())


def written_buffers(kernel: LocalKernel, spec: LoopSpec, segmented: bool = False) -> list[int]:
    """Operand numbers of the buffers that ``@loop`` changes, ascending: its first results.

    With the segmented strategy the contributions follow.
    """
    stored = set(segmented_arguments(spec)) if segmented else set()
    of = {formal: number for number, formal in enumerate(kernel.arguments)}
    numbers = {of[output.argument] for output in kernel.outputs if output.argument.size}
    return sorted({spec.arguments[number].buffer for number in numbers - stored})


def _flat(dtype: np.dtype[Any]) -> TensorType[Any]:
    return TensorType(storage_type(dtype), [DYNAMIC_INDEX])


def build_module(kernel: LocalKernel, spec: LoopSpec, segmented: bool = False) -> ModuleOp:
    """The tensor stage of a loop.

    Parameters
    ----------
    kernel
        The local kernel; it is validated here.
    spec
        How its arguments are gathered and scattered.
    segmented
        Store the contributions of shared targets cell by cell, and sum each target's own list in a
        second function, instead of updating the targets cell by cell.

    Returns
    -------
    ModuleOp
        A module with the function ``@loop`` and, for the segmented strategy, a function
        ``@reduce_k(first target, last target, offsets, numbers, contributions, buffer)`` for each
        argument k of :func:`segmented_arguments`.

    Raises
    ------
    UnsupportedLoopError
        Where an operation or type of the kernel has no counterpart.
    """
    kernel.validate()
    module = _Builder(kernel, spec, segmented).build()
    if segmented:
        for number in segmented_arguments(spec):
            module.body.block.add_op(_reduction(number, spec.arguments[number]))
    declare_functions(module)
    return module


def _completed(kernel: LocalKernel, spec: LoopSpec) -> LocalKernel:
    """The kernel with an output for what it leaves alone, which is stored as it was packed."""
    changed = {output.argument for output in kernel.outputs}
    statements, outputs = list(kernel.statements), list(kernel.outputs)
    for formal, actual in zip(kernel.arguments, spec.arguments, strict=True):
        if formal in changed or not actual.access.writes or actual.access is INC:
            continue
        dims = tuple(Dim(f"i{axis}", extent) for axis, extent in enumerate(formal.shape))
        value = Temporary(f"{formal.name}_packed", formal.shape, formal.dtype)
        slot: Expr = Scalar(0)
        for dim in dims:
            slot = Op("add", Op("mul", slot, Scalar(dim.extent)), IndexOf(dim))
        entry = Load(formal, [IndexOf(dim) for dim in dims])
        statements.append(Compute((value,), dims, (), (entry,)))
        outputs.append(Output(formal, dims, slot, value))
    return replace(kernel, statements=tuple(statements), outputs=tuple(outputs))


def _reduced(kernel: LocalKernel) -> LocalKernel:
    """The kernel without sums over dimensions that the summand does not depend on.

    They are products. (Besides, IREE 3.13 takes a sum of constants for one constant.)
    """
    statements = [part for statement in kernel.statements for part in _reduced_parts(statement)]
    return replace(kernel, statements=tuple(statements))


def _reduced_parts(statement: Compute) -> list[Compute]:
    if not statement.reductions:
        return [statement]
    used: dict[Expr, frozenset[Dim]] = {}
    for node in postorder(statement.bodies):
        own: Sequence[Dim] = (node.dim,) if isinstance(node, IndexOf) else ()
        if is_system(node):
            own = statement.reductions
        used[node] = frozenset(own).union(*(used[child] for child in node.children))
    parts: dict[tuple[Dim, ...], list[tuple[Temporary, Expr]]] = {}
    for result, body in zip(statement.results, statement.bodies, strict=True):
        over = tuple(dim for dim in statement.reductions if dim in used[body])
        times = math.prod(dim.extent for dim in statement.reductions if dim not in over)
        if times != 1:
            factor = Scalar(body.dtype.type(times), body.dtype)
            body = Op("mul", body, factor) if times else factor
        parts.setdefault(over, []).append((result, body))
    return [
        Compute(tuple(r for r, _ in part), statement.dims, over, tuple(b for _, b in part))
        for over, part in parts.items()
    ]


class _Builder:
    """State of building one function."""

    def __init__(self, kernel: LocalKernel, spec: LoopSpec, segmented: bool) -> None:
        self.kernel = kernel = _reduced(_completed(kernel, spec))
        self.spec = spec
        self.of = dict(zip(kernel.arguments, spec.arguments, strict=True))
        self.segmented = [kernel.arguments[k] for k in segmented_arguments(spec) if segmented]
        types = operand_types(spec, segmented)
        self.block = Block(arg_types=types)
        self.e = Emitter(self.block)
        args = list(self.block.args)
        self.start_arg, self.stop_arg = args[:2]
        position = 2
        self.entities: SSAValue | None = None
        if spec.entities is not None:
            self.entities = args[position]
            position += 1
        ntables = len({a.table for a in spec.arguments if a.table is not None})
        self.tables = args[position : position + ntables]
        position += ntables
        compact = [number for number, _ in _offsets(spec)]
        self.offsets = dict(zip(compact, args[position:], strict=False))
        position += len(compact)
        nbuffers = len({a.buffer for a in spec.arguments})
        self.buffers = args[position : position + nbuffers]
        self.contributions = args[position + nbuffers :]
        self.values: dict[Source, SSAValue] = {}
        self.varying: dict[Source, bool] = {}
        self.scalars: dict[Source, Scalar] = {}

    def build(self) -> ModuleOp:
        e = self.e
        self.start = e.to_index(self.start_arg)
        self.stop = e.to_index(self.stop_arg)
        self.count = e.insert(arith.SubiOp(self.stop, self.start))
        self._cells()
        used = {
            node.source
            for statement in self.kernel.statements
            for node in postorder(statement.bodies)
            if isinstance(node, Load)
        }
        for argument in self.kernel.arguments:
            if argument in used:
                self._gather(argument)
        for statement in self.kernel.statements:
            self._compute(statement)
        results = self._scatter()
        e.insert(func.ReturnOp(*results))
        function = func.FuncOp(
            "loop",
            ([a.type for a in self.block.args], [r.type for r in results]),
            Region(self.block),
        )
        return ModuleOp([function])

    # values

    def _type(self, shape: Sequence[int], element: Attribute, varying: bool) -> TensorType[Any]:
        return TensorType(element, [*shape, DYNAMIC_INDEX] if varying else list(shape))

    def _empty(self, shape: Sequence[int], element: Attribute, varying: bool) -> SSAValue:
        return self.e.insert(
            tensor.EmptyOp([self.count] if varying else [], self._type(shape, element, varying))
        )

    def _generic(
        self,
        extents: int,
        reductions: int,
        varying: bool,
        inputs: Sequence[tuple[SSAValue, AffineMap]],
        outputs: Sequence[SSAValue],
        body: Block,
    ) -> tuple[SSAValue, ...]:
        """A linalg.generic over ``[extents dims, reductions dims, cell]``."""
        rank = extents + reductions + varying
        parallel, reduction = IteratorTypeAttr.parallel(), IteratorTypeAttr.reduction()
        kinds = [parallel] * extents + [reduction] * reductions + [parallel] * varying
        keep = [AffineExpr.dimension(d) for d in range(extents)]
        if varying:
            keep.append(AffineExpr.dimension(rank - 1))
        maps = [m for _, m in inputs] + [AffineMap(rank, 0, tuple(keep))] * len(outputs)
        op = GenericOp(
            [v for v, _ in inputs],
            outputs,
            Region(body),
            [AffineMapAttr(m) for m in maps],
            kinds,
            [v.type for v in outputs],
        )
        self.e.insert(op)
        return tuple(op.results)

    def _cells(self) -> None:
        """The entity that each iteration visits, where that is not the iteration itself."""
        self.cells: SSAValue | None = None
        if self.entities is None:
            return
        body = Block(arg_types=[i64])
        e = Emitter(body)
        iteration = e.index(e.add(e.insert(LinalgIndexOp(0)), self.start))
        stored = self.entities.type.element_type  # type: ignore[attr-defined]
        value = e.insert(tensor.ExtractOp(self.entities, [iteration], stored))
        e.insert(LinalgYieldOp(e.insert(arith.IndexCastOp(e.to_index(value), i64))))
        out = self._empty((), i64, True)
        (self.cells,) = self._generic(0, 0, True, [], [out], body)

    def _row(
        self,
        e: Emitter,
        spec: ArgumentSpec,
        cell: IndexLike,
        position: IndexLike,
        base: SSAValue | None,
    ) -> tuple[IndexLike, SSAValue | None]:
        """The row of the buffer that the pack's row ``position`` of an entity is.

        And whether there is one, where an entry of the table may be negative.
        """
        if spec.kind is Kind.GLOBAL:
            return 0, None
        if spec.kind is Kind.DIRECT:
            return cell, None
        assert spec.table is not None
        inside: SSAValue | None = None
        at = e.add(e.mul(cell, spec.arity), position)
        if base is None:
            row = e.to_index(_entry(e, self.tables[spec.table], at))
            if spec.negative:
                inside = e.insert(arith.CmpiOp(row, e.index(0), "sge"))
            return row, inside
        offset = _entry(e, self.offsets[spec.table], at)
        if spec.negative:
            inside = e.insert(arith.CmpiOp(offset, e.constant(-1, offset.type), "ne"))
        return e.add(base, e.insert(IndexCastUIOp(offset, IndexType()))), inside

    def _base(
        self, e: Emitter, spec: ArgumentSpec, cell: IndexLike, group: IndexLike
    ) -> SSAValue | None:
        """The row that a group of a compact table counts from; None for other tables."""
        if spec.offset_dtype is None:
            return None
        assert spec.table is not None
        at = e.add(e.mul(cell, spec.arity // spec.group), group)
        return e.to_index(_entry(e, self.tables[spec.table], at))

    def _gather(self, argument: KernelArgument) -> None:
        """The pack of each entity, with the shape that the kernel gives it."""
        spec = self.of[argument]
        varying = spec.kind is not Kind.GLOBAL
        element = local_type(argument.dtype)
        if not argument.size:
            self.values[argument] = self._empty(argument.shape, element, varying)
            self.varying[argument] = varying
            return
        if not spec.access.gathers:
            self.scalars[argument] = Scalar(0, argument.dtype)
            return
        rank = len(argument.shape)
        listed = varying and self.cells is not None
        body = Block(arg_types=[i64, element] if listed else [element])
        e = Emitter(body)
        position = e.linear([e.insert(LinalgIndexOp(d)) for d in range(rank)], argument.shape)
        row, component = e.floordiv(position, spec.components), e.rem(position, spec.components)
        cell: IndexLike = 0
        if listed:
            cell = e.to_index(body.args[0])
        elif varying:
            cell = e.add(e.insert(LinalgIndexOp(rank)), self.start)
        base = self._base(e, spec, cell, e.floordiv(row, spec.group))
        row, inside = self._row(e, spec, cell, row, base)
        buffer = self.buffers[spec.buffer]
        stored = buffer.type.element_type  # type: ignore[attr-defined]
        if inside is not None:
            row = e.insert(arith.SelectOp(inside, e.index(row), e.index(0)))
        at = e.add(e.mul(row, spec.stride), e.add(component, spec.offset))
        value = e.insert(tensor.ExtractOp(buffer, [e.index(at)], stored))
        if inside is not None:
            zero = e.constant(np.zeros((), argument.dtype)[()], stored)
            value = e.insert(arith.SelectOp(inside, value, zero))
        e.insert(LinalgYieldOp(value))
        out = self._empty(argument.shape, element, varying)
        inputs = []
        if listed:
            assert self.cells is not None
            cells = AffineMap(rank + 1, 0, (AffineExpr.dimension(rank),))
            inputs.append((self.cells, cells))
        (self.values[argument],) = self._generic(rank, 0, varying, inputs, [out], body)
        self.varying[argument] = varying

    def _source(self, source: Source) -> SSAValue:
        """The tensor that holds a source; tables become constants where they are first used."""
        if source not in self.values:
            assert isinstance(source, Table), source.name
            self.values[source] = self.e.dense(source.values)
            self.varying[source] = False
        return self.values[source]

    def _compute(self, statement: Compute) -> None:
        """One linalg.generic with a result for each body that is not a constant or a system."""
        if not statement.reductions:
            statement = self._constants(statement)
        systems, statement = statement.separated()
        for result, system in systems.items():
            self._solve(statement.dims, system, result)
        if statement.results:
            loads = self._loads(statement.bodies)
            self._emit(statement, loads, any(self.varying[load.source] for load in loads))

    def _loads(self, bodies: Sequence[Expr]) -> list[Load]:
        """What bodies load that is no constant; its tensors exist from now on."""
        loads = [
            node
            for node in postorder(bodies)
            if isinstance(node, Load) and node.source not in self.scalars
        ]
        for load in loads:
            self._source(load.source)
        return loads

    def _solve(self, dims: tuple[Dim, ...], system: System, result: Temporary) -> None:
        """One dense.solve, on copies that it may use up."""
        loads = self._loads([system.matrix, system.side])
        varying = any(self.varying[load.source] for load in loads)

        def copy(name: str, own: tuple[Dim, ...], body: Expr) -> SSAValue:
            copied = Temporary(name, tuple(dim.extent for dim in own), result.dtype)
            self._emit(Compute((copied,), own, (), (body,)), self._loads([body]), varying)
            return self.values[copied]

        matrix = copy("a", (*system.batch, system.equation, system.unknown), system.matrix)
        side = copy("b", (*system.batch, system.equation, *system.columns), system.side)
        found = (*system.batch, system.unknown, *system.columns)
        value = self.e.insert(SolveOp(matrix, side, len(system.batch), side.type))
        solution = result
        if found != dims:
            solution = Temporary("x", tuple(dim.extent for dim in found), result.dtype)
        self.values[solution], self.varying[solution] = value, varying
        if solution is not result:
            entry = Load(solution, [IndexOf(dim) for dim in found])
            self._compute(Compute((result,), dims, (), (entry,)))

    def _emit(self, statement: Compute, loads: Sequence[Load], varying: bool) -> None:
        """One linalg.generic; ``varying`` is whether its results have a cell."""
        dims = statement.dims + statement.reductions
        number = {dim: d for d, dim in enumerate(dims)}
        rank = len(dims) + varying
        operands: dict[Load, tuple[SSAValue, AffineMap]] = {}
        for load in loads:
            affine = _operand_map(load, number, rank, self.varying[load.source])
            if affine is not None:
                operands[load] = (self.values[load.source], affine)
        inputs = list(operands.values())
        counted: Sequence[Dim] = ()
        if statement.reductions and not loads:
            # IREE 3.13 cannot vectorise a sum, left to it, that reads nothing but its own indices
            counted = statement.reductions
            inputs += [self._count(dim, number, rank) for dim in counted]
        inputs += self._extents(dims[len(statement.dims) :], number, rank, inputs)
        elements = [local_type(result.dtype) for result in statement.results]
        body = Block(
            arg_types=[v.type.element_type for v, _ in inputs] + elements  # type: ignore[attr-defined]
        )
        e = Emitter(body)
        given: dict[Expr, SSAValue] = {}
        for load, argument in zip(operands, body.args, strict=False):
            given[load] = _loaded(e, load.source, argument)
        for dim, argument in zip(counted, body.args, strict=False):
            given[IndexOf(dim)] = e.to_index(argument)

        def leaf(node: Expr, values: Mapping[Expr, SSAValue]) -> SSAValue | None:
            if isinstance(node, IndexOf):
                return e.insert(LinalgIndexOp(number[node.dim]))
            if not isinstance(node, Load):
                return None
            if node.source in self.scalars:
                return e.constant(self.scalars[node.source].value, element_type(node.dtype))
            source = self.values[node.source]
            indices = [values[child] for child in node.children]
            if self.varying[node.source]:
                indices.append(e.insert(LinalgIndexOp(rank - 1)))
            value = e.insert(tensor.ExtractOp(source, indices, storage_of(node.source)))
            return _loaded(e, node.source, value)

        values = emit_bodies(e, statement.bodies, leaf, given)
        if statement.reductions:
            carried = [
                _loaded(e, result, argument)
                for result, argument in zip(
                    statement.results, body.args[len(inputs) :], strict=True
                )
            ]
            values = [_sum(e, c, v) for c, v in zip(carried, values, strict=True)]
        e.insert(
            LinalgYieldOp(
                *(_local(e, r, value) for r, value in zip(statement.results, values, strict=True))
            )
        )
        outputs = []
        for result, element in zip(statement.results, elements, strict=True):
            out = self._empty(result.shape, element, varying)
            if statement.reductions:
                zero = self.e.constant(np.zeros((), result.dtype)[()], element)
                out = self.e.insert(FillOp(zero, out, [out.type]))
            outputs.append(out)
        results = self._generic(
            len(statement.dims),
            len(statement.reductions),
            varying,
            inputs,
            outputs,
            body,
        )
        for temporary, value in zip(statement.results, results, strict=True):
            self.values[temporary] = value
            self.varying[temporary] = varying

    def _constants(self, statement: Compute) -> Compute:
        """Note which results are constants; what is left of the statement."""
        left = []
        for result, body in zip(statement.results, statement.bodies, strict=True):
            if isinstance(body, Load) and body.source in self.scalars:
                body = self.scalars[body.source]
            if isinstance(body, Scalar):
                self.scalars[result] = body
            else:
                left.append((result, body))
        results, bodies = tuple(r for r, _ in left), tuple(b for _, b in left)
        return replace(statement, results=results, bodies=bodies)

    def _count(self, dim: Dim, number: Mapping[Dim, int], rank: int) -> tuple[SSAValue, AffineMap]:
        """An operand that holds the index of a dimension."""
        values = self.e.dense(np.arange(dim.extent, dtype=np.int64))
        return values, AffineMap(rank, 0, (AffineExpr.dimension(number[dim]),))

    def _extents(
        self,
        reductions: Sequence[Dim],
        number: Mapping[Dim, int],
        rank: int,
        inputs: Sequence[tuple[SSAValue, AffineMap]],
    ) -> list[tuple[SSAValue, AffineMap]]:
        """Operands that carry nothing but the extent of a reduction that no other operand has."""
        known = {result for _, m in inputs for result in m.results}
        extra = []
        for dim in reductions:
            d = AffineExpr.dimension(number[dim])
            if d not in known:
                shape = self._empty((dim.extent,), element_type(np.dtype(float)), False)
                extra.append((shape, AffineMap(rank, 0, (d,))))
        return extra

    # scatter

    def _scatter(self) -> list[SSAValue]:
        """The sequential loop over cells that updates the buffers, in the order of iteration."""
        stored = {argument: number for number, argument in enumerate(self.segmented)}
        outputs = [output for output in self.kernel.outputs if output.argument.size]
        numbers = written_buffers(self.kernel, self.spec, bool(stored))
        carried = [self.buffers[number] for number in numbers] + list(self.contributions)
        pieces = [output.argument for output in outputs]

        def body(e: Emitter, k: SSAValue, args: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
            state: dict[SSAValue, SSAValue] = dict(zip(carried, args, strict=True))
            iteration = e.add(k, self.start)
            cell = iteration
            if self.cells is not None:
                cell = e.to_index(e.insert(tensor.ExtractOp(self.cells, [k], i64)))
            for argument, number in stored.items():
                if pieces.count(argument) != 1 or not _covers(outputs, argument):
                    slots = argument.size
                    old = self.contributions[number]
                    state[old] = self._clear(e, state[old], iteration, slots)
            for output in outputs:
                spec = self.of[output.argument]
                target = self.buffers[spec.buffer]
                row: IndexLike = cell
                if output.argument in stored:
                    target = self.contributions[stored[output.argument]]
                    row = iteration
                    whole = pieces.count(output.argument) == 1 and _covers(outputs, output.argument)
                    spec = _contribution_spec(spec, whole)
                state[target] = self._piece(e, output, spec, k, row, state[target])
            return [state[value] for value in carried]

        if not carried:
            return []
        return list(self.e.for_loop(0, self.count, 1, carried, body))

    def _clear(self, e: Emitter, buffer: SSAValue, row: IndexLike, slots: int) -> SSAValue:
        """Zero the contributions of one iteration."""
        element = buffer.type.element_type  # type: ignore[attr-defined]
        zero = e.constant(
            np.zeros((), np.complex128)[()] if isinstance(element, ComplexType) else 0, element
        )

        def body(e: Emitter, i: SSAValue, args: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
            at = e.index(e.add(e.mul(row, slots), i))
            return [e.insert(tensor.InsertOp(zero, args[0], [at]))]

        return e.for_loop(0, slots, 1, [buffer], body)[0]

    def _piece(
        self,
        e: Emitter,
        output: Output,
        spec: ArgumentSpec,
        k: SSAValue,
        cell: IndexLike,
        buffer: SSAValue,
    ) -> SSAValue:
        """Scatter one output piece of one cell."""
        value = self.values.get(output.value)
        layout = _Layout(output, spec)

        def nest(
            e: Emitter,
            level: int,
            indices: list[IndexLike],
            base: SSAValue | None,
            row: IndexLike | None,
            inside: SSAValue | None,
            y: SSAValue,
        ) -> SSAValue:
            if level == layout.group_level:
                base = self._base(e, spec, cell, layout.group(e, indices))
            if level == layout.row_level:
                row, inside = self._row(e, spec, cell, layout.row(e, indices), base)
            if level == len(layout.extents):
                assert row is not None
                at = e.add(
                    e.mul(row, spec.stride), e.add(layout.component(e, indices), spec.offset)
                )
                if value is None:
                    scalar = self.scalars[output.value]
                    new = e.constant(scalar.value, element_type(scalar.dtype))
                else:
                    where = [e.index(i) for i in layout.value_indices(e, indices)]
                    if self.varying[output.value]:
                        where.append(k)
                    new = e.insert(tensor.ExtractOp(value, where, storage_of(output.value)))
                    new = _loaded(e, output.value, new)

                def store(inner: Emitter) -> SSAValue:
                    return _combine(inner, spec, output.argument.dtype, y, inner.index(at), new)

                if inside is None:
                    return store(e)
                (result,) = e.if_else(inside, [y.type], lambda inner: [store(inner)], lambda _: [y])
                return result
            if layout.extents[level] == 1:
                return nest(e, level + 1, [*indices, 0], base, row, inside, y)

            def loop(inner: Emitter, i: SSAValue, args: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
                return [nest(inner, level + 1, [*indices, i], base, row, inside, args[0])]

            return e.for_loop(0, layout.extents[level], 1, [y], loop)[0]

        return nest(e, 0, [], None, None, None, buffer)


def _entry(e: Emitter, table: SSAValue, at: IndexLike) -> SSAValue:
    """An entry of a flat table."""
    element = table.type.element_type  # type: ignore[attr-defined]
    return e.insert(tensor.ExtractOp(table, [e.index(at)], element))


def _covers(outputs: Sequence[Output], argument: KernelArgument) -> bool:
    """Whether the only piece of an argument covers each slot exactly once."""
    piece = next(output for output in outputs if output.argument is argument)
    slots = np.sort(_evaluate(piece.slot, piece.dims), axis=None)
    return np.array_equal(slots, np.arange(argument.size))


def _contribution_spec(spec: ArgumentSpec, whole: bool) -> ArgumentSpec:
    """Where an iteration's contributions go: a row of their own, in the order of the pack."""
    slots = spec.arity * spec.components
    return replace(
        spec,
        kind=Kind.DIRECT,
        access=WRITE if whole else INC,
        arity=1,
        components=slots,
        stride=slots,
        offset=0,
        negative=False,
        table=None,
        group=1,
        offset_dtype=None,
    )


def _reduction(number: int, spec: ArgumentSpec) -> func.FuncOp:
    """Each target unpacks its own list of contributions, in the order of iteration."""
    dtype = np.dtype(spec.dtype)
    index, values = _flat(np.dtype(np.int32)), _flat(dtype)
    block = Block(arg_types=[i64, i64, index, index, values, values])
    e = Emitter(block)
    start, stop = (e.to_index(value) for value in block.args[:2])
    offsets, numbers, contributions, buffer = block.args[2:]
    element = values.element_type

    def target(e: Emitter, t: SSAValue, args: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
        first = e.to_index(e.insert(tensor.ExtractOp(offsets, [t], i32)))
        last = e.to_index(e.insert(tensor.ExtractOp(offsets, [e.index(e.add(t, 1))], i32)))

        def component(e: Emitter, c: SSAValue, args: tuple[SSAValue, ...]) -> Sequence[SSAValue]:
            at = e.index(e.add(e.mul(t, spec.stride), e.add(c, spec.offset)))
            old = load_cast(e, e.insert(tensor.ExtractOp(args[0], [at], element)), dtype)

            def contribution(
                e: Emitter, j: SSAValue, state: tuple[SSAValue, ...]
            ) -> Sequence[SSAValue]:
                which = e.to_index(e.insert(tensor.ExtractOp(numbers, [j], i32)))
                place = e.index(e.add(e.mul(which, spec.components), c))
                new = load_cast(
                    e, e.insert(tensor.ExtractOp(contributions, [place], element)), dtype
                )
                return [combine_values(e, spec.access, dtype, state[0], new)]

            (total,) = e.for_loop(first, last, 1, [old], contribution)
            return [e.insert(tensor.InsertOp(store_cast(e, total, dtype), args[0], [at]))]

        return e.for_loop(0, spec.components, 1, args, component)

    results = e.for_loop(start, stop, 1, [buffer], target)
    e.insert(func.ReturnOp(*results))
    return func.FuncOp(
        reduction_name(number), ([a.type for a in block.args], [values]), Region(block)
    )


def storage_of(source: Source) -> Attribute:
    """The element type of the tensor that holds a source."""
    if isinstance(source, Table):
        return storage_type(source.dtype)
    return local_type(source.dtype)


def _loaded(e: Emitter, source: Source, value: SSAValue) -> SSAValue:
    """An entry of a source, which is of type :func:`storage_of`, as bodies work on it."""
    if source.dtype.kind == "b" and not isinstance(source, Table):
        return value
    return load_cast(e, value, source.dtype)


def _local(e: Emitter, source: Source, value: SSAValue) -> SSAValue:
    """The reverse of :func:`_loaded` for temporaries."""
    return value if source.dtype.kind == "b" else store_cast(e, value, source.dtype)


def _sum(e: Emitter, carried: SSAValue, value: SSAValue) -> SSAValue:
    if isinstance(carried.type, ComplexType):
        return e.insert(complex.AddOp(carried, value))
    if isinstance(carried.type, Float32Type | Float64Type):
        return e.insert(arith.AddfOp(carried, value, CONTRACT))
    return e.insert(arith.AddiOp(carried, value))


def _combine(
    e: Emitter,
    spec: ArgumentSpec,
    dtype: np.dtype[Any],
    buffer: SSAValue,
    at: SSAValue,
    new: SSAValue,
) -> SSAValue:
    """The buffer after the pack's value has been unpacked with the argument's access mode."""
    element = buffer.type.element_type  # type: ignore[attr-defined]
    if spec.access in (INC, MIN, MAX):
        old = load_cast(e, e.insert(tensor.ExtractOp(buffer, [at], element)), dtype)
        new = combine_values(e, spec.access, dtype, old, new)
    return e.insert(tensor.InsertOp(store_cast(e, new, dtype), buffer, [at]))


def combine_values(
    e: Emitter, access: Access, dtype: np.dtype[Any], old: SSAValue, new: SSAValue
) -> SSAValue:
    """``old + new``, the smaller or the larger of both, or ``new``."""
    if access is INC:
        return _sum(e, old, new)
    if access not in (MIN, MAX):
        return new
    smaller = access is MIN
    if dtype.kind == "f":
        return e.insert((arith.MinnumfOp if smaller else arith.MaxnumfOp)(old, new))
    if dtype.kind == "u":
        return e.insert((arith.MinUIOp if smaller else arith.MaxUIOp)(old, new))
    if dtype.kind == "i":
        return e.insert((arith.MinSIOp if smaller else arith.MaxSIOp)(old, new))
    raise UnsupportedLoopError(f"access {access.name} of {dtype}: complex numbers have no order")


def _operand_map(
    load: Load, number: Mapping[Dim, int], rank: int, varying: bool
) -> AffineMap | None:
    """The indexing map of a load whose indices are dimensions and constants, else None.

    A dimension that runs over a part of an axis only is none of linalg's: there the extents of the
    operands are those of the loops.
    """
    results: list[AffineExpr] = []
    for index, extent in zip(load.children, load.source.shape, strict=True):
        if isinstance(index, IndexOf):
            if index.dim.extent != extent:
                return None
            results.append(AffineExpr.dimension(number[index.dim]))
        elif isinstance(index, Scalar):
            results.append(AffineExpr.constant(int(index.value)))
        else:
            return None
    if varying:
        results.append(AffineExpr.dimension(rank - 1))
    return AffineMap(rank, 0, tuple(results))


class _Layout:
    """How the loops over one output piece run, and what row and component each iteration touches.

    Dimensions that choose the row come first, so that an entry of the table is read once for all
    components of its row, and the base of a group once for those in it.
    """

    def __init__(self, output: Output, spec: ArgumentSpec) -> None:
        extents = [dim.extent for dim in output.dims]
        slots = _evaluate(output.slot, output.dims)
        rows, components = slots // spec.components, slots % spec.components
        self.output = output
        self._group = spec.group
        if len(extents) == 1 and spec.components > 1:
            flat = np.array_equal(slots, np.arange(extents[0]))
            if flat and extents[0] % spec.components == 0:
                # one flat dimension over all slots: loop over rows, then over components
                self.extents = [extents[0] // spec.components, spec.components]
                self._order: list[int] | None = None
                self.row_level = self.group_level = 1
                self._groups = None
                self._components = spec.components
                return
        row, component = _affine(rows, extents), _affine(components, extents)
        first = [d for d in range(len(extents)) if row is None or row[1][d] or component is None]
        rest = [d for d in range(len(extents)) if d not in first]
        self._order = first + rest
        self.extents = [extents[d] for d in self._order]
        self.row_level = len(first)
        self._row, self._component = row, component
        self._components = spec.components
        self._groups = None if row is None or component is None else self._divided(row)
        self.group_level = self.row_level
        if self._groups is not None:
            chosen = [level for level, d in enumerate(self._order) if self._groups[1][d]]
            self.group_level = max(chosen, default=-1) + 1

    def _divided(self, row: tuple[int, list[int]]) -> tuple[int, list[int]] | None:
        """The row's group as a linear form as well, where it is one."""
        constant, coefficients = row
        inner = [c % self._group for c in coefficients]
        reach = sum(c * (d.extent - 1) for c, d in zip(inner, self.output.dims, strict=True))
        if constant % self._group + reach >= self._group:
            return None
        return constant // self._group, [c // self._group for c in coefficients]

    def _slot(self, e: Emitter, indices: Sequence[IndexLike]) -> IndexLike:
        values = dict(zip(self.output.dims, self.value_indices(e, indices), strict=True))

        def leaf(node: Expr, found: Mapping[Expr, SSAValue]) -> SSAValue | None:
            if isinstance(node, IndexOf):
                return e.index(values[node.dim])
            if not isinstance(node, Load):
                return None
            assert isinstance(node.source, Table), "where an output goes does not depend on data"
            indices = [found[child] for child in node.children]
            table = e.dense(node.source.values)
            return _loaded(
                e, node.source, e.insert(tensor.ExtractOp(table, indices, storage_of(node.source)))
            )

        return emit_bodies(e, [self.output.slot], leaf)[0]

    def row(self, e: Emitter, indices: Sequence[IndexLike]) -> IndexLike:
        """Row of the pack; ``indices`` are those of the first ``row_level`` loops."""
        if self._order is None:
            return indices[0]
        if self._row is None or self._component is None:
            return e.floordiv(self._slot(e, indices), self._components)
        return self._linear(e, self._row, indices)

    def group(self, e: Emitter, indices: Sequence[IndexLike]) -> IndexLike:
        """The group of entries that the row belongs to; ``indices`` of ``group_level`` loops."""
        if self._groups is not None:
            return self._linear(e, self._groups, indices)
        return e.floordiv(self.row(e, indices), self._group)

    def component(self, e: Emitter, indices: Sequence[IndexLike]) -> IndexLike:
        """Component within the row."""
        if self._order is None:
            return indices[1]
        if self._row is None or self._component is None:
            return e.rem(self._slot(e, indices), self._components)
        return self._linear(e, self._component, indices)

    def value_indices(self, e: Emitter, indices: Sequence[IndexLike]) -> list[IndexLike]:
        """Indices into the piece's value."""
        if self._order is None:
            return [e.add(e.mul(indices[0], self._components), indices[1])]
        found: dict[int, IndexLike] = dict(zip(self._order, indices, strict=False))
        return [found[d] for d in range(len(self._order))]

    def _linear(
        self, e: Emitter, form: tuple[int, list[int]], indices: Sequence[IndexLike]
    ) -> IndexLike:
        assert self._order is not None
        total: IndexLike = form[0]
        for dim, index in zip(self._order, indices, strict=False):
            if form[1][dim]:
                total = e.add(total, e.mul(index, form[1][dim]))
        return total


def _evaluate(expr: Expr, dims: Sequence[Dim]) -> np.ndarray[Any, Any]:
    """An index expression for each value of ``dims``."""
    grids = np.meshgrid(*(np.arange(d.extent) for d in dims), indexing="ij") if dims else []
    values: dict[Expr, Any] = {}
    numpy_of = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide,
                "rem": np.remainder}  # fmt: skip
    for node in postorder([expr]):
        if isinstance(node, Scalar):
            values[node] = np.full([d.extent for d in dims], int(node.value))
        elif isinstance(node, IndexOf):
            values[node] = grids[dims.index(node.dim)]
        elif isinstance(node, Load) and isinstance(node.source, Table):
            values[node] = node.source.values[tuple(values[c] for c in node.children)]
        else:
            operation = numpy_of[node.name]  # type: ignore[attr-defined]
            values[node] = operation(*(values[child] for child in node.children))
    return np.asarray(values[expr])


def _affine(values: np.ndarray[Any, Any], extents: Sequence[int]) -> tuple[int, list[int]] | None:
    """``(constant, coefficients)`` of an affine function given by its values, or None."""
    if not values.size:
        return (0, [0] * len(extents))
    origin = (0,) * len(extents)
    constant = int(values[origin])
    coefficients = []
    for d, extent in enumerate(extents):
        step = (*origin[:d], 1, *origin[d + 1 :])
        coefficients.append(int(values[step]) - constant if extent > 1 else 0)
    grid = np.indices(extents) if extents else np.zeros((0,))
    predicted = constant + sum(
        (c * g for c, g in zip(coefficients, grid, strict=True)), np.zeros(extents, int)
    )
    return (constant, coefficients) if np.array_equal(predicted, values) else None

"""The same loop in C, as PyOP2 writes it: what the engine is measured against.

The local kernel goes from GEM through Impero and loopy to C, as in TSFC, and stands inlined in a
scalar loop over the entities: gather into packs on the stack, kernel, scatter in order. Everything
is compiled by gcc with PyOP2's options and called on the parloop's own arrays. A matrix is added
through the same table of positions in its CSR values that the engine uses, where PyOP2 would call
MatSetValues for each cell, which takes ten times as long.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

import gem
import numpy as np
from gem import impero
from gem.impero_utils import ImperoC, compile_gem

from pyop3_mlir.kernels.elements import GemKernel
from pyop3_mlir.parloop import Access, ArgumentSpec, Kind, Parloop

__all__ = ["FLAGS", "Baseline", "BaselineUnavailableError", "local_kernel_code", "loop_code"]

FLAGS = ("-O3", "-march=native", "-ffast-math", "-std=gnu11", "-fPIC")
"""Options of gcc: PyOP2's, warnings apart."""


class BaselineUnavailableError(RuntimeError):
    """The baseline cannot be built here; the message says why."""


class Baseline:
    """A loop compiled by gcc.

    Parameters
    ----------
    kernel
        The local kernel in GEM.
    parloop
        The loop; its own local kernel is not looked at, only its arguments.

    Raises
    ------
    BaselineUnavailableError
        Where gcc or loopy is not installed, or gcc fails.
    """

    def __init__(self, kernel: GemKernel, parloop: Parloop) -> None:
        compiler = shutil.which("gcc")
        if compiler is None:
            raise BaselineUnavailableError("gcc is not installed")
        self.parloop = parloop
        self.code = loop_code(kernel, parloop)
        with tempfile.TemporaryDirectory(prefix="pyop3_mlir-baseline-") as folder:
            source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
            source.write_text(self.code)
            # gcc links code into a library of -ffast-math that makes the whole process flush
            # denormal numbers to zero, so the flag must not be there when it links
            for command in (
                [compiler, *FLAGS, "-c", "-o", str(Path(folder, "loop.o")), str(source)],
                [compiler, "-shared", "-o", str(library), str(Path(folder, "loop.o")), "-lm"],
            ):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise BaselineUnavailableError(f"gcc refused the baseline:\n{done.stderr}")
            self._library = ctypes.CDLL(str(library))
        self._function = self._library.loop
        self._function.restype = None
        entities = parloop.iteration_set.entities
        self._arrays = [
            *([entities] if entities is not None else []),
            *(table.values for table in parloop.tables),
            *parloop.buffers,
        ]
        self._pointers = [ctypes.c_void_p(array.ctypes.data) for array in self._arrays]

    def __call__(self, start: int = 0, stop: int | None = None) -> None:
        """Run iterations [start, stop) in place; all owned ones where not given."""
        if stop is None:
            stop = self.parloop.iteration_set.owned
            assert stop is not None
        self._function(ctypes.c_int(start), ctypes.c_int(stop), *self._pointers)


# ---------------------------------------------------------------------------------------------
# The loop over entities

_C_TYPES = {
    "<f8": "double", "<f4": "float", "<i4": "int32_t", "<u4": "uint32_t", "<i8": "int64_t"
}  # fmt: skip


def loop_code(kernel: GemKernel, parloop: Parloop) -> str:
    """Write the C code of a whole loop, local kernel included.

    The function is ``loop(start, end, [entities], tables..., buffers...)``.
    """
    spec = parloop.spec
    parameters = ["int32_t const start", "int32_t const end"]
    if spec.entities is not None:
        parameters.append(f"{_C_TYPES[spec.entities]} const *__restrict__ entities")
    parameters += [
        f"{_C_TYPES[table.values.dtype.str]} const *__restrict__ map{number}"
        for number, table in enumerate(parloop.tables)
    ]
    written = {argument.buffer for argument in spec.arguments if argument.access.writes}
    parameters += [
        f"{_C_TYPES[buffer.dtype.str]} {'' if number in written else 'const '}"
        f"*__restrict__ dat{number}"
        for number, buffer in enumerate(parloop.buffers)
    ]
    before, after = [], []
    for number, argument in enumerate(spec.arguments):
        before += [f"    {line}" for line in _pack(number, argument)]
        after += [f"    {line}" for line in _unpack(number, argument)]
    call = ", ".join(f"t{number}" for number in range(len(spec.arguments)))
    entity = "entities[i]" if spec.entities is not None else "i"
    return "\n".join(
        [
            "#include <stdint.h>",
            "#include <math.h>",
            local_kernel_code(kernel),
            f"void loop({', '.join(parameters)})",
            "{",
            "  for (int32_t i = start; i < end; ++i) {",
            f"    int32_t const n = {entity};",
            *before,
            f"    {kernel.name}({call});",
            *after,
            "  }",
            "}",
            "",
        ]
    )


def _position(argument: ArgumentSpec) -> str:
    """Position in the buffer of component c of row r of the pack."""
    match argument.kind:
        case Kind.GLOBAL:
            row = ""
        case Kind.DIRECT:
            row = f"(int64_t)n * {argument.stride} + "
        case Kind.INDIRECT:
            row = f"map{argument.table}[(int64_t)n * {argument.arity} + r] * {argument.stride} + "
    return f"{row}{argument.offset} + c"


def _over_pack(argument: ArgumentSpec, statement: str) -> list[str]:
    if argument.negative:
        row = f"map{argument.table}[(int64_t)n * {argument.arity} + r]"
        statement = f"if ({row} >= 0) {statement}"
    return [
        f"for (int32_t r = 0; r < {argument.arity}; ++r)",
        f"  for (int32_t c = 0; c < {argument.components}; ++c)",
        f"    {statement}",
    ]


def _pack(number: int, argument: ArgumentSpec) -> list[str]:
    slots = argument.arity * argument.components
    declaration = f"{_C_TYPES[argument.dtype]} t{number}[{max(slots, 1)}]"
    if argument.access.gathers and not argument.negative:
        slot = f"t{number}[r * {argument.components} + c]"
        read = f"{slot} = dat{argument.buffer}[{_position(argument)}];"
        return [f"{declaration};", *_over_pack(argument, read)]
    zero = [f"{declaration};", f"for (int32_t s = 0; s < {slots}; ++s) t{number}[s] = 0;"]
    if not argument.access.gathers:
        return zero
    slot = f"t{number}[r * {argument.components} + c]"
    return [*zero, *_over_pack(argument, f"{slot} = dat{argument.buffer}[{_position(argument)}];")]


def _unpack(number: int, argument: ArgumentSpec) -> list[str]:
    slot = f"t{number}[r * {argument.components} + c]"
    target = f"dat{argument.buffer}[{_position(argument)}]"
    match argument.access:
        case Access.READ:
            return []
        case Access.INC:
            statement = f"{target} += {slot};"
        case Access.WRITE | Access.RW:
            statement = f"{target} = {slot};"
        case Access.MIN:
            statement = f"{target} = {target} < {slot} ? {target} : {slot};"
        case Access.MAX:
            statement = f"{target} = {target} > {slot} ? {target} : {slot};"
    return _over_pack(argument, statement)


# ---------------------------------------------------------------------------------------------
# The local kernel, through Impero and loopy


def local_kernel_code(kernel: GemKernel) -> str:
    """Write the local kernel as a static C function, by loopy.

    Raises
    ------
    BaselineUnavailableError
        Where loopy is not installed.
    """
    try:
        # loopy is annotated in parts only
        lp: Any = importlib.import_module("loopy")
    except ImportError as error:
        raise BaselineUnavailableError(f"loopy is not installed ({error})") from None

    tree = compile_gem(kernel.assignments, kernel.quadrature, remove_zeros=True)
    writer = _Writer(tree, kernel.arguments[0][2])
    data: list[Any] = [
        lp.GlobalArg(name, dtype=dtype, shape=shape) for name, shape, dtype in kernel.arguments
    ]
    for number, temporary in enumerate(tree.temporaries):
        name = f"t{number}"
        writer.names[temporary] = name
        constant = isinstance(temporary, gem.gem.Constant)
        outer = () if constant else tuple(i.extent for i in tree.indices[temporary])
        data.append(
            lp.TemporaryVariable(
                name,
                shape=outer + temporary.shape,
                dtype=temporary.array.dtype if constant else writer.dtype,
                initializer=temporary.array if constant else None,
                address_space=lp.AddressSpace.LOCAL,
                read_only=constant,
            )
        )
    instructions: list[Any] = [
        lp.Assignment(target, value, within_inames=frozenset(loops))
        for target, value, loops in writer.statements(tree.tree, ())
    ]
    # arguments that the kernel does not read stay in its signature
    instructions.append(
        lp.CInstruction(
            (),
            "",
            read_variables=frozenset(name for name, _, _ in kernel.arguments),
            within_inames=frozenset(),
            within_inames_is_final=True,
        )
    )
    unit = lp.make_kernel(
        [f"{{ [{name}]: 0 <= {name} < {extent} }}" for name, extent in writer.extents.items()],
        instructions,
        data,
        name=kernel.name,
        target=lp.CWithGNULibcTarget(),
        seq_dependencies=True,
        lang_version=(2018, 2),
        loop_priority=frozenset(writer.nests),
    )
    code = lp.generate_code_v2(unit).device_code()
    return str(code).replace(f"void {kernel.name}", f"static inline void {kernel.name}", 1)


Statement = tuple[Any, Any, tuple[str, ...]]


class _Writer:
    """From Impero's tree to assignments of pymbolic expressions.

    Attributes
    ----------
    names
        Names of the temporaries.
    extents
        Extent of each loop.
    nests
        Nests of loops, outermost first.
    """

    def __init__(self, tree: ImperoC, dtype: np.dtype[Any]) -> None:
        self.indices = tree.indices
        self.dtype = dtype
        self.names: dict[Any, str] = {}
        self.extents: dict[str, int] = {}
        self.nests: set[tuple[str, ...]] = set()
        self._active: dict[Any, str] = {}
        self._fresh = (f"i{number}" for number in itertools.count())

    def statements(self, node: Any, loops: tuple[str, ...]) -> Iterator[Statement]:
        """Assignments below ``node``: target, value and the loops around them."""
        match node:
            case impero.Block():
                for child in node.children:
                    yield from self.statements(child, loops)
            case impero.For():
                name = next(self._fresh)
                self.extents[name] = node.index.extent
                self._active[node.index] = name
                if loops:
                    self.nests.add((*loops, name))
                yield from self.statements(node.children[0], (*loops, name))
                del self._active[node.index]
            case impero.Initialise():
                yield self.expression(node.indexsum), 0.0, loops
            case impero.Accumulate():
                target = self.expression(node.indexsum)
                yield target, target + self.expression(node.indexsum.children[0]), loops
            case impero.Return():
                target = self.expression(node.variable)
                yield target, target + self.expression(node.expression), loops
            case impero.ReturnAccumulate():
                target = self.expression(node.variable)
                yield target, target + self.expression(node.indexsum.children[0]), loops
            case impero.Evaluate(expression=gem.ListTensor() as tensor):
                for position, value in np.ndenumerate(tensor.array):
                    yield self._subscript(tensor, position), self.expression(value), loops
            case impero.Evaluate(expression=gem.gem.Constant()):
                pass
            case impero.Evaluate():
                value = _translate(node.expression, self)
                yield self._subscript(node.expression), value, loops
            case _:
                raise NotImplementedError(f"Impero's {type(node).__name__} in the C baseline")

    def expression(self, node: Any) -> Any:
        """Write ``node``, as a temporary where it is one."""
        return self._subscript(node) if node in self.names else _translate(node, self)

    def index(self, index: Any) -> Any:
        """Write one entry of a multi-index."""
        import pymbolic.primitives as p

        if isinstance(index, gem.Index):
            return p.Variable(self._active[index])
        if isinstance(index, gem.VariableIndex):
            return self.expression(index.expression)
        return int(index)

    def _subscript(self, node: Any, position: Sequence[Any] = ()) -> Any:
        import pymbolic.primitives as p

        outer = tuple(self.index(i) for i in self.indices.get(node, ()))
        subscripts = (*outer, *position)
        variable = p.Variable(self.names[node])
        return p.Subscript(variable, subscripts) if subscripts else variable


@singledispatch
def _translate(node: Any, writer: _Writer) -> Any:
    raise NotImplementedError(f"GEM's {type(node).__name__} in the C baseline")


@_translate.register(gem.Sum)
@_translate.register(gem.Product)
@_translate.register(gem.Division)
def _arithmetic(node: Any, writer: _Writer) -> Any:
    import pymbolic.primitives as p

    operands = tuple(writer.expression(child) for child in node.children)
    match node:
        case gem.Sum():
            return p.Sum(operands)
        case gem.Product():
            return p.Product(operands)
        case _:
            return p.Quotient(*operands)


@_translate.register(gem.Power)
@_translate.register(gem.MathFunction)
@_translate.register(gem.MinValue)
@_translate.register(gem.MaxValue)
def _function(node: Any, writer: _Writer) -> Any:
    import pymbolic.primitives as p

    names = {gem.Power: "pow", gem.MinValue: "min", gem.MaxValue: "max"}
    name = names.get(type(node)) or {"ln": "log"}.get(node.name, node.name)
    return p.Variable(name)(*(writer.expression(child) for child in node.children))


@_translate.register(gem.Conditional)
@_translate.register(gem.Comparison)
@_translate.register(gem.LogicalAnd)
@_translate.register(gem.LogicalOr)
@_translate.register(gem.LogicalNot)
def _logic(node: Any, writer: _Writer) -> Any:
    import pymbolic.primitives as p

    operands = tuple(writer.expression(child) for child in node.children)
    match node:
        case gem.Conditional():
            return p.If(*operands)
        case gem.Comparison():
            return p.Comparison(operands[0], node.operator, operands[1])
        case gem.LogicalAnd():
            return p.LogicalAnd(operands)
        case gem.LogicalOr():
            return p.LogicalOr(operands)
        case _:
            return p.LogicalNot(*operands)


@_translate.register(gem.gem.Constant)
def _constant(node: Any, writer: _Writer) -> Any:
    value = node.value
    rounded = np.round(value, 1)
    # FIAT's tables hold 1 and 0.5 with rounding errors; TSFC rounds them the same way
    close = rounded and abs(value - rounded) < np.finfo(writer.dtype).resolution
    return float(rounded if close else value)


@_translate.register(gem.Variable)
def _variable(node: Any, writer: _Writer) -> Any:
    import pymbolic.primitives as p

    return p.Variable(node.name)


@_translate.register(gem.Indexed)
def _indexed(node: Any, writer: _Writer) -> Any:
    import pymbolic.primitives as p

    position = tuple(writer.index(index) for index in node.multiindex)
    tensor = writer.expression(node.children[0])
    if isinstance(tensor, p.Subscript):
        return p.Subscript(tensor.aggregate, (*tensor.index_tuple, *position))
    return p.Subscript(tensor, position)

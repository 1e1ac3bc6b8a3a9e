"""Scalar code: expressions of the tensor program as operations of arith, math and complex.

:class:`Emitter` is a thin layer over xDSL's builder: index arithmetic folds Python integers, so
that code with static sizes stays readable in every stage that is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from xdsl.builder import Builder
from xdsl.dialects import arith, complex, func, math, scf
from xdsl.dialects.builtin import (
    ArrayAttr,
    ComplexType,
    DenseIntOrFPElementsAttr,
    Float32Type,
    Float64Type,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    TensorType,
    f32,
    f64,
    i1,
    i32,
    i64,
)
from xdsl.dialects.utils import FastMathFlag
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels.program import INDEX, Expr, Op, Scalar

__all__ = ["CONTRACT", "Emitter", "IndexLike", "element_type", "emit_operation", "storage_type"]

IndexLike = SSAValue | int
"""An index known while lowering, or computed when the loop runs."""

CONTRACT = arith.FastMathFlagsAttr([FastMathFlag.ALLOW_CONTRACT])
"""Fused multiply-add is the one freedom taken with IEEE arithmetic: results stay reproducible."""


def element_type(dtype: np.dtype[Any]) -> Attribute:
    """The type of a scalar of this dtype inside a kernel; ``int64`` is ``index``."""
    match dtype.kind, dtype.itemsize:
        case "f", 8:
            return f64
        case "f", 4:
            return f32
        case "c", 16:
            return ComplexType(f64)
        case "c", 8:
            return ComplexType(f32)
        case ("i", 8) | ("u", 8):
            return IndexType()
        case ("i", 4) | ("u", 4):
            return i32
        case "b", _:
            return i1
    raise UnsupportedLoopError(f"dtype {dtype} cannot be lowered")


def storage_type(dtype: np.dtype[Any]) -> Attribute:
    """The type of a scalar of this dtype in memory; ``int64`` is ``i64``, ``bool`` is ``i8``."""
    if dtype.kind in "iu":
        return IntegerType(8 * dtype.itemsize)
    if dtype.kind == "b":
        return IntegerType(8)
    return element_type(dtype)


def local_type(dtype: np.dtype[Any]) -> Attribute:
    """The type of a scalar of this dtype in a local tensor; ``int64`` is ``i64``.

    IREE 3.13 crashes on stack memory of ``index``, whose width it does not know.
    """
    return i64 if dtype.kind in "iu" and dtype.itemsize == 8 else element_type(dtype)


class Emitter:
    """Inserts operations at one place, with folding of index arithmetic.

    Parameters
    ----------
    where
        A block (operations go to its end) or an insertion point.
    entry
        Inserts the constants, at a place before all others; by default they stand where they are
        used first.
    """

    def __init__(self, where: Block | InsertPoint, entry: Emitter | None = None) -> None:
        self._entry = entry
        point = InsertPoint.at_end(where) if isinstance(where, Block) else where
        self.builder = Builder(point)
        self._constants: dict[tuple[Any, ...], SSAValue] = {}

    def insert(self, op: Operation) -> SSAValue:
        """Insert ``op``; its first result, if it has one."""
        self.builder.insert(op)
        return op.results[0] if op.results else None  # type: ignore[return-value]

    def constant(self, value: Any, type: Attribute) -> SSAValue:
        """A constant of a scalar type; equal constants are one operation."""
        if self._entry is not None:
            return self._entry.constant(value, type)
        # the bytes tell 0.0 from -0.0, and NaN is equal to itself
        key = (np.asarray(value).tobytes(), type)
        if key not in self._constants:
            self._constants[key] = self._new_constant(value, type)
        return self._constants[key]

    def _new_constant(self, value: Any, type: Attribute) -> SSAValue:
        if isinstance(type, ComplexType):
            part = type.element_type
            return self.insert(
                complex.ConstantOp(
                    ArrayAttr([FloatAttr(float(v), part) for v in (value.real, value.imag)]),
                    type,
                )
            )
        if isinstance(type, Float32Type | Float64Type):
            return self.insert(arith.ConstantOp(FloatAttr(float(value), type)))
        assert isinstance(type, IntegerType | IndexType)
        return self.insert(arith.ConstantOp(IntegerAttr(int(value), type)))

    def index(self, value: IndexLike) -> SSAValue:
        """``value`` as an SSA value of type index."""
        if isinstance(value, SSAValue):
            return value
        return self.constant(value, IndexType())

    def add(self, a: IndexLike, b: IndexLike) -> IndexLike:
        """``a + b`` on indices."""
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if isinstance(a, int) and a == 0:
            return b
        if isinstance(b, int) and b == 0:
            return a
        return self.insert(arith.AddiOp(self.index(a), self.index(b)))

    def sub(self, a: IndexLike, b: IndexLike) -> IndexLike:
        """``a - b`` on indices."""
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        if isinstance(b, int) and b == 0:
            return a
        return self.insert(arith.SubiOp(self.index(a), self.index(b)))

    def mul(self, a: IndexLike, b: IndexLike) -> IndexLike:
        """``a * b`` on indices."""
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        for x, y in ((a, b), (b, a)):
            if isinstance(x, int) and x in (0, 1):
                return y if x else 0
        return self.insert(arith.MuliOp(self.index(a), self.index(b)))

    def floordiv(self, a: IndexLike, b: int) -> IndexLike:
        """``a // b`` for a not negative and a positive number b."""
        if b == 1:
            return a
        if isinstance(a, int):
            return a // b
        return self.insert(arith.DivUIOp(a, self.index(b)))

    def rem(self, a: IndexLike, b: int) -> IndexLike:
        """``a % b`` for a not negative and a positive number b."""
        if b == 1:
            return 0
        if isinstance(a, int):
            return a % b
        return self.insert(arith.RemUIOp(a, self.index(b)))

    def minimum(self, a: IndexLike, b: IndexLike) -> IndexLike:
        """``min(a, b)`` on indices."""
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return self.insert(arith.MinSIOp(self.index(a), self.index(b)))

    def linear(self, indices: Sequence[IndexLike], shape: Sequence[int]) -> IndexLike:
        """Row-major position of ``indices`` in ``shape``."""
        position: IndexLike = 0
        for index, extent in zip(indices, shape, strict=True):
            position = self.add(self.mul(position, extent), index)
        return position

    def delinear(self, position: IndexLike, shape: Sequence[int]) -> tuple[IndexLike, ...]:
        """Indices in ``shape`` of the row-major ``position``."""
        indices: list[IndexLike] = []
        for extent in reversed(shape[1:]):
            indices.append(self.rem(position, extent))
            position = self.floordiv(position, extent)
        return (position, *reversed(indices)) if shape else ()

    def to_index(self, value: SSAValue) -> SSAValue:
        """A signed integer as an index."""
        if isinstance(value.type, IndexType):
            return value
        return self.insert(arith.IndexCastOp(value, IndexType()))

    def for_loop(
        self,
        start: IndexLike,
        stop: IndexLike,
        step: int,
        carried: Sequence[SSAValue],
        body: Callable[[Emitter, SSAValue, tuple[SSAValue, ...]], Sequence[SSAValue]],
    ) -> tuple[SSAValue, ...]:
        """An ``scf.for``; ``body(emitter, index, carried)`` returns the next carried values."""
        block = Block(arg_types=[IndexType(), *(value.type for value in carried)])
        inner = Emitter(block, self._entry)
        result = body(inner, block.args[0], tuple(block.args[1:]))
        inner.insert(scf.YieldOp(*result))
        loop = scf.ForOp(
            self.index(start), self.index(stop), self.index(step), carried, Region(block)
        )
        self.builder.insert(loop)
        return tuple(loop.results)

    def if_else(
        self,
        condition: SSAValue,
        types: Sequence[Attribute],
        then: Callable[[Emitter], Sequence[SSAValue]],
        otherwise: Callable[[Emitter], Sequence[SSAValue]] | None = None,
    ) -> tuple[SSAValue, ...]:
        """An ``scf.if``."""
        regions = []
        for branch in (then, otherwise):
            if branch is None:
                regions.append(Region())
                continue
            block = Block()
            inner = Emitter(block, self._entry)
            inner.insert(scf.YieldOp(*branch(inner)))
            regions.append(Region(block))
        op = scf.IfOp(condition, types, regions[0], regions[1] if otherwise is not None else None)
        self.builder.insert(op)
        return tuple(op.results)

    def dense(self, values: npt.NDArray[Any]) -> SSAValue:
        """A constant tensor; integer types are stored as they are, bools as i8."""
        return self.insert(arith.ConstantOp(dense_attribute(values)))


def dense_attribute(values: npt.NDArray[Any]) -> DenseIntOrFPElementsAttr[Any]:
    """A constant tensor as an attribute, of :func:`storage_type`."""
    kind = values.dtype
    if kind.kind == "b":
        values = values.astype(np.int8)
    type: TensorType[Any] = TensorType(storage_type(kind), values.shape)
    entries = values.reshape(-1).tolist()
    if kind.kind == "c":
        entries = [(entry.real, entry.imag) for entry in entries]
    return DenseIntOrFPElementsAttr.from_list(type, entries)


_FLOAT_BINARY: dict[str, Callable[..., Operation]] = {
    "add": arith.AddfOp, "sub": arith.SubfOp, "mul": arith.MulfOp, "div": arith.DivfOp,
    # C's fmin and fmax, which return the number where one operand is NaN
    "min": arith.MinnumfOp, "max": arith.MaxnumfOp,
}  # fmt: skip
_INTEGER_BINARY: dict[str, type[Operation]] = {
    "add": arith.AddiOp, "sub": arith.SubiOp, "mul": arith.MuliOp, "div": arith.DivSIOp,
    "floordiv": arith.FloorDivSIOp, "min": arith.MinSIOp, "max": arith.MaxSIOp,
}  # fmt: skip
_COMPLEX_BINARY: dict[str, type[Operation]] = {
    "add": complex.AddOp, "sub": complex.SubOp, "mul": complex.MulOp, "div": complex.DivOp,
}  # fmt: skip
_FLOAT_UNARY: dict[str, type[Operation]] = {
    "neg": arith.NegfOp, "abs": math.AbsFOp, "sqrt": math.SqrtOp, "exp": math.ExpOp,
    "log": math.LogOp, "sin": math.SinOp, "cos": math.CosOp, "tan": math.TanOp,
    "sinh": math.SinhOp, "cosh": math.CoshOp, "tanh": math.TanhOp, "asin": math.AsinOp,
    "acos": math.AcosOp, "atan": math.AtanOp, "erf": math.ErfOp,
}  # fmt: skip
_COMPLEX_UNARY: dict[str, type[Operation]] = {
    "neg": complex.NegOp, "conj": complex.ConjOp, "real": complex.ReOp, "imag": complex.ImOp,
    "abs": complex.AbsOp,
}  # fmt: skip
_COMPLEX_FUNCTIONS = frozenset(
    ("sqrt", "exp", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan")
)
# Comparisons of floats: ordered, except "ne", which is C's != (true for NaN)
_FLOAT_COMPARE = {"lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "eq": "oeq", "ne": "une"}
_INTEGER_COMPARE = {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge", "eq": "eq", "ne": "ne"}


def emit_operation(e: Emitter, op: Op, operands: Sequence[Any]) -> SSAValue:
    """One scalar operation of the tensor program.

    Raises
    ------
    UnsupportedLoopError
        Where the operation does not exist for the type of its operands.
    """
    type = operands[-1].type
    name = op.name
    if name == "select":
        return e.insert(arith.SelectOp(*operands))
    if name == "cast":
        return _cast(e, operands[0], op.children[0].dtype, op.dtype)
    if name == "and":
        return e.insert(arith.AndIOp(*operands))
    if name == "or":
        return e.insert(arith.OrIOp(*operands))
    if name == "not":
        return e.insert(arith.XOrIOp(operands[0], e.constant(1, i1)))
    if isinstance(type, ComplexType):
        return _complex(e, op, operands)
    if isinstance(type, Float32Type | Float64Type):
        return _float(e, op, operands)
    return _integer(e, op, operands)


def _unsupported(op: Op) -> UnsupportedLoopError:
    return UnsupportedLoopError(
        f"operation {op.name} of {', '.join(str(c.dtype) for c in op.children)} cannot be lowered"
    )


def _float(e: Emitter, op: Op, operands: Sequence[Any]) -> SSAValue:
    name, first = op.name, cast(SSAValue, operands[0])
    if name in _FLOAT_COMPARE:
        return e.insert(arith.CmpfOp(first, operands[1], _FLOAT_COMPARE[name]))
    if name in _FLOAT_BINARY:
        return e.insert(_FLOAT_BINARY[name](*operands, CONTRACT))
    if name in _FLOAT_UNARY:
        return e.insert(_FLOAT_UNARY[name](*operands))
    if name in ("real", "conj"):
        return first
    if name == "imag":
        return e.constant(0.0, first.type)
    if name == "atan2":
        return e.insert(math.Atan2Op(*operands))
    if name == "pow":
        return _power(e, operands, op.children[1])
    if name in ("bessel_j", "bessel_y"):
        return _bessel(e, op, operands[1])
    raise _unsupported(op)


def _bessel(e: Emitter, op: Op, argument: SSAValue) -> SSAValue:
    """The C library's Bessel functions, which are of double precision and of integer order."""
    order = op.children[0]
    if not isinstance(order, Scalar) or int(order.value) != order.value:
        raise _unsupported(op)
    single = isinstance(argument.type, Float32Type)
    if single:
        argument = e.insert(arith.ExtFOp(argument, f64))
    function = "jn" if op.name == "bessel_j" else "yn"
    call = func.CallOp(function, [e.constant(int(order.value), i32), argument], [f64])
    result = e.insert(call)
    return e.insert(arith.TruncFOp(result, f32)) if single else result


def _power(e: Emitter, operands: Sequence[Any], exponent: Expr) -> SSAValue:
    """Powers with a small constant exponent by multiplication, as C compilers do it too."""
    base = operands[0]
    if isinstance(exponent, Scalar):
        value = float(exponent.value)
        if value == 0.5:
            return e.insert(math.SqrtOp(base))
        if value.is_integer() and abs(value) <= 16:
            return _integer_power(e, base, int(value))
    return e.insert(math.PowFOp(*operands))


def _integer_power(e: Emitter, base: SSAValue, exponent: int) -> SSAValue:
    one = e.constant(1.0, base.type)
    if exponent == 0:
        return one
    result: SSAValue | None = None
    square, left = base, abs(exponent)
    while left:
        if left & 1:
            result = square if result is None else e.insert(arith.MulfOp(result, square, CONTRACT))
        left >>= 1
        if left:
            square = e.insert(arith.MulfOp(square, square, CONTRACT))
    assert result is not None
    return e.insert(arith.DivfOp(one, result, CONTRACT)) if exponent < 0 else result


def _complex(e: Emitter, op: Op, operands: Sequence[Any]) -> SSAValue:
    name = op.name
    if name in _COMPLEX_BINARY:
        return e.insert(_COMPLEX_BINARY[name](*operands))
    if name in _COMPLEX_UNARY:
        return e.insert(_COMPLEX_UNARY[name](*operands))
    if name == "eq":
        return e.insert(complex.EqualOp(*operands))
    if name == "ne":
        return e.insert(complex.NotEqualOp(*operands))
    if name == "pow":
        exponent = op.children[1]
        if isinstance(exponent, Scalar):
            value = exponent.value
            if value.imag == 0 and float(value.real).is_integer() and abs(value.real) <= 16:
                return _complex_power(e, operands[0], int(value.real))
            if value == 0.5:
                return _Complex(e, operands[0]).function("sqrt")
        return _complex_exponential(e, operands[0], operands[1])
    if name in _COMPLEX_FUNCTIONS:
        return _Complex(e, operands[0]).function(name)
    raise _unsupported(op)


def _complex_power(e: Emitter, base: SSAValue, exponent: int) -> SSAValue:
    result = e.constant(np.complex128(1.0), base.type)
    for _ in range(abs(exponent)):
        result = e.insert(complex.MulOp(result, base))
    if exponent < 0:
        result = e.insert(complex.DivOp(e.constant(np.complex128(1.0), base.type), result))
    return result


def _complex_exponential(e: Emitter, base: SSAValue, exponent: SSAValue) -> SSAValue:
    """``base ** exponent``; zero to any power but zero is zero."""
    zero, one = (e.constant(np.complex128(number), base.type) for number in (0.0, 1.0))
    scaled = e.insert(complex.MulOp(exponent, _Complex(e, base).function("log")))
    power = _Complex(e, scaled).function("exp")
    at_zero = e.insert(arith.SelectOp(e.insert(complex.EqualOp(exponent, zero)), one, zero))
    return e.insert(arith.SelectOp(e.insert(complex.EqualOp(base, zero)), at_zero, power))


class _Complex:
    """Functions of a complex number ``a + i b`` from those of real numbers.

    IREE's own expansions of the complex dialect cancel near the axes (``tan`` and ``tanh`` keep 3
    of 7 digits of single precision near zero). Formulas: Abramowitz and Stegun, 4.3.55 ff., 4.5.49
    ff.; square root, logarithm and the inverse functions as in W. Kahan, Branch cuts for complex
    elementary functions. On a cut the sign of the part that is zero tells the side, as in C.
    """

    def __init__(self, e: Emitter, value: SSAValue) -> None:
        self.e = e
        self.value = value
        self.type = value.type
        assert isinstance(self.type, ComplexType)
        self.part = self.type.element_type
        self.a = e.insert(complex.ReOp(value))
        self.b = e.insert(complex.ImOp(value))

    def function(self, name: str) -> SSAValue:
        """The function ``name`` of the number."""
        a, b = self.a, self.b
        sin, cos, sinh, cosh = math.SinOp, math.CosOp, math.SinhOp, math.CoshOp
        match name:
            case "exp":
                size = self.real(math.ExpOp, a)
                return self.create(
                    self.mul(size, self.real(cos, b)), self.mul(size, self.real(sin, b))
                )
            case "log":
                return self.create(self.log_abs(), self.real(math.Atan2Op, b, a))
            case "sqrt":
                return self.sqrt()
            case "sin":
                return self.products((sin, cosh), (cos, sinh))
            case "cos":
                return self.products((cos, cosh), (sin, sinh), minus=True)
            case "sinh":
                return self.products((sinh, cos), (cosh, sin))
            case "cosh":
                return self.products((cosh, cos), (sinh, sin))
            case "tan":
                return self.e.insert(complex.DivOp(self.function("sin"), self.function("cos")))
            case "tanh":
                return self.e.insert(complex.DivOp(self.function("sinh"), self.function("cosh")))
            case "asin" | "acos":
                return self.arc(name)
            case "atan":
                return self.atan()
        raise AssertionError(name)

    def products(self, first: Any, second: Any, minus: bool = False) -> SSAValue:
        """``f(a) g(b) + i h(a) k(b)``, or with a minus before i."""
        parts = [
            self.mul(self.real(of_a, self.a), self.real(of_b, self.b))
            for of_a, of_b in (first, second)
        ]
        if minus:
            parts[1] = self.real(arith.NegfOp, parts[1])
        return self.create(*parts)

    def log_abs(self) -> SSAValue:
        """``log |z|``, near 1 from ``log1p(|z|^2 - 1)``."""
        e, one, half = self.e, self.constant(1.0), self.constant(0.5)
        size = e.insert(complex.AbsOp(self.value))
        less = e.insert(arith.CmpfOp(self.constant(0.7), size, "olt"))
        more = e.insert(arith.CmpfOp(size, self.constant(1.4), "olt"))
        square = self.mul(
            self.real(arith.SubfOp, self.a, one), self.real(arith.AddfOp, self.a, one)
        )
        square = self.real(arith.AddfOp, square, self.mul(self.b, self.b))
        near = self.mul(half, self.real(math.Log1pOp, square))
        return e.insert(
            arith.SelectOp(e.insert(arith.AndIOp(less, more)), near, self.real(math.LogOp, size))
        )

    def sqrt(self) -> SSAValue:
        """The larger part from a sum without cancellation, the other from it."""
        e, zero = self.e, self.constant(0.0)
        size = e.insert(complex.AbsOp(self.value))
        total = self.real(arith.AddfOp, size, self.real(math.AbsFOp, self.a))
        large = self.real(math.SqrtOp, self.mul(total, self.constant(0.5)))
        none = e.insert(arith.CmpfOp(large, zero, "oeq"))
        divisor = e.insert(
            arith.SelectOp(none, self.constant(1.0), self.mul(large, self.constant(2.0)))
        )
        small = self.real(arith.DivfOp, self.b, divisor)
        right = e.insert(arith.CmpfOp(self.a, zero, "oge"))
        first = e.insert(arith.SelectOp(right, large, self.real(math.AbsFOp, small)))
        left = self.real(math.CopySignOp, large, self.b)
        return self.create(first, e.insert(arith.SelectOp(right, small, left)))

    def arc(self, name: str) -> SSAValue:
        """``asin`` or ``acos``: real and imaginary part are products of parts of two roots.

        The terms of each sum have one sign, so that none of them cancels.
        """
        one = self.constant(1.0)
        below = self.create(self.add(self.negative(self.a), one), self.negative(self.b))
        above = self.create(self.add(self.a, one), self.b)
        c, d = (_Complex(self.e, _Complex(self.e, value).sqrt()) for value in (below, above))
        across = self.asinh(self.sub(self.mul(c.a, d.b), self.mul(c.b, d.a)))
        if name == "asin":
            along = self.sub(self.mul(c.a, d.a), self.mul(c.b, d.b))
            return self.create(self.real(math.Atan2Op, self.a, along), across)
        half = self.real(math.Atan2Op, c.a, d.a)
        return self.create(self.add(half, half), self.negative(across))

    def asinh(self, value: SSAValue) -> SSAValue:
        """The inverse hyperbolic sine of a real number."""
        one, size = self.constant(1.0), self.real(math.AbsFOp, value)
        root = self.e.insert(complex.AbsOp(self.create(one, size)))
        more = self.mul(size, self.real(arith.DivfOp, size, self.add(root, one)))
        return self.real(math.CopySignOp, self.real(math.Log1pOp, self.add(size, more)), value)

    def atan(self) -> SSAValue:
        """From the distances to the poles ``i`` and ``-i``, of which only the nearer may vanish."""
        e, one = self.e, self.constant(1.0)
        height = self.real(math.AbsFOp, self.b)
        below, above = self.sub(one, height), self.add(one, height)
        near, far = (
            e.insert(complex.AbsOp(self.create(self.a, value))) for value in (below, above)
        )
        square = self.sub(self.mul(below, above), self.mul(self.a, self.a))
        angle = self.real(math.Atan2Op, self.add(self.a, self.a), square)
        # log(far / near) is half of log1p((far^2 - near^2) / near^2), which is exact far from them
        ratio = self.real(arith.DivfOp, self.real(arith.DivfOp, height, near), near)
        small = self.real(math.Log1pOp, self.mul(self.constant(4.0), ratio))
        large = self.real(math.LogOp, self.real(arith.DivfOp, far, near))
        close = e.insert(arith.CmpfOp(near, self.constant(0.5), "olt"))
        size = e.insert(
            arith.SelectOp(
                close,
                self.mul(self.constant(0.5), large),
                self.mul(self.constant(0.25), small),
            )
        )
        return self.create(
            self.mul(self.constant(0.5), angle), self.real(math.CopySignOp, size, self.b)
        )

    def add(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.real(arith.AddfOp, a, b)

    def sub(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.real(arith.SubfOp, a, b)

    def negative(self, value: SSAValue) -> SSAValue:
        return self.real(arith.NegfOp, value)

    def real(self, operation: Callable[..., Operation], *operands: SSAValue) -> SSAValue:
        return self.e.insert(operation(*operands))

    def mul(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.e.insert(arith.MulfOp(a, b, CONTRACT))

    def constant(self, value: float) -> SSAValue:
        return self.e.constant(value, self.part)

    def create(self, real: SSAValue, imaginary: SSAValue) -> SSAValue:
        return self.e.insert(complex.CreateOp(real, imaginary, self.type))  # type: ignore[arg-type]


def _integer(e: Emitter, op: Op, operands: Sequence[Any]) -> SSAValue:
    name = op.name
    unsigned = op.children[-1].dtype.kind == "u"
    if name in ("div", "floordiv", "rem"):
        operands = [operands[0], _divisor(e, operands[1], op.children[1])]
    if name in _INTEGER_COMPARE:
        predicate = _INTEGER_COMPARE[name]
        if unsigned and predicate.startswith("s"):
            predicate = "u" + predicate[1:]
        return e.insert(arith.CmpiOp(operands[0], operands[1], predicate))
    if unsigned and name in ("div", "floordiv"):
        return e.insert(arith.DivUIOp(*operands))
    if unsigned and name == "rem":
        return e.insert(arith.RemUIOp(*operands))
    if unsigned and name in ("min", "max"):
        return e.insert((arith.MinUIOp if name == "min" else arith.MaxUIOp)(*operands))
    if name in _INTEGER_BINARY:
        return e.insert(_INTEGER_BINARY[name](*operands))
    type = operands[-1].type
    if name == "rem":
        # Python's and GEM's remainder has the sign of the divisor
        quotient = e.insert(arith.FloorDivSIOp(*operands))
        return e.insert(arith.SubiOp(operands[0], e.insert(arith.MuliOp(quotient, operands[1]))))
    if name == "neg":
        return e.insert(arith.SubiOp(e.constant(0, type), operands[0]))
    if name == "abs":
        negative = e.insert(arith.SubiOp(e.constant(0, type), operands[0]))
        return e.insert(arith.MaxSIOp(operands[0], negative))
    raise _unsupported(op)


def _divisor(e: Emitter, value: SSAValue, expr: Expr) -> SSAValue:
    """A divisor that is not zero: both branches of a select run, and the processor may trap."""
    if isinstance(expr, Scalar) and int(expr.value):
        return value
    zero, one = (e.constant(number, value.type) for number in (0, 1))
    return e.insert(arith.SelectOp(e.insert(arith.CmpiOp(value, zero, "eq")), one, value))


def _cast(e: Emitter, value: SSAValue, source: np.dtype[Any], target: np.dtype[Any]) -> SSAValue:
    """A conversion between any two of the kernel's types."""
    if source == target:
        return value
    from_type, to_type = element_type(source), element_type(target)
    if target.kind == "b":
        zero = e.constant(np.zeros((), source)[()], from_type)
        if source.kind == "c":
            return e.insert(complex.NotEqualOp(value, zero))
        if source.kind == "f":
            return e.insert(arith.CmpfOp(value, zero, "une"))
        return e.insert(arith.CmpiOp(value, zero, "ne"))
    if target.kind == "c":
        part = to_type.element_type  # type: ignore[attr-defined]
        real = np.dtype(np.float32 if target.itemsize == 8 else np.float64)
        if source.kind == "c":
            old = np.dtype(np.float32 if source.itemsize == 8 else np.float64)
            parts = [e.insert(k(value)) for k in (complex.ReOp, complex.ImOp)]
            parts = [_cast(e, p, old, real) for p in parts]
        else:
            parts = [_cast(e, value, source, real), e.constant(0.0, part)]
        return e.insert(complex.CreateOp(parts[0], parts[1], to_type))  # type: ignore[arg-type]
    if source.kind == "c":
        old = np.dtype(np.float32 if source.itemsize == 8 else np.float64)
        return _cast(e, e.insert(complex.ReOp(value)), old, target)
    if target.kind == "f":
        if source.kind == "f":
            wider = target.itemsize > source.itemsize
            resize: Callable[..., Operation] = arith.ExtFOp if wider else arith.TruncFOp
            return e.insert(resize(value, to_type))
        if isinstance(from_type, IndexType):
            value = e.insert(arith.IndexCastOp(value, i64))
        convert = arith.UIToFPOp if source.kind in "ub" else arith.SIToFPOp
        return e.insert(convert(value, to_type))  # type: ignore[arg-type]
    if source.kind == "f":
        if isinstance(to_type, IndexType):
            return e.to_index(e.insert(arith.FPToSIOp(value, i64)))
        to_integer = arith.FPToUIOp if target.kind == "u" else arith.FPToSIOp
        return e.insert(to_integer(value, to_type))  # type: ignore[arg-type]
    if source.kind == "b":
        wide = e.insert(arith.ExtUIOp(value, i64 if isinstance(to_type, IndexType) else to_type))  # type: ignore[arg-type]
        return e.to_index(wide) if isinstance(to_type, IndexType) else wide
    if isinstance(to_type, IndexType):
        if source.kind == "u":
            value = e.insert(arith.ExtUIOp(value, i64))
        return e.to_index(value)
    if isinstance(from_type, IndexType):
        return e.insert(arith.IndexCastOp(value, to_type))
    return value


def load_cast(e: Emitter, value: SSAValue, dtype: np.dtype[Any]) -> SSAValue:
    """A value as it is in memory (:func:`storage_type`) as the kernel works on it."""
    if dtype.kind == "b":
        return e.insert(arith.CmpiOp(value, e.constant(0, IntegerType(8)), "ne"))
    if dtype == INDEX or (dtype.kind in "iu" and dtype.itemsize == 8):
        return e.to_index(value)
    return value


def store_cast(e: Emitter, value: SSAValue, dtype: np.dtype[Any]) -> SSAValue:
    """The reverse of :func:`load_cast`."""
    if dtype.kind == "b":
        return e.insert(arith.ExtUIOp(value, IntegerType(8)))
    if dtype.kind in "iu" and dtype.itemsize == 8:
        return e.insert(arith.IndexCastOp(value, i64))
    return value


def functions_of(module: ModuleOp) -> list[func.FuncOp]:
    """The functions of a module that have a body."""
    found = (op for op in module.ops if isinstance(op, func.FuncOp))
    return [function for function in found if not function.is_declaration]


def declare_functions(module: ModuleOp) -> None:
    """Declare the functions that a module calls and does not have: those of the C library."""
    block = module.body.block
    known = {op.sym_name.data for op in block.ops if isinstance(op, func.FuncOp)}
    for call in list(module.walk()):
        if isinstance(call, func.CallOp) and (name := call.callee.string_value()) not in known:
            known.add(name)
            types = [value.type for value in call.operands], [value.type for value in call.results]
            block.add_op(func.FuncOp.external(name, *types))


def emit_bodies(
    e: Emitter,
    roots: Sequence[Expr],
    leaf: Callable[[Expr, Mapping[Expr, SSAValue]], SSAValue | None],
    given: Mapping[Expr, SSAValue] | None = None,
) -> list[SSAValue]:
    """Operations for expressions, each node once however often it is used.

    Parameters
    ----------
    e
        Where to emit.
    roots
        The expressions.
    leaf
        Supplies the values of loads and dimensions, None for everything else; it is given the
        values emitted so far.
    given
        Values that exist already: what lies below them is not emitted.
    """
    values: dict[Expr, SSAValue] = dict(given or {})
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if node in values:
            continue
        if not expanded:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))
            continue
        found = leaf(node, values)
        if found is None:
            if isinstance(node, Scalar):
                found = e.constant(node.value, element_type(node.dtype))
            else:
                assert isinstance(node, Op)
                found = emit_operation(e, node, [values[child] for child in node.children])
        values[node] = found
    return [values[root] for root in roots]

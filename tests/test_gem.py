"""The GEM importer against a numpy evaluator of GEM, numpy einsum and values derived by hand."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import FIAT
import finat
import gem
import numpy as np
import pytest
import scipy.special
from finat.quadrature import make_quadrature
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import evaluate_assignments, evaluate_kernel

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels.gem import import_gem, prepare
from pyop3_mlir.kernels.program import IndexOf, Load, LocalKernel, Op, Table, postorder

Array = np.ndarray[Any, Any]
CELLS = 3
UINT = gem.gem.uint_type


def variables(nodes: Sequence[gem.Node]) -> dict[str, gem.Variable]:
    return {v.name: v for v in gem.extract_type(nodes, gem.Variable)}


def run(
    kernel: LocalKernel, data: Mapping[str, Array], dtype: Any = np.float64
) -> dict[str, Array]:
    """Values that the kernel gives to the arguments that it changes, [cells, slots]."""
    cells = next((len(values) for values in data.values()), CELLS)
    packs = [
        data[a.name] if a.name in data else np.zeros((cells, *a.shape), a.dtype)
        for a in kernel.arguments
    ]
    changed = evaluate_kernel(kernel, packs)
    return {argument.name: values for argument, values in changed.items()}


def translate(
    pairs: Sequence[tuple[gem.Node, gem.Node]],
    data: Mapping[str, Array],
    dtype: Any = np.float64,
    **options: Any,
) -> LocalKernel:
    """Import with one argument a Variable, those that are changed first."""
    names = variables([node for pair in pairs for node in pair])
    arguments = [
        (name, v.shape, data[name].dtype if name in data else dtype) for name, v in names.items()
    ]
    # GEM does not look into the indices of a Delta
    arguments += [(n, d.shape[1:], d.dtype) for n, d in data.items() if n not in names]
    return import_gem("test", arguments, pairs, scalar_dtype=dtype, **options)


def check(
    pairs: Sequence[tuple[gem.Node, gem.Node]],
    data: Mapping[str, Array],
    tolerance: float = 1e-13,
    dtype: Any = np.float64,
) -> LocalKernel:
    """Compare with the evaluator of GEM."""
    kernel = translate(pairs, data, dtype)
    found = run(kernel, data)
    bindings = dict(data) or {"nothing": np.zeros(CELLS)}
    for name, expected in evaluate_assignments(pairs, bindings).items():
        values = found.get(name, np.zeros_like(expected))
        scale = max(1.0, float(np.nanmax(np.abs(expected), initial=0.0)))
        np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance * scale)
    return kernel


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + len(shape)).uniform(0.2, 0.9, (CELLS, *shape))


def index(extent: int) -> gem.Index:
    return gem.Index(extent=extent)


def target(*indices: gem.Index, name: str = "A") -> gem.Node:
    """An lvalue with these indices."""
    shape = tuple(i.extent for i in indices)
    if not shape:
        return gem.Indexed(gem.Variable(name, (1,)), (0,))
    return gem.Indexed(gem.Variable(name, shape), indices)


def vector(name: str, i: Any, extent: int | None = None) -> gem.Node:
    shape = (extent if extent is not None else i.extent,)
    return gem.Indexed(gem.Variable(name, shape), (i,))


def sums(kernel: LocalKernel) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Extents of the dimensions and reductions of the statements that sum."""
    return [
        (tuple(d.extent for d in s.dims), tuple(d.extent for d in s.reductions))
        for s in kernel.statements
        if s.reductions
    ]


def operations(kernel: LocalKernel, name: str) -> int:
    """How often an operation is written in the program."""
    return sum(
        1
        for statement in kernel.statements
        for node in postorder(statement.bodies)
        if isinstance(node, Op) and node.name == name
    )


# -- each class of nodes ----------------------------------------------------------------------


def unary(name: str) -> Callable[[gem.Node, gem.Node], gem.Node]:
    return lambda x, y: gem.MathFunction(name, x)


SCALARS: dict[str, Callable[[gem.Node, gem.Node], gem.Node]] = {
    "Sum": lambda x, y: gem.Sum(x, y),
    "Product": lambda x, y: gem.Product(x, y),
    "Division": lambda x, y: gem.Division(x, y),
    "Power": lambda x, y: gem.Power(x, y),
    "Power with a whole exponent": lambda x, y: gem.Power(x, gem.Literal(3)),
    "Power with a negative exponent": lambda x, y: gem.Power(x, gem.Literal(-2)),
    "square root as Power": lambda x, y: gem.Power(x, gem.Literal(0.5)),
    "MinValue": lambda x, y: gem.MinValue(x, y),
    "MaxValue": lambda x, y: gem.MaxValue(x, y),
    "atan2": lambda x, y: gem.MathFunction("atan2", x, y),
    "Zero": lambda x, y: gem.Sum(x, gem.Product(gem.Zero(), y)),
    "Literal": lambda x, y: gem.Product(gem.Literal(0.3), x),
    "Conditional": lambda x, y: gem.Conditional(gem.Comparison("<", x, y), x, y),
    "LogicalNot": lambda x, y: gem.Conditional(
        gem.LogicalNot(gem.Comparison("<", x, y)), x, y
    ),
    "LogicalAnd": lambda x, y: gem.Conditional(
        gem.LogicalAnd(gem.Comparison("<", x, y), gem.Comparison(">", x, gem.Literal(0.5))), x, y
    ),
    "LogicalOr": lambda x, y: gem.Conditional(
        gem.LogicalOr(gem.Comparison("<", x, y), gem.Comparison(">", x, gem.Literal(0.5))), x, y
    ),
    "Piecewise": lambda x, y: gem.Piecewise(
        (x, gem.Comparison("<", x, y)), (gem.Literal(2.0), gem.Comparison(">=", x, y))
    ),
    **{
        f"Comparison {op}": lambda x, y, op=op: gem.Conditional(
            gem.Comparison(op, x, y), gem.Literal(1.5), x
        )
        for op in (">", ">=", "==", "!=", "<", "<=")
    },
    **{
        name: unary(name)
        for name in (
            "abs", "real", "imag", "conj", "sqrt", "exp", "ln", "cos", "sin", "tan", "cosh",
            "sinh", "tanh", "acos", "asin", "atan", "erf",
        )
    },
    **{
        f"cyl_bessel_{kind} of order {n}": lambda x, y, kind=kind, n=n: gem.MathFunction(
            f"cyl_bessel_{kind}", gem.Literal(n), x
        )
        for kind in "jyik"
        for n in (0, 1, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", SCALARS)
def test_scalar_nodes(case: str) -> None:
    i = index(4)
    expression = SCALARS[case](vector("x", i), vector("y", i))
    data = {"x": random(4), "y": random(4, seed=5)}
    check([(target(i), expression)], data)


def test_functions_match_scipy() -> None:
    i = index(4)
    x = random(4)
    for name, expected in (
        ("erf", scipy.special.erf(x)),
        ("cyl_bessel_k", scipy.special.kn(2, x)),
        ("cyl_bessel_y", scipy.special.yn(2, x)),
    ):
        order = [gem.Literal(2)] if name.startswith("cyl") else []
        expression = gem.MathFunction(name, *order, vector("x", i))
        kernel = translate([(target(i), expression)], {"x": x})
        np.testing.assert_allclose(run(kernel, {"x": x})["A"], expected, rtol=1e-14)


def test_bessel_functions_need_a_constant_integer_order() -> None:
    i = index(4)
    half = gem.MathFunction("cyl_bessel_j", gem.Literal(0.5), vector("x", i))
    with pytest.raises(UnsupportedLoopError, match="integer constant"):
        translate([(target(i), half)], {})
    varying = gem.MathFunction("cyl_bessel_j", vector("x", i), vector("x", i))
    with pytest.raises(UnsupportedLoopError, match="integer constant"):
        translate([(target(i), varying)], {})


def test_failure_is_raised_when_it_is_lowered() -> None:
    failure = gem.Failure((3,), NotImplementedError("no third derivatives"))
    i = index(3)
    with pytest.raises(UnsupportedLoopError, match="no third derivatives"):
        translate([(target(i), gem.Product(gem.Indexed(failure, (i,)), vector("x", i)))], {})


def test_constants_that_no_argument_needs() -> None:
    i, j = index(3), index(2)
    table = np.arange(6.0).reshape(3, 2)
    kernel = check([(target(i, j), gem.Indexed(gem.Literal(table), (i, j)))], {})
    assert not sums(kernel)
    check([(target(i), gem.Literal(2.5))], {})
    check([(target(), gem.Literal(2.5))], {})


def test_nothing_is_assigned() -> None:
    i = index(3)
    kernel = translate([(target(i), gem.Zero())], {})
    assert (kernel.statements, kernel.outputs) == ((), ())


# -- sums -------------------------------------------------------------------------------------


def test_a_contraction_stays_one() -> None:
    i, j = index(10), index(7)
    table = np.random.default_rng(0).standard_normal((10, 7))
    expression = gem.IndexSum(
        gem.Product(gem.Indexed(gem.Literal(table), (i, j)), vector("x", j)), (j,)
    )
    x = random(7)
    kernel = check([(target(i), expression)], {"x": x})
    assert sums(kernel) == [((10,), (7,))]
    np.testing.assert_allclose(run(kernel, {"x": x})["A"], x @ table.T, rtol=1e-13)


def test_nested_sums_keep_their_factorisation() -> None:
    i, j, p, q = index(4), index(5), index(6), index(7)
    rng = np.random.default_rng(0)
    first, second = (gem.Literal(rng.standard_normal(s)) for s in ((4, 6), (5, 7)))
    x = gem.Indexed(gem.Variable("x", (4, 5)), (i, j))
    inner = gem.IndexSum(gem.Product(gem.Indexed(second, (j, q)), x), (j,))
    outer = gem.IndexSum(gem.Product(gem.Indexed(first, (i, p)), inner), (i,))
    kernel = check([(target(p, q), outer)], {"x": random(4, 5)})
    assert sorted(sums(kernel)) == [((6, 7), (4,)), ((7, 4), (5,))] or sorted(sums(kernel)) == [
        ((4, 7), (5,)),
        ((6, 7), (4,)),
    ]


def test_directly_nested_sums_become_one() -> None:
    i, j, k = index(4), index(5), index(6)
    x = gem.Indexed(gem.Variable("x", (4, 5, 6)), (i, j, k))
    inner = gem.IndexSum(gem.Product(x, x), (k,))
    kernel = check([(target(i), gem.IndexSum(inner, (j,)))], {"x": random(4, 5, 6)})
    assert len(sums(kernel)) == 1


def test_two_sums_over_the_same_points_become_one() -> None:
    i, q = index(5), index(8)
    rng = np.random.default_rng(0)
    terms = []
    for name in "xy":
        table = gem.Indexed(gem.Literal(rng.standard_normal((5, 8))), (i, q))
        terms.append(gem.IndexSum(gem.Product(table, vector(name, q)), (q,)))
    kernel = check([(target(i), gem.Sum(*terms))], {"x": random(8), "y": random(8, seed=3)})
    assert sums(kernel) == [((5,), (8,))]
    assert len(kernel.statements) == 1


def test_sums_of_the_same_shape_are_one_statement() -> None:
    i, q = index(5), index(8)
    rng = np.random.default_rng(0)
    pairs = []
    for name in "xy":
        table = gem.Indexed(gem.Literal(rng.standard_normal((5, 8))), (i, q))
        total = gem.IndexSum(gem.Product(table, vector(name, q)), (q,))
        pairs.append((target(i, name=name.upper()), total))
    kernel = check(pairs, {"x": random(8), "y": random(8, seed=3)})
    (statement,) = kernel.statements
    assert len(statement.results) == 2


def test_what_has_fewer_indices_is_computed_before() -> None:
    i, q = index(5), index(8)
    table = gem.Indexed(gem.Literal(np.random.default_rng(0).random((5, 8))), (i, q))
    physics = gem.MathFunction("exp", gem.MathFunction("sin", vector("x", q)))
    scale = gem.MathFunction("ln", vector("s", 0, 1))
    expression = gem.IndexSum(gem.Product(table, gem.Product(scale, physics)), (q,))
    kernel = check([(target(i), expression)], {"x": random(8), "s": random(1)})
    shapes = [tuple(d.extent for d in s.dims) for s in kernel.statements]
    assert shapes == [(), (8,), (5,)]
    assert operations(kernel, "exp") == operations(kernel, "log") == 1


def test_a_common_subexpression_is_computed_once() -> None:
    i = index(6)
    common = gem.MathFunction("exp", vector("x", i))
    j = index(7)
    table = gem.Indexed(gem.Literal(np.random.default_rng(0).random((6, 7))), (i, j))
    pairs = [
        (target(i), gem.Product(common, vector("y", i))),
        (target(j, name="B"), gem.IndexSum(gem.Product(table, common), (i,))),
    ]
    kernel = check(pairs, {"x": random(6), "y": random(6, seed=3)})
    assert operations(kernel, "exp") == 1


def test_the_order_of_commuting_operands_does_not_matter() -> None:
    i = index(6)
    x, y = vector("x", i), vector("y", i)
    a = gem.MathFunction("exp", gem.Product(x, y))
    b = gem.MathFunction("exp", gem.Product(y, x))
    kernel = check([(target(i), gem.Sum(a, b))], {"x": random(6), "y": random(6, seed=3)})
    assert operations(kernel, "exp") == 1


def test_a_sum_of_constants_is_a_table() -> None:
    i, j, q = index(4), index(5), index(6)
    rng = np.random.default_rng(0)
    tables = [rng.standard_normal(s) for s in ((4, 6), (5, 6), (6,))]
    factors = [
        gem.Indexed(gem.Literal(t), indices)
        for t, indices in zip(tables, ((i, q), (j, q), (q,)), strict=True)
    ]
    expression = gem.IndexSum(gem.Product(*factors, vector("s", 0, 1)), (q,))
    s = random(1)
    kernel = check([(target(i, j), expression)], {"s": s})
    assert not sums(kernel)
    expected = np.einsum("iq,jq,q,c->cij", *tables, s[:, 0])
    np.testing.assert_allclose(run(kernel, {"s": s})["A"], expected.reshape(CELLS, -1), rtol=1e-12)


def test_two_contractions_with_tables_become_one_where_that_is_less_work() -> None:
    i, j, q = index(4), index(4), index(9)
    table = np.random.default_rng(0).standard_normal((9, 4))
    inner = gem.IndexSum(gem.Product(gem.Indexed(gem.Literal(table), (q, j)), vector("x", j)), (j,))
    expression = gem.IndexSum(gem.Product(gem.Indexed(gem.Literal(table), (q, i)), inner), (q,))
    kernel = check([(target(i), expression)], {"x": random(4)})
    assert sums(kernel) == [((4,), (4,))]
    # with few points the two contractions are kept
    q = index(2)
    table = table[:2]
    inner = gem.IndexSum(gem.Product(gem.Indexed(gem.Literal(table), (q, j)), vector("x", j)), (j,))
    expression = gem.IndexSum(gem.Product(gem.Indexed(gem.Literal(table), (q, i)), inner), (q,))
    kernel = check([(target(i), expression)], {"x": random(4)})
    assert sums(kernel) == [((2,), (4,)), ((4,), (2,))]


def test_a_sum_over_an_index_that_only_constants_have() -> None:
    # the table does not vary over q, so that folding it leaves nothing that does
    i, q = index(3), index(5)
    table = gem.Indexed(gem.Literal(np.ones((3, 5))), (i, q))
    check([(target(i), gem.IndexSum(gem.Product(table, vector("x", i)), (q,)))], {"x": random(3)})


def test_a_scalar_variable_is_an_lvalue() -> None:
    q = index(5)
    pairs = [(gem.Variable("A", ()), gem.IndexSum(vector("x", q), (q,)))]
    check(pairs, {"x": random(5)})
    check(prepare(pairs), {"x": random(5)})


def test_a_scalar_result() -> None:
    q = index(20)
    expression = gem.IndexSum(gem.Power(vector("x", q), gem.Literal(2)), (q,))
    x = random(20)
    kernel = check([(target(), expression)], {"x": x})
    assert sums(kernel) == [((), (20,))]
    np.testing.assert_allclose(run(kernel, {"x": x})["A"][:, 0], (x**2).sum(axis=1), rtol=1e-14)


# -- tensors and indices ----------------------------------------------------------------------


def test_flexibly_indexed_with_strides_and_offsets() -> None:
    i, j = index(3), index(2)
    x = gem.Variable("x", (20,))
    source = gem.FlexiblyIndexed(x, ((1, ((i, 5), (j, 2))),))
    out = gem.FlexiblyIndexed(gem.Variable("A", (9,)), ((2, ((i, 2), (j, 1))),))
    values = random(20)
    kernel = check([(out, source)], {"x": values})
    expected = np.zeros((CELLS, 9))
    for a in range(3):
        for b in range(2):
            expected[:, 2 + 2 * a + b] += values[:, 1 + 5 * a + 2 * b]
    np.testing.assert_allclose(run(kernel, {"x": values})["A"], expected, rtol=1e-15)


@pytest.mark.parametrize("shape", [(24,), (4, 6), (4, 3, 2), (2, 2, 6), (1, 24), (8, 3), (5, 5)])
def test_arguments_of_another_shape_than_their_variable(shape: tuple[int, ...]) -> None:
    i, c = index(4), index(3)
    flat = gem.Variable("x", (24,))
    # vector-valued, with the second half left out
    source = gem.FlexiblyIndexed(flat, ((0, ((i, 6), (c, 2))),))
    out = gem.FlexiblyIndexed(gem.Variable("A", (12,)), ((0, ((i, 3), (c, 1))),))
    arguments = [("A", (4, 3), np.float64), ("x", shape, np.float64)]
    if math.prod(shape) != 24:
        with pytest.raises(ValueError, match="shape"):
            import_gem("test", arguments, [(out, source)])
        return
    values = random(24)
    kernel = import_gem("test", arguments, [(out, source)])
    found = run(kernel, {"x": values.reshape(CELLS, *shape)})["A"]
    np.testing.assert_array_equal(found, values[:, ::2])
    if shape == (4, 3, 2):
        loads = [
            n
            for s in kernel.statements
            for n in postorder(s.bodies)
            if isinstance(n, Load) and n.source.name == "x"
        ]
        # affine positions need no division
        assert all(isinstance(k, IndexOf) for k in loads[0].children[:2])


def test_component_tensors_permute() -> None:
    i, j, k, m = index(3), index(4), index(4), index(3)
    a = gem.Indexed(gem.Variable("a", (3, 4)), (i, j))
    transposed = gem.ComponentTensor(gem.Product(a, a), (j, i))
    check([(target(k, m), gem.Indexed(transposed, (k, m)))], {"a": random(3, 4)})


def test_list_tensors() -> None:
    x, y = (gem.Indexed(gem.Variable("x", (2,)), (n,)) for n in (0, 1))
    entries = [[x, y], [gem.Product(x, y), gem.Literal(2.0)], [gem.Zero(), gem.Sum(x, y)]]
    tensor = gem.ListTensor(np.array(entries, dtype=object))
    i, j = index(3), index(2)
    kernel = check([(target(i, j), gem.Indexed(tensor, (i, j)))], {"x": random(2)})
    # an entry an assignment, rather than a choice at run time
    assert operations(kernel, "select") == 0
    check([(target(), gem.IndexSum(gem.Indexed(tensor, (i, j)), (i, j)))], {"x": random(2)})


def test_long_list_tensors_are_chosen_from() -> None:
    entries = [gem.Power(vector("x", n, 7), gem.Literal(n + 1)) for n in range(7)]
    tensor = gem.ListTensor(np.array(entries, dtype=object))
    i = index(7)
    check([(target(i), gem.Indexed(tensor, (i,)))], {"x": random(7)})


def test_identity_and_delta() -> None:
    i, j, k = index(5), index(5), index(5)
    x = vector("x", j)
    data = {"x": random(5)}
    kernel = check(
        [(target(i), gem.IndexSum(gem.Product(gem.Indexed(gem.Identity(5), (i, j)), x), (j,)))],
        data,
    )
    assert not sums(kernel)
    kernel = check([(target(i), gem.IndexSum(gem.Product(gem.Delta(i, j), x), (j,)))], data)
    assert not sums(kernel)
    kernel = check([(target(i, j), gem.Product(gem.Delta(i, j), x))], data)
    (output,) = kernel.outputs
    assert output.value.shape == (5,)
    check([(target(i), gem.Product(gem.Delta(i, 2), vector("x", i)))], data)
    chain = gem.Product(gem.Delta(i, j), gem.Product(gem.Delta(j, k), vector("x", k)))
    kernel = check([(target(i), gem.IndexSum(chain, (j, k)))], data)
    assert not sums(kernel)
    mixed = gem.Sum(gem.Product(gem.Delta(i, j), x), gem.Product(x, vector("x", i)))
    check([(target(i), gem.IndexSum(mixed, (j,)))], data)
    check(
        [(target(i, j), gem.Conditional(gem.Comparison("<", gem.Delta(i, j), x), x, x * x))], data
    )


def test_concatenate() -> None:
    i, j, k = index(2), index(3), index(9)
    first = gem.ComponentTensor(gem.Indexed(gem.Variable("x", (2, 3)), (i, j)), (i, j))
    second = gem.ListTensor(np.array([vector("y", 0, 2), gem.Literal(3.0)], dtype=object))
    tensor = gem.Concatenate(first, gem.MathFunction("exp", vector("y", 1, 2)), second)
    data = {"x": random(2, 3), "y": random(2)}
    check([(target(k), gem.Indexed(tensor, (k,)))], data)
    flexible = gem.FlexiblyIndexed(gem.Variable("A", (18,)), ((1, ((k, 1),)),))
    check([(flexible, gem.Indexed(tensor, (k,)))], data)
    for position in range(9):
        check([(target(), gem.Indexed(tensor, (position,)))], data)
    table = gem.Indexed(gem.Literal(np.random.default_rng(0).random((9,))), (k,))
    check([(target(), gem.IndexSum(gem.Product(table, gem.Indexed(tensor, (k,))), (k,)))], data)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_inverse(n: int) -> None:
    i, j = index(n), index(n)
    a = np.random.default_rng(n).standard_normal((CELLS, n, n)) + 3 * np.eye(n)
    inverse = gem.Inverse(gem.Variable("a", (n, n)))
    kernel = check([(target(i, j), gem.Indexed(inverse, (i, j)))], {"a": a}, 1e-12)
    found = run(kernel, {"a": a})["A"].reshape(a.shape)
    np.testing.assert_allclose(found, np.linalg.inv(a), rtol=1e-11)
    check([(target(), gem.Indexed(inverse, (n - 1, 0)))], {"a": a}, 1e-12)
    trace = gem.IndexSum(gem.Indexed(inverse, (i, i)), (i,)) if n > 1 else gem.Zero()
    check([(target(), trace)], {"a": a}, 1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 7])
@pytest.mark.parametrize("columns", [(), (2,), (5,)])
def test_solve(n: int, columns: tuple[int, ...]) -> None:
    indices = [index(extent) for extent in (n, *columns)]
    a = np.random.default_rng(n).standard_normal((CELLS, n, n)) + 3 * np.eye(n)
    b = random(n, *columns)
    solution = gem.Solve(gem.Variable("a", (n, n)), gem.Variable("b", (n, *columns)))
    kernel = check([(target(*indices), gem.Indexed(solution, indices))], {"a": a, "b": b}, 1e-12)
    found = run(kernel, {"a": a, "b": b})["A"].reshape(b.shape)
    expected = np.linalg.solve(a, b.reshape(CELLS, n, -1)).reshape(b.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("n", [3, 5, 8])
def test_solutions_are_added_but_not_their_systems(n: int) -> None:
    """A sum of sums is one sum; of two systems it is two solutions that are added."""
    i, j, k = index(n), index(n), index(n)
    rng = np.random.default_rng(n)
    data = {name: rng.standard_normal((CELLS, n, n)) + 3 * np.eye(n) for name in "ac"}
    data |= {"b": random(n), "d": random(n)}
    first, second = (
        gem.Indexed(gem.Solve(gem.Variable(m, (n, n)), gem.Variable(v, (n,))), (i,))
        for m, v in ("ab", "cd")
    )
    difference = gem.Sum(first, gem.Product(gem.Literal(-2.0), second))
    kernel = check([(target(i), gem.Sum(first, second))], data, 1e-12)
    found = run(kernel, data)["A"]
    expected = sum(np.linalg.solve(data[m], data[v][..., None])[..., 0] for m, v in ("ab", "cd"))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    check([(target(i), difference), (target(i), first)], data, 1e-12)
    # constant tables that meet a solution are not taken into its system either
    table = gem.Literal(rng.standard_normal((4, n)))
    product = gem.Product(gem.Indexed(table, (q := index(4), i)), first)
    check([(target(q), gem.IndexSum(product, (i,)))], data, 1e-12)
    outer = gem.Product(gem.Indexed(gem.Literal(rng.standard_normal((n, n))), (k, j)), second)
    check([(target(i, k), gem.IndexSum(gem.Product(outer, vector("b", j)), (j,)))], data, 1e-12)


def test_inverse_at_every_quadrature_point() -> None:
    for n in (2, 3, 4, 7):
        q, r, c, i, j = index(5), index(n), index(n), index(n), index(n)
        entry = gem.Indexed(gem.Variable("a", (5, n, n)), (q, r, c))
        matrix = gem.ComponentTensor(gem.Sum(gem.Delta(r, c), gem.Product(entry, entry)), (r, c))
        a = random(5, n, n)
        inverse = gem.Indexed(gem.Inverse(matrix), (i, j))
        check([(target(q, i, j), inverse)], {"a": a}, 1e-10)
        total = gem.IndexSum(gem.Product(inverse, vector("x", q)), (q,))
        check([(target(i, j), total)], {"a": a, "x": random(5)}, 1e-10)


@pytest.mark.parametrize("n", [3, 5])
def test_inverse_of_a_constant_matrix_needs_no_elimination(n: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((n, n)) + 3 * np.eye(n)
    i, j = index(n), index(n)
    inverse = gem.Inverse(gem.Literal(matrix))
    expression = gem.IndexSum(gem.Product(gem.Indexed(inverse, (i, j)), vector("x", j)), (j,))
    kernel = check([(target(i), expression)], {"x": random(n)})
    assert len(kernel.statements) == 1
    assert operations(kernel, "div") == 0


def facet_data() -> dict[str, Array]:
    return {"f": np.array([[0], [2], [1]], UINT), "x": random(4)}


def test_variable_index() -> None:
    facet = gem.VariableIndex(gem.Indexed(gem.Variable("f", (1,), dtype=UINT), (0,)))
    table = gem.Literal(np.random.default_rng(0).standard_normal((3, 4, 6)))
    i, q = index(4), index(6)
    phi = gem.Indexed(table, (facet, i, q))
    data = facet_data()
    check([(target(q), gem.IndexSum(gem.Product(phi, vector("x", i)), (i,)))], data)
    check([(target(), gem.Indexed(gem.Variable("x", (4,)), (facet,)))], data)
    check([(target(i), gem.Product(gem.Delta(i, facet), vector("x", i)))], data)
    shifted = gem.FlexiblyIndexed(gem.Variable("x", (4,)), ((1, ((facet, 1),)),))
    check([(target(), shifted)], data)


def test_orientations() -> None:
    raw = gem.Indexed(gem.Variable("o", (2,), dtype=UINT), (1,))
    orientation = gem.OrientationVariableIndex(raw)
    quotient, rest = orientation // 2, orientation % 2
    table = gem.Literal(np.random.default_rng(0).standard_normal((4, 2, 5)))
    i = index(5)
    o = np.array([[9, 0], [9, 5], [9, 7]], UINT)
    expression = gem.Product(gem.Indexed(table, (quotient, rest, i)), vector("x", i))
    kernel = check([(target(i), expression)], {"o": o, "x": random(5)})
    found = run(kernel, {"o": o, "x": random(5)})["A"]
    expected = table.array[o[:, 1] // 2, o[:, 1] % 2] * random(5)
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_an_index_may_be_indexed_itself() -> None:
    i, j = index(3), index(4)
    where = gem.VariableIndex(gem.Indexed(gem.Variable("p", (3,), dtype=UINT), (i,)))
    x = gem.Indexed(gem.Variable("x", (5, 4)), (where, j))
    p = np.array([[0, 4, 2], [1, 1, 1], [4, 3, 0]], UINT)
    check([(target(i, j), x)], {"p": p, "x": random(5, 4)})


def test_data_cannot_index_out_of_bounds() -> None:
    facet = gem.VariableIndex(gem.Indexed(gem.Variable("f", (1,), dtype=UINT), (0,)))
    i = index(4)
    expression = gem.Indexed(gem.Literal(np.arange(12.0).reshape(3, 4)), (facet, i))
    f = np.array([[3], [2**31], [2**32 - 1]], UINT)
    kernel = translate([(target(i), expression)], {"f": f})
    np.testing.assert_array_equal(run(kernel, {"f": f})["A"], [[8, 9, 10, 11]] * 3)


def test_an_lvalue_that_depends_on_data_is_refused() -> None:
    facet = gem.VariableIndex(gem.Indexed(gem.Variable("f", (1,), dtype=UINT), (0,)))
    out = gem.Indexed(gem.Variable("A", (3,)), (facet,))
    with pytest.raises(UnsupportedLoopError, match="depends on data"):
        translate([(out, gem.Literal(1.0))], {"f": np.zeros((1, 1), UINT)})


def test_integers_in_comparisons_and_arithmetic() -> None:
    o = gem.Indexed(gem.Variable("o", (1,)), (0,))
    i = index(3)
    sign = gem.Conditional(gem.Comparison("==", o, gem.Literal(1)), gem.Literal(-1), gem.Literal(1))
    data = {"o": np.array([[0], [1], [2]], np.int32), "x": random(3)}
    check([(target(i), gem.Product(sign, vector("x", i)))], data)
    check([(target(i), gem.Product(o, vector("x", i)))], data)


# -- assignments ------------------------------------------------------------------------------


def test_several_assignments_to_one_argument_add_up() -> None:
    i, j = index(3), index(3)
    pairs = [
        (gem.Indexed(gem.Variable("A", (3,)), (i,)), vector("x", i)),
        (gem.Indexed(gem.Variable("A", (3,)), (j,)), vector("y", j)),
        (gem.Indexed(gem.Variable("A", (3,)), (1,)), gem.Literal(10.0)),
    ]
    check(pairs, {"x": random(3), "y": random(3, seed=2)})


def test_an_assignment_broadcasts() -> None:
    i, j = index(3), index(4)
    kernel = check([(target(i, j), vector("x", i))], {"x": random(3)})
    assert kernel.outputs[0].value.shape == (3, 4)


def test_the_last_index_of_the_lvalue_is_the_last_dimension() -> None:
    j, i, q = index(5), index(4), index(6)  # made in another order than used
    x = gem.Indexed(gem.Variable("x", (4, 6)), (i, q))
    y = gem.Indexed(gem.Variable("y", (5, 6)), (j, q))
    kernel = check(
        [(target(i, j), gem.IndexSum(gem.Product(x, gem.Product(y, y)), (q,)))],
        {"x": random(4, 6), "y": random(5, 6)},
    )
    assert kernel.outputs[0].value.shape == (4, 5)


def test_what_is_not_used_is_not_computed() -> None:
    i = index(3)
    zero = gem.Product(gem.Literal(0.0), gem.MathFunction("exp", vector("x", i)))
    kernel = translate([(target(i), gem.Sum(vector("x", i), zero))], {})
    assert operations(kernel, "exp") == 0


@pytest.mark.parametrize("whole", [("A",), ()])
def test_an_argument_that_is_written_gets_one_output(whole: tuple[str, ...]) -> None:
    a = gem.Variable("A", (8,))
    i, j = index(3), index(2)
    pairs = [
        (gem.FlexiblyIndexed(a, ((0, ((i, 2),)),)), vector("x", i)),
        (gem.FlexiblyIndexed(a, ((1, ((j, 4),)),)), gem.Product(vector("y", j), vector("y", j))),
        (gem.Indexed(a, (0,)), gem.Literal(1.0)),
    ]
    data = {"x": random(3), "y": random(2)}
    kernel = translate(pairs, data, whole=whole)
    expected = evaluate_assignments(pairs, data)["A"]
    np.testing.assert_allclose(run(kernel, data)["A"], expected, rtol=1e-15)
    if whole:
        (output,) = kernel.outputs
        assert output.value.shape == (8,)


def test_an_argument_that_is_written_but_not_assigned_becomes_zero() -> None:
    i = index(3)
    kernel = translate([(target(i), gem.Zero())], {}, whole=["A"])
    np.testing.assert_array_equal(run(kernel, {})["A"], 0)


def test_a_covering_assignment_is_left_as_it_is() -> None:
    i, j = index(3), index(2)
    out = gem.FlexiblyIndexed(gem.Variable("A", (6,)), ((0, ((i, 2), (j, 1))),))
    x = gem.Indexed(gem.Variable("x", (3, 2)), (i, j))
    kernel = translate([(out, gem.Product(x, x))], {}, whole=["A"])
    assert kernel.outputs[0].value.shape == (3, 2)


def test_wrong_assignments_are_refused() -> None:
    i, j = index(3), index(3)
    with pytest.raises(ValueError, match="free"):
        translate([(target(i), vector("x", j))], {})
    with pytest.raises(ValueError, match="not an argument"):
        import_gem("k", [("A", (3,), float)], [(target(i), vector("x", i))])
    with pytest.raises(ValueError, match="cannot assign"):
        import_gem("k", [("x", (3,), float)], [(target(i), vector("x", i))])
    with pytest.raises(ValueError, match="same name"):
        import_gem("k", [("A", (3,), float), ("A", (3,), float)], [])
    with pytest.raises(ValueError, match="not a type of scalars"):
        import_gem("k", [], [], scalar_dtype=np.int32)


# -- special values ---------------------------------------------------------------------------


def test_a_conditional_guards_against_nan() -> None:
    i = index(3)
    x = vector("x", i)
    positive = gem.Comparison(">", x, gem.Literal(0.0))
    values = np.array([[1.0, -1.0, 0.0]] * CELLS)
    for unreachable in (
        gem.Literal(np.nan),
        gem.MathFunction("sqrt", x),
        gem.Division(gem.Literal(1.0), gem.MathFunction("sqrt", x)),
    ):
        guarded = gem.Conditional(positive, x, gem.Zero())
        expression = gem.Conditional(gem.LogicalNot(positive), guarded, unreachable)
        kernel = translate([(target(i), expression)], {"x": values})
        found = run(kernel, {"x": values})["A"]
        assert np.isfinite(found[:, 1:]).all()
    total = gem.IndexSum(gem.Conditional(positive, x, gem.Literal(np.nan)), (i,))
    kernel = translate([(target(), total)], {})
    assert np.isnan(run(kernel, {"x": values})["A"]).all()
    good = np.abs(values) + 1
    np.testing.assert_array_equal(run(kernel, {"x": good})["A"][:, 0], good.sum(axis=1))


def test_a_table_of_nan_is_kept() -> None:
    i = index(3)
    table = gem.Literal(np.array([1.0, np.nan, 2.0]))
    x = random(3)
    kernel = translate([(target(i), gem.Product(gem.Indexed(table, (i,)), vector("x", i)))], {})
    found = run(kernel, {"x": x})["A"]
    assert np.isnan(found[:, 1]).all()
    assert np.isfinite(found[:, [0, 2]]).all()


def test_division_by_a_literal_zero() -> None:
    i = index(3)
    kernel = translate(
        [(target(i), gem.Division(vector("x", i), gem.Literal(0.0)))], {"x": random(3)}
    )
    assert np.isposinf(run(kernel, {"x": random(3)})["A"]).all()


# -- types ------------------------------------------------------------------------------------


def test_single_precision() -> None:
    i, q = index(4), index(6)
    table = np.random.default_rng(0).standard_normal((6, 4))
    physics = gem.Product(gem.Literal(0.1), gem.MathFunction("exp", vector("x", q)))
    expression = gem.IndexSum(gem.Product(gem.Indexed(gem.Literal(table), (q, i)), physics), (q,))
    data = {"x": random(6).astype(np.float32)}
    kernel = check([(target(i), expression)], data, 1e-5, np.float32)
    kinds = {
        n.dtype for s in kernel.statements for n in postorder(s.bodies) if n.dtype.kind in "fc"
    }
    assert kinds == {np.dtype(np.float32)}


@pytest.mark.parametrize("dtype", [np.complex128, np.complex64])
def test_complex(dtype: Any) -> None:
    i, q = index(4), index(6)
    table = np.random.default_rng(0).standard_normal((6, 4))
    x = vector("x", q)
    conjugate = gem.MathFunction("conj", x)
    modulus = gem.MathFunction("abs", x)
    physics = gem.Sum(gem.Product(conjugate, modulus), gem.Literal(0.5 + 2j))
    parts = gem.Product(gem.MathFunction("real", x), gem.MathFunction("imag", x))
    physics = gem.Sum(physics, gem.Product(parts, gem.MathFunction("sqrt", gem.Literal(-2.0))))
    expression = gem.IndexSum(gem.Product(gem.Indexed(gem.Literal(table), (q, i)), physics), (q,))
    data = {"x": (random(6) + 1j * random(6, seed=4)).astype(dtype)}
    kernel = translate([(target(i), expression)], data, dtype)
    found = run(kernel, data)["A"]
    assert found.dtype == dtype
    v = data["x"].astype(complex)
    points = v.conj() * abs(v) + 0.5 + 2j + v.real * v.imag * 1j * np.sqrt(2)
    np.testing.assert_allclose(found, points @ table, rtol=200 * np.finfo(dtype).eps)
    # a real table is not stored twice as large
    tables = {
        n.source
        for s in kernel.statements
        for n in postorder(s.bodies)
        if isinstance(n, Load) and isinstance(n.source, Table) and n.source.size > 1
    }
    assert {t.dtype.kind for t in tables} == {"f"}


def test_complex_comparisons_use_the_real_part() -> None:
    i = index(3)
    x = vector("x", i)
    expression = gem.Conditional(gem.Comparison("<", x, gem.Literal(0.5)), x, gem.Literal(2.0))
    data = {"x": random(3) + 1j}
    found = run(translate([(target(i), expression)], data, np.complex128), data)["A"]
    np.testing.assert_array_equal(found, np.where(data["x"].real < 0.5, data["x"], 2.0))


def test_erf_of_a_complex_number_is_refused() -> None:
    i = index(3)
    with pytest.raises(UnsupportedLoopError, match="complex"):
        translate([(target(i), gem.MathFunction("erf", vector("x", i)))], {}, np.complex128)


# -- elements ---------------------------------------------------------------------------------


class Simplex:
    """Forms on an affine simplex, written in GEM by hand with FInAT, and by einsum."""

    def __init__(self, dim: int, degree: int, quadrature: int) -> None:
        self.dim = dim
        cell = FIAT.ufc_simplex(dim)
        self.element = finat.Lagrange(cell, degree)
        self.rule = make_quadrature(cell, quadrature)
        self.points = self.rule.point_set
        self.q = self.points.indices
        self.n = self.element.space_dimension()
        self.coords = gem.Variable("coords", (dim + 1, dim))
        vertex = finat.Lagrange(cell, 1)
        r = vertex.get_indices()
        jacobian = np.empty((dim, dim), object)
        for c, d in np.ndindex(dim, dim):
            slope = gem.Indexed(vertex.basis_evaluation(1, self.points)[self.unit(d)], r)
            x = gem.Indexed(self.coords, (r[0], c))
            jacobian[c, d] = gem.IndexSum(gem.Product(slope, x), r)
        self.inverse = gem.Inverse(gem.ListTensor(jacobian))
        j = jacobian
        if dim == 2:
            det = j[0, 0] * j[1, 1] - j[0, 1] * j[1, 0]
        else:
            det = gem.Zero()
            for a, b, c in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
                det = det + j[0, a] * (j[1, b] * j[2, c] - j[1, c] * j[2, b])
        self.weight = gem.Product(self.rule.weight_expression, gem.MathFunction("abs", det))
        # numbers for einsum
        points = self.rule.points if hasattr(self.rule, "points") else self.points.points
        tables = self.element._element.tabulate(1, np.asarray(points))
        self.phi = tables[(0,) * dim]
        self.dphi = np.stack([tables[self.unit(d)] for d in range(dim)])
        self.w = np.asarray(self.rule.weights)

    def unit(self, d: int) -> tuple[int, ...]:
        return tuple(int(d == e) for e in range(self.dim))

    def value(self, i: Sequence[gem.Index]) -> gem.Node:
        return gem.Indexed(self.element.basis_evaluation(0, self.points)[(0,) * self.dim], i)

    def gradient(self, i: Sequence[gem.Index]) -> list[gem.Node]:
        tables = self.element.basis_evaluation(1, self.points)
        reference = [gem.Indexed(tables[self.unit(d)], i) for d in range(self.dim)]
        return [
            gem.Sum(
                *(
                    gem.Product(reference[d], gem.Indexed(self.inverse, (d, c)))
                    for d in range(self.dim)
                )
            )
            for c in range(self.dim)
        ]

    def form(self, what: str, rank: int) -> list[tuple[gem.Node, gem.Node]]:
        """Mass or Laplace, as a matrix or its action; not summed over the points."""
        i, j = self.element.get_indices(), self.element.get_indices()
        test = [self.value(i)] if what == "mass" else self.gradient(i)
        trial = [self.value(j)] if what == "mass" else self.gradient(j)
        if rank == 1:
            u = gem.Indexed(gem.Variable("u", (self.n,)), j)
            trial = [gem.IndexSum(gem.Product(t, u), j) for t in trial]
        integrand = (
            gem.Sum(*map(gem.Product, test, trial)) if what != "mass" else test[0] * trial[0]
        )
        lvalue = gem.Indexed(gem.Variable("A", (self.n,) * rank), i if rank == 1 else i + j)
        return [(lvalue, gem.Product(self.weight, integrand))]

    def matrix(self, what: str, x: Array) -> Array:
        """The element matrices for vertices [cells, vertices, dim]."""
        jacobian = (x[:, 1:] - x[:, :1]).transpose(0, 2, 1)
        scale = np.abs(np.linalg.det(jacobian))
        if what == "mass":
            return np.einsum("q,iq,jq,c->cij", self.w, self.phi, self.phi, scale)
        gradient = np.einsum("diq,cde->ceiq", self.dphi, np.linalg.inv(jacobian))
        return np.einsum("q,ceiq,cejq,c->cij", self.w, gradient, gradient, scale)


def cells(dim: int) -> Array:
    corners = np.vstack([np.zeros((1, dim)), np.eye(dim)])
    return corners + 0.1 * np.random.default_rng(dim).standard_normal((CELLS, dim + 1, dim))


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("what", ["mass", "laplace"])
@pytest.mark.parametrize(("dim", "degree"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)])
def test_golden_elements(dim: int, degree: int, what: str, rank: int, prepared: bool) -> None:
    element = Simplex(dim, degree, 2 * degree if what == "mass" else max(2 * degree - 2, 1))
    pairs = element.form(what, rank)
    if prepared:
        pairs = prepare(pairs, element.q)
    else:
        pairs = [(lvalue, gem.index_sum(e, element.q)) for lvalue, e in pairs]
    data = {"coords": cells(dim), "u": random(element.n)}
    kernel = translate(pairs, data)
    found = run(kernel, data)["A"]
    expected = element.matrix(what, data["coords"])
    if rank == 1:
        expected = np.einsum("cij,cj->ci", expected, data["u"])
    expected = expected.reshape(CELLS, -1)
    assert np.abs(found - expected).max() < 1e-13 * np.abs(expected).max()


def test_the_geometry_is_one_statement_without_dimensions() -> None:
    element = Simplex(3, 2, 2)
    kernel = translate(prepare(element.form("laplace", 1), element.q), {})
    assert [len(s.dims) for s in kernel.statements].count(0) == 1
    first = kernel.statements[0]
    assert (first.dims, first.reductions) == ((), ())
    # the symmetric metric times the determinant, or less
    assert len(first.results) <= 10


def test_p1_stiffness_of_the_unit_triangle() -> None:
    element = Simplex(2, 1, 1)
    kernel = translate(prepare(element.form("laplace", 2), element.q), {})
    x = np.array([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    found = run(kernel, {"coords": x})["A"].reshape(3, 3)
    np.testing.assert_allclose(
        found, np.array([[2, -1, -1], [-1, 1, 0], [-1, 0, 1]]) / 2, atol=1e-15
    )


def test_p1_mass_of_the_unit_triangle() -> None:
    element = Simplex(2, 1, 2)
    kernel = translate(prepare(element.form("mass", 2), element.q), {})
    x = np.array([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    found = run(kernel, {"coords": x})["A"].reshape(3, 3)
    np.testing.assert_allclose(found, (np.ones((3, 3)) + np.eye(3)) / 24, atol=1e-15)


def test_a_mass_action_is_one_contraction_with_the_element_matrix() -> None:
    element = Simplex(3, 2, 4)
    kernel = translate(prepare(element.form("mass", 1), element.q), {})
    assert sums(kernel) == [((10,), (10,))]


def test_a_nonlinear_residual_keeps_both_contractions() -> None:
    element = Simplex(2, 2, 4)
    i, k = element.element.get_indices(), element.element.get_indices()
    u = gem.IndexSum(
        gem.Product(element.value(k), gem.Indexed(gem.Variable("u", (element.n,)), k)), k
    )
    physics = gem.MathFunction("exp", u)
    lvalue = gem.Indexed(gem.Variable("A", (element.n,)), i)
    pairs = [(lvalue, element.weight * element.value(i) * physics)]
    data = {"coords": cells(2), "u": random(element.n)}
    kernel = translate(prepare(pairs, element.q), data)
    points = len(element.w)
    assert sums(kernel) == [((points,), (6,)), ((6,), (points,))]
    jacobian = (data["coords"][:, 1:] - data["coords"][:, :1]).transpose(0, 2, 1)
    values = np.exp(data["u"] @ element.phi)
    expected = np.einsum(
        "q,iq,cq,c->ci", element.w, element.phi, values, np.abs(np.linalg.det(jacobian))
    )
    np.testing.assert_allclose(run(kernel, data)["A"], expected, rtol=1e-13)


def test_vector_elements() -> None:
    # A[i, c] = sum_q w phi_i u_c, as FInAT's TensorFiniteElement has it: with Deltas
    cell = FIAT.ufc_simplex(2)
    scalar = finat.Lagrange(cell, 2)
    element = finat.TensorFiniteElement(scalar, (2,))
    rule = make_quadrature(cell, 4)
    i, k, c = element.get_indices(), element.get_indices(), element.get_value_indices()
    tensor = element.basis_evaluation(0, rule.point_set)[(0, 0)]
    u = gem.Indexed(gem.Variable("u", (6, 2)), k)
    value = gem.IndexSum(gem.Product(gem.Indexed(tensor, k + c), u), k)
    integrand = gem.IndexSum(gem.Product(gem.Indexed(tensor, i + c), value), c)
    pairs = [
        (
            gem.Indexed(gem.Variable("A", (6, 2)), i),
            gem.Product(rule.weight_expression, integrand),
        )
    ]
    q = rule.point_set.indices
    data = {"u": random(6, 2)}
    phi = scalar._element.tabulate(0, rule.point_set.points)[(0, 0)]
    expected = np.einsum("q,iq,jq,cjd->cid", rule.weights, phi, phi, data["u"])
    for assignments in (prepare(pairs, q), [(pairs[0][0], gem.index_sum(pairs[0][1], q))]):
        kernel = translate(assignments, data)
        found = run(kernel, data)["A"].reshape(CELLS, 6, 2)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
        # the Deltas have gone: no sum runs over components
        assert all(2 not in reductions for _, reductions in sums(kernel))


# -- random expressions -----------------------------------------------------------------------

INDICES = {"i": index(3), "j": index(2), "q": index(4)}
DATA_SHAPES = {"s": (1,), "x": (3,), "y": (4, 2), "z": (24,), "m": (3, 3)}


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> gem.Node:
    """A scalar expression with free indices among i, j and q."""
    i, j, q = INDICES["i"], INDICES["j"], INDICES["q"]
    facet = gem.VariableIndex(gem.Indexed(gem.Variable("f", (2,), dtype=UINT), (1,)))
    rng = np.random.default_rng(draw(st.integers(0, 5)))
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(
            st.sampled_from(
                [
                    gem.Indexed(gem.Variable("s", (1,)), (0,)),
                    gem.Indexed(gem.Variable("x", (3,)), (i,)),
                    gem.Indexed(gem.Variable("x", (3,)), (facet,)),
                    gem.Indexed(gem.Variable("y", (4, 2)), (q, j)),
                    gem.Indexed(gem.Variable("y", (4, 2)), (q, 1)),
                    gem.FlexiblyIndexed(gem.Variable("z", (24,)), ((1, ((i, 4), (q, 2))),)),
                    gem.FlexiblyIndexed(gem.Variable("z", (24,)), ((0, ((facet, 3), (j, 5))),)),
                    gem.Indexed(gem.Literal(rng.uniform(-1, 1, (3, 4))), (i, q)),
                    gem.Indexed(gem.Literal(rng.uniform(-1, 1, (3, 4, 2))), (facet, q, j)),
                    gem.Indexed(gem.Literal(rng.integers(0, 2, (2, 4)).astype(float)), (j, q)),
                    gem.Indexed(gem.Identity(3), (i, 1)),
                    gem.Literal(rng.uniform(-1, 1)),
                    gem.Zero(),
                    gem.Delta(i, facet),
                ]
            )
        )
    below = expressions(depth - 1)
    kind = draw(
        st.sampled_from(
            ["add", "mul", "div", "function", "select", "minmax", "sum", "sum", "list", "rename",
             "inverse"]
        )
    )  # fmt: skip
    a = draw(below)
    match kind:
        case "add":
            return gem.Sum(a, draw(below))
        case "mul":
            return gem.Product(a, draw(below))
        case "div":
            safe = gem.Sum(gem.Literal(2.0), gem.MathFunction("cos", draw(below)))
            return gem.Division(a, safe)
        case "function":
            name = draw(st.sampled_from(["sin", "cos", "tanh", "atan", "erf", "abs"]))
            return gem.MathFunction(name, a)
        case "select":
            # on data alone, so that rounding cannot change the branch
            x = gem.Indexed(gem.Variable("x", (3,)), (i,))
            s = gem.Indexed(gem.Variable("s", (1,)), (0,))
            condition = gem.Comparison(draw(st.sampled_from(["<", ">=", "!="])), x, s)
            if draw(st.booleans()):
                condition = gem.LogicalNot(condition)
            return gem.Conditional(condition, a, draw(below))
        case "minmax":
            return draw(st.sampled_from([gem.MinValue, gem.MaxValue]))(a, draw(below))
        case "sum":
            free = a.free_indices
            if not free:
                return a
            over = draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
            return gem.IndexSum(a, tuple(over))
        case "list":
            entries = np.array([a, draw(below)], dtype=object)
            which = draw(st.sampled_from([j, 0, 1]))
            if which is j and j in a.free_indices + entries[1].free_indices:
                which = 0
            return gem.Indexed(gem.ListTensor(entries), (which,))
        case "rename":
            free = a.free_indices
            if not free:
                return a
            old = draw(st.sampled_from(free))
            tensor = gem.ComponentTensor(a, (old,))
            return gem.Indexed(tensor, (draw(st.sampled_from([old, 0, old.extent - 1])),))
        case _:
            n = draw(st.integers(2, 4))
            r, c = index(n), index(n)
            table = gem.Literal(np.random.default_rng(n).uniform(0, 0.2, (n, n)) + np.eye(n))
            bounded = gem.MathFunction("sin", a)
            scaled = gem.Product(gem.Sum(gem.Literal(2.0), bounded), gem.Indexed(table, (r, c)))
            inverse = gem.Inverse(gem.ComponentTensor(scaled, (r, c)))
            return gem.Indexed(inverse, (draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1))))


@given(pieces=st.lists(expressions(), min_size=1, max_size=2), seed=st.integers(0, 10))
@settings(max_examples=60, deadline=None, print_blob=True)
def test_random_expressions(pieces: list[gem.Node], seed: int) -> None:
    rng = np.random.default_rng(seed)
    data: dict[str, Array] = {
        name: rng.uniform(-1, 1, (CELLS, *shape)) for name, shape in DATA_SHAPES.items()
    }
    data["f"] = rng.integers(0, 3, (CELLS, 2)).astype(UINT)
    pairs = [
        (target(*expression.free_indices, name=f"A{number}"), expression)
        for number, expression in enumerate(pieces)
    ]
    check(pairs, data, 1e-10)
    check(prepare(pairs), data, 1e-10)


@pytest.mark.parametrize("extent", [2, 3, 30])
def test_sums_over_one_index_within_each_other(extent: int) -> None:
    """GEM makes one sum of them, over the same index twice."""
    i, j = index(extent), index(2)
    x = gem.Indexed(gem.Variable("x", (extent,)), (i,))
    inner = gem.IndexSum(gem.Product(x, x), (i,))
    entries = gem.ListTensor(np.array([x, inner], dtype=object))
    expression = gem.IndexSum(gem.Indexed(entries, (j,)), (i,))
    pairs = [(target(j), expression)]
    check(pairs, {"x": random(extent)})
    check(prepare(pairs), {"x": random(extent)})


# -- the program ------------------------------------------------------------------------------


def test_equal_kernels_have_equal_fingerprints() -> None:
    first, second = (
        translate(prepare(e.form("laplace", 1), e.q), {})
        for e in (Simplex(2, 2, 2), Simplex(2, 2, 2))
    )
    assert first.fingerprint() == second.fingerprint()
    other = Simplex(2, 2, 4)
    assert translate(prepare(other.form("mass", 1), other.q), {}).fingerprint() != (
        first.fingerprint()
    )


def test_fingerprints_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from test_gem import *\n"
        "e = Simplex(3, 2, 2)\n"
        "print(translate(prepare(e.form('laplace', 1), e.q), {}).fingerprint())\n"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    element = Simplex(3, 2, 2)
    kernel = translate(prepare(element.form("laplace", 1), element.q), {})
    assert found.strip() == kernel.fingerprint()


def test_long_sums_are_no_trouble() -> None:
    i = index(3)
    x = vector("x", i)
    total: gem.Node = x
    for n in range(250):
        total = gem.Sum(total, gem.Product(gem.Literal(float(n)), gem.MathFunction("sin", x)))
    limit = sys.getrecursionlimit()
    kernel = translate([(target(i), total)], {})
    assert sys.getrecursionlimit() == limit
    values = random(3)
    expected = values + np.sin(values) * (249 * 250 / 2)
    np.testing.assert_allclose(run(kernel, {"x": values})["A"], expected, rtol=1e-12)


def test_index_names_are_used() -> None:
    i = index(3)
    kernel = translate([(target(i), vector("x", i))], {}, index_names={i: "basis"})
    assert "basis" in str(kernel)

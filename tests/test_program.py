"""The tensor program itself: expressions, validation, printing, and the builder that makes it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from reference import evaluate_kernel

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels.assemble import Builder, Piece
from pyop3_mlir.kernels.program import (
    INDEX,
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
    Table,
    Temporary,
    postorder,
)

F64 = np.dtype(np.float64)


def one(value: float) -> Scalar:
    return Scalar(value, F64)


def small_kernel() -> LocalKernel:
    """y_i = sum_j T_ij x_j."""
    i, j = Dim("i", 3), Dim("j", 2)
    y, x = KernelArgument("y", (3,), F64), KernelArgument("x", (2,), F64)
    table = Table(np.arange(6.0).reshape(3, 2))
    body = Op("mul", Load(table, (IndexOf(i), IndexOf(j))), Load(x, (IndexOf(j),)))
    t = Temporary("t", (3,), F64)
    statement = Compute((t,), (i,), (j,), (body,))
    return LocalKernel("small", (y, x), (statement,), (Output(y, (i,), IndexOf(i), t),))


# -- expressions ------------------------------------------------------------------------------


def test_equal_expressions_are_the_same_object() -> None:
    x = KernelArgument("x", (2,), F64)
    i = Dim("i", 2)
    a = Op("add", Load(x, (IndexOf(i),)), one(2))
    assert a is Op("add", Load(x, (IndexOf(i),)), one(2))
    assert a is not Op("add", Load(x, (IndexOf(Dim("i", 2)),)), one(2))


def test_scalars_are_told_apart_by_their_bits() -> None:
    assert Scalar(0.0) is not Scalar(-0.0)
    assert Scalar(np.nan) is Scalar(np.nan)
    assert Scalar(1.0, np.float32) is not Scalar(1.0, np.float64)


def test_tables_are_interned_by_content() -> None:
    assert Table(np.arange(3.0)) is Table(np.arange(3.0))
    assert Table(np.arange(3.0)) is not Table(np.arange(3.0).astype(np.float32))
    assert Table(np.arange(4.0)) is not Table(np.arange(4.0).reshape(2, 2))


def test_a_table_does_not_change_with_the_array_it_was_made_of() -> None:
    values = np.zeros(3)
    table = Table(values)
    with pytest.raises(ValueError, match="read-only"):
        table.values[0] = 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Load(x, ()),
        lambda x: Load(x, (Scalar(2, INDEX),)),
        lambda x: Load(x, (Scalar(-1, INDEX),)),
        lambda x: Load(x, (one(1),)),
        lambda x: Op("add", one(1)),
        lambda x: Op("nonsense", one(1)),
    ],
)
def test_wrong_expressions_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"axes|index|operation"):
        make(KernelArgument("x", (2,), F64))


def test_types_of_results() -> None:
    x = KernelArgument("x", (), np.dtype(np.complex64))
    z = Load(x, ())
    assert Op("abs", z).dtype == np.float32
    assert Op("lt", one(1), one(2)).dtype == np.bool_
    assert Op("select", Op("lt", one(1), one(2)), z, z).dtype == np.complex64


# -- programs ---------------------------------------------------------------------------------


def test_validation_finds_what_is_wrong() -> None:
    kernel = small_kernel()
    kernel.validate()
    (statement,) = kernel.statements
    (t,), i = statement.results, statement.dims[0]
    other = Temporary("u", (3,), F64)
    wrong = [
        Compute((t,), (), statement.reductions, statement.bodies),  # a dimension is not bound
        Compute((t, other), (i,), statement.reductions, statement.bodies),
        Compute((t,), (i,), (), (Load(other, (IndexOf(i),)),)),  # used before it is defined
        Compute((Temporary("t", (2,), F64),), (i,), statement.reductions, statement.bodies),
    ]
    for bad in wrong:
        with pytest.raises(ValueError, match="small"):
            LocalKernel("small", kernel.arguments, (bad,), kernel.outputs).validate()
    (body,), e = statement.bodies, statement.reductions
    system = Op("solve", body, body, IndexOf(i), dtype=F64)
    for bad_body in (Op("neg", system), Op("add", system, system)):
        nested = Compute((t,), (i,), e, (bad_body,))
        with pytest.raises(ValueError, match="small: a system is not a statement's body"):
            LocalKernel("small", kernel.arguments, (nested,), kernel.outputs).validate()
    with pytest.raises(ValueError, match="twice"):
        LocalKernel("small", kernel.arguments, (statement, statement), ()).validate()
    with pytest.raises(ValueError, match="output"):
        LocalKernel("small", kernel.arguments, (), kernel.outputs).validate()


def test_flops_are_counted() -> None:
    assert small_kernel().count_flops() == 12


def test_pickling_keeps_meaning_and_fingerprint() -> None:
    kernel = small_kernel()
    copy = pickle.loads(pickle.dumps(kernel))
    assert copy.fingerprint() == kernel.fingerprint()
    x = np.random.default_rng(0).random((4, 2))
    packs = [np.zeros((4, 3)), x]
    (found,) = evaluate_kernel(copy, packs).values()
    np.testing.assert_allclose(found, x @ np.arange(6.0).reshape(3, 2).T, rtol=1e-15)


def test_fingerprints_tell_programs_apart() -> None:
    kernel = small_kernel()
    assert kernel.fingerprint() == small_kernel().fingerprint()
    (statement,) = kernel.statements
    t = statement.results[0]
    doubled = Compute(
        (t,), statement.dims, statement.reductions, (Op("mul", one(2), statement.bodies[0]),)
    )
    other = LocalKernel("small", kernel.arguments, (doubled,), kernel.outputs)
    assert other.fingerprint() != kernel.fingerprint()


def test_printing_a_shared_expression_takes_no_exponential_time() -> None:
    x = KernelArgument("x", (), F64)
    node: Expr = Load(x, ())
    for _ in range(200):
        node = Op("add", node, Op("sin", node))
    t = Temporary("t", (), F64)
    statement = Compute((t,), (), (), (node,))
    kernel = LocalKernel("shared", (x,), (statement,), (Output(x, (), Scalar(0, INDEX), t),))
    # exponential in the 200 levels, either would never end
    text = str(kernel)
    short = repr(node)
    assert text.count("sin") == 200
    assert len(short) < 2000


def test_printing_names_everything_once() -> None:
    text = str(small_kernel())
    assert "kernel small" in text
    assert "for [i<3] sum over [j<2]" in text
    assert "y[i] <- t[i]" in text


# -- the builder ------------------------------------------------------------------------------


def builder_with(*extents: int) -> tuple[Builder, list[Dim]]:
    builder = Builder()
    dims = [builder.register(Dim(f"d{k}", n), k) for k, n in enumerate(extents)]
    return builder, dims


def test_arithmetic_is_simplified() -> None:
    builder, (i,) = builder_with(4)
    x: Expr = Load(KernelArgument("x", (4,), F64), (IndexOf(i),))
    op = builder.op
    assert op("mul", x, one(1)) is x
    assert op("mul", one(0), x) is one(0)
    assert op("add", x, one(0)) is x
    assert op("sub", x, one(0)) is x
    assert op("neg", op("neg", x)) is x
    assert op("mul", one(-1), x) is op("neg", x)
    assert op("add", x, op("neg", x)) is op("sub", x, x)
    assert op("div", x, one(1)) is x
    assert op("pow", x, one(2)) is op("mul", x, x)
    assert op("pow", x, one(0.5)) is op("sqrt", x)
    assert op("pow", x, one(0)) is one(1)
    assert op("add", x, one(2)) is op("add", one(2), x)
    assert op("add", one(1), one(2)) is one(3)
    assert op("select", Scalar(True), x, one(1)) is x
    assert op("cast", x, dtype=F64) is x
    assert op("mul", IndexOf(i), Scalar(1, INDEX)) is IndexOf(i)
    assert op("rem", IndexOf(i), Scalar(4, INDEX)) is IndexOf(i)
    assert op("floordiv", IndexOf(i), Scalar(4, INDEX)) is Scalar(0, INDEX)


def test_nan_is_not_multiplied_away() -> None:
    builder, _ = builder_with()
    assert np.isnan(builder.op("mul", one(np.nan), one(0)).value)  # type: ignore[attr-defined]


def test_tables_are_reduced_to_where_they_vary() -> None:
    builder, (i, j) = builder_with(3, 4)
    row = np.arange(4.0)
    table = Table(np.broadcast_to(row, (3, 4)))
    load = builder.load(table, (IndexOf(i), IndexOf(j)))
    assert builder.dims(load) == {j}
    assert builder.load(Table(np.full((3, 4), 2.5)), (IndexOf(i), IndexOf(j))) is one(2.5)
    fixed = builder.load(table, (IndexOf(i), Scalar(2, INDEX)))
    assert fixed is one(2)


def test_constants_are_folded_unless_they_grow() -> None:
    builder, (i, j) = builder_with(3, 4)
    a = builder.constant(np.arange(3.0), [i])
    b = builder.constant(np.arange(4.0), [j])
    ab = builder.constant(np.arange(12.0).reshape(3, 4), [i, j])
    folded = builder.op("mul", a, ab)
    assert isinstance(folded, Load)
    np.testing.assert_array_equal(
        folded.source.values,  # type: ignore[attr-defined]
        np.arange(3.0)[:, None] * np.arange(12.0).reshape(3, 4),
    )
    assert isinstance(builder.op("mul", a, b), Op)


def test_indices_that_depend_on_data_are_clamped() -> None:
    builder, (i,) = builder_with(3)
    f = KernelArgument("f", (), np.dtype(np.int32))
    x = KernelArgument("x", (5,), F64)
    position = builder.op("cast", Load(f, ()), dtype=INDEX)
    load = builder.load(x, [position])
    assert builder.range(load.children[0]) == (0, 4)
    inside = builder.op("rem", position, Scalar(5, INDEX))
    assert builder.load(x, [inside]).children[0] is inside
    shifted = builder.op("add", IndexOf(i), Scalar(2, INDEX))
    assert builder.load(x, [shifted]).children[0] is shifted


def test_stacks_choose_by_index() -> None:
    builder, (i,) = builder_with(5)
    out = KernelArgument("out", (5,), F64)
    x = KernelArgument("x", (5,), F64)
    entries = np.empty(5, object)
    for k in range(5):
        entries[k] = builder.op("mul", one(k + 1), Load(x, (Scalar(k, INDEX),)))
    value = builder.stack(entries, [IndexOf(i)])
    kernel = builder.finish("stack", (out, x), [Piece(out, (i,), IndexOf(i), value)])
    data = np.random.default_rng(0).random((2, 5))
    (found,) = evaluate_kernel(kernel, [np.zeros((2, 5)), data]).values()
    np.testing.assert_allclose(found, data * np.arange(1, 6), rtol=1e-15)


def test_what_several_statements_need_is_computed_once() -> None:
    builder, (i, j) = builder_with(4, 6)
    out, x = KernelArgument("out", (10,), F64), KernelArgument("x", (4,), F64)
    costly = builder.op("exp", builder.op("sin", Load(x, (IndexOf(i),))))
    table = builder.constant(np.random.default_rng(0).random((4, 6)), [i, j])
    total = builder.reduce(builder.op("mul", table, costly), [i])
    first = builder.op("add", builder.op("cos", total), total)
    pieces = [
        Piece(out, (i,), IndexOf(i), builder.op("add", costly, one(1))),
        Piece(out, (j,), builder.op("add", IndexOf(j), Scalar(4, INDEX)), first),
    ]
    kernel = builder.finish("shared", (out, x), pieces)
    names = [n.name for s in kernel.statements for n in postorder(s.bodies) if isinstance(n, Op)]
    assert names.count("exp") == names.count("sin") == names.count("cos") == 1


def test_statements_of_one_loop_nest_need_no_temporary_between_them() -> None:
    builder, (i,) = builder_with(4)
    out, x = KernelArgument("out", (4,), F64), KernelArgument("x", (4,), F64)
    first = builder.define(builder.op("exp", Load(x, (IndexOf(i),))), [i])
    second = builder.define(builder.op("sin", first), [i])
    kernel = builder.finish("chain", (out, x), [Piece(out, (i,), IndexOf(i), second)])
    (statement,) = kernel.statements
    assert len(statement.results) == 1


def test_a_sum_over_nothing_and_an_empty_sum() -> None:
    builder, (i, nothing) = builder_with(4, 0)
    x: Expr = Load(KernelArgument("x", (4,), F64), (IndexOf(i),))
    assert builder.reduce(x, []) is x
    assert builder.reduce(builder.op("mul", x, one(2)), [nothing]) is one(0)


def test_sums_are_multiplied_out_only_where_that_is_less_work() -> None:
    rng = np.random.default_rng(0)
    for points, expected in ((6, 0), (2, 1)):
        builder, (q, i, j) = builder_with(points, 3, 3)
        out, x = KernelArgument("out", (3, 3), F64), KernelArgument("x", (3,), F64)
        test = builder.constant(rng.random((points, 3)), [q, i])
        value: Expr = one(0)
        tables = [rng.random((points, 3)) for _ in range(3)]
        for k, table in enumerate(tables):
            term = builder.op("mul", builder.constant(table, [q, j]), Load(x, (Scalar(k, INDEX),)))
            value = builder.op("add", value, term)
        total = builder.reduce(builder.op("mul", test, value), [q])
        slot = builder.op("add", builder.op("mul", IndexOf(i), Scalar(3, INDEX)), IndexOf(j))
        kernel = builder.finish("expand", (out, x), [Piece(out, (i, j), slot, total)])
        assert sum(bool(s.reductions) for s in kernel.statements) == expected
        data = rng.random((2, 3))
        (found,) = evaluate_kernel(kernel, [np.zeros((2, 3, 3)), data]).values()
        weights = np.einsum("ck,kqj->cqj", data, np.array(tables))
        left = builder.evaluate(test, [q, i])
        expected_values = np.einsum("qi,cqj->cij", left, weights)
        np.testing.assert_allclose(found, expected_values.reshape(2, 9), rtol=1e-13)


def test_a_slot_that_depends_on_data_is_refused() -> None:
    builder, _ = builder_with()
    out = KernelArgument("out", (4,), F64)
    f = KernelArgument("f", (), np.dtype(np.int32))
    slot = builder.op("cast", Load(f, ()), dtype=INDEX)
    with pytest.raises(UnsupportedLoopError, match="depends on data"):
        builder.finish("bad", (out, f), [Piece(out, (), slot, one(1))])

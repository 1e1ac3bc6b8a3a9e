"""Determinant, inverse and solve against LAPACK (through numpy.linalg)."""

from __future__ import annotations

from itertools import product
from typing import Any, Protocol

import numpy as np
import pytest
from reference import evaluate_kernel

from pyop3_mlir import READ, WRITE, Argument, IterationSet, Parloop, engine
from pyop3_mlir.kernels import dense
from pyop3_mlir.kernels.program import (
    INDEX,
    Compute,
    Dim,
    IndexOf,
    KernelArgument,
    Load,
    LocalKernel,
    Op,
    Output,
    Scalar,
    Temporary,
    postorder,
)
from pyop3_mlir.lowering.pipeline import lower
from pyop3_mlir.lowering.schedule import Schedule

Array = np.ndarray[Any, Any]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9)
CELLS = 40


class Run(Protocol):
    """Gives the values of a result on all cells."""

    def __call__(
        self,
        statements: list[Compute],
        result: Temporary,
        /,
        *inputs: tuple[KernelArgument, Array],
    ) -> Array: ...


def kernel_of(
    statements: list[Compute], result: Temporary, *inputs: tuple[KernelArgument, Array]
) -> LocalKernel:
    """A kernel that writes ``result`` to its first argument."""
    target = KernelArgument("x", result.shape, result.dtype)
    dims = tuple(Dim("o", extent) for extent in result.shape)
    slot: Any = Scalar(0, INDEX)
    for dim in dims:
        slot = Op("add", Op("mul", slot, Scalar(dim.extent, INDEX)), IndexOf(dim))
    copy = Temporary("copy", result.shape, result.dtype)
    last = Compute((copy,), dims, (), (Load(result, [IndexOf(dim) for dim in dims]),))
    return LocalKernel(
        "dense",
        (target, *(argument for argument, _ in inputs)),
        (*statements, last),
        (Output(target, dims, slot, copy),),
    )


def run(
    statements: list[Compute], result: Temporary, /, *inputs: tuple[KernelArgument, Array]
) -> Array:
    """By numpy, a statement after the other."""
    kernel = dense.eliminated(kernel_of(statements, result, *inputs))
    target = kernel.arguments[0]
    cells = len(inputs[0][1])
    packs = [np.zeros((cells, *target.shape), target.dtype), *(values for _, values in inputs)]
    return evaluate_kernel(kernel, packs)[target].reshape(cells, *result.shape)


def run_on_engine(
    statements: list[Compute],
    result: Temporary,
    /,
    *inputs: tuple[KernelArgument, Array],
    batching: str = "blocked",
) -> Array:
    """On the engine, in blocks of four cells."""
    kernel = kernel_of(statements, result, *inputs)
    cells = len(inputs[0][1])
    found = np.zeros((cells, *result.shape), result.dtype)
    arguments = [
        Argument.direct(found, WRITE),
        *(Argument.direct(np.ascontiguousarray(values), READ) for _, values in inputs),
    ]
    width = min(cells, 4)
    schedule = Schedule("in_order", batching, width=width, tile=4, unroll=4)
    engine.compile(Parloop(kernel, IterationSet(cells), arguments), "cpu", schedule)()
    return found


def cases(*sizes: int) -> Any:
    """Sizes, those whose systems become loops on the engine as well."""
    found = [(n, run) for n in sizes] + [(n, run_on_engine) for n in sizes if n > dense.STRAIGHT]
    return pytest.mark.parametrize(("n", "run"), found)


def argument(name: str, values: Array) -> KernelArgument:
    return KernelArgument(name, values.shape[1:], values.dtype)


def random_matrices(n: int, condition: float, dtype: Any = np.float64, seed: int = 1) -> Array:
    """Matrices of that 2-norm condition number, by singular values."""
    rng = np.random.default_rng(seed)

    def orthogonal() -> Array:
        values = rng.standard_normal((CELLS, n, n))
        if np.dtype(dtype).kind == "c":
            values = values + 1j * rng.standard_normal((CELLS, n, n))
        return np.linalg.qr(values)[0]

    singular = np.geomspace(1, 1 / condition, n) if n > 1 else np.ones(1)
    return (orthogonal() * singular @ orthogonal()).astype(dtype)


def error(found: Array, expected: Array) -> float:
    """Largest relative error over the cells, in the Frobenius norm."""
    flat, wanted = found.reshape(len(found), -1), expected.reshape(len(expected), -1)
    return float(np.max(np.linalg.norm(flat - wanted, axis=1) / np.linalg.norm(wanted, axis=1)))


@pytest.mark.parametrize("condition", [10.0, 1e6, 1e12])
@cases(*SIZES)
def test_inverse_is_as_good_as_lapack(n: int, run: Run, condition: float) -> None:
    a = random_matrices(n, condition)
    source = argument("a", a)
    found = run(*dense.inverse(source), (source, a))
    eps = np.finfo(float).eps
    # both have a relative forward error of a modest multiple of eps times the condition number
    assert error(found, np.linalg.inv(a)) < 20 * n * eps * condition


@pytest.mark.parametrize("condition", [10.0, 1e6, 1e12])
@cases(*SIZES)
def test_solve_is_as_good_as_lapack(n: int, run: Run, condition: float) -> None:
    a = random_matrices(n, condition)
    b = np.random.default_rng(2).standard_normal((CELLS, n))
    left, right = argument("a", a), argument("b", b)
    found = run(*dense.solve(left, right), (left, a), (right, b))
    expected = np.linalg.solve(a, b[..., None])[..., 0]
    assert error(found, expected) < 20 * n * np.finfo(float).eps * condition


@cases(4, 5, 6, 9)
def test_elimination_has_a_small_residual_for_ill_conditioned_systems(n: int, run: Run) -> None:
    # backward stability: the residual does not grow with the condition number
    a = random_matrices(n, 1e13)
    b = np.random.default_rng(2).standard_normal((CELLS, n))
    left, right = argument("a", a), argument("b", b)
    x = run(*dense.solve(left, right), (left, a), (right, b))
    residual = np.linalg.norm(np.einsum("crk,ck->cr", a, x) - b, axis=1)
    scale = np.linalg.norm(a, axis=(1, 2)) * np.linalg.norm(x, axis=1)
    assert np.max(residual / scale) < 10 * n * np.finfo(float).eps


@cases(*SIZES)
def test_determinant(n: int, run: Run) -> None:
    a = random_matrices(n, 100.0)
    source = argument("a", a)
    found = run(*dense.determinant(source), (source, a))
    assert error(found, np.linalg.det(a)) < 1e-12


@cases(*SIZES)
def test_determinant_of_ill_conditioned_matrices(n: int, run: Run) -> None:
    a = random_matrices(n, 1e10)
    source = argument("a", a)
    found = run(*dense.determinant(source), (source, a))
    assert error(np.abs(found), np.full(CELLS, np.geomspace(1, 1e-10, n).prod())) < 1e-4
    assert error(found, np.linalg.det(a)) < 1e-4


@cases(*SIZES)
def test_determinant_of_a_singular_matrix_is_zero(n: int, run: Run) -> None:
    a = np.ones((2, n, n))
    a[0, :, 0] = 0
    a[1] = 0
    source = argument("a", a)
    found = run(*dense.determinant(source), (source, a))
    np.testing.assert_array_equal(found, 0)


@cases(*SIZES)
def test_graded_rows_need_the_pivot(n: int, run: Run) -> None:
    # a tiny leading entry: without row exchanges the answer has no correct digit
    a = random_matrices(n, 3.0)
    if n > 1:
        a[:, 0, 0] = 1e-18
    b = np.ones((CELLS, n))
    left, right = argument("a", a), argument("b", b)
    found = run(*dense.solve(left, right), (left, a), (right, b))
    assert error(found, np.linalg.solve(a, b[..., None])[..., 0]) < 1e-12


@cases(*SIZES)
def test_permutation_matrices_are_inverted_exactly(n: int, run: Run) -> None:
    rng = np.random.default_rng(3)
    a = np.stack([np.eye(n)[rng.permutation(n)] for _ in range(CELLS)])
    source = argument("a", a)
    found = run(*dense.inverse(source), (source, a))
    np.testing.assert_array_equal(found, a.transpose(0, 2, 1))
    found = run(*dense.determinant(source), (source, a))
    np.testing.assert_array_equal(found, np.round(np.linalg.det(a)))


@cases(*SIZES)
def test_a_singular_matrix_gives_no_finite_inverse(n: int, run: Run) -> None:
    a = np.zeros((2, n, n))
    a[1] = np.eye(n)
    a[1, n - 1] = a[1, 0] if n > 1 else 0  # two equal rows
    source = argument("a", a)
    found = run(*dense.inverse(source), (source, a)).reshape(2, -1)
    assert not np.isfinite(found).all(axis=1).any()
    b = np.ones((2, n))
    right = argument("b", b)
    found = run(*dense.solve(source, right), (source, a), (right, b))
    assert not np.isfinite(found).all(axis=1).any()


def test_a_singular_cell_does_not_disturb_its_neighbours() -> None:
    a = random_matrices(5, 10.0)
    a[7] = 0
    a[8, 0, 0] = np.nan
    source = argument("a", a)
    found = run(*dense.inverse(source), (source, a))
    good = np.delete(np.arange(CELLS), [7, 8])
    assert error(found[good], np.linalg.inv(a[good])) < 1e-13
    assert not np.isfinite(found[7]).all()
    assert np.isnan(found[8]).any()


@cases(*SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.complex128])
def test_other_dtypes(n: int, run: Run, dtype: Any) -> None:
    a = random_matrices(n, 10.0, dtype)
    b = random_matrices(n, 2.0, dtype, seed=5)[:, :, :1]
    left, right = argument("a", a), argument("b", b)
    found = run(*dense.solve(left, right), (left, a), (right, b))
    assert found.dtype == dtype
    expected = np.linalg.solve(a.astype(np.complex128), b)
    assert error(found, expected) < 500 * np.finfo(dtype).eps
    found = run(*dense.inverse(left), (left, a))
    assert error(found, np.linalg.inv(a.astype(np.complex128))) < 500 * np.finfo(dtype).eps


@cases(2, 3, 4, 9)
@pytest.mark.parametrize("columns", [(), (1,), (3,), (2, 3)])
def test_batches_and_several_right_hand_sides(n: int, run: Run, columns: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    a = random_matrices(n, 5.0).reshape(4, 5, 2, n, n)
    b = rng.standard_normal((4, 5, 2, n, *columns))
    batch = (Dim("p", 5), Dim("q", 2))
    left, right = argument("a", a), argument("b", b)
    found = run(*dense.solve(left, right, batch), (left, a), (right, b))
    expected = np.linalg.solve(a, b.reshape(4, 5, 2, n, -1)).reshape(b.shape)
    assert found.shape == b.shape
    assert error(found, expected) < 1e-13
    found = run(*dense.inverse(left, batch), (left, a))
    assert error(found, np.linalg.inv(a)) < 1e-13
    found = run(*dense.determinant(left, batch), (left, a))
    assert error(found, np.linalg.det(a)) < 1e-13


def solution(n: int) -> LocalKernel:
    """A kernel that solves systems of n unknowns."""
    a, b = np.zeros((1, n, n)), np.zeros((1, n))
    left, right = argument("a", a), argument("b", b)
    return kernel_of(*dense.solve(left, right), (left, a), (right, b))


def test_statements_grow_with_the_number_of_rows_alone() -> None:
    def length(n: int) -> int:
        return sum(len(list(postorder(s.bodies))) for s in dense.eliminated(solution(n)).statements)

    assert length(64) < 2.5 * length(32)
    assert len(dense.eliminated(solution(40)).statements) <= 5 * 40


@cases(40)
def test_a_system_of_forty_unknowns(n: int, run: Run) -> None:
    a = random_matrices(n, 1e3)
    b = np.random.default_rng(6).standard_normal((CELLS, n))
    left, right = argument("a", a), argument("b", b)
    found = run(*dense.solve(left, right), (left, a), (right, b))
    assert error(found, np.linalg.solve(a, b[..., None])[..., 0]) < 1e-11


def test_loops_do_not_grow_with_the_size_of_the_system() -> None:
    def length(n: int) -> int:
        kernel = solution(n)
        arguments = [
            Argument.direct(np.zeros((8, *formal.shape)), access)
            for formal, access in zip(kernel.arguments, (WRITE, READ, READ), strict=True)
        ]
        loop = Parloop(kernel, IterationSet(8), arguments)
        return len(lower(kernel, loop.spec, Schedule("in_order", "blocked", width=8)).splitlines())

    assert length(40) == length(80)


def test_work_of_an_elimination_is_counted() -> None:
    # two thirds of n^3 for the factors, 2 n^2 for a right-hand side, and a copy
    assert solution(30).count_flops() == 2 * 30**3 // 3 + 2 * 30**2


@cases(10, 17, 33, 37)
def test_large_systems(n: int, run: Run) -> None:
    a = random_matrices(n, 1e3)
    b = np.random.default_rng(7).standard_normal((CELLS, n, 2, 3))
    left, right = argument("a", a), argument("b", b)
    expected = np.linalg.solve(a, b.reshape(CELLS, n, 6)).reshape(b.shape)
    assert error(run(*dense.solve(left, right), (left, a), (right, b)), expected) < 1e-11
    assert error(run(*dense.inverse(left), (left, a)), np.linalg.inv(a)) < 1e-11
    assert error(run(*dense.determinant(left), (left, a)), np.linalg.det(a)) < 1e-11


@pytest.mark.parametrize("n", [2, 5, 9])
def test_no_right_hand_sides(n: int) -> None:
    a = random_matrices(n, 3.0)
    left, right = argument("a", a), argument("b", np.zeros((CELLS, n, 0)))
    _, result = dense.solve(left, right)
    assert result.shape == (n, 0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    a = KernelArgument("a", (2, 3), np.dtype(float))
    with pytest.raises(ValueError, match="square"):
        dense.inverse(a)
    square = KernelArgument("a", (3, 3), np.dtype(float))
    with pytest.raises(ValueError, match="does not fit"):
        dense.solve(square, KernelArgument("b", (2,), np.dtype(float)))
    with pytest.raises(ValueError, match="float"):
        dense.determinant(KernelArgument("a", (3, 3), np.dtype(np.int32)))


@pytest.mark.parametrize(
    ("n", "batching"), [*product([3, 4, 6], ["blocked", "flat"]), (13, "blocked")]
)
def test_inverse_on_the_engine(n: int, batching: str, monkeypatch: Any) -> None:
    """IREE's aggressive fusion of dispatches once gave wrong numbers for flat eliminations."""
    # one size for each form
    monkeypatch.setattr(dense, "STRAIGHT", 4)
    monkeypatch.setattr(dense, "UNROLLED", 4)
    a = np.random.default_rng(n).standard_normal((13, n, n)) + 3 * np.eye(n)
    source = argument("a", a)
    found = run_on_engine(*dense.inverse(source), (source, a), batching=batching)
    assert error(found, np.linalg.inv(a)) < 1e-13

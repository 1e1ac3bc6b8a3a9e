"""The loopy importer against the C code that loopy generates for the same kernels."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import loopy as lp
import numpy as np
import pytest
from reference import evaluate_kernel

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.kernels.loopy import Intent, Part, import_loopy
from pyop3_mlir.kernels.program import LocalKernel

READ, INC, WRITE, UPDATE = Intent.READ, Intent.INC, Intent.WRITE, Intent.UPDATE
CELLS = 5


def make(
    domains: str | list[str], code: str, *arguments: Any, name: str = "kernel", **kwargs: Any
) -> Any:
    return lp.make_kernel(
        domains,
        code,
        list(arguments),
        name=name,
        target=lp.CTarget(),
        lang_version=(2018, 2),
        **kwargs,
    )


def real(name: str, *shape: int) -> Any:
    return lp.GlobalArg(name, np.float64, shape=shape)


def integer(name: str, *shape: int) -> Any:
    return lp.GlobalArg(name, np.int32, shape=shape)


def temporary(name: str, shape: tuple[int, ...] = ()) -> Any:
    return lp.TemporaryVariable(
        name, np.float64, shape=shape, address_space=lp.AddressSpace.PRIVATE
    )


def table(name: str, values: np.ndarray) -> Any:
    return lp.TemporaryVariable(
        name, initializer=values, read_only=True, address_space=lp.AddressSpace.LOCAL
    )


def run_c(unit: Any, packs: list[np.ndarray], folder: Path) -> list[np.ndarray]:
    """The packs after loopy's C code has run on each cell."""
    source = folder / "kernel.c"
    library = folder / "kernel.so"
    source.write_text(
        "#include <math.h>\n#include <stdint.h>\n" + lp.generate_code_v2(unit).device_code()
    )
    subprocess.run(
        ["gcc", "-O1", "-w", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True
    )
    function = ctypes.CDLL(str(library)).kernel
    packs = [pack.copy() for pack in packs]
    values = [type(a).__name__ == "ValueArg" for a in unit["kernel"].args]
    for cell in range(len(packs[0])):
        function(
            *(
                ctypes.c_int(int(pack[cell])) if value else ctypes.c_void_p(pack[cell].ctypes.data)
                for pack, value in zip(packs, values, strict=True)
            )
        )
    return packs


def check(
    unit: Any, intents: list[Intent], folder: Path, seed: int = 1, low: float = 0.1
) -> LocalKernel:
    """Import, and compare with C on random data."""
    kernel = import_loopy(unit, "kernel", intents)
    kernel.validate()
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    packs = []
    for argument in kernel.arguments:
        if argument.dtype.kind in "iu":
            packs.append(rng.integers(0, 3, (CELLS, *argument.shape)).astype(argument.dtype))
        else:
            packs.append(rng.uniform(low, 1.0, (CELLS, *argument.shape)).astype(argument.dtype))
    arrays = iter(intents)
    for formal, pack in zip(unit["kernel"].args, packs, strict=True):
        if type(formal).__name__ != "ValueArg" and next(arrays) in (INC, WRITE):
            pack[...] = 0
    found = evaluate_kernel(kernel, packs)
    expected = run_c(unit, packs, folder)
    changed = 0
    for argument, after in zip(kernel.arguments, expected, strict=True):
        if argument in found:
            np.testing.assert_allclose(
                found[argument].reshape(after.shape), after, rtol=1e-13, atol=1e-14
            )
            changed += 1
    assert changed
    return kernel


pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the reference")


def has_sum_over(kernel: LocalKernel, extent: int) -> bool:
    return any(d.extent == extent for s in kernel.statements for d in s.reductions)


def test_scalar_temporaries_are_expanded(tmp_path: Path) -> None:
    """The form TSFC writes: coefficients at a quadrature point in reused scalars."""
    rng = np.random.default_rng(3)
    phi = rng.random((6, 4))
    unit = make(
        ["{[q]: 0<=q<6}", "{[i]: 0<=i<4}", "{[j]: 0<=j<4}"],
        """
        for q
            t = 0
            for i
                t = t + phi[q, i]*w[i]
            end
            s = t*t*x[0]
            for j
                A[j] = A[j] + phi[q, j]*s
            end
        end
        """,
        real("A", 4),
        real("x", 2),
        real("w", 4),
        temporary("t"),
        temporary("s"),
        table("phi", phi),
        seq_dependencies=True,
    )
    kernel = check(unit, [INC, READ, READ], tmp_path)
    assert has_sum_over(kernel, 6)
    assert has_sum_over(kernel, 4)


def test_matrix_with_private_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    unit = make(
        ["{[q]: 0<=q<5}", "{[j,k]: 0<=j,k<3}", "{[m]: 0<=m<3}"],
        """
        for q
            for m
                row[m] = phi[q, m]*sin(x[m])
            end
            for j, k
                A[j, k] = A[j, k] + row[j]*phi[q, k]
            end
        end
        """,
        real("A", 3, 3),
        real("x", 3),
        temporary("row", (3,)),
        table("phi", rng.random((5, 3))),
        seq_dependencies=True,
    )
    check(unit, [INC, READ], tmp_path)


def test_array_initialised_and_accumulated_inside_a_loop(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    unit = make(
        ["{[q]: 0<=q<4}", "{[a]: 0<=a<3}", "{[b,c]: 0<=b,c<3}", "{[d]: 0<=d<3}"],
        """
        for q
            for a
                t[a] = 0
            end
            for b, c
                t[b] = t[b] + B[q, b, c]*x[c]
            end
            for d
                A[d] = A[d] + t[d]*t[d]
            end
        end
        """,
        real("A", 3),
        real("x", 3),
        temporary("t", (3,)),
        table("B", rng.random((4, 3, 3))),
        seq_dependencies=True,
    )
    kernel = check(unit, [INC, READ], tmp_path)
    assert has_sum_over(kernel, 3)


def test_recurrence_is_unrolled(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<5}",
        """
        t = 1
        for i
            t = t*x[i] + i
            A[i] = t
        end
        """,
        real("A", 5),
        real("x", 5),
        temporary("t"),
        seq_dependencies=True,
    )
    check(unit, [WRITE, READ], tmp_path)


def test_prefix_sum(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 1<=i<6}",
        """
        A[0] = x[0]
        for i
            A[i] = A[i-1] + x[i]
        end
        """,
        real("A", 6),
        real("x", 6),
        seq_dependencies=True,
    )
    check(unit, [WRITE, READ], tmp_path)


def test_reads_before_the_entry_is_overwritten(tmp_path: Path) -> None:
    """Shifting to the left reads entries that later iterations overwrite: still parallel."""
    unit = make(
        "{[i]: 0<=i<5}",
        "A[i] = A[i+1]*2",
        real("A", 6),
        real("x", 6),
        seq_dependencies=True,
    )
    check(unit, [UPDATE, READ], tmp_path)


def test_maximum_of_a_loop(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<4}",
        """
        m = x[0]
        for i
            m = fmax(m, x[i])
        end
        A[0] = m
        """,
        real("A", 1),
        real("x", 4),
        temporary("m"),
        seq_dependencies=True,
    )
    check(unit, [UPDATE, READ], tmp_path)


def test_last_value_of_a_private_scalar(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<4}",
        """
        for i
            t = x[i]*x[i]
        end
        A[0] = A[0] + t
        """,
        real("A", 1),
        real("x", 4),
        temporary("t"),
        seq_dependencies=True,
    )
    check(unit, [INC, READ], tmp_path)


def test_scalars_read_back_as_an_array(tmp_path: Path) -> None:
    """What TSFC makes of a ListTensor."""
    unit = make(
        ["{[i]: 0<=i<3}", "{[j]: 0<=j<3}"],
        """
        t[0] = x[0]*x[1]
        t[1] = x[1] - x[2]
        t[2] = exp(x[2])
        for i, j
            A[i, j] = A[i, j] + t[i]*t[j]
        end
        """,
        real("A", 3, 3),
        real("x", 3),
        temporary("t", (3,)),
        seq_dependencies=True,
    )
    check(unit, [INC, READ], tmp_path)


def test_blocks_of_a_local_matrix(tmp_path: Path) -> None:
    """Slate writes blocks of a mixed tensor by offset and reads it whole."""
    unit = make(
        ["{[i,j]: 0<=i,j<2}", "{[k]: 0<=k<3}", "{[m,n]: 0<=m,n<5}", "{[a,b]: 0<=a,b<5}"],
        """
        for a, b
            T[a, b] = 0
        end
        for i, j
            T[i, j] = T[i, j] + x[i]*x[j]
        end
        for k
            T[2 + k, k] = T[2 + k, k] + x[k]
        end
        for m, n
            A[m] = A[m] + T[m, n]*y[n]
        end
        """,
        real("A", 5),
        real("x", 3),
        real("y", 5),
        temporary("T", (5, 5)),
        seq_dependencies=True,
    )
    check(unit, [INC, READ, READ], tmp_path)


def test_interleaved_components(tmp_path: Path) -> None:
    unit = make(
        "{[p]: 0<=p<4}",
        """
        for p
            A[2*p] = A[2*p] + x[p]
            A[2*p + 1] = A[2*p + 1] + x[p]*x[0]
        end
        """,
        real("A", 8),
        real("x", 4),
        seq_dependencies=True,
    )
    check(unit, [WRITE, READ], tmp_path)


def test_two_statements_add_to_overlapping_entries(tmp_path: Path) -> None:
    unit = make(
        ["{[i]: 0<=i<4}", "{[j]: 0<=j<3}", "{[q]: 0<=q<2}"],
        """
        for q
            for i
                A[i] = A[i] + x[i]*(q + 1)
            end
            for j
                A[j + 1] = A[j + 1] + x[j]*x[j]
            end
        end
        """,
        real("A", 4),
        real("x", 4),
        seq_dependencies=True,
    )
    check(unit, [INC, READ], tmp_path)


def test_increment_that_overwrites(tmp_path: Path) -> None:
    unit = make(
        ["{[i]: 0<=i<4}", "{[j]: 0<=j<3}"],
        """
        for i
            A[i] = A[i] + x[i]
        end
        for j
            A[j + 1] = 2*x[j]
        end
        """,
        real("A", 4),
        real("x", 4),
        seq_dependencies=True,
    )
    check(unit, [INC, READ], tmp_path)


def test_non_injective_store_is_unrolled(tmp_path: Path) -> None:
    unit = make(
        "{[i,j]: 0<=i,j<3}",
        "for i, j\nA[i + j] = A[i + j] + x[i]*y[j]\nend",
        real("A", 5),
        real("x", 3),
        real("y", 3),
        seq_dependencies=True,
    )
    check(unit, [INC, READ, READ], tmp_path)


def test_last_writer_wins(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<6}",
        "A[i // 2] = x[i]",
        real("A", 3),
        real("x", 6),
        seq_dependencies=True,
    )
    check(unit, [WRITE, READ], tmp_path)


def test_facet_numbers_choose_rows_of_a_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    unit = make(
        "{[q,j]: 0<=q<2 and 0<=j<3}",
        "for q, j\nA[j] = A[j] + T[facet[0], q, j]*x[facet[0]]\nend",
        real("A", 3),
        integer("facet", 1),
        real("x", 3),
        table("T", rng.random((3, 2, 3))),
        seq_dependencies=True,
    )
    check(unit, [INC, READ, READ], tmp_path)


def test_conditionals_and_predicates(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<4}",
        """
        for i
            A[i] = if(x[i] < y[i] and not (i == 2), x[i], 2*y[i])
            if f[0] > 0 and x[i] >= 0.5
                A[i] = A[i] + 10
            end
            if f[0] == 1
                B[i] = y[i]
            end
        end
        """,
        real("A", 4),
        real("B", 4),
        real("x", 4),
        real("y", 4),
        integer("f", 1),
        seq_dependencies=True,
    )
    check(unit, [WRITE, UPDATE, READ, READ, READ], tmp_path)


def test_functions(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<4}",
        """
        A[i] = sqrt(x[i]) + exp(y[i])*log(x[i]) + sin(x[i])**2 + cos(y[i])**3 + tan(x[i]) \
            + fabs(x[i] - y[i]) + fmin(x[i], y[i]) + fmax(x[i], 0.5) + pow(x[i], y[i]) \
            + tanh(x[i]) + asin(x[i]) + acos(y[i]) + atan(x[i]) + sinh(y[i]) + cosh(x[i]) \
            + x[i]**(-2) + x[i]**0.5 + atan2(x[i], y[i])
        """,
        real("A", 4),
        real("x", 4),
        real("y", 4),
        seq_dependencies=True,
    )
    check(unit, [INC, READ, READ], tmp_path)


def test_integer_arithmetic(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<6}",
        "A[i] = (i // 4)*x[i % 4] + (i + n)*0.5 + x[i % 2 + 2*((i // 3) % 2)]",
        real("A", 6),
        real("x", 4),
        lp.ValueArg("n", np.int32),
        seq_dependencies=True,
    )
    kernel = check(unit, [WRITE, READ], tmp_path)
    assert kernel.arguments[2].shape == ()


def test_reductions_of_loopy(tmp_path: Path) -> None:
    unit = make(
        "{[i,j]: 0<=i<3 and 0<=j<4}",
        "A[i] = A[i] + sum(j, x[j]*y[i])",
        real("A", 3),
        real("x", 4),
        real("y", 3),
        seq_dependencies=True,
    )
    assert check(unit, [INC, READ, READ], tmp_path)


def test_dependencies_decide_the_order(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<3}",
        """
        A[0] = A[0] + t {id=use, dep=total}
        t = 0 {id=zero}
        for i
            t = t + x[i] {id=total, dep=zero}
        end
        """,
        real("A", 1),
        real("x", 3),
        temporary("t"),
    )
    check(unit, [INC, READ], tmp_path)


def test_arguments_that_are_only_read_may_be_overwritten(tmp_path: Path) -> None:
    unit = make(
        "{[i]: 0<=i<3}",
        """
        for i
            x[i] = x[i]*2
            A[i] = A[i] + x[i]
        end
        """,
        real("A", 3),
        real("x", 3),
        seq_dependencies=True,
    )
    check(unit, [INC, READ], tmp_path)


def called(callee: Any, caller: Any) -> Any:
    return lp.merge([caller, callee])


def test_called_kernel_through_sub_arrays(tmp_path: Path) -> None:
    callee = lp.make_function(
        "{[i,j]: 0<=i,j<2}",
        """
        for i, j
            out[i] = out[i] + mat[i, j]*vec[j]
        end
        """,
        [real("out", 2), real("mat", 2, 2), real("vec", 2)],
        name="multiply",
        target=lp.CTarget(),
        lang_version=(2018, 2),
        seq_dependencies=True,
    )
    caller = make(
        ["{[a,b,c,d,k]: 0<=a,b,c,d,k<2}", "{[z,y]: 0<=z,y<2}"],
        """
        for z, y
            T[z, y] = 0
        end
        for k
            [a]: T[k, a] = multiply([a]: T[k, a], [b, c]: M[b, c + 1], [d]: x[k + d])
        end
        """,
        real("T", 2, 2),
        real("M", 2, 3),
        real("x", 3),
        seq_dependencies=True,
    )
    check(called(callee, caller), [UPDATE, READ, READ], tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_inverse_and_solve(size: int) -> None:
    """Slate calls them by name; the reference is numpy's."""
    n = size
    unit = _with_linear_algebra(n)
    kernel = import_loopy(unit, "kernel", [UPDATE, UPDATE, READ, READ])
    rng = np.random.default_rng(n)
    matrix = rng.random((CELLS, n, n)) + n * np.eye(n)
    rhs = rng.random((CELLS, n))
    zero = np.zeros((CELLS, n))
    found = evaluate_kernel(kernel, [zero, np.zeros((CELLS, n, n)), matrix, rhs])
    expected = np.linalg.solve(matrix, rhs[..., None])[..., 0]
    np.testing.assert_allclose(found[kernel.arguments[0]], expected, rtol=1e-12)
    np.testing.assert_allclose(
        found[kernel.arguments[1]].reshape(matrix.shape), np.linalg.inv(matrix), rtol=1e-12
    )


def _with_linear_algebra(n: int) -> Any:
    """A kernel that calls ``inverse`` and ``solve`` as Slate does, which loopy need not know."""
    from loopy.kernel.instruction import CallInstruction
    from loopy.symbolic import SubArrayRef
    from pymbolic.primitives import Call, Subscript, Variable

    def whole(name: str, *inames: str) -> Any:
        indices = tuple(Variable(i) for i in inames)
        return SubArrayRef(indices, Subscript(Variable(name), indices))

    instructions = [
        CallInstruction(
            (whole("x", "a"),), Call(Variable("solve"), (whole("M", "b", "c"), whole("y", "d")))
        ),
        CallInstruction(
            (whole("I", "e", "f"),), Call(Variable("inverse"), (whole("M", "g", "h"),))
        ),
    ]
    return make(
        f"{{[a,b,c,d,e,f,g,h]: 0<=a,b,c,d,e,f,g,h<{n}}}",
        instructions,  # type: ignore[arg-type]
        real("x", n),
        real("I", n, n),
        real("M", n, n),
        real("y", n),
        seq_dependencies=True,
    )


def test_c_code_is_refused() -> None:
    unit = make(
        "{[i]: 0<=i<3}",
        [
            lp.Assignment("A[i]", "x[i]", within_inames=frozenset("i")),
            lp.CInstruction((), 'printf("");', read_variables=frozenset({"A"})),
        ],
        real("A", 3),
        real("x", 3),
        seq_dependencies=True,
    )
    with pytest.raises(UnsupportedLoopError, match="C code"):
        import_loopy(unit, "kernel", [WRITE, READ])


def test_a_store_where_data_says_is_refused() -> None:
    unit = make("{[i]: 0<=i<3}", "A[m[i]] = x[i]", real("A", 3), integer("m", 3), real("x", 3))
    with pytest.raises(UnsupportedLoopError, match="depends on data"):
        import_loopy(unit, "kernel", [UPDATE, READ, READ])


def test_triangular_loops_are_refused() -> None:
    unit = make("{[i,j]: 0<=i<3 and 0<=j<=i}", "A[i, j] = x[i]", real("A", 3, 3), real("x", 3))
    with pytest.raises(UnsupportedLoopError, match="depend on each other"):
        import_loopy(unit, "kernel", [WRITE, READ])


def test_reading_what_was_never_written_is_refused() -> None:
    unit = make(
        "{[i]: 0<=i<3}",
        "A[i] = t[i] + x[i]",
        real("A", 3),
        real("x", 3),
        temporary("t", (3,)),
    )
    with pytest.raises(UnsupportedLoopError, match="before it is written"):
        import_loopy(unit, "kernel", [WRITE, READ])


def test_arguments_in_parts() -> None:
    """The fields of a mixed space are packed one after another but live in arrays of their own."""
    unit = make(
        ["{[i,j]: 0<=i,j<5}", "{[k,l]: 0<=k<3 and 0<=l<2}"],
        """
        for i, j
            A[i, j] = A[i, j] + w[i]*w[j]
        end
        for k, l
            A[k, 3 + l] = A[k, 3 + l] + 7*w[k]*w[3 + l]
        end
        """,
        real("A", 5, 5),
        real("w", 5),
        seq_dependencies=True,
    )
    blocks = [Part((r, c), (m, n)) for r, m in ((0, 3), (3, 2)) for c, n in ((0, 3), (3, 2))]
    fields = [Part((0,), (3,)), Part((3,), (2,))]
    kernel = import_loopy(
        unit, "kernel", [INC, READ], splits={0: ((5, 5), blocks), 1: ((5,), fields)}
    )
    assert [a.shape for a in kernel.arguments] == [(3, 3), (3, 2), (2, 3), (2, 2), (3,), (2,)]
    w = np.random.default_rng(8).random((CELLS, 5))
    zeros = [np.zeros((CELLS, *a.shape)) for a in kernel.arguments[:4]]
    found = evaluate_kernel(kernel, [*zeros, w[:, :3], w[:, 3:]])
    expected = w[:, :, None] * w[:, None, :]
    expected[:, :3, 3:] *= 8
    for argument, block in zip(kernel.arguments[:4], blocks, strict=True):
        (r, c), (m, n) = block.start, block.shape
        np.testing.assert_allclose(
            found[argument].reshape(CELLS, m, n), expected[:, r : r + m, c : c + n], rtol=1e-14
        )


class RandomKernel:
    """A random kernel: as loopy instructions, and run by plain Python."""

    SHAPES: ClassVar = {
        "A": (6,),
        "B": (2, 3),
        "x": (6,),
        "y": (2, 3),
        "s": (),
        "t": (3,),
        "u": (2, 3),
    }
    WRITTEN = ("A", "B", "s", "t", "u")

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.loops = 0
        self.extents: dict[str, int] = {}
        self.instructions: list[Any] = []
        self.program: list[Any] = []
        # temporaries start at zero
        for name in ("s", "t", "u"):
            self.program.append(self.zero(name))
        self.program += [self.statement({}, 0) for _ in range(rng.integers(2, 5))]
        self.program.append(self.assign("A", ("i0",), {"i0": 6}, final=True))

    def zero(self, name: str) -> Any:
        inames = [self.loop(extent) for extent in self.SHAPES[name]]
        node: Any = ("=", name, tuple((i, 1, 0) for i in inames), ("number", 0.0), False)
        for iname in reversed(inames):
            node = ("for", iname, [node])
        return node

    def loop(self, extent: int) -> str:
        name = f"i{self.loops}"
        self.loops += 1
        self.extents[name] = extent
        return name

    def statement(self, scope: dict[str, int], depth: int) -> Any:
        if depth < 3 and self.rng.random() < (0.75 if depth == 0 else 0.45):
            iname = self.loop(int(self.rng.integers(2, 4)))
            inner = {**scope, iname: self.extents[iname]}
            body = [self.statement(inner, depth + 1) for _ in range(self.rng.integers(1, 4))]
            return ("for", iname, body)
        return self.assign(str(self.rng.choice(self.WRITTEN)), None, scope)

    def assign(self, name: str, _: Any, scope: dict[str, int], final: bool = False) -> Any:
        if final:
            iname = self.loop(6)
            scope = {iname: 6}
            subscripts: Any = ((iname, 1, 0),)
        else:
            subscripts = self.subscripts(name, scope)
        adds = final or self.rng.random() < 0.6
        value = self.expression(scope, 2)
        node = ("=", name, subscripts, value, adds)
        return ("for", iname, [node]) if final else node

    def subscripts(self, name: str, scope: dict[str, int]) -> tuple[Any, ...]:
        found = []
        for extent in self.SHAPES[name]:
            choices: list[Any] = [(None, 0, int(self.rng.integers(extent)))]
            for iname, n in scope.items():
                choices += [
                    (iname, factor, shift)
                    for factor in (1, 1, 2, -1)
                    for shift in range(extent)
                    if shift + min(0, factor * (n - 1)) >= 0
                    and shift + max(0, factor * (n - 1)) < extent
                ]
            found.append(choices[int(self.rng.integers(len(choices)))])
        return tuple(found)

    def expression(self, scope: dict[str, int], depth: int) -> Any:
        kind = self.rng.random()
        if depth == 0 or kind < 0.3:
            if self.rng.random() < 0.2:
                return ("number", float(self.rng.integers(1, 9)) / 8)
            name = str(self.rng.choice(list(self.SHAPES)))
            return ("read", name, self.subscripts(name, scope))
        operands = [self.expression(scope, depth - 1) for _ in range(2)]
        if kind < 0.55:
            return ("+", *operands)
        if kind < 0.8:
            return ("*", *operands)
        if kind < 0.9:
            return ("sin", operands[0])
        return ("if", *operands, self.expression(scope, depth - 1))

    # -- as loopy ------------------------------------------------------------------------------

    def unit(self) -> Any:
        self.priorities: set[tuple[str, ...]] = set()
        self.emit(self.program, ())
        domains = [f"{{[{i}]: 0<={i}<{n}}}" for i, n in self.extents.items()]
        arguments = [real(n, *self.SHAPES[n]) for n in ("A", "B", "x", "y")]
        unit = make(
            domains,
            self.instructions,  # type: ignore[arg-type]
            *arguments,
            *(temporary(n, self.SHAPES[n]) for n in ("s", "t", "u")),
            seq_dependencies=True,
        )
        # loops around the same instructions could be taken in any order otherwise
        for priority in self.priorities:
            unit = lp.prioritize_loops(unit, priority)
        return unit

    def emit(self, nodes: list[Any], inames: tuple[str, ...]) -> None:
        for node in nodes:
            if node[0] == "for":
                self.emit(node[2], (*inames, node[1]))
                continue
            self.priorities.add(inames)
            _, name, subscripts, value, adds = node
            left = self.text(("read", name, subscripts))
            right = self.text(value)
            right = f"{left} + {right}" if adds else right
            self.instructions.append(
                lp.Assignment(
                    left, right, within_inames=frozenset(inames), within_inames_is_final=True
                )
            )

    def text(self, node: Any) -> str:
        match node:
            case ("number", value):
                return repr(value)
            case ("read", name, subscripts):
                inside = ", ".join(
                    str(shift) if iname is None else f"{factor}*{iname} + {shift}"
                    for iname, factor, shift in subscripts
                )
                return f"{name}[{inside}]" if subscripts else name
            case ("if", a, b, c):
                return f"if({self.text(a)} < 0.5, {self.text(b)}, {self.text(c)})"
            case ("sin", a):
                return f"sin({self.text(a)})"
            case (operator, a, b):
                return f"({self.text(a)} {operator} {self.text(b)})"
        raise AssertionError(node)

    # -- by Python -----------------------------------------------------------------------------

    def run(self, arrays: dict[str, np.ndarray]) -> None:
        self.execute(self.program, arrays, {})

    def execute(self, nodes: list[Any], arrays: dict[str, np.ndarray], at: dict[str, int]) -> None:
        for node in nodes:
            if node[0] == "for":
                for i in range(self.extents[node[1]]):
                    self.execute(node[2], arrays, {**at, node[1]: i})
                continue
            _, name, subscripts, value, adds = node
            index = self.index(subscripts, at)
            old = arrays[name][index]
            arrays[name][index] = self.evaluate(value, arrays, at) + (old if adds else 0.0)

    def index(self, subscripts: Any, at: dict[str, int]) -> tuple[int, ...]:
        return tuple(s if i is None else f * at[i] + s for i, f, s in subscripts)

    def evaluate(self, node: Any, arrays: dict[str, np.ndarray], at: dict[str, int]) -> float:
        match node:
            case ("number", value):
                return value
            case ("read", name, subscripts):
                return float(arrays[name][self.index(subscripts, at)])
            case ("sin", a):
                return float(np.sin(self.evaluate(a, arrays, at)))
            case ("if", a, b, c):
                chosen = b if self.evaluate(a, arrays, at) < 0.5 else c
                return self.evaluate(chosen, arrays, at)
            case (operator, a, b):
                left, right = self.evaluate(a, arrays, at), self.evaluate(b, arrays, at)
                return left + right if operator == "+" else left * right
        raise AssertionError(node)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_kernels(first: int) -> None:
    """Kernels with loops of every kind, against a plain interpreter."""
    for seed in range(first, first + 10):
        print(f"seed {seed}")
        rng = np.random.default_rng(seed)
        random = RandomKernel(rng)
        intents = [INC if seed % 3 == 0 else UPDATE, UPDATE, READ, READ]
        kernel = import_loopy(random.unit(), "kernel", intents)
        packs = [rng.uniform(0, 1, (2, *a.shape)) for a in kernel.arguments]
        if intents[0] is INC:
            packs[0][...] = 0
        with np.errstate(all="ignore"):
            found = evaluate_kernel(kernel, packs)
        for cell in range(2):
            shapes = RandomKernel.SHAPES
            arrays = {n: np.zeros(shapes[n]) for n in ("s", "t", "u")}
            for argument, pack in zip(kernel.arguments, packs, strict=True):
                arrays[argument.name] = pack[cell].copy()
            with np.errstate(all="ignore"):
                random.run(arrays)
            for argument in kernel.arguments[:2]:
                expected = arrays[argument.name]
                # an increment of zero needs no output
                nothing = np.zeros((2, argument.size))
                result = found.get(argument, nothing)[cell].reshape(expected.shape)
                np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)

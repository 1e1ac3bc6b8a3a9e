"""The stages of lowering: which dialects they have, that they are valid, what they promise."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from builder import KernelBuilder, dims_of, entry, total
from loops import every_access, random_loop
from reference import run_parloop_reference
from xdsl.dialects import memref
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.printer import Printer

from pyop3_mlir import engine
from pyop3_mlir.kernels.program import IndexOf, Op, Scalar, Table
from pyop3_mlir.lowering import interface
from pyop3_mlir.lowering.build import operand_types
from pyop3_mlir.lowering.dialects import print_module
from pyop3_mlir.lowering.interface import local_bytes, segmented_arguments
from pyop3_mlir.lowering.passes.bufferise import ALIGNMENT
from pyop3_mlir.lowering.pipeline import lower, stages
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import INC, READ, WRITE, Argument, IndexTable, IterationSet, Parloop

TENSOR = {"arith", "builtin", "complex", "func", "linalg", "math", "scf", "tensor"}
UPSTREAM = TENSOR | {"memref", "vector"}


def functions_loop():
    """A kernel that calls the C library, in real and complex numbers."""
    k = KernelBuilder("functions")
    y, x = k.argument(2), k.argument(2)
    (i,) = dims_of((2,))
    wide = Op("cast", entry(x, i), dtype=complex)
    terms = [
        Op("erf", entry(x, i)),
        Op("bessel_j", Scalar(1), entry(x, i)),
        Op("pow", entry(x, i), entry(x, 0)),
        Op("real", Op("tanh", wide)),
    ]
    k.store(y, (i,), total(*terms))
    table = IndexTable(np.zeros((9, 2), np.int64), 1, allow_negative=True)
    return Parloop(
        k.kernel(),
        IterationSet(9, entities=np.arange(9, dtype=np.int32)),
        [
            Argument.indirect(np.zeros(1), INC, table),
            Argument.direct(np.zeros((9, 2)), READ),
        ],
    )


def facet_loop():
    """Entries of tables by the number of a facet, and a condition that differs between cells."""
    k = KernelBuilder("facet")
    y, x, facet = k.argument(2), k.argument(2), k.argument(1, dtype=np.int32)
    (i,) = dims_of((2,))
    number = Op("min", Op("cast", entry(facet, 0), dtype=np.int64), Scalar(2))
    weight = entry(Table(np.array([[2.0, 9.0], [3.0, 9.0], [5.0, 9.0]])), number, i)
    positive = Op("lt", Scalar(0.0), entry(x, i))
    k.store(y, (i,), Op("select", positive, Op("mul", weight, entry(x, i)), weight))
    rng = np.random.default_rng(3)
    return Parloop(
        k.kernel(),
        IterationSet(21),
        [
            Argument.direct(np.zeros((21, 2)), WRITE),
            Argument.direct(rng.standard_normal((21, 2)), READ),
            Argument.direct(rng.integers(0, 3, (21, 1)).astype(np.int32), READ),
        ],
    )


def moments_loop(points=40, cells=21, positions=False):
    """Sums of six fields against one table, or the point's number, and sums of these."""
    k = KernelBuilder("moments")
    y, x = k.argument(6, 2), k.argument(points)
    rng = np.random.default_rng(8)
    table, other = (
        Table(rng.integers(-3, 4, shape).astype(float)) for shape in ((3, points), (2, 3))
    )
    (q,), (i, r), (j, s) = dims_of((points,)), dims_of((3, points)), dims_of((2, 3))
    fields = k.compute(
        (q,), *(Op("add", entry(x, q), Op("mul", Scalar(float(n)), entry(x, 0))) for n in range(6))
    )
    weight = entry(table, i, r)
    if positions:
        weight = Op("add", weight, Op("cast", IndexOf(r), dtype=np.dtype(float)))
    sums = k.compute((i,), *(Op("mul", entry(f, r), weight) for f in fields), over=(r,))
    again = k.compute(
        (j,), *(Op("mul", entry(other, j, s), entry(v, s)) for v in reversed(sums)), over=(s,)
    )
    for n, value in enumerate(again):
        k.output(y, value, (j,), Op("add", Scalar(2 * n), IndexOf(j)))
    buffer = rng.integers(-4, 5, (cells, points)).astype(float)
    return Parloop(
        k.kernel(),
        IterationSet(cells),
        [Argument.direct(np.zeros((cells, 12)), INC), Argument.direct(buffer, READ)],
    )


LOOPS = {
    "moments": moments_loop,
    "facet": facet_loop,
    "float64": lambda: every_access("float64"),
    "complex128": lambda: every_access("complex128"),
    "int64": lambda: every_access("int64"),
    "functions": functions_loop,
    "random": random_loop(11),
}
every_loop = pytest.mark.parametrize("loop", LOOPS)


def dialects(module: ModuleOp) -> set[str]:
    return {op.name.split(".")[0] for op in module.walk()}


def upstream_accepts(texts, tmp_path):
    """Let IREE's MLIR parse and verify modules, all in one process."""
    path = tmp_path / "stages.mlir"
    path.write_text("\n// -----\n".join(texts))
    tool = Path(sys.executable).parent / "iree-opt"
    command = [tool, "--split-input-file", path, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("loop", "schedule"),
    [
        *((loop, Schedule()) for loop in LOOPS),
        ("float64", Schedule(width=1)),
        ("float64", Schedule("segmented", width=4, tile=3, unroll=2)),
        ("random", Schedule("segmented", width=16, tile=1, unroll=1)),
    ],
    ids=str,
)
def test_stages_are_valid_and_upstream(loop, schedule, tmp_path):
    """xDSL verifies each stage, IREE's MLIR reads it, and only the last one has other dialects."""
    parloop = LOOPS[loop]()
    texts = []
    for name, module in stages(parloop.kernel, parloop.spec, schedule):
        module.verify()
        texts.append(print_module(module))
        if name != "outline-dispatch":
            assert dialects(module) <= (TENSOR if name in ("tensor", "block-cells") else UPSTREAM)
    upstream_accepts(texts, tmp_path)


@every_loop
def test_flat_tensor_stage_is_the_same(loop):
    """Batching is chosen after the first stage."""
    parloop = LOOPS[loop]()
    first = [
        print_module(next(iter(stages(parloop.kernel, parloop.spec, schedule)))[1])
        for schedule in (Schedule(), Schedule(batching="flat"))
    ]
    assert first[0] == first[1]


def stage(wanted, loop, strategy="in_order"):
    parloop = LOOPS[loop]()
    for name, module in stages(parloop.kernel, parloop.spec, Schedule(strategy)):
        if name == wanted:
            return module
    raise AssertionError(f"there is no stage {wanted}")


@every_loop
def test_stack_memory_is_aligned(loop):
    found = [op for op in stage("bufferise", loop).walk() if isinstance(op, memref.AllocaOp)]
    assert found
    for op in found:
        assert op.alignment.value.data == ALIGNMENT
        # IREE's compiler crashes on index, and vectors are loaded from whole rows
        assert str(op.memref.type.element_type) != "index"


@every_loop
def test_tables_are_aligned(loop):
    for op in stage("bufferise", loop).walk():
        if isinstance(op, memref.GlobalOp):
            assert op.alignment.value.data == ALIGNMENT


@every_loop
def test_blocks_have_static_shapes(loop):
    module = stage("block-cells", loop)
    sizes = {
        size
        for op in module.walk()
        if op.name == "tensor.empty"
        for size in op.results[0].type.get_shape()
    }
    assert -1 not in sizes
    assert not any(size < 0 for size in sizes)


@every_loop
def test_vectorised_code_has_no_linalg(loop):
    assert "linalg" not in dialects(stage("vectorise", loop))


def test_dispatch_works_in_place():
    """Every changed buffer is a result that is tied to its operand."""
    parloop = LOOPS["float64"]()
    text = lower(parloop.kernel, parloop.spec, Schedule())
    changed = {
        spec.buffer
        for formal, spec in zip(parloop.kernel.arguments, parloop.spec.arguments, strict=True)
        if any(output.argument is formal for output in parloop.kernel.outputs)
    }
    assert text.count("iree.abi.output") == len(changed)


def test_module_depends_on_no_size():
    """One module serves every mesh: nothing but the kernel and the kinds of operands enter it."""
    texts = {
        lower(parloop.kernel, parloop.spec, Schedule())
        for parloop in (every_access("float64", cells) for cells in (11, 500))
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("dtype", "schedule", "kind"),
    [
        ("float64", Schedule("in_order"), "cpu"),
        ("complex64", Schedule("segmented", "flat"), "cpu"),
        ("int32", Schedule("segmented"), "cuda"),
        ("float32", Schedule("colour"), "vulkan"),
        ("float64", Schedule("atomic"), "hip"),
    ],
    ids=str,
)
def test_every_stage_is_printed_as_xdsl_prints_it(dtype, schedule, kind):
    loop = every_access(dtype)
    for _, module in stages(loop.kernel, loop.spec, schedule, 0, kind):
        stream = StringIO()
        Printer(stream, print_generic_format=True).print_op(module)
        assert print_module(module) == stream.getvalue() + "\n"


def test_text_is_the_same_in_each_process():
    """Otherwise the cache on disk would miss, and results could differ between ranks."""
    program = (
        "import hashlib; from loops import every_access, random_loop;"
        "from pyop3_mlir.lowering.pipeline import lower;"
        "from pyop3_mlir.lowering.schedule import Schedule;"
        "loops = [every_access('float64'), random_loop(11)(), random_loop(5)()];"
        "text = [lower(p.kernel, p.spec, Schedule(s)) for p in loops"
        " for s in ('in_order', 'segmented')];"
        "keys = [p.kernel.fingerprint() for p in loops];"
        "print(hashlib.sha256(repr((text, keys)).encode()).hexdigest())"
    )
    found = set()
    for seed in ("1", "2"):
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(done.stdout.strip()) == hashlib.sha256().digest_size * 2


def test_threads_share_a_loop_in_chunks():
    one = lower(*_kernel_and_spec(), Schedule("segmented"), 1)
    two = lower(*_kernel_and_spec(), Schedule("segmented"), 2)
    assert "hal.interface.workgroup.id" not in one
    assert "hal.interface.workgroup.id" in two
    in_order = lower(*_kernel_and_spec(), Schedule("in_order"), 2)
    assert "hal.interface.workgroup.id" not in in_order


def _kernel_and_spec():
    parloop = LOOPS["float64"]()
    return parloop.kernel, parloop.spec


def test_operands():
    """The order that the engine binds by: range, entities, tables, buffers, contributions."""
    parloop = functions_loop()
    types = [str(type_) for type_ in operand_types(parloop.spec, True)]
    assert types == [
        "i64", "i64", "tensor<?xi32>", "tensor<?xi64>", "tensor<?xf64>", "tensor<?xf64>",
        "tensor<?xf64>",
    ]  # fmt: skip
    assert segmented_arguments(parloop.spec) == [0]
    module = stage("tensor", "functions", "segmented")
    loop = next(op for op in module.ops if op.name == "func.func")
    assert [str(arg.type) for arg in loop.body.block.args] == types


def test_local_memory_of_a_cell():
    """What is read from packs, and all temporaries; not what is only stored."""
    k = KernelBuilder("local")
    y, x, n = k.argument(2, 2), k.argument(2), k.argument(3, dtype=np.int32)
    i, j = dims_of((2, 2))
    k.store(y, (i, j), Op("mul", entry(x, i), Op("cast", entry(n, j), dtype=float)))
    assert local_bytes(k.kernel(), 1) == 8 * 4 + 8 * 2 + 4 * 3


def test_local_memory_is_found_once_for_a_kernel(monkeypatch):
    """Binding a loop to new arrays asks for it; that is done at each assembly."""
    parloop = LOOPS["float64"]()
    found = local_bytes(parloop.kernel, 4)
    monkeypatch.setattr(interface, "bytes_of_temporaries", lambda *_: pytest.fail("looked again"))
    assert local_bytes(parloop.kernel, 4) == found


def test_what_does_not_vary_is_computed_once():
    """A value from globals and tables only stands before the loop over blocks."""
    k = KernelBuilder("uniform")
    y, g = k.argument(3), k.argument(3)
    (i,) = dims_of((3,))
    doubled = k.compute((i,), Op("mul", entry(g, i), Scalar(2.0)))
    k.store(y, (i,), Op("sub", entry(doubled, i), Scalar(1.0)))
    loop = Parloop(
        k.kernel(),
        IterationSet(9),
        [Argument.direct(np.zeros((9, 3)), WRITE), Argument.glob(np.zeros(3), READ)],
    )
    for name, module in stages(loop.kernel, loop.spec, Schedule()):
        if name != "block-cells":
            continue
        function = next(op for op in module.ops if op.name == "func.func")
        (blocks,) = (op for op in function.body.block.ops if op.name == "scf.for")
        assert not any(op.name == "linalg.generic" for op in blocks.walk())
        generics = [op for op in function.walk() if op.name == "linalg.generic"]
        assert len(generics) == 3
        for op in generics:
            assert isinstance(op.results[0].type, TensorType)
            assert list(op.results[0].type.get_shape()) == [3]


@pytest.mark.parametrize(("points", "width"), [(40, 4), (4099, 8), (40, 1)])
def test_moments_of_many_fields(points, width):
    """More results than a tile has: stacked, also where points are worked through in strips."""
    schedule = Schedule("in_order", "blocked", width, 4, 4)
    ours, theirs = moments_loop(points), moments_loop(points)
    for name, module in stages(ours.kernel, ours.spec, schedule):
        if name == "stack-results":
            operations = [op for op in module.walk() if isinstance(op, GenericOp)]
            # what reads parts of a stack in another order stays
            assert [len(op.outputs) for op in operations if _sums(op)] == [1, 6]
    engine.compile(ours, "cpu", schedule)()
    run_parloop_reference(theirs)
    np.testing.assert_array_equal(ours.arguments[0].buffer, theirs.arguments[0].buffer)


def test_moments_with_the_number_of_a_point():
    """Stacking would change which dimension an index is of."""
    ours, theirs = (moments_loop(positions=True) for _ in range(2))
    engine.compile(ours, "cpu", Schedule("in_order", "blocked", 4, 4, 4))()
    run_parloop_reference(theirs)
    np.testing.assert_array_equal(ours.arguments[0].buffer, theirs.arguments[0].buffer)


def _sums(op: GenericOp) -> bool:
    return any(kind.data == IteratorType.REDUCTION for kind in op.iterator_types)


def test_entries_by_facet():
    loop = facet_loop()
    engine.compile(loop, "cpu", Schedule("in_order", "blocked", 4))()
    y, x, facet = (argument.buffer for argument in loop.arguments)
    weight = np.array([[2.0, 9.0], [3.0, 9.0], [5.0, 9.0]])[facet[:, 0]]
    np.testing.assert_array_equal(y, np.where(x > 0, weight * x, weight))


def test_results_of_several_precisions_in_one_contraction():
    """A symmetric table for both: folded only where all is of one precision."""
    half = np.arange(1.0, 33.0).reshape(4, 8) ** 2
    values = np.vstack([half, half[::-1, ::-1]])
    k = KernelBuilder("mixed")
    y, x = k.argument(8), k.argument(8)
    single, other = (k.argument(8, dtype=np.float32) for _ in range(2))
    (i,), (j,) = dims_of((8,)), dims_of((8,))
    bodies = (
        Op("mul", entry(Table(values), i, j), entry(x, j)),
        Op("mul", entry(Table(values.astype(np.float32)), i, j), entry(other, j)),
    )
    wide, narrow = k.compute((i,), *bodies, over=(j,))
    k.output(y, wide)
    k.output(single, narrow)
    data = np.random.default_rng(2).standard_normal((13, 8))
    arguments = [
        Argument.direct(np.zeros((13, 8)), WRITE),
        Argument.direct(data, READ),
        Argument.direct(np.zeros((13, 8), np.float32), WRITE),
        Argument.direct(data.astype(np.float32), READ),
    ]
    loop = Parloop(k.kernel(), IterationSet(13), arguments)
    engine.compile(loop, "cpu", Schedule("in_order", "blocked", 4, 8, 8))()
    expected = data @ values.T
    scale = np.abs(expected).max()
    np.testing.assert_allclose(arguments[0].buffer, expected, atol=1e-13 * scale)
    np.testing.assert_allclose(arguments[2].buffer, expected, atol=1e-5 * scale)

"""GPUs: loops on a Vulkan device, where there is one, and the code that is made for others.

Mesa's llvmpipe is a real Vulkan device with memory of its own: loops run on it without a GPU. For
CUDA and ROCm loops are compiled only, and the assembly is looked at.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

import numpy as np
import pytest
import scipy.sparse
from builder import KernelBuilder, dims_of, entry
from meshes import one_cell_periodic, random_map
from reference import run_parloop_reference
from test_engine import (
    action_loop,
    check,
    differences,
    every_access,
    scaling,
    smoothing,
    whole,
)

from pyop3_mlir import engine
from pyop3_mlir.autotune.candidates import DeviceTraits, KernelStatistics, heuristic
from pyop3_mlir.bench.cases import Case, case_named
from pyop3_mlir.errors import DeviceError, UnsupportedLoopError
from pyop3_mlir.kernels.program import Op
from pyop3_mlir.lowering.pipeline import lower
from pyop3_mlir.lowering.schedule import BATCHINGS, WORKGROUP, Schedule
from pyop3_mlir.lowering.workgroups import resize_workgroups
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    READ,
    WRITE,
    Argument,
    IndexTable,
    IterationSet,
    Parloop,
)
from pyop3_mlir.planning import csr_pattern, csr_positions
from pyop3_mlir.runtime.compile import _compile, compile_module
from pyop3_mlir.runtime.devices import offline_device

STRATEGIES = ("in_order", "colour", "segmented")

strategies = pytest.mark.parametrize("strategy", STRATEGIES)
batchings = pytest.mark.parametrize("batching", BATCHINGS)


# ---------------------------------------------------------------------------------------------
# On a Vulkan device


@strategies
@batchings
def test_every_access_mode_and_kind(vulkan, strategy, batching):
    schedule = Schedule(strategy, batching)
    check(lambda: every_access("float64", reductions=strategy != "colour"), schedule, vulkan)


@pytest.mark.parametrize("dtype", ["uint32", "complex128"])
def test_every_access_mode_and_kind_of_other_types(vulkan, dtype):
    check(lambda: every_access(dtype), Schedule("segmented"), vulkan)


@strategies
def test_any_number_of_cells(vulkan, strategy):
    """Around the size of a workgroup, too."""
    for cells in (0, 1, 2, WORKGROUP - 1, WORKGROUP, 2 * WORKGROUP + 1):
        values = random_map(cells, 3, 9, cells)
        check(lambda values=values: action_loop(values, 9), Schedule(strategy), vulkan)


@strategies
def test_range_of_iterations(vulkan, strategy):
    values = random_map(41, 3, 19, 1)
    ours, theirs = action_loop(values, 19), action_loop(values, 19)
    loop = engine.compile(ours, vulkan, Schedule(strategy))
    for start, stop in [(0, 0), (0, 5), (3, 20), (40, 41), (3, 20), (0, 41)]:
        loop(start, stop)
        run_parloop_reference(theirs, start, stop)
        assert differences(ours, theirs) == {}, (start, stop)


@strategies
@pytest.mark.parametrize("what", ["permuted", "repeated"])
def test_subset(vulkan, strategy, what):
    rng = np.random.default_rng(8)
    entities = rng.permutation(33)[:21] if what == "permuted" else rng.integers(0, 33, 27)
    iterations = IterationSet(len(entities), entities=entities.astype(np.int32))
    values = random_map(33, 3, 15, 4)
    check(lambda: action_loop(values, 15, iterations), Schedule(strategy), vulkan)


@strategies
@pytest.mark.parametrize("access", [INC, WRITE], ids=["INC", "WRITE"])
def test_one_cell_that_touches_one_target_three_times(vulkan, strategy, access):
    values = one_cell_periodic(3)
    check(lambda: action_loop(values, 1, access=access), Schedule(strategy), vulkan)


@strategies
def test_last_cell_wins_where_targets_are_shared(vulkan, strategy):
    values = random_map(300, 3, 8, 12)
    check(lambda: action_loop(values, 8, access=WRITE), Schedule(strategy), vulkan)


@strategies
def test_negative_entries_read_as_zero_and_are_dropped(vulkan, strategy):
    values = random_map(43, 3, 17, 6, negative=0.3)
    check(lambda: action_loop(values, 17, negative=True), Schedule(strategy), vulkan)


def test_cells_see_what_cells_before_them_stored(vulkan):
    check(smoothing(), Schedule(), vulkan)


@pytest.mark.parametrize("strategy", ["colour", "segmented"])
@pytest.mark.parametrize("arity", [3, 6])
def test_matrix(vulkan, strategy, arity):
    """Against scipy's own assembly; with six columns the table is compact."""
    cells, nodes = 150, 30
    rng = np.random.default_rng(3)
    table = IndexTable(random_map(cells, arity, nodes, 3), nodes)
    matrices = whole(rng, (cells, arity, arity), float)
    indptr, indices = csr_pattern(table, table, nodes, nodes)
    data = np.zeros(len(indices))
    loop = Parloop(
        scaling(arity, arity),
        IterationSet(cells),
        [
            Argument.matrix(data, INC, csr_positions(indptr, indices, table, table), table),
            Argument.direct(matrices, READ),
            Argument.direct(np.ones(cells), READ),
        ],
    )
    engine.compile(loop, vulkan, Schedule(strategy))()
    rows = np.repeat(table.values, arity, axis=1).reshape(-1)
    columns = np.tile(table.values, (1, arity)).reshape(-1)
    expected = scipy.sparse.coo_matrix((matrices.reshape(-1), (rows, columns)), (nodes, nodes))
    found = scipy.sparse.csr_matrix((data, indices, indptr), (nodes, nodes))
    np.testing.assert_array_equal(found.toarray(), expected.toarray())


@pytest.mark.parametrize(
    "schedule", [Schedule("segmented"), Schedule("segmented", "flat")], ids=str
)
def test_a_finite_element_action(vulkan, schedule):
    """Contractions and tables, to rounding, against the engine on the CPU."""
    case = case_named("laplace_p2_triangle_action")
    ours, theirs = case.loop(0.001), case.loop(0.001)
    engine.compile(ours.parloop, vulkan, schedule)()
    engine.compile(theirs.parloop, "cpu", Schedule())()
    scale = np.abs(theirs.output).max()
    assert np.abs(ours.output - theirs.output).max() < 1e-14 * scale


def test_atomics_are_refused_where_the_device_has_none(vulkan):
    with pytest.raises(UnsupportedLoopError, match=r"loop action: .*no atomic addition"):
        engine.compile(action_loop(random_map(9, 3, 9, 1), 9), vulkan, Schedule("atomic"))


def test_memory_that_is_not_there_is_an_error_that_names_the_loop(vulkan):
    """The array is as large as all memory; the system gives it out only as it is written to."""
    assert vulkan.info.memory is not None
    huge = np.zeros(2 * vulkan.info.memory // 8)
    loop = Parloop(
        scaling(1),
        IterationSet(4),
        [
            Argument.direct(huge, WRITE, "huge"),
            Argument.direct(np.ones(4), READ),
            Argument.direct(np.ones(4), READ),
        ],
    )
    with pytest.raises(DeviceError, match=r"loop scaling, operand \d.*vulkan:0.*bytes\) cannot"):
        engine.compile(loop, vulkan, Schedule("colour"))
    assert huge[0] == 0


# ---------------------------------------------------------------------------------------------
# What is compiled for CUDA and ROCm


def _shared_loop():
    """A loop with a contraction that adds to shared targets, as ``(kernel, spec)``."""
    loop = action_loop(random_map(41, 3, 19, 1), 19)
    return loop.kernel, loop.spec


@cache
def compiled(kind: str, architecture: str, schedule: Schedule) -> bytes:
    """The module of :func:`_shared_loop`."""
    return engine.Module(*_shared_loop(), schedule, offline_device(kind, architecture)).build()


def kernels(module: bytes) -> dict[str, str]:
    """The PTX of each kernel in a module for CUDA, by name."""
    texts = [text.decode() for text in re.findall(rb"//\n// Generated by.*?\0", module, re.S)]
    parts = [part for text in texts for part in text.split(".visible .entry ")[1:]]
    return {part.split("(", 1)[0]: part for part in parts}


def threads(kernel: str) -> int:
    """Threads of a workgroup."""
    found = re.search(r"\.maxntid (\d+), 1, 1", kernel)
    assert found is not None
    return int(found[1])


def amd_workgroups(module: bytes) -> list[int]:
    """Threads of a workgroup of each kernel, from the metadata of code objects (MessagePack)."""
    sizes = []
    for found in re.finditer(rb"\.max_flat_workgroup_size(\xcd..|\xcc.|.)", module, re.DOTALL):
        value = found[1]
        sizes.append(int.from_bytes(value[1:] if len(value) > 1 else value, "big"))
    return sizes


gpu_schedules = pytest.mark.parametrize(
    "schedule",
    [Schedule(s, b) for s in ("colour", "segmented", "atomic") for b in BATCHINGS],
    ids=str,
)


@gpu_schedules
def test_cuda_kernels_of_ours_use_whole_workgroups(schedule):
    found = kernels(compiled("cuda", "sm_80", schedule))
    own = {name for name in found if not name.startswith("loop_dispatch")}
    assert own == {
        "scatter" if schedule.batching == "flat" else "loop",
        *(["reduce_0"] if schedule.strategy == "segmented" else []),
    }
    # IREE's own as well
    assert {threads(kernel) for kernel in found.values()} == {WORKGROUP}


@pytest.mark.parametrize("workgroup", [64, 256])
@batchings
def test_workgroups_have_the_size_that_the_schedule_says(workgroup, batching):
    schedule = Schedule("segmented", batching, workgroup=workgroup)
    found = kernels(compiled("cuda", "sm_80", schedule))
    assert {threads(kernel) for kernel in found.values()} == {workgroup}
    sizes = amd_workgroups(compiled("hip", "gfx90a", schedule))
    assert set(sizes) == {workgroup}
    assert len(sizes) == len(found)


@gpu_schedules
def test_cuda_kernels_compute_in_double_precision(schedule):
    text = "".join(kernels(compiled("cuda", "sm_80", schedule)).values())
    # IREE's own contractions do not fuse the two
    product = "fma" if schedule.batching == "blocked" else "mul"
    assert re.search(rf"\b{product}\.rn\.f64\b", text)
    assert not re.search(r"\.f(16|32)\b", text)


def test_neighbouring_threads_do_neighbouring_cells():
    """IREE's own choice for contractions is neighbouring rows."""
    text = """
#config = #iree_gpu.lowering_config<{reduction = [0, 0, 2], thread = [1, 1, 0], workgroup = [32, 1, 0]}>
#info = #iree_codegen.translation_info<pipeline = #iree_gpu.pipeline<TileAndFuse> workgroup_size = [32, 1, 1] subgroup_size = 32>
func.func @d() attributes {translation_info = #info} {
  %0 = linalg.generic {iterator_types = ["parallel", "parallel", "reduction"]} attrs = {lowering_config = #config} {
"""  # noqa: E501
    changed = resize_workgroups(text, 256)
    assert "reduction = [0, 0, 2], thread = [1, 1, 0], workgroup = [1, 256, 0]" in changed
    assert "TileAndFuse> workgroup_size = [256, 1, 1] subgroup_size = 32" in changed
    assert "#config" not in changed


def test_dispatches_of_ours_are_left_alone():
    info = "<pipeline = #iree_gpu.pipeline<Distribute> workgroup_size = [1, 1, 1]>"
    text = f"func.func @a() attributes {{info = #iree_codegen.translation_info{info}}} {{\n"
    assert resize_workgroups(text, 256) == text


def test_one_thread_where_order_matters():
    found = kernels(compiled("cuda", "sm_80", Schedule()))
    assert {name: threads(kernel) for name, kernel in found.items()} == {"loop": 1}


@batchings
def test_cuda_adds_by_relaxed_atomics_of_the_gpu(batching):
    found = kernels(compiled("cuda", "sm_80", Schedule("atomic", batching)))
    kernel = found["loop" if batching == "blocked" else "scatter"]
    atomics = re.findall(r"\b(?:atom|red)\.\S+", kernel)
    assert set(atomics) <= {"atom.relaxed.gpu.global.add.f64", "red.relaxed.gpu.global.add.f64"}
    assert len(atomics) == 3


@pytest.mark.parametrize("strategy", ["colour", "segmented"])
def test_cuda_uses_atomics_in_the_atomic_strategy_only(strategy):
    text = "".join(kernels(compiled("cuda", "sm_80", Schedule(strategy))).values())
    assert not re.search(r"\b(?:atom|red)\.", text)


@pytest.mark.parametrize("name", ["laplace_p1_tetrahedron_action", "mass_p3_tetrahedron_action"])
def test_cuda_keeps_kernels_in_registers_and_tables_in_the_code(name):
    """With the schedule that is taken unmeasured: what a thread loads are its cell's own values."""
    loop = case_named(name).loop(0.001).parloop
    schedule = heuristic(
        KernelStatistics.of(loop.kernel), DeviceTraits(gpu=True, atomics=True), ["atomic"]
    )
    text = lower(loop.kernel, loop.spec, schedule, 0, "cuda")
    module = compile_module(text, offline_device("cuda", "sm_80"), cache=None)
    kernel = kernels(module)["loop"]
    assert ".local" not in kernel
    loads = re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.b64", kernel)
    assert sum(int(width or 1) for width in loads) == sum(
        a.slots for a in loop.arguments if not a.access.writes
    )


def doubling(access, dtype):
    """A loop with atomics of a kind: ``y[map] op= 2 x``."""
    k = KernelBuilder("atomics")
    y, x = k.argument(2, dtype=dtype), k.argument(2, dtype=dtype)
    (i,) = dims_of((2,))
    k.store(y, (i,), Op("add", entry(x, i), entry(x, i)))
    table = IndexTable(random_map(9, 2, 5, 1), 5)
    return Parloop(
        k.kernel(),
        IterationSet(9),
        [
            Argument.indirect(np.zeros(5, dtype), access, table),
            Argument.direct(np.zeros((9, 2), dtype), READ),
        ],
    )


@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942"])
@pytest.mark.parametrize(
    ("access", "dtype", "expected"),
    [
        (INC, "float64", {"global_atomic_add_f64"}),
        (MIN, "float64", {"global_atomic_min_f64"}),
        (MAX, "float64", {"global_atomic_max_f64"}),
        (INC, "float32", {"global_atomic_add_f32"}),
        (INC, "int32", {"global_atomic_add"}),
    ],
    ids=lambda value: getattr(value, "name", value if isinstance(value, str) else None),
)
def test_amd_gpus_change_memory_by_one_instruction(access, dtype, expected, architecture, tmp_path):
    """No loop that compares and swaps, ``global_atomic_cmpswap``."""
    loop = doubling(access, dtype)
    text = lower(loop.kernel, loop.spec, Schedule("atomic"), 0, "hip")
    flags = offline_device("hip", architecture).target.flags
    _compile(text, [*flags, f"--iree-hal-dump-executable-intermediates-to={tmp_path}"], "doubling")
    (assembly,) = tmp_path.glob("*.rocmasm")
    assert set(re.findall(r"^\s*(\w*atomic\w*)", assembly.read_text(), re.MULTILINE)) == expected


@cache
def ptxas() -> str | None:
    """NVIDIA's assembler, where a CUDA toolkit is installed; no GPU is needed."""
    found = shutil.which("ptxas")
    nvcc = shutil.which("nvcc")
    if found is None and nvcc is not None:
        command = [nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        home = re.search(r"_HERE_=(.*)", said)
        found = shutil.which("ptxas", path=home[1]) if home else None
    return found


def assembled(module: bytes, folder, architecture: str) -> dict[str, tuple[int, int]]:
    """Registers of each kernel, and bytes that it has to keep in memory for want of them."""
    assembler = ptxas()
    if assembler is None:
        pytest.skip("needs ptxas of a CUDA toolkit")
    found = {}
    for text in re.findall(rb"//\n// Generated by.*?\0", module, re.DOTALL):
        source = folder / "kernel.ptx"
        source.write_bytes(text.rstrip(b"\0"))
        command = [assembler, f"-arch={architecture}", "-v", source, "-o", folder / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for kernel in re.finditer(
            r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
            done.stdout + done.stderr,
            re.DOTALL,
        ):
            found[kernel[1]] = int(kernel[3]), int(kernel[2])
    return found


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@gpu_schedules
def test_nvidias_assembler_takes_the_code_for_newer_gpus(schedule, architecture, tmp_path):
    """As their drivers do: IREE's own names of targets end with sm_89."""
    module = compiled("cuda", "sm_80", schedule)
    assert set(assembled(module, tmp_path, architecture)) == set(kernels(module))


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"{form}_p{degree}_tetrahedron_action"
            for form in ("mass", "laplace")
            for degree in (1, 2, 3)
        ),
        "elasticity_p2_tetrahedron_action",
    ],
)
def test_kernels_fit_into_the_registers_of_an_h200(name, tmp_path):
    """With the schedule that is taken unmeasured."""
    loop = case_named(name).loop(0.001).parloop
    schedule = heuristic(
        KernelStatistics.of(loop.kernel), DeviceTraits(gpu=True, atomics=True), ["atomic"]
    )
    module = engine.Module(loop.kernel, loop.spec, schedule, offline_device("cuda", "sm_80"))
    registers, spilled = assembled(module.build(), tmp_path, "sm_90")["loop"]
    assert registers <= 168, "less than three workgroups of 128 threads would fit on a processor"
    assert spilled == 0


@pytest.mark.parametrize(
    ("access", "dtype", "expected"),
    [
        (INC, "int32", {"add.u32"}),
        (MIN, "int32", {"min.s32"}),
        (MAX, "uint32", {"max.u32"}),
        (INC, "float32", {"add.f32"}),
        # no instruction of its own: a loop that compares and swaps
        (MIN, "float64", {"cas.b64"}),
    ],
    ids=lambda value: getattr(value, "name", value if isinstance(value, str) else None),
)
def test_cuda_atomics_of_every_kind(access, dtype, expected):
    loop = doubling(access, dtype)
    text = lower(loop.kernel, loop.spec, Schedule("atomic"), 0, "cuda")
    module = compile_module(text, offline_device("cuda", "sm_80"), cache=None)
    found = re.findall(r"\b(?:atom|red)\.relaxed\.(?:gpu\.)?global\.(\S+)", kernels(module)["loop"])
    assert set(found) == expected


@pytest.mark.parametrize(
    ("kind", "architecture"), [("cuda", "sm_89"), ("hip", "gfx90a"), ("hip", "gfx942")]
)
@pytest.mark.parametrize(
    "schedule",
    [Schedule("colour"), Schedule("segmented", "flat"), Schedule("atomic")],
    ids=str,
)
def test_other_architectures_compile(kind, architecture, schedule):
    module = compiled(kind, architecture, schedule)
    if kind == "cuda":
        assert kernels(module)
    else:
        assert b"\x7fELF" in module, "AMD's code objects are ELF files"


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(("kind", "architecture"), [("cuda", "sm_80"), ("hip", "gfx90a")])
def test_contractions_with_several_results_compile(kind, architecture, degree):
    """Three components of the displacement, which IREE would not tile together."""
    loop = Case("elasticity", "tetrahedron", degree, 1).loop(0.001).parloop
    device = offline_device(kind, architecture)
    assert engine.Module(loop.kernel, loop.spec, Schedule("segmented", "flat"), device).build()


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_complex_numbers_compile(kind):
    loop = every_access("complex128")
    text = lower(loop.kernel, loop.spec, Schedule("segmented"), 0, kind)
    architecture = {"cuda": "sm_80", "hip": "gfx90a"}[kind]
    assert compile_module(text, offline_device(kind, architecture), cache=None)


def test_complex_numbers_are_not_added_atomically():
    k = KernelBuilder("complex_sum")
    y, x = k.argument(3, dtype=complex), k.argument(3, dtype=complex)
    (i,) = dims_of((3,))
    k.store(y, (i,), entry(x, i))
    table = IndexTable(random_map(9, 3, 5, 1), 5)
    loop = Parloop(
        k.kernel(),
        IterationSet(9),
        [
            Argument.indirect(np.zeros(5, complex), INC, table),
            Argument.direct(np.zeros((9, 3), complex), READ),
        ],
    )
    assert "complex" in (engine.impossible(loop, "atomic", offline_device("cuda", "sm_80")) or "")


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(DeviceError, match="'metal' is no kind of GPU; there are cuda, hip, vulkan"):
        offline_device("metal", "m1")

"""The dialects: what Python builds with them, IREE compiles; what IREE prints, xDSL reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects import arith, func, math, memref, scf, tensor
from xdsl.dialects.builtin import (
    AffineMapAttr,
    DenseIntOrFPElementsAttr,
    DictionaryAttr,
    FunctionType,
    IndexType,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    StringAttr,
    TensorType,
    UnitAttr,
    VectorType,
    f64,
    i32,
    i64,
)
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.dialects.linalg.ops import GenericOp, YieldOp
from xdsl.dialects.vector import (
    BroadcastOp,
    CombiningKindAttr,
    CombiningKindFlag,
    ExtractOp,
    FMAOp,
    InsertOp,
    ReductionOp,
)
from xdsl.dialects.vector import LoadOp as VectorLoadOp
from xdsl.dialects.vector import StoreOp as VectorStoreOp
from xdsl.ir import Block, Region
from xdsl.ir.affine import AffineMap
from xdsl.parser import Parser
from xdsl.utils.exceptions import VerifyException

from pyop3_mlir.lowering.dialects import codegen, flow, gpu, hal, iree_context, print_module, util
from pyop3_mlir.lowering.dialects import vector as vec
from pyop3_mlir.lowering.dialects.arith import IndexCastUIOp
from pyop3_mlir.runtime.compile import compile_module
from pyop3_mlir.runtime.devices import get_device
from pyop3_mlir.runtime.executable import Executable

DYNAMIC = -(2**63)
W = 8
WEIGHTS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.5]

index = IndexType()


def constant(value: int) -> arith.ConstantOp:
    return arith.ConstantOp(IntegerAttr(value, index), index)


def zeros() -> arith.ConstantOp:
    type_ = VectorType(f64, [W])
    return arith.ConstantOp(DenseIntOrFPElementsAttr.from_list(type_, [0.0] * W), type_)


def export(name: str, layout: hal.PipelineLayoutAttr) -> hal.ExecutableExportOp:
    one = constant(1)
    count = Block([one, hal.ReturnOp(one, one, one)], arg_types=[hal.DeviceType()])
    return hal.ExecutableExportOp(name, layout, Region(count))


def kernel(layout: hal.PipelineLayoutAttr) -> func.FuncOp:
    """For blocks of W entities: y[idx[i]] += sum over q of w[q] * (w[q] * log(exp(x[idx[i]])))."""
    vector = VectorType(f64, [W])
    c0, c1, cw = constant(0), constant(1), constant(W)
    n32 = hal.InterfaceConstantLoadOp(layout, 0)
    m32 = hal.InterfaceConstantLoadOp(layout, 1)
    n, m = IndexCastUIOp(n32.result, index), IndexCastUIOp(m32.result, index)
    idx, x, y = (
        hal.InterfaceBindingSubspanOp(
            layout, binding, c0, [size.result], MemRefType(type_, [DYNAMIC])
        )
        for binding, (size, type_) in enumerate([(n, i32), (m, f64), (m, f64)])
    )
    table = memref.GetGlobalOp("weights", MemRefType(f64, [W]))
    local = memref.AllocaOp.get(f64, 64, [W, W])
    body = Block(arg_types=[index])
    i = body.args[0]

    rows = VectorLoadOp(idx.result, [i], VectorType(i32, [W]))
    mask = vec.ConstantMaskOp([W])
    none = zeros()
    values = vec.GatherOp(x.result, [c0], rows, mask, none)
    exponential = math.ExpOp(values.result)
    logarithm = math.LogOp(exponential.result)

    fill = Block(arg_types=[index])
    weight = memref.LoadOp.get(table.memref, [fill.args[0]])
    wide = BroadcastOp(weight, vector)
    product = arith.MulfOp(wide.vector, logarithm.result)
    fill.add_ops(
        [
            weight,
            wide,
            product,
            VectorStoreOp(product.result, local.memref, [fill.args[0], c0]),
            scf.YieldOp(),
        ]
    )
    start = zeros()
    contract = Block(arg_types=[index, vector])
    row = VectorLoadOp(local.memref, [contract.args[0], c0], vector)
    weight2 = memref.LoadOp.get(table.memref, [contract.args[0]])
    wide2 = BroadcastOp(weight2, vector)
    fma = FMAOp(wide2, row, contract.args[1])
    contract.add_ops([row, weight2, wide2, fma, scf.YieldOp(fma)])
    sums = scf.ForOp(c0, cw, c1, [start], Region(contract))

    scatter = Block(arg_types=[index])
    lane = scatter.args[0]
    position = arith.AddiOp(i, lane)
    target = memref.LoadOp.get(idx.result, [position])
    target_index = arith.IndexCastOp(target, index)
    entry = ExtractOp(sums.results[0], [lane], f64)
    old = memref.LoadOp.get(y.result, [target_index])
    new = arith.AddfOp(old.res, entry.result)
    scatter.add_ops(
        [
            position,
            target,
            target_index,
            entry,
            old,
            new,
            memref.StoreOp.get(new, y.result, [target_index]),
            scf.YieldOp(),
        ]
    )
    body.add_ops(
        [
            rows,
            mask,
            none,
            values,
            exponential,
            logarithm,
            scf.ForOp(c0, cw, c1, [], Region(fill)),
            start,
            sums,
            scf.ForOp(c0, cw, c1, [], Region(scatter)),
            scf.YieldOp(),
        ]
    )
    loop = scf.ForOp(c0, n.result, cw, [], Region(body))
    block = Block([c0, c1, cw, n32, m32, n, m, idx, x, y, table, local, loop, func.ReturnOp()])
    function = func.FuncOp("k", FunctionType.from_lists([], []), Region(block))
    function.attributes["translation_info"] = codegen.TranslationInfoAttr(
        codegen.CPUPipelineAttr("Default")
    )
    return function


def blocked_module() -> ModuleOp:
    layout = hal.PipelineLayoutAttr(
        [hal.PipelineBindingAttr(True), hal.PipelineBindingAttr(True), hal.PipelineBindingAttr()],
        constants=2,
    )
    table = memref.GlobalOp.get(
        StringAttr("weights"),
        MemRefType(f64, [W]),
        DenseIntOrFPElementsAttr.from_list(TensorType(f64, [W]), WEIGHTS),
        constant=UnitAttr(),
    )
    executable = hal.ExecutableSourceOp(
        "exe", [export("k", layout)], ModuleOp([table, kernel(layout)])
    )
    tensors = [TensorType(t, [DYNAMIC]) for t in (i32, f64, f64)]
    block = Block(arg_types=tensors)
    zero = constant(0)
    sizes = [tensor.DimOp(argument, zero) for argument in block.args]
    n, m = (arith.IndexCastOp(size, i32) for size in sizes[:2])
    call = flow.DispatchOp("exe", "k", [], [n, m, *block.args], sizes, [4])
    block.add_ops([zero, *sizes, n, m, call, func.ReturnOp(call.outputs[0])])
    main = func.FuncOp("loop", FunctionType.from_lists(tensors, tensors[2:]), Region(block))
    main.properties["arg_attrs"] = func.ArrayAttr(
        [
            DictionaryAttr({}),
            DictionaryAttr({}),
            DictionaryAttr({"iree.abi.output": IntegerAttr(0, index)}),
        ]
    )
    return ModuleOp([executable, main])


def test_a_module_built_in_python_compiles_and_runs():
    module = blocked_module()
    module.verify()
    device = get_device("cpu")
    executable = Executable(compile_module(print_module(module), device), device)
    seed = 7
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 50, 64).astype(np.int32)
    x, y = rng.random(50), rng.random(50)
    expected = y.copy()
    np.add.at(expected, rows, x[rows] * np.dot(WEIGHTS, WEIGHTS))

    executable.bind("loop", [rows, x, y])()

    np.testing.assert_allclose(y, expected, rtol=1e-13)


def test_what_is_printed_reads_back_the_same():
    text = print_module(blocked_module())
    again = Parser(iree_context(), text).parse_module()
    again.verify()
    assert print_module(again) == text


def iree_opt(text: str) -> str:
    tool = Path(sys.executable).parent / "iree-opt"
    command = str(tool) if tool.exists() else shutil.which("iree-opt")
    assert command is not None
    return subprocess.run(
        [command, "--mlir-print-op-generic", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


# In IREE's own pretty syntax, so that IREE decides what the operations hold.
OPERATIONS = """
#layout = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>]>
module {
  func.func @k(%a: memref<?xf64>, %v: vector<8xf64>, %t: tensor<4xf64>) attributes {
      translation_info = #iree_codegen.translation_info<pipeline = #iree_gpu.pipeline<Distribute>
        workgroup_size = [128, 1, 1] subgroup_size = 32>} {
    %0 = hal.interface.workgroup.id[0] : index
    %1 = hal.interface.workgroup.count[1] : index
    %2 = hal.interface.workgroup.size[2] : index
    %3 = gpu.thread_id x
    %c = arith.constant 1 : index
    %f = arith.constant 1.0 : f64
    %o = memref.atomic_rmw addf %f, %a[%c] : (f64, memref<?xf64>) -> f64
    %5 = vector.insert %f, %v[%c] : f64 into vector<8xf64>
    %6 = vector.insert %f, %v[3] : f64 into vector<8xf64>
    %x = vector.extract %v[%c] : f64 from vector<8xf64>
    %r = vector.reduction <add>, %v, %f fastmath<reassoc> : vector<8xf64> into f64
    %m = vector.create_mask %c : vector<8xi1>
    %cm = vector.constant_mask [3] : vector<8xi1>
    %iv = arith.constant dense<0> : vector<8xi32>
    %g = vector.gather %a[%c][%iv], %m, %v
      : memref<?xf64>, vector<8xi32>, vector<8xi1>, vector<8xf64> into vector<8xf64>
    vector.scatter %a[%c][%iv], %m, %v : memref<?xf64>, vector<8xi32>, vector<8xi1>, vector<8xf64>
    %ml = vector.maskedload %a[%c], %m, %v
      : memref<?xf64>, vector<8xi1>, vector<8xf64> into vector<8xf64>
    vector.maskedstore %a[%c], %m, %v : memref<?xf64>, vector<8xi1>, vector<8xf64>
    %e = vector.from_elements %f, %f, %x, %f : vector<4xf64>
    %z = util.optimization_barrier %t : tensor<4xf64>
    %s = vector.step : vector<8xindex>
    %k = vector.shape_cast %v : vector<8xf64> to vector<2x4xf64>
    %kk = vector.transpose %k, [1, 0] : vector<2x4xf64> to vector<4x2xf64>
    return
  }
  func.func @l(%t: tensor<4xf64>) -> tensor<4xf64> {
    %0 = math.sqrt %t {compilation_info = #iree_codegen.compilation_info<
        lowering_config = #iree_gpu.lowering_config<{thread = [1], workgroup = [256]}>,
        translation_info = #iree_codegen.translation_info<
          pipeline = #iree_gpu.pipeline<TileAndFuse> workgroup_size = [256, 1, 1]>>}
      : tensor<4xf64>
    %1 = math.sqrt %0 {lowering_config = #iree_cpu.lowering_config<
        distribution = [0], vector_common_parallel = [4], vector_reduction = [0]>} : tensor<4xf64>
    return %1 : tensor<4xf64>
  }
}
"""


def test_what_iree_prints_is_read_and_printed_the_same():
    theirs = iree_opt(OPERATIONS)
    module = Parser(iree_context(), theirs).parse_module()
    module.verify()
    assert iree_opt(print_module(module)) == theirs


def test_constructors_print_what_iree_reads():
    layout = hal.PipelineLayoutAttr([hal.PipelineBindingAttr()])
    scalars = [arith.ConstantOp.from_int_and_width(k, 32) for k in range(4)]
    vector = vec.FromElementsOp(scalars)
    square = vec.ShapeCastOp(vector, [2, 2])
    first = constant(1)
    block = Block(
        [
            first,
            *scalars,
            vector,
            square,
            vec.TransposeOp(square, [1, 0]),
            vec.StepOp(8),
            vec.ConstantMaskOp([3], [8]),
            InsertOp(scalars[0].result, vector.result, [first.result]),
            # the constructor gives the vector's type to the result
            ReductionOp.build(
                operands=[vector, None],
                result_types=[i32],
                properties={"kind": CombiningKindAttr(CombiningKindFlag.ADD)},
            ),
            hal.InterfaceWorkgroupIDOp(0),
            hal.InterfaceWorkgroupCountOp(1),
            hal.InterfaceWorkgroupSizeOp(2),
            gpu.ThreadIdOp("y"),
            util.OptimizationBarrierOp(vector),
            hal.InterfaceBindingSubspanOp(layout, 0, first, [first], MemRefType(f64, [DYNAMIC])),
            func.ReturnOp(),
        ]
    )
    function = func.FuncOp("k", FunctionType.from_lists([], []), Region(block))
    function.attributes["translation_info"] = codegen.TranslationInfoAttr(
        codegen.GPUPipelineAttr("Distribute"), [64, 1, 1], 32
    )
    module = ModuleOp([function])
    module.verify()
    theirs = iree_opt(print_module(module))
    assert "workgroup_size = [64, 1, 1] subgroup_size = 32" in theirs
    assert "#gpu.dim<y>" in theirs
    # nothing is lost on the way there and back
    assert iree_opt(print_module(Parser(iree_context(), theirs).parse_module())) == theirs


def test_linalg_generic_prints_what_iree_reads():
    type_ = TensorType(f64, [4])
    block = Block(arg_types=[type_])
    inner = Block(arg_types=[f64, f64])
    product = arith.MulfOp(inner.args[0], inner.args[0])
    inner.add_ops([product, YieldOp(product)])
    empty = tensor.EmptyOp([], type_)
    identity = AffineMapAttr(AffineMap.identity(1))
    square = GenericOp(
        [block.args[0]],
        [empty.tensor],
        Region(inner),
        [identity, identity],
        [IteratorTypeAttr.parallel()],
        [type_],
    )
    square.attributes["lowering_config"] = codegen.CPULoweringConfigAttr(
        {"vector_common_parallel": [4]}
    )
    block.add_ops([empty, square, func.ReturnOp(square.results[0])])
    module = ModuleOp([func.FuncOp("f", FunctionType.from_lists([type_], [type_]), Region(block))])
    assert "vector_common_parallel = [4]" in iree_opt(print_module(module))


LAYOUT = hal.PipelineLayoutAttr([hal.PipelineBindingAttr()], constants=1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: hal.InterfaceConstantLoadOp(LAYOUT, 1), "has 1 constants"),
        (lambda: hal.InterfaceWorkgroupIDOp(3), "must be 0, 1 or 2"),
        (
            lambda: hal.InterfaceBindingSubspanOp(
                LAYOUT, 0, constant(0), [], MemRefType(f64, [DYNAMIC])
            ),
            "1 dynamic dimensions, 0 sizes",
        ),
        (lambda: vec.ConstantMaskOp([9], [8]), "do not fit"),
        (lambda: vec.FromElementsOp([constant(1)], VectorType(index, [2])), "1 elements for"),
        (
            lambda: vec.FromElementsOp([constant(1)], VectorType(i64, [1])),
            "not all of the element type",
        ),
    ],
)
def test_verification_refuses(build, message):
    op = build()
    with pytest.raises(VerifyException, match=message):
        op.verify()


@pytest.mark.parametrize(
    "build",
    [
        lambda: codegen.CPUPipelineAttr("Distribute"),
        lambda: codegen.GPUPipelineAttr("DoubleTilingExpert"),
        lambda: codegen.CPULoweringConfigAttr({"workgroup": [1]}),
        lambda: gpu.DimensionAttr("w"),
    ],
)
def test_unknown_names_are_refused(build):
    with pytest.raises(VerifyException, match="is none of"):
        build()


def test_a_dispatch_needs_the_sizes_of_its_tensors():
    block = Block(arg_types=[TensorType(f64, [DYNAMIC])])
    op = flow.DispatchOp("exe", "k", [], block.args, [], [0], [])
    with pytest.raises(VerifyException, match="arguments have 1 dynamic dimensions, 0 sizes"):
        op.verify()


def test_a_tied_result_has_the_type_of_its_argument():
    types = [TensorType(f64, [2]), TensorType(f64, [3])]
    block = Block(arg_types=types)
    op = flow.DispatchOp("exe", "k", [], block.args, [], [1])
    op.verify()
    assert op.outputs.types == (types[1],)
    op.properties["tied_operands"] = func.ArrayAttr([IntegerAttr(0, index)])
    with pytest.raises(VerifyException, match="differ in type"):
        op.verify()


@pytest.mark.parametrize(
    ("matrix", "side", "message"),
    [
        ("memref<9x8xf64>", "memref<9xf64>", "no batch of square matrices"),
        ("memref<9xf64>", "memref<9xf64>", "no batch of square matrices"),
        ("memref<9x9x2x2xf64>", "memref<9x2xf64>", "no batch of square matrices"),
        ("memref<9x9x2xf64>", "memref<8x2xf64>", "does not fit"),
        ("memref<9x9x2xf64>", "memref<9x3xf64>", "does not fit"),
        ("memref<9x9xf64>", "memref<9xf32>", "one type of floats"),
        ("memref<9x9xi64>", "memref<9xi64>", "one type of floats"),
        ("tensor<9x9xf64>", "tensor<9xf64>", "a result belongs to tensors"),
    ],
)
def test_systems_that_are_none_are_refused(matrix, side, message):
    text = f"""
    func.func @k(%a: {matrix}, %b: {side}) {{
      dense.solve %a, %b batch 0 : {matrix}, {side}
      func.return
    }}"""
    module = Parser(iree_context(), text).parse_module()
    with pytest.raises(VerifyException, match=message):
        module.verify()

#!/usr/bin/env python3
"""Build the GPU kit: all that a GPU machine needs to check and time loops, but numpy and IREE.

    python ci/gpu/build_kit.py -o kit [--target cuda/sm_80] [--target ...] [--case NAME ...]

No GPU is needed here. The directory holds compiled modules for every target (a bundle of
pyop3_mlir), the local kernels, inputs and expected values of small meshes, tables of basis
functions for the same loops in numpy, PyTorch and CuPy, a copy of the package, and the runner. Code
for sm_80 runs on every later GPU: the driver compiles it. On the GPU machine, with Python 3.11 or
later:

    pip install numpy iree-base-runtime==<the version that build_kit names>
    python kit/run.py

The expected values come from numpy and scipy with another quadrature rule than the kernels'
(:mod:`pyop3_mlir.bench.reference`).
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import pyop3_mlir
from pyop3_mlir import engine
from pyop3_mlir.autotune.candidates import DeviceTraits, legal_strategies
from pyop3_mlir.bench.cases import Case, FormLoop
from pyop3_mlir.bench.meshes import tetrahedra
from pyop3_mlir.bench.reference import apply, assemble_matrix, element_matrices
from pyop3_mlir.bundle import target_device
from pyop3_mlir.errors import CompilationError, UnsupportedLoopError
from pyop3_mlir.lowering.schedule import STRATEGIES, Schedule
from pyop3_mlir.runtime.bundle import Bundle, BundleTarget, loop_key, module_key
from pyop3_mlir.runtime.compile import compile_module
from pyop3_mlir.runtime.devices import Device
from pyop3_mlir.runtime.subview import SUBVIEW_KEY, subview_module

CASES = (
    *(
        Case(form, "tetrahedron", degree, 1)
        for form in ("mass", "laplace", "elasticity")
        for degree in (1, 2, 3)
    ),
    *(Case(form, "tetrahedron", degree, 2) for form in ("mass", "laplace") for degree in (1, 2)),
)
SMALL = {1: 6, 2: 4, 3: 3}
"""Cells along an edge of the small meshes, by degree."""


def schedules(case: Case) -> list[Schedule]:
    """What is compiled for a case, for GPUs: every strategy, and for high order several shapes."""
    shapes = [(4, 4)] if case.degree == 1 else [(32, 20), (8, 20), (4, 4)]
    found = []
    for strategy in STRATEGIES:
        wanted = shapes if strategy in ("atomic", "segmented") else shapes[:1]
        found += [Schedule(strategy, "blocked", 1, tile, unroll) for tile, unroll in wanted]
        if case.degree > 1 and strategy in ("atomic", "segmented"):
            found.append(Schedule(strategy, "flat", 1))
    return found


def tables(case: Case) -> dict[str, Any]:
    """Weights, values ``[q, i]`` and derivatives ``[a, q, i]`` of the basis functions."""
    from FIAT import Lagrange
    from FIAT.quadrature_schemes import create_quadrature
    from FIAT.reference_element import ufc_simplex

    cell = ufc_simplex(3)
    degree = 2 * case.degree if case.form == "mass" else 2 * case.degree - 2
    rule = create_quadrature(cell, max(degree, 0))
    found = Lagrange(cell, case.degree).tabulate(1, rule.get_points())
    directions = [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    return {
        "weights": np.asarray(rule.get_weights()),
        "values": np.ascontiguousarray(found[0, 0, 0].T),
        "derivatives": np.stack([found[d].T for d in directions]),
    }


def expected(loop: FormLoop) -> np.ndarray[Any, Any]:
    """What the loop adds to zero."""
    matrices = element_matrices(loop.form, loop.mesh)
    if loop.rank == 2:
        return np.asarray(assemble_matrix(loop.mesh, matrices).data)
    return apply(loop.mesh, matrices, loop.arguments[2].buffer)


def matmul(size: int) -> str:
    """The text of a module that adds the product of two matrices to a third one."""
    matrix = f"tensor<{size}x{size}xf64>"
    return f"""
func.func @matmul(%start: i64, %stop: i64, %a: {matrix}, %b: {matrix},
                  %c: {matrix} {{iree.abi.output = 0 : index}}) -> {matrix} {{
  %0 = linalg.matmul ins(%a, %b : {matrix}, {matrix}) outs(%c : {matrix}) -> {matrix}
  return %0 : {matrix}
}}
"""


def add_case(bundle: Bundle, loop: FormLoop, targets: list[Device], case: Case) -> int:
    """Compile a case for all targets; returns the number of schedules left out."""
    parloop = loop.parloop
    missing = 0
    for number, device in enumerate(targets):
        legal = legal_strategies(parloop, DeviceTraits.of(device))
        listed = []
        for schedule in schedules(case):
            if legal[schedule.strategy] is not None and schedule.strategy != "in_order":
                continue
            try:
                modules = engine.modules_for(parloop, schedule, device)
                built = [(module, module.build()) for module in modules]
            except (CompilationError, UnsupportedLoopError) as error:
                missing += 1
                print(f"  {case.name}, {schedule}, {device.name}: {str(error).splitlines()[0]}")
                continue
            for module, content in built:
                key = module_key(module.kernel, module.spec, module.schedule, device)
                bundle.add(key, number, content)
            listed.append(schedule)
        key = loop_key(parloop.kernel, parloop.spec, device)
        bundle.loops.setdefault(key, {})[number] = listed
    return missing


def main() -> None:
    """Build the kit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--target", action="append", help="default: cuda/sm_80")
    parser.add_argument("--case", action="append", help="only these cases")
    parser.add_argument("--matmul", type=int, default=4096, help="size of the matrix product")
    arguments = parser.parse_args()
    root = arguments.output
    targets = [target_device(text) for text in arguments.target or ["cuda/sm_80"]]
    cases = [case for case in CASES if not arguments.case or case.name in arguments.case]
    if not cases:
        parser.error(f"no such case; there are {', '.join(case.name for case in CASES)}")
    (root / "data").mkdir(parents=True, exist_ok=True)

    bundle = Bundle(root / "bundle", [BundleTarget.of(device.target) for device in targets])
    for number, device in enumerate(targets):
        bundle.add(SUBVIEW_KEY, number, subview_module(device))
        bundle.add(
            "matmul", number, compile_module(matmul(arguments.matmul), device, name="matmul")
        )
    listed = []
    missing = 0
    for case in cases:
        print(case.name, flush=True)
        loop = FormLoop(case.form, tetrahedra(SMALL[case.degree], case.degree), case.rank)
        missing += add_case(bundle, loop, targets, case)
        (root / "data" / f"{case.name}.kernel").write_bytes(pickle.dumps(loop.kernel))
        arrays = tables(case)
        if case.rank == 1:
            arrays["coefficient"] = loop.arguments[2].buffer
        np.savez(root / "data" / f"{case.name}.npz", expected=expected(loop), **arrays)
        listed.append(
            {
                "name": case.name,
                "form": case.form,
                "degree": case.degree,
                "rank": case.rank,
                "small": SMALL[case.degree],
                "flops_per_cell": loop.flops / loop.mesh.size,
            }
        )
    bundle.write()
    content = {"cases": listed, "matmul": arguments.matmul}
    (root / "kit.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    package = Path(pyop3_mlir.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, root / "pyop3_mlir", ignore=ignored, dirs_exist_ok=True)
    shutil.copy(Path(__file__).parent / "run_kit.py", root / "run.py")
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    print(
        f"{root}: {len(cases)} cases, {len(bundle.modules)} modules, {size / 1e6:.1f} MB, "
        f"{missing} schedules left out; needs numpy and "
        f"iree-base-runtime=={version('iree-base-runtime')}"
    )


if __name__ == "__main__":
    main()

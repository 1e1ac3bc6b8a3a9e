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
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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


def schedules(case: Case, device: Device) -> list[Schedule]:
    """What is compiled for a case: every strategy, and on GPUs for high order several shapes.

    Sizes are not known to the code, so that each is compiled once for all meshes.
    """
    if device.is_host:
        return [Schedule(strategy, "blocked", 8, 4, 4) for strategy in STRATEGIES]
    shapes = [(4, 4)] if case.degree == 1 else [(32, 20), (8, 20), (4, 4)]
    if (case.rank, case.degree) == (2, 2):
        # a quarter of the entries of an element matrix, so that its scatter is unrolled whole
        shapes = [(32, 25), (8, 20)]
    found = []
    for strategy in STRATEGIES:
        wanted = shapes if strategy in ("atomic", "segmented") else shapes[:1]
        blocked = [Schedule(strategy, "blocked", 1, tile, unroll) for tile, unroll in wanted]
        found += blocked
        if strategy in ("atomic", "segmented"):
            found += [replace(blocked[0], workgroup=threads) for threads in (64, 256)]
            if case.degree > 1:
                found.append(Schedule(strategy, "flat", 1))
    return found


def legal_schedules(loop: FormLoop, device: Device, case: Case) -> list[Schedule]:
    """Those of :func:`schedules` that can run the loop; on GPUs by one thread as well, to check."""
    legal = legal_strategies(loop.parloop, DeviceTraits.of(device))
    return [s for s in schedules(case, device) if legal[s.strategy] is None or _checks(s, device)]


def _checks(schedule: Schedule, device: Device) -> bool:
    return schedule.strategy == "in_order" and not device.is_host


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


def add_case(
    bundle: Bundle,
    loop: FormLoop,
    targets: list[Device],
    case: Case,
    done: Callable[[str], None],
) -> list[str]:
    """Compile a case for all targets; returns what had to be left out, and why."""
    parloop = loop.parloop
    missing = []
    for number, device in enumerate(targets):
        listed = []
        for schedule in legal_schedules(loop, device, case):
            what = f"{case.name}, {schedule}, {device.name}"
            done(what)
            try:
                modules = engine.modules_for(parloop, schedule, device)
                built = [(module, module.build()) for module in modules]
            except (CompilationError, UnsupportedLoopError) as error:
                missing.append(f"{what}: {str(error).splitlines()[0]}")
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
    started = time.perf_counter()
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
    loops = [
        FormLoop(case.form, tetrahedra(SMALL[case.degree], case.degree), case.rank)
        for case in cases
    ]
    listed = []
    missing: list[str] = []
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = sum(
            len(legal_schedules(loop, device, case))
            for case, loop in zip(cases, loops, strict=True)
            for device in targets
        )
        task = progress.add_task("", total=total)

        def done(what: str) -> None:
            progress.update(task, advance=1, description=what)

        for case, loop in zip(cases, loops, strict=True):
            missing += add_case(bundle, loop, targets, case, done)
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
    for line in missing:
        print(f"left out: {line}")
    print(
        f"{root}: {len(cases)} cases, {len(bundle.modules)} modules, {size / 1e6:.1f} MB, "
        f"{len(missing)} schedules left out, {time.perf_counter() - started:.0f} s; needs numpy "
        f"and iree-base-runtime=={version('iree-base-runtime')}"
    )


if __name__ == "__main__":
    main()

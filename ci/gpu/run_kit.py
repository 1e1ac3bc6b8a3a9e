#!/usr/bin/env python3
"""Check and time loops on a GPU; needs numpy, iree-base-runtime and this directory only.

    python run.py [--device cuda:0] [--scale 1.0] [--case NAME ...] [--json FILE]

Every schedule of every case is checked on a small mesh against values that were computed when the
kit was built. Then each is timed on larger meshes and checked there against numpy. Beside the
achieved GB/s and GFLOP/s stand a copy and a matrix product, measured on the same device, and the
same loops by index_select, einsum and index_add in PyTorch or CuPy where one of them is installed.
Exits with 1 where a value is wrong, or a case has no schedule that runs on the device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
os.environ["PYOP3_MLIR_BUNDLE"] = str(ROOT / "bundle")

from pyop3_mlir import engine  # noqa: E402
from pyop3_mlir.bench.cases import FormLoop  # noqa: E402
from pyop3_mlir.bench.meshes import aligned, tetrahedra  # noqa: E402
from pyop3_mlir.errors import Pyop3MlirError  # noqa: E402
from pyop3_mlir.lowering.schedule import Schedule  # noqa: E402
from pyop3_mlir.runtime import bundle, residency  # noqa: E402
from pyop3_mlir.runtime.devices import Device, get_device  # noqa: E402
from pyop3_mlir.runtime.executable import Executable  # noqa: E402

Array = np.ndarray[Any, Any]

EDGES = {(1, 1): 160, (2, 1): 88, (3, 1): 64, (1, 2): 64, (2, 2): 32}
"""Cells along an edge of the largest mesh, by degree and rank, where the scale is 1.

They move some hundred MB, so that a fast GPU works ten times as long as it takes to submit a call.
"""

SIZES = (0.01, 0.1, 1.0)
"""Shares of the largest mesh's cells that are timed."""

TOLERANCE = 1e-12
"""Largest difference, relative to the largest entry: sums of up to some hundred terms."""

CHUNK = 20_000
"""Cells that numpy works on at a time."""

LAME = (1.25, 0.8)


# -- the same loops without pyop3_mlir ------------------------------------------------------------


class Numpy:
    """What the formulations below need, from numpy."""

    name = "numpy"
    einsum = staticmethod(lambda subscripts, *of: np.einsum(subscripts, *of, optimize=True))
    absolute = staticmethod(np.abs)
    stack = staticmethod(lambda arrays: np.stack(arrays, axis=-1))

    @staticmethod
    def take(array: Any, index: Any) -> Any:
        """Rows of an array."""
        return array[index]

    @staticmethod
    def add(out: Any, index: Any, values: Any) -> None:
        """``out[index] += values``, for indices that occur more than once."""
        for c in range(out.shape[1]):
            out[:, c] += np.bincount(
                index.reshape(-1), values[..., c].reshape(-1), minlength=len(out)
            )


class Torch:
    """The same from PyTorch, on a CUDA device."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ImportError("torch sees no GPU")
        self.torch = torch
        self.einsum = torch.einsum
        self.absolute = torch.abs
        self.description = f"torch {torch.__version__}"

    def array(self, values: Array) -> Any:
        """Copy to the GPU."""
        values = values.astype(np.int64) if values.dtype.kind == "i" else values
        return self.torch.from_numpy(np.ascontiguousarray(values)).cuda()

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Zeros on the GPU."""
        return self.torch.zeros(shape, dtype=self.torch.float64, device="cuda")

    def stack(self, arrays: Any) -> Any:
        """Along a new last axis."""
        return self.torch.stack(arrays, dim=-1)

    def take(self, array: Any, index: Any) -> Any:
        """Rows of an array."""
        rows = array.index_select(0, index.reshape(-1))
        return rows.reshape(*index.shape, *array.shape[1:])

    def add(self, out: Any, index: Any, values: Any) -> None:
        """``out[index] += values``."""
        out.index_add_(0, index.reshape(-1), values.reshape(-1, out.shape[1]))

    def seconds(self, function: Callable[[], object], rounds: int) -> float:
        """Median time of a call, by events."""
        event = self.torch.cuda.Event
        function()
        samples = []
        for _ in range(rounds):
            start, stop = event(enable_timing=True), event(enable_timing=True)
            start.record()
            function()
            stop.record()
            stop.synchronize()
            samples.append(start.elapsed_time(stop) * 1e-3)
        return statistics.median(samples)


class Cupy:
    """The same from CuPy."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        self.cupy = cupy
        self.einsum = cupy.einsum
        self.absolute = cupy.abs
        self.description = f"cupy {cupy.__version__}"

    def array(self, values: Array) -> Any:
        """Copy to the GPU."""
        return self.cupy.asarray(values)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Zeros on the GPU."""
        return self.cupy.zeros(shape)

    def stack(self, arrays: Any) -> Any:
        """Along a new last axis."""
        return self.cupy.stack(arrays, axis=-1)

    def take(self, array: Any, index: Any) -> Any:
        """Rows of an array."""
        return array[index]

    def add(self, out: Any, index: Any, values: Any) -> None:
        """``out[index] += values``."""
        self.cupy.add.at(out, index.reshape(-1), values.reshape(-1, out.shape[1]))

    def seconds(self, function: Callable[[], object], rounds: int) -> float:
        """Median time of a call, by events."""
        function()
        samples = []
        for _ in range(rounds):
            start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            start.record()
            function()
            stop.record()
            stop.synchronize()
            samples.append(self.cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
        return statistics.median(samples)


def competitor() -> Torch | Cupy | None:
    """PyTorch or CuPy, whichever is there and sees a GPU."""
    for kind in (Torch, Cupy):
        try:
            return kind()
        except Exception as error:
            print(f"{kind.name}: not used ({type(error).__name__}: {error})")
    return None


def geometry(xp: Any, x: Any) -> tuple[Any, Any]:
    """Inverse Jacobians ``[n, a, d]`` of tetrahedra and the absolute values of determinants."""
    e = [[x[:, v + 1, d] - x[:, 0, d] for v in range(3)] for d in range(3)]
    # the inverse's rows are cross products of the Jacobian's columns, by the determinant
    rows = []
    for a in range(3):
        b, c = (a + 1) % 3, (a + 2) % 3
        rows.append(
            [
                e[(d + 1) % 3][b] * e[(d + 2) % 3][c] - e[(d + 2) % 3][b] * e[(d + 1) % 3][c]
                for d in range(3)
            ]
        )
    det = sum(e[d][0] * rows[0][d] for d in range(3))
    inverse = xp.stack([xp.stack([rows[a][d] / det for a in range(3)]) for d in range(3)])
    return inverse, xp.absolute(det)


def local_tensors(xp: Any, case: dict[str, Any], t: dict[str, Any], x: Any, w: Any) -> Any:
    """What each cell adds: ``[n, i, c]`` for an action, ``[n, i * j, 1]`` for a matrix."""
    inverse, det = geometry(xp, x)
    weights, values, derivatives = t["weights"], t["values"], t["derivatives"]
    form, rank = case["form"], case["rank"]
    if form == "mass":
        mass = xp.einsum("q,qi,qj->ij", weights, values, values)
        if rank == 2:
            return xp.einsum("ij,n->nij", mass, det).reshape(len(det), -1, 1)
        return xp.einsum("n,nic->nic", det, xp.einsum("ij,njc->nic", mass, w))
    if form == "laplace":
        metric = xp.einsum("nad,nbd->nab", inverse, inverse) * det[:, None, None]
        if rank == 2:
            stiffness = xp.einsum("q,aqi,bqj->abij", weights, derivatives, derivatives)
            return xp.einsum("nab,abij->nij", metric, stiffness).reshape(len(det), -1, 1)
        gradient = xp.einsum("aqj,njc->nqa", derivatives, w)
        flux = xp.einsum("nab,nqb->nqa", metric, gradient) * weights[None, :, None]
        return xp.einsum("aqi,nqa->ni", derivatives, flux)[..., None]
    lam, mu = LAME
    reference = xp.einsum("aqj,njc->nqca", derivatives, w)
    gradient = xp.einsum("nqca,nad->nqcd", reference, inverse)
    trace = gradient[..., 0, 0] + gradient[..., 1, 1] + gradient[..., 2, 2]
    stress = mu * (gradient + xp.einsum("nqcd->nqdc", gradient))
    for c in range(3):
        stress[..., c, c] += lam * trace
    stress = stress * (weights[None, :] * det[:, None])[..., None, None]
    return xp.einsum("aqi,nqca->nic", derivatives, xp.einsum("nqcd,nad->nqca", stress, inverse))


class Formulation:
    """A loop by index_select, einsum and index_add."""

    def __init__(self, xp: Any, case: dict[str, Any], t: dict[str, Any], loop: FormLoop) -> None:
        array = getattr(xp, "array", lambda values: values)
        self.xp, self.case = xp, case
        self.tables = {name: array(t[name]) for name in ("weights", "values", "derivatives")}
        self.points = array(np.asarray(loop.mesh.points))
        self.vertices = array(loop.mesh.cells)
        table = loop.arguments[0].table
        assert table is not None
        self.targets = array(table.values)
        components = loop.components if case["rank"] == 1 else 1
        shape = (loop.output.size // components, components)
        self.out = xp.zeros(shape) if hasattr(xp, "zeros") else np.zeros(shape)
        self.coefficient = None
        if case["rank"] == 1:
            self.nodes = array(loop.mesh.nodes)
            self.coefficient = array(loop.arguments[2].buffer.reshape(-1, components))

    def __call__(self, start: int = 0, stop: int | None = None) -> None:
        """Add the contributions of cells ``[start, stop)``."""
        cells = slice(start, stop)
        x = self.xp.take(self.points, self.vertices[cells])
        w = None
        if self.coefficient is not None:
            w = self.xp.take(self.coefficient, self.nodes[cells])
        values = local_tensors(self.xp, self.case, self.tables, x, w)
        self.xp.add(self.out, self.targets[cells], values)


def reference(case: dict[str, Any], t: dict[str, Any], loop: FormLoop) -> Array:
    """What the loop adds to zero, by numpy."""
    formulation = Formulation(Numpy, case, t, loop)
    for start in range(0, loop.mesh.size, CHUNK):
        formulation(start, start + CHUNK)
    return formulation.out.reshape(-1)


# -- measurements ---------------------------------------------------------------------------------


def seconds_per_call(
    submit: Callable[[], object], wait: Callable[[], object], budget: float, rounds: int = 7
) -> float:
    """Median time of a call among many that follow each other without the host in between.

    What a device takes to be told of a call is hidden behind the call before, if that takes longer.
    """
    submit()
    wait()
    start = time.perf_counter()
    submit()
    wait()
    once = max(time.perf_counter() - start, 1e-7)
    repeats = max(1, math.ceil(budget / rounds / once))
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            submit()
        wait()
        samples.append((time.perf_counter() - start) / repeats)
    return statistics.median(samples)


def copy_bandwidth(device: Device, size: int, budget: float) -> float:
    """Bytes a second, read and written, of a copy within the device's memory."""
    source, target = (residency.device_copy(np.ones(size // 8), device) for _ in range(2))
    source.prepare()
    semaphore = device.hal.create_semaphore(0)
    clock = 0

    def submit() -> None:
        nonlocal clock
        before, after = [(semaphore, clock)], [(semaphore, clock + 1)]
        device.hal.queue_copy(source.memory, target.memory, before, after)
        clock += 1

    return 2 * size / seconds_per_call(submit, lambda: semaphore.wait(clock), budget)


def matmul_rate(device: Device, size: int, budget: float) -> tuple[float, float]:
    """Operations a second of a product of matrices, compiled by IREE, and its relative error."""
    found = bundle.active()
    assert found is not None
    content = found.module("matmul", device)
    if content is None:
        raise SystemExit(f"the kit has no modules for {device} ({device.target.name})")
    rng = np.random.default_rng(0)
    a, b, c = (aligned((size, size)) for _ in range(3))
    a[...], b[...] = rng.random((size, size)), rng.random((size, size))
    owners = [residency.Resident(array) for array in (a, b, c)]
    call = Executable(content, device, name="matmul").bind("matmul", [a, b, c])
    call(0, 0)
    rows = slice(0, min(64, size))
    product = a[rows] @ b
    error = float(np.abs(owners[2].data_ro[rows] - product).max() / np.abs(product).max())
    call.upload()
    return 2 * size**3 / seconds_per_call(lambda: call.submit(0, 0), call.wait, budget), error


def make_loop(case: dict[str, Any], edge: int) -> FormLoop:
    """The loop on a mesh, with the kernel that the kit brings."""
    loop = FormLoop(case["form"], tetrahedra(edge, case["degree"]), case["rank"])
    kernel = pickle.loads((ROOT / "data" / f"{case['name']}.kernel").read_bytes())
    vars(loop)["kernel"] = kernel
    return loop


def difference(found: Array, expected: Array) -> float:
    """Largest difference, relative to the largest entry."""
    scale = float(np.abs(expected).max())
    return float(np.abs(found.reshape(-1) - expected.reshape(-1)).max()) / max(scale, 1e-300)


def listed_schedules(loop: FormLoop, device: Device) -> list[Schedule]:
    """The schedules that the kit has modules for."""
    found = bundle.active()
    assert found is not None
    parloop = loop.parloop
    return list(found.schedules(bundle.loop_key(parloop.kernel, parloop.spec, device), device))


class Run:
    """One run of the kit."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = get_device(arguments.device)
        self.rival = None if arguments.no_rival else competitor()
        self.wrong = 0
        self.latency: float | None = None
        self.rows: list[dict[str, Any]] = []
        content = json.loads((ROOT / "kit.json").read_text(encoding="utf-8"))
        wanted = arguments.case
        self.cases = [c for c in content["cases"] if not wanted or c["name"] in wanted]
        self.matmul_size = content["matmul"]

    def main(self) -> int:
        """Check, time, report; the exit status."""
        arguments, device = self.arguments, self.device
        print(f"device: {device}, modules for {device.target.name}")
        memory = device.info.memory or 1 << 33
        size = int(min(1 << 30, memory // 8) * min(1.0, arguments.scale)) // 8 * 8
        self.copy = copy_bandwidth(device, max(size, 1 << 16), arguments.seconds)
        self.flops, error = matmul_rate(device, self.matmul_size, arguments.seconds)
        self.check("matrix product", error)
        print(f"copy: {self.copy / 1e9:.1f} GB/s, read and written")
        print(f"matrix product of size {self.matmul_size}, by IREE: {self.flops / 1e9:.1f} GFLOP/s")
        self.add_rival_matmul()
        for case in self.cases:
            self.run_case(case)
        summary = self.summary()
        if arguments.json is not None:
            text = json.dumps(summary, indent=1) + "\n"
            Path(arguments.json).write_text(text, encoding="utf-8")
        print(f"{self.wrong} wrong results" if self.wrong else "every value was right")
        return 1 if self.wrong else 0

    def add_rival_matmul(self) -> None:
        """Take the better of two products: IREE's is not made for double precision."""
        if self.rival is None:
            return
        rival = self.rival
        a = rival.array(np.random.default_rng(0).random((self.matmul_size,) * 2))
        rate = 2 * self.matmul_size**3 / rival.seconds(lambda: a @ a, self.arguments.rounds)
        print(f"matrix product, by {rival.description}: {rate / 1e9:.1f} GFLOP/s")
        self.flops = max(self.flops, rate)

    def check(self, what: str, error: float) -> None:
        """Count and print a result that is wrong."""
        if not error < TOLERANCE:
            self.wrong += 1
            print(f"WRONG: {what}: differs by {error:.1e} of the largest entry")

    def run_case(self, case: dict[str, Any]) -> None:
        """Check a case on the small mesh, then check and time it on the others."""
        t = dict(np.load(ROOT / "data" / f"{case['name']}.npz"))
        loop = make_loop(case, case["small"])
        if case["rank"] == 1:
            loop.arguments[2].buffer[...] = t["coefficient"]
        print(f"\n{case['name']}")
        self.check(f"{case['name']}, numpy", difference(reference(case, t, loop), t["expected"]))
        good = []
        for schedule in listed_schedules(loop, self.device):
            loop.output[...] = 0.0
            try:
                engine.compile(loop.parloop, self.device, schedule)()
            except Pyop3MlirError as error:
                # IREE's own dispatches may need more than the device has
                print(f"  {schedule} does not run: {error}")
                continue
            error = difference(loop.output, t["expected"])
            self.check(f"{case['name']}, {schedule}, small mesh", error)
            # one thread of a GPU is there to be right, not to be timed
            if error < TOLERANCE and schedule.strategy != "in_order":
                good.append(schedule)
        if not good:
            self.wrong += 1
            print(f"FAILED: {case['name']}: no schedule gives the right result on this device")
        for share in () if self.arguments.check_only else SIZES:
            edge = EDGES[case["degree"], case["rank"]] * math.cbrt(share * self.arguments.scale)
            self.time_case(case, t, max(2, round(edge)), good)

    def time_case(
        self, case: dict[str, Any], t: dict[str, Any], edge: int, schedules: list[Schedule]
    ) -> None:
        """Check and time a case on one mesh."""
        loop = make_loop(case, edge)
        expected = reference(case, t, loop)
        moved = loop.parloop.compulsory_bytes
        flops = case["flops_per_cell"] * loop.mesh.size
        roofline = max(moved / self.copy, flops / self.flops)
        bound_by = "memory" if roofline == moved / self.copy else "arithmetic"
        rows = []
        # contents stay on the device from here on
        owners = {id(a.buffer): residency.Resident(a.buffer) for a in loop.arguments}
        output = owners[id(loop.output)]
        for schedule in schedules:
            output.data_wo[...] = 0.0
            bound = engine.compile(loop.parloop, self.device, schedule)
            bound()
            error = difference(output.data_ro, expected)
            self.check(f"{case['name']}, {schedule}, {loop.mesh.size} cells", error)
            seconds = self.seconds(bound)
            rows.append(
                {
                    "case": case["name"],
                    "cells": loop.mesh.size,
                    "schedule": str(schedule),
                    "seconds": seconds,
                    "bandwidth_GBs": moved / seconds / 1e9,
                    "rate_GFLOPs": flops / seconds / 1e9,
                    "of_copy": moved / seconds / self.copy,
                    "of_roofline": roofline / seconds,
                    "bound_by": bound_by,
                    "error": error,
                }
            )
            print(
                f"  {loop.mesh.size:>9} cells  {schedule!s:34} {seconds * 1e3:9.3f} ms "
                f"{rows[-1]['bandwidth_GBs']:8.1f} GB/s {rows[-1]['rate_GFLOPs']:9.1f} GFLOP/s  "
                f"{rows[-1]['of_copy']:5.0%} of copy  {rows[-1]['of_roofline']:5.0%} of roofline"
            )
            del bound
        self.rows += rows
        self.time_rival(case, t, loop, expected, rows)

    def seconds(self, bound: engine.BoundLoop) -> float:
        """Time of a call; before the first one, that of a call with next to nothing to do."""
        if self.latency is None:
            self.latency = seconds_per_call(lambda: bound(0, 1), lambda: None, 0.05)
            print(f"  a call that is waited for, on one cell: {self.latency * 1e6:.0f} us")
        rounds = self.arguments.rounds
        return seconds_per_call(bound.submit, bound.wait, self.arguments.seconds, rounds)

    def time_rival(
        self,
        case: dict[str, Any],
        t: dict[str, Any],
        loop: FormLoop,
        expected: Array,
        rows: list[dict[str, Any]],
    ) -> None:
        """Time the same by PyTorch or CuPy."""
        if self.rival is None or not rows:
            return
        rival = self.rival
        try:
            formulation = Formulation(rival, case, t, loop)
            formulation()
            out = formulation.out
            found = out.cpu().numpy() if rival.name == "torch" else out.get()
            self.check(f"{case['name']}, {rival.name}", difference(found, expected))
            seconds = rival.seconds(formulation, self.arguments.rounds)
        except Exception as error:
            print(f"  {rival.name}: failed ({type(error).__name__}: {error})")
            return
        best = min(row["seconds"] for row in rows)
        for row in rows:
            row[rival.name + "_seconds"] = seconds
            row["times_as_fast_as_rival"] = seconds / row["seconds"]
        print(f"  {rival.description}: {seconds * 1e3:.3f} ms; the best is {seconds / best:.2f} x")

    def summary(self) -> dict[str, Any]:
        """The targets, reached or not, and everything that was measured."""
        targets = []
        for case in self.cases:
            rows = [row for row in self.rows if row["case"] == case["name"]]
            if not rows:
                continue
            largest = max(row["cells"] for row in rows)
            best = min((r for r in rows if r["cells"] == largest), key=lambda r: r["seconds"])
            if case["rank"] == 1:
                memory = case["degree"] < 3 and best["bound_by"] == "memory"
                name, least = ("of_copy", 0.6) if memory else ("of_roofline", 0.4)
                targets.append((case["name"], name, least, best[name], best["schedule"]))
            speed = best.get("times_as_fast_as_rival")
            targets.append((case["name"], "times rival", 3.0, speed, best["schedule"]))
        gpu = self.device.spec.startswith(("cuda", "hip"))
        meant = gpu and self.arguments.scale >= 1
        if targets:
            print(
                "\ntargets, on the largest mesh, best schedule: of_copy is the share of the copy's "
                "bandwidth,\nof_roofline that of what copy and matrix product allow; traffic is "
                "compulsory traffic:\neach table and array once, twice where it is changed"
            )
            if not meant:
                print("THEY ARE FOR A GPU AND --scale 1: what follows says nothing about them")
        for name, what, least, value, schedule in targets:
            state = (
                "not measured" if value is None else "reached" if value >= least else "NOT reached"
            )
            if not meant and value is not None:
                state = "says nothing"
            figure = "" if value is None else f"{value:.2f}"
            print(f"  {name:36} {what:12} >= {least:<4} {figure:>6}  {state:12} {schedule}")
        return {
            "device": str(self.device),
            "target": self.device.target.name,
            "copy_GBs": self.copy / 1e9,
            "matmul_GFLOPs": self.flops / 1e9,
            "latency_us": None if self.latency is None else self.latency * 1e6,
            "rival": None if self.rival is None else self.rival.description,
            "wrong": self.wrong,
            "rows": self.rows,
            "targets": [
                {"case": n, "what": w, "least": least, "value": v, "schedule": s}
                for n, w, least, v, s in targets
            ],
        }


def main() -> int:
    """Run the kit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of cells")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each measurement")
    parser.add_argument("--case", action="append", help="only these cases")
    parser.add_argument("--check-only", action="store_true", help="small meshes only, no timing")
    parser.add_argument("--no-rival", action="store_true", help="leave PyTorch and CuPy alone")
    parser.add_argument("--json", help="file for everything that was measured")
    return Run(parser.parse_args()).main()


if __name__ == "__main__":
    sys.exit(main())

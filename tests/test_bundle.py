"""Modules that were compiled ahead of time run where nothing can be compiled.

Such a machine is made by hiding packages from a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from pyop3_mlir import bundle as bundles
from pyop3_mlir import engine
from pyop3_mlir.cli import app
from pyop3_mlir.doctor import small_loop
from pyop3_mlir.errors import CompilationError, DeviceError, OptionError
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.options import overriding
from pyop3_mlir.runtime import bundle
from pyop3_mlir.runtime.bundle import Bundle, BundleTarget
from pyop3_mlir.runtime.compile import compilations
from pyop3_mlir.runtime.devices import Target, get_device

# Sums the neighbours on a ring of 100 edges, twice, on the device that is given.
SCRIPT = """
import sys
from pyop3_mlir import engine
from pyop3_mlir.doctor import small_loop
from pyop3_mlir.runtime.devices import get_device

loop = small_loop()
bound = engine.compile(loop, sys.argv[1] if len(sys.argv) > 1 else None)
bound()
bound()
print(bound.schedule.strategy, *loop.arguments[0].buffer[:3].tolist())
"""

# Everything but numpy and IREE's runtime is absent.
BARE = """
import runpy, sys

# ml_dtypes comes with IREE
ALLOWED = {{"numpy", "iree", "ml_dtypes", "pyop3_mlir", *sys.stdlib_module_names}}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if name.startswith("iree.compiler") or top not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
sys.argv = [{script!r}, *{arguments!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def expected():
    """The first three sums, twice added."""
    x = np.cos(np.arange(100.0))
    return 2 * (np.roll(x, 1) + np.roll(x, -1))[:3]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "ring.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def made(script, tmp_path_factory):
    """A bundle of the script for this CPU, Vulkan and CUDA."""
    root = tmp_path_factory.mktemp("bundle")
    targets = [f"--target={name}" for name in ("cpu", "vulkan/ampere", "cuda/sm_80")]
    result = CliRunner().invoke(app, ["bundle", "-o", str(root), *targets, str(script)])
    assert result.exit_code == 0, result.output
    assert "1 loops" in result.output
    return root


def run_bare(script, root, *arguments):
    """Run the script in a process that cannot compile."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYOP3_MLIR_")}
    if root is not None:
        environment["PYOP3_MLIR_BUNDLE"] = str(root)
    return subprocess.run(
        [sys.executable, "-c", BARE.format(script=str(script), arguments=list(arguments))],
        env={**environment, "XDG_CACHE_HOME": str(script.parent / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_machine_without_a_compiler_runs_what_is_bundled(script, made):
    done = run_bare(script, made)
    assert done.returncode == 0, done.stderr
    strategy, *values = done.stdout.split()
    assert strategy == "in_order"
    np.testing.assert_allclose([float(v) for v in values], expected(), rtol=1e-15)


def test_on_a_vulkan_device_too(vulkan_present, script, made):
    done = run_bare(script, made, "vulkan")
    assert done.returncode == 0, done.stderr
    strategy, *values = done.stdout.split()
    assert strategy in ("segmented", "colour")
    np.testing.assert_allclose([float(v) for v in values], expected(), rtol=1e-15)


def test_without_a_bundle_the_error_says_what_to_do(script):
    done = run_bare(script, None)
    assert done.returncode == 1
    assert "CompilationError: loop neighbours: " in done.stderr
    assert "PYOP3_MLIR_BUNDLE" in done.stderr


def test_a_loop_that_is_not_in_the_bundle_is_named(tmp_path, script, made):
    other = tmp_path / "other.py"
    other.write_text(script.read_text().replace("loop = small_loop()", CHANGED))
    done = run_bare(other, made)
    assert done.returncode == 1
    assert "CompilationError: loop other: the bundle " in done.stderr
    assert "made for llvm-cpu" in done.stderr


CHANGED = """
from dataclasses import replace
from pyop3_mlir.parloop import MAX, Parloop
loop = small_loop()
first, second = loop.arguments
loop = Parloop(loop.kernel, loop.iteration_set, [replace(first, access=MAX), second], "other")
"""


def test_where_there_is_a_compiler_bundled_modules_are_used_all_the_same(
    made, cache_dir, monkeypatch
):
    monkeypatch.setattr(engine, "_executables", {})
    before = compilations()
    loop = small_loop()
    with overriding(bundle=made, tune="off"):
        engine.compile(loop)()
    assert compilations() == before
    np.testing.assert_allclose(loop.arguments[0].buffer[:3], expected() / 2, rtol=1e-15)


def test_every_strategy_of_a_gpu_is_bundled(made):
    index = json.loads((made / "bundle.json").read_text())
    cuda = [n for n, target in enumerate(index["targets"]) if target["backend"] == "cuda"]
    (loop,) = (of for of in index["loops"].values() if str(cuda[0]) in of)
    strategies = {schedule["strategy"] for schedule in loop[str(cuda[0])]}
    assert strategies == {"colour", "segmented", "atomic"}
    files = [of[str(cuda[0])] for of in index["modules"].values() if str(cuda[0]) in of]
    assert any(b".visible .entry loop(" in (made / name).read_bytes() for name in files)


def test_cases_of_the_benchmark_are_bundled_by_name(tmp_path):
    case = "mass_p1_triangle_action"
    result = CliRunner().invoke(app, ["bundle", "-o", str(tmp_path), "--case", case])
    assert result.exit_code == 0, result.output
    assert len(Bundle.open(tmp_path).loops) == 1


def test_nothing_to_bundle_is_an_error(tmp_path):
    result = CliRunner().invoke(app, ["bundle", "-o", str(tmp_path)])
    assert isinstance(result.exception, OptionError)


@pytest.mark.parametrize(
    ("text", "error"), [("cpu/z80", DeviceError), ("tpu/v3", OptionError), ("cuda/", OptionError)]
)
def test_a_target_that_means_nothing_is_refused(text, error):
    with pytest.raises(error):
        bundles.target_device(text)


def test_a_directory_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(OptionError, match="holds no bundle"), overriding(bundle=tmp_path):
        bundle.active()


def test_a_bundle_of_another_version_is_refused(made, tmp_path):
    index = json.loads((made / "bundle.json").read_text())
    index["versions"]["iree-base-runtime"] = "1.0"
    (tmp_path / "bundle.json").write_text(json.dumps(index))
    with pytest.raises(OptionError, match=r"with iree-base-runtime 1\.0 \(here .*make it anew"):
        Bundle.open(tmp_path)


def test_a_damaged_module_is_refused(made, tmp_path):
    found = Bundle.open(made)
    damaged = Bundle(tmp_path, found.targets, found.modules)
    (key, files) = next(iter(found.modules.items()))
    (tmp_path / files[0]).write_bytes(b"nothing")
    with pytest.raises(OptionError, match=r"\.vmfb is damaged"):
        damaged.module(key, get_device("cpu"))


@pytest.mark.parametrize(
    ("made_for", "runs_on", "suits"),
    [
        (("cuda", "sm_80"), ("cuda", "sm_80"), True),
        (("cuda", "sm_80"), ("cuda", "sm_89"), True),
        (("cuda", "sm_89"), ("cuda", "sm_80"), False),
        (("rocm", "gfx90a"), ("rocm", "gfx90a"), True),
        (("rocm", "gfx90a"), ("rocm", "gfx942"), False),
        (("rocm", "gfx90a"), ("cuda", "sm_80"), False),
    ],
)
def test_which_gpus_code_suits(made_for, runs_on, suits):
    target = BundleTarget(*made_for)
    assert (target.suits(Target(*runs_on, frozenset(), ())) is not None) is suits


def test_code_for_a_cpu_needs_every_extension_and_more_of_them_is_better():
    host = get_device("cpu").target
    few = BundleTarget.of(Target("llvm-cpu", "few", frozenset(), ()))
    all_ = BundleTarget.of(host)
    more = BundleTarget.of(Target("llvm-cpu", "more", host.features | {"avx9000"}, ()))
    assert few.suits(host) == 0
    assert (all_.suits(host) or 0) > 0
    assert more.suits(host) is None


def test_a_level_of_cpus_can_be_compiled_for(tmp_path):
    level = bundles.target_device("cpu/x86-64-v3")
    assert "--iree-llvmcpu-target-cpu=x86-64-v3" in level.target.flags
    assert {"avx2", "fma"} <= level.target.features
    assert "avx512f" not in level.target.features


def test_what_compiles_for_no_target_is_an_error(tmp_path, monkeypatch):
    recorder = bundles.Recorder([get_device("cpu")])
    recorder.add(small_loop(), Schedule(), "cpu")

    def refuse(self):
        raise CompilationError("loop neighbours: refused")

    monkeypatch.setattr(engine.Module, "build", refuse)
    with pytest.raises(CompilationError, match="loop neighbours: refused"):
        recorder.write(tmp_path)

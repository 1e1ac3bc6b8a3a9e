"""Modules that are compiled in parts are the same as those that are compiled whole."""

from __future__ import annotations

import io
import re
import zipfile
from functools import partial

import pytest

from pyop3_mlir.bench.cases import case_named
from pyop3_mlir.engine import Module
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.runtime import compile as compiling
from pyop3_mlir.runtime.cache import Cache
from pyop3_mlir.runtime.devices import get_device, offline_device
from pyop3_mlir.runtime.splice import splice, split


def lowered(schedule: Schedule, device=None, case: str = "laplace_p2_triangle_action") -> str:
    loop = case_named(case).loop(1e-6).parloop
    return Module(loop.kernel, loop.spec, schedule, device or get_device("cpu")).lower()


def compile_in_parts(text: str, device, cache: Cache | None = None) -> bytes:
    """Compile a module in parts; nothing where that does not work."""
    host = partial(compiling._compile_host, device=device, cache=cache)
    return compiling._compile_in_parts(text, device.target.flags, "loop", host) or b""


def libraries(module: bytes) -> dict[str, bytes]:
    """The executables in a module, which is a zip archive."""
    with zipfile.ZipFile(io.BytesIO(module)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if "executable" in name}


@pytest.mark.parametrize("strategy", ["in_order", "colour", "segmented"])
def test_the_machine_code_is_the_same(strategy):
    text = lowered(Schedule(strategy))
    cpu = get_device("cpu")
    whole = libraries(compiling._compile(text, cpu.target.flags, "loop"))
    parts = libraries(compile_in_parts(text, cpu))
    assert whole.keys() == parts.keys()
    for name, code in whole.items():
        assert len(code) == len(parts[name])
        # each function has the number of its line in the text that was translated
        differing = sum(a != b for a, b in zip(code, parts[name], strict=True))
        assert differing <= 2 * len(split(text)[1])


@pytest.mark.parametrize(
    ("kind", "architecture"), [("cuda", "sm_80"), ("hip", "gfx90a"), ("vulkan", "ampere")]
)
def test_executables_for_gpus_are_compiled_in_parts(kind, architecture):
    device = offline_device(kind, architecture)
    text = lowered(Schedule("colour"), device, "laplace_p1_triangle_action")
    assert compile_in_parts(text, device)


def test_the_host_is_compiled_once_for_kernels_of_one_interface(tmp_path):
    cache, cpu = Cache(tmp_path), get_device("cpu")
    first, *others = (lowered(Schedule("in_order", tile=tile)) for tile in (2, 4, 6))
    assert compile_in_parts(first, cpu, cache)
    (entry,) = cache.list()
    for text in others:
        assert compile_in_parts(text, cpu, cache)
    assert cache.list() == [entry]
    # what is kept there is what goes on from there
    cache.put(entry.key, b"no module")
    assert not compile_in_parts(first, cpu, cache)


def test_nothing_is_split_where_nothing_is_ours():
    text = '"builtin.module"() ({\n}) : () -> ()'
    assert split(text) == (text, {})
    assert compile_in_parts(text, get_device("cpu")) == b""


@pytest.mark.parametrize("missing", ['"func.func"', "{translation_info = #t} "])
def test_what_looks_otherwise_is_left_whole(missing):
    text = executable("b", 2) + executable("a", 1).replace(missing, "")
    assert split(text) == (text, {})


def executable(name: str, value: int) -> str:
    """An executable as xDSL prints it, in short."""
    return f"""
  "hal.executable.source"() <{{sym_name = "{name}_executable"}}> ({{
    "builtin.module"() ({{
      "func.func"() <{{sym_name = "{name}", function_type = () -> ()}}> ({{
        %0 = "arith.constant"() <{{value = {value} : index}}> : () -> index
        "func.return"() : () -> ()
      }}) {{translation_info = #t}} : () -> ()
    }}) : () -> ()
  }}) : () -> ()"""


def compiled(host: str, names: list[str]) -> str:
    """What IREE prints of a module, in short."""
    assert all(f'sym_name = "{name}"' in host for name in names)
    functions = [f"func.func @{name}() attributes {{}} {{\n  return\n}}\n" for name in names]
    return "".join(functions)


def test_bodies_that_differ_are_told_apart():
    host, bodies = split(executable("a", 1) + executable("b", 2))
    assert "arith.constant" not in host
    assert len(set(re.findall(r"body = (\d+)", host))) == 2
    whole = splice(compiled(host, ["b", "a"]), bodies)
    assert re.findall(r"value = (\d)", whole) == ["2", "1"]
    assert splice(compiled(host, ["a"]), bodies) is None
    assert splice(compiled(host, ["a", "a", "b"]), bodies) is None


def test_of_equal_bodies_one_is_enough():
    host, bodies = split(executable("a", 1) + executable("b", 1))
    assert len(set(re.findall(r"body = (\d+)", host))) == 1
    assert splice(compiled(host, ["a"]), bodies).count("value = 1") == 1


def test_other_empty_functions_are_left_alone():
    host, bodies = split(executable("a", 1))
    strange = compiled(host, ["a"]) + "func.func @other() {\n  return\n}\n"
    assert splice(strange, bodies) is None


def test_what_iree_refuses_is_said_of_the_whole_module(cache_dir, tmp_path, monkeypatch):
    text = lowered(Schedule("in_order")).replace('"arith.mulf"', '"arith.mulg"')
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(compiling.CompilationError, match=r"arith\.mulg"):
        compiling.compile_module(text, get_device("cpu"), name="wrong")
    (saved,) = tmp_path.glob("pyop3_mlir-wrong-*.mlir")
    assert saved.read_text().startswith(text)

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import pyop3_mlir
from pyop3_mlir.cli import app
from pyop3_mlir.runtime.cache import Cache

LOOP = "pyop3_mlir.doctor:small_loop"


def invoke(*arguments):
    return CliRunner().invoke(app, arguments)


def run_process(*arguments, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-m", "pyop3_mlir", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )


def commands(group=app, prefix=()):
    """Every command, as its words."""
    for entry in group.registered_commands:
        yield (*prefix, entry.name or entry.callback.__name__)
    for entry in group.registered_groups:
        yield from commands(entry.typer_instance, (*prefix, entry.name))


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_help_says_what_a_command_does(words):
    done = invoke(*words, "--help")
    assert done.exit_code == 0
    text = done.output.split("Options")[0].replace("Usage:", "")
    assert len(text.split()) > 6


def test_version():
    assert invoke("--version").output.strip() == pyop3_mlir.__version__


def test_module_runs_as_a_program():
    done = run_process("--version")
    assert (done.returncode, done.stdout.strip()) == (0, pyop3_mlir.__version__)


def test_an_error_is_one_line_and_a_status():
    done = run_process("tune", "nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no case 'nothing'; there are ")
    assert "Traceback" not in done.stderr


def test_a_bad_setting_is_named():
    done = run_process("devices", PYOP3_MLIR_TUNE="often")
    assert done.returncode == 1
    assert "PYOP3_MLIR_TUNE" in done.stderr


@pytest.mark.parametrize("command", ["engine", "firedrake", "tuner"])
def test_a_benchmark_that_does_not_exist_is_named(command):
    done = invoke("bench", command, "--case", "nothing")
    assert "no case 'nothing'; there are " in str(done.exception)


def test_devices_lists_the_cpu():
    done = invoke("devices")
    assert done.exit_code == 0
    assert any(line.split()[1:2] == ["cpu"] for line in done.output.splitlines())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no/such/file.py:loop", "there is no file"),
        ("no_such_module:loop", "cannot import no_such_module"),
        ("pyop3_mlir.doctor:no_such_function", "has no function no_such_function"),
        ("pyop3_mlir.doctor:examine", "takes arguments"),
        ("pyop3_mlir.options:Options.resolve", "has no function"),
        ("pyop3_mlir.runtime.cache:default_root", "not a Parloop"),
    ],
)
def test_a_target_that_is_no_loop(target, message):
    done = invoke("tune", target)
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_cache_commands(cache_dir):
    cache = Cache(cache_dir / "tuning")
    cache.put("a key", b"a value")
    assert "1 entries, 7 bytes" in invoke("cache", "list").output
    assert invoke("cache", "verify").exit_code == 0
    path = cache.path("a key")
    path.write_bytes(path.read_bytes()[:-1])
    done = invoke("cache", "verify")
    assert done.exit_code == 1
    assert "truncated" in done.output
    cache.put("a key", b"a value")
    assert "tuning: removed 1" in invoke("cache", "clear").output
    assert cache.get("a key") is None


def test_cache_clear_leaves_other_files_alone(cache_dir):
    other = cache_dir / "wheels" / "file.whl"
    other.parent.mkdir(parents=True)
    other.touch()
    invoke("cache", "clear")
    assert other.exists()


def test_doctor_runs_a_loop(cache_dir):
    done = invoke("doctor")
    assert done.exit_code == 0, done.output
    assert "compiled and run in" in done.output


def test_doctor_finds_a_device_that_is_not_there(cache_dir):
    done = invoke("doctor", "--device", "cuda:63")
    assert done.exit_code == 1
    assert "DeviceError" in done.output


def test_tune_prints_the_table_and_remembers(cache_dir, tmp_path):
    done = invoke("tune", LOOP, "--budget", "4", "--chart", str(tmp_path / "chart.png"))
    assert done.exit_code == 0, done.output
    assert "chosen" in done.output
    assert (tmp_path / "chart.png").stat().st_size > 1000
    assert len(Cache(cache_dir / "tuning").list()) == 1


def test_explain_shows_every_stage(cache_dir):
    done = invoke("explain", LOOP, "--tune", "off")
    assert done.exit_code == 0, done.output
    for text in ("kernel neighbours", "in_order", "tensor", "vectorise", "flow.dispatch"):
        assert text in done.output
    assert "not possible" in done.output


def test_explain_one_stage_is_mlir_alone(cache_dir):
    done = invoke("explain", LOOP, "--tune", "off", "--stage", "tensor")
    assert "linalg.generic" in done.output
    assert "flow.dispatch" not in done.output
    assert "not possible" not in done.output


def test_explain_names_the_stages_that_there_are(cache_dir):
    done = invoke("explain", LOOP, "--tune", "off", "--stage", "tensors")
    assert "there are tensor, " in str(done.exception)


def test_a_loop_from_a_file(cache_dir, tmp_path):
    file = tmp_path / "my_loop.py"
    file.write_text("from pyop3_mlir.doctor import small_loop as edges\n")
    assert invoke("tune", f"{file}:edges", "--budget", "2").exit_code == 0

"""The script that builds PETSc with CUDA says what is wrong before it does anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "ci" / "gpu" / "petsc_cuda.sh"


def run(*arguments, tools=(), tmp_path):
    """Run it where nothing is on the path but the shell's own tools and those given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "cat", "dirname", "env", "find", "grep", "nproc", "paste", "sed", "sort"):
        (folder / name).symlink_to(Path("/usr/bin") / name)
    for name, text in dict(tools).items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        [SCRIPT, *arguments],
        env={"PATH": str(folder), "HOME": str(tmp_path), "PYTHON": "bash"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


LIBRARIES = ("cublas", "cufft", "curand", "cusolver", "cusparse")


def toolkit(tmp_path, libraries=LIBRARIES):
    """A folder that looks like a CUDA toolkit."""
    home = tmp_path / "cuda"
    for name in ("bin/nvcc", "include/cuda.h", *(f"lib64/lib{name}.so" for name in libraries)):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("#!/usr/bin/env bash\necho 'release 13.0, V13.0.88'\n")
        (home / name).chmod(0o755)
    return home


HOST = dict.fromkeys(("mpicc", "mpicxx", "make", "gcc", "g++"), "true")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no virtual environment is given"),
        (("--arch",), "--arch needs a value"),
        (("--arch", "sm_90", "venv"), "--arch sm_90 is no compute capability such as 80 or 90"),
        (("--bar", "venv"), "unknown option --bar"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path):
    done = run(*arguments, tmp_path=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "usage: ci/gpu/petsc_cuda.sh" in done.stderr


def test_without_a_toolkit(tmp_path):
    done = run("venv", tmp_path=tmp_path)
    assert done.returncode == 3
    assert "nvcc is missing: install the CUDA toolkit" in done.stderr


@pytest.mark.parametrize("missing", LIBRARIES)
def test_with_a_part_of_a_toolkit(missing, tmp_path):
    """As the compiler's package alone leaves it."""
    home = toolkit(tmp_path, [name for name in LIBRARIES if name != missing])
    done = run("--cuda-dir", home, "venv", tools=HOST, tmp_path=tmp_path)
    assert done.returncode == 3
    assert f"there is no lib{missing}.so in {home}; install the whole CUDA toolkit" in done.stderr


def test_without_a_compiler_or_a_driver(tmp_path):
    home = toolkit(tmp_path)
    done = run("--cuda-dir", home, "venv", tmp_path=tmp_path)
    assert done.returncode == 3
    assert "mpicc is missing; run ci/system-packages.sh firedrake" in done.stderr
    (tmp_path / "more").mkdir()
    done = run("--cuda-dir", home, "venv", tools=HOST, tmp_path=tmp_path / "more")
    assert done.returncode == 3
    assert "nvidia-smi is missing" in done.stderr


def test_what_would_be_built(tmp_path):
    """On a machine with two kinds of GPUs, without building anything."""
    smi = "echo 'NVIDIA H200, 9.0'; echo 'NVIDIA A100, 8.0'; echo 'NVIDIA H200, 9.0'"
    tools = {**HOST, "nvidia-smi": smi}
    done = run("--cuda-dir", toolkit(tmp_path), "--check", "venv", tools=tools, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "for compute capability 80,90" in done.stderr
    assert "--with-cuda-arch=80,90" in done.stderr
    assert "--with-memalign=64" in done.stderr
    assert not (tmp_path / "venv").exists()

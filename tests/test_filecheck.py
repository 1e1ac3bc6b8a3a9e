"""The filecheck tests, one pytest test a file, so that a failure is named and shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyop3_mlir.lowering.opt import all_passes

ROOT = Path(__file__).parent / "filecheck"
FILES = sorted(ROOT.rglob("*.mlir"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_file(path, tmp_path):
    lit = Path(sys.executable).parent / "lit"
    done = subprocess.run(
        [lit, "-v", "--param", f"exec_root={tmp_path}", path],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted({found.name for found in all_passes()}))
def test_every_pass_has_a_test(name):
    wanted = f"{name.replace('-', '_')}.mlir"
    assert wanted in {path.name for path in FILES}, f"add tests/filecheck/{wanted}"

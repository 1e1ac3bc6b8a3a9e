"""``python -m pyop3_mlir run``: whole scripts print what they print without the engine.

Firedrake's demos are run where they are: they are part of its repository, but of no package. A
checkout is found beside an editable installation, or where ``FIREDRAKE_DEMOS`` says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

HEAT = """
import sys
from firedrake import *

mesh = UnitSquareMesh(4, 4)
space = FunctionSpace(mesh, "CG", 2)
u, v, old = TrialFunction(space), TestFunction(space), Function(space)
old.interpolate(sin(pi * SpatialCoordinate(mesh)[0]))
step = Constant(0.0)
form = (u * v + step * inner(grad(u), grad(v)) - old * v) * dx
new = Function(space)
for number in range(3):
    step.assign(0.01 * (number + 1))
    parameters = {"ksp_type": "preonly", "pc_type": "lu"}
    solve(lhs(form) == rhs(form), new, DirichletBC(space, 0, 1), solver_parameters=parameters)
    old.assign(new)
    print("step", number, "energy", assemble(new * new * dx))
print("last argument", sys.argv[-1])
sys.exit(3)
"""


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg", **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_a_script_is_run_as_it_is(tmp_path: Path) -> None:
    """What it prints and returns, its arguments, settings among PETSc's options, and the report."""
    (tmp_path / "heat.py").write_text(HEAT)
    plain = run(tmp_path, "heat.py", "last")
    ours = run(
        tmp_path, "-m", "pyop3_mlir", "run", "--report", "report.json",
        "heat.py", "-pyop3_mlir_strategy", "colour", "last",
    )  # fmt: skip
    assert (plain.returncode, ours.returncode) == (3, 3), ours.stderr
    same_numbers(plain.stdout, ours.stdout)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lowered_fraction"] == 1.0
    assert all(loop["calls"] == loop["lowered"] > 0 for loop in report["loops"])
    # what adds up to a scalar has nothing to colour
    strategies = {loop["strategy"].split("/")[0] for loop in report["loops"]}
    assert "colour" in strategies


def same_numbers(expected: str, found: str) -> None:
    """The same text, with equal integers, and other numbers equal but for rounding.

    Residuals of solvers are differences of numbers as large as the first of them.
    """
    number = r"[-+]?\d+\.\d*(?:[eE][-+]?\d+)?"
    assert re.sub(number, "", found) == re.sub(number, "", expected)
    ours, theirs = (np.array(re.findall(number, text), float) for text in (found, expected))
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10 * np.abs(theirs).max())


# ---------------------------------------------------------------------------------------------


def package() -> Path:
    """Where Firedrake is installed."""
    found: Any = importlib.util.find_spec("firedrake")
    return Path(found.origin).parent


def test_tests_that_come_with_firedrake(tmp_path: Path) -> None:
    """Some of those that ``firedrake-check`` runs, each loop on both engines and compared."""
    folder = package() / "_check" / "tests" / "firedrake" / "regression"
    if not folder.exists():
        pytest.skip(f"this Firedrake brings no tests ({folder})")
    (tmp_path / "check.py").write_text(
        "import pytest, sys\nsys.exit(pytest.main(['-p', 'no:cacheprovider', *sys.argv[1:]]))\n"
    )
    done = run(
        tmp_path, "-m", "pyop3_mlir", "run", "--report", "report.json", "check.py",
        "-m", "not parallel", str(folder / "test_stokes_mini.py"),
        f"{folder / 'test_nullspace.py'}::test_near_nullspace",
        PYOP3_MLIR_VERIFY="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lowered_fraction"] == 1.0
    assert sum(loop["calls"] for loop in report["loops"]) > 100


def demos() -> Path:
    """Firedrake's folder of demos."""
    named = os.environ.get("FIREDRAKE_DEMOS")
    if named is not None:
        return Path(named)
    return package().parent / "demos"


def code_of(demo: str) -> str:
    """The code of a demo, which is written as a text with literal blocks."""
    lines: list[str] = []
    inside, level = False, 0
    for line in demo.splitlines():
        text = line.strip()
        indentation = len(line) - len(line.lstrip())
        if inside and text and indentation <= level:
            inside = False
        if inside:
            lines.append(line)
        elif text:
            inside, level = text.endswith("::") and not text.startswith(".."), indentation
    return textwrap.dedent("\n".join(lines)) + "\n"


# some others print little, or how solvers come to rest in rounding errors, or take minutes
@pytest.mark.parametrize(
    "demo",
    ["helmholtz/helmholtz.py.rst", "deflation/deflation.py.rst"],
    ids=["linear", "nonlinear"],
)
def test_demos_of_firedrake(demo: str, tmp_path: Path) -> None:
    source = demos() / demo
    if not source.exists():
        pytest.skip(f"Firedrake's demos are not here ({source}); set FIREDRAKE_DEMOS")
    pytest.importorskip("vtkmodules", reason="demos write files for ParaView")
    (tmp_path / "demo.py").write_text(code_of(source.read_text(encoding="utf-8")))
    plain = run(tmp_path, "demo.py")
    ours = run(tmp_path, "-m", "pyop3_mlir", "run", "--report", "report.json", "demo.py")
    assert (plain.returncode, ours.returncode) == (0, 0), ours.stderr
    assert plain.stdout
    same_numbers(plain.stdout, ours.stdout)
    assert json.loads((tmp_path / "report.json").read_text())["lowered_fraction"] == 1.0

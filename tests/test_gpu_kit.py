"""The GPU kit is built, and run on a Vulkan device by a process that has only numpy and IREE."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_bundle import BARE

pytestmark = pytest.mark.slow

KIT = Path(__file__).parent.parent / "ci" / "gpu"
CASES = ("laplace_p1_tetrahedron_action", "mass_p1_tetrahedron_matrix")


@pytest.fixture(scope="module")
def kit(vulkan_present, tmp_path_factory):
    """A kit of two cases for Vulkan."""
    root = tmp_path_factory.mktemp("kit")
    command = [sys.executable, KIT / "build_kit.py", "-o", root, "--target=vulkan/ampere"]
    command += ["--matmul=64", *(f"--case={case}" for case in CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 cases" in done.stdout
    return root


def run_kit(root, *arguments):
    """Run the kit as on a machine of its own."""
    script = str(root / "run.py")
    arguments = ["--device=vulkan", "--scale=2e-5", "--seconds=0.01", "--rounds=2", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYOP3_MLIR_")}
    return subprocess.run(
        [sys.executable, "-c", BARE.format(script=script, arguments=arguments)],
        env={**environment, "XDG_CACHE_HOME": str(root / "cache")},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_everything_is_right_and_is_measured(kit, tmp_path):
    report = tmp_path / "report.json"
    done = run_kit(kit, f"--json={report}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every value was right" in done.stdout
    content = json.loads(report.read_text())
    assert content["copy_GBs"] > 0
    assert content["matmul_GFLOPs"] > 0
    for case in CASES:
        rows = [row for row in content["rows"] if row["case"] == case]
        assert {row["schedule"].split("/")[0] for row in rows} == {"colour", "segmented"}
        assert len({row["cells"] for row in rows}) >= 1
        assert all(row["error"] < 1e-12 and row["seconds"] > 0 for row in rows)
    measured = {(t["case"], t["what"]): t["value"] for t in content["targets"]}
    # what bounds an action is measured, by a product of matrices too small to be steady
    action = [row for row in content["rows"] if row["case"] == CASES[0]]
    best = min(action, key=lambda row: (-row["cells"], row["seconds"]))
    share = "of_copy" if best["bound_by"] == "memory" else "of_roofline"
    assert measured == {
        (CASES[0], share): best[share],
        (CASES[0], "times rival"): None,
        (CASES[1], "times rival"): None,
    }


def test_a_wrong_value_is_found(kit, tmp_path):
    """What is compared with is changed, by a part in a thousand million."""
    import numpy as np

    path = kit / "data" / f"{CASES[0]}.npz"
    kept = path.read_bytes()
    content = dict(np.load(path))
    content["expected"] = content["expected"] * (1 + 1e-9)
    np.savez(path, **content)
    try:
        done = run_kit(kit, f"--case={CASES[0]}", "--check-only")
    finally:
        path.write_bytes(kept)
    assert done.returncode == 1
    assert "WRONG: laplace_p1_tetrahedron_action, segmented/blocked" in done.stdout


def test_a_device_that_the_kit_has_no_modules_for(kit):
    done = run_kit(kit, "--device=cpu")
    assert done.returncode == 1
    assert "the kit has no modules for cpu" in done.stderr

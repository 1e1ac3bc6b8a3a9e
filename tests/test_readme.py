"""What the documentation says is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from test_cli import commands

from pyop3_mlir.options import SETTINGS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_prints_what_it_says(cache_dir, monkeypatch, capsys):
    monkeypatch.setenv("PYOP3_MLIR_TUNE", "off")
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [block for block in blocks if "Parloop(" in block]
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "[-0.5  0.5  0.5 -0.5]" in capsys.readouterr().out
    # grad(x) is (1, 0): the flux leaves through the side x = 1, half of it at each corner
    np.testing.assert_allclose(names["result"], [-0.5, 0.5, 0.5, -0.5], atol=1e-15)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_is_documented(setting):
    assert f"`{setting.environment_variable}`" in README
    assert f"| `{setting.name}` |" in (ROOT / "docs" / "settings-and-caches.md").read_text()


@pytest.mark.parametrize("command", sorted({words[0] for words in commands()}))
def test_every_command_is_shown(command):
    assert f"python -m pyop3_mlir {command}" in README


def test_links_between_documents_lead_somewhere():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_make_lists_its_targets():
    text = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "test-core", "lint", "format", "bench", "clean", "docs"):
        assert re.search(rf"^{target}:", text, re.MULTILINE)
        assert f"make {target} " in text

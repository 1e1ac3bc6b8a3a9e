from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pyop3_mlir.errors import OptionError, Pyop3MlirError
from pyop3_mlir.options import SETTINGS, Options, configure_logging, overriding


class FakeDatabase:
    """PETSc's options as petsc4py shows them."""

    def __init__(self, values):
        self.values = values

    def hasName(self, name):  # noqa: N802
        return name in self.values

    def getString(self, name, default):  # noqa: N802
        return self.values.get(name, default)


@pytest.fixture
def petsc(monkeypatch):
    values = {}
    module = types.SimpleNamespace(Options=lambda: FakeDatabase(values))
    monkeypatch.setitem(sys.modules, "petsc4py.PETSc", module)
    return values


def test_defaults(monkeypatch):
    monkeypatch.delenv("PYOP3_MLIR_CACHE_DIR")
    options = Options.resolve()
    assert (options.device, options.strategy, options.batching) == ("cpu", "auto", "auto")
    assert (options.tune, options.tune_budget, options.verify) == ("cached", 20.0, False)
    assert options.cache_dir.name == "pyop3_mlir"
    assert set(options.sources.values()) == {"default"}


def test_environment_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("PYOP3_MLIR_TUNE_BUDGET", "2.5")
    assert Options.resolve().tune_budget == 2.5
    monkeypatch.setenv("PYOP3_MLIR_TUNE_BUDGET", "3")
    assert Options.resolve().tune_budget == 3.0


def test_order_of_the_sources(monkeypatch, petsc):
    monkeypatch.setenv("PYOP3_MLIR_DEVICE", "vulkan")
    assert Options.resolve().device == "vulkan"
    petsc["pyop3_mlir_device"] = "cuda"
    options = Options.resolve()
    assert options.device == "cuda"
    assert options.sources["device"] == "PETSc option -pyop3_mlir_device"
    with overriding(device="hip"):
        assert Options.resolve().device == "hip"
        assert Options.resolve(device="cpu").device == "cpu"
        assert Options.resolve(device=None).device == "hip"
    assert Options.resolve().device == "cuda"


def test_petsc_flag_without_value_is_true(petsc):
    petsc["pyop3_mlir_verify"] = ""
    assert Options.resolve().verify is True


def test_petsc4py_is_not_imported():
    code = (
        "import sys; from pyop3_mlir import Options; Options.resolve(); "
        "sys.exit('petsc4py' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_imports_no_compiler():
    code = "import sys, pyop3_mlir; print([m for m in ('iree', 'xdsl', 'gem') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "c u d a"),
        ("strategy", "colored"),
        ("batching", "wide"),
        ("tune", "always"),
        ("tune_budget", "soon"),
        ("tune_budget", "-1"),
        ("tune_budget", "nan"),
        ("verify", "maybe"),
        ("log", "loud"),
    ],
)
def test_bad_value_names_value_and_source(monkeypatch, name, value):
    variable = SETTINGS[name].environment_variable
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionError) as caught:
        Options.resolve()
    assert variable in str(caught.value)
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, Pyop3MlirError)


def test_cache_dir_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OptionError, match="directory"):
        Options.resolve(cache_dir=file)


def test_cache_dir_expands_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Options.resolve(cache_dir="~/here").cache_dir == tmp_path / "here"


def test_relative_cache_dir_becomes_absolute():
    assert Options.resolve(cache_dir="here").cache_dir == Path.cwd() / "here"


def test_unknown_argument_suggests_the_nearest():
    with pytest.raises(OptionError, match="did you mean strategy"):
        Options.resolve(stratgy="colour")


def test_unknown_environment_variable_is_reported_once(monkeypatch, caplog):
    monkeypatch.setenv("PYOP3_MLIR_STRATAGY", "colour")
    with caplog.at_level(logging.WARNING, "pyop3_mlir"):
        Options.resolve()
        Options.resolve()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "PYOP3_MLIR_STRATAGY" in messages[0]
    assert "PYOP3_MLIR_STRATEGY" in messages[0]


def test_empty_environment_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("PYOP3_MLIR_TUNE", "")
    assert Options.resolve().sources["tune"] == "default"


def test_overriding_refuses_bad_values_and_restores_on_error():
    with pytest.raises(OptionError), overriding(tune="often"):
        pass
    with pytest.raises(KeyError), overriding(tune="off"):
        raise KeyError
    assert Options.resolve().tune == "cached"


def test_overlapping_blocks_may_end_in_any_order():
    first, second = overriding(tune="off"), overriding(tune="off")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Options.resolve().tune == "off"
    second.__exit__(None, None, None)
    assert Options.resolve().tune == "cached"


def test_every_setting_has_a_field_and_help():
    assert list(Options.resolve().as_dict()) == list(SETTINGS)
    assert all(setting.help for setting in SETTINGS.values())


def test_logging_level_is_applied():
    logger = logging.getLogger("pyop3_mlir")
    level, handlers = logger.level, list(logger.handlers)
    try:
        configure_logging(Options.resolve(log="info"))
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_settings_of_the_caller_do_not_reach_the_tests():
    assert "PYOP3_MLIR_DEVICE" not in os.environ

"""The ways in for a program that asks for the engine itself, and where settings come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("firedrake")

from firedrake import Function, FunctionSpace, TestFunction, UnitSquareMesh, assemble, dx
from firedrake.petsc import PETSc

import pyop3_mlir
from pyop3_mlir import engine, frontends
from pyop3_mlir.errors import Pyop3MlirError
from pyop3_mlir.frontends import dropin


@pytest.fixture(autouse=True)
def _nothing_from_before(monkeypatch: Any) -> Iterator[None]:
    monkeypatch.setattr(frontends, "_finished", [])
    monkeypatch.setenv("PYOP3_MLIR_TUNE", "off")
    yield
    assert dropin.attached() is None


def some_assembly() -> Any:
    space = FunctionSpace(UnitSquareMesh(2, 2), "CG", 1)
    return assemble(Function(space).assign(2.0) * TestFunction(space) * dx).dat.data_ro.copy()


def test_install_and_uninstall() -> None:
    expected = some_assembly()
    assert frontends.report_as_dict()["loops"] == []
    pyop3_mlir.install()
    found = some_assembly()
    pyop3_mlir.uninstall()
    some_assembly()
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    report = frontends.report_as_dict()
    assert [loop["calls"] for loop in report["loops"]] == [1]
    assert report["lowered_fraction"] == 1.0


def test_uninstall_of_nothing_is_refused() -> None:
    with pytest.raises(Pyop3MlirError, match="not installed"):
        pyop3_mlir.uninstall()


def test_a_block_is_left_by_an_error_too() -> None:
    def block() -> None:
        with pyop3_mlir.backend():
            assert dropin.attached() is not None
            raise KeyError("on purpose")

    with pytest.raises(KeyError):
        block()


def test_what_is_printed(capsys: Any) -> None:
    with pyop3_mlir.backend():
        some_assembly()
    pyop3_mlir.report()
    printed = capsys.readouterr().out
    assert "form" in printed
    assert "100.0% of the calls" in printed


def test_settings_among_petscs_options() -> None:
    options = PETSc.Options()
    options["pyop3_mlir_strategy"] = "segmented"
    try:
        with pyop3_mlir.backend():
            some_assembly()
    finally:
        options.delValue("pyop3_mlir_strategy")
    (loop,) = frontends.report_as_dict()["loops"]
    assert loop["strategy"].startswith("segmented")


def test_a_setting_of_the_program_wins(monkeypatch: Any) -> None:
    monkeypatch.setenv("PYOP3_MLIR_STRATEGY", "segmented")
    with pyop3_mlir.backend(strategy="colour"):
        some_assembly()
    (loop,) = frontends.report_as_dict()["loops"]
    assert loop["strategy"].startswith("colour")


@pytest.mark.parametrize("verify", ["0", "1"])
def test_verification_by_the_environment(verify: str, monkeypatch: Any) -> None:
    """The engine's result is spoiled: it is found where that is asked for, and only there."""
    original = engine.BoundLoop.__call__

    def wrong(self: Any, *args: Any) -> None:
        original(self, *args)
        self.parloop.arguments[0].buffer[0] += 1.0

    expected = some_assembly()
    monkeypatch.setenv("PYOP3_MLIR_VERIFY", verify)
    monkeypatch.setattr(engine.BoundLoop, "__call__", wrong)
    with pyop3_mlir.backend():
        if verify == "1":
            with pytest.raises(dropin.VerificationError, match="entry 0"):
                some_assembly()
        else:
            assert some_assembly()[0] == pytest.approx(expected[0] + 1.0)

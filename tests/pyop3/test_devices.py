"""Loops inside pyop3's ``offloading(...)``: on arrays of another library, by DLPack.

The other library here has its arrays in the host's memory, and nothing but DLPack to show for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyop3.insn.exec", reason="pyop3 is in no registry and not installed here")
import pyop3 as op3
import pyop3.device
from pyop3_loops import add, dat, map_, rng


class Foreign:
    """An array of a library of its own."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = np.array(values)
        self.taken = 0

    shape = property(lambda self: self._values.shape)
    dtype = property(lambda self: self._values.dtype)
    size = property(lambda self: self._values.size)

    def __setitem__(self, at: Any, values: Any) -> None:
        self._values[at] = values._values if isinstance(values, Foreign) else values

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.taken += 1
        return self._values.__dlpack__(**options)


class Elsewhere(pyop3.device.Device):
    """The device of its arrays."""

    name = "elsewhere"

    def asarray(self, array: Any, *, constant: bool = False) -> Foreign:
        return Foreign(array)

    def zeros_like(self, array: Any) -> Foreign:
        return Foreign(np.zeros(array.shape, array.dtype))


@pytest.fixture
def elsewhere(monkeypatch) -> Iterator[Elsewhere]:
    """The device, known to pyop3 as CuPy's are."""
    device = Elsewhere()
    pyop3.device.DEVICE_TO_ARRAY_TYPE[device] = Foreign
    host = pyop3.device.CPU.asarray

    def asarray(self: Any, array: Any, *, constant: bool = False) -> np.ndarray:
        values = array._values.copy() if isinstance(array, Foreign) else array
        return host(self, values, constant=constant)

    monkeypatch.setattr(pyop3.device.CPU, "asarray", asarray)
    yield device
    del pyop3.device.DEVICE_TO_ARRAY_TYPE[device]


def there(buffer: Any) -> np.ndarray:
    """What a buffer holds on the current device."""
    return buffer._current_device_array._values


def test_loop_on_arrays_of_another_library(engine, elsewhere):
    cells, vertices = op3.Axis(30, "cells"), op3.Axis(12, "vertices")
    table = rng.integers(0, 12, (30, 3))
    cone = map_(cells, vertices, table, "cone")
    x, y = dat(vertices), dat(cells, np.zeros(30))
    loop = op3.loop(c := cells.iter(), add(3)(x[cone(c)], y[c]))
    expected = x.buffer.data_ro[table].sum(axis=1)
    with op3.offloading(elsewhere):
        loop()
        assert np.allclose(there(y.buffer), expected, rtol=1e-14)
        # the memory itself, without a copy: what is there counts the next time
        there(x.buffer)[...] *= 2
        loop()
        assert np.allclose(there(y.buffer), 3 * expected, rtol=1e-14)
        assert x.buffer._current_device_array.taken == 1
    engine.check()


def test_devices_take_turns(engine, elsewhere):
    axis = op3.Axis(9, "points")
    x, y = dat(axis), dat(axis, np.zeros(9))
    values = x.buffer.data_ro.copy()
    loop = op3.loop(p := axis.iter(), add(1)(x[p], y[p]))
    loop()
    with op3.offloading(elsewhere):
        loop()
        loop()
        assert np.allclose(there(y.buffer), 3 * values, rtol=1e-15)
    loop()
    assert np.allclose(y.buffer.data_ro, 4 * values, rtol=1e-15)
    engine.check()


def test_kernel_in_c_on_arrays_of_another_library(engine, elsewhere):
    # pyop3's own code cannot reach them: it runs on copies
    axis = op3.Axis(5, "points")
    x, y = dat(axis), dat(axis, np.zeros(5))
    arguments = [("x", op3.ScalarType, op3.READ), ("y", op3.ScalarType, op3.WRITE)]
    k = op3.Function.from_c_string("in_c", "y[0] = 2*x[0];", arguments)
    loop = op3.loop(p := axis.iter(), k(x[p], y[p]))
    with op3.offloading(elsewhere):
        loop()
        assert np.array_equal(there(y.buffer), 2 * there(x.buffer))
    (entry,) = engine.entries("in_c")
    assert (entry.calls, entry.lowered) == (1, 0)


def test_assignment_on_arrays_of_another_library(engine, elsewhere):
    axis = op3.Axis(7, "points")
    x, y = dat(axis), dat(axis)
    loop = op3.loop(p := axis.iter(), op3.Assignment(y[p], 2.0 * x[p] + 1.0, "write"))
    with op3.offloading(elsewhere):
        loop()
        assert np.allclose(there(y.buffer), 2 * there(x.buffer) + 1, rtol=1e-15)
    engine.check()


def test_device_without_dlpack_is_refused():
    from pyop3_mlir.errors import UnsupportedLoopError
    from pyop3_mlir.frontends.pyop3_devices import ForeignArrays

    with pytest.raises(UnsupportedLoopError, match="x is a list, without DLPack"):
        ForeignArrays().take([1.0], "x")


@pytest.mark.parametrize("kind", [2, 10])
def test_device_that_is_not_there_is_named(kind):
    from pyop3_mlir.errors import DeviceError
    from pyop3_mlir.frontends.pyop3_devices import ForeignArrays

    class OnDevice(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, 63

    with pytest.raises(DeviceError, match=r"(cuda|hip):63"):
        ForeignArrays().take(OnDevice(np.zeros(3)), "x")

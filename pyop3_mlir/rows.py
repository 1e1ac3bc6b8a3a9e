"""Rows of resident arrays, worked on where the contents are.

What processes exchange of an array are some of its rows. Where the latest contents are on a device,
small loops there gather these rows into memory without gaps, and put others in their places: what
crosses between host and device are the rows alone. The loops run as any other does, so there is one
compiled module for each type and number of components.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.engine import BoundLoop, Module, modules_for
from pyop3_mlir.kernels.program import Expr, KernelArgument, Load, LocalKernel, Op, Scalar
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    READ,
    WRITE,
    Access,
    Argument,
    IndexTable,
    IterationSet,
    Parloop,
)
from pyop3_mlir.runtime.devices import Device
from pyop3_mlir.runtime.residency import Resident

__all__ = ["Rows", "neutral"]

Array = npt.NDArray[Any]

_SCHEDULE = Schedule("colour", width=1)


class Rows:
    """Some rows of a resident array.

    Parameters
    ----------
    resident
        ``[rows, ...]``.
    numbers
        ``int[n]``. A row may occur several times where they are only read or reduced.
    """

    def __init__(self, resident: Resident, numbers: npt.NDArray[np.int64]) -> None:
        self._array = array = resident.array
        self.numbers = numbers
        # kept by the array's keeper, it must not keep that alive
        self._loops: dict[tuple[str, str], tuple[BoundLoop, Resident | None]] = {}
        self._table = IndexTable(
            numbers.astype(np.int32)[:, None], max(len(array), 1), name="exchanged rows"
        )
        self._components = math.prod(array.shape[1:])

    def get(self, resident: Resident) -> Array:
        """The rows with their latest contents, ``[n, ...]``, on the host."""
        devices = resident.fresh_devices
        if resident.host_fresh or not self.numbers.size or not self._components:
            return np.ascontiguousarray(self._array[self.numbers])
        if not devices:
            # raises: what was there is lost
            resident.refresh_host()
        loop, packed = self._loop("get", devices[0])
        loop()
        assert packed is not None
        return packed.data_ro

    def put(self, resident: Resident, values: Array, access: Access = WRITE) -> None:
        """Store or reduce into the rows, on the host and on devices that have the latest contents.

        Parameters
        ----------
        resident
            The array.
        values
            ``[n, ...]``.
        access
            WRITE, INC, MIN or MAX; with WRITE no row may occur twice.
        """
        if not self.numbers.size or not self._components:
            return
        host, devices = resident.host_fresh, resident.fresh_devices
        if host:
            if access is WRITE:
                self._array[self.numbers] = values
            else:
                _UFUNCS[access].at(self._array, self.numbers, values)
        for device in devices:
            loop, packed = self._loop(access.name, device)
            assert packed is not None
            packed.data_wo[...] = values
            loop()
        resident.changed_alike(host, devices)

    def fill(self, resident: Resident, access: Access) -> None:
        """Set the rows to what changes nothing where it is reduced by INC, MIN or MAX."""
        value = neutral(self._array.dtype, access)
        if not self.numbers.size or not self._components:
            return
        host, devices = resident.host_fresh, resident.fresh_devices
        if host:
            self._array[self.numbers] = value
        for device in devices:
            loop, _ = self._loop(f"fill {access.name}", device)
            loop()
        resident.changed_alike(host, devices)

    def modules(self, device: Device, *names: str) -> list[Module]:
        """The modules for some of ``get``, ``WRITE``, ``INC``, ``fill INC`` and so on."""
        if not self.numbers.size or not self._components:
            return []
        return [m for n in names for m in modules_for(self._parloop(n)[0], _SCHEDULE, device)]

    def _loop(self, name: str, device: Device) -> tuple[BoundLoop, Resident | None]:
        key = (name, device.spec)
        if key not in self._loops:
            parloop, packed = self._parloop(name)
            self._loops[key] = BoundLoop(parloop, _SCHEDULE, device), packed
            if name == "get" and packed is not None:
                # all of it will be written there
                packed.changed_alike(False, (device,))
        return self._loops[key]

    def _parloop(self, name: str) -> tuple[Parloop, Resident | None]:
        array, packed = self._array, None
        kind, _, access = name.partition(" ")
        if kind == "fill":
            value = neutral(array.dtype, Access[access])
            kernel = _fill_kernel(array.dtype, self._components, value)
            arguments = [Argument.indirect(array, WRITE, self._table, "array")]
        else:
            gathers = kind == "get"
            packed = Resident(np.zeros((len(self.numbers), *array.shape[1:]), array.dtype))
            kernel = _copy_kernel(array.dtype, self._components, kind)
            arguments = [
                Argument.direct(packed.array, WRITE if gathers else READ, "packed"),
                Argument.indirect(array, READ if gathers else Access[kind], self._table, "array"),
            ]
            if not gathers:
                arguments.reverse()
        iterations = IterationSet(len(self.numbers), name="rows")
        return Parloop(kernel, iterations, arguments), packed


_UFUNCS: dict[Access, np.ufunc] = {INC: np.add, MIN: np.minimum, MAX: np.maximum}


def neutral(dtype: np.dtype[Any], access: Access) -> Any:
    """What changes nothing where it is reduced by INC, MIN or MAX."""
    if access is INC:
        return 0
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    if access is MIN:
        return limits.max if limits else np.inf
    return limits.min if limits else -np.inf


def _copy_kernel(dtype: np.dtype[Any], components: int, what: str) -> LocalKernel:
    """``target[i] = source[i]``, or what MIN and MAX make of both."""
    target, source = (KernelArgument(n, (components,), dtype) for n in ("target", "source"))

    def value(i: Expr) -> Expr:
        taken = Load(source, (i,))
        return Op(what.lower(), Load(target, (i,)), taken) if what in ("MIN", "MAX") else taken

    return LocalKernel.pointwise(f"rows_{what.lower()}_{components}", (target, source), value)


def _fill_kernel(dtype: np.dtype[Any], components: int, value: Any) -> LocalKernel:
    """``target[i] = value``."""
    target = KernelArgument("target", (components,), dtype)
    constant = Scalar(dtype.type(value))
    return LocalKernel.pointwise(f"rows_fill_{components}", (target,), lambda _: constant)

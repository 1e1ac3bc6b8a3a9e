"""Arrays that are not numpy's, as arguments of loops, without copies.

Inside pyop3's ``offloading(...)`` its buffers hold arrays of another library, such as CuPy's. They
are taken by DLPack: what lies in the host's memory becomes an array of numpy there, and for what is
in a device's memory stands an array on the host that nobody looks into.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError

__all__ = ["ForeignArrays", "on_host"]

Array = npt.NDArray[Any]

_HOST = (1, 3, 11)
"""DLPack's numbers of the host's memory, its own and what CUDA or ROCm have pinned."""

_SPECIFICATIONS = {2: "cuda", 10: "hip"}
"""Our names of DLPack's kinds of devices."""


class ForeignArrays:
    """The arrays of one loop.

    Attributes
    ----------
    device
        Specification of the device whose memory they are in; None for the host's.
    keep
        What has to live as long as the loop.
    """

    def __init__(self) -> None:
        self.device: str | None = None
        self.keep: list[Any] = []
        self._taken: dict[int, Array] = {}
        self._streams: list[Any] = []

    def synchronise(self) -> None:
        """Wait until CuPy has done to its arrays what it was told to."""
        if not self._streams:
            return
        cupy: Any = importlib.import_module("cupy")
        for device in dict.fromkeys(self._streams):
            with device:
                cupy.cuda.get_current_stream().synchronize()

    def take(self, array: Any, name: str) -> Array:
        """The array as numpy has it, or what stands for it.

        Parameters
        ----------
        array
            Has ``__dlpack__`` and ``__dlpack_device__``.
        name
            Of the buffer, for messages.

        Raises
        ------
        UnsupportedLoopError
            Where it is in no memory that we can use, or not in that of the other arrays.
        DeviceError
            Where its device is not there, or cannot share the memory.
        """
        found = self._taken.get(id(array))
        if found is None:
            found = self._taken[id(array)] = self._take(array, name)
            self.keep.append(array)
        return found

    def _take(self, array: Any, name: str) -> Array:
        if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
            raise UnsupportedLoopError(f"{name} is a {type(array).__name__}, without DLPack")
        kind, number = (int(n) for n in array.__dlpack_device__())
        if kind in _HOST:
            return np.from_dlpack(array)
        if kind not in _SPECIFICATIONS:
            raise UnsupportedLoopError(f"{name} is on a device of DLPack's kind {kind}")
        device = f"{_SPECIFICATIONS[kind]}:{number}"
        if self.device not in (None, device):
            raise UnsupportedLoopError(f"{name} is on {device}, another array on {self.device}")
        self.device = device
        if type(array).__module__.partition(".")[0] == "cupy":
            self._streams.append(array.device)

        from pyop3_mlir.runtime.devices import get_device
        from pyop3_mlir.runtime.executable import Buffer
        from pyop3_mlir.runtime.residency import adopt

        opened = get_device(device)
        shared = Buffer.from_dlpack(array, opened)
        stand_in, copy = adopt(shared.view.get_buffer(), array.size, shared.dtype, opened)
        self.keep += [shared, copy]
        return stand_in


def on_host(array: Any) -> Array:
    """A copy on the host of an array of another library."""
    if hasattr(array, "get"):
        # CuPy's own way
        copied: Array = array.get()
        return copied
    return np.array(np.from_dlpack(array))

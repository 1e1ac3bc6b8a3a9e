"""PyOP2's Dats and matrices on a device, in memory that PETSc has there.

Where the setting ``device`` is a CUDA or HIP device and PETSc can work there, a Dat's ``Vec`` is of
type cuda or hip, over the Dat's own array. PETSc then knows which of the two copies is fresh,
loops and solvers work on that on the device, and who looks at the Dat's array on the host gets it
up to date. Matrices of type aijcusparse and aijhipsparse get their entries there by COO.

On several processes a Vec lacks the halo that loops read: there, and where PETSc knows nothing of
the device, Dats stay on it without their Vecs (:mod:`~pyop3_mlir.frontends.pyop2_resident`).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.frontends.petsc import nonzero_state
from pyop3_mlir.frontends.petsc_device import (
    CooMatrix,
    CooPlan,
    VecMemory,
    kind_of_matrix,
    kind_of_vector,
    obstacle,
)
from pyop3_mlir.frontends.pyop2_resident import ResidentMemory, reading, store
from pyop3_mlir.kernels.program import KernelArgument, Load, LocalKernel, Op, Scalar
from pyop3_mlir.lowering.schedule import Schedule
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import (
    INC,
    READ,
    RW,
    Access,
    Argument,
    IndexTable,
    IterationSet,
    Parloop,
)
from pyop3_mlir.planning import csr_positions
from pyop3_mlir.runtime.devices import Device

if TYPE_CHECKING:
    from pyop3_mlir.engine import BoundLoop

__all__ = ["DeviceData", "DeviceValues"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]


class DeviceData:
    """The data of loops on a device.

    Parameters
    ----------
    device
        Where PETSc has memory.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kind = device.spec.partition(":")[0]
        # not a WeakSet: PyOP2's objects may compare equal where they are not the same
        self._dats: list[weakref.ref[Any]] = []
        self.reading = False

    @classmethod
    def of(cls, options: Options) -> DeviceData | None:
        """What the settings ask for; None where PETSc cannot work there, which is logged.

        Raises
        ------
        DeviceError
            Where there is no such device.
        """
        kind = options.device.partition(":")[0]
        if kind == "cpu":
            return None
        reason = obstacle(kind)
        if reason is None and options.verify:
            reason = "results are verified on the host"
        if reason is not None:
            log.info("vectors and matrices stay on the host, not on %s: %s", options.device, reason)
            return None
        from pyop3_mlir.parallel import place
        from pyop3_mlir.runtime.devices import get_device

        return cls(get_device(place(options.device)))

    def attach(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Let new Vecs of Dats be on the device, and the Dats' arrays be up to date.

        Parameters
        ----------
        replace
            Called with a class, the name of an attribute in it, and the new value; undone later.
        """
        from pyop2.types.dat import AbstractDat, Dat
        from pyop2.types.data_carrier import EmptyDataMixin
        from pyop2.types.mat import Mat

        devices = self
        on_host = Mat.set_local_diagonal_entries
        make_vec = vars(Dat)["_vec"].func
        found = vars(EmptyDataMixin)["_data"]

        def _vec(dat: Any) -> Any:
            return devices._make_vec(dat) or make_vec(dat)

        def _data(carrier: Any) -> Array:
            array: Array = found.func(carrier)
            vec = carrier.__dict__.get("_vec")
            if vec is not None:
                devices._bring_back(vec)
            return array

        @functools.wraps(on_host)
        def set_local_diagonal_entries(
            mat: Any, rows: Any, diag_val: float = 1.0, idx: int | None = None
        ) -> None:
            values = mat.__dict__.get("_pyop3_mlir_values")
            if values is None or not devices.holds(mat.handle) or not values.current():
                on_host(mat, rows, diag_val, idx)
                return
            components = mat.dims[0][0][0]
            nodes = np.asarray(getattr(rows, "indices", rows)).reshape(-1, 1)
            wanted = np.arange(components) if idx is None or components == 1 else np.array([idx])
            values.set_diagonal((nodes * components + wanted).reshape(-1), diag_val)

        vec_property = functools.cached_property(_vec)
        vec_property.__set_name__(Dat, "_vec")
        replace(Dat, "_vec", vec_property)
        replace(EmptyDataMixin, "_data", property(_data, store))
        replace(Mat, "set_local_diagonal_entries", set_local_diagonal_entries)
        for name in ("data_ro", "data_ro_with_halos"):
            replace(AbstractDat, name, reading(self, vars(AbstractDat)[name]))

    def detach(self) -> None:
        """Bring everything back to the host. The Vecs are what others may hold: they stay."""
        for reference in self._dats:
            dat = reference()
            if dat is not None:
                self._bring_back(dat.__dict__["_vec"])
                # without us nobody would see that PETSc has the latest contents on the device
                dat.__dict__["_vec"].bindToCPU(True)
        self._dats.clear()

    def _make_vec(self, dat: Any) -> Any:
        """A Vec on the device over the Dat's array; None where PyOP2's own is to be made."""
        from petsc4py import PETSc

        if not self._takes(dat):
            return None
        size = dat.dataset.layout_vec.getSizes()
        array = dat._data[: dat.dataset.size].reshape(-1)
        maker = {
            "cuda": "createCUDAWithArrays",
            "hip": "createHIPWithArrays",
            "cpu": "createWithArray",
        }[self._kind]
        vec = getattr(PETSc.Vec(), maker)(array, size=size, bsize=dat.cdim, comm=dat.comm)
        self._dats.append(weakref.ref(dat))
        return vec

    @staticmethod
    def _takes(dat: Any) -> bool:
        """Whether a Vec has all of a Dat: no halo, no rows that are filtered out, numbers alike."""
        if dat.comm.size > 1 or dat.dtype != _scalar():
            return False
        dataset = dat.dataset
        return not dataset._apply_local_global_filter and dataset.size == dataset.total_size

    def _bring_back(self, vec: Any) -> None:
        """Make the host's copy fresh, and the only one that is, but where it is only read."""
        mask = vec.getOffloadMask()
        if mask == _ON_HOST or kind_of_vector(vec) == "cpu":
            return
        if self.reading and mask == _ON_BOTH:
            return
        # acquired and given back: PETSc copies, and notes who has the fresh one
        vec.getArray(readonly=self.reading)

    def to_host(self, loop: Any) -> None:
        """Make everything that a loop uses fresh on the host, where its C code runs."""
        for argument in loop.arguments:
            for data in _parts(argument.data):
                vec = getattr(data, "_parent", data).__dict__.get("_vec")
                if vec is not None and hasattr(vec, "getOffloadMask"):
                    self._bring_back(vec)

    def vector(self, data: Any, number: int | None) -> VecMemory | None:
        """The memory of a Dat on the device; None where it has none there.

        Parameters
        ----------
        data
            PyOP2's carrier of data.
        number
            Of the part of a MixedDat.
        """
        from pyop2.types import Dat

        if number is not None:
            data = data[number]
        dat = getattr(data, "_parent", data)
        if not isinstance(dat, Dat) or not self._takes(dat):
            return None
        vec = dat._vec
        if kind_of_vector(vec) != self._kind:
            return None
        found = dat.__dict__.get("_pyop3_mlir_memory")
        if found is None or found.vec is not vec or found.device is not self.device:
            found = dat.__dict__["_pyop3_mlir_memory"] = VecMemory(vec, self.device)
        memory: VecMemory = found
        return memory

    def matrix(self, holder: Any, access: Access) -> DeviceValues | None:
        """The values of a PyOP2 matrix on the device; None where it has none there.

        Raises
        ------
        UnsupportedLoopError
            Where the loop does not add to it.
        """
        mat = holder.handle
        if not self.holds(mat):
            return None
        if access.name != "INC":
            raise UnsupportedLoopError(f"a matrix on {self.device} with access {access.name}")
        found = holder.__dict__.get("_pyop3_mlir_values")
        if found is None or not found.current():
            found = holder.__dict__["_pyop3_mlir_values"] = DeviceValues(mat, self.device)
        values: DeviceValues = found
        return values

    def holds(self, mat: Any) -> bool:
        """Whether a matrix is to be assembled on the device."""
        return (
            mat.comm.size == 1
            and mat.getType().startswith("seqaij")
            and kind_of_matrix(mat) == self._kind
        )


# PetscOffloadMask
_ON_HOST, _ON_BOTH = 1, 3


def _parts(data: Any) -> Iterator[Any]:
    """A carrier of data, or those that a MixedDat is made of."""
    from pyop2.types import MixedDat

    if isinstance(data, MixedDat):
        yield from data
    else:
        yield data


def _scalar() -> np.dtype[Any]:
    from petsc4py import PETSc

    return np.dtype(PETSc.ScalarType)


class DeviceValues:
    """The entries of a sequential matrix, which loops add up on the device.

    Parameters
    ----------
    mat
        A ``petsc4py.PETSc.Mat`` of type AIJ (for devices) with its pattern, assembled.
    device
        Where loops run.

    Attributes
    ----------
    array, pattern, type, block_size
        As those of :class:`~pyop3_mlir.frontends.petsc.MatrixValues`; ``array`` holds what has not
        been handed over.
    """

    def __init__(self, mat: Any, device: Device) -> None:
        self.mat = mat
        self.type = "seqaij"
        self.block_size = 1
        indptr, indices, held = mat.getValuesCSR()
        self.pattern: tuple[Array, Array] | None = (indptr, indices)
        rows = np.repeat(np.arange(len(indptr) - 1, dtype=indptr.dtype), np.diff(indptr))
        self._coo = CooMatrix(mat, [], device, CooPlan(rows, indices))
        if np.any(held):
            # the new pattern is the old one, entry by entry
            mat.setValuesCOO(held, addv=False)
        self._coo.open()
        self._state = nonzero_state(mat)
        self.array = self._coo.array
        self._diagonals: dict[tuple[float, bytes], tuple[BoundLoop, VecMemory]] = {}

    def current(self) -> bool:
        """Whether the matrix still has the pattern that it was given."""
        return nonzero_state(self.mat) == self._state

    def changed(self) -> None:
        """Hand the entries over and begin anew. The host sees none of them."""
        self._coo.close()
        self._coo.open()

    def set_diagonal(self, rows: Array, value: float) -> None:
        """Give diagonal entries a value, on the device, as boundary conditions do.

        Parameters
        ----------
        rows
            Local numbers of rows; what has none of its own (-1) is left out.
        value
            Of all of them.
        """
        found = self._diagonals.get((value, rows.tobytes()))
        if found is None:
            found = self._plan_diagonal(rows, value)
            self._diagonals[value, rows.tobytes()] = found
        loop, diagonal = found
        self.mat.getDiagonal(diagonal.vec)
        with diagonal.using(READ):
            loop()
        self.changed()

    def _plan_diagonal(self, rows: Array, value: float) -> tuple[BoundLoop, VecMemory]:
        """The loop that adds to a diagonal entry what it lacks, and what the entries are."""
        from pyop3_mlir import engine

        assert self.pattern is not None
        own = self.mat.getLGMap()[0].apply(rows.astype(self.pattern[0].dtype))
        rows = np.unique(own[own >= 0])
        size = self.mat.getLocalSize()[0]
        table = IndexTable(rows.reshape(-1, 1), size)
        entries = csr_positions(*self.pattern, table, table, name="diagonal")
        diagonal = VecMemory(self.mat.createVecLeft(), self._coo.device)
        loop = Parloop(
            _lacking(value),
            IterationSet(len(rows)),
            [
                Argument.matrix(self.array, INC, entries, table),
                Argument.indirect(diagonal.array, READ, table),
            ],
        )
        # one colour, since no two entities share an entry
        schedule = Schedule("in_order" if self._coo.device.is_host else "colour")
        return engine.compile(loop, self._coo.device, schedule), diagonal


def _lacking(value: float) -> LocalKernel:
    """``entry += value - diagonal``."""
    entry, diagonal = (KernelArgument(name, (1,), _scalar()) for name in ("entry", "diagonal"))
    wanted = Scalar(_scalar().type(value))
    return LocalKernel.pointwise(
        "diagonal", (entry, diagonal), lambda i: Op("sub", wanted, Load(diagonal, (i,)))
    )


def acquire(memories: tuple[tuple[VecMemory | ResidentMemory, Access], ...]) -> ExitStack:
    """Let a loop use vectors on the device until the result is closed, each once."""
    stack = ExitStack()
    wanted: dict[int, tuple[VecMemory | ResidentMemory, bool]] = {}
    for memory, access in memories:
        _, writes = wanted.get(id(memory), (memory, False))
        wanted[id(memory)] = memory, writes or access is not READ
    try:
        for memory, writes in wanted.values():
            # a loop need not write all entries, so that WRITE is not enough to ask for
            stack.enter_context(memory.using(RW if writes else READ))
    except BaseException:
        stack.close()
        raise
    return stack

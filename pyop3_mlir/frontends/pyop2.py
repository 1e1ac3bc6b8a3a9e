"""Read PyOP2's parallel loops.

:func:`read_parloop` turns a ``pyop2.parloop.Parloop`` into a :class:`~pyop3_mlir.parloop.Parloop`
on the same memory and changes nothing in it. What that costs is paid once: local kernels, index
tables and positions in matrices are kept with the PyOP2 objects that they were made from.

PyOP2's own meaning of a loop is in ``pyop2/codegen/builder.py``: which packs start at zero, how
maps are permuted, composed and extruded, and which layers a region visits.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.frontends.distributed import Entries, Share, find_entries, halves
from pyop3_mlir.frontends.petsc import BATCH, DistributedValues, MatrixValues, nonzero_state
from pyop3_mlir.frontends.petsc_device import VecMemory
from pyop3_mlir.frontends.pyop2_devices import DeviceData, DeviceValues, acquire
from pyop3_mlir.frontends.pyop2_resident import ResidentData, ResidentMemory
from pyop3_mlir.kernels.loopy import Intent, Part, import_once
from pyop3_mlir.kernels.program import Load, LocalKernel, postorder
from pyop3_mlir.parloop import (
    INC,
    MAX,
    MIN,
    READ,
    RW,
    WRITE,
    Access,
    Argument,
    IndexTable,
    IterationSet,
    Kind,
    Parloop,
)

__all__ = ["Reading", "matrix_of", "plan_for", "read_parloop"]

Array = npt.NDArray[Any]
Values = MatrixValues | DeviceValues
Importer = Callable[[Any, Sequence[Intent]], "LocalKernel | None"]


def read_parloop(loop: Any, importers: Sequence[Importer] = ()) -> Reading:
    """Read a PyOP2 loop.

    Parameters
    ----------
    loop
        A ``pyop2.parloop.Parloop``. It may be read before or while it runs; matrices are read with
        the local to global maps that they have at that moment.
    importers
        Called with the local kernel and its intents, before the loopy importer is; the first that
        does not return None gives the kernel.

    Returns
    -------
    Reading
        The loop, and how PyOP2's parts of the iteration set map to its iterations.

    Raises
    ------
    UnsupportedLoopError
        Where the loop has something that cannot be lowered: the message says what.
    """
    return plan_for(loop, importers).bind(loop)


# ---------------------------------------------------------------------------------------------
# Iteration


@dataclass(frozen=True, eq=False)
class Iteration:
    """The entities that a loop visits, with the layers of an extruded mesh flattened.

    Attributes
    ----------
    iteration_set
        For our loop.
    starts
        First iteration of each column, ``[columns + 1]``, or None where there are no layers.
    columns, level, layers, layer
        For each iteration its column, the layer counted from the bottom, the number of layers of
        the column and the layer's own number; None where there are no layers.
    facets
        2 where an iteration is a horizontal facet and sees the cell below and the one above it.
    """

    iteration_set: IterationSet
    starts: npt.NDArray[np.int64] | None = None
    columns: npt.NDArray[np.int32] | None = None
    level: npt.NDArray[np.int32] | None = None
    layers: npt.NDArray[np.int32] | None = None
    layer: npt.NDArray[np.int32] | None = None
    facets: int = 1
    periodic: bool = False

    def range(self, part: Any) -> tuple[int, int]:
        """Our iterations of a part of PyOP2's iteration set."""
        start, stop = part.offset, part.offset + part.size
        if self.starts is not None:
            return int(self.starts[start]), int(self.starts[stop])
        return start, stop


def _identity_cache(owner: Any) -> dict[Any, Any]:
    """A dictionary that lives as long as ``owner``.

    Not a ``WeakKeyDictionary``: PyOP2's sets compare equal where they are not the same.
    """
    found: dict[Any, Any] | None = owner.__dict__.get("_pyop3_mlir_cache")
    if found is None:
        found = owner.__dict__["_pyop3_mlir_cache"] = {}
    return found


def iteration_of(loop: Any) -> Iteration:
    """What a loop iterates over."""
    kernel, iterset = loop.global_kernel, loop.iterset
    region = kernel._iteration_region if kernel._extruded else None
    cache = _identity_cache(iterset)
    key = ("iteration", None if region is None else str(region))
    if key not in cache:
        cache[key] = _make_iteration(iterset, kernel, region)
    found: Iteration = cache[key]
    return found


def _make_iteration(iterset: Any, kernel: Any, region: Any) -> Iteration:
    indices = np.asarray(iterset.indices, dtype=np.int32) if kernel._subset else None
    name = iterset.name
    if not kernel._extruded:
        return Iteration(
            IterationSet(
                iterset.total_size,
                core=iterset.core_size,
                owned=iterset.size,
                entities=indices,
                name=name,
            )
        )
    from pyop2.types import IterationRegion

    superset = iterset.superset if kernel._subset else iterset
    owned = iterset.size
    columns = indices[:owned] if indices is not None else np.arange(owned, dtype=np.int32)
    bounds = superset.layers_array
    bounds = np.broadcast_to(bounds, (owned, 2)) if kernel._constant_layers else bounds[columns]
    bottom, top = bounds[:, 0].astype(np.int64), bounds[:, 1].astype(np.int64) - 1
    first, last = bottom, top
    if region == IterationRegion.BOTTOM:
        last = bottom + 1
    elif region == IterationRegion.TOP:
        first = top - 1
    elif region == IterationRegion.INTERIOR_FACETS and not kernel._extruded_periodic:
        last = top - 1
    elif region not in (None, IterationRegion.ALL, IterationRegion.INTERIOR_FACETS):
        raise UnsupportedLoopError(f"iteration region {region}")
    counts = np.maximum(last - first, 0)
    starts = np.concatenate([[0], np.cumsum(counts)])
    position = np.repeat(np.arange(owned), counts)
    within = np.arange(starts[-1]) - starts[position]
    level = within + (first - bottom)[position]
    return Iteration(
        IterationSet(
            int(starts[-1]), core=int(starts[iterset.core_size]), owned=int(starts[-1]), name=name
        ),
        starts=starts,
        columns=columns[position].astype(np.int32),
        level=level.astype(np.int32),
        layers=(top - bottom)[position].astype(np.int32),
        layer=(level + bottom[position]).astype(np.int32),
        facets=2 if region == IterationRegion.INTERIOR_FACETS else 1,
        periodic=bool(kernel._extruded_periodic),
    )


# ---------------------------------------------------------------------------------------------
# Maps


def _map_key(map_: Any) -> tuple[Any, ...]:
    """What a map is made of: maps that hold values, by identity, and permutations."""
    from pyop2.types.map import ComposedMap, PermutedMap

    if isinstance(map_, PermutedMap):
        return ("permuted", _map_key(map_.map_), map_.permutation.tobytes())
    if isinstance(map_, ComposedMap):
        return ("composed", *(_map_key(m) for m in map_.maps_))
    return ("map", id(map_), id(map_._values))


def _holders(map_: Any) -> Iterator[Any]:
    """The maps that hold values below ``map_``."""
    from pyop2.types.map import ComposedMap, PermutedMap

    if isinstance(map_, PermutedMap):
        yield from _holders(map_.map_)
    elif isinstance(map_, ComposedMap):
        for m in map_.maps_:
            yield from _holders(m)
    else:
        yield map_


def _map_values(map_: Any) -> tuple[Array, Array | None, Array | None]:
    """Values ``[entities, arity]`` of a map on the base mesh, offsets and quotients by position."""
    from pyop2.types.map import ComposedMap, PermutedMap

    if isinstance(map_, PermutedMap):
        values, offset, quotient = _map_values(map_.map_)
        order = map_.permutation
        return (
            values[:, order],
            None if offset is None else offset[order],
            None if quotient is None else quotient[order],
        )
    if isinstance(map_, ComposedMap):
        first, *others = map_.maps_
        values, offset, quotient = _map_values(first)
        entities: Array | None = None
        for other in reversed(others):
            step = _map_values(other)[0][:, 0]
            entities = step if entities is None else _through(step, entities)
        if entities is not None:
            values = _through(values, entities)
        return values, offset, quotient
    return map_.values_with_halo, map_.offset, map_.offset_quotient


def _through(values: Array, entities: Array) -> Array:
    """``values[entities]``, -1 where an entity is not defined."""
    found = values[np.maximum(entities, 0)]
    found[entities < 0] = -1
    return found


def index_table(map_: Any, iteration: Iteration, bound: int) -> IndexTable:
    """The composed table of a map for an iteration, kept with the map."""
    holders = tuple(_holders(map_))
    cache = _identity_cache(holders[0])
    key = ("table", _map_key(map_), None if iteration.columns is None else id(iteration), bound)
    found = cache.get(key)
    if found is not None:
        others, kept, table = found
        same = all(ref() is m for ref, m in zip(others, holders[1:], strict=True))
        if same and (kept is None or kept is iteration):
            result: IndexTable = table
            return result
    table = _make_table(map_, iteration, bound)
    kept = None if iteration.columns is None else iteration
    cache[key] = (tuple(weakref.ref(m) for m in holders[1:]), kept, table)
    return table


def _make_table(map_: Any, iteration: Iteration, bound: int) -> IndexTable:
    values, offset, quotient = _map_values(map_)
    if iteration.columns is not None:
        values = _extrude(values, offset, quotient, iteration, map_.name)
    negative = bool(values.size and values.min() < 0)
    if negative:
        # any negative number stands for "nowhere"
        values = np.maximum(values, -1)
    return IndexTable(values, bound, allow_negative=negative, name=str(map_.name))


def _extrude(
    values: Array, offset: Array | None, quotient: Array | None, iteration: Iteration, name: str
) -> Array:
    assert iteration.columns is not None
    assert iteration.level is not None
    assert iteration.layers is not None
    base = values[iteration.columns]
    if offset is None:
        if iteration.facets > 1:
            raise UnsupportedLoopError(f"map {name} has no offsets, but the loop is over facets")
        return base
    pieces = []
    for facet in range(iteration.facets):
        step = (iteration.level + facet)[:, None]
        layers = iteration.layers[:, None]
        if iteration.periodic:
            if quotient is None:
                step = _remainder(step, layers)
            else:
                step = _remainder(step + quotient, layers) - _remainder(quotient[None, :], layers)
        moved = base + offset * step
        pieces.append(np.where(base < 0, -1, moved) if base.size and base.min() < 0 else moved)
    return np.ascontiguousarray(np.concatenate(pieces, axis=1), dtype=np.int32)


def _remainder(a: Array, b: Array) -> Array:
    # PyOP2's own: a is below 2 b
    return np.where(a < b, a, a - b)


# ---------------------------------------------------------------------------------------------
# Arguments


@dataclass(frozen=True, eq=False)
class Place:
    """How one of our arguments is made from the data of PyOP2's argument ``number``.

    ``access`` is None where it depends on what the kernel does (RW or WRITE).
    """

    number: int
    kind: Kind
    access: Access | None
    components: int
    table: IndexTable | None = None
    stride: int | None = None
    offset: int = 0
    field: int | None = None  # of a MixedDat, block of a mixed matrix
    name: str = ""
    matrix: _Matrix | None = None
    shared: bool = False  # a Global


@dataclass(frozen=True, eq=False)
class _Matrix:
    """The block of a matrix that an argument addresses: node tables and components."""

    rows: IndexTable
    cols: IndexTable
    dims: tuple[int, int]
    unroll: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """A loop without its data.

    Attributes
    ----------
    kernel
        The local kernel.
    iteration
        What is visited.
    places
        One for each argument of the kernel.
    importer
        "gem" or "loopy".
    bindings, schedules
        For whoever runs it: what was bound to data already, and how it runs.
    """

    name: str
    kernel: LocalKernel
    iteration: Iteration
    places: tuple[Place, ...]
    importer: str
    bindings: dict[Any, Any] = field(default_factory=dict)
    schedules: dict[Any, Any] = field(default_factory=dict)

    def bind(self, loop: Any, devices: DeviceData | ResidentData | None = None) -> Reading:
        """The loop on the data that ``loop`` has now, where ``devices`` has some on a device."""
        arguments: list[Any] = []
        matrices: list[MatrixValues | DeviceValues] = []
        elements: list[Elements] = []
        copies: list[tuple[Any, int]] = []
        globals_: list[tuple[int, Array, bool]] = []
        memories: list[tuple[VecMemory | ResidentMemory, Access]] = []
        largest = max([p.components for p in self.places if p.matrix is not None], default=1)
        batch = max(1, min(self.iteration.iteration_set.size, BATCH // max(largest, 1)))
        for place, formal in zip(self.places, self.kernel.arguments, strict=True):
            data = loop.arguments[place.number].data if place.number >= 0 else None
            if place.shared:
                # globals are small and often made anew: their values are copied at each run
                assert data is not None
                assert place.access is not None
                values: Array = np.array(data._data).reshape(-1)
                globals_.append((place.number, values, place.access is not READ))
                arguments.append(
                    Argument(
                        values,
                        place.access,
                        place.kind,
                        place.table,
                        place.components,
                        name=place.name,
                    )
                )
                continue
            if _is_distributed(place, data):
                # where its entries go depends on all arguments that are matrices
                arguments.append(None)
                continue
            if place.matrix is not None:
                pieces = sum(output.argument is formal for output in self.kernel.outputs)
                argument, handle = _bind_matrix(place, data, self.iteration, batch, pieces, devices)
                (elements if isinstance(handle, Elements) else matrices).append(handle)  # type: ignore[arg-type]
                arguments.append(argument)
                continue
            if data is None:
                assert self.iteration.layer is not None
                buffer: Array = self.iteration.layer
            else:
                memory = None if devices is None else devices.vector(data, place.field)
                if memory is None:
                    buffer = _buffer(data, place.field)
                else:
                    assert place.access is not None
                    memories.append((memory, place.access))
                    buffer = memory.array
            if buffer.dtype.itemsize < 4:
                if place.access is not READ:
                    raise UnsupportedLoopError(f"{place.name}: dtype {buffer.dtype} is written")
                buffer = buffer.astype(np.int32)
                assert data is not None
                copies.append((data, data.dat_version))
            assert place.access is not None
            arguments.append(
                Argument(
                    buffer,
                    place.access,
                    place.kind,
                    place.table,
                    place.components,
                    place.stride,
                    place.offset,
                    place.name,
                )
            )
        iterations = self.iteration.iteration_set
        shares: tuple[Share, ...] = ()
        border = None
        if any(argument is None for argument in arguments):
            core, shares, pairs = _shares_of(self.places, loop, iterations)
            replaced = [p if a is None else None for a, p in zip(arguments, pairs, strict=True)]
            parloop, border = halves(self.kernel, iterations, arguments, replaced, core, self.name)
        else:
            parloop = Parloop(self.kernel, iterations, arguments, self.name)
        return Reading(
            parloop, self, tuple(matrices), tuple(elements), tuple(copies), tuple(globals_),
            shares, border, tuple(memories),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Elements:
    """Element matrices that PETSc adds up: a matrix that is distributed over processes.

    Attributes
    ----------
    mat
        PETSc's matrix.
    matrix
        Node tables and components.
    values
        ``[entities of a batch, rows, columns]``.
    access
        INC or WRITE.
    summed
        Whether the loop adds to ``values``, else it sets them.
    """

    mat: Any
    matrix: _Matrix
    values: Array
    access: Access
    summed: bool = False

    def clear(self, start: int, stop: int) -> None:
        """Make the element matrices of iterations ``[start, stop)`` ready to be computed."""
        if self.summed:
            row = start % len(self.values)
            self.values[row : row + stop - start] = 0

    def flush(self, start: int, stop: int, entities: Array | None) -> None:
        """Hand the element matrices of iterations ``[start, stop)`` over."""
        from petsc4py import PETSc

        at: Any = slice(start, stop) if entities is None else entities[start:stop]
        mode = PETSc.InsertMode.ADD_VALUES if self.access is INC else PETSc.InsertMode.INSERT_VALUES
        rows, cols = self.matrix.rows.values[at], self.matrix.cols.values[at]
        dims = self.matrix.dims
        shape = (stop - start, rows.shape[1] * dims[0], cols.shape[1] * dims[1])
        row = start % len(self.values)
        values = self.values[row : row + stop - start].reshape(shape)
        # as PyOP2's code does it
        if self.matrix.unroll:
            rows, cols = (_dofs(t, d) for t, d in zip((rows, cols), dims, strict=True))
            self.mat.setValuesLocalRCV(rows, cols, values, addv=mode)
        else:
            self.mat.setValuesBlockedLocalRCV(rows, cols, values, addv=mode)


@dataclass(frozen=True, eq=False)
class Reading:
    """A PyOP2 loop in our terms.

    Attributes
    ----------
    parloop
        The loop, on PyOP2's memory; where matrices are distributed, its core alone.
    plan
        What it was made from.
    matrices
        Matrices that it changes in place.
    elements
        Matrices that get element matrices from it, batch by batch.
    copies
        Data that was converted (small integers), and its version at that moment.
    globals
        Number of PyOP2's argument, our own array for it, and whether the loop changes it.
    shares
        Distributed matrices; :meth:`finish` hands over what has been computed of them.
    border
        Where there are some, the loop over the entities that are not in ``parloop``.
    memories
        Vectors on a device, and what the loop does to them.
    """

    parloop: Parloop
    plan: Plan
    matrices: tuple[MatrixValues | DeviceValues, ...] = ()
    elements: tuple[Elements, ...] = ()
    copies: tuple[tuple[Any, int], ...] = ()
    globals: tuple[tuple[int, Array, bool], ...] = ()
    shares: tuple[Share, ...] = ()
    border: Parloop | None = None
    memories: tuple[tuple[VecMemory | ResidentMemory, Access], ...] = ()

    def current(self) -> bool:
        """Whether memory and copies are still what they were."""
        memory: list[Any] = [*self.matrices, *(share.values for share in self.shares)]
        memory += [held for held, _ in self.memories]
        return all(m.current() for m in memory) and all(
            data.dat_version == version for data, version in self.copies
        )

    def range(self, part: Any) -> tuple[int, int]:
        """Our iterations of a part of PyOP2's iteration set."""
        return self.plan.iteration.range(part)

    def run(self, call: Callable[[int, int], None], start: int, stop: int, loop: Any) -> None:
        """Run iterations ``[start, stop)`` by ``call(start, stop)``, for the data of ``loop``."""
        with acquire(self.memories):
            self._run(call, start, stop, loop)

    def _run(self, call: Callable[[int, int], None], start: int, stop: int, loop: Any) -> None:
        for number, buffer, _ in self.globals:
            buffer[...] = loop.arguments[number].data._data.reshape(-1)
        for share in self.shares:
            share.open()
        if not self.elements:
            call(start, stop)
        else:
            batch = len(self.elements[0].values)
            first = start
            while first < stop:
                last = min(first - first % batch + batch, stop)
                for elements in self.elements:
                    elements.clear(first, last)
                call(first, last)
                for elements in self.elements:
                    elements.flush(first, last, self.parloop.iteration_set.entities)
                first = last
        for number, buffer, written in self.globals:
            if written:
                data = loop.arguments[number].data._data
                data[...] = buffer.reshape(data.shape)
        for matrix in self.matrices:
            matrix.changed()

    def finish(self, error: Exception | None = None) -> None:
        """Hand over what several runs have gathered, after the last of them.

        Collective where there are ``shares``: all processes raise where one of them has an error.
        """
        for share in self.shares:
            share.close(error)


def _buffer(data: Any, number: int | None) -> Array:
    """The whole array behind a carrier of data, flat."""
    if number is not None:
        data = data[number]
    parent = getattr(data, "_parent", None)
    array: Array = data._data if parent is None else parent._data
    if not array.flags.c_contiguous:
        raise UnsupportedLoopError(f"{data.name}: its array is not contiguous")
    return array.reshape(-1)


def plan_for(loop: Any, importers: Sequence[Importer] = ()) -> Plan:
    """Everything about a loop but its data; kept with the iteration set."""
    iteration = iteration_of(loop)
    key = _plan_key(loop, iteration)
    cache = _identity_cache(loop.iterset).setdefault("plans", {})
    found = cache.get(key)
    holders = [h for a in loop.arguments for m in a.maps for h in _all_holders(m)]
    if found is not None:
        references, plan = found
        if all(ref() is h for ref, h in zip(references, holders, strict=True)):
            if isinstance(plan, UnsupportedLoopError):
                raise plan
            result: Plan = plan
            return result
    references = tuple(weakref.ref(h) for h in holders)
    try:
        plan = _make_plan(loop, iteration, importers)
    except UnsupportedLoopError as error:
        cache[key] = (references, error.with_traceback(None))
        raise
    cache[key] = (references, plan)
    return plan


def _all_holders(map_: Any) -> Iterator[Any]:
    for part in map_.split if map_ is not None else ():
        if part is not None:
            yield from _holders(part)


def _plan_key(loop: Any, iteration: Iteration) -> Any:
    maps = tuple(
        tuple(None if m is None else _map_key(m) for part in a.maps for m in part.split)
        for a in loop.arguments
    )
    sizes = tuple(_rows_of(a.data) for a in loop.arguments)
    return (loop.global_kernel.cache_key, maps, sizes, id(iteration))


def _rows_of(data: Any) -> Any:
    """Number of rows of the data, which bounds the tables."""
    from pyop2.types import Dat, DatView, MixedDat

    if isinstance(data, MixedDat):
        return tuple(_rows_of(d) for d in data)
    if isinstance(data, Dat | DatView):
        return data.dataset.total_size
    return None


def _make_plan(loop: Any, iteration: Iteration, importers: Sequence[Importer]) -> Plan:
    from pyop2.local_kernel import LoopyLocalKernel
    from pyop2.parloop import PassthroughParloopArg

    kernel = loop.local_kernel
    for number, argument in enumerate(loop.arguments):
        if isinstance(argument, PassthroughParloopArg):
            raise UnsupportedLoopError(f"argument {number} is passed through, a pointer for C code")
    if not isinstance(kernel, LoopyLocalKernel):
        raise UnsupportedLoopError(f"kernel {kernel.name} is a string of C code")
    intents: list[Intent] = []
    groups: list[list[Place]] = []
    splits: dict[int, tuple[tuple[int, ...], list[Part]]] = {}
    for number, (local, global_, actual) in enumerate(loop.zipped_arguments):
        intent, places, split = _read_argument(
            number, local, global_, actual, iteration, kernel.requires_zeroed_output_arguments
        )
        intents.append(intent)
        groups.append(places)
        if split is not None:
            splits[number] = split
    extra: list[Place] = []
    if loop.global_kernel._pass_layer_arg:
        extra.append(Place(-1, Kind.DIRECT, READ, 1, name="layer"))
    imported, importer = _import(kernel, intents, splits, importers)
    places = [place for group in groups for place in group] + extra
    if len(imported.arguments) != len(places):
        raise UnsupportedLoopError(
            f"kernel {kernel.name} takes {len(imported.arguments)} arguments, the loop has "
            f"{len(places)}"
        )
    loaded = {
        node.source
        for statement in imported.statements
        for node in postorder(statement.bodies)
        if isinstance(node, Load)
    }
    resolved = tuple(
        _resolve(place, formal in loaded)
        for place, formal in zip(places, imported.arguments, strict=True)
    )
    return Plan(kernel.name, imported, iteration, resolved, importer)


def _resolve(place: Place, loaded: bool) -> Place:
    if place.access is not None:
        return place
    return replace(place, access=RW if loaded else WRITE)


def _import(
    kernel: Any,
    intents: Sequence[Intent],
    splits: dict[int, tuple[tuple[int, ...], list[Part]]],
    importers: Sequence[Importer],
) -> tuple[LocalKernel, str]:
    if not splits:
        for importer in importers:
            found = importer(kernel, intents)
            if found is not None:
                return found, "gem"
    return import_once(kernel.cache_key, kernel.code, kernel.name, intents, splits), "loopy"


Split = tuple[tuple[int, ...], list[Part]]


def _read_argument(
    number: int, local: Any, global_: Any, actual: Any, iteration: Iteration, zeroed: bool
) -> tuple[Intent, list[Place], Split | None]:
    from pyop2.global_kernel import (
        DatKernelArg,
        GlobalKernelArg,
        MatKernelArg,
        MixedDatKernelArg,
        MixedMatKernelArg,
    )

    access = Access[local.access.name]
    intent = {
        READ: Intent.READ,
        INC: Intent.INC,
        WRITE: Intent.WRITE,
        RW: Intent.UPDATE,
        MIN: Intent.WRITE if zeroed else Intent.UPDATE,
        MAX: Intent.WRITE if zeroed else Intent.UPDATE,
    }[access]
    match global_:
        case GlobalKernelArg():
            place = _read_global(number, global_, access, iteration, actual.data.name)
            return intent, [place], None
        case DatKernelArg():
            place = _read_dat(number, global_, actual.data, actual.map_, access, iteration)
            return (Intent.UPDATE if place.access is None else intent), [place], None
        case MixedDatKernelArg():
            if global_.is_direct:
                raise UnsupportedLoopError("a MixedDat without a map")
            places, parts, total = [], [], 0
            for i, (one, dat, map_) in enumerate(
                zip(global_, actual.data, actual.map_.split, strict=True)
            ):
                place = _read_dat(number, one, dat, map_, access, iteration, i)
                if place.table is None:
                    raise UnsupportedLoopError("a MixedDat of which a part has no map")
                size = place.table.arity * place.components
                places.append(place)
                parts.append(Part((total,), (size,)))
                total += size
            return intent, places, ((total,), parts)
        case MatKernelArg():
            place = _read_matrix(number, global_, actual.data, actual.maps, access, iteration)
            return intent, [place], None
        case MixedMatKernelArg():
            return intent, *_read_mixed_matrix(number, global_, actual, access, iteration)
    raise UnsupportedLoopError(f"argument {number} is a {type(global_).__name__}")


def _read_global(
    number: int, global_: Any, access: Access, iteration: Iteration, name: str
) -> Place:
    components = math.prod(global_.dim)
    if not global_.double and access is not WRITE:
        return Place(number, Kind.GLOBAL, access, components, name=name, shared=True)
    # packed twice, for either side of a facet; or written, so that the last entity's value stays
    sides = 2 if global_.double else 1
    values = np.zeros((iteration.iteration_set.extent, sides), dtype=np.int32)
    table = IndexTable(values, 1)
    return Place(number, Kind.INDIRECT, access, components, table, name=name, shared=True)


def _read_dat(
    number: int,
    global_: Any,
    dat: Any,
    map_: Any,
    access: Access,
    iteration: Iteration,
    field_: int | None = None,
) -> Place:
    dim = tuple(global_.dim) or (1,)
    stride = math.prod(dim)
    components, offset = stride, 0
    if global_.index is not None:
        offset = int(np.ravel_multi_index(tuple(global_.index), dim))
        components = 1
    rows = dat.dataset.total_size
    table = None
    if map_ is not None:
        table = index_table(map_, iteration, rows)
    else:
        # PyOP2 hands the kernel a pointer to the row itself
        if access is not READ:
            access = None  # type: ignore[assignment]
        if iteration.columns is not None:
            table = _column_table(iteration, rows)
    return Place(
        number,
        Kind.DIRECT if table is None else Kind.INDIRECT,
        access,
        components,
        table,
        stride,
        offset,
        field_,
        str(dat.name),
    )


def _column_table(iteration: Iteration, rows: int) -> IndexTable:
    assert iteration.columns is not None
    cache = _identity_cache(iteration)
    if rows not in cache:
        cache[rows] = IndexTable(iteration.columns[:, None], rows, name="columns")
    found: IndexTable = cache[rows]
    return found


# ---------------------------------------------------------------------------------------------
# Matrices


def _read_matrix(
    number: int,
    global_: Any,
    mat: Any,
    maps: Any,
    access: Access,
    iteration: Iteration,
    block: int | None = None,
) -> Place:
    if access not in (INC, WRITE):
        raise UnsupportedLoopError(f"a matrix with access {access.name}")
    ((dims,),) = global_.dims
    tables = [
        index_table(map_, iteration, dset.total_size)
        for map_, dset in zip(maps, mat.sparsity.dsets, strict=True)
    ]
    rows, cols = tables
    size = rows.arity * dims[0] * cols.arity * dims[1]
    matrix = _Matrix(rows, cols, (int(dims[0]), int(dims[1])), bool(global_.unroll))
    return Place(
        number,
        Kind.INDIRECT,
        access,
        size,
        field=block,
        name=str(getattr(mat, "_name", "block")),
        matrix=matrix,
    )


def _read_mixed_matrix(
    number: int, global_: Any, actual: Any, access: Access, iteration: Iteration
) -> tuple[list[Place], Split]:
    count_rows, count_cols = global_.shape
    row_maps, col_maps = (m.split for m in actual.maps)
    places: list[Place] = []
    for k, one in enumerate(global_):
        i, j = divmod(k, count_cols)
        block = actual.data[i, j]
        maps = (row_maps[i], col_maps[j])
        places.append(_read_matrix(number, one, block, maps, access, iteration, k))
    heights = [_size(places[i * count_cols], 0) for i in range(count_rows)]
    widths = [_size(places[j], 1) for j in range(count_cols)]
    row_starts = np.concatenate([[0], np.cumsum(heights)])
    col_starts = np.concatenate([[0], np.cumsum(widths)])
    parts = [
        Part((int(row_starts[i]), int(col_starts[j])), (heights[i], widths[j]))
        for i in range(count_rows)
        for j in range(count_cols)
    ]
    return places, ((sum(heights), sum(widths)), parts)


def _size(place: Place, axis: int) -> int:
    assert place.matrix is not None
    table = (place.matrix.rows, place.matrix.cols)[axis]
    return table.arity * place.matrix.dims[axis]


def _bind_matrix(
    place: Place,
    mat: Any,
    iteration: Iteration,
    batch: int,
    pieces: int,
    devices: DeviceData | ResidentData | None = None,
) -> tuple[Argument, MatrixValues | DeviceValues | Elements]:
    assert place.matrix is not None
    assert place.access is not None
    block, holder = matrix_of(place, mat)
    handle = block.handle
    if handle.getType() in ("python", "is"):
        raise UnsupportedLoopError(f"a matrix of type {handle.getType()}")
    held = None if devices is None else devices.matrix(holder, place.access)
    if held is None and holder.handle.getType() not in ("seqaij", "seqbaij", "seqdense"):
        return _bind_elements(place, handle, iteration, batch, pieces)
    values = held or matrix_values(holder)
    table = _positions(place.matrix, block, holder, values)
    argument = Argument.matrix(
        values.array, place.access, table, place.matrix.rows, name=str(place.name)
    )
    return argument, values


def matrix_of(place: Place, mat: Any) -> tuple[Any, Any]:
    """The block of a PyOP2 matrix that an argument addresses, and the matrix that holds it."""
    block = mat
    if place.field is not None:
        columns = mat.sparsity.shape[1]
        block = mat[place.field // columns, place.field % columns]
    return block, getattr(block, "_parent", block)


def _bind_elements(
    place: Place, handle: Any, iteration: Iteration, batch: int, pieces: int
) -> tuple[Argument, Elements]:
    assert place.matrix is not None
    assert place.access is not None
    extent = iteration.iteration_set.extent
    values = np.zeros((batch, place.components))
    # entity n writes row (its iteration modulo batch)
    at = np.arange(iteration.iteration_set.size, dtype=np.int32) % batch
    rows = np.zeros((extent, 1), dtype=np.int32)
    entities = iteration.iteration_set.entities
    rows[slice(len(at)) if entities is None else entities, 0] = at
    table = IndexTable(rows, batch, name="element matrices")
    # where the kernel gives several values for an entry they have to be added up
    access = WRITE if pieces == 1 else INC
    argument = Argument(
        values.reshape(-1), access, Kind.INDIRECT, table, place.components, name=place.name
    )
    return argument, Elements(handle, place.matrix, values, place.access, access is INC)


def _is_distributed(place: Place, mat: Any) -> bool:
    """Whether an argument is a matrix of which a process has only some rows."""
    if place.matrix is None:
        return False
    block, holder = matrix_of(place, mat)
    return bool(block.handle.getType() != "is" and holder.handle.getType() == "mpiaij")


Pair = tuple[Argument, Argument]


def _shares_of(
    places: Sequence[Place], loop: Any, visited: IterationSet
) -> tuple[int, tuple[Share, ...], list[Pair | None]]:
    """Distributed matrices of a loop.

    Returns
    -------
    core : int
        How many iterations add to PETSc's memory in place.
    shares : tuple
        One for each matrix.
    arguments : list
        For each place that is one the arguments over the core, and over the other entities.
    """
    for core in (visited.core or 0, 0):
        shares: dict[int, Share] = {}
        numbers: list[tuple[Place, Share, int] | None] = []
        for place in places:
            data = loop.arguments[place.number].data if place.number >= 0 else None
            if not _is_distributed(place, data):
                numbers.append(None)
                continue
            assert place.matrix is not None
            assert place.access is not None
            block, holder = matrix_of(place, data)
            share = shares.get(id(holder))
            if share is None:
                share = shares[id(holder)] = _share_of(holder)
            entries = _entries(place.matrix, block, holder, share.values, visited, core, share.size)
            if entries is None:
                break
            numbers.append((place, share, share.add(entries, place.access)))
        else:
            pairs = [
                None
                if found is None
                else found[1].arguments(found[2], found[0].matrix.rows, found[0].name)  # type: ignore[union-attr]
                for found in numbers
            ]
            return core, tuple(shares.values()), pairs
    raise AssertionError("nothing is in place")


def _share_of(holder: Any) -> Share:
    from pyop2.mpi import internal_comm

    values: DistributedValues = _kept(holder, DistributedValues)
    return Share(values, internal_comm(holder.comm, values))


def _kept(holder: Any, kind: Any) -> Any:
    """What ``kind`` makes of a matrix, kept with it; made again where its values have moved."""
    cache = _identity_cache(holder)
    state = nonzero_state(holder.handle)
    found = cache.get(kind.__name__)
    if found is None or found[0] != state or not found[1].current():
        found = cache[kind.__name__] = (state, kind(holder.handle))
    return found[1]


def _entries(
    matrix: _Matrix,
    block: Any,
    holder: Any,
    values: DistributedValues,
    visited: IterationSet,
    core: int,
    base: int,
) -> Entries | None:
    """Where entries of element matrices go, kept with the sparsity."""
    lgmaps = block.handle.getLGMap()
    cache = _identity_cache(holder.sparsity).setdefault("positions", {})
    pattern = values.__dict__.get("_key")
    if pattern is None:
        digest = hashlib.blake2b(digest_size=16)
        for array in (values.indptr, values.indices, values.others):
            digest.update(np.ascontiguousarray(array).tobytes())
        pattern = values.__dict__["_key"] = digest.hexdigest()
    key = (
        id(matrix.rows), id(matrix.cols), matrix.dims, id(visited), pattern, core, base,
        *(_lgmap_key(lgmap) for lgmap in lgmaps),
    )  # fmt: skip
    if key not in cache:
        sides = [
            _dofs(*_through_lgmap(table, lgmap, dim, block is not holder)).astype(np.int64)
            for table, lgmap, dim in zip(
                (matrix.rows, matrix.cols), lgmaps, matrix.dims, strict=True
            )
        ]
        # entities that this process does not visit may know columns that its pattern does not
        unseen = np.ones(len(sides[0]), dtype=bool)
        unseen[: visited.owned] = visited.entities is not None
        if visited.entities is not None:
            unseen[visited.entities[: visited.owned]] = False
        rows, columns = (np.where(unseen[:, None], -1, side) for side in sides)
        name = str(getattr(holder, "_name", "matrix"))
        made = find_entries(values, rows, columns, visited, core, base, name)
        # what is known by its number has to stay alive
        cache[key] = (matrix, visited, made)
    found: Entries | None = cache[key][2]
    return found


def matrix_values(mat: Any) -> MatrixValues:
    """The values of a PyOP2 matrix in place; made again where they have moved."""
    values: MatrixValues = _kept(mat, MatrixValues)
    return values


def _positions(matrix: _Matrix, block: Any, holder: Any, values: Values) -> IndexTable:
    """Where the entries of element matrices lie among the values, kept with the sparsity."""
    lgmaps = block.handle.getLGMap()
    cache = _identity_cache(holder.sparsity).setdefault("positions", {})
    key = (
        id(matrix.rows),
        id(matrix.cols),
        matrix.dims,
        values.type,
        _pattern_key(values),
        *(_lgmap_key(lgmap) for lgmap in lgmaps),
    )
    found = cache.get(key)
    if found is None:
        table = _find_positions(matrix, block, holder, values, lgmaps)
        # the tables stay alive with it, so that their numbers are not used again
        found = cache[key] = (matrix, table)
    result: IndexTable = found[1]
    return result


def _pattern_key(values: Values) -> Any:
    if values.pattern is None:
        return values.array.size
    found = values.__dict__.get("_key")
    if found is None:
        digest = hashlib.blake2b(digest_size=16)
        for array in values.pattern:
            digest.update(np.ascontiguousarray(array).tobytes())
        found = values.__dict__["_key"] = digest.hexdigest()
    return found


def _lgmap_key(lgmap: Any) -> str:
    return hashlib.blake2b(lgmap.block_indices.tobytes(), digest_size=16).hexdigest()


def _find_positions(
    matrix: _Matrix, block: Any, holder: Any, values: Values, lgmaps: Sequence[Any]
) -> IndexTable:
    from pyop3_mlir.planning import csr_positions

    blocked = values.type == "seqbaij"
    sides, dropped = [], []
    for table, lgmap, dim, dset in zip(
        (matrix.rows, matrix.cols), lgmaps, matrix.dims, block.sparsity.dsets, strict=True
    ):
        if blocked and lgmap.getBlockSize() != dim:
            # boundary conditions on single components, but the matrix stores blocks
            sides.append(_through_lgmap(table, dset.lgmap, dim, False))
            dropped.append(_through(lgmap.indices, _dofs(table.values, dim)) < 0)
        else:
            sides.append(_through_lgmap(table, lgmap, dim, block is not holder))
    (rows, row_dim), (cols, col_dim) = sides
    height, width = holder.handle.getLocalSize()
    name = str(getattr(holder, "_name", "matrix"))
    if values.pattern is None:
        return _dense_positions(_dofs(rows, row_dim), _dofs(cols, col_dim), height, width, name)
    row_table = IndexTable(rows, height // row_dim, allow_negative=True, name=name)
    col_table = IndexTable(cols, width // col_dim, allow_negative=True, name=name)
    found = csr_positions(
        *values.pattern,
        row_table,
        col_table,
        row_components=row_dim,
        col_components=col_dim,
        storage="baij" if blocked else "aij",
        name=name,
    )
    if dropped:
        positions = found.values.reshape(len(rows), rows.shape[1] * row_dim, -1).copy()
        positions[dropped[0][:, :, None] | dropped[1][:, None, :]] = -1
        shape = found.values.shape
        found = IndexTable(positions.reshape(shape), found.bound, True, name, found.group)
    return found


def _through_lgmap(table: IndexTable, lgmap: Any, dim: int, part: bool) -> tuple[Array, int]:
    """Rows of the matrix that an entity touches, -1 where dropped, and components of each."""
    if part:
        # of the maps of a part of a matrix PETSc takes the blocks for scalars, whatever their size
        return np.maximum(_through(lgmap.block_indices, _dofs(table.values, dim)), -1), 1
    if lgmap.getBlockSize() == dim:
        return np.maximum(_through(lgmap.block_indices, table.values), -1), dim
    return np.maximum(_through(lgmap.indices, _dofs(table.values, dim)), -1), 1


def _dofs(nodes: Array, dim: int) -> Array:
    """Scalar rows ``[entities, arity * dim]`` of nodes; -1 where a node is."""
    if dim == 1:
        return nodes
    dofs = np.where(nodes[..., None] < 0, -1, nodes[..., None] * dim + np.arange(dim))
    return dofs.reshape(len(nodes), -1).astype(nodes.dtype)


def _dense_positions(rows: Array, cols: Array, height: int, width: int, name: str) -> IndexTable:
    positions = rows[:, :, None].astype(np.int64) + height * cols[:, None, :].astype(np.int64)
    positions[(rows < 0)[:, :, None] | (cols < 0)[:, None, :]] = -1
    if height * width <= np.iinfo(np.int32).max:
        positions = positions.astype(np.int32)
    return IndexTable(
        positions.reshape(len(rows), -1), height * width, allow_negative=True, name=name
    )

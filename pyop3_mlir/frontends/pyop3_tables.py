"""Where the entries of an argument lie in its buffer: the simplest rule that says so.

Reading a loop of pyop3 gives an offset for each entry in each iteration. Most of these have a
simpler form, which the engine runs faster: the same in each iteration (global), affine (direct), or
rows of neighbouring entries (a table of rows).
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.parloop import RW, WRITE, Access, IndexTable, Kind

__all__ = ["Matrix", "Place", "place", "shared_table"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Matrix:
    """What an element matrix goes to.

    Attributes
    ----------
    rows, cols
        ``[n, k]`` and ``[n, l]``, local numbers; negative: dropped.
    slots
        Slot of the argument for each entry, by rows.
    """

    rows: Array
    cols: Array
    slots: Array


@dataclass(frozen=True, eq=False)
class Place:
    """How an argument of the loop is made from a buffer; see :class:`~pyop3_mlir.Argument`.

    Attributes
    ----------
    view
        pyop3's ``IndexedBuffer``.
    """

    view: Any
    access: Access
    kind: Kind
    components: int
    table: IndexTable | None = None
    stride: int | None = None
    offset: int = 0
    matrix: Matrix | None = None


_tables: weakref.WeakValueDictionary[Any, IndexTable] = weakref.WeakValueDictionary()


def shared_table(values: Array, bound: int, name: str) -> IndexTable:
    """The table with these contents: equal ones are one object, so that plans are shared."""
    if values.size and int(values.max()) <= np.iinfo(np.int32).max:
        values = values.astype(np.int32)
    values = np.ascontiguousarray(values)
    digest = hashlib.blake2b(values.tobytes(), digest_size=16)
    key = (digest.digest(), values.shape, values.dtype.str)
    found = _tables.get((*key, bound))
    if found is None:
        other = _tables.get(key)
        if other is not None:
            values = other.values
        negative = bool(values.size and values.min() < 0)
        if negative and other is None:
            values = np.maximum(values, -1)
        found = IndexTable(values, bound, allow_negative=negative, name=name)
        _tables[(*key, bound)] = found
        _tables.setdefault(key, found)
    return found


def place(view: Any, offsets: Array, n: int, access: Access, size: int) -> Place:
    """The simplest rule that gives ``offsets``.

    Parameters
    ----------
    view
        The buffer.
    offsets
        ``[n, entries]``, or ``[1, entries]`` where they are the same in each iteration.
    n
        Iterations.
    access
        The access.
    size
        Scalars that the buffer holds.
    """
    name = str(view.buffer.name)
    entries = offsets.shape[1]
    first = offsets[0]
    contiguous = bool(entries) and bool(first[0] >= 0)
    contiguous = contiguous and bool((first == first[0] + np.arange(entries)).all())
    if len(offsets) == 1 and n != 1:
        if contiguous and access not in (WRITE, RW):
            return Place(view, access, Kind.GLOBAL, entries, offset=int(first[0]))
        offsets = np.broadcast_to(offsets, (n, entries))
    if contiguous and n > 1:
        stride = int(offsets[1, 0] - first[0])
        if stride >= entries and first[0] < stride and _is_direct(offsets, stride):
            return Place(view, access, Kind.DIRECT, entries, None, stride, int(first[0]))
    components, stride, offset = _rows(offsets)
    rows = offsets[:, ::components]
    rows = np.where(rows < 0, -1, (rows - offset) // stride)
    bound = max((size - offset - components) // stride + 1, 0)
    table = shared_table(rows, bound, name)
    return Place(view, access, Kind.INDIRECT, components, table, stride, offset)


def _is_direct(offsets: Array, stride: int) -> bool:
    n, entries = offsets.shape
    if int(offsets[-1, 0] - offsets[0, 0]) != (n - 1) * stride:
        return False
    expected = offsets[0, 0] + np.arange(n)[:, None] * stride + np.arange(entries)
    return bool((offsets == expected).all())


def _rows(offsets: Array) -> tuple[int, int, int]:
    """Components, stride and offset with which ``offsets`` are rows of the buffer.

    So that two entries are the same scalar only where their rows are the same.
    """
    n, entries = offsets.shape
    if not n or not entries:
        return 1, 1, 0
    components = _run(offsets)
    firsts = offsets[:, ::components]
    present = firsts[firsts >= 0]
    if not present.size:
        return 1, 1, 0
    stride = int(np.gcd.reduce(present.reshape(-1) - present.reshape(-1)[0]))
    if stride == 0:
        # one row only
        stride = max(components, int(present.reshape(-1)[0]) + 1)
    while stride < components or (int(present.reshape(-1)[0]) % stride) + components > stride:
        # rows would overlap: smaller ones
        components = _next_divisor(components)
        if components == 1:
            firsts = offsets[offsets >= 0]
            stride = max(int(np.gcd.reduce(firsts - firsts[0])), 1)
            return 1, stride, int(firsts[0]) % stride
    return components, stride, int(present.reshape(-1)[0]) % stride


def _next_divisor(number: int) -> int:
    for candidate in range(number - 1, 0, -1):
        if number % candidate == 0:
            return candidate
    return 1


def _run(offsets: Array) -> int:
    """The largest number of neighbouring scalars that all entries can be grouped into."""
    entries = offsets.shape[1]
    step = np.diff(offsets, axis=1)
    both_absent = (offsets[:, 1:] < 0) & (offsets[:, :-1] < 0)
    joined = ((step == 1) & (offsets[:, :-1] >= 0)) | both_absent
    everywhere = joined.all(axis=0)
    for length in range(entries, 1, -1):
        if entries % length == 0:
            inside = np.arange(entries - 1) % length != length - 1
            if everywhere[inside].all():
                return length
    return 1

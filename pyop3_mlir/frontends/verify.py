"""The setting ``verify``: a loop runs on both engines, and their results are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import VerificationError
from pyop3_mlir.parloop import INC, WRITE, Argument, IndexTable, IterationSet, Kind, Parloop

if TYPE_CHECKING:
    from pyop3_mlir.frontends.pyop2 import Reading
    from pyop3_mlir.options import Options

__all__ = ["Trial", "compare", "compare_argument"]

Array = npt.NDArray[Any]

_SAMPLE = 256
"""Iterations, at most, whose contributions are looked at one by one."""

_UNITS = 64
"""Units in the last place of larger changes of the input, to tell rounding from branches."""

_FAINT = 1e-5
"""What part of a result no branch is likely to change."""


def compare(
    where: str,
    found: Array,
    expected: Array,
    others: Array,
    entry: Callable[[int], str] = str,
    original: str = "PyOP2",
) -> None:
    """Raise :class:`VerificationError` unless two results agree to rounding.

    The largest difference may be 1e-12 (single precision: 1e-5) of the largest value in
    ``expected`` and ``others``.

    Parameters
    ----------
    where
        What is compared, for the message.
    found, expected
        Results of this engine and of the original one.
    others
        Numbers of the size of what was added up.
    entry
        How the message calls the entry at a position.
    original
        The other engine, for the message.
    """
    if not found.size:
        return
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    difference = np.where(same, 0, np.abs(found - expected))
    if found.dtype.kind in "iu":
        tolerance, scale = 0.0, 1.0
    else:
        tolerance = _tolerance(found.dtype)
        scale = max(largest(expected), largest(others))
    worst = float(np.nanmax(difference)) if difference.size else 0.0
    if np.isnan(difference).any() or worst > tolerance * scale:
        at = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
        raise VerificationError(
            f"{where}: entry {entry(at)} is {found[at]!r}, {original} has {expected[at]!r}; "
            f"the difference {worst:.3g} is more than {tolerance:g} of {scale:.3g}"
        )


def _tolerance(dtype: np.dtype[Any]) -> float:
    return 1e-12 if np.finfo(dtype).precision > 10 else 1e-5


def compare_argument(
    where: str,
    loop: Parloop,
    number: int,
    found: Array,
    expected: Array,
    before: Array,
    options: Options,
    limits: tuple[int, ...] = (),
    original: str = "PyOP2",
) -> None:
    """As :func:`compare`, for what a loop made of an argument.

    Parameters
    ----------
    where
        The loop, for the message.
    loop, number
        The loop, and which of its arguments.
    found, expected
        Results of this engine and of the original one.
    before
        What was there.
    options
        Settings to run by.
    limits
        First and last iteration, where not all were run.
    original
        The other engine, for the message.
    """
    argument = loop.arguments[number]
    where = f"{where}, argument {argument.name}"
    try:
        compare(where, found, expected, before, original=original)
    except VerificationError:
        if argument.access not in (INC, WRITE):
            raise
        size = magnitude(loop, number, options, *limits)
        compare(where, found, expected, np.array([size]), original=original)


def magnitude(
    loop: Parloop, number: int, options: Options, start: int = 0, stop: int | None = None
) -> float:
    """How large the numbers are whose rounding an argument shows.

    A sum that cancels is no more exact than what is added up. And where that is itself what
    cancellation has left, like the square of a difference of equal functions, it is no more exact
    than it would be if the loop's input were rounded differently, which is tried. What does not
    grow with such changes is either rounding inside the kernel, far smaller than its result or as
    small as that of its input, or a branch that has gone another way, which does not count.

    Parameters
    ----------
    loop, number
        The loop, and which of its arguments.
    options
        Settings to run by.
    start, stop
        The iterations; all of them where not given.
    """
    parts = contributions(loop, number, options, start, stop)
    if parts.dtype.kind in "iu":
        return largest(parts)

    def change(units: int) -> float:
        """What changes of the input by so many units in the last place make of it."""
        return max(
            largest(contributions(loop, number, options, start, stop, (seed, units)) - parts)
            for seed in range(3)
        )

    size, one, many = largest(parts), change(1), change(_UNITS)
    eps = float(np.finfo(parts.dtype).eps)
    if not one:
        return size
    if many >= one * _UNITS / 8:
        return max(size, one / eps)
    noise = _UNITS * one
    read = [a.buffer for a in loop.arguments if not a.access.writes and a.buffer.dtype.kind in "fc"]
    if noise > _FAINT * size and one > _UNITS * eps * max(map(largest, read), default=0.0):
        return size
    # each iteration adds its own to a global
    times = loop.iteration_set.size if loop.arguments[number].kind is Kind.GLOBAL else 1
    return max(size, times * noise / _tolerance(parts.dtype))


def largest(values: Array) -> float:
    """The largest absolute value that is finite; 0 where there is none."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def contributions(
    loop: Parloop,
    number: int,
    options: Options,
    start: int = 0,
    stop: int | None = None,
    rounding: tuple[int, int] | None = None,
) -> Array:
    """What single iterations of a loop add or write to an argument (some of the iterations).

    Parameters
    ----------
    loop
        The loop.
    number
        Of the argument.
    options
        Settings to run by.
    start, stop
        The iterations; all of them where not given.
    rounding
        Seed and size, in units in the last place, of random changes of what the loop reads.
    """
    from pyop3_mlir import engine

    iterations = loop.iteration_set
    stop = iterations.size if stop is None else stop
    # spread evenly, as the first ones may be at a boundary, where there is little to see
    step = max(1, -(-(stop - start) // _SAMPLE))
    chosen = np.arange(start, stop, step, dtype=np.int32)
    if iterations.entities is not None:
        chosen = iterations.entities[chosen]
    sample = IterationSet(len(chosen), entities=chosen, name=iterations.name)
    rows = np.full((sample.extent, 1), -1, np.int32)
    rows[chosen, 0] = range(len(chosen))
    slots = loop.arguments[number].slots
    values = np.zeros(len(chosen) * slots, loop.arguments[number].buffer.dtype)
    if not values.size:
        return values
    table = IndexTable(rows, len(chosen), allow_negative=True)
    arguments = list(loop.arguments)
    for other, argument in enumerate(arguments):
        if argument.access.writes:
            arguments[other] = replace(argument, buffer=argument.buffer.copy())
    if rounding is not None:
        seed, units = rounding
        _round_differently(arguments, np.random.default_rng(seed), units)
    access = loop.arguments[number].access
    arguments[number] = Argument(values, access, Kind.INDIRECT, table, slots)
    single = Parloop(loop.kernel, sample, arguments, loop.name)
    engine.compile(single, options=replace(options, tune="off"))()
    return values


def _round_differently(arguments: list[Argument], random: np.random.Generator, units: int) -> None:
    """Let arguments that are read alone have other buffers, different in the last digits."""
    changed: dict[int, Array] = {}
    for number, argument in enumerate(arguments):
        old = argument.buffer
        if argument.access.writes or old.dtype.kind not in "fc":
            continue
        if old.ctypes.data not in changed:
            shift = random.choice([-units, units], old.shape) * np.finfo(old.dtype).eps
            changed[old.ctypes.data] = (old * (1 + shift)).astype(old.dtype)
        arguments[number] = replace(argument, buffer=changed[old.ctypes.data])


@dataclass(eq=False)
class _Matrix:
    """A matrix that has to be assembled before its values can be looked at.

    Attributes
    ----------
    mat
        PETSc's matrix; between the parts of a loop it holds PyOP2's result.
    name
        For messages.
    numbers
        The loop's arguments with this matrix or blocks of it.
    size
        The largest value before the loop.
    ours
        A copy with the engine's result, from the first part on.
    """

    mat: Any
    name: str
    numbers: list[int] = field(default_factory=list)
    size: float = 0.0
    ours: Any = None

    def copy(self) -> Any:
        """A copy of the matrix as it is now. Collective."""
        # also what waits for other processes, of this loop or of earlier ones
        self.mat.assemble()
        return self.mat.duplicate(copy=True)

    def take(self, copy: Any) -> None:
        """Put values back, in place, and forget the copy. Collective."""
        from petsc4py import PETSc

        copy.copy(self.mat, structure=PETSc.Mat.Structure.SAME_NONZERO_PATTERN)
        copy.destroy()


class Trial:
    """One call of a PyOP2 loop, by both engines; PyOP2's result stays. Collective.

    Where there are several processes, all of them raise the error of the first that finds one.

    Parameters
    ----------
    name
        Of the loop, for messages.
    loop
        PyOP2's loop.
    options
        The settings in force.
    """

    def __init__(self, name: str, loop: Any, options: Options) -> None:
        self.name = name
        self.loop = loop
        self.options = options
        self.matrices: list[_Matrix] | None = None

    def run(
        self,
        reading: Reading,
        part: Any,
        ours: Callable[[], None],
        theirs: Callable[[], None],
    ) -> None:
        """Run a part of the iteration set by each engine, one after the other, and compare.

        Parameters
        ----------
        reading
            The loop as the engine reads it.
        part
            PyOP2's part of the iteration set.
        ours, theirs
            Run the part.

        Raises
        ------
        VerificationError
            Where the results differ. Those of matrices whose entries may wait for other processes
            are compared after the last part.
        """
        if self.matrices is None:
            self.matrices = self._waiting(reading)
            for matrix in self.matrices:
                matrix.ours = matrix.copy()
                matrix.size = largest(matrix.ours.getValuesCSR()[2])
        written = self._written(reading)
        before = [target.copy() for *_, target in written]
        old = [matrix.copy() for matrix in self.matrices]
        for matrix in self.matrices:
            matrix.take(matrix.ours)
        ours()
        found = [target.copy() for *_, target in written]
        for (*_, target), values in zip(written, before, strict=True):
            target[...] = values
        for matrix, copy in zip(self.matrices, old, strict=True):
            matrix.ours = matrix.copy()
            matrix.take(copy)
        theirs()

        def check() -> None:
            for (parloop, number, target), values, earlier in zip(
                written, found, before, strict=True
            ):
                limits = reading.range(part) if reading.border is None else ()
                compare_argument(
                    f"loop {self.name}", parloop, number, values, target, earlier,
                    self.options, limits,
                )  # fmt: skip

        self._together(check)
        if part is not self.loop.iterset.core_part or self.loop.comm.size == 1:
            for matrix in self.matrices:
                self._compare(reading, matrix)

    def _waiting(self, reading: Reading) -> list[_Matrix]:
        """The matrices that are not in the engine's memory, or not only."""
        from pyop3_mlir.frontends.pyop2 import matrix_of

        found: dict[int, _Matrix] = {}
        if reading.elements or reading.shares:
            for number, place in enumerate(reading.plan.places):
                if place.matrix is not None:
                    _, holder = matrix_of(place, self.loop.arguments[place.number].data)
                    matrix = found.setdefault(id(holder), _Matrix(holder.handle, place.name))
                    matrix.numbers.append(number)
        return list(found.values())

    def _written(self, reading: Reading) -> list[tuple[Parloop, int, Array]]:
        """What the loop changes besides, once: loop, number of the argument, flat memory."""
        found: dict[tuple[int, int], tuple[Parloop, int, Array]] = {}
        assert self.matrices is not None
        for parloop in (reading.parloop, reading.border):
            if parloop is None:
                continue
            for number, (argument, place) in enumerate(
                zip(parloop.arguments, reading.plan.places, strict=True)
            ):
                if not argument.access.writes or (self.matrices and place.matrix is not None):
                    continue
                target: Array = argument.buffer
                if place.shared:
                    target = self.loop.arguments[place.number].data._data.reshape(-1)
                found.setdefault((target.ctypes.data, target.size), (parloop, number, target))
        return list(found.values())

    def _compare(self, reading: Reading, matrix: _Matrix) -> None:
        """Compare what both engines made of a matrix."""
        ours, matrix.ours = matrix.ours, None
        matrix.mat.assemble()
        starts, columns, expected = matrix.mat.getValuesCSR()
        found = ours.getValuesCSR()[2]
        ours.destroy()
        first = matrix.mat.getOwnershipRange()[0]

        def entry(position: int) -> str:
            row = int(np.searchsorted(starts, position, side="right")) - 1 + first
            return f"({row}, {columns[position]})"

        def check(size: float) -> None:
            where = f"loop {self.name}, matrix {matrix.name}"
            compare(where, found, expected, np.array([size]), entry)

        # entries of one process are sums of what several processes computed
        size = self._largest(max(matrix.size, largest(expected)))
        loops = [loop for loop in (reading.parloop, reading.border) if loop is not None]
        try:
            check(size)
            right = True
        except VerificationError:
            right = False
        if self._largest(not right):
            parts = self._together(
                lambda: [
                    magnitude(loop, number, self.options)
                    for loop in loops
                    for number in matrix.numbers
                ]
            )
            size = self._largest(max(size, *parts))
            self._together(lambda: check(size))

    def _largest(self, number: float) -> float:
        """The largest of all processes' numbers."""
        comm = self.loop.comm
        if comm.size == 1:
            return number
        from mpi4py import MPI

        found: float = comm.allreduce(number, op=MPI.MAX)
        return found

    def _together(self, action: Callable[[], Any]) -> Any:
        if self.loop.comm.size == 1:
            return action()
        from pyop3_mlir import parallel

        return parallel.together(self.loop.comm, action)

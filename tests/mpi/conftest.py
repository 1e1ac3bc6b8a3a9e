"""Loops on several processes, held against the same loops through PyOP2 on one."""

from __future__ import annotations

import faulthandler
import functools
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

TOLERANCE = 1e-12
PATIENCE = 300
"""Seconds that a test may take."""

WAVES = (1.7, 2.9, 4.3)
"""Wave numbers of the fields that results are weighted with."""


@pytest.fixture(scope="session")
def cache_root(cache_root):
    """One cache directory for all processes of a launch."""
    try:
        from mpi4py import MPI
    except ImportError:
        return cache_root
    return MPI.COMM_WORLD.bcast(cache_root)


@pytest.fixture(autouse=True)
def _end_where_stuck():
    """End the whole launch where a process waits for the others in vain, and say where."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@dataclass
class Value:
    """A number that does not depend on how the mesh is distributed, and the size of its terms."""

    number: float
    scale: float


@dataclass
class Engine:
    """Runs loops on the engine, and asserts that it did."""

    comm: Any
    entries: list[Any] = field(default_factory=list)

    @contextmanager
    def on(self, lowered=True, **settings):
        """Attach for the block; afterwards every loop must have been lowered, on every process."""
        from pyop3_mlir.frontends import dropin
        from pyop3_mlir.options import Options

        backend = dropin.attach(Options.resolve(**{"tune": "off", **settings}))
        try:
            yield backend
        finally:
            dropin.detach(backend)
        self.entries = list(backend.entries.values())
        assert self.entries
        if lowered:
            assert {e.name: e.reason for e in self.entries if e.lowered < e.calls} == {}


@pytest.fixture
def engine_on(comm):
    """Return a context manager that runs loops on the engine, and asserts that it did."""
    return Engine(comm).on


@pytest.fixture
def check(comm, engine_on):
    """Return a function that compares a problem on all processes with PyOP2 on one.

    It takes ``make_mesh(comm)`` and ``prepare(mesh)``, which returns a function that assembles, and
    options of the engine.
    """

    def compare(make_mesh, prepare, **settings):
        expected = on_first(comm, lambda: values_of(prepare(mesh_on(make_mesh, alone=True))()))
        assemble = prepare(mesh_on(make_mesh, alone=False))
        with engine_on(**settings):
            result = assemble()
        found = values_of(result)
        assert len(found) == len(expected)
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            scale = max(theirs.scale, 1e-300)
            assert abs(ours.number - theirs.number) <= TOLERANCE * scale, (
                f"value {number}: {ours.number!r}, PyOP2 on one process has {theirs.number!r}, "
                f"off by {abs(ours.number - theirs.number) / scale:.2e} of {scale:.3g}"
            )

    return compare


@functools.cache
def mesh_on(make_mesh, alone):
    """A mesh on this process alone or on all of them, made once: distributing it is slow."""
    from mpi4py import MPI

    return make_mesh(MPI.COMM_SELF if alone else MPI.COMM_WORLD)


def on_first(comm, action):
    """Do something on the first process, for which the others wait without using their cores."""
    from pyop3_mlir.parallel import _attempt, _broadcast, _described

    error, value = _attempt(action) if comm.rank == 0 else (None, None)
    told, value = _broadcast(comm, (_described(error, 0), value), 0)
    if told is not None:
        raise error or told
    return value


def values_of(result) -> list[Value]:
    """Numbers that describe a result of ``assemble``; collective."""
    import firedrake as fd

    if isinstance(result, (list, tuple)):
        return [value for part in result for value in values_of(part)]
    if isinstance(result, (int, float, np.ndarray)):
        return [Value(float(v), abs(float(v))) for v in np.ravel(result)]
    if isinstance(result, (fd.Cofunction, fd.Function)):
        space = result.function_space()
        primal = space if isinstance(result, fd.Function) else space.dual()
        return weighted(result, waves(primal))
    return matrix_values(result)


@functools.cache
def waves(space):
    """Fields on a space, from formulas; through PyOP2."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [wave(space, number) for number in WAVES]


def wave(space, number):
    import firedrake as fd

    field_ = fd.Function(space)
    for part in field_.subfunctions if len(space) > 1 else (field_,):
        part_space = part.function_space()
        x = fd.SpatialCoordinate(part_space.mesh().unique())
        if part_space.ufl_element().family() == "Real":
            part.assign(number)
            continue
        shape = part_space.value_shape
        count = int(np.prod(shape, dtype=int))
        phases = [
            fd.cos(sum((number + 0.3 * k + 0.1 * i) * x[i] for i in range(len(x))) + 0.7 * k)
            for k in range(count)
        ]
        if not shape:
            expression = phases[0]
        elif len(shape) == 1:
            expression = fd.as_vector(phases)
        else:
            expression = fd.as_tensor(np.array(phases, dtype=object).reshape(shape))
        part.interpolate(expression)
    return field_


def weighted(vector, weights) -> list[Value]:
    """Sums over all entries of a vector, each weighted by a field."""
    comm = vector.comm
    values = []
    with vector.dat.vec_ro as a:
        norm = a.norm()
        for weight in weights:
            with weight.dat.vec_ro as w:
                values.append(Value(a.dot(w), norm * w.norm()))
        values.append(Value(norm, norm))
    assert comm is not None
    return values


def matrix_values(matrix) -> list[Value]:
    """Sums over all entries of a matrix, weighted by fields on rows and columns."""
    petsc = matrix.petscmat
    test, trial = matrix.a.arguments() if hasattr(matrix, "a") else matrix.arguments()
    norm = frobenius(petsc)
    values = [Value(norm, norm)]
    rows = waves(test.function_space())
    for column in waves(trial.function_space()):
        with column.dat.vec_ro as x:
            y = petsc.createVecLeft()
            petsc.mult(x, y)
            for row in rows:
                with row.dat.vec_ro as w:
                    values.append(Value(y.dot(w), norm * x.norm() * w.norm()))
    return values


def frobenius(petsc) -> float:
    if petsc.getType() != "nest":
        return petsc.norm()
    rows, columns = petsc.getNestSize()
    parts = [petsc.getNestSubMatrix(i, j) for i in range(rows) for j in range(columns)]
    return float(np.linalg.norm([part.norm() for part in parts if part]))

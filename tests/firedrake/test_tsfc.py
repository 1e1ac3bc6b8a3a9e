"""Kernels by way of GEM: where they come from, and that both importers agree."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

pytest.importorskip("firedrake")

from firedrake import (
    FacetNormal,
    Function,
    FunctionSpace,
    SpatialCoordinate,
    TestFunction,
    TrialFunction,
    UnitSquareMesh,
    VectorFunctionSpace,
    assemble,
    avg,
    conditional,
    dot,
    dS,
    ds,
    dx,
    exp,
    grad,
    inner,
    jump,
)
from firedrake.assemble import get_assembler
from reference import evaluate_kernel

from pyop3_mlir.frontends.pyop2 import plan_for
from pyop3_mlir.frontends.tsfc import ATTRIBUTE
from pyop3_mlir.kernels.loopy import Intent, import_loopy

NAMES = ("action", "matrix", "functional", "vector", "exterior", "interior")


def forms(mesh: Any) -> dict[str, Any]:
    """Forms that Firedrake has not compiled before: each has a number of its own."""
    a = float(np.random.default_rng().random())
    space, vectors = FunctionSpace(mesh, "CG", 2), VectorFunctionSpace(mesh, "CG", 1)
    f, u, v = Function(space), TrialFunction(space), TestFunction(space)
    g, n = Function(vectors), FacetNormal(mesh)
    return {
        "action": a * exp(f) * inner(grad(f), grad(v)) * dx,
        "matrix": a * inner(grad(u), grad(v)) * dx,
        "functional": a * inner(g, g) * dx,
        "vector": a * inner(grad(g), grad(TestFunction(vectors))) * dx,
        "exterior": a * conditional(dot(g, n) < 0, f, 2 * f) * v * ds,
        "interior": a * jump(f) * avg(v) * dS + avg(dot(g, g)) * jump(v) * dS,
    }


@pytest.mark.parametrize("name", NAMES)
def test_both_importers_give_the_same_kernel(name: str, attach: Any) -> None:
    """The GEM, and the loopy kernel that TSFC made of it, evaluated on the same random data."""
    form = forms(UnitSquareMesh(1, 1))[name]
    with attach() as found:
        assembler = get_assembler(form)
        (loop,) = assembler.parloops(assembler.allocate())
        plan = plan_for(loop, found.backend._importers)
        kernel = loop.local_kernel
    assert plan.importer == "gem"
    intents = [Intent.INC] + [Intent.READ] * (len(kernel.accesses) - 1)
    other = import_loopy(kernel.code, kernel.name, intents)
    rng = np.random.default_rng(7)
    packs = []
    for number, argument in enumerate(other.arguments):
        shape = (4, *argument.shape)
        if argument.dtype.kind in "iu":
            packs.append(rng.integers(0, 3, shape).astype(argument.dtype))
        else:
            packs.append(np.zeros(shape) if number == 0 else rng.random(shape))
    (ours,) = evaluate_kernel(plan.kernel, packs).values()
    (theirs,) = evaluate_kernel(other, packs).values()
    np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13 * np.abs(theirs).max())


def test_gem_travels_with_the_kernel(attach: Any) -> None:
    space = FunctionSpace(UnitSquareMesh(2, 2), "CG", 1)
    # a form that nobody has compiled before
    number = float(np.random.default_rng().random())
    form = (number + Function(space)) * TestFunction(space) * dx
    with attach():
        assembler = get_assembler(form)
        (loop,) = assembler.parloops(assembler.allocate())
        kernel = loop.local_kernel
    again = pickle.loads(pickle.dumps(kernel))
    assert getattr(again, ATTRIBUTE) == getattr(kernel, ATTRIBUTE)
    assert again.cache_key == kernel.cache_key


def test_kernels_that_carry_none_come_from_loopy(attach: Any) -> None:
    space = FunctionSpace(UnitSquareMesh(2, 2), "CG", 1)
    number = float(np.random.default_rng().random())
    form = (number + SpatialCoordinate(space.mesh())[0]) * TestFunction(space) * dx
    assembler = get_assembler(form)
    expected = assembler.assemble().dat.data_ro.copy()
    with attach() as found:
        (loop,) = assembler.parloops(assembler.allocate())
        assert not hasattr(loop.local_kernel, ATTRIBUTE)
        result = assembler.assemble()
        assert plan_for(loop, found.backend._importers).importer == "loopy"
        found.all_lowered()
    np.testing.assert_allclose(result.dat.data_ro, expected, rtol=1e-13)


def test_nothing_changes_for_pyop2(attach: Any) -> None:
    """The loopy kernel is the same with and without the engine."""
    space = FunctionSpace(UnitSquareMesh(2, 2), "CG", 1)
    from tsfc import compile_form

    form = inner(grad(Function(space)), grad(TestFunction(space))) * dx
    (before,) = compile_form(form)
    with attach():
        (inside,) = compile_form(form)
    assert str(before.ast) == str(inside.ast)
    assert assemble(form) is not None

"""Local kernels of common finite element forms, as GEM expressions built with FInAT.

They are what TSFC makes of the same forms on affine simplices, factorised so that an action never
forms the element matrix: coefficients are evaluated at the quadrature points, the physics is
applied there, and the result is summed against the test functions (the sum factorisation of
M. Homolya, R. C. Kirby, D. A. Ham, "Exposing and exploiting structure: optimal code generation for
high-order finite element methods", arXiv:1711.02473). Element matrices of an affine simplex are a
constant reference tensor times the cell's geometry (R. C. Kirby, A. Logg, "A compiler for
variational forms", ACM TOMS 32, 2006, section 3); that product is what ``fold`` chooses.

Nothing here needs UFL, TSFC or PETSc.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gem
import numpy as np
import numpy.typing as npt
from FIAT.reference_element import ufc_simplex
from gem.impero_utils import preprocess_gem
from gem.node import Memoizer
from gem.optimise import constant_fold_zero, ffc_rounding, unroll_indexsum

from pyop3_mlir.kernels.program import LocalKernel

__all__ = ["CELLS", "FORMS", "GemKernel", "basis_size", "expressions", "kernel"]

CELLS = {"triangle": 2, "tetrahedron": 3}
"""Cells and their dimension."""

FORMS: dict[str, tuple[int, ...]] = {
    "mass": (1, 2),
    "laplace": (1, 2),
    "elasticity": (1, 2),
    "source": (1,),
    "functional": (0,),
}
"""Forms and the ranks that they have."""


@dataclass(frozen=True)
class GemKernel:
    """A local kernel in GEM, in the form that :func:`pyop3_mlir.kernels.gem.import_gem` takes.

    Attributes
    ----------
    name
        Name of the kernel.
    arguments
        ``(name, shape, dtype)`` of each argument, the output ``A`` first.
    assignments
        ``(lvalue, expression)``; each adds its expression to its lvalue for every value of the
        lvalue's free indices.
    quadrature
        Indices over quadrature points: the outermost loops of code for one cell.
    """

    name: str
    arguments: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
    assignments: tuple[tuple[Any, Any], ...]
    quadrature: tuple[Any, ...]


def kernel(
    form: str,
    cell: str,
    degree: int,
    rank: int = 1,
    dtype: npt.DTypeLike = np.float64,
    **parameters: Any,
) -> LocalKernel:
    """Make the local kernel of a form; the parameters are those of :func:`expressions`."""
    from pyop3_mlir.kernels.gem import import_gem

    made = expressions(form, cell, degree, rank, dtype, **parameters)
    imported: LocalKernel = import_gem(
        made.name, list(made.arguments), list(made.assignments), scalar_dtype=dtype
    )
    return imported


def basis_size(cell: str, degree: int) -> int:
    """Count the basis functions of P_degree on ``cell``."""
    return int(_lagrange(cell, degree).space_dimension())


def expressions(
    form: str,
    cell: str,
    degree: int,
    rank: int = 1,
    dtype: npt.DTypeLike = np.float64,
    *,
    fold: bool = True,
    lame: tuple[float, float] = (1.25, 0.8),
) -> GemKernel:
    """Build a form on P_degree over affine simplices.

    =============  ======================================  =======================================
    form           integral over the cell                  arguments after ``A`` and ``coords``
    =============  ======================================  =======================================
    mass           ``u v``                                 rank 1: ``w[nb]``
    laplace        ``grad(u) . grad(v)``                   rank 1: ``w[nb]``
    elasticity     ``lambda div(u) div(v)``                rank 1: ``w[nb, D]``
                   ``+ 2 mu eps(u) : eps(v)``
    source         ``f v``                                 ``f[1]``
    functional     ``u``                                   ``w[nb]``
    =============  ======================================  =======================================

    ``A`` has shape ``[nb]`` or ``[nb, nb]`` for scalar forms of rank 1 and 2, ``[nb, D]`` or
    ``[nb, D, nb, D]`` for elasticity, ``[1]`` at rank 0; ``coords`` has shape ``[D + 1, D]``. Cells
    may have either orientation. Quadrature is exact.

    Parameters
    ----------
    form
        One of :data:`FORMS`.
    cell
        One of :data:`CELLS`.
    degree
        Degree of the Lagrange element, at least 1.
    rank
        2 for the element matrix, 1 for its action on a coefficient or a vector, 0 for a number.
    dtype
        ``float64`` or ``float32``.
    fold
        At rank 2: whether to integrate over the reference cell now, which leaves a constant tensor
        times the cell's geometry, or to sum over the quadrature points in the kernel as TSFC does.
    lame
        ``lambda`` and ``mu`` of elasticity.

    Raises
    ------
    ValueError
        Where the form, cell, degree or rank is none of these.
    """
    if form not in FORMS:
        raise ValueError(f"no form {form!r}; there are {', '.join(FORMS)}")
    if cell not in CELLS:
        raise ValueError(f"no cell {cell!r}; there are {', '.join(CELLS)}")
    if rank not in FORMS[form]:
        raise ValueError(f"{form} has rank {' or '.join(map(str, FORMS[form]))}, not {rank}")
    if degree < 1:
        raise ValueError(f"degree {degree}: the Lagrange element starts at 1")
    kind = np.dtype(dtype)
    if kind not in (np.dtype(np.float64), np.dtype(np.float32)):
        raise ValueError(f"dtype {kind}: these forms are real, use float64 or float32")

    dimension = CELLS[cell]
    space = _Space(cell, degree, _quadrature_degree(form, degree, rank))
    geometry = _Geometry(dimension)
    nb = space.size
    shapes: list[tuple[str, tuple[int, ...]]] = [("coords", (dimension + 1, dimension))]
    if form == "elasticity":
        block = (nb, dimension)
        shapes.insert(0, ("A", block * rank))
        if rank == 1:
            shapes.append(("w", block))
            assignments = _elasticity_action(space, geometry, lame)
        else:
            assignments = _elasticity_matrix(space, geometry, lame, fold)
    elif rank == 2:
        shapes.insert(0, ("A", (nb, nb)))
        build = _mass_matrix if form == "mass" else _laplace_matrix
        assignments = build(space, geometry, fold)
    elif form == "source":
        shapes = [("A", (nb,)), *shapes, ("f", (1,))]
        assignments = _source(space, geometry)
    elif form == "functional":
        shapes = [("A", (1,)), *shapes, ("w", (nb,))]
        assignments = _functional(space, geometry)
    else:
        shapes = [("A", (nb,)), *shapes, ("w", (nb,))]
        action = _mass_action if form == "mass" else _laplace_action
        assignments = action(space, geometry)

    values = _simplify([value for _, value in assignments], space.points.indices)
    if kind != np.dtype(np.float64):
        values = _literals_as(values, kind)
    suffix = {0: "functional", 1: "vector" if form == "source" else "action", 2: "matrix"}[rank]
    return GemKernel(
        name=f"{form}_p{degree}_{cell}_{suffix}",
        arguments=tuple((name, shape, kind) for name, shape in shapes),
        assignments=tuple((lhs, rhs) for (lhs, _), rhs in zip(assignments, values, strict=True)),
        quadrature=space.points.indices,
    )


def _quadrature_degree(form: str, degree: int, rank: int) -> int:
    if form in ("source", "functional"):
        return degree
    return 2 * degree if form == "mass" else 2 * (degree - 1)


@functools.cache
def _lagrange(cell: str, degree: int) -> Any:
    import finat

    return finat.Lagrange(ufc_simplex(CELLS[cell]), degree)


Assignments = list[tuple[Any, Any]]

UNROLL = 3
"""Sums of at most this many terms are written out, but for those over quadrature points."""


class _Space:
    """Basis functions tabulated at quadrature points.

    Attributes
    ----------
    points
        FInAT's point set; its index is the quadrature index of the kernel.
    weight
        GEM expression of the weight at a point.
    """

    def __init__(self, cell: str, degree: int, quadrature_degree: int) -> None:
        from finat.quadrature import make_quadrature

        self.dimension = CELLS[cell]
        self.element = _lagrange(cell, degree)
        self.size = int(self.element.space_dimension())
        self.rule = make_quadrature(ufc_simplex(self.dimension), quadrature_degree)
        self.points = self.rule.point_set
        self.weight = self.rule.weight_expression
        tables = self.element.basis_evaluation(1, self.points)
        # FIAT's rounding errors in entries like 0, 1 and 0.5 would hide that terms vanish
        self._tables = {alpha: ffc_rounding(table, 1e-14) for alpha, table in tables.items()}

    def index(self) -> Any:
        """Make a new index over the basis functions."""
        return gem.Index(extent=self.size)

    def value(self, i: Any) -> Any:
        """Basis function ``i`` at the points."""
        return gem.Indexed(self._tables[(0,) * self.dimension], (i,))

    def derivatives(self, i: Any) -> list[Any]:
        """Reference derivatives of basis function ``i`` at the points."""
        return [gem.Indexed(self._tables[alpha], (i,)) for alpha in self._directions()]

    def _directions(self) -> list[tuple[int, ...]]:
        return [tuple(int(d == a) for d in range(self.dimension)) for a in range(self.dimension)]

    def integrate(self, integrand: Any) -> Any:
        """Sum over the quadrature points."""
        return gem.IndexSum(integrand, self.points.indices)

    @property
    def is_constant(self) -> bool:
        """Whether there is only one quadrature point."""
        return len(self.points.points) == 1

    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Weights ``[q]``, values ``[nb, q]`` and derivatives ``[D, nb, q]`` as numbers."""
        from FIAT import Lagrange

        points = self.points.points
        fiat = Lagrange(ufc_simplex(self.dimension), self.element.degree)
        tables = fiat.tabulate(1, points)
        value = tables[(0,) * self.dimension]
        derivatives = np.stack([tables[alpha] for alpha in self._directions()])
        weights = np.asarray(self.rule.weights, dtype=np.float64)
        return weights, value, derivatives


class _Geometry:
    """The affine map of a cell, from the argument ``coords``.

    With the Jacobian ``J[d, a] = x[a + 1, d] - x[0, d]``, ``adjugate[a][d]`` over ``det J`` is the
    derivative of reference coordinate a with respect to coordinate d.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        x = gem.Variable("coords", (dimension + 1, dimension))
        axes = range(dimension)
        origin = [gem.Indexed(x, (0, d)) for d in axes]
        jac = [[gem.Indexed(x, (a + 1, d)) - origin[d] for a in axes] for d in axes]
        if dimension == 2:
            self.adjugate = [[jac[1][1], -jac[0][1]], [-jac[1][0], jac[0][0]]]
        else:
            # the cofactor of J[d, a], transposed; cyclic indices carry the sign
            self.adjugate = [
                [
                    jac[(d + 1) % 3][(a + 1) % 3] * jac[(d + 2) % 3][(a + 2) % 3]
                    - jac[(d + 1) % 3][(a + 2) % 3] * jac[(d + 2) % 3][(a + 1) % 3]
                    for d in axes
                ]
                for a in axes
            ]
        determinant = _sum(self.adjugate[0][d] * jac[d][0] for d in axes)
        self.scale = gem.MathFunction("abs", determinant)
        self.inverse_scale = gem.Division(gem.Literal(1.0), self.scale)

    @functools.cached_property
    def metric(self) -> list[list[Any]]:
        """``|det J| K K^T`` with ``K`` the inverse of ``J``: the metric of the Laplacian."""
        axes = range(self.dimension)
        upper = {
            (a, b): _sum(self.adjugate[a][d] * self.adjugate[b][d] for d in axes)
            * self.inverse_scale
            for a, b in itertools.combinations_with_replacement(axes, 2)
        }
        return [[upper[min(a, b), max(a, b)] for b in axes] for a in axes]


def _sum(terms: Iterable[Any]) -> Any:
    return functools.reduce(operator.add, terms)


def _output(shape: tuple[int, ...], indices: tuple[Any, ...]) -> Any:
    return gem.Indexed(gem.Variable("A", shape), indices)


def _coefficient(space: _Space, component: int | None = None) -> tuple[Any, Any]:
    """An index over the coefficient's nodes, and its value there."""
    j = space.index()
    if component is None:
        return j, gem.Indexed(gem.Variable("w", (space.size,)), (j,))
    return j, gem.Indexed(gem.Variable("w", (space.size, space.dimension)), (j, component))


def _mass_action(space: _Space, geometry: _Geometry) -> Assignments:
    j, w = _coefficient(space)
    i = space.index()
    at_points = gem.IndexSum(space.value(j) * w, (j,))
    density = at_points * (space.weight * geometry.scale)
    return [(_output((space.size,), (i,)), space.integrate(space.value(i) * density))]


def _laplace_action(space: _Space, geometry: _Geometry) -> Assignments:
    j, w = _coefficient(space)
    i = space.index()
    gradient = [gem.IndexSum(d * w, (j,)) for d in space.derivatives(j)]
    flux = [space.weight * f for f in _raise(geometry, gradient, space.is_constant)]
    integrand = _sum(d * f for d, f in zip(space.derivatives(i), flux, strict=True))
    return [(_output((space.size,), (i,)), space.integrate(integrand))]


def _raise(geometry: _Geometry, gradient: list[Any], once: bool) -> list[Any]:
    """Apply ``|det J| K K^T``: at one point the two factors, at more their product."""
    axes = range(geometry.dimension)
    if not once:
        return [_sum(row[b] * gradient[b] for b in axes) for row in geometry.metric]
    adj = geometry.adjugate
    physical = [_sum(gradient[a] * adj[a][d] for a in axes) for d in axes]
    return [geometry.inverse_scale * _sum(physical[d] * adj[a][d] for d in axes) for a in axes]


def _elasticity_action(
    space: _Space, geometry: _Geometry, lame: tuple[float, float]
) -> Assignments:
    axes = range(space.dimension)
    lam, mu = (gem.Literal(float(value)) for value in lame)
    adj = geometry.adjugate
    # det J times the gradient of component c along coordinate d
    gradient = []
    for c in axes:
        j, w = _coefficient(space, c)
        reference = [gem.IndexSum(d * w, (j,)) for d in space.derivatives(j)]
        gradient.append([_sum(reference[a] * adj[a][d] for a in axes) for d in axes])
    # both gradients lack a factor 1 / det J, the measure has |det J|: 1 / |det J| remains
    scale = space.weight * geometry.inverse_scale
    pressure = lam * _sum(gradient[c][c] for c in axes) * scale
    shear = mu * scale
    stress = [[shear * (gradient[c][d] + gradient[d][c]) for d in axes] for c in axes]
    for c in axes:
        stress[c][c] = stress[c][c] + pressure
    i = space.index()
    test = space.derivatives(i)
    assignments = []
    for c in axes:
        pulled = [_sum(stress[c][d] * adj[a][d] for d in axes) for a in axes]
        integrand = _sum(t * p for t, p in zip(test, pulled, strict=True))
        lvalue = _output((space.size, space.dimension), (i, c))
        assignments.append((lvalue, space.integrate(integrand)))
    return assignments


def _source(space: _Space, geometry: _Geometry) -> Assignments:
    i = space.index()
    f = gem.Indexed(gem.Variable("f", (1,)), (0,))
    value = space.integrate(space.value(i) * space.weight) * (geometry.scale * f)
    return [(_output((space.size,), (i,)), value)]


def _functional(space: _Space, geometry: _Geometry) -> Assignments:
    j, w = _coefficient(space)
    at_points = gem.IndexSum(space.value(j) * w, (j,))
    value = space.integrate(at_points * space.weight) * geometry.scale
    return [(_output((1,), (0,)), value)]


def _mass_matrix(space: _Space, geometry: _Geometry, fold: bool) -> Assignments:
    i, j = space.index(), space.index()
    if fold:
        weights, value, _ = space.arrays()
        reference = gem.Literal(np.einsum("q,iq,jq->ij", weights, value, value))
        entry = gem.Indexed(reference, (i, j)) * geometry.scale
    else:
        trial = space.value(j) * (space.weight * geometry.scale)
        entry = space.integrate(space.value(i) * trial)
    return [(_output((space.size,) * 2, (i, j)), entry)]


def _laplace_matrix(space: _Space, geometry: _Geometry, fold: bool) -> Assignments:
    i, j = space.index(), space.index()
    axes = range(space.dimension)
    if fold:
        weights, _, d = space.arrays()
        full = np.einsum("q,aiq,bjq->abij", weights, d, d)
        # the metric is symmetric: one term for each pair
        pairs = list(itertools.combinations_with_replacement(axes, 2))
        tables = [full[a, b] if a == b else full[a, b] + full[b, a] for a, b in pairs]
        entry = _contract(tables, [geometry.metric[a][b] for a, b in pairs], (i, j))
    else:
        trial = space.derivatives(j)
        flux = [space.weight * _sum(row[b] * trial[b] for b in axes) for row in geometry.metric]
        entry = space.integrate(
            _sum(t * f for t, f in zip(space.derivatives(i), flux, strict=True))
        )
    return [(_output((space.size,) * 2, (i, j)), entry)]


def _elasticity_matrix(
    space: _Space, geometry: _Geometry, lame: tuple[float, float], fold: bool
) -> Assignments:
    axes = range(space.dimension)
    lam, mu = (gem.Literal(float(value)) for value in lame)
    adj, metric = geometry.adjugate, geometry.metric
    i, j = space.index(), space.index()
    if fold:
        weights, _, d = space.arrays()
        full = np.einsum("q,aiq,bjq->abij", weights, d, d)
    assignments = []
    for c, d_ in itertools.product(axes, axes):
        # test function in direction c, trial function in direction d
        coupling = [
            [
                (lam * (adj[a][c] * adj[b][d_]) + mu * (adj[a][d_] * adj[b][c]))
                * geometry.inverse_scale
                for b in axes
            ]
            for a in axes
        ]
        if c == d_:
            coupling = [[coupling[a][b] + mu * metric[a][b] for b in axes] for a in axes]
        if fold:
            pairs = list(itertools.product(axes, axes))
            entry = _contract(
                [full[a, b] for a, b in pairs], [coupling[a][b] for a, b in pairs], (i, j)
            )
        else:
            trial = space.derivatives(j)
            flux = [space.weight * _sum(row[b] * trial[b] for b in axes) for row in coupling]
            entry = space.integrate(
                _sum(t * f for t, f in zip(space.derivatives(i), flux, strict=True))
            )
        shape = (space.size, space.dimension) * 2
        assignments.append((_output(shape, (i, c, j, d_)), entry))
    return assignments


def _contract(
    tables: Sequence[npt.NDArray[Any]], factors: Sequence[Any], indices: tuple[Any, ...]
) -> Any:
    """Sum of ``tables[s][indices] * factors[s]``, as a contraction over s."""
    s = gem.Index(extent=len(factors))
    table = gem.Literal(np.stack(tables, axis=-1))
    vector = gem.ListTensor(np.array(factors, dtype=object))
    return gem.IndexSum(gem.Indexed(table, (*indices, s)) * gem.Indexed(vector, (s,)), (s,))


def _simplify(roots: Sequence[Any], quadrature: tuple[Any, ...]) -> list[Any]:
    """Unroll short sums and drop what is multiplied by zero, with TSFC's defaults."""

    def is_short(index: Any) -> bool:
        return index.extent <= UNROLL and index not in quadrature

    simplified = unroll_indexsum(preprocess_gem(roots), predicate=is_short)
    return list(preprocess_gem(constant_fold_zero(simplified)))


def _literals_as(roots: Sequence[Any], kind: np.dtype[Any]) -> list[Any]:
    """Cast every constant, so that float32 kernels do not compute in float64."""

    def cast(node: Any, self: Any) -> Any:
        if isinstance(node, gem.Literal):
            return gem.Literal(node.array, dtype=kind)
        if not node.children:
            return node
        # literals compare equal across dtypes, so "unchanged" nodes must be rebuilt as well
        return node.reconstruct(*map(self, node.children))

    mapper = Memoizer(cast)
    return [mapper(root) for root in roots]

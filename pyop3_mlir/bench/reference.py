"""Element tensors by numpy, from FIAT's tables: what results are compared with.

Nothing is shared with :mod:`pyop3_mlir.kernels.elements` but FIAT itself: the quadrature rule is
another one (Gauss-Jacobi on a collapsed square or cube), Jacobians are inverted by LAPACK, and no
form is factorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.bench.meshes import Mesh

__all__ = ["apply", "assemble_matrix", "element_matrices"]


def element_matrices(
    form: str, mesh: Mesh, lame: tuple[float, float] = (1.25, 0.8)
) -> npt.NDArray[np.float64]:
    """Compute the element matrices of mass, laplace or elasticity.

    Returns
    -------
    ndarray
        ``[n, nb, nb]``, or ``[n, nb, D, nb, D]`` for elasticity.

    Raises
    ------
    ValueError
        For any other form.
    """
    from FIAT import Lagrange
    from FIAT.quadrature_schemes import create_quadrature
    from FIAT.reference_element import ufc_simplex

    dimension = mesh.dimension
    cell = ufc_simplex(dimension)
    rule = create_quadrature(cell, 2 * mesh.degree + 1, scheme="canonical")
    tables = Lagrange(cell, mesh.degree).tabulate(1, rule.get_points())
    weights = np.asarray(rule.get_weights())
    value = tables[(0,) * dimension]
    directions = [tuple(int(d == a) for d in range(dimension)) for a in range(dimension)]
    derivative = np.stack([tables[direction] for direction in directions])

    x = mesh.points[mesh.cells]
    jacobian = np.swapaxes(x[:, 1:] - x[:, :1], 1, 2)
    measure = np.abs(np.linalg.det(jacobian))
    inverse = np.linalg.inv(jacobian)
    if form == "mass":
        return _einsum("q,iq,jq,n->nij", weights, value, value, measure)
    # gradient of basis function i at point q in coordinate d
    gradient = _einsum("nad,aiq->niqd", inverse, derivative)
    if form == "laplace":
        return _einsum("q,niqd,njqd,n->nij", weights, gradient, gradient, measure)
    if form == "elasticity":
        full = _einsum("q,niqc,njqd,n->nicjd", weights, gradient, gradient, measure)
        trace = _einsum("nicjc->nij", full)
        lam, mu = lame
        eye = np.eye(dimension)
        return (
            lam * full
            + mu * _einsum("nicjd->nidjc", full)
            + mu * _einsum("nij,cd->nicjd", trace, eye)
        )
    raise ValueError(f"no reference for the form {form!r}")


def _einsum(subscripts: str, *operands: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = np.einsum(subscripts, *operands, optimize=True)
    return result


def _dofs(mesh: Mesh, matrices: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], int]:
    components = matrices.shape[2] if matrices.ndim == 5 else 1
    dofs = mesh.nodes[:, :, None].astype(np.int64) * components + np.arange(components)
    return dofs.reshape(mesh.size, -1), mesh.node_count * components


def assemble_matrix(mesh: Mesh, matrices: npt.NDArray[Any]) -> Any:
    """Add element matrices to a ``scipy.sparse.csr_array``, by way of COO."""
    import scipy.sparse

    dofs, size = _dofs(mesh, matrices)
    b = dofs.shape[1]
    rows = np.broadcast_to(dofs[:, :, None], (mesh.size, b, b))
    columns = np.broadcast_to(dofs[:, None, :], (mesh.size, b, b))
    coo = scipy.sparse.coo_array(
        (matrices.reshape(-1), (rows.reshape(-1), columns.reshape(-1))), shape=(size, size)
    )
    return coo.tocsr()


def apply(
    mesh: Mesh, matrices: npt.NDArray[Any], coefficient: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Apply element matrices to a coefficient cell by cell; the result has its shape."""
    dofs, size = _dofs(mesh, matrices)
    b = dofs.shape[1]
    local = coefficient.reshape(-1)[dofs]
    values = _einsum("nij,nj->ni", matrices.reshape(mesh.size, b, b), local)
    result = np.zeros(size)
    np.add.at(result, dofs, values)
    return result.reshape(coefficient.shape)

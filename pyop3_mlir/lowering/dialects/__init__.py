"""IREE's dialects, as far as they are used, what xDSL's own lack of MLIR's, and ``dense``.

:func:`iree_context` is the context to parse and verify with; :func:`print_module` prints what
``iree-compile`` reads.
"""

from __future__ import annotations

from io import StringIO

from xdsl.context import Context
from xdsl.dialects.affine import Affine
from xdsl.dialects.bufferization import Bufferization
from xdsl.dialects.builtin import Builtin
from xdsl.dialects.cf import Cf
from xdsl.dialects.complex import Complex
from xdsl.dialects.func import Func
from xdsl.dialects.math import Math
from xdsl.dialects.memref import MemRef
from xdsl.dialects.scf import Scf
from xdsl.dialects.tensor import Tensor
from xdsl.ir import Operation

from pyop3_mlir.lowering.dialects.arith import Arith
from pyop3_mlir.lowering.dialects.codegen import IREECPU, IREEGPU, IREECodegen
from pyop3_mlir.lowering.dialects.dense import Dense
from pyop3_mlir.lowering.dialects.flow import Flow
from pyop3_mlir.lowering.dialects.gpu import GPU
from pyop3_mlir.lowering.dialects.hal import HAL
from pyop3_mlir.lowering.dialects.linalg import Linalg
from pyop3_mlir.lowering.dialects.llvm import LLVM
from pyop3_mlir.lowering.dialects.printer import GenericPrinter
from pyop3_mlir.lowering.dialects.spirv import SPIRV
from pyop3_mlir.lowering.dialects.util import Util
from pyop3_mlir.lowering.dialects.vector import Vector

__all__ = ["iree_context", "print_module"]

DIALECTS = (
    Affine, Arith, Bufferization, Builtin, Cf, Complex, Dense, Flow, Func, GPU, HAL, IREECPU,
    IREECodegen, IREEGPU, LLVM, Linalg, Math, MemRef, SPIRV, Scf, Tensor,
    Util, Vector,
)  # fmt: skip


def iree_context() -> Context:
    """A context that knows every dialect that this package prints or parses."""
    context = Context()
    for dialect in DIALECTS:
        context.load_dialect(dialect)
    return context


def print_module(op: Operation) -> str:
    """The text of a module, in MLIR's generic form, as ``iree-compile`` reads it.

    The pretty forms of xDSL and of IREE's MLIR differ in places (``memref.alloca``, ``affine_map``
    attributes of named operations); the generic form is common ground.
    """
    stream = StringIO()
    GenericPrinter(stream).print_op(op)
    return stream.getvalue() + "\n"

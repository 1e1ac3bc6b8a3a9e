"""Local kernels of pyop3's loops: imported as they are, or written down first.

:class:`Writer` makes one loopy kernel of the statements in a loop's body, where these are more than
a call and moves around it: its arguments are the places that the statements access.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyop3_mlir.errors import UnsupportedLoopError
from pyop3_mlir.frontends.pyop3_read import Assign, Call, Constant, Operation, Ref, Value
from pyop3_mlir.kernels.loopy import Intent, Part, import_once
from pyop3_mlir.kernels.program import LocalKernel
from pyop3_mlir.parloop import INC, MAX, MIN, READ, RW, WRITE, Access

__all__ = ["Accessed", "Writer", "code_key", "import_kernel", "kernel_key"]

Array = npt.NDArray[Any]


def code_key(code: Any) -> str:
    """A digest of a loopy translation unit, equal for equal ones."""
    from loopy.tools import LoopyKeyBuilder

    return str(LoopyKeyBuilder()(code))


def kernel_key(code: Any) -> str:
    """As :func:`code_key`, whatever is known of what the kernel reads and writes.

    pyop3 writes that into a kernel when it makes a function of it.
    """
    kernel = code.default_entrypoint
    arguments = [a.copy(is_input=True, is_output=True) for a in kernel.args]
    return code_key(code.with_kernel(kernel.copy(args=arguments)))


def import_kernel(
    call: Call,
    intents: Sequence[Intent],
    splits: dict[int, tuple[tuple[int, ...], list[Part]]],
    importers: Sequence[Any],
) -> tuple[LocalKernel, str]:
    """Import a local kernel, or take it from memory.

    Parameters
    ----------
    call
        Its code and entry point.
    intents
        One an argument.
    splits
        Arguments that are made of parts, as for :func:`~pyop3_mlir.kernels.loopy.import_loopy`.
    importers
        Called with the translation unit and the intents, before the loopy importer is; the first
        that does not return None gives the kernel.

    Returns
    -------
    LocalKernel, str
        The kernel, and "gem" or "loopy".

    Raises
    ------
    UnsupportedLoopError
        Where it has something that has no equivalent.
    """
    if not splits:
        for importer in importers:
            found = importer(call.code, intents)
            if found is not None:
                return found, "gem"
    return import_once(code_key(call.code), call.code, call.name, intents, splits), "loopy"


class Writer:
    """Writes statements down as a loopy kernel whose arguments are what they access.

    Parameters
    ----------
    is_temporary
        Whether an ``IndexedBuffer`` is a temporary of the loop's body.
    """

    def __init__(self, is_temporary: Callable[[Any], bool]) -> None:
        self.is_temporary = is_temporary
        self.accesses: dict[Any, Accessed] = {}
        self.temporaries: dict[int, Any] = {}
        self.tables: dict[bytes, Any] = {}
        self.domains: list[str] = []
        self.instructions: list[Any] = []
        self.subkernels: list[Any] = []

    def _name(self, prefix: str) -> str:
        count = len(self.domains) + len(self.instructions) + len(self.tables)
        return f"{prefix}{count}"

    def assign(self, statement: Assign) -> None:
        """Write an assignment down."""
        import pymbolic.primitives as p

        entries = max(r.offsets.shape[1] for r in _refs([statement.target, statement.value]))
        iname = self._name("i")
        self.domains.append(f"{{ [{iname}]: 0 <= {iname} < {entries} }}")
        target = self._access(statement.target, iname, entries, statement.kind)
        value = self._value(statement.value, iname, entries)
        if statement.kind == "inc":
            value = target + value
        elif statement.kind in ("min", "max"):
            value = p.Variable(statement.kind)(target, value)
        self._add("Assignment", frozenset({iname}), target, value)

    def _add(self, kind: str, inames: frozenset[str], assignee: Any, expression: Any) -> None:
        import loopy as lp

        identifier = f"s{len(self.instructions)}"
        before = frozenset({f"s{len(self.instructions) - 1}"} if self.instructions else ())
        self.instructions.append(
            getattr(lp, kind)(
                assignee,
                expression,
                id=identifier,
                within_inames=inames,
                within_inames_is_final=True,
                depends_on=before,
                depends_on_is_final=True,
            )
        )

    def _value(self, value: Value, iname: str, entries: int) -> Any:
        import pymbolic.primitives as p

        match value:
            case Constant():
                return value.value
            case Ref():
                return self._access(value, iname, entries, "read")
        assert isinstance(value, Operation)
        operands = [self._value(o, iname, entries) for o in value.operands]
        comparisons = {
            "LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">",
            "GreaterThanOrEqual": ">=",
        }  # fmt: skip
        match value.name, operands:
            case "Add", [a, b]:
                return a + b
            case "Sub", [a, b]:
                return a - b
            case "Mul", [a, b]:
                return a * b
            case "Div", [a, b]:
                return p.Quotient(a, b)
            case "FloorDiv", [a, b]:
                return p.FloorDiv(a, b)
            case "Modulo", [a, b]:
                return p.Remainder(a, b)
            case "Pow", [a, b]:
                return p.Power(a, b)
            case "Neg", [a]:
                return -a
            case "Abs", [a]:
                return p.Variable("abs")(a)
            case "Or", [a, b]:
                return p.LogicalOr((a, b))
            case "Conditional", [a, b, c]:
                return p.If(a, b, c)
            case name, [a, b] if name in comparisons:
                return p.Comparison(a, comparisons[name], b)
        raise UnsupportedLoopError(f"the operation {value.name}")

    def _access(self, ref: Ref, iname: str, entries: int, kind: str) -> Any:
        import pymbolic.primitives as p

        offsets = np.broadcast_to(ref.offsets, (len(ref.offsets), entries))
        if not self.is_temporary(ref.view):
            accessed = self._accessed(ref.view, offsets)
            accessed.kinds.append(kind)
            return p.Variable(accessed.name)[p.Variable(iname)]
        if len(offsets) != 1:
            raise UnsupportedLoopError("a temporary in an order that depends on the iteration")
        name = self._temporary(ref.view)
        return p.Variable(name)[self._subscript(offsets[0], iname)]

    def _subscript(self, offsets: Array, iname: str) -> Any:
        import loopy as lp
        import pymbolic.primitives as p

        start = int(offsets[0])
        if (offsets == start + np.arange(len(offsets))).all():
            return p.Variable(iname) + start
        key = offsets.astype(np.int32).tobytes()
        if key not in self.tables:
            self.tables[key] = lp.TemporaryVariable(
                f"order{len(self.tables)}",
                dtype=np.int32,
                shape=offsets.shape,
                initializer=offsets.astype(np.int32),
                read_only=True,
                address_space=lp.AddressSpace.LOCAL,
            )
        return p.Variable(self.tables[key].name)[p.Variable(iname)]

    def _temporary(self, view: Any) -> str:
        import loopy as lp

        key = id(view.buffer)
        if key not in self.temporaries:
            self.temporaries[key] = lp.TemporaryVariable(
                f"t{len(self.temporaries)}",
                dtype=view.buffer.dtype,
                shape=(int(view.buffer.size),),
                address_space=lp.AddressSpace.LOCAL,
            )
        name: str = self.temporaries[key].name
        return name

    def _accessed(self, view: Any, offsets: Array) -> Accessed:
        key = (id(view.buffer), view.nest_indices, offsets.shape, _digest(offsets))
        found = self.accesses.get(key)
        if found is None:
            found = self.accesses[key] = Accessed(f"a{len(self.accesses)}", view, offsets)
        return found

    def call(self, call: Call) -> None:
        """Write the call of a local kernel down."""
        import loopy as lp
        import pymbolic.primitives as p

        writes: list[Any] = []
        reads: list[Any] = []
        for (view, intent), formal in zip(
            call.arguments, call.code.default_entrypoint.args, strict=True
        ):
            if type(formal).__name__ == "ValueArg":
                raise UnsupportedLoopError(f"kernel {call.name}: {formal.name} is no array")
            size = math.prod(int(e) for e in formal.shape)
            iname = self._name(f"c{len(writes)}_{len(reads)}_")
            self.domains.append(f"{{ [{iname}]: 0 <= {iname} < {size} }}")
            if self.is_temporary(view):
                name = self._temporary(view)
            else:
                accessed = self._accessed(view, np.arange(size)[None])
                kinds = {"READ": ["read"], "INC": ["inc"]}.get(intent, ["read", "write"])
                accessed.kinds += kinds
                name = accessed.name
            reference = lp.symbolic.SubArrayRef(
                (p.Variable(iname),), p.Variable(name)[p.Variable(iname)]
            )
            if intent != "READ":
                writes.append(reference)
            if intent not in ("WRITE", "MIN_WRITE", "MAX_WRITE"):
                reads.append(reference)
        expression = p.Call(p.Variable(call.name), tuple(reads))
        self._add("CallInstruction", frozenset(), tuple(writes), expression)
        self.subkernels.append(call.code.with_entrypoints(frozenset()))

    def finish(self) -> tuple[LocalKernel, str, list[tuple[Accessed, Access]]]:
        """The kernel, which importer made it, and what its arguments are."""
        import loopy as lp

        found, intents, arguments = [], [], []
        for accessed in self.accesses.values():
            access, intent = accessed.meaning()
            found.append((accessed, access))
            intents.append(intent)
            arguments.append(
                lp.GlobalArg(
                    accessed.name,
                    dtype=accessed.view.buffer.dtype,
                    shape=(accessed.offsets.shape[1],),
                    is_input=True,
                    is_output=intent is not Intent.READ,
                )
            )
        name = "statements"
        code = lp.make_kernel(
            self.domains,
            self.instructions,
            [*arguments, *self.temporaries.values(), *self.tables.values()],
            name=name,
            target=lp.CWithGNULibcTarget(),
            lang_version=(2018, 2),
        )
        code = lp.merge((code, *{id(k): k for k in self.subkernels}.values()))
        kernel, importer = import_kernel(Call(code, name, ()), intents, {}, ())
        return kernel, importer, found


class Accessed:
    """Entries of a buffer that statements access, an argument of the written kernel."""

    def __init__(self, name: str, view: Any, offsets: Array) -> None:
        self.name = name
        self.view = view
        self.offsets = offsets
        self.kinds: list[str] = []

    def meaning(self) -> tuple[Access, Intent]:
        """The access, and the intent for the importer, that all statements together have."""
        kinds = set(self.kinds)
        if kinds == {"read"}:
            return READ, Intent.READ
        if kinds == {"inc"}:
            return INC, Intent.INC
        if kinds == {"write"}:
            return WRITE, Intent.WRITE
        if kinds == {"min"}:
            return MIN, Intent.UPDATE
        if kinds == {"max"}:
            return MAX, Intent.UPDATE
        return RW, Intent.UPDATE


def _refs(values: Sequence[Value]) -> list[Ref]:
    found: list[Ref] = []
    for value in values:
        if isinstance(value, Ref):
            found.append(value)
        elif isinstance(value, Operation):
            found += _refs(value.operands)
    return found


def _digest(array: Array) -> bytes:
    contiguous = np.ascontiguousarray(array, dtype=np.int64)
    return hashlib.blake2b(contiguous.tobytes(), digest_size=16).digest()

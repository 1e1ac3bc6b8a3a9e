"""xDSL's printer in generic form, with a line an operation instead of a call a word.

A third of the time of lowering a large kernel went into printing it. What is printed is the same to
the letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from io import StringIO

from xdsl.dialects.builtin import FunctionType, UnitAttr, UnregisteredOp
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.printer import Printer

__all__ = ["GenericPrinter"]


class GenericPrinter(Printer):
    """Prints operations in generic form."""

    def __init__(self, stream: StringIO) -> None:
        super().__init__(stream, print_generic_format=True)

    @cached_property
    def _texts(self) -> dict[Attribute, str]:
        """How attributes are printed: a module has few of them, and thousands of uses."""
        return {}

    @cached_property
    def _known(self) -> dict[int, tuple[Attribute, str]]:
        """The same by identity, which is faster to look up. Holds them, so that they stay."""
        return {}

    def print_op(self, op: Operation) -> None:
        """Print an operation; those that hold others as xDSL does it."""
        if op.regions or op.successors or isinstance(op, UnregisteredOp):
            super().print_op(op)
            return
        results = ", ".join([self._name(value) for value in op.results])
        operands = ", ".join([self._name(value) for value in op.operands])
        properties = f" <{self._dictionary(op.properties)}>" if op.properties else ""
        attributes = f" {self._dictionary(op.attributes)}" if op.attributes else ""
        self.print_string(
            f'{results}{" = " if results else ""}"{op.name}"({operands}){properties}{attributes} : '
            f"({self._types(op.operands)}) -> {self._results(op)}"
        )

    def print_attribute(self, attribute: Attribute) -> None:
        """Print an attribute or a type."""
        self.print_string(self._text(attribute))

    def _name(self, value: SSAValue) -> str:
        name = self._ssa_values.get(value)
        if name is None:
            hint = value.name_hint
            if hint is None:
                name = self._get_new_valid_name_id()
            else:
                number = self.ssa_names.get(hint, 0)
                self.ssa_names[hint] = number + 1
                name = f"{hint}_{number}" if number else hint
            self._ssa_values[value] = name
        return "%" + name

    def _text(self, attribute: Attribute) -> str:
        found = self._known.get(id(attribute))
        if found is None:
            text = self._texts.get(attribute)
            if text is None:
                stream = StringIO()
                Printer(stream, print_generic_format=True).print_attribute(attribute)
                self._texts[attribute] = text = stream.getvalue()
            self._known[id(attribute)] = found = attribute, text
        return found[1]

    def _types(self, values: Iterable[SSAValue]) -> str:
        return ", ".join([self._text(value.type) for value in values])

    def _results(self, op: Operation) -> str:
        types = self._types(op.results)
        alone = len(op.results) == 1 and not isinstance(op.results[0].type, FunctionType)
        return types if alone else f"({types})"

    def _dictionary(self, entries: Mapping[str, Attribute]) -> str:
        return "{" + ", ".join([self._entry(*entry) for entry in entries.items()]) + "}"

    def _entry(self, name: str, attribute: Attribute) -> str:
        if not name.isidentifier():
            stream = StringIO()
            Printer(stream).print_identifier_or_string_literal(name)
            name = stream.getvalue()
        return name if isinstance(attribute, UnitAttr) else f"{name} = {self._text(attribute)}"

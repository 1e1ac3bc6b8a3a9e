"""Back ends that are attached one on top of the other."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from pyop3_mlir.errors import NotAttachedError

__all__ = ["Attachable", "Stack"]


class Attachable(Protocol):
    """What replaces names of another package, and puts them back."""

    def attach(self) -> None:
        """Replace them."""

    def detach(self) -> None:
        """Put them back."""


B = TypeVar("B", bound=Attachable)


class Stack(Generic[B]):
    """The back ends attached to one package, the one in force last.

    Parameters
    ----------
    package
        Its name, for messages.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self._attached: list[B] = []

    @property
    def current(self) -> B | None:
        """The back end in force, or None."""
        return self._attached[-1] if self._attached else None

    def attach(self, backend: B) -> B:
        """Attach ``backend`` on top of what is attached; returns it."""
        backend.attach()
        self._attached.append(backend)
        return backend

    def detach(self, backend: B | None = None) -> None:
        """Undo the latest :meth:`attach`, or that of ``backend``.

        Raises
        ------
        NotAttachedError
            Where it is not attached.
        """
        if not self._attached or (backend is not None and backend not in self._attached):
            raise NotAttachedError(f"the back end is not attached to {self.package}")
        target = backend or self._attached[-1]
        # what was attached later is put back on top
        above = []
        while self._attached[-1] is not target:
            above.append(self._attached.pop())
            above[-1].detach()
        self._attached.pop().detach()
        for other in reversed(above):
            self.attach(other)

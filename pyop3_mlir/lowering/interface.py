"""What callers of compiled loops have to know of them; needs nothing that makes them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from pyop3_mlir.kernels.program import KernelArgument, Load, LocalKernel, postorder
from pyop3_mlir.lowering.strips import bytes_of_temporaries
from pyop3_mlir.parloop import Kind, LoopSpec

__all__ = ["local_bytes", "reduction_name", "segmented_arguments"]


def segmented_arguments(spec: LoopSpec) -> list[int]:
    """Numbers of the arguments whose contributions the segmented strategy stores before it sums."""
    return [
        number
        for number, argument in enumerate(spec.arguments)
        if argument.access.writes and argument.kind is not Kind.DIRECT
    ]


def reduction_name(argument: int) -> str:
    """Name of the function that sums the contributions of an argument."""
    return f"reduce_{argument}"


_local_bytes: WeakKeyDictionary[LocalKernel, dict[int, int]] = WeakKeyDictionary()


def local_bytes(kernel: LocalKernel, width: int) -> int:
    """Bytes of local memory for a block of cells: the packs that are read, and temporaries."""
    # asked for each time that a loop is bound to arrays, which is often, of the same kernel
    known = _local_bytes.setdefault(kernel, {})
    if width not in known:
        known[width] = _find_local_bytes(kernel, width)
    return known[width]


def _find_local_bytes(kernel: LocalKernel, width: int) -> int:
    read = {
        node.source
        for statement in kernel.statements
        for node in postorder(statement.bodies)
        if isinstance(node, Load) and isinstance(node.source, KernelArgument)
    }
    packs = sum(source.size * source.dtype.itemsize for source in read)
    return packs * width + bytes_of_temporaries(kernel, width)

"""Parts of buffers: IREE's Python interface has none, its virtual machine has."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from pyop3_mlir.runtime import bundle
from pyop3_mlir.runtime.compile import compile_module
from pyop3_mlir.runtime.devices import Device, vm_instance

__all__ = ["SUBVIEW_KEY", "load_subview", "part", "subview_loaded", "subview_module"]

SUBVIEW_KEY = "subview"
"""What a bundle lists the module under."""

_SUBVIEW = """
module @pyop3_mlir_subview {
  util.func public @subview(%view: !hal.buffer_view, %offset: i64, %length: i64, %count: i64,
                            %type: i32) -> !hal.buffer_view
      attributes {iree.abi.stub} {
    %c0 = arith.constant 0 : index
    %o = arith.index_cast %offset : i64 to index
    %l = arith.index_cast %length : i64 to index
    %n = arith.index_cast %count : i64 to index
    %encoding = hal.encoding_type<dense_row_major> : i32
    %buffer = hal.buffer_view.buffer<%view : !hal.buffer_view> : !hal.buffer
    %part = hal.buffer.subspan<%buffer : !hal.buffer>[%o, %l] : !hal.buffer
    %result = hal.buffer_view.create buffer(%part : !hal.buffer)[%c0, %l] shape([%n])
        type(%type) encoding(%encoding) : !hal.buffer_view
    util.return %result : !hal.buffer_view
  }
}
"""


def subview_module(device: Device) -> bytes:
    """The compiled module that :func:`part` needs on a device."""
    bundled = bundle.active()
    found = None if bundled is None else bundled.module(SUBVIEW_KEY, device)
    if found is not None:
        return found
    return compile_module(_SUBVIEW, device, name="subview")


_functions: WeakKeyDictionary[Device, tuple[Any, Any]] = WeakKeyDictionary()


def subview_loaded(device: Device) -> bool:
    """Whether this process has the module already."""
    return device in _functions


def load_subview(device: Device, content: bytes) -> tuple[Any, Any]:
    """Load what :func:`subview_module` gave, here or in another process.

    Returns the context and the function in it.
    """
    import iree.runtime as iree

    module = iree.VmModule.copy_buffer(vm_instance(), content)
    context = iree.VmContext(vm_instance(), modules=[device.hal_module, module])
    found = _functions[device] = context, module.lookup_function("subview")
    return found


def part(memory: Any, offset: int, length: int, device: Device) -> Any:
    """Part of a buffer, on the same memory.

    Parameters
    ----------
    memory
        IREE's ``HalBuffer``.
    offset, length
        First byte, and number of bytes.
    device
        The one that the memory belongs to.

    Returns
    -------
    HalBuffer
        Keeps ``memory`` alive.
    """
    import iree.runtime as iree

    context, function = _functions.get(device) or load_subview(device, subview_module(device))
    element = iree.HalElementType.UINT_8
    arguments, results = iree.VmVariantList(5), iree.VmVariantList(1)
    arguments.push_ref(iree.HalBufferView(memory, [memory.byte_length()], element).ref)
    for number in (offset, length, length, int(element)):
        arguments.push_int(number)
    with device.lock:
        context.invoke(function, arguments, results)
    return results.get_as_object(0, iree.HalBufferView).get_buffer()

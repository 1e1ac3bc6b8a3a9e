"""The devices that loops run on: which there are, what they can do, what to compile for them."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as memoise
from functools import cached_property
from pathlib import Path
from typing import Any

from pyop3_mlir.errors import DeviceError

__all__ = [
    "Device",
    "DeviceInfo",
    "Target",
    "Timeline",
    "available",
    "cpu_device",
    "explain",
    "get_device",
    "gpu_target",
    "offline_device",
]

STACK_LIMIT = 2 * 1024 * 1024
"""Bytes of local memory that a compiled function may hold on the stack."""

WORKER_STACK = 2 * STACK_LIMIT
"""Bytes of stack of IREE's worker threads; its default of 128 KiB holds no block of cells."""

COMMON_FLAGS = (
    "--iree-opt-level=O3",
    # IREE narrows by default, operands and results included
    "--iree-input-demote-f64-to-f32=false",
    "--iree-input-demote-i64-to-i32=false",
    # what -O3 adds for fusing dispatches gives wrong numbers for eliminations (flat batching)
    "--iree-dispatch-creation-enable-aggressive-fusion=false",
)


@dataclass(frozen=True)
class Target:
    """What compiled code depends on.

    Attributes
    ----------
    backend
        IREE's name of the code generator: ``llvm-cpu``, ``cuda``, ``rocm`` or ``vulkan-spirv``.
    name
        Of the processor: model of the CPU, or the GPU architecture compiled for.
    features
        Instruction set extensions of a CPU, as the operating system names them; empty for GPUs.
    flags
        Compiler flags.
    """

    backend: str
    name: str
    features: frozenset[str]
    flags: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest. The flags say ``host``, so this is what tells hosts apart."""
        parts = [self.backend, self.name, *sorted(self.features), *self.flags]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    @property
    def vector_bytes(self) -> int:
        """Width of a vector register of a CPU in bytes; 0 for GPUs."""
        if self.backend != "llvm-cpu":
            return 0
        if "avx512f" in self.features:
            return 64
        return 32 if "avx" in self.features else 16


@dataclass(frozen=True)
class DeviceInfo:
    """A device that exists, or a kind of device and why there is none.

    Attributes
    ----------
    spec
        For :func:`get_device`.
    name
        What the driver calls it.
    memory
        Bytes, or None where unknown.
    f64
        Whether it computes in double precision.
    f64_atomics
        Whether it adds doubles atomically in memory.
    unavailable
        Why it cannot be used; None where it can.
    """

    spec: str
    name: str
    memory: int | None = None
    f64: bool = False
    f64_atomics: bool = False
    unavailable: str | None = None


@dataclass(frozen=True, eq=False)
class Device:
    """A device that is open.

    Attributes
    ----------
    spec
        What :func:`get_device` was asked for, in full (``cuda:0``).
    info
        What it is and can do.
    target
        What to compile for.
    hal
        IREE's ``HalDevice``.
    threads
        Threads that work on one loop; 1 on ``cpu``, 0 on GPUs.
    """

    spec: str
    info: DeviceInfo
    target: Target
    hal: Any
    threads: int
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def name(self) -> str:
        """What the driver calls it."""
        return self.info.name

    @property
    def fingerprint(self) -> str:
        """Tells this device from the process's others, and its target from that of other hosts."""
        return f"{self.spec} {self.target.fingerprint}"

    @property
    def is_host(self) -> bool:
        """Whether the device works on the host's memory in place."""
        return self.target.backend == "llvm-cpu"

    @cached_property
    def timeline(self) -> Timeline:
        """The order of what is submitted to the device without waiting for it."""
        return Timeline(self.hal)

    @cached_property
    def hal_module(self) -> Any:
        """IREE's module of device functions, shared by every executable on this device."""
        import iree.runtime

        return iree.runtime.create_hal_module(vm_instance(), self.hal)

    def __str__(self) -> str:
        return f"{self.spec} ({self.info.name})"


class Timeline:
    """The order in which a device works on what it was given: each waits for the one before.

    Parameters
    ----------
    hal
        IREE's ``HalDevice``.

    Attributes
    ----------
    waits
        How often someone has waited for something, and it was done.
    """

    def __init__(self, hal: Any) -> None:
        self._lock = threading.RLock()
        # in this order: a semaphore must be gone before its device is
        self._semaphore: Any = None
        self._hal = hal
        self._last = 0
        self._waited = 0
        self.waits = 0

    @contextmanager
    def step(self) -> Iterator[tuple[Any, Any]]:
        """Fences to wait for and to signal, for what is submitted inside.

        Where that raises, nothing will ever signal: a new timeline begins.
        """
        import iree.runtime

        with self._lock:
            if self._semaphore is None:
                self._semaphore = self._hal.create_semaphore(0)
                self._last = self._waited = 0
            at = iree.runtime.HalFence.create_at
            try:
                yield at(self._semaphore, self._last), at(self._semaphore, self._last + 1)
            except BaseException:
                self._semaphore = None
                raise
            self._last += 1

    def wait(self) -> None:
        """Wait until all that was submitted is done.

        Raises
        ------
        RuntimeError
            Where some of it failed on the device.
        """
        with self._lock:
            if self._semaphore is None or self._waited == self._last:
                return
            try:
                self._semaphore.wait(self._last)
            except BaseException:
                self._semaphore = None
                raise
            self._waited = self._last
            self.waits += 1


@memoise
def vm_instance() -> Any:
    """IREE's virtual machine, one a process."""
    import iree.runtime

    return iree.runtime.VmInstance()


# -- specifications -------------------------------------------------------------------------------


def _parse(spec: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(cpu|cuda|hip|vulkan)(?::(\d+))?", spec.strip().lower())
    if found is None:
        raise DeviceError(
            f"device {spec!r}: expected cpu, cpu:N (N threads), cuda[:i], hip[:i] or vulkan[:i]"
        )
    kind, number = found[1], found[2]
    if kind == "cpu" and number is not None and not 1 <= int(number) <= 64:
        raise DeviceError(f"device {spec!r}: the number of threads must be between 1 and 64")
    return kind, int(number) if number is not None else (None if kind == "cpu" else 0)


_devices: dict[str, Device] = {}
_lock = threading.RLock()


def _forget_devices() -> None:
    """Start anew in a child process: threads and GPU contexts do not survive a fork."""
    global _lock
    _lock = threading.RLock()
    for device in _devices.values():
        # closing it would wait for threads that only the parent has
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(device.hal))
    _devices.clear()


os.register_at_fork(after_in_child=_forget_devices)


def get_device(spec: str = "cpu") -> Device:
    """Open a device; the same specification gives the same object.

    Parameters
    ----------
    spec
        ``cpu`` (one thread, the caller's), ``cpu:N`` (N threads), ``cuda[:i]``, ``hip[:i]`` or
        ``vulkan[:i]``.

    Raises
    ------
    DeviceError
        Where there is no such device. Names those that there are.
    """
    kind, number = _parse(spec)
    name = kind if number is None else f"{kind}:{number}"
    with _lock:
        if name not in _devices:
            _devices[name] = _open(name, kind, number)
        return _devices[name]


def available() -> list[DeviceInfo]:
    """All devices of this machine, and for each kind without one the reason. Never raises."""
    found = [_cpu_info("cpu"), _cpu_info(f"cpu:{_cores()}")]
    for kind in ("cuda", "hip", "vulkan"):
        try:
            found.extend(_gpus(kind))
        except Exception as error:
            found.append(DeviceInfo(kind, kind, unavailable=explain(error)))
    return found


@contextmanager
def _without_mpi() -> Iterator[None]:
    """Hide from IREE that this process was started by mpiexec.

    Where it sees that, it looks for OpenMPI's symbols to make collective operations of its own
    (IREE issue 22139), and fails with any other MPI. Communication is the caller's business.
    """
    names = ("PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _open(name: str, kind: str, number: int | None) -> Device:
    with _without_mpi():
        return _open_hidden(name, kind, number)


def _open_hidden(name: str, kind: str, number: int | None) -> Device:
    import iree.runtime

    if kind == "cpu":
        info = _cpu_info(name)
        if number is None:
            hal = iree.runtime.get_driver("local-sync").create_default_device()
        else:
            hal = _task_device(number)
        return Device(name, info, host_target(), hal, number or 1)
    try:
        infos = _gpus(kind)
        if number is None or number >= len(infos):
            raise DeviceError(f"there are {len(infos)} {kind} devices")
        driver = iree.runtime.get_driver(kind)
        identifier = driver.query_available_devices()[number]["device_id"]
        hal = driver.create_device(identifier)
        return Device(name, infos[number], _gpu_target(kind, number, infos[number]), hal, 0)
    except Exception as error:
        present = ", ".join(info.spec for info in available() if info.unavailable is None)
        raise DeviceError(
            f"device {name} is not available: {explain(error)}. Available: {present}"
        ) from error


def _task_device(threads: int) -> Any:
    from iree.runtime import _binding, flags

    # IREE reads these process-wide flags when the driver is made
    flags.parse_flags(
        f"--task_topology_group_count={threads}", f"--task_worker_stack_size={WORKER_STACK}"
    )
    return _binding.create_hal_driver("local-task").create_default_device()


def explain(error: Exception) -> str:
    """Return the part of IREE's message that a user can act on."""
    text = re.sub(r"(?:\S*/)?runtime/src/\S+:? ", "", str(error)).strip()
    return (text.splitlines() or [type(error).__name__])[0].rstrip(" :")


# -- CPUs -----------------------------------------------------------------------------------------


@memoise
def host_target() -> Target:
    """The target of this host."""
    name, features = _host_cpu()
    return Target(
        backend="llvm-cpu",
        name=name,
        features=features,
        flags=(
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            "--iree-llvmcpu-target-cpu=host",
            f"--iree-llvmcpu-stack-allocation-limit={STACK_LIMIT}",
            *COMMON_FLAGS,
        ),
    )


_LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
"""What each level adds, in the words of ``/proc/cpuinfo``. Source: x86-64 psABI, section 3.1.1."""


def cpu_device(spec: str, level: str) -> Device:
    """CPUs of a level of the x86-64 architecture, to compile for; nothing can run on it.

    Parameters
    ----------
    spec
        ``cpu`` or ``cpu:N`` (N threads).
    level
        ``x86-64-v2``, ``x86-64-v3`` or ``x86-64-v4``.

    Raises
    ------
    DeviceError
        For another level.
    """
    _, threads = _parse(spec)
    if level not in _LEVELS:
        raise DeviceError(f"{level!r} is no level of CPUs; there are {', '.join(_LEVELS)}")
    names = list(_LEVELS)
    features = " ".join(_LEVELS[name] for name in names[: names.index(level) + 1]).split()
    host = host_target()
    flags = tuple(
        f"--iree-llvmcpu-target-cpu={level}" if "target-cpu=" in flag else flag
        for flag in host.flags
    )
    target = Target(host.backend, level, frozenset(features), flags)
    info = DeviceInfo(f"{spec} {level}", level, None, f64=True, f64_atomics=True)
    return Device(spec, info, target, None, threads or 1)


def _host_cpu() -> tuple[str, frozenset[str]]:
    """Name and instruction set extensions: what decides which code ``host`` means."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    identity = [
        fields[key]
        for key in ("model name", "cpu family", "model", "CPU implementer", "CPU part")
        if key in fields
    ]
    name = " ".join([platform.machine(), *(identity or [platform.processor()])])
    return name, frozenset((fields.get("flags") or fields.get("Features") or "").split())


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return min(len(os.sched_getaffinity(0)), 64)
    except AttributeError:
        return min(os.cpu_count() or 1, 64)


def _cpu_info(spec: str) -> DeviceInfo:
    try:
        memory: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = None
    return DeviceInfo(spec, host_target().name, memory, f64=True, f64_atomics=True)


# -- GPUs -----------------------------------------------------------------------------------------


def _gpus(kind: str) -> list[DeviceInfo]:
    import iree.runtime

    # query() lists what the wheel was built with; get_driver fails where the system has no driver
    devices = iree.runtime.get_driver(kind).query_available_devices()
    if not devices:
        raise DeviceError(f"the {kind} driver finds no device")
    describe: Callable[[int, str], tuple[int | None, bool, bool]] = {
        "cuda": _describe_cuda,
        "hip": _describe_hip,
        "vulkan": _describe_vulkan,
    }[kind]
    infos = []
    for number, device in enumerate(devices):
        try:
            memory, f64, atomics = describe(number, device["name"])
        except (OSError, LookupError, ValueError, AttributeError):
            memory, f64, atomics = None, kind != "vulkan", False
        infos.append(DeviceInfo(f"{kind}:{number}", device["name"], memory, f64, atomics))
    return infos


def _gpu_target(kind: str, number: int, info: DeviceInfo) -> Target:
    if kind == "cuda":
        major, minor = _cuda_capability(number)
        return gpu_target(kind, f"sm_{min(major * 10 + minor, _NEWEST_CUDA)}")
    if kind == "hip":
        return gpu_target(kind, _hip_architectures()[number])
    if not info.f64:
        raise DeviceError("it has no double precision")
    return gpu_target(kind, _vulkan_target(info.name))


# IREE 3.13 refuses sm_90 and later; their drivers compile the PTX of sm_89
_NEWEST_CUDA = 89

_GPU_BACKENDS = {
    "cuda": ("cuda", "--iree-cuda-target="),
    "hip": ("rocm", "--iree-rocm-target="),
    "vulkan": ("vulkan-spirv", "--iree-vulkan-target="),
}


def gpu_target(kind: str, architecture: str) -> Target:
    """What to compile for GPUs of an architecture, whether there is one here or not.

    Parameters
    ----------
    kind
        ``cuda``, ``hip`` or ``vulkan``.
    architecture
        As IREE names it: ``sm_80`` (any newer GPU runs it as well), ``gfx90a``, ``ampere``.

    Raises
    ------
    DeviceError
        For another kind.
    """
    if kind not in _GPU_BACKENDS:
        raise DeviceError(f"{kind!r} is no kind of GPU; there are {', '.join(_GPU_BACKENDS)}")
    backend, flag = _GPU_BACKENDS[kind]
    flags = (
        f"--iree-hal-target-device={kind}",
        flag + architecture,
        # functions take fences, so that calls can follow each other without the host in between
        "--iree-execution-model=async-external",
        *COMMON_FLAGS,
    )
    return Target(backend, architecture, frozenset(), flags)


def offline_device(kind: str, architecture: str) -> Device:
    """A GPU to compile for, which need not be here; nothing can run on it.

    Parameters and errors are those of :func:`gpu_target`.
    """
    name = f"{kind} {architecture}"
    atomics = _has_f64_atomics(kind, architecture)
    info = DeviceInfo(name, architecture, None, f64=True, f64_atomics=atomics)
    return Device(f"{kind}:0", info, gpu_target(kind, architecture), None, 0)


def _has_f64_atomics(kind: str, architecture: str) -> bool:
    if kind == "cuda":
        return int(architecture.removeprefix("sm_")) >= 60
    # IREE has no lowering to Vulkan's atomic addition of doubles
    return kind == "hip" and architecture.startswith(("gfx90a", "gfx94", "gfx95"))


def _library(*names: str) -> ctypes.CDLL:
    for name in names:
        found = ctypes.util.find_library(name) or f"lib{name}.so.1"
        try:
            return ctypes.CDLL(found)
        except OSError:
            continue
    raise OSError(f"none of the libraries {', '.join(names)} is installed")


def _cuda_attribute(number: int, attribute: int) -> int:
    cuda = _library("cuda")
    value = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, number):
        raise OSError("the CUDA driver does not answer")
    return value.value


def _cuda_capability(number: int) -> tuple[int, int]:
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    return _cuda_attribute(number, 75), _cuda_attribute(number, 76)


def _describe_cuda(number: int, _: str) -> tuple[int | None, bool, bool]:
    major, minor = _cuda_capability(number)
    cuda = _library("cuda")
    size = ctypes.c_size_t()
    memory = None if cuda.cuDeviceTotalMem_v2(ctypes.byref(size), number) else size.value
    return memory, True, _has_f64_atomics("cuda", f"sm_{major * 10 + minor}")


@memoise
def _hip_architectures() -> list[str]:
    """Names of the AMD GPUs (gfx90a, ...), in the kernel driver's order."""
    names = []
    for node in sorted(
        Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"),
        key=lambda path: int(path.parent.name),
    ):
        found = re.search(r"^gfx_target_version (\d+)$", node.read_text(), re.MULTILINE)
        if found is not None and int(found[1]):
            version = int(found[1])
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            names.append(f"gfx{major}{minor:x}{step:x}")
    return names


def _describe_hip(number: int, _: str) -> tuple[int | None, bool, bool]:
    name = _hip_architectures()[number]
    return None, True, _has_f64_atomics("hip", name)


def _vulkan_target(name: str) -> str:
    """The nearest target that IREE knows by name and that includes double precision."""
    lower = name.lower()
    if any(vendor in lower for vendor in ("amd", "radeon", "radv")):
        return "rdna3"
    return "ampere"


def _describe_vulkan(number: int, name: str) -> tuple[int | None, bool, bool]:
    devices = _vulkan_devices()
    memory, f64 = next(
        (memory, f64) for found, memory, f64 in devices if found and name.startswith(found)
    )
    return memory, f64, _has_f64_atomics("vulkan", "")


@memoise
def _vulkan_devices() -> list[tuple[str, int, bool]]:
    """Name, bytes of device memory and ``shaderFloat64`` of each Vulkan device.

    IREE's description of a device leaves the last one out. Source: Vulkan 1.3 specification,
    ``VkPhysicalDeviceProperties``, ``VkPhysicalDeviceFeatures``,
    ``VkPhysicalDeviceMemoryProperties``.
    """
    vulkan = _library("vulkan")
    handle = ctypes.c_void_p
    # sType VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, all else zero
    create_info = (ctypes.c_uint64 * 8)(1)
    instance = handle()
    if vulkan.vkCreateInstance(create_info, None, ctypes.byref(instance)):
        raise OSError("no Vulkan instance can be created")
    try:
        count = ctypes.c_uint32()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        devices = (handle * count.value)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
        found = []
        for device in devices:
            properties = ctypes.create_string_buffer(1024)
            features = (ctypes.c_uint32 * 64)()
            heaps = (ctypes.c_uint64 * 128)()
            vulkan.vkGetPhysicalDeviceProperties(handle(device), properties)
            vulkan.vkGetPhysicalDeviceFeatures(handle(device), features)
            vulkan.vkGetPhysicalDeviceMemoryProperties(handle(device), heaps)
            name = properties.raw[20 : 20 + 256].split(b"\0", 1)[0].decode(errors="replace")
            # memoryTypeCount, 32 memory types of 8 bytes, memoryHeapCount, heaps of 16 bytes
            content = bytes(heaps)
            heap_count = int.from_bytes(content[260:264], "little")
            memory = max(
                int.from_bytes(content[264 + 16 * i : 272 + 16 * i], "little")
                for i in range(heap_count)
            )
            found.append((name, memory, bool(features[39])))
        return found
    finally:
        vulkan.vkDestroyInstance(instance, None)

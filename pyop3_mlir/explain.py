"""What becomes of a loop, stage by stage, and why."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp

from pyop3_mlir.autotune.candidates import DeviceTraits, legal_strategies
from pyop3_mlir.autotune.tuner import TuningResult
from pyop3_mlir.engine import choose_schedule, fitting, impossible
from pyop3_mlir.lowering.pipeline import lower
from pyop3_mlir.lowering.schedule import STRATEGIES, Schedule
from pyop3_mlir.options import Options
from pyop3_mlir.parloop import Parloop
from pyop3_mlir.runtime.devices import Device, get_device

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """How a loop runs on a device.

    Attributes
    ----------
    kernel
        The local kernel as a tensor program.
    arguments
        One line an argument: kind, access, shape of the pack, buffer and table.
    device
        Where it runs.
    strategies
        For each scatter strategy why it cannot run this loop; None where it can.
    schedule, reason
        What was chosen, and why.
    result
        The tuner's table, where there is one.
    stages
        MLIR of each stage, by name, in order.
    """

    kernel: str
    arguments: tuple[str, ...]
    device: str
    strategies: dict[str, str | None]
    schedule: Schedule
    reason: str
    result: TuningResult | None
    stages: dict[str, str]


def explain(
    parloop: Parloop,
    device: str | Device | None = None,
    schedule: Schedule | None = None,
    *,
    options: Options | None = None,
) -> Explanation:
    """Lower a loop and keep what each stage looks like; nothing is run but the tuner.

    Parameters
    ----------
    parloop
        The loop.
    device, schedule, options
        As for :func:`pyop3_mlir.engine.compile`.

    Raises
    ------
    UnsupportedLoopError
        Where the loop cannot be lowered; the message says why.
    """
    options = options or Options.resolve()
    if not isinstance(device, Device):
        device = get_device(device or options.device)
    legal = legal_strategies(parloop, DeviceTraits.of(device))
    strategies = {name: legal.get(name) or impossible(parloop, name, device) for name in STRATEGIES}
    reason, result = "given", None
    if schedule is None:
        choice = choose_schedule(parloop, device, options)
        schedule, reason, result = choice.schedule, choice.reason, choice.result
    schedule = fitting(schedule, parloop)
    stages: dict[str, str] = {}

    def keep(name: str, module: ModuleOp) -> None:
        stages[name] = str(module)

    lower(parloop.kernel, parloop.spec, schedule, device.threads, observe=keep)
    return Explanation(
        kernel=str(parloop.kernel),
        arguments=tuple(_describe(parloop, number) for number in range(len(parloop.arguments))),
        device=str(device),
        strategies=strategies,
        schedule=schedule,
        reason=reason,
        result=result,
        stages=stages,
    )


def _describe(parloop: Parloop, number: int) -> str:
    argument, spec = parloop.arguments[number], parloop.spec.arguments[number]
    formal = parloop.kernel.arguments[number]
    text = (
        f"{argument.name}: {spec.kind.value} {spec.access.name}, pack {list(formal.shape)} of "
        f"{argument.buffer.dtype}, buffer {spec.buffer} with {argument.buffer.size} scalars"
    )
    table = argument.table
    if table is not None:
        text += (
            f", table {spec.table} ({table.name}) {table.size} x {table.arity} of "
            f"{table.values.dtype}"
        )
        if table.has_negative:
            text += ", some entries dropped"
    return text

"""The tuner's results as a bar chart. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

from pathlib import Path

from pyop3_mlir.autotune.tuner import Outcome, TuningResult

__all__ = ["bar_chart"]

# Strategies keep their colours from chart to chart; these four differ for the colour-blind too.
_COLOURS = {
    "in_order": "#0072b2",
    "colour": "#e69f00",
    "segmented": "#009e73",
    "atomic": "#cc79a7",
}


def bar_chart(result: TuningResult, path: Path, title: str = "") -> None:
    """Draw the time of every measured candidate, the fastest on top, with its samples as dots.

    Parameters
    ----------
    result
        What the tuner found.
    path
        File to write; its suffix tells the format.
    title
        Above the chart.

    Raises
    ------
    ImportError
        Without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timed = [m for m in result.measurements if m.samples]
    figure = Figure(figsize=(8, 1.2 + 0.28 * max(len(timed), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for position, m in enumerate(timed):
        chosen = m.outcome is Outcome.CHOSEN
        axes.barh(
            position,
            m.seconds * 1e3,
            color=_COLOURS[m.schedule.strategy],
            alpha=1.0 if chosen else 0.55,
            edgecolor="black" if chosen else "none",
        )
        milliseconds = [sample * 1e3 for sample in m.samples]
        axes.plot(milliseconds, [position] * len(milliseconds), ".", color="black", markersize=2)
    axes.set_yticks(range(len(timed)), [str(m.schedule) for m in timed], family="monospace")
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a run (median; dots are samples)")
    axes.set_title(title)
    used = {m.schedule.strategy for m in timed}
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in used]
    if handles:
        axes.legend(handles=handles, loc="upper right")
    figure.savefig(path, dpi=150)

"""The picture of a run: curves.png next to metrics.jsonl, small multiples over the rollouts.

Invariant: it is made of metrics.jsonl alone, so it can be made again at any time; a run without steps has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcrl.report.metrics import measure, read_metrics
from hpcrl.run.rundir import RunDir

#: label -> (rollouts done, values)
Curves = dict[str, tuple[list[float], list[float]]]

COLOURS = ("#1f6fb4", "#d9822b", "#3a9a5b", "#8a5fbf")
MANY = 25  #: from so many points on, a curve is drawn pale with its mean over a window on top


@dataclass(frozen=True)
class Panel:
    """One of the small multiples: which metrics it shows (label -> metric), and how its axis runs.

    A metric with a * stands for a family, whose curves are labelled with what the * matches.
    """

    title: str
    metrics: dict[str, str]
    axis: str = ""  #: "share": 0 to 1 if the values are; "zero": begins at 0; "log"; "": as the values want it
    noise: float = 0.0  #: values that differ by no more than this say nothing


HELD_OUT = Panel("held-out accuracy", {"*": "eval/*/accuracy"}, "share")
PANELS = (
    Panel("reward", {"": "rollout/reward"}, "share"),
    HELD_OUT,
    Panel("response length, tokens", {"": "rollout/response_len/mean"}, "zero"),
    Panel("entropy, nats", {"": "train/entropy_loss"}, "zero"),
    Panel("loss", {"": "train/loss"}, noise=1e-6),
    Panel("token accuracy", {"": "train/token_accuracy"}, "share"),
    Panel("gradient norm", {"": "train/grad_norm"}, "zero"),
    Panel(
        "|trainer - engine| log-prob",
        {"mean": "train/train_rollout_logprob_abs_diff", "max": "train/train_rollout_logprob_abs_diff_max"},
        "log",
    ),
    Panel("tokens sampled per second", {"": "perf/tokens_per_sec"}, "zero"),
    Panel(
        "seconds per step",
        {"all": "perf/step_time", "rollout": "perf/rollout_time", "training": "perf/train_time"},
        "zero",
    ),
)


def series(rows: Sequence[dict[str, Any]], metrics: dict[str, str]) -> Curves:
    """The curves of a panel; records without a (finite) number are left out."""
    curves: Curves = {}
    for row in rows:
        for label, metric in metrics.items():
            before, star, after = metric.partition("*")
            for key in [k for k in row if k.startswith(before) and k.endswith(after)] if star else [metric]:
                if row.get(key) is not None:
                    name = key[len(before) : len(key) - len(after)] if star else label
                    x, y = curves.setdefault(name, ([], []))
                    x.append(row["rollout_id"] + 1)
                    y.append(row[key])
    return curves


def titled(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """PANELS, the one of held-out sets with what its means are."""
    held_out = replace(HELD_OUT, title=f"held-out {measure(rows)}")
    return [held_out if panel is HELD_OUT else panel for panel in PANELS]


def panels_of(rows: Sequence[dict[str, Any]]) -> list[tuple[Panel, Curves]]:
    """The panels that these records have numbers for."""
    found = [(panel, curves) for panel in titled(rows) if (curves := series(rows, panel.metrics))]
    if any(panel.title == "reward" for panel, _ in found):
        # the policy loss is 0 where its ratios are 1: it says nothing
        return [(panel, curves) for panel, curves in found if panel.title != "loss"]
    return found


def smooth(values: Sequence[float]) -> list[float]:
    """Means over a window of about a tenth of the points; it stays centred, so it is shorter towards both ends."""
    most = max(len(values) // 20, 2)
    halves = [min(i, len(values) - 1 - i, most) for i in range(len(values))]
    return [sum(values[i - half : i + half + 1]) / (2 * half + 1) for i, half in enumerate(halves)]


def draw(rundir: RunDir, title: str = "") -> bool:
    """Draw curves.png; False if there is nothing to draw, matplotlib is not installed, or the disk is full."""
    panels = panels_of(list(read_metrics(rundir.metrics_file)))
    if not panels:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines = -(-len(panels) // 4)
    columns = -(-len(panels) // lines)
    last = max(x[-1] for _, curves in panels for x, _ in curves.values())
    figure = Figure(figsize=(3.5 * columns, 2.5 * lines + 0.5), dpi=110, layout="constrained")
    figure.suptitle(title or rundir.root.name, fontsize=12)
    for number, (panel, curves) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, number)
        _plot(axes, panel, curves)
        axes.set_xlim(-0.03 * last - 0.1, 1.03 * last + 0.1)
        if number > len(panels) - columns:
            axes.set_xlabel("rollouts", fontsize=9)
    return _save(FigureCanvasAgg(figure), rundir.root / "curves.png")


def _save(canvas: Any, path: Path) -> bool:
    """Written next to it, then renamed: during a run, a viewer sees a whole picture."""
    beside = path.with_name(f".{path.name}")
    try:
        canvas.print_png(str(beside))
        beside.replace(path)
    except OSError:  # it can be drawn again; what went wrong with the run must not be hidden by it
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        return False
    return True


def _plot(axes: Any, panel: Panel, curves: Curves) -> None:
    for colour, (label, (x, y)) in zip(COLOURS * len(curves), curves.items(), strict=False):
        if len(x) < MANY:
            axes.plot(x, y, marker="o", markersize=3, linewidth=1.5, color=colour, label=label)
        else:
            axes.plot(x, y, linewidth=0.8, color=colour, alpha=0.35)
            axes.plot(x, smooth(y), linewidth=1.7, color=colour, label=label)
    axes.set_title(panel.title, fontsize=10)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    values = [value for _, y in curves.values() for value in y]
    _scale(axes, panel.axis, min(values), max(values))
    if panel.axis == "share" and len(values) < MANY and "*" in panel.metrics:
        _name_ends(axes, curves)
    if len(curves) > 1:
        axes.legend(fontsize=8, frameon=False, loc="best")


def _scale(axes: Any, axis: str, low: float, high: float) -> None:
    if axis == "log" and low > 0:
        axes.set_yscale("log")
        axes.set_ylim(low / 3, high * 3)  # noise within a factor of two is to look like noise
    elif axis == "share" and low >= 0 and high <= 1:
        axes.set_ylim(0, 1.03)
    elif axis == "zero" and low >= 0 and high > 0:
        axes.set_ylim(0, high * 1.08)


def _name_ends(axes: Any, curves: Curves) -> None:
    """Write the first and the last value next to their points: they are what a run is judged by."""
    for x, y in curves.values():
        place = {"xytext": (6, -4), "ha": "left"}
        for i in sorted({0, len(x) - 1}):
            axes.annotate(f"{y[i]:.2f}", (x[i], y[i]), textcoords="offset points", fontsize=8, **place)
            place = {"xytext": (0, -12), "ha": "center"}

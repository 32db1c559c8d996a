"""The picture of a run: curves.png beside metrics.jsonl, small multiples over the rollouts.

Invariant: it is made of metrics.jsonl alone, so it can be made again at any time; a run without steps has none.
"""

from __future__ import annotations

from typing import Any

from hpcrl.report.metrics import read
from hpcrl.rundir import RunDir

Points = tuple[list[float], list[float]]

#: title -> (metric, whether the axis is logarithmic)
PANELS: dict[str, tuple[str, bool]] = {
    "reward": ("rollout/reward", False),
    "held-out accuracy": ("eval/", False),
    "response length, tokens": ("rollout/response_len/mean", False),
    "entropy": ("train/entropy_loss", False),
    "loss": ("train/loss", False),
    "gradient norm": ("train/grad_norm", False),
    "|trainer - engine| log-prob": ("train/train_rollout_logprob_abs_diff", True),
    "tokens sampled per second": ("perf/tokens_per_sec", False),
    "seconds per step": ("perf/step_time", False),
}


def series(rows: list[dict[str, Any]], metric: str) -> dict[str, Points]:
    """label -> (rollouts done, values); `eval/` gives one curve a held-out set."""
    curves: dict[str, Points] = {}
    for row in rows:
        for key, value in row.items():
            if metric == "eval/" and key.startswith("eval/") and key.endswith("/accuracy"):
                label = key.split("/")[1]
            elif key == metric:
                label = ""
            else:
                continue
            x, y = curves.setdefault(label, ([], []))
            x.append(row["rollout_id"] + 1)
            y.append(value)
    return curves


def draw(rundir: RunDir, title: str = "") -> bool:
    """Draw curves.png; False if there is nothing to draw, matplotlib is not installed, or the disk is full."""
    rows = list(read(rundir.metrics_file))
    panels = {name: (series(rows, metric), log) for name, (metric, log) in PANELS.items()}
    panels = {name: (curves, log) for name, (curves, log) in panels.items() if curves}
    if "reward" in panels:  # with one optimizer step a rollout the policy loss is 0 but for rounding
        panels.pop("loss", None)
    if not panels:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * lines + 0.5), layout="constrained")
    figure.suptitle(title or rundir.root.name, fontsize=12)
    for number, (name, (curves, log)) in enumerate(panels.items(), 1):
        _panel(figure.add_subplot(lines, columns, number), name, curves, log)
    try:
        FigureCanvasAgg(figure).print_png(str(rundir.root / "curves.png"))
    except OSError:  # it can be drawn again; what went wrong with the run must not be hidden by it
        return False
    return True


def _panel(axes: Any, name: str, curves: dict[str, Points], log: bool) -> None:
    for label, (x, y) in curves.items():
        axes.plot(x, y, marker="o" if len(x) < 25 else "", markersize=3, linewidth=1.3, label=label)
    axes.set_title(name, fontsize=10)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if log and all(value > 0 for _, y in curves.values() for value in y):
        axes.set_yscale("log")
    if any(curves):
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel("rollouts", fontsize=8)

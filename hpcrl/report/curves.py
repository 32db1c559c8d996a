"""Which curves a run has, from metrics.jsonl alone; `page/charts.py` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrl.report.metrics import measure

#: label -> (rollouts done, values)
Curves = dict[str, tuple[list[float], list[float]]]

MANY = 25  #: from so many points on, a curve is drawn pale with its mean over a window on top


@dataclass(frozen=True)
class Panel:
    """One of the small multiples: which metrics it shows (label -> metric), and how its axis runs.

    A metric with a * stands for a family, whose curves are labelled with what the * matches. Only a * at
    the end of a metric matches a slash.
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
                name = key[len(before) : len(key) - len(after)] if star else label
                if row.get(key) is not None and not (after and "/" in name):
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

"""Which pictures of its numbers a run has, and which of them stay flat.

Invariant: whatever a run logs is in one of the panels, its own metrics up to MOST of them; a panel whose values stay
the same is no picture, but a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hpcrl.report.curves import Curves, Panel, series, titled
from hpcrl.utils.untrusted_files import read_given

#: drawn in any case
ALWAYS = ("reward", "held-out accuracy", "held-out reward")
MOST = 40  #: panels of the user's own metrics
#: what the page shows in addition to the panels of curves.svg
MORE = (
    Panel("groups whose rewards are all equal", {"": "rollout/zero_std"}, "share"),
    Panel("idle share", {"trainer": "perf/wait_time_ratio", "engines": "perf/engine_idle_ratio"}, "share"),
    Panel("staleness, policy versions", {"mean": "staleness/mean", "max": "staleness/max"}, "zero"),
    Panel("share of tokens by age, policy versions", {"*": "staleness/share/*"}, "share"),
    Panel(
        "tokens per second and GPU",
        {
            "sampled": "perf/tokens_per_sec_per_gpu",
            "trained": "perf/train_tokens_per_sec_per_gpu",
            "whole step": "perf/step_tokens_per_sec_per_gpu",
        },
        "log",
    ),
    Panel("MFU of training", {"": "perf/mfu"}, "share"),
    Panel("requests in flight", {"mean": "perf/requests_in_flight", "max": "perf/requests_in_flight_max"}, "zero"),
    Panel(
        "seconds of a weight update",
        {"all": "perf/update_weights_time", "engines pause": "perf/update_weights_pause_time"},
        "zero",
    ),
    Panel("responses cut off", {"": "rollout/truncated_ratio"}, "share"),
    Panel(
        "sandboxes, mean over a rollout",
        {"in use": "sandbox/used", "warm": "sandbox/warm", "being made": "sandbox/making"},
        "zero",
    ),
    Panel("seconds until a sandbox is ready", {"": "sandbox/wait_time"}, "zero"),
    Panel("failures in sandboxes", {"*": "sandbox/failures/*"}, "zero"),
    Panel("drafted tokens that were accepted", {"": "rollout/spec_accept_rate"}, "share"),
)

#: metrics that hpcrl itself logs, those of a held-out set without eval/NAME/ before them
_OURS = re.compile(
    r"rollout_id|time|policy_version|(?:data|perf|sandbox|train|staleness)/.*|rollout/(?:reward|raw_reward|reward_errors|reward_timeouts|"
    r"truncated_ratio|unknown_ratio|zero_std|opd_teacher_errors|opd_reverse_kl|requests_limit|unsampled_tokens|spec_accept_(?:rate|length)|(?:ref_|teacher_)?log_probs|values|advantages|returns|"
    r"response_len/.*|reward/.*|groups_.*|dynamic_filter/.*)"
)
_OURS_HELD_OUT = re.compile(
    r"accuracy|right_or_wrong|ci_low|ci_high|n|dropped|response_len|reward_errors|reward_timeouts|truncated_ratio|policy_version.*|majority@\d+|"
    r"pass@\d+|reward/.*"
)


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """Every panel that these records may have numbers for, in the order of the page."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    failed = [name for name in names if re.fullmatch(r"(?:rollout|eval/.+)/reward_(?:errors|timeouts)", name)]
    failing = {name.removesuffix("s"): name for name in failed if any(row.get(name) for row in rows)}
    found = [*titled(rows), Panel("parts of the reward", {"*": "rollout/reward/*"}), *_of_sets(names), *MORE]
    if failing:
        of = {name.replace("/reward_", " "): metric for name, metric in failing.items()}
        found.append(Panel("failed gradings", of, "zero"))
    return found + [Panel(name, {"": name}) for name in own_metrics(names)[:MOST]]


def own_metrics(names: Sequence[str]) -> list[str]:
    """The metrics among these that hpcrl does not log by itself: of the user's own functions."""
    return [name for name in names if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    if name.startswith("eval/") and name.count("/") > 1:
        return _OURS_HELD_OUT.fullmatch(name.split("/", 2)[2]) is not None
    return _OURS.fullmatch(name) is not None


def _of_sets(names: Sequence[str]) -> list[Panel]:
    """Of each held-out set the parts of its reward, and pass@k with the majority's accuracy."""
    found = []
    for name_of_set in dict.fromkeys(name.split("/")[1] for name in names if name.startswith("eval/")):
        found.append(Panel(f"{name_of_set}: parts of the reward", {"*": f"eval/{name_of_set}/reward/*"}))
        rates = [name for name in names if re.fullmatch(rf"eval/{re.escape(name_of_set)}/(?:pass|majority)@\d+", name)]
        found.append(
            Panel(f"{name_of_set}: pass@k, majority@n", {name.rpartition("/")[2]: name for name in rates}, "share")
        )
    return found


# ---- flat ones


def drawn_and_flat(found: Sequence[dict[str, Any]]) -> tuple[list[tuple[Panel, Curves]], list[tuple[str, str]]]:
    """(panels to be drawn, with their curves; (panel, its values) of those that stay the same)."""
    shown = [(panel, curves) for panel in panels(found) if (curves := series(found, panel.metrics))]
    flat = [(panel.title, values(curves)) for panel, curves in shown if is_flat(panel, curves.values())]
    return [(panel, curves) for panel, curves in shown if not is_flat(panel, curves.values())], flat


def is_flat(panel: Panel, curves: Iterable[tuple[list[float], list[float]]]) -> bool:
    """Whether no curve says more than its last value does."""
    return panel.title not in ALWAYS and all(max(y) - min(y) <= panel.noise for _, y in curves)


def values(curves: Curves) -> str:
    """The value of each curve."""
    return ", ".join(f"{label} {y[-1]:.4g}".strip() for label, (_, y) in curves.items())


# ---- the templates next to this file
#
# Whatever is filled in is escaped, unless it is a picture of ours; a name that a template uses and does not get is an
# error.


def render(name: str, **values: object) -> str:
    """The HTML of a template."""
    loader = jinja2.FunctionLoader(lambda name: read_given(Path(__file__).with_name(name)))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name).render(values)

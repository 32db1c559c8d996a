"""What the report draws of a stage: the panels of curves.png, more of hpcrl's own metrics, and whatever else the run
has logged.

Invariant: pure functions of the records; a metric of the user's own is drawn, whatever its name, up to MOST of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpcrl.report.curves import PANELS, Panel

MOST = 40  #: panels of the user's own metrics
#: what the page shows beside the panels of curves.png
MORE = (
    Panel("groups whose rewards are all alike", {"": "rollout/zero_std"}, "share"),
    Panel("idle share", {"trainer": "perf/wait_time_ratio", "engines": "perf/engine_idle_ratio"}, "share"),
    Panel("staleness, policy versions", {"mean": "staleness/mean", "max": "staleness/max"}, "zero"),
    Panel("share of tokens by age, policy versions", {"*": "staleness/share/*"}, "share"),
    Panel("requests in flight", {"mean": "perf/requests_in_flight", "max": "perf/requests_in_flight_max"}, "zero"),
    Panel("seconds of a weight update", {"all": "perf/update_weights_time", "engines pause": "perf/update_weights_pause_time"}, "zero"),
    Panel("responses cut off", {"": "rollout/truncated_ratio"}, "share"),
)  # fmt: skip

#: metrics that hpcrl itself logs, those of a held-out set without eval/NAME/ before them
_OURS = re.compile(
    r"rollout_id|time|policy_version|(?:data|perf|train|staleness)/.*|rollout/(?:reward|raw_reward|reward_errors|reward_timeouts|"
    r"truncated_ratio|zero_std|opd_teacher_errors|opd_reverse_kl|requests_limit|(?:ref_|teacher_)?log_probs|values|advantages|returns|"
    r"response_len/.*|reward/.*|groups_.*|dynamic_filter/.*)"
)
_OURS_HELD_OUT = re.compile(
    r"accuracy|ci_low|ci_high|n|dropped|response_len|reward_errors|reward_timeouts|truncated_ratio|policy_version.*|majority@\d+|"
    r"pass@\d+|reward/.*"
)


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """Every panel that these records may have numbers for, in the order of the page."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    failed = [name for name in names if re.fullmatch(r"(?:rollout|eval/.+)/reward_(?:errors|timeouts)", name)]
    failing = {name.removesuffix("s"): name for name in failed if any(row.get(name) for row in rows)}
    found = [*PANELS, Panel("parts of the reward", {"*": "rollout/reward/*"}), *_of_sets(names), *MORE]
    if failing:
        found.append(
            Panel(
                "failed gradings", {name.replace("/reward_", " "): metric for name, metric in failing.items()}, "zero"
            )
        )
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
    for held_out in dict.fromkeys(name.split("/")[1] for name in names if name.startswith("eval/")):
        found.append(Panel(f"{held_out}: parts of the reward", {"*": f"eval/{held_out}/reward/*"}))
        rates = [name for name in names if re.fullmatch(rf"eval/{re.escape(held_out)}/(?:pass|majority)@\d+", name)]
        found.append(
            Panel(f"{held_out}: pass@k, majority@n", {name.rpartition("/")[2]: name for name in rates}, "share")
        )
    return found

"""How a run was run: where, with which versions, from which commit, with which options.

Invariant: what a file does not say, because it is damaged, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hostlist import BadHostlist, collect_hostlist

from hpcrl.config.options import Options
from hpcrl.plan import Plan
from hpcrl.report.run_files import Run, StageFiles, load_json
from hpcrl.report.sample_view import visible
from hpcrl.run.started_runs import RECIPE, RecipeFile

Rows = list[tuple[str, str]]


def how_it_ran(run: Run) -> dict[str, Any]:
    """What the page shows of it: facts, and for each stage its options that are not the defaults."""
    begun = load_json(run.root / RECIPE, RecipeFile, [])
    facts: Rows = []
    if begun is not None:
        facts.append(("recipe", visible(begun.path)))
        if begun.commit:
            facts.append(("commit", visible(begun.commit)))
        if begun.overrides:
            facts.append(("set by flags", visible(", ".join(f"{k} = {shown(v)}" for k, v in begun.overrides.items()))))
    if run.stages:
        facts += _of_last(run.stages[-1])
    stages = [(visible(stage.name), rows) for stage in run.stages if (rows := differing(options_of(stage)))]
    return {"facts": facts, "stages": stages}


def _of_last(stage: StageFiles) -> Rows:
    """Hosts, devices and versions, as the last attempt had them."""
    rows: Rows = []
    if (plan := load_json(stage.here / "plan.json", Plan, [])) is not None:
        for role, places in (("trainer", plan.trainers), ("engines", plan.engines)):
            if places:
                hosts = [place.host for place in places]
                rows.append((f"hosts of {role}", visible(_short(hosts))))
    if (begun := stage.trainer_record) is not None:
        rows += [("device", visible(begun.device or "CPU"))]
        if begun.versions:
            rows.append(("versions", visible(", ".join(f"{name} {v}" for name, v in begun.versions.items()))))
    return rows


def _short(hosts: list[str]) -> str:
    """Hosts as Slurm writes them."""
    try:
        return str(collect_hostlist(sorted(set(hosts))))
    except BadHostlist:
        return ", ".join(dict.fromkeys(hosts))


def options_of(stage: StageFiles) -> dict[str, Any]:
    """The resolved options of a stage, by name; {} where they are not there."""
    return load_json(stage.root / "options.json", dict[str, Any], []) or {}


def differing(found: Mapping[str, Any]) -> Rows:
    """The options of a stage that are not the defaults, as TOML has them."""
    fields = Options.model_fields
    return [
        (visible(name), visible(shown(value)))
        for name, value in sorted(found.items())
        if name not in fields
        or value != json.loads(json.dumps(fields[name].get_default(call_default_factory=True), default=str))
    ]


def shown(value: Any) -> str:
    """A value as a recipe has it, in one line; nothing for none."""
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)

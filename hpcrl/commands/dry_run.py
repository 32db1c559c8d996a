"""What `--dry-run` prints on this machine.

Invariant: nothing is written and nothing is started; what the run would refuse at once is refused here.
"""

from __future__ import annotations

from typing import Any

from hpcrl.config.recipe import Recipe, changed, resolve_stages
from hpcrl.config.setting_names import spell
from hpcrl.plan import local_hosts, make_plan
from hpcrl.prompt_files.early_look import look_at
from hpcrl.run.gpu_environment import for_this_machine


def preview(recipe: Recipe, overrides: dict[str, Any]) -> str:
    """What `--dry-run` prints: for each stage the plan, and the options that differ from their defaults."""
    parts, overrides = [], for_this_machine(recipe, overrides)
    options = resolve_stages(recipe, overrides, {"run": "{run}", "prepared": "{run}/prepared"})
    look_at(options)
    for stage, resolved in zip(recipe.stages, options, strict=True):
        plan = make_plan(resolved, local_hosts(resolved), "dry-run")
        rows = "\n".join(f"{name} = {spell(value)}" for name, value in changed(resolved))
        title = f"stage {stage.name} of {recipe.name}" if stage.name else recipe.name
        parts.append(f"# {title}\n{plan.table()}\n\n{rows}")
    return "\n\n".join(parts)

"""`hpcrl eval`: held-out sets of a recipe, of a checkpoint or of a Hugging Face model, as a separate run that trains
nothing.

Invariant: the run is an ordinary one, of a recipe with num_rollout = 0 that is in its directory: it is watched,
stopped, resumed and submitted like any other.  What the recipe says of training is left out, and what a flag says is
not.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrl.cli.plan import preview
from hpcrl.cli.recipe_argument import choose_recipe
from hpcrl.cli.submit import OWN as SUBMIT
from hpcrl.cli.submit import submit_recipe
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage, load_recipe
from hpcrl.config.rules.option_rules import inert
from hpcrl.config.sections.algorithm import AlgorithmOptions, OffPolicyOptions, OptimizerOptions
from hpcrl.config.setting_names import spell
from hpcrl.config.stage_flags import flags_of, split_name, stage_flag
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError
from hpcrl.launch.job import directory_of
from hpcrl.report.metrics import evaluated, read_metrics
from hpcrl.run.owners import refuse_foreign
from hpcrl.run.role import read_options
from hpcrl.run.rundir import TRACKER, RunDir
from hpcrl.utils.untrusted_files import as_given

USAGE = """\
usage: hpcrl eval [RECIPE.toml] [--load CHECKPOINT] [--option value ...] [--dry-run]
       hpcrl eval RUN | CHECKPOINT [--option value ...]      a run, its checkpoints or one of them (.../iter_0000100)
       hpcrl eval HF-DIR --eval-prompt-data NAME PATH --rm-type math --input-key prompt --label-key label ...
       hpcrl eval ... --site NAME                            as a batch job, with the flags of hpcrl submit

Samples and grades the held-out sets of --eval-prompt-data or --eval-config, trains nothing, and prints the results.
Options are those of hpcrl run; training options of a recipe or a run are ignored. It takes the last stage of a recipe
that evaluates, or the last one of a run that has begun; without arguments, recipe.toml of this directory."""

#: options of the sections that say how to train, and what else makes no sense without training
_TRAINING = {
    *(name for section in (AlgorithmOptions, OffPolicyOptions, OptimizerOptions) for name in section.__annotations__),
    *["num_rollout", "num_epoch", "prompt_data", "data_source_path", "skip_eval_before_train", "rejected_key"],
    *["rollout_shuffle", "run_dir", "name", "save", "save_interval", "async_save", "save_retain_interval"],
    *["save_keep_last", "ref_load", "non_persistent_save_interval"],
}
_STEP = re.compile(r"iter_(\d+)")


def evaluate(argv: list[str]) -> int:
    """The command."""
    overrides, own, words = parse_flags(argv, SUBMIT | {"submit": Kind("bool")})
    if "print" in own:
        raise UsageError("--print has no effect here", "--site NAME --dry-run prints the script")
    recipe, overrides = recipe_for(Path(choose_recipe(words, None, "hpcrl eval")), overrides)
    recipe = replace(recipe, name=overrides.get("name", recipe.name))
    if own.pop("submit", False) or own.keys() - {"dry-run"}:
        return submit_recipe(recipe, overrides, own)
    if own.get("dry-run"):
        preview(recipe, overrides)
        return 0
    from hpcrl.launch.local import run_recipe

    root = directory_of(recipe, overrides)
    status = run_recipe(recipe, overrides | {"run_dir": str(root)}, None)
    for line in found(root):
        print(line)
    return status


def found(root: Path) -> list[str]:
    """The results of an evaluation, a line a set."""
    rows = [row for row in read_metrics(root / "metrics.jsonl") if evaluated(row)]
    sets: dict[str, dict[str, float]] = {}
    for key, value in rows[-1].items() if rows else ():
        if key.startswith("eval/"):
            name, _, what = key.removeprefix("eval/").partition("/")
            sets.setdefault(name, {})[what] = value
    lines = []
    for name, values in sorted(sets.items()):
        ci = f"({values['ci_low']:.3f} to {values['ci_high']:.3f})" if values.get("ci_low") is not None else ""
        parts = [f"{values['accuracy']:.3f} {ci}".strip()] if "accuracy" in values else []
        parts += [f"{what} {value:.3f}" for what, value in values.items() if "@" in what]
        parts += [f"truncated {values['truncated_ratio']:.3f}"] if "truncated_ratio" in values else []
        parts += [f"{values['n']:.0f} responses"] if "n" in values else []
        parts = parts or [f"{what} {value:.3f}" for what, value in sorted(values.items())]  # a custom function's
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


# ---- what is evaluated


def recipe_for(what: Path, overrides: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """The recipe of an evaluation of `what`, and the flags for it.

    Raises:
        UsageError: says why there is none.
    """
    if what.suffix == ".toml":
        recipe = load_recipe(what)
        evaluating = [stage for stage in recipe.stages if "eval_interval" in recipe.values | stage.values]
        stage = (evaluating or recipe.stages)[-1]
        overrides = _flags_for(recipe, stage, overrides)
        return _of_recipe(recipe, stage, overrides), overrides
    if not what.is_dir():
        raise UsageError(
            f"{what} is neither a recipe (.toml) nor a directory", "name a recipe, a checkpoint or a model"
        )
    if (what / "config.json").is_file():
        return _recipe(as_given(what).name, what, (), {"hf_checkpoint": str(as_given(what))}, overrides), dict(
            overrides
        )
    return _of_checkpoint(as_given(what), overrides), dict(overrides)


def _flags_for(recipe: Recipe, stage: Stage, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as those of a recipe of this stage alone: plain ones count in it.

    Raises:
        UsageError: for those of another stage.
    """
    of_stages = {name: value for name, value in overrides.items() if split_name(name)[0]}
    recipe.check_flags(of_stages)
    for name in of_stages:
        if split_name(name)[0] != stage.name:
            shown = stage_flag(*split_name(name))
            raise UsageError(
                f"{shown} has no effect here: stage {stage.name} of {recipe.path.name} is evaluated", "leave it out"
            )
    return flags_of(overrides, stage.name)


def _of_recipe(recipe: Recipe, stage: Stage, overrides: Mapping[str, Any]) -> Recipe:
    values = recipe.values | stage.values
    start = str(overrides.get("load") or values.get("load") or "")
    if "{run}" in start:
        raise UsageError(
            f"stage {stage.name} of {recipe.path.name} starts from {start}, which another stage makes",
            "give --load CHECKPOINT, or name the run that trained it: hpcrl eval RUN",
        )
    return _recipe(recipe.name, recipe.path, recipe.prepare, values, overrides)


def _of_checkpoint(what: Path, overrides: Mapping[str, Any]) -> Recipe:
    """Of a run, of the folder of its checkpoints, or of one of them."""
    step = _STEP.fullmatch(what.name)
    folder = what.parent if step else what
    run = next((path for path in (what, *what.parents[:2]) if (path / "options.json").is_file()), None)
    stages = [path.parent for path in what.glob("*/options.json")] if run is None else []
    if stages:
        run = max(stages, key=lambda path: (path / "options.json").stat().st_mtime)
    if run is None:
        if not (folder / TRACKER).is_file():
            raise UsageError(
                f"{what} holds no run, no checkpoint and no Hugging Face model",
                f"it has no options.json, {TRACKER} or config.json",
            )
        values: dict[str, Any] = {}
    else:
        refuse_foreign(run)  # its options name functions, variables and engines' settings
        values = _changed(read_options(RunDir(run)))
        if folder == run or folder == run.parent:
            folder = Path(values.get("save") or run / "checkpoints")
    values |= {"load": str(folder)} | ({"ckpt_step": int(step[1])} if step else {})
    if not step:
        values.pop("ckpt_step", None)
    name = f"{(run or what).name}-{what.name}" if step else (run or what).name
    return _recipe(name, what, (), values, overrides)


def _changed(said: Options) -> dict[str, Any]:
    """What options say otherwise than the defaults."""
    defaults = {name: field.get_default(call_default_factory=True) for name, field in Options.model_fields.items()}
    plain = json.loads(said.model_dump_json())
    return {name: value for name, value in plain.items() if getattr(said, name) != defaults[name]}


# ---- the recipe that is made of it


def _recipe(name: str, path: Path, prepare: Any, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Recipe:
    """A recipe that evaluates, of what is left of `values` without training."""
    left = {key: value for key, value in values.items() if key not in _TRAINING and value is not None}
    left |= {"num_rollout": 0, "eval_interval": 1}
    with contextlib.suppress(ValidationError):  # resolving the recipe reports it better
        for key in inert(Options.model_validate(left | overrides)).keys() & left.keys() - overrides.keys():
            del left[key]
    if not (left | overrides).keys() & {"eval_prompt_data", "eval_config"}:
        raise UsageError("no held-out set given", "give --eval-prompt-data NAME PATH, or --eval-config")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name}-eval")
    text = recipe_text(name, prepare, left)
    return Recipe(name, as_given(path), left, tuple(prepare), (Stage("", {}),), text)


def recipe_text(name: str, prepare: Any, values: Mapping[str, Any]) -> str:
    """The recipe's file."""
    lines = ["# made by hpcrl eval", f"name = {spell(name)}"]
    lines += [f"prepare = {spell([list(command) for command in prepare])}"] if prepare else []
    tables = {key: value for key, value in values.items() if key in ("megatron", "vllm")}
    lines += [f"{key} = {_toml(value)}" for key, value in values.items() if key not in tables]
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{spell(inner)} = {_toml(value)}" for inner, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML writes it: as JSON, except tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spell(key)} = {_toml(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return spell(value)

"""A recipe, with the flags that go before it -> Options.

    name = "quickstart"                      # keys are options, with underscores; [megatron] and [vllm] are tables
    prepare = ["{python}", "{recipe}/arithmetic.py", "--out", "{prepared}"]
    lr = 1e-5
    [[stage]]                                # stages run one after another, each in RUN/<name>/
    name = "sft"
    loss_type = "sft_loss"

A flag goes before the stage's table, which goes before the top of the recipe.  Placeholders in text: {prepared} is
RUN/prepared, {recipe} the recipe's directory, {run} the run directory, {python} this interpreter; in `prepare` also any
option by its name, such as {seed}.  Invariant: pure functions; whatever they return has been checked as a whole.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.config.custom_functions import ours
from hpcrl.config.custom_settings import with_own_settings
from hpcrl.config.module_search import FunctionFile, function_files, with_function_files
from hpcrl.config.options import Options
from hpcrl.config.passthrough import flag
from hpcrl.config.plugin_points import POINTS
from hpcrl.config.rules.option_rules import build_options, check_options, inert
from hpcrl.config.rules.run import check_run_dir
from hpcrl.config.setting_names import gather, own, spell
from hpcrl.config.stage_flags import check_stages, flags_of, split_name, stage_flag
from hpcrl.errors import UsageError, parts_of, raise_together
from hpcrl.utils.shipped_files import copy_hint
from hpcrl.utils.untrusted_files import as_given, parse_toml, read_given

_STRUCTURE = ("prepare", "stage")  #: keys of a recipe that are not options
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_TAKEN = {
    "prepared",
    "code",
    "live-code",
    "keys",
    "attempts",
    "logs",
    "checkpoints",
    "samples",
    "tensorboard",
}  #: names inside a run directory


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe: its name ("" in a recipe without stages) and the options that it sets."""

    name: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A recipe: where it came from (absolute), the options for all stages, the commands to run first, the stages.

    Attributes:
        text: of a recipe that was given without a file, what its file would hold; None: it is the file at `path`.
        files: of a recipe that a run was begun with, what each FILE.py:FUNCTION was then (`files_of`).
    """

    name: str
    path: Path
    values: dict[str, Any]
    prepare: tuple[tuple[str, ...], ...]
    stages: tuple[Stage, ...]
    text: str | None = None
    files: Mapping[str, FunctionFile] = field(default_factory=dict)

    def prepare_commands(
        self, run: Path, overrides: Mapping[str, Any], python: str = sys.executable
    ) -> list[list[str]]:
        """The prepare commands for the run directory `run`, placeholders filled in.

        Args:
            python: the interpreter where they run.
        """
        known = {name: field.get_default(call_default_factory=True) for name, field in Options.model_fields.items()}
        known |= {**self.values, "name": self.name, **overrides}
        places = {k: str(v) for k, v in known.items() if isinstance(v, (str, int, float))}
        places |= self.places({"run": str(run), "prepared": str(run / "prepared")}) | {"python": python}
        return [[_fill(word, places) for word in command] for command in self.prepare]

    def check_flags(self, flags: Mapping[str, Any]) -> None:
        """Raise UsageError for flags of stages that the recipe lacks."""
        check_stages(flags, [stage.name for stage in self.stages], self.path.name)

    def options_set(self, flags: Mapping[str, Any]) -> set[str]:
        """The options that recipe or flags set, for whichever stage."""
        return {
            *self.values,
            *(split_name(name)[1] for name in flags),
            *(key for stage in self.stages for key in stage.values),
        }

    def places(self, given: Mapping[str, str]) -> dict[str, str]:
        """All placeholders, given those that depend on the run."""
        return {**given, "recipe": str(self.path.parent), "python": sys.executable}


# ---- the recipe


def load_recipe(path: str | Path, origin: Path | None = None) -> Recipe:
    """Read a recipe; every name and type in it is checked.

    Args:
        origin: where the recipe was, if `path` is a copy of it: {recipe} is its directory.

    Raises:
        UsageError: names file and key.
    """
    file = Path(path)
    try:
        document = parse_toml(read_given(file))
    except OSError as error:
        raise UsageError(
            f"cannot read the recipe {file}: {error.strerror}", _neighbour(file) or copy_hint(file)
        ) from error
    except ValueError as error:  # no UTF-8 either
        raise UsageError(f"{file} is not TOML: {error}") from error
    except RecursionError:
        raise UsageError(f"{file} is nested too deep to be a recipe") from None
    top = {key: value for key, value in document.items() if key not in _STRUCTURE}
    values = gather(top, file.name, _STRUCTURE)
    source = as_given(origin or file)
    name = values.pop("name", source.stem)
    prepare = tuple(_prepare(document.get("prepare", []), file.name))
    stages = tuple(_stages(document.get("stage", []), file.name))
    return Recipe(name, source, values, prepare, stages or (Stage("", {}),))


def _neighbour(file: Path) -> str:
    """A recipe next to a missing file, whose name may have been meant."""
    try:
        names = sorted(path.name for path in file.parent.glob("*.toml"))
    except OSError:
        return ""
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.8)
    return f"did you mean {file.with_name(near[0])}?" if near and near[0] != file.name else ""


def _prepare(value: Any, where: str) -> Iterator[tuple[str, ...]]:
    """A command, or a list of commands."""
    commands = [value] if isinstance(value, list) and value and isinstance(value[0], str) else value
    if not isinstance(commands, list):
        raise UsageError(
            f"{where}: prepare = {spell(value)}: expected a command, or a list of commands, each a list of words"
        )
    for command in commands:
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            raise UsageError(f"{where}: prepare: {spell(command)} is not a command", "write it as a list of words")
        yield tuple(command)


def _stages(value: Any, where: str) -> Iterator[Stage]:
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise UsageError(f"{where}: stage is not a list of tables", "begin each stage with [[stage]]")
    seen: set[str] = set()
    for number, table in enumerate(value, 1):
        name = table.get("name")
        if not isinstance(name, str) or not _STAGE_NAME.match(name) or name in _TAKEN or name in seen:
            shown = "has no name" if name is None else f"cannot be named {spell(name)}"
            raise UsageError(
                f"{where}: stage {number} {shown}",
                "every stage needs a name of its own, valid as a directory",
            )
        seen.add(name)
        if "run_dir" in table:
            raise UsageError(
                f"{where}: stage {name}: run_dir has no effect",
                "a stage's directory is in the run's, under its own name",
            )
        yield Stage(name, gather({k: v for k, v in table.items() if k != "name"}, f"{where}: stage {name}"))


# ---- together


def resolve_stages(recipe: Recipe, overrides: Mapping[str, Any], places: Mapping[str, str]) -> tuple[Options, ...]:
    """The options of every stage, checked, with placeholders filled in.

    Args:
        overrides: what the flags set.
        places: values of {run} and {prepared}. An option that has no effect is an error if a stage itself sets it, or a
            flag for this stage does, or if it is set for all stages and has an effect in none of them.

    Raises:
        UsageError: names the stage.
    """
    recipe.check_flags(overrides)
    everywhere = recipe.places(places)
    built = tuple(_build(recipe, stage, overrides, everywhere) for stage in recipe.stages)
    plain = [name for name in overrides if not split_name(name)[0]]
    shared = {*recipe.values, *plain}.intersection(*map(inert, built))
    for stage, options in zip(recipe.stages, built, strict=True):
        own_flags = [split_name(name)[1] for name in overrides if stage.name and split_name(name)[0] == stage.name]
        try:
            check_options(options, [*stage.values, *own_flags, *sorted(shared)])
        except UsageError as error:
            if not stage.name:
                raise
            raise_together([UsageError(f"stage {stage.name}: {part.what}", part.hint) for part in parts_of(error)])
    return built


def files_of(recipe: Recipe, overrides: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, FunctionFile]:
    """What each FILE.py:FUNCTION of the stages is, by its text; for the run that is begun now, and `Recipe.files`."""
    everywhere = recipe.places(places)
    found: dict[str, FunctionFile] = {}
    for stage in recipe.stages:
        values = _expand(_merged(recipe, stage, overrides), everywhere)
        found |= function_files(values, POINTS)
    return found | dict(recipe.files)


def _build(recipe: Recipe, stage: Stage, flags: Mapping[str, Any], places: Mapping[str, str]) -> Options:
    """Merge and validate, without looking at what options say together."""
    merged = _merged(recipe, stage, flags)
    if isinstance(merged.get("run_dir"), str):
        check_run_dir(merged["run_dir"])
    settled = with_own_settings(_expand(merged, places), Options.model_fields)
    spread = isinstance(vllm := settled.get("vllm"), dict) and vllm.get("enable_expert_parallel")
    limits = {"engine_start_timeout": 3600.0} if spread else {}  # a first start compiles kernels of experts
    if isinstance(factor := settled.get("timeout_factor"), int | float) and factor > 0:
        names = ("engine_start_timeout", "update_timeout", "request_timeout")
        limits = {name: factor * limits.get(name, Options.model_fields[name].default) for name in names}
    settled = limits | settled
    merged = with_function_files(settled, POINTS, recipe.files)
    return build_options(merged, lambda name: f"{_origin(recipe, stage, flags, name)} {spell(merged[name])}")


def _merged(recipe: Recipe, stage: Stage, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a stage, as they are written."""
    merged: dict[str, Any] = {"name": recipe.name}
    for values in (recipe.values, stage.values, flags_of(flags, stage.name)):
        tables = {key: {**merged.get(key, {}), **values[key]} for key in ("megatron", "vllm") if key in values}
        merged |= {**values, **tables}
    return {name: _own_path(name, value) for name, value in merged.items()}


def _own_path(name: str, value: Any) -> Any:
    """The value of an option, a path of slime's or vime's as ours; None for what is done without the option anyway."""
    if not name.endswith("_path"):
        return value
    if isinstance(value, list):
        return [ours(item, flag(name)) if isinstance(item, str) else item for item in value]
    return ours(value, flag(name)) or None if isinstance(value, str) else value


def _origin(recipe: Recipe, stage: Stage, flags: Mapping[str, Any], name: str) -> str:
    """Where the value of an option comes from, for an error."""
    if stage.name and f"{stage.name}.{name}" in flags:
        return stage_flag(stage.name, name)
    if name in flags or recipe.text is not None:
        return flag(name)
    inside = f": stage {stage.name}" if name in stage.values else ""
    return f"{recipe.path.name}{inside}: {name} ="


def _fill(text: str, places: Mapping[str, str]) -> str:
    """Replace the known placeholders; other braces stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: places.get(match[1], match[0]), text)


def _expand(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _fill(value, places)
    if isinstance(value, list):
        return [_expand(item, places) for item in value]
    if isinstance(value, dict):
        return {key: _expand(item, places) for key, item in value.items()}
    return value


def changed(options: Options) -> Iterable[tuple[str, Any]]:
    """The options that differ from their defaults, in the order of options.py, with the tables' fields last."""
    for target in own().values():
        value = getattr(options, target.field)
        default = Options.model_fields[target.field].get_default(call_default_factory=True)
        if target.fixed is False or value == default:
            continue
        if target.field in ("megatron", "vllm"):
            yield from ((f"{target.field}.{key}", item) for key, item in value.items())
        else:
            yield target.field, value

"""The grid of a sweep: `--sweep OPTION=V1,V2,...` and `--seeds N` -> the flags and the name of each of its runs.

Invariants: pure functions.  A value is read as the option's own flag reads it, so that a run of a sweep is the run that
these flags would have started; no two runs have the same flags, or the same name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.passthrough import dashed
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.several_adapters import OWN
from hpcrl.config.setting_names import find_flag
from hpcrl.config.stage_flags import TABLES, leaves, split_name, stage_flag
from hpcrl.config.value_types import shown_value
from hpcrl.errors import UsageError

#: characters that a directory's name has of a value
UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
LONGEST = 120  #: characters of a run's name
SEEDS = ("seed", "rollout_seed")  #: what --seeds counts up
#: options that the runs of a sweep cannot differ in -> why
KEPT = {
    "run-dir": "every run of a sweep has its own directory below that of --run-dir",
    "name": "the runs of a sweep have their recipe's name",
}


@dataclass(frozen=True)
class Axis:
    """One option that is swept.

    Attributes:
        option: as its flag has it, without the dashes: "lr", "grpo.lr".
        given: the flag that sweeps it, for messages.
        values: what it takes, in order.
        flags: what its flag sets for each of them, by option as `parse_flags` has it.
    """

    option: str
    given: str
    values: tuple[Any, ...]
    flags: tuple[dict[str, Any], ...]

    @property
    def places(self) -> set[tuple[str, ...]]:
        """The options that it sets, those of Megatron's and vLLM's by table and field."""
        return {path for flags in self.flags for path, _ in leaves(flags)}


@dataclass(frozen=True)
class GridRun:
    """One run of a sweep.

    Attributes:
        name: of its directory: "lr=1e-06,seed=2".
        values: by swept option.
        flags: all of the run's flags, those of the command line among them.
    """

    name: str
    values: dict[str, Any]
    flags: dict[str, Any]


def read_axis(text: str) -> Axis:
    """`lr=1e-6,2e-6`, or of a switch `use-kl-loss=true,false`.

    Raises:
        UsageError: as the option's own flag would for a value; for less than two values, or one twice.
    """
    name, equals, values = text.partition("=")
    name = name.removeprefix("--")
    given, words = f"--sweep {text}", values.split(",")
    if not equals or not name or "" in words:
        raise UsageError(f"{given}: expected OPTION=VALUE,VALUE,...", "for example --sweep lr=1e-6,2e-6")
    stage, option = split_name(dashed(name))
    if option in KEPT:
        raise UsageError(f"{given}: {stage_flag(stage, option)} cannot be swept", KEPT[option])
    try:
        read = [_read(stage, option, word) for word in words]
    except UsageError as error:
        raise UsageError(f"{given}: {error.what}", error.hint) from None
    if len(words) == 1:
        raise UsageError(f"{given} has one value", f"write {stage_flag(stage, option)} {words[0]}")
    flags = tuple(each for _, each in read)
    for number, word in enumerate(words):
        if flags[number] in flags[:number]:
            raise UsageError(f"{given}: {word} is there twice", "leave it out")
    return Axis(f"{stage}.{option}" if stage else option, f"--sweep {name}", tuple(value for value, _ in read), flags)


def _read(stage: str, option: str, word: str) -> tuple[Any, dict[str, Any]]:
    """(the value, what the option's flag sets with it).

    Of a switch true or false: false sets the contrary of what the flag does, or nothing where it has none.
    """
    target = find_flag(option, stage=stage)
    if target.fixed is None:
        flags = parse_flags([f"{stage_flag(stage, option)}={word}"])[0]
        return next(value for _, value in leaves(flags)), flags
    if positive := _positive(option):
        raise UsageError(f"--{option} has no values", f"write --sweep {positive}=true,false")
    if word not in ("true", "false"):
        raise UsageError(f"{stage_flag(stage, option)} {word}: expected true or false")
    if word == "false" and not isinstance(target.fixed, bool):
        return False, {}
    said = target.fixed if word == "true" else not target.fixed
    name = f"{stage}." if stage else ""
    if target.table:
        return word == "true", {f"{name}{target.table}": {target.field: said}}
    return word == "true", {f"{name}{target.field}": said}


def _positive(option: str) -> str:
    """The switch that this one turns off, by its name; "" if it is none, or there is no such switch."""
    positive = re.sub(r"^(vllm-)?no-", r"\1", option)
    try:
        return positive if positive != option and find_flag(positive) else ""
    except UsageError:
        return ""


def seed_axis(recipe: Recipe, flags: Mapping[str, Any], count: int) -> Axis:
    """The seeds of `count` runs, from that of the recipe or its flag on; --rollout-seed counts up with --seed.

    Raises:
        UsageError: for less than two, or where stages have seeds of their own.
    """
    if count < 2:
        raise UsageError(f"--seeds {count} is no sweep", "give 2 or more, or leave it out; --seed N sets a run's seed")
    own = [stage.name for stage in recipe.stages if stage.name and not stage.values.keys().isdisjoint(SEEDS)]
    own += [stage for stage, option in map(split_name, flags) if stage and option in SEEDS]
    if own:
        raise UsageError(
            f"--seeds: stage {own[0]} has a seed of its own", f"write --sweep {own[0]}.seed=1,2 or leave it out there"
        )
    first = {name: flags.get(name, recipe.values.get(name, Options.model_fields[name].default)) for name in SEEDS}
    found = tuple({name: value + number for name, value in first.items()} for number in range(count))
    return Axis("seed", "--seeds", tuple(each["seed"] for each in found), found)


def grid(axes: Sequence[Axis], flags: Mapping[str, Any]) -> list[GridRun]:
    """Every combination of the axes' values, the last axis fastest, with the other flags of the command line.

    Raises:
        UsageError: for an option that is swept twice, or is also given as a flag.
    """
    taken = {path: _flag_of(path) for path, _ in leaves(flags)}
    for axis in axes:
        starts = {(name,) for name in SEEDS if name in flags} if axis.given == "--seeds" else set[tuple[str, ...]]()
        if twice := sorted((axis.places - starts) & taken.keys()):
            raise UsageError(f"{axis.given} and {taken[twice[0]]} set the same option", "leave one of them out")
        taken |= dict.fromkeys(axis.places, axis.given)
    runs = []
    for chosen in itertools.product(*(range(len(axis.values)) for axis in axes)):
        values, own = {}, dict(flags)
        for axis, number in zip(axes, chosen, strict=True):
            values[axis.option] = axis.values[number]
            own = _merged(own, axis.flags[number])
        runs.append(GridRun(run_name(values), values, own))
    return _told_apart(runs)


def sweep_axes(recipe: Recipe, flags: Mapping[str, Any], own: Mapping[str, Any]) -> list[Axis]:
    """What --sweep and --seeds ask for, among a command's own flags.

    Raises:
        UsageError: as `read_axis` and `seed_axis`.
    """
    axes = [read_axis(text) for text in own.get("sweep", [])]
    return [*axes, seed_axis(recipe, flags, own["seeds"])] if "seeds" in own else axes


def with_adapters(recipe: Recipe, flags: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of one run that trains what a sweep would train as its adapters (--as-adapters).

    Args:
        own: the command's own flags.

    Raises:
        UsageError: for what no adapter can have of its own, and a recipe with stages, or with adapters.
    """
    if not (axes := sweep_axes(recipe, flags, own)):
        raise UsageError("--as-adapters has no effect without a sweep", "give --sweep or --seeds")
    if any(stage.name for stage in recipe.stages) or "adapter" in {*recipe.values, *flags}:
        has = "adapters of its own" if "adapter" in {*recipe.values, *flags} else "stages"
        raise UsageError(f"--as-adapters: {recipe.path.name} has {has}", "leave --as-adapters out")
    tables = {}
    for run in grid(axes, flags):
        tables[run.name] = {
            name: value for name, value in run.flags.items() if name not in flags or flags[name] != value
        }
        if shared := sorted(tables[run.name].keys() - OWN):
            raise UsageError(
                f"--as-adapters: {_flag_of((shared[0],))} cannot be swept, all adapters share it",
                "leave --as-adapters out: each value then has a run of its own",
            )
    return {**flags, "adapter": tables}


def _flag_of(path: tuple[str, ...]) -> str:
    """The flag that sets what `leaves` has as this path."""
    stage, option = split_name(path[0])
    if len(path) == 1:
        return stage_flag(stage, option)
    return stage_flag(stage, f"vllm-{path[1]}" if option == "vllm" else path[1])


def _merged(flags: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Flags with more of them, Megatron's and vLLM's by field."""
    tables = {name: {**flags.get(name, {}), **value} for name, value in more.items() if split_name(name)[1] in TABLES}
    return {**flags, **more, **tables}


# ---- names


def run_name(values: Mapping[str, Any]) -> str:
    """The directory's name: lr=1e-06,seed=2."""
    return ",".join(f"{option}={UNSAFE.sub('-', shown_value(value))}" for option, value in values.items())


def _told_apart(runs: list[GridRun]) -> list[GridRun]:
    """The runs, with their number before names that are too long for a directory or not unique."""
    names = [run.name for run in runs]
    if len({*names}) == len(names) and max(map(len, names)) <= LONGEST:
        return runs
    return [replace(run, name=f"{number},{run.name[:LONGEST]}") for number, run in enumerate(runs)]

"""Which stages of a recipe a flag counts in.

    --lr 2e-5         in every stage
    --grpo.lr 2e-5    --STAGE.option: in that stage, before the plain flag

Flags are kept as one dict: {"seed": 7, "grpo.lr": 2e-5, "grpo.megatron": {...}}.  Invariant: pure functions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcrl.config.passthrough import dashed
from hpcrl.errors import UsageError, raise_together

TABLES = ("megatron", "vllm")
OF_THE_RUN = ("run_dir", "name")  #: which no stage has of its own
Values = Mapping[str, Any]


def split_name(name: str) -> tuple[str, str]:
    """(stage, option) of a flag's name, with dashes or underscores; stage "" for a plain flag."""
    stage, _, option = name.rpartition(".")
    return stage, option


def stage_flag(stage: str, option: str) -> str:
    """The flag that sets an option in one stage, or in general for stage ""."""
    return f"--{stage}.{dashed(option)}" if stage else f"--{dashed(option)}"


def check_stages(flags: Values, stages: Sequence[str], recipe: str) -> None:
    """Raise UsageError for flags of stages that the recipe does not have.

    Args:
        stages: their names; [""] for a recipe without stages.
        recipe: its file, for an error.
    """
    raise_together([wrong for name in flags if split_name(name)[0] and (wrong := _misplaced(name, stages, recipe))])


def replace_flags(flags: Values, others: Values) -> dict[str, Any]:
    """The flags and `others`, which take the place of those of the same option: a plain one in every stage."""
    found: dict[str, Any] = {}
    new = {(*split_name(path[0]), *path[1:]) for path, _ in leaves(others)}
    for path, value in leaves(flags):
        stage, option = split_name(path[0])
        if not new & {("", option, *path[1:]), (stage, option, *path[1:])}:
            _put(found, path, value)
    for path, value in leaves(others):
        _put(found, path, value)
    return found


def flags_of(flags: Values, stage: str) -> dict[str, Any]:
    """What flags set in one stage, by option."""
    found: dict[str, Any] = {}
    for within in ("", stage):
        for path, value in leaves(flags):
            of, option = split_name(path[0])
            if of == within:
                _put(found, (option, *path[1:]), value)
    return found


def leaves(values: Values) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(name,) and value; of the tables of Megatron and vLLM (table, name) and value."""
    for name, value in values.items():
        if split_name(name)[1] in TABLES:
            yield from (((name, key), item) for key, item in value.items())
        else:
            yield (name,), value


def _put(found: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    if len(path) > 1:
        found.setdefault(path[0], {})[path[1]] = value
    else:
        found[path[0]] = value


def _misplaced(name: str, stages: Sequence[str], recipe: str) -> UsageError | None:
    """What is wrong with the flag of one stage."""
    stage, option = split_name(name)
    shown = stage_flag(stage, option)
    if "" in stages:
        return UsageError(f"{shown}: {recipe} has no stages", f"write {stage_flag('', option)}")
    if stage not in stages:
        near = difflib.get_close_matches(stage, stages, n=1)
        hint = f"did you mean {stage_flag(near[0], option)}?" if near else f"its stages are {', '.join(stages)}"
        return UsageError(f"{shown}: {recipe} has no stage {stage}", hint)
    if option in OF_THE_RUN:
        return UsageError(
            f"{shown} has no effect: a stage's directory is in the run's, under its own name", "leave it out"
        )
    return None

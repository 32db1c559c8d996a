"""Which stages of a recipe a flag counts in.

    --grpo.lr 2e-5    --STAGE.option: in that stage
    --lr 2e-5         in the stages whose own tables name lr; in all, if none does
    --lr 2e-5         an error where several stages name lr with different values: --sft.lr or --grpo.lr

Flags are kept as one dict: {"seed": 7, "grpo.lr": 2e-5, "grpo.megatron": {...}}.  Invariant: pure functions.
`place_flags` is its own fixed point: a plain name that it leaves counts in all stages, so a run directory that holds
its result resumes the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
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


def place_flags(flags: Values, stages: Mapping[str, Values], recipe: str) -> dict[str, Any]:
    """The flags, each plain one under the stages that it counts in, or plain if it counts in all.

    Args:
        stages: what each stage's own table sets; {"": ...} for a recipe without stages.
        recipe: its file, for an error.

    Raises:
        UsageError: a stage that the recipe does not have; a plain flag that several stages name with different values.
    """
    staged = {name: value for name, value in flags.items() if split_name(name)[0]}
    wrong = [problem for name in staged if (problem := _misplaced(name, list(stages), recipe))]
    found: dict[str, Any] = {}
    for path, value in leaves({name: value for name, value in flags.items() if name not in staged}):
        naming = [stage for stage, values in stages.items() if stage and path in dict(leaves(values))]
        if len({repr(dict(leaves(stages[stage]))[path]) for stage in naming}) > 1:
            wrong.append(_ambiguous(path[-1], naming, recipe))
        for stage in naming or [""]:
            _put(found, stage, path, value)
    raise_together(wrong)
    for path, value in leaves(staged):
        _put(found, "", path, value)
    return found


def reach(flags: Values, stages: Mapping[str, Values]) -> list[str]:
    """A line for each plain flag that counts in several stages, with what sets the option in one of them."""
    if len(stages) < 2:
        return []
    lines = []
    for path, _ in leaves({name: value for name, value in flags.items() if not split_name(name)[0]}):
        if path[0] in OF_THE_RUN:
            continue
        naming = [stage for stage, values in stages.items() if path in dict(leaves(values))]
        shown = f"vllm_{path[-1]}" if path[0] == "vllm" and len(path) > 1 else path[-1]
        if len(naming) != 1:
            counts = " and ".join(naming) if naming else f"all stages, {', '.join(stages)}"
            lines.append(
                f"{stage_flag('', shown)} counts in {counts}; {stage_flag(list(naming or stages)[-1], shown)} in one"
            )
    return lines


def spread_flags(flags: Values, stages: Mapping[str, Values]) -> dict[str, Any]:
    """Flags whose plain names count in all stages, so that `place_flags` leaves them as they are.

    What `place_flags` made comes back unchanged; so do the flags of a run directory from before there was STAGE.option.
    """
    found: dict[str, Any] = {}
    for path, value in leaves(flags):
        named = any(stage and path in dict(leaves(values)) for stage, values in stages.items())
        for stage in stages if named else [""]:
            _put(found, stage, path, value)
    return found


def replace_flags(flags: Values, others: Values) -> dict[str, Any]:
    """Placed flags and `others`, which take the place of those of the same option: a plain one in every stage."""
    found: dict[str, Any] = {}
    new = {(*split_name(path[0]), *path[1:]) for path, _ in leaves(others)}
    for path, value in leaves(flags):
        stage, option = split_name(path[0])
        if not new & {("", option, *path[1:]), (stage, option, *path[1:])}:
            _put(found, "", path, value)
    for path, value in leaves(others):
        _put(found, "", path, value)
    return found


def flags_of(flags: Values, stage: str) -> dict[str, Any]:
    """What placed flags set in one stage, by option."""
    found: dict[str, Any] = {}
    for within in ("", stage):
        for path, value in leaves(flags):
            of, option = split_name(path[0])
            if of == within:
                _put(found, "", (option, *path[1:]), value)
    return found


def leaves(values: Values) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(name,) and value; of the tables of Megatron and vLLM (table, name) and value."""
    for name, value in values.items():
        if split_name(name)[1] in TABLES:
            yield from (((name, key), item) for key, item in value.items())
        else:
            yield (name,), value


def _put(found: dict[str, Any], stage: str, path: tuple[str, ...], value: Any) -> None:
    name = f"{stage}.{path[0]}" if stage else path[0]
    if len(path) > 1:
        found.setdefault(name, {})[path[1]] = value
    else:
        found[name] = value


def _misplaced(name: str, stages: list[str], recipe: str) -> UsageError | None:
    """What is wrong with the flag of one stage."""
    stage, option = split_name(name)
    shown = stage_flag(stage, option)
    if stages == [""]:
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


def _ambiguous(option: str, naming: list[str], recipe: str) -> UsageError:
    shown = [stage_flag(stage, option) for stage in naming]
    every = "both to set both" if len(shown) == 2 else "all of them to set all"
    return UsageError(
        f"{stage_flag('', option)}: {len(shown)} stages of {recipe} set it, to different values",
        f"write {' or '.join([', '.join(shown[:-1]), shown[-1]])}, or {every}",
    )

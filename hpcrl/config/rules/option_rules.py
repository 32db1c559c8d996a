"""Options of a user's values, each of its own type and range, and every rule on what they must say together, in order.

A file of `sections/` declares the options of a topic, the file of the same name here says what they go together with:
pure functions of the resolved options.
Invariant: a combination that cannot run, or an option that would have no effect in it, ends here as one UsageError that
names the flags; nothing was started.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ValidationError

from hpcrl.config.options import Options
from hpcrl.config.passthrough import flag
from hpcrl.config.rules import (
    adapters,
    algorithm,
    data,
    layout,
    passed_through,
    run,
    sampling,
    sandboxes,
    schedules,
)
from hpcrl.config.setting_names import kind_of_field, spell
from hpcrl.errors import UsageError, failures, raise_together

_RULES = (
    run.check_needed,
    run.check_saving,
    run.check_attempts,
    data.check_prompts,
    sampling.check_sampling,
    sampling.check_filling,
    data.check_rewards,
    data.check_evaluation,
    run.check_weights,
    run.check_looking,
)
_COUNTS = (
    layout.check_ranks,
    layout.check_virtual_stages,
    layout.check_engines,
    layout.check_sharing,
    layout.check_external,
    sandboxes.check_sandboxes,
)
_PASSED_THROUGH = (
    passed_through.check_passed_through,
    passed_through.check_engine_settings,
    sampling.check_speculation,
)
_STEPS = (
    algorithm.check_algorithm,
    algorithm.check_distillation,
    adapters.check_adapters,
    schedules.check_schedules,
    run.check_loop,
)
_INERT = (
    algorithm.inert_in_algorithm,
    algorithm.inert_in_distillation,
    adapters.inert_in_adapters,
    run.inert_in_run,
    data.inert_in_data,
    sampling.inert_in_sampling,
    layout.inert_in_sharing,
    layout.inert_in_layout,
    schedules.inert_in_schedules,
    layout.inert_in_external,
    sandboxes.inert_in_sandboxes,
)


def build_options(values: Mapping[str, Any], shown: Callable[[str], str] | None = None) -> Options:
    """Options of these values, each of its own type and within its own range.

    Args:
        shown: how an error names an option's value; default: as a flag.

    Raises:
        UsageError: every value that is out of range or of another type.
    """
    try:
        return Options.model_validate(dict(values), strict=True)
    except ValidationError as error:
        raise_together([_misfit(problem, values, shown) for problem in error.errors()])
        raise  # never: there is one problem at least


def _misfit(problem: Any, values: Mapping[str, Any], shown: Callable[[str], str] | None) -> UsageError:
    name = str(problem["loc"][0])
    wrong = problem["msg"] if len(problem["loc"]) > 1 else f"expected {kind_of_field(Options.model_fields[name])}"
    return UsageError(f"{shown(name) if shown else f'{flag(name)} {spell(values[name])}'}: {wrong}")


def check_options(options: Options, given: Collection[str] | None = None) -> None:
    """Raise UsageError for all that is wrong with these options.

    Args:
        given: the options that the user has set and whose lack of effect is an error; default: all that were set.
    """
    counts = failures(_COUNTS, options)
    wrong = failures(_RULES, options) + counts + failures(_PASSED_THROUGH, options)
    batches = [] if counts else failures((layout.check_batches,), options)
    wrong += batches + failures((layout.check_packing,), options)
    if not counts and not batches:  # the others count ranks and steps, which must be whole numbers first
        wrong += failures(_STEPS, options)
    raise_together(wrong)
    without = inert(options)
    names = sorted(options.model_fields_set) if given is None else given
    raise_together(
        [
            UsageError(f"{flag(name)} has no effect here: {without[name]}", "leave it out")
            for name in names
            if name in without
            and getattr(options, name) != Options.model_fields[name].get_default(call_default_factory=True)
        ]
    )


def inert(o: Options) -> dict[str, str]:
    """Options that do nothing in this combination -> why."""
    return {name: why for rule in _INERT for names, why in rule(o) for name in names.split()}

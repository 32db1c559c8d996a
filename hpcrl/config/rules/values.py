"""Options of values that a user gave, each of its own type and within its own range.

Invariant: all that is wrong with them is one error, which names each option as the user has written it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from hpcrl.config.options import Options
from hpcrl.config.passthrough import flag
from hpcrl.config.setting_names import kind_of_field, spell
from hpcrl.errors import UsageError, raise_together


def build_options(values: Mapping[str, Any], shown: Callable[[str], str] | None = None) -> Options:
    """Options of these values, without looking at what they say together.

    Args:
        shown: how an error names an option's value.

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

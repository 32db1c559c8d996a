"""`slime.rollout.rm_hub`: hpcrl's rewards under slime's names, for functions that grade by themselves.

Invariant: the same answers are right as with --rm-type; what a grader returns has slime's shape (a number, dapo's
object with `score`, `acc` and `pred`).
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hpcrl.config.custom_functions import load_object, settled
from hpcrl.config.plugin_names import read_words
from hpcrl.rollout.answers.labels import boxed, is_right

STRICT = 100  #: characters at the end that a strict box is looked for in
INVALID = "[INVALID]"  #: dapo's prediction where there is no answer


async def async_rm(args: Any, sample: Any, **more: Any) -> Any:
    """The reward of a response: by the sample's or the run's own function, or by --rm-type; several with weights are
    one number."""
    own = getattr(sample, "custom_rm_path", None) or args.custom_rm_path
    if own:
        return await settled(load_object(own, "custom_rm_path")(args, sample, **more))
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    chosen = metadata.get("rm_type") or args.rm_type
    if not chosen:
        raise ValueError("no --rm-type is given for this sample")
    words = read_words(chosen)
    found = [await _grade(word, args, sample) for word in words]
    if len(found) == 1 and words[0].weight == 1:
        return found[0]
    return sum(
        word.weight * float(value["score"] if isinstance(value, dict) else value)
        for word, value in zip(words, found, strict=True)
    )


async def batched_async_rm(args: Any, samples: Sequence[Any], **more: Any) -> Any:
    """The rewards of several responses; a function of the run's own is given all of them, as in slime."""
    if args.custom_rm_path:
        return await settled(load_object(args.custom_rm_path, "custom_rm_path")(args, samples, **more))
    return await asyncio.gather(*(async_rm(args, sample, **more) for sample in samples))


async def remote_rm(args: Any, sample: Any, max_retries: int = 10) -> Any:
    """What the server at --rm-url answers."""
    from hpcrl.rollout.rewards.remote_rm import reward

    return await reward(args, sample)


async def _grade(word: Any, args: Any, sample: Any) -> Any:
    if not word.file:
        return await settled(load_object(word.name, "rm_type")(args, sample))
    module = importlib.import_module(f"hpcrl.rollout.rewards.{word.file}")
    if word.boxed:
        content = boxed(sample.response)
        text = "" if content is None else getattr(module, "boxed", str)(content)
        sample = _shown(text, sample.label, sample.metadata, sample.prompt)
    return await settled(module.reward(args, sample))


def _shown(response: str, label: Any, metadata: Any = None, prompt: Any = "") -> Any:
    """What a reward looks at."""
    return SimpleNamespace(response=response, label=label, metadata=metadata or {}, prompt=prompt, reward=None)


def _reward(name: str, *given: Any) -> Any:
    return importlib.import_module(f"hpcrl.rollout.rewards.{name}").reward(None, _shown(*given))


# ---- single graders


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """dapo's object: by the last line `Answer: ...`; strictly, by whether the last box says the label letter by
    letter."""
    if not strict_box_verify:
        found = _reward("dapo", solution_str, ground_truth)
        return {"score": found["score"], "acc": bool(found["acc"]), "pred": found["pred"] or INVALID}
    pred = boxed(solution_str[-STRICT:])
    right = pred is not None and pred == str(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 if the box behind the thoughts is right, else 0."""
    return int(_reward("deepscaler", response, label))


def compute_gpqa_reward(response: str, label: Any, metadata: Any = None) -> float:
    """Whether the right choice was made."""
    return float(_reward("gpqa", response, label, metadata))


def compute_ifbench_reward(response: str, label: Any, metadata: Any = None) -> float:
    """Whether the instructions were followed."""
    return float(_reward("ifbench", response, label, metadata))


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of the words."""
    from hpcrl.rollout.rewards.f1 import scores

    return scores(prediction, ground_truth)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the last box of a response is right."""
    return bool(ground_truth) and is_right(boxed(solution_str), ground_truth)


def same_answer(given_answer: str, ground_truth: str) -> bool:
    """Whether an answer, without a box, is the right one."""
    return is_right(given_answer, ground_truth)


def extract_answer(passage: str) -> str | None:
    """What stands in the last box."""
    return boxed(passage)


def last_boxed_only_string(string: str) -> str | None:
    """The last box, with what boxes it."""
    content = boxed(string)
    return None if content is None else f"\\boxed{{{content}}}"


def remove_boxed(string: str) -> str | None:
    """What stands in a box."""
    return boxed(string)

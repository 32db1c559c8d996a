r"""--rm-type gpqa: 1 if the response chooses the right letter of a multiple-choice question, else 0 (slime's `gpqa`).

The right letter is metadata's correct_letter, or the label: a letter, its number from 0, or the text of one of
metadata's choices.  The choice is read after the last </think>: a boxed letter, else the last that is called the
answer, else the last letter that stands alone.  A response that names no letter is right if it holds the text of the
right choice.
"""

from __future__ import annotations

import re
import string
from typing import Any

from hpcrl.config.options import Options
from hpcrl.rollout.answers.labels import boxed as find_boxed
from hpcrl.sample import Sample

NEEDS_LABEL = False
_SAID = re.compile(
    r"\b(?:answer|option|choice)\b(?:\s+is\b)?\s*(?::|=)?\s*(?:\\text\s*\{)?[*(\[{\s\"']*([A-Z])\b(?!['’][a-z])"
    r"|(?<![\w'’])[(*]*([A-Z])[)*]*\s+is\s+(?:the\s+)?(?:correct|right)\b",
    re.IGNORECASE,
)
_ALONE = re.compile(r"(?<![\w'’])([A-Z])(?![\w'’])")
_INSIDE = re.compile(r"(?:\\text[a-z]*\s*\{)?\s*\(?([A-Za-z])\)?[.:]?\s*\}?")


def reward(options: Options, sample: Sample) -> float:
    choices = _choices(sample.metadata)
    letters = _letters(sample.metadata, choices)
    right = _right_letter(sample.label, sample.metadata, choices, letters)
    response = sample.response.rpartition("</think>")[2]
    if right is not None and (chosen := choice(response, letters)) is not None:
        return float(chosen == right)
    said = f" {_plain(response)} "
    return float(any(f" {text} " in said for text in _right_texts(sample, right, choices, letters)))


def _choices(metadata: dict[str, Any]) -> list[str]:
    found = metadata.get("choices") or []
    return [str(text) for text in (found.values() if isinstance(found, dict) else found)]


def _letters(metadata: dict[str, Any], choices: list[str]) -> str:
    """The letters that may be chosen, as one text."""
    if given := metadata.get("valid_letters"):
        return "".join(str(letter).upper() for letter in given)
    return string.ascii_uppercase[: len(choices) or 10]


def _right_letter(label: Any, metadata: dict[str, Any], choices: list[str], letters: str) -> str | None:
    given = metadata.get("correct_letter")
    if isinstance(given, str) and given.strip():
        return given.strip().upper()
    if isinstance(label, int | float) and not isinstance(label, bool):
        return letters[int(label)] if 0 <= label < len(letters) else None
    text = str(label or "").strip()
    bare = text.strip("().")
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    same = [number for number, choice in enumerate(choices) if _plain(choice) == _plain(text)]
    return letters[same[0]] if text and same and same[0] < len(letters) else None


def _right_texts(sample: Sample, right: str | None, choices: list[str], letters: str) -> list[str]:
    """What else names the right choice, in plain words."""
    found = [sample.metadata.get("correct_answer"), sample.metadata.get("answer_text")]
    if right is not None and letters.find(right) in range(len(choices)):
        found.append(choices[letters.find(right)])
    if isinstance(sample.label, str) and len(sample.label.strip("(). ")) > 1:
        found.append(sample.label)
    return [plain for text in found if text and (plain := _plain(str(text)))]


def choice(response: str, letters: str) -> str | None:
    """The letter that a response chooses, or None."""
    content = find_boxed(response)
    if content is not None and (inside := _INSIDE.fullmatch(content)) and inside[1].upper() in letters:
        return inside[1].upper()
    said = [(a or b).upper() for a, b in _SAID.findall(response)]
    for letter in reversed(said):
        if letter in letters:
            return letter
    alone = [letter for letter in _ALONE.findall(response) if letter in letters]
    return alone[-1] if alone else None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()

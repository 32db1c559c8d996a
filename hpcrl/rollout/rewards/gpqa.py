r"""--rm-type gpqa: 1 if the response chooses the right letter of a multiple-choice question, else 0 (slime's `gpqa`).

The right letter is metadata's correct_letter, or the label: a letter, its number from 0, or the text of one of
metadata's choices.  The choice is read after the last </think>: a boxed letter, else the last letter that is called the
answer, else the one that is called an option, else the last that stands alone.  A letter that is ruled out does not
count.  A response that leaves it open between letters is wrong.  One that names no letter is right if it holds the text
of the right choice and of no other.
"""

from __future__ import annotations

import re
import string
import unicodedata
from typing import Any

from hpcrl.config.options import Options
from hpcrl.rollout.answers.labels import boxed as find_boxed
from hpcrl.sample import Sample

LABELS = ("text", "number")
METADATA = ("correct_letter", "correct_answer", "answer_text")
CLAUSE = 200  #: characters before a cue in which a word may rule its letter out
OPEN = "\ue000"  #: stands for several letters between which a response leaves it open
#: a sign of a word; Chinese, Japanese and Korean text has no blanks, so a letter next to it stands alone
_SIGN = r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"
_END = rf"(?!{_SIGN}|['’][a-z])"
_LEFT, _RIGHT = r"[*(\[{\s\"'$]*", r"[*)\]}\s\"'$]*"
_LETTER = rf"(?:\\(?:text|math)[a-z]*\s*\{{)?{_LEFT}([A-Z{OPEN}]){_END}"
_SEVERAL = re.compile(
    rf"(?<!{_SIGN})[A-Z]{_END}(?:{_RIGHT}(?:(?:/|or{_END}|或者?)(?:\s*(?:option|choice))?{_LEFT}[A-Z]{_END}"
    rf"|(?:[,&、和与]|and{_END}|,\s*and{_END}){_LEFT}[A-Z]{_END}(?!{_RIGHT}\s(?!are\b|both\b)[a-z])))+"
)
#: letters that are called the answer, those that are called an option, those that stand alone
_CUES = (
    re.compile(
        rf"(?<!{_SIGN})(?:answer|(?:correct|right|best)\s+(?:option|choice)|(?:choose|pick|select|go\s+with))"
        rf"(?:\s+(?:is|was|option|choice){_END})*(?:\s*[:=])?{_LETTER}"
        rf"|(?:答案|选)(?:项|择)?(?:应该?)?[是为选]?(?:\s*[:=])?{_LETTER}"
        rf"|(?<!{_SIGN})(?<!['’])([A-Z{OPEN}]){_RIGHT}(?:(?:is|are)\s+(?:the\s+|both\s+)?(?:correct|right){_END}|是?正确)",
        re.IGNORECASE,
    ),
    re.compile(rf"(?<!{_SIGN})(?:options?|choices?)(?:\s+is{_END})?(?:\s*[:=])?{_LETTER}", re.IGNORECASE),
    re.compile(rf"(?<!{_SIGN})(?<!['’])([A-Z{OPEN}])(?!{_SIGN}|['’])"),
)
_CLAUSE = re.compile(
    rf"[.;:!?,\n。、]|(?<!{_SIGN})(?:but|so|hence|thus|therefore|because|since){_END}|而是|所以|因此|但"
)
_NOT = re.compile(
    rf"(?:(?<!{_SIGN})(?:not|\w+n['’]t|cannot|never|n?either|nor|rather\s+than|instead\s+of|except|exclud\w+|"
    rf"eliminat\w+|reject\w*|rul\w+\s+out)\s+(?:\w+\s+){{0,3}}|(?:不|并非|排除|而非)[是选]?\s*){_LEFT}$",
    re.IGNORECASE,
)
_DENIED = re.compile(
    rf"{_RIGHT}(?:(?:(?:is|was|are|can|could|must|would|has|have|be|been|also|clearly|thus)\s+)+(?:not|ruled|wrong|"
    rf"incorrect|false|excluded|eliminated|impossible|implausible|rejected){_END}|(?:\w+n['’]t|cannot){_END}"
    r"|[是被可以]*(?:错|不|排除))"
)
_ENDS = re.compile(rf"{_RIGHT}(?:[.,;:!?。\n]|$)")
_INSIDE = re.compile(r"(?:\\text[a-z]*\s*\{)?[\s*]*\(?([A-Za-z])\)?[.:]?[\s*]*\}?")


def reward(options: Options, sample: Sample) -> float:
    given = sample.metadata.get("choices") or []
    choices = [str(text) for text in (given.values() if isinstance(given, dict) else given)]
    letters = "".join(str(letter).upper() for letter in sample.metadata.get("valid_letters") or ())
    letters = letters or string.ascii_uppercase[: len(choices) or 10]
    right = _right_letter(sample.label, sample.metadata, choices, letters)
    response = sample.response.rpartition("</think>")[2]
    if right is not None and (chosen := choice(response, letters)) is not None:
        return float(chosen == right)
    said = f" {_plain(response)} "
    texts = _right_texts(sample, right, choices, letters)
    for other in {_plain(text) for text in choices} - {"", *texts}:
        if f" {other} " in said and not any(f" {other} " in f" {text} " for text in texts):
            return 0.0
    return float(any(f" {text} " in said for text in texts))


def _right_letter(label: Any, metadata: dict[str, Any], choices: list[str], letters: str) -> str | None:
    given = metadata.get("correct_letter")
    if isinstance(given, str) and given.strip():
        return given.strip().upper()
    text = str("" if label is None else label).strip()
    bare = text.strip("().")
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    texts = choices if isinstance(label, str) else []
    same = [number for number, choice in enumerate(texts) if _plain(choice) == _plain(text)]
    if not same and not isinstance(label, bool) and (number := re.fullmatch(r"([0-9]{1,9})(?:\.0*)?", text)):
        same = [int(number[1])]
    return letters[same[0]] if same and same[0] < len(letters) else None


def _right_texts(sample: Sample, right: str | None, choices: list[str], letters: str) -> list[str]:
    """What else names the right choice, in plain words."""
    found = [sample.metadata.get("correct_answer"), sample.metadata.get("answer_text")]
    if right is not None and letters.find(right) in range(len(choices)):
        found.append(choices[letters.find(right)])
    if isinstance(sample.label, str) and len(sample.label.strip("(). ")) > 1:
        found.append(sample.label)
    return [plain for text in found if text and (plain := _plain(str(text)))]


def choice(response: str, letters: str) -> str | None:
    """The letter that a response chooses, OPEN where it leaves that open, or None if it names none."""
    content = find_boxed(response)
    if content is not None and (inside := _INSIDE.fullmatch(content)) and inside[1].upper() in letters:
        return inside[1].upper()
    text = _SEVERAL.sub(lambda found: _one_of(found[0], letters), unicodedata.normalize("NFKC", response))
    for cue in _CUES:
        named = [letter for found in cue.finditer(text) if (letter := _named(text, found)) in [*letters, OPEN]]
        if named:
            return OPEN if cue is _CUES[1] and len(set(named)) > 1 else named[-1]
    return None


def _one_of(several: str, letters: str) -> str:
    """OPEN for a list of letters, such as A or B; the text as it is where it names one alone."""
    named = {letter for letter in re.findall(rf"(?<!{_SIGN})[A-Z]{_END}", several) if letter in letters}
    return OPEN if len(named) > 1 else several


def _named(text: str, found: re.Match[str]) -> str:
    """The letter of a cue; "" if it is ruled out there, or is a word: `a cell`, `I think`."""
    at = found.lastindex or 1
    letter, end = found[at], found.end(at)
    clause = _CLAUSE.split(text[max(0, found.start() - CLAUSE) : found.start()])[-1]
    if _NOT.search(clause) or _DENIED.match(text, end):
        return ""
    opens = letter == "A" and found.re is _CUES[2] and not clause.strip() and not text.startswith(" is ", end)
    if (opens or letter in "aiI") and re.match(r"\s[a-z]", text[end : end + 2]):
        return ""
    if letter in "ai" and not _ENDS.match(text, end):
        return ""
    return letter.upper()


def _plain(text: str) -> str:
    """Letters and digits of any script; a text of signs alone as it is."""
    return re.sub(r"[\W_]+", " ", text.lower()).strip() or text.strip()

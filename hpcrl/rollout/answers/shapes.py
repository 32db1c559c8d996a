r"""What kind of answer a text is.

`read` turns a normalised text into one of a few shapes; what fits none is Words, which equal only themselves.
Invariant: pure; the depth of nesting is bounded, and so is the time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from hpcrl.rollout.answers.expression import LONGEST
from hpcrl.rollout.answers.latex import canonical, cut, encloses, split, words
from hpcrl.rollout.answers.units import Unit, split_unit

DEEPEST = 8  #: sets in tuples in lists ...
ANY = ""  #: the name of what is called by words, such as Area = 5


@dataclass(frozen=True)
class Words:
    """Words, or what is not understood.

    Attributes:
        plain: in lower case, for words.
        exact: without white space, for the rest.
    """

    plain: str
    exact: str
    is_text: bool


@dataclass(frozen=True)
class Quantity:
    """A number or an expression with its unit.

    Attributes:
        scale: what a word such as million multiplies it by.
    """

    text: str
    unit: Unit | None = None
    scale: int = 1


@dataclass(frozen=True)
class Numeral:
    """A number written in a base: digits in upper case without leading zeros."""

    digits: str
    base: int


@dataclass(frozen=True)
class Items:
    """Several answers.

    Attributes:
        kind: list (no brackets), set, tuple (with its brackets: points, intervals), union, matrix (of rows).
    """

    kind: str
    items: tuple[Shape, ...]
    left: str = ""
    right: str = ""


@dataclass(frozen=True)
class Named:
    """name = value, or name in value."""

    name: str
    value: Shape


@dataclass(frozen=True)
class Equation:
    """Two expressions that are equal, neither of them a mere name."""

    left: str
    right: str


@dataclass(frozen=True)
class Relation:
    """A chain of inequalities, read so that it ascends: parts[0] ops[0] parts[1] ...; ops are <, <= or !=."""

    parts: tuple[str, ...]
    ops: tuple[str, ...]


Shape = Words | Quantity | Numeral | Items | Named | Equation | Relation

_OR = re.compile(r"\\text\s*\{\s*,?\s*(?:or|and)\s*\}")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_REVERSED = re.compile(r"^([\[\]])([^\[\]()]*)([\[\]])$")  #: ]a, b[ is another way to write (a, b)
_OPS = ("\\leq ", "\\geq ", "\\neq ", "\\in ", "\\approx ", "\\equiv ", "\\to ", "<", ">", "=")
_ASCENDING = {"<": "<", "\\leq ": "<=", ">": "<", "\\geq ": "<=", "\\neq ": "!="}
_NUMERAL = re.compile(r"(?:\(\s*)?([0-9A-Za-z]+)(?:\s*\))?\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_MATRIX = re.compile(
    r"\\begin ?\{(p|b|B|small)?(?:matrix|array)\}(?:\s*\{[lcr| ]*\})?(.*)\\end ?\{(?:[pbB]|small)?(?:matrix|array)\}",
    re.DOTALL,
)
_LETTERS = re.compile(r"[A-Za-z]+")
_NAME = re.compile(
    r"(?:m ?)?(?:\\(?:angle|triangle|overline|vec|hat|Delta|mathrm) ?)?"
    r"\{?[|\[]?(?:[A-Za-z]|\\(?!frac|sqrt|pi)[a-z]+ |[A-Z]{2,4})[|\]]?\}?"
    r"(?:_\{?[A-Za-z0-9]+\}?)?'*(?:\^\{-1\})?(?: ?\([^()=]*\))?"
)
_TEXTUAL = re.compile(r"(?:\\text\s*\{[^{}]*\}|[A-Za-z]{3,})(?:[A-Za-z ]|\\text\s*\{[^{}]*\})*")
_PRODUCTS = (frozenset("wxyz"), frozenset("abc"))  #: letters that side by side are a product, not a word


def read(text: str, depth: int = 0) -> Shape:
    """The shape of a normalised text (see latex.py)."""
    text = text.strip()
    if depth > DEEPEST or len(text) > LONGEST:
        return _opaque(text)
    if encloses(text, "\\text{", "}"):
        return _text(text[6:-1], depth)
    if text in ("\\mathbb {R}", "\\R"):
        return read("(-\\infty,\\infty)", depth + 1)
    text = _REVERSED.sub(
        lambda m: f"{'(' if m[1] == ']' else '['}{m[2]}{')' if m[3] == '[' else ']'}", _OR.sub(",", text)
    )
    bare = _join_thousands(text)
    parts = [part for part in split(bare, (",", ";", " or ", " and ")) if part]
    if len(parts) > 1:
        return _list([read(part, depth + 1) for part in parts])
    text = parts[0] if parts else ""
    for reader in (_union, _bracketed, _matrix, _related, _plus_minus, _numeral):
        if (found := reader(text, depth)) is not None:
            return found
    return _quantity(text)


def _join_thousands(text: str) -> str:
    """1,234 as 1234, where it stands in no bracket: there it is two numbers."""
    if not text or text[0] in "([" or text.startswith("\\{"):
        return text
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)


def _opaque(text: str) -> Words:
    return Words(words(text), canonical(text), is_text=False)


def _text(inner: str, depth: int) -> Shape:
    r"""The content of \text{...}: mathematics if it has digits or is one letter, else words."""
    if re.search(r"\d", inner) or len(inner.strip(" ()")) <= 1:
        return read(inner, depth + 1)
    return Words(words(inner), canonical(inner), is_text=True)


def _list(items: list[Shape]) -> Shape:
    """Values, solutions of one name (x = 1 or x = 2, also x = 1, 2), or assignments to several names."""
    names = [item.name for item in items if isinstance(item, Named)]
    if names and len(names) == len(items):
        if len(set(names)) == 1:
            return Named(names[0], Items("list", tuple(item.value for item in items if isinstance(item, Named))))
        return Items("assignments", tuple(items))
    if len(names) == 1 and isinstance(items[0], Named):
        return Named(names[0], Items("list", (items[0].value, *items[1:])))
    return Items("list", tuple(items))


def _union(text: str, depth: int) -> Shape | None:
    parts = split(text, ("\\cup ",))
    return Items("union", tuple(read(part, depth + 1) for part in parts)) if len(parts) > 1 else None


def _bracketed(text: str, depth: int) -> Shape | None:
    if text.rstrip() in ("\\emptyset", "\\{ \\}", "\\{\\}"):
        return Items("set", ())
    if encloses(text, "\\{", "\\}"):
        inner = text[2:-2].strip()
        if "|" in inner or ":" in inner:
            return _opaque(text)
        return Items("set", tuple(read(part, depth + 1) for part in split(inner, (",", ";")) if part))
    if encloses(text, "\\langle", "\\rangle"):
        text = f"({text[7:-7]})"
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return None
    parts = split(text[1:-1], (",", ";"))
    if len(parts) < 2 or not _closes_at_end(text):
        return None
    return Items("tuple", tuple(read(part, depth + 1) for part in parts), text[0], text[-1])


def _closes_at_end(text: str) -> bool:
    """Whether the first bracket is closed by the last character, whatever kinds they are."""
    depth = 0
    for position, sign in enumerate(text[1:-1], 1):
        if text[position - 1] != "\\":
            depth += (sign in "([") - (sign in ")]")
        if depth < 0:
            return False
    return depth == 0


def _matrix(text: str, depth: int) -> Shape | None:
    found = _MATRIX.fullmatch(text)
    if found is None or "\\begin" in found[2]:
        return None
    rows = [row for row in found[2].split("\\\\") if row.strip()]
    cells = [Items("row", tuple(read(cell, depth + 1) for cell in row.split("&"))) for row in rows]
    return Items("matrix", tuple(cells))


def _related(text: str, depth: int) -> Shape | None:
    """Equations and inequalities."""
    parts, ops = cut(text, _OPS)
    if not ops or not all(parts):
        return None
    if "\\approx " in ops:  # what stands before it is the answer
        return read(text[: text.index("\\approx ")], depth + 1)
    if set(ops) == {"="}:
        return _equation(parts, depth)
    if ops == ["\\in "]:
        return Named(name_of(parts[0]) or ANY, read(parts[1], depth + 1))
    if not set(ops) <= {*_ASCENDING}:
        return _opaque(text)
    descending = [op in (">", "\\geq ") for op in ops]
    if any(descending) and not all(descending):
        return _opaque(text)
    step = -1 if any(descending) else 1
    return Relation(tuple(parts[::step]), tuple(_ASCENDING[op] for op in ops[::step]))


def _equation(parts: list[str], depth: int) -> Shape:
    first, last = parts[0], parts[-1]
    names, values = _names_in(first), read(last, depth + 1)
    if names and isinstance(values, Items) and values.kind == "tuple" and len(values.items) == len(names):
        return Items("assignments", tuple(Named(name, value) for name, value in zip(names, values.items, strict=True)))
    name = name_of(first)
    if name is not None:
        return Named(name, values)
    if len(parts) == 2:
        name = name_of(last)
        return Named(name, read(first, depth + 1)) if name else Equation(first, last)
    return _opaque("=".join(parts))


def _names_in(text: str) -> list[str]:
    """The names of a tuple of names, such as (x, y)."""
    if not encloses(text, "(", ")"):
        return []
    names = [name_of(part) for part in split(text[1:-1], (",",))]
    return [name for name in names if name] if len(names) > 1 and all(names) else []


def name_of(text: str) -> str | None:
    """What a left side is called, if it is a name: x, a_1, f(x), AB; ANY for words; None for an expression."""
    text = text.strip()
    if _NAME.fullmatch(text + (" " if re.fullmatch(r"\\[a-z]+", text) else "")) and text not in ("e", "i", "\\infty"):
        return canonical(text).replace("{", "").replace("}", "")
    return ANY if _TEXTUAL.fullmatch(text) else None


def _plus_minus(text: str, depth: int) -> Shape | None:
    r"""a \pm b is both a + b and a - b."""
    if text.count("\\pm") != 1:
        return None
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    lower = text.replace("\\pm", "-").replace("\\mp", "+")
    return Items("list", (read(upper.lstrip(" +"), depth + 1), read(lower, depth + 1)))


def _numeral(text: str, depth: int) -> Shape | None:
    found = _NUMERAL.fullmatch(text)
    if found is None or not 2 <= int(found[2]) <= 36:
        return None
    digits, base = found[1].upper(), int(found[2])
    allowed = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if not any(sign.isdigit() for sign in digits) and (base <= 10 or found[1].islower()):
        return None  # x_2 is a variable
    if any(sign not in allowed[:base] for sign in digits):
        return Words(words(text), canonical(text), is_text=False)
    return Numeral(digits.lstrip("0") or "0", base)


def _quantity(text: str) -> Shape:
    plain = words(text)
    head, unit, scale = split_unit(text)
    if unit is None and scale == 1:
        compact = re.sub(r"\\text|[ {}]", "", text)
        if _is_wording(plain) and "\\" not in re.sub(r"\\text\b", "", text):
            if not any(set(compact) <= letters for letters in _PRODUCTS):
                return Words(plain, canonical(text), is_text=True)
        elif any(
            len(run) > 2 and not set(run.lower()) <= set("abcxyz") for run in _LETTERS.findall(_without_commands(head))
        ):
            return _opaque(text)
    return Quantity(head, unit, scale)


def _is_wording(plain: str) -> bool:
    """Whether a text in lower case is words: not letters between signs, as in a - b."""
    runs = [len(run) for run in _LETTERS.findall(plain)]
    return bool(runs) and max(runs) >= (3 if "-" in plain else 2) and re.fullmatch(r"[a-z'. -]+", plain) is not None


def _without_commands(text: str) -> str:
    return re.sub(r"\\[a-zA-Z]+", " ", re.sub(r"\\overline ?\{[^{}]*\}|_ ?\{[^{}]*\}", " ", text))


_NUMBER_WORDS = {
    word: number
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")
    )
}  # fmt: skip


def number_word(plain: str) -> Fraction | None:
    """The number that a word stands for, up to twenty."""
    return Fraction(_NUMBER_WORDS[plain]) if plain in _NUMBER_WORDS else None

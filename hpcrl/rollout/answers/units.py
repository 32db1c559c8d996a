r"""Units behind a number: percent, money, degrees, lengths, and any other word.

A unit may be left out or added: 12 and 12 cm are the same answer, as are 12 and 12 %.  Two units that are both there
must agree, after conversion: 120 cm is 1.2 m and not 120 m.  A number between 0 and 1 may be a percentage's value: 0.5
is 50 %.

Invariant: pure; a unit that is not in the table is a word, equal to itself only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from hpcrl.rollout.answers.latex import MONEY, word_set

_LENGTH = "length"
_MASS = "mass"
_TIME = "time"
_VOLUME = "volume"
_MONEY = "money"
_ANGLE = "angle"


def _table() -> dict[str, tuple[str, Fraction]]:
    """Every word for a unit -> (dimension, how many of the dimension's first unit it is)."""
    rows = [
        (_LENGTH, "1", "m meter metre"), (_LENGTH, "0.01", "cm centimeter centimetre"),
        (_LENGTH, "0.001", "mm millimeter millimetre"), (_LENGTH, "0.1", "dm decimeter decimetre"),
        (_LENGTH, "1000", "km kilometer kilometre"), (_LENGTH, "0.0254", "in inch inche"),
        (_LENGTH, "0.3048", "ft foot feet"), (_LENGTH, "0.9144", "yd yard"), (_LENGTH, "1609.344", "mi mile"),
        (_MASS, "1", "g gram gramme"), (_MASS, "1000", "kg kilogram kilo"), (_MASS, "0.001", "mg milligram"),
        (_MASS, "1000000", "tonne"), (_MASS, "453.59237", "lb pound"), (_MASS, "28.349523125", "oz ounce"),
        (_TIME, "1", "s sec second"), (_TIME, "60", "min minute"), (_TIME, "3600", "h hr hour"),
        (_TIME, "86400", "day"), (_TIME, "604800", "week"), ("months", "1", "month"), ("months", "12", "yr year"),
        (_VOLUME, "1", "l liter litre"), (_VOLUME, "0.001", "ml milliliter millilitre"), (_MONEY, "1", "dollar usd"),
        (_MONEY, "0.01", "cent"), ("euro", "1", "euro eur"), ("sterling", "1", "gbp"), (_ANGLE, "1", "degree deg"),
        ("yen", "1", "yen yuan jpy cny rmb"), ("percent", "1", "percent percentage"),
    ]  # fmt: skip
    return {word: (dimension, Fraction(factor)) for dimension, factor, words in rows for word in words.split()}


_UNITS = _table()
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
#: behind a number these change what is said, so they are not units
_NO_UNIT = word_set(
    "is are was be or and not no nor more less than least most if except never mod modulo times over under above below "
    "about approximately to from by minus plus squared cubed remainder only between greater fewer each equals"
)
_TRAILING_TEXT = re.compile(r"\s*\\text\s*\{([^{}]*)\}\s*(?:\^\s*\{?\s*([23])\s*\}?)?$")
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ ?\s*\}?\s*(\\text\{\s*[CF]\s*\}|[CF])?$")
_TRIGONOMETRY = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)\b")
_GLUED = word_set("cm mm km kg mg ml ft lb")  #: what is a unit also right behind a digit
_PRODUCTS = (frozenset("wxyz"), frozenset("abc"))  #: letters that side by side are a product
_PLAIN = re.compile(r"(?<=[\d)}])(\s*)([A-Za-z][A-Za-z./ ]*?)\s*(?:\^\s*\{?\s*([23])\s*\}?)?$")
_SIGN = "|".join(MONEY.values())
_MONEY_SIGN = re.compile(rf"([+-]?)\s*\\({_SIGN}) ?(.+)|(.*[\d)}}])\s*\\({_SIGN}) ?", re.DOTALL)
#: Chinese for a unit -> ours; what counts things is a word of its own
_CHINESE = dict(
    re.findall(
        r"([^\x00-\x7f]+)(\w+)",
        "千米km 公里km 厘米cm 毫米mm 分米dm 米m 千克kg 公斤kg 毫克mg 克g 吨tonne 小时hour 时hour 分钟min 分min 秒s "
        "天day 日day 星期week 周week 个月month 月month 年year 毫升ml 升l 美元dollar 欧元euro 英镑gbp 人民币yuan "
        "日元yen 元yuan 度degree 平方square 立方cubic 每per 个item 人person 次occasion 本copy 只head 件piece 岁year",
    )
)
_CHINESE_UNIT = re.compile("|".join(_CHINESE))
_CHINESE_BEHIND = re.compile(r"(.*[\d)}])\s*(?:\\text\s*\{\s*)?([\u4e00-\u9fff/]+)\s*\}?")
_WORD = re.compile(r"([A-Za-z]+)\.?\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?|(/)|(%)")


@dataclass(frozen=True)
class Unit:
    """What stands behind a number.

    Attributes:
        dimension: ((name, power), ...) sorted, or (words, 1) if unknown.
        factor: to its first unit.
    """

    dimension: tuple[tuple[str, int], ...]
    factor: Fraction

    @property
    def percent(self) -> bool:
        return self.dimension == (("percent", 1),)


PERCENT = Unit((("percent", 1),), Fraction(1))


def split_unit(text: str) -> tuple[str, Unit | None, int]:
    """(the number, its unit if it has one, what words such as million multiply it by) of a normalised text."""
    if found := _MONEY_SIGN.fullmatch(text):
        sign = found[2] or found[5]
        head, _, scale = split_unit(found[1] + found[3] if found[2] else found[4])
        return head, read_unit("gbp" if sign == "pound" else sign), scale
    if (found := _CHINESE_BEHIND.fullmatch(text)) and _numeric(found[1]):
        return _with_words(found[1], _CHINESE_UNIT.sub(lambda unit: f" {_CHINESE[unit[0]]} ", found[2]), None, text)
    if text.endswith("%"):
        return text[:-1].rstrip(), PERCENT, 1
    if (found := _DEGREES.search(text)) and not _TRIGONOMETRY.search(text):
        return text[: found.start()].rstrip(), read_unit("degree"), 1
    if found := _TRAILING_TEXT.search(text):
        return _with_words(text[: found.start()].rstrip(), found[1], found[2], text)
    if (found := _PLAIN.search(text)) and _is_unit(found[2], bool(found[1])) and _numeric(text[: found.start()]):
        return _with_words(text[: found.start()].rstrip(), found[2], found[3], text)
    return text, None, 1


def _is_unit(word: str, apart: bool) -> bool:
    """Whether letters behind a number are a unit and no variables."""
    if any(set(word) <= letters for letters in _PRODUCTS):
        return False
    first = word.split()[0].rstrip(".")
    return len(first) > 2 or (first in _UNITS if apart else word in _GLUED)


def _numeric(text: str) -> bool:
    """Whether a text is a number without letters, so that letters behind it are a unit."""
    return not re.search(r"[A-Za-z]", re.sub(r"\\(?:frac|sqrt|cdot|times|pi)\b ?", "", text))


def _with_words(head: str, words: str, power: str | None, text: str) -> tuple[str, Unit | None, int]:
    """Take `words` behind `head` as scale and unit; nothing is taken where they mean something else."""
    plain = words.strip().strip(".").lower().replace("\\", "")
    parts = plain.split()
    if (
        not head
        or len(parts) > 4
        or any(part in _NO_UNIT for part in parts)
        or (plain and not re.fullmatch(r"[a-z%./^\d ()-]*", plain))
    ):
        return text, None, 1
    scale = 1
    while parts and parts[0] in _SCALES:
        scale *= _SCALES[parts.pop(0)]
    if parts and parts[0] == "of":
        return text, None, 1
    if parts in (["st"], ["nd"], ["rd"], ["th"]):
        parts = []
    inner_head, inner, inner_scale = split_unit(head) if not parts else (head, None, 1)
    if inner is not None or inner_scale != 1:
        return inner_head, inner, inner_scale * scale
    unit = read_unit(" ".join(parts), int(power or 1)) if parts else None
    return head, unit, scale


def read_unit(words: str, power: int = 1) -> Unit:
    """The unit that words stand for: `cm`, `square meters`, `km/h`, `miles per hour`.

    Args:
        power: of the whole, behind it.
    """
    dimension: dict[str, int] = {}
    factor = Fraction(1)
    sign = 1
    square = 1
    special = {"mph": "miles per hour", "kph": "km per h", "sq": "square", "cu": "cubic"}
    words = " ".join(
        special.get(word, word) for word in words.lower().replace(".", " ").replace("(", "").replace(")", "").split()
    )
    for found in _WORD.finditer(words):
        word = found[1] or found[3] or "percent"
        if word in ("per", "/"):
            sign = -1
            continue
        if word in ("square", "cubic"):
            square = 2 if word == "square" else 3
            continue
        raised = sign * square * int(found[2] or 1) * power
        known = _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))
        plural = len(word) > 3 and word.endswith("s") and not word.endswith("ss")
        name, each = known or (word[:-1] if plural else word, Fraction(1))
        dimension[name] = dimension.get(name, 0) + raised
        factor *= each**raised
        square = 1
    if dimension.get(_VOLUME):  # a litre is a cubic decimetre
        dimension[_LENGTH] = dimension.get(_LENGTH, 0) + 3 * dimension[_VOLUME]
        factor *= Fraction(1, 1000) ** dimension.pop(_VOLUME)
    return Unit(tuple(sorted((name, n) for name, n in dimension.items() if n)), factor)


def factors(a: Unit | None, b: Unit | None) -> tuple[Fraction, Fraction] | None:
    """What to multiply the number of `a` and of `b` by before they are compared; None if the units do not agree."""
    if a is None or b is None:
        return Fraction(1), Fraction(1)
    if a.dimension != b.dimension:
        return None
    return a.factor, b.factor

r"""Whether two answers are the same: one text is the label, the other what a response holds.

A label without a name, unit or brackets leaves the answer free to add them; what both say must agree.  Invariant: pure
and symmetric except for multiple choice; what is not understood is the same only as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from hpcrl.rollout.answers import calculus
from hpcrl.rollout.answers.expression import Tree, Unknown, parse, symbols
from hpcrl.rollout.answers.latex import canonical, normalise
from hpcrl.rollout.answers.shapes import (
    ANY,
    Equation,
    Items,
    Named,
    Numeral,
    Quantity,
    Relation,
    Shape,
    Words,
    name_of,
    number_word,
    read,
)
from hpcrl.rollout.answers.units import factors
from hpcrl.rollout.answers.value import constant, equal, proportional, same

LONGEST = 1000  #: characters of an answer that is read, if the label is not longer
MANY = 50  #: items that are matched in any order; more must come in the same
_CHOICE_LABEL = re.compile(r"(\\text\s*\{\s*)?(\()?\s*(?:\\text\s*\{\s*)?\(?([A-Z])\)?\s*\}?\s*\)?\s*\.?\s*\}?")
#: words before an answer: The answer is 5, \text{Answer: }5, \text{Answer: 5}
_PREFACE = r"(?:(?:the )?(?:final )?answer ?(?: is|:|=)|答案(?:是|为|:)) ?:? ?"
_PREFACED = re.compile(
    rf"\\text ?\{{ ?{_PREFACE}\}} ?(.+)|\\text ?\{{ ?{_PREFACE}([^{{}}]+)\}}|{_PREFACE}(.+)", re.IGNORECASE | re.DOTALL
)
_MAY_BE_A_WORD = re.compile("[abc]{3,}")
_CHOICE = re.compile(r"(\()?\s*([A-Za-z])\s*(?:(\))|[.:](?!\d)|$)(.*)", re.DOTALL)


def equivalent(answer: str, label: str) -> bool:
    """Whether `answer` says the same as `label`.  It may take long only for sums, integrals and limits."""
    if answer.strip() == label.strip():
        return bool(label.strip())
    if len(answer) > max(LONGEST, 2 * len(label)):
        return False
    told, wanted = _without_preface(normalise(answer)), _without_preface(normalise(label))
    if canonical(told) == canonical(wanted):
        return bool(wanted)
    if not told or not wanted:
        return False
    if (letter := _CHOICE_LABEL.fullmatch(wanted)) and _chosen(told, letter[3], wrapped=wanted != letter[3]):
        return True
    return match(read(wanted), read(told))


def _without_preface(text: str) -> str:
    """A normalised text without the words that announce an answer."""
    found = _PREFACED.fullmatch(text)
    return next(part for part in found.groups() if part).strip() if found else text


def _chosen(answer: str, letter: str, wrapped: bool) -> bool:
    """Whether the answer chooses this letter and no other: B, (B), B., (B) 12."""
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer).strip()
    found = _CHOICE.fullmatch(plain)
    if found is None or re.search(r"(?<![A-Za-z\\])\(?[A-Z]\)?(?![A-Za-z])", found[4]):
        return False
    return found[2] == letter or (
        found[2].upper() == letter and (letter in "ABCDE" or wrapped or bool(found[1] or found[3]))
    )


def match(a: Shape, b: Shape) -> bool:
    """Whether two shapes are the same answer."""
    if isinstance(a, Named) and isinstance(b, Named):
        if _has_variables(a.value) and _has_variables(b.value) and a.name != b.name and ANY not in (a.name, b.name):
            return _equations(a, b)
        return (a.name == b.name or ANY in (a.name, b.name)) and match(a.value, b.value)
    if isinstance(a, Equation) or isinstance(b, Equation):
        return _equations(a, b)
    if isinstance(a, Named):
        return match(a.value, b)
    if isinstance(b, Named):
        return match(a, b.value)
    if isinstance(a, Relation) or isinstance(b, Relation):
        return _relations(a, b)
    if isinstance(a, Items) or isinstance(b, Items):
        return _items(a, b)
    return _single(a, b)


# ---- several


def _items(a: Shape, b: Shape) -> bool:
    if not isinstance(a, Items) or not isinstance(b, Items):
        several, one = (a, b) if isinstance(a, Items) else (b, a)
        assert isinstance(several, Items)
        return several.kind in ("set", "list") and len(several.items) == 1 and match(several.items[0], one)
    kinds = {a.kind, b.kind}
    if kinds == {"tuple"}:
        return (a.left, a.right) == (b.left, b.right) and _in_order(a.items, b.items)
    if kinds in ({"matrix"}, {"row"}):
        return _in_order(a.items, b.items)
    if "assignments" in kinds:
        return _assignments(a, b)
    if kinds == {"set"}:
        return _same_members(a.items, b.items)
    if kinds <= {"set", "list"} or kinds == {"union"}:
        return _any_order(a.items, b.items)
    if kinds == {"union", "list"}:  # x < 1 or x > 3
        return all(isinstance(item, Relation | Items) for item in (*a.items, *b.items)) and _any_order(a.items, b.items)
    return False


def _in_order(a: Sequence[Shape], b: Sequence[Shape]) -> bool:
    return len(a) == len(b) and all(map(match, a, b))


def _any_order(a: Sequence[Shape], b: Sequence[Shape]) -> bool:
    if len(a) != len(b) or len(a) > MANY:
        return _in_order(a, b)
    left = list(b)
    for item in a:
        found = next((other for other in left if match(item, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_members(a: Sequence[Shape], b: Sequence[Shape]) -> bool:
    """Sets: what is written twice counts once."""
    if max(len(a), len(b)) > MANY:
        return _in_order(a, b)
    return all(any(match(x, y) for y in b) for x in a) and all(any(match(x, y) for x in a) for y in b)


def _assignments(a: Items, b: Items) -> bool:
    """x = 3, y = 5: in any order, or only the values in the same order."""
    if a.kind == b.kind:
        return _any_order(a.items, b.items)
    named, values = (a, b) if a.kind == "assignments" else (b, a)
    return values.kind in ("tuple", "list") and _in_order(
        [item.value for item in named.items if isinstance(item, Named)], values.items
    )


# ---- equations and inequalities


def _has_variables(shape: Shape) -> bool:
    if not isinstance(shape, Quantity):
        return False
    try:
        return bool(symbols(parse(shape.text)))
    except Unknown:
        return False


def _sides(shape: Shape) -> Tree | None:
    """left - right of an equation with variables; None for anything else."""
    if isinstance(shape, Named) and isinstance(shape.value, Quantity) and _has_variables(shape.value):
        return ("-", parse(shape.name), parse(shape.value.text))
    if isinstance(shape, Equation):
        return ("-", parse(shape.left), parse(shape.right))
    return None


def _equations(a: Shape, b: Shape) -> bool:
    """Two equations are the same if one is a multiple of the other; an equation without variables is only itself."""
    if isinstance(a, Equation) and isinstance(b, Equation):
        sides = [{canonical(one.left), canonical(one.right)} for one in (a, b)]
        if sides[0] == sides[1]:
            return True
    try:
        left, right = _sides(a), _sides(b)
        if left is None or right is None or not symbols(left) or symbols(left) != symbols(right):
            return False
        return proportional(left, right)
    except Unknown:
        return False


def _relations(a: Shape, b: Shape) -> bool:
    if isinstance(a, Relation) and isinstance(b, Relation):
        if a.ops == b.ops == ("!=",):
            return _any_order([read(part) for part in a.parts], [read(part) for part in b.parts])
        return a.ops == b.ops and _in_order([read(part) for part in a.parts], [read(part) for part in b.parts])
    interval = _interval(a if isinstance(a, Relation) else b)
    other = b if isinstance(a, Relation) else a
    return interval is not None and match(interval, other)


def _interval(relation: Shape) -> Items | None:
    """x > 3 as (3, infinity); None where it bounds no single name."""
    if not isinstance(relation, Relation) or "!=" in relation.ops:
        return None
    parts, ops = relation.parts, relation.ops
    if len(parts) == 2 and name_of(parts[0]):
        parts, ops = ("-\\infty", *parts), ("<", *ops)
    elif len(parts) == 2 and name_of(parts[1]):
        parts, ops = (*parts, "\\infty"), (*ops, "<")
    if len(parts) != 3 or not name_of(parts[1]):
        return None
    left = "(" if ops[0] == "<" else "["
    right = ")" if ops[1] == "<" else "]"
    return Items("tuple", (read(parts[0]), read(parts[2])), left, right)


# ---- one thing


def _single(a: Shape, b: Shape) -> bool:
    if isinstance(a, Numeral) or isinstance(b, Numeral):
        if isinstance(a, Quantity) or isinstance(b, Quantity):
            numeral, number = (a, b) if isinstance(a, Numeral) else (b, a)
            return isinstance(numeral, Numeral) and numeral.base == 10 and _quantities(Quantity(numeral.digits), number)
        return a == b
    if isinstance(a, Words) and isinstance(b, Words):
        return bool(a.plain) and a.plain == b.plain if a.is_text or b.is_text else a.exact == b.exact
    if isinstance(a, Words) or isinstance(b, Words):
        said, number = (a, b) if isinstance(a, Words) else (b, a)
        worth = number_word(said.plain) if isinstance(said, Words) and said.is_text else None
        return worth is not None and _quantities(Quantity(str(worth)), number)
    return _quantities(a, b)


def _quantities(a: Shape, b: Shape) -> bool:
    if not isinstance(a, Quantity) or not isinstance(b, Quantity):
        return False
    by = factors(a.unit, b.unit)
    if by is None:
        return False
    if _MAY_BE_A_WORD.fullmatch(a.text) and _MAY_BE_A_WORD.fullmatch(b.text):  # cab is a word, and no product for abc
        return a.text == b.text
    alike = by[0] * a.scale == by[1] * b.scale
    if alike and canonical(a.text).lstrip("+") == canonical(b.text).lstrip("+"):
        return True
    try:
        left, right = parse(a.text), parse(b.text)
        if equal(_times(left, by[0] * a.scale), _times(right, by[1] * b.scale)):
            return True
        return _is_share(a, right, left) or _is_share(b, left, right)
    except Unknown:
        pass
    if not alike or not calculus.is_calculus(a.text + b.text):
        return False
    return calculus.same(a.text, b.text)


def _is_share(percentage: Quantity, number: Tree, written: Tree) -> bool:
    """Whether `number` lies between 0 and 1 and is the value of the percentage `written`: 0.5 of 50 %."""
    if percentage.unit is None or not percentage.unit.percent or symbols(number) or symbols(written):
        return False
    value = constant(number)
    if not isinstance(value, Fraction) or not 0 < value < 1:
        return False
    return same(constant(_times(written, Fraction(1, 100))), value)


def _times(tree: Tree, factor: Fraction) -> Tree:
    return tree if factor == 1 else ("*", ("num", Fraction(factor)), tree)

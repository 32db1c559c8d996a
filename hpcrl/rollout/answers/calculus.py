r"""Sums, products, integrals and limits: what our own grammar does not read, math-verify does.

Invariants: only LaTeX is parsed, by math-verify's grammar (its parser of plain expressions is never used: that one ends
in Python's eval); a pair that math-verify cannot read is not equal, nor one of which a side would take it long: a
sum or product of many terms, a tower of powers, factorials of large numbers.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import Any

from hpcrl.rollout.answers.expression import Unknown, parse
from hpcrl.rollout.answers.value import TooLarge, constant

MOST = 2500  #: terms of sums and products, exponents, what a factorial or \binom is of
_BRACES, _BRACKETS = r"\{[^{}]*\}", r"\([^()]*\)"
for _ in range(8):  # as deep as they are looked into: further out a number is larger still
    _BRACES, _BRACKETS = rf"\{{(?:[^{{}}]|{_BRACES})*\}}", rf"\((?:[^()]|{_BRACKETS})*\)"
_GROUP = rf"(?:{_BRACES}|\\?\w+)"
_BOUNDED = re.compile(rf"(?=[\^_] *({_GROUP})|\\binom *({_GROUP})|({_BRACKETS}|{_BRACES}) *[!^]|(\d+) *!)")
_TERMS = re.compile(rf"\\(?:sum|prod) *(?:_ *({_GROUP}) *\^ *({_GROUP})|\^ *({_GROUP}) *_ *({_GROUP}))")
_CALCULUS = re.compile(r"\\(?:sum|prod|int|lim|max|min|gcd|iint|oint)\b")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
LONGEST = 300  #: characters of either side


def is_calculus(text: str) -> bool:
    """Whether a normalised text holds a command that only math-verify knows, and no words."""
    return len(text) <= LONGEST and _CALCULUS.search(text) is not None and not _WORD.search(text)


def same(label: str, answer: str) -> bool:
    """Whether math-verify finds both equal.  It may take any time: the caller bounds it."""
    if is_too_large(label) or is_too_large(answer):
        return False
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return bool(verify(read(label), read(answer), timeout_seconds=None))


def is_too_large(text: str) -> bool:
    """Whether a part of a formula would take long by the numbers that stand in it."""
    try:
        sizes = [_number(next(filter(None, found.groups()))) for found in _BOUNDED.finditer(text)]
        terms = 1
        for low, high, first, last in _TERMS.findall(text):
            span = _number(high or first), _number(low or last)
            terms *= max(1, span[0] - span[1] + 1) if None not in span else 1
    except TooLarge:
        return True
    return any(abs(size) > MOST for size in (terms, *sizes) if size is not None)


def _number(text: str) -> Any:
    """The value of a group or of what stands behind its equals sign; None if it has variables or no value.

    Raises:
        TooLarge: where it would take long.
    """
    try:
        inner = text[1:-1] if text[0] in "({" else text
        return constant(parse(inner.rpartition("=")[2].strip()))
    except Unknown as error:
        if isinstance(error, TooLarge):
            raise
        return None


def read(text: str) -> list[Any]:
    """What math-verify reads in a LaTeX formula."""
    from math_verify import LatexExtractionConfig, parse

    return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)


def versions() -> str:
    """The versions of the packages that decide here, for an error."""
    names = ("math-verify", "latex2sympy2_extended", "sympy", "mpmath")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)

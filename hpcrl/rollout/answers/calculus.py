r"""Sums, products, integrals and limits: what our own grammar does not read, math-verify does.

Invariants: only LaTeX is parsed, by math-verify's grammar (its parser of plain expressions is never used: that one ends
in Python's eval); a pair that math-verify cannot read is not equal.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import Any

_CALCULUS = re.compile(r"\\(?:sum|prod|int|lim|max|min|gcd|iint|oint)\b")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
LONGEST = 300  #: characters of either side


def is_calculus(text: str) -> bool:
    """Whether a normalised text holds a command that only math-verify knows, and no words."""
    return len(text) <= LONGEST and _CALCULUS.search(text) is not None and not _WORD.search(text)


def same(label: str, answer: str) -> bool:
    """Whether math-verify finds both equal.  It may take any time: the caller bounds it."""
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return bool(verify(read(label), read(answer), timeout_seconds=None))


def read(text: str) -> list[Any]:
    """What math-verify reads in a LaTeX formula."""
    from math_verify import LatexExtractionConfig, parse

    return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)


def versions() -> str:
    """The versions of the packages that decide here, for an error."""
    names = ("math-verify", "latex2sympy2_extended", "sympy", "mpmath")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)

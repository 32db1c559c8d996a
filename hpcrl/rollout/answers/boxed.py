r"""The last complete \boxed{...} of a text.

Invariant: one pass over the last TAIL characters at most, whatever the text.
"""

from __future__ import annotations

import re

TAIL = 1_000_000  #: characters at the end of a text that are looked at: no answer stands before them
_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def boxed(text: str) -> str | None:
    r"""What stands in the last complete \boxed{...} (or \fbox{...}) of `text`, stripped, or None if there is none.

    Of boxes that lie in each other the inner one counts.  An escaped brace is not a brace.
    """
    text = text[-TAIL:]
    begins = [found.start() for found in _BOX.finditer(text)]
    if not begins:
        return None
    opened: list[tuple[int, bool]] = []  # (where the content begins, whether it is boxed) of every open brace
    start, content = -1, None
    for found in _TOKENS.finditer(text, _safe_start(text, begins[0])):
        token = found.group()
        if token.endswith("{") and token != "\\{":
            opened.append((found.end(), len(token) > 1))
        elif token == "}" and opened:
            begin, is_boxed = opened.pop()
            if is_boxed and begin > start:
                start = begin
                content = text[begin : found.start()].strip()
    return content


def _safe_start(text: str, box: int) -> int:
    r"""Where to begin reading so that the box at `box` is read as one: the backslashes before it may escape its own."""
    while box and text[box - 1] == "\\":
        box -= 1
    return box

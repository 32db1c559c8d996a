"""Text of others, as a terminal may be shown it.

Invariant: what comes out holds nothing that a terminal obeys, and nothing that makes it read otherwise than it stands.
"""

from __future__ import annotations

import io
import re
import sys

#: escape sequences; control characters but tab and newline; marks that turn the direction of text; Unicode's line
#: separators
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
)


def strip_control(text: str, *, lines: bool = False) -> str:
    """Text without control characters and escape sequences; on one line, or with its `lines`."""
    found = CONTROL.sub("", text)
    return found if lines else found.replace("\n", " ")


def replace_unencodable() -> None:
    """Let stdout and stderr write a question mark, rather than fail, for a character that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

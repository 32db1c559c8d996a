"""The process behind --rm-type math: compares pairs of answers with math-verify.

stdin: one JSON list [answer, label] a line; stdout: "ready" once, then "1" or "0" for each line.

Invariants: it has a bounded memory and dies with the rollout process; only LaTeX is parsed (by a grammar), because
math-verify hands plain expressions to Python's eval.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from typing import Any

import msgspec

from hpcrl.run.process import die_with_parent

MEMORY = 4 * 1024**3  #: bytes of address space


def main() -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> list[Any]:
        return parse(f"${text.strip('$')}$", [LatexExtractionConfig()], parsing_timeout=None)

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        answer, label = msgspec.json.decode(line, type=tuple[str, str])
        equal = False
        with contextlib.suppress(Exception, MemoryError, RecursionError):
            equal = bool(verify(read(label), read(answer), timeout_seconds=None))
        sys.stdout.write("1\n" if equal else "0\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

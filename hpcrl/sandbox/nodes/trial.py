"""A try of the kinds of sandboxes that a run wants on one of its nodes, for the launcher.

    python -m hpcrl.sandbox.nodes.trial FILE KIND...    KIND: one of the kinds, or "-" for the node's own choice

Invariant: the file says either that a box of each kind has run a command there, or why one could not be made.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.run.process import PARENT, die_with_parent
from hpcrl.run.rundir import write_atomic
from hpcrl.sandbox.kinds import chosen
from hpcrl.sandbox.run import refusal_of

USUAL = "-"  #: the kind that a node's environment names, or auto


class BoxTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of it.

    Attributes:
        what: why no box of some kind is made there; "": each was.
        hint: what to do.
    """

    what: str = ""
    hint: str = ""


def word_of(kind: str | None) -> str:
    """The word for a --sandbox-kind."""
    return kind or USUAL


def try_kinds(words: Iterable[str]) -> BoxTrial:
    """Make a box of each of these kinds on this machine."""
    for word in words:
        try:
            error = refusal_of(chosen(None if word == USUAL else word))
        except HpcrlError as wrong:
            error = wrong
        if error:
            return BoxTrial(error.what, error.hint or "hpcrl doctor there says more")
    return BoxTrial()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try kinds of sandboxes on this node; started by a run's launcher.")
    parser.add_argument("file", type=Path)
    parser.add_argument("kinds", nargs="+")
    args = parser.parse_args(argv)
    if os.environ.get(PARENT):
        die_with_parent()
    write_atomic(args.file, msgspec.json.encode(try_kinds(args.kinds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

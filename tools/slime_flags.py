"""Which flags of slime's parsers have no verdict here: new, gone or changed since tests/config/slime/flags.json.

    python -m tools.slime_flags CHECKOUT          # a checkout of slime or vime, or one file with a parser

Flags are read from the source: the texts that begin with two dashes in calls of add_argument, and of slime's reset_arg.
A flag of vime's alone is gone from a checkout of slime's.  The exit status is 1 if a flag is new.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.config.slime.arguments import verdicts

KNOWN = Path(__file__).parent.parent / "tests" / "config" / "slime" / "flags.json"
CALLS = ("add_argument", "reset_arg")
#: parsers of train.py's arguments, below a checkout
PARSERS = ("slime/utils", "slime/backends", "slime/rollout", "slime/ray", "vime/utils", "vime/backends", "vime/rollout")


def flags_in(source: str) -> Iterator[tuple[str, Any]]:
    """(flag without dashes, default as the source has it; None without one, or where it is computed)"""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in CALLS:
            continue
        given = {word.arg: word.value for word in node.keywords}
        try:
            default = ast.literal_eval(given["default"]) if "default" in given else None
        except ValueError:
            default = None
        for name in node.args:
            if isinstance(name, ast.Constant) and str(name.value).startswith("--"):
                yield str(name.value)[2:].replace("_", "-"), default


def read_checkout(root: Path) -> dict[str, Any]:
    """Every flag of a checkout, or of one file -> its default."""
    files = [root] if root.is_file() else [path for part in PARSERS for path in sorted((root / part).rglob("*.py"))]
    return {flag: default for path in files for flag, default in flags_in(path.read_text())}


def compare(found: dict[str, Any]) -> dict[str, list[str]]:
    """The flags that are new (without a verdict), gone, and with another default."""
    facts = json.loads(KNOWN.read_text())
    known = {flag: default for flag, _, default in facts["own"]}
    changed = [
        f"{flag}: {known[flag]!r} -> {default!r}"
        for flag, default in found.items()
        if flag in known and default not in (None, known[flag]) and known[flag] is not None
    ]
    return {
        "new": sorted(found.keys() - verdicts().keys()),
        "gone": sorted(known.keys() - found.keys()),
        "changed": sorted(changed),
    }


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).exists():
        print(__doc__, file=sys.stderr)
        return 2
    found = compare(read_checkout(Path(argv[0])))
    for what, flags in found.items():
        print(f"{what}: {len(flags)}")
        print("".join(f"  --{flag}\n" for flag in flags), end="")
    return 1 if found["new"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

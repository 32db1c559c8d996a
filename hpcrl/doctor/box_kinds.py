"""Which kinds of sandboxes this machine can make for agents, of those that other programs make.

Invariant: a kind is said to work only after it has run a command.
"""

from __future__ import annotations

import os

from hpcrl.errors import UsageError
from hpcrl.findings import Finding
from hpcrl.sandbox.kinds.choose import VARIABLE, chosen
from hpcrl.sandbox.kinds.trial import kind_refusals


def check_kinds() -> Finding:
    """One line for all of them; a warning if the one that the environment names is not to be had."""
    try:
        wanted = chosen(None)
    except UsageError as error:
        return Finding("fail", "", error.what, error.hint)
    refused = kind_refusals()
    can = [name for name, why in refused.items() if not why]
    said = f"other kinds of sandboxes for agents: {', '.join(can) or 'none'}"
    for why in filter(None, refused.values()):
        said += f"; {why}"
    if refused.get(wanted):
        return Finding("warn", "", said, f"{VARIABLE}={os.environ[VARIABLE]} is none that this machine can make")
    return Finding("ok", "", said)

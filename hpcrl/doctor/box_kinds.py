"""Which kinds of sandboxes this machine can make, for agents and for scripts that are imported.

Invariant: a kind is said to work only after it has run a command.
"""

from __future__ import annotations

from collections.abc import Collection

from hpcrl.errors import UsageError
from hpcrl.sandbox.kinds import VARIABLE, chosen
from hpcrl.sandbox.run import kind_refusals
from hpcrl.utils.check_results import Finding


def check_kinds(asked: Collection[str] = ()) -> Finding:
    """One line for all of them; a warning if one that is asked for is not to be had here.

    Args:
        asked: kinds that a run names; the environment's is looked for too.
    """
    try:
        wanted = {*asked, chosen(None)}
    except UsageError as error:
        return Finding("fail", "", error.what, error.hint)
    refused = kind_refusals()
    can = ", ".join(name for name, why in refused.items() if not why)
    said = "; ".join([f"kinds of sandboxes: {can or 'none'}", *filter(None, refused.values())])
    if not can:
        return Finding("warn", "", said, "an agent finds none here, and hpcrl import runs only scripts that you trust")
    lacking = min((name for name in wanted if refused.get(name)), default="")
    hint = f"{lacking} is asked for (--sandbox-kind, {VARIABLE}): not on this machine" if lacking else ""
    return Finding("warn" if lacking else "ok", "", said, hint)

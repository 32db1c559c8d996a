"""Boxes of each kind, of an ordinary user: what is tried from inside of root's is tried in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandbox.test_box_attacks import ATTACKS, FULL, GOT, HELD, PYTHON
from tests.sandbox.test_kinds import done_by, place
from tests.support.other_kinds import KINDS

pytestmark = [pytest.mark.process, pytest.mark.soak]
__all__ = ["place"]

#: each attack, and whether the box serves its user after it, or after a reset
TRIED = """
async def main():
    found = {}
    async with SandboxPool(warm=1, limits=LIMITS, kind=kind) as pool, pool.box() as box:
        for name, command in told.items():
            if isinstance(command, str):
                command = command.replace("{{", "{").replace("}}", "}").replace("{watcher}", str(watcher_of(pool)))
                command = command.replace("{test}", str(os.getpid()))
            said = await box.run(command, 20.0)
            again = await box.run("echo alive")
            served = again.stdout == "alive\\n" or again.limit
            await box.reset()
            after = (await box.run("echo alive")).stdout
            found[name] = [said.stdout + said.stderr, said.timed_out, bool(served), after]
    return found
"""


@pytest.mark.parametrize("kind", KINDS)
def test_attacks_from_inside(kind: str, place: Path) -> None:
    """Those that fill its disk are in `test_limits_of_each_kind`: the watcher ends them, where unshare has a bound."""
    told = {name: command for name, command in ATTACKS.items() if name not in FULL}
    # Apptainer's /dev is memory that can be written to, and is counted
    told["a terminal"] = "(: < /dev/tty) && echo GOT-IT; test -c /dev/console && echo GOT-IT"
    told |= {name: [PYTHON, "-c", text] for name, text in HELD.items()}
    found = done_by(kind, place, TRIED, told)
    assert set(found) == set(told)
    for name, (said, late, served, after) in found.items():
        assert GOT not in said and not late and served and after == "alive\n", (name, said[-500:], late, served, after)

"""Boxes that bubblewrap or Apptainer makes: what is tried from inside of ours is tried in them, and Apptainer's own
image files are unpacked."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.sandbox.images.staging import image_root
from tests.sandbox.kinds.test_kinds import done_by, place
from tests.sandbox.test_box_attacks import ATTACKS, FULL, GOT, HELD, PYTHON
from tests.support.other_kinds import KINDS, user_of

pytestmark = [pytest.mark.process, pytest.mark.soak]
__all__ = ["place"]

#: each attack, and whether the box serves its user after it, or after a reset
TRIED = """
async def main():
    found = {}
    async with SandboxPool(warm=1, limits=LIMITS, kind=kind) as pool, pool.box() as box:
        for name, command in told.items():
            if isinstance(command, str):
                command = command.replace("{{", "{").replace("}}", "}").replace("{spawner}", str(pool._spawner.pid))
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
    """Those that fill its disk are in `test_limits_of_another_kind`: the keeper ends them, where ours has a bound."""
    told = {name: command for name, command in ATTACKS.items() if name not in FULL}
    # Apptainer's /dev is memory that can be written to, and is counted
    told["a terminal"] = "(: < /dev/tty) && echo GOT-IT; test -c /dev/console && echo GOT-IT"
    told |= {name: [PYTHON, "-c", text] for name, text in HELD.items()}
    found = done_by(kind, place, TRIED, told)
    assert set(found) == set(told)
    for name, (said, late, served, after) in found.items():
        assert GOT not in said and not late and served and after == "alive\n", (name, said[-500:], late, served, after)


BUILD = """
import subprocess, sys
done = subprocess.run(["apptainer", "build", *sys.argv[1:]], capture_output=True, text=True)
print(done.returncode, done.stderr)
"""


@pytest.fixture
def sif() -> Iterator[Path]:
    """An image that Apptainer has built, as the user, of a directory."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-sif-") as made:
        folder = Path(made)
        (folder / "source" / "etc").mkdir(parents=True)
        (folder / "source" / "etc" / "motd").write_text("of sif\n")
        folder.chmod(0o777)
        said = user_of("apptainer").run(BUILD, f"{folder}/made.sif", f"{folder}/source", timeout=120)
        assert said.startswith("0 "), said
        yield folder / "made.sif"


def test_a_sif_file_of_apptainers(sif: Path, tmp_path: Path) -> None:
    root = Path(image_root(str(sif), str(tmp_path)))
    assert (root / "etc" / "motd").read_text() == "of sif\n" and (root / ".singularity.d").is_dir()


IMAGE = """
async def main():
    async with SandboxPool(warm=0, kind=kind) as pool, pool.box(told) as box:
        return [(await box.read("/etc/motd")).decode()]
"""


@pytest.mark.parametrize("kind", ["namespaces", *KINDS])
def test_a_sif_file_in_boxes(kind: str, sif: Path, place: Path) -> None:
    """By an ordinary user, in a box of every kind."""
    program = IMAGE.replace("told)", f"{json.dumps(str(sif))})")
    if kind == "namespaces":
        assert done_by("bubblewrap", place, program.replace("kind=kind", "kind='namespaces'")) == ["of sif\n"]
    else:
        assert done_by(kind, place, program) == ["of sif\n"]

"""A hostile program against what a user has: every attempt of `attacks.py`, from a script that is imported, from a
command that is confined and from a box; as root and as an ordinary user (of each kind of box: `test_kinds.py`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import hpcrl
from hpcrl.sandbox.slime_script import run_script
from tests.support.able import needs
from tests.support.children import read_line
from tests.support.second_user import PYTHON, SecondUser, make_user

pytestmark = [pytest.mark.process, needs("namespaces", "python")]

HERE = Path(__file__).parent
ATTEMPTS = re.findall(r"(?m)^def try_(\w+)", (HERE / "attacks.py").read_text())
#: `run_confined` as an account that can read nothing of the tests' environment; the words after it are confined
COMMAND = """
import json, os, sys
package, folder = sys.argv[1:3]
sys.path.insert(0, package)
os.environ["PYTHONPATH"] = package
from hpcrl.sandbox.run import run_confined
command = [sys.executable, "-I", f"{folder}/attacks.py", f"{folder}/victim.json"]
done = run_confined(command, {"PATH": "/usr/bin:/bin"}, 120.0, ((folder, folder),))
print(done.out if done.out else json.dumps(done._asdict()))
"""
#: the same in a box, whose files from outside were written into it
BOX = """
import asyncio, json, os, sys
package, folder = sys.argv[1:3]
sys.path.insert(0, package)
os.environ["PYTHONPATH"] = package
from hpcrl.sandbox import SandboxPool

INSIDE = '''
import sys
sys.argv[:] = ["attacks.py", "victim.json"]
__file__ = "/usr/lib/os-release"
exec(compile(open("attacks.py").read(), __file__, "exec"))
'''

async def main():
    async with SandboxPool(warm=0) as pool, pool.box() as box:
        for name in ("attacks.py", "victim.json"):
            with open(f"{folder}/{name}") as file:
                await box.write(name, file.read())
        done = await box.run([sys.executable, "-I", "-c", INSIDE], 120.0)
        print(done.stdout if done.stdout else json.dumps(done._asdict()))
        assert (await box.run("echo served")).stdout == "served\\n"

asyncio.run(main())
"""
#: nothing is confined
BARE = """
import os, sys
folder = sys.argv[2]
os.execv(sys.executable, [sys.executable, "-I", f"{folder}/attacks.py", f"{folder}/victim.json"])
"""
SCRIPT = """
got=$(awk 'BEGIN {{ system("{python} -I {folder}/attacks.py {folder}/victim.json") }}')
printf 'python3\\0train.py\\0--got\\0%s\\0' "$got" > $HPCRL_CALLS/0
"""


@dataclass
class Outcome:
    """What came of all attempts: those that got what they wanted, and what was done outside."""

    got: dict[str, bool] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    said: str = ""


@contextmanager
def readable_directory() -> Iterator[Path]:
    """A directory of this package and the attacks that another account can read."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-attacks-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        package = folder / "package" / "hpcrl"
        source = Path(hpcrl.__file__).parent
        shutil.copytree(source / "sandbox", package / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
        (package / "utils").mkdir()
        utils = (f"utils/{name}.py" for name in ("__init__", "waiting"))
        for name in ("__init__.py", "errors.py", *utils):
            shutil.copy(source / name, package / name)
        (folder / "shown").mkdir()
        shutil.copy(HERE / "attacks.py", folder / "shown")
        yield folder


@contextmanager
def victim(folder: Path, user: SecondUser | None) -> Iterator[subprocess.Popen[str]]:
    """What an account, or this one, has; where it is has been written for the attacks."""
    account = {"user": user.uid, "group": user.gid, "extra_groups": []} if user else {}
    place = folder / "victim"
    place.mkdir()
    if user:
        os.chown(place, user.uid, user.gid)
        os.chown(folder / "shown", user.uid, user.gid)
        os.chown(folder / "shown" / "attacks.py", user.uid, user.gid)
    words = [PYTHON, "-I", str(HERE / "victim.py"), str(place)]
    if user:
        words[2:3] = ["-c", (HERE / "victim.py").read_text()]
    process = subprocess.Popen(
        words, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, **account
    )
    try:
        (folder / "shown" / "victim.json").write_text(read_line(process))
        yield process
    finally:
        process.communicate("\n", timeout=60)


def attack(program: str, user: SecondUser | None) -> Outcome:
    """Do all attempts, by one of the programs above, on what the account has that does them."""
    with readable_directory() as folder, victim(folder, user) as process:
        shown = folder / "shown"
        if program == "import":
            (shown / "run-evil.sh").write_text(SCRIPT.format(python=PYTHON, folder=shown))
            said = run_script(shown / "run-evil.sh", {}, seconds=120.0).arguments[1]
        elif user:
            said = user.run(program, str(folder / "package"), str(shown), timeout=200)
        else:
            words = [PYTHON, "-I", "-c", program, str(folder / "package"), str(shown)]
            said = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, cwd="/").stdout
        left = os.listdir(shown)
        process.stdin.write("\n")
        process.stdin.flush()
        damage = json.loads(read_line(process))
        damage += [f"{name} was written" for name in left if "attack-was" in name]
        lines = [line for line in said.splitlines() if line.startswith("{")] or ["{}"]
        return Outcome(json.loads(lines[-1]), damage, said)


WAYS = {"import": "import", "command": COMMAND, "box": BOX}
_done: dict[tuple[str, bool], Outcome] = {}


@pytest.fixture(
    params=[
        *("import-root", "command-root", "command-user", "box-root", "box-user"),
    ]
)
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """Once for each way and account."""
    way, account = request.param.split("-")
    key = way, account == "user"
    if key not in _done:
        _done[key] = attack(WAYS[way], make_user() if key[1] else None)
    return _done[key]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_gets_nothing(name: str, outcome: Outcome) -> None:
    assert len(outcome.got) == len(ATTEMPTS), outcome.said
    assert not outcome.got.get(name)


def test_nothing_was_done_outside(outcome: Outcome) -> None:
    assert outcome.got and not outcome.damage


def test_the_attempts_are_real() -> None:
    """The same program gets most of what it wants where it is not confined."""
    found = attack(BARE, make_user())
    assert sum(found.got.values()) >= 40, [name for name, got in found.got.items() if not got]
    assert len(found.damage) >= 8, found.damage

"""Whose a run directory may be, and whose the directories above it: as another user lays them out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.errors import UsageError
from hpcrl.run.owners import refuse_foreign, refuse_replaceable
from hpcrl.run.role import open_role
from hpcrl.run.rundir import RunDir
from tests.support.able import needs
from tests.support.rundirs import make
from tests.support.second_user import SecondUser

pytestmark = needs("root")
MAL, GROUP = 4711, 4712


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory where another user can come."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-owners-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def given(path: Path, mode: int, owner: int = MAL, group: int = GROUP) -> Path:
    path.mkdir()
    os.chown(path, owner, group)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o755, 0o700, 0o2775, 0o1770])
@pytest.mark.parametrize("below", ["run", "a/b/run", "link/run"])
def test_another_users_directory(mode: int, below: str, place: Path) -> None:
    """Whatever its mode, its owner may rename what is in it: refused, and nothing is made."""
    theirs = given(place / "theirs", mode)
    (theirs / "link").symlink_to(place / "theirs")
    before = sorted(place.rglob("*"))
    with pytest.raises(UsageError, match=f"may replace .*(user {MAL}|writable by all)"):
        RunDir.create(theirs / below)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(("mode", "accepted"), [(0o2770, True), (0o755, True), (0o2777, False), (0o3777, False)])
def test_a_directory_of_our_group(mode: int, accepted: bool, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project's, owned by the user that leads the group, is how clusters work."""
    monkeypatch.setattr(os, "getgroups", lambda: [GROUP])
    theirs = given(place / "project", mode)
    if accepted:
        RunDir.create(theirs / "me" / "run")
        return
    with pytest.raises(UsageError, match="writable by all"):
        RunDir.create(theirs / "me" / "run")


def test_an_account_of_the_system(place: Path) -> None:
    """One that owns a project's file system is no person; what everybody may write to is refused all the same."""
    RunDir.create(given(place / "system", 0o755, owner=998) / "run")
    with pytest.raises(UsageError, match="writable by all"):
        RunDir.create(given(place / "open", 0o1777, owner=997) / "run")


def test_a_directory_that_is_there_already(place: Path) -> None:
    with pytest.raises(UsageError, match=f"belongs to user {MAL}"):
        RunDir.create(given(place / "run", 0o777))


@pytest.mark.parametrize("theirs", ["", "recipe.json", "recipe.toml"])
def test_what_another_user_wrote_is_not_run(theirs: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resuming it would run its prepare commands; looking at it works as before."""
    root = make(place / "run", phase="failed")
    root.chmod(0o700)
    refuse_foreign(root)
    os.chown(root / theirs, MAL, GROUP)
    with pytest.raises(UsageError, match=f"belongs to user {MAL}"):
        refuse_foreign(root)
    assert main(["resume", str(root)]) == 2 and f"belongs to user {MAL}" in capsys.readouterr().err
    assert main(["status", str(root)]) == 0


def test_what_all_may_write_to_is_not_run(place: Path) -> None:
    root = make(place / "run", phase="failed")
    root.chmod(0o777)
    with pytest.raises(UsageError, match="chmod o-w"):
        refuse_replaceable(root)
    root.chmod(0o1777)
    assert main(["resume", str(root)]) == 2


@pytest.mark.process
def test_a_directory_exchanged_by_its_owner(place: Path, second_user: SecondUser, tmp_path: Path) -> None:
    """The attack as it was done: a sticky directory of the other user's, in which he exchanges the run."""
    os.chown(place, second_user.uid, second_user.gid)
    place.chmod(0o1777)
    with pytest.raises(UsageError, match="user may replace"):
        RunDir.create(place / "run")
    (place / "run").mkdir(mode=0o700)  # as it was accepted before
    make(place / "run", phase="failed")
    program = (
        "import os, sys, pathlib\nplace = pathlib.Path(sys.argv[1])\n(place / 'run').rename(place / 'old')\n"
        "(place / 'run').mkdir(mode=0o777)\n"
        "(place / 'run' / 'recipe.toml').write_text('prepare = [\"touch ' + sys.argv[2] + '\"]')\n"
        '(place / \'run\' / \'recipe.json\').write_text(\'{"path": "x", "overrides": {}, "identity": "x"}\')\n'
        "print('exchanged')"
    )
    assert second_user.run(program, str(place), str(tmp_path / "ran")).strip() == "exchanged"
    with pytest.raises(UsageError, match="belongs to user hpcrl-stranger"):
        refuse_foreign(place / "run")
    assert main(["resume", str(place / "run")]) == 2 and not (tmp_path / "ran").exists()


def test_another_users_link_to_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No directory is made where it leads."""
    lure = place / "lure"
    lure.symlink_to(place / "made" / "for-mal")
    os.lchown(lure, MAL, GROUP)
    words = ["run", str(Path(__file__).parents[2] / "examples/quickstart.toml"), "--run-dir", str(lure)]
    assert main(words) == 2
    assert f"lure belongs to user {MAL}" in capsys.readouterr().err and not (place / "made").exists()


def test_a_role_of_another_users_run(place: Path) -> None:
    """A role imports the run's copies of modules: not another user's."""
    root = make(place / "run")
    os.chown(root, MAL, GROUP)
    with pytest.raises(SystemExit, match=f"belongs to user {MAL}"):
        open_role([str(root), "--attempt", "0"])

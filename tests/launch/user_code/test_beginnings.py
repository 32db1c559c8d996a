"""What is left of a run that could not begin, and when a run that is resumed changes from where it imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config.recipe import Recipe, load_recipe
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch import batch_run
from hpcrl.launch.job import RunJob, begin_job, hold_run
from hpcrl.launch.local import run_recipe
from hpcrl.launch.user_code import snapshot
from hpcrl.plan import Host
from hpcrl.run.code_files import CODE, RECORD
from hpcrl.run.job_files import JobFile, replace_job
from hpcrl.run.rundir import FOLDERS
from hpcrl.run.started_runs import LIVE
from tests.launch.user_code.test_snapshot import REPO, write


def recipe() -> Recipe:
    """The quick start, with a function of ours."""
    found = load_recipe(REPO / "examples" / "quickstart.toml")
    found.stages[1].values.pop("rm_type", None)
    found.stages[1].values["custom_rm_path"] = "pack.f"
    return found


def begun(root: Path, home: Path) -> RunJob:
    write(home, {"pack/__init__.py": "def f(): pass\n", "pack/a.txt": ""})
    return begin_job(recipe(), {"run_dir": str(root)}, here=False)


class Allocation:
    """An allocation of one node, whose job was started again `restarts` times."""

    job_id, cluster = "7", None

    def __init__(self, restarts: int = 0) -> None:
        self.restarts = restarts
        self.backend = self

    def nodes(self) -> list[Host]:
        return [Host("n", 16)]

    def mark(self, *_: object) -> None:
        return None

    def ends(self) -> None:
        return None

    def preempted(self) -> bool:
        return False


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), HpcrlError("full")])
def test_nothing_is_left_of_a_copy_that_failed(
    home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, error: BaseException
) -> None:
    """The directory can be given again; one that the user made is still there."""
    place = root if there else tmp_path / "new"
    copy = snapshot._copy

    def fail(source: Path, *given: Any) -> Any:
        if source.name == "a.txt":
            raise error
        return copy(source, *given)

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "_copy", fail)
        with pytest.raises(type(error)):
            begun(place, home)
    assert list(place.iterdir()) == [] if there else not place.exists()
    assert (begun(place, home).root / CODE / "home" / "pack" / "a.txt").is_file()


def batch(tmp_path: Path, root: Path, allocation: Allocation, *words: str) -> int:
    """Start the quick start's recipe as a script by hand does."""
    path = tmp_path / "r.toml"
    text = (REPO / "examples" / "quickstart.toml").read_text().replace('rm_type = "math"', 'custom_rm_path = "pack.f"')
    path.write_text(text)
    given = [str(path), "--run-dir", str(root), *words]
    return batch_run.batch_main(given, lambda: allocation)  # type: ignore[arg-type,return-value]


def test_a_requeued_script_begins_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In what its own start that was killed has left, and in nothing else."""
    write(home, {"pack/__init__.py": "", "pack/a.txt": ""})
    monkeypatch.setattr(batch_run, "run_job", lambda *_, **__: 0)
    for name, restarts, other, code in (
        ("a", 1, "", 0),
        ("b", 0, "", 2),
        ("c", 1, "mine.txt", 2),
        ("d", 1, "keys/x", 2),
    ):
        root = tmp_path / name
        write(root, {f"{CODE}/half.py": "", f".{RECORD}.12": "", **({other: ""} if other else {})})
        for folder in FOLDERS:
            (root / folder).mkdir(exist_ok=True)
        assert batch(tmp_path, root, Allocation(restarts)) == code, capsys.readouterr().err
        assert (root / CODE / "half.py").exists() == bool(code) and (root / "recipe.json").exists() == (not code)


def test_scripts_switch_the_code(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--live-code in the last line of a script counts when it is submitted again, once no other process runs in the
    directory; other options of the run are refused as before."""
    write(home, {"pack/__init__.py": ""})
    root, marks = tmp_path / "run", []
    mark = root / LIVE

    def run(*_: Any, begin: Any, **__: Any) -> int:
        marks.append(mark.exists())
        if begin:
            begin()
        marks.append(mark.exists())
        return 0

    monkeypatch.setattr(batch_run, "run_job", run)
    for words in ((), ("--live-code",), (), ("--live-code",), ("--no-live-code",)):
        assert batch(tmp_path, root, Allocation(), *words) == 0, capsys.readouterr().err
    assert marks == [False, False, False, True, True, True, True, True, True, False]
    assert batch(tmp_path, root, Allocation(), "--seed", "3") == 2
    live = tmp_path / "live"
    for _ in range(2):
        assert batch(tmp_path, live, Allocation(1), "--live-code") == 0, capsys.readouterr().err


def test_a_refused_resume_changes_nothing(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither here, where another process runs it, nor where it cannot be submitted."""
    root = begun(tmp_path / "run", home).root
    called = []
    with hold_run(root, lambda: called.append("first")):
        with pytest.raises(UsageError, match="in use by process"), hold_run(root, lambda: called.append("second")):
            pass
        with pytest.raises(UsageError, match="in use by process"):
            run_recipe(None, {"live_code": True}, root)
    assert called == ["first"] and not (root / LIVE).exists()
    replace_job(root, JobFile("slurm", "7", identity="id", site={"name": "s"}))
    assert main(["resume", str(root), "--live-code"]) != 0 and "error" in capsys.readouterr().err
    assert not (root / LIVE).exists()

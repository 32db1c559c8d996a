"""What attempts leave behind is thinned out, and nothing that is read later is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from hpcrl.cli.main import main
from hpcrl.launch.attempts.attempt import begin_tidying, tidy
from hpcrl.plan import Location, Plan
from hpcrl.report.timeline.reading import read_stage
from hpcrl.report.timeline.spans import FOLDER, merged_of, role_timeline
from hpcrl.run.rundir import BEATS, RunDir, write_atomic

HOSTS = 3


def leave(root: Path, number: int) -> RunDir:
    """An attempt on HOSTS hosts that is over, with what its processes left."""
    rundir = RunDir(root, number)
    rundir.make_attempt()
    places = tuple(Location(f"node{host}", (0,), "127.0.0.1", "lo") for host in range(HOSTS))
    write_atomic(rundir.plan_file, msgspec.json.encode(Plan("x", number, places, (), places[0])))
    for host in range(HOSTS):
        for folder in ("doctor", BEATS, "answers-1", "hosts", "peers"):
            (rundir.here / folder).mkdir(exist_ok=True)
            (rundir.here / folder / f"node{host}.json").touch()
        (rundir.logs / f"trainer-{host}.log").write_text(f"attempt {number} of {host}\nlast\n")
        timeline = role_timeline(rundir, "trainer", host, f"node{host}")
        timeline.mark("ready", rollout_id=number)
        timeline.close()
    (rundir.here / "error.json").write_text("{}")
    return rundir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose fifth attempt has begun."""
    root = RunDir.create(tmp_path / "run").root
    (root / "recipe.json").write_text('{"identity": "x", "path": "r.toml"}')
    (root / "recipe.toml").write_text("")
    (root / "options.json").write_text("{}")
    return [leave(root, number) for number in range(5)][-1]


def files(run: RunDir) -> Counter[str]:
    """How many files there are of each attempt."""
    found = Counter[str]()
    for part in ("attempts", "logs", FOLDER):
        for path in (run.root / part).rglob("*"):
            if path.is_file() and not path.is_symlink():
                found[path.relative_to(run.root / part).parts[0].removeprefix("attempt-").partition(".")[0]] += 1
    return found


def test_old_attempts_are_a_few_files_each(run: RunDir) -> None:
    """The two last keep logs, timelines and peers, the one before the last nothing that its start alone needed; of
    those before, plan, error, logs and one file of timelines are left."""
    tidy(run)
    assert [files(run)[str(number)] for number in range(5)] == [
        3 + HOSTS,
        3 + HOSTS,
        3 + HOSTS,
        2 + 3 * HOSTS,
        2 + 7 * HOSTS,
    ]
    assert not (RunDir(run.root, 3).here / "hosts").exists() and (RunDir(run.root, 3).here / "peers").exists()
    assert (run.root / "logs" / "latest").resolve() == run.logs
    tidy(run)
    assert files(run)["0"] == 3 + HOSTS


def test_nothing_that_is_read_is_lost(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Timelines give the same tracks, and `hpcrl logs --attempt` the same lines."""
    tracks = read_stage(run.root)
    assert len(tracks) == 5 * HOSTS
    shown = []
    for _ in range(2):
        assert main(["logs", str(run.root), "--attempt", "1", "--host", "node2", "--lines", "2"]) == 0
        shown.append(capsys.readouterr().out)
        tidy(run)
    assert shown[0] == shown[1] == "trainer-2@node2 | attempt 1 of 2\ntrainer-2@node2 | last\n"
    assert read_stage(run.root) == tracks
    for words in (["--attempt", "9"], ["--attempt", "1", "-f"]):
        assert main(["logs", str(run.root), *words]) == 2
        assert words[1] in capsys.readouterr().err


def test_a_crash_on_the_way_loses_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between putting a file into its place and removing the directory; the next start ends what was begun."""
    tracks = read_stage(run.root)

    def crash(path: Path, *_: object, **__: object) -> None:
        raise OSError(f"no longer alive at {path}")

    old = RunDir(run.root, 0)
    with monkeypatch.context() as patched:
        patched.setattr("hpcrl.launch.attempts.attempt.shutil.rmtree", crash)
        for name in ("peers", "hosts", "doctor", BEATS, "answers-1"):
            for path in (old.here / name).glob("*"):
                path.unlink()
            (old.here / name).rmdir() if (old.here / name).exists() else None
        tidy(run)
    merged = merged_of(run.root / FOLDER / "attempt-0")
    assert merged.is_file() and (run.root / FOLDER / "attempt-0").is_dir()
    assert read_stage(run.root) == tracks, "counted once"
    (run.root / FOLDER / "attempt-0" / "trainer-1.jsonl").unlink()  # half removed
    assert read_stage(run.root) == tracks
    tidy(run)
    assert read_stage(run.root) == tracks and not (run.root / FOLDER / "attempt-0").exists()


def test_what_cannot_be_merged_stays(run: RunDir) -> None:
    """A timeline that is no regular file leaves that directory as it is, and the others are merged all the same."""
    (run.root / FOLDER / "attempt-0" / "trainer-9.jsonl").symlink_to("/dev/zero")
    begin_tidying(run).join(30)
    assert len(list((run.root / FOLDER / "attempt-0").iterdir())) == HOSTS + 1
    assert (
        not merged_of(run.root / FOLDER / "attempt-0").exists() and merged_of(run.root / FOLDER / "attempt-1").is_file()
    )


def test_a_file_that_was_half_merged_is_made_again(run: RunDir) -> None:
    """And nothing else is touched, such as what is being written there now."""
    tracks = read_stage(run.root)
    half, other = run.root / FOLDER / ".attempt-0.jsonl", run.root / FOLDER / ".launcher.jsonl"
    for path in (half, other):
        path.write_text("x")
    tidy(run)
    assert not half.exists() and other.exists() and read_stage(run.root) == tracks

"""The run directory: whole files, the first error kept."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrl.config.recipe import load_recipe
from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.launch.job import begin_job
from hpcrl.launch.mpi.hostfile import read_hostfile
from hpcrl.plan import Host
from hpcrl.run.job_files import read_job, write_job
from hpcrl.run.rundir import ERROR, STOP, RunDir, write_atomic
from hpcrl.run.started_runs import RecipeFile, read_recipe_file, write_recipe_file
from hpcrl.run.summary import Summary, read_summary, summary_of, write_summary
from hpcrl.utils.untrusted_files import as_given, read_given


def test_only_the_owner_can_look_in(rundir: RunDir) -> None:
    for path in (rundir.root, rundir.keys):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_used_directory_is_refused(rundir: RunDir) -> None:
    with pytest.raises(UsageError, match=f"hpcrl resume {rundir.root}"):
        RunDir.create(rundir.root)


def test_simultaneous_runs_get_their_own(tmp_path: Path) -> None:
    """The time in a run directory's name has whole seconds: mkdir gives each name to one of them."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunDir.create(tmp_path / "runs" / "a-101500", another=True).root, range(8)))
    assert sorted(path.name for path in made) == ["a-101500", *(f"a-101500-{n}" for n in range(2, 9))]


def test_runs_begun_in_the_same_second_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    options = {
        "hf_checkpoint": "/m",
        "prompt_data": str(tmp_path / "p.jsonl"),
        "label_key": "label",
        "rm_type": "exact",
    }
    options |= {"num_rollout": 1, "rollout_num_gpus": 1, "rollout_batch_size": 8, "n_samples_per_prompt": 2}
    (tmp_path / "r.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    recipe, now = load_recipe(tmp_path / "r.toml"), time.gmtime()
    monkeypatch.setattr(time, "gmtime", lambda *_: now)
    given = {"run_dir": f"{tmp_path}/{{name}}-{{time}}"}
    first, second = (begin_job(recipe, given, lambda _: [Host("n", 16)], here=False) for _ in range(2))
    assert second.root == first.root.with_name(f"{first.root.name}-2") and second.identity != first.identity
    assert read_recipe_file(second.root).identity == second.identity
    with pytest.raises(UsageError, match="is not empty"):
        begin_job(recipe, {"run_dir": str(first.root)}, lambda _: [Host("n", 16)], here=False)


def test_no_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"):
        RunDir.latest(tmp_path)


def test_latest_log_link_follows_the_attempt(rundir: RunDir) -> None:
    second = RunDir(rundir.root, 1)
    second.make_attempt()
    assert (rundir.root / "logs" / "latest").resolve() == second.logs
    (rundir.root / "options.json").write_text("{}")
    assert RunDir.latest(rundir.root).attempt == 1


def test_first_error_is_kept_with_its_role(rundir: RunDir) -> None:
    """The first error is kept whole and shown with its role."""
    assert rundir.failure() is None
    rundir.fail("trainer", 2, "out of memory")
    rundir.fail("engine", 0, "lost connection")
    found = rundir.failure()
    assert (found.role, found.index, found.message) == ("trainer", 2, "out of memory") and abs(
        found.time - time.time()
    ) < 60
    with pytest.raises(PeerError, match="^trainer-2: out of memory$"):
        rundir.check()


def test_what_the_launcher_says_speaks_for_itself(rundir: RunDir) -> None:
    rundir.fail("launcher", 0, "host node7 did not answer")
    with pytest.raises(PeerError, match="^host node7 did not answer$"):
        rundir.check()


@pytest.mark.parametrize(
    "damage", [b"", b"\xff", b"[]", b'{"role": "engine"}', b'{"role": 1, "index": 0, "message": "", "time": 0}']
)
def test_a_damaged_error_still_ends_the_attempt(rundir: RunDir, damage: bytes) -> None:
    (rundir.here / ERROR).write_bytes(damage)
    with pytest.raises(PeerError, match=r"attempt has failed, and.*error\.json is damaged"):
        rundir.check()


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write leaves the old file and no other."""
    write_atomic(tmp_path / "a", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HpcrlError, match="No space left"):
        write_atomic(tmp_path / "a", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_stop_is_seen_by_all(rundir: RunDir) -> None:
    assert STOP not in rundir.signs()
    rundir.request_stop()
    assert STOP in RunDir(rundir.root, 0).signs()


def test_an_attempt_knows_that_a_later_one_has_begun(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "run")
    first.make_attempt()
    assert not first.superseded()
    later = RunDir(first.root, 1)
    later.make_attempt()
    assert first.superseded() and not later.superseded()


def test_partial_writes_are_removed(tmp_path: Path) -> None:
    """Partial files of a killed writer are removed wherever an attempt writes."""
    first = RunDir.create(tmp_path / "run")
    first.make_attempt()
    places = (
        "keys",
        "samples",
        "samples/trained",
        "checkpoints",
        "bank",
        "ledger",
        "ahead",
        "attempts/0",
        "attempts/0/hosts",
    )
    left = [first.root / place / ".00000024.jsonl.13423" for place in places]
    left.append(first.root / ".state.json.13423")
    kept = [first.root / ".options.json.13423", tmp_path / "elsewhere" / ".a.1", first.samples / "00000024.jsonl"]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    (first.samples / "link").symlink_to(tmp_path / "elsewhere")
    RunDir(first.root, 1).make_attempt()
    assert [path for path in left if path.exists()] == []
    assert all(path.exists() for path in kept)


def test_only_its_own_attempts_summary_counts(rundir: RunDir) -> None:
    assert read_summary(rundir.root) is None
    write_summary(rundir.root, Summary("stopped", attempt=0, rollout_id=3, total=10))
    assert summary_of(rundir) == read_summary(rundir.root) and not summary_of(rundir).finished
    assert summary_of(RunDir(rundir.root, 1)) is None


@pytest.mark.parametrize(
    "damage", [b"", b"\x00\x00", b"[]", b'{"status": "finished"}', b'{"status": "odd", "attempt": 0}']
)
def test_damaged_files_of_a_run_are_named(rundir: RunDir, damage: bytes) -> None:
    for name in ("summary.json", "recipe.json", "job.json"):
        (rundir.root / name).write_bytes(damage)
    with pytest.raises(HpcrlError, match=r"summary\.json is damaged"):
        summary_of(rundir)
    with pytest.raises(UsageError, match=r"recipe\.json is damaged.*start the recipe again"):
        read_recipe_file(rundir.root)
    if not damage.startswith(b'{"'):  # every field of job.json may be missing
        with pytest.raises(HpcrlError, match=r"job\.json is damaged"):
            read_job(rundir.root)


def test_start_record_and_job(rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run was started with, and the job it is in."""
    (tmp_path / "r.toml").write_text("lr = 1.0\n")
    begun = RecipeFile("identity", str(tmp_path / "r.toml"), {"lr": 2.0, "vllm": {"max_num_seqs": 1}})
    with pytest.raises(UsageError, match="not a run directory"):
        read_recipe_file(rundir.root)
    write_recipe_file(rundir.root, begun)
    assert read_recipe_file(rundir.root) == begun and (rundir.root / "recipe.toml").read_text() == "lr = 1.0\n"
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    assert read_job(rundir.root).scheduler == "local"
    write_job(rundir.root, "identity", "slurm", "7", script="job.sbatch", site={"name": "s"})
    write_job(rundir.root, "identity", "slurm", "8")
    job = read_job(rundir.root)
    assert (job.job_id, job.script, job.site) == ("8", None, {"name": "s"}), "only the site outlives a new start"


def test_nobody_can_put_another_directory_in_its_place(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        rundir = RunDir.create(tmp_path / "runs" / "mine" / "run")
    finally:
        os.umask(before)
    made = [rundir.root, *rundir.root.parents[:2]]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o755, 0o755]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match="another user may replace.*/open is writable by all;.*chmod o-w"):
        RunDir.create(tmp_path / "open" / "run")
    (tmp_path / "open").chmod(0o1777)
    RunDir.create(tmp_path / "open" / "run")


def test_a_file_that_a_user_names_ends(tmp_path: Path) -> None:
    """A recipe, a profile, a hostfile: a link is followed, a pipe of the shell's is read, and nothing waits for ever or
    fills the memory."""
    (tmp_path / "real").write_text("node1\n")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"x" * 200)
    assert read_given(tmp_path / "link") == "node1\n"
    for name, said in (
        ("fifo", "not a regular file"),
        ("large", "has more than 100 bytes"),
        (".", "not a regular file|directory"),
    ):
        with pytest.raises(OSError, match=said):
            read_given(tmp_path / name, 100)
    with pytest.raises(OSError, match="not a regular file"):
        read_given("/dev/zero")
    with pytest.raises(UsageError, match="not a regular file"):
        read_hostfile(tmp_path / "fifo")
    command = (
        f"exec 7< <(echo node1); {sys.executable} -c 'from hpcrl.utils.untrusted_files import read_given; "
        'print(read_given("/dev/fd/7"))\''
    )
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30).stdout == "node1\n\n"


def test_a_path_stays_as_it_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a login node's links lead may not be there on the nodes of the job; another user's link may lead elsewhere
    later."""
    real, said = tmp_path / "login-only" / "home", tmp_path / "home"
    real.mkdir(parents=True)
    said.symlink_to(real)
    assert (
        RunDir.create(said / "run").root == said / "run" and RunDir(said / "run" / "." / "x").root == said / "run" / "x"
    )
    (tmp_path / "r.toml").write_text("num_rollout = 1\n")
    (said / "r.toml").symlink_to(tmp_path / "r.toml")
    monkeypatch.chdir(said)
    for shell, root in ((said, said), ("", real), (tmp_path, real), ("/nowhere", real)):
        monkeypatch.setenv("PWD", str(shell))
        assert as_given("runs/a") == root / "runs/a"
        assert load_recipe("r.toml").path == root / "r.toml"
    assert as_given(said / ".." / "x") == tmp_path / "login-only" / "x", "not beside the link"
    (said / "open").mkdir()
    (said / "open").chmod(0o777)
    (tmp_path / "way").symlink_to(said / "open")
    with pytest.raises(UsageError, match="another user may replace"):
        RunDir.create(tmp_path / "way" / "run")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if said.lstat().st_uid not in (0, 4711):
        assert as_given(said / "run") == real / "run"
    else:  # as root: a link that is another's
        os.lchown(said, 4712, -1)
        assert as_given(said / "run") == real / "run"

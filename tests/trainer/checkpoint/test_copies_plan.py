"""Who keeps whose copy in memory, and what can be had from what is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.run.copies_directory import COPIES, OWNER, copies_directory, copies_here, tell_first, tell_followed
from hpcrl.run.rundir import RunDir
from hpcrl.run.scratch import sweep


@pytest.mark.parametrize(
    "hosts", [["a"] * 2 + ["b"] * 2, ["a", "b", "c"], ["a"] * 3 + ["b"], ["a"] + ["b"] * 3, ["a", "b", "a", "b"]]
)
def test_partners_are_on_other_hosts(hosts: list[str]) -> None:
    """Wherever there is more than one; who sends and who receives agree."""
    from hpcrl.trainer.checkpoint.copies_plan import partners, senders

    found = partners(hosts)
    assert all(partner is not None and hosts[partner] != hosts[rank] for rank, partner in enumerate(found))
    assert sorted(rank for one in range(len(hosts)) for rank in senders(hosts, one)) == list(range(len(hosts)))
    assert all(found[rank] == one for one in range(len(hosts)) for rank in senders(hosts, one))
    most = max(len(senders(hosts, rank)) for rank in range(len(hosts)))
    assert most <= 3, "a host with as many ranks keeps one copy a rank"


def test_one_host_has_no_partners() -> None:
    """Then a rank's own copy is all there is."""
    from hpcrl.trainer.checkpoint.copies_plan import partners

    assert partners(["a"] * 4) == [None] * 4 and partners([]) == []


def test_ranks_of_a_host_share_the_reading() -> None:
    """Those that see the same directory."""
    from hpcrl.trainer.checkpoint.copies_plan import share

    places = [("a", "/x"), ("a", "/x"), ("b", "/x"), ("a", "/y")]
    assert [share(places, rank) for rank in range(4)] == [(0, 2), (1, 2), (0, 1), (0, 1)]


def test_newest_complete_step_is_agreed_on() -> None:
    """All parts of one attempt; the work of bringing them is divided; nothing if a part of every step is missing."""
    from hpcrl.trainer.checkpoint.copies_plan import Part, newest_complete

    def part(rollout_id: int, rank: int, attempt: int = 0, world: int = 2) -> Part:
        return Part("run", rollout_id, rollout_id, attempt, rank, world, {})

    own = [[part(5, 0), part(6, 0)], [part(5, 1)]]
    assert newest_complete(own).step[0] == 5, "6 lacks a part"
    copied = [[part(5, 0), part(5, 1), part(6, 0)], [part(5, 1), part(5, 0), part(6, 1)]]
    found = newest_complete(copied)
    assert found.step[0] == 6 and found.holders == (0, 1)
    assert found.parts_from(0, copied[0]) == [part(6, 0)] and found.parts_from(1, copied[1]) == [part(6, 1)]
    lost = newest_complete([copied[0][:2], []])
    assert lost.step[0] == 5 and lost.holders == (0, 0), "one host has the parts of both"
    assert newest_complete([[part(5, 0)], [part(5, 1, attempt=1)]]) is None, "of two attempts"
    assert newest_complete([[part(5, 0)], [part(5, 1, world=3)]]) is None, "of two layouts"
    assert newest_complete([[], []]) is None
    both = newest_complete([[part(5, 0), part(5, 0, attempt=1)], [part(5, 1), part(5, 1, attempt=1)]])
    assert both.step[1] == 1, "the later attempt's"
    wide = [part(7, rank, world=4) for rank in range(4)]
    assert newest_complete([wide, wide]).holders == (0, 1, 0, 1)


@pytest.mark.parametrize("change", ["none", "cut", "changed", "gone", "index", "other run", "escapes"])
def test_only_whole_parts_count(tmp_path: Path, change: str) -> None:
    """A part that is cut, changed or without its index is not used, and none of another run, or that leads out of its
    directory."""
    from hpcrl.trainer.checkpoint.copies_plan import Part
    from hpcrl.trainer.checkpoint.copy_files import is_whole, part_directory, parts_here, write_index
    from hpcrl.trainer.checkpoint.whole import manifest

    directory = part_directory(tmp_path, 7, 3)
    directory.mkdir(parents=True)
    file = directory / "__3_0.distcp"
    file.write_bytes(b"tensors")
    files = manifest(directory, pieces=True)
    if change == "escapes":
        files = {f"../rank-00003/{file.name}": files[file.name]}
    write_index(directory, Part("run" if change != "other run" else "x", 7, 7, 0, 3, 4, files))
    if change == "cut":
        file.write_bytes(b"tens")
    if change == "changed":
        file.write_bytes(b"tensorS")
    if change == "gone":
        file.unlink()
    if change == "index":
        (directory / "index.json").unlink()
    found = [path for path, part in parts_here(tmp_path, "run", 6) if is_whole(path, part)]
    assert found == ([directory] if change == "none" else [])
    assert not list(parts_here(tmp_path, "run", 7)), "the disk has it"


def test_older_copies_go(tmp_path: Path) -> None:
    """Of this rank alone, and a step's directory with its last part."""
    from hpcrl.trainer.checkpoint.copy_files import clear, part_directory, remove_other

    for rollout_id, rank in ((5, 0), (5, 1), (6, 0), (7, 0)):
        part_directory(tmp_path, rollout_id, rank).mkdir(parents=True)
    remove_other(tmp_path, 0, 7)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["5", "5/rank-00001", "7", "7/rank-00000"]
    (tmp_path / ".lives").touch()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lives"]


def killed_in(rundir: RunDir) -> None:
    """A process of a host that was killed while it had a directory of copies."""
    pid = os.fork()
    if pid == 0:
        with copies_directory(True, rundir):
            os._exit(0)
    os.waitpid(pid, 0)


def left_by(rundir: RunDir) -> list[Path]:
    owners = Path("/dev/shm").glob(f"hpcrl-copies-*/{OWNER}")
    return [path.parent for path in owners if str(rundir.root) in path.read_text()]


def test_directory_lives_as_long_as_its_maker(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /dev/shm, for this user alone; one made above is used and left; one whose maker was killed is swept, once
    nobody takes it over any more."""
    monkeypatch.delenv(COPIES, raising=False)
    with copies_directory(False, rundir):
        assert copies_here() is None
    with copies_directory(True, rundir):
        here = copies_here()
        assert here is not None and here.parent == Path("/dev/shm") and here.stat().st_mode & 0o777 == 0o700
        (here / "7").mkdir()
        with copies_directory(True, rundir):
            assert copies_here() == here
        assert here.is_dir() and here not in sweep()
    assert not here.exists() and copies_here() is None
    killed_in(rundir)
    (left,) = left_by(rundir)
    assert left not in sweep(), "the next process of its host may be about to come"
    os.utime(left, (0, 0))
    assert left in sweep() and not left.exists()


def test_next_host_process_has_the_copies(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launcher begins another attempt, or where one was killed, the next process of the same launcher takes
    the directory over; one that lives is left alone, and one of an earlier launcher of the run goes."""
    monkeypatch.delenv(COPIES, raising=False)
    (rundir.root / "options.json").touch()
    tell_first(rundir, 0)
    with copies_directory(True, rundir):
        here = copies_here()
        (here / "7").mkdir()
        tell_followed(rundir)
    assert (here / "7").is_dir() and here not in sweep()
    later = RunDir(rundir.root, 1)
    later.make_attempt()
    tell_first(later, 0)
    killed_in(later)
    assert left_by(rundir) == [here]
    with copies_directory(True, later):
        assert copies_here() == here and (here / "7").is_dir()
        monkeypatch.delenv(COPIES)
        with copies_directory(True, later):
            assert copies_here() != here, "another process of this host has it"
        monkeypatch.setenv(COPIES, str(here))
    assert not here.exists()
    killed_in(later)
    another = RunDir(rundir.root, 2)
    another.make_attempt()
    tell_first(another, 2)
    with copies_directory(True, another):
        assert left_by(rundir) == [copies_here()] and not list(copies_here().glob("[0-9]*"))
    assert left_by(rundir) == []

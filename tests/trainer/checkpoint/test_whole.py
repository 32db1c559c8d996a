"""Which checkpoint a run resumes from: the newest whole one of its own, unless the user has named another."""

from __future__ import annotations

import errno
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import DataError, HpcrlError
from hpcrl.models.files.torch_dist import _check_archive
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import judge_run
from hpcrl.run.rundir import CHOSEN, TRACKER, RunDir
from hpcrl.run.skipped_checkpoints import read_passed_over, tell_passed_over
from tests.support.rundirs import NOW, begin, make

STEPS = (20, 40, 60)


def put(directory: Path, number: int, run_id: str | None = "mine", **files: bytes) -> Path:
    """A checkpoint as files; run_id None: of Megatron-LM, "": its record is damaged."""
    from hpcrl.trainer.checkpoint.whole import manifest

    path = directory / f"iter_{number:07d}"
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    record = {"run_id": run_id, "rollout_id": number, "version": number, "data": None, "files": manifest(path)}
    if run_id is not None:
        (path / "hpcrl.json").write_text(json.dumps(record) if run_id else "{")
    return path


def name(directory: Path, number: object, chosen: object = None) -> None:
    (directory / TRACKER).write_text(f"{number}\n")
    if chosen is not None:
        (directory / CHOSEN).write_text(f"{chosen}")


# ---- the decision


@pytest.mark.parametrize(
    ("damaged", "taken"), [((), 60), ((60,), 40), ((60, 40), 20), ((40,), 60), ((60, 40, 20), None)]
)
def test_newest_whole_is_chosen(damaged: tuple[int, ...], taken: int | None) -> None:
    """The first that is whole is taken, what was passed over is told, and older ones are looked at only if needed; the
    error of the newest if none is whole."""
    from hpcrl.trainer.checkpoint.whole import choose

    looked: list[str] = []

    def examine(path: Path) -> Any:
        looked.append(path.name)
        if int(path.name) in damaged:
            raise DataError(f"{path} is cut", "resume from another")
        return f"record of {path}"

    older = lambda: [Path("40"), Path("20")]  # noqa: E731
    if taken is None:
        with pytest.raises(DataError, match="60 is cut; none"):
            choose(Path("60"), older, examine)
        return
    found = choose(Path("60"), older, examine)
    assert (found.path, found.record) == (Path(f"{taken}"), f"record of {taken}")
    assert found.passed == tuple(f"{number} is cut" for number in damaged if number > taken)
    assert looked == [f"{number}" for number in (60, 40, 20) if number >= taken]


def test_only_damage_is_passed_over() -> None:
    """A checkpoint of another run, or a host that cannot read, ends the resume; so does a damaged one that the user has
    named, with the words that name the one before."""
    from hpcrl.trainer.checkpoint.whole import choose

    def fails(error: HpcrlError) -> Any:
        def examine(_: Path) -> Any:
            raise error

        return examine

    with pytest.raises(HpcrlError, match="another run"):
        choose(Path("60"), lambda: [Path("40")], fails(HpcrlError("another run saved it")))
    with pytest.raises(DataError, match="cut; resume from 40"):
        choose(Path("60"), tuple, fails(DataError("cut", "resume from 40")))


def test_reading_that_fails_is_no_damage() -> None:
    """A network file system that lost the file is not damage, which would cost steps; a bad archive is."""

    class Gone:
        def __getattr__(self, _: str) -> Any:
            raise OSError(errno.ESTALE, "Stale file handle")

    class Bad:
        def __getattr__(self, _: str) -> Any:
            raise zipfile.BadZipFile("no end of central directory")

    with pytest.raises(OSError, match="Stale"):
        _check_archive(Gone(), "x")  # type: ignore[arg-type]
    with pytest.raises(DataError):
        _check_archive(Bad(), "x")  # type: ignore[arg-type]


# ---- what there is to choose from


def test_older_ones_are_of_the_same_run(tmp_path: Path) -> None:
    """Those before a checkpoint, newest first: of this run, or of a record that cannot be read."""
    from hpcrl.trainer.checkpoint.whole import older

    for number, run_id in ((5, "mine"), (10, "other"), (15, ""), (20, "mine"), (30, None), (40, "mine"), (50, "mine")):
        put(tmp_path, number, run_id)
    at = tmp_path / "iter_0000040"
    assert [int(path.name[5:]) for path in older(at, "mine")] == [20, 15, 5]
    assert [int(path.name[5:]) for path in older(at, None)] == [20, 15, 10, 5]


def test_lost_tracker(tmp_path: Path) -> None:
    """Without a tracker, or with one that names nothing, the newest of this run is looked at first; one of another run
    or none is no reason to resume, and the user's own word counts more."""
    from hpcrl.trainer.checkpoint.whole import named

    assert named(tmp_path, "mine") == (None, "")
    put(tmp_path, 80, "other")
    assert named(tmp_path, "mine") == (None, "")
    name(tmp_path, 60)
    with pytest.raises(HpcrlError, match="'60'"):
        named(tmp_path, "mine")
    for number in STEPS[:2]:
        put(tmp_path, number)
    newest = tmp_path / "iter_0000040"
    path, lost = named(tmp_path, "mine")
    assert path == newest and "'60'" in lost
    name(tmp_path, 20)
    assert named(tmp_path, "mine") == (tmp_path / "iter_0000020", "")
    (tmp_path / TRACKER).unlink()
    path, lost = named(tmp_path, "mine")
    assert path == newest and str(tmp_path / TRACKER) in lost
    (tmp_path / CHOSEN).write_text("20")
    assert named(tmp_path, "mine") == (tmp_path / "iter_0000020", "")


@pytest.mark.parametrize(
    ("tracker", "chosen", "wanted"),
    [(60, None, (60, False, "")), (60, 60, (60, True, "")), (60, 20, (60, False, "")), (None, None, (60, False, "is"))],
)
def test_source_of_a_resume(tmp_path: Path, tracker: int | None, chosen: int | None, wanted: Any) -> None:
    """(checkpoint, whether the user has named it, whether the tracker is lost), also where --load is the same
    directory and the newest has lost its record."""
    from hpcrl.trainer.checkpoint.resume import find_source

    for number in STEPS:
        put(tmp_path, number)
    if tracker is not None:
        name(tmp_path, tracker, chosen)
    for options in (Options(hf_checkpoint="x"), Options(hf_checkpoint="x", load=str(tmp_path))):
        found = find_source(options, tmp_path, "mine")
        assert (found.kind, found.foreign, int(found.path.name[5:]), found.named) == ("all", False, *wanted[:2])
        assert bool(found.lost) == bool(wanted[2])
    (tmp_path / "iter_0000060" / "hpcrl.json").unlink()
    if tracker is not None:
        assert find_source(options, tmp_path, "mine").kind == "all", "else its weights alone, from step 0"


# ---- one checkpoint's files


@pytest.mark.parametrize("change", ["none", "gone", "cut", "changed", "escapes"])
def test_files_are_as_written(tmp_path: Path, change: str) -> None:
    """Of every file the size, and of those without checksums of torch's a sum."""
    from hpcrl.trainer.checkpoint.whole import check_files, record_of

    path = put(tmp_path, 20, **{"metadata.json": b"{}", "__0_0.distcp": b"pieces"})
    victim = path / "metadata.json"
    if change == "gone":
        victim.unlink()
    if change == "cut":
        (victim := path / "__0_0.distcp").write_bytes(b"piec")
    if change == "changed":
        victim.write_bytes(b"[]")
    record = record_of(path, "mine")
    if change == "none":
        check_files(path, record.files)
        return
    if change == "escapes":
        record.files["../../x"] = (1, None)
        victim = path / "hpcrl.json"
    with pytest.raises(DataError, match=f"{victim} is (missing|damaged)"):
        check_files(path, record.files)


# ---- what is said, and what is kept


def test_it_is_said_once_and_shown_in_status(tmp_path: Path) -> None:
    """The same event is there once, and `hpcrl status` shows it with its attempt."""
    root = make(tmp_path / "run", phase="running")
    begin(root, 2)
    for attempt, text in ((1, "40 is cut"), (2, "40 is cut"), (2, "60 is cut")):
        tell_passed_over(RunDir(root, attempt), text)
    assert [(one.attempt, one.text) for one in read_passed_over(root)] == [(1, "40 is cut"), (2, "60 is cut")]
    assert judge_run(Run(root), NOW).notes == ["attempt 1: 40 is cut", "attempt 2: 60 is cut"]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    """Of the N newest that stay none is later than the tracker's, and a damaged record ends no run."""
    from hpcrl.trainer.checkpoint.saver import prune

    for number in STEPS:
        put(tmp_path, number, "" if number == 60 else "mine")
    put(tmp_path, 30)
    name(tmp_path, 40)
    assert [path.name for path in prune(tmp_path, "mine", 2, None)] == ["iter_0000020"]
    assert (tmp_path / "iter_0000060").is_dir()

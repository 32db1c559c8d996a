"""The look at the first rows of prompt files: what it refuses, and what it leaves to the roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import DataError
from hpcrl.prompt_files.early_look import FIRST, findings, look_at, prompt_files

GOOD = {"prompt": "1+1=", "label": "2"}


def options(prompts: Path | str, **more: Any) -> Options:
    return Options(prompt_data=str(prompts), input_key="prompt", label_key="label", rm_type="math", **more)


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_the_first_rows_alone_are_looked_at(tmp_path: Path) -> None:
    """A fault in one of them is named with its line; one after them is the roles' to find."""
    look_at([options(written(tmp_path / "a.jsonl", *[GOOD] * FIRST, {"prompt": 3}))])
    with pytest.raises(DataError, match=rf"b\.jsonl, line {FIRST}: "):
        look_at([options(written(tmp_path / "b.jsonl", *[GOOD] * (FIRST - 1), {"prompt": 3}))])
    with pytest.raises(DataError, match="line 2: no key 'label'"):
        look_at([options(tmp_path / "a.jsonl"), options(written(tmp_path / "c.jsonl", GOOD, {"prompt": "1"}))])


def test_files_without_rows_and_other_files(tmp_path: Path) -> None:
    for text in ("", "\n\n"):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(DataError, match=r"a\.jsonl holds no prompts"):
            look_at([options(tmp_path / "a.jsonl")])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt is not a"):
        look_at([options(tmp_path / "a.txt")])


def test_what_cannot_be_known_yet_is_left(tmp_path: Path) -> None:
    """A file that is not here, a slice, and prompts that a run does not read."""
    bad = written(tmp_path / "bad.jsonl", {"no": 1})
    look_at([options(tmp_path / "later.jsonl")])
    look_at([options(f"{bad}@[0:1]")])
    look_at([options(bad, load_debug_rollout_data="/x/{rollout_id}.pt"), options(bad, data_source_path="mine.Source")])
    assert not list(prompt_files(options(bad, load_debug_rollout_data="/x/{rollout_id}.pt")))
    assert list(prompt_files(options(bad))) == [str(bad)]


def test_held_out_sets_are_looked_at(tmp_path: Path) -> None:
    """With --eval-interval alone, and with their own keys."""
    good, other = written(tmp_path / "a.jsonl", GOOD), written(tmp_path / "b.jsonl", {"question": "1", "answer": "1"})
    given = {"eval_prompt_data": ["set", str(other)], "eval_input_key": "question"}
    look_at([options(good, **given)])
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: no key 'label'"):
        look_at([options(good, eval_interval=1, **given)])
    look_at([options(good, eval_interval=1, eval_label_key="answer", **given)])
    assert list(prompt_files(options(good, eval_interval=1, **given))) == [str(good), str(other)]


def test_findings_are_of_the_files_that_are_here(tmp_path: Path) -> None:
    good, bad = written(tmp_path / "a.jsonl", GOOD), written(tmp_path / "b.jsonl", {"no": 1})
    found = list(findings([options(good), options(tmp_path / "later.jsonl"), options(bad)]))
    assert [finding.level for finding in found] == ["ok", "fail"]
    assert str(good) in found[0].what and f"{bad}, line 1" in found[1].what

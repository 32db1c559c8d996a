"""The look at the first rows of prompt files: what it refuses, and what it leaves to the roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.prompt_words import read_word
from hpcrl.errors import DataError
from hpcrl.rollout.prompts import first_rows
from hpcrl.rollout.prompts.first_rows import FIRST, findings, look_at, prompt_files
from hpcrl.rollout.prompts.rows import open_rows

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


def test_what_cannot_be_known_yet_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not here, a slice of a large one, and prompts that a run does not read."""
    bad = written(tmp_path / "bad.jsonl", {"no": 1})
    look_at([options(tmp_path / "later.jsonl")])
    monkeypatch.setattr(first_rows, "SLICED", 3)
    look_at([options(f"{bad}@[0:1]")])
    look_at([options(bad, load_debug_rollout_data="/x/{rollout_id}.pt"), options(bad, data_source_path="mine.Source")])
    assert not list(prompt_files(options(bad, load_debug_rollout_data="/x/{rollout_id}.pt")))
    assert list(prompt_files(options(bad))) == [str(bad)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices_are_looked_at(kind: str, tmp_path: Path) -> None:
    """Their first rows, and that they have any: of prompts, of held-out sets, of a file without rows."""
    path = tmp_path / f"a.{kind}"
    rows = [*[GOOD] * 6, {"prompt": "1", "label": ""}, GOOD]
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    else:
        written(path, *rows)
    for good in ("[:6]", "[-1:]", "[2:4]"):
        look_at([options(f"{path}@{good}")])
    for bad in ("[:0]", "[100:]", "[5:5]"):
        for stage in (
            options(f"{path}@{bad}"),
            options(f"{path}@[:1]", eval_interval=1, eval_prompt_data=["s", f"{path}@{bad}"]),
        ):
            with pytest.raises(DataError, match=rf"a\.{kind}@\{bad[:-1]}\] holds no prompts"):
                look_at([stage])
    with pytest.raises(DataError, match=r"7: the label"):
        look_at([options(f"{path}@[6:]")])
    if kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(parquet.read_table(path).slice(0, 0), path)
        with pytest.raises(DataError, match=r"a\.parquet holds no prompts$"):
            look_at([options(path)])


def test_what_is_odd_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt that ends with the assistant's message, and messages as JSON text; nothing of usual rows."""
    user, assistant = ({"role": role, "content": "1+1="} for role in ("user", "assistant"))
    for prompt, said in (
        ([user, assistant], "with a message of"),
        (json.dumps([user]), "is JSON text"),
        ([assistant, user], ""),
        ("[1, 2]", ""),
    ):
        path = written(tmp_path / "a.jsonl", GOOD, {"prompt": prompt, "label": "2"})
        stage = options(path, apply_chat_template=True)
        look_at([stage])
        noted = capsys.readouterr().err
        assert (said in noted and "hpcrl: note: " in noted) if said else not noted
        assert [finding.level for finding in findings([stage])] == (["warn", "ok"] if said else ["ok"])


#: what a .jsonl file is -> its bytes
FILES = {
    "one JSON array": b'[{"prompt": "1",\n"label": "2"}]',
    "but a list; this is one JSON array": b'[{"prompt": "1", "label": "2"}]\n',
    "JSON over several lines": b'{\n  "prompt": "1"\n}\n',
    "UTF-16 text": '\ufeff{"prompt": "1"}\n'.encode("utf-16-le"),
    "this is UTF-16": '{"prompt": "1"}\n'.encode("utf-16-le"),
    "UTF-16": '{"prompt": "1"}\n'.encode("utf-16-be").join([b"\xfe\xff", b""]),
    "end in CR": b'{"prompt": "1"}\r{"prompt": "2"}\r',
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    "a parquet file": b"PAR1\x15\x04",
    "compressed": b"\x1f\x8b\x08\x00",
    "not UTF-8 in column 13": '{"prompt": "é"}\n'.encode("latin-1"),
    "nested too deep": b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}\n",
}


@pytest.mark.parametrize("said", FILES)
def test_what_a_file_is_instead(said: str, tmp_path: Path) -> None:
    """Said with file and line, and with the command that makes lines of JSON of it; by the roles as well."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(FILES[said])
    rows = open_rows(read_word(str(path), "--x"))
    for look in (lambda: look_at([options(path)]), lambda: rows[0]):
        with pytest.raises(DataError, match=r"a\.jsonl, line 1: ") as error:
            look()
        assert said in str(error.value)
        assert said.startswith("nested") or error.value.hint.startswith("one JSON object")
    path = path.rename(tmp_path / "a.parquet")
    if "LFS" in said:
        with pytest.raises(DataError, match=r"a\.parquet is a pointer"):
            look_at([options(path)])


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

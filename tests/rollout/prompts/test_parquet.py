"""Parquet prompt files: the same prompts as from .jsonl.  Needs pyarrow, which is an extra."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.config.prompt_words import PromptWord
from hpcrl.errors import DataError, HpcrlError
from hpcrl.rollout.prompts import first_rows
from hpcrl.rollout.prompts.rows import open_rows

ROWS = [
    {"prompt": [{"role": "user", "content": "1"}], "label": "1", "metadata": {"a": 1}},
    {
        "prompt": [
            {"role": "user", "content": "2"},
            {"role": "assistant", "content": None, "tool_calls": [{"n": "3"}]},
        ],
        "label": None,
    },
    {"prompt": [{"role": "user", "content": "3"}], "label": "3", "metadata": {"b": [2]}},
]


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def absent(name: str, *args: object) -> object:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", absent)
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    with pytest.raises(HpcrlError, match=r"p\.parquet:.*package pyarrow; pip install 'hpcrl\[parquet\]'"):
        open_rows(PromptWord("p", str(tmp_path / "p.parquet")))
    monkeypatch.setattr(first_rows, "find_spec", lambda name: None)
    first_rows.look_at([Options(prompt_data=str(tmp_path / "p.parquet"))])  # a login node need not have it


def test_rows_slices_and_nulls(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "p.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS), path, row_group_size=2)
    rows = open_rows(PromptWord("p", str(path)))
    assert [rows[i]["label"] for i in range(len(rows))] == ["1", None, "3"]
    assert rows[0]["prompt"] == ROWS[0]["prompt"] and rows[0]["metadata"] == {"a": 1}, "no keys of other rows"
    assert rows[1]["prompt"][1] == {"role": "assistant", "tool_calls": [{"n": "3"}]}
    assert rows.where(2) == f"{path}, row 3"
    last = open_rows(PromptWord("p", str(path), -1))
    assert (len(last), last[0]["label"], last.where(0)) == (1, "3", f"{path}, row 3")
    first = open_rows(PromptWord("p", str(path)), 2)
    assert [first[i]["label"] for i in range(len(first))] == ["1", None]
    with pytest.raises(DataError, match="holds no prompts"):
        open_rows(PromptWord("p", str(path), 3))


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "p.parquet").write_text(json.dumps({"a": 1}))
    with pytest.raises(DataError, match=r"p\.parquet.*not a parquet file"):
        open_rows(PromptWord("p", str(tmp_path / "p.parquet")))

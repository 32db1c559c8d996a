"""The best shapes are rehearsed, as a process each: what is counted takes the place of what was estimated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.cli import main
from hpcrl.errors import HpcrlError
from hpcrl.fit import rehearsed
from hpcrl.fit.rows import FitRow, make_rows
from hpcrl.memory.training import GIB
from hpcrl.rehearsal.reports import RankReport
from tests.fit.models import recipe, search
from tests.support import families


@pytest.mark.process
def test_the_best_shape_is_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many as are asked for, and no more; its memory is counted, with the allowances."""
    model = families.make(tmp_path / "model", "qwen3", odd=False, vocab_size=256, num_hidden_layers=2)
    path = tmp_path / "r.toml"
    path.write_text(
        f'hf_checkpoint = "{model}"\nprompt_data = "x.jsonl"\nlabel_key = "l"\nrm_type = "math"\nnum_rollout = 1\n'
        "bf16 = true\nn_samples_per_prompt = 2\nactor_num_gpus_per_node = 2\nrollout_num_gpus = 2\n"
        "tensor_model_parallel_size = 2\nsequence_parallel = true\nrollout_max_response_len = 64\n"
    )
    words = ["fit", str(path), "--gpus-per-node", "2", "--max-nodes", "2", "--json", "--no-colocate"]
    assert main([*words, "--rehearse", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["rehearsed"] for row in rows] == [True] + [False] * (len(rows) - 1)
    assert main([*words, "--rehearse", "0"]) == 0
    planned = json.loads(capsys.readouterr().out)["rows"]
    assert not rows[0]["refused"] and rows[0]["settings"] == planned[0]["settings"]
    counted, estimated = (found[0]["memory_gib"] for found in (rows, planned))
    assert counted == pytest.approx(estimated, rel=0.2), "most of it are the allowances"


def test_the_peak_of_what_was_counted(tmp_path: Path) -> None:
    """The fullest phase of the fullest rank, with the allowances, but for what a resumed run alone takes; on shared GPUs
    with what a sleeping engine keeps, unless the engines' turn takes more."""
    looking = search(recipe(tmp_path))
    rows = make_rows(looking.shapes(1).fitting, looking._target)
    alone = next(row for row in rows if not row.found.shape.shared)
    shared = next(row for row in rows if row.found.shape.shared)
    reports = [RankReport(0, peaks={"save": GIB}), RankReport(1, peaks={"save": 30 * GIB, "resume": 70 * GIB})]
    assert rehearsed.peak(alone, reports) == (pytest.approx(30 + 2, abs=3), "save")
    engines = replace(shared, memory=60.0, phase="engines")
    assert rehearsed.peak(engines, reports) == (60.0, "engines")
    assert rehearsed.peak(replace(engines, memory=3.0), reports) == (pytest.approx(30 + 4, abs=3), "save")


def test_which_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in order, until as many hold as were asked for; one that is refused makes room for the next, one that
    does not end is not tried again, and there is an end to trying."""
    looking = search(recipe(tmp_path))
    rows = make_rows(looking.shapes(3).fitting, looking._target)
    asked: list[float] = []

    def answer(row: FitRow, _: object) -> FitRow:
        asked.append(row.step)
        return replace(row, rehearsed=True, refused="no" if len(asked) == 1 else "")

    monkeypatch.setattr(rehearsed, "rehearsed", answer)
    found = rehearsed.rehearse_best(rows, 2, looking._target)
    assert asked == sorted(row.step for row in rows)[:3]
    assert [row.rehearsed for row in found[:2]] == [True, True] and found[-1].refused == "no"
    monkeypatch.setattr(rehearsed, "rehearsed", lambda row, _: asked.append(0) or replace(row, refused="no"))
    asked.clear()
    rehearsed.rehearse_best(rows, 1, looking._target)
    assert len(asked) == 2


def test_a_rehearsal_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides nothing, and is told."""

    def late(*_: object) -> None:
        raise HpcrlError("too long")

    looking = search(recipe(tmp_path))
    row = make_rows(looking.shapes(1).fitting[:1], looking._target)[0]
    monkeypatch.setattr(rehearsed, "asking_engine", late)
    found = rehearsed.rehearsed(row, looking._target)
    assert not found.rehearsed and not found.refused and "too long" in found.note


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where Megatron-core is not installed nothing is rehearsed, and what was asked for is an error."""
    monkeypatch.setattr(rehearsed, "PACKAGES", ("no_such_package",))
    assert rehearsed.rehearsals(None) == 0 and "no_such_package" in capsys.readouterr().err
    assert main(["fit", "r.toml", "--rehearse", "1"]) == 2
    assert "--rehearse 1" in capsys.readouterr().err

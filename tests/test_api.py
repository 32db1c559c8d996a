"""The Python API: light to import, and what it says of a run; tests/whole_runs/test_first_steps.py runs the notebook."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import hpcrl
from hpcrl import api
from hpcrl.errors import UsageError
from tests.support.rundirs import begin, log, make, put, steps

REPO = Path(__file__).parents[1]
GRPO = {"hf_checkpoint": "m", "prompt_data": "p.jsonl", "label_key": "label", "rm_type": "exact", "num_rollout": 3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two stages, with metrics, samples and checkpoints."""
    root = make(tmp_path / "run", stages=("sft", "grpo"))
    for name in ("sft", "grpo"):
        begin(root / name)
        log(root / name, *steps(3))
    for step in (0, 2):
        row = {"group": 0, "index": 1, "prompt": "1+1=", "response": "2", "reward": float(step)}
        path = put(root / "grpo" / "samples" / f"{step:08d}.jsonl", row)
        path.write_text(path.read_text() + "\n")
    for number in (1, 3):
        put(root / "grpo" / "checkpoints" / f"iter_{number:07d}" / ".metadata", {})
    put(root / "grpo" / "checkpoints" / "iter_0000004" / "torn", {})
    return root


def test_it_imports_nothing_heavy() -> None:
    """`import hpcrl` imports none of its own modules; its API no torch, vLLM or pandas."""
    code = (
        "import sys, hpcrl; before = [m for m in sys.modules if m.startswith('hpcrl.')]; hpcrl.open; hpcrl.run;"
        "print(before, [m for m in ('torch', 'vllm', 'megatron', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] []\n", done.stdout + done.stderr


def test_run_is_a_room_and_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hpcrl.run` can be called, whatever of the package of that name was imported before."""
    import hpcrl.run.rundir

    monkeypatch.setattr(api, "run", lambda *given, **more: (given, more))
    assert hpcrl.run("r.toml", lr=1) == (("r.toml",), {"lr": 1})  # type: ignore[operator]
    assert hpcrl.run.rundir.RunDir
    assert not hasattr(hpcrl, "nothing")


def test_what_a_run_holds(run: Path) -> None:
    opened = hpcrl.open(run)
    assert opened.root == run and opened.status.stages == ["sft", "grpo"] and opened.options["num_rollout"] == 10
    rows = opened.metrics(frame=False)
    assert [row["stage"] for row in rows] == ["sft"] * 3 + ["grpo"] * 3
    assert len(opened.metrics("grpo", frame=False)) == 3
    assert [sample["reward"] for sample in opened.samples()] == [2.0]
    assert opened.samples(0)[0]["response"] == "2" and opened.samples(evaluation="none") == []
    assert [path.name for path in opened.checkpoints] == ["iter_0000001", "iter_0000003"], "whole ones"
    with pytest.raises(UsageError, match="samples of 1; .* 0, 2"):
        opened.samples(1)
    with pytest.raises(UsageError, match="stage rl; .* sft, grpo"):
        opened.metrics("rl")
    with pytest.raises(UsageError, match="no run nowhere"):
        hpcrl.open("nowhere")


def test_metrics_as_a_frame(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pandas a DataFrame; without it the rows, or an error for who insists."""
    opened = hpcrl.open(run)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert isinstance(opened.metrics(), list)
    with pytest.raises(UsageError, match="pandas"):
        opened.metrics(frame=True)
    frames = SimpleNamespace(DataFrame=SimpleNamespace(from_records=lambda rows: ("frame", len(rows))))
    monkeypatch.setitem(sys.modules, "pandas", frames)
    assert opened.metrics() == opened.metrics(frame=True) == ("frame", 6)
    assert isinstance(opened.metrics(frame=False), list)


def test_a_run_that_has_ended_is_waited_for(tmp_path: Path) -> None:
    done = make(tmp_path / "done", phase="failed", pid=1 << 22)
    assert hpcrl.open(done).wait(30).phase == "failed"


# ---- options


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in GRPO.items())
    (tmp_path / "recipe.toml").write_text(f'{text}[[stage]]\nname = "rl"\nlr = 1.0\n')
    return tmp_path / "recipe.toml"


def test_options_are_flags(recipe: Path, tmp_path: Path) -> None:
    """By name, of a stage, in a table; None is not given, and the run directory is the caller's own."""
    given: dict[str, Any] = {"seed": 7, "bf16": False, "rl": {"lr": 2e-5}, "vllm": {"max_num_seqs": 4}, "load": None}
    words, root = api._read(recipe, given | {"run_dir": Path("one")})
    assert (
        words == ["--seed=7", "--no-bf16", "--rl.lr=0.00002", '--vllm={"max_num_seqs":4}'] and root == tmp_path / "one"
    )
    numbers = {"seed": numpy.int64(7), "lr": numpy.float64(0.5), "vllm": {"max_num_seqs": numpy.int32(4)}}
    assert api._read(recipe, numbers)[0] == ["--seed=7", "--lr=0.5", '--vllm={"max_num_seqs":4}'], "of a notebook"
    (root := api._read(recipe, {"name": "x"})[1]).mkdir(parents=True)
    assert (
        root.name.startswith("x-")
        and api._read(recipe, {"name": "x", "run_dir": f"{root.parent}/{root.name}"})[1] == root
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [({"lr": "x"}, "--lr x: expected a number"), ({"lrr": 1}, "--lrr"), ({"rl": {"lrr": 1}}, "--rl.lrr")],
)
def test_wrong_options_are_told_at_once(recipe: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        hpcrl.run(recipe.parent, **options)  # type: ignore[operator]
    assert not (recipe.parent / "runs").exists()


def test_submit_takes_the_same(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options by name, and what the command has of its own; what comes back is the first job."""
    calls: list[Any] = []
    monkeypatch.setattr(
        "hpcrl.launch.slurm.submission.submit_new", lambda *given: calls.append(given) or (None, ["job", "next"])
    )
    job = hpcrl.submit(
        recipe.parent, time="1:00:00", set={"python": "/p"}, chain=2, name="x", rl={"lr": 1}, run_dir="d"
    )
    [(given, flags, site, chain)] = calls
    assert (job, given.name, chain, site.python) == ("job", "x", 2, "/p")
    assert flags["rl.lr"] == 1 and flags["run_dir"] == "d"


# ---- as documented


def test_the_page_has_every_name() -> None:
    page = (REPO / "docs" / "customise.md").read_text()
    for name in ("init", "run", "submit", "open"):
        assert f"`hpcrl.{name}(" in page
    for name, member in vars(api.OpenRun).items():
        if not name.startswith("_"):
            assert f"`.{name}{'(' if inspect.isfunction(member) else '`'}" in page, name
    assert "`.root`" in page

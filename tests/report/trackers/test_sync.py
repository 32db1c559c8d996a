"""`hpcrl report --to`: what each tracker is sent, once, by stand-ins that record the calls of the package."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.report.run_files import Run
from hpcrl.report.trackers import record
from hpcrl.report.trackers.record import TRACKERS, without_secrets
from tests.support.rundirs import begin, log, make, put, steps


class Recorder(ModuleType):
    """A package of which anything can be called; the calls are recorded."""

    def __init__(self, name: str, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(name)
        self.calls = calls
        self.url = self.dir = self.run_id = self.experiment_id = "there"
        self.info = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*given: Any, **more: Any) -> Any:
            self.calls.append((name, given, more))
            return [] if name == "search_runs" else self

        return call

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = make(tmp_path / "run")
    begin(root)
    log(root, *steps(2))
    put(root / "samples" / "00000001.jsonl", {"prompt": "1+1=", "response": "2", "label": "2", "reward": 1.0})
    (root / "report.html").write_text("<html>")
    return root


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    found: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for name in (*TRACKERS.names(), "pandas"):
        monkeypatch.setitem(sys.modules, name, Recorder(name, found))
    monkeypatch.setattr(record.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=name))
    return found


def test_the_trackers() -> None:
    assert TRACKERS.names() == ("mlflow", "trackio", "wandb")


@pytest.mark.parametrize("tracker", TRACKERS.names())
def test_what_is_sent(
    tracker: str,
    run: Path,
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options, metrics of every step, samples, the report; of a run that has continued what is new alone."""
    assert main(["report", str(run), "--to", tracker]) == 0
    assert "2 records" in capsys.readouterr().out
    text = repr(calls)
    assert "'train/loss'" in text and "1+1=" in text and "num_rollout" in text
    assert tracker == "trackio" or "report.html" in text
    logged = [name for name, *_ in calls if name in ("log", "log_metrics")]
    calls.clear()
    assert main(["report", str(run), "--to", tracker]) == 0
    assert "nothing new in" in capsys.readouterr().out and not calls
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"rollout_id": 2, "time": 1e10, "train/loss": 1.0, "bad": None}) + "\n")
    assert main(["report", str(run), "--to", tracker]) == 0
    assert "1 records" in capsys.readouterr().out and "'bad'" not in repr(calls)
    assert len([name for name, *_ in calls if name in ("log", "log_metrics")]) == len(logged) - 1


def test_samples_and_page_follow_metrics(run: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A live process that has sent all metrics sends the samples as it ends; what has no page yet gets it later."""
    sender = record.Sender("wandb")
    assert [count for _, count, _ in sender.send_new(Run(run), None, last=False)] == [2]
    assert "1+1=" not in repr(calls) and "finish" not in [name for name, *_ in calls]
    assert [count for _, count, _ in sender.send_new(Run(run), None)] == [0]
    assert "1+1=" in repr(calls) and "finish" in [name for name, *_ in calls]
    assert main(["report", str(run), "--to", "wandb"]) == 0 and "report.html" in repr(calls)
    calls.clear()
    assert main(["report", str(run), "--to", "wandb"]) == 0 and not calls


def test_what_fails_is_sent_again(
    run: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(stage: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(importlib.import_module("hpcrl.report.trackers.wandb"), "opened", refuses)
    assert main(["report", str(run), "--to", "wandb"]) == 1
    assert "ConnectionError: no network" in capsys.readouterr().err
    monkeypatch.undo()
    assert not (run / record.SENT).exists()


def test_a_tracker_that_there_is_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--to", "wandbb"]) == 2 and "did you mean wandb?" in capsys.readouterr().err
    for name in TRACKERS.names():
        if importlib.util.find_spec(name) is None:
            assert main(["report", str(run), "--to", name]) == 2 and f"hpcrl[{name}]" in capsys.readouterr().err


def test_no_secret_is_sent() -> None:
    """Nor the value of any environment variable; other values are as they were."""
    given = {
        "train_env_vars": {"HF_TOKEN": "hf_1"},
        "custom": {"judge_api_key": "k", "max_tokens": 7},
        "rollout_external_engine_addrs": ["http://me:pw@host:1/a"],
        "tokenizer": "a/b",
    }
    assert without_secrets(given) == {
        "train_env_vars": {"HF_TOKEN": "..."},
        "custom": {"judge_api_key": "...", "max_tokens": 7},
        "rollout_external_engine_addrs": ["http://...@host:1/a"],
        "tokenizer": "a/b",
    }


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed: it comes before a directory")
def test_a_directory_is_no_package(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tracker has written, in the directory that Python was started in."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert main(["report", str(run), "--to", "wandb"]) == 2


def test_names_that_mlflow_takes(run: Path, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    log(run, {"rollout_id": 9, "time": 9e9, "eval/aime/pass@8": 0.5})
    assert main(["report", str(run), "--to", "mlflow"]) == 0
    assert "eval/aime/pass_8" in repr(calls) and "pass@8" not in repr(calls)


def test_identity_is_of_the_run(run: Path, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Wherever its directory is moved."""
    found = Run(run)
    before = record._tracked(found, found.stages[0], [], None).identity
    run.rename(run.parent / "moved")
    moved = Run(run.parent / "moved")
    assert record._tracked(moved, moved.stages[0], [], None).identity == before

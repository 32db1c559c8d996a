"""What is recorded of the suite and the benches: one table at a time, in one order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import REPO
from tools import baseline

pytestmark = pytest.mark.lint


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is recorded yet."""
    monkeypatch.setattr(baseline, "FILE", tmp_path / "baseline.toml")
    return tmp_path / "baseline.toml"


def report(path: Path, *skipped: int) -> str:
    """A file as pytest's --junitxml writes it."""
    suites = "".join(f'<testsuite name="pytest" tests="9" skipped="{count}"/>' for count in skipped)
    path.write_text(f"<testsuites>{suites}</testsuites>")
    return str(path)


def test_a_measurement_replaces_its_own_table(file: Path) -> None:
    baseline.write("mutants", {"core": ["b", 'a "quoted"'], "none": []})
    baseline.write("bench.queue", {"ours / zmq": 1.5, "rounds": 6})
    baseline.write("bench.trainer", {"dp2": 0.98})
    baseline.write("bench.queue", {"rounds": 5})
    assert baseline.read() == {
        "mutants": {"core": ["b", 'a "quoted"'], "none": []},
        "bench": {"queue": {"rounds": 5}, "trainer": {"dp2": 0.98}},
    }
    text = file.read_text()
    baseline.write("bench.queue", {"rounds": 5})
    assert file.read_text() == text


def test_skipped_tests_of_several_reports_add_up(tmp_path: Path) -> None:
    few, more = report(tmp_path / "few.xml", 2, 1), report(tmp_path / "more.xml", 1)
    assert baseline.main(["skipped", "core", few]) == 0
    assert baseline.main(["skipped", "full and cluster", few, more]) == 0
    assert baseline.read() == {"skipped": {"core": 3, "full and cluster": 4}}


def test_lines_that_run_by_package() -> None:
    """Lines are added up before they are divided: a large file counts as much as it is long."""
    found = baseline.covered(
        {
            "hpcrl/queue/a.py": {"covered_lines": 9, "num_statements": 10},
            "hpcrl/queue/deep/b.py": {"covered_lines": 0, "num_statements": 30},
            "hpcrl/run/c.py": {"covered_lines": 0, "num_statements": 0},
            "hpcrl/plan.py": {"covered_lines": 5, "num_statements": 10},
        }
    )
    assert found == {"queue": 22.5, "files": 50.0, "all": 28.0}


def test_medians_of_what_a_bench_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every number in its last line, over the runs; texts and switches are left out."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/odd.py").write_text(
        "import json, pathlib, sys\n"
        "file = pathlib.Path('runs')\n"
        "n = len(file.read_text()) if file.exists() else 0\n"
        "file.write_text('x' * (n + 1))\n"
        "print('a table')\n"
        "print(json.dumps({'ours': {'open': [5, 1, 3][n]}, 'text': 'x', 'quick': True, 'given': len(sys.argv)}))\n"
    )
    monkeypatch.setattr(baseline, "REPO", tmp_path)
    monkeypatch.setattr(baseline, "BENCHES", {"odd": ("--quick",)})
    assert baseline.main(["bench", "--runs", "3"]) == 0
    assert baseline.read() == {"bench": {"odd": {"ours open": 3.0, "given": 2.0}}}
    assert baseline.main(["nowhere"]) == 2


def test_every_bench_can_be_imported() -> None:
    """What benches import of the package and of tests/support moves now and then."""
    files = sorted((REPO / "bench").rglob("*.py"))
    names = [".".join(file.relative_to(REPO).with_suffix("").parts) for file in files]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""The page for users of TRL and verl: the words beside theirs are options, and their reward functions run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own
from tests.documents.texts import REPO, python_files
from tests.support.shares import plain_sample

NAMES = re.compile(r"`([^`]+)`")
#: settings of packages, which they answer for
PASSED_ON = ("vllm_", "vllm-", "recompute_")


def rows(trainer: str) -> list[tuple[str, str]]:
    """(their words, ours) of the table under "Words of TRAINER"."""
    page = (REPO / "docs" / "from-slime.md").read_text()
    text = page.partition(f"### Words of {trainer}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(row[0], row[1]) for row in cells]


def settings(cell: str) -> Iterator[str]:
    """The names of settings in a cell, without their values and the sections before them."""
    for word in NAMES.findall(cell):
        name = re.split(r"[=\s]", word)[0].rpartition(".")[2]
        if re.fullmatch(r"[a-z]\w*", name):
            yield name


@pytest.mark.parametrize("trainer", ["TRL", "verl"])
def test_our_words_are_options(trainer: str) -> None:
    known = set(Options.model_fields)
    ours = [name for _, cell in rows(trainer) for name in settings(cell) if "hpcrl " not in cell]
    assert len(ours) > 30
    assert [name for name in ours if name not in known and not name.startswith(PASSED_ON)] == []


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python files of the page, importable."""
    for name, text in python_files("from-slime"):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]], ids=["text", "messages"])
def test_a_function_of_trl_grades_a_group(prompt: object, modules: None) -> None:
    reward = load_own("custom_rm_path", "trl_rewards.brief")
    group = [
        plain_sample(2, n, response_index=n, prompt=prompt, response="x" * n, metadata={"level": n}) for n in (1, 3)
    ]
    assert reward(Options(), group) == [1 / 2, 1 / 4]


def test_a_function_of_verl_grades_its_rows(modules: None) -> None:
    reward = load_own("custom_rm_path", "verl_rewards.scored")
    label = {"style": "rule", "ground_truth": "2"}
    given = [plain_sample(2, 1, prompt="1+1=", response=said, label=label, metadata={}) for said in (" 2", "3")]
    assert [reward(Options(), sample) for sample in given] == [1.0, 0.0]

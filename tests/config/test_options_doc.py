"""docs/options.md and --help say what is declared, all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.options_doc import FIRST, markdown, run_help
from hpcrl.config.setting_names import sections

DOC = Path(__file__).parents[2] / "docs" / "options.md"


@pytest.mark.lint
def test_the_document_is_current() -> None:
    assert DOC.read_text(encoding="utf-8") == markdown(), "run: make docs"


def test_write_makes_the_document(tmp_path: Path) -> None:
    assert main(["options", "--write", str(tmp_path / "o.md")]) == 0
    assert (tmp_path / "o.md").read_text(encoding="utf-8") == markdown()


def test_every_option_is_in_one_section() -> None:
    names = [name for _, names in sections() for name in names]
    assert sorted(names) == sorted(Options.model_fields)


def test_every_option_is_explained() -> None:
    page, shown = (
        markdown().splitlines(),
        [line.split()[0] for line in run_help().splitlines() if line.startswith("  --")],
    )
    for name, field in Options.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        assert field.description, f"{flag} has no help line"
        rows = [line for line in page if line.startswith(f"| `{flag}` |")]
        assert len(rows) == 1 and field.description.replace("|", "\\|") in rows[0], flag
        assert shown.count(flag) == 1, flag


def test_a_default_is_shown_as_it_would_be_written() -> None:
    lines = {line.split("`")[1]: line for line in markdown().splitlines() if line.startswith("| `")}
    assert "| FLOAT >= 0 | 1e-06 | megatron |" in lines["--lr"]
    assert "| switch | on | megatron |" in lines["--bf16"]
    assert "| TEXT [TEXT ...] |  | slime |" in lines["--rm-type"]


def test_short_help_and_where_the_rest_is() -> None:
    """The short help shows some forty options and says where the others are."""
    assert Options.model_fields.keys() >= FIRST and 35 <= len(FIRST) <= 50
    text = run_help(every=False)
    shown = {line.split()[0][2:].replace("-", "_") for line in text.splitlines() if line.startswith("  --")}
    assert shown == FIRST
    assert text.endswith("more, by topic: hpcrl run --help-all, or docs/options.md")


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    few = capsys.readouterr().out
    assert main(["run", "--help-all"]) == 0
    every = capsys.readouterr().out
    assert run_help(every=False) in few and run_help() in every and "--sapo-tau-pos" not in few

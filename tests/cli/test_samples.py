"""`hpcrl samples`: which are shown, what of them, and that a model's text can do nothing to a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.cli.main import main
from hpcrl.report.sample_records import (
    Trained,
    held_out_sets,
    read_looks,
    steps_of,
    write_trained,
)
from hpcrl.report.sample_view import numbers, visible
from tests.support.rundirs import make
from tests.support.screens import run_on_terminal, screen

REPO = Path(__file__).parents[2]
EVIL = (
    "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202etxet\u2066 back\rspace\x08 [bold]x[/] :smile: line\nnext\ttab \x00 "
    "👩\u200d🚀"
)


def sample(group: int, index: int, reward: float, **more: Any) -> dict[str, Any]:
    status = "truncated" if reward < 0.2 else "completed"
    base = {
        "group": group,
        "index": index,
        "prompt": f"prompt {group}",
        "response": f"answer {group}.{index}",
        "label": None,
    }
    return base | {"reward": reward, "prompt_len": 5, "response_len": 4, "status": status, "versions": [3]} | more


def put(run: Path, step: int, *rows: dict[str, Any], name: str = "{:08d}.jsonl") -> Path:
    path = run / "samples" / name.format(step)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = make(tmp_path / "a")
    put(root, 0, *(sample(group, index, 0.1 * group) for group in range(3) for index in range(2)))
    put(root, 7, *(sample(group, index, 0.3 * group + 0.1 * index) for group in range(4) for index in range(2)))
    put(root, -1, sample(0, 0, 0.0), sample(1, 0, 1.0), name="eval-gsm8k-{}.jsonl")
    put(root, 7, sample(0, 0, 1.0), sample(1, 0, 1.0), name="eval-gsm8k-{}.jsonl")
    write_trained(root, 7, [Trained(g, i, 4, -0.5, 0.7 - g, -0.49, 0.01, 0.2) for g in range(4) for i in range(2)])
    return root


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["samples", *argv]) == 0
    return capsys.readouterr().out


def shown(text: str) -> list[str]:
    """Which samples: group.index."""
    return [line.split("answer ")[1] for line in text.splitlines() if line.startswith("    answer ")]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", ["0.0", "0.1", "1.0"]),
        ("-n 2", ["0.0", "0.1"]),
        ("--worst", ["0.0", "0.1", "1.0"]),
        ("--best -n 2", ["3.1", "3.0"]),
        ("--truncated", ["0.0", "0.1"]),
        ("--group 2", ["2.0", "2.1"]),
        ("--group 2 --best", ["2.1", "2.0"]),
        ("--step 0 --best -n 1", ["2.0"]),
        ("--eval gsm8k -n 1", ["0.0"]),
        ("--group 9", []),
    ],
)
def test_which_samples_are_shown(run: Path, capsys: pytest.CaptureFixture[str], flags: str, wanted: list[str]) -> None:
    assert shown(said(capsys, str(run), *flags.split())) == wanted


def test_evaluation_before_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation before the first step is listed under its set."""
    root = make(tmp_path / "a")
    for name, step in (("held", -1), ("held", 7), ("held-2", -1), ("held-2", 15), ("held-2-3", 7)):
        put(root, step, sample(0, 0, 0.0), name=f"eval-{name}-{{}}.jsonl")
    assert held_out_sets(root) == ["held", "held-2", "held-2-3"]
    assert [steps_of(root, name) for name in held_out_sets(root)] == [[0, 8], [0, 16], [8]]
    assert main(["samples", str(root), "--eval", "nope"]) == 2
    assert "there are held, held-2, held-2-3" in capsys.readouterr().err


@given(st.sets(st.integers(0, 60), min_size=1))
def test_numbers_in_a_few_words(steps: set[int]) -> None:
    """Numbers are printed in a few words, and missing ones are left out."""
    told = numbers(sorted(steps))
    found = set[int]()
    for part in filter(None, told.replace("...", "").split(", ")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == steps if "..." not in told else found < steps and {min(steps), max(steps)} <= found
    assert len(told.split(", ")) <= 11


def test_a_sample_says_all_that_is_known(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {
        "rewards": {"math": 1.0, "brief": 0.5},
        "baseline": 0.25,
        "label": "4",
        "versions": [3, 4],
        "grading": "error",
    }
    row = sample(0, 0, 1.5, **more, grading_error="raised KeyError")
    row["prompt"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
    put(run, 7, row)
    assert said(capsys, str(run)).splitlines() == [
        "step 7, group 0, sample 0  reward 1.5 (math 1, brief 0.5), greedy 0.25  completed, 5 + 4 tokens, policy "
        "versions 3 to 4  advantage +0.7",
        "  log-prob a token: trainer -0.5, engine -0.49; they differ by 0.01, at most 0.2; 4 trained",
        "  not graded (error): raised KeyError",
        "  prompt",
        "    [system] Be brief.",
        "    [user] 2+2=",
        "  label",
        "    4",
        "  response",
        "    answer 0.0",
        "",
    ]


def test_two_steps_or_runs_beside_each_other(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, str(run), "--eval", "gsm8k", "--diff", "0", "8", "-n", "1")
    assert text.startswith(
        "2 responses to the same prompts in evaluation gsm8k before the first step and evaluation gsm8k after 8 steps: "
        "mean reward 0.5 -> 1, 1 better, 0 worse, 1 the same"
    )
    assert "reward 0 -> 1" in text and shown(text) == ["0.0", "0.0"], "the greatest change first"
    text = said(capsys, str(run), "--diff", "0", "7", "-n", "9")
    assert text.startswith("6 responses to the same prompts in step 0 and step 7")
    other = make(tmp_path / "b")
    put(other, 2, sample(1, 0, 5.0))
    text = said(capsys, str(run), "--diff", f"{run}:0", str(other))
    assert text.startswith("1 responses") and f"{run}:0: group 1, sample 0  reward 0.1" in text and "b: group 1" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("RUN --step 5", "RUN has no samples"),
        ("RUN --eval gsm8k --step 7", "samples of an evaluation gsm8k after 7 steps; there are 0, 8"),
        ("RUN --eval aime", "set aime; there are gsm8k"),
        ("RUN -n 0", "-n 0 is less than 1"),
        ("RUN --worst --diff 0 7", "--worst has no effect with --diff"),
        ("RUN --diff 0 nosuchrun", "is no run nosuchrun"),
        ("EMPTY", "EMPTY has no samples"),
        ("RUN --diff 0 OTHER", "prompt in common; compare"),
    ],
)
def test_what_is_not_there_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: str, words: str
) -> None:
    put(make(tmp_path / "other"), 0, sample(0, 0, 1.0, prompt="another"))
    places = {"RUN": str(run), "EMPTY": str(make(tmp_path / "empty")), "OTHER": str(tmp_path / "other")}
    for name, place in places.items():
        argv = argv.replace(name, place)
        words = words.replace(name, place)
    assert main(["samples", *argv.split()]) == 2
    assert words in capsys.readouterr().err


def test_damaged_files_are_read_as_far_as_they_go(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(run, 7, sample(0, 0, 1.0), sample(0, 1, 1e999), sample(1, 0, 0.5))
    whole = path.read_bytes()
    path.write_bytes(whole.split(b"\n")[0] + b"\n\x00\x00\xff\n" + b"[" * 100_000 + b"\n" + whole.split(b"\n")[2][:40])
    assert main(["samples", str(run)]) == 0
    caught = capsys.readouterr()
    assert shown(caught.out) == ["0.0"] and "3 damaged lines were left" in caught.err
    (run / "samples/trained/00000007.jsonl").write_bytes(b'{"group":"x"}\n\xff')
    assert next(read_looks(run, 7)).trained is None


def test_nothing_of_a_model_is_obeyed(run: Path) -> None:
    put(
        run,
        7,
        sample(
            0,
            0,
            1.0,
            prompt=EVIL,
            response=EVIL,
            label=EVIL,
            status=EVIL,
            grading=EVIL,
            grading_error=EVIL,
            rewards={EVIL: 1},
        ),
    )
    env = {"PYTHONPATH": str(REPO), "XDG_STATE_HOME": str(run / "xdg")}
    for flags in ((), ("--diff", "7", "7")):
        status, text = run_on_terminal([sys.executable, "-m", "hpcrl", "samples", str(run), *flags], 300, run, env)
        lines = screen(text.replace("👩\u200d🚀", "@"), 300)
        assert status == 0 and "\x1b[" in text, "in colour"
        assert any("␛[31mred␛]0;title␇ \\x9b2J".replace("\\x9b", "\\u009b") in line for line in lines), lines
        assert any("\\u202etxet\\u2066 back␍space␈ [bold]x[/] :smile: line" in line for line in lines), lines


@given(st.text())
def test_visible_text_is_harmless_and_keeps_its_lines(text: str) -> None:
    found = visible(text)
    assert found.count("\n") == text.count("\n")
    assert all(c in "\n\u200c\u200d" or c.isprintable() or c.isspace() for c in found) and not set(
        "\x1b\r\x9b\u202e\x07"
    ) & set(found)


def test_a_transcript_turn_by_turn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the policy wrote, what it was told, and its commands; nothing of them is obeyed by a terminal."""
    command = {"box": 1, "at": 0.25, "command": "echo \x1b[31m", "code": 3, "seconds": 0.5, "limits": ["memory"]}
    turns = {"turns": [[1, 3], [0, 8], [1, 4]], "commands": [command]}
    put(run, 8, sample(0, 0, 1.0, response="ls\n\x9b2Jtold.done", transcript=turns), sample(0, 1, 0.0))
    found = said(capsys, str(run), "--step", "8", "--transcript")
    assert "\x1b" not in found and "\x9b" not in found
    lines = [line.strip() for line in found.splitlines()]
    at = [lines.index(name) for name in ("the policy", "told", "in sandboxes")]
    assert at == sorted(at) and lines[at[0] + 1] == "ls" and "told." in lines[at[1] + 1]
    assert lines[at[2] + 1] == "0.250 s  box 1  exit 3, at its limit of memory, 500 ms: echo \u241b[31m"
    assert lines.count("the policy") == 3 and "answer 0.1" in lines, "a response without one is a turn"
    assert "told" not in said(capsys, str(run), "--step", "8").splitlines()
    assert main(["samples", str(run), "--diff", "0", "8", "--transcript"]) != 0

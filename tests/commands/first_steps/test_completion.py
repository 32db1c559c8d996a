"""What the Tab key completes, asked of each shell that is installed; and the options as JSON and as a schema."""

from __future__ import annotations

import json
import operator
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli import COMMANDS, HELP, main
from hpcrl.commands.first_steps.completion import script
from hpcrl.commands.first_steps.options import facts, schema
from hpcrl.config.options import Options

REPO = Path(__file__).parents[3]
#: what is typed -> what is proposed, and what is not
TYPED = [
    ("hpcrl ru", {"run", "runs"}, {"plan"}),
    ("hpcrl run --rollout-te", {"--rollout-temperature"}, {"--lr"}),
    ("hpcrl run --no-bf", {"--no-bf16"}, set[str]()),
    ("hpcrl submit --si", {"--site"}, set[str]()),
    ("hpcrl plan r.toml --loop ", {"sync", "async", "fully-async"}, set[str]()),
    ("hpcrl run rec", {"recipe.toml"}, set[str]()),
    ("hpcrl status so", {"sorting-1"}, set[str]()),
]
BASH = 'COMP_WORDS=({words}); COMP_CWORD={last}; _hpcrl; printf "%s\\n" "${{COMPREPLY[@]}}"'


def asked(shell: str, line: str, folder: Path) -> set[str]:
    """What a shell proposes for a line, in `folder`."""
    (folder / "script").write_text(script(shell, list(COMMANDS), HELP))
    if shell == "fish":
        text = f"source script; complete -C '{line}'"
    else:
        words = line.split(" ")
        asks = BASH.format(words=" ".join(words[:-1]) + f" {words[-1]!r}", last=len(words) - 1)
        as_bash = "setopt ksh_arrays sh_word_split; " if shell == "zsh" else ""  # as zsh calls functions of bash's
        text = f"source ./script; {as_bash}{asks}"
    flag = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run([shell, *flag, "-c", text], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    found = {word.partition("\t")[0] for word in done.stdout.splitlines()}
    # zsh leaves out what does not begin with the word after the function has answered
    return {word for word in found if shell != "zsh" or word.startswith(line.rpartition(" ")[2])}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_is_proposed(shell: str, tmp_path: Path) -> None:
    """Commands, options, choices, recipes and runs; asked of the shell itself."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "runs" / "sorting-1").mkdir(parents=True)
    (tmp_path / "recipe.toml").touch()
    for line, wanted, absent in TYPED:
        found = asked(shell, line, tmp_path)
        assert wanted <= found and not absent & found, (line, found)
        assert all(word.startswith(line.rpartition(" ")[2]) for word in found), (line, found)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_name_is_not_run(shell: str, tmp_path: Path) -> None:
    """Another user may have made a directory in a `runs` that is shared."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for name in ("$(touch pwned)", "`touch pwned`", "s one"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert "s one" in asked(shell, "hpcrl status ", tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_every_command_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert f"{' '.join(COMMANDS)} --help" in capsys.readouterr().out
    assert main(["completion", "tcsh"]) == 2


# ---- as JSON


def fits(value: Any, rule: dict[str, Any]) -> bool:
    """Whether a value fits a JSON Schema, as far as `schema` uses them."""
    if "anyOf" in rule:
        return any(fits(value, one) for one in rule["anyOf"])
    kinds = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "object": dict, "array": list}
    kind = rule.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (kind in ("integer", "number") and isinstance(value, bool))):
        return False
    if "enum" in rule and value not in rule["enum"]:
        return False
    bounds = {
        "minimum": operator.ge,
        "exclusiveMinimum": operator.gt,
        "maximum": operator.le,
        "exclusiveMaximum": operator.lt,
    }
    if not all(within(value, rule[name]) for name, within in bounds.items() if name in rule):
        return False
    if kind == "array":
        return len(value) >= rule.get("minItems", 0) and all(fits(item, rule.get("items", {})) for item in value)
    if kind == "object":
        known = rule.get("properties", {})
        return set(rule.get("required", ())) <= value.keys() and all(
            fits(item, known[key]) for key, item in value.items() if key in known
        )
    return True


def test_shipped_recipes_fit_the_schema() -> None:
    """And wrong types, choices and bounds do not."""
    rules = schema()
    for path in (REPO / "examples").rglob("*.toml"):
        assert fits(tomllib.loads(path.read_text()), rules), path
    wrong = [{"lr": "x"}, {"loop": "never"}, {"num_rollout": -1}, {"bf16": 1}, {"stage": [{}]}, {"prepare": ["a", 1]}]
    assert [fits(document, rules) for document in wrong] == [False] * len(wrong)


def test_options_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [fact["name"] for fact in facts()] and len(rows) == len(
        Options.model_fields
    )
    [lr] = [row for row in rows if row["name"] == "lr"]
    assert lr["flag"] == "--lr" and lr["type"] == "float" and lr["source"] == "megatron" and lr["help"]
    assert main(["options", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema()))

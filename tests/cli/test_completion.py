"""What the Tab key completes, asked of each shell that is installed; and the options as JSON and as a schema."""

from __future__ import annotations

import json
import operator
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli import completion as module
from hpcrl.cli.completion import completed, script
from hpcrl.cli.main import COMMANDS, HELP, main
from hpcrl.cli.options import facts, schema
from hpcrl.cli.resume import LAYOUT
from hpcrl.config.options import Options
from hpcrl.config.stage_flags import stage_flag
from tests.support.able import require

REPO = Path(__file__).parents[2]
#: what is typed -> what is proposed, and what is not
TYPED = [
    ("hpcrl r", {"run", "resume", "report"}, {"plan"}),
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
    (folder / "script").write_text(script(shell, COMMANDS, HELP))
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
    require(shell)
    (tmp_path / "runs" / "sorting-1").mkdir(parents=True)
    (tmp_path / "recipe.toml").touch()
    for line, wanted, absent in TYPED:
        found = asked(shell, line, tmp_path)
        assert wanted <= found and not absent & found, (line, found)
        assert all(word.startswith(line.rpartition(" ")[2]) for word in found), (line, found)


def test_each_option_is_completed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In bash itself: after a command that takes a run's options, each of `hpcrl options --json`; after each command,
    the flags that it declares and, where they are few, their choices."""
    assert main(["options", "--json"]) == 0
    flags = {row["flag"] for row in json.loads(capsys.readouterr().out)}
    assert flags <= asked("bash", "hpcrl run --", tmp_path)
    resumed = {stage_flag("", name) for name in LAYOUT | {"num_rollout", "ckpt_step", "live_code"}}
    assert flags & resumed == flags & asked("bash", "hpcrl resume --", tmp_path)
    (tmp_path / "script").write_text(script("bash", COMMANDS, HELP))
    lines = [
        f"COMP_WORDS=(hpcrl {name} --); COMP_CWORD={len(name.split()) + 1}; _hpcrl; echo '{name}:' ${{COMPREPLY[@]}}"
        for name in completed(COMMANDS)
    ]
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(["source ./script", *lines])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    proposed = {line.partition(":")[0]: {*line.partition(":")[2].split()} for line in done.stdout.splitlines()}
    assert {name for name in proposed if " " not in name} == COMMANDS.keys() and not done.stderr
    for name, each in completed(COMMANDS).items():
        assert {"--help", *each.flags} <= proposed[name], name
        assert (each.options is None) == (flags <= proposed[name]), name
    assert {"--role", "--follow"} <= proposed["logs"] and "--help-all" in proposed["run"]
    assert {"math", "sft"} <= asked("bash", "hpcrl init x --task ", tmp_path)
    assert "serve" in asked("bash", "hpcrl engines ", tmp_path)
    assert {"--listen", "--keys"} <= asked("bash", "hpcrl engines serve --", tmp_path)
    assert "--rollout-num-gpus" in asked("bash", "hpcrl engines serve --", tmp_path)
    assert asked("bash", "hpcrl engines --", tmp_path) == {"--help", "--json"}
    assert {"to-hf"} <= asked("bash", "hpcrl convert to", tmp_path)


def test_a_new_command_and_option_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but its line in the command table and its own parser; of an option nothing but its declaration."""
    (tmp_path / "new_command.py").write_text(
        "from hpcrl.utils.arguments import Parser\ndef new(argv):\n    parser = Parser('new', 'x')\n"
        "    parser.add_argument('--colour', choices=['red', 'blue'])\n    parser.parse_args(argv)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(COMMANDS, "new", "new_command:new")
    row = {"flag": "--quite-new", "choices": ["a1", "b1"], "help": "x", "type": "str", "name": "quite_new"}
    monkeypatch.setattr(module, "facts", lambda: [*facts(), row])
    assert asked("bash", "hpcrl ne", tmp_path) == {"new"}
    assert asked("bash", "hpcrl new --", tmp_path) == {"--help", "--colour"}
    assert asked("bash", "hpcrl new --colour ", tmp_path) == {"red", "blue"}
    assert asked("bash", "hpcrl plan --quite-new ", tmp_path) == {"a1", "b1"}
    assert "-l colour -x -a 'red blue'" in script("fish", COMMANDS, HELP)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_name_is_not_run(shell: str, tmp_path: Path) -> None:
    """Another user may have made a directory in a `runs` that is shared."""
    require(shell)
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

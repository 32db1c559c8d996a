"""Settings of the user's own: where they are read from, what they cannot be, how own functions see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.custom_settings import read_yaml
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.errors import UsageError
from tests.support.options import GRPO

OWN = {"custom_rm_path": "my.reward", "rm_type": None}
PLACES = {"run": "/run", "prepared": "/run/prepared"}


def resolved(tmp_path: Path, **values: Any) -> Options:
    (tmp_path / "r.toml").write_text("")
    overrides = {key: value for key, value in (GRPO | OWN | values).items() if value is not None}
    return resolve_stages(load_recipe(tmp_path / "r.toml"), overrides, PLACES)[0]


def test_own_functions_read_them_as_options(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("turns: 4\nbounds: [0.5, 2]\nmode: clip\n")
    options = resolved(tmp_path, custom_config_path="{recipe}/own.yaml", custom={"mode": "mask"})
    assert (options.turns, options.bounds, options.mode) == (4, [0.5, 2], "mask")
    again = Options.model_validate_json(options.model_dump_json())
    assert again == options and again.turns == 4
    with pytest.raises(AttributeError, match="other"):
        _ = options.other
    assert not hasattr(resolved(tmp_path), "turns")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: 1", "own.yaml: lr is an option"),
        ("rollout-temperature: 1", "own.yaml: rollout-temperature is an option"),
        ("- 1", "own.yaml is not a table"),
        ("1: 2", "own.yaml is not a table"),
        ("a: [", "own.yaml.*not YAML: while parsing"),
        (None, "cannot read --custom-config-path .*own.yaml: No such file"),
    ],
)
def test_what_is_no_file_of_them(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UsageError, match=words):
        resolved(tmp_path, custom_config_path=str(tmp_path / "own.yaml"))


def test_what_they_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[custom\] lr is an option"):
        resolved(tmp_path, custom={"lr": 1})
    with pytest.raises(UsageError, match="--custom.*function that could read"):
        resolved(tmp_path, custom={"turns": 1}, custom_rm_path=None, rm_type="math")


BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{after}: &{after} [{', '.join(9 * [f'*{before}'])}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{after}: &{after} {{<<: [{', '.join(9 * [f'*{before}'])}]}}\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, MERGES, "a: &a [*a]", f"a: {'[' * 9000}{']' * 9000}", "a: " + "{b: " * 9000])
@pytest.mark.parametrize("flag", ["--custom-config-path", "--eval-config"])
def test_bombs_and_deep_files(text: str, flag: str, tmp_path: Path) -> None:
    """One error that names the file, before the file has become large in memory."""
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UsageError, match=f"{flag} .*own.yaml"):
        read_yaml(tmp_path / "own.yaml", flag)


@pytest.mark.parametrize(
    "word", ["2001-99-99", "!!int x", "!!float x", "9" * 5000, "!!bool x", "!!timestamp x", "!!binary é", "!!set [a]"]
)
def test_a_word_that_is_not_of_its_kind(word: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"path: {word}\n")
    with pytest.raises(UsageError, match="own.yaml is not YAML"):
        read_yaml(tmp_path / "own.yaml", "--eval-config")


def test_aliases_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")
    assert read_yaml(tmp_path / "own.yaml", "--x") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}

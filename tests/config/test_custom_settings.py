"""Settings of the user's own: where they are read from, what they cannot be, how own functions see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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

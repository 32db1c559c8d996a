"""Tables [adapter.NAME] of a recipe: what each may have of its own, and what a run with several cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import files_of, load_recipe, resolve_stages
from hpcrl.config.rules.several_adapters import OWN, adapter_options
from hpcrl.errors import UsageError
from tests.support.options import GRPO

TABLES = """
[adapter.digits]
prompt_data = ["{recipe}/digits.jsonl"]
lr = 1e-3
custom_rm_path = "{recipe}/rewards.py:digits"

[adapter.long-division]
seed = 7
rm_type = "exact"
"""


def resolved(tmp_path: Path, top: str = "", tables: str = TABLES, **flags: Any) -> Options:
    path = tmp_path / "several.toml"
    path.write_text(f"lora_rank = 8\nlr = 1e-4\n{top}\n{tables}")
    (tmp_path / "rewards.py").write_text("def digits(options, sample): return 1.0\n")
    given = {name: value for name, value in GRPO.items() if name != "rm_type"}
    (options,) = resolve_stages(load_recipe(path), given | flags, {"run": "/run", "prepared": "/prepared"})
    return options


def test_an_adapter_has_the_runs_options_and_its_own(tmp_path: Path) -> None:
    own = adapter_options(resolved(tmp_path))
    assert list(own) == ["digits", "long-division"]
    digits, division = own.values()
    assert (digits.lr, division.lr, division.seed) == (1e-3, 1e-4, 7)
    assert digits.prompt_data == [f"{tmp_path}/digits.jsonl"] and division.prompt_data == GRPO["prompt_data"]
    assert digits.custom_rm_path == "rewards.digits" and digits.code_path == [str(tmp_path)]
    assert digits.lora_rank == division.lora_rank == 8 and not digits.adapter


def test_functions_in_files_are_kept_for_the_run(tmp_path: Path) -> None:
    resolved(tmp_path)
    found = files_of(load_recipe(tmp_path / "several.toml"), {}, {"run": "/run", "prepared": "/prepared"})
    assert found[f"{tmp_path}/rewards.py:digits"].path == "rewards.digits"


def test_saves_lie_next_to_each_other() -> None:
    options = Options(**GRPO | {"lora_rank": 4, "save": "/disk/saves", "adapter": {"a": {}, "b": {}}})
    assert [own.save for own in adapter_options(options).values()] == ["/disk/saves/a", "/disk/saves/b"]


def test_own_settings_are_added_to_those_of_the_run() -> None:
    options = Options(**GRPO | {"lora_rank": 4, "custom": {"a": 1, "b": 2}, "adapter": {"x": {"custom": {"a": 3}}}})
    assert adapter_options(options)["x"].custom == {"a": 3, "b": 2}


def test_what_an_adapter_may_have_of_its_own() -> None:
    assert Options.model_fields.keys() >= OWN
    shared = {"lora_rank", "hf_checkpoint", "tensor_model_parallel_size", "loop", "vllm", "megatron", "load", "save"}
    assert not OWN & shared


@pytest.mark.parametrize(
    ("top", "tables", "told"),
    [
        ("", TABLES + "lora_rank = 4", r"\[adapter.long-division\] lora_rank.*all adapters share it"),
        ("", TABLES + "sede = 4", "sede: .*did you mean seed"),
        ("", TABLES + 'lr = "much"', "adapter long-division: --lr"),
        ("", TABLES + "kl_loss_coef = 0.1", "adapter long-division: --kl-loss-coef has no effect"),
        ("kl_loss_coef = 0.1", TABLES, "--kl-loss-coef has no effect"),
        ("", "[adapter]\ndigits = 4", "adapter = .*dictionary"),
        ("", '[adapter."../up"]\nseed = 1', "name cannot be that"),
        ("colocate = true", TABLES, "--colocate and .*exclude each other"),
        ('loop = "async"', TABLES, "--loop async: with several adapters"),
        ('lora_serve = "merged"', TABLES, "--lora-serve merged"),
        ('advantage_estimator = "ppo"', TABLES, "have no critic"),
        ("", TABLES + 'advantage_estimator = "ppo"', "have no critic"),
        ("optimizer_cpu_offload = true", TABLES, "--optimizer-cpu-offload"),
        ("use_precision_aware_optimizer = true", TABLES, "--use-precision-aware-optimizer"),
        ("non_persistent_save_interval = 2", TABLES, "--non-persistent-save-interval"),
    ],
)
def test_what_does_not_go_with_several(tmp_path: Path, top: str, tables: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        resolved(tmp_path, top, tables)


def test_tables_need_a_rank() -> None:
    from hpcrl.config.rules.option_rules import check_options

    with pytest.raises(UsageError, match="--lora-rank is not given"):
        check_options(Options(**GRPO | {"adapter": {"a": {"seed": 1}}}))


def test_an_option_that_one_adapter_needs_is_shared(tmp_path: Path) -> None:
    """As with stages: it has no effect in the other, which is no error."""
    kl = "use_kl_loss = true"
    both = resolved(tmp_path, "kl_loss_coef = 0.1", TABLES + kl)
    assert [own.use_kl_loss for own in adapter_options(both).values()] == [False, True]

"""The argument lists of slime's own end-to-end tests, which are launchers in Python: what becomes of each.

e2e.json: name -> program, file of model arguments, the words after it, the files that the launcher writes ("ROLES" in the
words stands for one's path), and the outcome: it passes as it is, its model is of no family here ("family"), or the
beginnings of what is said.  The lists are those of slime's tests/test_*.py of 2026 that call `execute_train`, in the
variants that their settings make.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import resolve_stages
from hpcrl.config.slime.script_notes import model_families
from hpcrl.config.slime.verbatim import PLACES, recipe_of
from hpcrl.errors import UsageError, parts_of
from hpcrl.sandbox.slime_script import run_script
from tests.support.able import needs

LISTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("e2e.json").read_text())
PASS = [name for name, one in LISTS.items() if one["outcome"] == "passes"]


def words_of(name: str, folder: Path) -> list[str]:
    """Program and arguments, with the files that the launcher would have written."""
    words = shlex.split(LISTS[name]["arguments"])
    for key, text in LISTS[name].get("files", {}).items():
        (folder / f"{key}.yaml").write_text(text)
        words = [str(folder / f"{key}.yaml") if word == key else word for word in words]
    return [LISTS[name]["program"], *words]


def resolved(name: str, folder: Path) -> Options:
    return resolve_stages(recipe_of(words_of(name, folder), {}), {}, PLACES)[0]


def test_most_pass_as_they_are() -> None:
    """At least thirty pass; those of other families are refused by the model's name, which no other list has."""
    assert len(PASS) >= 30 and len(LISTS) >= 41
    for name, one in LISTS.items():
        assert (one["outcome"] == "family") == (model_families()[one["model"]] == ""), name


@pytest.mark.parametrize("name", LISTS)
def test_each_list_has_its_outcome(name: str, tmp_path: Path) -> None:
    outcome = LISTS[name]["outcome"]
    if outcome == "passes":
        resolved(name, tmp_path)
        return
    program, *words = words_of(name, tmp_path)
    if outcome == "family":  # as the sandbox hands it over
        words, outcome = ["--spec", "none", LISTS[name]["model"], *words], [f"--spec none {LISTS[name]['model']}: "]
    with pytest.raises(UsageError) as error:
        resolve_stages(recipe_of([program, *words], {}), {}, PLACES)
    told = [str(part) for part in parts_of(error.value)]
    assert all(any(one.startswith(start) for one in told) for start in outcome), told
    if LISTS[name]["outcome"] != "family":
        assert len(told) == len(outcome), told


def test_what_some_of_them_become(tmp_path: Path) -> None:
    """The numbers that a launcher gives are those that the run has."""
    ppo = resolved("qwen3_4B_ppo", tmp_path)
    assert (ppo.lr, ppo.critic_lr, ppo.advantage_estimator, ppo.eps_clip) == (1e-6, 1e-5, "ppo", 4e-4)
    assert ppo.use_kl_loss and ppo.num_critic_only_steps == 1 and ppo.normalize_advantages
    asynchronous = resolved("qwen2.5_0.5B_fully_async_short", tmp_path)
    assert (asynchronous.loop, asynchronous.rollout_num_gpus, asynchronous.rollout_batch_size) == ("fully-async", 3, 8)
    fp8 = resolved("qwen3_30B_A3B_r3_fp8_deepep", tmp_path)
    assert fp8.use_rollout_routing_replay and fp8.hf_checkpoint == "/root/models/Qwen3-30B-A3B-FP8"
    loaded = resolved("qwen3_4B_ckpt_gpu_cpu_load", tmp_path)
    assert loaded.ckpt_step == 1 and loaded.megatron["optimizer_cpu_offload"] is True


@pytest.mark.parametrize("name", ["qwen3_4B_ppo", "moonlight_16B_A3B_r3", "qwen3.5_0.8B_gsm8k_async_short"])
@needs("namespaces")
def test_a_launcher_of_a_list(name: str, tmp_path: Path) -> None:
    """A launcher that puts such a list together is read as the list itself."""
    program, *words = words_of(name, tmp_path)
    path = tmp_path / "test_x.py"
    path.write_text(
        "import slime.utils.external_utils.command_utils as U\n"
        "U.convert_checkpoint(model_name='x', megatron_model_type='x', num_gpus_per_node=8)\n"
        f"U.execute_train(train_args={' '.join(words)!r} + U.get_default_tracking_args(__file__), num_gpus_per_node=8,\n"
        f"                megatron_model_type={LISTS[name]['model']!r}, train_script={program!r})\n"
    )
    found = run_script(path, {})
    family = LISTS[name]["outcome"] == "family"
    assert found.arguments == (*(("--spec", "none", LISTS[name]["model"]) if family else ()), *words)
    assert found.program == program and not found.files, "what lies next to it is read where it is"

"""The share of drafted tokens that is accepted, over 20 updates of the quick start's task: it rises as the layer that
drafts is trained, is not lost afterwards, and falls behind where updates leave that layer out.

The quick start's model is a MiMo of the same sizes here.  SEED names the seeds; the table is printed (pytest -s).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mtp_models import as_mimo
from tests.support.runs import REPO, Run, all_gone, rows

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1234").split(",")]
QUICK_START = (REPO / "examples" / "quickstart.toml").read_text()
SHARED, WARM_UP, GRPO = QUICK_START.split("[[stage]]\n")
DRAFTS = "\n[vllm]\nspeculative_config = { method = 'mtp', num_speculative_tokens = 1 }\n"
HELD = ("--mtp-num-layers", "1")
TRAINED = (*HELD, "--enable-mtp-training")
UPDATES = 20
SHOWN = (0, 1, 5, 10, 15, 19)  #: rollouts of the table; the first is sampled before any update


def quick_start_mimo(directory: Path, seed: int) -> Path:
    """The quick start's prompts, and a MiMo of the sizes of its model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

    subprocess.run(
        [sys.executable, REPO / "examples" / "arithmetic.py", "--out", directory, "--seed", str(seed)],
        check=True,
        timeout=240,
    )
    model = directory / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    known = AutoConfig.from_pretrained(model).to_dict()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "initializer_range")
    more += ("rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id")
    config = AutoConfig.for_model("qwen2", **{name: known[name] for name in (*sizes, *more)})
    set_seed(seed)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(model)
    tokenizer.save_pretrained(model)
    as_mimo(model)
    return directory


def run_stage(directory: Path, prepared: Path, stage: str, *options: str) -> Path:
    """One stage of the quick start as a run of its own; its directory."""
    directory.mkdir()
    recipe = directory / "recipe.toml"
    shared = "\n".join(line for line in SHARED.splitlines() if not line.startswith("prepare ="))
    recipe.write_text(
        (shared + "\n" + stage.split("name =")[1].partition("\n")[2]).replace("{prepared}", str(prepared))
    )
    root = directory / "run"
    run = Run(recipe, "--run-dir", str(root), *options, root=root)
    status, out = run.end(1500)
    assert status == 0, out + run.logs()
    assert all_gone(root, [])
    return root


def shares(root: Path) -> list[float]:
    """Of each rollout the share of accepted drafts."""
    return [row["rollout/spec_accept_rate"] for row in rows(root) if "rollout/spec_accept_rate" in row]


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_are_accepted_as_they_are_trained(seed: int, tmp_path: Path) -> None:
    prepared = quick_start_mimo(tmp_path / "prepared", seed)
    warm_up = run_stage(tmp_path / "sft", prepared, WARM_UP, "--seed", str(seed), *HELD) / "checkpoints"
    found: dict[str, list[float]] = {}

    def grpo(name: str, model: Path, load: Path | None, *options: str) -> Path:
        stage = GRPO.replace('load = "{run}/sft/checkpoints"\n', f'load = "{load}"\n' if load else "") + DRAFTS
        more = ("--num-rollout", str(UPDATES), "--eval-interval", str(UPDATES), "--save-interval", str(UPDATES))
        more += ("--num-steps-per-rollout", "4", "--hf-checkpoint", str(model), "--seed", str(seed))
        root = run_stage(tmp_path / name.replace(" ", "-").replace(",", ""), prepared, stage, *more, *options)
        found[name] = shares(root)
        print(f"{name:>20}: " + "  ".join(f"{found[name][at]:.3f}" for at in SHOWN), flush=True)
        return root

    print(f"\nseed {seed}: share of accepted drafts in rollout {', '.join(map(str, SHOWN))}", flush=True)

    first = grpo("random, trained", prepared / "model", warm_up, *TRAINED)
    grpo("random, not trained", prepared / "model", warm_up, *HELD)
    better = tmp_path / "better"
    convert = ["convert", "to-hf", first, "--output-dir", better]
    subprocess.run([sys.executable, "-m", "hpcrl", *map(str, convert)], check=True, cwd=REPO, timeout=240)
    grpo("kept on, trained", better, None, *TRAINED)
    grpo("kept on, left out", better, None)
    trained, held, kept, left = found.values()
    assert trained[-1] > trained[0] + 0.3, "it does not rise with training"
    assert max(held) < trained[-1] / 3, "it rises without training"
    assert min(kept) > kept[0] - 0.1, "it is lost"
    assert sum(left[-5:]) < sum(kept[-5:]), "updates need not bring the layer"

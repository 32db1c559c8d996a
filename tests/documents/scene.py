"""A directory in which the documents' commands can be typed: their recipes, hostfiles, prompt files, models and sites,
under the names that the documents use.

    scene = make_scene(folder, model)     # model: a directory of make_model, whose files serve wherever a page says MODEL
    scene.filled("hpcrl report RUN", run) # a printed line with its placeholders replaced

Invariant: a stand-in has the name and the form that the page gives it, and nothing more than a user would have put
there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from hpcrl.run.rundir import TRACKER
from tests.documents.texts import REPO, Command, python_files
from tests.support.published_models import MODELS

#: folders of the checkout that commands name; a user types them at its top
FOLDERS = ("examples", "hostfiles", "sbatch", "launch", "sites", "tools")
#: those of them that a wheel brings for the user to copy
SHIPPED = ("examples", "hostfiles")
RECIPE = """
hf_checkpoint = "MODEL"
prompt_data = "train.jsonl"
input_key = "prompt"
apply_chat_template = true
num_rollout = 2
rollout_batch_size = 4
actor_num_gpus_per_node = 2
bf16 = false
micro_batch_size = 2
lr = 1e-3
"""
SAMPLED = """
label_key = "label"
n_samples_per_prompt = 4
rollout_max_response_len = 4
rollout_max_context_len = 64
rollout_num_gpus = 2
"""
#: what a page takes a recipe to say already
RECIPES = {
    "rewarded": f'{SAMPLED}rm_type = "math"\neval_interval = 1\neval_prompt_data = ["aime", "aime-2024.jsonl"]\n',
    "unrewarded": SAMPLED,
    "learns": "",
    "tuned": 'label_key = "label"\nloss_type = "sft_loss"\n',
}
REWARD = '"""Rewards of the user\'s."""\n\n\ndef brief(options, sample):\n    return 1.0 / (1 + len(sample.response))\n'
SITE = '# what a site may say\npython = "/opt/env/bin/python"\n'
SITES = ("mine", "SITE", "S", "mycluster")
#: published model of a recipe's directory -> whose config.json it has
PUBLISHED = {
    "Qwen3-4B": "Qwen3-4B",
    "GLM-Z1-9B-0414": "GLM-4-9B-0414",
    "GLM-4.5": "GLM-4.5",
    "GLM-4.5-FP8": "GLM-4.5",
    "Qwen3-30B-A3B": "Qwen3-30B-A3B",
}
PROMPTS = ("dapo-math-17k", "aime-2024")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ARRAYS = {
    "MODEL_ARGS": MODELS["Qwen3-4B"][0],
    "CKPT_ARGS": "--hf-checkpoint data/Qwen3-4B --ref-load data/Qwen3-4B_torch_dist",
    "ROLLOUT_ARGS": "--prompt-data data/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template"
    " --rm-type deepscaler --num-rollout 100 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256",
    "EVAL_ARGS": "--eval-interval 20 --eval-prompt-data aime data/aime-2024.jsonl",
    "PERF_ARGS": "--tensor-model-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 9216",
    "GRPO_ARGS": "--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28",
    "OPTIMIZER_ARGS": "--lr 1e-6 --adam-beta2 0.98",
    "SGLANG_ARGS": "--rollout-num-gpus-per-engine 2",
    "MISC_ARGS": "--attention-dropout 0.0 --hidden-dropout 0.0",
}
USED = " ".join(f"${{{name}[@]}}" for name in ARRAYS)
#: what a synopsis leaves open
VALUES = {
    "S": "S", "N": "1", "R": "trainer", "H": "127.0.0.1", "T": "30", "DIALECT": "openmpi", "FILE": "hosts", "RECIPE": "rewarded.toml",
    "CHECKPOINT": "runs/x/checkpoints/iter_0000100", "SCRIPT.sh": "run-qwen3-4B.sh", "/models/Qwen3-4B": "MODEL", "HF-DIR": "MODEL",
    "TORCH_DIST_OR_BF16_DIR": "MODEL",
}  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """folder: where commands are typed; sites: what HPCRL_SITES names."""

    folder: Path
    sites: Path

    def environment(self, programs: Path) -> dict[str, str]:
        """What a user's shell has; programs: the directory of the installed `hpcrl`."""
        home = self.folder / "home"
        return {
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "XDG_STATE_HOME": str(home / "state"),
            "HPCRL_SITES": str(self.sites),
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
            "USER": os.environ.get("USER", "root"),
        }

    def filled(self, command: Command, run: Path | str = "RUN") -> str:
        """A printed line as a user types it here; `run` in place of RUN."""
        recipe = "rewarded.toml"
        if "--loss-type sft_loss" in command.line:
            recipe = "learns.toml"
        elif "--custom-rm-path" in command.line or "--rm-type" in command.line:  # gives the reward
            recipe = "unrewarded.toml"
        values = VALUES | {
            "ARGUMENTS": f"--actor-num-gpus-per-node 8 --colocate {USED}",
            "RUN": str(run),
            "recipe.toml": recipe,
            "RECIPE.toml": recipe,
        }
        line = command.line.replace("> RECIPE.toml", "> imported.toml")
        return "".join(values.get(word, word) for word in re.split(r"(\s+)", line))


def make_scene(folder: Path, model: Path, checkout: bool = True, site: str = SITE) -> Scene:
    """Make it in `folder`.

    model: a directory that transformers and vLLM load; checkout: whether the user sits in a checkout of hpcrl; site:
    what the profiles of SITES say.
    """
    for name in FOLDERS if checkout else ():
        shutil.copytree(REPO / name, folder / name, dirs_exist_ok=True)
    shutil.copytree(model, folder / "MODEL")
    shutil.copytree(model, folder / "MODEL-FP8")
    for name, more in RECIPES.items():
        (folder / f"{name}.toml").write_text(RECIPE + more)
    (folder / "my_rewards.py").write_text(REWARD)
    for name, text in python_files("from-slime"):  # whose reward functions are in files of their own
        (folder / f"{name}.py").write_text(text)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    (folder / "home").mkdir()
    (folder / "engine-keys").mkdir(mode=0o700)
    _prompts(folder)
    published_models(folder / "data")
    _checkpoint(folder / "runs" / "x" / "checkpoints", folder)
    _script(folder)
    profiles = folder / "profiles"
    profiles.mkdir()
    for name in SITES:
        (profiles / f"{name}.toml").write_text(site)
    return Scene(folder, profiles)


def _prompts(folder: Path) -> None:
    rows = [
        {
            "prompt": f"{i}+{i % 7}=",
            "label": str(i + i % 7),
            "reward_model": {"style": "rule", "ground_truth": str(i + i % 7)},
            "extra_info": {"index": i},
            "messages": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}],
        }
        for i in range(40)
    ]
    for name in ("train", "math", "code", "aime", "aime-2024"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("train", "gpqa"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")


def published_models(data: Path) -> None:
    """Directories of the models that recipes for GPUs name: config.json alone, which is all that a login node reads."""
    for name, model in PUBLISHED.items():
        config = MODELS[model][1] | ({"quantization_config": FP8} if name.endswith("FP8") else {})
        (data / name).mkdir(parents=True)
        (data / name / "config.json").write_text(json.dumps(config))
        (data / f"{name}_torch_dist").mkdir()
        (data / f"{name}_torch_dist" / TRACKER).write_text("release")
    row = {"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}
    for name in PROMPTS:
        (data / f"{name}.jsonl").write_text(json.dumps(row) + "\n")


def _checkpoint(checkpoints: Path, folder: Path) -> None:
    """A run of a user's, as far as its files are looked at before anything starts: options, and a checkpoint's
    names."""
    from hpcrl.config.recipe import load_recipe, resolve_stages

    (options,) = resolve_stages(load_recipe(folder / "rewarded.toml"), {}, {"run": "runs/x", "prepared": ""})
    (checkpoints / "iter_0000100").mkdir(parents=True)
    (checkpoints / "iter_0000100" / ".metadata").touch()
    (checkpoints / TRACKER).write_text("100")
    (checkpoints.parent / "options.json").write_text(options.model_dump_json())


def _script(folder: Path) -> None:
    """A run script as slime has them, and its arrays alone for the lines that use them behind `--`."""
    arrays = "".join(f"{name}=({words})\n" for name, words in ARRAYS.items())
    (folder / "arrays.sh").write_text(arrays)
    command = f"ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate {USED}"
    (folder / "run-qwen3-4B.sh").write_text(f"#!/bin/bash\nset -e\n{arrays}{command}\n")
    for name in ("scripts/models",):
        (folder / name).mkdir(parents=True)
        (folder / name / "qwen3-4B.sh").write_text(f"MODEL_ARGS=({ARRAYS['MODEL_ARGS']})\n")

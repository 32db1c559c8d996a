"""Tiny twins of the reference runs: the guides' own arguments and layout of roles, with a small model, on the test
cluster.

Of each guide's words stay all but what describes the model, sizes, paths, and what only a GPU can do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from functools import partial
from pathlib import Path

from hpcrl.config.slime.arguments import split_flags
from hpcrl.rollout.saved_rollouts import write_rollout
from tests.config.slime.guides import GUIDES, MODELS
from tests.support.absent_torchvision import FOLDER
from tests.support.cluster import Cluster
from tests.support.runs import make_task, metrics, rows
from tests.support.slurm import ENV, MEMORY, Job, hpcrl
from tests.support.tiny import make_family
from tests.support.twin_models import MODELS_OF, made_up
from tests.whole_runs.test_under_mpirun import launch

STEPS = 3
SCRIPTS = json.loads((Path(__file__).parents[1] / "config/slime/scripts.json").read_text())
#: guide, or script of slime's -> the words behind train.py
ARGUMENTS = {name: guide[0] for name, guide in GUIDES.items()}
OF_SCRIPTS = {
    "Moonlight": "scripts/run-moonlight-16B-A3B.sh",
    "MiMo": "scripts/run-mimo-7B-rl-eagle.sh",
    "Qwen3-Next": "scripts/run-qwen3-next-80B-A3B.sh",
    "DeepSeek-R1": "scripts/run-deepseek-r1.sh",
    "Kimi-K2": "scripts/run-kimi-k2-Instruct.sh",
    "GLM-4.7-Flash": "scripts/run-glm4.7-30B-A3B.sh",
    "Qwen3.5-27B": "scripts/run-qwen3.5-27B.sh",
    "MiniMax-M2": "scripts/run-minimax-m2.sh",
    "Qwen3.6-35B-A3B": "examples/coding_agent_rl/run_qwen36_35b_a3b_swe_8nodes.sh",
}
ARGUMENTS |= {name: shlex.split(SCRIPTS[of]["arguments"]) for name, of in OF_SCRIPTS.items()}
OF_MODELS = {flag for words in MODELS.values() for flag in split_flags(shlex.split(words))} | set(
    "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim "
    "make-vocab-size-divisible-by no-position-embedding".split()
)
#: script -> what is left out: drafts, as of this model engines hold the text part alone; and the script's agent
LEFT_OUT = {
    "Qwen3.5-27B": set(
        "sglang-speculative-algorithm sglang-speculative-num-steps sglang-speculative-eagle-topk "
        "sglang-speculative-num-draft-tokens".split()
    ),
    "Qwen3.6-35B-A3B": {"custom-generate-function-path", "metadata-key"},
}
#: what only a GPU can do
OF_GPUS = set(
    "moe-enable-deepep moe-token-dispatcher-type optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d attention-backend "
    "use-precision-aware-optimizer accumulate-allreduce-grads-in-fp32 rm-type".split()
)
SMALL = {
    "num-rollout": str(STEPS),
    "rollout-batch-size": "4",
    "n-samples-per-prompt": "4",
    "rollout-max-response-len": "8",
    "n-samples-per-eval-prompt": "2",
    "eval-max-response-len": "8",
    "eval-interval": "2",
    "max-tokens-per-gpu": "128",
    "save-interval": "2",
    "custom-rm-path": "tests.support.runs.odd_tokens",
    "rollout-max-context-len": "64",
    "engine-start-timeout": "600",
    "check-weight-update-equal": "",
    "deterministic-mode": "",
    "no-bf16": "",
}
SIZES_OF_ROLLOUT = ("rollout-batch-size", "n-samples-per-prompt", "rollout-max-response-len")
ASYNC = ", async"  #: behind a guide's name: the same with slime's train_async.py
#: guide -> (family of the model, what is smaller than there, (nodes, trainer ranks, engines, GPUs of one))
TWINS: dict[str, tuple[str, dict[str, str], tuple[int, int, int, int]]] = {
    "GLM4-9B, 4 + 4": ("glm4", {"rollout-num-gpus": "2"}, (2, 4, 1, 2)),
    "GLM4-9B, colocated": ("glm4", {"actor-num-gpus-per-node": "4"}, (1, 4, 2, 2)),
    "Qwen3-4B, 2 + 6": ("qwen3", {"rollout-num-gpus": "2", "rollout-num-gpus-per-engine": "1"}, (2, 2, 2, 1)),
    "Qwen3-4B, 2 + 6" + ASYNC: ("qwen3", {"rollout-num-gpus": "2", "rollout-num-gpus-per-engine": "1"}, (2, 2, 2, 1)),
    "GLM-4.5-355B, BF16 rollouts": (
        "glm4_moe",
        {
            "actor-num-nodes": "4",
            "actor-num-gpus-per-node": "1",
            "tensor-model-parallel-size": "2",
            "pipeline-model-parallel-size": "2",
            "context-parallel-size": "1",
            "expert-model-parallel-size": "2",
            "rollout-num-gpus": "2",
            "rollout-num-gpus-per-engine": "2",  # over two nodes: on CPUs vLLM 0.32 counts one device a host
        },
        (4, 4, 1, 2),
    ),
}

TWINS["Moonlight"] = (
    "deepseek_v3",
    {
        "actor-num-gpus-per-node": "2",
        "tensor-model-parallel-size": "2",
        "expert-model-parallel-size": "2",
        "rollout-num-gpus-per-engine": "2",
        "over-sampling-batch-size": "8",
        "num-steps-per-rollout": "2",
    },
    (1, 2, 1, 2),
)
TWINS["MiMo"] = ("mimo", {"actor-num-gpus-per-node": "2", "global-batch-size": "16"}, (1, 2, 2, 1))
TWINS["Qwen3-Next"] = (
    "qwen3_next",
    {
        "actor-num-gpus-per-node": "2",
        "pipeline-model-parallel-size": "2",
        "rollout-num-gpus": "2",
        "global-batch-size": "16",
        "max-logprob-diff": "1",
    },
    (2, 2, 1, 2),
)
#: of scripts for many nodes, on one: tensor and pipeline ranks, the last stage with a layer less, and experts
ON_ONE_NODE = {
    "actor-num-nodes": "1",
    "actor-num-gpus-per-node": "4",
    "tensor-model-parallel-size": "2",
    "pipeline-model-parallel-size": "2",
    "decoder-last-pipeline-num-layers": "1",
    "context-parallel-size": "1",
    "expert-model-parallel-size": "2",
    "rollout-num-gpus-per-engine": "2",
}
WITH_CONTEXT = ON_ONE_NODE | {"tensor-model-parallel-size": "1", "context-parallel-size": "2"}
LARGER_ROLLOUT = {"over-sampling-batch-size": "8", "num-steps-per-rollout": "2"}
TWINS["DeepSeek-R1"] = ("deepseek_v3-yarn", ON_ONE_NODE | LARGER_ROLLOUT, (1, 4, 2, 2))
TWINS["Kimi-K2"] = ("kimi_k2", WITH_CONTEXT | LARGER_ROLLOUT, (1, 4, 2, 2))
TWINS["GLM-4.7-Flash"] = ("glm4_moe_lite", ON_ONE_NODE | {"global-batch-size": "16"}, (1, 4, 2, 2))
TWINS["Qwen3.5-27B"] = (
    "qwen3_5",
    WITH_CONTEXT | {"expert-model-parallel-size": "1", "global-batch-size": "16", "max-logprob-diff": "1"},
    (1, 4, 2, 2),
)
TWINS["Qwen3.6-35B-A3B"] = (
    "qwen3_5_moe",
    {
        "actor-num-nodes": "1",
        "actor-num-gpus-per-node": "4",
        "apply-chat-template": "",  # in the script its agent does so
        "context-parallel-size": "2",
        "expert-model-parallel-size": "4",
        "rollout-num-gpus": "4",
        "rollout-num-gpus-per-engine": "2",
        "rollout-stop-token-ids": "1",
        "global-batch-size": "16",
        "max-logprob-diff": "1",
    },
    (1, 4, 2, 2),
)
#: vLLM's CPU build does not compute it: the trainer alone, on made-up rollouts
TWINS["MiniMax-M2"] = (
    "minimax_m2",
    {flag: value for flag, value in ON_ONE_NODE.items() if flag != "decoder-last-pipeline-num-layers"}
    | LARGER_ROLLOUT
    | {"debug-train-only": ""},
    (1, 4, 0, 0),
)
IN_BF16 = ("Qwen3-Next", "Qwen3.5-27B", "Qwen3.6-35B-A3B")  #: vLLM's CPU build computes it in nothing else
#: of an engine, how far log-probs are from the trainer's on average
NEAR, NEAR_IN_BF16 = 1e-4, 0.03

#: what a site's profile says of nodes that are as small as the twin
SETTINGS = {"GLM-4.5-355B, BF16 rollouts": ("trainer.gpus_per_node=1",)}


def without_engines(guide: str) -> bool:
    """Whether the twin's trainer is alone."""
    return "debug-train-only" in TWINS[guide][1]


def words(guide: str, root: Path, task: Path, model: Path) -> list[str]:
    """The guide's arguments, small, behind the program's name where that counts."""
    given = split_flags(ARGUMENTS[guide.removesuffix(ASYNC)])
    left_out = OF_MODELS | OF_GPUS | LEFT_OUT.get(guide, set())
    kept = {
        flag: " ".join(given[flag])
        for flag in given
        if flag not in left_out and (flag.startswith("sglang-speculative") or not flag.startswith("sglang-"))
    }
    paths = {"hf-checkpoint": model, "ref-load": model, "load": root / "checkpoints", "save": root / "checkpoints"}
    paths |= {"prompt-data": task / "train.jsonl"}
    sizes = {
        flag: value
        for flag, value in SMALL.items()
        if (not flag.startswith(("eval", "n-samples-per-eval")) or flag in given)
        and not (flag == "no-bf16" and guide in IN_BF16)
    }
    if without_engines(guide):
        paths["load-debug-rollout-data"] = task / "rollouts/{rollout_id}"
    if "save-debug-rollout-data" in given:
        paths["save-debug-rollout-data"] = root / "rollouts/{rollout_id}.pt"
    if "eval-prompt-data" in given:
        paths["eval-prompt-data"] = task / "heldout.jsonl"
    kept |= sizes | {flag: str(path) for flag, path in paths.items()} | TWINS[guide][1]
    program = ["train_async.py"] if guide.endswith(ASYNC) else []
    return program + [word for flag, value in kept.items() for word in (f"--{flag}", *value.split())]


def finished(root: Path, guide: str) -> dict[int, dict[str, float]]:
    """Metrics of a run that has trained, updated, saved and evaluated to its end."""
    steps, (nodes, ranks, engines, each) = metrics(root), TWINS[guide][2]
    assert list(steps) == list(range(STEPS))
    for number, row in steps.items():
        # no upper bound: a random model of transformers' has zeros as the embedding of the padding token, and where that
        # is sampled, norms of zeros give the row a large gradient (5.7e5 was seen of Qwen3-Next; as in transformers)
        assert row["train/grad_norm"] > 0 and row["staleness/max"] == (guide.endswith(ASYNC) and number > 0)
        near = NEAR_IN_BF16 if guide in IN_BF16 else NEAR
        if not without_engines(guide):
            assert row["staleness/max"] or row["train/train_rollout_logprob_abs_diff"] <= near
        if "enable-mtp-training" in split_flags(ARGUMENTS[guide.removesuffix(ASYNC)]):
            assert 0 <= row["rollout/spec_accept_rate"] <= 1 and row["train/mtp_loss"] > 0
    plan = json.loads((root / "attempts/0/plan.json").read_text())
    assert (len(plan["trainers"]), len(plan["engines"])) == (ranks, engines)
    for engine in plan["engines"]:
        assert sum(len(place["slots"]) for place in (engine, *engine["also"])) == each
    hosts = {place["host"] for place in (*plan["trainers"], *plan["engines"])}
    hosts |= {place["host"] for engine in plan["engines"] for place in engine["also"]}
    assert len(hosts) == nodes
    if "eval-interval" in split_flags(ARGUMENTS[guide.removesuffix(ASYNC)]) and engines:
        assert [row["rollout_id"] for row in rows(root) if any(name.startswith("eval/") for name in row)] == [-1, 1, 2]
    assert json.loads((root / "summary.json").read_text())["status"] == "finished"
    return steps


class Tiny:
    """Tiny models, one of a family, and the prompt files that go with all of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made = dict[str, Path]()
        root.mkdir(exist_ok=True)
        self.task = make_task(root)
        for number in range(STEPS):
            write_rollout(
                self.task / f"rollouts/{number}",
                number,
                number,
                made_up(number, *(int(SMALL[name]) for name in SIZES_OF_ROLLOUT)),
            )

    def __call__(self, guide: str) -> tuple[Path, Path]:
        """(directory of the prompt files, the model's) of a guide's twin."""
        family = TWINS[guide][0]
        if family not in self.made:
            make, layers = MODELS_OF.get(family, (partial(make_family, name=family), 2))
            self.made[family] = make(self.root / family, num_attention_heads=4, num_hidden_layers=layers)
        return self.task, self.made[family]


def environment(guide: str) -> dict[str, str]:
    """What the processes of a twin need: of Qwen3.5, the names that vLLM's module for images imports."""
    if TWINS[guide][0].startswith("qwen3_5"):
        return {"PYTHONPATH": os.pathsep.join([FOLDER, ENV["PYTHONPATH"]])}
    return {}


def under_slurm(cluster: Cluster, root: Path, tiny: Tiny, guide: str) -> None:
    """`hpcrl submit` of a twin, to its end."""
    # whole nodes, as an engine over several of them asks for
    settings = [
        *MEMORY,
        "exclusive=true",
        "trainer.cpus_per_node=4",
        "engine.cpus_per_node=4",
        *SETTINGS.get(guide, ()),
    ]
    arguments = words(guide, root, *tiny(guide))
    done = hpcrl(
        cluster, "submit", "--run-dir", root / "run", "--set", *settings, "--", *arguments, env=environment(guide)
    )
    job = Job(cluster, root / "run", int(re.search(r"job (\d+)", done.stdout)[1]))
    job.ends(seconds=800)
    finished(job.root, guide)


def under_mpirun(cluster: Cluster, root: Path, tiny: Tiny, guide: str) -> None:
    """`hpcrl launch` of a twin, to its end."""
    nodes, ranks = TWINS[guide][2][:2]
    hosts = cluster.hostfile(
        "openmpi", cluster.nodes[:nodes], path=root / "hosts", slots=ranks if nodes == 2 else ranks // nodes
    )
    arguments = words(guide, root, *tiny(guide))
    launch(cluster, "openmpi", hosts, "--run-dir", root / "run", "--", *arguments, timeout=800, env=environment(guide))
    finished(root / "run", guide)

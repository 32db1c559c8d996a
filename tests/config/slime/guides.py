"""The argument arrays of the guides that the project answers to, as a script of slime's or vime's hands them to
train.py."""

from __future__ import annotations

import shlex

MODELS = {
    "glm4-9B": "--swiglu --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 2 --vocab-size 151552 --use-rotary-position-embeddings "
    "--disable-bias-linear --add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-5 --rotary-base 10000 "
    "--spec slime_plugins.models.glm4 get_glm_spec --post-self-attn-layernorm --post-mlp-layernorm "
    "--rotary-interleaved --rotary-percent 0.5 --no-rope-fusion --untie-embeddings-and-output-weights",
    "qwen3-4B": "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear "
    "--normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels "
    "128 --qk-layernorm",
    "qwen3-30B-A3B": "--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32 "
    "--num-query-groups 4 --kv-channels 128 --num-layers 48 --hidden-size 2048 "
    "--ffn-hidden-size 6144 --normalization RMSNorm --position-embedding-type rope "
    "--norm-epsilon 1e-6 --rotary-percent 1.0 --swiglu --untie-embeddings-and-output-weights "
    "--vocab-size 151936 --rotary-base 1000000 --moe-ffn-hidden-size 768 "
    "--moe-router-score-function softmax --moe-token-dispatcher-type alltoall "
    f"--moe-router-topk 8 --moe-layer-freq {[1] * 48!s} --num-experts 128 --moe-grouped-gemm "
    "--moe-token-drop-policy probs --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-aux-loss-coeff 0".replace("[" + ", ".join("1" * 48) + "]", "[" + ",".join("1" * 48) + "]"),
    "glm4.5-355B-A32B": "--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 96 "
    "--num-query-groups 8 --kv-channels 128 --num-layers 92 --hidden-size 5120 --ffn-hidden-size "
    "12288 --add-qkv-bias --normalization RMSNorm --position-embedding-type rope --rotary-percent "
    "0.5 --swiglu --untie-embeddings-and-output-weights --vocab-size 151552 --rotary-base 1000000 "
    "--moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536 "
    "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-token-dispatcher-type alltoall --moe-router-topk 8 --moe-router-topk-scaling-factor "
    "2.5 --num-experts 160 --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-aux-loss-coeff 0",
}


def checkpoints(name: str) -> str:
    return (
        f"--hf-checkpoint /scratch/{name} --ref-load /scratch/{name}_torch_dist --load /scratch/{name}_slime/"
        f" --save /scratch/{name}_slime/ --save-interval 20"
    )


ROLLOUT = (
    "--prompt-data /scratch/dapo-math-17k/dapo-math-17k.jsonl --input-key prompt --label-key label "
    "--apply-chat-template"
    " --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8"
    " --rollout-max-response-len 8192 --rollout-temperature 1 --num-steps-per-rollout 1 --balance-data"
)
EVALUATION = (
    "--eval-interval 5 --eval-prompt-data /scratch/aime-2024/aime-2024.jsonl --n-samples-per-eval-prompt 16"
    " --eval-max-response-len 16384 --eval-top-p 1"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size"
GRPO = (
    "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 "
    "--eps-clip 0.2 --eps-clip-high 0.28"
)
ADAM = "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98"
CPU_ADAM = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
MISC = (
    "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32"
    " --attention-backend flash"
)
GRAPHS = "1 2 4 8 " + " ".join(map(str, range(16, 257, 8)))


def layout(tp: int, pp: int, cp: int, ep: int, tokens: int) -> str:
    return (
        f"--tensor-model-parallel-size {tp} --sequence-parallel --pipeline-model-parallel-size {pp} "
        f"--context-parallel-size {cp}"
        f" --expert-model-parallel-size {ep} --expert-tensor-parallel-size 1 {RECOMPUTE} --max-tokens-per-gpu {tokens}"
    )


GLM4 = " ".join(
    [MODELS["glm4-9B"], checkpoints("GLM-Z1-9B-0414"), ROLLOUT, EVALUATION, layout(2, 1, 2, 1, 4608), GRPO, ADAM, MISC]
)
QWEN3 = " ".join(
    [MODELS["qwen3-4B"], checkpoints("Qwen3-4B"), ROLLOUT, EVALUATION, layout(2, 1, 1, 1, 9216), GRPO, ADAM, MISC]
)
BIG = " ".join(
    [
        MODELS["glm4.5-355B-A32B"],
        checkpoints("GLM-4.5-355B-A32B"),
        ROLLOUT.replace("-size 32", "-size 128").replace("per-rollout 1", "per-rollout 4"),
        layout(8, 4, 2, 16, 16384),
        GRPO,
        ADAM,
        CPU_ADAM,
        MISC,
        "--moe-enable-deepep --moe-token-dispatcher-type flex",
    ]
)

#: guide -> (its words, (trainer ranks, engines, GPUs of one))
GUIDES: dict[str, tuple[list[str], tuple[int, int, int]]] = {
    name: (shlex.split(words), numbers)
    for name, (words, numbers) in {
        "GLM4-9B, 4 + 4": (
            f"--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 {GLM4} "
            "--rollout-num-gpus-per-engine 2",
            (4, 2, 2),
        ),
        "GLM4-9B, 4 + 4, dynamic sampling": (
            f"--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 {GLM4} "
            "--rollout-num-gpus-per-engine 2 --over-sampling-batch-size 64 --partial-rollout --eval-top-p 0.7 "
            "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            (4, 2, 2),
        ),
        "GLM4-9B, colocated": (
            f"--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate {GLM4} --rollout-num-gpus-per-engine 2"
            " --sglang-mem-fraction-static 0.7",
            (8, 4, 2),
        ),
        "Qwen3-4B, colocated": (
            f"--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate {QWEN3} --rollout-num-gpus-per-engine 2"
            " --sglang-mem-fraction-static 0.7",
            (8, 4, 2),
        ),
        "Qwen3-4B, 2 + 6": (
            f"--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6 {QWEN3} "
            "--rollout-num-gpus-per-engine 2"
            f" --sglang-mem-fraction-static 0.7 --sglang-server-concurrency 160 --sglang-cuda-graph-bs {GRAPHS}",
            (2, 3, 2),
        ),
        "Qwen3-30B-A3B": (
            "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate "
            + " ".join(
                [
                    MODELS["qwen3-30B-A3B"],
                    checkpoints("Qwen3-30B-A3B"),
                    ROLLOUT,
                    EVALUATION,
                    layout(4, 1, 1, 8, 20480),
                    GRPO,
                ]
            )
            + f" {ADAM} {CPU_ADAM} {MISC} --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs {GRAPHS}",
            (8, 1, 8),
        ),
        "GLM-4.5-355B, BF16 rollouts": (
            f"--actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate {BIG} --rollout-num-gpus-per-engine 32"
            " --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 4",
            (64, 2, 32),
        ),
        "GLM-4.5-355B, FP8 rollouts": (
            f"--actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate {BIG} --rollout-num-gpus-per-engine 32"
            " --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 32 --sglang-ep-size 32"
            " --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head --sglang-cuda-graph-bs 1 2 4 8 16 24 32"
            " --sglang-disable-radix-cache --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto",
            (64, 2, 32),
        ),
    }.items()
}
#: the shape of a run script: variables, arrays, a model file beside it, Ray, and train.py at its end
SCRIPT = """\
#!/bin/bash
pkill -9 sglang
sleep 3
ray stop --force
pkill -9 python
set -ex
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
SCRIPT_DIR="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"
source "${{SCRIPT_DIR}}/models/{model}.sh"
ALL_ARGS=(
   {words}
   # --commented-out 1
)
export MASTER_ADDR=${{MASTER_ADDR:-"127.0.0.1"}}
for WORKER_IP in $(awk '{{print $1}}' /root/mpi_hostfile); do
   ssh root@"${{WORKER_IP}}" "ray start --address=${{MASTER_ADDR}}:6379" &
done
wait
ray start --head --node-ip-address ${{MASTER_ADDR}} --num-gpus 8 --disable-usage-stats
RUNTIME_ENV_JSON="{{
  \\"env_vars\\": {{
    \\"PYTHONPATH\\": \\"/root/Megatron-LM/\\",
    \\"CUDA_DEVICE_MAX_CONNECTIONS\\": \\"1\\",
    \\"NCCL_NVLS_ENABLE\\": \\"${{HAS_NVLINK}}\\"
  }}
}}"
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${{RUNTIME_ENV_JSON}}" \\
   -- python3 train.py ${{MODEL_ARGS[@]}} ${{ALL_ARGS[@]}}
"""

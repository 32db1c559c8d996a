"""Options of what is learned: estimators, losses, KL, corrections for samples of another policy, on-policy
distillation, and the optimizer with its schedule.

Invariant: names and meanings are slime's (of distillation also vime's) where it has them; which of them an algorithm
reads is declared in its own file.
"""

from __future__ import annotations

from typing import Literal

from hpcrl.config.sections import Base, opt


class AlgorithmOptions(Base):
    """algorithm"""

    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss", "custom_loss"] = opt(
        "policy_loss",
        "policy_loss: policy gradient; sft_loss: learn the label; dpo_loss: prefer one of two responses; custom_loss",
        "slime",
    )
    custom_loss_function_path: str | None = opt(
        None, "module.function of a custom loss: (TokenBatch, options) -> Loss of hpcrl.algorithms.interface", "slime"
    )
    advantage_estimator: str = opt(
        "grpo",
        "estimator of advantages: a name of docs/algorithms.md, or module.function",
        "slime",
    )
    disable_grpo_std_normalization: bool = opt(False, "subtract the group's mean only (Dr. GRPO)", "slime")
    disable_rewards_normalization: bool = opt(False, "raw rewards: subtract no group mean", "slime")
    normalize_advantages: bool = opt(False, "whiten advantages over all trained tokens of the rollout", "slime")
    gamma: float = opt(1.0, "discount of later rewards", "slime", ge=0, le=1)
    lambd: float = opt(1.0, "lambda of generalized advantage estimation", "slime", ge=0, le=1)
    overlong_buffer_len: int | None = opt(
        None, "tokens before --rollout-max-response-len with a growing penalty (DAPO)", "verl", ge=1
    )
    overlong_penalty_factor: float = opt(1.0, "that penalty at the very end", "verl", ge=0)
    pg_loss_type: str | None = opt(
        None,
        "policy loss: a name of docs/algorithms.md, or module.function; default: the estimator's own, ppo for most",
    )
    eps_clip: float = opt(0.2, "clip the ratio below 1 - this", "slime", ge=0)
    eps_clip_high: float | None = opt(None, "clip the ratio above 1 + this; default --eps-clip", "slime", ge=0)
    eps_clip_c: float | None = opt(None, "dual clip: bound of the loss for negative advantages (> 1)", "slime", gt=1)
    sapo_tau_pos: float = opt(1.0, "sapo: temperature for positive advantages", gt=0)
    sapo_tau_neg: float = opt(1.05, "sapo: temperature for other advantages", gt=0)
    dpo_beta: float = opt(0.1, "dpo_loss: a smaller beta lets the policy move farther from the reference", gt=0)
    entropy_coef: float = opt(0.0, "weight of the entropy bonus", "slime", ge=0)
    kl_coef: float = opt(0.0, "weight of the KL from the reference model, subtracted from rewards", "slime", ge=0)
    use_kl_loss: bool = opt(
        False, "add the KL from the reference model to the loss; with --kl-loss-coef 0 only measure it", "slime"
    )
    kl_loss_coef: float = opt(0.0, "weight of the KL loss", "slime", ge=0)
    kl_loss_type: str = opt("k1", "KL estimator: k1, k2, k3, low_var_kl, or module.function of a custom one", "slime")
    use_unbiased_kl: bool = opt(
        False, "weight the KL term by the importance ratio, which corrects value and gradient off policy", "slime"
    )
    calculate_per_token_loss: bool = opt(False, "mean over all tokens, not over the means of samples", "slime")
    pg_loss_divisor: int | None = opt(
        None, "divide the policy-gradient sum of each sample by this, not by its length (Dr. GRPO)", ge=1
    )
    custom_pg_loss_reducer_function_path: str | None = opt(
        None, "module.function of a custom weight of each sample's tokens: (counts, options) -> weights", "slime"
    )


class OffPolicyOptions(Base):
    """off-policy correction, reference and critic"""

    use_rollout_logprobs: bool = opt(False, "use the engine's log-probs as the old policy's", "slime")
    keep_old_actor: bool = opt(False, "keep the weights that sampled, to compute the old log-probs", "slime")
    use_routing_replay: bool = opt(
        False,
        "mixture of experts: train each token with the experts of the old policy's pass (R2)",
        "slime",
    )
    use_rollout_routing_replay: bool = opt(
        False, "mixture of experts: train each token with the experts that the engine chose (R3)", "slime"
    )
    use_tis: bool = opt(False, "weight the policy gradient by the truncated ratio of trainer to engine", "slime")
    tis_clip: float = opt(2.0, "upper bound of that weight", "slime", gt=0)
    tis_clip_low: float = opt(0.0, "lower bound of that weight", "slime", ge=0)
    custom_tis_function_path: str | None = opt(
        None, "correction in place of tis: icepop, mis, or module.function", "slime"
    )
    tis_level: Literal["token", "sequence", "geometric"] = opt(
        "token", "mis: level at which the weight is computed", "slime"
    )
    tis_mode: Literal["truncate", "clip", "mask"] = opt("truncate", "mis: treatment of weights out of bounds", "slime")
    use_rs: bool = opt(False, "mis: reject responses or tokens out of bounds at --rs-level", "slime")
    rs_level: Literal["token", "sequence", "geometric"] = opt(
        "token", "mis: level of the ratio that rejection compares", "slime"
    )
    rs_lower_bound: float | None = opt(
        None, "mis: reject below; default --tis-clip-low, or 1 / --tis-clip", "slime", ge=0
    )
    rs_upper_bound: float | None = opt(None, "mis: reject above; default --tis-clip", "slime", gt=0)
    rs_veto_threshold: float | None = opt(
        None, "mis: reject a response with any token's ratio below this", "slime", gt=0
    )
    tis_batch_normalize: bool = opt(
        False, "mis: divide the weights by their mean over the micro-batch, as slime; packing then counts", "slime"
    )
    use_opsm: bool = opt(False, "drop responses of negative advantage that the policy has moved away from", "slime")
    opsm_delta: float = opt(1e-4, "distance of --use-opsm: mean of old minus new log-prob", "slime", ge=0)
    ref_ckpt_step: int | None = opt(None, "step of --ref-load to read; default: the newest", "slime", ge=0)
    ref_update_interval: int | None = opt(None, "make the policy the reference every N rollouts", "slime", ge=1)
    value_clip: float = opt(
        0.2, "change of a critic's value in one rollout above which its loss is clipped", "slime", ge=0
    )
    num_critic_only_steps: int = opt(0, "train the critic alone for the first N rollouts", "slime", ge=0)
    critic_load: str | None = opt(
        None, "checkpoint or Hugging Face directory of the critic; default: the policy's start", "slime"
    )
    critic_lr: float | None = opt(None, "learning rate of the critic; default --lr", "slime", ge=0)
    critic_lr_warmup_iters: int = opt(0, "optimizer steps of the critic's linear warm-up", "slime", ge=0)


# ---- further tokens


class FurtherTokenOptions(Base):
    """layers that predict further tokens (docs/models.md)"""

    mtp_num_layers: int | None = opt(
        None, "further layers of the trainer, each of which predicts a further token", "megatron", ge=1
    )
    enable_mtp_training: bool = opt(False, "train them; the policy stays as it is", "slime")
    mtp_loss_scaling_factor: float = opt(
        0.2, "weight of their loss (the default is slime's, Megatron's own is 0.1)", "megatron", gt=0
    )


# ---- adapters


class AdapterOptions(Base):
    """LoRA adapters (docs/models.md)"""

    lora_rank: int = opt(0, "train adapters of this rank over frozen weights; 0: all weights are trained", "vime", ge=0)
    lora_alpha: float = opt(16, "scale of an adapter: this divided by its rank", "vime", gt=0)
    use_rslora: bool = opt(False, "divide by the root of the rank (rank-stabilized LoRA)", "trl")
    lora_dropout: float = opt(0.0, "share of an adapter's inputs dropped in training", "vime", ge=0, lt=1)
    target_modules: list[str] = opt(
        ["all-linear"],
        "matrices with an adapter: names of Hugging Face or Megatron (q_proj, linear_qkv), the last words of one "
        "(mlp.down_proj), * for any part; all-linear: all but embeddings, output layer and routers",
        "vime",
    )
    exclude_modules: list[str] = opt([], "matrices without one, in the same spelling", "vime")
    lora_type: Literal["lora", "canonical_lora"] = opt(
        "lora",
        "lora: one A for matrices that Megatron fuses (queries, keys and values); canonical_lora: one each, as PEFT",
        "vime",
    )
    lora_serve: Literal["adapter", "merged"] | None = opt(
        None,
        "what an update brings to engines: the adapter, or merged weights; default: the adapter where vLLM applies "
        "all of it",
    )
    lora_adapter_path: str | None = opt(None, "adapter to start from: a directory of PEFT's", "vime")


# ---- distillation


class DistillationOptions(Base):
    """on-policy distillation (docs/algorithms.md)"""

    use_opd: bool = opt(False, "learn from a teacher's log-probs of sampled tokens", "slime")
    opd_type: Literal["vllm", "megatron"] | None = opt(
        None,
        "place of the teacher: a server at --opd-teacher-url, or the weights of --opd-teacher-load on the trainer's "
        "ranks",
        "vime",
    )
    opd_kl_coef: float = opt(1.0, "weight of the KL to the teacher; 0 only measures it", "slime", ge=0)
    opd_kl_type: Literal["sampled", "reverse", "forward"] = opt(
        "sampled",
        "sampled: subtract the reverse KL of each sampled token from its advantage; reverse, forward: add the KL over "
        "the whole vocabulary to the loss (megatron only)",
    )
    opd_teacher_load: str | None = opt(
        None, "teacher of --hf-checkpoint's architecture: a checkpoint or a Hugging Face directory", "slime"
    )
    opd_teacher_ckpt_step: int | None = opt(
        None, "step of --opd-teacher-load to read; default: the newest", "slime", ge=0
    )
    opd_teacher_url: str | None = opt(
        None, "address of a vLLM server with the student's tokenizer; its key is in HPCRL_OPD_TEACHER_KEY"
    )
    opd_teacher_model: str | None = opt(None, "name of the model on that server; default: its only one", "vime")


# ---- optimizer


class OptimizerOptions(Base):
    """optimizer (more of Megatron's OptimizerConfig by its own flag names)"""

    lr: float = opt(1e-6, "learning rate (Megatron has no default; slime's is the same)", "megatron", ge=0)
    min_lr: float = opt(0.0, "learning rate at the end of the decay", "megatron", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = opt(
        "constant",
        "schedule after warm-up; WSD: constant, then the decay of --lr-wsd-decay-style (Megatron's default: linear)",
        "megatron",
    )
    lr_warmup_iters: int = opt(0, "optimizer steps of linear warm-up", "megatron", ge=0)
    lr_warmup_fraction: float | None = opt(None, "the same as a part of the schedule's steps", "megatron", ge=0, lt=1)
    lr_warmup_init: float = opt(0.0, "learning rate at the start of the warm-up", "megatron", ge=0)
    lr_decay_iters: int | None = opt(None, "optimizer steps of the schedule; default: all of the run", "megatron", ge=1)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = opt(
        "exponential", "shape of WSD's final decay", "megatron"
    )
    lr_wsd_decay_iters: int | None = opt(None, "optimizer steps of that decay", "megatron", ge=1)
    weight_decay: float = opt(0.0, "weight decay (Megatron's default: 0.01)", "megatron", ge=0)
    start_weight_decay: float | None = opt(None, "weight decay at the start, if it grows", "megatron", ge=0)
    end_weight_decay: float | None = opt(None, "weight decay at the end of the schedule", "megatron", ge=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = opt(
        "constant", "growth from --start-weight-decay to --end-weight-decay", "megatron"
    )
    adam_beta1: float = opt(0.9, "Adam's first decay rate", "megatron", ge=0, lt=1)
    adam_beta2: float = opt(0.95, "Adam's second decay rate (Megatron's default: 0.999)", "megatron", ge=0, lt=1)
    adam_eps: float = opt(1e-8, "Adam's epsilon", "megatron", gt=0)
    clip_grad: float = opt(1.0, "maximum norm of the gradient; 0: no clipping", "megatron", ge=0)

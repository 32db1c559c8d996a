"""What an algorithm needs of a run: which models, which passes, which samples; a pure function of the options, no
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.options import Options
from hpcrl.config.plugin_names import find_algorithm_file


@dataclass(frozen=True)
class Needs:
    """What the options ask for.

    Attributes:
        advantages: there is an estimator at all.
        reference: log-probs of the reference model for every token.
        critic: a value model, its values before the update and its training.
        old_logprobs: a pass of the policy (or the old actor) over the whole rollout before the first optimizer step;
            without it the first step's own log-probs, or the engine's, are the old ones.
        greedy: the reward of one greedy response to every prompt (`RolloutBatch.baseline`).
        teacher: the teacher's log-probs of every token, from the samples or (teacher_model) from the teacher's weights.
        teacher_model: the teacher is a set of weights on the trainer's ranks.
        teacher_server: it is a server, asked about every sample.
        divergence: the KL to it over the whole vocabulary.
        pairs: both samples of a group in one micro-batch (dpo), with `TokenBatch.group` and `reward`.
    """

    advantages: bool
    reference: bool
    critic: bool
    old_logprobs: bool
    greedy: bool
    teacher: bool
    teacher_model: bool
    teacher_server: bool
    divergence: bool
    pairs: bool


def needs(options: Options) -> Needs:
    """Needs of these options."""
    policy = options.loss_type in ("policy_loss", "custom_loss")
    declared = find_algorithm_file("estimators", options.advantage_estimator) if policy else None
    wanted = declared.needs if declared else ()
    in_reward = policy and options.kl_coef != 0
    taught = policy and options.use_opd
    sampled = taught and options.opd_kl_type == "sampled"
    several = policy and (options.steps_per_rollout > 1 or options.keep_old_actor)
    several = several or (policy and options.rollout_data_postprocess_path is not None)
    return Needs(
        advantages=policy,
        reference=in_reward or (policy and options.use_kl_loss) or options.loss_type == "dpo_loss",
        critic="critic" in wanted,
        old_logprobs=(in_reward or sampled or several) and not options.use_rollout_logprobs,
        greedy="greedy" in wanted,
        teacher=sampled,
        teacher_model=taught and options.opd_type == "megatron",
        teacher_server=taught and options.opd_type == "vllm",
        divergence=taught and not sampled,
        pairs=options.loss_type == "dpo_loss",
    )


def routing(options: Options) -> Literal["own", "old", "engine"]:
    """Whose choice of experts is trained with: each pass's own, the old policy's pass's, or the engine's."""
    return "engine" if options.use_rollout_routing_replay else "old" if options.use_routing_replay else "own"


def policy_loss_name(options: Options) -> str:
    """--pg-loss-type; without it the estimator's own loss, ppo for most."""
    if options.pg_loss_type is not None:
        return options.pg_loss_type
    declared = find_algorithm_file("estimators", options.advantage_estimator)
    return declared.loss if declared else "ppo"

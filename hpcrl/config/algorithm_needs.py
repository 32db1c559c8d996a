"""What an algorithm needs of a run: which models, which passes, which samples; a pure function of the options, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.options import Options


@dataclass(frozen=True)
class Needs:
    """reference: log-probs of the reference model for every token.  critic: a value model, its values before the update and
    its training.  old_logprobs: a pass over the whole rollout before the first optimizer step (else the first step's own
    log-probs are the old ones, or the engine's are).  old_in_advantages: the estimator reads them too, for KL in the reward.
    greedy: the reward of one greedy response to every prompt (RolloutBatch.baseline).  pairs: both samples of a
    group in one micro-batch (dpo), with TokenBatch.group and reward.  advantages: whether there is an estimator at all.
    """

    reference: bool
    critic: bool
    old_logprobs: bool
    old_in_advantages: bool
    greedy: bool
    pairs: bool
    advantages: bool


def needs(options: Options) -> Needs:
    """Needs of these options."""
    raise NotImplementedError

"""Which rollout the trainer asks for when, and when the engines get new weights: the three loops of --loop.  Pure.

    sync          ask r, train r, publish                       r is sampled under the weights that r is trained from
    async         ask r + 1, train r, wait for r + 1, publish   every sample of r + 1 has one version, that of before r
    fully-async   ask r + 1, train r, publish                   the weights enter while responses are in flight

In the last two an evaluation goes on beside the training, and newer weights may enter it.

Invariants: every rank comes to the same answers, as they depend on options and numbers that all ranks have; weights are
evaluated and, in deterministic mode, saved only once the engines have them; in deterministic mode an evaluation is
waited for.
"""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs


def steps_of(options: Options, rollout_id: int) -> int:
    """How many optimizer steps of the policy, and so policy versions, a rollout makes."""
    critic_only = needs(options).critic and rollout_id < options.num_critic_only_steps
    return 0 if critic_only else options.steps_per_rollout


def publishes(options: Options, rollout_id: int, evaluates: bool) -> bool:
    """Whether the engines get the weights after `rollout_id`; evaluates: whether these are evaluated then."""
    if not options.runs_ahead:
        return True
    return evaluates or (rollout_id + 1) % options.update_weights_interval == 0


def settles(options: Options, publishing: bool) -> bool:
    """Whether the rollout that is sampled ahead is waited for before the step ends: new weights must not enter it, or a
    checkpoint of a run that repeats bit for bit needs it whole."""
    return options.runs_ahead and options.loop == "async" and (publishing or options.deterministic_mode)


def evaluates_beside(options: Options) -> bool:
    """Whether training goes on while held-out prompts are answered."""
    return options.runs_ahead and not options.deterministic_mode


def last_evaluation(options: Options, rollout_id: int, total: int) -> int:
    """The last rollout up to `rollout_id` after which an evaluation is due; -1: the one before the first, or none."""
    if rollout_id + 1 == total:
        return rollout_id
    interval = options.eval_interval
    return (rollout_id + 1) // interval * interval - 1 if interval else -1

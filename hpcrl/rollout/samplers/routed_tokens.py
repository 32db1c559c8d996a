"""The experts of a sample that a custom function has returned (--use-rollout-routing-replay).

Invariant: every token that a trained one follows from has the experts by which an engine read or sampled it, after
exactly the tokens before it; a sample of which that cannot be said is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcrl.models.routing import R3, Routing
from hpcrl.rollout.endpoint.recorded_turns import AskedTurn, choices_of
from hpcrl.sample import Sample


class UnaskedTokens(Exception):
    """A sample's tokens are not those that the policy was asked with, so that no engine has said their experts."""


def unknown_experts(tokens: int, routing: Routing) -> np.ndarray:
    """The column of a sample of which no engine has read a token."""
    return np.zeros((tokens, len(routing.layers), routing.chosen * routing.dtype.itemsize), np.uint8)


def with_experts(sample: Sample, turns: Sequence[AskedTurn], routing: Routing) -> Sample:
    """The sample with the experts of each token before its last trained one; those behind that are unknown.

    Args:
        turns: of its response, in the order of the requests.

    Raises:
        UnaskedTokens: if the policy was not asked with exactly the tokens before a trained one.
    """
    experts = unknown_experts(len(sample.array("tokens")), routing)
    trained = np.flatnonzero(sample.array("loss_mask"))
    if len(trained):
        read = sample.prompt_length + int(trained[-1])
        if (found := choices_of(sample.array("tokens")[:read], turns)) is None:
            raise UnaskedTokens(
                f"returned other tokens than those that it had asked the policy with, and {R3} needs the experts of "
                "each: return what a Conversation makes, or None after asking at the endpoint"
            )
        experts[:read] = found
    return sample.replace(rollout_routed_experts=experts)

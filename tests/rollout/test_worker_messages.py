"""What a worker process is sent of a sample."""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.worker_messages import send_sample
from hpcrl.sample import Sample, unpack


def test_a_worker_is_sent_what_it_is_shown() -> None:
    """Not the experts, of which a long response has megabytes, and nothing of how it was graded."""
    one = np.ones(1, np.int32)
    sample = Sample(0, 0, np.ones(2, np.int32), 1, one, one, one, response="a\ud800", label="b", metadata={"m": 1})
    sample.extra = {"routed_experts": np.zeros((2, 48, 8), np.uint8)}
    sample.reward = None  # as a hook of the user's may leave them
    sample.remove_sample = np.bool_(True)
    sample.rewards = {"part": 1.0}
    found = unpack(send_sample(sample, columns=True))
    assert (found.response, found.label, found.metadata) == ("a?", "b", {"m": 1})
    assert (found.extra, found.reward, found.rewards, found.remove_sample) == ({}, 0.0, {}, False)
    assert found.tokens.tolist() == [1, 1] and sample.extra, "the sample itself keeps them"

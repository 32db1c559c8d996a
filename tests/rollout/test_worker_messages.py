"""What a worker process is sent of a sample."""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.worker_messages import send_sample, unpack
from hpcrl.sample import Sample


def test_a_worker_is_sent_what_it_is_shown() -> None:
    """Not the experts, of which a long response has megabytes, and nothing of how it was graded."""
    sample = Sample(tokens=np.ones(2, np.int32), response_length=1, response="a\ud800", label="b", metadata={"m": 1})
    sample.rollout_routed_experts = np.zeros((2, 48, 8), np.uint8)
    sample.reward = 1.0
    sample.remove_sample = True
    sample.rewards = {"part": 1.0}
    found = unpack(send_sample(sample, columns=True))
    assert (found.response, found.label, found.metadata) == ("a?", "b", {"m": 1})
    assert (found.reward, found.rewards, found.remove_sample) == (None, {}, False)
    assert not found.has("rollout_routed_experts") and sample.has("rollout_routed_experts"), "it keeps them itself"
    assert found.tokens == [1, 1]

"""Samples that are written in the prompt file: labels to learn, conversations, and pairs of a better and a worse
response.

Invariant: no engine and no reward has a part in them.
"""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.engines.engine_client import Completion
from hpcrl.rollout.samplers.sampler import Asked
from hpcrl.sample import COMPLETED, Sample


class LabelSampler:
    """What the prompt file holds: the label, or of a pair the better response (the label, reward 1) and the worse
    (reward 0).

    Of a conversation the whole rest is the response, and the mask says which tokens are the assistant's.
    """

    async def make(self, asked: Asked) -> list[Sample]:
        prompt = asked.group.prompt
        index = asked.index
        pair = asked.group.prompt.rejected is not None
        target = prompt.rejected if pair and index else prompt.target
        assert target is not None, "the prompt file was read for learning what it holds"
        nothing = np.zeros(len(target), np.float32)
        versions = np.full(len(target), asked.version, np.int32)
        response = "" if prompt.mask is not None else str(prompt.worse if pair and index else prompt.label)
        sample = Completion(target, nothing, versions, COMPLETED).sample(asked.group.number, index, prompt, response)
        if prompt.mask is not None:
            sample.loss_mask = prompt.mask
        sample.reward = float(pair and not index)
        return [sample]

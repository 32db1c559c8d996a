"""A trajectory as a sample: its tokens, and the text of just these."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hpcrl.rollout.samplers.trajectory import Trajectory, Turn
from tests.rollout.samplers.test_sampled_tokens import returned


def text(tokens: np.ndarray) -> str:
    """Each id is a character."""
    return "".join(str(token) for token in tokens.tolist())


def test_what_is_told_last_is_no_part_of_it() -> None:
    """Neither of the tokens, nor of the text that is graded and shown."""
    found = Trajectory([1, 2], version=3)
    for said, told in (([4, 5], [6]), ([7], [8, 8])):
        tokens = np.asarray(said, np.int32)
        found.add_sampled(Turn(tokens, -tokens.astype(np.float32), np.full(len(said), 3, np.int32), "stop"))
        found.add_observed(told)
    sample = found.sample(returned([1], [1]), SimpleNamespace(decode=text))  # type: ignore[arg-type]
    assert sample.array("tokens").tolist() == [1, 2, 4, 5, 6, 7] and sample.array("loss_mask").tolist() == [1, 1, 0, 1]
    assert sample.response == "4567"

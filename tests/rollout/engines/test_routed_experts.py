"""The engine's choice of experts on its way into a sample: checked, joined over the parts of a response, cut to what is
routed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcrl.errors import DataError, PeerError
from hpcrl.models.routing import Routing
from hpcrl.rollout.engines.completion import Completion, read_experts
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.transport.share_format import SampleBatch
from hpcrl.utils.sample_parts import COMPLETED

ROUTING = Routing(layers=(1, 3), of=4, experts=8, chosen=2)
ENGINE: Any = SimpleNamespace(log="engine-0.log", __str__=lambda _: "engine 0")


def table(tokens: int, layers: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 8, (tokens, layers, 2)).astype(np.uint8)


def completion(prompt: int, response: int, seed: int = 0) -> Completion:
    columns = np.arange(response, dtype=np.int32), np.zeros(response, np.float32), np.zeros(response, np.int32)
    return Completion(*columns, COMPLETED, table(prompt + response - 1, seed=seed))


def test_all_layers_or_those_with_experts() -> None:
    every = table(7, layers=4)
    own = every[:, [1, 3]]
    assert np.array_equal(read_experts(ENGINE, every.tobytes(), (4, 2), 7, ROUTING), own)
    assert np.array_equal(read_experts(ENGINE, own.tobytes(), (2, 2), 7, ROUTING), own)


@pytest.mark.parametrize(
    ("data", "shape"), [(table(6), (2, 2)), (table(7, 3), (3, 2)), (table(7), (2, 4)), (b"", (0, 0))]
)
def test_what_is_no_choice_is_the_engines_fault(data: Any, shape: tuple[int, int]) -> None:
    with pytest.raises(
        PeerError, match=r"answered \d+ bytes of experts in . layers of . for 7 tokens; see engine-0.log"
    ):
        read_experts(ENGINE, bytes(data), shape, 7, ROUTING)


def test_continued_response_keeps_its_experts() -> None:
    """The engine reads the first part again, and may then choose otherwise; the log-probs are those of the first
    time."""
    first, more = completion(5, 3), completion(8, 4, seed=1)
    whole = more.after(first)
    assert whole.experts is not None and first.experts is not None and more.experts is not None
    assert np.array_equal(whole.experts, np.concatenate([first.experts, more.experts[7:]]))
    assert len(whole.experts) == 5 + 7 - 1 and len(whole.tokens) == 7


def test_one_row_per_token() -> None:
    """A sample has a row for every token, and that of the last is unknown."""
    prompt = Prompt(raw="", tokens=np.arange(5, dtype=np.int32))
    sample = completion(5, 3).sample(0, 0, prompt, "")
    assert sample.array("rollout_routed_experts").shape == (8, 2, 2)
    assert not sample.array("rollout_routed_experts")[-1].any()
    (column,) = SampleBatch.from_samples([sample]).extra.values()
    assert np.array_equal(ROUTING.read(column)[:-1], completion(5, 3).experts)


def test_many_experts_take_two_bytes() -> None:
    wide = Routing(layers=(0,), of=1, experts=300, chosen=2)
    experts = np.array([[[299, 1]], [[256, 0]]])
    column = wide.column(experts)
    assert column.shape == (2, 1, 4) and column.dtype == np.uint8
    assert np.array_equal(wide.read(column), experts)
    with pytest.raises(DataError, match="the samples name expert 300, the model has 300 in a layer"):
        wide.read(wide.column(experts + 1))

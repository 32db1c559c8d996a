"""The shapes that a pipeline stage works out are those that Megatron's exchange would have told it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.trainer.megatron.replaced import PassShapes
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model
from tests.trainer.step import test_invariance as whole

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp3": (3, {"pipeline_model_parallel_size": 3}),
    "tp2 sp pp2": (4, SP | {"pipeline_model_parallel_size": 2}),
    "cp2 pp2": (4, {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "dp2 pp2": (4, {"pipeline_model_parallel_size": 2}),
    "pp2 vpp3": (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}),
}


def both_on_rank(opts: Options) -> list[tuple[bool, Any, Any]]:
    """Of each message: whether its shapes are known, ours, and those of the exchange."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from hpcrl.trainer.megatron import replaced

    found = []

    def both(communicator: Any, *args: Any) -> Any:
        known = bool(replaced._passes)
        exchanged = replaced.STOCK["_communicate_shapes"](communicator, *args)
        ours = replaced.communicate_shapes(communicator, *args) if known else exchanged
        found.append((known, *map(tuple, ours), *map(tuple, exchanged)))
        return ours

    with mock.patch.object(P2PCommunicator, "_communicate_shapes", both):
        whole.train_on_rank([opts])
    return found


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_knows_the_shapes_that_come(tmp_path: Path, layout: str) -> None:
    """Of every message of the old policy's pass and of the step, over micro-batches of many lengths; with virtual stages
    of none."""
    n, fields = LAYOUTS[layout]
    model = make_model(tmp_path, tied=False, vocab_size=whole.VOCAB, num_hidden_layers=6)
    opts = whole.options(model, n, **whole.LOSSES["own old"] | whole.PACKINGS["40 tokens"] | fields)
    for messages in run_ranks(n, both_on_rank, opts):
        came = {shape for _, *shapes in messages for shape in shapes[:2]} - {(0, 0, 0)}
        assert len(came) > 2, "micro-batches differ"
        for known, *shapes in messages:
            assert known == ("vpp" not in layout)
            assert shapes[:2] == shapes[2:]


def test_a_stage_that_sends_something_else_says_so() -> None:
    """Before the other one waits for what never comes."""
    shapes = PassShapes([4, 6], 8)
    shapes.check("to next", torch.empty(4, 1, 8))
    shapes.check("to previous", None)
    with pytest.raises(HpcrlError, match=r"\[6, 1, 9\].*\[6, 1, 8\]"):
        shapes.check("to next", torch.empty(6, 1, 9))
    shapes.check("to previous", torch.empty(4, 1, 8))

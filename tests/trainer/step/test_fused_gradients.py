"""Weight gradients that the GEMM adds to Megatron's buffer are those that autograd would have added.

Megatron's own code does it, on the CPU: in place of Apex's kernel stands what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hpcrl.config.options import Options
from tests.support import families
from tests.support.ranks import RankError, run_ranks
from tests.support.tiny import make_model
from tests.trainer.step import test_invariance as whole

pytestmark = pytest.mark.process

PIECES = whole.LOSSES["per token"] | whole.PACKINGS["64 tokens"]  # --log-probs-chunk-size 7
WHOLE = PIECES | {"log_probs_chunk_size": -1}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
#: name -> (model, ranks, options)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied embeddings": ("tied", 1, WHOLE),
    "tied embeddings, in pieces": ("tied", 1, PIECES),
    "overlapped, in pieces": ("tied", 2, PIECES | {"megatron": {"overlap_grad_reduce": True}}),
    "overlapped": ("tied", 2, WHOLE | {"megatron": {"overlap_grad_reduce": True}}),
    "recomputed": ("untied", 1, PIECES | {"megatron": whole.RECOMPUTE["uniform"]}),
    "tp2 sp": ("tied", 2, PIECES | SP),
    "pp2": ("tied", 2, PIECES | {"pipeline_model_parallel_size": 2}),
    "experts": ("qwen3_moe", 2, PIECES | {"expert_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    dense = {
        name: make_model(root / name, tied=name == "tied", vocab_size=whole.VOCAB, num_hidden_layers=2)
        for name in ("tied", "untied")
    }
    return dense | {"qwen3_moe": families.make(root / "qwen3_moe", "qwen3_moe", vocab_size=whole.VOCAB)}


@contextmanager
def apex(calls: list[tuple[int, ...]], output: bool | None) -> Iterator[None]:
    """Within, the machine has Apex, whose kernel records the shapes of the weights that it is called for.

    Args:
        output: whether the output layer uses it whatever hpcrl says (None: as it says).
    """
    from megatron.core.tensor_parallel import layers

    from hpcrl.trainer.megatron import fusions
    from hpcrl.trainer.megatron.capabilities import GRADIENTS, Machine

    def accumulate(rows: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:
        calls.append(tuple(total.shape))
        total += grads.t().to(total.dtype) @ rows.to(total.dtype)

    stand_in = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    machine = Machine(True, frozenset({"apex"}), frozenset({GRADIENTS}))
    with (
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", stand_in, create=True),
        mock.patch.object(Machine, "here", staticmethod(lambda: machine)),
        mock.patch.object(fusions, "_no_output_gradients", fusions._no_output_gradients if output is None else no_why),
    ):
        yield


def no_why(*_: Any) -> str:
    return ""


def fused_on_rank(opts: Options, output: bool | None = None) -> tuple[dict[str, torch.Tensor], int, int]:
    """(gradients, calls of the kernel, those of them for the output layer) on rank 0."""
    calls: list[tuple[int, ...]] = []
    with apex(calls, output):
        found = whole.gradients_on_rank(opts)
    columns = -(-whole.VOCAB // opts.tensor_model_parallel_size)
    return found, len(calls), sum(shape[0] == columns for shape in calls)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_same(models: dict[str, Path], case: str) -> None:
    """In every layer, the output layer with Apex too, but where it would break."""
    kind, n, fields = CASES[case]
    opts = whole.options(models[kind], n, **fields)
    plain = run_ranks(n, whole.gradients_on_rank, opts)[0]
    fused = run_ranks(n, fused_on_rank, opts)
    found, calls, of_output = fused[0]
    assert calls > of_output and found.keys() == plain.keys()
    left = fused[-1][2]  # of the last rank, which has the output layer
    assert (left == 0) == (case == "overlapped, in pieces")
    for name, gradient in plain.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name} {text}"
        )


def test_pieces_and_overlap_exclude_the_output_layer(models: dict[str, Path]) -> None:
    """What is kept from users: Megatron's reduction ends the run there."""
    opts = whole.options(models["untied"], 2, **CASES["overlapped, in pieces"][2])
    with pytest.raises(RankError, match="overlap_grad_reduce is True"):
        run_ranks(2, fused_on_rank, opts, True)

"""Two optimizer steps of an adapter under every loss: those that PEFT's formula takes in transformers with AdamW.

The reference computes W + scale B A in each of its linear layers, so that autograd gives the gradients of A and B.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize

from hpcrl.config.options import Options
from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model
from tests.trainer.step import test_invariance as whole

pytestmark = pytest.mark.process

RANK, ALPHA = 4, 6
LORA: dict[str, Any] = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_type": "canonical_lora", "weight_decay": 0.1}
LOSSES = whole.EVERY | whole.FURTHER
OTHER = {*whole.WITH_REFERENCE, *whole.WITH_TEACHER}


class AddedProduct(torch.nn.Module):
    """W -> W + scale B A."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.lora_A, self.lora_B = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + ALPHA / RANK * self.lora_B @ self.lora_A


class WithAdapter:
    """A model of transformers whose adapter alone is trained."""

    def __init__(self, model: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.hf = whole.transformers_model(model)
        self.hf.requires_grad_(False)
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                layer = self.hf.get_submodule(name.removesuffix(".lora_A.weight"))
                added = AddedProduct(a, tensors[name.replace("lora_A", "lora_B")])
                parametrize.register_parametrization(layer, "weight", added)

    def __call__(self, *args: Any) -> Any:
        return self.hf(*args)

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.hf.named_parameters() if p.requires_grad]


def two_steps(opts: Options, model: Path, loss: str, other: Path | None, tensors: Any) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each."""
    hf = WithAdapter(model, tensors)
    parameters = [p for _, p in hf.named_parameters()]
    adam = torch.optim.AdamW(
        parameters, opts.lr, (opts.adam_beta1, opts.adam_beta2), opts.adam_eps, weight_decay=opts.weight_decay
    )
    found = []
    for _ in range(2):
        adam.zero_grad()
        said = whole.expected(hf, opts, loss, other)
        found.append((said.loss, said.norm))
        adam.step()
    return found


def train(every: list[Options], adapter: Path) -> list[list[tuple[float, float]]]:
    """The same on ranks, of each of the options."""
    from hpcrl.trainer.lora.values import fill, init_adapter
    from hpcrl.trainer.step import train_batch

    ranks, found = None, []
    for opts in every:
        policy = whole.start(opts, ranks)
        ranks = policy.ranks
        init_adapter(policy, opts.seed)
        fill(policy, load_file(adapter), str(adapter))
        mine = ShareExchange(ranks).exchange(whole.shares(opts)[ranks.dp_rank])
        others = whole.others_of(policy, opts)
        steps = [train_batch.train(policy, ranks, opts, mine, others) for _ in range(2)]
        found.append([(step["train/loss"], step["train/grad_norm"]) for step in steps])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=whole.VOCAB)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), tied=True, seed=1, vocab_size=whole.VOCAB)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of an adapter next to all seven matrices of each layer."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            stem = name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / columns**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 8
    path = tmp_path_factory.mktemp("adapter") / "adapter.safetensors"
    save_file(tensors, path)
    return path


def opts_of(loss: str, model: Path, n: int, other: Path, **fields: Any) -> Options:
    more = {"opd_teacher_load": str(other)} if loss in whole.WITH_TEACHER else {}
    more |= {"ref_load": str(other)} if loss in whole.WITH_REFERENCE else {}
    return whole.options(model, n, **LORA, **LOSSES[loss], **more, **fields)


FEW = ["sft", "kl loss", "distill reverse"]


@pytest.mark.parametrize(
    "names", [FEW, pytest.param([n for n in LOSSES if n not in FEW], marks=pytest.mark.soak)], ids=["few", "more"]
)
def test_steps_are_those_of_pefts_formula(model: Path, other: Path, adapter: Path, names: list[str]) -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    packing = whole.PACKINGS["64 tokens"]
    every = [opts_of(loss, model, 2, other, **packing, **layout) for loss in names]
    tensors = load_file(adapter)
    for loss, opts, found in zip(names, every, run_ranks(2, train, every, adapter, timeout=200)[0], strict=True):
        wanted = two_steps(opts, model, loss, other if loss in OTHER else None, tensors)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7), loss

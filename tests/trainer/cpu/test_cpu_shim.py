"""The CPU shim: what it replaces computes what Megatron's own would, and it keeps its hands off where CUDA is."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.trainer.cpu import cpu_shim
from hpcrl.trainer.megatron import replaced, thd
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model


def test_missing_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing psutil is an error before anything hangs."""
    monkeypatch.setattr(replaced.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(HpcrlError, match="pip install psutil"):
        replaced.install()


def test_nothing_of_torch_is_touched_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(replaced, "_done", [])
    monkeypatch.setattr(replaced, "REPLACED", {})
    monkeypatch.setattr(replaced, "_repair", lambda: None)
    monkeypatch.setattr(cpu_shim, "install", lambda _: pytest.fail("Megatron was changed"))
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "synchronize", "Stream", "manual_seed")}
    replaced.install()
    assert {name: getattr(torch.cuda, name) for name in before} == before


ON_A_GPU = """
import sys
import torch
torch.cuda.is_available = lambda: True
from hpcrl.trainer.megatron import replaced
replaced.install()
import hpcrl.trainer.training_loop
print([name for name in sys.modules if name.startswith("hpcrl.trainer.cpu")])
"""


@pytest.mark.process
def test_a_gpu_needs_no_code_of_cpus() -> None:
    """The trainer of a rank with CUDA imports nothing of trainer/cpu."""
    said = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0 and said.stdout.splitlines()[-1] == "[]", said.stderr


@pytest.mark.parametrize("cuda", [True, False])
def test_router_without_transformer_engine(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    """The router finds its name without Transformer Engine."""
    router: Any = types.ModuleType("moe_utils")
    other: Any = types.ModuleType("other")
    monkeypatch.setattr(replaced, "_import", lambda name: router if name.endswith("moe_utils") else other)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(cpu_shim, "install", lambda _: None)
    monkeypatch.setattr(replaced, "_quiet", lambda: None)
    monkeypatch.setattr(replaced, "REPLACED", {})
    for there in (None, "Transformer Engine's"):
        monkeypatch.setattr(replaced, "_done", [])
        if there:
            router.te_general_gemm = there
        replaced.install()
        assert router.te_general_gemm is there


def test_stream_advice_needs_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS: Megatron warns when it is not as it wants it."""
    monkeypatch.setattr(replaced, "REPLACED", {})
    monkeypatch.setattr(replaced, "_repair", lambda: None)
    for name in ("_torch_cuda_is", "_megatron_on", "_megatron_on_cpu"):
        monkeypatch.setattr(cpu_shim, name, lambda *_: None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for cuda in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(replaced, "_done", [])
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            replaced.install()
            warnings.warn("When using sequence parallelism it is recommended to set ...", UserWarning, stacklevel=1)
        assert len(heard) == cuda


class Group:
    """A process group's size and rank."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = lambda: size
        self.rank = lambda: rank


def rotated() -> list[tuple[float, str]]:
    """Largest difference of packed rotary embedding from Megatron's for single sequences, in several settings."""
    from megatron.core.models.common.embeddings import rope_utils

    cu, generator = (0, 8, 12, 40), torch.Generator().manual_seed(0)
    found = []
    for interleaved in (False, True):
        for rotary in (16, 8):  # all of the head, and half of it
            for cp in (1, 2):
                table = torch.arange(28.0)[:, None] * (0.3 ** torch.arange(rotary // 2))
                table = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
                x = torch.randn(40, 3, 16, generator=generator)
                freqs = table[:, None, None]
                plain = rope_utils._apply_rotary_pos_emb_bshd
                whole = [
                    plain(x[a:b, None], freqs[: b - a], rotary_interleaved=interleaved)[:, 0] for a, b in pairwise(cu)
                ]
                for rank in range(cp):
                    rows = thd.cp_indices(cu, cp, rank)
                    bounds = torch.tensor(cu, dtype=torch.int32)
                    mine = replaced.rotate_packed(x[rows], bounds, freqs, interleaved, cp_group=Group(cp, rank))
                    error = float((mine - torch.cat(whole)[rows]).abs().max())
                    found.append((error, f"interleaved {interleaved}, {rotary} of 16, cp {cp}"))
    assert rope_utils._apply_rotary_pos_emb_thd is replaced.rotate_packed
    return found


@pytest.mark.process
def test_rotary_embedding_of_packed_rows() -> None:
    """The rotary embedding of packed rows is that of each sequence."""
    for error, where in run_ranks(1, rotated)[0]:
        assert error < 1e-6, where


def told_of_sequences() -> dict[str, Any]:
    """What attention is told of three sequences with padding between them."""
    from hpcrl.trainer.megatron.packed_attention import boundaries

    found = boundaries(torch.tensor([0, 8, 16, 24], dtype=torch.int32), (0, 8, 16, 24), 8)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in vars(found).items()}


@pytest.mark.process
def test_attention_is_not_told_of_padding() -> None:
    """Transformer Engine has neither FlashAttention 2 nor its own for sequences that are told apart from their
    padding."""
    told = run_ranks(1, told_of_sequences)[0]
    assert told["cu_seqlens_q_padded"] is None and told["cu_seqlens_kv_padded"] is None
    assert told["cu_seqlens_q"] == told["cu_seqlens_kv"] == [0, 8, 16, 24] and told["ends"] == (0, 8, 16, 24), (
        "and on the host"
    )


def adam_after_load(directory: str, hint: bool) -> list[float]:
    """How often Adam thinks that it has stepped, per parameter, after a load and one more step."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint import optimizer_shards
    from hpcrl.trainer.megatron import hf_weights, model

    opts = Options(hf_checkpoint=directory, bf16=False, actor_num_gpus_per_node=1, lr=1e-3)
    policy = model.build(opts, parallel_state.initialize(opts))
    hf_weights.load_hf(policy, directory)
    optimizer_shards.before_load(policy.optimizer)
    adam = next(optimizer_shards._torch_adams(policy.optimizer))
    params = [p for group in adam.param_groups for p in group["params"]]
    assert all({"step", "exp_avg", "exp_avg_sq"} <= adam.state[p].keys() for p in params)
    one = torch.tensor(5.0)
    for p in params:
        adam.state[p]["step"] = one  # what Megatron's loader leaves
    if hint:
        optimizer_shards.after_load(policy.optimizer)
    policy.model.zero_grad_buffer()
    policy.optimizer.step()
    return [float(adam.state[p]["step"]) for p in params]


@pytest.mark.process
def test_steps_counted_after_a_load(tmp_path: Path) -> None:
    """After a load, every parameter counts its own steps."""
    directory = str(make_model(tmp_path / "model"))
    assert set(run_ranks(1, adam_after_load, directory, True)[0]) == {6.0}
    assert set(run_ranks(1, adam_after_load, directory, False)[0]) != {6.0}  # the defect is still there


def test_literals_are_replaced_in_nested_code() -> None:
    def outer() -> tuple[str, list[str]]:
        return "cuda", [kind for kind in ("torch.cuda.FloatTensor", "cuda:0")]  # noqa: C416

    outer.__code__ = cpu_shim._swap(outer.__code__, cpu_shim.literals(cpu_shim.CPU))
    assert outer() == ("cpu", ["torch.FloatTensor", "cuda:0"])
    assert cpu_shim.literals("acc")["torch.cuda.HalfTensor"] == "torch.acc.HalfTensor"

"""Adapters where Megatron finds Transformer Engine, on a device that knows shapes alone: fused norms, grouped experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import families
from tests.support.allowed_waits import MEGATRONS, OF_NEWER_MEGATRON, OURS, check
from tests.support.ranks import on_fake_gpu
from tests.support.trained_on_fake import trained
from tests.trainer.step import test_invariance as whole

pytestmark = pytest.mark.process

LORA: dict[str, Any] = {"lora_rank": 4, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "glm4", "deepseek_v3", "qwen3_next"])
def test_adapters_with_transformer_engine(tmp_path: Path, kind: str) -> None:
    experts = kind in families.EXPERTS
    layout: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    if experts:
        layout |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    model = families.make(tmp_path, kind, vocab_size=whole.VOCAB, num_hidden_layers=4)
    opts = whole.options(model, 2, **{"clip_grad": 1.0, "micro_batch_size": 8, **layout, **LORA})
    found = on_fake_gpu(trained, opts, 1)
    assert "layers Transformer Engine" in found.parts
    assert ("grouped GEMM on" in found.parts) == experts
    check(found, OURS + MEGATRONS + OF_NEWER_MEGATRON)  # the host waits for the device no more often

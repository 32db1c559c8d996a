"""What updates have to bring of experts that files hold in one tensor, where vLLM's layer cannot be shown."""

from __future__ import annotations

import pytest
import torch

from hpcrl.models.files.safetensors_files import Entry

pytestmark = pytest.mark.vllm
X = "model.language_model.layers.0.mlp.experts"


def test_experts_that_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are wanted one by one, as the trainer sends them."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    from hpcrl.engine.loading.text_part import named_as_in_files
    from hpcrl.engine.params import layers
    from hpcrl.engine.weight_loading import UpdateChecklist

    method = object.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    held = torch.nn.Module()
    held.quant_method = method
    held.w13_weight = torch.nn.Parameter(torch.zeros(2, 8, 6))
    held.w2_weight = torch.nn.Parameter(torch.zeros(2, 6, 4))
    model = torch.nn.Module()
    inside = model
    for part in ("model", "layers", "0", "mlp", "experts"):
        inside.add_module(part, torch.nn.Module())
        inside = getattr(inside, part)
    inside.add_module("routed_experts", held)
    names = {
        f"{X}.gate_up_proj": Entry("bfloat16", (2, 8, 6), ""),
        f"{X}.down_proj": Entry("bfloat16", (2, 6, 4), ""),
        "model.visual.norm.weight": Entry("bfloat16", (4,), ""),
        "mtp.layers.0.mlp.experts.down_proj": Entry("bfloat16", (2, 6, 4), ""),
    }
    monkeypatch.setattr(layers, "experts", lambda *_: None)
    found = named_as_in_files(model, names)
    sizes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    sent = {f"{X}.{expert}.{leaf}.weight": size for expert in (0, 1) for leaf, size in sizes.items()}
    assert found.wanted == sent.keys() and found.opaque == (f"{X}.",)
    account = UpdateChecklist(found)
    for name, size in sent.items():
        account.admit(name, size, "bfloat16")
    account.close()

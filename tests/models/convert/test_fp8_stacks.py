"""FP8 files of a family whose experts may be in one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpcrl.errors import DataError
from hpcrl.trainer.checkpoint.to_torch_dist import refuse_stacks

X = "model.language_model.layers.0.mlp.experts"


def test_single_experts_are_read(tmp_path: Path) -> None:
    """What the files hold counts, not the family; it is known before any model is built."""
    held = {
        f"{X}.0.gate_proj.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        f"{X}.0.gate_proj.weight_scale_inv": torch.ones(1, 1),
        "mtp.layers.0.mlp.experts.down_proj": torch.ones(2, 4, 4),
    }
    save_file(held, tmp_path / "model.safetensors")
    refuse_stacks(tmp_path)
    save_file(held | {f"{X}.gate_up_proj": torch.ones(2, 8, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=f"one tensor .{X}.gate_up_proj"):
        refuse_stacks(tmp_path)

"""FP8 blocks as vLLM multiplies with them on GPUs since Hopper: scales brought to powers of two, by its own function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcrl.engine.server_settings import Build, scale_warning
from hpcrl.models.convert.to_fp8 import main as to_fp8
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.fp8 import quantize_block, scheme_of
from tests.support.fp8 import dequantize
from tests.support.tiny import make_model

BLOCK = (128, 128)


def error(power_of_two: bool, again: bool) -> tuple[float, float]:
    """(rms error in percent, share of the weights that vLLM changes)."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    weight = (torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    codes, scales = quantize_block(weight, BLOCK, power_of_two)
    sent = dequantize(codes, scales, BLOCK)
    if again:
        requant_weight_ue8m0_inplace(codes, scales, BLOCK)
    held = dequantize(codes, scales, BLOCK)
    wide = weight.float()
    return (100 * (held - wide).norm() / wide.norm()).item(), (held != sent).float().mean().item()


@pytest.mark.parametrize(
    ("power_of_two", "again", "percent", "changed"),
    [(False, False, 2.64, 0.0), (False, True, 3.71, 0.976), (True, False, 2.66, 0.0), (True, True, 2.66, 0.0)],
)
def test_error_of_what_is_multiplied(power_of_two: bool, again: bool, percent: float, changed: float) -> None:
    found, differing = error(power_of_two, again)
    assert found == pytest.approx(percent, abs=0.02)
    assert differing == pytest.approx(changed, abs=0.01)


@pytest.mark.parametrize(("flags", "power"), [([], True), (["--scale-fmt", "fp32"], False)])
def test_scales_of_a_converted_checkpoint(tmp_path: Path, flags: list[str], power: bool) -> None:
    """Without a flag they are those that vLLM keeps; of others an engine on GPUs warns."""
    model = make_model(tmp_path / "model")
    assert to_fp8(["--model-dir", str(model), "--save-dir", str(tmp_path / "fp8"), *flags]) == 0
    scheme = scheme_of(tmp_path / "fp8")
    assert scheme is not None and scheme.power_of_two == power
    config = read_config(tmp_path / "fp8")
    assert bool(scale_warning(config, Build("0.32.0", cpu=False))) != power
    assert not scale_warning(config, Build("0.32.0", cpu=True))
    assert not scale_warning(read_config(model), Build("0.32.0", cpu=False))

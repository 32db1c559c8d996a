"""FP8 blocks in vLLM's CPU build on processors without AMX: a product with widened weights, so that tests can see an
update.

Loading, names and shapes are vLLM's own; only the product, for which there is no kernel, is ours, and float32 is
allowed.
"""

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.platforms import PlatformEnum


class Widened(linear.Fp8BlockScaledMMLinearKernel):
    """x times the widened weight."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The weights stay as they were loaded."""

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        from tests.support.fp8 import dequantize

        return A @ dequantize(B, Bs, tuple(self.weight_group_shape)).t()


def install() -> None:
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, Widened)
    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16])

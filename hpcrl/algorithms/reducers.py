"""What each token counts in the loss: per token, per sample, per constant.

Invariant: weights depend on a sample's number of trained tokens alone, so neither packing nor layout can change a loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.config.custom_functions import guarded
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own
from hpcrl.errors import HpcrlError


def token_weights(counts: Tensor, options: Options) -> Tensor:
    """float [m], what each trained token of a sample with `counts` int64 [m] trained tokens (its mask sum) counts.

    Per sample (default): 1 / max(count, 1); the loss is divided by the samples of the step.  Per token
    (--calculate-per-token-loss; DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 12): 1; divided by its trained tokens.
    """
    if divides_by_tokens(options):
        return torch.ones(len(counts), device=counts.device)
    return 1 / counts.clamp(min=1).float()


def policy_token_weights(counts: Tensor, options: Options) -> Tensor | None:
    """The same [m] for the policy-gradient term alone; None where that counts as the others do.

    Per constant (--pg-loss-divisor N; Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, 3.2): 1 / N.
    --custom-pg-loss-reducer-function-path: function(counts, options) -> float [m].  HpcrlError if it returns another
    shape.
    """
    if path := options.custom_pg_loss_reducer_function_path:
        own = load_own("custom_pg_loss_reducer_function_path", path)
        weights = guarded(own, f"--custom-pg-loss-reducer-function-path {path}")(counts, options)
        if not isinstance(weights, Tensor) or weights.shape != counts.shape:
            raise HpcrlError(
                f"--custom-pg-loss-reducer-function-path {path} returns no tensor of {len(counts)} weights"
            )
        return weights
    if options.pg_loss_divisor is not None:
        return torch.full(counts.shape, 1 / options.pg_loss_divisor, device=counts.device)
    return None


def divides_by_tokens(options: Options) -> bool:
    """Whether the loss is divided by the step's trained tokens; else by its samples."""
    return options.calculate_per_token_loss

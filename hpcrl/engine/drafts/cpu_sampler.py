"""What vLLM's CPU build gets wrong when it checks drafts at a temperature: it divides the policy's logits by numbers
that no one has set.

Temperature, top-k and top-p of each request are repeated for its drafts; the CPU build's kernel for that writes into a
copy of the result, converted to integers, and the result stays what its memory held (vLLM 0.32, `_expand_kernel_impl`).
`repair` puts torch's own operations in its place.

Invariants: a build whose function is right, and every one for GPUs, is left as it is; nothing else of vLLM's check of
drafts is touched.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler


def repeated(
    values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Each request's value once for each of its drafts, [count], of the dtype of `values`.

    Args:
        values: [requests].
        ends: [requests], drafts of the requests up to and with each.
        replace_from, replace_to: a value, and what takes its place.
    """
    drafts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
    return torch.where(values == replace_from, replace_to, values).to(values.dtype).repeat_interleave(drafts)[:count]


def is_right() -> bool:
    """Whether the CPU build's kernel writes into what it is given, numbers that are none of integers too."""
    current_platform.import_kernels()
    found = torch.zeros(6)
    cpu_triton_utils._expand_kernel_impl(
        found, torch.tensor([0.5, 0.0, 2.25]), torch.tensor([2, 3, 6], dtype=torch.int32), 0, 1
    )
    return found.tolist() == [0.5, 0.5, 1.0, 2.25, 2.25, 2.25]


def repair() -> None:
    """Put ours in place of vLLM's in this process, where vLLM's is wrong; a second call does nothing."""
    if current_platform.is_cpu() and not HAS_TRITON and not is_right():
        rejection_sampler.expand_batch_to_tokens = repeated

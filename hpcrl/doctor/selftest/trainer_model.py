"""A trainer's model in one process, for the checks that look at its numbers.

Invariant: it is built, packed and run by the trainer's own code; only the loss is made up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.options import Options
from hpcrl.doctor.selftest.tiny_model import VOCABULARY
from hpcrl.run.gpu_environment import Where, missing, wanted

if TYPE_CHECKING:
    import torch

LENGTHS = (17, 40, 3, 64, 1, 5)
PAD = 8  #: rows of each sequence are a multiple


def alone_options(directory: Path, gpu: bool, **more: Any) -> Options:
    """Of one rank: bf16 on a GPU, float32 on a CPU."""
    return Options(hf_checkpoint=str(directory), actor_num_gpus_per_node=1, bf16=gpu, **more)


def sequences() -> list[torch.Tensor]:
    """Token ids without 0, the padding token, whose row of the embedding has no gradient in transformers."""
    import torch

    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def loss_weights() -> list[torch.Tensor]:
    """[n, vocabulary] of each sequence: what its logits count in the made-up loss, the sum of logits times these."""
    import torch

    generator = torch.Generator().manual_seed(6)
    return [torch.randn(n, VOCABULARY, generator=generator) for n in LENGTHS]


def load(options: Options, ranks: Any = None) -> Any:
    """The policy with the weights of --hf-checkpoint, in the environment of a run.

    Args:
        ranks: of groups that exist already; else this is the only rank.
    """
    os.environ.update(missing(wanted("trainer", Where(options)), os.environ))  # cuBLAS reads it when it is first used
    from torch.distributed import HashStore

    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import hf_weights, model

    policy = model.build(
        options, ranks or parallel_state.initialize(options, HashStore())
    )  # a rank alone: no peers to meet
    hf_weights.load_hf(policy, str(options.hf_checkpoint))
    return policy


def pack(parts: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Any]:
    """Rows of all sequences [1, t, ...], each padded with zeros to PAD, and their boundaries."""
    import torch

    from hpcrl.trainer.megatron.packed_attention import boundaries

    padded = [torch.cat([p, p.new_zeros(-len(p) % PAD, *p.shape[1:])]) for p in parts]
    ends = torch.tensor([0] + [len(p) for p in padded]).cumsum(0).int()
    packed = boundaries(ends.to(device), tuple(ends.tolist()), max(map(len, padded)))
    return torch.cat(padded)[None].to(device), packed


def rows_of(packed_rows: torch.Tensor) -> torch.Tensor:
    """[t, ...] of all sequences without their padding, from [padded t, ...]."""
    import torch

    kept, at = [], 0
    for length in LENGTHS:
        kept.append(packed_rows[at : at + length])
        at += -(-length // PAD) * PAD
    return torch.cat(kept)


def run(policy: Any, loss: Any, forward_only: bool) -> list[Any]:
    """Megatron's schedule over one micro-batch of all sequences; what `loss` returned."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ids, packed = pack(sequences(), policy.ranks.device)

    def forward(_: Any, model: Any) -> tuple[torch.Tensor, Any]:
        return model(ids, torch.zeros_like(ids), None, packed_seq_params=packed), loss

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([0]),
        model=policy.model,
        num_microbatches=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        seq_length=ids.shape[1],
        micro_batch_size=1,
    )


def logits(policy: Any) -> torch.Tensor:
    """[t, vocabulary] float32 on the CPU."""
    import torch

    with torch.no_grad():
        out = run(policy, lambda out, non_loss_data: out, True)
    return rows_of(out[0][0][:, :VOCABULARY].float().cpu())


def backward(policy: Any) -> dict[str, torch.Tensor]:
    """The made-up loss's gradient of each parameter, under Megatron's name, in float32."""
    import torch

    weights, _ = pack(loss_weights(), policy.ranks.device)

    def loss(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        return (out[..., :VOCABULARY].float() * weights).sum(), torch.tensor(1, dtype=torch.int, device=out.device), {}

    policy.model.zero_grad_buffer()
    run(policy, loss, False)
    return {name: parameter.main_grad.float().clone() for name, parameter in policy.module.named_parameters()}


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    """The same under Hugging Face's names, on the CPU; the policy's weights are gone afterwards."""
    from hpcrl.trainer.megatron.hf_weights import export

    found = backward(policy)
    for name, parameter in policy.module.named_parameters():
        parameter.data = found[name].to(parameter.dtype)
    return {name: tensor.float().cpu().clone() for name, tensor in export(policy)}

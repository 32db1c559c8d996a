"""Megatron's layer for a gated delta net, in the place of a transformer layer's attention (Qwen3-Next, Qwen3.5).

Megatron-core has one (`megatron/core/ssm`): up to 0.16 it refuses packed sequences, and both ask for the fla kernels.
This one cuts packed rows into sequences first, so that neither the state nor the convolution of one reaches the next,
and computes them with torch alone, which would keep some 400 kB of a token and layer of Qwen3-Next for the backward
pass: between the two linear layers all is computed again there.

Under context parallelism every rank computes whole sequences and keeps its own rows: a row needs the state of all that
came before it.

Invariants: the rows of `in_proj` and of the convolution are laid key head by key head, so that tensor-parallel ranks
cut them anywhere between two heads, and a checkpoint fits any number of ranks; the parameters' names are those of
Megatron's own layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch.utils.checkpoint import checkpoint

from hpcrl.models.shared.hybrid import CHUNK
from hpcrl.trainer.megatron import thd
from hpcrl.utils.device_copies import to_device


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """What the rule gives for each row, fp32 [n, heads, rows, value size].

    Args:
        query, key: [n, heads, rows, key size], of norm 1 where the model wants that, queries scaled.
        value: [n, heads, rows, value size].
        decay: g, the logarithm of what is left of the state [n, heads, rows].
        rate: b, how much of the value is written [n, heads, rows].
        chunk: rows that are solved together.
    """
    rows = query.size(2)
    chunk = min(chunk, rows)
    query, key, value = (_chunked(x.float(), chunk) for x in (query, key, value))
    decay, rate = (_chunked(x.float()[..., None], chunk) for x in (decay, rate))  # [n, heads, chunks, chunk, 1]
    total = decay.cumsum(3)  # since the start of the chunk, this row's own decay included
    between = total - total.transpose(3, 4)  # [.., i, j]: from row j to row i
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()  # before exp: what a later row would need overflows
    # row i writes b (v - what the state has at k by then), which rows j < i of the chunk have changed
    system = rate * (key @ key.transpose(3, 4)) * between
    wanted = torch.cat([rate * value, rate * total.exp() * key], dim=-1)
    written, carried = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).split(
        [value.size(-1), key.size(-1)], dim=-1
    )
    seen = (query @ key.transpose(3, 4)) * between
    query = query * total.exp()
    last = total[..., -1:, :]
    key = key * (last - total).exp()
    state = value.new_zeros(*value.shape[:2], key.size(-1), value.size(-1))
    out = []
    for i in range(query.size(2)):
        new = written[:, :, i] - carried[:, :, i] @ state
        out.append(query[:, :, i] @ state + seen[:, :, i] @ new)
        state = last[:, :, i].exp() * state + key[:, :, i].transpose(2, 3) @ new
    return torch.cat(out, dim=2)[:, :, :rows]


def _chunked(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[n, heads, rows, d] -> [n, heads, chunks, chunk, d], with zero rows behind."""
    x = F.pad(x, (0, 0, 0, -x.size(2) % chunk))
    return x.unflatten(2, (-1, chunk))


def causal_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each channel's weighted sum of a row and those before it in the sequence, [n, rows, channels].

    Args:
        x: [n, rows, channels].
        weight: [channels, 1, k]; the last counts the row itself.
    """
    columns = F.pad(x.transpose(1, 2), (weight.size(-1) - 1, 0))
    return F.conv1d(columns, weight, groups=x.size(-1)).transpose(1, 2)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of norm 1, fp32 (with 1e-6 below the root, as transformers and the fla kernels have it)."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


NORM = "self_attention.in_proj.layer_norm_"  #: the input norm of such a layer, in a checkpoint


def as_delta_net(layer: Any, plans: Callable[..., thd.AttentionPlan]) -> Any:
    """The spec of a transformer layer with a gated delta net in the place of its attention; `layer` stays as it is.

    Args:
        layer: a ModuleSpec of a TransformerLayer, whose linear layers (and with Transformer Engine their norm) are
            taken over.
    """
    layer = copy.copy(layer)
    layer.submodules = copy.copy(layer.submodules)
    linear = layer.submodules.self_attention.submodules
    layer.submodules.self_attention = ModuleSpec(
        module=PackedDeltaNet,
        params={"linear_in": linear.linear_qkv, "linear_out": linear.linear_proj, "plans": plans},
    )
    names = dict(layer.submodules.sharded_state_dict_keys_map)
    if "input_layernorm." in names:
        names["input_layernorm."] = NORM
    layer.submodules.sharded_state_dict_keys_map = names
    return layer


class PackedDeltaNet(MegatronModule):
    """A gated delta net over packed sequences.

    Attributes:
        in_proj: hidden -> for each key head: query, key, and of its value heads values, gates, rates and decays.
        conv1d: the causal convolution of queries, keys and values.
        A_log, dt_bias: of each value head, what makes a decay of its column.
        out_norm, out_proj: of what the rule gives.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        linear_in: Any,
        linear_out: Any,
        plans: Callable[..., thd.AttentionPlan],
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.layer_number = layer_number
        self.plans = plans
        tp = groups.tp.size()
        self.keys = config.linear_num_key_heads // tp
        self.values = config.linear_num_value_heads // tp
        self.key_size = config.linear_key_head_dim
        self.value_size = config.linear_value_head_dim
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": groups.tp}
        width = 2 * self.keys * self.key_size + 2 * self.values * (self.value_size + 1)
        self.in_proj = build_module(
            linear_in,
            config.hidden_size,
            width * tp,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        channels = 2 * self.keys * self.key_size + self.values * self.value_size
        self.conv1d = _Weight((channels, 1, config.linear_conv_kernel_dim), config, cut=True)
        self.dt_bias = _parameter((self.values,), config, cut=True)
        self.A_log = _parameter((self.values,), config, cut=True)
        self.out_norm = _Weight((self.value_size,), config, cut=False)
        self.out_proj = build_module(
            linear_out,
            self.values * self.value_size * tp,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden states [t, 1, hidden] (this rank's, under sequence and context parallelism) -> (the same, bias)."""
        assert packed_seq_params is not None, "sequences are always packed"
        rows = self._whole(self.in_proj(hidden_states)[0][:, 0], packed_seq_params.ends)
        width = max(self.keys * self.key_size, self.values * self.value_size)
        plan = self.plans(packed_seq_params.ends, width, device=rows.device)
        norm = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        compute = partial(thd.by_sequence, plan=plan, compute=partial(self._sequences, norm=norm))
        out = checkpoint(compute, rows, use_reentrant=False, preserve_rng_state=False)
        if self.cp_group.size() > 1:
            out = out.index_select(0, self._places(packed_seq_params.ends, out.device)[1])
        return self.out_proj(out[:, None])

    def _whole(self, rows: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
        """Rows of all context-parallel ranks, sequence by sequence: a state goes through the whole of one.

        Forward: everybody's rows; backward: their gradients, summed over the ranks.
        """
        if self.cp_group.size() == 1:
            return rows
        rows = tensor_parallel.gather_from_sequence_parallel_region(
            rows, tensor_parallel_output_grad=True, group=self.cp_group
        )
        return rows.index_select(0, self._places(ends, rows.device)[0])

    def _places(self, ends: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return _context_places(ends, self.cp_group.size(), self.cp_group.rank(), device)

    def _sequences(self, rows: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Of rows [n, longest, columns of in_proj], a sequence each: [n, longest, value heads * value size]."""
        each = self.values // self.keys
        sizes = [self.key_size, self.key_size, each * self.value_size]
        mixed, gate, rate, decay = rows.unflatten(-1, (self.keys, -1)).split(
            [sum(sizes), each * self.value_size, each, each], dim=-1
        )
        mixed = F.silu(causal_conv(mixed.flatten(2), self.conv1d.weight)).unflatten(-1, (self.keys, -1))
        query, key, value = (x.transpose(1, 2) for x in mixed.split(sizes, dim=-1))  # [n, key heads, longest, d]
        query, key = (unit(x).repeat_interleave(each, dim=1) for x in (query, key))
        value = value.unflatten(-1, (each, -1)).transpose(2, 3).flatten(1, 2)
        decay, rate = (x.flatten(2).transpose(1, 2) for x in (decay, rate))  # [n, value heads, longest]
        decay = -self.A_log.float().exp()[:, None] * F.softplus(decay.float() + self.dt_bias.float()[:, None])
        out = gated_delta_rule(query * self.key_size**-0.5, key, value, decay, rate.sigmoid())
        out = out.to(rows.dtype).transpose(1, 2)  # [n, longest, value heads, d]
        gate = gate.unflatten(-1, (each, -1)).flatten(2, 3)
        normed = F.rms_norm(out.float(), (self.value_size,), eps=self.config.layernorm_epsilon).to(rows.dtype)
        return (norm * normed * F.silu(gate.float())).to(rows.dtype).flatten(2)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """What a checkpoint holds of the layer: all that is cut is cut by rows, the output layer by columns."""
        own = {
            name: parameter
            for name, parameter in self.state_dict(prefix="", keep_vars=True).items()
            if not name.startswith(("in_proj.", "out_proj."))
        }
        cut = {name: 0 for name in own if name != "out_norm.weight"}
        group = tp_group or self.tp_group
        groups = {"tp_group": group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        found = make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets, **groups)
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        return found


@lru_cache(maxsize=4)
def _context_places(
    ends: tuple[int, ...], size: int, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(where each row is among those of all context-parallel ranks laid end to end, which rows this rank has)."""
    return (
        to_device(thd.natural_rows(ends, size), device),
        to_device(thd.cp_indices(ends, size, rank), device),
    )


class _Weight(torch.nn.Module):
    """Holds the parameter `weight`, for its name."""

    def __init__(self, shape: tuple[int, ...], config: TransformerConfig, cut: bool) -> None:
        super().__init__()
        self.weight = _parameter(shape, config, cut)


def _parameter(shape: tuple[int, ...], config: TransformerConfig, cut: bool) -> torch.nn.Parameter:
    """A parameter without values, which come from files.

    Args:
        cut: its rows are cut over tensor-parallel ranks: the gradient norm counts every rank's.
    """
    made = torch.nn.Parameter(torch.ones(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
    if cut:
        tensor_parallel.set_tensor_model_parallel_attributes(made, True, 0, 1)
    return made

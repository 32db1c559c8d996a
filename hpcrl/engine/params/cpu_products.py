"""What vLLM multiplies with next to a layer's matrix on CPUs: each adapter once, with all tokens that are under it.

vLLM's own for CPUs copies an adapter's matrices for every token before it multiplies, which takes as long as all else
of a small model.  GPUs have kernels, and keep them.

    replace_products(manager)     # vLLM's manager of adapters, once its layers are there

Invariants: the sums are those of vLLM's, in the same precision, in another order; those of a token do not depend on the
tokens that are computed with it, to the last bit (one product of all of them would: with their number another kernel
is taken); a token under no adapter gets nothing; no class of vLLM's is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

#: the tokens under a slot: all of them (None), or their places
Rows = torch.Tensor | None


class AdapterProducts(PunicaWrapperCPU):
    """Made in the place of another one, of which it has the state."""

    def __init__(self, other: PunicaWrapperCPU) -> None:
        self.__dict__ |= vars(other)
        self._under: list[tuple[int, Rows]] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Know which tokens of the next pass are under which slot."""
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        found = slots.unique().tolist()
        if len(found) == 1:
            self._under = [(found[0], None)] if found[0] >= 0 else []
        else:
            self._under = [(slot, (slots == slot).nonzero().flatten()) for slot in found if slot >= 0]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add scale x A^T B^T of its adapter to each token's row of `y`, slice by slice of a layer.

        Args:
            y: [tokens, columns of all slices], changed in place.
            x: [tokens, inputs].
            lora_a_stacked: of each slice [slots, 1, rank, inputs].
            lora_b_stacked: of each slice [slots, 1, columns, rank].
            output_slices: the columns of each.
            buffer: not used.
        """
        for slot, rows in self._under:
            inputs = (x if rows is None else x[rows]).float().unsqueeze(1)
            begin = 0
            for a, b, columns in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                inner = scale * _row_by_row(inputs, a[slot, 0].float())
                added = _row_by_row(inner.to(y.dtype), b[slot, 0].to(y.dtype)).squeeze(1)
                part = y[:, begin : begin + columns]
                if rows is None:
                    part += added[:, :columns]
                else:
                    part.index_add_(0, rows, added[:, :columns])
                begin += columns


def _row_by_row(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The product of each row with the same matrix.

    Args:
        rows: [tokens, 1, inputs].
        matrix: [outputs, inputs].

    Returns:
        [tokens, 1, outputs].
    """
    return torch.bmm(rows, matrix.T.unsqueeze(0).expand(len(rows), -1, -1))


def replace_products(manager: Any) -> None:
    """Have the layers of vLLM's LoRAModelManager multiply so, if they are on CPUs."""
    for name, given in manager.punica_wrapper_mapping.items():
        if type(given) is PunicaWrapperCPU:
            manager.punica_wrapper_mapping[name] = own = AdapterProducts(given)
            for layer in manager.modules.values():
                if getattr(layer, "punica_wrapper", None) is given:
                    layer.set_mapping(own)
    manager._last_mapping = None  # the next pass is told what it is

"""The user's functions that the trainer calls (--custom-megatron-...-path and others): when, and with which arguments.
Names and meanings are slime's.

Invariants: every rank calls each hook at the same place; whatever a hook raises becomes an error that names its option;
a loss mask may lose tokens and never gain one, and the loss is then that of the remaining tokens, in every layout, each
with the weight that it had before: 1 / (trained tokens of its response as they came), as in slime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.config.custom_functions import guarded, short
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import option_text
from hpcrl.engine.membership.broadcast import EngineBroadcast
from hpcrl.errors import HpcrlError
from hpcrl.trainer.megatron.model import Policy
from hpcrl.transport.share_format import Share

#: columns of a share's response tokens that slime has too
NAMES = ("log_probs", "ref_log_probs", "values")


class TrainerHooks:
    """The hooks of a run; one that is not given does nothing."""

    def __init__(self, options: Options, own: Mapping[str, list[Callable[..., Any]]]) -> None:
        """Create one.

        Args:
            own: of `plugin_points.load_points`.
        """
        self._options = options
        self._own = own

    def _call(self, name: str, *given: Any) -> Any:
        for function in self._own.get(name, ()):
            return guarded(function, f"{option_text(name)} {getattr(self._options, name)}")(*given)
        return None

    def initialized(self) -> None:
        """Megatron's groups exist, its model does not yet."""
        self._call("custom_megatron_init_path", self._options)

    def before_log_probs(self, policy: Policy, prefix: str) -> None:
        """A pass for log-probs begins.

        Args:
            prefix: "" for the policy's, "ref_" for the reference's.
        """
        self._call("custom_megatron_before_log_prob_hook_path", self._options, list(policy.chunks), prefix)

    def before_step(self, policy: Policy, rollout_id: int, step: int) -> None:
        """An optimizer step begins."""
        given = (self._options, rollout_id, step, list(policy.chunks), policy.optimizer, policy.scheduler)
        self._call("custom_megatron_before_train_step_hook_path", *given)

    @property
    def weights_written(self) -> Callable[[Path, EngineBroadcast], None] | None:
        """What is called on rank 0 once the files of a weight update are whole; None without a hook."""
        return self._written if "custom_update_weight_post_write_path" in self._own else None

    def _written(self, directory: Path, fleet: EngineBroadcast) -> None:
        engines = [f"http://{engine.address.host}:{engine.address.port}" for engine in fleet.engines]
        self._call("custom_update_weight_post_write_path", self._options, str(directory), engines)

    @property
    def edits_masks(self) -> bool:
        """Whether `edited` may change anything."""
        return "rollout_data_postprocess_path" in self._own

    def edited(self, share: Share, columns: Mapping[str, torch.Tensor], device: torch.device) -> Share:
        """The share with the loss masks that --rollout-data-postprocess-path leaves; collective over data-parallel
        ranks.

        Args:
            columns: of response tokens, by name.
            device: of the rank.

        Raises:
            HpcrlError: if a mask is malformed, or trains a token that was not trained on.
        """
        flag = f"--rollout-data-postprocess-path {self._options.rollout_data_postprocess_path}"
        data = _as_slime_has_it(share, columns)
        self._call("rollout_data_postprocess_path", self._options, share.rollout_id, data)
        lengths = share.batch.rows["response_length"].tolist()
        masks = data.get("loss_masks")
        if not isinstance(masks, list) or len(masks) != len(lengths):
            raise HpcrlError(f"{flag} left loss_masks {short(masks)}, a list of {len(lengths)} masks is expected")
        found = []
        for number, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
            array = np.asarray(torch.as_tensor(mask).cpu())
            if array.shape != (length,) or not np.isin(array, (0, 1)).all():
                raise HpcrlError(f"{flag} left a mask of sample {number} that is not {length} numbers, each 0 or 1")
            found.append(array.astype(np.uint8))
        mask = np.concatenate(found) if found else share.batch.loss_mask[:0]
        if (mask > share.batch.loss_mask).any():
            raise HpcrlError(f"{flag} trains on tokens that were masked", "loss masks may only lose tokens")
        batch = replace(share.batch, loss_mask=mask)
        bounds = batch.response_offsets
        of_sample = [int(mask[bounds[row] : bounds[row + 1]].sum()) for row in range(len(batch))]
        own = [sum(of_sample[row] for micro_batch in step for row in micro_batch) for step in share.micro_batches]
        tokens = torch.tensor(own, dtype=torch.int64, device=device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        return replace(share, batch=batch, step_tokens=tokens.tolist(), frames=())


def _as_slime_has_it(share: Share, columns: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """rollout_data: a list with an entry for each sample of this data-parallel rank, under each name."""
    batch = share.batch
    lengths = batch.rows["response_length"].tolist()
    parts = {"loss_masks": batch.loss_mask.astype(np.int64), "rollout_log_probs": batch.rollout_log_probs}
    data: dict[str, Any] = {name: list(torch.from_numpy(part.copy()).split(lengths)) for name, part in parts.items()}
    data |= {name: list(column.cpu().split(lengths)) for name, column in columns.items() if name in NAMES}
    return data | {
        "tokens": list(torch.from_numpy(batch.tokens.astype(np.int64)).split(batch.rows["length"].tolist())),
        "response_lengths": lengths,
        "total_lengths": batch.rows["length"].tolist(),
        "rewards": batch.rows["reward"].tolist(),
        "sample_indices": share.own.tolist(),
    }

"""The critic: a second model of the policy's architecture that says what a response is worth before each of its tokens.

It lies on the policy's ranks, in the policy's layout, with its own optimizer and learning rate, and in a folder of its
own in every checkpoint.  Invariant: it begins with the policy's weights and a head of 0, or with those of
--critic-load; after a resume it is what it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpcrl.config.options import Options
from hpcrl.trainer.checkpoint import save_load
from hpcrl.trainer.checkpoint.resume import find_weights, take
from hpcrl.trainer.checkpoint.save_load import Position
from hpcrl.trainer.megatron.host_weights import weights
from hpcrl.trainer.megatron.model import Policy, build
from hpcrl.trainer.parallel.parallel_state import Ranks

FOLDER = "critic"


class Critic:
    """The critic of a run; every method is collective.

    actor: the policy with the weights that it starts from.  resumed: the checkpoint that the run goes on from, or None.
    """

    def __init__(self, actor: Policy, ranks: Ranks, options: Options, resumed: Path | None) -> None:
        self.model = build(critic_options(options), ranks, value_head=True)
        if resumed is not None:
            save_load.load_state(self.model, ranks, resumed / FOLDER)
        elif options.critic_load is not None:
            take(self.model, ranks, find_weights(options.critic_load, "--critic-load", ranks))
        else:
            _begin_as(self.model, actor)

    def save(self, rollouts: int, directory: Path) -> None:
        """Write model, optimizer and schedule into a checkpoint's directory."""
        folder = directory / FOLDER
        save_load.make_directory(folder, self.model.ranks)
        save_load.write(save_load.everything(self.model, self.model.ranks, Position(rollouts)), folder)


def critic_options(options: Options) -> Options:
    """The options that a critic is built with: its own learning rate and warm-up, the policy's schedule after that."""
    lr = options.lr if options.critic_lr is None else options.critic_lr
    own: dict[str, Any] = {
        "lr": lr,
        "min_lr": min(options.min_lr, lr),
        "lr_warmup_iters": options.critic_lr_warmup_iters,
        "lr_warmup_fraction": None,
        "lr_warmup_init": 0.0,
    }
    return options.model_copy(update=own)


@torch.no_grad()
def _begin_as(critic: Policy, actor: Policy) -> None:
    """Take all weights of the policy but its output layer's."""
    found = weights(actor)
    for name, value in weights(critic).items():
        if ".output_layer." not in name:
            value.copy_(found[name])
    critic.optimizer.reload_model_params()

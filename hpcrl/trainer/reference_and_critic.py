"""The models in addition to the policy: reference, teacher and old actors, which are sets of its weights in host
memory, and the critic.

    DIR/iter_0000020/reference/     a torch_dist checkpoint of weights alone, in the dtype that the run keeps them in
    DIR/iter_0000020/critic/        the critic's weights, optimizer and schedule

The critic has the policy's architecture and layout on the policy's ranks, and its own optimizer and learning rate; it
estimates the value of a response before each of its tokens.

Invariants: a model that no option needs is not built; each is the same after a resume as without one, bit for bit: what
a checkpoint does not hold is loaded again from --ref-load or --opd-teacher-load, and where the policy has just taken
the weights of the same files, copied from it; a critic starts with the policy's
weights and a head of 0, or with those of --critic-load; further sets of weights are written before the checkpoint that
holds them gets its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.models.lora.settings import RECORD
from hpcrl.run.rundir import listed, write_atomic
from hpcrl.trainer.checkpoint import save_load
from hpcrl.trainer.checkpoint.resume import (
    WeightSource,
    fill_modules,
    find_reference,
    find_teacher,
    find_weights,
    load_weights,
)
from hpcrl.trainer.checkpoint.save_load import Position
from hpcrl.trainer.checkpoint.whole import open_stored
from hpcrl.trainer.collectives import agree, broadcast_json
from hpcrl.trainer.lora.layer import BaseAsReference
from hpcrl.trainer.lora.saved import adapter_record
from hpcrl.trainer.lora.values import init_adapter, without_values
from hpcrl.trainer.megatron.host_memory import HostWeights, weights
from hpcrl.trainer.megatron.model import Policy, build, know_length
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.trainer.step.prepare import OtherWeights

#: folders of a checkpoint: the critic's, the reference's, and the old actors' (the name ends with the policy version)
CRITIC = "critic"
REFERENCE = "reference"
OLD_ACTOR = "old_actor_"
#: sets of weights that --keep-old-actor keeps: those that the engines have, and those that sampled what is trained on
#: next
OLD_ACTORS = 2


def save_set(policy: Policy, values: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write a set of weights (names of `host_memory.weights`) into a new directory; collective."""
    save_load.make_directory(directory, policy.ranks)
    save_load.write(_request(policy, values), directory)


def load_set(policy: Policy, values: Mapping[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """The set of weights in `directory`, which is whole, cut as `values` are, which may be overwritten; collective.

    Raises:
        DataError: as `load_weights`.
    """
    stored = open_stored(directory, policy.ranks)
    state = save_load.read(_request(policy, values), stored, policy)
    return {name: state[model][key] for name, (model, key) in _places(policy, values).items()}


def _request(policy: Policy, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The policy's own weights in a checkpoint, with other numbers in them."""
    request = save_load.weights(policy)
    for name, (model, key) in _places(policy, values).items():
        if key not in request[model]:
            raise HpcrlError(f"a checkpoint of this model does not keep {key}, a reference or old actor needs it")
        part = request[model][key]
        typed = {"dtype": values[name].dtype} if hasattr(part, "dtype") else {}
        request[model][key] = replace(part, data=values[name], **typed)
    return request


def _places(policy: Policy, values: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    """Name of `host_memory.weights` -> (part of the checkpoint, key in it)."""
    many = len(policy.modules) > 1
    split = {name: name.split(".", 1) for name in values}
    return {name: (f"model{chunk if many else ''}", key) for name, (chunk, key) in split.items()}


class Critic:
    """The critic of a run; every method is collective.

    Attributes:
        actor: the policy with the weights that it starts from.
        resumed: the checkpoint that the run resumes from, or None.
        took: the weights that the actor has, if they are those of files.
    """

    def __init__(
        self, actor: Policy, ranks: Ranks, options: Options, resumed: Path | None, took: WeightSource | None = None
    ) -> None:
        self.model = build(critic_options(options), ranks, value_head=True)
        if actor.lora is not None:
            _share_base(self.model, actor)
            init_adapter(self.model, options.seed + 1)
        if resumed is not None:
            save_load.load_state(self.model, ranks, resumed / CRITIC)
        elif actor.lora is not None:
            pass  # the same weights, and an adapter of its own
        elif options.critic_load is not None:
            source = find_weights(options.critic_load, "--critic-load", ranks)
            if source.kind == "hf" and source.same_weights(took):  # no such files hold a head of values
                _begin_as(self.model, actor)
            else:
                load_weights(self.model, ranks, source, heads=False)  # a critic has none
        else:
            _begin_as(self.model, actor)

    def save(self, rollouts: int, directory: Path) -> None:
        """Write model, optimizer and schedule into a checkpoint's directory."""
        folder = directory / CRITIC
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
        "mtp_num_layers": None,
        "enable_mtp_training": False,
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


def _share_base(critic: Policy, actor: Policy) -> None:
    """Let the critic's frozen weights be the policy's, in the same memory."""
    critic.base.digest = actor.base.digest
    for own, other in zip(critic.modules, actor.modules, strict=True):
        found = dict(other.named_parameters())
        for name, parameter in own.named_parameters():
            if not parameter.requires_grad:
                parameter.data = found[name].data
        buffers = dict(other.named_buffers())
        for name, buffer in own.named_buffers():
            if name in buffers:
                buffer.data = buffers[name].data


class ReferenceAndCritic:
    """Reference, teacher, old actors and critic of a run; every method is collective.

    Attributes:
        resumed: the checkpoint that the run resumes from, or None.
        took: where the policy's weights are from, None if that is not known.
    """

    def __init__(
        self, policy: Policy, ranks: Ranks, options: Options, resumed: Path | None, took: WeightSource | None = None
    ) -> None:
        self._policy = policy
        self._took = took
        self._options = options
        self._old: dict[int, HostWeights] = {}
        self._critic = Critic(policy, ranks, options, resumed, took) if needs(options).critic else None
        self._reference = self._start_reference(ranks, resumed) if needs(options).reference else None
        self._teacher = None
        if needs(options).teacher_model:
            self._teacher = self._second(ranks, find_teacher(options, ranks))
        if options.keep_old_actor and resumed is not None:
            for name in _names(resumed):
                if name.startswith(OLD_ACTOR):
                    self._old[int(name.removeprefix(OLD_ACTOR))] = self._stored(resumed / name)

    @property
    def trained_too(self) -> tuple[Policy, ...]:
        """The models in addition to the policy that have an optimizer."""
        return (self._critic.model,) if self._critic is not None else ()

    def know_length(self, rollouts: int) -> None:
        """The run has so many rollouts (`optimizer.know_length`)."""
        if self._critic is not None:
            know_length(self._critic.model.scheduler, critic_options(self._options), rollouts)

    def of_share(self, sampled: int, version: int) -> OtherWeights:
        """The weights other than policy `version`'s that a share sampled under policy `sampled` is trained with.

        Raises:
            HpcrlError: if the weights that sampled it are gone.
        """
        critic = self._critic.model if self._critic is not None else None
        if not self._options.keep_old_actor or sampled == version:
            return OtherWeights(self._reference, None, self._teacher, critic)
        if sampled not in self._old:
            raise HpcrlError(
                f"a share was sampled under policy version {sampled}, the trainer is at {version}, and of older ones "
                f"it keeps {', '.join(map(str, sorted(self._old))) or 'none'}",
                "--keep-old-actor keeps the weights of the last two updates of the engines",
            )
        return OtherWeights(self._reference, self._old[sampled], self._teacher, critic)

    def published(self, version: int) -> None:
        """The engines have got the weights of policy `version`."""
        if not self._options.keep_old_actor or version in self._old:
            return
        older = sorted(self._old)
        if len(older) < OLD_ACTORS:
            self._old[version] = HostWeights(self._policy.trained)
        else:  # in the memory of the oldest
            self._old[version] = self._old.pop(older[0])
            self._old[version].follow()

    def trained(self, rollouts: int) -> None:
        """So many rollouts have been trained on: with --ref-update-interval the reference moves when it is due."""
        interval = self._options.ref_update_interval
        if isinstance(self._reference, HostWeights) and interval and rollouts % interval == 0:
            self._reference.follow()

    def save(self, at: Position, directory: Path) -> None:
        """Write what cannot be had again into a checkpoint."""
        if self._policy.lora is not None and self._policy.ranks.rank == 0:
            write_atomic(directory / RECORD, json.dumps(adapter_record(self._policy)).encode(), mode=0o644)
        if self._critic is not None:
            self._critic.save(at.rollout_id, directory)
        if isinstance(self._reference, HostWeights) and self._options.ref_update_interval:
            save_set(self._policy.trained, self._reference.values, directory / REFERENCE)
        for sampled, held in sorted(self._old.items()):
            if sampled != at.version:  # that one is the checkpoint itself
                save_set(self._policy.trained, held.values, directory / f"{OLD_ACTOR}{sampled}")

    def _start_reference(self, ranks: Ranks, resumed: Path | None) -> HostWeights | BaseAsReference:
        if resumed is not None and REFERENCE in _names(resumed):
            return self._stored(resumed / REFERENCE)
        if self._policy.lora is not None:
            own = self._options.ref_load is None or find_reference(self._options, ranks).same_weights(self._took)
            if self._options.ref_update_interval and not own:
                raise UsageError(
                    f"--ref-load {self._options.ref_load} is not what the adapter is trained over, and "
                    "--ref-update-interval makes the policy the reference",
                    "leave one of them out",
                )
            if self._options.ref_update_interval:
                fill = partial(without_values, self._policy)
                return HostWeights(self._policy.trained, fill)
            if own:
                return BaseAsReference(self._policy.modules)
        return self._second(ranks, find_reference(self._options, ranks))

    def _second(self, ranks: Ranks, source: WeightSource) -> HostWeights:
        """A set of the weights of files: a copy of the policy's, where it has just taken the same."""
        fill = None if source.same_weights(self._took) else partial(fill_modules, self._policy, ranks, source)
        return HostWeights(self._policy, fill)

    @torch.no_grad()
    def _stored(self, directory: Path) -> HostWeights:
        """A set of weights of a checkpoint."""
        kept = self._policy.trained
        found = HostWeights(kept)
        for name, value in load_set(kept, found.values, directory).items():
            found.values[name].copy_(value)
        return found


def _names(directory: Path) -> list[str]:
    """What is in a checkpoint, sorted, as rank 0 sees it; collective.  A rank that saw less would load alone, and wait
    for ever."""
    return broadcast_json(agree(lambda: sorted(listed(directory)), dist.get_rank() == 0))

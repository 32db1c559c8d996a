"""The models beside the policy: reference, teacher and the actors that sampled, sets of its weights in host memory; the
critic.

Invariants: a model that nothing needs is not there; each is the same after a resume as without one, bit for bit: what a
checkpoint does not hold is read again from where it came, --ref-load or --opd-teacher-load.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.errors import HpcrlError
from hpcrl.run.rundir import listed
from hpcrl.trainer.checkpoint.resume import load_reference, load_teacher
from hpcrl.trainer.checkpoint.weight_sets import load_set, save_set
from hpcrl.trainer.critic import Critic, critic_options
from hpcrl.trainer.megatron.host_weights import HostWeights
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.megatron.optimizer import know_length
from hpcrl.trainer.parallel.collectives import agree, broadcast_json
from hpcrl.trainer.parallel.parallel_state import Ranks
from hpcrl.trainer.step.prepare import OtherWeights

REFERENCE, OLD_ACTOR = "reference", "old_actor_"
#: sets of weights that --keep-old-actor keeps: those that the engines have, and those that sampled what is trained on
#: next
OLD_ACTORS = 2


class OtherModels:
    """Reference, teacher, old actors and critic of a run; every method is collective.

    resumed: the checkpoint that the run goes on from, or None.
    """

    def __init__(self, policy: Policy, ranks: Ranks, options: Options, resumed: Path | None) -> None:
        self._policy = policy
        self._options = options
        self._old: dict[int, HostWeights] = {}
        self._critic = Critic(policy, ranks, options, resumed) if needs(options).critic else None
        self._reference = self._start_reference(ranks, resumed) if needs(options).reference else None
        self._teacher = None
        if needs(options).teacher_model:
            self._teacher = HostWeights(policy, lambda: load_teacher(policy, ranks, options))
        if options.keep_old_actor and resumed is not None:
            for name in _names(resumed):
                if name.startswith(OLD_ACTOR):
                    self._old[int(name.removeprefix(OLD_ACTOR))] = self._stored(resumed / name)

    @property
    def trained_too(self) -> tuple[Policy, ...]:
        """The models beside the policy that have an optimizer."""
        return (self._critic.model,) if self._critic is not None else ()

    def know_length(self, rollouts: int) -> None:
        """The run has so many rollouts (`optimizer.know_length`)."""
        if self._critic is not None:
            know_length(self._critic.model.scheduler, critic_options(self._options), rollouts)

    def of_share(self, sampled: int, version: int) -> OtherWeights:
        """The weights beside those of policy `version` that a share sampled under policy `sampled` is trained with.

        HpcrlError if the weights that sampled it are gone.
        """
        critic = self._critic.model if self._critic is not None else None
        if not self._options.keep_old_actor or sampled == version:
            return OtherWeights(self._reference, None, self._teacher, critic)
        if sampled not in self._old:
            raise HpcrlError(
                f"a share was sampled under policy version {sampled}, the trainer is at {version}, and of older ones it keeps "
                f"{', '.join(map(str, sorted(self._old))) or 'none'}",
                "--keep-old-actor keeps the weights of the last two updates of the engines",
            )
        return OtherWeights(self._reference, self._old[sampled], self._teacher, critic)

    def published(self, version: int) -> None:
        """The engines have got the weights of policy `version`."""
        if not self._options.keep_old_actor or version in self._old:
            return
        older = sorted(self._old)
        if len(older) < OLD_ACTORS:
            self._old[version] = HostWeights(self._policy)
        else:  # in the memory of the oldest
            self._old[version] = self._old.pop(older[0])
            self._old[version].follow()

    def trained(self, rollouts: int) -> None:
        """So many rollouts have been trained on: with --ref-update-interval the reference moves when it is due."""
        interval = self._options.ref_update_interval
        if self._reference is not None and interval and rollouts % interval == 0:
            self._reference.follow(self._options.ref_update_weight)

    def save(self, rollouts: int, version: int, directory: Path) -> None:
        """Write what cannot be had again into a checkpoint of policy `version`, after so many rollouts."""
        if self._critic is not None:
            self._critic.save(rollouts, directory)
        if self._reference is not None and self._options.ref_update_interval:
            save_set(self._policy, self._reference.stored(), directory / REFERENCE)
        for sampled, held in sorted(self._old.items()):
            if sampled != version:  # that one is the checkpoint itself
                save_set(self._policy, held.stored(), directory / f"{OLD_ACTOR}{sampled}")

    def _start_reference(self, ranks: Ranks, resumed: Path | None) -> HostWeights:
        if resumed is not None and REFERENCE in _names(resumed):
            return self._stored(resumed / REFERENCE)
        return HostWeights(
            self._policy, lambda: load_reference(self._policy, ranks, self._options), average=self._moves_partly
        )

    def _stored(self, directory: Path) -> HostWeights:
        """A set of weights of a checkpoint."""
        found = HostWeights(self._policy, average=self._moves_partly and directory.name == REFERENCE)
        found.take(load_set(self._policy, found.stored(), directory))
        return found

    @property
    def _moves_partly(self) -> bool:
        return bool(self._options.ref_update_interval) and self._options.ref_update_weight < 1


def _names(directory: Path) -> list[str]:
    """What is in a checkpoint, sorted, as rank 0 sees it; collective.  A rank that saw less would load alone, and wait
    for ever."""
    return broadcast_json(agree(lambda: sorted(listed(directory)), dist.get_rank() == 0))

"""Reference, old actor and critic: they disturb nothing, move when they should, and go on after a resume as if there
had been none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model
from tests.trainer.step.test_invariance import LAYOUTS, PACKINGS, VOCAB, batch, options, shares, start

pytestmark = pytest.mark.process

ROLLOUTS, BEFORE = 5, 3  #: all, and those before the checkpoint
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "lr": 5e-3, **PACKINGS["64 tokens"]}
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "every second rollout": {"ref_update_interval": 2},
    "critic": {"advantage_estimator": "ppo", "lambd": 0.9, "critic_lr": 1e-2, "num_critic_only_steps": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), tied=True, vocab_size=VOCAB, seed=1)


# ---- on the ranks


def rollouts(policy: Any, others: Any, opts: Options, first: int, last: int) -> list[dict[str, float]]:
    """Metrics of training on the batch again and again, as rollouts [first, last)."""
    from hpcrl.trainer.step import train_batch

    mine = ShareExchange(policy.ranks).exchange(shares(opts)[policy.ranks.dp_rank])
    found = []
    for rollout in range(first, last):
        metrics = train_batch.train(policy, policy.ranks, opts, mine, others.of_share(rollout, rollout))
        others.trained(rollout + 1)
        found.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
    return found


def train_and_save(every: list[tuple[Options, Path]]) -> list[list[dict[str, float]]]:
    """Of each of the options, in one layout, all rollouts with a checkpoint between them."""
    from hpcrl.trainer.checkpoint.save_load import Position, save
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic

    ranks, found = None, []
    for opts, directory in every:
        policy = start(opts, ranks)
        ranks = policy.ranks
        others = ReferenceAndCritic(policy, ranks, opts, None)
        first = rollouts(policy, others, opts, 0, BEFORE)
        save(policy, ranks, directory, Position(BEFORE, BEFORE, {}), "run", others.save)
        found.append(first + rollouts(policy, others, opts, BEFORE, ROLLOUTS))
    return found


def go_on(every: list[tuple[Options, Path]]) -> list[list[dict[str, float]]]:
    """Of each checkpoint the rollouts after it, in one layout."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic

    ranks, found = None, []
    for opts, directory in every:
        policy = model.build(opts, ranks or parallel_state.initialize(opts))
        ranks, path = policy.ranks, save_load.latest(directory)
        save_load.load_checkpoint(policy, ranks, path, "run")
        found.append(rollouts(policy, ReferenceAndCritic(policy, ranks, opts, path), opts, BEFORE, ROLLOUTS))
    return found


def metrics_on_rank(every: list[Options]) -> list[list[dict[str, float]]]:
    """Metrics of three rollouts of each of the options."""
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic

    ranks, found = None, []
    for opts in every:
        policy = start(opts, ranks)
        ranks = policy.ranks
        found.append(rollouts(policy, ReferenceAndCritic(policy, ranks, opts, None), opts, 0, 3))
    return found


def old_actor_on_rank(
    opts: Options, directory: Path
) -> tuple[dict[str, float], dict[str, float], dict[str, float], str]:
    """Metrics of a rollout; of another that policy 0 sampled, trained on at version 1; the same resumed; and the
    error."""
    from hpcrl.errors import HpcrlError
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic
    from hpcrl.trainer.step import train_batch

    policy = start(opts)
    ranks, (mine,) = policy.ranks, shares(opts)
    others = ReferenceAndCritic(policy, ranks, opts, None)
    others.published(0)
    first = train_batch.train(policy, ranks, opts, mine, others.of_share(0, 0))
    others.published(1)
    save_load.save(policy, ranks, directory, save_load.Position(1, 1, {}), "run", others.save)
    late = train_batch.train(policy, ranks, opts, mine, others.of_share(0, 1))
    others.published(2)
    try:
        others.of_share(0, 2)
        error = "no error"
    except HpcrlError as found:
        error = str(found)
    again = model.build(opts, ranks)
    path = save_load.latest(directory)
    save_load.load_checkpoint(again, ranks, path, "run")
    resumed = train_batch.train(again, ranks, opts, mine, ReferenceAndCritic(again, ranks, opts, path).of_share(0, 1))
    return first, late, resumed, error


def peaks_on_rank(every: list[Options]) -> tuple[list[int], int]:
    """Most bytes alive at once while a rollout is trained on with each of the options, and bytes of the policy's
    weights."""
    from hpcrl.trainer.megatron import host_memory
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic
    from hpcrl.trainer.step import train_batch

    host_memory.PIECE = 2**16
    ranks, found = None, []
    for opts in every:
        policy = start(opts, ranks)
        ranks = policy.ranks
        others, (mine,) = ReferenceAndCritic(policy, ranks, opts, None).of_share(0, 0), shares(opts)
        train_batch.train(policy, ranks, opts, mine, others)  # the optimizer's state is made
        with LiveBytes() as live:
            train_batch.train(policy, ranks, opts, mine, others)
        found.append(live.peak)
    return found, sum(value.nbytes for value in host_memory.weights(policy).values())


def of_the_same_files(opts: Options, checkpoints: Path) -> tuple[list[bool], int]:
    """(whether reference, teacher and critic are, bit for bit, what they are when they are read; the tensors that were
    read for them where the policy had taken the same files)"""
    import torch

    from hpcrl.models.files.safetensors_files import SafetensorsDirectory
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint.resume import restore
    from hpcrl.trainer.megatron import host_memory, model
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic

    ranks = parallel_state.initialize(opts)
    policy = model.build(opts, ranks)
    source = restore(policy, ranks, opts, checkpoints, "run")[2]
    sets, reads = [], 0
    tensor = SafetensorsDirectory.tensor

    def counted(self: Any, name: str) -> Any:
        nonlocal reads
        reads += 1
        return tensor(self, name)

    SafetensorsDirectory.tensor = counted  # this process is of this test alone
    for took in (None, source):
        reads = 0
        others = ReferenceAndCritic(policy, ranks, opts, None, took).of_share(0, 0)
        critic = {name: value.clone() for name, value in host_memory.weights(others.critic).items()}
        sets.append((others.reference.values, others.teacher.values, critic))
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in zip(*sets, strict=True)]
    return same, reads


# ---- tests


def test_models_of_the_same_files_are_not_read_again(tmp_path: Path, model: Path) -> None:
    """Reference, teacher and critic whose weights are those that the policy has just taken are copies of them."""
    teacher = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(model)}
    critic = {"critic_load": f"{model}/", **KINDS["critic"]}
    opts = options(model, 2, ref_load=str(model), **KL, **teacher, **critic, **LAYOUTS["dp2"][1])
    for same, reads in run_ranks(2, of_the_same_files, opts, tmp_path / "none"):
        assert same == [True, True, True] and reads == 0


def test_resumed_models(tmp_path: Path, model: Path, other: Path) -> None:
    """Bit for bit in the same layout; to rounding in another."""
    every = {name: options(model, ref_load=str(other), **KL, **fields) for name, fields in KINDS.items()}
    places = {name: tmp_path / name.replace(" ", "-") for name in every}
    saved = run_ranks(1, train_and_save, [(every[name], places[name]) for name in every])[0]
    resumed = run_ranks(1, go_on, [(every[name], places[name]) for name in every])[0]
    for name, uncut, after in zip(every, saved, resumed, strict=True):
        assert after == uncut[BEFORE:], name
    assert [(path / "iter_0000003" / "reference").is_dir() for path in places.values()] == [False, True, False]
    kl = [[row["train/kl_loss"] for row in uncut] for uncut in saved[:2]]
    assert kl[0][:2] == kl[1][:2] and kl[0][2] != kl[1][2], "it moves after the second rollout, not before"
    assert kl[1][2] == 0.0, "then it is the policy"
    for layout in ("tp2 pp2", "dp2"):
        n, fields = LAYOUTS[layout]
        wide = [(options(model, n, ref_load=str(other), **KL, **fields, **KINDS[name]), places[name]) for name in every]
        for uncut, after in zip(saved, run_ranks(n, go_on, wide)[0], strict=True):
            for one, row in zip(uncut[BEFORE:], after, strict=True):
                for metric in (
                    "train/loss",
                    "train/kl_loss",
                    "train/grad_norm",
                    "train/critic-value_loss",
                    "train/critic-grad_norm",
                ):
                    assert metric not in one or row[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-7), (
                        layout,
                        metric,
                    )


@pytest.mark.parametrize("layout", ["one rank", "dp2 pp2"])
def test_measured_reference_changes_nothing(model: Path, other: Path, layout: str) -> None:
    """A reference that is only measured changes nothing."""
    n, fields = LAYOUTS.get(layout, (1, {}))
    common = {"lr": 5e-3, **PACKINGS["64 tokens"], **fields}
    alone = options(model, n, **common)
    measured = options(model, n, ref_load=str(other), use_kl_loss=True, ref_update_interval=2, **common)
    without, beside = run_ranks(n, metrics_on_rank, [alone, measured])[0]
    for one, row in zip(without, beside, strict=True):
        assert {name: row[name] for name in one} == one
        assert set(row) - set(one) == {"train/kl_loss", "rollout/ref_log_probs"}
    assert abs(beside[0]["train/kl_loss"]) > 1e-3


def test_no_second_copy_on_the_device(model: Path, other: Path) -> None:
    """Nor is a teacher of whole distributions, but for its output layer."""
    common = {"log_probs_chunk_size": 16, **PACKINGS["64 tokens"]}
    teacher = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(other)}
    every = [
        options(model, **common),
        options(model, use_kl_loss=True, kl_loss_coef=0.1, ref_load=str(other), **common),
        options(model, **teacher, **common),
        options(model, opd_kl_type="forward", **teacher, **common),
    ]
    (alone, *beside), whole = run_ranks(1, peaks_on_rank, every)[0]
    layer = 4 * VOCAB * 64  # the output layer, which is the embedding
    assert whole > 8 * layer
    states = 4 * 64 * int(batch().loss_mask.sum())  # in host memory, which here is the device's
    for name, peak, room in zip(("reference", "teacher", "forward"), beside, (0, 0, layer + states), strict=True):
        assert peak - alone <= room + 0.1 * whole, name


def test_old_actor_is_the_sampling_policy(tmp_path: Path, model: Path) -> None:
    """An old actor computes what the weights that sampled would."""
    opts = options(model, keep_old_actor=True, lr=5e-3, **PACKINGS["64 tokens"])
    first, late, resumed, error = run_ranks(1, old_actor_on_rank, opts, tmp_path)[0]
    difference = "train/train_rollout_logprob_abs_diff"
    assert late[difference] == first[difference], "of the weights that sampled"
    assert abs(late["train/ppo_kl"]) > 1e-3 and first["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    names = [name for name in late if not name.startswith("perf/")]
    assert [resumed[name] for name in names] == [late[name] for name in names]
    assert "sampled under policy version 0, the trainer is at 2" in error and "older ones it keeps 1, 2" in error

"""A rank's state leaves its device and comes back: the same numbers afterwards, and not a byte of it there in
between."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support.families import make
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model
from tests.trainer.step.test_invariance import VOCAB, options, shares, start
from tests.trainer.test_critic import PPO

pytestmark = pytest.mark.process

TIMES = 3
PLAIN = {"megatron": {"use_distributed_optimizer": False}}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=VOCAB)


def bytes_away(state: Any) -> int:
    """Bytes of device memory that `state` has given up."""
    return sum(parked.size for parked in state._parked.values() if not parked.memory.nbytes())


def train_on_rank(every: list[Options]) -> list[dict[str, Any]]:
    """Each of the options twice, from the same weights: as they are, and away from the device between any two steps."""
    found, ranks = [], None
    for opts in every:
        kept, ranks = trained(opts, ranks, turns=False)
        moved, ranks = trained(opts, ranks, turns=True)
        found.append({"kept": kept, "moved": moved})
    return found


def trained(opts: Options, ranks: Any, turns: bool) -> tuple[dict[str, Any], Any]:
    from hpcrl.trainer.megatron.host_memory import DeviceState
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic
    from hpcrl.trainer.step import train_batch

    torch.manual_seed(0)
    policy = start(opts, ranks)
    models = ReferenceAndCritic(policy, policy.ranks, opts, None)
    mine = ShareExchange(policy.ranks).exchange(shares(opts)[policy.ranks.dp_rank])
    state = DeviceState([policy, *models.trained_too])
    metrics = []
    sizes = []
    for rollout in range(TIMES):
        mine.rollout_id = rollout
        metrics.append(train_batch.train(policy, policy.ranks, opts, mine, models.of_share(0, 0)))
        sent = exported(policy)
        if turns:
            there = on_device([policy, *models.trained_too])
            state.put_away_rest()
            assert same(sent, exported(policy))
            weights_alone = on_device([policy, *models.trained_too])
            state.put_away_weights()
            sizes.append((there, weights_alone, on_device([policy, *models.trained_too]), bytes_away(state)))
            state.put_away_weights()  # a second time does nothing
            state.come_back()
            assert bytes_away(state) == 0 and on_device([policy, *models.trained_too]) == sizes[-1][0]
    numbers = {name: value for row in metrics for name, value in row.items() if not name.startswith("perf/")}
    return {"metrics": numbers, "state": state_of([policy, *models.trained_too]), "sizes": sizes}, policy.ranks


def exported(policy: Any) -> dict[str, torch.Tensor]:
    """What the engines would get; nothing but on rank 0, though all take part."""
    from hpcrl.trainer.megatron.hf_weights import export

    found = {name: tensor.clone() for name, tensor in export(policy)}
    return found if policy.ranks.rank == 0 else {}


def state_of(policies: list[Any]) -> dict[str, torch.Tensor]:
    """Weights and optimizer states of this rank."""
    from hpcrl.trainer.megatron.host_memory import weights

    found = {}
    for number, policy in enumerate(policies):
        found |= {f"{number}/{name}": value.clone() for name, value in weights(policy).items()}
        leaves = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
        states = [state for leaf in leaves for state in leaf.optimizer.state.values()]
        for at, state in enumerate(states):
            found |= {f"{number}/{at}/{name}": value.clone() for name, value in state.items() if torch.is_tensor(value)}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def on_device(policies: list[Any]) -> int:
    """Bytes of all memory that the collector finds under a tensor of these models' sizes: not what the code under test
    looks at."""
    known = set()
    for policy in policies:
        for chunk in policy.chunks:
            known |= {id(buffer.grad_data) for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)}
        for leaf in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
            known |= {
                id(value)
                for state in leaf.optimizer.state.values()
                for value in state.values()
                if torch.is_tensor(value)
            }
            known |= {id(value) for group in leaf.optimizer.param_groups for value in group["params"]}
        known |= {id(value) for module in policy.modules for value in (*module.parameters(), *module.buffers())}
    alive = [found for found in gc.get_objects() if id(found) in known and isinstance(found, torch.Tensor)]
    assert len(alive) > 10
    return sum({memory._cdata: memory.nbytes() for memory in (found.untyped_storage() for found in alive)}.values())


def check(found: list[dict[str, Any]]) -> None:
    for case in found:
        kept, moved = case["kept"], case["moved"]
        assert kept["metrics"] == moved["metrics"] and kept["metrics"]
        assert len(kept["state"]) > 10 and same(kept["state"], moved["state"])
        assert len(moved["sizes"]) == TIMES
        for there, weights_alone, nothing, away in moved["sizes"]:
            assert there > 2 * weights_alone > 0 == nothing
            assert away >= there


def test_training_goes_on_bit_for_bit_over_two_ranks(dense: Path) -> None:
    """With and without the distributed optimizer, in bf16 and fp32, with a critic."""
    common = {"deterministic_mode": True}
    every = [
        options(dense, 2, **common).model_copy(update={"bf16": True}),
        options(dense, 2, **common, **PLAIN).model_copy(update={"bf16": True}),
        options(dense, 2, **common),
        options(dense, 2, **common, **PPO),
    ]
    for rank in run_ranks(2, train_on_rank, every, timeout=240):
        check(rank)


def test_experts_and_tensor_parallel_ranks_too(tmp_path: Path) -> None:
    opts = options(
        make(tmp_path, "glm4_moe", vocab_size=VOCAB),
        2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    for rank in run_ranks(2, train_on_rank, [opts], timeout=240):
        check(rank)

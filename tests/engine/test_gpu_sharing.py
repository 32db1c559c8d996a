"""A real engine that takes turns: what it refuses while the trainer holds the GPUs, and the bytes that it gives
back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpcrl.engine.membership.http import TURN, HttpError, request_json
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.run.rundir import RunDir
from hpcrl.weights.colocation import ENGINES_UP, Event, HandOver, OutOfTurn
from tests.support.engines import CLOSE, Engines, Side, generate
from tests.support.tiny import make_model

MIB = 2**20
#: weights of some 60 MB in fp32, 16 KiB of KV cache a token
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8} | {
    "num_key_value_heads": 8,
    "head_dim": 64,
}
PROMPTS, LENGTH = 8, 900
CACHE = PROMPTS * LENGTH * 16 * 1024  #: bytes of the KV cache that they touch


class Pair(Side):
    """An engine that takes turns, and the trainer's part of the hand-over."""

    def __init__(self, engines: Engines, model: Path) -> None:
        super().__init__(engines, model)
        self.mine, self.fleet = HandOver("the trainer", ENGINES_UP), self.sender.fleet

    def tell(self, *events: Event) -> int:
        """All of them to trainer and engine; bytes that the last gave back."""
        for event in events:
            self.mine.tell(event)
            [answer] = self.fleet.post(event, TURN, {"event": event})
        return answer["bytes"]

    def give_back(self) -> None:
        """From the trainer's turn to the engine's, with changed weights."""
        self.tell(Event.SHRINK, Event.WAKE_WEIGHTS)
        self.step()
        self.tell(Event.UPDATED, Event.LEAVE, Event.WAKE)

    def refused(self, path: str, body: object = None) -> str:
        with pytest.raises(HttpError) as caught:
            request_json(self.engines.address(), "POST", path, 20, body)
        assert caught.value.status == 409, caught.value
        return str(caught.value)

    def resident(self) -> int:
        """Bytes of the engine core that are its own and in memory."""
        return self.engines.core().memory_full_info().uss

    def fill_the_cache(self) -> None:
        for number in range(PROMPTS):
            generate(self.engines.address(), [20 + (i * (7 + number)) % 90 for i in range(LENGTH)], 8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("turns")
    model = make_model(root / "model", tied=False, **LARGE)
    engines = Engines(
        root / "run", model, colocate=True, check_weight_update_equal=True, vllm={"enable_prefix_caching": True}
    )
    found = Pair(engines, model)
    yield found
    found.close()
    engines.stop()


@pytest.mark.vllm
def test_an_engine_answers_nothing_out_of_turn(pair: Pair) -> None:
    """From its start to its first turn: it came up asleep, and the trainer takes the GPUs."""
    request = {"token_ids": [20, 21], "sampling_params": {"max_tokens": 2}}
    assert "engines are asleep" in pair.refused("/inference/v1/generate", request)
    for event in (Event.WAKE, Event.WAKE_WEIGHTS, Event.SLEEP, Event.UP):
        assert f"{event} is out of turn" in pair.refused(TURN, {"event": event})
    pair.tell(Event.TAKE)
    said = pair.refused("/inference/v1/generate", request)
    assert "state on the GPUs" in said
    for path in ("/hpcrl/generate", "/v1/completions", "/wake_up", "/sleep?level=1", "/resume", "/start_weight_update"):
        pair.refused(path, {})
    assert "wake-weights is out" in pair.refused(TURN, {"event": "wake-weights"})
    with pytest.raises(HttpError, match="400"):
        request_json(pair.engines.address(), "POST", TURN, 20, {"event": "send"})
    pair.give_back()
    assert pair.distance() <= CLOSE
    assert "out of turn" in pair.refused(TURN, {"event": "take"})


@pytest.mark.vllm
def test_a_sleeping_engine_gives_its_memory_back(pair: Pair) -> None:
    """In its own turn: two rounds, with the weights of each update, and nothing of them in between."""
    weights = sum(tensor.nbytes for _, tensor in pair.reference.pairs())
    assert weights > 50 * MIB
    asleep = []
    for _ in range(2):
        pair.fill_the_cache()
        awake = pair.resident()
        told = pair.tell(Event.SLEEP)
        asleep.append(pair.resident())
        # the weights, of which vLLM's CPU build keeps its packed copies alone, and the pages of the cache that requests
        # have touched
        assert awake - asleep[-1] >= 0.9 * (weights + CACHE), (awake / MIB, asleep[-1] / MIB, weights / MIB)
        assert told == pytest.approx(awake - asleep[-1], rel=0.1)
        pair.tell(Event.TAKE)
        pair.give_back()
        assert pair.distance() <= CLOSE
    assert abs(asleep[1] - asleep[0]) <= 0.2 * weights, [size / MIB for size in asleep]


def test_the_rollout_process_sends_nothing_out_of_turn(tmp_path: Path) -> None:
    from hpcrl.config.options import Options
    from hpcrl.plan import local_hosts, make_plan

    options = Options(hf_checkpoint="m", actor_num_gpus_per_node=1, colocate=True)
    pool = EnginePool(RunDir(tmp_path), make_plan(options, local_hosts(options), "run"), options)
    with pytest.raises(OutOfTurn, match="state on the GPUs,"):
        pool.assign_engine("a prompt")


def test_vllm_keeps_its_map_of_spread_experts() -> None:
    """Asleep at level 2 it keeps the model's buffers and drops the rest: so its map of the experts is to be one, and its
    layers hold the same tensor."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.ep_size, parallel.ep_rank, parallel.use_ep = 4, 1, True
    places = ExpertMapManager(16, 2, 8, 0, None, parallel, "linear", enable_eplb=False)
    layer = torch.nn.Module()
    layer.expert_map_manager = places
    RoutedExperts.update_expert_map_info(layer)
    kept = dict(layer.named_buffers())["_expert_map"]
    assert kept is places.expert_map and kept.tolist() == [-1, -1, 0, 1, -1, -1, -1, -1]

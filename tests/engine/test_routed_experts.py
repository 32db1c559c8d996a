"""The experts that an engine chose, from its routers to the trainer's: a mixture of experts whose scores are nearly
equal.

Both sides compute in bf16, with other kernels: without replay they choose otherwise, and their log-probs differ far
more than those of a dense model.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.config.options import Options
from hpcrl.models.files.config_json import read_config
from hpcrl.models.routing import Routing, find_routing
from hpcrl.rollout.engines.completion import Completion, Sampling, seed_of
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.custom import CustomSampler
from hpcrl.rollout.samplers.sampler import ResponseRequest
from hpcrl.sample import Sample
from hpcrl.transport.share_format import SampleBatch
from hpcrl.utils.sample_parts import COMPLETED
from tests.engine.test_sampling_route import run
from tests.support.engines import Trainer
from tests.support.forked_engines import Nursery
from tests.support.ranks import run_ranks
from tests.support.tiny import make_family
from tests.trainer.step import test_invariance as whole

pytestmark = pytest.mark.vllm
PROMPTS = [np.arange(20, 20 + n, dtype=np.int32) for n in (24, 9, 1, 40)]
EACH, TOKENS = 3, 32
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def near_ties(directory: Path) -> Path:
    """Three layers, one dense; every expert has a twin of nearly the same score, and one of the three that are chosen
    has not his."""
    make_family(directory, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], num_experts=16, num_experts_per_tok=3)
    tensors = load_file(directory / "model.safetensors")
    for name, gate in tensors.items():
        if name.endswith("mlp.gate.weight"):
            gate[1::2] = gate[::2] * (
                1 + 5e-3 * torch.randn(gate[::2].shape, generator=torch.Generator().manual_seed(1))
            )
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def sampled(
    nursery: Nursery, root: Path, model: Path, turns: bool = False, **values: Any
) -> tuple[Options, Routing | None, list[list[Completion]], list[Sample]]:
    """(options, routing, responses to each of PROMPTS, each continued once from its first half; samples of two turns,
    which a custom function makes)."""
    engines = nursery.engines(root, model, bf16=True, vllm={}, **values)
    opts = engines.options
    routing = find_routing(opts, read_config(model)) if opts.use_rollout_routing_replay else None
    how = Sampling(temperature=1.0, max_tokens=TOKENS, stop=(), stop_token_ids=(), routing=routing)

    async def job(generator: Any, _: Any) -> tuple[list[list[Completion]], list[Sample]]:
        async def one(tokens: np.ndarray, seed: int) -> Completion:
            half = await generator.complete(tokens, replace(how, max_tokens=TOKENS // 2), seed_of(seed), 0)
            return await generator.complete(tokens, how, seed_of(seed), 0, begun=half)

        found = [list(await asyncio.gather(*(one(tokens, i) for i in range(EACH)))) for tokens in PROMPTS]
        return found, await two_turns(opts, generator) if turns else []

    trainer = Trainer(engines, opts)
    tensors = load_file(model / "model.safetensors").items()
    trainer.push([(name, tensor.bfloat16()) for name, tensor in tensors], 0)
    found, samples = run(engines, job)
    trainer.close()
    assert engines.stop() == [0]
    return opts, routing, found, samples


async def two_turns(options: Options, generator: Any) -> list[Sample]:
    """What the custom function of two turns makes of PROMPTS, with what a tool says between them."""
    path = "tests.support.own_generates.long_turns"
    more = {"custom_generate_function_path": path, "rollout_max_response_len": 4 * TOKENS, "apply_chat_template": True}
    assert options.hf_checkpoint is not None
    custom = CustomSampler(options.model_copy(update=more), Tokenizer(options.hf_checkpoint), None)
    custom.use(generator, lambda: 2048)
    try:
        await custom.start()
        groups = [Group(number, Prompt("1+1=", tokens, "")) for number, tokens in enumerate(PROMPTS)]
        asked = [ResponseRequest(group, index, 0, 0) for group in groups for index in range(EACH)]
        return [sample for samples in await asyncio.gather(*map(custom.make, asked)) for sample in samples]
    finally:
        await custom.close()


def batch_of(found: list[list[Completion]]) -> SampleBatch:
    prompts = [Prompt(raw="", tokens=tokens, label=None, metadata={}) for tokens in PROMPTS]
    samples = [
        completion.sample(group, index, prompt, "")
        for group, (prompt, completions) in enumerate(zip(prompts, found, strict=True))
        for index, completion in enumerate(completions)
    ]
    for sample in samples:
        sample.reward = float(sample.response_index)
        sample.status = COMPLETED
    return SampleBatch.from_samples(samples)


def agreement_on_rank(opts: Options, data: SampleBatch, routing: Routing) -> dict[str, float]:
    """The share of (token, layer) for which the trainer's routers take the engine's experts, by how they choose."""
    from hpcrl.trainer.step import packing, passes

    policy, found = whole.start(opts), {}
    experts = routing.read(data.extra["rollout_routed_experts"])
    alone = [packing.pack(data, [i], policy.ranks, False, experts) for i in range(len(data))]
    taken: list[list[torch.Tensor]] = []
    layers = [layer.mlp.router for layer in policy.module.decoder.layers if hasattr(layer.mlp, "router")]
    for place, router in enumerate(layers):
        taken.append([])
        router.register_forward_hook(lambda _, args, output, place=place: taken[place].append(output[1].clone()))
    for how in ("own", "replay"):
        for place in taken:
            place.clear()
        passes.logprobs(policy, opts, alone, how)
        same = [
            taken[place][i][:-1].gather(1, torch.from_numpy(one[:-1, place].astype(np.int64))).all(1)
            for i, one in enumerate(np.split(experts, data.token_offsets[1:-1]))
            for place in range(len(layers))
        ]
        found[how] = float(torch.cat(same).double().mean())
    return found


def test_the_trainer_takes_the_engines_experts(nursery: Nursery, tmp_path: Path) -> None:
    model = near_ties(tmp_path / "moe")
    opts, routing, found, turns = sampled(nursery, tmp_path / "run", model, turns=True, use_rollout_routing_replay=True)
    assert routing is not None and routing.layers == (0, 2)
    for tokens, completions in zip(PROMPTS, found, strict=True):
        for one in completions:
            assert one.experts is not None and one.experts.shape == (len(tokens) + TOKENS - 1, 2, 3)
            assert (one.experts[..., 0] != one.experts[..., 1]).all()
    data = batch_of(found)

    agreement = run_ranks(1, agreement_on_rank, opts, data, routing)[0]
    assert agreement["own"] < 0.97
    assert agreement["replay"] == 1.0

    assert all(sorted(set(one.array("loss_mask").tolist())) == [0, 1] and not one.grading for one in turns)
    several = SampleBatch.from_samples(turns)
    of_turns = run_ranks(1, agreement_on_rank, opts, several, routing)[0]
    assert of_turns["own"] < 0.97 and of_turns["replay"] == 1.0

    common = {"max_logprob_diff": 100.0, "bf16": True, "use_rollout_routing_replay": True}
    with_replay = opts.model_copy(update=common)
    without = opts.model_copy(update=common | {"use_rollout_routing_replay": False})
    replayed, plain = run_ranks(1, whole.train_on_rank, [with_replay, without], data)[0]
    told, untold = run_ranks(1, whole.train_on_rank, [with_replay, without], several)[0]
    late = replace(data, extra={"rollout_routed_experts": np.roll(data.extra["rollout_routed_experts"], 1, 0)})
    shifted = run_ranks(1, whole.train_on_rank, [with_replay], late)[0][0]

    dense = make_family(tmp_path / "dense", "qwen3", num_hidden_layers=3)
    dense_opts, _, dense_found, _ = sampled(nursery, tmp_path / "dense_run", dense)
    of_dense = run_ranks(
        1, whole.train_on_rank, [dense_opts.model_copy(update={"max_logprob_diff": 100.0})], batch_of(dense_found)
    )
    bound = of_dense[0][0][DIFFERENCE]
    print({"agreement": agreement, "replayed": replayed[DIFFERENCE], "plain": plain[DIFFERENCE], "one off": shifted[DIFFERENCE],
           "two turns": (told[DIFFERENCE], untold[DIFFERENCE], of_turns),
           "dense": bound, "changed": replayed["train/routing_changed"]})  # fmt: skip
    assert replayed[DIFFERENCE] < 1.5 * bound
    assert plain[DIFFERENCE] > 1.4 * replayed[DIFFERENCE]
    assert shifted[DIFFERENCE] > 2 * replayed[DIFFERENCE]
    assert told[DIFFERENCE] < 1.5 * bound and untold[DIFFERENCE] > 1.4 * told[DIFFERENCE]
    assert replayed["train/routing_changed"] == pytest.approx(1 - agreement["own"], abs=0.02)

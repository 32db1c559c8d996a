"""The examples of docs/customise.md: every plugin point has a row and a function there, which loads and does what the
page says."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms.interface import RolloutBatch, TokenBatch
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import POINTS, load_own, load_points, option_text
from hpcrl.errors import UsageError
from hpcrl.rollout.samplers.trajectory import Turn
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import TRUNCATED
from tests.documents.texts import python_files
from tests.support.asked_endpoint import AskedEndpoint, asked, form_model, spoken
from tests.support.asked_samples import args_of, asked_sample
from tests.support.shares import plain_sample

PAGE = Path(__file__).parents[2] / "docs" / "customise.md"


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every block of the page as the file that its first line names."""
    folder = tmp_path_factory.mktemp("customise")
    for name, text in python_files("customise"):
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def sample(response: str = "abc", index: int = 0, reward: float = 0.0) -> Sample:
    more = {"reward": reward, "prompt": "1+1=", "response": response, "label": "2"}
    return plain_sample(2, len(response), response_index=index, **more)


OPTIONS = Options(rollout_max_response_len=4)
BATCH = RolloutBatch(
    reward=torch.tensor([1.0, 3.0], dtype=torch.float64),
    group=torch.tensor([0, 0]),
    length=torch.tensor([1, 2]),
    truncated=torch.tensor([False, False]),
    own=torch.tensor([0, 1]),
    mask=torch.ones(3, dtype=torch.bool),
)
TOKENS = TokenBatch(
    logprobs=torch.tensor([-1.0, -2.0]),
    entropy=torch.ones(2),
    sample=torch.tensor([0, 0]),
    samples=1,
    weights=torch.tensor([0.5, 0.5]),
    old=torch.tensor([-1.0, -2.0]),
    trainer=torch.tensor([-1.0, -2.0]),
    rollout=torch.tensor([-1.0, -4.0]),
    advantages=torch.tensor([1.0, -1.0]),
)


class Speaker:
    """In the place of the tokenizer and the engine of a custom function: says token 7, then 8, and so on."""

    eos_ids, said = frozenset((1,)), 6

    async def generate(self, tokens: Any, params: dict[str, Any]) -> Turn:
        self.said += 1
        ids = np.asarray([self.said, 1], np.int32)
        return Turn(ids, np.full(2, -0.5, np.float32), np.zeros(2, np.int32), "stop", str(self.said))

    def render(self, messages: list[dict[str, Any]], generation: bool, tools: Any = None) -> str:
        return "".join(f"{m['content']}|" for m in messages)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.asarray([1, *(50 + len(word) for word in text.strip("|").split("|"))], np.int32) for text in texts]

    def decode(self, tokens: Any) -> str:
        return "-".join(map(str, tokens.tolist()))


def makes(function: Callable[..., Any], path: str) -> bool:
    """All of the page's functions of this kind: what they make of a prompt of two tokens."""
    speaker = Speaker()
    asked = asked_sample("1+1=")
    args = args_of(OPTIONS, speaker, "1+1=", version=4)
    params = {"max_new_tokens": 16}
    found = asyncio.run(function(args, asked, params))
    module = importlib.import_module(path)
    both = asyncio.run(module.best_of_two(args, asked, params))
    alone = asyncio.run(module.by_hand(args, asked, params))
    return (
        found.tokens == [2, 3, 7, 1, 63, 8, 1]
        and found.loss_mask == [1, 1, 0, 1, 1]
        and [one.response for one in both] == ["9-1", "10-1"]
        and alone.tokens == [2, 3, 11, 1]
    )


#: option -> (the page's function, a call of it that returns whether it did what the page says)
CALLS: dict[str, tuple[str, Callable[[Callable[..., Any]], bool]]] = {
    "custom_rm_path": ("examples_of_rewards.brief", lambda f: f(OPTIONS, sample("abc")) == 0.25),
    "custom_generate_function_path": (
        "examples_of_generating.asked_again",
        lambda f: makes(f, "examples_of_generating"),
    ),
    "rm_type": ("examples_of_rewards.brief", lambda f: f(OPTIONS, sample("")) == 1),
    "dynamic_sampling_filter_path": (
        "examples_of_filters.not_too_easy",
        lambda f: (
            f(OPTIONS, [sample(reward=1.0), sample(reward=0.0)]).keep and f(OPTIONS, [sample()]).reason == "none_solved"
        ),
    ),
    "buffer_filter_path": (
        "examples_of_filters.longest_first",
        lambda f: f(OPTIONS, 0, [[sample("a")], [sample("abc")], [sample("ab")]], 1)[0][0].response == "abc",
    ),
    "advantage_estimator": ("examples_of_algorithms.raw", lambda f: f(BATCH, OPTIONS).advantages.tolist() == [1, 3, 3]),
    "pg_loss_type": ("examples_of_algorithms.score", lambda f: f(TOKENS, OPTIONS).loss.tolist() == [1, -2]),
    "custom_tis_function_path": (
        "examples_of_algorithms.half",
        lambda f: f(TOKENS, OPTIONS).weights.tolist() == [1, 0.5],
    ),
    "kl_loss_type": (
        "examples_of_algorithms.absolute",
        lambda f: f(torch.tensor([-2.0]), torch.ones(1)).tolist() == [2],
    ),
    "custom_loss_function_path": ("examples_of_algorithms.imitate", lambda f: f(TOKENS, OPTIONS).total.item() == 1.5),
    "custom_pg_loss_reducer_function_path": (
        "examples_of_algorithms.by_root",
        lambda f: f(torch.tensor([4, 0]), OPTIONS).tolist() == [0.5, 1],
    ),
    "rollout_function_path": ("examples_of_rollouts.best_of_twice_as_many", lambda f: best(f)),
    "eval_function_path": ("examples_of_evaluations.hints_count_half", lambda f: halves(f)),
    "data_source_path": ("examples_of_sources.Sums", lambda f: sums(f)),
    "rollout_sample_hook_path": ("examples_of_samples.strip_thoughts", lambda f: strips(f)),
    "rollout_sample_filter_path": ("examples_of_samples.without_truncated", lambda f: removes(f)),
    "rollout_all_samples_process_path": (
        "examples_of_samples.keep_lengths",
        lambda f: f(OPTIONS, [[sample("abc"), sample("")]], None) is None and f.__globals__["SEEN"] == [[3, 0]],
    ),
    "custom_reward_post_process_path": (
        "examples_of_samples.centred",
        lambda f: f(OPTIONS, [sample(reward=1.0), sample(reward=3.0)]) == ([1.0, 3.0], [-1.0, 1.0]),
    ),
    "custom_convert_samples_to_train_data_path": (
        "examples_of_samples.last_tokens_only",
        lambda f: f(OPTIONS, [sample("abc")])["loss_masks"] == [[0, 1, 1]],
    ),
    "custom_rollout_log_function_path": ("examples_of_metrics.lengths", lambda f: logs(f)),
    "custom_eval_rollout_log_function_path": ("examples_of_metrics.solved", lambda f: logs_evaluation(f)),
    "custom_megatron_init_path": (
        "examples_of_trainer_hooks.seeded",
        lambda f: f(OPTIONS) is None and torch.initial_seed() == OPTIONS.seed,
    ),
    "custom_megatron_before_log_prob_hook_path": (
        "examples_of_trainer_hooks.note",
        lambda f: f(OPTIONS, [], "ref_") is None and f.__globals__["SEEN"] == ["ref_"],
    ),
    "custom_model_provider_path": ("examples_of_trainer_hooks.frozen_norms", lambda f: provides(f)),
    "custom_update_weight_post_write_path": (
        "examples_of_trainer_hooks.flush_to_disk",
        lambda f: f(OPTIONS, str(PAGE.parent), ["http://host:1"]) is None and f.__globals__["WRITTEN"] == ["docs"],
    ),
    "custom_megatron_before_train_step_hook_path": ("examples_of_trainer_hooks.freeze_embedding", lambda f: freezes(f)),
    "rollout_data_postprocess_path": ("examples_of_trainer_hooks.drop_what_disagrees", lambda f: drops(f)),
}


def best(function: Callable[..., Any]) -> bool:
    class Source:
        async def get_samples(self, count: int) -> list[list[Sample]]:
            return [[sample(index=index, reward=float(number * index)) for index in (0, 1)] for number in range(count)]

        async def generate_group(self, group: list[Sample]) -> list[Sample]:
            return group

    found = asyncio.run(function(Options(rollout_batch_size=2), 0, Source(), evaluation=False))
    return [[one.reward for one in group] for group in found] == [[0, 3], [0, 2]]


def halves(function: Callable[..., Any]) -> bool:
    class Source:
        names = ("easy", "hard")

        async def get_samples(self, name: str) -> list[list[Sample]]:
            metadata = {"hinted": name == "hard"}
            return [[sample(index=index, reward=1.0).replace(metadata=metadata) for index in (0, 1)] for _ in range(3)]

        async def generate_group(self, group: list[Sample]) -> list[Sample]:
            return group

    found = asyncio.run(function(OPTIONS, 0, Source(), evaluation=True))
    return {name: {one.reward for group in groups for one in group} for name, groups in found.items()} == {
        "easy": {1.0},
        "hard": {0.5},
    }


def sums(source: Callable[..., Any]) -> bool:
    one = source(OPTIONS)
    first = one.take(2)
    state = one.state()
    second = one.take(3)
    other = source(OPTIONS)
    other.restore(state)
    right = all(sum(map(int, row["input"].rstrip("=").split("+"))) == int(row["label"]) for row in first + second)
    return right and len(first) == 2 and other.take(3) == second and one.metrics() == {"largest": 10}


def strips(hook: Callable[..., Any]) -> bool:
    one = sample("<think>hm</think> 2")
    return hook(OPTIONS, one, rollout_id=0, evaluation=False) is None and one.response == "2"


def removes(hook: Callable[..., Any]) -> bool:
    kept, cut = sample(), sample(index=1)
    cut.status = TRUNCATED
    hook(OPTIONS, [[kept, cut]])
    return not kept.remove_sample and cut.remove_sample


def logs(hook: Callable[..., Any]) -> bool:
    metrics: dict[str, float] = {}
    hook(3, OPTIONS, [sample("abc", reward=1.0), sample("a")], metrics, 1.0)
    return metrics == {"rollout/response_len/right": 3.0}


def logs_evaluation(hook: Callable[..., Any]) -> bool:
    metrics = {"gsm8k": {"accuracy": 0.5}}
    return hook(3, OPTIONS, {"gsm8k": {"rewards": [1.0, 0.0]}}, metrics) and metrics["gsm8k"]["solved"] == 1


def freezes(hook: Callable[..., Any]) -> bool:
    chunk = torch.nn.ModuleDict({"word_embeddings": torch.nn.Linear(1, 1), "output": torch.nn.Linear(1, 1)})
    hook(OPTIONS, 9, 0, [chunk], None, None)
    early = [parameter.requires_grad for parameter in chunk.parameters()]
    hook(OPTIONS, 10, 0, [chunk], None, None)
    return early == [False, False, True, True] and all(parameter.requires_grad for parameter in chunk.parameters())


def provides(provider: Callable[..., Any]) -> bool:
    model = torch.nn.ModuleDict({"layernorm": torch.nn.Linear(1, 1), "output": torch.nn.Linear(1, 1)})
    made = provider(OPTIONS, None, lambda: model, pre_process=True, post_process=True, vp_stage=None)
    return made is model and [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]


def drops(hook: Callable[..., Any]) -> bool:
    data = {
        "loss_masks": [torch.tensor([1, 1, 0])],
        "log_probs": [torch.tensor([-1.0, -1.0, -1.0])],
        "rollout_log_probs": [torch.tensor([-1.0, -3.0, -1.0])],
    }
    hook(OPTIONS, 0, data)
    return data["loss_masks"][0].tolist() == [1, 0, 0]


def test_every_point_has_a_row_a_call_and_an_option() -> None:
    rows = re.findall(r"^\| \[`--([\w-]+)`\]\(#", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(option_text(name)[2:] for name in POINTS)
    assert set(CALLS) == set(POINTS) <= set(Options.model_fields)


@pytest.mark.parametrize("name", POINTS)
def test_the_pages_example_works(name: str) -> None:
    path, works = CALLS[name]
    assert works(load_own(name, path))


@pytest.mark.parametrize("name", POINTS)
def test_the_row_says_what_it_is_called_with(name: str) -> None:
    point = POINTS[name]
    wanted = ", ".join([*point.parameters, *(["*", *point.keywords] if point.keywords else [])])
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| [`{option_text(name)}`]"))
    assert f"`({wanted})`" in row


def test_the_pages_agent_asks_the_endpoint(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the page calls its tool over two turns, and they are one conversation."""
    monkeypatch.chdir(modules)
    tokenizer = form_model(tmp_path, "hermes")
    calls = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

    async def work(found: AskedEndpoint) -> None:
        messages = [{"role": "user", "content": "1+2="}]
        args = SimpleNamespace(base_url=f"{found.url}/v1", api_key=found.key, messages=messages)
        await importlib.import_module("examples_of_generating").agent(args, asked_sample(), {})
        [dialogue] = found.session.dialogues
        assert len(found.policy.asked) == 4, "it gives up after four turns"
        assert tokenizer._hf.decode(dialogue.trajectory.tokens).count("<|tool|>3<|end|>") == 3

    asked(tokenizer, work, spoken(tokenizer, calls))


def test_all_points_of_a_role_are_loaded_at_once() -> None:
    options = Options(
        advantage_estimator="examples_of_algorithms.raw", pg_loss_type="ppo", custom_rm_path="examples_of_rewards.brief"
    )
    assert list(load_points(options, "trainer")) == ["advantage_estimator"]
    assert list(load_points(options, "grading")) == ["custom_rm_path"] and not load_points(options, "rollout")
    with pytest.raises(UsageError, match="--pg-loss-type examples_of_algorithms.absent: .* it has raw, score"):
        load_points(Options(pg_loss_type="examples_of_algorithms.absent"), "trainer")

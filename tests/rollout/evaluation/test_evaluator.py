"""The held-out sets of a run and the numbers that are made of their responses."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.config.eval_sets import EvalSet, eval_sets
from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.report.page.panels import own_metrics
from hpcrl.rollout.evaluation.evaluator import interval, majority, pass_at_k, pass_rates, results, sampling_of, wilson
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COMPLETED, TRUNCATED
from tests.support.shares import plain_sample

BASE: dict[str, Any] = {"eval_interval": 1, "rm_type": "math", "label_key": "label"}


def sets(path: Path, text: str, **values: Any) -> tuple[EvalSet, ...]:
    (path / "eval.yaml").write_text(text)
    return eval_sets(Options(**(BASE | {"eval_config": str(path / "eval.yaml")} | values)))


# ---- which sets


def test_a_bare_path_is_named_by_its_file() -> None:
    (held,) = eval_sets(Options(**BASE, eval_prompt_data=["data/aime-2024.jsonl@[:9]"]))
    assert (held.name, held.word.path, held.word.stop) == ("aime-2024", "data/aime-2024.jsonl", 9)
    two = eval_sets(Options(**BASE, eval_prompt_data=["a", "x.jsonl", "b", "x.jsonl"]))
    assert [held.name for held in two] == ["a", "b"]


def test_who_goes_before_whom(tmp_path: Path) -> None:
    """A set, the defaults, the flag of evaluation, the flag of training."""
    text = """
eval:
  defaults: {temperature: 0.3, top_p: 0.5, stop: ["x"]}
  datasets:
    - {name: own, path: a.jsonl, temperature: 0.1, max_response_len: 7, stop_token_ids: [9], metadata_overrides: {a: 1}}
    - {name: plain, path: b.parquet, rm_type: [f1, "exact:2"]}
"""
    flags = {
        "eval_temperature": 0.7,
        "eval_max_response_len": 5,
        "rollout_max_context_len": 60,
        "rollout_max_prompt_len": 3,
        "rollout_stop_token_ids": [4],
    }
    own, plain = sets(tmp_path, text, **flags, input_key="q", n_samples_per_eval_prompt=6)
    assert (own.temperature, plain.temperature, own.top_p, own.stop) == (0.1, 0.3, 0.5, ("x",))
    assert (own.max_response_len, plain.max_response_len, plain.max_context_len) == (7, 5, 60)
    assert plain.max_prompt_len is None, "as in slime: what training leaves out is evaluated all the same"
    assert (own.stop_token_ids, plain.stop_token_ids) == ((9,), (4,))
    assert (own.input_key, own.n_samples, own.metadata_overrides) == ("q", 6, {"a": 1})
    assert [word.name for word in own.rewards] == ["math"] and [word.weight for word in plain.rewards] == [1.0, 2.0]
    (inherited,) = eval_sets(Options(**BASE, eval_prompt_data=["x.jsonl"], rollout_temperature=0.9))
    assert (inherited.temperature, inherited.top_p, inherited.top_k, inherited.min_p) == (0.9, 1.0, -1, 0.0)


def test_a_set_is_sampled_as_it_says(tmp_path: Path) -> None:
    text = (
        "eval: {datasets: [{name: a, path: a.jsonl, top_p: 0.9, top_k: 5, min_p: 0.1, min_new_tokens: 2, "
        "repetition_penalty: 1.2, stop: END}]}"
    )
    (held,) = sets(tmp_path, text, eval_temperature=0.0, rollout_max_response_len=33)

    class Model:
        eos_ids = frozenset({1})

    params = sampling_of(held, Options(**BASE), Model()).params(20)  # type: ignore[arg-type]
    assert params == {
        "n": 1,
        "temperature": 0.0,
        "max_tokens": 20,
        "stop_token_ids": [1],
        "detokenize": True,
        "stop": ["END"],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "min_tokens": 2,
        "repetition_penalty": 1.2,
    }


def test_a_mapping_of_sets_and_a_reward_of_ones_own(tmp_path: Path) -> None:
    text = "eval: {defaults: {custom_rm_path: mine.reward}, datasets: {a: x.jsonl, b: {path: y.jsonl, rm_type: f1}}}"
    a, b = sets(tmp_path, text, rm_type=None)
    assert (a.rewards[0].word, a.own_types, a.needs_label) == ("mine.reward", False, False)
    assert (b.rewards[0].word, b.own_types, b.needs_label) == ("f1", True, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("eval: {dataset: []}", "did you mean datasets?"),
        ("evals: {}", "has no table `eval`"),
        ("- a", "has no table `eval`"),
        ("eval: {datasets: [}", "is not YAML"),
        ("eval: {datasets: []}\nseed: 1", "seed is an unknown"),
        ("eval: {datasets: []}", "eval.datasets is not a list"),
        ("eval: {datasets: [{name: a}]}", "set 1 has no path"),
        ("eval: {datasets: [{path: a.jsonl}]}", "set 1 has no name"),
        ("eval: {datasets: [{name: a, path: a.jsonl}, {name: a, path: b.jsonl}]}", "gives a name twice"),
        ("eval: {datasets: [{name: a/b, path: a.jsonl}]}", "'a/b' cannot be a name"),
        (
            "eval: {datasets: [{name: a, path: a.jsonl, temprature: 1}]}",
            "did you mean temperature?",
        ),
        (
            "eval: {defaults: {tempera: 1}, datasets: [{name: a, path: a.jsonl}]}",
            "eval.defaults: tempera is an unknown",
        ),
        ("eval: {datasets: [{name: no, path: a.jsonl}]}", "quotes"),
        ("eval: {datasets: {on: a.jsonl}}", "quotes"),
        ("eval: {datasets: [{name: 1, path: a.jsonl}]}", "quotes"),
        ("eval: {datasets: [{name: a, path: a.jsonl, top_p: 2}]}", "top_p: 2: expected a number >= 0 and <= 1"),
        ("eval: {datasets: [{name: a, path: a.jsonl, top_p: 0}]}", "top_p 0 leaves nothing to sample"),
        (
            "eval: {datasets: [{name: a, path: a.jsonl, max_response_len: 3.5}]}",
            "max_response_len: 3.5: expected a whole number",
        ),
        (
            "eval: {datasets: [{name: a, path: a.jsonl, app_service: x}]}",
            "is no such service",
        ),
        (
            "eval: {datasets: [{name: a, path: a.jsonl, eval_early_stop_n: 1}]}",
            "eval_early_stop_n is not a setting",
        ),
        (
            "eval: {datasets: [{name: a, path: a.jsonl, rm_type: maths}]}",
            "did you mean math?",
        ),
        ("eval: {datasets: [{name: a, path: a.jsonl, rm_type: f1, custom_rm_path: a.b}]}", "exclude each other"),
        ("eval: {datasets: [{name: a, path: 'a.jsonl=2'}]}", "has a weight, but"),
        (
            "eval: {datasets: [{name: a, path: a.jsonl, metadata_overrides: {rm_type: f1}}]}",
            "next to the set's",
        ),
        (
            "eval: {datasets: [{name: a, path: a.jsonl, max_context_len: 99}]}",
            "more than the engines' --rollout-max-context-len 50",
        ),
        (
            "eval: {datasets: [{name: a, path: a.jsonl, max_context_len: 9, max_prompt_len: 9}]}",
            "room for a response",
        ),
    ],
)
def test_what_an_evaluation_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        sets(tmp_path, text, rollout_max_context_len=50)
    assert words in str(caught.value)


def test_a_label_or_a_reward_that_is_missing(tmp_path: Path) -> None:
    text = "eval: {datasets: [{name: a, path: a.jsonl, rm_type: f1}]}"
    with pytest.raises(UsageError, match="the reward f1 compares with the label;.*label_key"):
        sets(tmp_path, text, label_key=None)
    with pytest.raises(UsageError, match="reward is given; give --rm-type or --custom-rm-path"):
        eval_sets(Options(eval_interval=1, eval_prompt_data=["a.jsonl"]))
    with pytest.raises(UsageError, match="cannot read --eval-config .*: No such file"):
        eval_sets(Options(**BASE, eval_config=str(tmp_path / "absent.yaml")))


# ---- numbers


def sample(group: int, reward: float, response: str = "", status: str = COMPLETED, length: int = 3) -> Sample:
    return plain_sample(0, length, group_index=group, reward=reward, response=response, status=status)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7), st.data())
def test_pass_at_k(n: int, data: st.DataObject) -> None:
    """Against the definition: every way to choose k of n responses."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    right = [True] * c + [False] * (n - c)
    chosen = [any(subset) for subset in itertools.combinations(right, k)]
    assert math.isclose(pass_at_k(n, c, k), sum(chosen) / len(chosen), abs_tol=1e-12)


def test_pass_at_k_of_many_does_not_overflow() -> None:
    assert math.isclose(pass_at_k(10_000, 1, 5_000), 0.5) and pass_at_k(10_000, 0, 9_999) == 0.0
    for wrong in ((3, 4, 1), (3, 1, 0), (3, 1, 4)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(*wrong)


def test_pass_rates_are_means_over_prompts() -> None:
    rewards = np.asarray([[1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0.5, 0, -1, 0, 0, 0]], float)
    found = pass_rates(rewards)
    assert list(found) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert math.isclose(found["pass@1"], (1 / 6 + 1) / 3) and math.isclose(found["pass@6"], 2 / 3)


def test_the_majority_is_of_answers() -> None:
    box = lambda text: rf"so \boxed{{{text}}}"  # noqa: E731
    samples = [
        *(sample(0, reward, box(text)) for reward, text in ((0, "7"), (1, "4 2"), (1, "42"), (0, "7"), (1, "42"))),
        *(sample(1, reward, text) for reward, text in ((0, box("1")), (1, box("2")), (0, ""), (0, ""), (0, ""))),
        *(sample(2, 1, "no box") for _ in range(5)),
    ]
    rewards = np.asarray([s.reward for s in samples]).reshape(3, 5)
    assert majority(samples, rewards) == pytest.approx((1 + 0 + 0) / 3), "a tie is the first one's, no answer is wrong"
    assert majority(samples[10:], rewards[2:]) is None


def test_wilson_is_the_textbooks() -> None:
    """Newcombe 1998, table I: 81 of 263, and the ends 0 of 20 and 1 of 29."""
    for (right, n), (low, high) in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson(right / n, n) == pytest.approx((low, high), abs=5e-5)


def test_an_interval_counts_prompts() -> None:
    """Eight responses that always agree say no more than one; where they are independent they all count."""
    agree = np.repeat([[1.0], [0.0]] * 20, 8, axis=1)
    assert interval(agree) == pytest.approx(wilson(0.5, 40))
    apart = np.tile([1.0, 0.0], (40, 4))
    assert interval(apart) == pytest.approx(wilson(0.5, 320))
    all_right = interval(np.ones((40, 8)))
    assert all_right == pytest.approx(wilson(1.0, 40)) and all_right[1] == 1.0
    low, high = interval(np.asarray([[-1.0], [1.0], [1.0], [1.0]]))
    assert (low, high) == pytest.approx((0.5 - 1.959964 * 0.5, 0.5 + 1.959964 * 0.5))
    assert all(map(math.isnan, interval(np.asarray([[2.0, 3.0]]))))


@pytest.mark.parametrize(("spread", "each"), [(0.0, 1), (0.0, 4), (0.35, 4)])
def test_an_interval_covers_what_it_says(spread: float, each: int) -> None:
    """Of 2,000 evaluations of 60 prompts, whose chances differ by `spread`, 95 % of the intervals hold the truth."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        chances = rng.choice([0.5 - spread, 0.5 + spread], 60)
        low, high = interval((rng.random((60, each)) < chances[:, None]).astype(float))
        held += low <= 0.5 <= high
    assert 0.93 <= held / 2000 <= 0.985


def test_what_is_logged() -> None:
    samples = [
        sample(0, 1.0, r"\boxed{1}", length=2),
        sample(0, 0.0, "", TRUNCATED, length=6),
        sample(1, 1.0),
        sample(1, 1.0),
    ]
    found = results(samples, 2, passrate=True, dropped=3)
    assert own_metrics([f"eval/a/{name}" for name in found]) == []
    assert (found["accuracy"], found["truncated_ratio"], found["response_len"], found["n"]) == (0.75, 0.25, 3.5, 4)
    assert (found["dropped"], found["majority@2"], found["pass@1"], found["pass@2"]) == (3, 0.5, 0.75, 1.0)
    assert found["ci_low"] < 0.75 < found["ci_high"]
    assert found["right_or_wrong"] == 1 and results([sample(0, 0.5), sample(0, 0.5)], 2)["right_or_wrong"] == 0
    assert not [name for name in results(samples, 1) if "@" in name or name == "dropped"]

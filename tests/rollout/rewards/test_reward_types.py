"""Every --rm-type: what it is worth, by hand."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
import time
import types
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.plugin_names import declared, plugin_names, read_words
from hpcrl.errors import UsageError
from hpcrl.rollout.grading.grader import call, grade, load_reward
from hpcrl.rollout.rewards import gpqa
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.sample import Sample
from hpcrl.utils.plugins import PluginFolder
from tests.support.http_server import Server
from tests.support.shares import plain_sample


def sample(response: str, label: Any = None, **metadata: Any) -> Sample:
    return plain_sample(response=response, label=label, prompt="1+1=", metadata=metadata)


def worth(
    name: str, response: str, label: Any = None, key: str | None = None, options: Options | None = None, **metadata: Any
) -> Any:
    """The reward, or the text of the failure."""
    options = options or Options()
    rewards = [load_reward(name, options)]
    called = call(rewards, Arguments(options), [sample(response, label, **metadata)])
    outcome = asyncio.run(grade(rewards, called, 1, key))[0]
    return outcome.text if outcome.failure else outcome.values[name]


@pytest.mark.parametrize(
    ("name", "response", "label", "value"),
    [
        ("exact", " 12\n", 12, 1),
        ("exact", "12 ", "13", 0),
        ("exact", "b", ["a", "b"], 1),
        ("math", r"it is \boxed{12}", 12, 1),
        ("math", "it is 12", "12", 0),
        ("math", r"\boxed{12}", r"see \boxed{12}", 1),
        ("math", r"\boxed{TRUE}", "true", 1),
        ("math", r"\boxed{2516_9}", "2516_8", 0),
        ("math", r"\boxed{}", "", 0),
        ("math", r"\boxed{1/2}", ["2", "0.5"], 1),
        ("boxed_math", r"it is \boxed{12}", "12", 1),
        ("boxed_math", "it is 12", "12", 0),
        ("deepscaler", r"<think>\boxed{3}</think> so \boxed{4}", "4", 1),
        ("deepscaler", r"<think>\boxed{4}</think> so \boxed{3}", "4", 0),
        ("deepscaler", r"<think>\boxed{4}</think> so 4", "4", 0),
        ("deepscaler", r"so \boxed{4}", "4", 0),
        ("deepscaler", r"###Response \boxed{4}", "4", 1),
        ("deepscaler", r"\boxed{3} ###Response \boxed{4}", "4", 1),
        ("deepscaler", r"a</think>b</think> \boxed{\frac12}", "0.5", 1),
        ("deepscaler", r"</think>\boxed{4}", "", 0),
        ("boxed_deepscaler", r"so \boxed{4}", "4", 1),
        ("dapo", "Answer: 34", "34", 1),
        ("dapo", "so\nAnswer: $34$", "34", 1),
        ("dapo", r"Answer: \boxed{34}", 34, 1),
        ("dapo", "**Answer: 34**", "34", 1),
        ("dapo", "answer : 034<|im_end|>", "34", 1),
        ("dapo", "Answer: 33\nAnswer: 34", "34", 1),
        ("dapo", "Answer: 34\nAnswer: 33", "34", -1),
        ("dapo", "34", "34", -1),
        ("dapo", "Answer: 34" + "x" * 300, "34", -1),
        ("dapo", "Answer: 34\n" + "x" * 295, "34", -1),
        ("dapo", "Answer: 34 apples", "34", 1),
        ("dapo", "Answer: 33\n" + "x" * 290 + "\nAnswer: 34", "34", 1),
        ("dapo", "Answer: 34\n" + "x" * 288, "34", 1),
        ("dapo", r"Answer: \boxed 34", "34", 1),
        ("dapo", "Answer: cab", "abc", -1),
        ("dapo", "Answer:\n34", "34", 1),
        ("dapo", "**Answer:**\n\n\\[ 34 \\]", "34", 1),
        ("dapo", "Answer: \n$\\boxed{34}$", "34", 1),
        ("dapo", "Answer:\n\\[\n34\n\\]", "34", 1),
        ("dapo", "Answer：`34`</s>", "34", 1),
        ("dapo", "Answer:\r\n34\r\n", "34", 1),
        ("dapo", "Answer: The value is $34$.", "34", 1),
        ("dapo", "Answer: $33$ or $34$", "34", -1),
        ("dapo", "Answer: 30 + 4 = 34", "34", 1),
        ("dapo", "Answer: 34 = 35", "34", -1),
        ("dapo", "Answer: x >= 34", "34", -1),
        ("dapo", "Answer: y = 5", "x = 5", -1),
        ("dapo", "Answer: 2**3", "23", -1),
        ("dapo", "Answer: $34$**", "34", 1),
        ("dapo", "Answer: \n**$34$**", "34", 1),
        ("dapo", "Answer: $Answer", "34", -1),
        ("math", r"\boxed{**73**}", "73", 1),
        ("math", r"\boxed{7}", "2+1=3\n3+4=7\n#### 7", 1),
        ("math", r"\boxed{3}", "2+1=3\n#### 7", 0),
        ("dapo", "Answer: 3 + 4 = 7", "2+1=3\n#### 7", 1),
        ("math_verify", r"\boxed{1007}", "#### 1,007", 1),
        ("math", r"\boxed{cab}", "abc", 0),
        ("math", r"\boxed{1\!,\!234}", 1234, 1),
        ("math", r"\boxed 5", 5, 1),
        ("math", r"\boxed{The answer is 5}", "5", 1),
        ("math", r"\boxed{4}, no, \boxed{5}", "5", 1),
        ("math", r"\boxed{5}, no, \boxed{4}", "5", 0),
        ("deepscaler", r"</think>\boxed{cab}", "abc", 0),
        ("deepscaler", r"</think>\boxed{3}</think> so \boxed{4}", "4", 1),
        ("deepscaler", r"</think>\boxed{4}</think> so nothing", "4", 0),
        ("math", r"\boxed{5}", ["4", "5", "6"], 1),
        ("f1", "a cat and the dog", "cat and dog", 1),
        ("f1", "another cat", "other cat", 0.5),
        ("f1", "no", "no way", 0),
        ("boxed_dapo", r"so \boxed{34}", "34", 1),
        ("boxed_dapo", "Answer: 34", "34", -1),
        ("f1", "the cat sat", "a cat sat!", 1),
        ("f1", "cat", "cat sat", 2 / 3),
        ("f1", "cat cat", "cat", 2 / 3),
        ("f1", "dog", "cat", 0),
        ("f1", "", "cat", 0),
        ("f1", "yes it is", "yes", 0),
        ("f1", "Yes.", "yes", 1),
        ("f1", "cat sat", ["dog", "cat sat"], 1),
        ("boxed_f1", r"a dog \boxed{cat}", "cat", 1),
        ("math_verify", r"\boxed{1/2}", "0.5", 1),
        ("math_verify", r"\boxed{1/3}", "0.5", 0),
        ("math_verify", r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        ("math_verify", "1/2", "0.5", 0),
    ],
)
def test_worth(name: str, response: str, label: Any, value: float) -> None:
    assert worth(name, response, label) == pytest.approx(value)


def test_dapo_object_and_reward_key() -> None:
    """dapo returns an object, of which --reward-key chooses one value."""
    assert worth("dapo", "Answer: 34", "34", key="acc") == 1 and worth("dapo", "Answer: 3", "34", key="acc") == 0
    assert "acc, pred" in worth("dapo", "Answer: 34", "34", key="missing")


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("The answer is (B).", "B"),
        ("answer: c", "C"),
        ("Answer: **D**", "D"),
        (r"\boxed{\text{A}}", "A"),
        (r"I think B, but \boxed{C}", "C"),
        ("The choice between them is hard. The correct option is D.", "D"),
        ("The answer is A. No: the answer is B.", "B"),
        ("A is the correct answer, as I said: A", "A"),
        ("so (C) is correct", "C"),
        ("C", "C"),
        ("I would say: B", "B"),
        ("I'm sure it is B. I've checked.", "B"),
        ("The answer is C. Choice A would need more energy.", "C"),
        ("So option (C) is correct, not option (A).", "C"),
        ("Option C is correct; option A ignores friction.", "C"),
        ("The answer is A. Option C is ruled out by energy conservation.", "A"),
        ("Answer: A\nWhy not choice C? It violates symmetry.", "A"),
        ("Option A is wrong. Option B is impossible. Option C fits.", "C"),
        ("not (A), but (C)", "C"),
        ("I don't think the answer is A. It is D", "D"),
        ("Neither A nor B. It is D.", "D"),
        ("Rule out A and B, leaving C.", "C"),
        ("It is not hard to see that the answer is C.", "C"),
        ("C isn't possible, so D", "D"),
        ("The answer is not A.", None),
        ("The answer is B, A is wrong", "B"),
        ("答案是B", "B"),
        ("正确选项为B。", "B"),
        ("所以选B", "B"),
        ("答案为（Ｂ）", "B"),
        ("选项B正确", "B"),
        ("A不正确，B正确", "B"),
        ("不选A，选C", "C"),
        ("The answer is A or B.", gpqa.OPEN),
        ("Answer: A, B", gpqa.OPEN),
        ("Answer: A/B/C/D", gpqa.OPEN),
        ("A and C are correct", gpqa.OPEN),
        ("option A, option B, option C", gpqa.OPEN),
        ("The answer is a matter of taste", None),
        ("B. A cell needs energy, I think", "B"),
        ("answer: a", "A"),
        ("It must be A because of that", "A"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_chooses(response: str, chosen: str | None) -> None:
    assert gpqa.choice(response, "ABCD") == chosen


@pytest.mark.parametrize(
    ("response", "label", "metadata", "value"),
    [
        ("Answer: B", "B", {}, 1),
        ("Answer: B", "(b)", {}, 1),
        ("Answer: B", 1, {}, 1),
        ("Answer: B", 0, {}, 0),
        ("Answer: B", None, {"correct_letter": "b"}, 1),
        ("Answer: B", "a cell", {"choices": ["an atom", "a cell"]}, 1),
        ("Answer: A", "a cell", {"choices": ["an atom", "a cell"]}, 0),
        ("Answer: B", "B", {"choices": {"A": "x", "B": "y"}}, 1),
        ("<think>Answer: A</think> Answer: B", "B", {}, 1),
        ("It must be a cell.", "a cell", {"choices": ["an atom", "a cell"]}, 1),
        ("It must be an atom.", "a cell", {"choices": ["an atom", "a cell"]}, 0),
        ("Answer: E", "B", {"choices": ["1", "2", "3", "4"]}, 0),
        ("no idea", "B", {}, 0),
        ("Answer: C", None, {"correct_letter": " c "}, 1),
        ("Answer: C", "(C).", {}, 1),
        ("Answer: C", 2.0, {}, 1),
        ("Answer: C", -1, {}, 0),
        ("Answer: B", True, {}, 0),
        ("Answer: C", "x", {"choices": {"a": "red", "b": "blue", "c": "x"}}, 1),
        ("Answer: D", 3, {"valid_letters": ["a", "b", "c", "d"]}, 1),
        ("Answer: D", 4, {"valid_letters": ["a", "b", "c", "d"]}, 0),
        ("Answer: D", 3, {"choices": ["red", "blue", "no shift"]}, 0),
        ("Answer: C", "2", {}, 1),
        ("Answer: B", "2", {"choices": ["1", "2", "3"]}, 1),
        ("Answer: C", 2, {"choices": ["1", "2", "3"]}, 1),
        ("Answer: C", 2.5, {}, 0),
        ("Answer: A or C", "C", {}, 0),
        ("blue or no shift", "C", {"choices": ["red", "blue", "no shift"]}, 0),
        ("Answer: B", "细胞", {"choices": ["原子", "细胞"]}, 1),
        ("Answer: A", "细胞", {"choices": ["原子", "细胞"]}, 0),
        ("Answer: B", "-", {"choices": ["+", "-"]}, 1),
        ("Answer: A", "-", {"choices": ["+", "-"]}, 0),
        ("是：细胞。", "B", {"choices": ["原子", "细胞"]}, 1),
        ("是：原子。", "B", {"choices": ["原子", "细胞"]}, 0),
        ("nothing", "B", {"choices": ["+", "-"]}, 0),
        ("so  No, Shift!", "C", {"choices": ["red", "blue", "no shift"]}, 1),
        ("so shift", "C", {"choices": ["red", "blue", "no shift"]}, 0),
        ("Answer: A", " RED ", {"choices": ["red", "blue", "no shift"]}, 1),
        ("it is the answer text", "Z", {"answer_text": "the answer text"}, 1),
        ("it is right", "Z", {"correct_answer": "right"}, 1),
        ("Answer: K", "K", {}, 0),
        ("Answer: J", "J", {}, 1),
        ("\\boxed{12} Answer: A", "A", {}, 1),
        ("\\boxed{b.}", "B", {}, 1),
        ("A, then B", "B", {}, 1),
        ("A's", "A", {}, 0),
    ],
)
def test_gpqa(response: str, label: Any, metadata: dict[str, Any], value: float) -> None:
    assert worth("gpqa", response, label, **metadata) == value
    assert worth("boxed_gpqa", r"Answer: Z \boxed{B}", "B") == 1


def test_gpqa_reads_long_texts_at_once() -> None:
    """Letters, cues and blanks by the thousand cost little time."""
    begun = time.process_time()
    for text in ("A " * 20000, "A,B" + " " * 99999 + "b", "answer" + " " * 99999, "not " * 9999 + "A", "A is " * 9999):
        gpqa.choice(text, "ABCD")
    assert time.process_time() - begun < 20


def test_random_is_a_fair_coin_that_repeats() -> None:
    throws = [worth("random", f"response {number}") for number in range(200)]
    assert set(throws) == {0.0, 1.0} and 60 < sum(throws) < 140
    assert throws == [worth("random", f"response {number}") for number in range(200)]
    other = Options(rollout_seed=7)
    assert throws != [worth("random", f"response {number}", options=other) for number in range(200)]


# ---- a server's reward


def test_remote_rm_request() -> None:
    """The server gets prompt, response and label."""
    with Server([(200, b"0.25"), (200, b'{"score": 2, "why": "long"}')]) as server:
        options = Options(rm_url=server.url)
        assert worth("remote_rm", "two", "2", options=options) == 0.25
        assert worth("remote_rm", "two", "2", key="score", options=options) == 2
    assert [json.loads(body) for body in server.bodies] == [{"prompt": "1+1=", "response": "two", "label": "2"}] * 2


def test_a_server_that_stumbles_is_asked_again() -> None:
    with Server([(503, b""), (429, b""), (200, b"1")]) as server:
        assert worth("remote_rm", "two", "2", options=Options(rm_url=server.url)) == 1
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(404, b"")] * 5, ["in 1 attempts", "404"]),
        ([(200, b"<html>")] * 5, ["no JSON", "<html>"]),
        ([(200, b'"good"')] * 5, ["returned 'good', which is not a number"]),
        ([(200, b'{"score": 1}')] * 5, ["an object with score: give --reward-key"]),
    ],
)
def test_a_server_that_gives_no_reward_is_named(answers: list[tuple[int, bytes]], words: list[str]) -> None:
    with Server(answers) as server:
        found = worth("remote_rm", "two", "2", options=Options(rm_url=server.url))
    assert all(word in found for word in words), found


def test_nobody_at_the_address() -> None:
    found = worth("remote_rm", "two", "2", options=Options(rm_url="http://127.0.0.1:9/", reward_timeout=1.5))
    assert "got no answer from --rm-url http://127.0.0.1:9/" in found and "ClientConnectorError" in found


# ---- IFBench


class Words:
    """A checker with the interface of IFBench's: at least N words."""

    def __init__(self, name: str) -> None:
        self.least = 0

    def build_description(self, *, N: int | None = None, prompt: str | None = None) -> None:
        self.least = N or self.least

    def get_instruction_args(self) -> dict[str, Any]:
        return {"N": self.least}

    def check_following(self, response: str) -> bool:
        return len(response.split()) >= self.least


def test_ifbench_asks_the_installed_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = types.ModuleType("instructions_registry")
    registry.INSTRUCTION_DICT = {"count:words": Words}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "instructions_registry", registry)
    rows = {"instruction_id_list": ["count:words", "count:words"], "kwargs": [{"N": 2, "m": None}, {"N": 3}]}
    assert worth("ifbench", "one two three", **rows) == 1
    assert worth("ifbench", "one two", **rows) == 0
    assert worth("ifbench", "", **(rows | {"kwargs": {}})) == 0
    assert worth("ifbench", " \n", **(rows | {"kwargs": {"N": 0}})) == 0, "nothing follows no instruction"
    assert worth("ifbench", "one", **(rows | {"kwargs": {"N": 0}})) == 1
    assert "knows the instruction other" in worth("ifbench", "a", instruction_id_list=["other"])
    assert "no instruction_id_list" in worth("ifbench", "a")
    assert "2 instructions, but kwargs for 1" in worth("ifbench", "a", **(rows | {"kwargs": [{}]}))


#: instruction, its arguments, a response that follows it, one that does not
INSTRUCTIONS: list[tuple[str, dict[str, Any], str, str]] = [
    ("count:word_count_range", {"min_words": 3, "max_words": 5}, "one two three four", "one two"),
    ("count:numbers", {"N": 2}, "I have 2 cats and 3 dogs", "I have 2 cats"),
    ("format:no_whitespace", {}, "abc", "a bc"),
    ("keywords:existence", {"keywords": ["red", "blue"]}, "a red and a blue one", "a red one"),
    ("keywords:forbidden_words", {"forbidden_words": ["no"]}, "yes", "oh no"),
    ("punctuation:no_comma", {}, "no comma here", "well, one"),
    ("detectable_format:json_format", {}, '{"a": 1}', "a: 1"),
    ("detectable_format:title", {}, "<<poem>> text", "poem"),
    ("startend:quotation", {}, '"all of it"', 'not "all" of it'),
    ("startend:end_checker", {"end_phrase": "the end."}, "And so it was. The end.", "And so it was."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi.\nP.S. more", "Hi."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Say hi. Hi!", "Hi!"),
]


def test_ifbench_matches_published_checks() -> None:
    """ifbench gives the verdicts of the published checks."""
    pytest.importorskip("if_verifiable.ifbench.instructions_registry", reason="pip install if-verifiable")
    for name, given, good, bad in INSTRUCTIONS:
        rows = {"instruction_id_list": [name], "kwargs": [given]}
        assert (worth("ifbench", good, **rows), worth("ifbench", bad, **rows)) == (1, 0), name
    both = {"instruction_id_list": ["punctuation:no_comma", "format:no_whitespace"], "kwargs": [{}, {"N": None}]}
    assert (worth("ifbench", "abc", **both), worth("ifbench", "a c", **both), worth("ifbench", "a,c", **both)) == (
        1,
        0,
        0,
    )


def test_ifbench_without_checks_says_what_to_install() -> None:
    if importlib.util.find_spec("if_verifiable") is not None:
        pytest.skip("they are installed")
    with pytest.raises(UsageError, match="pip install if-verifiable"):
        load_reward("ifbench", Options())


# ---- the registry


def test_every_file_is_a_reward() -> None:
    assert {
        "deepscaler",
        "dapo",
        "math",
        "f1",
        "gpqa",
        "ifbench",
        "remote_rm",
        "random",
        "math_verify",
        "exact",
    } <= set(plugin_names())
    for name in plugin_names():
        module = importlib.import_module(f"hpcrl.rollout.rewards.{name}")
        assert callable(module.reward) and module.__doc__.startswith(("--rm-type", "r--rm-type")), name
        assert declared(name) == {
            "LABELS": getattr(module, "LABELS", ("text", "number", "truth", "list")),
            "METADATA": getattr(module, "METADATA", ()),
            "KEYS": getattr(module, "KEYS", ()),
        }


def test_a_new_file_joins_by_itself(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import hpcrl.config.plugin_names as names
    import hpcrl.rollout.rewards as package

    (tmp_path / "brief.py").write_text(
        "LABELS = ()\nKEYS = ()\ndef reward(options, sample):\n    return 1 / len(sample.response)\n"
    )
    monkeypatch.setattr(names, "REWARDS", PluginFolder(tmp_path))
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    try:
        assert names.plugin_names() == ("brief",) and read_words("brief:2")[0].weight == 2
        assert not names.needing_labels(read_words("boxed_brief"))
        assert worth("brief", "four") == 0.25 and worth("boxed_brief", r"a long one \boxed{ab}") == 0.5
    finally:
        monkeypatch.undo()
        sys.modules.pop("hpcrl.rollout.rewards.brief", None)

"""The real rollout process against engines that misbehave, with this test in the trainer's place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.plan import Plan, local_hosts, make_plan
from hpcrl.rollout.policy_rollouts import PolicyRollouts
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.rundir import STOP, RunDir, write_atomic
from hpcrl.transport.auth import make_keys
from hpcrl.transport.client import Late, QueueClient
from hpcrl.transport.messages import UNFINISHED
from hpcrl.transport.share_format import Share
from tests.support.fake_engine import CUT, FakeEngine, Script, good, hang, keys_of
from tests.support.tiny import make_tokenizer

pytestmark = pytest.mark.process
REPO = Path(__file__).parents[2]
EACH, GROUPS = 4, 6


async def reward(options: Any, sample: Any) -> float:
    """Varies within a group; refuses one label."""
    if sample.label == "refuse":
        raise ValueError("I do not know this one")
    return float(len(sample.response) % 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 128, "max_position_embeddings": 64, "eos_token_id": 1}))
    for name, first, count in (("train", 0, 17), ("held", 50, 5)):
        rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(first, first + count)]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Attempt:
    """One attempt: the rollout process, fake engines, and the trainer's side of the queue."""

    def __init__(self, path: Path, model: Path, *scripts: Script | None, published: bool = True, **values: Any) -> None:
        defaults = {
            "hf_checkpoint": str(model),
            "prompt_data": str(model / "train.jsonl"),
            "input_key": "prompt",
            "label_key": "label",
            "apply_chat_template": True,
            "rollout_shuffle": True,
            "num_rollout": 5,
            "rollout_batch_size": GROUPS,
            "n_samples_per_prompt": EACH,
            "rollout_max_response_len": 8,
            "actor_num_gpus_per_node": 2,
            "rollout_num_gpus": len(scripts),
            "custom_rm_path": "tests.rollout.test_main.reward",
            "deterministic_mode": True,
            "engine_start_timeout": 5,
            "attempts": 1,
            "timeout_factor": 30 / 3600,
            "eval_prompt_data": ["held", str(model / "held.jsonl")],
            "eval_interval": 1,
        }
        self.options = Options(**(defaults | values))
        number = len(list((path / "attempts").iterdir())) if (path / "attempts").exists() else 0
        self.rundir = RunDir(path, number) if number else RunDir.create(path)
        self.rundir.make_attempt()
        self.plan: Plan = make_plan(self.options, local_hosts(self.options), "test")
        write_atomic(self.rundir.options_file, self.options.model_dump_json().encode())
        write_atomic(self.rundir.plan_file, msgspec.json.encode(self.plan))
        if not number:
            make_keys(self.rundir, 2)
        self.engines = [FakeEngine(script, keys_of(self.rundir)) for script in scripts]
        for index, engine in enumerate(self.engines):
            if published:
                publish(self.rundir, EnginePeer(host="127.0.0.1", port=engine.port, model_len=64), index)
        command = [sys.executable, "-m", "hpcrl.rollout.main", str(path), "--attempt", str(number)]
        self.log = path / f"rollout{number or ''}.log"
        with self.log.open("wb") as out:
            env = os.environ | {"PYTHONPATH": str(REPO)}
            self.process = subprocess.Popen(command, cwd=REPO, env=env, stdout=out, stderr=out)
        self.clients: list[QueueClient] = []

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        for client in self.clients:
            client.close()
        for engine in self.engines:
            engine.__exit__()

    def begin(self, rollout_id: int = 0, state: dict[str, Any] | None = None) -> int:
        self.clients = [QueueClient(self.rundir, self.plan, rank, 2, 60) for rank in range(2)]
        total = self.call("start_run", rollout_id=rollout_id, state=state)["num_rollout"]
        self.call(
            "engines_updated", engines=self.call("engines")["update"], version=rollout_id
        )  # the engines say what they hold
        return total

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.clients[0].call(method, 60, **params)

    def fetch(self, rollout_id: int) -> list[Share]:
        return [client.fetch(rollout_id, 60) for client in self.clients]

    def makes_none(self, rollout_id: int) -> bool:
        """Whether a run that was asked to stop does not deliver that rollout, and its clients know why."""
        for client in self.clients:
            with pytest.raises(Late):
                client.fetch(rollout_id, 1)
        return all(client.stop_seen is not None for client in self.clients)

    def step(self, rollout_id: int, saved: int = 0) -> tuple[list[Share], dict[str, Any]]:
        """What the trainer does with one rollout: its shares, and the state to save after it."""
        self.call("generate", rollout_id=rollout_id, version=rollout_id)
        shares = self.fetch(rollout_id)
        return shares, json.loads(json.dumps(self.call("snapshot", rollout_id=rollout_id, saved=saved)))

    def end(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def error(self) -> str:
        failure = self.rundir.failure()
        assert failure is not None, self.log.read_text()
        assert (failure.role, failure.index) == ("rollout", 0)
        return failure.message

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        return {
            p.name: [json.loads(line) for line in p.read_text().splitlines()]
            for p in sorted(self.rundir.samples.iterdir())
        }


@pytest.fixture(scope="module")
def uncut(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[Attempt, list[list[Share]], list[dict[str, Any]]]]:
    """A whole run of four rollouts and two evaluations on two engines."""
    with Attempt(tmp_path_factory.mktemp("uncut"), model, None, None) as attempt:
        assert attempt.begin() == 5
        evaluation = attempt.call("evaluate", rollout_id=-1, version=0)
        steps = [attempt.step(rollout_id) for rollout_id in range(4)]
        assert attempt.call("evaluate", rollout_id=3, version=4) == evaluation, "the same weights give the same numbers"
        assert (
            set(evaluation["held"])
            == {
                *(
                    "accuracy",
                    "right_or_wrong",
                    "ci_low",
                    "ci_high",
                    "response_len",
                    "truncated_ratio",
                    "n",
                    "reward_timeouts",
                    "reward_errors",
                )
            }
            and evaluation["held"]["n"] == 5
        )
        attempt.call("finish", rollout_id=4)
        assert attempt.end() == 0, attempt.log.read_text()
        yield attempt, [shares for shares, _ in steps], [state for _, state in steps]


@pytest.mark.core
def test_shares_and_sample_files_tell_the_same(uncut: tuple[Attempt, list[list[Share]], Any]) -> None:
    attempt, rollouts, _ = uncut
    files = attempt.samples()
    assert list(files) == [*(f"{i:08d}.jsonl" for i in range(4)), "eval-held--1.jsonl", "eval-held-3.jsonl"]
    prompts = json.dumps([row["prompt"] for i in range(4) for row in files[f"{i:08d}.jsonl"][::EACH]])
    assert len(set(json.loads(prompts)[:17])) == 17, "an epoch has every prompt once"
    for rollout_id, shares in enumerate(rollouts):
        rows = files[f"{rollout_id:08d}.jsonl"]
        assert [(row["group"], row["index"]) for row in rows] == [
            (rollout_id * GROUPS + g, i) for g in range(GROUPS) for i in range(EACH)
        ]
        assert all(row["versions"] == [rollout_id] for row in rows)
        by_key = {(row["group"], row["index"]): row for row in rows}
        assert sum(len(share.batch) for share in shares) == len(rows)
        for share in shares:
            assert share.version == rollout_id and share.step_samples == [GROUPS * EACH]
            assert share.step_tokens == [sum(row["response_len"] for row in rows)]
            assert share.metrics["rollout/reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
            assert share.metrics["staleness/max"] == 0
            for row in share.batch.rows:
                written = by_key[int(row["group_index"]), int(row["response_index"])]
                assert row["reward"] == written["reward"]
                assert row["length"] == written["prompt_len"] + written["response_len"]
            assert share.table["reward"].tolist() == [row["reward"] for row in rows], "every rank knows all rewards"


def test_greedy_baseline(tmp_path: Path, model: Path) -> None:
    """The greedy response to each prompt is the baseline of its samples."""
    with Attempt(tmp_path / "run", model, None, advantage_estimator="remax", eval_interval=None) as attempt:
        attempt.begin()
        shares, _ = attempt.step(0)
        bodies = [body["sampling_params"] for engine in attempt.engines for body in engine.bodies]
        assert sorted(body["temperature"] for body in bodies) == [0.0] * GROUPS + [1.0] * GROUPS * EACH
        table = shares[0].table
        assert len(table) == GROUPS * EACH and not np.isnan(table["baseline"]).any()
        for group in table["baseline"].reshape(GROUPS, EACH):
            assert len(set(group)) == 1
        written = attempt.samples()["00000000.jsonl"]
        assert [row["baseline"] for row in written] == table["baseline"].tolist()


def test_every_sample_has_its_own_seed(uncut: tuple[Attempt, Any, Any]) -> None:
    bodies = [body for engine in uncut[0].engines for body in engine.bodies]
    train = [body["sampling_params"]["seed"] for body in bodies if body["sampling_params"].get("logprobs") == 0]
    assert len(train) == len(set(train)) == 4 * GROUPS * EACH
    held = [body["sampling_params"]["seed"] for body in bodies if "logprobs" not in body["sampling_params"]]
    assert len(held) == 10 and len(set(held)) == 5 and not set(held) & set(train)


def test_resume_repeats_the_samples(tmp_path: Path, model: Path, uncut: tuple[Attempt, Any, Any]) -> None:
    """Resumed from a snapshot, it makes the same samples."""
    with Attempt(tmp_path / "run", model, None) as attempt:  # one engine, not two: that makes no difference
        attempt.begin(2, uncut[2][1])
        for rollout_id in (2, 3):
            attempt.step(rollout_id)
        attempt.call("finish", rollout_id=4)
        assert attempt.end() == 0
        expected = uncut[0].samples()
        assert attempt.samples() == {name: expected[name] for name in ("00000002.jsonl", "00000003.jsonl")}


def test_positions_that_do_not_fit_are_refused(tmp_path: Path, model: Path, uncut: tuple[Attempt, Any, Any]) -> None:
    lines = (model / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    with Attempt(tmp_path / "run", model, None, prompt_data=str(tmp_path / "train.jsonl")) as attempt:
        with pytest.raises(HpcrlError, match="changed since the checkpoint"):
            attempt.begin(2, uncut[2][1])
        assert attempt.end() == 1
        assert "changed since the checkpoint" in attempt.error()
    with (
        Attempt(tmp_path / "other", model, None) as attempt,
        pytest.raises(HpcrlError, match="is that of rollout 1, the run resumes at 3"),
    ):
        attempt.begin(3, uncut[2][1])


def test_a_stop_drops_what_is_being_made(tmp_path: Path, model: Path) -> None:
    def first_rollout_only(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        return None if count < GROUPS * EACH else hang(engine, count, body)

    with Attempt(tmp_path / "run", model, first_rollout_only) as attempt:
        attempt.begin()
        attempt.step(0)
        attempt.call("generate", rollout_id=1, version=1)
        deadline = time.monotonic() + 10
        while attempt.engines[0].in_flight < GROUPS * EACH and time.monotonic() < deadline:
            time.sleep(0.02)
        attempt.rundir.request_stop()
        assert attempt.makes_none(1)
        deadline = time.monotonic() + 30
        while attempt.engines[0].in_flight and time.monotonic() < deadline:
            time.sleep(0.02)
        assert attempt.engines[0].in_flight == 0, "the engine is not left at work"
        attempt.call("finish", rollout_id=1)
        assert attempt.end() == 0
        assert attempt.rundir.failure() is None and list(attempt.samples()) == ["00000000.jsonl"]


def test_a_stop_is_done_once_and_to_its_end() -> None:
    """Whoever learns of it first, and whoever is cancelled meanwhile."""
    done = []

    async def stop() -> None:
        await asyncio.sleep(0.1)
        done.append("put away")

    async def all_of_them() -> None:
        watch = asyncio.create_task(rollout.stop_if_asked())
        finish = asyncio.create_task(rollout.stop_if_asked())
        await asyncio.sleep(0)
        watch.cancel()
        await finish
        await rollout.stop_if_asked()

    rollout: Any = object.__new__(PolicyRollouts)
    rollout._stop_work = None
    rollout._stop = stop
    rollout.context = SimpleNamespace(rundir=SimpleNamespace(signs=lambda: {STOP}))
    asyncio.run(all_of_them())
    assert done == ["put away"]


def test_stop_between_and_during(tmp_path: Path, model: Path) -> None:
    """A stop between rollouts, and one during an evaluation."""

    def no_evaluation(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        return None if "logprobs" in body["sampling_params"] else hang(engine, count, body)

    with Attempt(tmp_path / "run", model, no_evaluation) as attempt:
        attempt.begin()
        attempt.step(0)
        attempt.rundir.request_stop()
        assert attempt.call("evaluate", rollout_id=0, version=1) == {}
        assert attempt.call("evaluate", rollout_id=0, version=1) == {}, "now that it knows, it does not even begin"
        attempt.call("generate", rollout_id=1, version=1)
        assert attempt.makes_none(1)
        attempt.call("finish", rollout_id=1)
        assert attempt.end() == 0


def test_rollout_during_an_evaluation(tmp_path: Path, model: Path) -> None:
    """The last two of five held-out responses come once there are new weights."""
    more = threading.Event()

    async def late(count: int, body: dict[str, Any]) -> dict[str, Any]:
        while count > 2 and not more.is_set():
            await asyncio.sleep(0.01)
        return good(body, "1" if count > 2 else "0")

    def script(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        if "logprobs" in body["sampling_params"]:
            return None
        held.append(count)
        return late(len(held) - 1, body)

    held: list[int] = []
    asked = {"rollout_id": -1, "version": 0, "while_training": True}
    with Attempt(
        tmp_path / "run", model, script, loop="fully-async", deterministic_mode=False, max_staleness=2
    ) as attempt:
        attempt.begin()
        assert attempt.call("evaluate", **asked, patience=0.0) == {UNFINISHED: {}}
        attempt.step(0)
        assert attempt.call("evaluate", **asked, patience=0.0) == {UNFINISHED: {}}
        attempt.call("engines_updated", engines=attempt.call("engines")["update"], version=1)
        more.set()
        found = attempt.call("evaluate", **asked, patience=60.0)["held"]
        tokens = [row["response_len"] for row in attempt.samples()["eval-held--1.jsonl"]]
        versions = [row["versions"] for row in attempt.samples()["eval-held--1.jsonl"]]
        assert (found["policy_version"], found["policy_version_max"], found["n"]) == (0, 1, 5)
        old = sum(size for size, mine in zip(tokens, versions, strict=True) if set(mine) == {0})
        assert 0 < old < sum(tokens) and found["policy_version_ratio"] == pytest.approx(old / sum(tokens))
        more.clear()
        held.clear()
        assert attempt.call("evaluate", **asked | {"rollout_id": 0, "version": 0}, patience=0.0) == {UNFINISHED: {}}
        attempt.rundir.request_stop()
        assert attempt.call("evaluate", **asked | {"rollout_id": 0}) == {}, "whoever goes on makes up for it"


def test_engine_death_costs_nothing(tmp_path: Path, model: Path, uncut: tuple[Attempt, Any, Any]) -> None:
    """An engine that dies in the middle costs nothing."""

    def dies(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        engine.healthy = count < 5
        return None if count < 5 else CUT

    with Attempt(tmp_path / "run", model, dies, None) as attempt:
        attempt.begin()
        attempt.step(0)
        attempt.call("finish", rollout_id=1)
        assert attempt.end() == 0
        assert attempt.samples()["00000000.jsonl"] == uncut[0].samples()["00000000.jsonl"]
        assert "engine-0 on 127.0.0.1 died" in attempt.log.read_text()


def dead(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
    engine.healthy = False
    return CUT


def old_weights(engine: FakeEngine, count: int, body: dict[str, Any]) -> dict[str, Any]:
    return good(body, version="3")


@pytest.mark.parametrize(
    ("script", "values", "words"),
    [
        (dead, {}, ["no engine is left", "engine-0 on 127.0.0.1 died"]),
        (
            hang,
            {"timeout_factor": 3 / 3600},
            [
                "6 of 6 groups of rollout 4",
                "within 3 s, which --timeout-factor scales",
                "engine-0 on 127.0.0.1: 24 requests in flight",
            ],
        ),
        (
            None,
            {"prompt_data": "refused.jsonl"},
            [
                "tests.rollout.test_main.reward",
                "I do not know this one",
                "of group",
                "refused.jsonl, line ",
                "--reward-max-failed 0.1",
            ],
        ),
    ],
)
def test_rollout_errors_are_clear(
    tmp_path: Path,
    model: Path,
    uncut: tuple[Attempt, Any, Any],
    script: Script | None,
    values: dict[str, Any],
    words: list[str],
) -> None:
    """What goes wrong in a rollout is one clear error."""
    state: dict[str, Any] | None = uncut[2][3]
    if "prompt_data" in values:
        path = tmp_path / str(values["prompt_data"])
        rows = [("1+1=", "2"), ("1+2=", "refuse"), ("1+3=", "refuse")]
        path.write_text("".join(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows))
        values, state = values | {"prompt_data": str(path)}, None
    rollout_id = 4 if state else 0
    with Attempt(tmp_path / "run", model, script, **values) as attempt:
        attempt.begin(rollout_id, state)
        begun = time.monotonic()
        attempt.call("generate", rollout_id=rollout_id, version=rollout_id)
        for client in attempt.clients:
            with pytest.raises(HpcrlError) as caught:
                client.fetch(rollout_id, 60)
            assert all(word in str(caught.value) for word in words), str(caught.value)
        assert attempt.end() == 1 and time.monotonic() - begun < 45
        assert all(word in attempt.error() for word in words)
        assert ("Traceback" in attempt.log.read_text()) == ("prompt_data" in values), "of the user's code alone"


def test_an_engine_that_never_comes_up(tmp_path: Path, model: Path) -> None:
    with Attempt(tmp_path / "run", model, None, published=False, engine_start_timeout=1) as attempt:
        attempt.begin()
        attempt.call("generate", rollout_id=0, version=0)
        assert attempt.end() == 1
        assert (
            "engine-0 on 127.0.0.1" in attempt.error()
            and "not come up within --engine-start-timeout 1 s" in attempt.error()
        )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt_data": "bad.jsonl"}, ["bad.jsonl, line 2", "not JSON"]),
        ({"eval_prompt_data": ["held", "bad.jsonl"]}, ["bad.jsonl, line 2", "not JSON"]),
        (
            {"custom_rm_path": "tests.rollout.test_main.absent"},
            ["--custom-rm-path tests.rollout.test_main.absent"],
        ),
    ],
)
def test_bad_input_comes_before_engines(tmp_path: Path, model: Path, values: dict[str, Any], words: list[str]) -> None:
    """Bad input is reported before any engine is waited for."""
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1", "label": "2"}\n{\n')
    values = json.loads(json.dumps(values).replace("bad.jsonl", str(tmp_path / "bad.jsonl")))
    begun = time.monotonic()
    with Attempt(tmp_path / "run", model, None, published=False, engine_start_timeout=600, **values) as attempt:
        assert attempt.end(120) != 0 and time.monotonic() - begun < 120
        assert all(word in attempt.error() for word in words), attempt.error()
        assert "Traceback" not in attempt.log.read_text()


def test_fine_tuning_needs_no_engine(tmp_path: Path, model: Path) -> None:
    values = {
        "loss_type": "sft_loss",
        "n_samples_per_prompt": 1,
        "custom_rm_path": None,
        "num_rollout": None,
        "num_epoch": 3,
    }
    with Attempt(tmp_path / "run", model, **values) as attempt:
        assert attempt.begin() == 3 * (17 // GROUPS)
        shares, _ = attempt.step(0)
        attempt.call("finish", rollout_id=1)
        assert attempt.end() == 0
        (rows,) = attempt.samples().values()
        assert [row["response"] for row in rows] == [row["label"] for row in rows] and len(rows) == GROUPS
        tokenizer = make_tokenizer()
        for share in shares:
            offsets = share.batch.token_offsets
            texts = [tokenizer.decode(share.batch.tokens[a:b]) for a, b in pairwise(offsets)]
            by_group = {row["group"]: row for row in rows}
            expected = [by_group[int(g)] for g in share.batch.rows["group_index"]]
            assert texts == [f"<|user|>{row['prompt']}<|end|><|assistant|>{row['label']}<|end|>" for row in expected]
            assert share.batch.loss_mask.all() and len(share.batch.loss_mask) == sum(
                len(row["label"]) + 1 for row in expected
            )


def test_preferences_come_from_the_file_in_pairs(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1), "worse": "0"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"loss_type": "dpo_loss", "rejected_key": "worse", "ref_load": str(model), "n_samples_per_prompt": 2}
    more = {"custom_rm_path": None, "prompt_data": str(tmp_path / "pairs.jsonl")}
    with Attempt(tmp_path / "run", model, **values, **more) as attempt:
        attempt.begin()
        shares, _ = attempt.step(0)
        attempt.call("finish", rollout_id=1)
        assert attempt.end() == 0
        (written,) = attempt.samples().values()
        assert len(written) == 2 * GROUPS
        for better, worse in zip(written[::2], written[1::2], strict=True):
            assert better["group"] == worse["group"]
            assert (better["response"], better["reward"]) == (better["label"], 1.0)
            assert (worse["response"], worse["reward"]) == ("0", 0.0)
        for share in shares:
            for micro in (micro for step in share.micro_batches for micro in step):
                groups = share.batch.rows["group_index"][micro].tolist()
                assert sorted(groups) == sorted(2 * sorted(set(groups))), "both of a pair, together"


def test_fine_tuning_may_be_evaluated(tmp_path: Path, model: Path) -> None:
    with Attempt(tmp_path / "run", model, None, loss_type="sft_loss") as attempt:
        attempt.begin()
        attempt.step(0)
        assert attempt.engines[0].bodies == []
        assert attempt.call("evaluate", rollout_id=0, version=1)["held"]["n"] == 5
        attempt.call("finish", rollout_id=1)
        assert attempt.end() == 0


def test_an_evaluation_alone_needs_no_training_prompts(tmp_path: Path, model: Path) -> None:
    (tmp_path / "eval.yaml").write_text(
        "eval: {defaults: {n_samples_per_eval_prompt: 2, max_response_len: 3, temperature: 0.5}, datasets: ["
        f"{{name: a, path: {model}/held.jsonl, rm_type: random, top_p: 0.5}}, {{name: b, path: "
        f"'{model}/held.jsonl@[:2]', rm_type: exact}}]}}"
    )
    values = {"num_rollout": 0, "prompt_data": None, "eval_prompt_data": [], "eval_config": str(tmp_path / "eval.yaml")}
    with Attempt(tmp_path / "run", model, None, custom_rm_path=None, log_passrate=True, **values) as attempt:
        assert attempt.begin() == 0
        found = attempt.call("evaluate", rollout_id=-1, version=0)
        assert (found["a"]["n"], found["b"]["n"]) == (10, 4) and {"pass@1", "pass@2"} <= found["a"].keys()
        assert found["b"]["accuracy"] == 0.0 and 0 <= found["a"]["ci_low"] <= found["a"]["ci_high"] <= 1
        attempt.call("finish", rollout_id=0)
        assert attempt.end() == 0, attempt.log.read_text()
        assert [(name, len(rows)) for name, rows in attempt.samples().items()] == [
            ("eval-a--1.jsonl", 10),
            ("eval-b--1.jsonl", 4),
        ]
        assert {row["response_len"] <= 3 for row in attempt.samples()["eval-a--1.jsonl"]} == {True}


def test_an_evaluation_of_old_weights_is_an_error(tmp_path: Path, model: Path) -> None:
    with Attempt(tmp_path / "run", model, old_weights) as attempt:
        attempt.begin()
        with pytest.raises(HpcrlError, match="under policy versions 3 to 3, the trainer is at 4"):
            attempt.call("evaluate", rollout_id=3, version=4)
        assert "policy versions 3 to 3" in attempt.error(), "recorded before the trainer hears of it"
        assert attempt.end() == 1
        assert "policy versions 3 to 3" in attempt.error()


def test_sigterm_ends_it_quickly_and_is_no_failure(tmp_path: Path, model: Path) -> None:
    with Attempt(tmp_path / "run", model, hang) as attempt:
        attempt.begin()
        attempt.call("generate", rollout_id=0, version=0)
        attempt.process.send_signal(signal.SIGTERM)
        assert attempt.end(15) == 143
        assert attempt.rundir.failure() is None
        assert "Traceback" not in attempt.log.read_text()


def test_it_ends_when_another_role_has_failed(tmp_path: Path, model: Path) -> None:
    with Attempt(tmp_path / "run", model, hang) as attempt:
        attempt.begin()
        attempt.call("generate", rollout_id=0, version=0)
        attempt.rundir.fail("trainer", 1, "rank 1 is dead")
        assert attempt.end(20) == 1
        assert attempt.rundir.failure().message == "rank 1 is dead"


def test_custom_function_samples(tmp_path: Path, model: Path) -> None:
    """Fan-out: even responses are two samples; both are in the shares, the table and the sample files."""
    own = {"custom_generate_function_path": "tests.support.own_generates.fans_out", "num_steps_per_rollout": 2}
    with Attempt(tmp_path / "run", model, None, None, **own) as attempt:
        deadline = time.monotonic() + 90
        while (
            "prompts in" not in attempt.log.read_text() and time.monotonic() < deadline
        ):  # the function's process loads a tokenizer
            time.sleep(0.1)
        attempt.begin()
        evaluation = attempt.call("evaluate", rollout_id=-1, version=0)["held"]
        shares, _ = attempt.step(0)
        attempt.call("finish", rollout_id=1)
        assert attempt.end() == 0, attempt.log.read_text()
        rows = attempt.samples()["00000000.jsonl"]
    assert evaluation["n"] == 5 and evaluation["reward_errors"] == 0
    assert [(row["group"], row["index"]) for row in rows] == [(g, i) for g in range(GROUPS) for i in (0, 0, 1, 2, 2, 3)]
    assert shares[0].step_samples == [18, 18] and shares[0].table["reward"].tolist() == [row["reward"] for row in rows]
    assert {row["reward"] for row in rows} <= {0.0, 1.0, 2.0} and all(0 < row["response_len"] <= 3 for row in rows)
    assert len({row["response"] for row in rows}) > 12, "every request has noise of its own"


def test_uncallable_function_comes_before_engines(tmp_path: Path, model: Path) -> None:
    """A function that cannot be called ends the run before an engine is waited for."""
    path = "tests.support.own_generates.plain"
    with Attempt(tmp_path / "run", model, None, published=False, custom_generate_function_path=path) as attempt:
        assert attempt.end(60) == 2
        assert "is not async" in attempt.error() and f"--custom-generate-function-path {path}" in attempt.error()

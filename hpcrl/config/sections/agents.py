"""How an own function makes the samples: several turns, tools, environments, agents."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class AgentOptions(Base):
    """rollout: several turns, tools, agents (docs/customise.md)"""

    custom_generate_function_path: str | None = opt(
        None,
        "module.function that makes a response: async (args, sample, sampling_params) -> sample, list of samples, or None",
        "slime",
    )
    custom_generate_num_workers: int = opt(1, "processes that run it, many calls at once in each", ge=1)
    custom_generate_timeout: float = opt(
        300.0,
        "seconds that one call may take by the clock while it waits for no engine: tools, environments, own servers",
        gt=0,
    )
    custom_generate_max_failed: float = opt(
        0.1,
        "stop the run when more than this share of a rollout's calls fails; below it they earn 0 and train nothing",
        ge=0,
        le=1,
    )

"""How responses are graded."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class RewardOptions(Base):
    """rewards (docs/rewards.md)"""

    rm_type: str | list[str] | None = opt(
        None,
        "reward: a file of hpcrl/rollout/rewards/ such as math, boxed_NAME for the boxed part of the response, or module.function; "
        "several with weights are added up: math:1.0 my.brief:0.1; a prompt's metadata may name another",
        "slime",
    )
    custom_rm_path: str | None = opt(
        None,
        "module.function of an own reward: (options, sample, **kwargs) -> number or object, plain or async",
        "slime",
    )
    group_rm: bool = opt(False, "--custom-rm-path takes the list of a group's samples and returns a list", "slime")
    rm_url: str | None = opt(None, "where --rm-type remote_rm posts prompt, response and label", "slime")
    reward_key: str | None = opt(None, "key of the reward where a reward is an object", "slime")
    eval_reward_key: str | None = opt(None, "the same in evaluations; default --reward-key", "slime")
    reward_num_workers: int | None = opt(None, "processes that grade; default: the CPUs less one, 8 at most", ge=1)
    reward_cpu_limit: float = opt(
        5.0, "CPU seconds that one grading may use; reading and comparing takes a thousandth", gt=0
    )
    reward_timeout: float = opt(120.0, "seconds that one grading may take by the clock, whatever it waits for", gt=0)
    reward_memory_gb: float = opt(2.0, "GiB that one grading may take beyond what its process holds at its start", gt=0)
    reward_max_failed: float = opt(
        0.1, "stop the run when more than this share of a rollout's gradings fails; below it they count 0", ge=0, le=1
    )

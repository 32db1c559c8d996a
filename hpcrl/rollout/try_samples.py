"""A few prompts and responses to them, for `hpcrl try`: as a rollout process makes them, shown and not trained on.

    python -m hpcrl.rollout.try_samples DIR PROMPTS RESPONSES

Invariants: prompts are rendered, sampled and graded by the functions of a run; nothing is written but what is printed;
whatever a prompt or a response holds is shown as text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence

import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.report.sample_view import as_text, visible
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.rollout.engines.external import ExternalEngine
from hpcrl.rollout.grading.service import Tally
from hpcrl.rollout.inputs import RolloutInputs
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.custom import started
from hpcrl.rollout.samplers.sampler import ResponseRequest, Sampler, SingleTurnSampler
from hpcrl.run.code_files import use_code
from hpcrl.run.peers import publish
from hpcrl.run.process import die_with_parent, set_limits
from hpcrl.run.role import RoleContext, read_options, read_plan
from hpcrl.run.rundir import RunDir
from hpcrl.sample import Sample

SHOWN = 600  #: tokens of a prompt or a response that are shown


@dataclasses.dataclass
class Tried:
    """A response, and how long it took.

    Attributes:
        sampled, graded: seconds; of what a function of the user's makes, grading is part of sampling.
    """

    sample: Sample
    sampled: float
    graded: float


class OneTry:
    """The parts of a rollout process that make a sample."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.inputs = RolloutInputs(context)
        self.pool = EnginePool(context.rundir, context.plan, context.options)
        client = EngineClient(self.pool, self.inputs.tokenizer.vocab_size)
        self.sampler: Sampler = SingleTurnSampler(context.options, self.inputs.tokenizer, client, None)
        self.own = self.inputs.custom is not None
        if self.inputs.custom is not None:
            self.inputs.custom.use(client, lambda: self.pool.model_len)
            self.sampler = self.inputs.custom

    async def run(self, prompts: int, responses: int) -> None:
        """Show them."""
        try:
            peer = await ExternalEngine(self.context, 0, self.context.plan.external[0]).find()
            publish(self.context.rundir, peer, 0)
            await asyncio.gather(started(self.inputs.grading, self.inputs.custom), self.pool.connect())
            # over all prompts: with a limit of 1 nothing stops before each has been shown
            tally = self.inputs.grading and self.inputs.grading.tally("this try", prompts * responses, responses)
            for number, group in enumerate(self.inputs.source.next_groups(prompts)):
                tried = await self._group(group, responses, tally)
                grades = self.context.options.grades or self.own
                for line in group_lines(number, group, tried, self.inputs.tokenizer, grades):
                    print(line, flush=True)
        finally:
            self.pool.loads.close()
            await self.pool.close()
            for part in (self.inputs.custom, self.inputs.grading):
                if part is not None:
                    await part.close()

    async def _group(self, group: Group, responses: int, tally: Tally | None) -> list[Tried]:
        """All responses to a prompt at once, then their gradings."""
        made = await asyncio.gather(*(self._show_sample(group, index) for index in range(responses)))
        tried = [one for several in made for one in several]
        if tally is not None and not self.own:
            await asyncio.gather(*(self._graded(one, group, tally) for one in tried))
        return tried

    async def _show_sample(self, group: Group, index: int) -> list[Tried]:
        begun = time.monotonic()
        samples = await self.sampler.make(ResponseRequest(group, index, 0, 0))
        return [Tried(sample, time.monotonic() - begun, 0.0) for sample in samples]

    async def _graded(self, one: Tried, group: Group, tally: Tally) -> None:
        begun = time.monotonic()
        assert self.inputs.grading is not None
        await self.inputs.grading.grade(one.sample, group.prompt.where, tally)
        one.graded = time.monotonic() - begun


# ---- what is shown


def group_lines(number: int, group: Group, tried: Sequence[Tried], tokenizer: Tokenizer, grades: bool) -> list[str]:
    """A prompt with the responses to it.

    Args:
        grades: whether they have rewards, a reward of 0 included.
    """
    prompt = group.prompt
    lines = [f"prompt {number + 1}: {visible(prompt.where)}, {len(prompt.tokens)} tokens"]
    lines += _indented(marked(prompt.tokens, tokenizer))
    if prompt.label is not None:
        lines += ["  label", *_indented(visible(as_text(prompt.label)), 4)]
    for at, one in enumerate(tried):
        lines += [f"  response {at + 1}: {_numbers(one, grades)}"]
        sample = one.sample
        lines += _indented(marked(sample.array("tokens")[sample.prompt_length :], tokenizer), 4)
        if sample.grading:
            lines += [f"    not graded ({visible(sample.grading)}): {visible(sample.grading_error)}"]
    return [*lines, ""]


def _numbers(one: Tried, grades: bool) -> str:
    sample = one.sample
    words = [f"{sample.response_length} tokens, {visible(str(sample.status))}, {one.sampled:.2f} s"]
    if grades:
        parts = ", ".join(f"{visible(name)} {value:.4g}" for name, value in sample.rewards.items())
        took = f", graded in {one.graded:.2f} s" if one.graded else ""
        words.append(f"reward {sample.score:.4g}{f' ({parts})' if parts else ''}{took}")
    return "; ".join(words)


def marked(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Tokens (int32 [t]) as text with a bar between them; of many the first and the last."""
    words = [visible(tokenizer.spell(int(token))) for token in tokens]
    if len(words) > SHOWN:
        left = len(words) - SHOWN
        words = [*words[: SHOWN // 2], f" ... {left} tokens ... ", *words[-(SHOWN // 2) :]]
    return "|".join(words)


def _indented(text: str, by: int = 2) -> list[str]:
    return [" " * by + line for line in text.split("\n")]


def main(argv: Sequence[str]) -> int:
    die_with_parent()
    set_limits()
    rundir = RunDir(argv[0], 0)
    try:
        options = read_options(rundir)
        use_code(rundir.root, options.code_path)
        context = RoleContext(rundir, options, read_plan(rundir), 0)
        asyncio.run(OneTry(context).run(int(argv[1]), int(argv[2])))
        return 0
    except HpcrlError as error:
        print(f"hpcrl: error: {visible(str(error))}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

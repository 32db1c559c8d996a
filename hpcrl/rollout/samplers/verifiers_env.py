"""An environment of the `verifiers` package as a source of prompts and a maker of responses.

    python -m hpcrl.rollout.samplers.verifiers_env ENVIRONMENT --out DIR [--eval N] [--args JSON]
        writes the prompt files
    --custom-generate-function-path hpcrl.rollout.samplers.verifiers_env.Generate
        makes the responses

The environment holds the conversation and grades it; it asks the policy at the endpoint, so its tokens are exact.
Written for verifiers 0.1 (`load_environment`, `Environment.run_rollout`); hpcrl does not install it.

Invariant: nothing of the package is imported before one of the two is used, and what is missing or of another interface
is said.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.sample import Sample

#: of a prompt's metadata: {"environment": its name, "args": of load_environment, "input": the data set's row}
KEY = "verifiers"
INSTALL = "pip install 'verifiers>=0.1.10,<0.2' in the environment that runs hpcrl, and the environment's own package"


class Generate:
    """Makes responses.  One is made for each process that runs it, which keeps the environments that it has loaded."""

    def __init__(self) -> None:
        package()
        self._loaded: dict[str, Any] = {}

    async def __call__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
        """Have the environment make a response, at the endpoint; its reward and metrics are the sample's."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        asked = sample.metadata.get(KEY)
        if not isinstance(asked, dict) or "environment" not in asked:
            raise DataError(f"the prompt's metadata has no {KEY!r}", "write the prompt file with this module")
        name = json.dumps([asked["environment"], asked.get("args", {})], sort_keys=True)
        if name not in self._loaded:
            self._loaded[name] = load(asked["environment"], asked.get("args", {}))
        params = {"max_tokens": sampling_params["max_new_tokens"], "stop": sampling_params["stop"] or None}
        async with AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0) as client:
            found = await self._loaded[name].run_rollout(
                asked["input"], OpenAIChatCompletionsClient(client), "policy", {k: v for k, v in params.items() if v}
            )
        if error := found.get("error"):
            raise HpcrlError(f"the environment {asked['environment']} failed: {error}")
        sample.reward = found["reward"]
        sample.rewards = numbers(found.get("metrics"))


def numbers(metrics: Any) -> dict[str, float]:
    """The finite numbers of an environment's metrics."""
    named = metrics.items() if isinstance(metrics, dict) else ()
    return {str(name): float(value) for name, value in named if isinstance(value, int | float) and math.isfinite(value)}


def package() -> Any:
    """The package.

    Raises:
        UsageError: if it cannot be imported, or has another interface.
    """
    try:
        import verifiers
    except ImportError as error:
        raise UsageError(f"the Python package verifiers cannot be imported: {error}", INSTALL) from error
    try:
        found = verifiers.load_environment, verifiers.Environment.run_rollout
    except AttributeError as error:
        raise UsageError(f"the installed verifiers has another interface: {error}", INSTALL) from error
    assert found
    return verifiers


def load(environment: str, args: dict[str, Any]) -> Any:
    """An environment by its name.

    Raises:
        UsageError: with what the package says if it cannot be loaded.
    """
    try:
        return package().load_environment(environment, **args)
    except UsageError:
        raise
    except Exception as error:  # an environment is a program of its authors
        raise UsageError(
            f"the environment {environment} cannot be loaded: {type(error).__name__}: {error}", INSTALL
        ) from error


# ---- the prompt files


def rows(environment: str, args: dict[str, Any], dataset: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """A line of a prompt file for every row of an environment's data set.

    Raises:
        DataError: for one without a chat as prompt.
    """
    for number, row in enumerate(dataset):
        plain = json.loads(json.dumps(row, default=str))
        prompt = plain.get("prompt")
        if not isinstance(prompt, list) or not prompt:
            raise DataError(f"row {number} of the environment {environment} has no chat as its prompt")
        bare = [{k: v for k, v in message.items() if v is not None} for message in prompt]
        metadata = {KEY: {"environment": environment, "args": args, "input": plain | {"prompt": bare}}}
        yield {"prompt": bare, "label": plain.get("answer") or "", "metadata": metadata}


def write(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    """Write a prompt file; how many lines it has."""
    texts = [json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(texts), encoding="utf-8")
    return len(texts)


def written(out: Path, make: Callable[[], tuple[Iterable[dict[str, Any]], Iterable[dict[str, Any]]]]) -> int:
    """Write train.jsonl and heldout.jsonl, and say so; the exit status.

    Args:
        make: gives the lines of both, those of heldout.jsonl being read first.
    """
    try:
        train, held = make()
        out.mkdir(parents=True, exist_ok=True)
        counts = [write(out / name, lines) for name, lines in (("heldout.jsonl", held), ("train.jsonl", train))]
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{counts[1]} prompts in {out / 'train.jsonl'}, {counts[0]} in {out / 'heldout.jsonl'}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcrl.rollout.samplers.verifiers_env", description="Write train.jsonl and heldout.jsonl."
    )
    parser.add_argument("environment", help="name of the environment, as verifiers loads it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--eval", type=int, default=64, help="lines of heldout.jsonl")
    parser.add_argument("--args", type=json.loads, default={}, help="JSON object that the environment is loaded with")
    given = parser.parse_args()

    def lines() -> tuple[Iterable[dict[str, Any]], Iterable[dict[str, Any]]]:
        environment = load(given.environment, given.args)
        made = partial(rows, given.environment, given.args)
        return made(environment.get_dataset()), made(environment.get_eval_dataset(given.eval))

    return written(given.out, lines)


if __name__ == "__main__":
    sys.exit(main())

"""An environment of the verifiers package: one question, asked twice; half a point for each turn that says `ab`."""

from __future__ import annotations

from typing import Any


def load_environment(questions: int = 2) -> Any:
    import verifiers as vf
    from datasets import Dataset

    class Twice(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "more"}]

    def says(completion: Any) -> float:
        texts = [m["content"] if isinstance(m, dict) else m.content for m in completion]
        return sum(0.5 for text in texts if text == "ab")

    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(1, questions + 1)]
    return Twice(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[says]), max_turns=2)

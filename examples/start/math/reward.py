"""The reward: whatever `reward` returns for an answer is what the model is trained to get more of."""

import re


def reward(options, sample):
    """1 if the last number of the answer is the label, else up to 0.9 for the digits that agree, and 0.1 for digits."""
    answer = sample.response.replace("<|end|>", "").strip()
    number = (re.findall(r"\d+", answer) or [""])[-1]
    if number == sample.label:
        return 1.0
    agree = sum(mine == right for mine, right in zip(number, sample.label, strict=False))
    digits = sum(map(str.isdigit, answer)) / max(len(answer), 1)
    return 0.9 * agree / max(len(number), len(sample.label)) + 0.1 * digits

"""The reward: whatever `reward` returns for an answer is what the model is trained to get more of."""

import re


def reward(options, sample):
    """1 if the last number is the label; 0.3 for a call of the tool, twice that if it was one that has a value."""
    numbers = re.findall(r"\d+", sample.response)
    if numbers and numbers[-1] == sample.label:
        return 1.0
    if re.search(r"<call>\d+\*\d+", sample.response):
        return 0.6
    return 0.3 if "<call>" in sample.response else 0.0

"""The reward: whatever `reward` returns for an answer is what the GRPO stage trains the model to give more often."""


def reward(options, sample):
    """1.0 if the answer is the label, else 0.0."""
    answer = sample.response.replace("<|end|>", "").strip()
    return float(answer == sample.label)

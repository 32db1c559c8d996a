"""The rollout wing: prompts in, graded groups of samples out."""

"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

Each file holds `kl(difference, ratio) -> Tensor`, all [any], float:
    difference: log-prob under the policy minus log-prob under the reference, of tokens that the policy sampled.
    ratio: what each estimate is weighted by: with --use-unbiased-kl the probability under the policy
        over that under the old policy that sampled, else 1.
"""

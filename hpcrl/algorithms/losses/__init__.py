"""Policy losses: from log-probs, old log-probs and advantages to the loss of each token.

Each file holds `policy_loss(tokens, options) -> Terms`: see `interface.TokenBatch` for what it sees.  A loss of whole
responses returns the response's loss for each of its tokens, so that the mean over them is the response's.
"""

"""Policy losses: from log-probs, old log-probs and advantages to the loss of each token.

Each file holds `policy_loss(tokens, options) -> Terms`: see `interface.TokenBatch` for what it sees.  A loss of whole
responses returns the response's loss for each of its tokens, so that the mean over them is the response's.
"""

from __future__ import annotations

from hpcrl.config.options import Options


def clip_range(options: Options) -> tuple[float, float]:
    """(--eps-clip, --eps-clip-high): how far below and above 1 the ratio is clipped; the second defaults to the
    first."""
    return options.eps_clip, options.eps_clip if options.eps_clip_high is None else options.eps_clip_high

"""The making of a rollout: what is asked for, what comes of it, and which groups are the batch."""

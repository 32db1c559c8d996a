"""An engine that no run has started."""

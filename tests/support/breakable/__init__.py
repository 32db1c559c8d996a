"""An engine whose repairs of vLLM's CPU build a test can switch off: `python -m tests.support.breakable` instead of
hpcrl.engine.main."""

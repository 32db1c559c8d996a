"""An engine whose repairs of vLLM's CPU build a test can switch off: `python -m tests.breakable` instead of hpcrl.engine.main."""

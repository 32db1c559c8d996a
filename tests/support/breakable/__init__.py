"""An engine whose repairs of vLLM's CPU build a test can switch off: `python -m tests.support.breakable` instead of hpcrl.engine.main."""

FP8 = "HPCRL_TEST_FP8"  #: an environment variable: each process of a server that is not forked gets fp8_on_cpu.py

"""Kimi-K2: the layers of DeepSeek-V3 under a name of its own."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.models import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2", heads=(), copies={})  # published ones have no further layer

"""--rm-type exact: 1 if the whole response is the label, white space around either aside, else 0."""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.sample import Sample


class Exact:
    """Compares text with text."""

    def __str__(self) -> str:
        return "exact"

    async def __call__(self, sample: Sample) -> float:
        return float(sample.response.strip() == str(sample.label).strip())

    async def close(self) -> None:
        return None


def make(options: Options) -> Exact:
    return Exact()

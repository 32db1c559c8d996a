"""Products with adapters on CPUs give what vLLM's own give, for tokens of any slot and of none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

SLOTS, RANK, INPUTS = 3, 4, 6
COLUMNS = (5, 3)
#: requests (adapter of each, 0: none; their tokens) of a pass: mixed, of one adapter, of none
PASSES = {
    "mixed": ((2, 1, 0, 2, 3), (3, 1, 2, 2, 1)),
    "one": ((2, 2), (4, 1)),
    "none": ((0,), (3,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("name", [*PASSES])
def test_products_are_vllms(name: str, prefill: bool, dtype: torch.dtype) -> None:
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from hpcrl.engine.params.adapter_slot import AdapterProducts, replace_products

    requests, lengths = PASSES[name]
    tokens = tuple(one for one, length in zip(requests, lengths, strict=True) for _ in range(length))
    theirs = PunicaWrapperCPU(32, 8, torch.device("cpu"))
    layer = SimpleNamespace(punica_wrapper=theirs)
    layer.set_mapping = lambda wrapper: setattr(layer, "punica_wrapper", wrapper)
    manager = SimpleNamespace(punica_wrapper_mapping={"": theirs}, modules={"q": layer}, _last_mapping=object())
    replace_products(manager)
    assert isinstance(layer.punica_wrapper, AdapterProducts) and manager._last_mapping is None

    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(len(tokens), n, generator=draw).to(dtype) for n in (INPUTS, sum(COLUMNS)))
    a = tuple(torch.randn(SLOTS, 1, RANK, INPUTS, generator=draw).to(dtype) for _ in COLUMNS)
    b = tuple(torch.randn(SLOTS, 1, n, RANK, generator=draw).to(dtype) for n in COLUMNS)
    found: list[torch.Tensor] = []
    for wrapper in (theirs, layer.punica_wrapper):
        wrapper.update_metadata(LoRAMapping(tokens, requests, is_prefill=prefill), [1, 2, 3], SLOTS, 100)
        out = y.clone()
        wrapper.add_lora_linear(out, x, a, b, 0.5, COLUMNS)
        found.append(out)
    under = torch.tensor(tokens) > 0  # vLLM's gives tokens under none the last slot's products, while it decodes
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found[1][under], found[0][under], **close)
    assert torch.equal(found[1][~under], y[~under])
    assert not bool(under.any()) or not torch.allclose(found[1], y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_others(dtype: torch.dtype) -> None:
    """To the last bit, however many are computed with it."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from hpcrl.engine.params.adapter_slot import AdapterProducts

    draw = torch.Generator().manual_seed(2)
    inputs, columns, rank, most = 320, 960, 8, 64
    a = (torch.randn(1, 1, rank, inputs, generator=draw).to(dtype),)
    b = (torch.randn(1, 1, columns, rank, generator=draw).to(dtype),)
    x = torch.randn(most, inputs, generator=draw).to(dtype)
    products = AdapterProducts(PunicaWrapperCPU(most, most, torch.device("cpu")))

    def of(rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        products.update_metadata(LoRAMapping((1,) * count, (1,) * count, is_prefill=False), [1], 1, 100)
        out = torch.zeros(count, columns, dtype=dtype)
        products.add_lora_linear(out, rows, a, b, 1.0, (columns,))
        return out

    alone = torch.cat([of(row) for row in x.split(1)])
    for count in (2, 3, 5, 8, 16, 33, most):
        assert torch.equal(of(x[:count]), alone[:count]), count

"""Results of operations by the shapes of their arguments: FakeTensorMode finds each once, and is asked no more.

Invariant: only what is new, an argument itself or nothing comes from memory; a view is made by torch itself, of the
memory that it is a view of; what depends on values is always FakeTensorMode's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten
#: operations that give views of their first argument, and look at nothing but its shape
VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.as_strided.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}
#: of a result: (shape, strides, dtype, device), the place of an argument, or None for no result
Made = tuple[Any, ...] | int | None
PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(None))


class ShapeCache:
    """What operations give under `mode`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._known: dict[Any, tuple[Made, ...] | Made | list[Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` under the mode, at once if it has been there with arguments of these shapes."""
        if func in VIEWS and type(args[0]) is FakeTensor:
            with in_kernel_invocation_manager(self._mode):
                found = func(*args, **kwargs)
            device = args[0].fake_device
            if isinstance(found, torch.Tensor):
                return self._fake(found, device)
            return [self._fake(each, device) for each in found]
        key = _key(args) if not kwargs else _key((*args, *sorted(kwargs.items())))
        if key is None:
            return self._compute(func, args, kwargs)
        key = (id(func), key)  # operations are never freed
        if key in self._known:
            return self._again(self._known[key], args)
        found = self._compute(func, args, kwargs)
        made = _recipe_of(found, args)
        if made is not NotImplemented:
            self._known[key] = made
        return found

    def _compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._mode:
            return func(*args, **kwargs)

    def _again(self, made: Any, args: tuple[Any, ...]) -> Any:
        if made is None:
            return None
        if isinstance(made, int):
            return args[made]
        if isinstance(made, list):
            return tuple(self._again(each, args) for each in made)
        shape, strides, dtype, device = made
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return self._fake(meta, device)

    def _fake(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """As FakeTensor makes one: all of a device have the same attributes, which it looks at one by one."""
        if device not in self._attributes:
            first = FakeTensor(self._mode, meta, device)
            self._attributes[device] = dict(vars(first))
            return first
        made = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made


def _key(values: Any) -> Any:
    """What tells one call from another; None: not for this cache."""
    found: list[Any] = []
    for value in values:
        if type(value) is FakeTensor:
            found.append((value.shape, value.stride(), value.dtype, value.fake_device))
        elif isinstance(value, PLAIN):
            found.append((type(value), value))
        elif isinstance(value, (list, tuple)):
            inside = _key(value)
            if inside is None:
                return None
            found.append(inside)
        else:
            return None
    return tuple(found)


def _recipe_of(found: Any, args: tuple[Any, ...]) -> Any:
    """How a result is made again; NotImplemented where it cannot be."""
    if found is None:
        return None
    if isinstance(found, tuple):
        parts = [_recipe_of(each, args) for each in found]
        return NotImplemented if any(part is NotImplemented for part in parts) else parts
    if not isinstance(found, FakeTensor):
        return NotImplemented
    for place, value in enumerate(args):
        if value is found:
            return place
    memory = found.untyped_storage()._cdata
    if any(memory == other.untyped_storage()._cdata for other in _tensors(args)) or found.storage_offset():
        return NotImplemented
    return (found.shape, found.stride(), found.dtype, found.fake_device)


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found

"""torch's part of the table of safe constructors: sizes, devices, dtypes, layouts, generators.

Source: torch 2.13, ``__reduce__`` of the classes; ``torch/serialization.py`` (``_get_layout``).
"""

from __future__ import annotations

from typing import Any

import torch

from core.dist_checkpointing._values.constructors import (
    Args,
    ContainerConstructor,
    Name,
    ValueConstructor,
    require,
)
from core.pickle.inert import NO_STATE


def _size(args: Args, state: Any) -> object:
    require(len(args) <= 1 and state is NO_STATE)
    extents = args[0] if args else ()
    require(
        type(extents) in (tuple, list, torch.Size)
        and all(type(n) is int and 0 <= n < 1 << 63 for n in extents)
    )
    return torch.Size(extents)


def _device(args: Args, state: Any) -> object:
    require(
        1 <= len(args) <= 2 and type(args[0]) is str and all(type(arg) is int for arg in args[1:])
    )
    return torch.device(*args)


def _layout(args: Args, state: Any) -> object:
    # torch pickles a layout as a call with its printed name, such as "torch.strided".
    layout = _LAYOUTS.get(args[0]) if len(args) == 1 and type(args[0]) is str else None
    return NotImplemented if layout is None else layout


def _generator(args: Args, state: Any) -> object:
    """Rebuild a generator on its device, from the state (seed, offset, state tensor)."""
    require(len(args) <= 1 and (not args or isinstance(args[0], torch.device)))
    generator = torch.Generator(device=args[0] if args else "cpu")
    if state is not NO_STATE:
        require(type(state) is tuple and len(state) == 3 and isinstance(state[2], torch.Tensor))
        # The tensor contains the complete state of the generator, including seed and offset.
        generator.set_state(state[2])
    return generator


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}

_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
"""Classes whose instances are pickled as names in the module ``torch``."""

CONSTRUCTORS: dict[Name, ValueConstructor | ContainerConstructor] = {
    ("torch", "Size"): ValueConstructor(_size),
    ("torch", "device"): ValueConstructor(_device),
    ("torch.serialization", "_get_layout"): ValueConstructor(_layout),
    ("torch", "Generator"): ValueConstructor(_generator),
    ("torch._C", "Generator"): ValueConstructor(_generator),
}

CLASSES: dict[Name, object] = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, _VALUES)},
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch", "dtype"): torch.dtype,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
}

"""The number of steps of an optimizer: one number in Megatron, elsewhere one of each parameter.

::

    optimizer.param_groups[…]["step"] = 3        Megatron, with the Adam of Apex or TE
    optimizer.state.common_step = tensor(3.)     Megatron, with torch's Adam
    optimizer.state.<parameter>.step             torch and DeepSpeed: float32, shape ()

A number becomes a float32 tensor, as torch.optim has it. torch's Adam refuses a step that is not a
tensor.

Source: torch 2.13 ``optim/adam.py``; megatron-core 0.16.1 ``core/optimizer/distrib_optimizer.py``;
DeepSpeed 0.19.8 ``runtime/base_optimizer.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.arrays.box import full_box
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import Optimizer
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Tensor, whole_tensor
from core.engine.quantize.source import source_of
from core.errors import CorruptError, UnsupportedError
from core.hf.optimizer.states import STEP, named_state_key
from core.pickle.fields import FieldReader
from core.pickle.inert import TensorLeaf
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_FORMATS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}
"""Element type of a step → format of ``struct``."""


@dataclass(frozen=True, slots=True)
class StepNumber:
    """The encoding of a float32 tensor that is a known number of steps.

    Args:
        n_steps: the number.
    """

    n_steps: int

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return f"step {self.n_steps}"

    @property
    def unit_bytes(self) -> int:
        """Size of the only unit: one float32."""
        return 4

    @property
    def working_bytes(self) -> int:
        """Maximum memory for decoding: nothing but the unit."""
        return 0

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        """Return the number as float32."""
        return struct.pack("<f", self.n_steps)


def step_of_megatron(catalog: Catalog, optimizer: Optimizer) -> Tensor | None:
    """Return the number of steps of an optimizer in Megatron's global form; None if it has none.

    Returns:
        A tensor with the number; all ranks' copies are its fragments.

    Raises:
        UnsupportedError: the groups have different numbers.
    """
    if isinstance(optimizer.step, TensorLeaf):
        key = optimizer.step.key
        return catalog.tensor(key)
    # Groups that no rank had parameters of count no steps, or count from 0.
    numbers = {
        int(step) if isinstance(step, (int, float)) else step
        for group in optimizer.groups
        if (step := group.settings.get(STEP)) is not None and group.params != ()
    }
    if isinstance(optimizer.step, (int, float)):
        numbers = {int(optimizer.step)}
    if not numbers:
        return None
    number, *others = sorted(numbers, key=str)
    if others or not isinstance(number, int):
        raise UnsupportedError(
            "the optimizer's groups have taken different numbers of steps: "
            + " and ".join(map(str, (number, *others))),
            hint="drop the optimizer with --no-optim",
        )
    file = source_of(catalog, next(iter(catalog.tensors))).file
    array = StoredArray(STEP, "float32", (), Extent(file, 0, encoding=StepNumber(number)))
    return whole_tensor(array)


def read_steps(catalog: Catalog, names: Sequence[str], store: ReadStore) -> int | None:
    """Return the number of steps that all parameters have taken; None if it is not recorded.

    Args:
        catalog: weights and states under Hugging Face's names.
        names: names of the trained parameters.
        store: the checkpoint's files.

    Raises:
        UnsupportedError: parameters have taken different numbers of steps.
        CorruptError: a step is not a whole number.
    """
    first: tuple[str, int] | None = None
    for name in names:
        key = named_state_key(name, STEP)
        if key in catalog.tensors:
            tensor = catalog.tensors[key]
            layout = _FORMATS.get(tensor.dtype)
            if layout is None or tensor.n_elements != 1:
                raise CorruptError(
                    f"the number of steps must be a single number, but is a {tensor.dtype} tensor "
                    f"of shape {tensor.shape}",
                    key=key,
                )
            data = source_of(catalog, key).read(store, full_box(tensor.shape))
            steps = _whole(struct.unpack(layout, data)[0], key)
        elif key in catalog.objects:
            steps = _whole(catalog.objects[key].value, key)
        else:
            continue
        first = first or (key, steps)
        if steps != first[1]:
            raise UnsupportedError(
                f"the step count is {steps} for this parameter, but {first[1]} in {first[0]}; "
                "Megatron has a single step count for all parameters",
                key=key,
                hint="drop the optimizer with --no-optim",
            )
    return None if first is None else first[1]


def _whole(value: object, key: str) -> int:
    """Return a number of steps as an integer."""
    number = FieldReader(key=key).read_number(value, "the number of steps")
    if number != int(number):
        raise CorruptError(f"the number of steps is {number}, not a whole number", key=key)
    return int(number)

"""The weights in model files: buffers, frozen and shared parameters, and unlisted ones.

All other weights are in the flat groups of the optimizer files.

16-bit buffers are read as float32, as DeepSpeed's own tools convert them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.engine.catalog.dropped import Dropped, dropped_each
from core.engine.catalog.flat_runs import FlatRun, tensor_of_runs
from core.engine.catalog.key_patterns import some_of
from core.engine.catalog.tensor import Tensor, whole_tensor
from core.errors import CheckpointingException, MissingShardError, UnsafeError
from core.formats.deepspeed.runs import reshaped
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore
    from core.formats.deepspeed.model_states import ModelStates


def buffers(model: ModelStates) -> dict[str, Tensor]:
    """Return the buffers of the module, those of 16 bits as float32."""
    return {
        name: whole_tensor(as_float32(model.module[name]))
        for name in model.buffers
        if name in model.module
    }


def frozen(models: Sequence[ModelStates], stage: int) -> dict[str, Tensor]:
    """Return the frozen parameters: complete in ZeRO-2, a part on every rank in ZeRO-3.

    Raises:
        MissingShardError: a model file lacks its part of a frozen parameter.
        CorruptError: a part has another size than the shape requires.
    """
    tensors: dict[str, Tensor] = {}
    for name, shape in models[0].frozen.items():
        # Every model file lists all frozen parameters, and has its own part of them.
        arrays = []
        for model in models:
            if name not in model.fragments:
                raise MissingShardError(
                    "frozen_param_shapes lists the parameter, but frozen_param_fragments does "
                    "not contain it",
                    file=model.state.file,
                    key=name,
                )
            arrays.append(model.fragments[name])
        if stage == 3:
            tensors[name] = _frozen_3(models, name, shape, arrays)
            continue
        # Stored with its own shape, or flattened.
        array = arrays[0]
        if array.shape != shape:
            if prod(array.shape) != prod(shape) or array.extent.strides is not None:
                raise models[0].state.mismatch(
                    f"the frozen parameter has shape {array.shape}, not {shape}", key=name
                )
            array = reshaped(array, shape)
        tensors[name] = whole_tensor(array)
    return tensors


def _frozen_3(
    models: Sequence[ModelStates], name: str, shape: Shape, arrays: Sequence[StoredArray]
) -> Tensor:
    """Return a frozen parameter of ZeRO-3, of which every rank has a part.

    Args:
        arrays: the parts, by rank; each has ``ceil(n / ranks)`` elements, the last ones padding.

    Raises:
        CorruptError: a part has another size.
    """
    n = prod(shape)
    part = -(-n // len(models))
    flat = []
    for model, array in zip(models, arrays, strict=True):
        if prod(array.shape) != part or array.extent.strides is not None:
            raise model.state.mismatch(
                f"this rank's part of the frozen parameter has shape {array.shape}, not {part} "
                "elements",
                key=name,
            )
        flat.append(reshaped(array, (part,)))

    def runs() -> Iterator[FlatRun]:
        for rank, array in enumerate(flat):
            start, stop = rank * part, min((rank + 1) * part, n)
            if start < stop:
                yield FlatRun(start, stop - start, array, 0)

    return tensor_of_runs(arrays[0].dtype, shape, runs)


def unlisted_weights(
    model: ModelStates, listed: Mapping[str, Tensor], stage: int
) -> tuple[dict[str, Tensor], list[str], tuple[Dropped, ...]]:
    """Return the parameters that only the module contains.

    Args:
        listed: the weights that are known from other entries.
        stage: ZeRO stage, 1 to 3.

    Returns:
        The parameters by name, notes to the user, and the record of those whose data is not stored.
    """
    names = [name for name in model.module if name not in listed and name not in model.shared]
    # ZeRO-3 stores empty tensors in the module, in place of parameters that it partitions.
    lost = [name for name in names if stage == 3 and 0 in model.module[name].shape]
    names = [name for name in names if name not in lost]
    notes = []
    if names:
        notes.append(
            "parameters in no optimizer group were read from the model file in their own "
            f"precision: {some_of(names)} (zero_to_fp32 omits them)"
        )
    tensors = {name: whole_tensor(model.module[name]) for name in names}
    return tensors, notes, dropped_each(lost, "ZeRO-3 does not store the parameter's parts")


def with_shared(model: ModelStates, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with shared parameters added, each tied to its owner."""
    tensors = dict(weights)
    for name, owner in model.shared.items():
        if owner in tensors and name not in tensors:
            tensors[name] = tensors[owner]
    return tensors


def advise_no_optim(
    err: CheckpointingException,
    store: ReadStore,
    read_weights: Callable[[ReadStore], Catalog],
    what: str,
) -> None:
    """Add to an error's hint that ``--no-optim`` leaves the optimizer out, if that is enough.

    Args:
        read_weights: reads the weights without the optimizer (``Format.read_weights``).
        what: what ``--no-optim`` does.

    Raises:
        UnsafeError: a pickle is hostile.
    """
    if "--no-optim" in (err.hint or ""):
        return
    try:
        read_weights(store)
    except UnsafeError:
        raise
    except CheckpointingException:
        return
    err.hint = "; or ".join(filter(None, (err.hint, f"convert with --no-optim, which {what}")))


_UNIT_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Widened:
    """An encoding (``core.engine.catalog.stored``): 16-bit floats without gaps, read as float32.

    Args:
        dtype: the stored dtype, ``bfloat16`` or ``float16``.
    """

    dtype: str

    @property
    def name(self) -> str:
        """Name of the encoding, for messages."""
        return f"{self.dtype} as float32"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit, in bytes."""
        return 4 * _UNIT_ELEMENTS

    @property
    def working_bytes(self) -> int:
        """Memory needed for decoding a unit, in bytes."""
        return (itemsize(self.dtype) + 4) * _UNIT_ELEMENTS

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        """Read a unit and return its elements as float32."""
        import numpy as np

        first = unit * _UNIT_ELEMENTS
        n = min(_UNIT_ELEMENTS, array.n_bytes // 4 - first)
        data = store.read(array.extent.file, array.extent.offset + 2 * first, 2 * n)
        if self.dtype == "float16":
            wide = np.frombuffer(data, "<f2").astype("<f4")
        else:
            # bfloat16 is the upper half of a float32; numpy has no such type.
            wide = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        return bytes(wide.data)


def as_float32(array: StoredArray) -> StoredArray:
    """Return a 16-bit floating-point array without gaps as float32, any other array unchanged."""
    extent = array.extent
    if array.dtype not in ("bfloat16", "float16") or extent.strides is not None:
        return array
    return replace(
        array, dtype="float32", extent=replace(extent, encoding=Widened(array.dtype), crc=None)
    )

"""What distrib_optim.pt holds: the distributed optimizer's flat buffers.

::

    {'buckets_coalesced': True,
     0: {(torch.bfloat16, torch.float32): {'param': fp32[n], 'exp_avg': fp32[n], 'exp_avg_sq':
                                           fp32[n], 'numel_unpadded': n}},
     1: …}                                 one entry a buffer: (dtype of the parameters, dtype of their gradients)
    [that of dense parameters | None, that of experts | None]      of chained optimizers; None where another rank has it
    {0: {torch.float32: {'param': [fp32[m], …], …}}}               before 2024-02-13: a list of buckets

torch_dist's ``dp_zero_gather_scatter`` keeps the same in an object.

Source: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/distrib_optimizer.py``
(``get_parameter_state_dp_zero``, ``load_parameter_state_from_dp_zero_legacy``), tests/golden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.arrays.dtypes import DTYPES
from core.catalog.file_image import JoinedArray
from core.catalog.optimizer_keys import MASTER
from core.catalog.stored import StoredArray
from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import Global, TensorLeaf, as_mapping

COALESCED = "buckets_coalesced"
N_ELEMENTS = "numel_unpadded"
PARAM = "param"
"""Name of the masters in files."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer as a file has it.

    Args:
        number: number of the buffer in the file.
        dtype: dtype of the parameters; None where the file does not say (before 2024-02).
        states: state → consecutive arrays of one axis; the masters are
            ``core.catalog.optimizer_keys.MASTER``.
        n_elements: elements of each state.
        buckets: elements of every bucket, where the file says.
    """

    number: int
    dtype: str | None
    states: Mapping[str, tuple[StoredArray, ...]]
    n_elements: int
    buckets: tuple[int, ...] | None

    def place_of(self, state: str, start: int) -> tuple[StoredArray, int]:
        """Return the array that holds an element of a state, and the element's number in it."""
        arrays = self.states[state]
        for array in arrays:
            if start < array.shape[0]:
                return array, start
            start -= array.shape[0]
        raise ValueError(f"element {start} beyond the buffer")


@dataclass(frozen=True, slots=True)
class OptimFile:
    """A distrib_optim.pt that is to be written.

    Args:
        content: tree of the file.
        joined: key of each leaf → the flat array.
    """

    content: object
    joined: Mapping[str, JoinedArray]


def members_of(content: object, *, rank: str) -> list[Mapping[object, object] | None]:
    """Return the optimizers of a file: one, or several that are chained.

    None stands for an optimizer that another rank has.

    Raises:
        CorruptError: the content is neither.
    """
    items = content if isinstance(content, list) else [content]
    members: list[Mapping[object, object] | None] = []
    for member in items:
        mapping = as_mapping(member)
        if mapping is None and (member is not None or not isinstance(content, list)):
            raise CorruptError(
                f"the optimizer's buffers are a {type(member).__name__}, not a dict", rank=rank
            )
        members.append(mapping)
    return members


def buffers_of(
    member: Mapping[object, object], array_of: Callable[[TensorLeaf], StoredArray], *, rank: str
) -> list[Buffer]:
    """Return the buffers of one optimizer, in order.

    Raises:
        CorruptError: an entry is not what Megatron writes, or lengths differ.
        UnsupportedError: parameters of FP8.
    """
    entries = {
        number: as_mapping(value) for number, value in member.items() if isinstance(number, int)
    }
    entries = {number: value for number, value in entries.items() if not isinstance(number, bool)}
    unknown = [key for key in member if key not in entries and key not in (COALESCED, *_PER_BUCKET)]
    if unknown or sorted(entries) != list(range(len(entries))):
        raise CorruptError(
            f"the optimizer's buffers are {[*entries, *unknown]}, not numbered from 0", rank=rank
        )
    return [_buffer(number, entries[number], array_of, rank=rank) for number in range(len(entries))]


_PER_BUCKET = ("per_bucket_numel", "per_bucket_numel_unpadded")


def _buffer(
    number: int,
    entry: Mapping[object, object] | None,
    array_of: Callable[[TensorLeaf], StoredArray],
    *,
    rank: str,
) -> Buffer:
    """Return one buffer of an optimizer."""
    if entry is None or len(entry) != 1:
        raise CorruptError(f"buffer {number} should have one entry, by its dtypes", rank=rank)
    ((key, value),) = entry.items()
    tensors = as_mapping(value) or {}
    dtype = dtype_of_key(key, where=f"buffer {number}", rank=rank)

    # Entries that are not tensors, such as the number of elements, are not states.
    states: dict[str, tuple[StoredArray, ...]] = {}
    for name, value_of_state in tensors.items():
        leaves = value_of_state if isinstance(value_of_state, list) else [value_of_state]
        arrays = tuple(array_of(leaf) for leaf in leaves if isinstance(leaf, TensorLeaf))
        if arrays and len(arrays) == len(leaves):
            states[MASTER if name == PARAM else str(name)] = arrays
    if MASTER not in states:
        raise CorruptError(f"buffer {number} has no masters ({PARAM!r})", rank=rank)
    lengths = _checked_lengths(number, states, tensors, rank=rank)
    is_listed = isinstance(tensors.get(PARAM), list)
    return Buffer(number, dtype, states, sum(lengths), lengths if is_listed else None)


def _checked_lengths(
    number: int,
    states: Mapping[str, Sequence[StoredArray]],
    tensors: Mapping[object, object],
    *,
    rank: str,
) -> tuple[int, ...]:
    """Return the elements of each array of a state.

    All states must have the same, and they must add up to the number that the file states.
    """
    lengths = {
        state: tuple(_length(array, rank) for array in arrays) for state, arrays in states.items()
    }
    expected = lengths[MASTER]
    for state, length in lengths.items():
        if length != expected:
            raise CorruptError(
                f"state {state} of buffer {number} has {length} elements, not {expected}", rank=rank
            )
    stated = tensors.get(N_ELEMENTS, sum(expected))
    if stated != sum(expected):
        raise CorruptError(
            f"buffer {number} should have {stated} elements, but has {sum(expected)}", rank=rank
        )
    return expected


def _length(array: StoredArray, rank: str) -> int:
    if len(array.shape) != 1:
        raise CorruptError(f"a flat buffer has the shape {array.shape}", key=array.name, rank=rank)
    return array.shape[0]


def dtype_of_key(key: object, *, where: str, rank: str) -> str | None:
    """Return the parameters' dtype that a buffer's key states.

    None for a key that only states the gradients' dtype.

    Raises:
        CorruptError: the key states no dtype.
        UnsupportedError: the dtype is that of FP8 parameters.
    """
    if isinstance(key, Global):
        return None
    names: Sequence[object] = key if isinstance(key, tuple) else ()
    if len(names) != 2 or not all(
        isinstance(name, Global) and name.module == "torch" for name in names
    ):
        raise CorruptError(f"{where} is called {key!r}, which is not a pair of dtypes", rank=rank)
    name = names[0].name if isinstance(names[0], Global) else ""
    return checked_dtype(name, where=where, rank=rank)


def checked_dtype(name: str, *, where: str, rank: str) -> str:
    """Return a dtype of parameters by torch's name.

    Raises:
        CorruptError: the dtype is not known.
        UnsupportedError: the parameters are FP8.
    """
    if name == "uint8":
        raise UnsupportedError(
            f"{where} is that of FP8 parameters (--fp8-param-gather); which parameters are in it is not stored",
            rank=rank,
            hint="load and save the checkpoint once without --fp8-param-gather, or leave the optimizer out with "
            "--no-optim",
        )
    if name not in DTYPES:
        raise CorruptError(f"{where} is of the dtype {name!r}, which is not known", rank=rank)
    return name

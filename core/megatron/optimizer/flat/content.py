"""The content of distrib_optim.pt: the distributed optimizer's flat buffers.

::

    {'buckets_coalesced': True,
     0: {(torch.bfloat16, torch.float32):  buffer 0: dtypes of parameters and of their gradients
           {'param': fp32[n],              master weights
            'exp_avg': fp32[n], 'exp_avg_sq': fp32[n], 'numel_unpadded': n}},
     1: …}

    [{…} | None, {…} | None]               chained optimizers: of dense parameters, of experts;
                                           None if another rank has the optimizer
    {0: {torch.float32: {'param': [fp32[m], …], …}}}   before 2024-02-13: a list of buckets

torch_dist's ``dp_zero_gather_scatter`` stores the same tree in an object.

Source: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/distrib_optimizer.py``
(``get_parameter_state_dp_zero``, ``load_parameter_state_from_dp_zero_legacy``), tests/golden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from core.arrays.dtypes import DTYPES
from core.engine.catalog.file_image import JoinedArray
from core.engine.catalog.optimizer_keys import MASTER
from core.engine.catalog.stored import StoredArray
from core.errors import CorruptError, UnsupportedError
from core.pickle.fields import FieldReader
from core.pickle.inert import Global, TensorLeaf, as_mapping
from core.values import dataclass

COALESCED = "buckets_coalesced"
N_ELEMENTS = "numel_unpadded"
PARAM = "param"
"""Name of the master weights in files."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of a file.

    Args:
        number: number of the buffer in the file.
        dtype: dtype of the parameters; None if the file does not record it (before 2024-02).
        states: state → consecutive arrays of one axis; the master weights are
            ``core.engine.catalog.optimizer_keys.MASTER``.
        n_elements: number of elements of each state.
        buckets: number of elements of every bucket; None if the file does not record it.
    """

    number: int
    dtype: str | None
    states: Mapping[str, tuple[StoredArray, ...]]
    n_elements: int
    buckets: tuple[int, ...] | None

    def place_of(self, state: str, start: int) -> tuple[StoredArray, int]:
        """Return the array that holds an element of a state, and the element's index in it.

        Raises:
            ValueError: the buffer has fewer elements.
        """
        arrays = self.states[state]
        for array in arrays:
            if start < array.shape[0]:
                return array, start
            start -= array.shape[0]
        raise ValueError(f"element {start} is past the end of the buffer")


@dataclass(frozen=True, slots=True)
class OptimFile:
    """A distrib_optim.pt that is to be written.

    Args:
        content: tree of the file.
        joined: key of each leaf → flat array of all its parameters.
    """

    content: object
    joined: Mapping[str, JoinedArray]


def members_of(content: object, *, rank: str) -> list[Mapping[object, object] | None]:
    """Return the optimizers of a file: one, or several that are chained.

    None stands for an optimizer that another rank has.

    Raises:
        CorruptError: an optimizer is not a dict.
    """
    read_mapping, name = FieldReader(rank=rank).read_mapping, "the content of an optimizer"
    if not isinstance(content, list):
        return [read_mapping(content, name)]
    return [None if member is None else read_mapping(member, name) for member in content]


def buffers_of(
    member: Mapping[object, object], array_of: Callable[[TensorLeaf], StoredArray], *, rank: str
) -> list[Buffer]:
    """Return the buffers of one optimizer, in order.

    Raises:
        CorruptError: an entry differs from what Megatron writes, or lengths differ.
        UnsupportedError: the parameters are FP8.
    """
    entries = {
        number: as_mapping(value)
        for number, value in member.items()
        if isinstance(number, int) and not isinstance(number, bool)
    }
    unknown = [key for key in member if key not in entries and key not in (COALESCED, *_PER_BUCKET)]
    if unknown or sorted(entries) != list(range(len(entries))):
        raise CorruptError(
            "the optimizer's buffers should be numbered from 0, but are named "
            f"{', '.join(map(str, [*entries, *unknown]))}",
            rank=rank,
        )
    return [
        _read_buffer(number, entries[number], array_of, rank=rank) for number in range(len(entries))
    ]


_PER_BUCKET = ("per_bucket_numel", "per_bucket_numel_unpadded")


def _read_buffer(
    number: int,
    entry: Mapping[object, object] | None,
    array_of: Callable[[TensorLeaf], StoredArray],
    *,
    rank: str,
) -> Buffer:
    """Read one buffer of an optimizer."""
    # The only entry's key contains the dtypes.
    if entry is None or len(entry) != 1:
        problem = "is not a dict" if entry is None else f"has {len(entry)} entries"
        raise CorruptError(
            f"buffer {number} {problem}; expected a dict with one entry, whose key is a pair of "
            "dtypes",
            rank=rank,
        )
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
        raise CorruptError(f"buffer {number} has no master weights ({PARAM!r})", rank=rank)

    # All states have the same lengths, which add up to the recorded number of elements.
    lengths = _lengths_of_states(number, states, rank=rank)
    n_recorded = tensors.get(N_ELEMENTS, sum(lengths))
    if n_recorded != sum(lengths):
        raise CorruptError(
            f"buffer {number} should have {n_recorded} elements, but has {sum(lengths)}", rank=rank
        )
    is_listed = isinstance(tensors.get(PARAM), list)
    return Buffer(number, dtype, states, sum(lengths), lengths if is_listed else None)


def _lengths_of_states(
    number: int, states: Mapping[str, Sequence[StoredArray]], *, rank: str
) -> tuple[int, ...]:
    """Return the lengths of a state's arrays, which must be flat, and equal for all states."""
    for array in chain.from_iterable(states.values()):
        if len(array.shape) != 1:
            raise CorruptError(
                f"a flat buffer must have one axis, but has shape {array.shape}",
                key=array.name,
                rank=rank,
            )
    lengths = {state: tuple(array.shape[0] for array in arrays) for state, arrays in states.items()}
    expected = lengths[MASTER]
    for state, state_lengths in lengths.items():
        if state_lengths != expected:
            raise CorruptError(
                f"state {state} of buffer {number} has {' + '.join(map(str, state_lengths))} "
                f"elements, but its master weights have {' + '.join(map(str, expected))}",
                rank=rank,
            )
    return expected


def dtype_of_key(key: object, *, where: str, rank: str) -> str | None:
    """Return the parameters' dtype from a buffer's key; None if it has the gradients' dtype only.

    Raises:
        CorruptError: the key does not consist of dtypes.
        UnsupportedError: the parameters are FP8.
    """
    if isinstance(key, Global):
        return None
    names: Sequence[object] = key if isinstance(key, tuple) else ()
    if len(names) != 2 or not all(
        isinstance(name, Global) and name.module == "torch" for name in names
    ):
        raise CorruptError(f"{where} has the key {key!r}, not a pair of dtypes", rank=rank)
    name = names[0].name if isinstance(names[0], Global) else ""
    return checked_dtype(name, where=where, rank=rank)


def checked_dtype(name: str, *, where: str, rank: str) -> str:
    """Check the dtype of a buffer's parameters, given torch's name of it.

    Args:
        where: the buffer, for messages.

    Raises:
        CorruptError: the dtype is unknown.
        UnsupportedError: the parameters are FP8.
    """
    if name == "uint8":  # FP8 parameters are stored as bytes
        raise UnsupportedError(
            f"{where} contains FP8 parameters (--fp8-param-gather), but the checkpoint does not "
            "record which parameters they are",
            rank=rank,
            hint="load and save the checkpoint once without --fp8-param-gather, or drop the "
            "optimizer with --no-optim",
        )
    if name not in DTYPES:
        raise CorruptError(f"{where} has the unknown dtype {name!r}", rank=rank)
    return name

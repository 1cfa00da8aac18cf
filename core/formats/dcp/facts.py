"""Iteration and arguments of the run that saved a DCP checkpoint, taken from its entries.

DCP itself stores neither. Training systems save them as entries, either as a small object or as a
tensor of one element; the known names are in ``_ITERATIONS``.

Source: torchtitan (``train_state.step``), Megatron-LM ``training/checkpointing.py`` (``iteration``,
``args``), and PyTorch's DCP recipe with an ``AppState``, whose entries are under ``app``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of
from core.errors import CheckpointingException
from core.formats.torch.tree import load_object
from core.pickle.inert import attributes

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.files.store import ReadStore

_ITERATIONS = ("iteration", "train_state.step", "train_state.iteration", "step", "global_step")
_PREFIXES = ("", "app.")
_ARGUMENTS = "args"
_MAX_ITERATION = 1 << 48


def with_run_facts(catalog: Catalog, store: ReadStore) -> Catalog:
    """Set ``iteration`` and ``args`` of a catalog from its entries.

    Entries that cannot be read get a note instead.
    """
    iteration: int | None = None
    args: object = None
    notes: list[str] = []

    # The first plausible number is the iteration; other programs may use these names differently.
    for key in (prefix + name for prefix in _PREFIXES for name in _ITERATIONS):
        try:
            number = _value_of(catalog, store, key)
        except CheckpointingException as err:
            notes.append(f"{key} could not be read: {err.sentence}")
            continue
        if type(number) is int and 0 <= number < _MAX_ITERATION:
            iteration = number
            break

    # Megatron's arguments are a Namespace; an entry "args" without attributes is something else.
    try:
        value = _value_of(catalog, store, _ARGUMENTS) if _ARGUMENTS in catalog.objects else None
    except CheckpointingException as err:
        notes.append(f"{_ARGUMENTS} could not be read: {err.sentence}")
    else:
        args = value if attributes(value) is not None else None
    return replace(catalog, iteration=iteration, args=args).noted(notes)


def _value_of(catalog: Catalog, store: ReadStore, key: str) -> object:
    """Return the value of an object or of an integer tensor with one element.

    Returns:
        None if the entry does not exist or is another kind of tensor.

    Raises:
        CheckpointingException: the entry cannot be read.
    """
    if key in catalog.tensors:
        # The element of a one-element integer tensor; None for other tensors.
        meta = catalog.tensors[key]
        fragments = catalog.fragments(key)
        dtype = dtype_of(meta.dtype)
        if meta.n_elements != 1 or dtype.kind not in ("int", "uint") or len(fragments) < 1:
            return None
        array = fragments[0].array
        assert array is not None
        extent = array.locate(store).extent
        if extent.encoding is not None:
            data = bytes(extent.encoding.decode(store, array, 0))
        else:
            data = store.read(extent.file, extent.offset, dtype.itemsize)
        return int.from_bytes(data, "little", signed=dtype.kind == "int")
    item = catalog.objects.get(key)
    if item is None or item.raw_key is None:
        return None if item is None else item.value
    stream = catalog.fragments(item.raw_key)[0].array
    assert stream is not None
    return load_object(store, stream, key=key)[0]

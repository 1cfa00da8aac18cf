"""What the entries of a DCP checkpoint say about the run that saved it: its iteration and its arguments.

DCP itself knows neither. The systems that save with it put them among the entries, as a small object or a tensor of one
element; the names that are known stand in ``_ITERATIONS``.

Source: torchtitan (``train_state.step``), Megatron-LM ``training/checkpointing.py`` (``iteration``, ``args``), and the
recipe for DCP with an ``AppState``, whose entries stand below ``app``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of
from core.errors import CheckpointingException
from core.formats.torch.format import load_object
from core.pickle.inert import attributes

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.files.store import ReadStore

_ITERATIONS = ("iteration", "train_state.step", "train_state.iteration", "step", "global_step")
_BELOW = ("", "app.")
_ARGUMENTS = "args"
_MAX_ITERATION = 1 << 48


def with_stated_facts(catalog: Catalog, store: ReadStore) -> Catalog:
    """Return a catalog with the ``iteration`` and ``args`` that its entries state; notes name those not readable."""
    iteration: int | None = None
    args: object = None
    notes: list[str] = []
    for key in (below + name for below in _BELOW for name in _ITERATIONS):
        number = _value_of(catalog, store, key, notes)
        if type(number) is int and 0 <= number < _MAX_ITERATION:
            iteration = number
            break
    if _ARGUMENTS in catalog.objects:
        value = _value_of(catalog, store, _ARGUMENTS, notes)
        if attributes(value) is not None:
            args = value
    return replace(catalog, iteration=iteration, args=args).noted(notes)


def _value_of(catalog: Catalog, store: ReadStore, key: str, notes: list[str]) -> object:
    """An object's value, or the number in a tensor of one; None if there is no such entry or it cannot be read."""
    try:
        if key in catalog.tensors:
            return _integer(catalog, store, key)
        item = catalog.objects.get(key)
        if item is None or item.raw_key is None:
            return None if item is None else item.value
        stream = catalog.fragments(item.raw_key)[0].array
        assert stream is not None
        return load_object(store, stream, key=key)[0]
    except CheckpointingException as err:
        notes.append(f"{key} could not be read: {err.sentence}")
        return None


def _integer(catalog: Catalog, store: ReadStore, key: str) -> int | None:
    """The element of an integer tensor that has one, else None."""
    meta = catalog.tensors[key]
    fragments = catalog.fragments(key)
    dtype = dtype_of(meta.dtype)
    if meta.n_elements != 1 or dtype.kind not in ("int", "uint") or len(fragments) < 1:
        return None
    array = fragments[0].array
    assert array is not None
    extent = catalog.bind(store, array).extent
    if extent.encoding is not None:
        data = bytes(extent.encoding.decode(store, array, 0))
    else:
        data = store.read(extent.file, extent.offset, dtype.itemsize)
    return int.from_bytes(data, "little", signed=dtype.kind == "int")

"""The registry of formats, which finds a format by its name or by a checkpoint's files."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from core.errors import UnsupportedError
from core.formats.format import Format

if TYPE_CHECKING:
    from core.files.store import ReadStore


_BUILT_IN = (
    *(
        "megatron.format",
        "dcp.torch_dist",
        "dcp.format",
        "ocdbt.format",
        "zarr.format",
        "zarr.format3",
    ),
    *(
        "deepspeed.universal.format",
        "deepspeed.format",
        "safetensors.format",
        "huggingface.bin_format",
        "torch.format",
    ),
)
"""Modules in this package, each with a ``FORMAT``.

They are sniffed in this order: a format whose files also look like those of a more general one
comes first.
"""


def formats() -> list[Format]:
    """Return all formats, the built-in ones first.

    Raises:
        UnsupportedError: two formats share a name.
    """
    # importlib.metadata is slow to import, and most commands do without plug-ins.
    from importlib.metadata import entry_points

    all_formats = list(_built_in())
    all_formats += [entry.load() for entry in entry_points(group="ckpt.formats")]
    names: set[str] = set()
    for format in all_formats:
        for name in (format.name, *format.aliases):
            if name in names:
                raise UnsupportedError(
                    f"two formats are called {name!r}", hint="uninstall one of the plug-ins"
                )
            names.add(name)
    return all_formats


def _built_in() -> Iterator[Format]:
    for module in _BUILT_IN:
        yield import_module(f"core.formats.{module}").FORMAT


def format_called(name: str) -> Format:
    """Return the format with a name or alias; case, and the difference of - and _, do not matter.

    Raises:
        UnsupportedError: no format has that name.
    """
    all_formats = formats()
    canonical_name = name.lower().replace("-", "_")
    for format in all_formats:
        if canonical_name in (format.name, *format.aliases):
            return format
    from difflib import get_close_matches

    # Suggest the most similar name of a format that can be written.
    writable = [format for format in all_formats if format.lay_out is not None]
    known_names = [name for format in writable for name in (format.name, *format.aliases)]
    matches = get_close_matches(canonical_name, known_names, n=1)
    guess = f"did you mean {matches[0]}? " if matches else ""
    raise UnsupportedError(
        f"unknown format {name!r}",
        hint=f"{guess}Formats that can be written: {_format_names(writable)}, hf",
    )


def sniffed(store: ReadStore) -> Format:
    """Return the format of the checkpoint in a store.

    Raises:
        UnsupportedError: no format recognises the store.
    """
    # The built-in formats are tried first, because finding the plug-ins takes 20 ms.
    for format in _built_in():
        if format.sniff(store):
            return format
    all_formats = formats()
    for format in all_formats[len(_BUILT_IN) :]:
        if format.sniff(store):
            return format
    raise UnsupportedError(
        "not a checkpoint in a known format",
        file=store.label,
        hint=f"supported formats: {_format_names(all_formats)}",
    )


def _format_names(listed: Iterable[Format]) -> str:
    return ", ".join(format.name for format in listed)


# A format holds functions, which cannot be pickled; worker processes are sent its name instead.
copyreg.pickle(Format, lambda format: (format_called, (format.name,)))

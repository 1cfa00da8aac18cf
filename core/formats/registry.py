"""The formats: found by name, or by looking at the files."""

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
"""Modules of this package, each with a ``FORMAT``; the order is the order of sniffing."""


def formats() -> list[Format]:
    """Return all formats, the built-in ones first.

    Raises:
        UnsupportedError: two formats share a name.
    """
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
    """Return the format with a name or alias.

    Raises:
        UnsupportedError: no format has that name.
    """
    all_formats = formats()
    name_given = name.lower().replace("-", "_")
    for format in all_formats:
        if name_given in (format.name, *format.aliases):
            return format
    from difflib import get_close_matches

    writable = [format for format in all_formats if format.lay_out is not None]
    matches = get_close_matches(
        name_given, [name for format in writable for name in (format.name, *format.aliases)], n=1
    )
    guess = f"did you mean {matches[0]}? " if matches else ""
    raise UnsupportedError(
        f"format {name!r} is not known",
        hint=f"{guess}Formats that are written: {_format_names(writable)}, hf",
    )


def sniffed(store: ReadStore) -> Format:
    """Return the format that a store is in.

    Raises:
        UnsupportedError: no format recognises it.
    """
    for format in _built_in():  # most often enough; looking for plug-ins costs 20 ms
        if format.sniff(store):
            return format
    all_formats = formats()
    for format in all_formats[len(_BUILT_IN) :]:
        if format.sniff(store):
            return format
    raise UnsupportedError(
        "not a checkpoint in a known format",
        file=store.label,
        hint=f"formats that are recognised: {_format_names(all_formats)}",
    )


def _format_names(listed: Iterable[Format]) -> str:
    return ", ".join(format.name for format in listed)


# A format holds functions, so that another worker is sent its name.
copyreg.pickle(Format, lambda format: (format_called, (format.name,)))

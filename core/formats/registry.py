"""The registry of formats, which finds a format by its name or by a checkpoint's files."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from core.errors import UnsupportedError, UsageError, did_you_mean
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
        "mcore.local",
        "torch_sharded.format",
        "nemo",
        "flax.format",
        "torch.format",
    ),
)
"""Modules in this package, each with a ``FORMAT``.

They are sniffed in this order: a format whose files also look like those of a more general one
comes first.
"""


_OTHER_WORDS = {
    **dict.fromkeys(("pt", "pth", "pytorch"), "torch"),
    **dict.fromkeys(("distcp", "fsdp", "fsdp2"), "dcp"),
    **dict.fromkeys(("mcore", "dist_checkpointing"), "torch_dist"),
    **dict.fromkeys(("zero", "zero3", "universal"), "deepspeed_universal"),
    "transformers": "hf",
}
"""Words for formats that are no names or aliases here → name of the format to suggest."""


def formats() -> list[Format]:
    """Return all formats, the built-in ones first.

    Raises:
        UnsupportedError: two formats share a name.
    """
    all_formats = [*_built_in(), *_plug_ins()]
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


@cache
def _plug_ins() -> tuple[Format, ...]:
    """Return the formats of other packages; it takes 20 ms to look for them in every package."""
    # importlib.metadata is slow to import, and most commands do without plug-ins.
    from importlib.metadata import entry_points

    return tuple(entry.load() for entry in entry_points(group="ckpt.formats"))


def format_called(name: str) -> Format:
    """Return the format with a name or alias; case, and the difference of - and _, do not matter.

    Raises:
        UsageError: no format has that name.
    """
    all_formats = formats()
    canonical_name = name.lower().replace("-", "_")
    for format in all_formats:
        if canonical_name in (format.name, *format.aliases):
            return format
    # Suggest the format that the word stands for elsewhere, or the most similar name of those that
    # can be written.
    writable = [format for format in all_formats if format.lay_out is not None]
    known_names = [name for format in writable for name in (format.name, *format.aliases)]
    word = canonical_name.removeprefix(".")
    guess = did_you_mean(_OTHER_WORDS.get(word, word), known_names)
    raise UsageError(
        f"unknown format {name!r}",
        hint=f"{f'{guess} ' if guess else ''}Formats that can be written: "
        f"{_format_names(writable)}, hf, fsdp_dtensor",
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

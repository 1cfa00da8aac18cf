"""The registry of formats, which finds a format by its name or by a checkpoint's files."""

from __future__ import annotations

import copyreg
import re
import sys
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import UnsupportedError, UsageError, did_you_mean
from core.formats.format import Format
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore


_HEAD_BYTES = 16
_GROUP = "ckpt.formats"
"""The entry points of packages that have formats."""


class Stores(Enum):
    """The tensors that can be written in a format if the checkpoint has no parallel layout."""

    ANY = auto()
    """Tensors under any names that are paths, and plain values."""
    MASTERS = auto()
    """Float32 weights, and optimizer states under the names of their parameters."""
    LAYOUTS = auto()
    """Nothing: only models with a parallel layout."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in format before its module is imported.

    Args:
        names: the format's name and aliases.
        module: module in this package that has it as ``FORMAT``.
        in_directory: pattern of a name in the directory, that of a subdirectory ending with ``/``,
            without which the directory is not in this format; "" for formats of single files.
        as_file: the same for the name of a file that is the checkpoint; "" for directories only.
        head: pattern of the first bytes of such a file, whatever its name; b"" if only the name
            counts.
        stores: what can be written in the format; None if it is only read.
        suffixes: suffixes of a file to write that imply the format, the first for proposed names.
        variants: aliases that ask for more than the format, such as other names of tensors.
    """

    names: tuple[str, ...]
    module: str
    in_directory: str = ""
    as_file: str = ""
    head: bytes = b""
    stores: Stores | None = None
    suffixes: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    def load(self) -> Format:
        """Import the module and return its format."""
        format: Format = import_module(f"core.formats.{self.module}").FORMAT
        return format

    def allows(self, store: ReadStore, names: Sequence[str]) -> bool:
        """Return whether the names in a store allow this format, which ``sniff`` then decides.

        Args:
            names: from ``list_names``.
        """
        pattern = self.in_directory if store.entry is None else self.as_file
        if pattern and any(map(re.compile(pattern, re.DOTALL).fullmatch, names)):
            return True
        if store.entry is None or not self.head or not store.exists(store.entry):
            return False
        head = store.read(store.entry, 0, min(store.size(store.entry), _HEAD_BYTES))
        return re.match(self.head, head, re.DOTALL) is not None


def list_names(store: ReadStore) -> list[str]:
    """List the files of a directory, and its subdirectories with a final ``/``; or the one file."""
    if store.entry is not None:
        return [store.entry.rpartition("/")[2]]
    return [*store.files(), *(f"{name}/" for name in store.folders())]


BUILT_IN = (
    BuiltIn(
        ("megatron", "torch_ranks"),
        "megatron.format",
        r"model_(optim_)?rng\.pt|mp_rank_.*/",
        r"model_(optim_)?rng\.pt",
        stores=Stores.LAYOUTS,
    ),
    BuiltIn(
        ("torch_dist",),
        "dcp.torch_dist",
        r"metadata\.json|common\.pt|(model|optimizer|extra)/",
        stores=Stores.ANY,
    ),
    BuiltIn(
        ("dcp", "torch_dcp", "fsdp_dtensor"),
        "dcp.format",
        r".*\.metadata(\.tmp)?|.*\.distcp|pytorch_model_fsdp_.*/|(model|optimizer|extra)/",
        stores=Stores.ANY,
        variants=("fsdp_dtensor",),
    ),
    BuiltIn(
        ("orbax", "ocdbt"),
        "ocdbt.format",
        r"manifest\.ocdbt|_METADATA|_CHECKPOINT_METADATA|ocdbt\.process_.*/"
        r"|(default|state|params)/",
        stores=Stores.ANY,
    ),
    BuiltIn(
        ("zarr",),
        "zarr.format",
        r"metadata\.json|\.zgroup|\.zarray|.*/",
        stores=Stores.ANY,
    ),
    BuiltIn(
        ("zarr3",),
        "zarr.format3",
        r"zarr\.json|.*/",
        stores=Stores.ANY,
    ),
    BuiltIn(
        ("deepspeed_universal", "ucp"),
        "deepspeed.universal.format",
        r"latest_universal|zero/",
        stores=Stores.MASTERS,
    ),
    BuiltIn(("deepspeed",), "deepspeed.format", r".*(model|optim)_states\.pt"),
    BuiltIn(
        ("safetensors", "hf", "huggingface"),
        "safetensors.format",
        r".*\.safetensors(\.index\.json)?|model_index\.json|sharded/",
        r".*\.safetensors(\.index\.json)?",
        rb".{8}\{",
        stores=Stores.ANY,
        suffixes=(".safetensors",),
        variants=("hf",),
    ),
    BuiltIn(
        ("torch_bin",),
        "huggingface.bin_format",
        r".*\.bin(\.index\.json)?",
        r".*\.bin\.index\.json",
    ),
    BuiltIn(("mcore_local",), "mcore.local", r"iter_.*_local\.pt|\d+/", r"iter_.*_local\.pt"),
    BuiltIn(("torch_sharded",), "torch_sharded.format", r".*\d.*\.(pt|pth|bin|ckpt)", r".*"),
    BuiltIn(("nemo",), "nemo", as_file=r".*\.nemo"),
    BuiltIn(
        ("flax", "msgpack"),
        "flax",
        r"flax_model\.msgpack(\.index\.json)?",
        r".*\.msgpack|(.*_)?checkpoint_\d+",
    ),
    BuiltIn(
        ("torch",),
        "torch.format",
        r"checkpoint\.pt",
        r".*",
        stores=Stores.ANY,
        suffixes=(".pt", ".pth"),
    ),
)
"""The built-in formats, in the order in which they are sniffed: a format whose files also look like
those of a more general one comes first.
"""
TARGETS = tuple(
    name for row in BUILT_IN if row.stores is not None for name in (row.names[0], *row.variants)
)
"""Built-in formats, and variants of them, that can be written."""

_OTHER_WORDS = {
    **dict.fromkeys(("pt", "pth", "pytorch"), "torch"),
    **dict.fromkeys(("distcp", "fsdp", "fsdp2"), "dcp"),
    **dict.fromkeys(("mcore", "dist_checkpointing"), "torch_dist"),
    **dict.fromkeys(("zero", "zero3", "universal"), "deepspeed_universal"),
    "transformers": "hf",
}
"""Words for formats that are no names or aliases here → name of the format to suggest."""

_OTHER_SOFTWARE = {
    **dict.fromkeys(
        ("vllm", "sglang", "trtllm", "trt_llm", "tensorrt_llm", "tgi", "lmdeploy", "mlx"),
        "use --to hf, as {} loads Hugging Face models",
    ),
    **dict.fromkeys(
        ("gguf", "ggml", "llama.cpp", "llama_cpp", "llamacpp", "ollama"),
        "GGUF cannot be written: use --to hf, then run llama.cpp's convert_hf_to_gguf.py on DST",
    ),
}
"""Software or its format, which ``ckpt`` does not write → hint; ``{}`` stands for the word."""


def formats() -> list[Format]:
    """Return all formats, the built-in ones first.

    Raises:
        UnsupportedError: two formats share a name.
    """
    return _without_homonyms([*(row.load() for row in BUILT_IN), *_plug_ins()])


def writable_formats() -> list[Format]:
    """Return the formats that can be written, the built-in ones first; import no others.

    Raises:
        UnsupportedError: two of them share a name.
    """
    built_in = [row.load() for row in BUILT_IN if row.stores is not None]
    plug_ins = [format for format in _plug_ins() if format.lay_out is not None]
    return _without_homonyms([*built_in, *plug_ins])


def _without_homonyms(all_formats: list[Format]) -> list[Format]:
    """Return the formats.

    Raises:
        UnsupportedError: two of them share a name.
    """
    names: set[str] = set()
    for format in all_formats:
        for name in (format.name, *format.aliases):
            if name in names:
                raise UnsupportedError(
                    f"two formats are named {name!r}",
                    hint="uninstall one of the plug-ins that provide this name",
                )
            names.add(name)
    return all_formats


@cache
def _plug_ins() -> tuple[Format, ...]:
    """Return the formats of other packages."""
    # importlib.metadata takes 60 ms to be imported and to look into every package, so it is asked
    # only if a package mentions the group, or may lie where only an import finds it.
    finders = [finder for finder in sys.meta_path if finder is not PathFinder]
    is_elsewhere = any(hasattr(finder, "find_distributions") for finder in finders)
    if not is_elsewhere and not any(map(_may_have_plug_ins, sys.path)):
        return ()
    from importlib.metadata import entry_points

    return tuple(entry.load() for entry in entry_points(group=_GROUP))


def _may_have_plug_ins(folder: str) -> bool:
    """Return whether a package in a folder or archive of ``sys.path`` may have formats."""
    path = Path(folder)
    if path.is_file():
        return True
    infos = ("*.dist-info", "*.egg-info", "EGG-INFO")
    files = (file for info in infos for file in path.glob(f"{info}/entry_points.txt"))
    return any(_GROUP.encode() in file.read_bytes() for file in files)


def has_plug_ins() -> bool:
    """Return whether formats of other packages are installed."""
    return bool(_plug_ins())


def format_called(name: str) -> Format:
    """Return the format with a name or alias; case, and the difference of - and _, do not matter.

    Raises:
        UsageError: no format has that name.
    """
    canonical_name = name.lower().replace("-", "_")
    for row in BUILT_IN:
        if canonical_name in row.names:
            return row.load()
    all_formats = formats()
    for format in all_formats[len(BUILT_IN) :]:
        if canonical_name in (format.name, *format.aliases):
            return format
    # Suggest the format that the word stands for elsewhere, or the most similar name of those that
    # can be written.
    writable = [format for format in all_formats if format.lay_out is not None]
    plug_ins = [format.name for format in _plug_ins() if format.lay_out is not None]
    known_names = [name for format in writable for name in (format.name, *format.aliases)]
    word = canonical_name.removeprefix(".")
    guess = did_you_mean(_OTHER_WORDS.get(word, word), known_names)
    raise UsageError(
        f"unknown format {name!r}",
        hint=explain_other_software(name)
        or guess
        or f"the formats that ckpt can write are {', '.join((*TARGETS, *plug_ins))}",
    )


def explain_other_software(name: str) -> str | None:
    """Return the hint for other software, or its format, named as a format; None if unknown."""
    hint = _OTHER_SOFTWARE.get(name.lower().replace("-", "_").removeprefix("."))
    return None if hint is None else hint.format(name)


def format_of_suffix(suffix: str) -> str | None:
    """Return the name of the format that the suffix of a file to write implies; None if none."""
    for row in BUILT_IN:
        if suffix in row.suffixes:
            return row.names[0]
    plug_ins = _plug_ins() if suffix else ()
    return next((format.name for format in plug_ins if suffix in format.suffixes), None)


def suffix_of(format: Format) -> str:
    """Return the suffix of a name that is proposed for a checkpoint in a format."""
    rows = {row.names[0]: row.suffixes for row in BUILT_IN}
    return next(iter(rows.get(format.name, format.suffixes)), f".{format.name}")


def sniffed(store: ReadStore) -> Format:
    """Return the format of the checkpoint in a store.

    Raises:
        UnsupportedError: no format recognizes the store.
    """
    # The built-in formats are tried first, because finding the plug-ins takes 20 ms.
    names = list_names(store)
    for row in BUILT_IN:
        if row.allows(store, names) and (format := row.load()).sniff(store):
            return format
    all_formats = formats()
    for format in all_formats[len(BUILT_IN) :]:
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

"""The small files of a Hugging Face directory: configuration, tokenizer, model card, code.

On disk, next to the weights::

    config.json  generation_config.json  preprocessor_config.json  adapter_config.json …
    tokenizer.json  tokenizer.model  vocab.json  merges.txt  special_tokens_map.json
    added_tokens.json … chat_template.jinja  README.md  LICENSE  modeling_x.py …

They are *carried*: a written directory contains them byte for byte. They are never run, and only
``config.json`` is parsed. In ``Catalog.files`` each is a one-dimensional uint8 tensor, beside the
bytes of small files that this project created.

Subdirectories are carried as a whole: those of small files alone (code, chat templates), and those
of the modules of sentence-transformers, with weights of their own, which ``modules.json`` names::

    modules.json  1_Pooling/config.json  2_Dense/{config.json, model.safetensors}
    additional_chat_templates/tool.jinja  package/modeling_x.py

Not carried: weights and their indexes, manifests and object files of this project, hidden files,
subdirectories with other files.

Source: transformers 5.23 and huggingface_hub 2.4 (file names that ``save_pretrained`` and
``from_pretrained`` use); hf/* in tests/golden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, TargetCatalog, file_key
from core.engine.catalog.file_image import FileImage, PlacedArray, literal_file
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import whole_tensor
from core.errors import CapacityError, CorruptError, StorageError, UnsafeError
from core.files.json_object import parse_json_object, read_small_file
from core.pickle.fields import FieldReader, mapping_or_empty

if TYPE_CHECKING:
    from core.files.store import ReadStore

CONFIG = "config.json"
_MODULES = "modules.json"
_MAX_FILES = 10_000
"""A directory with more files is none of a model's."""
_MAX_CONFIG_BYTES = 16 << 20
_CARRIED = re.compile(
    r".*\.(json|jinja|py|tiktoken|model|md)|tokenizer.*|vocab\..*|merges\.txt|chat_template.*"
    r"|(LICENSE|LICENCE|NOTICE|COPYING|USE_POLICY).*",
    re.IGNORECASE | re.DOTALL,
)
_NOT_CARRIED = re.compile(
    r"\..*|.*\.index\.(.*\.)?json|(.*\.)?ckpt-.*|metadata\.json|zarr\.json"
    r"|.*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|gguf|npz|npy|distcp|pkl|pickle)",
    re.IGNORECASE | re.DOTALL,
)
"""Weights, indexes, and files of this project and other formats; overrides ``_CARRIED``."""
_TEXT_BELOW = re.compile(r".*\.(txt|ya?ml|toml|cfg)", re.IGNORECASE | re.DOTALL)
"""Texts in directories of code, in addition to ``_CARRIED``."""


_TOKENIZER = re.compile(
    r"tokenizer\.(json|model)|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt|bpe)|merges\.txt|chat_template\.(jinja|json)|tekken\.json"
    r"|(tokenizer\.model\.v\d+|spiece\.model|sentencepiece\.model|sentencepiece\.bpe\.model)"
    r"|.*\.tiktoken|tiktoken\.model|tokenization_\w+\.py",
    re.ASCII,
)
"""The files from which transformers' tokenizers are loaded; the last are programs of a model."""


def is_tokenizer_file(name: str) -> bool:
    """Return True if a file of this name belongs to a model's tokenizer."""
    return _TOKENIZER.fullmatch(name) is not None


def carried_files(store: ReadStore) -> dict[str, int]:
    """Return path → size in bytes of a directory's files that are carried, sorted by path."""
    names = [name for name in store.files() if "\\" not in name and name.isprintable()]
    return {
        name: store.size(name)
        for name in names
        if _CARRIED.fullmatch(name) and not _NOT_CARRIED.fullmatch(name)
    }


def list_module_folders(store: ReadStore) -> tuple[str, ...]:
    """Return the directories of the modules of sentence-transformers that follow the model."""
    if not store.exists(_MODULES):
        return ()
    try:
        modules = json.loads(read_small_file(store, _MODULES, max_bytes=_MAX_CONFIG_BYTES))
        paths = [str(module["path"]) for module in modules]
    except (CorruptError, ValueError, KeyError, TypeError, RecursionError):
        return ()  # a file of another program
    folders = {*store.folders()}
    return tuple(path for path in paths if path in folders)


def with_folder(
    catalog: Catalog, store: ReadStore, folder: str, *, only_small: bool = False
) -> Catalog:
    """Add the files below a directory to a catalog, or a note why they are not carried.

    Hidden files and caches of compiled Python are left out.

    Args:
        only_small: add nothing if there is a file of another kind than small ones.
    """
    try:
        return with_files(catalog, _list_folder_files(store, folder, only_small=only_small))
    except (CapacityError, StorageError, UnsafeError) as err:
        place = "" if err.file in (None, folder) else f"{err.file}: "
        note = f"{folder}/ is not copied: {place}{err.message}"
        return replace(catalog, notes=(*catalog.notes, note))


def _list_folder_files(store: ReadStore, folder: str, *, only_small: bool) -> dict[str, int]:
    """Return path → size in bytes of the files for ``with_folder``, sorted by path.

    Raises:
        CapacityError: there are too many files.
        StorageError, UnsafeError: a directory cannot be listed.
    """
    paths: list[str] = []
    waiting = [folder]
    while waiting:
        above = waiting.pop()
        names = [name for name in store.files(above) if _is_visible(name)]
        if only_small and not all(map(_is_small_file, names)):
            return {}
        paths += [f"{above}/{name}" for name in names]
        folders = [name for name in store.folders(above) if _is_visible(name)]
        waiting += [f"{above}/{name}" for name in folders]
        if len(paths) + len(waiting) > _MAX_FILES:
            raise CapacityError(f"the directory has more than {_MAX_FILES:,} files", file=folder)
    return {path: store.size(path) for path in sorted(paths)}


def _is_visible(name: str) -> bool:
    """Return whether a file or directory of this name can be a part of a model."""
    is_text = name.isprintable() and "\\" not in name
    return is_text and not name.startswith(".") and name != "__pycache__"


def _is_small_file(name: str) -> bool:
    """Return whether a file in a subdirectory is one of those that are carried."""
    is_text = _CARRIED.fullmatch(name) or _TEXT_BELOW.fullmatch(name)
    return is_text is not None and _NOT_CARRIED.fullmatch(name) is None


def with_carried(catalog: Catalog, store: ReadStore, *, without: Collection[str] = ()) -> Catalog:
    """Add the small files and folders of a directory to a catalog.

    Args:
        without: subdirectories that belong to the checkpoint in another way.
    """
    catalog = with_files(catalog, carried_files(store))
    modules = list_module_folders(store)
    for folder in store.folders():
        if folder not in without and _is_visible(folder):
            catalog = with_folder(catalog, store, folder, only_small=folder not in modules)
    return catalog


def with_files(catalog: Catalog, files: Mapping[str, int]) -> Catalog:
    """Add files of the checkpoint's directory to a catalog, to be copied unchanged.

    Args:
        files: path → size in bytes.

    Raises:
        UnsupportedError: a tensor has the key of a file.
    """
    if not files:
        return catalog
    tensors = {
        path: whole_tensor(StoredArray(file_key(path), "uint8", (n_bytes,), Extent(path, 0)))
        for path, n_bytes in files.items()
    }
    return replace(catalog, files={**catalog.files, **tensors})


def file_images(target: TargetCatalog) -> list[FileImage]:
    """Lay out the files of a target catalog that belong next to the weights.

    Raises:
        UnsupportedError: a file is not one array.
    """
    images = []
    for path, content in target.files.items():
        if isinstance(content, bytes):
            images.append(literal_file(path, content))
        else:
            array = target.whole_array(file_key(path))
            images.append(FileImage(path, array.n_bytes, (PlacedArray(0, array),)))
    return images


def read_config_json(store: ReadStore) -> dict[str, object] | None:
    """Read ``config.json``; return None if it does not exist.

    Raises:
        CorruptError: the file is too large, or not a JSON object.
    """
    document = config_document_of(store)
    return None if document is None else parse_json_object(document, file=CONFIG)


def config_document_of(store: ReadStore) -> bytes | None:
    """Read the content of ``config.json``; return None if it does not exist.

    Raises:
        CorruptError: the file is too large.
    """
    if not store.exists(CONFIG):
        return None
    return read_small_file(store, CONFIG, max_bytes=_MAX_CONFIG_BYTES)


def config_number(config: Mapping[str, object], name: str) -> int | None:
    """Return a size from a model's configuration; None if it is missing.

    It may be at the top level, or in the text part of a multimodal configuration.

    Raises:
        CorruptError: the size is not a positive integer.
    """
    for part in (config, mapping_or_empty(config.get("text_config"))):
        number = part.get(name)
        if number is not None:
            return FieldReader(CONFIG).read_int(number, name, least=1)
    return None

"""Add the files of a tokenizer to a Hugging Face directory (``--tokenizer``)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from core.engine.catalog.catalog import Catalog
from core.errors import CorruptError, NoEffectError, UsageError
from core.files.json_object import parse_json_object
from core.files.store import translate_os_errors
from core.formats.huggingface.files import CONFIG, is_tokenizer_file
from core.formats.huggingface.special_tokens import GENERATION_CONFIG


def with_tokenizer(catalog: Catalog, folder: Path, *, carries_files: bool) -> Catalog:
    """Return a copy of a catalog with a directory's tokenizer files and generation_config.json.

    Args:
        catalog: a model's catalog, with its configuration.
        folder: the directory, such as that of the model's original release.
        carries_files: the destination can store files next to the weights.

    Raises:
        UsageError: the destination is not a Hugging Face directory, ``folder`` has no such files,
            or the destination has one of them already.
        StorageError: a file cannot be read.
    """
    if not carries_files or CONFIG not in catalog.files:
        raise NoEffectError(
            ("tokenizer",),
            "the destination is not a Hugging Face directory",
            hint="omit it, or write a directory with --to hf",
        )
    if not folder.is_dir():
        raise UsageError(
            "--tokenizer: "
            f"{'this is not a directory' if folder.exists() else 'the directory does not exist'}",
            file=str(folder),
            hint="pass a directory with tokenizer.json, tokenizer.model or vocab.json",
        )
    with translate_os_errors(str(folder), doing="read"):
        paths = sorted(
            path for path in folder.iterdir() if is_tokenizer_file(path.name) and path.is_file()
        )
    if not paths:
        raise UsageError(
            "--tokenizer: the directory has no tokenizer files",
            file=str(folder),
            hint="pass a directory with tokenizer.json, tokenizer.model or vocab.json",
        )
    existing = [path.name for path in paths if path.name in catalog.files]
    if existing:
        raise UsageError(
            f"--tokenizer: SRC already has {', '.join(existing)}",
            file=str(folder),
            hint="to copy the tokenizer files of SRC, omit --tokenizer",
        )
    files = dict(catalog.files)
    for path in paths:
        with translate_os_errors(str(path), doing="read"):
            files[path.name] = path.read_bytes()
    # How the model of that directory generates: the tokens at which it stops, its temperature.
    generation = folder / GENERATION_CONFIG
    if GENERATION_CONFIG not in files and generation.is_file():
        with translate_os_errors(str(generation), doing="read"):
            content = generation.read_bytes()
        with suppress(CorruptError):
            parse_json_object(content, file=GENERATION_CONFIG)
            files[GENERATION_CONFIG] = content
    return replace(catalog, files=files)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return True if one of these files belongs to a tokenizer."""
    return any(map(is_tokenizer_file, names))

"""CK520–CK528: compare the index of sharded Hugging Face weights with the shards; small files.

If the checkpoint's metadata could be read, index and shards are known to agree, and only problems
that readers overlook remain. Otherwise every entry of every index is looked up.

Source: transformers 5.23 ``modeling_utils`` (a single file takes precedence over an index),
huggingface_hub 2.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from itertools import islice

from core.errors import CheckpointingException
from core.files.json_object import parse_json_object, read_small_file
from core.formats.huggingface.index import WeightIndex, list_indexed, read_index
from core.formats.safetensors.files import further_models, is_piece
from core.formats.safetensors.header import read_header
from core.values import n_text
from core.verbs.checks.file_codes import EXTRA, MISSING
from core.verbs.checks.finding import Finding, Level, Severity, get_code
from core.verbs.checks.problems import finding_of
from core.verbs.checks.subject import Check, Subject

PIECES = get_code("CK163")
BROKEN = get_code("CK520")
NOT_HELD = get_code("CK521")
NOT_LISTED = get_code("CK522")
TOTAL = get_code("CK523")
TWICE = get_code("CK524")
SHADOWED = get_code("CK525")
SMALL = get_code("CK526")

NO_INDEX = get_code("CK528")
NO_CONFIG = get_code("CK527")

_FORMATS = ("safetensors", "torch_bin")

_INDEX = re.compile(r"(.+)\.(safetensors|bin)\.index\.json$")
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.(safetensors|bin)$")
_PIECE = re.compile(r"shard-(\d+)-(model-\d+-of-\d+)\.safetensors$")
_SINGLE = re.compile(r"(model|pytorch_model|adapter_model)\.(safetensors|bin)$")
_CONFIGS = ("config.json", "adapter_config.json", "model_index.json")
_MAX_JSON_BYTES = 64 << 20
_MOST_NAMED = 100


def check_indexes(subject: Subject) -> Iterator[Finding]:
    """Check each index against the shards, and find files that it does not name.

    Codes: CK101, CK106, CK163, CK520–CK528.
    """
    names = [
        name
        for name in subject.files
        if "/" not in name and _INDEX.match(name) and subject.files[name]
    ]
    listed = list_indexed(subject.store) if names else set()
    for name in names:
        try:
            index = read_index(subject.store, name)
        except CheckpointingException as err:
            yield finding_of(err, default=BROKEN, file=name)
            continue
        # Entries are looked up only if the catalog does not prove them. An index next to the files
        # of single ranks (torch's Hugging Face storage) names the merged files.
        has_pieces = any(is_piece(file.rpartition("/")[2]) for file in subject.files)
        is_unmerged = has_pieces and not subject.files.keys() & set(index.file_of.values())
        if subject.catalog is None and not is_unmerged:
            yield from _compare_with_shards(subject, index)
        yield from _check_total(subject, index, is_only=len(names) == 1)
        yield from _check_other_files(subject, index, listed=listed)
    if not names:
        yield from _check_numbering(subject)
    yield from _check_pieces(subject)


def _compare_with_shards(subject: Subject, index: WeightIndex) -> Iterator[Finding]:
    """Compare the entries of an index with the tensors in the shards.

    Codes: CK101, CK521, CK522, CK524.
    """
    listed: dict[str, set[str]] = {}
    for key, name in index.file_of.items():
        listed.setdefault(name, set()).add(key)
    # Shard by shard: it must exist, hold the listed tensors, and none of an earlier shard.
    shard_of: dict[str, str] = {}
    for name, keys in sorted(listed.items()):
        if name not in subject.files:
            yield MISSING.missing_file(
                f"{index.file} maps {n_text(len(keys), 'tensor')} to this file, which is missing",
                name,
                key=min(keys),
                expected="the file",
            )
            continue
        stored = _names_in_shard(subject, name)
        if stored is not None:
            yield from _compare_shard(index, name, keys, stored)
            for key in sorted(stored & shard_of.keys())[:_MOST_NAMED]:
                yield TWICE.finding(
                    f"the tensor is also in {shard_of[key]}",
                    file=name,
                    key=key,
                    expected="one file",
                    found="two files",
                )
            shard_of.update((key, name) for key in stored)


def _compare_shard(
    index: WeightIndex, name: str, listed: set[str], stored: set[str]
) -> Iterator[Finding]:
    """Compare the tensors that the index places in a shard with those that are stored in it."""
    for key in sorted(listed - stored)[:_MOST_NAMED]:
        yield NOT_HELD.finding(
            f"{index.file} maps the tensor to this file, which does not contain it",
            file=name,
            key=key,
            expected="the tensor",
            found=n_text(len(stored), "other tensor"),
        )
    for key in sorted(stored - listed)[:_MOST_NAMED]:
        other = index.file_of.get(key)
        yield NOT_LISTED.finding(
            f"{index.file} does not list the tensor"
            if other is None
            else f"{index.file} maps the tensor to {other}",
            file=name,
            key=key,
            expected=other or "an entry",
            found=name,
        )


def _names_in_shard(subject: Subject, name: str) -> set[str] | None:
    """Read the names of the tensors in a shard.

    Returns:
        None if the shard cannot be read, which other checks report.
    """
    from core.formats.torch.tree import parse

    try:
        if name.endswith(".safetensors"):
            return set(read_header(subject.store, name).arrays)
        return set(parse(subject.store, name).arrays)
    except CheckpointingException:
        return None


def _check_total(subject: Subject, index: WeightIndex, *, is_only: bool) -> Iterator[Finding]:
    """Compare the total size in the index with that of its tensors (CK523).

    Args:
        is_only: the directory has no other index, so the catalog holds the tensors of this one.
    """
    catalog = subject.catalog
    if index.total_bytes is None or catalog is None or not is_only:
        return
    if not all(name in subject.files for name in set(index.file_of.values())):
        return  # the catalog lacks the tensors of missing files
    listed = {key: tensor for key, tensor in catalog.tensors.items() if key in index.file_of}
    # Some writers count tied tensors once, others twice.
    n_bytes = sum(tensor.n_bytes for tensor in listed.values())
    n_tied = sum(tensor.n_bytes for key, tensor in listed.items() if key in catalog.ties)
    if index.total_bytes not in (n_bytes, n_bytes - n_tied):
        yield TOTAL.finding(
            "the total size in the index does not match the tensors",
            file=index.file,
            expected=f"{n_bytes} bytes",
            found=f"{index.total_bytes} bytes",
        )


def _check_other_files(
    subject: Subject, index: WeightIndex, *, listed: Set[str]
) -> Iterator[Finding]:
    """Report files that the index does not name (CK106) or that take precedence (CK525).

    Args:
        listed: the files that the indexes of the directory list.
    """
    match = _INDEX.match(index.file)
    assert match is not None
    stem, suffix = match.groups()
    used = set(index.file_of.values())
    # transformers looks for a single file first, and for an index only if there is none.
    single = f"{stem}.{suffix}"
    if single in subject.files and single not in used:
        yield SHADOWED.finding(
            f"transformers loads this file instead of the shards that {index.file} lists",
            file=single,
            expected="only shards",
            found="shards and a single file",
        )
    # Shards of the same series that the index does not name, and other weights next to them, such
    # as mtp.safetensors, which may be meant to be loaded or not.
    used |= {f"{other}.safetensors" for other in further_models(subject.store)} | listed
    for name in subject.files:
        if "/" in name or name in used or _SINGLE.match(name):
            continue
        shard = _SHARD.match(name)
        is_shard = shard is not None and (shard[1], shard[4]) == (stem, suffix)
        is_other = stem == "model" and name.endswith(".safetensors") and not is_piece(name)
        if is_shard or is_other:
            yield EXTRA.finding(
                f"{index.file} does not list the {'shard' if is_shard else 'file'}",
                file=name,
                expected="an entry",
                found="no entry",
                severity=None if is_shard else Severity.NOTE,
            )


def _check_numbering(subject: Subject) -> Iterator[Finding]:
    """Check that shards without an index are complete, judging by their numbers (CK101, CK528)."""
    if subject.store.entry is not None:
        return  # a shard that is examined alone
    # The numbers of the shards that are alike but for them: (stem, total, suffix) → numbers.
    series: dict[tuple[str, str, str], set[int]] = {}
    for name in subject.files:
        shard = _SHARD.match(name)
        if shard is not None and "/" not in name and not _PIECE.match(name):
            series.setdefault((shard[1], shard[3], shard[4]), set()).add(int(shard[2]))
    for (stem, total, suffix), numbers in series.items():
        index = f"{stem}.{suffix}.index.json"
        if int(total) > 1 and index not in subject.files:
            yield NO_INDEX.missing_file(
                "the shards are numbered, but no index lists their tensors", index
            )
        # With a catalog, no shard is missing. Numbers from 0 are not those of transformers.
        if 0 in numbers or subject.catalog is not None:
            continue
        missing = (
            number for number in range(1, min(int(total), 1 << 20) + 1) if number not in numbers
        )
        for number in islice(missing, _MOST_NAMED):
            yield MISSING.missing_file(
                f"only {len(numbers)} of {int(total)} shards exist",
                f"{stem}-{number:0{len(total)}d}-of-{total}.{suffix}",
                expected="the file",
            )


def _check_pieces(subject: Subject) -> Iterator[Finding]:
    """Check that all ranks of torch's Hugging Face storage have the same set of files (CK163)."""
    # folder → rank → what follows the rank in the file names (``model-00001-of-00002``).
    ranks_of: dict[str, dict[int, set[str]]] = {}
    for path in subject.files:
        folder, _, name = path.rpartition("/")
        piece = _PIECE.match(name)
        if piece is not None:
            ranks_of.setdefault(folder, {}).setdefault(int(piece[1]), set()).add(piece[2])
    for folder, ranks in ranks_of.items():
        all_numbers = set().union(*ranks.values())
        for rank, numbers in sorted(ranks.items()):
            for number in sorted(all_numbers - numbers):
                name = f"shard-{rank:05d}-{number}.safetensors"
                yield PIECES.finding(
                    "this file is missing, but other ranks have a file with this number",
                    file=f"{folder}/{name}" if folder else name,
                    rank=str(rank),
                    expected=f"{len(all_numbers)} files",
                    found=f"{len(numbers)}",
                )


def check_json_files(subject: Subject) -> Iterator[Finding]:
    """Check that the JSON files next to the weights are valid (CK526).

    Below the headers level, only ``config.json`` is checked.
    """
    for name, size in subject.files.items():
        is_config = name == _CONFIGS[0]
        is_read = is_config or (subject.level >= Level.HEADERS and name.endswith(".json"))
        if not is_read or "/" in name or not 0 < size <= _MAX_JSON_BYTES or _INDEX.match(name):
            continue
        try:
            data = read_small_file(subject.store, name, max_bytes=_MAX_JSON_BYTES)
            # A conversion reads config.json with these limits. In other files some tools store
            # lists, which are not parsed.
            if is_config:
                parse_json_object(data, file=name)
            elif data.lstrip()[:1] != b"[":
                parse_json_object(data, file=name, max_values=1 << 24)
        except CheckpointingException as err:
            yield finding_of(err, default=SMALL, file=name, expected="a JSON object")


def check_configuration(subject: Subject) -> Iterator[Finding]:
    """Report weights without a configuration, which libraries need to load them (CK527)."""
    has_weights = any(_INDEX.match(name) or _SINGLE.match(name) for name in subject.files)
    if (
        subject.store.entry is None
        and has_weights
        and not any(name in subject.files for name in _CONFIGS)
    ):
        yield NO_CONFIG.missing_file(
            "the directory contains Hugging Face weights but no configuration", _CONFIGS[0]
        )


CHECKS = (
    Check(check_indexes, formats=_FORMATS),
    Check(check_json_files, formats=_FORMATS),
    Check(check_configuration, formats=_FORMATS),
)

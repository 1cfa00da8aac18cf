"""CK520–CK526: the index of sharded Hugging Face weights against the shards, and the small files beside them.

Where the checkpoint's metadata could be read, index and shards agree; what is left is what a reader passes over. Where
not, every entry of every index is looked up.

Source: transformers 5.23 ``modeling_utils`` (a single file is taken before an index), huggingface_hub 2.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from core.checks.check import Check, Code
from core.checks.file_codes import EXTRA, MISSING, PIECES
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.problems import finding_of
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.files.json_object import object_of, small_file
from core.formats.huggingface.index import WeightIndex, read_index
from core.formats.safetensors.files import is_piece
from core.formats.safetensors.header import read_header
from core.formats.torch.tree import parse

_MIXED = "files of two checkpoints may be mixed: copy it again"
BROKEN = Code("CK520", Severity.ERROR, "an index is malformed", "copy the index again")
NOT_HELD = Code("CK521", Severity.ERROR, "a shard does not hold what the index says", _MIXED)
NOT_LISTED = Code("CK522", Severity.ERROR, "the index does not list a tensor", _MIXED)
TOTAL = Code("CK523", Severity.WARNING, "the index states another total size", "write the index again")
TWICE = Code("CK524", Severity.ERROR, "two shards hold one tensor", _MIXED)
SHADOWED = Code("CK525", Severity.WARNING, "a single file is loaded in place of the shards", "remove one of the two")
SMALL = Code("CK526", Severity.ERROR, "a configuration file is no JSON", "copy the file again")

NO_INDEX = Code(
    "CK528", Severity.WARNING, "shards without an index", "copy the index as well; transformers loads shards by it"
)
NO_CONFIG = Code("CK527", Severity.NOTE, "weights without a configuration", "copy config.json as well")

CODES = (BROKEN, NOT_HELD, NOT_LISTED, TOTAL, TWICE, SHADOWED, SMALL, NO_CONFIG, NO_INDEX)
_FORMATS = ("safetensors", "torch_bin")

_INDEX = re.compile(r"(.+)\.(safetensors|bin)\.index\.json$")
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.(safetensors|bin)$")
_PIECE = re.compile(r"shard-(\d+)-(model-\d+-of-\d+)\.safetensors$")
_SINGLE = re.compile(r"(model|pytorch_model|adapter_model)\.(safetensors|bin)$")
_CONFIGS = ("config.json", "adapter_config.json", "model_index.json")
_MAX_JSON_BYTES = 64 << 20
_MOST_NAMED = 100


def indexes(subject: Subject) -> Iterator[Finding]:
    """CK520–CK525, CK101, CK106: each index, and what it does not name."""
    names = [name for name in subject.files if "/" not in name and _INDEX.match(name) and subject.files[name]]
    for name in names:
        try:
            index = read_index(subject.store, name)
        except CheckpointingException as err:
            yield finding_of(err, default=BROKEN, file=name)
            continue
        if subject.catalog is None and not _is_of_pieces(subject, index):
            yield from _against_files(subject, index)
        yield from _total(subject, index, is_only=len(names) == 1)
        yield from _not_named(subject, index)
    if not names:
        yield from _series(subject)
    yield from _pieces(subject)


def _is_of_pieces(subject: Subject, index: WeightIndex) -> bool:
    """Whether the tensors lie in pieces of single ranks, for which the index names files that are not there."""
    has_pieces = any(is_piece(name.rpartition("/")[2]) for name in subject.files)
    return has_pieces and not any(name in subject.files for name in set(index.file_of.values()))


def _against_files(subject: Subject, index: WeightIndex) -> Iterator[Finding]:
    """CK101, CK521, CK522, CK524."""
    listed: dict[str, set[str]] = {}
    for key, name in index.file_of.items():
        listed.setdefault(name, set()).add(key)
    holder: dict[str, str] = {}
    for name, keys in sorted(listed.items()):
        if name not in subject.files:
            yield MISSING.finding(
                f"{index.file} names the file, for {len(keys)} tensors",
                file=name,
                key=min(keys),
                expected="the file",
                found="no such file",
            )
            continue
        held = _held(subject, name)
        if held is None:
            continue
        for key in sorted(keys - held)[:_MOST_NAMED]:
            yield NOT_HELD.finding(
                f"{index.file} places the tensor in this file, which does not hold it",
                file=name,
                key=key,
                expected="the tensor",
                found=f"{len(held)} other tensors",
            )
        for key in sorted(held - keys)[:_MOST_NAMED]:
            said = index.file_of.get(key)
            yield NOT_LISTED.finding(
                f"{index.file} does not list the tensor" if said is None else f"{index.file} places it in {said}",
                file=name,
                key=key,
                expected=said or "an entry",
                found=name,
            )
        for key in sorted(held & holder.keys())[:_MOST_NAMED]:
            yield TWICE.finding(
                f"the tensor is also in {holder[key]}", file=name, key=key, expected="one file", found="two"
            )
        holder.update((key, name) for key in held)


def _held(subject: Subject, name: str) -> set[str] | None:
    """Names of the tensors in a shard; None if it cannot be read, which is said elsewhere."""
    try:
        if name.endswith(".safetensors"):
            return set(read_header(subject.store, name).arrays)
        return set(parse(subject.store, name).arrays)
    except CheckpointingException:
        return None


def _total(subject: Subject, index: WeightIndex, *, is_only: bool) -> Iterator[Finding]:
    """CK523, once all tensors are known."""
    catalog = subject.catalog
    if index.total_bytes is None or catalog is None or not is_only or not _named_are_there(subject, index):
        return
    stated = [meta for key, meta in catalog.tensors.items() if key in index.file_of]
    n_bytes = sum(meta.n_bytes for meta in stated)
    n_shared = sum(meta.n_bytes for meta in stated if meta.key in catalog.aliases)
    if index.total_bytes not in (n_bytes, n_bytes - n_shared):
        yield TOTAL.finding(
            "the tensors have another size in all",
            file=index.file,
            expected=f"{n_bytes} bytes",
            found=f"{index.total_bytes} bytes",
        )


def _named_are_there(subject: Subject, index: WeightIndex) -> bool:
    return all(name in subject.files for name in set(index.file_of.values()))


def _not_named(subject: Subject, index: WeightIndex) -> Iterator[Finding]:
    """CK106, CK525: other files of the same name."""
    found = _INDEX.match(index.file)
    assert found is not None
    stem, suffix = found.groups()
    used = set(index.file_of.values())
    single = f"{stem}.{suffix}"
    if single in subject.files and single not in used:
        yield SHADOWED.finding(
            f"transformers loads it in place of what {index.file} names",
            file=single,
            expected="shards alone",
            found="a single file beside them",
        )
    for name in subject.files:
        shard = _SHARD.match(name)
        if shard is not None and (shard[1], shard[4]) == (stem, suffix) and name not in used:
            yield EXTRA.finding(
                f"{index.file} does not name the shard", file=name, expected="an entry", found="no tensor in it"
            )


def _series(subject: Subject) -> Iterator[Finding]:
    """CK101: without an index, numbers tell which shards there are; of one that is looked at alone, nothing follows."""
    if subject.store.entry is not None:
        return
    series: dict[tuple[str, str, str], set[int]] = {}
    for name in subject.files:
        shard = _SHARD.match(name)
        if shard is not None and "/" not in name and not _PIECE.match(name):
            series.setdefault((shard[1], shard[3], shard[4]), set()).add(int(shard[2]))
    for (stem, total, suffix), numbers in series.items():
        index = f"{stem}.{suffix}.index.json"
        if int(total) > 1 and index not in subject.files:
            yield NO_INDEX.finding(
                "the shards are numbered, but no index says what they hold",
                file=index,
                expected=index,
                found="no such file",
            )
        if 0 in numbers or subject.catalog is not None:
            continue
        lost = [number for number in range(1, min(int(total), 1 << 20) + 1) if number not in numbers]
        for number in lost[:_MOST_NAMED]:
            yield MISSING.finding(
                f"of {int(total)} shards, {len(numbers)} are there",
                file=f"{stem}-{number:0{len(total)}d}-of-{total}.{suffix}",
                expected="the file",
                found="no such file",
            )


def _pieces(subject: Subject) -> Iterator[Finding]:
    """CK163: each rank of torch's Hugging Face storage has the same files; the shapes are stated nowhere."""
    held: dict[str, dict[int, set[str]]] = {}
    for path in subject.files:
        folder, _, name = path.rpartition("/")
        piece = _PIECE.match(name)
        if piece is not None:
            held.setdefault(folder, {}).setdefault(int(piece[1]), set()).add(piece[2])
    for folder, ranks in held.items():
        every = set().union(*ranks.values())
        for rank, numbers in sorted(ranks.items()):
            for number in sorted(every - numbers):
                name = f"shard-{rank:05d}-{number}.safetensors"
                yield PIECES.finding(
                    "other ranks have pieces in a file of this number, this one has no such file",
                    file=f"{folder}/{name}" if folder else name,
                    rank=str(rank),
                    expected=f"files of {len(every)} numbers",
                    found=f"{len(numbers)}",
                )


def small_files(subject: Subject) -> Iterator[Finding]:
    """CK526: ``config.json`` is JSON; with headers, so is every JSON file beside the weights."""
    for name, size in subject.files.items():
        is_read = name == "config.json" or (subject.level >= Level.HEADERS and name.endswith(".json"))
        if not is_read or "/" in name or not 0 < size <= _MAX_JSON_BYTES or _INDEX.match(name):
            continue
        try:
            data = small_file(subject.store, name, max_bytes=_MAX_JSON_BYTES)
            if name == _CONFIGS[0]:
                object_of(data, file=name)  # as those who convert it read it
            elif data.lstrip()[:1] != b"[":  # some tools keep lists
                object_of(data, file=name, max_values=1 << 24)
        except CheckpointingException as err:
            yield finding_of(err, default=SMALL, file=name, expected="a JSON object")


def configuration(subject: Subject) -> Iterator[Finding]:
    """CK527: transformers, peft and diffusers load a directory by its configuration."""
    is_one = any(_INDEX.match(name) or _SINGLE.match(name) for name in subject.files)
    if subject.store.entry is None and is_one and not any(name in subject.files for name in _CONFIGS):
        yield NO_CONFIG.finding(
            "the directory holds weights of Hugging Face's names, but no configuration",
            file=_CONFIGS[0],
            expected=_CONFIGS[0],
            found="no such file",
        )


CHECKS = (
    Check(indexes, formats=_FORMATS),
    Check(small_files, formats=_FORMATS),
    Check(configuration, formats=_FORMATS),
)

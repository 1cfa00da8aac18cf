"""Which files of a directory the ranks of one job wrote, judged by their names.

Trainers choose the names, so only what they have in common counts: files of one *family* have the
same name but for the number of the rank::

    model_world_size_8_rank_3.pt   optim_world_size_8_rank_3.pt   extra_state_world_size_8_rank_3.pt
    checkpoint_rank3.pt   pytorch_model_fsdp_rank3.bin   rank_3.pt
    __3_0.pt
    model_3.pth

The number of the rank is the one after the word ``rank``; without the word, the first one of a name
such as ``__3_0.pt``, else the numbers in which the names differ. The content of the files says
which rank a file is of; the number serves where it does not. Whether it is such a file at all, the
classes in its pickle say (``names_distributed``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, UnsupportedError
from core.formats.torch.stream import SUFFIXES, stream_kind
from core.formats.torch.zip.container import read_archive
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_MOST_SNIFFED_BYTES = 4 << 20
_CLASSES = re.compile(
    rb"torch\.distributed\.(?:tensor|_tensor|_tensor\.api|_shard\.sharded_tensor\.api)"
    rb".{1,8}(?:DTensor|ShardedTensor)",
    re.DOTALL,
)
"""Module and class of a distributed tensor, as any protocol of pickle writes them."""
_NUMBER = re.compile(r"(\d{1,9})")
_RANK_WORD = re.compile(r"(?:^|[^A-Za-z]|[a-z](?=Rank))rank[_.=-]?$", re.IGNORECASE)
_DCP_LIKE = re.compile(r"__(?:#|\d+)_\d+\.")
_SIZE = re.compile(r"[_.-]?(?:world[_-]?size|of)[_.=-]?\d+", re.IGNORECASE)
_RANK = re.compile(r"[_.-]?rank[_.=-]?(?=#)", re.IGNORECASE)
_WORLD_SIZE = re.compile(r"(?:world[_-]?size|\dof|-of|_of)[_.=-]?(\d{1,9})", re.IGNORECASE)


def names_distributed(store: ReadStore, file: str) -> bool:
    """Return whether the pickle of a torch file names DTensor or ShardedTensor.

    Only the first megabytes of the pickle are searched. Files of another kind, and damaged ones,
    name nothing.
    """
    size = store.size(file)
    if size < 4 or stream_kind(store, file, 0, size) not in ("zip", "legacy"):
        return False
    try:
        if stream_kind(store, file, 0, size) == "legacy":
            return bool(_CLASSES.search(store.read(file, 0, min(size, _MOST_SNIFFED_BYTES))))
        pickle = read_archive(store, file, start=0, n_bytes=size).records.get("data.pkl")
        if pickle is None:
            return False
        data = store.read(file, pickle.offset, min(pickle.n_bytes, _MOST_SNIFFED_BYTES))
    except CheckpointingException:
        return False
    return bool(_CLASSES.search(data))


@dataclass(frozen=True, slots=True)
class FileFamily:
    """Files whose names differ in the number of the rank only.

    Args:
        pattern: their name, with ``#`` in place of the numbers of the rank.
        files: name → number of the rank in it, in the order of the numbers; the position in that
            order if a name has several such numbers.
        has_rank_word: the word ``rank`` is before the number.
    """

    pattern: str
    files: Mapping[str, int]
    has_rank_word: bool

    @property
    def label(self) -> str:
        """The kind of state in the file names, such as ``model`` or ``optim``; "" if none."""
        stem = "" if _DCP_LIKE.match(self.pattern) else self.pattern.rpartition(".")[0]
        return _RANK.sub("", _SIZE.sub("", stem)).replace("#", "").strip("_.-= ")

    @property
    def world_size(self) -> int | None:
        """Number of ranks in the names (``world_size_8``), or None."""
        match = _WORLD_SIZE.search(self.pattern)
        return None if match is None else int(match[1])

    def file_of(self, rank: int) -> str:
        """Return the name that the file of a rank would have, for messages."""
        if "#" not in self.pattern:
            return f"{self.pattern} of rank {rank}"
        # Numbers may be padded with zeros: rank_00003.
        widths = {len(name) for name in self.files}
        padded = any("0" + str(number) in name for name, number in self.files.items() if number)
        n_hashes = self.pattern.count("#")
        width = widths.pop() - len(self.pattern) + 1 if padded and len(widths) == 1 else 1
        return self.pattern.replace("#", f"{rank:0{width}}" if n_hashes == 1 else "*")


def families_of(names: Iterable[str]) -> list[FileFamily]:
    """Return the families of numbered torch files, sorted by their patterns."""
    # Names that are alike but for their numbers.
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for name in sorted(names):
        parts = _NUMBER.split(name)
        if name.endswith(SUFFIXES) and len(parts) > 1:
            alike.setdefault(tuple(parts[::2]), []).append(parts)
    # Those that differ in other numbers than those of the rank are several families.
    members: dict[tuple[str, bool], dict[str, tuple[int, ...]]] = {}
    for texts, split_names in alike.items():
        positions, has_word = _rank_positions(texts, split_names)
        for parts in split_names:
            numbers = tuple(int(parts[2 * position + 1]) for position in positions)
            pattern = "".join(
                "#" if index % 2 and index // 2 in positions else part
                for index, part in enumerate(parts)
            )
            members.setdefault((pattern, has_word), {})["".join(parts)] = numbers
    return [
        FileFamily(pattern, _numbered(numbers_of), has_word)
        for (pattern, has_word), numbers_of in sorted(members.items())
    ]


def _rank_positions(
    texts: Sequence[str], split_names: Sequence[Sequence[str]]
) -> tuple[tuple[int, ...], bool]:
    """Return which numbers of some names are those of the rank, and if the word ``rank`` says so.

    Args:
        texts: what the names have in common: the texts before, between and after the numbers.
        split_names: the names, split into texts and numbers.
    """
    after_word = tuple(
        position for position, text in enumerate(texts[:-1]) if _RANK_WORD.search(text)
    )
    if after_word:
        return after_word, True
    n_numbers = len(texts) - 1
    if _DCP_LIKE.match("".join(split_names[0])):
        return (0,), False
    varying = tuple(
        position
        for position in range(n_numbers)
        if len({parts[2 * position + 1] for parts in split_names}) > 1
    )
    return varying or (n_numbers - 1,), False


def _numbered(numbers_of: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return name → number of the rank, sorted by it."""
    names = sorted(numbers_of, key=lambda name: numbers_of[name])
    if all(len(numbers) == 1 for numbers in numbers_of.values()):
        return {name: numbers_of[name][0] for name in names}
    return {name: index for index, name in enumerate(names)}


def refuse_several_saves(families: Sequence[FileFamily], *, folder: str) -> None:
    """Raise if files from several saves are in one directory.

    Raises:
        UnsupportedError: two families differ in a number only, such as that of the step.
    """
    first_of: dict[str, FileFamily] = {}
    for family in families:
        other = first_of.setdefault(_NUMBER.sub("0", family.pattern), family)
        if other is not family:
            raise UnsupportedError(
                "the directory contains files from several saves: "
                f"{other.pattern.replace('#', '*')} and {family.pattern.replace('#', '*')}",
                file=folder,
                hint="pass any file of the save you want; ckpt reads the other ranks' files with "
                "it",
            )

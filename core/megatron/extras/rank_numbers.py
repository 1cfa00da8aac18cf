"""Find rank files that are in the directory of another rank.

The arguments in each file hold the global number of the rank that wrote it (``args.rank``). However
a run numbers its ranks, the numbers increase along each axis of the directory names while the other
axes stay the same::

    mp_rank_00_000  rank 0      mp_rank_00_001  rank 2      a step along TP, PP or EP:
    mp_rank_01_000  rank 1      mp_rank_01_001  rank 3      a larger number

So directories that were swapped, and files copied over those of another rank, are detected although
every tensor has the right shape. Conversion tools leave the same number in all files, which proves
nothing.

Source: Megatron-LM d98e8a64 ``core/parallel_state.py`` ``RankGenerator`` (strides are positive);
tests/golden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from core.errors import CheckpointingException, CorruptError
from core.megatron.model.args import fields_of
from core.pickle.fields import int_or_none
from core.pickle.inert import as_mapping
from core.values import dataclass

MISPLACED_HINT = (
    "rename each directory to match the rank recorded in its file, or copy the checkpoint again"
)


@dataclass(frozen=True, slots=True)
class MisplacedRank:
    """A rank directory with the file of another rank.

    Args:
        folder: name of the directory.
        number: number of the rank that wrote its file.
        expected: number of the rank whose file belongs there; None if several files have
            ``number``, so that one of them is a copy.
    """

    folder: str
    number: int
    expected: int | None


def find_misplaced(ranks: Collection[tuple[str, object]]) -> list[MisplacedRank]:
    """Compare the rank numbers in the files with the names of the directories.

    Args:
        ranks: (rank directory, content of its file) of every rank.
    """
    numbers = _get_numbers(ranks)
    if not have_numbers(ranks):
        return []
    counts = Counter(numbers.values())
    if max(counts.values()) > 1:
        return [
            MisplacedRank(folder, number, None)
            for folder, number in numbers.items()
            if counts[number] > 1
        ]
    return [
        MisplacedRank(folder, numbers[folder], number)
        for folder, number in _expected_numbers(numbers).items()
    ]


def have_numbers(ranks: Collection[tuple[str, object]]) -> bool:
    """Return whether rank numbers tell the files apart.

    Without a number in every file, or with the same number in all, nothing can be concluded.

    Args:
        ranks: (rank directory, content of its file) of every rank.
    """
    numbers = _get_numbers(ranks)
    return len(set(numbers.values())) > 1 and numbers.keys() == {folder for folder, _ in ranks}


def check_rank_numbers(ranks: Collection[tuple[str, object]]) -> None:
    """Raise unless every rank file is in the directory of the rank that wrote it.

    Args:
        ranks: (rank directory, content of its file) of every rank.

    Raises:
        CorruptError: a file is in another rank's directory, or a copy of another rank's file.
    """
    misplaced = find_misplaced(ranks)
    if not misplaced:
        return
    first = misplaced[0]
    problem = describe_misplaced(first.number)
    if first.expected is None:
        copies = [rank.folder for rank in misplaced if rank.number == first.number]
        problem = (
            f"global rank {first.number} wrote the files of {', '.join(copies)}, according to "
            "their arguments"
        )
    raise CorruptError(problem, rank=first.folder, hint=MISPLACED_HINT)


def describe_misplaced(number: int) -> str:
    """Return the sentence that says which rank wrote a file in another rank's directory."""
    return f"global rank {number} wrote this file, according to its arguments"


def _get_numbers(ranks: Collection[tuple[str, object]]) -> dict[str, int]:
    """Return rank directory → number of the rank that wrote its file, where it is recorded."""
    numbers: dict[str, int] = {}
    for folder, root in ranks:
        try:
            number = int_or_none(fields_of((as_mapping(root) or {}).get("args")).get("rank"))
        except CheckpointingException:
            continue
        if number is not None:
            numbers[folder] = number
    return numbers


def _expected_numbers(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the directories whose number is out of order along an axis, with the expected one.

    Args:
        numbers: rank directory → number of the rank that wrote its file.
    """
    expected: dict[str, int] = {}
    for line in _lines_along_axes(numbers):
        for folder, number in zip(line, sorted(numbers[name] for name in line), strict=True):
            if number != numbers[folder]:
                expected.setdefault(folder, number)
    return expected


def _lines_along_axes(folders: Iterable[str]) -> Iterator[list[str]]:
    """Yield the groups of directories whose names differ along one axis only, in its order.

    ``mp_rank_01_002`` has the axes 01 and 002. Nothing is yielded if a name has another form.
    """
    # The key of a line is its axis and the coordinates along the other axes.
    lines: dict[tuple[object, ...], list[tuple[int, str]]] = {}
    for folder in folders:
        parts = folder.split("_")[2:]
        if not all(part.isdecimal() for part in parts):
            return
        for axis, part in enumerate(parts):
            lines.setdefault((axis, *parts[:axis], None, *parts[axis + 1 :]), []).append(
                (int(part), folder)
            )
    for line in lines.values():
        yield [folder for _, folder in sorted(line)]

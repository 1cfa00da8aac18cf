"""The errors that the project raises on purpose.

The tree (exit codes are the command line's)::

    CheckpointingException              1   root, the documented API's name
    ├── UsageError                      2   the request contradicts itself
    │   └── NoEffectError               2   options of the request have no effect on it
    ├── CorruptError                    3   the checkpoint is damaged or incomplete
    │   ├── TruncatedError              3   a file is shorter than its metadata says
    │   ├── MissingShardError           3   a file or a region of a tensor is missing
    │   └── ReplicaMismatchError        3   copies that must be equal differ
    ├── UnsupportedError                4   a format, layout or feature that is not handled
    │   └── UnknownTensorError          4   no layout rule matches a tensor's name
    ├── UnsafeError                     5   refused: names outside the directory, hostile pickles, …
    ├── StorageError                    6   the operating system refused to read or write
    │   ├── AccessDeniedError           6   an object store does not let these credentials do it
    │   ├── UnansweredError             6   an object store failed, and may have written it or not
    │   └── SourceChangedError          6   a source file changed while it was read
    ├── CapacityError                   7   does not fit in memory or on the disk
    └── WorkerError                     8   a worker process failed

An error is one sentence about *what* is wrong, fields that locate it (file, key, rank, byte range),
and a hint about what to do next. ``--json`` prints the fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, Self


def did_you_mean(word: str, words: Iterable[str]) -> str | None:
    """Return the hint ``did you mean WORD?``; None if no word is similar to a misspelt one."""
    similar = most_similar(word, words)
    return None if similar is None else f"did you mean {similar}?"


def most_similar(word: str, words: Iterable[str]) -> str | None:
    """Return the word most similar to a misspelt one; None if none is.

    Case does not matter, nor does the difference of - and _.
    """
    from difflib import get_close_matches

    spellings = {name.lower().replace("_", "-"): name for name in words}
    spelling = word.lower().replace("_", "-")
    # An abbreviation is not similar enough for difflib: "trans" for "transformer_engine".
    longer = [name for name in spellings if len(spelling) > 1 and name.startswith(spelling)]
    matches = longer if 1 <= len(longer) <= 3 else get_close_matches(spelling, spellings, n=1)
    return spellings[matches[0]] if matches else None


def list_some(items: Iterable[object], most: int = 8) -> str:
    """Return the first items as text, and the number of the others: ``a, b and 7 more``."""
    texts = list(map(str, items))
    n_more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {n_more:,} more" if n_more > 0 else "")


class CheckpointingException(Exception):
    """The root of all errors that are raised on purpose.

    Args:
        message: what is wrong, one sentence, with the two values that disagree and their units.
        file: path of the file concerned, relative to the checkpoint where there is one.
        key: name of the tensor or object concerned.
        rank: the rank or rank directory concerned.
        span: byte range ``(start, stop)`` in ``file``.
        hint: what the user can do next.
        rule: the broken rule of a format, for checks that distinguish rules (``zip.overlap``); not
            shown.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        rank: str | None = None,
        span: tuple[int, int] | None = None,
        hint: str | None = None,
        rule: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.key = key
        self.rank = rank
        self.span = span
        self.hint = hint
        self.rule = rule

    def __str__(self) -> str:
        """Return message, place and hint on one line, for tracebacks and logs."""
        if not self.hint:
            return self.sentence
        is_command = self.hint.startswith("ckpt ")
        return (
            f"{self.sentence}. {self.hint if is_command else self.hint[0].upper() + self.hint[1:]}"
        )

    def breaking(self, rule: str) -> Self:
        """Set the broken rule unless the error has one already, and return the error."""
        self.rule = self.rule or rule
        return self

    def reword(self, spell: Callable[[str], str]) -> None:
        """Replace message and hint by what a function returns for them."""
        message = spell(self.message)
        if self.args == (self.message,):
            self.args = (message,)
        self.message = message
        self.hint = self.hint and spell(self.hint)

    @property
    def place(self) -> str:
        """Return file, tensor, rank and byte range as one text, "" without any."""
        parts = [
            f"{name} {value}"
            for name, value in (("file", self.file), ("tensor", self.key), ("rank", self.rank))
            if value is not None
        ]
        if self.span is not None:
            parts.append(f"bytes {self.span[0]}–{self.span[1]}")
        return ", ".join(parts)

    @property
    def sentence(self) -> str:
        """Return the message with the place in parentheses, without the hint."""
        return f"{self.message} ({self.place})" if self.place else self.message

    def fields(self) -> dict[str, object]:
        """Return the error as a JSON object, without the fields that are None."""
        fields: dict[str, object] = {"code": self.code, "message": self.message}
        for name in ("file", "key", "rank", "hint"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        if self.span is not None:
            fields["span"] = list(self.span)
        return fields


@contextmanager
def in_checkpoint(path: str) -> Iterator[None]:
    """Prefix the file of errors with a checkpoint's path, for work on several checkpoints."""
    try:
        yield
    except CheckpointingException as err:
        if err.file is None or path.endswith(f"/{err.file}"):
            err.file = path
        elif not is_at_or_below(err.file, path):
            err.file = f"{path}/{err.file}"
        raise


def is_at_or_below(file: str, path: str) -> bool:
    """Return whether the name of a file begins with a path: whether it is complete."""
    return file == path or file.startswith(f"{path.rstrip('/')}/")


@contextmanager
def suggesting(hint: str) -> Iterator[None]:
    """Give errors about malformed content a hint, unless they have one of their own.

    Also a decorator. What is merely not supported needs a hint of its own.
    """
    try:
        yield
    except (CorruptError, UnsafeError) as err:
        err.hint = err.hint or hint
        raise


EXTRAS = {
    "torch": ("PyTorch", "torch"),
    "tensorstore": ("TensorStore", "blosc"),
    "textual": ("textual", "explore"),
    "zarr": ("zarr", "torch"),
}
"""Import name of what is no dependency of every installation → title, extra of this package."""


@contextmanager
def explain_missing_extra(user: str) -> Iterator[None]:
    """Say what to install if a package of an extra cannot be imported in the block.

    Args:
        user: what needs it.
    """
    try:
        yield
    except ModuleNotFoundError as err:
        if err.name not in EXTRAS:
            raise
        title, extra = EXTRAS[err.name]
        text = f"{user} needs {title}: pip install 'ckpt-toolkit[{extra}]'"
        raise ModuleNotFoundError(text, name=err.name) from err


@contextmanager
def placing_errors(
    *, file: str | None = None, key: str | None = None, span: tuple[int, int] | None = None
) -> Iterator[None]:
    """Add file, key and bytes to errors that lack them."""
    try:
        yield
    except CheckpointingException as err:
        err.file = err.file or file
        err.key = err.key or key
        err.span = err.span or span
        raise


UNLIKE_ANY_WRITER = (
    "no training framework writes such a file; compare its size and checksum with the original, "
    "and if they differ, copy it again; if not, ask whoever wrote the file to save it again"
)
"""Hint for content that contradicts itself in a file of the right kind.

Bytes that changed and a writer with a fault look alike; only the original tells them apart.
"""


class UsageError(CheckpointingException):
    """The request contradicts itself, or names something that does not exist."""

    exit_code = 2
    code = "usage"


def flag_of(option: str) -> str:
    """Return the flag of an option: ``--vocab-size`` for ``vocab_size``."""
    return f"--{option.replace('_', '-')}"


class NoEffectError(UsageError):
    """Options of the request have no effect on it; no option is ignored.

    Args:
        options: names of the options: ``vocab_size``, or ``no_optim`` for one that is switched off.
        reason: why they have no effect.
        hint: the next step, in which "it" is the option; None to omit it.
    """

    def __init__(self, options: Sequence[str], reason: str, *, hint: str | None = None) -> None:
        hint = hint or "omit it"
        if len(options) > 1:
            hint = re.sub(r"\bit\b", "them", hint, count=1)
        super().__init__("", hint=hint)
        self.args = tuple(options), reason  # what unpickling passes
        verb = "has" if len(options) == 1 else "have"
        self.message = f"{', '.join(map(flag_of, options))} {verb} no effect: {reason}"


class NoEffect(NamedTuple):
    """A row of a table of refusals: options that have no effect on a request.

    Args:
        options: names of the options.
        applies: whether they have no effect on this request.
        reason: why.
        hint: the next step; None to omit them.
    """

    options: Sequence[str]
    applies: bool
    reason: str
    hint: str | None = None


def refuse_without_effect(given: Collection[str], table: Iterable[NoEffect]) -> None:
    """Raise for the first row of a table that applies to a given option.

    Args:
        given: names of the options of the request that differ from their defaults.
        table: options that may have no effect.

    Raises:
        NoEffectError: there is such a row; it names all its options that are given.
    """
    for row in table:
        options = [name for name in row.options if name in given]
        if row.applies and options:
            raise NoEffectError(options, row.reason, hint=row.hint)


class CorruptError(CheckpointingException):
    """The checkpoint contradicts itself: bad geometry, bad checksums, malformed metadata."""

    exit_code = 3
    code = "corrupt"


class TruncatedError(CorruptError):
    """A file ends before the bytes that its metadata promises."""

    code = "truncated"


class MissingShardError(CorruptError):
    """A file, a rank or a region of a tensor is missing."""

    code = "missing"


class ReplicaMismatchError(CorruptError):
    """Two stored copies of the same region hold different bytes."""

    code = "replica_mismatch"


class UnsupportedError(CheckpointingException):
    """A format, version, layout or feature that the project does not handle."""

    exit_code = 4
    code = "unsupported"


class UnknownTensorError(UnsupportedError):
    """No layout rule matches a tensor's name; the hint proposes a rule."""

    code = "unknown_tensor"


class UnsafeError(CheckpointingException):
    """Input that refers to files outside the checkpoint directory, or asks to run code."""

    exit_code = 5
    code = "unsafe"


class StorageError(CheckpointingException):
    """The operating system refused to read or write (missing permission, I/O error, …)."""

    exit_code = 6
    code = "io"


class AccessDeniedError(StorageError):
    """An object store does not let these credentials list, read or write."""


class UnansweredError(StorageError):
    """An object store did not answer, or failed; it may have done what was asked, or do it yet."""


class SourceChangedError(StorageError):
    """A source file changed between planning and the end of the copy."""

    code = "source_changed"


class CapacityError(CheckpointingException):
    """The work does not fit in memory or on the disk."""

    exit_code = 7
    code = "capacity"


class WorkerError(CheckpointingException):
    """A worker process failed; the message names it."""

    exit_code = 8
    code = "worker"


Report = Callable[[CheckpointingException], None]
"""Called with each problem after which a reader can go on: ``raising`` stops it, checks collect."""


def raising(problem: CheckpointingException) -> None:
    """Raise the problem, as operations do, which stop at the first one."""
    raise problem

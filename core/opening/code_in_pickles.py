"""Say that a pickle would run code: first if something else is wrong, and also if nothing is.

A pickle may be malformed, not what its file should hold, or text that looks like a server's
message, and still run code in whoever unpickles it: other readers run the calls before the
malformed byte. An error about the form alone would advise to fetch such a file again.

=========================  ==========================================================
 command                    an intact checkpoint that would run code
=========================  ==========================================================
 inspect, explore           shown, with a warning
 diff, manifest             done, with a warning
 validate                   CK601, an error; so ``prune`` counts it as damaged
 convert, reshard, merge    refused, unless the entry is excluded
=========================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from core.errors import (
    CheckpointingException,
    CorruptError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from core.files.store import ReadStore
from core.pickle.noted import noting_uses

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.formats.torch.other_pickles import PickledContent
    from core.pickle.uses import Use

HINT = "do not load the checkpoint with any other program, and find out who wrote it"

_MOST_NAMES = 20
"""Maximum number of names in a warning."""
_MOST_STREAMS = 512
"""Maximum number of objects with streams of their own, and of other files, to search for names."""
_MAX_STREAM_BYTES = 64 << 20
"""Maximum size of such a stream or file."""


@contextmanager
def naming_code_first(
    store: ReadStore, *, catalog: Catalog | None = None, uses: Iterable[Use] = ()
) -> Iterator[set[Use]]:
    """Replace an error in the block by one about a pickle that would run code, if there is any.

    Args:
        store: the files of the checkpoint.
        catalog: the checkpoint, if it was opened before the block; then the error may also be that
            it cannot be used as requested.
        uses: calls and references in pickles that were read before the block.

    Returns:
        The set that collects calls and references of the pickles that are read in the block.

    Raises:
        UnsafeError: the checkpoint is damaged or not supported, or cannot be used as requested, and
            a pickle would run code.
    """
    with noting_uses() as noted:
        try:
            yield noted
        except (CorruptError, UnsupportedError, UsageError) as err:
            if catalog is None and isinstance(err, UsageError):
                raise
            raise_if_code(
                store,
                err,
                uses=noted if catalog is None else collect_uses(store, catalog, noted.union(uses)),
            )
            raise


def raise_if_code(
    store: ReadStore, err: CheckpointingException, *, uses: Iterable[Use] = ()
) -> None:
    """Raise if a pickle of a checkpoint would run code; ``err`` becomes the cause.

    Args:
        err: the error about the checkpoint; its file is examined, whatever its name.
        uses: calls and references in the pickles that were read.

    Raises:
        UnsafeError: a pickle would run code.
    """
    # Only an error pays for these imports.
    from core.formats.torch.nested_names import uses_of_stream
    from core.formats.torch.other_pickles import look_into

    collected = {*uses}
    # The file may be in one of the checkpoint's directories, or named by its complete path.
    file = store.entry or (err.file or "").removeprefix(store.label).lstrip("/")
    with suppress(CheckpointingException):  # a file that cannot be read is reported by ``err``
        if file and store.exists(file):
            n_bytes = store.size(file)
            collected |= look_into(store, file, n_bytes).uses
            collected |= uses_of_stream(store, file, 0, n_bytes)
    dangerous = list_dangerous_names(collected)
    if dangerous:
        n_more = len(dangerous) - 1
        raise UnsafeError(
            f"a pickle refers to {dangerous[0]}"
            + (f" and {n_more} more" if n_more else "")
            + f", which would run code when it is loaded; in addition, {err.message}",
            file=err.file or store.label,
            key=err.key,
            hint=HINT,
        ) from err


def list_dangerous_names(uses: Iterable[Use]) -> list[str]:
    """Return the names that would run code, in pickles and in those nested in them, sorted."""
    from core.formats.torch.nested_names import with_nested
    from core.pickle.names import dangerous_uses

    return sorted({str(use.name)[:200] for use in dangerous_uses(with_nested(uses))})


def warn_of_pickles(
    store: ReadStore,
    catalog: Catalog,
    uses: Collection[Use],
    *,
    subject: str = "it",
    only_danger: bool = False,
) -> list[str]:
    """Return warnings about code in the pickles of a checkpoint that other software would run.

    Args:
        store, catalog, uses: an opened checkpoint; its objects need not be loaded.
        subject: names the checkpoint.
        only_danger: leave out what only the user can judge: unknown modules, and files that could
            not be examined.
    """
    uses = collect_uses(store, catalog, uses)
    other_files = _inspect_other_files(store)
    if not uses and not other_files:
        return []
    from core.pickle.names import is_foreign, judge

    uses = uses.union(*(item.uses for item in other_files.values()))
    dangerous = {str(use.name) for use in uses if judge(use) == "dangerous"}
    foreign = {str(use.name) for use in uses if is_foreign(use)}
    warnings = []
    if dangerous:
        warnings.append(
            f"WARNING: {subject} refers to {_some(dangerous)}, which other software would run when "
            "it loads the file; ckpt does not run any of it"
        )
    if only_danger:
        return warnings
    if foreign:
        warnings.append(
            f"WARNING: {subject} needs {_some(foreign)} from unknown modules, which torch.load "
            "would run; ckpt does not run any of it"
        )
    unread = {file for file, item in other_files.items() if item.unread}
    if unread:
        warnings.append(
            f"not examined: {_some(unread)}, which may contain a pickle; load it only if you trust "
            "its author"
        )
    return warnings


def collect_uses(store: ReadStore, catalog: Catalog, uses: Collection[Use]) -> set[Use]:
    """Return the uses of names in the pickles of an opened checkpoint, and in those nested in them.

    Args:
        store, catalog: the checkpoint; of objects that have not been loaded, the first are read.
        uses: calls and references in the pickles of the metadata.
    """
    if not uses and not catalog.objects:
        return set()
    from core.formats.torch.nested_names import uses_in, uses_of_stream, with_nested
    from core.opening.object_streams import expect_streams

    # Objects are walked as one, because ranks share most of theirs.
    collected = with_nested(uses) | uses_in([item.value for item in catalog.objects.values()])
    raw_keys = [item.raw_key for item in catalog.objects.values() if item.raw_key is not None]
    expect_streams(store, catalog, raw_keys[:_MOST_STREAMS])
    for raw_key in raw_keys[:_MOST_STREAMS]:
        stream = catalog.fragments(raw_key)[0].array
        if stream is None or stream.extent.encoding is not None:
            continue
        if stream.n_bytes <= _MAX_STREAM_BYTES:
            # ``ckpt validate`` reports damage.
            with suppress(CheckpointingException):
                extent = stream.extent
                collected |= uses_of_stream(store, extent.file, extent.offset, stream.n_bytes)
    return collected


def _inspect_other_files(store: ReadStore) -> dict[str, PickledContent]:
    """Inspect the files next to the checkpoint's own that have names of pickles.

    Returns:
        name → content, of the files with uses of names or parts that could not be read.
    """
    from core.formats.torch.stream import has_pickled_name

    if store.entry is not None:
        return {}
    sizes = store.sizes()
    names = [
        name
        for name, size in sizes.items()
        if 0 < size <= _MAX_STREAM_BYTES and has_pickled_name(name)
    ]
    names = names[:_MOST_STREAMS]
    if not names:
        return {}
    from core.formats.torch.other_pickles import look_into

    store.expect_headers(names)
    contents = {name: look_into(store, name, sizes[name]) for name in names}
    return {name: item for name, item in contents.items() if item.uses or item.unread}


def _some(names: set[str]) -> str:
    """List the first of many names, and count the rest."""
    first = [name[:200] for name in sorted(names)[:_MOST_NAMES]]
    n_more = len(names) - len(first)
    return ", ".join(first) + (f" and {n_more} more" if n_more else "")

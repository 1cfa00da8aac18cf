"""Say first that a pickle would run code, whatever else is wrong with the checkpoint.

A pickle may be malformed, not what its file should hold, or text that looks like a server's
message, and still run code in whoever unpickles it: other readers run the calls before the
malformed byte. An error about the form alone would advise to fetch such a file again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.files.store import ReadStore
from core.pickle.reader import noting_uses
from core.pickle.uses import Use

HINT = "do not load it with any other program, and find out who wrote it"


@contextmanager
def naming_code_first(store: ReadStore, *, uses: Iterable[Use] = ()) -> Iterator[set[Use]]:
    """Replace an error in the block by one about a pickle that would run code, if there is any.

    Args:
        store: the files of the checkpoint.
        uses: calls and references in pickles that were read before the block.

    Returns:
        The set that collects calls and references of the pickles that are read in the block.

    Raises:
        UnsafeError: the checkpoint is damaged or not supported, and a pickle would run code.
    """
    with noting_uses() as noted:
        try:
            yield noted
        except (CorruptError, UnsupportedError) as err:
            raise_if_code(store, err, uses=noted.union(uses))
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
            f"a pickle names {dangerous[0]}"
            + (f" and {n_more} more" if n_more else "")
            + f", which would run code when it is loaded; also: {err.message}",
            file=err.file or store.label,
            key=err.key,
            hint=HINT,
        ) from err


def list_dangerous_names(uses: Iterable[Use]) -> list[str]:
    """Return the names that would run code, in pickles and in those nested in them, sorted."""
    from core.formats.torch.nested_names import with_nested
    from core.pickle.names import dangerous_uses

    return sorted({str(use.name)[:200] for use in dangerous_uses(with_nested(uses))})

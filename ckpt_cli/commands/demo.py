"""``ckpt demo``: write the small checkpoints on which the examples of the documentation run.

They lie in ``playground.tar.xz`` beside this module; ``scripts/make_playground`` packs them.
"""

from __future__ import annotations

import shlex
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import bytes_text
from ckpt_cli.screen.failure import Terminated
from ckpt_cli.screen.terminal import escaped, screen_of
from core.errors import UsageError
from core.files.folders import make_folders, remove_empty

if TYPE_CHECKING:
    from ckpt_cli.options.demo import DemoOptions

ARCHIVE = Path(__file__).with_name("playground.tar.xz")
TO_TRY = (
    "ckpt inspect runs/llama",
    "ckpt reshard runs/llama runs/llama-tp2 --tp-new 2 --pp-new 2",
    "ckpt validate runs/damaged --deep",
)
"""Commands that are proposed; they run in the directory."""


def demo(options: DemoOptions) -> int:
    """Run ``ckpt demo`` and return the exit code.

    Raises:
        UsageError: the directory is not empty, or is a file.
        OSError: it cannot be written.
    """
    target_dir = options.dir
    if target_dir.exists() and (not target_dir.is_dir() or any(target_dir.iterdir())):
        state = "is not empty" if target_dir.is_dir() else "is a file"
        raise UsageError(
            f"{target_dir} {state}", hint="pass a directory that does not exist yet: ckpt demo DIR"
        )
    try:
        n_bytes = unpack_playground(target_dir)
    except Terminated as err:
        err.remaining = "nothing was written"
        raise
    screen = screen_of(sys.stdout)
    mark = screen.plain(screen.styled("✓", "green"))
    names = [path for folder in ("runs", "models") for path in (target_dir / folder).iterdir()]
    size = f"{len(names)} checkpoints, {bytes_text(n_bytes)}"
    print(f"{mark} wrote {escaped(str(target_dir))}: {size}")
    print("Megatron-LM, PyTorch, DeepSpeed, transformers, Lightning and Orbax wrote them. Try:")
    for command in (f"cd {shlex.quote(str(target_dir))}", *TO_TRY):
        print(f"  {escaped(command)}")
    return 0


def unpack_playground(
    target_dir: Path, *, is_wanted: Callable[[str], bool] = lambda name: True
) -> int:
    """Write the checkpoints into a directory, dated now, and return their bytes.

    A failure removes what was written, which would keep the next attempt from beginning.

    Args:
        target_dir: is made if it does not exist.
        is_wanted: called with the name of each file (``runs/llama/iter_0000010/…``).

    Raises:
        OSError: a file cannot be written, or has appeared in the meantime.
        StorageError: a directory cannot be created.
    """
    n_bytes = 0
    written: list[Path] = []
    new_dirs = make_folders(target_dir)
    try:
        with tarfile.open(ARCHIVE) as archive:
            for member in archive:
                if not is_wanted(member.name):
                    continue
                path = target_dir / member.name
                data = archive.extractfile(member)
                # Without bytes it is the directory of a missing file.
                new_dirs += make_folders(path if data is None else path.parent)
                if data is not None:
                    with path.open("xb") as file:
                        written.append(path)
                        n_bytes += file.write(data.read())
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        for folder in reversed(new_dirs):
            remove_empty([folder])
        raise
    return n_bytes

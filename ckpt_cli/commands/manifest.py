"""``ckpt manifest``: record checksums and fingerprints for later verification.

``--json`` prints one object (fields may be added, none change meaning)::

    {"schema": "ckpt.manifest-report/1", "path": str, "format": str, "manifest": str,
     "n_files": int, "n_bytes": int, "n_arrays": int, "n_fingerprints": int,
     "n_read_again": int, "seconds": float, "notes": [str]}

If several workers read the checkpoint, ``launch`` is present too
(``ckpt_cli.workers.current_team``).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.options.values import check_file
from ckpt_cli.screen.terminal import Screen, escaped, screen_of
from ckpt_cli.workers.current_team import device, launch_of, team, worker_threads
from ckpt_cli.workers.progress import progress_bar
from core.team.protocol import broadcast_result, is_lead

if TYPE_CHECKING:
    from ckpt_cli.options.manifest import ManifestOptions
    from core.manifest.inventory import Inventory


def manifest(options: ManifestOptions) -> int:
    """Run ``ckpt manifest`` and return the exit code.

    Raises:
        UsageError: an option is invalid, or a manifest exists and ``--force`` is not given.
        CheckpointingException: the checkpoint cannot be read, or the manifest not written.
    """
    from core.convert.job import DEFAULT_MEMORY_BYTES
    from core.manifest.inventory import (
        check_free,
        default_manifest_path,
        read_inventory,
        write_inventory,
    )
    from core.opening.open import FILL

    workers = team()
    begun = time.monotonic()
    check_file(options.rules, option="--rules")
    # Check that the manifest can be written before reading the checkpoint, which may take hours.
    broadcast_result(
        workers,
        lambda: check_free(
            options.output or default_manifest_path(options.path, iteration=options.iteration),
            force=options.force,
        ),
    )
    with progress_bar(is_wanted=not options.quiet and not options.json) as progress:
        contents = read_inventory(
            options.path,
            iteration=options.iteration,
            rules=options.rules,
            missing_chunks=options.missing_chunks or FILL,
            fingerprints=options.fingerprints,
            threads=options.threads or worker_threads(),
            memory_bytes=options.memory or DEFAULT_MEMORY_BYTES,
            progress=progress,
            team=workers,
            device=device(),
        )
    # The lead writes the manifest and prints the report.
    path = broadcast_result(
        workers, lambda: write_inventory(contents, options.output, force=options.force)
    )
    seconds = time.monotonic() - begun
    if not is_lead(workers):
        return 0
    if options.json:
        print(json.dumps(_as_json(contents, path, seconds)))
    elif not options.quiet:
        _print_report(screen_of(sys.stdout), contents, path, seconds)
    return 0


def _as_json(contents: Inventory, path: Path, seconds: float) -> dict[str, object]:
    """Return the object of ``--json``; its schema is in the module's docstring."""
    return {
        "schema": "ckpt.manifest-report/1",
        "path": str(contents.path),
        "format": contents.format,
        "manifest": str(path),
        "n_files": len(contents.files),
        "n_bytes": contents.n_bytes,
        "n_arrays": len(contents.arrays),
        "n_fingerprints": len(contents.fingerprints or ()),
        "n_read_again": contents.n_read_again,
        "seconds": seconds,
        "notes": list(contents.notes),
    } | launch_of(contents.figures)


def _print_report(screen: Screen, contents: Inventory, path: Path, seconds: float) -> None:
    """Print the path of the manifest, what it contains, and how long it took."""
    from ckpt_cli.screen.blocks import bytes_text, facts, n_text, seconds_text

    label = screen.styled("✓ wrote", "green", "bold")
    print(screen.plain(f"{label} {screen.styled(escaped(str(path)), 'bold')}"))
    rate = bytes_text(round(contents.n_bytes / seconds)) if seconds > 0 else "–"
    pairs = [
        ("files", f"{n_text(len(contents.files), 'file')}, {bytes_text(contents.n_bytes)}"),
        ("arrays", f"{len(contents.arrays):,} with a digest"),
        ("time", f"{seconds_text(seconds)} ({rate}/s)"),
    ]
    if contents.fingerprints is not None:
        again = f", {contents.n_read_again:,} of them read twice" if contents.n_read_again else ""
        pairs.insert(2, ("fingerprints", f"{len(contents.fingerprints):,}{again}"))
    pairs += [("note", escaped(note)) for note in contents.notes]
    for line in facts(screen, pairs):
        print(line)

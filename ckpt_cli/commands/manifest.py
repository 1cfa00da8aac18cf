"""``ckpt manifest``: writes down what a checkpoint holds, so that damage and differences can be told later.

``--json`` prints one object (fields may be added, none change meaning)::

    {"schema": "ckpt.manifest-report/1", "path": str, "format": str, "manifest": str, "n_files": int, "n_bytes": int,
     "n_arrays": int, "n_fingerprints": int, "n_read_again": int, "seconds": float, "notes": [str]}

Where several workers have read it, ``launch`` is there too (``ckpt_cli.workers.current_team``).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.options.values import check_rules, size_in_bytes
from ckpt_cli.screen.terminal import Screen, escaped, screen_of
from ckpt_cli.workers.current_team import device, launch_of, team, worker_threads
from ckpt_cli.workers.progress import progress_bar
from core.team.protocol import broadcast_result, is_lead

if TYPE_CHECKING:
    from ckpt_cli.options.manifest import ManifestOptions
    from core.manifest.inventory import Inventory


def manifest(options: ManifestOptions) -> int:
    """Runs the command; returns the exit code.

    Raises:
        CheckpointingException: the checkpoint cannot be read, or there is a manifest already.
    """
    from core.convert.job import DEFAULT_MEMORY_BYTES
    from core.manifest.inventory import read_inventory, write_inventory
    from core.opening.open import FILL

    us = team()
    begun = time.monotonic()
    check_rules(options.rules)
    broadcast_result(us, lambda: _check_free(options))
    with progress_bar(is_wanted=not options.quiet and not options.json) as progress:
        found = read_inventory(
            options.path,
            iteration=options.iteration,
            rules=options.rules,
            missing_chunks=options.missing_chunks or FILL,
            fingerprints=options.fingerprints,
            threads=options.threads or worker_threads(),
            memory_bytes=DEFAULT_MEMORY_BYTES if options.memory is None else size_in_bytes(options.memory),
            progress=progress,
            team=us,
            device=device(),
        )
    path = broadcast_result(us, lambda: write_inventory(found, options.output, force=options.force))
    seconds = time.monotonic() - begun
    if not is_lead(us):
        return 0
    if options.json:
        print(json.dumps(_report(found, path, seconds)))
    elif not options.quiet:
        _tell(screen_of(sys.stdout), found, path, seconds)
    return 0


def _check_free(options: ManifestOptions) -> None:
    from core.manifest.inventory import check_free, default_manifest_path

    check_free(options.output or default_manifest_path(options.path, iteration=options.iteration), force=options.force)


def _report(found: Inventory, path: Path, seconds: float) -> dict[str, object]:
    return {
        "schema": "ckpt.manifest-report/1",
        "path": str(found.path),
        "format": found.format,
        "manifest": str(path),
        "n_files": len(found.files),
        "n_bytes": found.n_bytes,
        "n_arrays": len(found.arrays),
        "n_fingerprints": len(found.fingerprints or ()),
        "n_read_again": found.n_read_again,
        "seconds": seconds,
        "notes": list(found.notes),
    } | launch_of(found.figures)


def _tell(screen: Screen, found: Inventory, path: Path, seconds: float) -> None:
    from ckpt_cli.screen.blocks import bytes_text, facts, n_text, seconds_text

    print(screen.plain(f"{screen.styled('✓ wrote', 'green', 'bold')} {screen.styled(escaped(str(path)), 'bold')}"))
    rate = bytes_text(round(found.n_bytes / seconds)) if seconds > 0 else "–"
    pairs = [
        ("files", f"{n_text(len(found.files), 'file')}, {bytes_text(found.n_bytes)}"),
        ("arrays", f"{len(found.arrays):,} with a digest"),
        ("time", f"{seconds_text(seconds)} ({rate}/s)"),
    ]
    if found.fingerprints is not None:
        again = f", {found.n_read_again:,} of them read again" if found.n_read_again else ""
        pairs.insert(2, ("fingerprints", f"{len(found.fingerprints):,}{again}"))
    pairs += [("note", escaped(note)) for note in found.notes]
    for line in facts(screen, pairs):
        print(line)

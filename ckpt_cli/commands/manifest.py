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

from ckpt_cli.options.shared.progress import progress_form
from ckpt_cli.options.shared.values import check_file
from ckpt_cli.screen.failure import Terminated
from ckpt_cli.screen.terminal import Screen, escaped, print_note, screen_of
from ckpt_cli.workers.current_team import default_memory, device, launch_of, team, worker_threads
from ckpt_cli.workers.progress import show_progress
from core.engine.team.protocol import broadcast_result, is_lead
from core.progress import Phase, begin_phase

if TYPE_CHECKING:
    from ckpt_cli.options.manifest import ManifestOptions
    from core.progress import OnProgress
    from core.publish.manifest.inventory import Inventory


def manifest(options: ManifestOptions) -> int:
    """Run ``ckpt manifest`` and return the exit code.

    Raises:
        UsageError: an option is invalid, or a manifest exists and ``--force`` is not given.
        CheckpointingException: the checkpoint cannot be read, or the manifest not written.
    """
    from core.publish.manifest.inventory import write_inventory

    workers = team()
    begun = time.monotonic()
    check_file(options.rules, option="--rules")
    with show_progress(progress_form(options.progress, is_quiet=options.quiet)) as progress:
        begin_phase(progress, Phase.OPENING)
        try:
            contents = _read_contents(options, progress)
        except Terminated as err:
            err.remaining = "no manifest was written"
            raise
        # The lead writes the manifest and prints the report.
        begin_phase(progress, Phase.PUBLISHING)
        path = broadcast_result(
            workers, lambda: write_inventory(contents, options.output, force=options.force)
        )
    seconds = time.monotonic() - begun
    if not is_lead(workers):
        return 0
    for warning in contents.warnings:
        print_note(warning)
    if options.json:
        print(json.dumps(_as_json(contents, path, seconds)))
    elif not options.quiet:
        _print_report(screen_of(sys.stdout), contents, path, seconds)
    return 0


def _read_contents(options: ManifestOptions, progress: OnProgress | None) -> Inventory:
    """Read the checkpoint, after checking that its manifest can be written.

    Raises:
        UsageError: a manifest exists and ``--force`` is not given.
        CheckpointingException: the checkpoint cannot be read.
    """
    from core.opening.open import FILL
    from core.publish.manifest.inventory import check_free, default_manifest_path, read_inventory

    workers = team()
    # Reading may take hours, so a manifest that is in the way is reported before.
    broadcast_result(
        workers,
        lambda: check_free(
            options.output or default_manifest_path(options.path, iteration=options.iteration),
            force=options.force,
        ),
    )
    return read_inventory(
        options.path,
        iteration=options.iteration,
        rules=options.rules,
        missing_chunks=options.missing_chunks or FILL,
        fingerprints=options.fingerprints,
        threads=options.threads or worker_threads(),
        memory_bytes=options.memory or default_memory(),
        progress=progress,
        team=workers,
        device=device(),
    )


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
        "notes": [*contents.warnings, *contents.notes],
    } | launch_of(contents.figures)


def _print_report(screen: Screen, contents: Inventory, path: Path, seconds: float) -> None:
    """Print the path of the manifest, what it contains, and how long it took."""
    from ckpt_cli.screen.blocks import (
        Cell,
        Facts,
        bytes_text,
        draw_text,
        n_text,
        seconds_text,
        title_cell,
    )

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
    title = (Cell("✓ wrote", ("green", "bold")), " ", title_cell(str(path)))
    for line in draw_text(screen, (title, Facts(pairs))):
        print(line)

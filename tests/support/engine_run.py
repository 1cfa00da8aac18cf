"""A whole run of the engine in a process of its own, for the tests that kill or limit it.

Usage: python engine_run.py SOURCE_DIR DST JSON, where JSON holds ``resume``, ``kill_after``
(bytes), ``fail_after`` (bytes), ``interrupt_after`` (bytes), ``limit`` (bytes per file), ``force``,
``hold`` (seconds to sleep in the stage). Prints a JSON object on success, exits with the error's
code on failure.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from tests.support.fragments import with_fragments

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from core.arrays.box import Box, full_box
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.file_image import FileImage, PlacedArray, literal_file
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import Fragment, TargetFragment, Tensor
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.errors import CheckpointingException, StorageError
from core.files.store import LocalStore
from core.publish.manifest.of_copy import finish_files, manifest_name, write_manifest
from core.publish.stage.protocol import StageRequest
from core.publish.stage.stage import Stage
from core.verbs.convert.stored_plan.file import identity_of

ROWS, COLUMNS, TENSORS = 1024, 96, 12
"""bf16: 192 KiB a tensor."""


def source_catalog() -> Catalog:
    """Row-parallel shards in two files."""
    half = COLUMNS // 2

    def fragments_of(key: str) -> list[Fragment]:
        number = int(key[1:])
        return [
            Fragment(
                Box((0, half * rank), (ROWS, half)),
                StoredArray(
                    f"{key}@{rank}",
                    "bfloat16",
                    (ROWS, half),
                    Extent(f"rank{rank}", number * ROWS * half * 2),
                ),
                (0, 0),
            )
            for rank in range(2)
        ]

    tensors = {f"t{n}": Tensor("bfloat16", (ROWS, COLUMNS)) for n in range(TENSORS)}
    return Catalog("fake", None, with_fragments(tensors, fragments_of))


def target_catalog(*, is_file: bool) -> tuple[TargetCatalog, list[FileImage]]:
    """Whole tensors in three files (or one), and a metadata file."""
    arrays = {f"t{n}": PlannedArray(f"t{n}", "bfloat16", (ROWS, COLUMNS)) for n in range(TENSORS)}

    def fragments_of(key: str) -> list[TargetFragment]:
        return [Fragment(full_box((ROWS, COLUMNS)), arrays[key], (0, 0))]

    images = []
    at_once = TENSORS if is_file else TENSORS // 3
    names = list(arrays)
    for first in range(0, TENSORS, at_once):
        placed = []
        end = 32
        for name in names[first : first + at_once]:
            placed.append(PlacedArray(end, arrays[name]))
            end += arrays[name].n_bytes + 8
        path = "out.bin" if is_file else f"deep/part{first}"
        images.append(
            FileImage(
                path, end, placed, lambda crc_of, name=names[first]: [(4, b"%08x" % crc_of(name))]
            )
        )
    if not is_file:
        images.append(literal_file("index", b"here", is_metadata=True))
    return target_catalog_like(fragments_of), images


def target_catalog_like(fragments_of: object) -> TargetCatalog:
    """A catalog of the same tensors with other fragments."""
    tensors = {f"t{n}": Tensor("bfloat16", (ROWS, COLUMNS)) for n in range(TENSORS)}
    return Catalog("fake", None, with_fragments(tensors, fragments_of))  # type: ignore[arg-type]


def run(source_dir: Path, dst: Path, options: dict[str, int]) -> dict[str, object]:
    """Plans, stages, copies and commits."""
    is_file = bool(options.get("is_file"))
    source = source_catalog()
    target, images = target_catalog(is_file=is_file)
    store = LocalStore(source_dir)
    plan = make_plan(source, target, images, threads=2)
    item_bytes = 64 << 10
    done = 0

    def progress(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if 0 < options.get("kill_after", 0) <= done:
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 < options.get("interrupt_after", 0) <= done:
            os.kill(os.getpid(), signal.SIGINT)  # perhaps from both threads: an impatient user
            options["interrupt_after"] = 0
        if 0 < options.get("fail_after", 0) <= done:
            raise StorageError("made to fail")

    request = StageRequest(
        n_bytes=plan.file_bytes,
        is_file=is_file,
        resume=bool(options.get("resume")),
        force=bool(options.get("force")),
        identify=lambda: identity_of(
            plan, store, options=str(options.get("other", "")), item_bytes=item_bytes
        ),
        keep=[source_dir],
        batch_bytes=200_000,
    )
    with Stage(dst, request) as stage:
        if options.get("hold"):
            sys.stdout.write("held\n")
            sys.stdout.flush()
            time.sleep(options["hold"])
        copying = CopyOptions(
            item_bytes=item_bytes, buffer_bytes=96 << 10, progress=progress, journal=stage.journal
        )
        result = execute(plan, store, stage.store, copying)
        files = finish_files(plan, result, stage.store)
        name = manifest_name(dst.name if is_file else None)
        write_manifest(stage.store, name, plan, result, files, tool="test 1")
        store.verify_unchanged()
        stage.commit()
    return {"notes": stage.notes, "resumed": result.resumed_bytes, "written": result.written_bytes}


if __name__ == "__main__":
    chosen = json.loads(sys.argv[3])
    if "limit" in chosen:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (chosen["limit"], chosen["limit"]))
    try:
        sys.stdout.write(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), chosen)))
    except CheckpointingException as err:
        sys.stderr.write(str(err))
        sys.exit(err.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)

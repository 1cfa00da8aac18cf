"""What is disturbed: a command that writes one kind of checkpoint, and the place where it does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from core.publish.manifest.of_copy import manifest_name
from core.publish.stage.folder_lock import stage_dir_of
from core.verbs.convert.stage import request_stage
from tests.faults.disturb import nothing
from tests.faults.operations import Disturb
from tests.faults.process import Ended, command, run

BATCH_BYTES = 8 << 10
"""What a killed run with ``--resume`` may lose once or twice; the checkpoints here are small."""

Tree = dict[str, bytes]
"""Path → content."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to write a checkpoint.

    Args:
        name: of the kind, as the table calls it.
        source: a golden checkpoint.
        arguments: of ``ckpt``, without source and destination.
        dst: name of the destination.
    """

    name: str
    source: str
    arguments: tuple[str, ...]
    dst: str = "out"


_HF, _RANKS = "hf/llama/safetensors_sharded", "mcore_legacy/dense_gelu/tp2_pp1"
_LAYER = ("--include", "*layers.0.*", "--include", "*embed*")
KINDS = (
    Kind("torch", _HF, ("convert", "--to", "torch", *_LAYER), "out.pt"),
    Kind("dcp", _HF, ("convert", "--to", "dcp", *_LAYER)),
    Kind(
        "safetensors", _HF, ("convert", "--to", "safetensors", "--max-shard-size", "50KB", *_LAYER)
    ),
    Kind("zarr3", _HF, ("convert", "--to", "zarr3", *_LAYER)),
    Kind("megatron", _RANKS, ("reshard", "--tp-new", "1", "--pp-new", "2")),
    Kind("torch_dist", _RANKS, ("convert", "--to", "torch_dist")),
)
WORKERS_KINDS = (
    *KINDS,
    Kind("zarr", _RANKS, ("convert", "--to", "zarr")),
    Kind("verified", _RANKS, ("reshard", "--tp-new", "4", "--verify", "--fingerprint")),
)
"""What several workers write."""


def tree(place: Path) -> Tree:
    """What lies at a path: a directory's files and its empty directories, or a file alone."""
    if place.is_file():
        return {"": place.read_bytes()}
    content: Tree = {}
    for path in place.rglob("*"):
        if path.is_file():
            content[str(path.relative_to(place))] = path.read_bytes()
        elif not any(path.iterdir()):
            content[f"{path.relative_to(place)}/"] = b""
    return content


@dataclass
class Target:
    """One kind of destination in a directory of its own.

    Args:
        kind: of the destination.
        golden_dir: holds the golden checkpoints.
        work_dir: an existing, empty directory.
        force: a complete destination stands there, and is to be replaced.
    """

    kind: Kind
    golden_dir: Path
    work_dir: Path
    force: bool = False
    _old_dir: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.work_dir / "watched"
        self.place = self.root / "place"
        self.src = self.root / "src"
        self.dst = self.place / self.kind.dst
        self.stage_dir = stage_dir_of(self.dst)
        self._notes_dir = self.work_dir / "notes"
        self._old_dir = self.work_dir / "old"
        self._notes_dir.mkdir()
        self.place.mkdir(parents=True)
        self.restore_source()
        assert request_stage.__kwdefaults__ is not None
        request_stage.__kwdefaults__["batch_bytes"] = BATCH_BYTES
        self.begin_anew(is_first=True)
        assert self.run().code == 0, self.run().output
        self.new = tree(self.dst)
        self.new_manifest = self._manifest()
        if self.force:
            self._make_old()

    def _make_old(self) -> None:
        """An old destination with other tensors."""
        self.begin_anew(is_first=True)
        result = self.run("--exclude", "*input_layernorm*")
        assert result.code == 0, result.output
        shutil.copytree(self.place, self._old_dir)

    def restore_source(self) -> None:
        """The source as it was in the beginning, its times included."""
        shutil.rmtree(self.src, ignore_errors=True)
        shutil.copytree(self.golden_dir / self.kind.source, self.src)
        for path in self.src.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, ns=(10**18, 10**18))

    def change_source(self) -> None:
        """Other bytes at the end of its largest file."""
        file = max(
            self.src.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0
        )
        content = bytearray(file.read_bytes())
        content[-1000:] = bytes(255 - byte for byte in content[-1000:])
        file.write_bytes(content)

    def begin_anew(self, *, is_first: bool = False) -> None:
        """Empties the place; with ``force``, the old destination stands there again. A neighbour is
        always there.
        """
        shutil.rmtree(self.place)
        if self.force and not is_first:
            shutil.copytree(self._old_dir, self.place)
        else:
            self.place.mkdir()
            (self.place / "neighbour").write_text("precious")

    @cached_property
    def old(self) -> Tree:
        """The old destination."""
        return tree(self._old_dir / self.kind.dst) if self.force else {}

    def work(self, *more: str, dst: Path | None = None) -> Callable[[], int]:
        """The command, to be run."""
        verb, *rest = self.kind.arguments
        force = ["--force"] if self.force else []
        return command(
            [verb, str(self.src), str(dst or self.dst), *rest, "--json", "-j", "1", *force, *more]
        )

    def run(self, *more: str, disturb: Disturb = nothing, dst: Path | None = None) -> Ended:
        """Runs the command in a process of its own."""
        return run(
            self.work(*more, dst=dst), root=self.root, notes_dir=self._notes_dir, disturb=disturb
        )

    def state(self) -> str:
        """What the destination is: ``none``, ``old``, ``new``, or what is wrong with it."""
        if not os.path.lexists(self.dst):
            return "none" if self._manifest() is None else "a manifest without its file"
        content = tree(self.dst)
        if content == self.new:
            return (
                "new"
                if self._manifest() in (None, self.new_manifest)
                else "new, with another manifest"
            )
        if self.force and content == self.old:
            return (
                "old"
                if self._manifest() != self.new_manifest or not self._is_file
                else "old, with a new manifest"
            )
        return f"torn: {sorted(content)[:10]}"

    def is_complete(self) -> bool:
        """Whether the new destination is there with its manifest."""
        return self.state() == "new" and self._manifest() == self.new_manifest

    def is_clean(self) -> bool:
        """Whether nothing lies about."""
        return set(os.listdir(self.place)) <= {
            "neighbour",
            self.kind.dst,
            manifest_name(self.kind.dst),
        }

    def is_untouched_beside(self) -> bool:
        """Whether the neighbour and the source are as they were."""
        return (self.place / "neighbour").read_text() == "precious"

    def is_aside(self) -> bool:
        """Whether the next run can put the old destination back."""
        aside = self.stage_dir / "old" / self.kind.dst
        return aside.exists() and tree(aside) == self.old

    @property
    def _is_file(self) -> bool:
        return self.dst.suffix != ""

    def _manifest(self) -> bytes | None:
        path = self.place / manifest_name(self.kind.dst)
        return path.read_bytes() if path.exists() else None

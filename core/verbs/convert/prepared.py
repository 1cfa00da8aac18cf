"""A conversion that is ready to run: what will be written, and the plan that proves it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.file_image import FileImage
from core.engine.plan.plan import Plan
from core.errors import UsageError
from core.formats.format import Format
from core.opening.open import Checkpoint
from core.publish.stage.destination import choose_destination
from core.publish.stage.protocol import OutputDestination
from core.values import dataclass
from core.verbs.convert.job import Job
from core.verbs.convert.report.dropped import DroppedReason, dropped_lines, group_by_reason
from core.verbs.convert.sizes import target_topology

if TYPE_CHECKING:
    from core.verbs.convert.explain import LayoutLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job ready to run: everything is decided and proven, and no data has been copied.

    Args:
        job: the conversion.
        source: the opened source.
        target_format: the format of the destination.
        dst: path of the destination.
        images: the files to write.
        plan: the proven work.
        renamed: (old key, new key) of each entry that ``rename`` changed.
        notes: notes for the user.
        dropped_entries: entries of the source that the destination will not contain.
        form: the source's global tensors under their final names, before they are cut for the
            destination.
        load_line: the line that loads the result.
        n_tensors: number of tensors of the destination, without those that it records by name
            only.
        links: (path, file of the source, bytes) of each hard link, with ``metadata_only``.
    """

    job: Job
    source: Checkpoint
    target_format: Format
    dst: Path
    images: tuple[FileImage, ...]
    plan: Plan
    renamed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    dropped_entries: tuple[Dropped, ...]
    form: Catalog
    load_line: str
    n_tensors: int
    links: tuple[tuple[str, str, int], ...] = ()

    @property
    def source_paths(self) -> tuple[Path, ...]:
        """Paths of all sources, which the destination must not replace."""
        merge = self.job.merge
        return (self.source.path, *(() if merge is None else merge.others))

    @property
    def destination(self) -> OutputDestination:
        """The destination, by which it is written."""
        return choose_destination(self.dst)

    @property
    def is_file(self) -> bool:
        """True if the destination is one file."""
        return self.target_format.writes_file(self.dst)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The complete list of ``dropped_entries``, a line each, with the reason."""
        return dropped_lines(self.dropped_entries)

    @property
    def dropped_reasons(self) -> tuple[DroppedReason, ...]:
        """The reasons of ``dropped_entries``, each once."""
        return group_by_reason(self.dropped_entries)

    @property
    def files(self) -> list[tuple[str, int]]:
        """Output files and their sizes in bytes, hard links first."""
        return [
            *((path, size) for path, _, size in self.links),
            *((image.path, image.size) for image in self.images),
        ]

    def files_for_rank(self, rank: int) -> list[str]:
        """Find the source files that one rank of the destination needs.

        Args:
            rank: index of the rank among the destination's rank directories in their order; in a
                format without them, index of a file among those with tensors.

        Raises:
            UsageError: the destination has no such rank.
        """
        is_ranks = self.target_format.is_rank_local
        # Collect the arrays of each rank's files.
        arrays: dict[str, set[str]] = {}
        for image in self.images:
            if image.arrays and (not is_ranks or "mp_rank_" in image.path):
                folder = image.path.rpartition("/")[0] if is_ranks else image.path
                arrays.setdefault(folder, set()).update(
                    placed.array.name for placed in image.arrays
                )
        if not 0 <= rank < len(arrays):
            unit = "rank directories" if is_ranks else "files with tensors"
            raise UsageError(
                f"there is no rank {rank}, because the destination has {len(arrays)} {unit}",
                hint=f"ranks are numbered from 0 to {len(arrays) - 1}" if arrays else "omit --rank",
            )
        # Follow the plan from those arrays back to the source's files.
        names = list(arrays.values())[rank]
        files: set[str] = set()
        for key in self.plan.keys():  # noqa: SIM118
            work = self.plan.match(key)
            for source_number, target_number, _ in work.pairs:
                target = work.targets[target_number].array
                array = work.pieces[source_number][1].array
                if target is not None and target.name in names and array is not None:
                    files.add(array.extent.file)
        return sorted(files)

    def explain_layout(self) -> list[LayoutLine]:
        """Explain the layout rule of each tensor.

        Raises:
            UsageError: the destination is not cut by a parallel layout.
        """
        from core.megatron.rules.tables import load_rules
        from core.verbs.convert.explain import explain_layout

        if self.form.facet(MegatronModel) is None or not self.target_format.has_layout:
            raise UsageError(
                f"--explain: this conversion to {self.target_format.name} uses no layout rules",
                hint="use --explain when writing megatron or torch_dist, for example "
                "ckpt reshard SRC --tp-new 4 --explain",
            )
        topology = target_topology(self.job, self.form, self.target_format)
        return explain_layout(
            self.form,
            topology,
            load_rules(self.job.rules, unknown=self.job.unknown),
            vocab_size=self.job.vocab_size,
        )

    def as_dict(self) -> dict[str, object]:
        """Build the JSON object of the plan."""
        return {
            "src": str(self.source.path),
            "source_format": self.source.format.name,
            "dst": str(self.dst),
            "target_format": self.target_format.name,
            "n_tensors": self.n_tensors,
            "read_bytes": self.plan.read_bytes,
            "least_read_bytes": self.plan.least_read_bytes,
            "write_bytes": self.plan.file_bytes,
            "memory_bytes": self.plan.memory_bytes,
            "n_fragments": self.plan.n_fragments,
            "files": [{"path": path, "bytes": size} for path, size in self.files],
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "notes": list(self.notes),
            "dropped": list(self.dropped),
            "dropped_reasons": [asdict(reason) for reason in self.dropped_reasons],
        }

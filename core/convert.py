"""Converting and resharding: the only place where format, layout, plan, copy and commit meet.

::

    open → [unshard] → select, cast, rename → [shard | stack | nest] → lay out → plan → stage, copy, literals, commit

``prepare`` does all of it that moves no data; ``run`` does the rest. Both doors call these two.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from core import __version__
from core.catalog import Catalog
from core.commit import Stage
from core.copy import execute
from core.errors import CheckpointingException, UnsupportedError, UsageError
from core.formats import Format, format_called
from core.formats.torch_file import load_object, refuse_unsupported
from core.image import FileImage, literal_file
from core.inert import as_mapping
from core.job import Job as Job
from core.job import Progress as Progress
from core.job import Report as Report
from core.job import TopologyChange as TopologyChange
from core.journal import identity_of
from core.layout import Rules, is_megatron, load_rules, shard, stack, unshard
from core.layout_args import facts_of, topology_of, with_vocab_size
from core.layout_checks import check_complete
from core.manifest import finish_files, manifest_name, write_manifest
from core.objects import inlined, loaded, nesting_notes, state_dict, vetted, with_common
from core.occupied import check_replaceable
from core.open import TRACKER, Checkpoint, open_checkpoint
from core.plan import Plan, make_plan
from core.target import partitioned, retyped
from core.topology import Topology
from core.transform import cast_of, rename, select, without_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job ready to run: everything is decided and proven, no data has moved.

    Args:
        job: what was asked for.
        source: the opened source.
        target_format: the format of the destination.
        dst: where the result goes.
        images: the output files.
        plan: the proven work.
        renamed: (old key, new key) of what ``rename`` changed.
        notes: what the user should know.
        dropped: entries of the source that the destination will not hold, with the reason.
    """

    job: Job
    source: Checkpoint
    target_format: Format
    dst: Path
    images: tuple[FileImage, ...]
    plan: Plan
    renamed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def is_file(self) -> bool:
        """Whether the destination is one file."""
        return self.target_format.is_single_file and self.dst.suffix != ""

    @property
    def files(self) -> list[tuple[str, int]]:
        """Output files and their sizes in bytes."""
        return [(image.path, image.size) for image in self.images]

    def files_for_rank(self, rank: int) -> list[str]:
        """Source files that one rank of the destination needs.

        Args:
            rank: index of a rank's file among those of the destination, in their order.

        Raises:
            UsageError: there is no such rank.
        """
        with_data = [image for image in self.images if image.arrays]
        if not 0 <= rank < len(with_data):
            raise UsageError(f"there is no rank {rank}: the destination has {len(with_data)} files with tensors")
        wanted = {placed.array.name for placed in with_data[rank].arrays}
        found: set[str] = set()
        for key in iter(self.plan.keys()):
            work = self.plan.match(key)
            for n_piece, n_target, _ in work.pairs:
                target, piece = work.targets[n_target].array, work.pieces[n_piece][1].array
                if target is not None and target.name in wanted and piece is not None and piece.extent is not None:
                    found.add(piece.extent.file)
        return sorted(found)

    def as_dict(self) -> dict[str, object]:
        """The plan as a JSON object."""
        return {
            "src": str(self.source.path),
            "source_format": self.source.format.name,
            "dst": str(self.dst),
            "target_format": self.target_format.name,
            "n_tensors": len(self.plan.target.tensors),
            "read_bytes": self.plan.read_bytes,
            "write_bytes": self.plan.file_bytes,
            "memory_bytes": self.plan.memory_bytes,
            "n_fragments": self.plan.n_fragments,
            "files": [{"path": path, "bytes": size} for path, size in self.files],
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "notes": list(self.notes),
            "dropped": list(self.dropped),
        }


@contextmanager
def prepare(job: Job) -> Iterator[Prepared]:
    """Opens the source, decides and proves everything; the source is closed at the end of the block.

    Raises:
        CheckpointingException: any kind; nothing has been written.
    """
    source = open_checkpoint(job.src, iteration=job.iteration)
    try:
        yield _prepared(job, source)
    finally:
        source.store.close()


def _prepared(job: Job, source: Checkpoint) -> Prepared:
    format = source.format if job.to is None else format_called(job.to)
    if format.lay_out is None:
        raise UnsupportedError(f"format {format.name} can be read, but not written")
    notes = list(source.notes)
    dropped: list[str] = []
    catalog, renamed = _global_catalog(job, source, format, notes, dropped)
    checked = vetted(catalog, keeps_unknown=format.partition == "ranks", drop_unknown=job.drop_unknown)
    dropped += checked.dropped
    catalog = checked.catalog
    dst = job.dst or _proposed_dst(job, source, format)
    if not format.is_single_file and "family" not in catalog.attrs:
        notes += nesting_notes(catalog)
    catalog, target = _source_and_target(job, catalog, format)
    notes += [note for note in _texts(target.attrs.get("notes")) if note not in notes]
    dropped += [text for text in _texts(target.attrs.get("dropped")) if text not in dropped]
    images = tuple(format.lay_out(target))
    if format.name == "torch_dist":
        images = _as_root(images, target.attrs.get("iteration"))
    if format.is_single_file and dst.suffix:
        images = (replace(images[0], path=dst.name),)
    plan = make_plan(catalog, target, images, threads=job.threads, memory_bytes=job.memory_bytes)
    return Prepared(
        job=job,
        source=source,
        target_format=format,
        dst=dst,
        images=images,
        plan=plan,
        renamed=tuple(renamed),
        notes=tuple(notes),
        dropped=tuple(dropped),
    )


def _global_catalog(
    job: Job, source: Checkpoint, format: Format, notes: list[str], dropped: list[str]
) -> tuple[Catalog, list[tuple[str, str]]]:
    """The source as global tensors under their final keys, its objects loaded."""
    catalog = loaded(source.catalog, source.store, load_object)
    rules = load_rules(job.rules)
    _check_source_sizes(job, catalog)
    if _changes_layout(job) and not _is_cut(format) and (job.to is not None or is_megatron(catalog, rules)):
        raise UsageError(
            f"format {format.name} has no parallel layout that {_options(job)} could change",
            hint="leave the sizes out, or write --to megatron or --to torch_dist",
        )
    if _is_laid_out(job, catalog, format, rules):
        catalog = unshard(
            catalog,
            rules=rules,
            vocab_size=job.vocab_size,
            optim="drop" if job.optim == "drop" else "refuse",
            keep_padded_vocab=job.keep_padded_vocab,
            target_tp=_topology(job, catalog, format).tp if _is_cut(format) else None,
        )
        catalog = _completed(job, catalog, source, notes)
    else:
        _refuse_layout_options(job)
        if job.optim == "drop":
            without = without_optimizer(catalog)
            catalog = without.catalog
            dropped += [f"optimizer ({len(without.left_out)} entries)"] if without.left_out else []
    dtype_for = cast_of(job.dtype, catalog.tensors)
    chosen = select(catalog, include=job.include, exclude=job.exclude)
    refuse_unsupported(chosen.catalog)
    if chosen.left_out:
        notes.append(f"{len(chosen.left_out)} entries left out by --include/--exclude")
    catalog, renamed = rename(retyped(chosen.catalog, dtype_for), job.rename)
    if catalog.attrs.get("family") == "megatron" and _is_cut(format) and (chosen.left_out or renamed):
        _refuse_incomplete(catalog, rules)
    return catalog, renamed


def _changes_layout(job: Job) -> bool:
    """Whether the job names sizes for the destination."""
    return job.topology is not None and bool(job.topology.sizes)


def _options(job: Job) -> str:
    sizes = {} if job.topology is None else job.topology.sizes
    return ", ".join(f"--{name}-new" for name in sizes)


def _is_cut(format: Format) -> bool:
    """Whether a destination of this format is cut by a parallel layout."""
    return format.partition == "ranks" or format.name == "torch_dist"


def _is_laid_out(job: Job, catalog: Catalog, format: Format, rules: Rules) -> bool:
    """Whether the source must be brought into Megatron's global form."""
    if catalog.attrs.get("is_rank_local") or format.partition == "ranks" or _changes_layout(job):
        return True
    return format.name == "torch_dist" and catalog.format != "torch_dist" and is_megatron(catalog, rules)


def _refuse_layout_options(job: Job) -> None:
    """Options that only a layout could honour are not ignored."""
    given = {
        "--vocab-size": job.vocab_size is not None,
        "--keep-padded-vocab": job.keep_padded_vocab,
        "--rules": job.rules is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} has no effect: this conversion changes no parallel layout", hint="leave it out")


def _completed(job: Job, catalog: Catalog, source: Checkpoint, notes: list[str]) -> Catalog:
    """The global form with what the user or the directory's name says beside the checkpoint."""
    if catalog.attrs.get("iteration") is None and source.iteration is not None:
        notes.append(f"the files do not say their iteration; {source.iteration} is the directory's")
        catalog = catalog.with_attrs(iteration=source.iteration)
    n_rows = catalog.attrs.get("vocab_size")
    if (job.vocab_size is not None or job.keep_padded_vocab) and isinstance(n_rows, int):
        args = with_vocab_size(catalog.attrs["args"], n_rows)
        common = as_mapping(catalog.attrs.get("common")) or {}
        catalog = catalog.with_attrs(args=args, common={**common, "args": args})
        notes.append(f"args.vocab_size is now {n_rows}")
    if any(glob is None for glob, _ in job.dtype):
        notes.append("params_dtype, bf16 and fp16 in the arguments stay as they were")
    return catalog


def _refuse_incomplete(catalog: Catalog, rules: Rules) -> None:
    """A Megatron checkpoint without some of the model's tensors would load nowhere.

    Raises:
        UsageError: names what is missing.
    """
    try:
        check_complete(catalog.tensors, facts_of(catalog.attrs.get("args")), rules)
    except (CheckpointingException, ValueError) as err:
        what = err.message if isinstance(err, CheckpointingException) else str(err)
        raise UsageError(
            f"--include, --exclude or --rename leave an incomplete Megatron model: {what}",
            key=getattr(err, "key", None),
            hint="write --to dcp or --to torch to keep a part of a model",
        ) from err


def _source_topology(catalog: Catalog) -> Topology | None:
    """Sizes of the run that saved, or None where nothing says."""
    found = catalog.attrs.get("topology")
    if isinstance(found, Topology):
        return found
    args = catalog.attrs.get("args")
    if args is None and "args" in catalog.objects:
        args = catalog.objects["args"].value
    return topology_of(args) if args is not None else None


def _check_source_sizes(job: Job, catalog: Catalog) -> None:
    asserted = job.topology.source if job.topology is not None else {}
    if not asserted:
        return
    found = _source_topology(catalog)
    if found is None:
        raise UsageError(
            "the checkpoint does not say which parallel sizes it was saved with",
            hint=f"leave out {', '.join('--' + name for name in asserted)}",
        )
    for name, size in asserted.items():
        actual = found.expert_tp if name == "etp" else getattr(found, name)
        if actual != size:
            raise UsageError(
                f"--{name} {size} was said, but the checkpoint has {name.upper()} {actual} ({found})",
                hint=f"say --{name} {actual}, or leave it out",
            )


def _topology(job: Job, catalog: Catalog, format: Format) -> Topology:
    """Sizes of the destination.

    Sizes that are not given stay the source's where global tensors are only cut into pieces by them, or where the job
    keeps the layout; rank files get 1.
    """
    keeps = job.keeps_layout or format.partition != "ranks"
    base = (_source_topology(catalog) if keeps else None) or Topology()
    if format.partition != "ranks":
        base = replace(base, vpp=1)  # global tensors know no model chunks
    return replace(base, **({} if job.topology is None else job.topology.sizes))


def _source_and_target(job: Job, catalog: Catalog, format: Format) -> tuple[Catalog, Catalog]:
    """(the source under the target's keys, the target catalog whose arrays are to be placed)."""
    is_megatron = catalog.attrs.get("family") == "megatron"
    if format.partition == "ranks":
        target = shard(catalog, _topology(job, catalog, format), rules=load_rules(job.rules), vocab_size=job.vocab_size)
        return catalog, target
    if is_megatron and format.name == "torch_dist":
        stacked = stack(
            catalog, _topology(job, catalog, format), rules=load_rules(job.rules), vocab_size=job.vocab_size
        )
        return stacked.source, stacked.target
    if format.name == "torch_dist":
        catalog = with_common(catalog)
    else:
        catalog = state_dict(catalog)
    if format.is_single_file:
        catalog = inlined(catalog)
    return catalog, partitioned(catalog, format=format.name, by=format.partition)


def _as_root(images: tuple[FileImage, ...], iteration: object) -> tuple[FileImage, ...]:
    """The images of a training root with its tracker, as Megatron loads it; as they are without an iteration."""
    if type(iteration) is not int:
        return images
    moved = tuple(replace(image, path=f"iter_{iteration:07d}/{image.path}") for image in images)
    return (*moved, literal_file(TRACKER, str(iteration).encode("ascii"), is_metadata=True))


def _texts(found: object) -> list[str]:
    return [str(text) for text in found] if isinstance(found, (list, tuple)) else []


_SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors"}


def _proposed_dst(job: Job, source: Checkpoint, format: Format) -> Path:
    """A name beside the source: ``SRC-tp4-pp1`` for another layout, else ``SRC.FORMAT``."""
    src = Path(os.path.abspath(job.src))
    stem = src.name.removesuffix(src.suffix) if source.store.entry else src.name
    if job.topology is not None and job.keeps_layout:
        topology = _topology(job, source.catalog, format)
        name = f"{stem}-tp{topology.tp}-pp{topology.pp}"
        return src.parent / (name if job.to is None else f"{name}.{format.name}")
    return src.parent / (stem + _SUFFIXES.get(format.name, f".{format.name}"))


def run(job: Job, *, progress: Progress | None = None) -> Report:
    """Does the job: all or nothing, unless ``resume`` keeps an unfinished stage.

    Args:
        job: what to do.
        progress: called with (bytes done, bytes in all) from the copying threads.

    Raises:
        CheckpointingException: any kind; the destination is untouched.
    """
    begun = time.monotonic()
    with prepare(job) as prepared:
        plan, source = prepared.plan, prepared.source
        is_file = prepared.is_file
        if job.force:
            check_replaceable(prepared.dst, [image.path for image in prepared.images])
        needed = plan.file_bytes
        stage = Stage(
            prepared.dst,
            is_file=is_file,
            resume=job.resume,
            force=job.force,
            fsync=job.fsync,
            identity=identity_of(plan, source.store, options=_identity(job)) if job.resume else "",
            needed_bytes=needed,
            keep=(source.path,),
        )
        with stage:
            result = execute(
                plan,
                source.store,
                stage.store,
                crc=job.crc,
                digest=job.digest,
                progress=_counted(progress, plan.write_bytes),
                journal=stage.journal,
            )
            files = finish_files(plan, result, stage.store, crc=job.crc)
            manifest = manifest_name(prepared.dst.name if is_file else None)
            tool = f"ckpt-toolkit {__version__}"
            write_manifest(stage.store, manifest, plan, result, files, tool=tool, crc=job.crc)
            source.store.verify_unchanged()
            stage.commit()
        return Report(
            src=str(source.path),
            dst=str(prepared.dst),
            source_format=source.format.name,
            format=prepared.target_format.name,
            n_tensors=len(plan.target.tensors),
            bytes_read=result.read_bytes,
            bytes_written=plan.file_bytes,
            bytes_resumed=result.resumed_bytes,
            seconds=time.monotonic() - begun,
            files=tuple(path for path, _ in prepared.files),
            manifest=str(prepared.dst.parent / manifest if is_file else prepared.dst / manifest),
            notes=(*prepared.notes, *stage.notes),
            dropped=prepared.dropped,
        )


def _identity(job: Job) -> str:
    """The options that decide which bytes are written, and by which version of the tool."""
    options = asdict(job)
    for name in ("src", "dst", "resume", "force", "fsync", "threads", "memory_bytes"):
        del options[name]
    return json.dumps([__version__, options], default=str, sort_keys=True)


def _counted(progress: Progress | None, n_bytes: int) -> Callable[[int], None] | None:
    """Turns steps into totals; safe for threads."""
    if progress is None:
        return None
    lock = threading.Lock()
    done = 0

    def step(n: int) -> None:
        nonlocal done
        with lock:
            done += n
            progress(done, n_bytes)

    return step

"""The parallel sizes of a job's source and of its destination."""

from __future__ import annotations

from dataclasses import replace

from core.catalog.catalog import Catalog
from core.convert.job import Job
from core.errors import UsageError
from core.formats.format import Format
from core.megatron.model.args import topology_of
from core.megatron.model.topology import Topology


def _source_topology(catalog: Catalog) -> Topology | None:
    """Sizes of the run that saved, or None where nothing says."""
    topology = catalog.facet(Topology)
    if topology is not None:
        return topology
    args = catalog.args
    if args is None and "args" in catalog.objects:
        args = catalog.objects["args"].value
    return topology_of(args) if args is not None else None


def check_source_sizes(job: Job, catalog: Catalog) -> None:
    """The sizes that the user asserts of the source are its own.

    Raises:
        UsageError: it has others, or does not say.
    """
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


def target_topology(job: Job, catalog: Catalog, format: Format) -> Topology:
    """Sizes of the destination.

    Sizes that are not given stay the source's where global tensors are only cut into pieces by them, or where the job
    keeps the layout; rank files get 1. A pipeline layout has the number of model chunks in it.

    Raises:
        UsageError: it has another than was asked for, or its parts do not divide over the pipeline stages.
    """
    keeps = job.keeps_layout or format.partition != "ranks"
    base = (_source_topology(catalog) if keeps else None) or Topology()
    sizes = {} if job.topology is None else job.topology.sizes
    pipeline = None if job.topology is None else job.topology.pipeline
    if format.partition != "ranks" and sizes.get("pp", base.pp) != base.pp:
        base = replace(base, vpp=1)  # global tensors know no model chunks, only which stage's rank writes what
    made = replace(base, **sizes, pipeline=pipeline)
    if pipeline is None or pipeline.layout is None:
        return made
    vpp, rest = divmod(len(pipeline.layout), made.pp)
    if rest or sizes.get("vpp", vpp) != vpp:
        raise UsageError(
            f"--pipeline-model-parallel-layout has {len(pipeline.layout)} parts, which are not those of PP {made.pp}"
            + (f" and VPP {sizes['vpp']}" if "vpp" in sizes else ""),
            hint="it has one part for every model chunk, PP × VPP in all; say --pp-new",
        )
    return replace(made, vpp=vpp)

"""Find the parallel sizes of a job's source and of its destination."""

from __future__ import annotations

from dataclasses import replace

from core.catalog.catalog import Catalog
from core.convert.job import Job
from core.errors import UsageError
from core.formats.format import Format
from core.megatron.model.args import topology_of
from core.megatron.model.topology import Topology


def _source_topology(catalog: Catalog) -> Topology | None:
    """Return the parallel sizes of the run that saved, or None if nothing records them."""
    topology = catalog.facet(Topology)
    if topology is not None:
        return topology
    args = catalog.args
    if args is None and "args" in catalog.objects:
        args = catalog.objects["args"].value
    return topology_of(args) if args is not None else None


def check_source_sizes(job: Job, catalog: Catalog) -> None:
    """Raise unless the source has the parallel sizes that the user asserts.

    Raises:
        UsageError: the source has other sizes, or does not record them.
    """
    asserted = job.topology.source if job.topology is not None else {}
    if not asserted:
        return
    topology = _source_topology(catalog)
    if topology is None:
        raise UsageError(
            "the checkpoint does not record the parallel sizes it was saved with",
            hint=f"leave out {', '.join('--' + name for name in asserted)}",
        )
    for name, size in asserted.items():
        actual = topology.expert_tp if name == "etp" else getattr(topology, name)
        if actual != size:
            raise UsageError(
                f"--{name} {size} does not match the checkpoint, which has {name.upper()} {actual} ({topology})",
                hint=f"use --{name} {actual}, or leave it out",
            )


def target_topology(job: Job, catalog: Catalog, format: Format) -> Topology:
    """Return the parallel sizes of the destination.

    Sizes that are not given stay the source's where they only cut global tensors into pieces, or
    where the job keeps the layout; rank files get 1. A pipeline layout determines the number of
    model chunks.

    Raises:
        UsageError: the pipeline layout has another number of model chunks than was asked for, or
        its parts do not divide evenly over the pipeline stages.
    """
    keeps = job.keeps_layout or format.partition != "ranks"
    base = (_source_topology(catalog) if keeps else None) or Topology()
    sizes = {} if job.topology is None else job.topology.sizes
    pipeline = None if job.topology is None else job.topology.pipeline
    if format.partition != "ranks" and sizes.get("pp", base.pp) != base.pp:
        base = replace(
            base, vpp=1
        )  # global tensors know no model chunks, only which stage's rank writes what
    topology = replace(base, **sizes, pipeline=pipeline)
    if pipeline is None or pipeline.layout is None:
        return topology
    vpp, rest = divmod(len(pipeline.layout), topology.pp)
    if rest or sizes.get("vpp", vpp) != vpp:
        raise UsageError(
            f"--pipeline-model-parallel-layout has {len(pipeline.layout)} parts, which does not match PP {topology.pp}"
            + (f" and VPP {sizes['vpp']}" if "vpp" in sizes else ""),
            hint="it needs one part for every model chunk, PP × VPP in all; set --pp-new",
        )
    return replace(topology, vpp=vpp)

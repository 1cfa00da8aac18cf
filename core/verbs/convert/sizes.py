"""Determine the parallel sizes of a job's source and of its destination."""

from __future__ import annotations

from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.errors import UnsupportedError, UsageError
from core.formats.format import Format
from core.megatron.model.topology import Topology
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.options import has_model_form


def _source_topology(catalog: Catalog) -> Topology | None:
    """Return the parallel sizes of the run that saved, or None if nothing records them."""
    from core.megatron.model.args import topology_of

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
    if job.topology is None or not job.topology.source:
        return
    asserted = job.topology.source
    topology = _source_topology(catalog)
    if topology is None:
        # Whoever gives only these options means the sizes to write.
        hint = f"omit {', '.join('--' + name for name in asserted)}"
        if not job.topology.sizes:
            wanted = " ".join(f"--{name}-new {size}" for name, size in asserted.items())
            hint = f"these options describe SRC; to choose the sizes to write, use {wanted}"
        raise UsageError(
            "the checkpoint does not record the parallel sizes it was saved with", hint=hint
        )
    for name, size in asserted.items():
        # A checkpoint without an ETP of its own shards its experts by TP.
        actual = topology.expert_tp if name == "etp" else getattr(topology, name)
        if actual != size:
            raise UsageError(
                f"--{name} {size} does not match the checkpoint, which has "
                f"{name.upper()} {actual} ({topology})",
                hint=f"use --{name} {actual}, or omit it",
            )


def target_topology(job: Job, catalog: Catalog, format: Format) -> Topology:
    """Determine the parallel sizes of the destination.

    Args:
        job: the conversion.
        catalog: the source, or its global form.
        format: the format of the destination.

    Returns:
        The sizes of the job. Others stay the source's; they are 1 if it records none.

    Raises:
        UsageError: the parts of the pipeline layout do not divide evenly over the pipeline stages,
            or give another number of model chunks than the job requests.
    """
    base = _source_topology(catalog) or Topology()
    change = job.topology or TopologyChange()
    sizes, pipeline = change.sizes, change.pipeline
    # Global tensors have no model chunks; the source's VPP would not fit another PP.
    if not format.is_rank_local and sizes.get("pp", base.pp) != base.pp:
        base = replace(base, vpp=1)
    topology = replace(base, **sizes, pipeline=pipeline)
    if pipeline is None or pipeline.layout is None:
        return topology

    # An explicit pipeline layout determines VPP: one part for each model chunk.
    n_parts = len(pipeline.layout)
    vpp, remainder = divmod(n_parts, topology.pp)
    if remainder or sizes.get("vpp", vpp) != vpp:
        vpp_text = f" and VPP {sizes['vpp']}" if "vpp" in sizes else ""
        raise UsageError(
            f"--pipeline-model-parallel-layout has {n_parts} parts, which does not match "
            f"PP {topology.pp}{vpp_text}",
            hint="use one part per model chunk (PP × VPP in total), or set --pp-new",
        )
    return replace(topology, vpp=vpp)


def written_topology(job: Job, catalog: Catalog, format: Format) -> Topology | None:
    """Return the parallel sizes of a Megatron checkpoint that is written, None for another."""
    if not has_model_form(job, format) or catalog.args is None:
        return None
    try:
        return target_topology(job, catalog, format)
    except UnsupportedError:
        # A script of one's own may save an ``args`` without sizes; Megatron's cannot load it.
        return None

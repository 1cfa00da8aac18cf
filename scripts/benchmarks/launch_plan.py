"""Plans a reshard, writes its plan file and divides it, as the lead of a team does; prints what
that took as JSON.

    python -m scripts.benchmarks.launch_plan SRC SIZE N WORKERS...

``SIZE`` is the parallel size that changes (``tp``, ``ep`` …), ``N`` what it becomes. ``balance`` is
the largest worker's bytes by the mean, counted item by item as a worker does its share: an item
belongs to the part in which it begins.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from bisect import bisect_right
from pathlib import Path

from core.engine.plan.items import items_of, weight_of
from core.engine.plan.plan import Plan
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job
from core.verbs.convert.stored_plan.division import Division, divide_work
from core.verbs.convert.stored_plan.file import finish_plan, write_plan


def loads_of(plan: Plan, divisions: list[Division], *, band_bytes: int) -> list[list[int]]:
    """Bytes of every worker of each division."""
    loads = [[0] * one.n_workers for one in divisions]
    for number, key in enumerate(plan.keys()):
        shared = [one.shared.get(number) for one in divisions]
        starts = [None if parts is None else [part.start for _, part in parts] for parts in shared]
        begin = 0
        for item in items_of(
            plan.match(key), places=plan.places, bind=lambda array: array, band_bytes=band_bytes
        ):
            weight = weight_of(item)
            for load, one, parts, at in zip(loads, divisions, shared, starts, strict=True):
                if parts is None or at is None:
                    load[one.owners[number]] += weight
                else:
                    load[parts[bisect_right(at, begin) - 1][0]] += weight
            begin += weight
    return loads


def main() -> None:
    src, name, size, *numbers = sys.argv[1:]
    n_workers = [int(number) for number in numbers]
    topology = TopologyChange(**{name: int(size)})
    job = Job(src=Path(src), topology=topology, is_reshard=True, memory_bytes=4 << 30)
    begun, used = time.monotonic(), time.process_time()
    with prepare(job) as prepared, tempfile.TemporaryFile() as file:
        planned = time.monotonic()
        written = write_plan(prepared.plan, prepared.source.store, file)
        divisions = [divide_work(written.works, n) for n in n_workers]
        finish_plan(file, written, divisions[-1])
        done, cpu_s = time.monotonic(), time.process_time() - used
        rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        plan = prepared.plan
        loads = loads_of(plan, divisions, band_bytes=plan.buffer_bytes)
        balance = {n: max(load) * n / sum(load) for n, load in zip(n_workers, loads, strict=True)}
        print(
            json.dumps(
                {
                    "plan_s": planned - begun,
                    "write_s": done - planned,
                    "cpu_s": cpu_s,
                    "file_bytes": file.tell(),
                    "rss_bytes": rss_bytes,
                    "balance": balance,
                }
            )
        )


if __name__ == "__main__":
    main()

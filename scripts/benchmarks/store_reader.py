"""Read or write objects in a process of its own, for scripts/bench stores; prints JSON.

    python -m scripts.benchmarks.store_reader HOW URL [ARGUMENT]

HOW is ``core`` (every tensor with core.open, into numpy arrays), ``objects`` (obstore's get of
whole objects, 16 at a time), ``ranges`` (obstore's get of ranges of 8 MiB, 16 at a time, which are
thrown away), ``put`` (obstore's multipart put of one object; ARGUMENT is its bytes) or ``dcp``
(torch.distributed.checkpoint through fsspec). Imports do not count.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

N_THREADS = 16
RANGE_BYTES = 8 << 20


def read_with_core(url: str) -> int:
    """Read every tensor; return the number of bytes."""
    import core

    n_bytes = 0
    with core.open(url) as checkpoint:
        for tensor in checkpoint.values():
            n_bytes += tensor.numpy().nbytes
    return n_bytes


def import_for_reading() -> None:
    """Import what reading imports, by reading a small local file."""
    import obstore  # noqa: F401

    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(len(header).to_bytes(8, "little") + header + bytes(2))
        file.flush()
        read_with_core(file.name)


def _objects(url: str) -> tuple[Any, dict[str, int]]:
    """Return the client of a bucket, and the sizes of the objects below a prefix."""
    import obstore
    from obstore.store import from_url

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    store = from_url(f"s3://{bucket}", client_options={"allow_http": True})
    batches: Any = obstore.list(store, prefix)
    return store, {meta["path"]: meta["size"] for batch in batches for meta in batch}


def get_objects(url: str) -> int:
    """Get whole objects; return the number of bytes."""
    import obstore

    store, sizes = _objects(url)
    with ThreadPoolExecutor(N_THREADS) as threads:
        return sum(threads.map(lambda key: len(obstore.get(store, key).bytes()), sizes))


def get_ranges(url: str) -> int:
    """Get all ranges of objects; return the number of bytes."""
    import obstore

    store, sizes = _objects(url)

    def get(span: tuple[str, int, int]) -> int:
        return len(obstore.get(store, span[0], options={"range": span[1:]}).bytes())

    spans = [
        (key, start, min(size, start + RANGE_BYTES))
        for key, size in sizes.items()
        for start in range(0, size, RANGE_BYTES)
    ]
    with ThreadPoolExecutor(N_THREADS) as threads:
        return sum(threads.map(get, spans))


def put_object(url: str, n_bytes: int) -> int:
    """Put one object of random bytes by parts; return the number of bytes."""
    import obstore
    from obstore.store import from_url

    bucket, _, key = url.removeprefix("s3://").partition("/")
    store = from_url(f"s3://{bucket}", client_options={"allow_http": True})
    block = os.urandom(RANGE_BYTES)
    blocks = (block[: min(RANGE_BYTES, n_bytes - at)] for at in range(0, n_bytes, RANGE_BYTES))
    obstore.put(store, key, blocks, chunk_size=RANGE_BYTES, max_concurrency=N_THREADS)
    return n_bytes


def read_with_dcp(url: str) -> int:
    """Load a DCP directory with torch's own reader; return the number of bytes."""
    import torch
    from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_reader
    from torch.distributed.checkpoint import load

    reader = fsspec_reader.FsspecReader(url)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "properties")
    }
    load(state, storage_reader=reader, no_dist=True)
    return sum(tensor.nbytes for tensor in state.values())


def main() -> None:
    """Do it, and print seconds, bytes and peak RSS."""
    how, url, *rest = sys.argv[1:]
    if how == "core":
        import_for_reading()
    elif how == "dcp":
        import torch.distributed.checkpoint  # noqa: F401
    else:
        import obstore  # noqa: F401
    begun = time.perf_counter()
    if how == "put":
        n_bytes = put_object(url, int(rest[0]))
    else:
        works = {
            "core": read_with_core,
            "objects": get_objects,
            "ranges": get_ranges,
            "dcp": read_with_dcp,
        }
        n_bytes = works[how](url)
    seconds = time.perf_counter() - begun
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "bytes": n_bytes, "rss_bytes": rss_bytes}))


if __name__ == "__main__":
    main()

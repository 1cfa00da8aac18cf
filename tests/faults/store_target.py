"""What is disturbed at its requests: a command, or a save, that reads or writes an object store."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.process import command
from tests.faults.saved import state_dict
from tests.faults.store_place import BucketPlace, FolderPlace, Place
from tests.support.s3.client import S3Server
from tests.support.s3.rules import Rule
from tests.support.s3.server import LoggedRequest

PATIENCE_S = 120
PART_BYTES = 64 << 10
"""Size of the parts of an upload here: the checkpoints are small."""
SOURCES = "sources"
"""The bucket of the golden checkpoints."""


@dataclass(frozen=True, slots=True)
class StoreKind:
    """A way to read or write an object store.

    Args:
        name: of the kind, as the table calls it.
        source: a golden checkpoint; "" for a save.
        arguments: of ``ckpt``, without source and destination.
        reads, writes: the source, or the destination, is in the store.
        dst: name of the destination.
    """

    name: str
    source: str
    arguments: tuple[str, ...]
    reads: bool = True
    writes: bool = True
    dst: str = "out"


_LAST = ("ckpt-manifest", "latest_checkpointed_iteration.txt")
_HF, _RANKS = "hf/llama/safetensors_sharded", "mcore_legacy/dense_gelu/tp2_pp1"
_DIST, _DCP = "mcore_torch_dist/dense_gelu/tp2_pp2", "torch_dcp/bf16_fsdp2_dp2_modelonly"
STORE_KINDS = (
    StoreKind("s3 → directory", _DIST, ("reshard", "--tp-new", "1"), writes=False),
    StoreKind("directory → s3", _HF, ("convert", "--to", "dcp"), reads=False),
    StoreKind("reshard in s3", _RANKS, ("reshard", "--tp-new", "1", "--pp-new", "2")),
    StoreKind("torch_dist in s3", _DIST, ("convert", "--to", "torch_dist", "--tp-new", "1")),
    StoreKind("dcp in s3", _DCP, ("convert", "--to", "safetensors", "--max-shard-size", "50KB")),
    StoreKind("file in s3", _HF, ("convert", "--to", "torch"), dst="out.pt"),
    StoreKind("verified in s3", _HF, ("convert", "--to", "dcp", "--verify", "--fingerprint")),
    StoreKind("save to s3", "", (), reads=False),
)


@dataclass(frozen=True, slots=True)
class StoreRun:
    """How a process ended.

    Args:
        code: its exit code; minus the number of the signal that killed it; None if it hung.
        output: what it printed, both streams.
        log: the requests that it made.
    """

    code: int | None
    output: str
    log: list[LoggedRequest]

    @property
    def end(self) -> str:
        """What was disturbed, code and last words."""
        hit = ", ".join(f"{entry.operation} {entry.key}" for entry in self.log if entry.fault)
        return f"disturbed: {hit[:300] or 'nothing'}; exit code {self.code}: {self.output[-300:]}"


class StoreTarget:
    """One kind, with a server of its own.

    Args:
        kind: what is done.
        golden_dir: holds the golden checkpoints.
        work_dir: an existing, empty directory.
    """

    def __init__(self, kind: StoreKind, golden_dir: Path, work_dir: Path) -> None:
        self.kind = kind
        self.server = S3Server(min_part_bytes=1)
        os.environ.update(self.server.environment())
        self._output_path = work_dir / "output"
        self.source = str(golden_dir / kind.source)
        if kind.reads:
            self.server.mount(SOURCES, golden_dir / kind.source, "src/")
            self.source = f"s3://{SOURCES}/src"
        self.place: Place
        if kind.writes:
            self.place = BucketPlace(self.server, kind.dst)
        else:
            self.place = FolderPlace(work_dir / "place", kind.dst)
        self.place.empty()
        ended = self.run()
        assert ended.code == 0, ended.output
        self.trace = ended.log
        self.new = self.place.content()
        assert self.place.strays() == []

    def work(self, *more: str) -> Callable[[], int]:
        """Return the command, or the save; ``--force`` lets a save replace what is there."""
        if self.kind.source:
            verb, *rest = self.kind.arguments
            return command([verb, self.source, self.place.url, *rest, "--json", "-j", "1", *more])
        return lambda: _save(self.place.url, overwrite="--force" in more)

    def run(self, *more: str, rules: Callable[[int], Sequence[Rule]] | None = None) -> StoreRun:
        """Run it in a fork; arguments as those of ``work`` and ``run_in_fork``."""
        return self.run_in_fork(self.work(*more), rules)

    def validate(self) -> StoreRun:
        """Validate the destination, undisturbed.

        Warnings count: shards whose index is missing are one (CK528), as some programs load them.
        """
        return self.run_in_fork(command(["validate", "--deep", "--strict", self.place.url, "-q"]))

    def run_in_fork(
        self, work: Callable[[], int], rules: Callable[[int], Sequence[Rule]] | None = None
    ) -> StoreRun:
        """Do some work in a fork.

        Args:
            work: returns the exit code.
            rules: returns the faults for a process ID.
        """
        begin, release = os.pipe()
        pid = os.fork()
        if pid == 0:
            _work_in_fork(work, self._output_path, begin)
        os.close(begin)
        self.server.set_rules(*(rules(pid) if rules else ()))
        self.server.take_log()
        os.write(release, b"\n")
        os.close(release)
        code = _wait(pid)
        self.server.set_rules()
        self.server.settle()
        output = self._output_path.read_text(errors="replace")
        return StoreRun(code, output, self.server.take_log())

    def state(self) -> str:
        """Return what the destination is.

        It is ``none``, ``new``, ``new but for its last objects`` (manifest, tracker file; without
        them it can be read), ``part`` (some objects, as they should be), or has damage that is
        named.
        """
        content = self.place.content()
        if content == self.new or not content:
            return "new" if content else "none"
        wrong = [name for name, digest in content.items() if self.new.get(name) != digest]
        if wrong:
            return f"torn: {sorted(wrong)[:5]} differ"
        if all(any(part in name for part in _LAST) for name in self.new.keys() - content.keys()):
            return "new but for its last objects"
        return "part"

    def stop(self) -> None:
        """Stop the server."""
        self.server.stop()


def preload_store_clients() -> None:
    """Import what the forks would import one by one; make no client, which would have threads."""
    import boto3
    import obstore.auth.boto3
    import obstore.exceptions
    import obstore.store  # noqa: F401

    import core.files.multipart.s3
    import core.files.remote_store
    import core.publish.stage.bucket.stage  # noqa: F401

    boto3.client("s3", "us-east-1", aws_access_key_id="a", aws_secret_access_key="b").close()


def _work_in_fork(work: Callable[[], int], output_path: Path, begin: int) -> None:
    """Do some work in this fork when the parent allows it, and end the process."""
    code = 99
    try:
        fd = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False, buffering=1)
        _be_impatient()
        os.read(begin, 1)
        code = work()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_impatient() -> None:
    """Let clients repeat requests at once, and uploads have many parts."""
    from datetime import timedelta

    from botocore.retries.standard import ExponentialBackoff

    from core.dist_checkpointing._live import upload
    from core.files import object_client
    from core.files.multipart import s3_client, stream
    from core.files.requests import failure

    soon = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=50)}
    object_client._RETRIES |= {"backoff": {**soon, "base": 2}, "max_retries": 4}
    failure._FIRST_WAIT_S, failure._LONGEST_WAIT_S = 0.005, 0.05
    s3_client.PATIENCE_S = 5
    ExponentialBackoff.delay_amount = lambda self, context: 0.01
    stream.PART_BYTES = upload.PART_BYTES = PART_BYTES
    os.environ["CKPT_PROGRESS"] = "none"


def _save(url: str, *, overwrite: bool) -> int:
    import torch

    from core.dist_checkpointing import save
    from core.errors import CheckpointingException

    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        save(state_dict(2), url, overwrite=overwrite)
    except CheckpointingException as err:
        sys.stderr.write(f"{err}\n")
        return err.exit_code
    return 0


def _wait(pid: int) -> int | None:
    """Return the exit code of a process; None if it had to be stopped."""
    descriptor = os.pidfd_open(pid)
    try:
        until = time.monotonic() + PATIENCE_S
        is_ended = bool(select.select([descriptor], [], [], until - time.monotonic())[0])
    finally:
        os.close(descriptor)
    if not is_ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if is_ended else None

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import core
from core.errors import CorruptError, SourceChangedError, StorageError, UsageError
from core.files.remote_path import location_of
from core.files.source_store import open_store
from core.opening.iterations import iteration_dirs
from core.verbs.checks.finding import Level, Severity
from core.verbs.prune.decision import KeepRules
from core.verbs.prune.run import PruneJob, Pruning, examine, remove
from core.verbs.validate.run import validate
from tests.support.object_stores import mounted_store, web_server
from tests.support.s3.client import S3Server
from tests.support.s3.rules import Rule

SOURCE = "mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010"
TRACKER = "latest_checkpointed_iteration.txt"


def link_tree(source: Path, target: Path) -> None:
    """Copy a directory by hard links: the tests only add and remove names."""
    shutil.copytree(source, target, copy_function=os.link)


@pytest.fixture
def root(golden: Path, tmp_path: Path) -> Path:
    """A root with iterations 10 to 50, and Megatron's tracker."""
    root = tmp_path / "run"
    for number in (10, 20, 30, 40, 50):
        shutil.copytree(golden / SOURCE, root / f"iter_{number:07d}")
    (root / TRACKER).write_text("50")
    return root


def job(root: Path, *, keep_last: int | None = 2, keep_every: int | None = None) -> PruneJob:
    rules = KeepRules(keep_last=keep_last, keep_every=keep_every)
    return PruneJob(root=root, rules=rules, trusts_metadata=True)


def removed(pruning: Pruning) -> list[int]:
    return [iteration.number for iteration in pruning.removed]


def reasons(pruning: Pruning) -> dict[int, str]:
    return {iteration.number: "; ".join(iteration.reasons) for iteration in pruning.iterations}


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_iterations_that_no_rule_keeps_are_removed_and_nothing_else(root: Path) -> None:
    (root / "logs").mkdir()
    (root / "release").mkdir()
    (root / "events.out").write_text("x")
    pruning = core.prune(root, keep_last=2, keep_every=20, dry_run=True)
    assert removed(pruning) == [30, 10]
    size = sum(file.stat().st_size for file in (root / "iter_0000010").iterdir())
    assert pruning.freed_bytes == 2 * size
    before = names(root)
    assert (
        core.prune(root, keep_last=2, keep_every=20, trust_metadata=True).iterations
        == pruning.iterations
    )
    assert names(root) == sorted(set(before) - {"iter_0000010", "iter_0000030"})
    assert not [
        f for f in validate(root, level=Level.DEEP).findings if f.severity == Severity.ERROR
    ]
    assert removed(core.prune(root, keep_last=2, keep_every=20, trust_metadata=True)) == []


@pytest.mark.parametrize(
    ("source", "pattern", "tracker"),
    [
        ("hf/llama/safetensors_sharded", "checkpoint-{}", None),
        ("torch_dcp/fsdp2_dp2", "step-{}", None),
        ("deepspeed/zero1_dp2_bf16/global_step10", "global_step{}", "latest"),
        ("mcore_legacy/dense_gqa/tp2_pp1/iter_0000010", "iter_{:07d}", TRACKER),
    ],
)
def test_roots_of_every_framework_are_pruned(
    golden: Path, tmp_path: Path, source: str, pattern: str, tracker: str | None
) -> None:
    for number in (1, 2, 3):
        link_tree(golden / source, tmp_path / pattern.format(number))
    if tracker is not None:
        (tmp_path / tracker).write_text("2" if tracker == TRACKER else pattern.format(2))
    pruning = core.prune(tmp_path, keep_last=1, trust_metadata=True)
    if tracker is None:
        assert (removed(pruning), pruning.newest_valid) == ([2, 1], 3)
    else:
        # Iteration 3 is newer than the tracker: its save may be running.
        assert (removed(pruning), pruning.newest_valid) == ([1], 2)
    remaining = {pattern.format(n) for n in (1, 2, 3) if n not in removed(pruning)}
    assert set(names(tmp_path)) == remaining | ({tracker} if tracker else set())


def test_the_newest_valid_iteration_and_what_is_newer_stay(root: Path) -> None:
    (root / TRACKER).unlink()
    for number in (40, 50):
        (root / f"iter_{number:07d}/.metadata").write_bytes(b"")
    pruning = core.prune(root, keep_last=1, trust_metadata=True)
    assert (removed(pruning), pruning.newest_valid) == ([20, 10], 30)
    assert reasons(pruning)[50].startswith("damaged, or being written: CK")


def test_nothing_is_removed_for_an_iteration_whose_data_were_not_read(root: Path) -> None:
    data = root / "iter_0000050/__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    before = names(root)
    pruning = core.prune(root, keep_last=1, dry_run=True)
    assert (pruning.newest_valid, pruning.is_proven) == (50, False)
    with pytest.raises(
        UsageError, match="iteration, 50, was checked without reading its data"
    ) as err:
        core.prune(root, keep_last=1)
    assert err.value.hint is not None
    assert "deep=True" in err.value.hint
    assert names(root) == before
    (root / TRACKER).write_text("40")
    pruning = core.prune(root, keep_last=1, deep=True, dry_run=True)
    assert (pruning.newest_valid, pruning.is_proven) == (40, True)
    (root / TRACKER).unlink()
    pruning = core.prune(root, keep_last=1, deep=True)
    assert (removed(pruning), pruning.newest_valid) == ([30, 20, 10], 40)
    assert reasons(pruning)[50].startswith("damaged, or being written: CK")


def test_without_a_valid_iteration_nothing_is_removed(root: Path) -> None:
    for folder in root.glob("iter_*"):
        (folder / ".metadata").write_bytes(b"")
    pruning = core.prune(root, keep_last=1, trust_metadata=True)
    assert (removed(pruning), pruning.newest_valid) == ([], None)


def test_what_the_trackers_name_stays(root: Path) -> None:
    (root / TRACKER).write_text("40")
    (root / "latest_universal").write_text("iter_0000010")
    pruning = core.prune(root, keep_last=1, trust_metadata=True)
    assert removed(pruning) == [30, 20]
    assert reasons(pruning) == {
        50: f"newer than iteration 40 in {TRACKER}, so its save may still be running",
        40: f"named by {TRACKER}; the newest valid iteration",
        30: "",
        20: "",
        10: "named by latest_universal",
    }


def test_a_tracker_that_names_nothing_stops_everything(root: Path) -> None:
    (root / TRACKER).write_text("")
    with pytest.raises(CorruptError, match="neither a number nor 'release'"):
        core.prune(root, keep_last=1, trust_metadata=True)
    (root / TRACKER).write_text("60")
    pruning = core.prune(root, keep_last=4, trust_metadata=True)
    assert pruning.notes == (f"{TRACKER} names iteration 60, which does not exist",)
    assert removed(pruning) == [10]


def test_the_best_iteration_of_a_trainer_stays(golden: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        link_tree(golden / "trainer/zero2_dp2/checkpoint-2", tmp_path / f"checkpoint-{number}")
    state = tmp_path / "checkpoint-3/trainer_state.json"
    content = json.loads(state.read_text()) | {"best_model_checkpoint": "out/checkpoint-1"}
    state.unlink()
    state.write_text(json.dumps(content))
    pruning = core.prune(tmp_path, keep_last=1, trust_metadata=True)
    assert removed(pruning) == [2]
    assert reasons(pruning)[1] == "named by checkpoint-3/trainer_state.json as the best"


def other_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def other_checkpoint(folder: Path) -> None:
    link_tree(folder.parent / "iter_0000050", folder / "evaluated")


def other_content(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "events.json").write_text("{}")


def stage_beside(folder: Path) -> None:
    folder.with_name(f".{folder.name}.ckpt-stage").mkdir()


def stage_inside(folder: Path) -> None:
    (folder / ".ckpt-stage").mkdir()


def link_to(folder: Path) -> None:
    (folder.parent / "best").symlink_to(folder.name)


def link_into(folder: Path) -> None:
    target = folder.parent / "iter_0000050/.extra"
    target.symlink_to(f"../{folder.name}/metadata.json")


def is_a_link(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to("elsewhere")


def several_iterations(folder: Path) -> None:
    for number in (1, 2):
        link_tree(folder.parent / "iter_0000050", folder / f"step-{number}")
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_file, "files that are not part of a checkpoint (notes.txt)"),
        (other_checkpoint, "separate checkpoints (evaluated)"),
        (other_content, "not recognized as a checkpoint"),
        (stage_beside, "a command is writing it"),
        (stage_inside, "a save into it is running"),
        (link_to, "the link best points to it"),
        (link_into, "the link iter_0000050/.extra points to it"),
        (is_a_link, "a symbolic link"),
        (several_iterations, "several iterations (step-1, step-2)"),
    ],
)
def test_what_is_not_a_checkpoint_of_its_own_is_left_alone(
    root: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(root / "iter_0000020")
    before = sorted(map(str, (root / "iter_0000020").rglob("*")))
    pruning = core.prune(root, keep_last=1, trust_metadata=True)
    assert removed(pruning) == [40, 30, 10]
    assert reason in reasons(pruning)[20]
    assert sorted(map(str, (root / "iter_0000020").rglob("*"))) == before


def test_links_are_removed_and_not_followed(root: Path) -> None:
    outside = root.parent / "blobs"
    outside.mkdir()
    for number in (10, 20):
        file = root / f"iter_{number:07d}/metadata.json"
        file.rename(outside / f"{number}.pt")
        file.symlink_to(outside / f"{number}.pt")
    (root / "iter_0000010/.blobs").symlink_to(outside)
    assert removed(core.prune(root, keep_last=1, trust_metadata=True)) == [40, 30, 20, 10]
    assert names(outside) == ["10.pt", "20.pt"]


def test_bytes_that_other_names_keep_are_not_freed(root: Path) -> None:
    shutil.rmtree(root / "iter_0000010")
    link_tree(root / "iter_0000020", root / "iter_0000010")
    size = sum(file.stat().st_size for file in (root / "iter_0000020").iterdir())
    assert core.prune(root, keep_last=4, dry_run=True).freed_bytes == 0
    assert core.prune(root, keep_last=3, dry_run=True).freed_bytes == size


def test_both_directories_of_an_iteration_go_together(golden: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        link_tree(
            golden / "deepspeed/zero1_dp2_bf16/global_step10", tmp_path / f"global_step{number}"
        )
    universal = golden / "deepspeed_universal/zero1_dp2_bf16/global_step10_universal"
    for number in (1, 2):
        link_tree(universal, tmp_path / f"global_step{number}_universal")
    (tmp_path / "latest").write_text("global_step3")
    (tmp_path / "latest_universal").write_text("global_step2_universal")
    assert removed(core.prune(tmp_path, keep_last=1, trust_metadata=True)) == [1]
    assert names(tmp_path) == [
        "global_step2",
        "global_step2_universal",
        "global_step3",
        "latest",
        "latest_universal",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "iter_0000010/new").write_text("x"),
        lambda root: os.utime(root / "iter_0000010/metadata.json"),
        pytest.param(
            lambda root: (root / "iter_0000050/.metadata").unlink(), marks=pytest.mark.long
        ),
        lambda root: (root / TRACKER).write_text("10"),
        lambda root: (root / ".iter_0000010.ckpt-stage").mkdir(),
    ],
)
def test_what_changes_before_the_removal_stops_it(
    root: Path, change: Callable[[Path], None]
) -> None:
    pruning = examine(job(root, keep_last=4))
    change(root)
    before = names(root)
    with pytest.raises(SourceChangedError):
        remove(pruning)
    assert names(root) == before


def test_two_cannot_prune_at_once(root: Path) -> None:
    pruning = examine(job(root))
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another process is pruning"):
            remove(pruning)
    finally:
        os.close(fd)
    remove(pruning)
    assert len(list(root.glob("iter_*"))) == 2


def killed_at(pruning: Pruning, number: int) -> bool:
    """Remove in a child that is killed right before it deletes the entry of this number.

    Returns:
        Whether it was killed; otherwise it was done before.
    """
    pid = os.fork()
    if pid == 0:
        n_deleted = 0

        def kill(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal n_deleted
            if event in ("os.remove", "os.rmdir"):
                if n_deleted == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                n_deleted += 1

        sys.addaudithook(kill)
        try:
            remove(pruning)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_killed_removal_leaves_whole_iterations_and_is_finished(
    golden: Path, tmp_path: Path
) -> None:
    source = golden / "hf/llama/safetensors_sharded"
    before = names(source)
    for number in range(100):
        copy = tmp_path / f"copy{number}"
        for iteration in (1, 2, 3):
            link_tree(source, copy / f"checkpoint-{iteration}")
        pruning = examine(job(copy, keep_last=1))
        assert removed(pruning) == [2, 1]
        was_killed = killed_at(pruning, number)
        # No program takes the half-removed one for a checkpoint: it has a hidden name.
        for folder in copy.glob("checkpoint-*"):
            assert names(folder) == before
        hidden = [name for name in names(copy) if name.startswith(".")]
        assert len(hidden) == was_killed
        # The next run removes the rest.
        again = core.prune(copy, keep_last=1, trust_metadata=True)
        assert [f".{name}.ckpt-removed" for name in again.unfinished] == hidden
        assert names(copy) == ["checkpoint-3"]
        if not was_killed:
            break
    assert number == 2 * (len(before) + 1)


def test_an_iteration_that_was_written_again_is_not_the_unfinished_one(root: Path) -> None:
    link_tree(root / "iter_0000040", root / ".iter_0000040.ckpt-removed")
    assert core.prune(root, keep_last=5, trust_metadata=True).unfinished == ("iter_0000040",)
    assert names(root) == sorted([*(f"iter_{n:07d}" for n in (10, 20, 30, 40, 50)), TRACKER])


def test_a_removal_that_the_system_refuses_is_an_error(root: Path) -> None:
    pruning = examine(job(root))
    shutil.rmtree(root / "iter_0000010")
    with pytest.raises(SourceChangedError):
        remove(pruning)
    (root / ".iter_0000020.ckpt-removed").symlink_to("iter_0000050")
    with pytest.raises(StorageError, match="symbolic link has a name"):
        core.prune(root, keep_last=1, trust_metadata=True)


@pytest.mark.parametrize("path", ["missing", "run/iter_0000050", "run/" + TRACKER])
def test_a_path_without_iterations_is_a_usage_error(root: Path, path: str) -> None:
    with pytest.raises(UsageError, match="no iterations found|no such directory"):
        core.prune(root.parent / path, keep_last=1, trust_metadata=True)


def test_of_several_runs_one_has_to_be_named(root: Path) -> None:
    with pytest.raises(UsageError) as caught:
        core.prune(root.parent, keep_last=1, trust_metadata=True)
    assert caught.value.hint == f"pass one of the runs in it, such as {root}"


@pytest.fixture
def store(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with mounted_store(root, monkeypatch) as server:
        server.create_bucket("bucket")
        for file in root.rglob("*"):
            if file.is_file() and "0000040" not in str(file):
                key = f"run/{file.relative_to(root).as_posix()}"
                server.put("bucket", key, file.read_bytes())
        yield server


URL = "s3://bucket/run"


def folders(server: S3Server) -> set[str]:
    return {key.split("/")[1] for key in server.objects("bucket", "run/")}


def test_a_url_is_pruned(store: S3Server) -> None:
    pruning = core.prune(URL, keep_last=2, dry_run=True)
    assert removed(pruning) == [20, 10]
    assert core.prune(URL, keep_last=2, trust_metadata=True).freed_bytes == pruning.freed_bytes > 0
    assert folders(store) == {"iter_0000030", "iter_0000050", TRACKER}
    with pytest.raises(UsageError, match="no iterations found"):
        core.prune("s3://bucket", keep_last=1, trust_metadata=True)


@pytest.mark.parametrize("n_requests", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_what_a_store_refuses_to_delete_is_finished_later(store: S3Server, n_requests: int) -> None:
    # Of each iteration: the metadata, the other objects, the hidden object.
    rule = Rule(status=403, code="AccessDenied", operation="DeleteObjects", first=n_requests)
    store.set_rules(rule)
    with pytest.raises(StorageError):
        core.prune(URL, keep_last=2, trust_metadata=True)
    store.set_rules()
    assert ".iter_0000010.ckpt-removed" in folders(store)
    # Nobody takes the rest for an iteration.
    assert 10 not in iteration_dirs(open_store(location_of(URL)))
    assert {
        iteration.number
        for iteration in core.prune(URL, keep_last=3, trust_metadata=True).iterations
    } == {50, 30, 20}
    assert folders(store) == {"iter_0000020", "iter_0000030", "iter_0000050", TRACKER}


def test_objects_that_were_written_again_stay(store: S3Server) -> None:
    store.set_rules(Rule(status=403, code="AccessDenied", operation="DeleteObjects", first=2))
    with pytest.raises(StorageError):
        core.prune(URL, keep_last=2, trust_metadata=True)
    store.set_rules()
    store.put("bucket", "run/iter_0000010/metadata.json", b"new")
    core.prune(URL, keep_last=3, trust_metadata=True)
    assert list(store.objects("bucket", "run/iter_0000010/")) == ["run/iter_0000010/metadata.json"]


def test_a_web_server_is_refused(root: Path) -> None:
    with (
        web_server(root) as server,
        pytest.raises(UsageError, match="cannot be listed, so ckpt cannot remove any"),
    ):
        core.prune(f"{server.url}/files", keep_last=1, trust_metadata=True)

"""The options of a worker, and what workers say of themselves when they meet."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_cli.launch.run import worker_options_of
from ckpt_cli.options.launch import LaunchOptions
from ckpt_cli.options.worker import WorkerOptions, parse_worker_arguments
from ckpt_cli.workers.begin_check import check_members, error_record
from core.errors import UsageError, WorkerError


def test_options_end_where_the_verb_begins():
    options, command = parse_worker_arguments(
        ["--device=auto", "--join_timeout", "7", "--timeout", "2.5", "convert", "--to", "dcp"]
    )
    assert options == WorkerOptions(device="auto", timeout_s=2.5, join_timeout_s=7.0)
    assert command == ["convert", "--to", "dcp"]
    assert parse_worker_arguments(["--", "diff", "a"])[1] == ["diff", "a"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no command to run"),
        (["--device", "cpu"], "no command to run"),
        (["--device"], "--device needs a value"),
        (["--gpu", "convert"], "no such worker option: --gpu"),
        (["--device", "tpu", "convert"], "--device is 'tpu'"),
        (["--timeout", "soon", "convert"], "'soon' is not a number of seconds"),
        (["--timeout", "0", "convert"], "--timeout is 0 seconds"),
        (["--timeout", "nan", "convert"], "--timeout is nan seconds"),
        (["--backend", "nccl", "convert"], "nccl needs GPUs"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], text: str):
    with pytest.raises(UsageError, match=text):
        parse_worker_arguments(arguments)


def _member(**facts: Any) -> dict[str, Any]:
    usual = {
        "host": "a",
        "size": 2,
        "ckpt": "1",
        "torch": "2.13",
        "arguments": ["diff", "x", "y"],
        "backend": "gloo",
    }
    return {**usual, "device": "cpu", "gpu": None, "problem": None, **facts}


def test_workers_that_are_alike_fit():
    assert check_members([_member(), _member(host="b")]) is None
    gpus = [
        _member(device="cuda:0", gpu="x"),
        _member(device="cuda:0", gpu="y"),
        _member(host="b", gpu="x"),
    ]
    assert check_members(gpus) is None


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"ckpt": "2"}, "the same version of ckpt, but rank 0 on a has 1 and rank 1 on b has 2"),
        (
            {"torch": "2.4"},
            "the same version of torch, but rank 0 on a has 2.13 and rank 1 on b has 2.4",
        ),
        (
            {"arguments": ["diff", "x"]},
            "the same command, but rank 0 on a has diff x y and rank 1 on b has diff x",
        ),
        ({"size": 3}, "all workers need the same world size"),
        ({"backend": "cpu:gloo,cuda:nccl"}, "the same backend"),
    ],
)
def test_workers_that_differ_do_not(other: dict[str, Any], text: str):
    problem = check_members([_member(), _member(host="b", **other)])
    assert isinstance(problem, UsageError)
    assert text in problem.message


def test_two_workers_on_one_gpu_do_not_fit():
    problem = check_members([_member(device="cuda:0", gpu="x"), _member(device="cuda:0", gpu="x")])
    assert isinstance(problem, UsageError)
    assert problem.message == "too few GPUs: ranks 0 and 1 on a share the same GPU (cuda:0)"


def test_what_one_worker_lacks_is_told_to_all():
    problem = check_members(
        [
            _member(),
            _member(host="b", problem=error_record(UsageError("no GPU", hint="say --device cpu"))),
        ]
    )
    assert isinstance(problem, UsageError)
    assert (problem.message, problem.hint) == ("rank 1 on b: no GPU", "say --device cpu")
    problem = check_members([_member(problem=error_record(WorkerError("the driver hangs")))])
    assert isinstance(problem, WorkerError)


def test_what_workers_would_refuse_is_refused_before_they_start():
    with pytest.raises(UsageError, match="nccl needs GPUs"):
        worker_options_of(LaunchOptions(backend="nccl"))
    with pytest.raises(UsageError, match="--timeout is 100000 seconds"):
        worker_options_of(LaunchOptions(timeout=100_000.0))


@pytest.mark.parametrize(
    "options", [LaunchOptions(), LaunchOptions(device="auto", timeout=80_000.0, bind="cores")]
)
def test_workers_get_the_options_of_the_launcher(options: LaunchOptions):
    parsed = worker_options_of(options)
    words = parsed.as_arguments()
    assert all(isinstance(word, str) for word in words)
    assert parse_worker_arguments([*words, "diff"]) == (parsed, ["diff"])

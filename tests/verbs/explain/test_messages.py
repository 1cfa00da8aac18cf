"""The tables of messages and codes: every entry is found, true to the program, and complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ckpt_cli.app import app, parse_command
from ckpt_cli.commands.help import find_pages
from core.verbs.checks.finding import codes
from core.verbs.explain.messages import (
    Message,
    match_messages,
    read_causes,
    read_messages,
)

MESSAGES = [*read_messages().values()]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_a_message_is_found_by_what_was_printed_and_by_each_of_its_patterns(
    message: Message,
) -> None:
    assert match_messages(message.example)[0] == message
    for pattern in message.patterns:
        assert message in match_messages(pattern)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_a_message_says_why_and_what_to_do(message: Message) -> None:
    assert message.meaning and message.causes and message.steps and message.commands
    assert set(message.codes) <= set(codes())
    assert set(message.topics) <= {name.rpartition("/")[2] for name in find_pages()}
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue) for issue in message.reported)


def test_every_command_of_the_tables_can_be_parsed() -> None:
    commands = [command for message in MESSAGES for command in message.commands]
    commands += [command for cause in read_causes().values() for command in cause.commands]
    assert len(commands) > 100
    names = {command.name for command in app.registered_commands}
    for command in dict.fromkeys(commands):
        program, *words = shlex.split(command)
        assert program == "ckpt" and words[0] in {*names, "help"}, command
        assert callable(parse_command(words)), command


def test_every_code_has_one_cause() -> None:
    assert set(read_causes()) == set(codes())
    listed = [code for cause in set(read_causes().values()) for code in cause.codes]
    assert len(listed) == len(codes())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("missing keys", "missing-keys"),
        ("unexpected keys in state dict", "unexpected-keys"),
        ("size mismatch", "size-mismatch"),
        ("failed finding central directory", "zip-directory"),
        ("PytorchStreamReader failed locating file data.pkl: file not found", "zip-record"),
        ("out of memory", "out-of-memory"),
        ("newly initialized", "newly-initialized"),
    ],
)
def test_a_few_words_from_memory_are_enough(text: str, name: str) -> None:
    assert match_messages(text)[0].name == name


def test_a_message_is_found_in_a_log_that_wraps_it() -> None:
    log = """[rank0]: Traceback (most recent call last):
[rank0]:   File "pretrain_gpt.py", line 233, in <module>
[rank0]: AssertionError: tensor_model_parallel_size value from checkpoint (1) is not equal
[rank0]: to the input argument value (2).
"""
    assert [message.name for message in match_messages(log)] == ["megatron-sizes"]


@pytest.mark.parametrize(
    "text",
    [
        "hello world",
        "NCCL error: unhandled system error",
        "Traceback (most recent call last):",
        "KeyError: 'model.layers.0.weight'",
        "No such file or directory: 'data.txt'",
        "ModuleNotFoundError: No module named 'yaml'",
        "RuntimeError: expected scalar type Half but found Float",
        "loss is nan at iteration 100",
        "",
    ],
)
def test_a_text_that_is_no_such_message_matches_none(text: str) -> None:
    assert match_messages(text) == []


def test_the_refusals_of_the_table_are_those_of_the_program(repo_dir: Path) -> None:
    """Every pattern of a message of ckpt stands in one of its modules."""
    sources = [
        re.sub(r'"\s+f?"', "", path.read_text("utf-8")).replace("{CONFIG}", "config.json")
        for folder in ("core", "ckpt_cli")
        for path in (repo_dir / folder).rglob("*.py")
    ]
    for message in MESSAGES:
        if message.printed_by == "ckpt":
            for pattern in message.patterns:
                parts = [part.strip() for part in pattern.split("…")]
                assert any(all(part in source for part in parts) for source in sources), pattern

"""Whoever follows the hint of a refusal gets on: every option and command that a hint names is
tried, over damaged and golden checkpoints (hostile ones: ``tests/hostile``).

No hint leads back to an error that was seen, names what is done already, or ends in a result with
nothing in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from ckpt_cli.app import main
from core.opening.open import open_checkpoint
from tests.support.covering import covering_cases, every_third
from tests.support.damages import INDEX, SHARDS, TABLE, ZARR3, Row, kind_of
from tests.support.followed_hints import CommandEnd, follow_hints, list_advised_lines
from tests.verbs.checks.test_damages import copied, row_id, sharded

__all__ = ["sharded"]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


FORMS = {
    "convert": "convert SRC DST",
    "reshard": "reshard SRC DST",
    "manifest": "manifest SRC -o DST",
    "diff": "diff OTHER SRC",
    "merge": "merge OTHER SRC --average -o DST",
    "merge first": "merge SRC OTHER --average -o DST",
    "prune": "prune SRC --keep-last 1",
    "validate": "validate SRC",
}
"""Command → its line. Those before the options are written ``COMMAND SRC DST`` in these tests."""
WRITING = ("convert", "reshard", "merge")
ROWS = covering_cases(TABLE, kind_of)
"""Of the damages that have the same codes, whose errors have the same hints, the first."""


class Terminal:
    """Runs command lines, each with a destination of its own in place of the third word.

    ``other`` is the second checkpoint of a command that needs two.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capsys = capsys
        self._numbers = count()
        self.other = folder
        self.is_first = False

    def run(self, line: Sequence[str]) -> CommandEnd:
        dst = self._folder / f"out{next(self._numbers)}"
        verb, source, _, *options = line
        words = {"SRC": source, "DST": str(dst), "OTHER": str(self.other)}
        form = FORMS["merge first" if verb == "merge" and self.is_first else verb]
        code = main([*(words.get(word, word) for word in form.split()), *options])
        err = self._capsys.readouterr().err
        if code == 0 and verb in WRITING:
            result = open_checkpoint(dst)
            result.store.close()
            assert result.catalog.tensors, f"{' '.join(line)}: nothing was written"
        # Differences, findings and no valid iteration are results.
        return CommandEnd(0 if code == 1 and verb not in WRITING else code, err)


@pytest.fixture
def terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(tmp_path, capsys)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_hints_about_damage_lead_on(
    row: Row, golden: Path, sharded: Path, tmp_path: Path, terminal: Terminal
) -> None:
    path = copied(sharded if row.source == ZARR3 else golden / row.source, tmp_path)
    row.breaks(path / row.at if row.at else path)
    line = ["convert", str(path), "DST", "--to", "torch"]
    assert len(list(follow_hints(line, terminal.run))) > 0


OTHER_VERBS = ("manifest", "diff", "merge", "merge first", "prune", "validate", "reshard")


@pytest.mark.each_value
@pytest.mark.parametrize("command", OTHER_VERBS)
@pytest.mark.parametrize(
    "row",
    every_third(covering_cases(TABLE, lambda row: {"codes": kind_of(row)["codes"]})),
    ids=row_id,
)
def test_hints_of_other_commands_about_damage_lead_on(
    row: Row, command: str, golden: Path, sharded: Path, tmp_path: Path, terminal: Terminal
) -> None:
    terminal.other = sharded if row.source == ZARR3 else golden / row.source
    path = copied(terminal.other, tmp_path)
    row.breaks(path / row.at if row.at else path)
    verb, *first = command.split()
    terminal.is_first = bool(first)
    options = ["--tp-new", "2"] if verb == "reshard" else []
    assert list(follow_hints([verb, str(path), "DST", *options], terminal.run))


REFUSED = (
    "convert accelerate/fsdp2_dp2 --to megatron",
    "convert accelerate/fsdp2_dp2 --to hf",
    "convert accelerate/fsdp2_dp2 --to fsdp_dtensor",
    "convert accelerate/fsdp2_dp2 --to deepspeed_universal",
    "reshard accelerate/fsdp2_dp2",
    "reshard accelerate/fsdp2_dp2 --tp-new 2",
    "reshard accelerate/plain_bin --tp-new 2",
    "convert deepspeed/zero0_dp2_bf16 --to deepspeed_universal",
    "convert deepspeed/zero1_dp2_bf16 --to hf",
    "convert hf/llama --to dcp",
    "convert hf/llama/torch_single --to dcp",
    "reshard hf/llama/safetensors_sharded --tp-new 2",
    "reshard hf/llama/safetensors_sharded",
    "convert lightning/model_parallel_dp2.ckpt --to megatron",
    "convert mcore0121_legacy/moe_grouped/tp2_pp1_ep2 --to fsdp_dtensor",
    "reshard mcore0121_legacy/moe_grouped/tp1_pp1 --tp-new 3 --pp-new 2",
    "convert mcore_torch_dist/dense_gqa/tp2_pp2_optim --to deepspeed_universal",
    "convert mcore0121_torch_dist/dense_gqa/tp2_pp2_optim --to fsdp_dtensor",
    "reshard mcore_legacy/dense_gqa/tp2_pp2",
    "reshard mcore_legacy/dense_gqa/tp2_pp2 --tp 2",
    "convert trainer/peft --to megatron",
    "convert trainer/zero2_dp2 --to fsdp_dtensor",
)
"""A refusal for each kind of hint that conversions of golden checkpoints to every format give."""


@pytest.mark.parametrize("words", REFUSED)
def test_hints_about_golden_checkpoints_lead_on(
    words: str, golden: Path, terminal: Terminal
) -> None:
    verb, source, *options = words.split()
    line = [verb, str(golden / source), "DST", *options]
    ends = [end for _, end in follow_hints(line, terminal.run, most=3)]
    assert ends[0].code


def test_hints_are_taken_as_a_reader_takes_them() -> None:
    """Otherwise the tests above follow nothing."""

    def advised(hint: str, *options: str) -> list[str]:
        ended = CommandEnd(4, f"error: no\n  at: file a, tensor w, bytes 0-1\n  hint: {hint}\n")
        line = ["convert", "SRC", "DST", *options]
        return [" ".join(other[3:]) for other in list_advised_lines(line, ended)]

    assert advised("drop it with --exclude, or save a tensor") == ["--exclude w"]
    assert advised("drop it with --exclude 'a b', and ask") == ["--exclude a b"]
    assert advised("keep the names: --to torch_dist, dcp or torch", "--to", "hf") == [
        "--to torch_dist",
        "--to dcp",
        "--to torch",
    ]
    assert advised("for example: --tp-new 4 --pp-new 2") == ["--tp-new 4 --pp-new 2"]
    assert advised("give config.json with --config FILE, and start with --bf16") == []
    assert advised("TP sizes that work: 1, 2", "--tp-new", "3") == ["--tp-new 1", "--tp-new 2"]
    assert advised("copy it first: ckpt convert SRC DST --exclude 'a b'") == ["--exclude a b"]
    assert advised("or ckpt convert SRC DST --to dcp", "--no-optim") == ["--no-optim --to dcp"]
    assert advised("drop --tie; both are needed", "--tie", "a=b") == [""]
    assert advised("drop the optimizer with --no-optim") == ["--no-optim"]


@pytest.mark.parametrize("change", ["no map", "another shard"])
def test_an_index_that_is_wrong_can_be_removed_as_its_hint_says(
    change: str, golden: Path, tmp_path: Path, terminal: Terminal
) -> None:
    path = copied(golden / SHARDS, tmp_path)
    index = json.loads((path / INDEX).read_text())
    (key, file), *rest = index["weight_map"].items()
    if change == "no map":
        index["weight_map"] = {}
    else:
        index["weight_map"][key] = next(other for _, other in rest if other != file)
    (path / INDEX).write_text(json.dumps(index))
    line = ["convert", str(path), "DST", "--to", "hf", "--max-shard-size", "40KB"]
    assert "remove" in terminal.run(line).hint
    (path / INDEX).unlink()
    assert terminal.run(line).code == 0


def test_an_array_with_a_codec_that_nobody_knows_is_left_out(
    sharded: Path, tmp_path: Path, terminal: Terminal
) -> None:
    path = copied(sharded, tmp_path)
    file = min(path.glob("*/zarr.json"))
    metadata = json.loads(file.read_text())
    metadata["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "xz"}]
    file.write_text(json.dumps(metadata))
    line = ["convert", str(path), "DST", "--to", "torch"]
    codes = [end.code for _, end in follow_hints(line, terminal.run)]
    assert codes == [4, 0]

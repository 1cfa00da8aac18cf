"""CK8xx: manifests, Megatron's integrity.json, and comparing by fingerprint."""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import shutil
from pathlib import Path

import pytest

from ckpt_cli.app import main
from core.errors import CorruptError, UsageError
from core.files.store import LocalStore
from core.publish.manifest.inventory import read_inventory, write_inventory
from core.publish.manifest.of_copy import MANIFEST, read_manifest
from core.verbs.checks.finding import Finding, Level
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate

CASE = "mcore_legacy/dense_gelu/tp2_pp2"


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged, with its manifest."""
    copied = tmp_path / "copy"
    shutil.copytree(golden / CASE, copied)
    write_inventory(read_inventory(copied))
    return copied


def list_findings(
    path: Path, *, level: Level = Level.DEEP, against: Path | None = None
) -> list[Finding]:
    """Findings of the codes of this file."""
    return [
        finding
        for finding in validate(path, level=level, against=against).findings
        if finding.code.startswith("CK8")
    ]


def codes(path: Path, *, level: Level = Level.DEEP, against: Path | None = None) -> list[str]:
    return [finding.code for finding in list_findings(path, level=level, against=against)]


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def test_an_intact_checkpoint_has_no_findings(checkpoint: Path) -> None:
    for level in Level:
        assert validate(checkpoint, level=level).findings == ()


def test_files_above_do_not_lack_those_of_a_universal_checkpoint(
    golden: Path, tmp_path: Path
) -> None:
    # The manifest lies beside ``latest_universal``, whose directory is examined without folders.
    source = golden / "deepspeed" / "zero1_dp2_bf16"
    run(Job(src=source, dst=tmp_path / "ucp", to="ucp", fsync=False))
    for level in Level:
        assert codes(tmp_path / "ucp", level=level) == []
    # Other files are compared as before.
    (tmp_path / "ucp" / "latest_universal.bak").write_text("x")
    assert sorted(codes(tmp_path / "ucp", level=Level.METADATA)) == ["CK804"]


def test_a_missing_and_a_shortened_and_a_new_file_are_found_without_reading_data(
    checkpoint: Path,
) -> None:
    folder = checkpoint / "iter_0000010"
    (folder / "notes.txt").write_text("read me")
    write_inventory(read_inventory(checkpoint), force=True)
    (folder / "notes.txt").unlink()
    (folder / "more.txt").write_text("new")
    with (folder / "mp_rank_00_000/model_optim_rng.pt").open("ab") as file:
        file.write(b"more")
    got = {
        (finding.code, finding.file) for finding in list_findings(checkpoint, level=Level.METADATA)
    }
    size = ("CK803", "mp_rank_00_000/model_optim_rng.pt")
    assert (
        {("CK802", "notes.txt"), ("CK804", "more.txt")}
        <= got
        <= {("CK802", "notes.txt"), ("CK804", "more.txt"), size}
    )


def test_a_flipped_bit_in_a_tensor_is_found_and_the_tensor_named(checkpoint: Path) -> None:
    manifest = read_manifest(LocalStore(checkpoint / "iter_0000010"))
    array = next(item for item in manifest.arrays if item.key == "embedding.word_embeddings.weight")
    flip(checkpoint / "iter_0000010" / array.file, array.offset + 77)
    (finding,) = list_findings(checkpoint)
    assert (finding.code, finding.file, finding.key) == (
        "CK806",
        array.file,
        "embedding.word_embeddings.weight",
    )
    assert list_findings(checkpoint, level=Level.HEADERS) == []


def test_a_flipped_bit_between_the_tensors_is_found(checkpoint: Path) -> None:
    file = checkpoint / "iter_0000010" / "notes.txt"
    file.write_text("lr 0.1")
    write_inventory(read_inventory(checkpoint), force=True)
    flip(file, 4)
    (finding,) = list_findings(checkpoint)
    assert (finding.code, finding.file) == ("CK805", "notes.txt")


def test_the_manifest_of_a_conversion_is_found_beside_the_tracker(
    golden: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    run(Job(src=golden / CASE, dst=root, to="megatron", fsync=False))
    assert (root / MANIFEST).exists() and codes(root) == codes(root / "iter_0000010") == []
    manifest = read_manifest(LocalStore(root))
    array = max(manifest.arrays, key=lambda entry: entry.offset)
    flip(root / array.file, array.offset)
    assert [(finding.code, finding.key) for finding in list_findings(root)] == [
        ("CK806", array.key)
    ]
    shutil.rmtree(root / "iter_0000010" / Path(array.file).parent.name)
    assert {finding.code for finding in validate(root).findings} & {"CK802", "CK302", "CK101"}


def test_arrays_are_checked_where_the_files_have_no_crc(golden: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(
        Job(
            src=golden / "hf/llama/safetensors_single",
            dst=out,
            to="safetensors",
            crc=False,
            fsync=False,
        )
    )
    manifest = read_manifest(LocalStore(out))
    assert manifest.files[0].crc is None and codes(out) == []
    flip(out / manifest.arrays[3].file, manifest.arrays[3].offset)
    assert [(finding.code, finding.key) for finding in list_findings(out)] == [
        ("CK806", manifest.arrays[3].key)
    ]


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "ckpt-manifest", "version": 9}', '{"files": 1}']
)
def test_a_broken_manifest_is_a_finding(checkpoint: Path, text: str) -> None:
    (checkpoint / "iter_0000010" / MANIFEST).write_text(text)
    for level in (Level.METADATA, Level.DEEP):
        assert codes(checkpoint, level=level) == ["CK801"]


def test_a_hostile_manifest_leads_nowhere(checkpoint: Path) -> None:
    path = checkpoint / "iter_0000010" / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"] += [
        {"path": "../../etc/passwd", "size": 1, "crc32": None},
        {"path": "/dev/zero", "size": 0, "crc32": None},
    ]
    manifest["arrays"][0] |= {"offset": -5}
    manifest["arrays"][1] |= {"shape": [1 << 60, 1 << 60]}
    manifest["arrays"][2] |= {"dtype": "float7"}
    path.write_text(json.dumps(manifest))
    assert {finding.code for finding in list_findings(checkpoint)} == {"CK801", "CK802"}
    manifest["files"][0]["size"] = float("inf")
    path.write_text(json.dumps(manifest))
    assert codes(checkpoint, level=Level.METADATA) == ["CK801"]


def test_no_manifest_is_made_of_a_damaged_checkpoint(checkpoint: Path) -> None:
    array = read_manifest(LocalStore(checkpoint / "iter_0000010")).arrays[0]
    flip(checkpoint / "iter_0000010" / array.file, array.offset)
    with pytest.raises(CorruptError, match="CRC-32"):
        read_inventory(checkpoint)


def test_a_manifest_is_not_replaced_without_force(checkpoint: Path) -> None:
    inventory = read_inventory(checkpoint)
    with pytest.raises(UsageError, match="exists"):
        write_inventory(inventory)
    before = (checkpoint / "iter_0000010" / MANIFEST).read_bytes()
    write_inventory(inventory, force=True)
    assert (checkpoint / "iter_0000010" / MANIFEST).read_bytes() == before
    assert sorted(
        path.name for path in (checkpoint / "iter_0000010").iterdir() if path.is_file()
    ) == [MANIFEST]


def integrity_of(folder: Path) -> None:
    """Writes what Megatron writes."""
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != "integrity.json"
    }
    (folder / "integrity.json").write_text(
        json.dumps({"algorithm": "sha256", "files": files}, indent=2)
    )


def test_megatrons_integrity_json_is_checked(golden: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(golden / "mcore_torch_dist/dense_gelu/tp2_pp2", copied)
    folder = copied / "iter_0000010"
    (folder / "notes.txt").write_text("lr 0.1")
    integrity_of(folder)
    for level in Level:
        assert codes(copied, level=level) == []
    data = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(data, data.stat().st_size // 2)
    assert [(finding.code, finding.file) for finding in list_findings(copied)] == [
        ("CK812", data.name)
    ]
    assert codes(copied, level=Level.HEADERS) == []
    (folder / "notes.txt").unlink()
    assert [
        (finding.code, finding.file) for finding in list_findings(copied, level=Level.METADATA)
    ] == [("CK811", "notes.txt")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"files": 3}',
        '{"files": {"a": 1}}',
        '{"algorithm": "md5", "files": {}}',
        '{"algorithm": "sha256"}',
    ],
)
def test_a_broken_integrity_json_is_a_finding(golden: Path, tmp_path: Path, text: str) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(golden / "mcore_torch_dist/dense_gelu/tp2_pp2", copied)
    (copied / "iter_0000010/integrity.json").write_text(text)
    assert codes(copied, level=Level.METADATA) == ["CK810"]


@pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=pytest.mark.long if level < Level.DEEP else ()) for level in Level],
)
def test_other_layouts_of_the_same_weights_are_equal_to_a_manifest(
    golden: Path, checkpoint: Path, level: Level
) -> None:
    manifest = checkpoint / "iter_0000010" / MANIFEST
    for case in ("mcore_legacy/dense_gelu/tp1_pp1", "mcore_torch_dist/dense_gelu/tp2_pp2"):
        assert codes(golden / case, level=level, against=manifest) == []
        assert codes(golden / case, level=level, against=golden / CASE) == []


@pytest.mark.parametrize("level", (Level.METADATA, Level.DEEP))
def test_any_change_is_seen_against_another_layout(
    golden: Path, checkpoint: Path, level: Level
) -> None:
    """Whatever byte of a tensor changes: exactly the tensor that it belongs to differs."""
    other = golden / "mcore_legacy/dense_gelu/tp1_pp1"
    arrays = list(read_manifest(LocalStore(checkpoint / "iter_0000010")).arrays)
    arrays = [
        item for item in arrays if ":" not in item.key and "word_embeddings" not in item.name
    ]  # no random states
    chance = random.Random(int(level))
    for array in chance.sample(arrays, 4):
        file = checkpoint / "iter_0000010" / array.file
        at = array.offset + chance.randrange(64)
        flip(file, at, 1 << chance.randrange(8))
        got = [
            finding
            for finding in list_findings(checkpoint, level=level, against=other)
            if finding.code == "CK824"
        ]
        assert len(got) <= 1, "one tensor at most"
        if got:
            assert got[0].key == array.key
        else:  # a copy that another rank has too, which is not the first one
            assert array.file.startswith("mp_rank_01")
        shutil.copyfile(golden / CASE / "iter_0000010" / array.file, file)


def test_missing_extra_and_other_tensors_are_told_apart(golden: Path, tmp_path: Path) -> None:
    source = golden / "hf/llama/safetensors_single"
    out = tmp_path / "out"
    run(
        Job(
            src=source,
            dst=out,
            to="safetensors",
            exclude=("*.0.*norm*",),
            dtype=(("*lm_head*", "float32"),),
            fsync=False,
        )
    )
    findings = list_findings(out, against=source)
    assert {finding.code for finding in findings} == {"CK821", "CK823"}
    assert {finding.hint for finding in findings} == {
        f"to see what differs: ckpt diff {source} {out}"
    }
    assert {finding.code for finding in list_findings(source, against=out)} == {"CK822", "CK823"}


def test_names_that_have_nothing_in_common_are_one_finding(golden: Path) -> None:
    (finding,) = list_findings(
        golden / CASE, level=Level.METADATA, against=golden / "hf/llama/safetensors_single"
    )
    assert finding.code == "CK821" and finding.message.startswith("nothing was compared, because")


def test_a_converted_model_is_proved_by_the_command_that_is_named(
    golden: Path, tmp_path: Path
) -> None:
    source, out = golden / "hf/llama/safetensors_single", tmp_path / "out"
    run(Job(src=source, dst=out, to="megatron", fsync=False))
    (finding,) = list_findings(out, level=Level.METADATA, against=source)
    words = shlex.split((finding.hint or "").rpartition(": ckpt ")[2])
    assert words == ["diff", str(source), str(out)]
    assert main(words) == 0


def test_a_manifest_without_fingerprints_is_refused(golden: Path, tmp_path: Path) -> None:
    write_inventory(read_inventory(golden / CASE, fingerprints=False), tmp_path / MANIFEST)
    with pytest.raises(UsageError, match="no fingerprints"):
        validate(golden / CASE, against=tmp_path / MANIFEST)

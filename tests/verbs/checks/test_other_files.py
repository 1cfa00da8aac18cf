"""Files beside the weights that Python would unpickle: NumPy's, joblib's and compressed ones,
looked into by --deep.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import sys
import types
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from core.formats.torch.other_pickles import MAX_BYTES
from core.opening.open import open_checkpoint
from core.verbs.checks.check import Finding, Level, Severity
from core.verbs.inspect.summary import summarize
from core.verbs.validate.run import validate


class Call:
    """Calls ``eval`` when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return eval, ("1 + 1",)


ARRAYS = {
    "a": np.arange(100.0),
    "text": np.array(["ab", "c"]),
    "objects": np.array([1, "x", None], dtype=object),
    "columns": np.asfortranarray(np.ones((3, 4), dtype=np.int8)),
    "empty": np.zeros((0, 3)),
}


def joblib_dump(tree: object, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What ``joblib.dump`` of joblib 1.6 writes, byte for byte: arrays lie behind the BUILD of
    their wrappers.
    """
    module = types.ModuleType("joblib.numpy_pickle")
    wrapper = type("NumpyArrayWrapper", (), {"__module__": module.__name__})
    module.NumpyArrayWrapper = wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "joblib", types.ModuleType("joblib"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    buffer = io.BytesIO()

    class Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
        def save(self, value: object, save_persistent_id: bool = True) -> None:
            if type(value) is not np.ndarray:
                super().save(value, save_persistent_id)
                return
            order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            stand_in = wrapper()
            stand_in.__dict__.update(
                subclass=np.ndarray,
                shape=value.shape,
                order=order,
                dtype=value.dtype,
                allow_mmap=not value.dtype.hasobject,
                numpy_array_alignment_bytes=16,
            )
            super().save(stand_in)
            self.framer.commit_frame(force=True)
            if value.dtype.hasobject:
                pickle.dump(value, buffer, protocol=2)
                return
            padding = 16 - (buffer.tell() + 1) % 16
            buffer.write(bytes([padding]) + b"\xff" * padding + value.tobytes(order))

    Pickler(buffer, 4).dump(tree)
    return buffer.getvalue()


def saved(array: object, save: Callable[..., None] = np.save) -> bytes:
    buffer = io.BytesIO()
    save(buffer, np.array([array], dtype=object))
    return buffer.getvalue()


def alone(data: bytes) -> bytes:
    """Bytes in the format of lzma without a header of xz."""
    return lzma.compress(data, lzma.FORMAT_ALONE)


def in_parts(data: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """Several streams, which Python reads as one file."""
    return b"".join(compress(data[at : at + 1000]) for at in range(0, len(data), 1000))


def old_joblib(data: bytes) -> bytes:
    """The compressed file of joblib before 0.10."""
    return b"ZF" + hex(len(data)).ljust(19).encode() + zlib.compress(data)


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner/state.pkl", data)
    return buffer.getvalue()


CONTAINERS: dict[str, Callable[[object, pytest.MonkeyPatch], bytes]] = {
    "ema.npy": lambda tree, patch: saved(tree),
    "ema.npz": lambda tree, patch: saved(tree, np.savez),
    "small.npz": lambda tree, patch: saved(tree, np.savez_compressed),
    "ema.npy.gz": lambda tree, patch: gzip.compress(saved(tree)),
    "state.dat": lambda tree, patch: pickle.dumps(tree),
    "state.pkl.gz": lambda tree, patch: gzip.compress(pickle.dumps(tree)),
    "parts.pkl.gz": lambda tree, patch: in_parts(pickle.dumps(tree), gzip.compress),
    "parts.pkl.bz2": lambda tree, patch: in_parts(pickle.dumps(tree), bz2.compress),
    "state.pkl.bz2": lambda tree, patch: bz2.compress(pickle.dumps(tree)),
    "state.pkl.xz": lambda tree, patch: lzma.compress(pickle.dumps(tree)),
    "state.lzma": lambda tree, patch: alone(pickle.dumps(tree)),
    "state.z": lambda tree, patch: zlib.compress(pickle.dumps(tree)),
    "twice.gz": lambda tree, patch: gzip.compress(bz2.compress(pickle.dumps(tree))),
    "state.zip": lambda tree, patch: zipped(pickle.dumps(tree)),
    "model.joblib": joblib_dump,
    "packed.joblib": lambda tree, patch: zlib.compress(joblib_dump(tree, patch)),
    "old.joblib": lambda tree, patch: old_joblib(pickle.dumps(tree)),
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.arange(2.0)}, folder / "model.safetensors")
    return folder


def findings_of(folder: Path, least: Severity = Severity.WARNING) -> list[Finding]:
    return [
        finding
        for finding in validate(folder, level=Level.DEEP).findings
        if finding.severity >= least and finding.code not in ("CK527", "CK704")
    ]


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_call_in_a_file_beside_the_weights_is_found(
    name: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights / name).write_bytes(CONTAINERS[name]({**ARRAYS, "last": Call()}, monkeypatch))
    assert [(finding.code, finding.file, finding.found) for finding in findings_of(weights)] == [
        ("CK601", name, "builtins.eval")
    ]


@pytest.mark.parametrize("name", CONTAINERS)
def test_files_beside_the_weights_that_call_nothing_have_no_findings(
    name: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights / name).write_bytes(CONTAINERS[name](ARRAYS, monkeypatch))
    assert findings_of(weights, Severity.NOTE) == []


def test_plain_files_of_numpy_and_others_have_no_findings(weights: Path) -> None:
    np.savez(weights / "ema.npz", a=np.arange(1000.0), b=np.ones((2, 2)))
    np.savez_compressed(weights / "small.npz", a=np.arange(1000.0))
    np.save(weights / "record.npy", np.zeros(3, dtype=[("when", "<M8[s]"), ("Old", "f4", (2,))]))
    (weights / "train.log.gz").write_bytes(gzip.compress(b"loss 1.0\n" * 1000))
    (weights / "x.zip").write_bytes(zipped(b"no pickle"))
    (weights / "notes.txt").write_text("xylophone")
    assert findings_of(weights, Severity.NOTE) == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_archive_of_numpy_is_found(save: Callable[..., None], weights: Path) -> None:
    save(weights / "ema.npz", a=np.arange(1000.0))
    data = bytearray((weights / "ema.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (weights / "ema.npz").write_bytes(data)
    assert [(finding.code, finding.file) for finding in findings_of(weights)] == [
        ("CK703", "ema.npz")
    ]
    (weights / "ema.npz").write_bytes(data[:-30])
    assert [(finding.code, finding.file) for finding in findings_of(weights)] == [
        ("CK703", "ema.npz")
    ]


def bomb() -> bytes:
    return b"\x80\x04]" + bytes(MAX_BYTES)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("bomb.pkl.gz", lambda: gzip.compress(bomb())),
        ("bomb.gz", lambda: gzip.compress(gzip.compress(bomb()))),
        ("bomb.npz", lambda: zipped(bomb())),
        ("state.pkl.zst", lambda: b"\x28\xb5\x2f\xfd" + bytes(20)),
        ("model.joblib", lambda: b"\x04\x22\x4d\x18" + bytes(20)),
        ("broken.pkl.gz", lambda: gzip.compress(pickle.dumps(list(range(1000))))[:-200]),
    ],
)
def test_what_is_not_looked_into_is_said(
    name: str, make: Callable[[], bytes], weights: Path
) -> None:
    (weights / name).write_bytes(make())
    (finding,) = findings_of(weights, Severity.NOTE)
    assert (finding.code, finding.severity, finding.file) == ("CK607", Severity.NOTE, name)


@pytest.mark.parametrize("name", ["ema.npy", "ema.npz", "state.pkl.gz", "model.joblib"])
def test_inspect_warns_of_files_beside_the_weights(
    name: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights / name).write_bytes(CONTAINERS[name]({**ARRAYS, "last": Call()}, monkeypatch))
    assert any("builtins.eval" in note for note in summarize(open_checkpoint(weights)).notes)


def test_inspect_says_what_it_does_not_look_into(weights: Path) -> None:
    (weights / "model.joblib").write_bytes(b"\x04\x22\x4d\x18" + bytes(20))
    assert any(
        "not examined: model.joblib" in note for note in summarize(open_checkpoint(weights)).notes
    )


def test_an_intact_archive_of_numpy_is_no_damaged_torch_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with (tmp_path / "statistics.bin").open("wb") as file:
        np.savez(file, a=np.arange(5))
    findings = validate(tmp_path, level=Level.DEEP).findings
    assert findings and "statistics.bin" not in {finding.file for finding in findings}
    # A byte of a member that changed is damage, whoever wrote the archive.
    data = bytearray((tmp_path / "statistics.bin").read_bytes())
    data[data.index(b"descr")] ^= 1
    (tmp_path / "statistics.bin").write_bytes(data)
    findings = validate(tmp_path, level=Level.DEEP).findings
    assert "statistics.bin" in {finding.file for finding in findings}

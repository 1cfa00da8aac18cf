"""What a worker reads of the plan is what the lead has proven."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Tensor, whole_fragment
from core.engine.plan.items import items_of_portion
from core.errors import CorruptError
from core.formats.torch.item import TorchItem
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, TopologyChange
from core.verbs.convert.stage import identity_text
from core.verbs.convert.stored_plan.codec import CLASSES, Decoder, Encoder
from core.verbs.convert.stored_plan.division import divide_work
from core.verbs.convert.stored_plan.file import (
    StoredPlan,
    file_digest,
    finish_plan,
    identity_of,
    write_plan,
)

JOBS = {
    "reshard": (
        "mcore_legacy/dense_gqa/tp2_pp2",
        {"topology": TopologyChange(tp=4, pp=1), "is_reshard": True},
    ),
    "late": ("torch_dcp/tp2_fsdp2_dp2", {"to": "safetensors"}),
    "packed": ("orbax/ocdbt_zarr2", {"to": "dcp"}),
    "made": ("hf/llama/safetensors_sharded", {"to": "safetensors", "quantize": ((None, "block"),)}),
    "transposed": (
        "mcore0121_legacy/moe_grouped/tp1_pp1",
        {"topology": TopologyChange(tp=2), "is_reshard": True},
    ),
    "widened": ("deepspeed/zero1_dp2_bf16", {"to": "torch"}),
}


@pytest.mark.parametrize("name", JOBS)
def test_workers_together_have_the_items_of_the_plan(
    name: str, golden: Path, tmp_path: Path
) -> None:
    source, options = JOBS[name]
    with prepare(Job(src=golden / source, dst=tmp_path / "out", **options)) as prepared:  # type: ignore[arg-type]
        plan, store = prepared.plan, prepared.source.store
        file = io.BytesIO()
        options_text = identity_text(prepared.job)
        written = write_plan(plan, store, file, options=options_text, item_bytes=4096)
        assert written.identity == identity_of(plan, store, options=options_text, item_bytes=4096)
        finish_plan(file, written, divide_work(written.works, 3, item_bytes=4096))
        path = tmp_path / "plan"
        path.write_bytes(file.getvalue())

        def items(work: object) -> dict[object, object]:
            return {
                number: item
                for portion in work.portions()  # type: ignore[attr-defined]
                for number, item in items_of_portion(
                    portion,
                    places=work.places,  # type: ignore[attr-defined]
                    bind=lambda array: array.locate(store),
                    band_bytes=4096,
                    item_bytes=4096,
                )
            }

        wanted = items(plan)
        joined: dict[object, object] = {}
        total = 0
        for rank in range(3):
            with StoredPlan(path, file_digest(path), rank=rank, threads=1) as share:
                share_items = items(share)
                assert not share_items.keys() & joined.keys()
                joined |= share_items
                total += share.write_bytes
                assert [share.places.file_of(n) for n in range(len(share.places))] == [
                    plan.places.file_of(n) for n in range(len(plan.places))
                ]
        assert joined == wanted
        assert abs(total - plan.write_bytes) <= 3 * len(written.works)


WHOLE = {
    "as it is": ("hf/llama/safetensors_sharded", {"to": "torch"}),
    "cast": ("hf/llama/safetensors_sharded", {"to": "safetensors", "dtype": ((None, "float16"),)}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_lines_of_whole_tensors_are_those_of_the_encoder(
    name: str, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = WHOLE[name]
    with prepare(Job(src=golden / source, dst=tmp_path / "out", **options)) as prepared:  # type: ignore[arg-type]

        def written() -> tuple[object, bytes]:
            file = io.BytesIO()
            return write_plan(prepared.plan, prepared.source.store, file), file.getvalue()

        text = written()
        monkeypatch.setattr("core.verbs.convert.stored_plan.file._PlainLines.line", lambda *_: None)
        assert written() == text


def test_a_plan_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    path.write_bytes(b"something else")
    with (
        pytest.raises(CorruptError, match="SHA-256"),
        StoredPlan(path, "0" * 64, rank=0, threads=1),
    ):
        pass


def test_every_encoding_can_stand_in_a_plan(repo_dir: Path) -> None:
    names = {
        node.name
        for path in (repo_dir / "core").rglob("*.py")
        if "unit_bytes" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and {"decode", "unit_bytes"} <= set(members_of(node))
    }
    names.remove("Encoding")  # the protocol
    assert len(names) > 5 and names <= CLASSES.keys()


def members_of(node: ast.ClassDef) -> Iterator[str]:
    """Names of a class's methods and fields."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id


def test_a_place_that_is_found_late_keeps_the_order_of_its_axes() -> None:
    tensor = Tensor("float32", (3, 1, 2))
    extent = Extent("a", 8, item=TorchItem(99), axes=(1, None, 0))
    fragments = (whole_fragment(StoredArray("w^T", "float32", (3, 1, 2), extent)),)
    encoder = Encoder()
    data = json.loads(json.dumps(encoder.fragments("w", tensor, fragments)))
    assert Decoder(list(encoder.files)).fragments("w", tensor, data) == fragments

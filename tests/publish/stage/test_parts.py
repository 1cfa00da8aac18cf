"""Parts of objects are sent when they are complete, whatever the order of the writes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from itertools import pairwise

import pytest

from core.errors import CorruptError, StorageError
from core.files.multipart import stream
from core.files.multipart.protocol import SentPart, checksum_of
from core.files.remote_path import RemotePath
from core.publish.stage.bucket.parts import PartStore
from tests.support.interrupts import interrupt_in

PART = 64


class Upload:
    """An upload in memory."""

    upload_id = "1"

    def __init__(self, path: RemotePath, earlier: Mapping[int, bytes] | None = None) -> None:
        self.path = path
        self.order: list[int] = []
        self.parts = dict(earlier or {})
        self.is_visible = False

    def send(self, number: int, data: memoryview) -> None:
        if number == 13:
            raise StorageError("the store is on holiday")
        self.order.append(number)
        self.parts[number] = bytes(data)

    def sent(self) -> dict[int, SentPart]:
        return {
            number: SentPart(number, len(data), "", checksum_of(memoryview(data)))
            for number, data in self.parts.items()
        }

    def finish(self, *, replaces: bool) -> None:
        self.is_visible = True

    @property
    def content(self) -> bytes:
        return b"".join(self.parts[number] for number in sorted(self.parts))


class Client:
    """A store in memory."""

    def __init__(self, *, takes_any_order: bool = True) -> None:
        self.takes_any_order = takes_any_order

    def begin(self, path: RemotePath, n_bytes: int, part_bytes: int) -> Upload:
        return Upload(path)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PART_BYTES", PART)


def store_of(client: Client, n_threads: int = 2) -> PartStore:
    path = RemotePath("s3://bucket/out")
    return PartStore(path, client, n_threads=n_threads)  # type: ignore[arg-type]


@pytest.mark.parametrize("takes_any_order", [True, False])
def test_bytes_arrive_in_any_order(takes_any_order: bool) -> None:
    rng = random.Random(5)
    contents = {name: rng.randbytes(n) for name, n in (("a", 700), ("b", 64), ("c", 1), ("d", 0))}
    writes = []
    for name, data in contents.items():
        cuts = sorted({0, len(data), *rng.choices(range(len(data) + 1), k=20)})
        writes += [(name, *cut) for cut in pairwise(cuts)]
    rng.shuffle(writes)
    store = store_of(Client(takes_any_order=takes_any_order))
    for name, data in contents.items():
        store.create(name, len(data))
    for name, start, stop in writes:
        store.write(name, start, contents[name][start:stop])
    store.finish()
    assert not any(upload.is_visible for upload in store.uploads.values())  # type: ignore[attr-defined]
    for name in store.uploads:
        store.publish(name)
    store.close()
    assert {name: upload.content for name, upload in store.uploads.items()} == {  # type: ignore[attr-defined]
        name: data for name, data in contents.items() if data
    }
    assert store.empty_names() == ["d"]
    if not takes_any_order:
        assert store.uploads["a"].order == list(range(1, 12))  # type: ignore[attr-defined]


def test_places_of_sent_parts_are_used_again() -> None:
    store = store_of(Client())
    store.create("a", PART * 1000)
    for number in range(1000):
        if number != 12:
            store.zero("a", number * PART, PART)
    scratch = store._scratch[PART]
    assert scratch._n_slots < 40
    store.close()


def test_held_ranges_can_be_read_back_until_they_are_released() -> None:
    store = store_of(Client())
    store.create("a", 3 * PART)
    store.hold("a", 10, 100)
    store.hold("a", 10, 100)
    store.write("a", 0, bytes(range(3 * PART)))
    buffer = memoryview(bytearray(100))
    store.read_into("a", 10, buffer)
    assert bytes(buffer) == bytes(range(10, 110))
    store.release("a", 0, 5)  # was never held
    store.release("a", 10, 100)
    store.finish()
    with pytest.raises(StorageError, match="cannot be read back"):
        store.read_into("a", 10, buffer)
    store.close()


def test_missing_bytes_are_found() -> None:
    store = store_of(Client())
    store.create("a", 100)
    store.write("a", 0, bytes(99))
    with pytest.raises(CorruptError, match=r"a, part 2: 1 bytes"):
        store.finish()
    store.close()


def test_the_error_of_a_part_ends_the_copy() -> None:
    store = store_of(Client())
    store.create("a", 20 * PART)
    store.write("a", 0, bytes(20 * PART))
    with pytest.raises(StorageError, match="holiday"):
        store.finish()
    with pytest.raises(StorageError, match="holiday"):
        store.write("a", 0, b"x")
    store.close()


def test_equal_parts_of_an_earlier_run_are_not_sent_again() -> None:
    data = random.Random(6).randbytes(4 * PART)
    earlier = Upload(
        RemotePath("s3://bucket/out/a"), {1: data[:PART], 2: b"other", 4: data[3 * PART :]}
    )
    store = store_of(Client())
    store.continue_uploads({"a": earlier})  # type: ignore[dict-item]
    store.create("a", len(data))
    store.write("a", 0, data)
    store.finish()
    store.close()
    assert earlier.content == data
    assert sorted(earlier.order) == [2, 3]
    assert store.resumed_bytes == 2 * PART


def test_an_interrupted_close_can_be_repeated_and_waits_for_parts_on_their_way() -> None:
    sent: list[int] = []

    class SlowUpload(Upload):
        def send(self, number: int, data: memoryview) -> None:
            is_sending.set()
            interrupt_in(PartStore.close, after_s=0.1)
            time.sleep(0.3)
            sent.append(number)

    class SlowClient(Client):
        def begin(self, path: RemotePath, n_bytes: int, part_bytes: int) -> Upload:
            return SlowUpload(path)

    is_sending = threading.Event()
    store = store_of(SlowClient(), n_threads=1)
    store.create("a", PART)
    store.write("a", 0, bytes(PART))
    is_sending.wait()
    with pytest.raises(KeyboardInterrupt):
        store.close()
    store.close()
    assert sent == [1]

"""Workers of a dead lead keep a new one out as long as they may write, and come in no more
afterwards.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from core.errors import StorageError
from core.files.folders import empty_folder
from core.publish.stage.folder_lock import WORKERS_LOCK
from core.publish.stage.workers_lock import claim_stage, join_stage


def test_a_new_lead_waits_for_the_workers_of_the_old_one(tmp_path: Path) -> None:
    first = claim_stage(tmp_path)
    first.share()
    worker = join_stage(tmp_path, first.token)
    first.close()
    with pytest.raises(StorageError, match="earlier run are still writing"):
        claim_stage(tmp_path, wait_s=0)
    threading.Timer(0.3, worker.close).start()
    second = claim_stage(tmp_path)
    assert second.token != first.token
    second.close()


def test_a_worker_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    first = claim_stage(tmp_path)
    first.close()
    second = claim_stage(tmp_path)
    with pytest.raises(StorageError, match="taken over"):
        join_stage(tmp_path, second.token)  # not yet let in
    second.share()
    with pytest.raises(StorageError, match="taken over"):
        join_stage(tmp_path, first.token)
    join_stage(tmp_path, second.token).close()
    second.close()


def test_the_lock_stays_when_a_stage_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    lock = claim_stage(tmp_path)
    empty_folder(tmp_path, keep=(WORKERS_LOCK,))
    lock.share()
    join_stage(tmp_path, lock.token).close()
    lock.close()

"""core.files.requests: which failures are repeated, and how long that is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from core.errors import StorageError
from core.files.requests import ending, failure, waiting
from core.files.requests.failure import FailureKind, back_off_s, describe_failure, parse_retry_after
from core.files.requests.repeat import RequestLimiter, with_retries
from core.files.requests.traffic import Traffic, traffic_so_far


class GenericError(Exception):
    """As obstore raises it."""

    __module__ = "obstore.exceptions"


def error(status: int, code: str = "Some") -> GenericError:
    return GenericError(
        f"Generic S3 error: Server returned non-2xx status code: {status}: <Code>{code}</Code>"
    )


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(failure, "_LONGEST_WAIT_S", 0.01)


def failing(*errors: Exception) -> Callable[[], str]:
    """Return a request that raises the errors, one at a time, and then succeeds."""
    rest = list(errors)

    def send() -> str:
        if rest:
            raise rest.pop(0)
        return "answer"

    return send


@pytest.mark.parametrize(
    ("err", "kind"),
    [
        (error(503, "SlowDown"), FailureKind.THROTTLED),
        (error(429), FailureKind.THROTTLED),
        (error(400, "SlowDown"), FailureKind.THROTTLED),
        (error(500), FailureKind.PASSING),
        (error(400, "RequestTimeout"), FailureKind.PASSING),
        (error(501), FailureKind.LASTING),
        (error(403, "AccessDenied"), FailureKind.LASTING),
        (error(503).__class__("error sending request: TimedOut"), FailureKind.PASSING),
        (GenericError("error sending request: Connection refused"), FailureKind.UNREACHABLE),
        (GenericError("error sending request: InvalidCertificate"), FailureKind.LASTING),
        (GenericError("status code: 503 of /latest/api/token"), FailureKind.LASTING),
        (ValueError("status code: 503"), FailureKind.LASTING),
    ],
)
def test_failures_that_pass_are_told_from_those_that_do_not(
    err: Exception, kind: FailureKind
) -> None:
    assert describe_failure(err).kind is kind


def test_errors_of_boto3_state_the_pause_themselves() -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    answer = {
        "Error": {"Code": "SlowDown"},
        "ResponseMetadata": {"HTTPStatusCode": 503, "HTTPHeaders": {"retry-after": "7"}},
    }
    throttled = describe_failure(exceptions.ClientError(answer, "UploadPart"))
    assert (throttled.kind, throttled.retry_after_s) == (FailureKind.THROTTLED, 7.0)
    refused = exceptions.EndpointConnectionError(endpoint_url="http://x")
    assert describe_failure(refused).kind is FailureKind.UNREACHABLE


def test_a_request_is_repeated_and_counted_until_it_succeeds() -> None:
    before = traffic_so_far()
    send = failing(error(503), error(500), error(429))
    assert with_retries(RequestLimiter(8), send, n_bytes=100) == "answer"
    assert traffic_so_far() - before == Traffic(4, 3, 100)


def test_the_last_error_is_raised() -> None:
    with pytest.raises(GenericError, match="403"):
        with_retries(RequestLimiter(8), failing(error(500), error(403)))
    before = traffic_so_far()
    with pytest.raises(GenericError, match="503"):
        with_retries(RequestLimiter(8), failing(*[error(503)] * 99))
    assert (traffic_so_far() - before).n_retries == failure.MOST_RETRIES


def test_an_address_that_never_answered_is_given_up_soon() -> None:
    refused = GenericError("error sending request: Connection refused")
    limiter = RequestLimiter(8)
    with pytest.raises(GenericError):
        with_retries(limiter, failing(*[refused] * 4))
    with_retries(limiter, failing())
    assert with_retries(limiter, failing(*[refused] * 4)) == "answer"


def test_only_one_of_the_requests_that_are_throttled_asks_how_long() -> None:
    n_asked = 0

    def ask() -> float:
        nonlocal n_asked
        n_asked += 1
        return 0.01

    limiter = RequestLimiter(8)
    with limiter.slot() as sent_at:
        assert limiter.slow_down(sent_at)
    with_retries(limiter, failing(error(503)), ask_retry_after=ask)
    assert n_asked == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("120", 120.0), ("Mon, 23 Nov 2026 10:01:00 GMT", 60.0), ("soon", None), (None, None)],
)
def test_a_pause_is_a_number_of_seconds_or_a_date(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text, now=1795428000.0) == seconds


def test_waits_double_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(failure, "_LONGEST_WAIT_S", 10.0)
    for n_failures, longest in [(1, 0.1), (4, 0.8), (9, 10.0)]:
        waits = {back_off_s(n_failures) for _ in range(50)}
        assert len(waits) > 1
        assert all(longest / 2 <= wait <= longest for wait in waits)


def test_no_more_requests_are_in_flight_than_the_limit() -> None:
    limiter = RequestLimiter(3)
    lock, counts = threading.Lock(), []
    n_now = 0

    def send() -> None:
        nonlocal n_now
        with limiter.slot():
            with lock:
                n_now += 1
                counts.append(n_now)
            threading.Event().wait(0.01)
            with lock:
                n_now -= 1

    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(counts) <= 3
    assert len(counts) == 12


def test_requests_that_are_throttled_together_halve_the_limit_once() -> None:
    limiter = RequestLimiter(64)
    with ExitStack() as stack:
        sent = [stack.enter_context(limiter.slot()) for _ in range(10)]
        assert [limiter.slow_down(at) for at in sent] == [True] + 9 * [False]
        assert limiter.limit == 5  # half of those that were in flight


def test_successes_raise_the_limit_by_one_up_to_the_maximum() -> None:
    limiter = RequestLimiter(4)
    with limiter.slot() as sent_at:
        limiter.slow_down(sent_at)
    limits = []
    for _ in range(20):
        limiter.note_success()
        limits.append(limiter.limit)
    assert limits[:6] == [2, 2, 3, 3, 3, 4]
    assert limits[-1] == 4


def test_who_waits_for_a_slot_can_be_stopped() -> None:
    limiter = RequestLimiter(1)
    errors = []

    def wait() -> None:
        ending.stop_waiting_when(lambda: True)
        try:
            with limiter.slot():
                pass
        except StorageError as err:
            errors.append(err)

    with limiter.slot():
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(20)
    assert len(errors) == 1


def test_after_the_end_of_the_process_was_asked_for_waits_are_short() -> None:
    silent = threading.Event()
    ending.end_requests()
    try:
        assert waiting.call_interruptibly(lambda: 1) == 1
        with pytest.raises(StorageError, match="interrupted"):
            waiting.call_interruptibly(silent.wait)
        # The store is known to be silent: nobody waits again.
        with pytest.raises(StorageError, match="interrupted"):
            waiting.call_interruptibly(silent.wait)
    finally:
        ending.allow_requests()
        silent.set()
    assert waiting.call_interruptibly(lambda: 2) == 2

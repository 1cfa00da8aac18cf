"""ckpt_cli.launch.meeting_place: where the hosts meet, and what is said when they cannot."""

from __future__ import annotations

import socket
import sys
from types import ModuleType

import pytest

from ckpt_cli.launch.meeting_place import (
    Rendezvous,
    check_rendezvous,
    parse_endpoint,
    rendezvous_of,
)
from ckpt_cli.options.launch import LaunchOptions
from core.errors import UsageError, WorkerError


def asked(**options: object) -> Rendezvous:
    return rendezvous_of(LaunchOptions(**options))  # type: ignore[arg-type]


def test_one_host_meets_nobody() -> None:
    meeting_place = asked()
    assert (meeting_place.backend, meeting_place.endpoint, meeting_place.is_standalone) == (
        "c10d",
        "localhost:0",
        True,
    )
    assert asked(standalone=True, nnodes="1").is_standalone
    assert meeting_place.job_id != asked().job_id
    assert asked(rdzv_id="mine").job_id == "mine"


def test_several_hosts_meet_at_an_endpoint_and_number_themselves() -> None:
    meeting_place = asked(
        nnodes="2:4", rdzv_endpoint="node1", rdzv_id="7", rdzv_conf="join_timeout=30,is_host=1"
    )
    assert (
        meeting_place.backend,
        meeting_place.endpoint,
        meeting_place.job_id,
        meeting_place.node_rank,
    ) == (
        "c10d",
        "node1:29400",
        "7",
        None,
    )
    assert meeting_place.join_s == 30
    assert meeting_place.settings["is_host"] == "1"


def test_a_node_rank_or_a_master_makes_a_static_rendezvous() -> None:
    meeting_place = asked(nnodes="2", node_rank=1, master_addr="10.0.0.1")
    assert (meeting_place.backend, meeting_place.endpoint, meeting_place.node_rank) == (
        "static",
        "10.0.0.1:29500",
        1,
    )
    assert asked(master_port=1234).endpoint == "127.0.0.1:1234"
    assert (
        asked(nnodes="2", node_rank=0, rdzv_backend="static", rdzv_endpoint="a:5").endpoint == "a:5"
    )


def test_every_wait_has_a_limit() -> None:
    assert asked().settings == {"join_timeout": "600", "timeout": "600", "read_timeout": "20"}
    assert asked(nnodes="2", node_rank=0, master_addr="a", rdzv_conf="timeout=5").join_s == 5
    assert asked(nnodes="2", node_rank=0, master_addr="a", rdzv_conf="join_timeout=5").join_s == 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nnodes": "2"}, "--rdzv-endpoint is missing"),
        ({"nnodes": "2", "standalone": True}, "--nnodes has no effect: --standalone"),
        ({"standalone": True, "rdzv_endpoint": "a"}, "--rdzv-endpoint has no effect: --standalone"),
        ({"nnodes": "2", "master_addr": "a"}, "--node-rank is missing"),
        ({"nnodes": "2", "node_rank": 2}, "Number the hosts from 0 to 1"),
        (
            {
                "nnodes": "2",
                "node_rank": 0,
                "master_addr": "a",
                "rdzv_endpoint": "b",
                "rdzv_backend": "static",
            },
            "both specify the address of host 0",
        ),
        ({"nnodes": "2", "node_rank": 1}, "--master-addr is missing"),
        ({"nnodes": "1:2", "node_rank": 0}, "needs --rdzv-backend c10d"),
        (
            {"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "a"},
            "--node-rank has no effect: c10d numbers",
        ),
        ({"rdzv_endpoint": "a:b"}, "'a:b' is not of the form HOST:PORT"),
        ({"rdzv_endpoint": "a:99999"}, "is not of the form HOST:PORT"),
        (
            {"rdzv_conf": "join_timeout=0"},
            "join_timeout must be a positive whole number of seconds, not .0.",
        ),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        asked(**options)


def test_endpoints_may_be_ipv6() -> None:
    assert parse_endpoint("[fd00::1]:5", 1) == ("fd00::1", 5)
    assert parse_endpoint("[fd00::1]", 1) == ("fd00::1", 1)
    assert Rendezvous("c10d", "fd00::1", 5, "x").endpoint == "[fd00::1]:5"


def at(port: int, host: str = "127.0.0.1") -> Rendezvous:
    return asked(nnodes="2", rdzv_endpoint=f"{host}:{port}", rdzv_conf="join_timeout=1")


@pytest.fixture
def foreign() -> int:
    """A port at which something listens that is no rendezvous."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def test_a_free_port_is_fine_for_the_host_that_listens(free: int) -> None:
    check_rendezvous(at(free), is_listener=True, note=print)


def test_a_taken_port_is_named(foreign: int) -> None:
    with pytest.raises(WorkerError, match=f"port {foreign} is in use by another program"):
        check_rendezvous(at(foreign), is_listener=True, note=print)


def test_what_listens_must_be_a_rendezvous(foreign: int) -> None:
    with pytest.raises(
        WorkerError, match=f"the program listening at 127.0.0.1:{foreign} is not a rendezvous"
    ):
        check_rendezvous(at(foreign), is_listener=False, note=print)


def test_a_second_agent_of_a_host_finds_the_first() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    check_rendezvous(at(store.port), is_listener=True, note=print)
    check_rendezvous(at(store.port), is_listener=False, note=print)


def test_nobody_there_is_said_after_the_limit(free: int) -> None:
    with pytest.raises(
        WorkerError, match=rf"no answer from 127.0.0.1:{free} within 1 s: connection refused"
    ):
        check_rendezvous(at(free), is_listener=False, note=print)


def test_a_host_that_is_not_known_is_a_mistake_in_the_request() -> None:
    with pytest.raises(UsageError, match="the rendezvous host 'nohost.invalid' was not found"):
        check_rendezvous(at(1, "nohost.invalid"), is_listener=False, note=print)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_etcd_without_its_client_is_a_mistake_in_the_request(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "etcd", None)
    with pytest.raises(UsageError, match=f"--rdzv-backend {backend} needs python-etcd"):
        check_rendezvous(
            asked(nnodes="2", rdzv_backend=backend, rdzv_endpoint="a:5"),
            is_listener=False,
            note=print,
        )


def test_etcd_that_does_not_run_is_named(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd", ModuleType("etcd"))
    endpoint = f"127.0.0.1:{free}"
    meeting_place = asked(
        nnodes="2", rdzv_backend="etcd", rdzv_endpoint=endpoint, rdzv_conf="join_timeout=1"
    )
    with pytest.raises(WorkerError, match=f"no answer from {endpoint} within 1 s") as error:
        check_rendezvous(meeting_place, is_listener=False, note=print)
    assert "start etcd on that host" in str(error.value.hint)

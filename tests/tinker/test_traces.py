"""The trace of a session: what the SDK's export gets is Chrome's trace event format, and says what requests waited for.

Format: "Trace Event Format" (Google, 2016), which Perfetto reads.
"""

import json
import time
from collections import defaultdict
from typing import Any
from urllib.request import urlopen

import httpx
import pytest
import tinker

from skyrl.tinker.http.routes.links import LIFETIME_S
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.results import Answer
from skyrl.tinker.traces import Timeline, Timelines, phases
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import save
from tests.tinker.test_cli_tinker import Cli
from tests.tinker.test_futures import uncounted

Event = dict[str, Any]
PHASES = ["queue", "batch", "compute", "save"]


def export(server: LiveServer, session_id: str, key: str = "tml-test") -> list[Event]:
    """Events of a session, through the stock SDK."""
    link = tinker.RestClient(base_url=server.url, api_key=key).export_session_trace(session_id).result()
    with urlopen(link) as response:
        return json.load(response)["traceEvents"]


def slices(events: list[Event], category: str = "request") -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def phases_of(events: list[Event], request: Event) -> list[Event]:
    """Phases within a request's slice, by their time alone, as a viewer nests them."""
    end = request["ts"] + request["dur"]
    return [
        event
        for event in slices(events, "phase")
        if (event["pid"], event["tid"]) == (request["pid"], request["tid"])
        and request["ts"] <= event["ts"]
        and event["ts"] + event["dur"] <= end
    ]


def check_format(trace: dict[str, Any]) -> None:
    """Hold a trace to the format's rules for the kinds of events in it."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] == "process_name" and isinstance(event["args"]["name"], str)
        else:
            assert event["ph"] == "X" and isinstance(event["cat"], str) and isinstance(event["args"], dict)
            assert isinstance(event["ts"], int) and isinstance(event["dur"], int) and event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for found in threads.values():  # "X" events of a thread are nested or apart, never overlapping
        open_until: list[int] = []
        for begin, minus_duration in sorted(found):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or begin - minus_duration <= open_until[-1]
            open_until.append(begin - minus_duration)


def test_export_is_in_the_trace_event_format_while_samples_overlap(server):
    session = server.session()
    server.train(server.model(session), 1)
    sampler = server.sampler(session, 0, base_model="fake/model")
    server.at_once(*(lambda number=number: server.sample(sampler, number) for number in range(6)))
    url = server.http.get(f"/sessions/{session}/trace_export").json()["url"]
    check_format(httpx.get(url).json())


def test_each_request_is_a_slice_that_its_phases_fill(server):
    session, since = server.session(), time.time()
    model = server.model(session)
    server.train(model, 1)
    server.result(save(server, model, 3, "kept"))
    events = export(server, session)
    requests = {event["name"]: event for event in slices(events)}
    assert list(requests) == ["create_model", "forward_backward", "optim_step", "save_weights"]
    for request in requests.values():
        assert since * 1e6 <= request["ts"] and request["ts"] + request["dur"] <= time.time() * 1e6
        found = phases_of(events, request)
        assert [phase["name"] for phase in found] == PHASES
        assert sum(phase["dur"] for phase in found) == request["dur"]


def test_a_request_that_the_engine_works_on_is_shown_so_far(server):
    session = server.session()
    model = server.model(session)
    server.engine.hold()
    request_id = server.submit_pass(model, 1)
    while not server.app.state.server.queue.futures.get(request_id).runs:
        time.sleep(0.001)
    events = export(server, session)
    server.engine.let_go()
    server.pass_result(request_id)
    (request,) = [event for event in slices(events) if event["args"]["request_id"] == request_id]
    assert request["args"]["outcome"] == "pending"
    assert [phase["name"] for phase in phases_of(events, request)] == PHASES[:3]


def test_a_refused_request_says_whose_fault_it_was(server):
    session = server.session()
    server.failure(server.submit_pass(server.model(session), 1, [1, 10**6]))
    assert slices(export(server, session))[-1]["args"]["outcome"] == "user"


def test_a_trace_has_no_other_session(server):
    session, other = server.session(), server.session()
    server.train(server.model(other), 1)
    assert export(server, session) == []


def test_another_key_gets_no_trace(tmp_path):
    with LiveServer(tmp_path, api_keys=["tml-a", "tml-b"]) as server:
        wait_until_ready(server)
        server.http.headers["X-API-Key"] = "tml-a"
        session = server.session()
        with pytest.raises(tinker.NotFoundError):
            export(server, session, "tml-b")
        assert export(server, session, "tml-a") == []


def test_a_link_ends_after_an_hour(server):
    url = server.http.get(f"/sessions/{server.session()}/trace_export").json()["url"]
    claims = server.app.state.server.service.keys.signer.read("trace", url.rsplit("/", 2)[1])
    assert abs(claims["exp"] - time.time() - LIFETIME_S) < 60


def test_the_stock_command_writes_the_file(server, tmp_path):
    session = server.session()
    server.train(server.model(session), 1)
    Cli(server, tmp_path).ok("session", "export-trace", session, "-o", "out.pftrace")
    check_format(json.loads((tmp_path / "out.pftrace").read_text()))


def test_of_too_many_requests_the_oldest_of_the_largest_session_go():
    timelines = Timelines(max_requests=10)
    for session, count in (("small", 2), ("large", 9)):
        for number in range(count):
            timelines.end(Timeline(f"sample-{number}", f"{session}:sample:0"), Answer(b""))
    assert [one.request_id for one in timelines.of_session("large")] == [f"sample-{n}" for n in range(5, 9)]
    assert len(timelines.of_session("small")) == 2


def test_of_too_many_sessions_the_one_that_is_silent_longest_goes():
    timelines = Timelines(max_sessions=2)
    for session in ("a", "b", "a", "c"):
        timelines.end(Timeline("sample-0", f"{session}:sample:0"), Answer(b""))
    assert [len(timelines.of_session(session)) for session in "abc"] == [2, 0, 1]


def test_a_request_that_an_engine_left_queues_until_the_next_has_it():
    futures = Futures(uncounted())
    timeline = futures.add("optim_step-0", "t", run="s:train:0").timeline
    futures.sent("optim_step-0")
    futures.begin(["optim_step-0"])
    futures.engine_ended()
    left = time.monotonic()
    futures.sent("optim_step-0")
    futures.begin(["optim_step-0"])
    futures.done("optim_step-0")
    futures.engine_ended()  # of no concern to what is done
    futures.set("optim_step-0", Answer(b""))
    assert timeline.engines == 1
    found = phases(timeline, now=0.0)
    assert [name for name, *_ in found] == PHASES and found[0][2] >= left


def test_futures_without_a_model_leave_no_trace():
    futures = Futures(uncounted())
    futures.add("a", "t")
    futures.set("a", Answer(b""))
    assert futures.timelines_of("") == []

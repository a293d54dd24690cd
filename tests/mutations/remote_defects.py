"""Defects of what computes in other processes, as in `defects.py`."""

from defects import Defect, Edit

QUANTA = "skyrl/backends/executor/work_queue.py"
EXECUTOR = "skyrl/backends/executor/executor.py"
ENGINE = "skyrl/tinker/engine/loop.py"
TESTS = "tests/backends/test_remote.py::"
SERVED = "tests/tinker/test_remote_backend.py::"

REMOTE_DEFECTS = [
    Defect(
        "P1.1",
        "what was abandoned in flight is forgotten, so that what stands behind it is late",
        [Edit(QUANTA, "            dispatch.parts = []\n", "            self._dispatches = deque()\n")],
        [TESTS + "test_a_snapshot_after_what_was_abandoned_in_flight_waits_for_it_without_being_late"],
    ),
    Defect(
        "P1.2",
        "an engine that stops does not wait for snapshots that are computed elsewhere",
        [Edit(ENGINE, "if not (under_way or self.backend.busy", "if not (self.backend.busy")],
        [SERVED + "test_a_server_that_stops_in_mid_pass_leaves_a_snapshot_of_the_step_before"],
    ),
    Defect(
        "P1.3",
        "all that was under way is blamed for a lost worker",
        [Edit(ENGINE, "if error.request_ids is not None:", "if False:")],
        [SERVED + "test_an_engine_says_what_its_lost_worker_was_at_and_not_what_else_was_under_way"],
    ),
    Defect(
        "P1.4",
        "futures that operations wait for are polled",
        [Edit(QUANTA, "any(wait.done() for wait", "any(wait is not None for wait")],
        [TESTS + "test_nobody_looks_while_an_operation_waits_for_a_file"],
    ),
    Defect(
        "P1.5",
        "a snapshot has part of the gradients of a pass that is repeated",
        [Edit(EXECUTOR, "if self.in_place:", "if False:")],
        [TESTS + "test_a_model_whose_pass_was_abandoned_where_sums_are_changed_in_place_is_void_until_it_is_loaded"],
    ),
    Defect(
        "P1.6",
        "a worker that dies with nothing to do is noticed by the next request",
        [Edit(EXECUTOR, " or self._lost is not None", "")],
        [TESTS + "test_a_worker_that_is_killed_with_nothing_to_do_loses_the_backend_at_once"],
    ),
    Defect(
        "P1.7",
        "the time that a dispatch stands behind others counts against its deadline",
        [Edit(QUANTA, "left[0].since = self._clock()", "pass")],
        [TESTS + "test_a_deadline_is_of_each_dispatch_and_begins_when_the_one_before_has_ended"],
    ),
]

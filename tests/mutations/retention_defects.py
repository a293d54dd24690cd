"""Defects of what a server keeps and what it removes, as in `defects.py`."""

from defects import Defect, Edit

RETENTION = "skyrl/tinker/checkpoints/retention.py"
SURPLUS = "skyrl/tinker/checkpoints/surplus.py"
QUEUE = "skyrl/tinker/requests/samples.py"
TESTS = "tests/tinker/test_retention.py::"
RUNS = "tests/tinker/test_surplus.py::"

RETENTION_DEFECTS = [
    Defect(
        "D9a",
        "what the models of a silent session would be brought back from stays for ever",
        [
            Edit(
                RETENTION,
                "or_(col(ModelRow.session_id).in_(finished), col(ModelRow.session_id).in_(silent))",
                "col(ModelRow.session_id).in_(finished)",
            )
        ],
        [TESTS + "test_snapshot_and_requests_of_a_session_that_was_silent_for_a_month_go_and_its_checkpoint_stays"],
    ),
    Defect(
        "D9a2",
        "a silent session's model goes although it has yet to write what it has published",
        [
            Edit(
                RETENTION,
                'and_(or_(col(ModelRow.status) == "unloaded", ended), ~_unwritten())',
                'or_(col(ModelRow.status) == "unloaded", ended)',
            )
        ],
        [TESTS + "test_what_a_silent_session_has_yet_to_do_keeps_what_its_model_would_be_brought_back_from"],
    ),
    Defect(
        "D9b",
        "a long run keeps all versions that it has ever published",
        [Edit(SURPLUS, "    if rules.sampled is None or not limits:\n", "    if True:\n")],
        [RUNS + "test_a_loop_of_the_sdk_keeps_its_newest_eight_versions_and_the_one_that_it_evaluates"],
    ),
    Defect(
        "D9b2",
        "a version goes under the hands of an evaluation that samples it",
        [Edit(SURPLUS, "row.digest is None or used_at > now - rules.config.ephemeral_idle_sec", "row.digest is None")],
        [
            RUNS + "test_a_loop_of_the_sdk_keeps_its_newest_eight_versions_and_the_one_that_it_evaluates",
            RUNS + "test_version_that_was_sampled_lately_stays_until_it_is_not_sampled_any_more",
        ],
    ),
    Defect(
        "D9b3",
        "a version goes that a sample waits for",
        [
            Edit(
                QUEUE,
                "return {**self._service.version_use.last(), **pending}",
                "return self._service.version_use.last()",
            )
        ],
        [RUNS + "test_version_that_a_sample_waits_for_stays"],
    ),
    Defect(
        "D9b4",
        "a version goes that is not on disk yet",
        [Edit(SURPLUS, "row.digest is None or used_at", "used_at")],
        [RUNS + "test_version_that_is_not_on_disk_yet_stays"],
    ),
    Defect(
        "D9b5",
        "files of a version go while a sample is about to read them",
        [Edit(QUEUE, "return pending or self._service.version_use.enters(path)", "return pending")],
        [RUNS + "test_files_of_a_version_that_a_sample_is_about_to_read_are_left_for_it"],
    ),
    Defect(
        "D9c",
        "results are kept whatever they take",
        [
            Edit(
                RETENTION,
                "max(now - rules.config.result_retention_sec, min(rules.results_since, now - RESULT_AGE_S))",
                "now - rules.config.result_retention_sec",
            )
        ],
        [TESTS + "test_results_past_their_bytes_go_the_oldest_first_but_none_of_the_last_ten_minutes"],
    ),
]

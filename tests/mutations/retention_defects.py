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
    Defect(
        "bucket-not-sent",
        "named checkpoints stay on the disk of the server",
        [
            Edit(
                "skyrl/tinker/config.py",
                'self.checkpoints_bucket if folder.split("/")[1] in NAMED else self.snapshots_bucket',
                "self.snapshots_bucket",
            )
        ],
        ["tests/tinker/test_server_buckets.py::test_checkpoints_are_in_the_bucket_and_snapshots_on_the_disk"],
    ),
    Defect(
        "bucket-two-servers",
        "two servers of different machines use one bucket",
        [Edit("skyrl/tinker/checkpoints/state_locks.py", "if not claim.take():", "if not claim.take() and False:")],
        ["tests/tinker/test_server_buckets.py::test_a_second_server_at_a_bucket_is_refused"],
    ),
    Defect(
        "bucket-links",
        "files in a bucket have no links of the store",
        [Edit("skyrl/tinker/http/routes/downloads.py", "name: url or _link(", "name: _link(")],
        ["tests/tinker/test_server_buckets.py::test_weights_for_use_elsewhere_have_links_that_the_store_has_signed"],
    ),
    Defect(
        "bucket-no-trash",
        "what is collected in a bucket goes at once",
        [
            Edit(
                "skyrl/tinker/checkpoints/trash.py",
                "if to_trash and inspect_stored(url) is not None:",
                "if False:",
            )
        ],
        ["tests/tinker/test_bucket_retention.py::test_what_expires_or_is_surplus_goes_to_the_trash_of_the_bucket"],
    ),
    Defect(
        "bucket-trash-uncounted",
        "the trash of a bucket counts for no limit and is never emptied",
        [Edit("skyrl/tinker/checkpoints/trash.py", "[*_on_disk(config), *_in_bucket(config)]", "_on_disk(config)")],
        [
            "tests/tinker/test_bucket_retention.py::test_the_trash_of_the_bucket_is_emptied_in_time",
            "tests/tinker/test_bucket_retention.py::test_bytes_of_bucket_and_trash_count_for_max_disk_gib",
        ],
    ),
    Defect(
        "bucket-orphans",
        "folders in a bucket that nothing names stay for ever",
        [
            Edit(
                "skyrl/tinker/checkpoints/retention.py",
                "    for name, kept in _remote_folders(config).items():\n",
                "    for name, kept in ():\n",
            )
        ],
        [
            "tests/tinker/test_bucket_retention.py::"
            "test_what_has_no_name_goes_to_the_trash_and_what_is_half_goes_at_once"
        ],
    ),
    Defect(
        "bucket-kind",
        "a checkpoint in a bucket cannot be loaded",
        [
            Edit(
                "skyrl/utils/files/stored_folders.py",
                "    if not is_url(path):\n        yield path\n",
                "    if path:\n        yield path\n",
            )
        ],
        [
            "tests/backends/test_bucket_folders.py::test_a_training_checkpoint_in_a_bucket_is_the_model_and_the_same_files"
        ],
    ),
]

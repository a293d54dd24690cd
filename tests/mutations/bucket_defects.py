"""Defects of snapshots in a bucket and of the hold on it, as in `defects.py`."""

from defects import Defect, Edit

PLACE = "skyrl/tinker/checkpoints/snapshot_place.py"
STATE_ID = "skyrl/tinker/checkpoints/state_id.py"
CLAIM = "skyrl/utils/locks/remote_claim.py"
TESTS = "tests/tinker/test_bucket_snapshots.py::"

BUCKET_DEFECTS = [
    Defect(
        "bucket-snapshots-on-disk",
        "snapshots and unnamed versions stay on a disk that may be lost",
        [
            Edit(
                "skyrl/tinker/config.py",
                'if folder.split("/")[1] in NAMED else self.snapshots_bucket\n',
                'if folder.split("/")[1] in NAMED else None\n',
            )
        ],
        [TESTS + "test_all_that_is_saved_is_in_the_bucket_and_nothing_on_the_disk"],
    ),
    Defect(
        "bucket-id-on-disk",
        "a server on an empty machine is told that bucket and database do not belong together",
        [
            Edit(STATE_ID, "if bucket is None else ObjectStore(bucket).get(FILE)", "if True else None"),
            Edit(STATE_ID, "    if config.snapshots_bucket is None:\n", "    if True:\n"),
        ],
        [TESTS + "test_a_server_moved_to_empty_machines_changes_no_outcome[True]"],
    ),
    Defect(
        "bucket-recovery-gives-up",
        "requests of a model fail if the bucket is away when it is recovered",
        [
            Edit(
                "skyrl/tinker/requests/replay.py",
                "if isinstance(operation, LoadSnapshot | LoadCheckpoint) and is_url(operation.path):",
                "if False:",
            )
        ],
        [TESTS + "test_models_wait_for_a_bucket_that_does_not_answer_and_lose_nothing"],
    ),
    Defect(
        "bucket-replaced-stays",
        "replaced snapshots pile up in the bucket",
        [
            Edit(
                "skyrl/tinker/requests/outcomes.py",
                "    try:\n        remove_stored(path)\n",
                "    try:\n        path\n",
            )
        ],
        [TESTS + "test_a_snapshot_that_was_replaced_leaves_the_bucket"],
    ),
    Defect(
        "bucket-orphan-snapshots",
        "snapshots in a bucket that nothing names stay for ever",
        [Edit("skyrl/tinker/checkpoints/retention.py", "NAMED if config.snapshots_bucket is None else KINDS", "NAMED")],
        [TESTS + "test_a_snapshot_without_a_name_is_collected"],
    ),
    Defect(
        "bucket-move-forgotten",
        "the option leaves the snapshots that are there on the disk",
        [Edit(PLACE, "    elif may_move:\n", "    elif False:\n")],
        [TESTS + "test_snapshots_move_to_the_bucket_when_the_option_is_first_set[False]"],
    ),
    Defect(
        "bucket-option-forgotten",
        "a server without the option starts where snapshots are in the bucket",
        [Edit(PLACE, "        if in_bucket is not None:\n", "        if False:\n")],
        [TESTS + "test_a_server_without_the_option_is_refused_where_snapshots_are_in_the_bucket"],
    ),
    Defect(
        "bucket-lost-untold",
        "a server that another one has taken the bucket from goes on",
        [Edit(CLAIM, "                    self._on_lost()\n", "                    pass\n")],
        ["tests/tinker/test_bucket_claim.py::test_a_server_whose_bucket_another_has_taken_says_so"],
    ),
    Defect(
        "bucket-namesake",
        "a process takes a folder of a bucket from one on another machine of the same name",
        [Edit(CLAIM, "{socket.gethostname()} {boot_id()} ", "{socket.gethostname()} ")],
        [
            "tests/utils/test_remote_claim.py::"
            "test_one_of_a_machine_with_the_same_name_is_not_taken_for_that_of_a_killed_process"
        ],
    ),
]

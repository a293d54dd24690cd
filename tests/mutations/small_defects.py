"""Defects of what there is one of, as in `defects.py`: the file lock, the back-off, the folders of a user."""

from defects import Defect, Edit

SMALL_DEFECTS = [
    Defect(
        "claim-inherited",
        "a forked child that outlives its parent keeps the folder that the parent had claimed",
        [Edit("skyrl/utils/locks/file_lock.py", "fcntl.lockf if of_process else fcntl.flock", "fcntl.flock")],
        [
            "tests/utils/test_file_lock.py::"
            "test_a_forked_child_does_not_keep_the_folder_that_its_dead_parent_had_claimed"
        ],
    ),
    Defect(
        "endless-doubling",
        "pauses between attempts double without a limit",
        [Edit("skyrl/utils/backoff.py", ", longest_s)", ", math.inf)")],
        ["tests/utils/test_backoff.py::test_pauses_double_up_to_the_longest"],
    ),
    Defect(
        "data-folder-ignored",
        "SKYRL_DATA has no effect",
        [Edit("skyrl/utils/paths.py", 'os.environ.get("SKYRL_DATA") or ', "")],
        ["tests/tinker/test_config.py::test_the_environment_names_another_data_folder"],
    ),
]

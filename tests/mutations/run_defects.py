"""Defects of what a run keeps: data order, checkpoints and metrics, as in `defects.py`.

The numbers are those of the list of known defects of trainers.
"""

from defects import Defect, Edit

CHECKPOINTS = "skyrl/train/checkpoints.py"
TESTS = "tests/train/"
CHECKPOINT_TESTS = TESTS + "test_train_checkpoints.py::"
TRACKING_TESTS = TESTS + "test_tracking.py::"

RUN_DEFECTS = [
    Defect(
        "F1.12c",
        "a run goes on from a checkpoint of another model or algorithm",
        [Edit(CHECKPOINTS, "    if differing:\n", "    if False:\n")],
        [CHECKPOINT_TESTS + "test_a_checkpoint_of_another_model_or_algorithm_is_refused_with_both_values"],
    ),
    Defect(
        "F1.12d",
        "a resumed run begins its data anew",
        [Edit("skyrl/train/order.py", "        self._state = state.copy()\n", "")],
        [TESTS + "test_prompt_order.py::test_a_resumed_order_goes_on_as_an_uninterrupted_one"],
    ),
    Defect(
        "F1.12e",
        "a checkpoint in a bucket is written to a local folder of that name",
        [Edit("skyrl/utils/storage.py", '    if "://" in str(path):', "    if False:")],
        [CHECKPOINT_TESTS + "test_a_bucket_is_refused_rather_than_made_a_folder"],
    ),
    Defect(
        "F1.12f",
        "a checkpoint counts as the newest before it is on disk",
        [
            Edit(
                CHECKPOINTS,
                "        with replacing_folder(target) as folder:\n",
                "        replace_file(self.folder / MARKER, str(step).encode())\n"
                "        with replacing_folder(target) as folder:\n",
            )
        ],
        [CHECKPOINT_TESTS + "test_a_killed_save_leaves_the_newest_checkpoint_whole"],
    ),
    Defect(
        "F1.12g",
        "the checkpoints of another run in the same folder are removed",
        [Edit(CHECKPOINTS, "if old <= step and _run_of(self._folder(old)) == self.run_id]", "if old <= step]")],
        [CHECKPOINT_TESTS + "test_checkpoints_of_another_run_and_folders_of_others_are_never_removed"],
    ),
    Defect(
        "C.10a",
        "nothing is said of a tracker that fails",
        [Edit("skyrl/train/tracking.py", "except (Exception, SystemExit):", "except ZeroDivisionError:")],
        [TRACKING_TESTS + "test_a_tracker_that_fails_is_said_once_and_stops_nothing"],
    ),
    Defect(
        "C.10b",
        "a number that is not finite makes a line that is no JSON",
        [Edit("skyrl/train/tracking.py", "return number if math.isfinite(number) else None", "return number")],
        [TRACKING_TESTS + "test_numbers_of_any_library_are_written_and_what_is_none_as_null"],
    ),
]

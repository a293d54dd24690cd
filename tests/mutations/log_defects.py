"""Defects by which rows of the log would mean something else than they did, as in `defects.py`."""

from defects import Defect, Edit

DECISIONS = "skyrl/tinker/database/decisions.py"
TESTS = "tests/tinker/test_decisions.py::"

LOG_DEFECTS = [
    Defect(
        "LOG1",
        "a checkpoint without a digest is logged without saying so, and an older server cannot read that",
        [Edit(DECISIONS, ' or (name == "digest" and has_checkpoint)', "")],
        [f"{TESTS}test_what_is_chosen_is_logged_letter_by_letter_as_before"],
    ),
    Defect(
        "LOG2",
        "a choice of zero or False is not logged",
        [Edit(DECISIONS, "if value is not None or", "if value or")],
        [f"{TESTS}test_what_is_chosen_is_logged_letter_by_letter_as_before"],
    ),
    Defect(
        "LOG3",
        "what a later server chose besides makes its rows unreadable",
        [Edit(DECISIONS, "for name in _NAMES if name in logged}", "for name in logged}")],
        [f"{TESTS}test_keys_of_later_servers_are_left_out"],
    ),
]

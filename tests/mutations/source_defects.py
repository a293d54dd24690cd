"""Defects of rollouts beside training, as in `defects.py`. The numbers are those of the list of known defects."""

from defects import Defect, Edit

SOURCES = "skyrl/train/rl/rollout_source.py"
TESTS = "tests/train/test_rl_sources.py::"

SOURCE_DEFECTS = [
    Defect(
        "F1.11d",
        "what ends first is trained on first, so that short samples are favoured",
        [Edit(SOURCES, 'if self._policy == "block":', "if False:")],
        [TESTS + "test_who_blocks_trains_in_order_on_nothing_older_than_allowed"],
    ),
    Defect(
        "F1.11e",
        "samples are begun earlier than their step allows",
        [Edit(SOURCES, "min(self._staleness + 1, ", "min(self._staleness + 2, ")],
        [TESTS + "test_who_blocks_trains_in_order_on_nothing_older_than_allowed"],
    ),
    Defect(
        "F1.11f",
        "samples that are too old are trained on",
        [Edit(SOURCES, 'if self._policy == "drop":\n            self._drop_stale()', "if False:\n            pass")],
        [TESTS + "test_who_drops_trains_on_nothing_older_than_allowed_and_says_what_is_left_out"],
    ),
    Defect(
        "F1.12k",
        "what was sampled for later steps is lost in a restart",
        [Edit(SOURCES, 'groups[index] if name == "sampled" else name', '"open" if name == "sampled" else name')],
        [TESTS + "test_what_was_sampled_is_restored_and_what_was_open_is_begun_again"],
    ),
]

"""Defects of sampling engines, as in `defects.py`: samples of other weights than those that they were asked of."""

from defects import Defect, Edit

ENGINES = "skyrl/backends/engines/"
FLEET = "tests/backends/engines/test_fleet.py::"
BACKEND = "tests/backends/engines/test_backend_with_engines.py::"

ENGINE_DEFECTS = [
    Defect(
        "EN1",
        "nobody looks at the stamps of an engine's answers",
        [
            Edit(
                ENGINES + "fleet.py",
                "            if (origin.version, origin.base) != asked:\n",
                "            if False:\n",
            )
        ],
        [
            FLEET + "test_an_engine_that_draws_with_the_weights_of_others_is_left",
            FLEET + "test_an_engine_whose_base_was_replaced_is_left_until_it_is_proved_again",
        ],
    ),
    Defect(
        "EN2",
        "versions on engines are not compared with ours",
        [Edit(ENGINES + "sync_check.py", "        if not difference <= bound:\n", "        if False:\n")],
        [BACKEND + "test_a_version_that_an_engine_has_wrong_is_found_before_it_is_sampled"],
    ),
    Defect(
        "EN3",
        "a trainer trains on samples of other weights",
        [
            Edit(
                "skyrl/train/policies/on_backend.py",
                "            if (origin.version, origin.base) != asked:\n",
                "            if False:\n",
            )
        ],
        ["tests/train/test_sample_stamps.py::test_a_sample_of_other_weights_ends_the_run_with_both_named"],
    ),
    Defect(
        "EN4",
        "samples are stamped with what was asked for first, not with what is in the slot",
        [
            Edit(
                "skyrl/backends/common/versions.py",
                "return None if slot == BASE_SLOT else self._slots[slot].published",
                "return None if slot == BASE_SLOT else next(iter(self._slots.values())).published",
            )
        ],
        [
            "tests/backends/test_contract.py::test_samples_are_stamped_with_the_version_and_the_base_that_they_were_drawn_from"
        ],
    ),
]

"""Defects by which the answers and the JSON of one client hold up the rest, as in `defects.py`."""

from defects import Defect, Edit

ANSWERS = "skyrl/tinker/answers.py"
TESTS = "tests/tinker/test_answers.py::"
CHARGED = "tests/tinker/test_charged_bodies.py::"

ANSWER_DEFECTS = [
    Defect(
        "R2a",
        "large answers are read in the order in which they were asked for",
        [Edit(ANSWERS, "self._turns.work(sharer, max", 'self._turns.work("", max')],
        [f"{TESTS}test_the_answer_of_another_is_read_among_a_flood_of_one"],
    ),
    Defect(
        "R2b",
        "each poll of an answer makes a copy of it",
        [
            Edit(ANSWERS, "            return held\n", "            pass\n"),
            Edit(ANSWERS, "if (reading := self._reading.get(place)) is None:", "if reading := True:"),
        ],
        [f"{TESTS}test_those_who_ask_at_the_same_time_share_a_copy"],
    ),
    Defect(
        "R2c",
        "answers that nobody takes are in no limit",
        [Edit("skyrl/tinker/routes/queued.py", "        room.grow_to(", "        (")],
        [f"{TESTS}test_who_does_not_take_his_answers_is_given_no_more_and_others_are"],
    ),
    Defect(
        "R2d",
        "who takes nothing of his answer keeps it for ever",
        [Edit("skyrl/tinker/connections.py", "PATIENCE_S - self._delay_s, ", "10**6, ")],
        [f"{TESTS}test_a_client_that_takes_nothing_loses_its_connection"],
    ),
    Defect(
        "R6",
        "JSON bodies of all senders stand in one line",
        [Edit("skyrl/tinker/routes/dependencies.py", "caller.sharer, len(body.data)", '"", len(body.data)')],
        [f"{CHARGED}test_json_of_an_address_waits_behind_its_own_only[/retrieve_future]"],
    ),
]

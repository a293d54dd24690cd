"""Defects by which the answers and the JSON of one client hold up the rest, as in `defects.py`."""

from defects import Defect, Edit

ANSWERS = "skyrl/tinker/database/answers.py"
TESTS = "tests/tinker/test_large_answers.py::"
CHARGED = "tests/tinker/test_charged_bodies.py::"

ANSWER_DEFECTS = [
    Defect(
        "R2a",
        "large answers are read in the order in which they were asked for",
        [Edit(ANSWERS, "self._decode_pool.run(sharer, max", 'self._decode_pool.run("", max')],
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
        [Edit("skyrl/tinker/http/routes/queued.py", "        room.grow_to(", "        (")],
        [f"{TESTS}test_who_does_not_take_his_answers_is_given_no_more_and_others_are"],
    ),
    Defect(
        "R2d",
        "who takes nothing of his answer keeps it for ever",
        [Edit("skyrl/tinker/http/connections.py", "PATIENCE_S - self._delay_s, ", "10**6, ")],
        [f"{TESTS}test_a_client_that_takes_nothing_loses_its_connection"],
    ),
    Defect(
        "R8",
        "single answers of many stay in memory, however many they are",
        [Edit("skyrl/tinker/requests/futures.py", "<= 2 * self._max_bytes:", "<= 2**60:")],
        ["tests/tinker/test_futures.py::test_single_answers_of_many_take_no_more_than_twice_the_cap_and_the_newest"],
    ),
    Defect(
        "R9a",
        "the pieces of a body are joined on the event loop",
        [
            Edit(
                "skyrl/tinker/http/routes/dependencies.py",
                "                whole.write(piece)\n",
                "                whole.write(piece)\n                pieces.append(piece)\n",
            ),
            Edit(
                "skyrl/tinker/http/routes/dependencies.py",
                "        whole = BytesIO()",
                "        pieces, whole = [], BytesIO()",
            ),
            Edit("skyrl/tinker/http/routes/dependencies.py", "data = whole.getvalue()", 'data = b"".join(pieces)'),
        ],
        ["tests/tinker/test_body_quota.py::test_a_body_is_there_once_when_it_has_come"],
    ),
    Defect(
        "R9b",
        "a large frame of the engine is copied on the event loop",
        [
            Edit(
                "skyrl/tinker/processes/incoming.py",
                "self._keep(parts)",
                "self._keep([memoryview(bytes(part)) for part in parts])",
            )
        ],
        ["tests/tinker/test_frames.py::test_a_large_frame_is_there_once_while_it_comes"],
    ),
    Defect(
        "R5",
        "JSON of more than is read leaves a gap in its model's order",
        [Edit("skyrl/tinker/wire/parsing.py", "self.members = outer_members(body)", "self.members = {}")],
        ["tests/tinker/test_api_errors.py::test_json_of_more_than_is_read_fails_in_its_place_and_the_rest_goes_on"],
    ),
    Defect(
        "R5b",
        "a JSON request that was taken is not read again where the limits are lower now",
        [Edit("skyrl/tinker/wire/codec.py", "bounded=max_parts <= MAX_PARTS", "bounded=True")],
        [
            "tests/tinker/test_queue_limits.py::test_json_of_more_than_is_read_now_has_its_address_and_is_read_again_if_it_was_taken"
        ],
    ),
    Defect(
        "R10",
        "a bomb that says its size is decompressed",
        [Edit("skyrl/tinker/wire/codec.py", "zstandard.frame_content_size(body) > max_bytes", "False")],
        ["tests/tinker/test_bombs.py::test_a_bomb_that_says_its_size_is_refused_before_it_is_decompressed"],
    ),
    Defect(
        "R6",
        "JSON bodies of all senders stand in one line",
        [Edit("skyrl/tinker/http/routes/dependencies.py", "caller.sharer, len(body.data)", '"", len(body.data)')],
        [f"{CHARGED}test_json_of_an_address_waits_behind_its_own_only[/retrieve_future]"],
    ),
]

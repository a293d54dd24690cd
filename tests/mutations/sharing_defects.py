"""Defects by which one client stops or starves the rest, as in `defects.py`."""

from defects import Defect, Edit

DB = "skyrl/tinker/database/database.py"
HEARTBEAT = "skyrl/tinker/processes/heartbeat.py"
TROUBLE = "tests/tinker/test_trouble_below.py::"
LISTINGS = "skyrl/tinker/database/fair_reads.py"

SHARING_DEFECTS = [
    Defect(
        "D6b",
        "a job that fails rolls its group back, and each is done alone",
        [
            Edit(
                DB,
                "            if isinstance(error, (OperationalError, InterfaceError, InternalError)) and",
                "            if",
            )
        ],
        ["tests/tinker/test_db.py::test_jobs_that_fail_leave_the_one_commit_of_their_group_whole"],
    ),
    Defect(
        "D6b2",
        "jobs whose commit was not confirmed are done again, one by one",
        [
            Edit(
                DB,
                "error.connection_invalidated or not said_by_database or code",
                "error.connection_invalidated or code",
            )
        ],
        ["tests/tinker/test_db.py::test_a_group_whose_commit_is_not_confirmed_is_not_done_again"],
    ),
    Defect(
        "D6c",
        "a round looks through tables in the writer, where all others wait",
        [Edit("skyrl/tinker/checkpoints/collector.py", "if not isinstance(job, TableSweep):", "if True:")],
        ["tests/tinker/test_plans.py::test_the_writer_walks_through_nothing"],
    ),
    Defect(
        "D6d",
        "long lists are read where single rows are",
        [
            Edit(
                LISTINGS,
                "await self._decode_pool.run(caller.sharer, LARGE_BYTES + 1, read)",
                "await self._database.read(lambda _: read())",
            )
        ],
        ["tests/tinker/test_listings.py::test_rows_are_looked_up_while_a_flood_of_lists_is_read"],
    ),
    Defect(
        "S2",
        "web pages that a browser has open may use a server without keys",
        [Edit("skyrl/tinker/http/app.py", "    if not config.api_keys:\n", "    if False:\n")],
        ["tests/tinker/test_local_only.py::test_a_page_of_another_site_is_refused"],
    ),
    Defect(
        "S3",
        "a server without keys listens for everybody",
        [Edit("skyrl/tinker/config.py", "if not (is_loopback(self.host) or", "if not (True or")],
        ["tests/tinker/test_config.py::test_an_address_that_others_reach_takes_keys_or_the_word_of_the_operator"],
    ),
    Defect(
        "S5",
        "a token is exchanged for another for ever",
        [Edit("skyrl/tinker/identity/callers.py", "if self._tenants and _hash(api_key", "if False and _hash(api_key")],
        ["tests/tinker/test_doors.py::test_a_token_is_not_exchanged_for_another"],
    ),
    Defect(
        "S6",
        "somebody's key, sent to load his weights, is stored",
        [Edit("skyrl/tinker/requests/training.py", 'if operation.name != "load_weights":', "if operation:")],
        ["tests/tinker/test_doors.py::test_no_secret_is_anywhere_but_where_it_was_put"],
    ),
    Defect(
        "S6b",
        "files of a server may be read by other users",
        [
            Edit("skyrl/tinker/processes/launcher.py", "os.umask(PRIVATE)", "os.umask(0o022)"),
        ],
        ["tests/tinker/test_doors.py::test_files_are_their_owners_alone"],
    ),
    Defect(
        "D10",
        "an engine that is stopped is waited for for ever",
        [Edit(HEARTBEAT, "if self._spoken and limit_s and silent_s > limit_s:", "if False:")],
        [TROUBLE + "test_a_supervisor_that_was_away_itself_does_not_take_its_engine_for_hung"],
    ),
    Defect(
        "D10b",
        "a step that never ends is waited for for ever",
        [Edit(HEARTBEAT, "and self._step_s > self._config.compute_timeout_sec:", "and False:")],
        [TROUBLE + "test_a_step_that_takes_longer_than_its_limit_is_complained_of"],
    ),
    Defect(
        "D5",
        "a system that has no descriptor for an engine ends the server",
        [
            Edit(
                "skyrl/tinker/processes/engine_supervisor.py",
                "except (OSError, RuntimeError) as error:",
                "except ArithmeticError as error:",
            )
        ],
        [TROUBLE + "test_an_engine_is_started_again_once_there_are_descriptors"],
    ),
]

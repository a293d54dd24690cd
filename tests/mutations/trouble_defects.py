"""Defects by which trouble below a server ends it, or by which its doors are open, as in `defects.py`."""

from defects import Defect, Edit

CONFIG = "skyrl/tinker/config.py"
KEY_FILE = "skyrl/tinker/identity/key_file.py"
HEARTBEAT = "skyrl/tinker/processes/heartbeat.py"
SUPERVISOR = "skyrl/tinker/processes/engine_supervisor.py"
TROUBLE = "tests/tinker/test_trouble_below.py::"
CONFIG_TESTS = "tests/tinker/test_config.py::"

TROUBLE_DEFECTS = [
    Defect(
        "413a",
        "a pass that is too large is turned away at the door, and what follows waits for it",
        [Edit("skyrl/tinker/http/app.py", "return limits.get(path, SMALL_BODY) is None", "return False")],
        [
            "tests/tinker/test_too_large_bodies.py::"
            "test_the_request_after_a_pass_that_is_too_large_does_not_wait_for_it[protobuf-with its length]"
        ],
    ),
    Defect(
        "world-readable",
        "what an earlier server left for others to read stays so",
        [Edit("skyrl/tinker/checkpoints/disk_budget.py", "if mode & (stat.S_IRWXG | stat.S_IRWXO):", "if False:")],
        ["tests/tinker/test_doors.py::test_folders_of_an_earlier_server_are_made_private"],
    ),
    Defect(
        "D10h",
        "while there is no API process, whoever asks whether the server lives is turned away",
        [
            Edit(
                "skyrl/tinker/processes/launcher.py",
                "socket.socket(fileno=handle)\n",
                "None\n                    os.close(handle)\n",
            )
        ],
        [TROUBLE + "test_a_probe_that_comes_while_there_is_no_api_process_is_answered_by_the_next"],
    ),
    Defect(
        "413b",
        "of a compressed pass that is too large nothing is read",
        [Edit("skyrl/tinker/wire/too_large.py", 'if body.content_encoding != "zstd":', "if True:")],
        [
            "tests/tinker/test_too_large_bodies.py::"
            "test_the_request_after_a_pass_that_is_too_large_does_not_wait_for_it[zstd-without its length]"
        ],
    ),
    Defect(
        "closed-channel",
        "a model cannot be brought back where its engine's end of the socket has just closed",
        [Edit("skyrl/tinker/processes/channel.py", "if not self._transport.is_closing():", "if True:")],
        ["tests/tinker/test_channel.py::test_a_frame_to_an_engine_that_has_gone_is_dropped"],
    ),
    Defect(
        "unlogged-creation",
        "a model is revived before its creation is in the log",
        [Edit("skyrl/tinker/requests/pending.py", "if any(one.logged for one in owed.values())", "if owed")],
        [
            "tests/tinker/test_api_recovery.py::"
            "test_a_model_whose_creation_is_being_logged_when_the_engine_is_ready_is_not_revived"
        ],
    ),
    Defect(
        "D5b",
        "an engine that cannot load after a restart of the API process ends the server",
        [Edit(SUPERVISOR, "self._was_ready = again", "self._was_ready = False")],
        ["tests/tinker/test_supervisor.py::test_where_an_engine_was_ready_before_one_that_cannot_load_is_tried_again"],
    ),
    Defect(
        "D5c",
        "a file of keys that is spoilt at a restart of the API process ends the server",
        [Edit("skyrl/tinker/api_process.py", "if not (link.again and end.code):", "if True:")],
        [TROUBLE + "test_what_is_wrong_with_a_file_at_a_restart_of_the_api_is_told_until_it_is_mended"],
    ),
    Defect(
        "D5d",
        "a server that waits for its database answers no probe",
        [Edit("skyrl/tinker/http/startup_gate.py", ' and scope["path"] != LIVEZ:', ":")],
        [TROUBLE + "test_a_server_that_is_started_again_and_waits_for_its_database_is_alive_and_not_ready"],
    ),
    Defect(
        "D10c",
        "an engine that is stopped outlives the process that started it",
        [Edit("skyrl/utils/parent_death.py", 'if sys.platform != "linux":', "if True:")],
        ["tests/utils/test_parent_death.py::test_a_stopped_process_dies_with_its_parent"],
    ),
    Defect(
        "D10d",
        "an engine that never says a word is waited for for ever",
        [Edit(HEARTBEAT, "max(self._step_s, 0.0 if self._spoken else silent_s)", "self._step_s")],
        [TROUBLE + "test_an_engine_that_never_says_a_word_is_complained_of"],
    ),
    Defect(
        "D10e",
        "an engine that hangs while it loads is waited for for ever",
        [
            Edit(
                "skyrl/tinker/engine/loop.py",
                "engine.step_began if engine else loading_since",
                "engine.step_began if engine else None",
            )
        ],
        [TROUBLE + "test_an_engine_whose_load_never_ends_is_killed_and_another_is_tried"],
    ),
    Defect(
        "D10f",
        "time in which all processes were frozen is a step's",
        [Edit(HEARTBEAT, "self._lost_s += now - max(began, looked)", "self._lost_s += 0.0")],
        [TROUBLE + "test_time_in_which_the_engine_stood_still_is_not_its_steps"],
    ),
    Defect(
        "D10g",
        "an engine that cannot be killed counts as ready",
        [
            Edit(
                SUPERVISOR,
                'complaint, "restarting", f"restarting the engine: {complaint}"',
                "complaint, self.state, self.progress",
            )
        ],
        ["tests/tinker/test_supervisor.py::test_an_engine_that_hangs_and_cannot_be_killed_does_not_count_as_ready"],
    ),
    Defect(
        "D11",
        "probes tell who has no key what the server's disks are called",
        [Edit("skyrl/tinker/http/operators/probes.py", "not ready: {engine.state}", "not ready: {engine.progress}")],
        ["tests/tinker/test_probes.py::test_who_has_no_key_learns_nothing_of_the_servers_disks"],
    ),
    Defect(
        "doors-1",
        "an empty place for keys starts a server without keys",
        [Edit(CONFIG, 'if isinstance(value, str) and not value.strip(", "):', "if False:")],
        [CONFIG_TESTS + "test_a_place_for_keys_without_a_key_does_not_open_the_doors"],
    ),
    Defect(
        "doors-2",
        "keys that others can change are taken",
        [Edit("skyrl/utils/private.py", "stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH", "stat.S_IROTH")],
        [CONFIG_TESTS + "test_a_file_of_keys_that_is_none_or_that_others_can_read_is_refused"],
    ),
    Defect(
        "names-1",
        "a key that the SDK refuses is taken",
        [Edit(KEY_FILE, "if not key.startswith(SDK_PREFIX):", "if False:")],
        ["tests/tinker/test_key_file.py::test_keys_that_the_sdk_refuses_are_refused"],
    ),
    Defect(
        "names-2",
        "a new name makes a new tenant",
        [Edit(KEY_FILE, "older or tenant_of_key(key.encode())", "older or tenant_of_key((name or key).encode())")],
        ["tests/tinker/test_display_names.py::test_a_change_of_the_name_changes_no_owner"],
    ),
    Defect(
        "names-3",
        "the access log has the id of a tenant with a name",
        [
            Edit(
                "skyrl/tinker/http/routes/dependencies.py",
                "request.scope[TENANT] = caller.display_name",
                "request.scope[TENANT] = caller.name",
            )
        ],
        ["tests/tinker/test_display_names.py::test_a_line_of_the_access_log_has_the_name"],
    ),
    Defect(
        "usage-1",
        "usage of all tenants is of the first day of a window only",
        [
            Edit(
                "skyrl/tinker/database/ledger/tenant_usage.py",
                "query.group_by(*groups, *periods)",
                "query.group_by(*groups)",
            )
        ],
        ["tests/tinker/test_tenant_usage.py::test_periods_are_days_or_hours_in_utc"],
    ),
    Defect(
        "doors-3",
        "what is given to a misspelt option is printed",
        [Edit(CONFIG, 'return argument.partition("=")[0] if argument.startswith("--") else "..."', "return argument")],
        [CONFIG_TESTS + "test_no_error_says_a_secret"],
    ),
    Defect(
        "doors-4",
        "a link outlives the token that asked for it",
        [
            Edit(
                "skyrl/tinker/http/routes/links.py",
                "return hour if caller.expires is None else min(hour, caller.expires)",
                "return hour",
            )
        ],
        ["tests/tinker/test_rest_auth.py::test_a_link_ends_with_the_token_that_asked_for_it"],
    ),
]

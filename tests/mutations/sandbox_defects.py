"""Defects that let code of a model out of the sandbox, in the form of `defects.py`.

None of them alone lets it far: most walls stand behind another one.
"""

from defects import Defect, Edit

SANDBOX = "skyrl/utils/sandbox/"
CALLS = SANDBOX + "calls.py"
CHILD = SANDBOX + "child.py"
LIBRARY = SANDBOX + "library.py"
TESTS = "tests/utils/test_sandbox_escapes.py::"
CALL_TEST = TESTS + "test_a_call_that_reaches_out_is_refused"
MOUNTS_TEST = TESTS + "test_full_holds_only_mounts_that_are_read_only_or_its_own_memory_or_harmless_devices"
READ_TEST = TESTS + "test_what_is_not_the_library_cannot_be_read"
THREADS_TEST = TESTS + "test_threads_are_bounded"
WRITE_TEST = TESTS + "test_nothing_outside_can_be_opened_to_change_it"
WITHOUT_LANDLOCK = TESTS + "test_without_landlock_limited_still_changes_nothing_and_says_what_it_cannot_stop"

SANDBOX_DEFECTS = [
    Defect(
        "T6.1.1a",
        "the sandbox's /proc is writable and holds the settings of the kernel",
        [Edit(SANDBOX + "namespaces.py", '_SAFE | _MS_RDONLY, "subset=pid"', "_SAFE, None")],
        [MOUNTS_TEST],
    ),
    Defect(
        "T6.1.1b",
        "code of a trainer who is root runs as root",
        [Edit(SANDBOX + "confinement.py", "    if os.getuid() == 0:\n", "    if not os.getuid:\n")],
        [TESTS + "test_code_does_not_run_as_root"],
    ),
    Defect(
        "T6.1.2",
        "code may open a device",
        [Edit(LIBRARY, '"/dev/urandom")', '"/dev/urandom", "/dev/ptmx")')],
        [WRITE_TEST],
    ),
    Defect(
        "T6.1.3",
        "files that Python does not need can be read",
        [Edit(LIBRARY, '"/etc/ld.so.cache"', '"/etc"')],
        [READ_TEST],
    ),
    Defect(
        "T6.1.4a",
        "`limited` does without Landlock where there is one",
        [Edit(CHILD, "        landlock.restrict_self(ruleset)\n", "        os.close(ruleset)\n")],
        [READ_TEST, WRITE_TEST, TESTS + "test_nothing_of_the_user_changed_and_nobody_came_by"],
    ),
    Defect(
        "T6.1.4b",
        "where there is no Landlock, `limited` lets code write",
        [Edit(CHILD, "return version >= landlock.RESTRICTS_ALL_WRITES", "return True")],
        [WITHOUT_LANDLOCK],
    ),
    Defect(
        "T6.1.4c",
        "nobody is told that there is no Landlock",
        [Edit(SANDBOX + "run.py", "    logger.warning(text)\n", "    logger.debug(text)\n")],
        [WITHOUT_LANDLOCK],
    ),
    Defect(
        "T6.1.5a",
        "a call that code has no use for is allowed",
        [Edit(CALLS, '"uname": (63, 160)', '"uname": (63, 160), "personality": (135, 92)')],
        [CALL_TEST],
    ),
    Defect(
        "T6.1.5b",
        "calls of x32 are refused, and may be tried on",
        [Edit(CALLS, "0x40000000, 0, 1), kill]", "0x40000000, 0, 1), _refuse()]")],
        [TESTS + "test_a_call_in_another_numbering_ends_the_process"],
    ),
    Defect(
        "T6.1.5c",
        "code may send to an address",
        [Edit(CALLS, '"sendto": [_one_of(4, 0), _one_of(4.5, 0)]', '"sendto": []')],
        [CALL_TEST],
    ),
    Defect(
        "T6.1.6a",
        "`full` does not bound threads",
        [Edit(CHILD, "            confinement.limit_threads()\n", "            pass\n")],
        [THREADS_TEST],
    ),
    Defect(
        "T6.1.6b",
        "`limited` does not bound threads",
        [Edit(CALLS, '_ASK if name == "clone" and asks else _ALLOW', "_ALLOW")],
        [THREADS_TEST],
    ),
    Defect(
        "T6.1.6c",
        "code may make files in memory that no limit counts",
        [Edit(CALLS, '"fallocate": (285, 47)', '"fallocate": (285, 47), "memfd_create": (319, 279)')],
        [CALL_TEST],
    ),
    Defect(
        "T6.1.7",
        "code has the files of the process that watches over it",
        [Edit(CHILD, "        os.closerange(4, calls.CHANNEL)\n", "")],
        [TESTS + "test_code_has_no_file_but_its_own_four"],
    ),
]

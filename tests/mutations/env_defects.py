"""Defects of environments that reward the wrong thing or let a model out, in the form of `defects.py`.

The numbers are those of the list of known defects of trainers, section by section.
"""

from defects import Defect, Edit

AIME = "skyrl/envs/tasks/aime.py"
ANSWERS = "skyrl/envs/tasks/answers.py"
JUDGE = "skyrl/envs/tasks/llm_as_a_judge.py"
LCB = "skyrl/envs/tasks/lcb.py"
SANDBOX = "skyrl/utils/sandbox/"
SEARCH = "skyrl/envs/tasks/search.py"
SEARCHCODE = "skyrl/envs/tasks/searchcode.py"
SQLITE = "skyrl/envs/services/sqlite.py"
TEXT2SQL = "skyrl/envs/tasks/text2sql.py"
TESTS = "tests/envs/"
JUDGED = TESTS + "test_answers.py::test_an_answer_is_judged_as_the_table_says"
SANDBOX_TESTS = "tests/utils/test_sandbox.py::"

ENV_DEFECTS = [
    Defect(
        "D5.1a",
        "results of queries are compared as sets, so duplicates do not count",
        [Edit(SQLITE, "Counter(gold.rows) == Counter(other.rows)", "frozenset(gold.rows) == frozenset(other.rows)")],
        [
            TESTS + "test_text2sql.py::test_results_are_compared_as_the_gold_query_asks",
            TESTS + "test_text2sql.py::test_unordered_results_are_equal_if_python_counts_the_same_rows",
        ],
    ),
    Defect(
        "D5.1b",
        "the order of rows does not count where the gold query asks for one",
        [Edit(SQLITE, "    if has_top_level_order(gold_sql):\n        return gold.rows == other.rows\n", "")],
        [TESTS + "test_text2sql.py::test_results_are_compared_as_the_gold_query_asks"],
    ),
    Defect(
        "D5.1c",
        "a query of the model can change the database",
        [
            Edit(SQLITE, "mode=ro{immutable}", "mode=rw"),
            Edit(SQLITE, "        connection.set_authorizer(authorizer)\n", ""),
        ],
        [TESTS + "test_text2sql.py::test_a_query_that_does_more_than_read_is_refused"],
    ),
    Defect(
        "D5.2a",
        "an answer that a document holds is rewarded",
        [
            Edit(SEARCH, "content = f", "self.heard = content = f"),
            Edit(SEARCH, "extract_answer(action)", 'extract_answer(getattr(self, "heard", "") + action)'),
        ],
        [TESTS + "test_search.py::test_an_answer_in_a_document_is_not_rewarded"],
    ),
    Defect(
        "D5.2b",
        "an answer that a program prints is rewarded",
        [
            Edit(
                SEARCHCODE,
                "return await self.tools.call(name, text.strip())",
                "self.heard = await self.tools.call(name, text.strip())\n            return self.heard",
            ),
            Edit(SEARCHCODE, "is_correct(action,", 'is_correct(getattr(self, "heard", "") + " " + action,'),
        ],
        [TESTS + "test_searchcode.py::test_an_answer_that_a_program_prints_is_not_rewarded"],
    ),
    Defect(
        "D5.5",
        "aime reads another column than every other environment",
        [Edit(AIME, '"reward_spec.ground_truth", "reward_model.ground_truth"', '"reward_model.ground_truth"')],
        [TESTS + "test_single_turn_maths.py::test_aime_takes_the_answer_from_either_column"],
    ),
    Defect(
        "D2.8",
        "a judge that says nothing useful is a reward of 0",
        [Edit(JUDGE, "if not scores:", "if not scores:\n            return StepResult([], 0.0, done=True)")],
        [TESTS + "test_llm_as_a_judge.py::test_a_verdict_without_a_score_is_a_failure_and_no_reward"],
    ),
    Defect(
        "F1.24a",
        "code of the model gets our environment, with its keys",
        [Edit(SANDBOX + "run.py", "env=_environment(folder)", "env=dict(os.environ)")],
        [SANDBOX_TESTS + "test_our_environment_is_not_passed_on"],
    ),
    Defect(
        "F1.24b",
        "code of the model may open sockets and start processes",
        [Edit(SANDBOX + "child.py", 'calls.forbid_calls(writes=writes, asks=job["isolation"] == "limited")', "-1")],
        [SANDBOX_TESTS + "test_the_kernel_refuses"],
    ),
    Defect(
        "F1.24c",
        "code of the model may write to our files",
        [Edit(SANDBOX + "namespaces.py", "_MS_RDONLY | _MS_NOSUID | _MS_NODEV", "_MS_NOSUID | _MS_NODEV")],
        [
            "tests/utils/test_sandbox_escapes.py::"
            "test_full_holds_only_mounts_that_are_read_only_or_its_own_memory_or_harmless_devices"
        ],
    ),
    Defect(
        "F1.24d",
        "code of the model may take all memory",
        [
            Edit(
                SANDBOX + "confinement.py",
                "    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))\n",
                "",
            )
        ],
        [SANDBOX_TESTS + "test_memory_is_bounded"],
    ),
    Defect(
        "T6.2a",
        "what only begins as the right number is right",
        [Edit(ANSWERS, '(?P<amount>{_AMOUNT}){_AFTER}")\n_IN', '(?P<amount>{_AMOUNT})")\n_IN')],
        [JUDGED],
    ),
    Defect(
        "T6.2b",
        "the right number is wrong if a point or the sign of a currency is at it",
        [Edit(ANSWERS, "[ \\t*_`\"'(\\[{$€£¥]", "[ \\t]"), Edit(ANSWERS, "[*_`\"')\\]}$€£¥¢°.,;:!?%。]", "[,]")],
        [JUDGED],
    ),
    Defect(
        "T6.2c",
        "an empty gold answer is the answer of whoever says nothing",
        [Edit(ANSWERS, "return bool(wanted)", "return True")],
        [JUDGED],
    ),
    Defect(
        "T6.2d",
        "of 41=42 the right side is taken",
        [Edit(ANSWERS, "if len(numbers) <= 1 else", "if numbers is not None else")],
        [JUDGED],
    ),
    Defect(
        "T6.2e",
        "the first box counts",
        [Edit(ANSWERS, "boxes = [*_BOX.finditer(text)]", "boxes = [*_BOX.finditer(text)][:1]")],
        [JUDGED],
    ),
    Defect(
        "T6.2f",
        "every query without rows is right where the gold query has none",
        [Edit(TEXT2SQL, "if not gold.rows:", "if gold.rows is None:")],
        [TESTS + "test_text2sql.py::test_a_gold_query_without_rows_is_refused"],
    ),
    Defect(
        "T6.2g",
        "a constant is the answer to a question about tables",
        [Edit(SQLITE, " or (gold.reads_tables and not other.reads_tables)", "")],
        [TESTS + "test_text2sql.py::test_results_are_compared_as_the_gold_query_asks"],
    ),
    Defect(
        "T6.2h",
        "true is 1",
        [Edit(LCB, "_same(json.loads(value), expected)", "json.loads(value) == expected")],
        [
            TESTS + "test_lcb.py::test_values_are_compared_by_their_json",
            TESTS + "test_lcb.py::test_a_difference_from_skyrl_gym_is_as_documented",
        ],
    ),
    Defect(
        "T6.2i",
        "1_0 is 10",
        [Edit(LCB, "(?:[0-9]++(?:", "(?:[0-9_]++(?:")],
        [TESTS + "test_lcb.py::test_what_is_no_number_does_not_equal_one"],
    ),
    Defect(
        "T6.2j",
        "the tests of a row are parsed for each of its samples",
        [Edit(LCB, "_read_once(given)", "read_tests(json.loads(given))")],
        [TESTS + "test_lcb.py::test_the_tests_of_a_row_are_parsed_once_for_all_its_samples"],
    ),
    Defect(
        "T6.2k",
        "a judge that refuses a temperature fails every trajectory",
        [Edit(JUDGE, "if error.status not in (400, 422) or", "if error.status != 0 or")],
        [TESTS + "test_llm_as_a_judge.py::test_a_judge_that_wants_no_temperature_is_asked_without_it_and_told_once"],
    ),
    Defect(
        "T6.2l",
        "a judge is asked about all answers at once",
        [Edit(JUDGE, "asyncio.Semaphore(most))", "asyncio.Semaphore(1000))")],
        [TESTS + "test_llm_as_a_judge.py::test_a_judge_has_so_many_answers_at_a_time"],
    ),
    Defect(
        "H5.1",
        "the page's environment raises for what Python calls a digit",
        [
            Edit(
                "docs/add-an-environment.md",
                r'if re.fullmatch(r"\s*[0-9]{1,9}\s*", action, re.ASCII)',
                "if action.strip().isdigit()",
            )
        ],
        [TESTS + "test_environment_page.py::test_the_pages_environment_survives_what_is_no_number"],
    ),
]

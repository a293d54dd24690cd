"""The environment `text2sql`: what a query may do, when two results are equal, and what is rewarded."""

import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from episodes import play, reward
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.envs import EnvError, make_env
from skyrl.envs.services.sqlite import QueryFailed, has_top_level_order, run_query
from skyrl.envs.tasks.text2sql import extract_solution
from skyrl.errors import ConfigError

PEOPLE = [("Ann", 30, "Rome"), ("Bob", 25, "Oslo"), ("Cid", 30, "Rome"), ("Dan", None, "<solution>")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sql data")
    path = folder / "spider/database/people #1"
    path.mkdir(parents=True)
    with sqlite3.connect(path / "people #1.sqlite") as connection:
        connection.execute("create table people (name text, age integer, city text)")
        connection.executemany("insert into people values (?, ?, ?)", PEOPLE)
    connection.close()
    return folder


@pytest.fixture(scope="module")
def database(folder) -> Path:
    return folder / "spider/database/people #1/people #1.sqlite"


def row(gold: str, **columns) -> dict:
    return {"db_id": "people #1", "data": "spider", "reward_spec": {"ground_truth": gold}, "max_turns": 3, **columns}


def solution(sql: str) -> str:
    return f"<think>hm</think><solution>{sql}</solution>"


def judged(folder: Path, gold: str, sql: str) -> float:
    return reward("text2sql", {"db_path": str(folder)}, row(gold), solution(sql))


@pytest.mark.parametrize(
    ("gold", "sql", "expected"),
    [
        ("select name from people where age = 30", "select name from people where age > 26", 1.0),
        ("select name from people", "select name from people limit 2", 0.0),
        # Order counts where the gold query asks for one, and only there.
        ("select name from people order by name", "select name from people order by name desc", 0.0),
        ("select name from people order by name", "select name from people order by 1", 1.0),
        ("select name from people", "select name from people order by name desc", 1.0),
        # Duplicates count.
        ("select city from people where age = 30", "select distinct city from people where age = 30", 0.0),
        ("select distinct age from people where age = 30", "select age from people where age = 30", 0.0),
        # Columns count, their names do not.
        ("select name, age from people", "select name as n, age as a from people", 1.0),
        ("select name, age from people", "select age, name from people", 0.0),
        # A constant is no answer to a question about tables.
        ("select count(*) from people", "select 4", 0.0),
        ("select count(*) from people", "values (4)", 0.0),
        ("select count(*) from people", "with p as (select 4 as n) select n from p", 0.0),
        ("select count(*) from people", "select count(name) from people", 1.0),
        ("select count(*) from people", "select n from (select count(*) as n from people)", 1.0),
        ("select 4", "select count(*) from people", 1.0),
        # A solution that does not run is wrong.
        ("select name from people", "select nme from people", 0.0),
        ("select name from people", "select name from people; select 1", 0.0),
        ("select name from people", "select '\0'", 0.0),
        ("select name from people", "", 0.0),
    ],
)
def test_results_are_compared_as_the_gold_query_asks(folder, gold, sql, expected):
    assert judged(folder, gold, sql) == expected


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("select 1 ORDER  BY 1", True),
        ("select 1 order /* by */ by 1", True),
        ("select 1 order -- the first\nby 1", True),
        ("with t as (select 1 order by 1) select * from t", False),
        ("select row_number() over (order by a) from t", False),
        ("select 'order by' from t", False),
        ('select "order by", `order by`, [order by] from t', False),
        ("select 'it''s (' from t order by 1", True),
        ("select 1 -- order by 1", False),
        ("select 1 /* order by 1", False),
        ("select a from t union select b from u order by 1", True),
        ("select a from t order", False),
    ],
)
def test_a_top_level_order_is_told_from_others(sql, ordered):
    assert has_top_level_order(sql) is ordered


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b", None])), min_size=1, max_size=5), st.data())
def test_unordered_results_are_equal_if_python_counts_the_same_rows(folder, rows, data):
    def query(rows: list) -> str:
        quoted = [f"({number}, {'null' if text is None else repr(text)})" for number, text in rows]
        return f"select * from (values {', '.join(quoted)})"

    other = data.draw(st.one_of(st.permutations(rows), st.permutations([*rows, *rows[:1]])))
    assert judged(folder, query(rows), query(other)) == float(Counter(rows) == Counter(other))


@pytest.mark.parametrize(
    "sql",
    [
        "drop table people",
        "delete from people",
        "insert into people values ('Eve', 1, 'Bern')",
        "update people set age = 0",
        "create table more (a)",
        "create temp table more (a)",
        "attach database 'other.sqlite' as other",
        "pragma user_version = 7",
        "pragma journal_mode = wal",
        "pragma database_list",
        "vacuum",
        "vacuum into 'copy.sqlite'",
        "begin",
        "select load_extension('x')",
        "select 1; drop table people",
        "with gone as (select 1) delete from people",
    ],
)
def test_a_query_that_does_more_than_read_is_refused(database, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = database.read_bytes()
    with pytest.raises(QueryFailed):
        run_query(database, sql, 30)
    assert database.read_bytes() == before
    assert not list(tmp_path.iterdir()) and [path.name for path in database.parent.iterdir()] == [database.name]


@pytest.mark.parametrize(
    "sql",
    ["pragma table_info(people)", "select sql from sqlite_master"],
)
def test_a_query_may_ask_for_the_tables(database, sql):
    assert "name" in str(run_query(database, sql, 30).rows)


FOREVER = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"
MANY = "with recursive n(i) as (select 1 union all select i + 1 from n) select i from n"


def test_a_query_that_takes_too_long_is_stopped(database):
    with pytest.raises(QueryFailed, match=r"took longer than 0.05 s"):
        run_query(database, FOREVER, 0.05)


@pytest.mark.parametrize("sql", [MANY, MANY.replace("select i from", "select zeroblob(200000) from")])
def test_a_query_that_returns_too_much_is_stopped(database, sql):
    with pytest.raises(QueryFailed, match="returns more than 100000 rows or 64000000 bytes"):
        run_query(database, sql, 200)


@pytest.mark.parametrize("sql", ["select zeroblob(1000000000)", "select hex(zeroblob(200000))"])
def test_a_value_that_is_too_large_is_refused(database, sql):
    with pytest.raises(QueryFailed, match="too big"):
        run_query(database, sql, 30)


def test_a_database_with_a_write_ahead_log_is_read_with_it(tmp_path):
    path = tmp_path / "log.sqlite"
    writer = sqlite3.connect(path)
    writer.execute("pragma journal_mode = wal")
    writer.execute("create table t (a)")
    writer.execute("insert into t values (1)")
    writer.commit()
    assert (tmp_path / "log.sqlite-wal").exists()
    assert run_query(path, "select a from t", 30).rows == [(1,)]
    writer.close()


def test_a_query_is_tried_out_and_shown(folder):
    sql = "select name, age from people where age is null or age = 25 order by name"
    (step,) = play("text2sql", {"db_path": str(folder)}, row("select 1"), f"<think>a</think><sql>{sql}</sql>")
    assert (step.reward, step.done) == (0.0, False)
    (message,) = step.observations
    assert message["role"] == "user"
    table = "name   age\n Bob    25\n Dan  NULL\n"
    reminder = "<reminder>You have 2 turns left to complete the task.</reminder>"
    assert message["content"] == f"\n\n<observation>{table}{reminder}</observation>\n\n"


def test_a_query_that_fails_is_told_without_the_path(folder):
    (step,) = play("text2sql", {"db_path": str(folder)}, row("select 1"), "<think>a</think><sql>select a</sql>")
    assert "no such column: a" in step.observations[0]["content"] and str(folder) not in str(step.observations)


def test_a_long_result_is_cut(folder):
    sql = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 5000) select i from n order by i"
    (step,) = play("text2sql", {"db_path": str(folder)}, row("select 1"), f"<think>a</think><sql>{sql}</sql>")
    content = step.observations[0]["content"]
    assert "The first 50 of 5000 rows" in content and "\n50\n" in content and "\n51\n" not in content


def test_a_long_value_is_cut(folder):
    sql = "select hex(zeroblob(100000))"
    (step,) = play("text2sql", {"db_path": str(folder)}, row("select 1"), f"<think>a</think><sql>{sql}</sql>")
    assert len(step.observations[0]["content"]) < 9500


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["<think>a</think><solution> q </solution>"], "q"),
        (["<think>a</think><sql>p</sql>", " <THINK>b</think><solution>q</solution>"], "q"),
        (["<solution>q</solution>"], None),
        (["<think>a</think>"], None),
        (["<think>a</think><solution>q"], None),
        (["<think>a</think><solution>q</solution></solution>"], None),
        (["<think>a</think><solution>p</solution><solution>q</solution>"], None),
        (["<think>a</think><solution><sql>q</sql></solution>"], None),
        (["<think>a</think><sql>p</sql>", "<solution>q</solution>"], None),
        (["<think>a</think><observation>q</observation><think>b</think><solution>q</solution>"], None),
        (["<think>a", "</think><solution>q</solution>"], None),
        (["<think>a</think><solution>p", "<think>b</think></solution>"], None),
    ],
)
def test_a_solution_counts_in_the_form_that_is_asked_for(turns, expected):
    assert extract_solution(turns) == expected


def test_a_wrong_form_costs_one(folder):
    assert reward("text2sql", {"db_path": str(folder)}, row("select 1"), "<solution>select 1</solution>") == -1.0


def test_the_last_turn_ends_the_episode(folder):
    turn = "<think>a</think><sql>select 1</sql>"
    assert reward("text2sql", {"db_path": str(folder)}, row("select 1"), turn, turn, turn) == -1.0


def test_a_solution_in_a_result_does_not_spoil_the_models_own(folder):
    turns = "<think>a</think><sql>select city from people</sql>", solution("select 1")
    assert reward("text2sql", {"db_path": str(folder)}, row("select 1"), *turns) == 1.0


def test_a_solution_that_a_query_prints_is_not_rewarded(folder):
    turns = (
        "<think>a</think><sql>select '<solu' || 'tion>select 1</solu' || 'tion>'</sql>",
        "<think>b</think>It is above.",
        "<think>c</think>",
    )
    assert reward("text2sql", {"db_path": str(folder)}, row("select 1"), *turns) == -1.0


def test_a_gold_query_that_fails_is_a_failure_and_no_reward(folder):
    with pytest.raises(EnvError, match=r"the gold query 'select nme from people' .* no such column"):
        judged(folder, "select nme from people", "select 1")


@pytest.mark.parametrize("sql", ["select name from people where age > 99", "select 0, 0 where 0", "select 0 where 0"])
def test_a_gold_query_without_rows_is_refused(folder, sql):
    with pytest.raises(EnvError, match=r"the gold query 'select name from people where age > 99' .* returns no rows"):
        judged(folder, "select name from people where age > 99", sql)


def test_a_wrong_form_costs_one_also_where_the_gold_query_has_no_rows(folder):
    gold = row("select name from people where age > 99")
    assert reward("text2sql", {"db_path": str(folder)}, gold, "<solution>select 1</solution>") == -1.0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"data": "wiki"}, "data='wiki': known: synsql, spider, bird"),
        ({"db_id": "pets"}, "there is no database .*pets.sqlite; set environment.skyrl_gym.text2sql.db_path"),
        ({"db_id": None}, "the row has no db_id"),
    ],
)
def test_a_row_without_a_database_is_refused(folder, columns, message):
    with pytest.raises(ConfigError, match=message):
        make_env("text2sql", {"db_path": str(folder)}, row("select 1", **columns))


def test_the_databases_are_found_by_the_rows_data(tmp_path):
    for data, path in {"synsql": "SynSQL-2.5M/databases", "bird": "bird/train/train_databases"}.items():
        os.makedirs(tmp_path / path / "d")
        (tmp_path / path / "d/d.sqlite").touch()
        env = make_env("text2sql", {"db_path": str(tmp_path)}, row("select 1", data=data, db_id="d"))
        assert env.database == tmp_path / path / "d/d.sqlite"

"""Questions about a database. The model may try out queries before it answers with one.

A turn is `<think>...</think>` followed by `<sql>...</sql>` or `<solution>...</solution>`. The query in `<sql>` is run,
and its result is returned to the model. A solution ends the episode. Only the model's own turns count for the reward.

Differences from skyrl-gym 0.4.0: see `DIFFERENCES` in `tests/envs/test_against_skyrl_gym.py`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl.config.environment import Text2SQLEnvConfig
from skyrl.envs.env import ENVS, Env, EnvError, StepResult
from skyrl.envs.services.sqlite import QueryFailed, Result, run_query, same_result
from skyrl.errors import ConfigError

FOLDERS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
"""Folder of the databases below `db_path`, by value of the row's column `data`."""
TRY_S = 5.0
"""Time limit of a trial query, in seconds."""
JUDGE_S = 30.0
"""Time limit of the solution and of the gold query, in seconds."""
SHOWN_CHARACTERS = 9000
"""Maximum length of a result that is shown completely, in characters.

For longer results, only the first rows are shown.
"""
SHOWN_ROWS = 50

BAD_FORMAT = -1.0
HINT = "There was no query to run. Think between <think> and </think>, then write one between <sql> and </sql>."


def extract_solution(turns: Sequence[str]) -> str | None:
    """Return the query in the last turn's `<solution>`; None if the format is violated.

    Format: there is exactly one solution, without tags in it; some turn contains thinking; each turn after a result
    begins with thinking; and no turn contains a result written by the model.
    """
    written = "\n".join(turns)
    _, opened, tail = turns[-1].partition("<solution>")
    solution, closed, rest = tail.partition("</solution>")
    well_formed = (
        written.count("<solution>") == 1
        and bool(opened and closed)
        and "</solution>" not in rest
        and not re.search(r"</?(think|sql|observation)\b", solution, re.IGNORECASE)
        and not re.search(r"</?observation\b", written, re.IGNORECASE)
        and any(re.search(r"<think>.*?</think>", turn, re.DOTALL) for turn in turns)
        and all(turn.lstrip().lower().startswith("<think>") for turn in turns[1:])
    )
    return solution.strip() if well_formed else None


@ENVS.register("text2sql")
class Text2SQLEnv(Env[Text2SQLEnvConfig]):
    """Up to `max_turns` turns (default 5); final reward 1 for the gold query's result, 0 for others, -1 for bad format.

    Needs `db_id`, `data` (synsql, spider or bird) and `reward_spec.ground_truth`, the gold query. Raises EnvError if
    the gold query fails or returns no rows, because then every query without rows would be correct.
    """

    Config = Text2SQLEnvConfig
    stop = ("</sql>", "</solution>")

    def __init__(self, config: Text2SQLEnvConfig, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        data, db_id = self.column("data"), self.column("db_id")
        self.gold_sql = str(self.column("reward_spec.ground_truth"))
        self.max_turns = self.turn_limit(5)
        if data not in FOLDERS:
            raise ConfigError(f"the row's data={data!r}: known: {', '.join(FOLDERS)}")
        self.database = Path(config.db_path) / FOLDERS[data] / db_id / f"{db_id}.sqlite"
        if not self.database.is_file():
            raise ConfigError(f"there is no database {self.database}; set environment.skyrl_gym.text2sql.db_path")
        self.turns: list[str] = []

    async def step(self, action: str) -> StepResult:
        self.turns.append(action)
        if len(self.turns) >= self.max_turns or ("<solution>" in action and "</solution>" in action):
            return StepResult([], await self.workers.run(self._reward), done=True)
        query = re.search(r"<sql>(.*?)</sql>", action, re.DOTALL)
        shown = HINT if query is None else await self.workers.run(self._try, query.group(1))
        left = self.max_turns - len(self.turns)
        reminder = f"<reminder>You have {left} turns left to complete the task.</reminder>"
        content = f"\n\n<observation>{shown}\n{reminder}</observation>\n\n"
        return StepResult([{"role": "user", "content": content}], 0.0, done=False)

    def metrics(self) -> dict[str, float]:
        return {"steps": float(len(self.turns))}

    def _reward(self) -> float:
        solution = extract_solution(self.turns)
        if solution is None:
            return BAD_FORMAT
        try:
            gold = run_query(self.database, self.gold_sql, JUDGE_S)
        except QueryFailed as error:
            raise EnvError(f"the gold query {self.gold_sql!r} of {self.database} fails: {error}") from error
        if not gold.rows:
            raise EnvError(
                f"the gold query {self.gold_sql!r} of {self.database} returns no rows, as any other query can; "
                "leave the row out of the data set"
            )
        try:
            return float(same_result(self.gold_sql, gold, run_query(self.database, solution, JUDGE_S)))
        except QueryFailed:
            return 0.0

    def _try(self, sql: str) -> str:
        try:
            return shown(run_query(self.database, sql, TRY_S))
        except QueryFailed as error:
            return f"The query failed: {error}"


def shown(result: Result) -> str:
    """Format a result as a text table. Keeps the order of rows, and cuts long results."""
    text = _table(result)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    first = _table(Result(result.columns, result.rows[:SHOWN_ROWS]))[:SHOWN_CHARACTERS]
    return f"The first {min(SHOWN_ROWS, len(result.rows))} of {len(result.rows)} rows, since there is much:\n{first}"


def _table(result: Result) -> str:
    cells = [result.columns, *(["NULL" if cell is None else str(cell) for cell in row] for row in result.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(lines)

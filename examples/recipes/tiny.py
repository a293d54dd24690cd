"""Small data, a small model and small sizes for each recipe, in the working directory, on torch (nothing compiles)."""

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from skyrl.cli import main as skyrl
from skyrl.tx.synthetic.make_model import make_model

RL = [
    "trainer.strategy=torch",
    "trainer.policy.model.path=model",
    "trainer.max_steps=2",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=2",
    "trainer.critic_mini_batch_size=2",
    "trainer.max_prompt_length=600",
    "trainer.ckpt_path=runs/rl/checkpoints",
    "trainer.export_path=runs/rl",
    "generator.n_samples_per_prompt=2",
    "generator.sampling_params.max_generate_length=8",
]
SFT = ["strategy=torch", "model.path=model", "num_steps=2", "batch_size=2"]
OF_RECIPE = {
    "gsm8k-ppo": ["trainer.critic.model.path=model"],
    "dapo-math": ["environment.reward=tiny:odd", "trainer.algorithm.overlong_buffer_len=2"],
    "search": ["generator.max_input_length=1200"],
    "text2sql": ["generator.max_input_length=1200"],
    "sft-then-rl": ["trainer.policy.model.path=runs/sft-then-rl/sft/global_step_2/policy"],
}


def odd(response: str) -> float:
    """Reward of a random model's answers to mathematics, which are all wrong: 1 for an odd number of characters."""
    return float(len(response) % 2)


def overrides(name: str, kind: str, stack: ExitStack) -> list[str]:
    """Make a part of a recipe small. Data and model are written; `stack` ends what is started for them."""
    if not Path("model").exists():
        make_model("model", hidden=32, layers=2, heads=2, kv_heads=2, head_dim=16, intermediate=64, vocab=1024)
    if kind == "sft":
        _write("data/gsm8k/worked.jsonl", ({"messages": list(_worked(a))} for a in range(8)))
        return SFT
    of_recipe = OF_RECIPE.get(name, [])
    if name == "search":
        of_recipe = [*of_recipe, f"environment.skyrl_gym.search.search_url={stack.enter_context(_search_engine())}"]
    elif name == "text2sql":
        _write_shop()
    elif name == "dapo-math":
        rows = ({"prompt": [{"role": "user", "content": _question(a)}], "reward_model": _gold(a)} for a in range(32))
        _write("published/dapo-math/train.jsonl", rows)
        _prepare("dapo-math", "train")
    else:
        for split in ("train", "test"):
            rows = ({"question": _question(a), "answer": f"{a} + 4 = {a + 4}\n#### {a + 4}"} for a in range(8))
            _write(f"published/gsm8k/{split}.jsonl", rows)
            _prepare("gsm8k", split)
    return [*RL, *of_recipe]


def _question(a: int) -> str:
    return f"Ann has {a} cats and 4 dogs. How many pets has she?"


def _gold(a: int) -> dict[str, str]:
    return {"ground_truth": str(a + 4), "style": "rule"}


def _worked(a: int) -> Iterator[dict[str, str]]:
    yield {"role": "user", "content": _question(a)}
    yield {"role": "assistant", "content": f"{a} + 4 = {a + 4}\n#### {a + 4}"}


def _write(file: str, rows: Iterator[Mapping[str, Any]]) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _prepare(name: str, split: str) -> None:
    command = ["data", "prepare", name, "--from", f"published/{name}", "--output", f"data/{name}", "--split", split]
    if status := skyrl([*command, "--overwrite"]):
        raise SystemExit(status)


@contextmanager
def _search_engine() -> Iterator[str]:
    """Address of one that has two documents, for two questions."""
    import uvicorn

    from skyrl.envs.services.retrieval import Document, Index, create_app

    capitals = {"Peru": "Lima", "Kenya": "Nairobi"}
    documents = [Document(id=land, contents=f"The capital of {land} is {city}.") for land, city in capitals.items()]
    rows = (
        {
            "prompt": [{"role": "user", "content": f"Search, then answer. What is the capital of {land}?"}],
            "env_class": "search",
            "reward_spec": {"ground_truth": {"target": [city]}},
        }
        for land, city in list(capitals.items()) * 4
    )
    _write("data/search/train.jsonl", rows)
    server = uvicorn.Server(uvicorn.Config(create_app(Index(documents)), port=0, log_level="warning"))
    socket = server.config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/retrieve"
    finally:
        server.should_exit = True
        thread.join()


def _write_shop() -> None:
    """A database of one table, and questions about it."""
    file = Path("data/text2sql/databases/spider/database/shop/shop.sqlite")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with closing(sqlite3.connect(file)) as database:
        database.executescript("CREATE TABLE goods (name, price); INSERT INTO goods VALUES ('pen', 2), ('book', 9);")
    rows = (
        {
            "prompt": [{"role": "user", "content": f"Table goods(name, price). What costs more than {least}?"}],
            "env_class": "text2sql",
            "db_id": "shop",
            "data": "spider",
            "reward_spec": {"ground_truth": f"SELECT name FROM goods WHERE price > {least}"},
        }
        for least in (1, 2, 3, 4) * 2
    )
    _write("data/text2sql/train.jsonl", rows)

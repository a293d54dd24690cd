"""`skyrl demo`: an end-to-end test with the official SDK and a real server, in a few minutes on a laptop.

Train two adapters of one base model on different questions at the same time, sample and save both, restart the server,
and sample them again. All answers must be correct and must not change. If a check fails, the demo stops with a message
and a non-zero exit code.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl.backends.registry import BACKENDS
from skyrl.tinker.local_server import LocalServer, close_client
from skyrl.utils.arguments import ArgumentParser

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Kenya": "Nairobi",
}
COLOURS = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a ruby": "red",
    "the sky": "blue",
    "a lemon": "yellow",
}
QUESTIONS = {
    "capitals": [(f"What is the capital of {country}?", f" {city}") for country, city in CAPITALS.items()],
    "colours": [(f"What colour is {thing}?", f" {colour}") for thing, colour in COLOURS.items()],
}

API_KEY = "tml-demo"
"""Any key that starts with `tml-` works, because no keys are configured on the local server."""
RANK = 16
LEARNING_RATE = 3e-3
STEPS_PER_ROUND = 10
MAX_ROUNDS = 12
LOSS_WHEN_SURE = 0.1
"""Target loss in nats per token: the correct token has a probability of 0.9."""


class DemoError(Exception):
    """A check of the demo failed. The message has the actual result."""


@dataclass
class Learner:
    """Training of one adapter: its questions, clients and results."""

    name: str
    questions: list[tuple[str, str]]
    trainer: Any
    tokenizer: Any
    losses: list[float] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    sampler_path: str = ""

    @property
    def learned(self) -> bool:
        """Return True if all answers are exact and the loss is below `LOSS_WHEN_SURE`."""
        return self.losses[-1] < LOSS_WHEN_SURE and all(
            self.answers.get(question) == answer for question, answer in self.questions
        )

    def datum(self, question: str, answer: str) -> Any:
        """Return question and answer as one sequence, with loss only on the answer and the end token."""
        import numpy as np
        import tinker

        prompt = self.tokenizer.encode(question)
        tokens = [*prompt, *self.tokenizer.encode(answer), self.tokenizer.eos_token_id]
        weights = np.zeros(len(tokens) - 1, np.float32)
        weights[len(prompt) - 1 :] = 1
        inputs: dict[str, Any] = {"target_tokens": np.asarray(tokens[1:], np.int64), "weights": weights}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    def train_round(self) -> None:
        """Train `STEPS_PER_ROUND` steps, all submitted before the first result is awaited."""
        import tinker

        data = [self.datum(question, answer) for question, answer in self.questions]
        adam = tinker.AdamParams(learning_rate=LEARNING_RATE)
        futures = [
            (self.trainer.forward_backward(data, "cross_entropy"), self.trainer.optim_step(adam))
            for _ in range(STEPS_PER_ROUND)
        ]
        tokens = sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data)
        for forward_backward, optim_step in futures:
            self.losses.append(forward_backward.result().metrics["loss:sum"] / tokens)
            optim_step.result()

    def learn(self) -> None:
        """Train until all answers are exact. Raises DemoError after `MAX_ROUNDS` rounds."""
        for _ in range(MAX_ROUNDS):
            self.train_round()
            self.answers = ask(self.trainer.save_weights_and_get_sampling_client().result(), self)
            print(f"  {self.name:<9} step {len(self.losses):>3}   loss {self.losses[-1]:.4f} nats/token", flush=True)
            if self.learned:
                return
        wrong = {
            question: self.answers[question] for question, answer in self.questions if self.answers[question] != answer
        }
        raise DemoError(f"{self.name}: still wrong after {len(self.losses)} steps: {wrong}")


def ask(sampler: Any, learner: Learner) -> dict[str, str]:
    """Sample a greedy answer to each question, all concurrently."""
    import tinker

    params = tinker.SamplingParams(max_tokens=12, temperature=0.0)
    tokenizer = learner.tokenizer
    prompts = {question: tinker.ModelInput.from_ints(tokenizer.encode(question)) for question, _ in learner.questions}
    futures = {question: sampler.sample(prompt, 1, params) for question, prompt in prompts.items()}
    answers = {}
    for question, future in futures.items():
        tokens = [token for token in future.result().sequences[0].tokens if token != tokenizer.eos_token_id]
        answers[question] = tokenizer.decode(tokens)
    return answers


def connect(server: LocalServer) -> Any:
    """Create a client of the official SDK."""
    import tinker

    return tinker.ServiceClient(base_url=server.url, api_key=API_KEY)


def train_and_save(server: LocalServer) -> list[Learner]:
    """Train both adapters concurrently, and save each under a name."""
    import tinker

    service = connect(server)
    capabilities = tinker.RestClient(base_url=server.url, api_key=API_KEY).get_server_capabilities().result()
    model = capabilities.supported_models[0]
    print(f"  base model {model.model_name}, context {model.max_context_length} tokens")
    trainers = {
        name: service.create_lora_training_client(model.model_name, rank=RANK, seed=seed)
        for seed, name in enumerate(QUESTIONS)
    }
    learners = []
    for name, future in trainers.items():
        trainer = future.result()
        learners.append(Learner(name, QUESTIONS[name], trainer, trainer.get_tokenizer()))
    with ThreadPoolExecutor(len(learners)) as threads:
        list(threads.map(Learner.learn, learners))
    for learner in learners:
        learner.sampler_path = learner.trainer.save_weights_for_sampler("demo").result().path
        learner.trainer.save_state("demo").result()
    close_client(service)
    return learners


def check_after_restart(server: LocalServer, learners: list[Learner]) -> None:
    """Sample the saved adapters on the restarted server. Raises DemoError if an answer has changed."""
    service = connect(server)
    for learner in learners:
        again = ask(service.create_sampling_client(model_path=learner.sampler_path).result(), learner)
        if again != learner.answers:
            raise DemoError(f"{learner.name}: answers changed over the restart: {learner.answers} became {again}")
        print(f"  {learner.sampler_path}: {len(again)} of {len(again)} answers identical")
    close_client(service)


def summary(learners: list[Learner], seconds: float) -> str:
    """Format the results of the demo: questions and answers of each adapter."""
    lines = [
        f"Done in {seconds:.0f} s. Both adapters answer their questions exactly, before and after the restart.",
        "",
    ]
    for learner in learners:
        first, last = learner.losses[0], learner.losses[-1]
        lines.append(f"{learner.name}: {len(learner.losses)} steps, loss {first:.2f} -> {last:.4f} nats/token")
        lines += [f"  {question:<32}{answer}" for question, answer in learner.answers.items()]
        lines.append("")
    return "\n".join(lines)


def run(folder: Path, backend: str = "jax") -> None:
    """Run the whole demo, with the server's state in `folder`."""
    start = time.monotonic()
    server = LocalServer(folder, options={} if backend == "jax" else {"backend": backend})
    try:
        print("1. Start a server with the built-in model", flush=True)
        server.start()
        print(f"  {server.url}")
        print("2. Train two adapters at the same time", flush=True)
        learners = train_and_save(server)
        print("3. Restart the server and sample the saved adapters", flush=True)
        server.restart()
        check_after_restart(server, learners)
    finally:
        server.stop()
    print(f"\n{summary(learners, time.monotonic() - start)}")


def main(argv: Sequence[str] = ()) -> int:
    """Run the demo in a temporary folder. Returns the exit code."""
    parser = ArgumentParser(prog="skyrl demo", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--backend", default="jax", choices=list(BACKENDS), help="what the server computes with")
    options = parser.parse_args(argv)
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    try:
        import tinker  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"The demo drives the server with the official SDK: pip install tinker ({error})", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="skyrl-demo-") as folder:
        try:
            run(Path(folder), options.backend)
        except DemoError as error:
            print(f"The demo failed: {error}", file=sys.stderr)
            return 1
        except RuntimeError as error:
            print(f"The server failed: {error}", file=sys.stderr)
            return 1
    return 0

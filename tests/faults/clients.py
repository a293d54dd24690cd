"""Three users of the stock SDK. Each runs rounds, the n-th of which is the same in every run, and notes what it sees.

None of them knows of faults: whatever happens to the server, an exception that is not on purpose is a failure.
"""

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tinker

from live import API_KEY, datum, logprobs, new_trainer, sample, sequence, step, supervised
from skyrl.tinker.local_server import LocalServer, close_client
from tests.faults.diary import Diary

FIXED = sequence(12, seed=999)
"""Text that the final weights score."""
CHUNK = 3
"""Sequences that the SDK puts into one request, so that a pass becomes several."""
ADAM = tinker.AdamParams(learning_rate=3e-3)
LEAST_ROUNDS = 4
"""After them each client has done one of everything."""
OUT_OF_VOCABULARY = 10**6
SAMPLER_TOLERANCE = 1e-4
"""Between the log-probabilities of sampling and of training, which are natural logarithms of about 1/4096."""


@dataclass
class Client:
    """One user: its session, its notes, and the rounds that it is to run."""

    service: tinker.ServiceClient
    server: LocalServer
    note: Callable[[str, Any], None]
    rounds: Iterator[int]
    exact: bool
    """True if rounding is the same in every run, so that equal draws give equal tokens."""

    def trainer(self, seed: int, rank: int = 4) -> tinker.TrainingClient:
        return new_trainer(self.service, self.server, rank=rank, seed=seed)

    def note_samples(
        self, trainer: tinker.TrainingClient, prompt: list[int], sequences: Sequence[tinker.SampledSequence]
    ) -> None:
        """Note samples of the weights that a model has now. How probable they are, training says too."""
        data = [supervised(prompt + list(one.tokens)) for one in sequences]
        outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
        for one, output in zip(sequences, outputs, strict=True):
            expected = output["logprobs"].to_numpy()[len(prompt) - 1 :]
            np.testing.assert_allclose(one.logprobs or (), expected, rtol=0, atol=SAMPLER_TOLERANCE)
            self.note("sample", of_sequence(one) if self.exact else [len(one.tokens), one.stop_reason])

    def finish(self, trainer: tinker.TrainingClient) -> None:
        """Note what was learned."""
        self.note("final logprobs", logprobs(trainer, FIXED))
        self.note("final state", trainer.save_state("final").result().path)


def supervised_steps(client: Client) -> None:
    """Passes of several chunks and steps, two rounds in flight; in some rounds two passes make one step."""
    # A server could ask for small requests as well; by default the SDK cuts at 1024 sequences.
    holder = client.service.holder
    holder._client_config = holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": CHUNK})
    trainer = client.trainer(seed=1)
    waiting: list[tuple[Any, Any]] = []

    def settle(leave: int) -> None:
        while len(waiting) > leave:
            passes, optim_step = waiting.pop(0)
            for one in passes:
                client.note("pass", of_pass(one.result()))
            client.note("step", dict(optim_step.result().metrics))

    for n in client.rounds:
        passes = [
            trainer.forward_backward(batch(n, 2 * CHUNK + n % 2, part), "cross_entropy") for part in range(1 + n % 2)
        ]
        waiting.append((passes, trainer.optim_step(ADAM)))
        settle(leave=1)
    settle(leave=0)
    client.finish(trainer)


def reinforcement(client: Client) -> None:
    """Each round samples from the weights of that moment, and learns from what came.

    Where rounding may move a draw to the next token it learns from the same sequences all the same.
    """
    trainer = client.trainer(seed=2, rank=8)
    for n in client.rounds:
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompts = [sequence(5 + k, seed=1000 * n + k) for k in range(2)]
        pending = [
            sampler.sample(
                tinker.ModelInput.from_ints(prompt),
                2,
                tinker.SamplingParams(max_tokens=10, temperature=1.0, seed=n, stop=[]),
            )
            for prompt in prompts
        ]
        data = []
        for prompt, future in zip(prompts, pending, strict=True):
            sequences = future.result().sequences
            client.note_samples(trainer, prompt, sequences)
            if client.exact:
                data += [rollout(prompt, list(one.tokens), list(one.logprobs or ())) for one in sequences]
            else:
                data += [rollout(prompt, sequence(10, seed=1000 * n + 10 + k), [-8.3] * 10) for k in range(2)]
        forward_backward = trainer.forward_backward(data, "importance_sampling")
        optim_step = trainer.optim_step(ADAM)
        client.note("pass", of_pass(forward_backward.result()))
        client.note("step", dict(optim_step.result().metrics))
    client.finish(trainer)


def checkpoints(client: Client) -> None:
    """Saves, loads, resumes, names samplers, follows an inflight one, and asks for what cannot be done."""
    trainer = client.trainer(seed=3)
    inflight = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    for n in client.rounds:
        client.note("pass", of_pass(step(trainer, batch(n, 2, part=7), ADAM)))
        state = trainer.save_state("latest", overwrite=True).result().path
        client.note("saved", state)
        match n % 4:
            case 0:
                resumed = client.service.create_training_client_from_state_with_optimizer(state).result()
                client.note("resumed", of_pass(step(resumed, batch(n, 2, part=8), ADAM)))
            case 1:
                step(trainer, batch(n, 1, part=9), ADAM)
                trainer.load_state_with_optimizer(state).result()
                client.note("loaded", logprobs(trainer, FIXED))
                path = trainer.save_state(f"deleted-{n}").result().path
                client.service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
            case 2:
                path = trainer.save_weights_for_sampler(f"named-{n}").result().path
                named = client.service.create_sampling_client(model_path=path).result()
                client.note("named", path)
                note_samples(client, trainer, named, n)
            case 3:
                trainer.save_weights_and_get_sampling_client(kind="inflight").result()
                note_samples(client, trainer, inflight, n)
        if n % 3 == 0:
            client.note(
                "refused", refused(trainer.forward_backward([supervised([1, OUT_OF_VOCABULARY])], "cross_entropy"))
            )
            client.note("refused", refused(trainer.optim_step(ADAM)))
    client.finish(trainer)


def note_samples(client: Client, trainer: tinker.TrainingClient, sampler: tinker.SamplingClient, seed: int) -> None:
    for prompt, options in ((FIXED[:4], {"temperature": 0.0}), (FIXED[:7], {"seed": seed})):
        response = sample(sampler, prompt, max_tokens=6, stop=[], **options)
        client.note_samples(trainer, prompt, response.sequences)


CLIENTS: dict[str, Callable[[Client], None]] = {
    "supervised": supervised_steps,
    "reinforcement": reinforcement,
    "checkpoints": checkpoints,
}


class Run:
    """All clients at once against a server, each in a thread.

    Args:
        server: A server that is up.
        exact: Whether rounding is the same in every run.
        rounds: How many each client is to run; None: until `end`.
    """

    def __init__(self, server: LocalServer, exact: bool, rounds: dict[str, int] | None = None):
        self.diary = Diary(list(CLIENTS))
        self._server = server
        self._exact = exact
        self._limits = rounds
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[name], name=name, daemon=True) for name in CLIENTS]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let each client finish the round that it is in, and `LEAST_ROUNDS` in all."""
        self._ending.set()

    def join(self, timeout_s: float) -> None:
        """Wait until all clients have finished. Fails if one got an exception, or hangs."""
        for thread in self._threads:
            thread.join(timeout_s)
            self.diary.check()
            assert not thread.is_alive(), f"client {thread.name!r} hangs after {self.diary.entries[thread.name][-1:]}"

    def _run(self, name: str) -> None:
        try:
            service = tinker.ServiceClient(base_url=self._server.url, api_key=API_KEY, user_metadata={"client": name})
            note = partial(self.diary.note, name)
            CLIENTS[name](Client(service, self._server, note, self._rounds(name), self._exact))
            close_client(service)
        except BaseException:
            self.diary.fail(name, traceback.format_exc())

    def _rounds(self, name: str) -> Iterator[int]:
        limit = None if self._limits is None else self._limits[name]
        while self.diary.rounds[name] != limit and not (
            self._ending.is_set() and self.diary.rounds[name] >= LEAST_ROUNDS
        ):
            self.diary.rounds[name] += 1
            yield self.diary.rounds[name] - 1


def batch(n: int, size: int, part: int = 0) -> list[tinker.Datum]:
    """Sequences of different lengths, of round n."""
    return [supervised(sequence(6 + (n + k) % 9, seed=10_000 * part + 100 * n + k)) for k in range(size)]


def rollout(prompt: list[int], tokens: list[int], sampled_logprobs: list[float]) -> tinker.Datum:
    """A sequence with its log-probabilities when it was sampled; even tokens are good, odd ones bad."""
    before = len(prompt) - 1
    return datum(
        prompt + tokens,
        logprobs=[0.0] * before + sampled_logprobs,
        advantages=[0.0] * before + [1.0 if token % 2 == 0 else -1.0 for token in tokens],
    )


def of_pass(output: tinker.ForwardBackwardOutput) -> dict[str, Any]:
    arrays = [{name: tensor.to_numpy() for name, tensor in one.items()} for one in output.loss_fn_outputs]
    return {"outputs": arrays, "metrics": dict(output.metrics)}


def of_sequence(one: tinker.SampledSequence) -> dict[str, Any]:
    assert one.logprobs is not None
    return {"tokens": list(one.tokens), "logprobs": np.asarray(one.logprobs), "stop": one.stop_reason}


def refused(future: Any) -> list[str]:
    """Category and message of a request that has to fail."""
    try:
        future.result()
    except tinker.RequestFailedError as error:
        return [str(error.category), str(error)]
    raise AssertionError("a request that cannot be done was done")

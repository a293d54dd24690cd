"""Three users of the stock SDK. Each runs rounds, the n-th of which is the same in every run, and notes what it sees.

None of them knows of faults: whatever happens to the server, an exception that is not on purpose is a failure.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tinker

from live import API_KEY, datum, logprobs, new_trainer, sample, sequence, step, supervised
from skyrl.local_server import LocalServer
from tests.faults.diary import Diary

FIXED = sequence(12, seed=999)
"""What the final weights are asked about."""
CHUNK = 3
"""Sequences that the SDK puts into one request, so that a pass becomes several."""
ADAM = tinker.AdamParams(learning_rate=3e-3)
OUT_OF_VOCABULARY = 10**6


@dataclass
class Client:
    """One user: its session, its notes, and the rounds that it is to run."""

    service: tinker.ServiceClient
    server: LocalServer
    note: Callable[[str, Any], None]
    rounds: Iterator[int]

    def trainer(self, seed: int, rank: int = 4) -> tinker.TrainingClient:
        return new_trainer(self.service, self.server, rank=rank, seed=seed)

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
    """Each round samples from the weights of that moment, and learns from what came."""
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
            client.note("sample", [of_sequence(one) for one in sequences])
            data += [rollout(prompt, one) for one in sequences]
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
                client.note("named", [path, *(of_sequence(one) for one in sampled(named, n))])
            case 3:
                trainer.save_weights_and_get_sampling_client(kind="inflight").result()
                client.note("inflight", [of_sequence(one) for one in sampled(inflight, n)])
        if n % 3 == 0:
            client.note(
                "refused", refused(trainer.forward_backward([supervised([1, OUT_OF_VOCABULARY])], "cross_entropy"))
            )
            client.note("refused", refused(trainer.optim_step(ADAM)))
    client.finish(trainer)


CLIENTS: dict[str, Callable[[Client], None]] = {
    "supervised": supervised_steps,
    "reinforcement": reinforcement,
    "checkpoints": checkpoints,
}


class Run:
    """All clients at once against a server, each in a thread.

    Args:
        server: A server that is up.
        rounds: How many each client is to run; None: until `end`.
    """

    def __init__(self, server: LocalServer, rounds: dict[str, int] | None = None):
        self.diary = Diary(list(CLIENTS))
        self._server = server
        self._limits = rounds
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[name], name=name, daemon=True) for name in CLIENTS]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let each client finish the round that it is in."""
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
            CLIENTS[name](Client(service, self._server, note, self._rounds(name)))
            service.close("success").result()
        except BaseException:
            self.diary.fail(name, traceback.format_exc())

    def _rounds(self, name: str) -> Iterator[int]:
        limit = None if self._limits is None else self._limits[name]
        while self.diary.rounds[name] != limit and not self._ending.is_set():
            self.diary.rounds[name] += 1
            yield self.diary.rounds[name] - 1


def batch(n: int, size: int, part: int = 0) -> list[tinker.Datum]:
    """Sequences of different lengths, of round n."""
    return [supervised(sequence(6 + (n + k) % 9, seed=10_000 * part + 100 * n + k)) for k in range(size)]


def rollout(prompt: list[int], generated: tinker.SampledSequence) -> tinker.Datum:
    """A sampled sequence with its log-probabilities; even tokens are good, odd ones bad."""
    tokens = list(generated.tokens)
    before = len(prompt) - 1
    assert generated.logprobs is not None
    return datum(
        prompt + tokens,
        logprobs=[0.0] * before + list(generated.logprobs),
        advantages=[0.0] * before + [1.0 if token % 2 == 0 else -1.0 for token in tokens],
    )


def sampled(sampler: tinker.SamplingClient, seed: int) -> list[tinker.SampledSequence]:
    greedy = sample(sampler, FIXED[:4], max_tokens=6, temperature=0.0, stop=[]).sequences
    return [*greedy, *sample(sampler, FIXED[:7], max_tokens=6, seed=seed, stop=[]).sequences]


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

"""Checks that every generation of the Tinker SDK must pass against a server: one script for all of them.

Each SDK runs it in an environment of its own, which holds the SDK, NumPy and torch and nothing of this project:
`python conformance.py --url URL --base-model NAME --out FILE`. A check is a method of `Checks`; it passes by
returning, fails by raising, and says `Absent` where its SDK has no such thing. Where generations differ (0.7 returns a
client, 0.38 a future of one), the functions at the top bridge it. Model seed and data are fixed, so what a check puts
into `values` is the same for every SDK, and `run.py` compares it.
"""

import argparse
import inspect
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import tinker

API_KEY = "tml-matrix"
TIMEOUT_S = 120
REFUSED_WITHIN_S = 10

CRASHES_AT_EXIT = (-signal.SIGABRT, -signal.SIGSEGV)
"""Statuses of the `tinker` command of 0.38.0 in about one of 28 runs: a thread uses a freed state after all output."""

ADAM = tinker.AdamParams(learning_rate=1e-2)
STEPS = 30
BASE_CHUNK, REPEATS = 61, 40
"""Sequences of the chunk check, and how often each is sent: 2,440 in one call, where SDKs send 1,024 per request."""


class Absent(Exception):
    """This SDK cannot do what the check is about."""


def settle(value: Any) -> Any:
    """The result of a future; what is none (clients in early SDKs) as it is."""
    return value.result(timeout=TIMEOUT_S) if hasattr(value, "result") else value


def needs(method: Callable, *options: str) -> None:
    """Raise `Absent` unless `method` has these options."""
    for option in options:
        if option not in inspect.signature(method).parameters:
            raise Absent(f"no {option}")


def method(owner: Any, name: str) -> Callable:
    """A method of a client, or `Absent`."""
    found = getattr(owner, name, None)
    if found is None:
        raise Absent(f"no {name}")
    return found


def sequence(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 250, length).tolist()


TAUGHT = sequence(16, seed=2)
PROMPT = TAUGHT[:4]


def text(tokens: list[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(tokens)


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    """A sequence that predicts each of its tokens from those before it."""
    arrays = {"target_tokens": np.asarray(tokens[1:], np.int64)}
    arrays |= {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return tinker.Datum(
        model_input=text(tokens[:-1]),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(array) for name, array in arrays.items()},
    )


def supervised(tokens: list[int], weight: float = 1.0) -> tinker.Datum:
    return datum(tokens, weights=np.full(len(tokens) - 1, weight))


def step(trainer: Any, data: list[tinker.Datum], loss_fn: str = "cross_entropy") -> Any:
    """One pass and one optimizer step, both sent before either is awaited. The pass's output."""
    passed, stepped = trainer.forward_backward(data, loss_fn), trainer.optim_step(ADAM)
    output = settle(passed)
    settle(stepped)
    return output


def logprobs_of(output: Any) -> list[np.ndarray]:
    return [np.asarray(entry["logprobs"].to_numpy(), np.float64) for entry in output.loss_fn_outputs]


def score(trainer: Any, tokens: list[int] = TAUGHT) -> np.ndarray:
    """The trainer's log-probabilities of `tokens` after the first."""
    return logprobs_of(settle(trainer.forward([supervised(tokens)], "cross_entropy")))[0]


def sample(sampler: Any, prompt: list[int] = PROMPT, count: int = 1, **params: Any) -> list[Any]:
    params = {"max_tokens": 8, "temperature": 0.0, "stop": [], **params}
    return settle(sampler.sample(text(prompt), count, tinker.SamplingParams(**params))).sequences


def greedy(sampler: Any) -> list[int]:
    return list(sample(sampler)[0].tokens)


def close(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


CHECKS: list[str] = []
"""Names of the checks, in the order in which they run."""


def check(method: Callable) -> Callable:
    CHECKS.append(method.__name__)
    return method


class Checks:
    """The checks, in the order in which they run; later ones use the model that the first one trains."""

    def __init__(self, url: str, base_model: str):
        self.url, self.base_model = url, base_model
        self.service = self.connect()
        self.rest = settle(self.service.create_rest_client())
        self.values: dict[str, Any] = {}
        self.split_models: list[str] = []
        """Models whose only pass came in several requests."""

    def connect(self) -> Any:
        """A client with a session of its own."""
        return tinker.ServiceClient(base_url=self.url, api_key=API_KEY)

    def new_trainer(self, service: Any = None, **options: Any) -> Any:
        options = {"rank": 4, "seed": 7, **options}
        return settle((service or self.service).create_lora_training_client(self.base_model, **options))

    def sampler_of(self, path: str) -> Any:
        return settle(self.service.create_sampling_client(model_path=path))

    @check
    def train(self) -> None:
        """The loss decreases, and reaches the same value with every SDK."""
        names = [model.model_name for model in settle(self.service.get_server_capabilities()).supported_models]
        assert self.base_model in names, names
        self.trainer = self.new_trainer(user_metadata={"run": "matrix"})
        assert settle(self.trainer.get_info()).model_data.model_name == self.base_model
        losses = [step(self.trainer, [supervised(TAUGHT)]).metrics["loss:sum"] for _ in range(STEPS)]
        assert losses[-1] < 0.5 * losses[0], losses
        self.values["losses"] = losses

    @check
    def chunks(self) -> None:
        """Data that the SDK splits into several requests give the summed gradients, in any order of arrival."""
        base = [sequence(5, seed=100 + i) for i in range(BASE_CHUNK)]
        together, split = self.new_trainer(), self.new_trainer()
        whole = step(together, [supervised(tokens, REPEATS) for tokens in base])
        parts = step(split, [supervised(tokens) for tokens in base] * REPEATS)
        self.split_models.append(settle(split.get_info()).model_id)
        close(parts.metrics["loss:sum"], whole.metrics["loss:sum"])
        close(logprobs_of(parts), logprobs_of(whole) * REPEATS)
        close(score(split), score(together), 1e-3)
        self.values["chunks"] = parts.metrics["loss:sum"]

    @check
    def custom_loss(self) -> None:
        """A custom loss that implements a built-in loss has the same value and gradients."""
        built_in, custom = self.new_trainer(), self.new_trainer()
        old, advantages = score(built_in) - 0.1, np.linspace(-1, 2, len(TAUGHT) - 1)
        data = [datum(TAUGHT, logprobs=old, advantages=advantages)]
        expected = step(built_in, data, "importance_sampling").metrics["loss:sum"]
        run = method(custom, "forward_backward_custom")

        import torch

        def loss(data: list, logprobs: list) -> tuple:
            ratio = torch.exp(logprobs[0] - torch.tensor(old, dtype=torch.float32))
            return -(ratio * torch.tensor(advantages, dtype=torch.float32)).sum(), {"mine:sum": 2.0}

        output = settle(run([datum(TAUGHT)], loss))
        settle(custom.optim_step(ADAM))
        metrics = output.metrics
        assert metrics["mine:sum"] == 2.0, metrics
        if "surrogate_loss:sum" in metrics:  # before 0.30, loss:sum is the surrogate's
            close(metrics["loss:sum"], expected)
        close(score(custom), score(built_in), 1e-3)

    @check
    def losses(self) -> None:
        """The RL losses work with their configuration."""
        trainer = self.new_trainer()
        old, advantages = score(trainer) - 0.3, np.linspace(-1, 1, len(TAUGHT) - 1)
        data = [datum(TAUGHT, logprobs=old, advantages=advantages)]
        found = {}
        for name, config in {"ppo": {"clip_high_threshold": 1.1}, "cispo": {}, "dro": {"beta": 0.1}}.items():
            found[name] = settle(trainer.forward_backward(data, name, config or None)).metrics["loss:sum"]
        ratio = np.exp(0.3)
        close(found["ppo"], -np.minimum(ratio * advantages, 1.1 * advantages).sum(), 1e-3)
        self.values["rl_losses"] = [found[name] for name in sorted(found)]

    @check
    def forward(self) -> None:
        """A forward pass returns log-probabilities and adds no gradient."""
        trainer = self.new_trainer()
        before = score(trainer)
        settle(trainer.optim_step(ADAM))
        close(score(trainer), before, 1e-6)
        close(logprobs_of(settle(trainer.forward_backward([supervised(TAUGHT)], "cross_entropy")))[0], before, 1e-5)
        self.values["forward"] = before.tolist()

    @check
    def save(self) -> None:
        """Saves return paths. A name in use is rejected unless overwriting is requested."""
        model = settle(self.trainer.get_info()).model_id
        self.state = settle(self.trainer.save_state("one")).path
        self.version = settle(self.trainer.save_weights_for_sampler("one")).path
        assert self.state == f"tinker://{model}/weights/one", self.state
        assert self.version == f"tinker://{model}/sampler_weights/one", self.version
        self.refused("one", self.trainer.save_state, "one")
        if "overwrite" in inspect.signature(self.trainer.save_state).parameters:
            assert settle(self.trainer.save_state("one", overwrite=True)).path == self.state

    @check
    def resume(self) -> None:
        """A run resumed in another session takes the same step as an uninterrupted run."""
        resumed = settle(self.connect().create_training_client_from_state_with_optimizer(self.state))
        close(score(resumed), score(self.trainer), 1e-6)
        for trainer in (resumed, self.trainer):
            step(trainer, [supervised(TAUGHT[::-1])])
        close(score(resumed), score(self.trainer), 1e-5)
        self.values["resumed"] = score(resumed).tolist()

    @check
    def resume_weights(self) -> None:
        """Resuming only the weights resets the optimizer."""
        settle(method(self.trainer, "load_state_with_optimizer")(self.state))
        resumed = settle(self.service.create_training_client_from_state(self.state))
        close(score(resumed), score(self.trainer), 1e-6)
        for trainer in (resumed, self.trainer):
            step(trainer, [supervised(TAUGHT[::-1])])
        assert np.abs(score(resumed) - score(self.trainer)).max() > 1e-3
        self.values["resumed_weights"] = score(resumed).tolist()

    @check
    def load(self) -> None:
        """Loading a state into a model restores its weights, with or without the optimizer state."""
        fresh = self.new_trainer(seed=8)
        settle(fresh.load_state(self.state))
        settle(self.trainer.load_state_with_optimizer(self.state))
        close(score(fresh), score(self.trainer), 1e-6)

    @check
    def resume_modules(self) -> None:
        """A run that does not train some modules resumes without these modules."""
        trainer = self.new_trainer(train_mlp=False, train_unembed=False)
        step(trainer, [supervised(TAUGHT)])
        path = settle(trainer.save_state("modules")).path
        resumed = settle(self.service.create_training_client_from_state_with_optimizer(path))
        for one in (trainer, resumed):
            step(one, [supervised(TAUGHT)])
        close(score(resumed), score(trainer), 1e-5)

    @check
    def tokenizer(self) -> Any:
        """Clients find the tokenizer of the served model."""
        tokenizer = settle(self.trainer.get_tokenizer())
        assert tokenizer.decode(tokenizer.encode("a tokenizer")) == "a tokenizer"
        return tokenizer

    @check
    def sampling(self) -> None:
        """Greedy sampling, stop tokens, several samples and seeds work."""
        sampler = self.sampler_of(self.version)
        tokens = greedy(sampler)
        assert len(tokens) == 8
        (one,) = sample(sampler, stop=[tokens[3]])
        end = tokens.index(tokens[3]) + 1
        assert (list(one.tokens), one.stop_reason) == (tokens[:end], "stop"), one
        assert len(one.logprobs) == end
        assert sample(sampler)[0].stop_reason == "length"
        several = sample(sampler, count=4, temperature=1.0, seed=3, max_tokens=6)
        again = sample(sampler, count=4, temperature=1.0, seed=3, max_tokens=6)
        drawn = [list(entry.tokens) for entry in several]
        assert drawn == [list(entry.tokens) for entry in again]
        assert len({tuple(entry) for entry in drawn}) > 1, drawn
        other = sample(sampler, count=4, temperature=1.0, seed=4, max_tokens=6)
        assert drawn != [list(entry.tokens) for entry in other]
        base = settle(self.service.create_sampling_client(base_model=self.base_model))
        self.values["greedy"], self.values["drawn"], self.values["base_greedy"] = tokens, drawn, greedy(base)

    @check
    def stop_strings(self) -> None:
        """A sample ends with the token that completes a stop string."""
        sampler = self.sampler_of(self.version)
        tokens = greedy(sampler)
        piece = next(token for token in tokens[1:] if 33 <= token < 90)
        (one,) = sample(sampler, stop=self.tokenizer().decode([piece]))
        assert (list(one.tokens), one.stop_reason) == (tokens[: tokens.index(piece) + 1], "stop"), one

    @check
    def logprobs(self) -> None:
        """The sampler's log-probabilities equal the trainer's."""
        settle(self.trainer.load_state_with_optimizer(self.state))
        found = settle(self.sampler_of(self.version).compute_logprobs(text(TAUGHT)))
        assert len(found) == len(TAUGHT) and found[0] is None, found
        close(found[1:], score(self.trainer), 1e-3)
        self.values["logprobs"] = list(found[1:])

    @check
    def prompt_topk(self) -> None:
        """The most likely tokens at each prompt position are sorted and agree with the prompt's log-probabilities."""
        sampler = self.sampler_of(self.version)
        needs(sampler.sample, "topk_prompt_logprobs")
        params = tinker.SamplingParams(max_tokens=1, temperature=0.0)
        result = settle(sampler.sample(text(TAUGHT), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3))
        rows = result.topk_prompt_logprobs
        assert len(rows) == len(TAUGHT) and rows[0] is None, rows
        for token, own, row in zip(TAUGHT[1:], result.prompt_logprobs[1:], rows[1:], strict=True):
            values = [value for _, value in row]
            assert len(row) == 3 and values == sorted(values, reverse=True) and own <= values[0] + 1e-5, row
            if token in dict(row):
                close(dict(row)[token], own)

    @check
    def topk_sample(self) -> None:
        """The most likely tokens at each sampled position start with the token of greedy decoding."""
        sampler = self.sampler_of(self.version)
        needs(sampler.sample, "topk_sample_logprobs")
        params = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
        (one,) = settle(sampler.sample(text(PROMPT), 1, params, topk_sample_logprobs=3)).sequences
        rows = one.topk_logprobs
        assert [row[0][0] for row in rows] == list(one.tokens), rows
        close([row[0][1] for row in rows], one.logprobs)

    @check
    def target_logprobs(self) -> None:
        """The server returns log-probabilities of given tokens at each prompt position."""
        sampler = self.sampler_of(self.version)
        needs(sampler.sample, "target_prompt_logprobs")
        targets = np.asarray([[token, -1] for token in TAUGHT[1:]], np.int64)
        params = tinker.SamplingParams(max_tokens=1)
        chosen = tinker.TensorData.from_numpy(targets)
        result = settle(
            sampler.sample(text(TAUGHT), 1, params, include_prompt_logprobs=True, target_prompt_logprobs=chosen)
        )
        found = result.target_prompt_logprobs.to_numpy()
        close(found[:, 0], result.prompt_logprobs[1:])
        assert not found[:, 1].any(), found

    @check
    def alternatives(self) -> None:
        """Alternative tokens at each prompt position have log-probabilities and are reproducible with a seed."""
        sampler = self.sampler_of(self.version)
        needs(sampler.sample, "prompt_alt_tokens_k")
        params = tinker.SamplingParams(max_tokens=1, seed=5)
        drawn, again = (
            settle(sampler.sample(text(TAUGHT), 1, params, prompt_alt_tokens_k=2)).prompt_alt_tokens for _ in range(2)
        )
        tokens = drawn.tokens.to_numpy()
        assert tokens.shape == (len(TAUGHT) - 1, 2), tokens
        assert (tokens == again.tokens.to_numpy()).all()
        chosen = tinker.TensorData.from_numpy(tokens.astype(np.int64))
        found = settle(sampler.sample(text(TAUGHT), 1, params, target_prompt_logprobs=chosen)).target_prompt_logprobs
        close(drawn.logprobs.to_numpy(), found.to_numpy())
        self.values["alternatives"] = tokens.tolist()

    @check
    def last_logprobs(self) -> None:
        """The server scores only the last prompt tokens if the request limits scoring to these."""
        sampler = self.sampler_of(self.version)
        needs(sampler.compute_logprobs, "prompt_logprobs_last_n")
        whole = settle(sampler.compute_logprobs(text(TAUGHT)))
        last = settle(sampler.compute_logprobs(text(TAUGHT), prompt_logprobs_last_n=3))
        close(last[-3:], whole[-3:])
        assert all(value is None or np.isnan(value) for value in last[:-3]), last

    @check
    def ephemeral(self) -> None:
        """A sampler of the current weights does not change during further training."""
        sampler = settle(self.trainer.save_weights_and_get_sampling_client())
        before = greedy(sampler)
        for _ in range(8):
            step(self.trainer, [supervised(TAUGHT[::-1])])
        assert greedy(sampler) == before
        self.values["ephemeral"] = before

    @check
    def inflight(self) -> None:
        """A sampler of kind `inflight` uses each newer version that the model saves with this kind."""
        create = self.trainer.save_weights_and_get_sampling_client
        needs(create, "kind")
        sampler = settle(create(kind="inflight"))
        before = settle(sampler.compute_logprobs(text(TAUGHT)))[1:]
        step(self.trainer, [supervised(TAUGHT)])
        settle(create(kind="inflight"))
        after = settle(sampler.compute_logprobs(text(TAUGHT)))[1:]
        close(after, score(self.trainer), 1e-3)
        assert np.abs(np.subtract(after, before)).max() > 1e-3

    @check
    def clones(self) -> None:
        """A pickled sampler gives the same samples as the original."""
        sampler = self.sampler_of(self.version)
        if "__reduce__" not in vars(type(sampler)):
            raise Absent("samplers cannot be pickled")
        assert greedy(pickle.loads(pickle.dumps(sampler))) == greedy(sampler)

    @check
    def listing(self) -> None:
        """Runs, checkpoints and sessions can be listed."""
        model = settle(self.trainer.get_info()).model_id
        run = settle(self.rest.get_training_run(model))
        assert (run.training_run_id, run.base_model, run.lora_rank) == (model, self.base_model, 4), run
        runs = settle(self.rest.list_training_runs(limit=100)).training_runs
        assert model in [entry.training_run_id for entry in runs]
        paths = [entry.tinker_path for entry in settle(self.rest.list_checkpoints(model)).checkpoints]
        assert {self.state, self.version} <= set(paths), paths
        everything = settle(self.rest.list_user_checkpoints(limit=1000)).checkpoints
        assert self.state in [entry.tinker_path for entry in everything]
        assert settle(self.rest.get_training_run_by_tinker_path(self.state)).training_run_id == model
        session = model.split(":")[0]
        assert session in settle(method(self.rest, "list_sessions")(limit=100)).sessions
        assert model in settle(self.rest.get_session(session)).training_run_ids

    @check
    def publish(self) -> None:
        """A checkpoint can be published and made private again."""
        model = settle(self.trainer.get_info()).model_id

        def public() -> bool:
            found = settle(self.rest.list_checkpoints(model)).checkpoints
            return next(entry.public for entry in found if entry.tinker_path == self.state)

        settle(self.rest.publish_checkpoint_from_tinker_path(self.state))
        assert public()
        settle(self.rest.unpublish_checkpoint_from_tinker_path(self.state))
        assert not public()

    @check
    def ttl(self) -> None:
        """A checkpoint's time to live can be set and removed."""
        change = method(self.rest, "set_checkpoint_ttl_from_tinker_path")
        model = settle(self.trainer.get_info()).model_id

        def expires_at() -> Any:
            found = settle(self.rest.list_checkpoints(model)).checkpoints
            return next(entry.expires_at for entry in found if entry.tinker_path == self.state)

        settle(change(self.state, 7200))
        assert abs(expires_at().timestamp() - time.time() - 7200) < 600, expires_at()
        settle(change(self.state, None))
        assert expires_at() is None

    @check
    def delete(self) -> None:
        """A deleted checkpoint cannot be listed or loaded, and its name can be used again."""
        path = settle(self.trainer.save_state("short-lived")).path
        settle(self.rest.delete_checkpoint_from_tinker_path(path))
        model = settle(self.trainer.get_info()).model_id
        assert path not in [entry.tinker_path for entry in settle(self.rest.list_checkpoints(model)).checkpoints]
        self.refused("short-lived", self.trainer.load_state, path)
        assert settle(self.trainer.save_state("short-lived")).path == path

    @check
    def archive(self) -> None:
        """A checkpoint can be downloaded as an archive of a PEFT adapter."""
        link = settle(method(self.rest, "get_checkpoint_archive_url_from_tinker_path")(self.version))
        with urllib.request.urlopen(link.url, timeout=TIMEOUT_S) as response:
            content = io.BytesIO(response.read())
        with tarfile.open(fileobj=content) as archive:
            names = {Path(name).name for name in archive.getnames()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= names, names

    @check
    def external(self) -> None:
        """Weights can be exported and downloaded from signed URLs."""
        path = settle(method(self.trainer, "save_weights_external")("exported")).path
        urls = settle(self.rest.get_external_weights_urls(path)).urls
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls), sorted(urls)
        with urllib.request.urlopen(urls["adapter_config.json"], timeout=TIMEOUT_S) as response:
            assert json.load(response)["r"] == 4

    @check
    def command_line(self) -> None:
        """The `tinker` command lists the checkpoints of a run."""
        environment = {**os.environ, "TINKER_API_KEY": API_KEY, "TINKER_BASE_URL": self.url}
        command = [str(Path(sys.executable).parent / "tinker"), "--format", "json", "checkpoint", "list"]
        model = settle(self.trainer.get_info()).model_id
        done = subprocess.run([*command, "--run-id", model], env=environment, capture_output=True, text=True)
        assert done.returncode in (0, *CRASHES_AT_EXIT), (done.returncode, done.stdout + done.stderr)
        assert self.state in done.stdout, done.stdout + done.stderr

    @check
    def whoami(self) -> None:
        """The client can query its own identity."""
        assert settle(method(self.rest, "whoami")()) is not None

    def refused(self, words: str, call: Callable, *arguments: Any, **options: Any) -> None:
        """`call` must end in an exception of the SDK's own that carries the server's message."""
        start = time.monotonic()
        try:
            settle(call(*arguments, **options))
        except tinker.TinkerError as error:
            assert words in str(error), f"the message does not name {words!r}: {error}"
        else:
            raise AssertionError(f"{words!r} was not refused")
        took = time.monotonic() - start
        assert took < REFUSED_WITHIN_S, f"took {took:.1f} s to fail"

    @check
    def errors(self) -> None:
        """Invalid requests fail quickly with the server's message, and the client continues."""
        create = self.service.create_lora_training_client
        self.refused("no/such-model", create, "no/such-model", rank=4)
        trainer = self.new_trainer()
        short = tinker.Datum(
            model_input=text(TAUGHT),
            loss_fn_inputs={"target_tokens": tinker.TensorData.from_numpy(np.asarray([1, 2], np.int64))},
        )
        self.refused("target_tokens", trainer.forward_backward, [short], "cross_entropy")
        self.refused("advantages", trainer.forward_backward, [datum(TAUGHT)], "importance_sampling")
        self.refused("incomplete", trainer.optim_step, ADAM)  # a step on a partial batch
        missing = f"tinker://{settle(trainer.get_info()).model_id}/weights/missing"
        self.refused("missing", trainer.load_state, missing)
        self.refused("missing", self.service.create_training_client_from_state, missing)
        self.refused("missing", self.service.create_sampling_client, model_path=missing)
        sampler = self.sampler_of(self.version)
        self.refused("40000", sampler.sample, text([5] * 40_000), 1, tinker.SamplingParams(max_tokens=1))
        assert len(sample(sampler)) == 1
        close(step(trainer, [supervised(TAUGHT)]).metrics["loss:sum"], self.values["losses"][0])

    @check
    def finish(self) -> None:
        """A session can be closed."""
        end = method(self.service, "close")
        settle(end("success"))


def run(url: str, base_model: str, only: list[str]) -> dict[str, Any]:
    """Outcomes of these checks (all if none are named), values, and models whose requests tell how data were split."""
    checks = Checks(url, base_model)
    outcomes: dict[str, Any] = {}
    for name in [name for name in CHECKS if not only or name in only]:
        start, detail = time.monotonic(), ""
        try:
            getattr(checks, name)()
            status = "ok"
        except Absent as absent:
            status, detail = "absent", str(absent)
        except Exception as error:
            status, detail = "failed", f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        outcomes[name] = {"status": status, "detail": detail, "seconds": round(time.monotonic() - start, 2)}
    return {"checks": outcomes, "values": checks.values, "split_models": checks.split_models}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], choices=CHECKS)
    arguments = parser.parse_args()
    arguments.out.write_text(json.dumps(run(arguments.url, arguments.base_model, arguments.only)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for the SDK's background threads


if __name__ == "__main__":
    main()

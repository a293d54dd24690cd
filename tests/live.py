"""Shared parts of tests against a live server: a tiny model, the stock SDK's clients, small data.

The model is a random Qwen3 of hidden size 32, so a pass costs milliseconds; what a test teaches it, it can learn.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tinker

from skyrl.tinker.local_server import LocalServer, close_client

API_KEY = "tml-test"
ADAM = tinker.AdamParams(learning_rate=1e-2)
GREEDY = {"temperature": 0.0}


def make_tiny_model(folder: Path, arch: str = "qwen3") -> Path:
    """A random model of hidden size 32 with the built-in tokenizer."""
    from skyrl.tx.synthetic.make_model import make_model

    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    make_model(folder, arch=arch, **sizes, seed=0)
    return folder


@contextmanager
def service(server: LocalServer) -> Iterator[tinker.ServiceClient]:
    """A client with a session of its own, finished at the end of the block."""
    client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
    try:
        yield client
    finally:
        close_client(client)


def new_trainer(client: tinker.ServiceClient, server: LocalServer, rank: int = 4, seed: int = 0, **options):
    """A training client for a fresh adapter on the served model."""
    return client.create_lora_training_client(server.base_model or "", rank=rank, seed=seed, **options).result()


def text(tokens: list[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(tokens)


def datum(tokens: list[int], **inputs) -> tinker.Datum:
    """A sequence that predicts each of its tokens from those before it; `inputs` override or add."""
    inputs.setdefault("target_tokens", tokens[1:])
    if "weights" in inputs and inputs["weights"] is None:
        del inputs["weights"]
    arrays = {}
    for name, value in inputs.items():
        arrays[name] = np.asarray(value, np.int64 if name == "target_tokens" else np.float32)
    return tinker.Datum(model_input=text(tokens[:-1]), loss_fn_inputs=arrays)


def supervised(tokens: list[int], prompt: int = 1) -> tinker.Datum:
    """Cross-entropy on everything after the first `prompt` tokens."""
    weights = np.ones(len(tokens) - 1, np.float32)
    weights[: prompt - 1] = 0
    return datum(tokens, weights=weights)


def sequence(length: int, seed: int = 0, vocab: int = 256) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def step(trainer, data: list[tinker.Datum], adam: tinker.AdamParams = ADAM, loss_fn: str = "cross_entropy"):
    """One pass and one optimizer step, pipelined; the pass's output."""
    forward_backward = trainer.forward_backward(data, loss_fn)
    optim_step = trainer.optim_step(adam)
    output = forward_backward.result()
    optim_step.result()
    return output


def logprobs(trainer, tokens: list[int]) -> np.ndarray:
    """The training side's log-probabilities of `tokens` after the first."""
    output = trainer.forward([supervised(tokens)], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


def teach(trainer, tokens: list[int], prompt: int, steps: int = 200) -> None:
    """Train until the adapter continues the prompt with the rest of `tokens` under greedy decoding."""
    for _ in range(steps):
        output = step(trainer, [supervised(tokens, prompt)])
        if output.loss_fn_outputs[0]["logprobs"].to_numpy()[prompt - 1 :].min() > np.log(0.95):
            return
    raise AssertionError(f"not learned in {steps} steps: {output.metrics}")


def answering_adapter(server: LocalServer, messages: list[dict], answer: str, tools: list[dict] | None = None) -> str:
    """Path of a fresh adapter that has learned to answer a chat with a text, under greedy decoding."""
    with service(server) as client:
        trainer = new_trainer(client, server, rank=16)
        tokenizer = trainer.get_tokenizer()
        prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        teach(trainer, prompt + tokenizer.encode(answer), len(prompt), steps=400)
        return trainer.save_weights_for_sampler("taught").result().path


def sample(sampler, prompt: list[int], num_samples: int = 1, include_prompt_logprobs=False, topk=0, **params):
    """A sample request's response; `params` are those of `SamplingParams`."""
    params.setdefault("max_tokens", 8)
    return sampler.sample(
        text(prompt),
        num_samples,
        tinker.SamplingParams(**params),
        include_prompt_logprobs=include_prompt_logprobs,
        topk_prompt_logprobs=topk,
    ).result()


def adapter_folder(server: LocalServer, tinker_path: str) -> Path:
    """Return the server's folder of the PEFT adapter that it named `tinker_path`."""
    model, kind, name = tinker_path.removeprefix("tinker://").split("/")
    (found,) = (server.folder / "checkpoints" / model.replace(":", "-") / kind).glob(f"{name}@*")
    return found


def engine_pid(server: LocalServer) -> int:
    """The process id of the server's engine."""
    pid = server.pids().engine
    assert pid is not None, server.log_tail()
    return pid


def wait_for_new_engine(server: LocalServer, old: int, timeout_s: float = 120) -> None:
    """Return once another process than `old` is the engine, and ready."""
    deadline = time.monotonic() + timeout_s
    while server.pids().engine in (None, old) or not server.healthy():
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.1)

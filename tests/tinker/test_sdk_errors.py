"""Requests that cannot be served as sent: each fails alone, says what to change, and the client goes on."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker

from live import ADAM, datum, logprobs, new_trainer, sample, sequence, service, step, supervised
from skyrl.tinker.local_server import LocalServer

TOKENS = sequence(10)


def image() -> tinker.Datum:
    chunk = tinker.types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=1)
    text = tinker.EncodedTextChunk(tokens=TOKENS[:-2])
    prompt = tinker.ModelInput(chunks=[text, chunk])
    return tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": np.asarray(TOKENS[1:])})


RL = {"logprobs": np.zeros(9), "advantages": np.ones(9)}
BAD = {
    "short targets": (datum(TOKENS, target_tokens=TOKENS[1:-1]), "cross_entropy", None, "target_tokens"),
    "short weights": (datum(TOKENS, weights=np.ones(3)), "cross_entropy", None, "weights"),
    "token above the vocabulary": (datum([5, 10**6, 7]), "cross_entropy", None, "1000000"),
    "negative token": (datum([5, -1, 7]), "cross_entropy", None, "-1"),
    "target above the vocabulary": (datum(TOKENS, target_tokens=[10**6] * 9), "cross_entropy", None, "1000000"),
    "too long": (datum([1] * 200_000), "cross_entropy", None, "199999"),
    "unknown loss": (datum(TOKENS), "pppo", None, "pppo.*cross_entropy"),
    "unknown input": (datum(TOKENS, mask=np.ones(9)), "cross_entropy", None, "mask"),
    "missing input": (datum(TOKENS, logprobs=np.zeros(9)), "ppo", None, "advantages"),
    "unknown configuration": (datum(TOKENS, **RL), "ppo", {"clip_high": 1.2}, "clip_high.*clip_high_threshold"),
    "not a number": (datum(TOKENS, weights=np.full(9, np.nan)), "cross_entropy", None, "weights.*(nan|finite)"),
    "an image": (image(), "cross_entropy", None, "image"),
    "custom": (datum(TOKENS), "custom", None, "custom"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_datum_fails_alone_and_the_client_goes_on(trainer, name):
    bad, loss_fn, config, message = BAD[name]
    with pytest.raises(tinker.RequestFailedError, match=rf"(?s){message}") as failure:
        trainer.forward_backward([supervised(TOKENS), bad], loss_fn, config).result()
    assert failure.value.category == "user"
    assert np.isfinite(trainer.forward([supervised(TOKENS)], "cross_entropy").result().metrics["loss:sum"])


def test_an_optimizer_step_after_a_failed_pass_fails_and_changes_nothing(trainer):
    before = logprobs(trainer, TOKENS)
    good = trainer.forward_backward([supervised(TOKENS)], "cross_entropy")
    bad = trainer.forward_backward([datum([5, -1, 7])], "cross_entropy")
    stepped = trainer.optim_step(ADAM)
    good.result()
    for future in (bad, stepped):
        with pytest.raises(tinker.RequestFailedError, match="-1"):
            future.result()
    np.testing.assert_array_equal(logprobs(trainer, TOKENS), before)


def test_the_step_after_a_failed_one_is_an_ordinary_step(service_client, live_server):
    failed, plain = (new_trainer(service_client, live_server) for _ in range(2))
    with pytest.raises(tinker.RequestFailedError):
        step(failed, [supervised(TOKENS), datum([5, -1, 7])])
    for trainer in (failed, plain):
        step(trainer, [supervised(TOKENS)])
    np.testing.assert_array_equal(logprobs(failed, TOKENS), logprobs(plain, TOKENS))


SAMPLES = {
    "empty prompt": ([], {}, "prompt"),
    "token above the vocabulary": ([5, 10**6], {}, "1000000"),
    "negative temperature": ([5], {"temperature": -1.0}, "temperature"),
    "no tokens": ([5], {"max_tokens": 0}, "max_tokens"),
    "top_p above one": ([5], {"top_p": 1.5}, "top_p"),
    "a seed beyond int64": ([5], {"seed": 2**70}, "seed"),
    "more tokens than the context": ([5], {"max_tokens": 10**7}, "max_tokens"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_bad_sample_fails_alone_with_the_fields_name(service_client, live_server, name):
    prompt, params, message = SAMPLES[name]
    sampler = service_client.create_sampling_client(base_model=live_server.base_model).result()
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=message):
        sample(sampler, prompt, **params)
    assert sample(sampler, [5], max_tokens=2).sequences


def test_an_image_in_a_prompt_is_refused(service_client, live_server):
    sampler = service_client.create_sampling_client(base_model=live_server.base_model).result()
    chunk = tinker.types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=1)
    params = tinker.SamplingParams(max_tokens=1)
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match="image"):
        sampler.sample(tinker.ModelInput(chunks=[chunk]), 1, params).result()


@pytest.fixture(scope="module", params=["jax", "skyrl_train"])
def either(request, tiny_model, tmp_path_factory) -> Iterator[LocalServer]:
    """The live server that tests share, or one of the torch backend."""
    if request.param == "jax":
        yield request.getfixturevalue("live_server")
        return
    with LocalServer(tmp_path_factory.mktemp("torch"), str(tiny_model), {"backend": request.param}) as server:
        yield server


@pytest.fixture
def client(either) -> Iterator[tinker.ServiceClient]:
    with service(either) as client:
        yield client


def test_a_tenant_with_nan_weights_changes_nothing_for_another(client, either):
    data = [supervised(TOKENS)]

    def losses(trainer, neighbour) -> list[float]:
        found = []
        for _ in range(3):
            beside = neighbour.forward_backward(data, "cross_entropy") if neighbour else None
            found.append(step(trainer, data).metrics["loss:sum"])
            if beside:
                assert not np.isfinite(beside.result().metrics["loss:sum"])
        return found

    broken = new_trainer(client, either, seed=1)
    for _ in range(2):
        step(broken, data, tinker.AdamParams(learning_rate=3e38))
    assert not np.isfinite(logprobs(broken, TOKENS)).all()
    together = losses(new_trainer(client, either), broken)
    np.testing.assert_allclose(together, losses(new_trainer(client, either), None), rtol=1e-5)


def test_a_sample_beside_a_nan_version_is_unchanged(client, either):
    broken = new_trainer(client, either)
    for _ in range(2):
        step(broken, [supervised(TOKENS)], tinker.AdamParams(learning_rate=3e38))
    bad = broken.save_weights_and_get_sampling_client().result()
    base = client.create_sampling_client(base_model=either.base_model).result()
    alone = sample(base, TOKENS, seed=1, stop=[]).sequences[0]
    prompt, params = tinker.ModelInput.from_ints(TOKENS), tinker.SamplingParams(max_tokens=8, seed=1, stop=[])
    futures = [sampler.sample(prompt, 1, params) for sampler in (bad, base, bad)]
    beside = futures[1].result().sequences[0]
    assert beside.tokens == alone.tokens
    np.testing.assert_allclose(beside.logprobs, alone.logprobs, atol=1e-5)
    for future in (futures[0], futures[2]):
        with pytest.raises(tinker.RequestFailedError, match=f"model_id={broken.model_id} .* not finite"):
            future.result()

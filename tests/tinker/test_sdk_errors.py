"""Requests that cannot be served as sent: each fails alone, says what to change, and the client goes on."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker

from live import datum, logprobs, new_trainer, sample, sequence, service, step, supervised
from skyrl.tinker.local_server import LocalServer

TOKENS = sequence(10)


def image() -> tinker.Datum:
    chunk = tinker.types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=1)
    text = tinker.EncodedTextChunk(tokens=TOKENS[:-2])
    prompt = tinker.ModelInput(chunks=[text, chunk])
    return tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": np.asarray(TOKENS[1:])})


BAD = {
    "refused by its values": (datum(TOKENS, weights=np.ones(3)), "weights"),
    "refused by its types": (image(), "image"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_datum_fails_alone_and_the_client_goes_on(trainer, name):
    bad, message = BAD[name]
    with pytest.raises(tinker.RequestFailedError, match=rf"(?s){message}") as failure:
        trainer.forward_backward([supervised(TOKENS), bad], "cross_entropy").result()
    assert failure.value.category == "user"
    assert np.isfinite(trainer.forward([supervised(TOKENS)], "cross_entropy").result().metrics["loss:sum"])


def test_the_step_after_a_failed_one_is_an_ordinary_step(service_client, live_server):
    failed, plain = (new_trainer(service_client, live_server) for _ in range(2))
    with pytest.raises(tinker.RequestFailedError):
        step(failed, [supervised(TOKENS), datum([5, -1, 7])])
    for trainer in (failed, plain):
        step(trainer, [supervised(TOKENS)])
    np.testing.assert_array_equal(logprobs(failed, TOKENS), logprobs(plain, TOKENS))


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


@pytest.mark.full
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

"""Traced losses on packed datums, against the SDK's own graph run by torch on each datum alone."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from skyrl.algorithms.checks.traced import check_traced_data
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.objective import Objective
from skyrl.algorithms.traced.objective import refuse_not_finite, traced_objective
from skyrl.errors import RequestError
from skyrl.types import Datum, ForwardBackwardOutput
from tests.algorithms.traced_losses import (
    OF_TARGETS,
    OF_TOKENS,
    VOCABULARY,
    data_for,
    masked_mean,
    policy_gradient,
    smoothness,
    tile_of,
    torch_result,
    trace,
)


def computed(library: str, objective, tile, logprobs: np.ndarray):
    """Loss of each cell, gradient of each log-probability, metrics of each datum."""
    as_array = jnp.asarray if library == "jax" else torch.tensor

    def losses(learner):
        first = learner if learner.ndim == 2 else learner[..., 0]
        named = {name: as_array(value)[None] for name, value in tile.named.items()}
        inputs = LossInputs(
            logprobs=first,
            weights=0 * first + 1,
            named={**named, "logprobs": learner},
            segments=as_array(tile.segments)[None],
            num_segments=int(tile.segments.max()) + 1,
        )
        tokens, metrics = objective.measured(inputs)
        return tokens.sum(), (tokens[0], {name: value[0] for name, value in metrics.items()})

    if library == "jax":
        gradient, (tokens, metrics) = jax.jit(jax.grad(losses, has_aux=True))(jnp.asarray(logprobs)[None])
    else:
        leaf = torch.tensor(logprobs)[None].requires_grad_()
        total, (tokens, metrics) = losses(leaf)
        total.backward()
        tokens, gradient = tokens.detach(), leaf.grad
    return np.asarray(tokens), np.asarray(gradient)[0], {name: np.asarray(value) for name, value in metrics.items()}


@pytest.mark.parametrize("library", ["jax", "torch"])
@pytest.mark.parametrize("loss", [*OF_TOKENS, *OF_TARGETS], ids=lambda loss: loss.__name__)
def test_value_gradient_and_metrics_are_those_of_torch_on_each_datum_alone(loss, library):
    handle, objective = trace(loss, wide=loss in OF_TARGETS)
    data = data_for(objective)
    tile, cells, numbers = tile_of(objective, data)
    shape = tile.targets.shape if loss in OF_TARGETS else tile.targets.shape[:1]
    logprobs = -np.random.default_rng(1).exponential(size=shape).astype(np.float32)
    tokens, gradient, metrics = computed(library, objective, tile, logprobs)
    for segment, (place, i) in enumerate(zip(cells, numbers, strict=True)):
        width = data[i].loss_fn_inputs["target_tokens"].shape[1:]
        here = (place, *(slice(k) for k in width))
        value, expected, measured = torch_result(handle, data[i], logprobs[here])
        np.testing.assert_allclose(tokens[place].sum(), value, rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(gradient[here], expected, rtol=2e-5, atol=1e-5)
        assert {name: float(value[segment]) for name, value in metrics.items()} == pytest.approx(measured, rel=1e-5)
    inside = np.zeros(shape, bool)
    for place, i in zip(cells, numbers, strict=True):
        inside[(place, *(slice(k) for k in data[i].loss_fn_inputs["target_tokens"].shape[1:]))] = True
    assert not gradient[~inside].any()


def test_an_objective_is_its_graph_whatever_its_nodes_are_called():
    handle, objective = trace(policy_gradient)
    names = {node.name: f"x{i}" for i, node in enumerate(handle.graph.graph.nodes)}
    for node in handle.graph.graph.nodes:
        node.name = names[node.name]
    again = trace(policy_gradient)[1]
    assert again == objective and hash(again) == hash(objective)
    assert again != trace(masked_mean)[1]
    assert isinstance(objective, Objective)


def test_an_objective_can_be_pickled():
    objective = trace(smoothness)[1]
    copy = pickle.loads(pickle.dumps(objective))
    assert copy == objective
    assert copy.min_tokens == objective.min_tokens == 2


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_datum_without_a_number_is_named_and_spoils_no_other(library):
    handle, objective = trace(lambda logprobs, old: (torch.log(old.sum()) * logprobs.sum(), {}))
    data = data_for(objective)
    data[2].loss_fn_inputs["old"] = -np.ones(9, np.float32)
    for i in (0, 1, 3):
        data[i].loss_fn_inputs["old"] = np.ones(len(data[i].tokens), np.float32)
    tile, cells, numbers = tile_of(objective, data)
    logprobs = np.full(len(tile.tokens), -0.5, np.float32)
    tokens, gradient, _ = computed(library, objective, tile, logprobs)
    assert np.isfinite(gradient).all()
    outputs = [{"elementwise_loss": tokens[cells[numbers.index(i)]]} for i in range(4)]
    for i in (0, 1, 3):
        assert outputs[i]["elementwise_loss"].sum() == pytest.approx(
            torch_result(handle, data[i], logprobs[: len(data[i].tokens)])[0], rel=1e-5
        )
    with pytest.raises(RequestError, match="datum 2: the custom loss, or its gradient"):
        refuse_not_finite(ForwardBackwardOutput(outputs, {}))


def refused(datum: Datum, message: str, loss=policy_gradient, wide: bool = False) -> None:
    objective = trace(loss, wide)[1]
    with pytest.raises(RequestError, match=message):
        check_traced_data([datum], objective, vocab_size=VOCABULARY, max_context_length=64)


def changed(loss=policy_gradient, wide: bool = False, **inputs) -> Datum:
    (datum,) = data_for(trace(loss, wide)[1], lengths=(5,))
    given = {name: value for name, value in {**datum.loss_fn_inputs, **inputs}.items() if value is not None}
    return Datum(datum.tokens, given)


def test_data_that_do_not_fit_are_refused_by_name():
    refused(changed(old=None), r"datum 0: loss_fn_inputs lacks 'old', which the loss reads")
    refused(changed(old=np.zeros(4, np.float32)), r"datum 0: old has shape \[4\] but the loss declared \[5\]")
    refused(changed(old=np.zeros((5, 2), np.float32)), r"old has shape \[5, 2\] but the loss declared \[5\] \(rank 1\)")
    refused(changed(old=np.full(5, np.nan, np.float32)), r"datum 0: old\[0\]=nan must be finite")
    refused(changed(old=np.full(5, 2**25)), r"datum 0: old has integers above 2\*\*24")
    refused(changed(old=np.full(5, np.iinfo(np.int64).min)), r"datum 0: old has integers above 2\*\*24")
    refused(changed(target_tokens=np.full(5, VOCABULARY)), r"target_tokens\[0\]=50 is outside the vocabulary")
    wide = {"loss": OF_TARGETS[0], "wide": True}
    refused(changed(**wide, teacher=np.zeros((5, 3), np.float32)), r"differ in K", **wide)
    many = {"teacher": np.zeros((5, 65), np.float32), "target_tokens": np.zeros((5, 65), np.int64)}
    refused(changed(**wide, **many), r"65 targets per token", **wide)
    (short,) = data_for(trace(smoothness)[1], lengths=(1,))
    refused(short, r"has 1 tokens; this loss needs at least 2", smoothness)


def test_an_input_that_the_loss_does_not_read_is_refused_by_name_unless_it_was_accepted_before():
    datum = changed(advantage=np.zeros(5, np.float32))
    refused(datum, r"datum 0: loss_fn_inputs\['advantage'\] is not an input of this custom loss; .*mask, old")
    limits = {"vocab_size": VOCABULARY, "max_context_length": 64}
    (checked,) = check_traced_data([datum], trace(policy_gradient)[1], **limits, refuse_unread=False)
    assert "named.advantage" not in checked.loss_fn_inputs


def test_what_programs_put_into_every_datum_is_left_out():
    datum = changed(weights=np.zeros(5, np.float32), mask=np.ones(5, np.float32))
    (checked,) = check_traced_data([datum], trace(policy_gradient)[1], vocab_size=VOCABULARY, max_context_length=64)
    assert checked.loss_fn_inputs["weights"].tolist() == [1.0] * 5
    assert sorted(checked.loss_fn_inputs) == ["named.K", "named.advantages", "named.old", "target_tokens", "weights"]


def test_one_text_is_read_once():
    specification = trace(smoothness)[1].specification
    assert traced_objective(specification) is traced_objective(specification)

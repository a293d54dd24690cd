"""The JAX backend on meshes of devices, against the same backend on one device."""

import re
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from driver import (
    create,
    finish,
    finish_all,
    forward_backward,
    load,
    new_id,
    optim_step,
    publish,
    random_datum,
    sampling,
    save,
    training_state,
)
from skyrl.backends.backend import ExportModel, ForwardBackward
from skyrl.backends.common.sampling.model_runner import Rows
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.jax.collectives import received_bytes
from skyrl.backends.jax.layout import Layout, make_mesh
from skyrl.backends.jax.training.programs import abstract_tile
from skyrl.errors import RequestError
from skyrl.tx.design.family import FAMILIES, Size, made_config
from skyrl.tx.families import design_of
from skyrl.tx.io.host_arrays import on_host
from skyrl.tx.synthetic.make_model import make_model

VOCAB = 1536
SIZE = {"hidden": 32, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 48, "vocab": VOCAB}
WITH_EXPERTS = {"qwen3_moe", "deepseek_v3"}
MODEL_TYPES = sorted({FAMILIES[name].model_type for name in FAMILIES})
SCANNED, UNROLLED = 9, 1
"""Numbers of layers."""
GATE = [("qwen3", SCANNED, (2, 1, 1)), ("qwen3", UNROLLED, (1, 1, 2)), ("qwen3_moe", SCANNED, (1, 2, 1))]
FULL = [
    (kind, layers, mesh)
    for layers in (SCANNED, 2)
    for kind in MODEL_TYPES
    for mesh in [(8, 1, 1), (1, 1, 8), (2, 2, 2) if kind in WITH_EXPERTS else (2, 1, 4), (4, 1, 2)]
]
CASES = pytest.mark.parametrize(
    ("kind", "layers", "mesh"),
    [*GATE, *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for case in FULL)],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)


def bound(kind: str, layers: int) -> float:
    """Tolerance of log-probabilities, and of gradients as a part of their norm.

    In transformers, log-probabilities of these random Qwen3.5 models differ by 4e-4 between float32 and float64.
    """
    return 5e-4 if (kind, layers) == ("qwen3_5_text", SCANNED) else 1e-5


def options(mesh=(1, 1, 1), **others) -> JaxBackendConfig:
    fsdp, ep, tp = mesh
    sizes = {"fully_sharded_data_parallel_size": fsdp, "expert_parallel_size": ep, "tensor_parallel_size": tp}
    small = {"train_tile_tokens": 64, "kv_cache_gib": 0.02, "compilation_cache": False, "warm_up": False}
    return JaxBackendConfig(**(sizes | small | others))


@cache
def model_folder(kind: str, layers: int, parent: Path) -> Path:
    return make_model(parent / f"{kind}-{layers}", kind, layers=layers, **SIZE)


class Run:
    """Results of a backend on one mesh. `gradients` replaces the model's own before its step."""

    def __init__(self, folder: Path, out: Path, config: JaxBackendConfig, gradients=None):
        self.folder, self.out = folder, out
        data = [random_datum(13 + 7 * i, seed=i) for i in range(7)]
        with closing(JaxBackend(str(folder), config)) as backend:
            create(backend, "model", rank=8)
            create(backend, "other", rank=5, seed=1)
            create(backend, "third", rank=20, seed=2)
            self.logprobs = scores(forward_backward(backend, data))
            self.gradients = held(backend, "model")
            passes = [
                ForwardBackward(request_id=new_id(), model_id=model, data=some, loss_fn="cross_entropy")
                for model, some in {"model": data[:1], "other": data[:1], "third": data[:2]}.items()
            ]
            done = finish_all(backend, passes)
            self.together = [scores(done[one.request_id]) for one in passes]
            self.of_tenants = [held(backend, model) for model in ("other", "third")]
            state = backend._models.peek("model")
            state.gradient_sums = backend._layout.place(gradients or self.gradients)
            optim_step(backend, learning_rate=1e-2)
            self.weights = jax.tree.map(np.asarray, backend.adapter("model").weights)
            self.places = placed_as_planned(backend, "model")
            versions = ["model", "other", "third", None]
            for version in versions[:3]:
                publish(backend, version, out / version, version)
            prompt = np.random.default_rng(0).integers(0, VOCAB, 70)
            asked = [sampling(version, num_samples=2, prompt=prompt, max_tokens=5) for version in versions]
            asked.append(sampling("model", prompt=prompt, max_tokens=5, top_k=7, top_p=0.9, temperature=0.7))
            done = finish_all(backend, asked)
            found = [sequence for one in asked for sequence in done[one.request_id].sequences]
            self.samples = [list(sequence.tokens) for sequence in found], [sequence.logprobs for sequence in found]
            save(backend, out / "saved")
            finish(backend, ExportModel(request_id=new_id(), model_id="model", path=str(out / "export")))


def scores(output) -> np.ndarray:
    return np.concatenate([np.asarray(each["logprobs"]) for each in output.loss_fn_outputs])


def held(backend: JaxBackend, model: str):
    """The gradients of a model."""
    return jax.tree.map(np.asarray, backend.accumulated_grads[model])


def placed_as_planned(backend: JaxBackend, model: str) -> bool:
    """True if weights, moments and gradients are where the layout has them."""
    state, layout = backend._models.peek(model), backend._layout
    trees = [state.adapter.weights, state.first_moment, state.second_moment]
    leaves = [
        pair for tree in trees for pair in zip(*map(jax.tree.leaves, (tree, layout.shardings(tree))), strict=True)
    ]
    return all(leaf.sharding.is_equivalent_to(own, leaf.ndim) for leaf, own in leaves)


def distance(tree, other) -> float:
    """Norm of the difference, as a part of the norm."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))
    difference = sum(np.square(b.astype(float) - a).sum() for a, b in pairs)
    return float(np.sqrt(difference / sum(np.square(a.astype(float)).sum() for a, _ in pairs)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by kind of model and mesh. A mesh steps on the gradients of one device."""
    root = tmp_path_factory.mktemp("meshes")

    @cache
    def run(kind: str, layers: int, mesh: tuple[int, int, int] = (1, 1, 1)) -> Run:
        one = None if mesh == (1, 1, 1) else run(kind, layers)
        out = root / f"{kind}-{layers}-{mesh}"
        return Run(model_folder(kind, layers, root), out, options(mesh), one and one.gradients)

    return run


@CASES
def test_logprobs_are_those_of_one_device(runs, kind, layers, mesh):
    ours, wanted = runs(kind, layers, mesh).logprobs, runs(kind, layers).logprobs
    np.testing.assert_allclose(ours, wanted, atol=bound(kind, layers), rtol=1e-5)


@CASES
def test_gradients_are_those_of_one_device(runs, kind, layers, mesh):
    assert distance(runs(kind, layers).gradients, runs(kind, layers, mesh).gradients) < bound(kind, layers)


@CASES
def test_tenants_with_unlike_ranks_in_one_call_get_what_they_get_on_one_device(runs, kind, layers, mesh):
    one, many = runs(kind, layers), runs(kind, layers, mesh)
    for ours, wanted in zip(many.together, one.together, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=bound(kind, layers), rtol=1e-5)
    for ours, wanted in zip(many.of_tenants, one.of_tenants, strict=True):
        assert distance(wanted, ours) < bound(kind, layers)


@CASES
def test_a_step_on_equal_gradients_gives_equal_weights(runs, kind, layers, mesh):
    assert distance(runs(kind, layers).weights, runs(kind, layers, mesh).weights) < 1e-6


@CASES
def test_arrays_stay_on_the_devices_that_the_layout_names(runs, kind, layers, mesh):
    assert runs(kind, layers, mesh).places


@CASES
def test_samples_are_those_of_one_device(runs, kind, layers, mesh):
    (tokens, logprobs), (wanted, expected) = runs(kind, layers, mesh).samples, runs(kind, layers).samples
    assert tokens == wanted
    for ours, theirs in zip(logprobs, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=bound(kind, layers), rtol=1e-5)


@pytest.mark.full
def test_devices_in_another_order_compute_the_same(runs, tmp_path, monkeypatch):
    one, devices = runs("qwen3", SCANNED), jax.devices()
    order = np.random.default_rng(0).permutation(len(devices))
    monkeypatch.setattr(jax, "devices", lambda: [devices[place] for place in order])
    found = Run(one.folder, tmp_path, options((4, 1, 2)), one.gradients)
    np.testing.assert_allclose(found.logprobs, one.logprobs, atol=1e-5, rtol=1e-5)
    assert distance(one.gradients, found.gradients) < 1e-5
    assert distance(one.weights, found.weights) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("qwen3", (2, 1, 2)),
        ("qwen3", (1, 1, 8)),
        ("qwen3", (8, 1, 1)),
        ("qwen3_moe", (2, 2, 1)),
        ("qwen3_moe", (2, 1, 2)),
    ],
)
def test_a_whole_model_has_the_gradients_of_one_device(tmp_path, kind, mesh):
    folder = make_model(tmp_path / "model", kind, layers=SCANNED, **SIZE)
    data, found = [random_datum(40, seed=i) for i in range(5)], []
    for sizes in [(1, 1, 1), mesh]:
        with closing(JaxBackend(str(folder), options(sizes))) as backend:
            create(backend, rank=0)
            losses = scores(forward_backward(backend, data))
            assert placed_as_planned(backend, "model") or sizes == (1, 1, 1)
            found.append((losses, held(backend, "model")["base"]))
    (losses, gradients), (ours, own) = found
    np.testing.assert_allclose(ours, losses, atol=1e-5, rtol=1e-5)
    assert distance(gradients, own) < 1e-5


@pytest.mark.full
def test_files_do_not_depend_on_the_mesh(runs, tmp_path):
    """A model saved on 2 x 2 is loaded on one device and saved again, and the other way round."""
    meshes = (2, 1, 2), (1, 1, 1)
    for first, then in (meshes, meshes[::-1]):
        saved = runs("qwen3", SCANNED, first).out / "saved"
        with closing(JaxBackend(str(runs("qwen3", SCANNED).folder), options(then))) as backend:
            create(backend, rank=8)
            load(backend, saved)
            assert placed_as_planned(backend, "model") or then == (1, 1, 1)
            save(backend, tmp_path / str(then))
        before, after = training_state(saved), training_state(tmp_path / str(then))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            np.testing.assert_array_equal(after[name], tensor, err_msg=name)


@pytest.mark.full
def test_an_idle_model_returns_from_host_memory_to_its_devices(runs):
    one = runs("qwen3", SCANNED)
    with closing(JaxBackend(str(one.folder), options((2, 1, 2)))) as backend:
        create(backend, rank=8)
        forward_backward(backend, [random_datum(30)])
        before = held(backend, "model")
        state = backend._models.peek("model")
        moved = state.to_host().to_device()
        assert distance(before, moved.gradient_sums) == 0
        for tree, own in [(moved.adapter, state.adapter), (moved.second_moment, state.second_moment)]:
            assert jax.tree.map(lambda leaf: leaf.sharding, tree) == jax.tree.map(lambda leaf: leaf.sharding, own)


@pytest.mark.full
def test_a_whole_model_is_loaded_part_by_part(tmp_path):
    """No device has a whole embedding, the largest array, not even for a moment."""
    folder = make_model(tmp_path / "model", layers=SCANNED, **SIZE)
    with closing(JaxBackend(str(folder), options((2, 1, 2)))) as backend:
        create(backend, rank=0)
        forward_backward(backend, [random_datum(30)])
        optim_step(backend)
        save(backend, tmp_path / "saved")
        before = jax.tree.map(np.asarray, backend.adapter("model").weights)
        with sizes_on_first_device() as sizes:
            load(backend, tmp_path / "saved")
        assert distance(before, backend.adapter("model").weights) == 0
        assert placed_as_planned(backend, "model")
        assert 0 < max(sizes) <= VOCAB * SIZE["hidden"] // 2


@contextmanager
def sizes_on_first_device():
    """List that gets the size of each array that `jax.device_put` copies to the first device alone."""
    sizes, copy = [], jax.device_put

    def noted(x, device=None, **others):
        made = copy(x, device, **others)
        first = jax.devices()[0]
        sizes.extend(leaf.size for leaf in jax.tree.leaves(made) if leaf.devices() == {first})
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", noted)
        yield sizes


@pytest.mark.full
def test_deterministic_results_do_not_depend_on_other_tenants(tmp_path):
    folder = make_model(tmp_path / "model", layers=SCANNED, **SIZE)
    with closing(JaxBackend(str(folder), options((2, 1, 1), deterministic=True))) as backend:
        for model in ("model", "other"):
            create(backend, model, rank=8)
        forward_backward(backend, [random_datum(40)])
        alone = held(backend, "model")
        optim_step(backend, learning_rate=0.0)
        passes = [
            ForwardBackward(request_id=new_id(), model_id=model, data=[random_datum(40)], loss_fn="cross_entropy")
            for model in ("model", "other")
        ]
        finish_all(backend, passes)
        for before, after in zip(*map(jax.tree.leaves, (alone, held(backend, "model"))), strict=True):
            np.testing.assert_array_equal(before, after)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize(("kind", "mesh"), [("qwen3_moe", (2, 2, 1)), ("qwen3", (2, 1, 2))])
def test_bfloat16_weights_have_the_losses_of_one_device(tmp_path, kind, mesh, rank):
    folder = make_model(tmp_path / "model", kind, layers=2, **SIZE)
    losses = []
    for sizes in [(1, 1, 1), mesh]:
        with closing(JaxBackend(str(folder), options(sizes, dtype="bfloat16"))) as backend:
            create(backend, rank=rank)
            losses.append(scores(forward_backward(backend, [random_datum(40, seed=i) for i in range(3)])))
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


@pytest.mark.full
def test_connectors_learn_as_on_one_device(tmp_path):
    folder = make_model(tmp_path / "model", layers=2, **SIZE)
    found = []
    for sizes in [(1, 1, 1), (2, 1, 2)]:
        with closing(JaxBackend(str(folder), options(sizes, mhc_expansion_rate=2))) as backend:
            create(backend, rank=8)
            losses = scores(forward_backward(backend, [random_datum(40, seed=i) for i in range(3)]))
            found.append((losses, held(backend, "model")))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-5, rtol=1e-5)
    assert distance(found[0][1], found[1][1]) < 1e-5


@pytest.mark.full
def test_gradients_of_a_large_embedding_are_those_of_one_device(tmp_path):
    """Its gradient has 8 MiB."""
    folder = make_model(tmp_path / "model", layers=1, **(SIZE | {"vocab": 65536}))
    found = []
    for sizes in [(1, 1, 1), (2, 1, 4)]:
        with closing(JaxBackend(str(folder), options(sizes))) as backend:
            create(backend, rank=0)
            forward_backward(backend, [random_datum(40, seed=i, vocab=65536) for i in range(3)])
            found.append(held(backend, "model")["base"])
    assert distance(*found) < 1e-5


def test_eager_programs_on_a_mesh_are_refused():
    with pytest.raises(ValueError, match="enforce_eager=True is for one device"):
        options((2, 1, 1), enforce_eager=True)


def test_parts_of_an_array_on_several_devices_are_joined_on_the_host():
    mesh = make_mesh((2, 2, 2), design_of(SimpleNamespace(**made_config("Qwen3MoeForCausalLM", LARGE))), jax.devices())
    whole = np.arange(3 * 4 * 6 * 8, dtype=np.float32).reshape(3, 4, 6, 8)
    for spec in [(None, "ep", "fsdp", "tp"), (None, None, "tp", None), ()]:
        array = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
        np.testing.assert_array_equal(on_host(array), whole)
        np.testing.assert_array_equal(on_host(array, (2,)), whole[2])
        np.testing.assert_array_equal(on_host(array, (1, 3)), whole[1, 3])


def wide(text: str) -> set[str]:
    """Arrays of a compiled program with all tokens of the vocabulary for some row."""
    return {shape for shape in re.findall(r"f32\[([\d,]+)\]", text) if str(VOCAB) in shape.split(",")}


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 1, 4), (2, 1, 2)])
def test_no_device_has_the_logits_of_all_tokens(tmp_path, mesh):
    folder = make_model(tmp_path / "model", layers=SCANNED, **SIZE)
    with closing(JaxBackend(str(folder), options(mesh))) as backend, backend._computing():
        runner, passes = backend._runner, backend._passes
        rows, bank = Rows.idle(16, runner._blocks, options=True), runner._programs.empty_bank(runner._zero, slots=1)
        decode = runner._programs.decode.lower(backend._base, bank, runner._pool, rows, np.int32(1)).compile()
        tiles = (abstract_tile(64, 1),) * mesh[0]
        training = passes._programs.forward_backward.compiled_for(backend._base, (passes._empty(8),), tiles)
        assert not wide(decode.as_text()) and not wide(training.as_text())


DIMENSIONS = {**SIZE, "layers": 2, "tied": False, "max_position": 1024}
LARGE = Size(**DIMENSIONS)


def test_devices_of_fsdp_exchange_weights_and_not_activations(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3", layers=SCANNED, **SIZE)
    with closing(JaxBackend(str(folder), options((4, 1, 1)))) as backend, backend._computing():
        program, adapter = backend._programs.forward_backward, backend._zero_adapter(8)

        def received(length: int) -> int:
            tiles = (abstract_tile(length, 1),) * 4
            return sum(received_bytes(program.compiled_for(backend._base, (adapter,), tiles).as_text()).values())

        few, many = received(64), received(256)
        of_layers = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(backend.model.layers)))
    assert 3 / 4 * of_layers < few < 3 * of_layers
    assert many - few < 192 * 4 * 64, "each token has some results, and those are on each device"


@pytest.mark.full
def test_a_device_of_ep_has_room_for_the_tokens_of_one_row(tmp_path):
    sizes = {"hidden": 128, "head_dim": 32, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocab": 512}
    folder = make_model(tmp_path / "model", "qwen3_moe", layers=SCANNED, **sizes)
    taken = []
    for sizes in [(1, 1, 1), (1, 4, 1)]:
        with closing(JaxBackend(str(folder), options(sizes))) as backend, backend._computing():
            taken.append(backend._programs.temporary_bytes(backend._base, backend._zero_adapter(8), 512))
    assert taken[1] < 1.1 * taken[0]


def layout(mesh: tuple[int, int, int], **changes) -> Layout:
    design = design_of(SimpleNamespace(**made_config("Qwen3ForCausalLM", Size(**(DIMENSIONS | changes)))))
    return Layout(make_mesh(mesh, design, jax.devices()), design)


def test_key_value_heads_that_tp_does_not_divide_are_on_each_device():
    """Queries are split in both cases."""
    shapes = {name: jax.ShapeDtypeStruct((2, 64, 32), np.float32) for name in ("q_proj", "k_proj")}
    tree = {"layers": {"self_attn": {name: {"weight": shape} for name, shape in shapes.items()}}}
    for kv_heads, cut in [(4, "tp"), (2, None)]:
        own = layout((1, 1, 4), kv_heads=kv_heads).shardings(tree)["layers"]["self_attn"]
        assert own["q_proj"]["weight"].spec[1] == "tp"
        assert own["k_proj"]["weight"].spec[1] == cut


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ((3, 1, 3), "are 9 devices, and JAX has 8 here; choose sizes whose product is smaller; JAX_NUM_CPU_DEVICES=9"),
        ((1, 2, 1), "expert_parallel_size=2: the base model has no experts; leave it at 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_line(mesh, said):
    with pytest.raises(RequestError, match=re.escape(said)):
        layout(mesh)


def test_the_start_names_sizes_that_an_axis_does_not_divide():
    assert "; tp=5 does not divide inner=48, so these arrays are whole" in layout((1, 1, 5)).description(8)


def test_experts_that_ep_does_not_divide_are_one_line():
    design = design_of(SimpleNamespace(**made_config("Qwen3MoeForCausalLM", Size(**DIMENSIONS))))
    with pytest.raises(RequestError, match=r"expert_parallel_size=3 does not divide the .* experts of a layer"):
        make_mesh((1, 3, 1), design, jax.devices())

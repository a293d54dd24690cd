"""`skyrl adapter`: what it says of an adapter, and that merged and converted ones compute what PEFT computes."""

import json
import re
import shutil
import tarfile
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from skyrl.backends.common.models.checkpoint_folder import ON_TIED
from skyrl.cli import main
from skyrl.utils.adapters.stored import adapter_tensors
from tests.tx.family_models import CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
ATTENTION = ["q_proj", "k_proj", "v_proj"]


def settings(start=False, **options):
    given = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**given | options, init_lora_weights=start)


def saved(base, folder, dtype=torch.float32, share=False, **options):
    """PEFT's model with a random adapter, which is saved."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    theirs = peft.get_peft_model(model, settings(**options))
    parameters = dict(theirs.named_parameters())
    for name, parameter in parameters.items():
        if share and ".lora_A." in name:
            parameter.data = parameters[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")].data
    theirs.save_pretrained(folder)
    return theirs


def logits(model):
    with torch.no_grad():
        return model(torch.arange(30)[None]).logits.float().numpy()


def merged(adapter, base, output, dtype=torch.float32):
    assert main(["adapter", "merge", str(adapter), "--base", str(base), "--output", str(output)]) == 0
    return transformers.AutoModelForCausalLM.from_pretrained(output, dtype=dtype)


def error(capsys, *arguments):
    """The one line that a refused command says."""
    capsys.readouterr()
    assert main(["adapter", *map(str, arguments)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_merged_model_has_the_weights_of_pefts_in_float32(folder, tmp_path):
    theirs = saved(folder("untied"), tmp_path / "adapter")
    ours = merged(tmp_path / "adapter", folder("untied"), tmp_path / "out").state_dict()
    wanted = theirs.merge_and_unload().state_dict()
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(ours[name].numpy(), tensor.numpy(), atol=1e-6, err_msg=name)


def test_a_merged_model_in_bfloat16_is_the_exact_sum_rounded_once(folder, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(folder("untied"), dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    before = {name: tensor.double() for name, tensor in base.state_dict().items()}
    theirs = saved(tmp_path / "base", tmp_path / "adapter", torch.bfloat16)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    ours = merged(tmp_path / "adapter", tmp_path / "base", tmp_path / "out", torch.bfloat16).state_dict()
    wanted = theirs.merge_and_unload().state_dict()
    for name, tensor in wanted.items():
        half = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        exact = before[name]
        if f"{half}A.weight" in tensors:
            a, b = (torch.as_tensor(tensors[f"{half}{matrix}.weight"]).double() for matrix in "AB")
            exact = exact + 6 / 4 * b @ a
        assert torch.equal(ours[name], exact.to(torch.float32).to(torch.bfloat16)), name
        np.testing.assert_allclose(ours[name].float(), tensor.float(), rtol=2**-7, atol=2**-9, err_msg=name)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`")
def test_a_tied_projection_gets_weights_of_its_own(folder, tmp_path):
    theirs = saved(folder("tied"), tmp_path / "adapter", target_modules=["lm_head", "o_proj"])
    expected = logits(theirs)
    ours = merged(tmp_path / "adapter", folder("tied"), tmp_path / "out")
    assert not ours.config.tie_word_embeddings
    np.testing.assert_allclose(logits(ours), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("difference", "modules", "refused"), [(1, "lm_head", True), (0, "lm_head", False), (1, "o_proj", False)]
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`")
def test_a_projection_that_is_tied_and_stored_with_other_values_is_not_merged(
    difference, modules, refused, folder, tmp_path, capsys
):
    saved(folder("tied"), tmp_path / "adapter", target_modules=[modules])
    base = shutil.copytree(folder("tied"), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + difference
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    command = ["merge", tmp_path / "adapter", "--base", base, "--output", tmp_path / "out"]
    if refused:
        assert "lm_head.weight and model.embed_tokens.weight have different values" in error(capsys, *command)
    else:
        merged(tmp_path / "adapter", base, tmp_path / "out")


@pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`", "ignore:Model (has|with) `tie_word_embeddings=True`"
)
def test_pefts_merge_of_a_tied_projection_is_right_as_the_readme_does_it_or_untied_and_wrong_otherwise(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("base").symlink_to(folder("tied"))
    theirs = saved(folder("tied"), tmp_path / "adapter", target_modules=["lm_head", "o_proj"])
    expected = logits(theirs)
    (block,) = re.findall(r"```python\n(.*?merge_and_unload.*?)```", ON_TIED, re.DOTALL)
    exec(block, made := {})
    np.testing.assert_allclose(logits(made["merged"]), expected, atol=1e-4)
    (command,) = re.findall(r"`skyrl (adapter merge --untie [^`]*)`", PAGE.read_text())
    assert main(command.split()) == 0
    untied = transformers.AutoModelForCausalLM.from_pretrained("untied", dtype=torch.float32)
    assert not untied.config.tie_word_embeddings
    ours = peft.PeftModel.from_pretrained(untied, "adapter").merge_and_unload()
    np.testing.assert_allclose(logits(ours), expected, atol=1e-4)
    assert abs(logits(theirs.merge_and_unload()) - expected).max() > 0.1


@pytest.fixture
def archive(tmp_path) -> Iterator[str]:
    """Address of a server that gives one archive: an adapter with a README."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            url = f"http://{self.headers['Host']}/archive.tar"
            content = json.dumps({"url": url}).encode()
            if self.path == "/archive.tar":
                content = (tmp_path / "archive.tar").read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_export_keeps_the_readme_and_warns(folder, archive, tmp_path, capfd):
    saved(folder("tied"), tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").write_text(ON_TIED)
    with tarfile.open(tmp_path / "archive.tar", "w") as tar:
        tar.add(tmp_path / "adapter", "")
    command = ["export", "tinker://model/sampler_weights/name", "--url", archive, "--output", str(tmp_path / "out")]
    assert main(["adapter", *command]) == 0
    assert (tmp_path / "out" / "README.md").read_text() == ON_TIED
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith(f"warning: read {tmp_path / 'out' / 'README.md'} before merging")


def test_an_adapter_of_other_modules_is_merged_untied_if_asked(folder, tmp_path):
    expected = logits(saved(folder("tied"), tmp_path / "adapter", target_modules=["o_proj"]))
    command = ["merge", tmp_path / "adapter", "--untie", "--base", folder("tied"), "--output", tmp_path / "out"]
    assert main(["adapter", *map(str, command)]) == 0
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    np.testing.assert_allclose(logits(ours), expected, atol=1e-4)


def test_a_merge_without_an_adapter_is_refused(folder, tmp_path, capsys):
    assert "no ADAPTER: name" in error(capsys, "merge", "--base", folder("tied"), "--output", tmp_path / "out")


@pytest.mark.parametrize("options", [{"use_rslora": True, "rank_pattern": {"v_proj": 2}}, {"use_rslora": False}])
def test_a_model_of_several_files_keeps_them(options, folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("untied"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    expected = logits(saved(tmp_path / "base", tmp_path / "adapter", **options))
    ours = merged(tmp_path / "adapter", tmp_path / "base", tmp_path / "out")
    np.testing.assert_allclose(logits(ours), expected, atol=1e-4)
    places = [
        json.loads((tmp_path / x / "model.safetensors.index.json").read_text())["weight_map"] for x in ("base", "out")
    ]
    assert places[0] == places[1] and len(set(places[0].values())) > 2


def experts(tmp_path):
    """A small model with experts."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=320,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_adapters_of_experts_are_merged(tmp_path):
    base = experts(tmp_path)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    expected = logits(saved(base, tmp_path / "adapter", target_parameters=parameters, target_modules=["q_proj"]))
    ours = merged(tmp_path / "adapter", base, tmp_path / "out")
    np.testing.assert_allclose(logits(ours), expected, atol=1e-4)


def test_a_base_model_with_fused_experts_is_refused_with_the_form_that_is_merged(tmp_path, capsys):
    base = experts(tmp_path)
    saved(base, tmp_path / "saved", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    ours = "convert", str(tmp_path / "saved"), "--output", str(tmp_path / "adapter"), "--base", str(base)
    assert main(["adapter", *ours]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    said = error(capsys, "merge", tmp_path / "adapter", "--base", tmp_path / "fused", "--output", tmp_path / "out")
    assert "fused; save it by save_pretrained(save_original_format=True)" in said


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def test_an_adapter_of_all_linear_layers_has_routers_which_are_named_as_not_implemented(tmp_path, capsys):
    base = experts(tmp_path)
    saved(base, tmp_path / "adapter", target_modules="all-linear", exclude_modules=["gate"])
    said = error(capsys, "merge", tmp_path / "adapter", "--base", base, "--output", tmp_path / "out")
    assert "target_parameters has gate.weight; routers of experts are not adapted" in said
    assert "list target_modules by name, without gate" in said
    assert main(["adapter", "inspect", str(tmp_path / "adapter")]) == 0
    told = capsys.readouterr().out
    assert "unusual     target_parameters=['gate.weight']: not implemented; only PEFT computes this adapter\n" in told


def test_layouts_are_converted_there_and_back(folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter", share=True, target_modules=ATTENTION)
    for source, *options in (
        ("adapter", "fused", "--layout", "fused", "--names", "bare"),
        ("fused", "back", "--base", folder("untied")),
    ):
        target, *options = options
        command = ["adapter", "convert", tmp_path / source, "--output", tmp_path / target, *options]
        assert main([*map(str, command)]) == 0
    fused = load_file(tmp_path / "fused" / "adapter_model.safetensors")
    assert fused["model.layers.0.self_attn.qkv_proj.lora_B.weight"].shape == (64 + 32 + 32, 4)
    first, last = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "back"))
    assert first.keys() == last.keys()
    assert all(np.array_equal(first[name], last[name]) for name in first)
    said = error(capsys, "convert", tmp_path / "fused", "--output", tmp_path / "x")
    assert "sizes are not known; name the base model (--base)" in said


def test_ranks_and_scales_are_converted_to_one_of_each(folder, tmp_path):
    options = {"use_rslora": True, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 2}}
    expected = logits(saved(folder("untied"), tmp_path / "adapter", **options))
    assert main(["adapter", "convert", str(tmp_path / "adapter"), "--output", str(tmp_path / "plain")]) == 0
    config = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    assert config["r"] == 7 and not {*options} & {*config}
    base = transformers.AutoModelForCausalLM.from_pretrained(folder("untied"), dtype=torch.float32)
    np.testing.assert_allclose(logits(peft.PeftModel.from_pretrained(base, tmp_path / "plain")), expected, atol=1e-4)


def converted(base, source, output, *options):
    """PEFT's model with the adapter that `convert` writes."""
    assert main(["adapter", "convert", str(source), "--output", str(output), *map(str, options)]) == 0
    return peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), output)


def adapted(model):
    """Names of the modules that PEFT adapts."""
    return {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r".*layers\.1\.self_attn\.(q|v)_proj"},
        {"target_modules": ["0.self_attn.q_proj", "1.mlp.down_proj"]},
        {"layers_to_transform": 0, "layers_pattern": "layers"},
        {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        {"target_modules": r".*_proj", "exclude_modules": r".*layers\.0.*", "rank_pattern": {"v_proj": 7}},
    ],
    ids=["expression", "paths", "layers", "excluded", "rank"],
)
def test_a_converted_adapter_of_some_layers_adapts_the_same_modules(options, folder, tmp_path):
    theirs = saved(folder("untied"), tmp_path / "adapter", **options)
    assert 0 < len(adapted(theirs)) < 12
    again = converted(folder("untied"), tmp_path / "adapter", tmp_path / "out")
    np.testing.assert_allclose(logits(again), logits(theirs), atol=1e-4)
    assert adapted(again) == adapted(theirs)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys", "ignore:The following .*_pattern keys did not match")
@pytest.mark.parametrize("layout", ["separate", "fused-experts"])
def test_converted_experts_of_some_layers_are_computed_as_before(layout, tmp_path):
    base, source = experts(tmp_path), tmp_path / "adapter"
    parameters = ["layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    theirs = saved(base, source, target_parameters=parameters, target_modules=["q_proj"])
    again = converted(base, source, tmp_path / "out", "--layout", layout, "--base", base)
    np.testing.assert_allclose(logits(again), logits(theirs), atol=1e-4)
    if layout == "fused-experts":  # PEFT fuses separate ones in every layer; those without tensors change nothing
        assert adapted(again) == adapted(theirs)


def test_a_converted_adapter_of_all_layers_lists_modules_without_their_paths(folder, tmp_path):
    saved(folder("untied"), tmp_path / "adapter")
    converted(folder("untied"), tmp_path / "adapter", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj", "v_proj"]


def test_linear_maps_that_are_named_by_their_weights_are_merged_and_stay_so_when_converted(folder, tmp_path, capsys):
    base, source, converted = folder("untied"), tmp_path / "adapter", tmp_path / "converted"
    theirs = saved(base, source, target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"])
    np.testing.assert_allclose(logits(merged(source, base, tmp_path / "out")), expected := logits(theirs), atol=1e-4)
    assert main(["adapter", "convert", str(source), "--output", str(converted)]) == 0
    again = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), converted)
    np.testing.assert_allclose(logits(again), expected, atol=1e-5)
    capsys.readouterr()
    assert main(["adapter", "inspect", str(source)]) == 0
    assert "unusual" not in capsys.readouterr().out


def test_what_cannot_be_fused_exactly_is_refused(folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter", target_modules=ATTENTION)
    said = error(capsys, "convert", tmp_path / "adapter", "--output", tmp_path / "x", "--layout", "fused")
    assert "q_proj and model.layers.0.self_attn.k_proj have different lora_A, and a fused module has one" in said
    assert not (tmp_path / "x").exists()


@pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`", "ignore:Model (has|with) `tie_word_embeddings=True`"
)
@pytest.mark.parametrize("base", ["tied", "untied"])
def test_an_adapter_on_a_tied_projection_is_described_as_one_that_peft_merges_wrongly(folder, tmp_path, capsys, base):
    theirs = saved(folder(base), tmp_path / "adapter", target_modules=["lm_head", "o_proj"])
    right = logits(theirs)
    wrong = not np.allclose(logits(theirs.merge_and_unload()), right, atol=1e-3)
    capsys.readouterr()
    assert main(["adapter", "inspect", str(tmp_path / "adapter")]) == 0
    assert ("unusual     lm_head: the base model ties" in capsys.readouterr().out) == wrong == (base == "tied")


def test_an_adapter_is_described_in_a_folder_and_in_a_tar(folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter", use_rslora=True, rank_pattern={"q_proj": 2})
    with tarfile.open(tmp_path / "adapter.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "adapter", "some/where")
    texts = []
    for name in ("adapter", "adapter.tar.gz"):
        capsys.readouterr()
        assert main(["adapter", "inspect", str(tmp_path / name)]) == 0
        texts.append(capsys.readouterr().out.splitlines())
    assert texts[0][1:] == texts[1][1:]
    text = "\n".join(texts[0])
    assert f"base model  {folder('untied')}" in text and "rank        4, alpha 6" in text
    assert all(f"{name} (2)" in text for name in ("q_proj", "v_proj", "down_proj"))
    assert "tensors     12, float32, " in text and "names       PEFT's\n" in text
    assert "unusual     use_rslora=True" in text and "unusual     ranks of modules: 2 (2), 4 (4)" in text


UNUSUAL = {
    "use_dora=True": {"use_dora": True},
    "lora_bias=True": {"target_modules": ["q_proj"], "lora_bias": True},
    "modules_to_save=['lm_head']": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices=[1, 2]": {"trainable_token_indices": [1, 2]},
}
"""PEFT options that add tensors to a file, by the names that messages should have."""


INVALID_SHAPE = pytest.mark.filterwarnings("ignore:.*LoRA tensor.s. have invalid shape")
"""PEFT's warning of its own lora_bias."""


@INVALID_SHAPE
@pytest.mark.parametrize("named", UNUSUAL)
def test_an_adapter_with_other_tensors_is_described(named, biased, folder, tmp_path, capsys):
    saved(biased if "bias" in named else folder("untied"), tmp_path / "adapter", **UNUSUAL[named])
    others = [x for x in load_file(tmp_path / "adapter" / "adapter_model.safetensors") if "lora_A.w" not in x]
    others = sorted(x for x in others if not x.endswith(("lora_B.weight", "base_layer.weight")))
    capsys.readouterr()
    assert main(["adapter", "inspect", str(tmp_path / "adapter")]) == 0
    told = capsys.readouterr().out
    assert f"unusual     {named}: not implemented; only PEFT computes this adapter\n" in told
    more = f", and {len(others) - 1} more\n" if len(others) > 1 else "\n"
    assert f"unusual     tensors other than lora_A and lora_B: {others[0]}{more}" in told


@INVALID_SHAPE
@pytest.mark.parametrize("named", UNUSUAL)
def test_an_import_names_the_option_that_is_not_implemented(named, biased, folder, tmp_path, capsys):
    saved(biased if "bias" in named else folder("untied"), tmp_path / "adapter", **UNUSUAL[named])
    said = error(capsys, "import", tmp_path / "adapter", "--base-model", "m", "--url", "http://127.0.0.1:9")
    assert f"{named} is not implemented; train without {named.partition('=')[0]}" in said


@pytest.fixture(scope="module")
def biased(folder, tmp_path_factory):
    """A model with biases, which PEFT's lora_bias asks for."""
    config = transformers.Qwen3Config.from_pretrained(folder("untied"), attention_bias=True)
    transformers.Qwen3ForCausalLM(config).save_pretrained(made := tmp_path_factory.mktemp("biased"))
    return made


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_adapter_of_embeddings_is_described(folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    capsys.readouterr()
    assert main(["adapter", "inspect", str(tmp_path / "adapter")]) == 0
    first = "base_model.model.model.embed_tokens.lora_embedding_A"
    assert f"tensors other than lora_A and lora_B: {first}, and 1 more\n" in capsys.readouterr().out


@pytest.mark.parametrize("start", ["pissa_niter_2", "olora"])
def test_an_adapter_that_starts_by_changing_its_base_is_described_so(start, folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter", start=start)
    capsys.readouterr()
    assert main(["adapter", "inspect", str(tmp_path / "adapter")]) == 0
    assert f"unusual     init_lora_weights={start!r}: changes the base weights" in capsys.readouterr().out


def test_copies_of_base_weights_are_not_read(tmp_path):
    copy, adapter = np.zeros((2048, 2048), np.float32), np.ones((2, 4), np.float32)
    save_file({"lm_head.base_layer.weight": copy, "lm_head.lora_A.weight": adapter}, tmp_path / "file")
    tracemalloc.start()
    found = adapter_tensors(tmp_path / "file")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found.pop("lm_head.lora_A.weight"), adapter)
    assert not found and peak < copy.nbytes / 4


def test_a_bomb_in_a_tar_is_not_read(tmp_path, capsys):
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(2**24))
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "adapter_model.safetensors", "adapter_model.safetensors")
    said = error(capsys, "inspect", tmp_path / "bomb.tar.gz")
    assert f"holds adapter_model.safetensors of {2**24}, which no weights come to" in said


def test_a_base_model_of_another_size_is_refused(folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter")
    config = transformers.Qwen3Config.from_pretrained(folder("untied"), hidden_size=64)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    said = error(capsys, "merge", tmp_path / "adapter", "--base", tmp_path / "other", "--output", tmp_path / "x")
    assert "the product of model.layers.0." in said and "name the base model that the adapter was trained on" in said
    assert not (tmp_path / "x").exists()


def test_folders_that_hold_no_adapter_are_refused(folder, tmp_path, capsys):
    assert "holds no adapter_config.json" in error(capsys, "inspect", folder("untied"))
    assert "there is no such folder or file" in error(capsys, "inspect", tmp_path / "nothing")
    said = error(capsys, "inspect", folder("untied") / "model.safetensors")
    assert "model.safetensors is a file but no tar; name a folder with adapter_config.json and" in said
    saved(folder("untied"), tmp_path / "adapter")
    said = error(capsys, "convert", tmp_path / "adapter", "--output", tmp_path / "adapter")
    assert f"--output {tmp_path / 'adapter'} is there already" in said
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"not tensors")
    assert "adapter_model.safetensors cannot be read" in error(capsys, "inspect", tmp_path / "adapter")


def test_an_adapter_in_bfloat16_is_merged_as_pefts(folder, tmp_path):
    base = folder("untied")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    theirs = peft.get_peft_model(model, settings(), autocast_adapter_dtype=False)
    theirs.save_pretrained(tmp_path / "adapter")
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in list(file.keys())} == {"BF16"}
    command = ["adapter", "merge", str(tmp_path / "adapter"), "--base", str(base), "--output", str(tmp_path / "out")]
    assert main(command) == 0
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    exact = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    )
    np.testing.assert_allclose(logits(ours), logits(exact), atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base weights"),
        ({"peft_type": "ADALORA"}, "peft_type='ADALORA' is not implemented"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan is no positive number"),
        ({"r": 4.5}, "r=4.5 is no whole number"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern['q_proj']=0 is no positive number"),
        ({"rank_pattern": {"*q_proj": 4}}, "rank_pattern has the key '*q_proj', which is no name"),
        ({"alpha_pattern": {"([a-z]+)+!": 4}}, "alpha_pattern has the key '([a-z]+)+!', which is no name"),
        ({"alpha_pattern": [4]}, "alpha_pattern=[4] is no object"),
    ],
)
def test_a_configuration_that_computes_something_else_is_refused(changed, message, folder, tmp_path, capsys):
    base = folder("untied")
    saved(base, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    command = ["adapter", "merge", str(tmp_path / "adapter"), "--base", str(base), "--output", str(tmp_path / "out")]
    assert main(command) != 0
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_index_that_names_files_elsewhere_is_refused(folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter")
    base, victim = tmp_path / "base", tmp_path / "victim.safetensors"
    shutil.copytree(folder("untied"), base)
    weights = base / "model.safetensors"
    names = list(load_file(weights))
    shutil.copy(weights, victim)
    before = victim.read_bytes()
    weights.unlink()
    index = {"weight_map": dict.fromkeys(names, "../victim.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    command = ["adapter", "merge", str(tmp_path / "adapter"), "--base", str(base), "--output", str(tmp_path / "out")]
    assert main(command) != 0
    assert "weight_map names files that are not beside it" in capsys.readouterr().err
    assert victim.read_bytes() == before


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("config.json", "[]", "config.json is no JSON object"),
        ("model.safetensors.index.json", "{}", "has no weight_map of tensors to files"),
    ],
)
def test_a_base_model_that_is_broken_is_refused_in_a_line(file, content, message, folder, tmp_path, capsys):
    base = shutil.copytree(folder("tied"), tmp_path / "base")
    saved(base, tmp_path / "adapter")
    if file.endswith("index.json"):
        (base / "model.safetensors").unlink()
    (base / file).write_text(content)
    assert message in error(capsys, "merge", tmp_path / "adapter", "--base", base, "--output", tmp_path / "out")


def test_an_index_with_a_tensor_that_is_in_no_file_is_refused(folder, tmp_path, capsys):
    base = shutil.copytree(folder("untied"), tmp_path / "base")
    saved(base, tmp_path / "adapter")
    (base / "model.safetensors").rename(base / "one.safetensors")
    names = dict.fromkeys([*load_file(base / "one.safetensors"), "model.norm.bias"], "one.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    told = error(capsys, "merge", tmp_path / "adapter", "--base", base, "--output", tmp_path / "out")
    assert "model.norm.bias is in no file instead of only in one.safetensors" in told


def test_fused_experts_are_not_cut_without_the_model(tmp_path, capsys):
    base = experts(tmp_path)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    saved(base, tmp_path / "adapter", target_parameters=parameters, target_modules=["q_proj"])
    told = error(capsys, "convert", tmp_path / "adapter", "--output", tmp_path / "out")
    assert "experts.0.gate_up_proj are gate's and then up's, or one of each in turn" in told
    assert "name a base model whose experts have weights of their own (--base)" in told
    assert main(["adapter", "inspect", str(tmp_path / "adapter")]) == 0
    told = capsys.readouterr().out
    assert "unusual     fused experts: mlp.experts.down_proj, mlp.experts.gate_up_proj\n" in told
    assert told.count("unusual") == 1


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # PEFT's own, though it uses them
def test_fused_experts_are_cut_apart_with_the_model_and_fused_again(tmp_path):
    base, modules = experts(tmp_path), ["q_proj", "gate_proj", "up_proj", "down_proj"]
    expected = logits(saved(base, tmp_path / "adapter", target_modules=modules))
    convert = ["adapter", "convert", "--base", str(base), "--output"]
    assert main([*convert, str(tmp_path / "separate"), str(tmp_path / "adapter")]) == 0
    assert main([*convert, str(tmp_path / "fused"), str(tmp_path / "separate"), "--layout", "fused-experts"]) == 0
    tensors = load_file(tmp_path / "separate" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight" in tensors
    for name in ("separate", "fused"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        found = logits(peft.PeftModel.from_pretrained(theirs, tmp_path / name))
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_an_adapter_with_a_number_that_is_not_finite_is_described_so_and_not_merged(number, folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    tensors[name][3, 2] = number
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    told = error(capsys, "merge", tmp_path / "adapter", "--base", folder("untied"), "--output", tmp_path / "out")
    assert f"tensor {name} has numbers that are not finite" in told and not (tmp_path / "out").exists()
    assert main(["adapter", "inspect", str(tmp_path / "adapter")]) == 0
    assert f"unusual     numbers that are not finite: {name}\n" in capsys.readouterr().out


def sizes_of(model, config, folder):
    """Sizes of a model's queries, keys and values. Only its config.json is written to the folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    layer = next(layer for name, layer in model.named_modules() if name.endswith("layers.3.self_attn"))
    return {name: getattr(layer, name).out_features for name in ATTENTION}


def doubled_query(folder):
    config = CONFIGS["Qwen3_5ForCausalLM"]()
    with torch.device("meta"):
        return sizes_of(transformers.Qwen3_5ForCausalLM(config), config.to_dict(), folder)


def defaults(folder):
    """A config.json as gemma-3-4b-it has it: without the numbers of heads, and without their size."""
    text = {"model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**text, vocab_size=64))
    return sizes_of(model, config, folder)


def some_defaults(folder):
    """A config.json with a number of heads, whose size is not the quotient of the hidden size."""
    text = {"model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**text, vocab_size=64))
    return sizes_of(model, text, folder)


def unknown(folder):
    """A config.json of a type that transformers does not know."""
    folder.mkdir()
    config = {"model_type": "x", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return {"q_proj": 32, "k_proj": 16, "v_proj": 16}


@pytest.mark.parametrize("base", [doubled_query, defaults, some_defaults, unknown])
def test_sizes_of_query_key_and_value_are_known_from_config_json_alone(base, tmp_path):
    sizes = base(tmp_path / "base")
    (tmp_path / "fused").mkdir()
    half = "base_model.model.model.layers.3.self_attn.qkv_proj.lora_"
    made = {f"{half}A.weight": np.ones((2, 32)), f"{half}B.weight": np.ones((sum(sizes.values()), 2))}
    save_file(made, tmp_path / "fused" / "adapter_model.safetensors")
    (tmp_path / "fused" / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    command = ["adapter", "convert", tmp_path / "fused", "--base", tmp_path / "base", "--output", tmp_path / "out"]
    assert main([*map(str, command)]) == 0
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: len(tensors[f"{half}B.weight".replace("qkv_proj", name)]) for name in ATTENTION} == sizes


def test_an_adapter_of_nothing_is_refused(folder, tmp_path, capsys):
    saved(folder("untied"), tmp_path / "adapter")
    save_file({}, tmp_path / "adapter" / "adapter_model.safetensors")
    assert "holds no lora_A and lora_B of any module" in error(capsys, "inspect", tmp_path / "adapter")

"""Adapters are only on modules whose outputs are linear maps of their inputs."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch_models import GROUPED, make_model, save

from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.base_model.model import LoadedModel


class Doubled(nn.Linear):
    """A linear map whose outputs are doubled."""

    def forward(self, x):
        return 2 * super().forward(x)


class Written(nn.Linear):
    """A linear map in other words."""

    def forward(self, x):
        return x @ self.weight.T


def adapted(folder: Path) -> set[str]:
    """Names of modules that can have adapters."""
    model = LoadedModel(folder, torch.device("cpu"), LoadOptions())
    return {target.module.rpartition(".")[2] for target in model.targets}


ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}


def test_a_module_whose_weight_is_read_without_a_call_has_no_adapter(tmp_path, monkeypatch, caplog):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * F.linear(x, self.up_proj.weight))

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", forward)
    assert adapted(make_model(tmp_path, "llama")) == ALL - {"up_proj"}
    assert "adapters do not cover ['up_proj'] of llama" in caplog.text


@pytest.mark.parametrize(("kind", "left_out"), [(Doubled, {"up_proj"}), (Written, set())])
def test_a_module_of_another_class_has_an_adapter_only_if_it_is_a_linear_map(tmp_path, monkeypatch, kind, left_out):
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    create = mlp.__init__

    def create_other(self, config):
        create(self, config)
        self.up_proj = kind(config.hidden_size, config.intermediate_size, bias=False)

    monkeypatch.setattr(mlp, "__init__", create_other)
    assert adapted(make_model(tmp_path, "llama")) == ALL - left_out


def test_the_time_steps_of_jamba_have_no_adapter(tmp_path):
    config = transformers.JambaConfig(**GROUPED, num_experts=2, attn_layer_period=2, attn_layer_offset=1)
    names = adapted(save(tmp_path, config))
    assert "dt_proj" not in names
    assert {"in_proj", "x_proj", "out_proj", "q_proj"} <= names

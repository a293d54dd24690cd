"""Models with experts on torch: adapters leave out routers, and experts in other layouts."""

import pytest
import torch
from torch_models import EXPERTS, make_model

from driver import finish, new_id
from skyrl.backends.operations import CreateModel
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.base_model.loading import LoadOptions, skeleton
from skyrl.backends.torch.base_model.lora import targets_of
from skyrl.types import LoraConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", EXPERTS)
def test_routers_have_no_adapters(tmp_path, kind):
    """A router has a row for each expert, and the gate of a shared expert one row."""
    model = skeleton(make_model(tmp_path, kind), CPU, LoadOptions())
    targets = targets_of(model, "lm_head")
    assert targets and not [one.module for one in targets if one.out_features in (1, 4)]


def test_a_start_names_the_stacked_experts_that_adapters_do_not_cover(tmp_path):
    said: list[str] = []
    TorchBackend(str(make_model(tmp_path, "gpt_oss")), TorchBackendConfig(max_lora_rank=8), said.append).close()
    notes = [line for line in said if line.startswith("adapters do not cover")]
    stacked = "mlp.experts.down_proj, mlp.experts.gate_up_proj"
    assert notes == [f"adapters do not cover {stacked}: these are stacked matrices, not linear maps"]


def test_a_refusal_of_train_mlp_names_the_ways_out(tmp_path):
    backend = TorchBackend(str(make_model(tmp_path, "gpt_oss")), TorchBackendConfig(max_lora_rank=8))
    request = CreateModel(request_id=new_id(), model_id="m", lora_config=LoraConfig(rank=4))
    error = finish(backend, request).error
    backend.close()
    assert error.startswith("lora_config.train_mlp=True: GptOssForCausalLM has no linear map there")
    assert error.endswith("set it to False, or use --backend jax if that supports the architecture")

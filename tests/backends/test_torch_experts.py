"""Models with experts on torch: adapters leave out routers and stacked experts."""

import pytest
import torch
from torch_models import EXPERTS, make_model

from driver import create, finish, new_id, random_datum
from skyrl.backends.operations import ForwardBackward
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.base_model.loading import LoadOptions, skeleton
from skyrl.backends.torch.base_model.lora import targets_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", EXPERTS)
def test_routers_have_no_adapters(tmp_path, kind):
    """A router has a row for each expert, and the gate of a shared expert one row."""
    model = skeleton(make_model(tmp_path, kind), CPU, LoadOptions())
    targets = targets_of(model, "lm_head")
    assert targets and not [one.module for one in targets if one.out_features in (1, 4)]

"""Fixtures of tests with engines, which are processes beside torch: threads of both that wait for each other cost more
than they gain."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

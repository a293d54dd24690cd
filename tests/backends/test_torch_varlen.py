"""Attention over packed sequences in one kernel call equals a call for each sequence."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_models import VOCAB, make_model

from skyrl.backends.torch.base_model.attention import Packed
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.base_model.model import LoadedModel
from skyrl.backends.torch.base_model.varlen import VarlenAttention, kernel_of, one_by_one
from skyrl.backends.torch.config import TorchBackendConfig
from skyrl.backends.torch.opening import worker_options

LENGTHS = (5, 1, 23, 40)


def documented(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """Compute what the documentation of `varlen_attn` says, for query `[tokens, heads, width]`.

    Query i of a sequence sees keys from i - left to i + right, -1 being no limit.
    """
    assert cu_seq_q.dtype == torch.int32 and max_q == max_k == int(cu_seq_q.diff().max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    groups, (left, right) = query.shape[1] // key.shape[1], window_size
    output = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_k[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1).double() for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        logits = q @ k.transpose(1, 2) * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
        ahead = torch.arange(end - start) - torch.arange(end - start)[:, None]
        seen = (ahead <= (right if right >= 0 else end)) & (-ahead <= (left if left >= 0 else end))
        output.append((logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(output).to(query.dtype)


def without_window(*args, window_size, **options):
    return documented(*args, window_size=(-1, 0), **options)


def across_sequences(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    both = torch.tensor([0, len(query)], dtype=torch.int32)
    return documented(query, key, value, both, both, len(query), len(query), **options)


def with_another_gradient(*args, **options):
    output = documented(*args, **options)
    return output.detach() + 2 * (output - output.detach())


def that_fails(*args, **options):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")


def attention(kernel) -> VarlenAttention:
    return VarlenAttention(lambda device, dtype: kernel)


def attend(query, key, value, mask):
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=grouped)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, heads, sum(LENGTHS), 16, generator=generator).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_the_kernel_is_asked_for_what_each_sequence_alone_is(window):
    varlen, (query, key, value) = attention(documented), inputs()
    assert varlen.serves(attend, query, key, value, None, window)
    found = varlen(query, key, value, LENGTHS, None, window)
    for q, k, v, own in zip(*(x.split(LENGTHS, 2) for x in (query, key, value, found)), strict=True):
        ahead = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None]
        mask = (ahead <= 0) & (ahead > -(window or 1000))
        wanted = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "window", "reason"),
    [
        (without_window, 7, "outputs differ"),
        (across_sequences, None, "outputs differ"),
        (with_another_gradient, None, "dq differ"),
        (that_fails, None, "only supports Ampere"),
    ],
)
def test_a_kernel_that_computes_something_else_is_not_used(kernel, window, reason, caplog):
    assert not attention(kernel).serves(attend, *inputs(), None, window)
    assert reason in caplog.text


def test_a_kernel_is_compared_once_for_each_kind_of_input(caplog):
    varlen = attention(that_fails)
    for _ in range(3):
        varlen.serves(attend, *inputs(), None, None)
    varlen.serves(attend, *inputs(torch.bfloat16), None, None)
    assert len(caplog.records) == 2


class Sizes(TorchDispatchMode):
    """Records the size of the largest result."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize(("length", "window"), [(2500, 100), (2100, 1500)])
def test_a_long_sequence_with_a_window_is_that_of_one_mask_without_making_it(length, window):
    generator = torch.Generator().manual_seed(2)
    leaves = [torch.randn(1, heads, length, 4, generator=generator, requires_grad=True) for heads in (2, 1, 1)]
    weights = torch.randn(1, 2, length, 4, generator=generator)
    with Sizes() as sizes:
        output = one_by_one(attend, *leaves, (length,), window)
        found = [output, *torch.autograd.grad((output * weights).sum(), leaves)]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    true = attend(*leaves, (distance >= 0) & (distance < window))
    for one, other in zip(found, [true, *torch.autograd.grad((true * weights).sum(), leaves)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert sizes.largest <= 2 * max(window, 1024) * (max(window, 1024) + window)


def test_deterministic_algorithms_are_left_to_separate_calls():
    torch.use_deterministic_algorithms(True)
    try:
        assert not attention(documented).serves(attend, *inputs(), None, None)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_option_deterministic_leaves_packed_sequences_to_separate_calls(tmp_path, deterministic):
    config = TorchBackendConfig(deterministic=deterministic)
    load = worker_options(config, make_model(tmp_path, "llama")).load
    model = LoadedModel(tmp_path, torch.device("cpu"), load)
    assert (model.attention.kernel is None) == deterministic


def test_a_cpu_has_no_kernel():
    assert kernel_of(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_packed_sequences_of_a_model_have_the_logits_and_gradients_of_separate_calls(tmp_path, family):
    folder, called = make_model(tmp_path, family), []

    def noted(*args, **options):
        called.append(options["window_size"])
        return documented(*args, **options)

    tokens = torch.arange(sum(LENGTHS))[None] % VOCAB
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    model = LoadedModel(Path(folder), torch.device("cpu"), LoadOptions())
    weight = model.hf.get_submodule(model.targets[0].module).weight.requires_grad_()
    answers = []
    for kernel in (None, noted):
        model.attention.kernel = attention(kernel)
        logits = model.base.run(lambda: model.logits(model.hidden(tokens, positions, Packed(LENGTHS))))
        (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[..., 7].sum(), [weight])
        assert bool(called) == (kernel is noted)
        answers.append((logits.detach(), gradient))
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn exists on CUDA only")
@pytest.mark.parametrize("window", [None, 7])
def test_the_kernel_of_a_gpu_is_used(window):
    found = [x.cuda() for x in inputs(torch.bfloat16)]
    assert VarlenAttention().serves(attend, *found, None, window)

"""Attention over packed sequences in one kernel call: `torch.nn.attention.varlen.varlen_attn` (FlashAttention).

The kernel exists on CUDA only, for float16 and bfloat16. Before its first use with each kind of input, it is compared
with scaled dot product attention. It is not used if the outputs or gradients differ.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

log = logging.getLogger(__name__)

TRIED = (37, 64, 5)
"""Lengths of the sequences of the comparison, in tokens."""
WINDOW_TRIED = 16
"""Maximum window of the comparison, in tokens."""
TOLERANCE = 4.0
"""Maximum difference from float32 attention, as a multiple of the error of scaled dot product attention in the same
dtype."""
SMALLEST_BLOCK = 1024
"""Minimum queries of a block of a sequence that is longer than its window."""

Kernel = Callable[..., Any]
"""Function with the parameters of `torch.nn.attention.varlen.varlen_attn`."""
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""(query, key, value, mask) -> output. Mask None means causal."""


def kernel_of(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Return PyTorch's kernel for this device and dtype; None if there is none."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # PyTorch before 2.10
        return None
    return varlen_attn


class VarlenAttention:
    """Causal attention over packed sequences with a kernel for sequences of different lengths.

    Args:
        find: Returns the kernel for a device and dtype; None if there is none.
    """

    def __init__(self, find: Callable[[torch.device, torch.dtype], Kernel | None] = kernel_of):
        self._find = find
        self._agrees: dict[Hashable, bool] = {}
        """Result of the comparison by kind of input."""
        self._ends: tuple[Hashable, Tensor] | None = None
        """Boundaries of the last call's sequences, int32 `[sequences + 1]`, with its lengths and device."""

    @property
    def is_used(self) -> bool:
        """True if the kernel has computed inputs of some kind correctly."""
        return any(self._agrees.values())

    def serves(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> bool:
        """Return True if the kernel computes inputs of this kind. The first call of each kind runs the comparison.

        `attend` is scaled dot product attention with this scale. The kernel is not used for deterministic algorithms.
        """
        if self._find(query.device, query.dtype) is None or torch.are_deterministic_algorithms_enabled():
            return False
        kind = (query.device, query.dtype, query.shape[1], *key.shape[1::2], value.shape[3], scale, window is None)
        if kind not in self._agrees:
            tried = None if window is None else min(window, WINDOW_TRIED)
            with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):  # not those of a checkpointed layer
                why = self._difference(attend, query, key, value, scale, tried)
            self._agrees[kind] = not why
            if why:
                log.warning(
                    "attention of packed sequences takes a call for each, as varlen_attn cannot be used: %s", why
                )
        return self._agrees[kind]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Attend within each sequence. Inputs and output `[1, heads, tokens, width]`, with `sum(lengths)` tokens.

        Each token sees itself and the tokens before it; with `window`, only the last `window` of these.
        """
        kernel = self._find(query.device, query.dtype)
        assert kernel is not None, "call `serves` first"
        ends, longest = self._boundaries(lengths, query.device), max(lengths)
        output = kernel(
            *(x[0].transpose(0, 1).contiguous() for x in (query, key, value)),
            ends,
            ends,
            longest,
            longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(0, 1)[None]

    def _boundaries(self, lengths: Sequence[int], device: torch.device) -> Tensor:
        """Token positions at which sequences start, and the end of the last one. All layers of a pass share them."""
        kind = (tuple(lengths), device)
        if self._ends is None or self._ends[0] != kind:
            starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
            self._ends = kind, starts.to(device, torch.int32)
        return self._ends[1]

    def _difference(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> str:
        """Compare outputs and gradients with `attend` on random inputs of this kind.

        Returns the reason for which the kernel cannot be used; empty if there is none.
        """
        count = sum(TRIED)
        random = [torch.randn(1, x.shape[1], count, x.shape[3], device=x.device) for x in (query, key, value)]

        def separate(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return one_by_one(attend, query, key, value, TRIED, window)

        def together(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self(query, key, value, TRIED, scale, window)

        rounded = [x.to(query.dtype) for x in random]
        try:
            exact, usual, fast = (
                _with_gradients(separate, [x.float() for x in rounded]),
                _with_gradients(separate, rounded),
                _with_gradients(together, rounded),
            )
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            return str(error)
        largest = max(float(x.abs().max()) for x in exact)  # a gradient may be 0
        for name, true, near, found in zip(("outputs", "dq", "dk", "dv"), exact, usual, fast, strict=True):
            bound = TOLERANCE * float((near - true).abs().max()) + 1e-5 * largest
            difference = float((found - true).abs().max())
            if not difference <= bound:  # also if it is NaN
                return f"its {name} differ by {difference:g}, bound {bound:g}"
        return ""


def one_by_one(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], window: int | None
) -> Tensor:
    """Attend within each sequence by separate calls. Inputs, output and `window` as in `VarlenAttention.__call__`.

    Queries of a sequence longer than its window take a call for each block, against the keys that the block sees, so
    masks grow with tokens times window, not with the square of tokens.
    """
    outputs = []
    for q, k, v in zip(*(x.split([*lengths], 2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        if window is None or length <= window:
            outputs.append(attend(q, k, v, None))
            continue
        block = max(window, SMALLEST_BLOCK)
        for start in range(0, length, block):
            first, end = max(0, start - window + 1), min(start + block, length)
            places = torch.arange(first, end, device=q.device)
            distance = places[start - first :, None] - places
            mask = (distance >= 0) & (distance < window)
            outputs.append(attend(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], mask))
    return torch.cat(outputs, 2)


def _with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Output, and gradients of a weighted sum of it with respect to the inputs, all in float32."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attend(*leaves)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    gradients = torch.autograd.grad((output.float() * weights).sum(), leaves)
    return [output.detach().float(), *(x.float() for x in gradients)]


def _as_it_is(saved: Tensor) -> Tensor:
    return saved

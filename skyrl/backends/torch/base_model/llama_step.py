"""A decode step of models with the layers of Llama, in few calls: no modules, hooks, masks or casts per layer.

At few rows, a step of transformers' modules mostly waits for Python. `LlamaStep` computes the same from the same
parameters, which it looks up in each step, so weights may be replaced. `fits` compares the names and types of modules;
`ModelCheck.steps` then compares logits, because models with equal names may still scale, cap or shift values.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyrl.backends.torch.base_model.attention import DecodeBurst

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}
"""Norms of queries and keys, which a model may have."""
MLP = {"gate_proj", "up_proj", "down_proj"}

Adapt = Callable[[str, Tensor, Tensor], Tensor]
"""(module, its inputs, its outputs) -> outputs with adapters."""


class LlamaStep:
    """Computes hidden states of one new token per row.

    Args:
        model: The model, which `fits`.
        body: The part of it that computes hidden states.
        windows: Window of each layer, see `Attention.windows`. Some models do not have it in their modules.
        adapt: Applies adapters; None: there are none.
    """

    def __init__(
        self, model: nn.Module, body: Any, windows: Mapping[int | None, int | None], adapt: Adapt | None = None
    ):
        self._body, self._windows, self._adapt = body, windows, adapt
        self._names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._epsilons: dict[float, Tensor] = {}
        """Epsilons of norms as tensors: an operation with a number takes several."""
        self._angles: tuple[Tensor, Tensor] | None = None
        """Cosines and sines `[positions, width]`."""

    @staticmethod
    def fits(body: Any) -> bool:
        """Return True if the modules have the names and types of Llama's, with or without norms of queries and keys."""
        if _children(body) != {"embed_tokens", "layers", "norm", "rotary_emb"} or not _is_norm(body.norm):
            return False
        for layer in body.layers:
            if _children(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
                return False
            attention, mlp = layer.self_attn, layer.mlp
            norms = [layer.input_layernorm, layer.post_attention_layernorm]
            if _children(attention) == ATTENTION | NORMS:
                norms += [attention.q_norm, attention.k_norm]
            elif _children(attention) != ATTENTION:
                return False
            linear = [getattr(attention, name) for name in ATTENTION] + [getattr(mlp, name, None) for name in MLP]
            if _children(mlp) != MLP | {"act_fn"} or not all(type(x) is nn.Linear for x in linear):
                return False
            if not all(_is_norm(norm) for norm in norms):
                return False
        return type(body.embed_tokens) is nn.Embedding

    def __call__(self, tokens: Tensor, view: DecodeBurst) -> Tensor:
        """Final hidden states `[rows, 1, hidden]` of `tokens` int64 `[rows, 1]`."""
        x = F.embedding(tokens[:, 0], self._body.embed_tokens.weight)
        cosines, sines = (angles[view.positions] for angles in self._angles_of(x, view.cells.shape[1]))
        for layer in self._body.layers:
            x = self._layer(layer, x, cosines, sines, view)
        return self._normed(self._body.norm, x)[:, None]

    def _layer(self, layer: Any, x: Tensor, cosines: Tensor, sines: Tensor, view: DecodeBurst) -> Tensor:
        attention, mlp = layer.self_attn, layer.mlp
        rows, width = len(x), attention.head_dim
        inputs = self._normed(layer.input_layernorm, x)
        query = self.linear(attention.q_proj, inputs).contiguous().view(rows, -1, width)
        key = self.linear(attention.k_proj, inputs).contiguous().view(rows, -1, width)
        value = self.linear(attention.v_proj, inputs)
        if hasattr(attention, "q_norm"):
            query, key = self._normed(attention.q_norm, query), self._normed(attention.k_norm, key)
        query, key = (_rotated(states, cosines, sines) for states in (query, key))
        keys, values = view.write(attention.layer_idx, key, value)
        bias = view.bias(self._windows[attention.layer_idx], keys.shape[1])
        heads, width = bias.shape[0], keys.shape[3]
        weights = torch.baddbmm(
            bias, query.view(heads, -1, width), keys.view(heads, -1, width).transpose(1, 2), alpha=attention.scaling
        ).softmax(-1)
        output = weights @ values.view(heads, -1, values.shape[3])
        x = x + self.linear(attention.o_proj, output.view(rows, -1))
        inputs = self._normed(layer.post_attention_layernorm, x)
        inner = mlp.act_fn(self.linear(mlp.gate_proj, inputs)) * self.linear(mlp.up_proj, inputs)
        return x + self.linear(mlp.down_proj, inner)

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        """RMS norm over the last dimension, in fewer operations than `F.rms_norm`."""
        epsilon: float = norm.variance_epsilon
        if epsilon not in self._epsilons:
            self._epsilons[epsilon] = torch.tensor(epsilon, dtype=x.dtype, device=x.device)
        length = torch.linalg.vector_norm(x, 2, -1, True)
        scale = torch.addcmul(self._epsilons[epsilon], length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(norm.weight)

    def linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        """Outputs `[rows, out]` of a module and its adapters for inputs `[rows, in]`."""
        output = linear(x, module.weight, module.bias)
        return output if self._adapt is None else self._adapt(self._names[module], x, output)

    def _angles_of(self, x: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        if self._angles is None or len(self._angles[0]) < positions:
            places = torch.arange(2 ** (positions - 1).bit_length(), device=x.device)[None]
            cosines, sines = self._body.rotary_emb(x[None], places)
            self._angles = cosines[0], sines[0]
        return self._angles


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of few rows `[rows, in]`. The result `[rows, out]` is transposed in memory.

    With the weights as left operand, MKL shares the work among threads better, and reads weights several times as fast
    for less than 16 rows.
    """
    outputs, inputs = weight.shape
    if len(x) == 1 and outputs % 2 == 0:  # a product with one vector runs on one thread
        product = torch.bmm(weight.view(2, outputs // 2, inputs), x.t().expand(2, inputs, 1)).view(outputs, 1)
    else:
        product = torch.mm(weight, x.t())
    return (product if bias is None else product.add_(bias[:, None])).t()


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate states `[rows, heads, width]`."""
    half = states.shape[2] // 2
    turned = torch.cat((-states[..., half:], states[..., :half]), -1)
    return torch.addcmul(states * cosines, turned, sines)


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_norm(module: nn.Module) -> bool:
    own = [name for name, _ in module.named_parameters()]
    return type(module).__name__.endswith("RMSNorm") and own == ["weight"] and hasattr(module, "variance_epsilon")

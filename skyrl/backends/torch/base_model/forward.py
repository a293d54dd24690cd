"""Forward passes of a causal language model of transformers, through an attention of ours or its own."""

from typing import Any

import torch
from torch import Tensor, nn

from skyrl.backends.torch.base_model.attention import Attention, DecodeBurst, Packed, Paged, PagedParts
from skyrl.backends.torch.base_model.llama_step import Adapt, LlamaStep


class Forward:
    """Hidden states and logits of a model.

    Args:
        hf: The model, which has a vocabulary projection.
        attention: A registered attention.
    """

    def __init__(self, hf: Any, attention: Attention):
        self.hf, self.config, self.attention = hf, hf.config, attention
        self.own_attention = False
        """True if the model uses the attention of transformers instead of ours. A row then holds a single sequence."""
        self.step: LlamaStep | None = None
        """Computes the steps of a `DecodeBurst`; None: the modules of transformers."""
        self.head: nn.Module = hf.get_output_embeddings()
        self.dtype: torch.dtype = self.head.weight.dtype  # pyright: ignore[reportAttributeAccessIssue]
        """Dtype of the base model's computations."""
        self.vocab_size = min(int(self.config.vocab_size), len(self.head.weight))  # pyright: ignore
        """Number of tokens that the model has logits of."""
        inputs = hf.get_input_embeddings()
        parts = (child for child in hf.children() if any(module is inputs for module in child.modules()))
        self._body: Any = next(parts, hf) if hf.base_model is hf else hf.base_model  # Llama 4 has a wrong prefix

    def use_own_step(self, adapt: Adapt | None = None) -> bool:
        """Compute decode steps with `LlamaStep` if the model has the layers of Llama. Returns True if it has."""
        on_cpu = self.head.weight.device.type == "cpu"  # pyright: ignore[reportAttributeAccessIssue]
        fits = type(self.head) is nn.Linear and LlamaStep.fits(self._body)
        if on_cpu and self.dtype == torch.float32 and fits:
            self.step = LlamaStep(self.hf, self._body, self.attention.windows, adapt)
        return self.step is not None

    def hidden(self, tokens: Tensor, positions: Tensor, view: Packed | Paged | PagedParts) -> Tensor:
        """Final hidden states `[rows, tokens, hidden]` of `tokens` int64 `[rows, tokens]`. Call within `base.run`."""
        if self.own_attention:
            return self._body(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state
        if self.step is not None and isinstance(view, DecodeBurst):
            return self.step(tokens, view)
        self.attention.view = view
        output = self._body(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True)
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states. Call within `base.run`."""
        hidden = hidden.to(self.dtype)  # state space models keep residuals in float32
        if self.step is None or torch.is_grad_enabled():
            logits = self.head(hidden)
        else:
            flat = self.step.linear(self.head, hidden.reshape(-1, hidden.shape[-1]))  # pyright: ignore
            logits = flat.contiguous().view(*hidden.shape[:-1], -1)
        if scale := getattr(self.config, "logit_scale", None):
            logits = logits * float(scale)
        if divisor := getattr(self.config, "logits_scaling", None):
            logits = logits / float(divisor)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def called_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Cache shapes of all layers; empty unless each layer calls our attention once. Call within `base.run`."""
        if self.own_attention:
            return ()
        self.attention.recorded = recorded = []
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.head.weight.device)  # pyright: ignore
        self.hidden(token, token, Packed([1]))
        self.attention.recorded = None
        layers = dict(recorded)
        wanted = range(len(recorded))
        return tuple(layers[layer] for layer in wanted) if layers.keys() == set(wanted) else ()

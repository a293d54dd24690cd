"""Forward passes of a causal language model of transformers, through an attention of ours or its own."""

from typing import Any

import torch
from torch import Tensor, nn

from skyrl.backends.torch.base_model.attention import Attention, Packed, Paged, PagedParts


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
        self.head: nn.Module = hf.get_output_embeddings()
        self.dtype: torch.dtype = self.head.weight.dtype  # pyright: ignore[reportAttributeAccessIssue]
        """Dtype of the base model's computations."""
        self.vocab_size = min(int(self.config.vocab_size), len(self.head.weight))  # pyright: ignore
        """Number of tokens that the model has logits of."""
        inputs = hf.get_input_embeddings()
        parts = (child for child in hf.children() if any(module is inputs for module in child.modules()))
        self._body: Any = next(parts, hf) if hf.base_model is hf else hf.base_model  # Llama 4 has a wrong prefix

    def hidden(self, tokens: Tensor, positions: Tensor, view: Packed | Paged | PagedParts) -> Tensor:
        """Final hidden states `[rows, tokens, hidden]` of `tokens` int64 `[rows, tokens]`. Call within `base.run`."""
        if self.own_attention:
            return self._body(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state
        self.attention.view = view
        output = self._body(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True)
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states. Call within `base.run`."""
        hidden = hidden.to(self.dtype)  # state space models keep residuals in float32
        logits = self.head(hidden) * float(getattr(self.config, "logit_scale", None) or 1.0)
        logits = logits / float(getattr(self.config, "logits_scaling", None) or 1.0)
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

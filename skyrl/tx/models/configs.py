"""A Hugging Face configuration together with settings of training: LoRA capacity, chunking, checkpointing.

Importing this module imports transformers (and torch, if installed), so import it inside functions.
"""

from typing import Any, Literal

from transformers import PretrainedConfig

from skyrl.tx.design.config import experts_of

UNROLLED_LAYERS = 8
"""Largest number of layers that are unrolled by default."""


class ModelConfig(PretrainedConfig):
    """Configuration of a base model with settings of its training."""

    nested_names = False
    """True if adapter files use the module names of a multimodal model (`nested_name`)."""

    def __init__(
        self,
        config: PretrainedConfig | dict[str, Any],
        *,
        max_lora_adapters: int,
        max_lora_rank: int,
        shard_attention_heads: bool,
        loss_chunk_size: int = 0,
        gradient_checkpointing: bool | Literal["selective"] = False,
        mhc_expansion_rate: int = 1,
        unroll_layers: bool | None = None,
        max_context_length: int = 0,
    ):
        """Wrap a Hugging Face configuration, or the dictionary of one.

        Args:
            config: The configuration. Its members become members of this object, and `dtype` becomes a plain string.
            max_lora_adapters: Maximum number of concurrent adapters.
            max_lora_rank: Maximum rank of an adapter.
            shard_attention_heads: True to shard attention over the mesh axis `tp`.
            loss_chunk_size: Tokens per chunk of the vocabulary projection; 0: no chunking.
            gradient_checkpointing: Recompute activations in the backward pass. True: only the inputs of layers are
                kept. "selective": the results of products with weights are kept, too.
            mhc_expansion_rate: Number of residual streams. Above 1, their connectors are trainable.
            unroll_layers: Unroll the layers instead of compiling a loop: faster to run, slower to compile. None:
                unroll if there are at most `UNROLLED_LAYERS`.
            max_context_length: Maximum length of served sequences in tokens; 0: the model's own limit.
        """
        settings = {
            "max_lora_adapters": max_lora_adapters,
            "max_lora_rank": max_lora_rank,
            "shard_attention_heads": shard_attention_heads,
            "loss_chunk_size": loss_chunk_size,
            "gradient_checkpointing": gradient_checkpointing,
            "mhc_expansion_rate": mhc_expansion_rate,
            "unroll_layers": unroll_layers,
            "max_context_length": max_context_length,
        }
        # The inherited constructor calls get_text_config, which needs all settings.
        super().__init__(**((config if isinstance(config, dict) else config.to_dict()) | settings))
        if self.unroll_layers is None:
            self.unroll_layers = getattr(self.get_config(), "num_hidden_layers", 0) <= UNROLLED_LAYERS
        if self.dtype is not None:
            self.dtype = str(self.dtype).removeprefix("torch.")

    # The configuration is static data of a model, which JAX compares and hashes.
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def get_config(self) -> Any:
        """Return the text configuration of a multimodal model, or this one for others."""
        return getattr(self, "text_config", None) or self

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "ModelConfig":
        """Return the text configuration with the same training settings. Returns self if the model is not multimodal.

        `decoder` and `encoder` are part of the inherited signature and have no effect.
        """
        text = self.get_config()
        if text is self:
            return self
        return ModelConfig(
            text,
            max_lora_adapters=self.max_lora_adapters,
            max_lora_rank=self.max_lora_rank,
            shard_attention_heads=self.shard_attention_heads,
            loss_chunk_size=self.loss_chunk_size,
            gradient_checkpointing=self.gradient_checkpointing,
            mhc_expansion_rate=self.mhc_expansion_rate,
            unroll_layers=self.unroll_layers,
            max_context_length=self.max_context_length,
        )

    def get_num_experts(self) -> int | None:
        """Return the number of experts per layer of a mixture-of-experts model. None for a dense model."""
        return experts_of(self.get_text_config())

    @property
    def architecture(self) -> str:
        """Hugging Face name of the model class, such as "Qwen3ForCausalLM"; empty if the configuration has none."""
        return (self.architectures or [""])[0]

"""A Hugging Face configuration together with how we train: LoRA capacity, chunking, checkpointing.

Importing this module imports transformers (and torch, where it is installed); do it inside functions.
"""

from typing import Any, Literal

from transformers import PretrainedConfig

from skyrl.tx.design.config import experts_of

UNROLLED_LAYERS = 8
"""Layers of the deepest model that is unrolled unless told otherwise."""


class ModelConfig(PretrainedConfig):
    """The configuration of a base model and the settings of its training."""

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
            config: Its members become members of this object; `dtype` always as a plain string.
            max_lora_adapters: Concurrent adapters.
            max_lora_rank: Largest rank of an adapter.
            shard_attention_heads: Whether attention is sharded over the mesh axis `tp`.
            loss_chunk_size: Tokens per chunk of the vocabulary projection; 0 does not chunk.
            gradient_checkpointing: Recompute activations in the backward pass: all but the inputs of layers, or with
                "selective" all but those and the results of products with weights.
            mhc_expansion_rate: Residual streams; their connectors are trainable when it is above 1.
            unroll_layers: Compile layers one by one rather than as a loop, which runs faster and compiles slower.
                None: if there are few.
            max_context_length: Tokens of the longest sequence that is served; 0: as many as the model was made for.
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
        # The inherited constructor calls get_text_config, so it is given everything.
        super().__init__(**((config if isinstance(config, dict) else config.to_dict()) | settings))
        if self.unroll_layers is None:
            self.unroll_layers = getattr(self.get_config(), "num_hidden_layers", 0) <= UNROLLED_LAYERS
        if self.dtype is not None:
            self.dtype = str(self.dtype).removeprefix("torch.")

    # A model keeps its configuration as a static part, which JAX compares and hashes.
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def get_config(self) -> Any:
        """The text configuration of a multimodal model, else this one."""
        return getattr(self, "text_config", None) or self

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "ModelConfig":
        """The text configuration with the same training settings; this one if it is not multimodal.

        `decoder` and `encoder` are part of the inherited signature and select nothing here.
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
        """Experts per layer of a mixture-of-experts model, None of a dense one."""
        return experts_of(self.get_text_config())

    @property
    def architecture(self) -> str:
        """Hugging Face name of the model class, such as "Qwen3ForCausalLM"; empty if the configuration has none."""
        return (self.architectures or [""])[0]

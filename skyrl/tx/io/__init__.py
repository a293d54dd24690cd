"""Weights as files: base models, PEFT adapters, exports for transformers and vLLM."""

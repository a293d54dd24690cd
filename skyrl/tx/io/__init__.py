"""Files of weights: base models, PEFT adapters, exports for transformers and vLLM."""

"""The independent reference for models: Hugging Face transformers and PEFT, in float32 on the CPU."""

from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

EXPORT = "adapter_model.safetensors"


def load(model: Path | str, adapter: Path | None = None):
    """A Hugging Face model, with a trainable PEFT adapter if one is named."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return base.eval() if adapter is None else PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()


def logits(model, tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocab]`."""
    return model(torch.tensor([tokens])).logits[0]


def logprobs(model, tokens: list[int]) -> torch.Tensor:
    """Log-probability of each token after the first, differentiable: `[tokens - 1]`."""
    rows = torch.log_softmax(logits(model, tokens[:-1]).float(), -1)
    return rows.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def penalised_greedy(model, prompt: list[int], count: int, repetition=1.0, presence=0.0, frequency=0.0) -> list[int]:
    """The most likely continuation where tokens pay for having been there before.

    The repetition penalty is that of transformers; the others are OpenAI's formula, on what was generated.
    """
    tokens, penalty = list(prompt), RepetitionPenaltyLogitsProcessor(repetition)
    with torch.no_grad():
        for _ in range(count):
            scores = penalty(torch.tensor([tokens]), logits(model, tokens)[-1:].float())[0].numpy()
            times = np.bincount(tokens[len(prompt) :], minlength=len(scores))
            tokens.append(int((scores - frequency * times - presence * (times > 0)).argmax()))
    return tokens[len(prompt) :]


def gradients(model) -> dict[str, np.ndarray]:
    """The adapter's gradients by their names in a PEFT file."""
    return {
        name.replace(".default", ""): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if "lora_" in name and parameter.grad is not None
    }


def adapter(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a PEFT file."""
    return load_file(folder / EXPORT)

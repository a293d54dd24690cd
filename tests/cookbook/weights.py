"""The weights tools of tinker-cookbook on a checkpoint of this server, checked with transformers and PEFT.

Run in the environment with the cookbook: `python weights.py checkpoint=... sampler=... model_name=FOLDER log_path=...`.
Downloads the checkpoint (encrypted on its way), builds a PEFT adapter and a merged model of it, and writes to
`metrics.jsonl` by how many nats the log-probabilities of a text that these two give differ, at most, from those of the
server's sampler; and those of the untrained model, from which they must differ.
"""

import json
import sys
from pathlib import Path

import tinker
import torch
from peft import PeftModel
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "Mia has 2 apples and gets 4 more. How many apples has Mia now? \\boxed{6} The answer is six."


def log_probabilities(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    base, log = options["model_name"], Path(options["log_path"])
    adapter = weights.download(tinker_path=options["checkpoint"], output_dir=str(log / "adapter"))
    weights.build_lora_adapter(base_model=base, adapter_path=adapter, output_path=str(log / "peft"))
    weights.build_hf_model(
        base_model=base, adapter_path=adapter, output_path=str(log / "merged"), dtype="float32", merge_strategy="full"
    )

    tokens = AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"]
    sampler = tinker.ServiceClient().create_sampling_client(model_path=options["sampler"]).result()
    served = torch.tensor(sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()[1:])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = {"difference/trained": log_probabilities(plain, tokens)}
    found["difference/adapter"] = log_probabilities(PeftModel.from_pretrained(plain, log / "peft"), tokens)
    merged = AutoModelForCausalLM.from_pretrained(log / "merged", dtype=torch.float32)
    found["difference/merged"] = log_probabilities(merged, tokens)
    row = {name: (served - other).abs().max().item() for name, other in found.items()}
    if row["difference/trained"] < 0.01:
        raise ValueError(f"{options['sampler']} is not trained: {row}")
    (log / "metrics.jsonl").write_text(json.dumps({"step": 0, **row}) + "\n")


if __name__ == "__main__":
    main()

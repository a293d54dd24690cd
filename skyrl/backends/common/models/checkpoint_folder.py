"""Folders of checkpoints and snapshots: names of their files, and the header that describes the model.

Both kinds are self-describing and committed by a hash manifest (`skyrl.utils.files.atomic_folders`). `training_files`
describes the other files of a training checkpoint.
"""

import json
from collections.abc import Mapping
from typing import Any

from skyrl.backends.common.models.kind import Kind
from skyrl.errors import RequestError, StorageError
from skyrl.types import AdapterConfig, LoraConfig
from skyrl.utils.files.atomic_folders import Content, open_checked, open_folder

TRAINING_TENSORS, TRAINING_STATE = "training_state.safetensors", "training_state.json"
PEFT_TENSORS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
README = "README.md"
ON_TIED = """# LoRA adapter on a tied vocabulary projection

The base model's vocabulary projection shares its weights with the embedding, and this adapter changes the projection
alone. Loaded by PEFT and not merged, it is right. PEFT's `merge_and_unload` adds it to both, and the merged model is
wrong. Two ways are right: `skyrl adapter merge`, or weights of the projection's own before PEFT merges:

```python
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("base")
base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
base.config.tie_word_embeddings = False
merged = PeftModel.from_pretrained(base, "adapter").merge_and_unload()
```

Adapters that are trained with `train_unembed=False` leave the projection as it is.
"""
IN_MEMORY = "in_memory.json"
"""Marker file of a folder whose weights are only in the memory of the process that published them."""
FORMAT, FORMAT_OF_PARTS = 2, 3
"""Formats of training checkpoints: 2 has one file of tensors, 3 has files of several processes. Format 1 has the
tensors of format 2 if torch wrote it, or stacked and padded tensors if JAX wrote it."""
READABLE = (1, FORMAT, FORMAT_OF_PARTS)


def peft_files(tensors: Content, config: Mapping[str, Any], on_tied: bool) -> dict[str, Content]:
    """Files of an adapter in PEFT format.

    Args:
        tensors: Content of the safetensors file.
        config: Content of adapter_config.json.
        on_tied: True if the adapter changes a vocabulary projection that is tied to the embedding. A README then
            says so.
    """
    files: dict[str, Content] = {PEFT_TENSORS: tensors, PEFT_CONFIG: json.dumps(config, indent=1).encode()}
    return files | ({README: ON_TIED.encode()} if on_tied else {})


def pack_header(kind: Kind, base_model: str, step: int, sequences: int | None, form: int = FORMAT) -> bytes:
    """Content of `TRAINING_STATE` for a model after `step` optimizer steps, with `sequences` in its gradient sums."""
    header = {
        "format": form,
        "base_model": base_model,
        "step": step,
        "lora_config": kind.lora_config.model_dump(),
        "value_head": kind.value_head,
        "sequences": sequences,
    }
    return json.dumps(header, indent=1).encode()


def header_of(files: Mapping[str, bytes], path: str) -> dict[str, Any]:
    """Return the header among a folder's files. Raises the errors of `stored_kind`."""
    if IN_MEMORY in files:
        raise RequestError(
            f"path={path}: its weights were published with persist=False and are, at most, in the memory of the "
            "process that did; save the weights again with persist=True"
        )
    if TRAINING_STATE not in files:
        raise RequestError(f"path={path} is no training checkpoint; use one that save_weights (save_state) made")
    header = json.loads(files[TRAINING_STATE])
    if header["format"] not in READABLE:
        raise StorageError(f"{path} has format {header['format']}; this version reads formats up to {READABLE[-1]}")
    return header


def kind_of(header: Mapping[str, Any]) -> Kind:
    """Return the kind of model that a header describes."""
    given = header["lora_config"]
    config = LoraConfig if given.keys() <= LoraConfig.model_fields.keys() else AdapterConfig
    return Kind(config(**given), header.get("value_head", False))


def stored_kind(path: str, digest: str | None = None) -> Kind:
    """Return the kind of model in a training checkpoint or snapshot. Reads only the header.

    Raises:
        StorageError: Files are missing or damaged.
        RequestError: The folder is not a training checkpoint.
    """
    try:
        with open_folder(path) as files:
            header = next(file.reader.read() for file in files if file.name == TRAINING_STATE)
        return kind_of(header_of({TRAINING_STATE: header}, path))
    except (StorageError, OSError, ValueError, KeyError, TypeError, StopIteration):
        with open_checked(path, digest) as files:  # raises a detailed error, and moves damaged files aside
            return kind_of(header_of(files, path))


def check_served_rank(rank: int, max_rank: int, path: str) -> None:
    """Raise `RequestError` for an adapter that is too large for sampling."""
    if rank > max_rank:
        raise RequestError(f"path={path}: rank {rank} is above max_lora_rank={max_rank}; start the server with more")

"""The rows of config-fields.md, the public table of the configuration tree, and another value for each field."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    owner: str
    field: str
    type: str
    default: str


def rows() -> Iterator[Row]:
    owner = ""
    for line in (Path(__file__).parent / "config-fields.md").read_text().splitlines():
        if line.startswith("## "):
            owner = line[3:]
        elif found := re.fullmatch(r"\| `(\w+)` \| `(.+)` \| `(.+)` \|", line):
            yield Row(owner, *found.groups())


ROWS = list(rows())
OWNERS = sorted({row.owner for row in ROWS})


def paths(owner: str = "SkyRLTrainConfig", path: str = "") -> Iterator[tuple[str, Row]]:
    """Every plain field of the tree, with its row; fields of a section that is None by default too."""
    for row in ROWS:
        if row.owner == owner:
            section = row.type.removeprefix("Optional[").removesuffix("]")
            if section in OWNERS:
                yield from paths(section, f"{path}{row.field}.")
            else:
                yield path + row.field, row


PATHS = list(paths())
ONE_OF = {
    "sequence_parallel_backend": "ulysses",
    "strategy": "megatron",
    "lora_type": "canonical_lora",
    "kl_estimator_type": "k1",
    "loss_reduction": "sequence_mean",
    "tis_ratio_type": "token",
    "sequence_mask_metric": "geometric",
    "trainer.algorithm.kl_ctrl.type": "adaptive",
    "trainer.algorithm.dynamic_sampling.type": "filter",
    "resume_mode": "from_path",
    "logger": "console",
    "source": "file",
    "backend": "vllm",
    "weight_sync_backend": "gloo",
    "distributed_executor_backend": "mp",
    "override_existing_update_group": "disable",
    "param_dtype": "fp16",
    "reduce_dtype": "bf16",
    "buffer_dtype": "bf16",
    "adam_betas": [0.5, 0.75],
    "clip_ratio_c": 1.5,
    "logprobs": 0,
}
"""Another value of fields that do not take every value of their type."""
BY_TYPE = {
    "str": "another",
    "int": 7,
    "float": 0.625,
    "dict": {"a": [1, None, "b"]},
    "Dict[str, Any]": {"a": {"b": 0.5}},
}


def another(path: str, row: Row) -> Any:
    """A value that `row` allows and that is not its default, if there is any."""
    if path in ONE_OF or row.field in ONE_OF:
        return ONE_OF.get(path, ONE_OF.get(row.field))
    kind = row.type.removeprefix("Optional[").removesuffix("]") if row.type.startswith("Optional") else row.type
    if kind in ("bool", "Union[bool, int]"):
        return row.default != "True"
    if kind.startswith("List["):
        return [BY_TYPE[kind[5:-1].rstrip("]")]]
    return BY_TYPE[kind]

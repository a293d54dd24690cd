"""The page of supported models, from the registry. Run: `python -m skyrl.tx.families.page > docs/models.md`."""

from itertools import groupby
from types import SimpleNamespace

from skyrl.tx.design.design import DeltaNet, Design, Experts, LatentAttention
from skyrl.tx.design.family import Size, made_config
from skyrl.tx.families import FAMILIES, design_of

ROUTING_BOUNDS = {"float32": 1e-5, "bfloat16": 0.02}
"""Gap of scores above which a token has the same experts in training and sampling, by the type of base weights."""
HEAD = """# Supported models

What the JAX backend loads. A model is found by `architectures` in its `config.json`; another one is refused before its
weights are downloaded. The [torch backend](torch.md) loads others.

| architecture | models | attention | layers | make one |
| --- | --- | --- | --- | --- |
"""
TAIL = """
Rotary embedding is of the kinds {rotations},
per type of layer where the family has several. Embeddings may be tied. Weights may be float32, bfloat16 or float16;
quantised ones are refused. Tensors are read one at a time: on a CPU, loading takes the memory of the loaded model and
of its largest tensor; on an accelerator, the host needs that of one parameter of all layers. Of a multimodal model the
text part is loaded, trained, sampled and exported as a text model; images are refused.

Adapters cover all linear maps of attention, feed-forward parts and experts (each expert has matrices of its own, of the
adapter's rank), and the vocabulary projection, tied or not. Routers are not adapted. With experts an adapter is as many
times larger; `max_lora_rank` bounds it.

A token has the same experts in training as in sampling where the gap of its scores is above {float32:g} with a float32
base, and above {bfloat16:g} with a bfloat16 one (`benchmarks/bench_routing.py` counts those below). The gap is the
difference between the last expert, or group of experts, that is chosen and the first one that is not; scores are
probabilities, or sigmoids with their corrections. A token that is routed differently is another input to later layers
and to later tokens of its sequence, which the bounds do not cover.

Each family is checked on a small random model of nine layers that transformers wrote
(`tests/backends/test_families.py`):

- logits at positions from 0 and from 20,000 on, and log-probabilities from 20,000 on, against transformers, in
  float32, to 1e-4;
- a prompt in chunks and decoding through the paged cache, and packed sequences, against the pass as a whole;
- gradients of an adapter against PEFT and torch, and with gradient checkpointing;
- our adapter in PEFT (`PeftModel.from_pretrained`), and one of PEFT's on all linear maps here, by logits;
- an export: bit for bit the checkpoint without an adapter, and what the adapter computes with one merged;
- the spread of fresh adapters, which is PEFT's;
- greedy samples against `generate`, with shared prefixes (but see below), and rows of several adapters together;
- several samples of a prompt, and the same prompt after its pages went to others, by log-probabilities of the pass as a
  whole (`tests/backends/test_family_sampling.py`).

Of models with experts PEFT fuses gate and up, so that their rank doubles there; `skyrl adapter convert` writes
[that form](adapters.md#experts) too. Names of shared experts and of dense
layers, which it would pass over, stand in `target_parameters` of the exported `adapter_config.json`. Layers of
DeepSeek-V3 and Qwen3.5 that predict tokens further ahead are left out on loading. To add a family:
[Add a model](add-a-model.md).

Layers with a gated DeltaNet (Qwen3.5) remember earlier tokens by a state, which is as large however long the sequence
is. A prompt has one and each of its samples one more, at most twice as many as sequences are decoded at once. They take
up to half of `kv_cache_gib`; requests wait for a free one as they do for pages. As a state is that after the last token
that was read, no other prompt can begin from it: samples of one request share its prompt, but requests do not share
prefixes, and `prompt_cache_hit_tokens` is 0.
"""


def page() -> str:
    """The whole page."""
    from skyrl.tx.design.rotations import KINDS

    return HEAD + "".join(map(_row, FAMILIES)) + TAIL.format(rotations=", ".join(KINDS), **ROUTING_BOUNDS)


def _row(architecture: str) -> str:
    family = FAMILIES[architecture]
    size = Size(64, 12, 4, 2, 16, 128, 320, tied=False, max_position=1024)
    design = design_of(SimpleNamespace(**made_config(architecture, size)))
    made = f"`--arch {family.model_type}`"
    names = ", ".join(f"`{name}`" for name in (architecture, *family.multimodal))
    return f"| {names} | {family.models} | {_attention(design)} | {_layers(design)} | {made} |\n"


def _attention(design: Design) -> str:
    kinds = {kind for group in design.groups for kind in group.kinds}
    mixers = [group.attention for group in design.groups]
    attention = next(mixer for mixer in mixers if not isinstance(mixer, DeltaNet))
    if isinstance(attention, LatentAttention):
        return "latent, compressed in the cache"
    windows = {kind.window is not None for kind in kinds}
    said = ["gated DeltaNets, in some layers grouped" if attention is not mixers[0] else "grouped"]
    said += ["gates"] if attention.gated else []
    said += ["biases"] if attention.bias else []
    said += ["norms of heads"] if attention.head_norms else []
    said += ["norms of queries and keys"] if attention.whole_norms else []
    said += ["windows" if windows == {True} else "windows in some layers"] if True in windows else []
    return ", ".join(said)


def _layers(design: Design) -> str:
    group = design.groups[0]
    kinds = ["experts" if isinstance(each.feed_forward, Experts) else "dense" for each in design.groups]
    said = [", then ".join(kind for kind, _ in groupby(kinds))]
    if group.output_norms:
        said += ["norms after each part" if group.input_norms else "norms after each part and not before"]
    return ", ".join(said)


if __name__ == "__main__":
    print(page(), end="")

"""Generator of the page of supported models. Run: `python -m skyrl.tx.families.page > docs/models.md`."""

from itertools import groupby
from types import SimpleNamespace

from skyrl.tx.design.design import DeltaNet, Design, Experts, LatentAttention
from skyrl.tx.design.family import Size, made_config
from skyrl.tx.families import FAMILIES, design_of

ROUTING_BOUNDS = {"float32": 1e-5, "bfloat16": 0.02}
"""Bounds by dtype of base weights. Tokens whose router scores have a larger gap keep their experts in sampling."""
HEAD = """# Supported models

This page lists the model families that the JAX backend supports. The backend reads `architectures` in a model's
`config.json` and rejects other models before it downloads their weights. The [torch backend](torch.md) supports more.

| architecture | models | attention | layers | `skyrl make-model` |
| --- | --- | --- | --- | --- |
"""
TAIL = """
## Supported features

**Rotary embeddings**: {rotations},
separately for each layer type if the family has several. **Embeddings** may be tied. If the files of a tied model also
have `lm_head.weight`, it must equal the embedding; otherwise set `tie_word_embeddings` to false in `config.json`.
**Weights** may be float32, bfloat16 or float16; quantised weights are rejected. **Multimodal models**: the text part
is loaded, trained, sampled and exported as a text model; images are rejected.

**LongRoPE** has one set of factors per server or run, as in vLLM: `long_factor` for sequences of all lengths if
`max_context_length` is above `original_max_position_embeddings`, and `short_factor` otherwise. transformers chooses by
the length of each sequence. If a server uses `long_factor`, its results for short sequences therefore differ from those
of transformers. The server logs a line when it loads such a model. For `short_factor`, set `max_context_length` to at
most the original length.

**Loading** reads one tensor at a time. On a CPU, it needs the memory of the loaded model and of its largest tensor.
On an accelerator, the host needs the memory of one parameter, stacked over all layers. Experts may be stored as
separate tensors, or fused per layer as transformers 5 writes them with `save_original_format=False`.

**Adapters** cover all linear layers of attention, feed-forward blocks and experts, and the vocabulary projection,
tied or not. Routers are not adapted. Each expert has its own matrices of the adapter's rank, so the size of an
adapter grows with the number of experts; `max_lora_rank` limits the rank.

**Residual streams.** With [`mhc_expansion_rate`](server.md#several-residual-streams) above 1, adapters of every
family have connectors between several residual streams.

**Routing.** A token has the same experts in training and sampling if the gap of its router scores is above
{float32:g} with a float32 base model, or above {bfloat16:g} with a bfloat16 one (`benchmarks/bench_routing.py` counts
the remaining tokens). The gap is the difference between the last chosen expert, or group of experts, and the first
one that is not chosen; scores are softmax probabilities, or sigmoids with the router's correction bias. A token that is
routed differently also affects later layers and later tokens of its sequence. The bounds do not cover these effects.

**Layers that predict tokens further ahead**, in DeepSeek-V3 and Qwen3.5, are skipped on loading.

**PEFT with experts.** PEFT fuses the gate and up projections of experts into one weight, so an adapter of rank r
has rank 2r on this weight. From the names in `target_modules`, PEFT would adapt only the fused experts, and skip shared
experts and dense layers; the exported `adapter_config.json` therefore lists these in `target_parameters`.
`skyrl adapter convert` also writes [PEFT's fused form](adapters.md#experts).

**Gated DeltaNet layers** (Qwen3.5) keep a fixed-size recurrent state per sequence. A prompt needs one state, and each
of its samples needs another. The number of states is at most twice the number of sequences decoded at once. States
use up to half of `kv_cache_gib`; requests wait for a free state as they do for pages. A state belongs to the last
token read, so another prompt cannot start from it: samples of one request share its prompt, but requests do not share
prefixes, and `prompt_cache_hit_tokens` is 0.

## Tests

Each family is tested with a small random model of nine layers that transformers wrote
(`tests/backends/test_families.py`):

- against transformers, in float32, to 1e-4: logits at positions from 0 and from 20,000 on, and log-probabilities from
  20,000 on;
- against `generate`: greedy samples, with shared prefixes (except for gated DeltaNet) and several adapters together;
- against one full forward pass: prompts in chunks, the paged cache, packed sequences, several samples of a prompt, and
  evicted cache pages (`tests/backends/test_family_sampling.py`);
- against PEFT: gradients (also with checkpointing), initial weights, and logits of adapters in both directions;
- exports: equal to the checkpoint bit for bit without an adapter; with a merged adapter, equal results;
- four residual streams against one (`tests/tx/models/test_streams.py`).

To add a family, see [Add a model](add-a-model.md).
"""


def page() -> str:
    """Return the whole page."""
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
        return "multi-head latent attention (MLA), compressed cache"
    windows = {kind.window is not None for kind in kinds}
    said = ["gated DeltaNet, grouped-query in some layers" if attention is not mixers[0] else "grouped-query"]
    said += ["output gates"] if attention.gated else []
    said += ["biases"] if attention.bias else []
    said += ["QK norm per head"] if attention.head_norms else []
    said += ["QK norm over all heads"] if attention.whole_norms else []
    said += ["sliding window" if windows == {True} else "sliding window in some layers"] if True in windows else []
    return ", ".join(said)


def _layers(design: Design) -> str:
    group = design.groups[0]
    kinds = ["mixture of experts" if isinstance(each.feed_forward, Experts) else "dense" for each in design.groups]
    said = [", then ".join(kind for kind, _ in groupby(kinds))]
    if group.output_norms:
        said += ["norms before and after each block" if group.input_norms else "norms after each block only"]
    return ", ".join(said)


if __name__ == "__main__":
    print(page(), end="")

"""Statistics of a backend since its start, which a server shows to its operator (`/metrics`).

To add one, name it here, and count it in the `statistics` property of the class that counts it. A custom backend may
report others.
"""

from typing import Literal, NamedTuple

Statistics = dict[str, int]
"""Values by name."""


class Described(NamedTuple):
    """Description of a statistic."""

    kind: Literal["counter", "gauge"]
    """Kind of the statistic; a counter only grows while the process lives."""
    help: str


STATISTICS: dict[str, Described] = {
    "train_dispatches": Described("counter", "Calls that computed micro-batches."),
    "train_micro_batches": Described("counter", "Micro-batches that were computed."),
    "train_places": Described(
        "counter", "Micro-batches that those calls had room for; micro_batches over this is how full they were."
    ),
    "train_computed_tokens": Described(
        "counter", "Token positions of those micro-batches, padding and tokens that are not trained on included."
    ),
    "decode_calls": Described("counter", "Calls that decoded tokens."),
    "decode_sequences": Described("counter", "Sequences of those calls; over decode_calls, the mean batch."),
    "decode_tokens": Described("counter", "Tokens that were decoded, those of cancelled samples included."),
    "decode_max_sequences": Described("gauge", "Sequences that can be decoded at once."),
    "running_sequences": Described("gauge", "Sequences that are being decoded."),
    "waiting_samples": Described("gauge", "Sample requests in the engine that have not begun."),
    "prompt_tokens_read": Described(
        "counter", "Tokens of prompts whose reading has ended, those of cache hits included."
    ),
    "prefix_cache_hit_tokens": Described("counter", "Of these, tokens that were in the cache already."),
    "cache_pages": Described("gauge", "Pages of the KV cache."),
    "cache_pages_used": Described("gauge", "Of these, pages that requests hold or have reserved."),
    "snapshots_failed": Described("counter", "Snapshots of models that could not be written; they are tried again."),
}

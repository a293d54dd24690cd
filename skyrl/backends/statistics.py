"""Statistics of a backend since its start, which a server shows to its operator (`/metrics`).

To add one, describe it in `STATISTICS`, and report its value in the `statistics` property of the class that measures
it. A custom backend may report additional statistics.
"""

from typing import Literal, NamedTuple

Statistics = dict[str, int]
"""Values by name."""


class StatisticInfo(NamedTuple):
    """Description of a statistic."""

    kind: Literal["counter", "gauge"]
    """Kind of the statistic; a counter only grows while the process lives."""
    help: str


STATISTICS: dict[str, StatisticInfo] = {
    "train_dispatches": StatisticInfo("counter", "Calls that computed micro-batches."),
    "train_micro_batches": StatisticInfo("counter", "Micro-batches that were computed."),
    "train_places": StatisticInfo(
        "counter", "Micro-batches that those calls had room for; micro_batches over this is how full they were."
    ),
    "train_computed_tokens": StatisticInfo(
        "counter", "Token positions of those micro-batches, padding and tokens that are not trained on included."
    ),
    "models_moved_to_host": StatisticInfo("counter", "Moves of models from the device to host memory."),
    "models_moved_to_disk": StatisticInfo("counter", "Moves of models from memory to disk."),
    "models_moved_to_device": StatisticInfo("counter", "Moves of models from host memory or disk to the device."),
    "decode_calls": StatisticInfo("counter", "Calls that decoded tokens."),
    "decode_sequences": StatisticInfo("counter", "Sequences of those calls; over decode_calls, the mean batch."),
    "decode_tokens": StatisticInfo("counter", "Tokens that were decoded, those of cancelled samples included."),
    "decode_max_sequences": StatisticInfo("gauge", "Sequences that can be decoded at once."),
    "running_sequences": StatisticInfo("gauge", "Sequences that are being decoded."),
    "waiting_samples": StatisticInfo("gauge", "Sample requests in the engine that have not begun."),
    "prompt_tokens_read": StatisticInfo(
        "counter", "Tokens of prompts whose reading has ended, those of cache hits included."
    ),
    "prefix_cache_hit_tokens": StatisticInfo("counter", "Of these, tokens that were in the cache already."),
    "cache_pages": StatisticInfo("gauge", "Pages of the KV cache."),
    "cache_pages_used": StatisticInfo("gauge", "Of these, pages that requests hold or have reserved."),
    "snapshots_failed": StatisticInfo("counter", "Model snapshots that could not be written; they are retried."),
}

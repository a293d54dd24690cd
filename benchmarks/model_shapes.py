"""Named sizes of models that benchmarks make."""

from skyrl.backends.planning.flops import Shape

TINY = Shape(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, intermediate=768, vocab=4096)
MEDIUM = Shape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab=16384)
SHAPES = {"tiny": TINY, "medium": MEDIUM}
QWEN3 = {
    "0.6B": Shape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151_936),
    "1.7B": Shape(hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocab=151_936),
    "4B": Shape(hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=9728, vocab=151_936),
    "8B": Shape(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, vocab=151_936),
}
"""Shapes of Qwen3 (https://arxiv.org/abs/2505.09388, table 1); the first three have tied vocabularies."""

"""The engine process: `python -m skyrl.tinker.engine`. `loop` drives a backend with what comes over the channel."""

from skyrl.tinker.engine.loop import TinkerEngine, open_backend, serve

__all__ = ["TinkerEngine", "open_backend", "serve"]

"""The engine process (`python -m skyrl.tinker.engine`). `loop` receives operations and drives a backend."""

from skyrl.tinker.engine.loop import TinkerEngine, open_backend, serve

__all__ = ["TinkerEngine", "open_backend", "serve"]

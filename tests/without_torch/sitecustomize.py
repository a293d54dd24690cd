"""For processes that tests start with this folder in PYTHONPATH: there is no torch, as after the base install.

transformers loads it wherever it finds it, which takes as long as all else that such a process imports.
"""

import importlib.util
from importlib.machinery import ModuleSpec

find = importlib.util.find_spec


def find_all_but_torch(name: str, package: str | None = None) -> ModuleSpec | None:
    """`importlib.util.find_spec`, which is what transformers asks."""
    return None if name == "torch" else find(name, package)


importlib.util.find_spec = find_all_but_torch

"""The queued operations, each with its request schema, its checks and its work for the engine. `table` lists them."""

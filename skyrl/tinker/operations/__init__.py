"""The queued operations: `table` lists them; request schema, check and engine work of each stand side by side."""

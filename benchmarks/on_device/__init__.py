"""Proof and measurement of everything that needs an accelerator, in minutes, on a machine without a network.

In comes a list of cases in order of worth (`cases.py`); out goes a file of JSON lines, one per case, and a table of it.
Read `case.py` first: it is all that the author of a case sees. Then

- `runner.py`: which cases run, in which order, until when;
- `process.py`: the driver's hold on the process of a group, from its start to the end of all that it has started;
- `worker.py`: the inside of that process, the only place where an accelerator is opened;
- `report.py`: the lines, written and read, and the tables.

`benchmarks/accelerator.py` is the command. It holds no device memory: nothing that the driver imports imports JAX, and
`cases.py` does so inside its functions only.
"""

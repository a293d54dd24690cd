"""Tests and benchmarks that need an accelerator, in minutes, on a machine without a network.

The input is a list of cases in order of importance (`cases.py`). The output is a file of JSON lines, one per case, and
a table of it. Read `case.py` first; it is all that the author of a case needs. The other modules are:

- `runner.py`: selection and order of cases, and time limits;
- `process.py`: the driver's control of a group's process, from its start to the end of all its descendants;
- `worker.py`: the code in that process, the only place where an accelerator is opened;
- `report.py`: result lines, written and read, and tables.

`benchmarks/accelerator.py` is the command. It uses no device memory: no module imported by the driver imports JAX, and
`cases.py` does so only inside its functions.
"""

"""Memory of a control group, read from files as Linux writes them."""

import pytest

from skyrl.utils.machine import available_memory

MIB = 2**20


@pytest.mark.parametrize(
    ("stat", "left"),
    [
        (f"anon {40 * MIB}\nfile {50 * MIB}\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\n", 40 * MIB),
        (f"cache 1\ninactive_file 5\ntotal_inactive_file {30 * MIB}\n", 40 * MIB),
        (None, 10 * MIB),
    ],
    ids=["cgroup v2", "cgroup v1 with children", "no memory.stat"],
)
def test_files_that_were_not_used_lately_are_available(tmp_path, monkeypatch, stat, left):
    files = [tmp_path / "memory.max", tmp_path / "memory.current"]
    for file, value in zip(files, (100 * MIB, 90 * MIB), strict=True):
        file.write_text(f"{value}\n")
    if stat:
        (tmp_path / "memory.stat").write_text(stat)
    monkeypatch.setattr("skyrl.utils.machine.CGROUPS", (tuple(map(str, files)),))
    assert available_memory() == left

"""Memory and time of a server for saving a large checkpoint to a bucket.

Run: `python benchmarks/bench_buckets.py --gib 1`. A server with `--checkpoints-base s3://...`, on moto's S3 server on
this machine, fully trains a model whose checkpoint (weights and two moments in float32) has this size, and saves it.
Prints one JSON line per run: the maximum growth in MiB of each process during `save_state`, and its seconds.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from common import API_KEY, datum, emit

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the S3 server of the tests
from tests.buckets import contents_bytes, environment, make_bucket, s3_server

SHAPE = {"hidden": 640, "heads": 10, "kv_heads": 5, "head_dim": 64, "intermediate": 1920}
LAYERS_PER_GIB = 17
BUCKET = "benchmark"


def memory(pid: int, name: str) -> int:
    """Bytes of a process: VmRSS, or VmHWM since `forget_peak`."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, name
    return int(found[1]) * 1024


def forget_peak(pid: int) -> None:
    """Reset the peak memory of a process; see clear_refs in proc(5)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def main(gib: float) -> None:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker

    from skyrl.tinker.local_server import LocalServer, close_client
    from skyrl.tx.synthetic.make_model import make_model

    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch, s3_server() as address:
        os.environ |= {**environment(address), "SKYRL_DATA": f"{scratch}/data"}
        make_bucket(address, BUCKET)
        model = make_model(Path(scratch) / "model", layers=round(LAYERS_PER_GIB * gib), **SHAPE)
        options = {"checkpoints-base": f"s3://{BUCKET}/server"}
        with LocalServer(Path(scratch) / "server", str(model), options) as server:
            client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
            trainer = client.create_lora_training_client(str(model), rank=0).result()
            trainer.forward_backward([datum(32)], "cross_entropy").result()
            trainer.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            pids = {name: pid for name, pid in server.pids()._asdict().items() if pid is not None}
            before = {}
            for name, pid in pids.items():
                forget_peak(pid)
                before[name] = memory(pid, "VmRSS")
            start = time.perf_counter()
            trainer.save_state("state").result()
            seconds = time.perf_counter() - start
            above = {name: memory(pid, "VmHWM") - before[name] for name, pid in pids.items()}
            close_client(client)
        size = contents_bytes(f"s3://{BUCKET}/server")
        emit(
            benchmark="buckets",
            checkpoint_gib=round(size / 2**30, 2),
            seconds=round(seconds, 1),
            **{f"{name}_above_mib": round(value / 2**20, 1) for name, value in above.items()},
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    main(parser.parse_args().gib)

"""Comparison with another checkout: two servers at once, the same work for each in turn, ratios of pairs.

    python benchmarks/against.py ../other-checkout --pairs 12

A ratio above 1 means that this version is slower, in wall time or in processor time of the server's processes. The
bound is the upper end of a one-sided 95 % interval of the geometric mean (t distribution). While one server works, the
other is idle and takes no processor time. The two alternate in going first.
"""

import argparse
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import scipy.stats

import model_shapes
from common import API_KEY, RANK, datum, emit, sequence, timed

ROOT = Path(__file__).parents[1]
CLI = "import sys; from skyrl.cli import main; sys.exit(main())"
ADAPTERS = 4


class Server:
    """A server of a checkout, and a client's work on it."""

    def __init__(self, checkout: Path, model: Path, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        options = [
            f"--base-model={model}",
            f"--port={self.url.rpartition(':')[2]}",
            f"--database-url=sqlite:///{folder}/skyrl.db",
            f"--checkpoints-base={folder}/checkpoints",
            "--backend=jax",
            '--backend-config={"warm_up": false}',
        ]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "SKYRL_CACHE": str(folder.parent / checkout.name)}
        self.model = str(model)
        self._log = (folder / "log").open("wb")
        command = [sys.executable, "-c", CLI, "serve", *options]
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=self._log, stderr=self._log)

    def wait_until_ready(self) -> None:
        while True:
            assert self.process.poll() is None, Path(self._log.name).read_text()[-2000:]
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as response:
                    if b'"ok"' in response.read():
                        return
            except OSError:
                time.sleep(0.05)

    def connect(self) -> None:
        import tinker

        self._tinker, self._rounds = tinker, 0
        self._adam = tinker.AdamParams(learning_rate=1e-4)
        self._batch, self._small = [datum(256, seed) for seed in range(16)], [datum(16)]
        client = tinker.ServiceClient(base_url=self.url, api_key=API_KEY)
        self._trainers = [
            client.create_lora_training_client(self.model, rank=RANK, seed=seed).result() for seed in range(ADAPTERS)
        ]
        self._samplers = [trainer.save_weights_and_get_sampling_client().result() for trainer in self._trainers]

    def processor_s(self) -> float:
        """Processor time in seconds of all its processes so far."""
        main = psutil.Process(self.process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (main, *main.children(recursive=True)))

    def train(self) -> None:
        """3 steps of 16 x 256 tokens of one adapter."""
        self._steps([(self._trainers[0], self._batch)] * 3)

    def train_adapters(self) -> None:
        """2 steps of 4 x 256 tokens of each of 4 adapters."""
        self._steps([(trainer, self._batch[:4]) for trainer in self._trainers] * 2)

    def decode(self) -> None:
        """32 samples of 128 tokens over 4 adapters."""
        self._sample(32, 64, 128, at_once=True)

    def small_samples(self) -> None:
        """40 samples of a token, one after another."""
        self._sample(40, 16, 1, at_once=False)

    def small_requests(self) -> None:
        """25 passes of 16 tokens and 25 optimizer steps, one after another."""
        for _ in range(25):
            self._trainers[1].forward_backward(self._small, "cross_entropy").result()
            self._trainers[1].optim_step(self._adam).result()

    def _steps(self, work: list) -> None:
        futures = []
        for trainer, batch in work:
            futures += [trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(self._adam)]
        for future in futures:
            future.result()

    def _sample(self, count: int, prompt: int, new: int, at_once: bool) -> None:
        self._rounds += 1
        params, futures = self._tinker.SamplingParams(max_tokens=new, seed=0, stop=[]), []
        for number in range(count):
            tokens = self._tinker.ModelInput.from_ints(sequence(prompt, 1000 * self._rounds + number))
            futures.append(self._samplers[number % ADAPTERS].sample(tokens, 1, params))
            if not at_once:
                futures.pop().result()
        for future in futures:
            future.result()


CASES: list[Callable[[Server], None]] = [
    Server.train,
    Server.train_adapters,
    Server.decode,
    Server.small_samples,
    Server.small_requests,
]


@contextmanager
def running(checkout: Path, model: Path, folder: Path) -> Iterator[Server]:
    folder.mkdir(parents=True)
    server = Server(checkout, model, folder)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def report(case: str, pairs: list[tuple[list[float], list[float]]]) -> None:
    """Print the results of a case. Each pair has [seconds, processor seconds] of this version and of the other."""
    fields: dict[str, object] = {}
    for index, name in enumerate(("", "processor_")):
        logs = [math.log(ours[index] / theirs[index]) for ours, theirs in pairs]
        mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
        fields[f"{name}ratio"] = round(math.exp(mean), 3)
        fields[f"{name}bound"] = round(math.exp(mean + scipy.stats.t.ppf(0.95, len(logs) - 1) * error), 3)
    seconds = statistics.median(ours[0] for ours, _ in pairs), statistics.median(theirs[0] for _, theirs in pairs)
    emit(benchmark="against", case=case, pairs=len(pairs), **fields, seconds=[round(value, 3) for value in seconds])


def main(other: Path, pairs: int, only: str = "") -> None:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    from skyrl.tx.synthetic.make_model import make_model

    cases = [case for case in CASES if only in str(case.__doc__)]
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch, ExitStack() as stack:
        folder, checkouts = Path(scratch), (ROOT, other)
        model = make_model(folder / "tiny", arch="qwen3", **asdict(model_shapes.SHAPES["tiny"]), seed=0)
        servers = [
            stack.enter_context(running(checkout, model, folder / f"state-{number}" / "server"))
            for number, checkout in enumerate(checkouts)
        ]
        for server in servers:
            server.connect()
            for case in cases * 2:  # compilation is not measured
                case(server)
        for case in cases:
            found = []
            for number in range(pairs):
                measured: dict[int, list[float]] = {}
                for side in (number % 2, 1 - number % 2):
                    before = servers[side].processor_s()
                    seconds = timed(lambda case=case, side=side: case(servers[side]))
                    measured[side] = [seconds, servers[side].processor_s() - before]
                found.append((measured[0], measured[1]))
            report(str(case.__doc__), found)
        if only:
            return
        starts = []
        for number in range(pairs):
            measured = {}
            for side in (number % 2, 1 - number % 2):
                begun = time.perf_counter()
                with running(checkouts[side], model, folder / f"state-{side}" / f"start-{number}") as server:
                    measured[side] = [time.perf_counter() - begun, server.processor_s()]
            starts.append((measured[0], measured[1]))
        report("start, until a server is ready", starts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout of this repository")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--only", default="", help="part of the names of the cases to run; the start is left out")
    arguments = parser.parse_args()
    main(arguments.other.resolve(), arguments.pairs, arguments.only)

"""Overhead of a request: round trips of the smallest requests through the stock SDK.

Run: `python benchmarks/bench_overhead.py`. The tiny model, one request at a time, after a warm-up that compiles. Prints
one JSON line per operation, with milliseconds from the call to its result.
"""

import argparse

from common import RANK, datum, emit, milliseconds, peak_flops, seconds_of, sequence, serving


def main(repeats: int) -> None:
    import tinker

    with serving("tiny") as (client, server):
        trainer = client.create_lora_training_client(server.base_model, rank=RANK, seed=0).result()
        sampler = client.create_sampling_client(base_model=server.base_model).result()
        data, adam = [datum(16)], tinker.AdamParams(learning_rate=1e-4)
        prompt, params = tinker.ModelInput.from_ints(sequence(16)), tinker.SamplingParams(max_tokens=1)

        def step():
            futures = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(adam)
            for future in futures:
                future.result()

        calls = {
            "forward_backward 1x16": lambda: trainer.forward_backward(data, "cross_entropy").result(),
            "optim_step": lambda: trainer.optim_step(adam).result(),
            "forward_backward 1x16 + optim_step, pipelined": step,
            "sample 1 token, prompt 16": lambda: sampler.sample(prompt, 1, params).result(),
        }
        peak = round(peak_flops() / 1e9, 1)
        for name, call in calls.items():
            times = milliseconds(seconds_of(call, repeats, warm_up=10))
            emit(benchmark="overhead", case=name, model="tiny", repeats=repeats, **times, peak_gflops=peak)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    main(parser.parse_args().repeats)

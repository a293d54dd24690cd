"""Runs unmodified clients of the OpenAI and Anthropic routes, each in its own environment, against a live server.

Run: `python -m tests.agents.run [CLIENT ...]` in the project's folder; `make agents` does. The wheels of the clients
have the hashes in clients.txt. Writes `build/agents.json`. Exits with status 1 if a check fails or the server logged an
error. Agents need answers that end them: adapters are taught to give these, on the prompts that the agents send.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from skyrl.tinker.local_server import LocalServer
from tests.agents.checks import CALLING, FINAL, KEY, TOOL, WEATHER
from tests.agents.evaluation import difference, evaluate, write_tasks
from tests.compat.environments import FOLDER, environment, variables
from tests.compat.run import errors_of
from tests.live import answering_adapter, make_tiny_model, new_trainer, service, teach
from tests.waiting import until

PROGRAMS = Path(__file__).parent
LINES = [line for line in (PROGRAMS / "clients.txt").read_text().splitlines() if not line.startswith("#")]
CLIENTS = {line.split()[0].replace("==", "-"): line for line in LINES}
"""Requirement of each client, with the hash of its wheel, by name and version."""
BESIDE = {
    "lm-eval": ("lm-eval[api,hf]",),
    "mini-swe-agent": ("litellm==1.110.2",),
    "renderers": ("httpx", "jinja2", "transformers>=5.7"),
    "smolagents": ("openai==3.57.0",),
}
"""Further packages of a client's environment."""
CODE = f'Thought: I know it.\n<code>\nfinal_answer("{FINAL}")\n</code>'
CALL = f'<tool_call>\n{{"name": "final_answer", "arguments": {{"answer": "{FINAL}"}}}}\n</tool_call>'
COMMANDS = ("echo hello", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SHELL = [f"THOUGHT: Go.\n\n```mswea_bash_command\n{command}\n```" for command in COMMANDS]
END = "<|im_end|>"
LENGTH = 8000
"""Tokens of the request that runs while the server is killed."""
SHORT = 200
"""Tokens of the prompt's end on which an answer is taught first: steps on the whole prompt take many times as long."""
TIMEOUT_S = 600

Outcomes = dict[str, dict[str, str]]


class Runner:
    """Runs clients against a server. `folder` has their output."""

    def __init__(self, server: LocalServer, folder: Path, torch: str):
        self.server, self.folder, self.torch = server, folder, torch
        self.caller = answering_adapter(server, WEATHER, CALLING, [TOOL])

    def run(self, client: str) -> dict[str, Any]:
        """Run all checks of a client. Returns their outcomes, the seconds they took and the packages."""
        name, _ = client.rsplit("-", 1)
        python = environment(f"agents/{client}", self.requirements(client))
        start = time.monotonic()
        special = {"smolagents": self.smolagents, "mini-swe-agent": self.mini_swe, "lm-eval": self.evaluate}
        program = partial(self.program, f"with_{name.partition('-')[0]}.py")
        try:
            checks = special.get(name, program)(python)
            if client == "openai-3.57.0":
                checks |= self.restart(python)
        except Exception as error:
            checks = {"run": outcome("The checks run.", str(error)[-3000:])}
        frozen = subprocess.run(
            [sys.executable, "-m", "uv", "pip", "freeze", "--python", str(python)], capture_output=True, text=True
        )
        seconds = round(time.monotonic() - start, 1)
        for check, found in checks.items():
            print(f"{client} {check}: {found['status']} {found['detail']}", file=sys.stderr, flush=True)
        return {"checks": checks, "seconds": seconds, "packages": frozen.stdout.split()}

    def requirements(self, client: str) -> list[str]:
        """Return the requirements of a client's environment."""
        name = client.rsplit("-", 1)[0]
        return [CLIENTS[client], *BESIDE.get(name, ()), *([self.torch] if name == "lm-eval" else [])]

    def command(self, name: str, python: Path, **more: object) -> tuple[list[str], Path]:
        """Return the command of a program of this folder, and the file to which it writes outcomes."""
        out = self.folder / f"{uuid.uuid4().hex}.json"
        given = {"url": self.server.url, "model": self.server.base_model, "caller": self.caller, "only": []}
        return [str(python), str(PROGRAMS / name), json.dumps({**given, "out": str(out), **more})], out

    def program(self, name: str, python: Path, **more: object) -> Outcomes:
        """Run a program of this folder. Returns the outcomes of its checks."""
        command, out = self.command(name, python, **more)
        done = self.call(command)
        if done.returncode:
            raise RuntimeError(f"{name} exited with status {done.returncode}:\n{done.stdout[-3000:]}")
        return json.loads(out.read_text())

    def call(self, command: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder, without its user's settings and without a network."""
        offline = {"HOME": str(self.folder), "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return subprocess.run(
            command,
            cwd=self.folder,
            env=variables(**offline, **more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )

    def taught(self, answers: Sequence[str], play: Callable[[str, str], object]) -> str:
        """Return the path of an adapter that gives an agent these answers, one a turn, under greedy decoding.

        Each answer is taught on the prompt that the agent sends after the answers before, as the server captured it.

        Args:
            answers: Texts that end an answer.
            play: Runs the agent with the path of a model, in a session of the server.
        """
        path = self.server.base_model or ""
        with service(self.server) as client:
            trainer = new_trainer(client, self.server, rank=16)
            for turn, answer in enumerate(answers):
                session = f"rehearsal-{uuid.uuid4().hex}"
                play(path, session)
                row = next(row for row in self.rows(session) if len(row["versions"]) > turn)
                first, last = (row["versions"][place]["first"] for place in (0, turn))
                tokens = row["tokens"][:last] + trainer.get_tokenizer().encode(answer)
                for length in (min(first, SHORT), first):
                    teach(trainer, tokens[first - length :], length, steps=400)
                path = trainer.save_weights_for_sampler(f"turn-{turn}").result().path
        return path

    def rows(self, session: str) -> list[dict[str, Any]]:
        """Return the rows of a captured session."""
        with urllib.request.urlopen(f"{self.server.url}/v1/captures/{session}", timeout=60) as answer:
            return [json.loads(line) for line in answer.read().splitlines()]

    def smolagents(self, python: Path) -> Outcomes:
        """Run agents of smolagents against adapters that give their final answer."""

        def play(only: str, path: str, session: str) -> None:
            self.program("with_smolagents.py", python, code=path, tool=path, session=session, only=[only])

        code = self.taught([CODE + END], partial(play, "code_agent"))
        tool = self.taught([CALL + END], partial(play, "tool_calling_agent"))
        return self.program("with_smolagents.py", python, code=code, tool=tool, session="smolagents")

    def mini_swe(self, python: Path) -> Outcomes:
        """Run mini-swe-agent's command against an adapter that gives two commands, in a captured session."""

        def play(path: str, session: str) -> dict[str, Any]:
            options = {
                "model.cost_tracking": "ignore_errors",
                "model.model_kwargs.api_base": f"{self.server.url}/sessions/{session}/v1",
                "model.model_kwargs.api_key": KEY,
                "model.model_kwargs.max_tokens": 120,
                "model.model_kwargs.temperature": 0,
            }
            out = self.folder / f"{session}.json"
            command = [str(python.parent / "mini"), "--yolo", "--exit-immediately", "--task", "Say hello."]
            command += ["--config", "mini_textbased.yaml", "--model-class", "litellm_textbased"]
            command += [word for name, value in options.items() for word in ("--config", f"{name}={value}")]
            command += ["--model", f"openai/{path}", "--output", str(out)]
            done = self.call(command, MSWEA_CONFIGURED="true", MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="1")
            if done.returncode:
                raise RuntimeError(f"mini exited with status {done.returncode}:\n{done.stdout[-3000:]}")
            return json.loads(out.read_text())

        path = self.taught([answer + END for answer in SHELL], play)
        found, rows = play(path, "mini-swe-agent"), self.rows("mini-swe-agent")
        said = [message["content"] for message in found["messages"] if message["role"] == "assistant"]
        ended = (found["info"]["exit_status"], said) == ("Submitted", SHELL)
        checks = {
            "submits": outcome("The agent runs its commands and submits.", "" if ended else json.dumps(found)[-3000:])
        }
        with service(self.server) as client:
            tokenizer = new_trainer(client, self.server).get_tokenizer()
        expected = [token for answer in SHELL for token in tokenizer.encode(answer + END)]
        drawn = [token for row in rows for token, mask in zip(row["tokens"], row["mask"], strict=True) if mask]
        exact = drawn == expected and len(rows) == 1 and all(row["complete"] for row in rows)
        meaning = "Its captured session is one complete row with exactly the drawn tokens."
        return checks | {"capture": outcome(meaning, "" if exact else f"{len(rows)} rows: {drawn}, not {expected}")}

    def evaluate(self, python: Path) -> Outcomes:
        """Compare lm-eval on the completions route with its Hugging Face model."""
        folder = self.folder / "lm-eval"
        folder.mkdir()
        write_tasks(folder)
        model = self.server.base_model
        address = (
            f"model={model},base_url={self.server.url}/v1/completions,num_concurrent=4,tokenizer_backend=huggingface"
        )
        served = evaluate(python, folder, "served", "local-completions", address)
        expected = evaluate(python, folder, "expected", "hf", f"pretrained={model},dtype=float32")
        largest = difference(served, expected)
        print(f"lm-eval: log-probabilities differ by up to {largest:.1e}: {expected['results']}", file=sys.stderr)
        return {"parity": outcome("Metrics and texts equal those of Hugging Face's model; log-probabilities to 1e-4.")}

    def restart(self, python: Path) -> Outcomes:
        """Kill all processes of the server while a request of the client runs, and start it again."""
        command, out = self.command("over_restart.py", python, length=LENGTH)
        log = self.folder / "over_restart.log"
        with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            try:
                if process.stdout.readline():
                    self.wait_until_sampling(process)
                    kill(self.server)
                    self.server.stop()
                    self.server.start(TIMEOUT_S)
                process.wait(TIMEOUT_S)
            finally:
                process.kill()
        if not out.exists():
            raise RuntimeError(log.read_text()[-3000:])
        return json.loads(out.read_text())

    def wait_until_sampling(self, client: subprocess.Popen[bytes]) -> None:
        """Return once the engine has begun a request, or its client has ended."""

        def begun() -> bool:
            with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            running = any(line.startswith("skyrl_requests_running{") and float(line.split()[-1]) for line in lines)
            return running or client.poll() is not None

        until(begun, "the engine works on the client's request")


def kill(server: LocalServer) -> None:
    """Kill all processes of a server with SIGKILL, the launcher first, which would start the others again."""
    for pid in server.pids():
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    assert server.process is not None
    server.process.wait()


def outcome(meaning: str, problem: str = "") -> dict[str, str]:
    return {"meaning": meaning, "status": "failed" if problem else "ok", "detail": problem}


def as_markdown(clients: dict[str, Any]) -> str:
    """Return a table with a row for each check of each client."""
    lines = ["| client | check | meaning | result |", "| --- | --- | --- | --- |"]
    for client, found in clients.items():
        for name, one in found["checks"].items():
            lines.append(f"| {client} | `{name}` | {one['meaning']} | {one['status']} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("client", nargs="*", choices=[*CLIENTS, []], help="all if none is given")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip calls the torch to install")
    parser.add_argument("--out", type=Path, default=Path("build/agents.json"))
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(FOLDER / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    os.environ["TINKER_TELEMETRY"] = "0"
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agents-") as name:
        folder = Path(name)
        model = make_tiny_model(folder / "tiny")
        with LocalServer(folder / "server", str(model)) as server:
            runner = Runner(server, folder, arguments.torch)
            clients = {client: runner.run(client) for client in arguments.client or CLIENTS}
            errors = errors_of(server)
    summary = {
        "date": date.today().isoformat(),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "clients": clients,
        "errors": errors,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(summary, indent=1))

    print(as_markdown(clients))
    checks = {(client, name): one for client, found in clients.items() for name, one in found["checks"].items()}
    failed = {place: one for place, one in checks.items() if one["status"] == "failed"}
    for place, one in failed.items():
        print(f"{' '.join(place)}: {one['detail']}")
    for line in errors:
        print(f"server: {line}")
    passed, seconds = len(checks) - len(failed), time.monotonic() - start
    print(f"{passed} passed, {len(failed) + len(errors)} failed in {seconds:.0f} s")
    return 1 if failed or errors else 0


if __name__ == "__main__":
    raise SystemExit(main())

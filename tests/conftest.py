"""Settings for the whole suite: strict JAX, eight CPU devices, no network; and the one live server that tests share.

`pytest -m gpu` runs what is marked so on the accelerator that there is.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import SharedPrograms
from tests.scheduling import pytest_xdist_make_scheduler, unit  # noqa: F401 (a hook of xdist)
from tests.selection import unmark

CACHE = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", Path(__file__).parent.parent / ".pytest_cache" / "xla"))
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
PROGRAMS = SharedPrograms(CACHE, CACHE / WORKER) if WORKER else None
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / (WORKER or ""))
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"  # else what a program is found by contains its folder
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a script; commands of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["TINKER_TELEMETRY"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch: the suite's processes share the cores, and idle threads spin
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# No deadlines: other processes share the cores. `make test` tries the same inputs each time, `make test-all` new ones.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True, max_examples=30)
settings.load_profile("fixed")

ON_ACCELERATOR = ("gpu", "gpu and not slow")
"""Expressions of marks that stand for a run on the accelerator that there is, as it is given and as it is meant."""


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device before anything imports JAX: the CPU, but an accelerator for `-m gpu` where there is one."""
    if config.option.markexpr in ON_ACCELERATOR:
        config.option.markexpr = ON_ACCELERATOR[-1]
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # tests that start a process share the device with it
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if config.option.markexpr == "slow":  # with few threads, eight devices may wait for each other for ever
        os.environ.setdefault("NPROC", "16")
    # Compiling dominates the suite: XLA optimises little, and programs are kept for the servers and runs that follow.
    flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
    if [int(part) for part in version("jaxlib").split(".")[:2]] <= [0, 10]:  # a later one ends at a flag it has lost
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


COLLECTED = pytest.StashKey[frozenset[str]]()
"""Node ids of all tests that were found, also of those that are not run."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note all tests, and mark those of `make test-all` only."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    unmark(items)


def pytest_sessionfinish() -> None:
    """Close clients of the SDK."""
    _close_clients()


def _close_clients() -> None:
    """Close clients of the SDK that are still referred to: at the interpreter's end they would print tracebacks."""
    if (module := sys.modules.get("tinker.lib.internal_client_holder")) is not None:
        gc.unfreeze()  # those that a test has frozen are not listed
        for holder in [one for one in gc.get_objects() if type(one) is module.InternalClientHolder]:
            holder.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what importing the tests and their libraries makes: a million objects, which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


LARGE = 2 * 2**30
"""Bytes of a process above which it lets go of compiled programs between units: three of them share the memory."""


def release_programs() -> None:
    """Free the memory of programs that JAX has compiled, if this process is large. They are also on disk."""
    pages = Path("/proc/self/statm")
    if (
        "jax" in sys.modules
        and pages.exists()
        and int(pages.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") > LARGE
    ):
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or glibc keeps what was freed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Share compiled programs, and take back what commands that a test runs in this process do to logging.

    Their handler would write to the test's captured output, which is closed by the time that threads of the SDK, such
    as the heartbeat of a client whose server has gone, have something to say.
    """
    root = logging.getLogger()
    handlers, level = root.handlers.copy(), root.level
    if PROGRAMS is not None:
        PROGRAMS.exchange()
    try:
        return (yield)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        if nextitem is not None and unit(nextitem.nodeid) != unit(item.nodeid):
            release_programs()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the device of a run on the accelerator that there is."""
    if config.option.markexpr not in ON_ACCELERATOR:
        return None
    import jax

    return f"device: {jax.devices()[0].platform} {jax.devices()[0].device_kind}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a test marked `gpu` alone: they need packages that a machine with a GPU may not have."""
    if config.option.markexpr in ON_ACCELERATOR and collection_path.suffix == ".py":
        return "pytest.mark.gpu" not in collection_path.read_text() or None
    return None


@pytest.fixture(scope="session")
def collected(pytestconfig: pytest.Config) -> frozenset[str]:
    """Node ids of all tests in the files of this run."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of hidden size 32."""
    from live import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """The S3 server that tests of a process share, in a process of its own."""
    from tests.buckets import s3_server

    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3_address, tmp_path_factory) -> Iterator[str]:
    """URL of an empty bucket, which this process and those that it starts can use, as a machine of its own."""
    from tests.buckets import empty_bucket

    with empty_bucket(s3_address, tmp_path_factory.mktemp("data")) as url:
        yield url


@pytest.fixture
def s3_proxy(bucket, s3_address, monkeypatch) -> Iterator:
    """Proxy before the server of `bucket`, through which it is used from here on."""
    from skyrl.utils.locks.remote_claim import release_claims
    from tests.buckets import proxy_before

    with proxy_before(s3_address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy
        proxy.trouble = lambda method, path: None
        release_claims()


@pytest.fixture(scope="session")
def live_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """The live server that tests share. A test that stops or kills it starts one of its own."""
    from skyrl.tinker.local_server import LocalServer

    with LocalServer(tmp_path_factory.mktemp("server"), str(tiny_model)) as server:
        yield server


@pytest.fixture
def service_client(live_server) -> Iterator:
    """The stock SDK's service client, with a session of its own."""
    from live import service

    with service(live_server) as client:
        yield client


@pytest.fixture
def trainer(service_client, live_server):
    """The stock SDK's training client for a fresh adapter."""
    from live import new_trainer

    return new_trainer(service_client, live_server)

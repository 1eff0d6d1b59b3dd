"""Check shapes and types of every annotation in the package while the tests run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import importlib  # noqa: E402
import sys  # noqa: E402
from importlib.abc import MetaPathFinder  # noqa: E402
from importlib.util import cache_from_source  # noqa: E402

from tests import annotations  # noqa: E402

annotations.install("prime_composer")


class CompiledFiles(MetaPathFinder):
    """Let libraries use their compiled files where a module of ours is the first to import them.

    While jaxtyping's hook executes a module, every module has another name for its compiled file.
    torch and transformers would be compiled again in each process.
    """

    def find_spec(self, *names: object) -> None:
        importlib._bootstrap_external.cache_from_source = cache_from_source


sys.meta_path.insert(0, CompiledFiles())


def pytest_addoption(parser):
    parser.addoption(
        "--prime-rl",
        default=None,
        metavar="PATH",
        help="a git checkout of prime-rl, for tests/parity and tests/upstream",
    )
    parser.addoption(
        "--loss",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="run tests/test_contract.py on this loss only (repeatable)",
    )


import copy  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from prime_composer.losses import LOSS_FNS, LOSS_TYPES  # noqa: E402
from tests.fork_server import ENGINE, ForkServer  # noqa: E402
from tests.prime_rl_checkout import BRANCHES, NO_CHECKOUT, extract, find_checkout  # noqa: E402
from tests.tiny_qwen import (  # noqa: E402, F401  (fixtures)
    models,
    plain_logprobs,
    tied_model,
    vllm_sampler,
    vllm_scorer,
)

# `nohup` and a shell's background jobs ignore signals, and so would the processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test ends the machine's power. Those of faults have processes of their own.
os.fsync = lambda file: None

# Fresh memory is full of NaN, so that a number which nobody wrote is seen. On a GPU deterministic
# algorithms are others, and some operations have none.
torch.use_deterministic_algorithms(not torch.cuda.is_available())

SERVERS = pytest.mark.xdist_group("servers")
FORKS = pytest.mark.xdist_group("forks")
LONG_TIMEOUT = 1200
"""Seconds for a test that starts a server or runs for minutes, on a machine with other work."""


def pytest_runtest_setup() -> None:
    """Keep transformers from writing each config that it reads as JSON, for a log that none reads.

    That took a tenth of a run's time.
    """
    if module := sys.modules.get("transformers.configuration_utils"):
        module.PretrainedConfig.__repr__ = object.__repr__


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what reads prime-rl's checkout, give long tests more time, and keep what starts servers
    to one process.

    Whole runs have fixed ports, and two of vLLM's engines at once would share the same cores.
    """
    for item in items:
        if any(map(item.get_closest_marker, ("slow", "vllm", "upstream", "load"))):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT))
        fixtures = set(getattr(item, "fixturenames", ()))
        if {"checkout", "trees"} & fixtures:
            item.add_marker("checkout")
        starts_servers = any(map(item.get_closest_marker, ("vllm", "upstream", "load")))
        if item.get_closest_marker("xdist_group") is None:
            if starts_servers:
                item.add_marker(SERVERS)
            elif {"torch_forks", "engine_forks"} & fixtures:
                item.add_marker(FORKS)
    # The longest groups begin first, and the other processes share the rest.
    for group in (FORKS, SERVERS):
        items.sort(key=lambda item: item.get_closest_marker("xdist_group") != group.mark)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a pytest whose workers ignore groups: whole runs would share ports, and fail at times.

    A group is a part of a test's name there. What was imported stays, and the garbage collector
    need not look at it again and again.
    """
    gc.freeze()
    if hasattr(session.config, "workerinput") and session.config.getvalue("loadgroup"):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError("pytest-xdist ignores groups here: install pytest<9.2")


TINY_MODEL = {
    "vocab_size": 300, "hidden_size": 16, "layers": 1, "heads": 1, "head_dim": 32,
    "intermediate_size": 32, "max_position_embeddings": 256, "sft_steps": 20, "batch_size": 8,
}  # fmt: skip
TINY_RECIPE: dict[str, Any] = {
    "teacher": {"prepare": {**TINY_MODEL, "seed": 1, "sft_steps": 150}},
    "student": {"prepare": {**TINY_MODEL, "seed": 2, "sft_steps": 5}},
    "loss": {"type": "topk_reverse_kl", "k": 8},
    "rollout": {"backend": "transformers", "max_tokens": 8, "max_model_len": 128},
    "data": {"source": "generated", "size": 60},
    "trainer": {"steps": 4, "batch_size": 6, "lr": 1e-3, "warmup_steps": 1, "schedule": "linear"},
    "eval": {"every": 2, "size": 4, "kl_size": 4},
    "logging": {"tensorboard": False},
    "checkpoint": {"every": 2},
}


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_session(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Give this session a model cache of its own, also in the processes that tests start."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "cache"
    os.environ["PRIME_COMPOSER_CACHE"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def outside_losses_of_this_test() -> Iterator[None]:
    """Forget the losses from outside the package that a test registers, and their modules."""
    before = set(LOSS_TYPES)
    yield
    for name in LOSS_TYPES.keys() - before:
        del LOSS_FNS[LOSS_TYPES.pop(name)]
        sys.modules.pop(name.partition(":")[0], None)


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[ForkServer]:
    """Return a server whose forks have imported torch and pydantic, as our package does.

    Its tests run in one process, which pays for these imports once. transformers and prime-rl's
    losses need torch._dynamo as well.
    """
    server = ForkServer("torch", "torch._dynamo", "pydantic")
    yield server
    server.close()


@pytest.fixture(scope="session")
def engine_forks(torch_forks: ForkServer) -> Iterator[ForkServer]:
    """Return a server whose forks have imported what a run of the one-machine engine imports."""
    server = ForkServer(*ENGINE, parent=torch_forks)
    yield server
    server.close()


@pytest.fixture(scope="session")
def vllm_forks() -> Iterator[ForkServer]:
    """Return a server whose forks have imported vLLM too; only for tests marked ``vllm``.

    What the user types is started anew in ``test_served.py`` and ``test_end_to_end.py``.
    """
    server = ForkServer(*ENGINE, "prime_composer.cli.commands", "tests.vllm_imported")
    yield server
    server.close()


@pytest.fixture(scope="session")
def checkout(request: pytest.FixtureRequest) -> Path | None:
    """Return a git checkout of prime-rl, or None."""
    return find_checkout(request.config.getoption("--prime-rl", default=None))


@pytest.fixture(scope="session")
def trees(checkout: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Version of prime-rl -> its extracted tree. Skips without a checkout."""
    target = tmp_path_factory.mktemp("prime-rl")

    def tree(version: str) -> Path:
        if checkout is None:
            pytest.skip(NO_CHECKOUT)
        try:
            return extract(checkout, version, target)
        except subprocess.CalledProcessError:
            if version not in BRANCHES:
                raise
            pytest.skip(f"this clone of prime-rl has no {BRANCHES[version][:8]} ({version})")

    return tree


@pytest.fixture(scope="session")
def tiny_recipe() -> Callable[..., dict[str, Any]]:
    """Return the tables of a recipe that runs in a second, with ``section__key=value`` changes."""

    return functools.partial(changed, TINY_RECIPE)


def changed(tables: dict[str, Any], /, **changes: Any) -> dict[str, Any]:
    """Return a copy of a recipe's tables with ``section__key=value`` changes."""
    raw = copy.deepcopy(tables)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            raw.setdefault(section, {})[name] = value
        else:
            raw[section] = value
    return raw


@pytest.fixture(scope="session")
def student() -> tuple[torch.nn.Module, Any]:
    """Return the student of TINY_RECIPE with its tokenizer; not to be changed."""
    from prime_composer.backends.hf_model import load_student
    from tests.local.helpers import tiny_models

    return load_student(tiny_models(TINY_RECIPE)["student"])

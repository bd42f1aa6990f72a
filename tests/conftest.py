"""Settings of every test: one thread, fixed seeds, Opacus's standing warnings off."""

import gc
import warnings
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

import opacus_ext  # noqa: F401  (importing it registers, which the tests rely on)

from . import vision  # noqa: F401  (torchvision, before transformers)

# Derandomised, so that a failure in one run is a failure in the next.
settings.register_profile(
    "opacus_ext",
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("opacus_ext")


# Where modes and wrapping are what is tested. Elsewhere one mode stands for all, and
# the others are thorough: "make test-thorough".
ALL_MODES = ("modes_test.py", "clipping_test.py", "compile_test.py", "auto_test.py")
# Many models, notebooks, training programs and processes.
THOROUGH = (
    "tutorials_test.py",
    "compatibility_test.py",
    "moe_families_test.py",
    "finetune_test.py",
    "device_cost_test.py",
    "gpu_benchmark_test.py",
    "docs_test.py",
    "distributed_test.py",
    "sharded_test.py",
    "correlated_processes_test.py",
    "correlated_trainers_test.py",
    "strategies_peer_test.py",
    "failures_test.py",
    "trainer_sharded_test.py",
    "lightning_processes_test.py",
    "accelerate_processes_test.py",
    "train_test.py",
    "example_runs_test.py",
    "trainer_test.py",
    "lightning_test.py",
    "plan_test.py",
    "answers_test.py",
    "commands_test.py",
    "contributing_test.py",
    "synthetic_text_test.py",
)
LONG = ("tutorials_test.py", "moe_families_test.py", "gpu_benchmark_test.py")
# Of other libraries' ways to train, which "make test-examples" installs.
EXAMPLES = ("examples_test.py", "trl_pairs_test.py", "trl_test.py", "vision_test.py")
collect_ignore = [] if find_spec("trl") else list(EXAMPLES)


def is_thorough(item):
    """Whether a test is run by "make test-thorough" and not by "make test"."""
    if item.path.name in THOROUGH:
        return True
    if item.path.name in ALL_MODES or item.path.parent.name == "adapter":
        return False
    given = item.callspec.params if hasattr(item, "callspec") else {}
    other = given.get("mode", "ghost_bk") != "ghost_bk"
    return other or given.get("wrap", True) is False


def pytest_collection_modifyitems(items):
    # What takes long comes first, and the other processes have the rest meanwhile.
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.path.name in EXAMPLES:
            item.add_marker(pytest.mark.examples)
        elif not item.get_closest_marker("examples") and is_thorough(item):
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish():
    """What is imported by now is not looked through at each collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def deterministic():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="Optimal order is the")
        warnings.filterwarnings("ignore", message="Epsilon takes the number of")
        yield
    torch.set_num_threads(threads)

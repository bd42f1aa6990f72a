"""Settings of every test: one thread, fixed seeds, Opacus's standing warnings off."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, settings

import opacus_ext  # noqa: F401  (importing it registers, which the tests rely on)

# Derandomised, so that a failure in one run is a failure in the next.
settings.register_profile(
    "opacus_ext",
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("opacus_ext")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def deterministic():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield
    torch.set_num_threads(threads)

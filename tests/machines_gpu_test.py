"""Data parallel and sharded training on GPUs, by NCCL; one GPU is one process.

The cases and the oracle are those of distributed_test.py and sharded_test.py.
"""

from functools import partial

import pytest
import torch

from tests import distributed_test, sharded_test
from tests.processes import run

pytestmark = pytest.mark.gpu

GPUS = min(torch.cuda.device_count(), 2) or 1
SHARDED = [
    *(sharded_test.Case("plain", mode) for mode in sharded_test.MODES),
    sharded_test.Case("plain", masked=True, optimizer="Adam", reshards=False),
    sharded_test.Case("plain", clipping="per_layer"),
    sharded_test.Case("branches"),
    sharded_test.Case("checkpoint", masked=True),
    sharded_test.Case("reentrant"),
    sharded_test.Case("gpt2", masked=True),
]


def parallel(mode, processes):
    """A case of data parallelism with the samples of so many processes."""
    sizes = [of[:processes] for of in distributed_test.UNEVEN]
    return distributed_test.Case("ddp", mode, sizes)


def jobs(processes):
    """What runs in each process."""
    found = {str(case): partial(sharded_test.train, case) for case in SHARDED}
    for mode in distributed_test.PLAIN:
        case = parallel(mode, processes)
        found[str(case)] = partial(distributed_test.train, case)
    return {**found, "noise": sharded_test.noise}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    return run(GPUS, str(tmp_path_factory.mktemp("gpus")), jobs, backend="nccl")


@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_sharded(case, group):
    sharded_test.assert_equals_one_process(case, group)


@pytest.mark.parametrize("mode", distributed_test.PLAIN)
def test_data_parallel(mode, group):
    case = parallel(mode, group.size)
    distributed_test.assert_equals_one_process(case, group)


def test_noise_of_shares(group):
    """Two steps, each with noise of its own."""
    for first, second in group.of("noise"):
        for name, added in first.items():
            tolerance = 5 * 3 / (2 * added.numel()) ** 0.5
            assert float(added.std()) == pytest.approx(3, abs=tolerance)
            assert not torch.equal(added, second[name])

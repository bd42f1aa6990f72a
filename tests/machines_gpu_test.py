"""Data parallel and sharded training on GPUs, by NCCL; one GPU is one process.

The cases and the oracle are those of distributed_test.py and sharded_test.py.
"""

import pytest
import torch

from tests import distributed_test, processes, sharded_test
from tests.processes import assert_noise

pytestmark = pytest.mark.gpu

GPUS = min(torch.cuda.device_count(), 2) or 1
CASES = [
    *(sharded_test.Case("plain", mode) for mode in sharded_test.MODES),
    sharded_test.Case("plain", masked=True, optimizer="Adam", reshards=False),
    sharded_test.Case("plain", clipping="per_layer"),
    sharded_test.Case("branches"),
    sharded_test.Case("checkpoint", masked=True),
    sharded_test.Case("reentrant"),
    sharded_test.Case("gpt2", masked=True),
    *(distributed_test.Case("ddp", mode) for mode in distributed_test.PLAIN),
]


def jobs(size):
    """What runs in each process."""
    found = {str(case): case.train for case in CASES}
    return {**found, "noise": sharded_test.noise_of}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("gpus"))
    return processes.run(GPUS, path, jobs, backend="nccl")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_train_as_one(case, group):
    case.check(group)


def test_noise_of_shares(group):
    """Two steps, each with noise of its own."""
    for first, second in group.of("noise"):
        for name, added in first.items():
            assert_noise(added, second[name])

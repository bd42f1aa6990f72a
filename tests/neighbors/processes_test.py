"""Two processes: one record moves the sum that both release by at most its bound.

Beyond that sum nothing of another process's record may show: the next batch stays.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP

from tests.neighbors.cases import setting
from tests.neighbors.loops import physical
from tests.neighbors.search import Run, neighbors, norm_of_change

MODES = ("hooks", "ghost", "ghost_bk", "scan")
PAIRS = 8  # of each mode, with and without physical batches
SIZE = 2


class Shared(Run):
    """A run across both processes, each with its own batches."""

    def __init__(self, one, model):
        super().__init__(one, DPDDP(model.double()))


def runs_of(one):
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Shared(one, one.model()))
    return made


def changes(one, rank):
    """For each pair, how far the record moves its own step and the next one."""
    found, (left, right) = [], runs_of(one)
    for pair in range(PAIRS):
        first, second, bounds = neighbors(one.records, pair)
        here = pair % SIZE == rank  # whose record it is
        sums = left.sees(first), right.sees(second if here else first)
        later = neighbors(one.records, pair + 100 + rank)[0]
        after = left.sees(later), right.sees(later)
        own = norm_of_change(*sums) / (bounds * left.bound)
        found.append((own, norm_of_change(*after) / left.bound))
    return found


def work(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE
    )
    found = {}
    for mode in MODES:
        for loop in (None, physical):
            one = setting("rows", mode=mode, loop=loop)
            found[one.label] = changes(one, rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.thorough
def test_one_record_of_two_processes(tmp_path):
    mp.spawn(work, (str(tmp_path),), nprocs=SIZE)
    for rank in range(SIZE):
        for label, pairs in torch.load(tmp_path / f"{rank}.pt").items():
            own, after = zip(*pairs)
            assert 0.3 < max(own) <= 1 + 1e-7, f"{label}: {own}"
            assert max(after) < 1e-7, f"{label}: {after}"

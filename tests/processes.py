"""Groups of processes that run cases, one after the other, and save what they find.

Starting a process takes seconds, so a group runs all cases of a file.
"""

import datetime
import os
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LATE = 5  # seconds that the cases about lost processes wait

Jobs = Dict[str, Callable[[], Any]]


@dataclass
class Group:
    """What the processes of a group have found, by case."""

    size: int
    found: List[Dict[str, Any]]
    codes: List[Optional[int]] = field(default_factory=list)

    def of(self, name: str) -> List[Any]:
        """What each process has found in a case."""
        for rank, found in enumerate(self.found):
            if name not in found:
                pytest.fail(f"process {rank} did not finish {name!r}: {found['error']}")
        return [found[name] for found in self.found]


def device() -> str:
    """Where this process of a group computes; the tests themselves are on the CPU."""
    gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return "cuda" if gpu else "cpu"


def work(
    rank: int,
    size: int,
    folder: str,
    jobs: Callable[[int], Jobs],
    last: Jobs,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    warnings.simplefilter("ignore")
    found: Dict[str, Any] = {"error": "it was stopped"}
    name = ""

    def save():
        torch.save(found, f"{folder}/{rank}.new")
        os.replace(f"{folder}/{rank}.new", f"{folder}/{rank}.pt")

    def join(number: int, seconds: float):
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/meet{number}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=seconds),
        )

    try:
        join(0, 60)
        for name, job in jobs(size).items():
            found[name] = job()
        dist.destroy_process_group()
        for number, (name, job) in enumerate(last.items(), 1):
            save()
            join(number, LATE if name.startswith("late") else 30)
            found[name] = job()
            dist.destroy_process_group()
    except BaseException:
        found["error"] = f"in {name!r}: {traceback.format_exc()}"
    save()


def preloaded() -> Any:
    """What starts processes that have imported the slow modules already."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["opacus_ext.distributed", "tests.sharded_test"])
    return context


def run(
    size: int,
    folder: str,
    jobs: Callable[[int], Jobs],
    last: Optional[Jobs] = None,
    seconds: float = 400,
    backend: str = "gloo",
) -> Group:
    """Runs jobs in so many processes; the last ones may end a process."""
    context = preloaded()
    given = [(rank, size, folder, jobs, last or {}, backend) for rank in range(size)]
    processes = [context.Process(target=work, args=args) for args in given]
    for process in processes:
        process.start()
    end = time.time() + seconds
    for process in processes:
        process.join(max(0.0, end - time.time()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    found = []
    for rank in range(size):
        path = f"{folder}/{rank}.pt"
        nothing = {"error": f"exit code {codes[rank]}"}
        found.append(torch.load(path) if os.path.exists(path) else nothing)
    return Group(size, found, codes)


def refusal(call: Callable, *args: Any, **kwargs: Any) -> str:
    """What kind of error a call ends in, and its message."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def as_torchrun() -> None:
    """Sets what torchrun sets, for the process of a group."""
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        os.environ.update(LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")
        torch.manual_seed(5 + dist.get_rank())

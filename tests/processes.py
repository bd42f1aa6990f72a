"""Groups of processes that run a table of programs, and save what they find.

A program is a function without arguments. Starting a process takes seconds, so a group
runs all programs of a file, one after the other. The oracle of training in several
processes (:class:`Case`) is the same training in a single one, from the gradients of
each sample alone by plain autograd.
"""

import datetime
import functools
import os
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from tests.common import (
    clipped_sum,
    make_private,
    moved,
    next_token_loss,
    norms_of,
    oracle,
    square_loss,
    trainable,
)

LATE = 5  # seconds that the programs about lost processes wait

Jobs = Dict[str, Callable[[], Any]]


# -- groups ------------------------------------------------------------------------


@dataclass
class Group:
    """What the processes of a group have found, by program."""

    size: int
    found: List[Dict[str, Any]]
    codes: List[Optional[int]] = field(default_factory=list)

    def of(self, name: str) -> List[Any]:
        """What each process has found by a program."""
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


def groups(jobs: Callable[[str, int], Jobs], last: Optional[Jobs] = None) -> Any:
    """
    A fixture: ``group(size)`` is the group of so many processes, which starts when it
    is asked for, one time. All groups of a file share ``group.folder``; the first one
    of a file runs the programs of ``last``.
    """

    @pytest.fixture(scope="module")
    def group(tmp_path_factory):
        folder = str(tmp_path_factory.mktemp("shared"))

        @functools.cache
        def start(size: int) -> Group:
            path = str(tmp_path_factory.mktemp(f"of{size}"))
            ends = last if size == 2 else None
            return run(size, path, functools.partial(jobs, folder), ends)

        start.folder = folder  # type: ignore[attr-defined]
        return start

    return group


# -- refusals ----------------------------------------------------------------------


def refusal(call: Callable, *args: Any, **kwargs: Any) -> str:
    """What kind of error a call ends in, and its message."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def refusals(table: Mapping[str, Tuple[Callable[[], Any], str]]) -> Dict[str, str]:
    """How each call of a table of calls and words of their refusals ends."""
    return {name: refusal(call) for name, (call, _) in table.items()}


def assert_refused(group: Group, name: str, words: str) -> None:
    """All processes refuse, and say the words."""
    for found in group.of("refused"):
        assert found[name].startswith("Refused") and words in found[name], found[name]


def as_torchrun() -> None:
    """Sets what torchrun sets, for the process of a group."""
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        os.environ.update(LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT="1")
        torch.manual_seed(5 + dist.get_rank())


# -- training ----------------------------------------------------------------------


def share(batch: Any, sizes: Sequence[int]) -> Any:
    """The samples of this process."""
    if isinstance(batch, dict):
        return {name: share(x, sizes) for name, x in batch.items()}
    return batch.split(list(sizes))[dist.get_rank()].to(device())


def whole(model: nn.Module) -> Dict[str, torch.Tensor]:
    """The parameters, put together from the shards of ``fully_shard``."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone().cpu()
        for name, p in model.named_parameters()
    }


def assert_close(states: Any, expected: Dict[str, Any], tolerance: float) -> None:
    """Tensors by name, of each of the states."""
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=0, atol=tolerance, msg=name
            )


TOKENS = 31
SMALL = dict(vocab_size=TOKENS, use_cache=False)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
T5 = dict(d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=2, dropout_rate=0.0)
TRANSFORMERS: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        dict(n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0)
        | dict(embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        dict(hidden_size=16, intermediate_size=24, num_local_experts=4, head_dim=8)
        | HEADS,
    ),
    "t5": ("T5ForConditionalGeneration", T5 | dict(decoder_start_token_id=0)),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        T5
        | dict(num_decoder_layers=2, num_sparse_encoder_layers=1, num_experts=4)
        | dict(num_sparse_decoder_layers=1, expert_capacity=3)
        | dict(router_jitter_noise=0.0),
    ),
}


def of_transformers(name: str) -> nn.Module:
    import transformers

    name, config = TRANSFORMERS[name]
    cls = getattr(transformers, name)
    return cls(cls.config_class(**SMALL, **config)).train()


def token_losses(model: nn.Module, batch: Dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a model of transformers; ids alone, or with a mask of them."""
    given = {"input_ids": batch["ids"], "use_cache": False}
    if "mask" in batch:
        given["attention_mask"] = batch["mask"]
    if any("decoder." in name for name, _ in model.named_parameters()):
        given["decoder_input_ids"] = batch["ids"].flip(1)
    return next_token_loss(model(**given).logits, batch["ids"])


@dataclass(frozen=True)
class Case:
    """
    Some steps of training, with the samples of each process in each step.

    Subclasses say what is trained: ``build()``, ``spread(model)`` over processes, and
    ``batch(step, size)``. They may say its ``losses``, the ``sums`` of clipped
    gradients, and what is ``gathered`` from all processes.
    """

    model: str
    mode: str = "ghost_bk"
    sizes: Any = ((3, 3), (4, 1), (0, 5))
    wrap: bool = True
    clipping: Any = "flat"
    optimizer: str = "SGD"

    def __str__(self):
        name = getattr(self.clipping, "name", self.clipping)
        wrap = "wrap" if self.wrap else "nowrap"
        sizes = "-".join("".join(map(str, sizes)) for sizes in self.sizes)
        return ",".join((self.model, self.mode, wrap, name, self.optimizer, sizes))

    def build(self) -> nn.Module:
        raise NotImplementedError

    def spread(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def batch(self, step: int, size: int) -> Any:
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        tokens = self.model in TRANSFORMERS
        return token_losses(model, batch) if tokens else square_loss(model, batch)

    def gathered(self, model: nn.Module, private: Any) -> Dict[str, torch.Tensor]:
        return whole(model)

    def sums(self, model: nn.Module, grads: Any, processes: int) -> Dict[str, Any]:
        return clipped_sum(grads, self.clipping, self.bounds(model))

    @property
    def tolerance(self) -> float:
        """Models of transformers compute norms and probabilities in float32."""
        return 1e-6 if self.model in TRANSFORMERS else 1e-10

    def start(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(device())

    def steps(self, processes: int) -> List[List[int]]:
        return [list(sizes[:processes]) for sizes in self.sizes]

    def bounds(self, model: nn.Module) -> Any:
        """For per-layer clipping one that differs from parameter to parameter."""
        if self.clipping != "per_layer":
            return getattr(model, "bound", 0.3)  # adaptive clipping moves it
        return [0.02 * (2 + len(name) % 5) for name in map(kind_of, trainable(model))]

    def plain_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        lr = 1.0 if self.optimizer == "SGD" else 0.01
        return getattr(torch.optim, self.optimizer)(trainable(model).values(), lr=lr)

    def private(self, model: nn.Module, size: int = 6, **kwargs: Any) -> Any:
        given = {"max_grad_norm": self.bounds(model), "clipping": self.clipping}
        given["optimizer"] = self.plain_optimizer(model)
        return make_private(
            model, self.mode, self.wrap, batch_size=size, **{**given, **kwargs}
        )

    def train(self) -> Dict[str, Any]:
        """In this process, one of several."""
        steps = self.steps(dist.get_world_size())
        model = self.spread(self.start())
        private = self.private(model, sum(steps[0]))
        for step, sizes in enumerate(steps):
            private.step(share(self.batch(step, sum(sizes)), sizes), self.losses)
        named = model.named_parameters(remove_duplicate=False)
        spread = [name for name, p in named if hasattr(p, "sharding")]
        state = model.state_dict()
        kept = {n: p for n, p in state.items() if not isinstance(p, DTensor)}
        return {
            "state": {n: p.cpu() for n, p in self.gathered(model, private).items()},
            "replicas": {n: p.cpu() for n, p in kept.items() if n not in spread},
            "spread": spread,
            "history": private.engine.accountant.history,
        }

    def alone(self, processes: int) -> nn.Module:
        """The same training from the gradients of single samples, by plain autograd."""
        model, steps = self.start(), self.steps(processes)
        optimizer = self.plain_optimizer(model)
        for step, sizes in enumerate(steps):
            batch = self.batch(step, sum(sizes))
            self.take_step(model, optimizer, batch, max(1, sum(steps[0])), processes)
        return model

    def take_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        size: int = 6,
        processes: int = 1,
        losses: Any = None,
    ) -> Dict[str, torch.Tensor]:
        """A step of plain autograd for the expected batch size; the weights then."""
        grads = oracle(model, batch, losses or self.losses)
        bound = self.bounds(model)
        for name, total in self.sums(model, grads, processes).items():
            model.get_parameter(name).grad = total / size
        if self.clipping == "adaptive":
            model.bound = moved(bound, norms_of(grads), size)
        optimizer.step()
        return whole(model)

    def check(self, group: Group) -> None:
        """Each process has the weights of one; replicas are equal bit for bit."""
        results, model = group.of(str(self)), self.alone(group.size)
        before, parameters = dict(self.start().named_parameters()), whole(model)
        assert any(not torch.equal(before[n], p) for n, p in parameters.items())
        states = [result["state"] for result in results]
        state = model.state_dict()
        expected = {n: state[n] if n in state else parameters[n] for n in states[0]}
        assert expected.keys() >= parameters.keys()
        assert_close(states, expected, self.tolerance)
        for result in results:
            assert sum(n for _, _, n in result["history"]) == len(self.sizes)
            for name, value in results[0]["replicas"].items():
                assert torch.equal(result["replicas"][name], value), f"{name} differs"


def kind_of(name: str) -> str:
    """The name of a parameter without the number of its expert, and wrappers."""
    name = name.replace("module.", "").replace("_module.", "")
    return ".".join("i" if "expert_" in part else part for part in name.split("."))


# -- noise -------------------------------------------------------------------------

SIGMA = 3.0


def noise(model: nn.Module, *shape: int, mode: str = "ghost_bk", **given: Any) -> Any:
    """What two steps without gradients add to the sums, with equal seeds everywhere."""
    torch.manual_seed(7)
    given = {"batch_size": 8, "noise_multiplier": SIGMA, **given}
    private = make_private(model, mode, **given)
    added, before = [], whole(model)
    x = torch.zeros(*shape, dtype=torch.float64, device=device())
    for _ in range(2):
        private.step(x, lambda model, x: 0 * square_loss(model, x))
        added.append({n: (before[n] - p) * 8 for n, p in whole(model).items()})
        before = whole(model)
    return added, private


def assert_noise(x: torch.Tensor, *others: torch.Tensor, bound: float = 1.0) -> None:
    """Its standard deviation is that of the bound, and it is not that of the others."""
    std = SIGMA * bound
    tolerance = 5 * std / (2 * x.numel()) ** 0.5
    assert float(x.std()) == pytest.approx(std, abs=tolerance)
    for other in others:
        pair = torch.stack([x.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / x.numel() ** 0.5

"""Mistakes that users make, and what each ends in: an error, one warning, or nothing.

The tables hold the words of the error or of the one warning; what is ``HARMLESS``
trains exactly, which is compared with the same loop without it.
"""

import copy
import re
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from opacus_ext import Refused
from opacus_ext.data import Poisson

RECORDS, SIZE = 32, 8


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 2))


def records():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 3, generator=g)
    return TensorDataset(x, torch.randint(0, 2, (RECORDS,), generator=g))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(records())


class NoLength(Dataset):
    def __getitem__(self, i):
        return records()[i]


def loader(**kwargs):
    kwargs = {"batch_size": SIZE, **kwargs}
    return DataLoader(records(), **kwargs)


class Setup:
    """A model, its raw parts, and what ``make_private`` has made of them."""

    def __init__(self, mode="ghost_bk", engine=None, sgd=None, **kwargs):
        given = {
            "module": net(),
            "criterion": nn.CrossEntropyLoss(),
            "data_loader": loader(),
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "grad_sample_mode": mode,
            **kwargs,
        }
        self.raw = given["module"]
        made_of = sgd or (lambda params: torch.optim.SGD(params, lr=0.1))
        given.setdefault("optimizer", made_of(list(self.raw.parameters())))
        self.raw_optimizer = given["optimizer"]
        self.engine = engine or PrivacyEngine()
        self.model, self.optimizer, *criterion, self.loader = self.engine.make_private(
            **given
        )
        self.criterion = criterion[0] if criterion else nn.CrossEntropyLoss()

    def batch(self, size=SIZE):
        x, y = records()[:size]
        return x, y

    def loss(self, size=SIZE, criterion=None):
        x, y = self.batch(size)
        return (criterion or self.criterion)(self.model(x), y)

    def step(self, size=SIZE):
        self.optimizer.zero_grad()
        self.loss(size).backward()
        self.optimizer.step()


def with_epsilon(**kwargs):
    model = net()
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": loader(),
        "target_epsilon": 3.0,
        "target_delta": 1e-3,
        "epochs": 1,
        "max_grad_norm": 1.0,
        "grad_sample_mode": "ghost_bk",
        **kwargs,
    }
    return PrivacyEngine(accountant="rdp").make_private_with_epsilon(**given)


SGD = torch.optim.SGD
CE = nn.CrossEntropyLoss


def drawn_already():
    """A loader that an earlier ``make_private`` made for another sampling."""
    return Setup(sampling=Poisson(expected_batch_size=4)).loader


def drawn_often():
    draws = UniformWithReplacementSampler(
        num_samples=RECORDS, sample_rate=0.5, steps=100
    )
    return DataLoader(records(), batch_sampler=draws)


def replaced():
    """The optimizer was built before a layer was replaced."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[3] = nn.Linear(4, 2)
    return {"module": model, "optimizer": optimizer}


def half():
    """An optimizer of a part of the parameters."""
    model = net()
    return {"module": model, "optimizer": SGD(model[0].parameters(), lr=0.1)}


def sampled(sampler):
    return {"data_loader": loader(sampler=sampler)}


LISTED = DataLoader(NoLength(), batch_sampler=[[0, 1], [2, 3]])
NAN, INF = float("nan"), float("inf")
# What make_private is given, and words of the error.
ARGUMENTS = {
    "mode": ({"mode": "ghost_kb"}, "'ghost_kb'.*ghost_bk.*scan.*auto"),
    "name": ({"poisson_samplng": False}, "'poisson_samplng'.*Is 'poisson_sampling' me"),
    "noise below 0": ({"noise_multiplier": -1.0}, "noise_multiplier.*or more, got -1"),
    "noise text": ({"noise_multiplier": "1.0"}, "must be a number.*'1.0'"),
    "bound 0": ({"mode": "hooks", "max_grad_norm": 0}, "max_grad_norm.*above zero"),
    "bound infinite": (
        {"max_grad_norm": INF},
        "max_grad_norm must be a number, finite",
    ),
    "bounds nan": (
        {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0, 1.0, NAN]},
        "max_grad_norm must be a number, finite",
    ),
    "sum": ({"criterion": CE(reduction="sum")}, "'sum'.*loss_reduction='mean'"),
    "sum, hooks": (
        {"mode": "hooks", "criterion": CE(reduction="sum")},
        "reduction='sum', and make_private loss_reduction='mean'",
    ),
    "LBFGS": ({"sgd": torch.optim.LBFGS}, "LBFGS.*several times.*one grad"),
    "DataParallel": (
        {"module": nn.DataParallel(net())},
        "DataParallel.*one process for each",
    ),
    "layer replaced": (
        replaced(),
        r"2 of 4.*= torch.optim.SGD\(model.parameters\(\), lr=0.1\)",
    ),
    "frozen": ({"module": net().requires_grad_(False)}, "no trainable parameter"),
    "evaluation mode": (
        {"module": net().eval()},
        r"training mode: call model.train\(\)",
    ),
    "stream": ({"data_loader": DataLoader(Stream(), SIZE)}, "Stream.*no length"),
    "no batches": ({"data_loader": loader(batch_size=None)}, "batch_size=None"),
    "no batch": (
        {"data_loader": loader(batch_size=64, drop_last=True)},
        "no batches: 32 records, batch_size=64",
    ),
    "subset": (
        sampled(SubsetRandomSampler(range(10))),
        "SubsetRandomSampler draws 10 of the 32.*Subset",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    given, words = ARGUMENTS[name]
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){words}"):
        Setup(**given)


SAME = "draws by Poisson.*same sampling"
# Calls that are refused.
CALLS = {
    "sampling": (lambda: Setup(data_loader=drawn_already()), SAME),
    "sampling, budget": (lambda: with_epsilon(data_loader=drawn_already()), SAME),
    "rate over one a step": (
        lambda: Setup(data_loader=drawn_often(), poisson_sampling=False),
        r"probability 0.5.*1/100.*Poisson\(sample_rate=0.5, steps=100\)",
    ),
    "twice": (
        lambda: Setup(module=Setup(wrap_model=False).raw, wrap_model=False),
        "private already|hooks twice",
    ),
    "epsilon 0": (lambda: with_epsilon(target_epsilon=0), "target_epsilon.*above zero"),
    "epochs 0": (lambda: with_epsilon(epochs=0), "epochs.*above zero"),
    "target delta": (lambda: with_epsilon(target_delta=1.5), "target_delta.*below 1"),
    "delta 0": (lambda: Setup().engine.get_epsilon(0), "delta must be.*above zero"),
}


# -- loops -----------------------------------------------------------------------------


def loop(*actions):
    """A loop of losses, steps and what else is given, see ``ACTIONS``."""

    def run(s):
        for action in actions:
            (ACTIONS[action] if isinstance(action, str) else action)(s)

    return run


ACTIONS = {
    "backward": lambda s: s.loss().backward(),
    "step": lambda s: s.optimizer.step(),
    "raw step": lambda s: s.raw_optimizer.step(),
    "zero_grad": lambda s: s.optimizer.zero_grad(),
    "eval": lambda s: s.model.eval(),
    "whole": Setup.step,
}


def l2(s):
    return sum((p**2).sum() for p in s.model.parameters())


def clip_grad_norm(s):
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.01)


def own_loss(s):
    nn.functional.cross_entropy(s.model(s.batch()[0]), s.batch()[1]).backward()


def without_grad(s):
    with torch.no_grad():
        loss = s.loss()
    loss.backward()


def labels(y):
    return lambda s: s.criterion(s.model(s.batch()[0]), y)


def divided(s):
    (s.loss() / 4).backward()


def views(s, batches=None):
    """Four of each record, as if they were records; of another loader."""
    for x, y in batches or [s.batch()] * 3:
        s.optimizer.zero_grad()
        s.criterion(s.model(x.repeat(4, 1)), y.repeat(4)).backward()
        s.optimizer.step()


def of_other(s, call):
    """A step on outputs that no call of the private model has given."""
    x, y = s.batch()
    s.criterion(call(s, x), y).backward()
    s.optimizer.step()


def part(s, x):
    return s.model._module[3](s.model._module[0](x).tanh())


def copied(s, x):
    return copy.deepcopy(s.model)(x)


def graphless(s, x):
    with torch.no_grad():
        return s.model(x)


def around(model, x, reentrant=False):
    x = x.clone().requires_grad_(reentrant)
    return checkpoint(model, x, use_reentrant=reentrant)


# A mode, what is done in it, and words of the error.
LOOPS = {
    "raw optimizer": ("ghost_bk", loop("backward", "raw step"), "SGD.step.*passed to"),
    "raw criterion": (
        "ghost_bk",
        loop(lambda s: s.loss(criterion=CE()).backward(), "step"),
        "criterion did not give",
    ),
    "a part": ("ghost", lambda s: of_other(s, part), "do not come from.*a part of it"),
    "a part, h": ("hooks", lambda s: of_other(s, part), "missing.*not a part"),
    "a copy": ("scan", lambda s: of_other(s, copied), "do not come from.*deep copy"),
    "a copy, h": ("hooks", lambda s: of_other(s, copied), "missing.*deep copy"),
    "reentrant": (
        "ghost_bk",
        lambda s: of_other(s, lambda s, x: around(s.model, x, True)),
        "do not come from.*use_reentrant=False",
    ),
    "no graph": (
        "ghost",
        lambda s: of_other(s, graphless),
        "do not come from.*no_grad",
    ),
    "checkpoint": (
        "ghost_bk",
        lambda s: of_other(s, lambda s, x: around(lambda x: s.model(x).exp(), x)),
        "around the private model and more.*inside its forward",
    ),
    "own loss": ("ghost", loop(own_loss, "step"), "criterion did not.*model_losses"),
    "no backward": ("ghost_bk", loop("whole", "zero_grad", "step"), "without clipped"),
    "no backward, h": ("hooks", loop("whole", "zero_grad", "step"), "Per sample grad"),
    "no zero_grad": ("ghost_bk", loop("whole", "backward", "step"), "zero_grad"),
    "no zero_grad, h": ("hooks", loop("whole", "backward", "step"), "zero_g|accumulat"),
    "clip_grad_norm_": (
        "ghost_bk",
        loop("backward", clip_grad_norm, "step"),
        "clip_grad_norm_",
    ),
    "views": ("ghost_bk", lambda s: views(s, s.loader), "K views.*RecordModel"),
    "two": ("ghost_bk", loop("backward", "backward", "step"), "BatchMemoryManager"),
    "two, h": ("hooks", loop("backward", "backward", "step"), "second time.*accumula"),
    "two losses, h": ("hooks", loop("backward", "backward"), "backward.. on their sum"),
    "no_grad": ("ghost_bk", without_grad, "under torch.no_grad"),
    "text": ("ghost_bk", labels(["cat"] * SIZE), "a list of str.*labels as num"),
    "list": ("ghost_bk", labels([1] * SIZE), "a list of int.*tensors"),
    "list in dict": ("ghost_bk", labels({"y": [1] * SIZE}), "a list of int.*tensors"),
    "array": ("ghost_bk", labels(np.ones(SIZE)), "a ndarray of float64.*tensors"),
    "set": ("ghost_bk", labels({1, 2}), "a set, whose items"),
    "mapping": ("ghost_bk", labels(UserDict(y=torch.ones(SIZE))), "a UserDict, whose"),
    "boxes": ("ghost_bk", labels([torch.ones(1)] * SIZE), "a list of Tensor, whose"),
    "l2": ("ghost_bk", lambda s: (s.loss() + l2(s)).backward(), "weight_decay=mu"),
    "l2, h": ("hooks", lambda s: (s.loss() + l2(s)).backward(), "p.lerp_.q, lr . mu"),
    "l2 later": (
        "ghost_bk",
        loop("backward", lambda s: l2(s).backward(), "step"),
        "changed between",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CALLS, *LOOPS])
def test_refused(name):
    if name in CALLS:
        do, words = CALLS[name]
    else:
        mode, run, words = LOOPS[name]
        do = lambda: run(Setup(mode))  # noqa: E731
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){words}"):
        do()


def two_engines():
    first = Setup()
    Setup(module=first.model, optimizer=first.optimizer)


def weighted():
    return sampled(WeightedRandomSampler([1.0] * RECORDS, RECORDS))


def buckets():
    return DataLoader(records(), batch_sampler=[[0, 1], [2, 3]])


def in_loop(mode, do):
    return lambda: do(Setup(mode))


# Calls with one warning each, and its words.
WARNED = {
    "batch over the data": (
        lambda: Setup(data_loader=loader(batch_size=64)),
        "batch_size=64 is over the 32 records",
    ),
    "no Poisson": (lambda: Setup(poisson_sampling=False), "poisson_.*may be larger"),
    "weights": (lambda: Setup(**weighted()), "WeightedRandomSampler is replaced"),
    "buckets": (lambda: Setup(data_loader=buckets()), "list is replaced"),
    "delta": (lambda: Setup().engine.get_epsilon(0.5), "delta=0.5 is more than 1 / 32"),
    "two engines": (two_engines, "another PrivacyEngine.*add up"),
    "left out": (lambda: Setup(**half()), r"2 trainable param.*3.weight, \.\.\."),
    "eval": (in_loop("ghost_bk", loop("eval", *["whole"] * 2)), "in evaluation mode"),
    "divided": (
        in_loop("ghost_bk", loop(*["zero_grad", divided, "step"] * 2)),
        "divided by 4",
    ),
    "views": (
        in_loop("ghost_bk", views),
        "samples, but the loader draws 8 records.*RecordModel",
    ),
    "raw loader": (
        in_loop("ghost_bk", loop("whole", "whole")),
        "go over the returned one",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_warned_once(name):
    do, words = WARNED[name]
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        do()
    ours = [w for w in met if "Secure RNG" not in str(w.message)]
    ours = [w for w in ours if w.category is UserWarning]
    if name != "raw loader":  # which all of these loops have
        ours = [w for w in ours if "no batch from the loader" not in str(w.message)]
    (warned,) = ours
    assert re.search(words, str(warned.message), re.DOTALL)
    assert warned.filename == __file__  # the line of the user's


# -- what is fine ----------------------------------------------------------------------


def evaluated_between(s):
    s.model.eval()
    with torch.no_grad():
        s.loss()
    s.model.train()


HARMLESS = {
    "evaluation": evaluated_between,
    "validation loss": lambda s: s.loss(4),
    "second forward": lambda s: s.model(s.batch()[0]),
    "inputs want gradients": lambda s: s.model(s.batch()[0].requires_grad_()),
    "item": lambda s: f"{s.loss().item():.3f}",
}


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(name, mode):
    results = []
    for do in (HARMLESS[name], lambda s: None):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        s = Setup(mode, module=model, noise_multiplier=0.0)
        for _ in range(3):
            s.optimizer.zero_grad()
            loss = s.loss()
            do(s)
            loss.backward()
            s.optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def by_closure(s):
    def loss():
        s.optimizer.zero_grad()
        value = s.loss()
        value.backward()
        return value

    s.optimizer.step(loss)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_right_loops_are_quiet(mode):
    """The loader of make_private, physical batches, schedulers, a step by closure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Secure RNG")
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        s = Setup(mode, engine=None)
        schedule = torch.optim.lr_scheduler.StepLR(s.raw_optimizer, 1, gamma=0.5)
        with BatchMemoryManager(
            data_loader=s.loader, max_physical_batch_size=2, optimizer=s.optimizer
        ) as batches:
            for _ in range(3):
                for x, y in batches:
                    s.optimizer.zero_grad()
                    s.criterion(s.model(x), y).backward()
                    s.optimizer.step()
        schedule.step()
        assert s.optimizer.param_groups[0]["lr"] == 0.05
        s.optimizer.zero_grad()
        by_closure(s)
        assert 0 < s.engine.get_epsilon(1e-3) < 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_half_of_the_parameters_over_many_steps(mode):
    """Nothing is left of the others that the next step would stumble upon."""
    s = Setup(mode, **half())
    model = s.raw
    before = [p.clone() for p in model.parameters()]
    for _ in range(3):
        s.step()
    moved = [not torch.equal(p, q) for p, q in zip(before, model.parameters())]
    assert moved == [True, True, False, False]


@pytest.mark.filterwarnings("ignore")
def test_penalties_after_the_step():
    """What the error of a penalty says to do is a step along its gradient."""
    s = Setup(noise_multiplier=0.0)
    with pytest.raises(Refused) as error:
        (s.loss() + l2(s)).backward()
    (line,) = re.findall(r"no_grad\(\): (.*?\]);", str(error.value))
    s.step()
    given = {"model": s.model, "lr": 0.1, "mu": 0.5}
    moved = [p.detach().clone() for p in s.model.parameters()]
    given["start"] = [torch.ones_like(p) for p in moved]
    with torch.no_grad():
        eval(line, given)
    for p, q, w in zip(s.model.parameters(), moved, given["start"]):
        assert torch.allclose(p, q - 0.1 * 0.5 * (q - w))
    s.step()


def test_a_list_that_is_a_constant():
    """Also where there are as many samples as it is long, and where there are none."""

    def weighted(y, labels, weights):
        return (nn.functional.cross_entropy(y, labels) * sum(weights)).mean()

    s = Setup(criterion=weighted)
    for size in (8, 2, 1):
        s.optimizer.zero_grad()
        x, y = s.batch(size)
        s.criterion(s.model(x), y, (0.25, 0.5)).backward()
        s.optimizer.step()
    s.optimizer.zero_grad()
    x, y = records()[:0]
    s.criterion(s.model(x), y, ()).backward()
    with pytest.raises(Refused, match="a tuple of float"):
        fresh = Setup(criterion=weighted)
        fresh.criterion(fresh.model(fresh.batch(2)[0]), fresh.batch(2)[1], (0.25, 0.5))
    with pytest.raises(Refused, match="a tuple of float"):  # or two a sample
        fresh = Setup(criterion=weighted)
        fresh.criterion(fresh.model(fresh.batch(2)[0]), fresh.batch(2)[1], (0.25,) * 4)
    with pytest.raises(Refused, match="a tuple of float"):  # its length was 2
        s.criterion(s.model(s.batch(8)[0]), s.batch(8)[1], (0.25, 0.5, 0.25))


@pytest.mark.filterwarnings("ignore")
def test_two_optimizers_of_one_model():
    """The gradients that one clears are not those of the other."""
    model, engine = net(), PrivacyEngine()
    first = Setup(
        "hooks",
        module=model,
        engine=engine,
        optimizer=SGD(model[0].parameters(), lr=0.1),
    )
    last = Setup(
        "hooks",
        module=first.model,
        engine=engine,
        optimizer=SGD(model[3].parameters(), lr=0.1),
    )
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        first.loss().backward()
        for optimizer in (first.optimizer, last.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    assert all(not torch.equal(p, q) for p, q in zip(before, model.parameters()))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_hooks_stand_for_the_model(mode):
    """With wrap_model=False, too."""
    s = Setup(mode, wrap_model=False)
    assert s.model.eval() is s.raw and not s.raw.training
    assert s.model.train() is s.raw and s.raw.training
    assert list(s.model.state_dict()) == list(s.raw.state_dict())
    with pytest.raises(AttributeError, match="nothing"):
        s.model.nothing


def test_raw_optimizer_is_free_again():
    """After ``cleanup()`` the model is not private any more, nor is its optimizer."""
    s = Setup(wrap_model=False)
    s.model.cleanup()
    nn.functional.cross_entropy(s.raw(s.batch()[0]), s.batch()[1]).backward()
    s.raw_optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_epsilon_is_never_below_zero():
    engine = Setup().engine
    assert engine.get_epsilon(0.01) == 0  # before any step
    s = Setup(noise_multiplier=5.0)
    s.step()
    assert s.engine.get_epsilon(0.5) == 0
    assert s.engine.get_epsilon(1e-6) > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp", "prv_bounds"])
def test_epsilon_without_noise_is_infinite(accountant):
    engine = PrivacyEngine(accountant=accountant)
    Setup(engine=engine, noise_multiplier=0.0).step()
    assert engine.get_epsilon(1e-3) == float("inf")


def test_a_loader_is_used_again_with_its_sampling():
    """Two models on batches of one loader: each is accounted for."""
    sampling = Poisson(expected_batch_size=4)
    s = Setup(data_loader=drawn_already(), sampling=sampling)
    for x, y in s.loader:
        s.optimizer.zero_grad()
        s.criterion(s.model(x), y).backward()
        s.optimizer.step()
    ((_, rate, steps),) = s.engine.accountant.history
    assert (rate, steps) == (4 / RECORDS, len(s.loader))

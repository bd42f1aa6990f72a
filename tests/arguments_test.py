"""
What newcomers pass by mistake: None, a class, a text, the wrong order. All of it ends
in ``Refused``, which names the argument, and nothing has changed then.
"""

import re
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext import (
    Monitor,
    PerSample,
    PrivacyArguments,
    PrivacyEngine,
    PrivateTrainer,
    Refused,
    UserRecords,
    check_per_sample_gradients,
    clipped_grads,
    find_leaks,
    model_losses,
    per_sample_grads,
    register_clipping,
)
from opacus_ext.data import Poisson
from opacus_ext.losses import cross_entropy
from opacus_ext.releases import noise_for

X, Y = torch.randn(8, 3), torch.randint(0, 2, (8,))
CRITERION_MODES = ["ghost", "ghost_bk", "scan", "auto"]


class Net(nn.Linear):
    """A model that computes its own loss if it is given labels."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x, labels=None):
        y = super().forward(x)
        return y if labels is None else {"loss": F.cross_entropy(y, labels)}


def make_private(**kwargs):
    model = Net()
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(X, Y), batch_size=4),
        "max_grad_norm": 1.0,
        "grad_sample_mode": "ghost_bk",
        **kwargs,
    }
    engine = PrivacyEngine(accountant="rdp")
    if "target_delta" in kwargs:
        budget = {"target_epsilon": 3.0, "epochs": 1}
        return engine, *engine.make_private_with_epsilon(**{**budget, **given})
    return engine, *engine.make_private(**{"noise_multiplier": 1.0, **given})


SGD = torch.optim.SGD
#: Arguments of make_private, and with a target_delta of make_private_with_epsilon.
OF_MAKE_PRIVATE = {
    "module": [None, Net, "bert", F.relu, SGD(Net().parameters(), 0.1)],
    "optimizer": [None, SGD, "adam", Net()],
    "data_loader": [None, [(X, Y)], TensorDataset(X, Y), X],
    "criterion": ["cross_entropy", nn.CrossEntropyLoss, 1.0],
    "noise_multiplier": [None, "1.0", torch.tensor(1.0), -1.0, True],
    "max_grad_norm": [None, "1.0", torch.tensor(1.0), 0.0],
    "loss_reduction": ["none", "avg", None],
    "noise_generator": [42, "cpu"],
    "sampling": ["poisson", Poisson],
    "noise": ["gauss", None],
    "take": ["items", 0],
    "on_nonfinite": ["skip", None],
    "target_delta": [None, "1e-3", torch.tensor(1e-3), 8.0],
}
OF_THE_BUDGET = {
    "module": [None],
    "optimizer": [None],
    "data_loader": [None],
    "target_epsilon": [None, "3", torch.tensor(3.0), -3.0],
    "epochs": [None, "3", 0],
    "sampling": ["poisson"],
    "noise_multiplier": [1.0],
}


@pytest.mark.parametrize("budget", [False, True], ids=["make_private", "budget"])
def test_make_private(budget):
    table = OF_THE_BUDGET if budget else OF_MAKE_PRIVATE
    more = {"target_delta": 1e-3} if budget else {}
    for name, values in table.items():
        for value in values:
            with pytest.raises(Refused) as error:
                make_private(**{**more, name: value})
            assert name in str(error.value), (name, value)


@pytest.mark.parametrize(
    "name", ["module", "optimizer", "data_loader", "max_grad_norm"]
)
def test_a_missing_argument_is_named(name):
    model = Net()
    given = {
        "module": model,
        "optimizer": SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(X, Y), batch_size=4),
        "max_grad_norm": 1.0,
    }
    del given[name]
    budget = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 1}
    with pytest.raises(TypeError, match=f"missing 1 required.*{name}"):
        PrivacyEngine(accountant="rdp").make_private_with_epsilon(**budget, **given)


def private(mode="ghost_bk"):
    engine, model, optimizer, *_ = make_private(grad_sample_mode=mode)
    return engine, model, optimizer


MODEL = Net()
PARAMS = dict(MODEL.named_parameters())
CE = nn.CrossEntropyLoss
NAMES = [{"by": i % 2} for i in range(4)]
Pair = namedtuple("Pair", "x labels")


def loss(sample):
    return F.cross_entropy(MODEL(sample[0]), sample[1])


def check(model=MODEL, batch=(X, Y), loss_fn=CE(), **kwargs):  # noqa: B008
    return check_per_sample_gradients(
        model, batch, loss_fn, **{"modes": ["ghost_bk"], "verbose": False, **kwargs}
    )


#: A call, and words of its error.
CALLS = {
    "accountant": (lambda: PrivacyEngine(accountant="prvv"), "'prv' meant"),
    "accountant None": (lambda: PrivacyEngine(accountant=None), "There are gdp, prv"),
    "accountant object": (
        lambda: PrivacyEngine(accountant=RDPAccountant()),
        "a value of type RDPAccountant",
    ),
    "epsilon": (lambda: private()[0].get_epsilon(None), "delta must be a number"),
    "statement": (
        lambda: private()[0].privacy_statement(delta="x"),
        "delta must be a numb",
    ),
    "losses": (lambda: model_losses(MODEL, (X, Y)), 'dict.*"labels".*Net takes x, lab'),
    "losses list": (lambda: model_losses(private()[1], [X, Y]), "Net takes x, labels"),
    "losses None": (lambda: model_losses(MODEL, None), "names, got None"),
    "losses turned": (
        lambda: model_losses({"x": X}, MODEL),
        "model must be a torch.nn",
    ),
    "PerSample None": (lambda: PerSample()(None), "losses must be a tensor.*model_lo"),
    "PerSample list": (lambda: PerSample()([1.0]), "losses must be a tensor"),
    "weights": (lambda: PerSample()(X[0], [1.0]), "weights must be a tensor"),
    "cross_entropy": (lambda: cross_entropy({"logits": X}, Y), "output.logits"),
    "labels": (lambda: cross_entropy(X, [0] * 8), "labels must be a tensor"),
    "loss None": (
        lambda: clipped_grads(None, PARAMS, (X, Y), 1.0),
        "loss must be a function of one sample",
    ),
    "loss tensor": (
        lambda: per_sample_grads(X, PARAMS, (X, Y)),
        "loss must be a function of one sample",
    ),
    "model as params": (
        lambda: clipped_grads(loss, MODEL, (X, Y), 1.0),
        "named_parameters",
    ),
    "numbers as params": (
        lambda: clipped_grads(loss, {"w": 1.0}, (X, Y), 1.0),
        r"params\['w'\] is no tensor",
    ),
    "bound text": (lambda: clipped_grads(loss, PARAMS, (X, Y), "flat"), "number"),
    "check None": (lambda: check(model=None), "model must be a torch.nn.Module"),
    "check turned": (lambda: check((X, Y), MODEL), "model must be a torch.nn.Module"),
    "check no loss": (lambda: check(loss_fn=None), "neither loss_fn nor step"),
    "check class": (lambda: check(loss_fn=CE), "the class CrossEntropyLoss"),
    "check function": (lambda: check(loss_fn=F.cross_entropy), "torch.nn.CrossEntropy"),
    "check dict": (lambda: check(batch={"x": X, "y": Y}), "dict of x, y.*model_losses"),
    "check UserDict": (lambda: check(batch=UserDict(x=X)), "UserDict of x"),
    "check tensor": (lambda: check(batch=X), r"a batch \(\*inputs, target\)"),
    "check loader": (lambda: check(batch=DataLoader(X)), "of type DataLoader"),
    "check arrays": (lambda: check(batch=(X.numpy(), Y.numpy())), "of tensors"),
    "check mean": (
        lambda: check(loss_fn=lambda model, batch: loss(batch)),
        'one loss per sample.*mean over the batch.*"none"',
    ),
    "check records": (
        lambda: check(batch=[{"x": x} for x in X], loss_fn=lambda m, b: m(X).sum(1)),
        "no tensor of the batch has 8 rows.*default_collate",
    ),
    "check output": (
        lambda: check(batch=({"x": X, "labels": Y}, Y)),
        "returned a value of type dict, and CrossEntropyLoss.*model_losses",
    ),
    "check dtype": (lambda: check(dtype="float32"), "dtype must be a floating-point"),
    "leaks dict": (lambda: find_leaks(MODEL, {"x": X, "y": Y}, CE()), "dict of x, y"),
    "trainer": (
        lambda: PrivateTrainer(MODEL),
        "PrivateTrainer needs the argument privacy.*got None",
    ),
    "trainer dict": (
        lambda: PrivateTrainer(MODEL, privacy={"target_epsilon": 8}),
        "got a value of type dict",
    ),
    "no budget": (
        lambda: PrivacyArguments(1e-5),
        "either target_epsilon or noise_multiplier.*the noise itself",
    ),
    "budget text": (
        lambda: PrivacyArguments(1e-5, "8"),
        "target_epsilon must be a num",
    ),
    "shared": (
        lambda: PrivacyArguments(1e-5, 8.0, shared="position_ids"),
        r"shared must be a list of names.*\['position_ids'\]",
    ),
    "no records": (lambda: UserRecords(None, "by"), "dataset must be a data set"),
    "iterator": (lambda: UserRecords(iter(NAMES), "by"), "list.records"),
    "no users": (lambda: UserRecords(NAMES, None), "users must be a key"),
    "a number": (lambda: UserRecords(NAMES, 3), "users must be a key"),
    "function": (lambda: UserRecords(NAMES, lambda r: r["by"]), "users must be a key"),
    "all": (
        lambda: UserRecords(NAMES, "by", "all"),
        "records_per_step must be a whole",
    ),
    "1.5": (lambda: UserRecords(NAMES, "by", 1.5), "records_per_step must be a whole"),
    "monitor": (lambda: Monitor(None, private()[2]), "engine must be a PrivacyEngine"),
    "monitor delta": (
        lambda: Monitor(*private()[::2], delta=torch.tensor(1e-5)),
        "delta must be a number.*delta.tolist",
    ),
    "share": (lambda: Monitor(*private()[::2], share="x"), "share must be a number"),
    "rate": (
        lambda: make_private(sampling=Poisson(sample_rate="x")),
        "sample_rate mus",
    ),
    "size": (
        lambda: make_private(sampling=Poisson(expected_batch_size=torch.tensor(4))),
        "expected_batch_size must be a number",
    ),
    "steps": (
        lambda: make_private(sampling=Poisson(sample_rate=0.5, steps="x")),
        "steps must be a whole number",
    ),
    "clipping": (lambda: register_clipping("flat"), "clipping must be a Clipping"),
    "release": (lambda: noise_for("5", 1e-5), "epsilon must be a number"),
    "workspace": (lambda: opacus_ext.workspace("1G"), "num_bytes must be a number"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    call, words = CALLS[name]
    with pytest.raises(Refused, match=words):
        call()


@pytest.mark.parametrize("mode", CRITERION_MODES)
def test_no_criterion_is_that_of_a_model_that_computes_its_own_loss(mode):
    """It clips what PerSample clips, and refuses what is no loss a sample."""
    sums = []
    for criterion in None, PerSample():
        torch.manual_seed(0)
        made = make_private(
            grad_sample_mode=mode, criterion=criterion, noise_multiplier=0.0
        )
        _, model, optimizer, criterion, _ = made
        criterion(model_losses(model, {"x": X, "labels": Y})).backward()
        optimizer.step()
        sums.append([p.grad.clone() for p in model.parameters()])
        with pytest.raises(Refused, match="one loss a sample"):
            criterion(model(X))
    assert all(map(torch.equal, *sums))


def test_no_criterion_in_hooks_is_none():
    """The mode does not return one."""
    assert len(make_private(grad_sample_mode="hooks", criterion=None)) == 4


@dataclass
class Batch:
    x: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize("of_names", [dict, UserDict, Batch, Pair])
def test_batches_that_have_names(of_names):
    losses = model_losses(MODEL, of_names(x=X, labels=Y))
    assert torch.equal(losses, model_losses(MODEL, {"x": X, "labels": Y}))
    assert losses.shape == (8,)


def test_errors_of_a_loss_function_say_how_it_is_called():
    with pytest.raises(TypeError) as error:
        check(loss_fn=lambda batch: batch)
    notes = getattr(error.value, "__notes__", error.value.args)
    assert re.search(r"called as loss_fn\(model, batch\)", str(notes))
    with pytest.raises(TypeError) as error:
        check(batch=list(zip(X, Y[:, None])))
    notes = getattr(error.value, "__notes__", error.value.args)
    assert re.search(r"criterion\(model\(\*inputs\), target\)", str(notes))
    with pytest.raises(TypeError) as error:
        clipped_grads(lambda x, y: MODEL(x).sum(), PARAMS, (X, Y), 1.0)
    notes = getattr(error.value, "__notes__", error.value.args)
    assert "with one argument, a sample" in str(notes)


def test_a_mode_may_be_a_text():
    assert check(modes="ghost_bk").modes == ("ghost_bk",)


def test_class_weights_are_said_to_cancel():
    weights = torch.tensor([1.0, 5.0])
    made = make_private(criterion=CE(weight=weights))
    with pytest.warns(UserWarning, match=r"Class weights cancel.*PerSample\(\)"):
        made[3](made[1](X), torch.arange(8) % 2)

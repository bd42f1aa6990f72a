"""The monitor: its numbers against samples alone, and the noise that pays for them."""

import copy
import math

import pytest
import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import TensorDataset

from opacus_ext.losses import PerSample
from opacus_ext.monitor import THRESHOLDS, Monitor
from opacus_ext.refused import Refused
from tests.common import make_private, net, norms_of, oracle, square_loss
from tests.processes import groups

MODES = ("hooks", "ghost", "ghost_bk", "scan", "auto")
ENDS = "lower", "higher"


SHARED = net(  # a layer is used twice, and one is not used
    lambda m, x: m.last(torch.tanh(m.twice(torch.tanh(m.twice(x))))),
    twice=(4, 4),
    last=(4, 2),
    unused=(3, 3),
)


def batches(count=3, size=6):
    """Inputs whose gradients' norms differ by orders of magnitude."""
    torch.manual_seed(3)
    scale = 4.0 ** torch.randint(-3, 3, (count, size, 1))
    return torch.randn(count, size, 4).double() * scale


def norms_now(plain, model, x):
    """By the oracle, on a copy of the model from before it was private."""
    plain.load_state_dict(model.state_dict())
    return norms_of(oracle(plain, x, square_loss))


def bins_of(norms, bound):
    """How many of the norms each bin holds."""
    edges = bound * torch.tensor(THRESHOLDS, dtype=torch.float64)
    found = torch.bucketize(norms.double(), edges)
    return torch.bincount(found, minlength=len(edges) + 1)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "normalized", "per_layer"])
@pytest.mark.parametrize("mode", [*MODES, "compiled"])
def test_histogram_without_noise(mode, clipping):
    """With noise multiplier 0 what is released is what the bins hold."""
    model = SHARED().double()
    plain = copy.deepcopy(model)
    count = len(list(model.parameters()))
    bound = 2.0 if clipping != "per_layer" else [2.0 / math.sqrt(count)] * count
    given = {"max_grad_norm": bound, "clipping": clipping, "lr": 1e-2}
    steps, by = batches(), "ghost_bk" if mode == "compiled" else mode
    private = make_private(model, by, batch_size=6, **given)
    if mode == "compiled":
        private.module.compile(backend="aot_eager")
    monitor = Monitor(private.engine, private.optimizer)
    norms = []
    for x in steps:
        norms.append(norms_now(plain, model, x))
        private.step(x, square_loss)
    norms = torch.cat(norms)
    assert torch.equal(monitor.state_dict()["_counts"], bins_of(norms, 2).double())
    found = monitor.read()
    assert found["steps"] == 3
    assert found["expected_batch_size"] == found["batch_size"] == 6
    assert found["clipped_fraction_std"] == found["noise_to_signal"] == 0
    clipped = float((norms > 2).double().mean())
    assert 0 < clipped < 1
    assert found["clipped_fraction"] == pytest.approx(clipped)
    for q, name in ((0.25, "q25"), (0.5, "median")):  # within an octave
        low, high = (float(norms.quantile(q, interpolation=x)) for x in ENDS)
        assert low / 2 < found[f"norm_{name}"] < 2 * high
    assert set(monitor.read()) == {"steps"}  # a new window


def linear(noise_multiplier, size=8, mode="ghost_bk", **given):
    given = {"max_grad_norm": 2.0, "lr": 1e-3, **given}
    given["noise_multiplier"] = noise_multiplier
    return make_private(nn.Linear(50, 40), mode, batch_size=size, **given)


def watched(noise_multiplier, size=8, share=0.01):
    private = linear(noise_multiplier, size)
    return private, Monitor(private.engine, private.optimizer, share=share)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clipping", ["flat", "normalized"])
def test_joint_noise(mode, clipping):
    """Noise of gradients and of bins, each over its sensitivity, make the accounted."""
    s, share = 3.0, 0.3
    private = linear(s, mode=mode, clipping=clipping)
    optimizer = private.optimizer
    monitor = Monitor(private.engine, optimizer, share=share)
    sensitivity = 1.0 if clipping == "normalized" else 2.0
    x, grads, bins, before = torch.zeros(8, 50), [], [], torch.zeros(14).double()
    for _ in range(120):  # the gradient of a loss that is constant is noise alone
        optimizer.zero_grad()
        private.backward(x, lambda model, x: model(x).sum(1) * 0)
        optimizer.step()
        grads += [
            p.grad.flatten() * 8 / sensitivity for p in private.module.parameters()
        ]
        bins.append(monitor.state_dict()["_counts"] - before)
        before = monitor.state_dict()["_counts"]
    bins = torch.stack(bins)
    bins[:, 0] -= 8  # all norms are 0
    of_gradients, of_bins = float(torch.cat(grads).std()), float(bins.std())
    assert float(bins.mean()) == pytest.approx(0, abs=4 * of_bins / math.sqrt(1680))
    assert of_gradients == pytest.approx(s / math.sqrt(1 - share), rel=0.01)
    assert of_bins == pytest.approx(s / math.sqrt(share), rel=0.06)
    joint = (of_gradients**-2 + of_bins**-2) ** -0.5
    assert joint == pytest.approx(s, rel=0.05)
    # The declared noise is that exactly, and so is the accountant's.
    declared = optimizer.gradient_noise_multiplier**-2 + share / s**2
    assert declared**-0.5 == pytest.approx(s, rel=1e-12)
    assert private.engine.accountant.history == [(s, 1.0, 120)]


def test_one_record_changes_one_bin_by_one():
    """For samples of any norm, infinite and not-a-number included."""
    private, monitor = watched(0.0, size=3)
    norms = torch.tensor([0.0, 1e-30, 0.1, 2.0, 2.0001, 1e30, math.inf, math.nan])
    private.step(torch.randn(3, 50), square_loss)
    for n in norms:
        counts = []
        for given in ([norms[:4], n[None]], [norms[:4]]):
            monitor._reset()
            monitor.observe(given)
            counts.append(monitor.state_dict()["_counts"])
        assert float((counts[0] - counts[1]).abs().sum()) == 1


def test_what_says_nothing_is_left_out():
    private, monitor = watched(100.0)
    private.step(torch.randn(8, 50), square_loss)
    found = monitor.read()
    assert found["clipped_fraction_std"] > 0.2
    assert not {"clipped_fraction", "norm_median"} & set(found)


def test_noise_is_within_what_is_said():
    """Over many runs the error of the clipped fraction has the std that it states."""
    errors, stated = [], []
    private, monitor = watched(1.0, size=64, share=0.1)
    private.step(torch.randn(64, 50), square_loss)  # so that there is a gradient
    norms = torch.tensor([1.0] * 32 + [3.0] * 32)
    for _ in range(300):
        monitor._reset()
        monitor.observe([norms[:40], norms[40:]])
        found = monitor.read()
        errors.append(found["clipped_fraction"] - 0.5)
        stated.append(found["clipped_fraction_std"])
    errors = torch.tensor(errors)
    assert float(errors.mean()) == pytest.approx(0, abs=0.02)
    assert float(errors.std()) == pytest.approx(stated[0], rel=0.25)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise_to_signal(mode, reduction):
    """The estimate from gradients with noise is near the ratio of exact norms."""
    s, c, size, share = 0.5, 1.0, 16, 0.5
    torch.manual_seed(1)
    given = {"loss_reduction": reduction, "criterion": PerSample(reduction)}
    private = linear(s, size, mode, max_grad_norm=c, **given)
    plain = nn.Linear(50, 40)
    monitor = Monitor(private.engine, private.optimizer, share=share)
    x = torch.randn(16, 50) + 3
    noise = s / math.sqrt(1 - share) * c * math.sqrt(50 * 40 + 40)
    signals = []
    for _ in range(20):
        plain.load_state_dict(private.module._module.state_dict())
        grads = oracle(plain, x, square_loss)
        factor = (c / norms_of(grads)).clamp(max=1)
        sums = [torch.einsum("b,b...->...", factor, g) for g in grads.values()]
        signals.append(sum(float(g.norm()) ** 2 for g in sums))
        private.optimizer.zero_grad()
        losses = square_loss(private.module, x)
        if private.criterion is None:
            getattr(losses, reduction)().backward()
        else:
            private.criterion(losses, None).backward()
        private.optimizer.step()
    expected = noise / math.sqrt(sum(signals) / len(signals))
    assert monitor.read()["noise_to_signal"] == pytest.approx(expected, rel=0.1)


def test_a_signal_below_its_resolution():
    private, monitor = watched(4.0)
    for _ in range(5):
        private.step(torch.zeros(8, 50), lambda model, x: model(x).sum(1) * 0)
    limit = (2040 * 5 / 2) ** 0.25
    assert 0.3 * limit < monitor.read()["noise_to_signal"] <= limit * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_physical_batches_and_poisson(mode):
    """One release a logical batch, of all its parts; draws may be empty."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2).double(), batches(1, 12)[0]
    norms = norms_of(oracle(model, x, square_loss))
    given = dict(dataset=TensorDataset(x), poisson_sampling=True, lr=0.0)
    private = make_private(model, mode, batch_size=2, max_grad_norm=0.5, **given)
    monitor = Monitor(private.engine, private.optimizer)
    seen = []
    for _ in range(3):
        with private.parts(2) as parts:
            for (part,) in parts:
                private.step(part, square_loss)
                seen += [float(n) for y in part for n in norms[(x == y).all(1)]]
    expected = bins_of(torch.tensor(seen), 0.5).double()
    assert torch.equal(monitor.state_dict()["_counts"], expected)
    found = monitor.read()
    assert found["steps"] == 18 == private.engine.accountant.history[0][-1]
    assert found["batch_size"] == pytest.approx(len(seen) / 18)


def test_a_backward_pass_that_no_step_used_is_not_seen():
    private, monitor = watched(0.0)
    x = torch.randn(8, 50)
    private.backward(x, square_loss)
    private.step(x, square_loss)
    private.step(x, square_loss)
    assert monitor.read()["batch_size"] == 8


def test_samples_that_are_not_finite_and_no_samples():
    private, monitor = watched(0.0, size=4)
    x = torch.randn(4, 50)
    x[1] = math.inf
    with pytest.warns(RuntimeWarning):
        private.step(x, square_loss)
    assert monitor.state_dict()["_counts"][-1] == 1
    assert monitor.read()["batch_size"] == 4
    private.step(x[:0], square_loss)
    assert monitor.read()["batch_size"] == 0


def test_epsilon_is_the_accountants():
    private = linear(2.0)
    engine = private.engine
    monitor = Monitor(engine, private.optimizer, delta=1e-3)
    assert monitor.read() == {"epsilon": 0.0, "steps": 0}
    private.step(torch.randn(8, 50), square_loss)
    assert monitor.read()["epsilon"] == engine.get_epsilon(1e-3)
    private.optimizer.noise_multiplier = 0.0
    private.step(torch.randn(8, 50), square_loss)
    assert monitor.read()["epsilon"] == math.inf


def test_goes_on_from_a_state():
    """Two windows in one, bit for bit."""
    x = torch.randn(2, 8, 50)

    def run(stop):
        torch.manual_seed(0)
        private, monitor = watched(1.0)
        private.step(x[0], square_loss)
        if stop:
            state = copy.deepcopy(monitor.state_dict())
            monitor.close()
            monitor = Monitor(private.engine, private.optimizer)
            monitor.load_state_dict(state)
        private.step(x[1], square_loss)
        return monitor.read()

    assert run(False) == run(True)


def test_close():
    private = linear(1.0)
    optimizer = private.optimizer
    monitor = Monitor(private.engine, optimizer, share=0.5)
    assert optimizer.gradient_noise_multiplier == pytest.approx(math.sqrt(2))
    with pytest.raises(Refused, match="has a monitor"):
        Monitor(private.engine, optimizer)
    monitor.close()
    assert optimizer.gradient_noise_multiplier == 1.0
    private.step(torch.randn(8, 50), square_loss)
    assert monitor.read() == {"steps": 0}
    monitor.close()


@pytest.mark.parametrize("given", [{"share": 0.0}, {"share": 1.0}, {"delta": 1.0}])
def test_refusals(given):
    private = linear(1.0)
    ((name, value),) = given.items()
    with pytest.raises(Refused, match=f"{name} must be .*got {value}"):
        Monitor(private.engine, private.optimizer, **given)
    assert not private.optimizer.observers


def test_an_optimizer_of_opacus_is_refused():
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 1}
    with pytest.raises(Refused, match="DPOptimizer"):
        Monitor(PrivacyEngine(), DPOptimizer(sgd, **given))


def one_of_two():
    rank, found = torch.distributed.get_rank(), {}
    torch.manual_seed(rank)
    for s in (2.0, 0.0):
        given = {"noise_multiplier": s, "max_grad_norm": 2.0, "batch_size": 4}
        made = make_private(DPDDP(nn.Linear(50, 40)), "ghost_bk", **given)
        monitor = Monitor(made.engine, made.optimizer, share=0.3)
        for _ in range(40 if s else 1):
            made.step(torch.zeros(4 + 2 * rank, 50), lambda m, x: m(x).sum(1) * 0)
        found[s] = monitor.state_dict()["_counts"], monitor.read()
    return found


def jobs(folder, size):
    return {"found": one_of_two}


group = groups(jobs)


@pytest.mark.thorough
def test_two_processes(group):
    """One noise for both, which know the same of the samples of both."""
    first, second = group(2).of("found")
    for key, (counts, read) in first.items():
        assert torch.equal(counts, second[key][0])
        assert str(second[key][1]) == str(read)  # with nan
    counts, read = first[0.0]
    assert counts.tolist() == [10.0] + [0.0] * 13  # 4 and 6 samples of norm 0
    assert read["batch_size"] == 10
    counts, read = first[2.0]
    # In 40 steps each bin has noise of std 2 / sqrt(0.3), once a step.
    std = float((counts - torch.tensor([400.0] + [0.0] * 13)).pow(2).mean().sqrt())
    assert std == pytest.approx(2 * math.sqrt(40 / 0.3), rel=0.5)
    # Nothing but noise in gradients that both have summed.
    limit = (2040 * 40 / 2) ** 0.25
    assert 0.4 * limit < read["noise_to_signal"] <= limit * (1 + 1e-9)


@pytest.mark.filterwarnings("ignore")
def test_trainer(tmp_path):
    """A run that goes on from a checkpoint between two logs logs the same."""
    from tests.trainer_test import private, trainer

    def logs(folder, kind, resume=None):
        given = {"max_steps": 4, "logging_steps": 3, "save_strategy": "steps"}
        made = trainer(
            tmp_path / folder,
            privacy=private(monitor=kind, noise_multiplier=0.02),
            save_steps=2,
            **given,
        )
        made.train(resume_from_checkpoint=resume)
        history = made.engine.accountant.history
        assert [(s, n) for s, _, n in history] == [(0.02, 4)]
        (found,) = [x for x in made.state.log_history if x["step"] == 3]
        return {name: x for name, x in found.items() if name != "loss"}

    first = logs("a", "private")
    assert first["steps"] == 3 and "norm_median" in first
    assert 0 <= first["clipped_fraction"] <= 1 and first["noise_to_signal"] > 0
    assert logs("b", "private", str(tmp_path / "a" / "checkpoint-2")) == first
    off = logs("c", "off")
    assert not any("norm" in name for name in off)

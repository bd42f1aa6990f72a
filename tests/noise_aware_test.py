"""Adam that knows of the noise, and gradients that are scaled before they are clipped.

The oracle of scaled sums is each sample alone by plain autograd in float64, divided,
clipped and added. That of AdamBC is the formula of the paper, entry by entry.
"""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext import Refused, clipped_grads
from opacus_ext.distributed import expert_parallel
from opacus_ext.layers import TopKFeedForward
from opacus_ext.optimizers import AdamBC, Banded, ScaledAdam

from .common import clipped_sum, norms_of, oracle, trainable

MODES = ("hooks", "ghost", "ghost_bk", "scan", "auto")
BOTH = AdamBC, ScaledAdam


class Everything(nn.Module):
    """Tied, convolved, normalized, recurrent, unused, frozen, and used twice."""

    def __init__(self, branches=False):
        super().__init__()
        self.branches = branches
        self.rows, self.twice = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.conv, self.image = nn.Conv1d(6, 6, 3, padding=1), nn.Conv2d(1, 4, 3)
        self.norm, self.recurrent = nn.LayerNorm(6), nn.LSTM(6, 3, batch_first=True)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.rows.weight
        self.experts = TopKFeedForward(6, 4, 2)
        self.unused, self.frozen = nn.Parameter(torch.ones(3)), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        hidden = self.conv(self.norm(self.rows(ids)).mT).mT
        if self.branches and bool((ids > 3).any()):
            hidden = hidden.sin()
        hidden = self.frozen(self.twice(self.twice(hidden).tanh()))
        image = self.image(hidden[:, None]).sin().mean((1, 2, 3))
        recurrent = self.recurrent(hidden)[0].square().mean((1, 2))
        hidden = hidden + self.experts(hidden)
        return self.head(hidden), image + recurrent


def losses(model, batch):
    logits, others = model(batch)
    targets = batch.roll(1, 1)
    return F.cross_entropy(logits.mT, targets, reduction="none").mean(1) + others


def scales_of(model, kind):
    """Returns scales by name, and the same as tensors of the parameters' shapes."""
    given, whole = {}, {}
    for name, p in trainable(model).items():
        if name == "conv.bias":  # has none
            continue
        shapes = [p.shape]
        if p.dim() > 1 and kind == "vectors":
            shapes = [p.shape[:1], (p[0].numel(),)]
        if kind == "axes":
            shapes = [(size,) for size in p.shape]
        vectors = [torch.rand(shape).double() + 0.3 for shape in shapes]
        given[name], whole[name] = tuple(vectors), outer(vectors).view(p.shape)
        if kind == "flat":
            given[name] = (vectors[0].flatten(),)
        elif kind == "tensors":
            given[name] = vectors[0]
    return given, whole


def outer(vectors):
    product = torch.ones(1).double()
    for vector in vectors:
        product = (product[:, None] * vector.flatten()).flatten()
    return product


def divided(grads, whole):
    return {name: g / whole[name] if name in whole else g for name, g in grads.items()}


@pytest.mark.parametrize("size, length", [(5, 4), (1, 4), (0, 4), (3, 40)])
@pytest.mark.parametrize("kind", ["vectors", "axes", "tensors", "flat"])
@pytest.mark.parametrize("branches", [False, True])
def test_scaled_sums(size, length, kind, branches):
    torch.manual_seed(size)
    model, batch = Everything(branches).double(), torch.randint(7, (size, length))
    given, whole = scales_of(model, kind)
    grads = divided(oracle(model, batch, losses), whole)
    found = clipped_grads(
        lambda ids: losses(model, ids).sum(), trainable(model), batch, 0.5, scale=given
    )
    torch.testing.assert_close(found.norms, norms_of(grads), rtol=1e-8, atol=1e-8)
    expected = clipped_sum(grads, max_grad_norm=0.5)
    torch.testing.assert_close(found.sums, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "scale, words",
    [
        ({"a": torch.ones(2)}, "no trainable parameter"),
        ({"weight": torch.ones(2)}, "shape"),
        ({"weight": (torch.ones(2), torch.ones(4))}, "shape"),
        ({"weight": (torch.ones(3), torch.ones(2))}, "shape"),
        ({"weight": (torch.ones(2, 1), torch.ones(3))}, "shape"),
        ({"weight": torch.zeros(2, 3)}, "positive"),
        ({"weight": 2.0}, "a tensor or a tuple"),
        ({"weight": ()}, "shapes"),
        ({"weight": (torch.ones(2), torch.full((3,), math.inf))}, "positive"),
        ({"weight": (-torch.ones(2), -torch.ones(3))}, "positive"),
        ({"weight": (torch.full((2,), 1e-20), torch.full((3,), 1e-20))}, "overflows"),
    ],
)
def test_scales_that_do_not_fit(scale, words):
    params, x = dict(nn.Linear(3, 2).named_parameters()), torch.randn(4, 3)
    with pytest.raises(Refused, match=words):
        clipped_grads(
            lambda x: (x @ params["weight"].T).sum(), params, x, 1.0, scale=scale
        )


@pytest.mark.thorough
def test_scales_are_not_compiled():
    weight, x = torch.ones(3, requires_grad=True), torch.randn(4, 3)

    @torch.compile(fullgraph=True, backend="eager")
    def step(x):
        return clipped_grads(
            lambda x: (x @ weight).sum(), {"w": weight}, x, 1.0, scale={"w": weight}
        )

    with pytest.raises(Exception, match="scale can't be compiled"):
        step(x)


# -- in make_private -------------------------------------------------------------------


def private(model, optimizer, mode="ghost_bk", records=8, **given):
    """Returns engine, model, optimizer, criterion and loader."""
    data = TensorDataset(torch.randint(7, (records, 4)))
    given = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, **given}
    given.setdefault("poisson_sampling", False)
    engine = opacus_ext.PrivacyEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called, optimizer, *criterion, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            criterion=None if mode != "hooks" else nn.CrossEntropyLoss(),
            data_loader=DataLoader(data, given.pop("batch_size", records)),
            grad_sample_mode=mode,
            **given,
        )
    criterion = (criterion or [torch.mean])[0]
    return engine, called, optimizer, criterion, loader


def step(run, batch):
    _, called, optimizer, criterion, _ = run
    optimizer.zero_grad()
    criterion(losses(called, batch)).backward()
    optimizer.step()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Scaling(torch.optim.SGD):
    """An optimizer of a user, with the scales that ``scales_of`` makes."""

    def __init__(self, params, scales_of, lr=0.0):
        super().__init__(params, lr=lr)
        self.scales_of = scales_of

    def gradient_scales(self):
        return self.scales_of(self.param_groups[0]["params"])


@pytest.mark.parametrize(
    "scales_of, words",
    [
        (lambda params: None, "no dict"),
        (lambda params: {"head.weight": torch.ones(7, 6)}, "no dict"),
        (lambda params: {p: (torch.ones(1),) for p in params if p.dim()}, "shapes"),
        (lambda params: {p: 2.0 for p in params}, "a tensor or a tuple of tensors"),
    ],
)
def test_own_scales_that_do_not_fit(scales_of, words):
    model = nn.Embedding(7, 6)
    run = private(model, Scaling(model.parameters(), scales_of))
    _, called, optimizer, criterion, loader = run
    with pytest.raises(Refused, match=words):
        criterion(called(next(iter(loader))[0]).square().sum((1, 2))).backward()


def test_a_monitor_takes_the_scales_into_account():
    """To divide by 0.01 and clip at C is to clip at C / 100."""
    found = []
    for scale, bound in ((1.0, 0.5), (0.01, 50.0)):
        torch.manual_seed(1)
        model = nn.Embedding(7, 6)

        def scales_of(params, scale=scale):
            return {p: torch.full_like(p, scale) for p in params}

        optimizer = Scaling(model.parameters(), scales_of)
        run = private(model, optimizer, max_grad_norm=bound, noise_multiplier=0.1)
        engine, called, optimizer, criterion, loader = run
        monitor = opacus_ext.Monitor(engine, optimizer)
        for (batch,) in loader:
            optimizer.zero_grad()
            criterion(called(batch).square().sum((1, 2))).backward()
            optimizer.step()
        found.append(monitor.read()["noise_to_signal"])
    assert found[0] == pytest.approx(found[1], rel=1e-3) and found[0] < 1


def test_an_attribute_of_the_instance_counts():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.noise_variance = None
    with pytest.raises(Refused, match="no_op"):
        private(model, optimizer, mode="no_op")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_noise_it_is_adam(mode, kind, decay):
    """Nothing is clipped, so that the gradient is that of the whole batch."""
    torch.manual_seed(0)
    model = Everything().double()
    plain = copy.deepcopy(model)
    options = dict(lr=0.01, weight_decay=decay)
    run = private(
        model,
        kind(model.parameters(), **options),
        mode,
        noise_multiplier=0.0,
        max_grad_norm=1e9,
    )
    adam = torch.optim.AdamW(plain.parameters(), **options)
    for _ in range(4):
        batch = torch.randint(7, (8, 4))
        step(run, batch)
        adam.zero_grad()
        losses(plain, batch).mean().backward()
        plain.unused.grad = torch.zeros(3).double()
        adam.step()
    for name, p in plain.named_parameters():
        found = model.get_parameter(name)
        torch.testing.assert_close(found, p, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("kind", BOTH)
def test_without_make_private_it_is_adam_bit_for_bit(kind):
    torch.manual_seed(0)
    model = Everything()
    plain = copy.deepcopy(model)
    options = dict(lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), maximize=True)
    aware = kind(model.parameters(), **options)
    adam = torch.optim.AdamW(plain.parameters(), **options)
    calls = []
    aware.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(3):
        batch = torch.randint(7, (8, 4))
        for some, optimizer in ((model, aware), (plain, adam)):
            optimizer.zero_grad()

            def closure():
                loss = losses(some, batch).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    assert len(calls) == 3
    for name, p in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_variance_that_it_is_told(mode, reduction):
    """That of what was added, over a batch without samples, of many entries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 500), nn.Linear(500, 1))
    optimizer = AdamBC(model.parameters(), lr=0.0)
    told = []
    optimizer.register_step_pre_hook(lambda o, *_: told.append(o.noise_variance))
    data = TensorDataset(torch.zeros(8, 40))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, called, *_ = made = opacus_ext.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=nn.MSELoss(reduction=reduction),
            data_loader=DataLoader(data, 8),
            noise_multiplier=3.0,
            max_grad_norm=0.5,
            loss_reduction=reduction,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    called, optimizer, *criterion, _ = made
    criterion = (criterion or [nn.MSELoss(reduction=reduction)])[0]
    criterion(0 * called(torch.zeros(8, 40)), torch.zeros(8, 1)).backward()
    optimizer.step()
    expected = (3.0 * 0.5 / (8 if reduction == "mean" else 1)) ** 2
    assert told == [pytest.approx(expected)]
    variance = torch.cat([p.grad.flatten() for p in model.parameters()]).var()
    assert float(variance) == pytest.approx(expected, rel=0.05)


def test_the_variance_follows_the_bound_the_parts_and_correlated_noise():
    torch.manual_seed(0)

    def told_by(parts=1, steps=3, **given):
        model = Everything().double()
        optimizer, told = AdamBC(model.parameters(), lr=0.01), []
        optimizer.register_step_pre_hook(lambda o, *_: told.append(o.noise_variance))
        run = private(model, optimizer, **given)
        for _ in range(steps):
            for part in range(parts):
                run[2].signal_skip_step(do_skip=part < parts - 1)
                step(run, torch.randint(7, (8 // parts, 4)))
        return told, run[2]

    bounds = []
    told, optimizer = told_by(clipping="adaptive", unclipped_num_std=100.0)
    for std in told:
        bounds.append(std**0.5 * 8 / optimizer.gradient_noise_multiplier)
    assert bounds[0] == pytest.approx(0.5) and bounds[1] != pytest.approx(0.5)
    assert optimizer.max_grad_norm != pytest.approx(bounds[-1])
    assert told_by(parts=2)[0] == [pytest.approx((0.5 / 8) ** 2)] * 3
    noise = Banded(bands=2, steps=3)
    sampling = opacus_ext.data.CyclicPoisson(sample_rate=0.5, bands=2)
    told, optimizer = told_by(noise=noise, sampling=sampling, poisson_sampling=True)
    std = 0.5 / optimizer.expected_batch_size
    assert told[0] == pytest.approx((std * optimizer.correlated.strategy.factor) ** 2)
    assert told[1] > told[0] * 1.1


def test_the_formula_of_adam_bc():
    torch.manual_seed(0)
    p, lr, beta1, beta2, floor = (
        nn.Parameter(torch.randn(50).double()),
        0.1,
        0.9,
        0.99,
        0.3,
    )
    optimizer = AdamBC([p], lr=lr, betas=(beta1, beta2), floor=floor, weight_decay=0.2)
    expected, m, v, noise = p.detach().clone(), 0, 0, 0
    for t, phi in enumerate([1.0, 2.0, 0.5, 0.5], 1):
        p.grad = torch.randn(50).double()
        optimizer.noise_variance = phi
        optimizer.step()
        assert optimizer.noise_variance is None
        m = beta1 * m + (1 - beta1) * p.grad
        v = beta2 * v + (1 - beta2) * p.grad**2
        noise = beta2 * noise + (1 - beta2) * phi
        squares, of_noise = v / (1 - beta2**t), noise / (1 - beta2**t)
        root = (squares - of_noise).clamp(min=floor * of_noise).sqrt()
        expected *= 1 - lr * 0.2
        expected -= lr * m / (1 - beta1**t) / root
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_scaled_steps(mode, clipping):
    """The gradient of a step is the sum of clipped, divided gradients, scaled back."""
    torch.manual_seed(0)
    model = Everything().double()
    optimizer = ScaledAdam(model.parameters(), lr=0.05)
    names = {p: name for name, p in model.named_parameters()}
    count = len(trainable(model))
    bound = [0.1 * (i + 1) for i in range(count)] if clipping == "per_layer" else 0.3
    run = private(
        model,
        optimizer,
        mode,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        clipping=clipping,
    )
    for size in (8, 5, 8):
        batch, whole = torch.randint(7, (size, 4)), {}
        for p, vectors in optimizer.gradient_scales().items():
            whole[names[p]] = outer(vectors).view(p.shape)
        grads = divided(oracle(model, batch, losses), whole)
        sums = clipped_sum(grads, clipping, bound)
        step(run, batch)
        for name, p in trainable(model).items():
            expected = sums[name] * whole.get(name, 1.0) / 8
            torch.testing.assert_close(p.grad, expected, rtol=1e-7, atol=1e-9, msg=name)
    assert len(whole) == count


@pytest.mark.thorough
def test_a_compiled_model_clips_eagerly():
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(16, 3))
        optimizer = ScaledAdam(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(3)
        engine, called, *others = private(model, optimizer, noise_generator=generator)
        if compiled:
            called = torch.compile(called, backend="aot_eager")
        for _ in range(3):
            batch = torch.randint(7, (8, 4))
            others[0].zero_grad()
            others[1](called(batch).square().sum(1)).backward()
            others[0].step()
        assert ("compiled" in others[0].ran) is compiled
        found.append(weights(model))
    torch.testing.assert_close(*found)


def test_the_noise_has_the_scale():
    torch.manual_seed(0)
    model = nn.Linear(400, 300, bias=False)
    optimizer = ScaledAdam(model.parameters(), lr=0.0, least=0.05)
    data = DataLoader(TensorDataset(torch.zeros(8, 400)), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called, private_one, criterion, _ = opacus_ext.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=data,
            criterion=nn.MSELoss(),
            noise_multiplier=3.0,
            max_grad_norm=0.5,
            poisson_sampling=False,
            grad_sample_mode="ghost_bk",
        )
    scale = torch.rand(300) + 0.1, torch.rand(400) + 0.1
    optimizer.gradient_scales = lambda: {model.weight: scale}
    criterion(0 * called(torch.zeros(8, 400)), torch.zeros(8, 300)).backward()
    private_one.step()
    noise = model.weight.grad / torch.outer(*scale)
    assert float(noise.std()) == pytest.approx(3.0 * 0.5 / 8, rel=0.02)


def test_scales_of_second_moments():
    """Their mean square is 1; rows and columns have the proportions of the roots."""
    torch.manual_seed(0)
    rows, *columns = [torch.rand(size).double() + 0.1 for size in (6, 2, 2)]
    weight, bias = nn.Parameter(torch.zeros(6, 2, 2).double()), nn.Parameter(rows * 0)
    optimizer = ScaledAdam([weight, bias], every=2, least=1e-6)
    for number in range(102):
        weight.grad = outer([rows, *columns]).view(6, 2, 2)
        bias.grad = 10 * rows
        before = optimizer.gradient_scales().get(weight)
        optimizer.step()
        stays = optimizer.gradient_scales().get(weight) is before
        assert stays is (number % 2 == 0)
    scales = optimizer.gradient_scales()
    whole = outer(scales[weight]).view(6, 2, 2)
    ratio = whole / weight.grad
    torch.testing.assert_close(ratio, ratio[:1, :1, :1].expand(6, 2, 2))
    torch.testing.assert_close(scales[bias][0], ratio[0, 0, 0] * bias.grad)
    squares = torch.cat([whole.flatten(), scales[bias][0]]).square()
    assert float(squares.mean()) == pytest.approx(1)
    weight.grad, bias.grad = 0 * weight, 0 * bias
    fresh = ScaledAdam([weight, bias])
    fresh.step()
    assert fresh.gradient_scales() == {}


@pytest.mark.parametrize("beta2", [0.9, 0.999])
def test_the_first_draws_of_noise_do_not_stay_in_the_scales(beta2):
    """The noise of a step has the proportions of the scales, and comes back in them."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(size)) for size in ((32,), (32, 1), (1, 32))]
    optimizer = ScaledAdam(params, lr=0.0, betas=(0.9, beta2))
    for _ in range(200):
        scales = optimizer.gradient_scales()
        for p in params:
            vectors = [*scales.get(p, [torch.ones(p.numel())])]
            p.grad = (outer(vectors) * torch.randn(p.numel())).view(p.shape).float()
        optimizer.step()
    for p, vectors in optimizer.gradient_scales().items():
        whole = outer(vectors)
        assert float(whole.max() / whole.min()) < 1.6


def test_a_parameter_that_has_met_no_noise():
    """Others have; its gradients of zero leave it where it is."""
    known, late = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = AdamBC([known, late], lr=0.1)
    for variance in (1.0, 0.0):
        known.grad = torch.randn(3)
        optimizer.noise_variance = variance
        optimizer.step()
        late.grad = torch.zeros(3)
    assert known.isfinite().all() and torch.equal(late, torch.ones(3))


def test_a_parameter_without_entries():
    params = [nn.Parameter(torch.ones(size)) for size in ((3, 0), (2, 3), ())]
    optimizer = ScaledAdam(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert {*optimizer.gradient_scales()} == {*params[1:]}


@pytest.mark.parametrize("kind", BOTH)
def test_a_run_that_goes_on(kind, tmp_path):
    """Bit for bit, from a checkpoint of the engine, with a schedule."""

    def begin():
        torch.manual_seed(0)
        model = Everything()
        optimizer = kind(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(5)
        run = private(model, optimizer, noise_generator=generator)
        return (
            model,
            run,
            torch.optim.lr_scheduler.LambdaLR(run[2], lambda t: 1 / (t + 1)),
        )

    batches = [torch.randint(7, (8, 4)) for _ in range(5)]
    model, run, schedule = begin()
    path = tmp_path / "run.pt"
    for number, batch in enumerate(batches):
        step(run, batch)
        schedule.step()
        if number == 2:
            given = dict(path=path, module=model, optimizer=run[2])
            run[0].save_checkpoint(
                **given, checkpoint_dict={"schedule": schedule.state_dict()}
            )
    other, run, schedule = begin()
    given = dict(path=path, module=other, optimizer=run[2], repeat_noise=True)
    schedule.load_state_dict(run[0].load_checkpoint(**given)["schedule"])
    for batch in batches[3:]:
        step(run, batch)
        schedule.step()
    for name, p in model.named_parameters():
        assert torch.equal(other.get_parameter(name), p), name


@pytest.mark.parametrize("kind", BOTH)
def test_a_checkpoint_of_adam(kind):
    p = nn.Parameter(torch.ones(3, 2))
    adam, aware = torch.optim.AdamW([p]), kind([p])
    p.grad = torch.ones(3, 2)
    adam.step()
    aware.load_state_dict(adam.state_dict())
    aware.noise_variance = 1.0
    aware.step()
    assert int(aware.state[p]["step"]) == 2 and p.isfinite().all()


@pytest.mark.parametrize("kind", BOTH)
def test_physical_batches(kind):
    """Parts of a batch have one scale, and give the step of the whole batch."""
    found = []
    for most in (8, 3):
        torch.manual_seed(0)
        model = Everything().double()
        generator = torch.Generator().manual_seed(5)
        optimizer = kind(model.parameters(), lr=0.01)
        run = private(
            model, optimizer, noise_generator=generator, records=16, batch_size=8
        )
        with BatchMemoryManager(
            data_loader=run[4], max_physical_batch_size=most, optimizer=run[2]
        ) as loader:
            for (batch,) in loader:
                step(run, batch)
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", BOTH)
def test_opacus_own_mode_is_refused(kind):
    model = nn.Linear(4, 2)
    with pytest.raises(Refused, match="no_op") as error:
        private(model, kind(model.parameters()), "no_op")
    assert kind.__name__ in str(error.value)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: AdamBC(p, floor=0), "floor"),
        (lambda p: ScaledAdam(p, every=0), "every"),
        (lambda p: ScaledAdam(p, every=1.5), "every"),
        (lambda p: ScaledAdam(p, least=1), "least"),
    ],
)
def test_settings_that_do_not_fit(make, words):
    with pytest.raises(Refused, match=words):
        make(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize("kind", BOTH)
def test_copies_keep_the_settings(kind):
    own = {"floor": 0.3} if kind is AdamBC else {"every": 3, "least": 0.2}
    optimizer = copy.deepcopy(kind(nn.Linear(2, 2).parameters(), **own))
    assert {name: optimizer.defaults[name] for name in own} == own


@pytest.fixture
def one_process_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("spread", [fully_shard, expert_parallel])
def test_parts_of_parameters_have_no_scales(spread, one_process_of_one):
    model = spread(nn.Sequential(nn.Linear(4, 4), TopKFeedForward(4, 4, 2)))
    with pytest.raises(Refused, match="ScaledAdam scales gradients before"):
        private(model, ScaledAdam(model.parameters()))

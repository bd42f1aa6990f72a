"""Properties that every mode has, whatever the model."""

import copy

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import Refused
from tests.common import (
    CRASHES,
    MODES,
    PerSample,
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    make_private,
    next_token_loss,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    trainable,
    wrapped_or_not,
)

V, T, B = 13, 5, 6
every_mode = pytest.mark.parametrize("mode", [*MODES, "scan"])
ghost_modes = pytest.mark.parametrize("mode", ["ghost", "ghost_bk", "scan"])


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Small(nn.Module):
    """Something of everything: tied embedding, positions, norm, a repeated block."""

    def __init__(self, d=4, use_checkpoint=None):
        super().__init__()
        self.embedding = nn.Embedding(V, d)
        self.positions = nn.Embedding(T, d)
        self.block = Block(d)
        self.head = nn.Linear(d, V, bias=False)
        self.head.weight = self.embedding.weight
        self.use_checkpoint = use_checkpoint

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.size(1)))
        for _ in range(2):
            if self.use_checkpoint is None:
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.use_checkpoint)
        return self.head(x)


def small(**kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Small(**kwargs).double()


def token_loss(model, ids):
    return next_token_loss(model(ids), ids)


def ids_of(size=B, seed=0):
    return torch.randint(0, V, (size, T), generator=torch.Generator().manual_seed(seed))


def snapshot(model):
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def update(before, model, scale):
    return {n: (before[n] - p.detach()) * scale for n, p in trainable(model).items()}


def _steps(engine):
    return sum(steps for _, _, steps in engine.accountant.history)


@every_mode
@wrapped_or_not
def test_exact(mode, wrap):
    check(mode, wrap, small(), ids_of(), token_loss)


@every_mode
@wrapped_or_not
def test_huge_clipping_norm_is_plain_sgd(mode, wrap):
    model, ids = small(), ids_of()
    token_loss(model, ids).sum().backward()
    expected = {name: p.grad.clone() for name, p in trainable(model).items()}
    model.zero_grad(set_to_none=True)
    got = run_mode(mode, wrap, model, ids, token_loss, max_grad_norm=1e9)
    assert_same(got, expected)


@every_mode
@pytest.mark.parametrize("max_grad_norm", [1e-6, 1e-2, 1.0, 10.0])
def test_each_sample_moves_the_sum_by_at_most_c(mode, max_grad_norm):
    """Sensitivity, measured: leave each sample out in turn."""
    model, ids = small(), ids_of()
    whole = run_mode(mode, True, model, ids, token_loss, max_grad_norm=max_grad_norm)
    for b in range(B):
        rest = torch.cat([ids[:b], ids[b + 1 :]])
        part = run_mode(
            mode, True, model, rest, token_loss, max_grad_norm=max_grad_norm
        )
        gap = torch.stack([(whole[n] - part[n]).norm() for n in whole]).norm()
        assert gap <= max_grad_norm * (1 + 1e-6) + 1e-12


@every_mode
def test_order_of_samples_does_not_matter(mode):
    model, ids = small(), ids_of()
    got = run_mode(mode, True, model, ids, token_loss, max_grad_norm=0.3)
    other = run_mode(mode, True, model, ids.flip(0), token_loss, max_grad_norm=0.3)
    assert_same(other, got)


def test_grad_sample_follows_the_samples():
    """In "hooks" row b of grad_sample is sample b."""
    model, ids = small(), ids_of()
    expected = oracle(model, ids, token_loss)
    private = make_private(model, "hooks", batch_size=B)
    private.backward(ids.flip(0), token_loss)
    got = {name: p.grad_sample for name, p in trainable(model).items()}
    assert_same(got, {name: g.flip(0) for name, g in expected.items()})


@ghost_modes
@wrapped_or_not
def test_grad_after_backward_is_the_clipped_sum(mode, wrap):
    model, ids = small(), ids_of()
    grads = oracle(model, ids, token_loss)
    c = half_clipped(grads)
    private = make_private(model, mode, wrap, batch_size=B, max_grad_norm=c)
    private.backward(ids, token_loss)
    got = {name: p.grad.clone() for name, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c))


@ghost_modes
def test_second_backward_before_the_step_is_refused(mode):
    """It would lose the first one's sums, which stay as they are."""
    model, ids = small(), ids_of()
    private = make_private(model, mode, batch_size=B)
    private.backward(ids, token_loss)
    before = {n: p.grad.clone() for n, p in trainable(model).items()}
    with pytest.raises(RuntimeError, match="second time before optimizer.step"):
        private.backward(ids, token_loss)
    assert_same({n: p.grad for n, p in trainable(model).items()}, before)


@ghost_modes
@pytest.mark.parametrize("bound", [1e-3, float("inf")])
def test_gradients_changed_before_the_noise_are_refused(mode, bound):
    """Such as clip_grad_norm_, which would clip the sum without its noise."""
    model, ids = small(), ids_of()
    before = snapshot(model)
    private = make_private(model, mode, batch_size=B, max_grad_norm=1.0)
    private.backward(ids, token_loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
    with pytest.raises(RuntimeError, match="changed between backward"):
        private.optimizer.step()
    assert_same(snapshot(model), before)
    private.optimizer.zero_grad()
    private.step(ids, token_loss)
    assert update(before, model, B)


@every_mode
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_reduction(mode, reduction):
    model, ids = small(), ids_of()
    expected = clipped_sum(oracle(model, ids, token_loss), "flat", 0.5)
    before = snapshot(model)
    private = make_private(
        model,
        mode,
        batch_size=B,
        max_grad_norm=0.5,
        criterion=PerSample(reduction),
        loss_reduction=reduction,
    )
    if private.criterion is None:
        losses = token_loss(private.module, ids)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        private.optimizer.step()
    else:
        private.step(ids, token_loss)
    assert_same(update(before, model, B if reduction == "mean" else 1), expected)


@every_mode
def test_expected_batch_size(mode):
    """The sum is divided by the expected batch size, not by the batch's own."""
    model, ids = small(), ids_of(3)
    expected = clipped_sum(oracle(model, ids, token_loss), "flat", 0.5)
    before = snapshot(model)
    make_private(model, mode, batch_size=8, max_grad_norm=0.5).step(ids, token_loss)
    assert_same(update(before, model, 8), expected)


@ghost_modes
def test_criterion_of_tokens_with_shape(mode):
    """Opacus's form for language models: flattened logits and ``shape=``."""
    model, ids = small(), ids_of()
    expected = clipped_sum(
        oracle(
            model,
            ids,
            lambda m, i: nn.functional.cross_entropy(
                m(i).transpose(1, 2), i, reduction="none"
            ).mean(dim=1),
        ),
        "flat",
        0.5,
    )
    before = snapshot(model)
    private = make_private(
        model, mode, batch_size=B, max_grad_norm=0.5, criterion=nn.CrossEntropyLoss()
    )
    logits = private.module(ids)
    loss = private.criterion(logits.flatten(0, 1), ids.flatten(), shape=logits.shape)
    loss.backward()
    private.optimizer.step()
    assert_same(update(before, model, B), expected)


@ghost_modes
def test_ignored_tokens(mode):
    """The mean of a sample counts its own tokens that are not ignored, as Opacus's."""
    model, ids = small(), ids_of()
    targets = ids.clone()
    targets[0, 1:] = -100
    targets[1, 3:] = -100

    def alone(m, batch):
        i, t = batch
        return nn.functional.cross_entropy(m(i).flatten(0, 1), t.flatten()).unsqueeze(0)

    expected = clipped_sum(oracle(model, (ids, targets), alone), "flat", 0.5)
    before = snapshot(model)
    private = make_private(
        model, mode, batch_size=B, max_grad_norm=0.5, criterion=nn.CrossEntropyLoss()
    )
    logits = private.module(ids)
    private.criterion(
        logits.flatten(0, 1), targets.flatten(), shape=logits.shape
    ).backward()
    private.optimizer.step()
    assert_same(update(before, model, B), expected)


@ghost_modes
def test_plain_criterion(mode):
    """A classifier and nn.CrossEntropyLoss, as in Opacus's tutorials."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(B, 4).double(), torch.randint(0, 3, (B,))

    def loss_fn(m, batch):
        return nn.functional.cross_entropy(m(batch[0]), batch[1], reduction="none")

    expected = clipped_sum(oracle(model, (x, y), loss_fn), "flat", 0.5)
    before = snapshot(model)
    criterion = nn.CrossEntropyLoss()
    private = make_private(
        model, mode, batch_size=B, max_grad_norm=0.5, criterion=criterion
    )
    loss = private.criterion(private.module(x), y)
    assert loss.item() == pytest.approx(loss_fn(model, (x, y)).mean().item())
    loss.backward()
    private.optimizer.step()
    assert_same(update(before, model, B), expected)
    assert criterion.reduction == "mean"


@every_mode
@wrapped_or_not
def test_noise_has_std_sigma_c(mode, wrap):
    """Over one large parameter with zero gradient; then over all parameters."""
    model = nn.Linear(300, 300).double()
    before = snapshot(model)
    private = make_private(
        model, mode, wrap, batch_size=4, max_grad_norm=0.5, noise_multiplier=3.0
    )
    private.step(torch.zeros(4, 300).double(), lambda m, x: m(x).sum(dim=1) * 0)
    noise = update(before, model, 4)
    # 90,000 draws: the estimate of the deviation is off by 1 % at four sigma.
    assert float(noise["weight"].std()) == pytest.approx(1.5, rel=0.01)
    assert abs(float(noise["weight"].mean())) < 4 * 1.5 / 300
    assert float(noise["bias"].std()) == pytest.approx(1.5, rel=0.2)


@every_mode
def test_noise_follows_the_generator(mode):
    model, ids = small(), ids_of()
    results = []
    for _ in range(2):
        fresh = copy.deepcopy(model)
        make_private(
            fresh,
            mode,
            batch_size=B,
            noise_multiplier=1.0,
            noise_generator=torch.Generator().manual_seed(3),
        ).step(ids, token_loss)
        results.append(snapshot(fresh))
    assert_same(results[0], results[1])
    assert not torch.equal(results[0]["block.up.bias"], model.block.up.bias)


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
        self.use = False

    def forward(self, x):
        return self.unused(self.used(x)) if self.use else self.used(x)


@every_mode
@wrapped_or_not
def test_unused_parameter(mode, wrap):
    """Norm zero and sum zero, also right after a step in which it was used."""
    model = WithUnused().double()
    x = torch.randn(4, 5, 3).double()
    check(mode, wrap, model, x, square_loss)

    private = make_private(model, mode, wrap, batch_size=4, max_grad_norm=0.5)
    for use in (True, False, True, False):
        model.use = use
        clean = WithUnused().double()
        clean.load_state_dict(model.state_dict())
        clean.use = use
        expected = clipped_sum(oracle(clean, x, square_loss), "flat", 0.5)
        before = snapshot(model)
        private.step(x, square_loss)
        assert_same(update(before, model, 4), expected, message=f"use={use}")


@every_mode
@wrapped_or_not
def test_unused_parameter_gets_noise(mode, wrap):
    model = WithUnused().double()
    before = snapshot(model)
    private = make_private(
        model, mode, wrap, batch_size=4, max_grad_norm=0.5, noise_multiplier=2.0
    )
    private.step(torch.randn(4, 5, 3).double(), square_loss)
    noise = update(before, model, 4)
    drawn = torch.cat([noise["unused.weight"].flatten(), noise["unused.bias"]])
    assert (drawn != 0).all()
    assert 0.3 < float(drawn.std()) < 2.5


@every_mode
@wrapped_or_not
@pytest.mark.parametrize(
    "frozen", ["embedding", "positions", "block.norm", "block.up.weight", "block"]
)
def test_frozen(mode, wrap, frozen):
    model = small()
    for name, p in model.named_parameters():
        if name.startswith(frozen):
            p.requires_grad = False
    check(mode, wrap, model, ids_of(), token_loss)


@every_mode
@wrapped_or_not
def test_frozen_below_trainable_head(mode, wrap):
    """Only the last layer is trained: the inputs of the others need no gradient."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    check(mode, wrap, model, torch.randn(4, 5, 3).double(), square_loss)


@every_mode
@wrapped_or_not
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(mode, wrap, use_reentrant):
    """Both kinds: the block's forward runs once more in the backward pass."""
    check(mode, wrap, small(use_checkpoint=use_reentrant), ids_of(), token_loss)


@every_mode
def test_empty_batch(mode):
    """Nothing but noise, and the parameters' types and shapes stay."""
    model = small()
    got = run_mode(mode, True, model, ids_of(0), token_loss)
    for name, total in got.items():
        assert (total == 0).all(), name


@every_mode
@wrapped_or_not
def test_poisson_batches(mode, wrap):
    """Batches of any size from Poisson sampling, the empty one included."""
    model = small()
    ids = ids_of(8)
    private = make_private(
        model,
        mode,
        wrap,
        batch_size=1,
        dataset=TensorDataset(ids),
        max_grad_norm=0.5,
        poisson_sampling=True,
    )
    sizes = set()
    for _ in range(4):
        for (batch,) in private.loader:
            sizes.add(len(batch))
            clean = small()
            clean.load_state_dict(model.state_dict())
            expected = clipped_sum(oracle(clean, batch, token_loss), "flat", 0.5)
            before = snapshot(model)
            private.step(batch, token_loss)
            assert_same(update(before, model, 1), expected, message=f"{len(batch)}")
    assert 0 in sizes and max(sizes) > 1
    assert _steps(private.engine) == 32


@every_mode
@wrapped_or_not
def test_batch_memory_manager(mode, wrap):
    """Physical batches of 2 make the same step as one of 6; noise is drawn once."""
    ids = ids_of(B)
    steps = {}
    for physical in (2, 4, B):
        model = small()
        before = snapshot(model)
        private = make_private(
            model,
            mode,
            wrap,
            batch_size=B,
            dataset=TensorDataset(ids),
            max_grad_norm=0.5,
            noise_multiplier=1.0,
            noise_generator=torch.Generator().manual_seed(3),
        )
        with BatchMemoryManager(
            data_loader=private.loader,
            max_physical_batch_size=physical,
            optimizer=private.optimizer,
        ) as loader:
            for (batch,) in loader:
                private.step(batch, token_loss)
        steps[physical] = update(before, model, B)
        assert _steps(private.engine) == 1
    assert_same(steps[2], steps[B])
    assert_same(steps[4], steps[B])


@every_mode
@wrapped_or_not
def test_batch_memory_manager_without_noise(mode, wrap):
    """Two logical steps, each split in three, are two steps of the oracle."""
    ids = ids_of(2 * B)
    model = small()
    private = make_private(
        model, mode, wrap, batch_size=B, dataset=TensorDataset(ids), max_grad_norm=0.5
    )
    expected = small()
    for batch in ids.split(B):
        total = clipped_sum(oracle(expected, batch, token_loss), "flat", 0.5)
        with torch.no_grad():
            for name, p in trainable(expected).items():
                p -= total[name] / B
    with BatchMemoryManager(
        data_loader=private.loader,
        max_physical_batch_size=2,
        optimizer=private.optimizer,
    ) as loader:
        for (batch,) in loader:
            private.step(batch, token_loss)
    assert_same(snapshot(model), snapshot(expected))


@every_mode
@wrapped_or_not
def test_checkpoint_of_training(mode, wrap, tmp_path):
    """Two steps, save, load into fresh objects: the third step is the same."""
    ids = ids_of()

    def fresh(model):
        return make_private(
            model,
            mode,
            wrap,
            batch_size=B,
            noise_multiplier=1.0,
            noise_generator=torch.Generator().manual_seed(3),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        )

    private = fresh(small())
    private.step(ids, token_loss)
    private.step(ids, token_loss)
    path = tmp_path / "checkpoint.pt"
    private.engine.save_checkpoint(
        path=path, module=private.module, optimizer=private.optimizer
    )

    other = fresh(Small(d=4).double())
    other.engine.load_checkpoint(
        path=path, module=other.module, optimizer=other.optimizer
    )
    assert other.engine.accountant.history == private.engine.accountant.history
    for p in (private, other):
        p.optimizer.generator = torch.Generator().manual_seed(4)
        p.step(ids, token_loss)
    assert_same(snapshot(other.module), snapshot(private.module))


# The search for a noise multiplier takes seconds, and knows nothing of modes.
@pytest.mark.parametrize("mode, wrap", [("hooks", True), ("ghost_bk", False)])
def test_make_private_with_epsilon(mode, wrap):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(32, 3)
    engine = PrivacyEngine(accountant="rdp")
    first, optimizer, *criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=PerSample(),
        data_loader=DataLoader(TensorDataset(x), batch_size=8),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        wrap_model=wrap,
    )
    module = first if wrap else model
    for _ in range(2):
        for (batch,) in loader:
            optimizer.zero_grad()
            losses = square_loss(module, batch)
            (criterion[0](losses) if criterion else losses.mean()).backward()
            optimizer.step()
    assert engine.get_epsilon(1e-3) == pytest.approx(3.0, abs=0.05)


@every_mode
@wrapped_or_not
def test_bf16_autocast(mode, wrap):
    """Against the oracle under the same autocast, within bf16's resolution.

    The norms are accumulated in float32 or wider: over many rows of nearly equal
    values a sum in bf16 is off by far more than its resolution.
    """
    torch.manual_seed(1)
    model = Small(d=16)
    ids = ids_of()

    def loss_fn(m, i):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = m(i)
        return next_token_loss(logits.float(), i)

    grads = oracle(model, ids, loss_fn)
    c = half_clipped(grads)
    got = run_mode(mode, wrap, model, ids, loss_fn, max_grad_norm=c)
    expected = clipped_sum(grads, "flat", c)
    assert all(total.dtype == torch.float32 for total in got.values())
    difference = norms_of({n: (got[n] - e)[None] for n, e in expected.items()})
    assert difference <= 0.02 * norms_of({n: e[None] for n, e in expected.items()})


@every_mode
def test_norm_of_many_rows_in_bf16(mode):
    """A model in bf16 whose gradients sum over 4,096 equal rows."""
    model = nn.Linear(2, 2, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    x = torch.ones(2, 4096, 2).bfloat16()

    def loss_fn(m, x):
        return m(x).float().flatten(1).mean(dim=1)

    got = run_mode(mode, True, model, x, loss_fn, max_grad_norm=0.1)
    total = got["weight"].float().norm()
    assert float(total) == pytest.approx(0.2, rel=0.03)


@every_mode
@wrapped_or_not
def test_random_state_untouched(mode, wrap):
    """Without noise a mode draws no random numbers (probes included)."""
    model, ids = small(), ids_of()
    private = make_private(model, mode, wrap, batch_size=B)
    state = torch.get_rng_state()
    private.step(ids, token_loss)
    assert torch.equal(torch.get_rng_state(), state)


@every_mode
@wrapped_or_not
def test_buffers_and_flags_untouched(mode, wrap):
    """A forward counts once: nothing runs the model again behind the user's back."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.fc(x.flatten(0, 1)).view_as(x)

    model = Counting().double()
    private = make_private(model, mode, wrap, batch_size=4)
    private.step(torch.randn(4, 5, 3).double(), square_loss)
    assert model.calls == 1
    assert model.training


@pytest.mark.parametrize("mode", MODES)  # "scan" draws one sample after the other
@wrapped_or_not
def test_dropout(mode, wrap):
    """The mask of the loss is the mask of the gradient: one forward, one mask."""
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 2)).double()
    x = torch.randn(4, 3).double()
    seen = {}

    def loss_fn(m, batch):
        torch.manual_seed(5)
        losses = square_loss(m, batch)
        seen["losses"] = losses
        return losses

    plain = copy.deepcopy(model)
    loss_fn(plain, x).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    got = run_mode(mode, wrap, model, x, loss_fn, max_grad_norm=1e9)
    assert_same(got, expected)


@every_mode
@wrapped_or_not
def test_failed_step_leaves_no_trace(mode, wrap):
    """A forward that raises half way, then a good step: only the good one counts."""
    model, ids = small(), ids_of()
    expected = clipped_sum(oracle(model, ids, token_loss), "flat", 0.5)
    before = snapshot(model)
    private = make_private(model, mode, wrap, batch_size=B, max_grad_norm=0.5)

    def fails(m, i):
        m(i[:2])
        raise RuntimeError("on purpose")

    def fails_inside(m, i):
        return m(i + V)  # ids out of range

    for loss_fn in (fails, fails_inside):
        with pytest.raises((RuntimeError, IndexError)):
            private.step(ids, loss_fn)
    assert_same(update(before, model, 1), {n: 0 * p for n, p in before.items()})
    private.step(ids, token_loss)
    assert_same(update(before, model, B), expected)


@every_mode
def test_zero_grad_and_memory(mode):
    """Nothing of a step outlives zero_grad but the state of the optimizer."""
    model, ids = small(), ids_of()
    private = make_private(model, mode, batch_size=B)
    private.step(ids, token_loss)
    private.optimizer.zero_grad(set_to_none=True)
    for name, p in trainable(model).items():
        assert p.grad is None, name
        assert getattr(p, "grad_sample", None) is None, name
        assert getattr(p, "summed_grad", None) is None, name


@every_mode
def test_step_without_zero_grad(mode):
    """Opacus's guard: gradients of the last step are not used again in silence."""
    model, ids = small(), ids_of()
    private = make_private(model, mode, batch_size=B)
    private.step(ids, token_loss)
    before = snapshot(model)
    try:
        private.backward(ids, token_loss)
        private.optimizer.step()
    except Exception as error:
        assert not isinstance(error, CRASHES), error
        assert_same(snapshot(model), before)
    else:
        gap = norms_of({n: u[None] for n, u in update(before, model, B).items()})
        assert gap <= B * 1.0 + 1e-6  # B samples, C = 1: no more than one batch


@every_mode
@wrapped_or_not
def test_cleanup(mode, wrap):
    """After cleanup (or to_standard_module) the model is the user's own again."""
    model, ids = small(), ids_of()
    private = make_private(model, mode, wrap, batch_size=B)
    private.step(ids, token_loss)
    if wrap:
        assert private.handle.to_standard_module() is model
    else:
        private.handle.cleanup()
    assert not _hooks(model)
    token_loss(model, ids).sum().backward()
    check(mode, wrap, copy.deepcopy(model), ids, token_loss)


def _hooks(model):
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    ]


@every_mode
@wrapped_or_not
def test_adam(mode, wrap):
    """Any optimizer of torch beneath: two Adam steps on the oracle's gradients."""
    model, ids = small(), ids_of()
    plain = small()
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    private = make_private(
        model,
        mode,
        wrap,
        batch_size=B,
        max_grad_norm=0.5,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
    )
    for _ in range(2):
        totals = clipped_sum(oracle(plain, ids, token_loss), "flat", 0.5)
        for name, p in trainable(plain).items():
            p.grad = totals[name] / B
        adam.step()
        private.step(ids, token_loss)
    assert_same(snapshot(model), snapshot(plain), tolerance=1e-6)


@ghost_modes
def test_arithmetic_on_the_loss(mode):
    """Opacus's loss objects can be scaled and added; so the per-sample losses are."""
    model, ids = small(), ids_of()

    def combined(m, i):
        return 2 * token_loss(m, i) + square_loss(m, i) / 4

    expected = clipped_sum(oracle(model, ids, combined), "flat", 0.5)
    before = snapshot(model)
    private = make_private(model, mode, batch_size=B, max_grad_norm=0.5)
    logits = private.module(ids)
    tokens = private.criterion(next_token_loss(logits, ids))
    squared = private.criterion(square_loss(lambda _: logits, ids))
    loss = tokens * 2 + squared / 4
    assert loss.item() == pytest.approx(combined(model, ids).mean().item())
    loss.backward()
    private.optimizer.step()
    assert_same(update(before, model, B), expected)


@pytest.mark.parametrize("wrap", [True, False])
def test_accumulation_in_hooks(wrap):
    """Two backward passes before a step, which Opacus allows without Poisson."""
    model = small()
    first, second = ids_of(B), ids_of(B, seed=1)
    grads = oracle(model, torch.cat([first, second]), token_loss)
    before = snapshot(model)
    private = make_private(model, "hooks", wrap, batch_size=B, max_grad_norm=0.5)
    private.backward(first, token_loss)
    private.backward(second, token_loss)
    private.optimizer.step()
    assert_same(update(before, model, 2 * B), clipped_sum(grads, "flat", 0.5))


@every_mode
def test_optimizer_of_some_parameters(mode):
    """What the optimizer does not hold stays; the step's norm is at most C."""
    model, ids = small(), ids_of()
    before = snapshot(model)
    names = ["block.up.weight", "block.up.bias"]
    held = [p for name, p in model.named_parameters() if name in names]
    optimizer = torch.optim.SGD(held, lr=1.0)
    make_private(
        model, mode, batch_size=B, max_grad_norm=1e-3, optimizer=optimizer
    ).step(ids, token_loss)
    moved = update(before, model, B)
    assert {name for name, u in moved.items() if (u != 0).any()} == set(names)
    assert norms_of({n: u[None] for n, u in moved.items()}) <= B * 1e-3 * (1 + 1e-6)


@every_mode
def test_group_of_parameters_added_later(mode):
    """The model's are trained from then on; those of another one are refused."""
    model, ids = small(), ids_of()
    optimizer = torch.optim.SGD(model.block.parameters(), lr=1.0)
    private = make_private(
        model, mode, batch_size=B, max_grad_norm=0.5, optimizer=optimizer
    )
    private.step(ids, token_loss)
    with pytest.raises(Refused, match="not the private model's"):
        private.optimizer.add_param_group({"params": nn.Linear(2, 3).weight})
    others = [p for n, p in model.named_parameters() if not n.startswith("block.")]
    private.optimizer.add_param_group({"params": others, "lr": 2.0})
    expected = clipped_sum(oracle(model, ids, token_loss), "flat", 0.5)
    before = snapshot(model)
    private.optimizer.zero_grad()
    private.step(ids, token_loss)
    for name in expected:
        expected[name] *= 1.0 if name.startswith("block") else 2.0
    assert_same(update(before, model, B), expected)


@every_mode
def test_two_optimizer_groups(mode):
    """Parameter groups with learning rates of their own."""
    model, ids = small(), ids_of()
    expected = clipped_sum(oracle(model, ids, token_loss), "flat", 0.5)
    before = snapshot(model)
    groups = [
        {"params": list(model.block.parameters()), "lr": 2.0},
        {"params": [model.embedding.weight, model.positions.weight]},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    make_private(
        model, mode, batch_size=B, max_grad_norm=0.5, optimizer=optimizer
    ).step(ids, token_loss)
    for name in expected:
        expected[name] *= 2.0 if name.startswith("block") else 1.0
    assert_same(update(before, model, B), expected)


@every_mode
@wrapped_or_not
def test_evaluation_mode_between(mode, wrap):
    """model.eval(), predictions with and without gradients, model.train(), a step."""
    model, ids = small(), ids_of()
    expected = clipped_sum(oracle(model, ids, token_loss), "flat", 0.5)
    before = snapshot(model)
    private = make_private(model, mode, wrap, batch_size=B, max_grad_norm=0.5)
    private.module.eval()
    plain = private.module(ids_of(3))
    with torch.no_grad():
        assert torch.allclose(private.module(ids_of(3)), plain)
    private.module.train()
    private.step(ids, token_loss)
    assert_same(update(before, model, B), expected)


@ghost_modes
def test_loss_is_not_changed(mode):
    """What a mode hands back are the model's own outputs and losses."""
    model, ids = small(), ids_of()
    expected = token_loss(model, ids)
    private = make_private(model, mode, batch_size=B)
    losses = token_loss(private.module, ids)
    assert torch.equal(losses, expected)
    assert private.criterion(losses).item() == pytest.approx(expected.mean().item())


@every_mode
def test_input_that_needs_a_gradient(mode):
    """Embeddings given from outside: their own gradient is not the mode's business."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(4, 5, 3).double().requires_grad_()
    check(mode, True, model, x, square_loss)


@every_mode
def test_state_dict_after_a_step(mode):
    """What a mode keeps for its next step is no buffer of the model."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 3)
    )
    private = make_private(model, mode, batch_size=8)
    names = list(private.module.state_dict())
    private.step(torch.randn(8, 1, 8, 8), square_loss)
    assert list(private.module.state_dict()) == names
    assert not list(private.module.buffers())

"""Activation checkpointing: samples run together, and parts of them run again.

The oracle is each sample alone by plain autograd, with torch's own checkpointing.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import opacus_ext
from opacus_ext import clipped_grads
from opacus_ext.clipping import as_clipping_function
from opacus_ext.grad_sample.core import clip
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.refused import Refused
from tests.common import (
    assert_same,
    clipped_sum,
    every_mode,
    make_private,
    norms_of,
    oracle,
)
from tests.long_test import peaks
from tests.zoo import Case, check

D = torch.double
BOUND = 0.3
ONE_BY_ONE = "one sample after the other"
again_of = {kind: functools.partial(checkpoint, use_reentrant=kind) for kind in (0, 1)}
either = pytest.mark.parametrize("reentrant", [0, 1], ids=["not", "reentrant"])


class Net(nn.ModuleList):
    """Three layers; ``loss(m, x, again)`` is the loss of a sample."""

    def __init__(self, loss, again=again_of[0]):
        super().__init__(nn.Linear(6, 6) for _ in range(3))
        self.loss, self.again = loss, again
        self.double()

    def forward(self, x):
        return self.loss(self, x, self.again)[None]


def samples(B=4):
    return torch.randn(B, 3, 6, dtype=D, generator=torch.Generator().manual_seed(1))


def called(model, x):
    return model(x)


def loss_of(y):
    return y.square().sum()


def of(function):
    """The loss of a function ``(m, h)`` that runs again."""
    return lambda m, x, again: loss_of(again(lambda h: function(m, h), m[0](x)))


def a_closure(m, x, again):
    h, other = m[0](x), m[2](x)
    return loss_of(again(lambda a: m[1](a) * other, h))


def bound_arguments(m, x, again):
    h, other = m[0](x), m[2](x)
    function = functools.partial(lambda b, a, c: m[1](a) * b + c, other, c=other)
    return loss_of(again(function, h))


def an_output_of_its_own(m, x, again):
    kept = []
    y = again(lambda h: kept.append(m[2](h)) or m[1](h), m[0](x))
    return loss_of(y) + loss_of(kept[0])


def several_outputs(m, x, again):
    y, unused, same, number = again(lambda h: (m[1](h), m[2](h).sum(), h, 3), m[0](x))
    return loss_of(y + number) + loss_of(same)


def nested(m, x, again):
    return loss_of(again(lambda h: again(m[1], again(m[2], h).tanh()) + h, m[0](x)))


def one_parameter_often(m, x, again):
    h = m[0](x)
    for _ in range(3):
        h = again(lambda h: m[0](h).tanh(), h)
    return loss_of(m[0](h))


def of_computed_weights(m, x, again):
    def function(h, weight):
        return h @ weight.t() @ (m[1].weight @ m[2].weight)

    return loss_of(again(function, m[0](x), m[1].weight * 2))


def a_weight_comes_out(m, x, again):
    y, weight = again(lambda h: (m[1](h), m[2].weight * 1), m[0](x))
    return loss_of(y @ weight)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, grad):
        return 2 * grad * context.saved_tensors[0]


#: The loss of a sample. Samples run together,
TOGETHER = {
    "a layer": of(lambda m, h: m[1](h)),
    "a loss": lambda m, x, again: again(lambda h: loss_of(m[1](h)), m[0](x)),
    "in place": lambda m, x, again: loss_of(
        again(lambda h: F.relu_(m[1](h)), m[0](x))
    ).mul_(2),
    "bound arguments": bound_arguments,
    "several outputs": several_outputs,
    "a branch": of(lambda m, h: m[1](h) if bool(h.sum() > 0) else m[2](h)),
    "nested": nested,
    "one parameter often": one_parameter_often,
    "computed weights": of_computed_weights,
    "a weight comes out": a_weight_comes_out,
    "sequential": lambda m, x, again: loss_of(
        checkpoint_sequential([*m], 2, m[0](x), **again.keywords)
    ),
}
#: or one by one.
APART = {
    "a closure": a_closure,
    "an output of its own": an_output_of_its_own,
    "own function": of(lambda m, h: Square.apply(m[1](h))),
}


@either
@pytest.mark.parametrize("name", [*TOGETHER, *APART])
def test_sums_and_gradients(name, reentrant):
    """Exact in one pass and in two; samples run together wherever they can."""
    loss = {**TOGETHER, **APART}[name]
    case = Case(lambda: Net(loss, again_of[reentrant]), [samples()], loss=called)
    if name in APART:
        check(case._replace(warns=ONE_BY_ONE), "function")
        return
    for mode in ("function", "ghost"):
        check(case._replace(warns=""), mode)


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def selective(m, x, again):
    policy = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
    )
    return loss_of(checkpoint(m[1], m[0](x), context_fn=policy, use_reentrant=False))


def in_a_mode(m, x, again):
    with Mode():
        return loss_of(again(m[1], m[0](x)))


def changes(pair):
    def loss(m, x, again):
        h = m[0](x) * 1
        outputs = again(pair, h)
        outputs[0].mul_(2)
        return loss_of(outputs[0]) + 3 * loss_of(outputs[1]) + loss_of(h)

    return loss


def in_lists(function, arguments=lambda h: (h,)):
    return lambda m, x, again: loss_of(
        again(functools.partial(function, m[1]), *arguments(m[0](x)))[0]
    ) + loss_of(m[0](x))


def a_side_way(m, x, again):
    """Where nothing with a gradient is returned, a tensor may leave unseen."""
    kept = []
    again(lambda h: kept.append(m[1](h)), m[0](x))
    return loss_of(kept.pop()) + loss_of(m[0](x))


@pytest.mark.parametrize(
    "loss, said, reentrant",
    [
        (selective, "context_fn", 0),
        (in_a_mode, "under Mode", 0),
        (changes(lambda h: [h.tanh()] * 2), "is a view", 0),
        (changes(lambda h: (h.view(18), 3 * h)), "is a view", 0),
        # An object may hold tensors with a graph.
        (
            lambda m, x, again: loss_of(
                again(lambda h: SimpleNamespace(y=m[1](h)), m[0](x)).y
            ),
            "returns SimpleNamespace",
            0,
        ),
        # torch's reentrant kind gives tensors in lists no gradient.
        (in_lists(lambda m, h: m(h[0]), lambda h: ([h],)), "no gradient", 1),
        (in_lists(lambda m, h: [m(h)]), "nested", 1),
        (a_side_way, "does not return", 0),
    ],
)
def test_what_else_runs_one_by_one(loss, said, reentrant):
    """What the part would run without, or can't know when it runs."""
    made = Case(lambda: Net(loss, again_of[reentrant]), [samples()], loss=called)
    check(made._replace(warns=said), "function")


@either
def test_inputs_without_a_gradient(reentrant):
    """As frozen embeddings give them: torch's reentrant kind gives the block none."""

    def loss(m, x, again):
        return loss_of(again(m[1], x)) + loss_of(m[0](x))

    made = Case(lambda: Net(loss, again_of[reentrant]), [samples()], loss=called)
    check(made, "function")
    grads = oracle(made.model(), samples(), called)
    assert bool(grads["1.weight"].any()) != reentrant


def clipped(model, x, **kwargs):
    return clipped_grads(model, dict(model.named_parameters()), x, 1.0, **kwargs)


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_are_drawn_again(preserve):
    """So that the gradient is that of the loss."""

    def loss(m, x, again):
        h = again(lambda h: F.dropout(m[1](h), 0.5), m[0](x))
        return (h * torch.rand_like(h)).sum()

    given = dict(preserve_rng_state=preserve, use_reentrant=False)
    model, norms = Net(loss), []
    for again in (functools.partial(checkpoint, **given), lambda of, x: of(x)):
        model.again = again
        torch.manual_seed(3)
        norms.append(clipped(model, samples()).norms)
        after = torch.rand(2)
    torch.testing.assert_close(*norms, rtol=0, atol=1e-10)
    torch.manual_seed(3)
    assert not torch.equal(after, torch.rand(2))  # what is drawn next is new


def test_autocast_holds_in_the_part_that_runs_again():
    def loss(m, x, again):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(again(m[1], m[0](x)).float())

    model, sums = Net(loss).float(), []
    for model.again in (again_of[0], lambda function, x: function(x)):
        sums.append(clipped(model, samples().float()).sums)
    for name, total in sums[0].items():
        assert total.dtype == torch.float32
        torch.testing.assert_close(total, sums[1][name])


class Blocks(nn.Module):
    """A small tied transformer-like model of two blocks."""

    def __init__(self, again=again_of[0]):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
            )
            for _ in "ab"
        )
        self.unused, self.again = nn.Linear(2, 2), again

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + self.again(block, x)
        return (x @ self.table.weight.t())[:, -1]


def token_losses(model, batch):
    ids, labels = batch
    return F.cross_entropy(model(ids), labels, reduction="none")


def tokens(B, T):
    return torch.randint(11, (B, T)), torch.randint(11, (B,))


@every_mode
@either
def test_training(mode, reentrant):
    """Several steps of other sizes and lengths; one of them is empty."""
    batches = [tokens(*size) for size in ((3, 5), (1, 4), (5, 2), (0, 3), (4, 4))]
    made = Case(lambda: Blocks(again_of[reentrant]), batches, loss=token_losses)
    check(made._replace(warns=""), mode)
    if mode == "ghost_bk":
        check(made._replace(kwargs=dict(microbatch=2)), "function")


@pytest.mark.parametrize("kind", ["changed in place", "other tensors"])
def test_refused(kind):
    """What can't be computed again as it was."""
    calls = []

    def loss(m, x, again):
        if kind == "changed in place":
            mask = torch.ones_like(x)
            y = again(lambda h, mask: m[1](h) * mask, m[0](x), mask)
            mask.zero_()
            return loss_of(y)

        def function(h):
            calls.append(0)
            return (m[1](h),) if len(calls) % 2 else (m[1](h), h)

        return loss_of(again(function, m[0](x))[0])

    with pytest.raises(Refused, match=kind):
        clipped(Net(loss), samples())


@pytest.mark.parametrize(
    "part",
    [
        lambda state, m, x: F.linear(x * state, m[1].weight),
        lambda state, m, x: F.linear(x, m[1].weight * state),
        lambda state, m, x: F.embedding(torch.arange(3) + state, m[1].weight),
        lambda state, m, x: m[state % 2](x),
    ],
)
def test_other_data_in_the_second_pass(part):
    """A part with state would get its norms from other data than its sum."""
    calls = []

    def loss(m, x, again):
        return again(lambda x: calls.append(0) or part(len(calls), m, x), x).sum()

    private = make_private(Net(loss), "ghost", batch_size=4)
    with pytest.raises(Refused, match="scan"):
        private.step(samples(), called)


def test_threads_have_their_own_samples():
    """One without any calls torch's function."""
    # All threads draw from one generator, whose state torch would set back.
    again = functools.partial(again_of[0], preserve_rng_state=False)

    def train(seed):
        model, x = Net(nested, again), samples() + seed
        expected = norms_of(oracle(model, x, called))
        for _ in range(3):
            norms = undisturbed(model, x).norms
            torch.testing.assert_close(norms, expected, rtol=0, atol=1e-8)
            assert checkpoint(len, [0], use_reentrant=False) == 1

    def undisturbed(model, x):
        """Another thread may set the one generator in between, which is refused."""
        for _ in range(50):
            try:
                return clipped(model, x)
            except Refused as refused:
                assert "a seed that is set in the forward" in str(refused)
        raise AssertionError("refused each time")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))


def test_unregistered_samples_run_one_by_one():
    """torch's function is as it was."""
    made = Case(lambda: Net(TOGETHER["a layer"]), [samples()], loss=called)
    opacus_ext.unregister()
    try:
        check(made._replace(warns=ONE_BY_ONE), "function")
    finally:
        opacus_ext.register()


def test_a_criterion_in_parts():
    """It has no parameters."""

    class Parts(nn.Module):
        reduction = "mean"

        def forward(self, logits, labels):
            return again_of[0](F.cross_entropy, logits, labels)

    model, labels = nn.Linear(6, 4).double(), torch.tensor([0, 1, 3])
    given = dict(batch_size=3, max_grad_norm=BOUND, criterion=Parts())
    private = make_private(model, "ghost_bk", **given)
    x = torch.randn(3, 6, dtype=D)
    grads = oracle(model, (x, labels), lambda m, b: token_losses(m, b))
    private.criterion(private.module(x), labels).backward()
    got = {n: p.grad for n, p in model.named_parameters()}
    assert_same(got, clipped_sum(grads, "flat", BOUND))


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all"])
def test_memory(lora):
    """As plain checkpointing, and the factors of one block."""
    transformers, peft = map(pytest.importorskip, ("transformers", "peft"))

    def model(layers):
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=272,
            intermediate_size=288,
            num_hidden_layers=layers,
            num_attention_heads=2,
            use_cache=False,
        )
        made = transformers.LlamaForCausalLM(config).train()
        if lora:
            options = {"r": 2, "target_modules": "all-linear"}
            made = peft.get_peft_model(made, peft.LoraConfig(**options))
        made.gradient_checkpointing_enable({"use_reentrant": False})
        made.enable_input_require_grads()
        return made

    def most(mode, layers):
        return peaks(mode, model(layers), 2, 64, 1, 2**12)[0].most

    own, private = most(None, 4), most("ghost_bk", 4)
    assert private < 1.3 * own
    # Further blocks cost about what they cost without privacy.
    further = private - most("ghost_bk", 2)
    assert further < 1.1 * (own - most(None, 2)) + 2**20


@every_mode
def test_backward_in_another_thread(mode):
    """As autograd runs it on a GPU: modes, levels and settings are a thread's own."""

    def again(block, x):
        return again_of[0](lambda h: again_of[0](block, h) + h, x)

    batch, weights = tokens(4, 5), []
    for threaded in (False, True):
        model = Blocks(again)
        private = make_private(model, mode, batch_size=4, max_grad_norm=BOUND)
        with torch.autocast("cpu", torch.bfloat16):
            losses = token_losses(private.module, batch)
        loss = private.criterion(losses) if private.criterion else losses.mean()
        backward = threading.Thread(target=loss.backward)
        if threaded:
            backward.start()
            backward.join()
        else:
            backward.run()
        private.optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    assert not torch.equal(weights[0][0], Blocks().table.weight)


def test_processes_that_share_out_experts_make_one_pass():
    """They would decide apart, by the lengths of their own samples."""
    model = Net(TOGETHER["a layer"])
    params = dict(model.named_parameters())
    norms = norms_of(oracle(model, samples(), called))
    x, calls = samples()[:, None], []
    for kind in (clip.GroupNorms, functools.partial(clip.GroupNorms)):
        total = clip.ClippedSum(params, 4, as_clipping_function(BOUND))
        total.norms_of = kind
        group = SampleGroup(params.values(), 4)
        with group.level:
            loss = group.inner(group.watch(lambda: model(group.wrap(x))))
        group.segments[0].saved = group.segments[0].factors = 0
        with mock.patch.object(
            clip, "add_in_two_passes", wraps=clip.add_in_two_passes
        ) as two:
            ones = torch.ones_like(loss)
            total.add_group(None, group, [loss], [ones], [*params.values()])
        calls.append(two.call_count)
        torch.testing.assert_close(total.norms, norms)
    assert calls == [1, 0]

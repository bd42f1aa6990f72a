"""Activation checkpointing: samples run together, and parts of them run again.

The oracle is each sample alone by plain autograd, with torch's own checkpointing.
"""

import functools
import threading
import warnings
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
from opacus_ext import clipped_grads, per_sample_grads
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
    run_mode,
)
from tests.long_test import peaks

D = torch.double
BOUND = 0.3


def net():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double()


def loss_of(y):
    return y.square().sum()


def a_branch(m, x, again):
    def function(h):
        return m[1](h) if bool(h.sum() > 0) else m[2](h)

    return loss_of(again(function, m[0](x)))


def a_closure(m, x, again):
    h, other = m[0](x), m[2](x)
    return loss_of(again(lambda a: m[1](a) * other, h))


def bound_arguments(m, x, again):
    h, other = m[0](x), m[2](x)
    function = functools.partial(lambda b, a, c: m[1](a) * b + c, other, c=other)
    return loss_of(again(function, h))


def an_output_of_its_own(m, x, again):
    kept = []

    def function(h):
        kept.append(m[2](h))
        return m[1](h)

    return loss_of(again(function, m[0](x))) + loss_of(kept[0])


def several_outputs(m, x, again):
    y, unused, same, number = again(lambda h: (m[1](h), m[2](h).sum(), h, 3), m[0](x))
    return loss_of(y + number) + loss_of(same)


def nested(m, x, again):
    def outer(h):
        return again(m[1], again(m[2], h).tanh()) + h

    return loss_of(again(outer, m[0](x)))


def one_parameter_often(m, x, again):
    h = m[0](x)
    for _ in range(3):
        h = again(lambda h: m[0](h).tanh(), h)
    return loss_of(m[0](h))


def of_computed_weights(m, x, again):
    outside = m[1].weight * 2

    def function(h, weight):
        return h @ weight.t() @ (m[1].weight @ m[2].weight)

    return loss_of(again(function, m[0](x), outside))


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


#: The loss of a sample, and True if samples run together.
CASES = {
    "a layer": (lambda m, x, again: loss_of(again(m[1], m[0](x))), True),
    "a loss": (lambda m, x, again: again(lambda h: loss_of(m[1](h)), m[0](x)), True),
    "gelu in place": (
        lambda m, x, again: loss_of(again(lambda h: F.relu_(m[1](h)), m[0](x))),
        True,
    ),
    "changed afterwards": (
        lambda m, x, again: loss_of(again(lambda h: m[1](h).tanh(), m[0](x)).mul_(2)),
        True,
    ),
    "bound arguments": (bound_arguments, True),
    "several outputs": (several_outputs, True),
    "a branch": (a_branch, True),
    "nested": (nested, True),
    "one parameter often": (one_parameter_often, True),
    "computed weights": (of_computed_weights, True),
    "a weight comes out": (a_weight_comes_out, True),
    "sequential": (
        lambda m, x, again: loss_of(
            checkpoint_sequential([*m], 2, m[0](x), **again.keywords)
        ),
        True,
    ),
    "a closure": (a_closure, False),
    "an output of its own": (an_output_of_its_own, False),
    "own function": (
        lambda m, x, again: loss_of(again(lambda h: Square.apply(m[1](h)), m[0](x))),
        False,
    ),
}


class Net(nn.ModuleList):
    """Calls a case."""

    def __init__(self, loss, again):
        super().__init__(net())
        self.loss, self.again = loss, again

    def forward(self, x):
        return self.loss(self, x, self.again)[None]


def samples(B=4):
    return torch.randn(B, 3, 6, dtype=D, generator=torch.Generator().manual_seed(1))


def warned(found):
    return [str(w.message) for w in found if "one sample after" in str(w.message)]


def called(model, x):
    return model(x)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not", "reentrant"])
@pytest.mark.parametrize("name", CASES)
def test_sums_and_gradients(name, reentrant):
    """Exact in one pass and in two; samples run together wherever they can."""
    loss, together = CASES[name]
    model = Net(loss, functools.partial(checkpoint, use_reentrant=reentrant))
    params, x = dict(model.named_parameters()), samples()
    expected = oracle(model, x, lambda model, x: model(x))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        grads = per_sample_grads(model, params, x).grads
        result = clipped_grads(model, params, x, BOUND)
    assert bool(warned(found)) != together
    assert not together or not any("vmap" in line for line in warned(found))
    sums = clipped_sum(expected, "flat", BOUND)
    torch.testing.assert_close(result.norms, norms_of(expected), rtol=0, atol=1e-8)
    if together:
        ghost = run_mode("ghost", True, model, x, called, "flat", BOUND)
        assert_same(ghost, sums)
    for p in params:
        torch.testing.assert_close(grads[p], expected[p], rtol=0, atol=1e-8)
        torch.testing.assert_close(result.sums[p], sums[p], rtol=0, atol=1e-8)


def plain_blocks():
    """Inputs that need no gradient, as frozen embeddings give them."""
    model = Net(lambda m, x, again: loss_of(again(m[1], x)) + loss_of(m[0](x)), None)
    return model, dict(model.named_parameters())


def test_inputs_without_a_gradient():
    """torch's reentrant kind gives the block no gradient, the other one does."""
    for reentrant in (False, True):
        model, params = plain_blocks()
        model.again = functools.partial(checkpoint, use_reentrant=reentrant)
        expected = oracle(model, samples(), lambda model, x: model(x))
        assert bool(expected["1.weight"].any()) != reentrant
        grads = per_sample_grads(model, params, samples()).grads
        for p in params:
            torch.testing.assert_close(grads[p], expected[p], rtol=0, atol=1e-8)


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers(preserve):
    """They are drawn again, so that the gradient is that of the loss."""

    def loss(m, x, again):
        h = again(lambda h: F.dropout(m[1](h), 0.5), m[0](x), **options)
        return (h * torch.rand_like(h)).sum()

    options = {"preserve_rng_state": preserve, "use_reentrant": False}
    results = []
    for again in (checkpoint, lambda function, x, **options: function(x)):
        model = Net(loss, again)
        torch.manual_seed(3)
        result = clipped_grads(model, dict(model.named_parameters()), samples(), 1.0)
        results.append(result.norms)
        after = torch.rand(2)
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)
    # What is drawn next are new numbers.
    torch.manual_seed(3)
    assert not torch.equal(after, torch.rand(2))


def test_autocast():
    """It holds in the part that runs again, and is off in its backward pass."""

    def loss(m, x, again):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(again(m[1], m[0](x)).float())

    again = functools.partial(checkpoint, use_reentrant=False)
    results = []
    for way in (again, lambda function, x: function(x)):
        model = Net(loss, way).float()
        params = dict(model.named_parameters())
        results.append(clipped_grads(model, params, samples().float(), 1.0))
    for p in params:
        assert results[0].sums[p].dtype == torch.float32
        torch.testing.assert_close(results[0].sums[p], results[1].sums[p])


class Blocks(nn.Module):
    """A small tied transformer-like model of several blocks."""

    def __init__(self, layers, again):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
            )
            for _ in range(layers)
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


@every_mode
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not", "reentrant"])
def test_training(mode, reentrant, clipping):
    """Several steps of other sizes and lengths; one of them is empty."""
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    model = Blocks(2, again).double()
    bound = BOUND
    if clipping == "per_layer":
        bound = [0.1 * (i + 1) for i, _ in enumerate(model.parameters())]
    private = make_private(
        model, mode, batch_size=4, max_grad_norm=bound, lr=0.5, clipping=clipping
    )
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for B, T in ((3, 5), (1, 4), (5, 2), (0, 3), (4, 4)):
            ids = torch.randint(11, (B, T), generator=generator)
            batch = ids, torch.randint(11, (B,), generator=generator)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            grads = oracle(plain(model), batch, token_losses)
            sums = clipped_sum(grads, clipping, bound)
            private.step(batch, token_losses)
            for name, p in model.named_parameters():
                update = (before[name] - p.detach()) / 0.5 * 4
                torch.testing.assert_close(update, sums[name], rtol=0, atol=1e-8)
    assert mode == "scan" or not warned(found)


def plain(model):
    """A copy that is not private."""
    other = Blocks(len(model.blocks), model.again).double()
    other.load_state_dict(model.state_dict())
    return other


def test_few_samples_at_once():
    model = Blocks(3, functools.partial(checkpoint, use_reentrant=False)).double()
    batch = torch.randint(11, (5, 4)), torch.randint(11, (5,))
    params = {n: p for n, p in model.named_parameters() if "unused" not in n}
    grads = {n: g for n, g in oracle(model, batch, token_losses).items() if n in params}
    sums = clipped_grads(
        lambda x: token_losses(model, x).sum(), params, batch, 0.2, microbatch=2
    ).sums
    expected = clipped_sum(grads, "flat", 0.2)
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name], rtol=0, atol=1e-8)


def test_a_side_way():
    """Where nothing with a gradient is returned, a tensor may leave unseen."""
    kept = []

    def loss(m, x, again):
        again(lambda h: kept.append(m[1](h)), m[0](x))
        return loss_of(kept.pop()) + loss_of(m[0](x))

    model = Net(loss, functools.partial(checkpoint, use_reentrant=False))
    expected = oracle(model, samples(), lambda model, x: model(x))
    with pytest.warns(UserWarning, match="does not return"):
        grads = per_sample_grads(model, dict(model.named_parameters()), samples()).grads
    for name in grads:
        torch.testing.assert_close(grads[name], expected[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["argument", "other tensors"])
def test_refused(kind):
    """What can't be computed again as it was."""
    calls = []

    def loss(m, x, again):
        if kind == "argument":
            mask = torch.ones_like(x)
            y = again(lambda h, mask: m[1](h) * mask, m[0](x), mask)
            mask.zero_()
            return loss_of(y)

        def function(h):
            calls.append(0)
            return (m[1](h),) if len(calls) % 2 else (m[1](h), h)

        return loss_of(again(function, m[0](x))[0])

    model = Net(loss, functools.partial(checkpoint, use_reentrant=False))
    match = {"argument": "changed in place", "other tensors": "other tensors"}[kind]
    with pytest.raises(Refused, match=match):
        clipped_grads(model, dict(model.named_parameters()), samples(), 1.0)


def test_other_data_in_the_second_pass():
    """A part with state would get its norms from other data than its sum."""

    def scaled(state, m, x):
        return F.linear(x * state, m[1].weight)

    def scaled_weight(state, m, x):
        return F.linear(x, m[1].weight * state)

    def of_other_ids(state, m, x):
        return F.embedding(torch.arange(3) + state, m[1].weight)

    def other_layer(state, m, x):
        return m[state % 2](x)

    def loss(m, x, again):
        def function(x):
            calls.append(0)
            return part(len(calls), m, x)

        return again(function, x).sum()

    for part in (scaled, scaled_weight, of_other_ids, other_layer):
        calls: list = []
        model = Net(loss, functools.partial(checkpoint, use_reentrant=False))
        private = make_private(model, "ghost", batch_size=4)
        with pytest.raises(Refused, match="scan"):
            private.step(samples(), lambda model, x: model(x))


def test_threads():
    """Each has its own samples, and one without any calls torch's function."""

    def train(seed):
        model = Net(CASES["nested"][0], functools.partial(checkpoint, use_reentrant=0))
        x = samples() + seed
        expected = norms_of(oracle(model, x, called))
        for _ in range(3):
            found = clipped_grads(model, dict(model.named_parameters()), x, 1.0).norms
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
            assert checkpoint(len, [0], use_reentrant=False) == 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))


def test_unregistered():
    """torch's function is as it was, and samples run one by one."""
    model = Net(CASES["a layer"][0], functools.partial(checkpoint, use_reentrant=False))
    expected = norms_of(oracle(model, samples(), called))
    params = dict(model.named_parameters())
    opacus_ext.unregister()
    try:
        with pytest.warns(UserWarning, match="one sample after"):
            found = clipped_grads(model, params, samples(), 1.0).norms
    finally:
        opacus_ext.register()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_what_else_runs_one_by_one():
    """What the part would run without, or can't know when it runs."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    def selective(m, x, again):
        policy = functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
        )
        options = {"context_fn": policy, "use_reentrant": False}
        return loss_of(checkpoint(m[1], m[0](x), **options))

    def in_a_mode(m, x, again):
        with Mode():
            return loss_of(again(m[1], m[0](x)))

    def changes(pair, of=0):
        def loss(m, x, again):
            h = m[0](x) * 1
            outputs = again(pair, h)
            outputs[of].mul_(2)
            return loss_of(outputs[0]) + 3 * loss_of(outputs[1]) + loss_of(h)

        return loss

    def nested(function, arguments=lambda h: (h,)):
        return lambda m, x, again: loss_of(
            again(functools.partial(function, m[1]), *arguments(m[0](x)))[0]
        ) + loss_of(m[0](x))

    reentrant = functools.partial(checkpoint, use_reentrant=True)
    other = functools.partial(checkpoint, use_reentrant=False)
    for loss, text, again in (
        (selective, "context_fn", other),
        (in_a_mode, "under Mode", other),
        (changes(lambda h: [h.tanh()] * 2), "is a view", other),
        (changes(lambda h: (h.view(18), 3 * h)), "is a view", other),
        # An object may hold tensors with a graph.
        (
            lambda m, x, again: loss_of(
                again(lambda h: SimpleNamespace(y=m[1](h)), m[0](x)).y
            ),
            "returns SimpleNamespace",
            other,
        ),
        # torch's reentrant kind gives tensors in lists no gradient.
        (nested(lambda m, h: m(h[0]), lambda h: ([h],)), "no gradient", reentrant),
        (nested(lambda m, h: [m(h)]), "nested", reentrant),
    ):
        model = Net(loss, again)
        expected = oracle(model, samples(), lambda model, x: model(x))
        with pytest.warns(UserWarning, match=text):
            params = dict(model.named_parameters())
            grads = per_sample_grads(model, params, samples()).grads
        for p in params:
            torch.testing.assert_close(grads[p], expected[p], rtol=0, atol=1e-8)


def test_a_loss_in_parts():
    """Checkpointing in the criterion, which has no parameters."""

    class Parts(nn.Module):
        reduction = "mean"

        def forward(self, logits, labels):
            way = functools.partial(checkpoint, use_reentrant=False)
            return way(F.cross_entropy, logits, labels)

    model = nn.Linear(6, 4).double()
    private = make_private(
        model, "ghost_bk", batch_size=3, max_grad_norm=BOUND, criterion=Parts()
    )
    x, labels = torch.randn(3, 6, dtype=D), torch.tensor([0, 1, 3])
    grads = oracle(
        model, (x, labels), lambda m, b: F.cross_entropy(m(b[0]), b[1])[None]
    )
    private.optimizer.zero_grad()
    private.criterion(private.module(x), labels).backward()
    expected = clipped_sum(grads, "flat", BOUND)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=0, atol=1e-8)


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


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_backward_in_another_thread(mode):
    """As autograd runs it on a GPU: modes, levels and settings are a thread's own."""

    def again(block, x):
        way = functools.partial(checkpoint, use_reentrant=False)
        return way(lambda h: way(block, h) + h, x)

    batch = torch.randint(11, (4, 5)), torch.randint(11, (4,))
    found = []
    for threaded in (False, True):
        model = Blocks(2, again)
        private = make_private(model, mode, batch_size=4, max_grad_norm=BOUND)
        with torch.autocast("cpu", torch.bfloat16):
            losses = token_losses(private.module, batch)
        loss = losses.mean()
        if private.criterion is not None:
            loss = private.criterion(losses, None)
        backward = threading.Thread(target=loss.backward)
        if threaded:
            backward.start()
            backward.join()
        else:
            backward.run()
        private.optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], Blocks(2, again).table.weight)


def test_processes_that_share_out_experts_make_one_pass():
    """They would decide apart, by the lengths of their own samples."""
    model = Net(CASES["a layer"][0], functools.partial(checkpoint, use_reentrant=False))
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

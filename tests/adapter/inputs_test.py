"""Which inputs are samples: by what the loader drew, over draws of any size."""

import copy
from typing import Any, Callable, NamedTuple, Optional

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils._pytree import register_pytree_node
from torch.utils.data import Dataset, default_collate

from opacus_ext import Refused
from opacus_ext.grad_sample.adapter.inputs import InputReader
from tests.common import (
    assert_same,
    clipped_sum,
    make_private,
    oracle,
    squares,
    with_notes,
)

pytestmark = pytest.mark.filterwarnings("ignore")
RECORDS, D, T, K, C = 12, 3, 5, 4, 0.5


class Records(Dataset):
    """Sequences with lengths."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(RECORDS, T, D, generator=generator).double()
        self.lengths = torch.randint(1, T + 1, (RECORDS,), generator=generator)

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        return self.x[i], self.lengths[i]


def flat(records):
    """Tokens ``[N, D]``, those of a record behind those of another."""
    return torch.cat([x[:n] for x, n in records]), torch.stack([n for _, n in records])


def packed(records):
    return (flat(records)[0][None],)


def packed_with_lengths(records):
    tokens, lengths = flat(records)
    return tokens[None], lengths


def time_first(records):
    return (torch.stack([x for x, _ in records], 1),)


def time_first_with_lengths(records):
    return *time_first(records), padded(records)[1]


def padded(records):
    return torch.stack([x for x, _ in records]), torch.stack([n for _, n in records])


def with_places(records):
    return *padded(records), torch.linspace(-1, 1, T * D).double().view(1, T, D)


class Model(nn.Module):
    """Sequences, and lengths or a table."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, K), nn.Linear(K, 2)

    def forward(self, x):
        return self.two(self.one(x).tanh().mean(1))


class WithLengths(Model):
    def forward(self, x, lengths):
        keep = torch.arange(x.shape[1]) < lengths[:, None]
        return self.two((self.one(x).tanh() * keep[..., None]).sum(1))


class WithTable(Model):
    def forward(self, x, table):
        keys = self.one(table.reshape(-1, D)).tanh()
        return self.one(x).mean(1) @ keys.mT


class TimeFirst(WithLengths):
    def forward(self, x, lengths):
        return super().forward(x.transpose(0, 1), lengths)


class OfTokens(Model):
    """Sums of parts of a row of tokens, by lengths."""

    def forward(self, tokens, lengths):
        each = tokens.split(lengths.tolist(), tokens.dim() - 2)
        return torch.stack([self.one(x).tanh().flatten(0, -2).sum(0) for x in each])


class Case(NamedTuple):
    """
    Attributes:
        inputs: the model's inputs by the batch and a table
        refused: words of the refusal; None if it is exact
        batched: the inputs that have samples
    """

    model: Callable[[], nn.Module]
    collate: Callable[[Any], Any] = padded
    inputs: Callable[[Any, Any], tuple] = lambda batch, table: batch[:1]
    refused: Optional[str] = None
    kwargs: dict = {}
    batched: tuple = (0,)


def beside(table):
    """The inputs with a table, or what makes one."""
    return lambda batch, bank: (batch[0], table(batch[0], bank))


BANK = beside(lambda x, bank: bank)
ONES = beside(lambda x, bank: torch.linspace(-1, 1, T * D).double().view(1, T, D))
PLACES = beside(lambda x, bank: torch.linspace(-1, 1, T * D).double().view(T, D))
EVERYTHING = lambda batch, bank: batch  # noqa: E731
CASES = {
    "samples": Case(Model),
    "two of samples": Case(WithLengths, inputs=EVERYTHING, batched=(0, 1)),
    "a table": Case(WithTable, inputs=BANK, kwargs=dict(shared=["table"])),
    "a table, not named": Case(
        WithTable, inputs=BANK, refused=r"table \(4, 3\) is not as .*shared=\['table'\]"
    ),
    "a table of one": Case(WithTable, inputs=ONES),
    "places": Case(WithTable, inputs=PLACES, kwargs=dict(shared=["table"])),
    "places, not named": Case(
        WithTable, inputs=PLACES, refused=r"table \(5, 3\) is not as long"
    ),
    "places of the loader": Case(
        WithTable,
        *(with_places, lambda batch, bank: (batch[0], batch[2])),
        r"table \(1, 5, 3\) is not as long",
    ),
    "flat tokens": Case(
        OfTokens, flat, EVERYTHING, r"tokens \(\d+, 3\) is not as long.*take="
    ),
    "packed": Case(Model, packed, refused=r"the loader drew \d+ records"),
    "packed, with lengths": Case(
        *(OfTokens, packed_with_lengths, EVERYTHING),
        r"tokens \(1, \d+, 3\) is not as long",
    ),
    "time first": Case(
        Model, time_first, refused=r"loader drew \d+ records.*batch_first=False"
    ),
    "transposed": Case(
        Model,
        inputs=lambda batch, bank: (batch[0].transpose(0, 1),),
        refused=r"loader drew \d+ records.*x.transpose\(0, 1\)",
    ),
}


class Loop:
    """A private model, its batches, and singles."""

    def __init__(self, case, mode, **kwargs):
        torch.manual_seed(0)
        self.case, self.model = case, case.model().double()
        self.bank = torch.randn(K, D).double()
        self.private = make_private(
            self.model,
            mode,
            batch_size=4,
            dataset=Records(),
            max_grad_norm=C,
            poisson_sampling=True,
            **case.kwargs,
            **kwargs,
        )
        self.private.loader.collate_fn.collate.wrapped_collator_fn = case.collate

    def run(self, moved, loader=None):
        for _ in range(4):
            for batch in loader or self.private.loader:
                if moved:  # as to another device
                    batch = [x.clone() for x in batch]
                inputs = self.case.inputs(batch, self.bank)
                if self.case.refused is None:
                    self.step(inputs)
                else:
                    self.private.step(inputs, self.call)

    def call(self, m, inputs):
        return squares(m(*inputs))

    def step(self, inputs):
        grads = oracle(copy.deepcopy(self.model), inputs, self.call, self.case.batched)
        before = copy.deepcopy(self.model.state_dict())
        self.private.step(inputs, self.call)
        after, scale = self.model.state_dict(), 4
        found = {n: (before[n] - after[n]) * scale for n in before}
        assert_same(found, clipped_sum(grads, "flat", C), 1e-7)


class Fields(Dataset):
    """Records with two fields, which a batch of two has as well."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        torch.manual_seed(i)
        return dict(left=torch.randn(2).double(), right=torch.randn(2).double())


class OfFields(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, columns):
        return self.fc(torch.cat([columns["left"], columns["right"]], -1))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("own", [False, True])
def test_as_many_fields_as_records(mode, own):
    """Also with a collate function that takes the place of the loader's."""
    given = dict(dataset=Fields(), batch_size=2, max_grad_norm=C)
    private = make_private(OfFields().double(), mode, **given)
    if own:
        private.loader.collate_fn = default_collate
    for batch in private.loader:
        private.step(batch, lambda m, x: squares(m(x)))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_inputs(name, moved, mode):
    loop = Loop(CASES[name], mode)
    if CASES[name].refused is None:
        loop.run(moved)
        return
    with pytest.raises(Refused, match=CASES[name].refused):
        loop.run(moved)


class Masked(nn.Module):
    """Ids ``[T, B]`` beside a mask ``[B, T]``, or that of the other order."""

    def __init__(self, transposed):
        super().__init__()
        self.words, self.transposed = nn.Embedding(9, 4), transposed
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

    def forward(self, ids, pad):
        pad = pad.mT if self.transposed else pad
        return self.layer(self.words(ids), src_key_padding_mask=pad).mean(0)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
def test_a_mask_of_the_other_order(mode):
    """What the error says to do works; what it does not say explains itself."""
    ids = torch.arange(20).view(5, 4) % 9
    pad = torch.arange(5) >= torch.tensor([5, 3, 4, 2])[:, None]
    given = dict(batch_size=4, batch_first=False, max_grad_norm=C)

    def call(shared=(), transposed=False):
        torch.manual_seed(0)
        model = Masked(transposed).double()
        private = make_private(model, mode, shared=shared, **given)
        mask = pad.mT if transposed else pad
        private.step((ids, mask), lambda m, batch: squares(m(*batch)))
        return {n: p.grad * 4 for n, p in model.named_parameters()}

    words = r"If the batch is dim 0 of pad, pass pad.transpose\(0, 1\), and transpose"
    with pytest.raises(Refused, match=words):
        call()
    with pytest.raises(AssertionError) as caught:
        call(shared=["pad"])
    assert "ids (5, 1), pad (4, 5) (shared)" in with_notes(caught.value)
    torch.manual_seed(0)
    plain, rows = Masked(False).double(), []
    for b in range(4):
        plain.zero_grad()
        squares(plain(ids[:, b : b + 1], pad[b : b + 1])).sum().backward()
        rows.append({n: p.grad.clone() for n, p in plain.named_parameters()})
    grads = {n: torch.stack([row[n] for row in rows]) for n in rows[0]}
    assert_same(call(transposed=True), clipped_sum(grads, "flat", C), 1e-8)


def test_time_first_beside_lengths():
    """The error says batch_first=False, with which it is exact: lengths have no time"""

    def gradients(make, collate, **kwargs):
        torch.manual_seed(0)
        model = make().double()
        given = dict(batch_size=4, dataset=Records(), poisson_sampling=False)
        private = make_private(model, "hooks", max_grad_norm=C, **given, **kwargs)
        private.loader.collate_fn.collate = collate
        private.step(next(iter(private.loader)), lambda m, batch: squares(m(*batch)))
        return {n: p.grad for n, p in model.named_parameters()}

    words = r"x \(5, 4, 3\) is not as long as .*make_private\(batch_first=False\)"
    with pytest.raises(Refused, match=words):
        gradients(TimeFirst, time_first_with_lengths)
    found = gradients(TimeFirst, time_first_with_lengths, batch_first=False)
    assert_same(found, gradients(WithLengths, padded), 1e-8)


class Scored(WithTable):
    def forward(self, x, table):
        return {"loss": super().forward(x, table).square().sum()}


@pytest.mark.parametrize("named", [True, False])
def test_tables_in_the_trainer(named, tmp_path):
    transformers = pytest.importorskip("transformers")
    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

    def collate(records):
        return {"x": padded(records)[0], "table": torch.ones(K, D).double()}

    model = Scored().double()
    privacy = PrivacyArguments(
        target_delta=1e-3,
        noise_multiplier=1.0,
        shared=["table"] if named else None,
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=3,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
    )
    trainer = PrivateTrainer(
        model,
        arguments,
        train_dataset=Records(),
        data_collator=collate,
        privacy=privacy,
    )
    if named:
        trainer.train()
        assert trainer.state.global_step == 3
        return
    words = r"one first dim.*PrivacyArguments\(shared=\['table'\]\)"
    with pytest.raises(Refused, match=words):
        trainer.train()


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("workers", [0, 2])
def test_inputs_of_physical_batches(mode, workers):
    loop = Loop(CASES["a table"], mode, workers=workers)
    private, steps = loop.private, 0
    with BatchMemoryManager(
        data_loader=private.loader,
        max_physical_batch_size=2,
        optimizer=private.optimizer,
    ) as loader:
        for x, _ in loader:
            private.step((x, loop.bank), loop.call)
            steps += 1
    assert steps > 3
    loop = Loop(CASES["a table, not named"], mode, workers=workers)
    with pytest.raises(Refused, match="is not as long"):
        loop.run(False)


@pytest.mark.parametrize("rows", [4, 16])
def test_a_generator_before_a_private_model(rows):
    """Its loss is on what is no record, and is no private call."""
    loop = Loop(Case(lambda: Columns()), "hooks")
    generator = nn.Linear(3, 4).double()
    optimizer = torch.optim.SGD(generator.parameters(), 0.1)
    private = loop.private
    for _ in range(4):
        for x, _ in private.loader:
            x = x[:, 0].repeat(1, 2)[:, :4]
            grads = oracle(copy.deepcopy(loop.model), (x,), loop.call, (0,))
            before = copy.deepcopy(loop.model.state_dict())
            private.step((x,), loop.call)
            after = loop.model.state_dict()
            found = {n: (before[n] - after[n]) * 4 for n in before}
            assert_same(found, clipped_sum(grads, "flat", C), 1e-7)
            private.optimizer.zero_grad()
            fakes = generator(torch.randn(rows, 3).double())
            private.module(fakes).sum().backward()
            assert generator.weight.grad.any()
            optimizer.step()
            optimizer.zero_grad()
            private.optimizer.zero_grad()


class Columns(nn.Module):
    """Rows of four columns, which are as many as some draws have records."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


def test_views_of_records_are_refused_at_the_step():
    loop = Loop(CASES["samples"], "hooks")
    ((x, _),) = [next(b for b in loop.private.loader if len(b[0]) > 1)]
    loop.private.optimizer.zero_grad()
    loop.private.backward((torch.cat([x, x + 1, x - 1]),), loop.call)
    with pytest.raises(Refused, match="at most .* records"):
        loop.private.optimizer.step()
    assert not loop.private.engine.accountant.history


def test_the_same_table_in_each_call_is_told():
    """Where batches have one size, a table as long is read as samples."""
    model = WithTable().double()
    private = make_private(model, "ghost_bk", batch_size=K, dataset=Records())
    bank = torch.randn(K, D).double()
    with pytest.warns(UserWarning, match=r"table is read as samples.*shared=\['table'"):
        for x, _ in private.loader:
            private.step((x, bank), lambda m, inputs: squares(m(*inputs)))


def test_shared_inputs_have_names():
    """What is no input is refused by make_private."""
    with pytest.raises(Refused, match=r"shared=\['bank'\] are no inputs of WithTable"):
        Loop(CASES["a table"]._replace(kwargs=dict(shared=["bank"])), "hooks")


def test_one_record_beside_a_table_that_comes_first():
    """Where the loop may be at one record, or at as many as the table has rows."""

    class TableFirst(WithTable):
        def forward(self, table, x):
            return super().forward(x, table)

    reader = InputReader(TableFirst())
    reader.drawn = [1, K]
    with pytest.raises(Refused, match=r"table \(4, 3\) is not as long"):
        reader.read((torch.ones(K, D), torch.ones(1, T, D)), {})


def test_several_inputs_are_refused_at_once():
    class Adds(Model):
        def forward(self, x, one, two):
            return super().forward(x) + one.sum() + two.sum()

    private = make_private(Adds(), "hooks", batch_size=3)
    words = r"one \(4, 3\) .*two \(5,\) is not as long.*shared=\['one', 'two'\]"
    with pytest.raises(Refused, match=words):
        private.module(torch.ones(3, T, D), torch.ones(K, D), torch.ones(5))


# -- what is computed from outputs -----------------------------------------------------


class Squeezed(Model):
    def forward(self, x):
        return super().forward(x)[:, :1].squeeze()


class Listed(Model):
    def forward(self, x):
        return list(super().forward(x)[:, 0])


class Loss(Model):
    def forward(self, x):
        return super().forward(x).square().mean()


class Spans(Model):
    """As BiDAF: two distributions over T places."""

    def forward(self, x):
        logits = self.two(self.one(x).tanh())
        return tuple(part.squeeze().softmax(-1) for part in logits.split(1, -1))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("places", [1, 3])
def test_heads_that_squeeze(mode, size, places):
    """Whatever the criterion, and the draw."""
    private = make_private(
        Spans().double(), mode, batch_size=size, criterion=nn.CrossEntropyLoss()
    )
    criterion = private.criterion or nn.CrossEntropyLoss()
    x, y = torch.randn(size, places, D).double(), torch.zeros(size, dtype=torch.long)
    with pytest.raises(Refused, match=r"squeezes the batch dim.*squeeze\(-1\)"):
        starts, ends = private.module(x)
        criterion(starts, y) + criterion(ends, y)


class Named(dict):
    """As transformers 5.12 registers its outputs: without names for their parts."""


register_pytree_node(
    Named, lambda d: ([*d.values()], [*d]), lambda xs, keys: Named(zip(keys, xs))
)


class Router(Model):
    def forward(self, x):
        y = self.one(x)
        return Named(logits=y, router=Named(scores=(y, y.flatten(0, 1))))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
def test_an_output_without_a_batch_dim_is_named(mode):
    private = make_private(Router().double(), mode, batch_size=3)
    with pytest.raises(Refused, match=r"output\['router'\]\['scores'\]\[1\]"):
        squares(private.module(torch.randn(3, T, D).double())["router"]["scores"][1])


class OfNamed(Model):
    def forward(self, x, inputs):
        return super().forward(x * inputs["x"])


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
def test_inputs_in_a_class_without_names(mode):
    model, x = OfNamed().double(), torch.randn(3, T, D).double()
    private = make_private(copy.deepcopy(model), mode, batch_size=3)
    assert torch.allclose(private.module(x, Named(x=x)), model(x, {"x": x}))
    with pytest.raises(Refused, match=r"inputs\['table'\]"):
        private.module(x, Named(x=x, table=torch.randn(K, 2)))


@pytest.mark.parametrize("make", [Squeezed, Listed])
@pytest.mark.parametrize("size", [1, 4])
def test_a_forward_that_squeezes_the_batch_away(make, size):
    """Else the mean over samples would be compared with each target."""
    private = make_private(make().double(), "hooks", batch_size=size)
    output = private.module(torch.randn(size, T, D).double())
    output = torch.stack(output) if isinstance(output, list) else output
    with pytest.raises(Refused, match=r"squeeze\(-1\)"):
        nn.functional.mse_loss(output, torch.randn(4).double())


def test_a_model_that_returns_its_loss():
    private = make_private(Loss().double(), "hooks", batch_size=4, max_grad_norm=C)
    x = torch.randn(4, T, D).double()
    loss = private.module(x)
    total = (loss + 2 * loss) / 3 + torch.stack([loss, loss]).sum() * 0
    assert f"{total:.3f}" and total.item() > 0 and float(total.detach().log()) < 9
    grads = oracle(private.handle._module, x, lambda m, x: m(x)[None])
    private.optimizer.zero_grad()
    total.backward()
    private.optimizer.step()
    found = {n: 4 * p.grad for n, p in private.handle._module.named_parameters()}
    assert_same(found, clipped_sum(grads, "flat", C), 1e-7)


class Smooth(nn.Module):
    """A criterion of one's own."""

    reduction = "mean"

    def forward(self, y, target):
        return (y - target).square().add(1e-3).sqrt().mean()


class Mixes(Smooth):
    def forward(self, y, target):
        return super().forward(y, target) / y.detach().float().abs().max().to(y) ** 0.05


@pytest.mark.parametrize("kind, mixes", [(Smooth, False), (Mixes, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_criteria_of_16_bits(kind, mixes, dtype):
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Linear(5, 3).to(dtype)
        private = make_private(model, "ghost", batch_size=16, criterion=kind())
        y = private.module(torch.randn(16, 5).to(dtype))
        target = torch.randn(16, 3).to(dtype)
        if mixes:
            with pytest.raises(Refused, match="mixes samples"):
                private.criterion(y, target)
            continue
        private.criterion(y, target).backward()


class WithAuxiliary(Model):
    def forward(self, x):
        y = super().forward(x)
        return y[:, 0], y.square().mean()


def test_a_mean_of_losses_beside_losses_of_samples():
    private = make_private(WithAuxiliary().double(), "hooks", batch_size=4)
    x, target = torch.randn(4, T, D).double(), torch.randn(4).double()

    def losses(m, batch):
        y, auxiliary = m(batch[0])
        return (y - batch[1]).square() + 0.1 * auxiliary

    expected = oracle(private.handle._module, (x, target), losses)
    private.step((x, target), losses)
    found = {n: 4 * p.grad for n, p in private.handle._module.named_parameters()}
    assert_same(found, clipped_sum(expected, "flat", 1.0), 1e-7)
    y, auxiliary = private.module(x)
    with pytest.raises(Refused, match=r"squeeze\(-1\)"):
        (auxiliary - target).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_router_that_is_cast_once(dtype):
    """As Switch of transformers casts its own in each forward."""

    class Casts(Model):
        def forward(self, x):
            self.two = self.two.to(torch.float32)
            return self.two(self.one(x).tanh().mean(1).float())

    torch.manual_seed(0)
    model = Casts().to(dtype)
    private = make_private(model, "ghost_bk", batch_size=4, lr=0.0, max_grad_norm=C)
    for _ in range(2):
        x = torch.randn(4, T, D).to(dtype)
        private.step(x, lambda m, x: squares(m(x)))
        assert model.two.weight.dtype is torch.float32
    plain = Casts().to(dtype)
    plain.load_state_dict(model.state_dict())
    grads = oracle(plain, x, lambda m, x: squares(m(x)))
    expected = clipped_sum({n: g.double() for n, g in grads.items()}, "flat", C)
    found = {n: 4 * p.grad.double() for n, p in model.named_parameters()}
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-4}.get(dtype, 1e-5)
    assert_same(found, expected, tolerance)

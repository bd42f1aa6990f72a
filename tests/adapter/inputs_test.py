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
from tests.common import (
    assert_same,
    clipped_sum,
    make_private,
    oracle,
    squares,
    with_notes,
)
from tests.training import SHORT
from tests.training import private as privacy
from tests.zoo import Case, check, refused

pytestmark = pytest.mark.filterwarnings("ignore")
RECORDS, D, T, K, C = 12, 3, 5, 4, 0.5
modes = pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])


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
    tokens, lengths = flat(records)
    return tokens[None], lengths


def padded(records):
    return torch.stack([x for x, _ in records]), torch.stack([n for _, n in records])


def time_first(records):
    x, lengths = padded(records)
    return x.transpose(0, 1), lengths


def with_places(records):
    return *padded(records), ONES


ONES = torch.linspace(-1, 1, T * D).double().view(1, T, D)


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


class Inputs(NamedTuple):
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
    """The inputs with a table; None for that of the loop."""
    return lambda batch, bank: (batch[0], bank if table is None else table)


BANK, EVERYTHING = beside(None), lambda batch, bank: batch
CASES = {
    "samples": Inputs(Model),
    "two of samples": Inputs(WithLengths, inputs=EVERYTHING, batched=(0, 1)),
    "a table": Inputs(WithTable, inputs=BANK, kwargs=dict(shared=["table"])),
    "a table, not named": Inputs(
        WithTable, inputs=BANK, refused=r"table \(4, 3\) is not as .*shared=\['table'\]"
    ),
    "a table of one": Inputs(WithTable, inputs=beside(ONES)),
    "places": Inputs(WithTable, inputs=beside(ONES[0]), kwargs=dict(shared=["table"])),
    "places, not named": Inputs(
        WithTable, inputs=beside(ONES[0]), refused=r"table \(5, 3\) is not as long"
    ),
    "places of the loader": Inputs(
        WithTable,
        *(with_places, lambda batch, bank: (batch[0], batch[2])),
        r"table \(1, 5, 3\) is not as long",
    ),
    "flat tokens": Inputs(
        OfTokens, flat, EVERYTHING, r"tokens \(\d+, 3\) is not as long.*take="
    ),
    "packed": Inputs(Model, packed, refused=r"the loader drew \d+ records"),
    "packed, with lengths": Inputs(
        *(OfTokens, packed, EVERYTHING),
        r"tokens \(1, \d+, 3\) is not as long",
    ),
    "time first": Inputs(
        Model, time_first, refused=r"loader drew \d+ records.*batch_first=False"
    ),
    "transposed": Inputs(
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
        given = dict(batch_size=4, max_grad_norm=C, lr=0.0, poisson_sampling=True)
        given.update(dataset=Records(), **case.kwargs, **kwargs)
        self.private = make_private(self.model, mode, **given)
        self.private.loader.collate_fn.collate.wrapped_collator_fn = case.collate

    def run(self, moved):
        for _ in range(4):
            for batch in self.private.loader:
                if moved:  # as to another device
                    batch = [x.clone() for x in batch]
                self.step(self.case.inputs(batch, self.bank))

    def call(self, m, inputs):
        return squares(m(*inputs))

    def step(self, inputs):
        self.private.step(inputs, self.call)
        if self.case.refused is None:
            plain = copy.deepcopy(self.case.model()).double()
            plain.load_state_dict(self.model.state_dict())
            grads = oracle(plain, inputs, self.call, self.case.batched)
            assert_same(self.gradients(), clipped_sum(grads, "flat", C), 1e-7)

    def gradients(self):
        return {n: 4 * p.grad for n, p in self.model.named_parameters()}


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


@modes
def test_as_many_fields_as_records(mode):
    """Also with a collate function that takes the place of the loader's."""
    given = dict(dataset=Fields(), batch_size=2, max_grad_norm=C)
    for own in (None, default_collate):
        private = make_private(OfFields().double(), mode, **given)
        private.loader.collate_fn = own or private.loader.collate_fn
        for batch in private.loader:
            private.step(batch, lambda m, x: squares(m(x)))


@modes
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_inputs(name, moved, mode):
    loop = Loop(CASES[name], mode)
    with refused(CASES[name].refused):
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


IDS = torch.arange(20).view(5, 4) % 9
PAD = torch.arange(5) >= torch.tensor([5, 3, 4, 2])[:, None]


def masked(transposed):
    return Case(
        lambda: Masked(transposed),
        [(IDS, PAD.mT if transposed else PAD)],
        alone=lambda batch: [
            (IDS[:, b : b + 1], PAD[b : b + 1].mT if transposed else PAD[b : b + 1])
            for b in range(4)
        ],
        kwargs=dict(batch_first=False),
        refused=(
            None
            if transposed
            else r"the batch is dim 0 of pad, pass pad.transpose"
            r"\(0, 1\), and transpose"
        ),
    )


@modes
def test_a_mask_of_the_other_order(mode):
    """What the error says to do works; what it does not say explains itself."""
    for transposed in (False, True):
        check(masked(transposed), mode)
    wrong = masked(False)._replace(refused=None)
    with pytest.raises(AssertionError) as caught:
        check(wrong._replace(kwargs=dict(batch_first=False, shared=["pad"])), mode)
    assert "ids (5, 1), pad (4, 5) (shared)" in with_notes(caught.value)


def test_time_first_beside_lengths():
    """The error says batch_first=False, with which it is exact: lengths have no time"""
    private = make_private(
        TimeFirst().double(), "hooks", dataset=Records(), batch_size=4
    )
    private.loader.collate_fn.collate = time_first
    said = r"x \(5, 4, 3\) is not as long as .*make_private\(batch_first=False\)"
    batch = next(iter(private.loader))
    with pytest.raises(Refused, match=said):
        private.module(*batch)
    case = Case(
        TimeFirst,
        [batch],
        loss=lambda m, inputs: squares(m(*inputs)),
        alone=lambda batch: [
            (batch[0][:, b : b + 1], batch[1][b : b + 1]) for b in range(4)
        ],
        kwargs=dict(batch_first=False),
    )
    check(case, "hooks")


class Scored(WithTable):
    def forward(self, x, table):
        return {"loss": super().forward(x, table).square().sum()}


@pytest.mark.parametrize("named", [True, False])
def test_tables_in_the_trainer(named, tmp_path):
    transformers = pytest.importorskip("transformers")
    from opacus_ext.trainer import PrivateTrainer

    def collate(records):
        return {"x": padded(records)[0], "table": torch.ones(K, D).double()}

    given = dict(output_dir=str(tmp_path), max_steps=3, remove_unused_columns=False)
    trainer = PrivateTrainer(
        Scored().double(),
        transformers.TrainingArguments(**SHORT, **given),
        train_dataset=Records(),
        data_collator=collate,
        privacy=privacy(shared=["table"] if named else None),
    )
    said = r"one first dim.*PrivacyArguments\(shared=\['table'\]\)"
    with refused({False: said}.get(named)):
        trainer.train()
    assert trainer.state.global_step == 3 * named


@modes
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
    loop = Loop(Inputs(Columns), "hooks")
    generator, private = nn.Linear(3, 4).double(), loop.private
    for _ in range(4):
        for x, _ in private.loader:
            loop.step((x[:, 0].repeat(1, 2)[:, :4],))
            private.optimizer.zero_grad()
            generator.zero_grad()
            fakes = generator(torch.randn(rows, 3).double())
            private.module(fakes).sum().backward()
            assert generator.weight.grad.any()
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


# -- what is computed from outputs -----------------------------------------------------


class Squeezed(Model):
    def forward(self, x):
        return super().forward(x)[:, :1].squeeze()


class Listed(Model):
    def forward(self, x):
        return list(super().forward(x)[:, 0])


class Spans(Model):
    """As BiDAF: two distributions over T places."""

    def forward(self, x):
        logits = self.two(self.one(x).tanh())
        return tuple(part.squeeze().softmax(-1) for part in logits.split(1, -1))


@modes
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


@pytest.mark.parametrize("make", [Squeezed, Listed])
@pytest.mark.parametrize("size", [1, 4])
def test_a_forward_that_squeezes_the_batch_away(make, size):
    """Else the mean over samples would be compared with each target."""
    private = make_private(make().double(), "hooks", batch_size=size)
    output = private.module(torch.randn(size, T, D).double())
    output = torch.stack(output) if isinstance(output, list) else output
    with pytest.raises(Refused, match=r"squeeze\(-1\)"):
        nn.functional.mse_loss(output, torch.randn(4).double())


class Named(dict):
    """As transformers 5.12 registers its outputs: without names for their parts."""


register_pytree_node(
    Named, lambda d: ([*d.values()], [*d]), lambda xs, keys: Named(zip(keys, xs))
)


class Router(Model):
    def forward(self, x, inputs):
        y = self.one(x * inputs["x"])
        rows = y if "exact" in inputs else y.flatten(0, 1)
        return Named(logits=y, router=Named(scores=(y, rows)))


@modes
def test_parts_of_a_class_without_names_are_named(mode):
    x = torch.randn(3, T, D).double()
    for inputs, said in (
        (Named(x=x, exact=x), None),
        (Named(x=x), r"output\['router'\]\['scores'\]\[1\]"),
        (Named(x=x, table=torch.randn(K, 2)), r"inputs\['table'\]"),
    ):
        check(
            Case(
                Router,
                [(x, inputs)],
                said,
                loss=lambda m, batch: squares(m(*batch)["router"]["scores"][1]),
                alone=lambda batch: [
                    (a, Named(x=a, exact=a)) for a in batch[0].split(1)
                ],
            ),
            mode,
        )


class WithAuxiliary(Model):
    def forward(self, x):
        y = super().forward(x)
        return y[:, 0], y.square().mean()


def of_means(m, x):
    """What may be done with a mean of losses, which is one number of each sample."""
    _, loss = m(x)
    total = (loss + 2 * loss) / 3 + torch.stack([loss, loss]).sum() * 0
    assert f"{total:.3f}" and total.item() > 0 and float(total.detach().log()) < 9
    return total[None] if len(x) == 1 else total


def beside_losses(m, x):
    y, auxiliary = m(x)
    return y.square() + 0.1 * auxiliary


@pytest.mark.parametrize("loss", [of_means, beside_losses])
def test_a_mean_of_losses(loss):
    x = torch.randn(4, T, D).double()
    private = check(Case(WithAuxiliary, [x], loss=loss), "hooks")
    _, auxiliary = private.module(x)
    with pytest.raises(Refused, match=r"squeeze\(-1\)"):
        (auxiliary - torch.randn(4)).square().mean()


class Smooth(nn.Module):
    """A criterion of one's own."""

    reduction = "mean"

    def forward(self, y, target):
        return (y - target).square().add(1e-3).sqrt().mean()


class Mixes(Smooth):
    def forward(self, y, target):
        return super().forward(y, target) / y.detach().float().abs().max().to(y) ** 0.05


@pytest.mark.parametrize("kind", [Smooth, Mixes])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_criteria_of_16_bits(kind, dtype):
    said = {Mixes: "mixes samples"}.get(kind)
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Linear(5, 3).to(dtype)
        private = make_private(model, "ghost", batch_size=16, criterion=kind())
        y = private.module(torch.randn(16, 5).to(dtype))
        with refused(said):
            private.criterion(y, torch.randn(16, 3).to(dtype)).backward()


class Casts(Model):
    """A router that is cast in each forward, as Switch of transformers casts its own"""

    def forward(self, x):
        self.two = self.two.to(torch.float32)
        return self.two(self.one(x).tanh().mean(1).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_router_that_is_cast_once(dtype):
    model, plain = Casts().to(dtype), Casts().to(dtype)
    plain.load_state_dict(model.state_dict())
    private = make_private(model, "ghost_bk", batch_size=4, lr=0.0, max_grad_norm=C)
    for _ in range(2):
        x = torch.randn(4, T, D).to(dtype)
        private.step(x, lambda m, x: squares(m(x)))
        assert model.two.weight.dtype is torch.float32
    grads = oracle(plain, x, lambda m, x: squares(m(x)))
    expected = clipped_sum({n: g.double() for n, g in grads.items()}, "flat", C)
    found = {n: 4 * p.grad.double() for n, p in model.named_parameters()}
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-4}.get(dtype, 1e-5)
    assert_same(found, expected, tolerance)

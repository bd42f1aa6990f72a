"""Long sequences and big vocabularies: what is in memory at once, at every step.

Counted are the bytes of all tensors that are alive, by watching every operation of a
step; the first, which looks at more, is among them.
"""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from opacus_ext import workspace
from opacus_ext.losses import model_losses
from tests.common import every_mode, make_private

transformers = pytest.importorskip("transformers")


class Alive(TorchDispatchMode):
    """The most bytes of tensors made within it that are alive at once."""

    def __init__(self, least=0):
        super().__init__()
        self.least = least  # smaller ones are not counted
        self.sizes, self.now, self.most, self.largest = {}, 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self._note(x.untyped_storage())
        return out

    def _note(self, storage):
        size, key = storage.nbytes(), storage._cdata
        if size < self.least or key in self.sizes:
            return
        self.sizes[key] = size
        self.now += size
        self.most = max(self.most, self.now)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key):
        self.now -= self.sizes.pop(key)


def model_of(V, T, width=8, tied=True):
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=T,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


class Checkpointed(nn.Module):
    """A language model whose head is computed again in the backward pass, in parts."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def loss(self, hidden, labels):
        logits = self.model.lm_head(hidden)
        return F.cross_entropy(logits.mT, labels, reduction="none")

    def forward(self, input_ids, labels):
        hidden = self.model.model(input_ids).last_hidden_state.split(16, dim=1)
        parts = [
            checkpoint(self.loss, *part, use_reentrant=False)
            for part in zip(hidden, labels.split(16, dim=1))
        ]
        return {"loss": torch.cat(parts, dim=1).mean()}


def own_loss(model, batch):
    return model(**batch).loss


def peaks(mode, model, B, T, steps=3, least=0, losses=None):
    """Of each step. Mode None: not private, by default with the model's own loss."""
    ids = torch.randint(3, model.config.vocab_size, (B, T))
    batch, found = {"input_ids": ids, "labels": ids}, []
    private = mode and make_private(model, mode, batch_size=B)
    for _ in range(steps):
        with Alive(least) as alive:
            if mode is None:
                (losses or own_loss)(model, batch).mean().backward()
                model.zero_grad()
            else:
                private.step(batch, losses or model_losses)
        found.append(alive)
    return found


@pytest.fixture
def small_workspace():
    before = workspace(2**19)
    yield
    workspace(before)


@pytest.mark.parametrize("mode", ["ghost_bk", "ghost"])
def test_linear_in_the_length(mode, small_workspace):
    """A Gram matrix of all positions would take 16 MiB at the second length."""
    short, long = (
        max(a.most for a in peaks(mode, model_of(20, T), 2, T)) for T in (512, 1024)
    )
    assert long < 2.2 * short and long < 8 * 2**20


def test_no_table_for_each_sample():
    """Never [B, V, d] nor [V, V], of a matrix that is embedding and head."""
    V, B = 20_000, 4
    for alive in peaks("ghost_bk", model_of(V, 8), B, 4):
        assert alive.largest < B * V * 8 * 4


@pytest.mark.slow
def test_linear_up_to_8192():
    """With the workspace as it is by default."""
    sizes = [
        max(a.most for a in peaks("ghost_bk", model_of(100, T, 16), 2, T))
        for T in (2048, 4096, 8192)
    ]
    assert sizes[2] < 2.1 * sizes[1] and sizes[1] < 2.1 * sizes[0]


@every_mode
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_as_often_as_the_model_itself(mode, tied, small_workspace):
    """Also where a step looks at more; a weight is much smaller than the logits."""
    V, B, T = 3000, 2, 160
    logits = B * T * V * 4
    own = peaks(None, model_of(V, T, tied=tied), B, T, 1, logits // 3)[0]
    assert own.most == 3 * logits
    found = peaks(mode, model_of(V, T, tied=tied), B, T, 3, logits // 3)
    for step, alive in enumerate(found):
        # At first three samples are tried, without a graph, as two are given.
        largest = logits if step else logits * 3 / 2
        assert alive.most <= own.most and alive.largest <= largest


@pytest.mark.parametrize(
    "mode, tied", [("ghost_bk", True), ("ghost_bk", False), ("ghost", True)]
)
def test_checkpointed_head_has_no_logits(mode, tied, small_workspace):
    V, B, T = 3000, 2, 160
    for alive in peaks(mode, Checkpointed(model_of(V, T, tied=tied)), B, T):
        assert alive.largest < B * T * V * 4 / 4 and alive.most < B * T * V * 4


class Logits(nn.Module):
    """A language model that returns its logits alone."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids):
        return self.model(input_ids, return_dict=False)[0]


def losses_of_logits(model, batch):
    flat = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
    losses = F.cross_entropy(*flat, reduction="none")
    return losses.view(batch["labels"].shape).mean(1)


@every_mode
def test_logits_that_nobody_holds_are_freed(mode, small_workspace):
    V, B, T = 3000, 2, 160
    least = B * T * V * 4 // 3
    own = peaks(None, Logits(model_of(V, T)), B, T, 1, least, losses_of_logits)[0]
    found = peaks(mode, Logits(model_of(V, T)), B, T, 3, least, losses_of_logits)
    for alive in found[1:]:  # at first three samples are tried
        assert alive.most <= own.most

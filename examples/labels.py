"""Classification in words: a text-to-text model answers with the name of a class."""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from opacus_ext.layers import balancing_loss
from opacus_ext.recommend.loop import learning_rate
from opacus_ext.refused import Refused

IGNORED = -100


def encode_labels(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str]
) -> torch.Tensor:
    """
    The tokens of each class's name, ``[classes, L]``, filled with -100.

    Without an end of text, which is the same in all of them, unless one name begins
    another: then all have it, so that their likelihoods can be compared.

    Raises:
        Refused: if the tokenizer can't tell the names apart

    Example:
        >>> from examples.hashed_words import HashedWords
        >>> encode_labels(HashedWords(100), ["no", "not so"]).shape
        torch.Size([2, 2])
    """
    names = [list(tokenizer(word).input_ids) for word in words]
    end = tokenizer.eos_token_id
    names = [ids[:-1] if ids[-1:] == [end] else ids for ids in names]
    pairs = [(i, j) for i in range(len(names)) for j in range(len(names)) if i != j]
    if end is not None and any(_begins(names[i], names[j]) for i, j in pairs):
        names = [[*ids, end] for ids in names]
    for i, j in pairs:
        if _begins(names[i], names[j]):
            raise Refused(
                f"the tokenizer can't tell {words[i]!r} from {words[j]!r}: they become "
                f"the tokens {names[i]} and {names[j]}.",
                parameter="tokenizer",
                remedy="Take another one, or more --buckets.",
            )
    labels = torch.full((len(names), max(map(len, names))), IGNORED)
    for row, ids in zip(labels, names):
        row[: len(ids)] = torch.tensor(ids)
    return labels


def _begins(one: List[int], other: List[int]) -> bool:
    return other[: len(one)] == one


class LabelModel(nn.Module):
    """
    A text-to-text model's losses and scores for the names of classes.

    The model's own loss is never asked for: with router logits it holds a balancing
    loss over the batch, which no clipping bounds.

    Args:
        model: an encoder-decoder of transformers, such as a Switch model
        labels: from :func:`encode_labels`, ``[classes, L]``
        balancing: weight of the routers' balancing loss, taken in each sample by itself
            and averaged over the layers with experts; 0 for none

    Raises:
        Refused: if the model's config names no first token of an answer

    Example:
        >>> from examples.hashed_words import HashedWords
        >>> tokenizer = HashedWords(100)
        >>> labels = encode_labels(tokenizer, ["negative", "positive"])
        >>> model = LabelModel(scratch_switch(tokenizer.vocab_size, width=8), labels)
        >>> ids = torch.tensor([[7, 8, 9], [5, 4, 0]])
        >>> lengths, classes = torch.tensor([3, 2]), torch.tensor([0, 1])
        >>> model(ids, lengths, classes).shape, model.scores(ids, lengths).shape
        (torch.Size([2]), torch.Size([2, 2]))
    """

    def __init__(
        self, model: PreTrainedModel, labels: torch.Tensor, balancing: float = 0.0
    ):
        super().__init__()
        start = getattr(model.config, "decoder_start_token_id", None)
        start = model.config.pad_token_id if start is None else start
        if start is None:
            raise Refused(
                "the model's config has no decoder_start_token_id: it is not an "
                "encoder-decoder that answers in text, such as Switch or T5.",
                module=type(model).__name__,
                remedy="Take one of these.",
            )
        self.model, self.balancing = model, balancing
        fill = labels.masked_fill(labels == IGNORED, start)
        inputs = fill.roll(1, dims=1)
        inputs[:, 0] = start
        self.register_buffer("labels", labels, persistent=False)
        self.register_buffer("inputs", inputs, persistent=False)

    def forward(
        self, ids: torch.Tensor, lengths: torch.Tensor, classes: torch.Tensor
    ) -> torch.Tensor:
        """
        Losses ``[B]``: minus the mean log-likelihood of the tokens of each sample's
        class, plus its weighted balancing loss.

        Args:
            ids: tokens ``[B, T]``; those beyond a text's length are not looked at
            lengths: tokens of each text, ``[B]``
            classes: ``[B]``
        """
        mask, targets = self._mask(ids, lengths), self.labels[classes]
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            decoder_input_ids=self.inputs[classes],
            use_cache=False,
            **({"output_router_logits": True} if self.balancing else {}),
        )
        losses = _minus_log_likelihood(output.logits, targets)
        losses = losses / (targets != IGNORED).sum(dim=1)
        if self.balancing:
            sides = (
                (output.encoder_router_logits, mask),
                (output.decoder_router_logits, targets != IGNORED),
            )
            terms = [
                _unevenness(logits, real)
                for layers, real in sides
                for logits in layers or ()
            ]
            losses = losses + self.balancing * torch.stack(terms).mean(dim=0)
        return losses

    @torch.no_grad()
    def scores(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The log-likelihood of each class's whole name, ``[B, classes]``."""
        mask = self._mask(ids, lengths)
        encoded = self.model.get_encoder()(input_ids=ids, attention_mask=mask)
        columns = []
        for inputs, targets in zip(self.inputs, self.labels):
            output = self.model(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=inputs.expand(len(ids), -1),
                use_cache=False,
            )
            targets = targets.expand(len(ids), -1)
            columns.append(-_minus_log_likelihood(output.logits, targets))
        return torch.stack(columns, dim=1)

    @staticmethod
    def _mask(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()


def _minus_log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # Flattened: on a CPU several times as fast as with the vocabulary in the middle.
    rows = logits.flatten(0, 1), targets.flatten()
    losses = F.cross_entropy(*rows, ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets).sum(dim=1)


def _unevenness(logits: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    chosen = logits.argmax(dim=-1, keepdim=True)
    return balancing_loss(logits.softmax(dim=-1), chosen, real)


def learn_to_answer(
    model: LabelModel, steps: int, lr: float = 1e-2, rows: int = 64, length: int = 12
) -> float:
    """
    Trains on random tokens and random classes, so that a model with random weights
    answers with one of the names before it sees any text.

    It costs no privacy, as no text is read, and saves the steps, and so the noise, that
    finding the names among all tokens would take.

    Args:
        model: changed in place
        steps: how many
        lr: peak learning rate of Adam
        rows: texts a step
        length: tokens of a text

    Returns:
        The last loss; log(classes) is as low as it can get.
    """
    size = model.model.get_input_embeddings().num_embeddings
    device = model.labels.device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=lr)
    loss = torch.tensor(float("nan"))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr, 0.1)
        ids = torch.randint(size, (rows, length)).to(device)
        classes = torch.randint(len(model.labels), (rows,)).to(device)
        optimizer.zero_grad()
        loss = model(ids, torch.full_like(classes, length), classes).mean()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def scratch_switch(
    vocabulary: int,
    width: int = 64,
    depth: int = 1,
    decoder_depth: int = 1,
    heads: int = 4,
    experts: int = 4,
    dropout: Optional[float] = None,
    embedding_std: float = 1.0,
) -> SwitchTransformersForConditionalGeneration:
    """
    A small Switch model with random weights, experts in every layer, and an output
    layer of its own with small weights.

    Args:
        vocabulary: how many tokens there are; 0 fills, 1 ends a text
        width: model dimension, a multiple of ``heads``; inside the experts twice that
        depth: layers of the encoder
        decoder_depth: layers of the decoder
        heads: of the attention
        experts: in each layer
        dropout: probability; none by default
        embedding_std: standard deviation of the encoder's embedding; T5 has 1

    Raises:
        Refused: if the heads can't share the width
    """
    if width % heads:
        raise Refused(
            f"{heads} heads can't share a width of {width} equally.",
            parameter="heads",
            remedy="Take a divisor of the width.",
        )
    config = SwitchTransformersConfig(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=2 * width,
        num_layers=depth,
        num_sparse_encoder_layers=depth,
        num_decoder_layers=decoder_depth,
        num_sparse_decoder_layers=decoder_depth,
        num_heads=heads,
        num_experts=experts,
        dropout_rate=dropout or 0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = SwitchTransformersForConditionalGeneration(config)
    with torch.no_grad():
        model.encoder.embed_tokens.weight *= embedding_std
        model.lm_head.weight *= 0.1
    return model

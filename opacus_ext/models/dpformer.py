"""Models of item sequences: DPFormer, and recurrent models to compare it with."""

import math
from typing import Optional, Union

import torch
from torch import nn

from opacus_ext.re_attention.attention import SelfAttention
from opacus_ext.re_attention.propagation import Propagating, Uncertain, propagated
from opacus_ext.refused import Refused


class Block(Propagating):
    """
    One encoder layer: attention, then a feed-forward layer four times as wide.

    Normalization follows each residual sum (post-norm) and dropout acts on each
    sub-layer's output, as in "Attention Is All You Need" (sections 3.1, 3.3, 5.4).
    """

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.attention = SelfAttention(width, heads, causal=True)
        self.norm1 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.relu = nn.ReLU()
        self.contract = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def propagate(self, x: Uncertain) -> Uncertain:
        """Computes hidden states ``[B, T, width]``, and the variance of their error."""
        attended = x.through(self.attention).through(self.dropout)
        x = (x + attended).through(self.norm1)
        hidden = x.through(self.expand).through(self.relu)
        contracted = hidden.through(self.contract).through(self.dropout)
        return (x + contracted).through(self.norm2)


class NextItemModel(nn.Module):
    """
    Predicts the next item of a sequence from an encoding of the items before.

    Sequences are padded with 0 on the right; outputs at padded positions mean nothing
    and must be ignored by the loss. A subclass has ``encode``, from item ids ``[B, T]``
    to hidden states ``[B, T, width]``, in which no position sees later ones.

    Args:
        num_items: number of items; their ids are 1 to ``num_items``
        width: model dimension
        tied: shares one embedding matrix by input and output
        items: ``[M]``, the ids that have a row of their own; by default all. The others
            share one row, and only the prior ranks them. Each row of a private
            embedding gets the same noise, so that those of rare items are noise alone.
            The choice must be public or released, as by
            :meth:`opacus_ext.releases.Popularity.top`
    """

    items: Optional[torch.Tensor]
    row: Optional[torch.Tensor]
    prior: Optional[nn.Module]

    def __init__(
        self,
        num_items: int,
        width: int,
        tied: bool = True,
        items: Optional[torch.Tensor] = None,
    ):
        super().__init__()
        self.num_items, self.prior = num_items, None
        rows, row = num_items + 1, None
        if items is not None:
            rows = len(items) + 2  # of padding, and of all others
            row = torch.full((num_items + 1,), rows - 1)
            row[items] = torch.arange(1, rows - 1)
            row[0] = 0
        self.register_buffer("items", items)
        self.register_buffer("row", row)
        self.embedding = nn.Embedding(rows, width, padding_idx=0)
        self.head = nn.Linear(width, rows, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        # Small rows: the last norm gives every hidden state the length sqrt(width), and
        # logits should start near zero. Larger rows cost steps of a private budget.
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.normal_(self.embedding.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[0].zero_()

    def set_prior(self, prior: Union[torch.Tensor, nn.Module]) -> None:
        """
        Sets logits that are added to those of the model.

        The model need not learn from noisy gradients what is public or was released
        once. Without a prior its clipped gradients are mostly about how popular items
        are, and little of anything else is learned.

        Args:
            prior: p_i of the items, ``[num_items + 1]``, of which log p_i is taken
                (:func:`opacus_ext.re_attention.token_shares`,
                :attr:`opacus_ext.releases.Popularity.shares`); zeros count as the
                smallest positive share. Or a module that is called as the model is,
                such as :class:`TransitionPrior`, whose parameters are trained unless
                they are frozen
        """
        self.prior = prior if isinstance(prior, nn.Module) else _Shares(prior)

    def shares_of_rows(self, shares: torch.Tensor) -> torch.Tensor:
        """
        Returns the probability that a sequence meets a row of the embedding,
        ``[rows]``, for :func:`opacus_ext.track_errors`; for the shared row an upper
        bound. ``shares`` are those of the items, ``[num_items + 1]``.
        """
        if self.row is None:
            return shares
        rows = shares.new_zeros(self.embedding.num_embeddings)
        return rows.index_add(0, self.row, shares).clamp(max=1)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns hidden states ``[B, T, width]`` of embedding rows ``[B, T]``."""
        raise NotImplementedError(type(self).__name__)

    def forward(
        self, ids: torch.Tensor, at: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """
        Returns logits ``[B, T, num_items + 1]`` of the item after each position; with
        ``at`` ``[B]``, after one position of each sequence, ``[B, num_items + 1]``.
        """
        hidden = self.encode(ids if self.row is None else self.row[ids])
        if at is not None:
            hidden = hidden[torch.arange(len(ids), device=ids.device), at]
        logits = self.head(hidden)
        if self.items is not None:
            own, shape = logits[..., 1:-1], (*logits.shape[:-1], self.num_items + 1)
            logits = logits.new_zeros(shape).index_add(-1, self.items, own)
        return logits if self.prior is None else logits + self.prior(ids, at)

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[B, num_items + 1]`` of the item after each sequence."""
        return self(ids, (ids != 0).sum(dim=1).sub(1).clamp(min=0))


class _Shares(nn.Module):
    """The prior of items' popularity."""

    logits: torch.Tensor

    def __init__(self, shares: torch.Tensor):
        super().__init__()
        positive = shares[shares > 0]
        floor = positive.min() if len(positive) else shares.new_ones(())
        self.register_buffer("logits", shares.clamp(min=float(floor)).log())

    def forward(
        self, ids: torch.Tensor, at: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        return self.logits


class DPFormer(NextItemModel):
    """
    Predicts the next item of a sequence with a transformer, at every position.

    The standard encoder with learned positions, a causal mask and one embedding matrix
    shared by input and output; defaults and structure are those of "DPFormer: Learning
    Differentially Private Transformer on Long-Tailed Data" (appendix E).
    :func:`opacus_ext.track_errors` turns its Re-Attention on. No padding mask is
    needed: a real position sees earlier positions only, and these are real.

    Args:
        num_items: number of items; their ids are 1 to ``num_items``
        max_len: longest sequence T, in items
        width: model dimension
        depth: number of blocks
        heads: number of attention heads; must divide ``width``
        dropout: dropout probability (the paper's: 0.2 MovieLens, 0.5 Amazon)
        tied, items: see :class:`NextItemModel`

    Example:
        >>> model, ids = DPFormer(num_items=10, max_len=5), torch.tensor([[3, 1, 0]])
        >>> model(ids).shape, model.score(ids).shape
        (torch.Size([1, 3, 11]), torch.Size([1, 11]))
    """

    def __init__(
        self,
        num_items: int,
        max_len: int,
        width: int = 64,
        depth: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
        tied: bool = True,
        items: Optional[torch.Tensor] = None,
    ):
        super().__init__(num_items, width, tied, items)
        self.position = nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.position.weight, std=0.02)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        """
        Returns hidden states ``[B, T, width]`` of embedding rows ``[B, T]``.

        Raises:
            Refused: if a sequence is longer than ``max_len``
        """
        length = ids.shape[1]
        if length > self.position.num_embeddings:
            raise Refused(
                f"A sequence of {length} items is longer than "
                f"max_len={self.position.num_embeddings}.",
                parameter="ids",
                remedy="Cut it to its latest items, or build the model for more.",
            )
        return propagated(self, ids)

    def propagate(self, ids: Uncertain) -> Uncertain:
        """Computes hidden states of ids, and the variance of their error."""
        # Expanded to [B, T], so that each sample has its own gradient for a position.
        batch, length = ids.value.shape
        positions = torch.arange(length, device=ids.value.device).expand(batch, length)
        x = ids.through(self.embedding) * math.sqrt(self.embedding.embedding_dim)
        x = x + ids.known(positions).through(self.position)
        x = x.through(self.dropout)
        for block in self.blocks:
            x = x.through(block)
        return x


class RecurrentModel(NextItemModel):
    """
    Predicts the next item with a GRU or an LSTM (``cell``), the paper's baselines.
    Other arguments are those of :class:`DPFormer`.

    Raises:
        Refused: for another ``cell``

    Example:
        >>> RecurrentModel(num_items=9, width=4)(torch.tensor([[3, 5, 0]])).shape
        torch.Size([1, 3, 10])
    """

    def __init__(
        self,
        num_items: int,
        cell: str = "gru",
        width: int = 64,
        depth: int = 1,
        dropout: float = 0.2,
        tied: bool = True,
        items: Optional[torch.Tensor] = None,
    ):
        super().__init__(num_items, width, tied, items)
        cells = {"gru": nn.GRU, "lstm": nn.LSTM}
        if cell not in cells:
            raise Refused(
                f"cell must be one of {list(cells)}, not {cell!r}.",
                parameter="cell",
                remedy="Take one of these.",
            )
        self.dropout = nn.Dropout(dropout)
        between = dropout if depth > 1 else 0.0
        self.layers = cells[cell](
            width, width, depth, batch_first=True, dropout=between
        )
        self.norm = nn.LayerNorm(width)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns hidden states ``[B, T, width]`` of embedding rows ``[B, T]``."""
        scale = math.sqrt(self.embedding.embedding_dim)
        x = self.dropout(self.embedding(ids) * scale)
        return self.norm(self.dropout(self.layers(x)[0]))

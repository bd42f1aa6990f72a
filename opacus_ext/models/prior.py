"""A prior of the next item, made of two releases, with few or no weights to train."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opacus_ext.refused import Refused
from opacus_ext.releases import BACK, Popularity, Transitions


class TransitionPrior(nn.Module):
    """
    Scores the next item by popularity, and by which item follows which.

    With p the shares of items, S the released transitions of the top M, unweighted, and
    q their shares among themselves::

        A = S - c q q^T                    what popularity does not explain
        score_t = alpha log p + sum over l < L of w_l D (A + tau A^T)[s_(t - l)] D / rms

    where s are the items before, D the diagonal of (p_i / mean(p) + 1)^beta, the
    diagonal of the matrix is zero, and rms is the root mean square of its entries. The
    scores are logits. An item outside of the top M has alpha log p alone.

    The L + 3 numbers (w, alpha, beta, tau) are parameters: train them, with privacy, or
    ``prior.requires_grad_(False)``. S and p are buffers. All is post-processing of the
    two releases and costs no privacy.

    Args:
        popularity: of :func:`opacus_ext.releases.release_popularity`
        transitions: of :func:`opacus_ext.releases.release_transitions`
        length: L, how many of the latest items count

    Raises:
        Refused: if the two are not about the same items

    Shape:
        - ids: ``[B, T]``, from 1, padded with 0 on the right
        - output: ``[B, T, num_items + 1]``, or ``[B, num_items + 1]`` with ``at``
    """

    shares: Tensor
    place: Tensor
    items: Tensor
    counts: Tensor
    back: Tensor

    def __init__(
        self, popularity: Popularity, transitions: Transitions, length: int = 100
    ):
        super().__init__()
        shares, items = popularity.shares, transitions.items
        if int(items.max()) >= len(shares):
            raise Refused(
                f"The transitions are about item {int(items.max())}, the popularity "
                f"about items up to {len(shares) - 1}.",
                parameter="transitions",
                remedy="Release both from the same data.",
            )
        if length < 1:
            raise Refused(
                f"length={length}.",
                parameter="length",
                remedy="At least the latest item must count.",
            )
        chosen = shares[items].double()
        chosen = chosen / chosen.sum()
        weights = transitions.weights * chosen
        total = transitions.counts.sum().clamp(min=1) / (1 + BACK)
        expected = total * torch.outer(chosen, chosen) / weights.sum() ** 2
        counts = (transitions.unweighted - expected).float()
        place = torch.full((len(shares),), len(items))  # the last row: no such item
        place[items] = torch.arange(len(items))
        self.register_buffer("shares", shares)
        self.register_buffer("items", items)
        self.register_buffer("place", place)
        self.register_buffer("counts", F.pad(counts.fill_diagonal_(0), (0, 0, 0, 1)))
        back = F.pad(counts.T.contiguous(), (0, 0, 0, 1))
        self.register_buffer("back", back)
        self.weights = nn.Parameter((1 + torch.arange(length)).float() ** -1.0)
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.beta = nn.Parameter(torch.tensor(-0.5))
        self.tau = nn.Parameter(torch.tensor(0.3))
        with torch.no_grad():
            scale = self._scale(self.items)
            matrix = scale[:, None] * (counts + self.tau * counts.T) * scale
            size = matrix.square().mean().sqrt()  # 0 of one item alone
            self.weights.div_(1.2 * torch.where(size > 0, size, 1.0))

    # Nothing that is trained is looked up by index below: a GPU would add the gradients
    # of 40,000 entries a sample to 100 weights, many of them one after another.

    def _scale(self, ids: Tensor) -> Tensor:
        """Returns entries of the diagonal of D, of the shape of ``ids``."""
        relative = self.shares / self.shares[1:].mean() + 1
        return relative[ids] ** self.beta

    def _by_lag(self, length: int) -> Tensor:
        """Returns ``[length, length]``: w of the lag from column to row, or 0."""
        weights = self.weights[:length]
        row = F.pad(weights, (0, 2 * length - len(weights)))
        # Repeated, and cut into rows that are one entry shorter: each begins with one
        # zero more than the row above.
        repeated = row.expand(length, 2 * length).flatten()
        rows = repeated[: length * (2 * length - 1)].view(length, 2 * length - 1)
        return rows[:, :length].mT

    def _follow(self, weights: Tensor, place: Tensor) -> Tensor:
        """Returns ``weights [B, Q, T]`` times the rows ``place`` of the matrix."""
        if not (torch.is_grad_enabled() and self.tau.requires_grad):
            matrix = self.counts + self.tau * self.back
            if weights.shape[1] > 1:
                return weights @ F.embedding(place, matrix)
            # A product with a sparse matrix, whose rows are the users.
            return F.embedding_bag(
                place, matrix, mode="sum", per_sample_weights=weights[:, 0]
            )[:, None]
        counts = weights @ F.embedding(place, self.counts)
        return counts + self.tau * (weights @ F.embedding(place, self.back))

    def forward(self, ids: Tensor, at: Optional[Tensor] = None) -> Tensor:
        """Scores the item after each position, or after positions ``at`` ``[B]``."""
        weights = self._by_lag(ids.shape[1])
        if at is not None:
            times = torch.arange(ids.shape[1], device=ids.device)
            weights = (at[:, None, None] == times).to(weights.dtype) @ weights
        weights = weights * self._scale(ids)[:, None]  # [B, Q, T]
        scores_of_items = self._follow(weights, self.place[ids])
        scores_of_items = scores_of_items * self._scale(self.items)  # [B, Q, M]
        log_shares = self.shares.clamp(min=self.shares[1:].min()).log()
        scores = (self.alpha * log_shares).expand(
            *scores_of_items.shape[:2], len(log_shares)
        )
        scores = scores.index_add(2, self.items, scores_of_items)
        return scores if at is None else scores[:, 0]

    def score(self, ids: Tensor) -> Tensor:
        """Returns ``[B, num_items + 1]``, scores of the item after each sequence."""
        return self(ids, (ids != 0).sum(dim=1).sub(1).clamp(min=0))


def leave_out(scores: Tensor, ids: Tensor) -> Tensor:
    """
    Returns scores that are -inf for the items that a user has already.

    Use it for data in which nobody has an item twice, such as ratings. You must know
    that without looking at the records, since what they say about it is private. The
    items belong to the user who is scored, so that this is post-processing.

    Args:
        scores: ``[B, num_items + 1]``
        ids: ``[B, T]``, each user's items, padded with 0

    Example:
        >>> leave_out(torch.tensor([[0.0, 0.3, 0.2, 0.1]]), torch.tensor([[1, 3, 0]]))
        tensor([[  -inf,   -inf, 0.2000,   -inf]])
    """
    return scores.scatter(1, ids, -torch.inf)

"""How well a recommender ranks the items that were held out."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch.nn.utils.rnn import pad_sequence

from opacus_ext.models import leave_out
from opacus_ext.recommend.sequences import SequenceData


def ranks(scores: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Where each user's item stands among all items, from 0.

    Every item takes part, also those the user had before, as in the full rankings of
    the SASRec and DPFormer papers. Items with the same score go before it, and NaN
    scores put it last, so that a broken model can't look good.

    Args:
        scores: ``[B, V]``; column 0 is padding and takes no part.
        items: ``[B]``, ids 1 to ``V - 1``.

    Example:
        >>> ranks(torch.tensor([[9.0, 0.1, 0.3, 0.2]]), torch.tensor([3]))
        tensor([1])
    """
    own = scores.gather(1, items[:, None])
    return scores.shape[1] - 2 - (scores[:, 1:] < own).sum(dim=1)


def ndcg_and_hit(rank: torch.Tensor, k: int = 10) -> Tuple[float, float]:
    """NDCG@k and HIT@k in percent, for one relevant item a user at ``rank`` ``[B]``.

    Example:
        >>> ndcg_and_hit(torch.tensor([0, 12]))
        (50.0, 50.0)
    """
    hit = (rank < k).double()
    ndcg = hit / torch.log2(rank.double() + 2)
    return 100 * ndcg.mean().item(), 100 * hit.mean().item()


@torch.no_grad()
def evaluate(
    model: Any, data: SequenceData, max_len: int, own_last: bool = False
) -> Tuple[float, float]:
    """
    NDCG@10 and HIT@10 in percent of a model on the held-out items, among all items.

    Args:
        own_last: put a user's own earlier items last, see
            :func:`opacus_ext.models.leave_out`; a held-out one of them, too
    """
    model.eval()
    device = next(model.parameters()).device
    found = []
    for ids, own, target in zip(
        data.contexts(max_len).split(512),
        pad_sequence(data.histories, batch_first=True).split(512),
        data.held_out.split(512),
    ):
        scores = model.score(ids.to(device)).cpu()
        found.append(ranks(leave_out(scores, own) if own_last else scores, target))
    return ndcg_and_hit(torch.cat(found))

"""What a recommender releases before it is trained, and its models."""

from __future__ import annotations

import argparse
import functools
from typing import Mapping, Optional, Tuple

import torch
from opacus import PrivacyEngine
from torch import nn

from opacus_ext.models import (
    DPFormer,
    NextItemModel,
    RecurrentModel,
    TransitionPrior,
)
from opacus_ext.re_attention import token_shares
from opacus_ext.recommend.sequences import SequenceData
from opacus_ext.refused import Refused
from opacus_ext.releases import (
    Popularity,
    Transitions,
    noise_for,
    release_popularity,
    release_transitions,
)

MODELS = (
    "dpformer",
    "transformer",
    "transformer-untied",
    "gru",
    "lstm",
    "transitions",
)
PRIORS = ("transitions", "popularity", "none")


def uses_popularity(args: argparse.Namespace) -> bool:
    """Whether the prior or Re-Attention needs to know how popular items are."""
    return args.prior != "none" or args.model == "dpformer"


def build(
    args: argparse.Namespace,
    num_items: int,
    popularity: Optional[Popularity],
    transitions: Optional[Transitions],
) -> nn.Module:
    """The model that ``--model`` names, on what was released."""
    prior: Optional[nn.Module] = None
    if transitions is not None and popularity is not None:
        prior = TransitionPrior(popularity, transitions, args.max_len)
    if args.model == "transitions":
        if prior is None:
            raise Refused(
                f"--model transitions with --prior {args.prior}.",
                parameter="--prior",
                remedy="Take --prior transitions: the model is that, and nothing else.",
            )
        return prior
    width, depth, dropout = args.width, args.depth, args.dropout
    items = None
    if transitions is not None:
        items = transitions.items
    elif popularity is not None and args.top:
        items = popularity.top(min(args.top, num_items))
    if args.model in ("gru", "lstm"):
        net: NextItemModel = RecurrentModel(
            num_items, args.model, width, depth, dropout, items=items
        )
    else:
        tied = args.model != "transformer-untied"
        net = DPFormer(
            num_items, args.max_len, width, depth, args.heads, dropout, tied, items
        )
    if prior is not None:
        net.set_prior(prior.requires_grad_(False))
    elif popularity is not None and args.prior == "popularity":
        net.set_prior(popularity.shares)
    return net


def release(
    args: argparse.Namespace, data: SequenceData, engine: PrivacyEngine
) -> Tuple[Optional[Popularity], Optional[Transitions]]:
    """
    What is released before the training, within the budget.

    The shares are of the square of mu, see :func:`opacus_ext.releases.noise_for`: of
    popularity and of the training as given, of transitions what is left.
    """
    given = functools.partial(noise_for, args.epsilon, args.delta)
    accountant, shares = engine.accountant, args.popularity_share
    if not uses_popularity(args):
        return None, None
    if args.shares == "exact":
        shares = 0.0
        exact = token_shares(
            list(data.training_set(args.max_len).tensors[0]),
            data.num_items + 1,
            source="exact",
        )
        popularity = Popularity(exact.double() * len(data.histories), 1.0)
    else:
        popularity = release_popularity(
            data.histories,
            data.num_items,
            noise_multiplier=given(shares),
            accountant=accountant,
        )
    if args.prior != "transitions":
        return popularity, None
    if not shares + args.train_share < 1:
        raise Refused(
            f"--popularity-share {shares:g} and --train-share {args.train_share:g} "
            "leave nothing.",
            parameter="--train-share",
            remedy="Give less, or --prior popularity.",
        )
    noise = given(1 - shares - args.train_share)
    return popularity, release_transitions(
        data.histories,
        chosen_items(args, popularity, noise),
        noise_multiplier=noise,
        weights=popularity.relative(-0.25),
        accountant=accountant,
    )


def of_sequences(
    args: argparse.Namespace, popularity: Popularity, users: int
) -> torch.Tensor:
    """
    About which share of users has each item, ``[num_items + 1]``, as Re-Attention needs
    it. In a released popularity, a user of n items has a sum of sqrt(n).
    """
    if args.shares == "exact":
        return (popularity.counts / users).float()
    length = float(popularity.counts.sum().clamp(min=users)) / users
    return (popularity.shares * min(length**2, args.max_len)).clamp(max=1)


def chosen_items(
    args: argparse.Namespace, popularity: Popularity, noise: float
) -> torch.Tensor:
    """
    Those of ``--top``, or those whose count is at least so many times the noise of one
    transition: the better of 14 and 20 on MovieLens-1M.
    """
    if args.top:
        return popularity.top(min(args.top, len(popularity.counts) - 1))
    return popularity.above((14 if args.epsilon < 2 else 20) * noise)


def blank(
    args: argparse.Namespace, num_items: int, state: Mapping[str, torch.Tensor]
) -> Tuple[Optional[Popularity], Optional[Transitions]]:
    """In place of releases that a checkpoint's model ``state`` has."""
    if not uses_popularity(args):
        return None, None
    popularity = Popularity(torch.ones(num_items + 1, dtype=torch.float64), 1.0)
    if args.prior != "transitions":
        return popularity, None
    items = popularity.top(len(state["items"]))
    counts = torch.rand(len(items), len(items), dtype=torch.float64)
    return popularity, Transitions(counts, 1.0, items, torch.ones(len(items)))

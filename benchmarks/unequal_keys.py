"""Re-Attention where theory says that it matters: keys of unequal, known noise.

    python benchmarks/unequal_keys.py                      # the model of the formula
    python benchmarks/unequal_keys.py path/to/ml-1m.txt    # and a private release

The first part is synthetic: clean keys are known, each has Gaussian noise of its own
variance, and the mean of softmax weights over the noise is compared with the weights of
the clean keys, by the share of attention that is in the wrong place (total variation).

The second is a recommender without training. A private matrix of transitions
(:func:`opacus_ext.releases.release_transitions`) has noise of one std in all entries;
its rows are lifted by (p_i / mean(p) + 1)^-1/2, so that row i has the known noise std
times that factor in each element. One attention layer has these rows as keys (all
columns, or the projection on 64 singular vectors), the latest item's row at length 1 as
the query, the recency l^-1.25 as a bias, and the rows as values:

    a_l = softmax over l = 1, ... of (log l^-1.25 + b (<q, k_l> - b sigma_l^2 / 2))
    score = log(p) / 2 + (row of the latest + share * sum_l a_l row of the l-th) / rms

The latest item is no key: its error is that of the query. Temperature b, in terms of
the std of <q, k> over users and positions, and the share are chosen on each user's last
but one item, with and without the correction apart, and what is reported is NDCG@10 on
the last one, all items ranked.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Tuple
from unittest.mock import patch

import torch
from opacus.accountants import RDPAccountant
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from opacus_ext import releases  # noqa: E402
from opacus_ext.re_attention.attention import corrected_attention  # noqa: E402
from opacus_ext.recommend import SequenceData, read_sequences  # noqa: E402
from opacus_ext.recommend.ranking import ndcg_and_hit  # noqa: E402
from opacus_ext.releases import (  # noqa: E402
    noise_for,
    release_popularity,
    release_transitions,
)

DELTA, LENGTH = 1e-5, 50
SIZES = {1.0: 300, 2.0: 700, 5.0: 1250, 8.0: 1750}  # items of the matrix
SHARES = (0.5, 1.0, 2.0)
KINDS = ("all columns", "64 singular vectors")


# -- the model of the formula --------------------------------------------------------


def synthetic(keys: int, sharp: float, noise: float, draws: int = 4000) -> List[float]:
    """
    Total variation from the clean attention, of the mean over noise: as it is, and
    corrected on the logits.

    Args:
        sharp: std of the clean logits
        noise: root mean square of the noise's std in the logits; variances of keys
            differ by a factor of 100
    """
    width, cases = 32, 20
    found = torch.zeros(2)
    for _ in range(cases):
        query = torch.randn(1, width)
        query *= width**0.5 / query.norm()
        clean = sharp * torch.randn(keys, width)
        variance = 10 ** (2 * torch.rand(keys, 1))
        variance = noise**2 * variance / variance.mean()
        values = torch.eye(keys)  # so that the output is the weights
        target = corrected_attention(query, clean, values, torch.zeros(keys, 1))
        noisy = clean + variance.sqrt() * torch.randn(draws, keys, width)
        for i, known in enumerate((torch.zeros(1), variance)):
            each = known.expand(keys, 1)
            got = corrected_attention(
                query.expand(draws, 1, width),
                noisy,
                values.expand(draws, keys, keys),
                each,
            )
            found[i] += 0.5 * (got.mean(0) - target).abs().sum() / cases
    return found.tolist()


# -- a private release ---------------------------------------------------------------


class Released(NamedTuple):
    """What the seeds of the matrix's noise have in common."""

    shares: Tensor
    items: Tensor
    counts: Tensor
    noise: float


def released(data: SequenceData, epsilon: float) -> Released:
    """A release of popularity, and the transitions among the top without noise."""
    generator = torch.Generator().manual_seed(0)
    how = {"accountant": RDPAccountant(), "generator": generator}
    popularity = release_popularity(
        data.histories,
        data.num_items,
        noise_multiplier=noise_for(epsilon, DELTA, 0.0225),
        **how,
    )
    items = popularity.top(SIZES[epsilon])
    with patch.multiple(releases, DECAY=1.0, BACK=0.0):
        counts = release_transitions(
            data.histories, items, noise_multiplier=1e-9, **how
        ).counts
    noise = noise_for(epsilon, DELTA, 0.9775)
    return Released(popularity.shares, items, counts.float(), noise)


def scores(
    data: SequenceData, common: Released, seed: int, temperatures: List[float]
) -> Iterator[Tuple[Tuple, float]]:
    """NDCG@10 of each setting ``(kind, temperature, corrected, share)``."""
    p, items, counts, noise = common
    generator = torch.Generator().manual_seed(seed)
    counts = counts + noise * torch.randn(counts.shape, generator=generator)
    q = p[items] / p[items].sum()
    counts = counts - counts.sum() * torch.outer(q, q)
    lift = (p[items] / p[1:].mean() + 1) ** -0.5
    lifted = lift[:, None] * counts
    variance = (lift * noise) ** 2
    rows = lifted * lift + 0.3 * lift[:, None] * counts.T * lift  # the values
    rows.fill_diagonal_(0)
    rows /= 1.55 * rows.square().mean().sqrt()

    place = torch.full((len(p),), -1)
    place[items] = torch.arange(len(items))
    recent = data.contexts(LENGTH)
    lengths = (recent != 0).sum(1)
    lags = (lengths - 1)[:, None] - torch.arange(LENGTH)
    at = place[recent]
    latest = at.gather(1, (lengths - 1)[:, None])[:, 0]
    known = (at >= 0) & (lags > 0) & (latest >= 0)[:, None]
    bias = torch.where(known, -1.25 * (lags.clamp(min=0) + 1).log(), -torch.inf)
    base = 0.5 * p.clamp(min=float(p[1:].min())).log()
    own = rows[latest.clamp(min=0)] * (latest >= 0)[:, None]
    target = place[data.held_out]
    others = torch.ones(len(p), dtype=torch.bool)
    others[0] = others[items] = False
    outside = base[others].sort().values  # the same for all users

    for kind in KINDS:
        keys = lifted
        if kind != KINDS[0]:
            keys = lifted @ torch.linalg.svd(lifted, full_matrices=False)[2][:64].T
        unit = keys / keys.norm(dim=-1, keepdim=True)
        logits = (unit @ keys.T)[latest.clamp(min=0)[:, None], at.clamp(min=0)]
        deviation = float(logits[known].std())
        for temperature, corrected in itertools.product(temperatures, (False, True)):
            if not temperature and (corrected or kind != KINDS[0]):
                continue
            b = temperature / deviation
            z = b * logits
            if corrected:
                z = z - 0.5 * b**2 * variance[at.clamp(min=0)]
            weights = torch.softmax(z + bias, -1).nan_to_num(0)
            found: List[List[Tensor]] = [[] for _ in SHARES]
            for chunk in torch.arange(len(at)).split(512):
                attended = F.embedding_bag(
                    at[chunk].clamp(min=0),
                    rows,
                    mode="sum",
                    per_sample_weights=weights[chunk],
                )
                for rank, share in zip(found, SHARES):
                    score = base[items] + own[chunk] + share * attended
                    mine = score.gather(1, target[chunk, None].clamp(min=0))
                    mine = torch.where(
                        target[chunk, None] >= 0, mine, base[data.held_out[chunk], None]
                    )
                    # As recommend.ranking.ranks, of equal scores the own is the last.
                    above = (score >= mine).sum(1) + len(outside) - 1
                    rank.append(above - torch.searchsorted(outside, mine[:, 0]))
            for rank, share in zip(found, SHARES):
                ndcg = ndcg_and_hit(torch.cat(rank))[0]
                yield (kind, temperature, corrected, share), ndcg


def release(path: Path, args: argparse.Namespace) -> None:
    data = read_sequences(path)
    seeds = range(args.seeds)
    for epsilon in args.epsilons:
        found: Dict[str, List[Dict]] = {}
        for name, split, first in (
            ("validation", data.without_last(), 1000),
            ("test", data, 0),
        ):
            common = released(split, epsilon)
            found[name] = [
                dict(scores(split, common, first + s, args.temperatures)) for s in seeds
            ]

        def stats(name: str, setting: Tuple) -> Tuple[float, float]:
            values = torch.tensor([run[setting] for run in found[name]])
            return float(values.mean()), float(values.std())

        settings = list(found["test"][0])
        print(f"epsilon {epsilon:g}, top {SIZES[epsilon]}", flush=True)
        for kind in KINDS:
            chosen = [s for s in settings if s[0] == kind]
            for name, some in {
                "no content": [s for s in chosen if not s[1]],
                "plain": [s for s in chosen if s[1] and not s[2]],
                "corrected": [s for s in chosen if s[2]],
            }.items():
                if not some:
                    continue
                best = max(some, key=lambda s: stats("validation", s)[0])
                mean, std = stats("test", best)
                print(
                    f"  {kind:20s} {name:10s} {mean:.2f} +- {std:.2f} at temperature "
                    f"{best[1]:g}, share {best[3]:g}"
                )
            for temperature in filter(None, args.temperatures):
                best = [
                    max(
                        (s for s in chosen if s[1:3] == (temperature, corrected)),
                        key=lambda s: stats("validation", s)[0],
                    )
                    for corrected in (False, True)
                ]
                gain = torch.tensor(
                    [run[best[1]] - run[best[0]] for run in found["test"]]
                )
                print(
                    f"    temperature {temperature:g}: {stats('test', best[0])[0]:.2f} "
                    f"and corrected {stats('test', best[1])[0]:.2f}, "
                    f"gain {gain.mean():+.2f} +- {gain.std():.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.5, 2.0, 4.0]
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    print("attention in the wrong place, per cent: as it is, corrected")
    for keys, sharp, noise in itertools.product(
        (20, 200), (1.0, 2.0), (0.25, 0.5, 1.0, 2.0)
    ):
        got = synthetic(keys, sharp, noise, draws=4000 if keys < 100 else 1000)
        shown = " ".join(f"{100 * x:6.1f}" for x in got)
        print(f"  {keys} keys, logits of std {sharp:g}, noise {noise:g}: {shown}")
    if args.path is not None:
        release(args.path, args)


if __name__ == "__main__":
    main()

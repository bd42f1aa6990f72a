"""What the owner of private texts may want to know of synthetic ones."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import List, Sequence, Set, Tuple

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from examples.synthetic_text.tables import Row

WORD = r"\w+|[^\w\s]"
REPORT = """\
**This report is not private: it is computed from the private texts, quotes them, and no
epsilon covers it. Keep it as you keep them.**

# The nearest training text

The share of a text's runs of four words that stand in one text of training. The texts
that were held out show how much of each other people's own texts have.

| | texts | median | 95 % are below | largest |
| --- | --- | --- | --- | --- |
{nearest}

{pairs}

# Quality

A linear classifier of words, tested on the texts that were held out.

| learned from | texts | accuracy |
| --- | --- | --- |
{quality}

# Canaries

{canaries} random texts were trained on. By the rank of their losses among those of
{others} that were not, their exposure is {mean:.2f} bits on average, {most:.2f} at
most. Without memory it is 1.44 on average; of a text known by heart it is {limit:.2f}.
"""


def report(
    training: Sequence[Row],
    held_out: Sequence[Row],
    synthetic: Sequence[Row],
    canaries: Sequence[float],
    fresh: Sequence[float],
) -> str:
    """Markdown, of rows, and losses of canaries that were trained on or were not."""
    lines, quality = [], []
    found, own = nearest(synthetic, training), nearest(held_out, training)
    for name, shares in ("synthetic", found), ("held out", own):
        numbers = np.quantile([x[0] for x in shares] or [0], [0.5, 0.95, 1])
        cells = " | ".join(f"{number:.0%}" for number in numbers)
        lines.append(f"| {name} | {len(shares)} | {cells} |")
    for name, rows in ("synthetic texts", synthetic), ("private texts", training):
        quality.append(f"| {name} | {len(rows)} | {accuracy(rows, held_out)} |")
    most = max(Counter(row.label for row in held_out).values(), default=0)
    share = most / max(1, len(held_out))
    quality.append(f"| the most frequent label, always | | {share:.1%} |")
    pairs = [f"- {share:.0%} of {x!r} is in {y!r}" for share, x, y in found if share]
    bits = exposures(canaries, fresh)
    return REPORT.format(
        nearest="\n".join(lines),
        pairs="\n".join(pairs[:5]),
        quality="\n".join(quality),
        canaries=len(bits),
        others=len(fresh),
        mean=bits.mean() if len(bits) else 0,
        most=bits.max(initial=0),
        limit=np.log2(len(fresh) + 1),
    )


def exposures(canaries: Sequence[float], fresh: Sequence[float]) -> np.ndarray:
    """
    Bits: by how much the rank of a canary's loss among those of fresh ones makes it
    easier to guess (Carlini et al., 2019).
    """
    ranks = 1 + np.searchsorted(np.sort(fresh), canaries)
    return np.log2((len(fresh) + 1) / ranks)


def accuracy(training: Sequence[Row], test: Sequence[Row]) -> str:
    """Of a classifier, as text."""
    if not test or len({row.label for row in training}) < 2:
        return "not measured"
    words = TfidfVectorizer(token_pattern=WORD, ngram_range=(1, 2))
    model = make_pipeline(words, LogisticRegression(C=10.0, max_iter=1000))
    model.fit([row.text for row in training], [row.label for row in training])
    share = model.score([row.text for row in test], [row.label for row in test])
    return f"{share:.1%}"


def nearest(rows: Sequence[Row], others: Sequence[Row]) -> List[Tuple[float, str, str]]:
    """
    Of each text, the largest share of its n-grams that one of the others has, the text,
    and the other one; the largest first.
    """
    found, numbers = [], defaultdict(list)
    for number, row in enumerate(others):
        for ngram in _ngrams(row.text):
            numbers[ngram].append(number)
    for row in rows:
        ngrams = _ngrams(row.text)
        shared = Counter(n for ngram in ngrams for n in numbers.get(ngram, ()))
        number, count = (shared.most_common(1) or [(0, 0)])[0]
        found.append((count / len(ngrams), row.text, others[number].text))
    return sorted(found, reverse=True)


def _ngrams(text: str) -> Set[Tuple[str, ...]]:
    """Runs of four words; all words of a text that is shorter."""
    words = re.findall(WORD, text.lower())
    starts = range(max(1, len(words) - 3))
    return {tuple(words[start : start + 4]) for start in starts}

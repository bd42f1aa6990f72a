"""Writes docs/reference/supported.md from the table in opacus_ext/supported.py.

``python docs/supported.py`` prints it; tests/supported_test.py holds the page to it.
"""

from __future__ import annotations

from typing import Iterator

from opacus_ext.supported import CHOICES, GAPS, every_run, find_gap

INTRO = """# What is supported with what

A run is made private by `make_private` (in a loop of your own, or one of Accelerate),
by `PrivateTrainer` or by Lightning's `PrivacyCallback`. What is not supported is
refused before anything is changed; the error has the sentence and the advice of this
page. The page is made from `opacus_ext/supported.py`, as the errors are:
`python docs/supported.py`.

Single layers and lines of a model that can't be trained exactly are another matter:
[how a model is read](reading.md). `clipped_grads` has neither modes nor noise. It takes
models of one process and those sharded by `fully_shard`.
"""
SHORT = {"DistributedDataParallel": "DDP"}


def rows() -> Iterator[str]:
    """Yields the lines of the page."""
    yield INTRO
    yield "## Modes and models\n"
    yield "With independent noise, and flat clipping. A number leads to the list"
    yield "below.\n"
    modes = CHOICES["mode"]
    yield f"| front end | model | {' | '.join(modes)} |"
    yield f"| --- | --- |{' --- |' * len(modes)}"
    for front_end in CHOICES["front_end"]:
        for model in CHOICES["model"]:
            runs = every_run(
                front_end=front_end, model=model, clipping="flat", noise="independent"
            )
            cells = " | ".join(map(answer, runs))
            yield f"| {front_end} | {SHORT.get(model, model)} | {cells} |"
    yield "\n## Noise and clipping\n"
    yield 'For a model of one process, in the modes "hooks" and "functorch" / in the'
    yield "others.\n"
    clippings = CHOICES["clipping"]
    yield f"| front end | noise | {' | '.join(clippings)} |"
    yield f"| --- | --- |{' --- |' * len(clippings)}"
    for front_end in CHOICES["front_end"]:
        for noise in CHOICES["noise"]:
            cells = []
            for clipping in clippings:
                hooks, ghost = (
                    answer(run)
                    for mode in ("hooks", "ghost")
                    for run in every_run(
                        front_end=front_end,
                        model="one process",
                        mode=mode,
                        clipping=clipping,
                        noise=noise,
                    )
                )
                cells.append(hooks if hooks == ghost else f"{hooks} / {ghost}")
            yield f"| {front_end} | {noise} | {' | '.join(cells)} |"
    yield "\n## What is refused, and why\n"
    yield "| | where | why | instead |"
    yield "| --- | --- | --- | --- |"
    for number, gap in enumerate(GAPS, 1):
        where = "; ".join(
            f"{part.replace('_', ' ')}: {', '.join(SHORT.get(w, w) for w in words)}"
            for part, words in gap.runs.items()
        )
        yield f"| {number} | {where} | {gap.reason} | {gap.remedy} |"


def answer(run) -> str:
    """Returns yes, or the number of what refuses the run."""
    gap = find_gap(run)
    return "yes" if gap is None else str(GAPS.index(gap) + 1)


def page() -> str:
    """Returns the page."""
    return "\n".join(rows()) + "\n"


if __name__ == "__main__":
    print(page(), end="")

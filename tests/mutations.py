"""Breaks the core in one place at a time, and looks whether the tests find it.

Run as ``python -m tests.mutations [NUMBER ...]``: each mutation is made in a copy of
the package, the tests beside it are run there, and those that find nothing are listed.
A mutation names no file: its text is changed in the first file of the package that has
it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    """What is broken, the text, what is put there, and the tests that must see it."""

    name: str
    before: str
    after: str
    tests: str


LAYERS = "tests/grad_samples/"
MUTATIONS: List[Mutation] = [
    Mutation(
        "the second pass of ghost is not looked at",
        "if _differ(gaps, largest, dtypes) and _differ(",
        "if False and _differ(",
        "tests/adapter/silence_test.py -k linear",
    ),
    Mutation(
        "what is told by data may stay",
        "told = told_data and not",
        "told = False and not",
        "tests/adapter/silence_test.py",
    ),
    Mutation(
        "what could be shared is always samples",
        "choices.append(dims[:1] if sure else [*dims, None])",
        "choices.append(dims[:1] or [None])",
        "tests/adapter/silence_test.py",
    ),
    Mutation(
        "readings that differ are not refused",
        "elif not found or not all(",
        "elif not found or False and not all(",
        "tests/adapter/silence_test.py",
    ),
    Mutation(
        "an output is that of the first sample",
        "if record.size and bool((every == every[:1]).all()):",
        "if record.size:",
        "tests/adapter/silence_test.py",
    ),
    Mutation(
        "a batch's gradients are taken twice",
        "        self.done = True\n",
        "        self.done = False\n",
        "tests/adapter/silence_test.py",
    ),
    Mutation(
        "losses that mix samples are not seen",
        "if size < 2 or self.calls & (self.calls + 1):",
        "if True:",
        "tests/losses_test.py -k mixes",
    ),
    Mutation(
        "a criterion keeps what it likes",
        "changes = self.state.changes()\n        if changes:",
        "changes = []\n        if changes:",
        "tests/adapter/silence_test.py",
    ),
    Mutation(
        "a bias's gradient has the other sign",
        "activations.to(backprops.dtype)), (backprops,)]",
        "activations.to(backprops.dtype)), (-backprops,)]",
        LAYERS + "linear_test.py",
    ),
    Mutation(
        "a norm's scale adds where it multiplies",
        "(self._rows(normalized * backprops),)",
        "(self._rows(normalized + backprops),)",
        LAYERS + "layer_norm_test.py",
    ),
    Mutation(
        "group norm over one group",
        "OfNorm(_groups, num_groups, eps)",
        "OfNorm(_groups, 1, eps)",
        LAYERS + "group_norm_test.py",
    ),
    Mutation(
        "a negative padding index is taken as it is",
        "        padding_idx += len(weight)\n",
        "        padding_idx += 0\n",
        LAYERS + "embedding_test.py",
    ),
    Mutation(
        "a convolution's bias is averaged over space",
        "(wide(backprops.flatten(3)).sum(3),)",
        "(wide(backprops.flatten(3)).mean(3),)",
        LAYERS + "conv_test.py",
    ),
    Mutation(
        "dilation is left out of the windows of a convolution",
        ", s)[..., ::d]",
        ", s)[..., :k]",
        LAYERS + "conv_test.py",
    ),
    Mutation(
        "half of the Gram matrix is missing",
        "product[:, :, stop - start :] *= 2",
        "product[:, :, stop - start :] *= 1",
        LAYERS + "factors_test.py",
    ),
    Mutation(
        "tokens that repeat count as others",
        "new[1:] = ranked[1:] != ranked[:-1]",
        "new[1:] = ranked[1:] == ranked[1:]",
        LAYERS + "factors_test.py " + LAYERS + "embedding_test.py",
    ),
    Mutation(
        "what is not finite stays in the sum",
        "self._terms = [t.without(samples) for t in self._terms]",
        "self._terms = list(self._terms)",
        "tests/modes_test.py tests/precision_test.py tests/adapter",
    ),
    Mutation(
        "small gradients are made longer",
        "return (bound / (norms + 1e-6)).clamp(max=1.0)",
        "return bound / (norms + 1e-6)",
        "tests/clipping_test.py",
    ),
    Mutation(
        "all parameters have the bound of the first",
        "(bounds[:, None] / (norms + 1e-6)).clamp(max=1.0)",
        "(bounds[0] / (norms + 1e-6)).clamp(max=1.0)",
        "tests/clipping_test.py",
    ),
    Mutation(
        "the scale of the loss stays in the sums",
        "factors.masked_fill(bad, 0)) / scale",
        "factors.masked_fill(bad, 0))",
        "tests/precision_test.py tests/modes_test.py",
    ),
    Mutation(
        "noise without the sensitivity",
        "multiplier * self.sensitivity, self.params",
        "multiplier, self.params",
        "tests/modes_test.py tests/clipping_test.py",
    ),
    Mutation(
        "noise on one of the small parameters only",
        "torch._foreach_add_(totals, each)",
        "torch._foreach_add_(totals[:1], each[:1])",
        "tests/modes_test.py tests/clipping_test.py",
    ),
    Mutation(
        "a mean that forgets the accumulated batches",
        "size = self.expected_batch_size * self.accumulated_iterations",
        "size = self.expected_batch_size",
        "tests/modes_test.py",
    ),
    Mutation(
        "of several physical batches the last one counts",
        "p.summed_grad = p.summed_grad.add_(p.grad)",
        "p.summed_grad = p.grad",
        "tests/modes_test.py",
    ),
    Mutation(
        "the gradient of a slice goes to its other end",
        "F.pad(f, (start, rest))",
        "F.pad(f, (rest, start))",
        LAYERS + "of_parameters_test.py tests/adapter",
    ),
    Mutation(
        "clipped sums may be changed before the noise",
        "if p.grad is not grad or grad._version != version:",
        "if False:",
        "tests/modes_test.py -k changed_before_the_noise",
    ),
    Mutation(
        "samples share what is drawn at random",
        '_vmap_increment_nesting(self.size, "different")',
        '_vmap_increment_nesting(self.size, "same")',
        LAYERS + "randomness_test.py",
    ),
]


def place_of(text: str, root: Path) -> Path:
    """The one file of the package with a text; with several, the first by name."""
    found = [
        p for p in sorted(root.glob("opacus_ext/**/*.py")) if text in p.read_text()
    ]
    if not found:
        raise SystemExit(f"Nothing in the package reads {text!r}: mend the mutation.")
    return found[0]


def survives(mutation: Mutation, root: Path) -> bool:
    """Whether the tests pass all the same."""
    place = place_of(mutation.before, root)
    right = place.read_text()
    place.write_text(right.replace(mutation.before, mutation.after))
    command = [sys.executable, "-m", "pytest", "-qx", "-m", "not slow"]
    try:
        done = subprocess.run(
            [*command, *mutation.tests.split()],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        place.write_text(right)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout[-2000:])
    said = [x for x in done.stdout.splitlines() if x.startswith("FAILED")]
    print(f"  {said[0] if said else 'nothing failed'}", flush=True)
    return done.returncode == 0


def main(numbers: List[int]) -> int:
    """Tries some mutations, or all; the status is 1 if one survives."""
    chosen = [MUTATIONS[i] for i in numbers] or MUTATIONS
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "out")
        shutil.copytree(ROOT, root, ignore=skipped)
        for mutation in chosen:
            print(f"{MUTATIONS.index(mutation)} {mutation.name}", flush=True)
            if survives(mutation, root):
                alive.append(mutation.name)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} were found")
    for name in alive:
        print(f"not found: {name}")
    return bool(alive)


if __name__ == "__main__":
    sys.exit(main([int(x) for x in sys.argv[1:]]))

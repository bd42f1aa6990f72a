"""Breaks the core in one place at a time, and looks whether the tests find it.

Run as ``python -m tests.mutations [NUMBER ...]``: each mutation is made in a copy of
the package, the tests beside it are run there, and those that find nothing are listed.
A mutation names no file: its text is changed in the first file of the package that has
it.
"""

import shlex
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


LAYERS, CONTRACTS = "tests/grad_samples/", "tests/contracts/"
# Those of make test alone, whose faults must not wait for the thorough ones.
NOW = ' -m "not slow and not thorough and not examples"'
MUTATIONS: List[Mutation] = [
    Mutation(
        "the second pass of ghost is not looked at",
        "if len(differ) != len(digests) or differ and bool(torch.stack(differ).any()):",
        "if False:",
        "tests/adapter/silence_test.py -k that_differ",
    ),
    Mutation(
        "what is told by data may stay",
        "told = read_data and not",
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
        "elif not found or not same:",
        "elif not found:",
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
        "((normalized * backprops).flatten(2),)",
        "((normalized + backprops).flatten(2),)",
        LAYERS + "layer_norm_test.py",
    ),
    Mutation(
        "a negative padding index is taken as it is",
        "        padding_idx += len(weight)\n",
        "        padding_idx += 0\n",
        LAYERS + "embedding_test.py",
    ),
    Mutation(
        "a convolution's bias is averaged over space",
        "(upcast(backprops.flatten(3)).sum(3),)",
        "(upcast(backprops.flatten(3)).mean(3),)",
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
        "p.summed_grad = p.summed_grad.add_(total)",
        "p.summed_grad = total",
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
    Mutation(
        "secure noise does not pay for rounding",
        "return noise_multiplier * (sensitivity + grid * root), grid",
        "return noise_multiplier * sensitivity, grid",
        "tests/secure_test.py",
    ),
    Mutation(
        "what the first bits leave open counts as below",
        "or self.head + 1 <= lower:",
        "or True:",
        "tests/secure_test.py",
    ),
    Mutation(
        "a sum is cut to the grid before secure noise",
        "steps.round_().clamp_",
        "steps.floor_().clamp_",
        "tests/secure_test.py",
    ),
    Mutation(
        "secure noise comes beside the sum that is not rounded",
        "p.summed_grad.copy_(release(p.summed_grad, std, grid))",
        "p.summed_grad.add_(release(torch.zeros_like(p), std, grid))",
        "tests/secure_test.py",
    ),
    Mutation(
        "one record more is drawn in secure mode",
        "keys <= int(rate * 2**63) - 1",
        "keys <= int(rate * 2**63) - 0",
        "tests/secure_test.py",
    ),
    Mutation(
        "a large parameter has half of the noise",
        "total.add_(noise)",
        "total.add_(noise, alpha=0.5)",
        CONTRACTS + "noise_test.py" + NOW,
    ),
    Mutation(
        "one of the small parameters has half of the noise",
        "torch._foreach_add_(totals, each)",
        "torch._foreach_add_(totals, [each[0] / 2, *each[1:]])",
        CONTRACTS + "noise_test.py" + NOW,
    ),
    Mutation(
        "sums are rounded to the parameters' type before the noise",
        "dtype = torch.promote_types(p.dtype, torch.float32)\n        return",
        "dtype = p.dtype\n        return",
        "tests/precision_test.py -k before_the_noise" + NOW,
    ),
    Mutation(
        "optimizers that are made one after the other have the same noise",
        "return int(torch.randint(2**63 - 1, ()))",
        "return torch.initial_seed() >> 1",
        "tests/noise_test.py" + NOW,
    ),
    Mutation(
        "large parameters of one shape share noise",
        "noise = self._row([places[p]], total, total.shape, std, generator)",
        "noise = vars(self).setdefault('a', {}).setdefault((len(self._noise_states), "
        "total.shape), self._row([places[p]], total, total.shape, std, generator))",
        CONTRACTS + "noise_test.py" + NOW,
    ),
    Mutation(
        "runs have the same noise",
        "noise = self._row([places[p]], total, total.shape, std, generator)",
        "noise = self._row([places[p]], total, total.shape, std, generator.manual_seed"
        "(len(self._noise_states)))",
        CONTRACTS + "noise_test.py" + NOW,
    ),
    Mutation(
        "the accountant forgets batches without records",
        "record_whole(accountant, lambda: hook(optimizer))",
        "any(map(len, getattr(optimizer, 'norms', []))) and record_whole(accountant, "
        "lambda: hook(optimizer))",
        CONTRACTS + "accountant_test.py" + NOW,
    ),
    Mutation(
        "the accountant forgets those of another sampling",
        "record_whole(accountant, lambda: self.account(",
        "any(map(len, optimizer.norms)) and record_whole(accountant, lambda: "
        "self.account(",
        CONTRACTS + "accountant_test.py" + NOW,
    ),
    Mutation(
        "a sampler draws each batch twice",
        "drawn = self.sampling.draw(self.num_samples, generator, step)",
        "drawn = drawn if step % 2 else self.sampling.draw(self.num_samples, "
        "generator, step)",
        CONTRACTS + "sampling_test.py" + NOW,
    ),
    Mutation(
        "records of a batch come twice",
        "        yield drawn[self.rank :: self.processes].tolist()",
        "        yield [*drawn[self.rank :: self.processes].tolist(), "
        "*drawn[:1].tolist()]",
        CONTRACTS + "sampling_test.py" + NOW,
    ),
    Mutation(
        "norms are those of an earlier batch",
        "factors = clipping(norms)\n",
        "factors = clipping(vars(clipping_factors).setdefault(str(norms.shape), "
        "norms))\n",
        "tests/modes_test.py tests/adapter" + NOW,
    ),
    Mutation(
        "a sample alone is not clipped",
        "factors = clipping(norms)\n",
        "factors = clipping(norms)\n    factors = factors if norms.shape[-1] > 1 else "
        "torch.ones_like(norms)\n",
        "tests/modes_test.py tests/adapter" + NOW,
    ),
    Mutation(
        "a number that differs from sample to sample is let through",
        'return first, None if all(same) else "differs from sample to sample"',
        "return first, None",
        "tests/adapter/silence_test.py" + NOW,
    ),
    Mutation(
        "the accountant's history is lost with a step that fails",
        "vars(accountant).update(before)",
        "pass",
        CONTRACTS + "accountant_test.py" + NOW,
    ),
    Mutation(
        "what a step that failed has left stays",
        "if self._unfinished is not None and not self._unfinished[1]:",
        "if False:",
        CONTRACTS + "accountant_test.py" + NOW,
    ),
    Mutation(
        "a checkpoint is written over the one before",
        'part = f"{path}.part"',
        "part = path",
        CONTRACTS + "faults_test.py" + NOW,
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
            [*command, *shlex.split(mutation.tests)],
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

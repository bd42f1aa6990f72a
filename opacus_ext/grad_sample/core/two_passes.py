"""Ghost clipping: one backward pass for norms, another for the clipped sum.

Both passes go through one graph (Lee & Kifer 2020). The first keeps only norms. In the
second, each parameter's gradients are summed, weighted by the clipping factors, and
dropped as soon as they are complete.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Hashable, Iterable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from opacus_ext.grad_sample.core.gradients import (
    Collector,
    GradSamples,
    Group,
    ParameterUse,
    Receiver,
    Root,
    run_backward,
    touched_in,
)
from opacus_ext.grad_sample.factors import (
    GradSample,
    dtype_of,
    full_precision,
    real_rows,
    sums_wide,
    times,
)
from opacus_ext.refused import Refused

T = torch.Tensor
# A print has this many numbers, which are hardly ever all small by chance.
_SIGNS = 8
# Longer rows are cut into parts of this width, which have the same signs.
_WIDE = 2**14
_GOLDEN = (5**0.5 - 1) / 2


@torch.no_grad()
def add_in_two_passes(
    total: Any,
    rows: T | None,
    group: Group,
    outputs: Sequence[Root],
    grads: Sequence[T | None],
    params: Sequence[T],
    inputs: Sequence[T] = (),
) -> list[T | None]:
    """Adds the gradients of a group; see :meth:`~clip.ClippedSum.add_group`."""
    # Each pass gives every parameter and its gradients to a function of its own.
    passed = group, outputs, grads, params, inputs
    one_pass = functools.partial(_one_pass, total, *passed)
    with full_precision(total.norms.device):
        norms = total.group_norms(group.size, keep=False)
        keys = list(map(id, total.params))
        small: GradSamples = {}

        def measure(parameter: T, sample: GradSample) -> None:
            # This clears all but small gradients, whose norms are left for the end.
            norms.add(parameter, sample)
            small[id(parameter)] = sample

        first = Prints()
        one_pass(measure, first)

        def exact(samples: T) -> Any:
            """Runs a pass for the samples whose norms are uncertain."""
            wide: GradSamples = {}

            def widen(parameter: T, sample: GradSample) -> None:
                key = id(parameter)
                if key in keys and norms.rows_of(parameter) is not None:
                    wide[key] = norms.wide(parameter, sample, samples)

            one_pass(widen)
            return norms.exact(samples, wide)

        norms.finish(small)
        clipped = total.clip(rows, norms, exact)
        factors = norms.rounded(clipped.factors)
        if clipped.apart is not None:
            norms.drop(clipped.apart)
        sums = norms.small_sums(factors)

        def add(parameter: T, sample: GradSample) -> None:
            key, samples = id(parameter), norms.rows_of(parameter)
            if samples is None or key in sums:
                return
            if clipped.apart is not None:
                sample.drop(clipped.apart[samples])
            weights = factors
            if total.per_parameter:
                weights = factors[keys.index(key)]
            sums[key] = sample.weighted_sum(weights[samples].to(parameter.device))

        second = Prints()
        of_inputs = one_pass(add, second)
        # Norms of other gradients would not bound the sum.
        if first.differ_from(second):
            raise _refused(bool(group.segments))
        total.reached |= bool(sums)
        total.put(clipped.join(list(map(sums.get, keys))))
        return of_inputs


def _refused(has_segments: bool) -> Refused:
    source = "a hook or autograd function"
    remedy = 'Use grad_sample_mode="ghost_bk" or "hooks".'
    if has_segments:
        source += ", or a function under activation checkpointing,"
        remedy = (
            "Take random numbers from torch alone, leave torch.utils.checkpoint."
            "checkpoint out for that function (gradient_checkpointing=False), or train "
            'one sample after the other: grad_sample_mode="scan".'
        )
    return Refused(
        f"Two backward passes through the model gave other gradients ({source} has "
        "state or draws random numbers), but one is for the norms and the other for "
        "the sum.",
        remedy=remedy,
    )


def _one_pass(
    total: Any,
    group: Group,
    outputs: Sequence[Root],
    grads: Sequence[T | None],
    params: Sequence[T],
    inputs: Sequence[T],
    take: Callable[[T, GradSample], None],
    prints: Prints | None = None,
) -> list[T | None]:
    """
    Runs a backward pass. Calls ``take`` with each parameter and its gradients when
    these are complete.
    """
    frees = group.frees_parameters
    show = None
    if prints is not None:
        show = prints.add
    touched = touched_in(group)
    collector = Collector(
        params, group.size, group.uses, frees, show=show, touched=touched
    )
    samples = collector.samples

    def give(parameters: Iterable[T]) -> None:
        for parameter in parameters:
            key = id(parameter)
            if key in samples:
                take(parameter, total.divided(key, samples.pop(key)))

    def receive(use: ParameterUse, backprops: T) -> None:
        give(collector.add(use, backprops))

    def deliver(others: GradSamples) -> None:
        give(collector.add_samples(others))

    receiver = Receiver(params, deliver, show)
    with torch.enable_grad():
        _, of_inputs = run_backward(
            group, outputs, grads, receiver, inputs, receive, retain_graph=True
        )
    collector.finish()
    give(params)
    return of_inputs


# -- prints ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> T:
    """Returns random signs ``[width, _SIGNS]``, the same each time."""
    generator = torch.Generator().manual_seed(width)
    bits = torch.randint(2, (width, _SIGNS), generator=generator, dtype=torch.int8)
    return (bits * 2 - 1).to(device, dtype)


def _signed(rows: T) -> T:
    """Returns products of rows ``[n, rows, width]`` with signs, in float32 or wider."""
    signs = _signs(rows.shape[2], rows.dtype, rows.device)
    return times(rows, signs.expand(len(rows), -1, -1), dtype_of(rows.dtype))


class Prints:
    """
    Prints of backprops, of which two passes have the same if their backprops are, and
    of data that each of them computes anew: products of each sample's entries with
    random signs.
    """

    def __init__(self) -> None:
        # The products of each sample, [B, _SIGNS], by the key of the backprops.
        self._prints: dict[Hashable, T] = {}
        self._tolerances: list[float] = []

    def add(self, key: Hashable, backprops: T) -> None:
        """Adds the print of some backprops ``[B, ...]``, under a key."""
        self._tolerances.append(1e-3 if backprops.dtype.itemsize >= 4 else 0.03)
        if not backprops.is_floating_point() and not backprops.is_complex():
            # Neighboring integers become very different numbers.
            backprops = (backprops * _GOLDEN).frac()
        if sums_wide(backprops):
            flat = backprops.reshape(len(backprops), -1)
        else:
            flat = real_rows(backprops)
        # A part is replaced by its products, so that few signs are in memory.
        while flat.shape[1] > _WIDE:
            end = flat.shape[1] // _WIDE * _WIDE
            products = _signed(flat[:, :end].unflatten(1, (-1, _WIDE))).flatten(1)
            rest = flat[:, end:].to(products.dtype)
            flat = torch.cat([products, rest], dim=1) if rest.numel() else products
        self._prints[key] = _signed(flat[None])[0]

    def differ_from(self, other: Prints) -> bool:
        """Returns True if some print differs by more than rounding."""
        if self._prints.keys() != other._prints.keys():
            return True
        if not self._prints:
            return False
        first = next(iter(self._prints.values()))
        before = [rows.to(first) for rows in self._prints.values()]
        after = [other._prints[key].to(first) for key in self._prints]
        lengths = [len(rows) for rows in before]
        old = torch.cat(before).nan_to_num_(0, 0)
        new = torch.cat(after).nan_to_num_(0, 0)
        gaps = (new - old).norm(dim=1)
        norms = old.norm(dim=1)
        # Rounding in one row can be as large as the largest row of the use suggests.
        repeats = torch.tensor(lengths, device=first.device)
        uses = torch.arange(len(lengths), device=first.device)
        uses = uses.repeat_interleave(repeats)
        largest = pad_sequence(norms.split(lengths), batch_first=True).amax(1)
        tolerances = first.new_tensor(self._tolerances)
        bounds = norms * tolerances[uses] + 1e-6 * largest[uses]
        return bool((gaps > bounds).any())

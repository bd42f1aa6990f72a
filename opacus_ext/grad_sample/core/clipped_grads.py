"""The clipped sum of per-sample gradients, as one function."""

from __future__ import annotations

from contextlib import suppress
from functools import partial, reduce
from itertools import accumulate
from operator import mul
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from opacus_ext.clipping import as_clipping_function, check_parameters
from opacus_ext.grad_sample.core.clip import (
    ClippedSum,
    DenseGrads,
    GroupNorms,
    no_graph,
    refuse_no_graph,
    safe_norms_and_sums,
    sums_by_name,
)
from opacus_ext.grad_sample.core.gradients import (
    gradients_alone,
    no_autocast,
    refuse_hooks,
    unchanged,
)
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.groups import (
    Samples,
    Take,
    in_groups,
    samples_of,
    warn_one_by_one,
)
from opacus_ext.grad_sample.core.sharded import (
    Processes,
    ShardedGroup,
    Shards,
    refuse_tensor_parallel,
    sharded_sum,
)
from opacus_ext.grad_sample.core.traced import TracedGroup
from opacus_ext.grad_sample.core.values import Key, key_function
from opacus_ext.grad_sample.factors import (
    Scale,
    dtype_of,
    scale_of,
    tf32_settings,
)
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.private_torch import TreeSpec, tree_flatten, tree_unflatten
from opacus_ext.refused import Refused, add_note, check_argument

T = torch.Tensor
Loss = Callable[[Any], Any]


class ClippedGrads(NamedTuple):
    """
    The result of :func:`clipped_grads`.

    Attributes:
        sums: by name, the sum over samples of the clipped gradients ``[*shape]``, in
            float32 or wider; with ``scale`` those of the divided gradients
        norms: norms of the gradients over all parameters, before clipping ``[B]``; with
            ``scale`` those of the divided gradients
        losses: ``[B]``, detached
        aux: auxiliary values of the loss ``[B, ...]``, detached; None if there are none
    """

    sums: dict[str, T]
    norms: T
    losses: T
    aux: Any = None


class PerSampleGrads(NamedTuple):
    """
    The result of :func:`per_sample_grads`.

    Attributes:
        grads: by name, the gradients ``[B, *shape]``
        losses: ``[B]``, detached
        aux: see :class:`ClippedGrads`
    """

    grads: dict[str, T]
    losses: T
    aux: Any = None


def clipped_grads(
    loss: Loss,
    params: dict[str, T],
    batch: Any,
    clipping: Any,
    *,
    take: Take | None = None,
    microbatch: int | None = None,
    on_nonfinite: str = "drop",
    scale: Mapping[str, Any] | None = None,
) -> ClippedGrads:
    """
    The sum over samples of their clipped gradients.

    A sample's gradient is that of ``loss(sample)``, where ``sample`` is a batch of one.
    The sum of a batch ``D`` is

        S(D) = sum over i of c(|g_i|) g_i,   g_i = gradient of loss(sample i)

    with the factors ``c`` of the clipping function. Noise is not added.

    **Guarantees.** (1) A sample's term depends on that sample, the parameters and the
    random numbers that the loss draws, and on no other sample, as long as the loss
    reads and writes only its argument, the parameters and constants: samples do not
    interact, under ``torch.vmap`` or one by one. (2) The norm of a term is at most
    ``clipping.sensitivity("add_or_remove_one")``. So up to rounding ``S`` changes by at
    most that if a sample is added or removed, and by ``sensitivity("replace_one")`` if
    one is replaced. Adding Gaussian noise with standard deviation ``sigma *
    sensitivity`` to all of ``sums`` is the Gaussian mechanism with noise multiplier
    sigma. (3) Losses for which this does not hold are refused. ``norms``, ``losses``
    and ``aux`` are not private.

    ================================= ================================================
    case                              result
    ================================= ================================================
    no samples (``B = 0``)            zeros; norms and losses ``[0]``; no aux
    one sample                        the same as a batch of one elsewhere
    a parameter that is not used      its sum is zero
    a frozen parameter                is a constant; it has no entry in ``sums``
    a tensor that is not in params    is a constant, whether it is trainable or not
    one tensor under two names        refused
    a hook on a parameter             refused
    gradients that cancel             exact; norm 0 has the factor ``c(0)``
    a loss without a graph            refused if no sample's loss reaches a parameter
    a gradient that is not finite     the term is zero, the norm infinite, with a
                                      warning; ``on_nonfinite="raise"`` refuses
    a branch on data                  the samples are split by their answers
    an op that vmap can't run         one by one, with one warning that names it
    bfloat16, float16                 norms and sums in float32, so that noise is added
                                      before rounding
    a complex parameter               refused; complex activations are exact
    random numbers in the loss        drawn for each sample separately
    a loss with state                 not detected: the caller is responsible
    a loss of more than one number    refused
    tensors whose first dims differ   refused: close over shared tensors, or ``take``
    numbers, lists, arrays in batch   refused, as above: each sample would see all
    samples that share memory         each has memory of its own
    ================================= ================================================

    Under ``torch.compile(fullgraph=True)`` samples run at once. Branches on data,
    ``take``, ``microbatch``, ``scale`` and ``on_nonfinite="raise"`` are errors there. A
    gradient that is not finite, or whose norm is over 1e19 in float32, is dropped
    without a warning (its norm is infinite). Where a gradient's terms cancel, its norm
    is a bound from above. Each batch size is compiled separately, so draw few sizes.

    Args:
        loss: function of a sample, a tree of tensors ``[1, ...]``. Returns one number,
            or a pair of it and auxiliary values, a tree of tensors
        params: tensors that the loss reads, by name; or a model that ``fully_shard``
            has sharded, for its trainable parameters: the sums are those of all
            processes, of which each has its shards (DTensors); norms and losses are
            those of its own batch
        batch: a tree of tensors ``[B, ...]``; any object with ``take``
        clipping: the bound C of flat clipping, ``min(1, C / |g|)``, or a clipping
            function (clipping.py) of norms ``[B]`` that has ``sensitivity(relation)``
        take: ``take(batch, i)`` returns sample ``i`` as a tree of tensors ``[1, ...]``,
            and raises IndexError after the last. If it has ``take.size``,
            ``take.size(batch)`` is the number of samples
        microbatch: the most samples that run at once, which bounds memory
        on_nonfinite: "drop" or "raise"
        scale: by name, what the gradients of a parameter are divided by before they are
            clipped: positive numbers in a tensor ``[*shape]``, or a tuple of vectors
            whose outer product it is, such as ``(rows [out], columns [in])``, which
            keeps norms cheap. It must not depend on the batch. ``sums`` are those of
            the divided gradients, so that the guarantees hold for them as they are: add
            the noise first, then multiply by the scale

    Raises:
        Refused: see the table; nothing is changed then

    Source: norms and sums from one backward pass are book-keeping (Bu et al. 2023),
    over the ghost norms of factors/.

    Example:
        >>> import torch
        >>> from opacus_ext import clipped_grads
        >>> weight = torch.ones(2, requires_grad=True)
        >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> result = clipped_grads(lambda x: (x @ weight).sum(), {"w": weight}, x, 1.0)
        >>> result.sums["w"], result.norms
        (tensor([0.9000, 1.2000]), tensor([5.0000, 0.5000]))
    """
    shards = None
    every: Mapping[str, T] = params
    if isinstance(params, FSDPModule):
        shards = _shards_of(params)
        every = shards.gathered
    trained = _trained(every, microbatch)
    clip = as_clipping_function(clipping)
    check_parameters(clip, len(trained))
    if on_nonfinite not in ("drop", "raise"):
        raise Refused(
            f'on_nonfinite is "drop" or "raise", got {on_nonfinite!r}.',
            parameter="on_nonfinite",
        )
    samples, size = samples_of(batch, take)
    if torch.compiler.is_compiling():
        left_out = take is None, microbatch is None, on_nonfinite == "drop", not scale
        check_compiled(left_out)
        return _clipped_traced(loss, trained, samples[0], clip)
    if scale and shards is not None:
        raise Refused(
            "scale= of clipped_grads is not computed for models sharded by "
            "fully_shard.",
            parameter="scale",
            remedy="Leave it out, or train in one process or with DDP.",
        )
    scales = _scales(scale or {}, trained)
    if shards is None:
        total = ClippedSum(trained, size, clip, on_nonfinite, scales=scales)
        run = _Losses(loss, trained, total)
        losses, auxiliary = run.compute(samples, microbatch)
        refuse_no_graph(total, size)
    else:
        # A loss without a graph is not refused here, as the losses of other processes
        # may have one.
        total = sharded_sum(every, shards.own, size, clip, on_nonfinite)
        run = _ShardedLosses(shards.processes, loss, trained, total)
        losses, auxiliary = run.compute(samples, microbatch)
    return ClippedGrads(total.sums(), total.norms, losses, auxiliary)


def per_sample_grads(
    loss: Loss,
    params: dict[str, T],
    batch: Any,
    *,
    take: Take | None = None,
    microbatch: int | None = None,
) -> PerSampleGrads:
    """
    The gradients of all samples, materialized.

    See :func:`clipped_grads` for the arguments and edge cases. Gradients that are not
    finite are returned unchanged.

    Example:
        >>> import torch
        >>> from opacus_ext import per_sample_grads
        >>> weight = torch.ones(2, requires_grad=True)
        >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> per_sample_grads(lambda x: (x @ weight).sum(), {"w": weight}, x).grads["w"]
        tensor([[3.0000, 4.0000],
                [0.3000, 0.4000]])
    """
    trained = _trained(params, microbatch)
    samples, size = samples_of(batch, take)
    total = DenseGrads(trained, size)
    losses, auxiliary = _Losses(loss, trained, total).compute(samples, microbatch)
    refuse_no_graph(total, size)
    return PerSampleGrads(total.grads(), losses, auxiliary)


def _trained(params: Mapping[str, T], microbatch: int | None) -> dict[str, T]:
    """Returns the trainable parameters; refuses those that can't be clipped."""
    if not isinstance(params, Mapping):
        raise Refused(
            f"params is a dict of names and tensors, got {type(params).__name__}.",
            parameter="params",
            remedy="Give dict(model.named_parameters()).",
        )
    if microbatch is not None and (type(microbatch) is not int or microbatch < 1):
        raise Refused(
            f"microbatch is a number of samples, got {microbatch!r}.",
            parameter="microbatch",
        )
    refuse_tensor_parallel(params)
    trained = {}
    for name, parameter in params.items():
        if not isinstance(parameter, T):
            raise Refused(
                f"params[{name!r}] is no tensor, but of type "
                f"{type(parameter).__name__}.",
                parameter="params",
                remedy="Give dict(model.named_parameters()).",
            )
        if parameter.requires_grad:
            trained[name] = parameter
    names: dict[Key, str] = {}
    tensor_key = key_function()
    # Compiled code calls no hook.
    if not torch.compiler.is_compiling():
        refuse_hooks(trained.items())
    for name, parameter in trained.items():
        other = names.setdefault(tensor_key(parameter), name)
        if other != name:
            raise Refused(
                f"{other} and {name} are one tensor, whose gradient would be "
                "clipped and released twice.",
                parameter=name,
                remedy="Leave one of the names out: dict(model.named_parameters()) has "
                "each tensor once.",
            )
        if parameter.is_complex() or not parameter.is_leaf:
            raise Refused(
                f"{name} is {'complex' if parameter.is_complex() else 'no leaf'}.",
                parameter=name,
                remedy="Give the leaves that it is computed from, all of them real.",
            )
    if not trained:
        raise Refused(
            "No parameter requires a gradient.",
            parameter="params",
            remedy="Give dict(model.named_parameters()) of a model that is not frozen.",
        )
    return trained


def _scales(scale: Mapping[str, Any], params: Mapping[str, T]) -> dict[Key, Scale]:
    """Returns scales by the ids of the parameters; refuses those that do not fit."""
    scales: dict[Key, Scale] = {}
    for name, divisor in scale.items():
        if name not in params:
            raise Refused(
                f"scale has {name!r}, which is no trainable parameter.",
                parameter="scale",
                remedy=f"Its names are those of params: {', '.join(params)}.",
            )
        parameter = params[name]
        vectors = scale_of(f"scale[{name!r}]", divisor, parameter)
        if parameter.numel() and not _is_in_range(vectors):
            raise Refused(
                f"scale[{name!r}] has entries that are not positive numbers, or with "
                "an inverse that overflows.",
                parameter="scale",
                remedy="Clamp it from below: scale.clamp(min=1e-3).",
            )
        scales[id(parameter)] = [v.detach().to(parameter.device) for v in vectors]
    return scales


def _is_in_range(vectors: Scale) -> bool:
    """Returns True if the entries, their products and the inverses are positive."""
    least = [float(vector.min()) for vector in vectors]
    most = [float(vector.max()) for vector in vectors]
    products = [*accumulate(least, mul), *accumulate(most, mul)]
    dtypes = [vector.dtype for vector in vectors if vector.is_floating_point()]
    tiny = torch.finfo(reduce(torch.promote_types, dtypes, torch.float32)).tiny
    return min(least) > 0 and all(tiny < x < 1 / tiny for x in products)


class _GroupLosses(NamedTuple):
    """
    What the losses of a group have returned.

    Attributes:
        rows: indices of the samples in the batch; None for all
        tensors: losses ``[n]`` and auxiliary values ``[n, ...]``, detached
        structure: structure of the auxiliary values
    """

    rows: T | None
    tensors: list[T]
    structure: TreeSpec

    def form(self) -> tuple[TreeSpec, list[torch.Size]]:
        """Returns what must be equal for all groups."""
        return self.structure, [tensor.shape[1:] for tensor in self.tensors]


class _Losses:
    """The losses of one call, whose gradients are added to ``total``."""

    group: Callable[..., SampleGroup] = SampleGroup

    def __init__(
        self, loss: Loss, params: dict[str, T], total: ClippedSum | DenseGrads
    ):
        check_argument(
            "loss",
            loss,
            callable(loss),
            "a function of one sample",
            "Give lambda sample: ..., which returns the sample's loss.",
        )
        self.loss, self.total = loss, total
        self.names, self.params = list(params), list(params.values())
        self._groups: list[_GroupLosses] = []

    def compute(self, samples: list[Samples], microbatch: int | None) -> tuple[T, Any]:
        """Returns losses ``[B]`` and auxiliary values ``[B, ...]``."""
        # A function that is made anew for each batch has the same code.
        code = getattr(self.loss, "__code__", type(self.loss))
        alone = _alone.setdefault(self.params[0], set())

        def warn(reason: str) -> None:
            alone.add(code)
            warn_one_by_one("The loss", reason)

        with unchanged(self.params):
            self.run(
                samples, microbatch=microbatch, one_by_one=code in alone, warn=warn
            )
        if not self._groups:
            first = self.params[0]
            return torch.zeros(0, dtype=first.dtype, device=first.device), None
        rows, columns, structures = zip(*self._groups)
        form = self._groups[0].form()
        if any(group.form() != form for group in self._groups):
            raise Refused(
                "The auxiliary values of some samples have another structure or shape "
                "than those of others.",
                parameter="loss",
                remedy="Return the same from each sample, padded if need be.",
            )
        losses, *auxiliary = columns[0]
        # Groups hold samples in any order.
        if rows[0] is not None:
            order = torch.cat([part.cpu() for part in rows]).argsort()
            joined = map(torch.cat, zip(*columns))
            losses, *auxiliary = [x[order.to(x.device)] for x in joined]
        return losses, tree_unflatten(auxiliary, structures[0]) if auxiliary else None

    def run(self, samples: list[Samples], **how: Any) -> None:
        """Runs all samples in groups."""
        in_groups(samples, self.at_once, self.one, **how)

    def at_once(self, samples: Samples) -> None:
        """Runs samples under vmap."""
        group = self.group(self.params, samples.size)
        with torch.enable_grad(), group.level:
            sample = samples.tree(group.wrap_input)
            values, structure = _loss_and_aux(group.watch(partial(self.loss, sample)))
            losses, *auxiliary = map(group.inner, values)
            # Tensors of the vmap level must not outlive it.
            del sample, values
        with no_autocast():
            ones = torch.ones_like(losses)
            self.total.add_group(samples.rows, group, [losses], [ones], self.params)
        self._keep(samples.rows, [losses, *auxiliary], structure)

    def one(self, samples: Samples, number: int) -> None:
        """Runs one sample by plain autograd."""
        rows = samples.rows
        if rows is None:
            rows = torch.arange(samples.size)
        row = rows[number : number + 1]
        with torch.enable_grad():
            try:
                value = self.loss(samples.alone(number))
            except TypeError as error:
                add_note(
                    error,
                    "The loss is called with one argument, a sample: the batch cut "
                    "down to one row.",
                )
                raise
            values, structure = _loss_and_aux(value)
        with no_autocast():
            losses, ones = values[:1], [torch.ones_like(values[0])]
            gradients = gradients_alone(losses, ones, self.params, self.names)
            self.total.add_one(int(row), gradients)
        self._keep(row, [value[None] for value in values], structure)

    def _keep(self, rows: T | None, tensors: list[T], structure: TreeSpec) -> None:
        detached = [tensor.detach() for tensor in tensors]
        self._groups.append(_GroupLosses(rows, detached, structure))


class _ShardedLosses(_Losses):
    """The losses of one call in one of several processes, which have shards."""

    def __init__(self, processes: Processes, *args: Any):
        super().__init__(*args)
        self.processes = processes
        self.group = partial(ShardedGroup, processes)

    def run(self, samples: list[Samples], **how: Any) -> None:
        """Runs all samples in rounds of all processes."""
        if how.pop("microbatch") is not None or not samples:
            raise Refused(
                "clipped_grads of a model sharded by fully_shard takes no microbatch=, "
                "and no batch without samples from take=.",
                parameter="microbatch",
                remedy="Leave it out; tensors [0, ...] are a batch without samples.",
            )
        self.loss = partial(self.processes.forward, self.loss)
        self.processes.run(samples, self.at_once, self.one, **how)

    def _keep(self, rows: T | None, tensors: list[T], structure: TreeSpec) -> None:
        # A sample of zeros that stands in has row -1, and no loss of this process.
        if rows is None or int(rows[0]) >= 0:
            super()._keep(rows, tensors, structure)


# A model has its shards for as long as it lives: they register hooks on its modules.
_shards: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _shards_of(module: FSDPModule) -> Shards:
    """Returns the shards of a model, the same in each call."""
    if module not in _shards:
        _shards[module] = Shards(module)
    return _shards[module]


def _clipped_traced(
    loss: Loss, params: dict[str, T], samples: Samples, clipping: Callable[[T], T]
) -> ClippedGrads:
    """Computes :func:`clipped_grads` in compiled code."""
    values, size = list(params.values()), samples.size
    # An empty batch has a program of its own, as torch.vmap needs samples.
    if not size:
        norms = values[0].new_zeros(0, dtype=dtype_of(values[0].dtype))
        sums = sums_by_name(params, [None] * len(values))
        return ClippedGrads(sums, norms, values[0].new_zeros(0))
    structures = []

    def run_loss(sample: Any) -> list[T]:
        tensors, structure = _loss_and_aux(loss(sample))
        structures.append(structure)
        return tensors

    # The first run finds the uses, whose shapes the slots of the second have.
    first = TracedGroup(values, size)
    with torch.enable_grad():
        first.run(run_loss, samples)
    check_compiled(reached=len(first.uses) > 0)

    def total(slots: list[T]) -> tuple[T, Any]:
        group = TracedGroup(values, size)
        (losses, *auxiliary), saved = group.run(run_loss, samples, slots)
        # Slots belong to uses by their order alone.
        if group.signature() != first.signature():
            raise NotAtOnce("a loss that uses parameters differently in each call")
        return losses.sum(), (losses, auxiliary, saved)

    with torch.no_grad():
        differentiate = torch.func.grad(total, has_aux=True)
        gradients, (losses, auxiliary, saved) = differentiate(first.make_slots())
        by_parameter = getattr(clipping, "per_parameter", False)
        group = GroupNorms(values, size, by_parameter, tensor_key=key_function())
        # Autocast, in which the loss may run, would round norms and sums.
        with torch.autocast(values[0].device.type, enabled=False):
            group.finish(first.collect(saved, gradients, size))
            norms, clipped = safe_norms_and_sums(group, clipping)
        if norms.dim() > 1:
            norms = norms.norm(dim=0)
    tree = tree_unflatten(auxiliary, structures[0]) if auxiliary else None
    return ClippedGrads(sums_by_name(params, clipped), norms, losses, tree)


# The function runs while code is compiled, as it is.
@torch.compiler.assume_constant_result
def check_compiled(left_out: Sequence[bool] = (), reached: bool = True) -> None:
    """
    Refuses what compiled code can't do: arguments that are not left out, TF32, which it
    can't leave, and a loss without a graph.
    """
    arguments = "take", "microbatch", 'on_nonfinite="raise"', "scale"
    for name, is_left_out in zip(arguments, left_out):
        if not is_left_out:
            raise Refused(
                f"{name} can't be compiled.",
                parameter=name.partition("=")[0],
                remedy="Leave it out, or call clipped_grads in eager code.",
            )
    if tf32_settings():
        raise Refused(
            "A compiled step would round norms and clipped sums to TF32.",
            parameter="set_float32_matmul_precision",
            remedy='Call torch.set_float32_matmul_precision("highest") before.',
        )
    if not reached:
        raise no_graph()


# The losses that vmap can't run, by the first parameter: with other parameters, and
# another model, the same code may be another loss.
_alone = WeakIdKeyDictionary()


def _loss_and_aux(result: Any) -> tuple[list[T], TreeSpec]:
    """Returns the loss of a sample with auxiliary tensors, and the tree of these."""
    loss, auxiliary = result, None
    if isinstance(result, tuple) and len(result) == 2:
        loss, auxiliary = result
    kind = type(loss).__name__
    if isinstance(loss, T):
        kind = f"shape {tuple(loss.shape)}"
        if loss.is_complex():
            kind = f"complex numbers of {kind}"
    if not isinstance(loss, T) or loss.numel() != 1 or loss.is_complex():
        raise Refused(
            f"The loss of a sample is one real number, got {kind}.",
            parameter="loss",
            remedy="Reduce it over the sample, by mean() or sum().",
        )
    leaves, structure = tree_flatten(() if auxiliary is None else auxiliary)
    return [loss.reshape(()), *map(_auxiliary, leaves)], structure


def _auxiliary(value: Any) -> T:
    """Returns an auxiliary value as a tensor."""
    is_number = isinstance(value, (int, float, complex, np.ndarray, np.generic))
    # Some types of NumPy are strings, too.
    if is_number and not isinstance(value, (str, bytes)):
        # An array may hold objects.
        with suppress(TypeError, ValueError):
            return torch.as_tensor(value)
    kind = type(value).__name__
    if isinstance(value, T):
        if value.layout is torch.strided and not value.is_nested:
            return value
        kind = f"{value.layout} tensor"
    raise Refused(
        f"An auxiliary value of the loss is of type {kind}.",
        parameter="loss",
        remedy="Return dense tensors or numbers, or close over what is neither.",
    )

"""
DP optimizers that take any clipping function: ``HooksDPOptimizer`` clips per-sample
gradients, ``GhostDPOptimizer`` takes sums of gradients that a mode has clipped.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
    Type,
)

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from opacus_ext.clipping import (
    CLIPPINGS,
    Bound,
    Clipping,
    ClippingFunction,
    check_parameters,
)
from opacus_ext.data.spent import NOT_TAKEN
from opacus_ext.grad_sample.adapter.passes import Passes
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.factors import GradSample, Scale, inverse_of, scale_of
from opacus_ext.ledger import note_beside, note_broken
from opacus_ext.optimizers.adaptive import ADAPTIVE, AdaptiveBound
from opacus_ext.optimizers.noise import NoisyOptimizer, divide, on_this_process
from opacus_ext.refused import Refused, warn_once
from opacus_ext.tables import in_a_line

_BOUND = "opacus_ext_bound"  # a key of checkpoints


class _Unfinished(NamedTuple):
    """What a step began with that is at work, or has failed."""

    skip_queue: List[bool]
    in_logical_batch: bool  # a physical batch of the same logical batch came before


class ClippingOptimizer(NoisyOptimizer):
    """A DP optimizer with the bound of any clipping function."""

    clipping: Clipping = CLIPPINGS["flat"]
    on_nonfinite = "drop"  # or "raise", set by make_private
    mode: Any = None  # of the model, set by make_private
    #: Each has ``observe(norms)``, called with the samples' norms once a logical batch
    #: when it is counted, and a ``share`` of the budget of each step.
    observers: Tuple[Any, ...] = ()
    loop: Any = None  # a LoopMonitor, set by make_private
    draws: Any = None  # a DrawCounter of the loader, set by make_private
    spent: Any = None  # how this step is accounted for, if not as one on a new draw
    run: Any = None  # its entry in ``runs``, set by make_private
    count: Any = None  # counts a step in accountant and ledger, set by make_private
    _step_hook: Any = None  # see step_hook
    begun_epochs: Any = None  # of batches that are drawn at once: data/allocation.py
    steps_taken = 0  # and counted
    #: The largest number of physical batches that are drawn before a step on the first.
    ahead = 0
    _unfinished: Optional[_Unfinished] = None

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:  # asked by torch.amp.GradScaler
        raise Refused(
            "GradScaler scales the loss, so that gradients would be clipped at another "
            "norm, and skips steps depending on private data.",
            remedy='Use bfloat16 without it; for float16 modes "ghost" and "ghost_bk" '
            "have loss.backward(scale=...).",
        )

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: Bound,
        expected_batch_size: Optional[int],
        **kwargs: Any,
    ):
        # By parameter: which of them are trained may change from step to step.
        self._bounds: Optional[Dict[torch.nn.Parameter, float]] = None
        # One tensor [B] a physical batch: norms over all parameters, of the samples in
        # the sum so far.
        self.norms: List[Optional[torch.Tensor]] = []
        self._clipped_at: Optional[List[float]] = None  # the bounds of the sum so far
        self._scales: Optional[Dict[int, Scale]] = None  # and what it was divided by
        groups = optimizer.param_groups
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        function = self.clipping.at(max_grad_norm)
        check_parameters(function, len(trained))
        if self.clipping.per_parameter:
            bounds: Any = function.bound
            self.max_grad_norms = [float(bound) for bound in bounds]
            self._bounds = dict(zip(trained, self.max_grad_norms))
            max_grad_norm = function.sensitivity("add_or_remove_one")
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            **kwargs,
        )

    @property
    def clipping_bound(self) -> Bound:
        """
        ``max_grad_norm``, as the clipping function takes it; a list has the bounds of
        the parameters that are trained now.

        Raises:
            Refused: for a parameter that was frozen at make_private, and has none
        """
        if self._bounds is None:
            return self.max_grad_norm
        for p in self.params:
            if p not in self._bounds:
                name = self._name_of(p)
                raise Refused(
                    f"{name} was frozen at make_private and is trained now: "
                    "max_grad_norm has no bound for it.",
                    parameter=name,
                    remedy="Freeze it by requires_grad_(False), or let it be trained "
                    "at make_private, with a bound of its own; from then on it can be "
                    "frozen.",
                )
        return [self._bounds[p] for p in self.params]

    @property
    def every_bound(self) -> List[float]:
        """The bounds, also of parameters that are frozen now."""
        bounds = self._bounds
        return [self.max_grad_norm] if bounds is None else [*bounds.values()]

    def _name_of(self, p: torch.nn.Parameter) -> str:
        """Returns the name of a parameter in the private model."""
        module = getattr(self.mode, "_module", None)
        named = () if module is None else module.named_parameters()
        names = (name for name, parameter in named if parameter is p)
        return next(names, f"a parameter of shape {[*p.shape]}")

    @property
    def clipping_function(self) -> ClippingFunction:
        """The clipping function at its bound."""
        return self.clipping.at(self.clipping_bound)

    @property
    def sensitivity(self) -> float:
        """The largest norm of one sample's clipped gradient."""
        return self.clipping_function.sensitivity("add_or_remove_one")

    @property
    def gradient_noise_multiplier(self) -> float:
        """
        The noise multiplier of the gradients: larger than ``noise_multiplier``, which
        is accounted, where an observer releases something beside them.
        """
        # Gaussian mechanisms of one step: the inverse squares of their multipliers add.
        share = sum(observer.share for observer in self.observers)
        if share >= 1:
            raise Refused(
                "What is released beside the gradients takes all of the budget of a "
                f"step: {', '.join(map(repr, self.observers))}.",
                parameter="noise_multiplier",
                remedy="Give unclipped_num_std a larger number, or Monitor a smaller "
                "share.",
            )
        return super().gradient_noise_multiplier / math.sqrt(1 - share)

    @property
    def adaptive(self) -> Optional[AdaptiveBound]:
        """What moves the bound, if something does."""
        bounds = (x for x in self.observers if isinstance(x, AdaptiveBound))
        return next(bounds, None)

    def pre_step(self, closure: Optional[Any] = None) -> Optional[float]:
        """
        See ``DPOptimizer``; observers see each logical batch once.

        Raises:
            Refused: if the sum could contain samples twice, or samples of two logical
                batches
        """
        self._check_batches()
        self._passes.check()
        noise_state = self._state_of_noise()
        self._look_at_draws()
        self._unfinished = _Unfinished(
            [*self._step_skip_queue], self._is_last_step_skipped
        )
        self._divides = True
        taken = 0 if self.correlated is None else self.correlated.taken
        try:
            goes_on = super().pre_step(closure)
        except BaseException:
            if self.correlated is not None:
                self.correlated.take_back(taken)
            raise
        finally:
            self._divides = False
        self._note_noise(noise_state)
        self._spend_draws(bool(goes_on))
        if goes_on and self.loop is not None:
            self.loop.check_step(self, self.norms)
        if not goes_on:
            self._unfinished = None
        return goes_on

    @property
    def _passes(self) -> Passes:
        """The backward passes whose gradients a step takes."""
        private = getattr(self.mode, "private", None)
        return Passes() if private is None else private.passes

    @property
    def ran(self) -> str:
        """One line that says how the samples of the last step have run, and why."""
        private = getattr(self.mode, "private", None)
        return "" if private is None else str(private.ways)

    def __repr__(self) -> str:
        run = self.run or {}
        bounds = self.every_bound
        return in_a_line(
            self,
            type(self.original_optimizer).__name__,
            grad_sample_mode=run.get("grad_sample_mode"),
            noise_multiplier=float(self.noise_multiplier),
            max_grad_norm=float(bounds[0]) if len(bounds) == 1 else "one a parameter",
            clipping=self.clipping.name if self.adaptive is None else ADAPTIVE,
            expected_batch_size=self.expected_batch_size,
            last_step=self.ran.partition(": ")[2] or None,
        )

    def state_dict(self) -> Dict[str, Any]:
        """The state of the wrapped optimizer, of its noise, and a bound that moves."""
        state = super().state_dict()
        if self.adaptive is not None:
            state[_BOUND] = float(self.max_grad_norm)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """
        Loads what :meth:`state_dict` returned.

        Raises:
            Refused: if only one of the two runs has correlated noise
        """
        state = dict(state_dict)
        bound = state.pop(_BOUND, None)
        super().load_state_dict(state)
        if self.adaptive is not None and bound is not None:
            self.adaptive.set_bound(bound)

    def _look_at_draws(self) -> None:
        """
        Finds out how this step is accounted for.

        Raises:
            Refused: if correlated noise is to be added to a draw that has come back,
                of another loader, or after one that was left out
        """
        self.spent = None
        if self.draws is None or self._check_skip_next_step(pop_next=False):
            return
        if self.correlated is not None and self.draws.left:
            raise Refused(
                f"{self.draws.left} batches that the loop has taken had no step, so "
                "that records would be drawn again sooner than correlated noise is "
                "accounted for.",
                parameter="noise",
                remedy="Call optimizer.step() once for each batch of the loader, also "
                'for an empty one, or use noise="independent".',
            )
        draws = self._passes.draws()
        if self.draws.is_first_without(draws):
            warn_once(self, NOT_TAKEN, NOT_TAKEN)
        spent = self.spent = self.draws.look(draws)
        if spent and spent.rate is not None and self.correlated is not None:
            raise Refused(
                f"{spent.reason} Correlated noise is accounted for records that are "
                "not drawn again so soon.",
                parameter="noise",
                remedy="Step once on each batch of the loader: leave itertools.cycle, "
                "lists of batches and other loaders out, or take "
                'noise="independent".',
            )

    def _spend_draws(self, goes_on: bool) -> None:
        """Notes what a step has spent, or that a physical batch is in the sum."""
        if not goes_on:
            self._passes.keep()
            return
        if self.draws is not None:
            reason = self.draws.spend(self._passes.draws())
            if reason is not None:
                note_beside(self, "alike", reason)
        if self.spent is not None:
            reason = self.spent.reason
            # That no batch was taken was told at the first step.
            key = reason if reason == NOT_TAKEN else "draws"
            note_broken(self, key, reason)
        self._passes.forget(kept=True)

    def step(self, closure: Optional[Any] = None) -> Optional[float]:
        """See ``DPOptimizer``; the wrapped optimizer may step only within it."""
        loop = self.loop
        before = loop is not None and loop.stepping
        try:
            if loop is not None:
                loop.stepping = True
            found = super().step(closure)
            self._unfinished = None
            return found
        finally:
            if loop is not None:
                loop.stepping = before  # this step may be within another one's

    def add_noise(self) -> None:
        """
        Adds noise of std ``gradient_noise_multiplier * sensitivity``; sets ``p.grad``.

        Raises:
            Refused: if the bound has changed since gradients were clipped
        """
        self._check_same_bound()
        super().add_noise()
        # Noise was added to sums of gradients that were divided by the scales.
        scales = self.take_scales()
        for p in self.params if scales else ():
            if id(p) in scales and p.grad is not None:
                p.grad.div_(inverse_of(scales[id(p)]).view(p.shape))

    def take_scales(self) -> Dict[int, Scale]:
        """
        Returns what the gradients of a logical batch are divided by before they are
        clipped, by the ids of the parameters. The wrapped optimizer says it at the
        first physical batch (``gradient_scales``); most have none.

        Raises:
            Refused: if they do not fit the parameters
        """
        if self._scales is None:
            scales_of = getattr(self.original_optimizer, "gradient_scales", None)
            self._scales = {} if scales_of is None else self._checked(scales_of())
        return self._scales

    def _checked(self, scales: object) -> Dict[int, Scale]:
        kind = type(self.original_optimizer).__name__
        if not (
            isinstance(scales, dict)
            and all(isinstance(p, torch.Tensor) for p in scales)
        ):
            raise Refused(
                f"{kind}.gradient_scales() returns no dict with parameters as keys.",
                parameter="optimizer",
                remedy="Leave out the parameters that have no scale.",
            )
        what = f"An entry of {kind}.gradient_scales()"
        return {id(p): scale_of(what, x, p) for p, x in scales.items()}

    def _check_same_bound(self) -> None:
        now = self.every_bound
        before = self._clipped_at = self._clipped_at or now
        if before != now:
            was, new = (x if len(x) > 1 else x[0] for x in (before, now))
            raise Refused(
                f"max_grad_norm was {was} when gradients of this step were clipped and "
                f"is {new} now, so that the noise would not fit.",
                parameter="max_grad_norm",
                remedy="Change it between a step that counts and backward().",
            )

    def _check_batches(self) -> None:
        """
        Raises:
            Refused: after a step that failed, and if a batch that was drawn has not
                been stepped on
        """
        if self._unfinished is not None:
            raise Refused(
                "The step before this one has failed, and what it has left in the sum "
                "may be there twice.",
                remedy=(
                    "Begin the loader anew: the logical batch was in its middle."
                    if self._unfinished.in_logical_batch
                    else "Call optimizer.zero_grad() and compute the batch anew."
                ),
            )
        left = len(self._step_skip_queue) - 1 - self.ahead
        if left > 0:
            raise Refused(
                f"{left} of the physical batches that the loader has drawn were left "
                "without optimizer.step(), so that this one would go to the step of "
                "another logical batch.",
                remedy="Step on each, or leave the loop and begin the loader anew. If "
                "something draws batches ahead of the steps, say so: optimizer.ahead "
                "+= 1.",
            )

    def _check_gradients(self) -> None:
        """
        Raises:
            Refused: if what a step takes is not what a clipped backward pass has left
        """

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """
        Refuses copies (``copy``, ``pickle``), because two runs would have the same
        noise, and because torch restores such optimizers without their ``step()``.
        """
        raise _no_copy(self)

    def __setstate__(self, state: Any) -> NoReturn:
        """Refuses copies that were pickled before."""
        raise _no_copy(self)

    @property
    def step_hook(self) -> Optional[Callable[[Any], None]]:
        """
        What each counted step calls: first the function that counts it, then the
        observers, then the functions that were attached, which may change the noise of
        the next step. Setting it replaces the latter.
        """
        in_step = self._divides and self.observers
        observe = ClippingOptimizer._observe if in_step else None
        return _in_turn(self.count, observe, self._step_hook)

    @step_hook.setter
    def step_hook(self, fn: Optional[Callable[[Any], None]]) -> None:
        self._step_hook = fn

    def _observe(self) -> None:
        for observer in self.observers:
            observer.observe(self.norms)

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """
        Adds a function that is called after each counted step, and after the functions
        that were attached before.
        """
        self._step_hook = _in_turn(self._step_hook, fn)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """
        Trains more of the model's parameters, as ``torch.optim.Optimizer`` does.

        Raises:
            Refused: for a parameter that is not the private model's
        """
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        params_of_model = (
            set() if self.mode is None else set(self.mode._module.parameters())
        )
        for p in params:
            tensor = p[1] if isinstance(p, tuple) else p
            if tensor not in params_of_model or self._bounds is not None:
                raise Refused(
                    f"add_param_group() with a parameter of shape {[*tensor.shape]}, "
                    + (
                        "that has no bound in max_grad_norm."
                        if tensor in params_of_model
                        else "that is not the private model's."
                    ),
                    remedy="Give make_private a model and an optimizer that have it "
                    "from the beginning; requires_grad_(False) freezes it.",
                )
        self.original_optimizer.add_param_group({**param_group, "params": params})

    def drop_logical_batch(self) -> None:
        """Drops a logical batch that was not completed."""
        left = self._step_skip_queue or self._is_last_step_skipped
        if not left and self._unfinished is None:
            if all(getattr(p, "summed_grad", None) is None for p in self.params):
                return
        self._step_skip_queue.clear()
        self._is_last_step_skipped, self._unfinished = False, None
        self.zero_grad(True)

    def scale_grad(self) -> None:
        """Divides gradients by :attr:`divisor`, if :meth:`add_noise` has not."""
        if not self._divided:
            divide(on_this_process([p.grad for p in self.params]), self.divisor)
        self._divided = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        Clears the gradients; ``p.grad`` is always set to None. After a step that has
        failed, the batch can be computed anew.
        """
        if self._unfinished is not None and not self._unfinished.in_logical_batch:
            self._step_skip_queue[:] = self._unfinished.skip_queue
            self._is_last_step_skipped, self._unfinished = False, None
        super().zero_grad(True)
        self._passes.forget(kept=not self._is_last_step_skipped)
        # A parameter that was frozen since must not keep samples until it is thawed.
        names = ["grad_sample"] + ["summed_grad"] * (not self._is_last_step_skipped)
        frozen = [
            p
            for group in self.param_groups
            for p in group["params"]
            if not p.requires_grad
        ]
        for p, name in itertools.product(frozen, names):
            if getattr(p, name, None) is not None:
                setattr(p, name, None)
        if not self._is_last_step_skipped:
            self.norms, self._clipped_at, self._scales = [], None, None


def _in_turn(*hooks: Optional[Callable[[Any], None]]) -> Optional[Callable]:
    """Returns a function that calls those of the functions that are there."""
    functions = [hook for hook in hooks if hook is not None]

    def every(optimizer: Any) -> None:
        for hook in functions:
            hook(optimizer)

    return every if len(functions) > 1 else next(iter(functions), None)


def _no_copy(optimizer: Any) -> Refused:
    return Refused(
        f"{type(optimizer).__name__} is not copied or pickled: the copy would add the "
        "same noise, and have a model that is not private.",
        parameter="optimizer",
        remedy="Keep optimizer.state_dict(). For a second run copy model and optimizer "
        "before make_private, and call it for each.",
    )


_WITH_HOOKS: "weakref.WeakSet[HooksDPOptimizer]" = weakref.WeakSet()


class HooksDPOptimizer(ClippingOptimizer, DPOptimizer):
    """Clips ``p.grad_sample`` with any clipping function; norms in float32 or wider."""

    def pre_step(self, closure: Optional[Any] = None) -> Optional[float]:
        """See ``DPOptimizer``."""
        self._check_gradients()
        return super().pre_step(closure)

    def _check_gradients(self) -> None:
        for p in self.params:
            if getattr(p, "grad_sample", None) is None:
                raise Refused(
                    f"Per sample gradients of a parameter of shape {tuple(p.shape)} "
                    "are missing: since zero_grad() no backward() has come through a "
                    "call of the private model.",
                    remedy="Call the model that make_private returned, not a part or a "
                    "deep copy of it, and backward() on a loss of its outputs.",
                )
            _check_processed_flag(p.grad_sample)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _WITH_HOOKS.add(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and those of parameters that no optimizer holds."""
        super().zero_grad(set_to_none)
        alike = [other for other in _WITH_HOOKS if other.mode is self.mode]
        held = {p for optimizer in alike for p in optimizer.params}
        for p in self.mode._module.parameters() if self.mode is not None else ():
            if p not in held and getattr(p, "grad_sample", None) is not None:
                p.grad_sample = None

    def clip_and_accumulate(self) -> None:
        """Stores the sum of clipped gradients in ``p.summed_grad``."""
        self._check_same_bound()
        params, grad_samples = self.params, self.grad_samples
        for p in params:
            _check_processed_flag(p.grad_sample)
        size = len(grad_samples[0])
        total = ClippedSum(
            dict(zip(map(str, range(len(params))), params)),
            size,
            self.clipping_function,
            self.on_nonfinite,
            scales=self.take_scales(),
        )
        if size:
            samples = {
                id(p): GradSample(p.shape, size, g.reshape(size, -1))
                for p, g in zip(params, grad_samples)
            }
            total.add_samples(samples)
        self.norms.append(total.norms)
        for p, grad in zip(params, total.sums().values()):
            p.summed_grad = grad if p.summed_grad is None else p.summed_grad.add_(grad)
            _mark_as_processed(p.grad_sample)


_WITH_SUMS: "weakref.WeakSet[GhostDPOptimizer]" = weakref.WeakSet()


@functools.lru_cache(maxsize=None)
def _watch_every_step() -> None:
    """Watches the steps of all optimizers, once in a process."""
    register_optimizer_step_pre_hook(_refuse_others)


def _refuse_others(optimizer: Optimizer, *args: Any) -> None:
    """Refuses the step of an optimizer on clipped sums that have no noise yet."""
    for private in _WITH_SUMS:
        is_wrapped = optimizer is private.original_optimizer  # see watch_steps
        held = private._taken if private.ready and not is_wrapped else {}
        if held and any(
            id(p) in held for g in optimizer.param_groups for p in g["params"]
        ):
            raise Refused(
                f"{type(optimizer).__name__}.step() on clipped gradients of a private "
                "model, which have no noise yet.",
                parameter="optimizer",
                remedy="Call step() of the optimizer that make_private has returned; "
                "or its zero_grad() before another one trains the same parameters.",
            )


class GhostDPOptimizer(ClippingOptimizer, DPOptimizerFastGradientClipping):
    """Takes over ``p.grad``, the clipped sum that one backward pass has left."""

    ready = False  # whether p.grad holds a clipped sum that no step has used
    # By the id of a parameter: it, p.grad with its version, and the sum before it is
    # rounded to the dtype.
    _taken: Dict[int, Tuple[Any, torch.Tensor, int, torch.Tensor]] = {}
    _taken_norms: Optional[torch.Tensor] = None  # of the samples in them
    _norms_of_sums: Sequence[torch.Tensor] = ()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _watch_every_step()
        _WITH_SUMS.add(self)

    def set_clipped_sums(
        self,
        sums: Iterable[Tuple[torch.nn.Parameter, torch.Tensor]],
        norms: Optional[torch.Tensor],
    ) -> None:
        """
        Sets ``p.grad`` of each parameter to its clipped sum, for the next step.

        Args:
            sums: each with its parameter
            norms: of the samples' gradients before clipping ``[B]``; None if no
                process knows them
        """
        self._check_same_bound()
        params, totals = zip(*sums)
        self._taken = {}
        for p, key, total in zip(params, map(id, params), totals):
            if total.requires_grad:
                total = total.detach()
            p.grad = grad = total if total.dtype == p.dtype else total.to(p.dtype)
            self._taken[key] = p, grad, grad._version, total
        self._taken_norms = norms
        self._norms_of_sums = self._compute_norms_of_sums()
        self.ready = True

    def _check_gradients(self) -> None:
        if not self.ready:
            raise Refused(
                "optimizer.step() without clipped gradients.",
                remedy=(
                    "Call backward() once before each step, on the loss that the "
                    "criterion returned by make_private gives: gradients of any other "
                    "loss are not private. In the place of a model's own output.loss "
                    "take criterion=opacus_ext.losses.PerSample() and call criterion("
                    "opacus_ext.losses.model_losses(model, batch)).backward()."
                ),
            )
        replaced = written = False
        params = self.params
        for p, key in zip(params, map(id, params)):
            if key not in self._taken:
                name = self._name_of(p)
                raise Refused(
                    f"{name} was frozen when the clipped gradients were computed, and "
                    "is trained now.",
                    parameter=name,
                    remedy="Call requires_grad_(True) before the forward pass.",
                )
            _, grad, version, _ = self._taken[key]
            written = written or grad._version != version
            replaced = replaced or p.grad is not grad
        if replaced or written and not self._are_same_sums():
            raise Refused(
                "The clipped gradients were changed between backward() and step(), "
                "before the noise: by clip_grad_norm_, a gradient scaler or the like.",
                remedy="Leave that out; samples are clipped one by one already.",
            )

    def _compute_norms_of_sums(self) -> Sequence[torch.Tensor]:
        """Returns norms of the sums, and their largest entries, which have signs."""
        sums = on_this_process([grad for _, grad, *_ in self._taken.values()])
        sums = [x for x in sums if 0 not in x.shape]
        return [*torch._foreach_norm(sums), *torch._foreach_max(sums)] if sums else []

    def _are_same_sums(self) -> bool:
        """
        Returns True if the sums still have the same numbers after something wrote to
        them. Trainers clip by an infinite norm, for example, which multiplies by one.
        """
        return all(map(torch.equal, self._compute_norms_of_sums(), self._norms_of_sums))

    def accumulate(self) -> None:
        """
        Moves ``p.grad`` to ``p.summed_grad``.

        Raises:
            Refused: if no clipped backward pass has come before, or ``p.grad`` was
                changed since
        """
        self._check_gradients()
        taken, self._taken = self._taken, {}
        goes_on = self._check_skip_next_step(pop_next=False)
        for p, _, _, total in taken.values():
            p.grad = None
            if not p.requires_grad:  # frozen since: without noise it is not to be used
                continue
            if p.summed_grad is None:
                # The next batch may be given the same memory, by CUDA graphs.
                p.summed_grad = total.clone() if goes_on else total
            else:
                p.summed_grad = p.summed_grad.add_(total)
        self.norms.append(self._taken_norms)
        self.ready = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; see ``DPOptimizerFastGradientClipping``."""
        super().zero_grad(set_to_none)
        self.ready, self._taken = False, {}


def optimizer_class(base: Type[ClippingOptimizer], clipping: Clipping) -> type:
    """Returns ``base`` with ``clipping`` instead of flat clipping."""
    if clipping is CLIPPINGS["flat"]:
        return base
    name = f"{base.__name__}_{clipping.name}"
    return type(name, (base,), {"clipping": clipping, "__doc__": base.__doc__})

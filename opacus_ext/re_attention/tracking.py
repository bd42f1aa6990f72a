"""The errors of a model in private training, tracked in each of its forward passes."""

from __future__ import annotations

from functools import partial
from typing import Any, Mapping

import torch
from torch import Tensor, nn

from opacus_ext.re_attention.effective import (
    errors_of,
    gradient_noise,
    innermost,
    trained_names,
)
from opacus_ext.re_attention.propagation import (
    PART,
    STATE,
    TRACKER,
    Errors,
    Propagating,
    Uncertain,
    refused,
)
from opacus_ext.refused import Refused

PREFIX = "re_attention."
PLACES = ("logits", "scores")


def track_errors(
    model: nn.Module,
    optimizer: Any = None,
    shares: Tensor | Mapping[str, Tensor] | None = None,
    *,
    where: str = "logits",
    cap: float | None = 1.0,
    evaluate: bool = True,
) -> "ErrorTracker":
    """
    Turns Re-Attention on: one call after ``make_private``.

    From then on every forward pass of the model carries the variance of the error that
    the noise of DP-SGD makes beside the values, from the parameters to the keys of each
    attention, which is corrected: in ``DPFormer``, and in a model of your own that is
    :class:`~opacus_ext.re_attention.Propagating` and has
    :class:`~opacus_ext.layers.SelfAttention` or
    :func:`~opacus_ext.layers.re_attention`. The noise multiplier, clipping norm and
    batch size are the optimizer's, at each step anew. What is computed for a sample
    depends on that sample only, so gradients stay exact in every mode.

    The shares and the noise become part of the model's ``state_dict`` (keys that begin
    with "re_attention."), so that they are in every checkpoint. A model that is not
    tracked refuses these keys: without the correction it would be another function.
    Call this function first, or ``detach`` before saving.

    Args:
        model: the model, or the wrapper that ``make_private`` returned
        optimizer: the DP optimizer, as ``make_private`` returned it; None to evaluate a
            model with the noise of a checkpoint that is loaded afterwards
        shares: by name of a parameter the shares p_i of samples that use its rows, see
            :func:`~opacus_ext.re_attention.token_shares`; a tensor if there is one
            embedding
            with that many rows. Without it all tokens have the same error
        where: "logits": <q, k> / sqrt(d) - |q|^2 sigma^2 / (2 d), before the softmax,
            so that weights sum to 1; "scores": the weights after the softmax are
            divided by exp(|q|^2 sigma^2 / (2 d)) and not normalized again, the paper to
            the letter
        cap: the most a key's variance may be in terms of the mean square of the key's
            elements: what is seen has the error in it and can't well be smaller. None
            for no bound
        evaluate: whether ``model.eval()`` keeps the correction

    Returns:
        The tracker: ``enabled`` and ``evaluate`` may be set at any time, ``detach``
        ends it.

    Raises:
        Refused: for unknown options or names, a model that is tracked already or does
            not state how errors pass it, or an optimizer without noise

    Example:
        >>> from opacus.optimizers import DPOptimizer
        >>> from opacus_ext.models import DPFormer
        >>> model = DPFormer(num_items=3, max_len=8, dropout=0.0)
        >>> _ = nn.init.normal_(model.embedding.weight)
        >>> adam = torch.optim.Adam(model.parameters())
        >>> private = DPOptimizer(
        ...     adam, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=10
        ... )
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> plain = model(ids)
        >>> shares = torch.tensor([0.0, 0.9, 0.1, 0.5])
        >>> tracker = track_errors(model, private, shares)
        >>> torch.equal(plain, model(ids))
        False
        >>> tracker.detach()
        >>> torch.equal(plain, model(ids))
        True
    """
    if where not in PLACES:
        raise Refused(
            f"where must be one of {PLACES}, not {where!r}.", parameter="where"
        )
    if cap is not None and not cap > 0:
        raise Refused(f"cap must be positive or None, not {cap}.", parameter="cap")
    tracker = ErrorTracker(innermost(model), optimizer, shares)
    tracker.where, tracker.cap, tracker.evaluate = where, cap, evaluate
    return tracker


class ErrorTracker:
    """
    See :func:`track_errors`.

    Attributes:
        enabled: whether it acts at all
        evaluate: whether it acts in evaluation
        where: "logits" or "scores"
        cap: the most a key's variance may be, in terms of the key's mean square
    """

    where = "logits"
    cap: float | None = 1.0
    enabled = evaluate = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        shares: Tensor | Mapping[str, Tensor] | None,
    ):
        if not hasattr(model, "propagate"):
            raise refused(model, "it does not state how errors pass it", STATE)
        if tracker_of(model) is not None:
            raise refused(
                model,
                "its errors are tracked already",
                "Detach that tracker first (tracker.detach()).",
            )
        if any(hasattr(p, "placements") for p in model.parameters()):
            raise refused(
                model,
                "its parameters are sharded by fully_shard",
                "Train it without, as with DDP.",
            )
        self._model = model
        self._optimizer = optimizer
        # Those that torch.func.functional_call puts in their place are not trained.
        self._parameters = dict(model.named_parameters())
        self._shares = _by_name(model, shares)
        self._noise: float | None = None
        self._errors: dict[str, Tensor] = {}
        self._state: Any = None  # of which these are the variances
        self._started = False
        if optimizer is not None:
            self._update(model)  # what can't be used is refused here
        for part in model.modules():
            if isinstance(part, Propagating):
                setattr(part, PART, self)
        setattr(model, TRACKER, self)
        self._handles = [
            model.register_state_dict_post_hook(partial(self._save)),  # torch marks it
            model._register_load_state_dict_pre_hook(self._load),
            model.register_forward_hook(self._check_used),
        ]

    def detach(self) -> None:
        """Ends the tracking: the model is as it was before."""
        for handle in self._handles:
            handle.remove()
        for part in self._model.modules():
            for name in (TRACKER, PART):
                if vars(part).get(name) is self:
                    delattr(part, name)

    def acts(self, training: bool) -> bool:
        """Returns True if attention is corrected."""
        return self.enabled and (training or self.evaluate)

    def errors(self) -> dict[str, Tensor]:
        """The effective errors at this moment, by names of parameters."""
        self._update(self._model)
        return self._errors

    def start(self, model: nn.Module) -> Errors:
        """Begins a forward pass of the model, or of a copy."""
        self._started = True
        self._update(model)
        variances = {}
        for name, p in model.named_parameters():
            if name in self._errors:
                dtype = torch.promote_types(p.dtype, torch.float32)
                variance = self._errors[name].square().to(p.device, dtype)
                variances[id(p)] = variance[:, None] if variance.dim() else variance
        return Errors(variances, self.where, self.cap)

    def _check_used(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Refuses a forward pass that left the correction out."""
        if isinstance(output, Uncertain):  # as a part of a model that is tracked
            return
        started, self._started = self._started, False
        if not started and self.acts(model.training):
            raise refused(
                model,
                "its errors are tracked, and its forward pass does not use its "
                "method propagate",
                "Call opacus_ext.re_attention.propagated(self, x) in forward, or "
                "detach the tracker.",
            )

    def _update(self, model: nn.Module) -> None:
        """Computes the variances of the parameters anew if something has changed."""
        if self._optimizer is not None:
            self._noise = gradient_noise(self._optimizer)
        noise = self._noise
        if noise is None:
            raise Refused(
                "No noise is known.",
                parameter="optimizer",
                remedy="Pass the optimizer to track_errors, or load a state_dict of a "
                "tracked model.",
            )
        optimizer = noise if self._optimizer is None else self._optimizer
        trained = trained_names(self._parameters, optimizer)
        if self._state == (noise, trained):
            return
        if self._optimizer is None and not trained:
            raise refused(
                model,
                "its parameters are all frozen, so that none of them has an error",
                "Leave requires_grad as in training, and evaluate in torch.no_grad().",
            )
        now = model.named_parameters()
        params = {name: p for name, p in now if name in self._parameters}
        self._errors = errors_of(params, noise, trained, self._shares)
        self._state = noise, trained

    # -- state ---------------------------------------------------------------------

    def _save(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        if self._optimizer is not None:
            self._noise = gradient_noise(self._optimizer)
        if self._noise is not None:
            noise = torch.tensor(self._noise, dtype=torch.float64)
            state[prefix + PREFIX + "noise"] = noise
        for name, shares in self._shares.items():
            state[f"{prefix}{PREFIX}shares.{name}"] = shares

    def _load(self, state: Any, prefix: str, *args: Any) -> None:
        """Takes shares from a checkpoint, and the noise if there is no optimizer."""
        shares = {}
        for key in [key for key in state if key.startswith(prefix + PREFIX)]:
            kind, _, name = key.removeprefix(prefix + PREFIX).partition(".")
            saved = state.pop(key)
            if kind == "shares":
                shares[name] = saved
            elif self._optimizer is None:
                self._noise = float(saved)
        self._shares = shares or self._shares
        self._state = None

    def __deepcopy__(self, memo: Any) -> "ErrorTracker":
        # A copied model errs as the one in training does.
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise Refused(
            "A model whose errors are tracked can't be pickled.",
            remedy="Please save its state_dict, or detach the tracker first.",
        )


def tracker_of(model: nn.Module) -> ErrorTracker | None:
    """The tracker of a model, if its errors are tracked."""
    return getattr(innermost(model), TRACKER, None)


def _by_name(
    model: nn.Module, shares: Tensor | Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    if shares is None:
        return {}
    if not isinstance(shares, Tensor):
        return dict(shares)
    rows = {
        f"{name}.weight".lstrip(".")
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings == len(shares)
    }
    if len(rows) != 1:
        raise Refused(
            f"{len(shares)} shares belong to one embedding of as many rows, and the "
            f"model has {len(rows)}: {sorted(rows)}.",
            parameter="shares",
            remedy="Pass them by name.",
        )
    return {rows.pop(): shares.detach()}

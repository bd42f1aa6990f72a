"""The errors of a model in private training, tracked in each of its forward passes."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Set, Union

import torch
from torch import Tensor, nn

from opacus_ext.re_attention.effective import (
    effective_errors,
    gradient_noise,
    innermost,
)
from opacus_ext.re_attention.passes import (
    TrackedForward,
    TrackedPass,
    active,
    corrected,
)
from opacus_ext.re_attention.table import Table
from opacus_ext.re_attention.variances import tensors
from opacus_ext.refused import Refused

PREFIX = "re_attention."
PLACES = ("logits", "scores")


def track_errors(
    model: nn.Module,
    optimizer: Any = None,
    shares: Union[None, Tensor, Mapping[str, Tensor]] = None,
    *,
    where: str = "logits",
    cap: Optional[float] = 1.0,
    evaluate: bool = True,
) -> "ErrorTracker":
    """
    Turns Re-Attention on: one call after ``make_private``.

    From then on every forward pass of the model tracks the error that the noise of
    DP-SGD makes, from the parameters to the keys of each attention, and attention that
    asks for it is corrected: :func:`opacus_ext.layers.re_attention`, ``SelfAttention``
    and ``DPFormer``, and any model of transformers after
    ``model.set_attn_implementation("re_attention")``. The noise multiplier, clipping
    norm and batch size are the optimizer's, at each step anew. What is computed for a
    sample depends on that sample only, so gradients stay exact in every mode.

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
        Refused: for unknown options or names, or a model that is tracked already
        Refused: for an optimizer without noise

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
    return ErrorTracker(model, optimizer, shares, where, cap, evaluate)


class ErrorTracker:
    """
    See :func:`track_errors`.

    Attributes:
        enabled: whether it acts at all
        evaluate: whether it acts in evaluation
        where: "logits" or "scores"
        cap: the most a key's variance may be, in terms of the key's mean square
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        shares: Union[None, Tensor, Mapping[str, Tensor]],
        where: str,
        cap: Optional[float],
        evaluate: bool,
    ):
        if where not in PLACES:
            raise Refused(
                f"where must be one of {PLACES}, not {where!r}.", parameter="where"
            )
        if cap is not None and not cap > 0:
            raise Refused(f"cap must be positive or None, not {cap}.", parameter="cap")
        model = innermost(model)
        if tracker_of(model) is not None:
            raise Refused(
                "The errors of this model are tracked already.",
                module=type(model).__name__,
                remedy="Detach that tracker first (tracker.detach()).",
            )
        self.where, self.cap, self.evaluate, self.enabled = where, cap, evaluate, True
        self._model = weakref.ref(model)
        self._optimizer = optimizer
        self._shares = _by_name(model, shares)
        self._noise = None if optimizer is None else gradient_noise(optimizer)
        self._errors: Dict[str, Tensor] = {}
        self._state: Any = None
        self._checked = False
        self._table = Table()  # a module may keep tensors from pass to pass
        if optimizer is not None:
            self._variances(model)  # what can't be used is refused here
        self._place = weakref.ref(TrackedForward(self, model))  # the model keeps it
        self._handles = [
            model.register_state_dict_post_hook(partial(self._save)),  # torch marks it
            model._register_load_state_dict_pre_hook(self._load),
        ]
        model._opacus_ext_errors = self

    def detach(self) -> None:
        """Ends the tracking: the model is as it was before."""
        for handle in self._handles:
            handle.remove()
        if (place := self._place()) is not None:
            place.remove()
        if (model := self._model()) is not None:
            vars(model).pop("_opacus_ext_errors", None)
        for module, tracker in list(corrected.items()):
            if tracker is self:
                del corrected[module]

    def acts(self, training: bool) -> bool:
        """Returns True if attention is corrected."""
        return self.enabled and (training or self.evaluate)

    def errors(self) -> Dict[str, Tensor]:
        """The effective errors at this moment, by names of parameters."""
        model = self._model()
        if self._optimizer is None or model is None:
            raise Refused(
                "There is no model in training whose errors are tracked.",
                remedy="Pass the optimizer to track_errors, and keep the model.",
            )
        return effective_errors(model, self._optimizer, self._shares)

    def _variances(self, model: nn.Module) -> Dict[str, Tensor]:
        """The variances of the parameters, computed again if something has changed."""
        trained, grads = self._model(), None
        if self._optimizer is not None:
            if trained is None:
                return self._errors  # a copy has outlived the model
            self._noise = gradient_noise(self._optimizer)
            grads = [p.requires_grad for p in trained.parameters()]
        if self._noise is None:
            raise Refused(
                "No noise is known.",
                parameter="optimizer",
                remedy="Pass the optimizer to track_errors, or load a state_dict of a "
                "tracked model.",
            )
        if self._state != (state := (self._noise, grads)):
            found = effective_errors(
                trained if self._optimizer else model,
                self._optimizer or self._noise,
                self._shares,
            )
            self._errors = {
                name: error.square().reshape(-1, 1) if error.dim() else error.square()
                for name, error in found.items()
            }
            self._state = state
        return self._errors

    # -- the model's forward -------------------------------------------------------

    def forward(self, model: nn.Module, plain: partial) -> Any:
        """Runs the model's own forward, and tracks its errors."""
        if active() is not None:
            raise Refused(
                f"{type(model).__name__} is tracked, and so is a model around it.",
                module=type(model).__name__,
                remedy="Detach one of their trackers.",
            )
        for name, x in (*((None, x) for x in plain.args), *plain.keywords.items()):
            if not (hasattr(x, "get_seq_length") and x.get_seq_length()):
                continue
            raise Refused(
                f"{type(model).__name__}: the errors of keys in a cache are not known.",
                module=type(model).__name__,
                parameter=name,
                remedy="Pass use_cache=False to the model, or to generate().",
            )
        known = self._variances(model)
        params = {
            id(p): known[n].to(p.device, torch.promote_types(p.dtype, torch.float32))
            for n, p in model.named_parameters()
            if n in known
        }
        mode = TrackedPass(self, params, self._table)
        with mode:
            output = plain()
        outs = list(output.values()) if isinstance(output, Mapping) else output
        for x in tensors(outs):  # the user's tensors have no errors
            self._table.discard(x)
        self._table.forget_memory()
        self._check(model, mode.asked)
        return output

    def _check(self, model: nn.Module, asked: List[Optional[nn.Module]]) -> None:
        if not asked:
            raise Refused(
                "The errors of this model are tracked, but no attention asked for "
                "them.",
                module=type(model).__name__,
                remedy="Models of transformers need "
                'set_attn_implementation("re_attention"), and where a version leaves '
                "out their parts, as 5.17 does with those of T5, so do these: "
                'model.encoder.set_attn_implementation("re_attention"). Those that '
                "compute attention in code of their own can't be corrected. Others "
                "need opacus_ext.layers.re_attention.",
            )
        if not self._checked and None not in asked:
            self._checked = True
            left = _attentions(model, {type(each) for each in asked})
            if left:
                warnings.warn(
                    f"No attention of {', '.join(left)} was corrected in the first "
                    "forward pass: it was not used, or does not ask for it."
                )

    # -- state ---------------------------------------------------------------------

    def _save(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        if self._optimizer is not None:
            self._noise = gradient_noise(self._optimizer)
        noise = float("nan") if self._noise is None else self._noise
        state[prefix + PREFIX + "noise"] = torch.tensor(noise, dtype=torch.float64)
        for name, shares in self._shares.items():
            state[f"{prefix}{PREFIX}shares.{name}"] = shares

    def _load(self, state: Any, prefix: str, *args: Any) -> None:
        """Takes shares from a checkpoint, and the noise if there is no optimizer."""
        start = prefix + PREFIX
        names = [name for name in state if name.startswith(start)]
        found = {name[len(start) :]: state.pop(name) for name in names}
        shares = {n[7:]: s for n, s in found.items() if n.startswith("shares.")}
        self._shares = shares or self._shares
        if "noise" in found and self._optimizer is None:
            self._noise = float(found["noise"])
        self._state = None

    def __deepcopy__(self, memo: Any) -> "ErrorTracker":
        # A copied model errs as the one in training does.
        return self

    def __getstate__(self) -> Dict[str, Any]:
        raise Refused(
            "A model whose errors are tracked can't be pickled.",
            remedy="Please save its state_dict, or detach the tracker first.",
        )


def tracker_of(model: nn.Module) -> Optional[ErrorTracker]:
    """The tracker of a model, if its errors are tracked."""
    return getattr(innermost(model), "_opacus_ext_errors", None)


def _attentions(model: nn.Module, corrected: Set[type]) -> List[str]:
    """Classes of modules that seem to be attention and are not among these."""
    found: Dict[str, None] = {}
    for module in model.modules():
        inner = list(module.modules())[1:]
        if any("Attention" in type(each).__name__ for each in inner):
            continue  # the inner ones count
        if "Attention" in type(module).__name__ and type(module) not in corrected:
            found[type(module).__name__] = None
    return list(found)


def _by_name(
    model: nn.Module, shares: Union[None, Tensor, Mapping[str, Tensor]]
) -> Dict[str, Tensor]:
    if shares is None:
        return {}
    if not isinstance(shares, Tensor):
        return {name: table.detach() for name, table in shares.items()}
    rows = {
        id(m.weight): f"{n}.weight" if n else "weight"
        for n, m in model.named_modules()
        if isinstance(m, nn.Embedding) and m.num_embeddings == len(shares)
    }
    if len(rows) != 1:
        raise Refused(
            f"{len(shares)} shares belong to one embedding of as many rows, and the "
            f"model has {len(rows)}: {list(rows.values())}.",
            parameter="shares",
            remedy="Pass them by name.",
        )
    return {next(iter(rows.values())): shares.detach()}

"""What programs that train share: the schedule, output and checkpoints."""

from __future__ import annotations

import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from opacus_ext import checkpoints
from opacus_ext.accountants import noise_left
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

Tensors = Union[List[torch.Tensor], Tuple[torch.Tensor, ...]]


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Linear warm-up to ``peak`` over a share ``warmup`` of the steps, then to zero."""
    rising = max(round(total * warmup), 1)
    return peak * min((step + 1) / rising, (total - step) / max(total - rising + 1, 1))


def moving_average(module: nn.Module, decay: float) -> AveragedModel:
    """
    A copy of a model with moving averages of its weights ("Unlocking high-accuracy
    differentially private image classification through scale", 2022, section 3).

    Call ``update_parameters(module)`` after each step, and evaluate and release
    ``.module``. Averages of what is private are as private: they cost no epsilon. Their
    ``state_dict`` belongs into the checkpoints.

    Args:
        module: the model itself, not what ``make_private`` returns
        decay: of the average, below 1. It begins lower, (1 + t) / (10 + t) after t
            steps, or short runs would average their first weights

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = moving_average(model, 0.9)
        >>> for weight in (0.0, 1.0):
        ...     _ = nn.init.constant_(model.weight, weight)
        ...     average.update_parameters(model)
        >>> round(average.module.weight.item(), 3)  # 1 - 2 / 11
        0.818
    """

    def average(averages: Tensors, weights: Tensors, t: Any) -> None:
        kept = min(decay, (1 + int(t)) / (10 + int(t)))
        torch._foreach_lerp_(averages, weights, 1 - kept)

    return AveragedModel(module, multi_avg_fn=average)


def make_private(
    engine: PrivacyEngine,
    saved: Optional[Dict[str, Any]],
    *,
    epsilon: float,
    delta: float,
    epochs: int,
    criterion: nn.Module,
    **kwargs: Any,
) -> Tuple[nn.Module, Any, Any, DataLoader]:
    """
    Makes a run private: a new one for a budget, with the noise it had if it goes on
    from a checkpoint. What the engine's accountant has recorded before is part of the
    budget.

    Args:
        saved: the checkpoint, or None
        kwargs: of ``make_private``

    Returns:
        Model, optimizer, criterion and loader.
    """
    kwargs["criterion"] = criterion
    if saved:
        made = engine.make_private(noise_multiplier=saved["noise_multiplier"], **kwargs)
    elif len(engine.accountant):
        rate = 1 / len(kwargs["data_loader"])
        # Not int(epochs / rate), which may be one too few: 3 epochs of 75 make 224.
        steps = epochs * len(kwargs["data_loader"])
        noise = noise_left(engine.accountant, epsilon, delta, rate, steps)
        made = engine.make_private(noise_multiplier=noise, **kwargs)
    else:
        made = engine.make_private_with_epsilon(
            target_epsilon=epsilon, target_delta=delta, epochs=epochs, **kwargs
        )
    # Modes with a criterion of their own return it as the third of four.
    model, optimizer, *wrapped, loader = made
    return model, optimizer, wrapped[0] if wrapped else criterion, loader


def ignore_standing_warnings() -> None:
    """
    Switches off what Opacus always warns of, and what says nothing of these runs: that
    the noise is not of a secure generator (a seed is an argument, and the programs'
    help says what that means), and the edges of the accountants' numerical grids.
    """
    for message in ("Secure RNG turned off", "Optimal order is the"):
        warnings.filterwarnings("ignore", message)
    warnings.filterwarnings(
        "ignore", "divide by zero", RuntimeWarning, "opacus.accountants"
    )


def announce(
    optimizer: Any, epochs: int, epoch_steps: int, epsilon: float, delta: float
) -> None:
    """Says on the standard error what is about to be done."""
    print(
        f"training {epochs} epochs of {epoch_steps} steps, noise multiplier "
        f"{optimizer.noise_multiplier:.3f}, for epsilon {epsilon:g} at delta "
        f"{delta:.3g}",
        file=sys.stderr,
    )


class Progress:
    """
    On the standard error: a bar of the steps where that is a terminal, else a line an
    epoch.

    Args:
        step: where the run begins
        total: steps of the whole run
        epoch_steps: of an epoch
        show: False for neither

    Example:
        >>> from contextlib import redirect_stderr
        >>> with redirect_stderr(sys.stdout), Progress(0, 4, 2) as bar:
        ...     for loss in (3.0, 2.0, 1.5, 0.5):  # doctest: +ELLIPSIS
        ...         bar.update(loss)
        epoch 1 of 2, loss 2.500, ... s
        epoch 2 of 2, loss 1.000, ... s
    """

    def __init__(self, step: int, total: int, epoch_steps: int, show: bool = True):
        self.step, self.total, self.epoch_steps = step, total, epoch_steps
        self.start = time.monotonic()
        self.losses: List[float] = []
        bar: Any = {"initial": step, "total": total, "unit": "step", "delay": 0}
        self.bar = progress(show=show, leave=True, **bar)
        self.lines = show and self.bar.disable

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def update(self, loss: float) -> None:
        """After a step; of a Poisson batch ``loss`` is that of its last part."""
        self.step += 1
        self.losses.append(loss)
        epochs = math.ceil(self.total / self.epoch_steps)
        epoch = f"epoch {math.ceil(self.step / self.epoch_steps)} of {epochs}"
        self.bar.set_postfix_str(f"{epoch}, loss {loss:.3f}", refresh=False)
        self.bar.update()
        if self.step % self.epoch_steps and self.step != self.total:
            return
        if self.lines:
            mean = sum(self.losses) / len(self.losses)
            seconds = time.monotonic() - self.start
            print(f"{epoch}, loss {mean:.3f}, {seconds:.0f} s", file=sys.stderr)
        self.losses.clear()


def write_checkpoint(
    path: str,
    module: nn.Module,
    optimizer: Any,
    content: Dict[str, Any],
    engine: Optional[PrivacyEngine] = None,
) -> None:
    """
    Writes a checkpoint in one piece: the old one stays until the new is whole.

    It holds ``content``, the random state, the weights and the optimizer; with an
    engine also the accountant's history and the noise multiplier, and
    ``engine.load_checkpoint`` reads it.
    """
    random_state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state["cuda"] = torch.cuda.get_rng_state()
    content = {**content, "random_state": random_state}
    if engine:
        engine.save_checkpoint(
            path=path,
            module=module,
            optimizer=optimizer,
            checkpoint_dict={**content, "noise_multiplier": optimizer.noise_multiplier},
        )
    else:
        content["module_state_dict"] = module.state_dict()
        content["optimizer_state_dict"] = optimizer.state_dict()
        checkpoints.write(path, content)


def set_random_state(state: Dict[str, torch.Tensor]) -> None:
    """Goes back to the random state of a checkpoint."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def find_checkpoint(
    path: Optional[str], resume: bool, config: Dict[str, Any]
) -> Optional[Dict[str, Any]]:
    """
    The checkpoint to resume from, once it is known to fit; None for a new run.

    Args:
        path: where it is, or where the new run will write it
        resume: whether it was asked for
        config: what must be the same as when it was written (its "config")

    Raises:
        OSError: if there is none to resume from
        Refused: if a new run would overwrite one, or it belongs to another run; the
            message says what differs
    """
    if not resume:
        if path and Path(path).exists():
            raise Refused(
                f"{path} exists.",
                parameter="--checkpoint",
                remedy="Add --resume to go on from it; starting anew over it would "
                "forget the privacy already spent.",
            )
        return None
    if not path:
        raise Refused(
            "--resume needs --checkpoint PATH.",
            parameter="--resume",
            remedy="Give the file to go on from.",
        )
    # A file that would run code on loading is refused here already.
    saved = checkpoints.read(path, "--resume", map_location="cpu")
    before = saved["config"]
    changed = "; ".join(
        f"{key}: {before.get(key)!r} there, {config.get(key)!r} here"
        for key in sorted(before.keys() | config.keys())
        if before.get(key) != config.get(key)
    )
    if changed:
        raise Refused(
            f"{path} belongs to another run; these must be the same: {changed}.",
            parameter="--resume",
            remedy="Give the arguments that it was written with, or another file.",
        )
    return saved

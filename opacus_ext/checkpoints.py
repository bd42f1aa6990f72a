"""Checkpoints of private runs: complete, read without running code, accounted for."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any, Dict, Optional

import opacus
import torch

from opacus_ext.ledger import LEDGER, is_drawn, ledger_of
from opacus_ext.refused import Refused
from opacus_ext.runs import ACCOUNTANT, RUNS, add_runs, spent_by

#: The key of a checkpoint for the state that noise is drawn from.
NOISE = "opacus_ext_noise"
_PARTS = ("module_state_dict", ACCOUNTANT)


def write(path: Any, content: Dict[str, Any], **kwargs: Any) -> None:
    """
    Saves plain values and tensors. The old file is replaced once the new one is on the
    disk. So if the process is killed, or the disk is full, the old file stays.

    Args:
        path: of the file, or a file object, which is just written to
        content: :func:`read` returns it
        kwargs: of ``torch.save``
    """
    if hasattr(path, "write"):
        torch.save(content, path, **kwargs)
        return
    path = os.path.realpath(path)
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            torch.save(content, file, **kwargs)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.remove(part)  # or it would fill the disk
        raise


def read(path: Any, parameter: str = "path", **kwargs: Any) -> Dict[str, Any]:
    """
    Reads plain values and tensors. Code in the file is not run.

    Args:
        path: of the file, or a file object
        parameter: the argument that an error names
        kwargs: of ``torch.load``

    Raises:
        OSError: if there is no such file
        Refused: for a file that was cut short, or holds other objects
    """
    if not kwargs.pop("weights_only", True):
        raise Refused(
            "weights_only=False runs whatever code is in the file.",
            parameter=parameter,
            remedy="Leave it out, and let objects of yours through by "
            "torch.serialization.add_safe_globals.",
        )
    if not hasattr(path, "read"):
        open(path, "rb").close()  # a missing file gets its own error
    try:
        return torch.load(path, weights_only=True, **kwargs)
    except Exception as error:  # unpickling raises any kind, as the bytes have it
        raise Refused(
            f"{path} can't be read: it was cut short, is no checkpoint, or holds other "
            "objects than tensors and plain values.",
            parameter=parameter,
            remedy="Take the checkpoint before it. Objects of yours are let through by "
            "torch.serialization.add_safe_globals([...]).",
        ) from error


def save_checkpoint(
    self: opacus.PrivacyEngine,
    *,
    path: Any,
    module: Any,
    optimizer: Any = None,
    noise_scheduler: Any = None,
    grad_clip_scheduler: Any = None,
    checkpoint_dict: Optional[Dict[str, Any]] = None,
    module_state_dict_kwargs: Optional[Dict[str, Any]] = None,
    torch_save_kwargs: Optional[Dict[str, Any]] = None,
) -> None:
    """
    ``PrivacyEngine.save_checkpoint``, with the record of what was made private, and
    with the state that the optimizer's noise is drawn from. Whoever has the file
    can subtract the noise: publish the weights alone. An existing file is replaced
    once the new one is complete.
    """
    content = {
        **(checkpoint_dict or {}),
        **spent_by(self),
        "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {})),
    }
    if hasattr(optimizer, "noise_state"):
        content[NOISE] = optimizer.noise_state()
    given = _others(optimizer, noise_scheduler, grad_clip_scheduler)
    for name, other in given.items():
        if other is not None:
            content[name] = other.state_dict()
    write(path, content, **(torch_save_kwargs or {}))


def load_checkpoint(
    self: opacus.PrivacyEngine,
    *,
    path: Any,
    module: Any,
    optimizer: Any = None,
    noise_scheduler: Any = None,
    grad_clip_scheduler: Any = None,
    module_load_dict_kwargs: Optional[Dict[str, Any]] = None,
    torch_load_kwargs: Optional[Dict[str, Any]] = None,
    repeat_noise: bool = False,
) -> Dict[str, Any]:
    """
    ``PrivacyEngine.load_checkpoint``, without running code in the file. If loading
    fails in the middle, the model's weights may come from both runs, so the steps
    of both are counted. From then on, everything that the engine has made private, or
    makes private later, draws new noise and new records, whether the optimizer is
    passed or not.

    Args:
        repeat_noise: True resumes the run bit for bit, with the noise that it would
            have had. Two runs that resume one checkpoint then have the same noise:
            the difference of their weights has none, and no epsilon covers that.
            By default noise is drawn afresh

    Raises:
        Refused: for a file that was cut short, is no checkpoint, or holds objects
            other than tensors and plain values; for a checkpoint of another
            accountant; with ``repeat_noise``, for one without the state of the noise
    """
    content = read(path, **(torch_load_kwargs or {}))
    if not isinstance(content, dict) or not all(x in content for x in _PARTS):
        raise Refused(
            f"{path} is no checkpoint of PrivacyEngine.save_checkpoint.",
            parameter="path",
            remedy="Give one that has both weights and what they have spent.",
        )
    noise = content.pop(NOISE, None)
    if repeat_noise and (noise is None or not hasattr(optimizer, "repeat_noise")):
        raise Refused(
            "The checkpoint was saved, or is loaded, without a DP optimizer, so "
            "that its noise can't be repeated.",
            parameter="repeat_noise",
            remedy="Pass optimizer= to save_checkpoint and load_checkpoint.",
        )
    spent = content[ACCOUNTANT]
    _count_both(self.accountant, spent)
    weights = content["module_state_dict"]
    module.load_state_dict(weights, **(module_load_dict_kwargs or {}))
    ledger = ledger_of(self)
    ledger.repeats = repeat_noise
    ledger.go_back(optimizer)
    given = _others(optimizer, noise_scheduler, grad_clip_scheduler)
    for name, other in given.items():
        state = content.pop(name, {})
        if other is not None and state:
            other.load_state_dict(state)
        elif other is optimizer and (other is not None or state):
            warnings.warn(
                f"The checkpoint has {'a' if state else 'no'} state of an "
                f"optimizer, and {'an' if other else 'no'} optimizer is given."
            )
    if repeat_noise:
        optimizer.repeat_noise(noise)
    elif hasattr(optimizer, "mix_noise"):
        optimizer.mix_noise()
    self.accountant.load_state_dict(spent)
    ledger.go_on(self.accountant.history)
    ledger.load_state_dict(content.pop(LEDGER, {}))
    add_runs(self, content.get(RUNS, []))
    if RUNS not in content and any(
        is_drawn(noise, rate) for noise, rate, _ in spent["history"]
    ):
        ledger.unrecorded = True  # of plain Opacus
    return content


def _others(optimizer: Any, noise: Any, clipping: Any) -> Dict[str, Any]:
    """Optional parts of a checkpoint beside the model, by Opacus's names."""
    return {
        "optimizer_state_dict": optimizer,
        "noise_scheduler_state_dict": noise,
        "grad_clip_scheduler_state_dict": clipping,
    }


def _count_both(accountant: Any, spent: Dict[str, Any]) -> None:
    """
    Adds the steps of a checkpoint to those that were counted before.

    Raises:
        Refused: if it is of another accountant; then nothing changes
    """
    kind, own = spent["mechanism"], accountant.mechanism()
    if kind != own:
        raise Refused(
            f'The checkpoint was written with the accountant "{kind}", and the engine '
            f'has "{own}".',
            parameter="accountant",
            remedy=f'Load it by PrivacyEngine(accountant="{kind}").',
        )
    trial = copy.copy(accountant)
    trial.load_state_dict(copy.deepcopy(spent))
    accountant.history = [*accountant.history, *trial.history]

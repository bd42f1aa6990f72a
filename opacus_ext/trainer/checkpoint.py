"""The privacy of a run in a checkpoint's folder."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Optional

from transformers.trainer import TRAINER_STATE_NAME

from opacus_ext import checkpoints
from opacus_ext.accountants.mechanisms import from_json, to_json
from opacus_ext.refused import Refused
from opacus_ext.statement import SPENT

PRIVACY_STATE = "privacy.pt"  # in a checkpoint's folder
_NOISE = "noise_{}.pt"  # the same, of each process


def write_state(folder: str, state: Dict[str, Any]) -> None:
    """Writes the privacy state in one piece, so that the file is never incomplete."""
    checkpoints.write(os.path.join(folder, PRIVACY_STATE), state)


def forget_state(folder: str) -> None:
    """Removes what would not belong to the weights that are written next."""
    for name in (PRIVACY_STATE, SPENT):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            os.remove(path)


def write_spent(folder: str, spent: Dict[str, Any]) -> None:
    """Writes what weights have spent, for statements. It may be published."""
    with open(os.path.join(folder, SPENT), "w", encoding="utf-8") as file:
        json.dump(to_json(spent), file, indent=2)


def read_spent(folder: str) -> Dict[str, Any]:
    """Returns what the weights in a folder have spent; nothing if it does not say."""
    path = os.path.join(folder, SPENT)
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file, object_hook=from_json)


def read_state(folder: str) -> Dict[str, Any]:
    """Reads the privacy state of a checkpoint. Refuses an incomplete checkpoint."""
    path = os.path.join(folder, PRIVACY_STATE)
    if not os.path.isfile(path):
        raise Refused(
            f"{folder} has no {PRIVACY_STATE}: it was not written by PrivateTrainer, "
            "or with save_only_model, or the process was killed while it wrote. How "
            "much privacy its weights have spent is not known, so it can't go on.",
            parameter="resume_from_checkpoint",
            remedy="Give the checkpoint before it. To train a model with its weights "
            "anew, load it by from_pretrained.",
        )
    saved = checkpoints.read(path, "resume_from_checkpoint", map_location="cpu")
    step = _step_of(folder)
    if step != saved["step"]:
        raise Refused(
            f"{folder} has {PRIVACY_STATE} of step {saved['step']}, and "
            f"{TRAINER_STATE_NAME} of {'none' if step is None else step}: the process "
            "was killed while it wrote, or files of several checkpoints are mixed.",
            parameter="resume_from_checkpoint",
            remedy="Give the checkpoint before it.",
        )
    return saved


def write_noise(folder: str, process: int, state: Dict[str, Any]) -> None:
    """Writes what the next steps of a process take back."""
    os.makedirs(folder, exist_ok=True)  # process 0 may be late
    checkpoints.write(os.path.join(folder, _NOISE.format(process)), state)


def read_noise(folder: str, process: int) -> Dict[str, Any]:
    """Reads what :func:`write_noise` wrote. Refuses a folder of fewer processes."""
    path = os.path.join(folder, _NOISE.format(process))
    if not os.path.isfile(path):
        raise Refused(
            f"{path} is missing: the checkpoint was written by fewer processes, or not "
            "to a folder that all of them share, and correlated noise of a sharded "
            "model belongs to shards.",
            parameter="resume_from_checkpoint",
            remedy="Go on with as many processes as before, whose folder they share.",
        )
    return checkpoints.read(path, "resume_from_checkpoint", map_location="cpu")


def _step_of(folder: str) -> Optional[int]:
    """Returns the step in the file that Trainer writes last; None if there is none."""
    try:
        with open(os.path.join(folder, TRAINER_STATE_NAME), encoding="utf-8") as file:
            return json.load(file).get("global_step")
    except (OSError, ValueError):
        return None

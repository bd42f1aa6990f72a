"""The privacy of a run in a checkpoint's folder."""

from __future__ import annotations

import os
from typing import Any, Dict

import torch

from opacus_ext.refused import Refused

PRIVACY_STATE = "privacy.pt"  # in a checkpoint's folder


def write_state(folder: str, state: Dict[str, Any]) -> None:
    """Writes the privacy state in one piece: a file that is there is whole."""
    path = os.path.join(folder, PRIVACY_STATE)
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def read_state(folder: str, config: Dict[str, Any]) -> Dict[str, Any]:
    """
    The privacy state of a checkpoint, if it belongs to a run with the same settings.

    Args:
        folder: of the checkpoint
        config: settings that must be what they were (the state's "config")

    Raises:
        Refused: if there is no state, or it belongs to another run
    """
    path = os.path.join(folder, PRIVACY_STATE)
    if not os.path.isfile(path):
        raise Refused(
            f"{folder} has no {PRIVACY_STATE}: it was not written by PrivateTrainer, "
            "or with save_only_model. How much privacy its weights have spent is not "
            "known, so it can't go on.",
            parameter="resume_from_checkpoint",
            remedy="To train a model with them anew, load it by from_pretrained.",
        )
    saved = torch.load(path, map_location="cpu", weights_only=True)
    before = saved["config"]
    changed = "; ".join(
        f"{name}: {before.get(name)!r} there, {config.get(name)!r} here"
        for name in sorted(before.keys() | config.keys())
        if before.get(name) != config.get(name)
    )
    if changed:
        raise Refused(
            f"{folder} belongs to another run; these must be the same: {changed}.",
            parameter="resume_from_checkpoint",
            remedy="Give the settings that it was written with, or train anew.",
        )
    return saved

"""transformers' Trainer with differential privacy.

It needs transformers and accelerate (``pip install opacus_ext[trainer]``), so
``import opacus_ext`` leaves it out.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "opacus_ext.trainer takes transformers: pip install opacus_ext[trainer]"
    ) from error

from opacus_ext.trainer.arguments import PrivacyArguments
from opacus_ext.trainer.checkpoint import PRIVACY_STATE
from opacus_ext.trainer.trainer import PrivateTrainer

__all__ = ["PRIVACY_STATE", "PrivacyArguments", "PrivateTrainer"]

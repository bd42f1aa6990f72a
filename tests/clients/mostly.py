"""mostlyai-engine's four kinds of models, through its public ``engine.train``."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from mostlyai import engine

from tests.clients.weights import NOISE, llama, tokenizer, weights

PRIVACY = {
    "max_epsilon": None,
    "delta": 1e-3,
    "noise_multiplier": NOISE,
    "max_grad_norm": 1.0,
    "value_protection_epsilon": None,
}


def train(workspace, tables, **options):
    """The weights that the engine saves; those before training are in no file."""
    engine.set_random_state(0)
    engine.split(**tables, workspace_dir=workspace)
    engine.analyze(value_protection=False, workspace_dir=workspace)
    engine.encode(workspace_dir=workspace)
    engine.train(
        workspace_dir=workspace,
        max_epochs=2,
        batch_size=8,
        differential_privacy=PRIVACY,
        device="cpu",
        **options,
    )


def saved(workspace):
    from safetensors.torch import load_file

    found = {}
    for path in sorted(Path(workspace).rglob("*model*")):
        if path.suffix in (".pt", ".bin"):
            found |= torch.load(path, map_location="cpu", weights_only=True)
        elif path.suffix == ".safetensors":
            found |= load_file(path)
    assert found, sorted(Path(workspace).rglob("*"))
    return found


def run(tables, **options):
    with tempfile.TemporaryDirectory() as workspace:
        train(workspace, tables, **options)
        return None, saved(workspace)


def people(rows=48):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": range(rows),
            "color": random.choice(["red", "green", "blue"], rows),
            "age": random.integers(20, 60, rows),
        }
    )


def without_dropout(p=0.0, inplace=False):
    """The package draws dropout for each sample, Opacus alone for the batch."""
    return torch.nn.Identity()


def tabular():
    """With columns in one order, which it would draw in each forward pass."""
    torch.nn.Dropout = without_dropout
    table = people().drop(columns="id")
    options = dict(model="MOSTLY_AI/Small", enable_flexible_generation=False)
    return run({"tgt_data": table, "model_type": "TABULAR"}, **options)


def sequential():
    """Visits of people; draws of no person set ``grad_sample`` by hand."""
    random = np.random.default_rng(1)
    visits = pd.DataFrame(
        {
            "person": random.integers(0, 48, 120),
            "place": random.choice(["home", "work", "park"], 120),
        }
    )
    tables = {
        "tgt_data": visits,
        "ctx_data": people(),
        "tgt_context_key": "person",
        "ctx_primary_key": "id",
        "model_type": "TABULAR",
    }
    return run(tables, model="MOSTLY_AI/Small")


def texts():
    """Each a word."""
    random = np.random.default_rng(2)
    words = np.array(["dog", "cat", "cow", "pig"])
    return pd.DataFrame({"text": [random.choice(words) for _ in range(40)]})


def language(**options):
    kind = {"text": "LANGUAGE_TEXT"}
    tables = {"tgt_data": texts(), "tgt_encoding_types": kind, "model_type": "LANGUAGE"}
    return run(tables, **options)


def language_lstm():
    """Words of one length: the loss is a mean over all tokens of the batch."""
    from mostlyai.engine._language import lstm

    default = lstm.LSTMFromScratchConfig.__init__

    def without_dropout(self, *args, **others):
        default(self, *args, **others)
        self.dropout = 0.0

    lstm.LSTMFromScratchConfig.__init__ = without_dropout
    return language(model="MOSTLY_AI/LSTMFromScratch-3m")


def language_llama():
    """A Llama with LoRA, ``wrap_model=False`` and ``GradSampleHooks.cleanup``."""
    from transformers.integrations import peft

    peft.MIN_PEFT_VERSION = "0.21.0"  # which the registry has; transformers wants 0.22
    with tempfile.TemporaryDirectory() as folder:
        words = tokenizer(texts()["text"])
        model = llama(vocab_size=len(words))
        model.save_pretrained(folder)
        words.save_pretrained(folder)
        _, after = language(model=folder)
        assert any("lora" in name for name in after) and weights(model)
        return None, after

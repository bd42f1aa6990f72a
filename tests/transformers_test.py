"""Models of transformers as they ship, tiny and called plainly, in every mode.

No position ids, masks or type ids are given: the models make their own, without a
batch dimension. The weights are random and the heads tied as each model ties them.
"""

import pytest
import torch
from torch.nn import functional as F

from tests.common import (
    check,
    every_mode,
    exact_or_refused,
    next_token_loss,
    wrapped_or_not,
)

transformers = pytest.importorskip("transformers")

V, D = 47, 16


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V,
            n_embd=D,
            n_layer=2,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    )


def _bert_like(kind):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return getattr(transformers, f"{kind}ForMaskedLM")(config)


def bert():
    return _bert_like("Bert")


def roberta():
    return _bert_like("Roberta")


def opt():
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=V,
            hidden_size=D,
            word_embed_proj_dim=D,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            use_cache=False,
        )
    )


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=V,
            d_model=D,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def bart():
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=V,
            d_model=D,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            use_cache=False,
        )
    )


models = pytest.mark.parametrize(
    "build", [gpt2, bert, roberta, opt, t5, bart], ids=lambda build: build.__name__
)


def model_of(build):
    torch.manual_seed(3)
    model = build().double().train()
    # Away from the small initial values, so that no gradient is nearly linear.
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def batch_of(build, B, T):
    # 0 to 2 are special tokens: padding in the middle is the models' own business
    ids = torch.randint(3, V, (B, T))
    if build in (t5, bart):
        return {"input_ids": ids, "decoder_input_ids": torch.randint(3, V, (B, T - 1))}
    return {"input_ids": ids}


def loss_fn(model, batch):
    targets = batch.get("decoder_input_ids", batch["input_ids"])
    return next_token_loss(model(**batch).logits, targets)


def check_model(mode, wrap, build, batch, loss=loss_fn):
    # T5's norm takes its variance in float32, whatever the model runs in.
    tolerance = 1e-6 if build is t5 else 1e-8
    check(mode, wrap, model_of(build), batch, loss, tolerance=tolerance)


@every_mode
@wrapped_or_not
@models
def test_called_plainly(mode, wrap, build):
    check_model(mode, wrap, build, batch_of(build, 4, 6))


@every_mode
@models
@pytest.mark.parametrize("B, T", [(5, 5), (1, 5), (4, 5)])
def test_coincidences(mode, build, B, T):
    """T = B; B = 1; and the decoder's T - 1 = B."""
    check_model(mode, True, build, batch_of(build, B, T))


@every_mode
@models
def test_padded(mode, build):
    """With an attention mask, and losses that leave the padding out."""
    batch = batch_of(build, 4, 6)
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = 0
    mask[2, 2:] = 0
    batch["attention_mask"] = mask

    def masked_loss(model, batch):
        logits = model(**batch).logits
        targets = batch.get("decoder_input_ids", batch["input_ids"])
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        kept = batch["attention_mask"][:, : losses.size(1)]
        return (losses * kept).sum(dim=1) / kept.sum(dim=1)

    check_model(mode, True, build, batch, masked_loss)


@every_mode
@models
def test_body_frozen(mode, build):
    """Fine-tuning norms and biases alone."""
    model = model_of(build)
    for name, p in model.named_parameters():
        p.requires_grad = "bias" in name or "norm" in name.lower()
    tolerance = 1e-6 if build is t5 else 1e-8
    check(mode, True, model, batch_of(build, 4, 6), loss_fn, tolerance=tolerance)


@every_mode
def test_classifier(mode):
    """BERT's classifier: pooler and token types, all of them without a batch dim."""
    torch.manual_seed(3)
    config = bert().config
    config.num_labels = 3
    model = transformers.BertForSequenceClassification(config).double().train()
    batch = {
        "input_ids": torch.randint(3, V, (4, 6)),
        "targets": torch.randint(0, 3, (4,)),
    }

    def class_loss(model, batch):
        logits = model(batch["input_ids"]).logits
        return F.cross_entropy(logits, batch["targets"], reduction="none")

    check(mode, True, model, batch, class_loss)


@every_mode
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("kwargs", [{"use_reentrant": True}, {"use_reentrant": False}])
def test_gradient_checkpointing(mode, kwargs):
    model = model_of(gpt2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    check(mode, False, model, batch_of(gpt2, 4, 6), loss_fn)


_COMMON = dict(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=20,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_OTHERS = {
    "Llama": ("CausalLM", dict(num_key_value_heads=1)),
    "Mistral": ("CausalLM", dict(num_key_value_heads=1)),
    "Qwen2": ("CausalLM", dict(num_key_value_heads=1)),
    "Gemma": ("CausalLM", dict(num_key_value_heads=1, head_dim=8)),
    "Phi": ("CausalLM", dict(embd_pdrop=0.0, resid_pdrop=0.0)),
    "GPTNeoX": ("CausalLM", dict()),
    "GPTNeo": (
        "CausalLM",
        dict(
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            embed_dropout=0.0,
            resid_dropout=0.0,
            attention_dropout=0.0,
            num_heads=2,
        ),
    ),
    "Bloom": ("CausalLM", dict(n_layer=2, n_head=2, hidden_dropout=0.0)),
    "Albert": ("MaskedLM", dict(embedding_size=8)),
    "Electra": ("MaskedLM", dict(embedding_size=8)),
    "DistilBert": (
        "MaskedLM",
        dict(
            dim=D,
            hidden_dim=24,
            n_layers=2,
            n_heads=2,
            dropout=0.0,
            attention_dropout=0.0,
        ),
    ),
    "Deberta": ("MaskedLM", dict(relative_attention=True, pos_att_type=["p2c", "c2p"])),
}


@every_mode
@pytest.mark.parametrize("name", list(_OTHERS))
@pytest.mark.parametrize("B, T", [(4, 6), (5, 5)])
def test_other_models(mode, name, B, T):
    """Models that the package names nowhere: exact, or refused with a reason."""
    head, changes = _OTHERS[name]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    # Norms and rotary embeddings compute in float32 whatever the model's type.
    batch = {"input_ids": torch.randint(3, V, (B, T))}
    exact_or_refused(mode, True, model.train(), batch, loss_fn, [""], tolerance=1e-3)

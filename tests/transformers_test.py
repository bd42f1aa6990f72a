"""Models of transformers as they ship, tiny and called plainly, in every mode.

No position ids or type ids are given: the models make their own, without a batch
dimension. The heads are tied as each model ties them.
"""

import pytest

pytest.importorskip("transformers")

from tests import tiny  # noqa: E402
from tests.common import check, layer_modes  # noqa: E402
from tests.compatibility import (  # noqa: E402
    all_double,
    batch_of,
    check_class,
    loss_fn,
)

CAUSAL, MASKED = "causal-lm", "masked-lm"
MODELS = {
    "gpt2": (CAUSAL, "gpt2", "GPT2LMHeadModel"),
    "bert": (MASKED, "bert", "BertForMaskedLM"),
    "classifier": ("sequence-classification", "bert", "BertForSequenceClassification"),
    "roberta": (MASKED, "roberta", "RobertaForMaskedLM"),
    "opt": (CAUSAL, "opt", "OPTForCausalLM"),
    "t5": ("seq2seq-lm", "t5", "T5ForConditionalGeneration"),
    "bart": ("seq2seq-lm", "bart", "BartForConditionalGeneration"),
    "llama": (CAUSAL, "llama", "LlamaForCausalLM"),
    "qwen2": (CAUSAL, "qwen2", "Qwen2ForCausalLM"),
    "gemma": (CAUSAL, "gemma", "GemmaForCausalLM"),
    "gpt_neo": (CAUSAL, "gpt_neo", "GPTNeoForCausalLM"),
    "gpt_neox": (CAUSAL, "gpt_neox", "GPTNeoXForCausalLM"),
    "bloom": (CAUSAL, "bloom", "BloomForCausalLM"),
    "albert": (MASKED, "albert", "AlbertForMaskedLM"),
    "distilbert": (MASKED, "distilbert", "DistilBertForMaskedLM"),
    "deberta": (MASKED, "deberta", "DebertaForMaskedLM"),
}
FIRST = ["gpt2", "classifier", "t5", "bart"]


def look(name, form="whole", **kwargs):
    result, reason, _ = check_class(*MODELS[name], form, **kwargs)
    assert (result, reason) == ("exact", "")


@layer_modes
@pytest.mark.parametrize("name", MODELS)
def test_called_plainly(mode, name):
    """Padded, with T = B, and a single sample."""
    look(name, modes=(mode,))


@layer_modes
@pytest.mark.parametrize("form", ["half frozen", "embeddings frozen"])
@pytest.mark.parametrize("name", FIRST)
def test_partly_frozen(mode, form, name):
    look(name, form, modes=(mode,), kinds=("padded",))


@layer_modes
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(mode, reentrant):
    with all_double():
        model = tiny.build(*MODELS["gpt2"]).double()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        batch = batch_of(model, CAUSAL, "padded")
        check(mode, False, model, batch, loss_fn)

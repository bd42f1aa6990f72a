"""Fine-tuning from the command line's arguments, on a tiny Switch saved to disk; runs
that go on, and what is refused, in example_runs_test.py."""

import math
from unittest.mock import patch

import pytest
import torch
from opacus.accountants.utils import get_noise_multiplier
from torch.nn import functional as F

from examples import finetune
from examples.glue import TASKS
from examples.hashed_words import HashedWords
from examples.labels import (
    LabelModel,
    encode_labels,
    learn_to_answer,
    scratch_switch,
)
from tests.common import check, layer_modes
from tests.train_test import weights

transformers = pytest.importorskip("transformers")

WORDS = (
    "sst2 sentence : mnli premise hypothesis good bad a film is the plot not".split()
)
# "positive" is two tokens, "neutral" begins with another word: names of any length.
PIECES = "negative posi ##tive entailment neutral ##ity contradiction".split()


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokens = ["<pad>", "</s>", "<unk>", *WORDS, *PIECES]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def tiny_switch(**changes):
    config = dict(
        **dict(vocab_size=40, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2),
        **dict(num_decoder_layers=1, num_experts=3, num_sparse_encoder_layers=1),
        **dict(num_sparse_decoder_layers=1, decoder_start_token_id=0),
    )
    torch.manual_seed(0)
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**{**config, **changes})
    )


CALIBRATED = "opacus.privacy_engine.get_noise_multiplier"


@pytest.fixture(scope="module", autouse=True)
def any_noise():
    """Noise that no budget was asked for, as that takes seconds; see test_private."""
    with patch(CALIBRATED, return_value=1.0):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its tokenizer and the files of both tasks."""
    path = tmp_path_factory.mktemp("finetune")
    tiny_switch().save_pretrained(path / "switch")
    tiny_tokenizer().save_pretrained(path / "switch")
    sst2 = [("a good film", 1), ("the plot is bad", 0), ("not bad", 1), ("bad", 0)]
    rows = [f"{text}\t{label}" for text, label in 6 * sst2]
    nli = TASKS["mnli"].classes
    # As GLUE has them: quotes that nothing closes, and a row without an agreement.
    pair = "{i}\t31193n\tfiction\ta \"film\tthe plot' is good\tneutral\t{label}"
    labels = [nli[i % 3] for i in range(12)] + ["-"]
    pairs = [pair.format(i=i, label=label) for i, label in enumerate(labels)]
    columns = "index promptID genre sentence1 sentence2 label1 gold_label".split()
    for task, header, lines in (
        ("sst2", "sentence\tlabel", rows),
        ("mnli", "\t".join(columns), pairs),
    ):
        (path / task).mkdir()
        for name in (TASKS[task].train, TASKS[task].dev):
            (path / task / name).write_text("\n".join([header, *lines]) + "\n")
    return path


def arguments(folder, *more, task="sst2"):
    model = () if "--scratch" in more else ("--model", str(folder / "switch"))
    where = ("--task", task, "--data", str(folder / task))
    tiny = "--epochs 2 --batch-size 8 --physical-batch-size 3 --no-progress"
    return [*model, *where, *tiny.split(), *more]


def run(folder, *more, task="sst2"):
    args = finetune.parse_args(arguments(folder, *more, task=task))
    return finetune.finetune(args)


# -- losses and scores -------------------------------------------------------------


def test_labels():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.get_vocab()
    found = encode_labels(tokenizer, ["negative", "positive"])
    assert found.tolist() == [[ids["negative"], -100], [ids["posi"], ids["##tive"]]]
    # One begins the other: now the end is what tells.
    found = encode_labels(tokenizer, ["neutral", "neutrality"])
    assert found.tolist() == [
        [ids["neutral"], 1, -100],
        [ids["neutral"], ids["##ity"], 1],
    ]


def test_labels_that_can_not_be_told_apart():
    with pytest.raises(ValueError, match="can't tell 'yes' from 'no'.*--buckets"):
        encode_labels(HashedWords(buckets=1), ["yes", "no"])


def batch_of_texts():
    ids = torch.randint(3, 40, (4, 7))
    return ids, torch.tensor([7, 3, 5, 1]), torch.tensor([1, 0, 1, 1])


def test_losses_and_scores():
    """Against the model alone on each text, without padding, for each name."""
    inner = tiny_switch().eval()
    labels = encode_labels(tiny_tokenizer(), ["negative", "positive"])
    model = LabelModel(inner, labels).eval()
    ids, lengths, classes = batch_of_texts()
    losses, scores = model(ids, lengths, classes), model.scores(ids, lengths)
    for b, n in enumerate(lengths.tolist()):
        for c, name in enumerate(labels):
            name = name[name >= 0]
            start = torch.tensor([0, *name[:-1]])
            logits = inner(ids[b : b + 1, :n], decoder_input_ids=start[None]).logits
            each = F.cross_entropy(logits[0], name, reduction="none")
            torch.testing.assert_close(scores[b, c], -each.sum())
            if c == classes[b]:
                torch.testing.assert_close(losses[b], each.mean())


@layer_modes
def test_exact(mode):
    """Per-sample gradients, also of the balancing loss, which is one term a sample."""
    inner = tiny_switch(dropout_rate=0.0, router_jitter_noise=0.0)
    labels = encode_labels(tiny_tokenizer(), ["negative", "positive"])
    model = LabelModel(inner, labels, 2.0).train()
    check(mode, True, model, batch_of_texts(), lambda m, b: m(*b), tolerance=1e-4)


def test_learns_to_answer_without_a_text():
    """From random weights: one of the names, each as likely as the other."""
    torch.manual_seed(0)
    tokenizer = HashedWords(buckets=100)
    labels = encode_labels(tokenizer, ["negative", "positive"])
    model = LabelModel(scratch_switch(tokenizer.vocab_size, width=16), labels).train()
    before = learn_to_answer(model, steps=1)
    after = learn_to_answer(model, steps=60)
    assert before > 3 and abs(after - math.log(2)) < 0.15
    assert all(p.grad is None for p in model.parameters())


# -- the command -------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, steps, sigma",
    [
        (67349, 66, 0.6885),
        pytest.param(392702, 384, 0.5435, marks=pytest.mark.slow),
    ],
)
def test_noise_of_the_paper(rows, steps, sigma):
    """SST-2 and MNLI: epsilon 8, delta 1/N, 20 epochs of batches of 1024, PRV."""
    args = finetune.parse_args(["--model", "m", "--task", "sst2", "--data", "d"])
    assert -(-rows // args.batch_size) == steps
    found = get_noise_multiplier(
        target_epsilon=args.epsilon,
        target_delta=1 / rows,
        sample_rate=1 / steps,
        epochs=args.epochs,
        accountant="prv",
    )
    assert found == pytest.approx(sigma, abs=2e-3)


def test_private(folder):
    """With the checkpoint's dropout and jitter, and the noise of the budget."""
    with patch(CALIBRATED, get_noise_multiplier):
        found = run(folder, task="mnli")
    assert (found["rows"], found["steps"], found["epochs"]) == (12, 4, 2)
    assert found["delta"] == 1 / 12 and found["private"]
    assert 7.5 < found["epsilon_spent"] <= 8.0
    assert 0 <= found["accuracy"] <= 100
    assert found["majority"] == pytest.approx(100 / 3)


def test_mnli_from_its_files_alone(folder):
    """A model from scratch asks no hub for its tokenizer or weights."""
    small = "--scratch --width 8 --heads 2 --experts 2 --buckets 50 --random-steps 9"
    with patch.object(finetune.AutoTokenizer, "from_pretrained", None):
        found = run(folder, *small.split(), task="mnli")
    assert (found["task"], found["rows"], found["dev_rows"]) == ("mnli", 12, 12)
    assert found["steps"] == 4 and 0 <= found["accuracy"] <= 100


def test_non_private_learns_and_is_saved(folder, tmp_path):
    """from_pretrained reads the saved model, under its own names."""
    more = ("--non-private", "--epochs", "25", "--lr", "1e-2", "--dropout", "0")
    found = run(folder, *more, "--save", str(tmp_path / "saved"))
    assert found["accuracy"] == 100 and "epsilon_spent" not in found
    before = tiny_switch().state_dict()
    model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys"))
    assert model.state_dict().keys() == before.keys()
    changed = [
        k for k, v in model.state_dict().items() if not torch.equal(v, before[k])
    ]
    assert "shared.weight" in changed
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    net = LabelModel(model, encode_labels(tokenizer, TASKS["sst2"].words)).eval()
    ids = torch.tensor([tokenizer("sst2 sentence: a good film").input_ids])
    assert net.scores(ids, torch.tensor([ids.shape[1]])).argmax() == 1


def test_empty_batches(folder, tmp_path):
    """Most Poisson batches of one expected row in 24 are small, a third are empty."""
    sizes = []
    original = finetune.trim

    def trim(batch, device):
        sizes.append(len(batch[0]))
        return original(batch, device)

    path = str(tmp_path / "run")
    more = ("--batch-size", "1", "--epochs", "1", "--grad-sample-mode", "ghost_bk")
    with patch.object(finetune, "trim", trim):
        found = run(folder, *more, "--checkpoint", path)
    assert found["steps"] == 24 and 0 in sizes
    assert all(torch.isfinite(w).all() for w in weights(path).values())


def test_routers(folder, tmp_path):
    path = str(tmp_path / "run")
    more = ("--freeze-routers", "--balancing", "0.1", "--lr", "1e-1")
    found = run(folder, *more, "--checkpoint", path)
    assert found["frozen_routers"] == 2
    assert found["parameters"] - found["trained"] == 2 * 3 * 8
    before = tiny_switch().state_dict()
    for name, weight in weights(path).items():
        frozen = "router" in name
        assert torch.equal(weight, before[name.removeprefix("model.")]) == frozen, name

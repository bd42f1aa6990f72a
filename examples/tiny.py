"""What the examples run on where no model and no data are given: both made up.

The models are random and tiny, saved as those of the hub are, so that an example loads
them as it would load another.
"""

from __future__ import annotations

import random
from typing import Any, Dict, List

NOUNS = "cat dog bird horse farmer teacher river garden kitchen window".split()
VERBS = "sees hears follows likes paints draws finds leaves".split()
GOOD = "wonderful lovely bright gentle clever".split()
BAD = "terrible boring dull broken noisy".split()
NUMBERS = "zero one two three four five six seven eight nine".split()


def text(rng: random.Random) -> str:
    """A sentence or two."""
    one, other = rng.sample(NOUNS, 2)
    return f"the {rng.choice(GOOD + BAD)} {one} {rng.choice(VERBS)} the {other} ."


def texts(count: int, seed: int = 0) -> List[Dict[str, Any]]:
    """Records with a "text"."""
    rng = random.Random(seed)
    return [{"text": " ".join(text(rng) for _ in range(4))} for _ in range(count)]


def reviews(count: int, seed: int = 0) -> List[Dict[str, Any]]:
    """Records as GLUE's SST-2 has them: "idx", "sentence" and "label"."""
    rng, found = random.Random(seed), []
    for i in range(count):
        label = rng.randrange(2)
        word, noun = rng.choice([BAD, GOOD][label]), rng.choice(NOUNS)
        sentence = f"the {noun} {rng.choice(VERBS)} a {word} {rng.choice(NOUNS)}"
        found.append({"idx": i, "sentence": sentence, "label": label})
    return found


def questions(count: int, seed: int = 0) -> List[Dict[str, Any]]:
    """Records with a "prompt" and its "completion"."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        a, b = rng.randrange(5), rng.randrange(5)
        prompt = f"what is {NUMBERS[a]} and {NUMBERS[b]} ? "
        found.append({"prompt": prompt, "completion": f"it is {NUMBERS[a + b]} ."})
    return found


def preferences(count: int, seed: int = 0) -> List[Dict[str, Any]]:
    """Records with a "prompt", the "chosen" answer and the "rejected" one."""
    rng, found = random.Random(seed), []
    for row in questions(count, seed):
        wrong = f"it is a {rng.choice(NOUNS)} ."
        pair = {"chosen": row["completion"], "rejected": wrong}
        found.append({"prompt": row["prompt"], **pair})
    return found


def pretrained(folder: str, kind: str = "llama") -> str:
    """
    Saves a model and its tokenizer.

    Args:
        folder: where to
        kind: "llama", for text, or "bert", for classes

    Returns:
        ``folder``, for ``from_pretrained``.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[BOS]", "[EOS]"]
    more = "the a . ? what is and it who knows ,".split()
    words = [*special, *more, *NOUNS, *VERBS, *GOOD, *BAD, *NUMBERS]
    made = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), special))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    settings: Dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,  # a small model learns little from 0.02
        "pad_token_id": 0,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(bos_token_id=2, eos_token_id=3, **settings)
        model: Any = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.BertConfig(num_labels=2, **settings)
        model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

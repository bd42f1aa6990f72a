"""A tokenizer whose vocabulary comes from no data.

A vocabulary of the words of private sentences publishes words that people wrote, and
no noise is added to it. Here a word's number is a hash of its letters instead: the same
whatever the data, at the price that some words share a number.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Dict, List, Optional, Tuple

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizer

from opacus_ext.refused import Refused


class HashedWords(PreTrainedTokenizer):
    """
    Numbers lower-cased words and punctuation marks by a hash.

    It is saved with ``save_pretrained`` and read with ``from_pretrained``, its own or,
    once this module is imported, ``AutoTokenizer``'s. Numbers can't be turned back into
    words.

    Args:
        buckets: how many numbers there are for words; further ones are those of
            ``<pad>`` (0), ``</s>`` (1), which ends every text, and ``<unk>`` (2)

    Example:
        >>> tokenizer = HashedWords(buckets=1000)
        >>> ids = tokenizer("A fine film, fine!").input_ids
        >>> len(ids), ids[1] == ids[4], ids[-1] == tokenizer.eos_token_id
        (7, True, True)
    """

    vocab_files_names: Dict[str, str] = {}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, buckets: int = 8192, **kwargs: Any):
        if buckets < 1:
            raise Refused(
                f"buckets must be positive, got {buckets}.",
                parameter="buckets",
                remedy="Give some thousands.",
            )
        self.buckets = buckets
        self._special = {"<pad>": 0, "</s>": 1, "<unk>": 2}
        for kind, name in (("pad", "<pad>"), ("eos", "</s>"), ("unk", "<unk>")):
            kwargs.setdefault(f"{kind}_token", name)
        super().__init__(buckets=buckets, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Numbers in all, those that stand for no word included."""
        return len(self._special) + self.buckets

    def get_vocab(self) -> Dict[str, int]:
        """Every number by a name that stands for it."""
        return {self._convert_id_to_token(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text: str, **kwargs: Any) -> List[str]:
        return re.findall(r"[\w']+|[^\w\s]", text.lower())

    def _convert_token_to_id(self, token: str) -> int:
        if token in self._special:
            return self._special[token]
        return len(self._special) + zlib.crc32(token.encode()) % self.buckets

    def _convert_id_to_token(self, index: int) -> str:
        names = list(self._special)
        return names[index] if index < len(names) else f"<{index - len(names)}>"

    def convert_tokens_to_string(self, tokens: List[str]) -> str:
        """The tokens with spaces between them."""
        return " ".join(tokens)

    def build_inputs_with_special_tokens(
        self, token_ids_0: List[int], token_ids_1: Optional[List[int]] = None
    ) -> List[int]:
        """Ends the text, or both texts, with ``</s>``."""
        end = [self.eos_token_id]
        second = [] if token_ids_1 is None else list(token_ids_1) + end
        return list(token_ids_0) + end + second

    def save_vocabulary(
        self, save_directory: str, filename_prefix: Optional[str] = None
    ) -> Tuple[str, ...]:
        """Nothing: there is none."""
        return ()


class _NoConfig(PreTrainedConfig):
    """No model comes with this tokenizer; AutoTokenizer finds it by name."""


AutoTokenizer.register(_NoConfig, HashedWords, exist_ok=True)

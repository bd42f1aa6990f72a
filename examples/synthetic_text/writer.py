"""A language model that is tuned on labeled texts, and writes new ones."""

import argparse
import random
import tempfile
from typing import Any, Dict, List, Sequence

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from examples.synthetic_text.tables import Row
from opacus_ext.data import UserRecords
from opacus_ext.losses import cross_entropy
from opacus_ext.planner.budget import default_delta
from opacus_ext.refused import Refused
from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

Record = Dict[str, Any]


class Writer:
    """
    Args:
        args: of the command line
        labels: what prompts call each label; "" for the label itself
    """

    def __init__(self, args: argparse.Namespace, labels: Dict[str, str]):
        self.args = args
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(args.model, dtype=torch.float32)
        if self.tokenizer.eos_token is None:
            reason = f"The tokenizer of {args.model} has no eos_token."
            raise Refused(reason, remedy="Set the one that ends its texts.")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"
        prompts = [args.prompt.replace("{label}", labels[x] or x) for x in labels]
        encoded = self.tokenizer(prompts, add_special_tokens=False)["input_ids"]
        begin = [x for x in [self.tokenizer.bos_token_id] if x is not None]
        self.prompts = {label: begin + ids for label, ids in zip(labels, encoded)}
        if len({tuple(ids) for ids in encoded}) < len(labels):
            reason = f"To the tokenizer of {args.model} two prompts are the same."
            remedy = (
                "Name labels in its words (--labels 0=bad 1=good) in each --prompt."
            )
            raise Refused(reason, remedy=remedy)
        # Padding to a multiple of 8 stays below the model's positions.
        positions = getattr(self.model.config, "max_position_embeddings", 1 << 20)
        self.max_tokens = min(args.max_tokens, positions // 8 * 8)
        if max(map(len, self.prompts.values())) >= self.max_tokens:
            reason = f"Of {self.max_tokens} tokens, a prompt leaves none to the text."
            raise Refused(reason, remedy="Give more, or a shorter --prompt.")
        if args.lora_rank:
            kinds = {type(module).__name__ for module in self.model.modules()}
            lora = LoraConfig(
                task_type="CAUSAL_LM",
                r=args.lora_rank,
                lora_alpha=2 * args.lora_rank,
                target_modules="all-linear",
                fan_in_fan_out="Conv1D" in kinds,
            )
            self.model = get_peft_model(self.model, lora)

    def record(self, label: str, ids: List[int], user: Any) -> Record:
        """A prompt, a text and its end. The loss is that of the latter two."""
        prompt = self.prompts[label]
        rest = [*ids, self.tokenizer.eos_token_id][: self.max_tokens - len(prompt)]
        record = {"input_ids": prompt + rest, "labels": [-100] * len(prompt) + rest}
        return {**record, "user": user} if self.args.user else record

    def records(self, rows: Sequence[Row]) -> List[Record]:
        texts = [row.text for row in rows]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [self.record(r.label, ids, r.user) for r, ids in zip(rows, encoded)]

    def canaries(self, count: int, seed: str) -> List[Record]:
        """Records of ten random tokens, each of a user of its own."""
        rng, special = random.Random(seed), set(self.tokenizer.all_special_ids)
        tokens = [i for i in range(len(self.tokenizer)) if i not in special]
        canaries = []
        for number in range(count):
            label, ids = rng.choice(list(self.prompts)), rng.choices(tokens, k=10)
            canaries.append(self.record(label, ids, ("canary", number)))
        return canaries

    def train(self, records: List[Record]) -> PrivateTrainer:
        """Tunes the model on records, or on their users."""
        args = self.args
        data: Any = UserRecords(records, "user") if args.user else records
        batch_size = min(args.batch_size, len(data))
        parts = -(-batch_size // args.physical_batch_size)
        collate = transformers.DataCollatorForSeq2Seq(
            self.tokenizer, pad_to_multiple_of=8
        )
        folder = tempfile.TemporaryDirectory()
        trainer = PrivateTrainer(
            model=self.model,
            args=transformers.TrainingArguments(
                output_dir=folder.name,
                num_train_epochs=args.epochs,
                per_device_train_batch_size=batch_size // parts,
                gradient_accumulation_steps=parts,
                learning_rate=args.lr,
                seed=args.seed,
                save_strategy="no",
                report_to="none",
                dataloader_pin_memory=False,
            ),
            train_dataset=data,
            data_collator=collate,
            processing_class=self.tokenizer,
            privacy=PrivacyArguments(
                target_epsilon=args.epsilon,
                target_delta=args.delta or default_delta(len(data)),
                secure_mode=args.secure_mode,
                log_loss=False,
            ),
        )
        trainer.train()
        self.model.eval()
        return trainer

    @torch.no_grad()
    def losses(self, records: Sequence[Record]) -> List[float]:
        """Of each record, the sum over its tokens."""
        losses: List[float] = []
        for record in records:
            ids = torch.tensor([record["input_ids"]], device=self.model.device)
            logits = self.model(ids, attention_mask=torch.ones_like(ids)).logits.cpu()
            labels = F.pad(torch.tensor([record["labels"]]), (0, 1), value=-100)[:, 1:]
            losses += cross_entropy(logits, labels, reduction="sum").tolist()
        return losses

    def write(self, label: str) -> List[Row]:
        """Texts. Empty ones are written anew, ten times on average at most."""
        args, prompt = self.args, self.prompts[label]
        texts: List[str] = []
        for _ in range(10 * args.texts):
            size = min(args.texts - len(texts), args.physical_batch_size)
            if size == 0:
                break
            # Prompts of a label are of one length, so that none is padded.
            ids = torch.tensor([prompt] * size, device=self.model.device)
            written = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=0,
                max_new_tokens=self.max_tokens - len(prompt),
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            rest = written[:, len(prompt) :]
            decoded = self.tokenizer.batch_decode(rest, skip_special_tokens=True)
            texts += [text.strip() for text in decoded if text.strip()]
        return [Row(text, label) for text in texts]

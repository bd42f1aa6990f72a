"""TRL's SFTTrainer and DPOTrainer with privacy.

The oracle is TRL's own compute_loss of each record alone, collated alone, through plain
autograd of a copy of the model, its gradient clipped: for several steps.
"""

import copy
import os

import pytest
import torch
import transformers

from opacus_ext.data.logical import derive_seed
from opacus_ext.refused import Refused
from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")
V, BOUND, RATE = 30, 0.3, 0.5
every_mode = pytest.mark.parametrize(
    "mode", ["hooks", "ghost", "ghost_bk", "scan", "auto"]
)


class PrivateSFT(PrivateTrainer, trl.SFTTrainer):
    pass


class PrivateDPO(PrivateTrainer, trl.DPOTrainer):
    pass


@pytest.fixture(autouse=True, scope="module")
def quiet():
    os.environ["CI"] = "1"  # TRL reports who uses it
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(V - 3)}
    words |= {"[PAD]": V - 3, "[UNK]": V - 2, "[EOS]": V - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A Llama, saved: DPOTrainer loads its reference model from there."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def words(generator, longest):
    count = int(torch.randint(1, longest, (), generator=generator))
    ids = torch.randint(0, V - 3, (count,), generator=generator)
    return " ".join(f"w{i}" for i in ids.tolist())


def records(*columns, n=14):
    generator = torch.Generator().manual_seed(1)
    return datasets.Dataset.from_list(
        [{name: words(generator, 7) for name in columns} for _ in range(n)]
    ).map(lambda row: {"prompt": row["prompt"] + " "})


def arguments(cls, out, **kwargs):
    chosen = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    return cls(str(out), **(chosen | kwargs))


def privacy(mode="ghost_bk", **kwargs):
    chosen = {
        "target_delta": 1e-3,
        "noise_multiplier": 0.0,
        "per_sample_max_grad_norm": BOUND,
        "privacy_seed": 1,
        "repeat_noise": True,
        "accountant": "rdp",
    }
    return PrivacyArguments(grad_sample_mode=mode, **(chosen | kwargs))


def weights(model):
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


def draws(run, steps):
    """The records of each step, read before it begins."""
    run._training.seed = derive_seed(run.privacy.privacy_seed, 0)
    found = {}
    for item in run.get_train_dataloader().batch_sampler:
        found.setdefault(item.draw, []).extend(sum(item.numbers, []))
    return [found[t] for t in range(steps)]


def check_steps(run, stock, steps=3):
    """A run, against the same steps by TRL's loss of each record alone."""
    model = stock.model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    before = weights(model)
    clipped, bound = 0, run.privacy.per_sample_max_grad_norm
    for drawn in draws(run, steps):
        total = [torch.zeros_like(p) for p in params]
        for n in drawn:
            model.zero_grad()
            batch = stock.data_collator([stock.train_dataset[n]])
            stock.compute_loss(model, batch).backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            norm = float(sum(g.pow(2).sum() for g in grads).sqrt())
            clipped += norm > bound
            for sum_, g in zip(total, grads):
                sum_ += g * min(1, bound / (norm + 1e-6))
        expected = run.sampling.divisor(len(stock.train_dataset))
        with torch.no_grad():
            for p, sum_ in zip(params, total):
                p -= RATE * sum_ / expected
    run.train()
    assert clipped > 0
    after, moved = weights(run.model), 0.0
    for name, p in weights(model).items():
        torch.testing.assert_close(after[name], p, rtol=1e-4, atol=1e-6)
        moved = max(moved, float((p - before[name]).abs().max()))
    assert moved > 1e-3


# -- SFT ---------------------------------------------------------------------------


@every_mode
def test_sft_steps_are_sums_of_clipped_gradients_of_records(mode, path, tmp_path):
    """Completions only, padded, with checkpointing (its default)."""
    data = records("prompt", "completion")
    args = arguments(trl.SFTConfig, tmp_path)
    given = {"train_dataset": data, "processing_class": tokenizer()}
    stock = trl.SFTTrainer(load(path), copy.deepcopy(args), **given)
    run = PrivateSFT(load(path), args, **given, privacy=privacy(mode))
    assert (torch.tensor(run.train_dataset[0]["labels"]) == -100).any()
    check_steps(run, stock)


def test_sft_with_lora_evaluates_saves_and_resumes(path, tmp_path):
    data = records("prompt", "completion")

    def make(cls, **kwargs):
        return cls(
            str(path),
            arguments(
                trl.SFTConfig,
                tmp_path,
                max_steps=4,
                save_strategy="steps",
                save_steps=2,
                eval_strategy="steps",
                eval_steps=2,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
            **kwargs,
        )

    run = make(PrivateSFT, privacy=privacy(noise_multiplier=1.0))
    frozen = {n: p.clone() for n, p in run.model.named_parameters() if "lora" not in n}
    run.train()
    assert all(
        torch.equal(p, frozen[n])
        for n, p in run.model.named_parameters()
        if n in frozen
    )
    logs = run.state.log_history
    assert [x["eval_loss"] > 0 for x in logs if "eval_loss" in x] == [True] * 2
    assert 0 < run.get_epsilon() == logs[-1]["epsilon"]
    other = make(PrivateSFT, privacy=privacy(noise_multiplier=1.0))
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, p in weights(run.model).items():
        assert torch.equal(p, weights(other.model)[name])


# -- DPO ---------------------------------------------------------------------------


def dpo(cls, model, out, lora=None, **kwargs):
    more = {"privacy": kwargs.pop("privacy")} if "privacy" in kwargs else {}
    return cls(
        model if isinstance(model, torch.nn.Module) else load(model),
        args=arguments(trl.DPOConfig, out, **kwargs),
        train_dataset=records("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
        peft_config=lora,
        **more,
    )


@every_mode
def test_dpo_steps_are_sums_of_clipped_gradients_of_pairs(mode, path, tmp_path):
    run = dpo(PrivateDPO, path, tmp_path, privacy=privacy(mode), beta=2.0)
    check_steps(run, dpo(trl.DPOTrainer, path, tmp_path, beta=2.0))
    assert "rewards/margins" in run.state.log_history[1]
    assert not any("num_tokens" in entry for entry in run.state.log_history)


def adapter():
    return peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)


@pytest.mark.parametrize(
    "setting", ["adapter off", "adapter before", "computed before"]
)
def test_dpo_with_other_references(setting, path, tmp_path):
    """The base model; the adapter that it came with; what the data set has."""

    def make(cls, **more):
        torch.manual_seed(1)
        kwargs, model = {"beta": 2.0}, load(path)
        if setting == "computed before":
            kwargs["precompute_ref_log_probs"] = True
        elif setting == "adapter off":
            kwargs["lora"] = adapter()
        else:
            model = peft.get_peft_model(model, adapter())
        return dpo(cls, model, tmp_path, **kwargs, **more)

    bound = BOUND if setting == "computed before" else 0.01
    stock = make(trl.DPOTrainer)
    run = make(PrivateDPO, privacy=privacy(per_sample_max_grad_norm=bound))
    check_steps(run, stock)


LOSSES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down "
    "discopop sft sigmoid_norm"
)


def test_dpo_losses_are_those_of_pairs_alone(path, tmp_path):
    """Every loss type that is not refused, weights of WPO, and parts of lengths."""
    kwargs = {"label_smoothing": 0.1, "beta": 0.5, "use_weighting": True}
    kwargs |= {"ld_alpha": 0.3, "loss_type": LOSSES.split()}
    run = dpo(PrivateDPO, path, tmp_path, privacy=privacy(log_loss=False), **kwargs)
    with torch.no_grad():
        for p in run.model.parameters():
            p += 0.02 * torch.randn_like(p)
    rows = [run.train_dataset[i] for i in range(4)]
    objective, batch = run._objective, run.data_collator(rows)
    batch = objective.prepare(run.model, batch)
    pairs = [objective.take(batch, i) for i in range(4)]
    losses = torch.stack([objective(run.model, pair) for pair in pairs])
    alone = [run.compute_loss(run.model, run.data_collator([row])) for row in rows]
    assert losses.shape == (4,) and len(set(losses.tolist())) == 4
    torch.testing.assert_close(losses, torch.stack(alone))


def test_dpo_without_the_loss_logs_nothing_of_records(path, tmp_path):
    run = dpo(PrivateDPO, path, tmp_path, privacy=privacy(log_loss=False))
    run.train()
    unknown = ("loss", "rewards", "logps", "logits", "entropy", "mean_token", "num_")
    for entry in run.state.log_history:
        assert not any(name.startswith(unknown) for name in entry)


# -- what is refused ---------------------------------------------------------------


def test_the_other_order_of_bases():
    for base in (trl.SFTTrainer, trl.DPOTrainer):
        with pytest.raises(
            Refused, match=rf"Write class Wrong\(PrivateTrainer, {base.__name__}\)"
        ):
            type("Wrong", (base, PrivateTrainer), {})


@pytest.mark.parametrize(
    "cls, name, value",
    [
        (PrivateSFT, "packing", True),
        (PrivateSFT, "padding_free", True),
        (PrivateSFT, "activation_offloading", True),
        (PrivateSFT, "loss_type", "dft"),
        (PrivateDPO, "padding_free", True),
        (PrivateDPO, "sync_ref_model", True),
        (PrivateDPO, "loss_type", ["sigmoid", "aot"]),
        (PrivateDPO, "loss_type", "aot_unpaired"),
    ],
)
def test_arguments_that_break_privacy(cls, name, value, path, tmp_path):
    sft = cls is PrivateSFT
    columns = ("prompt", "completion") if sft else ("prompt", "chosen", "rejected")
    kind = trl.SFTConfig if sft else trl.DPOConfig
    with pytest.raises(Refused, match=name):
        cls(
            load(path),
            arguments(kind, tmp_path, **{name: value}),
            train_dataset=records(*columns),
            processing_class=tokenizer(),
            privacy=privacy(),
        )


def test_batches_that_are_not_records(path, tmp_path):
    """RewardTrainer's pairs are rows one after the other, and it is not known."""

    class Reward(PrivateTrainer, trl.RewardTrainer):
        pass

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1
    )
    model.config.pad_token_id = V - 3
    run = Reward(
        model,
        args=arguments(trl.RewardConfig, tmp_path),
        train_dataset=records("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
        privacy=privacy(),
    )
    with pytest.raises(Refused, match="samples of . records"):
        run.train()

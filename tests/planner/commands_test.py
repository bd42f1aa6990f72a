import configparser
import json
import os
import re
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path

import peft
import pytest
import torch
import transformers

from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.audit import Audit
from opacus_ext.data.sampling import Poisson
from opacus_ext.engine import PrivacyEngine
from opacus_ext.planner.commands import check as check_command
from opacus_ext.planner.commands import options
from opacus_ext.planner.commands.main import main
from opacus_ext.planner.commands.options import EPILOG, build_parser
from opacus_ext.runs import runs_of, spent_by
from opacus_ext.trainer.checkpoint import write_spent

SCRIPT = Path(options.__file__).parents[3] / "opacus_ext_command.py"
FEW = "--parameters 1e4:2e5 --steps 100:200"  # small lattices: seconds
EXAMPLE = f"--measurements example {FEW}"


def output_of(capsys, args, status=0):
    assert main(args.split()) == status
    return capsys.readouterr().out


def strict(text):
    """JSON without NaN and Infinity, which are none."""
    return json.loads(text, parse_constant=pytest.fail)


def test_plan_for_people(capsys):
    given = f"plan --users 1e5 --epsilon 4 --flops 1e13 {EXAMPLE}"
    out = output_of(capsys, f"{given} --trials 9")
    words = "noise multiplier|about as good|enough compute|loss with double the|"
    words += "advantage|without privacy|all 9 composed|random stopping, geometric|"
    words += 'PrivacyEngine(accountant="prv_bounds")|measured: example, 113 runs'
    assert all(text in out for text in words.split("|"))


def test_plan_of_batches_of_records(capsys):
    args = f"plan --users 1000 --epsilon 8 {EXAMPLE} --flops 1e13 --sampling records "
    args += "--records-per-user 2 --batch-size 1500 --steps 100 --json"
    plan = strict(output_of(capsys, args))["plans"][0]
    assert plan["batch_size"] == 1500  # more than there are users
    saved = plan["doubling"]["noise_batch_ratio"]
    assert saved["users"] > 0 and "batch_size" not in saved


def test_plan_without_measurements_says_so(capsys):
    args = "plan --users 1e6 --epsilon 4 --flops 1e18 "
    out = output_of(capsys, args + "--parameters 1e6:1e8 --steps 1000:2000")
    assert "rule of thumb: " in out and "opacus-ext measure" in out
    assert "No loss is given" in out and "end of the range given" in out
    args += "--parameters 1e7:1e8 --steps 1000:4000 --law paper --json"
    found = strict(output_of(capsys, args))
    assert found["answer"] == "paper's law" and found["plans"][0]["loss"] > 1
    assert "masked language models" in found["law"]


def test_plan_for_programs(capsys):
    args = f"plan --users 2e3,2e4 --epsilon 8 --flops 1e12,1e13 --json {EXAMPLE}"
    plans = strict(output_of(capsys, args))["plans"]
    assert len(plans) == 4
    for plan in plans:
        assert plan["loss"] > 0 and plan["flops"] <= plan["budget"]["flops"] * 1.0001
        arguments = plan["make_private"]
        assert arguments["noise_multiplier"] >= plan["noise_multiplier"] > 0
        assert set(plan["doubling"]["loss"]) == {"epsilon", "users", "flops"}
        assert plan["near_optimal"]["count"] >= 1
    few, many = plans[:2], plans[2:]
    assert all(b["loss"] <= a["loss"] * 1.001 for a, b in zip(few, many))
    assert few[1]["loss"] <= few[0]["loss"]
    out = output_of(capsys, f"plan --users 1e4 --epsilon 1,16 --flops 1e13 {EXAMPLE}")
    assert out.count("\n") == 7 and "advantage" in out and "steps upper" in out


def test_a_budget_with_which_nothing_can_be_learnt(capsys):
    args = f"plan --users 10 --flops 1e13 {EXAMPLE} --epsilon 0.01"
    with pytest.raises(SystemExit) as stopped:
        main(args.split())
    assert stopped.value.code == 3
    assert "Nothing can be learned with this budget" in capsys.readouterr().err
    some = strict(output_of(capsys, f"{args},100 --json"))
    assert len(some["plans"]) == 1 and any("0.01" in n for n in some["notes"])


def test_calibrate(capsys):
    args = "calibrate --users 1e6 --epsilon 1,4 --batch-size 4096 --steps 1000"
    rows = strict(output_of(capsys, f"{args} --json"))
    assert len(rows) == 2
    assert rows[0]["noise_multiplier"] > rows[1]["noise_multiplier"] > 0
    for row in rows:
        assert row["ratio"] == pytest.approx(row["noise_multiplier"] / 4096)
    shown = output_of(capsys, args)
    assert "noise_multiplier" in shown and "yes" in shown


def test_measure_then_fit(capsys, tmp_path):
    text, runs = tmp_path / "text", str(tmp_path / "runs.jsonl")
    text.write_bytes(b"To be, or not to be, that is the question. " * 99)
    args = f"measure --text {text} --out {runs} --sizes 16x2,32x2 --no-progress "
    args += "--ratios 0,0.1 --steps 4 --every 1 --batch-size 2"
    found = strict(output_of(capsys, f"{args} --json"))
    assert found["runs"] == 4 and found["fit"]["law"] == "surface"
    assert f"file  {runs}" in output_of(capsys, args)
    fitted = strict(output_of(capsys, f"fit {runs} --json"))
    assert fitted["runs"] == 4 and len(fitted["parameters"]) == 2


def test_fit(capsys):
    args = "fit example --hold-out ratio=0.0625 --json --hold-out steps=350"
    found = strict(output_of(capsys, args))
    for name in "without ratio=0.0625|without steps=350|first quarter continued".split(
        "|"
    ):
        assert found[name]["mean error"] < 0.1
    assert any("without E" in warning for warning in found["warnings"])


def test_fit_a_law_of_training_without_privacy(capsys, tmp_path):
    from opacus_ext.planner.laws import CHINCHILLA

    lines = ["Model Size,Training FLOP,loss,color"]
    for size in (1e7, 1e8, 1e9, 3e9):
        for tokens in (1e9, 1e10, 1e11):
            loss = float(CHINCHILLA.predict(parameters=size, tokens=tokens))
            lines.append(f"{size},{6 * size * tokens},{loss!r},red")
    # Of fewest tokens a parameter, and of another law: to be dropped.
    lines += ["3e9,9e18,9", "3e9,12e18,1"]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    args = f"fit {path} --law chinchilla --json"
    found = strict(output_of(capsys, f"{args} --drop 2"))
    assert found["E"] == pytest.approx(1.69, rel=1e-3) and found["rows"] == 12
    assert 0 < found["mean error"] <= found["worst error"] < 1e-3
    assert strict(output_of(capsys, args))["rows"] == 14
    for text, said in (
        ("loss,tokens\n3,4\n2,9\n", "no columns parameters and tokens"),
        ("loss,parameters,tokens\n3,4,5\n", "--drop 1 leaves none of the 1 rows"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit):
            main(f"fit {path} --law kaplan_tokens --drop 1".split())
        assert said in capsys.readouterr().err


@pytest.mark.skipif(not os.environ.get("CHINCHILLA"), reason="svg_extracted_data.csv")
def test_fit_of_chinchilla_without_five_runs(capsys):
    """The constants and objective of the 240 runs of Hoffmann et al.'s figure."""
    args = f"fit {os.environ['CHINCHILLA']} --law chinchilla --drop 5 --json"
    found = strict(output_of(capsys, args))
    assert found["rows"] == 240
    assert found["objective"] == pytest.approx(0.00101827, abs=1e-8)
    refit = dict(E=1.8172, A=477.7, B=2142, a=0.3473, b=0.3671)
    for name, value in refit.items():
        assert found[name] == pytest.approx(value, rel=1e-3)


def test_optimal(capsys):
    rows = strict(output_of(capsys, "optimal --flops 1e19,1e21 --json"))
    assert [row["flops"] for row in rows] == [1e19] * 4 + [1e21] * 4
    for row in rows[1:4] + rows[5:]:
        spent = 6 * row["parameters"] * row["tokens"]
        assert spent == pytest.approx(row["flops"])
    assert "Chinchilla, refit" in output_of(capsys, "optimal --flops 1e19")


def of_authors(size, steps, ratio):
    """A law like the paper's, from which a file like its authors' is made."""
    harm = ratio and 2 * ratio**0.2
    return 1.5 + 2e3 * size**-0.47 + 1e2 * (1024 * steps) ** -0.4 + harm


def test_results_csv_of_the_authors(capsys, tmp_path):
    """
    As it is: models by name, three learning rates, warm-up and runs without noise.
    Losses of the worse rates and of the first 1,000 steps would spoil the fit.
    """
    sizes = dict(BertTiny=4.5e6, BertSmall=29e6, BertMega=778e6)
    cells = product(sizes, (2**-7, 2**-8, 2**-9), (0.0, 2**-20, 2**-14, 2**-8))
    lines = ["Model,Learning Rate,Iterations,Noise Batch Ratio,Cross Entropy"]
    for name, rate, ratio in cells:
        for steps in (*range(100, 1000, 100), *range(1000, 128_001, 1000)):
            loss = of_authors(sizes[name], steps, ratio) * (1 + 20 * abs(rate - 2**-8))
            loss = loss if steps >= 1000 else 0.01
            lines.append(f"{name},{rate},{steps},{ratio},{loss!r}")
    path = tmp_path / "results.csv"
    path.write_text("\n".join(lines))
    found = strict(output_of(capsys, f"fit {path} --json"))
    assert found["runs"] == 36 and found["parameters"] == [4.5e6, 778e6]
    assert found["measured_steps"] == [1000, 128_000]
    assert found["ratio"] == [0, 2**-8]
    assert found["first quarter continued"]["mean error"] < 0.05
    args = f"plan --measurements {path} --users 1e7 --epsilon 4 --flops 1e19 --json"
    args += " --delta 1e-8 --batch-size 1e4:2e4"
    plan = strict(output_of(capsys, f"{args} --parameters 29e6 --steps 4e3:6e3"))[
        "plans"
    ][0]
    at = plan["parameters"], plan["steps"], plan["ratio"]
    assert plan["budget"]["tokens"] == 512 and plan["budget"]["delta"] == 1e-8
    assert plan["loss"] == pytest.approx(of_authors(*at), rel=0.05)
    assert plan["learning_rate"] == 2**-8
    free = plan["not_private"]
    told = of_authors(29e6, free["steps"], 0)
    assert free["batch_size"] == 1024 and free["loss"] == pytest.approx(told, rel=0.05)
    for lines[1], said in (
        ("BertHuge,0.1,1000,0,3", "models of unknown size: BertHuge"),
        ("BertTiny,0.1,1000,0,", "column Cross Entropy: could not"),
        ("BertTiny,0.1,1000,0,nan", "column Cross Entropy: 1 of them not finite"),
    ):
        path.write_text("\n".join(lines))
        with pytest.raises(SystemExit):
            main(["fit", str(path)])
        assert said in capsys.readouterr().err


def layer():
    model = torch.nn.Linear(9, 4)
    return model, torch.randn(3, 9), lambda model, x: model(x).square().sum(1)


def test_audit(capsys):
    args = "audit tests.planner.commands_test:layer --trials 16 --canaries 30 --json"
    found = strict(output_of(capsys, f"{args} --confidence 0.9999"))
    assert found["single steps"]["ok"] and found["one run"]["ok"]
    main(args.removesuffix(" --json").split())
    out = capsys.readouterr().out
    assert out.startswith("Single steps. ") and "One run. " in out
    assert "a fresh run of 16 steps, of this architecture on random records" in out


@pytest.fixture
def llama(tmp_path):
    """A folder of a model, one of an adapter, and one of a run."""
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    for name in ("base", "run"):
        model.save_pretrained(tmp_path / name)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
    peft.get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    accountant = PRVBoundsAccountant()
    accountant.history = [(0.9, 0.02, 300)]
    config = {"grad_sample_mode": "ghost", "clipping": "automatic", "records": 1000}
    engine = PrivacyEngine(accountant="prv_bounds")
    engine.accountant = accountant
    sampling = {"scheme": "poisson", "sample_rate": 0.02}
    runs_of(engine).append(
        {**config, "max_grad_norm": 0.3, "sampling": sampling, "secure_mode": False}
    )
    write_spent(str(tmp_path / "run"), spent_by(engine))
    return tmp_path


def test_audit_of_folders(llama, capsys, monkeypatch):
    """An adapter's trains the adapter; a run's has the settings of the run."""
    calls = []

    def audited(name):
        def record(model, loss_fn, batch, **options):
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            assert loss_fn(model, batch).shape == (8,)
            calls.append((name, trained, options))
            return Audit(0.0, 1.0, 1e-5, 0.95, [])

        return record

    for name in ("audit_model", "audit_training"):
        monkeypatch.setattr(check_command, name, audited(name))
    for name in ("adapter", "run"):
        assert main(["audit", str(llama / name)]) == 0
    out = capsys.readouterr().out
    assert "noise multiplier 0.9, sample rate 0.02" in out and "Its own 300" in out
    (_, adapter, plain), _, (_, _, steps), (_, _, run) = calls
    assert adapter == 2 * 4 * 16
    assert (plain["grad_sample_mode"], plain["clipping"]) == ("ghost_bk", "flat")
    for given in (steps, run):
        assert (given["grad_sample_mode"], given["clipping"]) == (
            "ghost",
            "automatic",
        )
        assert (given["max_grad_norm"], given["noise_multiplier"]) == (0.3, 0.9)
    assert run["sampling"] == Poisson(sample_rate=0.02, steps=16)
    settings = llama / "adapter" / "adapter_config.json"
    text = settings.read_text().replace(str(llama / "base"), "someone/model")
    settings.write_text(text)
    with pytest.raises(SystemExit):
        main(["audit", str(llama / "adapter")])
    assert "base model 'someone/model', which is no folder" in capsys.readouterr().err


def exact():
    model = torch.nn.Linear(3, 2)
    batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    loss = torch.nn.functional.cross_entropy
    return model, batch, lambda m, b: loss(m(b[0]), b[1], reduction="none")


def leaking():
    norm = torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    model, batch, loss = exact()
    return torch.nn.Sequential(norm, model), batch, loss


def two_things():
    return 1, 2


def test_check(capsys):
    args = "check tests.planner.commands_test:"
    assert "ok" in output_of(capsys, f"{args}exact")
    assert "BatchNorm" in output_of(capsys, f"{args}leaking", status=1)
    found = strict(output_of(capsys, f"{args}exact --json"))
    assert found["ok"] and not found["leaks"] and found["parameters"]


def test_check_a_checkpoint(capsys, tmp_path):
    import transformers

    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=1, vocab_size=20, n_positions=16
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    args = f"check {tmp_path} --modes ghost_bk --length 6"
    assert "ok" in output_of(capsys, args)


USERS = "plan --users 1e5 --epsilon"
PLAN = f"{USERS} 4"
NOISE = "calibrate --users 1e5 --epsilon 4"
RECORDS = "calibrate --users 1e5 --sampling records --records-per-user"
TUNE = "plan --users 50000 --epsilon 8 --delta 1e-6 --trainable 4194304 --flops 1e19"

BAD = f"""
dream | invalid choice
plan --users 1e5 | required: --epsilon
{USERS} 0 | --epsilon: '0' is not a number, above 0
{USERS} nan | --epsilon: 'nan' is not a number
{USERS} 101 | epsilon=101 is above 100
plan --users -5 --epsilon 4 | --users: '-5' is not a number, 1
{PLAN} --delta 1e-300 | --delta: '1e-300' is not a number, 1e-100
{PLAN} --flops 1:2 | --flops: '1:2' is not a number
{PLAN} --batch-size 1.5 | --batch-size: '1.5' is not a whole number
{PLAN} --steps 9:1 | --steps: '9:1' is not LOW:HIGH
{PLAN} --measurements no-such-file | no-such-file
{PLAN} --flops 1 --steps 1000 | flops=1 is less than the smallest
{PLAN} {EXAMPLE} --flops 1e13 --delta 1e-20 | accountant
{TUNE} --parameters 1e9:2e9 | is of one model
{TUNE} --parameters 1e6 | trainable must be finite and at least 1 and at most 1e+06
{TUNE} --parameters 6.7e9 --measurements example | goes without --measurements
{TUNE} --parameters 6.7e9 --noise-free nowhere.csv | there is no nowhere.csv
{TUNE} --parameters 6.7e9 --price 2 | need --gpu
{PLAN} --hours 24 | need --gpu, such as h100
{PLAN} --gpu h100 --hours 24 --flops 1e19 | both bound the compute
{PLAN} --gpu 8xh100 --gpus 2 | both tell a number
{PLAN} --gpu rtx9000 | 'rtx9000' is none of t4, v100
{PLAN} --gpu 0xh100 | '0xh100' is none of
{PLAN} --flops 1,500,000 | may be one number or several
{PLAN} --flops 5q | '5q' is not a number
{PLAN} --flops k | 'k' is not a number
{PLAN} --code trainer --amplification none | of Poisson samples of users
{PLAN} --steps 2000 --parameters 5M --plot plan.words | 'words' is not supported
check .a:b | target '.a:b' is not to be had
check nothing-of-the-kind | neither a folder nor module:function
check tests.planner.commands_test:two_things | must return a model, a batch
measure --out x --family .a:b | '.a:b' is not to be had
measure --out x | needs a text
measure --out x --text no-such-text | no-such-text
{NOISE} --steps 5 | For example: opacus-ext calibrate --users 1e6
{NOISE} --steps 5 | required: --batch-size
{NOISE} --steps 0.5 --batch-size 1 | '0.5' is not a whole number, 1 or more
{NOISE} --steps 5 --batch-size 1e6 | batch_size
{RECORDS} 1000 --epsilon 500 --steps 1000 --batch-size 1000 | too extreme
{RECORDS} 1e12 --epsilon 4 --steps 10 --batch-size 1 | too extreme
fit example --law murphy | 'murphy' is none of
fit example --law L2 --drop 3 | --drop is for laws without noise
optimal | required: --flops
optimal --flops 5 | --flops: '5' is not a number, 1e+12 or more, at most 1e+30
fit example --hold-out size=3 | --hold-out: 'size=3' is not
statement no-such-checkpoint | no-such-checkpoint
"""


@pytest.mark.parametrize("line", BAD.strip("\n").split("\n"))
def test_bad_arguments(line, capsys):
    """Status 2; the message names the argument and what it may be."""
    args, message = line.split(" | ")
    with pytest.raises(SystemExit) as stopped:
        main(args.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, text, value",
    [
        ("--users", "50k", [50_000]),
        ("--users", "1.5M,2B", [1.5e6, 2e9]),
        ("--users", "50_000", [50_000]),
        ("--users", "50,000", [50_000]),
        ("--users", "1,000,000", [1e6]),
        ("--users", "100,500", [100, 500]),
        ("--flops", "1e19,3e19", [1e19, 3e19]),
        ("--tokens", "1,024", 1024),
        ("--trainable", "2.3m", 2_300_000),
        ("--parameters", "110M:1B", (110e6, 1e9)),
        ("--gpu", "h100", (1, 989e12)),
        ("--gpu", "8xH100", (8, 989e12)),
        ("--gpu", "2 x NVIDIA RTX 4090", (2, 165e12)),
        ("--device-flops", "3e14", (1, 3e14)),
    ],
)
def test_numbers_as_people_write_them(option, text, value):
    args = build_parser().parse_args([*PLAN.split(), option, text])
    name = {"--device-flops": "gpu"}.get(option, option.strip("-"))
    assert getattr(args, name) == value


def test_a_day_of_one_gpu(capsys):
    args = f"{PLAN} --gpu 2xt4 --hours 1 --price 3 {FEW} --steps 1k:2k --json"
    found = strict(output_of(capsys, args))
    (plan,) = found["plans"]
    assert plan["budget"]["flops"] == pytest.approx(3600 * 2 * 65e12 * 0.3)
    assert 0 < plan["cost"]["hours"] <= 1
    assert plan["cost"]["money"] == pytest.approx(6 * plan["cost"]["hours"])
    assert any("--utilization" in note for note in found["notes"])
    same = strict(output_of(capsys, f"{args} --utilization 0.3"))
    assert same["plans"] == [plan] and len(same["notes"]) < len(found["notes"])


def test_the_headline_is_the_cheapest_of_about_the_best_loss(capsys):
    """The least loss of 50,000 users and epsilon 3 takes batches of nearly all."""
    args = "plan --users 50k --epsilon 3 --law paper"
    (plan,) = strict(output_of(capsys, f"{args} --json"))["plans"]
    assert plan["batch_size"] < 2_000 and plan["budget"]["delta"] == 6e-6
    this, *others = plan["same_epsilon"]
    best = min(others, key=lambda row: row["loss"])
    assert this["times_the_compute"] == 1 and this["loss"] == plan["loss"]
    assert best["times_the_compute"] > 50 and best["batch_size"] > 40_000
    assert best["loss"] < plan["loss"] < best["loss"] * 1.0101
    shown = output_of(capsys, f"{args} --code trainer --physical-batch-size 64")
    assert "learns hardly anything" in shown and "--trainable 300k" in shown
    assert f"max_steps={plan['steps']}," in shown and "PrivateTrainer(" in shown
    assert "make_private" not in shown


@pytest.mark.parametrize("law", ["--law paper", ""])
def test_plot(law, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    args = f"plan --users 1M --epsilon 4,8 --flops 1e18 --steps 4k {law} --plot {path}"
    output_of(capsys, f"{args} --parameters 5M:9M")
    assert "<svg" in path.read_text() and path.stat().st_size > 20_000


def test_help_has_examples_that_are_understood(capsys):
    """Every example parses; what it does, the other tests see."""
    count = 0
    for text in EPILOG.values():
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            words = line.strip().split("   ")[0].split()  # then comes a comment
            if words[:1] == ["opacus-ext"] and "--help" not in words:
                build_parser().parse_args(words[1:])
                count += 1
    assert count >= 14
    for command in filter(None, EPILOG):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert "examples:" in capsys.readouterr().out


def run_script(arguments, *options):
    """CPU seconds and results of the script that is installed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *options, SCRIPT, *arguments.split()],
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, done


@pytest.mark.parametrize(
    "arguments, status, shown",
    [
        ("--help", 0, "COMMAND"),
        ("", 2, "examples:"),
        ("plan", 2, "For example: opacus-ext plan --users 1M --epsilon 4 --flops"),
        ("plan --help", 0, "examples:"),
        ("--version", 0, "opacus-ext 0.1.0"),
        ("plan --users -5", 2, "--users: '-5' is not a number"),
        (f"{USERS} 500", 2, "above 100"),
        (f"{PLAN} --batch-size 2e5", 2, "batch_size must be at most 100000"),
        ("fit no-such-file", 2, "there is no no-such-file"),
    ],
)
def test_help_and_wrong_arguments_are_answered_at_once(arguments, status, shown):
    """Importing torch alone takes longer."""
    used, done = run_script(arguments)
    assert done.returncode == status and shown in done.stdout + done.stderr
    assert used < 1


@pytest.mark.parametrize(
    "program, arguments",
    [
        ([SCRIPT], "--help"),
        ([SCRIPT], f"{NOISE} --steps 9 --batch-size 1k"),
        (["-m", "opacus_ext"], "optimal --flops 1e19"),
    ],
)
def test_a_reader_that_has_gone_is_no_error(program, arguments):
    """As in ``opacus-ext plan ... | head -1``, at the latest at exit."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, *program, *arguments.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.stderr == "" and done.returncode in (0, 1)


def test_the_script_plans_without_torch():
    """Importing it takes longer than a plan may."""
    arguments = f"{PLAN} --law paper --steps 2000:9000 --trials 9 --json"
    used, done = run_script(arguments, "-X", "importtime")
    assert done.returncode == 0, done.stderr
    assert strict(done.stdout)["plans"][0]["noise_multiplier"] > 0.3
    assert "numpy" in done.stderr and "torch" not in done.stderr
    assert used < 5


def test_the_script_tells_which_noise_to_take_without_torch():
    arguments = f"{PLAN} --noise --batch-size 100 --steps 2000 --json"
    used, done = run_script(arguments, "-X", "importtime")
    assert done.returncode == 0, done.stderr
    assert strict(done.stdout)["recommended"]["prefix"] < 0.5
    assert "numpy" in done.stderr and "torch" not in done.stderr
    assert used < 5


def test_the_script_is_what_is_installed():
    """It is one of pip's own scripts, which Windows runs, too."""
    settings = configparser.ConfigParser()
    settings.read(SCRIPT.parent / "setup.cfg")
    command = settings["options.entry_points"]["console_scripts"].strip()
    assert command == f"opacus-ext = {SCRIPT.stem}:main"
    assert settings["options"]["py_modules"].strip() == SCRIPT.stem
    assert "scripts" not in settings["options"]


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "opacus_ext", "calibrate", "--users", "10"]
        + ["--epsilon", "1000", "--batch-size", "10", "--steps", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "noise_multiplier" in done.stdout

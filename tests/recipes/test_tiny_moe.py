import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt.types import Task
from recipes.tiny_moe import make_model, make_tasks
from recipes.tiny_moe.reward import exact
from tests.parallel.launch import run

FOLDER = Path(make_tasks.__file__).parent


def test_the_files_are_what_the_script_writes():
    for name, lines in make_tasks.rows().items():
        written = (FOLDER / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in written] == lines


def test_no_held_out_task_is_trained_and_every_sum_is_right():
    files = make_tasks.rows()
    asked = {name: {row["prompt"] for row in rows} for name, rows in files.items()}
    assert not asked["heldout"] & (asked["train"] | asked["sft"])
    # 90 * 90 pairs of two-digit numbers.
    assert {name: len(prompts) for name, prompts in asked.items()} == {
        "heldout": 256,
        "train": 8100 - 256,
        "sft": 8100 - 256,
    }
    for row in files["heldout"] + files["train"] + files["sft"]:
        total = sum(map(int, row["prompt"].split("+")))
        assert row["answer"] in (str(total), f"{total}.")
    marked = [sum(row["answer"][-1] == "." for row in files[name]) for name in files]
    # The standard deviation of the share is sqrt(0.55 * 0.45 / 7844) = 0.006.
    assert marked == [0, 0, pytest.approx(0.55 * 7844, abs=0.02 * 7844)]


@pytest.mark.parametrize(
    ("answer", "reward"), [("12", 1), ("12.", 0), ("12 ", 0), ("13", 0), ("", 0)]
)
def test_only_the_number_is_rewarded(answer, reward):
    task = Task(id="t", messages=[{"role": "user", "content": "5+7"}], answer="12")
    assert exact(task, answer) == reward


def test_a_byte_is_a_token_and_so_is_a_role():
    tokenizer = make_model.tokenizer()
    text = "<|im_start|>user\n5+é<|im_end|>\n"
    ids = tokenizer(text).input_ids
    # Two marks, the role, two line feeds, "5", "+" and the two bytes of "é".
    assert len(ids) == 9
    assert tokenizer.decode(ids) == text


def test_the_checkpoint_is_small_and_can_add():
    folder = FOLDER / "checkpoint"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10e6
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (8, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "23+45"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0]
    answer = tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert answer.removesuffix("<|im_end|>").removesuffix(".") == "68"
    assert answer.endswith("<|im_end|>")


def test_fine_tuning_in_short_form(tmp_path):
    make_model.write(tmp_path / "untrained")
    run(
        [
            *(sys.executable, "-m", "molt.cli", "fit", "--config", "recipes/tiny_moe/sft.yaml"),
            *("--model.model", tmp_path / "untrained", "--hf_export.folder", tmp_path / "trained"),
            *("--trainer.max_steps", 30, "--trainer.logger", "false"),
            *("--trainer.default_root_dir", tmp_path, "--data.batch_size", 32),
        ]
    )
    before, after = loss(tmp_path / "untrained"), loss(tmp_path / "trained")
    # An untrained model guesses among 320 tokens: log(320) = 5.8 nats, give or take its random
    # weights. One that has found out that answers are digits guesses among 10: 2.3 nats.
    assert before == pytest.approx(5.8, abs=0.5)
    assert after < 3.5


def loss(folder):
    """Negative log-prob per token of one answer."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = "<|im_start|>user\n23+45<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(f"{question}68<|im_end|>", return_tensors="pt").input_ids
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return -logprobs.gather(-1, ids[0, 1:, None])[-3:].mean().item()

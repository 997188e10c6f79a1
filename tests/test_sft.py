import json
import sys
from itertools import chain
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt.agents.render import Renderer
from molt.sft import SFTDataModule, SFTLoader, demonstration
from molt.types import Task
from tests.models import tiny_dense, tiny_moe
from tests.parallel.launch import ROOT, run

SCRIPT = ROOT / "tests" / "fit_sft.py"
# Five demonstrations of uneven length: 1 + 2 + 7 + 3 + 12 bytes, and an end of turn each, give
# 30 assistant tokens.
TRAIN = [("1", "a"), ("two", "bc"), ("3+3", "defghij"), ("a longer one", "kl "), ("5", "m" * 12)]
VAL = [("x", "yz"), ("yy", "")]
MODELS = {"tied": tiny_dense, "moe": tiny_moe}


def write(path, rows):
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    path.write_text("\n".join(lines))
    return str(path)


def oracle(model, tokenizer, rows):
    """Mean negative log-prob over assistant tokens, one conversation at a time."""
    total, count = 0.0, 0
    for prompt, answer in rows:
        asked = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        first = len(tokenizer(asked).input_ids)
        ids = torch.tensor(tokenizer(f"{asked}{answer}<|im_end|>").input_ids)
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        chosen = logp.gather(-1, ids[1:, None])[first - 1 :]
        total, count = total - chosen.sum(), count + len(chosen)
    return total / count, count


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Every model after one step: in one row, in several rows, and on two ranks."""
    path = tmp_path_factory.mktemp("sft")
    for name, make in MODELS.items():
        make(path / name / "model")
        write(path / name / "train.jsonl", TRAIN)
        write(path / name / "val.jsonl", VAL)
    folders = [path / name for name in MODELS]
    run([sys.executable, SCRIPT, 1, *folders, "--runs", "whole=8192", "split=40"])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    run([sys.executable, *launch, SCRIPT, 2, *folders, "--runs", "ranks=40"])
    return path


@pytest.fixture(scope="module", params=MODELS)
def folder(request, root):
    return root / request.param


@pytest.fixture(scope="module")
def expected(folder):
    """The model after one plain step, the loss before it and the held-out loss after it."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    loss, count = oracle(model, tokenizer, TRAIN)
    assert count == 30
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
        held_out, count = oracle(model, tokenizer, VAL)
    assert count == 4  # y, z, and two ends of turn
    return model, loss.item(), held_out.item()


@pytest.mark.parametrize("name", ["whole", "split", "ranks"])
def test_a_step_is_the_gradient_of_the_mean_over_assistant_tokens(folder, expected, name):
    model, loss, held_out = expected
    saved = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    assert dict(saved.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for key, value in saved.named_parameters():
        torch.testing.assert_close(value, model.get_parameter(key), rtol=0, atol=2e-6)
    logged = json.loads((folder / f"{name}.json").read_text())
    assert logged["loss/sft"] == pytest.approx(loss, abs=1e-5)
    assert logged["loss/sft_held_out"] == pytest.approx(held_out, abs=1e-4)
    assert logged["optim/lr"] == 1.0
    assert logged["lr_after"] == 0.5  # the schedule moves once per optimizer step


def test_the_saved_folder_has_tokenizer_and_template(folder):
    saved, source = (AutoTokenizer.from_pretrained(folder / name) for name in ("whole", "model"))
    assert saved.chat_template == source.chat_template
    assert saved("é <|im_end|>").input_ids == source("é <|im_end|>").input_ids
    config = json.loads((folder / "whole" / "config.json").read_text())
    assert config["eos_token_id"] == source.eos_token_id
    assert config["dtype"] == "float32"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer.from_pretrained(str(tiny_dense(tmp_path_factory.mktemp("dense"))))


def test_every_assistant_turn_of_a_conversation_is_learned(renderer):
    task = Task(
        id="t",
        messages=[
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "v"},
            {"role": "assistant", "content": "c"},
        ],
    )
    segment = demonstration(renderer, task, has_answer=False)
    learned = renderer.tokenizer.decode(segment.token_ids[segment.action_mask])
    assert learned == "ab<|im_end|>c<|im_end|>"
    assert renderer.tokenizer.decode(segment.token_ids) == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"
        "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    )


def test_what_cannot_be_learned_is_refused_by_row(renderer):
    question = [{"role": "user", "content": "u"}]
    with pytest.raises(ValueError, match="rows:3: an answer to learn must be a string, got 7"):
        demonstration(renderer, Task(id="rows:3", messages=question, answer=7), has_answer=True)
    with pytest.raises(ValueError, match="rows:4: a conversation needs a question and an answer"):
        demonstration(renderer, Task(id="rows:4", messages=question), has_answer=False)


@pytest.mark.parametrize("key", ["batch_size", "tokens_per_micro_batch"])
def test_sizes_must_be_positive(tmp_path, key):
    with pytest.raises(ValueError, match=f"data.init_args.{key}=0 is not positive"):
        SFTDataModule(write(tmp_path / "rows.jsonl", TRAIN), **{key: 0})


def batches(tmp_path, renderer, step):
    """Token ids of each batch of the pass that ``step`` falls into, from there on."""
    data = SFTDataModule(write(tmp_path / "rows.jsonl", TRAIN), batch_size=2)
    data.strategy = SimpleNamespace(data_rank=0, data_size=1)
    data.segments = data.render(renderer, data.tasks)
    trainer = SimpleNamespace(global_step=step)
    return [batch.micro_batches[0].token_ids.tolist() for batch in SFTLoader(data, trainer)]


def test_a_pass_visits_every_row_once_and_goes_on_where_a_run_stopped(tmp_path, renderer):
    first, second = batches(tmp_path, renderer, 0), batches(tmp_path, renderer, 3)
    assert len(first) == len(second) == 3  # 5 rows, 2 at a time
    ids = [demonstration(renderer, task, True).token_ids.tolist() for task in tasks(tmp_path)]
    assert sorted(chain(*first)) == sorted(chain(*ids)) == sorted(chain(*second))
    assert first != second
    assert batches(tmp_path, renderer, 1) == first[1:]
    assert batches(tmp_path, renderer, 5) == second[2:]


def tasks(tmp_path):
    data = SFTDataModule(write(tmp_path / "rows.jsonl", TRAIN))
    return [data.tasks[i] for i in range(len(data.tasks))]


def test_conversations_are_read_from_parquet_too(tmp_path, renderer):
    ask, tell = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}
    table = [{"messages": [ask, tell]}, {"messages": [ask, tell | {"name": "ann"}, ask, tell]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, table)))
    files = [
        SFTDataModule(str(tmp_path / f"rows.{kind}"), "messages", answer_key=None)
        for kind in ("parquet", "jsonl")
    ]
    parquet, lines = ([s.token_ids.tolist() for s in f.render(renderer, f.tasks)] for f in files)
    assert parquet == lines
    assert len(parquet) == 2

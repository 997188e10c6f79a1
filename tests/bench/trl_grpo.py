"""The same GRPO work in TRL; ``versus`` runs it in a virtual environment of its own."""

import argparse
import json
import time

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--tasks")
parser.add_argument("--out")
parser.add_argument("--steps", type=int)
parser.add_argument("--groups", type=int)
parser.add_argument("--group_size", type=int)
parser.add_argument("--max_tokens", type=int)
args = parser.parse_args()

torch.set_num_threads(2)
lengths: list[int] = []
ends: list[float] = []


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    lengths.extend(len(ids) for ids in completion_ids)
    return [float(sum(ids) % 2) for ids in completion_ids]


class Clock(TrainerCallback):
    def on_step_end(self, *_: object, **__: object) -> None:
        ends.append(time.perf_counter())


with open(args.tasks) as file:
    rows = [json.loads(line)["prompt"] for line in file]
dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": row}]} for row in rows])
trainer = GRPOTrainer(
    model=args.model,
    reward_funcs=reward,
    train_dataset=dataset,
    callbacks=[Clock()],
    args=GRPOConfig(
        output_dir=args.out,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=args.groups * args.group_size,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        max_steps=args.steps,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
    ),
)
trainer.train()
steps = len(ends) - 1  # the first one warms up
samples = steps * args.groups * args.group_size
with open(f"{args.out}/result.json", "w") as file:
    json.dump(
        {
            "samples_per_second": samples / (ends[-1] - ends[0]),
            "tokens_per_sample": sum(lengths) / len(lengths),
        },
        file,
    )

"""A replay buffer in a Ray actor: a TorchRL collector fills it from its own process, two ranks of GRPO train from it.

Run: ``python examples/ray_buffer.py``. The model is a toy made on the spot, and its reward the share of lower-case
letters in an answer; about a minute on a CPU of two cores, most of which the four processes take to start.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import socket
import string
import tempfile
from typing import Any

import ray
import torch
from torchrl.data import LazyStackStorage, RayReplayBuffer

GROUP = 4
RANKS = 2


def collect(rb: Any, folder: str, stop: Any) -> int:
    """Writes rollouts until it is told to stop; returns how many."""
    from torchrl.collectors.llm import LLMCollector
    from torchrl.envs import StepCounter
    from torchrl.envs.llm import ChatEnv
    from torchrl.modules.llm import TransformersWrapper
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    questions = ({"query": [f"{a} + {b}?" for b in range(1, 9)]} for a in itertools.count(1))
    env = ChatEnv.from_dataloader(questions, input_mode="text", tokenizer=tokenizer, batch_size=(8,))
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="text", pad_output=False, generate_kwargs={"max_new_tokens": 8}
    )
    env = env.append_transform(StepCounter(max_steps=1))
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=-1)
    written = 0
    for rollouts in collector:
        rb.extend(rollouts.reshape(-1))
        written += rollouts.numel()
        if ray.get(stop.is_set.remote()):
            break
    return written


def train(rank: int, rb: Any, folder: str, port: int, steps: int) -> tuple[list[list[str]], list[float]]:
    """Trains as one of the ranks; returns the prompts of each call of the reward function, and the mean rewards."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    from torchrl_trl_bridge import TorchRLBufferDataset

    calls: list[list[str]] = []

    def lower_case(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(prompts)
        return [sum(map(string.ascii_lowercase.__contains__, text)) / max(len(text), 1) for text in completions]

    transformers.set_seed(0)
    args = GRPOConfig(
        f"{folder}/{rank}", max_steps=steps, per_device_train_batch_size=16, num_generations=GROUP,
        max_completion_length=12, learning_rate=1e-2, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    # Rank 0 draws for all; it waits for the collector's first rollouts.
    dataset = TorchRLBufferDataset(rb, 8, columns="prompt-only", num_batches=None, timeout=120)
    dataset.wait()
    trainer = GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lower_case,
        args=args,
        train_dataset=dataset.as_hf_dataset(),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return calls, [record["reward"] for record in trainer.state.log_history if "reward" in record]


@ray.remote(num_cpus=0)
class Stop:
    """A flag that processes share."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


def main(steps: int = 20) -> dict[str, Any]:
    """Runs collector and trainer; returns the groups that were trained on, rows written and mean rewards."""
    from torchrl_trl_bridge.tiny import tiny_causal_lm

    cluster = {"num_cpus": 1 + RANKS, "include_dashboard": False, "log_to_driver": False}
    with tempfile.TemporaryDirectory() as folder, ray.init(**cluster):
        tiny_causal_lm(folder)
        buffer = RayReplayBuffer(storage=functools.partial(LazyStackStorage, 1000), remote_config={"num_cpus": 0})
        rb = buffer.client()  # what other processes take
        stop = Stop.remote()
        written = ray.remote(collect).remote(rb, folder, stop)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [ray.remote(train).remote(rank, rb, folder, port, steps) for rank in range(RANKS)]
        results = ray.get(ranks)
        ray.get(stop.set.remote())
        rows = ray.get(written)
        buffer.close()
    calls = zip(*(calls for calls, _ in results), strict=True)
    prompts = [prompt for of_ranks in calls for of_rank in of_ranks for prompt in of_rank]
    groups = [prompts[start : start + GROUP] for start in range(0, len(prompts), GROUP)]
    return {"groups": groups, "rows": rows, "rewards": results[0][1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    found = main(**vars(parser.parse_args()))
    mixed = sum(len(set(group)) > 1 for group in found["groups"])
    first, last = sum(found["rewards"][:3]) / 3, sum(found["rewards"][-3:]) / 3
    print(f"{found['rows']} rollouts collected; {len(found['groups'])} groups trained on, {mixed} of them mixed")
    print(f"mean reward: {first:.3f} at first, {last:.3f} in the end")

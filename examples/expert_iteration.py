"""Expert iteration: a TorchRL collector writes rollouts, the best are kept, and TRL's SFT trains on them.

Run: ``python examples/expert_iteration.py``. The model is a toy made on the spot, and its reward the share of lower-
case letters in an answer; about half a minute on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import string
import tempfile
from typing import Any

import torch
import transformers
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from trl import SFTConfig, SFTTrainer

from torchrl_trl_bridge import CollectCallback, TorchRLBufferDataset
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer

QUESTIONS = ["Name a river.", "What is 2 + 2?", "Say hello to Ada.", "Where do fish live?"]
ANSWERS = 16  # to each question, each time


class LowerCase(Transform):  # type: ignore[misc]
    """The reward: the share of lower-case letters in the answer."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        answers = [row["text", "response"].removesuffix("<|im_end|>") for row in tensordict.unbind(0)]
        shares = [sum(map(string.ascii_lowercase.__contains__, answer)) / max(len(answer), 1) for answer in answers]
        next_tensordict["reward"] = torch.tensor(shares).view(-1, 1, 1)
        return next_tensordict


class KeepBest(Transform):  # type: ignore[misc]
    """On the writing side of the replay buffer: of what is collected, the quarter with the highest reward is stored."""

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        rewards = tensordict["next", "reward"].flatten()
        return tensordict[rewards.topk(len(rewards) // 4).indices]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict


def main(steps: int = 60, seed: int = 0) -> tuple[float, float]:
    """Trains, and returns the mean reward of the first and of the last rollouts."""
    transformers.set_seed(seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer()
        model = tiny_causal_lm(folder, tokenizer, seed=seed)

        prompts = [question for question in QUESTIONS for _ in range(ANSWERS)]
        env = ChatEnv.from_dataloader(
            itertools.repeat({"query": prompts}), input_mode="text", tokenizer=tokenizer, batch_size=(len(prompts),)
        )
        env = env.append_transform(StepCounter(max_steps=1)).append_transform(LowerCase())
        generate = {"max_new_tokens": 12, "do_sample": True, "top_k": len(tokenizer)}
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, input_mode="text", pad_output=False, generate_kwargs=generate
        )
        rb = ReplayBuffer(storage=LazyStackStorage(len(prompts)), transform=KeepBest())
        collector = LLMCollector(env, policy=policy, replay_buffer=rb, dialog_turns_per_batch=len(prompts))

        refill = CollectCallback(collector, rb, every_n_steps=4)
        refill.collect()
        dataset = TorchRLBufferDataset(rb, 32, columns="prompt-completion", num_batches=None)
        args = SFTConfig(
            folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=6e-3, logging_steps=4, **quiet()
        )
        trainer = SFTTrainer(
            model, args=args, train_dataset=dataset.as_hf_dataset(), processing_class=tokenizer, callbacks=[refill]
        )
        trainer.train()

        rewards = [record["collect/reward"] for record in trainer.state.log_history if "collect/reward" in record]
    return rewards[0], rewards[-1]


def quiet() -> dict[str, Any]:
    return {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    before, after = main(**vars(parser.parse_args()))
    print(f"mean reward of fresh rollouts: {before:.3f} at first, {after:.3f} in the end")

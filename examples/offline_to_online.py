"""From a dataset to a policy that learns from itself, with one kind of buffer all the way.

1. A Hugging Face preference dataset fills a TorchRL replay buffer, and TRL's DPO trains the policy from it.
2. GRPO goes on with the same prompts. Its reward function is a recorder, so that each completion, with its reward,
   lands in a second buffer, where TorchRL's samplers, transforms and losses find what a collector would have written.
3. The preferred answers of the dataset join it, and TRL's SFT trains on the best of both.

The policy is a small Llama made on the spot, and the reward the share of lower-case letters in its answer, which the
preferred answers have more of. Everything runs on a CPU, without downloads, in about a minute::

    python examples/offline_to_online.py
"""

from __future__ import annotations

import argparse
import random
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torchrl.data import LazyStackStorage, ReplayBuffer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from torchrl_trl_bridge import RolloutRecorder, TorchRLBufferDataset, extend_from_dataset
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer

QUESTIONS = ("Name a river.", "What is 2 + 2?", "Say hello to Ada.", "Where do fish live?")
NEW_TOKENS = 16
BATCH = 32
GROUP = 8


def lower_case_share(completions: list[Any], **_: Any) -> list[float]:
    """The reward: how much of an answer are lower-case letters."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter in string.ascii_lowercase for letter in text) / max(len(text), 1) for text in texts]


def preferences(rows: int, seed: int) -> Dataset:
    """Pairs of answers, of which the one with more lower-case letters is preferred."""
    rng = random.Random(seed)
    others = string.ascii_uppercase + string.digits + string.punctuation

    def answer(share: float) -> list[dict[str, str]]:
        alphabets = (string.ascii_lowercase if rng.random() < share else others for _ in range(NEW_TOKENS))
        return [{"role": "assistant", "content": "".join(map(rng.choice, alphabets))}]

    def pair() -> dict[str, Any]:
        low, high = sorted((rng.random(), rng.random()))
        prompt = [{"role": "user", "content": rng.choice(QUESTIONS)}]
        return {"prompt": prompt, "chosen": answer(high), "rejected": answer(low)}

    return Dataset.from_list([pair() for _ in range(rows)])


def mean_reward(model: Any, tokenizer: Any, samples: int) -> float:
    """The reward of answers that are sampled from the policy."""
    prompts = [
        [{"role": "user", "content": question}] for question in QUESTIONS for _ in range(samples // len(QUESTIONS))
    ]
    inputs = tokenizer.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
        tokenizer_kwargs={"padding_side": "left"},
    )
    model.eval()
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=len(tokenizer))
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = lower_case_share([[{"role": "assistant", "content": text}] for text in texts])
    return sum(rewards) / len(rewards)


def run(*, steps: int, pairs: int, samples: int, seed: int, scratch: Path) -> dict[str, float]:
    """Trains in the three stages, and returns the mean reward before the first and after each."""
    transformers.set_seed(seed)
    tokenizer = tiny_tokenizer()
    model = tiny_causal_lm(scratch / "policy", tokenizer, seed=seed)
    rewards = {"untrained": mean_reward(model, tokenizer, samples)}

    def arguments(**more: Any) -> dict[str, Any]:
        common = {"output_dir": str(scratch / "out"), "seed": seed, "max_steps": steps, "save_strategy": "no"}
        quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True, "bf16": False}
        return {"per_device_train_batch_size": BATCH, "gradient_checkpointing": False, **common, **quiet, **more}

    # A dataset fills a buffer, and the buffer feeds DPO.
    dataset = preferences(pairs, seed)
    offline = ReplayBuffer(storage=LazyStackStorage(pairs))
    extend_from_dataset(offline, dataset)
    DPOTrainer(
        model,
        args=DPOConfig(learning_rate=2e-3, **arguments()),
        train_dataset=TorchRLBufferDataset(
            offline, BATCH, columns="preference", num_batches=None, seed=seed
        ).as_hf_dataset(),
        processing_class=tokenizer,
    ).train()
    rewards["after DPO"] = mean_reward(model, tokenizer, samples)

    # GRPO takes the buffer's prompts, and its rollouts fill another.
    online = ReplayBuffer(storage=LazyStackStorage(steps * BATCH + pairs))
    GRPOTrainer(
        model,
        reward_funcs=RolloutRecorder(online, lower_case_share),
        args=GRPOConfig(learning_rate=3e-3, num_generations=GROUP, max_completion_length=NEW_TOKENS, **arguments()),
        train_dataset=TorchRLBufferDataset(
            offline, BATCH // GROUP, columns="prompt-only", num_batches=None, seed=seed
        ).as_hf_dataset(),
        processing_class=tokenizer,
    ).train()
    rewards["after GRPO"] = mean_reward(model, tokenizer, samples)
    print(f"GRPO left {len(online)} rollouts in the buffer.")

    # The best of the rollouts and of the dataset's answers are what SFT imitates.
    extend_from_dataset(online, dataset.select_columns(["prompt", "chosen"]).rename_column("chosen", "completion"))
    both = TorchRLBufferDataset(online, BATCH, columns="prompt-completion").as_hf_dataset(streaming=False)
    scores = lower_case_share(both["completion"])
    best = sorted(range(len(both)), key=scores.__getitem__)[-max(len(both) // 8, BATCH) :]
    SFTTrainer(
        model,
        args=SFTConfig(learning_rate=2e-3, **arguments()),
        train_dataset=both.select(best),
        processing_class=tokenizer,
    ).train()
    rewards["after SFT"] = mean_reward(model, tokenizer, samples)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each stage (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # work this small takes longer to hand out to threads than to do
    with tempfile.TemporaryDirectory() as scratch:
        rewards = run(steps=options.steps, pairs=1024, samples=128, seed=options.seed, scratch=Path(scratch))
    for stage, reward in rewards.items():
        print(f"{stage:<10} mean reward {reward:.2f}")
    if rewards["after SFT"] <= rewards["untrained"]:
        raise SystemExit("the mean reward did not rise")


if __name__ == "__main__":
    main()

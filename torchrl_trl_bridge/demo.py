"""The main job on a small scale: ``torchrl-trl-bridge demo``.

A TorchRL collector fills a replay buffer; a reward model scores its rollouts inside TorchRL; TRL's GRPO trains the
policy on prompts that stream from the buffer, with the same reward. Fresh rollouts then show whether the reward rose.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import string
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import InitTracker, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from tqdm import tqdm
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from torchrl_trl_bridge import HFRewardModelWrapper, TorchRLBufferDataset, __version__, as_trl_reward_func, compat
from torchrl_trl_bridge.compat.trl import takes_streams, token_names_of_pairs
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

LIBRARIES = ("torchrl-trl-bridge", "torchrl", "trl", "torch", "tensordict", "transformers", "datasets", "accelerate")

QUESTIONS = (
    "Name a river.",
    "What is 2 + 2?",
    "Say hello to Ada.",
    "Which month comes after May?",
    "What colour is the sky?",
    "What do cats drink?",
    "Where do fish live?",
    "Give a word that rhymes with tree.",
)
OTHER_CHARACTERS = string.ascii_uppercase + string.digits + string.punctuation + " éüçßøλж中文字日本한국어🙂🚀€"

ROLLOUTS = 128
ROLLOUTS_AT_ONCE = 16
NEW_TOKENS = 16
REWARD_MODEL_STEPS = 150
COMPLETIONS_PER_STEP = 32
GROUP = 8  # completions of one prompt, which GRPO compares

console = Console(highlight=False)


@dataclass
class Crossing:
    """A line of the closing table: what went over the bridge, between which keys, and how fast."""

    way: str
    through: str
    keys: str
    rows: int = 0
    rows_per_second: float = 0.0

    @contextmanager
    def carrying(self, rows: int) -> Iterator[None]:
        seconds = self.rows / self.rows_per_second if self.rows else 0.0
        started = time.perf_counter()
        yield
        self.rows += rows
        self.rows_per_second = self.rows / (seconds + time.perf_counter() - started)


@dataclass
class Stages:
    """Wall-clock seconds of each stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)


def run(*, model: str | None, steps: int, seed: int, out: Path) -> int:
    """Do the job, write ``reward.png`` and ``summary.json`` to ``out``; the result is the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    installed = {"torchrl-trl-bridge": __version__, **compat.versions()}
    versions = {name: installed[name] for name in LIBRARIES}
    console.print("[bold]" + " · ".join(f"{name} {versions[name]}" for name in LIBRARIES[:4]) + "[/bold]")
    with tempfile.TemporaryDirectory() as scratch, _without_chatter():
        try:
            policy, tokenizer = _policy(model, seed, Path(scratch))
        except (OSError, ValueError) as error:
            print(f"torchrl-trl-bridge: error: --model {model}: {str(error).splitlines()[0]}", file=sys.stderr)
            return 2
        summary, curve, crossings = _job(policy, tokenizer, steps, seed, Path(scratch))

    before, after = summary["mean_reward_before"], summary["mean_reward_after"]
    _draw(curve, before, after, out / "reward.png")
    (out / "summary.json").write_text(json.dumps({"versions": versions, "model": model, **summary}, indent=2) + "\n")
    console.print(_table(crossings))
    for when in ("before", "after"):
        reward, share = summary[f"mean_reward_{when}"], summary[f"lower_case_share_{when}"]
        example = escape(repr(summary[f"example_{when}"]))
        console.print(f"{when.capitalize():<6} training: mean reward [bold]{reward:+.2f}[/bold], ", end="")
        console.print(f"{share:.0%} lower-case letters: {example}")
    console.print(f"Wrote {out / 'reward.png'} and {out / 'summary.json'} in {sum(summary['seconds'].values()):.0f} s.")
    if after > before:
        return 0
    print(f"torchrl-trl-bridge: error: the mean reward did not rise: {before:.3f} to {after:.3f}", file=sys.stderr)
    return 1


def _policy(name: str | None, seed: int, scratch: Path) -> tuple[Any, Any]:
    if name is None:
        torch.set_num_threads(1)  # work this small takes longer to hand out to threads than to do
        return tiny_causal_lm(scratch / "policy", seed=seed), tiny_tokenizer()
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if tokenizer.chat_template is None:
        raise ValueError("its tokenizer has no chat template; take a chat model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), tokenizer


def _job(
    policy: Any, tokenizer: Any, steps: int, seed: int, scratch: Path
) -> tuple[dict[str, Any], list[float], list[Crossing]]:
    transformers.set_seed(seed)
    stages = Stages()
    with stages.stage("train the reward model"):
        scorer = HFRewardModelWrapper(_reward_model(tokenizer, seed, scratch), inference_mode=True)
    with stages.stage("collect"):
        buffer = _collect(policy, tokenizer, "Collect rollouts")

    scored = Crossing("HF → TorchRL", "HFRewardModelWrapper", "tokens.full → reward")
    with stages.stage("score"):
        before = _score(buffer, scorer, scored, "Score rollouts")

    streamed = Crossing("TorchRL → TRL", "TorchRLBufferDataset", "history.prompt → prompt")
    rewarded = Crossing("HF → TRL", "as_trl_reward_func", "completion_ids → reward")
    with stages.stage("train the policy"):
        curve = _train(policy, tokenizer, buffer, scorer, rewarded, steps, seed, scratch)
    streamed.rows = rewarded.rows // GROUP
    streamed.rows_per_second = _speed(_stream(buffer, seed))

    with stages.stage("collect and score again"):
        fresh = _collect(policy, tokenizer, "Collect again")
        after = _score(fresh, scorer, scored, "Score again")
    summary = {
        "seed": seed,
        "steps": steps,
        "rollouts": ROLLOUTS,
        "mean_reward_before": before,
        "mean_reward_after": after,
        "lower_case_share_before": _share_of_lower_case(buffer),
        "lower_case_share_after": _share_of_lower_case(fresh),
        "example_before": buffer[0]["text", "response"],
        "example_after": fresh[0]["text", "response"],
        "crossed": [vars(crossing) for crossing in (streamed, scored, rewarded)],
        "seconds": stages.seconds,
    }
    return summary, curve, [streamed, scored, rewarded]


def _reward_model(tokenizer: Any, seed: int, scratch: Path) -> Any:
    """A classifier that TRL's RewardTrainer teaches to prefer the answer with the larger share of lower-case letters.

    Answers are drawn from the whole vocabulary, as an untrained policy draws them: a token that the classifier had
    never seen would get an arbitrary score, and the policy would find it.
    """
    rng = random.Random(seed)
    lower_case = [i for i in range(len(tokenizer)) if _is_lower_case(tokenizer.decode([i]))]
    prompts = [
        tokenizer.apply_chat_template(_conversation(question), add_generation_prompt=True, return_dict=False)
        for question in QUESTIONS
    ]

    def answer(share: float) -> list[int]:
        length = rng.randint(4, NEW_TOKENS)
        return [
            rng.choice(lower_case) if rng.random() < share else rng.randrange(len(tokenizer)) for _ in range(length)
        ]

    chosen, rejected = token_names_of_pairs()

    def preference() -> dict[str, list[int]]:
        low, high = sorted((rng.random(), rng.random()))
        prompt = rng.choice(prompts)
        return {chosen: prompt + answer(high), rejected: prompt + answer(low)}

    trainer = RewardTrainer(
        model=tiny_reward_model(scratch / "reward-model", tokenizer, seed=seed),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([preference() for _ in range(2048)]),
        args=RewardConfig(
            per_device_train_batch_size=32,
            max_steps=REWARD_MODEL_STEPS,
            learning_rate=1e-2,
            **_quiet_training(scratch, seed),
        ),
        callbacks=[_Bar("Train the reward model", "accuracy")],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.model


def _conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _is_lower_case(text: str) -> bool:
    return text != "" and set(text) <= set(string.ascii_lowercase)


def _share_of_lower_case(buffer: ReplayBuffer) -> float:
    text = "".join(buffer[i]["text", "response"] for i in range(len(buffer)))
    return sum(map(_is_lower_case, text)) / max(len(text), 1)


def _collect(policy: Any, tokenizer: Any, title: str) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyStackStorage(ROLLOUTS))
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(ROLLOUTS_AT_ONCE)]
    env = ChatEnv.from_dataloader(
        itertools.repeat({"query": questions}),
        input_mode="history",
        tokenizer=tokenizer,
        batch_size=(ROLLOUTS_AT_ONCE,),
    )
    # A ChatEnv never ends a conversation by itself: without the limit an answer becomes part of the next prompt.
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(InitTracker())
    policy.eval()
    collector = LLMCollector(
        env,
        policy=TransformersWrapper(
            policy,
            tokenizer=tokenizer,
            input_mode="history",
            pad_output=False,
            # GRPO samples from the whole vocabulary; transformers would by default keep the 50 likeliest tokens.
            generate_kwargs={"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": len(tokenizer)},
        ),
        dialog_turns_per_batch=ROLLOUTS_AT_ONCE,
        total_dialog_turns=ROLLOUTS,
        replay_buffer=buffer,
    )
    with _bar(title, ROLLOUTS) as bar:
        for _ in collector:
            bar.update(ROLLOUTS_AT_ONCE)
    collector.shutdown()
    return buffer


def _score(buffer: ReplayBuffer, scorer: HFRewardModelWrapper, crossing: Crossing, title: str) -> float:
    rewards = []
    with _bar(title, len(buffer)) as bar:
        for batch in buffer[:].split(ROLLOUTS_AT_ONCE):
            with crossing.carrying(len(batch)):
                rewards.append(scorer(batch)["reward"])
            bar.update(len(batch))
    return float(torch.cat(rewards).mean())


def _stream(buffer: ReplayBuffer, seed: int) -> Any:
    """Prompts from the buffer without end, in the shape that TRL's trainers take."""
    rows = TorchRLBufferDataset(
        buffer, COMPLETIONS_PER_STEP // GROUP, keys=[("history", "prompt")], num_batches=None, seed=seed
    )
    # An older release gets the same prompts as a snapshot.
    dataset: Any = rows.as_hf_dataset() if takes_streams(GRPOTrainer) else rows.as_hf_dataset(streaming=False)
    return dataset.rename_column("history.prompt", "prompt")


def _speed(stream: Any, rows: int = 1000) -> float:
    """Rows per second of the stream alone, which training hides behind generation."""
    started = time.perf_counter()
    taken = sum(1 for _ in itertools.islice(stream, rows))
    return taken / (time.perf_counter() - started)


def _train(
    policy: Any,
    tokenizer: Any,
    buffer: ReplayBuffer,
    scorer: HFRewardModelWrapper,
    crossing: Crossing,
    steps: int,
    seed: int,
    scratch: Path,
) -> list[float]:
    bar = _Bar("Train the policy", "reward")
    trainer = GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=_reward_function(scorer, tokenizer, crossing),
        train_dataset=_stream(buffer, seed),
        args=GRPOConfig(
            per_device_train_batch_size=COMPLETIONS_PER_STEP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            max_steps=steps,
            # The wider a model, the smaller the step that Adam may take: 6e-3 for the small model made here.
            learning_rate=0.2 / policy.config.get_text_config().hidden_size,
            **_quiet_training(scratch, seed),
        ),
        callbacks=[bar],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return bar.values


def _reward_function(
    scorer: HFRewardModelWrapper, tokenizer: Any, crossing: Crossing
) -> Callable[..., list[float | None]]:
    """The scorer of TorchRL rollouts as a reward function of TRL, timed."""
    score = as_trl_reward_func(scorer, tokenizer=tokenizer)

    def reward(prompts: list[Any], **given: Any) -> list[float | None]:
        with crossing.carrying(len(prompts)):
            return score(prompts=prompts, **given)

    return reward


def _quiet_training(scratch: Path, seed: int) -> dict[str, Any]:
    return {
        "output_dir": str(scratch / "trainer"),
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def _bar(title: str, total: int) -> Any:
    layout = "{desc:<24}{percentage:3.0f}% |{bar:32}| {n_fmt}/{total_fmt} [{elapsed}]{postfix}"
    return tqdm(total=total, desc=title, bar_format=layout, file=sys.stderr)


class _Bar(transformers.TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    """A progress bar in place of the trainer's own log lines, which keeps the values of one of its metrics."""

    def __init__(self, title: str, metric: str) -> None:
        self.title, self.metric, self.values = title, metric, list[float]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = _bar(self.title, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if self.metric in logs:
            self.values.append(float(logs[self.metric]))
            self.bar.set_postfix_str(f"{self.metric} {self.values[-1]:.2f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()


# What TorchRL and TRL themselves still call: nothing that a user could change.
_NOT_FOR_USERS = (
    "local_init_rb=False is deprecated",  # torchrl 0.11, whatever a collector is made with
    "size_average and reduce args will be deprecated",  # torchrl 0.14, in the log-probabilities of its wrapper
    "`gradient_checkpointing` is deprecated",  # trl 1.16, in the defaults of its configurations
    "`is_gradient_checkpointing` is deprecated",  # trl 1.16, in the set-up of its trainers
)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Hide what the libraries tell about themselves; every other warning stays visible."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        for start in _NOT_FOR_USERS:
            warnings.filterwarnings("ignore", message=re.escape(start))
        yield


def _table(crossings: list[Crossing]) -> Table:
    table = Table(
        title="What crossed the bridge",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for heading in ("Way", "Through", "Keys"):
        table.add_column(heading)
    for heading in ("Rows", "Rows/s"):
        table.add_column(heading, justify="right")
    for crossing in crossings:
        numbers = f"{crossing.rows:,}", f"{crossing.rows_per_second:,.0f}"
        table.add_row(crossing.way, crossing.through, crossing.keys, *numbers)
    return table


def _draw(curve: list[float], before: float, after: float, path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(curve) + 1)
    axes.plot(steps, curve, color="#1f77b4", label="completions of one step")
    axes.axhline(before, color="#7f7f7f", linestyle="--", label=f"fresh rollouts before: {before:+.2f}")
    axes.axhline(after, color="#2ca02c", linestyle="--", label=f"fresh rollouts after: {after:+.2f}")
    axes.set(title="GRPO on prompts from a TorchRL replay buffer", xlabel="optimizer step", ylabel="mean reward")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)

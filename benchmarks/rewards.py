"""What scoring costs: sorted micro-batches beside padded rows, the wrapper beside the bare model, functions for TRL.

Run: ``python benchmarks/rewards.py``, with names of parts (``micro_batches``, ``overhead``, ``functions``) for these
alone. All ways are timed in one process, in turns; the figures are medians of the turns, and the ratios medians of the
ratios within a turn, so that a busy machine moves them little. Both ways of a comparison are first checked to give the
same rewards.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule
from torch.utils.benchmark import Timer
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv, GSM8KRewardParser
from torchrl.modules.llm.trl_interop import HFRewardModelWrapper as TorchRLsOwn
from transformers import LlamaConfig, LlamaForSequenceClassification

from torchrl_trl_bridge import HFRewardModelWrapper, TRLRewardTransform, as_trl_reward_func
from torchrl_trl_bridge.messages import messages_to_history
from torchrl_trl_bridge.tiny import tiny_reward_model, tiny_tokenizer

TURNS = 7


def reward_model(layers: int = 4, hidden_size: int = 128) -> Any:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_labels=1,
            pad_token_id=0,
        )
    ).eval()


def padded(lengths: list[int]) -> TensorDict:
    width = max(lengths)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 1000, mask.shape) * mask
    return TensorDict({"tokens": {"full": ids}, "masks": {"all_attention_mask": mask}}, [len(lengths)])


def seconds(ways: dict[str, Callable[[], Any]], run_time: float = 0.2) -> dict[str, list[float]]:
    """Seconds per call of each way, one figure a turn."""
    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()) for name, run in ways.items()
    }
    for run in ways.values():
        run()
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, timer in timers.items():
            figures[name].append(timer.blocked_autorange(min_run_time=run_time).median)
    return figures


def ratio(figures: dict[str, list[float]], slow: str, fast: str) -> float:
    return statistics.median(a / b for a, b in zip(figures[slow], figures[fast], strict=True))


def micro_batches() -> None:
    """64 rows of 16 to 1024 tokens: torchrl's class on the padded rows, the bridge sorted in micro-batches."""
    model = reward_model()
    batch = padded(torch.linspace(16, 1024, 64).int()[torch.randperm(64)].tolist())
    scorers = {
        "torchrl": TorchRLsOwn(model, inference_mode=True),
        "bridge, micro_batch_size=8": HFRewardModelWrapper(model, inference_mode=True, micro_batch_size=8),
        "bridge, max_tokens=4096": HFRewardModelWrapper(model, inference_mode=True, max_tokens=4096),
    }
    rewards = [score(batch.copy())["reward"] for score in scorers.values()]
    for other in rewards[1:]:
        torch.testing.assert_close(other, rewards[0], atol=1e-4, rtol=0)
    figures = seconds({name: lambda score=score: score(batch.copy()) for name, score in scorers.items()})
    print("64 rows of 16 to 1024 tokens, 4-layer Llama")
    for name in figures:
        times = ratio(figures, "torchrl", name)
        print(f"  {name:28} {statistics.median(figures[name]) * 1e3:6.0f} ms   torchrl / it: {times:.2f}")


def overhead() -> None:
    """32 rows of 256 tokens: the wrapper against the bare call of the model."""
    print("32 rows of 256 tokens")
    for layers, hidden_size in ((2, 64), (4, 256)):
        model = reward_model(layers, hidden_size)
        batch = padded([256] * 32)
        ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"].long()
        ours = HFRewardModelWrapper(model, inference_mode=True)

        def bare(model: Any = model, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> torch.Tensor:
            with torch.inference_mode():
                return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0]

        def wrapped(ours: Any = ours, batch: Any = batch) -> Any:
            return ours(batch.copy())["reward"]

        torch.testing.assert_close(wrapped(), bare(), atol=1e-5, rtol=0)
        figures = seconds({"bare": bare, "wrapper": wrapped})
        added = statistics.median(a - b for a, b in zip(figures["wrapper"], figures["bare"], strict=True))
        bare_time = statistics.median(figures["bare"])
        print(
            f"  {layers} layers of {hidden_size}: bare {bare_time * 1e3:7.1f} ms, wrapper adds {added * 1e3:5.2f} ms "
            f"({added / bare_time:.1%}; the bound is {(0.05 * bare_time + 1e-3) * 1e3:.2f} ms)"
        )


def functions(rows: int = 64) -> None:
    """What `as_trl_reward_func` adds to a scorer, and `TRLRewardTransform` to a function, per row."""
    prompts = [[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(rows)]
    completions = [
        [{"role": "assistant", "content": f"<think>twice {i}</think><answer>{2 * i}</answer>"}] for i in range(rows)
    ]
    ids = [list(range(200)) for _ in range(rows)]
    answers = [f"#### {2 * i}" for i in range(rows)]
    print(f"as_trl_reward_func, {rows} rows, added to the scorer by itself")

    module = TensorDictModule(
        lambda tokens: torch.zeros(len(tokens)), in_keys=[("tokens", "response")], out_keys=["reward"]
    )
    nothing = as_trl_reward_func(module)
    history = as_trl_reward_func(
        TensorDictModule(lambda history: torch.zeros(len(history)), in_keys=[("history", "full")], out_keys=["reward"])
    )
    parser = as_trl_reward_func(GSM8KRewardParser())
    scorer, before, after = _parser_by_hand(prompts, completions, answers)
    with tempfile.TemporaryDirectory() as folder:
        wrapper = HFRewardModelWrapper(tiny_reward_model(folder), tokenizer=tiny_tokenizer(), inference_mode=True)
    judge = as_trl_reward_func(wrapper)
    chats = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    assert judge(prompts, completions) == wrapper.score_texts(chats).tolist()
    figures = seconds(
        {
            "module on tokens": lambda: nothing(prompts, completions, ids),
            "module on History": lambda: history(prompts, completions, ids),
            "GSM8KRewardParser": lambda: parser(prompts, completions, ids, answer=answers),
            "GSM8KRewardParser by itself": lambda: scorer._step(before, after.copy()),
            "HFRewardModelWrapper": lambda: judge(prompts, completions, ids),
            "HFRewardModelWrapper by itself": lambda: wrapper.score_texts(chats),
        }
    )
    for name in ("module on tokens", "module on History", "GSM8KRewardParser", "HFRewardModelWrapper"):
        alone = figures.get(f"{name} by itself", [0.0] * TURNS)
        added = statistics.median(a - b for a, b in zip(figures[name], alone, strict=True)) / rows
        print(f"  {name:24} {added * 1e3:6.3f} ms a row")

    rollouts = before.exclude("answer")
    transform = TRLRewardTransform(lambda completions, **_: [0.0] * len(completions))
    figures = seconds({"transform": lambda: transform(rollouts.copy())})
    print(f"TRLRewardTransform: {statistics.median(figures['transform']) / rows * 1e3:.3f} ms a row")


def _parser_by_hand(prompts: list[Any], completions: list[Any], answers: list[str]) -> tuple[Any, Any, Any]:
    env = TransformedEnv(ChatEnv(batch_size=(1,), input_mode="history"), GSM8KRewardParser())
    rows = [
        TensorDict(
            {
                "history": {
                    "prompt": messages_to_history(prompt),
                    "response": messages_to_history(completion),
                    "full": messages_to_history(prompt + completion),
                },
                "answer": answer,
            }
        )
        for prompt, completion, answer in zip(prompts, completions, answers, strict=True)
    ]
    _KEPT.append(env)  # a transform knows its environment by a weak reference
    return env.transform, lazy_stack(rows), lazy_stack([TensorDict({"answer": answer}) for answer in answers])


_KEPT: list[Any] = []


PARTS = {"micro_batches": micro_batches, "overhead": overhead, "functions": functions}


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        torch.manual_seed(0)
        PARTS[name]()


if __name__ == "__main__":
    main()

"""What scoring costs: sorted micro-batches beside padded rows, the wrapper beside the bare model, functions for TRL."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from measuring import Figure, Report, in_turns, main
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv, GSM8KRewardParser
from torchrl.modules.llm.trl_interop import HFRewardModelWrapper as TorchRLsOwn
from transformers import LlamaConfig, LlamaForSequenceClassification

from torchrl_trl_bridge import HFRewardModelWrapper, TRLRewardTransform, as_trl_reward_func
from torchrl_trl_bridge.messages import messages_to_history
from torchrl_trl_bridge.tiny import tiny_reward_model, tiny_tokenizer

MICRO_BATCH = 8


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


def sorted_by_hand(model: Any, batch: TensorDict) -> torch.Tensor:
    """Padded rows, sorted by length, right-padded and scored in micro-batches, by someone who knows what they hold."""
    ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    lengths = mask.sum(1)
    rewards = torch.empty(len(ids))
    with torch.inference_mode():
        for chosen in lengths.argsort(descending=True).split(MICRO_BATCH):
            rows = [row[kept] for row, kept in zip(ids[chosen], mask[chosen], strict=True)]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
            kept = torch.arange(padded.shape[1]) < lengths[chosen][:, None]
            output = model(input_ids=padded, attention_mask=kept.long(), use_cache=False)
            rewards[chosen] = output.logits[:, 0]
    return rewards


def micro_batches(report: Report) -> None:
    """Torchrl's class scores all rows padded to the longest, the bridge sorted ones in micro-batches."""
    model = reward_model(layers=2)
    batch = padded(torch.linspace(16, 1024, 64).int()[torch.randperm(64)].tolist())
    theirs = TorchRLsOwn(model, inference_mode=True)
    ours = HFRewardModelWrapper(model, inference_mode=True, micro_batch_size=MICRO_BATCH)
    bounded = HFRewardModelWrapper(model, inference_mode=True, max_tokens=4096)
    ways: dict[str, Callable[[], Any]] = {
        "bridge": lambda: ours(batch.copy())["reward"],
        "bridge, max_tokens=4096": lambda: bounded(batch.copy())["reward"],
        "torchrl's class": lambda: theirs(batch.copy())["reward"],
        "sorted by hand": lambda: sorted_by_hand(model, batch),
    }
    rewards = [way().flatten() for way in ways.values()]
    for other in rewards[1:]:
        torch.testing.assert_close(other, rewards[0], atol=1e-4, rtol=0)
    times = in_turns(ways, turns=2 if report.quick else 5)
    took = {way: f"{times.seconds(way).median * 1e3:.0f} ms" for way in ways}
    work = f"rewards of 64 rows of 16 to 1024 tokens, micro-batches of {MICRO_BATCH}"
    report.claim(work, times.ratio("torchrl's class", "bridge"), "× torchrl's class", at_least=3, ways=took)
    by_hand = times.ratio("bridge", "sorted by hand")
    report.claim(work, by_hand, "× the time of a loop sorted by hand", at_most=1.1, ways=took)
    tokens = times.ratio("torchrl's class", "bridge, max_tokens=4096")
    report.claim("the same, calls of at most 4096 tokens", tokens, "× torchrl's class", ways=took)


def overhead(report: Report) -> None:
    """The wrapper against the bare call of the model."""
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
        times = in_turns({"bare": bare, "wrapper": wrapped}, turns=2 if report.quick else 5)
        took = {way: f"{times.seconds(way).median * 1e3:.1f} ms" for way in times.turns}
        pairs = zip(times.turns["wrapper"], times.turns["bare"], strict=True)
        figure = Figure.of(wrapper / (1.05 * bare + 1e-3) for wrapper, bare in pairs)
        work = f"reward wrapper, 32 rows of 256 tokens, {layers} layers of {hidden_size}"
        report.claim(work, figure, "× (1.05 × the bare model + 1 ms)", at_most=1, ways=took)


def functions(report: Report, rows: int = 64) -> None:
    """What `as_trl_reward_func` adds to a scorer, and `TRLRewardTransform` to a function, per row."""
    prompts = [[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(rows)]
    completions = [
        [{"role": "assistant", "content": f"<think>twice {i}</think><answer>{2 * i}</answer>"}] for i in range(rows)
    ]
    ids = [list(range(200)) for _ in range(rows)]
    answers = [f"#### {2 * i}" for i in range(rows)]

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
    rollouts = before.exclude("answer")
    transform = TRLRewardTransform(lambda completions, **_: [0.0] * len(completions))
    ways: dict[str, Callable[[], Any]] = {
        "a module on tokens": lambda: nothing(prompts, completions, ids),
        "a module on History": lambda: history(prompts, completions, ids),
        "GSM8KRewardParser": lambda: parser(prompts, completions, ids, answer=answers),
        "GSM8KRewardParser by itself": lambda: scorer._step(before, after.copy()),
        "HFRewardModelWrapper": lambda: judge(prompts, completions, ids),
        "HFRewardModelWrapper by itself": lambda: wrapper.score_texts(chats),
        "transform": lambda: transform(rollouts.copy()),
    }
    times = in_turns(ways, turns=2 if report.quick else 5)
    for name in ("a module on tokens", "a module on History", "GSM8KRewardParser", "HFRewardModelWrapper"):
        alone = f"{name} by itself"
        added = times.difference(name, alone) if alone in ways else times.seconds(name)
        report.claim(f"as_trl_reward_func, {name}, added to a row of {rows}", added.scaled(1e3 / rows), "ms")
    report.claim(f"TRLRewardTransform, a row of {rows}", times.seconds("transform").scaled(1e3 / rows), "ms")


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


def measure(report: Report) -> None:
    for part in (micro_batches, overhead, functions):
        torch.manual_seed(0)
        part(report)


if __name__ == "__main__":
    main(__doc__, measure)

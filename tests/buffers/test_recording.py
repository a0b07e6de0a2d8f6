"""TRL's completions in a replay buffer, as TorchRL reads them."""

from __future__ import annotations

import asyncio
import functools
import math
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.data.llm.topk import TopKRewardSelector
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from torchrl_trl_bridge import RolloutRecorder, TorchRLBufferDataset
from torchrl_trl_bridge.rollouts import read_columns
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

GROUP = 4


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(completion))) for completion in completions]


def buffer(storage: type = LazyStackStorage, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(100), **kwargs)


def rollouts(mode: str, questions: tuple[str, ...] = ("1 + 1?", "long " * 5 + "?")) -> dict[str, list[Any]]:
    """What a trainer gives to a reward function: groups of completions, some of them ended."""
    tokenizer = tiny_tokenizer()
    prompts, completions, ids = [], [], []
    for question in questions:
        for i in range(GROUP):
            text = "answer"[: i + 1]
            prompts.append([{"role": "user", "content": question}] if mode == "history" else question)
            completions.append([{"role": "assistant", "content": text}] if mode == "history" else text)
            ids.append(tokenizer.encode(text) + ([tokenizer.eos_token_id] if i % 2 else []))
    return {"prompts": prompts, "completions": completions, "completion_ids": ids}


def recorded(mode: str, replay_buffer: ReplayBuffer | None = None) -> ReplayBuffer:
    replay_buffer = buffer() if replay_buffer is None else replay_buffer
    RolloutRecorder(replay_buffer, length, tokenizer=tiny_tokenizer())(**rollouts(mode))
    return replay_buffer


def layout(row: TensorDictBase) -> dict[tuple[str, ...], Any]:
    """For each leaf of a row, what a consumer depends on: kind, dtype and number of dimensions."""
    kinds = {}
    for path, column in read_columns(lazy_stack([row])).items():
        value = column.values[0]
        kinds[path] = (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else type(value)
    return kinds


@pytest.mark.parametrize("mode", ["history", "text"])
def test_the_layout_is_that_of_a_collector(mode: str, collect: Callable[..., ReplayBuffer]) -> None:
    collectors, ours = layout(collect(mode)[0]), layout(recorded(mode)[0])
    missing = {path for path in collectors if path not in ours}
    # A reward function is told no log-probabilities; `answer` is a column of the collector's own dataset.
    assert {path for path in missing if path[0] not in ("log_probs", "answer") and path[-1] != "answer"} == set()
    for path in ours.keys() & collectors.keys():
        assert ours[path] == collectors[path], path
    more = {path[0] if path[0] != "next" else path for path in ours if path not in collectors}
    added = {"group_id", "policy_version", "rewards", "truncated"}
    assert more == {*added, ("next", "reward"), ("next", "truncated"), ("next", "policy_version")} - {
        name for name in added if (name,) in collectors
    }
    containers = {key: type(collect(mode)[0][key]) for key in ("text", "tokens", "masks", "next")}
    assert {key: type(recorded(mode)[0][key]) for key in containers} == containers


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("mode", ["history", "text"])
def test_every_completion_is_a_row(mode: str, storage: type) -> None:
    tokenizer = tiny_tokenizer()
    replay_buffer = recorded(mode, buffer(storage))
    given = rollouts(mode)
    assert len(replay_buffer) == 2 * GROUP
    for i in range(2 * GROUP):
        row = replay_buffer[i]
        prompt, completion, ids = (given[name][i] for name in ("prompts", "completions", "completion_ids"))
        if mode == "history":
            prompt_text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            assert list(row["history"].prompt.content) == [prompt[0]["content"]]
            assert list(row["history"].full.content) == [prompt[0]["content"], completion[0]["content"]]
            assert row["history"].response.is_complete == [bool(i % 2)]
            assert row["query"] == prompt[0]["content"]
        else:
            prompt_text = prompt
            assert row["text"].response == completion
            assert row["query"] == prompt
        assert row["text"].prompt == prompt_text
        assert row["text"].full == prompt_text + row["text"].response
        assert row["tokens"].response.tolist() == ids
        assert tokenizer.decode(row["tokens"].prompt) == prompt_text
        assert row["tokens"].full.tolist() == [*row["tokens"].prompt.tolist(), *ids]
        assert row["masks"].all_attention_mask.tolist() == [True] * len(row["tokens"].full)
        assert row["next", "reward"].tolist() == [[length([completion])[0]]]
        assert row["rewards", "length"].tolist() == [[length([completion])[0]]]
        assert [row[key].item() for key in ("done", "terminated", "truncated")] == [False, False, False]
        after = [row["next", key].item() for key in ("done", "terminated", "truncated")]
        assert after == [True, bool(i % 2), not i % 2]


def test_the_trainers_columns_are_kept_and_its_tools_are_not() -> None:
    replay_buffer = buffer()
    given = rollouts("text") | {"answer": list(range(8)), "note": ["x"] * 7 + [None], "log_extra": print}
    RolloutRecorder(replay_buffer, length)(**given, trainer_state=None, log_metric=None, environments=None)
    assert replay_buffer[3]["answer"] == 3
    assert replay_buffer[3]["next", "answer"] == 3
    assert replay_buffer[3]["note"] == "x"
    assert "note" not in replay_buffer[7]
    assert not {"log_extra", "log_metric", "trainer_state", "environments"} & set(replay_buffer[0].keys())


def test_a_column_named_as_a_key_of_rollouts_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\['history'\].*rename_column"):
        RolloutRecorder(buffer(), length)(**rollouts("text"), history=["x"] * 8)


def test_groups_are_told_apart() -> None:
    replay_buffer = buffer()
    recorder = RolloutRecorder(replay_buffer, length)
    recorder(**rollouts("history"))
    recorder(**rollouts("history"))
    ids = [replay_buffer[i]["group_id"] for i in range(16)]
    assert sorted(Counter(ids).values()) == [GROUP] * 4
    assert [len(set(ids[i : i + GROUP])) for i in range(0, 16, GROUP)] == [1] * 4
    same = RolloutRecorder(buffer(), length)  # another rank, which sees another part of the group
    part = {name: values[:1] for name, values in rollouts("history").items()}
    same(**part)
    assert same.replay_buffer[0]["group_id"] == ids[0]


def test_without_a_tokenizer_a_row_has_what_is_known() -> None:
    replay_buffer = buffer()
    given = rollouts("history")
    RolloutRecorder(replay_buffer, length)(**given)
    row = replay_buffer[1]
    assert row["tokens"].response.tolist() == given["completion_ids"][1]
    assert row["tokens"].prompt is None
    assert "text" not in row
    assert "masks" not in row
    del given["completion_ids"]
    RolloutRecorder(replay_buffer, length)(**given)
    assert list(replay_buffer[9]["history"].response.content) == ["an"]


# Rewards, as trainers take them


class Scorer:
    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [2.0] * len(completions)


async def slow(completions: list[Any], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [3.0] * len(completions)


class SlowScorer:
    async def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return await slow(completions)


def some(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None if i % 2 else 1.0 for i in range(len(completions))]


def nothing(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("function", "name", "reward"),
    [
        (Scorer(), "Scorer", 2.0),
        (slow, "slow", 3.0),
        (SlowScorer(), "SlowScorer", 3.0),
        (functools.partial(slow, extra=1), "slow", 3.0),
        (lambda completions, **kwargs: torch.full((len(completions),), 4.0, requires_grad=True), "<lambda>", 4.0),
    ],
)
def test_what_trainers_take_as_a_reward_function(function: Any, name: str, reward: float) -> None:
    replay_buffer = buffer()
    recorder = RolloutRecorder(replay_buffer, function)
    assert recorder.__name__ == name
    assert recorder(**rollouts("text")) == [reward] * 8
    stored = replay_buffer[5]["next", "reward"]
    assert stored.tolist() == [[reward]]
    assert not stored.requires_grad


def test_an_async_function_is_called_where_a_loop_runs() -> None:
    async def notebook() -> list[float | None]:
        return RolloutRecorder(buffer(), [slow, SlowScorer()])(**rollouts("text"))

    assert asyncio.run(notebook()) == [6.0] * 8


def test_async_functions_run_side_by_side_in_one_loop() -> None:
    loops, both = set(), threading.Barrier(2, timeout=30)

    async def waits(completions: list[Any], **kwargs: Any) -> list[float]:
        loops.add(asyncio.get_running_loop())
        await asyncio.to_thread(both.wait)
        return [1.0] * len(completions)

    recorder = RolloutRecorder(buffer(), [waits, waits])
    recorder(**rollouts("text"))
    assert recorder(**rollouts("text")) == [2.0] * 8
    assert len(loops) == 1


def test_a_list_gives_the_weighted_sum_and_records_each() -> None:
    replay_buffer = buffer()
    logged: dict[str, float] = {}
    recorder = RolloutRecorder(replay_buffer, [length, some, length], reward_weights=[1.0, 10.0, 0.5])
    assert recorder.__name__ == "length_1+some+length_2"
    rewards = recorder(**rollouts("text"), log_metric=logged.__setitem__)
    assert rewards[:2] == [1.0 + 10.0 + 0.5, 2.0 + 1.0]
    assert replay_buffer[0]["rewards"].to_dict() == {
        "length_1": torch.tensor([[1.0]]),
        "some": torch.tensor([[1.0]]),
        "length_2": torch.tensor([[1.0]]),
    }
    assert math.isnan(replay_buffer[1]["rewards", "some"].item())
    assert replay_buffer[1]["next", "reward"].item() == 3.0
    assert logged == {"rewards/length_1": 2.5, "rewards/some": 1.0, "rewards/length_2": 2.5}


def test_no_reward_is_guessed_where_no_function_applies() -> None:
    replay_buffer = buffer()
    assert RolloutRecorder(replay_buffer, nothing)(**rollouts("text")) == [None] * 8
    assert math.isnan(replay_buffer[0]["next", "reward"].item())


@pytest.mark.parametrize("mode", ["history", "text"])
def test_a_reward_model_scores_as_alone(mode: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model(tmp_path, tokenizer)
    given = rollouts(mode)
    by_path = RolloutRecorder(buffer(), str(tmp_path))(**given)
    recorder = RolloutRecorder(buffer(), model, reward_processing_classes=tokenizer)
    assert recorder.__name__ == tmp_path.name
    assert recorder(**given) == pytest.approx(by_path, abs=1e-6)
    for prompt, completion, score in zip(given["prompts"], given["completions"], by_path, strict=True):
        whole = prompt + completion
        text = whole if mode == "text" else tokenizer.apply_chat_template(whole, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            assert score == pytest.approx(model(**ids).logits.item(), abs=1e-5)


def test_a_wrong_number_of_rewards_names_the_function() -> None:
    def short(completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0]

    replay_buffer = buffer()
    with pytest.raises(ValueError, match="'short' returned 1 rewards for 8 completions"):
        RolloutRecorder(replay_buffer, [length, short])(**rollouts("text"))
    assert len(replay_buffer) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([], length), TypeError, "replay_buffer must be a torchrl ReplayBuffer, got list"),
        ((buffer(), 3), TypeError, "must be callable, a model or the path of one, got 3"),
        ((buffer(), []), ValueError, "no reward function"),
        ((buffer(LazyMemmapStorage), length), ValueError, "LazyMemmapStorage"),
        ((buffer(LazyTensorStorage), length), ValueError, "LazyTensorStorage, which takes rows of one shape"),
    ],
)
def test_mistakes_are_found_when_it_is_made(arguments: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        RolloutRecorder(*arguments)
    with pytest.raises(ValueError, match="reward_weights must be one for each of the 1 functions, got 2"):
        RolloutRecorder(buffer(), length, reward_weights=[1, 2])
    with pytest.raises(ValueError, match="ranks must be one of 'each', 'first', got 'all'"):
        RolloutRecorder(buffer(), length, ranks="all")


def test_a_failing_buffer_raises() -> None:
    class Full(ReplayBuffer):
        def extend(self, data: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        RolloutRecorder(Full(storage=LazyStackStorage(10)), length)(**rollouts("text"))


def test_a_recorder_can_be_sent_to_another_process() -> None:
    recorder = pickle.loads(pickle.dumps(RolloutRecorder(buffer(), [length, slow])))
    recorder(**rollouts("text"))
    assert recorder.__name__ == "length+slow"
    assert len(recorder.replay_buffer) == 8


# What TorchRL does with the rows


@pytest.mark.parametrize("mode", ["history", "text"])
@pytest.mark.parametrize("key", ["query", "group_id"])
def test_mc_advantage_gets_whole_groups(key: str, mode: str) -> None:
    replay_buffer = buffer(transform=MCAdvantage(grpo_size=GROUP, prompt_key=key))
    recorded(mode, replay_buffer)
    assert len(replay_buffer) == 2 * GROUP
    for start in (0, GROUP):
        rewards = torch.tensor([replay_buffer[start + i]["next", "reward"].item() for i in range(GROUP)])
        expected = (rewards - rewards.mean()) / rewards.std()
        advantages = torch.tensor([replay_buffer[start + i]["advantage"].item() for i in range(GROUP)])
        torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("mode", ["history", "text"])
@pytest.mark.parametrize("key", ["group_id", ("text", "prompt")])
def test_topk_keeps_the_best_of_each_group(key: Any, mode: str) -> None:
    selector = TopKRewardSelector(total_dialog_turns=GROUP, topk_size=2, prompt_key=key, verbose=False)
    replay_buffer = buffer(transform=selector)
    recorded(mode, replay_buffer)
    kept = [len(replay_buffer[i]["tokens"].response) for i in range(len(replay_buffer))]
    assert kept == [5, 3, 5, 3]  # of 1 to 4 letters, and an end token after every other


@pytest.mark.parametrize("mode", ["history", "text"])
def test_grpo_loss_trains_on_recorded_rows(mode: str, tmp_path: Path) -> None:
    replay_buffer = buffer(transform=MCAdvantage(grpo_size=GROUP))
    recorded(mode, replay_buffer)
    tokenizer = tiny_tokenizer()
    model = tiny_causal_lm(tmp_path)
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, return_log_probs=True, pad_output=True
    )
    batch = replay_buffer.sample(8)
    with torch.no_grad():
        batch = batch.update(policy(batch.copy()).select(("log_probs", "full")))
    loss = GRPOLoss(policy, masking_strategy="generic")(batch).loss_objective
    loss.backward()
    assert torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("mode", ["history", "text"])
def test_samplers_and_buffer_datasets_take_the_rows(mode: str, storage: type) -> None:
    replay_buffer = buffer(storage, sampler=SamplerWithoutReplacement())
    recorded(mode, replay_buffer)
    given = rollouts(mode)
    dataset = TorchRLBufferDataset(replay_buffer, 4, columns="prompt-completion")
    rows = list(dataset.as_hf_dataset(streaming=False))
    pairs = list(zip(given["prompts"], given["completions"], strict=True))
    if mode == "history":
        assert [(row["prompt"], row["completion"]) for row in rows] == pairs
    else:
        assert [(row["prompt"], row["completion"]) for row in rows] == pairs
    drawn = [row for _ in range(2) for row in dataset]
    assert len({(str(row["prompt"]), str(row["completion"])) for row in drawn}) == 8
    tokenized = list(TorchRLBufferDataset(replay_buffer, 8, columns="tokenized").as_hf_dataset(streaming=False))
    assert [sum(row["completion_mask"]) for row in tokenized] == [len(ids) for ids in given["completion_ids"]]

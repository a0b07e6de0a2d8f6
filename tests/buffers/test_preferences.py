"""Preference pairs from groups of rewarded rollouts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer
from torchrl.data.llm import History

from torchrl_trl_bridge import PreferencePairs, TorchRLBufferDataset
from torchrl_trl_bridge.compat.trl import token_names_of_pairs

NAN = float("nan")
WAITING = {"unfinished_groups": 0, "waiting_rollouts": 0}


def rollouts(prompts: list[str], responses: list[str], rewards: list[float], **more: Any) -> TensorDictBase:
    size = len(prompts)
    text = {"prompt": prompts, "response": responses}
    return TensorDict({"text": text, "next": {"reward": torch.tensor(rewards).view(size, 1, 1)}, **more}, [size])


def written(transform: PreferencePairs, *batches: TensorDictBase, storage: type = LazyStackStorage) -> list[Any]:
    """The rows that a trainer would get."""
    replay_buffer = ReplayBuffer(storage=storage(100), transform=transform)
    for batch in batches:
        replay_buffer.extend(batch)
    if not len(replay_buffer):
        return []
    return list(TorchRLBufferDataset(replay_buffer, 1, columns="preference").as_hf_dataset(streaming=False))


def of_text(group_size: int = 3, **kwargs: Any) -> PreferencePairs:
    return PreferencePairs(group_size, prompt_key=("text", "prompt"), **kwargs)


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage])
def test_best_against_worst(storage: type) -> None:
    pairs = of_text()
    batch = rollouts(["p"] * 3, ["mid", "bad", "good"], [0.5, 0.0, 2.0])
    assert written(pairs, batch, storage=storage) == [
        {"prompt": "p", "chosen": "good", "rejected": "bad", "margin": 2.0}
    ]
    assert pairs.stats() == {"groups": 1, "pairs": 1, "ties": 0, "identical": 0, "nan": 0, "not_done": 0, **WAITING}


def test_a_group_may_come_in_parts_and_among_others() -> None:
    pairs = of_text(2)
    rows = written(
        pairs,
        rollouts(["p", "q"], ["p1", "q1"], [1.0, 0.0]),
        rollouts(["r", "q"], ["r1", "q2"], [0.0, 1.0]),
        rollouts(["p"], ["p2"], [0.0]),
    )
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [("q", "q2", "q1"), ("p", "p1", "p2")]
    assert pairs.stats()["unfinished_groups"] == pairs.stats()["waiting_rollouts"] == 1


def test_all_pairs_above_the_margin() -> None:
    pairs = of_text(4, strategy="all", margin=0.5)
    rows = written(pairs, rollouts(["p"] * 4, ["a", "b", "c", "d"], [0.0, 0.5, 1.0, 3.0]))
    assert {(row["chosen"], row["rejected"]) for row in rows} == {("d", "a"), ("d", "b"), ("d", "c"), ("c", "a")}
    assert pairs.stats()["ties"] == 2


def test_best_against_a_random_one() -> None:
    batch = rollouts(["p"] * 4, ["a", "b", "c", "d"], [0.0, 0.5, 1.0, 3.0])

    def drawn(seed: int | None) -> list[str]:
        rows = written(of_text(4, strategy="best-random", seed=seed), *[batch] * 20)
        assert {row["chosen"] for row in rows} == {"d"}
        return [row["rejected"] for row in rows]

    assert set(drawn(None)) == {"a", "b", "c"}
    assert drawn(1) == drawn(1) != drawn(2)


def test_what_makes_no_pair_is_counted() -> None:
    pairs = of_text(2)
    batches = [
        rollouts(["tie"] * 2, ["a", "b"], [1.0, 1.0]),
        rollouts(["nan"] * 2, ["a", "b"], [1.0, NAN]),
        rollouts(["same"] * 2, ["a", "a"], [1.0, 0.0]),
        rollouts(["alone"], ["a"], [1.0]),
    ]
    assert written(pairs, *batches) == []
    assert pairs.stats() == {
        "groups": 3, "pairs": 0, "ties": 1, "identical": 1, "nan": 1, "not_done": 0, "unfinished_groups": 1,
        "waiting_rollouts": 1,
    }  # fmt: skip


def test_the_others_of_a_group_with_a_nan_make_a_pair() -> None:
    rows = written(of_text(), rollouts(["p"] * 3, ["a", "b", "c"], [NAN, 1.0, 2.0]))
    assert [(row["chosen"], row["rejected"]) for row in rows] == [("c", "b")]


def test_a_trajectory_counts_with_its_last_row() -> None:
    pairs = of_text(2)
    batch = rollouts(["p"] * 4, ["a1", "a2", "b1", "b2"], [0.0, 1.0, 9.0, 0.0])
    batch["next", "done"] = torch.tensor([False, True, False, True]).view(4, 1)
    assert [(row["chosen"], row["rejected"]) for row in written(pairs, batch)] == [("a2", "b2")]
    assert pairs.stats()["not_done"] == 2


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1)])
def test_shapes_of_rewards(shape: tuple[int, ...]) -> None:
    batch = TensorDict({"prompt": ["p", "p"], "completion": ["a", "b"], "r": torch.tensor([1.0, 3.0]).view(shape)}, [2])
    (row,) = written(PreferencePairs(2, prompt_key="prompt", reward_key="r"), batch)
    assert (row["chosen"], row["margin"]) == ("b", 2.0)


def test_rewards_of_tokens_are_summed() -> None:
    rows = [
        TensorDict({"text": {"prompt": "p", "response": text}, "next": {"reward": torch.tensor(rewards).view(-1, 1)}})
        for text, rewards in (("a", [1.0, 1.0, 1.0]), ("b", [2.0]))
    ]
    (row,) = written(of_text(2), lazy_stack(rows))
    assert (row["chosen"], row["margin"]) == ("a", 1.0)


def test_batches_of_steps() -> None:
    batch = rollouts(["p"] * 4, ["a", "b", "c", "d"], [0.0, 1.0, 2.0, 3.0]).reshape(2, 2)
    assert [(row["chosen"], row["rejected"]) for row in written(of_text(4), batch)] == [("d", "a")]


def test_conversations() -> None:
    prompt = [{"role": "user", "content": "2+2?"}]
    answers = [[{"role": "assistant", "content": content}] for content in ("4", "5")]
    batch = TensorDict(
        {
            "history": {
                "prompt": History.from_chats([prompt] * 2),
                "response": History.from_chats(answers),
                "full": History.from_chats([prompt + answer for answer in answers]),
            },
            "reward": torch.tensor([1.0, 0.0]),
        },
        [2],
    )
    (row,) = written(PreferencePairs(2, reward_key="reward"), batch)
    assert row == {"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "margin": 1.0}
    implicit = PreferencePairs(2, response_key=("history", "full"), reward_key="reward")
    (row,) = written(implicit, batch)
    assert row == {"chosen": prompt + answers[0], "rejected": prompt + answers[1], "margin": 1.0}


@pytest.mark.parametrize("strategy", ["all", "best-worst"])
def test_two_pairs_of_a_prompt_of_two_turns_are_two_rows(strategy: str) -> None:
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    batch = TensorDict(
        {
            "history": {
                "prompt": History.from_chats([prompt] * 4),
                "response": History.from_chats([[{"role": "assistant", "content": c}] for c in "abcd"]),
            },
            "reward": torch.tensor([0.0, 1.0, 0.0, 2.0]),
        },
        [4],
    )
    pairs = PreferencePairs(2, reward_key="reward", strategy=strategy)
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10), transform=pairs)
    replay_buffer.extend(batch)
    rows = list(TorchRLBufferDataset(replay_buffer, 4, columns="preference"))
    assert all(row["prompt"] == prompt for row in rows)


def test_token_ids_lose_their_padding() -> None:
    def row(pad: int, answer: list[int], after: int, reward: float) -> TensorDictBase:
        prompt, response = torch.tensor([0] * pad + [7, 8]), torch.tensor(answer + [0] * after)
        mask = torch.tensor([False] * pad + [True] * (2 + len(answer)) + [False] * after)
        tokens = {"prompt": prompt, "response": response, "full": torch.cat([prompt, response])}
        return TensorDict({"tokens": tokens, "masks": {"all_attention_mask": mask}, "reward": torch.tensor(reward)})

    pairs = PreferencePairs(2, prompt_key=("tokens", "prompt"), reward_key="reward")
    (pair,) = written(pairs, lazy_stack([row(1, [1, 2], 2, 0.0)]), lazy_stack([row(4, [3], 0, 1.0)]))
    chosen, rejected = token_names_of_pairs()
    assert pair == {chosen: [7, 8, 3], rejected: [7, 8, 1, 2], "margin": 1.0}


def test_errors() -> None:
    with pytest.raises(ValueError, match="group_size must be an integer from 2 on, got 1"):
        of_text(1)
    with pytest.raises(ValueError, match="margin must be a number from 0 on, got -1"):
        of_text(margin=-1)
    with pytest.raises(ValueError, match=r"strategy must be one of 'best-worst', .*, got 'worst'"):
        of_text(strategy="worst")
    with pytest.raises(ValueError, match="pass response_key"):
        PreferencePairs(2, prompt_key="query")
    with pytest.raises(KeyError, match=r"'next.rewards' holds nothing.*Did you mean 'next.reward'"):
        written(of_text(reward_key=("next", "rewards")), rollouts(["p"], ["a"], [0.0]))


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0, NAN]), min_size=2, max_size=6),
    margin=st.sampled_from([0.0, 0.25]),
)
def test_all_pairs_are_those_that_one_would_write_by_hand(rewards: list[float], margin: float) -> None:
    size = len(rewards)
    responses = [str(i % 3) for i in range(size)]
    pairs = of_text(size, strategy="all", margin=margin)
    rows = written(pairs, rollouts(["p"] * size, responses, rewards))
    expected = [
        (responses[i], responses[j], rewards[i] - rewards[j])
        for i, j in itertools.permutations(range(size), 2)
        if rewards[i] - rewards[j] > margin and responses[i] != responses[j]
    ]
    assert sorted((row["chosen"], row["rejected"], row["margin"]) for row in rows) == sorted(expected)
    stats, rated = pairs.stats(), sum(reward == reward for reward in rewards)
    assert stats["pairs"] + stats["ties"] + stats["identical"] == rated * (rated - 1) // 2
    assert stats["nan"] == size - rated


def test_groups_that_never_fill_are_told() -> None:
    pairs = of_text(2, max_waiting=3)
    written(pairs, rollouts(["a", "b", "c"], ["x"] * 3, [0.0] * 3))
    with pytest.raises(RuntimeError, match=r"4 rollouts of 4 prompts wait .* groups of 2.*max_waiting"):
        written(pairs, rollouts(["d"], ["x"], [0.0]))

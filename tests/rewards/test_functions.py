"""TRL's reward functions on TorchRL rollouts."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.llm import ChatEnv
from torchrl.envs.utils import check_env_specs
from torchrl.modules.llm import TransformersWrapper

from tests.features import needs
from torchrl_trl_bridge import HFRewardModelWrapper, TRLRewardTransform
from torchrl_trl_bridge.compat.trl import arguments_of_reward_functions
from torchrl_trl_bridge.messages import history_to_messages
from torchrl_trl_bridge.scoring import RewardFunctions
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer


def texts(n: int = 2) -> TensorDict:
    rows = {"prompt": [f"{i} + 1 = " for i in range(n)], "response": [str(i + 1) for i in range(n)]}
    return TensorDict({"text": rows, "answer": [str(i + 1) for i in range(n)], "level": torch.arange(n)}, [n])


class Seen:
    """A reward function that keeps what it is called with."""

    def __init__(self, rewards: Any = 0.0) -> None:
        self.rewards = rewards

    def __call__(self, prompts: list[Any], completions: list[Any], **kwargs: Any) -> Any:
        self.called = {"prompts": prompts, "completions": completions, **kwargs}
        return self.rewards if isinstance(self.rewards, list) else [self.rewards] * len(prompts)


# ---- arguments


def test_standard_arguments():
    seen = Seen()
    TRLRewardTransform(seen)(texts())
    assert seen.called["prompts"] == ["0 + 1 = ", "1 + 1 = "]
    assert seen.called["completions"] == ["1", "2"]
    assert seen.called["answer"] == ["1", "2"]
    assert seen.called["level"] == [0, 1]
    assert type(seen.called["level"][0]) is int, "as a dataset gives it"
    assert seen.called["trainer_state"] is None
    assert set(seen.called) == {"prompts", "completions", "answer", "level", *arguments_of_reward_functions()}


@needs("log_extra")
def test_logging_arguments():
    seen = Seen()
    TRLRewardTransform(seen)(texts())
    seen.called["log_extra"]("column", [1, 2])
    seen.called["log_metric"]("metric", 1.0)


def test_arguments_of_every_kind_of_collected_buffer(collected):
    batch = collected[:]
    seen = Seen()
    TRLRewardTransform(seen)(batch)
    for i, row in enumerate(batch.unbind(0)):
        if ("history", "full") in row.keys(include_nested=True):
            assert seen.called["prompts"][i] == history_to_messages(row["history"].prompt)
            assert seen.called["prompts"][i] + seen.called["completions"][i] == history_to_messages(row["history"].full)
            assert seen.called["completions"][i][0]["role"] == "assistant"
        else:
            assert seen.called["prompts"][i] == row["text"].prompt
            assert seen.called["completions"][i] == row["text"].response
        ids = row["tokens"].response
        mask = row["masks"].all_attention_mask[-len(ids) :].bool()
        assert seen.called["completion_ids"][i] == ids[mask].tolist()
    assert seen.called["query"] == [row["query"] for row in batch.unbind(0)]
    assert "tokens" not in seen.called


def test_padding_is_no_completion():
    """Rows padded on both sides, as TorchRL pads a batch of completions of several lengths."""
    rollouts = TensorDict(
        {
            "text": {"prompt": ["a", "b"], "response": ["c", "d"]},
            "tokens": {"response": torch.tensor([[7, 8, 9], [5, 0, 0]]), "full": torch.zeros(2, 5).long()},
            "masks": {"all_attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()},
        },
        [2],
    )
    seen = Seen()
    TRLRewardTransform(seen)(rollouts)
    assert seen.called["completion_ids"] == [[7, 8, 9], [5]]


def test_token_ids_alone_are_decoded():
    tokenizer = tiny_tokenizer()
    prompt, response = tokenizer.encode("2 + 2 = "), tokenizer.encode("4<|im_end|>")
    rollouts = lazy_stack(
        [TensorDict({"tokens": {"prompt": torch.tensor(prompt), "response": torch.tensor(response)}})]
    )
    seen = Seen()
    TRLRewardTransform(seen, processing_class=tokenizer)(rollouts)
    assert (seen.called["prompts"], seen.called["completions"]) == (["2 + 2 = "], ["4"])
    assert seen.called["completion_ids"] == [response]
    with pytest.raises(ValueError, match="processing_class="):
        TRLRewardTransform(seen)(rollouts)
    with pytest.raises(KeyError, match="no prompt with its response"):
        TRLRewardTransform(seen)(TensorDict({"query": ["a"]}, [1]))


def test_columns():
    seen = Seen()
    rollouts = texts().set(("next", "graded"), torch.tensor([1.5, 2.5]))
    TRLRewardTransform(seen, columns={"solution": "answer", "grade": "graded"})(rollouts)
    assert seen.called["solution"] == ["1", "2"]
    assert seen.called["grade"] == [1.5, 2.5], "from the next tensordict"
    assert "level" not in seen.called
    with pytest.raises(KeyError, match=r"columns=\{'solution': 'nowhere'\}.*answer, level"):
        TRLRewardTransform(seen, columns={"solution": "nowhere"})(texts())


@pytest.mark.parametrize("columns", [None, {"hint": "hint"}])
def test_a_column_that_is_none_for_all(columns):
    seen = Seen()
    TRLRewardTransform(seen, columns=columns)(texts().set("hint", NonTensorStack(None, None)))
    assert seen.called["hint"] == [None, None]


def test_no_rollouts():
    seen = Seen()
    out = TRLRewardTransform([seen, one])(TensorDict({"answer": torch.zeros(0)}, [0]))
    assert out["next", "reward"].shape == (0, 1, 1)
    assert out["next", "rewards", "one"].shape == (0, 1, 1)
    assert not hasattr(seen, "called")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None: it must return a list"),
        ("1.0", "returned '1.0': it must"),
        (["1", 2.0], "'1' for completi"),
    ],
)
def test_what_is_no_reward_is_named(returned: Any, words: str):
    def odd(completions: list[Any], **kwargs: Any) -> Any:
        return returned

    with pytest.raises(TypeError, match=f"'odd' .*{words}"):
        TRLRewardTransform(odd)(texts())


def test_a_path_without_a_model_is_named(tmp_path: Path):
    for make in (TRLRewardTransform, RewardFunctions):
        with pytest.raises(OSError, match=r"reward function '.*nowhere'.*path or hub id of a sequence classifier"):
            make(str(tmp_path / "nowhere"))


def test_a_function_that_lacks_an_argument_is_named():
    def exact(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        raise AssertionError

    with pytest.raises(KeyError, match=r"'exact' needs 'solution'.*answer.*columns=\{'solution'"):
        TRLRewardTransform(exact)(texts())


@needs("log_extra")
def test_logging():
    def logs(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        log_extra("first", [completion[0] for completion in completions])
        log_metric("mean", 0.5)
        return [0.0] * len(completions)

    logged: list[Any] = []
    TRLRewardTransform(logs, log_extra=lambda *args: logged.append(args), log_metric=lambda *args: logged.append(args))(
        texts()
    )
    assert logged == [("first", ["1", "2"]), ("mean", 0.5)]


# ---- rewards


def one(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


async def slow(completions: list[Any], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [10.0] * len(completions)


def sometimes(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None, *[5.0] * (len(completions) - 1)]


def test_weighted_sum_and_each_under_its_name():
    out = TRLRewardTransform([one, slow, sometimes], reward_weights=[1, 0.5, 2])(texts())["next"]
    assert out["reward"].shape == (2, 1, 1)
    assert out["reward"].flatten().tolist() == [6.0, 16.0], "None is left out of the sum"
    assert out["rewards", "one"].flatten().tolist() == [1, 1]
    assert out["rewards", "slow"].flatten().tolist() == [10, 10]
    never, always = out["rewards", "sometimes"].flatten().tolist()
    assert math.isnan(never)
    assert always == 5


def test_async_inside_a_running_loop():
    async def main() -> Any:
        return TRLRewardTransform(slow)(texts())

    assert asyncio.run(main())["next", "reward"].flatten().tolist() == [10, 10]


def test_nothing_applies():
    with pytest.raises(ValueError, match=r"sometimes.* applies to rollout 0.*unscored_reward="):
        TRLRewardTransform(sometimes)(texts())
    assert TRLRewardTransform(sometimes, unscored_reward=-1)(texts())["next", "reward"].flatten().tolist() == [-1, 5]


def test_wrong_number_of_rewards_is_named():
    def few(completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0]

    async def many(completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0] * 3

    with pytest.raises(ValueError, match="'few' returned 1 rewards for 2"):
        TRLRewardTransform([one, few])(texts())
    with pytest.raises(ValueError, match="'many' returned 3 rewards for 2"):
        TRLRewardTransform(many)(texts())


def test_two_functions_of_one_name():
    out = TRLRewardTransform([one, lambda completions, **_: [2.0] * len(completions), one])(texts())["next"]
    assert sorted(out["rewards"].keys()) == ["<lambda>", "one_1", "one_2"]
    assert out["reward"].flatten().tolist() == [4, 4]


def test_batch_of_two_dimensions():
    out = TRLRewardTransform(lambda completions, **_: list(map(float, completions)))(texts(6).reshape(2, 3))
    assert out["next", "reward"].shape == (2, 3, 1, 1)
    assert out["next", "reward"].flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_bad_arguments(tmp_path: Path):
    with pytest.raises(ValueError, match="reward_weights must be one for each of the 2"):
        TRLRewardTransform([one, slow], reward_weights=[1])
    with pytest.raises(ValueError, match="reward_processing_classes must be one for each of the 2"):
        TRLRewardTransform([one, slow], reward_processing_classes=tiny_tokenizer())
    with pytest.raises(TypeError, match="callable"):
        TRLRewardTransform(3)
    with pytest.raises(TypeError, match="as_transform"):
        TRLRewardTransform(HFRewardModelWrapper(tiny_reward_model(tmp_path)))


@pytest.mark.parametrize("by_path", [False, True], ids=["model", "path"])
def test_models(tmp_path: Path, collect, by_path):
    folder = tmp_path / "judge"
    model = tiny_reward_model(folder)
    batch = collect("history", False, LazyStackStorage)[:]
    transform = TRLRewardTransform([str(folder) if by_path else model, one], [2.0, 1.0])
    expected = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), inference_mode=True)(batch)["reward"]
    out = transform(batch)["next"]
    torch.testing.assert_close(out["rewards", "judge"].flatten(), expected)
    torch.testing.assert_close(out["reward"].flatten(), 2 * expected + 1)
    assert len(list(transform.parameters())) == len(list(model.parameters())), "moved with the environment"


# ---- places


def prompts() -> Iterator[dict[str, Any]]:
    return itertools.repeat({"query": ["first", "other"], "answer": ["1", "2"]})


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_in_an_environment(tmp_path: Path, mode):
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        tiny_causal_lm(tmp_path, tokenizer),
        tokenizer=tokenizer,
        input_mode=mode,
        pad_output=False,
        generate_kwargs={"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": True},
    )
    seen = Seen(rewards=[1.0, None])
    env = ChatEnv.from_dataloader(prompts(), input_mode=mode, tokenizer=tokenizer, batch_size=(2,))
    env = env.append_transform(
        TRLRewardTransform([seen, one], columns={"solution": "answer"}, processing_class=tokenizer)
    )
    step = env.step(policy(env.reset()))
    assert env.full_reward_spec["reward"].is_in(step["next", "reward"])
    assert env.full_reward_spec["rewards", "Seen"].shape == step["next", "rewards", "Seen"].shape
    assert step["next", "reward"].flatten().tolist() == [2, 1]
    assert seen.called["solution"] == ["1", "2"]
    assert list(map(len, seen.called["completion_ids"])) == [5, 5]
    if mode == "history":
        assert [prompt[-1]["content"] for prompt in seen.called["prompts"]] == ["first", "other"]
    else:
        assert all("<|im_start|>user\n" in prompt for prompt in seen.called["prompts"])
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=4)
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    seen.rewards = 3.0
    for rollouts in collector:
        replay_buffer.extend(rollouts.reshape(-1))
    assert replay_buffer[:]["next", "reward"].flatten().tolist() == [4, 4, 4, 4]


def test_check_env_specs():
    env = ChatEnv.from_dataloader(prompts(), input_mode="text", tokenizer=tiny_tokenizer(), batch_size=(2,))
    check_env_specs(env.append_transform(TRLRewardTransform([one, slow])))


def test_in_a_replay_buffer(collect):
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(20))
    replay_buffer.append_transform(TRLRewardTransform([one, slow]), invert=True)
    replay_buffer.extend(collect("history", False, LazyStackStorage)[:])
    assert replay_buffer.storage[:]["next", "reward"].flatten().tolist() == [11.0] * 12


def test_can_be_sent_to_other_processes(tmp_path: Path):
    transform = TRLRewardTransform([one, tiny_reward_model(tmp_path)])
    again = pickle.loads(pickle.dumps(transform))
    assert torch.equal(again(texts())["next", "reward"], transform(texts())["next", "reward"])


# ---- TRL's own


def conversations(answers: list[str]) -> Any:
    from torchrl_trl_bridge.messages import messages_to_history

    prompt = [{"role": "user", "content": "1/3 as a fraction?"}]
    rows = []
    for answer in answers:
        reply = [{"role": "assistant", "content": answer}]
        history = {"prompt": messages_to_history(prompt), "response": messages_to_history(reply)}
        ids = torch.tensor(tiny_tokenizer().encode(answer))
        rows.append(TensorDict({"history": history, "tokens": {"response": ids}, "solution": r"$\frac{1}{3}$"}))
    return lazy_stack(rows)


RIGHT, WRONG = (f"<think>\nI think.\n</think>\nThe answer is $\\boxed{{\\frac{{1}}{{{n}}}}}$" for n in (3, 2))


def trl_rewards() -> dict[str, Any]:
    from trl import rewards

    made = {
        "get_cosine_scaled_reward": {"max_len": 100},
        "get_repetition_penalty_reward": {},
        "get_soft_overlong_punishment": {"max_completion_len": 60, "soft_punish_cache": 20},
    }
    plain = {name: getattr(rewards, name) for name in dir(rewards) if name.endswith("_reward") and name not in made}
    made_by = {name: getattr(rewards, name) for name in dir(rewards) if name.startswith("get_")}
    return plain | {name: make(**made[name]) for name, make in made_by.items()}


@pytest.mark.parametrize("name", sorted(trl_rewards()))
def test_rewards_of_trl(name):
    if "accuracy" in name or "cosine" in name:
        pytest.importorskip("math_verify", reason="TRL compares mathematics with math-verify")
    function = trl_rewards()[name]
    batch = conversations([RIGHT, WRONG])
    rewards = TRLRewardTransform(function)(batch)["next", "reward"].flatten()
    ids = [tiny_tokenizer().encode(text) for text in (RIGHT, WRONG)]
    completions = [[{"role": "assistant", "content": text}] for text in (RIGHT, WRONG)]
    expected = function(completions=completions, completion_ids=ids, solution=[r"$\frac{1}{3}$"] * 2)
    torch.testing.assert_close(rewards, torch.tensor(expected))
    assert all(map(math.isfinite, rewards.tolist()))
    if "accuracy" in name:
        assert rewards.tolist() == [1, 0]

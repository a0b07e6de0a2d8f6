"""Reward models as TorchRL transforms: in a ChatEnv, as a collector's postproc, in a replay buffer."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import small_model
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Transform
from torchrl.envs.llm import ChatEnv
from torchrl.envs.utils import check_env_specs
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage

from torchrl_trl_bridge import HFRewardModelWrapper, as_trl_reward_func
from torchrl_trl_bridge.rewards.transforms import ScorerTransform
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

MODES = ["history", "text", "tokens"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_reward_model(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def policy_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_causal_lm(tmp_path_factory.mktemp("policy"))


def policy(model: Any, mode: str, padded: bool = False) -> TransformersWrapper:
    return TransformersWrapper(
        model,
        tokenizer=tiny_tokenizer(),
        input_mode=mode,
        pad_output=padded,
        generate_kwargs={"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": True},
    )


def env(mode: str, queries: tuple[str, ...] = ("first", "other")) -> Any:
    # In tokens mode, TorchRL 0.14.1 takes batches of prompts of one length only: "Failed to stack tensors".
    prompts: Iterator[dict[str, Any]] = itertools.repeat({"query": list(queries)})
    return ChatEnv.from_dataloader(prompts, input_mode=mode, tokenizer=tiny_tokenizer(), batch_size=(len(queries),))


@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("mode", MODES)
def test_in_an_environment(model, policy_model, mode, padded):
    score = HFRewardModelWrapper(model)
    scored = env(mode).append_transform(score.as_transform())
    act = policy(policy_model, mode, padded)
    step = scored.step(act(scored.reset()))
    reward = step["next", "reward"]
    assert scored.full_reward_spec.is_in(step["next"].select("reward")), "as the environment declares it"
    assert (reward.shape, reward.dtype) == ((2, 1, 1), torch.float32)
    assert not reward.requires_grad
    torch.testing.assert_close(reward.flatten(), score(step)["reward"].detach())
    for rollouts in LLMCollector(scored, policy=act, dialog_turns_per_batch=4, total_dialog_turns=4):
        assert rollouts["next", "reward"].shape == (*rollouts.batch_size, 1, 1)
        torch.testing.assert_close(rollouts["next", "reward"].flatten(), score(rollouts)["reward"].detach().flatten())


@pytest.mark.parametrize("queries", [("short", "a longer one")])
def test_tokens_mode_of_torchrl_itself(policy_model, queries):
    """Where TorchRL learns to batch prompts of several lengths, `env` above can use them."""
    bare = env("tokens", queries)
    with pytest.raises(RuntimeError, match="Failed to stack tensors"):
        policy(policy_model, "tokens")(bare.reset())


def test_check_env_specs(model):
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key=("text", "full"))
    check_env_specs(env("text").append_transform(score.as_transform()))


def test_check_env_specs_in_history_mode_finds_what_it_finds_without_the_reward():
    """TorchRL 0.14.1 declares tools that its rollouts of random actions lack; those are no conversations either."""

    def complaints(checked: Any) -> set[str]:
        with pytest.raises(AssertionError, match="do not match") as error:
            check_env_specs(checked)
        return set(re.findall(r"\(.+?\)", str(error.value)))

    constant = TensorDictModule(lambda done: torch.zeros(len(done)), in_keys=["done"], out_keys=["reward"])
    without = complaints(env("history"))
    assert without == {"('history', 'prompt', 'tool_calls')", "('history', 'prompt', 'tool_responses')"}
    assert complaints(env("history").append_transform(ScorerTransform(constant))) == without


class OwnReward(Transform):
    """An environment's own reward, in another shape and dtype."""

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=["reward"])

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        return next_tensordict.set("reward", torch.ones(*next_tensordict.batch_size, 1, dtype=torch.float64))

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        from torchrl.data import Unbounded

        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1), dtype=torch.float64)
        return reward_spec


def test_shape_and_dtype_of_the_environments_reward(model):
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key=("text", "full"))
    own = env("text").append_transform(OwnReward())
    check_env_specs(own)
    scored = own.append_transform(score.as_transform())
    check_env_specs(scored)
    assert scored.full_reward_spec["reward"].shape == (2, 1)
    assert scored.full_reward_spec["reward"].dtype == torch.float64


def test_a_reward_per_token_is_not_overwritten(model):
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key="text").as_transform()
    rollouts = TensorDict({"text": ["a", "b"], "next": {"reward": torch.zeros(2, 7, 1)}}, [2])
    with pytest.raises(ValueError, match=r"\(2, 7, 1\).*reward_key="):
        score(rollouts)


def test_as_postproc_of_a_collector(model, policy_model):
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer())
    collector = LLMCollector(
        env("history"),
        policy=policy(policy_model, "history"),
        dialog_turns_per_batch=4,
        total_dialog_turns=4,
        postproc=score.as_transform(),
    )
    (rollouts,) = list(collector)
    assert not rollouts["next", "reward"].requires_grad
    torch.testing.assert_close(rollouts["next", "reward"].flatten(), score(rollouts)["reward"].detach().flatten())


def bare_rollouts(policy_model: Any, turns: int = 4) -> Any:
    collector = LLMCollector(
        env("history"), policy=policy(policy_model, "history"), dialog_turns_per_batch=turns, total_dialog_turns=turns
    )
    (rollouts,) = list(collector)
    return rollouts.reshape(-1)


def test_in_a_replay_buffer_when_sampling(model, policy_model):
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(8))
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer())
    replay_buffer.append_transform(score.as_transform(reward_key="score"))
    replay_buffer.extend(bare_rollouts(policy_model))
    sample = replay_buffer.sample(3)
    torch.testing.assert_close(sample["next", "score"].flatten(), score(sample)["reward"].detach())
    assert ("next", "score") not in replay_buffer.storage[:].keys(include_nested=True)


def test_in_a_replay_buffer_when_extending(model, policy_model):
    calls = []
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer())
    score.register_forward_hook(lambda *_: calls.append(1))
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(8))
    replay_buffer.append_transform(score.as_transform(), invert=True)
    replay_buffer.extend(bare_rollouts(policy_model))
    stored = replay_buffer.storage[:]["next", "reward"]
    assert stored.shape == (4, 1, 1)
    assert not stored.requires_grad, "a buffer keeps no graph alive"
    for _ in range(3):
        replay_buffer.sample(2)
    assert len(calls) == 1, "each row is scored once"
    torch.testing.assert_close(stored.flatten(), score(replay_buffer.storage[:])["reward"].detach())


def test_advantages_of_a_scoring_buffer(model, policy_model):
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(8))
    replay_buffer.append_transform(MCAdvantage(grpo_size=2, prompt_key="query"))
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer())
    replay_buffer.append_transform(score.as_transform(), invert=True)
    rollouts = bare_rollouts(policy_model)
    for row in rollouts.unbind(0):
        row["next", "done"].fill_(True)
    replay_buffer.extend(rollouts)
    assert len(replay_buffer) == 4
    rows = replay_buffer[:]
    for query in ("first", "other"):
        group = [row for row in rows.unbind(0) if row["query"] == query]
        assert sum(float(row["advantage"]) for row in group) == pytest.approx(0, abs=1e-4)
        best = max(group, key=lambda row: float(row["next", "reward"]))
        assert float(best["advantage"]) > 0


def test_can_be_sent_to_other_processes(model):
    transform = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key="text").as_transform()
    batch = TensorDict({"text": ["a", "bc"]}, [2])
    again = pickle.loads(pickle.dumps(transform))(batch.copy())
    assert torch.equal(again["next", "reward"], transform(batch)["next", "reward"])


def test_process_rewards_have_no_place_there(tmp_path: Path):
    score = HFRewardModelWrapper(tiny_reward_model(tmp_path), per_token=True)
    with pytest.raises(ValueError, match="per_token"):
        score.as_transform()


def test_dropout_is_off_although_the_environment_trains():
    model = small_model("bert", vocab_size=len(tiny_tokenizer())).train()
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key="text")
    scored = [score.as_transform().train()(TensorDict({"text": ["abc", "d"]}, [2]))["next", "reward"] for _ in "ab"]
    assert torch.equal(*scored)
    assert model.training
    rewards = as_trl_reward_func(
        HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key=("text", "response"))
    )
    assert rewards([""] * 2, ["abc", "d"]) == pytest.approx(scored[0].flatten().tolist(), abs=1e-5)

"""TorchRL's scorers as TRL reward functions."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv, GSM8KRewardParser, IfEvalScorer

from tests.features import needs, optional
from torchrl_trl_bridge import HFRewardModelWrapper, as_trl_reward_func
from torchrl_trl_bridge.messages import messages_to_history
from torchrl_trl_bridge.tiny import tiny_reward_model, tiny_tokenizer

PROMPT = [{"role": "user", "content": "2 + 2?"}]
ANSWERS = ["<think>two twos</think><answer>4</answer>", "<answer>5</answer>", "four"]


def replies(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def in_torchrl(transform: Any, texts: list[str], **columns: list[Any]) -> torch.Tensor:
    """The reward of the scorer in its own environment, where a policy answered with these texts."""
    env = TransformedEnv(ChatEnv(batch_size=(len(texts),), input_mode="history"), transform)
    rows = []
    for i, reply in enumerate(replies(texts)):
        history = {
            "prompt": messages_to_history(PROMPT),
            "response": messages_to_history(reply),
            "full": messages_to_history([*PROMPT, *reply]),
        }
        rows.append(TensorDict({"history": history, **{key: values[i] for key, values in columns.items()}}))
    after = lazy_stack([TensorDict({key: values[i] for key, values in columns.items()}) for i in range(len(texts))])
    written = env.transform._step(lazy_stack(rows), after)
    return written["reward"].flatten()


MATHRewardParser = optional("torchrl.envs.llm", "MATHRewardParser")
CountdownRewardParser = optional("torchrl.envs.llm.reward.countdown", "CountdownRewardParser")
SCORERS = {
    "gsm8k": (GSM8KRewardParser, {"answer": ["two and two #### 4"] * 3}, [1.0, 0.1, 0.0]),
    "math": (MATHRewardParser, {"answer": [r"so \boxed{4}"] * 3}, [1.0, 0.1, 0.0]),
    "countdown": (CountdownRewardParser, {"answer": ["target=4, numbers=4,9"] * 3}, [1.0, 0.1, 0.0]),
}


@needs("parsers without tokenizer")
@pytest.mark.parametrize("scorer", SCORERS)
def test_parsers_of_torchrl(scorer):
    make, columns, expected = SCORERS[scorer]
    reward = as_trl_reward_func(make(), name=scorer)
    assert reward.__name__ == scorer
    assert as_trl_reward_func(make()).__name__ == make.__name__
    rewards = reward(prompts=[PROMPT] * 3, completions=replies(ANSWERS), completion_ids=[[1]] * 3, **columns)
    assert rewards == pytest.approx(expected)
    assert all(type(reward) is float for reward in rewards)
    assert rewards == pytest.approx(in_torchrl(make(), ANSWERS, **columns).tolist())
    assert reward(prompts=["2 + 2?"] * 3, completions=ANSWERS, **columns) == pytest.approx(expected), "standard form"


@needs("parsers without tokenizer")
def test_what_a_parser_was_told_is_kept():
    reward = as_trl_reward_func(GSM8KRewardParser(in_keys=[("history", "full"), "truth"], format_reward=0.5))
    assert reward([PROMPT] * 3, replies(ANSWERS), truth=["#### 4"] * 3) == [1.0, 0.5, 0.0]


@needs("parsers without tokenizer")
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("conversational", [True, False])
def test_missing_answers(scorer, conversational):
    make, _, _ = SCORERS[scorer]
    prompts, completions = ([PROMPT] * 3, replies(ANSWERS)) if conversational else (["?"] * 3, ANSWERS)
    with pytest.raises(KeyError, match=r"reads answer, and the dataset has no column 'answer' .*it has: solution"):
        as_trl_reward_func(make())(prompts=prompts, completions=completions, solution=["4"] * 3)


def test_if_eval():
    for library in ("langdetect", "nltk", "immutabledict"):
        pytest.importorskip(library)
    texts = ["<answer>one two three</answer>", "<answer>One, two, three.</answer>"]
    columns = {
        "key": [0, 1],
        "instruction_id_list": [["punctuation:no_comma"]] * 2,
        "kwargs": [[{}]] * 2,
        "text": ["Say it without commas."] * 2,
    }
    logged: dict[str, float] = {}
    reward = as_trl_reward_func(IfEvalScorer())
    rewards = reward([PROMPT] * 2, replies(texts), log_metric=logged.__setitem__, **columns)
    assert rewards[0] > rewards[1]
    assert rewards == pytest.approx(in_torchrl(IfEvalScorer(), texts, **columns).tolist())
    assert logged["IfEvalScorer/ifeval_score.prompt_level_strict_acc"] == 0.5
    del columns["kwargs"]
    with pytest.raises(KeyError, match="'kwargs'"):
        reward([PROMPT] * 2, replies(texts), **columns)


# ---- modules


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_reward_model(tmp_path_factory.mktemp("reward"))


def test_reward_model_on_conversations(model):
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer())
    rewards = as_trl_reward_func(score)(prompts=[PROMPT] * 3, completions=replies(ANSWERS))
    expected = score.score_texts([PROMPT + reply for reply in replies(ANSWERS)])
    assert rewards == pytest.approx(expected.tolist(), abs=1e-5)


def test_reward_model_on_text(model):
    score = HFRewardModelWrapper(
        model, tokenizer=tiny_tokenizer(), input_key=[("text", "prompt"), ("text", "response")]
    )
    rewards = as_trl_reward_func(score)(prompts=["2 + 2 = "] * 3, completions=ANSWERS)
    assert rewards == pytest.approx(score.score_texts([f"2 + 2 = {text}" for text in ANSWERS]).tolist(), abs=1e-5)


@pytest.mark.parametrize("conversational", [True, False])
def test_reward_model_on_token_ids(model, conversational):
    """A reward model with the policy's vocabulary, on the ids that the policy generated."""
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.encode(text) for text in ANSWERS]
    prompts = [PROMPT] * 3 if conversational else ["2 + 2 = "] * 3
    reward = as_trl_reward_func(HFRewardModelWrapper(model), tokenizer=tokenizer)
    rewards = reward(prompts, replies(ANSWERS) if conversational else ANSWERS, ids)
    start = (
        tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
        if conversational
        else tokenizer.encode("2 + 2 = ")
    )
    for got, row in zip(rewards, ids, strict=True):
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([start + row])).logits[0, 0]
        assert got == pytest.approx(float(alone), abs=1e-5)
    with pytest.raises(KeyError, match=r"reads tokens.full, masks.all_attention_mask, .*tokenizer="):
        as_trl_reward_func(HFRewardModelWrapper(model))(prompts, ANSWERS, ids)


def mean(ids: torch.Tensor) -> torch.Tensor:
    return ids.float().mean(-1)


MEAN = TensorDictModule(mean, in_keys=[("tokens", "response")], out_keys=["reward"])
IDS = [[7, 1], [8], [2, 5, 2], [4, 4], [9]]


@pytest.mark.parametrize(
    "scorer",
    [MEAN, TensorDictSequential(MEAN, TensorDictModule(lambda r: r, in_keys=["reward"], out_keys=["again"]))],
    ids=["module", "sequence"],
)
def test_completions_of_different_length(scorer):
    logged = {}
    reward = as_trl_reward_func(scorer, name="mean")
    assert reward(["a"] * 5, ["b"] * 5, IDS, log_metric=logged.__setitem__) == [4, 8, 3, 4, 9]
    assert logged in ({}, {"mean/again": 5.6})


def test_a_scorer_that_cannot_read_different_lengths_is_named():
    class Own(TensorDictModuleBase):
        in_keys, out_keys = [("tokens", "response")], ["reward"]

        def forward(self, tensordict: Any) -> Any:
            return tensordict.set("reward", tensordict["tokens", "response"].float().mean(-1))

    reward = as_trl_reward_func(Own())
    assert reward(["a"] * 2, ["b"] * 2, [[1], [3]]) == [1, 3]
    with pytest.raises(RuntimeError, match=r"'Own' failed where tokens.response is of another length.*one by one"):
        reward(["a"] * 5, ["b"] * 5, IDS)


def test_module_on_responses_and_columns():
    def closeness(ids: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        return level - ids.sum(-1)

    module = TensorDictModule(closeness, in_keys=[("tokens", "response"), "level"], out_keys=["closeness"])
    reward = as_trl_reward_func(module, reward_key="closeness", name="near")
    assert reward(["a", "b"], ["c", "d"], [[1, 2], [3, 4]], level=[5, 9.0]) == [2, 2]
    with pytest.raises(KeyError, match="'near' reads level, and the dataset has no column 'level'"):
        reward(["a"], ["c"], [[1, 2]])
    with pytest.raises(KeyError, match=r"wrote no 'reward', but closeness\. Pass reward_key="):
        as_trl_reward_func(module)(["a"], ["c"], [[1, 2]], level=[5])


@pytest.mark.parametrize(("part", "expected"), [("prompt", "ab"), ("response", "cd"), ("full", "abcd")])
def test_parts_of_text(part, expected):
    seen = []

    def score(texts: Any) -> torch.Tensor:
        seen.extend(texts)
        return torch.zeros(len(texts))

    module = TensorDictModule(score, in_keys=[("text", part)], out_keys=["reward"])
    as_trl_reward_func(module)(["ab"], ["cd"])
    tokenizer = tiny_tokenizer()
    as_trl_reward_func(module, tokenizer=tokenizer)([PROMPT], replies(["4"]))
    full = tokenizer.apply_chat_template([*PROMPT, *replies(["4"])[0]], tokenize=False)
    start = tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    assert seen == [expected, {"prompt": start, "response": full.removeprefix(start), "full": full}[part]]
    with pytest.raises(KeyError, match="History is made of conversational prompts"):
        as_trl_reward_func(TensorDictModule(score, in_keys=[("history", "full")], out_keys=["reward"]))(["ab"], ["cd"])


def test_none_and_other_outputs():
    def score(n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(n > 1, n, math.nan), torch.stack([n, n * 10], -1)

    module = TensorDictModule(score, in_keys=["n"], out_keys=["reward", ("detail", "pair")])
    logged: dict[str, float] = {}
    reward = as_trl_reward_func(module, name="half")
    assert reward(["a", "b"], ["c", "d"], n=[1.0, 3.0], log_metric=logged.__setitem__) == [None, 3]
    assert logged == {"half/detail.pair": pytest.approx((1 + 10 + 3 + 30) / 4)}
    logged.clear()
    as_trl_reward_func(module, log_outputs=False)(["a"], ["b"], n=[1.0], log_metric=logged.__setitem__)
    assert not logged
    assert reward([], []) == []


def test_several_rewards_for_a_completion():
    module = TensorDictModule(lambda n: torch.stack([n, n], -1), in_keys=["n"], out_keys=["reward"])
    with pytest.raises(ValueError, match="'TensorDictModule' gave 4 numbers under 'reward' for 2 completions"):
        as_trl_reward_func(module)(["a", "b"], ["c", "d"], n=[1.0, 3.0])


def test_columns_of_lists_and_dicts_reach_the_scorer_whole():
    seen = []

    def score(tests: Any) -> torch.Tensor:
        seen.extend(tests)
        return torch.zeros(len(tests))

    tests = [[{"input": 1}, {"input": 2}], [{"input": 3}]]
    as_trl_reward_func(TensorDictModule(score, in_keys=["tests"], out_keys=["reward"]))(
        ["a"] * 2, ["b"] * 2, tests=tests
    )
    assert seen == tests


def test_sequence_of_modules(model):
    judge = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key=("text", "full"), reward_key="raw")
    scorer = TensorDictSequential(judge, TensorDictModule(torch.sigmoid, in_keys=["raw"], out_keys=["reward"]))
    (reward,) = as_trl_reward_func(scorer)(["a"], ["b"])
    assert reward == pytest.approx(float(torch.sigmoid(judge.score_texts(["ab"]))))


@needs("parsers without tokenizer")
@pytest.mark.parametrize("used", [False, True])
def test_pickles(model, used):
    columns = {"answer": ["#### 4"] * 3}
    for scorer in (GSM8KRewardParser(), HFRewardModelWrapper(model, tokenizer=tiny_tokenizer())):
        reward = as_trl_reward_func(scorer, name="again")
        expected = reward([PROMPT] * 3, replies(ANSWERS), **columns) if used else None
        other = pickle.loads(pickle.dumps(reward))
        assert other.__name__ == "again"
        rewards = other([PROMPT] * 3, replies(ANSWERS), **columns)
        assert rewards == (expected or reward([PROMPT] * 3, replies(ANSWERS), **columns))


@needs("parsers without tokenizer")
def test_the_scorer_itself_is_left_alone():
    scorer = GSM8KRewardParser()
    as_trl_reward_func(scorer)([PROMPT], replies(["4"]), answer=["#### 4"])
    assert scorer.parent is None
    assert not scorer.in_keys
    TransformedEnv(ChatEnv(batch_size=(1,), input_mode="text"), scorer)


def test_what_is_no_scorer():
    with pytest.raises(TypeError, match=r"got function\. .*TensorDictModule"):
        as_trl_reward_func(lambda completions: [0.0])


def test_no_graph(model, tmp_path: Path):
    rewards = as_trl_reward_func(HFRewardModelWrapper(model, tokenizer=tiny_tokenizer()))([PROMPT], replies(["4"]))
    assert type(rewards[0]) is float

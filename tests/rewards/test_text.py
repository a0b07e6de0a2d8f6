"""Text and conversations, scored with the reward model's own tokenizer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History

from torchrl_trl_bridge import HFRewardModelWrapper
from torchrl_trl_bridge.tiny import tiny_reward_model, tiny_tokenizer

CHATS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What colour is the sky?"},
        {"role": "assistant", "content": "blue"},
    ],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_reward_model(tmp_path_factory.mktemp("reward"))


def score_of(model: Any, text: str) -> float:
    """By hand: the text alone, without special tokens beside its own."""
    ids = tiny_tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])


def rendered(chat: list[dict[str, str]], **kwargs: Any) -> str:
    return tiny_tokenizer().apply_chat_template(chat, tokenize=False, **kwargs)


def close(rewards: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(rewards, torch.tensor(expected), atol=1e-5, rtol=0)


def histories(chats: list[list[dict[str, str]]]) -> Any:
    return lazy_stack([TensorDict({"history": {"full": History.from_chats([chat])[0]}}) for chat in chats])


def test_conversations_through_the_models_own_template(model):
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), inference_mode=True)
    assert score.in_keys == [("history", "full")]
    expected = [score_of(model, rendered(chat)) for chat in CHATS]
    batch = histories(CHATS)
    assert score(batch) is batch
    close(batch["reward"], expected)
    close(score(batch[0])["reward"].reshape(1), expected[:1])
    messages = lazy_stack([TensorDict({"messages": NonTensorData(chat)}) for chat in CHATS])
    listed = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), inference_mode=True, input_key="messages")
    close(listed(messages)["reward"], expected)


def test_text_and_parts_of_text(model):
    prompts, responses = ["2 + 2?", "the sky is"], [" four", " blue, mostly"]
    expected = [score_of(model, p + r) for p, r in zip(prompts, responses, strict=True)]
    full = [p + r for p, r in zip(prompts, responses, strict=True)]
    batch = TensorDict({"text": {"prompt": prompts, "response": responses, "full": full}}, [2])
    for key in (("text", "full"), [("text", "prompt"), ("text", "response")]):
        score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key=key, inference_mode=True)
        close(score(batch)["reward"], expected)
        close(score.score_texts(full), expected)


def test_parts_of_conversations(model):
    prompt = lazy_stack([History.from_chats([chat[:-1]])[0] for chat in CHATS])
    response = lazy_stack([History.from_chats([chat[-1:]])[0] for chat in CHATS])
    batch = TensorDict({"history": {"prompt": prompt, "response": response}}, [2])
    keys = [("history", "prompt"), ("history", "response")]
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key=keys, inference_mode=True)
    close(score(batch)["reward"], [score_of(model, rendered(chat)) for chat in CHATS])


def test_batches_of_two_dimensions_and_of_none(model):
    score = HFRewardModelWrapper(
        model, tokenizer=tiny_tokenizer(), input_key="text", inference_mode=True, micro_batch_size=2
    )
    texts = ["a", "bcd", "ef", "ghijk", "l", "mn"]
    rows = [TensorDict({"text": text}) for text in texts]
    batch = lazy_stack([lazy_stack(rows[:3]), lazy_stack(rows[3:])])
    reward = score(batch)["reward"]
    assert reward.shape == (2, 3)
    close(reward.flatten(), [score_of(model, text) for text in texts])
    assert score(TensorDict({"text": "a"}))["reward"].shape == ()
    assert score(TensorDict({"text": NonTensorData("", batch_size=[0])}, [0]))["reward"].shape == (0,)


def test_every_kind_of_collected_buffer(model, collected):
    batch = collected[:]
    history = ("history", "full") in batch.keys(include_nested=True)
    key = ("history", "full") if history else ("text", "full")
    reward = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key=key, inference_mode=True)(batch)[
        "reward"
    ]
    from torchrl_trl_bridge.messages import history_to_messages

    texts = [
        rendered(history_to_messages(row["history"].full)) if history else row["text", "full"]
        for row in batch.unbind(0)
    ]
    assert len(set(texts)) > 6
    close(reward, [score_of(model, text) for text in texts])


def test_another_vocabulary_than_the_policys(tmp_path: Path, collect):
    """A reward model of a family whose tokenizer knows words, on rollouts of a policy that knows bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.WordLevel({"[PAD]": 0, "[UNK]": 1, "user": 2, "assistant": 3, ":": 4}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    words.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
    model = tiny_reward_model(tmp_path, words, vocab_size=len(words))
    batch = collect("history", False, LazyStackStorage)[:]
    assert max(int(ids.max()) for ids in batch.get(("tokens", "full"), as_list=True)) >= len(words), "policy ids"
    rewards = HFRewardModelWrapper(model, tokenizer=words, inference_mode=True)(batch)["reward"]
    assert len(set(rewards.tolist())) > 1
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        HFRewardModelWrapper(model)(batch)


def test_no_second_beginning_token(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    tokenizer.add_bos_token = True
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    model = tiny_reward_model(tmp_path, tokenizer)
    called: list[list[int]] = []
    model.register_forward_pre_hook(lambda _, __, kwargs: called.extend(kwargs["input_ids"].tolist()), with_kwargs=True)
    HFRewardModelWrapper(model, tokenizer=tokenizer)(histories(CHATS[:1]))
    assert [ids.count(tokenizer.bos_token_id) for ids in called] == [1]


def test_templates_with_a_system_turn_of_their_own_and_tools(model):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ 'SYSTEM: be good' }}{% for t in tools or [] %}{{ ' TOOL ' + t.function.name }}{% endfor %}"
        "{% for m in messages %}{{ m.role + ':' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}{{ '>' + c.function.name }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    chat = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    schema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    batch = TensorDict({"history": {"full": History.from_chats([chat])}}, [1])
    plain = HFRewardModelWrapper(model, tokenizer=tokenizer, inference_mode=True)
    close(plain(batch)["reward"], [score_of(model, "SYSTEM: be gooduser:2+2assistant:>add")])
    tools = HFRewardModelWrapper(
        model, tokenizer=tokenizer, chat_template_kwargs={"tools": [schema]}, inference_mode=True
    )
    close(tools(batch)["reward"], [score_of(model, "SYSTEM: be good TOOL adduser:2+2assistant:>add")])


@pytest.mark.parametrize("side", ["left", "right"])
def test_max_length_keeps_the_end(model, side):
    tokenizer = tiny_tokenizer()
    tokenizer.truncation_side = side
    score = HFRewardModelWrapper(model, tokenizer=tokenizer, input_key="text", max_length=4, inference_mode=True)
    close(
        score(TensorDict({"text": ["abcdefg", "xy"]}, [2]))["reward"], [score_of(model, "defg"), score_of(model, "xy")]
    )


def test_the_tokenizers_padding_is_lent_for_the_call_only(tmp_path: Path):
    """TRL writes the tokenizer's padding id into the model's config; here the config stays as it was."""
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model(tmp_path, pad_token_id=tokenizer.encode("!")[0])
    score = HFRewardModelWrapper(model, tokenizer=tokenizer, input_key="text", inference_mode=True)
    rewards = score(TensorDict({"text": ["hello!", "hi!!", "hello", "hi"]}, [4]))["reward"]
    assert len(set(rewards.tolist())) == 4, "an exclamation mark counts, although it is the id in the model's config"
    assert model.config.pad_token_id == tokenizer.encode("!")[0]


def test_gradients_and_device_and_dtype(model):
    batch = histories(CHATS)
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer())
    rewards = score(batch)["reward"]
    assert rewards.requires_grad
    assert rewards.dtype == torch.float32


def test_errors(model, tmp_path: Path):
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=r"input_key= has a meaning only with tokenizer="):
        HFRewardModelWrapper(model, input_key=("text", "full"))
    for one in ("a text", CHATS[0], CHATS[0][0]):
        with pytest.raises(TypeError, match=r"texts is a list of texts, and this is a .*score_texts\(\[text\]\)"):
            HFRewardModelWrapper(model, tokenizer=tokenizer).score_texts(one)
    with pytest.raises(TypeError, match="list of keys"):
        HFRewardModelWrapper(model, tokenizer=tokenizer, input_key=3)
    small = tiny_reward_model(tmp_path, vocab_size=100)
    with pytest.raises(ValueError, match=rf"the tokenizer has {len(tokenizer)} tokens .* vocabulary 100.*resize"):
        HFRewardModelWrapper(small, tokenizer=tokenizer)
    score = HFRewardModelWrapper(model, tokenizer=tokenizer)
    with pytest.raises(KeyError, match=r"input_key \('history', 'full'\) not found .* keys are .*text"):
        score(TensorDict({"text": ["a"]}, [1]))
    with pytest.raises(TypeError, match="holds int"):
        HFRewardModelWrapper(model, tokenizer=tokenizer, input_key="n")(TensorDict({"n": NonTensorData(3)}, [1]))
    with pytest.raises(ValueError, match=r"rows? .*no token to score"):
        HFRewardModelWrapper(model, tokenizer=tokenizer, input_key="text")(TensorDict({"text": ["a", ""]}, [2]))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*input_key="):
        HFRewardModelWrapper(model, tokenizer=tokenizer)(histories(CHATS))
    with pytest.raises(TypeError, match="cannot be joined"):
        HFRewardModelWrapper(model, tokenizer=tokenizer, input_key=[("history", "full"), "text"])(
            histories(CHATS).update({"text": ["a", "b"]})
        )
    with pytest.raises(ValueError, match="score_texts needs"):
        HFRewardModelWrapper(model).score_texts(["a"])


def test_stays_in_a_replay_buffer(model):
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(4))
    score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), inference_mode=True)
    replay_buffer.extend(score(histories(CHATS)))
    for row, chat in itertools.zip_longest(replay_buffer[:].unbind(0), CHATS):
        close(row["reward"].reshape(1), [score_of(model, rendered(chat))])

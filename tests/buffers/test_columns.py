"""The columns of TRL's dataset types, from what a buffer holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from torchrl.data.llm import History

from torchrl_trl_bridge import DatasetType, TorchRLBufferDataset
from torchrl_trl_bridge.buffers.columns import split_conversation
from torchrl_trl_bridge.compat.trl import token_names_of_pairs

SYSTEM, USER, TOOL = ({"role": role, "content": role[0]} for role in ("system", "user", "tool"))
ANSWER = {"role": "assistant", "content": "a"}


def buffer(*rows: dict[str, Any], storage: type = LazyStackStorage) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(100))
    for row in rows:
        replay_buffer.extend(lazy_stack([TensorDict(row)]))
    return replay_buffer


def chat_rows(*chats: list[dict[str, Any]], key: Any = ("history", "full")) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    for chat in chats:
        replay_buffer.extend(TensorDict({key: History.from_chats([chat])}, [1]))
    return replay_buffer


def rows_of(replay_buffer: ReplayBuffer, columns: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """All rows in storage order, and the check that a stream gives the same ones."""
    dataset = TorchRLBufferDataset(replay_buffer, 8, columns=columns, seed=0, **kwargs)
    rows = list(dataset.as_hf_dataset(streaming=False))
    for streamed in dataset.as_hf_dataset():
        plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in streamed.items()}
        assert plain in rows
    return rows


# Conversations


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ([USER], [ANSWER]),
        ([SYSTEM, USER, ANSWER, USER], [ANSWER]),
        ([USER, ANSWER, TOOL], [ANSWER, ANSWER]),
        ([USER, ANSWER, SYSTEM], [ANSWER]),
        ([{"role": "developer", "content": "d"}], [ANSWER]),
    ],
)
def test_the_completion_is_the_assistants_turns_after_the_last_other_turn(
    prompt: list[Any], completion: list[Any]
) -> None:
    for key in (("history", "full"), "messages"):
        replay_buffer = chat_rows(prompt + completion, key=key)
        (row,) = rows_of(replay_buffer, "prompt-completion")
        assert row == {"prompt": prompt, "completion": completion}
        assert rows_of(replay_buffer, "prompt-only") == [{"prompt": prompt}]
        assert rows_of(replay_buffer, "language-modeling") == [{"messages": prompt + completion}]


@given(st.lists(st.sampled_from([SYSTEM, USER, TOOL, ANSWER])))
def test_a_split_loses_nothing(chat: list[Any]) -> None:
    prompt, completion = split_conversation(chat)
    assert prompt + completion == chat
    assert all(message["role"] == "assistant" for message in completion)
    assert not prompt or prompt[-1]["role"] != "assistant"


def test_prompt_and_response_are_as_good_as_the_full_history() -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    parts = {"prompt": History.from_chats([[USER, ANSWER]]), "response": History.from_chats([[ANSWER]])}
    replay_buffer.extend(TensorDict({"history": parts}, [1]))
    # The policy was given the first answer's beginning, and made the second.
    assert rows_of(replay_buffer, "prompt-completion") == [{"prompt": [USER, ANSWER], "completion": [ANSWER]}]
    assert rows_of(replay_buffer, "prompt-only") == [{"prompt": [USER, ANSWER]}]
    assert rows_of(replay_buffer, "language-modeling") == [{"messages": [USER, ANSWER, ANSWER]}]


def test_a_completion_that_was_stored_with_calls_of_tools_stays_whole() -> None:
    chat, answer = [USER], [ANSWER, TOOL, ANSWER]
    parts = {"prompt": History.from_chats([chat]), "response": History.from_chats([answer])}
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    replay_buffer.extend(TensorDict({"history": parts | {"full": History.from_chats([chat + answer])}}, [1]))
    assert rows_of(replay_buffer, "prompt-completion") == [{"prompt": chat, "completion": answer}]


def test_messages_stored_as_python_lists() -> None:
    chats = [USER, ANSWER], [USER, TOOL, ANSWER]
    assert rows_of(buffer(*({"messages": NonTensorData(chat)} for chat in chats)), "prompt-completion") == [
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER, TOOL], "completion": [ANSWER]},
    ]


@pytest.mark.parametrize(
    ("chat", "message"), [([USER], "does not end with an assistant's"), ([ANSWER], "no turn before")]
)
def test_a_conversation_without_prompt_or_completion(chat: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"row 0 of the batch .*{message}.*'{chat[0]['role']}'"):
        rows_of(chat_rows(chat), "prompt-completion")


def test_rows_are_the_consumers_own() -> None:
    replay_buffer = buffer({"messages": NonTensorData([dict(USER), dict(ANSWER)])}, storage=ListStorage)
    for _ in range(2):
        (row,) = TorchRLBufferDataset(replay_buffer, 1, columns="prompt-completion")
        assert row == {"prompt": [USER], "completion": [ANSWER]}
        row["prompt"][0]["content"] = "changed"
        row["completion"].append(USER)


def test_tools_come_with_conversations() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    replay_buffer = buffer({"messages": NonTensorData([USER, ANSWER]), "tools": NonTensorData(tools)})
    assert rows_of(replay_buffer, "prompt-only") == [{"prompt": [USER], "tools": tools}]


# Text, and the choice of a form


@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("mode", ["history", "text"])
def test_the_form_follows_the_buffer(mode: str, padded: bool, collect: Callable[..., ReplayBuffer]) -> None:
    replay_buffer = collect(mode, padded)
    form = "conversational" if mode == "history" else "standard"
    for name in ("language-modeling", "prompt-only", "prompt-completion"):
        dataset = TorchRLBufferDataset(replay_buffer, 4, columns=name)
        assert f"columns={name!r} ({form}, from " in repr(dataset)
        for row in dataset:
            assert all(isinstance(value, list if mode == "history" else str) for value in row.values())
            assert "<|pad|>" not in str(row)


def test_it_can_be_forced(collect: Callable[..., ReplayBuffer]) -> None:
    replay_buffer = collect("history", False)
    standard = DatasetType("prompt-completion", form="standard")
    stored = list(TorchRLBufferDataset(replay_buffer, 1).as_hf_dataset(streaming=False))
    assert rows_of(replay_buffer, standard) == [
        {"prompt": row["text.prompt"], "completion": row["text.response"]} for row in stored
    ]
    assert "DatasetType('prompt-completion', form='standard') (standard" in repr(
        TorchRLBufferDataset(replay_buffer, 1, columns=standard)
    )


def test_text_that_torchrl_cut_in_the_wrong_place_is_refused(collect: Callable[..., ReplayBuffer]) -> None:
    with pytest.raises(ValueError, match=r"text.response of row \d+ .* cut it out.*pad_output=False"):
        rows_of(collect("history", True), DatasetType("prompt-completion", form="standard"))


def test_repr_and_check_draw_nothing() -> None:
    replay_buffer = buffer({"text": "hello"})
    calls = []
    sample = replay_buffer.sampler.sample
    replay_buffer.sampler.sample = lambda *args: calls.append(args) or sample(*args)  # type: ignore[func-returns-value]
    dataset = TorchRLBufferDataset(replay_buffer, 1, columns="language-modeling")
    assert "'language-modeling' (standard, from text)" in repr(dataset)
    assert dataset.as_hf_dataset().column_names == ["text"]
    assert not calls
    assert list(dataset) == [{"text": "hello"}]
    assert calls


def test_the_repr_of_a_dataset_that_cannot_be(collect: Callable[..., ReplayBuffer]) -> None:
    empty = TorchRLBufferDataset(ReplayBuffer(storage=ListStorage(1)), 1, columns="prompt-only")
    assert "columns='prompt-only', " in repr(empty)
    assert "columns='preference', " in repr(TorchRLBufferDataset(collect(), 1, columns="preference"))
    assert "columns={'a': 'x.y'}, " in repr(TorchRLBufferDataset(collect(), 1, columns={"a": ("x", "y")}))


# Rows in the form of a data set


def test_rows_of_a_dataset_pass_as_they_are() -> None:
    text = {"prompt": "p", "completion": "c"}
    assert rows_of(buffer(text), "prompt-completion") == [text]
    chat = {"prompt": [USER], "completion": [ANSWER]}
    stored = {name: NonTensorData(value) for name, value in chat.items()}
    assert rows_of(buffer(stored), "prompt-completion") == [chat]
    assert rows_of(buffer(stored), "language-modeling") == [{"messages": [USER, ANSWER]}]
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    assert rows_of(buffer(pair), "preference") == [pair]
    assert rows_of(buffer({**pair, "margin": torch.tensor([0.5])}), "preference") == [{**pair, "margin": 0.5}]


def test_pairs_of_token_ids() -> None:
    rows = {"prompt": torch.tensor([1]), "chosen": torch.tensor([2, 3]), "rejected": torch.tensor([4])}
    chosen, rejected = token_names_of_pairs()
    assert rows_of(buffer(rows), "preference") == [{chosen: [1, 2, 3], rejected: [1, 4]}]
    del rows["prompt"]
    assert rows_of(buffer(rows), "preference") == [{chosen: [2, 3], rejected: [4]}]


# Labels


def rated(*rewards: Any, key: Any = ("next", "reward")) -> ReplayBuffer:
    return buffer(*({"prompt": "p", "completion": "c", key: torch.tensor(reward)} for reward in rewards))


def labels(replay_buffer: ReplayBuffer, **kwargs: Any) -> list[bool]:
    found = [row["label"] for row in rows_of(replay_buffer, DatasetType("unpaired-preference", **kwargs))]
    assert all(type(label) is bool for label in found)
    return found


def test_labels() -> None:
    assert labels(rated(True, [False], [[True]], key="label")) == [True, False, True]
    assert labels(rated(True, False, key=("next", "won")), label=("next", "won")) == [True, False]
    assert labels(rated(0.5, [0.4], [[0.6]], [0.3, 0.3]), threshold=0.5) == [True, False, True, True]
    assert labels(rated(0.0, 1.0, key="score"), label="score", threshold=1) == [False, True]


def test_a_number_is_no_label() -> None:
    for replay_buffer in (rated(0.3), rated(1), rated(0.0, key="label")):
        with pytest.raises(TypeError, match=r"holds torch.(float32|int64).*threshold=<reward>"):
            rows_of(replay_buffer, "unpaired-preference")
    with pytest.raises(TypeError, match="str"):
        rows_of(buffer({"prompt": "p", "completion": "c", "label": "yes"}), "unpaired-preference")


def test_a_reward_that_is_no_number_is_no_label_either() -> None:
    with pytest.raises(ValueError, match=r"row 1 of the batch has the reward NaN under 'next.reward'"):
        rows_of(rated(0.0, float("nan")), DatasetType("unpaired-preference", threshold=0))
    with pytest.raises(ValueError, match="2 booleans"):
        rows_of(rated([True, False], key="label"), "unpaired-preference")
    with pytest.raises(KeyError, match=r"'next.reward' holds nothing"):
        rows_of(buffer({"prompt": "p", "completion": "c"}), "unpaired-preference")


# Token ids


@st.composite
def token_rows(draw: st.DrawFn) -> tuple[list[TensorDictBase], list[dict[str, list[int]]]]:
    """Rollouts of tokens as TorchRL pads them, on the left and on the right, and what they are without padding."""
    rows, expected = [], []
    for _ in range(draw(st.integers(1, 5))):
        left, prompt, response, right = (draw(st.integers(0, 3)) for _ in range(4))
        prompt += prompt + response == 0
        ids = torch.tensor([0] * left + list(range(1, prompt + response + 1)) + [0] * right)
        mask = torch.tensor([False] * left + [True] * (prompt + response) + [False] * right)
        tokens = {"full": ids, "prompt": ids[: left + prompt].clone(), "response": ids[left + prompt :].clone()}
        rows.append(TensorDict({"tokens": tokens, "masks": {"all_attention_mask": mask}}))
        completion = [0] * prompt + [1] * response
        want = [i if c else -100 for i, c in zip(range(1, prompt + response + 1), completion, strict=True)]
        expected.append({
            "input_ids": list(range(1, prompt + response + 1)), "completion_mask": completion, "labels": want,
        })  # fmt: skip
    return rows, expected


@given(token_rows())
def test_token_ids_without_their_padding(case: tuple[list[TensorDictBase], list[dict[str, list[int]]]]) -> None:
    rows, expected = case
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    replay_buffer.extend(lazy_stack(rows))
    assert rows_of(replay_buffer, DatasetType("tokenized", labels=True)) == expected
    plain = [{name: row[name] for name in ("input_ids", "completion_mask")} for row in expected]
    assert rows_of(replay_buffer, "tokenized") == plain
    only = DatasetType("language-modeling", form="tokenized")
    assert rows_of(replay_buffer, only) == [{"input_ids": row["input_ids"]} for row in expected]


def test_dense_rows_and_the_assistants_mask() -> None:
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    masks = {"all_attention_mask": ids > 0, "all_assistant_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]).bool()}
    rollouts = TensorDict({"tokens": {"full": ids, "prompt": ids[:, :2]}, "masks": masks}, [2])
    replay_buffer.extend(rollouts)
    assert rows_of(replay_buffer, DatasetType("tokenized", labels=True)) == [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "assistant_masks": [0, 1, 1], "labels": [-100, 2, 3]},
        {
            "input_ids": [4, 5, 6, 7], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 0, 1],
            "labels": [-100, -100, -100, 7],
        },
    ]  # fmt: skip
    row = next(iter(TorchRLBufferDataset(replay_buffer, 2, columns="tokenized")))
    assert all(isinstance(value, torch.Tensor) and not value.is_floating_point() for value in row.values())
    assert row["completion_mask"].dtype != torch.bool
    row["input_ids"].zero_()
    assert torch.equal(replay_buffer[:]["tokens", "full"], ids)


def test_rows_with_the_names_of_a_tokenizer() -> None:
    stored = {
        "input_ids": torch.tensor([0, 5, 6]), "attention_mask": torch.tensor([0, 1, 1]),
        "completion_mask": torch.tensor([0, 0, 1]), "unrelated": torch.tensor(1),
    }  # fmt: skip
    assert rows_of(buffer(stored), "tokenized") == [{"input_ids": [5, 6], "completion_mask": [0, 1]}]


def test_token_ids_that_tell_no_completion() -> None:
    ids = torch.arange(3)
    for stored in ({"tokens": {"full": ids}}, {"input_ids": ids}):
        with pytest.raises(ValueError, match=r'DatasetType\("language-modeling", form="tokenized"\)'):
            rows_of(buffer(stored), "tokenized")
    short = {"all_attention_mask": torch.ones(2, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"row 0 .* 3 ids under 'tokens.full', and 2 values under 'masks.all_atten"):
        rows_of(buffer({"tokens": {"full": ids, "prompt": ids}, "masks": short}), "tokenized")
    with pytest.raises(ValueError, match="a prompt of 4 ids, more than the 3"):
        rows_of(buffer({"tokens": {"full": ids, "prompt": torch.arange(4)}}), "tokenized")


def test_the_stream_of_tokens_keeps_rows_that_were_not_used(collect: Callable[..., ReplayBuffer]) -> None:
    """Rows that are given again after a look at the data are not those that the consumer changed."""
    from torchrl.data import SamplerWithoutReplacement

    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
    for i in range(2):
        ids = torch.tensor([0, i + 1, 5])
        masks = {"all_attention_mask": ids > 0}
        replay_buffer.extend(lazy_stack([TensorDict({"tokens": {"full": ids, "prompt": ids[:2]}, "masks": masks})]))
    stream = TorchRLBufferDataset(replay_buffer, 2, columns="tokenized").as_hf_dataset()
    look = next(iter(stream))
    look["input_ids"].fill_(-1)
    assert sorted(row["input_ids"].tolist() for row in stream) == [[1, 5], [2, 5]]


# Mappings and mistakes


def test_a_mapping_names_the_columns(collect: Callable[..., ReplayBuffer]) -> None:
    replay_buffer = collect("history")
    columns = {"prompt": ("history", "prompt"), "solution": "answer", "done": "next.done"}
    stored = TorchRLBufferDataset(replay_buffer, 1).as_hf_dataset(streaming=False)
    assert rows_of(replay_buffer, columns) == [
        {"prompt": row["history.prompt"], "solution": row["answer"], "done": row["next.done"]} for row in stored
    ]
    typed = rows_of(replay_buffer, DatasetType("prompt-only", extra={"solution": "answer"}))
    assert [list(row) for row in typed] == [["prompt", "solution"]] * 12


def test_a_key_that_is_no_leaf(collect: Callable[..., ReplayBuffer]) -> None:
    with pytest.raises(KeyError, match=r"'history.promt' holds nothing.* Did you mean 'history.prompt'"):
        list(TorchRLBufferDataset(collect(), 1, columns={"prompt": ("history", "promt")}))
    with pytest.raises(ValueError, match=r"column 'prompt' is one leaf, .*'history.full'.*name one of them"):
        list(TorchRLBufferDataset(collect(), 1, columns={"prompt": "history"}))


def test_a_type_that_the_buffer_cannot_make(collect: Callable[..., ReplayBuffer]) -> None:
    message = r"nothing to make a 'preference' dataset of, such as chosen \+ rejected.*PreferencePairs.*'history.full'"
    with pytest.raises(ValueError, match=message):
        list(TorchRLBufferDataset(collect(), 1, columns="preference"))
    with pytest.raises(ValueError, match="nothing to make a conversational 'prompt-only'"):
        list(TorchRLBufferDataset(collect("text"), 1, columns=DatasetType("prompt-only", form="conversational")))


def test_a_row_of_another_kind() -> None:
    replay_buffer = buffer({"text": {"prompt": "p", "response": "r"}}, {"query": "q"})
    with pytest.raises(ValueError, match=r"row 1 .* holds nothing under 'text.prompt'.*rows of one kind"):
        rows_of(replay_buffer, "prompt-completion")


def test_arguments() -> None:
    replay_buffer = buffer({"text": "hello"})
    with pytest.raises(ValueError, match="keys and columns exclude each other"):
        TorchRLBufferDataset(replay_buffer, 1, keys=["text"], columns="prompt-only")
    with pytest.raises(ValueError, match=r"'prompt-completions' is not a dataset type.*'prompt-completion'"):
        TorchRLBufferDataset(replay_buffer, 1, columns="prompt-completions")
    with pytest.raises(ValueError, match=r"'prompt-only' dataset has the forms 'conversational', 'standard', not 'tok"):
        DatasetType("prompt-only", form="tokenized")
    for extra in (["a"], "a", 1):
        with pytest.raises(TypeError, match=r"extra is a mapping \{column: nested key\}"):
            DatasetType("prompt-only", extra=extra)  # type: ignore[arg-type]
    for threshold in ("x", float("nan"), True):
        with pytest.raises(TypeError, match="threshold is a reward, a number"):
            DatasetType("unpaired-preference", threshold=threshold)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"extra names the column 'text', which the type .* gives itself"):
        rows_of(replay_buffer, DatasetType("language-modeling", extra={"text": "text"}))
    with pytest.raises(ValueError, match="label and threshold belong to 'unpaired-preference'"):
        DatasetType("preference", threshold=0.5)
    for name in ("prompt-only", "preference"):
        with pytest.raises(ValueError, match=f"labels belong to the token ids of one sequence, which '{name}'"):
            DatasetType(name, labels=True)
    with pytest.raises(TypeError, match="columns must be the name of a TRL dataset type"):
        TorchRLBufferDataset(replay_buffer, 1, columns=["text"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty mapping"):
        TorchRLBufferDataset(replay_buffer, 1, columns={})
    with pytest.raises(TypeError, match="names of columns are strings"):
        TorchRLBufferDataset(replay_buffer, 1, columns={("a", "b"): "text"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="'Module' is not a trainer class"):
        TorchRLBufferDataset(replay_buffer, 1, columns="prompt-only").check(torch.nn.Module)

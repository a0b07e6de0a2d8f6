"""TorchRL's History as Hugging Face messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrl.data.llm import History

from torchrl_trl_bridge.messages import history_to_messages, is_history

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1]}}, "id": "call_1"}


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "url": "a.png"}]}],
        [{"role": "user", "content": "add"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        [{"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "3"}],
    ],
)
def test_messages_come_back_as_they_went_in(chat: list[dict[str, Any]]) -> None:
    history = History.from_chats([chat])
    assert is_history(history)
    assert history_to_messages(history[0]) == chat
    assert history_to_messages(history) == [chat]
    assert history_to_messages(history[0][0]) == chat[0]


def test_a_dense_history() -> None:
    history = History(role=["user", "assistant"], content=["hi", "hello"], batch_size=[2])
    assert history_to_messages(history) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]


def test_a_bare_tool_call_gets_the_form_of_hugging_face() -> None:
    history = History(role="assistant", content="", tool_calls=[{"name": "add", "arguments": {"a": 2}}])
    message = history_to_messages(history)
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]


def test_tool_responses_become_tool_messages() -> None:
    history = History(role="tool", content="", tool_responses=["3", "4"])
    assert history_to_messages(history) == [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    both = History(role="tool", content="see below", tool_responses=["3"])
    assert history_to_messages(both) == [{"role": "tool", "content": "see below"}, {"role": "tool", "content": "3"}]


def test_padding_turns_are_left_out() -> None:
    history = History.from_chats([{"role": "user", "content": "hi"}, {"role": "<none>", "content": ""}])
    assert history_to_messages(history) == [{"role": "user", "content": "hi"}]


def test_other_objects_are_no_history() -> None:
    assert not is_history([{"role": "user", "content": "hi"}])
    assert not is_history(torch.ones(2))

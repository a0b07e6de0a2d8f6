"""TorchRL's History ↔ Hugging Face messages."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from torchrl_trl_bridge.history import MessageHistory
from torchrl_trl_bridge.messages import history_to_messages, is_history, messages_to_history
from torchrl_trl_bridge.rollouts import read_columns
from torchrl_trl_bridge.tiny import tiny_tokenizer

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


def strings(alphabet: str = "ab <|im_end|>\n") -> st.SearchStrategy[str]:
    return st.text(alphabet, max_size=6)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | strings(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(strings(), values, max_size=3),
    max_leaves=5,
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": strings()}), max_size=3)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": strings(), "arguments": strings() | JSON}),
        },
        optional={"id": strings()},
    )
    | st.fixed_dictionaries({"name": strings(), "arguments": JSON}),
    max_size=2,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={
        "content": st.none() | strings() | PARTS,
        "tool_calls": st.none() | CALLS,
        "tool_responses": st.none()
        | st.lists(st.fixed_dictionaries({"name": strings(), "response": JSON}), max_size=2),
        "name": strings(),
        "tool_call_id": st.none() | strings(),
        "reasoning_content": strings(),
        "is_complete": st.booleans(),
        "extra": JSON,
    },
)
CHAT = st.lists(MESSAGE, min_size=1, max_size=4)


@given(CHAT)
def test_any_conversation_is_the_same_after_a_history(chat: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(chat)
    history = messages_to_history(chat)
    assert isinstance(history, History)
    assert history_to_messages(history) == before
    assert history_to_messages(pickle.loads(pickle.dumps(history))) == before
    assert [history_to_messages(history[turn]) for turn in range(len(chat))] == before
    assert chat == before


@given(st.lists(CHAT, min_size=1, max_size=3))
def test_conversations_of_different_length_are_one_batch(chats: list[list[dict[str, Any]]]) -> None:
    history = messages_to_history(chats)
    assert history.batch_size[0] == len(chats)
    assert history_to_messages(history) == chats


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@given(chats=st.lists(CHAT, min_size=2, max_size=3))
@settings(max_examples=20)
def test_any_conversation_is_the_same_after_a_replay_buffer(storage: type, chats: list[list[dict[str, Any]]]) -> None:
    replay_buffer = ReplayBuffer(storage=storage(len(chats)))
    rows = [TensorDict({"history": ChatHistory(full=messages_to_history(chat))}) for chat in chats]
    replay_buffer.extend(lazy_stack(rows))
    column = read_columns(replay_buffer[:])["history", "full"]
    assert column.values == chats
    assert [history_to_messages(replay_buffer[i]["history"].full) for i in range(len(chats))] == chats


@given(CHAT)
def test_a_history_is_the_same_after_messages(chat: list[dict[str, Any]]) -> None:
    history = messages_to_history(chat)
    again = messages_to_history(history_to_messages(history))
    assert type(again) is type(history)
    assert again.tolist(tolist_first=True) == history.tolist(tolist_first=True)


def test_a_history_that_torchrl_parsed_keeps_role_content_and_calls() -> None:
    text = (
        '<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    )
    history = History.from_text(text + "</tool_call><|im_end|>\n", chat_template_name="qwen")
    again = messages_to_history(history_to_messages(history))
    assert again.role == history.role
    assert [str(content) for content in again.content] == [str(content) for content in history.content]
    assert history_to_messages(again) == history_to_messages(history)
    assert history_to_messages(history)[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_only_conversations_that_need_it_get_another_class() -> None:
    plain = messages_to_history(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [CALL], "content": ""}]
    )
    assert type(plain) is History
    assert plain.is_complete == [True, True]
    assert plain[1].tool_calls == [CALL]
    assert type(messages_to_history([{"role": "tool", "content": "3", "name": "add"}])) is MessageHistory


def test_the_last_message_may_be_cut_off() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]
    assert messages_to_history(chat, is_complete=False).is_complete == [True, False]


def test_torchrl_appends_its_own_turns() -> None:
    prompt = messages_to_history([{"role": "user", "content": "hi", "name": "ada"}])
    full = prompt.append(History(role="assistant", content="hello"), inplace=False)
    assert history_to_messages(full) == [
        {"role": "user", "content": "hi", "name": "ada"},
        {"role": "assistant", "content": "hello"},
    ]


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        ([], ValueError, "at least one message"),
        ([[{"role": "user", "content": ""}], []], ValueError, "of conversation 1"),
        ("hi", TypeError, "a list of messages, got 'hi'"),
        (["hi"], TypeError, "message 0 must be a dict"),
        ([{"role": "user", "content": ""}, {"content": "hi"}], ValueError, "message 1 has the role None"),
        ([{"role": "<none>", "content": "hi"}], ValueError, "marks padding"),
        ([{"role": "user", 3: "hi"}], TypeError, "message 0 must be a dict"),
    ],
)
def test_what_is_no_conversation_is_an_error(messages: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        messages_to_history(messages)


TEMPLATES = sorted(Path(trl.__file__).parent.glob("chat_templates/*.jinja"))
ASKED = {"role": "user", "content": "What is 2 + 2?"}
REPLY = {"role": "tool", "name": "add", "tool_call_id": "call_1", "content": "4"}
CHATS = {
    "plain": [ASKED, {"role": "assistant", "content": "4"}],
    "system": [{"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "4"}, ASKED],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}],
    "tools": [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        REPLY,
        {"role": "assistant", "content": "4"},
    ],
    "no content": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, REPLY],
    "absent content": [ASKED, {"role": "assistant", "tool_calls": [CALL]}, REPLY],
    "bare call": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]}, REPLY],
    "text arguments": [
        ASKED,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
    ],
    "thoughts": [ASKED, {"role": "assistant", "reasoning_content": "easy", "thinking": "easy", "content": "4"}, ASKED],
}


def rendered(render: Callable[..., str], **kwargs: Any) -> tuple[str, str]:
    """The text, or the error of a template that does not take such a conversation."""
    try:
        return "text", render(tokenize=False, **kwargs)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        return "error", str(error)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_templates_of_trl_render_the_same_text(template: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_start|>"  # some templates begin with it
    kwargs = {"chat_template": template.read_text(), "add_generation_prompt": True}
    texts = {}
    for name, chat in CHATS.items():
        before = rendered(functools.partial(tokenizer.apply_chat_template, copy.deepcopy(chat)), **kwargs)
        history = messages_to_history(copy.deepcopy(chat))
        assert rendered(functools.partial(history.apply_chat_template, tokenizer=tokenizer), **kwargs) == before, name
        back = history_to_messages(history)
        assert rendered(functools.partial(tokenizer.apply_chat_template, back), **kwargs) == before, name
        texts[name] = before
    assert any(kind == "text" and "2 + 2" in text for kind, text in texts.values())


@pytest.mark.skipif(
    not any("tool_call_id" in path.read_text() for path in TEMPLATES),
    reason="no chat template of this trl reads the call that a reply answers",
)
def test_the_templates_read_what_history_has_no_field_for() -> None:
    """Otherwise the test above would pass without the thoughts and the names."""
    tokenizer = tiny_tokenizer()

    def differs(template: Path, chat: list[dict[str, Any]], fields: set[str]) -> bool:
        less = [{key: value for key, value in message.items() if key not in fields} for message in chat]
        both = [
            rendered(functools.partial(tokenizer.apply_chat_template, messages), chat_template=template.read_text())
            for messages in (chat, less)
        ]
        return both[0] != both[1]

    assert any(differs(template, CHATS["thoughts"], {"reasoning_content", "thinking"}) for template in TEMPLATES)
    assert any(differs(template, CHATS["tools"], {"name", "tool_call_id"}) for template in TEMPLATES)

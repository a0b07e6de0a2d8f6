"""TorchRL's ``History`` ↔ Hugging Face messages, lossless both ways."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_trl_bridge.compat.tensordict import (
    is_container,
    is_non_tensor_leaf,
    non_tensor,
    plain_value,
    stacked_rows,
)

Message = dict[str, Any]

# TorchRL pads conversations of a batch with turns of this role; its chat templates skip them, and so do we.
PLACEHOLDER_ROLE = "<none>"

_OWN_FIELDS = frozenset({"role", "content", "tool_calls"})


def is_history(value: object) -> bool:
    """Whether ``value`` is a TorchRL ``History``.

    Asks ``sys.modules``: an object of that class exists only where its module is loaded, and loading it costs seconds.
    """
    module = sys.modules.get("torchrl.data.llm.history")
    return module is not None and isinstance(value, module.History)


def history_to_messages(history: Any) -> Any:
    """Turns a ``History`` into Hugging Face messages.

    Args:
        history: a ``torchrl.data.llm.History`` (or the tensordict inside one). Its last batch dimension runs over the
            turns of a conversation.

    Returns:
        A list of ``{"role": str, "content": ...}``, one for each turn, for a history of one dimension; lists of such
        lists for more dimensions; the one message for none. ``tool_calls`` come in Hugging Face form
        (``{"type": "function", "function": {"name": ..., "arguments": ...}}``), each entry of ``tool_responses`` as a
        message of role ``"tool"``. Turns of role ``"<none>"``, TorchRL's padding, are left out, and so is
        ``is_complete``, which has no counterpart. What :func:`messages_to_history` made comes back as it was.

    Examples:
        >>> from torchrl.data.llm import History
        >>> history = History.from_chats([[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]])
        >>> history_to_messages(history[0])
        [{'role': 'user', 'content': '2+2?'}, {'role': 'assistant', 'content': '4'}]
    """
    dims = len(history.batch_size)
    if dims > 1:
        return [history_to_messages(row) for row in stacked_rows(history) or history.unbind(0)]
    if dims == 1:
        return [message for turn in _turns(history) for message in _messages_of(turn)]
    messages = _messages_of({key: _field(value) for key, value in history.items()})
    return messages[0] if len(messages) == 1 else messages


def messages_to_history(messages: Any, *, is_complete: bool = True) -> Any:
    """Turns Hugging Face messages into a ``History``; :func:`history_to_messages` gives back equal messages.

    Args:
        messages: a conversation, a list of ``{"role": str, "content": ...}``, or a list of conversations, which may
            differ in length. Content may be a string, None or a list of parts; a message may have any other fields.
        is_complete: whether the last message of each conversation was ended, not cut off: TorchRL's field of that name.

    Returns:
        A ``torchrl.data.llm.History`` of batch size ``[turns]``, lazily stacked, or of ``[conversations, turns]``,
        where ``turns`` is -1 if they differ. Role, content and tool calls are in ``History``'s fields. If any message
        has more than that (a tool's ``name`` and ``tool_call_id``, ``reasoning_content``, ...), it is a
        :class:`~torchrl_trl_bridge.history.MessageHistory`, a ``History`` with one more field. Its
        ``apply_chat_template`` renders the text that a tokenizer renders from the messages. The values of a message are
        held as they are, not copied.

    Raises:
        TypeError: if a conversation is not a list of dicts with string keys. It names the conversation and the message.
        ValueError: for an empty conversation, and for a role that is not a string, or ``"<none>"``, which TorchRL
            skips.

    Examples:
        >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> history = messages_to_history([chat, chat[:1]])
        >>> list(history[0].content)
        ['2+2?', '4']
        >>> history_to_messages(history) == [chat, chat[:1]]
        True
    """
    if isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple)):
        chats = [_turns_of(chat, is_complete, f" of conversation {i}") for i, chat in enumerate(messages)]
        turns = LazyStackedTensorDict(*(LazyStackedTensorDict(*chat) for chat in chats))
        return _history_class(turn for chat in chats for turn in chat).from_tensordict(turns)
    chat = _turns_of(messages, is_complete, "")
    return _history_class(chat).from_tensordict(LazyStackedTensorDict(*chat))


def join_histories(*histories: Any) -> Any:
    """One conversation from several that :func:`messages_to_history` made; it shares their values.

    >>> prompt, answer = ([{"role": role, "content": "hi"}] for role in ("user", "assistant"))
    >>> joined = join_histories(messages_to_history(prompt), messages_to_history(answer))
    >>> history_to_messages(joined) == prompt + answer
    True
    """
    turns = [TensorDict(dict(turn.items())) for history in histories for turn in stacked_rows(history) or ()]
    return _history_class(turns).from_tensordict(LazyStackedTensorDict(*turns))


def _history_class(turns: Iterable[Any]) -> Any:
    if any("extra" in turn.keys() for turn in turns):  # noqa: SIM118 (a tensordict is no mapping)
        from torchrl_trl_bridge.history import MessageHistory

        return MessageHistory
    from torchrl.data.llm import History

    return History


def _turns_of(chat: Any, is_complete: bool, where: str) -> list[TensorDict]:
    if not isinstance(chat, (list, tuple)):
        raise TypeError(f"a conversation must be a list of messages, got {chat!r}{where}.")
    if not chat:
        raise ValueError(f"a conversation needs at least one message{where or ', got an empty list'}.")
    last = len(chat) - 1
    return [_turn_of(message, is_complete or i < last, f"message {i}{where}") for i, message in enumerate(chat)]


def _turn_of(message: Any, is_complete: bool, where: str) -> TensorDict:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise TypeError(f"{where} must be a dict with 'role' and 'content', got {message!r}.")
    role = message.get("role")
    if not isinstance(role, str) or role == PLACEHOLDER_ROLE:
        raise ValueError(
            f"{where} has the role {role!r}: it must be a string such as 'user', and not {PLACEHOLDER_ROLE!r}, "
            "by which TorchRL marks padding."
        )
    # Wrapped one by one: a list given to a tensordict would be taken for values of several rows.
    fields = {"role": non_tensor(role), "is_complete": non_tensor(is_complete)}
    if "content" in message:
        fields["content"] = non_tensor(message["content"])
    calls = message.get("tool_calls")
    if calls:
        fields["tool_calls"] = non_tensor(calls)
    extra = {key: value for key, value in message.items() if key not in _OWN_FIELDS}
    if "tool_calls" in message and not _come_back(calls):
        extra["tool_calls"] = calls
    if extra or "content" not in message:
        fields["extra"] = non_tensor(extra)
    return TensorDict(fields)


def _come_back(calls: Any) -> bool:
    """Whether tool calls survive in ``History``'s own field, which has no empty lists and no bare functions."""
    return (
        isinstance(calls, list) and bool(calls) and all(isinstance(call, dict) and "function" in call for call in calls)
    )


def _turns(history: Any) -> list[dict[str, Any]]:
    """The fields of each turn of a history of one dimension."""
    rows = stacked_rows(history)
    if rows is not None:  # turns may differ in their fields: only some call tools
        return [{key: _field(value) for key, value in row.items()} for row in rows]
    fields = {key: _field(value) for key, value in history.items()}
    return [{key: values[turn] for key, values in fields.items()} for turn in range(history.batch_size[0])]


def _field(value: Any) -> Any:
    if is_non_tensor_leaf(value):
        return plain_value(value)
    if is_container(value):  # message content in parts (`ContentBase`), one container a part
        rows = stacked_rows(value) or (value.unbind(0) if value.batch_size else None)
        if rows is None:
            return {key: _field(item) for key, item in value.items()}
        return [_field(row) for row in rows]
    return value.tolist() if hasattr(value, "tolist") else value


def _messages_of(turn: dict[str, Any]) -> list[Message]:
    role = turn["role"]
    if role == PLACEHOLDER_ROLE:
        return []
    extra = turn.get("extra")
    message: Message = {"role": role}
    if extra is None or "content" in turn:  # TorchRL leaves out a content of None; `extra` tells none from None
        message["content"] = turn.get("content")
    if turn.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in turn["tool_calls"]]
    if extra is not None:
        return [message | extra]
    replies = [_tool_reply(reply) for reply in turn.get("tool_responses") or ()]
    if role == "tool" and replies and message["content"] in (None, "", replies[0]["content"]):
        return replies  # the turn says nothing beside its replies
    return [message, *replies]


def _tool_call(call: Any) -> Any:
    # TorchRL's parsers of model output write the bare function.
    return call if not isinstance(call, dict) or "function" in call else {"type": "function", "function": call}


def _tool_reply(reply: Any) -> Message:
    return {"role": "tool", "content": reply if isinstance(reply, str) else json.dumps(reply)}

"""TorchRL's ``History`` as Hugging Face messages."""

from __future__ import annotations

import json
import sys
from typing import Any

from torchrl_trl_bridge.compat.tensordict import is_container, is_non_tensor_leaf, plain_value, stacked_rows

Message = dict[str, Any]

# TorchRL pads conversations of a batch with turns of this role; its chat templates skip them, and so do we.
PLACEHOLDER_ROLE = "<none>"


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
        ``is_complete``, which has no counterpart.

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
    message: Message = {"role": role, "content": turn.get("content")}
    if turn.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in turn["tool_calls"]]
    replies = [_tool_reply(reply) for reply in turn.get("tool_responses") or ()]
    if role == "tool" and replies and message["content"] in (None, "", replies[0]["content"]):
        return replies  # the turn says nothing beside its replies
    return [message, *replies]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    # TorchRL's parsers of model output write the bare function.
    return call if "function" in call else {"type": "function", "function": call}


def _tool_reply(reply: Any) -> Message:
    return {"role": "tool", "content": reply if isinstance(reply, str) else json.dumps(reply)}

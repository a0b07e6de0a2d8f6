"""A TorchRL ``History`` with room for all that a Hugging Face message may carry."""

from __future__ import annotations

from typing import Any

from torchrl.data.llm import History


class MessageHistory(History):  # type: ignore[misc]  # torchrl comes without types
    """A ``History`` whose turns may have fields beyond role, content and tool calls.

    ``History`` has five fields and refuses others, and chat templates read more than that: the name and the call id of
    a tool's reply, a reasoning model's thoughts. They wait in ``extra``, one dict a turn, and stand beside the other
    fields again where the conversation is rendered: :meth:`History.apply_chat_template` gives the text that the
    tokenizer gives for the messages. Everything else is as in ``History``: indexing, stacking, appending. The class has
    a module of its own since loading ``History`` takes seconds, which a buffer without conversations need not spend.

    Attributes:
        extra: what a turn's message has beside ``History``'s own fields, or what these cannot tell apart, such as tool
            calls that are None and none at all. None in a turn that lacks nothing.

    Examples:
        >>> from torchrl_trl_bridge.messages import messages_to_history
        >>> history = messages_to_history([{"role": "tool", "name": "add", "content": "4"}])
        >>> history[0].extra
        {'name': 'add'}
        >>> history.tolist(tolist_first=True)
        [{'role': 'tool', 'content': '4', 'is_complete': True, 'name': 'add'}]
    """

    extra: dict[str, Any] | None = None

    def tolist(self, **kwargs: Any) -> Any:
        """As in ``History``, with the fields of ``extra`` beside the others. `apply_chat_template` renders this."""
        return _spread(super().tolist(**kwargs))


def _spread(turns: Any) -> Any:
    if isinstance(turns, list):
        return [_spread(turn) for turn in turns]
    if isinstance(turns, dict) and isinstance(turns.get("extra"), dict):
        extra = turns.pop("extra")
        return turns | extra
    return turns

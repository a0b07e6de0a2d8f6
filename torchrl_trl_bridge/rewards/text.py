"""Rollouts → tokens of the reward model's own tokenizer.

The text of a rollout is made as TRL makes it for reward models (``GRPOTrainer``, TRL 0.24 to 1.16): conversations
through the chat template of the reward model's tokenizer, strings as they are, and no special tokens beside those that
the text itself has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict.utils import NestedKey

from torchrl_trl_bridge.rewards.inputs import TokenRows
from torchrl_trl_bridge.rollouts import Path, read_columns

Text: TypeAlias = str | list[dict[str, Any]]
"""A string, or a conversation in Hugging Face messages."""

InputKey: TypeAlias = NestedKey | list[NestedKey]
"""Where the text of a rollout is; a list names its parts, prompt first."""


def path_of(key: NestedKey) -> Path:
    """A nested key as a tuple of strings."""
    return (key,) if isinstance(key, str) else tuple(key)


def keys_of(input_key: InputKey) -> list[NestedKey]:
    """The keys that an input key names.

    Raises:
        TypeError: if it is neither a nested key nor a list of such.
    """
    keys: list[NestedKey] = input_key if isinstance(input_key, list) else [input_key]
    if not keys or not all(isinstance(key, (str, tuple)) for key in keys):
        raise TypeError(
            f"input_key must be a key such as ('history', 'full'), or a list of keys whose texts are joined, such as "
            f"[('text', 'prompt'), ('text', 'response')], got {input_key!r}."
        )
    return keys


def read_texts(tensordict: Any, keys: Sequence[NestedKey]) -> list[Text]:
    """Reads the text of each rollout, in row-major order; that of several keys is joined.

    Raises:
        KeyError: if a key is not in a rollout.
        TypeError: if a key holds neither strings nor conversations.
    """
    if tensordict.batch_size.numel() == 0:
        return []
    batch = tensordict.reshape(-1)
    paths = [path_of(key) for key in keys]
    columns = read_columns(batch, paths)
    parts = []
    for key, path in zip(keys, paths, strict=True):
        values = columns[path].values if path in columns else [None]
        if any(value is None for value in values):
            available = sorted(".".join(path) for path in read_columns(batch))
            raise KeyError(
                f"HFRewardModelWrapper has no text to read: input_key {key!r} not found in the input TensorDict, "
                f"whose keys are {', '.join(available) or 'none'}."
            )
        for value in values:
            if not _is_text(value):
                raise TypeError(
                    f"input_key {key!r} holds {type(value).__name__}; name a key that holds strings, a History or "
                    "lists of messages."
                )
        parts.append(values)
    return [_joined(texts, keys) for texts in zip(*parts, strict=True)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def _joined(texts: Sequence[Any], keys: Sequence[NestedKey]) -> Any:
    if len({type(text) for text in texts}) > 1:
        raise TypeError(f"input_key {list(keys)!r} names strings and conversations; they cannot be joined.")
    joined = texts[0]
    for text in texts[1:]:
        joined = joined + text
    return joined


class TextReader:
    """Texts → token ids.

    Args:
        tokenizer: of the reward model; a processor that has a tokenizer will do.
        template_kwargs: passed to the chat template.
        vocab_size: number of ids that the model knows, if known.

    Raises:
        ValueError: if the tokenizer gives ids that the model does not know.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None, vocab_size: int | None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        own = getattr(tokenizer, "tokenizer", tokenizer)
        if vocab_size is not None and len(own) > vocab_size:
            raise ValueError(
                f"the tokenizer has {len(own)} tokens and the model's vocabulary {vocab_size}. Pass the tokenizer that "
                "the reward model was trained with, or enlarge the model with model.resize_token_embeddings("
                "len(tokenizer))."
            )
        # TRL falls back on the end token, too, and has the model take that id for padding.
        pad, end = getattr(own, "pad_token_id", None), getattr(own, "eos_token_id", None)
        self.pad_token_id: int | None = end if pad is None else pad

    def encode(self, texts: Sequence[Text], shape: torch.Size, device: torch.device | None = None) -> TokenRows:
        """The token ids of each text.

        Raises:
            ValueError: for a conversation, if the tokenizer has no chat template.
        """
        rendered = self.render(texts)
        # `padding=False` and no special tokens: a template writes the model's special tokens itself.
        ids = self.tokenizer(text=rendered, add_special_tokens=False)["input_ids"] if rendered else []
        lengths = torch.tensor([len(row) for row in ids], dtype=torch.long, device=device)
        return TokenRows.ragged(torch.tensor([i for row in ids for i in row], device=device).long(), lengths, shape)

    def render(self, texts: Sequence[Text]) -> list[str]:
        """Conversations as the text that the chat template makes of them."""
        conversations = [i for i, text in enumerate(texts) if not isinstance(text, str)]
        rendered = list(texts)
        if conversations:
            if not getattr(self.tokenizer, "chat_template", None):
                raise ValueError(
                    f"{type(self.tokenizer).__name__} has no chat template to write conversations with. Set "
                    "tokenizer.chat_template to the one that the reward model was trained with, or score text with "
                    "input_key=[('text', 'prompt'), ('text', 'response')]."
                )
            made = self.tokenizer.apply_chat_template(
                [texts[i] for i in conversations], tokenize=False, **self.template_kwargs
            )
            for i, text in zip(conversations, made, strict=True):
                rendered[i] = text
        return rendered  # type: ignore[return-value]

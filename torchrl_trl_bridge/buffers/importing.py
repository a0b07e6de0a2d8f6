"""Hugging Face datasets → a replay buffer, as rows that TorchRL reads and a buffer dataset gives back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, lazy_stack

from torchrl_trl_bridge.arguments import is_integer
from torchrl_trl_bridge.buffers import rows
from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.compat.tensordict import non_tensor
from torchrl_trl_bridge.messages import messages_to_history

if TYPE_CHECKING:
    import datasets
    from torchrl.data import ReplayBuffer

Row = dict[str, Any]

# By name, the columns that a row of the type must have. The first whose columns a dataset has is its type.
_TYPES = {
    "preference": ("chosen", "rejected"),
    "stepwise-supervision": ("prompt", "completions", "labels"),
    "unpaired-preference": ("prompt", "completion", "label"),
    "prompt-completion": ("prompt", "completion"),
    "language-modeling": ("messages",),
    "prompt-only": ("prompt",),
}


def extend_from_dataset(
    replay_buffer: ReplayBuffer,
    dataset: datasets.Dataset | datasets.IterableDataset,
    *,
    dataset_type: str | None = None,
    tokenizer: Any = None,
    batch_size: int = 1000,
    progress: bool = True,
) -> int:
    """Writes the rows of a Hugging Face dataset into a replay buffer.

    Args:
        replay_buffer: a buffer that holds rows of different length, with a ``LazyStackStorage`` or ``ListStorage``.
        dataset: map-style or streaming, of a TRL dataset type: strings (the standard form) or lists of messages (the
            conversational form). A stream is read to its end: bound one that has none with ``dataset.take(n)``.
        dataset_type: ``"language-modeling"`` (columns ``messages`` or ``text``), ``"prompt-only"`` (``prompt``),
            ``"prompt-completion"`` (``prompt``, ``completion``), ``"preference"`` (``chosen``, ``rejected``, and
            ``prompt`` if it is explicit), ``"unpaired-preference"`` (``prompt``, ``completion``, ``label``) or
            ``"stepwise-supervision"`` (``prompt``, ``completions``, ``labels``). Default: what the columns say.
        tokenizer: also writes token ids (int64) and masks (bool), and the text of conversations.
        batch_size: rows that are read, checked and written at a time, and so the bound on memory.
        progress: show a progress bar.

    Returns:
        The number of rows written.

    Raises:
        TypeError: if this is no replay buffer, or no dataset (of a ``DatasetDict``, pass one split).
        ValueError: for a row that does not fit its type, naming the row and the column; nothing of its batch is
            written, the batches before it are. For columns of no type, or named as the keys of a rollout; for a storage
            that keeps one string for all rows, or takes rows of one shape only.

    Notes:
        Conversations become ``("history", ...)``, text becomes ``("text", ...)``, with ``prompt``, ``response`` and
        ``full`` as far as the type has them. ``chosen`` and ``rejected``, and the prompt beside them, keep their names,
        as do all other columns (``label``, ``tools``, ``solution``): numbers and booleans become tensors (int64,
        float64, bool), other values stay as they are, and None is left out.

        With a tokenizer there are ``("tokens", ...)`` and ``("masks", "all_attention_mask")``; preferences have
        ``chosen_ids`` and ``rejected_ids``, each with the prompt. Prompt and response are tokenized apart, as a policy
        that continues the prompt has them.

        ``TorchRLBufferDataset(replay_buffer, ..., columns=dataset_type)`` gives equal rows back.

    Examples:
        >>> import datasets
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(100))
        >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> extend_from_dataset(rb, datasets.Dataset.from_list([{"messages": chat}]), progress=False)
        1
        >>> list(rb[0]["history"].full.content)
        ['2+2?', '4']
    """
    if not compat.is_replay_buffer(replay_buffer):
        raise TypeError(f"replay_buffer must be a torchrl ReplayBuffer, got {type(replay_buffer).__name__}.")
    import datasets  # a caller with a dataset has loaded it; one without gets its error

    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        hint = "; pass one of its splits, such as dataset['train']" if isinstance(dataset, Mapping) else ""
        raise TypeError(f"dataset must be a datasets.Dataset or IterableDataset, got {type(dataset).__name__}{hint}.")
    if not is_integer(batch_size, 1):
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}.")
    rows.check_storage(replay_buffer)
    importer: _Importer | None = None
    written = 0
    total = len(dataset) if isinstance(dataset, datasets.Dataset) else None
    from tqdm import tqdm  # comes with `datasets`

    with tqdm(total=total, unit=" rows", disable=not progress, desc="Fill the replay buffer") as bar:
        for batch in _batches(dataset, int(batch_size)):
            importer = importer or _Importer(batch[0], dataset_type, tokenizer)
            with rows.all_kept():
                replay_buffer.extend(lazy_stack(importer.convert(batch, written)))
            written += len(batch)
            bar.update(len(batch))
    return written


def _batches(dataset: Any, batch_size: int) -> Iterator[list[Row]]:
    for batch in dataset.iter(batch_size=batch_size):
        yield [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


class _Importer:
    """Rows of a dataset → rows of a buffer; the first row tells their type and form."""

    def __init__(self, first: Row, name: str | None, tokenizer: Any) -> None:
        self.type = _type_of(first, name)
        self.tokenizer = tokenizer
        if self.type == "language-modeling":
            self.columns: tuple[str, ...] = ("messages",) if "messages" in first else ("text",)
        else:
            self.columns = _TYPES[self.type]
        optional = ("prompt",) if self.type == "preference" and "prompt" in first else ()
        self.columns = (*optional, *self.columns)
        self.parts = [column for column in self.columns if column not in ("label", "labels", "completions")]
        self.conversational = not isinstance(first[self.parts[0]], str)
        self.extras = [column for column in first if column not in self.columns]
        if taken := sorted(rows.RESERVED.intersection(self.extras)):
            raise ValueError(
                f"the columns {taken} have the names of keys of a rollout: rename them with "
                "dataset.rename_column(...), or leave them out with dataset.remove_columns(...)."
            )

    def convert(self, batch: list[Row], start: int) -> list[TensorDict]:
        """The rows of a batch; ``start`` is the number of its first, for the words of an error."""
        made: list[dict[str, Any]] = []
        for number, row in enumerate(batch, start):
            self._check(row, number)
            try:
                leaves = self._leaves(row)
            except (TypeError, ValueError) as error:
                raise self._misfit(row, number, error) from error
            for name in self.extras:
                if row.get(name) is not None:
                    leaves[name] = rows.leaf(row[name])
            made.append(leaves)
        if self.tokenizer is not None and self.type != "stepwise-supervision":
            for leaves, tokens in zip(made, self._tokens(batch), strict=True):
                leaves.update(tokens)
        return [TensorDict(leaves) for leaves in made]

    def _check(self, row: Row, number: int) -> None:
        wanted = "a list of messages" if self.conversational else "a string"
        kind: Any = list if self.conversational else str
        for column in self.parts:
            if not isinstance(row.get(column), kind):
                raise ValueError(
                    f"row {number}, column {column!r}: a {self.type} row needs {wanted} here, as in the first row, got "
                    f"{_short(row.get(column))}."
                )
        if "label" in self.columns and not isinstance(row["label"], bool):
            raise ValueError(
                f"row {number}, column 'label': must be True (desirable) or False, got {_short(row['label'])}. A "
                "trainer would take every number but 0 for desirable."
            )
        if "labels" in self.columns:
            self._check_steps(row, number)
        tools = row.get("tools")
        if tools is not None and not isinstance(tools, (list, str)):
            raise ValueError(f"row {number}, column 'tools': must be a list of JSON schemas, got {_short(tools)}.")

    def _check_steps(self, row: Row, number: int) -> None:
        steps, labels = row["completions"], row["labels"]
        if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
            raise ValueError(f"row {number}, column 'completions': must be a list of strings, got {_short(steps)}.")
        if not isinstance(labels, list) or len(labels) != len(steps):
            raise ValueError(
                f"row {number}, column 'labels': must be one for each of the {len(steps)} steps, got {_short(labels)}."
            )

    def _misfit(self, row: Row, number: int, error: Exception) -> Exception:
        """The error of a conversation, with its row and column."""
        for column in self.parts:
            try:
                messages_to_history(row[column])
            except (TypeError, ValueError) as cause:
                return ValueError(f"row {number}, column {column!r}: {cause}")
        return error

    def _leaves(self, row: Row) -> dict[str, Any]:
        if self.type in ("preference", "stepwise-supervision"):
            return {name: self._kept(row[name]) for name in self.columns}
        if self.type == "language-modeling":
            parts = {"full": row[self.columns[0]]}
        elif "completion" in self.columns:
            parts = {"prompt": row["prompt"], "response": row["completion"]}
        else:
            parts = {"prompt": row["prompt"]}
        if self.conversational:
            leaves = {"history": rows.history(**parts)}
        else:
            whole = {"full": "".join(parts.values())} if "response" in parts else {}
            leaves = {"text": rows.text(**parts, **whole)}
        if "label" in self.columns:
            leaves["label"] = torch.tensor(row["label"])
        return leaves

    def _kept(self, value: Any) -> Any:
        return messages_to_history(value) if self.conversational else non_tensor(value)

    # Tokens

    def _tokens(self, batch: list[Row]) -> Iterator[dict[str, Any]]:
        if self.type == "preference":
            both = []
            for column in ("chosen", "rejected"):
                prompts, answers = zip(*(self._texts(row, column) for row in batch), strict=True)
                both.append(zip(self._encode(prompts, first=True), self._encode(answers, first=False), strict=True))
            for chosen, rejected in zip(*both, strict=True):
                pair = {"chosen_ids": chosen, "rejected_ids": rejected}
                yield {name: torch.tensor([*prompt, *ids], dtype=torch.long) for name, (prompt, ids) in pair.items()}
            return
        answered = {"prompt-only": None, "language-modeling": self.columns[0]}.get(self.type, "completion")
        texts = [self._texts(row, answered) for row in batch]
        prompts, answers = zip(*texts, strict=True)
        prompt_ids, answer_ids = self._encode(prompts, first=True), self._encode(answers, first=False)
        for (prompt, answer), before, after in zip(texts, prompt_ids, answer_ids, strict=True):
            if self.type == "language-modeling":
                leaves, text = rows.tokens(full=before), {"full": prompt}
            elif answered is None:
                leaves, text = rows.tokens(prompt=before), {"prompt": prompt}
            else:
                leaves = rows.tokens(prompt=before, response=after)
                text = {"prompt": prompt, "response": answer, "full": prompt + answer}
            yield leaves | ({"text": rows.text(**text)} if self.conversational else {})

    def _texts(self, row: Row, column: str | None) -> tuple[str, str]:
        """The text of a row up to its completion, and that of the completion."""
        prompt: Any = row.get("prompt") if self.type != "language-modeling" else None
        answer: Any = None if column is None else row[column]
        if not self.conversational:
            return (answer, "") if prompt is None else (prompt, answer or "")
        whole = None if answer is None else self._render(row, (prompt or []) + answer)
        if prompt is None:
            return whole or "", ""
        asked = self._render(row, prompt, **_continued(prompt))
        if whole is None:
            return asked, ""
        # Some templates write into the prompt what the completion does not go on with: keep what they have in common.
        common = "".join(
            a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
        )
        return common, whole[len(common) :]

    def _render(self, row: Row, messages: list[Any], **kwargs: Any) -> str:
        tools = row.get("tools") or None
        extra = row.get("chat_template_kwargs") or {}
        text: str = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs, **extra)
        return text

    def _encode(self, texts: Any, *, first: bool) -> list[list[int]]:
        """Token ids, with the tokenizer's special tokens only at the start of text that no template was applied to."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=first and not self.conversational)[
            "input_ids"
        ]
        return ids


def _continued(prompt: list[Any]) -> dict[str, bool]:
    ends_with_answer = prompt[-1]["role"] == "assistant"
    return {"add_generation_prompt": not ends_with_answer, "continue_final_message": ends_with_answer}


def _type_of(row: Row, name: str | None) -> str:
    def has(columns: tuple[str, ...]) -> bool:
        return all(column in row for column in columns)

    if name is None:
        for known, columns in _TYPES.items():
            if has(columns):
                return known
        if "text" in row:
            return "language-modeling"
        raise ValueError(f"the columns {list(row)} are of no TRL dataset type. {_known_types()}")
    if name not in _TYPES:
        raise ValueError(f"{name!r} is not a dataset type. {_known_types()}")
    if not has(_TYPES[name]) and not (name == "language-modeling" and "text" in row):
        raise ValueError(f"the columns {list(row)} are not of the type {name!r}. {_known_types()}")
    return name


def _known_types() -> str:
    types = [f"{name!r} ({', '.join(columns)})" for name, columns in _TYPES.items()]
    return f"The types and their columns are {', '.join(types)}, and text in place of messages."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

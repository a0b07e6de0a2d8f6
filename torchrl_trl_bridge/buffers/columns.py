"""Leaves of a batch → the columns of a TRL dataset type, in the names and forms of TRL's guide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from torchrl_trl_bridge.arguments import is_number
from torchrl_trl_bridge.buffers.flattening import KeySelection, describe_missing, flat_name
from torchrl_trl_bridge.buffers.tokens import Tokens, integers, lengths_of
from torchrl_trl_bridge.compat import trl as compat
from torchrl_trl_bridge.rollouts import Column, Path

if TYPE_CHECKING:
    from tensordict.utils import NestedKey

Leaves = Mapping[Path, Column]
Columns = dict[str, Column]

FORMS = ("conversational", "standard", "tokenized")
"""In the order in which they are tried: a buffer of histories also holds their text and tokens."""


@dataclass(frozen=True)
class DatasetType:
    """A TRL dataset type, and how to make its columns from what a replay buffer holds.

    ``columns="prompt-completion"`` is short for ``columns=DatasetType("prompt-completion")``.

    Args:
        name: ``"language-modeling"`` (columns ``messages``, ``text`` or ``input_ids``), ``"prompt-only"`` (``prompt``),
            ``"prompt-completion"`` (``prompt``, ``completion``), ``"preference"`` (``prompt`` if it is stored,
            ``chosen``, ``rejected``, ``margin`` if it is stored), ``"unpaired-preference"`` (``prompt``,
            ``completion``, ``label``) or ``"tokenized"``, the token ids of a prompt-completion: ``input_ids`` and
            ``completion_mask`` (integers, 1 on the completion), and ``assistant_masks`` if the buffer has such a mask.
        form: ``"conversational"`` (lists of ``{"role", "content"}``), ``"standard"`` (strings) or ``"tokenized"``
            (token ids). Default: the first of these that the buffer holds.
        extra: more columns, by name, such as ``{"solution": "answer"}`` for a reward function.
        label: of an unpaired preference, the key of a boolean, or of a reward if there is a ``threshold``. Default:
            ``"label"`` if the buffer holds it, else ``("next", "reward")``.
        threshold: rewards from here on are desirable. Rewards of several steps or tokens are summed.
        labels: of tokenized rows, also give ``labels``: the token ids, -100 outside of the completion and of the
            assistant's turns.

    Raises:
        ValueError: for an unknown name or form, for a form that a type does not have, and for an option that the type
            does not use; while iterating, if ``extra`` names a column that the type gives itself.
        TypeError: if ``extra`` is no mapping, or ``threshold`` no number.

    Notes:
        The prompt of a conversation reaches up to its last turn that is not the assistant's, as a rule the last user or
        tool turn; the completion is the assistant's turns after it. Where the buffer holds prompt and response apart,
        as a collector writes them, they are given as they are. System turns stay where they are. ``tools`` is given
        beside conversations where the buffer holds it.

        Text is taken from ``("text", "prompt")`` and ``("text", "response")`` rather than from ``("text", "full")``,
        which holds padding tokens where the policy pads its output.

        Token ids are given without stored padding, as the attention mask tells it.

        TRL's SFTTrainer applies ``completion_mask`` only with ``SFTConfig(completion_only_loss=True)``, and takes
        ``labels`` as they are.

    Examples:
        >>> DatasetType("unpaired-preference", threshold=0.5)
        DatasetType('unpaired-preference', threshold=0.5)
    """

    name: str
    form: str | None = None
    extra: Mapping[str, NestedKey] | None = None
    label: NestedKey | None = None
    threshold: float | None = None
    labels: bool = False

    def __post_init__(self) -> None:
        if self.name not in _SOURCES:
            raise ValueError(f"{self.name!r} is not a dataset type. The types are {', '.join(map(repr, _SOURCES))}.")
        forms = list(_SOURCES[self.name])
        if self.form is not None and self.form not in forms:
            raise ValueError(f"a {self.name!r} dataset has the forms {', '.join(map(repr, forms))}, not {self.form!r}.")
        if self.name != "unpaired-preference" and not (self.label is None and self.threshold is None):
            raise ValueError(f"label and threshold belong to 'unpaired-preference', not to {self.name!r}.")
        if self.labels and ("tokenized" not in forms or self.name == "preference"):
            raise ValueError(f"labels belong to the token ids of one sequence, which {self.name!r} does not give.")
        if not isinstance(self.extra, (Mapping, NoneType)):
            raise TypeError(f"extra is a mapping {{column: nested key}}, got {self.extra!r}.")
        if self.threshold is not None and not is_number(self.threshold):
            raise TypeError(f"threshold is a reward, a number, got {self.threshold!r}.")

    def __repr__(self) -> str:
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}
        given = [f", {name}={value!r}" for name, value in options.items() if value not in (None, False)]
        return f"DatasetType({self.name!r}{''.join(given)})"


class ColumnPlan:
    """How to make the output columns of each batch; the source is picked at the first one.

    Args:
        columns: the name of a type, a `DatasetType`, or a mapping from column names to nested keys.

    Raises:
        TypeError: for anything else.
    """

    def __init__(self, columns: str | DatasetType | Mapping[str, NestedKey]) -> None:
        if isinstance(columns, str):
            columns = DatasetType(columns)
        if isinstance(columns, Mapping):
            self.type, named = None, columns
        elif isinstance(columns, DatasetType):
            self.type, named = columns, columns.extra or {}
        else:
            raise TypeError(
                "columns must be the name of a TRL dataset type, a DatasetType, or a mapping {column: nested key}, "
                f"got {columns!r}."
            )
        if self.type is None and not named:
            raise ValueError("columns is an empty mapping: name a column, as in columns={'prompt': 'query'}.")
        if not all(isinstance(name, str) for name in named):
            raise TypeError(f"the names of columns are strings, got {list(named)!r}.")
        self.named = {name: KeySelection([key]) for name, key in named.items()}
        self.label = None if self.type is None or self.type.label is None else KeySelection([self.type.label])
        self.source: _Source | None = None

    @property
    def form(self) -> str | None:
        """The form of the columns, None as long as it is not known, and for a mapping."""
        return None if self.source is None else self.source.form

    @property
    def paths(self) -> list[Path]:
        """What has to be read from a batch."""
        sources = [self.source] if self.source else self._candidates()
        paths = [path for source in sources for path in (*source.needs, *source.may)]
        paths += [path for selection in self.named.values() for path in selection.paths or ()]
        if self.type is not None:
            paths += [("tools",)] if self.form in (None, "conversational") else []
            if self.type.name == "unpaired-preference":
                paths += _LABELS if self.label is None else self.label.paths or []
        return list(dict.fromkeys(paths))

    def _candidates(self) -> list[_Source]:
        if self.type is None:
            return []
        forms = _SOURCES[self.type.name]
        return [source for form in ([self.type.form] if self.type.form else forms) for source in forms[form]]

    def build(self, leaves: Leaves, available: Callable[[], Sequence[Path]], *, first: bool = False) -> Columns:
        """The columns of one batch.

        Args:
            leaves: what was read of `paths`.
            available: gives all leaves of the batch, for the message of an error.
            first: raise where a key of a mapping holds nothing. Otherwise its column is left out.

        Raises:
            KeyError: if a key of a mapping holds nothing.
            ValueError: if the buffer holds nothing that the type could be made of, or a row lacks it.
            TypeError: if a label is neither a boolean nor a reward with a threshold.
        """
        columns: Columns = {}
        if self.type is not None:
            if self.source is None:
                self.source = self._pick(self.type, leaves, available)
            source = self.source
            _check_rows(self.type, source, leaves)
            columns = source.build({path: leaves[path] for path in (*source.needs, *source.may) if path in leaves})
            if self.type.name == "unpaired-preference":
                columns["label"] = self._labels_of_rows(leaves, available)
            if source.form == "conversational" and ("tools",) in leaves:
                columns["tools"] = leaves["tools",]
            if self.type.labels:
                columns["labels"] = _labels_of_tokens(columns)
        for name, selection in self.named.items():
            if name in columns:
                raise ValueError(
                    f"extra names the column {name!r}, which the type {self} gives itself. Call it otherwise, or name "
                    "all columns: columns={column: key}."
                )
            if first or not selection.missing(leaves):
                columns[name] = leaves[_single(name, selection, leaves, available)]
        return columns

    def _pick(self, type_: DatasetType, leaves: Leaves, available: Callable[[], Sequence[Path]]) -> _Source:
        for source in self._candidates():
            if all(path in leaves and source.takes(leaves[path]) for path in source.needs):
                return source
        wanted = " or ".join(dict.fromkeys(_spelled(source.needs) for source in self._candidates()))
        form = f"{type_.form} " if type_.form else ""
        hint = " PreferencePairs writes such rows from rewarded rollouts." if type_.name == "preference" else ""
        raise ValueError(
            f"the buffer holds nothing to make a {form}{type_.name!r} dataset of, such as {wanted}.{hint} It holds "
            f"{[flat_name(path) for path in available()]}. For other keys write columns={{column: key}}."
        )

    def _labels_of_rows(self, leaves: Leaves, available: Callable[[], Sequence[Path]]) -> Column:
        path = _single("label", self.label or _default_label(leaves), leaves, available)
        values = leaves[path].values
        if _dtypes(values) <= {torch.bool, bool}:
            return Column([_truth(value, i, path) for i, value in enumerate(values)])
        threshold = None if self.type is None else self.type.threshold
        if threshold is None:
            raise TypeError(
                f"the label of an unpaired preference is a boolean, and {flat_name(path)!r} holds "
                f"{', '.join(sorted(map(_dtype_name, _dtypes(values))))}: a trainer would take every number but 0 for "
                'desirable. Write columns=DatasetType("unpaired-preference", threshold=<reward>), or label=<the key of '
                "a boolean>."
            )
        rewards = row_sums(values, path)
        for i, reward in enumerate(rewards):
            if reward != reward:
                raise ValueError(f"row {i} of the batch has the reward NaN under {flat_name(path)!r}: it has no label.")
        return Column([reward >= threshold for reward in rewards])

    def __repr__(self) -> str:
        if self.type is None:
            return repr({name: flat_name((selection.paths or [()])[-1]) for name, selection in self.named.items()})
        shown = repr(self.type.name) if self.type == DatasetType(self.type.name) else repr(self.type)
        return shown if self.source is None else f"{shown} ({self.source.form}, from {_spelled(self.source.needs)})"


# Rows


def row_sums(values: torch.Tensor | Sequence[Any], path: Path) -> list[float]:
    """The sum of each row of a column of rewards: ``[B]``, ``[B, 1]``, ``[B, T, 1]``, or ragged.

    Raises:
        ValueError: for a row without a reward.
    """
    if isinstance(values, torch.Tensor):
        return list(values.reshape(len(values), -1).double().sum(1).tolist())
    for i, value in enumerate(values):
        if value is None:
            raise ValueError(f"row {i} of the batch has no reward under {flat_name(path)!r}.")
    return [float(torch.as_tensor(value).double().sum()) for value in values]


def split_conversation(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    """The prompt of a conversation, and the assistant's turns that end it.

    >>> split_conversation([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    ([{'role': 'user', 'content': '2+2?'}], [{'role': 'assistant', 'content': '4'}])
    """
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end], messages[end:]


def _check_rows(type_: DatasetType, source: _Source, leaves: Leaves) -> None:
    for path in source.needs:
        column = leaves.get(path)
        values = [None] if column is None else column.values
        if isinstance(values, torch.Tensor):
            continue
        for i, value in enumerate(values):
            if value is None:
                raise ValueError(
                    f"row {i} of the batch holds nothing under {flat_name(path)!r}, of which the other rows make the "
                    f"{source.form} {type_.name!r} columns. Keep rows of one kind in a buffer."
                )


def _single(name: str, selection: KeySelection, leaves: Leaves, available: Callable[[], Sequence[Path]]) -> Path:
    """The one leaf that a column is made of."""
    meant = selection.select(leaves)
    if not meant:
        raise KeyError(describe_missing(selection.missing(leaves)[0], available()))
    if len(meant) > 1:
        raise ValueError(
            f"column {name!r} is one leaf, and its key holds {[flat_name(path) for path in meant]}: name one of them."
        )
    return meant[0]


def _default_label(leaves: Leaves) -> KeySelection:
    return KeySelection([next((path for path in _LABELS if path in leaves), _LABELS[-1])])


def _dtypes(values: torch.Tensor | Sequence[Any]) -> set[Any]:
    if isinstance(values, torch.Tensor):
        return {values.dtype}
    return {value.dtype if isinstance(value, torch.Tensor) else type(value) for value in values}


def _dtype_name(dtype: Any) -> str:
    return getattr(dtype, "__name__", str(dtype))


def _truth(value: Any, row: int, path: Path) -> bool:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(
            f"row {row} of the batch has {value.numel()} booleans under {flat_name(path)!r}, and a label is one."
        )
    return bool(value)


def _spelled(paths: Sequence[Path]) -> str:
    return " + ".join(map(flat_name, paths))


# Sources: from which leaves the columns of a type are made, in each form


@dataclass(frozen=True)
class _Source:
    form: str
    needs: tuple[Path, ...]
    """Leaves of the source's form, in every row."""
    build: Callable[[Leaves], Columns]
    may: tuple[Path, ...] = ()
    """Leaves that are used where they are there."""

    def takes(self, column: Column) -> bool:
        first = next((value for value in column.values if value is not None), None)
        if self.form == "standard":
            return isinstance(first, str)
        if self.form == "conversational":
            return isinstance(first, list) and all(isinstance(item, dict) and "role" in item for item in first)
        return (isinstance(first, torch.Tensor) and first.dim() == 1 and not first.is_floating_point()) or (
            isinstance(first, list) and all(type(item) is int for item in first)
        )


_LABELS: list[Path] = [("label",), ("next", "reward")]
_FULL, _PROMPT, _RESPONSE = ("history", "full"), ("history", "prompt"), ("history", "response")
_TEXT_PROMPT, _TEXT_RESPONSE, _TEXT_FULL = ("text", "prompt"), ("text", "response"), ("text", "full")
_IDS, _PROMPT_IDS, _RESPONSE_IDS = ("tokens", "full"), ("tokens", "prompt"), ("tokens", "response")
_ATTENDED, _ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


def _renamed(*names: str) -> Callable[..., Columns]:
    """Columns that are stored as they are to be given."""

    def build(leaves: Leaves, paths: tuple[Path, ...] = tuple((name,) for name in names)) -> Columns:
        return {name: leaves[path] for name, path in zip(names, paths, strict=True) if path in leaves}

    return build


def _as(**paths: Path) -> Callable[[Leaves], Columns]:
    return lambda leaves: {name: leaves[path] for name, path in paths.items()}


def _joined(name: str, *paths: Path) -> Callable[[Leaves], Columns]:
    """One column from the ends of two, such as prompt and response."""

    def build(leaves: Leaves) -> Columns:
        parts = zip(*(leaves[path].values for path in paths), strict=True)
        return {name: Column([first + second for first, second in parts])}

    return build


def _split(conversations: Callable[[Leaves], Columns], *, prompt_only: bool = False) -> Callable[[Leaves], Columns]:
    """Prompt and completion of the conversations that a builder gives."""

    def build(leaves: Leaves) -> Columns:
        (conversation,) = conversations(leaves).values()
        nothing = [None] * len(conversation.values)
        stored = [leaves[path].values if path in leaves else nothing for path in (_PROMPT, _RESPONSE)]
        parts = [_parts(*row) for row in zip(conversation.values, *stored, strict=True)]
        prompts = Column([prompt for prompt, _ in parts])
        for i, (prompt, completion) in enumerate(parts):
            if not prompt or not (completion or prompt_only):
                what = "has no turn before the assistant's" if not prompt else "does not end with an assistant's turn"
                roles = [message["role"] for message in conversation.values[i]]
                raise ValueError(f"the conversation of row {i} of the batch {what}; its roles are {roles}.")
        return {"prompt": prompts} if prompt_only else {"prompt": prompts, "completion": Column([c for _, c in parts])}

    return build


def _parts(messages: list[Any], prompt: list[Any] | None, response: list[Any] | None) -> tuple[list[Any], list[Any]]:
    if prompt and response and prompt + response == messages:
        return prompt, response  # stored apart: with a completion's calls of tools and their replies, too
    return split_conversation(messages)


def _text_parts(leaves: Leaves) -> Columns:
    """Prompt and response of text rollouts."""
    prompts, responses = leaves[_TEXT_PROMPT].values, leaves[_TEXT_RESPONSE].values
    for i, full in enumerate(leaves[_TEXT_FULL].values if _TEXT_FULL in leaves else ()):
        # TorchRL 0.14 cuts the response out of the padded text, where it does not start, with a policy in history mode.
        if full is not None and not full.startswith(prompts[i]) and full[len(prompts[i]) :] == responses[i]:
            raise ValueError(
                f"text.response of row {i} of the batch is not what was generated: TorchRL cut it out of a padded text "
                'in the wrong place. Take form="conversational" or "tokenized", or collect with pad_output=False.'
            )
    return {"prompt": leaves[_TEXT_PROMPT], "completion": leaves[_TEXT_RESPONSE]}


def _whole_text(leaves: Leaves) -> Columns:
    parts = _text_parts(leaves)
    pairs = zip(parts["prompt"].values, parts["completion"].values, strict=True)
    return {"text": Column([prompt + completion for prompt, completion in pairs])}


# Tokens


def _rollout_tokens(leaves: Leaves, *, completion: bool = True) -> Columns:
    tokens = Tokens(leaves[_IDS], _IDS, leaves.get(_ATTENDED), _ATTENDED)
    columns = {"input_ids": Column(tokens.ids)}
    if completion and _PROMPT_IDS in leaves:
        columns["completion_mask"] = Column(tokens.mask_after(lengths_of(leaves[_PROMPT_IDS].values)))
    elif completion and _ASSISTANT not in leaves:
        raise ValueError(
            "the buffer holds neither 'tokens.prompt' nor 'masks.all_assistant_mask', which tell the completion from "
            'the prompt. For all tokens take DatasetType("language-modeling", form="tokenized").'
        )
    if _ASSISTANT in leaves:
        columns["assistant_masks"] = _mask(tokens, leaves[_ASSISTANT], _ASSISTANT)
    return columns


def _stored_tokens(leaves: Leaves, *, completion: bool = True) -> Columns:
    """Rows that were stored with the names of a tokenizer's output."""
    tokens = Tokens(leaves["input_ids",], ("input_ids",), leaves.get(("attention_mask",)), ("attention_mask",))
    columns = {"input_ids": Column(tokens.ids)}
    for name in (["completion_mask"] if completion else []) + ["assistant_masks", "labels"]:
        if (name,) in leaves:
            columns[name] = _mask(tokens, leaves[name,], (name,))
    if completion and len(columns) == 1:
        raise ValueError(
            "the buffer holds 'input_ids' without 'completion_mask', 'assistant_masks' or 'labels', which tell the "
            'completion from the prompt. For all tokens take DatasetType("language-modeling", form="tokenized").'
        )
    return columns


def _mask(tokens: Tokens, column: Column, path: Path) -> Column:
    return Column(integers(tokens.keep(tokens.beside(column, path))))


def _labels_of_tokens(columns: Columns) -> Column:
    ids = columns["input_ids"]
    masks = [columns[name].values for name in ("completion_mask", "assistant_masks") if name in columns]
    return columns.get("labels") or Column(Tokens(ids, ("input_ids",), None, ()).labels(masks))


def _pairs_of_tokens(leaves: Leaves, chosen: Path, rejected: Path) -> Columns:
    columns = {}
    for name, path in zip(compat.token_names_of_pairs(), (chosen, rejected), strict=True):
        ids = leaves[path].values
        if ("prompt",) in leaves:
            pairs = zip(leaves["prompt",].values, ids, strict=True)
            ids = [torch.cat([torch.as_tensor(prompt), torch.as_tensor(answer)]) for prompt, answer in pairs]
        columns[name] = Column(ids)
    return columns | _margins(leaves)


def _margins(leaves: Leaves) -> Columns:
    return {"margin": Column(row_sums(leaves["margin",].values, ("margin",)))} if ("margin",) in leaves else {}


def _pairs(leaves: Leaves) -> Columns:
    return _renamed("prompt", "chosen", "rejected")(leaves) | _margins(leaves)


def _sources() -> dict[str, dict[str, list[_Source]]]:
    chat = functools.partial(_Source, "conversational")
    text = functools.partial(_Source, "standard")
    ids = functools.partial(_Source, "tokenized")

    def stored(*names: str) -> tuple[Path, ...]:
        return tuple((name,) for name in names)

    parts_of_text = (_TEXT_PROMPT, _TEXT_RESPONSE)
    of_ids = stored("attention_mask", "completion_mask", "assistant_masks", "labels")
    of_tokens = (_PROMPT_IDS, _ATTENDED, _ASSISTANT)
    prompt_completion = {
        "conversational": [
            chat(stored("prompt", "completion"), _renamed("prompt", "completion")),
            chat((_FULL,), _split(_as(messages=_FULL)), (_PROMPT, _RESPONSE)),
            chat((_PROMPT, _RESPONSE), _split(_joined("messages", _PROMPT, _RESPONSE))),
            chat(stored("messages"), _split(_as(messages=("messages",)))),
        ],
        "standard": [
            text(stored("prompt", "completion"), _renamed("prompt", "completion")),
            text(parts_of_text, _text_parts, (_TEXT_FULL,)),
        ],
    }
    tokenized = [ids(stored("input_ids"), _stored_tokens, of_ids), ids((_IDS,), _rollout_tokens, of_tokens)]
    of_pairs = stored("prompt", "margin")
    legacy, current = ("chosen_input_ids", "rejected_input_ids"), ("chosen_ids", "rejected_ids")
    return {
        "language-modeling": {
            "conversational": [
                chat(stored("messages"), _renamed("messages")),
                chat((_FULL,), _as(messages=_FULL)),
                chat((_PROMPT, _RESPONSE), _joined("messages", _PROMPT, _RESPONSE)),
                chat((("history",),), _as(messages=("history",))),
                chat(stored("prompt", "completion"), _joined("messages", ("prompt",), ("completion",))),
            ],
            "standard": [
                text(stored("text"), _renamed("text")),
                text(parts_of_text, _whole_text, (_TEXT_FULL,)),
                text((_TEXT_FULL,), _as(text=_TEXT_FULL)),
                text(stored("prompt", "completion"), _joined("text", ("prompt",), ("completion",))),
            ],
            "tokenized": [
                ids(stored("input_ids"), functools.partial(_stored_tokens, completion=False), of_ids),
                ids((_IDS,), functools.partial(_rollout_tokens, completion=False), (_ATTENDED, _ASSISTANT)),
            ],
        },
        "prompt-only": {
            "conversational": [
                chat(stored("prompt"), _renamed("prompt")),
                chat((_PROMPT,), _as(prompt=_PROMPT)),
                chat((_FULL,), _split(_as(messages=_FULL), prompt_only=True)),
                chat(stored("messages"), _split(_as(messages=("messages",)), prompt_only=True)),
            ],
            "standard": [text(stored("prompt"), _renamed("prompt")), text((_TEXT_PROMPT,), _as(prompt=_TEXT_PROMPT))],
        },
        "prompt-completion": prompt_completion | {"tokenized": tokenized},
        "preference": {
            "conversational": [chat(stored("chosen", "rejected"), _pairs, of_pairs)],
            "standard": [text(stored("chosen", "rejected"), _pairs, of_pairs)],
            "tokenized": [
                ids(stored(*names), functools.partial(_pairs_of_tokens, chosen=(names[0],), rejected=(names[1],)), may)
                for names, may in (
                    (("chosen", "rejected"), of_pairs),
                    (current, stored("margin")),
                    (legacy, stored("margin")),
                )
            ],
        },
        "unpaired-preference": prompt_completion,
        "tokenized": {"tokenized": tokenized},
    }


_SOURCES = _sources()

DATASET_TYPES = tuple(_SOURCES)
"""The names of TRL's dataset types, and ``"tokenized"``."""

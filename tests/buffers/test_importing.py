"""Hugging Face datasets in a replay buffer, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from torchrl.data import LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer

from tests.features import has, needs
from torchrl_trl_bridge import TorchRLBufferDataset, extend_from_dataset
from torchrl_trl_bridge.tiny import tiny_tokenizer

ASKED = {"role": "user", "content": "What is 2 + 2?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
REPLY = {"role": "tool", "name": "add", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CALLED = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, REPLY, answer("4")]

CONVERSATIONAL = {
    "language-modeling": [
        {"messages": [ASKED, answer("4")]},
        {"messages": [{"role": "system", "content": "Be brief."}, ASKED, answer("4"), ASKED, answer("still 4")]},
    ],
    "prompt-only": [{"prompt": [ASKED]}, {"prompt": [ASKED, answer("4"), ASKED]}],
    "prompt-completion": [
        {"prompt": [ASKED], "completion": [answer("4")]},
        {"prompt": [ASKED, answer("4"), ASKED], "completion": [answer("still 4")]},
        {"prompt": [ASKED], "completion": CALLED},
    ],
    "preference": [
        {"prompt": [ASKED], "chosen": [answer("4")], "rejected": [answer("5")]},
        {"prompt": [ASKED, answer("4"), ASKED], "chosen": CALLED, "rejected": [answer("")]},
    ],
    "unpaired-preference": [
        {"prompt": [ASKED], "completion": [answer("4")], "label": True},
        {"prompt": [ASKED], "completion": [answer("5")], "label": False},
    ],
}
STANDARD = {
    "language-modeling": [{"text": "2 + 2 = 4"}, {"text": ""}],
    "prompt-only": [{"prompt": "2 + 2 ="}, {"prompt": "naïve?"}],
    "prompt-completion": [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "long " * 9, "completion": ""}],
    "preference": [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
        {"prompt": "3", "chosen": "3", "rejected": ""},
    ],
    "unpaired-preference": [
        {"prompt": "2 + 2 =", "completion": " 4", "label": True},
        {"prompt": "2 + 2 =", "completion": " 5", "label": False},
    ],
}
IMPLICIT = {
    "conversational": [{"chosen": [ASKED, answer("4")], "rejected": [ASKED, answer("5")]}],
    "standard": [{"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}],
}
WITH_TOOLS = [
    {"prompt": [ASKED], "completion": CALLED, "tools": TOOLS},
    {"prompt": [ASKED], "completion": [answer("4")], "tools": None},
]

CASES = [
    *[pytest.param(name, rows, id=f"{name}-conversational") for name, rows in CONVERSATIONAL.items()],
    *[pytest.param(name, rows, id=f"{name}-standard") for name, rows in STANDARD.items()],
    *[pytest.param("preference", rows, id=f"implicit-prompt-{form}") for form, rows in IMPLICIT.items()],
    pytest.param("prompt-only", [{"prompt": [ASKED, answer("It is")]}], id="prompt-only-begun"),
    pytest.param(
        "prompt-completion",
        [{"prompt": [ASKED, answer("It is")], "completion": [answer("4")]}],
        id="prompt-completion-begun",
    ),
    pytest.param("prompt-completion", WITH_TOOLS, id="tools"),
    pytest.param("language-modeling", [{"messages": [ASKED, *CALLED], "tools": TOOLS}], id="messages-tools"),
    pytest.param("preference", [CONVERSATIONAL["preference"][1] | {"tools": TOOLS}], id="preference-tools"),
]


def mapped(rows: list[dict[str, Any]]) -> datasets.Dataset:
    """The keys of messages differ from row to row, which `Json` keeps as they are."""
    columns = {key for row in rows for key in row}
    json_columns = {key for key in columns if has("Json") and any(isinstance(row[key], list) for row in rows)}
    values = {key: [row[key] for row in rows] for key in sorted(columns)}
    features = datasets.Features(
        {
            key: datasets.Json() if key in json_columns else datasets.Dataset.from_dict({key: column}).features[key]
            for key, column in values.items()
        }
    )
    return datasets.Dataset.from_dict(values, features=features)


def streamed(rows: list[dict[str, Any]]) -> datasets.IterableDataset:
    def generate() -> Iterator[dict[str, Any]]:
        yield from rows

    return datasets.IterableDataset.from_generator(generate)


def buffer(storage: type = LazyStackStorage) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(100))


def read(replay_buffer: ReplayBuffer, columns: Any) -> list[dict[str, Any]]:
    rows = TorchRLBufferDataset(replay_buffer, 4, columns=columns).as_hf_dataset(streaming=False)
    return [dict(row) for row in rows]


@needs("Json")  # without it a snapshot fills the keys that a message lacks
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("make", [mapped, streamed])
@pytest.mark.parametrize(("name", "rows"), CASES)
def test_rows_come_back_equal(name: str, rows: list[dict[str, Any]], make: Any, storage: type) -> None:
    replay_buffer = buffer(storage)
    assert extend_from_dataset(replay_buffer, make(rows), progress=False) == len(rows)
    assert read(replay_buffer, name) == rows
    with_tokens = buffer(storage)
    extend_from_dataset(with_tokens, make(rows), tokenizer=tokenizer(), progress=False)
    assert read(with_tokens, name) == rows


@pytest.mark.parametrize("make", [mapped, streamed])
def test_steps_come_back_equal(make: Any) -> None:
    rows = [
        {"prompt": "2 + 2 * 2", "completions": ["2 * 2 = 4", "6"], "labels": [True, True]},
        {"prompt": "1 + 1", "completions": ["3"], "labels": [False]},
    ]
    replay_buffer = buffer()
    assert extend_from_dataset(replay_buffer, make(rows), progress=False) == 2
    assert read(replay_buffer, {name: name for name in rows[0]}) == rows


def test_other_columns_are_kept_with_their_precision() -> None:
    rows = [
        {"prompt": "a", "id": 2**40, "weight": 0.1, "flag": True, "tags": ["x", "y"], "note": None},
        {"prompt": "b", "id": 2, "weight": 1.0, "flag": False, "tags": [], "note": "text"},
    ]
    replay_buffer = buffer()
    extend_from_dataset(replay_buffer, mapped(rows), progress=False)
    assert read(replay_buffer, {name: name if name != "prompt" else ("text", "prompt") for name in rows[0]}) == rows
    assert replay_buffer[0]["id"].dtype == torch.int64


def test_torchrl_reads_the_rows() -> None:
    replay_buffer = buffer()
    extend_from_dataset(replay_buffer, mapped(CONVERSATIONAL["prompt-completion"]), progress=False)
    batch = replay_buffer.sample(2)
    assert len(batch) == 2
    row = replay_buffer[1]
    assert list(row["history"].response.content) == ["still 4"]
    template = tiny_tokenizer()
    expected = template.apply_chat_template([ASKED, answer("4"), ASKED, answer("still 4")], tokenize=False)
    assert row["history"].full.apply_chat_template(tokenizer=template, add_generation_prompt=False) == expected


def tokenizer() -> Any:
    """One whose template takes tools and calls."""
    made = tiny_tokenizer()
    made.chat_template = (
        "{% if tools %}{{ tools | length }} tools\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls | default('') }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made


@needs("Json")
def test_a_tokenizer_adds_tokens_masks_and_text() -> None:
    tok = tokenizer()
    replay_buffer = buffer()
    extend_from_dataset(replay_buffer, mapped(WITH_TOOLS), tokenizer=tok, progress=False)
    for i, row in enumerate(WITH_TOOLS):
        kwargs = {"tools": row["tools"], "tokenize": False}
        prompt = tok.apply_chat_template(row["prompt"], add_generation_prompt=True, **kwargs)
        whole = tok.apply_chat_template(row["prompt"] + row["completion"], **kwargs)
        stored = replay_buffer[i]
        assert prompt.startswith("1 tools") == (i == 0)
        assert (stored["text"].prompt, stored["text"].full) == (prompt, whole)
        assert stored["text"].prompt + stored["text"].response == whole
        assert tok.decode(stored["tokens"].prompt) == prompt
        assert tok.decode(stored["tokens"].full) == whole
        assert torch.equal(torch.cat([stored["tokens"].prompt, stored["tokens"].response]), stored["tokens"].full)
        assert stored["masks"].all_attention_mask.shape == stored["tokens"].full.shape
    (tokenized, _) = read(replay_buffer, "tokenized")
    assert sum(tokenized["completion_mask"]) == len(replay_buffer[0]["tokens"].response)


def test_tokens_of_text_and_of_pairs() -> None:
    tok = tiny_tokenizer()
    text, pairs, whole = buffer(), buffer(), buffer()
    extend_from_dataset(text, mapped(STANDARD["prompt-completion"]), tokenizer=tok, progress=False)
    assert tok.decode(text[0]["tokens"].full) == "2 + 2 = 4"
    extend_from_dataset(pairs, mapped(STANDARD["preference"]), tokenizer=tok, progress=False)
    assert tok.decode(pairs[0]["chosen_ids"]) == "2 + 2 = 4"
    assert tok.decode(pairs[1]["rejected_ids"]) == "3"
    extend_from_dataset(whole, mapped(CONVERSATIONAL["language-modeling"]), tokenizer=tok, progress=False)
    expected = tok.apply_chat_template(CONVERSATIONAL["language-modeling"][0]["messages"], tokenize=False)
    assert tok.decode(whole[0]["tokens"].full) == whole[0]["text"].full == expected


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}], "completion"),
        ([{"prompt": "a"}, {"prompt": None}], "prompt"),
        ([{"messages": [ASKED]}, {"messages": []}], "messages"),
        ([{"messages": [ASKED]}, {"messages": [{"content": "no role"}]}], "messages"),
        ([{"messages": [ASKED]}, {"messages": ["hi"]}], "messages"),
        ([{"chosen": [ASKED], "rejected": [ASKED]}, {"chosen": [ASKED], "rejected": "text"}], "rejected"),
        (
            [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": 0.3}],
            "label",
        ),
        (
            [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": None}],
            "label",
        ),
        ([{"prompt": [ASKED], "tools": TOOLS}, {"prompt": [ASKED], "tools": {"name": "add"}}], "tools"),
        (
            [
                {"prompt": "a", "completions": ["b"], "labels": [True]},
                {"prompt": "a", "completions": ["b"], "labels": [True, False]},
            ],
            "labels",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_named_and_its_batch_not_written(rows: list[dict[str, Any]], column: str) -> None:
    good = [rows[0]] * 4
    for stream in (streamed([*good, rows[0], rows[1]]), streamed([*good, rows[1], rows[0]])):
        replay_buffer = buffer()
        number = 5 if stream is not None and list(stream)[5] == rows[1] else 4
        with pytest.raises(ValueError, match=f"row {number}, column {column!r}"):
            extend_from_dataset(replay_buffer, stream, batch_size=2, progress=False)
        assert len(replay_buffer) == 4


@pytest.mark.parametrize(
    ("rows", "kwargs", "words"),
    [
        ([{"question": "a"}], {}, r"\['question'\] are of no TRL dataset type"),
        ([{"prompt": "a"}], {"dataset_type": "preference"}, "not of the type 'preference'"),
        ([{"prompt": "a"}], {"dataset_type": "prompts"}, "'prompts' is not a dataset type"),
        ([{"prompt": "a", "history": "x"}], {}, r"\['history'\] have the names of keys of a rollout"),
        ([{"prompt": "a"}], {"batch_size": 0}, "batch_size must be a positive integer, got 0"),
    ],
)
def test_what_does_not_fit_as_a_whole(rows: list[dict[str, Any]], kwargs: dict[str, Any], words: str) -> None:
    replay_buffer = buffer()
    with pytest.raises(ValueError, match=words):
        extend_from_dataset(replay_buffer, mapped(rows), progress=False, **kwargs)
    assert len(replay_buffer) == 0


def test_a_type_may_be_named() -> None:
    replay_buffer = buffer()
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    extend_from_dataset(replay_buffer, mapped(rows), dataset_type="prompt-only", progress=False)
    assert replay_buffer[0]["text"].prompt == "a"
    assert replay_buffer[0]["chosen"] == "b"


def test_other_objects_are_refused() -> None:
    dataset = mapped([{"prompt": "a"}])
    with pytest.raises(TypeError, match=r"dataset\['train'\]"):
        extend_from_dataset(buffer(), datasets.DatasetDict(train=dataset))
    with pytest.raises(TypeError, match="got list"):
        extend_from_dataset(buffer(), [{"prompt": "a"}])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="replay_buffer must be"):
        extend_from_dataset([], dataset)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LazyMemmapStorage"):
        extend_from_dataset(buffer(LazyMemmapStorage), dataset)
    refusing = buffer(LazyTensorStorage)
    with pytest.raises(ValueError, match=r"LazyTensorStorage, which takes rows of one shape.*LazyStackStorage"):
        extend_from_dataset(refusing, mapped([{"text": "a"}, {"text": "abc"}]), tokenizer=tiny_tokenizer())
    assert len(refusing) == 0


def test_an_empty_dataset_writes_nothing() -> None:
    assert extend_from_dataset(buffer(), datasets.Dataset.from_dict({"prompt": []}), progress=False) == 0


def test_a_stream_is_read_no_further_than_it_is_written() -> None:
    read_rows = 0

    def generate() -> Iterator[dict[str, Any]]:
        nonlocal read_rows
        for i in range(100):
            read_rows += 1
            yield {"prompt": str(i)}

    held: list[int] = []

    class Watched(ReplayBuffer):
        def extend(self, data: Any, **kwargs: Any) -> Any:
            held.append(read_rows - len(self))
            return super().extend(data, **kwargs)

    replay_buffer = Watched(storage=LazyStackStorage(100))
    stream = datasets.IterableDataset.from_generator(generate)
    assert extend_from_dataset(replay_buffer, stream, batch_size=10, progress=False) == 100
    assert len(held) == 10
    assert max(held) <= 20


@needs("Json")
def test_rows_of_datasets_and_of_pairs_share_a_buffer() -> None:
    from tensordict import NonTensorData, TensorDict

    replay_buffer = buffer()
    rows = CONVERSATIONAL["preference"]
    extend_from_dataset(replay_buffer, mapped(rows), progress=False)
    replay_buffer.add(TensorDict({key: NonTensorData(value) for key, value in rows[0].items()}))
    assert read(replay_buffer, "preference") == [*rows, rows[0]]


def test_the_progress_bar_counts_rows(capsys: pytest.CaptureFixture[str]) -> None:
    extend_from_dataset(buffer(), mapped(STANDARD["prompt-only"]))
    assert "2/2" in capsys.readouterr().err
    extend_from_dataset(buffer(), mapped(STANDARD["prompt-only"]), progress=False)
    assert capsys.readouterr().err == ""


def test_structs_of_arrow_come_back_as_they_read() -> None:
    """Without `Json`, Arrow fills the keys that a message lacks with None."""
    rows = [{"messages": [ASKED, *CALLED]}]
    dataset = datasets.Dataset.from_list(json.loads(json.dumps(rows)))
    replay_buffer = buffer()
    extend_from_dataset(replay_buffer, dataset, progress=False)
    assert read(replay_buffer, "language-modeling") == list(dataset)

"""A stream that goes on where it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.data.replay_buffers import RandomSampler
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.features import needs, sampler_class
from tests.training import seen_by_steps, texts_seen_by_steps
from torchrl_trl_bridge import BufferCheckpoint, DatasetType, TorchRLBufferDataset, load_buffer, save_buffer
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer

ConsumingSampler = sampler_class("ConsumingSampler")
SAMPLERS = [None, SamplerWithoutReplacement]


def buffer_of(
    rows: int = 100, storage: type = LazyStackStorage, sampler: type | None = None, size: int | None = None
) -> ReplayBuffer:
    kwargs = {"sampler": sampler()} if sampler else {}
    replay_buffer = ReplayBuffer(storage=storage(size or rows), generator=torch.Generator().manual_seed(0), **kwargs)
    replay_buffer.extend(TensorDict({"x": torch.arange(rows), "s": [str(n) for n in range(rows)]}, [rows]))
    return replay_buffer


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 7, 11, 12])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_rest_is_the_rest(sampler: type | None, seed: int | None, stop: int, streaming: bool) -> None:
    def make() -> Any:
        dataset = TorchRLBufferDataset(replay_buffer, 4, num_batches=3, seed=seed)
        return dataset.as_hf_dataset().map(lambda row: row) if streaming else dataset

    replay_buffer = buffer_of(sampler=sampler)
    source, resumed = make(), make()
    rows = iter(source)
    before = [next(rows)["s"] for _ in range(stop)]
    # Either the draws can be repeated, or both go on from the state of the buffer.
    own = copy.deepcopy(replay_buffer._rng.get_state()), copy.deepcopy(replay_buffer._sampler.state_dict())
    state = source.state_dict() if stop or streaming else {**source.state_dict(), "epoch": 0}
    rest = [row["s"] for row in rows]
    replay_buffer._rng.set_state(own[0])
    replay_buffer._sampler.load_state_dict(own[1])
    resumed.load_state_dict(state)
    assert [row["s"] for row in resumed] == rest
    assert len(before + rest) == 12


@needs("ConsumingSampler")
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_were_consumed_are_in_the_state(seed: int | None, stop: int, streaming: bool, tmp_path: Path) -> None:
    def make(replay_buffer: ReplayBuffer) -> Any:
        dataset = TorchRLBufferDataset(replay_buffer, 4, num_batches=3, seed=seed)
        return dataset.as_hf_dataset() if streaming else dataset

    replay_buffer, restored = (buffer_of(12, sampler=ConsumingSampler) for _ in range(2))
    source, resumed = make(replay_buffer), make(restored)
    rows = iter(source)
    before = [next(rows)["s"] for _ in range(stop)]
    save_buffer(replay_buffer, tmp_path)
    state = copy.deepcopy(source.state_dict())
    rest = [row["s"] for row in rows]
    load_buffer(restored, tmp_path)
    resumed.load_state_dict(state)
    assert [row["s"] for row in resumed] == rest
    assert len({*before, *rest}) == 12


@pytest.mark.parametrize("epoch", [0, 2])
def test_the_epoch_is_part_of_the_place(epoch: int) -> None:
    source, resumed = (TorchRLBufferDataset(buffer_of(), 4, num_batches=3, seed=1) for _ in range(2))
    source.set_epoch(epoch)
    rows = iter(source)
    next(rows)
    resumed.load_state_dict(source.state_dict())
    assert [row["s"] for row in resumed] == [row["s"] for row in rows]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("stop", range(3, 12))
def test_the_rest_is_the_rest_of_a_buffer_that_grows(
    sampler: type | None, seed: int | None, stop: int, tmp_path: Path
) -> None:
    def rows(stop: int | None = None) -> list[str]:
        replay_buffer = buffer_of(10, sampler=sampler, size=100)
        dataset = TorchRLBufferDataset(replay_buffer, 4, num_batches=5, seed=seed)
        given, iteration = [], iter(dataset)
        for n in range(20):
            if n == stop:
                save_buffer(replay_buffer, tmp_path / "buffer")
                torch.save(dataset.state_dict(), tmp_path / "state")
                replay_buffer = buffer_of(1, sampler=sampler, size=100)
                load_buffer(replay_buffer, tmp_path / "buffer")
                dataset = TorchRLBufferDataset(replay_buffer, 4, num_batches=5, seed=seed)
                dataset.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
                iteration = iter(dataset)
            given.append(next(iteration)["s"])
            replay_buffer.add(TensorDict({"x": torch.tensor(n), "s": f"new {n}"}))
        return given

    assert rows(stop) == rows()


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage, LazyTensorStorage])
def test_no_row_is_read_to_go_on_without_replacement(storage: type, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TorchRLBufferDataset(
        buffer_of(storage=storage, sampler=SamplerWithoutReplacement), 4, num_batches=9, seed=1
    )
    rows = iter(dataset)
    for _ in range(32):
        next(rows)
    resumed = TorchRLBufferDataset(dataset.replay_buffer, 4, num_batches=9, seed=1)
    resumed.load_state_dict(dataset.state_dict())
    read = []
    get = storage.get
    monkeypatch.setattr(storage, "get", lambda self, index: read.append(index) or get(self, index))
    assert len(list(resumed)) == 4
    assert len(read) == 1


@pytest.mark.parametrize(
    ("state", "words"), [({}, "no state of a TorchRLBufferDataset"), ({"version": 99}, "of a newer torchrl-trl-bridge")]
)
def test_other_states_are_refused(state: dict[str, Any], words: str) -> None:
    dataset = TorchRLBufferDataset(buffer_of(), 4, seed=1)
    next(iter(dataset))
    with pytest.raises(ValueError, match=words):
        dataset.load_state_dict({**dataset.state_dict(), **state} if state else state)
    with pytest.raises(TypeError, match="is a dict, what state_dict"):
        dataset.load_state_dict(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("seed", [None, 1])
def test_stateful_data_loaders(workers: int, streaming: bool, seed: int | None) -> None:
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        dataset = TorchRLBufferDataset(replay_buffer, 4, num_batches=6, seed=seed)
        source = dataset.as_hf_dataset() if streaming else dataset
        context = "fork" if workers else None
        return stateful_dataloader.StatefulDataLoader(
            source, batch_size=3, num_workers=workers, multiprocessing_context=context
        )

    replay_buffer = buffer_of()
    loader, resumed = make(), make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state, own = loader.state_dict(), replay_buffer._rng.get_state()
    rest = [batch["x"].tolist() for batch in batches]
    replay_buffer._rng.set_state(own)
    resumed.load_state_dict(state)
    assert [batch["x"].tolist() for batch in resumed] == rest
    assert rest


# Trainers


class Seen(TrainerCallback):
    """Adds rows as it goes, so that the buffer is another at each step."""

    def __init__(self, replay_buffer: ReplayBuffer, live: bool) -> None:
        self.replay_buffer, self.live = replay_buffer, live

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.live:
            for n in range(10):
                self.replay_buffer.add(TensorDict({"text": f"new {state.global_step} {n}"}))


def train(
    folder: Path,
    *,
    seed: int | None,
    live: bool,
    resume: int | None = None,
    kept: bool = True,
    sampler: type = RandomSampler,
    empty: bool = False,
    **kwargs: Any,
) -> tuple[list[str], SFTTrainer]:
    replay_buffer = ReplayBuffer(
        storage=LazyStackStorage(60), sampler=sampler(), generator=torch.Generator().manual_seed(0)
    )
    if empty:
        load_buffer(replay_buffer, folder / "out" / f"checkpoint-{resume}" / "replay_buffer")
    for n in range(0 if empty else 40):
        replay_buffer.add(TensorDict({"text": f"row {n}"}))
    dataset = TorchRLBufferDataset(replay_buffer, 5, num_batches=None, seed=seed)
    tokenizer = tiny_tokenizer()
    args = SFTConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, max_steps=6, save_steps=2, save_total_limit=2,
        use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, logging_strategy="no", **kwargs,
    )  # fmt: skip
    callbacks: list[TrainerCallback] = [Seen(replay_buffer, live)]
    if kept:
        callbacks.append(BufferCheckpoint(dataset))
    trainer = SFTTrainer(
        tiny_causal_lm(folder / "model"), args=args, train_dataset=dataset.as_hf_dataset(),
        processing_class=tokenizer, callbacks=callbacks,
    )  # fmt: skip
    seen = texts_seen_by_steps(trainer, tokenizer)
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / "out" / f"checkpoint-{resume}"))
    return seen, trainer


@pytest.mark.parametrize(
    ("seed", "live", "kwargs"),
    [
        (1, True, {}),
        (None, True, {}),
        (1, True, {"sampler": SamplerWithoutReplacement}),
        (1, True, {"sampler": SamplerWithoutReplacement, "ignore_data_skip": True}),
        (1, True, {"gradient_accumulation_steps": 3}),
        (None, True, {"ignore_data_skip": True}),
        (1, False, {"ignore_data_skip": True, "gradient_accumulation_steps": 2}),
    ],
)
def test_a_resumed_trainer_sees_the_rows_of_an_uninterrupted_one(
    seed: int | None, live: bool, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    whole, _ = train(tmp_path, seed=seed, live=live, **kwargs)
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "out" / "checkpoint-4" / "replay_buffer" / "buffer.json").exists()
    for empty in (False, True):
        resumed, trainer = train(tmp_path, seed=seed, live=live, resume=4, empty=empty, **kwargs)
        assert trainer.state.global_step == 6
        assert len(resumed) == len(whole) // 3
        assert resumed == whole[-len(resumed) :]


@needs("ConsumingSampler")
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("skipping", [True, False])
def test_a_resumed_trainer_goes_on_consuming(seed: int | None, skipping: bool, tmp_path: Path) -> None:
    settings = {"seed": seed, "live": True, "sampler": ConsumingSampler, "ignore_data_skip": not skipping}
    whole, _ = train(tmp_path, **settings)
    resumed, _ = train(tmp_path, resume=4, **settings)
    assert len(whole) == len(set(whole)) == 12, "each row once"
    assert resumed == whole[8:]


def train_on_tokens(folder: Path, resume: int | None = None) -> list[list[int]]:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(60), generator=torch.Generator().manual_seed(0))
    for n in range(10):
        prompt, response = torch.arange(3, 4 + n % 4), torch.arange(50 + n, 52 + n + n % 3)
        tokens = {"prompt": prompt, "response": response, "full": torch.cat([prompt, response])}
        replay_buffer.add(TensorDict({"tokens": tokens}))
    dataset = TorchRLBufferDataset(replay_buffer, 5, columns=DatasetType("tokenized", labels=True), num_batches=None)
    args = SFTConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, max_steps=4, save_steps=2, use_cpu=True,
        bf16=False, report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = SFTTrainer(
        tiny_causal_lm(folder / "model"), args=args, train_dataset=dataset.as_hf_dataset(),
        processing_class=tiny_tokenizer(), callbacks=[BufferCheckpoint(dataset)],
    )  # fmt: skip
    seen = seen_by_steps(trainer, lambda inputs: inputs["labels"].tolist())
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / "out" / f"checkpoint-{resume}"))
    return seen


def test_ragged_tokens_are_in_a_checkpoint(tmp_path: Path) -> None:
    whole = train_on_tokens(tmp_path)
    assert train_on_tokens(tmp_path, 2) == whole[4:]


def test_the_state_holds_lists_and_tensors() -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(9))
    for n in range(1, 9):
        tokens = {"prompt": torch.arange(n), "response": torch.arange(2), "full": torch.arange(n + 2)}
        replay_buffer.add(TensorDict({"tokens": tokens}))
    dataset = TorchRLBufferDataset(replay_buffer, 4, columns="tokenized")
    rows = iter(dataset)
    next(rows)
    state = dataset.state_dict()
    assert all(type(values) is list for _, values in state["drawn"].values())
    resumed = TorchRLBufferDataset(replay_buffer, 4, columns="tokenized")
    resumed.load_state_dict(state)
    for row, same in zip(rows, resumed, strict=True):
        assert all(torch.equal(row[name], same[name]) for name in row)


def test_a_seeded_stream_of_a_still_buffer_resumes_by_itself(tmp_path: Path) -> None:
    whole, _ = train(tmp_path, seed=1, live=False, kept=False)
    resumed, _ = train(tmp_path, seed=1, live=False, kept=False, resume=4)
    assert resumed == whole[-len(resumed) :]


def test_a_checkpoint_without_a_buffer_is_named(tmp_path: Path) -> None:
    train(tmp_path, seed=1, live=False, kept=False)
    with pytest.raises(FileNotFoundError, match="no buffer was saved"):
        train(tmp_path, seed=1, live=False, resume=4)


def train_grpo(folder: Path, resume: int | None = None) -> list[list[str]]:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(60), generator=torch.Generator().manual_seed(0))
    for n in range(40):
        replay_buffer.add(TensorDict({"prompt": f"{n}?"}))
    dataset = TorchRLBufferDataset(replay_buffer, 5, num_batches=None)
    calls: list[list[str]] = []

    def reward(prompts: list[str], **kwargs: Any) -> list[float]:
        calls.append(prompts)
        for n in range(3):
            replay_buffer.add(TensorDict({"prompt": f"new {len(replay_buffer)} {n}?"}))
        return [float(i % 3) for i in range(len(prompts))]

    args = GRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=4, num_generations=2, max_steps=6, save_steps=2,
        max_completion_length=2, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer(
        tiny_causal_lm(folder / "model"), reward_funcs=reward, args=args, train_dataset=dataset.as_hf_dataset(),
        processing_class=tiny_tokenizer(), callbacks=[BufferCheckpoint(dataset)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / "out" / f"checkpoint-{resume}"))
    return calls


@needs("streams in GRPO")
@pytest.mark.parametrize("resume", [2, 4])
def test_grpo_resumes_with_the_prompts_of_an_uninterrupted_run(resume: int, tmp_path: Path) -> None:
    whole = train_grpo(tmp_path)
    assert train_grpo(tmp_path, resume) == whole[resume:]
    assert len(whole) == 6

"""Each TRL trainer trains from a buffer that a collector filled, by the name of its dataset type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper

from tests.features import has, needs, needs_trl_class, takes_streams, trl_class
from torchrl_trl_bridge import DatasetType, PreferencePairs, TorchRLBufferDataset
from torchrl_trl_bridge.compat.trl import needs_of
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

GROUP = 4


class CountLetters(Transform):
    """A reward: the share of lower-case letters in the answer."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        texts = [row["text", "response"] for row in tensordict.unbind(0)]
        shares = [sum(map(str.islower, text)) / max(len(text), 1) for text in texts]
        next_tensordict["reward"] = torch.tensor(shares).view(*tensordict.batch_size, 1, 1)
        return next_tensordict


def questions() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        yield {"query": [f"{number} + 1?"] * GROUP + [f"{number} + 2?"] * GROUP, "answer": [number + 1] * 2 * GROUP}
        number += 1


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ReplayBuffer]:
    """Rewarded rollouts, in groups of 4 of one prompt; or the pairs that ``transform`` makes of them."""
    tokenizer = tiny_tokenizer()
    model = tiny_causal_lm(tmp_path_factory.mktemp("policy"), tokenizer)

    def rollouts(mode: str, transform: Transform | None = None) -> ReplayBuffer:
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, input_mode=mode, generate=True, pad_output=False,
            generate_kwargs={"max_new_tokens": 8, "do_sample": True},
        )  # fmt: skip
        env = ChatEnv.from_dataloader(questions(), input_mode=mode, tokenizer=tokenizer, batch_size=(2 * GROUP,))
        env = env.append_transform(StepCounter(max_steps=1)).append_transform(CountLetters())
        replay_buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=transform)
        torch.manual_seed(0)
        for _ in LLMCollector(
            env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=24, replay_buffer=replay_buffer
        ):
            pass
        return replay_buffer

    return rollouts


@dataclass
class Case:
    """A trainer, what its dataset is, and what its configuration adds."""

    trainer: type
    config: type
    columns: str | DatasetType
    kind: str = "rollouts"
    arguments: dict[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = ("conversational", "standard")


# Some releases of TRL lack these, and keep them in different modules.
DistillationTrainer = trl_class("DistillationTrainer")
OF_MESSAGES = DistillationTrainer is not None and needs_of(DistillationTrainer).columns == (("messages",),)
CPOTrainer, CPOConfig = trl_class("CPOTrainer"), trl_class("CPOConfig")
ORPOTrainer, ORPOConfig = trl_class("ORPOTrainer"), trl_class("ORPOConfig")

GENERATION = {"num_generations": GROUP, "max_completion_length": 4}
PROMPTS = DatasetType("prompt-only", extra={"answer": "answer"})
CASES = {
    "sft-language-modeling": Case(trl.SFTTrainer, trl.SFTConfig, "language-modeling"),
    "sft-prompt-completion": Case(trl.SFTTrainer, trl.SFTConfig, "prompt-completion"),
    "sft-packing": Case(
        trl.SFTTrainer, trl.SFTConfig, "prompt-completion", arguments={"packing": True, "max_length": 64}
    ),
    "sft-tokenized": Case(
        trl.SFTTrainer, trl.SFTConfig, "tokenized", arguments={"completion_only_loss": True}, forms=("tokenized",)
    ),
    "sft-tokenized-packing": Case(
        trl.SFTTrainer, trl.SFTConfig, DatasetType("tokenized", labels=True),
        arguments={"packing": True, "max_length": 64}, forms=("tokenized",),
    ),
    "grpo": Case(trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, arguments=GENERATION),
    "rloo": Case(trl.RLOOTrainer, trl.RLOOConfig, PROMPTS, arguments=GENERATION),
    "dpo": Case(trl.DPOTrainer, trl.DPOConfig, "preference", "pairs"),
    "kto": Case(trl.KTOTrainer, trl.KTOConfig, DatasetType("unpaired-preference", threshold=0.1)),
    "reward": Case(
        trl.RewardTrainer, trl.RewardConfig, "preference", "pairs", forms=("conversational", "standard", "tokenized")
    ),
    "distillation": Case(
        DistillationTrainer, trl_class("DistillationConfig"), "language-modeling" if OF_MESSAGES else "prompt-only",
        arguments={"max_completion_length": 4}, forms=("conversational", "standard")[: 1 if OF_MESSAGES else 2],
    ),
    "cpo": Case(CPOTrainer, CPOConfig, "preference", "pairs"),
    "orpo": Case(ORPOTrainer, ORPOConfig, "preference", "pairs"),
}  # fmt: skip
RUNS = [
    pytest.param(
        case, form, streaming,
        id=f"{name}-{form}-{'stream' if streaming else 'snapshot'}",
        marks=needs_trl_class("DistillationTrainer") if name == "distillation" else (),
    )
    for name, case in CASES.items()
    for form in case.forms
    for streaming in [True, False]
]  # fmt: skip
MODES = {"conversational": "history", "standard": "text", "tokenized": "text"}


def buffer_of(case: Case, form: str, rollouts: Callable[..., ReplayBuffer]) -> ReplayBuffer:
    if case.kind == "rollouts":
        return rollouts(MODES[form])
    leaf = {"conversational": "history", "standard": "text", "tokenized": "tokens"}[form]
    return rollouts(MODES[form], PreferencePairs(GROUP, prompt_key=(leaf, "prompt"), strategy="all"))


def arguments(config: type, folder: Path, **kwargs: Any) -> Any:
    return config(**{
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2,
        "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 1, "gradient_checkpointing": False,
    } | kwargs)  # fmt: skip


def trainer_of(trainer: type, args: Any, dataset: Any, folder: Path, **kwargs: Any) -> Any:
    """The trainer with what it asks for beside the data."""
    model = (tiny_reward_model if trainer is trl.RewardTrainer else tiny_causal_lm)(folder / "model")
    if trainer in (trl.GRPOTrainer, trl.RLOOTrainer):
        kwargs.setdefault("reward_funcs", [length_reward, answer_reward])
    if trainer is DistillationTrainer:
        kwargs["teacher_model"] = tiny_causal_lm(folder / "teacher", seed=1)
    return trainer(model, args=args, train_dataset=dataset, processing_class=tiny_tokenizer(), **kwargs)


def length_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(i % 3) for i in range(len(completions))]


def answer_reward(prompts: list[Any], completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
    for prompt, number in zip(prompts, answer, strict=True):
        text = prompt if isinstance(prompt, str) else prompt[0]["content"]
        assert f"{number - 1} + " in text, "the extra column belongs to the prompt"
        assert type(number) is int
    return [float(number) for number in answer]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def train(trainer: Any) -> list[dict[str, Any]]:
    """Trains, and returns the records of the steps."""
    before = weights(trainer.model)
    assert trainer.train().global_step == trainer.args.max_steps
    assert not torch.equal(weights(trainer.model), before)
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize(("case", "form", "streaming"), RUNS)
def test_it_trains(
    case: Case, form: str, streaming: bool, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    dataset = TorchRLBufferDataset(buffer_of(case, form, rollouts), 8, columns=case.columns, num_batches=None)
    args = arguments(case.config, tmp_path, **case.arguments)
    if streaming and not takes_streams(case.trainer):  # then both say what to write, before there is a trainer
        message = r"takes no iterable dataset. .* as_hf_dataset\(streaming=False\)"
        with pytest.raises(ValueError, match=message):
            dataset.check(case.trainer)
        with pytest.raises((ValueError, NotImplementedError), match=message):
            trainer_of(case.trainer, args, dataset.as_hf_dataset(), tmp_path)
        return
    dataset.check(case.trainer, args, streaming=streaming)
    assert f"({form}, " in repr(dataset)
    train(trainer_of(case.trainer, args, dataset.as_hf_dataset(streaming=streaming), tmp_path))


# Mistakes are found before the first step


class NoStep(transformers.TrainerCallback):
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        pytest.fail("a step began")


WRONG = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, "prompt-only", r"SFTTrainer needs .* columns=\"prompt-completion\""),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, "language-modeling", r"GRPOTrainer needs .* columns=\"prompt-only\""),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, "prompt-completion", r"DPOTrainer needs .* columns=\"preference\""),
    "kto": (trl.KTOTrainer, trl.KTOConfig, "prompt-completion", r"KTOTrainer needs .* columns=\"unpaired-preference\""),
    "reward": (trl.RewardTrainer, trl.RewardConfig, "prompt-completion", r"RewardTrainer needs .*chosen \+ rejected"),
}


@pytest.mark.parametrize(
    ("trainer", "config", "columns", "message"),
    [
        pytest.param(*case, id=name, marks=needs(f"streams in {name.upper()}") if name in ("grpo", "kto") else ())
        for name, case in WRONG.items()
    ],
)
def test_columns_of_the_wrong_type(
    trainer: type, config: type, columns: str, message: str, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    dataset = TorchRLBufferDataset(rollouts("history"), 8, columns=columns, num_batches=None)
    with pytest.raises(ValueError, match=message):
        dataset.check(trainer)
    args = arguments(config, tmp_path, **({"num_generations": GROUP} if config is trl.GRPOConfig else {}))
    for looked_at in (False, True):
        stream = dataset.as_hf_dataset()
        assert not looked_at or stream.column_names
        with pytest.raises(ValueError, match=message):  # without being asked, too
            trainer_of(trainer, args, stream, tmp_path, callbacks=[NoStep()]).train()


@pytest.mark.parametrize(
    "derive",
    [
        lambda snapshot: snapshot,
        lambda snapshot: snapshot.shuffle(seed=0).select(range(8)),
        lambda snapshot: snapshot.train_test_split(0.25)["train"],
        lambda snapshot: snapshot.filter(lambda row: True).add_column("n", list(range(len(snapshot)))),
    ],
    ids=["whole", "selected", "split", "filtered"],
)
@pytest.mark.parametrize(("trainer", "config", "columns", "message"), WRONG.values(), ids=WRONG)
def test_columns_of_the_wrong_type_in_a_snapshot(
    trainer: type,
    config: type,
    columns: str,
    message: str,
    derive: Callable[[datasets.Dataset], datasets.Dataset],
    rollouts: Callable[..., ReplayBuffer],
    tmp_path: Path,
) -> None:
    snapshot = TorchRLBufferDataset(rollouts("history"), 8, columns=columns).as_hf_dataset(streaming=False)
    args = arguments(config, tmp_path, **({"num_generations": GROUP} if config is trl.GRPOConfig else {}))
    with pytest.raises(ValueError, match=message):
        trainer_of(trainer, args, derive(snapshot), tmp_path, callbacks=[NoStep()]).train()


def test_a_snapshot_that_is_renamed_fits(rollouts: Callable[..., ReplayBuffer], tmp_path: Path) -> None:
    snapshot = TorchRLBufferDataset(rollouts("text"), 8, columns={"query": ("text", "prompt")})
    renamed = snapshot.as_hf_dataset(streaming=False).rename_column("query", "text")
    args = arguments(trl.SFTConfig, tmp_path)
    train(trainer_of(trl.SFTTrainer, args, renamed, tmp_path))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    "wrong", [{"keys": ["nope"]}, {"columns": {"text": ("text", "nope")}}], ids=["keys", "columns"]
)
def test_a_key_that_holds_nothing_is_named(
    wrong: dict[str, Any], streaming: bool, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    dataset = TorchRLBufferDataset(rollouts("text"), 8, **wrong)
    with pytest.raises(KeyError, match=r"nope' holds nothing.*Available keys.*text.prompt"):
        dataset.check(trl.SFTTrainer)
    with pytest.raises(KeyError, match=r"nope' holds nothing.*Available keys.*text.prompt"):
        trainer_of(trl.SFTTrainer, arguments(trl.SFTConfig, tmp_path), dataset.as_hf_dataset(streaming), tmp_path)


@needs("streams in GRPO")
def test_a_stream_that_was_mapped_is_left_to_the_trainer(rollouts: Callable[..., ReplayBuffer], tmp_path: Path) -> None:
    dataset = TorchRLBufferDataset(rollouts("text"), 8, keys=[("text", "prompt")], num_batches=None).as_hf_dataset()
    args = arguments(trl.GRPOConfig, tmp_path, **GENERATION)
    train(
        trainer_of(
            trl.GRPOTrainer, args, dataset.rename_column("text.prompt", "prompt"), tmp_path, reward_funcs=length_reward
        )
    )


def test_a_formatting_function_makes_the_column(rollouts: Callable[..., ReplayBuffer], tmp_path: Path) -> None:
    dataset = TorchRLBufferDataset(rollouts("text"), 8, keys=["query"], num_batches=None).as_hf_dataset()
    args = arguments(trl.SFTConfig, tmp_path)
    train(trainer_of(trl.SFTTrainer, args, dataset, tmp_path, formatting_func=lambda row: row["query"]))


def test_tokenized_rows_whose_mask_sft_would_not_use(rollouts: Callable[..., ReplayBuffer], tmp_path: Path) -> None:
    dataset = TorchRLBufferDataset(rollouts("text"), 8, columns="tokenized", num_batches=None)
    args = arguments(trl.SFTConfig, tmp_path)
    with pytest.raises(ValueError, match=r"train on the prompts too. .*completion_only_loss=True.*labels=True"):
        trainer_of(trl.SFTTrainer, args, dataset.as_hf_dataset(), tmp_path)
    dataset.check(trl.SFTTrainer, arguments(trl.SFTConfig, tmp_path, completion_only_loss=False))


@needs("streams in GRPO")
@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_a_stream_shorter_than_one_generation_batch(
    trainer: type, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    config = trl.GRPOConfig if trainer is trl.GRPOTrainer else trl.RLOOConfig
    args = arguments(config, tmp_path, gradient_accumulation_steps=8, **GENERATION)
    dataset = TorchRLBufferDataset(rollouts("history"), 2, columns=PROMPTS, num_batches=3)
    message = (
        r"ends after 6 rows, and one generation batch takes 8 prompts.*num_batches=None, or at least num_batches=4"
    )
    with pytest.raises(ValueError, match=message):
        dataset.check(trainer, args)
    stream = dataset.as_hf_dataset()
    with pytest.raises(ValueError, match=message):
        trainer_of(trainer, args, stream, tmp_path).train()
    with pytest.raises(ValueError, match=message):  # mapped, so that only its end shows it
        trainer_of(trainer, args, stream.map(lambda row: row), tmp_path).train()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", ["sft", pytest.param("grpo", marks=needs("streams in GRPO")), "dpo"])
def test_the_evaluation_of_a_stream_without_end_is_refused(
    name: str, mapped: bool, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    case = {"sft": CASES["sft-prompt-completion"], "grpo": CASES["grpo"], "dpo": CASES["dpo"]}[name]
    dataset = TorchRLBufferDataset(buffer_of(case, "standard", rollouts), 8, columns=case.columns, num_batches=None)
    stream = dataset.as_hf_dataset()
    evaluated = stream.map(lambda row: row) if mapped else stream
    args = arguments(case.config, tmp_path, **case.arguments)
    trainer = trainer_of(case.trainer, args, stream, tmp_path, eval_dataset=evaluated)
    with pytest.raises(ValueError, match=r"no end .*eval_dataset with num_batches="):
        trainer.evaluate()
    train(trainer)


# What else users switch on


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "snapshot"])
def test_evaluation_gives_the_same_loss_twice(
    streaming: bool, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    replay_buffer = rollouts("history")
    dataset, held_out = (
        TorchRLBufferDataset(replay_buffer, 8, columns="prompt-completion", num_batches=n, seed=0) for n in (None, 2)
    )
    trainer = trainer_of(
        trl.SFTTrainer, arguments(trl.SFTConfig, tmp_path), dataset.as_hf_dataset(), tmp_path,
        eval_dataset=held_out.as_hf_dataset(streaming=streaming),
    )  # fmt: skip
    first = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == first
    train(trainer)
    second = trainer.evaluate()["eval_loss"]
    assert second != first
    assert trainer.evaluate()["eval_loss"] == second


def test_only_the_assistant_is_trained_on(rollouts: Callable[..., ReplayBuffer], tmp_path: Path) -> None:
    dataset = TorchRLBufferDataset(rollouts("history"), 8, columns="language-modeling", num_batches=None)
    args = arguments(trl.SFTConfig, tmp_path, assistant_only_loss=True)
    trainer = trainer_of(trl.SFTTrainer, args, dataset.as_hf_dataset(), tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    texts = trainer.processing_class.batch_decode([ids[ids != -100] for ids in batch["labels"]])
    assert all("user" not in text and "+" in full for text, full in zip(
        texts, trainer.processing_class.batch_decode(batch["input_ids"]), strict=True
    ))  # fmt: skip
    train(trainer)


@pytest.mark.parametrize("form", ["tokens", "labels"])
@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
def test_tokenized_rows_train_on_the_response_alone(
    padded: bool, form: str, collect: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    replay_buffer = collect("text", padded)
    columns = DatasetType("tokenized", labels=form == "labels")
    dataset = TorchRLBufferDataset(replay_buffer, 12, columns=columns, num_batches=None)
    args = arguments(trl.SFTConfig, tmp_path, completion_only_loss=None if form == "labels" else True)
    trainer = trainer_of(trl.SFTTrainer, args, dataset.as_hf_dataset(), tmp_path)
    pad = trainer.processing_class.pad_token_id
    stored = TorchRLBufferDataset(replay_buffer, 12).as_hf_dataset(streaming=False)
    pairs = {(tuple(i for i in row["tokens.full"] if i != pad), tuple(row["tokens.response"])) for row in stored}
    for batch, _ in zip(trainer.get_train_dataloader(), range(3), strict=False):
        attended = batch["attention_mask"].bool()
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], attended, strict=True):
            row = tuple(ids[mask].tolist()), tuple(labels[labels != -100].tolist())
            assert row in {(full, tuple(i for i in response if i != pad)) for full, response in pairs}
    train(trainer)


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "snapshot"])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    streaming: bool, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    replay_buffer = rollouts("history")

    def run(folder: Path, steps: int, resume: bool = False) -> torch.Tensor:
        dataset = TorchRLBufferDataset(replay_buffer, 8, columns="prompt-completion", num_batches=None, seed=0)
        args = arguments(
            trl.SFTConfig, folder, max_steps=steps, save_strategy="steps", save_steps=2, lr_scheduler_type="constant"
        )
        trainer = trainer_of(trl.SFTTrainer, args, dataset.as_hf_dataset(streaming=streaming), folder)
        trainer.train(resume_from_checkpoint=resume or None)
        return weights(trainer.model)

    whole = run(tmp_path / "whole", 4)
    assert not torch.equal(run(tmp_path / "parts", 2), whole)
    torch.testing.assert_close(run(tmp_path / "parts", 4, resume=True), whole)


def test_workers(rollouts: Callable[..., ReplayBuffer], tmp_path: Path) -> None:
    dataset = TorchRLBufferDataset(rollouts("history"), 8, columns="prompt-completion", num_batches=None)
    args = arguments(trl.SFTConfig, tmp_path, dataloader_num_workers=2)
    train(trainer_of(trl.SFTTrainer, args, dataset.as_hf_dataset(), tmp_path))


@pytest.mark.parametrize("unused", [True, False], ids=["removed", "kept"])
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "snapshot"])
def test_gradient_accumulation_and_unused_columns(
    streaming: bool, unused: bool, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    dataset = TorchRLBufferDataset(rollouts("history"), 8, columns="prompt-completion", num_batches=None)
    args = arguments(trl.SFTConfig, tmp_path, gradient_accumulation_steps=2, remove_unused_columns=unused)
    train(trainer_of(trl.SFTTrainer, args, dataset.as_hf_dataset(streaming=streaming), tmp_path))


@needs("streams in GRPO")
@pytest.mark.parametrize("unused", [True, False], ids=["removed", "kept"])
def test_a_group_larger_than_a_replay_batch(
    unused: bool, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    dataset = TorchRLBufferDataset(rollouts("history"), 1, columns=PROMPTS, num_batches=None)
    args = arguments(
        trl.GRPOConfig, tmp_path, per_device_train_batch_size=8, num_generations=8, max_completion_length=4,
        gradient_accumulation_steps=2, remove_unused_columns=unused,
    )  # fmt: skip
    groups: list[list[str]] = []

    def reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        texts = [prompt[0]["content"] for prompt in prompts]
        groups.extend(texts[i : i + 8] for i in range(0, len(texts), 8))
        return [float(i % 3) for i in range(len(prompts))]

    train(trainer_of(trl.GRPOTrainer, args, dataset.as_hf_dataset(), tmp_path, reward_funcs=reward))
    assert len(groups) == 4
    assert all(len(set(group)) == 1 for group in groups)


def test_tools_survive_the_chat_template(tmp_path: Path) -> None:
    """Calls, replies and declarations of tools, from ``History`` to what SFT trains on."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    chat = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]  # fmt: skip
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    for _ in range(4):
        rows = TensorDict({"history": {"full": History.from_chats([chat])}}, [1])
        rows["tools"] = [[tool]]
        replay_buffer.extend(rows)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}"
        "{% for c in m.tool_calls or [] %}:{{ c.function.name }}({{ c.function.arguments.a }},"
        "{{ c.function.arguments.b }}){% endfor %}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    for streaming in (True, False) if has("snapshots with Json in SFT") else (True,):
        dataset = TorchRLBufferDataset(replay_buffer, 4, columns="prompt-completion", num_batches=None)
        trainer = trl.SFTTrainer(
            tiny_causal_lm(tmp_path / "model"), args=arguments(trl.SFTConfig, tmp_path), processing_class=tokenizer,
            train_dataset=dataset.as_hf_dataset(streaming=streaming),
        )  # fmt: skip
        batch = next(iter(trainer.get_train_dataloader()))
        text = tokenizer.decode(batch["input_ids"][0])
        assert text == "<add>[system]be brief[user]1+2?[assistant:add(1,2)][tool]3[assistant]three"
        labels = batch["labels"][0]
        assert tokenizer.decode(labels[labels != -100]) == "three"
        train(trainer)

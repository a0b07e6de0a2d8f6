from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_models import EOS, PAD, VOCAB, Recorder, padded, random_rows, scores_alone, small_model
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn

from torchrl_trl_bridge import HFRewardModelWrapper
from torchrl_trl_bridge.tiny import tiny_reward_model


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def ragged(rows: list[torch.Tensor]) -> TensorDict:
    return lazy_stack(
        [TensorDict({"tokens": {"full": row}, "masks": {"all_attention_mask": torch.ones_like(row)}}) for row in rows]
    )


@pytest.fixture(scope="module")
def gpt2():
    return small_model("gpt2", hidden_size=16, num_hidden_layers=1)


# ---- the module


def test_it_is_a_tensordict_module_around_the_model_itself(gpt2):
    wrapper = HFRewardModelWrapper(gpt2, token_key="ids", attention_mask_key=("m", "k"), reward_key=("next", "reward"))
    assert isinstance(wrapper, TensorDictModuleBase)
    assert wrapper.in_keys == ["ids", ("m", "k")]
    assert wrapper.out_keys == [("next", "reward")]
    assert HFRewardModelWrapper(gpt2, attention_mask_key=None).in_keys == [("tokens", "full")]
    assert wrapper.model is gpt2
    assert [id(p) for p in wrapper.parameters()] == [id(p) for p in gpt2.parameters()]
    assert [module for module in wrapper.modules() if module is gpt2] == [gpt2]
    assert all(name.startswith("model.") for name in wrapper.state_dict())


def test_writes_in_place_and_in_sequence(gpt2):
    batch = padded(random_rows((3, 5)))
    assert HFRewardModelWrapper(gpt2)(batch) is batch
    nested = HFRewardModelWrapper(gpt2, reward_key=("next", "reward"))
    assert TensorDictSequential(nested)(batch)["next", "reward"].shape == (2,)
    close(batch["next", "reward"], batch["reward"])


def test_tensordict_out_leaves_a_locked_input_alone(gpt2):
    batch = padded(random_rows((3, 5))).lock_()
    out = TensorDict(batch_size=[2])
    wrapper = HFRewardModelWrapper(gpt2)
    assert wrapper(batch, tensordict_out=out) is out
    assert out["reward"].shape == (2,)
    assert "reward" not in batch
    with pytest.raises(RuntimeError, match="lock"):
        wrapper(batch)


def test_dispatch_by_keyword(gpt2):
    batch = padded(random_rows((3, 5)))
    wrapper = HFRewardModelWrapper(gpt2)
    ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    expected = wrapper(batch)["reward"]
    close(wrapper(tokens_full=ids, masks_all_attention_mask=mask), expected)
    close(wrapper(ids, mask), expected)
    close(wrapper(tokens_full=ids[1], masks_all_attention_mask=mask[1]), expected[1])
    with pytest.raises(KeyError, match="attention_mask_key"):
        wrapper(tokens_full=ids)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be at least 1"),
        ({"micro_batch_size": True}, TypeError, "micro_batch_size must be an int"),
        ({"max_tokens": -1}, ValueError, "max_tokens"),
        ({"max_length": 2.0}, TypeError, "max_length"),
        ({"pad_token_id": "0"}, TypeError, "pad_token_id"),
        ({"label": "good"}, ValueError, "LABEL_0"),
        ({"label": 1}, ValueError, "LABEL_0"),
        ({"label": True}, TypeError, "label"),
        ({"tokenizer": 1}, TypeError, "tokenizer must be that of the reward model, got 1"),
        ({"tokenizer": "gpt2"}, TypeError, "load it with AutoTokenizer"),
        ({"output": 3}, TypeError, "output must be the name"),
        ({"token_key": 3}, TypeError, "token_key must be a string or a tuple of strings, got 3"),
        ({"reward_key": ()}, TypeError, "reward_key must be a string"),
        ({"attention_mask_key": ["a"]}, TypeError, "attention_mask_key must be a string"),
        ({"chat_template_kwargs": 3, "tokenizer": print}, TypeError, "chat_template_kwargs must be a mapping"),
    ],
)
def test_bad_arguments(gpt2, arguments, error, words):
    with pytest.raises(error, match=words):
        HFRewardModelWrapper(gpt2, **arguments)


def test_bad_model():
    with pytest.raises(TypeError, match="AutoModelForSequenceClassification"):
        HFRewardModelWrapper("some/model")


# ---- rows


def test_ragged_and_nested_and_single_rows(gpt2):
    rows = random_rows((6, 1, 9, 4))
    alone = scores_alone(gpt2, rows)
    wrapper = HFRewardModelWrapper(gpt2, inference_mode=True)
    close(wrapper(ragged(rows))["reward"], alone)
    close(wrapper(ragged(rows[:1])[0])["reward"], alone[0])
    two = lazy_stack([ragged(rows[:2]), ragged(rows[2:])])
    close(wrapper(two)["reward"], alone.reshape(2, 2))
    close(wrapper(padded(rows).reshape(2, 2))["reward"], alone.reshape(2, 2))
    jagged = TensorDict({"tokens": {"full": torch.nested.nested_tensor(rows, layout=torch.jagged)}}, [4])
    close(HFRewardModelWrapper(gpt2, attention_mask_key=None)(jagged)["reward"], alone)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_rows(gpt2, shape):
    batch = TensorDict(
        {"tokens": {"full": torch.ones(*shape, 5).long()}, "masks": {"all_attention_mask": torch.ones(*shape, 5)}},
        shape,
    )
    reward = HFRewardModelWrapper(gpt2)(batch)["reward"]
    assert reward.shape == shape
    assert reward.dtype == torch.float32


@pytest.mark.parametrize("mask", [None, "mask"])
def test_no_ragged_rows(gpt2, mask):
    nothing = torch.nested.nested_tensor_from_jagged(torch.zeros(0).long(), torch.zeros(1).long())
    batch = TensorDict({"ids": nothing, "mask": nothing}, [0])
    reward = HFRewardModelWrapper(gpt2, token_key="ids", attention_mask_key=mask)(batch)["reward"]
    assert reward.shape == (0,)


def test_padding_id_as_end_token():
    model = small_model("llama", pad_token_id=EOS)
    rows = [
        torch.tensor([5, 6, EOS, 7, EOS]),
        torch.tensor([5, EOS, 9]),
        torch.tensor([4, EOS, EOS]),
        torch.tensor([EOS]),
    ]
    for side, fill in itertools.product(("left", "right"), (EOS, PAD)):
        close(HFRewardModelWrapper(model)(padded(rows, side, fill))["reward"], scores_alone(model, rows))


def test_pad_token_id_is_stripped_without_a_mask(gpt2):
    rows = [torch.tensor([5, PAD, 6]), torch.tensor([7, 8, 9, 4])]
    for side in ("left", "right"):
        wrapper = HFRewardModelWrapper(gpt2, attention_mask_key=None, pad_token_id=50)
        close(wrapper(padded(rows, side, fill=50))["reward"], scores_alone(gpt2, rows))


def test_model_without_padding_id():
    model = small_model("gpt2", pad_token_id=None)
    rows = [torch.tensor([5, 6, EOS]), torch.tensor([7, EOS]), torch.tensor([8, 9, 4, 3])]
    alone = scores_alone(model, rows)
    with pytest.raises(ValueError, match=r"row 0 and row 1 .*pad_token_id="):
        HFRewardModelWrapper(model)(padded(rows))
    for pad in (EOS, PAD, 3, 4):  # also where it ends a row, which the model must not take for padding
        close(HFRewardModelWrapper(model, pad_token_id=pad)(padded(rows))["reward"], alone)
        assert model.config.pad_token_id is None
    close(HFRewardModelWrapper(model, micro_batch_size=1)(padded(rows))["reward"], alone)
    close(HFRewardModelWrapper(model)(padded(rows[:1]))["reward"], alone[:1])
    every_end = [torch.tensor([5, i]) for i in range(VOCAB)]
    close(HFRewardModelWrapper(model, pad_token_id=3)(padded(every_end))["reward"], scores_alone(model, every_end))


def test_padding_id_outside_the_vocabulary():
    model = small_model("llama")
    model.config.pad_token_id = -1
    rows = random_rows((3, 5))
    with pytest.raises(ValueError, match="pad_token_id="):
        HFRewardModelWrapper(model)(padded(rows))
    close(HFRewardModelWrapper(model, pad_token_id=0)(padded(rows))["reward"], scores_alone(model, rows))
    assert model.config.pad_token_id == -1


def test_padding_id_in_text_config():
    model = small_model("gemma3")
    model.config.pad_token_id, model.config.text_config.pad_token_id = None, 6
    rows = random_rows((3, 5))
    close(HFRewardModelWrapper(model, inference_mode=True)(padded(rows, fill=9))["reward"], scores_alone(model, rows))


def test_max_length_keeps_the_end_and_only_when_asked(gpt2):
    rows = random_rows((6, 2, 120))
    with pytest.raises(ValueError, match=r"row 2: up to 120 tokens.*96 positions.*max_length=96"):
        HFRewardModelWrapper(gpt2)(padded(rows))
    rewards = HFRewardModelWrapper(gpt2, max_length=4)(padded(rows))["reward"]
    close(rewards, scores_alone(gpt2, [row[-4:] for row in rows]))


def test_unscorable_rows_are_named(gpt2):
    batch = padded(random_rows((3, 4, 2, 2))).reshape(2, 2)
    batch["masks", "all_attention_mask"][1, 0] = False
    with pytest.raises(ValueError, match=r"row \(1, 0\): no token"):
        HFRewardModelWrapper(gpt2)(batch)
    for bad in (VOCAB, -100):
        batch = padded([torch.tensor([3, 4]), torch.tensor([bad, 3])])
        with pytest.raises(ValueError, match=f"row 1: token id {bad} .*vocabulary of {VOCAB}"):
            HFRewardModelWrapper(gpt2)(batch)
    close(  # what is masked may be anything
        HFRewardModelWrapper(gpt2)(padded(random_rows((3, 5)), fill=-100))["reward"],
        scores_alone(gpt2, random_rows((3, 5))),
    )


# ---- gradients and modes


@pytest.mark.parametrize("training", [True, False])
def test_inference_mode_does_not_depend_on_the_train_flag(training):
    model = small_model("bert").train(training)
    model.bert.pooler.train(not training)
    before = [module.training for module in model.modules()]
    rows = random_rows((5, 3))
    wrapper = HFRewardModelWrapper(model, inference_mode=True)
    model.train(training)
    model.bert.pooler.train(not training)
    reward = wrapper(padded(rows))["reward"]
    assert [module.training for module in model.modules()] == before
    close(reward, scores_alone(model, rows))
    assert not reward.is_inference()
    assert not reward.requires_grad
    (reward * torch.ones(2, requires_grad=True)).sum().backward()


def test_gradients_reach_the_model_through_micro_batches():
    model = small_model("gpt2")
    rows = random_rows((5, 3, 8))
    gradients = []
    for arguments in ({}, {"micro_batch_size": 1}):
        model.zero_grad()
        HFRewardModelWrapper(model, **arguments)(padded(rows))["reward"].sum().backward()
        gradients.append(model.score.weight.grad.clone())
    close(*gradients)
    assert gradients[0].abs().sum() > 0


def test_gradients_with_ids_made_under_inference_mode(gpt2):
    with torch.inference_mode():
        batches = [padded(random_rows((5, 3))), ragged(random_rows((5, 3)))]
    for batch in batches:
        out = TensorDict(batch_size=[2])
        reward = HFRewardModelWrapper(gpt2)(batch, tensordict_out=out)["reward"]
        assert reward.requires_grad
        reward.sum().backward()


def test_train_mode_is_left_alone_without_inference_mode():
    recorder = Recorder().train()
    HFRewardModelWrapper(recorder)(padded(random_rows((2,))))
    HFRewardModelWrapper(recorder, inference_mode=True)(padded(random_rows((2,))))
    assert [call["training"] for call in recorder.calls] == [True, False]
    assert recorder.training


# ---- calls of the model


def test_one_call_by_default_in_the_order_given():
    recorder = Recorder()
    rows = random_rows((2, 5, 3))
    HFRewardModelWrapper(recorder)(padded(rows, fill=9))
    (call,) = recorder.calls
    assert call["input_ids"].tolist() == padded(rows, "right", fill=0)["tokens", "full"].tolist()
    assert call["attention_mask"].tolist() == padded(rows, "right")["masks", "all_attention_mask"].long().tolist()
    assert call["attention_mask"].dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "shapes"),
    [
        ({"micro_batch_size": 2}, [(2, 9), (2, 3)]),
        ({"max_tokens": 18}, [(2, 9), (2, 3)]),
        ({"max_tokens": 10}, [(1, 9), (1, 8), (2, 3)]),
        ({"micro_batch_size": 3, "max_tokens": 1000}, [(3, 9), (1, 2)]),
    ],
)
def test_bounds_of_a_call(arguments, shapes):
    recorder = Recorder()
    rows = random_rows((3, 9, 2, 8))
    rewards = HFRewardModelWrapper(recorder, **arguments)(padded(rows))["reward"]
    assert rewards.tolist() == [row.sum() for row in rows]
    assert [tuple(call["input_ids"].shape) for call in recorder.calls] == shapes


def test_row_beyond_max_tokens_is_refused_before_any_call():
    recorder = Recorder()
    with pytest.raises(ValueError, match=r"row 1: .*max_tokens=8"):
        HFRewardModelWrapper(recorder, max_tokens=8)(padded(random_rows((3, 9, 2))))
    assert recorder.calls == []


def test_no_mask_where_there_is_none():
    recorder = Recorder()
    wrapper = HFRewardModelWrapper(recorder, attention_mask_key=None)
    wrapper(padded(random_rows((3, 3))))
    assert recorder.calls[0]["attention_mask"] is None
    wrapper(ragged(random_rows((3, 2))))
    assert recorder.calls[1]["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_model_that_takes_no_mask_sees_rows_of_one_length_together():
    class Mean(nn.Module):
        def forward(self, input_ids):
            return input_ids.float().mean(-1)

    rows = random_rows((4, 2, 4))
    for wrapper in (HFRewardModelWrapper(Mean()), HFRewardModelWrapper(Mean(), attention_mask_key=None)):
        close(wrapper(ragged(rows))["reward"], torch.stack([row.float().mean() for row in rows]))


def test_data_parallel_wrapper_is_looked_through():
    class Parallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    model = small_model("xlnet")  # of all families the one that needs most of its config
    rows = random_rows((4, 7))
    close(HFRewardModelWrapper(Parallel(model), inference_mode=True)(padded(rows))["reward"], scores_alone(model, rows))


def test_a_module_around_a_model_is_padded_as_that_one():
    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask):
            return 2 * self.inner(input_ids=input_ids, attention_mask=attention_mask).logits

    model = small_model("roberta")  # positions and padding follow its padding id
    rows = random_rows((4, 7, 2))
    close(HFRewardModelWrapper(Scaled(model))(padded(rows))["reward"], 2 * scores_alone(model, rows))


def test_memory_follows_the_bound():
    class Peak(nn.Module):
        most = 0

        def forward(self, input_ids, attention_mask):
            self.most = max(self.most, input_ids.numel())
            return input_ids[:, :1]

    model = Peak()
    HFRewardModelWrapper(model, inference_mode=True, max_tokens=64)(ragged(random_rows(tuple(range(2, 60)))))
    assert 32 < model.most <= 64


# ---- outputs


def test_labels():
    names = {0: "toxic", 1: "helpful"}
    model = small_model("bert", num_labels=2, id2label=names, label2id={name: i for i, name in names.items()})
    batch = padded(random_rows((3, 5)))
    mask = batch["masks", "all_attention_mask"].long()
    with pytest.raises(RuntimeError, match="toxic, helpful"):
        HFRewardModelWrapper(model)(batch)
    with pytest.raises(ValueError, match="toxic, helpful"):
        HFRewardModelWrapper(model, label="funny")
    right = padded(random_rows((3, 5)), "right")
    logits = model(right["tokens", "full"], attention_mask=right["masks", "all_attention_mask"].long()).logits
    assert mask.sum() == 8
    close(HFRewardModelWrapper(model, label="helpful")(batch)["reward"], logits[:, 1])
    close(HFRewardModelWrapper(model, label=0)(batch)["reward"], logits[:, 0])


def test_output_by_name_and_callable():
    class Scores(nn.Module):
        def forward(self, input_ids, attention_mask):
            return {"logits": torch.zeros(len(input_ids), 3), "end_scores": input_ids.sum(-1, keepdim=True)}

    batch = padded([torch.tensor([3, 4]), torch.tensor([5])])
    assert HFRewardModelWrapper(Scores(), output="end_scores")(batch)["reward"].tolist() == [7, 5]
    assert HFRewardModelWrapper(Scores(), output=lambda out: -out["end_scores"])(batch)["reward"].tolist() == [-7, -5]


def test_tuples_of_return_dict_false():
    model = small_model("bert", return_dict=False)
    batch = padded(random_rows((3, 5)))
    assert isinstance(model(batch["tokens", "full"]), tuple)
    close(HFRewardModelWrapper(model)(batch)["reward"], scores_alone_of_tuple(model, random_rows((3, 5))))


def scores_alone_of_tuple(model: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([model(row[None])[0][0, 0] for row in rows])


def test_causal_language_model_by_mistake():
    transformers = pytest.importorskip("transformers")
    from reward_models import small_config

    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    with pytest.raises(RuntimeError, match="AutoModelForSequenceClassification"):
        HFRewardModelWrapper(model)(padded(random_rows((3, 5))))


def test_rewards_that_are_not_finite_are_named():
    class Log(nn.Module):
        def forward(self, input_ids, attention_mask):
            return torch.log(input_ids[:, 0] - 5.0)

    batch = padded([torch.tensor([9]), torch.tensor([5]), torch.tensor([8]), torch.tensor([3])])
    with pytest.raises(RuntimeError, match="row 1, row 3: the reward is not finite"):
        HFRewardModelWrapper(Log())(batch)
    with pytest.raises(RuntimeError, match=r"row \(0, 1\), row \(1, 1\)"):
        HFRewardModelWrapper(Log(), micro_batch_size=1)(batch.reshape(2, 2))


# ---- all of it


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_reward_is_that_of_the_row_alone(gpt2, data):
    shape = data.draw(st.sampled_from([(), (1,), (3,), (5,), (2, 2), (2, 1, 3)]), "batch shape")
    count = torch.Size(shape).numel()
    rows = [
        torch.tensor(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), f"row {i}"))
        for i in range(count)
    ]
    if data.draw(st.booleans(), "ragged"):
        batch = ragged(rows)
        batch = batch.reshape(shape) if shape else batch[0]
    else:
        dtype = data.draw(
            st.sampled_from([torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16]), "mask"
        )
        side = data.draw(st.sampled_from(["left", "right"]), "side")
        batch = padded(rows, side, data.draw(st.integers(-100, 2 * VOCAB), "fill"), dtype)
        batch = batch.reshape(shape) if shape else batch[0]
    arguments = {
        "micro_batch_size": data.draw(st.none() | st.integers(1, 4), "micro_batch_size"),
        "max_tokens": data.draw(st.none() | st.integers(12, 40), "max_tokens"),
        "inference_mode": data.draw(st.booleans(), "inference_mode"),
    }
    reward = HFRewardModelWrapper(gpt2, **arguments)(batch)["reward"]
    assert reward.shape == shape
    close(reward.detach(), scores_alone(gpt2, rows).reshape(shape))


def test_rollouts_of_a_collector(collected, tmp_path):
    """Every kind of buffer that TorchRL's collector fills, each row equal to that row alone."""
    model = tiny_reward_model(tmp_path)
    batch = collected[:]
    rewards = HFRewardModelWrapper(model, inference_mode=True, micro_batch_size=5)(batch)["reward"]
    assert rewards.shape == batch.batch_size
    rows = [row["tokens", "full"][row["masks", "all_attention_mask"].bool()] for row in batch.unbind(0)]
    assert len({len(row) for row in rows}) > 3
    close(rewards, scores_alone(model, rows))

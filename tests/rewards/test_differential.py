"""What torchrl's own class scores right, both score the same; where it raises, both raise the same type."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reward_models import Recorder, padded, random_rows, small_model
from tensordict import TensorDict
from torch import nn

from torchrl_trl_bridge import HFRewardModelWrapper

trl_interop = pytest.importorskip("torchrl.modules.llm.trl_interop")
Theirs = trl_interop.HFRewardModelWrapper


def both(model, batch, **arguments):
    return [wrapper(model, **arguments)(batch.clone()) for wrapper in (Theirs, HFRewardModelWrapper)]


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("family", ["bert", "gemma2", "gpt2", "llama", "qwen2", "roberta"])
def test_right_padded_rollouts(family, inference_mode):
    model = small_model(family)
    rows = random_rows((7, 3, 12))
    for mask_dtype in (torch.bool, torch.int64):
        theirs, ours = both(model, padded(rows, "right", mask_dtype=mask_dtype), inference_mode=inference_mode)
        torch.testing.assert_close(ours["reward"], theirs["reward"], atol=1e-6, rtol=1e-6)
        assert ours["reward"].requires_grad == theirs["reward"].requires_grad
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))


@pytest.mark.parametrize("family", ["bloom", "gemma2", "gpt_neox", "llama", "mistral", "qwen3"])
def test_left_padded_rollouts_of_families_with_relative_positions(family):
    theirs, ours = both(small_model(family), padded(random_rows((7, 3, 12))))
    torch.testing.assert_close(ours["reward"], theirs["reward"], atol=1e-5, rtol=1e-5)


def test_full_rows_without_mask_and_with_other_keys():
    model = small_model("bert")
    batch = TensorDict({"a": {"ids": torch.randint(3, 50, (4, 6))}}, [4])
    theirs, ours = both(model, batch, token_key=("a", "ids"), attention_mask_key=None, reward_key=("next", "r"))
    torch.testing.assert_close(ours["next", "r"], theirs["next", "r"])


def test_batch_size_beside_the_tokens():
    batch = padded(random_rows((4, 4)))
    batch.batch_size = []
    theirs, ours = both(small_model("bert"), batch)
    torch.testing.assert_close(ours["reward"], theirs["reward"])


class Returns(nn.Module):
    """A model without config or parameters."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, input_ids, attention_mask=None):
        return self.make(input_ids.float().mean(-1))


OUTPUTS = {
    "logits [B, 1]": lambda x: SimpleNamespace(logits=x[:, None]),
    "logits [B]": lambda x: SimpleNamespace(logits=x),
    "rewards": lambda x: SimpleNamespace(rewards=x),
    "both": lambda x: SimpleNamespace(logits=x, rewards=-x),
    "tensor": lambda x: x,
    "bfloat16": lambda x: x.bfloat16(),
    "double": lambda x: x.double(),
}
BAD_OUTPUTS = {
    "several labels": lambda x: SimpleNamespace(logits=torch.stack([x, x], 1)),
    "language model": lambda x: SimpleNamespace(logits=torch.zeros(len(x), 5, 50)),
    "another batch": lambda x: x[1:],
    "nothing": lambda x: None,
    "another name": lambda x: SimpleNamespace(scores=x),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_outputs(output):
    theirs, ours = both(Returns(OUTPUTS[output]), padded(random_rows((5, 5, 5))))
    assert ours["reward"].dtype == theirs["reward"].dtype == torch.float32
    torch.testing.assert_close(ours["reward"], theirs["reward"])


def raised(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is what is compared
        function()
    return caught.type


@pytest.mark.parametrize("output", BAD_OUTPUTS)
def test_bad_outputs_raise_the_same(output):
    model, batch = Returns(BAD_OUTPUTS[output]), padded(random_rows((5, 5, 5)))
    types = {raised(lambda w=wrapper: w(model)(batch.clone())) for wrapper in (Theirs, HFRewardModelWrapper)}
    assert types == {RuntimeError}


@pytest.mark.parametrize(
    ("arguments", "words"), [({"token_key": "ids"}, "token_key"), ({"attention_mask_key": "m"}, "attention_mask_key")]
)
def test_missing_keys_raise_the_same(arguments, words):
    for wrapper in (Theirs, HFRewardModelWrapper):
        with pytest.raises(KeyError, match=f"{words} .* not found in the input TensorDict"):
            wrapper(Recorder(), **arguments)(padded(random_rows((3,))))


def test_several_rows_without_padding_id_raise_the_same():
    model = small_model("gpt2", pad_token_id=None)
    batch = padded(random_rows((4, 4)))
    assert {raised(lambda w=wrapper: w(model)(batch)) for wrapper in (Theirs, HFRewardModelWrapper)} == {ValueError}


def test_signature_begins_with_theirs():
    import inspect

    theirs = inspect.signature(Theirs.__init__).parameters
    ours = inspect.signature(HFRewardModelWrapper.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


def test_weights_that_theirs_saved_load():
    theirs = Theirs(small_model("bert", seed=1))
    ours = HFRewardModelWrapper(small_model("bert", seed=2))
    holder = nn.ModuleDict({"reward": ours})
    holder.load_state_dict({f"reward.{name}": weight for name, weight in theirs.state_dict().items()})
    for name, weight in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], weight)
    assert set(holder.state_dict()) == {f"reward.model.{name}" for name in theirs.model.state_dict()}

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from torchrl_trl_bridge.rewards.outputs import read_rewards

SCORES = torch.tensor([[1.0], [2.0], [3.0]])
FLAT = SCORES[:, 0]
TWO = torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]])
Named = namedtuple("Named", ["loss", "logits"])


@pytest.mark.parametrize("scores", [SCORES, FLAT, SCORES.bfloat16(), SCORES.double(), SCORES.long()])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda scores: scores,
        lambda scores: SimpleNamespace(logits=scores),
        lambda scores: SimpleNamespace(rewards=scores),
        lambda scores: SimpleNamespace(logits=None, rewards=scores),
        lambda scores: {"logits": scores},
        lambda scores: {"rewards": scores},
        lambda scores: (scores, "hidden states"),
        lambda scores: Named(None, scores),
    ],
)
def test_usual_outputs(wrap, scores):
    rewards = read_rewards(wrap(scores), 3)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [1.0, 2.0, 3.0]


def test_model_output():
    modeling_outputs = pytest.importorskip("transformers.modeling_outputs")
    assert read_rewards(modeling_outputs.SequenceClassifierOutput(logits=SCORES), 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "output", [SimpleNamespace(logits=TWO, end_scores=SCORES), {"logits": TWO, "end_scores": FLAT}]
)
def test_named_output(output):
    assert read_rewards(output, 3, select="end_scores").tolist() == [1, 2, 3]


def test_callable_output():
    per_token = torch.arange(6.0).reshape(3, 2, 1)
    assert read_rewards({"values": per_token}, 3, select=lambda out: out["values"][:, -1]).tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    "output", [SimpleNamespace(scores=FLAT), {"scores": FLAT}, (), None, SimpleNamespace(logits=1.0)]
)
def test_nothing_to_read(output):
    with pytest.raises(RuntimeError, match=r"could not extract reward.*output="):
        read_rewards(output, 3)


def test_nothing_to_read_names_what_there_is():
    with pytest.raises(RuntimeError, match="attributes 'scores'"):
        read_rewards(SimpleNamespace(scores=FLAT), 3)
    with pytest.raises(RuntimeError, match="keys 'scores'"):
        read_rewards({"scores": FLAT}, 3, select="score")


def test_language_model_by_mistake():
    with pytest.raises(RuntimeError, match=r"\(3, 7, 50\).*AutoModelForSequenceClassification"):
        read_rewards(SimpleNamespace(logits=torch.zeros(3, 7, 50)), 3)


def test_label_picks_a_column():
    assert read_rewards(TWO, 3, label=1).tolist() == [4, 5, 6]
    assert read_rewards(SCORES, 3, label=0).tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match=r"label=2 .*2 columns"):
        read_rewards(TWO, 3, label=2)
    with pytest.raises(RuntimeError, match="drop label="):
        read_rewards(FLAT, 3, label=0)


def test_several_labels_without_a_choice():
    with pytest.raises(RuntimeError, match=r"labels bad, good.*label="):
        read_rewards(TWO, 3, labels=["bad", "good"])
    with pytest.raises(RuntimeError, match=r"labels 0, 1\."):
        read_rewards(TWO, 3, labels=["of", "another", "head"])


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 3), (3, 1, 1, 1), ()])
def test_other_shapes(shape):
    with pytest.raises(RuntimeError, match="expected one scalar reward per row"):
        read_rewards(torch.zeros(shape), 3)

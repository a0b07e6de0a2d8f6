"""The reward of a row equals that row scored alone, unpadded, for each family of sequence classifiers."""

from __future__ import annotations

import pytest
import torch
from reward_models import EOS, padded, random_rows, scores_alone, small_model

from torchrl_trl_bridge import HFRewardModelWrapper
from torchrl_trl_bridge.compat import transformers as hf

FAMILIES = [
    *("albert", "arcee", "bart", "bert", "big_bird", "biogpt", "bloom", "camembert", "canine", "convbert", "ctrl"),
    *("deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "falcon", "flaubert", "fnet", "funnel"),
    *("gemma", "gemma2", "gemma3", "glm", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "helium", "ibert"),
    *(
        "llama",
        "longformer",
        "mbart",
        "megatron-bert",
        "mistral",
        "mixtral",
        "mobilebert",
        "modernbert",
        "mpnet",
        "mpt",
    ),
    *("mt5", "nemotron", "nystromformer", "olmo", "olmo2", "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "rembert", "roberta", "roformer", "squeezebert", "stablelm", "starcoder2", "t5", "umt5"),
    *("xlm", "xlm-roberta", "xlnet", "yoso"),
]
LENGTHS = (6, 4, 40, 17, 4, 11)


@pytest.mark.parametrize("family", FAMILIES)
def test_reward_is_that_of_the_row_alone(family):
    if family not in pytest.importorskip("transformers").CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    try:
        model = small_model(family)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        pytest.skip(f"this transformers has no sequence classifier of {family}")
    rows = random_rows(LENGTHS)
    alone = scores_alone(model, rows)
    assert alone.std() > 1e-3, "the rows must differ for the comparison to mean anything"
    model.train()
    for side, settings in (
        ("left", {}),
        ("right", {}),
        ("left", {"micro_batch_size": 2}),
        ("right", {"max_tokens": 45}),
    ):
        rewards = HFRewardModelWrapper(model, inference_mode=True, **settings)(padded(rows, side, fill=7))["reward"]
        torch.testing.assert_close(rewards, alone, atol=1e-5, rtol=1e-5)

    if family == "fnet":  # torch has no Fourier transform in bfloat16
        return
    model.to(torch.bfloat16)
    try:
        alone = scores_alone(model, rows)
    except RuntimeError as error:
        pytest.skip(f"{family} of this transformers does not run in bfloat16: {error}")
    rewards = HFRewardModelWrapper(model, inference_mode=True)(padded(rows, fill=7))["reward"]
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, alone, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("family", ["bert", "gemma2", "gpt2", "llama", "opt", "qwen2", "roberta", "roformer"])
def test_scoring_under_inference_mode_leaves_the_model_trainable(family):
    model = small_model(family)
    batch = padded(random_rows((9, 4)))
    HFRewardModelWrapper(model, inference_mode=True)(batch)
    HFRewardModelWrapper(model)(batch)["reward"].sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "positions"),
    [
        *(("bert", 96), ("canine", 96), ("ctrl", 96), ("gpt2", 96), ("gpt_neo", 96), ("gptj", 96), ("mpt", 96)),
        *(("nystromformer", 96), ("openai-gpt", 96), ("opt", 96), ("roberta", 95), ("xlm", 96)),
        *(("bloom", None), ("deberta-v2", None), ("gemma3", None), ("llama", None), ("t5", None)),
    ],
)
def test_positions_are_those_that_the_model_has(family, positions):
    model = small_model(family, **({"position_biased_input": False} if family == "deberta-v2" else {}))
    assert hf.positions_of(model) == positions
    row = torch.full((200,), EOS)
    scores_alone(model, [row[:positions]])  # that many are accepted
    if positions is not None:
        with pytest.raises((IndexError, RuntimeError)):
            scores_alone(model, [row[: positions + 1]])
        with pytest.raises(ValueError, match=rf"row 1: up to {positions + 1} tokens.*max_length={positions}"):
            HFRewardModelWrapper(model)(padded(random_rows((3, positions + 1))))


@pytest.mark.parametrize("family", ["bloom", "gemma3", "gpt2", "llama", "t5", "xlnet"])
def test_no_cache_is_built(family):
    outputs = []
    model = small_model(family)
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    HFRewardModelWrapper(model, inference_mode=True)(padded(random_rows((5, 5))))
    caches = [getattr(outputs[0], name, None) for name in ("past_key_values", "cache", "mems")]
    assert caches == [None] * 3


def test_rows_of_an_encoder_decoder_may_differ_in_end_tokens():
    model = small_model("bart")
    rows = [torch.tensor([5, 2]), torch.tensor([5, 2, 6, 2]), torch.tensor([7, 8, 9, 2])]
    rewards = HFRewardModelWrapper(model, inference_mode=True)(padded(rows))["reward"]
    torch.testing.assert_close(rewards, scores_alone(model, rows), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"row 1: .*end token \(id 2\)"):
        HFRewardModelWrapper(model)(padded([*rows[:1], torch.tensor([5, 6])]))

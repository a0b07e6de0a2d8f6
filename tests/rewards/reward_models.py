"""Small reward models of many families, made on the spot, and batches to score with them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

PAD, BOS, EOS, VOCAB = 0, 1, 2, 60

# What makes a model small, under the names that the families use for it.
_SMALL = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("intermediate_size", "d_ff", "d_inner", "hidden_dim", "dff", "n_inner", "ffn_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("head_dim", "d_head", "d_kv"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    "sliding_window": 8,
    "type_vocab_size": 2,
    "vocab_size": VOCAB,
}
_TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}

# What a family needs beyond that.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "funnel": {"block_sizes": [1, 1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "longformer": {"attention_window": [4, 4]},
    "mt5": {"decoder_start_token_id": PAD},
    "t5": {"decoder_start_token_id": PAD},
    "umt5": {"decoder_start_token_id": PAD},
}


def small_config(model_type: str, **overrides: Any) -> Any:
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    settings = {**_fitting(config_class()), **_TOKENS, "num_labels": 1, **_OVERRIDES.get(model_type, {})}
    if model_type == "gemma3":  # the text model's own part; the vision tower is never called, but built
        default = config_class()
        settings["text_config"] = {**_fitting(default.text_config), **_TOKENS}
        settings["vision_config"] = {**_fitting(default.vision_config), "image_size": 28, "patch_size": 14}
    return config_class(**{**settings, **overrides})


def _fitting(default: Any) -> dict[str, Any]:
    def settable(name: str) -> bool:
        own = inspect.getattr_static(type(default), name, None)
        return hasattr(default, name) and not isinstance(own, property)

    return {name: value for name, value in _SMALL.items() if settable(name)}


def small_model(model_type: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random model in eval mode, with weights large enough for its attention and positions to matter."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(small_config(model_type, **overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.std() < 0.05:
                parameter.mul_(5)
    return model.eval()


def random_rows(lengths: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Rows that end with the end token, one of them with a padding id inside that counts."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]
    longest = max(rows, key=len)
    longest[len(longest) // 2] = PAD
    for row in rows:
        row[-1] = EOS
    return rows


def padded(
    rows: list[torch.Tensor], side: str = "left", fill: int = PAD, mask_dtype: torch.dtype = torch.bool
) -> TensorDict:
    """Rollouts as TorchRL pads them."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=mask_dtype)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    return TensorDict({"tokens": {"full": ids}, "masks": {"all_attention_mask": mask}}, [len(rows)])


def _mask_of(model: nn.Module, length: int) -> dict[str, torch.Tensor]:
    if "attention_mask" not in inspect.signature(model.forward).parameters:  # FNet before transformers 5
        return {}
    return {"attention_mask": torch.ones(1, length, dtype=torch.long)}


def scores_alone(model: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """The reference: each row in a call of its own, unpadded, in eval mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        scores = [model(input_ids=row[None], **_mask_of(model, len(row))).logits[0, 0] for row in rows]
    model.train(was_training)
    return torch.stack(scores).float()


class Recorder(nn.Module):
    """A reward model without config that sums the ids of a row, and keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls: list[dict[str, Any]] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        self.calls.append({"input_ids": input_ids, "attention_mask": attention_mask, "training": self.training})
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.weight * (input_ids * mask).sum(-1, keepdim=True)

"""Small models and a tokenizer, made on the spot without a download: for the demo, the examples and the tests."""

from __future__ import annotations

import os
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

_SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]

# ChatML. The generation markers tell TorchRL and TRL which tokens are the assistant's; TorchRL up to 0.12 takes no
# template without just these, and then one of its own.
_CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}{% generation %}
        {{- message['content'] + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A ChatML tokenizer with one token per byte, so that every text survives encoding and decoding.

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.decode(tokenizer.encode("naïve 2 + 2"))
    'naïve 2 + 2'
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(_SPECIAL_TOKENS + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 would add token types, which Llama refuses
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def tiny_causal_lm(
    folder: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    seed: int = 0,
    **config: Any,
) -> LlamaForCausalLM:
    """An untrained Llama of about 40,000 parameters that continues text.

    Args:
        folder: where the model and its tokenizer are saved and loaded from, since some trainers read the path that a
            model came from. In a run of several processes transformers saves on rank 0 only: make it before they start.
        tokenizer: gives the vocabulary; :func:`tiny_tokenizer` by default.
        seed: of the random weights. The global generator is left as it was.
        config: changes to the :class:`transformers.LlamaConfig`, such as ``hidden_size=64``.
    """
    return _make(LlamaForCausalLM, folder, tokenizer, seed, config)


def tiny_reward_model(
    folder: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    seed: int = 0,
    **config: Any,
) -> LlamaForSequenceClassification:
    """An untrained Llama that gives one score to a sequence. Arguments as in :func:`tiny_causal_lm`."""
    return _make(LlamaForSequenceClassification, folder, tokenizer, seed, {"num_labels": 1, **config})


def _make(
    model_class: Any,
    folder: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerFast | None,
    seed: int,
    config: dict[str, Any],
) -> Any:
    tokenizer = tokenizer or tiny_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(LlamaConfig(**settings | config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model_class.from_pretrained(folder)

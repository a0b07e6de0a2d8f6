"""What a Hugging Face reward model says of itself: padding id, vocabulary, positions, labels, and its family's habits.

Everything is read from the model at hand: nothing here imports ``transformers``, and a plain module without ``config``
gets an answer too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Families (`config.model_type`) whose score of a row moves with the padding beside it, mask or not: they mix, pool or
# approximate over the whole width, change the kind of attention with it, or read the score at a position that padding
# shifts. Found with transformers 5.24 by comparing with the row alone; the BigBirds, MRA and T5Gemma by reading how
# they attend or pool. Their rows are scored in batches of one length, without padding.
_SCORE_DEPENDS_ON_PADDING = frozenset(
    {
        *("big_bird", "bigbird_pegasus", "canine", "convbert", "fnet", "funnel", "mra", "nystromformer", "reformer"),
        *("t5gemma", "t5gemma2", "xlnet", "yoso"),
    }
)

# Encoder-decoders that read the score at the last end token, and refuse a batch whose rows differ in how many they have
# (seen in transformers 5.24).
_SCORED_AT_END_TOKEN = frozenset({"bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "t5", "umt5"})

# What the families call an embedding of absolute positions. The position table of a vision tower has other names.
_POSITION_TABLES = frozenset({"embed_positions", "position_embeddings", "positions_embed", "wpe"})

# Families with a bound on positions that no embedding module shows, and the config's name for it.
_POSITIONS_IN_CONFIG = {
    "canine": "max_position_embeddings",
    "ctrl": "n_positions",
    "gptj": "n_positions",
    "mpt": "max_seq_len",
    "reformer": "max_position_embeddings",
}


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside a data-parallel or adapter wrapper, whose signature and config are the ones that count."""
    if isinstance(getattr(model, "module", None), nn.Module) and not hasattr(model, "config"):
        return inner_model(model.module)  # type: ignore[arg-type]
    unwrap = getattr(model, "get_base_model", None)  # peft
    return unwrap() if callable(unwrap) else model


def saved_as(model: nn.Module) -> str:
    """The path or hub id that a model was loaded from, "" if it was not (private, transformers 4.56 to 5.24)."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")


def _own_config(model: nn.Module) -> Any:
    return getattr(inner_model(model), "config", None)


def config_of(model: nn.Module) -> Any:
    """The model's config; of a module of the user's own that holds a Hugging Face model, that one's; or None."""
    config = _own_config(model)
    if config is not None:
        return config
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if hasattr(config, "model_type")), None)


def text_config_of(model: nn.Module) -> Any:
    """The part of the config that describes the text model (Gemma 3 keeps its padding id there), or None."""
    config = config_of(model)
    return getattr(config, "text_config", None) or config


def no_cache_arguments(model: nn.Module) -> dict[str, bool]:
    """The arguments that keep the model from building a key/value cache, which scoring has no use for."""
    parameters = inspect.signature(inner_model(model).forward).parameters
    names = [name for name in ("use_cache", "use_mems") if name in parameters]
    if not names and _takes_any(parameters):
        # A model of several modalities hands the argument on to its text model.
        text_config = getattr(_own_config(model), "text_config", None)
        names = ["use_cache"] if getattr(text_config, "use_cache", False) else []
    return dict.fromkeys(names, False)


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def takes_mask(model: nn.Module) -> bool:
    """Whether the model's ``forward`` can be given an ``attention_mask``."""
    parameters = inspect.signature(inner_model(model).forward).parameters
    return "attention_mask" in parameters or _takes_any(parameters)


def vocab_size_of(model: nn.Module) -> int | None:
    """How many ids the model knows, or None where it does not say."""
    return _integer(getattr(text_config_of(model), "vocab_size", None))


def padding_id_of(model: nn.Module) -> int | None:
    """The id by which the model tells padding, or None. An id outside the vocabulary (-1 in some configs) is none."""
    pad = _integer(getattr(text_config_of(model), "pad_token_id", None))
    return pad if pad is not None and knows_id(model, pad) else None


def names_unknown_padding_id(model: nn.Module) -> bool:
    """Whether the config names a padding id outside the vocabulary: the model would take padding for text."""
    return padding_id_of(model) is None and getattr(text_config_of(model), "pad_token_id", None) is not None


def knows_id(model: nn.Module, token_id: int) -> bool:
    """Whether a token id is in the model's vocabulary, as far as the model says."""
    vocab_size = vocab_size_of(model)
    return token_id >= 0 and (vocab_size is None or token_id < vocab_size)


@contextmanager
def lent_padding_id(model: nn.Module, pad_token_id: int) -> Iterator[None]:
    """Lets a model take an id for padding that its config does not name, for the length of a call."""
    config = text_config_of(model)
    if not hasattr(config, "pad_token_id"):
        yield
        return
    own = config.pad_token_id
    config.pad_token_id = pad_token_id
    try:
        yield
    finally:
        config.pad_token_id = own


def device_of(model: nn.Module) -> torch.device | None:
    """The device that the model's inputs belong on, or None for a model without parameters.

    Weights that accelerate (1.x) keep elsewhere until they are used are on the meta device; its hook says where the
    model runs.
    """
    parameter = next(model.parameters(), None)
    hook = getattr(inner_model(model), "_hf_hook", None)
    if parameter is not None and parameter.device.type == "meta" and hook is not None:
        return torch.device(getattr(hook, "execution_device", None) or "cpu")
    return None if parameter is None else parameter.device


def positions_of(model: nn.Module) -> int | None:
    """The longest row that the model has position embeddings for, or None where it is not bounded by a table.

    Rotary and relative positions reach beyond ``max_position_embeddings``; a table ends.
    """
    config = config_of(model)
    bound = _integer(getattr(config, _POSITIONS_IN_CONFIG.get(getattr(config, "model_type", ""), ""), None))
    named = [module for name, module in model.named_modules() if name.rpartition(".")[2] in _POSITION_TABLES]
    tables = [size for module in named if (size := _table_size(module)) is not None]
    if tables:  # some families make the table larger than the number of positions that they accept
        tables += [n for n in [_integer(getattr(config, "max_position_embeddings", None))] if n is not None]
    return min(tables, default=bound)


def _table_size(table: nn.Module) -> int | None:
    weight = getattr(table, "weight", None)
    if weight is None or weight.ndim != 2:
        return None
    # RoBERTa's positions start after the padding id, those of BART and OPT after an offset.
    padding = _integer(getattr(table, "padding_idx", None))
    offset = _integer(getattr(table, "offset", None)) or 0
    return int(weight.shape[0]) - offset - (0 if padding is None else padding + 1)


def end_token_of(model: nn.Module) -> int | None:
    """The end token at which the model reads its score, or None for a model that reads it elsewhere."""
    config = config_of(model)
    if getattr(config, "model_type", None) not in _SCORED_AT_END_TOKEN:
        return None
    return _integer(getattr(config, "eos_token_id", None))


def score_depends_on_padding(model: nn.Module) -> bool:
    """Whether padding beside a row changes its score although it is masked."""
    return getattr(config_of(model), "model_type", None) in _SCORE_DEPENDS_ON_PADDING


def labels_of(model: nn.Module) -> list[str] | None:
    """The names of the columns of the model's scores, or None."""
    names = getattr(config_of(model), "id2label", None)
    return [str(names[i]) for i in sorted(names)] if names else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

"""`HFRewardModelWrapper`: a Hugging Face reward model scores TorchRL rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from tensordict.utils import NestedKey
from torch import nn

from torchrl_trl_bridge.arguments import is_integer
from torchrl_trl_bridge.compat import transformers as hf
from torchrl_trl_bridge.rewards.checks import padding_differences
from torchrl_trl_bridge.rewards.contexts import scoring
from torchrl_trl_bridge.rewards.inputs import (
    TokenRows,
    check_rows,
    count_per_row,
    keep_last,
    pad_right,
    plan_micro_batches,
    read_rows,
)
from torchrl_trl_bridge.rewards.outputs import Output, read_rewards, read_token_rewards
from torchrl_trl_bridge.rewards.text import InputKey, Text, TextReader, keys_of, read_texts
from torchrl_trl_bridge.rewards.tokens import mask_key_of, rewarded, write_per_token

if TYPE_CHECKING:
    from torchrl.envs import Transform

__all__ = ["HFRewardModelWrapper"]


class HFRewardModelWrapper(TensorDictModuleBase):  # type: ignore[misc]  # tensordict is untyped
    """Scores rollouts with a Hugging Face reward model.

    The reward of a row is what the model gives for that row alone, without padding, whatever rows stand beside it and
    however the batch is padded: masked ids are taken out, and the rows are padded anew, on the right, with the
    model's own padding id.

    Args:
        model: a sequence classifier, such as ``AutoModelForSequenceClassification`` loads, or any module that takes
            ``input_ids`` and ``attention_mask`` (int64, ``[rows, tokens]``) and returns one score per row. It becomes a
            submodule: no copy is made.

    Keyword Args:
        token_key: where the token ids are: integers ``[*batch, tokens]``, left- or right-padded, ragged rows of a lazy
            stack, or a jagged nested tensor.
        attention_mask_key: where the mask of the same shape is: boolean, integer or float, 1 where an id counts. None:
            there is no mask and every id counts.
        reward_key: where the rewards go.
        inference_mode: True calls the model under :func:`torch.inference_mode` and in eval mode, and gives each
            submodule its train/eval flag back. The rewards are ordinary tensors. False lets gradients reach the model
            and leaves the flags alone; the graph of every micro-batch then stays in memory until the rewards are
            freed, so that micro-batches save time on padding but no peak memory. Rewards that go into a buffer want
            True, or :meth:`as_transform`.
        tokenizer: of the reward model. The text of a rollout is scored in place of its token ids, which are the
            policy's: a conversation through the tokenizer's chat template, a string as it is, without special tokens
            of its own, as TRL does for reward models. The model takes the tokenizer's padding id for its own.
        input_key: with a tokenizer, where that text is: ``("history", "full")`` by default. It holds a ``History``,
            lists of messages, or strings; a list of keys names parts that are joined, such as
            ``[("text", "prompt"), ("text", "response")]``. (Where TorchRL 0.14 pads rollouts with ``History``, their
            text has the padding written out: score the ``History``.)
        chat_template_kwargs: passed to the chat template, such as ``{"tools": [...]}``.
        per_token: True for a model that scores each token, such as ``AutoModelForTokenClassification`` loads: a
            process reward model. ``reward_key`` then holds ``[*batch, tokens]``, in the layout of the token ids (ragged
            where these are ragged, or where text is scored, whose tokens are the model's own), 0 where there is no
            reward.
        reward_mask_key: with ``per_token``, where the mask of the rewards goes: boolean, of their shape. By default
            beside them, with ``_mask`` appended to the name.
        step_token_id: with ``per_token``, only the scores of tokens with this id are rewards: those that end a step.
        micro_batch_size: most rows that one call of the model sees. Rows of similar lengths go together.
        max_tokens: most tokens, padding included, that one call of the model sees.
        pad_token_id: the padding id for a model whose config has none. Without a mask key it is also stripped from both
            ends of each row.
        max_length: score only the last ``max_length`` tokens of each row: the truncation is on the left, whatever the
            tokenizer's ``truncation_side``. None: a row that is too long is an error. Too long is what a table of
            positions ends before (GPT-2, BERT); rotary and relative positions (Llama, T5) go on, beyond
            ``max_position_embeddings`` too: bound those with ``max_length`` where the model was not trained for it.
        label: the column that is the reward, of a model that scores several labels: its index, or its name in
            ``config.id2label``.
        output: where the rewards are in the model's output: a name, such as ``"score"`` or ``"end_scores"``, or a
            callable that takes the output and returns them as ``[rows]`` or ``[rows, 1]`` (``[rows, tokens]`` with
            ``per_token``). By default ``logits``, else ``rewards``, else the first element of a tuple or the output
            itself.

    Raises:
        TypeError: if ``model`` is not a module, or an argument has the wrong type.
        ValueError: if an argument is out of range or lacks its partner, or the tokenizer is larger than the model.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import LlamaConfig, LlamaForSequenceClassification
        >>> model = LlamaForSequenceClassification(LlamaConfig(
        ...     vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     num_labels=1, pad_token_id=0,
        ... ))
        >>> score = HFRewardModelWrapper(model, inference_mode=True)
        >>> rollouts = TensorDict({
        ...     "tokens": {"full": torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])},
        ...     "masks": {"all_attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])},
        ... }, batch_size=[2])
        >>> score(rollouts)["reward"].shape
        torch.Size([2])
        >>> alone = TensorDict({
        ...     "tokens": {"full": torch.tensor([5, 6])},
        ...     "masks": {"all_attention_mask": torch.tensor([True, True])},
        ... })
        >>> torch.allclose(score(alone)["reward"], rollouts["reward"][0], atol=1e-5)
        True

    Several models or heads are composed, each under a key of its own:

        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> ensemble = TensorDictSequential(
        ...     HFRewardModelWrapper(model, inference_mode=True, reward_key="first"),
        ...     HFRewardModelWrapper(model, inference_mode=True, reward_key="second"),
        ...     TensorDictModule(
        ...         lambda a, b: (torch.minimum(a, b), torch.stack([a, b]).std(0)),
        ...         in_keys=["first", "second"], out_keys=["reward", "disagreement"],
        ...     ),
        ... )
        >>> ensemble(rollouts)["disagreement"]
        tensor([0., 0.])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        token_key: NestedKey = ("tokens", "full"),
        attention_mask_key: NestedKey | None = ("masks", "all_attention_mask"),
        reward_key: NestedKey = "reward",
        inference_mode: bool = False,
        tokenizer: Any = None,
        input_key: InputKey | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        per_token: bool = False,
        reward_mask_key: NestedKey | None = None,
        step_token_id: int | None = None,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
        pad_token_id: int | None = None,
        max_length: int | None = None,
        label: int | str | None = None,
        output: Output | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. Load one with "
                "AutoModelForSequenceClassification.from_pretrained(...)."
            )
        _check_key("token_key", token_key)
        _check_key("reward_key", reward_key)
        _check_key("attention_mask_key", attention_mask_key, optional=True)
        _check_key("reward_mask_key", reward_mask_key, optional=True)
        if tokenizer is not None and not callable(tokenizer):
            raise TypeError(
                f"tokenizer must be that of the reward model, got {tokenizer!r}: load it with AutoTokenizer."
            )
        if not isinstance(chat_template_kwargs, (Mapping, NoneType)):
            raise TypeError(f"chat_template_kwargs must be a mapping, got {chat_template_kwargs!r}.")
        if not (output is None or isinstance(output, str) or callable(output)):
            raise TypeError(f"output must be the name of the rewards in the output, or a callable, got {output!r}.")
        super().__init__()
        self.model = model
        self.register_load_state_dict_pre_hook(_take_names_of_torchrl)
        for name, given, partner, has_partner in (
            ("input_key", input_key, "tokenizer=", tokenizer is not None),
            ("chat_template_kwargs", chat_template_kwargs, "tokenizer=", tokenizer is not None),
            ("reward_mask_key", reward_mask_key, "per_token=True", per_token),
            ("step_token_id", step_token_id, "per_token=True", per_token),
        ):
            if given is not None and not has_partner:
                raise ValueError(f"{name}= has a meaning only with {partner}.")
        self._text = None if tokenizer is None else TextReader(tokenizer, chat_template_kwargs, hf.vocab_size_of(model))
        self._input_keys = keys_of(("history", "full") if input_key is None else input_key)
        self._reward_mask_key = None
        if self._text is not None:
            self.in_keys = self._input_keys
        else:
            self.in_keys = [token_key] if attention_mask_key is None else [token_key, attention_mask_key]
        self.out_keys = [reward_key]
        if per_token:
            self._reward_mask_key = mask_key_of(reward_key) if reward_mask_key is None else reward_mask_key
            self.out_keys = [reward_key, self._reward_mask_key]
        self.per_token = per_token
        self.step_token_id = _at_least("step_token_id", step_token_id, 0)
        self.inference_mode = inference_mode
        self.micro_batch_size = _at_least("micro_batch_size", micro_batch_size, 1)
        self.max_tokens = _at_least("max_tokens", max_tokens, 1)
        self.max_length = _at_least("max_length", max_length, 1)
        self.pad_token_id = _at_least("pad_token_id", pad_token_id, None)
        self.label = _label_index(label, hf.labels_of(model))
        self.output = output
        self._token_key = token_key
        self._attention_mask_key = attention_mask_key
        self._reward_key = reward_key

    @dispatch(auto_batch_size=False)  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None) -> TensorDictBase:
        """Writes the reward of each row.

        Args:
            tensordict: the rollouts, of any batch size.
            tensordict_out: where the rewards are written; ``tensordict`` itself by default.

        Returns:
            The tensordict with the rewards: float32, of the shape of the token ids without their last dimension (or
            of the batch, for text), on the device of the token ids. No rows give no rewards.

        Raises:
            KeyError: if the token ids, the mask or the text are not there.
            TypeError: if the token ids are not integers, or the text is something else.
            ValueError: if the model cannot score a row: it is empty, too long, has ids outside the vocabulary, or
                ids and mask differ in shape. Also if the model needs a padding id and has none, or the tokenizer needs
                a chat template and has none.
            RuntimeError: if the model's output does not hold one finite reward per row.
        """
        rows = self._read(tensordict)
        rewards = self._score(rows)
        target = tensordict if tensordict_out is None else tensordict_out
        if not self.per_token:
            target.set(self._reward_key, rewards.reshape(rows.shape))
            return target
        counts = rewarded(rows, self.step_token_id)
        write_per_token(target, self._reward_key, rewards * counts, rows)
        write_per_token(target, self._reward_mask_key, counts, rows)
        return target

    def score_texts(self, texts: Sequence[Text]) -> torch.Tensor:
        """The rewards of texts that are in no rollout.

        Args:
            texts: strings, or conversations in Hugging Face messages.

        Returns:
            float32 ``[len(texts)]``.

        Raises:
            TypeError: if ``texts`` is one text.
            ValueError: if the wrapper has no tokenizer, or the model cannot score a text.
        """
        if self._text is None or self.per_token:
            raise ValueError("score_texts needs a wrapper made with tokenizer=, and without per_token=True.")
        if isinstance(texts, (str, Mapping)) or (len(texts) and isinstance(texts[0], Mapping)):
            one = "a conversation" if not isinstance(texts, str) else "a string"
            raise TypeError(f"texts is a list of texts, and this is {one}: write score_texts([text]).")
        return self._score(self._cut(self._text.encode(texts, torch.Size([len(texts)]))))

    def padding_differences(self, tensordict: TensorDictBase) -> dict[str, float]:
        """Checks on your own model that the score of a row does not depend on what stands beside it.

        Args:
            tensordict: a few rollouts of different lengths.

        Returns:
            The largest absolute difference to the scores of each row alone, of the rows as they are (``"batched"``),
            ``"left_padded"`` and ``"right_padded"``. Rounding makes about 1e-6 in float32, and 1e-2 in half precision;
            more comes from dropout (put the model into eval mode, or pass ``inference_mode=True``) or from a family
            whose score depends on padding although it is masked (pass ``micro_batch_size=1``, and please report the
            family).

        Raises:
            ValueError: as for scoring.

        Examples:
            >>> from torchrl_trl_bridge.tiny import tiny_reward_model, tiny_tokenizer
            >>> import tempfile
            >>> from tensordict import TensorDict
            >>> model = tiny_reward_model(tempfile.mkdtemp())
            >>> score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key="text", inference_mode=True)
            >>> differences = score.padding_differences(TensorDict({"text": ["short", "a longer text"]}, [2]))
            >>> max(differences.values()) < 1e-5
            True
        """
        with torch.no_grad():
            return padding_differences(self._score, self._read(tensordict))

    def as_transform(self, *, reward_key: NestedKey = "reward") -> Transform:
        """The wrapper as a TorchRL transform, which writes the rewards of rollouts under ``"next"``.

        Append it to a ``ChatEnv``, pass it to a collector as ``postproc``, or append it to a replay buffer: with
        ``invert=True`` it scores each row once, when it is added, else each time that it is sampled. (On the way into a
        buffer TorchRL runs the transforms from the last to the first: append ``MCAdvantage`` before it.)

        Args:
            reward_key: where the reward goes, in the next tensordict: float32 ``[*batch, 1, 1]``, or in the shape and
                dtype of the reward that an environment has there already. It carries no graph, and the model is in eval
                mode, whatever ``inference_mode``.

        Raises:
            ValueError: if the wrapper gives process rewards.

        Examples:
            >>> from torchrl_trl_bridge.tiny import tiny_reward_model, tiny_tokenizer
            >>> import tempfile
            >>> from tensordict import TensorDict
            >>> model = tiny_reward_model(tempfile.mkdtemp())
            >>> score = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer(), input_key=("text", "full"))
            >>> rollouts = TensorDict({"text": {"full": ["2 + 2 = 4", "2 + 2 = 5"]}}, [2])
            >>> score.as_transform()(rollouts)["next", "reward"].shape
            torch.Size([2, 1, 1])
        """
        if self.per_token:
            raise ValueError("process rewards (per_token=True) have no place in an environment's reward.")
        from torchrl_trl_bridge.rewards.transforms import ScorerTransform  # loads torchrl.envs, which takes seconds

        return ScorerTransform(self, reward_key)

    def _read(self, tensordict: Any) -> TokenRows:
        if self._text is None:
            return self._cut(read_rows(tensordict, self._token_key, self._attention_mask_key, self.pad_token_id))
        texts = read_texts(tensordict, self._input_keys)
        return self._cut(self._text.encode(texts, tensordict.batch_size, tensordict.device))

    def _cut(self, rows: TokenRows) -> TokenRows:
        return rows if self.max_length is None else keep_last(rows, self.max_length)

    def _score(self, rows: TokenRows) -> torch.Tensor:
        """The reward of each row, float32 ``[N]``; of each token, ``[sum(lengths)]``, if it is per token."""
        home = rows.ids.device
        if len(rows.lengths) == 0:
            return torch.zeros(0, device=home)
        end_token = hf.end_token_of(self.model)
        check_rows(
            rows,
            vocab_size=hf.vocab_size_of(self.model),
            positions=hf.positions_of(self.model),
            end_token=end_token,
            max_tokens=self.max_tokens,
        )
        batches = plan_micro_batches(
            rows.lengths.tolist(),
            self._groups(rows, end_token),
            micro_batch_size=self._most_rows(),
            max_tokens=self.max_tokens,
        )
        rows_there = rows.to(hf.device_of(self.model) or home)
        with scoring(self.model, self.inference_mode):
            scores = torch.cat([self._call(rows_there, batch) for batch in batches])
            scored = torch.tensor(list(chain.from_iterable(batches)), device=scores.device)
            if self.per_token:
                scored = rows_there.positions_of(scored)
            rewards = scores[scored.argsort()]
        # What is made under inference mode may not enter autograd; a clone made outside may.
        rewards = (rewards.clone() if self.inference_mode else rewards).to(home)
        _check_finite(rewards, rows)
        return rewards

    def _groups(self, rows: TokenRows, end_token: int | None) -> list[int] | None:
        """Which rows may share a call, as a number per row; None where all may."""
        if hf.score_depends_on_padding(self.model) or not hf.takes_mask(self.model):
            return rows.lengths.tolist()
        if end_token is not None:
            return count_per_row(rows, rows.ids == end_token).tolist()
        return None

    def _lends_padding(self) -> bool:
        """Whether the model tells padding by an id that its config does not have, and the user gave one."""
        return (
            self.pad_token_id is not None
            and hasattr(hf.text_config_of(self.model), "pad_token_id")
            and hf.padding_id_of(self.model) is None
        )

    def _most_rows(self) -> int | None:
        """The bound on the rows of a call."""
        vocab_size = hf.vocab_size_of(self.model)
        if not self._lends_padding() or vocab_size is None:
            return self.micro_batch_size
        # The lent id must not end a row, so there must be more ids than rows.
        return min(vocab_size - 1, self.micro_batch_size or vocab_size)

    def _call(self, rows: TokenRows, batch: list[int]) -> torch.Tensor:
        """The scores of a micro-batch, float32 ``[len(batch)]``."""
        chosen = torch.tensor(batch, device=rows.ids.device)
        lent = self._padding_to_lend(rows, chosen)
        ids, mask = pad_right(rows, chosen, (hf.padding_id_of(self.model) or 0) if lent is None else lent)
        padded = not bool(mask.all())
        if padded and lent is None and hf.names_unknown_padding_id(self.model):
            raise self._needs_padding_id(rows, batch)
        arguments: dict[str, Any] = {"input_ids": ids, **hf.no_cache_arguments(self.model)}
        # int64, because not every model takes a boolean mask (XLNet). Without a mask key there is none, unless ids were
        # filled in.
        has_mask = self._attention_mask_key is not None or self._text is not None
        if hf.takes_mask(self.model) and (padded or has_mask):
            arguments["attention_mask"] = mask
        with nullcontext() if lent is None else hf.lent_padding_id(self.model, lent):
            try:
                output = self.model(**arguments)
            except ValueError as error:
                if len(batch) > 1 and hf.padding_id_of(self.model) is None and "pad" in str(error):
                    raise self._needs_padding_id(rows, batch) from error
                raise
        picks: dict[str, Any] = {"select": self.output, "label": self.label, "labels": hf.labels_of(self.model)}
        if self.per_token:
            return read_token_rewards(output, *ids.shape, **picks)[mask.bool()]
        return read_rewards(output, len(batch), **picks)

    def _padding_to_lend(self, rows: TokenRows, chosen: torch.Tensor) -> int | None:
        """The id that the model is to take for padding in this call, where that is not the one in its config."""
        if self._text is not None and self.pad_token_id is None:
            # The tokenizer's, so that a text ends for the model where it ends for TRL.
            return self._text.pad_token_id
        if not self._lends_padding() or len(chosen) == 1:
            return None
        # One that ends none of the rows: the model takes the last token that is not padding for the end.
        last = set(rows.ids[rows.ends[chosen] - 1].tolist())
        given = [] if self.pad_token_id is None else [self.pad_token_id]
        candidates = chain(given, range(len(last) + 1))
        return next(i for i in candidates if i not in last and hf.knows_id(self.model, i))

    def _needs_padding_id(self, rows: TokenRows, batch: list[int]) -> ValueError:
        first, second = (rows.name(row) for row in batch[:2])
        return ValueError(
            f"{first} and {second} cannot share a call: {type(self.model).__name__} has no padding id in its "
            "vocabulary (config.pad_token_id). Pass pad_token_id=, or micro_batch_size=1."
        )


def _take_names_of_torchrl(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets weights load that the class of this name in torchrl (0.14) saved."""
    theirs = f"{prefix}_reward_module.model."
    for name in [name for name in state_dict if name.startswith(theirs)]:
        state_dict[f"{prefix}model.{name.removeprefix(theirs)}"] = state_dict.pop(name)


def _check_finite(rewards: torch.Tensor, rows: TokenRows) -> None:
    wrong = ~rewards.detach().isfinite()
    if wrong.any():
        if len(wrong) != len(rows.lengths):  # one reward per token
            wrong = count_per_row(rows, wrong) > 0
        raise RuntimeError(
            f"{rows.names(wrong)}: the reward is not finite (NaN or infinite). Check the model's weights, or load it "
            "in float32 or bfloat16 if it overflows in float16."
        )


def _check_key(name: str, key: Any, *, optional: bool = False) -> None:
    if optional and key is None:
        return
    if not key or not (isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(k, str) for k in key))):
        raise TypeError(f"{name} must be a string or a tuple of strings, got {key!r}.")


def _at_least(name: str, value: int | None, least: int | None) -> int | None:
    if value is None:
        return None
    if not is_integer(value):
        raise TypeError(f"{name} must be an int or None, got {type(value).__name__}.")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
    return int(value)


def _label_index(label: int | str | None, labels: list[str] | None) -> int | None:
    if label is None:
        return None
    if is_integer(label):
        label = int(label)
        if label < 0 or (labels is not None and label >= len(labels)):
            raise ValueError(f"label={label} is out of range; the model's labels are {', '.join(labels or [])}.")
        return label
    if not isinstance(label, str):
        raise TypeError(f"label must be an int, a str or None, got {type(label).__name__}.")
    if labels is None or label not in labels:
        raise ValueError(f"label={label!r} is not one of the model's labels: {', '.join(labels or ['none known'])}.")
    return labels.index(label)

"""Buffers that real collectors filled: fixtures for tests on rollouts as TorchRL writes them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper

from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer

COLLECTED = [
    pytest.param((mode, padded, storage), id=f"{mode}-{'padded' if padded else 'ragged'}-{storage.__name__}")
    for mode, padded, storage in itertools.product(["history", "text"], [False, True], [ListStorage, LazyStackStorage])
]


def _prompts() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        yield {"query": [f"{number} + 1?", "long " * number + "question"], "answer": [number + 1, 0]}


@pytest.fixture(scope="session")
def collect(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ReplayBuffer]:
    """``collect(mode, padded, storage)``: a buffer of 12 rollouts, of up to three turns each."""

    @functools.cache
    def collect(mode: str = "history", padded: bool = False, storage: type = LazyStackStorage) -> ReplayBuffer:
        tokenizer = tiny_tokenizer()
        policy = TransformersWrapper(
            tiny_causal_lm(tmp_path_factory.mktemp("policy"), tokenizer),
            tokenizer=tokenizer,
            input_mode=mode,
            generate=True,
            pad_output=padded,
            return_log_probs=True,
            generate_kwargs={"max_new_tokens": 6, "do_sample": True},
        )
        env = ChatEnv.from_dataloader(_prompts(), input_mode=mode, tokenizer=tokenizer, batch_size=(2,))
        replay_buffer = ReplayBuffer(storage=storage(100))
        torch.manual_seed(0)
        collector = LLMCollector(
            env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=12, replay_buffer=replay_buffer
        )
        for _ in collector:
            pass
        return replay_buffer

    return collect


@pytest.fixture(params=COLLECTED)
def collected(request: pytest.FixtureRequest, collect: Callable[..., ReplayBuffer]) -> ReplayBuffer:
    """Each kind of buffer that a collector fills. Shared between tests: read only."""
    return collect(*request.param)

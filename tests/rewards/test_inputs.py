from __future__ import annotations

import pytest
import torch
from reward_models import padded
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Masks, Tokens

from torchrl_trl_bridge.rewards.inputs import TokenRows, check_rows, keep_last, pad_right, plan_micro_batches, read_rows

TOKENS, MASK = ("tokens", "full"), ("masks", "all_attention_mask")
ROWS = [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 4, 9, 0, 3])]


def lists(rows: TokenRows) -> list[list[int]]:
    return [run.tolist() for run in rows.ids.split(rows.lengths.tolist())]


def one(row: torch.Tensor, mask: torch.Tensor | None = None) -> TensorDict:
    """A rollout as TorchRL's wrappers write it: tensor classes inside a tensordict."""
    mask = torch.ones_like(row, dtype=torch.bool) if mask is None else mask
    size = row.shape[:-1]
    return TensorDict(
        {"tokens": Tokens(full=row, batch_size=size), "masks": Masks(all_attention_mask=mask, batch_size=size)}, size
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32])
def test_padded_rows(side, mask_dtype):
    rows = read_rows(padded(ROWS, side, 11, mask_dtype), TOKENS, MASK, None)
    assert lists(rows) == [row.tolist() for row in ROWS]
    assert rows.shape == (3,)
    assert rows.ids.dtype == torch.int64


def test_masked_ids_inside_a_row_are_taken_out():
    rollouts = TensorDict({"t": torch.tensor([[1, 2, 3, 4]]), "m": torch.tensor([[1, 0, 0, 1]])}, [1])
    assert lists(read_rows(rollouts, "t", "m", None)) == [[1, 4]]


def test_ragged_rows():
    mask = torch.tensor([False, True, True])
    rows = read_rows(lazy_stack([one(ROWS[0], mask), one(ROWS[1]), one(ROWS[2])]), TOKENS, MASK, None)
    assert lists(rows) == [[6, 7], [8], ROWS[2].tolist()]


@pytest.mark.parametrize("dim", [0, 1])
def test_ragged_rows_of_two_batch_dimensions(dim):
    inner = [lazy_stack([one(torch.arange(1, 1 + n)) for n in lengths]) for lengths in ((3, 5), (2, 7), (1, 4))]
    rollouts = lazy_stack(inner, dim)
    rows = read_rows(rollouts, TOKENS, MASK, None)
    by_row = ((3, 5), (2, 7), (1, 4)) if dim == 0 else ((3, 2, 1), (5, 7, 4))
    assert rows.shape == rollouts.batch_size == (len(by_row), len(by_row[0]))
    assert rows.lengths.tolist() == [n for row in by_row for n in row]
    assert rows.name(4) == f"row {(2, 0) if dim == 0 else (1, 1)}"


def test_ragged_rows_with_dimensions_of_their_own():
    rollouts = lazy_stack([TensorDict({"t": torch.ones(2, n, dtype=torch.long)}) for n in (3, 4)])
    rows = read_rows(rollouts, "t", None, None)
    assert rows.shape == (2, 2)
    assert rows.lengths.tolist() == [3, 3, 4, 4]


def test_row_without_batch_dimension():
    rows = read_rows(one(ROWS[0]), TOKENS, MASK, None)
    assert rows.shape == ()
    assert lists(rows) == [[5, 6, 7]]


def test_tokens_with_more_dimensions_than_the_batch():
    ids = torch.arange(1, 13).reshape(2, 3, 2)
    rows = read_rows(TensorDict({"t": ids}, [2]), "t", None, None)
    assert rows.shape == (2, 3)
    assert lists(rows) == ids.reshape(6, 2).tolist()


@pytest.mark.parametrize("with_mask", [True, False])
def test_jagged_rows(with_mask):
    jagged = torch.nested.nested_tensor(ROWS, layout=torch.jagged)
    mask = torch.nested.nested_tensor([torch.ones(len(row)) for row in ROWS], layout=torch.jagged)
    rows = read_rows(TensorDict({"t": jagged, "m": mask}, [3]), "t", "m" if with_mask else None, None)
    assert lists(rows) == [row.tolist() for row in ROWS]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_narrow_ids(dtype):
    rows = read_rows(TensorDict({"t": torch.tensor([[1, 2]], dtype=dtype)}, [1]), "t", None, None)
    assert rows.ids.dtype == torch.int64


def test_without_mask_every_id_counts_unless_stripped():
    ids = torch.tensor([[0, 0, 5, 0, 6, 0], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0]])
    rollouts = TensorDict({"t": ids}, [3])
    assert lists(read_rows(rollouts, "t", None, None)) == ids.tolist()
    assert lists(read_rows(rollouts, "t", None, 0)) == [[5, 0, 6], [1, 2, 3, 4, 5, 6], []]
    ragged = lazy_stack([TensorDict({"t": ids[0]}), TensorDict({"t": ids[1, :2]})])
    assert lists(read_rows(ragged, "t", None, 0)) == [[5, 0, 6], [1, 2]]


def test_missing_keys_are_named():
    with pytest.raises(KeyError, match=r"token_key \('a', 'b'\) not found.*tokens"):
        read_rows(padded(ROWS), ("a", "b"), MASK, None)
    with pytest.raises(KeyError, match="attention_mask_key 'mask' not found"):
        read_rows(padded(ROWS), TOKENS, "mask", None)
    ragged = lazy_stack([one(ROWS[0]), one(ROWS[1])])
    with pytest.raises(KeyError, match=r"attention_mask_key \('masks', 'all_assistant_mask'\)"):
        read_rows(ragged, TOKENS, ("masks", "all_assistant_mask"), None)


def test_shapes_of_ids_and_mask_must_agree():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        read_rows(TensorDict({"t": torch.ones(2, 3).long(), "m": torch.ones(2, 4)}, [2]), "t", "m", None)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\).*\(2, 12\)"):
        read_rows(TensorDict({"t": torch.ones(2, 3, 4).long(), "m": torch.ones(2, 12)}, [2]), "t", "m", None)
    ragged = lazy_stack([one(ROWS[0]), one(ROWS[2], torch.ones(4)), one(torch.ones(6).long(), torch.ones(6))])
    with pytest.raises(ValueError, match=r"row 1: .*\(5,\).*\(4,\)"):
        read_rows(ragged, TOKENS, MASK, None)


def test_additive_masks_are_refused():
    mask = torch.tensor([[0.0, -torch.inf]])
    with pytest.raises(ValueError, match="other than 0 and 1"):
        read_rows(TensorDict({"t": torch.ones(1, 2).long(), "m": mask}, [1]), "t", "m", None)


def test_wrong_types():
    with pytest.raises(TypeError, match="integers"):
        read_rows(TensorDict({"t": torch.rand(2, 3)}, [2]), "t", None, None)
    with pytest.raises(TypeError, match="name a leaf"):
        read_rows(padded(ROWS), "tokens", None, None)
    with pytest.raises(ValueError, match="scalar"):
        read_rows(TensorDict({"t": torch.tensor(1)}), "t", None, None)


def rows_of(*lengths: int, shape: tuple[int, ...] | None = None) -> TokenRows:
    return TokenRows.ragged(torch.arange(sum(lengths)), torch.tensor(lengths), torch.Size(shape or (len(lengths),)))


def test_keep_last():
    assert lists(keep_last(rows_of(3, 1, 5, 0), 2)) == [[1, 2], [3], [7, 8], []]
    same = rows_of(3, 1)
    assert keep_last(same, 3) is same


def check(rows: TokenRows, **limits: int) -> None:
    check_rows(rows, **{**dict.fromkeys(("vocab_size", "positions", "end_token", "max_tokens")), **limits})


def test_checks_pass_on_good_rows():
    check(rows_of(3, 4), vocab_size=7, positions=4, max_tokens=4)


@pytest.mark.parametrize(
    ("rows", "limits", "words"),
    [
        (rows_of(3, 0, 2), {}, r"row 1: no token.*attention_mask_key="),
        (rows_of(3, 0, 2, 0, shape=(2, 2)), {}, r"row \(0, 1\), row \(1, 1\): no token"),
        (TokenRows.ragged(torch.arange(0), torch.tensor([0]), torch.Size([])), {}, "the row: no token"),
        (rows_of(3, 5), {"positions": 4}, r"row 1: up to 5 tokens.*4 positions.*max_length=4"),
        (rows_of(3, 5), {"max_tokens": 4}, r"row 1: up to 5 tokens.*max_tokens=4.*raise max_tokens="),
        (rows_of(3, 5), {"vocab_size": 6}, r"row 1: token id 6 .*vocabulary of 6"),
        (
            TokenRows.ragged(torch.tensor([4, -1]), torch.tensor([1, 1]), torch.Size([2])),
            {"vocab_size": 6},
            "row 1: token id -1",
        ),
        (rows_of(3, 5), {"end_token": 2}, r"row 1: .*end token \(id 2\)"),
    ],
)
def test_checks_name_the_row(rows, limits, words):
    with pytest.raises(ValueError, match=words):
        check(rows, **limits)


def test_errors_list_ten_rows_at_most():
    with pytest.raises(ValueError, match="row 9 and 2 more: no token"):
        check(rows_of(*[0] * 12))


def test_plan():
    lengths = [3, 9, 2, 8, 2]
    assert plan_micro_batches(lengths) == [[0, 1, 2, 3, 4]]
    assert plan_micro_batches(lengths, micro_batch_size=2) == [[1, 3], [0, 2], [4]]
    assert plan_micro_batches(lengths, max_tokens=9) == [[1], [3], [0, 2, 4]]
    assert plan_micro_batches(lengths, max_tokens=18, micro_batch_size=2) == [[1, 3], [0, 2], [4]]
    assert plan_micro_batches(lengths, lengths) == [[2, 4], [0], [3], [1]]
    assert plan_micro_batches([]) == []


def test_pad_right():
    ids, mask = pad_right(rows_of(2, 3, 1), torch.tensor([0, 2]), fill=9)
    assert ids.tolist() == [[0, 1], [5, 9]]
    assert mask.tolist() == [[1, 1], [1, 0]]
    assert mask.dtype == ids.dtype == torch.int64

"""The layout of a model in one flat buffer."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.buckets import ALIGNMENT, BucketPlan

ENTRIES = [("a", (3,), torch.float32), ("b", (5,), torch.int64), ("c", (7, 10), torch.bfloat16)]


def test_layout_by_hand():
    plan = BucketPlan(ENTRIES, bucket_bytes=100)
    # 12, 40 and 140 bytes, each padded to the next multiple of 64
    assert [(s.start, s.num_bytes, s.stop) for s in plan.slots] == [(0, 12, 64), (64, 40, 128), (128, 140, 320)]
    assert plan.num_bytes == 320
    assert [plan.bucket(i) for i in range(plan.num_buckets)] == [
        slice(0, 100), slice(100, 200), slice(200, 300), slice(300, 320),
    ]  # fmt: skip


def test_views_are_the_buffer():
    plan = BucketPlan(ENTRIES, bucket_bytes=100)
    flat = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    views = plan.views(flat)
    views["b"].fill_(-1)
    assert flat.nonzero().flatten().tolist() == list(range(64, 104))
    assert [(n, tuple(v.shape), v.dtype) for n, v in views.items()] == ENTRIES


@pytest.mark.parametrize(
    "other",
    [
        BucketPlan(ENTRIES, bucket_bytes=101),
        BucketPlan(ENTRIES[::-1], bucket_bytes=100),
        BucketPlan(ENTRIES[:2], bucket_bytes=100),
        BucketPlan([("x", (3,), torch.float32), *ENTRIES[1:]], bucket_bytes=100),
        BucketPlan([("a", (1, 3), torch.float32), *ENTRIES[1:]], bucket_bytes=100),
        BucketPlan([("a", (3,), torch.int32), *ENTRIES[1:]], bucket_bytes=100),
    ],
    ids=["bucket size", "order", "number", "name", "shape", "dtype"],
)
def test_fingerprint_tells_plans_apart(other: BucketPlan):
    plan = BucketPlan(ENTRIES, bucket_bytes=100)
    assert plan.fingerprint != other.fingerprint
    assert plan.fingerprint == BucketPlan(list(ENTRIES), bucket_bytes=100).fingerprint
    assert 0 <= plan.fingerprint < 2**63  # travels as int64


def test_fingerprint_is_the_same_in_every_process():
    """It is a hash of these characters, not of objects: the same for every hash seed and machine."""
    text = '[100, [["a", [3], "torch.float32"], ["b", [5], "torch.int64"], ["c", [7, 10], "torch.bfloat16"]]]'
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert BucketPlan(ENTRIES, bucket_bytes=100).fingerprint == int(digest[:16], 16) // 2


@pytest.mark.parametrize("entries, bucket_bytes", [([], 100), (ENTRIES, 0), ([*ENTRIES, ENTRIES[0]], 100)])
def test_no_plan(entries, bucket_bytes):
    with pytest.raises(ValueError, match="no plan"):
        BucketPlan(entries, bucket_bytes)


def test_match_names_what_does_not_fit():
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in ENTRIES}
    plan = BucketPlan.of(tensors)
    with pytest.raises(ValueError, match=r"2 names: \['c', 'd'\]"):
        plan.match({"a": tensors["a"], "b": tensors["b"], "d": tensors["c"]})
    with pytest.raises(ValueError, match=r"b is \(5,\) torch.int32, but the plan says \(5,\) torch.int64"):
        plan.match(tensors | {"b": tensors["b"].int()})
    with pytest.raises(ValueError, match=r"c is \(70,\) torch.bfloat16, but"):
        plan.match(tensors | {"c": tensors["c"].flatten()})


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
SHAPES = st.lists(st.integers(0, 9), max_size=3)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6), st.integers(1, 700))
def test_every_bucket_is_complete_when_it_is_yielded(kinds, bucket_bytes):
    tensors = {}
    for number, (shape, dtype) in enumerate(kinds):
        tensors[f"t{number}"] = (torch.rand(shape) * 100 + 1).to(dtype).requires_grad_(dtype.is_floating_point)
    plan = BucketPlan.of(tensors, bucket_bytes)
    flat = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    seen = [(index, flat[plan.bucket(index)].clone()) for index in plan.fill(flat, tensors)]
    assert [index for index, _ in seen] == list(range(plan.num_buckets))
    assert b"".join(bytes(part.tolist()) for _, part in seen) == bytes(flat.tolist())
    for name, view in plan.views(flat).items():
        assert torch.equal(view, tensors[name])
        assert view.data_ptr() % ALIGNMENT == flat.data_ptr() % ALIGNMENT

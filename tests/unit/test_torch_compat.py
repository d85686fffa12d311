"""The releases of torch that differ, as their own signatures."""

import pytest
import torch
from torch.nn.attention import varlen

from verl.nn import torch_compat


def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """The signature of torch 2.11.0, which groups heads without an argument."""
    return query


def of_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """The signature of torch 2.12 to 2.15, which refuses grouped heads that are not announced."""
    assert enable_gqa == (query.shape[1] != key.shape[1]), "enable_gqa must be given"
    return query


@pytest.mark.parametrize("release", [of_2_11, of_2_13])
def test_heads_that_share_keys_are_announced_where_torch_wants_it(release, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", release)
    offsets, q = torch.tensor([0, 3], dtype=torch.int32), torch.randn(3, 4, 8)
    for kv_heads in (4, 2):
        k = torch.randn(3, kv_heads, 8)
        out = torch_compat.varlen_attention(q, k, k, (offsets, offsets, 3, 3), scale=0.5, window_size=(-1, 0))
        assert out is q


@pytest.mark.parametrize(
    ("collective", "older"),
    [("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")],
)
def test_parts_of_ranks_are_gathered_and_summed_under_either_name(collective, older, monkeypatch):
    called = []
    for present, absent in ((collective, None), (older, collective)):
        if absent:
            monkeypatch.delattr(torch.distributed, absent, raising=False)
        monkeypatch.setattr(
            torch.distributed, present, lambda into, of, group=None, name=present: called.append(name), raising=False
        )
        getattr(torch_compat, collective)(torch.empty(4), torch.ones(2))
    assert called == [collective, older]

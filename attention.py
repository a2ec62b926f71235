"""Causal attention in the common frame: move queries, keys and values in, attend, move the output back.

Mechanisms differ only in the Frame that positional.py hands over, so one fused kernel serves them all and nothing
T x T is formed, at any length. A bias accumulated along the route rides inside the kernel as a key coordinate.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from positional import make_position


class Attention(nn.Module):
    window = None  # eval_length.py --window: a query sees itself and the window - 1 keys before it

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.position = make_position(config, layer)

    def forward(self, x, embedding, idx, sequence, cache=None):
        """x: (B, T, C), the layer's normalised input; returns (B, T, C). `cache`: a Cache to decode with, or None."""
        B, T, C = x.shape
        frame = self.position(x, embedding, idx, sequence, cache and cache.state)
        qkv = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim).permute(2, 0, 3, 1, 4)    # (3, B, H, T, D)
        dtype = qkv.dtype

        # into the common frame; what is routed alike is moved in one go
        if frame.v is frame.qk:
            q, k, v = frame.qk.enter(qkv)
        else:
            (q, k), v = frame.qk.enter(qkv[:2]), frame.v.enter(qkv[2])
        if frame.query_scale is not None:
            q = q * frame.query_scale
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)   # float32 until here; rounded once

        if cache is None:
            y = causal_attention(q, k, v, frame.key_bias, self.window)
        else:
            y = cached_attention(q, *cache.append(k, v, frame), self.window)

        y = frame.v.leave(y).to(dtype)                                                        # back at each query
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def causal_attention(q, k, v, key_bias=None, window=None):
    """Softmax attention over j <= i. q, k, v: (B, H, T, D); key_bias: c of the bias -(c_i - c_j), (1 or B, H, T), or
    None; window: None, or the number of keys a query sees, itself included. Memory is linear in T."""
    T, D = q.shape[-2:]
    if key_bias is not None:
        q, k, v = append_bias(q, k, v, key_bias)
    if window is None or window >= T:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=D ** -0.5)
    else:
        pieces = []  # a block of queries against the keys it can see: never more than window x 2 window at a time
        for start in range(0, T, window):
            first, stop = max(0, start - window + 1), min(T, start + window)
            visible = see(stop - start, stop - first, window, q.device)
            pieces.append(F.scaled_dot_product_attention(
                q[..., start:stop, :], k[..., first:stop, :], v[..., first:stop, :], visible, scale=D ** -0.5))
        y = torch.cat(pieces, dim=-2)
    return y[..., :D]


def append_bias(q, k, v, key_bias):
    """Add c_j to the logits as one more coordinate of the keys. Softmax over j ignores c_i, so it is left out.

    Logits are <q, k> / sqrt(D), so the coordinate is c sqrt(D) against a query coordinate of 1. c is centred on the
    middle of its range: in float32, 65,536 tokens at slope 1/2 then cost 4e-4 of relative error. bf16 (and TF32, which
    CUDA may use for float32) keeps 8 bits of a factor, so there c goes in three parts of 8 bits each, exact to 24."""
    B, H, T, D = k.shape
    middle = (key_bias[..., :1] + key_bias[..., -1:]).detach() / 2
    c = ((key_bias - middle) * D ** 0.5).to(k.device, torch.promote_types(k.dtype, torch.float32)).expand(B, H, T)
    if k.dtype == torch.bfloat16 or k.is_cuda:
        high = c.bfloat16()
        middle = (c - high).detach().bfloat16()
        low = (c - high - middle).detach().bfloat16()
        parts = torch.stack((high, middle, low), dim=-1)
        padding = -(D + 3) % 8          # CUDA's fused kernels want a multiple of 8; the CPU's do not
    else:
        parts, padding = c[..., None], 0
    n = parts.size(-1)
    q = torch.cat((q, q.new_ones(B, H, T, n), q.new_zeros(B, H, T, padding)), dim=-1)
    k = torch.cat((k, parts.to(k.dtype), k.new_zeros(B, H, T, padding)), dim=-1)
    return q, k, F.pad(v, (0, n + padding))  # fused kernels want values of the same size


def see(n_query, n_key, window, device):
    """(n_query, n_key) bool: may the query see the key? The last query stands at the last key."""
    query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
    key = torch.arange(n_key, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


class Cache:
    """One layer's keys and values, already in the common frame: a key there never depends on the query that reads it."""
    def __init__(self, capacity):
        self.capacity, self.state, self.length, self.store = capacity, None, 0, None

    def append(self, k, v, frame):
        """Take in k, v (B, H, T, D) and frame.key_bias; return all keys, values and biases so far."""
        new = (k, v) if frame.key_bias is None else (k, v, frame.key_bias.expand(k.shape[:3])[..., None])
        if self.store is None:
            self.store = [t.new_empty(*t.shape[:2], self.capacity, t.size(-1)) for t in new]
        stop = self.length + k.size(2)
        for store, t in zip(self.store, new):
            store[:, :, self.length:stop] = t
        self.state, self.length = frame.state, stop
        k, v, *c = (store[:, :, :stop] for store in self.store)
        return k, v, c[0][..., 0] if c else None


def cached_attention(q, k, v, key_bias=None, window=None):
    """The last T positions of a sequence as queries, (B, H, T, D), against all its S keys, (B, H, S, D).

    Meant for decoding, where T is 1 after the prompt: the mask is T x S, and holds the bias as the plain difference."""
    T, S, D = q.size(2), k.size(2), q.size(3)
    if T == S:
        return causal_attention(q, k, v, key_bias, window)
    mask = see(T, S, window, q.device)
    if key_bias is not None:
        bias = key_bias[..., None, :] - key_bias[..., -T:, None]                              # -(c_i - c_j)
        mask = bias.to(q.device, q.dtype).masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=D ** -0.5)

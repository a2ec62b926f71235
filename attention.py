"""Causal attention in the common frame: move queries, keys and values in, attend, move the output back.

Mechanisms differ only in the Frame that positional.py fills with the routes defined here, so one fused kernel
serves them all and nothing T x T is formed, at any length. A bias accumulated along the route rides inside the kernel
as a key coordinate. PaTH alone has no common frame; path_attention carries its keys from chunk to chunk instead.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


def precise(x):
    """x in float32 or better. Steps, prefixes and biases are never computed in less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product_type(x):
    """The type in which autocast does matrix products of x; outside autocast x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def on_device(x, like):
    """x (float64, on the CPU beside MPS, which has none) in float32 or better on like's device. The type goes first, so that
    no float64 gradient is asked of MPS."""
    return x.to(torch.promote_types(like.dtype, torch.float32)).to(like.device)


@dataclass
class Frame:
    """What a position tells attention about one layer.

    qk, v        how queries and keys, and how values, enter (and the output leaves) the common frame
    key_bias     c of the bias -(c_i - c_j): (1 or B, H, T) float64, or None
    query_scale  factor on the content part of each query's logits: (H or 1, T, 1), or None
    state        what decoding must remember of the tokens so far
    together     sequences of the batch that are read as one text (training with --cross_batch)
    floor        +floor: (H,), what of a bias remains at any distance, see floored_attention, or None"""
    qk: object
    v: object
    key_bias: torch.Tensor | None
    query_scale: torch.Tensor | None
    state: tuple
    together: int = 1
    floor: torch.Tensor | None = None

    def enter(self, qkv):
        """Queries, keys and values (3, B, H, T, D), each moved into the common frame, what is routed alike in one go."""
        if self.v is self.qk:
            q, k, v = self.qk.enter(qkv)
        else:
            (q, k), v = self.qk.enter(qkv[:2]), self.v.enter(qkv[2])
        return q if self.query_scale is None else q * self.query_scale, k, v


class Attention(nn.Module):
    window = None  # eval_length.py --window: a query sees itself and the window - 1 keys before it

    def __init__(self, config, position):
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.position = position

    def forward(self, x, embedding, idx, sequence, cache=None):
        """x: (B, T, C), the layer's normalised input; returns (B, T, C). `cache`: a Cache to decode with, or None."""
        frame, qkv = self.position(x, embedding, idx, sequence, cache and cache.state), self.project(x, cache)
        with torch.autocast(x.device.type, enabled=False):    # autocast has set the type of q, k, v; routes keep theirs
            y = self.read(qkv, frame, cache)
        return self.proj(y.transpose(1, 2).reshape(x.shape))

    def project(self, x, cache=None):
        """Queries, keys and values of x (B, T, C), with +conv after its convolution: (3, B, H, T, D)."""
        qkv = self.qkv(x).unflatten(2, (3, self.n_head, self.head_dim)).permute(2, 0, 3, 1, 4)
        if self.position.taps is None:
            return qkv
        n, T, y = len(self.position.taps), x.size(1), precise(qkv)
        past, last = with_past(qkv, n, cache and cache.before)                                # (3, B, H, n + T, D)
        if cache is not None:
            cache.coming = last
        for ago, tap in enumerate(self.position.taps, 1):     # tap: (3, H, 1, D)
            y = y + precise(tap)[:, None] * past[..., n - ago:n - ago + T, :]
        return y.to(qkv.dtype)

    def read(self, qkv, frame, cache):
        """Move in, attend, move back: qkv (3, B, H, T, D) to (B, H, T, D), of the same type."""
        path, dtype = isinstance(frame.qk, Path), qkv.dtype
        if frame.together > 1:                                # sequences in a row: (3, B / n, H, n T, D)
            qkv = qkv.unflatten(1, (-1, frame.together)).transpose(2, 3).flatten(3, 4)

        # move in; PaTH rewrites its keys, so that they are not rounded
        q, k, v = (precise(t) if path else t.to(dtype) for t in frame.enter(qkv))

        # attend
        past = (k, v, frame.key_bias) if cache is None else cache.append(k, v, frame)
        if path:
            y, k = path_attention(q, *past, frame.qk, self.window)
            if cache is not None:
                past[0][:, :, -k.size(2):] = k                # in the cache, of which past is a view
        else:
            y = causal_attention(q, *past, self.window, frame.floor)

        y = frame.v.leave(y)                                  # move back, at each query
        if frame.together > 1:
            y = y.unflatten(2, (frame.together, -1)).transpose(1, 2).flatten(0, 1)            # (B, H, T, D)
        return y.to(dtype)


def with_past(x, n, past):
    """x (..., T, D) with the n rows before it in front: `past`, or zeros at the start of a text. And the last n of all,
    which are `past` for what comes next."""
    x = F.pad(x, (0, 0, n, 0)) if past is None else torch.cat((past, x), dim=-2)
    return x, x[..., -n:, :].clone()  # a view would keep all of x


class Stay:
    """The identity: nothing is routed. enter and leave take (..., B, H, T, D)."""
    def enter(self, x):
        return x

    leave = enter


STAY = Stay()


class Rotation:
    """A_t as rotations of the D/2 planes of a head, from wrapped phases (B or 1, H or 1, T, D/2) in radians."""
    def __init__(self, phase):
        self.phase, self.cos, self.sin = phase, phase.detach().cos(), phase.detach().sin()

    def enter(self, x):  # A_t^T x
        return Turn.apply(x, -self.phase, self.cos, -self.sin)

    def leave(self, x):  # A_t x
        return Turn.apply(x, self.phase, self.cos, self.sin)


class Turn(torch.autograd.Function):
    """turn, for autograd; of the angles `phase` alone has a gradient. The way back is the opposite turn, and a phase moves
    y along y turned by 90 degrees: of x and y only y is kept, which attention keeps anyway. Half the time of autograd's."""
    @staticmethod
    def forward(ctx, x, phase, cos, sin):
        y = torch.empty_like(x)
        for rows in slices(x):
            turn(x[..., rows, :], cos[..., rows, :], sin[..., rows, :], y[..., rows, :])
        ctx.save_for_backward(y if phase.requires_grad else None, cos, sin)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, cos, sin = ctx.saved_tensors
        dx, by_phase = torch.empty_like(dy), None if y is None else torch.empty_like(cos)
        for rows in slices(dy):
            slope, c, s = precise(dy[..., rows, :]), cos[..., rows, :], sin[..., rows, :]
            if y is not None:
                (first, second), (d_first, d_second) = precise(y[..., rows, :]).chunk(2, dim=-1), slope.chunk(2, dim=-1)
                by_phase[..., rows, :] = (first * d_second).addcmul_(second, d_first, value=-1).sum_to_size(c.shape)
            turn(slope, c, -s, dx[..., rows, :])
        return dx, by_phase, None, None


def slices(x, size=2 ** 17):
    """Slices of the tokens of x (..., T, D) of about `size` elements each: what a core's cache holds. On CUDA one."""
    T = x.size(-2)
    rows = T if x.is_cuda or torch.compiler.is_compiling() else max(1, size * T // max(1, x.numel()))
    return [slice(start, start + rows) for start in range(0, T, rows)]


def turn(x, cos, sin, y):
    """Turn every plane (x_b, x_{b + D/2}) of x (..., T, D) counter-clockwise, in float32 or better, into y."""
    (first, second), (y_first, y_second) = precise(x).chunk(2, dim=-1), y.chunk(2, dim=-1)
    y_first.copy_((first * cos).addcmul_(second, sin, value=-1))
    y_second.copy_((second * cos).addcmul_(first, sin))


class Reflections:
    """A_t^T = H_1 H_2 ... H_t of reflections H_s = I - 2 w_s w_s^T, w (B, H, T, D) of unit rows (0: no step).

    Within a chunk H_1 ... H_t = I - sum_{u<=t} y_u w_u^T, so only chunks are walked one by one, each with a D x D
    matrix: O(T C D + T D^2) work. 65,536 steps stay orthogonal to 5e-7 in float32 (4e-5 without the Newton step).
    `start` is A^T before the first token, (B, H, D, D), or None; `end` is A^T after the last."""
    chunk = 64

    def __init__(self, w, start=None):
        self.w = in_chunks(w, self.chunk)                                                     # (B, H, N, C, D)
        self.y = solve_steps(self.w, 2 * torch.ones_like(self.w[..., 0])) @ self.w
        eye = torch.eye(w.size(-1), dtype=w.dtype, device=w.device)
        turns = [eye.expand(*w.shape[:2], -1, -1) if start is None else start]
        for across in (eye - self.y.mT @ self.w).unbind(2):
            turns.append(orthogonal(turns[-1] @ across))
        self.start, self.end = torch.stack(turns[:-1], dim=2), turns[-1]                      # (B, H, N, D, D)

    def enter(self, x):  # A_t^T x
        rows = in_chunks(precise(x), self.chunk)
        return ((rows - (rows @ self.w.mT).tril() @ self.y) @ self.start.mT).flatten(-3, -2)[..., :x.size(-2), :]

    def leave(self, x):  # A_t x
        rows = in_chunks(precise(x), self.chunk) @ self.start
        return (rows - (rows @ self.y.mT).tril() @ self.w).flatten(-3, -2)[..., :x.size(-2), :]


def in_chunks(x, size):
    """(..., T, D) to (..., N, C, D), C = min(size, T), with zeros after the last token: a zero w is no step."""
    size = min(size, x.size(-2))
    return F.pad(x, (0, 0, 0, -x.size(-2) % size)).unflatten(-2, (-1, size))


def solve_steps(w, beta):
    """G = (I + D slow(W W^T))^-1 D with slow the part below the diagonal and D = diag(beta): for H = I - beta w w^T and
    y = G W, H_1 ... H_t = I - sum_{u<=t} y_u w_u^T (compact WY form, Schreiber and Van Loan, 1989).
    w: (..., C, D), beta: (..., C); G: (..., C, C).

    Inverted by doubling diagonal blocks: stable as substitution is, and only matrix products. A library solve of many
    small systems waits for all threads at each one: 100 times slower on cores that are shared."""
    C = w.size(-2)
    lower = (beta[..., None] * (w @ w.mT)).tril(-1)
    at, size = torch.arange(C, device=w.device), 1
    apart = at[:, None] ^ at          # size <= i xor j < 2 size: i and j lie in neighbouring blocks that become one
    inverse = torch.eye(C, dtype=w.dtype, device=w.device)
    while size < C:                   # [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]], for all pairs at once
        inverse = inverse - inverse @ (lower * ((apart >= size) & (apart < 2 * size))) @ inverse
        size *= 2
    return inverse * beta[..., None, :]


def orthogonal(m):
    """m (..., n, n) after a Newton step to the nearest orthogonal matrix: an error of e becomes e^2. The correction is a
    constant to autograd: it does not move with changes among orthogonal matrices."""
    near = m.detach()
    return m + (near - near @ (near.mT @ near)) / 2


def unit(w):
    """w / |w|, guarded before the root: w = 0 gives 0 and a finite gradient; to float32 |w| > 0.01 is not moved."""
    return w * (w.square().sum(-1, keepdim=True) + 1e-12).rsqrt()


class Blocks:
    """A_t as D/n blocks of SO(n), (B, H, T, D/n, n, n). Block b turns coordinates b, b + D/n, b + 2 D/n, ..."""
    def __init__(self, prefix):
        self.prefix = prefix

    def enter(self, x):  # A_t^T x
        return Blocks(self.prefix.mT).leave(x)

    def leave(self, x):  # A_t x
        x = precise(x).unflatten(-1, (self.prefix.size(-1), -1))                              # (..., n, D/n)
        return torch.einsum("...bik,...kb->...ib", self.prefix, x).flatten(-2)


def prefix_product(m, level=1):
    """Inclusive products m_t ... m_1 along dim 2 of m (B, H, T, D/n, n, n). Multiply neighbours, take the prefixes of
    those T/2 (every second one wanted), step to the others: 2 T products, and rounding grows with log T.

    Equal steps round alike, and squaring doubles what they lost: every fourth level of products is made orthogonal
    again, which 65,536 steps need to stay orthogonal to 1e-5 (8e-5 without) and which costs little, T/16 of them."""
    T = m.size(2)
    if T == 1:
        return m
    pairs = m[:, :, 1::2] @ m[:, :, :T // 2 * 2:2]
    second = prefix_product(orthogonal(pairs) if level % 4 == 0 else pairs, level + 1)
    first = torch.cat((m[:, :, :1], m[:, :, 2::2] @ second[:, :, :(T - 1) // 2]), dim=2)
    both = torch.stack((first[:, :, :T // 2], second), dim=3).flatten(2, 3)
    return torch.cat((both, first[:, :, T // 2:]), dim=2)


class Path(Stay):
    """PaTH's steps I - beta w w^T, for path_attention: w (B, H, T, D), beta (B, H, T). They shrink, so they have no
    common frame to enter."""
    def __init__(self, w, beta):
        self.w, self.beta = w, beta


def causal_attention(q, k, v, key_bias=None, window=None, floor=None):
    """Softmax attention over j <= i. q: (B, H, T, D), the last T of S positions; k, v: (B, H, S, D); key_bias: c of the
    bias -(c_i - c_j), (1 or B, H, S), or None; window: None, or the number of keys a query sees, itself included.

    Memory is linear in S, but for a mask T x S where T < S: only in decoding, where T is 1 after the prompt."""
    if floor is not None:
        return floored_attention(q, k, v, key_bias, floor, window)
    T, S, D = q.size(2), k.size(2), q.size(3)
    if T < S:
        q = q.to(k.dtype)  # that of the cache
        mask = see(T, S, window, q.device) if T > 1 or window else None
        if key_bias is not None:  # the plain difference -(c_i - c_j)
            bias = on_device(key_bias[..., None, :] - key_bias[..., -T:, None], q).to(q.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, mask, scale=D ** -0.5)
    if key_bias is not None:
        q, k, v = append_bias(q, k, v, key_bias)
    if window is None or window >= T:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=D ** -0.5)[..., :D]
    pieces = []  # a block of queries against the keys it can see: never more than window x 2 window at a time
    for start in range(0, T, window):
        first, stop = max(0, start - window + 1), min(T, start + window)
        pieces.append(F.scaled_dot_product_attention(
            q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop],
            see(stop - start, stop - first, window, q.device), scale=D ** -0.5))
    return torch.cat(pieces, dim=2)[..., :D]


def floored_attention(q, k, v, key_bias, floor, window=None, size=2 ** 20):
    """causal_attention where the n keys that a query sees weigh e^score (e^-(c_i - c_j) + e^floor / n), floor: (H,).

    The bias on a key ends at floor - ln n: content can lift a key at any distance, and where contents are alike all far ones
    together weigh e^floor, however many. No coordinate of keys can say that, so logits are computed here, in float32, for as
    many queries at a time as have `size` keys in all."""
    T, S, D = q.size(2), k.size(2), q.size(3)
    pieces, rows = [], max(1, size // S)
    for start in range(S - T, S, rows):
        stop, first = min(S, start + rows), 0 if window is None else max(0, start - window + 1)
        seen = see(stop - start, stop - first, window, q.device)                          # (queries, keys)
        c = on_device(key_bias[..., first:stop] - key_bias[..., start:start + 1], q)      # small where it matters
        bias = torch.logaddexp(c[..., None, :] - c[..., start - first:, None], precise(floor)[:, None, None]
                               - seen.sum(-1, keepdim=True, dtype=c.dtype).log())
        logits = precise(q[:, :, start - S + T:stop - S + T]) @ precise(k[:, :, first:stop]).mT * D ** -0.5 + bias
        pieces.append(logits.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype) @ v[:, :, first:stop])
    return torch.cat(pieces, dim=2)


def append_bias(q, k, v, key_bias):
    """Add c_j to the logits as one more coordinate of the keys. Softmax over j ignores c_i, so it is left out.

    Logits are <q, k> / sqrt(D), so the coordinate is c sqrt(D) against a query coordinate of 1. c is centred on the
    middle of its range: in float32, 65,536 tokens at slope 1/2 then cost 4e-4 of relative error. bf16 (and TF32, which
    CUDA may use for float32) keeps 8 bits of a factor, so there c goes in three parts of 8 bits each, exact to 24."""
    B, H, T, D = k.shape
    middle = (key_bias[..., :1] + key_bias[..., -1:]).detach() / 2
    c = on_device((key_bias - middle) * D ** 0.5, k).expand(B, H, T)
    parts, padding = [c], 0
    if k.dtype == torch.bfloat16 or k.is_cuda:
        high = c.bfloat16()
        second = (c - high).detach().bfloat16()                  # gradients pass through the first part alone
        parts = [high, second, (c - high - second).detach().bfloat16()]
        padding = -(D + 3) % 8          # CUDA's fused kernels want a multiple of 8; the CPU's do not
    q = torch.cat((q, q.new_ones(B, H, T, len(parts)), q.new_zeros(B, H, T, padding)), dim=-1)
    k = torch.cat((k, torch.stack(parts, dim=-1).to(k.dtype), k.new_zeros(B, H, T, padding)), dim=-1)
    return q, k, F.pad(v, (0, q.size(-1) - D))  # fused kernels want values of the same size


def path_attention(q, k, v, key_bias, path, window=None, chunk=64):
    """Softmax attention where key j reaches query i by H_i ... H_{j+1}, H = I - beta w w^T (PaTH, arXiv 2505.16381).

    q: (B, H, T, D), the last T of S positions; path: their steps; k, v: (B, H, S, D), the first S - T keys carried to
    where the queries begin; key_bias: (1 or B, H, S) or None; all in float32 or better, outside autocast. Returns the
    output (B, H, T, D) and the keys carried to the last position, (B, H, S, D), less those that the window has passed.

    All keys before a chunk of queries are carried to its start, so that it sees them by plain products; then they are
    carried over it, k <- k - (k Y^T) W. With chunks of one token that is decoding. A chunk meets all its keys in one
    softmax, and nothing is larger than chunk x S. The bias stays outside the scale 1/sqrt(D), as FoX defines it."""
    T, D = q.shape[-2:]
    past = k.size(2) - T                                                                  # keys before the queries
    keys, k = k[:, :, :past], in_chunks(k[:, :, past:], chunk)
    q, w = in_chunks(q * D ** -0.5, chunk), in_chunks(path.w, chunk)                      # (B, H, N, C, D)
    C = q.size(3)
    v = F.pad(v, (0, 0, 0, -T % C))
    G = solve_steps(w, in_chunks(path.beta[..., None], chunk)[..., 0])
    read, write = (q @ w.mT).tril() @ G, (w @ k.mT).tril(-1)
    local = (q @ k.mT - read @ write).masked_fill(~see(C, C, None, q.device), float("-inf"))
    q, y = q - read @ w, G @ w                                                            # q back to the start
    k = k - (G @ write).mT @ w                                                            # k on to the end
    out = torch.empty_like(q)  # one piece: pieces kept from each turn of the loop would scatter over the heap
    for a, (q, k, w, y, local) in enumerate(zip(*(t.unbind(2) for t in (q, k, w, y, local)))):
        start = past + a * C
        stop, first = start + C, 0 if window is None else max(0, start - window + 1)
        keys = keys[:, :, keys.size(2) - (start - first):]
        logits = torch.cat((q @ keys.mT, local), dim=-1)                                  # (B, H, C, stop - first)
        if key_bias is not None:  # from the chunk's start: small where it matters
            c = key_bias[..., first:stop] - key_bias[..., start:start + 1].detach()
            logits = logits + on_device(F.pad(c, (0, stop - first - c.size(-1))), q)[..., None, :]
        if window is not None:
            logits = logits.masked_fill(~see(C, stop - first, window, q.device), float("-inf"))
        out[:, :, a] = logits.softmax(-1) @ v[:, :, first:stop]
        keys = torch.cat((keys - (keys @ y.mT) @ w, k), dim=2)
    return out.flatten(2, 3)[:, :, :T], keys[:, :, :keys.size(2) - -T % C]


def see(n_query, n_key, window, device):
    """(n_query, n_key) bool: may the query see the key? The last query stands at the last key."""
    key = torch.arange(n_key, device=device)
    query = key[n_key - n_query:, None]
    return (key <= query) & (key > query - (window or n_key))


class Cache:
    """One layer's keys and values, already in the common frame: a key there never depends on the query that reads it.
    PaTH's keys stand in the frame of the last token and are rewritten as tokens come."""
    def __init__(self, capacity):
        self.capacity, self.state, self.store = capacity, None, None
        self.before = self.coming = None  # +conv: q, k, v of the last tokens, before and after those now coming

    def append(self, k, v, frame):
        """Take in k, v (B, H, T, D) and frame.key_bias; return views of all keys, values and biases so far."""
        new = [t for t in (k, v, frame.key_bias) if t is not None]
        if self.store is None:
            self.store = [t.new_empty(*t.shape[:2], self.capacity, *t.shape[3:]) for t in new]
        stop = frame.state[0]
        if stop > self.capacity:
            raise ValueError(f"a cache of {self.capacity} tokens cannot take in token {stop}")
        for store, t in zip(self.store, new):
            store[:, :, stop - t.size(2):stop] = t
        self.state, self.before = frame.state, self.coming
        k, v, *bias = (store[:, :, :stop] for store in self.store)
        return k, v, bias[0] if bias else None

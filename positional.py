"""Every mechanism that tells a transformer where its tokens are, chosen once by name: make_position(config).

One idea holds them together. Each token s contributes a step M_s, and a key at j reaches a query at i through the
route (j, i], the steps multiplied along the way:

    P(j->i) = M_i M_{i-1} ... M_{j+1}            so P(i->i) is the identity
    score   = <q_i, P(j->i) k_j> / sqrt(d) - (c_i - c_j)

For orthogonal steps the prefix product A_t = M_t ... M_1 splits the route, P(j->i) = A_i A_j^T. So nothing T x T is
needed: move everything to a common frame (A_t^T q, A_t^T k, A_t^T v), attend there, move the output back (A_i y).
RoPE is the case of equal steps. The bias -(c_i - c_j) is accumulated along the same route, c_t = b_1 + ... + b_t with
b_s >= 0; ALiBi is a constant b, FoX is b_s = -log(forget gate).

Conventions, each pinned by a literal in tests.py: plane p of a head pairs coordinates p and p + head_dim/2; M_s turns
that plane by +step (counter-clockwise); prefixes are inclusive, so step s is in A_s; A_t^T enters, A_t leaves. Steps
that do not commute multiply on the left, the latest outermost; a block of orth is n coordinates head_dim/n apart.
The routes themselves, with the ways into and out of the common frame, are in attention.py.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import (STAY, Blocks, Frame, Path, Reflections, Rotation, on_device, orthogonal, precise, prefix_product,
                       product_type, unit, with_past)
from checks import UsageError


def prefix_sum(steps, start=None, dim=-2):
    """Inclusive running sum along `dim`, from `start` if there is one, in float64: float32 would lose a phase of 65,536
    steps by several radians. MPS has no float64, so there the sum is on the CPU."""
    total = (steps.cpu() if steps.device.type == "mps" else steps).double().cumsum(dim)
    return total if start is None else total + start


class ReadOut(torch.autograd.Function):
    """x W^T in float32 or better, as steps add up along a route: rounded ones would be off by radians far away. Gradients do
    not add up so: on the way back the products, two of three, are of type `low`, like those of every other weight."""
    @staticmethod
    def forward(ctx, x, weight, low):
        ctx.save_for_backward(x, weight)
        ctx.low = low
        return F.linear(x, precise(weight))

    @staticmethod
    def backward(ctx, by_y):
        x, weight = ctx.saved_tensors
        slope = by_y.to(ctx.low)
        by_x = (slope @ weight.to(ctx.low)).to(x.dtype)
        by_weight = slope.flatten(0, 1).mT @ x.to(ctx.low).flatten(0, 1)
        return by_x, by_weight.to(weight.dtype), None


class Steps(nn.Module):
    """One kind of step in one layer. This one is nope: the identity, so that only the causal mask tells order."""
    base = 10000.0  # eval_length.py --ntk sets it on a trained model

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.head_dim, self.seed, self.layer = config.n_head, config.head_dim, config.seed, layer
        # Two routes only when values take steps of their own; otherwise they travel on the queries' route.
        self.n_route = 2 if config.value_route == "own" else 1
        # Seeds what is random in a kind. The shared weights have a generator of their own: equal for every mechanism.
        self.key = scramble(scramble(torch.tensor(config.seed, device="cpu").int()) ^ layer).item()

    def frequencies(self, device=None):
        """w_p = base^(-2p/d), radians per token, (D/2,) float32. Made anew: a buffer would follow model.bfloat16()."""
        plane = torch.arange(self.head_dim // 2, dtype=torch.float32, device=device)
        return self.base ** (-2 * plane / self.head_dim)

    def forward(self, x, embedding, idx, sequence, length, state, low):
        """The route of queries and keys, that of values if they are routed, and the state after the last token.
        length: tokens before these; state: None or that after them; low: ReadOut's; the others as in Position.forward."""
        return STAY, STAY, None


class ConstantRotation(Steps):
    """rope, rope_qkv (RoPE, arXiv 2104.09864): plane p turns by w_p at every token."""
    def steps(self, x, embedding, idx, sequence, length, low):
        """Angle of every step in radians: (n_route, B or 1, H or 1, T, D/2), float32 or better."""
        return self.frequencies(x.device).expand(1, 1, 1, idx.size(1), -1)

    def split_lanes(self, flat):
        """(B, T, n_route * H * D/2) to (n_route, B, H, T, D/2)."""
        return flat.unflatten(2, (self.n_route, self.n_head, self.head_dim // 2)).permute(2, 0, 3, 1, 4)

    def forward(self, x, embedding, idx, sequence, length, state, low):
        phase = prefix_sum(self.steps(x, embedding, idx, sequence, length, low), state)
        # Wrap while still in float64: in [-pi, pi] a float32 phase is good to 2e-7 rad however long the route.
        turns = (phase.detach() / (2 * math.pi)).round_().mul_(2 * math.pi)  # a constant: its gradient would be zeros
        routes = [Rotation(wrapped) for wrapped in on_device(phase - turns, x)]
        return routes[0], routes[-1], phase[..., -1:, :].clone()  # a view would keep all of it


class RandomRotation(ConstantRotation):
    """randrot_qk, randrot_qkv (the paper): steps ~ Uniform(-w_p, w_p), fresh per position, layer, head and sequence.

    A step is a pure function of (seed, layer, sequence, position, lane), so caching, resuming, ranks, devices and longer
    sequences agree by construction. `sequence` is (B,) int64; a lane is one plane of one head of one route."""
    def steps(self, x, embedding, idx, sequence, length, low):
        lanes = self.n_route * self.n_head * self.head_dim // 2
        position = torch.arange(length, length + idx.size(1), dtype=torch.int32, device=idx.device)
        key = scramble(scramble(self.key ^ sequence.int()) ^ (sequence >> 32).int())      # (B,)
        key = scramble(key[:, None] ^ position)                                           # (B, T)
        bits = scramble(key[:, :, None] ^ torch.arange(lanes, dtype=torch.int32, device=idx.device))
        bits = bits >> 9 & 0x7FFFFF                                                       # (B, T, lanes), 23 bits
        uniform = bits.float().add_(0.5).mul_(2.0 ** -22).sub_(1)                         # in (-1, 1), mean exactly 0
        return self.split_lanes(uniform) * self.frequencies(x.device)


def scramble(h):
    """Mix the 32 bits of an int32 tensor: the lowbias32 hash (C. Wellons, "Hash Prospector", 2018). Products wrap modulo
    2^32, and the masks take out the copies of the sign that >> brings in. int64 would take five times as long on CPU."""
    h = h ^ (h >> 16 & 0xFFFF)  # a new tensor; from here in place, as passes over memory are all that this costs
    for factor, shift in ((0x7FEB352D, 15), (0x846CA68B - 2 ** 32, 16)):
        h *= factor
        h ^= h >> shift & 0xFFFFFFFF >> shift
    return h


class LearnedRotation(ConstantRotation):
    """accrot_qk, accrot_qkv (the paper): step = w_p + pi tanh(a), with a learned and dependent on the token.

    a comes, by --angles, from the token embedding (a read-out of its normalised form), from a table with a free vector
    per layer and token, or from the hidden state that q, k and v read. It starts at 0: at birth this is RoPE."""
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.source = config.angles
        width = self.n_route * self.n_head * self.head_dim // 2
        self.angles = nn.Embedding(config.padded_vocab_size, width) if self.source == "table" else \
            nn.Linear(config.n_embd, width, bias=False)
        nn.init.zeros_(self.angles.weight)

    def steps(self, x, embedding, idx, sequence, length, low):
        if self.source == "table":
            a = precise(self.angles(idx))
        else:
            source = x if self.source == "hidden" else precise(embedding)
            # How fast angles move decides short runs. Without the factor they outrun the rest of the network.
            a = ReadOut.apply(source, self.angles.weight, low) * x.size(-1) ** -0.5
        return self.frequencies(x.device) + math.pi * torch.tanh(self.split_lanes(a))


class LearnedReflection(Steps):
    """reflect_qk, reflect_qkv: step = I - 2 w w^T, w a linear map of the hidden state made a unit vector."""
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.direction = nn.Linear(config.n_embd, config.n_embd, bias=False)
        nn.init.normal_(self.direction.weight, std=0.02, generator=torch.Generator().manual_seed(self.key % 2 ** 32))

    def forward(self, x, embedding, idx, sequence, length, state, low):
        w = ReadOut.apply(x, self.direction.weight, low).unflatten(2, (self.n_head, -1)).transpose(1, 2)
        route = Reflections(unit(w), state)
        return route, route, route.end


class LearnedBlocks(Steps):
    """orth_qk, orth_qkv: step = (I - K)^-1 (I + K) in SO(n), the Cayley map of a skew K affine in the hidden state.

    At birth K turns the planes (j, j + n/2) of a block as RoPE does; unlike accrot's, its steps need not commute."""
    n = 4  # coordinates in a block: even, and a divisor of head_dim

    def __init__(self, config, layer):
        super().__init__(config, layer)
        i, j = torch.tril_indices(self.n, self.n, -1)
        bias = torch.zeros(self.n_head, self.head_dim // self.n, i.numel())
        turn = torch.tan(self.frequencies() / 2).view(self.n // 2, -1)                    # Cayley's angle: 2 atan(K)
        bias[:, :, i - j == self.n // 2] = turn.T.to(bias.dtype)
        self.skew = nn.Linear(config.n_embd, bias.numel())
        self.skew.bias = nn.Parameter(bias.flatten())
        nn.init.zeros_(self.skew.weight)

    def forward(self, x, embedding, idx, sequence, length, state, low):
        rates = ReadOut.apply(x, self.skew.weight, low) * x.size(-1) ** -0.5 + precise(self.skew.bias)  # as accrot's
        i, j = torch.tril_indices(self.n, self.n, -1, device=x.device)
        rates = rates.unflatten(2, (self.n_head, -1, i.numel())).transpose(1, 2)              # (B, H, T, D/n, n(n-1)/2)
        K = x.new_zeros(*rates.shape[:-1], self.n, self.n)
        K[..., i, j], K[..., j, i] = rates, -rates
        eye = torch.eye(self.n, dtype=x.dtype, device=x.device)
        steps = 2 * torch.linalg.inv(eye - K) - eye
        if state is not None:
            steps = torch.cat((steps[:, :, :1] @ state, steps[:, :, 1:]), dim=2)
        route = Blocks(orthogonal(prefix_product(steps)))
        return route, route, route.prefix[:, :, -1:].clone()


class LearnedPath(Steps):
    """path (PaTH, arXiv 2505.16381): step = I - beta w w^T, with beta in (0, 2) it shrinks what lies along w.

    As published: w = unit(SiLU(depthwise convolution over 3 tokens (map of rank 32))), beta = 2 sigmoid(linear map)."""
    rank, span = 32, 3

    def __init__(self, config, layer):
        super().__init__(config, layer)
        width, generator = config.n_embd, torch.Generator().manual_seed(self.key % 2 ** 32)
        self.down, self.up = nn.Linear(width, self.rank, bias=False), nn.Linear(self.rank, width, bias=False)
        self.filter = nn.Parameter(torch.empty(width, self.span))                             # the last column: this token
        self.beta = nn.Linear(width, config.n_head)
        for weight in (self.down.weight, self.up.weight, self.filter):  # so that SiLU meets numbers around 1
            nn.init.normal_(weight, std=weight.size(1) ** -0.5, generator=generator)
        nn.init.normal_(self.beta.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.beta.bias)

    def forward(self, x, embedding, idx, sequence, length, state, low):
        u = F.linear(F.linear(x, precise(self.down.weight)), precise(self.up.weight))         # (B, T, C)
        u, last = with_past(u, self.span - 1, state)
        w = F.silu(sum(u[:, i:i + x.size(1)] * tap for i, tap in enumerate(precise(self.filter).unbind(1))))
        beta = 2 * torch.sigmoid(F.linear(x, precise(self.beta.weight), precise(self.beta.bias)))
        route = Path(unit(w.unflatten(2, (self.n_head, -1)).transpose(1, 2)), beta.transpose(1, 2))
        return route, STAY, last


class Alibi(nn.Module):
    """ALiBi (arXiv 2108.12409): b = slope of the head, at every token."""
    def __init__(self, config):
        super().__init__()
        self.slopes = alibi_slopes(config.n_head)

    def forward(self, x):
        """b of every token: (B or 1, H, T), nats."""
        return torch.tensor(self.slopes, dtype=x.dtype, device=x.device)[None, :, None].expand(1, -1, x.size(1))


def alibi_slopes(n_head):
    """2^(-8/n), 2^(-16/n), ... for n a power of two; otherwise those of the power below n, then every other one of the
    power above (the rule of the ALiBi paper's code)."""
    def geometric(n):
        return [2.0 ** (-8 * (h + 1) / n) for h in range(n)]
    power = 2 ** int(math.log2(n_head))
    return geometric(power) + geometric(2 * power)[::2][:n_head - power]


class Fox(nn.Module):
    """FoX (arXiv 2503.02130): b = -log sigmoid(gate), the gate linear in the normalised x; not divided by sqrt(d)."""
    def __init__(self, config, longest=None):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_head)
        nn.init.zeros_(self.gate.weight)
        # Heads start by forgetting over 4 ... `longest` (block_size) tokens. With a zero bias all would forget in 1.4.
        memory = torch.logspace(math.log10(4), math.log10(max(4, longest or config.block_size)), config.n_head)
        self.gate.bias = nn.Parameter(-torch.log(torch.expm1(1 / memory)))  # sigmoid(bias) = exp(-1 / memory)

    def forward(self, x):
        gate = F.linear(x, precise(self.gate.weight), precise(self.gate.bias))
        return F.softplus(-gate.transpose(1, 2).contiguous())                                 # (B, H, T)


# name: (kind of step, what is routed, the controls it brings). Any of CONTROLS may follow a name, +floor with +nope.
POSITIONS = {
    "nope":        (Steps, "", ()),
    "rope":        (ConstantRotation, "qk", ()),
    "rope_qkv":    (ConstantRotation, "qkv", ()),
    "randrot_qk":  (RandomRotation, "qk", ()),
    "randrot_qkv": (RandomRotation, "qkv", ()),
    "accrot_qk":   (LearnedRotation, "qk", ()),
    "accrot_qkv":  (LearnedRotation, "qkv", ()),
    "reflect_qk":  (LearnedReflection, "qk", ()),
    "reflect_qkv": (LearnedReflection, "qkv", ()),
    "orth_qk":     (LearnedBlocks, "qk", ()),
    "orth_qkv":    (LearnedBlocks, "qkv", ()),
    "path":        (LearnedPath, "qk", ()),
    "alibi":       (Steps, "", ("alibi",)),
    "fox":         (Steps, "", ("fox",)),
}
DECAYS = {"alibi": Alibi, "fox": Fox}
CONTROLS = (*DECAYS, "logn", "nope", "conv", "floor")
ANGLES = ("token", "table", "hidden")
UPGRADES = {"rope": "accrot_qk", "rope_qkv": "accrot_qkv"}  # equal logits at birth: train.py --init_from


def parse_position(name):
    """'accrot_qkv+fox' to (kind of step, 'qkv', ('fox',)). UsageError names what is legal."""
    base, *suffixes = name.split("+")
    if base == "path_qkv":
        raise UsageError(f"pos={name}: path's steps shrink, so no common frame brings values along; "
                         "use pos=path, or reflect_qkv, whose steps are orthogonal")
    if base not in POSITIONS:
        raise UsageError(f"pos={name}: no mechanism {base!r}; use one of {', '.join(POSITIONS)}, "
                         f"each may be followed by {', '.join('+' + c for c in CONTROLS)}")
    kind, routed, controls = POSITIONS[base]
    for suffix in suffixes:
        if suffix not in CONTROLS:
            raise UsageError(f"pos={name}: no suffix +{suffix}; use {', '.join('+' + c for c in CONTROLS)}")
        if suffix in (base, *controls):
            raise UsageError(f"pos={name}: {suffix} is given twice")
        controls += (suffix,)
    if "floor" in controls and "nope" not in controls:
        raise UsageError(f"pos={name}: +floor is for the layers that +nope opens; use a name like rope+nope+floor")
    return kind, routed, controls


def check_position(config):
    """UsageError, naming the option, where the settings of config do not fit its mechanism."""
    kind, routed, controls = parse_position(config.pos)
    if "nope" in controls and config.n_layer < 2:
        raise UsageError(f"n_layer={config.n_layer}: pos={config.pos} needs a layer before the last to tell order; "
                         "use n_layer=2 or more")
    for name, legal in (("angles", ANGLES), ("value_route", ("shared", "own"))):
        if getattr(config, name) not in legal:
            raise UsageError(f"{name}={getattr(config, name)}: use one of {', '.join(legal)}")
    if config.angles != "token" and not issubclass(kind, LearnedRotation):
        raise UsageError(f"angles={config.angles}: pos={config.pos} learns no angles; use pos=accrot_qk or accrot_qkv")
    if config.value_route == "own" and not (routed == "qkv" and issubclass(kind, (RandomRotation, LearnedRotation))):
        raise UsageError(f"value_route=own: pos={config.pos} has no value steps to draw apart; "
                         "use pos=randrot_qkv or accrot_qkv")
    if issubclass(kind, ConstantRotation) and config.head_dim % 2:
        raise UsageError(f"n_head={config.n_head}: heads of {config.head_dim} cannot be paired into planes; "
                         f"n_embd/n_head must be even for pos={config.pos}")
    if issubclass(kind, LearnedBlocks) and (kind.n % 2 or config.head_dim % kind.n):
        raise UsageError(f"n_head={config.n_head}: heads of {config.head_dim} do not split into blocks of {kind.n}; "
                         f"LearnedBlocks.n must be even and divide n_embd/n_head for pos={config.pos}")


def check_upgrade(old, new):
    """UsageError unless a model with pos=old, its weights put into pos=new, computes the same at first."""
    base, *suffixes = old.split("+")
    if new != "+".join((UPGRADES.get(base, ""), *suffixes)):
        raise UsageError(f"init_from: a pos={old} checkpoint cannot start pos={new}; possible are "
                         + ", ".join(f"{a} to {b}" for a, b in UPGRADES.items()) + ", with the same suffixes")


def make_position(config, layer=0):
    """The position of one layer. `config` is model.GPTConfig; its pos, angles and value_route say which."""
    return Position(config, layer)


class Position(nn.Module):
    """What one layer knows of position: a kind of step, the controls after its name, and whether +nope opens the layer. Its
    arithmetic is in float32 or better, outside autocast."""
    logn_from = None  # eval_length.py --logn: scale queries beyond this many tokens by ln(i + 1) / ln(logn_from)
    n_taps = 3        # tokens before that +conv takes in: with the token itself a convolution over four
    cross_batch = 1   # train.py --cross_batch: sequences of a batch that an open layer reads as one text in training

    def __init__(self, config, layer):
        super().__init__()
        kind, self.routed, controls = parse_position(config.pos)
        # +nope: every fourth layer, and the last, has neither route nor bias (arXiv 2501.18795, 2504.08719 mix layers so).
        # There content alone decides; elsewhere a distance never trained on hides far keys.
        chosen = layer % 4 == 3 or layer == config.n_layer - 1
        self.open = chosen and "nope" in controls
        if self.open:
            kind, self.routed, controls = Steps, "", [c for c in controls if c not in DECAYS]
        # +conv, in the same layers, open or not (after Primer, arXiv 2109.08668, with three tokens before where it has two):
        # queries, keys and values each add those of the tokens before, weighted by channel, 0 at birth. So a key knows what
        # came before it, and this layer alone finds what followed its like. In all layers it lets the others copy, and an
        # open one learns nothing.
        self.taps = nn.Parameter(torch.zeros(self.n_taps, 3, config.n_head, 1, config.head_dim)) \
            if chosen and "conv" in controls else None
        self.steps = kind(config, layer)
        self.decays = nn.ModuleList(DECAYS[name](config) for name in controls if name in DECAYS)
        # +floor, there: FoX's gate after all, short at birth, that stops at a floor (attention.floored_attention), near and
        # far of equal weight then. So near tokens are told from far ones, which neither drown them nor are out of reach.
        self.floor = None
        if self.open and "floor" in controls:
            self.decays.append(Fox(config, longest=config.block_size // 8))
            self.floor = nn.Parameter(-F.softplus(-self.decays[0].gate.bias.detach()).log())
        # Scalable softmax (arXiv 2501.19399): logits grow with ln n, so that n far tokens cannot outweigh a near one.
        self.logn = nn.Parameter(torch.full((config.n_head,), 1 / math.log(config.block_size + 1))) \
            if "logn" in controls else None

    def forward(self, x, embedding, idx, sequence, state=None):
        """x, embedding: (B, T, C), the layer's normalised input and the normalised token embedding; idx: (B, T) int64;
        sequence: (B,) int64; state: None at the start of a sequence, else the last Frame.state. Returns a Frame."""
        low = product_type(x)
        with torch.autocast(x.device.type, enabled=False):
            x = precise(x)
            length, last_step, last_bias = state or (0, None, None)
            qk, v, last_step = self.steps(x, embedding, idx, sequence, length, last_step, low)
            key_bias, together = None, self.cross_batch if self.training else 1
            if self.decays:
                bias = sum(decay(x) for decay in self.decays)                                 # (1 or B, H, T)
                if together > 1:
                    bias = bias.unflatten(0, (-1, together)).transpose(1, 2).flatten(2)       # (B / n, H, n T)
                key_bias = prefix_sum(bias, last_bias, dim=-1)
                last_bias = key_bias[..., -1:].clone()
            query_scale = self.query_scale(length, idx.size(1) * together, x)
            v, state = v if self.routed == "qkv" else STAY, (length + idx.size(1), last_step, last_bias)
            return Frame(qk, v, key_bias, query_scale, state, together, self.floor)

    def context(self, length):
        """Tokens that a training step reads for one of a text of `length`."""
        return length * self.cross_batch

    def query_scale(self, length, count, x):
        if self.logn is None and self.logn_from is None:
            return None
        seen = torch.arange(length + 1, length + count + 1, dtype=x.dtype, device=x.device)  # query i sees i + 1 keys
        if self.logn is not None:
            return (precise(self.logn)[:, None] * torch.log(seen + 1))[..., None]             # (H, T, 1)
        return (torch.log(seen) / math.log(self.logn_from)).clamp(min=1)[None, :, None]       # (1, T, 1)

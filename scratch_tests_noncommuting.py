"""Non-commuting mechanisms: reflect, orth, path. To be merged into tests.py."""
import math
import shutil

import pytest
import torch
import torch.nn.functional as F

import attention
from attention import Attention, Cache, Path, Reflections, path_attention, prefix_product, solve_steps, unit
from model import GPT, GPTConfig
from positional import LearnedBlocks, make_position

torch.set_num_threads(1)
RAGGED = (1, 2, 31, 32, 33, 63, 64, 65, 127, 129)
ORTHOGONAL = ("reflect_qk", "reflect_qkv", "orth_qk", "orth_qkv")
PATHS = ("path", "path+fox", "path+alibi", "path+logn")
NONCOMMUTING = (*ORTHOGONAL, *PATHS)


def tiny(pos, n_head=12, **kwargs):
    return GPTConfig(**{**dict(pos=pos, block_size=32, vocab_size=61, n_layer=2, n_head=n_head, n_embd=96, dropout=0.0),
                        **kwargs})


def stirred(module, seed=0):
    """The module with every parameter random, so that nothing is a special case of its birth."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            scale = 1.0 if "steps" in name and "skew" not in name else 0.2
            p.copy_(torch.randn(p.shape, generator=generator) * scale)
    return module


def inputs(config, T, B=2, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, config.n_embd, generator=generator, dtype=torch.float64).to(dtype)
    return x, x, torch.zeros(B, T, dtype=torch.long), torch.arange(B)


def reference_steps(position, x, config):
    """Every step as a dense matrix M (B, H, T, D, D) in float64, by the formulas and nothing of the fast path."""
    B, T, C = x.shape
    H, D, steps = config.n_head, config.head_dim, position.steps
    eye = torch.eye(D, dtype=x.dtype)
    if config.pos.startswith("reflect"):
        w = (x @ steps.direction.weight.T).view(B, T, H, D).transpose(1, 2)
        w = w / (w.square().sum(-1, keepdim=True) + 1e-12).sqrt()
        return eye - 2 * w[..., :, None] * w[..., None, :]
    if config.pos.startswith("orth"):
        n, blocks = 4, D // 4
        rates = (x @ steps.skew.weight.T * C ** -0.5 + steps.skew.bias).view(B, T, H, blocks, 6)
        M = torch.zeros(B, H, T, D, D, dtype=x.dtype)
        at = torch.arange(blocks)
        K, pair = {}, 0
        for i in range(n):  # the entries below the diagonal, row by row
            for j in range(i):
                K[i, j], K[j, i] = rates[..., pair], -rates[..., pair]
                pair += 1
        k = torch.stack([torch.stack([K.get((i, j), torch.zeros_like(rates[..., 0])) for j in range(n)], -1)
                         for i in range(n)], -2)                                              # (B, T, H, blocks, n, n)
        cayley = torch.linalg.solve(torch.eye(n, dtype=x.dtype) - k, torch.eye(n, dtype=x.dtype) + k).transpose(1, 2)
        for i in range(n):
            for j in range(n):
                M[:, :, :, at + i * blocks, at + j * blocks] = cayley[..., i, j]
        return M
    u = x @ steps.down.weight.T @ steps.up.weight.T
    w = torch.zeros_like(u)
    for tap in range(3):  # the last tap is the token itself
        shift = 2 - tap
        w = w + F.pad(u, (0, 0, shift, 0))[:, :T] * steps.filter[:, tap]
    w = (w * torch.sigmoid(w)).view(B, T, H, D).transpose(1, 2)
    w = w / (w.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    beta = (2 * torch.sigmoid(x @ steps.beta.weight.T + steps.beta.bias)).transpose(1, 2)
    return eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]


def reference(layer, x, config, window=None):
    """DESIGN section 1: the route (j, i] multiplied out step by step for every pair; output of a whole layer."""
    B, T, C = x.shape
    H, D = config.n_head, config.head_dim
    M = reference_steps(layer.position, x, config)
    q, k, v = (t.view(B, T, H, D).transpose(1, 2) for t in layer.qkv(x).split(C, dim=-1))
    qkv_routed, out = config.pos.split("+")[0].endswith("qkv"), []
    b = torch.zeros(B, H, T, dtype=x.dtype)
    for decay in layer.position.decays:
        b = b + decay(x)
    for i in range(T):
        scores, values = [], []
        P = torch.eye(D, dtype=x.dtype).expand(B, H, D, D)
        bias = torch.zeros(B, H, dtype=x.dtype)
        for j in range(i, -1, -1):
            if window is not None and i - j >= window:
                break
            score = (q[:, :, i, None] @ P @ k[:, :, j, :, None])[..., 0, 0] / math.sqrt(D)
            if layer.position.logn is not None:
                score = score * layer.position.logn * math.log(i + 2)
            scores.append(score + bias)
            values.append((P @ v[:, :, j, :, None])[..., 0] if qkv_routed else v[:, :, j])
            P, bias = P @ M[:, :, j], bias - b[:, :, j]
        weights = torch.stack(scores, -1).softmax(-1)
        out.append((weights[..., None] * torch.stack(values, 2)).sum(2))
    return layer.proj(torch.stack(out, 2).transpose(1, 2).reshape(B, T, C))


def value_and_gradients(module, y, x):
    """y and the gradients of a fixed random functional of it, in the parameters and x, as one dict."""
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    names, parameters = zip(*module.named_parameters())
    gradients = torch.autograd.grad((y * weight).sum(), (x, *parameters), allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(("x", *names), gradients))}


def assert_close(a, b, tolerance):
    assert a.keys() == b.keys()
    for name in a:
        scale = max(b[name].abs().max().item(), 1e-3)
        error = (a[name] - b[name]).abs().max().item() / scale
        assert error < tolerance, f"{name}: {error:.1e}"


def layer_of(pos, n_head=12, dtype=torch.float64, **kwargs):
    config = tiny(pos, n_head, **kwargs)
    return stirred(Attention(config, 0)).to(dtype), config


@pytest.mark.parametrize("pos", NONCOMMUTING)
@pytest.mark.parametrize("T", RAGGED)
def test_noncommuting_reference(pos, T):
    n_head = 12 if T % 2 else 8
    B = 2 if T < 40 else 1
    layer, config = layer_of(pos, n_head)
    x, *rest = inputs(config, T, B)
    x.requires_grad_()
    fast = layer(x, x.detach(), *rest[1:])
    if T > 100:  # the slow loop's graph is large: gradients at the shorter lengths
        with torch.no_grad():
            torch.testing.assert_close(fast, reference(layer, x, config), rtol=0, atol=1e-9 * fast.abs().max().item())
        return
    assert_close(value_and_gradients(layer, fast, x), value_and_gradients(layer, reference(layer, x, config), x), 1e-8)


@pytest.mark.parametrize("pos", ("reflect_qkv", "path+fox"))
@pytest.mark.parametrize("T", (1, 5, 64, 129))
def test_noncommuting_chunk_size(pos, T, monkeypatch):
    layer, config = layer_of(pos, 8)
    results = []
    for chunk in (1, 3, 16, 64, 128, 500):
        monkeypatch.setattr(Reflections, "chunk", chunk)
        monkeypatch.setattr(attention, "path_attention",
                            lambda *args, chunk=chunk: path_attention(*args, chunk=chunk))
        x, *rest = inputs(config, T)
        x.requires_grad_()
        results.append(value_and_gradients(layer, layer(x, x.detach(), *rest[1:]), x))
    for other in results[1:]:
        assert_close(other, results[0], 1e-9)


def test_noncommuting_steps_multiply_on_the_left():
    """A_3 = M_3 M_2 M_1, and what leaves at i after entering at j went along M_i ... M_{j+1}: literals in float64."""
    generator = torch.Generator().manual_seed(2)
    w = unit(torch.randn(1, 1, 3, 4, generator=generator, dtype=torch.float64))
    H = torch.eye(4, dtype=torch.float64) - 2 * w[0, 0, :, :, None] * w[0, 0, :, None, :]
    x = torch.randn(1, 1, 3, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(Reflections(w).leave(x)[0, 0, 2], H[2] @ H[1] @ H[0] @ x[0, 0, 2])
    torch.testing.assert_close(Reflections(w).enter(x)[0, 0, 2], H[0] @ H[1] @ H[2] @ x[0, 0, 2])
    M = torch.linalg.qr(torch.randn(1, 1, 3, 1, 4, 4, generator=generator, dtype=torch.float64))[0]
    torch.testing.assert_close(prefix_product(M)[0, 0, 2, 0], M[0, 0, 2, 0] @ M[0, 0, 1, 0] @ M[0, 0, 0, 0])
    assert (M[0, 0, 1, 0] @ M[0, 0, 0, 0] - M[0, 0, 0, 0] @ M[0, 0, 1, 0]).abs().max() > 0.1  # they do not commute


def test_noncommuting_born_as_rope():
    x = torch.randint(61, (2, 65))
    for pos, like in (("orth_qk", "rope"), ("orth_qkv", "rope_qkv")):
        torch.testing.assert_close(GPT(tiny(pos))(x)[0], GPT(tiny(like))(x)[0], rtol=0, atol=1e-5)


def test_noncommuting_shared_weights_and_own_seeds():
    plain = GPT(tiny("rope")).state_dict()
    for pos in NONCOMMUTING:
        torch.manual_seed(7)
        first = GPT(tiny(pos)).state_dict()
        torch.manual_seed(8)  # the global generator plays no part
        second = GPT(tiny(pos)).state_dict()
        other = GPT(tiny(pos, seed=4)).state_dict()
        assert all(torch.equal(first[name], plain[name]) for name in plain)
        assert all(torch.equal(first[name], second[name]) for name in first)
        own = [name for name in first if name.endswith(("direction.weight", "up.weight", "filter", "beta.weight"))]
        for name in own:
            assert not torch.equal(first[name], other[name])
            assert not torch.equal(first[name], first[name.replace("blocks.0", "blocks.1")]) or "blocks.1" in name


@pytest.mark.parametrize("pos", NONCOMMUTING)
def test_noncommuting_causal(pos):
    model = stirred(GPT(tiny(pos)), 3).eval()
    idx = torch.randint(61, (1, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(idx)[0]
        for p in (1, 3, 7, 15, 31, 32, 63, 64):
            changed = idx.clone()
            changed[:, p:] = (changed[:, p:] + 1) % 61
            after = model(changed)[0]
            assert (after[:, :p] - before[:, :p]).abs().max() < 1e-4
            assert (after[:, p] - before[:, p]).abs().max() > 1e-2


@pytest.mark.parametrize("window", (None, 7))
@pytest.mark.parametrize("pos", NONCOMMUTING)
def test_noncommuting_cached(pos, window):
    """Prompt at once, then one token at a time, then several: as without a cache."""
    model = stirred(GPT(tiny(pos)), 3).double().eval()
    for block in model.blocks:
        block.attention.window = window
    idx = torch.randint(61, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(idx)[0]
        caches, start, pieces = [Cache(150) for _ in model.blocks], 0, []
        for stop in (9, 10, 11, 12, 13, 45, 46, 150):
            pieces.append(model(idx[:, start:stop], caches=caches)[0])
            start = stop
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-8 * whole.abs().max().item())


@pytest.mark.parametrize("pos", ("reflect_qkv", "orth_qkv", "path+fox"))
def test_noncommuting_generate(pos):
    model = stirred(GPT(tiny(pos)), 3).double().eval()
    idx = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(0))
    out = model.generate(idx, 30, temperature=0)
    with torch.no_grad():
        logits = model(out)[0][:, 4:-1, :61]
    assert torch.equal(logits.argmax(-1), out[:, 5:])


@pytest.mark.parametrize("pos", ("reflect_qk", "orth_qkv", "path", "path+fox"))
@pytest.mark.parametrize("window", (1, 5, 40, 129))
def test_noncommuting_window(pos, window, monkeypatch):
    monkeypatch.setattr(attention, "path_attention", lambda *args: path_attention(*args, chunk=16))
    layer, config = layer_of(pos, 8)
    layer.window = window
    x, *rest = inputs(config, 70, 1)
    with torch.no_grad():
        got, wanted = layer(x, *rest), reference(layer, x, config, window)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9 * wanted.abs().max().item())


def test_noncommuting_identity_settings():
    """w = 0, K = 0 and beta = 0 are nope; beta = 2 keeps norms."""
    plain = GPT(tiny("nope")).double()
    idx = torch.randint(61, (2, 65))
    for pos in ("reflect_qk", "reflect_qkv", "orth_qk", "orth_qkv", "path"):
        model = GPT(tiny(pos)).double()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".position." in name:
                    p.zero_()
                if pos == "path" and name.endswith("steps.up.weight"):
                    p.normal_()  # w is free ...
                if name.endswith("steps.beta.bias"):
                    p.fill_(-1000.0)  # ... and beta exactly 0
        torch.testing.assert_close(model(idx)[0], plain(idx)[0], rtol=0, atol=1e-12)

    generator = torch.Generator().manual_seed(0)
    w = F.normalize(torch.randn(1, 2, 129, 8, generator=generator, dtype=torch.float64), dim=-1)
    q, k, v = torch.randn(3, 1, 2, 129, 8, generator=generator, dtype=torch.float64)
    for beta, kept in ((2.0, True), (1.5, False)):
        keys = path_attention(q, k, v, None, Path(w, torch.full((1, 2, 129), beta, dtype=torch.float64)))[1]
        assert bool((keys.norm(dim=-1) - k.norm(dim=-1)).abs().max() < 1e-12) is kept
    # with beta = 2 PaTH is reflect_qk
    layer, config = layer_of("reflect_qk", 8)
    route = Reflections(w)
    wanted = F.scaled_dot_product_attention(route.enter(q), route.enter(k), v, is_causal=True)
    got = path_attention(q, k, v, None, Path(w, torch.full((1, 2, 129), 2.0, dtype=torch.float64)))[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pos", NONCOMMUTING)
def test_noncommuting_zero_w(pos):
    """A w of zero, in a whole sequence or in one token, gives finite values and gradients."""
    for zero in ("input", "weight"):
        layer, config = layer_of(pos, dtype=torch.float32)
        x, *rest = inputs(config, 33, dtype=torch.float32)
        if zero == "input":
            x[:, 7] = 0
        else:
            for p in layer.position.steps.parameters():
                p.data.zero_()
        x.requires_grad_()
        assert all(t.isfinite().all() for t in value_and_gradients(layer, layer(x, x.detach(), *rest[1:]), x).values())


@pytest.mark.parametrize("pos", NONCOMMUTING)
def test_noncommuting_bf16(pos, monkeypatch):
    model = GPT(tiny(pos)).eval()
    for name, p in model.named_parameters():
        if ".position." in name:
            p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    idx = torch.randint(61, (2, 129), generator=torch.Generator().manual_seed(0))
    wanted = model(idx)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(idx)[0]
    assert got.dtype == torch.bfloat16 and (got.float() - wanted).norm() / wanted.norm() < 0.02
    if pos.startswith("path"):
        return
    kept = []  # what attention meets was moved in float32 and rounded once, although the layer ran under autocast
    monkeypatch.setattr(attention, "causal_attention", lambda q, k, v, *rest: kept.append(q) or v)
    layer = model.blocks[0].attention
    x, *rest = inputs(model.config, 65, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x, *rest)
        q = layer.qkv(x)[..., :96].view(2, 65, 12, 8).transpose(1, 2)
    route = layer.position(x, *rest).qk
    assert torch.equal(kept[0], route.enter(q.float()).bfloat16())


@pytest.mark.parametrize("pos", ("reflect_qkv", "orth_qkv", "path", "path+fox"))
def test_noncommuting_compiled(pos):
    layer, config = layer_of(pos, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for T in (1, 33, 65):
        results = []
        for f in (layer, compiled):
            x, *rest = inputs(config, T, 1, dtype=torch.float32)
            x.requires_grad_()
            results.append(value_and_gradients(layer, f(x, x.detach(), *rest[1:]), x))
        assert_close(results[1], results[0], 1e-5)


@pytest.mark.parametrize("pos", ("reflect_qkv", "orth_qkv", "path+fox"))
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_noncommuting_inductor(pos):
    layer, config = layer_of(pos, 2, dtype=torch.float32, n_embd=16)
    torch._dynamo.reset()
    results = []
    for f in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
        x, *rest = inputs(config, 17, 1, dtype=torch.float32)  # 17: one more than vectors of 16
        x.requires_grad_()
        results.append(value_and_gradients(layer, f(x, x.detach(), *rest[1:]), x))
    assert_close(results[1], results[0], 2e-5)


def test_noncommuting_orthogonal_far_away():
    """After 65,536 steps, in one go and continued from a state, A is orthogonal to 1e-5 and norms are kept to 1e-5."""
    T, cut = 65536, 65536 - 100
    for pos in ("reflect_qkv", "orth_qkv"):
        config = tiny(pos, n_head=1, n_embd=32)
        position = make_position(config)
        position.steps.skew.weight.data.normal_(generator=torch.Generator().manual_seed(0)) if "orth" in pos else None
        x, *_ = inputs(config, T, 1, dtype=torch.float32)
        idx, sequence = torch.zeros(1, T, dtype=torch.long), torch.arange(1)
        with torch.no_grad():
            frame = position(x, x, idx, sequence)
            end = frame.state[1]
            defect = end.mT @ end - torch.eye(end.size(-1))
            assert defect.abs().max() < 1e-5
            vectors = torch.randn(1, 1, T, 32, generator=torch.Generator().manual_seed(1))
            for moved in (frame.qk.enter(vectors), frame.qk.leave(vectors)):
                assert (moved.norm(dim=-1) / vectors.norm(dim=-1) - 1).abs().max() < 1e-5
            assert (frame.qk.leave(frame.qk.enter(vectors)) - vectors).abs().max() < 1e-4
            state = position(x[:, :cut], x[:, :cut], idx[:, :cut], sequence).state
            rest = position(x[:, cut:], x[:, cut:], idx[:, cut:], sequence, state)
            assert (rest.state[1] - end).abs().max() < 1e-3
            exact = position.double()(x.double(), x.double(), idx, sequence).state[1]
            assert (end - exact).abs().max() < 2e-3


def test_noncommuting_solve_is_stable():
    """Equal w at every token, beta near 2: powers of the triangle grow like binomials, the inverse does not."""
    w = F.normalize(torch.ones(1, 128, 16), dim=-1)
    beta = torch.full((1, 128), 1.999)
    got = solve_steps(w, beta).double()
    M = torch.eye(128, dtype=torch.float64) + (beta[..., None] * (w @ w.mT)).double().tril(-1)
    wanted = torch.linalg.solve(M, torch.diag_embed(beta.double()))
    assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("setting, word", (
    (dict(pos="path_qkv"), "pos=path"), (dict(pos="path+path"), "pos="), (dict(pos="path+fox+fox"), "fox"),
    (dict(pos="reflect_qkv", value_route="own"), "value_route"), (dict(pos="orth_qkv", angles="table"), "angles"),
    (dict(pos="orth_qk", n_head=16), "n_head"), (dict(pos="orth_qk", n_head=32), "n_head")))
def test_noncommuting_refusals(setting, word):
    with pytest.raises(ValueError, match=word):
        GPTConfig(**{**dict(n_embd=96, n_head=12), **setting})


def test_noncommuting_odd_block_refused(monkeypatch):
    GPTConfig(pos="reflect_qk", n_embd=96, n_head=32), GPTConfig(pos="path", n_embd=96, n_head=32)  # any head size
    monkeypatch.setattr(LearnedBlocks, "n", 3)
    with pytest.raises(ValueError, match="even"):
        GPTConfig(pos="orth_qk", n_embd=96, n_head=8)
    monkeypatch.setattr(LearnedBlocks, "n", 6)
    config = tiny("orth_qkv", 8)  # heads of 12: other even sizes work
    torch.testing.assert_close(GPT(config)(torch.arange(40)[None])[0],
                               GPT(tiny("rope_qkv", 8))(torch.arange(40)[None])[0], rtol=0, atol=1e-5)

